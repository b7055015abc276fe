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
#include "half.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the q8 format is written by plain stores: little-endian machines only"
#endif

#define NEAP_Q8_GROUP 64u
#define NEAP_Q8_MAX_CODE 127.0f
#define NEAP_Q8_STEP (1.0f / 127.0f)

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
