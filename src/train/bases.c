/* bases.c - the bases of a profile from what the trainer has gathered, and the model file.
 *
 * A block's S is scaled so that its mean square is 1: its numbers then lie well inside f16. Bits
 * are allocated with the scale taken out again, for there errors of all blocks must mean the same.
 *
 * The file holds F of single heads, whose encoding is then faster, and S of wider groups, with
 * which G does for F: there F would be half the file and of the memory of an open one, and many
 * components are not kept, whose part of a row's error only S tells. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "basis.h"
#include "half.h"
#include "neap.h"
#include "train_int.h"

#define METRIC_FLOOR 1e-4
#define TRIM 0.01f
/* Rows that are coded apart, in a thousand. Mean KL (as in importance.c) at 8, 12, 18: 0.0038,
 * 0.0021, 0.0015 for a head at 4 times; at 8 and 12: 0.0131 and 0.0123 for a layer at 8 times. */
static const uint32_t outlier_permille[] = {
    [NEAP_KLT_PER_HEAD] = 18, [NEAP_KLT_ONE_LAYER] = 12, [NEAP_KLT_FOUR_LAYERS] = 8};
#define SD_MIN 1e-12f /* of the file */

typedef struct group {
    const neap_train_set *set;
    uint32_t first, n_layers;     /* of the set's layers */
    uint32_t first_head, n_heads; /* of the set's heads */
    uint32_t n;                   /* columns */
    bool is_head;                 /* one head of one layer */
    double scale;                 /* of S */
    uint16_t *ft, *g;             /* [n][n] rows are components, descending */
                                  /* ft: NULL unless is_head */
    uint16_t *metric;             /* NULL if is_head */
    size_t n_metric;
    float *sd;
} group;

struct neap_bases {
    uint32_t profile, n_groups, n_blocks, n_ropes;
    group *groups;
    neap_klt_block *blocks;
    neap_klt_rope ropes[NEAP_KLT_ROPES];
};

void neap_bases_free(neap_bases *bases) {
    if (!bases) return;
    for (uint32_t i = 0; i < bases->n_groups; i++) {
        free(bases->groups[i].ft);
        free(bases->groups[i].g);
        free(bases->groups[i].metric);
        free(bases->groups[i].sd);
    }
    free(bases->groups);
    free(bases->blocks);
    free(bases);
}

/* ---- which groups there are ---- */

static int rope_of(neap_bases *bases, const neap_klt_rope *rope, uint32_t *ret_at) {
    uint32_t at = 0;
    while (at < bases->n_ropes && memcmp(&bases->ropes[at], rope, sizeof *rope) != 0)
        at++;
    if (at == NEAP_KLT_ROPES) return -ENOTSUP;
    if (at == bases->n_ropes) bases->ropes[bases->n_ropes++] = *rope;
    *ret_at = at;
    return 0;
}

static int add_group(neap_bases *bases, const neap_trainer *trainer, group wanted) {
    const neap_train_layer *l = &trainer->layers[wanted.set->first + wanted.first];
    neap_klt_block *last = bases->n_blocks ? &bases->blocks[bases->n_blocks - 1] : NULL;
    wanted.is_head = bases->profile == NEAP_KLT_PER_HEAD;
    wanted.n = neap_train_columns(l, wanted.n_layers, wanted.n_heads);
    if (!last || last->layers[0] != l->layer) {
        last = &bases->blocks[bases->n_blocks++];
        *last = (neap_klt_block){.n_layers = wanted.n_layers,
                                 .n_kv_heads = l->shape.n_kv_heads,
                                 .k_head_dim = l->shape.head_k,
                                 .v_head_dim = l->shape.head_v,
                                 .first_group = bases->n_groups};
        for (uint32_t i = 0; i < wanted.n_layers; i++) {
            last->layers[i] = l[i].layer;
            const int err = rope_of(bases, &l[i].rope, &last->ropes[i]);
            if (err) return err;
        }
    }
    last->n_groups++;
    bases->groups[bases->n_groups++] = wanted;
    return 0;
}

