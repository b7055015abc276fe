/* low_rank.h - a matrix and the best of low rank: what xKV keeps of the keys, or of the values, of
 * adjacent layers (a reference of `neap bench fidelity`, no codec).
 * Errors     0, -ENOMEM, or -EDOM (an element is not finite). */
#ifndef NEAP_TRAIN_LOW_RANK_H
#define NEAP_TRAIN_LOW_RANK_H

#include <stddef.h>
#include <stdint.h>

/* rows[n_rows][n], row-major, become A B with A [n_rows][rank], B [rank][n] orthonormal before both
 * are rounded to f16; 1 <= rank <= n. */
int neap_low_rank(float *rows, size_t n_rows, uint32_t n, uint32_t rank);
#endif
