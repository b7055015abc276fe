/* fidelity_method.c - see fidelity_method.h.
 *
 * A method either works on one plane after the other - K or V of a layer, as f32 - or on the whole
 * state. */
#include "fidelity_int.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "codec.h"
#include "klt_file.h"
#include "low_rank.h"
#include "lowram.h"
#include "rope.h"
#include "turbo.h"

#define XKV_LAYERS 4u
#define KIVI_GROUP 32u
#define KIVI_EXACT 128u
#define LOWRAM_MOST 4.0 /* the most that the paper compresses kept tokens by (Table 10) */
#define LOWRAM_Q_MOST 6.4
#define HADAMARD 64u /* least size that llama.cpp turns heads by */
#define TURN_SEED 1u

typedef neap_method_context context;
typedef neap_method_plane plane;

/* ---- rows ---- */

int neap_method_require_rope(const context *c) {
    for (uint32_t i = 0; i < c->n_layers; i++)
        if (!c->layers[i].rope_known) return -ENOTSUP;
    return 0;
}

void neap_method_turn(const neap_session_layer *layer, float *rows, uint32_t n_rows, size_t stride,
                      bool back) {
    float table[NEAP_KLT_HEAD_DIM];
    for (uint32_t r = 0; r < n_rows; r++) {
        neap_rope_table(&layer->rope, (int32_t)r, table);
        for (uint32_t h = 0; h < layer->n_kv_heads; h++) {
            float *head = rows + r * stride + (size_t)h * layer->k_head_dim;
            if (back)
                neap_rope_turn(&layer->rope, table, head);
            else
                neap_rope_unturn(&layer->rope, table, head);
        }
    }
}

static int each_plane(const context *c, uint64_t *inout_bytes) {
    int status = 0;
    for (uint32_t i = 0; i < 2 * c->n_layers && !status; i++) {
        const neap_session_layer *layer = &c->layers[i / 2];
        const plane p = {.n_rows = c->n_cells,
                         .n_heads = layer->n_kv_heads,
                         .dim = neap_method_dim(layer, i % 2 == 0),
                         .is_k = i % 2 == 0,
                         .rows = c->rows};
        const size_t n = (size_t)p.n_rows * p.n_heads * p.dim;
        uint16_t *rows = neap_method_rows(c, i / 2, p.is_k);
        neap_method_load(rows, c->rows, n);
        status = c->method->kind->plane(c, &p, inout_bytes);
        neap_method_store(c->rows, rows, n);
    }
    return status;
}

/* ---- neap's codecs ---- */

static int apply_codec(const context *c, uint64_t *inout_bytes) {
    const neap_codec *codec = neap_codec_find(c->method->kind->name);
    const size_t n = c->n_layers * neap_kv_file_layer_chunks(c->state);
    int err = 0;
    for (size_t i = 0; i < n && !err; i++) {
        const neap_codec_chunk *chunk = &c->state->chunks[i];
        const size_t cap = codec->bound(chunk);
        void *room = malloc(cap);
        size_t len = 0;
        err = room ? codec->encode(chunk, room, cap, &len) : -ENOMEM;
        if (!err) err = codec->decode(room, len, chunk);
        *inout_bytes += len;
        free(room);
    }
    if (!err) return 0;
    return neap_cli_error(NEAP_EXIT_FAILED, NULL, "codec %s: %s", codec->name, neap_strerror(err));
}

/* ---- klt ---- */

/* Points the chunk at rows from first on; false: a layer of the block is not in the state, or its
 * heads are others. */
