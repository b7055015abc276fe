/* pressure_watch.c - the thread of an engine that gives memory back when memory gets short, and
 * brings it back when that is over.
 *
 *            event, or time to look                     release_bytes > 0
 *   asleep ------------------------> reads, decides -----------------------> evicts
 *     ^                                     |  restore_bytes > 0                |
 *     |                                     +---------------------> restores    |
 *     +-------------------------------------+-----------------------------+-----+
 *
 * Asleep it waits in epoll, without a timeout unless the decision wants to look again: an idle
 * instance from which pressure has taken nothing does not wake up. Between waking and evicting
 * nothing is allocated.
 *
 * Restoring goes in small steps with a look between two, so that a shortage that begins meanwhile
 * is answered; a use that needs the units brings them back by itself, before these.
 *
 * What the machine lacks every instance sees, so they take turns and look again when it is theirs;
 * while `neap watch` runs, which knows who is idle, it goes first and an instance acts for the
 * machine only when the end is near. What the own group lacks is nobody else's business. */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "clock.h"
#include "core_int.h"
#include "err.h"
#include "sensor.h"
#include "thread.h"
#include "turn.h"

#define TURN_NS 500000000u
#define TURN_CRITICAL_NS 50000000u
#define RESTORE_STEP ((uint64_t)64 << 20)

struct neap_watcher {
    neap_engine *engine;
    neap_pressure_sensor *sensor;
    pthread_t thread;
    atomic_bool stopping;
    int turn, service; /* of turn.h; -1: none */
    neap_pressure_state state;
};

/* The signals of now; false: the files could not be read. */
static bool sense(neap_watcher *w, neap_pressure_signals *ret_signals) {
    if (neap_pressure_sensor_read(w->sensor, ret_signals) != 0) return false;
    ret_signals->resident_bytes = neap_releasable_bytes(w->engine);
    pthread_mutex_lock(&w->engine->pool->lock);
    ret_signals->owed_bytes = neap_totals_get(w->engine).owed;
    pthread_mutex_unlock(&w->engine->pool->lock);
    pthread_mutex_lock(&w->engine->use_lock);
    ret_signals->busy = w->engine->n_computing > 0;
    pthread_mutex_unlock(&w->engine->use_lock);
    return true;
}

static uint64_t evict(neap_engine *engine, uint64_t bytes, int only) {
    neap_evict_result result;
    const neap_evict_request request = {.bytes = bytes, .only = only, .by_pressure = true};
    return neap_evict_unseen(engine, &request, &result) == 0 ? result.released_bytes : 0;
}

/* In a hurry weights go first: to drop them takes no encoding, no writing. */
static void release(neap_watcher *w, uint64_t bytes, bool in_a_hurry) {
    neap_engine *engine = w->engine;
    uint64_t released = in_a_hurry ? evict(engine, bytes, NEAP_ONLY_WEIGHTS) : 0;
    if (released < bytes) released += evict(engine, bytes - released, NEAP_ONLY_ALL);
    neap_pressure_released(&w->state, released);
    pthread_mutex_lock(&engine->pool->lock);
    engine->pressure.releases += released > 0;
    engine->pressure.released_bytes += released;
    pthread_mutex_unlock(&engine->pool->lock);
}

/* After a wait for the turn others may have released enough. */
static neap_pressure_decision decide_again(neap_watcher *w, const neap_pressure_state *before,
                                           const neap_pressure_signals *first,
                                           const neap_pressure_decision *decision) {
    neap_pressure_signals signals;
    if (!sense(w, &signals)) return *decision;
    if (signals.machine.event < first->machine.event) signals.machine.event = first->machine.event;
    if (signals.group.event < first->group.event) signals.group.event = first->group.event;
    signals.told = signals.told || first->told;
    w->state = *before;
    return neap_pressure_decide(&w->state, &signals);
}

static void act(neap_watcher *w, const neap_pressure_state *before,
                const neap_pressure_signals *signals, neap_pressure_decision *decision) {
    const bool is_critical = decision->severity == NEAP_PRESSURE_CRITICAL;
    bool ours = false;
    if (decision->by_machine && !is_critical && w->service >= 0 && neap_turn_taken(w->service))
        return;
    if (decision->by_machine && w->turn >= 0) {
        ours = neap_turn_take(w->turn, is_critical ? TURN_CRITICAL_NS : TURN_NS);
        if (ours) *decision = decide_again(w, before, signals, decision);
    }
    if (decision->release_bytes > 0) release(w, decision->release_bytes, is_critical);
    if (ours) neap_turn_give(w->turn);
}

