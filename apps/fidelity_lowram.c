/* fidelity_lowram.c - LowRAM as `neap bench fidelity` has it, with its options, and the list of its
 * ablations.
 *
 * Of a source-target pair (papers/lowram: 3.1) a layer's target is predicted from what stands in
 * the fit for its keys: its source before RoPE, on a basis of full rank. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fidelity_int.h"

typedef neap_method_context context;
typedef neap_method_lowram_choice choice;

#define SLOW_RATE 1e-3 /* of Adam from what was learned, as in the paper */

/* ---- options ---- */

enum { TO_K = 1, FROM_K = 2, FROM_V = 4, PREVIOUS = 8 }; /* of a pair */

enum type { COUNT, BITS, NUMBER, FLAG }; /* uint32_t or int, the same, double, bool */
#define AT(field) offsetof(choice, field)

/* Where the name ends with '=' a number from least to most follows; else least is the value. */
static const struct {
    const char *name;
    size_t at;
    enum type type;
    double least, most;
} options[] = {
    {"g=", AT(fit.group_layers), COUNT, 1, NEAP_LOWRAM_LAYERS},
    {"p=", AT(fit.residual_share), NUMBER, 0, 1},
    {"no-residuals", AT(fit.residual_share), NUMBER, 0, 0},
    {"random-residuals", AT(fit.residuals), COUNT, NEAP_LOWRAM_RANDOM, 0},
    {"gamma=", AT(fit.hidden_factor), NUMBER, 0, 16},
    {"linear", AT(fit.hidden_factor), NUMBER, 0, 0},
    {"a=", AT(fit.a_bits), BITS, 1, NEAP_LOWRAM_F16},
    {"b=", AT(fit.b_bits), BITS, 1, NEAP_LOWRAM_F16},
    {"r=", AT(fit.residual_bits), BITS, 1, NEAP_LOWRAM_F16},
    {"exact=", AT(fit.first_exact), COUNT, 0, NEAP_LOWRAM_ROWS},
    {"not-centred", AT(fit.not_centred), FLAG, 1, 0},
    {"randomised", AT(fit.factorisation), COUNT, NEAP_LOWRAM_RANDOMISED, 0},
    {"shared", AT(fit.shared_predictor), FLAG, 1, 0},
    {"joint-linear", AT(fit.source), COUNT, NEAP_LOWRAM_FROM_LAYER, 0},
    {"from-row", AT(fit.source), COUNT, NEAP_LOWRAM_FROM_ROW, 0},
    {"steps=", AT(values.steps), COUNT, 0, 100},
    {"adam=", AT(adam_steps), COUNT, 0, 10000},
    {"fixed-linear", AT(values.fix_linear), FLAG, 1, 0},
    {"start-linear", AT(values.start), COUNT, NEAP_VALUE_LEAST_SQUARES, 0},
    {"start-slim", AT(learned), COUNT, NEAP_LEARNED_SLIM, 0},
    {"start-warm", AT(learned), COUNT, NEAP_LEARNED_WARM, 0},
    {"start-meta", AT(learned), COUNT, NEAP_LEARNED_META, 0},
    {"v-from-k", AT(pair), COUNT, FROM_K, 0},
    {"v-from-previous-k", AT(pair), COUNT, FROM_K | PREVIOUS, 0},
    {"v-from-previous-v", AT(pair), COUNT, FROM_V | PREVIOUS, 0},
    {"v-from-previous-kv", AT(pair), COUNT, FROM_K | FROM_V | PREVIOUS, 0},
    {"k-from-v", AT(pair), COUNT, TO_K | FROM_V, 0},
    {"k-from-previous-k", AT(pair), COUNT, TO_K | FROM_K | PREVIOUS, 0},
    {"k-from-previous-v", AT(pair), COUNT, TO_K | FROM_V | PREVIOUS, 0},
    {"k-from-previous-kv", AT(pair), COUNT, TO_K | FROM_K | FROM_V | PREVIOUS, 0},
};

static bool set(choice *c, size_t at, enum type type, double x) {
    const uint32_t count = (uint32_t)x;
    const bool flag = true;
    char *field = (char *)c + at;
    switch (type) {
    case NUMBER:
        memcpy(field, &x, sizeof x);
        return true;
    case FLAG:
        memcpy(field, &flag, sizeof flag);
        return true;
    default:
        memcpy(field, &count, sizeof count);
        return (double)count == x && (type != BITS || count <= 8 || count == NEAP_LOWRAM_F16);
    }
}

