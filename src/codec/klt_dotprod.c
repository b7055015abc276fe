/* klt_dotprod.c - the klt kernel for AArch64 with dot products of bytes. Compiled with those turned
 * on. */
#if defined(__aarch64__)
#include <sys/auxv.h>

#include "klt_neon.h"

typedef int8x16_t vs;
#define vi_start(p) vdupq_n_s32(0)
#define vi_dot(acc, s, w) vdotq_s32(acc, vreinterpretq_s8_s32(w), s)
#define KLT_KERNEL neap_klt_dotprod
#define KLT_NAME "dotprod"
#define KLT_SUPPORTED is_supported

static bool is_supported(void) {
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
}

static inline int8x16_t vs_spread(const uint8_t *p) {
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return vreinterpretq_s8_u32(vdupq_n_u32(four ^ 0x80808080));
}

#include "klt_kernel.h"
#else
typedef int neap_klt_dotprod_not_built;
#endif
