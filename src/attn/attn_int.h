/* attn_int.h - what attn.c and the tile kernels share. */
#ifndef NEAP_ATTN_INT_H
#define NEAP_ATTN_INT_H

#include "attn.h"

#define NEAP_ATTN_BLOCK 64u /* cells that a kernel takes at once; divides a chunk */

/* A run of query rows of one KV head against a run of cells. Row r of a head group is token
 * r / group, head kv_head * group + r % group. */
typedef struct neap_attn_tile {
    const neap_attn *job;
    uint32_t stream, kv_head, first_row, n_rows, first_cell, end_cell;
} neap_attn_tile;

/* What a tile leaves in the thread's scratch: for each row the sum of exp2(s - max) * v, and the
 * sum of exp2(s - max), s in units of log2. max is -infinity where the row saw no cell. */
typedef struct neap_attn_sums {
    float *out; /* [n_rows][stride] */
    float *max; /* [n_rows] */
    float *sum; /* [n_rows] */
    size_t stride;
} neap_attn_sums;

struct neap_attn_kernel {
    const char *name;
    bool (*supported)(void);
    uint32_t tile_rows; /* most rows of a tile */
    size_t (*scratch_bytes)(const neap_attn_shape *shape);
    int (*compute)(const neap_attn_tile *tile, void *scratch, neap_attn_sums *ret_sums);
};

extern const neap_attn_kernel neap_attn_generic;
#if defined(__x86_64__)
extern const neap_attn_kernel neap_attn_avx512, neap_attn_avx2;
#elif defined(__aarch64__)
extern const neap_attn_kernel neap_attn_neon;
#endif

#define NEAP_ATTN_HIDDEN 0xfc00u /* -infinity, in the mask's f16 */

/* Base-2 logarithm of e: scores are kept in units of log2. */
#define NEAP_ATTN_LOG2E 1.44269504088896340736f

/* Whether the mask shows some cell of [first, end) to some row of the tile. */
bool neap_attn_sees(const neap_attn_tile *tile, uint32_t first, uint32_t end);
float neap_attn_slope(const neap_attn_shape *shape, uint32_t head);
const uint16_t *neap_attn_mask_row(const neap_attn_shape *shape, uint32_t stream, uint32_t token,
                                   uint32_t head);
/* n elements of a row (whole blocks of the quantised types) as f32. */
void neap_attn_row_to_f32(neap_attn_type type, const void *src, uint32_t n, float *dst);
#endif
