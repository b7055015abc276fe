/* weights.c - weight tensors of a buffer: placing, repacking, and the units they form.
 *
 * Placement. Tensors move to a region of ours as they are loaded, one after the other, so that huge
 * pages hold no gaps. Plain ones keep their file offset modulo pages: direct reads land in place.
 * Those for which the host's CPU backend has a repacked form (the operation that reads each weight
 * is known from the loader's questions) are written by the host's own repacking callback and point
 * to a shadow buffer of the host's type, so that its kernels recognise them.
 *
 * Units. One a layer, and one for each expert of a layer, which is its slice of every tensor that
 * products read by expert (MUL_MAT_ID); small tensors (norms, biases) stay resident, so a graph can
 * always be cut before a matrix product and never inside a fused norm. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "err.h"
#include "file.h"
#include "plugin_int.h"
#include "vm.h"

enum {
    SMALL_BYTES = 64 * 1024, /* smaller tensors are always resident, smaller experts never apart */
    SPLIT_BYTES = 16 * 1024 * 1024,
};

/* ---- which operation reads which weight ---- */

typedef struct noted_op {
    char name[GGML_MAX_NAME];
    int type;
    bool matrix;    /* read by a matrix product only */
    bool by_expert; /* by one that chooses among its matrices */
    ggml_backend_buffer_type_t extra;
} noted_op;

static pthread_mutex_t notes_lock = PTHREAD_MUTEX_INITIALIZER;
static noted_op *notes;
static size_t n_notes, cap_notes;

static ggml_backend_buffer_type_t pick_extra(const struct ggml_tensor *op) {
    ggml_backend_dev_t cpu = neap_host_cpu();
    ggml_backend_buffer_type_t *extra = neap_host_cpu_extra();
    for (; extra != NULL && *extra != NULL; extra++) {
        struct ggml_backend_buffer probe = {.buft = *extra};
        struct ggml_tensor weight = *op->src[0], copy = *op;
        weight.buffer = &probe;
        copy.src[0] = &weight;
        if (cpu->iface.supports_op(cpu, &copy)) {
            return *extra;
        }
    }
    return NULL;
}

static noted_op *find_note(const struct ggml_tensor *tensor) {
    for (size_t i = 0; i < n_notes; i++) {
        if (notes[i].type == (int)tensor->type && strcmp(notes[i].name, tensor->name) == 0) {
            return &notes[i];
        }
    }
    return NULL;
}

void neap_weights_note_op(const struct ggml_tensor *op) {
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        const struct ggml_tensor *src = op->src[i];
        if (src == NULL || src->buffer == NULL || src->buffer->buft != &neap_buffer_type ||
            src->buffer->size != 0) {
            continue;
        }
        neap_op kind = neap_host_op(op->op);
        bool matrix = i == 0 && (kind == NEAP_OP_MUL_MAT || kind == NEAP_OP_MUL_MAT_ID);
        ggml_backend_buffer_type_t extra = matrix ? pick_extra(op) : NULL;
        pthread_mutex_lock(&notes_lock);
        noted_op *note = find_note(src);
        if (note == NULL) {
            if (n_notes == cap_notes) {
                size_t cap = cap_notes == 0 ? 256 : 2 * cap_notes;
                noted_op *grown = realloc(notes, cap * sizeof *grown);
                if (grown == NULL) {
                    pthread_mutex_unlock(&notes_lock);
                    return;
                }
                notes = grown;
                cap_notes = cap;
            }
            note = &notes[n_notes++];
        }
        *note = (noted_op){.type = (int)src->type,
                           .matrix = matrix,
                           .by_expert = matrix && kind == NEAP_OP_MUL_MAT_ID,
                           .extra = extra};
        snprintf(note->name, sizeof note->name, "%s", src->name);
        pthread_mutex_unlock(&notes_lock);
    }
}

static bool get_note(const struct ggml_tensor *tensor, noted_op *ret_note) {
    pthread_mutex_lock(&notes_lock);
    noted_op *note = find_note(tensor);
    if (note != NULL) {
        *ret_note = *note;
    }
    pthread_mutex_unlock(&notes_lock);
    return note != NULL;
}

