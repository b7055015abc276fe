/* attend.c - attention nodes computed by our own kernels (src/attn).
 *
 * A FLASH_ATTN_EXT node that the kernels can compute is replaced, in a copy of the graph's list of
 * nodes, by a CUSTOM node with the same sources and the same destination: the host's CPU backend
 * then calls us with its own threads, within the one call that computes the graph. The host's
 * graph and tensors stay as they are.
 *
 * Such a node waits for its KV chunks by itself, one by one, and takes those first that are there:
 * within a layer computation and restoration overlap. Chunks that the mask hides are not waited
 * for.
 *
 * Of a layer whose KV is held coded (--kv klt, lowram) it reads the coded chunks through a window
 * (window.c).
 *
 * With an OpenCL device, a node that it does not refuse is computed there: thread 0 waits for all
 * the chunks that are seen, since the device cannot fault, launches and waits. Should the device
 * fail, thread 0 computes the node by itself.
 *
 * Threads   plan and the questions are the graph's thread; run_node is called by the host's. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "attn.h"
#include "selected.h"
#include "window.h"
#include "err.h"
#include "ggml-impl.h"
#include "opencl_attn.h"
#include "plugin_int.h"

enum { ALIGN = 64 };

typedef struct attended {
    struct ggml_tensor node; /* the CUSTOM node */
    neap_attn job;
    bool on_device;
    int at; /* index in the graph */
    neap_layer_cache
        *layer; /* K and V lie in it, from cell 0 of first_stream on; NULL: elsewhere */
    uint32_t first_stream;
    uint8_t *seen; /* [n_streams][n_chunks] 0: the mask hides the chunk; NULL: not known */
    neap_coded coded;
    bool selects;                 /* reads by selection */
    neap_selected_node *selected; /* [n_streams] instead of job where it selects */
} attended;

/* A block of memory that only grows. */
typedef struct arena {
    char *base;
    size_t cap, used;
} arena;

struct neap_attend {
    struct ggml_tensor **nodes;
    size_t cap_nodes;
    attended *attended;
    size_t n, cap;
    size_t n_host;              /* attention nodes of the graph that stay the host's */
    const neap_attend_job *now; /* of the plan at hand */
    arena scratch;              /* one for all: nodes run one after the other */
    arena selecting;            /* the same, for what chooses */
    arena lists;                /* chunk pointers, states, seen, selected */
    neap_window window;
    uint64_t n_device, n_cpu; /* attentions planned for either; with a device only */
};

neap_attend_mode neap_attend_choice;
static neap_opencl *device; /* of the process, set once, never closed */

static int device_alloc(void *ctx, size_t len, size_t align, void **ret_base) {
    return neap_opencl_reserve(ctx, len, align, ret_base);
}

static void device_free(void *ctx, void *base) {
    neap_opencl_release(ctx, base);
}

void neap_attend_open_device(neap_options *options) {
    const char *reason = NULL;
    if (neap_opencl_open(true, &device, &reason) != 0) {
        neap_log(NEAP_LOG_WARN, "no attention by OpenCL: %s; the CPU's kernels compute it", reason);
        return;
    }
    neap_log(NEAP_LOG_INFO, "attention by OpenCL on %s, %s arithmetic", neap_opencl_device(device),
             neap_opencl_uses_half(device) ? "f16" : "f32");
    if (neap_opencl_needs_reserve(device)) {
        options->region_alloc = device_alloc;
        options->region_free = device_free;
        options->region_ctx = device;
    }
}

neap_attend *neap_attend_create(void) {
    return calloc(1, sizeof(neap_attend));
}

void neap_attend_free(neap_attend *attend) {
    if (attend == NULL) {
        return;
    }
    if (device != NULL) {
        neap_log(NEAP_LOG_INFO, "attentions by OpenCL: %llu, by the CPU's kernels: %llu",
                 (unsigned long long)attend->n_device, (unsigned long long)attend->n_cpu);
    }
    neap_window_free(&attend->window);
    free(attend->nodes);
    free(attend->attended);
    free(attend->scratch.base);
    free(attend->selecting.base);
    free(attend->lists.base);
    free(attend);
}

