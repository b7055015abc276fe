/* text.c - sorts the records of a context by layer. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "neap.h"
#include "train_int.h"

enum { HEADS_MAX = 4096, LAYERS_MAX = 4096, INPUTS_MAX = 1 << 20 };

typedef struct cursor {
    const uint8_t *at, *end;
} cursor;

static const void *take(cursor *c, uint64_t n, uint64_t size) {
    const uint8_t *at = c->at;
    if (size && n > (uint64_t)(c->end - c->at) / size) return NULL;
    c->at += n * size;
    return at;
}

static bool take_copy(cursor *c, uint64_t n, uint64_t size, void *to) {
    const void *at = take(c, n, size);
    if (at) memcpy(to, at, n * size);
    return at != NULL;
}

void neap_train_layer_free(neap_train_layer *layer) {
    free(layer->freq_factors);
    free(layer->grams);
    free(layer->w_k);
    free(layer->positions);
    free(layer->k);
    free(layer->v);
    free(layer->q);
    free(layer->residual);
    free(layer->query_positions);
    free(layer->k_form);
    free(layer->v_form);
}

static neap_train_layer *find(neap_trainer *trainer, uint32_t number) {
    for (uint32_t i = 0; i < trainer->n_layers; i++)
        if (trainer->layers[i].layer == number) return &trainer->layers[i];
    return NULL;
}

static bool shape_is_good(const neap_capture_layer *s) {
    return s->n_kv_heads > 0 && s->n_heads <= HEADS_MAX && s->n_heads % s->n_kv_heads == 0 &&
           s->head_k > 0 && s->head_v > 0 && s->head_k <= NEAP_KLT_HEAD_DIM &&
           s->head_v <= NEAP_KLT_HEAD_DIM && s->n_freq_factors <= NEAP_KLT_HEAD_DIM / 2 &&
           (s->n_grams == 0 || s->n_grams == s->n_heads);
}

static int fold_rope(neap_train_layer *layer) {
    const neap_capture_layer *s = &layer->shape;
    const neap_kv_rope rope = {.mode = s->rope_mode,
                               .n_dims = s->rope_dims,
                               .n_ctx_orig = s->n_ctx_orig,
                               .freq_base = s->freq_base,
                               .freq_scale = s->freq_scale,
                               .ext_factor = s->ext_factor,
                               .attn_factor = s->attn_factor,
                               .beta_fast = s->beta_fast,
                               .beta_slow = s->beta_slow,
                               .freq_factors = s->n_freq_factors ? layer->freq_factors : NULL};
    if (s->rope_dims && s->rope_offset) return -ENOTSUP;
    return neap_rope_fold(&rope, s->head_k, &layer->rope);
}

static int add_layer(neap_trainer *trainer, cursor *c, uint32_t number) {
    neap_train_layer layer = {.layer = number};
    neap_capture_layer *s = &layer.shape;
    if (number > LAYERS_MAX || !take_copy(c, 1, sizeof *s, s) || !shape_is_good(s))
        return NEAP_E_CORRUPT;
    const size_t gram = (size_t)s->head_v * s->head_v;
    const size_t k_size = (size_t)s->n_kv_heads * s->head_k * s->head_k;
    layer.freq_factors = malloc((s->n_freq_factors + 1) * sizeof *layer.freq_factors);
    layer.grams = s->n_grams ? malloc(s->n_grams * gram * sizeof *layer.grams) : NULL;
    layer.k_form = calloc(k_size, sizeof *layer.k_form);
    layer.v_form = calloc(s->n_kv_heads * gram, sizeof *layer.v_form);
    int err = layer.freq_factors && (layer.grams || !s->n_grams) && layer.k_form && layer.v_form
                  ? 0
                  : -ENOMEM;
    if (!err && (!take_copy(c, s->n_freq_factors, sizeof(float), layer.freq_factors) ||
                 (s->n_grams && !take_copy(c, s->n_grams * gram, sizeof(float), layer.grams))))
        err = NEAP_E_CORRUPT;
    if (!err) err = fold_rope(&layer);
    if (!err && trainer->n_layers == trainer->cap_layers) {
        const uint32_t cap = trainer->cap_layers ? 2 * trainer->cap_layers : 32;
        neap_train_layer *grown = realloc(trainer->layers, cap * sizeof *grown);
        if (grown) {
            trainer->layers = grown;
            trainer->cap_layers = cap;
        }
        err = grown ? 0 : -ENOMEM;
    }
    if (err) {
        neap_train_layer_free(&layer);
        return err;
    }
    uint32_t at = trainer->n_layers++;
    for (; at > 0 && trainer->layers[at - 1].layer > number; at--)
        trainer->layers[at] = trainer->layers[at - 1];
    trainer->layers[at] = layer;
    return 0;
}

static int add_projections(neap_train_layer *l, cursor *c) {
    neap_capture_projections p;
    if (!take_copy(c, 1, sizeof p, &p) || l->w_k || p.n_inputs > INPUTS_MAX || p.has_key_norm > 1)
        return NEAP_E_CORRUPT;
    const size_t k_size = (size_t)p.n_inputs * l->shape.n_kv_heads * l->shape.head_k;
    const size_t v_size = (size_t)p.n_inputs * l->shape.n_kv_heads * l->shape.head_v;
    const void *at = take(c, k_size + v_size, sizeof(float));
    if (!at) return NEAP_E_CORRUPT;
    l->has_key_norm = p.has_key_norm;
    if (p.n_inputs == 0) return 0;
    l->w_k = malloc((k_size + v_size) * sizeof *l->w_k);
    if (!l->w_k) return -ENOMEM;
    memcpy(l->w_k, at, (k_size + v_size) * sizeof *l->w_k);
    l->w_v = l->w_k + k_size;
    l->n_inputs = p.n_inputs;
    return 0;
}

static int grow(void *pointer, uint64_t n, size_t size) {
    void **array = pointer;
    void *grown = realloc(*array, n * size);
    if (!grown) return -ENOMEM;
    *array = grown;
    return 0;
}

static int make_room(neap_train_layer *l, uint32_t n, uint32_t n_queries) {
    const neap_capture_layer *s = &l->shape;
    const size_t row = sizeof(uint16_t) * s->n_kv_heads;
    int err = 0;
    if (l->n + n > l->cap) {
        l->cap = 2 * (l->n + n);
        err = grow(&l->positions, l->cap, sizeof *l->positions);
        if (!err) err = grow(&l->k, l->cap, row * s->head_k);
        if (!err) err = grow(&l->v, l->cap, row * s->head_v);
    }
    if (!err && l->n_queries + n_queries > l->cap_queries) {
        l->cap_queries = 2 * (l->n_queries + n_queries);
        err = grow(&l->q, l->cap_queries, sizeof(float) * s->n_heads * s->head_k);
        if (!err) err = grow(&l->residual, l->cap_queries, sizeof(float));
        if (!err) err = grow(&l->query_positions, l->cap_queries, sizeof(int32_t));
    }
    if (err) l->cap = l->cap_queries = 0;
    return err;
}

static int add_tokens(neap_train_layer *l, cursor *c) {
    neap_capture_tokens tokens;
    if (!take_copy(c, 1, sizeof tokens, &tokens)) return NEAP_E_CORRUPT;
    const neap_capture_layer *s = &l->shape;
    const uint32_t n = tokens.n_tokens, n_queries = tokens.n_queries;
    const size_t k_row = (size_t)s->n_kv_heads * s->head_k,
                 v_row = (size_t)s->n_kv_heads * s->head_v;
    const size_t q_row = (size_t)s->n_heads * s->head_k;
    if (n > (size_t)(c->end - c->at) || n_queries > n) return NEAP_E_CORRUPT;
    int32_t first = -1;
    if (n > 0 && c->end - c->at >= (ptrdiff_t)sizeof first) memcpy(&first, c->at, sizeof first);
    if (first == 0) l->n = l->n_queries = 0; /* what came before was the program's warm-up */
    const int err = make_room(l, n, n_queries);
    if (err) return err;
    if (!take_copy(c, n, sizeof(int32_t), l->positions + l->n) ||
        !take_copy(c, n * k_row, sizeof(uint16_t), l->k + l->n * k_row) ||
        !take_copy(c, n * v_row, sizeof(uint16_t), l->v + l->n * v_row) ||
        !take_copy(c, n_queries * q_row, sizeof(float), l->q + l->n_queries * q_row) ||
        !take_copy(c, n_queries, sizeof(float), l->residual + l->n_queries))
        return NEAP_E_CORRUPT;
    uint32_t found = 0;
    for (uint32_t i = 0; i < n && found < n_queries; i++)
        if (l->positions[l->n + i] % NEAP_CAPTURE_Q_STEP == 0)
            l->query_positions[l->n_queries + found++] = l->positions[l->n + i];
    if (found != n_queries) return NEAP_E_CORRUPT;
    for (uint32_t i = 0; i < n; i++)
        if (l->positions[l->n + i] < 0 ||
            (l->n + i > 0 && l->positions[l->n + i] <= l->positions[l->n + i - 1]))
            return NEAP_E_CORRUPT; /* not one context from its beginning on */
    l->n += n;
    l->n_queries += n_queries;
    return 0;
}

