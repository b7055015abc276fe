/* klt_i8mm.c - the klt kernel for AArch64 with products of matrices of bytes. Compiled with those
 * turned on. */
#if defined(__aarch64__)
#include <sys/auxv.h>

#include "klt_neon.h"

typedef uint8x16_t vs;
#define vi_dot(acc, s, w) vusdotq_s32(acc, s, vreinterpretq_s8_s32(w))
#define product_strip product_pairs
#define KLT_KERNEL neap_klt_i8mm
#define KLT_NAME "i8mm"
#define KLT_SUPPORTED is_supported

static bool is_supported(void) {
    return getauxval(AT_HWCAP2) & HWCAP2_I8MM;
}

/* The y8 are 128 too large. */
static inline int32x4_t vi_start(const int32_t *sum) {
    return vmulq_n_s32(vld1q_s32(sum), -128);
}

static inline uint8x16_t vs_spread(const uint8_t *p) {
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return vreinterpretq_u8_u32(vdupq_n_u32(four));
}

enum { PAIRS = NEAP_KLT_STRIP / 2 };
_Static_assert(NEAP_KLT_STRIP == 2 * PAIRS, "rows are multiplied two by two");

/* Adds a quad, and the next one if there is: each product is of two rows and two columns, the eight
 * bytes of either. */
NEAP_KLT_INLINE void add_quads(int32x4_t sum[PAIRS][2 * TV], const uint8_t *y8, const int8_t *g8,
                               bool two) {
    uint8x16_t rows[PAIRS];
#pragma GCC unroll 3
    for (int p = 0; p < PAIRS; p++) {
        const uint8_t *next = y8 + 4 * NEAP_KLT_PITCH + 8 * p;
        const uint32x2_t a = vreinterpret_u32_u8(vld1_u8(y8 + 8 * p)),
                         b = two ? vreinterpret_u32_u8(vld1_u8(next)) : vdup_n_u32(0);
        rows[p] = vreinterpretq_u8_u32(vcombine_u32(vzip1_u32(a, b), vzip2_u32(a, b)));
    }
#pragma GCC unroll 4
    for (int t = 0; t < TV; t++) {
        const int32x4_t a = vi_load(g8 + 16 * t),
                        b = two ? vi_load(g8 + 4 * NEAP_KLT_TILE + 16 * t) : vdupq_n_s32(0);
        const int8x16_t low = vreinterpretq_s8_s32(vzip1q_s32(a, b)),
                        high = vreinterpretq_s8_s32(vzip2q_s32(a, b));
#pragma GCC unroll 3
        for (int p = 0; p < PAIRS; p++) {
            sum[p][2 * t] = vusmmlaq_s32(sum[p][2 * t], rows[p], low);
            sum[p][2 * t + 1] = vusmmlaq_s32(sum[p][2 * t + 1], rows[p], high);
        }
    }
}

/* product_low() of a strip of rows. */
NEAP_KLT_INLINE void product_pairs(const neap_klt_basis *basis, size_t tile, uint32_t at,
                                   const float *mu, const uint8_t *y8, float *out, size_t pitch) {
    const int8_t *g8 = basis->g8 + (tile * basis->n_quads * NEAP_KLT_TILE + at) * 4;
    const float *step = basis->step + tile * NEAP_KLT_TILE + at;
    int32x4_t sum[PAIRS][2 * TV];
#pragma GCC unroll 4
    for (int t = 0; t < TV; t++) {
        const int32x4_t start = vi_start(basis->g8_sum + tile * NEAP_KLT_TILE + at + t * VL);
#pragma GCC unroll 3
        for (int p = 0; p < PAIRS; p++) {
            sum[p][2 * t] = vcombine_s32(vget_low_s32(start), vget_low_s32(start));
            sum[p][2 * t + 1] = vcombine_s32(vget_high_s32(start), vget_high_s32(start));
        }
    }
    for (uint32_t q = 0; q < basis->n_quads / 2; q++) {
        add_quads(sum, y8, g8, true);
        y8 += 8 * NEAP_KLT_PITCH;
        g8 += 8 * NEAP_KLT_TILE;
    }
    if (basis->n_quads % 2) add_quads(sum, y8, g8, false);
#pragma GCC unroll 3
    for (int p = 0; p < PAIRS; p++, out += 2 * pitch)
#pragma GCC unroll 4
        for (int t = 0; t < TV; t++) {
            const int32x4_t a = sum[p][2 * t], b = sum[p][2 * t + 1];
            const int32x4_t first = vcombine_s32(vget_low_s32(a), vget_low_s32(b)),
                            second = vcombine_s32(vget_high_s32(a), vget_high_s32(b));
            float *to = out + at + t * VL;
            const vf s = vf_load(step + t * VL), m = vf_load(mu + at + t * VL);
            vf_store(to, vf_fma(vf_of_vi(first), s, m));
            vf_store(to + pitch, vf_fma(vf_of_vi(second), s, m));
        }
}

#include "klt_kernel.h"
#else
typedef int neap_klt_i8mm_not_built;
#endif
