/* kv_unit.c - KV chunks: where their bytes lie, coded out and in.
 *
 *   plane of a stream    |  chunk 0  |  chunk 1  |  chunk 2   ...
 *   pages               |---|---|---|---|---|---|---|
 *   inner of chunk 1             [---|---]              released; the pages at its ends stay
 *   in use                    [......)                  cells [0, used), up to whole pages
 *
 * A chunk kept raw is its inner pages in use, read back in place; the bytes on the pages at its
 * ends never left. A coded chunk is all of its rows in use. A transposed plane cannot be cut by
 * cells: its unit is the whole stream, coded as channels of used cells. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "pool_int.h"

static uint32_t min_u32(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

/* ---- shape ---- */

static uint32_t units_of_stream(const neap_kv *kv) {
    return kv->whole_streams ? 1 : kv->n_chunks;
}

static uint32_t unit_cells(const neap_kv *kv, uint32_t chunk) {
    const uint32_t n_cells = kv->layout.n_cells;
    return kv->whole_streams ? n_cells
                             : min_u32(NEAP_CHUNK_CELLS, n_cells - chunk * NEAP_CHUNK_CELLS);
}

/* All bytes of the unit in a plane. */
static neap_span whole_of(const neap_unit *unit, size_t plane) {
    const neap_kv_layout *layout = &unit->kv->layout;
    const size_t row = layout->planes[plane].row_bytes;
    const size_t first =
        (size_t)unit->stream * layout->n_cells + (size_t)unit->chunk * NEAP_CHUNK_CELLS;
    return (neap_span){(char *)layout->planes[plane].base + first * row,
                       unit_cells(unit->kv, unit->chunk) * row};
}

neap_span neap_kv_unit_inner(const neap_unit *unit, size_t plane) {
    const neap_span whole = whole_of(unit, plane);
    return neap_span_inward(whole.addr, whole.len);
}

/* Cells that a channel of a transposed plane is coded with. */
static uint32_t coded_cells(const neap_unit *unit) {
    return min_u32(NEAP_ROUND_UP(unit->used, NEAP_CHUNK_CELLS), unit->kv->layout.n_cells);
}

static bool is_transposed(const neap_unit *unit, size_t plane) {
    return unit->kv->layout.planes[plane].transposed;
}

neap_span neap_kv_unit_in_use(const neap_unit *unit, size_t plane) {
    neap_span inner = neap_kv_unit_inner(unit, plane);
    if (inner.len == 0 || is_transposed(unit, plane)) return inner;
    const neap_span whole = whole_of(unit, plane);
    const size_t page = neap_vm_page();
    const size_t skipped = (size_t)(inner.addr - whole.addr);
    const size_t used = unit->used * unit->kv->layout.planes[plane].row_bytes;
    const size_t len = used > skipped ? NEAP_ROUND_UP(used - skipped, page) : 0;
    if (len < inner.len) inner.len = len;
    return inner;
}

/* A transposed plane touches some pages of every channel. */
static uint64_t touched_bytes(const neap_unit *unit, size_t plane) {
    const neap_kv_plane *p = &unit->kv->layout.planes[plane];
    const size_t elem = p->row_bytes / p->row_elems, page = neap_vm_page();
    const size_t channel = unit->kv->layout.n_cells * elem;
    const size_t used = NEAP_ROUND_UP(coded_cells(unit) * elem, page);
    return used >= channel ? (uint64_t)channel * p->row_elems : (uint64_t)used * p->row_elems;
}

neap_unit_bytes neap_kv_unit_size(const neap_unit *unit) {
    neap_unit_bytes bytes = {0, 0};
    const size_t page = neap_vm_page();
    for (size_t i = 0; unit->used > 0 && i < unit->kv->layout.n_planes; i++) {
        const neap_span whole = whole_of(unit, i), inner = neap_kv_unit_in_use(unit, i);
        uint64_t in_use, evictable;
        if (is_transposed(unit, i)) {
            in_use = touched_bytes(unit, i);
            evictable = in_use < inner.len ? in_use : inner.len;
        } else {
            const size_t exact = unit->used * unit->kv->layout.planes[i].row_bytes;
            in_use = NEAP_ROUND_UP((uintptr_t)whole.addr % page + exact, page) -
                     (uintptr_t)whole.addr % page;
            if (in_use > whole.len) in_use = whole.len;
            evictable = inner.len;
        }
        bytes.in_use += in_use;
        bytes.evictable += evictable;
    }
    return bytes;
}

static neap_codec_chunk codec_chunk(const neap_unit *unit) {
    neap_codec_chunk chunk = {.n_planes = unit->kv->layout.n_planes};
    for (size_t i = 0; i < chunk.n_planes; i++) {
        const neap_kv_plane *p = &unit->kv->layout.planes[i];
        neap_codec_plane *plane = &chunk.planes[i];
        plane->data = whole_of(unit, i).addr;
        plane->type = p->type;
        if (p->transposed) {
            const size_t elem = p->row_bytes / p->row_elems;
            plane->n_rows = p->row_elems;
            plane->row_elems = coded_cells(unit);
            plane->row_bytes = plane->row_elems * elem;
            plane->row_stride = unit->kv->layout.n_cells * elem;
        } else {
            plane->n_rows = unit->used;
            plane->row_elems = p->row_elems;
            plane->row_bytes = plane->row_stride = p->row_bytes;
        }
    }
    return chunk;
}

