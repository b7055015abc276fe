/* attn_problem.h - random attention problems and their answers by an f64 reference, for the tests
 * of the attention kernels. */
#ifndef NEAP_TESTS_ATTN_PROBLEM_H
#define NEAP_TESTS_ATTN_PROBLEM_H
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "attn.h"
#include "check.h"
#include "half.h"

enum { CHUNK = NEAP_ATTN_CHUNK_CELLS };

/* Where chunks come from; a test may put its own here. Of the cells' exact size: a read beyond them
 * is seen by AddressSanitizer. */
static void *(*chunk_alloc)(size_t bytes) = malloc;
static void (*chunk_free)(void *chunk) = free;

static uint64_t rng_state;

static uint32_t rnd(uint32_t n) /* 0 .. n - 1 */
{
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((rng_state >> 33) % n);
}

static float uniform(void) /* -1 .. 1 */
{
    return (float)rnd(2000001) / 1000000.0f - 1.0f;
}

/* ---- a random problem ---- */

typedef struct plane {
    void **chunks;
    double *values; /* [streams][cells][kv heads][elems], what the bytes mean */
} plane;

typedef struct problem {
    neap_attn_shape shape;
    plane k, v;
    float *q, *out, *sinks;
    uint16_t *mask;
    uint32_t n_chunks;
    double *expected; /* as out */
    size_t out_floats;
} problem;

static size_t row_bytes(neap_attn_type type, uint32_t n) {
    switch (type) {
    case NEAP_ATTN_F32:
        return 4 * (size_t)n;
    case NEAP_ATTN_Q8_0:
        return n / 32 * (size_t)34;
    case NEAP_ATTN_Q4_0:
        return n / 32 * (size_t)18;
    default:
        return 2 * (size_t)n;
    }
}

/* Writes one element (or, for the quantised types, the block that begins at it) of a row. */
static void fill_row(neap_attn_type type, char *row, uint32_t n, float scale) {
    uint8_t *bytes = (uint8_t *)row;
    for (uint32_t i = 0; i < n; i++) {
        float x = uniform() * scale;
        uint16_t half = type == NEAP_ATTN_F16 ? neap_f16_of_f32(x) : neap_bf16_of_f32(x);
        if (type == NEAP_ATTN_F32) {
            memcpy(row + 4 * (size_t)i, &x, 4);
        } else if (type == NEAP_ATTN_F16 || type == NEAP_ATTN_BF16) {
            memcpy(row + 2 * (size_t)i, &half, 2);
        }
    }
    size_t block = type == NEAP_ATTN_Q8_0 ? 34 : 18;
    for (uint32_t i = 0; i < n / 32 && (type == NEAP_ATTN_Q8_0 || type == NEAP_ATTN_Q4_0); i++) {
        uint16_t half = neap_f16_of_f32(scale / (type == NEAP_ATTN_Q8_0 ? 127.0f : 8.0f));
        memcpy(bytes + i * block, &half, 2);
        for (size_t j = 2; j < block; j++) {
            bytes[i * block + j] = (uint8_t)rnd(256);
        }
    }
}

/* What an element means, written apart from the code under test. */
static double value_at(neap_attn_type type, const char *row, uint32_t i) {
    const uint8_t *bytes = (const uint8_t *)row;
    uint16_t half;
    float wide;
    switch (type) {
    case NEAP_ATTN_F32:
        memcpy(&wide, row + 4 * (size_t)i, 4);
        return (double)wide;
    case NEAP_ATTN_F16:
        memcpy(&half, row + 2 * (size_t)i, 2);
        return (double)neap_f32_of_f16(half);
    case NEAP_ATTN_BF16:
        memcpy(&half, row + 2 * (size_t)i, 2);
        return (double)neap_f32_of_bits((uint32_t)half << 16);
    case NEAP_ATTN_Q8_0:
        bytes += i / 32 * 34;
        memcpy(&half, bytes, 2);
        return (double)neap_f32_of_f16(half) * (int8_t)bytes[2 + i % 32];
    default:
        bytes += i / 32 * 18;
        memcpy(&half, bytes, 2);
        return (double)neap_f32_of_f16(half) *
               ((i % 32 < 16 ? bytes[2 + i % 32] & 15 : bytes[2 + i % 32 - 16] >> 4) - 8);
    }
}

