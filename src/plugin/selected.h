/* selected.h - attention that reads of KV held coded (--kv klt, lowram) only what the
 * query asks for
 * (--kv-select): src/attn/select over one stream of a layer's cache.
 *
 * The prefix is every chunk from the first on whose cells are all in use and
 * not being written; what follows it is read as it is. A chunk joins before it
 * is coded, as the next graph is planned: so outliers and the window are kept
 * exactly. Where it was coded already, in the graph that filled it, they are
 * what it was coded to. A chunk that was written since it joined leaves, with
 * all after it.
 *
 * Threads   plan is the graph's thread; the rest is for the threads of the
 * node. */
#ifndef NEAP_PLUGIN_SELECTED_H
#define NEAP_PLUGIN_SELECTED_H

#include "select.h"
#include "window.h"

/* Tokens of a graph up to which it counts as generation. */
#define NEAP_SELECT_TOKENS 8u

/* One stream of a layer's cache. */
typedef struct neap_selected neap_selected;

/* Before the nodes of a graph are planned: what this one of them writes. */
void neap_selected_note_write(const struct ggml_tensor *node);
void neap_selected_free(neap_layer_cache *layer);

/* One stream of a node that reads so. */
typedef struct neap_selected_node {
    neap_selected *of;
    neap_window *window;
    uint32_t n_kv_heads, first_chunk, n_kept; /* chunks of the prefix; that stand for them */
    neap_select_step step;
    atomic_int err;
    neap_attn job;
} neap_selected_node;

/* Lets the prefix follow the cache, whatever the node then does. */
void neap_selected_follow(neap_layer_cache *layer, uint32_t stream, neap_window *window,
                          const neap_attn_shape *whole);
/* whole: the attention of one stream over all of its cells. */
bool neap_selected_applies(const neap_layer_cache *layer, uint32_t stream,
                           const neap_attn_shape *whole);
/* Memory for one stream: scratch, its own within the node, which nodes that run one after the
 * other share, for choosing and for the attention; and lists. */
typedef struct neap_selected_needs {
    size_t select_scratch, attn_scratch, lists;
} neap_selected_needs;
neap_selected_needs neap_selected_needs_of(const neap_layer_cache *layer, uint32_t stream,
                                           const neap_attn_shape *whole, uint32_t n_threads);
/* Memory as neap_selected_needs_of(). */
void neap_selected_plan(neap_selected_node *node, neap_layer_cache *layer, uint32_t stream,
                        neap_window *window, const neap_attn_shape *whole, uint32_t n_threads,
                        void *select_scratch, void *attn_scratch, void *lists);
/* Chooses and reconstructs; when it is back in all threads, node->job can run.
 */
void neap_selected_run(neap_selected_node *node, int thread);
#endif
