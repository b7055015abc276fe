/* tile_avx2.c - the tile kernel for AVX2 with FMA and F16C. Compiled with those turned on. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <stdbool.h>

#include "exp2.h"
#include "transpose.h"

#define VL 8
#define MR 6
#define TV 2
#define TILE_ROWS 96
typedef __m256 vf;
#define vf_zero() _mm256_setzero_ps()
#define vf_set1(x) _mm256_set1_ps(x)
#define vf_load(p) _mm256_loadu_ps(p)
#define vf_store(p, v) _mm256_storeu_ps(p, v)
#define vf_load_f16(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p)))
#define vf_load_bf16(p)                    \
    _mm256_castsi256_ps(_mm256_slli_epi32( \
        _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)(p))), 16))
#define vf_add(a, b) _mm256_add_ps(a, b)
#define vf_sub(a, b) _mm256_sub_ps(a, b)
#define vf_mul(a, b) _mm256_mul_ps(a, b)
#define vf_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define vf_max(a, b) _mm256_max_ps(a, b)
#define vf_prefetch(p) _mm_prefetch(p, _MM_HINT_T0)
#define transpose_16 neap_transpose_16
#define transpose_32 neap_transpose_32
#define TILE_KERNEL neap_attn_avx2
#define TILE_NAME "avx2"
#define TILE_SUPPORTED is_supported

static bool is_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}

static inline float vf_reduce_max(__m256 v) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

static inline float vf_reduce_add(__m256 v) {
    __m128 m = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_add_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_add_ss(m, _mm_movehdup_ps(m)));
}

static inline __m256 vf_hide(__m256 x, __m256 m) {
    __m256 hidden = _mm256_cmp_ps(m, _mm256_set1_ps(-INFINITY), _CMP_EQ_OQ);
    return _mm256_blendv_ps(_mm256_add_ps(x, m), m, hidden);
}

static inline __m256 vf_exp2(__m256 x) {
    __m256 tiny = _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_LT_OQ);
    x = _mm256_max_ps(_mm256_set1_ps(-126.0f), x);
    __m256 whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 f = _mm256_sub_ps(x, whole), p = _mm256_set1_ps(NEAP_EXP2_C5);
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(NEAP_EXP2_C4));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(NEAP_EXP2_C3));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(NEAP_EXP2_C2));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(NEAP_EXP2_C1));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(NEAP_EXP2_C0));
    /* Times 2^whole, by the exponent. */
    __m256i shifted = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
    p = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), shifted));
    return _mm256_andnot_ps(tiny, p);
}

#include "tile.h"
#else
typedef int neap_attn_no_avx2; /* a translation unit is not empty */
#endif
