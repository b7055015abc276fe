/* cachegen_analyse.h - the analysis of a tile, compiled once for each kind of machine: the includer
 * gives the conversion of an f16 row, the compiler the vectors. See cachegen.c for what is found.
 * Sums over a row run in 16 lanes and are folded in one order, so that every kernel rounds alike;
 * no f32 product is ever added to something, so nothing can be fused. */
#ifndef NEAP_CACHEGEN_ANALYSE_H
#define NEAP_CACHEGEN_ANALYSE_H

#include "cachegen_int.h"
#include "neap.h"

#define CG_INLINE static inline __attribute__((always_inline))

enum {
    CG_SUM_LANES = 16,
    CG_MIN_EXPONENT = -100,    /* of a step of bf16 and f32 */
    CG_LIMIT_BITS = 227 << 23, /* 2^100: rows with larger values, or none, are kept */
    CG_TINY_BITS = 27 << 23,   /* 2^-100: less is zero, whatever the thread does with subnormals */
    CG_MAX_SHIFT = 15,
    CG_NO_EXPONENT = 127, /* of a row of zeros */
    CG_MAX_ROUNDS = 4,
};

typedef void (*cg_load_f16)(const uint8_t *src, uint32_t n, float *dst);

/* A row of the tile, or of what its values were rounded to. */
CG_INLINE void cg_load(cg_load_f16 load_f16, const neap_cg_tile *tile, const neap_cg_codes *codes,
                       bool rounded, uint32_t row, float *x) {
    const uint8_t *src = tile->data + row * tile->stride;
    if (rounded) {
        const int16_t *code = codes->codes + (size_t)row * tile->cols;
        const int exponent = codes->row_exponent[row];
        const float step = neap_cg_power(exponent == CG_NO_EXPONENT ? 0 : exponent);
        for (uint32_t c = 0; c < tile->cols; c++)
            x[c] = (float)code[c] * step;
        return;
    }
    if (tile->type == NEAP_KV_F16) {
        load_f16(src, tile->cols, x);
        return;
    }
    uint32_t bits[NEAP_CG_COLS];
    if (tile->type == NEAP_KV_F32) {
        memcpy(bits, src, 4 * (size_t)tile->cols);
    } else {
        uint16_t narrow[NEAP_CG_COLS];
        memcpy(narrow, src, 2 * (size_t)tile->cols);
        for (uint32_t c = 0; c < tile->cols; c++)
            bits[c] = (uint32_t)narrow[c] << 16;
    }
    for (uint32_t c = 0; c < tile->cols; c++)
        bits[c] = (bits[c] & 0x7fffffffu) < CG_TINY_BITS ? 0 : bits[c];
    memcpy(x, bits, 4 * (size_t)tile->cols);
}

/* Sum of magnitudes; the elements past the last, up to a multiple of 16, are zero. */
CG_INLINE float cg_sum_abs(const float *x, uint32_t n) {
    float sums[CG_SUM_LANES] = {0};
    for (uint32_t first = 0; first < n; first += CG_SUM_LANES)
        for (uint32_t i = 0; i < CG_SUM_LANES; i++)
            sums[i] += fabsf(x[first + i]);
    for (uint32_t width = CG_SUM_LANES / 2; width; width /= 2)
        for (uint32_t i = 0; i < width; i++)
            sums[i] += sums[i + width];
    return sums[0];
}

typedef struct cg_stats {
    float row_mean[NEAP_CG_ROWS]; /* of magnitudes */
    int row_top[NEAP_CG_ROWS];    /* magnitudes are below 2^top */
    float deviation;              /* mean distance from the mean of the column */
    uint32_t n_rows;              /* that are not kept */
    int wanted[NEAP_CG_ROWS];     /* exponent of the step that a row should have */
    bool limited;                 /* the type set a step, not the deviation */
} cg_stats;