static bool klt_chunk_at(const context *c, uint32_t at, uint32_t first, neap_klt_chunk *chunk) {
    const neap_klt_block *block = &neap_klt_model_spec(c->method->klt)->blocks[at];
    const uint32_t left = c->n_cells - first;
    chunk->block = at;
    chunk->n_rows = left < NEAP_KLT_ROWS ? left : NEAP_KLT_ROWS;
    for (uint32_t i = 0; i < block->n_layers; i++) {
        uint32_t layer = 0;
        while (layer < c->n_layers && c->layers[layer].layer != block->layers[i])
            layer++;
        if (layer == c->n_layers || c->layers[layer].n_kv_heads != block->n_kv_heads ||
            c->layers[layer].k_head_dim != block->k_head_dim ||
            c->layers[layer].v_head_dim != block->v_head_dim)
            return false;
        const size_t k = (size_t)block->n_kv_heads * block->k_head_dim;
        const size_t v = (size_t)block->n_kv_heads * block->v_head_dim;
        chunk->k[i] = (neap_klt_plane){neap_method_rows(c, layer, true) + first * k, 2 * k};
        chunk->v[i] = (neap_klt_plane){neap_method_rows(c, layer, false) + first * v, 2 * v};
    }
    return true;
}

static int klt_cycle(const neap_klt_model *model, const neap_klt_chunk *chunk, void *scratch,
                     uint64_t *inout_bytes) {
    const size_t cap = neap_klt_bound(model, chunk);
    void *room = malloc(cap);
    size_t len = 0;
    int err = room ? neap_klt_encode(model, chunk, scratch, room, cap, &len, NULL) : -ENOMEM;
    if (!err) err = neap_klt_decode(model, room, len, chunk, scratch);
    *inout_bytes += len;
    free(room);
    return err;
}

static int apply_klt(const context *c, uint64_t *inout_bytes) {
    const neap_klt_model *model = c->method->klt;
    const neap_klt_spec *spec = neap_klt_model_spec(model);
    void *scratch = aligned_alloc(64, NEAP_ROUND_UP(neap_klt_scratch_bytes(model), 64));
    int32_t positions[NEAP_KLT_ROWS];
    uint32_t n_coded = 0;
    int err = scratch ? 0 : -ENOMEM;
    for (uint32_t block = 0; block < spec->n_blocks && !err; block++) {
        n_coded += spec->blocks[block].n_layers;
        for (uint32_t first = 0; first < c->n_cells && !err; first += NEAP_KLT_ROWS) {
            neap_klt_chunk chunk = {.positions = positions};
            if (!klt_chunk_at(c, block, first, &chunk)) err = NEAP_E_CHANGED;
            for (uint32_t i = 0; i < NEAP_KLT_ROWS; i++)
                positions[i] = (int32_t)(first + i);
            if (!err) err = klt_cycle(model, &chunk, scratch, inout_bytes);
        }
    }
    free(scratch);
    if (!err && n_coded == c->n_layers) return 0;
    return neap_cli_error(NEAP_EXIT_FAILED, "train it for this model", "%s: %s", c->method->name,
                          err ? neap_strerror(err) : "does not code every layer");
}

/* ---- eviction ---- */

/* Adds to scores[n_cells] what a layer says of them; history: room for the groups'. */
static int add_scores(const context *c, uint32_t layer, float *history, float *scores) {
    const neap_session_layer *shape = &c->layers[layer];
    const size_t n = c->n_cells, width = (size_t)shape->n_kv_heads * shape->k_head_dim;
    uint32_t n_seen[NEAP_SESSION_WINDOW];
    neap_session_queries queries;
    if (!neap_session_queries_of(c->session, layer, &queries)) return -ENOTSUP;
    float *k = malloc(n * width * sizeof *k), *own = malloc(n * sizeof *own);
    int err = k && own ? 0 : -ENOMEM;
    for (uint32_t i = 0; i < queries.n_tokens; i++)
        n_seen[i] = (uint32_t)n - queries.n_tokens + 1 + i;
    const neap_token_attention attention = {.n = n,
                                            .n_queries = queries.n_tokens,
                                            .n_heads = queries.n_heads,
                                            .n_kv_heads = shape->n_kv_heads,
                                            .head_dim = shape->k_head_dim,
                                            .scale = queries.scale,
                                            .q = queries.q,
                                            .k = k,
                                            .n_seen = n_seen};
    if (!err) neap_method_load(neap_method_rows(c, layer, true), k, n * width);
    if (!err) err = neap_token_history(&attention, history);
    if (!err && c->method->kind->by_mass)
        neap_token_mass(history, n, own);
    else if (!err)
        err = neap_token_predict(neap_learned_net(c->method->learned), history, n, own);
    for (size_t i = 0; i < n && !err; i++)
        scores[i] += c->method->kind->by_mass ? own[i] : expf(own[i]);
    free(k);
    free(own);
    return err;
}

