/* window.c - see window.h.
 *
 * A chunk's state goes from UNKNOWN to DECODED, to PLAIN (its pages are to be read, and waited for)
 * or to FAILED, once, by the thread that took it; a chunk that the mask hides stays UNKNOWN, and
 * is not asked for. What PLAIN and DECODED say was decided before any tile reads the chunk: within
 * the use nothing of the layer's changes but by the graph's own nodes. */
#include <errno.h>
#include <string.h>

#include "bytes.h"
#include "window.h"
#include "err.h"

enum { UNKNOWN, DECODED, PLAIN, FAILED };
enum { ALIGN = 64 };

/* ---- the window ---- */

typedef struct needs {
    size_t rows, scratch;
} needs;

static size_t padded(const neap_layer_cache *layer, int plane) {
    const struct ggml_tensor *root = layer->planes[plane];
    return NEAP_ROUND_UP((size_t)NEAP_CHUNK_CELLS * root->nb[1], ALIGN);
}

/* Of all chunks of a layer's cache. */
static size_t rows_bytes(const neap_layer_cache *layer) {
    return (size_t)neap_kv_n_chunks(layer->kv) * layer->n_streams *
           (padded(layer, 0) + padded(layer, 1));
}

static void add_needs(neap_buffer *buffer, void *ctx) {
    needs *n = ctx;
    for (size_t i = 0; buffer->role == NEAP_ROLE_KV && i < buffer->n_layers; i++) {
        const neap_layer_cache *layer = buffer->layers[i];
        if (!neap_kv_is_held_coded(layer->kv)) {
            continue;
        }
        size_t rows = rows_bytes(layer), scratch = neap_kv_read_scratch(layer->kv);
        n->rows = rows > n->rows ? rows : n->rows;
        n->scratch = scratch > n->scratch ? scratch : n->scratch;
    }
}

int neap_window_fit(neap_window *window, int n_threads) {
    needs n = {0};
    neap_buffer_for_each(add_needs, &n);
    n.scratch = NEAP_ROUND_UP(n.scratch, ALIGN);
    if (n.rows <= window->cap && n.scratch <= window->scratch_bytes &&
        n_threads <= window->n_threads) {
        return 0;
    }
    if (n.rows == 0) {
        return 0;
    }
    if (!window->has_lock) {
        pthread_mutex_init(&window->lock, NULL);
        pthread_cond_init(&window->changed, NULL);
        window->has_lock = true;
    }
    neap_region_free(window->region);
    window->region = NULL;
    window->cap = 0;
    int err = neap_region_create(neap_plugin_engine(), n.rows + (size_t)n_threads * n.scratch,
                                 NEAP_REGION_SCRATCH, &window->region);
    err = err != 0 ? err : neap_scratch_hold(window->region, NULL, 0);
    if (err == 0) {
        window->cap = n.rows;
        window->scratch_bytes = n.scratch;
        window->n_threads = n_threads;
    }
    return err;
}

void neap_window_free(neap_window *window) {
    neap_region_free(window->region);
    if (window->has_lock) {
        pthread_mutex_destroy(&window->lock);
        pthread_cond_destroy(&window->changed);
    }
}

bool neap_window_holds(const neap_window *window, const neap_layer_cache *layer) {
    return window->region != NULL && rows_bytes(layer) <= window->cap &&
           neap_kv_read_scratch(layer->kv) <= window->scratch_bytes;
}

void *neap_window_scratch(const neap_window *window, int thread) {
    return (char *)neap_region_base(window->region) + window->cap +
           (size_t)thread * window->scratch_bytes;
}

/* ---- a node ---- */

static unsigned char state_of(const neap_coded *coded, uint32_t at) {
    return atomic_load_explicit(&coded->states[at], memory_order_acquire);
}

static int decode(neap_coded *coded, uint32_t at, int thread) {
    const neap_window *window = coded->window;
    size_t k_bytes = padded(coded->layer, 0), v_bytes = padded(coded->layer, 1);
    char *slot = (char *)neap_region_base(window->region) + at * (k_bytes + v_bytes);
    void *const rows[2] = {slot, slot + k_bytes};
    void *scratch = neap_window_scratch(window, thread);
    uint32_t chunk = at % coded->n_chunks, left = coded->layer->n_cells - chunk * NEAP_CHUNK_CELLS;
    int err = neap_kv_read(coded->layer->kv, coded->first_stream + at / coded->n_chunks, chunk, 0,
                           left < NEAP_CHUNK_CELLS ? left : NEAP_CHUNK_CELLS, rows, scratch);
    for (int plane = 0; plane < 2 && err == 0; plane++) {
        coded->chunks[plane][at] = (char *)rows[plane] + coded->offsets[plane];
    }
    return err;
}

void neap_coded_run(neap_coded *coded, int thread) {
    uint32_t n = coded->n_streams * coded->n_chunks, at;
    if (coded->window == NULL || thread >= coded->window->n_threads) {
        return;
    }
    while ((at = atomic_fetch_add_explicit(&coded->next, 1, memory_order_relaxed)) < n) {
        if (coded->seen != NULL && coded->seen[at] == 0) {
            continue;
        }
        bool is_coded = neap_kv_is_coded(
            coded->layer->kv, coded->first_stream + at / coded->n_chunks, at % coded->n_chunks);
        int err = is_coded ? decode(coded, at, thread) : -EAGAIN;
        unsigned char state = err == 0 ? DECODED : err == -EAGAIN ? PLAIN : FAILED;
        if (state == FAILED) {
            atomic_store(&coded->err, err);
        }
        atomic_store_explicit(&coded->states[at], state, memory_order_release);
        pthread_mutex_lock(&coded->window->lock);
        pthread_cond_broadcast(&coded->window->changed);
        pthread_mutex_unlock(&coded->window->lock);
    }
}

static neap_unit_id unit_of(const neap_coded *coded, uint32_t stream, uint32_t chunk) {
    return neap_kv_unit(coded->layer->kv, coded->first_stream + stream, chunk);
}

bool neap_coded_ready(const neap_coded *coded, uint32_t stream, uint32_t chunk) {
    unsigned char state = state_of(coded, stream * coded->n_chunks + chunk);
    return state == DECODED ||
           (state == PLAIN &&
            neap_unit_resident(neap_plugin_engine(), unit_of(coded, stream, chunk)));
}

int neap_coded_wait(neap_coded *coded, uint32_t stream, uint32_t chunk) {
    uint32_t at = stream * coded->n_chunks + chunk;
    pthread_mutex_lock(&coded->window->lock);
    while (state_of(coded, at) == UNKNOWN) {
        pthread_cond_wait(&coded->window->changed, &coded->window->lock);
    }
    pthread_mutex_unlock(&coded->window->lock);
    switch (state_of(coded, at)) {
    case DECODED:
        return 0;
    case PLAIN:
        return neap_wait(neap_plugin_engine(), unit_of(coded, stream, chunk));
    default:
        return atomic_load(&coded->err);
    }
}