/* Parts of a set: all of it, each layer, or each head of each layer. */
static int split(neap_bases *bases, const neap_trainer *trainer, const neap_train_set *set) {
    const uint32_t layers = bases->profile == NEAP_KLT_FOUR_LAYERS ? set->n_layers : 1;
    const uint32_t heads = bases->profile == NEAP_KLT_PER_HEAD ? 1 : set->n_heads;
    int err = 0;
    for (uint32_t l = 0; l < set->n_layers; l += layers)
        for (uint32_t h = 0; h < set->n_heads && !err; h += heads)
            err = add_group(
                bases, trainer,
                (group){
                    .set = set, .first = l, .n_layers = layers, .first_head = h, .n_heads = heads});
    return err;
}

/* ---- one group ---- */

/* Where each column of the group lies in its set. */
static void list_columns(const neap_trainer *trainer, const group *wanted, uint32_t *columns) {
    const neap_train_set *set = wanted->set;
    const neap_train_layer *l = &trainer->layers[set->first];
    uint32_t n = 0, plane_at = 0;
    for (uint32_t plane = 0; plane < 2; plane++) {
        const uint32_t width = plane ? l->shape.head_v : l->shape.head_k;
        for (uint32_t i = wanted->first; i < wanted->first + wanted->n_layers; i++)
            for (uint32_t c = 0; c < wanted->n_heads * width; c++)
                columns[n++] = plane_at + (i * set->n_heads + wanted->first_head) * width + c;
        plane_at += set->n_layers * set->n_heads * width;
    }
}

typedef struct metric {
    neap_metric_block *blocks;
    double *values; /* root and inverse of each */
    uint32_t n;
} metric;

/* S of the group's heads in the order of its columns, scaled. */
static int make_metric(const neap_trainer *trainer, group *wanted, metric *m) {
    const neap_train_layer *first = &trainer->layers[wanted->set->first + wanted->first];
    const size_t n_heads = (size_t)wanted->n_layers * wanted->n_heads;
    const size_t k = first->shape.head_k, v = first->shape.head_v;
    const size_t n_values = n_heads * (k * k + v * v);
    double trace = 0, *at;
    m->blocks = calloc(2 * n_heads, sizeof *m->blocks);
    m->values = at = malloc(2 * n_values * sizeof *m->values);
    if (!m->blocks || !m->values) return -ENOMEM;
    for (uint32_t plane = 0; plane < 2; plane++)
        for (uint32_t i = 0; i < wanted->n_layers; i++)
            for (uint32_t h = 0; h < wanted->n_heads; h++) {
                const size_t width = plane ? v : k, size = width * width;
                const uint32_t head = wanted->set->first_head + wanted->first_head + h;
                const double *form = (plane ? first[i].v_form : first[i].k_form) + head * size;
                double *root = at, *inverse = at + size;
                const int err =
                    neap_metric_roots(form, (uint32_t)width, METRIC_FLOOR, root, inverse);
                if (err) return err;
                for (size_t c = 0; c < size; c++) {
                    root[c] /= sqrt((double)first[i].n_seen);
                    inverse[c] *= sqrt((double)first[i].n_seen);
                    trace += root[c] * root[c];
                }
                m->blocks[m->n++] = (neap_metric_block){(uint32_t)width, root, inverse};
                at += 2 * size;
            }
    wanted->scale = sqrt(wanted->n / trace);
    if (!wanted->is_head) wanted->metric = malloc(n_values * sizeof *wanted->metric);
    if (!wanted->is_head && !wanted->metric) return -ENOMEM;
    for (uint32_t b = 0; b < m->n; b++) {
        double *root = m->values + (m->blocks[b].root - m->values);
        double *inverse = m->values + (m->blocks[b].inverse - m->values);
        const size_t width = m->blocks[b].n;
        for (size_t c = 0; c < width * width; c++) {
            root[c] *= wanted->scale;
            inverse[c] /= wanted->scale;
        }
        for (size_t i = 0; i < width && wanted->metric; i++)
            for (size_t j = 0; j < width; j++) /* symmetric to the bit */
                wanted->metric[wanted->n_metric++] =
                    neap_f16_of_f32((float)(i > j ? root[i * width + j] : root[j * width + i]));
    }
    return 0;
}

