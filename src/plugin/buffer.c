/* buffer.c - the buffer type and its buffers: reserved address space, committed when written.
 *
 * What a buffer is for shows with its first tensor: a weight that the loader asked about, a KV
 * cache, or anything else (compute scratch). Not a host buffer for ggml, so that every access from
 * outside a graph comes through the callbacks here; they bring back what is evicted. The callbacks
 * return nothing: a failure is latched on the buffer and fails the next graph. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "plugin_int.h"
#include "vm.h"

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static neap_buffer *list;
static atomic_int n_in_use; /* buffers of weights or KV */

bool neap_plugin_in_use(void) {
    return atomic_load(&n_in_use) > 0;
}

void neap_buffer_for_each(void (*visit)(neap_buffer *buffer, void *ctx), void *ctx) {
    pthread_mutex_lock(&list_lock);
    for (neap_buffer *buffer = list; buffer != NULL; buffer = buffer->next) {
        visit(buffer, ctx);
    }
    pthread_mutex_unlock(&list_lock);
}

static void buffer_free(ggml_backend_buffer_t ggml_buffer);

bool neap_buffer_is_ours(ggml_backend_buffer_t buffer) {
    return buffer != NULL && buffer->iface.free_buffer == buffer_free;
}

neap_buffer *neap_buffer_of(const struct ggml_tensor *tensor) {
    ggml_backend_buffer_t buffer =
        tensor->view_src != NULL ? tensor->view_src->buffer : tensor->buffer;
    return neap_buffer_is_ours(buffer) ? buffer->context : NULL;
}

void neap_buffer_latch(neap_buffer *buffer, int err, const char *what) {
    int expected = 0;
    if (atomic_compare_exchange_strong(&buffer->failed, &expected, err)) {
        neap_log(NEAP_LOG_ERROR, "%s: %s (the next request fails; later ones may succeed)", what,
                 neap_strerror(err));
    }
}

void neap_buffer_hold_all(neap_buffer *buffer) {
    const uint64_t all[1][2] = {{0, buffer->size}};
    if (buffer->role == NEAP_ROLE_SCRATCH) {
        neap_scratch_hold(buffer->region, all, 1);
    }
}

/* ---- buffer interface ---- */

static void buffer_free(ggml_backend_buffer_t ggml_buffer) {
    neap_buffer *buffer = ggml_buffer->context;
    pthread_mutex_lock(&list_lock);
    for (neap_buffer **at = &list; *at != NULL; at = &(*at)->next) {
        if (*at == buffer) {
            *at = buffer->next;
            break;
        }
    }
    pthread_mutex_unlock(&list_lock);
    if (buffer->role == NEAP_ROLE_WEIGHTS || buffer->role == NEAP_ROLE_KV) {
        atomic_fetch_sub(&n_in_use, 1);
    }
    neap_region_free(buffer->region); /* first: restores of its units may still run */
    neap_weights_free(buffer);
    neap_caches_free(buffer);
    free(buffer);
}

static void *buffer_base(ggml_backend_buffer_t ggml_buffer) {
    neap_buffer *buffer = ggml_buffer->context;
    return neap_region_base(buffer->region);
}

static void decide_role(neap_buffer *buffer, const struct ggml_tensor *tensor, int known) {
    char tag[32];
    int layer;
    bool is_v;
    if (tensor->view_src == NULL && neap_kv_name(tensor->name, tag, &layer, &is_v)) {
        buffer->role = NEAP_ROLE_KV;
        neap_region_set_kind(buffer->region, NEAP_REGION_KV);
    } else if (known == 0) {
        buffer->role = NEAP_ROLE_WEIGHTS;
        neap_region_set_kind(buffer->region, NEAP_REGION_WEIGHTS);
    } else {
        buffer->role = NEAP_ROLE_SCRATCH;
        return;
    }
    atomic_fetch_add(&n_in_use, 1);
}