int neap_attend_prepare(neap_attend *attend, int n_threads) {
    return neap_window_fit(&attend->window, n_threads);
}

static size_t aligned(size_t bytes) {
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static int arena_reserve(arena *memory, size_t bytes) {
    memory->used = 0;
    if (bytes <= memory->cap) {
        return 0;
    }
    char *grown = aligned_alloc(ALIGN, aligned(bytes + bytes / 4));
    if (grown == NULL) {
        return -ENOMEM;
    }
    free(memory->base);
    memory->base = grown;
    memory->cap = aligned(bytes + bytes / 4);
    return 0;
}

static void *arena_take(arena *memory, size_t bytes) {
    void *taken = memory->base + memory->used;
    memory->used += aligned(bytes);
    return taken;
}

/* ---- what a node asks for ---- */

static bool attn_type(enum ggml_type type, neap_attn_type *ret_type) {
    switch (type) {
    case GGML_TYPE_F16:
        *ret_type = NEAP_ATTN_F16;
        return true;
    case GGML_TYPE_BF16:
        *ret_type = NEAP_ATTN_BF16;
        return true;
    case GGML_TYPE_F32:
        *ret_type = NEAP_ATTN_F32;
        return true;
    case GGML_TYPE_Q8_0:
        *ret_type = NEAP_ATTN_Q8_0;
        return true;
    case GGML_TYPE_Q4_0:
        *ret_type = NEAP_ATTN_Q4_0;
        return true;
    default:
        return false;
    }
}

static bool plane_of(const struct ggml_tensor *cells, neap_attn_plane *ret_plane) {
    *ret_plane = (neap_attn_plane){.head_elems = (uint32_t)cells->ne[0],
                                   .cell_bytes = cells->nb[1],
                                   .head_bytes = cells->nb[2]};
    return attn_type(cells->type, &ret_plane->type) &&
           cells->nb[0] == neap_host_fn.type_size(cells->type) && cells->ne[0] <= 1024;
}

/* The mask repeats over heads and streams; what else the kernels cannot do gives false. */
static bool shape_of(const struct ggml_tensor *node, neap_attn_shape *ret_shape) {
    const struct ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2];
    const struct ggml_tensor *mask = node->src[3], *sinks = node->src[4];
    if (q->type != GGML_TYPE_F32 || q->nb[0] != sizeof(float) || node->type != GGML_TYPE_F32 ||
        k->ne[1] != v->ne[1] || k->ne[2] != v->ne[2] || k->ne[3] != v->ne[3] ||
        q->ne[3] != k->ne[3] || q->ne[2] % k->ne[2] != 0 || k->ne[1] <= 0 || q->ne[1] <= 0 ||
        k->ne[1] > INT32_MAX || q->ne[1] > INT32_MAX) {
        return false;
    }
    if (mask != NULL && (mask->type != GGML_TYPE_F16 || mask->nb[0] != 2 ||
                         mask->ne[0] < k->ne[1] || mask->ne[1] < q->ne[1])) {
        return false;
    }
    if (sinks != NULL && (sinks->type != GGML_TYPE_F32 || sinks->ne[0] < q->ne[2])) {
        return false;
    }
    float params[3];
    memcpy(params, node->op_params, sizeof params);
    *ret_shape = (neap_attn_shape){
        .n_tokens = (uint32_t)q->ne[1],
        .n_heads = (uint32_t)q->ne[2],
        .n_kv_heads = (uint32_t)k->ne[2],
        .n_streams = (uint32_t)k->ne[3],
        .n_cells = (uint32_t)k->ne[1],
        .q = {q->data, q->nb[1], q->nb[2], q->nb[3]},
        .out = {node->data, node->nb[2], node->nb[1], node->nb[3]},
        .sinks = sinks != NULL ? sinks->data : NULL,
        .scale = params[0],
        .max_bias = params[1],
        .softcap = params[2],
    };
    if (mask != NULL) {
        ret_shape->mask = (neap_attn_mask){.base = mask->data,
                                           .token_bytes = mask->nb[1],
                                           .head_bytes = mask->nb[2],
                                           .stream_bytes = mask->nb[3],
                                           .n_heads = (uint32_t)mask->ne[2],
                                           .n_streams = (uint32_t)mask->ne[3]};
    }
    return plane_of(k, &ret_shape->k) && plane_of(v, &ret_shape->v) &&
           neap_attn_supported(ret_shape);
}

