/* predictors.c - see predictors.h.
 *
 * Of each context a sample of its tokens is kept, evenly spaced, K before RoPE and V in f16, at
 * most MEMORY for all; when that is full every second row of each context goes. Attention is
 * averaged while the context is there: what the queries of its third quarter look at, and those of
 * its last one. */
#include "predictors.h"

#include <cblas.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "half.h"
#include "learned.h"
#include "neap.h"
#include "train_int.h"

#define MEMORY ((uint64_t)512 << 20)
#define HISTORY_MEMORY ((uint64_t)256 << 20)
enum {
    CONTEXT_ROWS = 1024,
    HISTORY_TOKENS = 512, /* least of a context whose attention is learned from */
    WARM_STEPS = 25,
    WARM_ROWS = 8192, /* that those steps look at */
    CONTEXTS_MAX = 65536,
};

typedef struct layer {
    neap_learned_layer shape;
    uint16_t *k, *v;    /* [cap_rows][n_kv_heads * dk], ... dv */
    float *k_gram, *kv; /* [n_kv_heads][dk][dk], ... dv: W_K W_K', W_K W_V'; NULL: no Slim */
} layer;

struct neap_predictors {
    layer *layers; /* NULL before the first context */
    uint32_t n_layers;
    uint32_t *begin; /* [n_contexts + 1] first row of each context */
    uint32_t n_contexts, context_rows, cap_rows;
    neap_token_sample *samples;
    size_t n_samples, cap_samples;
    uint64_t sample_bytes;
};

int neap_predictors_create(neap_predictors **ret_predictors) {
    neap_predictors *p = calloc(1, sizeof *p);
    if (p) p->begin = calloc(CONTEXTS_MAX + 1, sizeof *p->begin);
    if (!p || !p->begin) {
        free(p);
        return -ENOMEM;
    }
    p->context_rows = CONTEXT_ROWS;
    *ret_predictors = p;
    return 0;
}

void neap_predictors_free(neap_predictors *p) {
    if (!p) return;
    for (uint32_t i = 0; i < p->n_layers; i++) {
        free(p->layers[i].k);
        free(p->layers[i].v);
        free(p->layers[i].k_gram);
    }
    for (size_t i = 0; i < p->n_samples; i++)
        free((void *)p->samples[i].history);
    free(p->samples);
    free(p->layers);
    free(p->begin);
    free(p);
}

/* ---- the first context ---- */

/* a[m][n_inputs] b[n][n_inputs]'. */
static void product(const float *a, uint32_t m, const float *b, uint32_t n, uint32_t n_inputs,
                    float *out) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)m, (int)n, (int)n_inputs, 1, a,
                (int)n_inputs, b, (int)n_inputs, 0, out, (int)n);
}

static int take_weights(const neap_train_layer *from, layer *to) {
    const uint32_t dk = to->shape.dk, dv = to->shape.dv, n = from->n_inputs;
    to->shape.has_key_norm = from->has_key_norm;
    to->shape.is_slim = from->w_k && !from->has_key_norm;
    if (!to->shape.is_slim) return 0;
    const size_t gram = (size_t)dk * dk, cross = (size_t)dk * dv;
    to->k_gram = malloc(to->shape.n_kv_heads * (gram + cross) * sizeof *to->k_gram);
    if (!to->k_gram) return -ENOMEM;
    to->kv = to->k_gram + to->shape.n_kv_heads * gram;
    for (uint32_t h = 0; h < to->shape.n_kv_heads; h++) {
        const float *w_k = from->w_k + (size_t)h * dk * n, *w_v = from->w_v + (size_t)h * dv * n;
        product(w_k, dk, w_k, dk, n, to->k_gram + h * gram);
        product(w_k, dk, w_v, dv, n, to->kv + h * cross);
    }
    return 0;
}

