/* restore.c - what is needed comes back: announced (need), waited for (wait), or all (restore).
 *
 * The overlap of a request is measured here: restore_ns is from the start of its first restore to
 * the end of its last one, waited_ns what its threads were blocked. path_ns is from the moment when
 * a path took its first unit to the one when it had finished its last. */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "bytes.h"
#include "clock.h"
#include "core_int.h"

static void add_wait(neap_engine *engine, uint64_t began_ns) {
    const uint64_t waited_ns = neap_clock_ns() - began_ns;
    engine->wait_ns += waited_ns;
    engine->request_waited_ns += waited_ns;
}

static bool is_usable(neap_unit_state state) {
    return state == NEAP_UNIT_RESIDENT || state == NEAP_UNIT_EMPTY;
}

/* Whether threads restore beside the caller. [L] */
static bool has_threads(neap_engine *engine) {
    return !engine->policy->sequential && neap_pipeline_start(engine->pipeline);
}

/* Puts the unit in front of the queue; without threads restores it here. [L] */
static void start(neap_engine *engine, neap_unit *unit) {
    if (has_threads(engine)) {
        neap_pipeline_push(engine->pipeline, unit, true);
        return;
    }
    neap_worker worker = {0};
    (void)neap_pipeline_restore_here(engine->pipeline, unit,
                                     &worker); /* the unit keeps the error */
    neap_worker_fini(&worker);
}

int neap_unit_wait(neap_engine *engine, neap_unit *unit) {
    const uint64_t began_ns = neap_clock_ns();
    bool started = false, tried = false; /* by this thread; by another */
    int err = 0;
    while (!is_usable(neap_unit_state_of(unit))) {
        const neap_unit_state state = neap_unit_state_of(unit);
        const bool idle = state == NEAP_UNIT_EVICTED && !unit->queued;
        if (state == NEAP_UNIT_LOST) {
            err = NEAP_E_LOST;
            break;
        }
        /* Who fetches a coded chunk's record leaves it evicted, and has not failed. */
        if (idle && (started || (tried && unit->last_error))) {
            err = unit->last_error ? unit->last_error : -ECANCELED;
            break;
        }
        if ((state == NEAP_UNIT_EVICTED || unit->queued) && !started) {
            started = true;
            start(engine, unit);
            continue;
        }
        tried = true;
        if (!neap_pipeline_help(engine->pipeline))
            pthread_cond_wait(&engine->pool->changed, &engine->pool->lock);
    }
    add_wait(engine, began_ns);
    return err;
}

static neap_unit *live_unit(const neap_engine *engine, neap_unit_id id) {
    neap_unit *unit = neap_pool_unit(engine->pool, id);
    return unit && neap_unit_state_of(unit) != NEAP_UNIT_FREE ? unit : NULL;
}

bool neap_all_resident(const neap_engine *engine) {
    return atomic_load_explicit(&engine->pool->n_absent, memory_order_acquire) == 0;
}

bool neap_unit_resident(const neap_engine *engine, neap_unit_id id) {
    const neap_unit *unit = neap_pool_unit(engine->pool, id);
    return unit && is_usable(neap_unit_state_of(unit));
}

int neap_wait(neap_engine *engine, neap_unit_id id) {
    neap_unit *unit = live_unit(engine, id);
    if (!unit) return NEAP_E_BOUND;
    if (is_usable(neap_unit_state_of(unit))) return 0;
    pthread_mutex_lock(&engine->pool->lock);
    const int err = neap_unit_wait(engine, unit);
    pthread_mutex_unlock(&engine->pool->lock);
    return err;
}

bool neap_waits_within_layers(const neap_engine *engine) {
    return !engine->policy->whole_layers;
}

/* ---- many units, in the order of need ---- */

typedef struct claimed {
    neap_unit *unit;
    int err; /* of committing its pages */
} claimed;

typedef struct allocation {
    neap_pool *pool;
    claimed *units;
    size_t n;
    atomic_size_t next;
} allocation;

