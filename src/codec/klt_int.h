/* klt_int.h - what the parts of the klt codec share: the open model as kernels want it, the
 * kernels. All kernels give the same bytes: every f32 operation is the one named here and in
 * docs/formats/klt.md, rounded once; a * b + c is always one fma. */
#ifndef NEAP_KLT_INT_H
#define NEAP_KLT_INT_H

#include <string.h>

#include "half.h"
#include "klt.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the klt formats are read and written by plain copies: little-endian machines only"
#endif

#define NEAP_KLT_TILE 64u     /* columns of a tile of G, rows of a block of codes */
#define NEAP_KLT_STRIP 6u     /* components, or rows, that a product has in registers */
#define NEAP_KLT_EXACT_BITS 5 /* from here on a component is decoded in f32 */
#define NEAP_KLT_PITCH 272u   /* of y, in rows: no power of two, so that rows do not share sets */

/* A group as the kernels use it. Each head's columns begin a tile; what fills a tile up is zero. */
typedef struct neap_klt_basis {
    uint32_t n_columns, n_components, n_tiles;
    uint32_t n_exact;        /* the first components: those decoded in f32 */
    uint32_t n_quads;        /* of the others, four by four */
    uint32_t f_width;        /* of the file's F: components at the file's own ratio */
    uint32_t code_bytes;     /* of 64 rows of all components */
    const uint8_t *bits;     /* [n_components] */
    const float *sd;         /* [n_components] */
    const float *inverse_sd; /* [n_components] */
    const uint16_t *g;       /* f16 [n_tiles][n_exact][64] */
    const int8_t *g8;        /* [n_tiles][n_quads][64][4] */
    const int32_t *g8_sum;   /* [n_tiles][64] over the components */
    const float *step;       /* [n_tiles][64] of g8 */
    const uint16_t *metric;  /* f16, of each head [dim][dim], or NULL */
    /* To encode: F', or what g8 leaves of G: (g8 step + rest8 rest_step) * inverse_unit. */
    const uint16_t *f;         /* f16 [n_components][n_columns], or NULL */
    const int8_t *rest8;       /* like g8 */
    const float *rest_step;    /* like step */
    const float *inverse_unit; /* [4 * n_quads] */
} neap_klt_basis;

/* A RoPE table in turns: exact products with any position. */
typedef struct neap_klt_turns {
    uint32_t mode, n_pairs;
    float magnitude;
    double turns[NEAP_KLT_HEAD_DIM / 2];
} neap_klt_turns;

struct neap_klt_model {
    neap_klt_spec spec;
    uint64_t id;
    size_t bytes, scratch_bytes;
    neap_klt_rope *ropes;
    neap_klt_block *blocks;
    neap_klt_group *groups;
    neap_klt_turns *turns;                /* [n_ropes] */
    neap_klt_basis *bases;                /* [n_groups] */
    void **arenas;                        /* [n_groups] what a basis points to */
    float tables[NEAP_KLT_BITS + 1][256]; /* values; past the last code, zero */
    /* Between codes, as a search meets them: [2^d + the code's highest d bits]. */
    float thresholds[NEAP_KLT_BITS + 1][256];
    int8_t table8[NEAP_KLT_BITS + 1][16]; /* of the widths below NEAP_KLT_EXACT_BITS */
    size_t guest_memory;
    const neap_klt_guest *guest; /* NULL: klt itself; else only spec.blocks is filled */
    void *guest_self;
};

/* Columns of one head of one plane of a group. */
typedef struct neap_klt_head {
    bool is_v;
    uint32_t layer; /* of the block's */
    uint32_t head;  /* KV head of the layer */
    uint32_t dim, column, tile;
} neap_klt_head;

/* *head zeroed: the first head; false past the last. */
bool neap_klt_next_head(const neap_klt_block *block, const neap_klt_group *group,
                        neap_klt_head *head);

/* Elements of the metric of all heads of a group. */
uint64_t neap_klt_metric_values(const neap_klt_block *block, const neap_klt_group *group);