/* The tokens to keep: one choice for all layers, as they share the cells of llama.cpp's cache. */
static int choose_tokens(const context *c, size_t n_kept) {
    float *history = malloc(NEAP_TOKEN_GROUPS * (size_t)c->n_cells * sizeof *history);
    float *scores = calloc(c->n_cells, sizeof *scores);
    c->kept->tokens = malloc(c->n_cells * sizeof *c->kept->tokens);
    int err = history && scores && c->kept->tokens ? 0 : -ENOMEM;
    for (uint32_t i = 0; i < c->n_layers && !err; i++)
        err = add_scores(c, i, history, scores);
    if (!err)
        err = neap_tokens_keep(scores, c->n_cells, n_kept, c->kept->tokens, &c->kept->n_tokens);
    free(history);
    free(scores);
    return err;
}

/* Moves the rows of the kept tokens to the front of their planes, or back. */
static void move_kept(const context *c, bool back) {
    const size_t n = c->kept->n_tokens;
    for (uint32_t i = 0; i < 2 * c->n_layers; i++) {
        const neap_session_layer *layer = &c->layers[i / 2];
        const size_t width = (size_t)layer->n_kv_heads * neap_method_dim(layer, i % 2 == 0);
        uint16_t *rows = neap_method_rows(c, i / 2, i % 2 == 0);
        for (size_t j = 0; j < n; j++) {
            const size_t front = back ? n - 1 - j : j, own = c->kept->tokens[front];
            memmove(rows + (back ? own : front) * width, rows + (back ? front : own) * width,
                    width * sizeof *rows);
        }
    }
}

/* Which tokens are kept takes a bit for each. */
static int apply_eviction(const context *c, uint64_t *inout_bytes) {
    const double most_rest = c->method->kind->rest;
    const neap_token_split split = neap_tokens_split(c->ratio, most_rest, c->n_cells);
    const int err = choose_tokens(c, split.n_kept);
    if (err)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: attention of this context: %s",
                              c->method->name, neap_strerror(err));
    context rest = *c;
    rest.n_cells = (uint32_t)c->kept->n_tokens;
    rest.ratio = split.rest;
    *inout_bytes += (c->n_cells + 7) / 8;
    if (most_rest == 1) {
        *inout_bytes +=
            neap_method_raw_bytes(c->session, c->state) / c->n_cells * c->kept->n_tokens;
        return 0;
    }
    move_kept(c, false);
    const int status = neap_method_lowram(&rest, inout_bytes);
    move_kept(c, true);
    return status;
}

/* ---- llama.cpp's types ---- */

/* x[n] by the orthonormal Walsh-Hadamard matrix of n, a power of two: its own inverse. */
static void hadamard(float *x, uint32_t n) {
    for (uint32_t half = 1; half < n; half *= 2)
        for (uint32_t i = 0; i < n; i += 2 * half)
            for (uint32_t j = i; j < i + half; j++) {
                const float a = x[j], b = x[j + half];
                x[j] = a + b;
                x[j + half] = a - b;
            }
    const float scale = 1 / sqrtf((float)n);
    for (uint32_t i = 0; i < n; i++)
        x[i] *= scale;
}

/* As llama.cpp does: heads of a multiple of 64 elements only; keys by the largest matrix that
 * divides a head, values by that of 64. */
static void rotate_heads(const plane *p) {
    if (p->dim % HADAMARD != 0) return;
    uint32_t n = HADAMARD;
    while (p->is_k && p->dim % (2 * n) == 0)
        n *= 2;
    const size_t n_all = (size_t)p->n_rows * p->n_heads * p->dim;
    for (size_t i = 0; i < n_all; i += n)
        hadamard(p->rows + i, n);
}

