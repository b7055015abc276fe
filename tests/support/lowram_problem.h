/* lowram_problem.h - a context as LowRAM takes it to be: keys before RoPE of all layers from few
 * common directions, far from zero, values from the keys by a map that is not linear, noise on
 * both.
 */
#ifndef NEAP_TESTS_LOWRAM_PROBLEM_H
#define NEAP_TESTS_LOWRAM_PROBLEM_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "check.h"
#include "half.h"
#include "lowram_int.h"
#include "rope.h"
#include "value_int.h"

enum { LOWRAM_LAYERS = 6 };

typedef struct lowram_shape {
    uint32_t n_layers, n_heads, k_dim, v_dim, n_rows, n_directions;
    uint32_t mode, rope_dims;
    float noise;
} lowram_shape;

typedef struct lowram_problem {
    lowram_shape shape;
    neap_lowram_layer layers[LOWRAM_LAYERS];
    int32_t *positions;
    neap_klt_plane k[LOWRAM_LAYERS], v[LOWRAM_LAYERS];
    neap_lowram_context context;
} lowram_problem;

static uint64_t lowram_state;

static inline uint32_t lowram_next(uint32_t n) {
    lowram_state = lowram_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((lowram_state >> 33) % n);
}

static inline void *lowram_alloc(size_t n, size_t size) {
    void *block = calloc(n + !n, size);
    CHECK(block);
    return block;
}

static inline float *lowram_normal(size_t n) {
    float *values = lowram_alloc(n, sizeof *values);
    neap_value_normal(lowram_state++, 1, n, values);
    return values;
}

static inline uint16_t *lowram_row(const neap_klt_plane *plane, uint32_t row) {
    return (uint16_t *)((char *)plane->data + row * plane->row_stride);
}

static inline neap_klt_plane lowram_plane(uint32_t n_rows, uint32_t row_elems) {
    const size_t stride = 2 * (size_t)row_elems + 2 * lowram_next(5);
    return (neap_klt_plane){lowram_alloc(n_rows, stride), stride};
}

static inline void lowram_fill_layer(lowram_problem *p, uint32_t layer, const float *z) {
    const lowram_shape *s = &p->shape;
    const uint32_t width = s->n_heads * s->k_dim;
    float *w = lowram_normal((size_t)s->n_directions * width), *mean = lowram_normal(width),
          *mix = lowram_normal((size_t)s->k_dim * s->v_dim * s->n_heads),
          *noise = lowram_normal((size_t)s->n_rows * (width + s->n_heads * s->v_dim)),
          *key = lowram_alloc(width, sizeof *key), *at = noise;
    float table[NEAP_KLT_HEAD_DIM];
    for (uint32_t r = 0; r < s->n_rows; r++) {
        uint16_t *k = lowram_row(&p->k[layer], r), *v = lowram_row(&p->v[layer], r);
        for (uint32_t c = 0; c < width; c++) {
            key[c] = 4 * mean[c] + s->noise * *at++;
            for (uint32_t d = 0; d < s->n_directions; d++)
                key[c] += z[r * s->n_directions + d] * w[d * width + c] / (float)(1 + d);
        }
        for (uint32_t h = 0; h < s->n_heads; h++)
            for (uint32_t c = 0; c < s->v_dim; c++) {
                float sum = 0;
                for (uint32_t i = 0; i < s->k_dim; i++)
                    sum += (key[h * s->k_dim + i] - 4 * mean[h * s->k_dim + i]) *
                           mix[(h * s->k_dim + i) * s->v_dim + c];
                sum /= sqrtf((float)s->k_dim);
                v[h * s->v_dim + c] = neap_f16_of_f32(0.5f * sum + fabsf(sum) + s->noise * *at++);
            }
        neap_rope_table(&p->layers[layer].rope, p->positions[r], table);
        for (uint32_t h = 0; h < s->n_heads; h++)
            neap_rope_turn(&p->layers[layer].rope, table, key + h * s->k_dim);
        for (uint32_t c = 0; c < width; c++)
            k[c] = neap_f16_of_f32(key[c]);
    }
    free(w);
    free(mean);
    free(mix);
    free(noise);
    free(key);
}