/* The layer whose cells, from the first of a stream on, are those of the view; NULL: none. */
static neap_layer_cache *layer_of(const struct ggml_tensor *view, uint32_t *ret_stream) {
    const struct ggml_tensor *root = view->view_src != NULL ? view->view_src : view;
    neap_buffer *buffer = neap_buffer_of(root);
    neap_cache *cache = buffer != NULL ? neap_cache_of(buffer, root) : NULL;
    if (cache == NULL) {
        return NULL;
    }
    size_t offset = (size_t)((const char *)view->data - (const char *)root->data);
    if (offset % root->nb[2] >= root->nb[1] || view->nb[1] != root->nb[1] ||
        (view->ne[3] > 1 && view->nb[3] != root->nb[2])) {
        return NULL;
    }
    *ret_stream = (uint32_t)(offset / root->nb[2]);
    return cache->owner;
}

/* ---- while a node runs ---- */

static bool chunk_ready(void *ctx, uint32_t stream, uint32_t chunk) {
    const attended *a = ctx;
    if (a->coded.window != NULL) {
        return neap_coded_ready(&a->coded, stream, chunk);
    }
    return neap_unit_resident(neap_plugin_engine(),
                              neap_kv_unit(a->layer->kv, a->first_stream + stream, chunk));
}

static int chunk_wait(void *ctx, uint32_t stream, uint32_t chunk) {
    attended *a = ctx;
    if (a->coded.window != NULL) {
        return neap_coded_wait(&a->coded, stream, chunk);
    }
    return neap_wait(neap_plugin_engine(),
                     neap_kv_unit(a->layer->kv, a->first_stream + stream, chunk));
}

static void run_on_device(attended *a) {
    if (neap_attn_await(&a->job) == 0 && neap_opencl_attn(device, &a->job.shape) != 0) {
        neap_attn_run(&a->job, 0);
    }
}

/* The streams' attentions are independent: a thread that is done with one goes on to the next. */
static void run_selected(attended *a, int thread) {
    const uint32_t n = a->job.shape.n_streams;
    for (uint32_t i = 0; i < n && (uint32_t)thread < a->job.n_threads; i++) {
        neap_selected_run(&a->selected[i], thread);
    }
    for (uint32_t i = 0; i < n && (uint32_t)thread < a->job.n_threads; i++) {
        neap_attn_run(&a->selected[i].job, (uint32_t)thread);
    }
}

static void run_node(struct ggml_tensor *dst, int thread, int n_threads, void *userdata) {
    (void)dst;
    (void)n_threads;
    attended *a = userdata;
    if (a->selects) {
        run_selected(a, thread);
    } else if (a->on_device) {
        if (thread == 0) {
            run_on_device(a);
        }
    } else if ((uint32_t)thread < a->job.n_threads) {
        neap_coded_run(&a->coded, thread);
        neap_attn_run(&a->job, (uint32_t)thread);
    }
}

/* ---- planning ---- */

