/* basis.c - see basis.h. */
#include "basis.h"

#include <cblas.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* LAPACK, of Fortran: columns first, so that an eigenvector is a row here. */
void dsyevd_(const char *jobz, const char *uplo, const int *n, double *a, const int *lda, double *w,
             double *work, const int *lwork, int *iwork, const int *liwork, int *info);

void neap_covariance_add(double *cov, uint32_t n, float *rows, uint32_t n_rows, float *scratch) {
    if (n_rows == 0) return;
    float *mean = scratch;
    memset(mean, 0, n * sizeof *mean);
    for (uint32_t r = 0; r < n_rows; r++)
        for (uint32_t c = 0; c < n; c++)
            mean[c] += rows[(size_t)r * n + c];
    for (uint32_t r = 0; r < n_rows; r++)
        for (uint32_t c = 0; c < n; c++)
            rows[(size_t)r * n + c] -= mean[c] / (float)n_rows;
    cblas_ssyrk(CblasRowMajor, CblasLower, CblasTrans, (int)n, (int)n_rows, 1, rows, (int)n, 0,
                scratch, (int)n);
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j <= i; j++)
            cov[i * n + j] += (double)scratch[i * n + j];
}

int neap_eigen(double *a, uint32_t n, double *values) {
    const int size = (int)n, ask = -1;
    int info = 0, int_size = 0;
    double size_wanted = 0, sum = 0;
    for (size_t i = 0; i < (size_t)n * n; i++)
        sum += a[i];
    if (!isfinite(sum)) return -EDOM;
    dsyevd_("V", "L", &size, a, &size, values, &size_wanted, &ask, &int_size, &ask, &info);
    const int work_size = (int)size_wanted;
    double *work = malloc((size_t)work_size * sizeof *work);
    int *int_work = malloc((size_t)int_size * sizeof *int_work);
    if (work && int_work && !info)
        dsyevd_("V", "L", &size, a, &size, values, work, &work_size, int_work, &int_size, &info);
    const int err = !work || !int_work ? -ENOMEM : info ? -EDOM : 0;
    free(work);
    free(int_work);
    return err;
}

/* out = v' diag v, v row by row. */
static void rebuild(const double *vectors, const double *diagonal, uint32_t n, double *scaled,
                    double *out) {
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < n; j++)
            scaled[(size_t)i * n + j] = vectors[(size_t)i * n + j] * diagonal[i];
    cblas_dgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)n, (int)n, (int)n, 1, vectors, (int)n,
                scaled, (int)n, 0, out, (int)n);
}

int neap_metric_roots(const double *m, uint32_t n, double floor, double *root, double *inverse) {
    const size_t size = (size_t)n * n;
    double *vectors = malloc((2 * size + 2 * n) * sizeof *vectors);
    if (!vectors) return -ENOMEM;
    double *scaled = vectors + size, *values = scaled + size, *diagonal = values + n;
    memcpy(vectors, m, size * sizeof *vectors);
    const int err = neap_eigen(vectors, n, values);
    const double largest = err ? 0 : values[n - 1];
    for (uint32_t i = 0; i < n && !err; i++)
        values[i] = largest > 0 ? fmax(values[i], floor * largest) : 1;
    if (!err) {
        for (uint32_t i = 0; i < n; i++)
            diagonal[i] = sqrt(values[i]);
        rebuild(vectors, diagonal, n, scaled, root);
        for (uint32_t i = 0; i < n; i++)
            diagonal[i] = 1 / sqrt(values[i]);
        rebuild(vectors, diagonal, n, scaled, inverse);
    }
    free(vectors);
    return err;
}

/* out = a S, a and out [n][n]; S is symmetric. */
static void times_metric(const double *a, uint32_t n, const neap_metric_block *blocks,
                         uint32_t n_blocks, int use_inverse, double *out) {
    uint32_t at = 0;
    for (uint32_t b = 0; b < n_blocks; at += blocks[b++].n)
        cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)n, (int)blocks[b].n,
                    (int)blocks[b].n, 1, a + at, (int)n,
                    use_inverse ? blocks[b].inverse : blocks[b].root, (int)blocks[b].n, 0, out + at,
                    (int)n);
}

static void transpose(double *a, uint32_t n) {
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < i; j++) {
            const double held = a[i * n + j];
            a[i * n + j] = a[j * n + i];
            a[j * n + i] = held;
        }
}

/* Rows in reverse order, as f32. */
static void reversed(const double *a, uint32_t n, float *out) {
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < n; j++)
            out[i * n + j] = (float)a[(n - 1 - i) * n + j];
}

int neap_basis_make(double *cov, uint32_t n, const neap_metric_block *blocks, uint32_t n_blocks,
                    float *ft, float *g, float *sd) {
    double *other = malloc((size_t)n * n * sizeof *other), *values = malloc(n * sizeof *values);
    int err = other && values ? 0 : -ENOMEM;
    if (!err) {
        times_metric(cov, n, blocks, n_blocks, 0, other);
        transpose(other, n);
        times_metric(other, n, blocks, n_blocks, 0, cov);
        err = neap_eigen(cov, n, values);
    }
    if (!err) {
        times_metric(cov, n, blocks, n_blocks, 0, other);
        reversed(other, n, ft);
        times_metric(cov, n, blocks, n_blocks, 1, other);
        reversed(other, n, g);
        for (uint32_t i = 0; i < n; i++)
            sd[i] = (float)sqrt(fmax(values[n - 1 - i], 0));
    }
    free(other);
    free(values);
    return err;
}

/* ---- spread ---- */

#define REACH 3.5f /* deviations */

static int descending(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

int neap_spread(const float *rows, uint32_t n_rows, const float *ft, uint32_t n, float trim,
                float *sd) {
    float *y = malloc((size_t)n_rows * n * sizeof *y), *beyond = malloc(n_rows * sizeof *beyond);
    float *order = malloc(n_rows * sizeof *order);
    double *sum = malloc(n * sizeof *sum);
    const int err = y && beyond && order && sum ? 0 : -ENOMEM;
    if (!err) {
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)n_rows, (int)n, (int)n, 1, rows,
                    (int)n, ft, (int)n, 0, y, (int)n);
        for (uint32_t r = 0; r < n_rows; r++) {
            beyond[r] = 0;
            for (uint32_t c = 0; c < n; c++) {
                const float out = fabsf(y[(size_t)r * n + c]) - REACH * sd[c];
                beyond[r] += out > 0 ? out * out : 0;
            }
        }
        memcpy(order, beyond, n_rows * sizeof *order);
        qsort(order, n_rows, sizeof *order, descending);
        const float limit = order[(size_t)(trim * (float)(n_rows - 1))];
        uint32_t n_kept = 0;
        memset(sum, 0, n * sizeof *sum);
        for (uint32_t r = 0; r < n_rows; r++) {
            if (beyond[r] > limit) continue;
            n_kept++;
            for (uint32_t c = 0; c < n; c++)
                sum[c] += (double)(y[(size_t)r * n + c] * y[(size_t)r * n + c]);
        }
        for (uint32_t c = 0; c < n; c++)
            sd[c] = (float)sqrt(sum[c] / n_kept);
    }
    free(y);
    free(beyond);
    free(order);
    free(sum);
    return err;
}