/* Rows of one head: f16, stride bytes apart, and the turns of their pairs (mode NONE: not used). */
typedef struct neap_klt_rows {
    uint8_t *data;
    size_t stride;
    uint32_t n, dim;
    uint32_t mode, n_pairs;
    const float *cos, *sin; /* [n][n_pairs] */
} neap_klt_rows;

/* Blocks [first, end) of so many blocks of 64 rows. */
typedef struct neap_klt_row_blocks {
    uint32_t n, first, end;
} neap_klt_row_blocks;

typedef struct neap_klt_kernel {
    const char *name;
    bool (*supported)(void);
    bool (*is_finite)(const uint16_t *row, size_t n);
    /* cos and sin, times scale, of position * turns: [n_rows][n_pairs]. */
    void (*angles)(const neap_klt_turns *turns, float scale, const int32_t *positions,
                   uint32_t n_rows, float *cos, float *sin);
    /* Components of some of the blocks of 64 rows from the codes of all:
     * y[n_exact][NEAP_KLT_PITCH], and y8 + 128 [n_quads][NEAP_KLT_PITCH][4]. */
    void (*unpack)(const neap_klt_model *model, const neap_klt_basis *basis, const uint8_t *codes,
                   neap_klt_row_blocks blocks, float *y, uint8_t *y8);
    /* The same of 8 rows, first on, a multiple of 8: what attention reads of a chunk that it does
     * not read whole. */
    void (*unpack_8)(const neap_klt_model *model, const neap_klt_basis *basis, const uint8_t *codes,
                     uint32_t n_blocks, uint32_t first, float *y, uint8_t *y8);
    /* x of a tile: out[n_rows][pitch]; mu is the tile's. */
    void (*product)(const neap_klt_basis *basis, uint32_t tile, const float *mu, const float *y,
                    const uint8_t *y8, uint32_t n_rows, float *out, size_t pitch);
    /* The same of one row whose y8 are not whole, without mu. */
    void (*product_mean)(const neap_klt_basis *basis, uint32_t tile, const float *y, float *out);
    /* Turns x[rows->n][pitch], rounds it to f16. */
    void (*store)(const float *x, size_t pitch, const neap_klt_rows *rows);
    /* The reverse: x from the rows, turned back by cos and sin. */
    void (*load)(const neap_klt_rows *rows, float *x, size_t pitch);
    /* panel[dim][64] of x[64][pitch]. */
    void (*transpose)(const float *x, size_t pitch, uint32_t dim, float *panel);
    /* Sums n_blocks panels by columns, and takes sum / n_coded off where coded[row] is 1, not 0. */
    void (*centre)(float *panels, uint32_t n_columns, uint32_t n_blocks, const float *coded,
                   float n_coded, float *sum);
    /* Means of the components over so many rows: y_mean[components, to whole quads]. */
    void (*means)(const neap_klt_basis *basis, const float *y, const uint8_t *y8, uint32_t n_blocks,
                  float count, float *y_mean);
    /* a[n_rows][64]: n <= 64 elements of each row of f16, pitch of them apart. */
    void (*widen)(const uint16_t *rows, size_t pitch, uint32_t n_rows, uint32_t n, float *a);
    /* a[4][64]: what a quad of a tile is to encode, before inverse_unit. */
    void (*widen_quad)(const neap_klt_basis *basis, uint32_t tile, uint32_t quad, float *a);
    /* y[NEAP_KLT_STRIP][64] += a x, in the order of n: a[NEAP_KLT_STRIP][64], x[n][64]. */
    void (*project)(const float *a, const float *x, uint32_t n, float *y);
    /* Codes of a component of 64 rows; adds (y - y^)^2 to each row's error, y^2 to its power. */
    void (*quantise)(const neap_klt_model *model, uint32_t bits, float sd, float inverse_sd,
                     const float *y, uint8_t *codes, float *error, float *power);
} neap_klt_kernel;

/* The i-th kernel that this machine can run, fastest first, the scalar one last; NULL past it. */
const neap_klt_kernel *neap_klt_kernel_at(size_t i);
int neap_klt_encode_with(const neap_klt_kernel *kernel, const neap_klt_model *model,
                         const neap_klt_chunk *chunk, void *scratch, void *dst, size_t cap,
                         size_t *ret_len, float *ret_error);