CG_INLINE void cg_measure(cg_load_f16 load_f16, const neap_cg_tile *tile, neap_cg_codes *codes,
                          bool rounded, cg_stats *stats) {
    float x[NEAP_CG_COLS] = {0}, sum[NEAP_CG_COLS] = {0}, deviation[NEAP_CG_COLS] = {0};
    const float cols = (float)tile->cols;
    stats->n_rows = 0;
    for (uint32_t r = 0; r < tile->rows; r++) {
        uint32_t top = 0;
        if (rounded && codes->exact[r]) continue;
        cg_load(load_f16, tile, codes, rounded, r, x);
        for (uint32_t c = 0; c < tile->cols; c++) {
            const uint32_t magnitude = neap_f32_bits(x[c]) & 0x7fffffffu;
            top = magnitude > top ? magnitude : top;
        }
        codes->exact[r] = top >= CG_LIMIT_BITS;
        codes->model.shift[r] = codes->exact[r] ? NEAP_CG_ROW_RAW : 0;
        if (codes->exact[r]) continue;
        stats->n_rows++;
        stats->row_top[r] = (int)(top >> 23) - 126;
        stats->row_mean[r] = cg_sum_abs(x, tile->cols) / cols;
        for (uint32_t c = 0; c < tile->cols; c++)
            sum[c] += x[c];
    }
    if (stats->n_rows == 0) return;
    const float rows = (float)stats->n_rows;
    for (uint32_t c = 0; c < tile->cols; c++)
        sum[c] /= rows;
    for (uint32_t r = 0; r < tile->rows; r++) {
        if (codes->exact[r]) continue;
        cg_load(load_f16, tile, codes, rounded, r, x);
        for (uint32_t c = 0; c < tile->cols; c++)
            deviation[c] += fabsf(x[c] - sum[c]);
    }
    for (uint32_t c = 0; c < tile->cols; c++)
        deviation[c] /= rows;
    stats->deviation = cg_sum_abs(deviation, tile->cols) / cols;
}

CG_INLINE int cg_lowest_exponent(int type) {
    return type == NEAP_KV_F16 ? -24 : CG_MIN_EXPONENT;
}

CG_INLINE void cg_find_wanted(const neap_cg_tile *tile, const neap_cg_codes *codes,
                              cg_stats *stats) {
    const int digits = tile->type == NEAP_KV_F16 ? 11 : tile->type == NEAP_KV_BF16 ? 8 : 13;
    const int lowest = cg_lowest_exponent(tile->type);
    stats->limited = false;
    for (uint32_t r = 0; r < tile->rows; r++) {
        if (codes->exact[r]) continue;
        const float mean = stats->row_mean[r];
        const float scale = mean < stats->deviation ? mean : stats->deviation;
        const float step = tile->levels * scale * 1.41421356f; /* to the nearest power */
        const int exponent = (int)(neap_f32_bits(step) >> 23) - 127;
        int wanted = exponent < lowest ? lowest : exponent;
        if (wanted < stats->row_top[r] - digits) wanted = stats->row_top[r] - digits;
        stats->limited |= wanted != exponent || (tile->type == NEAP_KV_F16 && wanted > 4);
        stats->wanted[r] = wanted;
    }
}

/* Whether every value is a whole number of half steps: a tile that was decoded from codes. */
CG_INLINE bool cg_is_settled(cg_load_f16 load_f16, const neap_cg_tile *tile,
                             const neap_cg_codes *codes, bool rounded, const cg_stats *stats) {
    float x[NEAP_CG_COLS];
    for (uint32_t r = 0; r < tile->rows; r++) {
        if (codes->exact[r]) continue;
        cg_load(load_f16, tile, codes, rounded, r, x);
        const float inverse = neap_cg_power(1 - stats->wanted[r]);
        int32_t off = 0;
        for (uint32_t c = 0; c < tile->cols; c++) {
            const float y = x[c] * inverse;
            off |= (float)(int32_t)y != y || (y == 0 && x[c] != 0);
        }
        if (off) return false;
    }
    return true;
}

/* Codes of a row in the largest steps that hold its values exactly. */
CG_INLINE void cg_quantise(cg_load_f16 load_f16, const neap_cg_tile *tile, neap_cg_codes *codes,
                           bool rounded, int exponent, uint32_t row) {
    const float inverse = neap_cg_power(-exponent);
    int16_t *out = codes->codes + (size_t)row * tile->cols;
    float x[NEAP_CG_COLS];
    int32_t limit = NEAP_CG_CODE_MAX, all = 0, top = 0;
    /* The largest f16 is no multiple of large steps; what follows it is not finite. */
    if (tile->type == NEAP_KV_F16 && exponent > 4) limit = 65504 >> exponent;
    cg_load(load_f16, tile, codes, rounded, row, x);
    for (uint32_t c = 0; c < tile->cols; c++) {
        const float y = x[c] * inverse;
        int32_t code = (int32_t)(y + 12582912.0f - 12582912.0f); /* to the nearest, ties to even */
        code = code > limit ? limit : code < -limit ? -limit : code;
        const int32_t magnitude = code < 0 ? -code : code;
        all |= code;
        top = magnitude > top ? magnitude : top;
        out[c] = (int16_t)code;
    }
    codes->row_top[row] = 0;
    codes->row_exponent[row] = CG_NO_EXPONENT;
    if (all == 0) return;
    const int zeros = __builtin_ctz((uint32_t)all);
    for (uint32_t c = 0; c < tile->cols && zeros; c++)
        out[c] = (int16_t)(out[c] >> zeros);
    codes->row_exponent[row] = exponent + zeros;
    codes->row_top[row] = (uint32_t)top >> zeros;
}

