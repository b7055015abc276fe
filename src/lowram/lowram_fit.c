/* lowram_fit.c - bases and predictors from a context, one group after the other: what is needed for
 * one is given back before the next (Appendix B). */
#include <cblas.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "lowram_int.h"
#include "neap.h"
#include "subspace.h"

enum { ROWS = NEAP_LOWRAM_ROWS, MEASURED_CHUNKS = 16, CHUNKS_MAX = 1 << 14 };

/* The rows that a fit of one group looks at: whole chunks, evenly spread. */
typedef struct group_view {
    const neap_lowram_options *options;
    const neap_lowram_context *context;
    const neap_klt_plane *k, *v; /* of the group's first layer */
    neap_lowram_part *part;
    uint32_t n_chunks, n_seen; /* of the context; of those looked at */
    uint32_t n;                /* rows in these that are not exact */
    bool *exact;               /* [n_seen][ROWS] */
    uint32_t *first;           /* [n_seen + 1] their first row of n */
} group_view;

static neap_lowram_chunk chunk_at(const group_view *view, uint32_t seen, uint32_t n_seen) {
    const uint32_t at = neap_lowram_sampled(seen, n_seen, view->n_chunks) * ROWS,
                   left = view->context->n_rows - at;
    neap_lowram_chunk chunk = {.n_rows = left < ROWS ? left : ROWS,
                               .positions = view->context->positions + at};
    for (uint32_t l = 0; l < view->part->shape.n_layers; l++) {
        const neap_klt_plane *k = &view->k[l], *v = &view->v[l];
        chunk.k[l] = (neap_klt_plane){(char *)k->data + at * k->row_stride, k->row_stride};
        chunk.v[l] = (neap_klt_plane){(char *)v->data + at * v->row_stride, v->row_stride};
    }
    return chunk;
}

static uint32_t rows_of(const group_view *view, uint32_t seen) {
    return view->first[seen + 1] - view->first[seen];
}

static int view_init(group_view *view) {
    const uint32_t n_rows = view->context->n_rows, asked = view->options->sample_rows;
    view->n_chunks = (n_rows + ROWS - 1) / ROWS;
    const uint32_t n_wanted = (uint32_t)(((uint64_t)asked + ROWS - 1) / ROWS);
    view->n_seen = n_wanted > 0 && n_wanted < view->n_chunks ? n_wanted : view->n_chunks;
    view->exact = malloc((size_t)view->n_seen * ROWS * sizeof *view->exact);
    view->first = malloc((view->n_seen + 1) * sizeof *view->first);
    if (!view->exact || !view->first) return -ENOMEM;
    for (uint32_t s = 0; s < view->n_seen; s++) {
        const neap_lowram_chunk chunk = chunk_at(view, s, view->n_seen);
        view->first[s] = view->n;
        view->n += neap_lowram_exact(view->part, &chunk, view->exact + (size_t)s * ROWS);
    }
    view->first[view->n_seen] = view->n;
    return view->n > 0 ? 0 : -EDOM;
}

static void view_fini(group_view *view) {
    free(view->exact);
    free(view->first);
}

static int go_on(const neap_lowram_options *options, uint32_t first_layer, uint32_t n_layers) {
    return options->go_on ? options->go_on(options->go_on_ctx, first_layer, n_layers) : 0;
}

/* ---- keys ---- */

/* x[n][k_columns], centred. */
static int read_keys(const group_view *view, float *x) {
    neap_lowram_part *part = view->part;
    const uint32_t columns = neap_lowram_k_columns(&part->shape);
    double *sum = calloc(columns, sizeof *sum);
    float *tables = malloc((size_t)ROWS * part->shape.k_head_dim * sizeof *tables);
    const int err = sum && tables ? 0 : -ENOMEM;
    for (uint32_t s = 0; s < view->n_seen && !err; s++) {
        const neap_lowram_chunk chunk = chunk_at(view, s, view->n_seen);
        neap_lowram_read_keys(part, &chunk, view->exact + (size_t)s * ROWS, tables,
                              x + (size_t)view->first[s] * columns);
    }
    for (size_t r = 0; r < view->n && !err && !view->options->not_centred; r++)
        for (uint32_t c = 0; c < columns; c++)
            sum[c] += (double)x[r * columns + c];
    for (uint32_t c = 0; c < columns && !err; c++)
        part->mean[c] = (float)(sum[c] / view->n);
    neap_lowram_round(part->mean, columns);
    for (size_t r = 0; r < view->n && !err; r++)
        for (uint32_t c = 0; c < columns; c++)
            x[r * columns + c] -= part->mean[c];
    free(sum);
    free(tables);
    return err;
}