/* Each thread of the crew runs this. */
static void allocate_some(void *ctx) {
    allocation *a = ctx;
    for (size_t i; (i = atomic_fetch_add(&a->next, 1)) < a->n;)
        a->units[i].err = neap_pool_allocate(a->pool, a->units[i].unit);
}

/* Claims those that are evicted and commits the pages of all; what fails keeps its error. The rest
 * stays in units; their number. Lets go of the lock meanwhile. [L] */
static size_t allocate_all(neap_engine *engine, const neap_unit_id *ids, size_t n, claimed *units,
                           bool threads) {
    neap_pool *pool = engine->pool;
    const uint64_t began_ns = neap_clock_ns();
    const bool alone = !threads || engine->is_allocating;
    size_t n_claimed = 0, n_allocated = 0;
    for (size_t i = 0; i < n; i++) {
        neap_unit *unit = neap_pool_unit(pool, ids[i]);
        if (neap_unit_state_of(unit) != NEAP_UNIT_EVICTED) continue;
        neap_pipeline_remove(engine->pipeline, unit);
        neap_pool_claim(pool, unit);
        units[n_claimed++].unit = unit;
    }
    if (n_claimed > 0 && !pool->counters.restore_first_ns)
        pool->counters.restore_first_ns = began_ns;
    if (!alone) engine->is_allocating = true;
    pthread_mutex_unlock(&pool->lock);
    allocation a = {.pool = pool, .units = units, .n = n_claimed};
    if (alone)
        allocate_some(&a);
    else
        neap_crew_run(engine->crew, neap_crew_size(engine->crew), allocate_some, &a);
    for (size_t i = 0; i < n_claimed; i++)
        if (units[i].err)
            neap_pool_finish(pool, units[i].unit, units[i].err, began_ns);
        else
            units[n_allocated++] = units[i];
    pthread_mutex_lock(&pool->lock);
    if (!alone) engine->is_allocating = false;
    return n_allocated;
}

/* Fills claimed and allocated units on the calling thread; units keep their errors. Lets go of the
 * lock meanwhile. [L] */
static void load_here(neap_pool *pool, const claimed *units, size_t n) {
    neap_worker worker = {0};
    pthread_mutex_unlock(&pool->lock);
    if (n > 0 && neap_reader_create(16, &worker.reader) != 0) worker.reader = NULL;
    for (size_t i = 0; i < n; i++) {
        const uint64_t began_ns = neap_clock_ns();
        const int err = neap_pool_load(pool, units[i].unit, &worker);
        neap_pool_finish(pool, units[i].unit, err, began_ns);
    }
    neap_worker_fini(&worker);
    pthread_mutex_lock(&pool->lock);
}

/* Queues those that are evicted; as far as the policy, or a want of threads, keeps steps apart,
 * does the first ones here. May let go of the lock. [L] */
static int bring_back(neap_engine *engine, const neap_unit_id *ids, size_t n) {
    const bool threads = has_threads(engine);
    if (threads && !engine->policy->allocate_first) {
        for (size_t i = 0; i < n; i++) {
            neap_unit *unit = neap_pool_unit(engine->pool, ids[i]);
            if (neap_unit_state_of(unit) == NEAP_UNIT_EVICTED)
                neap_pipeline_push(engine->pipeline, unit, false);
        }
        return 0;
    }
    claimed *units = malloc((n + 1) * sizeof *units);
    if (!units) return -ENOMEM;
    const size_t n_allocated = allocate_all(engine, ids, n, units, threads);
    if (!threads) load_here(engine->pool, units, n_allocated);
    for (size_t i = 0; threads && i < n_allocated; i++)
        neap_pipeline_push(engine->pipeline, units[i].unit, false);
    free(units);
    return 0;
}

/* Until nobody works on any of them; units keep their errors. [L] */
static void await_all(neap_engine *engine, const neap_unit_id *ids, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const neap_unit *unit = neap_pool_unit(engine->pool, ids[i]);
        while (unit->queued || neap_unit_state_of(unit) == NEAP_UNIT_RESTORING)
            pthread_cond_wait(&engine->pool->changed, &engine->pool->lock);
    }
}

