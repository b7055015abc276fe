/* pool.c - the table of units and its state machine.
 *
 *                      first write                        evictor claims
 *   FREE --add--> EMPTY ----------> RESIDENT <---------------------------> EVICTING
 *                   ^  ^                ^  ^        could not be stored       |
 *             clear |  |    overwritten |  | restored                         | copied, released
 *                   |  +----- LOST -----+  |                                  v
 *                   |          ^ damaged   +------- RESTORING <-claim--- EVICTED
 *                   +----------|------- any state -----+  |  failed, try again  ^
 *                              +--------------------------+---------------------+
 *
 * Who moves a unit: an evictor (core/evict.c; one eviction at a time, its threads each with units
 * of their own, no use active, nothing RESTORING), a restoring thread (sched), a writer within a
 * use (core/units.c). A weight unit is never EMPTY or LOST. Writing behind moves none: it gives
 * RESIDENT units a swap record.
 *
 * Invariants
 *  1 n_absent counts the units EVICTING, EVICTED, RESTORING or LOST; when it is 0 every byte of
 *    every unit may be read. It is raised before and lowered after the bytes are unreadable.
 *  2 A unit stands in a queue only while EVICTED, or RESTORING with its pages committed.
 *  3 An EMPTY unit has no cells in use and no copy; a KV unit in any other state has cells in use.
 *  4 An EVICTED or RESTORING KV unit has exactly one copy: in memory or in the swap file; or klt's
 *    record, in either or both.
 *  5 A RESIDENT unit has no copy in memory, but for klt's record; copies that it has equal its
 * bytes (after the codec's rounding). 6 An EVICTED or RESTORING weight unit with a part that has no
 * file has a swap record or is to be rebuilt. 7 Spans are whole pages, lie in one unit only, and
 * hold no page while their unit is EVICTED or LOST, but for those of a copy in place and
 * stayed_bytes that the kernel did not take back; of KV, these are zero. The page in which two
 * units meet belongs to neither and stays. 8 n_restoring counts the units RESTORING. 9 Only a
 * RESIDENT KV unit without a swap record is being copied; several are only if klt codes them
 * together. Their bytes do not change and they stay RESIDENT while they are being read. 10 What klt
 * coded has no other codec, and was rounded by none. Its record is in the swap file or, where the
 * pool holds it coded, in memory, or in both, and shared by those units only, of the same cells of
 * a block's layers, that its note counts.
 *
 * Threading. One lock for the table: what happens under it is short, transfers run outside, owned
 * by whoever put the unit into EVICTING or RESTORING. States are read without the lock; a reader
 * that sees RESIDENT (acquire) sees the bytes that were restored before it was stored (release). */
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "pool_int.h"

#define BOUNCE_ALIGN ((size_t)2 << 20) /* a huge page */

/* ---- life ---- */

int neap_pool_create(const neap_pool_options *options, neap_pool **ret_pool) {
    neap_pool *pool = calloc(1, sizeof *pool);
    if (!pool) return -ENOMEM;
    pool->codec = options->codec;
    pool->poison = options->poison;
    const bool codes = strcmp(options->codec->name, "none") != 0;
    pool->storage_codec = codes && !options->clean_storage ? options->codec : NULL;
    pool->holds_coded = options->holds_coded;
    pool->fits_contexts = options->fits_contexts;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->changed, NULL);
    int err = neap_stack_create(&pool->stack);
    if (!err)
        err = neap_swapfile_create(options->swap_dir, options->swap_limit_bytes, &pool->swapfile);
    if (err) {
        neap_pool_free(pool);
        return err;
    }
    *ret_pool = pool;
    return 0;
}

static void free_unit_memory(neap_unit *unit, void *ctx) {
    (void)ctx;
    free(unit->parts);
    if (unit->klt && --unit->klt->n_holders == 0) free(unit->klt);
}

