/* klt_problem.h - a klt model and caches that it fits, without a GGUF: orthogonal bases (products
 * of reflections), deviations that fall geometrically, a metric of its own for each head. Columns
 * are x = mean + S^-1 B (sd z), so that y = sd z and the error of a row in the metric is that of
 * its components. Only +, -, *, / and sqrt: alike on every machine. */
#ifndef NEAP_TESTS_KLT_PROBLEM_H
#define NEAP_TESTS_KLT_PROBLEM_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "check.h"
#include "half.h"
#include "klt.h"
#include "klt_int.h"

enum { KLT_DIGEST = 0x1234, KLT_MOST_BLOCKS = 2 };

typedef struct klt_shape {
    uint32_t n_blocks, n_layers, n_heads, heads_a_group, k_dim, v_dim;
    uint32_t mode, rope_dims;
    float magnitude;
    double bits;  /* a value, on average */
    double decay; /* of the deviations, first to last */
    uint32_t permille;
    bool metric, no_f; /* no_f: F is not stored */
} klt_shape;

/* Two layers that are coded alone. */
static const klt_shape klt_two_layers = {.n_blocks = 2,
                                         .n_layers = 1,
                                         .n_heads = 2,
                                         .heads_a_group = 2,
                                         .k_dim = 64,
                                         .v_dim = 64,
                                         .mode = NEAP_KLT_ROPE_NEOX,
                                         .rope_dims = 64,
                                         .magnitude = 1,
                                         .bits = 2,
                                         .decay = 1e-3,
                                         .permille = 8,
                                         .metric = true};

typedef struct klt_problem {
    klt_shape shape;
    neap_klt_spec spec;
    neap_klt_rope rope;
    neap_klt_block blocks[KLT_MOST_BLOCKS];
    neap_klt_group *groups;
    double **basis; /* [n_groups] S^-1 B, [columns][columns] */
    double **sd;    /* [n_groups][columns] */
    uint8_t **bits; /* [n_groups][columns] */
    uint32_t *columns;
} klt_problem;

static uint64_t klt_state;

static inline uint32_t klt_next(uint32_t n) {
    klt_state = klt_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((klt_state >> 33) % n);
}

/* Near to normal, unit variance. */
static inline double klt_gauss(void) {
    double sum = 0;
    for (int i = 0; i < 12; i++)
        sum += klt_next(1 << 20) / (double)(1 << 20);
    return sum - 6;
}

static inline void *klt_alloc(size_t n, size_t size) {
    void *block = calloc(n + !n, size);
    CHECK(block);
    return block;
}

/* a[n][n] = a times a random reflection, from the right. */
static inline void klt_reflect(double *a, uint32_t n) {
    double *v = klt_alloc(n, sizeof *v), norm = 0;
    for (uint32_t i = 0; i < n; i++) {
        v[i] = klt_gauss();
        norm += v[i] * v[i];
    }
    for (uint32_t i = 0; i < n; i++) {
        double dot = 0;
        for (uint32_t j = 0; j < n; j++)
            dot += a[(size_t)i * n + j] * v[j];
        for (uint32_t j = 0; j < n; j++)
            a[(size_t)i * n + j] -= 2 * dot / norm * v[j];
    }
    free(v);
}

static inline double *klt_orthogonal(uint32_t n) {
    double *a = klt_alloc((size_t)n * n, sizeof *a);
    for (uint32_t i = 0; i < n; i++)
        a[(size_t)i * n + i] = 1;
    for (int i = 0; i < 3; i++)
        klt_reflect(a, n);
    return a;
}

/* S = R diag(e) R', as f16 and, exactly that, in s; inverse by the same R. */
static inline void klt_make_metric(uint32_t dim, double *s, double *inverse) {
    double *r = klt_orthogonal(dim);
    for (uint32_t i = 0; i < dim; i++)
        for (uint32_t j = 0; j < dim; j++) {
            s[i * dim + j] = inverse[i * dim + j] = 0;
            for (uint32_t k = 0; k < dim; k++) {
                const double e = k % 4 == 0 ? 1 : k % 4 == 1 ? 0.25 : 0.03125;
                s[i * dim + j] += r[i * dim + k] * e * r[j * dim + k];
                inverse[i * dim + j] += r[i * dim + k] / e * r[j * dim + k];
            }
        }
    free(r);
}

