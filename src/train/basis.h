/* basis.h - the linear algebra of a basis. Matrices are row-major, f64 unless said.
 * Errors     0, -ENOMEM, or -EDOM: the eigenvalues of a matrix were not found (it holds a NaN). */
#ifndef NEAP_TRAIN_BASIS_H
#define NEAP_TRAIN_BASIS_H

#include <stdint.h>

/* cov[n][n] += r' r of the rows[n_rows][n] around their mean, which is taken off them; only the
 * lower triangle. Needs n * n floats of scratch. */
void neap_covariance_add(double *cov, uint32_t n, float *rows, uint32_t n_rows, float *scratch);

/* Eigenvalues, ascending; row i of a becomes the eigenvector of values[i]. */
int neap_eigen(double *a, uint32_t n, double *values);

/* root = m^(1/2) and inverse = m^(-1/2) of a symmetric positive semi-definite m[n][n] whose
 * eigenvalues are raised to at least floor times the largest; of the identity where m is 0. */
int neap_metric_roots(const double *m, uint32_t n, double floor, double *root, double *inverse);

/* A block of the diagonal of S. */
typedef struct neap_metric_block {
    uint32_t n;
    const double *root, *inverse; /* [n][n] */
} neap_metric_block;

/* Components in descending order: ft[n][n] row c is (S b_c)', g[n][n] row c is b_c' S^-1 where b_c
 * are the eigenvectors of S cov S; sd[c] the square root of the eigenvalue. cov is overwritten. */
int neap_basis_make(double *cov, uint32_t n, const neap_metric_block *blocks, uint32_t n_blocks,
                    float *ft, float *g, float *sd);

/* Standard deviations of the components of rows (around their means) without the trim worst of
 * them: those that stick out of what the codes reach, by the sum of squares beyond reach
 * deviations. sd holds the untrimmed ones before. */
int neap_spread(const float *rows, uint32_t n_rows, const float *ft, uint32_t n, float trim,
                float *sd);
#endif
