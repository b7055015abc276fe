/* kv.c - KV caches of a buffer: which bytes are which cells of which layer.
 *
 * A cache tensor is [n_embd, n_cells, n_streams]. Its rows are cells, unless llama.cpp keeps V
 * transposed (attention without flash attention): then element e of cell c of a stream lies at
 * e * n_cells + c. Nothing in the tensor tells; the first graph that writes it does. */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "plugin_int.h"
#include "selected.h"

/* "cache_k_l7", "cache_swa_v_l12": tag is what stands before "k_l" or "v_l". */
bool neap_kv_name(const char *name, char tag[32], int *ret_layer, bool *ret_is_v) {
    if (strncmp(name, "cache_", 6) != 0) {
        return false;
    }
    const char *rest = name + 6;
    const char *mark = strstr(rest, "_l");
    if (mark == NULL || mark == rest || (mark[-1] != 'k' && mark[-1] != 'v') ||
        !isdigit((unsigned char)mark[2]) || mark - rest > 31 ||
        (mark - rest > 1 && mark[-2] != '_')) {
        return false;
    }
    char *end;
    long layer = strtol(mark + 2, &end, 10);
    if (*end != '\0' || layer < 0 || layer > 100000) {
        return false;
    }
    size_t tag_len = (size_t)(mark - 1 - rest);
    memcpy(tag, rest, tag_len);
    tag[tag_len] = '\0';
    *ret_layer = (int)layer;
    *ret_is_v = mark[-1] == 'v';
    return true;
}

int neap_caches_init(neap_buffer *buffer, struct ggml_tensor *tensor) {
    neap_cache cache = {.tensor = tensor};
    if (tensor->view_src != NULL) {
        return 0;
    }
    if (!neap_kv_name(tensor->name, cache.tag, &cache.layer, &cache.is_v)) {
        return -ENOENT;
    }
    if (buffer->n_caches == buffer->cap_caches) {
        size_t cap = buffer->cap_caches == 0 ? 64 : 2 * buffer->cap_caches;
        neap_cache *grown = realloc(buffer->caches, cap * sizeof *grown);
        if (grown == NULL) {
            return -ENOMEM;
        }
        buffer->caches = grown;
        buffer->cap_caches = cap;
    }
    buffer->caches[buffer->n_caches++] = cache;
    return 0;
}

static size_t row_bytes(const struct ggml_tensor *root) {
    return neap_host_fn.row_size(root->type, root->ne[0]);
}

static int kv_type(const struct ggml_tensor *root) {
    switch (root->type) {
    case GGML_TYPE_F16:
        return NEAP_KV_F16;
    case GGML_TYPE_BF16:
        return NEAP_KV_BF16;
    case GGML_TYPE_F32:
        return NEAP_KV_F32;
    default:
        return NEAP_KV_OTHER;
    }
}

static neap_kv_layout layout_of(const neap_layer_cache *layer) {
    neap_kv_layout layout = {.layer = layer->layer,
                             .n_cells = layer->n_cells,
                             .n_streams = layer->n_streams,
                             .n_planes = layer->n_planes,
                             .positions = layer->positions};
    for (size_t i = 0; i < layer->n_planes; i++) {
        const struct ggml_tensor *root = layer->planes[i];
        layout.planes[i] = (neap_kv_plane){
            .base = root->data,
            .row_bytes = row_bytes(root),
            .row_elems = (uint32_t)root->ne[0],
            .type = kv_type(root),
            .transposed = i == 1 && atomic_load(&layer->v_transposed),
        };
    }
    return layout;
}

