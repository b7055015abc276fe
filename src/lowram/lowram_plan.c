/* lowram_plan.c - options, shapes, and what they cost in bytes. */
#include <math.h>
#include <string.h>

#include "bytes.h"
#include "lowram_int.h"
#include "neap.h"

void neap_lowram_defaults(neap_lowram_options *ret_options, double ratio) {
    *ret_options = (neap_lowram_options){.ratio = ratio,
                                         .group_layers = 4,
                                         .residual_share = -1,
                                         .a_bits = 5,
                                         .b_bits = NEAP_LOWRAM_F16,
                                         .residual_bits = 2,
                                         .hidden_factor = 1,
                                         .first_exact = NEAP_KLT_FIRST_EXACT,
                                         .seed = 1};
}

/* ---- shapes ---- */

uint32_t neap_lowram_heads(const neap_lowram_group *group) {
    return group->n_layers * group->n_kv_heads;
}

uint32_t neap_lowram_k_columns(const neap_lowram_group *group) {
    return neap_lowram_heads(group) * group->k_head_dim;
}

uint32_t neap_lowram_v_columns(const neap_lowram_group *group) {
    return neap_lowram_heads(group) * group->v_head_dim;
}

uint32_t neap_lowram_n_predictors(const neap_lowram_part *part) {
    return part->shared_predictor ? part->shape.n_layers : neap_lowram_heads(&part->shape);
}

const neap_value *neap_lowram_predictor(const neap_lowram_part *part, uint32_t head) {
    return &part->predictors[part->shared_predictor ? head / part->shape.n_kv_heads : head];
}

neap_value_shape neap_lowram_value_shape(const neap_lowram_part *part, uint32_t head) {
    const neap_lowram_group *group = &part->shape;
    const uint32_t dk = part->source == NEAP_LOWRAM_FROM_ROW ? group->rank : group->k_head_dim;
    neap_value_shape shape = neap_value_shape_of(dk, group->v_head_dim, group->hidden);
    if (part->source == NEAP_LOWRAM_FROM_LAYER) {
        shape.row = shape.d_lin = group->n_kv_heads * dk;
        shape.first = head % group->n_kv_heads * dk;
    }
    return shape;
}

uint64_t neap_lowram_fixed_key_bytes(const neap_lowram_part *part) {
    const neap_lowram_group *group = &part->shape;
    const uint64_t columns = neap_lowram_k_columns(group);
    uint64_t bytes = NEAP_LOWRAM_GROUP_HEADER;
    for (uint32_t l = 0; l < group->n_layers; l++)
        bytes += NEAP_LOWRAM_ROPE_HEADER + 2 * (uint64_t)part->ropes[l].n_dims;
    return bytes + columns * (2 + neap_turbo_row_bytes(group->b_bits, group->rank));
}

uint64_t neap_lowram_fixed_value_bytes(const neap_lowram_part *part) {
    const neap_value_shape shape = neap_lowram_value_shape(part, 0);
    return neap_lowram_heads(&part->shape) * (uint64_t)sizeof(float) +
           neap_lowram_n_predictors(part) * 2 * (uint64_t)neap_value_n_params(&shape);
}

static bool are_bits(uint32_t bits) {
    return (bits >= 1 && bits <= NEAP_TURBO_BITS) || bits == NEAP_LOWRAM_F16;
}

static const char *wrong_rope(const neap_klt_rope *rope, uint32_t head_dim) {
    if (rope->mode > NEAP_KLT_ROPE_NEOX) return "the mode of a layer's RoPE";
    if (rope->n_dims % 2 || rope->n_dims > head_dim ||
        (rope->n_dims == 0) != (rope->mode == NEAP_KLT_ROPE_NONE))
        return "the dims of a layer's RoPE";
    if (!(rope->magnitude >= 1e-3f && rope->magnitude <= 1e3f)) return "the magnitude of a RoPE";
    for (uint32_t i = 0; i < rope->n_dims / 2; i++)
        if (!(fabsf(rope->radians[i]) <= 64)) return "an angle of a layer's RoPE";
    return NULL;
}

static const char *wrong_layers(const neap_lowram_part *part) {
    const neap_lowram_group *group = &part->shape;
    if (group->n_layers < 1 || group->n_layers > NEAP_LOWRAM_LAYERS) return "the layers of a group";
    if (group->n_kv_heads < 1 || group->n_kv_heads > NEAP_LOWRAM_HEADS)
        return "the KV heads of a group";
    if (group->k_head_dim < 1 || group->k_head_dim > NEAP_LOWRAM_HEAD_DIM ||
        group->v_head_dim < 1 || group->v_head_dim > NEAP_LOWRAM_HEAD_DIM)
        return "the elements of a group's heads";
    if (neap_lowram_k_columns(group) > NEAP_LOWRAM_COLUMNS ||
        neap_lowram_v_columns(group) > NEAP_LOWRAM_COLUMNS)
        return "the columns of a group";
    for (uint32_t l = 0; l < group->n_layers; l++) {
        if (group->layers[l] > INT32_MAX || (l > 0 && group->layers[l] <= group->layers[l - 1]))
            return "the layers of a group do not ascend";
        const char *wrong = wrong_rope(&part->ropes[l], group->k_head_dim);
        if (wrong) return wrong;
    }
    return NULL;
}

