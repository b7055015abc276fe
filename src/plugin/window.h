/* window.h - the window through which an attention reads KV chunks that are held coded (--kv klt,
 * lowram).
 *
 * Before a node's tiles run, its threads decode the layer's coded chunks that the mask shows, each
 * taking the next one, and point the node's list of chunks at what they decoded. The window is
 * address space for the largest cache of a layer, committed as far as chunks are decoded into it;
 * the layers share it, and an eviction takes it while nothing computes.
 *
 * Threads   plan is the graph's thread; the rest is for the threads of the node. */
#ifndef NEAP_PLUGIN_WINDOW_H
#define NEAP_PLUGIN_WINDOW_H

#include <pthread.h>
#include <stdatomic.h>

#include "plugin_int.h"

/* One for a backend; zeroed: none yet. */
typedef struct neap_window {
    neap_region *region;
    size_t cap; /* bytes for rows; scratch of the threads lies behind them */
    size_t scratch_bytes;
    int n_threads;
    pthread_mutex_t lock;   /* guards nothing but the sleep of who waits for a chunk */
    pthread_cond_t changed; /* a chunk has been decoded */
    bool has_lock;
} neap_window;

/* Makes room for the caches there are. Within no use. Fails: -ENOMEM. */
int neap_window_fit(neap_window *window, int n_threads);
void neap_window_free(neap_window *window);
/* Whether it can serve the layer: a fit of LowRAM may have come between fitting it and the use. */
bool neap_window_holds(const neap_window *window, const neap_layer_cache *layer);

/* Of a thread of the nodes: for neap_kv_read(). */
void *neap_window_scratch(const neap_window *window, int thread);

/* The K and V of a node. */
typedef struct neap_coded {
    neap_window *window; /* NULL: nothing of this node is held coded */
    neap_layer_cache *layer;
    uint32_t first_stream, n_streams, n_chunks;
    size_t offsets[2];      /* of the node's K and V within a cell's row */
    const void **chunks[2]; /* [n_streams][n_chunks] where K and V lie; becomes the window */
    const uint8_t *seen;    /* the same shape; 0: not to be decoded. NULL: not known */
    atomic_uchar *states;   /* the same shape, zeroed */
    atomic_uint next;
    atomic_int err; /* the first */
} neap_coded;

/* Decodes chunks until none is left to take; who waits for one gets its error. */
void neap_coded_run(neap_coded *coded, int thread);
/* As neap_attn_shape's ready and wait; of chunks that are not coded the engine's. */
bool neap_coded_ready(const neap_coded *coded, uint32_t stream, uint32_t chunk);
int neap_coded_wait(neap_coded *coded, uint32_t stream, uint32_t chunk);
#endif