uint64_t neap_kv_raw_bytes(const neap_unit *unit) {
    const neap_codec_chunk chunk = codec_chunk(unit);
    return neap_codec_raw_bytes(&chunk);
}

static size_t raw_parts(const neap_unit *unit, struct iovec parts[2]) {
    size_t n = 0;
    for (size_t i = 0; i < unit->kv->layout.n_planes; i++) {
        const neap_span span = neap_kv_unit_in_use(unit, i);
        if (span.len > 0) parts[n++] = (struct iovec){span.addr, span.len};
    }
    return n;
}

/* ---- adding, removing ---- */

static int make_units(neap_pool *pool, neap_kv *kv) {
    const uint32_t n = kv->layout.n_streams * units_of_stream(kv);
    kv->written = calloc(kv->layout.n_streams, sizeof *kv->written);
    kv->units = kv->written ? malloc(n * sizeof *kv->units) : NULL;
    if (!kv->units) {
        free(kv->written);
        kv->written = NULL;
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < n; i++) {
        neap_unit *unit = neap_unit_new(pool);
        if (!unit) {
            while (i-- > 0)
                neap_unit_delete(pool, neap_pool_unit(pool, kv->units[i]));
            free(kv->units);
            free(kv->written);
            kv->units = NULL;
            kv->written = NULL;
            return -ENOMEM;
        }
        unit->is_kv = true;
        unit->kv = kv;
        unit->layer = kv->layout.layer;
        unit->stream = i / units_of_stream(kv);
        unit->chunk = i % units_of_stream(kv);
        kv->units[i] = unit->id;
    }
    return 0;
}

static void set_layout(neap_kv *kv, const neap_kv_layout *layout) {
    kv->layout = *layout;
    kv->n_chunks = (layout->n_cells + NEAP_CHUNK_CELLS - 1) / NEAP_CHUNK_CELLS;
    kv->whole_streams = false;
    for (size_t i = 0; i < layout->n_planes; i++)
        kv->whole_streams = kv->whole_streams || layout->planes[i].transposed;
    neap_klt_fit(kv);
}

int neap_pool_add_kv(neap_pool *pool, const void *region, const neap_kv_layout *layout,
                     neap_kv **ret_kv) {
    neap_kv *kv = calloc(1, sizeof *kv);
    if (!kv) return -ENOMEM;
    kv->pool = pool;
    kv->region = region;
    pthread_mutex_lock(&pool->lock);
    const neap_klt_model *model = neap_pool_klt(pool);
    kv->klt.model = model && !neap_klt_is_guest(model) ? model : NULL; /* those are of a region */
    set_layout(kv, layout);
    const int err = make_units(pool, kv);
    if (!err) {
        neap_klt_join(pool, kv);
        kv->next = pool->kvs;
        pool->kvs = kv;
    }
    pthread_mutex_unlock(&pool->lock);
    if (err)
        free(kv);
    else
        *ret_kv = kv;
    return err;
}

static void delete_units(neap_pool *pool, neap_kv *kv) {
    const uint32_t n = kv->layout.n_streams * units_of_stream(kv);
    for (uint32_t i = 0; kv->units && i < n; i++)
        neap_unit_delete(pool, neap_pool_unit(pool, kv->units[i]));
    free(kv->units);
    free(kv->written);
    kv->units = NULL;
    kv->written = NULL;
}

int neap_pool_relayout(neap_kv *kv, const neap_kv_layout *layout) {
    neap_pool *pool = kv->pool;
    int err = 0;
    pthread_mutex_lock(&pool->lock);
    for (uint32_t stream = 0; stream < kv->layout.n_streams && !err; stream++)
        if (neap_pool_kv_used(kv, stream) > 0) err = -EBUSY;
    if (!err) {
        neap_kv fresh = *kv;
        fresh.units = NULL;
        fresh.written = NULL;
        set_layout(&fresh, layout);
        err = make_units(pool, &fresh);
        if (!err) {
            delete_units(pool, kv);
            *kv = fresh;
            for (uint32_t i = 0; i < kv->layout.n_streams * units_of_stream(kv); i++)
                neap_pool_unit(pool, kv->units[i])->kv = kv;
        }
    }
    pthread_mutex_unlock(&pool->lock);
    return err;
}

typedef struct removal {
    neap_pool *pool;
    neap_span addresses;
} removal;

static void remove_weights_in(neap_unit *unit, void *ctx) {
    const removal *r = ctx;
    bool touches = false;
    for (size_t i = 0; i < unit->n_parts; i++)
        touches =
            touches || (unit->parts[i].whole.addr < r->addresses.addr + r->addresses.len &&
                        unit->parts[i].whole.addr + unit->parts[i].whole.len > r->addresses.addr);
    if (touches) neap_unit_delete(r->pool, unit);
}