/* One option of len characters. */
static bool take_option(const char *text, size_t len, choice *c) {
    const char *equals = memchr(text, '=', len);
    const size_t name_len = equals ? (size_t)(equals - text) + 1 : len;
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        if (strlen(options[i].name) != name_len || memcmp(options[i].name, text, name_len) != 0)
            continue;
        char *end = NULL;
        const double x = equals ? strtod(equals + 1, &end) : options[i].least;
        if (equals && (end == equals + 1 || end != text + len || !(x >= options[i].least) ||
                       x > options[i].most))
            return false;
        return set(c, options[i].at, options[i].type, x);
    }
    return false;
}

/* What was learned is for one head's own keys, and as many hidden units. */
static bool fits_learned(const choice *c) {
    return !c->fit.shared_predictor && c->fit.source == NEAP_LOWRAM_FROM_KEYS &&
           (c->learned == NEAP_LEARNED_SLIM || c->fit.hidden_factor == 1) &&
           (c->pair == 0 || c->pair == FROM_K);
}

bool neap_method_lowram_options(const char *text, neap_method *method) {
    choice *c = &method->lowram;
    while (*text == '/') {
        const size_t len = strcspn(++text, "/");
        if (!take_option(text, len, c)) return false;
        text += len;
    }
    if (*text || (c->learned >= 0 && !fits_learned(c)) || (c->pair && method->kind->rest > 0) ||
        (c->fit.shared_predictor && c->fit.source == NEAP_LOWRAM_FROM_LAYER))
        return false;
    if (c->adam_steps >= 0) {
        c->values.method = NEAP_VALUE_ADAM;
        c->values.steps = (uint32_t)c->adam_steps;
        if (c->learned == NEAP_LEARNED_WARM || c->learned == NEAP_LEARNED_META)
            c->values.rate = SLOW_RATE;
    }
    return true;
}

void neap_method_lowram_defaults(neap_method *method) {
    choice *c = &method->lowram;
    neap_lowram_defaults(&c->fit, method->parameter);
    if (!method->kind->flag) c->fit.a_bits = c->fit.residual_bits = NEAP_LOWRAM_F16;
    c->values = neap_value_defaults(NEAP_VALUE_RIDGE);
    c->adam_steps = c->learned = -1;
    if (method->kind->warm) c->learned = NEAP_LEARNED_WARM;
}

/* Base lines first, then what differs from them in one thing each. */
const char neap_method_ablations[] =
    /* Pairs (Figure 3), and low rank in the place of prediction (Table 5). */
    "lowram:3/v-from-k,lowram:3/v-from-previous-k,lowram:3/v-from-previous-v,"
    "lowram:3/v-from-previous-kv,lowram:3/k-from-v,lowram:3/k-from-previous-k,"
    "lowram:3/k-from-previous-v,lowram:3/k-from-previous-kv,xkv-v:3,"
    /* Components of the values' half (Table 7). */
    "lowram:3/v-from-k/no-residuals,lowram:3/v-from-k/linear,lowram:3/v-from-k/shared,"
    "lowram:3/v-from-k/random-residuals,"
    /* Steps and starts (Table 8, warm start of Table 7). */
    "lowram:4/v-from-k,lowram:4/v-from-k/steps=0,lowram:4/v-from-k/steps=10,xkv-v:4,"
    "lowram:4/v-from-k/adam=10/fixed-linear,lowram:4/v-from-k/adam=10,"
    "lowram:4/v-from-k/adam=10/start-slim,lowram:4/v-from-k/adam=10/start-warm,"
    "lowram:4/v-from-k/adam=300/fixed-linear,lowram:4/v-from-k/adam=300,"
    "lowram:4/v-from-k/adam=300/start-slim,lowram:4/v-from-k/adam=300/start-slim/fixed-linear,"
    "lowram:4/v-from-k/adam=300/start-warm,lowram:4/v-from-k/adam=2/start-meta,"
    /* Wlin of each head or joint, alone and in the predictor (Table 9). */
    "lowram:4/v-from-k/linear/no-residuals,lowram:4/v-from-k/linear/no-residuals/joint-linear,"
    "lowram:4/v-from-k/adam=10/start-linear,lowram:4/v-from-k/adam=10/start-linear/joint-linear,"
    /* Whose residuals, after two updates (Figure 5). */
    "lowram:4/adam=2/start-meta/exact=0,lowram:4/adam=2/start-meta/exact=8,"
    "lowram:4/adam=2/start-meta/exact=0/random-residuals,"
    "lowram:4/adam=2/start-meta/exact=8/random-residuals,"
    /* The whole, quantised. */
    "lowram-q:4.25,lowram-q:4.25/g=1,lowram-q:4.25/g=2,lowram-q:4.25/g=8,"
    "lowram-q:4.25/gamma=0.5,lowram-q:4.25/gamma=2,lowram-q:4.25/linear,lowram-q:4.25/shared,"
    "lowram-q:4.25/joint-linear,lowram-q:4.25/from-row/linear,lowram-q:4.25/p=0,"
    "lowram-q:4.25/p=0.25,lowram-q:4.25/p=0.5,lowram-q:4.25/random-residuals,"
    "lowram-q:4.25/start-warm,lowram-q:4.25/b=8,lowram-q:4.25/b=4,lowram-q:4.25/a=4,"
    "lowram-q:4.25/a=6,lowram-q:4.25/a=5/b=8/r=3,"
    "lowram-q:4.25/r=4,lowram-q:4.25/not-centred,lowram-q:4.25/randomised";

