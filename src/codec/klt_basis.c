/* klt_basis.c - an open model as the kernels use it: laid out from the file's matrices once, by
 * operations that round alike everywhere, for what decodes must not hang on the machine.
 *
 * The integers of a component are rounded so that their error is small where the metric looks: from
 * a head's last column to its first, each is chosen knowing the errors of those before (Babai's
 * nearest plane). With e the errors of a component's columns, |e S|^2 = |L' e|^2, L L' = S S', and
 * the i-th element of L' e is L_ii e_i + sum over j > i of L_ji e_j: rounding to the nearest of
 * w_i - sum of L_ji / L_ii e_j makes it at most L_ii half a step. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "klt_int.h"

enum { ALIGN = 64 };

/* Of the mean diagonal of S S': errors where the metric is blind grow no more than this allows. */
#define DAMPING (1.0 / 64)

static void *take(uint8_t *base, size_t *at, size_t bytes) {
    void *taken = base ? base + *at : NULL;
    *at += NEAP_ROUND_UP(bytes, ALIGN);
    return taken;
}

/* Integers of all columns, and what one of them is worth. */
typedef struct integers {
    int8_t *codes;
    float *step;
    int32_t *sum; /* or NULL */
} integers;

typedef struct basis_parts {
    uint8_t *bits;
    float *sd, *inverse_sd, *inverse_unit;
    uint16_t *g, *f, *metric;
    integers g8, rest8;
} basis_parts;

/* Lays the parts out from base (NULL: only asks for the size); returns their size. */
static size_t lay_out(const neap_klt_block *block, const neap_klt_group *group,
                      const neap_klt_basis *basis, uint8_t *base, basis_parts *parts) {
    const size_t n = basis->n_components, columns = (size_t)basis->n_tiles * NEAP_KLT_TILE;
    size_t at = 0;
    parts->bits = take(base, &at, n);
    parts->sd = take(base, &at, n * sizeof(float));
    parts->inverse_sd = take(base, &at, n * sizeof(float));
    parts->g8.step = take(base, &at, columns * sizeof(float));
    parts->g8.sum = take(base, &at, columns * sizeof(int32_t));
    parts->g = take(base, &at, columns * basis->n_exact * sizeof *parts->g);
    parts->g8.codes = take(base, &at, columns * basis->n_quads * 4);
    parts->metric = parts->f = NULL;
    parts->rest8 = (integers){0};
    parts->inverse_unit = NULL;
    if (group->metric)
        parts->metric =
            take(base, &at, neap_klt_metric_values(block, group) * sizeof *parts->metric);
    if (group->f) {
        parts->f = take(base, &at, n * basis->n_columns * sizeof *parts->f);
        return at;
    }
    parts->rest8.codes = take(base, &at, columns * basis->n_quads * 4);
    parts->rest8.step = take(base, &at, columns * sizeof(float));
    parts->inverse_unit = take(base, &at, (size_t)4 * basis->n_quads * sizeof(float));
    return at;
}

static float largest_of(const float *table, uint32_t bits) {
    return fmaxf(fabsf(table[0]), fabsf(table[(1u << bits) - 1]));
}

/* Of one group, while it is laid out. */
typedef struct rounding {
    uint32_t n;     /* components that become integers */
    float *weights; /* [dim][n] of a head */
    float *error;   /* [dim][n] integer times step, less the weight */
    float *target;  /* [n] */
    double *root;   /* [dim][dim] L */
} rounding;

static int make_rounding(const neap_klt_block *block, const neap_klt_basis *basis, rounding *work) {
    const size_t dim =
        block->k_head_dim > block->v_head_dim ? block->k_head_dim : block->v_head_dim;
    work->n = basis->n_components - basis->n_exact;
    work->weights = malloc((dim * work->n + 1) * sizeof(float));
    work->error = malloc((dim * work->n + 1) * sizeof(float));
    work->target = malloc((work->n + 1) * sizeof(float));
    work->root = malloc(dim * dim * sizeof(double));
    return work->weights && work->error && work->target && work->root ? 0 : -ENOMEM;
}

static void free_rounding(rounding *work) {
    free(work->weights);
    free(work->error);
    free(work->target);
    free(work->root);
}

/* L of S S' and the damping. */
static void factor(const uint16_t *metric, uint32_t n, double *l) {
    double trace = 0;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j <= i; j++) {
            double sum = 0;
            for (uint32_t k = 0; k < n; k++)
                sum += (double)neap_f32_of_f16(metric[i * n + k]) *
                       (double)neap_f32_of_f16(metric[j * n + k]);
            l[i * n + j] = sum;
            trace += i == j ? sum : 0;
        }
    const double damping = trace > 0 ? trace / n * DAMPING : 1;
    for (uint32_t j = 0; j < n; j++)
        for (uint32_t i = j; i < n; i++) {
            double sum = l[i * n + j] + (i == j ? damping : 0);
            for (uint32_t k = 0; k < j; k++)
                sum -= l[i * n + k] * l[j * n + k];
            l[i * n + j] = i > j ? sum / l[j * n + j] : sqrt(sum > damping ? sum : damping);
        }
}

