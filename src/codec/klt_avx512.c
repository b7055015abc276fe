/* klt_avx512.c - the klt kernel for AVX-512 (F, BW, VL, DQ, VNNI). Compiled with those turned on.
 */
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "klt_eight_x86.h"
#include "transpose_avx512.h"

#define VL 16
#define TV 4
typedef __m512 vf;
typedef __m512i vi;
typedef __m512i vs;
#define vf_set1(x) _mm512_set1_ps(x)
#define vf_load(p) _mm512_loadu_ps(p)
#define vf_store(p, v) _mm512_storeu_ps(p, v)
#define vf_add(a, b) _mm512_add_ps(a, b)
#define vf_sub(a, b) _mm512_sub_ps(a, b)
#define vf_mul(a, b) _mm512_mul_ps(a, b)
#define vf_min(a, b) _mm512_min_ps(a, b)
#define vf_max(a, b) _mm512_max_ps(a, b)
#define vf_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define vf_fms(a, b, c) _mm512_fmsub_ps(a, b, c)
#define vf_fmaddsub(a, b, c) _mm512_fmaddsub_ps(a, b, c)
#define vf_fmsubadd(a, b, c) _mm512_fmsubadd_ps(a, b, c)
#define vf_load_f16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(p)))
#define vf_swap(x) _mm512_permute_ps(x, 0xb1)
#define vi_set1(x) _mm512_set1_epi32(x)
#define vf_of_vi(v) _mm512_cvtepi32_ps(v)
#define vi_load(p) _mm512_loadu_si512((const void *)(p))
#define vi_store(p, v) _mm512_storeu_si512((void *)(p), v)
#define vi_add(a, b) _mm512_add_epi32(a, b)
#define vi_unsigned_byte(v, i) _mm512_and_si512(_mm512_srli_epi32(v, 8 * (i)), vi_set1(255))
#define vi_byte(v, i) _mm512_srai_epi32(_mm512_slli_epi32(v, 24 - 8 * (i)), 24)
#define vi_step(x, t, k)                                                                \
    _mm512_mask_add_epi32(_mm512_add_epi32(k, k), _mm512_cmp_ps_mask(x, t, _CMP_GT_OQ), \
                          _mm512_add_epi32(k, k), vi_set1(1))
#define vi_store_u8(p, v) _mm_storeu_si128((__m128i *)(void *)(p), _mm512_cvtepi32_epi8(v))
#define KLT_KERNEL neap_klt_avx512
#define KLT_NAME "avx512"
#define KLT_SUPPORTED is_supported

static bool is_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}

static inline void vf_store_f16(uint16_t *p, __m512 v) {
    const __m256i h = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256((__m256i *)(void *)p, h);
}

static inline __m512 vf_twice(const float *p) {
    const __m512i places = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_permutexvar_ps(places, _mm512_castps256_ps512(_mm256_loadu_ps(p)));
}

static inline __m512i vs_spread(const uint8_t *p) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
}

/* GCC 12 copies and spills the accumulators of the intrinsic. */
static inline __m512i vi_dot(__m512i acc, __m512i s, __m512i w) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(s), "v"(w));
    return acc;
}

/* The y8 are 128 too large. */
static inline __m512i vi_start(const int32_t *sum) {
    return _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(_mm512_loadu_si512(sum), 7));
}

/* A table of more than 32 values is two halves, chosen between by the highest bit of k. */
static inline __m512 lookup_5(const float *table, __m512i k) {
    return _mm512_permutex2var_ps(_mm512_loadu_ps(table), k, _mm512_loadu_ps(table + 16));
}

static inline __m512 lookup_6(const float *table, __m512i k) {
    return _mm512_mask_mov_ps(lookup_5(table, k), _mm512_test_epi32_mask(k, vi_set1(32)),
                              lookup_5(table + 32, k));
}

static inline __m512 lookup_7(const float *table, __m512i k) {
    return _mm512_mask_mov_ps(lookup_6(table, k), _mm512_test_epi32_mask(k, vi_set1(64)),
                              lookup_6(table + 64, k));
}

static inline __attribute__((always_inline)) __m512 vf_lookup(const float *table, uint32_t bits,
                                                              __m512i k) {
    if (bits <= 4) return _mm512_permutexvar_ps(k, _mm512_loadu_ps(table));
    if (bits == 5) return lookup_5(table, k);
    if (bits == 6) return lookup_6(table, k);
    if (bits == 7) return lookup_7(table, k);
    return _mm512_mask_mov_ps(lookup_7(table, k), _mm512_test_epi32_mask(k, vi_set1(128)),
                              lookup_7(table + 128, k));
}

