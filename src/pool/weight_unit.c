/* weight_unit.c - weights: added, released, read back and verified.
 *
 * Bytes that lie in a model file are read from there, through the handle opened when the unit was
 * added: it outlives a file that is moved or deleted. What was read counts only if its checksum is
 * that of the bytes that were loaded. If not, and the path names another file by now, that one is
 * tried: a model put back works again. What still differs is NEAP_E_CHANGED where a file's size,
 * time or inode changed, else NEAP_E_CORRUPT.
 *
 * Parts without a file go to the swap file at the first eviction; the record is kept for good, as
 * weights do not change. Where it cannot be written they are rebuilt, if all of them can. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "pool_int.h"

#define READ_BATCH 64 /* ranges handed to the reader at once */

/* ---- model files ---- */

/* The file of that path as it is now, opened if no unit has it. [L] */
static int file_get(neap_pool *pool, const char *path, neap_model_file **ret_file) {
    neap_file_id id;
    int err = neap_path_identity(path, &id);
    if (err) return err;
    for (neap_model_file *file = pool->files; file; file = file->next) {
        if (strcmp(file->path, path) == 0 && neap_file_id_equal(&file->id, &id)) {
            *ret_file = file;
            return 0;
        }
    }
    neap_model_file *file = calloc(1, sizeof *file);
    if (!file || !(file->path = strdup(path))) {
        free(file);
        return -ENOMEM;
    }
    err = neap_file_open_read(path, &file->file);
    if (!err) err = neap_file_identity(file->file, &file->id);
    if (err) {
        neap_file_close(file->file);
        free(file->path);
        free(file);
        return err;
    }
    file->next = pool->files;
    pool->files = file;
    *ret_file = file;
    return 0;
}

static void file_free(neap_model_file *file) {
    for (size_t i = 0; i < file->n_retired; i++)
        neap_file_close(file->retired[i]);
    neap_file_close(file->file);
    free(file->retired);
    free(file->path);
    free(file);
}

static void files_sweep(neap_pool *pool) {
    for (neap_model_file **at = &pool->files; *at;) {
        neap_model_file *file = *at;
        if (file->n_parts > 0) {
            at = &file->next;
            continue;
        }
        *at = file->next;
        file_free(file);
    }
}

void neap_weight_unit_unref(neap_pool *pool, neap_unit *unit) {
    for (size_t i = 0; i < unit->n_parts; i++)
        if (unit->parts[i].file) unit->parts[i].file->n_parts--;
    files_sweep(pool);
}

void neap_weight_unit_free_files(neap_pool *pool) {
    while (pool->files) {
        neap_model_file *file = pool->files;
        pool->files = file->next;
        file_free(file);
    }
}

/* Whether the handle or the path is no longer what was loaded. Where the path names another file
 * than the handle, that one is opened (*ret_fresh, else left alone). */
static bool file_look(neap_pool *pool, neap_model_file *file, neap_file **ret_fresh) {
    pthread_mutex_lock(&pool->lock);
    neap_file_id of_handle = {0}, of_path = {0};
    const bool has_handle = neap_file_identity(file->file, &of_handle) == 0;
    const bool has_path = neap_path_identity(file->path, &of_path) == 0;
    const bool changed =
        !neap_file_id_equal(&of_handle, &file->id) || !neap_file_id_equal(&of_path, &file->id);
    if (has_path && (!has_handle || !neap_file_id_equal(&of_path, &of_handle)))
        (void)neap_file_open_read(file->path, ret_fresh);
    pthread_mutex_unlock(&pool->lock);
    return changed;
}

/* The handle that served the right bytes is used from now on. Takes fresh. */
static void file_adopt(neap_pool *pool, neap_model_file *file, neap_file *fresh) {
    pthread_mutex_lock(&pool->lock);
    neap_file **grown = realloc(file->retired, (file->n_retired + 1) * sizeof *grown);
    if (grown) {
        file->retired = grown;
        file->retired[file->n_retired++] = file->file;
        file->file = fresh;
        (void)neap_file_identity(fresh, &file->id);
    } else {
        neap_file_close(fresh);
    }
    pthread_mutex_unlock(&pool->lock);
}