/* What the weights of a component that becomes integers are G times. */
static float unit_of(const neap_klt_model *model, const neap_klt_group *group, uint32_t c) {
    const uint32_t bits = group->bits[c];
    return group->sd[c] * (largest_of(model->tables[bits], bits) * (1 / 127.0f));
}

/* The head's columns of G: the f32 components as they are, the others into weights. */
static void put_exact(const neap_klt_model *model, const neap_klt_group *group,
                      const neap_klt_basis *basis, const basis_parts *parts,
                      const neap_klt_head *head, rounding *work) {
    for (uint32_t c = 0; c < basis->n_components; c++) {
        const uint16_t *row = group->g + (size_t)c * basis->n_columns + head->column;
        if (c < basis->n_exact) {
            for (uint32_t i = 0; i < head->dim; i++)
                parts->g[((size_t)(head->tile + i / NEAP_KLT_TILE) * basis->n_exact + c) *
                             NEAP_KLT_TILE +
                         i % NEAP_KLT_TILE] = row[i];
            continue;
        }
        const float unit = unit_of(model, group, c);
        for (uint32_t i = 0; i < head->dim; i++)
            work->weights[(size_t)i * work->n + c - basis->n_exact] =
                neap_f32_of_f16(row[i]) * unit;
    }
}

/* Integers of the column of a head that is column at of the tiles. */
static void round_column(const neap_klt_basis *basis, const integers *out, size_t at,
                         const float *weights, const float *target, uint32_t n, float *error) {
    const size_t tile = at / NEAP_KLT_TILE, lane = at % NEAP_KLT_TILE;
    int8_t *g8 = out->codes + (tile * basis->n_quads * NEAP_KLT_TILE + lane) * 4;
    float largest = 0;
    int32_t sum = 0;
    for (uint32_t c = 0; c < n; c++)
        largest = fmaxf(largest, fabsf(weights[c]));
    const float step = largest * (1 / 127.0f);
    for (uint32_t c = 0; c < n; c++) {
        const float code = step > 0 ? fminf(fmaxf(rintf(target[c] / step), -127), 127) : 0;
        g8[(size_t)(c / 4) * NEAP_KLT_TILE * 4 + c % 4] = (int8_t)code;
        error[c] = code * step - weights[c];
        sum += (int32_t)code;
    }
    out->step[at] = step;
    if (out->sum) out->sum[at] = sum;
}

/* The head's columns of the weights; shaped: by the metric's root. */
static void put_integers(const neap_klt_basis *basis, const neap_klt_head *head, bool shaped,
                         rounding *work, const integers *out) {
    const uint32_t n = work->n, dim = head->dim;
    for (uint32_t i = dim; i-- > 0;) {
        const float *weights = work->weights + (size_t)i * n;
        memcpy(work->target, weights, n * sizeof *weights);
        for (uint32_t j = i + 1; shaped && j < dim; j++) {
            const float share =
                (float)(work->root[(size_t)j * dim + i] / work->root[(size_t)i * dim + i]);
            const float *error = work->error + (size_t)j * n;
            for (uint32_t c = 0; c < n; c++)
                work->target[c] -= share * error[c];
        }
        round_column(basis, out, (size_t)head->tile * NEAP_KLT_TILE + i, weights, work->target, n,
                     work->error + (size_t)i * n);
    }
}

/* The head's columns of all that is made of G and S. */
static void put_head(const neap_klt_model *model, const neap_klt_group *group,
                     const neap_klt_basis *basis, const basis_parts *parts,
                     const neap_klt_head *head, const uint16_t *metric, rounding *work) {
    put_exact(model, group, basis, parts, head, work);
    if (metric) factor(metric, head->dim, work->root);
    put_integers(basis, head, metric, work, &parts->g8);
    if (group->f) return;
    for (size_t i = 0; i < (size_t)head->dim * work->n; i++)
        work->weights[i] = -work->error[i];
    put_integers(basis, head, metric, work, &parts->rest8);
}

static void count_basis(const neap_klt_block *block, const neap_klt_group *group,
                        neap_klt_basis *basis) {
    *basis = (neap_klt_basis){.n_columns = neap_klt_group_columns(block, group),
                              .f_width = basis->f_width,
                              .n_components = group->n_components};
    for (uint32_t c = 0; c < group->n_components; c++) {
        basis->n_exact += group->bits[c] >= NEAP_KLT_EXACT_BITS;
        basis->code_bytes += group->bits[c] * NEAP_KLT_TILE / 8;
    }
    basis->n_quads = (basis->n_components - basis->n_exact + 3) / 4;
    for (neap_klt_head head = {0}; neap_klt_next_head(block, group, &head);)
        basis->n_tiles = head.tile + NEAP_ROUND_UP(head.dim, NEAP_KLT_TILE) / NEAP_KLT_TILE;
}

