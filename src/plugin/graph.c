/* graph.c - computes graphs on memory of which some may be away.
 *
 * The host's CPU backend computes. While everything is resident a graph is one call to it. While
 * something is evicted, the graph is cut before each node that needs a unit that is not back yet:
 * the restore of all units it needs starts at once, in the order of the nodes, and each part runs
 * as soon as its own units are there.
 *
 * Which experts a MUL_MAT_ID node reads shows when its ids are computed: where experts of a layer
 * are away, the graph is cut before its first such node, and exactly the experts that the ids name
 * are brought back.
 *
 * Invariants
 *  1. No node runs before every unit that it reads is resident and every unit that it writes is
 *     resident and marked as written.
 *  2. No cut falls between RMS_NORM and the MUL after it, which the CPU backend fuses.
 *  3. Within a graph nothing is evicted (neap_use_begin .. neap_use_end).
 *
 * Threads   one backend is used by one thread at a time; several backends may run at once. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "err.h"
#include "ggml-impl.h"
#include "plugin_int.h"
#include "rope.h"

enum {
    REQUEST_GAP_NS = 50 * 1000 * 1000, /* a graph after such a pause begins a request */
    HOLD_MAX = 64,                     /* outputs of a graph named one by one */
};

/* What a node does to one run of units or cells. */
typedef struct access {
    int node;
    bool is_write, whole;
    bool inside;             /* the node waits for it by itself */
    bool coded;              /* and reads it as klt coded it: its pages are not needed */
    neap_unit_id unit;       /* reads */
    neap_layer_cache *layer; /* of cells; NULL: weights */
    uint32_t stream, first, n;
    const neap_weight *experts;    /* of which the ids name those that are read; NULL: of none */
    const struct ggml_tensor *ids; /* [n_used, n_tokens] i32 */
    int ids_node;                  /* computes the ids; -1: they are there from the start */
} access;

typedef struct backend_context {
    ggml_backend_t cpu;
    neap_attend *attend;
    struct ggml_threadpool *pool; /* only where the host has no OpenMP */
    int n_threads;
    access *accesses;
    size_t n_accesses, cap_accesses;
    neap_unit_id *units;
    size_t cap_units;
    bool out_of_memory;
    uint64_t last_end_ns;
    bool in_request;
    int n_tokens; /* of the graph at hand */
} backend_context;

/* ---- collecting what a graph touches ---- */

static void push_access(backend_context *ctx, access entry) {
    if (ctx->n_accesses == ctx->cap_accesses) {
        size_t cap = ctx->cap_accesses == 0 ? 1024 : 2 * ctx->cap_accesses;
        access *grown = realloc(ctx->accesses, cap * sizeof *grown);
        if (grown == NULL) {
            ctx->out_of_memory = true;
            return;
        }
        ctx->accesses = grown;
        ctx->cap_accesses = cap;
    }
    ctx->accesses[ctx->n_accesses++] = entry;
}

/* Whether what reads the unit has to say so. */
static bool is_listed(neap_unit_id unit) {
    return neap_tracks_use(neap_plugin_engine()) || !neap_unit_resident(neap_plugin_engine(), unit);
}

typedef struct visit_context {
    backend_context *backend;
    int node;
} visit_context;

static int push_read(neap_layer_cache *layer, uint32_t stream, uint32_t first, uint32_t n,
                     void *ctx) {
    visit_context *visit = ctx;
    const neap_attend *attend = visit->backend->attend;
    bool inside = neap_attend_waits(attend, visit->node);
    bool reads_coded = inside && neap_attend_reads_coded(attend, visit->node);
    neap_unit_id last = NEAP_UNIT_NONE;
    for (uint32_t chunk = first / NEAP_CHUNK_CELLS; chunk <= (first + n - 1) / NEAP_CHUNK_CELLS;
         chunk++) {
        neap_unit_id unit = neap_kv_unit(layer->kv, stream, chunk);
        if (unit != last && is_listed(unit) &&
            (!inside || neap_attend_reads(attend, visit->node, stream, chunk))) {
            push_access(visit->backend,
                        (access){.node = visit->node,
                                 .inside = inside,
                                 .coded = reads_coded && neap_kv_is_coded(layer->kv, stream, chunk),
                                 .unit = unit,
                                 .layer = layer,
                                 .stream = stream,
                                 .first = chunk * NEAP_CHUNK_CELLS,
                                 .n = NEAP_CHUNK_CELLS});
        }
        last = unit;
    }
    return 0;
}