static inline void transpose_square(const float *x, size_t pitch, float *out) {
    __m512i r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        r[i] = _mm512_loadu_si512(x + (size_t)i * pitch);
    neap_transpose_dwords(r);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        _mm512_storeu_si512(out + i * 64, r[i]);
}

/* neap_klt_unpack(), in one vector. */
static inline __m512i codes_64(const uint8_t *src, uint32_t bits) {
    __m512i codes = _mm512_setzero_si512();
    unsigned done = 0;
    if (bits == 8) return _mm512_loadu_si512(src);
    if (bits & 4) {
        const __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)src),
                      high = _mm256_srli_epi16(low, 4);
        codes = _mm512_and_si512(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1),
                                 _mm512_set1_epi8(15));
        src += 32;
        done = 4;
    }
    if (bits & 2) {
        const __m512i shifts = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
        const __m128i pairs = _mm_loadu_si128((const __m128i *)(const void *)src);
        const __m512i two = _mm512_and_si512(
            _mm512_srlv_epi32(_mm512_broadcast_i32x4(pairs), shifts), _mm512_set1_epi8(3));
        codes = _mm512_or_si512(codes, _mm512_slli_epi32(two, done));
        src += 16;
        done += 2;
    }
    if (bits & 1) {
        uint64_t one;
        __builtin_memcpy(&one, src, sizeof one);
        codes = _mm512_or_si512(codes, _mm512_maskz_set1_epi8(one, (char)(1 << done)));
    }
    return codes;
}

static inline __attribute__((always_inline)) void
f32_of_codes(const uint8_t *src, uint32_t bits, const float *table, float sd, float *y) {
    const __m512i codes = codes_64(src, bits);
    const __m512 scale = _mm512_set1_ps(sd);
    const __m512i k[4] = {_mm512_cvtepu8_epi32(_mm512_castsi512_si128(codes)),
                          _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(codes, 1)),
                          _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(codes, 2)),
                          _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(codes, 3))};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        _mm512_storeu_ps(y + 16 * i, _mm512_mul_ps(scale, vf_lookup(table, bits, k[i])));
}

static inline void codes_to_f32(const uint8_t *src, uint32_t bits, const float *table, float sd,
                                float *y) {
    if (bits == 5)
        f32_of_codes(src, 5, table, sd, y);
    else if (bits == 6)
        f32_of_codes(src, 6, table, sd, y);
    else if (bits == 7)
        f32_of_codes(src, 7, table, sd, y);
    else
        f32_of_codes(src, 8, table, sd, y);
}

/* Looked up in each 128-bit lane; bytes, then pairs are interleaved, then lanes put in order. */
static inline void codes_to_y8(const uint8_t *const src[4], const uint32_t bits[4],
                               const int8_t *const table[4], uint8_t *y8) {
    __m512i v[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m128i values = _mm_loadu_si128((const __m128i *)(const void *)table[i]);
        v[i] = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), codes_64(src[i], bits[i]));
        v[i] = _mm512_xor_si512(v[i], _mm512_set1_epi8(-128));
    }
    const __m512i a = _mm512_unpacklo_epi8(v[0], v[1]), b = _mm512_unpackhi_epi8(v[0], v[1]),
                  c = _mm512_unpacklo_epi8(v[2], v[3]), d = _mm512_unpackhi_epi8(v[2], v[3]);
    /* Lane l of r[i]: rows 16 l + 4 i .. 16 l + 4 i + 3. */
    const __m512i r0 = _mm512_unpacklo_epi16(a, c), r1 = _mm512_unpackhi_epi16(a, c),
                  r2 = _mm512_unpacklo_epi16(b, d), r3 = _mm512_unpackhi_epi16(b, d);
    const __m512i p = _mm512_shuffle_i32x4(r0, r1, 0x44), q = _mm512_shuffle_i32x4(r2, r3, 0x44),
                  s = _mm512_shuffle_i32x4(r0, r1, 0xee), t = _mm512_shuffle_i32x4(r2, r3, 0xee);
    _mm512_storeu_si512(y8, _mm512_shuffle_i32x4(p, q, 0x88));
    _mm512_storeu_si512(y8 + 64, _mm512_shuffle_i32x4(p, q, 0xdd));
    _mm512_storeu_si512(y8 + 128, _mm512_shuffle_i32x4(s, t, 0x88));
    _mm512_storeu_si512(y8 + 192, _mm512_shuffle_i32x4(s, t, 0xdd));
}

#include "klt_kernel.h"
#else
typedef int neap_klt_avx512_not_built;
#endif
