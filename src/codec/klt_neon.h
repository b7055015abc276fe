/* klt_neon.h - the vectors of the klt kernels for AArch64 (NEON has FMA and f16 conversion): all
 * that klt_kernel.h asks for but the products of bytes. Included by klt_neon.c, klt_dotprod.c,
 * klt_i8mm.c. */
#include <arm_neon.h>

#include "klt_int.h"

#define VL 4
#define TV 4
typedef float32x4_t vf;
typedef int32x4_t vi;
#define vf_set1(x) vdupq_n_f32(x)
#define vf_load(p) vld1q_f32(p)
#define vf_store(p, v) vst1q_f32(p, v)
#define vf_add(a, b) vaddq_f32(a, b)
#define vf_sub(a, b) vsubq_f32(a, b)
#define vf_mul(a, b) vmulq_f32(a, b)
/* Of a number and none, the number, like fminf() and fmaxf(). */
#define vf_min(a, b) vminnmq_f32(a, b)
#define vf_max(a, b) vmaxnmq_f32(a, b)
#define vf_fma(a, b, c) vfmaq_f32(c, a, b)
#define vf_fms(a, b, c) vfmaq_f32(vnegq_f32(c), a, b)
#define vf_fmaddsub(a, b, c) vfmaq_f32(vf_flip(c, UINT64_C(0x80000000)), a, b)
#define vf_fmsubadd(a, b, c) vfmaq_f32(vf_flip(c, UINT64_C(0x8000000000000000)), a, b)
#define vf_load_f16(p) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))
#define vf_store_f16(p, v) vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v)))
#define vf_swap(x) vrev64q_f32(x)
#define vi_set1(x) vdupq_n_s32(x)
#define vf_of_vi(v) vcvtq_f32_s32(v)
#define vi_load(p) vreinterpretq_s32_u8(vld1q_u8((const uint8_t *)(p)))
#define vi_store(p, v) vst1q_s32(p, v)
#define vi_add(a, b) vaddq_s32(a, b)
#define vi_unsigned_byte(v, i) vandq_s32(vshlq_s32(v, vi_set1(-8 * (i))), vi_set1(255))
#define vi_byte(v, i) vshrq_n_s32(vshlq_n_s32(v, 24 - 8 * (i)), 24)
/* True is -1. */
#define vi_step(x, t, k) vsubq_s32(vaddq_s32(k, k), vreinterpretq_s32_u32(vcgtq_f32(x, t)))

/* Changes the signs of both pairs of lanes by these bits. */
static inline float32x4_t vf_flip(float32x4_t v, uint64_t signs) {
    return vreinterpretq_f32_u64(veorq_u64(vreinterpretq_u64_f32(v), vdupq_n_u64(signs)));
}

static inline float32x4_t vf_twice(const float *p) {
    const float32x2_t v = vld1_f32(p);
    return vcombine_f32(vdup_lane_f32(v, 0), vdup_lane_f32(v, 1));
}

static inline void vi_store_u8(uint8_t *p, int32x4_t v) {
    const int16x4_t narrow = vmovn_s32(v);
    const int8x8_t bytes = vmovn_s16(vcombine_s16(narrow, narrow));
    const int32_t four = vget_lane_s32(vreinterpret_s32_s8(bytes), 0);
    memcpy(p, &four, sizeof four);
}

NEAP_KLT_INLINE float32x4_t gather(const float *table, uint32_t a, uint32_t b, uint32_t c,
                                   uint32_t d) {
    float32x4_t v = vdupq_n_f32(table[a]);
    v = vld1q_lane_f32(table + b, v, 1);
    v = vld1q_lane_f32(table + c, v, 2);
    return vld1q_lane_f32(table + d, v, 3);
}

/* Tables of 16 values and less are looked up in registers, by bytes. */
NEAP_KLT_INLINE float32x4_t vf_lookup(const float *table, uint32_t bits, int32x4_t k) {
    if (bits == 0) return vdupq_n_f32(table[0]);
    if (bits <= 4) {
        const uint8x16x4_t bytes = vld1q_u8_x4((const uint8_t *)table);
        const int32x4_t at = vmlaq_s32(vi_set1(0x03020100), k, vi_set1(0x04040404));
        return vreinterpretq_f32_u8(vqtbl4q_u8(bytes, vreinterpretq_u8_s32(at)));
    }
    const uint32x4_t at = vreinterpretq_u32_s32(k);
    return gather(table, vgetq_lane_u32(at, 0), vgetq_lane_u32(at, 1), vgetq_lane_u32(at, 2),
                  vgetq_lane_u32(at, 3));
}