void neap_pool_free(neap_pool *pool) {
    if (!pool) return;
    neap_pool_each(pool, free_unit_memory, NULL);
    while (pool->kvs) {
        neap_kv *kv = pool->kvs;
        pool->kvs = kv->next;
        free(kv->units);
        free(kv->rope);
        free(kv);
    }
    neap_weight_unit_free_files(pool);
    neap_klt_close_models(pool);
    for (uint32_t i = 0; i < NEAP_POOL_BLOCKS; i++)
        free(atomic_load_explicit(&pool->blocks[i], memory_order_relaxed));
    neap_swapfile_free(pool->swapfile);
    neap_stack_free(pool->stack);
    pthread_cond_destroy(&pool->changed);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

neap_unit *neap_pool_unit(const neap_pool *pool, neap_unit_id id) {
    if (id / NEAP_POOL_BLOCK >= NEAP_POOL_BLOCKS) return NULL;
    neap_unit *block =
        atomic_load_explicit(&pool->blocks[id / NEAP_POOL_BLOCK], memory_order_acquire);
    return block ? &block[id % NEAP_POOL_BLOCK] : NULL;
}

void neap_pool_each(neap_pool *pool, void (*visit)(neap_unit *unit, void *ctx), void *ctx) {
    for (uint32_t i = 0; i < pool->n_slots; i++) {
        neap_unit *unit = neap_pool_unit(pool, i);
        if (neap_unit_state_of(unit) != NEAP_UNIT_FREE) visit(unit, ctx);
    }
}

/* ---- slots ---- */

neap_unit *neap_unit_new(neap_pool *pool) {
    neap_unit *unit = pool->free_units;
    if (unit) {
        pool->free_units = unit->next;
    } else {
        const uint32_t id = pool->n_slots, at = id / NEAP_POOL_BLOCK;
        if (at >= NEAP_POOL_BLOCKS) return NULL;
        if (id % NEAP_POOL_BLOCK == 0) {
            neap_unit *block = calloc(NEAP_POOL_BLOCK, sizeof *block);
            if (!block) return NULL;
            atomic_store_explicit(&pool->blocks[at], block, memory_order_release);
        }
        pool->n_slots++;
        unit = neap_pool_unit(pool, id);
        unit->id = id;
    }
    unit->next = unit->prev = NULL;
    unit->generation++;
    neap_unit_move(pool, unit, NEAP_UNIT_EMPTY);
    return unit;
}

void neap_unit_delete(neap_pool *pool, neap_unit *unit) {
    assert(!unit->queued);
    neap_unit_forget_copies(pool, unit);
    neap_weight_unit_unref(pool, unit);
    free(unit->parts);
    neap_unit_move(pool, unit, NEAP_UNIT_FREE);
    unit->parts = NULL;
    unit->n_parts = 0;
    unit->to_rebuild = unit->is_kv = unit->keeps_codec = unit->klt_refused = false;
    unit->kv = NULL;
    unit->used = 0;
    unit->last_error = 0;
    unit->passed_over = 0;
    unit->last_use = 0;
    unit->next = pool->free_units;
    pool->free_units = unit;
}

void neap_unit_forget_copies(neap_pool *pool, neap_unit *unit) {
    const bool is_shared = unit->klt && --unit->klt->n_holders > 0;
    neap_stack_drop(pool->stack, unit->memory.stack);
    if (unit->swap && !is_shared) neap_swapfile_drop(pool->swapfile, unit->swap);
    if (!is_shared) neap_klt_forget(pool, unit->klt);
    unit->memory = (neap_memory_copy){0};
    unit->swap = NULL;
    unit->coded = NULL;
    unit->klt = NULL;
    unit->copying = false;
}

/* ---- states ---- */

static bool is_absent(neap_unit_state state) {
    return state == NEAP_UNIT_EVICTING || state == NEAP_UNIT_EVICTED ||
           state == NEAP_UNIT_RESTORING || state == NEAP_UNIT_LOST;
}

static bool is_legal(neap_unit_state from, neap_unit_state to) {
    static const unsigned legal[] = {
        [NEAP_UNIT_FREE] = 1u << NEAP_UNIT_EMPTY,
        [NEAP_UNIT_EMPTY] = 1u << NEAP_UNIT_RESIDENT | 1u << NEAP_UNIT_FREE,
        [NEAP_UNIT_RESIDENT] =
            1u << NEAP_UNIT_EVICTING | 1u << NEAP_UNIT_EMPTY | 1u << NEAP_UNIT_FREE,
        [NEAP_UNIT_EVICTING] = 1u << NEAP_UNIT_RESIDENT | 1u << NEAP_UNIT_EVICTED,
        [NEAP_UNIT_EVICTED] = 1u << NEAP_UNIT_RESTORING | 1u << NEAP_UNIT_RESIDENT |
                              1u << NEAP_UNIT_EMPTY | 1u << NEAP_UNIT_FREE |
                              1u << NEAP_UNIT_EVICTING,
        [NEAP_UNIT_RESTORING] =
            1u << NEAP_UNIT_RESIDENT | 1u << NEAP_UNIT_EVICTED | 1u << NEAP_UNIT_LOST,
        [NEAP_UNIT_LOST] = 1u << NEAP_UNIT_RESIDENT | 1u << NEAP_UNIT_EMPTY | 1u << NEAP_UNIT_FREE,
    };
    return (legal[from] >> to & 1u) != 0;
}

void neap_unit_move(neap_pool *pool, neap_unit *unit, neap_unit_state to) {
    const neap_unit_state from = neap_unit_state_of(unit);
    const bool legal = is_legal(from, to);
    assert(legal);
    (void)legal;
    const bool was_absent = is_absent(from), becomes_absent = is_absent(to);
    if (!was_absent && becomes_absent)
        atomic_fetch_add_explicit(&pool->n_absent, 1, memory_order_acq_rel);
    pool->n_restoring += to == NEAP_UNIT_RESTORING;
    pool->n_restoring -= from == NEAP_UNIT_RESTORING;
    if (!becomes_absent) {
        unit->by_pressure = false;
        unit->stayed_bytes = 0;
    }
    atomic_store_explicit(&unit->state, (int)to, memory_order_release);
    /* The chain of these subtractions is one release sequence: who reads 0 sees every restore. */
    if (was_absent && !becomes_absent)
        atomic_fetch_sub_explicit(&pool->n_absent, 1, memory_order_acq_rel);
}

void neap_pool_note_error(neap_pool *pool, const neap_unit *unit, int err) {
    pool->counters.errors++;
    if (unit->is_kv)
        snprintf(pool->last_error, sizeof pool->last_error,
                 "KV of layer %d, stream %u, cells %u..: %s", unit->layer, unit->stream,
                 unit->chunk * NEAP_CHUNK_CELLS, neap_strerror(err));
    else
        snprintf(pool->last_error, sizeof pool->last_error, "weights of layer %d: %s", unit->layer,
                 neap_strerror(err));
    neap_log(NEAP_LOG_ERROR, "%s", pool->last_error);
}

/* ---- spans ---- */

neap_span neap_span_inward(void *addr, size_t len) {
    const uintptr_t page = neap_vm_page();
    const uintptr_t begin = NEAP_ROUND_UP((uintptr_t)addr, page);
    const uintptr_t end = NEAP_ROUND_DOWN((uintptr_t)addr + len, page);
    return (neap_span){(char *)addr + (begin - (uintptr_t)addr), end > begin ? end - begin : 0};
}

/* Poison is an aid to debugging: where the kernel refuses it nothing is wrong. */
void neap_span_seal(const neap_pool *pool, neap_span span) {
    if (pool->poison && span.len > 0) (void)neap_vm_protect(span.addr, span.len, false);
}

int neap_span_open(const neap_pool *pool, neap_span span) {
    return pool->poison && span.len > 0 ? neap_vm_protect(span.addr, span.len, true) : 0;
}

/* ---- workers ---- */

void *neap_worker_bounce(neap_worker *worker, size_t len) {
    if (len > worker->bounce_cap) {
        neap_worker_trim(worker);
        len = NEAP_ROUND_UP(len, BOUNCE_ALIGN);
        if (neap_vm_reserve(len, BOUNCE_ALIGN, &worker->bounce) != 0) return NULL;
        worker->bounce_cap = len;
        /* A direct read into scattered small pages reaches a third of what one into a huge page
         * does (virtio disk, requests of 0.5 MiB). Whoever evicts must not wait for huge pages. */
        if (worker->reader) neap_vm_huge(worker->bounce, len, true);
    }
    return worker->bounce;
}

void neap_worker_trim(neap_worker *worker) {
    if (worker->bounce) neap_vm_unmap(worker->bounce, worker->bounce_cap);
    worker->bounce = NULL;
    worker->bounce_cap = 0;
}

void neap_worker_fini(neap_worker *worker) {
    neap_worker_trim(worker);
    neap_reader_free(worker->reader);
    worker->reader = NULL;
}

/* ---- transitions ---- */

neap_unit_bytes neap_unit_size(const neap_unit *unit) {
    if (unit->is_kv) return neap_kv_unit_size(unit);
    neap_unit_bytes bytes = {0, 0};
    for (size_t i = 0; i < unit->n_parts; i++) {
        bytes.in_use += unit->parts[i].whole.len;
        bytes.evictable += unit->parts[i].inner.len;
    }
    return bytes;
}

uint64_t neap_unit_gone_bytes(const neap_unit *unit) {
    const uint64_t evictable = neap_unit_size(unit).evictable;
    return evictable > unit->stayed_bytes ? evictable - unit->stayed_bytes : 0;
}

uint64_t neap_unit_stored_bytes(const neap_unit *unit) {
    if (!unit->swap) return 0;
    return neap_swap_record_len(unit->swap) / (unit->klt ? unit->klt->n_holders : 1);
}

int neap_pool_evict(neap_pool *pool, neap_unit *unit, neap_action action, neap_worker *worker,
                    neap_evicted *ret_evicted) {
    *ret_evicted = (neap_evicted){.action = action};
    pthread_mutex_lock(&pool->lock);
    const bool was_evicted = neap_unit_state_of(unit) == NEAP_UNIT_EVICTED;
    neap_unit_move(pool, unit, NEAP_UNIT_EVICTING);
    unit->copying = false; /* it will have a copy that this one must not replace */
    pthread_mutex_unlock(&pool->lock);

    const int err = unit->is_kv ? neap_kv_unit_evict(pool, unit, action, worker, ret_evicted)
                                : neap_weight_unit_evict(pool, unit, ret_evicted);

    pthread_mutex_lock(&pool->lock);
    if (!err) unit->stayed_bytes += ret_evicted->stayed_bytes;
    neap_unit_move(pool, unit, err && !was_evicted ? NEAP_UNIT_RESIDENT : NEAP_UNIT_EVICTED);
    pthread_mutex_unlock(&pool->lock);
    return err;
}

int neap_pool_hold(neap_pool *pool, neap_unit *unit, neap_worker *worker) {
    neap_unit *units[NEAP_KLT_LAYERS] = {unit};
    size_t n = 1;
    int err = 0;
    if (!unit->klt) {
        pthread_mutex_lock(&pool->lock);
        n = neap_klt_members(pool, unit, units);
        pthread_mutex_unlock(&pool->lock);
        err = n > 0 ? neap_kv_units_hold(pool, units, n, worker) : -EAGAIN;
    }
    for (size_t i = 0; i < n && !err; i++) {
        neap_evicted evicted;
        err = neap_pool_evict(pool, units[i], NEAP_ACTION_DROP, worker, &evicted);
    }
    return err;
}

int neap_pool_fetch(neap_pool *pool, neap_unit *unit) {
    const uint64_t began_ns = neap_clock_ns();
    neap_pool_claim(pool, unit);
    pthread_mutex_unlock(&pool->lock);
    unit->allocate_ns = 0;
    const int err = neap_klt_fetch(pool, unit);
    if (err) neap_pool_finish(pool, unit, err, began_ns);
    pthread_mutex_lock(&pool->lock);
    if (err) return err;
    pool->counters.restores++;
    pool->counters.bytes_restored[NEAP_PATH_STORAGE] += neap_klt_held_bytes(unit);
    unit->last_error = 0;
    neap_unit_move(pool, unit, NEAP_UNIT_EVICTED);
    pthread_cond_broadcast(&pool->changed);
    return 0;
}

void neap_pool_claim(neap_pool *pool, neap_unit *unit) {
    assert(!unit->queued);
    neap_unit_move(pool, unit, NEAP_UNIT_RESTORING);
}

neap_path neap_unit_path(const neap_unit *unit) {
    return unit->memory.len > 0 || neap_klt_held_bytes(unit) > 0 ? NEAP_PATH_MEMORY
                                                                 : NEAP_PATH_STORAGE;
}

int neap_pool_allocate(neap_pool *pool, neap_unit *unit) {
    const uint64_t began_ns = neap_clock_ns();
    const int err =
        unit->is_kv ? neap_kv_unit_allocate(pool, unit) : neap_weight_unit_allocate(pool, unit);
    unit->allocate_ns = neap_clock_ns() - began_ns;
    return err;
}

size_t neap_pool_allocation(neap_pool *pool, neap_unit *unit,
                            neap_unit *ret_units[NEAP_ALLOCATION_MAX]) {
    ret_units[0] = unit;
    return unit->is_kv ? neap_kv_unit_allocation(pool, unit, ret_units) : 1;
}

int neap_pool_allocate_together(neap_pool *pool, neap_unit *const *units, size_t n) {
    if (n == 1) return neap_pool_allocate(pool, units[0]);
    const uint64_t began_ns = neap_clock_ns();
    const int err = neap_kv_units_allocate(pool, units, n);
    const uint64_t ns = neap_clock_ns() - began_ns;
    for (size_t i = 0; i < n; i++)
        units[i]->allocate_ns = ns / n;
    return err;
}

int neap_pool_load(neap_pool *pool, neap_unit *unit, neap_worker *worker) {
    return unit->is_kv ? neap_kv_unit_load(pool, unit, worker)
                       : neap_weight_unit_load(pool, unit, worker);
}

int neap_pool_load_together(neap_pool *pool, neap_unit *const *units, size_t n,
                            neap_worker *worker) {
    return n == 1 ? neap_pool_load(pool, units[0], worker)
                  : neap_kv_units_load(pool, units, n, worker);
}

/* A damaged copy of cells cannot be had again; every other failure may pass. */
static bool is_loss(const neap_unit *unit, int err) {
    return unit->is_kv && err == NEAP_E_CORRUPT;
}

/* [L] */
static void count_time(neap_pool_counters *counters, const neap_unit *unit, uint64_t began_ns) {
    const neap_path path = neap_unit_path(unit);
    if (!counters->restore_first_ns || began_ns < counters->restore_first_ns)
        counters->restore_first_ns = began_ns;
    if (!counters->path_first_ns[path] || began_ns < counters->path_first_ns[path])
        counters->path_first_ns[path] = began_ns;
    counters->restore_last_ns = counters->path_last_ns[path] = neap_clock_ns();
    counters->allocate_ns += unit->allocate_ns;
}

void neap_pool_finish(neap_pool *pool, neap_unit *unit, int err, uint64_t began_ns) {
    uint64_t stayed = 0;
    if (err)
        stayed = unit->is_kv ? neap_kv_unit_release(pool, unit, is_loss(unit, err))
                             : neap_weight_unit_release(pool, unit);

    pthread_mutex_lock(&pool->lock);
    neap_pool_counters *counters = &pool->counters;
    count_time(counters, unit, began_ns);
    unit->last_error = err;
    if (err) {
        unit->stayed_bytes = stayed;
        if (is_loss(unit, err)) {
            neap_klt_disown(pool, unit);
            neap_unit_forget_copies(pool, unit);
        }
        neap_pool_note_error(pool, unit, err);
        neap_unit_move(pool, unit, is_loss(unit, err) ? NEAP_UNIT_LOST : NEAP_UNIT_EVICTED);
    } else {
        counters->restores++;
        counters->bytes_restored[neap_unit_path(unit)] += neap_unit_size(unit).evictable;
        counters->bytes_committed += neap_unit_gone_bytes(unit);
        if (neap_unit_path(unit) == NEAP_PATH_STORAGE)
            counters->bytes_read +=
                unit->is_kv ? neap_unit_stored_bytes(unit) : neap_unit_gone_bytes(unit);
        unit->to_rebuild = false;
        /* A copy in memory would take what the eviction gave; one on storage makes the unit clean.
         */
        if (unit->memory.len > 0) neap_unit_forget_copies(pool, unit);
        if (unit->klt) atomic_store(&pool->drop_due, true);
        neap_unit_move(pool, unit, NEAP_UNIT_RESIDENT);
    }
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->lock);
}

