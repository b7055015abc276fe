/* write_behind.c - copies of full KV chunks, made in the swap file while the engine is idle
 * (idle.c), so that the next eviction only drops them. Chunks that klt codes together count as one
 * here.
 *
 * What is in the way (a battery, no room, the day's bytes spent, a failed write) is looked at again
 * after the next use.
 *
 * A use does not wait for it, unless it writes cells while a chunk's bytes are being taken: then as
 * long as it takes to copy them in memory. That begins when nothing uses the engine; the chunk is
 * coded and written from the copy while uses and evictions may already go on, and if they change it
 * meanwhile it loses the copy (pool.h). The bytes in memory never change: with a lossy codec the
 * copy is what an eviction would have made of them. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "core_int.h"
#include "err.h"
#include "vm.h"
#include "write_budget.h"

/* Taken from the day's bytes at once: that replaces a file. */
#define LUMP ((uint64_t)64 << 20)

struct neap_write_behind {
    neap_engine *engine;
    char *swap_dir; /* constant */

    /* pool's lock: what neap_stat shows */
    neap_write_behind_state state;
    uint64_t day, day_bytes;

    /* the idle thread's own */
    neap_worker worker;
    neap_write_budget budget;
    uint64_t taken_bytes, taken_day; /* of the budget, not written yet */
    bool is_silent;                  /* a failure was told of */
};

/* ---- what is in the way ---- */

static void show(neap_write_behind *w, neap_write_behind_state state) {
    pthread_mutex_lock(&w->engine->pool->lock);
    w->state = state;
    w->day = w->budget.day;
    w->day_bytes =
        w->budget.spent_bytes > w->taken_bytes ? w->budget.spent_bytes - w->taken_bytes : 0;
    pthread_mutex_unlock(&w->engine->pool->lock);
}

/* Evictions that must write find room: half of what was allowed, a twentieth of the file system. */
static bool has_room(const neap_write_behind *w, uint64_t bytes) {
    uint64_t live, limit, available, total;
    neap_swapfile_usage(w->engine->pool->swapfile, &live, &limit);
    if (limit > 0 && live + bytes > limit / 2) return false;
    if (neap_folder_space(w->swap_dir, &available, &total) != 0) return true; /* the write tells */
    return available >= bytes + total / 20;
}

/* What stands against writing so much; WRITING: nothing. Files are looked at once a lump. */
static neap_write_behind_state obstacle(neap_write_behind *w, uint64_t bytes) {
    const uint64_t day = neap_clock_day();
    if (!has_room(w, bytes)) return NEAP_WRITE_BEHIND_NO_ROOM;
    if (day != w->taken_day) w->taken_bytes = 0;
    w->taken_day = day;
    if (w->taken_bytes >= bytes) return NEAP_WRITE_BEHIND_WRITING;
    if (neap_idle_on_battery(w->engine)) return NEAP_WRITE_BEHIND_BATTERY;
    const uint64_t lump = bytes > LUMP ? bytes : LUMP;
    w->taken_bytes += neap_write_budget_take(&w->budget, day, lump);
    return w->taken_bytes >= bytes ? NEAP_WRITE_BEHIND_WRITING : NEAP_WRITE_BEHIND_SPENT;
}

static int make_buffer(neap_write_behind *w, size_t len) {
    if (w->worker.bounce_cap >= len) return 0;
    void *buffer = neap_worker_bounce(&w->worker, len);
    return buffer ? neap_vm_populate(buffer, w->worker.bounce_cap) : -ENOMEM;
}

static void fail(neap_write_behind *w, int err) {
    neap_pool *pool = w->engine->pool;
    pthread_mutex_lock(&pool->lock);
    pool->counters.errors++;
    snprintf(pool->last_error, sizeof pool->last_error, "write-behind: %s", neap_strerror(err));
    pthread_mutex_unlock(&pool->lock);
    if (!w->is_silent)
        neap_log(NEAP_LOG_WARN, "write-behind: %s; chunks are written by evictions until it works",
                 neap_strerror(err));
    w->is_silent = true;
}

/* ---- a chunk ---- */

/* Sizes of the next chunk, as neap_pool_copy_size(); 0: there is none. What is on its way back may
 * be one later: then looks again. */
