/* train.h - a klt model (codec/klt.h) from what the backend captured of a model that reads texts.
 *
 * For each group of columns: the covariance of the rows around the mean of their chunk, and how
 * much an error of each column weighs. The weight is the first-order error of what attention adds
 * to the residual stream: with weights p, a key's error e moves the score by q.e and the output by
 * p q.e W_O(v - o), a value's error moves it by p W_O e; relative to the length of the residual
 * that it is added to. Its square, over queries and cells, is a quadratic form for each KV head:
 * M_K, M_V. S = M^(1/2); the basis is the eigenvectors of S Cov S.
 *
 * Errors     0 or negative (neap.h); on failure ret_ values are untouched.
 * Threads    one thread; BLAS has its own. */
#ifndef NEAP_TRAIN_TRAIN_H
#define NEAP_TRAIN_TRAIN_H

#include <stddef.h>
#include <stdint.h>

#include "klt.h"

typedef struct neap_trainer neap_trainer;

int neap_trainer_create(neap_trainer **ret_trainer);
void neap_trainer_free(neap_trainer *trainer); /* takes NULL */
/* The records (fmt/capture.h) of one fresh context. Fails: NEAP_E_CORRUPT (not such records, or of
 * another model than those before); -ENOTSUP (keys turned in a way that is not known); -ENOMEM. */
int neap_trainer_add(neap_trainer *trainer, const void *records, size_t n_bytes);

typedef struct neap_trainer_info {
    uint64_t n_tokens;   /* that the covariance has seen */
    uint32_t n_layers;   /* with a growing cache */
    uint32_t n_left;     /* others: sliding-window caches */
    bool has_grams;      /* W_O was found; otherwise values are weighed alike */
    bool has_residuals;  /* the residual stream was found; otherwise layers are weighed alike */
    uint64_t cell_bytes; /* f16 bytes of a token in all of those layers */
} neap_trainer_info;
neap_trainer_info neap_trainer_tell(const neap_trainer *trainer);

enum { NEAP_TRAIN_TOKENS_MIN = 2 * NEAP_KLT_ROWS };

/* The bases of a profile. Fails: -ENODATA (fewer tokens than that); -ENOTSUP (a layer, or a head,
 * has more columns than a group may); -ENOMEM. step is called with 0..1. */
typedef struct neap_bases neap_bases;
int neap_bases_make(const neap_trainer *trainer, uint32_t profile, void (*step)(double done),
                    neap_bases **ret_bases);
void neap_bases_free(neap_bases *bases); /* takes NULL */

typedef struct neap_bases_result {
    uint32_t n_blocks, n_groups;
    uint64_t n_columns, n_kept;
    double distortion; /* share of the weighed energy that is lost, as allocation expects it */
} neap_bases_result;

/* Allocates bits for the ratio and writes the model file. Fails: NEAP_E_BOUND (the ratio is out of
 * reach); errors of neap_klt_model_write. */
int neap_bases_write(const neap_bases *bases, double ratio, const char *path, const char *name,
                     uint64_t digest, neap_bases_result *ret_result);
#endif