static void make_plane(problem *p, neap_attn_plane *spec, plane *made, neap_attn_type type,
                       uint32_t elems, float scale) {
    const neap_attn_shape *shape = &p->shape;
    size_t head = row_bytes(type, elems), cell = shape->n_kv_heads * head;
    made->chunks = calloc(shape->n_streams * p->n_chunks, sizeof *made->chunks);
    made->values = calloc((size_t)shape->n_streams * shape->n_cells * shape->n_kv_heads * elems,
                          sizeof *made->values);
    CHECK(made->chunks && made->values);
    double *value = made->values;
    for (uint32_t s = 0; s < shape->n_streams; s++) {
        for (uint32_t c = 0; c < shape->n_cells; c++) {
            void **chunk = &made->chunks[s * p->n_chunks + c / CHUNK];
            if (*chunk == NULL) {
                uint32_t rest = shape->n_cells - c;
                *chunk = chunk_alloc((rest < CHUNK ? rest : CHUNK) * cell);
                CHECK(*chunk);
            }
            for (uint32_t h = 0; h < shape->n_kv_heads; h++) {
                char *row = (char *)*chunk + c % CHUNK * cell + h * head;
                fill_row(type, row, elems, scale);
                for (uint32_t i = 0; i < elems; i++) {
                    *value++ = value_at(type, row, i);
                }
            }
        }
    }
    *spec = (neap_attn_plane){.type = type,
                              .head_elems = elems,
                              .cell_bytes = cell,
                              .head_bytes = head,
                              .chunks = (const void *const *)made->chunks};
}

static bool shows(int pattern, uint32_t token, uint32_t n_tokens, uint32_t cell, uint32_t n_cells) {
    uint32_t position = n_cells - (n_cells > n_tokens ? n_tokens : n_cells) + token;
    switch (pattern) {
    case 0: /* causal */
        return cell <= position;
    case 1: /* sliding window */
        return cell <= position && position - cell < 100;
    case 2: /* one cell alone */
        return cell == (token * 7919u + 13u) % n_cells;
    case 3: /* nothing for some tokens */
        return token % 2 == 0 && cell % 3 == 0;
    case 4: /* another sequence's chunks between */
        return cell / CHUNK % 2 == 0;
    default:
        return rnd(2) == 0;
    }
}

static void make_mask(problem *p) {
    neap_attn_shape *shape = &p->shape;
    int pattern = (int)rnd(6);
    size_t cells = shape->n_cells, tokens = shape->n_tokens;
    p->mask = malloc(shape->n_streams * tokens * cells * sizeof *p->mask);
    CHECK(p->mask);
    for (uint32_t s = 0; s < shape->n_streams; s++) {
        for (uint32_t t = 0; t < tokens; t++) {
            for (uint32_t c = 0; c < cells; c++) {
                float bias = shape->max_bias > 0.0f ? -(float)rnd(50) : 0.0f;
                p->mask[(s * tokens + t) * cells + c] =
                    shows(pattern, t, shape->n_tokens, c, shape->n_cells) ? neap_f16_of_f32(bias)
                                                                          : 0xfc00;
            }
        }
    }
    shape->mask = (neap_attn_mask){.base = (const char *)p->mask,
                                   .token_bytes = cells * 2,
                                   .stream_bytes = tokens * cells * 2,
                                   .n_heads = 1,
                                   .n_streams = shape->n_streams};
}

static void compute_expected(problem *p);

/* Sizes of heads of the types that are not quantised; a test may put others here. */
static uint32_t head_sizes[11] = {64, 64, 128, 32, 96, 256, 80, 72, 40, 7, 1};

/* Whether K and V may also be as large or small as f16 goes. */
static bool any_scale = true;