size_t neap_weights_alloc_size(const struct ggml_tensor *tensor) {
    size_t size = neap_host_fn.nbytes(tensor);
    noted_op note;
    if (neap_host_op(tensor->op) == NEAP_OP_EMPTY && get_note(tensor, &note) &&
        note.extra != NULL && note.extra->iface.get_alloc_size != NULL) {
        size_t extra_size = note.extra->iface.get_alloc_size(note.extra, tensor);
        return extra_size > size ? extra_size : size;
    }
    return size;
}

/* ---- placing ---- */

static neap_weight *find_weight(const neap_buffer *buffer, const struct ggml_tensor *tensor) {
    for (size_t i = 0; i < buffer->n_weights; i++) {
        if (buffer->weights[i].tensor == tensor) {
            return &buffer->weights[i];
        }
    }
    return NULL;
}

static neap_shadow *shadow_for(neap_buffer *buffer, ggml_backend_buffer_type_t extra) {
    for (size_t i = 0; i < buffer->n_shadows; i++) {
        if (buffer->shadows[i].extra == extra) {
            return &buffer->shadows[i];
        }
    }
    if (buffer->n_shadows == NEAP_SHADOWS_MAX) {
        return NULL;
    }
    ggml_backend_buffer_t donor = extra->iface.alloc_buffer(extra, 64);
    if (donor == NULL) {
        return NULL;
    }
    neap_shadow *shadow = &buffer->shadows[buffer->n_shadows++];
    shadow->extra = extra;
    shadow->donor = donor;
    shadow->buffer = *buffer->self;
    shadow->buffer.buft = extra;
    shadow->buffer.usage = GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
    return shadow;
}

/* Returns -ENOENT when the tensor is no weight that the loader asked about. */
int neap_weights_init(neap_buffer *buffer, struct ggml_tensor *tensor) {
    if (tensor->view_src != NULL) {
        neap_weight *root = find_weight(buffer, tensor->view_src);
        if (root != NULL) {
            root->viewed = true;
        }
        return 0;
    }
    noted_op note;
    if (!get_note(tensor, &note)) {
        if (buffer->role != NEAP_ROLE_WEIGHTS) {
            return -ENOENT;
        }
        note = (noted_op){.matrix = false};
    }
    if (buffer->n_weights == buffer->cap_weights) {
        size_t cap = buffer->cap_weights == 0 ? 512 : 2 * buffer->cap_weights;
        neap_weight *grown = realloc(buffer->weights, cap * sizeof *grown);
        if (grown == NULL) {
            return -ENOMEM;
        }
        buffer->weights = grown;
        buffer->cap_weights = cap;
    }
    neap_weight *weight = &buffer->weights[buffer->n_weights++];
    *weight = (neap_weight){
        .tensor = tensor, .addr = tensor->data, .len = neap_weights_alloc_size(tensor)};
    neap_shadow *shadow = note.extra != NULL ? shadow_for(buffer, note.extra) : NULL;
    if (shadow != NULL) {
        tensor->buffer = &shadow->buffer;
        if (shadow->donor->iface.init_tensor != NULL) {
            shadow->donor->iface.init_tensor(shadow->donor, tensor);
        }
        weight->extra = note.extra;
    }
    return 0;
}

/* Moves the tensor behind those already placed, to an address of this remainder modulo pages.
 * False: it stays where the loader put it. */
static bool move_to_packed(neap_buffer *buffer, neap_weight *weight, uint64_t congruent_to) {
    size_t page = neap_vm_page();
    if (buffer->packed == NULL &&
        neap_region_create(neap_plugin_engine(), buffer->size + (buffer->n_weights + 1) * page,
                           NEAP_REGION_WEIGHTS, &buffer->packed) != 0) {
        return false;
    }
    size_t remainder = (size_t)(congruent_to % page);
    size_t at = NEAP_ROUND_DOWN(buffer->packed_used, page) + remainder;
    at += at < buffer->packed_used ? page : 0;
    if (weight->viewed || at + weight->len > neap_region_size(buffer->packed)) {
        return false;
    }
    weight->addr = (char *)neap_region_base(buffer->packed) + at;
    weight->tensor->data = weight->addr;
    buffer->packed_used = at + weight->len;
    return true;
}