void neap_pool_remove_region(neap_pool *pool, const void *region, neap_span addresses) {
    pthread_mutex_lock(&pool->lock);
    removal r = {pool, addresses};
    neap_pool_each(pool, remove_weights_in, &r);
    for (neap_kv **at = &pool->kvs; *at;) {
        neap_kv *kv = *at;
        if (kv->region != region) {
            at = &kv->next;
            continue;
        }
        *at = kv->next;
        delete_units(pool, kv);
        free(kv->rope);
        free(kv);
    }
    neap_klt_close_unneeded(pool);
    pthread_mutex_unlock(&pool->lock);
}

uint32_t neap_pool_kv_used(const neap_kv *kv, uint32_t stream) {
    const uint32_t n = units_of_stream(kv);
    for (uint32_t i = n; i-- > 0;) {
        const neap_unit *unit = neap_pool_unit(kv->pool, kv->units[stream * n + i]);
        if (unit->used > 0) return i * NEAP_CHUNK_CELLS + unit->used;
    }
    return 0;
}

/* ---- eviction ---- */

/* What dropping the unit's spare pages in a plane gives back. Those in use are there: they were
 * read to be copied, or restored. Only of a transposed plane the kernel must be asked. */
static uint64_t held_bytes(const neap_unit *unit, size_t plane) {
    const neap_span inner = neap_kv_unit_in_use(unit, plane);
    uint64_t held = inner.len - neap_kv_unit_kept(unit, plane).len;
    if (is_transposed(unit, plane) && neap_vm_held(inner.addr, inner.len, &held) != 0)
        held = inner.len;
    return held;
}

/* Pages of a plane behind its first kept bytes, which the kernel did not take back: they read as
 * zero, as if they had gone. -> their bytes. */
static uint64_t blank(const neap_unit *unit, size_t plane, size_t kept, int err) {
    const neap_span span = neap_kv_unit_in_use(unit, plane);
    if (span.len <= kept) return 0;
    neap_log(NEAP_LOG_WARN, "memory of a chunk not released: %s", neap_strerror(err));
    memset(span.addr + kept, 0, span.len - kept);
    return span.len - kept;
}

/* Gives back all inner pages but those that a copy is to take. */
static int drop_spare(const neap_unit *unit, neap_evicted *evicted) {
    size_t n_dropped = 0;
    for (size_t i = 0; i < unit->kv->layout.n_planes; i++) {
        const neap_span spare = neap_kv_unit_spare(unit, i);
        if (spare.len == 0) continue;
        const uint64_t held = held_bytes(unit, i);
        if ((uintptr_t)spare.addr % NEAP_HUGE_PAGE > 0) neap_vm_split(spare.addr);
        if ((uintptr_t)(spare.addr + spare.len) % NEAP_HUGE_PAGE > 0)
            neap_vm_split(spare.addr + spare.len - 1);
        const int err = neap_vm_drop(spare.addr, spare.len);
        if (err && n_dropped == 0) return err; /* nothing happened yet */
        n_dropped++;
        if (err)
            evicted->stayed_bytes += blank(unit, i, neap_kv_unit_kept(unit, i).len, err);
        else
            evicted->dropped_bytes += held;
    }
    return 0;
}

static void seal(neap_pool *pool, const neap_unit *unit) {
    for (size_t i = 0; i < unit->kv->layout.n_planes; i++)
        neap_span_seal(pool, neap_kv_unit_inner(unit, i));
}

uint64_t neap_kv_unit_release(neap_pool *pool, neap_unit *unit, bool with_copy) {
    uint64_t stayed = 0;
    for (size_t i = 0; i < unit->kv->layout.n_planes; i++) {
        const neap_span inner = neap_kv_unit_inner(unit, i);
        const size_t kept = with_copy ? 0 : neap_kv_unit_kept(unit, i).len;
        const int err = neap_vm_drop(inner.addr + kept, inner.len - kept);
        /* What cannot be opened was not when it was to be restored: nothing came there. */
        if (err && neap_span_open(pool, inner) == 0) stayed += blank(unit, i, kept, err);
    }
    seal(pool, unit);
    return stayed;
}

static void set_copy(neap_pool *pool, neap_unit *unit, neap_swap_record *swap,
                     neap_memory_copy memory, const neap_codec *coded) {
    pthread_mutex_lock(&pool->lock);
    unit->swap = swap;
    unit->memory = memory;
    unit->coded = coded;
    unit->keeps_codec = unit->keeps_codec || (coded && !coded->lossless);
    pthread_mutex_unlock(&pool->lock);
}

/* Codes the unit, onto the stack or, to be put in place, into the bounce buffer. NEAP_E_BOUND: that
 * would not save anything. */
