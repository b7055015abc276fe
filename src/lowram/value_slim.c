/* value_slim.c - the linear map from keys to values that the model's own projections give (Slim
 * attention). */
#include <cblas.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "value_int.h"

/* LAPACK, of Fortran: columns first, so that an eigenvector is a row here. */
void dsyevd_(const char *jobz, const char *uplo, const int *n, double *a, const int *lda, double *w,
             double *work, const int *lwork, int *iwork, const int *liwork, int *info);

#define RANK 1e-6 /* of the largest eigenvalue: what is below counts as none */

static int eigen(double *a, int n, double *values) {
    const int ask = -1;
    int info = 0, int_size = 0;
    double size = 0;
    dsyevd_("V", "L", &n, a, &n, values, &size, &ask, &int_size, &ask, &info);
    const int work_size = (int)size;
    double *work = malloc((size_t)work_size * sizeof *work);
    int *int_work = malloc((size_t)int_size * sizeof *int_work);
    if (work && int_work && !info)
        dsyevd_("V", "L", &n, a, &n, values, work, &work_size, int_work, &int_size, &info);
    const int err = !work || !int_work ? -ENOMEM : info ? -EDOM : 0;
    free(work);
    free(int_work);
    return err;
}

/* With G = W_K' W_K = E diag(l) E': pinv(W_K) W_V = E diag(1 / l) E' (W_K' W_V). */
int neap_value_slim(const float *k_gram, const float *kv_cross, uint32_t d_lin, uint32_t dv,
                    float *ret_wlin) {
    const size_t n = d_lin, n_cross = n * dv;
    double *vectors = malloc((n * n + n + 2 * n_cross) * sizeof *vectors), sum = 0;
    if (!vectors) return -ENOMEM;
    double *values = vectors + n * n, *cross = values + n, *turned = cross + n_cross;
    for (size_t i = 0; i < n * n; i++)
        sum += fabs(vectors[i] = (double)k_gram[i]);
    for (size_t i = 0; i < n_cross; i++)
        sum += fabs(cross[i] = (double)kv_cross[i]);
    int err = isfinite(sum) ? eigen(vectors, (int)n, values) : -EDOM;
    if (!err) {
        cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)n, (int)dv, (int)n, 1, vectors,
                    (int)n, cross, (int)dv, 0, turned, (int)dv);
        for (size_t i = 0; i < n; i++) {
            const bool counts = values[i] > RANK * values[n - 1];
            cblas_dscal((int)dv, counts ? 1 / values[i] : 0, turned + i * dv, 1);
        }
        cblas_dgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)n, (int)dv, (int)n, 1, vectors,
                    (int)n, turned, (int)dv, 0, cross, (int)dv);
        for (size_t i = 0; i < n_cross; i++)
            ret_wlin[i] = (float)cross[i];
    }
    free(vectors);
    return err;
}