/* ---- fitting ---- */

/* Layers as lowram.h sees them. */
typedef struct lowram_view {
    neap_lowram_layer *layers;
    neap_klt_plane *k, *v;
    int32_t *positions;
} lowram_view;

static void free_view(lowram_view *view) {
    free(view->layers);
    free(view->k);
    free(view->v);
    free(view->positions);
}

static bool alloc_view(const context *c, uint32_t n_layers, lowram_view *view) {
    *view = (lowram_view){.layers = calloc(n_layers, sizeof *view->layers),
                          .k = calloc(n_layers, sizeof *view->k),
                          .v = calloc(n_layers, sizeof *view->v),
                          .positions = calloc(c->n_cells, sizeof *view->positions)};
    if (!view->layers || !view->k || !view->v || !view->positions) return false;
    for (uint32_t i = 0; i < c->n_cells; i++)
        view->positions[i] = (int32_t)(c->kept->tokens ? c->kept->tokens[i] : i);
    return true;
}

static size_t row_bytes(const neap_session_layer *layer, bool is_k) {
    return sizeof(uint16_t) * layer->n_kv_heads * neap_method_dim(layer, is_k);
}

static bool view_state(const context *c, lowram_view *view) {
    if (!alloc_view(c, c->n_layers, view)) return false;
    for (uint32_t i = 0; i < c->n_layers; i++) {
        const neap_session_layer *from = &c->layers[i];
        view->layers[i] = (neap_lowram_layer){.layer = from->layer,
                                              .n_kv_heads = from->n_kv_heads,
                                              .k_head_dim = from->k_head_dim,
                                              .v_head_dim = from->v_head_dim,
                                              .rope = from->rope};
        view->k[i] = (neap_klt_plane){neap_method_rows(c, i, true), row_bytes(from, true)};
        view->v[i] = (neap_klt_plane){neap_method_rows(c, i, false), row_bytes(from, false)};
    }
    return true;
}

static neap_klt_plane plane_at(neap_klt_plane all, uint32_t first) {
    return (neap_klt_plane){(uint8_t *)all.data + first * all.row_stride, all.row_stride};
}

/* One chunk after the other of each group. */
static int cycle(const context *c, const neap_lowram *fit, const lowram_view *view, void *scratch,
                 uint64_t *inout_bytes) {
    int err = 0;
    for (uint32_t g = 0; g < neap_lowram_n_groups(fit) && !err; g++) {
        const neap_lowram_group *group = neap_lowram_group_at(fit, g);
        for (uint32_t first = 0; first < c->n_cells && !err; first += NEAP_LOWRAM_ROWS) {
            const uint32_t left = c->n_cells - first;
            neap_lowram_chunk chunk = {.group = g,
                                       .n_rows = left < NEAP_LOWRAM_ROWS ? left : NEAP_LOWRAM_ROWS,
                                       .positions = view->positions + first};
            for (uint32_t i = 0, at = 0; i < group->n_layers; i++) {
                while (view->layers[at].layer != group->layers[i])
                    at++;
                chunk.k[i] = plane_at(view->k[at], first);
                chunk.v[i] = plane_at(view->v[at], first);
            }
            const size_t cap = neap_lowram_bound(fit, g, chunk.n_rows);
            void *room = malloc(cap);
            size_t len = 0;
            neap_lowram_error error;
            err =
                room ? neap_lowram_encode(fit, &chunk, scratch, room, cap, &len, &error) : -ENOMEM;
            if (!err) err = neap_lowram_decode(fit, room, len, &chunk, scratch);
            *inout_bytes += len;
            free(room);
        }
    }
    return err;
}