static int round_by_type(const context *c, const plane *p, uint64_t *inout_bytes) {
    const neap_method_kind *kind = c->method->kind;
    char type[16];
    size_t bytes = 0;
    snprintf(type, sizeof type, "%.*s", (int)strcspn(kind->name, "-"), kind->name);
    if (kind->flag) rotate_heads(p);
    const int status = neap_session_round(c->session, type, p->rows, p->n_rows,
                                          (size_t)p->n_heads * p->dim, &bytes);
    if (kind->flag) rotate_heads(p);
    *inout_bytes += bytes;
    return status;
}

/* ---- TurboQuant ---- */

/* Takes the mean of each column off, rounded to f16 as it is kept; ret_means[width]. */
static void centre(const plane *p, float *ret_means) {
    const size_t width = (size_t)p->n_heads * p->dim;
    for (size_t at = 0; at < width; at++) {
        double sum = 0;
        for (size_t r = 0; r < p->n_rows; r++)
            sum += (double)p->rows[r * width + at];
        ret_means[at] = neap_f32_of_f16(neap_f16_of_f32((float)(sum / p->n_rows)));
        for (size_t r = 0; r < p->n_rows; r++)
            p->rows[r * width + at] -= ret_means[at];
    }
}

/* head = its codes, decoded. */
static void cycle_head(const neap_turbo *turbo, const float *turn, uint32_t n, float *head) {
    float turned[NEAP_KLT_HEAD_DIM], back[NEAP_KLT_HEAD_DIM] = {0};
    uint8_t coded[2 + NEAP_KLT_HEAD_DIM];
    for (uint32_t i = 0; i < n; i++) {
        turned[i] = 0;
        for (uint32_t j = 0; j < n; j++)
            turned[i] += turn[i * n + j] * head[j];
    }
    neap_turbo_encode(turbo, turned, n, coded);
    neap_turbo_decode(turbo, coded, n, turned);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < n; j++)
            back[j] += turn[i * n + j] * turned[i];
    memcpy(head, back, n * sizeof *head);
}

static int round_turbo(const context *c, const plane *p, uint64_t *inout_bytes) {
    const size_t width = (size_t)p->n_heads * p->dim, n_heads = (size_t)p->n_rows * p->n_heads;
    const uint32_t bits = (uint32_t)c->method->parameter;
    const bool is_centred = c->method->kind->flag && p->is_k;
    neap_turbo turbo;
    float *turn = malloc((size_t)p->dim * p->dim * sizeof *turn);
    float *means = calloc(width, sizeof *means);
    int err = turn && means ? 0 : -ENOMEM;
    if (p->dim > NEAP_KLT_HEAD_DIM) err = NEAP_E_BOUND;
    if (!err) err = neap_turbo_turn(TURN_SEED, p->dim, turn);
    if (!err) neap_turbo_init(&turbo, bits);
    if (!err && is_centred) centre(p, means);
    for (size_t i = 0; i < n_heads && !err; i++)
        cycle_head(&turbo, turn, p->dim, p->rows + i * p->dim);
    for (size_t i = 0; i < n_heads * p->dim && !err; i++)
        p->rows[i] += means[i % width];
    free(turn);
    free(means);
    *inout_bytes += n_heads * neap_turbo_row_bytes(bits, p->dim) + (is_centred ? 2 * width : 0);
    if (!err) return 0;
    return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", c->method->name, neap_strerror(err));
}

/* ---- KIVI ---- */

/* n values, step apart, in so many levels between their least and greatest. */
static void round_group(float *x, size_t n, size_t step, double levels) {
    float least = x[0], most = x[0];
    for (size_t i = 1; i < n; i++) {
        least = fminf(least, x[i * step]);
        most = fmaxf(most, x[i * step]);
    }
    const float zero = neap_f32_of_f16(neap_f16_of_f32(least));
    const float scale = neap_f32_of_f16(neap_f16_of_f32((most - least) / (float)levels));
    for (size_t i = 0; i < n; i++) {
        const float code = scale > 0 ? roundf((x[i * step] - zero) / scale) : 0;
        x[i * step] = zero + scale * fminf(fmaxf(code, 0), (float)levels);
    }
}

