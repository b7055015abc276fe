/* subspace.h - the r directions that keep most of a matrix: its first right singular vectors.
 * Two ways to the same: eigenvectors of the Gram matrix, exact but for rounding and cubic in the
 * columns; and the randomised SVD (Halko et al.) whose orthonormalisations are shifted Cholesky-QR
 * (Fukaya et al.), in time linear in them. On BLAS and LAPACK. */
#ifndef NEAP_LOWRAM_SUBSPACE_H
#define NEAP_LOWRAM_SUBSPACE_H

#include <stddef.h>
#include <stdint.h>

/* m: [n_rows][n_columns]; r at most n_columns. ret_basis: [r][n_columns], orthonormal rows in the
 * order of what they keep. Fails: -EDOM (an element is not finite, LAPACK gave up); -ENOMEM. */
int neap_subspace_gram(const float *m, size_t n_rows, uint32_t n_columns, uint32_t r,
                       float *ret_basis);
int neap_subspace_randomised(const float *m, size_t n_rows, uint32_t n_columns, uint32_t r,
                             uint64_t seed, float *ret_basis);
/* Whether the second is the faster way. */
int neap_subspace_is_wide(uint32_t n_columns, uint32_t r);

/* The columns of y[n_rows][n_columns], n_rows >= n_columns, become orthonormal; they span what they
 * did, and where they were dependent, more. scratch: n_columns^2. Fails: -EDOM. */
int neap_subspace_orthonormalise(float *y, size_t n_rows, uint32_t n_columns, float *scratch);
#endif