/* ---- adding ---- */

static int by_address(const void *a, const void *b) {
    const neap_weight_extent *x = a, *y = b;
    return (char *)x->addr < (char *)y->addr ? -1 : (char *)x->addr > (char *)y->addr;
}

static bool continues(const neap_weight_extent *a, const neap_weight_extent *b) {
    if ((char *)a->addr + a->len_bytes != (char *)b->addr || a->rebuild || b->rebuild) return false;
    if (!a->path || !b->path) return !a->path && !b->path;
    return strcmp(a->path, b->path) == 0 && a->file_offset + a->len_bytes == b->file_offset;
}

/* Sorts and joins neighbours in place; -> number left, 0: two of them overlap. */
static size_t merge(neap_weight_extent *extents, size_t n) {
    qsort(extents, n, sizeof *extents, by_address);
    size_t last = 0;
    for (size_t i = 1; i < n; i++) {
        if ((char *)extents[last].addr + extents[last].len_bytes > (char *)extents[i].addr)
            return 0;
        if (continues(&extents[last], &extents[i]))
            extents[last].len_bytes += extents[i].len_bytes;
        else
            extents[++last] = extents[i];
    }
    return last + 1;
}

static neap_weight_part part_of(const neap_weight_extent *extent) {
    neap_weight_part part = {
        .whole = {extent->addr, extent->len_bytes},
        .inner = neap_span_inward(extent->addr, extent->len_bytes),
        .rebuild = extent->path ? NULL : extent->rebuild,
        .rebuild_ctx = extent->rebuild_ctx,
    };
    part.file_offset = extent->file_offset + (uint64_t)(part.inner.addr - part.whole.addr);
    part.checksum = neap_checksum(part.inner.addr, part.inner.len);
    return part;
}

/* Opens the files of the parts; on failure none is referred to. [L] */
static int take_files(neap_pool *pool, const neap_weight_extent *extents, neap_weight_part *parts,
                      size_t n) {
    int err = 0;
    for (size_t i = 0; i < n && !err; i++) {
        if (!extents[i].path) continue;
        err = file_get(pool, extents[i].path, &parts[i].file);
        if (!err) parts[i].file->n_parts++;
    }
    if (!err) return 0;
    for (size_t i = 0; i < n; i++)
        if (parts[i].file) parts[i].file->n_parts--;
    files_sweep(pool);
    return err;
}

int neap_pool_add_weights(neap_pool *pool, int layer, const neap_weight_extent *extents, size_t n,
                          neap_unit_id *ret_unit) {
    if (n == 0) return -EINVAL;
    neap_weight_extent *sorted = malloc(n * sizeof *sorted);
    neap_weight_part *parts = calloc(n, sizeof *parts);
    int err = -ENOMEM;
    if (!sorted || !parts) goto out;
    memcpy(sorted, extents, n * sizeof *sorted);
    err = NEAP_E_BOUND;
    n = merge(sorted, n);
    if (n == 0) goto out;
    for (size_t i = 0; i < n; i++)
        parts[i] = part_of(&sorted[i]);

    pthread_mutex_lock(&pool->lock);
    err = take_files(pool, sorted, parts, n);
    neap_unit *unit = err ? NULL : neap_unit_new(pool);
    if (unit) {
        unit->layer = layer;
        unit->parts = parts;
        unit->n_parts = n;
        neap_unit_move(pool, unit, NEAP_UNIT_RESIDENT);
        *ret_unit = unit->id;
        parts = NULL;
    } else if (!err) {
        for (size_t i = 0; i < n; i++)
            if (parts[i].file) parts[i].file->n_parts--;
        files_sweep(pool);
        err = -ENOMEM;
    }
    pthread_mutex_unlock(&pool->lock);
out:
    free(sorted);
    free(parts);
    return err;
}

/* ---- eviction ---- */

static bool needs_copy(const neap_weight_part *part) {
    return !part->file && part->inner.len > 0;
}