/* A write to cells that are in use (context shift): empty chunks need nothing. */
static int push_rewrite(neap_layer_cache *layer, uint32_t stream, uint32_t first, uint32_t n,
                        void *ctx) {
    visit_context *visit = ctx;
    uint32_t used = neap_kv_used(layer->kv, stream);
    if (first < used) {
        uint32_t len = first + n > used ? used - first : n;
        push_access(visit->backend, (access){.node = visit->node,
                                             .is_write = true,
                                             .layer = layer,
                                             .stream = stream,
                                             .first = first,
                                             .n = len});
    }
    return 0;
}

const struct ggml_tensor *neap_rope_before(const struct ggml_tensor *tensor) {
    for (int depth = 0; tensor != NULL && depth < 8; depth++) {
        neap_op op = neap_host_op(tensor->op);
        if (op == NEAP_OP_ROPE) {
            return tensor;
        }
        tensor = tensor->view_src != NULL && op != NEAP_OP_EMPTY ? NULL
                 : op == NEAP_OP_MUL_MAT                         ? tensor->src[1]
                                                                 : tensor->src[0];
    }
    return NULL;
}

/* What K is turned by, from the first node that shows it. */
static void tell_rope(neap_cache *cache, const struct ggml_tensor *rope) {
    const struct ggml_tensor *factors = rope->src[2];
    int32_t offset;
    const neap_kv_rope params =
        neap_rope_of_node(rope->op_params, factors != NULL ? factors->data : NULL, &offset);
    cache->owner->told_rope = true;
    /* An offset, and rows that RoPE has seen a part of, are not known: q8 codes such a cache. */
    if (offset == 0 && rope->ne[0] * rope->ne[1] == cache->tensor->ne[0] &&
        neap_kv_set_rope(cache->owner->kv, (uint32_t)rope->ne[0], &params) != 0) {
        neap_log(NEAP_LOG_INFO, "layer %d: a RoPE that no codec knows", cache->owner->layer);
    }
}

/* Which of several models a context belongs to shows in the weights that its cells are made with.
 */
static void tell_model(neap_buffer *caches, const struct ggml_tensor *rows) {
    for (int depth = 0; rows != NULL && depth < 16 && !caches->told_model; depth++) {
        for (int i = 0; i < GGML_MAX_SRC && !caches->told_model; i++) {
            neap_buffer *buffer = rows->src[i] != NULL ? neap_buffer_of(rows->src[i]) : NULL;
            const char *path = buffer != NULL && buffer->role == NEAP_ROLE_WEIGHTS
                                   ? neap_weights_path(buffer)
                                   : NULL;
            if (path != NULL) {
                neap_region_use_gguf(caches->region, path);
                caches->told_model = true;
            }
        }
        rows = rows->src[0];
    }
}