static int add_layer(neap_buffer *buffer, neap_cache *k, neap_cache *v) {
    neap_layer_cache *layer = calloc(1, sizeof *layer);
    if (layer == NULL) {
        return -ENOMEM;
    }
    layer->buffer = buffer;
    layer->planes[0] = k->tensor;
    layer->planes[1] = v != NULL ? v->tensor : NULL;
    layer->n_planes = v != NULL ? 2 : 1;
    layer->layer = k->layer;
    layer->n_cells = (uint32_t)k->tensor->ne[1];
    layer->n_streams = (uint32_t)k->tensor->ne[2];
    size_t n = (size_t)layer->n_cells * layer->n_streams;
    layer->positions = malloc(n * sizeof *layer->positions);
    neap_kv_layout layout = layout_of(layer);
    int err =
        layer->positions == NULL ? -ENOMEM : neap_kv_add(neap_plugin_engine(), &layout, &layer->kv);
    if (err != 0) {
        free(layer->positions);
        free(layer);
        return err;
    }
    memset(layer->positions, 0xff, n * sizeof *layer->positions);
    k->owner = layer;
    k->tensor->extra = k;
    if (v != NULL) {
        v->owner = layer;
        v->tensor->extra = v;
    }
    buffer->layers[buffer->n_layers++] = layer;
    return 0;
}

void neap_caches_finish(neap_buffer *buffer) {
    if (buffer->role != NEAP_ROLE_KV || buffer->layers != NULL || buffer->n_caches == 0) {
        return;
    }
    buffer->layers = calloc(buffer->n_caches, sizeof *buffer->layers);
    for (size_t i = 0; buffer->layers != NULL && i < buffer->n_caches; i++) {
        neap_cache *k = &buffer->caches[i], *v = NULL;
        for (size_t j = 0; !k->is_v && j < buffer->n_caches; j++) {
            neap_cache *other = &buffer->caches[j];
            if (other->is_v && other->layer == k->layer && strcmp(other->tag, k->tag) == 0) {
                v = other;
            }
        }
        int err = k->is_v ? 0 : add_layer(buffer, k, v);
        if (err != 0) {
            neap_log(NEAP_LOG_WARN, "KV cache: layer %d stays resident: %s", k->layer,
                     neap_strerror(err));
        }
    }
}

void neap_caches_free(neap_buffer *buffer) {
    for (size_t i = 0; i < buffer->n_layers; i++) {
        neap_selected_free(buffer->layers[i]);
        free(buffer->layers[i]->positions);
        free(buffer->layers[i]->lost);
        free(buffer->layers[i]);
    }
    free(buffer->layers);
    free(buffer->caches);
}

neap_cache *neap_cache_of(const neap_buffer *buffer, const struct ggml_tensor *root) {
    if (buffer == NULL || buffer->role != NEAP_ROLE_KV) {
        return NULL;
    }
    neap_cache *cache = root->extra;
    return cache != NULL && cache->owner != NULL ? cache : NULL;
}

void neap_cache_note_layout(neap_cache *cache, const struct ggml_tensor *set_rows) {
    neap_layer_cache *layer = cache->owner;
    if (!cache->is_v || set_rows->ne[0] != 1 || cache->tensor->ne[0] == 1 ||
        atomic_exchange(&layer->v_transposed, true)) {
        return;
    }
    neap_kv_layout layout = layout_of(layer);
    int err = neap_kv_relayout(layer->kv, &layout);
    if (err != 0) {
        neap_buffer_latch(layer->buffer, err, "KV cache: V turned out transposed after use");
    }
}

/* Bytes within one stream. */
static int stream_cells(const neap_cache *cache, uint32_t stream, size_t offset, size_t size,
                        neap_cells_visit visit, void *ctx) {
    neap_layer_cache *layer = cache->owner;
    if (cache->is_v && atomic_load(&layer->v_transposed)) {
        size_t elem = neap_host_fn.type_size(cache->tensor->type);
        size_t first = offset / elem, last = (offset + size - 1) / elem;
        if (first / layer->n_cells == last / layer->n_cells) {
            return visit(layer, stream, (uint32_t)(first % layer->n_cells),
                         (uint32_t)(last - first + 1), ctx);
        }
        return visit(layer, stream, 0, layer->n_cells, ctx);
    }
    size_t row = row_bytes(cache->tensor);
    uint32_t first = (uint32_t)(offset / row), last = (uint32_t)((offset + size - 1) / row);
    return visit(layer, stream, first, last - first + 1, ctx);
}