static void place_whole(neap_buffer *buffer, neap_weight *weight, const void *data, size_t size) {
    struct ggml_tensor *tensor = weight->tensor;
    if (neap_source_find(tensor, data, size, &weight->path, &weight->file_offset) != 0) {
        weight->path = NULL;
    }
    if (weight->extra != NULL) {
        move_to_packed(buffer, weight, NEAP_ROUND_UP(buffer->packed_used, (size_t)64));
        neap_shadow *shadow = shadow_for(buffer, weight->extra);
        shadow->donor->iface.set_tensor(shadow->donor, tensor, data, 0, size);
        return;
    }
    weight->in_place = weight->path != NULL && move_to_packed(buffer, weight, weight->file_offset);
    memcpy(tensor->data, data, size);
}

int neap_weights_set(neap_buffer *buffer, struct ggml_tensor *tensor, const void *data,
                     size_t offset, size_t size) {
    neap_weight *weight = find_weight(buffer, tensor);
    if (weight == NULL || weight->filled) {
        return -EROFS; /* units never change once formed */
    }
    size_t total = neap_host_fn.nbytes(tensor);
    if (offset == 0 && size == total) {
        place_whole(buffer, weight, data, size);
        weight->filled = true;
    } else if (weight->extra != NULL) {
        return -EINVAL;
    } else {
        memcpy((char *)tensor->data + offset, data, size);
        weight->viewed = true;
        weight->filled = offset + size == total;
    }
    if (weight->filled && ++buffer->n_filled == buffer->n_weights) {
        neap_weights_finish(buffer);
    }
    return 0;
}

/* Repacked bytes are not the tensor's own: those are read from the file. */
static int get_from_file(const neap_weight *weight, void *data, size_t offset, size_t size) {
    if (weight->path == NULL) {
        return -ENOTSUP;
    }
    neap_file *file;
    int err = neap_file_open_read(weight->path, &file);
    if (err == 0) {
        err = neap_file_read(file, data, size, weight->file_offset + offset);
        neap_file_close(file);
    }
    return err;
}

int neap_weights_get(neap_buffer *buffer, const struct ggml_tensor *tensor, void *data,
                     size_t offset, size_t size) {
    const struct ggml_tensor *root = tensor->view_src != NULL ? tensor->view_src : tensor;
    neap_weight *weight = find_weight(buffer, root);
    const char *from = (const char *)tensor->data + offset;
    if (weight != NULL && weight->extra != NULL) {
        return get_from_file(weight, data, (size_t)(from - weight->addr), size);
    }
    int err = 0;
    neap_use_begin(neap_plugin_engine(), NEAP_USE_ACCESS);
    for (size_t i = 0; weight != NULL && i < weight->n_units && err == 0; i++) {
        err = neap_wait(neap_plugin_engine(), weight->units[i]);
    }
    if (err == 0) {
        memcpy(data, from, size);
    }
    neap_use_end(neap_plugin_engine(), NEAP_USE_ACCESS);
    return err;
}

/* ---- units ---- */

/* Writes a repacked tensor, or one expert of it, again from the file, as at load. */
static int rebuild(void *ctx, void *addr, size_t len) {
    neap_weight *weight = ctx;
    neap_buffer *buffer = neap_buffer_of(weight->tensor);
    struct ggml_tensor part = *weight->tensor;
    part.data = addr;
    part.ne[2] = len == weight->len ? part.ne[2] : 1;
    size_t size = neap_host_fn.nbytes(&part);
    void *raw = malloc(size);
    if (raw == NULL) {
        return -ENOMEM;
    }
    int err = get_from_file(weight, raw, (size_t)((char *)addr - weight->addr), size);
    if (err == 0) {
        neap_shadow *shadow = shadow_for(buffer, weight->extra);
        shadow->donor->iface.set_tensor(shadow->donor, &part, raw, 0, size);
    }
    free(raw);
    return err;
}

static int by_addr(const void *a, const void *b) {
    const neap_weight *x = a, *y = b;
    return x->addr < y->addr ? -1 : x->addr > y->addr;
}

static int layer_of(const char *name) {
    const char *block = strstr(name, "blk.");
    return block != NULL ? atoi(block + 4) : -1;
}

static bool evictable(const neap_weight *weight) {
    noted_op note;
    return weight->filled && weight->len >= SMALL_BYTES && get_note(weight->tensor, &note) &&
           note.matrix;
}