int neap_pool_dirty(neap_pool *pool, neap_unit *unit, uint32_t used, bool overwrite) {
    const neap_unit_state state = neap_unit_state_of(unit);
    assert(unit->is_kv && !unit->queued && used > 0);
    assert(state == NEAP_UNIT_EMPTY || state == NEAP_UNIT_RESIDENT ||
           (overwrite && (state == NEAP_UNIT_EVICTED || state == NEAP_UNIT_LOST)));
    if (overwrite && is_absent(state)) {
        const int err = neap_kv_unit_open(pool, unit);
        if (err) {
            neap_pool_note_error(pool, unit, err);
            return err;
        }
        uint64_t dropped = 0;
        neap_kv_copy_drop(unit, &dropped);
    }
    neap_unit_forget_copies(pool, unit);
    unit->keeps_codec = unit->klt_refused = false;
    if (used > unit->used) unit->used = used;
    unit->written_at = unit->kv->written[unit->stream];
    if (pool->fits_contexts ? neap_klt_is_full(unit) : neap_klt_is_whole(unit))
        atomic_store(&pool->code_due, true);
    unit->last_error = 0;
    if (state != NEAP_UNIT_RESIDENT) neap_unit_move(pool, unit, NEAP_UNIT_RESIDENT);
    return 0;
}