static problem make_problem(neap_attn_type k_type, neap_attn_type v_type) {
    static const uint32_t quantised[] = {64, 128, 32, 96, 256, 576};
    static const uint32_t tokens[] = {1, 1, 2, 3, 8, 17, 40, 130};
    problem p = {0};
    neap_attn_shape *shape = &p.shape;
    bool blocks = k_type >= NEAP_ATTN_Q8_0 || v_type >= NEAP_ATTN_Q8_0;
    uint32_t k_elems = blocks ? quantised[rnd(6)] : head_sizes[rnd(11)];
    uint32_t v_elems = rnd(3) > 0 ? k_elems : blocks ? quantised[rnd(6)] : head_sizes[rnd(11)];
    shape->n_tokens = tokens[rnd(8)];
    shape->n_kv_heads = 1 + rnd(3);
    shape->n_heads = shape->n_kv_heads * (1 + rnd(8));
    shape->n_streams = 1 + rnd(2);
    shape->n_cells = rnd(3) == 0 ? 1 + rnd(300) : rnd(4) == 0 ? 256 * (1 + rnd(8)) : 1 + rnd(1500);
    shape->scale = 1.0f / sqrtf((float)k_elems);
    shape->softcap = rnd(4) == 0 ? 5.0f + (float)rnd(50) : 0.0f;
    shape->max_bias = rnd(4) == 0 ? 8.0f : 0.0f;
    p.n_chunks = (shape->n_cells + CHUNK - 1) / CHUNK;
    static const float scales[] = {1.0f, 3.0f, 60000.0f, 1e-7f, 0.0f};
    make_plane(&p, &shape->k, &p.k, k_type, k_elems, scales[any_scale && rnd(3) == 0 ? rnd(5) : 1]);
    make_plane(&p, &shape->v, &p.v, v_type, v_elems, scales[any_scale && rnd(3) == 0 ? rnd(5) : 0]);
    size_t rows = (size_t)shape->n_streams * shape->n_tokens * shape->n_heads;
    p.q = malloc(rows * k_elems * sizeof *p.q);
    p.out_floats = rows * v_elems;
    p.out = malloc(p.out_floats * sizeof *p.out);
    p.expected = calloc(p.out_floats, sizeof *p.expected);
    p.sinks = malloc(shape->n_heads * sizeof *p.sinks);
    CHECK(p.q && p.out && p.expected && p.sinks);
    float size = rnd(4) == 0 ? 10.0f : 2.0f;
    for (size_t i = 0; i < rows * k_elems; i++) {
        p.q[i] = uniform() * size;
    }
    for (uint32_t h = 0; h < shape->n_heads; h++) {
        p.sinks[h] = uniform() * 4.0f;
    }
    shape->sinks = rnd(4) == 0 ? p.sinks : NULL;
    shape->q =
        (neap_attn_rows){.base = (char *)p.q,
                         .token_bytes = (size_t)shape->n_heads * k_elems * 4,
                         .head_bytes = (size_t)k_elems * 4,
                         .stream_bytes = (size_t)shape->n_tokens * shape->n_heads * k_elems * 4};
    shape->out =
        (neap_attn_rows){.base = (char *)p.out,
                         .token_bytes = (size_t)shape->n_heads * v_elems * 4,
                         .head_bytes = (size_t)v_elems * 4,
                         .stream_bytes = (size_t)shape->n_tokens * shape->n_heads * v_elems * 4};
    if (rnd(6) > 0) {
        make_mask(&p);
    }
    compute_expected(&p);
    return p;
}

static void free_problem(problem *p) {
    for (uint32_t i = 0; i < p->shape.n_streams * p->n_chunks; i++) {
        chunk_free(p->k.chunks[i]);
        chunk_free(p->v.chunks[i]);
    }
    free(p->k.chunks);
    free(p->v.chunks);
    free(p->k.values);
    free(p->v.values);
    free(p->q);
    free(p->out);
    free(p->sinks);
    free(p->mask);
    free(p->expected);
}

/* ---- the reference: two passes, in f64 ---- */