/* Repacked forms known to hold every expert in its own bytes; others may not. */
static bool keeps_experts_apart(ggml_backend_buffer_type_t extra) {
    return extra == NULL || strcmp(extra->iface.get_name(extra), "CPU_REPACK") == 0;
}

/* 0: the tensor is no set of experts, or they cannot be units. */
static size_t count_experts(const neap_weight *weight) {
    const struct ggml_tensor *tensor = weight->tensor;
    noted_op note;
    bool apart = layer_of(tensor->name) >= 0 && tensor->ne[2] > 1 && evictable(weight) &&
                 get_note(tensor, &note) && note.by_expert && tensor->nb[2] >= SMALL_BYTES &&
                 weight->len == tensor->nb[2] * (size_t)tensor->ne[2] &&
                 keeps_experts_apart(weight->extra);
    return apart ? (size_t)tensor->ne[2] : 0;
}

static neap_weight_extent extent_of(neap_weight *weight, size_t at, size_t len) {
    neap_weight_extent extent = {.addr = weight->addr + at, .len_bytes = len};
    if (weight->in_place) {
        extent.path = weight->path;
        extent.file_offset = weight->file_offset + at;
    } else if (weight->extra != NULL && weight->path != NULL) {
        extent.rebuild = rebuild;
        extent.rebuild_ctx = weight;
    }
    return extent;
}

static bool in_layer(const neap_weight *weight, int layer, size_t n_experts) {
    return weight->n_units == 0 && layer_of(weight->tensor->name) == layer &&
           weight->n_experts == n_experts && evictable(weight);
}

/* Before units are formed: one that a weight could not name would be evicted, and no graph would
 * wait for it. */
static int reserve_units(neap_weight *weight, size_t n) {
    neap_unit_id *units = realloc(weight->units, n * sizeof *units);
    if (units == NULL) {
        return -ENOMEM;
    }
    weight->units = units;
    return 0;
}

static void set_units(neap_weight *weight, const neap_unit_id *units, size_t n) {
    memcpy(weight->units, units, n * sizeof *units);
    weight->n_units = n;
}

static void report_resident(int err, const char *what) {
    if (err != 0 && err != -ENOENT) {
        neap_log(NEAP_LOG_WARN, "weights: %s stays resident: %s", what, neap_strerror(err));
    }
}

/* Those of a layer's weights that have so many experts, each address once; -> how many. */
static size_t list_layer(neap_buffer *buffer, int layer, size_t n_experts, neap_weight **list) {
    size_t n = 0;
    for (size_t i = 0; i < buffer->n_weights; i++) {
        neap_weight *weight = &buffer->weights[i];
        if (in_layer(weight, layer, n_experts) && (n == 0 || weight->addr != list[n - 1]->addr)) {
            list[n++] = weight;
        }
    }
    return n;
}

/* Forms the units of one layer: of its experts, or (0 of them) the one of its other weights. */
static void add_layer_units(neap_buffer *buffer, int layer, size_t n_experts) {
    neap_weight **list = calloc(buffer->n_weights, sizeof(neap_weight *));
    neap_weight_extent *extents = calloc(buffer->n_weights, sizeof *extents);
    size_t n_units = n_experts > 0 ? n_experts : 1, done = 0;
    neap_unit_id *units = calloc(n_units, sizeof *units);
    int err = list == NULL || extents == NULL || units == NULL ? -ENOMEM : 0;
    for (size_t i = 0; err == 0 && i < buffer->n_weights; i++) {
        if (in_layer(&buffer->weights[i], layer, n_experts)) {
            err = reserve_units(&buffer->weights[i], n_units);
        }
    }
    size_t n = err == 0 ? list_layer(buffer, layer, n_experts, list) : 0;
    while (err == 0 && n > 0 && done < n_units) {
        for (size_t i = 0; i < n; i++) {
            size_t len = list[i]->len / n_units;
            extents[i] = extent_of(list[i], done * len, len);
        }
        err = neap_weights_add(neap_plugin_engine(), layer, extents, n, &units[done]);
        done += err == 0;
    }
    report_resident(err, "a layer");
    for (size_t i = 0; done > 0 && i < buffer->n_weights; i++) {
        if (in_layer(&buffer->weights[i], layer, n_experts)) {
            set_units(&buffer->weights[i], units, done);
        }
    }
    free(units);
    free(extents);
    free(list);
}

