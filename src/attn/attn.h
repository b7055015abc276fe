/* attn.h - exact attention over a KV cache that lies in chunks.
 *
 * out[t][h] = softmax(scale * q[t][h] . K^T + mask) . V, in f32, over the cells of one stream; with
 * logit soft-cap, ALiBi slopes and attention sinks as FLASH_ATTN_EXT of ggml defines them. One pass
 * with an online softmax (mzCache section 4.2): K and V are streamed once for a tile of query rows,
 * from a list of chunk pointers.
 *
 * The result hangs on the shape and the data only: neither the number of threads nor the order in
 * which chunks arrive changes a bit of it (see attn.c).
 *
 * Units      cells, elements, bytes where the name says so.
 * Errors     0 or negative (base/err.h).
 * Threads    one plans; then any number of threads call neap_attn_run with the same job.
 * Ownership  everything pointed to stays the caller's and constant until the last run is back. */
#ifndef NEAP_ATTN_H
#define NEAP_ATTN_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NEAP_ATTN_CHUNK_CELLS 256u

typedef enum neap_attn_type {
    NEAP_ATTN_F16,
    NEAP_ATTN_BF16,
    NEAP_ATTN_F32,
    NEAP_ATTN_Q8_0, /* ggml's blocks of 32: f16 scale, 32 signed codes */
    NEAP_ATTN_Q4_0  /* ggml's blocks of 32: f16 scale, 32 codes of 4 bits, less 8 */
} neap_attn_type;

/* K or V of all streams: cell c of stream s lies at chunks[s * n_chunks + c / 256]
 * + (c % 256) * cell_bytes, and in it head h at h * head_bytes. */
typedef struct neap_attn_plane {
    neap_attn_type type;
    uint32_t head_elems; /* multiple of 32 for the quantised types */
    size_t cell_bytes, head_bytes;
    const void *const *chunks; /* [n_streams][n_chunks], n_chunks = ceil(n_cells / 256) */
} neap_attn_plane;

/* [token][head] rows of f32 of one stream after the other. */
typedef struct neap_attn_rows {
    char *base;
    size_t token_bytes, head_bytes, stream_bytes;
} neap_attn_rows;

/* f16: 0 shows a cell, -infinity hides it, other values are added. */
typedef struct neap_attn_mask {
    const char *base; /* NULL: every cell is seen */
    size_t token_bytes, head_bytes, stream_bytes;
    uint32_t n_heads, n_streams; /* repeated when fewer than those of q */
} neap_attn_mask;

typedef struct neap_attn_kernel neap_attn_kernel;

/* What to compute; the caller fills it. */
typedef struct neap_attn_shape {
    uint32_t n_tokens, n_heads, n_kv_heads, n_streams, n_cells; /* n_kv_heads divides n_heads */
    neap_attn_plane k, v;
    neap_attn_rows q;   /* head_elems of k */
    neap_attn_rows out; /* head_elems of v; written */
    neap_attn_mask mask;
    const float *sinks;             /* [n_heads] or NULL */
    float scale, softcap, max_bias; /* softcap, max_bias: 0 for none */
    /* Chunks that may be away: NULL when all are there. ready never blocks; wait returns 0 when the
     * chunk can be read, or the error that ends the job. A chunk that the mask hides from every
     * row is neither asked for nor read. */
    bool (*ready)(void *ctx, uint32_t stream, uint32_t chunk);
    int (*wait)(void *ctx, uint32_t stream, uint32_t chunk);
    void *ctx;
} neap_attn_shape;

/* A planned attention. Fields are attn.c's. */
typedef struct neap_attn {
    neap_attn_shape shape;
    const neap_attn_kernel *kernel;
    uint32_t group; /* query heads of a KV head */
    uint32_t tile_rows, n_tiles, split_cells, n_splits, n_chunks;
    uint32_t n_items; /* streams * KV heads * tiles * splits */
    uint32_t n_threads;
    size_t thread_bytes, partial_floats;
    char *thread_scratch;
    float *partials;
    atomic_uint *left;   /* [streams * KV heads * tiles] splits still to come */
    atomic_uchar *taken; /* [n_items] */
    atomic_uint next;
    atomic_int err;
} neap_attn;

/* Whether the kernels can compute this. */
bool neap_attn_supported(const neap_attn_shape *shape);
/* Bytes of scratch, which jobs that never run at the same time share, and of state, each job's own,
 * for n_threads threads. */
size_t neap_attn_scratch_bytes(const neap_attn_shape *shape, uint32_t n_threads);
size_t neap_attn_state_bytes(const neap_attn_shape *shape);
/* Prepares job for a shape that is supported, to be run once. scratch and state: of those sizes,
 * 64-byte aligned. May be called again when no thread runs the job any more. */
void neap_attn_plan(neap_attn *job, const neap_attn_shape *shape, uint32_t n_threads, void *scratch,
                    void *state);
/* Takes part in the job as thread (0 .. n_threads - 1) until nothing is left to take. */
void neap_attn_run(neap_attn *job, uint32_t thread);
/* Waits for every chunk that some row sees, for those who compute the job by other means. Returns
 * the first error, which is then also the job's result. */
int neap_attn_await(neap_attn *job);
/* After all threads are back: the first error, or 0. */
int neap_attn_result(const neap_attn *job);

/* Names of the kernels this machine can run, fastest first; NULL past the last. */
const char *neap_attn_kernel_name(size_t i);
/* Makes later plans use the i-th of them. For tests and benchmarks. */
void neap_attn_kernel_choose(size_t i);
#endif
