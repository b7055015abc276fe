/* attn.c - plans an attention as independent tiles, runs them on any number of threads.
 *
 * An item is one tile of query rows of one KV head against one split of the context. Splits have
 * fixed boundaries: enough of them that a few query rows still use all threads of a large machine,
 * by the shape alone. The thread that computes the last open split of a tile combines them all, in
 * the order of the context.
 *
 * Invariants
 *  1. Which cells a split has, and the order in which splits are combined, follow from the shape:
 *     the number of threads, who takes which item and when chunks arrive change no bit.
 *  2. An item is computed once: taken[item] goes from 0 to 1 by one exchange.
 *  3. The last split of a tile is known by left[tile] reaching zero, with acquire and release: the
 *     thread that sees it sees every partial.
 *
 * Threads   each takes the next item whose chunks are there; when there is none, the next of all,
 *           waiting. After an error the items left are skipped and out is not whole. */
#include <assert.h>
#include <math.h>
#include <string.h>

#include "attn_int.h"
#include "half.h"

/* Items that a job is cut into at least, where the context is long enough. */
#define ITEMS_WANTED 64u
#define ALIGN 64u

static const neap_attn_kernel *const all_kernels[] = {
#if defined(__x86_64__)
    &neap_attn_avx512,
    &neap_attn_avx2,
#elif defined(__aarch64__)
    &neap_attn_neon,
#endif
    &neap_attn_generic,
};
static atomic_size_t chosen;

static const neap_attn_kernel *kernel_at(size_t i) {
    for (size_t k = 0; k < sizeof all_kernels / sizeof all_kernels[0]; k++) {
        if (all_kernels[k]->supported() && i-- == 0) {
            return all_kernels[k];
        }
    }
    return NULL;
}

const char *neap_attn_kernel_name(size_t i) {
    const neap_attn_kernel *kernel = kernel_at(i);
    return kernel != NULL ? kernel->name : NULL;
}

void neap_attn_kernel_choose(size_t i) {
    atomic_store(&chosen, kernel_at(i) != NULL ? i : 0);
}

static uint32_t ceil_div(uint32_t a, uint32_t b) {
    return a / b + (a % b != 0);
}