static bool shares_bytes(const neap_weight *other, const neap_weight *weight) {
    return other->addr == weight->addr && other->n_units == 0;
}

/* A large tensor outside the layers (the output matrix) becomes several units, so that little can
 * be taken of it, and what comes back first is not the whole. */
static void add_split_units(neap_buffer *buffer, size_t index, int order) {
    neap_weight *weight = &buffer->weights[index];
    size_t step = weight->in_place ? SPLIT_BYTES : weight->len;
    size_t n = (weight->len + step - 1) / step, done = 0;
    neap_unit_id *units = calloc(n, sizeof *units);
    int err = units == NULL ? -ENOMEM : 0;
    /* A tied tensor appears twice at one address. */
    for (size_t i = index; err == 0 && i < buffer->n_weights; i++) {
        if (shares_bytes(&buffer->weights[i], weight)) {
            err = reserve_units(&buffer->weights[i], n);
        }
    }
    while (err == 0 && done < n) {
        size_t at = done * step, left = weight->len - at;
        neap_weight_extent part = extent_of(weight, at, left < step ? left : step);
        err = neap_weights_add(neap_plugin_engine(), order, &part, 1, &units[done]);
        done += err == 0;
    }
    report_resident(err, "the output matrix");
    for (size_t i = index; done > 0 && i < buffer->n_weights; i++) {
        if (shares_bytes(&buffer->weights[i], weight)) {
            set_units(&buffer->weights[i], units, done);
        }
    }
    free(units);
}

void neap_weights_finish(neap_buffer *buffer) {
    if (buffer->role != NEAP_ROLE_WEIGHTS || atomic_load(&buffer->weights_ready) ||
        buffer->n_filled == 0) {
        return;
    }
    qsort(buffer->weights, buffer->n_weights, sizeof *buffer->weights, by_addr);
    int last_layer = -1;
    for (size_t i = 0; i < buffer->n_weights; i++) {
        int layer = layer_of(buffer->weights[i].tensor->name);
        last_layer = layer > last_layer ? layer : last_layer;
        buffer->weights[i].n_experts = count_experts(&buffer->weights[i]);
    }
    for (int layer = 0; layer <= last_layer; layer++) {
        add_layer_units(buffer, layer, 0);
        for (size_t i = 0; i < buffer->n_weights; i++) {
            const neap_weight *weight = &buffer->weights[i];
            if (weight->n_experts > 0 && in_layer(weight, layer, weight->n_experts)) {
                add_layer_units(buffer, layer, weight->n_experts);
            }
        }
    }
    for (size_t i = 0; i < buffer->n_weights; i++) {
        if (in_layer(&buffer->weights[i], -1, 0)) {
            add_split_units(buffer, i, last_layer + 1);
        }
    }
    const char *path = neap_weights_path(buffer);
    if (path != NULL) {
        neap_engine_set_model(neap_plugin_engine(), path);
        neap_use_gguf(neap_plugin_engine(), path);
    }
    atomic_store(&buffer->weights_ready, true);
}

const char *neap_weights_path(const neap_buffer *buffer) {
    for (size_t i = 0; i < buffer->n_weights; i++) {
        if (buffer->weights[i].path != NULL) {
            return buffer->weights[i].path;
        }
    }
    return NULL;
}

const neap_weight *neap_weights_find(const neap_buffer *buffer, const void *addr) {
    size_t low = 0, high = buffer->n_weights;
    while (low < high) {
        size_t middle = (low + high) / 2;
        const neap_weight *weight = &buffer->weights[middle];
        if ((const char *)addr < weight->addr) {
            high = middle;
        } else if ((const char *)addr >= weight->addr + weight->len) {
            low = middle + 1;
        } else {
            return weight;
        }
    }
    return NULL;
}

void neap_weights_free(neap_buffer *buffer) {
    neap_region_free(buffer->packed);
    for (size_t i = 0; i < buffer->n_shadows; i++) {
        neap_host_fn.buffer_free(buffer->shadows[i].donor);
    }
    for (size_t i = 0; i < buffer->n_weights; i++) {
        free(buffer->weights[i].path);
        free(buffer->weights[i].units);
    }
    free(buffer->weights);
}