static int round_kivi(const context *c, const plane *p, uint64_t *inout_bytes) {
    const size_t width = (size_t)p->n_heads * p->dim;
    const double bits = c->method->parameter, levels = exp2(bits) - 1;
    size_t n_coded = p->n_rows > KIVI_EXACT ? p->n_rows - KIVI_EXACT : 0;
    n_coded = NEAP_ROUND_DOWN(n_coded, KIVI_GROUP);
    for (size_t row = 0; row < n_coded; row++)
        for (size_t at = 0; at < width && !p->is_k; at += KIVI_GROUP)
            round_group(p->rows + row * width + at,
                        width - at < KIVI_GROUP ? width - at : KIVI_GROUP, 1, levels);
    for (size_t row = 0; row < n_coded && p->is_k; row += KIVI_GROUP)
        for (size_t at = 0; at < width; at++)
            round_group(p->rows + row * width + at, KIVI_GROUP, width, levels);
    const size_t groups =
        p->is_k ? n_coded / KIVI_GROUP * width : n_coded * ((width + KIVI_GROUP - 1) / KIVI_GROUP);
    *inout_bytes += (uint64_t)((double)(n_coded * width) * bits / 8) + 4 * groups +
                    2 * (p->n_rows - n_coded) * width;
    return 0;
}

/* ---- xKV ---- */

/* Rows of a layer to and from their columns of the group's matrix. */
static void move_columns(const context *c, uint32_t layer, bool is_k, float *columns, size_t stride,
                         bool back) {
    const size_t width =
        (size_t)c->layers[layer].n_kv_heads * neap_method_dim(&c->layers[layer], is_k);
    uint16_t *rows = neap_method_rows(c, layer, is_k);
    if (back && is_k) neap_method_turn(&c->layers[layer], columns, c->n_cells, stride, true);
    for (size_t r = 0; r < c->n_cells; r++) {
        if (back)
            neap_method_store(columns + r * stride, rows + r * width, width);
        else
            neap_method_load(rows + r * width, columns + r * stride, width);
    }
    if (!back && is_k) neap_method_turn(&c->layers[layer], columns, c->n_cells, stride, false);
}

static int truncate_group(const context *c, uint32_t first, uint32_t n_layers, bool is_k,
                          uint64_t *inout_bytes) {
    size_t n = 0, at = 0;
    for (uint32_t i = first; i < first + n_layers; i++)
        n += (size_t)c->layers[i].n_kv_heads * neap_method_dim(&c->layers[i], is_k);
    const double cells = c->n_cells;
    uint32_t rank = (uint32_t)(cells * (double)n / (c->method->parameter * (cells + (double)n)));
    rank = rank < 1 ? 1 : rank > n ? (uint32_t)n : rank;
    float *matrix = malloc(c->n_cells * n * sizeof *matrix);
    if (!matrix) return neap_method_no_memory();
    for (uint32_t i = first; i < first + n_layers; i++) {
        move_columns(c, i, is_k, matrix + at, n, false);
        at += (size_t)c->layers[i].n_kv_heads * neap_method_dim(&c->layers[i], is_k);
    }
    const int err = neap_low_rank(matrix, c->n_cells, (uint32_t)n, rank);
    at = 0;
    for (uint32_t i = first; i < first + n_layers && !err; i++) {
        move_columns(c, i, is_k, matrix + at, n, true);
        at += (size_t)c->layers[i].n_kv_heads * neap_method_dim(&c->layers[i], is_k);
    }
    free(matrix);
    *inout_bytes += 2 * (uint64_t)rank * (c->n_cells + n);
    if (!err) return 0;
    return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", c->method->name, neap_strerror(err));
}

