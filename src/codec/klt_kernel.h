/* klt_kernel.h - the klt kernel, as a template over a vector type: included by klt_avx*.c and
 * klt_neon.c, klt_dotprod.c, klt_i8mm.c.
 *
 * The including file defines, for vectors of VL floats (VL divides 64):
 *   vf                          vectors of floats
 *   vf_set1(x) vf_load(p) vf_store(p, v) vf_add vf_sub vf_mul vf_min vf_max
 *   vf_fma(a, b, c)             a * b + c
 *   vf_fms(a, b, c)             a * b - c
 *   vf_fmaddsub vf_fmsubadd     a * b -+ c, a * b +- c: even lanes first
 *   vf_load_f16(p) vf_store_f16(p, v)
 *   vf_swap(x)                  neighbours change places
 *   vf_twice(p)                 each of VL / 2 floats, twice
 *   vi                          vectors of VL int32
 *   vi_set1(x) vi_add(a, b) vf_of_vi(v)
 *   vi_load(p) vi_store(p, v)   VL * 4 bytes
 *   vi_byte(v, i) vi_unsigned_byte(v, i)   byte i of each lane
 *   vi_step(x, t, k)            2 k + (x > t)
 *   vi_store_u8(p, v)           the lowest bytes
 *   vf_lookup(table, bits, k)   table[k], k < 2^bits; bits is a constant
 *   vs, vs_spread(p)            four y8 + 128 for all lanes
 *   vi_start(p)                 what sums of products begin with, of VL sums of g8
 *   vi_dot(acc, s, w)           acc + the four products of each lane
 *   TV                          vectors of the register tile
 *   product_strip(...)          optional: product_low() of STRIP rows, without n_rows
 *   transpose_square(x, pitch, out)   VL rows of VL floats, to out[VL][64]
 *   codes_to_f32(src, bits, table, sd, y)   64 codes to sd * table[code]; bits >= 5
 *   codes_to_y8(src[4], bits[4], table[4], y8)  64 codes of four components to y8[64][4]
 *   eight_to_f32(codes, table, sd, y)       likewise the 8 of neap_klt_unpack_8()
 *   eight_to_y8(codes[4], table[4], y8)     likewise, to y8[8][4]
 *   KLT_KERNEL, KLT_NAME, KLT_SUPPORTED */
#include <string.h>

#include "klt_int.h"

#define INLINE static inline __attribute__((always_inline))
#define TILE NEAP_KLT_TILE
#define STRIP NEAP_KLT_STRIP
#define PITCH NEAP_KLT_PITCH
#define EXACT_STEP 64u /* components of a tile whose weights, as f32, the first cache holds */
#ifndef product_strip
#define product_strip(basis, tile, at, mu, y8, out, pitch) \
    product_low(basis, tile, at, mu, y8, STRIP, out, pitch)
#endif

static void angles(const neap_klt_turns *turns, float scale, const int32_t *positions,
                   uint32_t n_rows, float *restrict cos, float *restrict sin) {
    for (uint32_t r = 0; r < n_rows; r++) {
        const double position = positions[r];
        for (uint32_t i = 0; i < turns->n_pairs; i++) {
            float c, s;
            neap_klt_cos_sin(position * turns->turns[i], &c, &s);
            cos[i] = c * scale;
            sin[i] = s * scale;
        }
        cos += turns->n_pairs;
        sin += turns->n_pairs;
    }
}

/* ---- decoding ---- */

static void unpack(const neap_klt_model *model, const neap_klt_basis *basis, const uint8_t *codes,
                   neap_klt_row_blocks blocks, float *y, uint8_t *y8) {
    for (uint32_t c = 0; c < basis->n_exact; c++) {
        const uint32_t bits = basis->bits[c];
        for (uint32_t b = blocks.first; b < blocks.end; b++)
            codes_to_f32(codes + (size_t)b * bits * TILE / 8, bits, model->tables[bits],
                         basis->sd[c], y + (size_t)c * PITCH + b * TILE);
        codes += (size_t)blocks.n * bits * TILE / 8;
    }
    for (uint32_t q = 0; q < basis->n_quads; q++) {
        const uint8_t *src[4];
        uint32_t bits[4];
        const int8_t *table[4];
        const uint8_t nothing[TILE / 8] = {0}; /* of a component past the last, of no weight */
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t c = basis->n_exact + 4 * q + i;
            bits[i] = c < basis->n_components ? basis->bits[c] : 0;
            table[i] = model->table8[bits[i]];
            src[i] = bits[i] ? codes + (size_t)blocks.first * bits[i] * TILE / 8 : nothing;
            codes += (size_t)bits[i] * blocks.n * TILE / 8;
        }
        for (uint32_t b = blocks.first; b < blocks.end; b++) {
            codes_to_y8(src, bits, table, y8 + ((size_t)q * PITCH + b * TILE) * 4);
            for (uint32_t i = 0; i < 4; i++)
                src[i] += bits[i] * TILE / 8;
        }
    }
}