static int copy_to_memory(neap_pool *pool, neap_unit *unit, neap_worker *worker,
                          neap_evicted *evicted) {
    const neap_codec_chunk chunk = codec_chunk(unit);
    const size_t cap = pool->codec->bound(&chunk);
    const bool in_place = neap_kv_fits_in_place(unit);
    neap_memory_copy copy = {0};
    void *coded, *bytes;
    /* Coded beside the stack, too: only then is it known how much of it is needed, and the buffer,
     * used again and again, lies in a cache. */
    if (!(coded = neap_worker_bounce(worker, cap))) return -ENOMEM;
    int err = pool->codec->encode(&chunk, coded, cap, &copy.len);
    const size_t takes = in_place ? NEAP_ROUND_UP(copy.len, neap_vm_page()) : copy.len;
    if (!err && takes >= neap_kv_unit_size(unit).evictable) err = NEAP_E_BOUND;
    if (!err && !in_place) err = neap_stack_push(pool->stack, copy.len, &copy.stack, &bytes);
    if (err) return err;
    if (!in_place) {
        memcpy(bytes, coded, copy.len);
        evicted->stacked_bytes = copy.len;
    }
    set_copy(pool, unit, NULL, copy, pool->codec);
    pthread_mutex_lock(&pool->lock);
    pool->counters.encoded_bytes += copy.len;
    pool->counters.encoded_from_bytes += neap_codec_raw_bytes(&chunk);
    pthread_mutex_unlock(&pool->lock);
    return 0;
}

/* The codec for a copy on storage; NULL: raw. */
static const neap_codec *storage_codec(const neap_pool *pool, const neap_unit *unit) {
    return pool->storage_codec       ? pool->storage_codec
           : unit->kv->whole_streams ? neap_codec_find("none")
                                     : NULL;
}

/* Codes them onto the stack, or to storage. */
static int code_by_klt(neap_pool *pool, neap_unit *const *units, size_t n, neap_worker *worker,
                       bool into_memory) {
    neap_codec_chunk chunks[NEAP_KLT_LAYERS];
    int32_t positions[NEAP_CHUNK_CELLS];
    neap_swap_record *record = NULL;
    neap_klt_note *note;
    void *bytes;
    struct iovec part = {neap_worker_bounce(worker, neap_klt_room(units[0])), 0};
    if (!part.iov_base) return -ENOMEM;
    if (!neap_klt_positions(units, n, positions)) return NEAP_E_BOUND;
    for (size_t i = 0; i < n; i++)
        chunks[i] = codec_chunk(units[i]);
    int err = neap_klt_encode_planes(&units[0]->kv->klt, chunks, positions, part.iov_base,
                                     &part.iov_len, &note);
    if (err) return err;
    if (into_memory) {
        err = neap_stack_push(pool->stack, part.iov_len, &note->held, &bytes);
        if (!err) memcpy(bytes, part.iov_base, part.iov_len);
    } else {
        err = neap_swapfile_put(pool->swapfile, &part, 1, &record);
    }
    if (err) {
        free(note);
        return err;
    }
    pthread_mutex_lock(&pool->lock);
    neap_klt_give(units, n, record, note);
    pthread_mutex_unlock(&pool->lock);
    return 0;
}

static void refuse(neap_pool *pool, neap_unit *const *units, size_t n) {
    pthread_mutex_lock(&pool->lock);
    for (size_t i = 0; i < n; i++)
        units[i]->klt_refused = true;
    pthread_mutex_unlock(&pool->lock);
}

int neap_kv_units_hold(neap_pool *pool, neap_unit *const *units, size_t n, neap_worker *worker) {
    const int err = code_by_klt(pool, units, n, worker, true);
    if (err == NEAP_E_BOUND) refuse(pool, units, n);
    return err;
}

size_t neap_pool_code_together(neap_pool *pool, neap_unit *unit, neap_worker *worker,
                               neap_unit *ret_units[NEAP_KLT_LAYERS]) {
    pthread_mutex_lock(&pool->lock);
    const size_t n = neap_klt_members(pool, unit, ret_units);
    for (size_t i = 0; i < n; i++)
        ret_units[i]->copying = false; /* they will have a copy that this one must not replace */
    pthread_mutex_unlock(&pool->lock);
    const int err = n > 0 ? code_by_klt(pool, ret_units, n, worker, false) : 0;
    /* Rather than have another codec round them. */
    if (err && err != NEAP_E_BOUND && pool->holds_coded)
        (void)neap_kv_units_hold(pool, ret_units, n, worker);
    if (err == NEAP_E_BOUND) refuse(pool, ret_units, n);
    if (n == 0) ret_units[0] = unit;
    return n > 0 ? n : 1;
}

static int copy_to_storage(neap_pool *pool, neap_unit *unit, neap_worker *worker) {
    const neap_codec *codec = storage_codec(pool, unit);
    neap_swap_record *record;
    struct iovec parts[2];
    size_t n;
    int err = 0;
    if (codec) {
        const neap_codec_chunk chunk = codec_chunk(unit);
        const size_t cap = codec->bound(&chunk);
        size_t len = 0;
        void *bytes = neap_worker_bounce(worker, cap);
        if (!bytes) return -ENOMEM;
        err = codec->encode(&chunk, bytes, cap, &len);
        parts[0] = (struct iovec){bytes, len};
        n = 1;
    } else {
        n = raw_parts(unit, parts);
    }
    if (!err) err = neap_swapfile_put(pool->swapfile, parts, n, &record);
    if (!err) set_copy(pool, unit, record, (neap_memory_copy){0}, codec);
    return err;
}

