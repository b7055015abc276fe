/* pipeline.c - see pipeline.h.
 *
 *   storage queue  u4 u5 u6 ...  --> four threads, a whole unit each: while some read, others
 *                                    commit the pages of the next
 *   memory queue   u2 u3 ...     --> one thread that decodes, and whoever waits for a unit
 *
 * Queues are in order of need; a unit stands in the queue of the path that its copy lies on. What
 * klt coded together and is wanted comes with the first of it.
 * A run of a path lasts from the first unit that one of its threads takes to the moment when all of
 * them find the queue empty: over it the path's throughput is measured.
 *
 * Everything here is guarded by the pool's lock. A thread without work frees its transfer buffer
 * and sleeps. */
#include "pipeline.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include "clock.h"
#include "err.h"
#include "thread.h"

enum { STORAGE_THREADS = 4, MEMORY_THREADS = 1, N_THREADS = STORAGE_THREADS + MEMORY_THREADS };
enum { READER_DEPTH = 16 };
enum { HELPERS = 8 };             /* most at a time */
enum { RUN_MIN_BYTES = 1 << 20 }; /* shorter runs measure how fast threads wake */

typedef struct queue {
    neap_unit *first, *last;
    pthread_cond_t filled;
} queue;

typedef struct run {
    uint32_t n_busy; /* threads at it; 0: none is on */
    uint64_t began_ns, bytes;
    bool is_spoilt; /* something failed, or came by another path */
} run;

typedef struct restorer {
    struct neap_pipeline *pipeline;
    neap_path path;
    bool is_busy; /* counted in its path's run */
    pthread_t thread;
} restorer;

struct neap_pipeline {
    neap_pool *pool;
    queue queues[NEAP_N_PATHS];
    run runs[NEAP_N_PATHS];
    neap_pipeline_measured measured;
    void *ctx;
    uint32_t n_queued;
    restorer restorers[N_THREADS];
    uint32_t n_threads, n_of_path[NEAP_N_PATHS];
    neap_worker idle[HELPERS]; /* of helpers that do not help just now */
    uint32_t n_idle, n_helping;
    bool started, stopping;
};

static void unlink_unit(neap_pipeline *pipeline, neap_unit *unit) {
    queue *q = &pipeline->queues[unit->queue];
    *(unit->prev ? &unit->prev->next : &q->first) = unit->next;
    *(unit->next ? &unit->next->prev : &q->last) = unit->prev;
    unit->next = unit->prev = NULL;
    unit->queued = false;
    pipeline->n_queued--;
}

/* What bringing the unit back moves on its path. [L] */
static uint64_t path_bytes(const neap_unit *unit) {
    if (unit->is_kv && neap_unit_path(unit) == NEAP_PATH_STORAGE)
        return neap_swap_record_len(unit->swap);
    return neap_unit_size(unit).evictable;
}

/* Before the thread claims a unit. [L] */
static void run_enter(restorer *self, const neap_unit *unit) {
    run *r = &self->pipeline->runs[self->path];
    if (!self->is_busy && r->n_busy++ == 0) *r = (run){.n_busy = 1, .began_ns = neap_clock_ns()};
    self->is_busy = true;
    if (neap_unit_path(unit) != self->path || unit->to_rebuild) r->is_spoilt = true;
    r->bytes += path_bytes(unit);
}

/* The thread found nothing to do. Lets go of the lock while it reports the end of a run; then the
 * queue may have been filled. [L] */
static bool run_leave(restorer *self) {
    neap_pipeline *pipeline = self->pipeline;
    run *r = &pipeline->runs[self->path];
    if (!self->is_busy) return false;
    self->is_busy = false;
    if (--r->n_busy > 0 || r->is_spoilt || r->bytes < RUN_MIN_BYTES || !pipeline->measured)
        return false;
    const uint64_t bytes = r->bytes, ns = neap_clock_ns() - r->began_ns;
    pthread_mutex_unlock(&pipeline->pool->lock);
    pipeline->measured(pipeline->ctx, self->path, bytes, ns);
    pthread_mutex_lock(&pipeline->pool->lock);
    return true;
}

/* Frees the buffers of helpers. [L] */
static void idle_free(neap_pipeline *pipeline) {
    while (pipeline->n_idle > 0)
        neap_worker_fini(&pipeline->idle[--pipeline->n_idle]);
}