static void unpack_8(const neap_klt_model *model, const neap_klt_basis *basis, const uint8_t *codes,
                     uint32_t n_blocks, uint32_t first, float *y, uint8_t *y8) {
    const uint32_t block = first / TILE, row = first % TILE;
    for (uint32_t c = 0; c < basis->n_exact; c++) {
        const uint32_t bits = basis->bits[c];
        eight_to_f32(neap_klt_unpack_8(codes + (size_t)block * bits * TILE / 8, bits, row),
                     model->tables[bits], basis->sd[c], y + (size_t)c * PITCH + first);
        codes += (size_t)n_blocks * bits * TILE / 8;
    }
    for (uint32_t q = 0; q < basis->n_quads; q++) {
        uint64_t eight[4];
        const int8_t *table[4];
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t c = basis->n_exact + 4 * q + i;
            const uint32_t bits = c < basis->n_components ? basis->bits[c] : 0;
            table[i] = model->table8[bits];
            eight[i] = neap_klt_unpack_8(codes + (size_t)block * bits * TILE / 8, bits, row);
            codes += (size_t)n_blocks * bits * TILE / 8;
        }
        eight_to_y8(eight, table, y8 + ((size_t)q * PITCH + first) * 4);
    }
}

/* The integer components of rows of a tile, TV vectors of its columns from at on; and mu. */
INLINE void product_low(const neap_klt_basis *basis, size_t tile, uint32_t at, const float *mu,
                        const uint8_t *y8, const uint32_t n_rows, float *out, size_t pitch) {
    const int8_t *g8 = basis->g8 + (tile * basis->n_quads * TILE + at) * 4;
    vi sum[STRIP][TV];
#pragma GCC unroll 6
    for (uint32_t r = 0; r < n_rows; r++)
#pragma GCC unroll 4
        for (uint32_t t = 0; t < TV; t++)
            sum[r][t] = vi_start(basis->g8_sum + tile * TILE + at + t * VL);
    for (uint32_t q = 0; q < basis->n_quads; q++, g8 += 4 * TILE, y8 += 4 * PITCH) {
        vi w[TV];
#pragma GCC unroll 4
        for (uint32_t t = 0; t < TV; t++)
            w[t] = vi_load(g8 + 4 * t * VL);
#pragma GCC unroll 6
        for (uint32_t r = 0; r < n_rows; r++) {
            const vs s = vs_spread(y8 + 4 * (size_t)r);
#pragma GCC unroll 4
            for (uint32_t t = 0; t < TV; t++)
                sum[r][t] = vi_dot(sum[r][t], s, w[t]);
        }
    }
#pragma GCC unroll 6
    for (uint32_t r = 0; r < n_rows; r++)
#pragma GCC unroll 4
        for (uint32_t t = 0; t < TV; t++)
            vf_store(out + r * pitch + at + t * VL,
                     vf_fma(vf_of_vi(sum[r][t]), vf_load(basis->step + tile * TILE + at + t * VL),
                            vf_load(mu + at + t * VL)));
}

static void widen(const uint16_t *rows, size_t pitch, uint32_t n_rows, uint32_t n, float *a) {
    for (uint32_t r = 0; r < n_rows; r++, rows += pitch, a += TILE) {
        uint32_t i = 0;
        for (; i + VL <= n; i += VL)
            vf_store(a + i, vf_load_f16(rows + i));
        for (; i < n; i++)
            a[i] = neap_f32_of_f16(rows[i]);
    }
}