/* B' as the first directions of x, turned at random: rows of x that are quantised after projection
 * are then alike in all of their elements. */
static int fit_basis(const group_view *view, const float *x) {
    neap_lowram_part *part = view->part;
    const uint32_t columns = neap_lowram_k_columns(&part->shape), rank = part->shape.rank;
    const int way = view->options->factorisation;
    float *directions = malloc(((size_t)rank * columns + (size_t)rank * rank) * sizeof *directions);
    if (!directions) return -ENOMEM;
    float *turn = directions + (size_t)rank * columns;
    const bool is_random = way == NEAP_LOWRAM_RANDOMISED ||
                           (way == NEAP_LOWRAM_AUTO && neap_subspace_is_wide(columns, rank));
    int err = is_random
                  ? neap_subspace_randomised(x, view->n, columns, rank, part->seed, directions)
                  : neap_subspace_gram(x, view->n, columns, rank, directions);
    if (!err) err = neap_turbo_turn(part->seed + 1, rank, turn);
    if (!err) {
        cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)columns, (int)rank, (int)rank, 1,
                    directions, (int)columns, turn, (int)rank, 0, part->basis, (int)rank);
        neap_turbo turbo;
        neap_turbo_init(&turbo, part->shape.b_bits);
        for (size_t c = 0; c < columns; c++)
            neap_turbo_encode(&turbo, part->basis + c * rank, rank,
                              part->basis_rows + c * neap_turbo_row_bytes(turbo.bits, rank));
        err = neap_lowram_part_derive(part);
    }
    free(directions);
    return err;
}

/* The rows a[n][rank] as they will be decoded. */
static int fit_keys(const group_view *view, float *ret_a) {
    neap_lowram_part *part = view->part;
    const size_t columns = neap_lowram_k_columns(&part->shape), rank = part->shape.rank;
    float *x = malloc(view->n * columns * sizeof *x);
    uint8_t *coded = malloc(ROWS * neap_turbo_row_bytes(part->shape.a_bits, part->shape.rank));
    int err = x && coded ? 0 : -ENOMEM;
    if (!err) err = read_keys(view, x);
    if (!err) err = go_on(view->options, 0, 0);
    if (!err) err = fit_basis(view, x);
    for (uint32_t s = 0; s < view->n_seen && !err; s++)
        neap_lowram_project(part, x + view->first[s] * columns, rows_of(view, s), coded,
                            ret_a + view->first[s] * rank);
    free(coded);
    free(x);
    return err;
}

/* ---- values ---- */