static const void **chunk_list(neap_attend *attend, const struct ggml_tensor *cells) {
    size_t n_chunks = ((size_t)cells->ne[1] + NEAP_ATTN_CHUNK_CELLS - 1) / NEAP_ATTN_CHUNK_CELLS;
    const void **list =
        arena_take(&attend->lists, n_chunks * (size_t)cells->ne[3] * sizeof(void *));
    for (size_t stream = 0; stream < (size_t)cells->ne[3]; stream++) {
        for (size_t chunk = 0; chunk < n_chunks; chunk++) {
            list[stream * n_chunks + chunk] = (const char *)cells->data + stream * cells->nb[3] +
                                              chunk * NEAP_ATTN_CHUNK_CELLS * cells->nb[1];
        }
    }
    return list;
}

static size_t list_bytes(const neap_attn_shape *shape) {
    size_t chunks = shape->n_streams *
                    (size_t)((shape->n_cells + NEAP_ATTN_CHUNK_CELLS - 1) / NEAP_ATTN_CHUNK_CELLS);
    return 2 * aligned(chunks * sizeof(void *)) + 2 * aligned(chunks) +
           aligned(neap_attn_state_bytes(shape));
}

/* Layers share their mask: what it shows is found once for all of them. */
static uint8_t *seen_chunks(neap_attend *attend, const attended *a,
                            const struct ggml_tensor *mask) {
    const neap_attn_shape *shape = &a->job.shape;
    if (!neap_mask_usable(mask) || mask->ne[2] != 1) {
        return NULL;
    }
    for (const attended *other = attend->attended; other < a; other++) {
        if (other->seen != NULL && other->node.src[3] == mask &&
            other->job.n_chunks == a->job.n_chunks) {
            return other->seen;
        }
    }
    uint8_t *seen = arena_take(&attend->lists, (size_t)shape->n_streams * a->job.n_chunks);
    for (uint32_t stream = 0; stream < shape->n_streams; stream++) {
        for (uint32_t chunk = 0; chunk < a->job.n_chunks; chunk++) {
            seen[stream * a->job.n_chunks + chunk] = neap_mask_shows_cells(
                mask, stream, chunk * NEAP_ATTN_CHUNK_CELLS, NEAP_ATTN_CHUNK_CELLS);
        }
    }
    return seen;
}

static size_t offset_in_row(const struct ggml_tensor *view) {
    const struct ggml_tensor *root = view->view_src != NULL ? view->view_src : view;
    return (size_t)((const char *)view->data - (const char *)root->data) % root->nb[1];
}

/* Of a node that waits for its chunks, those that are held coded are read through the window. */
static void plan_coded(neap_attend *attend, const struct ggml_tensor *node, attended *a,
                       const void **k, const void **v) {
    size_t n = (size_t)a->job.shape.n_streams * a->job.n_chunks;
    a->coded = (neap_coded){.window = &attend->window,
                            .layer = a->layer,
                            .first_stream = a->first_stream,
                            .n_streams = a->job.shape.n_streams,
                            .n_chunks = a->job.n_chunks,
                            .offsets = {offset_in_row(node->src[1]), offset_in_row(node->src[2])},
                            .chunks = {k, v},
                            .seen = a->seen,
                            .states = arena_take(&attend->lists, n)};
    memset(a->coded.states, 0, n);
}

/* What the shape asks of one of its streams, seen as the only one. */
static neap_attn_shape shape_of_stream(const neap_attn_shape *shape, uint32_t stream) {
    neap_attn_shape one = *shape;
    const size_t n_chunks =
        (shape->n_cells + NEAP_ATTN_CHUNK_CELLS - 1) / NEAP_ATTN_CHUNK_CELLS * (size_t)stream;
    one.n_streams = 1;
    one.q.base += stream * shape->q.stream_bytes;
    one.out.base += stream * shape->out.stream_bytes;
    if (shape->mask.base != NULL) {
        one.mask.base += stream % shape->mask.n_streams * shape->mask.stream_bytes;
    }
    if (shape->k.chunks != NULL) {
        one.k.chunks += n_chunks;
        one.v.chunks += n_chunks;
    }
    return one;
}

/* Whether the node reads by selection, all of its streams; adds what it needs for that. The
 * prefixes follow the cache in any case, and each layer's buffer serves one node of a graph. */