/* Rows of a SET_ROWS into a cache, as runs of cells; their positions where ROPE tells. */
static void push_set_rows(backend_context *ctx, int at, const struct ggml_tensor *node,
                          neap_cache *cache) {
    neap_layer_cache *layer = cache->owner;
    const struct ggml_tensor *index = node->src[1];
    const int64_t *rows = index->data;
    bool by_element = cache->is_v && atomic_load(&layer->v_transposed);
    int64_t n = index->ne[0], per_stream = layer->n_cells;
    if (by_element) {
        per_stream *= cache->tensor->ne[0];
    } else {
        ctx->n_tokens = (int)n;
    }
    const struct ggml_tensor *rope = cache->is_v ? NULL : neap_rope_before(node->src[0]);
    const int32_t *positions = rope != NULL && rope->src[1] != NULL && rope->src[1]->ne[0] >= n
                                   ? rope->src[1]->data
                                   : NULL;
    if (positions != NULL && !layer->told_rope) {
        tell_rope(cache, rope);
    }
    tell_model(layer->buffer, node->src[0]);
    access run = {.node = at, .is_write = true, .whole = true, .layer = layer};
    for (int64_t i = 0; i < n; i++) {
        uint32_t stream = (uint32_t)(rows[i] / per_stream);
        uint32_t cell = (uint32_t)(rows[i] % layer->n_cells);
        if (rows[i] < 0 || stream >= layer->n_streams) {
            continue; /* the CPU kernel would stop on it */
        }
        if (positions != NULL) {
            layer->positions[(size_t)stream * layer->n_cells + cell] = positions[i];
        }
        if (run.n > 0 && run.stream == stream &&
            (cell == run.first + run.n || (cell >= run.first && cell < run.first + run.n))) {
            run.n = cell == run.first + run.n ? run.n + 1 : run.n;
            continue;
        }
        if (run.n > 0) {
            push_access(ctx, run);
            neap_lost_rewritten(cache, run.stream, run.first, run.n);
        }
        run.stream = stream;
        run.first = cell;
        run.n = 1;
    }
    if (run.n > 0) {
        push_access(ctx, run);
        neap_lost_rewritten(cache, run.stream, run.first, run.n);
    }
}

static void shift_positions(neap_cache *cache, const struct ggml_tensor *rope) {
    neap_layer_cache *layer = cache->owner;
    const int32_t *shift = rope->src[1]->data;
    size_t n = (size_t)layer->n_cells * layer->n_streams;
    if (cache->is_v || (size_t)rope->src[1]->ne[0] < n) {
        return;
    }
    for (size_t i = 0; i < n; i++) {
        if (layer->positions[i] >= 0) {
            layer->positions[i] += shift[i];
        }
    }
}

static void collect_write(backend_context *ctx, int at, struct ggml_tensor *node) {
    if (node->view_src == NULL) {
        return;
    }
    neap_cache *cache = neap_cache_of(neap_buffer_of(node), node->view_src);
    neap_op op = neap_host_op(node->op);
    if (cache == NULL || op == NEAP_OP_EMPTY) {
        return;
    }
    if (op == NEAP_OP_SET_ROWS && neap_host_op(node->src[1]->op) == NEAP_OP_EMPTY &&
        node->src[1]->type == GGML_TYPE_I64) {
        neap_cache_note_layout(cache, node);
        push_set_rows(ctx, at, node, cache);
        return;
    }
    if (op == NEAP_OP_ROPE) {
        shift_positions(cache, node);
    }
    visit_context visit = {.backend = ctx, .node = at};
    neap_cache_view_cells(cache, node, push_rewrite, &visit);
}

/* Room for so many units. */
static bool reserve_units(backend_context *ctx, size_t n) {
    if (n <= ctx->cap_units) {
        return true;
    }
    neap_unit_id *grown = realloc(ctx->units, 2 * n * sizeof *grown);
    if (grown == NULL) {
        return false;
    }
    ctx->units = grown;
    ctx->cap_units = 2 * n;
    return true;
}

/* Whether the node reads of this weight, its first source, the matrices that its ids name only. */
static bool reads_by_ids(const struct ggml_tensor *node, const neap_weight *weight) {
    const struct ggml_tensor *matrices = node->src[0], *ids = node->src[2];
    return neap_host_op(node->op) == NEAP_OP_MUL_MAT_ID && weight->n_experts > 0 &&
           matrices->data == weight->addr && matrices->nb[2] == weight->tensor->nb[2] &&
           (size_t)matrices->ne[2] == weight->n_experts && ids->type == GGML_TYPE_I32;
}

/* The last node before this one that writes what the tensor shows; -1: none. */
static int written_at(const struct ggml_cgraph *graph, int before,
                      const struct ggml_tensor *shown) {
    const struct ggml_tensor *root = shown->view_src != NULL ? shown->view_src : shown;
    int at = before - 1;
    for (; at >= 0; at--) {
        const struct ggml_tensor *node = graph->nodes[at];
        if ((node == root || node->view_src == root) && neap_host_op(node->op) != NEAP_OP_EMPTY) {
            break;
        }
    }
    return at;
}

