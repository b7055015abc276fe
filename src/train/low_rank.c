/* low_rank.c - see low_rank.h. */
#include "low_rank.h"

#include <cblas.h>
#include <errno.h>
#include <stdlib.h>

#include "half.h"
#include "subspace.h"

static void round_f16(float *x, size_t n) {
    for (size_t i = 0; i < n; i++)
        x[i] = neap_f32_of_f16(neap_f16_of_f32(x[i]));
}

int neap_low_rank(float *rows, size_t n_rows, uint32_t n, uint32_t rank) {
    float *a = malloc(n_rows * rank * sizeof *a), *b = malloc((size_t)rank * n * sizeof *b);
    const int err = a && b ? neap_subspace_gram(rows, n_rows, n, rank, b) : -ENOMEM;
    if (!err) {
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)n_rows, (int)rank, (int)n, 1,
                    rows, (int)n, b, (int)n, 0, a, (int)rank);
        round_f16(a, n_rows * rank);
        round_f16(b, (size_t)rank * n);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)n_rows, (int)n, (int)rank, 1, a,
                    (int)rank, b, (int)n, 0, rows, (int)n);
    }
    free(a);
    free(b);
    return err;
}
