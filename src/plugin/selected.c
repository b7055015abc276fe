/* selected.c - see selected.h. */
#include "selected.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "err.h"

enum { SPAN_CELLS = 8, OUTLIER_CELLS = 48 * SPAN_CELLS, WINDOW_CELLS = NEAP_CHUNK_CELLS };

uint32_t neap_select_budget;

struct neap_selected {
    neap_layer_cache *layer;
    uint32_t stream;
    neap_select *select; /* NULL: not begun */
    bool failed;         /* no memory for it: everything is read */
    uint64_t *stamps;    /* [n_chunks] of those of the prefix, when they joined */
    uint32_t written;    /* first cell that the graph at hand writes; UINT32_MAX: none */
};

static neap_selected *selected_of(neap_layer_cache *layer, uint32_t stream) {
    if (layer->selected == NULL) {
        layer->selected = calloc(layer->n_streams, sizeof *layer->selected);
        for (uint32_t i = 0; layer->selected != NULL && i < layer->n_streams; i++) {
            layer->selected[i] =
                (neap_selected){.layer = layer, .stream = i, .written = UINT32_MAX};
        }
    }
    return layer->selected != NULL ? &layer->selected[stream] : NULL;
}

void neap_selected_free(neap_layer_cache *layer) {
    uint64_t kept = 0, new = 0;
    for (uint32_t i = 0; layer->selected != NULL && i < layer->n_streams; i++) {
        if (layer->selected[i].select != NULL) {
            neap_select_counts(layer->selected[i].select, &kept, &new);
            neap_log(NEAP_LOG_INFO,
                     "layer %d, stream %u: of the spans chosen %llu were there, %llu decoded",
                     layer->layer, i, (unsigned long long)kept, (unsigned long long)new);
        }
        neap_select_free(layer->selected[i].select);
        free(layer->selected[i].stamps);
    }
    free(layer->selected);
    layer->selected = NULL;
}

/* ---- the prefix ---- */

void neap_selected_note_write(const struct ggml_tensor *node) {
    const struct ggml_tensor *root = node->view_src;
    const neap_cache *cache = root != NULL ? neap_cache_of(neap_buffer_of(node), root) : NULL;
    if (cache == NULL || neap_host_op(node->op) == NEAP_OP_EMPTY ||
        !neap_kv_may_be_held_coded(cache->owner->kv)) {
        return;
    }
    neap_layer_cache *layer = cache->owner;
    const struct ggml_tensor *index = node->src[1];
    const bool known = neap_host_op(node->op) == NEAP_OP_SET_ROWS &&
                       neap_host_op(index->op) == NEAP_OP_EMPTY && index->type == GGML_TYPE_I64;
    const int64_t *rows = known ? index->data : NULL;
    for (int64_t i = 0; i < (known ? index->ne[0] : (int64_t)layer->n_streams); i++) {
        const int64_t row = known ? rows[i] : i * layer->n_cells; /* anything: from the first on */
        neap_selected *s = row >= 0 && row < (int64_t)layer->n_cells * layer->n_streams
                               ? selected_of(layer, (uint32_t)(row / layer->n_cells))
                               : NULL;
        const uint32_t cell = (uint32_t)(row % layer->n_cells);
        if (s != NULL && cell < s->written) {
            s->written = cell;
        }
    }
}

static int begin(neap_selected *s, const neap_attn_shape *whole) {
    const uint32_t n_chunks = s->layer->n_cells / NEAP_CHUNK_CELLS;
    const neap_select_config config = {.n_heads = whole->n_heads,
                                       .n_kv_heads = whole->n_kv_heads,
                                       .k_elems = whole->k.head_elems,
                                       .v_elems = whole->v.head_elems,
                                       .span_cells = SPAN_CELLS,
                                       .budget_cells = neap_select_budget,
                                       .outlier_cells = OUTLIER_CELLS,
                                       .window_cells = WINDOW_CELLS,
                                       .max_cells = n_chunks * NEAP_CHUNK_CELLS};
    s->stamps = calloc(n_chunks, sizeof *s->stamps);
    return s->stamps == NULL ? -ENOMEM : neap_select_create(&config, &s->select);
}

