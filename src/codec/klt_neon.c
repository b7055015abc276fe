/* klt_neon.c - the klt kernel for every AArch64: products of bytes by widening multiplications. */
#if defined(__aarch64__)
#include "klt_neon.h"

typedef int8x16_t vs;
#define vi_start(p) vdupq_n_s32(0)
#define KLT_KERNEL neap_klt_neon
#define KLT_NAME "neon"
#define KLT_SUPPORTED always

static bool always(void) {
    return true;
}

static inline int8x16_t vs_spread(const uint8_t *p) {
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return vreinterpretq_s8_u32(vdupq_n_u32(four ^ 0x80808080));
}

/* No sum of two products is above 2 * 127 * 127, so 16 bits hold it. */
static inline int32x4_t vi_dot(int32x4_t acc, int8x16_t s, int32x4_t w) {
    const int8x16_t g = vreinterpretq_s8_s32(w);
    const int16x8_t low = vmull_s8(vget_low_s8(g), vget_low_s8(s)), high = vmull_high_s8(g, s);
    return vpadalq_s16(acc, vpaddq_s16(low, high));
}

#include "klt_kernel.h"
#else
typedef int neap_klt_neon_not_built;
#endif