/* The inner spans of parts without a file, malloc'd; *ret_n 0: there are none. NULL: no memory. */
static struct iovec *copied_spans(const neap_unit *unit, size_t *ret_n) {
    struct iovec *spans = malloc((unit->n_parts + 1) * sizeof *spans);
    *ret_n = 0;
    for (size_t i = 0; spans && i < unit->n_parts; i++)
        if (needs_copy(&unit->parts[i]))
            spans[(*ret_n)++] = (struct iovec){unit->parts[i].inner.addr, unit->parts[i].inner.len};
    return spans;
}

static bool any_needs_copy(const neap_unit *unit) {
    for (size_t i = 0; i < unit->n_parts; i++)
        if (needs_copy(&unit->parts[i])) return true;
    return false;
}

static bool can_rebuild(const neap_unit *unit) {
    for (size_t i = 0; i < unit->n_parts; i++)
        if (needs_copy(&unit->parts[i]) && !unit->parts[i].rebuild) return false;
    return true;
}

/* Makes sure that what lies in no file can be had again. */
static int secure_copy(neap_pool *pool, neap_unit *unit, neap_evicted *evicted) {
    size_t n;
    if (!any_needs_copy(unit)) return 0; /* to drop it must need no memory */
    struct iovec *spans = copied_spans(unit, &n);
    if (!spans) return -ENOMEM;
    neap_swap_record *record = NULL;
    int err = 0;
    bool rebuild = false;
    if (n > 0 && !unit->swap) {
        err = neap_swapfile_put(pool->swapfile, spans, n, &record);
        rebuild = err && can_rebuild(unit);
        if (err && !rebuild) evicted->storage_error = err;
        if (rebuild) err = 0;
    }
    free(spans);
    if (err) return err;
    pthread_mutex_lock(&pool->lock);
    if (record) unit->swap = record;
    unit->to_rebuild = rebuild;
    pthread_mutex_unlock(&pool->lock);
    return 0;
}

/* What lies beside the span may stay: it must not hold a huge page of which most goes. */
static void split_ends(neap_span span) {
    neap_vm_split(span.addr);
    neap_vm_split(span.addr + span.len - 1);
}

int neap_weight_unit_evict(neap_pool *pool, neap_unit *unit, neap_evicted *ret_evicted) {
    ret_evicted->action = NEAP_ACTION_DROP;
    int err = secure_copy(pool, unit, ret_evicted);
    if (err) return err;
    size_t n_dropped = 0;
    for (size_t i = 0; i < unit->n_parts; i++) {
        const neap_span inner = unit->parts[i].inner;
        if (inner.len == 0) continue;
        split_ends(inner);
        err = neap_vm_drop(inner.addr, inner.len);
        if (err && n_dropped == 0) return err; /* nothing happened yet */
        n_dropped++;
        /* All was written or read in. */
        *(err ? &ret_evicted->stayed_bytes : &ret_evicted->dropped_bytes) += inner.len;
    }
    for (size_t i = 0; i < unit->n_parts; i++)
        neap_span_seal(pool, unit->parts[i].inner);
    return 0;
}

uint64_t neap_weight_unit_release(neap_pool *pool, neap_unit *unit) {
    uint64_t stayed = 0;
    for (size_t i = 0; i < unit->n_parts; i++) {
        const neap_span inner = unit->parts[i].inner;
        if (inner.len == 0) continue;
        if (neap_vm_drop(inner.addr, inner.len) != 0) stayed += inner.len;
        neap_span_seal(pool, inner);
    }
    return stayed;
}

/* ---- restoration ---- */

int neap_weight_unit_allocate(neap_pool *pool, neap_unit *unit) {
    for (size_t i = 0; i < unit->n_parts; i++) {
        const neap_span inner = unit->parts[i].inner;
        int err = neap_span_open(pool, inner);
        if (!err && inner.len > 0) err = neap_vm_populate(inner.addr, inner.len);
        if (err) return err;
    }
    return 0;
}

