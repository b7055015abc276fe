/* tile_avx512.c - the tile kernel for AVX-512 (F, BW, VL, DQ). Compiled with those turned on. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "exp2.h"
#include "transpose.h"
#include "transpose_avx512.h"

#define VL 16
#define MR 14
#define TV 2
#define TILE_ROWS 112
typedef __m512 vf;
#define vf_zero() _mm512_setzero_ps()
#define vf_set1(x) _mm512_set1_ps(x)
#define vf_load(p) _mm512_loadu_ps(p)
#define vf_store(p, v) _mm512_storeu_ps(p, v)
#define vf_load_f16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(p)))
#define vf_load_bf16(p)                    \
    _mm512_castsi512_ps(_mm512_slli_epi32( \
        _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(p))), 16))
#define vf_add(a, b) _mm512_add_ps(a, b)
#define vf_sub(a, b) _mm512_sub_ps(a, b)
#define vf_mul(a, b) _mm512_mul_ps(a, b)
#define vf_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define vf_max(a, b) _mm512_max_ps(a, b)
#define vf_reduce_max(v) _mm512_reduce_max_ps(v)
#define vf_reduce_add(v) _mm512_reduce_add_ps(v)
#define vf_prefetch(p) _mm_prefetch(p, _MM_HINT_T0)
#define TILE_KERNEL neap_attn_avx512
#define TILE_NAME "avx512"
#define TILE_SUPPORTED is_supported

static bool is_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

static inline __m512 vf_hide(__m512 x, __m512 m) {
    __mmask16 hidden = _mm512_cmp_ps_mask(m, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
    return _mm512_mask_mov_ps(_mm512_add_ps(x, m), hidden, m);
}

static inline __m512 vf_exp2(__m512 x) {
    /* Below -126 the scaling underflows: to zero at last, far before -200. */
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(x, whole), p = _mm512_set1_ps(NEAP_EXP2_C5);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(NEAP_EXP2_C4));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(NEAP_EXP2_C3));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(NEAP_EXP2_C2));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(NEAP_EXP2_C1));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(NEAP_EXP2_C0));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), p,
                                  whole);
}

static inline void load_rows(const char *rows, size_t stride, __m512i r[16]) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        r[i] = _mm512_loadu_si512(rows + (size_t)i * stride);
    }
}

static inline void transpose_32(const float *rows, size_t stride, uint32_t n_elems, float *panel) {
    if (n_elems % 16 != 0) {
        neap_transpose_32(rows, stride, n_elems, panel);
        return;
    }
    for (uint32_t r = 0; r < 64; r += 16) {
        for (uint32_t e = 0; e < n_elems; e += 16) {
            __m512i t[16];
            load_rows((const char *)rows + r * stride + 4 * (size_t)e, stride, t);
            neap_transpose_dwords(t);
#pragma GCC unroll 16
            for (uint32_t i = 0; i < 16; i++) {
                _mm512_storeu_si512(panel + (size_t)(e + i) * 64 + r, t[i]);
            }
        }
    }
}

/* Pairs of elements are transposed as dwords; then the even and the odd ones are told apart. */
static inline void transpose_16(const char *rows, size_t stride, uint32_t n_elems,
                                uint16_t *panel) {
    if (n_elems % 32 != 0) {
        neap_transpose_16(rows, stride, n_elems, panel);
        return;
    }
    const __m512i apart =
        _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24,
                         22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    for (uint32_t r = 0; r < 64; r += 16) {
        for (uint32_t e = 0; e < n_elems; e += 32) {
            __m512i t[16];
            load_rows(rows + r * stride + 2 * (size_t)e, stride, t);
            neap_transpose_dwords(t);
#pragma GCC unroll 16
            for (uint32_t i = 0; i < 16; i++) {
                uint16_t *dst = panel + (size_t)(e + 2 * i) * 64 + r;
                __m512i both = _mm512_permutexvar_epi16(apart, t[i]);
                _mm256_storeu_si256((__m256i *)(void *)dst, _mm512_castsi512_si256(both));
                _mm256_storeu_si256((__m256i *)(void *)(dst + 64),
                                    _mm512_extracti64x4_epi64(both, 1));
            }
        }
    }
}

#include "tile.h"
#else
typedef int neap_attn_no_avx512; /* a translation unit is not empty */
#endif