/* Stored in the order of the spread: trimming may have changed it. */
static void keep_sorted(group *wanted, const float *ft, const float *g, const float *sd,
                        uint32_t *order) {
    const size_t n = wanted->n;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = i;
        for (; at > 0 && sd[order[at - 1]] < sd[i]; at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
    for (size_t i = 0; i < n; i++) {
        const size_t from = order[i] * n;
        for (size_t c = 0; c < n; c++) {
            if (wanted->ft) wanted->ft[i * n + c] = neap_f16_of_f32(ft[from + c]);
            wanted->g[i * n + c] = neap_f16_of_f32(g[from + c]);
        }
        wanted->sd[i] = sd[order[i]];
    }
}

static int solve(const neap_trainer *trainer, group *wanted, const metric *m) {
    const size_t n = wanted->n, set_n = wanted->set->n;
    uint32_t *columns = malloc(n * sizeof *columns);
    double *cov = malloc(n * n * sizeof *cov);
    float *ft = malloc(n * n * sizeof *ft), *g = malloc(n * n * sizeof *g);
    float *sd = malloc(n * sizeof *sd);
    float *sample = malloc(trainer->n_sample * n * sizeof *sample);
    if (wanted->is_head) wanted->ft = malloc(n * n * sizeof *wanted->ft);
    wanted->g = malloc(n * n * sizeof *wanted->g);
    wanted->sd = malloc(n * sizeof *wanted->sd);
    int err = columns && cov && ft && g && sd && sample && (wanted->ft || !wanted->is_head) &&
                      wanted->g && wanted->sd
                  ? 0
                  : -ENOMEM;
    if (!err) {
        list_columns(trainer, wanted, columns);
        for (size_t i = 0; i < n; i++)
            for (size_t j = 0; j < n; j++) {
                const size_t a = columns[i] > columns[j] ? columns[i] : columns[j];
                const size_t b = columns[i] > columns[j] ? columns[j] : columns[i];
                cov[i * n + j] = wanted->set->cov[a * set_n + b] / (double)trainer->n_rows;
            }
        for (size_t r = 0; r < trainer->n_sample; r++)
            for (size_t c = 0; c < n; c++)
                sample[r * n + c] = wanted->set->sample[r * set_n + columns[c]];
        err = neap_basis_make(cov, (uint32_t)n, m->blocks, m->n, ft, g, sd);
    }
    if (!err) err = neap_spread(sample, trainer->n_sample, ft, (uint32_t)n, TRIM, sd);
    if (!err) keep_sorted(wanted, ft, g, sd, columns);
    free(columns);
    free(cov);
    free(ft);
    free(g);
    free(sd);
    free(sample);
    return err;
}

static int make_group(const neap_trainer *trainer, group *wanted) {
    metric m = {0};
    int err = make_metric(trainer, wanted, &m);
    if (!err) err = solve(trainer, wanted, &m);
    free(m.blocks);
    free(m.values);
    return err;
}

int neap_bases_make(const neap_trainer *trainer, uint32_t profile, void (*step)(double done),
                    neap_bases **ret_bases) {
    if (trainer->n_rows < NEAP_TRAIN_TOKENS_MIN) return -ENODATA;
    neap_bases *bases = calloc(1, sizeof *bases);
    size_t cap = 0;
    for (uint32_t i = 0; i < trainer->n_layers; i++)
        cap += trainer->layers[i].shape.n_kv_heads;
    if (bases) bases->groups = calloc(cap, sizeof *bases->groups);
    if (bases) bases->blocks = calloc(cap, sizeof *bases->blocks);
    int err = bases && bases->groups && bases->blocks ? 0 : -ENOMEM;
    if (!err) bases->profile = profile;
    for (uint32_t i = 0; i < trainer->n_sets && !err; i++)
        err = split(bases, trainer, &trainer->sets[i]);
    for (uint32_t i = 0; !err && i < bases->n_groups; i++) {
        step((double)i / bases->n_groups);
        err = make_group(trainer, &bases->groups[i]);
    }
    if (err)
        neap_bases_free(bases);
    else
        *ret_bases = bases;
    return err;
}

/* ---- the model file ---- */

typedef struct draft {
    neap_klt_spectrum *spectra;
    neap_klt_group *groups;
    float **sds; /* descending, in units of all blocks; owned, as f of the groups */
} draft;

static void free_draft(const neap_bases *bases, draft *d) {
    for (uint32_t i = 0; i < bases->n_groups; i++) {
        if (d->spectra) free(d->spectra[i].bits);
        if (d->groups) free((void *)d->groups[i].f);
        if (d->sds) free(d->sds[i]);
    }
    free(d->spectra);
    free(d->groups);
    free(d->sds);
}

static int allocate(const neap_bases *bases, double ratio, draft *d, double *ret_distortion) {
    uint64_t budget = 0;
    double energy = 0, lost = 0;
    for (uint32_t i = 0; i < bases->n_groups; i++) {
        const group *from = &bases->groups[i];
        const uint64_t bits =
            neap_klt_budget_bits(from->n, outlier_permille[bases->profile], ratio);
        if (bits == 0) return NEAP_E_BOUND;
        budget += bits;
        d->sds[i] = malloc(from->n * sizeof *d->sds[i]);
        d->spectra[i] = (neap_klt_spectrum){from->n, d->sds[i], calloc(from->n, 1)};
        if (!d->sds[i] || !d->spectra[i].bits) return -ENOMEM;
        for (uint32_t c = 0; c < from->n; c++) {
            d->sds[i][c] = (float)((double)from->sd[c] / from->scale);
            energy += (double)d->sds[i][c] * (double)d->sds[i][c];
        }
    }
    neap_klt_allocate(d->spectra, bases->n_groups, budget, &lost);
    *ret_distortion = energy > 0 ? lost / energy : 0;
    return 0;
}

/* Components with bits; at least one, for a group has to have one. */
static int fill_group(const group *from, neap_klt_spectrum *spectrum, neap_klt_group *to) {
    uint32_t kept = 0;
    while (kept < from->n && spectrum->bits[kept] > 0 && from->sd[kept] > SD_MIN)
        kept++;
    if (kept == 0) spectrum->bits[kept++] = 1;
    uint16_t *f = from->ft ? malloc((size_t)from->n * kept * sizeof *f) : NULL;
    if (from->ft && !f) return -ENOMEM;
    for (size_t column = 0; column < from->n && f; column++)
        for (size_t c = 0; c < kept; c++)
            f[column * kept + c] = from->ft[c * from->n + column];
    *to = (neap_klt_group){.first_head = from->set->first_head + from->first_head,
                           .n_heads = from->n_heads,
                           .n_components = kept,
                           .unit = (float)(1 / from->scale),
                           .bits = spectrum->bits,
                           .sd = from->sd,
                           .f = f,
                           .g = from->g,
                           .metric = from->metric};
    return 0;
}

int neap_bases_write(const neap_bases *bases, double ratio, const char *path, const char *name,
                     uint64_t digest, neap_bases_result *ret_result) {
    const uint32_t n = bases->n_groups;
    neap_bases_result result = {.n_blocks = bases->n_blocks, .n_groups = n};
    draft d = {calloc(n, sizeof *d.spectra), calloc(n, sizeof *d.groups), calloc(n, sizeof *d.sds)};
    int err = d.spectra && d.groups && d.sds ? 0 : -ENOMEM;
    if (!err) err = allocate(bases, ratio, &d, &result.distortion);
    for (uint32_t i = 0; i < n && !err; i++) {
        err = fill_group(&bases->groups[i], &d.spectra[i], &d.groups[i]);
        result.n_columns += bases->groups[i].n;
        result.n_kept += d.groups[i].n_components;
    }
    neap_klt_spec spec = {.digest = digest,
                          .profile = bases->profile,
                          .outlier_permille = outlier_permille[bases->profile],
                          .ratio = (float)ratio,
                          .n_ropes = bases->n_ropes,
                          .n_blocks = bases->n_blocks,
                          .n_groups = n,
                          .ropes = bases->ropes,
                          .blocks = bases->blocks,
                          .groups = d.groups};
    snprintf(spec.name, sizeof spec.name, "%.*s", (int)sizeof spec.name - 1, name);
    for (uint32_t bits = 1; bits <= NEAP_KLT_BITS; bits++)
        spec.tables[bits] = neap_klt_default_table(bits);
    if (!err) err = neap_klt_model_write(path, &spec);
    if (!err) *ret_result = result;
    free_draft(bases, &d);
    return err;
}