/* Adds n of the others, TV vectors of columns of g[n][TILE]. */
INLINE void product_exact(const float *g, uint32_t n, const float *y, const uint32_t n_rows,
                          float *out, size_t pitch) {
    vf x[STRIP][TV];
#pragma GCC unroll 6
    for (uint32_t r = 0; r < n_rows; r++)
#pragma GCC unroll 4
        for (uint32_t t = 0; t < TV; t++)
            x[r][t] = vf_load(out + r * pitch + t * VL);
    for (uint32_t c = 0; c < n; c++, g += TILE, y += PITCH) {
        vf w[TV];
#pragma GCC unroll 4
        for (uint32_t t = 0; t < TV; t++)
            w[t] = vf_load(g + t * VL);
#pragma GCC unroll 6
        for (uint32_t r = 0; r < n_rows; r++) {
            const vf s = vf_set1(y[r]);
#pragma GCC unroll 4
            for (uint32_t t = 0; t < TV; t++)
                x[r][t] = vf_fma(s, w[t], x[r][t]);
        }
    }
#pragma GCC unroll 6
    for (uint32_t r = 0; r < n_rows; r++)
#pragma GCC unroll 4
        for (uint32_t t = 0; t < TV; t++)
            vf_store(out + r * pitch + t * VL, x[r][t]);
}

static void product(const neap_klt_basis *basis, uint32_t tile, const float *mu, const float *y,
                    const uint8_t *y8, uint32_t n_rows, float *out, size_t pitch) {
    const uint32_t strips = n_rows / STRIP * STRIP, pairs = n_rows / 2 * 2;
    for (uint32_t at = 0; at < TILE; at += TV * VL) {
        for (uint32_t r = 0; r < strips; r += STRIP)
            product_strip(basis, tile, at, mu, y8 + 4 * (size_t)r, out + r * pitch, pitch);
        for (uint32_t r = strips; r < pairs; r += 2)
            product_low(basis, tile, at, mu, y8 + 4 * (size_t)r, 2, out + r * pitch, pitch);
        for (uint32_t r = pairs; r < n_rows; r++)
            product_low(basis, tile, at, mu, y8 + 4 * (size_t)r, 1, out + r * pitch, pitch);
    }
    for (uint32_t first = 0; first < basis->n_exact; first += EXACT_STEP) {
        float g[EXACT_STEP * TILE] __attribute__((aligned(64)));
        const uint32_t left = basis->n_exact - first, n = left < EXACT_STEP ? left : EXACT_STEP;
        const float *from = y + (size_t)first * PITCH;
        widen(basis->g + ((size_t)tile * basis->n_exact + first) * TILE, TILE, n, TILE, g);
        for (uint32_t at = 0; at < TILE; at += TV * VL) {
            for (uint32_t r = 0; r < strips; r += STRIP)
                product_exact(g + at, n, from + r, STRIP, out + r * pitch + at, pitch);
            for (uint32_t r = strips; r < pairs; r += 2)
                product_exact(g + at, n, from + r, 2, out + r * pitch + at, pitch);
            for (uint32_t r = pairs; r < n_rows; r++)
                product_exact(g + at, n, from + r, 1, out + r * pitch + at, pitch);
        }
    }
}

static void product_mean(const neap_klt_basis *basis, uint32_t tile, const float *y, float *out) {
    const size_t first = (size_t)tile * TILE;
    for (uint32_t at = 0; at < TILE; at += VL) {
        const int8_t *g8 = basis->g8 + (first * basis->n_quads + at) * 4;
        const uint16_t *g = basis->g + first * basis->n_exact + at;
        const float *low = y + basis->n_exact;
        vf x = vf_set1(0);
        for (uint32_t q = 0; q < basis->n_quads; q++, g8 += 4 * TILE, low += 4) {
            const vi w = vi_load(g8);
            x = vf_fma(vf_set1(low[0]), vf_of_vi(vi_byte(w, 0)), x);
            x = vf_fma(vf_set1(low[1]), vf_of_vi(vi_byte(w, 1)), x);
            x = vf_fma(vf_set1(low[2]), vf_of_vi(vi_byte(w, 2)), x);
            x = vf_fma(vf_set1(low[3]), vf_of_vi(vi_byte(w, 3)), x);
        }
        x = vf_mul(x, vf_load(basis->step + first + at));
        for (uint32_t c = 0; c < basis->n_exact; c++, g += TILE)
            x = vf_fma(vf_set1(y[c]), vf_load_f16(g), x);
        vf_store(out + at, x);
    }
}

/* ---- rows ---- */

INLINE vf limited(vf x) {
    return vf_min(vf_max(x, vf_set1(-65504)), vf_set1(65504));
}

INLINE void put_f16(uint16_t *dst, float x) {
    x = x < -65504 ? -65504 : x;
    *dst = neap_f16_of_f32(x > 65504 ? 65504 : x);
}

