/* cachegen_x86.c - the kernels of cachegen for AVX-512 and AVX2. See cachegen.c for the format. The
 * analysis is the common one, compiled for these machines. */
#include "cachegen_analyse.h"

#if defined(__x86_64__)
#include <cpuid.h>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c,bmi,popcnt")))
#define AVX2 __attribute__((target("avx2,f16c,bmi,popcnt")))

/* ---- AVX-512: 16 lanes a register ---- */

AVX512 static void load_512(const uint8_t *src, uint32_t n, float *dst) {
    for (; n >= 16; n -= 16, src += 32, dst += 16)
        _mm512_storeu_ps(dst, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)src)));
    if (n == 0) return;
    const __mmask16 mask = (__mmask16)((1u << n) - 1);
    _mm512_mask_storeu_ps(dst, mask, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, src)));
}

AVX512 static bool analyse_512(const neap_cg_tile *tile, neap_cg_codes *codes) {
    return cg_analyse(load_512, tile, codes);
}

/* Takes the codes that escaped from their list. */
AVX512 static bool take_escapes_512(neap_cg_stream *s, __mmask16 escaped, __m512i *inout_code) {
    int32_t code[16];
    _mm512_storeu_si512(code, *inout_code);
    for (uint32_t left = escaped; left; left &= left - 1) {
        int16_t value;
        if (s->escapes == s->escapes_end) return false;
        memcpy(&value, s->escapes, sizeof value);
        s->escapes += sizeof value;
        code[__builtin_ctz(left)] = value;
    }
    *inout_code = _mm512_loadu_si512(code);
    return true;
}

typedef struct row_512 {
    __m512i bad; /* what left the range of codes, seen at the end */
    __m512 step;
    __m128i shift;
} row_512;

/* Decodes up to 16 columns from c on; the lanes of the mask take part. */
AVX512 CG_INLINE bool decode_16(neap_cg_stream *s, row_512 *row, uint32_t c, __mmask16 mask,
                                __m512i *inout_state, const uint8_t **words, uint8_t *dst) {
    const __m512i state = *inout_state;
    const __m512i at =
        _mm512_add_epi32(_mm512_loadu_si512(s->model.class_at + c),
                         _mm512_and_si512(state, _mm512_set1_epi32(NEAP_CG_SLOTS - 1)));
    const __m512i entry =
        _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), mask, at, s->slots, 4);
    const __m512i bias = _mm512_and_si512(_mm512_srli_epi32(entry, 8), _mm512_set1_epi32(0xfff));
    __m512i next = _mm512_add_epi32(_mm512_mullo_epi32(_mm512_srli_epi32(entry, 20),
                                                       _mm512_srli_epi32(state, NEAP_CG_PROB_BITS)),
                                    bias);
    const __mmask16 low =
        _mm512_mask_cmplt_epu32_mask(mask, next, _mm512_set1_epi32(NEAP_CG_STATE_LOW));
    const size_t left = (size_t)(s->words_end - *words) / 2;
    const uint32_t n = (uint32_t)_mm_popcnt_u32(low);
    if (left < n) return false;
    const __m256i packed = left >= 16
                               ? _mm256_loadu_si256((const __m256i *)*words)
                               : _mm256_maskz_loadu_epi16((__mmask16)((1u << left) - 1), *words);
    *words += 2 * n;
    const __m512i word = _mm512_maskz_expand_epi32(low, _mm512_cvtepu16_epi32(packed));
    next = _mm512_mask_or_epi32(next, low, _mm512_slli_epi32(next, 16), word);
    *inout_state = _mm512_mask_mov_epi32(state, mask, next);

    const __m512i base = _mm512_loadu_si512(s->model.base + c);
    const __m512i weight = _mm512_loadu_si512(s->model.weight + c);
    const __m512i distance = _mm512_sub_epi32(_mm512_loadu_si512(s->last + c), base);
    const __m512i moved = _mm512_srai_epi32(
        _mm512_add_epi32(_mm512_mullo_epi32(weight, distance), _mm512_set1_epi32(2)), 2);
    const __m512i symbol = _mm512_and_si512(entry, _mm512_set1_epi32(0xff));
    __m512i code = _mm512_add_epi32(_mm512_sll_epi32(_mm512_add_epi32(base, moved), row->shift),
                                    _mm512_sub_epi32(symbol, _mm512_set1_epi32(NEAP_CG_ZERO)));
    const __mmask16 escaped =
        _mm512_mask_cmpeq_epi32_mask(mask, symbol, _mm512_set1_epi32(NEAP_CG_ESCAPE));
    if (__builtin_expect(escaped != 0, 0) && !take_escapes_512(s, escaped, &code)) return false;
    row->bad = _mm512_mask_or_epi32(row->bad, mask, row->bad,
                                    _mm512_add_epi32(code, _mm512_set1_epi32(0x8000)));
    _mm512_mask_storeu_epi32(s->last + c, mask, _mm512_sra_epi32(code, row->shift));
    const __m256i h = _mm512_cvtps_ph(_mm512_mul_ps(_mm512_cvtepi32_ps(code), row->step),
                                      _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_mask_storeu_epi16(dst + 2 * (size_t)c, mask, h);
    return true;
}