static size_t look(neap_write_behind *w, neap_unit **ret_unit, size_t *ret_most) {
    neap_engine *engine = w->engine;
    neap_pool *pool = engine->pool;
    pthread_mutex_lock(&pool->lock);
    neap_unit *unit = neap_pool_next_to_copy(pool);
    const size_t size = unit ? neap_pool_copy_size(pool, unit, ret_most) : 0;
    const bool later = pool->n_restoring > 0 || neap_pipeline_queued(engine->pipeline) > 0;
    pthread_mutex_unlock(&pool->lock);
    *ret_unit = unit;
    if (size > 0 || !later) return size;
    neap_idle_later(engine);
    return 0;
}

/* Takes the chunk's bytes. No use begins before its cells' positions are known; whoever begins one
 * then may write cells only once it has had the pool's lock. Fails: -EBUSY (the engine is used, or
 * was); as neap_pool_copy_take(). */
static int take(neap_write_behind *w, neap_unit *unit, size_t size, neap_copy *ret_copy) {
    neap_engine *engine = w->engine;
    neap_pool *pool = engine->pool;
    pthread_mutex_lock(&engine->use_lock);
    if (neap_idle_is_over(engine)) {
        pthread_mutex_unlock(&engine->use_lock);
        return -EBUSY;
    }
    pthread_mutex_lock(&pool->lock);
    const int err = neap_pool_copy_take(pool, unit, size, ret_copy);
    pthread_mutex_unlock(&engine->use_lock);
    if (!err) neap_pool_copy_read(pool, ret_copy, w->worker.bounce);
    pthread_mutex_unlock(&pool->lock);
    return err;
}

/* Writes the next chunk; WRITING: there may be more. */
static neap_write_behind_state write_chunk(neap_write_behind *w) {
    neap_unit *unit;
    size_t most, written;
    const size_t size = look(w, &unit, &most);
    if (size == 0) return NEAP_WRITE_BEHIND_WAITING;
    const neap_write_behind_state state = obstacle(w, most);
    if (state != NEAP_WRITE_BEHIND_WRITING) return state;
    show(w, state);
    neap_copy copy;
    int err = make_buffer(w, size);
    if (!err) err = take(w, unit, size, &copy);
    if (err == -EBUSY) return NEAP_WRITE_BEHIND_WAITING;
    if (err == -EAGAIN) return NEAP_WRITE_BEHIND_WRITING;
    if (!err) err = neap_pool_copy_store(w->engine->pool, &copy, &written);
    if (err) {
        fail(w, err);
        return NEAP_WRITE_BEHIND_FAILED;
    }
    w->taken_bytes -= written;
    w->is_silent = false;
    return NEAP_WRITE_BEHIND_WRITING;
}

void neap_write_behind_run(neap_write_behind *w) {
    neap_write_behind_state state;
    do
        state = write_chunk(w);
    while (state == NEAP_WRITE_BEHIND_WRITING);
    neap_worker_trim(&w->worker);
    neap_write_budget_give(&w->budget, w->taken_day, w->taken_bytes);
    w->taken_bytes = 0;
    show(w, state);
}

void neap_write_behind_stat(const neap_write_behind *writer, neap_stat *inout_stat) {
    inout_stat->write_behind = writer->state;
    inout_stat->write_behind_bytes_today = writer->day == neap_clock_day() ? writer->day_bytes : 0;
}

void neap_write_behind_free(neap_write_behind *w) {
    if (!w) return;
    neap_write_budget_close(&w->budget);
    neap_worker_fini(&w->worker);
    free(w->swap_dir);
    free(w);
}

int neap_write_behind_create(neap_engine *engine, const neap_options *options,
                             const char *swap_dir) {
    neap_write_behind *w = calloc(1, sizeof *w);
    if (!w) return -ENOMEM;
    *w = (neap_write_behind){
        .engine = engine, .swap_dir = strdup(swap_dir), .state = NEAP_WRITE_BEHIND_WAITING};
    int err = w->swap_dir ? 0 : -ENOMEM;
    if (!err)
        err = neap_write_budget_open(swap_dir, options->write_behind_bytes, neap_clock_day(),
                                     &w->budget);
    if (err) {
        neap_write_behind_free(w);
        return err;
    }
    w->day = w->budget.day;
    w->day_bytes = w->budget.spent_bytes;
    engine->write_behind = w;
    return 0;
}