INLINE void store_neox(const float *x, uint32_t n, const float *cos, const float *sin,
                       uint16_t *dst) {
    uint32_t i = 0;
    for (; i + VL <= n; i += VL) {
        const vf a = vf_load(x + i), b = vf_load(x + n + i), c = vf_load(cos + i),
                 s = vf_load(sin + i);
        vf_store_f16(dst + i, limited(vf_fms(a, c, vf_mul(b, s))));
        vf_store_f16(dst + n + i, limited(vf_fma(b, c, vf_mul(a, s))));
    }
    for (; i < n; i++) {
        put_f16(dst + i, __builtin_fmaf(x[i], cos[i], -(x[n + i] * sin[i])));
        put_f16(dst + n + i, __builtin_fmaf(x[n + i], cos[i], x[i] * sin[i]));
    }
}

INLINE void store_norm(const float *x, uint32_t n, const float *cos, const float *sin,
                       uint16_t *dst) {
    uint32_t i = 0;
    for (; i + VL / 2 <= n; i += VL / 2) {
        const vf ab = vf_load(x + 2 * i), c = vf_twice(cos + i), s = vf_twice(sin + i);
        vf_store_f16(dst + 2 * i, limited(vf_fmaddsub(ab, c, vf_mul(vf_swap(ab), s))));
    }
    for (; i < n; i++) {
        const float a = x[2 * i], b = x[2 * i + 1];
        put_f16(dst + 2 * i, __builtin_fmaf(a, cos[i], -(b * sin[i])));
        put_f16(dst + 2 * i + 1, __builtin_fmaf(b, cos[i], a * sin[i]));
    }
}

static void store(const float *x, size_t pitch, const neap_klt_rows *rows) {
    const uint32_t n = rows->n_pairs;
    for (uint32_t r = 0; r < rows->n; r++, x += pitch) {
        uint16_t *dst = (uint16_t *)(void *)(rows->data + r * rows->stride);
        const float *cos = rows->cos + (size_t)r * n, *sin = rows->sin + (size_t)r * n;
        if (rows->mode == NEAP_KLT_ROPE_NEOX) store_neox(x, n, cos, sin, dst);
        if (rows->mode == NEAP_KLT_ROPE_NORM) store_norm(x, n, cos, sin, dst);
        uint32_t i = 2 * n;
        for (; i + VL <= rows->dim; i += VL)
            vf_store_f16(dst + i, limited(vf_load(x + i)));
        for (; i < rows->dim; i++)
            put_f16(dst + i, x[i]);
    }
}

INLINE void load_neox(float *x, uint32_t n, const float *cos, const float *sin) {
    uint32_t i = 0;
    for (; i + VL <= n; i += VL) {
        const vf a = vf_load(x + i), b = vf_load(x + n + i), c = vf_load(cos + i),
                 s = vf_load(sin + i);
        vf_store(x + i, vf_fma(a, c, vf_mul(b, s)));
        vf_store(x + n + i, vf_fms(b, c, vf_mul(a, s)));
    }
    for (; i < n; i++) {
        const float a = x[i], b = x[n + i];
        x[i] = __builtin_fmaf(a, cos[i], b * sin[i]);
        x[n + i] = __builtin_fmaf(b, cos[i], -(a * sin[i]));
    }
}

INLINE void load_norm(float *x, uint32_t n, const float *cos, const float *sin) {
    uint32_t i = 0;
    for (; i + VL / 2 <= n; i += VL / 2) {
        const vf ab = vf_load(x + 2 * i), c = vf_twice(cos + i), s = vf_twice(sin + i);
        vf_store(x + 2 * i, vf_fmsubadd(ab, c, vf_mul(vf_swap(ab), s)));
    }
    for (; i < n; i++) {
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = __builtin_fmaf(a, cos[i], b * sin[i]);
        x[2 * i + 1] = __builtin_fmaf(b, cos[i], -(a * sin[i]));
    }
}

static void load(const neap_klt_rows *rows, float *x, size_t pitch) {
    const uint32_t n = rows->n_pairs;
    for (uint32_t r = 0; r < rows->n; r++, x += pitch) {
        const uint16_t *src = (const uint16_t *)(const void *)(rows->data + r * rows->stride);
        const float *cos = rows->cos + (size_t)r * n, *sin = rows->sin + (size_t)r * n;
        uint32_t i = 0;
        for (; i + VL <= rows->dim; i += VL)
            vf_store(x + i, vf_load_f16(src + i));
        for (; i < rows->dim; i++)
            x[i] = neap_f32_of_f16(src[i]);
        if (rows->mode == NEAP_KLT_ROPE_NEOX) load_neox(x, n, cos, sin);
        if (rows->mode == NEAP_KLT_ROPE_NORM) load_norm(x, n, cos, sin);
    }
}

