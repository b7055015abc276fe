/* q8_x86.c - the q8 row kernels for AVX-512 and AVX2. See q8.c for what they compute.
 * f16 magnitudes order like their bits, so amax is an integer maximum. F16C treats subnormals alike
 * under every flush-to-zero mode. */
#include "q8_int.h"

#if defined(__x86_64__)
#include <cpuid.h>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx2,f16c")))
#define AVX2 __attribute__((target("avx2,f16c")))
#define INLINE static inline __attribute__((always_inline))

/* Largest of eight u16. */
AVX2 INLINE uint32_t max_of_8(__m128i v) {
    __m128i ones = _mm_set1_epi16(-1);
    return (uint16_t)~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(v, ones)), 0);
}

AVX2 INLINE float inverse_of(uint32_t amax) {
    __m128 value = _mm_cvtph_ps(_mm_cvtsi32_si128((int)amax));
    return _mm_cvtss_f32(_mm_div_ss(_mm_set_ss(NEAP_Q8_MAX_CODE), value));
}

/* ---- AVX-512: a group is one register of codes; masks cut the last group of a row ---- */

/* Codes a group with the mask of its elements; false when one is not finite. */
AVX512 INLINE bool encode_group_512(const uint8_t *src, __mmask64 mask, uint8_t *scale,
                                    uint8_t *codes) {
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    /* Dword 4 l + j of the packed codes is quarter j, lane l: bring it to dword 4 j + l. */
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i low = _mm512_maskz_loadu_epi16((__mmask32)mask, src);
    __m512i high = _mm512_maskz_loadu_epi16((__mmask32)(mask >> 32), src + 64);
    __m512i m =
        _mm512_max_epu16(_mm512_and_si512(low, magnitude), _mm512_and_si512(high, magnitude));
    __m256i m256 = _mm256_max_epu16(_mm512_castsi512_si256(m), _mm512_extracti64x4_epi64(m, 1));
    __m128i m128 = _mm_max_epu16(_mm256_castsi256_si128(m256), _mm256_extracti128_si256(m256, 1));
    uint32_t amax = max_of_8(m128);
    if (amax >= NEAP_F16_INF) return false;
    uint16_t bits = (uint16_t)amax;
    memcpy(scale, &bits, sizeof bits);
    __m512 inverse = amax == 0 ? _mm512_setzero_ps() : _mm512_set1_ps(inverse_of(amax));
    __m512 x0 = _mm512_cvtph_ps(_mm512_castsi512_si256(low));
    __m512 x1 = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(low, 1));
    __m512 x2 = _mm512_cvtph_ps(_mm512_castsi512_si256(high));
    __m512 x3 = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(high, 1));
    __m512i c01 = _mm512_packs_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(x0, inverse)),
                                     _mm512_cvtps_epi32(_mm512_mul_ps(x1, inverse)));
    __m512i c23 = _mm512_packs_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(x2, inverse)),
                                     _mm512_cvtps_epi32(_mm512_mul_ps(x3, inverse)));
    __m512i packed = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(c01, c23));
    _mm512_mask_storeu_epi8(codes, mask, packed);
    return true;
}

/* The last n < 64 elements of a row. Out of line: clang 14 cannot compile the mask inlined when two
 * sanitizers are on. */
AVX512 static __attribute__((noinline)) bool encode_tail_512(const uint8_t *src, uint32_t n,
                                                             uint8_t *scale, uint8_t *codes) {
    return encode_group_512(src, ((__mmask64)1 << n) - 1, scale, codes);
}

AVX512 static bool encode_512(const void *src, uint32_t n, uint8_t *dst) {
    const uint8_t *in = src;
    uint8_t *codes = dst + 2 * (size_t)neap_q8_groups(n);
    for (; n >= NEAP_Q8_GROUP; n -= NEAP_Q8_GROUP) {
        if (!encode_group_512(in, ~(__mmask64)0, dst, codes)) return false;
        in += 2 * NEAP_Q8_GROUP;
        dst += 2;
        codes += NEAP_Q8_GROUP;
    }
    return n == 0 || encode_tail_512(in, n, dst, codes);
}

AVX512 INLINE void decode_quarter_512(const uint8_t *codes, __mmask16 mask, __m512 step,
                                      uint8_t *dst) {
    __m512i wide = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, codes));
    __m512 y = _mm512_mul_ps(_mm512_cvtepi32_ps(wide), step);
    __m256i h = _mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_mask_storeu_epi16(dst, mask, h);
}

AVX512 INLINE bool decode_group_512(const uint8_t *scale, const uint8_t *codes, __mmask64 mask,
                                    uint8_t *dst) {
    uint16_t amax;
    memcpy(&amax, scale, sizeof amax);
    if (amax >= NEAP_F16_INF) return false;
    __m512 step = _mm512_mul_ps(_mm512_cvtph_ps(_mm256_set1_epi16((short)amax)),
                                _mm512_set1_ps(NEAP_Q8_STEP));
    for (int q = 0; q < 4; q++)
        decode_quarter_512(codes + 16 * q, (__mmask16)(mask >> 16 * q), step, dst + 32 * q);
    return true;
}