static int move_to_storage(neap_pool *pool, neap_unit *unit, neap_evicted *evicted) {
    const neap_memory_copy from = unit->memory;
    neap_swap_record *record;
    struct iovec parts[2];
    size_t n = 1;
    int err = 0;
    if (from.stack) {
        parts[0].iov_base = (void *)(uintptr_t)neap_stack_bytes(from.stack, &parts[0].iov_len);
    } else {
        err = neap_kv_unit_open(pool, unit);
        n = neap_kv_copy_parts(unit, parts);
    }
    if (!err) err = neap_swapfile_put(pool->swapfile, parts, n, &record);
    if (!err && !from.stack) {
        neap_kv_copy_drop(unit, &evicted->dropped_bytes);
        evicted->stayed_bytes = neap_unit_memory_bytes(unit) - evicted->dropped_bytes;
    }
    if (!from.stack) seal(pool, unit);
    if (err) return err;
    set_copy(pool, unit, record, (neap_memory_copy){0}, unit->coded);
    if (from.stack) {
        neap_stack_drop(pool->stack, from.stack);
        evicted->unstacked_bytes = from.len;
    }
    return 0;
}

/* Makes a copy where the action says; where that cannot be, in the other place. */
static int secure_copy(neap_pool *pool, neap_unit *unit, neap_action action, neap_worker *worker,
                       neap_evicted *evicted) {
    const bool codes = strcmp(pool->codec->name, "none") != 0;
    if (action == NEAP_ACTION_TO_MEMORY && codes) {
        evicted->action = NEAP_ACTION_TO_MEMORY;
        if (copy_to_memory(pool, unit, worker, evicted) == 0) return 0;
    }
    evicted->action = NEAP_ACTION_TO_STORAGE;
    const int storage_err = copy_to_storage(pool, unit, worker);
    if (!storage_err) return 0;
    evicted->storage_error = storage_err;
    if (action == NEAP_ACTION_TO_STORAGE && codes) {
        evicted->action = NEAP_ACTION_TO_MEMORY;
        if (copy_to_memory(pool, unit, worker, evicted) == 0) return 0;
    }
    return storage_err;
}

int neap_kv_unit_evict(neap_pool *pool, neap_unit *unit, neap_action action, neap_worker *worker,
                       neap_evicted *ret_evicted) {
    const neap_codec_chunk chunk = codec_chunk(unit);
    ret_evicted->raw_bytes = neap_codec_raw_bytes(&chunk);
    if (action == NEAP_ACTION_MEMORY_TO_STORAGE && unit->klt)
        return ret_evicted->storage_error =
                   neap_klt_store(pool, unit, &ret_evicted->unstacked_bytes);
    if (unit->memory.len > 0) { /* already evicted */
        ret_evicted->action = NEAP_ACTION_MEMORY_TO_STORAGE;
        return ret_evicted->storage_error = move_to_storage(pool, unit, ret_evicted);
    }
    const bool is_clean = unit->swap || unit->klt;
    ret_evicted->action = NEAP_ACTION_DROP;
    int err = is_clean ? 0 : secure_copy(pool, unit, action, worker, ret_evicted);
    if (err) return err;
    err = drop_spare(unit, ret_evicted);
    if (err) {
        const neap_memory_copy copy = unit->memory; /* resident units have none */
        if (copy.len > 0) set_copy(pool, unit, NULL, (neap_memory_copy){0}, NULL);
        neap_stack_drop(pool->stack, copy.stack);
        return err;
    }
    /* Last: until here the cells were as they had been. */
    if (neap_unit_in_place(unit)) {
        neap_kv_copy_write(unit, worker->bounce);
        ret_evicted->kept_bytes = neap_unit_memory_bytes(unit);
    }
    seal(pool, unit);
    return 0;
}

/* ---- held as klt coded it ---- */

typedef struct hold_list {
    uint32_t cells; /* written since */
    neap_unit **units;
    size_t n, cap;
} hold_list;

static bool is_due(neap_unit *const *units, size_t n, uint32_t cells) {
    for (size_t i = 0; i < n; i++)
        if (units[i]->kv->written[units[i]->stream] - units[i]->written_at < cells) return false;
    return n > 0;
}

static void add_to_hold(neap_unit *unit, void *ctx) {
    hold_list *list = ctx;
    neap_unit *members[NEAP_KLT_LAYERS];
    if (!unit->is_kv || list->n == list->cap || neap_unit_state_of(unit) != NEAP_UNIT_RESIDENT)
        return;
    const size_t n = unit->klt ? 0 : neap_klt_members(unit->kv->pool, unit, members);
    if (unit->klt || (is_due(members, n, list->cells) && members[0] == unit))
        list->units[list->n++] = unit;
}

size_t neap_pool_to_hold(neap_pool *pool, uint32_t cells, neap_unit **ret_units, size_t cap) {
    hold_list list = {.cells = cells, .units = ret_units, .cap = cap};
    neap_pool_each(pool, add_to_hold, &list);
    return list.n;
}

/* ---- copies of what stays ---- */

static bool goes_before(const neap_unit *a, const neap_unit *b) {
    if (a->layer != b->layer) return a->layer > b->layer;
    if (a->stream != b->stream) return a->stream > b->stream;
    return a->chunk > b->chunk;
}