/* Rows of the chunk: where they are, or what was coded makes of them, in the window. */
static int find_rows(const neap_selected *s, uint32_t chunk, const neap_window *window,
                     neap_select_rows *ret_rows) {
    const neap_layer_cache *layer = s->layer;
    const struct ggml_tensor *k = layer->planes[0], *v = layer->planes[1];
    const size_t cell = (size_t)s->stream * layer->n_cells + (size_t)chunk * NEAP_CHUNK_CELLS;
    *ret_rows = (neap_select_rows){(const char *)k->data + cell * k->nb[1],
                                   (const char *)v->data + cell * v->nb[1], k->nb[1], v->nb[1]};
    if (neap_unit_resident(neap_plugin_engine(), neap_kv_unit(layer->kv, s->stream, chunk))) {
        return 0;
    }
    if (!neap_window_holds(window, layer)) {
        return -EAGAIN;
    }
    char *room = neap_region_base(window->region);
    void *const rows[2] = {room, room + NEAP_CHUNK_CELLS * k->nb[1]};
    ret_rows->k = rows[0];
    ret_rows->v = rows[1];
    return neap_kv_read(layer->kv, s->stream, chunk, 0, NEAP_CHUNK_CELLS, rows,
                        neap_window_scratch(window, 0));
}

static void count_overhead(neap_layer_cache *layer) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < layer->n_streams; i++) {
        const neap_select *select = layer->selected[i].select;
        bytes += select != NULL ? neap_select_bytes(select) : 0;
    }
    neap_kv_set_overhead(layer->kv, bytes);
}

void neap_selected_follow(neap_layer_cache *layer, uint32_t stream, neap_window *window,
                          const neap_attn_shape *whole) {
    const bool on = neap_select_budget > 0 && layer->n_planes == 2;
    neap_selected *s = on ? selected_of(layer, stream) : NULL;
    if (s == NULL || s->failed) {
        return;
    }
    const uint32_t end =
        (s->written < layer->n_cells ? s->written : layer->n_cells) / NEAP_CHUNK_CELLS;
    const uint32_t before = s->select != NULL ? neap_select_cells(s->select) / NEAP_CHUNK_CELLS : 0;
    uint32_t n = before, same = 0;
    s->written = UINT32_MAX;
    while (same < n && same < end && neap_kv_stamp(layer->kv, stream, same) == s->stamps[same]) {
        same++;
    }
    if (same < n) {
        neap_select_truncate(s->select, same * NEAP_CHUNK_CELLS);
    }
    for (n = same; n < end; n++) {
        const uint64_t stamp = neap_kv_stamp(layer->kv, stream, n);
        neap_select_rows rows;
        if (stamp == 0 || (s->select == NULL && begin(s, whole) != 0) ||
            find_rows(s, n, window, &rows) != 0 || neap_select_append(s->select, &rows) != 0) {
            s->failed = stamp != 0 && s->select == NULL;
            break;
        }
        s->stamps[n] = stamp;
    }
    if (n > same || same < before) {
        count_overhead(layer);
    }
}

/* ---- a node ---- */

static neap_select *select_of(const neap_layer_cache *layer, uint32_t stream) {
    return layer->selected != NULL ? layer->selected[stream].select : NULL;
}

/* What follows the prefix must have its pages, or get them: it is not read
 * through the window. */
bool neap_selected_applies(const neap_layer_cache *layer, uint32_t stream,
                           const neap_attn_shape *whole) {
    const neap_select *select = select_of(layer, stream);
    if (select == NULL || whole->n_tokens > NEAP_SELECT_TOKENS ||
        !neap_select_applies(select, whole)) {
        return false;
    }
    const uint32_t first = neap_select_cells(select) / NEAP_CHUNK_CELLS;
    for (uint32_t chunk = first; chunk * NEAP_CHUNK_CELLS < whole->n_cells; chunk++) {
        if (neap_kv_is_coded(layer->kv, stream, chunk)) {
            return false;
        }
    }
    return true;
}

static size_t padded(size_t bytes) {
    return (bytes + 63) / 64 * 64;
}

neap_selected_needs neap_selected_needs_of(const neap_layer_cache *layer, uint32_t stream,
                                           const neap_attn_shape *whole, uint32_t n_threads) {
    const neap_select *select = select_of(layer, stream);
    neap_attn_shape shape = *whole;
    shape.n_cells = neap_select_shape_cells(select, whole);
    return (neap_selected_needs){.select_scratch = neap_select_scratch_bytes(select),
                                 .attn_scratch = neap_attn_scratch_bytes(&shape, n_threads),
                                 .lists = padded(neap_select_shape_bytes(select, whole)) +
                                          neap_attn_state_bytes(&shape)};
}

