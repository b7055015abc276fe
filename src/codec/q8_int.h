/* q8_int.h - what the parts of the q8 codec share: row kernels and number conversions.
 * A coded f16 row of n elements is ceil(n / 64) scales of 2 bytes, then n codes of 1 byte.
 * All kernels give the same bytes: same f32 operations, one rounding each, ties to even. */
#ifndef NEAP_Q8_INT_H
#define NEAP_Q8_INT_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "codec.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the q8 format is written by plain stores: little-endian machines only"
#endif

#define NEAP_Q8_GROUP 64u
#define NEAP_Q8_MAX_CODE 127.0f
#define NEAP_Q8_STEP (1.0f / 127.0f)
#define NEAP_F16_INF 0x7c00u /* absolute bits from here on are infinities and NaNs */

typedef struct neap_q8_kernel {
    const char *name;
    bool (*supported)(void);
    /* Codes a row of n f16 elements. False when one of them is not finite; dst is then undefined.
     */
    bool (*encode_f16)(const void *src, uint32_t n, uint8_t *dst);
    /* False when a scale is not a finite, positive number or zero; dst is then partly written. */
    bool (*decode_f16)(const uint8_t *src, uint32_t n, void *dst);
} neap_q8_kernel;

/* The i-th kernel that this machine can run, fastest first, the scalar one last; NULL past it. */
const neap_q8_kernel *neap_q8_kernel_at(size_t i);
/* The codec's encode and decode with a kernel of one's choice. */
int neap_q8_encode_with(const neap_q8_kernel *kernel, const neap_codec_chunk *chunk, void *dst,
                        size_t cap, size_t *ret_len);
int neap_q8_decode_with(const neap_q8_kernel *kernel, const void *src, size_t len,
                        const neap_codec_chunk *chunk);

#if defined(__x86_64__)
extern const neap_q8_kernel neap_q8_avx512, neap_q8_avx2;
#elif defined(__aarch64__)
extern const neap_q8_kernel neap_q8_neon;
#endif

static inline uint32_t neap_q8_groups(uint32_t n) {
    return n / NEAP_Q8_GROUP + (n % NEAP_Q8_GROUP != 0);
}

static inline uint32_t neap_f32_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float neap_f32_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float neap_f32_of_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = h >> 10 & 31u, mantissa = h & 0x3ffu;
    if (exponent == 0) return neap_f32_of_bits(sign | neap_f32_bits((float)mantissa * 0x1p-24f));
    if (exponent == 31) exponent = 255 - 112;
    return neap_f32_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

/* Integer arithmetic only: an addition here could be fused with the caller's multiplication. */
static inline uint16_t neap_f16_of_f32(float x) {
    uint32_t bits = neap_f32_bits(x), sign = bits >> 16 & 0x8000u, a = bits & 0x7fffffffu, h;
    if (a >= 0x47800000u) { /* 65536 and more */
        h = a > 0x7f800000u ? 0x7e00u : NEAP_F16_INF;
    } else if (a >= 0x38800000u) { /* normal f16; the carry may round up to infinity */
        h = (a + 0xfffu + (a >> 13 & 1u) - 0x38000000u) >> 13;
    } else if (a > 0x33000000u) { /* subnormal f16: whole multiples of 2^-24 */
        uint32_t shift = 126u - (a >> 23), m = (a & 0x7fffffu) | 0x800000u;
        uint32_t half = 1u << (shift - 1), rest = m & (2 * half - 1);
        h = m >> shift;
        h += rest > half || (rest == half && (h & 1u));
    } else { /* at most 2^-25: the tie goes to zero */
        h = 0;
    }
    return (uint16_t)(sign | h);
}

static inline uint16_t neap_bf16_of_f32(float x) /* finite x */
{
    uint32_t bits = neap_f32_bits(x);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/* To the nearest integer, ties to even; one instruction, so that nothing can be fused into it. */
static inline int32_t neap_q8_round(float x) {
#if defined(__SSE2__)
    return _mm_cvtss_si32(_mm_set_ss(x));
#elif defined(__aarch64__)
    return vcvtns_s32_f32(x);
#else
    return (int32_t)lrintf(x);
#endif
}
#endif