const char *neap_lowram_wrong(const neap_lowram_part *part) {
    const neap_lowram_group *group = &part->shape;
    const char *wrong = wrong_layers(part);
    if (wrong) return wrong;
    if (group->rank < 1 || group->rank > neap_lowram_k_columns(group)) return "the rank";
    if (!are_bits(group->a_bits) || !are_bits(group->b_bits) || !are_bits(group->residual_bits))
        return "the bits of a quantiser";
    if (part->source > NEAP_LOWRAM_FROM_ROW) return "what values are predicted from";
    if (part->residuals > NEAP_LOWRAM_RANDOM) return "which residuals are kept";
    if (part->shared_predictor > (part->source != NEAP_LOWRAM_FROM_LAYER))
        return "whether a predictor is shared";
    if (part->first_exact > INT32_MAX) return "the exact rows";
    const neap_value_shape shape = neap_lowram_value_shape(part, 0);
    if (shape.hidden > NEAP_VALUE_WIDTH || shape.row > NEAP_VALUE_WIDTH ||
        shape.dk > NEAP_VALUE_WIDTH)
        return "the size of a predictor";
    if (!(group->error.keys >= 0 && group->error.values >= 0)) return "the error of the fit";
    return NULL;
}

/* ---- budgets ---- */

static int part_of(const neap_lowram_options *options, const neap_lowram_layer *layers,
                   uint32_t n_layers, neap_lowram_part *ret_part) {
    const bool are_counts = n_layers >= 1 && n_layers <= NEAP_LOWRAM_LAYERS &&
                            options->source >= 0 && options->residuals >= 0 &&
                            options->factorisation >= NEAP_LOWRAM_AUTO &&
                            options->factorisation <= NEAP_LOWRAM_RANDOMISED;
    if (!are_counts || !(options->hidden_factor >= 0 && options->hidden_factor <= 64) ||
        !(options->residual_share <= 1))
        return NEAP_E_BOUND;
    *ret_part = (neap_lowram_part){.shape = {.n_layers = n_layers,
                                             .n_kv_heads = layers->n_kv_heads,
                                             .k_head_dim = layers->k_head_dim,
                                             .v_head_dim = layers->v_head_dim,
                                             .rank = 1,
                                             .a_bits = options->a_bits,
                                             .b_bits = options->b_bits,
                                             .residual_bits = options->residual_bits},
                                   .source = (uint32_t)options->source,
                                   .residuals = (uint32_t)options->residuals,
                                   .first_exact = options->first_exact,
                                   .shared_predictor = options->shared_predictor,
                                   .seed = options->seed};
    for (uint32_t l = 0; l < n_layers; l++) {
        ret_part->shape.layers[l] = layers[l].layer;
        ret_part->ropes[l] = layers[l].rope;
    }
    return neap_lowram_wrong(ret_part) ? NEAP_E_BOUND : 0;
}

/* The rows of a context in whole chunks but the last. */
typedef struct extent {
    uint64_t n_exact, n_coded, n_chunks, map_bytes;
} extent;

static extent extent_of(uint32_t n_rows, uint32_t first_exact) {
    const uint64_t n_exact = first_exact < n_rows ? first_exact : n_rows;
    const uint32_t whole = n_rows / NEAP_LOWRAM_ROWS, rest = n_rows % NEAP_LOWRAM_ROWS;
    return (extent){n_exact, n_rows - n_exact, whole + (rest > 0),
                    (uint64_t)whole * NEAP_LOWRAM_ROWS / 8 + (rest + 7) / 8};
}

static uint64_t key_bytes(const neap_lowram_part *part, const extent *rows) {
    const neap_lowram_group *group = &part->shape;
    return neap_lowram_fixed_key_bytes(part) + rows->n_chunks * NEAP_LOWRAM_CHUNK_HEADER +
           rows->n_coded * neap_turbo_row_bytes(group->a_bits, group->rank) +
           rows->n_exact * (1 + 2 * (uint64_t)neap_lowram_k_columns(group));
}

static uint64_t value_bytes(const neap_lowram_part *part, const extent *rows,
                            uint64_t n_residuals) {
    const neap_lowram_group *group = &part->shape;
    const uint64_t a_head =
        rows->map_bytes +
        n_residuals * neap_turbo_row_bytes(group->residual_bits, group->v_head_dim);
    return neap_lowram_fixed_value_bytes(part) + neap_lowram_heads(group) * a_head +
           rows->n_exact * 2 * neap_lowram_v_columns(group);
}