int neap_klt_decode_with(const neap_klt_kernel *kernel, const neap_klt_model *model,
                         const void *src, size_t len, const neap_klt_chunk *chunk, void *scratch);
/* part NULL: all of it. */
int neap_klt_decode_part_with(const neap_klt_kernel *kernel, const neap_klt_model *model,
                              const void *src, size_t len, const neap_klt_chunk *chunk,
                              const neap_klt_part *part, void *scratch);
/* The model file in memory: malloc'd. Fails: like neap_klt_model_write(); name is for messages. */
int neap_klt_model_build(const neap_klt_spec *spec, const char *name, uint8_t **ret_bytes,
                         size_t *ret_len);
/* Bits for a ratio above the file's, before the bases are made: *ret_bits holds them, the caller
 * frees it after. Fails: NEAP_E_BOUND (see neap_klt_model_open_at()); -ENOMEM. */
int neap_klt_model_set_ratio(neap_klt_model *model, double ratio, uint8_t **ret_bits);
/* What the kernels use, from a model whose spec shows the file's matrices; those are then NULL.
 * Fails: -ENOMEM. */
int neap_klt_make_bases(neap_klt_model *model);
/* Scratch of one call for a block. */
size_t neap_klt_block_scratch(const neap_klt_model *model, uint32_t block);

/* What follows is compiled once for each kernel. */
#define NEAP_KLT_INLINE static inline __attribute__((always_inline))

/* ---- sine and cosine ---- */

/* sin and cos of u turns, |u| <= 1/8: u * (S0 + u^2 (S1 + ...)), 1 + u^2 (C1 + ...). */
#define NEAP_KLT_S0 6.28318531f
#define NEAP_KLT_S1 -41.3417022f
#define NEAP_KLT_S2 81.6052493f
#define NEAP_KLT_S3 -76.7058597f
#define NEAP_KLT_S4 42.0586940f
#define NEAP_KLT_C1 -19.7392088f
#define NEAP_KLT_C2 64.9393940f
#define NEAP_KLT_C3 -85.4568172f
#define NEAP_KLT_C4 60.2446414f

/* cos and sin of any whole number of turns apart. */
NEAP_KLT_INLINE void neap_klt_cos_sin(double turns, float *cos, float *sin) {
    const float t = (float)(turns - __builtin_rint(turns)), quarter = __builtin_rintf(4 * t);
    const float u = __builtin_fmaf(quarter, -0.25f, t), q = u * u;
    float s = __builtin_fmaf(q, NEAP_KLT_S4, NEAP_KLT_S3), c;
    s = __builtin_fmaf(q, s, NEAP_KLT_S2);
    s = __builtin_fmaf(q, s, NEAP_KLT_S1);
    s = __builtin_fmaf(q, s, NEAP_KLT_S0) * u;
    c = __builtin_fmaf(q, NEAP_KLT_C4, NEAP_KLT_C3);
    c = __builtin_fmaf(q, c, NEAP_KLT_C2);
    c = __builtin_fmaf(q, c, NEAP_KLT_C1);
    c = __builtin_fmaf(q, c, 1.0f);
    const int32_t k = (int32_t)quarter;
    const float x = k & 1 ? s : c, y = k & 1 ? c : s;
    *cos = (k + 1) & 2 ? -x : x;
    *sin = k & 2 ? -y : y;
}

/* ---- rows ---- */

NEAP_KLT_INLINE bool neap_klt_is_finite(const uint16_t *row, size_t n) {
    uint16_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        const uint16_t magnitude = row[i] & 0x7fff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest < NEAP_F16_INF;
}

/* Sums over rows are in 16 lanes, by row, then folded. */
NEAP_KLT_INLINE float neap_klt_fold(float lanes[16]) {
    for (uint32_t width = 8; width; width /= 2)
        for (uint32_t i = 0; i < width; i++)
            lanes[i] += lanes[i + width];
    return lanes[0];
}

/* ---- codes of 64 rows ---- */

