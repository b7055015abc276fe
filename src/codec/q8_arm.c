/* q8_arm.c - the q8 row kernel for NEON (every AArch64 has it, f16 conversions included).
 * See q8.c for what it computes. */
#include "q8_int.h"

#if defined(__aarch64__)
#define INLINE static inline __attribute__((always_inline))

/* Eight codes of eight f16. */
INLINE int8x8_t codes_of_8(uint16x8_t h, float inverse) {
    float32x4_t low = vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(h)));
    float32x4_t high = vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(h)));
    int32x4_t c0 = vcvtnq_s32_f32(vmulq_n_f32(low, inverse));
    int32x4_t c1 = vcvtnq_s32_f32(vmulq_n_f32(high, inverse));
    return vmovn_s16(vcombine_s16(vmovn_s32(c0), vmovn_s32(c1)));
}

INLINE bool encode_group(const uint8_t *src, uint8_t *scale, uint8_t *codes) {
    uint16x8_t h[8], m = vdupq_n_u16(0);
    for (int i = 0; i < 8; i++) {
        h[i] = vreinterpretq_u16_u8(vld1q_u8(src + 16 * i));
        m = vmaxq_u16(m, vandq_u16(h[i], vdupq_n_u16(0x7fff)));
    }
    uint16_t amax = vmaxvq_u16(m);
    if (amax >= NEAP_F16_INF) return false;
    memcpy(scale, &amax, sizeof amax);
    float inverse = amax == 0 ? 0.0f : NEAP_Q8_MAX_CODE / neap_f32_of_f16(amax);
    for (int i = 0; i < 8; i++)
        vst1_u8(codes + 8 * i, vreinterpret_u8_s8(codes_of_8(h[i], inverse)));
    return true;
}

static bool encode_neon(const void *src, uint32_t n, uint8_t *dst) {
    const uint8_t *in = src;
    uint8_t *codes = dst + 2 * (size_t)neap_q8_groups(n);
    for (; n >= NEAP_Q8_GROUP; n -= NEAP_Q8_GROUP) {
        if (!encode_group(in, dst, codes)) return false;
        in += 2 * NEAP_Q8_GROUP;
        dst += 2;
        codes += NEAP_Q8_GROUP;
    }
    if (n == 0) return true;
    uint8_t padded[2 * NEAP_Q8_GROUP] = {0}, padded_codes[NEAP_Q8_GROUP];
    memcpy(padded, in, 2 * (size_t)n);
    if (!encode_group(padded, dst, padded_codes)) return false;
    memcpy(codes, padded_codes, n);
    return true;
}

INLINE bool decode_group(const uint8_t *scale, const uint8_t *codes, uint8_t *dst) {
    uint16_t amax;
    memcpy(&amax, scale, sizeof amax);
    if (amax >= NEAP_F16_INF) return false;
    float step = neap_f32_of_f16(amax) * NEAP_Q8_STEP;
    for (int i = 0; i < 8; i++) {
        int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(vld1_u8(codes + 8 * i)));
        float32x4_t y0 = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), step);
        float32x4_t y1 = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide))), step);
        uint16x8_t h = vcombine_u16(vreinterpret_u16_f16(vcvt_f16_f32(y0)),
                                    vreinterpret_u16_f16(vcvt_f16_f32(y1)));
        vst1q_u8(dst + 16 * i, vreinterpretq_u8_u16(h));
    }
    return true;
}

static bool decode_neon(const uint8_t *src, uint32_t n, void *dst) {
    const uint8_t *codes = src + 2 * (size_t)neap_q8_groups(n);
    uint8_t *out = dst;
    for (; n >= NEAP_Q8_GROUP; n -= NEAP_Q8_GROUP) {
        if (!decode_group(src, codes, out)) return false;
        src += 2;
        codes += NEAP_Q8_GROUP;
        out += 2 * NEAP_Q8_GROUP;
    }
    if (n == 0) return true;
    uint8_t padded_codes[NEAP_Q8_GROUP] = {0}, padded[2 * NEAP_Q8_GROUP];
    memcpy(padded_codes, codes, n);
    if (!decode_group(src, padded_codes, padded)) return false;
    memcpy(out, padded, 2 * (size_t)n);
    return true;
}

static bool always(void) {
    return true;
}

const neap_q8_kernel neap_q8_neon = {
    .name = "neon",
    .supported = always,
    .encode_f16 = encode_neon,
    .decode_f16 = decode_neon,
};
#else
typedef int neap_q8_arm_not_built;
#endif
