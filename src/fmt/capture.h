/* capture.h - what the backend writes with NEAP_CAPTURE for `neap train`, which reads it at once on
 * the same machine: a stream of records in the machine's own byte order, each a head and n_bytes.
 *
 *   NEAP_CAPTURE_LAYER   neap_capture_layer
 *                        f32 freq_factors[n_freq_factors]
 *                        f32 gram[n_grams][head_v][head_v]
 *   NEAP_CAPTURE_TOKENS  neap_capture_tokens
 *                        i32 positions[n_tokens]
 *                        f16 k[n_tokens][n_kv_heads * head_k]      as they lie in the cache
 *                        f16 v[n_tokens][n_kv_heads * head_v]
 *                        of the tokens whose position is 0 modulo Q_STEP, in order:
 *                          f32 q[n_queries][n_heads][head_k]       after RoPE
 *                          f32 residual[n_queries]                 squared length of what the
 *                              attention's output is added to; 0: not known
 *
 *   NEAP_CAPTURE_PROJECTIONS  neap_capture_projections
 *                        f32 w_k[n_kv_heads * head_k][n_inputs]
 *                        f32 w_v[n_kv_heads * head_v][n_inputs]
 *
 * A layer's record comes before its first tokens, that of its projections right after it. */
#ifndef NEAP_FMT_CAPTURE_H
#define NEAP_FMT_CAPTURE_H

#include <stdint.h>

enum { NEAP_CAPTURE_LAYER = 1, NEAP_CAPTURE_TOKENS = 2, NEAP_CAPTURE_PROJECTIONS = 3 };
enum { NEAP_CAPTURE_Q_STEP = 16 };

typedef struct neap_capture_head {
    uint32_t kind, layer; /* the model's number of the layer */
    uint64_t n_bytes;     /* of what follows */
} neap_capture_head;

typedef struct neap_capture_layer {
    uint32_t n_heads, n_kv_heads, head_k, head_v;
    uint32_t n_cells; /* of a stream: a sliding-window cache has fewer than the others */
    float scale;      /* of the scores */
    /* RoPE of the keys, as in the graph; n_dims 0: none. */
    int32_t rope_mode, rope_dims, rope_offset, n_ctx_orig;
    float freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow;
    uint32_t n_freq_factors;
    uint32_t n_grams; /* n_heads: W_O' W_O of each head's columns; 0: W_O was not found */
} neap_capture_layer;

/* The weights that keys and values are made with from the same inputs, before biases and RoPE. */
typedef struct neap_capture_projections {
    uint32_t n_inputs;     /* 0: not found; no weights follow */
    uint32_t has_key_norm; /* 1: between these weights and the keys lies a norm */
} neap_capture_projections;

typedef struct neap_capture_tokens {
    uint32_t n_tokens, n_queries;
} neap_capture_tokens;
#endif