static int make_layers(neap_predictors *p, const neap_trainer *trainer) {
    const uint64_t cap = MEMORY / neap_trainer_tell(trainer).cell_bytes;
    p->cap_rows =
        cap > 4 * CONTEXT_ROWS ? (uint32_t)(cap < 1u << 20 ? cap : 1u << 20) : 4 * CONTEXT_ROWS;
    p->layers = calloc(trainer->n_layers, sizeof *p->layers);
    if (!p->layers) return -ENOMEM;
    for (; p->n_layers < trainer->n_layers; p->n_layers++) {
        const neap_train_layer *from = &trainer->layers[p->n_layers];
        layer *to = &p->layers[p->n_layers];
        const neap_capture_layer *s = &from->shape;
        to->shape = (neap_learned_layer){.layer = from->layer,
                                         .n_kv_heads = s->n_kv_heads,
                                         .dk = s->head_k,
                                         .dv = s->head_v,
                                         .hidden = s->head_k};
        const size_t rows = (size_t)p->cap_rows * s->n_kv_heads;
        to->k = malloc(rows * s->head_k * sizeof *to->k);
        to->v = malloc(rows * s->head_v * sizeof *to->v);
        if (!to->k || !to->v || take_weights(from, to) != 0) {
            p->n_layers++; /* what there is of it is freed with the others */
            return -ENOMEM;
        }
    }
    return 0;
}

/* ---- a context's rows ---- */

/* Every second row of each context goes. */
static void thin(neap_predictors *p) {
    uint32_t to = 0;
    for (uint32_t c = 0; c < p->n_contexts; c++) {
        const uint32_t begin = p->begin[c], end = p->begin[c + 1];
        p->begin[c] = to;
        for (uint32_t from = begin; from < end; from += 2, to++)
            for (uint32_t i = 0; i < p->n_layers; i++) {
                const layer *l = &p->layers[i];
                const size_t k = (size_t)l->shape.n_kv_heads * l->shape.dk;
                const size_t v = (size_t)l->shape.n_kv_heads * l->shape.dv;
                memmove(l->k + to * k, l->k + from * k, k * sizeof *l->k);
                memmove(l->v + to * v, l->v + from * v, v * sizeof *l->v);
            }
    }
    p->begin[p->n_contexts] = to;
    p->context_rows = (p->context_rows + 1) / 2;
}

/* A head's key before RoPE. */
static void take_key(const neap_train_layer *l, uint32_t row, uint32_t head, float *key) {
    float table[NEAP_KLT_HEAD_DIM];
    const uint16_t *k = l->k + ((size_t)row * l->shape.n_kv_heads + head) * l->shape.head_k;
    for (uint32_t c = 0; c < l->shape.head_k; c++)
        key[c] = neap_f32_of_f16(k[c]);
    neap_rope_table(&l->rope, l->positions[row], table);
    neap_rope_unturn(&l->rope, table, key);
}

static void take_row(const neap_train_layer *from, uint32_t row, const layer *to, uint32_t at) {
    float head[NEAP_KLT_HEAD_DIM];
    const uint32_t dk = to->shape.dk, heads = to->shape.n_kv_heads;
    const size_t v = (size_t)heads * to->shape.dv;
    for (uint32_t h = 0; h < heads; h++) {
        take_key(from, row, h, head);
        for (uint32_t c = 0; c < dk; c++)
            to->k[((size_t)at * heads + h) * dk + c] = neap_f16_of_f32(head[c]);
    }
    memcpy(to->v + at * v, from->v + row * v, v * sizeof *to->v);
}

/* The rows of one head. */
static void gather(const uint16_t *rows, uint32_t n, uint32_t n_heads, uint32_t head,
                   uint32_t width, float *out) {
    for (size_t r = 0; r < n; r++)
        for (uint32_t c = 0; c < width; c++)
            out[r * width + c] = neap_f32_of_f16(rows[(r * n_heads + head) * width + c]);
}

