/* tile_generic.c - the tile kernel without vector instructions of its own: the reference. */
#include <math.h>
#include <stdbool.h>

#include "exp2.h"
#include "half.h"
#include "transpose.h"

#define VL 1
#define MR 4
#define TV 4
#define TILE_ROWS 64
typedef float vf;
#define vf_zero() 0.0f
#define vf_set1(x) (x)
#define vf_load(p) (*(p))
#define vf_store(p, v) (*(p) = (v))
#define vf_load_f16(p) neap_f32_of_f16(*(p))
#define vf_load_bf16(p) neap_f32_of_bits((uint32_t) * (p) << 16)
#define vf_add(a, b) ((a) + (b))
#define vf_sub(a, b) ((a) - (b))
#define vf_mul(a, b) ((a) * (b))
#define vf_fma(a, b, c) ((a) * (b) + (c))
#define vf_max(a, b) ((a) > (b) ? (a) : (b))
#define vf_reduce_max(v) (v)
#define vf_reduce_add(v) (v)
#define vf_prefetch(p) __builtin_prefetch(p)
#define transpose_16 neap_transpose_16
#define transpose_32 neap_transpose_32
#define TILE_KERNEL neap_attn_generic
#define TILE_NAME "generic"
#define TILE_SUPPORTED is_supported

static bool is_supported(void) {
    return true;
}

static inline float vf_hide(float x, float m) {
    return m == -INFINITY ? m : x + m;
}

static inline float vf_exp2(float x) {
    if (x < -126.0f) {
        return 0.0f;
    }
    float whole = nearbyintf(x), f = x - whole;
    float p = NEAP_EXP2_C4 + f * NEAP_EXP2_C5;
    p = NEAP_EXP2_C3 + f * p;
    p = NEAP_EXP2_C2 + f * p;
    p = NEAP_EXP2_C1 + f * p;
    p = NEAP_EXP2_C0 + f * p;
    return ldexpf(p, (int)whole);
}

#include "tile.h"
