/* tile.h - the tile kernel, as a template over a vector type: included by tile_*.c.
 *
 * The including file defines, for vectors of VL floats (VL divides 64):
 *   vf                            the vector type
 *   vf_zero() vf_set1(x) vf_load(p) vf_store(p, v) vf_load_f16(p) vf_load_bf16(p)
 *   vf_add vf_sub vf_mul vf_max   lane by lane
 *   vf_fma(a, b, c)               a * b + c
 *   vf_exp2(x)                    2^x for x <= 0, 0 for x below -126 and -infinity
 *   vf_hide(x, m)                 -infinity where m is -infinity, x + m elsewhere
 *   vf_reduce_max(v) vf_reduce_add(v)
 *   vf_prefetch(p)
 *   MR, TV                        rows and vectors of the register tile (MR <= 14)
 *   TILE_ROWS                     most rows of a tile
 *   transpose_16(rows, stride, n_elems, panel)   64 rows of n_elems 16-bit elements, stride bytes
 *                                 apart, to panel[n_elems][64]
 *   transpose_32(rows, stride, n_elems, panel)   the same for 32-bit elements
 *   TILE_KERNEL, TILE_NAME, TILE_SUPPORTED
 *
 * A block is 64 cells. Scores of a block: S[row][cell] = Q . K^T, a product with the panel K^T
 * [elem][cell]; then the online softmax, row by row; then out[row][elem] += P[row][cell] V[cell],
 * a product with the panel V [cell][elem]. Both are gemm(). With at most MR rows the products read
 * K^T as f16, and V where it lies; with more the panels are f32, made once for all rows. */
#include <math.h>
#include <string.h>

#include "attn_int.h"
#include "half.h"

#define BLOCK NEAP_ATTN_BLOCK
#define INLINE static inline __attribute__((always_inline))

typedef struct tile_scratch {
    float *q;         /* [rows][k_stride], times the scale */
    float *s;         /* [rows][BLOCK] scores, then weights */
    float *out;       /* [rows][v_stride] */
    float *sum;       /* [rows][VL] by lanes */
    float *max;       /* [rows] */
    float *k;         /* [k elems][BLOCK] */
    uint16_t *k_half; /* [k elems][BLOCK] */
    float *v;         /* [BLOCK][v_stride]; and K rows as f32 before they are transposed */
    uint8_t *seen;    /* [rows] what the row sees of the block */
    size_t k_stride, v_stride;
} tile_scratch;

enum { SEES_NOTHING, SEES_ALL, SEES_SOME };

static size_t round_up(size_t n, size_t unit) {
    return (n + unit - 1) / unit * unit;
}

static void *take(char *base, size_t *at, size_t bytes) {
    char *taken = base != NULL ? base + *at : NULL;
    *at += round_up(bytes, 64);
    return taken;
}

/* Lays the scratch out from base (NULL: only asks for its size); returns its size. */
static size_t lay_out(const neap_attn_shape *shape, char *base, tile_scratch *scratch) {
    size_t rows = TILE_ROWS, k_elems = shape->k.head_elems, at = 0;
    scratch->k_stride = round_up(k_elems, VL);
    scratch->v_stride = round_up(shape->v.head_elems, VL);
    size_t panel = scratch->k_stride > scratch->v_stride ? scratch->k_stride : scratch->v_stride;
    scratch->q = take(base, &at, rows * scratch->k_stride * sizeof(float));
    scratch->s = take(base, &at, rows * BLOCK * sizeof(float));
    scratch->out = take(base, &at, rows * scratch->v_stride * sizeof(float));
    scratch->sum = take(base, &at, rows * VL * sizeof(float));
    scratch->max = take(base, &at, rows * sizeof(float));
    scratch->k = take(base, &at, k_elems * BLOCK * sizeof(float));
    scratch->k_half = take(base, &at, k_elems * BLOCK * sizeof(uint16_t));
    scratch->v = take(base, &at, BLOCK * panel * sizeof(float));
    scratch->seen = take(base, &at, rows);
    return at;
}

static size_t tile_scratch_bytes(const neap_attn_shape *shape) {
    tile_scratch scratch;
    return lay_out(shape, NULL, &scratch);
}