static void *restorer_main(void *ctx) {
    restorer *self = ctx;
    neap_pipeline *pipeline = self->pipeline;
    neap_pool *pool = pipeline->pool;
    queue *q = &pipeline->queues[self->path];
    neap_worker worker = {0};
    if (self->path == NEAP_PATH_STORAGE && neap_reader_create(READER_DEPTH, &worker.reader) != 0)
        worker.reader = NULL;
    pthread_mutex_lock(&pool->lock);
    while (!pipeline->stopping) {
        neap_unit *unit = q->first;
        if (!unit) {
            if (run_leave(self)) continue;
            neap_worker_trim(&worker);
            if (self->path == NEAP_PATH_MEMORY) idle_free(pipeline);
            pthread_cond_wait(&q->filled, &pool->lock);
            continue;
        }
        run_enter(self, unit);
        const int err = neap_pipeline_restore_here(pipeline, unit, &worker);
        if (err) pipeline->runs[self->path].is_spoilt = true;
    }
    pthread_mutex_unlock(&pool->lock);
    neap_worker_fini(&worker);
    return NULL;
}

bool neap_pipeline_start(neap_pipeline *pipeline) {
    if (pipeline->started) return pipeline->n_threads > 0;
    pipeline->started = true;
    for (uint32_t i = 0; i < N_THREADS; i++) {
        restorer *r = &pipeline->restorers[pipeline->n_threads];
        const bool reads = i < STORAGE_THREADS;
        *r = (restorer){.pipeline = pipeline, .path = reads ? NEAP_PATH_STORAGE : NEAP_PATH_MEMORY};
        const int err =
            neap_thread_create(&r->thread, restorer_main, r, reads ? "neap-read" : "neap-decode");
        if (err) {
            neap_log(NEAP_LOG_WARN, "restore thread: %s", neap_strerror(err));
            continue;
        }
        pipeline->n_of_path[r->path]++;
        pipeline->n_threads++;
    }
    return pipeline->n_threads > 0;
}

neap_path_threads neap_pipeline_path_threads(void) {
    return (neap_path_threads){.storage = STORAGE_THREADS, .memory = MEMORY_THREADS};
}

int neap_pipeline_create(neap_pool *pool, neap_pipeline_measured measured, void *ctx,
                         neap_pipeline **ret_pipeline) {
    neap_pipeline *pipeline = calloc(1, sizeof *pipeline);
    if (!pipeline) return -ENOMEM;
    pipeline->pool = pool;
    pipeline->measured = measured;
    pipeline->ctx = ctx;
    for (int i = 0; i < NEAP_N_PATHS; i++)
        pthread_cond_init(&pipeline->queues[i].filled, NULL);
    *ret_pipeline = pipeline;
    return 0;
}

void neap_pipeline_free(neap_pipeline *pipeline) {
    if (!pipeline) return;
    pthread_mutex_lock(&pipeline->pool->lock);
    neap_pipeline_quiesce(pipeline);
    pipeline->stopping = true;
    for (int i = 0; i < NEAP_N_PATHS; i++)
        pthread_cond_broadcast(&pipeline->queues[i].filled);
    pthread_mutex_unlock(&pipeline->pool->lock);
    for (uint32_t i = 0; i < pipeline->n_threads; i++)
        pthread_join(pipeline->restorers[i].thread, NULL);
    for (int i = 0; i < NEAP_N_PATHS; i++)
        pthread_cond_destroy(&pipeline->queues[i].filled);
    idle_free(pipeline);
    free(pipeline);
}

void neap_pipeline_push(neap_pipeline *pipeline, neap_unit *unit, bool front) {
    assert(pipeline->n_threads > 0);
    if (unit->queued && !front) return;
    if (unit->queued) unlink_unit(pipeline, unit);
    neap_path path = neap_unit_path(unit);
    if (pipeline->n_of_path[path] == 0)
        path = NEAP_N_PATHS - 1 - path; /* every thread can do both */
    queue *q = &pipeline->queues[path];
    unit->queue = path;
    unit->queued = true;
    unit->prev = front ? NULL : q->last;
    unit->next = front ? q->first : NULL;
    *(unit->prev ? &unit->prev->next : &q->first) = unit;
    *(unit->next ? &unit->next->prev : &q->last) = unit;
    pipeline->n_queued++;
    pthread_cond_signal(&q->filled);
}

void neap_pipeline_remove(neap_pipeline *pipeline, neap_unit *unit) {
    if (!unit->queued) return;
    unlink_unit(pipeline, unit);
    pthread_cond_broadcast(&pipeline->pool->changed);
}

void neap_pipeline_quiesce(neap_pipeline *pipeline) {
    neap_pool *pool = pipeline->pool;
    for (int i = 0; i < NEAP_N_PATHS; i++)
        for (neap_unit *unit = pipeline->queues[i].first, *next; unit; unit = next) {
            next = unit->next;
            if (neap_unit_state_of(unit) == NEAP_UNIT_EVICTED) unlink_unit(pipeline, unit);
        }
    pthread_cond_broadcast(&pool->changed);
    while (pool->n_restoring > 0 || pool->reading)
        pthread_cond_wait(&pool->changed, &pool->lock);
}