static int read_ranges(neap_worker *worker, const neap_read_range *ranges, size_t n) {
    if (worker->reader) return neap_reader_read(worker->reader, ranges, n);
    int err = 0;
    for (size_t i = 0; i < n && !err; i++)
        err = neap_file_read(ranges[i].file, ranges[i].addr, ranges[i].len, ranges[i].offset);
    return err;
}

static int verify(const neap_weight_part *part) {
    return neap_checksum(part->inner.addr, part->inner.len) == part->checksum ? 0 : NEAP_E_CORRUPT;
}

/* fresh: for each part the handle to read instead of its file's, or NULL; may be NULL itself. */
static int load_from_files(neap_pool *pool, neap_unit *unit, neap_worker *worker,
                           neap_file *const *fresh) {
    neap_read_range ranges[READ_BATCH];
    size_t n = 0;
    int err = 0;
    for (size_t i = 0; i < unit->n_parts && !err; i++) {
        const neap_weight_part *part = &unit->parts[i];
        if (part->file && part->inner.len > 0) {
            pthread_mutex_lock(&pool->lock);
            neap_file *handle = fresh && fresh[i] ? fresh[i] : part->file->file;
            pthread_mutex_unlock(&pool->lock);
            ranges[n++] =
                (neap_read_range){handle, part->inner.addr, part->inner.len, part->file_offset};
        }
        if (n == READ_BATCH || (i + 1 == unit->n_parts && n > 0)) {
            err = read_ranges(worker, ranges, n);
            n = 0;
        }
    }
    for (size_t i = 0; i < unit->n_parts && !err; i++)
        if (unit->parts[i].file) err = verify(&unit->parts[i]);
    return err;
}

/* The earlier part of the same file, or i. */
static size_t first_of_file(const neap_unit *unit, size_t i) {
    for (size_t j = 0; j < i; j++)
        if (unit->parts[j].file == unit->parts[i].file) return j;
    return i;
}

/* After the handles failed: what the paths name now. */
static int load_from_successors(neap_pool *pool, neap_unit *unit, neap_worker *worker, int err) {
    neap_file **fresh = calloc(unit->n_parts, sizeof *fresh);
    if (!fresh) return err;
    bool changed = false, found = false;
    for (size_t i = 0; i < unit->n_parts; i++) {
        if (!unit->parts[i].file) continue;
        const size_t first = first_of_file(unit, i);
        if (first == i)
            changed = file_look(pool, unit->parts[i].file, &fresh[i]) || changed;
        else
            fresh[i] = fresh[first];
        found = found || fresh[i];
    }
    if (found) err = load_from_files(pool, unit, worker, fresh);
    for (size_t i = 0; i < unit->n_parts; i++) {
        if (!fresh[i] || first_of_file(unit, i) != i) continue;
        if (err)
            neap_file_close(fresh[i]);
        else
            file_adopt(pool, unit->parts[i].file, fresh[i]);
    }
    free(fresh);
    return err && changed ? NEAP_E_CHANGED : err;
}

static int rebuild_parts(neap_unit *unit) {
    int err = 0;
    for (size_t i = 0; i < unit->n_parts && !err; i++) {
        neap_weight_part *part = &unit->parts[i];
        if (!needs_copy(part)) continue;
        err = part->rebuild(part->rebuild_ctx, part->whole.addr, part->whole.len);
        if (!err) err = verify(part);
    }
    return err;
}

static int load_copied(neap_pool *pool, neap_unit *unit, neap_worker *worker) {
    if (!unit->swap) return unit->to_rebuild ? rebuild_parts(unit) : 0;
    size_t n;
    struct iovec *spans = copied_spans(unit, &n);
    if (!spans) return -ENOMEM;
    int err = neap_swapfile_get(pool->swapfile, unit->swap, spans, n, worker->reader);
    free(spans);
    return err && can_rebuild(unit) ? rebuild_parts(unit) : err;
}

int neap_weight_unit_load(neap_pool *pool, neap_unit *unit, neap_worker *worker) {
    int err = load_from_files(pool, unit, worker, NULL);
    if (err) err = load_from_successors(pool, unit, worker, err);
    return err ? err : load_copied(pool, unit, worker);
}
