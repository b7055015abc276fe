/* value_int.h - what the files of the value predictor share. All of it sees rows as fits do, see
 * value.h. */
#ifndef NEAP_LOWRAM_VALUE_INT_H
#define NEAP_LOWRAM_VALUE_INT_H

#include "adam.h"
#include "value.h"

enum { NEAP_VALUE_BLOCK = 1024 }; /* rows at once: what a block computes stays in the cache */

typedef struct neap_value_rows {
    const float *k, *v; /* [n][row], [n][dv] */
    size_t n;
} neap_value_rows;

/* hidden[n][stride] = relu(W1 k + b1), n at most NEAP_VALUE_BLOCK. */
void neap_value_hidden(const neap_value *value, const float *keys, size_t n, float *hidden,
                       size_t stride);

/* Copies with mean 0 and deviation 1, malloc'd in one piece that begins at k. Fails: -EDOM,
 * -ENOMEM.
 */
int neap_value_standardise(const neap_value_shape *shape, const neap_value_norm *norm,
                           const neap_value_rows *rows, neap_value_rows *ret_rows);
/* The same function of keys as they are, and of keys as fits see them. */
void neap_value_to_plain(const neap_value_norm *norm, neap_value *value);
void neap_value_to_standard(const neap_value_norm *norm, neap_value *value);

/* Normal deviates, by seed and count. */
void neap_value_normal(uint64_t seed, float deviation, size_t n, float *ret_values);
/* He: W1, W2; b1, b2 are 0. */
void neap_value_randomise(neap_value *value, uint64_t seed);

/* value_adam.c: gradient of |f(K) - V|^2 / n by all parameters, laid out as they are. Returns the
 * loss. only_hidden: only those of W1 and b1 count. scratch: neap_value_scratch(shape) floats. */
size_t neap_value_scratch(const neap_value_shape *shape);
double neap_value_gradient(const neap_value *value, const neap_value_rows *rows, bool only_hidden,
                           float *scratch, float *ret_gradient);

int neap_value_fit_adam(const neap_value_rows *rows, const neap_value_options *options,
                        neap_value *io);

/* value_ridge.c: the readout [Wlin, W2, b2] for the W1, b1 of the predictor (without Wlin where
 * that is fixed). *ret_error: |f(K) - V|^2 / n. */
int neap_value_readout(const neap_value_rows *rows, const neap_value_options *options,
                       neap_value *io, double *ret_error);
int neap_value_fit_ridge(const neap_value_rows *rows, const neap_value_options *options,
                         neap_value *io);
#endif