/* What a machine has room for is given to one instance at a time. */
static void bring_back(neap_watcher *w, const neap_pressure_state *before,
                       const neap_pressure_signals *signals, neap_pressure_decision *decision) {
    const bool ours = w->turn >= 0 && neap_turn_take(w->turn, TURN_NS);
    if (w->turn >= 0 && !ours) return;
    if (ours) *decision = decide_again(w, before, signals, decision);
    if (decision->restore_bytes > 0) {
        uint64_t bytes = 0;
        neap_restore_owed(w->engine, decision->restore_bytes, RESTORE_STEP, &bytes);
        neap_pressure_restored(&w->state, neap_clock_ns(), bytes);
        pthread_mutex_lock(&w->engine->pool->lock);
        w->engine->pressure.restored_bytes += bytes;
        pthread_mutex_unlock(&w->engine->pool->lock);
    }
    if (ours) neap_turn_give(w->turn);
}

/* Looks, acts; when to look again. */
static uint64_t look(neap_watcher *w) {
    neap_pressure_signals signals;
    const neap_pressure_state before = w->state;
    if (!sense(w, &signals)) return UINT64_MAX;
    neap_pressure_decision decision = neap_pressure_decide(&w->state, &signals);
    if (decision.release_bytes > 0)
        act(w, &before, &signals, &decision);
    else if (decision.restore_bytes > 0)
        bring_back(w, &before, &signals, &decision);
    pthread_mutex_lock(&w->engine->pool->lock);
    w->engine->pressure.looks++;
    w->engine->pressure.level = !w->state.pressed                         ? NEAP_PRESSURE_CALM
                                : decision.severity > NEAP_PRESSURE_SHORT ? decision.severity
                                                                          : NEAP_PRESSURE_SHORT;
    pthread_mutex_unlock(&w->engine->pool->lock);
    return decision.look_ns;
}

static void *watcher_main(void *arg) {
    neap_watcher *w = arg;
    uint64_t look_ns = 0; /* the first at once */
    for (;;) {
        neap_pressure_sensor_wait(w->sensor, look_ns);
        if (atomic_load(&w->stopping)) return NULL;
        look_ns = look(w);
    }
}

static void watcher_free(neap_watcher *w) {
    neap_pressure_sensor_close(w->sensor);
    neap_turn_close(w->turn);
    neap_turn_close(w->service);
    free(w);
}

void neap_watcher_start(neap_engine *engine, const char *watch, const char *write) {
    neap_watcher *w = calloc(1, sizeof *w);
    int err = w ? 0 : -ENOMEM;
    if (w) {
        *w = (neap_watcher){.engine = engine, .turn = -1, .service = -1};
        atomic_init(&w->stopping, false);
        /* Without turns each acts for itself: more than was needed may be released. */
        neap_turn_open("pressure.lock", &w->turn);
        neap_turn_open("watch.lock", &w->service);
        err = neap_pressure_sensor_open("", watch, write, &w->sensor);
    }
    if (!err) {
        neap_pressure_sensor_describe(w->sensor, engine->pressure.sources,
                                      sizeof engine->pressure.sources);
        engine->pressure.level = NEAP_PRESSURE_CALM;
        err = neap_thread_create(&w->thread, watcher_main, w, "neap-pressure");
    }
    if (!err) {
        engine->watcher = w;
        return;
    }
    if (w) watcher_free(w);
    engine->pressure.level = NEAP_PRESSURE_OFF;
    if (err != -ECANCELED) /* MEMORY_PRESSURE_WATCH=/dev/null: asked for */
        neap_log(NEAP_LOG_WARN, "memory pressure is not watched: %s", neap_strerror(err));
}

void neap_watcher_wake(neap_engine *engine) {
    if (engine->watcher) neap_pressure_sensor_wake(engine->watcher->sensor);
}

void neap_watcher_stop(neap_engine *engine) {
    neap_watcher *w = engine->watcher;
    if (!w) return;
    atomic_store(&w->stopping, true);
    neap_pressure_sensor_wake(w->sensor);
    pthread_join(w->thread, NULL);
    engine->watcher = NULL;
    watcher_free(w);
}
