/* subspace.c - see subspace.h. */
#include "subspace.h"

#include <cblas.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "value_int.h"

/* LAPACK, of Fortran: columns first, so that an eigenvector is a row here. */
void ssyevd_(const char *jobz, const char *uplo, const int *n, float *a, const int *lda, float *w,
             float *work, const int *lwork, int *iwork, const int *liwork, int *info);
void spotrf_(const char *uplo, const int *n, float *a, const int *lda, int *info);

enum {
    GRAM_COLUMNS = 1024, /* up to here the Gram matrix is the faster way */
    SPARE = 16,          /* directions that the randomised SVD looks for beyond those asked for */
    POWERS = 2,
};

/* ---- Gram matrix ---- */

/* Eigenvectors as rows, of ascending values. */
static int eigen(float *a, uint32_t n) {
    const int size = (int)n, ask = -1;
    int info = 0, int_size = 0;
    float size_wanted = 0, *values = malloc(n * sizeof *values);
    if (!values) return -ENOMEM;
    ssyevd_("V", "L", &size, a, &size, values, &size_wanted, &ask, &int_size, &ask, &info);
    /* What is told as an f32 may have been rounded down. */
    const int work_size = (int)((double)size_wanted * 1.001) + 1;
    float *work = malloc((size_t)work_size * sizeof *work);
    int *int_work = malloc((size_t)int_size * sizeof *int_work);
    if (work && int_work && !info)
        ssyevd_("V", "L", &size, a, &size, values, work, &work_size, int_work, &int_size, &info);
    const int err = !work || !int_work ? -ENOMEM : info ? -EDOM : 0;
    free(work);
    free(int_work);
    free(values);
    return err;
}

/* The lower triangle of m' m, as LAPACK counts it: the upper one here. */
static int gram(const float *m, size_t n_rows, uint32_t n, float *ret_gram) {
    cblas_ssyrk(CblasRowMajor, CblasUpper, CblasTrans, (int)n, (int)n_rows, 1, m, (int)n, 0,
                ret_gram, (int)n);
    float trace = 0;
    for (size_t i = 0; i < n; i++)
        trace += ret_gram[i * n + i];
    return isfinite(trace) ? 0 : -EDOM;
}

int neap_subspace_gram(const float *m, size_t n_rows, uint32_t n_columns, uint32_t r,
                       float *ret_basis) {
    const size_t n = n_columns;
    float *g = malloc(n * n * sizeof *g);
    int err = g ? gram(m, n_rows, n_columns, g) : -ENOMEM;
    if (!err) err = eigen(g, n_columns);
    for (size_t i = 0; i < r && !err; i++)
        memcpy(ret_basis + i * n, g + (n - 1 - i) * n, n * sizeof *g);
    free(g);
    return err;
}

/* ---- randomised ---- */

/* y := y R^-1 with y' y + shift = R' R. */
static int cholesky_step(float *y, size_t n_rows, uint32_t n, double shift, float *r) {
    const int size = (int)n;
    int info = 0, err = gram(y, n_rows, n, r);
    if (err) return err;
    float trace = 0;
    for (size_t i = 0; i < n; i++)
        trace += r[i * n + i];
    for (size_t i = 0; i < n; i++)
        r[i * n + i] += (float)(shift * (double)trace);
    spotrf_("L", &size, r, &size, &info);
    if (info) return -EDOM;
    cblas_strsm(CblasRowMajor, CblasRight, CblasUpper, CblasNoTrans, CblasNonUnit, (int)n_rows,
                size, 1, r, size, y, size);
    return 0;
}

int neap_subspace_orthonormalise(float *y, size_t n_rows, uint32_t n_columns, float *scratch) {
    /* The first step, shifted, is sure to succeed and leaves a condition of some 2^12 at most, the
     * next ones finish; a column that is all but lost in rounding may take one more. */
    const double shift = 0x1p-22 * sqrt((double)n_columns);
    int err = cholesky_step(y, n_rows, n_columns, shift, scratch), n_plain = 0;
    for (int step = 0; step < 8 && !err && n_plain < 2; step++) {
        const int failed = cholesky_step(y, n_rows, n_columns, 0, scratch);
        n_plain += !failed;
        if (failed) err = cholesky_step(y, n_rows, n_columns, shift, scratch);
    }
    return err ? err : n_plain == 2 ? 0 : -EDOM;
}

int neap_subspace_is_wide(uint32_t n_columns, uint32_t r) {
    return n_columns > GRAM_COLUMNS && r + SPARE < n_columns / 2;
}

/* Directions of m's rows that the powers of m' m pull out of random ones: ret_z [n_columns][l] with
 * orthonormal columns; y [n_rows][l]. */
static int range(const float *m, size_t n_rows, uint32_t n_columns, uint32_t l, uint64_t seed,
                 float *y, float *scratch, float *ret_z) {
    neap_value_normal(seed, 1, (size_t)n_columns * l, ret_z);
    int err = neap_subspace_orthonormalise(ret_z, n_columns, l, scratch);
    for (int power = 0; power <= POWERS && !err; power++) {
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)n_rows, (int)l, (int)n_columns,
                    1, m, (int)n_columns, ret_z, (int)l, 0, y, (int)l);
        err = neap_subspace_orthonormalise(y, n_rows, l, scratch);
        if (err) break;
        cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)n_columns, (int)l, (int)n_rows, 1,
                    m, (int)n_columns, y, (int)l, 0, ret_z, (int)l);
        err = neap_subspace_orthonormalise(ret_z, n_columns, l, scratch);
    }
    return err;
}

int neap_subspace_randomised(const float *m, size_t n_rows, uint32_t n_columns, uint32_t r,
                             uint64_t seed, float *ret_basis) {
    const size_t n = n_columns;
    size_t l = r + SPARE;
    if (l > n) l = n;
    if (l > n_rows || l < r) return neap_subspace_gram(m, n_rows, n_columns, r, ret_basis);
    float *y = malloc((n_rows * l + n * l + l * l) * sizeof *y);
    if (!y) return -ENOMEM;
    float *z = y + n_rows * l, *g = z + n * l;
    int err = range(m, n_rows, n_columns, (uint32_t)l, seed, y, g, z);
    if (!err) { /* the best of what they span: Rayleigh-Ritz */
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)n_rows, (int)l, (int)n, 1, m,
                    (int)n, z, (int)l, 0, y, (int)l);
        err = gram(y, n_rows, (uint32_t)l, g);
    }
    if (!err) err = eigen(g, (uint32_t)l);
    if (!err) { /* rows of g in reverse order times z' */
        for (size_t i = 0; i < r; i++)
            cblas_sgemv(CblasRowMajor, CblasNoTrans, (int)n, (int)l, 1, z, (int)l,
                        g + (l - 1 - i) * l, 1, 0, ret_basis + i * n, 1);
    }
    free(y);
    /* Nothing to find: all rows alike, or fewer different ones than directions. */
    return err == -EDOM ? neap_subspace_gram(m, n_rows, n_columns, r, ret_basis) : err;
}
