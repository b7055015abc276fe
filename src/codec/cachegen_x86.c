/* cachegen_x86.c - the kernels of cachegen for AVX-512 and AVX2. See cachegen.c for the format. The
 * analysis is the common one, compiled for these machines. */
#include "cachegen_analyse.h"

#if defined(__x86_64__)
#include <cpuid.h>

#define AVX512 \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c,bmi,bmi2,popcnt")))
#define AVX2 __attribute__((target("avx2,f16c,bmi,bmi2,popcnt")))

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
    const __mmask16 rest0 = (__mmask16)(rest >= 16 ? 0xffffu : (1u << rest) - 1);
    const __mmask16 rest1 = (__mmask16)(rest > 16 ? (1u << (rest - 16)) - 1 : 0u);
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

/* x / d, exactly: a quotient of 32-bit numbers is never so near to the next one as a double rounds.
 */
AVX512 CG_INLINE __m512i divide_16(__m512i x, __m512i d) {
    const __m512d low = _mm512_div_pd(_mm512_cvtepu32_pd(_mm512_castsi512_si256(x)),
                                      _mm512_cvtepu32_pd(_mm512_castsi512_si256(d)));
    const __m512d high = _mm512_div_pd(_mm512_cvtepu32_pd(_mm512_extracti64x4_epi64(x, 1)),
                                       _mm512_cvtepu32_pd(_mm512_extracti64x4_epi64(d, 1)));
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvttpd_epu32(low)),
                              _mm512_cvttpd_epu32(high), 1);
}

/* Codes up to 16 columns from c on, as the decoder takes them from the other side. */
AVX512 CG_INLINE uint16_t *code_16(const neap_cg_codes *codes, const uint16_t *symbols, uint32_t c,
                                   __mmask16 mask, uint16_t *word, __m512i *inout_state) {
    /* class_at counts in slots, the table in symbols. */
    const __m512i symbol = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, symbols + c));
    const __m512i class_at = _mm512_maskz_loadu_epi32(mask, codes->model.class_at + c);
    const __m512i at = _mm512_add_epi32(symbol, _mm512_srli_epi32(class_at, NEAP_CG_PROB_BITS - 6));
    const __m512i entry =
        _mm512_mask_i32gather_epi32(_mm512_set1_epi32(1 << 16), mask, at, codes->places, 4);
    const __m512i freq = _mm512_srli_epi32(entry, 16);
    const __m512i first = _mm512_and_si512(entry, _mm512_set1_epi32(0xffff));
    __m512i state = *inout_state;
    const __mmask16 high =
        _mm512_mask_cmpge_epu32_mask(mask, _mm512_srli_epi32(state, 32 - NEAP_CG_PROB_BITS), freq);
    const uint32_t n = (uint32_t)_mm_popcnt_u32(high);
    word -= n;
    _mm256_mask_storeu_epi16(word, (__mmask16)((1u << n) - 1),
                             _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(high, state)));
    state = _mm512_mask_srli_epi32(state, high, state, 16);
    const __m512i quotient = divide_16(state, freq);
    const __m512i rest = _mm512_sub_epi32(state, _mm512_mullo_epi32(quotient, freq));
    const __m512i next = _mm512_add_epi32(_mm512_slli_epi32(quotient, NEAP_CG_PROB_BITS),
                                          _mm512_add_epi32(rest, first));
    *inout_state = _mm512_mask_mov_epi32(*inout_state, mask, next);
    return word;
}