/* A stream that is one unit changes with every token. */
static bool wants_copy(const neap_unit *unit) {
    return unit->is_kv && neap_unit_state_of(unit) == NEAP_UNIT_RESIDENT && !unit->swap &&
           !unit->kv->whole_streams && unit->used == unit_cells(unit->kv, unit->chunk) &&
           !neap_klt_awaits(unit) && neap_kv_unit_size(unit).evictable > 0;
}

static void consider_copying(neap_unit *unit, void *ctx) {
    neap_unit **next = ctx;
    if (wants_copy(unit) && (!*next || goes_before(unit, *next))) *next = unit;
}

neap_unit *neap_pool_next_to_copy(neap_pool *pool) {
    neap_unit *next = NULL;
    neap_pool_each(pool, consider_copying, &next);
    return next;
}

size_t neap_pool_copy_size(const neap_pool *pool, const neap_unit *unit, size_t *ret_most) {
    const neap_codec *codec = storage_codec(pool, unit);
    if (codec) {
        const neap_codec_chunk chunk = codec_chunk(unit);
        neap_unit *members[NEAP_KLT_LAYERS];
        const size_t n = neap_klt_members(pool, unit, members);
        const size_t cap = codec->bound(&chunk), room = n > 0 ? neap_klt_room(unit) : 0;
        size_t raw = n > 0 ? 0 : neap_codec_raw_bytes(&chunk);
        for (size_t i = 0; i < n; i++)
            raw += neap_kv_raw_bytes(members[i]);
        /* klt is refused where it saves less than half. */
        *ret_most = n > 0 && raw / 2 > cap ? raw / 2 : cap;
        return NEAP_ROUND_UP(raw, neap_vm_page()) + (room > cap ? room : cap);
    }
    struct iovec parts[2];
    const size_t n = raw_parts(unit, parts);
    *ret_most = 0;
    for (size_t i = 0; i < n; i++)
        *ret_most += parts[i].iov_len;
    return *ret_most;
}

/* Copies to *inout_at and moves it on. */
static void *append(char **inout_at, const void *bytes, size_t len) {
    char *at = *inout_at;
    memcpy(at, bytes, len);
    *inout_at = at + len;
    return at;
}

static void take_bytes(neap_copy *copy, const struct iovec *raw, size_t n_raw, char *buffer) {
    char *at = buffer;
    for (size_t i = 0; i < n_raw; i++)
        append(&at, raw[i].iov_base, raw[i].iov_len);
    copy->bytes = (struct iovec){buffer, (size_t)(at - buffer)};
    if (!copy->codec) return;
    for (size_t i = 0; i < 2 * copy->n; i++) {
        neap_codec_chunk *chunk = &copy->chunks[i / 2];
        neap_codec_plane *plane = &chunk->planes[i % 2]; /* whole rows: it is not transposed */
        if (i % 2 == chunk->n_planes) continue;
        plane->data = append(&at, plane->data, plane->n_rows * plane->row_bytes);
        plane->row_stride = plane->row_bytes;
    }
    at = buffer + NEAP_ROUND_UP((size_t)(at - buffer), neap_vm_page());
    copy->bytes = (struct iovec){at, copy->codec->bound(&copy->chunks[copy->n - 1])};
}

int neap_pool_copy_take(neap_pool *pool, neap_unit *unit, size_t size, neap_copy *ret_copy) {
    size_t most;
    if (!wants_copy(unit) || neap_pool_copy_size(pool, unit, &most) != size) return -EAGAIN;
    *ret_copy = (neap_copy){.codec = storage_codec(pool, unit), .klt = unit->kv->klt};
    const size_t n = neap_klt_members(pool, unit, ret_copy->units);
    ret_copy->by_klt = n > 0 && neap_klt_positions(ret_copy->units, n, ret_copy->positions);
    ret_copy->n = ret_copy->by_klt ? n : 1;
    if (ret_copy->by_klt) pool->copied_by = ret_copy->klt.model;
    if (!ret_copy->by_klt) ret_copy->units[0] = unit;
    for (size_t i = 0; i < ret_copy->n; i++) {
        ret_copy->chunks[i] = codec_chunk(ret_copy->units[i]);
        ret_copy->units[i]->copying = true;
    }
    pool->reading = true;
    return 0;
}

void neap_pool_copy_read(neap_pool *pool, neap_copy *copy, void *buffer) {
    struct iovec raw[2];
    const size_t n_raw = copy->codec ? 0 : raw_parts(copy->units[0], raw);
    pthread_mutex_unlock(&pool->lock);
    take_bytes(copy, raw, n_raw, buffer);
    pthread_mutex_lock(&pool->lock);
    pool->reading = false;
    pthread_cond_broadcast(&pool->changed);
}

/* None has changed or gone since it was taken; nor are they being copied any more. [L] */
static bool end_copying(neap_pool *pool, const neap_copy *copy) {
    bool all = true;
    pool->copied_by = NULL;
    for (size_t i = 0; i < copy->n; i++) {
        all = all && copy->units[i]->copying;
        copy->units[i]->copying = false;
    }
    return all;
}