int neap_pool_forget(neap_pool *pool, neap_unit *unit) {
    if (neap_unit_state_of(unit) != NEAP_UNIT_LOST) return -EINVAL;
    const int err = neap_kv_unit_open(pool, unit);
    if (err) return err;
    neap_kv_unit_zero_edges(unit);
    unit->keeps_codec = false;
    unit->last_error = 0;
    neap_unit_move(pool, unit, NEAP_UNIT_RESIDENT);
    return 0;
}

/* ---- invariants as code ---- */

#define BROKEN(unit, rule)                                                                     \
    do {                                                                                       \
        fprintf(stderr, "neap: invariant %s broken by unit %u (state %d)\n", rule, (unit)->id, \
                (int)neap_unit_state_of(unit));                                                \
        abort();                                                                               \
    } while (0)

typedef struct check_context {
    neap_pool *pool;
    bool full;
    uint32_t n_absent, n_restoring;
    neap_span *spans;
    size_t n_spans, cap_spans;
} check_context;

static void check_copies(const neap_pool *pool, const neap_unit *unit, neap_unit_state state) {
    const bool away = state == NEAP_UNIT_EVICTED || state == NEAP_UNIT_RESTORING;
    if (unit->queued && !away) BROKEN(unit, "2");
    const bool in_memory = unit->memory.len > 0;
    if (unit->memory.stack && !in_memory) BROKEN(unit, "4");
    if (state == NEAP_UNIT_RESIDENT && in_memory) BROKEN(unit, "5");
    if (unit->copying && (state != NEAP_UNIT_RESIDENT || unit->swap)) BROKEN(unit, "9");
    const bool held = neap_klt_held_bytes(unit) > 0, has_record = unit->swap || held;
    if (unit->klt && (!has_record || in_memory || unit->coded || unit->keeps_codec ||
                      (held && !pool->holds_coded)))
        BROKEN(unit, "10");
    if (unit->klt && !neap_klt_is_counted(pool, unit)) BROKEN(unit, "10");
    if (unit->is_kv) {
        const bool empty = state == NEAP_UNIT_EMPTY;
        if (empty != (unit->used == 0)) BROKEN(unit, "3");
        if ((empty || state == NEAP_UNIT_LOST) && (has_record || in_memory)) BROKEN(unit, "3");
        if (away && !has_record == !in_memory) BROKEN(unit, "4");
        return;
    }
    if (state == NEAP_UNIT_EMPTY || state == NEAP_UNIT_LOST) BROKEN(unit, "states");
    for (size_t i = 0; away && i < unit->n_parts; i++)
        if (!unit->parts[i].file && unit->parts[i].inner.len > 0 && !unit->swap &&
            !unit->to_rebuild)
            BROKEN(unit, "6");
}

