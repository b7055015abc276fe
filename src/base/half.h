/* half.h - f16 and bf16 from and to f32, exact or rounded once (ties to even). */
#ifndef NEAP_BASE_HALF_H
#define NEAP_BASE_HALF_H

#include <stdint.h>
#include <string.h>

#define NEAP_F16_INF 0x7c00u /* absolute bits from here on are infinities and NaNs */

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
#endif
