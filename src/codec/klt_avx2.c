/* klt_avx2.c - the klt kernel for AVX2, FMA and F16C. Compiled with those turned on. */
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define VL 8
#define TV 2
typedef __m256 vf;
typedef __m256i vi;
/* Products of bytes are of an unsigned and a signed one: the sign goes to the other side. */
typedef struct vs {
    __m256i magnitude, sign;
} vs;
#define vf_set1(x) _mm256_set1_ps(x)
#define vf_load(p) _mm256_loadu_ps(p)
#define vf_store(p, v) _mm256_storeu_ps(p, v)
#define vf_add(a, b) _mm256_add_ps(a, b)
#define vf_sub(a, b) _mm256_sub_ps(a, b)
#define vf_mul(a, b) _mm256_mul_ps(a, b)
#define vf_min(a, b) _mm256_min_ps(a, b)
#define vf_max(a, b) _mm256_max_ps(a, b)
#define vf_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define vf_fms(a, b, c) _mm256_fmsub_ps(a, b, c)
#define vf_fmaddsub(a, b, c) _mm256_fmaddsub_ps(a, b, c)
#define vf_fmsubadd(a, b, c) _mm256_fmsubadd_ps(a, b, c)
#define vf_load_f16(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p)))
#define vf_swap(x) _mm256_permute_ps(x, 0xb1)
#define vf_lookup(table, bits, k) _mm256_i32gather_ps(table, k, 4)
#define vi_set1(x) _mm256_set1_epi32(x)
#define vf_of_vi(v) _mm256_cvtepi32_ps(v)
#define vi_load(p) _mm256_loadu_si256((const __m256i *)(const void *)(p))
#define vi_store(p, v) _mm256_storeu_si256((__m256i *)(void *)(p), v)
#define vi_add(a, b) _mm256_add_epi32(a, b)
#define vi_unsigned_byte(v, i) _mm256_and_si256(_mm256_srli_epi32(v, 8 * (i)), vi_set1(255))
#define vi_byte(v, i) _mm256_srai_epi32(_mm256_slli_epi32(v, 24 - 8 * (i)), 24)
/* True is -1. */
#define vi_step(x, t, k) \
    _mm256_sub_epi32(_mm256_add_epi32(k, k), _mm256_castps_si256(_mm256_cmp_ps(x, t, _CMP_GT_OQ)))
#define vi_start(p) _mm256_setzero_si256()
#define KLT_KERNEL neap_klt_avx2
#define KLT_NAME "avx2"
#define KLT_SUPPORTED is_supported

/* F16C has no name in every compiler's __builtin_cpu_supports. */
static bool is_supported(void) {
    unsigned a, b, c, d;
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static inline void vf_store_f16(uint16_t *p, __m256 v) {
    const __m128i h = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128((__m128i *)(void *)p, h);
}

static inline __m256 vf_twice(const float *p) {
    const __m256i places = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), places);
}

static inline void vi_store_u8(uint8_t *p, __m256i v) {
    const __m256i bytes = _mm256_shuffle_epi8(
        v, _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8,
                            12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    const int32_t four[2] = {_mm256_extract_epi32(bytes, 0), _mm256_extract_epi32(bytes, 4)};
    __builtin_memcpy(p, four, sizeof four);
}

static inline vs vs_spread(const uint8_t *p) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    const __m256i y = _mm256_set1_epi32(four ^ (int32_t)0x80808080);
    return (vs){_mm256_abs_epi8(y), y};
}

/* No sum of two products is above 2 * 127 * 127, so none saturates. */
static inline __m256i vi_dot(__m256i acc, vs s, __m256i w) {
    const __m256i two = _mm256_maddubs_epi16(s.magnitude, _mm256_sign_epi8(w, s.sign));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(two, _mm256_set1_epi16(1)));
}

static inline void transpose_square(const float *x, size_t pitch, float *out) {
    __m256 r[8], t[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        r[i] = _mm256_loadu_ps(x + (size_t)i * pitch);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(out + i * 64, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(out + (i + 4) * 64, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

#include "klt_eight_x86.h"
#include "klt_int.h"

static inline void codes_to_f32(const uint8_t *src, uint32_t bits, const float *table, float sd,
                                float *y) {
    uint8_t code[NEAP_KLT_TILE];
    neap_klt_unpack(src, bits, code);
    for (uint32_t i = 0; i < NEAP_KLT_TILE; i += VL) {
        const __m256i k =
            _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(code + i)));
        _mm256_storeu_ps(y + i,
                         _mm256_mul_ps(_mm256_set1_ps(sd), _mm256_i32gather_ps(table, k, 4)));
    }
}

/* Looked up in each 128-bit lane; bytes, then pairs are interleaved, then lanes put in order. */
static inline void codes_to_y8(const uint8_t *const src[4], const uint32_t bits[4],
                               const int8_t *const table[4], uint8_t *y8) {
    uint8_t code[4][NEAP_KLT_TILE];
    for (int i = 0; i < 4; i++)
        neap_klt_unpack(src[i], bits[i], code[i]);
    for (uint32_t r = 0; r < NEAP_KLT_TILE; r += 32, y8 += 128) {
        __m256i v[4];
        for (int i = 0; i < 4; i++) {
            const __m128i values = _mm_loadu_si128((const __m128i *)(const void *)table[i]);
            v[i] = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), vi_load(code[i] + r));
            v[i] = _mm256_xor_si256(v[i], _mm256_set1_epi8(-128));
        }
        const __m256i a = _mm256_unpacklo_epi8(v[0], v[1]), b = _mm256_unpackhi_epi8(v[0], v[1]),
                      c = _mm256_unpacklo_epi8(v[2], v[3]), d = _mm256_unpackhi_epi8(v[2], v[3]);
        const __m256i r0 = _mm256_unpacklo_epi16(a, c), r1 = _mm256_unpackhi_epi16(a, c),
                      r2 = _mm256_unpacklo_epi16(b, d), r3 = _mm256_unpackhi_epi16(b, d);
        __m256i *out = (__m256i *)(void *)y8;
        _mm256_storeu_si256(out, _mm256_permute2x128_si256(r0, r1, 0x20));
        _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(r2, r3, 0x20));
        _mm256_storeu_si256(out + 2, _mm256_permute2x128_si256(r0, r1, 0x31));
        _mm256_storeu_si256(out + 3, _mm256_permute2x128_si256(r2, r3, 0x31));
    }
}

#include "klt_kernel.h"
#else
typedef int neap_klt_avx2_not_built;
#endif