static inline void klt_fill_group(klt_problem *p, const neap_klt_block *block, uint32_t g) {
    neap_klt_group *group = &p->groups[g];
    const uint32_t n = neap_klt_group_columns(block, group);
    const klt_shape *shape = &p->shape;
    double *b = klt_orthogonal(n), *f = klt_alloc((size_t)n * n, sizeof *f);
    p->columns[g] = n;
    p->basis[g] = klt_alloc((size_t)n * n, sizeof(double));
    uint16_t *metric = klt_alloc((size_t)n * NEAP_KLT_HEAD_DIM, sizeof *metric), *at = metric;
    for (neap_klt_head head = {0}; neap_klt_next_head(block, group, &head);) {
        const uint32_t dim = head.dim;
        double *s = klt_alloc((size_t)dim * dim, sizeof *s),
               *inverse = klt_alloc((size_t)dim * dim, sizeof *s);
        if (shape->metric)
            klt_make_metric(dim, s, inverse);
        else
            for (uint32_t i = 0; i < dim; i++)
                s[i * dim + i] = inverse[i * dim + i] = 1;
        for (uint32_t i = 0; i < dim; i++)
            for (uint32_t k = 0; k < dim; k++) {
                const double *row = b + (size_t)(head.column + k) * n;
                const size_t out = (size_t)(head.column + i) * n;
                for (uint32_t c = 0; c < n && (shape->metric || i == k); c++) {
                    f[out + c] += s[i * dim + k] * row[c];
                    p->basis[g][out + c] += inverse[i * dim + k] * row[c];
                }
            }
        for (uint32_t i = 0; i < dim * dim; i++)
            *at++ = neap_f16_of_f32((float)s[i]);
        free(s);
        free(inverse);
    }
    group->metric = shape->metric ? metric : NULL;
    if (!shape->metric) free(metric);
    p->sd[g] = klt_alloc(n, sizeof(double));
    p->bits[g] = klt_alloc(n, 1);
    float *sd = klt_alloc(n, sizeof *sd);
    const double root = sqrt(sqrt(sqrt(sqrt(shape->decay)))); /* 16 steps from first to last */
    for (uint32_t c = 0, done = 0; c < n; c++) {
        p->sd[g][c] = c ? p->sd[g][c - 1] : 8;
        for (; done < 16 * c / n; done++)
            p->sd[g][c] *= root;
        sd[c] = (float)p->sd[g][c];
    }
    const neap_klt_spectrum spectrum = {n, sd, p->bits[g]};
    neap_klt_allocate(&spectrum, 1, (uint64_t)(shape->bits * n), NULL);
    uint32_t kept = 0;
    while (kept < n && p->bits[g][kept])
        kept++;
    CHECK(kept > 0);
    uint16_t *f16 = klt_alloc((size_t)n * kept, 2), *g16 = klt_alloc((size_t)n * kept, 2);
    for (uint32_t j = 0; j < n; j++)
        for (uint32_t c = 0; c < kept; c++) {
            f16[(size_t)j * kept + c] = neap_f16_of_f32((float)f[(size_t)j * n + c]);
            g16[(size_t)c * n + j] = neap_f16_of_f32((float)p->basis[g][(size_t)j * n + c]);
        }
    group->n_components = kept;
    group->bits = p->bits[g];
    group->sd = sd;
    group->f = shape->no_f ? NULL : f16;
    if (shape->no_f) free(f16);
    group->g = g16;
    free(b);
    free(f);
}

static inline void klt_problem_make(klt_problem *p, const klt_shape *shape, uint64_t seed) {
    klt_state = seed;
    *p = (klt_problem){.shape = *shape};
    const uint32_t a_block = (shape->n_heads + shape->heads_a_group - 1) / shape->heads_a_group,
                   n_groups = a_block * shape->n_blocks;
    p->rope = (neap_klt_rope){shape->mode, shape->rope_dims, shape->magnitude, {0}};
    float radians = 1;
    for (uint32_t i = 0; i < shape->rope_dims / 2; i++, radians *= 0.75f)
        p->rope.radians[i] = radians;
    p->groups = klt_alloc(n_groups, sizeof *p->groups);
    p->basis = klt_alloc(n_groups, sizeof *p->basis);
    p->sd = klt_alloc(n_groups, sizeof *p->sd);
    p->bits = klt_alloc(n_groups, sizeof *p->bits);
    p->columns = klt_alloc(n_groups, sizeof *p->columns);
    for (uint32_t i = 0; i < shape->n_blocks; i++) {
        neap_klt_block *block = &p->blocks[i];
        *block = (neap_klt_block){.n_layers = shape->n_layers,
                                  .n_kv_heads = shape->n_heads,
                                  .k_head_dim = shape->k_dim,
                                  .v_head_dim = shape->v_dim,
                                  .first_group = i * a_block,
                                  .n_groups = a_block};
        for (uint32_t l = 0; l < shape->n_layers; l++)
            block->layers[l] = 3 + i * 7 + l;
        for (uint32_t g = 0; g < a_block; g++) {
            neap_klt_group *group = &p->groups[i * a_block + g];
            group->unit = 1;
            group->first_head = g * shape->heads_a_group;
            group->n_heads = shape->n_heads - group->first_head;
            if (group->n_heads > shape->heads_a_group) group->n_heads = shape->heads_a_group;
            klt_fill_group(p, block, i * a_block + g);
        }
    }
    p->spec = (neap_klt_spec){.name = "synthetic.gguf",
                              .digest = KLT_DIGEST,
                              .profile = NEAP_KLT_FOUR_LAYERS,
                              .outlier_permille = shape->permille,
                              .ratio = 1,
                              .n_ropes = 1,
                              .n_blocks = shape->n_blocks,
                              .n_groups = n_groups,
                              .ropes = &p->rope,
                              .blocks = p->blocks,
                              .groups = p->groups};
    for (uint32_t b = 1; b <= NEAP_KLT_BITS; b++)
        p->spec.tables[b] = neap_klt_default_table(b);
}