static enum ggml_status buffer_init_tensor(ggml_backend_buffer_t ggml_buffer,
                                           struct ggml_tensor *tensor) {
    neap_buffer *buffer = ggml_buffer->context;
    if (buffer->role == NEAP_ROLE_SCRATCH) {
        return GGML_STATUS_SUCCESS;
    }
    int err = 0;
    if (buffer->role == NEAP_ROLE_UNKNOWN) {
        char tag[32];
        int layer;
        bool is_v;
        bool is_kv = neap_kv_name(tensor->name, tag, &layer, &is_v);
        err = is_kv ? -ENOENT : neap_weights_init(buffer, tensor);
        decide_role(buffer, tensor, err);
        if (buffer->role != NEAP_ROLE_KV) {
            return err == -ENOMEM ? GGML_STATUS_ALLOC_FAILED : GGML_STATUS_SUCCESS;
        }
    }
    err = buffer->role == NEAP_ROLE_KV ? neap_caches_init(buffer, tensor)
                                       : neap_weights_init(buffer, tensor);
    return err == -ENOMEM ? GGML_STATUS_ALLOC_FAILED : GGML_STATUS_SUCCESS;
}

typedef enum access_kind { ACCESS_READ, ACCESS_WRITE } access_kind;

/* Makes size bytes at offset of the tensor accessible and calls copy within a use. */
static int with_bytes(neap_buffer *buffer, const struct ggml_tensor *tensor, size_t offset,
                      size_t size, access_kind kind) {
    const struct ggml_tensor *root = tensor->view_src != NULL ? tensor->view_src : tensor;
    neap_cache *cache;
    if (buffer->role == NEAP_ROLE_KV) {
        neap_caches_finish(buffer);
    }
    if ((cache = neap_cache_of(buffer, root)) == NULL) {
        return 0;
    }
    size_t at = (size_t)((const char *)tensor->data - (const char *)root->data) + offset;
    return kind == ACCESS_WRITE ? neap_cache_write(cache, at, size)
                                : neap_cache_read(cache, at, size);
}

static void buffer_memset(ggml_backend_buffer_t ggml_buffer, struct ggml_tensor *tensor,
                          uint8_t value, size_t offset, size_t size) {
    neap_buffer *buffer = ggml_buffer->context;
    neap_use_begin(neap_plugin_engine(), NEAP_USE_ACCESS);
    int err = with_bytes(buffer, tensor, offset, size, ACCESS_WRITE);
    if (err == 0) {
        memset((char *)tensor->data + offset, value, size);
        neap_buffer_hold_all(buffer);
    } else {
        neap_buffer_latch(buffer, err, "writing evicted memory");
    }
    neap_use_end(neap_plugin_engine(), NEAP_USE_ACCESS);
}

static void buffer_set_tensor(ggml_backend_buffer_t ggml_buffer, struct ggml_tensor *tensor,
                              const void *data, size_t offset, size_t size) {
    neap_buffer *buffer = ggml_buffer->context;
    int err;
    if (buffer->role == NEAP_ROLE_WEIGHTS) {
        err = neap_weights_set(buffer, tensor, data, offset, size);
    } else {
        neap_use_begin(neap_plugin_engine(), NEAP_USE_ACCESS);
        err = with_bytes(buffer, tensor, offset, size, ACCESS_WRITE);
        if (err == 0) {
            memcpy((char *)tensor->data + offset, data, size);
            neap_buffer_hold_all(buffer); /* an input of the graph to come */
        }
        neap_use_end(neap_plugin_engine(), NEAP_USE_ACCESS);
    }
    if (err != 0) {
        neap_buffer_latch(buffer, err, "writing evicted memory");
    }
}

static void buffer_get_tensor(ggml_backend_buffer_t ggml_buffer, const struct ggml_tensor *tensor,
                              void *data, size_t offset, size_t size) {
    neap_buffer *buffer = ggml_buffer->context;
    int err;
    if (buffer->role == NEAP_ROLE_WEIGHTS) {
        err = neap_weights_get(buffer, tensor, data, offset, size);
    } else {
        neap_use_begin(neap_plugin_engine(), NEAP_USE_ACCESS);
        err = with_bytes(buffer, tensor, offset, size, ACCESS_READ);
        if (err == 0) {
            memcpy(data, (const char *)tensor->data + offset, size);
        }
        neap_use_end(neap_plugin_engine(), NEAP_USE_ACCESS);
    }
    if (err != 0) {
        memset(data, 0xff, size); /* NaN in every float format: never taken for an answer */
        neap_buffer_latch(buffer, err, "reading evicted memory");
    }
}