AVX512 static uint16_t *code_512(const neap_cg_codes *codes, const neap_cg_tile *tile,
                                 uint32_t *lanes) {
    const uint32_t whole = tile->cols & ~31u, rest = tile->cols & 31u;
    const __mmask16 rest0 = (__mmask16)(rest >= 16 ? 0xffffu : (1u << rest) - 1);
    const __mmask16 rest1 = (__mmask16)(rest > 16 ? (1u << (rest - 16)) - 1 : 0u);
    uint16_t *word = (uint16_t *)codes->codes + (size_t)tile->rows * tile->cols;
    __m512i low = _mm512_set1_epi32(NEAP_CG_STATE_LOW), high = low;
    for (uint32_t r = tile->rows; r-- > 0;) {
        if (codes->model.shift[r] == NEAP_CG_ROW_RAW) continue;
        const uint16_t *symbols = (const uint16_t *)codes->codes + (size_t)r * tile->cols;
        if (rest1) word = code_16(codes, symbols, whole + 16, rest1, word, &high);
        if (rest) word = code_16(codes, symbols, whole, rest0, word, &low);
        for (uint32_t c = whole; c > 0; c -= 32) {
            word = code_16(codes, symbols, c - 16, 0xffff, word, &high);
            word = code_16(codes, symbols, c - 32, 0xffff, word, &low);
        }
    }
    _mm512_storeu_si512(lanes, low);
    _mm512_storeu_si512(lanes + 16, high);
    return word;
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

AVX2 static bool take_escapes_256(neap_cg_stream *s, uint32_t escaped, __m256i *inout_code) {
    int32_t code[8];
    _mm256_storeu_si256((__m256i *)code, *inout_code);
    for (uint32_t left = escaped; left; left &= left - 1) {
        int16_t value;
        if (s->escapes == s->escapes_end) return false;
        memcpy(&value, s->escapes, sizeof value);
        s->escapes += sizeof value;
        code[__builtin_ctz(left)] = value;
    }
    *inout_code = _mm256_loadu_si256((const __m256i *)code);
    return true;
}

typedef struct row_256 {
    __m256i bad;
    __m256 step;
    __m128i shift;
} row_256;

AVX2 CG_INLINE uint32_t mask_of_8(__m256i v) {
    return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(v));
}

/* Lane i of the mask gets the next of the packed words, in order. */
AVX2 CG_INLINE __m256i expand_8(__m128i packed, uint32_t mask) {
    const uint64_t bytes = _pdep_u64(mask, 0x0101010101010101u) * 0xff;
    const __m128i order = _mm_cvtsi64_si128((int64_t)_pdep_u64(0x0706050403020100u, bytes));
    return _mm256_permutevar8x32_epi32(_mm256_cvtepu16_epi32(packed), _mm256_cvtepu8_epi32(order));
}

AVX2 CG_INLINE __m128i load_words_8(const uint8_t *words, size_t left) {
    uint16_t padded[8] = {0};
    if (left >= 8) return _mm_loadu_si128((const __m128i *)words);
    memcpy(padded, words, 2 * left);
    return _mm_loadu_si128((const __m128i *)padded);
}