typedef struct learned_start {
    const neap_method *method;
    neap_value_norm norm; /* of the predictor at hand */
    int err;
} learned_start;

static void start_learned(void *ctx, uint32_t layer, uint32_t head, const float *mean,
                          neap_value_options *inout_options, neap_value *io) {
    learned_start *s = ctx;
    const int which = s->method->lowram.learned;
    neap_value_norm_free(&s->norm);
    const int err = neap_learned_start(s->method->learned, layer, head, which, io, &s->norm);
    if (err) {
        s->err = err;
        return;
    }
    neap_value_less_mean(mean, io);
    for (uint32_t i = 0; i < io->shape.dk; i++)
        s->norm.k_mean[i] -= mean[i];
    inout_options->start = which == NEAP_LEARNED_SLIM ? NEAP_VALUE_WLIN : NEAP_VALUE_GIVEN;
    if (inout_options->method == NEAP_VALUE_ADAM) inout_options->norm = &s->norm;
}

/* Fits and codes the layers of a view; an error of neap.h. */
static int fit_view(const context *c, const neap_lowram_options *how, const lowram_view *view,
                    uint32_t n_layers, uint64_t *inout_bytes) {
    const neap_lowram_context rows = {
        .n_rows = c->n_cells, .positions = view->positions, .k = view->k, .v = view->v};
    neap_lowram_options with = *how;
    learned_start start = {.method = c->method};
    neap_lowram *fit = NULL;
    void *scratch = NULL;
    size_t fit_bytes = 0;
    with.values = &c->method->lowram.values;
    if (c->method->lowram.learned >= 0) {
        with.start = start_learned;
        with.start_ctx = &start;
    }
    int err = neap_lowram_fit(&with, view->layers, n_layers, &rows, &fit);
    if (!err) err = start.err;
    if (!err) {
        neap_lowram_bytes(fit, &fit_bytes);
        scratch = aligned_alloc(64, NEAP_ROUND_UP(neap_lowram_scratch_bytes(fit), 64));
        err = scratch ? cycle(c, fit, view, scratch, inout_bytes) : -ENOMEM;
    }
    *inout_bytes += fit_bytes;
    neap_value_norm_free(&start.norm);
    free(scratch);
    neap_lowram_free(fit);
    return err;
}

/* ---- pairs ---- */

/* K or V of a layer, keys before RoPE, into columns [first, first + dim) of the heads of to, which
 * have so many. Back: from there, and keys after RoPE. */
static int copy_rows(const context *c, uint32_t layer, bool is_k, neap_klt_plane to, size_t columns,
                     size_t first, bool back) {
    const neap_session_layer *l = &c->layers[layer];
    const size_t dim = neap_method_dim(l, is_k), width = l->n_kv_heads * dim;
    uint16_t *rows = neap_method_rows(c, layer, is_k);
    float *x = malloc((size_t)c->n_cells * width * sizeof *x);
    if (!x) return -ENOMEM;
    if (!back) neap_method_load(rows, x, c->n_cells * width);
    if (!back && is_k) neap_method_turn(l, x, c->n_cells, width, false);
    for (size_t r = 0; r < c->n_cells; r++)
        for (size_t h = 0; h < l->n_kv_heads; h++) {
            uint16_t *head = (uint16_t *)plane_at(to, (uint32_t)r).data + h * columns + first;
            if (back)
                neap_method_load(head, x + r * width + h * dim, dim);
            else
                neap_method_store(x + r * width + h * dim, head, dim);
        }
    if (back && is_k) neap_method_turn(l, x, c->n_cells, width, true);
    if (back) neap_method_store(x, rows, c->n_cells * width);
    free(x);
    return 0;
}

/* The source of a layer as K of the view, its target as V. The first layer, before which there is
 * none, takes its own other half for its source. */