AVX512 static bool decode_512(const uint8_t *src, uint32_t n, void *dst) {
    const uint8_t *codes = src + 2 * (size_t)neap_q8_groups(n);
    uint8_t *out = dst;
    for (; n >= NEAP_Q8_GROUP; n -= NEAP_Q8_GROUP) {
        if (!decode_group_512(src, codes, ~(__mmask64)0, out)) return false;
        src += 2;
        codes += NEAP_Q8_GROUP;
        out += 2 * NEAP_Q8_GROUP;
    }
    return n == 0 || decode_group_512(src, codes, ((__mmask64)1 << n) - 1, out);
}

/* ---- AVX2: the last group of a row goes through a padded copy ---- */

AVX2 INLINE __m256i codes_of_16(const uint8_t *src, __m256 inverse) {
    __m256 x0 = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)src));
    __m256 x1 = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(src + 16)));
    return _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(x0, inverse)),
                              _mm256_cvtps_epi32(_mm256_mul_ps(x1, inverse)));
}

AVX2 INLINE bool encode_group_256(const uint8_t *src, uint8_t *scale, uint8_t *codes) {
    const __m256i magnitude = _mm256_set1_epi16(0x7fff);
    /* As for AVX-512: dword 4 l + j is eighth j, lane l. */
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i m = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(src + 32 * i));
        m = _mm256_max_epu16(m, _mm256_and_si256(x, magnitude));
    }
    uint32_t amax =
        max_of_8(_mm_max_epu16(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1)));
    if (amax >= NEAP_F16_INF) return false;
    uint16_t bits = (uint16_t)amax;
    memcpy(scale, &bits, sizeof bits);
    __m256 inverse = amax == 0 ? _mm256_setzero_ps() : _mm256_set1_ps(inverse_of(amax));
    for (int i = 0; i < 2; i++) {
        __m256i c01 = codes_of_16(src + 64 * i, inverse);
        __m256i c23 = codes_of_16(src + 64 * i + 32, inverse);
        __m256i packed = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(c01, c23), order);
        _mm256_storeu_si256((__m256i *)(codes + 32 * i), packed);
    }
    return true;
}

AVX2 static bool encode_256(const void *src, uint32_t n, uint8_t *dst) {
    const uint8_t *in = src;
    uint8_t *codes = dst + 2 * (size_t)neap_q8_groups(n);
    for (; n >= NEAP_Q8_GROUP; n -= NEAP_Q8_GROUP) {
        if (!encode_group_256(in, dst, codes)) return false;
        in += 2 * NEAP_Q8_GROUP;
        dst += 2;
        codes += NEAP_Q8_GROUP;
    }
    if (n == 0) return true;
    uint8_t padded[2 * NEAP_Q8_GROUP] = {0}, padded_codes[NEAP_Q8_GROUP];
    memcpy(padded, in, 2 * (size_t)n);
    if (!encode_group_256(padded, dst, padded_codes)) return false;
    memcpy(codes, padded_codes, n);
    return true;
}

AVX2 INLINE bool decode_group_256(const uint8_t *scale, const uint8_t *codes, uint8_t *dst) {
    uint16_t amax;
    memcpy(&amax, scale, sizeof amax);
    if (amax >= NEAP_F16_INF) return false;
    __m256 step =
        _mm256_mul_ps(_mm256_cvtph_ps(_mm_set1_epi16((short)amax)), _mm256_set1_ps(NEAP_Q8_STEP));
    for (int i = 0; i < 8; i++) {
        __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(codes + 8 * i)));
        __m256 y = _mm256_mul_ps(_mm256_cvtepi32_ps(wide), step);
        __m128i h = _mm256_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128((__m128i *)(dst + 16 * i), h);
    }
    return true;
}

AVX2 static bool decode_256(const uint8_t *src, uint32_t n, void *dst) {
    const uint8_t *codes = src + 2 * (size_t)neap_q8_groups(n);
    uint8_t *out = dst;
    for (; n >= NEAP_Q8_GROUP; n -= NEAP_Q8_GROUP) {
        if (!decode_group_256(src, codes, out)) return false;
        src += 2;
        codes += NEAP_Q8_GROUP;
        out += 2 * NEAP_Q8_GROUP;
    }
    if (n == 0) return true;
    uint8_t padded_codes[NEAP_Q8_GROUP] = {0}, padded[2 * NEAP_Q8_GROUP];
    memcpy(padded_codes, codes, n);
    if (!decode_group_256(src, padded_codes, padded)) return false;
    memcpy(out, padded, 2 * (size_t)n);
    return true;
}

/* F16C has no name in every compiler's __builtin_cpu_supports. */
static bool has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static bool has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx2") && has_f16c();
}

static bool has_avx2(void) {
    return __builtin_cpu_supports("avx2") && has_f16c();
}

const neap_q8_kernel neap_q8_avx512 = {
    .name = "avx512",
    .supported = has_avx512,
    .encode_f16 = encode_512,
    .decode_f16 = decode_512,
};

const neap_q8_kernel neap_q8_avx2 = {
    .name = "avx2",
    .supported = has_avx2,
    .encode_f16 = encode_256,
    .decode_f16 = decode_256,
};
#else
typedef int neap_q8_x86_not_built;
#endif
