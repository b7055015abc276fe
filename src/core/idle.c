/* idle.c - the thread for what is done while nothing uses the engine: contexts are fitted
 * (lowram_use.c), then full chunks copied to the swap file (write_behind.c).
 *
 *             a use ends                  idle_ns without a use
 *   parked ---------------> pending ------------------------------> works, piece by piece
 *     ^                      ^   |  a use: waits again                 |     |
 *     |                      +---+                       a use begins  |     |
 *     |                      +-----------------------------------------+     |
 *     +----------------------------------------------------------------------+
 *                    nothing is left, or something is in the way
 *
 * Parked it waits without a timeout: an idle engine does not wake up once its work is done. No use
 * waits for it, unless for as long as it takes to copy a chunk in memory: work is done on copies.
 */
#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "clock.h"
#include "core_int.h"
#include "lowram_use.h"
#include "power.h"
#include "thread.h"

#define IDLE_NS (2 * UINT64_C(1000000000))

struct neap_idle {
    pthread_t thread;
    pthread_cond_t wake; /* CLOCK_MONOTONIC */
    uint64_t idle_ns;    /* constant, as the next */
    bool on_battery;

    /* use_lock */
    bool stopping;
    bool pending; /* there may be something to do */
    uint64_t used_ns;
    uint64_t n_alone; /* the engine's when work began */
};

static bool is_busy(const neap_engine *engine) { /* use_lock is held */
    return engine->n_uses > 0 || engine->alone || engine->n_waiting_alone > 0;
}

bool neap_idle_is_over(neap_engine *engine) {
    neap_idle *idle = engine->idle;
    if (!idle->stopping && !idle->pending && !is_busy(engine) && idle->n_alone == engine->n_alone)
        return false;
    idle->pending = true;
    return true;
}

void neap_idle_later(neap_engine *engine) {
    pthread_mutex_lock(&engine->use_lock);
    neap_idle_used(engine->idle);
    pthread_mutex_unlock(&engine->use_lock);
}

bool neap_idle_on_battery(const neap_engine *engine) {
    return !engine->idle->on_battery && neap_on_battery("");
}

static void wait_until(neap_engine *engine, uint64_t until_ns) {
    const struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000u),
                                   .tv_nsec = (long)(until_ns % 1000000000u)};
    pthread_cond_timedwait(&engine->idle->wake, &engine->use_lock, &until);
}

static void *idle_main(void *arg) {
    neap_engine *engine = arg;
    neap_idle *idle = engine->idle;
    neap_thread_lower();
    pthread_mutex_lock(&engine->use_lock);
    while (!idle->stopping) {
        const uint64_t now_ns = neap_clock_ns();
        const uint64_t due_ns = (is_busy(engine) ? now_ns : idle->used_ns) + idle->idle_ns;
        if (!idle->pending) {
            pthread_cond_wait(&idle->wake, &engine->use_lock);
        } else if (now_ns < due_ns) {
            wait_until(engine, due_ns);
        } else {
            idle->pending = false;
            idle->n_alone = engine->n_alone;
            pthread_mutex_unlock(&engine->use_lock);
            neap_lowram_fit_idle(engine);
            if (engine->write_behind) neap_write_behind_run(engine->write_behind);
            pthread_mutex_lock(&engine->use_lock);
        }
    }
    pthread_mutex_unlock(&engine->use_lock);
    return NULL;
}

void neap_idle_used(neap_idle *idle) {
    idle->used_ns = neap_clock_ns();
    if (idle->pending) return;
    idle->pending = true;
    pthread_cond_signal(&idle->wake);
}

static void idle_free(neap_engine *engine) {
    pthread_cond_destroy(&engine->idle->wake);
    free(engine->idle);
    engine->idle = NULL;
}

int neap_idle_start(neap_engine *engine, const neap_options *options) {
    neap_idle *idle = calloc(1, sizeof *idle);
    if (!idle) return -ENOMEM;
    idle->idle_ns = options->idle_ns ? options->idle_ns : IDLE_NS;
    idle->on_battery = options->write_behind_on_battery;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&idle->wake, &attributes);
    pthread_condattr_destroy(&attributes);
    engine->idle = idle;
    const int err = neap_thread_create(&idle->thread, idle_main, engine, "neap-idle");
    if (err) idle_free(engine);
    return err;
}

void neap_idle_stop(neap_engine *engine) {
    neap_idle *idle = engine->idle;
    if (!idle) return;
    pthread_mutex_lock(&engine->use_lock);
    idle->stopping = true;
    pthread_cond_signal(&idle->wake);
    pthread_mutex_unlock(&engine->use_lock);
    pthread_join(idle->thread, NULL);
    idle_free(engine);
}