static void collect_weight(backend_context *ctx, const struct ggml_cgraph *graph, int at, int src,
                           const neap_weight *weight) {
    const struct ggml_tensor *node = graph->nodes[at];
    bool by_ids = src == 0 && reads_by_ids(node, weight);
    for (size_t u = 0; u < weight->n_units; u++) {
        if (!is_listed(weight->units[u])) {
            continue;
        }
        if (by_ids) {
            ctx->out_of_memory = ctx->out_of_memory || !reserve_units(ctx, weight->n_units);
            push_access(ctx, (access){.node = at,
                                      .experts = weight,
                                      .ids = node->src[2],
                                      .ids_node = written_at(graph, at, node->src[2])});
            return;
        }
        push_access(ctx, (access){.node = at, .unit = weight->units[u]});
    }
}

static void collect_reads(backend_context *ctx, const struct ggml_cgraph *graph, int at) {
    const struct ggml_tensor *node = graph->nodes[at];
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        const struct ggml_tensor *src = node->src[i];
        neap_buffer *buffer = src != NULL ? neap_buffer_of(src) : NULL;
        if (buffer == NULL) {
            continue;
        }
        if (buffer->role == NEAP_ROLE_WEIGHTS) {
            const neap_weight *weight = neap_weights_find(buffer, src->data);
            if (weight != NULL) {
                collect_weight(ctx, graph, at, i, weight);
            }
            continue;
        }
        /* The destination of SET_ROWS appears as a source too; its cells are a write. */
        neap_cache *cache = neap_cache_of(buffer, src->view_src != NULL ? src->view_src : src);
        if (cache != NULL && node->view_src != cache->tensor) {
            visit_context visit = {.backend = ctx, .node = at};
            neap_cache_view_cells(cache, src, push_read, &visit);
        }
    }
}

static void collect(backend_context *ctx, const struct ggml_cgraph *graph, bool all_resident) {
    ctx->n_accesses = 0;
    ctx->out_of_memory = false;
    ctx->n_tokens = 0;
    for (int i = 0; i < graph->n_nodes; i++) {
        struct ggml_tensor *node = graph->nodes[i];
        if (neap_host_op(node->op) == NEAP_OP_EMPTY) {
            continue;
        }
        if (!all_resident) {
            collect_reads(ctx, graph, i);
        }
        collect_write(ctx, i, node);
    }
}

/* ---- computing ---- */

static enum ggml_status compute_range(backend_context *ctx, const struct ggml_cgraph *graph,
                                      int begin, int end) {
    struct ggml_cgraph part = *graph;
    part.nodes = neap_attend_nodes(ctx->attend, graph) + begin;
    part.n_nodes = end - begin;
    part.uid = 0; /* not the host's graph any more */
    return ctx->cpu->iface.graph_compute(ctx->cpu, &part);
}

static uint32_t first_chunk(const access *entry) {
    return entry->first / NEAP_CHUNK_CELLS;
}

static uint32_t last_chunk(const access *entry) {
    return (entry->first + entry->n - 1) / NEAP_CHUNK_CELLS;
}

/* Of the experts that the ids name, those to be listed, each once, into ctx->units; -> how many.
 * The ids have been computed. */
static size_t list_experts(backend_context *ctx, const access *entry) {
    const neap_weight *weight = entry->experts;
    const struct ggml_tensor *ids = entry->ids;
    size_t n = 0;
    for (size_t expert = 0; expert < weight->n_units; expert++) {
        ctx->units[expert] = NEAP_UNIT_NONE;
    }
    for (int64_t token = 0; token < ids->ne[1]; token++) {
        for (int64_t i = 0; i < ids->ne[0]; i++) {
            int32_t expert;
            memcpy(&expert,
                   (const char *)ids->data + (size_t)token * ids->nb[1] + (size_t)i * ids->nb[0],
                   sizeof expert);
            if (expert >= 0 && (size_t)expert < weight->n_units) {
                ctx->units[expert] = weight->units[expert];
            }
        }
    }
    for (size_t expert = 0; expert < weight->n_units; expert++) {
        neap_unit_id unit = ctx->units[expert];
        if (unit != NEAP_UNIT_NONE && is_listed(unit)) {
            ctx->units[n++] = unit;
        }
    }
    return n;
}

