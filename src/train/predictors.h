/* predictors.h - what LowRAM learns once for a model (lowram/learned.h), from what the backend
 * captured of a model that reads texts: starts for the value predictor of each layer and KV head,
 * and the network that scores tokens.
 *
 * Slim's Wlin is of the model's weights where they are found and make keys without a norm between;
 * else of least squares. The warm start is the predictor that does best over the tokens of all
 * texts; the meta-initialisation is moved from there (first-order MAML, a context a task).
 *
 * Errors     0 or negative (neap.h); on failure ret_ values are untouched.
 * Threads    one thread; BLAS has its own. */
#ifndef NEAP_TRAIN_PREDICTORS_H
#define NEAP_TRAIN_PREDICTORS_H

#include <stdint.h>

#include "train.h"

typedef struct neap_predictors neap_predictors;

int neap_predictors_create(neap_predictors **ret_predictors);
void neap_predictors_free(neap_predictors *predictors); /* takes NULL */
/* The context that the trainer was given last. Fails: -ENOMEM. */
int neap_predictors_add(neap_predictors *predictors, const neap_trainer *trainer);

/* Of the context that the trainer was given last: how many tokens there are but for the first,
 * which are like no others; and of a KV head of its i-th layer keys before RoPE and values, f32
 * [tokens][...]. */
uint32_t neap_context_tokens(const neap_trainer *trainer);
typedef struct neap_context_layer {
    uint32_t layer, n_kv_heads, dk, dv;
} neap_context_layer;
neap_context_layer neap_context_layer_at(const neap_trainer *trainer, uint32_t i);
void neap_context_head(const neap_trainer *trainer, uint32_t i, uint32_t head, float *ret_keys,
                       float *ret_values);

typedef struct neap_predictors_result {
    uint32_t n_layers, n_heads;   /* heads of all layers */
    uint32_t n_slim, n_key_norms; /* layers whose Wlin is of the weights; with a norm between */
    uint64_t n_tokens;            /* learned from */
    /* Explained variance of the values within each context, means over contexts and heads: with the
     * context's means, as it is, after two steps of Adam. */
    double linear, warm, meta;
    /* Mean squares of the error of the logarithm of attention to come; untrained: expected to be
     * as it was. 0: no context was long enough. */
    double net_error, untrained_error;
} neap_predictors_result;

/* Learns and writes the file. Fails: -ENODATA (no tokens); errors of neap_learned_write. step is
 * called with 0..1. */
int neap_predictors_write(const neap_predictors *predictors, const char *path, const char *name,
                          uint64_t digest, void (*step)(double done),
                          neap_predictors_result *ret_result);
#endif