int neap_pool_copy_try(neap_pool *pool, const neap_copy *copy) {
    struct iovec part = copy->bytes;
    neap_klt_note *note = NULL;
    const int err = copy->by_klt ? neap_klt_encode_planes(&copy->klt, copy->chunks, copy->positions,
                                                          part.iov_base, &part.iov_len, &note)
                                 : 0;
    free(note);
    pthread_mutex_lock(&pool->lock);
    end_copying(pool, copy);
    pthread_mutex_unlock(&pool->lock);
    return err;
}

int neap_pool_copy_store(neap_pool *pool, const neap_copy *copy, size_t *ret_bytes) {
    const neap_codec *codec = copy->codec;
    struct iovec part = copy->bytes;
    neap_unit *last = copy->units[copy->n - 1];
    neap_swap_record *record = NULL;
    neap_klt_note *note = NULL;
    int err = copy->by_klt ? neap_klt_encode_planes(&copy->klt, copy->chunks, copy->positions,
                                                    part.iov_base, &part.iov_len, &note)
                           : NEAP_E_BOUND;
    if (err == NEAP_E_BOUND)
        err = codec ? codec->encode(&copy->chunks[copy->n - 1], part.iov_base, copy->bytes.iov_len,
                                    &part.iov_len)
                    : 0;
    if (!err) err = neap_swapfile_put(pool->swapfile, &part, 1, &record);
    pthread_mutex_lock(&pool->lock);
    if (end_copying(pool, copy) && !err) {
        if (note) {
            neap_klt_give(copy->units, copy->n, record, note);
        } else {
            last->swap = record;
            last->coded = codec;
            last->keeps_codec = codec && !codec->lossless;
            last->klt_refused = copy->by_klt;
        }
        record = NULL;
        note = NULL;
    }
    pthread_mutex_unlock(&pool->lock);
    free(note);
    if (record) neap_swapfile_drop(pool->swapfile, record);
    if (!err) *ret_bytes = part.iov_len;
    return err;
}

/* ---- restoration ---- */

int neap_kv_unit_open(neap_pool *pool, neap_unit *unit) {
    for (size_t i = 0; i < unit->kv->layout.n_planes; i++) {
        const int err = neap_span_open(pool, neap_kv_unit_inner(unit, i));
        if (err) return err;
    }
    return 0;
}

int neap_kv_unit_allocate(neap_pool *pool, neap_unit *unit) {
    int err = neap_kv_unit_open(pool, unit);
    for (size_t i = 0; i < unit->kv->layout.n_planes && !err; i++) {
        neap_span span = neap_kv_unit_in_use(unit, i);
        const size_t kept = neap_kv_unit_kept(unit, i).len;
        span = (neap_span){span.addr + kept, span.len - kept};
        /* Channels of a partly used stream are far apart: their pages come as they are decoded. */
        const bool sparse = is_transposed(unit, i) && coded_cells(unit) < unit->kv->layout.n_cells;
        if (!sparse && span.len > 0) err = neap_vm_populate(span.addr, span.len);
    }
    return err;
}

/* Whether the chunk's pages are its own to the last cell, so that its neighbours' follow, and
 * nothing is on them. */
static bool fills_pages(const neap_unit *unit) {
    if (unit->kv->whole_streams || unit->used < NEAP_CHUNK_CELLS) return false;
    if (neap_unit_in_place(unit)) return false;
    for (size_t i = 0; i < unit->kv->layout.n_planes; i++)
        if (neap_kv_unit_inner(unit, i).len < whole_of(unit, i).len) return false;
    return true;
}

static bool may_join(const neap_unit *unit) {
    return unit->queued && neap_unit_state_of(unit) == NEAP_UNIT_EVICTED && fills_pages(unit);
}

/* The bytes of adjacent chunks in a plane. */
static neap_span joined(neap_unit *const *units, size_t n, size_t plane) {
    const neap_span first = whole_of(units[0], plane), last = whole_of(units[n - 1], plane);
    return (neap_span){first.addr, (size_t)(last.addr + last.len - first.addr)};
}

static bool holds_huge_page(neap_span span) {
    const uintptr_t begin = NEAP_ROUND_UP((uintptr_t)span.addr, NEAP_HUGE_PAGE);
    return begin + NEAP_HUGE_PAGE <= (uintptr_t)span.addr + span.len;
}

size_t neap_kv_unit_allocation(neap_pool *pool, neap_unit *unit, neap_unit **ret_units) {
    if (!neap_vm_prefers_huge() || !fills_pages(unit)) return 1;
    const neap_unit_id *ids = unit->kv->units + (size_t)unit->stream * unit->kv->n_chunks;
    uint32_t first = unit->chunk, end = unit->chunk + 1;
    while (end < unit->kv->n_chunks && end - first < NEAP_ALLOCATION_MAX &&
           may_join(neap_pool_unit(pool, ids[end])))
        end++;
    while (first > 0 && end - first < NEAP_ALLOCATION_MAX &&
           may_join(neap_pool_unit(pool, ids[first - 1])))
        first--;
    for (uint32_t i = first; i < end; i++)
        ret_units[i - first] = neap_pool_unit(pool, ids[i]);
    for (size_t plane = 0; plane < unit->kv->layout.n_planes; plane++)
        if (holds_huge_page(joined(ret_units, end - first, plane))) return end - first;
    ret_units[0] = unit;
    return 1;
}