/* Whether the entry needs no waiting in a part that began at this node. */
static bool is_ready(backend_context *ctx, const access *entry, int begin) {
    neap_engine *engine = neap_plugin_engine();
    if (entry->experts != NULL) {
        size_t n = entry->ids_node < begin ? list_experts(ctx, entry) : 0, n_resident = 0;
        while (n_resident < n && neap_unit_resident(engine, ctx->units[n_resident])) {
            n_resident++;
        }
        return entry->ids_node < begin && n_resident == n;
    }
    if (!entry->is_write) {
        return neap_unit_resident(engine, entry->unit);
    }
    for (uint32_t chunk = first_chunk(entry); chunk <= last_chunk(entry); chunk++) {
        if (!neap_unit_resident(engine, neap_kv_unit(entry->layer->kv, entry->stream, chunk))) {
            return false;
        }
    }
    return true;
}

/* All of them start before the first is waited for. */
static int fetch_experts(backend_context *ctx, const access *entry) {
    size_t n = list_experts(ctx, entry);
    int err = neap_need(neap_plugin_engine(), ctx->units, n);
    for (size_t i = 0; i < n && err == 0; i++) {
        err = neap_wait(neap_plugin_engine(), ctx->units[i]);
    }
    return err;
}

static int try_ready(backend_context *ctx, const access *entry) {
    return entry->coded ? neap_kv_fetch(entry->layer->kv, entry->stream, first_chunk(entry))
           : entry->experts != NULL ? fetch_experts(ctx, entry)
           : entry->is_write        ? neap_kv_write(entry->layer->kv, entry->stream, entry->first,
                                                    entry->n, entry->whole)
                                    : neap_wait(neap_plugin_engine(), entry->unit);
}

/* A loss fails the request only if its attention would read what is lost: cells that this graph
 * writes anew, or that its mask hides, are no matter. What stays lost is marked either way. */
static int make_ready(backend_context *ctx, const struct ggml_cgraph *graph, const access *entry) {
    int err = try_ready(ctx, entry);
    if (err != NEAP_E_LOST || entry->layer == NULL) {
        return err;
    }
    neap_lost_note(entry->layer, entry->stream, entry->first, entry->n);
    for (size_t i = 0; i < ctx->n_accesses; i++) {
        const access *other = &ctx->accesses[i];
        if (other->whole && other->layer == entry->layer) {
            neap_lost_unmark(other->layer, other->stream, other->first, other->n);
        }
    }
    return neap_lost_visible(graph) ? NEAP_E_LOST : try_ready(ctx, entry);
}

/* Tells the engine what the graph needs, in the order of its nodes; experts are not known yet. */
static int announce(backend_context *ctx) {
    size_t n = 0;
    for (size_t i = 0; i < ctx->n_accesses; i++) {
        const access *entry = &ctx->accesses[i];
        if (entry->experts != NULL || entry->coded) {
            continue;
        }
        size_t more = entry->is_write ? last_chunk(entry) - first_chunk(entry) + 1 : 1;
        if (!reserve_units(ctx, n + more)) {
            return -ENOMEM;
        }
        if (!entry->is_write) {
            ctx->units[n++] = entry->unit;
            continue;
        }
        for (uint32_t chunk = first_chunk(entry); chunk <= last_chunk(entry); chunk++) {
            ctx->units[n++] = neap_kv_unit(entry->layer->kv, entry->stream, chunk);
        }
    }
    return neap_need(neap_plugin_engine(), ctx->units, n);
}

/* After a loss: what else is lost shows now, and not in one failed request after the other. */
static void find_all_losses(backend_context *ctx, const struct ggml_cgraph *graph, int node) {
    for (size_t next = 0; next < ctx->n_accesses; next++) {
        if (ctx->accesses[next].node >= node && ctx->accesses[next].layer != NULL) {
            make_ready(ctx, graph, &ctx->accesses[next]);
        }
    }
}