static int apply_xkv(const context *c, uint64_t *inout_bytes) {
    const int err = neap_method_require_rope(c);
    int status =
        err ? neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", c->method->name, neap_strerror(err))
            : 0;
    for (uint32_t first = 0; first < c->n_layers && !status; first += XKV_LAYERS) {
        const uint32_t left = c->n_layers - first, n = left < XKV_LAYERS ? left : XKV_LAYERS;
        if (!c->method->kind->flag) status = truncate_group(c, first, n, true, inout_bytes);
        for (uint32_t i = first; i < first + n && c->method->kind->flag; i++)
            *inout_bytes +=
                2 * (uint64_t)c->n_cells * c->layers[i].n_kv_heads * c->layers[i].k_head_dim;
        if (!status) status = truncate_group(c, first, n, false, inout_bytes);
    }
    return status;
}

/* ---- the table ---- */

static const neap_method_kind kinds[] = {
    {.name = "none", .whole = apply_codec},
    {.name = "q8", .whole = apply_codec},
    {.name = "cachegen", .whole = apply_codec},
    {.name = "q8_0", .plane = round_by_type},
    {.name = "q8_0-rotated", .plane = round_by_type, .flag = true},
    {.name = "q5_0", .plane = round_by_type},
    {.name = "q5_0-rotated", .plane = round_by_type, .flag = true},
    {.name = "q4_0", .plane = round_by_type},
    {.name = "q4_0-rotated", .plane = round_by_type, .flag = true},
    {.name = "turboquant", .plane = round_turbo, .parameter = 4, .least = 1, .most = 8},
    {.name = "turboquant-centred",
     .plane = round_turbo,
     .parameter = 4,
     .least = 1,
     .most = 8,
     .flag = true},
    {.name = "kivi", .plane = round_kivi, .parameter = 2, .least = 1, .most = 8},
    {.name = "lowram", .whole = neap_method_lowram, .parameter = 4, .least = 1, .most = 64},
    {.name = "lowram-q",
     .whole = neap_method_lowram,
     .parameter = 4.25,
     .least = 1,
     .most = 64,
     .flag = true},
    {.name = "lowram-q-warm",
     .whole = neap_method_lowram,
     .parameter = 4.25,
     .least = 1,
     .most = 64,
     .flag = true,
     .warm = true},
    {.name = "evict", .whole = apply_eviction, .parameter = 2, .least = 1, .most = 64, .rest = 1},
    {.name = "evict-mass",
     .whole = apply_eviction,
     .parameter = 2,
     .least = 1,
     .most = 64,
     .rest = 1,
     .by_mass = true},
    {.name = "lowram-e",
     .whole = apply_eviction,
     .parameter = 4,
     .least = 3,
     .most = 64,
     .rest = LOWRAM_MOST},
    {.name = "lowram-e-mass",
     .whole = apply_eviction,
     .parameter = 4,
     .least = 3,
     .most = 64,
     .rest = LOWRAM_MOST,
     .by_mass = true},
    {.name = "lowram-eq",
     .whole = apply_eviction,
     .parameter = 8,
     .least = 3,
     .most = 64,
     .flag = true,
     .rest = LOWRAM_Q_MOST},
    {.name = "lowram-eq-mass",
     .whole = apply_eviction,
     .parameter = 8,
     .least = 3,
     .most = 64,
     .flag = true,
     .rest = LOWRAM_Q_MOST,
     .by_mass = true},
    {.name = "xkv", .whole = apply_xkv, .parameter = 4, .least = 1, .most = 64},
    {.name = "xkv-v", .whole = apply_xkv, .parameter = 4, .least = 1, .most = 64, .flag = true},
};
static const neap_method_kind klt_kind = {.name = "klt", .whole = apply_klt};

static int unknown(const char *name) {
    return neap_cli_error(NEAP_EXIT_USAGE, "see neap bench fidelity --help", "--method %s: unknown",
                          name);
}

/* [:PARAMETER][/OPTION...] */
static int parse_rest(const char *text, neap_method *method) {
    const neap_method_kind *kind = method->kind;
    const bool is_lowram = kind->whole == neap_method_lowram || kind->rest > 1;
    method->parameter = kind->parameter;
    if (*text == ':') {
        char *end;
        method->parameter = strtod(text + 1, &end);
        const bool is_whole = method->parameter == floor(method->parameter);
        if (!(kind->least > 0) || end == text + 1 || !(method->parameter >= kind->least) ||
            method->parameter > kind->most || !(is_whole || kind->whole)) /* bits are whole */
            return unknown(method->name);
        text = end;
    }
    neap_method_lowram_defaults(method);
    const bool is_good = is_lowram ? neap_method_lowram_options(text, method) : !*text;
    return is_good ? 0 : unknown(method->name);
}

