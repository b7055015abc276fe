/* capture.c - writes what calibration needs to a file: keys and values as they come into the cache,
 * queries, RoPE's parameters, how the output projection weighs errors of the values, and the
 * projections that make keys and values (fmt/capture.h). On only with NEAP_CAPTURE=FILE, which
 * `neap train` sets.
 *
 * A layer's records are written right before its attention is computed: its queries are still there
 * and its cells have been filled. The graph is cut there (graph.c).
 *
 * Threads   one graph at a time (neap train asks for nothing else). */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "capture.h"
#include "err.h"
#include "file.h"
#include "ggml-impl.h"
#include "plugin_int.h"
#include "rope.h"

static FILE *out; /* NULL: off */

bool neap_capture_on(void) {
    return out != NULL;
}

void neap_capture_open(const char *path) {
    out = path != NULL ? fopen(path, "abe") : NULL;
    if (path != NULL && out == NULL) {
        neap_log(NEAP_LOG_ERROR, "NEAP_CAPTURE=%s: %s", path, neap_strerror(-errno));
    }
}

static void put(const void *data, size_t n_bytes) {
    fwrite(data, 1, n_bytes, out);
}

static void put_head(uint32_t kind, int layer, uint64_t n_bytes) {
    const neap_capture_head head = {.kind = kind, .layer = (uint32_t)layer, .n_bytes = n_bytes};
    put(&head, sizeof head);
}

/* ---- around an attention node ---- */

static const struct ggml_tensor *root_of(const struct ggml_tensor *tensor) {
    return tensor->view_src != NULL ? tensor->view_src : tensor;
}

static neap_cache *cache_of(const struct ggml_tensor *view) {
    neap_buffer *buffer = neap_buffer_of(root_of(view));
    return buffer != NULL ? neap_cache_of(buffer, root_of(view)) : NULL;
}

/* The node that filled this cache's cells in the graph; NULL: none. */
static const struct ggml_tensor *writer_of(const struct ggml_cgraph *graph, int end,
                                           const struct ggml_tensor *root) {
    for (int i = end - 1; i >= 0; i--) {
        const struct ggml_tensor *node = graph->nodes[i];
        if (neap_host_op(node->op) == NEAP_OP_SET_ROWS && node->view_src == root) {
            return node;
        }
    }
    return NULL;
}

/* By views, sums and products with a weight, which is a product's src[0]. */
static bool comes_from(const struct ggml_tensor *tensor, const struct ggml_tensor *origin) {
    for (int depth = 0; tensor != NULL && depth < 8; depth++) {
        if (tensor == origin) {
            return true;
        }
        tensor = tensor->src[neap_host_op(tensor->op) == NEAP_OP_MUL_MAT ? 1 : 0];
    }
    return false;
}

/* The output projection: the first product with a weight of what this attention computes. */
static const struct ggml_tensor *projection_of(const struct ggml_cgraph *graph, int at) {
    const struct ggml_tensor *node = graph->nodes[at];
    for (int i = at + 1; i < graph->n_nodes && i < at + 16; i++) {
        const struct ggml_tensor *product = graph->nodes[i];
        if (neap_host_op(product->op) == NEAP_OP_MUL_MAT &&
            product->src[0]->ne[0] == node->ne[0] * node->ne[1] &&
            comes_from(product->src[1], node)) {
            return product->src[0];
        }
    }
    return NULL;
}

/* What the output of this attention is added to, rows by token; NULL: not found. */
static const struct ggml_tensor *residual_of(const struct ggml_cgraph *graph, int at) {
    const struct ggml_tensor *node = graph->nodes[at];
    const int64_t n_tokens = node->ne[2];
    for (int i = at + 1; n_tokens > 1 && i < graph->n_nodes && i < at + 32; i++) {
        const struct ggml_tensor *sum = graph->nodes[i], *other = NULL;
        if (neap_host_op(sum->op) == NEAP_OP_ADD) {
            other = comes_from(sum->src[0], node)   ? sum->src[1]
                    : comes_from(sum->src[1], node) ? sum->src[0]
                                                    : NULL;
        }
        if (other != NULL && other->ne[1] != n_tokens &&
            neap_host_op(other->op) == NEAP_OP_GET_ROWS) {
            other = other->src[0]; /* the last layer goes on with the rows that have outputs */
        }
        if (other != NULL && other->ne[1] == n_tokens && other->type == GGML_TYPE_F32) {
            return other;
        }
    }
    return NULL;
}