static bool is_fused_tail(const struct ggml_cgraph *graph, int node) {
    return node > 0 && neap_host_op(graph->nodes[node]->op) == NEAP_OP_MUL &&
           neap_host_op(graph->nodes[node - 1]->op) == NEAP_OP_RMS_NORM;
}

/* Runs the graph part by part, each as long as what it needs is there without waiting. */
static enum ggml_status compute_as_restored(backend_context *ctx, const struct ggml_cgraph *graph,
                                            int *ret_err) {
    size_t next = 0;
    int begin = 0;
    while (begin < graph->n_nodes) {
        int end = begin;
        bool stop = false;
        while (end < graph->n_nodes && !stop) {
            for (; next < ctx->n_accesses && ctx->accesses[next].node == end; next++) {
                if (ctx->accesses[next].inside) {
                    continue;
                }
                if (end > begin && !is_ready(ctx, &ctx->accesses[next], begin) &&
                    !is_fused_tail(graph, end)) {
                    stop = true;
                    break;
                }
                *ret_err = make_ready(ctx, graph, &ctx->accesses[next]);
                if (*ret_err != 0) {
                    find_all_losses(ctx, graph, end);
                    return GGML_STATUS_FAILED;
                }
            }
            end += stop ? 0 : 1;
        }
        enum ggml_status status = compute_range(ctx, graph, begin, end);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        int node = 0;
        *ret_err = neap_attend_result(ctx->attend, begin, end, &node);
        if (*ret_err != 0) {
            find_all_losses(ctx, graph, node);
            return GGML_STATUS_FAILED;
        }
        begin = end;
    }
    return GGML_STATUS_SUCCESS;
}

/* Cut before each attention, whose layer is written down there. */
static enum ggml_status compute_captured(backend_context *ctx, const struct ggml_cgraph *graph,
                                         int *ret_err) {
    int begin = 0;
    for (int at = 0; at < graph->n_nodes; at++) {
        if (neap_host_op(graph->nodes[at]->op) != NEAP_OP_FLASH_ATTN) {
            continue;
        }
        enum ggml_status status = compute_range(ctx, graph, begin, at);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        *ret_err = neap_capture_attention(graph, at);
        if (*ret_err != 0) {
            return GGML_STATUS_FAILED;
        }
        begin = at;
    }
    return compute_range(ctx, graph, begin, graph->n_nodes);
}

static enum ggml_status compute_resident(backend_context *ctx, const struct ggml_cgraph *graph,
                                         int *ret_err) {
    for (size_t i = 0; i < ctx->n_accesses; i++) {
        *ret_err = make_ready(ctx, graph, &ctx->accesses[i]);
        if (*ret_err != 0) {
            return GGML_STATUS_FAILED;
        }
    }
    return neap_capture_on() ? compute_captured(ctx, graph, ret_err)
                             : compute_range(ctx, graph, 0, graph->n_nodes);
}

/* ---- around a graph ---- */

static void finish_buffer(neap_buffer *buffer, void *ctx) {
    (void)ctx;
    neap_weights_finish(buffer);
    neap_caches_finish(buffer);
}

static void take_failure(neap_buffer *buffer, void *ctx) {
    int *err = ctx;
    int failed = atomic_exchange(&buffer->failed, 0);
    *err = *err == 0 ? failed : *err;
}

/* Graph outputs are read after the graph; the rest of the scratch memory is free until the next. */
static void hold_outputs(neap_buffer *buffer, void *ctx) {
    const struct ggml_cgraph *graph = ctx;
    if (buffer->role != NEAP_ROLE_SCRATCH ||
        buffer->self->usage != GGML_BACKEND_BUFFER_USAGE_COMPUTE) {
        return;
    }
    uint64_t ranges[HOLD_MAX][2];
    size_t n = 0;
    const char *base = neap_region_base(buffer->region);
    for (int i = 0; i < graph->n_nodes; i++) {
        const struct ggml_tensor *node = graph->nodes[i];
        bool is_output = (node->flags & GGML_TENSOR_FLAG_OUTPUT) != 0 || i == graph->n_nodes - 1;
        if (!is_output || neap_buffer_of(node) != buffer) {
            continue;
        }
        if (n == HOLD_MAX) {
            neap_buffer_hold_all(buffer);
            return;
        }
        ranges[n][0] = (uint64_t)((const char *)node->data - base);
        ranges[n][1] = neap_host_fn.nbytes(node);
        n++;
    }
    neap_scratch_hold(buffer->region, ranges, n);
}