static inline void klt_problem_free(klt_problem *p) {
    for (uint32_t g = 0; g < p->spec.n_groups; g++) {
        free((void *)(uintptr_t)p->groups[g].f);
        free((void *)(uintptr_t)p->groups[g].g);
        free((void *)(uintptr_t)p->groups[g].sd);
        free((void *)(uintptr_t)p->groups[g].metric);
        free(p->bits[g]);
        free(p->sd[g]);
        free(p->basis[g]);
    }
    free(p->groups);
    free(p->basis);
    free(p->sd);
    free(p->bits);
    free(p->columns);
}

/* The model as it is read back from its bytes. */
static inline neap_klt_model *klt_model_of(const neap_klt_spec *spec) {
    neap_klt_model *model = NULL;
    uint8_t *bytes = NULL;
    size_t len = 0;
    CHECK(neap_klt_model_build(spec, "test", &bytes, &len) == 0);
    CHECK(neap_klt_model_parse(bytes, len, spec->digest, "test", &model) == 0);
    free(bytes);
    return model;
}

static inline size_t klt_row_bytes(const klt_shape *shape, bool is_v) {
    return (size_t)2 * shape->n_heads * (is_v ? shape->v_dim : shape->k_dim);
}

/* Planes of exactly the bytes they need; stride bytes more than the row. */
static inline void klt_chunk_make(const klt_problem *p, uint32_t block, uint32_t n_rows,
                                  uint32_t gap, neap_klt_chunk *chunk) {
    *chunk = (neap_klt_chunk){.block = block, .n_rows = n_rows};
    int32_t *positions = klt_alloc(n_rows, sizeof *positions);
    for (uint32_t r = 0; r < n_rows; r++)
        positions[r] = 100 + (int32_t)r;
    chunk->positions = positions;
    for (uint32_t i = 0; i < 2 * p->shape.n_layers; i++) {
        const bool is_v = i >= p->shape.n_layers;
        const size_t row = klt_row_bytes(&p->shape, is_v), stride = row + gap;
        neap_klt_plane *plane = is_v ? &chunk->v[i - p->shape.n_layers] : &chunk->k[i];
        *plane = (neap_klt_plane){klt_alloc((n_rows - 1) * stride + row, 1), stride};
    }
}

static inline void klt_chunk_free(const klt_problem *p, neap_klt_chunk *chunk) {
    free((void *)(uintptr_t)chunk->positions);
    for (uint32_t l = 0; l < p->shape.n_layers; l++) {
        free(chunk->k[l].data);
        free(chunk->v[l].data);
    }
}

static inline uint16_t *klt_head_at(const neap_klt_chunk *chunk, const neap_klt_head *head,
                                    uint32_t row) {
    const neap_klt_plane *plane = head->is_v ? &chunk->v[head->layer] : &chunk->k[head->layer];
    return (uint16_t *)(void *)((uint8_t *)plane->data + row * plane->row_stride) +
           (size_t)head->head * head->dim;
}