int neap_cache_cells(const neap_cache *cache, size_t offset, size_t size, neap_cells_visit visit,
                     void *ctx) {
    size_t stream_bytes = row_bytes(cache->tensor) * cache->owner->n_cells;
    int err = 0;
    while (size > 0 && err == 0) {
        uint32_t stream = (uint32_t)(offset / stream_bytes);
        size_t within = offset % stream_bytes;
        size_t len = size < stream_bytes - within ? size : stream_bytes - within;
        if (stream >= cache->owner->n_streams) {
            return NEAP_E_BOUND;
        }
        err = stream_cells(cache, stream, within, len, visit, ctx);
        offset += len;
        size -= len;
    }
    return err;
}

int neap_cache_view_cells(const neap_cache *cache, const struct ggml_tensor *view,
                          neap_cells_visit visit, void *ctx) {
    size_t stream_bytes = row_bytes(cache->tensor) * cache->owner->n_cells;
    size_t base = (size_t)((const char *)view->data - (const char *)cache->tensor->data);
    size_t span = neap_host_fn.type_size(view->type);
    size_t repeat = 1, stride = 0;
    for (int i = 0; i < GGML_MAX_DIMS; i++) {
        if (view->ne[i] == 0) {
            return 0;
        }
        if (view->nb[i] >= stream_bytes && view->ne[i] > 1) {
            repeat = (size_t)view->ne[i];
            stride = view->nb[i];
        } else if (i == 0) {
            span += (size_t)(view->ne[0] / neap_host_fn.blck_size(view->type) - 1) * view->nb[0];
        } else {
            span += (size_t)(view->ne[i] - 1) * view->nb[i];
        }
    }
    int err = 0;
    for (size_t i = 0; i < repeat && err == 0; i++) {
        err = neap_cache_cells(cache, base + i * stride, span, visit, ctx);
    }
    return err;
}

static int wait_cells(neap_layer_cache *layer, uint32_t stream, uint32_t first, uint32_t n,
                      void *ctx) {
    (void)ctx;
    for (uint32_t chunk = first / NEAP_CHUNK_CELLS; chunk <= (first + n - 1) / NEAP_CHUNK_CELLS;
         chunk++) {
        int err = neap_wait(neap_plugin_engine(), neap_kv_unit(layer->kv, stream, chunk));
        if (err != 0) {
            return err;
        }
    }
    return neap_lost_any(layer, stream, first, n) ? NEAP_E_LOST : 0;
}

int neap_cache_read(const neap_cache *cache, size_t offset, size_t size) {
    return neap_cache_cells(cache, offset, size, wait_cells, NULL);
}

/* What comes from a slot file, a sequence copied: mostly a cell is at its position. A wrong guess
 * shows in klt's error estimate, and another codec takes the chunk. */
static void guess_positions(neap_layer_cache *layer, uint32_t stream, uint32_t first, uint32_t n) {
    int32_t *positions = layer->positions + (size_t)stream * layer->n_cells;
    for (uint32_t cell = first; cell < first + n; cell++) {
        positions[cell] = (int32_t)cell;
    }
}

static int write_cells(neap_layer_cache *layer, uint32_t stream, uint32_t first, uint32_t n,
                       void *ctx) {
    const neap_cache *cache = ctx;
    if (!cache->is_v) {
        guess_positions(layer, stream, first, n);
    }
    int err = neap_kv_write(layer->kv, stream, first, n, false);
    if (err == NEAP_E_LOST) {
        err = neap_lost_note(layer, stream, first, n);
        err = err != 0 ? err : neap_kv_write(layer->kv, stream, first, n, false);
    }
    if (err == 0) {
        neap_lost_rewritten(ctx, stream, first, n);
    }
    return err;
}

int neap_cache_write(neap_cache *cache, size_t offset, size_t size) {
    return neap_cache_cells(cache, offset, size, write_cells, cache);
}