static bool takes_selection(neap_attend *attend, const struct ggml_tensor *node, attended *a,
                            neap_selected_needs *needs) {
    uint32_t first, v_first;
    neap_layer_cache *layer = layer_of(node->src[1], &first);
    a->layer = layer;
    if (neap_select_budget == 0 || layer == NULL || layer_of(node->src[2], &v_first) != layer ||
        !neap_kv_may_be_held_coded(layer->kv) || !neap_mask_usable(node->src[3]) ||
        offset_in_row(node->src[1]) != 0 || offset_in_row(node->src[2]) != 0) {
        return false;
    }
    bool applies = neap_kv_is_held_coded(layer->kv) && neap_window_holds(&attend->window, layer) &&
                   !attend->now->measuring;
    for (uint32_t i = 0; i < a->job.shape.n_streams; i++) {
        const neap_attn_shape one = shape_of_stream(&a->job.shape, i);
        neap_selected_follow(layer, first + i, &attend->window, &one);
        applies = applies && neap_selected_applies(layer, first + i, &one);
    }
    for (const attended *other = attend->attended; other < a && applies; other++) {
        applies = !other->selects || other->layer != layer;
    }
    for (uint32_t i = 0; i < a->job.shape.n_streams && applies; i++) {
        const neap_attn_shape one = shape_of_stream(&a->job.shape, i);
        const neap_selected_needs more =
            neap_selected_needs_of(layer, first + i, &one, (uint32_t)attend->now->n_threads);
        needs->select_scratch += aligned(more.select_scratch);
        needs->attn_scratch += aligned(more.attn_scratch);
        needs->lists += aligned(more.lists) + aligned(sizeof(neap_selected_node));
    }
    return applies;
}

/* Of a node for which takes_selection() was true. */
static void plan_selected(neap_attend *attend, attended *a) {
    const uint32_t n = a->job.shape.n_streams, n_threads = (uint32_t)attend->now->n_threads;
    a->selected = arena_take(&attend->lists, n * sizeof *a->selected);
    attend->selecting.used = attend->scratch.used = 0;
    for (uint32_t i = 0; i < n; i++) {
        const neap_attn_shape one = shape_of_stream(&a->job.shape, i);
        const neap_selected_needs needs =
            neap_selected_needs_of(a->layer, a->first_stream + i, &one, n_threads);
        neap_selected_plan(&a->selected[i], a->layer, a->first_stream + i, &attend->window, &one,
                           n_threads, arena_take(&attend->selecting, needs.select_scratch),
                           arena_take(&attend->scratch, needs.attn_scratch),
                           arena_take(&attend->lists, needs.lists));
    }
}

/* Decided for each shape; counted. */
static bool takes_device(neap_attend *attend, const neap_attn_shape *shape) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    if (device == NULL) {
        return false;
    }
    const char *why = neap_opencl_refuses(device, shape);
    if (why == NULL) {
        attend->n_device++;
        return true;
    }
    attend->n_cpu++;
    if (!atomic_flag_test_and_set(&said)) {
        neap_log(NEAP_LOG_WARN, "OpenCL does not compute some attention (%s): the CPU's kernels do",
                 why);
    }
    return false;
}

