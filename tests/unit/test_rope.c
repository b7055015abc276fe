/* test_rope.c - RoPE as ggml turns heads is undone and done, for every kind of parameters. */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "check.h"
#include "rope.h"

enum { HEAD = 64 };

/* What ggml's CPU backend does, step by step in f32; a plain copy of its formulas. */
static void turn(const neap_kv_rope *r, int32_t position, float *head) {
    const float step = powf(r->freq_base, -2.0f / (float)r->n_dims);
    const float turns[2] = {r->beta_fast, r->beta_slow};
    float ends[2] = {0, 0}, angle = (float)position;
    for (int i = 0; i < 2 && r->ext_factor != 0; i++)
        ends[i] = (float)r->n_dims *
                  logf((float)r->n_ctx_orig / (turns[i] * 2 * 3.14159265358979f)) /
                  (2 * logf(r->freq_base));
    const float low = fmaxf(0, floorf(ends[0])), high = fminf((float)r->n_dims - 1, ceilf(ends[1]));
    for (int pair = 0; pair < r->n_dims / 2; pair++, angle *= step) {
        const float full = angle / (r->freq_factors ? r->freq_factors[pair] : 1);
        float theta = r->freq_scale * full, size = r->attn_factor;
        if (r->ext_factor != 0) {
            const float y = ((float)pair - low) / fmaxf(0.001f, high - low);
            const float mix = (1 - fminf(1, fmaxf(0, y))) * r->ext_factor;
            theta = theta * (1 - mix) + full * mix;
            size *= 1 + 0.1f * logf(1 / r->freq_scale);
        }
        float *a = head + (r->mode ? pair : 2 * pair), *b = a + (r->mode ? r->n_dims / 2 : 1);
        const float c = cosf(theta) * size, s = sinf(theta) * size, x = *a, y = *b;
        *a = x * c - y * s;
        *b = x * s + y * c;
    }
}

static float inner(const float *a, const float *b) {
    float sum = 0;
    for (int i = 0; i < HEAD; i++)
        sum += a[i] * b[i];
    return sum;
}

static void undo(const neap_kv_rope *r, int32_t position, float limit) {
    float head[HEAD], was[HEAD], query[HEAD], table[HEAD];
    neap_klt_rope folded;
    CHECK(neap_rope_fold(r, HEAD, &folded) == 0);
    for (int i = 0; i < HEAD; i++) {
        was[i] = head[i] = sinf((float)(3 * i + position % 7));
        query[i] = cosf((float)(5 * i));
    }
    if (r->n_dims) turn(r, position, head);
    const float score = inner(query, head);
    neap_rope_table(&folded, position, table);
    neap_rope_unturn(&folded, table, head);
    for (int i = 0; i < HEAD; i++)
        CHECK(fabsf(head[i] - was[i]) < limit);
    if (r->n_dims) turn(r, position, was);
    neap_rope_turn(&folded, table, head);
    for (int i = 0; i < HEAD; i++)
        CHECK(fabsf(head[i] - was[i]) < 2 * folded.magnitude * limit);
    neap_rope_unturn(&folded, table, was);
    neap_rope_transpose(&folded, table, query);
    CHECK(fabsf(inner(query, was) - score) < 8 * limit);
}

/* Words of a node that ggml wrote: ggml_rope_ext's arguments, in its order. */
static void test_node(void) {
    const float floats[] = {500000, 0.25f, 1, 0.7f, 32, 1}, factors[HEAD / 2] = {0};
    int32_t params[16] = {0, 48, 2, 0, 4096}, offset = -1;
    memcpy(params + 5, floats, sizeof floats);
    const neap_kv_rope r = neap_rope_of_node(params, factors, &offset);
    CHECK(r.n_dims == 48 && r.mode == 2 && r.n_ctx_orig == 4096 && r.freq_base == 500000);
    CHECK(r.freq_scale == 0.25f && r.ext_factor == 1 && r.attn_factor == 0.7f);
    CHECK(r.beta_fast == 32 && r.beta_slow == 1 && r.freq_factors == factors && offset == 0);
    params[15] = 8;
    CHECK(neap_rope_of_node(params, NULL, &offset).freq_factors == NULL && offset == 8);
}

int main(void) {
    float factors[HEAD / 2];
    for (int i = 0; i < HEAD / 2; i++)
        factors[i] = 1 + (float)i / 4;
    const neap_kv_rope plain = {
        .n_dims = HEAD, .freq_base = 10000, .freq_scale = 1, .attn_factor = 1};
    const int32_t modes[] = {0, 2, 8, 40};
    for (int m = 0; m < 4; m++) {
        neap_kv_rope r = plain;
        r.mode = modes[m];
        undo(&r, 0, 1e-6f);
        undo(&r, 1, 1e-5f);
        undo(&r, 4095, 5e-3f); /* ggml's f32 angles themselves */
        r.n_dims = 24;
        undo(&r, 1000, 2e-3f);
        r.n_dims = HEAD;
        r.freq_factors = factors;
        r.freq_base = 500000;
        undo(&r, 1000, 2e-3f);
        r.freq_factors = NULL;
        r.freq_scale = 0.25f;
        undo(&r, 1000, 2e-3f);
        r.ext_factor = 1;
        r.n_ctx_orig = 4096;
        r.beta_fast = 32;
        r.beta_slow = 1;
        undo(&r, 1000, 2e-3f);
        r.attn_factor = 0.7f;
        undo(&r, 1000, 2e-3f);
    }
    neap_kv_rope none = {0};
    undo(&none, 77, 1e-6f);

    neap_klt_rope folded = {.magnitude = -1};
    neap_kv_rope bad = plain;
    bad.mode = 24; /* of images */
    CHECK(neap_rope_fold(&bad, HEAD, &folded) == -ENOTSUP && folded.magnitude == -1);
    bad = plain;
    bad.n_dims = HEAD + 2;
    CHECK(neap_rope_fold(&bad, HEAD, &folded) == -ENOTSUP);
    bad.n_dims = 7;
    CHECK(neap_rope_fold(&bad, HEAD, &folded) == -ENOTSUP);
    test_node();
    return 0;
}