static int make_basis(neap_klt_model *model, const neap_klt_block *block, uint32_t g) {
    neap_klt_group *group = &model->groups[g];
    neap_klt_basis *basis = &model->bases[g];
    basis_parts parts;
    count_basis(block, group, basis);
    const size_t bytes = lay_out(block, group, basis, NULL, &parts);
    uint8_t *arena = aligned_alloc(ALIGN, bytes);
    if (!arena) return -ENOMEM;
    model->arenas[g] = arena;
    model->bytes += bytes;
    memset(arena, 0, bytes);
    lay_out(block, group, basis, arena, &parts);
    memcpy(parts.bits, group->bits, basis->n_components);
    memcpy(parts.sd, group->sd, basis->n_components * sizeof *parts.sd);
    for (uint32_t c = 0; c < basis->n_components; c++)
        parts.inverse_sd[c] = 1 / parts.sd[c];
    for (uint32_t c = 0; group->f && c < basis->n_components; c++)
        for (uint32_t j = 0; j < basis->n_columns; j++)
            parts.f[(size_t)c * basis->n_columns + j] = group->f[(size_t)j * basis->f_width + c];
    for (uint32_t c = basis->n_exact; !group->f && c < basis->n_components; c++)
        parts.inverse_unit[c - basis->n_exact] = 1 / unit_of(model, group, c);
    if (group->metric)
        memcpy(parts.metric, group->metric,
               neap_klt_metric_values(block, group) * sizeof *parts.metric);
    rounding work;
    const int err = make_rounding(block, basis, &work);
    const uint16_t *metric = group->metric;
    for (neap_klt_head head = {0}; !err && neap_klt_next_head(block, group, &head);) {
        put_head(model, group, basis, &parts, &head, metric, &work);
        if (metric) metric += (size_t)head.dim * head.dim;
    }
    free_rounding(&work);
    basis->bits = group->bits = parts.bits;
    basis->sd = group->sd = parts.sd;
    basis->inverse_sd = parts.inverse_sd;
    basis->g = parts.g;
    basis->g8 = parts.g8.codes;
    basis->g8_sum = parts.g8.sum;
    basis->step = parts.g8.step;
    basis->metric = parts.metric;
    basis->f = parts.f;
    basis->rest8 = parts.rest8.codes;
    basis->rest_step = parts.rest8.step;
    basis->inverse_unit = parts.inverse_unit;
    group->f = group->g = group->metric = NULL;
    return err;
}

static void make_tables(neap_klt_model *model) {
    for (uint32_t b = 1; b <= NEAP_KLT_BITS; b++) {
        const float *table = model->tables[b];
        for (uint32_t d = 0; d < b; d++)
            for (uint32_t k = 0; k < 1u << d; k++) {
                const uint32_t i = ((2 * k + 1) << (b - d - 1)) - 1;
                model->thresholds[b][(1u << d) + k] = (table[i] + table[i + 1]) * 0.5f;
            }
        for (uint32_t i = 0; b < NEAP_KLT_EXACT_BITS && i < 1u << b; i++)
            model->table8[b][i] = (int8_t)rintf(table[i] * (127.0f / largest_of(table, b)));
    }
}

static void make_turns(neap_klt_model *model) {
    for (uint32_t r = 0; r < model->spec.n_ropes; r++) {
        const neap_klt_rope *rope = &model->ropes[r];
        neap_klt_turns *turns = &model->turns[r];
        turns->mode = rope->mode;
        turns->n_pairs = rope->n_dims / 2;
        turns->magnitude = rope->magnitude;
        for (uint32_t i = 0; i < turns->n_pairs; i++)
            turns->turns[i] = (double)rope->radians[i] * 0.15915494309189535; /* 1 / (2 pi) */
    }
}

int neap_klt_make_bases(neap_klt_model *model) {
    make_tables(model);
    make_turns(model);
    for (uint32_t i = 0; i < model->spec.n_blocks; i++) {
        const neap_klt_block *block = &model->blocks[i];
        for (uint32_t g = block->first_group; g < block->first_group + block->n_groups; g++) {
            const int err = make_basis(model, block, g);
            if (err) return err;
        }
        const size_t scratch = neap_klt_block_scratch(model, i);
        model->scratch_bytes = scratch > model->scratch_bytes ? scratch : model->scratch_bytes;
    }
    return 0;
}