static bool buffer_cpy_tensor(ggml_backend_buffer_t ggml_buffer, const struct ggml_tensor *src,
                              struct ggml_tensor *dst) {
    neap_buffer *to = ggml_buffer->context, *from = neap_buffer_of(src);
    if (from == NULL || to->role == NEAP_ROLE_WEIGHTS || from->role == NEAP_ROLE_WEIGHTS) {
        return false;
    }
    size_t size = neap_host_fn.nbytes(src);
    neap_use_begin(neap_plugin_engine(), NEAP_USE_ACCESS);
    int err = with_bytes(from, src, 0, size, ACCESS_READ);
    if (err == 0) {
        err = with_bytes(to, dst, 0, size, ACCESS_WRITE);
    }
    if (err == 0) {
        memcpy(dst->data, src->data, size);
        neap_buffer_hold_all(to);
    } else {
        neap_buffer_latch(to, err, "copying evicted memory");
    }
    neap_use_end(neap_plugin_engine(), NEAP_USE_ACCESS);
    return true;
}

static void buffer_clear(ggml_backend_buffer_t ggml_buffer, uint8_t value) {
    neap_buffer *buffer = ggml_buffer->context;
    if (buffer->role == NEAP_ROLE_KV) {
        neap_caches_finish(buffer);
        for (size_t i = 0; i < buffer->n_layers; i++) {
            neap_layer_cache *layer = buffer->layers[i];
            int err = neap_kv_clear(layer->kv);
            if (err != 0) {
                neap_buffer_latch(buffer, err, "clearing the KV cache");
            }
            neap_lost_clear(layer);
            memset(layer->positions, 0xff,
                   (size_t)layer->n_cells * layer->n_streams * sizeof *layer->positions);
        }
        atomic_store(&buffer->failed, 0);
        if (value == 0) {
            return; /* unused cells read as zero, without being committed */
        }
    }
    for (size_t i = 0; i < buffer->n_caches; i++) {
        buffer_memset(ggml_buffer, buffer->caches[i].tensor, value, 0,
                      neap_host_fn.nbytes(buffer->caches[i].tensor));
    }
    if (buffer->role != NEAP_ROLE_KV && buffer->role != NEAP_ROLE_WEIGHTS) {
        if (value == 0) {
            neap_vm_drop(neap_region_base(buffer->region), neap_region_size(buffer->region));
        } else {
            memset(neap_region_base(buffer->region), value, buffer->size);
        }
    }
}

static const struct ggml_backend_buffer_i buffer_interface = {
    .free_buffer = buffer_free,
    .get_base = buffer_base,
    .init_tensor = buffer_init_tensor,
    .memset_tensor = buffer_memset,
    .set_tensor = buffer_set_tensor,
    .get_tensor = buffer_get_tensor,
    .cpy_tensor = buffer_cpy_tensor,
    .clear = buffer_clear,
};

/* ---- buffer type interface ---- */

static const char *type_name(ggml_backend_buffer_type_t type) {
    (void)type;
    return "NEAP";
}

static ggml_backend_buffer_t type_alloc(ggml_backend_buffer_type_t type, size_t size) {
    neap_engine *engine = neap_plugin_engine();
    neap_buffer *buffer = engine != NULL ? calloc(1, sizeof *buffer) : NULL;
    if (buffer == NULL) {
        return NULL;
    }
    buffer->size = size;
    int err = neap_region_create(engine, size, NEAP_REGION_SCRATCH, &buffer->region);
    if (err == 0) {
        buffer->self = neap_host_fn.buffer_init(type, buffer_interface, buffer, size);
    }
    if (buffer->self == NULL) {
        neap_log(NEAP_LOG_ERROR, "cannot reserve %zu bytes of address space: %s", size,
                 neap_strerror(err != 0 ? err : -ENOMEM));
        neap_region_free(buffer->region);
        free(buffer);
        return NULL;
    }
    pthread_mutex_lock(&list_lock);
    buffer->next = list;
    list = buffer;
    pthread_mutex_unlock(&list_lock);
    return buffer->self;
}

static size_t type_alignment(ggml_backend_buffer_type_t type) {
    (void)type;
    return 64;
}

static size_t type_alloc_size(ggml_backend_buffer_type_t type, const struct ggml_tensor *tensor) {
    (void)type;
    return neap_weights_alloc_size(tensor);
}

static bool type_is_host(ggml_backend_buffer_type_t type) {
    (void)type;
    return false;
}

struct ggml_backend_buffer_type neap_buffer_type = {
    .iface =
        {
            .get_name = type_name,
            .alloc_buffer = type_alloc,
            .get_alignment = type_alignment,
            .get_alloc_size = type_alloc_size,
            .is_host = type_is_host,
        },
};