static void mark_begin(backend_context *ctx) {
    uint64_t now = neap_clock_ns();
    if (!ctx->in_request && (ctx->n_tokens > 1 || now - ctx->last_end_ns > REQUEST_GAP_NS)) {
        ctx->in_request = true;
        neap_request_begin(neap_plugin_engine(), now);
    }
}

static void mark_end(backend_context *ctx, const struct ggml_cgraph *graph) {
    ctx->last_end_ns = neap_clock_ns();
    const struct ggml_tensor *last = graph->n_nodes > 0 ? graph->nodes[graph->n_nodes - 1] : NULL;
    if (ctx->in_request && last != NULL && last->ne[1] > 0) {
        ctx->in_request = false;
        neap_request_first_token(neap_plugin_engine());
    }
}

static enum ggml_status backend_graph_compute(ggml_backend_t backend, struct ggml_cgraph *graph) {
    backend_context *ctx = backend->context;
    neap_engine *engine = neap_plugin_engine();
    int err = 0;
    neap_buffer_for_each(finish_buffer, NULL);
    neap_buffer_for_each(take_failure, &err);
    if (err != 0) {
        neap_log(NEAP_LOG_ERROR, "request refused after: %s", neap_strerror(err));
        return GGML_STATUS_FAILED;
    }
    err = neap_attend_prepare(ctx->attend, ctx->n_threads);
    neap_use_begin(engine, NEAP_USE_COMPUTE);
    /* A policy that goes by use wants to know what the graph needs anyway. */
    bool all_resident = neap_all_resident(engine) && !neap_tracks_use(engine);
    const neap_attend_job job = {
        .cpu = ctx->cpu, .n_threads = ctx->n_threads, .all_resident = all_resident};
    err = err != 0 ? err : neap_attend_plan(ctx->attend, graph, &job);
    collect(ctx, graph, all_resident);
    mark_begin(ctx);
    err = err != 0                   ? err
          : ctx->out_of_memory       ? -ENOMEM
          : neap_lost_visible(graph) ? NEAP_E_LOST
          : all_resident             ? 0
                                     : announce(ctx);
    enum ggml_status status = GGML_STATUS_FAILED;
    if (err == 0) {
        status = all_resident ? compute_resident(ctx, graph, &err)
                              : compute_as_restored(ctx, graph, &err);
    }
    size_t n_ours, n_host;
    neap_attend_count(ctx->attend, &n_ours, &n_host);
    neap_attention_count(engine, neap_attend_kernel(), n_ours, n_host);
    if (status == GGML_STATUS_SUCCESS) {
        neap_buffer_for_each(hold_outputs, graph);
    }
    neap_use_end(engine, NEAP_USE_COMPUTE);
    if (err != 0) {
        neap_log(NEAP_LOG_ERROR, "request failed: %s", neap_strerror(err));
    }
    mark_end(ctx, graph);
    return status;
}

/* Called when a graph is planned, before any data exists: learns how V is laid out. */
static void backend_graph_optimize(ggml_backend_t backend, struct ggml_cgraph *graph,
                                   struct ggml_backend_graph_optimize_params *params) {
    (void)backend;
    (void)params;
    neap_buffer_for_each(finish_buffer, NULL);
    for (int i = 0; i < graph->n_nodes; i++) {
        struct ggml_tensor *node = graph->nodes[i];
        if (neap_host_op(node->op) == NEAP_OP_SET_ROWS && node->view_src != NULL) {
            neap_cache *cache = neap_cache_of(neap_buffer_of(node), node->view_src);
            if (cache != NULL) {
                neap_cache_note_layout(cache, node);
            }
        }
    }
}

static const char *backend_name(ggml_backend_t backend) {
    (void)backend;
    return "NEAP";
}