/* The first tokens are kept exactly. */
static uint32_t first_row(const neap_trainer *trainer) {
    const neap_train_layer *l = &trainer->layers[0];
    uint32_t first = 0;
    while (first < l->n && l->positions[first] < NEAP_KLT_FIRST_EXACT)
        first++;
    return first;
}

static void add_rows(neap_predictors *p, const neap_trainer *trainer) {
    const uint32_t n = trainer->layers[0].n, first = first_row(trainer);
    if (n == first || p->n_contexts == CONTEXTS_MAX) return;
    while (p->begin[p->n_contexts] + p->context_rows > p->cap_rows)
        thin(p);
    const uint32_t left = n - first, begin = p->begin[p->n_contexts];
    const uint32_t n_rows = left < p->context_rows ? left : p->context_rows;
    for (uint32_t r = 0; r < n_rows; r++)
        for (uint32_t i = 0; i < p->n_layers; i++)
            take_row(&trainer->layers[i], first + (uint32_t)((uint64_t)r * left / n_rows),
                     &p->layers[i], begin + r);
    p->begin[++p->n_contexts] = begin + n_rows;
}

/* ---- a context's attention ---- */

/* The mean of the groups: what all of the queries look at. */
static void mean_of(const float *groups, size_t stride, size_t n, float *mean) {
    memset(mean, 0, n * sizeof *mean);
    for (size_t g = 0; g < NEAP_TOKEN_GROUPS; g++)
        for (size_t i = 0; i < n; i++)
            mean[i] += groups[g * stride + i] / NEAP_TOKEN_GROUPS;
}

/* To the tokens before cut: by the queries from half of it on, and by those after it. */
static int add_history(neap_predictors *p, const neap_train_layer *l, const float *k,
                       uint32_t *n_seen, float *all) {
    const neap_capture_layer *s = &l->shape;
    const uint32_t cut = l->n * 3 / 4;
    uint32_t from = 0, at = 0, seen = 0;
    for (uint32_t i = 0; i < l->n_queries; i++) {
        while (seen < l->n && l->positions[seen] <= l->query_positions[i])
            seen++;
        n_seen[i] = seen;
        from += seen <= cut / 2;
        at += seen <= cut;
    }
    if (from == at || at == l->n_queries) return 0;
    float *history = malloc((NEAP_TOKEN_GROUPS + 1) * (size_t)cut * sizeof *history);
    if (!history) return -ENOMEM;
    float *future = history + NEAP_TOKEN_GROUPS * (size_t)cut;
    neap_token_attention a = {.n = cut,
                              .n_queries = at - from,
                              .n_heads = s->n_heads,
                              .n_kv_heads = s->n_kv_heads,
                              .head_dim = s->head_k,
                              .scale = s->scale,
                              .q = l->q + (size_t)from * s->n_heads * s->head_k,
                              .k = k,
                              .n_seen = n_seen + from};
    int err = neap_token_history(&a, history);
    a.n = l->n;
    a.n_queries = l->n_queries - at;
    a.q = l->q + (size_t)at * s->n_heads * s->head_k;
    a.n_seen = n_seen + at;
    if (!err) err = neap_token_history(&a, all);
    if (err) {
        free(history);
        return err;
    }
    mean_of(all, l->n, cut, future);
    p->samples[p->n_samples++] = (neap_token_sample){history, future, cut};
    p->sample_bytes += (NEAP_TOKEN_GROUPS + 1) * (uint64_t)cut * sizeof *history;
    return 0;
}

