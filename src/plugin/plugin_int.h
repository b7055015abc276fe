/* plugin_int.h - what the files of the backend share.
 *
 *   plugin.c   entry point, registration, device
 *   host.c     the host's ggml
 *   buffer.c   buffer type and buffers; sends accesses to weights.c or kv.c
 *   weights.c  weight tensors: where they lie in the GGUF file, repacking, units
 *   source.c   finds the GGUF file and offset of a tensor
 *   kv.c       KV caches: which bytes are which cells
 *   graph.c    graph_compute: which nodes wait for which units
 *   attend.c   attention nodes that our own kernels compute
 *   window.c    their window onto KV chunks that are held coded
 *   selected.c  reading of those only what a query asks for
 *   attend_choice.c  which of them, by measurement
 *   mask.c     what an attention mask shows
 *   capture.c  writes what calibration needs (NEAP_CAPTURE)
 *   lost.c     cells that could not be brought back are never read
 *
 * Threads    a buffer's tables are filled while the model loads (one thread) and constant from
 *            the first graph on; what changes later is under the buffer's mutex or atomic. */
#ifndef NEAP_PLUGIN_INT_H
#define NEAP_PLUGIN_INT_H

#include <pthread.h>
#include <stdatomic.h>

#include "host.h"
#include "neap.h"

typedef enum neap_role {
    NEAP_ROLE_UNKNOWN,
    NEAP_ROLE_WEIGHTS,
    NEAP_ROLE_KV,
    NEAP_ROLE_SCRATCH
} neap_role;

/* A weight tensor in its final place. */
typedef struct neap_weight {
    struct ggml_tensor *tensor;
    char *addr;
    size_t len;
    char *path; /* file it came from; NULL: unknown */
    uint64_t file_offset;
    ggml_backend_buffer_type_t extra; /* repacked by this type of the host; NULL: plain */
    bool in_place; /* lies at its file offset modulo pages: may be read back directly */
    bool viewed;   /* has views: must not move */
    bool filled;
    size_t n_experts;    /* units[e] holds expert e; 0: every unit is needed to read it */
    neap_unit_id *units; /* its layer's unit, or several for one large tensor */
    size_t n_units;      /* what lies beyond them is always resident */
} neap_weight;

/* One cache tensor (cache_k_l7, cache_v_l7). */
typedef struct neap_cache {
    struct ggml_tensor *tensor;
    char tag[32]; /* between "cache_" and "k_l": sliding-window caches have their own */
    int layer;
    bool is_v;
    struct neap_layer_cache *owner;
} neap_cache;

/* K and V of one layer. */
typedef struct neap_layer_cache {
    struct neap_buffer *buffer;
    struct ggml_tensor *planes[2]; /* K, V or NULL */
    size_t n_planes;
    int layer;
    uint32_t n_cells, n_streams;
    atomic_bool v_transposed;
    neap_kv *kv;
    int32_t *positions; /* [n_streams * n_cells] position of each cell, -1 unknown */
    uint8_t *lost;      /* [n_streams * n_cells] 1: content lost, must not be read; NULL: none */
    bool captured;      /* capture.c has written what it is */
    struct neap_selected *selected; /* [n_streams] selected.c's; NULL: nothing yet */
    bool told_rope;                 /* the engine knows what K is turned by, or cannot */
} neap_layer_cache;

typedef struct neap_shadow {
    ggml_backend_buffer_type_t extra;
    ggml_backend_buffer_t donor;       /* throw-away buffer whose callbacks repack */
    struct ggml_backend_buffer buffer; /* what repacked tensors point to */
} neap_shadow;

#define NEAP_SHADOWS_MAX 4

typedef struct neap_buffer {
    ggml_backend_buffer_t self;
    neap_region *region;
    neap_role role;
    size_t size;
    struct neap_buffer *next; /* list of live buffers */

    neap_weight *weights; /* sorted by addr once ready */
    size_t n_weights, cap_weights, n_filled;
    atomic_bool weights_ready;
    neap_region *packed; /* where tensors move as they are loaded, one after the other */
    size_t packed_used;
    neap_shadow shadows[NEAP_SHADOWS_MAX];
    size_t n_shadows;

    neap_cache *caches;
    size_t n_caches, cap_caches;
    neap_layer_cache **layers;
    size_t n_layers;
    bool told_model; /* the engine knows which model the caches belong to */

    atomic_int failed; /* first error of a callback that cannot return one */
} neap_buffer;