/* The step of the tile is that of most rows; of a tie, the larger. */
CG_INLINE void cg_find_step(const neap_cg_tile *tile, neap_cg_codes *codes) {
    uint16_t count[256] = {0};
    int best = 0;
    for (uint32_t r = 0; r < tile->rows; r++)
        if (!codes->exact[r] && codes->row_exponent[r] != CG_NO_EXPONENT)
            count[codes->row_exponent[r] + 128]++;
    for (int e = 0; e < 256; e++)
        if (count[e] && count[e] >= count[best]) best = e;
    codes->model.exponent = count[best] ? best - 128 : 0;
}

/* Brings the codes of a row to the step of the tile or a finer one. Raw where that cannot be. */
CG_INLINE void cg_align_row(const neap_cg_tile *tile, neap_cg_codes *codes, uint32_t row) {
    const int exponent = codes->row_exponent[row], finer = codes->model.exponent - exponent;
    int16_t *code = codes->codes + (size_t)row * tile->cols;
    if (exponent == CG_NO_EXPONENT) return;
    if (finer >= 0) {
        codes->model.shift[row] = finer <= CG_MAX_SHIFT ? (uint8_t)finer : NEAP_CG_ROW_RAW;
        return;
    }
    if (-finer > CG_MAX_SHIFT || (uint64_t)codes->row_top[row] << -finer > NEAP_CG_CODE_MAX) {
        codes->model.shift[row] = NEAP_CG_ROW_RAW;
        return;
    }
    for (uint32_t c = 0; c < tile->cols; c++)
        code[c] = (int16_t)(code[c] * (1 << -finer));
    codes->row_exponent[row] = codes->model.exponent;
}

CG_INLINE int32_t cg_floor_div(int32_t a, int32_t b) {
    const int32_t q = a / b;
    return q - (a % b < 0);
}

/* Base, weight and class of every column. */
CG_INLINE uint32_t cg_find_columns(const neap_cg_tile *tile, neap_cg_codes *codes) {
    neap_cg_model *model = &codes->model;
    int32_t sum[NEAP_CG_COLS] = {0}, last[NEAP_CG_COLS], cost[5][NEAP_CG_COLS] = {{0}};
    uint32_t n = 0;
    for (uint32_t r = 0; r < tile->rows; r++) {
        if (model->shift[r] == NEAP_CG_ROW_RAW) continue;
        const int16_t *code = codes->codes + (size_t)r * tile->cols;
        n++;
        for (uint32_t c = 0; c < tile->cols; c++)
            sum[c] += code[c] >> model->shift[r];
    }
    if (n == 0) return 0;
    for (uint32_t c = 0; c < tile->cols; c++)
        last[c] = model->base[c] = cg_floor_div(2 * sum[c] + (int32_t)n, 2 * (int32_t)n);
    for (uint32_t r = 0; r < tile->rows; r++) {
        if (model->shift[r] == NEAP_CG_ROW_RAW) continue;
        const int16_t *code = codes->codes + (size_t)r * tile->cols;
        for (uint32_t c = 0; c < tile->cols && model->shift[r] == 0; c++) {
            const int32_t distance = last[c] - model->base[c], here = code[c] - model->base[c];
            for (int32_t w = 0; w < 5; w++) {
                const int32_t d = here - ((w * distance + 2) >> 2);
                cost[w][c] += d < 0 ? -d : d;
            }
        }
        for (uint32_t c = 0; c < tile->cols; c++)
            last[c] = code[c] >> model->shift[r];
    }
    uint16_t bucket[NEAP_CG_COLS], count[256] = {0};
    for (uint32_t c = 0; c < tile->cols; c++) {
        int32_t best = 0;
        for (int32_t w = 1; w < 5; w++)
            if (cost[w][c] < cost[best][c]) best = w;
        model->weight[c] = best;
        const uint32_t total = (uint32_t)cost[best][c] | 8u;
        const uint32_t top = 31u - (uint32_t)__builtin_clz(total);
        bucket[c] = (uint16_t)(top * 8 + (total >> (top - 3) & 7));
        count[bucket[c]]++;
    }
    model->n_classes = tile->cols / 16;
    if (model->n_classes > NEAP_CG_CLASSES) model->n_classes = NEAP_CG_CLASSES;
    if (model->n_classes == 0) model->n_classes = 1;
    uint16_t class_of[256];
    for (uint32_t b = 0, before = 0; b < 256; before += count[b++])
        class_of[b] = (uint16_t)((2 * before + count[b]) * model->n_classes / (2 * tile->cols + 1));
    for (uint32_t c = 0; c < tile->cols; c++)
        model->class_at[c] = class_of[bucket[c]] * NEAP_CG_SLOTS;
    return n;
}

