/* attend_args.h - what the host tells the kernels of attend.cl: included by both.
 * Only 32-bit fields, so that both see one layout. */
#ifndef NEAP_ATTEND_ARGS_H
#define NEAP_ATTEND_ARGS_H

#ifdef __OPENCL_VERSION__
typedef uint attend_word;
#else
#include <stdint.h>
typedef uint32_t attend_word;
#endif

#define ATTEND_CHUNK 256u    /* cells of a chunk */
#define ATTEND_HALF_QUERY 16 /* with f16 arithmetic queries are staged as f16, divided by this */
#define ATTEND_BLOCK 32u     /* cells that a work-item takes at once; divides a chunk */

typedef struct attend_args {
    attend_word n_items; /* work-items with something to do */
    attend_word n_streams, n_kv_heads, n_heads, group, n_cells, n_chunks;
    attend_word n_rows, n_tiles;        /* query rows of a KV head, in tiles of ROWS */
    attend_word split_chunks, n_splits; /* chunks of a split of the context */
    /* In halves, within a chunk. */
    attend_word k_cell, k_head, v_cell, v_head;
    /* The staged mask, [stream][head][token][mask_cells] f16; mask_heads 0: every cell is seen. */
    attend_word mask_cells, mask_tokens, mask_heads, mask_streams;
    attend_word has_sinks;
    float cap; /* soft-cap in units of log2, 0 for none */
} attend_args;
#endif