static void copy_rows(const struct ggml_tensor *plane, size_t cell, uint32_t n, size_t head_bytes,
                      uint32_t head, uint16_t *dst) {
    for (uint32_t i = 0; i < n; i++) {
        memcpy((char *)dst + i * plane->nb[1],
               (const char *)plane->data + (cell + i) * plane->nb[1] + head * head_bytes,
               head_bytes);
    }
}

/* Rows of the buffer are as far apart as those of the cache:
 * neap_select_applies. */
static int reconstruct(void *ctx, uint32_t thread, uint32_t head, uint32_t first, uint32_t n,
                       uint16_t *k, uint16_t *v) {
    const neap_selected_node *node = ctx;
    const neap_layer_cache *layer = node->of->layer;
    const uint32_t stream = node->of->stream, chunk = first / NEAP_CHUNK_CELLS;
    const neap_unit_id unit = neap_kv_unit(layer->kv, stream, chunk);
    const size_t k_bytes = layer->planes[0]->nb[1] / node->n_kv_heads,
                 v_bytes = layer->planes[1]->nb[1] / node->n_kv_heads;
    int err = -EAGAIN;
    if (!neap_unit_resident(neap_plugin_engine(), unit)) {
        void *const rows[2] = {(char *)k - head * k_bytes, (char *)v - head * v_bytes};
        err = neap_kv_read_head(layer->kv, stream, chunk, first % NEAP_CHUNK_CELLS, n, head, rows,
                                neap_window_scratch(node->window, (int)thread));
    }
    if (err != -EAGAIN) {
        return err;
    }
    err = neap_wait(neap_plugin_engine(), unit);
    if (err == 0) {
        const size_t cell = (size_t)stream * layer->n_cells + first;
        copy_rows(layer->planes[0], cell, n, k_bytes, head, k);
        copy_rows(layer->planes[1], cell, n, v_bytes, head, v);
    }
    return err;
}

static neap_unit_id tail_unit(const neap_selected_node *node, uint32_t chunk) {
    return neap_kv_unit(node->of->layer->kv, node->of->stream,
                        chunk - node->n_kept + node->first_chunk);
}

static bool is_ready(void *ctx, uint32_t stream, uint32_t chunk) {
    const neap_selected_node *node = ctx;
    (void)stream;
    return chunk < node->n_kept ? atomic_load(&node->err) == 0
                                : neap_unit_resident(neap_plugin_engine(), tail_unit(node, chunk));
}

static int await(void *ctx, uint32_t stream, uint32_t chunk) {
    neap_selected_node *node = ctx;
    (void)stream;
    return chunk < node->n_kept ? atomic_load(&node->err)
                                : neap_wait(neap_plugin_engine(), tail_unit(node, chunk));
}

void neap_selected_plan(neap_selected_node *node, neap_layer_cache *layer, uint32_t stream,
                        neap_window *window, const neap_attn_shape *whole, uint32_t n_threads,
                        void *select_scratch, void *attn_scratch, void *lists) {
    neap_selected *s = &layer->selected[stream];
    neap_attn_shape shape;
    node->of = s;
    node->window = window;
    node->n_kv_heads = whole->n_kv_heads;
    node->first_chunk = neap_select_cells(s->select) / NEAP_CHUNK_CELLS;
    node->n_kept = neap_select_kept_chunks(s->select);
    atomic_init(&node->err, 0);
    neap_select_begin(&node->step, s->select, &whole->q, whole->n_tokens, whole->scale, reconstruct,
                      node, select_scratch);
    neap_select_shape(s->select, whole, lists, &shape);
    shape.ready = is_ready;
    shape.wait = await;
    shape.ctx = node;
    neap_attn_plan(&node->job, &shape, n_threads, attn_scratch,
                   (char *)lists + padded(neap_select_shape_bytes(s->select, whole)));
}

void neap_selected_run(neap_selected_node *node, int thread) {
    const int err = neap_select_run(&node->step, (uint32_t)thread);
    if (err != 0) {
        atomic_store(&node->err, err);
    }
}