static int make_pair(const context *c, uint32_t layer, unsigned pair, lowram_view *view) {
    const bool to_k = pair & TO_K;
    const uint32_t from = pair & PREVIOUS && layer > 0 ? layer - 1 : layer;
    if (pair & PREVIOUS && layer == 0) pair = to_k ? TO_K | FROM_V : FROM_K;
    const neap_session_layer *target = &c->layers[layer], *source = &c->layers[from];
    const uint32_t heads = target->n_kv_heads, k_dim = pair & FROM_K ? source->k_head_dim : 0,
                   dim = k_dim + (pair & FROM_V ? source->v_head_dim : 0),
                   to_dim = neap_method_dim(target, to_k);
    if (source->n_kv_heads != heads) return -ENOTSUP;
    view->layers[0] = (neap_lowram_layer){.layer = target->layer,
                                          .n_kv_heads = heads,
                                          .k_head_dim = dim,
                                          .v_head_dim = to_dim,
                                          .rope = {NEAP_KLT_ROPE_NONE, .magnitude = 1}};
    view->k[0].row_stride = sizeof(uint16_t) * heads * dim;
    view->v[0].row_stride = sizeof(uint16_t) * heads * to_dim;
    view->k[0].data = malloc(c->n_cells * view->k[0].row_stride);
    view->v[0].data = malloc(c->n_cells * view->v[0].row_stride);
    int err = view->k[0].data && view->v[0].data ? 0 : -ENOMEM;
    if (!err && pair & FROM_K) err = copy_rows(c, from, true, view->k[0], dim, 0, false);
    if (!err && pair & FROM_V) err = copy_rows(c, from, false, view->k[0], dim, k_dim, false);
    return err ? err : copy_rows(c, layer, to_k, view->v[0], to_dim, 0, false);
}

/* All but the target is kept as it is. */
static int apply_layer(const context *c, uint32_t layer, uint64_t *inout_bytes) {
    const unsigned pair = c->method->lowram.pair;
    const bool to_k = pair & TO_K;
    neap_lowram_options how = c->method->lowram.fit;
    neap_lowram_budget budget;
    lowram_view view;
    uint64_t bytes = 0;
    int err = alloc_view(c, 1, &view) ? make_pair(c, layer, pair, &view) : -ENOMEM;
    how.group_layers = 1;
    how.ratio = c->ratio;
    how.rank = view.layers ? view.layers[0].n_kv_heads * view.layers[0].k_head_dim : 0;
    how.a_bits = how.b_bits = NEAP_LOWRAM_F16;
    how.factorisation = NEAP_LOWRAM_GRAM;
    if (!err) err = neap_lowram_plan(&how, view.layers, 1, c->n_cells, &budget);
    if (!err) err = fit_view(c, &how, &view, 1, &bytes);
    if (!err)
        err =
            copy_rows(c, layer, to_k, view.v[0], neap_method_dim(&c->layers[layer], to_k), 0, true);
    if (!err)
        *inout_bytes += bytes - budget.key_bytes + c->n_cells * row_bytes(&c->layers[layer], !to_k);
    if (view.k) free(view.k[0].data);
    if (view.v) free(view.v[0].data);
    free_view(&view);
    return err;
}

/* From the last layer on: sources are as they were. */
static int apply_pair(const context *c, uint64_t *inout_bytes) {
    int err = 0;
    for (uint32_t l = c->n_layers; l-- > 0 && !err;)
        err = apply_layer(c, l, inout_bytes);
    return err;
}

static int apply_all(const context *c, uint64_t *inout_bytes) {
    neap_lowram_options how = c->method->lowram.fit;
    lowram_view view;
    how.ratio = c->ratio;
    const int err =
        view_state(c, &view) ? fit_view(c, &how, &view, c->n_layers, inout_bytes) : -ENOMEM;
    free_view(&view);
    return err;
}

int neap_method_lowram(const context *c, uint64_t *inout_bytes) {
    int err = neap_method_require_rope(c);
    if (!err) err = c->method->lowram.pair ? apply_pair(c, inout_bytes) : apply_all(c, inout_bytes);
    if (!err) return 0;
    return neap_cli_error(NEAP_EXIT_FAILED, "a longer context, or a smaller ratio", "%s: %s",
                          c->method->name, neap_strerror(err));
}