/* Layers with a number left out; positions in order from 0. */
static inline void lowram_problem_make(lowram_problem *p, const lowram_shape *shape,
                                       uint64_t seed) {
    *p = (lowram_problem){.shape = *shape};
    lowram_state = seed;
    p->positions = lowram_alloc(shape->n_rows, sizeof *p->positions);
    for (uint32_t r = 0; r < shape->n_rows; r++)
        p->positions[r] = (int32_t)r;
    float *z = lowram_normal((size_t)shape->n_rows * shape->n_directions);
    for (uint32_t l = 0; l < shape->n_layers; l++) {
        neap_lowram_layer *layer = &p->layers[l];
        *layer = (neap_lowram_layer){.layer = l + (l > 2),
                                     .n_kv_heads = shape->n_heads,
                                     .k_head_dim = shape->k_dim,
                                     .v_head_dim = shape->v_dim,
                                     .rope = {shape->mode, shape->rope_dims, 1, {0}}};
        /* Errors stay in proportion only where all elements are magnified. */
        if (shape->rope_dims == shape->k_dim) layer->rope.magnitude = 1.25f;
        for (uint32_t i = 0; i < shape->rope_dims / 2; i++)
            layer->rope.radians[i] = powf(l == 1 ? 100.0f : 1000.0f, -(float)i / 8);
        p->k[l] = lowram_plane(shape->n_rows, shape->n_heads * shape->k_dim);
        p->v[l] = lowram_plane(shape->n_rows, shape->n_heads * shape->v_dim);
        lowram_fill_layer(p, l, z);
    }
    free(z);
    p->context = (neap_lowram_context){shape->n_rows, p->positions, p->k, p->v};
}

static inline void lowram_problem_free(lowram_problem *p) {
    for (uint32_t l = 0; l < p->shape.n_layers; l++) {
        free(p->k[l].data);
        free(p->v[l].data);
    }
    free(p->positions);
}

/* Rows of the context from first on, of a group that begins with a layer of the problem. */
static inline neap_lowram_chunk lowram_chunk_at(const lowram_problem *p, uint32_t group,
                                                uint32_t first_layer, uint32_t n_layers,
                                                uint32_t first) {
    const uint32_t left = p->shape.n_rows - first;
    neap_lowram_chunk chunk = {.group = group,
                               .n_rows = left < NEAP_LOWRAM_ROWS ? left : NEAP_LOWRAM_ROWS,
                               .positions = p->positions + first};
    for (uint32_t l = 0; l < n_layers; l++) {
        const neap_klt_plane *k = &p->k[first_layer + l], *v = &p->v[first_layer + l];
        chunk.k[l] = (neap_klt_plane){lowram_row(k, first), k->row_stride};
        chunk.v[l] = (neap_klt_plane){lowram_row(v, first), v->row_stride};
    }
    return chunk;
}

/* A chunk of the same shape, with memory of its own, filled with ones. */
static inline neap_lowram_chunk
lowram_chunk_like(const lowram_problem *p, const neap_lowram_chunk *chunk, uint32_t n_layers) {
    neap_lowram_chunk copy = *chunk;
    for (uint32_t l = 0; l < n_layers; l++) {
        copy.k[l] = lowram_plane(chunk->n_rows, p->shape.n_heads * p->shape.k_dim);
        copy.v[l] = lowram_plane(chunk->n_rows, p->shape.n_heads * p->shape.v_dim);
        memset(copy.k[l].data, 0xff, chunk->n_rows * copy.k[l].row_stride);
        memset(copy.v[l].data, 0xff, chunk->n_rows * copy.v[l].row_stride);
    }
    return copy;
}

static inline void lowram_chunk_free(neap_lowram_chunk *chunk, uint32_t n_layers) {
    for (uint32_t l = 0; l < n_layers; l++) {
        free(chunk->k[l].data);
        free(chunk->v[l].data);
    }
}

static inline bool lowram_rows_equal(const neap_klt_plane *a, const neap_klt_plane *b,
                                     uint32_t n_rows, uint32_t row_elems) {
    for (uint32_t r = 0; r < n_rows; r++)
        if (memcmp(lowram_row(a, r), lowram_row(b, r), 2 * (size_t)row_elems)) return false;
    return true;
}

/* Sum of squared differences of a row, and of its squares. */
static inline double lowram_off(const neap_klt_plane *a, const neap_klt_plane *b, uint32_t row,
                                uint32_t row_elems, double *inout_power) {
    const uint16_t *x = lowram_row(a, row), *y = lowram_row(b, row);
    double off = 0;
    for (uint32_t c = 0; c < row_elems; c++) {
        const double was = (double)neap_f32_of_f16(x[c]), is = (double)neap_f32_of_f16(y[c]);
        off += (was - is) * (was - is);
        *inout_power += was * was;
    }
    return off;
}

static inline void *lowram_scratch(const neap_lowram *fit) {
    void *scratch = aligned_alloc(64, NEAP_ROUND_UP(neap_lowram_scratch_bytes(fit), 64));
    CHECK(scratch);
    return scratch;
}
#endif
