/* low_rank.c - see low_rank.h. B holds the first right singular vectors, from the eigenvectors of
 * the Gram matrix: in f64, so that squaring costs nothing that f16 factors could show. */
#include "low_rank.h"

#include <cblas.h>
#include <errno.h>
#include <stdlib.h>

#include "basis.h"
#include "half.h"

static void round_f16(float *x, size_t n) {
    for (size_t i = 0; i < n; i++)
        x[i] = neap_f32_of_f16(neap_f16_of_f32(x[i]));
}

/* The lower triangle of rows' rows. */
static int gram_of(const float *rows, size_t n_rows, uint32_t n, double *gram) {
    double *wide = malloc(n_rows * n * sizeof *wide);
    if (!wide) return -ENOMEM;
    for (size_t i = 0; i < n_rows * n; i++)
        wide[i] = (double)rows[i];
    cblas_dsyrk(CblasRowMajor, CblasLower, CblasTrans, (int)n, (int)n_rows, 1, wide, (int)n, 0,
                gram, (int)n);
    free(wide);
    return 0;
}

int neap_low_rank(float *rows, size_t n_rows, uint32_t n, uint32_t rank) {
    double *gram = calloc((size_t)n * n, sizeof *gram), *values = malloc(n * sizeof *values);
    float *a = malloc(n_rows * rank * sizeof *a), *b = malloc((size_t)rank * n * sizeof *b);
    int err = gram && values && a && b ? gram_of(rows, n_rows, n, gram) : -ENOMEM;
    for (size_t i = 0; i < n && !err; i++) /* neap_eigen may look at either triangle */
        for (size_t j = 0; j < i; j++)
            gram[j * n + i] = gram[i * n + j];
    if (!err) err = neap_eigen(gram, n, values);
    if (!err) {
        for (size_t r = 0; r < rank; r++) /* eigenvalues ascend */
            for (size_t c = 0; c < n; c++)
                b[r * n + c] = (float)gram[(n - 1 - r) * n + c];
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)n_rows, (int)rank, (int)n, 1,
                    rows, (int)n, b, (int)n, 0, a, (int)rank);
        round_f16(a, n_rows * rank);
        round_f16(b, (size_t)rank * n);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)n_rows, (int)n, (int)rank, 1, a,
                    (int)rank, b, (int)n, 0, rows, (int)n);
    }
    free(gram);
    free(values);
    free(a);
    free(b);
    return err;
}