/* The lowest four bits first, then two, then one: docs/formats/klt.md. */
NEAP_KLT_INLINE void neap_klt_pack(const uint8_t codes[NEAP_KLT_TILE], uint32_t bits,
                                   uint8_t *dst) {
    uint32_t done = 0;
    if (bits == 8) {
        memcpy(dst, codes, NEAP_KLT_TILE);
        return;
    }
    if (bits & 4) {
        for (uint32_t i = 0; i < 32; i++)
            dst[i] = (uint8_t)((codes[i] & 15) | codes[i + 32] << 4);
        dst += 32;
        done = 4;
    }
    if (bits & 2) {
        for (uint32_t i = 0; i < 16; i++)
            dst[i] = (uint8_t)((codes[i] >> done & 3) | (codes[i + 16] >> done & 3) << 2 |
                               (codes[i + 32] >> done & 3) << 4 | (codes[i + 48] >> done & 3) << 6);
        dst += 16;
        done += 2;
    }
    for (uint32_t i = 0; i < 8 && bits & 1; i++) {
        uint64_t eight;
        memcpy(&eight, codes + 8 * i, sizeof eight);
        eight = eight >> done & UINT64_C(0x0101010101010101);
        dst[i] = (uint8_t)(eight * UINT64_C(0x0102040810204080) >> 56);
    }
}

NEAP_KLT_INLINE void neap_klt_unpack(const uint8_t *src, uint32_t bits,
                                     uint8_t codes[NEAP_KLT_TILE]) {
    uint32_t done = 0;
    if (bits == 8) {
        memcpy(codes, src, NEAP_KLT_TILE);
        return;
    }
    memset(codes, 0, NEAP_KLT_TILE);
    if (bits & 4) {
        for (uint32_t i = 0; i < 32; i++) {
            codes[i] = src[i] & 15;
            codes[i + 32] = src[i] >> 4;
        }
        src += 32;
        done = 4;
    }
    if (bits & 2) {
        for (uint32_t i = 0; i < 16; i++)
            for (uint32_t k = 0; k < 4; k++)
                codes[i + 16 * k] |= (uint8_t)((src[i] >> 2 * k & 3) << done);
        src += 16;
        done += 2;
    }
    for (uint32_t i = 0; i < 8 && bits & 1; i++) {
        uint64_t eight, bit = src[i] * UINT64_C(0x0101010101010101);
        bit = ((bit & UINT64_C(0x8040201008040201)) + UINT64_C(0x7f7f7f7f7f7f7f7f)) >> 7;
        memcpy(&eight, codes + 8 * i, sizeof eight);
        eight |= (bit & UINT64_C(0x0101010101010101)) << done;
        memcpy(codes + 8 * i, &eight, sizeof eight);
    }
}

/* 8 of those codes, row on, a multiple of 8: a byte each, the first one lowest. */
NEAP_KLT_INLINE uint64_t neap_klt_unpack_8(const uint8_t *src, uint32_t bits, uint32_t row) {
    uint64_t codes = 0, part;
    uint32_t done = 0;
    if (bits == 8) {
        memcpy(&codes, src + row, sizeof codes);
        return codes;
    }
    if (bits & 4) {
        memcpy(&part, src + row % 32, sizeof part);
        codes = part >> row / 32 * 4 & UINT64_C(0x0f0f0f0f0f0f0f0f);
        src += 32;
        done = 4;
    }
    if (bits & 2) {
        memcpy(&part, src + row % 16, sizeof part);
        codes |= (part >> row / 16 * 2 & UINT64_C(0x0303030303030303)) << done;
        src += 16;
        done += 2;
    }
    if (bits & 1) {
        part = src[row / 8] * UINT64_C(0x0101010101010101) & UINT64_C(0x8040201008040201);
        part = (part + UINT64_C(0x7f7f7f7f7f7f7f7f)) >> 7;
        codes |= (part & UINT64_C(0x0101010101010101)) << done;
    }
    return codes;
}

#if defined(__x86_64__)
extern const neap_klt_kernel neap_klt_avx512, neap_klt_avx2;
#elif defined(__aarch64__)
extern const neap_klt_kernel neap_klt_i8mm, neap_klt_dotprod, neap_klt_neon;
#endif
#endif
