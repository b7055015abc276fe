/* klt_eight_x86.h - codes of 8 rows to components, as klt_kernel.h wants it; for AVX2 and above. */
#ifndef NEAP_KLT_EIGHT_X86_H
#define NEAP_KLT_EIGHT_X86_H

#include <immintrin.h>
#include <stdint.h>

static inline void eight_to_f32(uint64_t codes, const float *table, float sd, float *y) {
    const __m256i k = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)codes));
    _mm256_storeu_ps(y, _mm256_mul_ps(_mm256_set1_ps(sd), _mm256_i32gather_ps(table, k, 4)));
}

static inline void eight_to_y8(const uint64_t codes[4], const int8_t *const table[4], uint8_t *y8) {
    __m128i v[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        v[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(const void *)table[i]),
                                _mm_cvtsi64_si128((long long)codes[i]));
    const __m128i a = _mm_unpacklo_epi8(v[0], v[1]), b = _mm_unpacklo_epi8(v[2], v[3]);
    const __m128i sign = _mm_set1_epi8(-128);
    __m128i *out = (__m128i *)(void *)y8;
    _mm_storeu_si128(out, _mm_xor_si128(_mm_unpacklo_epi16(a, b), sign));
    _mm_storeu_si128(out + 1, _mm_xor_si128(_mm_unpackhi_epi16(a, b), sign));
}
#endif