static size_t aligned(size_t bytes) {
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

/* ---- what the kernels share ---- */

float neap_attn_slope(const neap_attn_shape *shape, uint32_t head) {
    if (shape->max_bias <= 0.0f) {
        return 1.0f;
    }
    uint32_t n = 1;
    while (2 * n <= shape->n_heads) {
        n *= 2;
    }
    return head < n ? powf(2.0f, -shape->max_bias / (float)n * (float)(head + 1))
                    : powf(2.0f, -shape->max_bias / 2.0f / (float)n * (float)(2 * (head - n) + 1));
}

const uint16_t *neap_attn_mask_row(const neap_attn_shape *shape, uint32_t stream, uint32_t token,
                                   uint32_t head) {
    const neap_attn_mask *mask = &shape->mask;
    return (const uint16_t *)(const void *)(mask->base + token * mask->token_bytes +
                                            head % mask->n_heads * mask->head_bytes +
                                            stream % mask->n_streams * mask->stream_bytes);
}

static uint16_t load_u16(const uint8_t *src) {
    uint16_t bits;
    memcpy(&bits, src, sizeof bits);
    return bits;
}

void neap_attn_row_to_f32(neap_attn_type type, const void *src, uint32_t n, float *dst) {
    const uint8_t *bytes = src;
    switch (type) {
    case NEAP_ATTN_F32:
        memcpy(dst, src, n * sizeof *dst);
        return;
    case NEAP_ATTN_F16:
        for (uint32_t i = 0; i < n; i++) {
            dst[i] = neap_f32_of_f16(load_u16(bytes + 2 * (size_t)i));
        }
        return;
    case NEAP_ATTN_BF16:
        for (uint32_t i = 0; i < n; i++) {
            dst[i] = neap_f32_of_bits((uint32_t)load_u16(bytes + 2 * (size_t)i) << 16);
        }
        return;
    case NEAP_ATTN_Q8_0:
        for (uint32_t i = 0; i < n; i += 32, bytes += 34) {
            float scale = neap_f32_of_f16(load_u16(bytes));
            for (uint32_t j = 0; j < 32; j++) {
                dst[i + j] = scale * (float)(int8_t)bytes[2 + j];
            }
        }
        return;
    case NEAP_ATTN_Q4_0:
        for (uint32_t i = 0; i < n; i += 32, bytes += 18) {
            float scale = neap_f32_of_f16(load_u16(bytes));
            for (uint32_t j = 0; j < 16; j++) {
                dst[i + j] = scale * (float)((bytes[2 + j] & 15) - 8);
                dst[i + 16 + j] = scale * (float)((bytes[2 + j] >> 4) - 8);
            }
        }
        return;
    }
}

/* ---- planning ---- */

static bool plane_ok(const neap_attn_plane *plane) {
    bool blocks = plane->type == NEAP_ATTN_Q8_0 || plane->type == NEAP_ATTN_Q4_0;
    size_t align = plane->type == NEAP_ATTN_F32 ? 4 : 2;
    return plane->head_elems > 0 && plane->head_elems <= 1024 &&
           (!blocks || plane->head_elems % 32 == 0) && plane->cell_bytes % align == 0 &&
           plane->head_bytes % align == 0;
}

bool neap_attn_supported(const neap_attn_shape *shape) {
    return shape->n_tokens > 0 && shape->n_heads > 0 && shape->n_kv_heads > 0 &&
           shape->n_streams > 0 && shape->n_cells > 0 && shape->n_heads % shape->n_kv_heads == 0 &&
           (uint64_t)shape->n_tokens * shape->n_heads < 1u << 30 && shape->n_cells < 1u << 30 &&
           plane_ok(&shape->k) && plane_ok(&shape->v);
}

static void split(neap_attn *job) {
    const neap_attn_shape *shape = &job->shape;
    job->kernel = kernel_at(atomic_load(&chosen));
    job->group = shape->n_heads / shape->n_kv_heads;
    uint32_t rows = shape->n_tokens * job->group;
    /* Tiles of even size: none is left with a few rows. */
    job->n_tiles = ceil_div(rows, job->kernel->tile_rows);
    job->tile_rows = ceil_div(rows, job->n_tiles);
    job->n_chunks = ceil_div(shape->n_cells, NEAP_ATTN_CHUNK_CELLS);
    uint32_t heads = shape->n_streams * shape->n_kv_heads * job->n_tiles;
    uint32_t splits = heads < ITEMS_WANTED ? ceil_div(ITEMS_WANTED, heads) : 1;
    job->split_cells = ceil_div(job->n_chunks, splits) * NEAP_ATTN_CHUNK_CELLS;
    job->n_splits = ceil_div(shape->n_cells, job->split_cells);
    job->n_items = heads * job->n_splits;
    job->thread_bytes = aligned(job->kernel->scratch_bytes(shape));
    job->partial_floats = (size_t)job->tile_rows * (shape->v.head_elems + 2);
}

static size_t partial_bytes(const neap_attn *job) {
    return job->n_splits > 1 ? aligned(job->n_items * job->partial_floats * sizeof(float)) : 0;
}

size_t neap_attn_scratch_bytes(const neap_attn_shape *shape, uint32_t n_threads) {
    neap_attn job = {.shape = *shape};
    split(&job);
    return n_threads * job.thread_bytes + partial_bytes(&job);
}

static size_t left_bytes(const neap_attn *job) {
    return aligned(job->n_items / job->n_splits * sizeof *job->left);
}

size_t neap_attn_state_bytes(const neap_attn_shape *shape) {
    neap_attn job = {.shape = *shape};
    split(&job);
    return left_bytes(&job) + aligned(job.n_items * sizeof *job.taken);
}

void neap_attn_plan(neap_attn *job, const neap_attn_shape *shape, uint32_t n_threads, void *scratch,
                    void *state) {
    job->shape = *shape;
    job->n_threads = n_threads;
    split(job);
    job->thread_scratch = scratch;
    job->partials = (float *)(void *)((char *)scratch + n_threads * job->thread_bytes);
    job->left = state;
    job->taken = (atomic_uchar *)(void *)((char *)state + left_bytes(job));
    for (uint32_t i = 0; i < job->n_items / job->n_splits; i++) {
        atomic_init(&job->left[i], job->n_splits);
    }
    for (uint32_t i = 0; i < job->n_items; i++) {
        atomic_init(&job->taken[i], 0);
    }
    atomic_init(&job->next, 0);
    atomic_init(&job->err, 0);
}

/* ---- running ---- */

/* Items of one tile lie together, its splits in the order of the context; the splits of all tiles
 * advance together, so that threads read the same chunks at about the same time. */
static neap_attn_tile tile_of(const neap_attn *job, uint32_t item, uint32_t *ret_head) {
    const neap_attn_shape *shape = &job->shape;
    uint32_t heads = job->n_items / job->n_splits;
    uint32_t at_split = item / heads, head = item % heads;
    uint32_t tile = head / (shape->n_kv_heads * shape->n_streams);
    uint32_t rest = head % (shape->n_kv_heads * shape->n_streams);
    uint32_t rows = shape->n_tokens * job->group, first = tile * job->tile_rows;
    uint32_t cell = at_split * job->split_cells;
    *ret_head = head;
    return (neap_attn_tile){
        .job = job,
        .stream = rest / shape->n_kv_heads,
        .kv_head = rest % shape->n_kv_heads,
        .first_row = first,
        .n_rows = rows - first < job->tile_rows ? rows - first : job->tile_rows,
        .first_cell = cell,
        .end_cell =
            shape->n_cells - cell < job->split_cells ? shape->n_cells : cell + job->split_cells,
    };
}

static float *out_row(const neap_attn_tile *tile, uint32_t row, uint32_t *ret_head) {
    const neap_attn *job = tile->job;
    uint32_t r = tile->first_row + row;
    *ret_head = tile->kv_head * job->group + r % job->group;
    const neap_attn_rows *out = &job->shape.out;
    return (float *)(void *)(out->base + tile->stream * out->stream_bytes +
                             r / job->group * out->token_bytes + *ret_head * out->head_bytes);
}

/* out = sums / sum; a sink is one more cell without a value. A row that saw nothing is zero. */
static void finish_row(const neap_attn_tile *tile, uint32_t row, const float *sums, float max,
                       float sum) {
    uint32_t head, n = tile->job->shape.v.head_elems;
    float *out = out_row(tile, row, &head), factor = 1.0f;
    if (tile->job->shape.sinks != NULL) {
        float sink = tile->job->shape.sinks[head] * NEAP_ATTN_LOG2E;
        float top = sink > max ? sink : max;
        factor = exp2f(max - top);
        sum = sum * factor + exp2f(sink - top);
    }
    float inverse = sum == 0.0f ? 0.0f : factor / sum;
    for (uint32_t i = 0; i < n; i++) {
        out[i] = sums[i] * inverse;
    }
}

static float *partial_of(const neap_attn *job, uint32_t split_index, uint32_t head) {
    uint32_t heads = job->n_items / job->n_splits;
    return job->partials + ((size_t)split_index * heads + head) * job->partial_floats;
}

/* A partial is max [rows], sum [rows], sums [rows][v.head_elems]. */
static void keep_partial(float *partial, const neap_attn_tile *tile, const neap_attn_sums *sums) {
    uint32_t rows = tile->n_rows, n = tile->job->shape.v.head_elems;
    memcpy(partial, sums->max, rows * sizeof *partial);
    memcpy(partial + rows, sums->sum, rows * sizeof *partial);
    for (uint32_t r = 0; r < rows; r++) {
        memcpy(partial + 2 * rows + (size_t)r * n, sums->out + r * sums->stride,
               n * sizeof *partial);
    }
}

static void combine(const neap_attn_tile *tile, uint32_t head, float *total) {
    const neap_attn *job = tile->job;
    uint32_t rows = tile->n_rows, n = job->shape.v.head_elems;
    for (uint32_t r = 0; r < rows; r++) {
        float top = -INFINITY, sum = 0.0f;
        for (uint32_t s = 0; s < job->n_splits; s++) {
            float max = partial_of(job, s, head)[r];
            top = max > top ? max : top;
        }
        memset(total, 0, n * sizeof *total);
        for (uint32_t s = 0; s < job->n_splits; s++) {
            const float *partial = partial_of(job, s, head);
            if (partial[r] == -INFINITY) {
                continue; /* it saw nothing */
            }
            float factor = exp2f(partial[r] - top);
            const float *sums = partial + 2 * rows + (size_t)r * n;
            sum += partial[rows + r] * factor;
            for (uint32_t i = 0; i < n; i++) {
                total[i] += sums[i] * factor;
            }
        }
        finish_row(tile, r, total, top, sum);
    }
}

static void compute_item(neap_attn *job, uint32_t item, void *scratch) {
    uint32_t head;
    neap_attn_tile tile = tile_of(job, item, &head);
    neap_attn_sums sums;
    int err = atomic_load(&job->err);
    err = err == 0 ? job->kernel->compute(&tile, scratch, &sums) : err;
    if (err != 0) {
        int none = 0;
        atomic_compare_exchange_strong(&job->err, &none, err);
        return;
    }
    if (job->n_splits == 1) {
        for (uint32_t r = 0; r < tile.n_rows; r++) {
            finish_row(&tile, r, sums.out + r * sums.stride, sums.max[r], sums.sum[r]);
        }
        return;
    }
    keep_partial(partial_of(job, item / (job->n_items / job->n_splits), head), &tile, &sums);
    if (atomic_fetch_sub_explicit(&job->left[head], 1, memory_order_acq_rel) == 1) {
        combine(&tile, head, sums.out);
    }
}

bool neap_attn_sees(const neap_attn_tile *tile, uint32_t first, uint32_t end) {
    const neap_attn_shape *shape = &tile->job->shape;
    if (shape->mask.base == NULL) {
        return true;
    }
    for (uint32_t r = 0; r < tile->n_rows; r++) {
        uint32_t row = tile->first_row + r, group = tile->job->group;
        if (r > 0 && row % group != 0 && shape->mask.n_heads == 1) {
            continue; /* the token's heads share its mask */
        }
        const uint16_t *mask = neap_attn_mask_row(shape, tile->stream, row / group,
                                                  tile->kv_head * group + row % group);
        for (uint32_t cell = first; cell < end; cell++) {
            if (mask[cell] != NEAP_ATTN_HIDDEN) {
                return true;
            }
        }
    }
    return false;
}

static bool is_ready(const neap_attn *job, uint32_t item) {
    uint32_t head;
    neap_attn_tile tile = tile_of(job, item, &head);
    for (uint32_t cell = tile.first_cell; cell < tile.end_cell; cell += NEAP_ATTN_CHUNK_CELLS) {
        uint32_t end = tile.end_cell - cell < NEAP_ATTN_CHUNK_CELLS ? tile.end_cell
                                                                    : cell + NEAP_ATTN_CHUNK_CELLS;
        if (!job->shape.ready(job->shape.ctx, tile.stream, cell / NEAP_ATTN_CHUNK_CELLS) &&
            neap_attn_sees(&tile, cell, end)) {
            return false;
        }
    }
    return true;
}

/* The first item to take that is ready, else the first to take, else n_items. */
static uint32_t best_item(const neap_attn *job) {
    uint32_t first = job->n_items;
    for (uint32_t item = 0; item < job->n_items; item++) {
        if (atomic_load_explicit(&job->taken[item], memory_order_relaxed) == 0) {
            first = first == job->n_items ? item : first;
            if (is_ready(job, item)) {
                return item;
            }
        }
    }
    return first;
}

void neap_attn_run(neap_attn *job, uint32_t thread) {
    assert(thread < job->n_threads);
    char *scratch = job->thread_scratch + thread * job->thread_bytes;
    uint32_t item;
    if (job->shape.ready == NULL) {
        while ((item = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed)) <
               job->n_items) {
            compute_item(job, item, scratch);
        }
        return;
    }
    while ((item = best_item(job)) < job->n_items) {
        if (atomic_exchange_explicit(&job->taken[item], 1, memory_order_relaxed) == 0) {
            compute_item(job, item, scratch);
        }
    }
}