int neap_train_read(neap_trainer *trainer, const void *records, size_t n_bytes) {
    cursor c = {records, (const uint8_t *)records + n_bytes};
    for (uint32_t i = 0; i < trainer->n_layers; i++)
        trainer->layers[i].n = trainer->layers[i].n_queries = 0;
    while (c.at < c.end) {
        neap_capture_head head;
        const uint8_t *body;
        if (!take_copy(&c, 1, sizeof head, &head) || !(body = take(&c, head.n_bytes, 1)))
            return NEAP_E_CORRUPT;
        cursor record = {body, body + head.n_bytes};
        neap_train_layer *layer = find(trainer, head.layer);
        int err = 0;
        if (head.kind == NEAP_CAPTURE_TOKENS && layer)
            err = add_tokens(layer, &record);
        else if (head.kind == NEAP_CAPTURE_LAYER && !layer && !trainer->sets)
            err = add_layer(trainer, &record, head.layer);
        else if (head.kind == NEAP_CAPTURE_PROJECTIONS && layer && !trainer->sets)
            err = add_projections(layer, &record);
        else if (head.kind < NEAP_CAPTURE_LAYER || head.kind > NEAP_CAPTURE_PROJECTIONS ||
                 !trainer->sets) /* once there are sets, other layers are those left out */
            err = NEAP_E_CORRUPT;
        if (err) return err;
    }
    return 0;
}