extern struct ggml_backend_buffer_type neap_buffer_type;

/* The engine of this process, created at the first need; NULL when that failed (logged). */
neap_engine *neap_plugin_engine(void);
bool neap_plugin_in_use(void); /* some weights or KV cache lie in our buffers */

/* buffer.c */
neap_buffer *neap_buffer_of(const struct ggml_tensor *tensor); /* NULL: not ours */
bool neap_buffer_is_ours(ggml_backend_buffer_t buffer);
void neap_buffer_for_each(void (*visit)(neap_buffer *buffer, void *ctx), void *ctx);
void neap_buffer_hold_all(neap_buffer *buffer); /* scratch: release nothing of it for now */
void neap_buffer_latch(neap_buffer *buffer, int err, const char *what);

/* weights.c */
void neap_weights_note_op(const struct ggml_tensor *op); /* which operation reads which weight */
size_t neap_weights_alloc_size(const struct ggml_tensor *tensor);
int neap_weights_init(neap_buffer *buffer, struct ggml_tensor *tensor);
int neap_weights_set(neap_buffer *buffer, struct ggml_tensor *tensor, const void *data,
                     size_t offset, size_t size);
int neap_weights_get(neap_buffer *buffer, const struct ggml_tensor *tensor, void *data,
                     size_t offset, size_t size);
void neap_weights_finish(neap_buffer *buffer);            /* forms the units; idempotent */
const char *neap_weights_path(const neap_buffer *buffer); /* the model's file; NULL: not known */
/* The weight that holds addr; NULL: none. */
const neap_weight *neap_weights_find(const neap_buffer *buffer, const void *addr);
void neap_weights_free(neap_buffer *buffer);

/* source.c: the file that holds the tensor's bytes; path is malloc'd. -ENOENT: not found. */
int neap_source_find(const struct ggml_tensor *tensor, const void *data, size_t size,
                     char **ret_path, uint64_t *ret_offset);

/* kv.c */
bool neap_kv_name(const char *name, char tag[32], int *ret_layer, bool *ret_is_v);
int neap_caches_init(neap_buffer *buffer, struct ggml_tensor *tensor);
void neap_caches_finish(neap_buffer *buffer);
void neap_caches_free(neap_buffer *buffer);
neap_cache *neap_cache_of(const neap_buffer *buffer, const struct ggml_tensor *root);
/* Calls visit for every run of cells of one stream that the bytes [offset, offset + size) touch. */
typedef int (*neap_cells_visit)(neap_layer_cache *layer, uint32_t stream, uint32_t first,
                                uint32_t n, void *ctx);
int neap_cache_cells(const neap_cache *cache, size_t offset, size_t size, neap_cells_visit visit,
                     void *ctx);
/* The same for everything a (strided, permuted) view of the cache touches. */
int neap_cache_view_cells(const neap_cache *cache, const struct ggml_tensor *view,
                          neap_cells_visit visit, void *ctx);
void neap_cache_note_layout(neap_cache *cache, const struct ggml_tensor *set_rows);
/* Within a use: makes the bytes readable, or ready to be written. */
int neap_cache_read(const neap_cache *cache, size_t offset, size_t size);
int neap_cache_write(neap_cache *cache, size_t offset, size_t size);

/* lost.c: cells whose content could not be brought back (see there) */
int neap_lost_note(neap_layer_cache *layer, uint32_t stream, uint32_t first, uint32_t n);
void neap_lost_unmark(neap_layer_cache *layer, uint32_t stream, uint32_t first, uint32_t n);
void neap_lost_rewritten(neap_cache *cache, uint32_t stream, uint32_t first, uint32_t n);
bool neap_lost_any(const neap_layer_cache *layer, uint32_t stream, uint32_t first, uint32_t n);
/* True when the graph would read a lost cell. */
bool neap_lost_visible(const struct ggml_cgraph *graph);
void neap_lost_clear(neap_layer_cache *layer);

