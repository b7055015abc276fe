/* rope.c - see rope.h. */
#include "rope.h"

#include <errno.h>
#include <math.h>
#include <string.h>

/* Modes of ggml. */
enum { MODE_NORM = 0, MODE_NEOX = 2, MODE_MROPE = 8, MODE_IMROPE = 40 };
#define PI 3.14159265358979323846

/* The pair whose wavelength fits n_turns times into the context of the training. */
static double pair_of(const neap_kv_rope *rope, double n_turns) {
    return rope->n_dims * log(rope->n_ctx_orig / (n_turns * 2 * PI)) /
           (2 * log((double)rope->freq_base));
}

/* YaRN: 1 for pairs that turn fast and keep their angle, 0 for those that are stretched. */
static double keep_share(const neap_kv_rope *rope, int pair) {
    const double low = fmax(0, floor(pair_of(rope, rope->beta_fast)));
    const double high = fmin(rope->n_dims - 1, ceil(pair_of(rope, rope->beta_slow)));
    const double y = (pair - low) / fmax(0.001, high - low);
    return 1 - fmin(1, fmax(0, y));
}

static int is_valid(const neap_kv_rope *rope, uint32_t head_dim) {
    const int is_known = rope->mode == MODE_NORM || rope->mode == MODE_NEOX ||
                         rope->mode == MODE_MROPE || rope->mode == MODE_IMROPE;
    return is_known && rope->n_dims > 0 && rope->n_dims % 2 == 0 &&
           (uint32_t)rope->n_dims <= head_dim && head_dim <= NEAP_KLT_HEAD_DIM &&
           rope->freq_base > 0 && rope->freq_scale > 0 && rope->attn_factor > 0 &&
           (rope->ext_factor == 0 ||
            (rope->n_ctx_orig > 0 && rope->beta_fast > 0 && rope->beta_slow > 0));
}

neap_kv_rope neap_rope_of_node(const int32_t *op_params, const float *freq_factors,
                               int32_t *ret_offset) {
    float floats[6];
    memcpy(floats, op_params + 5, sizeof floats);
    *ret_offset = op_params[15];
    return (neap_kv_rope){.mode = op_params[2],
                          .n_dims = op_params[1],
                          .n_ctx_orig = op_params[4],
                          .freq_base = floats[0],
                          .freq_scale = floats[1],
                          .ext_factor = floats[2],
                          .attn_factor = floats[3],
                          .beta_fast = floats[4],
                          .beta_slow = floats[5],
                          .freq_factors = freq_factors};
}

int neap_rope_fold(const neap_kv_rope *rope, uint32_t head_dim, neap_klt_rope *ret_rope) {
    neap_klt_rope folded = {.mode = NEAP_KLT_ROPE_NONE, .magnitude = 1};
    if (rope->n_dims != 0) {
        if (!is_valid(rope, head_dim)) return -ENOTSUP;
        folded.mode = rope->mode == MODE_NORM ? NEAP_KLT_ROPE_NORM : NEAP_KLT_ROPE_NEOX;
        folded.n_dims = (uint32_t)rope->n_dims;
        folded.magnitude = rope->attn_factor;
        if (rope->ext_factor != 0) folded.magnitude *= 1 + 0.1f * logf(1 / rope->freq_scale);
    }
    for (int pair = 0; pair < rope->n_dims / 2; pair++) {
        double full = pow((double)rope->freq_base, -2.0 * pair / rope->n_dims);
        if (rope->freq_factors) full /= rope->freq_factors[pair];
        const double keep = rope->ext_factor != 0 ? keep_share(rope, pair) * rope->ext_factor : 0;
        folded.radians[pair] = (float)(full * rope->freq_scale * (1 - keep) + full * keep);
    }
    *ret_rope = folded;
    return 0;
}

void neap_rope_table(const neap_klt_rope *rope, int32_t position, float *table) {
    for (uint32_t pair = 0; pair < rope->n_dims / 2; pair++) {
        const double angle = (double)position * (double)rope->radians[pair];
        table[2 * pair] = (float)cos(angle);
        table[2 * pair + 1] = (float)sin(angle);
    }
}

/* By the angles of the table times direction, 1 or -1. */
static void turn(const neap_klt_rope *rope, const float *table, float factor, float direction,
                 float *head) {
    const uint32_t half = rope->n_dims / 2;
    const uint32_t apart = rope->mode == NEAP_KLT_ROPE_NEOX ? half : 1;
    const uint32_t step = rope->mode == NEAP_KLT_ROPE_NEOX ? 1 : 2;
    for (uint32_t pair = 0; pair < half; pair++) {
        float *x = head + pair * step;
        const float c = table[2 * pair] * factor, s = table[2 * pair + 1] * factor * direction;
        const float x0 = x[0], x1 = x[apart];
        x[0] = x0 * c - x1 * s;
        x[apart] = x1 * c + x0 * s;
    }
}

void neap_rope_turn(const neap_klt_rope *rope, const float *table, float *head) {
    turn(rope, table, rope->magnitude, 1, head);
}

void neap_rope_unturn(const neap_klt_rope *rope, const float *table, float *head) {
    turn(rope, table, 1 / rope->magnitude, -1, head);
}

void neap_rope_transpose(const neap_klt_rope *rope, const float *table, float *head) {
    turn(rope, table, rope->magnitude, -1, head);
}