AVX512 static bool decode_512(neap_cg_stream *s, const neap_cg_tile *tile) {
    const uint32_t whole = tile->cols & ~31u, rest = tile->cols & 31u;
    const __mmask16 rest0 = rest >= 16 ? 0xffff : (__mmask16)((1u << rest) - 1);
    const __mmask16 rest1 = rest > 16 ? (__mmask16)((1u << (rest - 16)) - 1) : 0;
    __m512i low = _mm512_loadu_si512(s->lanes), high = _mm512_loadu_si512(s->lanes + 16);
    const uint8_t *words = s->words;
    row_512 row = {.bad = _mm512_setzero_si512()};
    for (uint32_t r = 0; r < tile->rows; r++) {
        const uint32_t shift = s->model.shift[r];
        if (shift == NEAP_CG_ROW_RAW) continue;
        uint8_t *dst = tile->data + r * tile->stride;
        row.step = _mm512_set1_ps(neap_cg_power(s->model.exponent - (int)shift));
        row.shift = _mm_cvtsi32_si128((int)shift);
        for (uint32_t c = 0; c < whole; c += 32)
            if (!decode_16(s, &row, c, 0xffff, &low, &words, dst) ||
                !decode_16(s, &row, c + 16, 0xffff, &high, &words, dst))
                return false;
        if (rest && !decode_16(s, &row, whole, rest0, &low, &words, dst)) return false;
        if (rest1 && !decode_16(s, &row, whole + 16, rest1, &high, &words, dst)) return false;
    }
    s->words = words;
    _mm512_storeu_si512(s->lanes, low);
    _mm512_storeu_si512(s->lanes + 16, high);
    return _mm512_cmpgt_epu32_mask(row.bad, _mm512_set1_epi32(0xffff)) == 0;
}

/* ---- AVX2: 8 lanes a register; columns past the last block of 8 one by one ---- */

AVX2 static void load_256(const uint8_t *src, uint32_t n, float *dst) {
    for (; n >= 8; n -= 8, src += 16, dst += 8)
        _mm256_storeu_ps(dst, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)src)));
    for (uint32_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, src + 2 * (size_t)i, sizeof h);
        dst[i] = neap_f32_of_f16(h);
    }
}

AVX2 static bool analyse_256(const neap_cg_tile *tile, neap_cg_codes *codes) {
    return cg_analyse(load_256, tile, codes);
}

/* F16C has no name in every compiler's __builtin_cpu_supports. */
static bool has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static bool has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("popcnt") && has_f16c();
}

static bool has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("popcnt") && has_f16c();
}

const neap_cg_kernel neap_cg_avx512 = {
    .name = "avx512",
    .supported = has_avx512,
    .analyse = analyse_512,
    .decode_f16 = decode_512,
};

const neap_cg_kernel neap_cg_avx2 = {
    .name = "avx2",
    .supported = has_avx2,
    .analyse = analyse_256,
    .decode_f16 = neap_cg_scalar_decode,
};
#else
typedef int neap_cg_x86_not_built;
#endif
