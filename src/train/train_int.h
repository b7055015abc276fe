/* train_int.h - what the files of src/train share.
 *   text.c        the records of one context, by layer
 *   importance.c  how much errors of keys and values weigh
 *   basis.c       linear algebra
 *   trainer.c     what is kept of all texts
 *   bases.c       bases of a profile, and the model file */
#ifndef NEAP_TRAIN_TRAIN_INT_H
#define NEAP_TRAIN_TRAIN_INT_H

#include <stdbool.h>

#include "capture.h"
#include "rope.h"
#include "train.h"

/* One layer of the model, and its part of the context at hand. */
typedef struct neap_train_layer {
    uint32_t layer; /* the model's number */
    neap_capture_layer shape;
    float *freq_factors;
    float *grams; /* [n_heads][head_v][head_v]; NULL: W_O was not found */
    neap_klt_rope rope;
    /* Weights of the keys and of the values, [n_kv_heads * head][n_inputs]; NULL: not found. */
    float *w_k, *w_v;
    uint32_t n_inputs;
    bool has_key_norm; /* between them and the keys */

    /* Of the context: n tokens in the order of their positions from first_position on. */
    uint32_t n, n_queries;
    int32_t *positions;
    uint16_t *k, *v; /* [n][n_kv_heads * head] */
    float *q, *residual;
    int32_t *query_positions;
    uint32_t cap, cap_queries;

    /* Of all contexts: the quadratic forms M_K, M_V, and how many queries they are summed over. */
    double *k_form; /* [n_kv_heads][head_k][head_k] */
    double *v_form; /* [n_kv_heads][head_v][head_v] */
    uint64_t n_seen;
} neap_train_layer;

/* Columns whose covariance is kept: heads [first_head, first_head + n_heads) of adjacent layers, in
 * the order of klt.h. */
typedef struct neap_train_set {
    uint32_t first, n_layers; /* of the trainer's layers */
    uint32_t first_head, n_heads;
    uint32_t n; /* columns */
    double *cov;
    float *sample; /* [n_sample][n] rows around their means */
} neap_train_set;

struct neap_trainer {
    neap_train_layer *layers; /* ascending */
    uint32_t n_layers, cap_layers, n_left;
    neap_train_set *sets; /* NULL before the first context */
    uint32_t n_sets;
    uint64_t n_rows;               /* in the covariances */
    uint32_t n_sample, cap_sample; /* rows of each set */
    bool lacks_residuals;          /* of the first layer, in some context */
    uint32_t stride, n_chunks;     /* every stride-th chunk is in the sample */
};

/* text.c: takes the records into the layers; what they held of the context before is dropped. */
int neap_train_read(neap_trainer *trainer, const void *records, size_t n_bytes);
void neap_train_layer_free(neap_train_layer *layer);

/* importance.c: adds what the context shows to the layer's forms. */
int neap_train_weigh(neap_train_layer *layer);

/* trainer.c */
uint32_t neap_train_columns(const neap_train_layer *layer, uint32_t n_layers, uint32_t n_heads);
bool neap_train_alike(const neap_train_layer *a, const neap_train_layer *b);
#endif