int neap_attn_await(neap_attn *job) {
    const neap_attn_shape *shape = &job->shape;
    int err = 0;
    if (shape->wait == NULL) {
        return 0;
    }
    for (uint32_t at = 0; at < shape->n_streams * job->n_chunks && err == 0; at++) {
        uint32_t stream = at / job->n_chunks, chunk = at % job->n_chunks;
        uint32_t first = chunk * NEAP_ATTN_CHUNK_CELLS, rest = shape->n_cells - first;
        uint32_t end = first + (rest < NEAP_ATTN_CHUNK_CELLS ? rest : NEAP_ATTN_CHUNK_CELLS);
        if (shape->ready(shape->ctx, stream, chunk)) {
            continue;
        }
        bool seen = false;
        for (uint32_t kv_head = 0; kv_head < shape->n_kv_heads && !seen; kv_head++) {
            const neap_attn_tile all = {.job = job,
                                        .stream = stream,
                                        .kv_head = kv_head,
                                        .n_rows = shape->n_tokens * job->group};
            seen = neap_attn_sees(&all, first, end);
            if (shape->mask.n_heads == 1) {
                break; /* every head sees the same */
            }
        }
        err = seen ? shape->wait(shape->ctx, stream, chunk) : 0;
    }
    if (err != 0) {
        atomic_store(&job->err, err);
    }
    return err;
}

int neap_attn_result(const neap_attn *job) {
    return atomic_load(&job->err);
}
