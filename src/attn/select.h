/* select.h - which cells of a compressed context a decoding step reads: selective reconstruction
 * (LowRAM section 3.3 and appendix F, after ShadowKV).
 *
 * Of one layer and sequence: the first cells of the context, the *prefix*, are held in a compressed
 * form that this module does not know. It is divided into *spans* of a few cells (the papers'
 * chunks). For each KV head a span has a *landmark*, the mean of its keys as cached, in 8 bits.
 * Exact copies are kept of the *outliers*, the spans with a key least like their landmark, and of
 * the *window*, the last spans of the prefix. Of all others a step chooses, for each KV head, the
 * spans whose landmarks score highest with any of its query rows, and has those reconstructed that
 * the buffer does not hold from the step before; what it holds has a head start, so that spans of
 * nearly equal scores do not come and go. Attention then runs over the buffer, the
 * outliers, the window and what follows the prefix: exact over the cells that it reads, an
 * approximation of attention over all.
 *
 * Shapes     rows are cells, f16: [n_kv_heads][k_elems] and [n_kv_heads][v_elems].
 * Exact      the choice is a function of the landmarks, the queries, and what the buffer holds
 *            (ties: the earlier span); where in the buffer a span lies hangs on the steps before,
 *            so the last bits of the sums do, too. The number of threads changes nothing.
 * Errors     0 or negative (base/err.h).
 * Threads    append, truncate and begin: one at a time, with no step running. Any number of threads
 *            take part in a step.
 * Memory     a step allocates nothing. All that stays from step to step is in neap_select_bytes. */
#ifndef NEAP_ATTN_SELECT_H
#define NEAP_ATTN_SELECT_H

#include "attn.h"

typedef struct neap_select_config {
    uint32_t n_heads, n_kv_heads; /* the second divides the first */
    uint32_t k_elems, v_elems;    /* of a head: at most 1024 */
    uint32_t span_cells;          /* 4, 8, 16, 32 or 64 */
    /* In cells, rounded up to whole spans: most that a step chooses (at least one span), exact
     * outliers and window. */
    uint32_t budget_cells, outlier_cells, window_cells;
    uint32_t max_cells; /* of the prefix: whole chunks */
} neap_select_config;

/* In logits: a span must be this much ahead of one that the buffer holds to take its place. */
#define NEAP_SELECT_HEAD_START 2.0f

typedef struct neap_select neap_select;

/* Fails: NEAP_E_BOUND (a field outside its range); -ENOMEM. */
int neap_select_create(const neap_select_config *config, neap_select **ret_select);
void neap_select_free(neap_select *select); /* takes NULL */

/* Bytes of memory it holds; the buffer and the exact copies are there from the start, landmarks
 * come with the prefix. And what that will be for a prefix of so many cells: for the budget. */
size_t neap_select_bytes(const neap_select *select);
size_t neap_select_expected_bytes(const neap_select_config *config, uint32_t n_cells);

/* Cells: row r of K at k + r * k_stride bytes. */
typedef struct neap_select_rows {
    const void *k, *v;
    size_t k_stride, v_stride;
} neap_select_rows;

uint32_t neap_select_cells(const neap_select *select); /* of the prefix */
/* The next NEAP_ATTN_CHUNK_CELLS cells, exact, join the prefix. Fails: NEAP_E_BOUND (max_cells);
 * -ENOMEM. */
int neap_select_append(neap_select *select, const neap_select_rows *rows);
/* The prefix ends after n_cells, whole chunks; no more than it has. Outliers and the window that
 * are left are fewer until it grows again. */
void neap_select_truncate(neap_select *select, uint32_t n_cells);

/* Spans that steps found in the buffer, and those they had reconstructed. */
void neap_select_counts(const neap_select *select, uint64_t *ret_kept, uint64_t *ret_new);

/* ---- a step ---- */

/* Writes n cells of the prefix from first on, of one KV head: k[i * n_kv_heads * k_elems + e] and v
 * likewise. Called by several threads at once. */
typedef int (*neap_select_reconstruct)(void *ctx, uint32_t thread, uint32_t kv_head, uint32_t first,
                                       uint32_t n, uint16_t *k, uint16_t *v);

/* Fields are select.c's. */
typedef struct neap_select_step {
    neap_select *select;
    neap_attn_rows q;
    uint32_t n_tokens;
    float scale;
    neap_select_reconstruct reconstruct;
    void *ctx;
    char *scratch;
    atomic_uint next_head, heads_done, next_fill, fills_done;
    atomic_int err;
} neap_select_step;

size_t neap_select_scratch_bytes(const neap_select *select);
/* q: of one stream; scale: of its products with keys, above 0. scratch: of that size, 64-byte
 * aligned; the step's until it ends. */
void neap_select_begin(neap_select_step *step, neap_select *select, const neap_attn_rows *q,
                       uint32_t n_tokens, float scale, neap_select_reconstruct reconstruct,
                       void *ctx, void *scratch);
/* Takes part as thread and returns when the buffer is whole: 0, or the first error (what was
 * asked for then counts as not there). Each of the threads calls it once for a step. */
int neap_select_run(neap_select_step *step, uint32_t thread);

/* ---- attention over what was chosen ---- */

/* Whether this attention, over the whole context, can be had by selection: f16, one stream, no bias
 * by distance, and a mask that shows the whole prefix to every token. */
bool neap_select_applies(const neap_select *select, const neap_attn_shape *whole);
/* The attention over buffer, exact copies and the chunks of whole that follow the prefix, as many
 * as neap_select_kept_chunks() before those. ready and wait are NULL: the caller's. memory:
 * neap_select_shape_bytes(), 64-byte aligned, for chunk lists and mask. */
size_t neap_select_shape_bytes(const neap_select *select, const neap_attn_shape *whole);
void neap_select_shape(const neap_select *select, const neap_attn_shape *whole, void *memory,
                       neap_attn_shape *ret_shape);
uint32_t neap_select_kept_chunks(const neap_select *select);
uint32_t neap_select_shape_cells(const neap_select *select, const neap_attn_shape *whole);
#endif