/* The product with a weight of n_rows that made these rows; NULL: not found. *ret_norm: a norm
 * comes after it. */
static const struct ggml_tensor *product_before(const struct ggml_tensor *rows, int64_t n_rows,
                                                bool *ret_norm) {
    *ret_norm = false;
    for (int depth = 0; rows != NULL && depth < 12; depth++) {
        const neap_op op = neap_host_op(rows->op);
        if (op == NEAP_OP_MUL_MAT) {
            return rows->src[0]->ne[1] == n_rows && rows->src[0]->ne[2] == 1 ? rows : NULL;
        }
        *ret_norm = *ret_norm || op == NEAP_OP_RMS_NORM;
        rows = rows->src[0];
    }
    return NULL;
}

/* ---- weights ---- */

/* The tensor's bytes as in its file: in memory they may be repacked. malloc'd; NULL: not to be
 * had. */
static void *file_bytes(const struct ggml_tensor *tensor) {
    neap_buffer *buffer = neap_buffer_of(tensor);
    const neap_weight *weight = buffer != NULL ? neap_weights_find(buffer, tensor->data) : NULL;
    size_t n_bytes = neap_host_fn.row_size(tensor->type, tensor->ne[0]) * (size_t)tensor->ne[1];
    void *bytes = weight != NULL && weight->path != NULL ? malloc(n_bytes) : NULL;
    neap_file *file;
    if (bytes == NULL || neap_file_open_read(weight->path, &file) != 0) {
        free(bytes);
        return NULL;
    }
    int err = neap_file_read(file, bytes, n_bytes, weight->file_offset);
    neap_file_close(file);
    if (err != 0) {
        free(bytes);
        return NULL;
    }
    return bytes;
}

/* Row r of a weight whose bytes are as in its file. */
static void plain_row(const struct ggml_tensor *w, const char *bytes, int64_t r, float *row) {
    const size_t row_bytes = neap_host_fn.row_size(w->type, w->ne[0]);
    if (w->type == GGML_TYPE_F32) {
        memcpy(row, bytes + (size_t)r * row_bytes, row_bytes);
    } else {
        neap_host_fn.get_type_traits(w->type)->to_float(bytes + (size_t)r * row_bytes, row,
                                                        w->ne[0]);
    }
}

static bool has_plain_form(const struct ggml_tensor *w) {
    const struct ggml_type_traits *traits = neap_host_fn.get_type_traits(w->type);
    return traits != NULL && (w->type == GGML_TYPE_F32 || traits->to_float != NULL);
}

/* gram[h] += w[h]' w[h] of one row of W_O, the lower triangle. */
static void add_row(float *gram, const float *row, size_t n_heads, size_t width) {
    for (size_t h = 0; h < n_heads; h++) {
        const float *w = row + h * width;
        for (size_t i = 0; i < width; i++) {
            float *line = gram + (h * width + i) * width;
            for (size_t j = 0; j <= i; j++) {
                line[j] += w[i] * w[j];
            }
        }
    }
}

/* [n_heads][width][width], malloc'd; NULL: W_O is not there or has no plain form. */
static float *grams_of(const struct ggml_tensor *w, size_t n_heads, size_t width) {
    if (w == NULL || !has_plain_form(w)) {
        return NULL;
    }
    char *bytes = file_bytes(w);
    float *row = malloc(n_heads * width * sizeof *row);
    float *gram = calloc(n_heads * width * width, sizeof *gram);
    if (bytes == NULL || row == NULL || gram == NULL) {
        free(gram);
        gram = NULL;
    }
    for (int64_t r = 0; gram != NULL && r < w->ne[1]; r++) {
        plain_row(w, bytes, r, row);
        add_row(gram, row, n_heads, width);
    }
    for (size_t h = 0; gram != NULL && h < n_heads; h++) {
        for (size_t i = 0; i < width; i++) {
            for (size_t j = i + 1; j < width; j++) {
                gram[(h * width + i) * width + j] = gram[(h * width + j) * width + i];
            }
        }
    }
    free(row);
    free(bytes);
    return gram;
}