static int add_attention(neap_predictors *p, const neap_trainer *trainer) {
    const uint32_t n = trainer->layers[0].n, n_queries = trainer->layers[0].n_queries;
    uint32_t widest = 0;
    if (n < HISTORY_TOKENS || p->sample_bytes > HISTORY_MEMORY) return 0;
    if (p->n_samples + trainer->n_layers > p->cap_samples) {
        const size_t cap = 2 * (p->n_samples + trainer->n_layers);
        neap_token_sample *grown = realloc(p->samples, cap * sizeof *grown);
        if (!grown) return -ENOMEM;
        p->samples = grown;
        p->cap_samples = cap;
    }
    for (uint32_t i = 0; i < trainer->n_layers; i++) {
        const uint32_t width =
            trainer->layers[i].shape.n_kv_heads * trainer->layers[i].shape.head_k;
        widest = width > widest ? width : widest;
    }
    float *k = malloc((size_t)n * widest * sizeof *k);
    float *all = malloc(NEAP_TOKEN_GROUPS * (size_t)n * sizeof *all);
    uint32_t *n_seen = malloc((n_queries + 1) * sizeof *n_seen);
    int err = k && all && n_seen ? 0 : -ENOMEM;
    for (uint32_t i = 0; i < trainer->n_layers && !err; i++) {
        const neap_train_layer *l = &trainer->layers[i];
        for (size_t c = 0; c < (size_t)n * l->shape.n_kv_heads * l->shape.head_k; c++)
            k[c] = neap_f32_of_f16(l->k[c]);
        err = add_history(p, l, k, n_seen, all);
    }
    free(k);
    free(all);
    free(n_seen);
    return err;
}

int neap_predictors_add(neap_predictors *p, const neap_trainer *trainer) {
    if (trainer->n_layers == 0 || trainer->layers[0].n == 0) return 0;
    const int err = p->layers ? 0 : make_layers(p, trainer);
    if (err) return err;
    add_rows(p, trainer);
    return add_attention(p, trainer);
}

/* ---- the context at hand ---- */

uint32_t neap_context_tokens(const neap_trainer *trainer) {
    return trainer->n_layers ? trainer->layers[0].n - first_row(trainer) : 0;
}

neap_context_layer neap_context_layer_at(const neap_trainer *trainer, uint32_t i) {
    const neap_train_layer *l = &trainer->layers[i];
    return (neap_context_layer){l->layer, l->shape.n_kv_heads, l->shape.head_k, l->shape.head_v};
}

void neap_context_head(const neap_trainer *trainer, uint32_t i, uint32_t head, float *ret_keys,
                       float *ret_values) {
    const neap_train_layer *l = &trainer->layers[i];
    const uint32_t first = first_row(trainer), n = l->n - first;
    const uint32_t dk = l->shape.head_k, dv = l->shape.head_v;
    for (uint32_t r = 0; r < n; r++)
        take_key(l, first + r, head, ret_keys + (size_t)r * dk);
    gather(l->v + (size_t)first * l->shape.n_kv_heads * dv, n, l->shape.n_kv_heads, head, dv,
           ret_values);
}

/* ---- learning ---- */

/* The head at hand: its rows of all contexts, and each context of them. */
typedef struct work {
    const layer *layer;
    uint32_t head, n;
    float *k, *v;
    neap_value_task *tasks; /* [n_tasks] */
    uint32_t n_tasks;
} work;

/* Mean over the contexts, after a fit to each; adapt NULL: as it is. */
static int explained_by(const work *w, const neap_value *start, const neap_value_options *adapt,
                        double *ret_explained) {
    const size_t n_bytes = neap_value_n_params(&start->shape) * sizeof *start->w1;
    neap_value fitted;
    double sum = 0, explained = 0;
    int err = neap_value_create(&start->shape, &fitted);
    if (err) return err;
    for (uint32_t c = 0; c < w->n_tasks && !err; c++) {
        const neap_value_task *t = &w->tasks[c];
        memcpy(fitted.w1, start->w1, n_bytes);
        err = adapt ? neap_value_fit(t->keys, t->values, t->n, adapt, &fitted) : 0;
        if (!err) err = neap_value_explained(&fitted, t->keys, t->values, t->n, &explained);
        sum += explained / w->n_tasks;
    }
    *ret_explained = sum;
    neap_value_free(&fitted);
    return err;
}

