/* tile_neon.c - the tile kernel for NEON (ARMv8-A: FMA and f16 conversion are part of it). */
#if defined(__aarch64__)
#include <arm_neon.h>
#include <math.h>
#include <stdbool.h>

#include "exp2.h"
#include "transpose.h"

#define VL 4
#define MR 6
#define TV 4
#define TILE_ROWS 96
typedef float32x4_t vf;
#define vf_zero() vdupq_n_f32(0.0f)
#define vf_set1(x) vdupq_n_f32(x)
#define vf_load(p) vld1q_f32(p)
#define vf_store(p, v) vst1q_f32(p, v)
#define vf_load_f16(p) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))
#define vf_load_bf16(p) vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16))
#define vf_add(a, b) vaddq_f32(a, b)
#define vf_sub(a, b) vsubq_f32(a, b)
#define vf_mul(a, b) vmulq_f32(a, b)
#define vf_fma(a, b, c) vfmaq_f32(c, a, b)
#define vf_max(a, b) vmaxq_f32(a, b)
#define vf_reduce_max(v) vmaxvq_f32(v)
#define vf_reduce_add(v) vaddvq_f32(v)
#define vf_prefetch(p) __builtin_prefetch(p)
#define transpose_16 neap_transpose_16
#define transpose_32 neap_transpose_32
#define TILE_KERNEL neap_attn_neon
#define TILE_NAME "neon"
#define TILE_SUPPORTED is_supported

static bool is_supported(void) {
    return true;
}

static inline float32x4_t vf_hide(float32x4_t x, float32x4_t m) {
    uint32x4_t hidden = vceqq_f32(m, vdupq_n_f32(-INFINITY));
    return vbslq_f32(hidden, m, vaddq_f32(x, m));
}

static inline float32x4_t vf_exp2(float32x4_t x) {
    uint32x4_t tiny = vcltq_f32(x, vdupq_n_f32(-126.0f));
    x = vmaxq_f32(x, vdupq_n_f32(-126.0f));
    float32x4_t whole = vrndnq_f32(x), f = vsubq_f32(x, whole), p = vdupq_n_f32(NEAP_EXP2_C5);
    p = vfmaq_f32(vdupq_n_f32(NEAP_EXP2_C4), p, f);
    p = vfmaq_f32(vdupq_n_f32(NEAP_EXP2_C3), p, f);
    p = vfmaq_f32(vdupq_n_f32(NEAP_EXP2_C2), p, f);
    p = vfmaq_f32(vdupq_n_f32(NEAP_EXP2_C1), p, f);
    p = vfmaq_f32(vdupq_n_f32(NEAP_EXP2_C0), p, f);
    /* Times 2^whole, by the exponent. */
    int32x4_t shifted = vshlq_n_s32(vcvtq_s32_f32(whole), 23);
    p = vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), shifted));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(p), tiny));
}

#include "tile.h"
#else
typedef int neap_attn_no_neon; /* a translation unit is not empty */
#endif