/* Decodes 8 columns from c on. */
AVX2 CG_INLINE bool decode_8(neap_cg_stream *s, row_256 *row, uint32_t c, __m256i *inout_state,
                             uint8_t *dst) {
    const __m256i state = *inout_state;
    const __m256i at =
        _mm256_add_epi32(_mm256_loadu_si256((const __m256i *)(s->model.class_at + c)),
                         _mm256_and_si256(state, _mm256_set1_epi32(NEAP_CG_SLOTS - 1)));
    const __m256i entry = _mm256_i32gather_epi32((const int *)s->slots, at, 4);
    __m256i next =
        _mm256_add_epi32(_mm256_mullo_epi32(_mm256_srli_epi32(entry, 20),
                                            _mm256_srli_epi32(state, NEAP_CG_PROB_BITS)),
                         _mm256_and_si256(_mm256_srli_epi32(entry, 8), _mm256_set1_epi32(0xfff)));
    const __m256i low = _mm256_cmpeq_epi32(_mm256_srli_epi32(next, 16), _mm256_setzero_si256());
    const uint32_t mask = mask_of_8(low), n = (uint32_t)_mm_popcnt_u32(mask);
    const size_t left = (size_t)(s->words_end - s->words) / 2;
    if (left < n) return false;
    const __m256i word = expand_8(load_words_8(s->words, left), mask);
    s->words += 2 * n;
    *inout_state =
        _mm256_blendv_epi8(next, _mm256_or_si256(_mm256_slli_epi32(next, 16), word), low);

    const __m256i base = _mm256_loadu_si256((const __m256i *)(s->model.base + c));
    const __m256i weight = _mm256_loadu_si256((const __m256i *)(s->model.weight + c));
    const __m256i last = _mm256_loadu_si256((const __m256i *)(s->last + c));
    const __m256i moved =
        _mm256_srai_epi32(_mm256_add_epi32(_mm256_mullo_epi32(weight, _mm256_sub_epi32(last, base)),
                                           _mm256_set1_epi32(2)),
                          2);
    const __m256i symbol = _mm256_and_si256(entry, _mm256_set1_epi32(0xff));
    __m256i code = _mm256_add_epi32(_mm256_sll_epi32(_mm256_add_epi32(base, moved), row->shift),
                                    _mm256_sub_epi32(symbol, _mm256_set1_epi32(NEAP_CG_ZERO)));
    const uint32_t escaped =
        mask_of_8(_mm256_cmpeq_epi32(symbol, _mm256_set1_epi32(NEAP_CG_ESCAPE)));
    if (__builtin_expect(escaped != 0, 0) && !take_escapes_256(s, escaped, &code)) return false;
    row->bad = _mm256_or_si256(row->bad, _mm256_add_epi32(code, _mm256_set1_epi32(0x8000)));
    _mm256_storeu_si256((__m256i *)(s->last + c), _mm256_sra_epi32(code, row->shift));
    const __m128i h = _mm256_cvtps_ph(_mm256_mul_ps(_mm256_cvtepi32_ps(code), row->step),
                                      _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128((__m128i *)(dst + 2 * (size_t)c), h);
    return true;
}

AVX2 static bool decode_256(neap_cg_stream *s, const neap_cg_tile *tile) {
    const uint32_t whole = tile->cols & ~31u;
    row_256 row = {.bad = _mm256_setzero_si256()};
    for (uint32_t r = 0; r < tile->rows; r++) {
        const uint32_t shift = s->model.shift[r];
        if (shift == NEAP_CG_ROW_RAW) continue;
        uint8_t *dst = tile->data + r * tile->stride;
        row.step = _mm256_set1_ps(neap_cg_power(s->model.exponent - (int)shift));
        row.shift = _mm_cvtsi32_si128((int)shift);
        for (uint32_t c = 0; c < whole; c += 32)
            for (uint32_t i = 0; i < NEAP_CG_LANES; i += 8) {
                __m256i state = _mm256_loadu_si256((const __m256i *)(s->lanes + i));
                if (!decode_8(s, &row, c + i, &state, dst)) return false;
                _mm256_storeu_si256((__m256i *)(s->lanes + i), state);
            }
        if (whole < tile->cols && !neap_cg_decode_columns(s, tile, r, whole)) return false;
    }
    return mask_of_8(_mm256_cmpgt_epi32(_mm256_srli_epi32(row.bad, 16), _mm256_setzero_si256())) ==
           0;
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
           __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt") && has_f16c();
}

static bool has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt") && has_f16c();
}

const neap_cg_kernel neap_cg_avx512 = {
    .name = "avx512",
    .supported = has_avx512,
    .analyse = analyse_512,
    .decode_f16 = decode_512,
    .code = code_512,
};

const neap_cg_kernel neap_cg_avx2 = {
    .name = "avx2",
    .supported = has_avx2,
    .analyse = analyse_256,
    .decode_f16 = decode_256,
    .code = neap_cg_scalar_code,
};
#else
typedef int neap_cg_x86_not_built;
#endif
