/* rope.h - rotary position embedding from the parameters of ggml's ROPE to the turns that klt.h
 * stores, and turning a head by them. Pure.
 * Heads      f32, in place. */
#ifndef NEAP_CODEC_ROPE_H
#define NEAP_CODEC_ROPE_H

#include "klt.h"
#include "neap.h"

/* Reads what ggml's ROPE is given off its node: the operation's parameters, and the data of the
 * third source (NULL: it has none). *ret_offset: the element of a head from which on it is turned;
 * only 0 can be folded. */
neap_kv_rope neap_rope_of_node(const int32_t *op_params, const float *freq_factors,
                               int32_t *ret_offset);

/* The same as angles for each position. Between the two lies only f32 rounding: ggml multiplies
 * from pair to pair. Fails: -ENOTSUP (a mode or a size that is not known). */
int neap_rope_fold(const neap_kv_rope *rope, uint32_t head_dim, neap_klt_rope *ret_rope);

/* Cosine and sine of each pair at a position, without the magnitude: table[n_dims]. */
void neap_rope_table(const neap_klt_rope *rope, int32_t position, float *table);
/* To what the cache holds, from the head before RoPE. */
void neap_rope_turn(const neap_klt_rope *rope, const float *table, float *head);
/* From what the cache holds to the head before RoPE, and the transpose of turning it (for a query:
 * the inner product of the result with a key before RoPE is the score). */
void neap_rope_unturn(const neap_klt_rope *rope, const float *table, float *head);
void neap_rope_transpose(const neap_klt_rope *rope, const float *table, float *head);
#endif