/* Wlin of the weights, or of least squares; and what it explains. */
static int learn_linear(const work *w, neap_learned_head *to, double *ret_explained) {
    const layer *l = w->layer;
    const uint32_t dk = l->shape.dk, dv = l->shape.dv;
    const neap_value_shape shape = neap_value_shape_of(dk, dv, 0);
    neap_value_options options = neap_value_defaults(NEAP_VALUE_RIDGE);
    neap_value linear;
    int err = neap_value_create(&shape, &linear);
    if (err) return err;
    if (l->shape.is_slim)
        err = neap_value_slim(l->k_gram + (size_t)w->head * dk * dk,
                              l->kv + (size_t)w->head * dk * dv, dk, dv, linear.wlin);
    else
        err = neap_value_fit(w->k, w->v, w->n, &options, &linear);
    options.start = NEAP_VALUE_WLIN; /* means are the context's */
    options.fix_linear = true;
    if (!err) err = explained_by(w, &linear, &options, ret_explained);
    if (!err) memcpy(to->linear, linear.wlin, (size_t)dk * dv * sizeof *to->linear);
    neap_value_free(&linear);
    return err;
}

static int learn_warm(const work *w, neap_learned_head *to, double *ret_explained) {
    neap_value_options options = neap_value_defaults(NEAP_VALUE_RIDGE);
    options.steps = WARM_STEPS;
    options.sample = WARM_ROWS;
    options.norm = &to->norm;
    options.seed = w->layer->shape.layer + 1;
    const int err = neap_value_fit(w->k, w->v, w->n, &options, &to->warm);
    return err ? err : explained_by(w, &to->warm, NULL, ret_explained);
}

/* From the warm start; what it explains is after the steps that it was learned for. */
static int learn_meta(const work *w, neap_learned_head *to, double *ret_explained) {
    const neap_value_meta_options options = neap_value_meta_defaults();
    neap_value_options adapt = neap_value_defaults(NEAP_VALUE_ADAM);
    adapt.start = NEAP_VALUE_GIVEN;
    adapt.steps = options.inner_steps;
    adapt.rate = options.inner_rate;
    adapt.norm = &to->norm;
    memcpy(to->meta.w1, to->warm.w1, neap_value_n_params(&to->warm.shape) * sizeof *to->warm.w1);
    const int err = neap_value_meta(w->tasks, w->n_tasks, &to->norm, &options, &to->meta);
    return err ? err : explained_by(w, &to->meta, &adapt, ret_explained);
}

static int head_create(const layer *l, neap_learned_head *ret_head) {
    const neap_value_shape shape = neap_value_shape_of(l->shape.dk, l->shape.dv, l->shape.hidden);
    int err = neap_value_norm_create(&shape, &ret_head->norm);
    if (!err) err = neap_value_create(&shape, &ret_head->warm);
    if (!err) err = neap_value_create(&shape, &ret_head->meta);
    if (!err) ret_head->linear = calloc((size_t)shape.dk * shape.dv, sizeof *ret_head->linear);
    return err ? err : ret_head->linear ? 0 : -ENOMEM;
}

static void heads_free(neap_learned_head *heads, uint32_t n) {
    for (uint32_t i = 0; i < n && heads; i++) {
        neap_value_norm_free(&heads[i].norm);
        neap_value_free(&heads[i].warm);
        neap_value_free(&heads[i].meta);
        free(heads[i].linear);
    }
    free(heads);
}

static void work_fini(work *w) {
    free(w->k);
    free(w->tasks);
}