bool neap_tracks_use(const neap_engine *engine) {
    return engine->policy->by_use;
}

int neap_need(neap_engine *engine, const neap_unit_id *units, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (!live_unit(engine, units[i])) return NEAP_E_BOUND;
    if (neap_all_resident(engine) && !engine->policy->by_use) return 0;
    pthread_mutex_lock(&engine->pool->lock);
    engine->n_needs++;
    for (size_t i = 0; engine->policy->by_use && i < n; i++)
        neap_pool_unit(engine->pool, units[i])->last_use = engine->n_needs;
    const uint64_t began_ns = neap_clock_ns();
    const int err = bring_back(engine, units, n);
    if (!engine->policy->overlap) await_all(engine, units, n);
    add_wait(engine, began_ns);
    pthread_mutex_unlock(&engine->pool->lock);
    return err;
}

/* ---- everything ---- */

typedef struct wanted {
    neap_pool *pool;
    bool owed; /* only what pressure took, of that at most: */
    uint64_t limit_bytes, step_bytes;
    neap_unit_id *ids;
    uint32_t *generations;
    size_t n;
} wanted;

static void add_evicted(neap_unit *unit, void *ctx) {
    wanted *w = ctx;
    const neap_unit_state state = neap_unit_state_of(unit);
    if ((w->owed && !unit->by_pressure) || neap_unit_is_coded(unit)) return;
    if (state == NEAP_UNIT_EVICTED || state == NEAP_UNIT_RESTORING) w->ids[w->n++] = unit->id;
}

static int in_order_of_need(const void *a, const void *b, void *ctx) {
    const neap_unit *x = neap_pool_unit(ctx, *(const neap_unit_id *)a);
    const neap_unit *y = neap_pool_unit(ctx, *(const neap_unit_id *)b);
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    if (x->is_kv != y->is_kv) return x->is_kv ? 1 : -1;
    if (x->stream != y->stream) return x->stream < y->stream ? -1 : 1;
    if (x->chunk != y->chunk) return x->chunk < y->chunk ? -1 : 1;
    return 0;
}

/* Of those owed the first that are within the limit. */
static void cut(wanted *w) {
    uint64_t bytes = 0;
    size_t n = 0;
    for (; n < w->n && bytes < w->step_bytes; n++) {
        bytes += neap_unit_size(neap_pool_unit(w->pool, w->ids[n])).evictable;
        if (bytes > w->limit_bytes) break;
    }
    w->n = n;
}

/* Everything wanted, in the order of need. [L] */
static int list_evicted(neap_pool *pool, wanted *w) {
    w->pool = pool;
    w->ids = malloc((pool->n_slots + 1) * sizeof *w->ids);
    w->generations = malloc((pool->n_slots + 1) * sizeof *w->generations);
    if (!w->ids || !w->generations) return -ENOMEM;
    neap_pool_each(pool, add_evicted, w);
    qsort_r(w->ids, w->n, sizeof *w->ids, in_order_of_need, pool);
    if (w->owed) cut(w);
    for (size_t i = 0; i < w->n; i++)
        w->generations[i] = neap_pool_unit(pool, w->ids[i])->generation;
    return 0;
}

/* Waits until nobody works on the unit any more; its error. An eviction may cancel it. [L] */
static int settle(neap_engine *engine, neap_unit *unit, uint32_t generation) {
    neap_pool *pool = engine->pool;
    while (unit->generation == generation &&
           (unit->queued || neap_unit_state_of(unit) == NEAP_UNIT_RESTORING))
        pthread_cond_wait(&pool->changed, &pool->lock);
    if (unit->generation != generation || is_usable(neap_unit_state_of(unit))) return 0;
    if (neap_unit_state_of(unit) == NEAP_UNIT_LOST) return NEAP_E_LOST;
    return unit->last_error ? unit->last_error : -ECANCELED;
}

static uint64_t restored_bytes(const neap_pool *pool) {
    return pool->counters.bytes_restored[NEAP_PATH_STORAGE] +
           pool->counters.bytes_restored[NEAP_PATH_MEMORY];
}