/* ---- the product ---- */

/* Rows to be read soon: 64 of them, stride bytes apart. With few query rows a tile is bound by
 * memory, so while it multiplies it fetches the next block, a cache line in every step: all lines
 * at once would wait for each other. */
typedef struct ahead {
    const char *rows;
    size_t stride, line; /* line: 64; 0 to fetch nothing new */
    size_t lines_bytes;  /* what one column of register tiles fetches of each row */
} ahead;

/* c[mr][nv vectors] (+)= a[mr][depth] * b[depth][nv vectors]. mr, nv and half are constants. */
INLINE void micro(uint32_t depth, const float *a, size_t lda, const void *b, size_t ldb, bool half,
                  float *c, size_t ldc, bool add, ahead next, const int mr, const int nv) {
    vf acc[MR][TV];
#pragma GCC unroll 16
    for (int i = 0; i < mr; i++) {
#pragma GCC unroll 16
        for (int j = 0; j < nv; j++) {
            acc[i][j] = add ? vf_load(c + (size_t)i * ldc + j * VL) : vf_zero();
        }
    }
    const uint16_t *b16 = b;
    const float *b32 = b;
    for (uint32_t k = 0; k < depth; k++, b16 += ldb, b32 += ldb) {
        vf_prefetch(next.rows + k % BLOCK * next.stride + k / BLOCK * next.line);
        vf row[TV];
#pragma GCC unroll 16
        for (int j = 0; j < nv; j++) {
            row[j] = half ? vf_load_f16(b16 + j * VL) : vf_load(b32 + j * VL);
        }
#pragma GCC unroll 16
        for (int i = 0; i < mr; i++) {
            vf left = vf_set1(a[(size_t)i * lda + k]);
#pragma GCC unroll 16
            for (int j = 0; j < nv; j++) {
                acc[i][j] = vf_fma(left, row[j], acc[i][j]);
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < mr; i++) {
#pragma GCC unroll 16
        for (int j = 0; j < nv; j++) {
            vf_store(c + (size_t)i * ldc + j * VL, acc[i][j]);
        }
    }
}

#define MICRO_CASE(n)                                                                    \
    case n:                                                                              \
        micro(depth, a, lda, b, ldb, half, c, ldc, add, next, (n) <= MR ? (n) : MR, nv); \
        break;

INLINE void micro_rows(uint32_t rows, uint32_t depth, const float *a, size_t lda, const void *b,
                       size_t ldb, bool half, float *c, size_t ldc, bool add, ahead next,
                       const int nv) {
    switch (rows) {
        MICRO_CASE(1)
        MICRO_CASE(2)
        MICRO_CASE(3)
        MICRO_CASE(4)
        MICRO_CASE(5)
        MICRO_CASE(6)
        MICRO_CASE(7)
        MICRO_CASE(8)
        MICRO_CASE(9)
        MICRO_CASE(10)
        MICRO_CASE(11)
        MICRO_CASE(12)
        MICRO_CASE(13)
        MICRO_CASE(14)
    }
}

/* One column of register tiles: all rows, in groups of even size, so that a row's sum does not
 * hang on its neighbours (every group adds up in the same order). */
INLINE void gemm_column(uint32_t rows, uint32_t depth, const float *a, size_t lda, const void *b,
                        size_t ldb, bool half, float *c, size_t ldc, bool add, ahead next,
                        const int nv) {
    uint32_t groups = (rows + MR - 1) / MR;
    for (uint32_t g = 0; g < groups; g++) {
        uint32_t first = rows * g / groups, end = rows * (g + 1) / groups;
        micro_rows(end - first, depth, a + first * lda, lda, b, ldb, half, c + first * ldc, ldc,
                   add, next, nv);
        next = (ahead){.rows = next.rows}; /* once is enough */
    }
}

/* c[rows][cols] (+)= a[rows][depth] * b[depth][cols]; cols in whole vectors. half is a constant. */
INLINE void gemm(uint32_t rows, uint32_t cols, uint32_t depth, const float *a, size_t lda,
                 const void *b, size_t ldb, bool half, float *c, size_t ldc, bool add, ahead next) {
    const uint16_t *b16 = b;
    const float *b32 = b;
    uint32_t col = 0;
    for (; col + TV * VL <= cols; col += TV * VL) {
        gemm_column(rows, depth, a, lda, half ? (const void *)(b16 + col) : b32 + col, ldb, half,
                    c + col, ldc, add, next, TV);
        next.rows += next.lines_bytes;
    }
    for (; col < cols; col += VL) {
        gemm_column(rows, depth, a, lda, half ? (const void *)(b16 + col) : b32 + col, ldb, half,
                    c + col, ldc, add, next, 1);
    }
}

static __attribute__((noinline)) void gemm_f32(uint32_t rows, uint32_t cols, uint32_t depth,
                                               const float *a, size_t lda, const float *b,
                                               size_t ldb, float *c, size_t ldc, bool add,
                                               ahead next) {
    gemm(rows, cols, depth, a, lda, b, ldb, false, c, ldc, add, next);
}

static __attribute__((noinline)) void gemm_f16(uint32_t rows, uint32_t cols, uint32_t depth,
                                               const float *a, size_t lda, const uint16_t *b,
                                               size_t ldb, float *c, size_t ldc, bool add,
                                               ahead next) {
    gemm(rows, cols, depth, a, lda, b, ldb, true, c, ldc, add, next);
}

/* ---- K and V of a block ---- */

typedef struct block {
    const char *k, *v; /* first cell's row of this head */
    uint32_t cell, n;  /* n <= BLOCK */
} block;

static block block_at(const neap_attn_tile *tile, uint32_t cell) {
    const neap_attn *job = tile->job;
    const neap_attn_shape *shape = &job->shape;
    size_t chunk = (size_t)tile->stream * job->n_chunks + cell / NEAP_ATTN_CHUNK_CELLS;
    size_t inside = cell % NEAP_ATTN_CHUNK_CELLS;
    uint32_t rest = tile->end_cell - cell;
    return (block){
        .k = (const char *)shape->k.chunks[chunk] + inside * shape->k.cell_bytes +
             tile->kv_head * shape->k.head_bytes,
        .v = (const char *)shape->v.chunks[chunk] + inside * shape->v.cell_bytes +
             tile->kv_head * shape->v.head_bytes,
        .cell = cell,
        .n = rest < BLOCK ? rest : BLOCK,
    };
}

/* A row as f32, its last vector filled up with zeros. */
static void widen_row(neap_attn_type type, const char *src, uint32_t n, float *dst) {
    uint32_t i = 0;
    if (type == NEAP_ATTN_F16 || type == NEAP_ATTN_BF16) {
        const uint16_t *halves = (const uint16_t *)(const void *)src;
        for (; i + VL <= n; i += VL) {
            vf_store(dst + i,
                     type == NEAP_ATTN_F16 ? vf_load_f16(halves + i) : vf_load_bf16(halves + i));
        }
        if (i < n) {
            neap_attn_row_to_f32(type, halves + i, n - i, dst + i);
        }
    } else {
        neap_attn_row_to_f32(type, src, n, dst);
    }
    for (i = n; i % VL != 0; i++) {
        dst[i] = 0.0f;
    }
}

/* The rows BLOCK cells after rows. Reading them ahead faults nothing in, whatever lies there. */
static ahead rows_ahead(const neap_attn_plane *plane, const char *rows, uint32_t columns) {
    size_t row_bytes = 2 * (size_t)plane->head_elems;
    return (ahead){.rows = rows + BLOCK * plane->cell_bytes,
                   .stride = plane->cell_bytes,
                   .line = 64,
                   .lines_bytes = round_up(row_bytes / columns, 64)};
}

/* S = Q K^T for the block; cells from n on get scores of zero, which the mask row hides. */
static void score_block(const neap_attn_tile *tile, const tile_scratch *scratch, const block *at) {
    const neap_attn_plane *plane = &tile->job->shape.k;
    uint32_t n_elems = plane->head_elems;
    bool narrow = plane->type == NEAP_ATTN_F16 || plane->type == NEAP_ATTN_BF16;
    if (narrow && at->n == BLOCK) {
        uint16_t *half = scratch->k_half;
        transpose_16(at->k, plane->cell_bytes, n_elems, half);
        if (plane->type == NEAP_ATTN_F16 && tile->n_rows <= MR) {
            gemm_f16(tile->n_rows, BLOCK, n_elems, scratch->q, scratch->k_stride, half, BLOCK,
                     scratch->s, BLOCK, false, rows_ahead(plane, at->k, BLOCK / (TV * VL)));
            return;
        }
        widen_row(plane->type, (const char *)half, n_elems * BLOCK, scratch->k);
    } else {
        size_t stride = scratch->k_stride;
        for (uint32_t c = 0; c < at->n; c++) {
            widen_row(plane->type, at->k + c * plane->cell_bytes, n_elems, scratch->v + c * stride);
        }
        memset(scratch->v + at->n * stride, 0, (BLOCK - at->n) * stride * sizeof(float));
        transpose_32(scratch->v, stride * sizeof(float), n_elems, scratch->k);
    }
    gemm_f32(tile->n_rows, BLOCK, n_elems, scratch->q, scratch->k_stride, scratch->k, BLOCK,
             scratch->s, BLOCK, false, rows_ahead(plane, at->k, BLOCK / (TV * VL)));
}

static bool all_finite(const float *x, size_t n) {
    uint32_t top = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = neap_f32_bits(x[i]) & 0x7f800000u;
        top = bits > top ? bits : top;
    }
    return top < 0x7f800000u;
}

/* out += P V where a hidden cell's V may be NaN or infinite: its weight is zero and skipped. */
static void add_values_sparse(const neap_attn_tile *tile, const tile_scratch *scratch, uint32_t n) {
    for (uint32_t r = 0; r < tile->n_rows; r++) {
        for (uint32_t c = 0; c < n; c++) {
            float weight = scratch->s[r * BLOCK + c];
            if (weight == 0.0f) {
                continue;
            }
            float *out = scratch->out + r * scratch->v_stride;
            const float *v = scratch->v + c * scratch->v_stride;
            for (uint32_t i = 0; i < tile->job->shape.v.head_elems; i++) {
                out[i] += weight * v[i];
            }
        }
    }
}

/* hidden: the mask hides some cell of the block from some row. */
static void add_values(const neap_attn_tile *tile, const tile_scratch *scratch, const block *at,
                       bool hidden) {
    const neap_attn_plane *plane = &tile->job->shape.v;
    uint32_t n_elems = plane->head_elems;
    size_t stride = scratch->v_stride;
    if (plane->type == NEAP_ATTN_F16 && n_elems % VL == 0 && tile->n_rows <= MR && !hidden) {
        gemm_f16(tile->n_rows, n_elems, at->n, scratch->s, BLOCK,
                 (const uint16_t *)(const void *)at->v, plane->cell_bytes / 2, scratch->out, stride,
                 true, rows_ahead(plane, at->v, (n_elems + TV * VL - 1) / (TV * VL)));
        return;
    }
    for (uint32_t c = 0; c < at->n; c++) {
        widen_row(plane->type, at->v + c * plane->cell_bytes, n_elems, scratch->v + c * stride);
    }
    if (hidden && !all_finite(scratch->v, at->n * stride)) {
        add_values_sparse(tile, scratch, at->n);
        return;
    }
    gemm_f32(tile->n_rows, (uint32_t)stride, at->n, scratch->s, BLOCK, scratch->v, stride,
             scratch->out, stride, true,
             rows_ahead(plane, at->v, (n_elems + TV * VL - 1) / (TV * VL)));
}

/* ---- mask and softmax ---- */

static int classify(const uint16_t *mask) {
    uint64_t hidden = ~(uint64_t)0, shown = 0;
    for (int i = 0; i < (int)BLOCK / 4; i++) {
        uint64_t four;
        memcpy(&four, mask + 4 * i, sizeof four);
        uint64_t same = four ^ (NEAP_ATTN_HIDDEN * 0x0001000100010001ull);
        hidden &= same == 0 ? ~(uint64_t)0 : 0;
        shown |= four;
    }
    return hidden != 0 ? SEES_NOTHING : shown == 0 ? SEES_ALL : SEES_SOME;
}

/* The block's 64 mask values for a row; of a short block in copy, its missing cells hidden. */
static const uint16_t *mask_of(const neap_attn_tile *tile, const block *at, uint32_t row,
                               uint16_t copy[BLOCK]) {
    const neap_attn_shape *shape = &tile->job->shape;
    uint32_t r = tile->first_row + row, group = tile->job->group;
    const uint16_t *mask = NULL;
    if (shape->mask.base != NULL) {
        mask =
            neap_attn_mask_row(shape, tile->stream, r / group, tile->kv_head * group + r % group) +
            at->cell;
        if (at->n == BLOCK) {
            return mask;
        }
    }
    for (uint32_t c = 0; c < BLOCK; c++) {
        copy[c] = c >= at->n ? NEAP_ATTN_HIDDEN : mask != NULL ? mask[c] : 0;
    }
    return copy;
}

/* What each row sees of the block. Returns the same for all of them together. */
static int classify_rows(const neap_attn_tile *tile, const tile_scratch *scratch, const block *at) {
    const neap_attn_shape *shape = &tile->job->shape;
    if (shape->mask.base == NULL && at->n == BLOCK) {
        memset(scratch->seen, SEES_ALL, tile->n_rows);
        return SEES_ALL;
    }
    uint16_t copy[BLOCK];
    bool any = false, all = true, shared = shape->mask.base == NULL || shape->mask.n_heads == 1;
    for (uint32_t r = 0; r < tile->n_rows; r++) {
        bool same = r > 0 && shared && (tile->first_row + r) % tile->job->group != 0;
        scratch->seen[r] =
            same ? scratch->seen[r - 1] : (uint8_t)classify(mask_of(tile, at, r, copy));
        any = any || scratch->seen[r] != SEES_NOTHING;
        all = all && scratch->seen[r] == SEES_ALL;
    }
    return all ? SEES_ALL : any ? SEES_SOME : SEES_NOTHING;
}

INLINE vf cap_scores(vf x, float cap) {
    float lanes[VL];
    vf_store(lanes, x);
    for (int i = 0; i < VL; i++) {
        lanes[i] = cap * tanhf(lanes[i]);
    }
    return vf_load(lanes);
}

/* Scores of a row to weights exp2(s - max), with the row's sums brought to the new maximum. */
INLINE void soften_row(const neap_attn_tile *tile, const tile_scratch *scratch, uint32_t row,
                       const uint16_t *mask, float slope) {
    float *s = scratch->s + row * BLOCK, cap = tile->job->shape.softcap * NEAP_ATTN_LOG2E;
    vf x[BLOCK / VL], top = vf_set1(-INFINITY), scale = vf_set1(slope * NEAP_ATTN_LOG2E);
#pragma GCC unroll 4
    for (int j = 0; j < (int)(BLOCK / VL); j++) {
        x[j] = vf_load(s + j * VL);
        if (cap != 0.0f) {
            x[j] = cap_scores(x[j], cap);
        }
        if (mask != NULL) {
            x[j] = vf_hide(x[j], vf_mul(vf_load_f16(mask + j * VL), scale));
        }
        top = vf_max(top, x[j]);
    }
    float old = scratch->max[row], max = vf_reduce_max(top);
    max = max > old ? max : old;
    if (max == -INFINITY) {
        memset(s, 0, BLOCK * sizeof *s);
        return;
    }
    float *sum = scratch->sum + row * VL;
    vf total = vf_load(sum);
    if (max > old) {
        vf factor = vf_exp2(vf_set1(old - max));
        total = vf_mul(total, factor);
        float *out = scratch->out + row * scratch->v_stride;
        for (size_t i = 0; i < scratch->v_stride; i += VL) {
            vf_store(out + i, vf_mul(vf_load(out + i), factor));
        }
        scratch->max[row] = max;
    }
    vf base = vf_set1(max);
#pragma GCC unroll 4
    for (int j = 0; j < (int)(BLOCK / VL); j++) {
        vf weight = vf_exp2(vf_sub(x[j], base));
        total = vf_add(total, weight);
        vf_store(s + j * VL, weight);
    }
    vf_store(sum, total);
}

static void soften(const neap_attn_tile *tile, const tile_scratch *scratch, const block *at) {
    uint16_t copy[BLOCK];
    for (uint32_t r = 0; r < tile->n_rows; r++) {
        switch (scratch->seen[r]) {
        case SEES_NOTHING:
            memset(scratch->s + r * BLOCK, 0, BLOCK * sizeof(float));
            break;
        case SEES_ALL:
            soften_row(tile, scratch, r, NULL, 1.0f);
            break;
        default:
            soften_row(
                tile, scratch, r, mask_of(tile, at, r, copy),
                neap_attn_slope(&tile->job->shape, tile->kv_head * tile->job->group +
                                                       (tile->first_row + r) % tile->job->group));
        }
    }
}

/* ---- a tile ---- */

static void load_queries(const neap_attn_tile *tile, const tile_scratch *scratch) {
    const neap_attn_shape *shape = &tile->job->shape;
    /* Capped scores get their factor of log2(e) after the cap. */
    float scale =
        shape->softcap != 0.0f ? shape->scale / shape->softcap : shape->scale * NEAP_ATTN_LOG2E;
    for (uint32_t r = 0; r < tile->n_rows; r++) {
        uint32_t row = tile->first_row + r, group = tile->job->group;
        const float *q =
            (const float *)(const void *)(shape->q.base + tile->stream * shape->q.stream_bytes +
                                          row / group * shape->q.token_bytes +
                                          (tile->kv_head * group + row % group) *
                                              shape->q.head_bytes);
        float *dst = scratch->q + r * scratch->k_stride;
        for (uint32_t i = 0; i < shape->k.head_elems; i++) {
            dst[i] = q[i] * scale;
        }
    }
    memset(scratch->out, 0, tile->n_rows * scratch->v_stride * sizeof(float));
    memset(scratch->sum, 0, tile->n_rows * VL * sizeof(float));
    for (uint32_t r = 0; r < tile->n_rows; r++) {
        scratch->max[r] = -INFINITY;
    }
}

/* Makes sure of the chunk that begins at cell. 1: nothing of it is seen. */
static int await_chunk(const neap_attn_tile *tile, uint32_t cell) {
    const neap_attn_shape *shape = &tile->job->shape;
    uint32_t chunk = cell / NEAP_ATTN_CHUNK_CELLS, end = (chunk + 1) * NEAP_ATTN_CHUNK_CELLS;
    if (shape->wait == NULL || shape->ready(shape->ctx, tile->stream, chunk)) {
        return 0;
    }
    end = end < tile->end_cell ? end : tile->end_cell;
    return neap_attn_sees(tile, cell, end) ? shape->wait(shape->ctx, tile->stream, chunk) : 1;
}

static int tile_compute(const neap_attn_tile *tile, void *memory, neap_attn_sums *ret_sums) {
    tile_scratch scratch;
    const neap_attn_shape *shape = &tile->job->shape;
    lay_out(shape, memory, &scratch);
    load_queries(tile, &scratch);
    for (uint32_t cell = tile->first_cell; cell < tile->end_cell; cell += BLOCK) {
        if (cell % NEAP_ATTN_CHUNK_CELLS == 0) {
            int err = await_chunk(tile, cell);
            if (err < 0) {
                return err;
            }
            if (err > 0) {
                cell += NEAP_ATTN_CHUNK_CELLS - BLOCK;
                continue;
            }
        }
        block at = block_at(tile, cell);
        int seen = classify_rows(tile, &scratch, &at);
        if (seen == SEES_NOTHING) {
            continue;
        }
        score_block(tile, &scratch, &at);
        soften(tile, &scratch, &at);
        add_values(tile, &scratch, &at, seen != SEES_ALL);
    }
    for (uint32_t r = 0; r < tile->n_rows; r++) {
        scratch.sum[r] = vf_reduce_add(vf_load(scratch.sum + r * VL));
    }
    *ret_sums = (neap_attn_sums){
        .out = scratch.out, .max = scratch.max, .sum = scratch.sum, .stride = scratch.v_stride};
    return 0;
}

const neap_attn_kernel TILE_KERNEL = {
    .name = TILE_NAME,
    .supported = TILE_SUPPORTED,
    .tile_rows = TILE_ROWS,
    .scratch_bytes = tile_scratch_bytes,
    .compute = tile_compute,
};