static const uint16_t *mask_row(const problem *p, uint32_t s, uint32_t t) {
    return p->mask == NULL ? NULL
                           : p->mask + ((size_t)s * p->shape.n_tokens + t) * p->shape.n_cells;
}

static double slope_of(const neap_attn_shape *shape, uint32_t head) {
    if (shape->max_bias <= 0.0f) {
        return 1.0;
    }
    double n = exp2(floor(log2((double)shape->n_heads)));
    double m0 = exp2(-(double)shape->max_bias / n), m1 = exp2(-(double)shape->max_bias / 2.0 / n);
    return head < n ? pow(m0, head + 1) : pow(m1, 2 * (head - n) + 1);
}

static void expected_row(problem *p, uint32_t s, uint32_t t, uint32_t h, double *scores) {
    const neap_attn_shape *shape = &p->shape;
    uint32_t ke = shape->k.head_elems, ve = shape->v.head_elems;
    uint32_t kv = h / (shape->n_heads / shape->n_kv_heads);
    size_t row = ((size_t)s * shape->n_tokens + t) * shape->n_heads + h;
    const uint16_t *mask = mask_row(p, s, t);
    double max = shape->sinks != NULL ? (double)shape->sinks[h] : -INFINITY, sum = 0.0;
    for (uint32_t c = 0; c < shape->n_cells; c++) {
        const double *k =
            p->k.values + (((size_t)s * shape->n_cells + c) * shape->n_kv_heads + kv) * ke;
        double x = 0.0;
        for (uint32_t i = 0; i < ke; i++) {
            x += (double)p->q[row * ke + i] * k[i];
        }
        x *= (double)shape->scale;
        if (shape->softcap != 0.0f) {
            x = (double)shape->softcap * tanh(x / (double)shape->softcap);
        }
        double bias = mask == NULL ? 0.0 : (double)neap_f32_of_f16(mask[c]) * slope_of(shape, h);
        scores[c] = bias == -INFINITY ? -INFINITY : x + bias;
        max = scores[c] > max ? scores[c] : max;
    }
    double *out = p->expected + row * ve;
    for (uint32_t c = 0; c < shape->n_cells; c++) {
        const double *v =
            p->v.values + (((size_t)s * shape->n_cells + c) * shape->n_kv_heads + kv) * ve;
        double weight = scores[c] == -INFINITY ? 0.0 : exp(scores[c] - max);
        sum += weight;
        for (uint32_t i = 0; i < ve; i++) {
            out[i] += weight * v[i];
        }
    }
    sum += shape->sinks != NULL ? exp((double)shape->sinks[h] - max) : 0.0;
    for (uint32_t i = 0; i < ve; i++) {
        out[i] = sum == 0.0 ? 0.0 : out[i] / sum;
    }
}

static void compute_expected(problem *p) {
    double *scores = malloc(p->shape.n_cells * sizeof *scores);
    CHECK(scores);
    for (uint32_t s = 0; s < p->shape.n_streams; s++) {
        for (uint32_t t = 0; t < p->shape.n_tokens; t++) {
            for (uint32_t h = 0; h < p->shape.n_heads; h++) {
                expected_row(p, s, t, h, scores);
            }
        }
    }
    free(scores);
}

static double nmse(const problem *p) {
    double error = 0.0, power = 0.0;
    for (size_t i = 0; i < p->out_floats; i++) {
        double d = (double)p->out[i] - p->expected[i];
        error += d * d;
        power += p->expected[i] * p->expected[i];
    }
    return error == 0.0 ? 0.0 : error / power;
}

static bool chunk_seen(const problem *p, uint32_t stream, uint32_t chunk) {
    for (uint32_t t = 0; t < p->shape.n_tokens; t++) {
        const uint16_t *mask = mask_row(p, stream, t);
        for (uint32_t c = chunk * CHUNK; c < p->shape.n_cells && c < (chunk + 1) * CHUNK; c++) {
            if (mask == NULL || mask[c] != 0xfc00) {
                return true;
            }
        }
    }
    return false;
}
#endif