/* Of a node found by find_nodes. */
static void plan_node(neap_attend *attend, const struct ggml_tensor *node, attended *a) {
    neap_attn_shape shape = a->job.shape;
    uint32_t v_stream = 0;
    a->layer = layer_of(node->src[1], &a->first_stream);
    if (a->layer != NULL && layer_of(node->src[2], &v_stream) != a->layer) {
        a->layer = NULL;
    }
    const void **k = chunk_list(attend, node->src[1]), **v = chunk_list(attend, node->src[2]);
    shape.k.chunks = k;
    shape.v.chunks = v;
    const bool is_coded = a->layer != NULL && neap_kv_is_held_coded(a->layer->kv) &&
                          neap_window_holds(&attend->window, a->layer) &&
                          !attend->now->all_resident;
    if (is_coded || (a->layer != NULL && !attend->now->all_resident &&
                     neap_waits_within_layers(neap_plugin_engine()))) {
        shape.ready = chunk_ready;
        shape.wait = chunk_wait;
        shape.ctx = a;
    }
    void *state = arena_take(&attend->lists, neap_attn_state_bytes(&shape));
    neap_attn_plan(&a->job, &shape, (uint32_t)attend->now->n_threads, attend->scratch.base, state);
    a->on_device = !is_coded && takes_device(attend, &shape);
    a->node = *node;
    a->node.op = neap_host_op_number(NEAP_OP_CUSTOM);
    const struct ggml_custom_op_params params = {
        .fun = run_node, .n_tasks = GGML_N_TASKS_MAX, .userdata = a};
    memset(a->node.op_params, 0, sizeof a->node.op_params);
    memcpy(a->node.op_params, &params, sizeof params);
    attend->nodes[a->at] = &a->node;
    a->seen = shape.wait != NULL && !a->selects ? seen_chunks(attend, a, node->src[3]) : NULL;
    a->coded.window = NULL;
    atomic_init(&a->coded.next, 0);
    if (a->selects) {
        plan_selected(attend, a);
    } else if (is_coded) {
        plan_coded(attend, node, a, k, v);
    }
}

static bool is_held_coded(const struct ggml_tensor *node) {
    uint32_t stream;
    const neap_layer_cache *layer = layer_of(node->src[1], &stream);
    return layer != NULL && neap_kv_is_held_coded(layer->kv);
}

/* Whether our kernels are the ones to compute this attention node. */
static bool is_ours(const neap_attend_job *job, const struct ggml_tensor *node,
                    neap_attn_shape *ret_shape) {
    return neap_attend_choice != NEAP_ATTEND_HOST && shape_of(node, ret_shape) &&
           (neap_attend_choice != NEAP_ATTEND_AUTO || job->measuring || is_held_coded(node) ||
            neap_attend_choose(node, job->cpu, job->n_threads));
}

/* Room for a graph with so many attention nodes. */
static int reserve(neap_attend *attend, size_t n_nodes, size_t n_attentions) {
    if (n_nodes > attend->cap_nodes) {
        struct ggml_tensor **grown = realloc(attend->nodes, 2 * n_nodes * sizeof *grown);
        if (grown == NULL) {
            return -ENOMEM;
        }
        attend->nodes = grown;
        attend->cap_nodes = 2 * n_nodes;
    }
    if (n_attentions > attend->cap) {
        free(attend->attended);
        attend->cap = 0;
        attend->attended = malloc(2 * n_attentions * sizeof *attend->attended);
        if (attend->attended == NULL) {
            return -ENOMEM;
        }
        attend->cap = 2 * n_attentions;
    }
    return 0;
}

/* The nodes that are ours, their shapes, and memory for all of them. */
static int find_nodes(neap_attend *attend, const struct ggml_cgraph *graph) {
    size_t n_attentions = 0, scratch = 0, selecting = 0, lists = 0;
    for (int i = 0; i < graph->n_nodes; i++) {
        n_attentions += neap_host_op(graph->nodes[i]->op) == NEAP_OP_FLASH_ATTN;
        if (neap_select_budget > 0 && graph->nodes[i]->view_src != NULL) {
            neap_selected_note_write(graph->nodes[i]);
        }
    }
    int err = n_attentions > 0 ? reserve(attend, (size_t)graph->n_nodes, n_attentions) : 0;
    for (int i = 0; i < graph->n_nodes && n_attentions > 0 && err == 0; i++) {
        if (neap_host_op(graph->nodes[i]->op) != NEAP_OP_FLASH_ATTN) {
            continue;
        }
        attended *a = &attend->attended[attend->n];
        if (!is_ours(attend->now, graph->nodes[i], &a->job.shape)) {
            attend->n_host++;
            continue;
        }
        a->at = i;
        size_t bytes = neap_attn_scratch_bytes(&a->job.shape, (uint32_t)attend->now->n_threads);
        scratch = bytes > scratch ? bytes : scratch;
        lists += list_bytes(&a->job.shape);
        neap_selected_needs needs = {0};
        a->selects = takes_selection(attend, graph->nodes[i], a, &needs);
        if (a->selects) {
            scratch = needs.attn_scratch > scratch ? needs.attn_scratch : scratch;
            selecting = needs.select_scratch > selecting ? needs.select_scratch : selecting;
            lists += needs.lists;
        }
        attend->n++;
    }
    if (err == 0) {
        err = arena_reserve(&attend->scratch, scratch);
    }
    if (err == 0) {
        err = arena_reserve(&attend->selecting, selecting);
    }
    return err == 0 ? arena_reserve(&attend->lists, lists) : err;
}