/* mask.c: [n_kv, n_tokens, 1, n_streams]; a stream beyond its last is that modulo n_streams. */
bool neap_mask_usable(const struct ggml_tensor *mask); /* its values exist before the graph runs */
const char *neap_mask_row(const struct ggml_tensor *mask, int64_t stream, int64_t token);
bool neap_mask_hides(const struct ggml_tensor *mask, const char *row, int64_t cell);
bool neap_mask_shows_cells(const struct ggml_tensor *mask, int64_t stream, uint32_t first,
                           uint32_t n);

/* attend.c: see there */
typedef enum neap_attend_mode {
    NEAP_ATTEND_AUTO,
    NEAP_ATTEND_HOST,
    NEAP_ATTEND_OWN,
    NEAP_ATTEND_OPENCL
} neap_attend_mode;
extern neap_attend_mode neap_attend_choice; /* set once, before the first graph */
/* With NEAP_ATTEND_OPENCL, before the engine is made: opens the device, and has regions lie where
 * it reads them. Without a device, a warning: our CPU kernels compute. */
void neap_attend_open_device(neap_options *options);
typedef struct neap_attend neap_attend;
neap_attend *neap_attend_create(void); /* NULL: no memory */
void neap_attend_free(neap_attend *attend);
/* Before a graph, within no use: room to read what is held coded. Fails: -ENOMEM. */
int neap_attend_prepare(neap_attend *attend, int n_threads);
typedef struct neap_attend_job {
    ggml_backend_t cpu; /* the host's */
    int n_threads;
    bool all_resident; /* nothing has to be waited for */
    bool measuring;    /* ours whatever the choice */
} neap_attend_job;
/* Plans every attention of the graph that our kernels can compute and are chosen for. */
int neap_attend_plan(neap_attend *attend, const struct ggml_cgraph *graph,
                     const neap_attend_job *job);
/* Attention nodes of the plan, and those left to the host. */
const char *neap_attend_kernel(void); /* whose kernels they are, for neap stat */
void neap_attend_count(const neap_attend *attend, size_t *ret_ours, size_t *ret_host);
/* The graph's nodes with those of the plan in place; valid until the next plan. */
struct ggml_tensor **neap_attend_nodes(neap_attend *attend, const struct ggml_cgraph *graph);
/* Whether the node of this index waits for the chunks of its K and V by itself. */
bool neap_attend_waits(const neap_attend *attend, int node);
/* False when the node's mask hides this chunk of its cache. */
bool neap_attend_reads(const neap_attend *attend, int node, uint32_t stream, uint32_t chunk);
/* Whether the node of this index reads chunks that are held coded as they are. */
bool neap_attend_reads_coded(const neap_attend *attend, int node);
/* First error of the planned nodes in [begin, end) of the graph, or 0; and its node. */
int neap_attend_result(const neap_attend *attend, int begin, int end, int *ret_node);

/* selected.c: cells that a step of generation chooses from KV held coded; 0: it reads all. Set
 * once, before the first graph. */
extern uint32_t neap_select_budget;

/* attend_choice.c */
extern int64_t neap_attend_long_cells; /* the long context that is timed; set before first graph */
/* Whether our kernels are to compute this node (which they can). */
bool neap_attend_choose(const struct ggml_tensor *node, ggml_backend_t cpu, int n_threads);

/* capture.c: off, and then never called for, unless a path was given. */
void neap_capture_open(const char *path);
bool neap_capture_on(void);
/* The attention node of this index is computed next. Fails: -EIO (said). */
int neap_capture_attention(const struct ggml_cgraph *graph, int at);

/* graph.c */
/* The ROPE that this tensor comes from; NULL: none. */
const struct ggml_tensor *neap_rope_before(const struct ggml_tensor *tensor);
ggml_backend_t neap_backend_create(ggml_backend_dev_t device);
void neap_backend_set_n_threads(ggml_backend_t backend, int n_threads);
void neap_backend_set_abort(ggml_backend_t backend, ggml_abort_callback callback, void *data);
#endif
