/* lost.c - cells whose content could not be brought back are never read.
 *
 * When a KV chunk fails its checksum, the request that needed it fails. llama.cpp then frees the
 * sequence, but the backend does not see which cells that were. So the chunk's cells are marked, a
 * rewritten cell loses its mark, and a graph whose attention mask shows a marked cell is refused:
 * other sequences, and the same prompt computed anew, go on. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "ggml-impl.h"
#include "plugin_int.h"

static atomic_bool any_lost; /* some layer has marks: graphs must be looked at */

static uint8_t *marks_of(const neap_layer_cache *layer, uint32_t stream) {
    return layer->lost + (size_t)stream * layer->n_cells;
}

int neap_lost_note(neap_layer_cache *layer, uint32_t stream, uint32_t first, uint32_t n) {
    if (layer->lost == NULL) {
        layer->lost = calloc((size_t)layer->n_cells * layer->n_streams, 1);
        if (layer->lost == NULL) {
            return -ENOMEM;
        }
    }
    bool whole_stream = atomic_load(&layer->v_transposed);
    uint32_t begin = whole_stream ? 0 : first / NEAP_CHUNK_CELLS;
    uint32_t end =
        whole_stream ? (layer->n_cells - 1) / NEAP_CHUNK_CELLS : (first + n - 1) / NEAP_CHUNK_CELLS;
    for (uint32_t chunk = begin; chunk <= end; chunk++) {
        uint32_t cell = chunk * NEAP_CHUNK_CELLS;
        uint32_t len =
            layer->n_cells - cell < NEAP_CHUNK_CELLS ? layer->n_cells - cell : NEAP_CHUNK_CELLS;
        int err = neap_kv_forget(layer->kv, stream, chunk);
        if (err == 0 || (whole_stream && chunk > begin)) {
            memset(marks_of(layer, stream) + cell, 1, len);
        }
    }
    atomic_store(&any_lost, true);
    return 0;
}

void neap_lost_unmark(neap_layer_cache *layer, uint32_t stream, uint32_t first, uint32_t n) {
    if (layer->lost != NULL) {
        memset(marks_of(layer, stream) + first, 0, n);
    }
}

/* A graph or a state load writes K before V: a cell is whole again with its last plane. */
void neap_lost_rewritten(neap_cache *cache, uint32_t stream, uint32_t first, uint32_t n) {
    if (cache->is_v || cache->owner->n_planes == 1) {
        neap_lost_unmark(cache->owner, stream, first, n);
    }
}

bool neap_lost_any(const neap_layer_cache *layer, uint32_t stream, uint32_t first, uint32_t n) {
    return layer->lost != NULL && memchr(marks_of(layer, stream) + first, 1, n) != NULL;
}

void neap_lost_clear(neap_layer_cache *layer) {
    if (layer->lost != NULL) {
        memset(layer->lost, 0, (size_t)layer->n_cells * layer->n_streams);
    }
}

/* mask: [n_kv, n_tokens, 1, n_streams], rows of one stream after the other. */
static bool mask_shows(const struct ggml_tensor *mask, const neap_layer_cache *layer,
                       uint32_t stream) {
    for (int64_t s = 0; s < mask->ne[3] && stream + s < layer->n_streams; s++) {
        const uint8_t *marks = marks_of(layer, stream + (uint32_t)s);
        int64_t n = mask->ne[0] < layer->n_cells ? mask->ne[0] : layer->n_cells;
        if (memchr(marks, 1, (size_t)n) == NULL) {
            continue;
        }
        for (int64_t t = 0; t < mask->ne[1]; t++) {
            const char *row = neap_mask_row(mask, s, t);
            for (int64_t cell = 0; cell < n; cell++) {
                if (marks[cell] != 0 && !neap_mask_hides(mask, row, cell)) {
                    return true;
                }
            }
        }
    }
    return false;
}

/* K of an attention without a flash node: SOFT_MAX <- scale, cap, ... <- MUL_MAT(K, Q). */
static const struct ggml_tensor *keys_before(const struct ggml_tensor *tensor) {
    for (int depth = 0; tensor != NULL && depth < 8; depth++) {
        if (neap_host_op(tensor->op) == NEAP_OP_MUL_MAT) {
            return tensor->src[0];
        }
        tensor = tensor->src[0];
    }
    return NULL;
}

bool neap_lost_visible(const struct ggml_cgraph *graph) {
    if (!atomic_load(&any_lost)) {
        return false;
    }
    for (int i = 0; i < graph->n_nodes; i++) {
        const struct ggml_tensor *node = graph->nodes[i];
        neap_op op = neap_host_op(node->op);
        const struct ggml_tensor *keys = op == NEAP_OP_FLASH_ATTN ? node->src[1]
                                         : op == NEAP_OP_SOFT_MAX ? keys_before(node->src[0])
                                                                  : NULL;
        const struct ggml_tensor *mask = op == NEAP_OP_FLASH_ATTN ? node->src[3] : node->src[1];
        const struct ggml_tensor *root =
            keys != NULL && keys->view_src != NULL ? keys->view_src : keys;
        neap_cache *cache = root != NULL ? neap_cache_of(neap_buffer_of(root), root) : NULL;
        if (cache == NULL || cache->owner->lost == NULL) {
            continue;
        }
        neap_layer_cache *layer = cache->owner;
        size_t stream_bytes = root->nb[2];
        uint32_t stream = (uint32_t)(((const char *)keys->data - (const char *)root->data) /
                                     (ptrdiff_t)stream_bytes);
        if (!neap_mask_usable(mask)
                ? memchr(layer->lost, 1, (size_t)layer->n_cells * layer->n_streams) != NULL
                : mask_shows(mask, layer, stream)) {
            return true;
        }
    }
    return false;
}