/* ---- encoding ---- */

static void transpose(const float *x, size_t pitch, uint32_t dim, float *panel) {
    uint32_t j = 0;
    for (; j + VL <= dim; j += VL)
        for (uint32_t r = 0; r < TILE; r += VL)
            transpose_square(x + r * pitch + j, pitch, panel + (size_t)j * TILE + r);
    for (; j < dim; j++)
        for (uint32_t r = 0; r < TILE; r++)
            panel[(size_t)j * TILE + r] = x[r * pitch + j];
}

#define WIDEN_BYTE(i)                                                         \
    vf_store(a + at + (i)*TILE, vf_fma(vf_of_vi(vi_byte(rest, i)), rest_step, \
                                       vf_mul(vf_of_vi(vi_byte(codes, i)), step)))

static void widen_quad(const neap_klt_basis *basis, uint32_t tile, uint32_t quad, float *a) {
    const size_t from = ((size_t)tile * basis->n_quads + quad) * TILE * 4;
    for (uint32_t at = 0; at < TILE; at += VL) {
        const vi codes = vi_load(basis->g8 + from + 4 * (size_t)at),
                 rest = vi_load(basis->rest8 + from + 4 * (size_t)at);
        const vf step = vf_load(basis->step + (size_t)tile * TILE + at),
                 rest_step = vf_load(basis->rest_step + (size_t)tile * TILE + at);
        WIDEN_BYTE(0);
        WIDEN_BYTE(1);
        WIDEN_BYTE(2);
        WIDEN_BYTE(3);
    }
}

static void project(const float *a, const float *x, uint32_t n, float *y) {
    for (uint32_t at = 0; at < TILE; at += TV * VL) {
        const float *from = x + at, *by = a;
        vf sum[STRIP][TV];
#pragma GCC unroll 6
        for (uint32_t k = 0; k < STRIP; k++)
#pragma GCC unroll 4
            for (uint32_t t = 0; t < TV; t++)
                sum[k][t] = vf_load(y + k * TILE + at + t * VL);
        for (uint32_t j = 0; j < n; j++, from += TILE, by++) {
            vf w[TV];
#pragma GCC unroll 4
            for (uint32_t t = 0; t < TV; t++)
                w[t] = vf_load(from + t * VL);
#pragma GCC unroll 6
            for (uint32_t k = 0; k < STRIP; k++) {
                const vf s = vf_set1(by[k * TILE]);
#pragma GCC unroll 4
                for (uint32_t t = 0; t < TV; t++)
                    sum[k][t] = vf_fma(w[t], s, sum[k][t]);
            }
        }
#pragma GCC unroll 6
        for (uint32_t k = 0; k < STRIP; k++)
#pragma GCC unroll 4
            for (uint32_t t = 0; t < TV; t++)
                vf_store(y + k * TILE + at + t * VL, sum[k][t]);
    }
}

static bool is_finite(const uint16_t *row, size_t n) {
    return neap_klt_is_finite(row, n);
}

INLINE void add(const float *x, vf lanes[16 / VL]) {
#pragma GCC unroll 8
    for (uint32_t i = 0; i < TILE / VL; i++)
        lanes[i % (16 / VL)] = vf_add(lanes[i % (16 / VL)], vf_load(x + i * VL));
}

INLINE float fold(const vf lanes[16 / VL]) {
    float sums[16];
    for (uint32_t i = 0; i < 16 / VL; i++)
        vf_store(sums + i * VL, lanes[i]);
    return neap_klt_fold(sums);
}

INLINE void clear(vf lanes[16 / VL]) {
    for (uint32_t i = 0; i < 16 / VL; i++)
        lanes[i] = vf_set1(0);
}

static void centre(float *panels, uint32_t n_columns, uint32_t n_blocks, const float *coded,
                   float n_coded, float *sum) {
    const size_t panel = (size_t)n_columns * TILE;
    for (uint32_t j = 0; j < n_columns; j++, panels += TILE) {
        vf lanes[16 / VL];
        clear(lanes);
        for (uint32_t b = 0; b < n_blocks; b++)
            add(panels + b * panel, lanes);
        sum[j] = fold(lanes);
        const vf mean = vf_set1(n_coded > 0 ? sum[j] / n_coded : 0);
        for (uint32_t b = 0; b < n_blocks; b++)
            for (uint32_t i = 0; i < TILE; i += VL) {
                float *x = panels + b * panel + i;
                vf_store(x, vf_sub(vf_load(x), vf_mul(mean, vf_load(coded + b * TILE + i))));
            }
    }
}