static int descending(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* Above which score a share of the rows lies. */
static float limit_of(float *scores, uint32_t n, uint32_t n_above) {
    if (n_above >= n) return -1;
    qsort(scores, n, sizeof *scores, descending);
    return scores[n_above];
}

/* inputs[n][row], values[n][v_head_dim] of one head. */
static void read_head(const group_view *view, uint32_t head, const float *a, size_t row,
                      float *inputs, float *values) {
    const neap_lowram_part *part = view->part;
    for (uint32_t s = 0; s < view->n_seen; s++) {
        const neap_lowram_chunk chunk = chunk_at(view, s, view->n_seen);
        const size_t at = view->first[s];
        neap_lowram_inputs(part, a + at * part->shape.rank, rows_of(view, s), head,
                           inputs + at * row);
        neap_lowram_read_values(part, &chunk, view->exact + (size_t)s * ROWS, head,
                                values + at * part->shape.v_head_dim);
    }
}

/* What a head's residuals score; values become residuals. */
static void score_head(const group_view *view, uint32_t head, size_t row, const float *inputs,
                       float *values, float *predicted, float *ret_scores) {
    const neap_lowram_part *part = view->part;
    const uint32_t dim = part->shape.v_head_dim;
    for (uint32_t s = 0; s < view->n_seen; s++) {
        const neap_lowram_chunk chunk = chunk_at(view, s, view->n_seen);
        const size_t at = view->first[s], n = rows_of(view, s);
        neap_value_predict(neap_lowram_predictor(part, head), inputs + at * row, n, predicted);
        neap_value_residuals(values + at * dim, predicted, n, dim, predicted, ret_scores + at);
        neap_lowram_scores(part, &chunk, view->exact + (size_t)s * ROWS, head, ret_scores + at);
    }
}

static int fit_predictor(const group_view *view, uint32_t head, size_t n, const float *inputs,
                         const float *values) {
    const neap_lowram_options *options = view->options;
    neap_lowram_part *part = view->part;
    neap_value_options how =
        options->values ? *options->values : neap_value_defaults(NEAP_VALUE_RIDGE);
    const uint32_t kv_heads = part->shape.n_kv_heads;
    neap_value *value = &part->predictors[part->shared_predictor ? head / kv_heads : head];
    if (options->start)
        options->start(options->start_ctx, part->shape.layers[head / kv_heads], head % kv_heads,
                       part->mean + (size_t)head * part->shape.k_head_dim, &how, value);
    const int err = neap_value_fit(inputs, values, n, &how, value);
    if (!err) neap_lowram_round(value->w1, neap_value_n_params(&value->shape));
    return err;
}

/* Heads [first, first + n_heads) share a predictor. room: head_room() floats, the same for all. */
static int fit_heads(const group_view *view, uint32_t first, uint32_t n_heads, uint32_t n_residuals,
                     const float *a, float *room) {
    neap_lowram_part *part = view->part;
    const size_t n = view->n, dim = part->shape.v_head_dim,
                 row = neap_lowram_value_shape(part, first).row;
    float *inputs = room, *values = inputs + n_heads * n * row,
          *scores = values + n_heads * n * dim, *predicted = scores + n;
    for (uint32_t h = 0; h < n_heads; h++)
        read_head(view, first + h, a, row, inputs + h * n * row, values + h * n * dim);
    const int err = fit_predictor(view, first, n_heads * n, inputs, values);
    for (uint32_t h = 0; h < n_heads && !err; h++) {
        score_head(view, first + h, row, inputs + h * n * row, values + h * n * dim, predicted,
                   scores);
        part->limits[first + h] = limit_of(scores, view->n, n_residuals);
    }
    return err;
}

static size_t head_room(const group_view *view, uint32_t n_heads) {
    const size_t dim = view->part->shape.v_head_dim,
                 row = neap_lowram_value_shape(view->part, 0).row;
    return n_heads * view->n * (row + dim) + view->n + ROWS * dim;
}

static int fit_values(const group_view *view, uint32_t n_residuals, const float *a) {
    const neap_lowram_part *part = view->part;
    const uint32_t together = part->shared_predictor ? part->shape.n_kv_heads : 1;
    float *room = malloc(head_room(view, together) * sizeof *room);
    int err = room ? 0 : -ENOMEM;
    for (uint32_t h = 0; h < neap_lowram_heads(&part->shape) && !err; h += together) {
        err = go_on(view->options, 0, 0);
        if (!err) err = fit_heads(view, h, together, n_residuals, a, room);
    }
    free(room);
    return err;
}

/* ---- groups ---- */

/* The mean error of some chunks, as encoding reports it. */
static int measure(const group_view *view) {
    neap_lowram_part *part = view->part;
    neap_lowram fit = {.n_groups = 1, .parts = part};
    const size_t cap = neap_lowram_bound(&fit, 0, ROWS);
    void *scratch = aligned_alloc(64, neap_lowram_part_scratch(part)), *coded = malloc(cap);
    const uint32_t n = view->n_seen < MEASURED_CHUNKS ? view->n_seen : MEASURED_CHUNKS;
    int err = scratch && coded ? 0 : -ENOMEM;
    neap_lowram_error sum = {0, 0};
    for (uint32_t s = 0; s < n && !err; s++) {
        const neap_lowram_chunk chunk = chunk_at(view, s, n);
        neap_lowram_error error;
        size_t len;
        err = neap_lowram_encode(&fit, &chunk, scratch, coded, cap, &len, &error);
        sum.keys += error.keys / (float)n;
        sum.values += error.values / (float)n;
    }
    part->shape.error = sum;
    free(scratch);
    free(coded);
    return err;
}

static int fit_group(const neap_lowram_options *options, const neap_lowram_context *context,
                     uint32_t first_layer, const neap_lowram_budget *budget,
                     neap_lowram_part *part) {
    group_view view = {.options = options,
                       .context = context,
                       .k = context->k + first_layer,
                       .v = context->v + first_layer,
                       .part = part};
    int err = neap_lowram_part_alloc(part);
    if (!err) err = view_init(&view);
    float *a = err ? NULL : malloc((size_t)view.n * part->shape.rank * sizeof *a);
    if (!err && !a) err = -ENOMEM;
    if (!err) err = fit_keys(&view, a);
    /* The budget is that of the whole context. */
    const uint32_t n_coded = neap_lowram_budget_rows(options, context->n_rows) - part->first_exact;
    const uint32_t n_residuals =
        (uint32_t)((uint64_t)budget->n_residuals * view.n / (n_coded > view.n ? n_coded : view.n));
    if (!err) err = fit_values(&view, n_residuals, a);
    if (!err) err = measure(&view);
    free(a);
    view_fini(&view);
    return err;
}

/* Adjacent layers of one shape, up to g. */
static uint32_t layers_together(const neap_lowram_options *options, const neap_lowram_layer *layers,
                                uint32_t n_left) {
    uint32_t n = 1;
    while (n < n_left && n < options->group_layers && layers[n].n_kv_heads == layers->n_kv_heads &&
           layers[n].k_head_dim == layers->k_head_dim && layers[n].v_head_dim == layers->v_head_dim)
        n++;
    return n;
}

static bool has_plan(const neap_lowram_options *options, const neap_lowram_layer *layers,
                     uint32_t n_layers, uint32_t n_rows) {
    for (uint32_t l = 0, n; l < n_layers; l += n) {
        neap_lowram_part part;
        neap_lowram_budget budget;
        n = layers_together(options, layers + l, n_layers - l);
        if (neap_lowram_part_plan(options, layers + l, n, n_rows, &part, &budget) != 0)
            return false;
    }
    return true;
}

uint32_t neap_lowram_rows_needed(const neap_lowram_options *options,
                                 const neap_lowram_layer *layers, uint32_t n_layers) {
    /* What a context costs whatever its rows weighs less and less: more rows never spoil a plan. */
    uint32_t too_few = 0, enough = 1;
    while (enough <= CHUNKS_MAX && !has_plan(options, layers, n_layers, enough * ROWS)) {
        too_few = enough;
        enough *= 2;
    }
    if (enough > CHUNKS_MAX) return 0;
    while (enough - too_few > 1) {
        const uint32_t middle = too_few + (enough - too_few) / 2;
        *(has_plan(options, layers, n_layers, middle * ROWS) ? &enough : &too_few) = middle;
    }
    return enough * ROWS;
}

int neap_lowram_fit(const neap_lowram_options *options, const neap_lowram_layer *layers,
                    uint32_t n_layers, const neap_lowram_context *context, neap_lowram **ret_fit) {
    if (n_layers < 1 || options->group_layers < 1 || options->group_layers > NEAP_LOWRAM_LAYERS)
        return NEAP_E_BOUND;
    neap_lowram_part *parts = calloc(n_layers, sizeof *parts);
    uint8_t *bytes = NULL;
    size_t len = 0;
    uint32_t n_parts = 0;
    int err = parts ? 0 : -ENOMEM;
    for (uint32_t l = 0; l < n_layers && !err;) {
        const uint32_t n = layers_together(options, layers + l, n_layers - l);
        neap_lowram_part *part = &parts[n_parts];
        neap_lowram_budget budget;
        if (n_parts == NEAP_LOWRAM_GROUPS || (l > 0 && layers[l].layer <= layers[l - 1].layer))
            err = NEAP_E_BOUND;
        if (!err)
            err = neap_lowram_part_plan(options, layers + l, n, context->n_rows, part, &budget);
        if (err) break;
        n_parts++;
        err = go_on(options, l, n);
        if (!err) err = fit_group(options, context, l, &budget, part);
        l += n;
    }
    if (!err) err = neap_lowram_store(parts, n_parts, &bytes, &len);
    if (!err) err = neap_lowram_open(bytes, len, ret_fit);
    for (uint32_t i = 0; i < n_parts; i++)
        neap_lowram_part_free(&parts[i]);
    free(bytes);
    free(parts);
    return err;
}