/* spare: what must be empty of it while the unit is gone. */
static void check_span(check_context *ctx, const neap_unit *unit, neap_unit_state state,
                       neap_span span, neap_span spare) {
    const size_t page = neap_vm_page();
    if ((uintptr_t)span.addr % page != 0 || span.len % page != 0) BROKEN(unit, "7");
    if (span.len == 0) return;
    uint64_t held = 0;
    const bool gone =
        (state == NEAP_UNIT_EVICTED || state == NEAP_UNIT_LOST) && unit->stayed_bytes == 0;
    if (gone && neap_vm_held(spare.addr, spare.len, &held) == 0 && held != 0) BROKEN(unit, "7");
    if (ctx->n_spans == ctx->cap_spans) {
        ctx->cap_spans = 2 * ctx->cap_spans + 64;
        ctx->spans = realloc(ctx->spans, ctx->cap_spans * sizeof *ctx->spans);
        if (!ctx->spans) abort();
    }
    ctx->spans[ctx->n_spans++] = span;
}

static void check_unit(neap_unit *unit, void *ctx_ptr) {
    check_context *ctx = ctx_ptr;
    const neap_unit_state state = neap_unit_state_of(unit);
    ctx->n_absent += is_absent(state);
    ctx->n_restoring += state == NEAP_UNIT_RESTORING;
    check_copies(ctx->pool, unit, state);
    if (!ctx->full) return;
    for (size_t i = 0; i < unit->n_parts; i++)
        check_span(ctx, unit, state, unit->parts[i].inner, unit->parts[i].inner);
    for (size_t i = 0; unit->is_kv && i < unit->kv->layout.n_planes; i++)
        check_span(ctx, unit, state, neap_kv_unit_inner(unit, i), neap_kv_unit_spare(unit, i));
}

static int by_address(const void *a, const void *b) {
    const neap_span *x = a, *y = b;
    return x->addr < y->addr ? -1 : x->addr > y->addr;
}

void neap_pool_check(neap_pool *pool, bool full) {
    check_context ctx = {.pool = pool, .full = full};
    neap_pool_each(pool, check_unit, &ctx);
    if (ctx.n_absent != atomic_load(&pool->n_absent) || ctx.n_restoring != pool->n_restoring) {
        fprintf(stderr, "neap: invariant 1 or 8 broken: absent %u, restoring %u\n", ctx.n_absent,
                ctx.n_restoring);
        abort();
    }
    if (ctx.n_spans > 1) qsort(ctx.spans, ctx.n_spans, sizeof *ctx.spans, by_address);
    for (size_t i = 1; i < ctx.n_spans; i++) {
        if (ctx.spans[i - 1].addr + ctx.spans[i - 1].len > ctx.spans[i].addr) {
            fprintf(stderr, "neap: invariant 7 broken: two units own %p\n",
                    (void *)ctx.spans[i].addr);
            abort();
        }
    }
    free(ctx.spans);
    if (!full) return;
    neap_stack_check(pool->stack);
    neap_swapfile_check(pool->swapfile);
}