int neap_kv_units_allocate(neap_pool *pool, neap_unit *const *units, size_t n) {
    int err = 0;
    for (size_t i = 0; i < n && !err; i++)
        err = neap_kv_unit_open(pool, units[i]);
    for (size_t plane = 0; plane < units[0]->kv->layout.n_planes && !err; plane++) {
        const neap_span span = joined(units, n, plane);
        err = neap_vm_populate_huge(span.addr, span.len);
    }
    return err;
}

/* The unused cells on the last page that a copy in place had. */
static void zero_unused(const neap_unit *unit) {
    for (size_t i = 0; i < unit->kv->layout.n_planes; i++) {
        const neap_span kept = neap_kv_unit_kept(unit, i);
        char *end = whole_of(unit, i).addr + unit->used * unit->kv->layout.planes[i].row_bytes;
        if (kept.len > 0 && kept.addr + kept.len > end)
            memset(end, 0, (size_t)(kept.addr + kept.len - end));
    }
}

static int load_coded(neap_pool *pool, const neap_unit *unit, neap_worker *worker) {
    const neap_codec_chunk chunk = codec_chunk(unit);
    size_t len;
    const void *bytes;
    if (unit->memory.stack) {
        bytes = neap_stack_bytes(unit->memory.stack, &len);
    } else {
        len = unit->swap ? neap_swap_record_len(unit->swap) : unit->memory.len;
        void *bounce = neap_worker_bounce(worker, len);
        if (!bounce) return -ENOMEM;
        const struct iovec part = {bounce, len};
        int err = 0;
        if (unit->swap)
            err = neap_swapfile_get(pool->swapfile, unit->swap, &part, 1, worker->reader);
        else
            neap_kv_copy_read(unit, bounce);
        if (err) return err;
        bytes = bounce;
    }
    const int err = unit->coded->decode(bytes, len, &chunk);
    if (!err && neap_unit_in_place(unit)) zero_unused(unit);
    return err;
}

int neap_kv_units_load(neap_pool *pool, neap_unit *const *units, size_t n, neap_worker *worker) {
    neap_codec_chunk chunks[NEAP_KLT_LAYERS];
    for (size_t i = 0; i < n; i++)
        chunks[i] = codec_chunk(units[i]);
    return neap_klt_load(pool, units, chunks, n, worker);
}

int neap_kv_unit_load(neap_pool *pool, neap_unit *unit, neap_worker *worker) {
    if (unit->klt) return neap_kv_units_load(pool, &unit, 1, worker);
    if (unit->coded) return load_coded(pool, unit, worker);
    struct iovec parts[2];
    const size_t n = raw_parts(unit, parts);
    return neap_swapfile_get(pool->swapfile, unit->swap, parts, n, worker->reader);
}

/* ---- clearing ---- */

/* Zeroes the part of a span that lies on pages shared with others. */
static void zero_edges(neap_span whole) {
    const neap_span inner = neap_span_inward(whole.addr, whole.len);
    if (inner.len == 0) {
        memset(whole.addr, 0, whole.len);
        return;
    }
    memset(whole.addr, 0, (size_t)(inner.addr - whole.addr));
    memset(inner.addr + inner.len, 0, (size_t)(whole.addr + whole.len - (inner.addr + inner.len)));
}

void neap_kv_unit_zero_edges(const neap_unit *unit) {
    for (size_t i = 0; i < unit->kv->layout.n_planes; i++)
        zero_edges(whole_of(unit, i));
}

typedef struct plane_spans {
    neap_span whole, inner;
} plane_spans;

/* A plane with all of its streams. */
static plane_spans plane_span_of(const neap_kv_layout *layout, size_t plane) {
    const size_t n_rows = (size_t)layout->n_streams * layout->n_cells;
    const neap_span whole = {layout->planes[plane].base, n_rows * layout->planes[plane].row_bytes};
    return (plane_spans){whole, neap_span_inward(whole.addr, whole.len)};
}

int neap_pool_clear(neap_kv *kv) {
    neap_pool *pool = kv->pool;
    const neap_kv_layout *layout = &kv->layout;
    for (size_t i = 0; i < layout->n_planes; i++) {
        const plane_spans span = plane_span_of(layout, i);
        const int err = neap_span_open(pool, span.inner);
        if (err) return err;
    }
    for (size_t i = 0; i < layout->n_planes; i++) {
        const plane_spans span = plane_span_of(layout, i);
        if (neap_vm_drop(span.inner.addr, span.inner.len) != 0)
            memset(span.inner.addr, 0, span.inner.len);
        zero_edges(span.whole);
    }
    for (uint32_t i = 0; i < layout->n_streams * units_of_stream(kv); i++) {
        neap_unit *unit = neap_pool_unit(pool, kv->units[i]);
        neap_unit_forget_copies(pool, unit);
        unit->keeps_codec = false;
        unit->used = 0;
        unit->last_error = 0;
        if (neap_unit_state_of(unit) != NEAP_UNIT_EMPTY)
            neap_unit_move(pool, unit, NEAP_UNIT_EMPTY);
    }
    return 0;
}
