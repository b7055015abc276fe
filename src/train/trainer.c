/* trainer.c - what is kept of all texts: covariances of sets of columns, a sample of rows for the
 * spread of the components, and the layers' forms.
 *
 * Sets are as wide as groups may be: up to four layers, else one layer, else ranges of its heads.
 * Profiles with smaller groups take parts of these covariances. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "basis.h"
#include "half.h"
#include "neap.h"
#include "train_int.h"

#define SAMPLE_BYTES ((uint64_t)256 << 20)

int neap_trainer_create(neap_trainer **ret_trainer) {
    neap_trainer *trainer = calloc(1, sizeof *trainer);
    if (!trainer) return -ENOMEM;
    trainer->stride = 1;
    *ret_trainer = trainer;
    return 0;
}

void neap_trainer_free(neap_trainer *trainer) {
    if (!trainer) return;
    for (uint32_t i = 0; i < trainer->n_layers; i++)
        neap_train_layer_free(&trainer->layers[i]);
    for (uint32_t i = 0; i < trainer->n_sets; i++) {
        free(trainer->sets[i].cov);
        free(trainer->sets[i].sample);
    }
    free(trainer->layers);
    free(trainer->sets);
    free(trainer);
}

uint32_t neap_train_columns(const neap_train_layer *layer, uint32_t n_layers, uint32_t n_heads) {
    return n_layers * n_heads * (layer->shape.head_k + layer->shape.head_v);
}

bool neap_train_alike(const neap_train_layer *a, const neap_train_layer *b) {
    return a->shape.n_kv_heads == b->shape.n_kv_heads && a->shape.head_k == b->shape.head_k &&
           a->shape.head_v == b->shape.head_v;
}

/* ---- sets ---- */

/* Layers with a sliding window have fewer cells than the others: they are small, and not coded. */
static void leave_small_layers(neap_trainer *trainer) {
    uint32_t most = 0, n = 0;
    for (uint32_t i = 0; i < trainer->n_layers; i++)
        if (trainer->layers[i].shape.n_cells > most) most = trainer->layers[i].shape.n_cells;
    for (uint32_t i = 0; i < trainer->n_layers; i++) {
        if (trainer->layers[i].shape.n_cells == most)
            trainer->layers[n++] = trainer->layers[i];
        else
            neap_train_layer_free(&trainer->layers[i]);
    }
    trainer->n_left = trainer->n_layers - n;
    trainer->n_layers = n;
}

static uint32_t layers_of_set(const neap_trainer *trainer, uint32_t first) {
    const neap_train_layer *l = &trainer->layers[first];
    uint32_t n = 1;
    while (n < NEAP_KLT_LAYERS && first + n < trainer->n_layers && neap_train_alike(l, l + n) &&
           neap_train_columns(l, n + 1, l->shape.n_kv_heads) <= NEAP_KLT_COLUMNS)
        n++;
    return n;
}

static int make_sets(neap_trainer *trainer) {
    uint64_t columns = 0;
    size_t cap = 0;
    for (uint32_t i = 0; i < trainer->n_layers; i++)
        cap += trainer->layers[i].shape.n_kv_heads;
    trainer->sets = calloc(cap, sizeof *trainer->sets);
    if (!trainer->sets) return -ENOMEM;
    for (uint32_t i = 0, n_layers; i < trainer->n_layers; i += n_layers) {
        const neap_train_layer *l = &trainer->layers[i];
        n_layers = layers_of_set(trainer, i);
        const uint32_t fit = NEAP_KLT_COLUMNS / neap_train_columns(l, 1, 1);
        const uint32_t heads = fit < l->shape.n_kv_heads ? fit : l->shape.n_kv_heads;
        if (fit == 0) return -ENOTSUP;
        for (uint32_t first = 0; first < l->shape.n_kv_heads; first += heads) {
            neap_train_set *set = &trainer->sets[trainer->n_sets++];
            const uint32_t left = l->shape.n_kv_heads - first;
            *set = (neap_train_set){.first = i,
                                    .n_layers = n_layers,
                                    .first_head = first,
                                    .n_heads = left < heads ? left : heads};
            set->n = neap_train_columns(l, n_layers, set->n_heads);
            set->cov = calloc((size_t)set->n * set->n, sizeof *set->cov);
            if (!set->cov) return -ENOMEM;
            columns += set->n;
        }
    }
    const uint64_t rows = SAMPLE_BYTES / (columns * sizeof(float)) / NEAP_KLT_ROWS * NEAP_KLT_ROWS;
    trainer->cap_sample = rows < 4 * NEAP_KLT_ROWS ? 4 * NEAP_KLT_ROWS
                          : rows > 65536           ? 65536
                                                   : (uint32_t)rows;
    for (uint32_t i = 0; i < trainer->n_sets; i++) {
        neap_train_set *set = &trainer->sets[i];
        set->sample = malloc((size_t)trainer->cap_sample * set->n * sizeof *set->sample);
        if (!set->sample) return -ENOMEM;
    }
    return 0;
}

/* ---- a context ---- */