static inline void transpose_square(const float *x, size_t pitch, float *out) {
    const float32x4_t r0 = vld1q_f32(x), r1 = vld1q_f32(x + pitch), r2 = vld1q_f32(x + 2 * pitch),
                      r3 = vld1q_f32(x + 3 * pitch);
    const float32x4_t a = vzip1q_f32(r0, r2), b = vzip1q_f32(r1, r3), c = vzip2q_f32(r0, r2),
                      d = vzip2q_f32(r1, r3);
    vst1q_f32(out, vzip1q_f32(a, b));
    vst1q_f32(out + 64, vzip2q_f32(a, b));
    vst1q_f32(out + 128, vzip1q_f32(c, d));
    vst1q_f32(out + 192, vzip2q_f32(c, d));
}

NEAP_KLT_INLINE void eight_to_f32(uint64_t codes, const float *table, float sd, float *y) {
    for (int i = 0; i < 8; i++)
        y[i] = sd * table[codes >> 8 * i & 255];
}

NEAP_KLT_INLINE void eight_to_y8(const uint64_t codes[4], const int8_t *const table[4],
                                 uint8_t *y8) {
    uint8x8x4_t v;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        v.val[i] = veor_u8(vreinterpret_u8_s8(vqtbl1_s8(vld1q_s8(table[i]), vcreate_u8(codes[i]))),
                           vdup_n_u8(128));
    vst4_u8(y8, v);
}

/* neap_klt_unpack(), in four vectors. */
NEAP_KLT_INLINE uint8x16x4_t codes_64(const uint8_t *src, uint32_t bits) {
    uint8x16x4_t codes = {{vdupq_n_u8(0), vdupq_n_u8(0), vdupq_n_u8(0), vdupq_n_u8(0)}};
    int8_t done = 0;
    if (bits == 8) return vld1q_u8_x4(src);
    if (bits & 4) {
        const uint8x16_t a = vld1q_u8(src), b = vld1q_u8(src + 16);
        codes.val[0] = vandq_u8(a, vdupq_n_u8(15));
        codes.val[1] = vandq_u8(b, vdupq_n_u8(15));
        codes.val[2] = vshrq_n_u8(a, 4);
        codes.val[3] = vshrq_n_u8(b, 4);
        src += 32;
        done = 4;
    }
    if (bits & 2) {
        const uint8x16_t pairs = vld1q_u8(src);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            const uint8x16_t two =
                vandq_u8(vshlq_u8(pairs, vdupq_n_s8((int8_t)(-2 * k))), vdupq_n_u8(3));
            codes.val[k] = vorrq_u8(codes.val[k], vshlq_u8(two, vdupq_n_s8(done)));
        }
        src += 16;
        done = (int8_t)(done + 2);
    }
    if (bits & 1) {
        const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(UINT64_C(0x8040201008040201)));
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            const uint8x16_t eights = vcombine_u8(vdup_n_u8(src[2 * k]), vdup_n_u8(src[2 * k + 1]));
            const uint8x16_t one =
                vandq_u8(vtstq_u8(eights, bit), vdupq_n_u8((uint8_t)(1 << done)));
            codes.val[k] = vorrq_u8(codes.val[k], one);
        }
    }
    return codes;
}

static inline void codes_to_f32(const uint8_t *src, uint32_t bits, const float *table, float sd,
                                float *y) {
    uint8_t code[NEAP_KLT_TILE];
    vst1q_u8_x4(code, codes_64(src, bits));
    for (uint32_t i = 0; i < NEAP_KLT_TILE; i += VL)
        vst1q_f32(y + i, vmulq_f32(vdupq_n_f32(sd),
                                   gather(table, code[i], code[i + 1], code[i + 2], code[i + 3])));
}

static inline void codes_to_y8(const uint8_t *const src[4], const uint32_t bits[4],
                               const int8_t *const table[4], uint8_t *y8) {
    uint8x16x4_t v[4];
    for (int i = 0; i < 4; i++) {
        const uint8x16_t values =
            veorq_u8(vreinterpretq_u8_s8(vld1q_s8(table[i])), vdupq_n_u8(128));
        v[i] = codes_64(src[i], bits[i]);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++)
            v[i].val[k] = vqtbl1q_u8(values, v[i].val[k]);
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        const uint8x16x4_t rows = {{v[0].val[k], v[1].val[k], v[2].val[k], v[3].val[k]}};
        vst4q_u8(y8 + 64 * k, rows);
    }
}