static void free_pool(backend_context *ctx) {
    void *address = neap_host_cpu_proc("ggml_threadpool_free");
    void (*threadpool_free)(struct ggml_threadpool *) = NULL;
    memcpy(&threadpool_free, &address, sizeof address);
    if (ctx->pool != NULL && threadpool_free != NULL) {
        threadpool_free(ctx->pool);
    }
    ctx->pool = NULL;
}

static void backend_free(ggml_backend_t backend) {
    backend_context *ctx = backend->context;
    ctx->cpu->iface.free(ctx->cpu);
    free_pool(ctx);
    free(ctx->accesses);
    free(ctx->units);
    neap_attend_free(ctx->attend);
    free(ctx);
    free(backend);
}

/* Without OpenMP the CPU backend would make and join threads for every graph. */
static void renew_pool(backend_context *ctx) {
    void *make_address = neap_host_cpu_proc("ggml_threadpool_new");
    void *use_address = neap_host_cpu_proc("ggml_backend_cpu_set_threadpool");
    struct ggml_threadpool *(*make)(struct ggml_threadpool_params *) = NULL;
    void (*use)(ggml_backend_t, struct ggml_threadpool *) = NULL;
    memcpy(&make, &make_address, sizeof make_address);
    memcpy(&use, &use_address, sizeof use_address);
    if (neap_host_has_openmp() || make == NULL || use == NULL) {
        return;
    }
    struct ggml_threadpool_params params = neap_host_fn.threadpool_params_default(ctx->n_threads);
    struct ggml_threadpool *pool = make(&params);
    use(ctx->cpu, pool);
    free_pool(ctx);
    ctx->pool = pool;
}

void neap_backend_set_n_threads(ggml_backend_t backend, int n_threads) {
    backend_context *ctx = backend->context;
    void *address = neap_host_cpu_proc("ggml_backend_set_n_threads");
    ggml_backend_set_n_threads_t set = NULL;
    memcpy(&set, &address, sizeof address);
    if (set == NULL || n_threads == ctx->n_threads) {
        return;
    }
    ctx->n_threads = n_threads;
    renew_pool(ctx);
    set(ctx->cpu, n_threads);
}

void neap_backend_set_abort(ggml_backend_t backend, ggml_abort_callback callback, void *data) {
    backend_context *ctx = backend->context;
    void *address = neap_host_cpu_proc("ggml_backend_set_abort_callback");
    ggml_backend_set_abort_callback_t set = NULL;
    memcpy(&set, &address, sizeof address);
    if (set != NULL) {
        set(ctx->cpu, callback, data);
    }
}

static ggml_guid backend_guid = {0x6e, 0x65, 0x61, 0x70, 0x2d, 0x67, 0x67, 0x6d,
                                 0x6c, 0x2d, 0x62, 0x61, 0x63, 0x6b, 0x65, 0x6e};

ggml_backend_t neap_backend_create(ggml_backend_dev_t device) {
    ggml_backend_dev_t cpu = neap_host_cpu();
    if (neap_plugin_engine() == NULL || cpu == NULL) {
        return NULL;
    }
    backend_context *ctx = calloc(1, sizeof *ctx);
    struct ggml_backend *backend = calloc(1, sizeof *backend);
    if (ctx != NULL) {
        ctx->cpu = cpu->iface.init_backend(cpu, NULL);
        ctx->attend = neap_attend_create();
        ctx->n_threads = GGML_DEFAULT_N_THREADS; /* the CPU backend's own */
    }
    if (ctx == NULL || backend == NULL || ctx->cpu == NULL || ctx->attend == NULL) {
        if (ctx != NULL && ctx->cpu != NULL) {
            ctx->cpu->iface.free(ctx->cpu);
        }
        neap_attend_free(ctx != NULL ? ctx->attend : NULL);
        free(ctx);
        free(backend);
        return NULL;
    }
    *backend = (struct ggml_backend){
        .guid = &backend_guid,
        .iface =
            {
                .get_name = backend_name,
                .free = backend_free,
                .graph_compute = backend_graph_compute,
                .graph_optimize = backend_graph_optimize,
            },
        .device = device,
        .context = ctx,
    };
    return backend;
}