static void means(const neap_klt_basis *basis, const float *y, const uint8_t *y8, uint32_t n_blocks,
                  float count, float *y_mean) {
    for (uint32_t c = 0; c < basis->n_exact; c++, y += PITCH) {
        vf lanes[16 / VL];
        clear(lanes);
        for (uint32_t b = 0; b < n_blocks; b++)
            add(y + b * TILE, lanes);
        *y_mean++ = fold(lanes) / count;
    }
    const int32_t all = (int32_t)(128 * n_blocks * TILE);
    for (uint32_t q = 0; q < basis->n_quads; q++, y8 += 4 * PITCH) {
        vi sum[4] = {vi_set1(0), vi_set1(0), vi_set1(0), vi_set1(0)};
        for (uint32_t r = 0; r < n_blocks * TILE; r += VL) {
            const vi four = vi_load(y8 + 4 * (size_t)r);
            sum[0] = vi_add(sum[0], vi_unsigned_byte(four, 0));
            sum[1] = vi_add(sum[1], vi_unsigned_byte(four, 1));
            sum[2] = vi_add(sum[2], vi_unsigned_byte(four, 2));
            sum[3] = vi_add(sum[3], vi_unsigned_byte(four, 3));
        }
        for (uint32_t i = 0; i < 4; i++) {
            int32_t lanes[VL], total = -all;
            vi_store(lanes, sum[i]);
            for (uint32_t k = 0; k < VL; k++)
                total += lanes[k];
            *y_mean++ = (float)total / count;
        }
    }
}

INLINE void quantise_bits(const neap_klt_model *model, const uint32_t bits, float sd,
                          float inverse_sd, const float *y, uint8_t *codes, float *error,
                          float *power) {
    const float *thresholds = model->thresholds[bits], *table = model->tables[bits];
    uint8_t code[TILE] __attribute__((aligned(64)));
#pragma GCC unroll 1
    for (uint32_t r = 0; r < TILE; r += VL) {
        const vf v = vf_load(y + r), unit = vf_mul(v, vf_set1(inverse_sd));
        vi k = vi_set1(0);
#pragma GCC unroll 8
        for (uint32_t d = 0; d < bits; d++)
            k = vi_step(unit, vf_lookup(thresholds + (1u << d), d, k), k);
        vi_store_u8(code + r, k);
        const vf off = vf_sub(v, vf_mul(vf_set1(sd), vf_lookup(table, bits, k)));
        vf_store(error + r, vf_fma(off, off, vf_load(error + r)));
        vf_store(power + r, vf_fma(v, v, vf_load(power + r)));
    }
    neap_klt_pack(code, bits, codes);
}

static void quantise(const neap_klt_model *model, uint32_t bits, float sd, float inverse_sd,
                     const float *y, uint8_t *codes, float *error, float *power) {
    switch (bits) {
    case 1:
        quantise_bits(model, 1, sd, inverse_sd, y, codes, error, power);
        break;
    case 2:
        quantise_bits(model, 2, sd, inverse_sd, y, codes, error, power);
        break;
    case 3:
        quantise_bits(model, 3, sd, inverse_sd, y, codes, error, power);
        break;
    case 4:
        quantise_bits(model, 4, sd, inverse_sd, y, codes, error, power);
        break;
    case 5:
        quantise_bits(model, 5, sd, inverse_sd, y, codes, error, power);
        break;
    case 6:
        quantise_bits(model, 6, sd, inverse_sd, y, codes, error, power);
        break;
    case 7:
        quantise_bits(model, 7, sd, inverse_sd, y, codes, error, power);
        break;
    default:
        quantise_bits(model, 8, sd, inverse_sd, y, codes, error, power);
        break;
    }
}

const neap_klt_kernel KLT_KERNEL = {
    .name = KLT_NAME,
    .supported = KLT_SUPPORTED,
    .is_finite = is_finite,
    .angles = angles,
    .unpack = unpack,
    .unpack_8 = unpack_8,
    .product = product,
    .product_mean = product_mean,
    .store = store,
    .load = load,
    .transpose = transpose,
    .centre = centre,
    .means = means,
    .widen = widen,
    .widen_quad = widen_quad,
    .project = project,
    .quantise = quantise,
};