/* The largest rank within the budget; 0: none. */
static uint32_t rank_within(neap_lowram_part *part, const extent *rows, double budget) {
    const uint32_t columns = neap_lowram_k_columns(&part->shape);
    part->shape.rank = columns < rows->n_coded ? columns : (uint32_t)rows->n_coded;
    while (part->shape.rank > 0 && (double)key_bytes(part, rows) > budget)
        part->shape.rank--;
    return part->shape.rank;
}

static int choose_residuals(const neap_lowram_options *options, const neap_lowram_part *part,
                            const extent *rows, double budget, uint32_t *ret_n) {
    const neap_lowram_group *group = &part->shape;
    double n = options->residual_share * (double)rows->n_coded;
    if (options->residual_share < 0) {
        const size_t bytes = neap_turbo_row_bytes(group->residual_bits, group->v_head_dim);
        n = floor((budget - (double)value_bytes(part, rows, 0)) / neap_lowram_heads(group) /
                  (double)bytes);
        if (!(n >= 0)) return NEAP_E_BUDGET;
    }
    *ret_n = (uint32_t)llround(fmin(n, (double)rows->n_coded));
    return 0;
}

uint32_t neap_lowram_budget_rows(const neap_lowram_options *options, uint32_t n_rows) {
    return n_rows > options->budget_rows ? n_rows : options->budget_rows;
}

static bool is_ratio(double ratio) {
    return ratio >= 1 && ratio <= 1e6;
}

int neap_lowram_part_plan(const neap_lowram_options *options, const neap_lowram_layer *layers,
                          uint32_t n_layers, uint32_t n_rows, neap_lowram_part *ret_part,
                          neap_lowram_budget *ret_budget) {
    const double key_ratio = options->key_ratio > 0 ? options->key_ratio : options->ratio;
    const double value_ratio = options->value_ratio > 0 ? options->value_ratio : options->ratio;
    neap_lowram_part part;
    n_rows = neap_lowram_budget_rows(options, n_rows);
    int err = part_of(options, layers, n_layers, &part);
    if (err) return err;
    neap_lowram_group *group = &part.shape;
    const double raw_k = 2.0 * n_rows * neap_lowram_k_columns(group),
                 raw_v = 2.0 * n_rows * neap_lowram_v_columns(group);
    const extent rows = extent_of(n_rows, options->first_exact);
    if (options->rank > 0)
        group->rank = options->rank;
    else if (!is_ratio(key_ratio))
        return NEAP_E_BOUND;
    else if (!rank_within(&part, &rows, raw_k / key_ratio))
        return NEAP_E_BUDGET;
    if (options->residual_share < 0 && !is_ratio(value_ratio)) return NEAP_E_BOUND;
    const uint32_t dk = neap_lowram_value_shape(&part, 0).dk;
    group->hidden = (uint32_t)llround(options->hidden_factor * dk);
    if (rows.n_coded == 0 || neap_lowram_wrong(&part)) return NEAP_E_BOUND;
    neap_lowram_budget budget = {.rank = group->rank, .hidden = group->hidden};
    err = choose_residuals(options, &part, &rows, raw_v / value_ratio, &budget.n_residuals);
    if (err) return err;
    /* Once every row has its residual, what is left of the values' bytes is the keys'. */
    const double left = raw_v / value_ratio - (double)value_bytes(&part, &rows, rows.n_coded);
    if (options->rank == 0 && left > 0 && part.source != NEAP_LOWRAM_FROM_ROW)
        budget.rank = rank_within(&part, &rows, raw_k / key_ratio + left);
    budget.raw_bytes = (uint64_t)(raw_k + raw_v);
    budget.fixed_key_bytes = neap_lowram_fixed_key_bytes(&part);
    budget.fixed_value_bytes = neap_lowram_fixed_value_bytes(&part);
    budget.key_bytes = key_bytes(&part, &rows);
    budget.value_bytes = value_bytes(&part, &rows, budget.n_residuals);
    *ret_part = part;
    *ret_budget = budget;
    return 0;
}

int neap_lowram_plan(const neap_lowram_options *options, const neap_lowram_layer *layer,
                     uint32_t n_layers, uint32_t n_rows, neap_lowram_budget *ret_budget) {
    neap_lowram_layer layers[NEAP_LOWRAM_LAYERS];
    neap_lowram_part part;
    if (n_layers < 1 || n_layers > NEAP_LOWRAM_LAYERS) return NEAP_E_BOUND;
    for (uint32_t l = 0; l < n_layers; l++) {
        layers[l] = *layer;
        layers[l].layer = l;
    }
    return neap_lowram_part_plan(options, layers, n_layers, n_rows, &part, ret_budget);
}