/* The folder with what was learned for the model. */
static int find_learned(const char *model_path, uint64_t *ret_digest, char *folder, size_t cap) {
    const int err = neap_model_digest(model_path, ret_digest);
    return err ? err : neap_klt_folder(*ret_digest, folder, cap);
}

static int learned_failed(const char *path, int err, bool *ret_is_there) {
    *ret_is_there = err != -ENOENT;
    if (!err || err == -ENOENT) return 0;
    return neap_cli_error(NEAP_EXIT_FAILED, "train it again", "%s: %s", path, neap_strerror(err));
}

/* klt-PROFILE:RATIO; a file of a lower ratio serves too. */
static int open_klt(const char *model_path, neap_method *method, bool *ret_is_there) {
    static const char *const profiles[] = {"head", "layer", "joint"};
    char folder[NEAP_PATH_MAX - 64], *end;
    const char *profile = NULL, *text = method->name + strlen("klt-");
    uint64_t digest;
    for (size_t i = 0; i < 3; i++)
        if (strncmp(text, profiles[i], strlen(profiles[i])) == 0) profile = profiles[i];
    if (!profile || text[strlen(profile)] != ':') return unknown(method->name);
    text += strlen(profile) + 1;
    const double ratio = strtod(text, &end);
    if (end == text || *end || !(ratio > 1)) return unknown(method->name);
    if (!model_path) return 0;
    int err = find_learned(model_path, &digest, folder, sizeof folder);
    if (!err) err = neap_klt_profile_open(folder, profile, digest, ratio, &method->klt);
    return learned_failed(method->name, err, ret_is_there);
}

/* Whether tokens are evicted by the network. */
static bool predicts(const neap_method_kind *kind) {
    return kind->rest > 0 && !kind->by_mass;
}

static int open_learned(const char *model_path, neap_method *method, bool *ret_is_there) {
    char folder[NEAP_PATH_MAX - 64], path[NEAP_PATH_MAX];
    struct stat info;
    uint64_t digest;
    int err = find_learned(model_path, &digest, folder, sizeof folder);
    snprintf(path, sizeof path, "%s/%s", folder, NEAP_LEARNED_FILE);
    if (!err && stat(path, &info) != 0) err = -errno;
    if (!err) err = neap_learned_open(path, digest, &method->learned);
    if (!err && predicts(method->kind) && !neap_learned_net(method->learned)) err = -ENOENT;
    if (!err)
        method->learned_bytes =
            method->lowram.learned < 0 ? sizeof(neap_token_net) : (uint64_t)info.st_size;
    return learned_failed(path, err, ret_is_there);
}

int neap_method_open(const char *name, const char *model_path, neap_method *ret_method,
                     bool *ret_is_there) {
    neap_method method = {.kind = &klt_kind};
    int status = 0;
    *ret_is_there = true;
    if ((size_t)snprintf(method.name, sizeof method.name, "%s", name) >= sizeof method.name)
        return unknown(name);
    if (strncmp(name, "klt-", 4) == 0) {
        status = open_klt(model_path, &method, ret_is_there);
    } else {
        const size_t len = strcspn(name, ":/");
        for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
            if (strlen(kinds[i].name) == len && strncmp(kinds[i].name, name, len) == 0)
                method.kind = &kinds[i];
        status = method.kind == &klt_kind ? unknown(name) : parse_rest(name + len, &method);
        if (!status && model_path && (method.lowram.learned >= 0 || predicts(method.kind)))
            status = open_learned(model_path, &method, ret_is_there);
    }
    if (!status) *ret_method = method;
    return status;
}

int neap_method_check(const char *name) {
    neap_method method;
    bool is_there;
    return neap_method_open(name, NULL, &method, &is_there);
}

