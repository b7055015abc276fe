/* lowram_module.c - see lowram_module.h. */
#include "lowram_module.h"
#include "lowram_int.h"

#include <cblas.h>
#include <errno.h>
#include <stdlib.h>

#include "neap.h"

typedef struct guest {
    neap_lowram *fit;
    float *row_bytes; /* [groups] a row takes, by the budget */
} guest;

static neap_lowram_chunk chunk_of(const neap_klt_chunk *chunk) {
    neap_lowram_chunk c = {
        .group = chunk->block, .n_rows = chunk->n_rows, .positions = chunk->positions};
    for (uint32_t l = 0; l < NEAP_KLT_LAYERS; l++) {
        c.k[l] = chunk->k[l];
        c.v[l] = chunk->v[l];
    }
    return c;
}

static size_t bound(const void *self, uint32_t block, uint32_t n_rows) {
    return neap_lowram_bound(((const guest *)self)->fit, block, n_rows);
}

static size_t expected_bytes(const void *self, uint32_t block, uint32_t n_rows) {
    return (size_t)(((const guest *)self)->row_bytes[block] * (float)n_rows);
}

static float over(float error, float of_fit) {
    return error / (of_fit > 1e-6f ? of_fit : 1e-6f);
}

/* The error is how many times the fit's own it is, of keys or of values. */
static int encode(const void *self, const neap_klt_chunk *chunk, void *scratch, void *dst,
                  size_t cap, size_t *ret_len, float *ret_error) {
    const guest *g = self;
    const neap_lowram_chunk c = chunk_of(chunk);
    neap_lowram_error error;
    const int err = neap_lowram_encode(g->fit, &c, scratch, dst, cap, ret_len, &error);
    if (err || !ret_error) return err;
    const neap_lowram_error *made = &neap_lowram_group_at(g->fit, chunk->block)->error;
    const float keys = over(error.keys, made->keys), values = over(error.values, made->values);
    *ret_error = keys > values ? keys : values;
    return 0;
}

static int decode(const void *self, const void *src, size_t len, const neap_klt_chunk *chunk,
                  const neap_klt_part *part, void *scratch) {
    const neap_lowram_chunk c = chunk_of(chunk);
    return neap_lowram_decode_part(((const guest *)self)->fit, src, len, &c, part, scratch);
}

static void free_guest(void *self) {
    guest *g = self;
    neap_lowram_free(g->fit);
    free(g->row_bytes);
    free(g);
}

static const neap_klt_guest calls = {bound, expected_bytes, encode, decode, free_guest};

static neap_klt_block block_of(const neap_lowram_group *group) {
    neap_klt_block block = {.n_layers = group->n_layers,
                            .n_kv_heads = group->n_kv_heads,
                            .k_head_dim = group->k_head_dim,
                            .v_head_dim = group->v_head_dim};
    for (uint32_t l = 0; l < group->n_layers; l++)
        block.layers[l] = group->layers[l];
    return block;
}

/* Blocks of the groups, and what the budget gives a row of each. */
static int describe(const neap_lowram_options *options, const neap_lowram_layer *layers,
                    uint32_t n_rows, guest *g, neap_klt_block *ret_blocks) {
    for (uint32_t i = 0; i < neap_lowram_n_groups(g->fit); i++) {
        neap_lowram_budget budget;
        ret_blocks[i] = block_of(neap_lowram_group_at(g->fit, i));
        const int err = neap_lowram_plan(options, layers, ret_blocks[i].n_layers, n_rows, &budget);
        if (err) return err;
        g->row_bytes[i] = (float)(budget.key_bytes + budget.value_bytes - budget.fixed_key_bytes -
                                  budget.fixed_value_bytes) /
                          (float)neap_lowram_budget_rows(options, n_rows);
        layers += ret_blocks[i].n_layers;
    }
    return 0;
}

static int make(const neap_lowram_options *options, const neap_lowram_layer *layers,
                uint32_t n_layers, const neap_lowram_context *context, neap_klt_model **ret_model) {
    if (options->group_layers > NEAP_KLT_LAYERS) return NEAP_E_BOUND;
    guest *g = calloc(1, sizeof *g);
    neap_klt_block *blocks = malloc(n_layers * sizeof *blocks);
    if (g) g->row_bytes = malloc(n_layers * sizeof *g->row_bytes);
    int err = g && blocks && g->row_bytes ? 0 : -ENOMEM;
    if (!err) err = neap_lowram_fit(options, layers, n_layers, context, &g->fit);
    if (!err) err = describe(options, layers, context->n_rows, g, blocks);
    if (!err) {
        neap_klt_guest_model model = {.guest = &calls,
                                      .self = g,
                                      .blocks = blocks,
                                      .n_blocks = neap_lowram_n_groups(g->fit),
                                      .id = neap_lowram_id(g->fit),
                                      .scratch_bytes = neap_lowram_scratch_bytes(g->fit)};
        neap_lowram_bytes(g->fit, &model.bytes);
        neap_lowram_forget_bytes(g->fit);
        model.memory_bytes = neap_lowram_memory(g->fit);
        err = neap_klt_model_of_guest(&model, ret_model);
    }
    if (err && g) free_guest(g);
    free(blocks);
    return err;
}

static void open_module(void (*log)(int level, const char *line, void *ctx), void *ctx) {
    neap_set_log(log, ctx);
    openblas_set_num_threads(1);
}

NEAP_API const neap_lowram_module neap_lowram_entry = {
    NEAP_VERSION, open_module, neap_lowram_defaults, neap_lowram_rows_needed, make};