/* Turns the codes into symbols, counts those, lists what escapes. False: too many do. */
CG_INLINE bool cg_symbols(const neap_cg_tile *tile, neap_cg_codes *codes) {
    const neap_cg_model *model = &codes->model;
    int32_t last[NEAP_CG_COLS];
    memcpy(last, model->base, sizeof last);
    memset(codes->hist, 0, sizeof codes->hist);
    codes->n_escapes = 0;
    for (uint32_t r = 0; r < tile->rows; r++) {
        const uint32_t shift = model->shift[r];
        if (shift == NEAP_CG_ROW_RAW) continue;
        int16_t *code = codes->codes + (size_t)r * tile->cols, kept[NEAP_CG_COLS];
        int32_t escaped = 0;
        memcpy(kept, code, 2 * (size_t)tile->cols);
        for (uint32_t c = 0; c < tile->cols; c++) {
            const int32_t p = neap_cg_predict(model->base[c], model->weight[c], last[c]);
            const int32_t d = kept[c] - p * (1 << shift);
            const bool fits = d >= -NEAP_CG_ZERO && d <= NEAP_CG_ZERO;
            code[c] = (int16_t)(fits ? d + NEAP_CG_ZERO : NEAP_CG_ESCAPE);
            escaped |= !fits;
            last[c] = kept[c] >> shift;
        }
        for (uint32_t c = 0; c < tile->cols; c++)
            codes->hist[model->class_at[c] / NEAP_CG_SLOTS][code[c]]++;
        for (uint32_t c = 0; c < tile->cols && escaped; c++) {
            if (code[c] != NEAP_CG_ESCAPE) continue;
            if (codes->escapes_end - codes->escapes < 2 * (ptrdiff_t)codes->n_escapes + 2)
                return false;
            memcpy(codes->escapes + 2 * codes->n_escapes++, &kept[c], 2);
        }
    }
    return true;
}

/* One round of measuring and rounding. *ret_again: the proof does not hold for this tile; what was
 * rounded has to be tried. */
CG_INLINE bool cg_round(cg_load_f16 load_f16, const neap_cg_tile *tile, neap_cg_codes *codes,
                        bool rounded, bool *ret_again) {
    cg_stats stats;
    cg_measure(load_f16, tile, codes, rounded, &stats);
    if (stats.n_rows == 0) return false;
    cg_find_wanted(tile, codes, &stats);
    const bool settled = cg_is_settled(load_f16, tile, codes, rounded, &stats);
    *ret_again = !settled && (stats.limited || rounded);
    if (settled && rounded) return true;
    for (uint32_t r = 0; r < tile->rows; r++)
        if (!codes->exact[r])
            cg_quantise(load_f16, tile, codes, rounded, stats.wanted[r] - settled, r);
    return true;
}

CG_INLINE bool cg_analyse(cg_load_f16 load_f16, const neap_cg_tile *tile, neap_cg_codes *codes) {
    bool again = true;
    for (uint32_t i = 0; i < CG_MAX_ROUNDS && again; i++)
        if (!cg_round(load_f16, tile, codes, i > 0, &again)) return false;
    if (again) return false;
    cg_find_step(tile, codes);
    for (uint32_t r = 0; r < tile->rows; r++)
        if (!codes->exact[r]) cg_align_row(tile, codes, r);
    return cg_find_columns(tile, codes) > 0 && cg_symbols(tile, codes);
}
#endif