uint32_t neap_pipeline_queued(const neap_pipeline *pipeline) {
    return pipeline->n_queued;
}

/* Allocates a claimed unit together with those beside it, which are claimed, too, and go back to
 * the front of their queues, to be filled by whoever takes them. Lets go of the lock meanwhile. [L]
 */
static int allocate(neap_pipeline *pipeline, neap_unit *unit) {
    neap_pool *pool = pipeline->pool;
    neap_unit *units[NEAP_ALLOCATION_MAX];
    const uint64_t began_ns = neap_clock_ns();
    const size_t n = neap_pool_allocation(pool, unit, units);
    for (size_t i = 0; i < n; i++) {
        if (units[i] == unit) continue;
        unlink_unit(pipeline, units[i]);
        neap_pool_claim(pool, units[i]);
    }
    pthread_mutex_unlock(&pool->lock);
    const int err = neap_pool_allocate_together(pool, units, n);
    for (size_t i = 0; i < n && err; i++)
        if (units[i] != unit) neap_pool_finish(pool, units[i], err, began_ns);
    pthread_mutex_lock(&pool->lock);
    for (size_t i = n; i-- > 0 && !err;)
        if (units[i] != unit) neap_pipeline_push(pipeline, units[i], true);
    return err;
}

/* Makes the unit and those in a queue that share its record this thread's own, all at once: they
 * come back by one read. Their number; which have no pages yet. [L] */
static size_t take(neap_pipeline *pipeline, neap_unit *unit, neap_unit **ret_units,
                   bool *ret_bare) {
    neap_unit *others[NEAP_KLT_LAYERS];
    const size_t n_others = neap_pool_sharers(pipeline->pool, unit, others);
    size_t n = 0;
    ret_units[n++] = unit;
    for (size_t i = 0; i < n_others; i++)
        if (others[i]->queued) ret_units[n++] = others[i];
    for (size_t i = 0; i < n; i++) {
        if (ret_units[i]->queued) unlink_unit(pipeline, ret_units[i]);
        ret_bare[i] = neap_unit_state_of(ret_units[i]) == NEAP_UNIT_EVICTED;
        if (ret_bare[i]) neap_pool_claim(pipeline->pool, ret_units[i]);
    }
    return n;
}

int neap_pipeline_restore_here(neap_pipeline *pipeline, neap_unit *unit, neap_worker *worker) {
    neap_pool *pool = pipeline->pool;
    const uint64_t began_ns = neap_clock_ns();
    neap_unit *units[NEAP_KLT_LAYERS];
    bool bare[NEAP_KLT_LAYERS];
    const size_t n = take(pipeline, unit, units, bare);
    size_t n_ready = 0;
    int unit_err = 0;
    for (size_t i = 0; i < n; i++) {
        neap_unit *own = units[i];
        const int err = bare[i] ? allocate(pipeline, own) : 0;
        if (!err) {
            units[n_ready++] = own;
            continue;
        }
        if (own == unit) unit_err = err;
        pthread_mutex_unlock(&pool->lock);
        neap_pool_finish(pool, own, err, began_ns);
        pthread_mutex_lock(&pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
    /* The units are this thread's own; finish tells whoever waits. */
    const int err = n_ready > 0 ? neap_pool_load_together(pool, units, n_ready, worker) : 0;
    for (size_t i = 0; i < n_ready; i++)
        neap_pool_finish(pool, units[i], err, began_ns);
    pthread_mutex_lock(&pool->lock);
    return unit_err ? unit_err : err;
}

bool neap_pipeline_help(neap_pipeline *pipeline) {
    neap_unit *unit = pipeline->queues[NEAP_PATH_MEMORY].first, *units[NEAP_ALLOCATION_MAX];
    run *r = &pipeline->runs[NEAP_PATH_MEMORY];
    if (!unit || neap_unit_path(unit) != NEAP_PATH_MEMORY || pipeline->n_helping == HELPERS)
        return false;
    /* Committing the pages of many takes longer than what is waited for may take. */
    if (neap_unit_state_of(unit) == NEAP_UNIT_EVICTED &&
        neap_pool_allocation(pipeline->pool, unit, units) > 1)
        return false;
    neap_worker worker = {0};
    if (pipeline->n_idle > 0) worker = pipeline->idle[--pipeline->n_idle];
    pipeline->n_helping++;
    const uint64_t bytes = path_bytes(unit);
    if (neap_pipeline_restore_here(pipeline, unit, &worker) != 0) r->is_spoilt = true;
    if (r->n_busy > 0) r->bytes += bytes; /* the path moved so much more meanwhile */
    pipeline->n_helping--;
    pipeline->idle[pipeline->n_idle++] = worker;
    if (!pipeline->queues[NEAP_PATH_MEMORY].first) idle_free(pipeline);
    return true;
}