static int work_init(const neap_predictors *p, const layer *l, uint32_t head, work *ret_work) {
    const uint32_t dk = l->shape.dk, dv = l->shape.dv;
    work w = {.layer = l, .head = head, .n = p->begin[p->n_contexts], .n_tasks = p->n_contexts};
    w.k = malloc((size_t)w.n * (dk + dv) * sizeof *w.k);
    w.tasks = malloc(w.n_tasks * sizeof *w.tasks);
    if (!w.k || !w.tasks) {
        work_fini(&w);
        return -ENOMEM;
    }
    w.v = w.k + (size_t)w.n * dk;
    gather(l->k, w.n, l->shape.n_kv_heads, head, dk, w.k);
    gather(l->v, w.n, l->shape.n_kv_heads, head, dv, w.v);
    for (uint32_t c = 0; c < w.n_tasks; c++)
        w.tasks[c] =
            (neap_value_task){w.k + (size_t)p->begin[c] * dk, w.v + (size_t)p->begin[c] * dv,
                              p->begin[c + 1] - p->begin[c]};
    *ret_work = w;
    return 0;
}

static int learn_head(const neap_predictors *p, const layer *l, uint32_t head,
                      neap_learned_head *to, neap_predictors_result *result) {
    double linear = 0, warm = 0, meta = 0;
    work w;
    int err = work_init(p, l, head, &w);
    if (err) return err;
    err = head_create(l, to);
    if (!err) {
        neap_value_norm_measure(&to->warm.shape, w.k, w.v, w.n, &to->norm);
        err = learn_linear(&w, to, &linear);
    }
    if (!err) err = learn_warm(&w, to, &warm);
    if (!err) err = learn_meta(&w, to, &meta);
    work_fini(&w);
    result->linear += linear / result->n_heads;
    result->warm += warm / result->n_heads;
    result->meta += meta / result->n_heads;
    return err;
}

static int learn_heads(const neap_predictors *p, void (*step)(double done),
                       neap_learned_head *heads, neap_predictors_result *result) {
    uint32_t at = 0;
    for (uint32_t i = 0; i < p->n_layers; i++)
        for (uint32_t h = 0; h < p->layers[i].shape.n_kv_heads; h++, at++) {
            step((double)at / result->n_heads);
            const int err = learn_head(p, &p->layers[i], h, &heads[at], result);
            if (err) return err;
        }
    return 0;
}

static int write_all(const neap_predictors *p, const neap_learned_head *heads,
                     const neap_token_net *net, const char *path, const char *name,
                     uint64_t digest) {
    neap_learned_layer *layers = malloc(p->n_layers * sizeof *layers);
    if (!layers) return -ENOMEM;
    for (uint32_t i = 0; i < p->n_layers; i++)
        layers[i] = p->layers[i].shape;
    neap_learned_spec spec = {
        .digest = digest, .n_layers = p->n_layers, .layers = layers, .heads = heads, .net = net};
    memcpy(spec.name, name, strnlen(name, sizeof spec.name - 1));
    const int err = neap_learned_write(path, &spec);
    free(layers);
    return err;
}

int neap_predictors_write(const neap_predictors *p, const char *path, const char *name,
                          uint64_t digest, void (*step)(double done),
                          neap_predictors_result *ret_result) {
    neap_predictors_result result = {.n_layers = p->n_layers, .n_tokens = p->begin[p->n_contexts]};
    neap_token_net net;
    if (result.n_tokens == 0) return -ENODATA;
    for (uint32_t i = 0; i < p->n_layers; i++) {
        result.n_heads += p->layers[i].shape.n_kv_heads;
        result.n_slim += p->layers[i].shape.is_slim;
        result.n_key_norms += p->layers[i].shape.has_key_norm;
    }
    neap_learned_head *heads = calloc(result.n_heads, sizeof *heads);
    int err = heads ? learn_heads(p, step, heads, &result) : -ENOMEM;
    const neap_token_training training = neap_token_training_defaults();
    if (!err && p->n_samples)
        err = neap_token_train(p->samples, p->n_samples, &training, &net, &result.net_error,
                               &result.untrained_error);
    if (!err) err = write_all(p, heads, p->n_samples ? &net : NULL, path, name, digest);
    heads_free(heads, heads ? result.n_heads : 0);
    if (!err) *ret_result = result;
    return err;
}