int neap_method_open_klt(const char *path, uint64_t digest, neap_method *ret_method) {
    neap_method method = {.kind = &klt_kind};
    const char *slash = strrchr(path, '/');
    snprintf(method.name, sizeof method.name, "%s", slash ? slash + 1 : path);
    const int err = neap_klt_model_open(path, digest, &method.klt);
    if (err)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "--klt-file %s: %s", path,
                              neap_strerror(err));
    *ret_method = method;
    return 0;
}

void neap_method_close(neap_method *method) {
    neap_klt_model_close(method->klt);
    neap_learned_free(method->learned);
    *method = (neap_method){0};
}

uint64_t neap_method_model_bytes(const neap_method *method, const neap_session *session) {
    uint32_t n, widest = 0;
    const neap_session_layer *layers = neap_session_layers(session, &n);
    if (method->klt) return neap_klt_model_bytes(method->klt);
    if (method->learned) return method->learned_bytes;
    if (!method->kind || method->kind->plane != round_turbo) return 0;
    for (uint32_t i = 0; i < 2 * n; i++) {
        const uint32_t dim = neap_method_dim(&layers[i / 2], i % 2 == 0);
        widest = dim > widest ? dim : widest;
    }
    return sizeof(neap_turbo) + (uint64_t)widest * widest * sizeof(float);
}

uint64_t neap_method_raw_bytes(const neap_session *session, const neap_kv_file *state) {
    uint32_t n;
    uint64_t sum = 0;
    const neap_session_layer *layers = neap_session_layers(session, &n);
    for (uint32_t i = 0; i < n; i++)
        sum += 2 * (uint64_t)state->n_cells * layers[i].n_kv_heads *
               (layers[i].k_head_dim + layers[i].v_head_dim);
    return sum;
}

void neap_method_add_loss(const neap_session *session, const neap_kv_file *exact,
                          const neap_kv_file *state, const neap_method_kept *kept,
                          neap_method_loss *io) {
    uint32_t n_layers;
    const neap_session_layer *layers = neap_session_layers(session, &n_layers);
    const size_t n = kept->tokens ? kept->n_tokens : state->n_cells;
    for (uint32_t i = 0; i < 2 * n_layers; i++) {
        const size_t width = layers[i / 2].n_kv_heads * neap_method_dim(&layers[i / 2], i % 2 == 0);
        const uint16_t *was = neap_kv_file_rows(exact, i / 2, i % 2)->data,
                       *is = neap_kv_file_rows(state, i / 2, i % 2)->data;
        for (size_t r = 0; r < n; r++) {
            const size_t at = width * (kept->tokens ? kept->tokens[r] : r);
            for (size_t c = at; c < at + width; c++) {
                const double x = (double)neap_f32_of_f16(was[c]),
                             off = x - (double)neap_f32_of_f16(is[c]);
                io->power[i % 2] += x * x;
                io->lost[i % 2] += off * off;
            }
        }
    }
}

int neap_method_apply(const neap_method *method, neap_session *session, neap_kv_file *state,
                      neap_method_kept *ret_kept) {
    neap_method_kept kept = {0};
    context c = {.method = method,
                 .session = session,
                 .state = state,
                 .n_cells = state->n_cells,
                 .ratio = method->parameter,
                 .kept = &kept};
    size_t widest = 0;
    c.layers = neap_session_layers(session, &c.n_layers);
    if (method->kind->whole) {
        const int status = method->kind->whole(&c, &kept.bytes);
        if (status) free(kept.tokens);
        if (!status) *ret_kept = kept;
        return status;
    }
    for (uint32_t i = 0; i < c.n_layers; i++) {
        const size_t k = c.layers[i].k_head_dim, v = c.layers[i].v_head_dim;
        const size_t width = c.layers[i].n_kv_heads * (k > v ? k : v);
        widest = width > widest ? width : widest;
    }
    c.rows = malloc(c.n_cells * widest * sizeof *c.rows);
    if (!c.rows) return neap_method_no_memory();
    const int status = each_plane(&c, &kept.bytes);
    free(c.rows);
    if (!status) *ret_kept = kept;
    return status;
}