/* [w->ne[1]][w->ne[0]], malloc'd; NULL: it is not there or has no plain form. */
static float *plain_weight(const struct ggml_tensor *w) {
    char *bytes = has_plain_form(w) ? file_bytes(w) : NULL;
    float *rows = bytes != NULL ? malloc((size_t)(w->ne[0] * w->ne[1]) * sizeof *rows) : NULL;
    for (int64_t r = 0; rows != NULL && r < w->ne[1]; r++) {
        plain_row(w, bytes, r, rows + r * w->ne[0]);
    }
    free(bytes);
    return rows;
}

/* ---- records ---- */

static void read_rope(const struct ggml_tensor *rope, neap_capture_layer *layer) {
    const neap_kv_rope params = neap_rope_of_node(rope->op_params, NULL, &layer->rope_offset);
    layer->rope_dims = params.n_dims;
    layer->rope_mode = params.mode;
    layer->n_ctx_orig = params.n_ctx_orig;
    layer->freq_base = params.freq_base;
    layer->freq_scale = params.freq_scale;
    layer->ext_factor = params.ext_factor;
    layer->attn_factor = params.attn_factor;
    layer->beta_fast = params.beta_fast;
    layer->beta_slow = params.beta_slow;
    layer->n_freq_factors = rope->src[2] != NULL ? (uint32_t)(params.n_dims / 2) : 0;
}

static void put_layer(const struct ggml_cgraph *graph, int at, neap_layer_cache *cache,
                      const struct ggml_tensor *rope) {
    const struct ggml_tensor *node = graph->nodes[at];
    const struct ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2];
    neap_capture_layer layer = {
        .n_heads = (uint32_t)q->ne[2],
        .n_kv_heads = (uint32_t)k->ne[2],
        .head_k = (uint32_t)k->ne[0],
        .head_v = (uint32_t)v->ne[0],
        .n_cells = cache->n_cells,
    };
    memcpy(&layer.scale, node->op_params, sizeof layer.scale);
    if (rope != NULL) {
        read_rope(rope, &layer);
    }
    float *grams = grams_of(projection_of(graph, at), layer.n_heads, layer.head_v);
    layer.n_grams = grams != NULL ? layer.n_heads : 0;
    size_t factor_bytes = layer.n_freq_factors * sizeof(float);
    size_t gram_bytes = (size_t)layer.n_grams * layer.head_v * layer.head_v * sizeof(float);
    put_head(NEAP_CAPTURE_LAYER, cache->layer, sizeof layer + factor_bytes + gram_bytes);
    put(&layer, sizeof layer);
    if (factor_bytes > 0) {
        put(rope->src[2]->data, factor_bytes);
    }
    if (gram_bytes > 0) {
        put(grams, gram_bytes);
    }
    free(grams);
    cache->captured = true;
}

/* From the SET_ROWS that filled the planes; either may be NULL. */
static void put_projections(const neap_layer_cache *cache, const struct ggml_tensor *k_writer,
                            const struct ggml_tensor *v_writer) {
    bool k_norm = false, v_norm = false;
    const struct ggml_tensor *k = NULL, *v = NULL;
    float *w_k = NULL, *w_v = NULL;
    if (k_writer != NULL && v_writer != NULL) {
        k = product_before(k_writer->src[0], cache->planes[0]->ne[0], &k_norm);
        v = product_before(v_writer->src[0], cache->planes[1]->ne[0], &v_norm);
    }
    if (k != NULL && v != NULL && k->src[1] == v->src[1] && !v_norm) {
        w_k = plain_weight(k->src[0]);
        w_v = plain_weight(v->src[0]);
    }
    const bool found = w_k != NULL && w_v != NULL;
    const neap_capture_projections head = {.n_inputs = found ? (uint32_t)k->src[0]->ne[0] : 0,
                                           .has_key_norm = k_norm};
    const size_t k_bytes = found ? (size_t)(k->src[0]->ne[0] * k->src[0]->ne[1]) * sizeof *w_k : 0;
    const size_t v_bytes = found ? (size_t)(v->src[0]->ne[0] * v->src[0]->ne[1]) * sizeof *w_v : 0;
    put_head(NEAP_CAPTURE_PROJECTIONS, cache->layer, sizeof head + k_bytes + v_bytes);
    put(&head, sizeof head);
    if (found) {
        put(w_k, k_bytes);
        put(w_v, v_bytes);
    }
    free(w_k);
    free(w_v);
}