/* Rows [first, first + n) of the set's columns, keys before RoPE. */
static void gather(const neap_trainer *trainer, const neap_train_set *set, uint32_t first,
                   uint32_t n, float *rows) {
    float table[NEAP_KLT_HEAD_DIM];
    float *at = rows;
    for (uint32_t r = first; r < first + n; r++) {
        for (uint32_t plane = 0; plane < 2; plane++)
            for (uint32_t i = set->first; i < set->first + set->n_layers; i++) {
                const neap_train_layer *l = &trainer->layers[i];
                const uint32_t width = plane ? l->shape.head_v : l->shape.head_k;
                const uint16_t *from = (plane ? l->v : l->k) +
                                       ((size_t)r * l->shape.n_kv_heads + set->first_head) * width;
                if (!plane) neap_rope_table(&l->rope, l->positions[r], table);
                for (uint32_t h = 0; h < set->n_heads; h++, from += width, at += width) {
                    for (uint32_t c = 0; c < width; c++)
                        at[c] = neap_f32_of_f16(from[c]);
                    if (!plane) neap_rope_unturn(&l->rope, table, at);
                }
            }
    }
}

/* Every second chunk of a full sample goes. */
static void thin_sample(neap_trainer *trainer) {
    const size_t chunk = NEAP_KLT_ROWS;
    for (uint32_t i = 0; i < trainer->n_sets; i++) {
        neap_train_set *set = &trainer->sets[i];
        for (size_t c = 1; 2 * c * chunk < trainer->n_sample; c++)
            memcpy(set->sample + c * chunk * set->n, set->sample + 2 * c * chunk * set->n,
                   chunk * set->n * sizeof *set->sample);
    }
    trainer->n_sample = (trainer->n_sample / NEAP_KLT_ROWS + 1) / 2 * NEAP_KLT_ROWS;
    trainer->stride *= 2;
}

static int add_chunk(neap_trainer *trainer, uint32_t first, float *rows, float *scratch) {
    const bool is_kept = trainer->n_chunks++ % trainer->stride == 0;
    if (is_kept && trainer->n_sample + NEAP_KLT_ROWS > trainer->cap_sample) thin_sample(trainer);
    for (uint32_t i = 0; i < trainer->n_sets; i++) {
        neap_train_set *set = &trainer->sets[i];
        gather(trainer, set, first, NEAP_KLT_ROWS, rows);
        neap_covariance_add(set->cov, set->n, rows, NEAP_KLT_ROWS, scratch);
        if (is_kept)
            memcpy(set->sample + (size_t)trainer->n_sample * set->n, rows,
                   (size_t)NEAP_KLT_ROWS * set->n * sizeof *rows);
    }
    trainer->n_sample += is_kept ? NEAP_KLT_ROWS : 0;
    trainer->n_rows += NEAP_KLT_ROWS;
    return 0;
}

/* A layer whose residual was not found takes that of the layer before. */
static void fill_residuals(neap_trainer *trainer) {
    for (uint32_t i = 0; i < trainer->n_layers; i++) {
        neap_train_layer *l = &trainer->layers[i];
        bool known = false;
        for (uint32_t j = 0; j < l->n_queries; j++)
            known = known || l->residual[j] > 0;
        if (i == 0 && !known) trainer->lacks_residuals = true;
        for (uint32_t j = 0; j < l->n_queries && !known; j++)
            l->residual[j] = i > 0 ? trainer->layers[i - 1].residual[j] : 1;
    }
}

static int add_context(neap_trainer *trainer) {
    uint32_t widest = 0;
    for (uint32_t i = 1; i < trainer->n_layers; i++)
        if (trainer->layers[i].n != trainer->layers[0].n ||
            trainer->layers[i].n_queries != trainer->layers[0].n_queries)
            return NEAP_E_CORRUPT;
    for (uint32_t i = 0; i < trainer->n_sets; i++)
        widest = trainer->sets[i].n > widest ? trainer->sets[i].n : widest;
    fill_residuals(trainer);
    int err = 0;
    for (uint32_t i = 0; i < trainer->n_layers && !err; i++)
        err = neap_train_weigh(&trainer->layers[i]);
    float *rows = malloc((size_t)NEAP_KLT_ROWS * widest * sizeof *rows);
    float *scratch = malloc((size_t)widest * widest * sizeof *scratch);
    if (!rows || !scratch) err = -ENOMEM;
    const uint32_t n = trainer->layers[0].n;
    for (uint32_t first = NEAP_KLT_FIRST_EXACT; first + NEAP_KLT_ROWS <= n && !err;
         first += NEAP_KLT_ROWS)
        err = add_chunk(trainer, first, rows, scratch);
    free(rows);
    free(scratch);
    return err;
}

int neap_trainer_add(neap_trainer *trainer, const void *records, size_t n_bytes) {
    int err = neap_train_read(trainer, records, n_bytes);
    if (!err && !trainer->sets && trainer->n_layers) {
        leave_small_layers(trainer);
        err = make_sets(trainer);
    }
    return !err && trainer->n_layers ? add_context(trainer) : err;
}

neap_trainer_info neap_trainer_tell(const neap_trainer *trainer) {
    neap_trainer_info info = {.n_tokens = trainer->n_rows,
                              .n_layers = trainer->n_layers,
                              .n_left = trainer->n_left,
                              .has_grams = true,
                              .has_residuals = !trainer->lacks_residuals};
    for (uint32_t i = 0; i < trainer->n_layers; i++) {
        const neap_train_layer *l = &trainer->layers[i];
        info.has_grams = info.has_grams && l->grams;
        info.cell_bytes += neap_train_columns(l, 1, l->shape.n_kv_heads) * sizeof(uint16_t);
    }
    return info;
}