/* Turns a K head by its position (back: the reverse), in double. */
static inline void klt_turn(const klt_problem *p, int32_t position, bool back, double *x) {
    const uint32_t n = p->rope.n_dims / 2;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t a = p->rope.mode == NEAP_KLT_ROPE_NEOX ? i : 2 * i,
                       b = p->rope.mode == NEAP_KLT_ROPE_NEOX ? i + n : 2 * i + 1;
        const double angle = (back ? -1.0 : 1.0) * position * (double)p->rope.radians[i],
                     m = back ? 1 / (double)p->rope.magnitude : (double)p->rope.magnitude,
                     xa = x[a], xb = x[b];
        x[a] = m * (xa * cos(angle) - xb * sin(angle));
        x[b] = m * (xb * cos(angle) + xa * sin(angle));
    }
}

/* Rows of the distribution that the model was made for; where wild[group of the block][row] is not
 * 0, so many times as far from the mean. wild may be NULL. */
static inline void klt_chunk_fill(const klt_problem *p, neap_klt_chunk *chunk,
                                  const uint8_t (*wild)[NEAP_KLT_ROWS]) {
    const neap_klt_block *block = &p->blocks[chunk->block];
    for (uint32_t i = 0; i < block->n_groups; i++) {
        const uint32_t g = block->first_group + i, n = p->columns[g];
        double *z = klt_alloc(n, sizeof *z);
        for (uint32_t r = 0; r < chunk->n_rows; r++) {
            const double scale = wild && wild[i][r] ? wild[i][r] : 1;
            for (uint32_t c = 0; c < n; c++)
                z[c] = scale * p->sd[g][c] * klt_gauss();
            for (neap_klt_head head = {0}; neap_klt_next_head(block, &p->groups[g], &head);) {
                double x[NEAP_KLT_HEAD_DIM];
                for (uint32_t k = 0; k < head.dim; k++) {
                    const double *row = p->basis[g] + (size_t)(head.column + k) * n;
                    x[k] = (double)(head.column + k) / n * 20 - 10;
                    for (uint32_t c = 0; c < n; c++)
                        x[k] += row[c] * z[c];
                }
                if (!head.is_v) klt_turn(p, chunk->positions[r], false, x);
                for (uint32_t k = 0; k < head.dim; k++)
                    klt_head_at(chunk, &head, r)[k] = neap_f16_of_f32((float)x[k]);
            }
        }
        free(z);
    }
}

static inline bool klt_chunk_equal(const klt_problem *p, const neap_klt_chunk *a,
                                   const neap_klt_chunk *b) {
    for (uint32_t l = 0; l < p->shape.n_layers; l++)
        if (memcmp(a->k[l].data, b->k[l].data,
                   (a->n_rows - 1) * a->k[l].row_stride + klt_row_bytes(&p->shape, 0)) ||
            memcmp(a->v[l].data, b->v[l].data,
                   (a->n_rows - 1) * a->v[l].row_stride + klt_row_bytes(&p->shape, 1)))
            return false;
    return true;
}

static inline void *klt_scratch(const neap_klt_model *model) {
    void *scratch = aligned_alloc(64, NEAP_ROUND_UP(neap_klt_scratch_bytes(model), 64));
    CHECK(scratch);
    return scratch;
}

/* |(x - decoded) S|^2 of a group's row, in double. *ret_floor: what f16 roundings may make of it.
 */
static inline double klt_row_error(const klt_problem *p, const neap_klt_chunk *was,
                                   const neap_klt_chunk *is, uint32_t g, uint32_t row,
                                   double *ret_floor) {
    const neap_klt_block *block = &p->blocks[was->block];
    const neap_klt_group *group = &p->groups[g];
    const uint16_t *metric = group->metric;
    double error = 0;
    *ret_floor = 0;
    for (neap_klt_head head = {0}; neap_klt_next_head(block, group, &head);) {
        double x[NEAP_KLT_HEAD_DIM], y[NEAP_KLT_HEAD_DIM];
        for (uint32_t i = 0; i < head.dim; i++) {
            x[i] = (double)neap_f32_of_f16(klt_head_at(was, &head, row)[i]);
            y[i] = (double)neap_f32_of_f16(klt_head_at(is, &head, row)[i]);
            *ret_floor += x[i] * x[i] * 0x1p-20 * (metric ? 0.5 : 1);
        }
        if (!head.is_v) {
            klt_turn(p, was->positions[row], true, x);
            klt_turn(p, is->positions[row], true, y);
        }
        for (uint32_t k = 0; k < head.dim; k++) {
            double z = x[k] - y[k];
            if (metric) {
                z = 0;
                for (uint32_t i = 0; i < head.dim; i++)
                    z += (x[i] - y[i]) * (double)neap_f32_of_f16(metric[i * head.dim + k]);
            }
            error += z * z;
        }
        if (metric) metric += (size_t)head.dim * head.dim;
    }
    return error;
}

#endif