static void put_rows(const struct ggml_tensor *root, const int64_t *cells, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        put((const char *)root->data + (size_t)cells[i] * root->nb[1],
            (size_t)root->ne[0] * sizeof(uint16_t));
    }
}

/* A token's position; without RoPE its cell, which a fresh context fills in order. */
static int32_t position_of(const neap_layer_cache *cache, int64_t cell) {
    return cache->positions[cell] >= 0 ? cache->positions[cell] : (int32_t)(cell % cache->n_cells);
}

static bool is_query(const neap_layer_cache *cache, int64_t cell) {
    return position_of(cache, cell) % NEAP_CAPTURE_Q_STEP == 0;
}

static float squared_length(const struct ggml_tensor *rows, int64_t row) {
    float sum = 0;
    for (int64_t i = 0; rows != NULL && i < rows->ne[0]; i++) {
        const float x = ((const float *)((const char *)rows->data + (size_t)row * rows->nb[1]))[i];
        sum += x * x;
    }
    return sum;
}

static void put_tokens(const struct ggml_tensor *q, const struct ggml_tensor *residual,
                       const neap_layer_cache *cache, const int64_t *cells, int64_t n) {
    neap_capture_tokens tokens = {.n_tokens = (uint32_t)n};
    for (int64_t i = 0; i < n; i++) {
        tokens.n_queries += is_query(cache, cells[i]);
    }
    const size_t query_bytes = (size_t)(q->ne[0] * q->ne[2] + 1) * sizeof(float);
    const size_t cell_bytes =
        (size_t)(cache->planes[0]->ne[0] + cache->planes[1]->ne[0]) * sizeof(uint16_t);
    put_head(NEAP_CAPTURE_TOKENS, cache->layer,
             sizeof tokens + (size_t)n * (sizeof(int32_t) + cell_bytes) +
                 tokens.n_queries * query_bytes);
    put(&tokens, sizeof tokens);
    for (int64_t i = 0; i < n; i++) {
        const int32_t position = position_of(cache, cells[i]);
        put(&position, sizeof position);
    }
    put_rows(cache->planes[0], cells, n);
    put_rows(cache->planes[1], cells, n);
    for (int64_t i = 0; i < n; i++) {
        for (int64_t h = 0; is_query(cache, cells[i]) && h < q->ne[2]; h++) {
            put((const char *)q->data + (size_t)i * q->nb[1] + (size_t)h * q->nb[2],
                (size_t)q->ne[0] * sizeof(float));
        }
    }
    for (int64_t i = 0; i < n; i++) {
        const float length = is_query(cache, cells[i]) ? squared_length(residual, i) : 0;
        put(&length, is_query(cache, cells[i]) ? sizeof length : 0);
    }
}

int neap_capture_attention(const struct ggml_cgraph *graph, int at) {
    const struct ggml_tensor *node = graph->nodes[at], *q = node->src[0];
    neap_cache *k = cache_of(node->src[1]), *v = cache_of(node->src[2]);
    if (k == NULL || v == NULL || k->owner != v->owner || k->tensor->type != GGML_TYPE_F16 ||
        v->tensor->type != GGML_TYPE_F16 || q->type != GGML_TYPE_F32 || q->nb[0] != sizeof(float) ||
        q->ne[3] != 1) {
        return 0; /* nothing that calibration could use */
    }
    const struct ggml_tensor *writer = writer_of(graph, at, k->tensor);
    if (writer == NULL || writer->src[1]->type != GGML_TYPE_I64 ||
        writer->src[1]->ne[0] != q->ne[1]) {
        return 0;
    }
    const int64_t *cells = writer->src[1]->data, n = q->ne[1];
    for (int64_t i = 0; i < n; i++) {
        if (cells[i] < 0 || cells[i] >= (int64_t)k->owner->n_cells * k->owner->n_streams) {
            return 0;
        }
    }
    if (!k->owner->captured) {
        put_layer(graph, at, k->owner, neap_rope_before(writer->src[0]));
        put_projections(k->owner, writer, writer_of(graph, at, v->tensor));
    }
    put_tokens(q, residual_of(graph, at), k->owner, cells, n);
    if (fflush(out) != 0 || ferror(out)) {
        neap_log(NEAP_LOG_ERROR, "the capture could not be written: %s", neap_strerror(-errno));
        return -EIO;
    }
    return 0;
}