/* Of coded chunks the records come back into memory, not the pages. Lets go of the lock. [L] */
static int fetch_coded(neap_pool *pool) {
    int err = 0;
    for (uint32_t i = 0; i < pool->n_slots; i++) {
        neap_unit *unit = neap_pool_unit(pool, i);
        if (!neap_unit_is_coded(unit) || unit->klt->held || unit->queued) continue;
        const int unit_err = neap_pool_fetch(pool, unit);
        err = err ? err : unit_err;
    }
    return err;
}

static int restore_wanted(neap_engine *engine, wanted w, uint64_t *ret_bytes) {
    neap_pool *pool = engine->pool;
    /* A use, so that no eviction runs; it ends before the wait, so that one may come. */
    neap_use_begin(engine, NEAP_USE_ACCESS);
    pthread_mutex_lock(&pool->lock);
    const uint64_t before = restored_bytes(pool);
    int err = list_evicted(pool, &w);
    for (size_t i = 0; !err && i < w.n; i++)
        neap_pool_unit(pool, w.ids[i])->last_error = 0;
    if (!err) err = bring_back(engine, w.ids, w.n);
    if (!err && !w.owed) err = fetch_coded(pool);
    pthread_mutex_unlock(&pool->lock);
    neap_use_end(engine, NEAP_USE_ACCESS);

    pthread_mutex_lock(&pool->lock);
    for (size_t i = 0; i < w.n; i++) {
        const int unit_err = settle(engine, neap_pool_unit(pool, w.ids[i]), w.generations[i]);
        if (!err) err = unit_err;
    }
    if (!err && !w.owed && neap_totals_get(engine).n_lost > 0) err = NEAP_E_LOST;
    if (!err) *ret_bytes = restored_bytes(pool) - before;
    pthread_mutex_unlock(&pool->lock);
    free(w.ids);
    free(w.generations);
    return err;
}

int neap_restore(neap_engine *engine, uint64_t *ret_bytes) {
    return restore_wanted(engine, (wanted){0}, ret_bytes);
}

int neap_restore_owed(neap_engine *engine, uint64_t limit_bytes, uint64_t step_bytes,
                      uint64_t *ret_bytes) {
    const wanted owed = {.owed = true, .limit_bytes = limit_bytes, .step_bytes = step_bytes};
    return restore_wanted(engine, owed, ret_bytes);
}

/* ---- requests ---- */

void neap_request_begin(neap_engine *engine, uint64_t began_ns) {
    neap_pool *pool = engine->pool;
    pthread_mutex_lock(&pool->lock);
    engine->request_began_ns = began_ns ? began_ns : neap_clock_ns();
    engine->request_waited_ns = 0;
    neap_pool_counters *c = &pool->counters;
    c->restore_first_ns = c->restore_last_ns = c->allocate_ns = 0;
    for (int path = 0; path < NEAP_N_PATHS; path++)
        c->path_first_ns[path] = c->path_last_ns[path] = 0;
    pthread_mutex_unlock(&pool->lock);
}

void neap_request_first_token(neap_engine *engine) {
    neap_pool *pool = engine->pool;
    const uint64_t now_ns = neap_clock_ns();
    pthread_mutex_lock(&pool->lock);
    const neap_pool_counters *c = &pool->counters;
    if (engine->request_began_ns) {
        engine->ttft_ns = now_ns - engine->request_began_ns;
        engine->restore_ns = c->restore_last_ns ? c->restore_last_ns - c->restore_first_ns : 0;
        engine->allocate_ns = c->allocate_ns;
        for (int path = 0; path < NEAP_N_PATHS; path++)
            engine->path_ns[path] = c->path_last_ns[path] - c->path_first_ns[path];
        double overlap = 0;
        if (engine->restore_ns > 0)
            overlap = 1 - (double)engine->request_waited_ns / (double)engine->restore_ns;
        engine->overlap = overlap < 0 ? 0 : overlap;
        engine->request_began_ns = 0;
    }
    pthread_mutex_unlock(&pool->lock);
}
