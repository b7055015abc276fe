/* cachegen_arm.c - the kernel of cachegen for NEON (every AArch64 has it, f16 conversions
 * included). See cachegen.c for the format. The analysis is the common one, compiled for these
 * machines; the symbols are coded by the scalar coder, which divides. */
#include "cachegen_analyse.h"

#if defined(__aarch64__)

static void load_neon(const uint8_t *src, uint32_t n, float *dst) {
    for (; n >= 8; n -= 8, src += 16, dst += 8) {
        const float16x8_t h = vreinterpretq_f16_u8(vld1q_u8(src));
        vst1q_f32(dst, vcvt_f32_f16(vget_low_f16(h)));
        vst1q_f32(dst + 4, vcvt_high_f32_f16(h));
    }
    for (uint32_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, src + 2 * (size_t)i, sizeof h);
        dst[i] = neap_f32_of_f16(h);
    }
}

static bool analyse_neon(const neap_cg_tile *tile, neap_cg_codes *codes) {
    return cg_analyse(load_neon, tile, codes);
}

/* What a row is decoded with; bad is what left the range of codes, seen at the end. */
typedef struct row_neon {
    int32x4_t bad, shift, back;
    float step;
} row_neon;

/* Takes the codes that escaped from their list. */
static bool take_escapes(neap_cg_stream *s, uint32x4_t escaped, int32x4_t *inout_code) {
    uint32_t taken[4];
    int32_t code[4];
    vst1q_u32(taken, escaped);
    vst1q_s32(code, *inout_code);
    for (int i = 0; i < 4; i++) {
        int16_t value;
        if (!taken[i]) continue;
        if (s->escapes == s->escapes_end) return false;
        memcpy(&value, s->escapes, sizeof value);
        s->escapes += sizeof value;
        code[i] = value;
    }
    *inout_code = vld1q_s32(code);
    return true;
}

CG_INLINE uint32x4_t gather_4(const uint32_t *table, uint32x4_t at) {
    uint32x4_t v = vdupq_n_u32(table[vgetq_lane_u32(at, 0)]);
    v = vld1q_lane_u32(table + vgetq_lane_u32(at, 1), v, 1);
    v = vld1q_lane_u32(table + vgetq_lane_u32(at, 2), v, 2);
    return vld1q_lane_u32(table + vgetq_lane_u32(at, 3), v, 3);
}

/* The next states, but for the words that the low ones take in. */
CG_INLINE uint32x4_t advance_4(uint32x4_t state, uint32x4_t entry) {
    const uint32x4_t bias = vandq_u32(vshrq_n_u32(entry, 8), vdupq_n_u32(0xfff));
    return vmlaq_u32(bias, vshrq_n_u32(entry, 20), vshrq_n_u32(state, NEAP_CG_PROB_BITS));
}

CG_INLINE uint8x16_t load_words(const uint8_t *words, size_t left) {
    uint8_t padded[16] = {0};
    if (left >= 8) return vld1q_u8(words);
    memcpy(padded, words, 2 * left);
    return vld1q_u8(padded);
}

/* Lanes that are low shift in the next words, in order. */
CG_INLINE bool refill_8(neap_cg_stream *s, uint32x4_t inout[2]) {
    const uint16x8_t high = vcombine_u16(vshrn_n_u32(inout[0], 16), vshrn_n_u32(inout[1], 16));
    const uint16x8_t low = vceqzq_u16(high), none = vdupq_n_u16(0);
    /* How many words are taken up to each lane. */
    uint16x8_t count = vshrq_n_u16(low, 15);
    count = vaddq_u16(count, vextq_u16(none, count, 7));
    count = vaddq_u16(count, vextq_u16(none, count, 6));
    count = vaddq_u16(count, vextq_u16(none, count, 4));
    const size_t n = vgetq_lane_u16(count, 7), left = (size_t)(s->words_end - s->words) / 2;
    if (left < n) return false;
    /* Bytes 2 (count - 1) and the one after it; out of reach, which is zero, for the others. */
    const uint16x8_t place = vmlaq_n_u16(vdupq_n_u16(0xfefe), count, 0x0202);
    const uint8x16_t bytes = vreinterpretq_u8_u16(vornq_u16(place, low));
    const uint16x8_t word = vreinterpretq_u16_u8(vqtbl1q_u8(load_words(s->words, left), bytes));
    s->words += 2 * n;
    const int16x8_t by = vreinterpretq_s16_u16(vandq_u16(low, vdupq_n_u16(16)));
    inout[0] =
        vorrq_u32(vshlq_u32(inout[0], vmovl_s16(vget_low_s16(by))), vmovl_u16(vget_low_u16(word)));
    inout[1] = vorrq_u32(vshlq_u32(inout[1], vmovl_high_s16(by)), vmovl_high_u16(word));
    return true;
}