int neap_attend_plan(neap_attend *attend, const struct ggml_cgraph *graph,
                     const neap_attend_job *job) {
    attend->n = 0;
    attend->n_host = 0;
    attend->now = job;
    int err = find_nodes(attend, graph);
    if (err != 0) {
        attend->n = 0;
    }
    if (attend->n > 0) {
        memcpy(attend->nodes, graph->nodes, (size_t)graph->n_nodes * sizeof *attend->nodes);
    }
    for (size_t i = 0; i < attend->n; i++) {
        plan_node(attend, graph->nodes[attend->attended[i].at], &attend->attended[i]);
    }
    return err;
}

const char *neap_attend_kernel(void) {
    return device != NULL ? "opencl" : neap_attn_kernel_name(0);
}

void neap_attend_count(const neap_attend *attend, size_t *ret_ours, size_t *ret_host) {
    *ret_ours = attend->n;
    *ret_host = attend->n_host;
}

struct ggml_tensor **neap_attend_nodes(neap_attend *attend, const struct ggml_cgraph *graph) {
    return attend->n > 0 ? attend->nodes : graph->nodes;
}

static const attended *planned(const neap_attend *attend, int node) {
    for (size_t i = 0; i < attend->n && attend->attended[i].at <= node; i++) {
        if (attend->attended[i].at == node) {
            return &attend->attended[i];
        }
    }
    return NULL;
}

bool neap_attend_waits(const neap_attend *attend, int node) {
    const attended *a = planned(attend, node);
    return a != NULL && a->job.shape.wait != NULL;
}

bool neap_attend_reads_coded(const neap_attend *attend, int node) {
    const attended *a = planned(attend, node);
    return a != NULL && (a->coded.window != NULL || a->selects);
}

bool neap_attend_reads(const neap_attend *attend, int node, uint32_t stream, uint32_t chunk) {
    const attended *a = planned(attend, node);
    if (a != NULL && a->selects && stream >= a->first_stream &&
        stream - a->first_stream < a->job.shape.n_streams &&
        chunk < a->selected[stream - a->first_stream].first_chunk) {
        return false; /* as its turn comes, if at all */
    }
    if (a == NULL || a->seen == NULL || stream < a->first_stream ||
        stream - a->first_stream >= a->job.shape.n_streams || chunk >= a->job.n_chunks) {
        return true;
    }
    return a->seen[(stream - a->first_stream) * a->job.n_chunks + chunk] != 0;
}

static int result_of(const attended *a) {
    int err = a->selects ? 0 : neap_attn_result(&a->job);
    for (uint32_t i = 0; a->selects && i < a->job.shape.n_streams && err == 0; i++) {
        err = neap_attn_result(&a->selected[i].job);
    }
    return err;
}

int neap_attend_result(const neap_attend *attend, int begin, int end, int *ret_node) {
    for (size_t i = 0; i < attend->n; i++) {
        const attended *a = &attend->attended[i];
        int err = a->at >= begin && a->at < end ? result_of(a) : 0;
        if (err != 0) {
            *ret_node = a->at;
            return err;
        }
    }
    return 0;
}