/* The codes of 4 columns from c on. */
CG_INLINE bool codes_4(neap_cg_stream *s, row_neon *row, uint32_t c, uint32x4_t entry,
                       int32x4_t *ret_code) {
    const int32x4_t base = vld1q_s32(s->model.base + c);
    const int32x4_t distance = vsubq_s32(vld1q_s32(s->last + c), base);
    const int32x4_t p = vrsraq_n_s32(base, vmulq_s32(vld1q_s32(s->model.weight + c), distance), 2);
    const uint32x4_t symbol = vandq_u32(entry, vdupq_n_u32(0xff));
    const int32x4_t residual = vsubq_s32(vreinterpretq_s32_u32(symbol), vdupq_n_s32(NEAP_CG_ZERO));
    int32x4_t code = vaddq_s32(vshlq_s32(p, row->shift), residual);
    const uint32x4_t escaped = vceqq_u32(symbol, vdupq_n_u32(NEAP_CG_ESCAPE));
    if (__builtin_expect(vmaxvq_u32(escaped) != 0, 0) && !take_escapes(s, escaped, &code))
        return false;
    row->bad = vorrq_s32(row->bad, vaddq_s32(code, vdupq_n_s32(0x8000)));
    vst1q_s32(s->last + c, vshlq_s32(code, row->back));
    *ret_code = code;
    return true;
}

CG_INLINE float16x4_t values_4(int32x4_t code, float step) {
    return vcvt_f16_f32(vmulq_n_f32(vcvtq_f32_s32(code), step));
}

/* Decodes 8 columns from c on, by 8 of the lanes. */
CG_INLINE bool decode_8(neap_cg_stream *s, row_neon *row, uint32_t c, uint32_t *lanes,
                        uint8_t *dst) {
    const uint32x4_t slot = vdupq_n_u32(NEAP_CG_SLOTS - 1);
    uint32x4_t state[2], entry[2];
    int32x4_t code[2];
    for (uint32_t i = 0; i < 2; i++) {
        state[i] = vld1q_u32(lanes + 4 * i);
        const uint32x4_t class_at = vld1q_u32(s->model.class_at + c + 4 * i);
        entry[i] = gather_4(s->slots, vaddq_u32(class_at, vandq_u32(state[i], slot)));
        state[i] = advance_4(state[i], entry[i]);
    }
    if (!refill_8(s, state)) return false;
    vst1q_u32(lanes, state[0]);
    vst1q_u32(lanes + 4, state[1]);
    if (!codes_4(s, row, c, entry[0], &code[0]) || !codes_4(s, row, c + 4, entry[1], &code[1]))
        return false;
    const float16x8_t h = vcombine_f16(values_4(code[0], row->step), values_4(code[1], row->step));
    vst1q_u8(dst + 2 * (size_t)c, vreinterpretq_u8_f16(h));
    return true;
}

static bool decode_neon(neap_cg_stream *s, const neap_cg_tile *tile) {
    const uint32_t whole = tile->cols & ~(NEAP_CG_LANES - 1);
    row_neon row = {.bad = vdupq_n_s32(0)};
    for (uint32_t r = 0; r < tile->rows; r++) {
        const int32_t shift = s->model.shift[r];
        if (shift == NEAP_CG_ROW_RAW) continue;
        uint8_t *dst = tile->data + r * tile->stride;
        row.step = neap_cg_power(s->model.exponent - shift);
        row.shift = vdupq_n_s32(shift);
        row.back = vdupq_n_s32(-shift);
        for (uint32_t c = 0; c < whole; c += NEAP_CG_LANES)
            for (uint32_t i = 0; i < NEAP_CG_LANES; i += 8)
                if (!decode_8(s, &row, c + i, s->lanes + i, dst)) return false;
        if (whole < tile->cols && !neap_cg_decode_columns(s, tile, r, whole)) return false;
    }
    return vmaxvq_u32(vshrq_n_u32(vreinterpretq_u32_s32(row.bad), 16)) == 0;
}

static bool always(void) {
    return true;
}

const neap_cg_kernel neap_cg_neon = {
    .name = "neon",
    .supported = always,
    .analyse = analyse_neon,
    .code = neap_cg_scalar_code,
    .decode_f16 = decode_neon,
};
#else
typedef int neap_cg_arm_not_built;
#endif
