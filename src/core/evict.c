/* evict.c - gives back what was asked: scratch first, which costs nothing to have again, then the
 * units that the policy names, until the kernel has really got so much.
 *
 * A plan reckons with expected sizes. When it ends short, because a chunk was coded worse or the
 * swap file took no more, what is left is planned again without the units that could not go.
 *
 * The steps of a plan are of different units and run on several threads, in turns: clean units are
 * dropped first, which is memory at once, needed perhaps by the coding of others; copies that leave
 * memory for storage go last. A step is begun only if the target needs it in the order of the plan,
 * those before it taken at what they gave or, until they have run, at what is expected. So which
 * units go hangs neither on the turns nor on the number of threads, unless an estimate was wrong.
 *
 * Chunks that klt codes together are one unit of the plan and one step, in the place of their last
 * layer; clean they are units again.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "clock.h"
#include "core_int.h"
#include "err.h"
#include "lowram_use.h"

/* ---- totals ---- */

static void add_kv(neap_totals *t, const neap_unit *unit, neap_unit_state state,
                   neap_unit_bytes bytes) {
    const bool away = state != NEAP_UNIT_RESIDENT && state != NEAP_UNIT_EVICTING;
    if (state == NEAP_UNIT_EMPTY) return;
    if (unit->by_pressure && state != NEAP_UNIT_LOST) t->owed += bytes.evictable;
    t->n_kv++;
    t->n_kv_evicted += away;
    t->n_lost += state == NEAP_UNIT_LOST;
    t->kv += bytes.in_use;
    t->kv_evictable += bytes.evictable;
    t->kv_resident += bytes.in_use - (away ? neap_unit_gone_bytes(unit) : 0);
    const uint64_t held = neap_klt_held_bytes(unit), copy = held + unit->memory.len;
    t->kv_memory += neap_unit_memory_bytes(unit) + held;
    t->kv_storage += neap_unit_stored_bytes(unit);
    if (unit->coded || unit->klt) {
        t->kv_coded += copy > 0 ? copy : neap_unit_stored_bytes(unit);
        t->kv_coded_from += neap_kv_raw_bytes(unit);
    }
    t->n_klt += unit->klt != NULL;
    t->n_klt_left += (unit->keeps_codec || unit->klt_refused) && neap_klt_fits(unit->kv);
    t->n_klt_refused += unit->klt_refused && neap_klt_fits(unit->kv);
    t->klt_error += unit->klt ? (double)unit->klt->error : 0;
    t->n_kv_on_storage += away && unit->swap;
    t->n_kv_clean += !away && unit->swap;
}

static void add_unit(neap_unit *unit, void *ctx) {
    neap_totals *t = ctx;
    const neap_unit_state state = neap_unit_state_of(unit);
    const neap_unit_bytes bytes = neap_unit_size(unit);
    if (unit->is_kv) {
        add_kv(t, unit, state, bytes);
        return;
    }
    const bool away = state == NEAP_UNIT_EVICTED || state == NEAP_UNIT_RESTORING;
    if (unit->by_pressure) t->owed += bytes.evictable;
    t->n_weights++;
    t->n_weights_evicted += away;
    t->weights += bytes.in_use;
    t->weights_evictable += bytes.evictable;
    t->weights_resident += bytes.in_use - (away ? neap_unit_gone_bytes(unit) : 0);
}

neap_totals neap_totals_get(neap_engine *engine) {
    neap_totals totals = {0};
    neap_pool_each(engine->pool, add_unit, &totals);
    totals.kv_coded += totals.n_klt > 0 ? neap_pool_guest_bytes(engine->pool, NULL) : 0;
    return totals;
}

/* ---- the plan ---- */

/* What of a plan runs together. */
typedef enum turn { TURN_DROP, TURN_COPY, TURN_MOVE, N_TURNS } turn;

typedef struct eviction {
    neap_engine *engine;
    const neap_evict_request *request;
    neap_evict_result result;
    uint64_t sequence;
    uint64_t target;
    uint64_t copies_before;   /* committed for the stack, and fits, when it began */
    uint64_t fit_bytes;       /* fits now */
    neap_stage stage;         /* of the plan at hand */
    uint64_t released_before; /* the same */
    double encoded_share;     /* the same: of raw bytes, what the codec is expected to leave */
    uint64_t spare;           /* most bytes of units that may go */
    neap_plan_room room;
    size_t n_units;
    bool out_of_memory;

    pthread_mutex_t lock; /* guards the rest, and result, while steps run */
    uint64_t dropped;     /* pages of units that went back */
    uint64_t evicted;     /* pages of units that were evicted, gone or taken by a copy */
    size_t n_steps, next; /* of the plan; the first one not begun */
    turn turn;
    uint32_t n_running;
    /* Bytes that steps of the plan are expected to release: those before next, and those that have
     * ended; and what these gave. */
    uint64_t before, ended, given;
    uint64_t pending; /* the most that those under way may give */
    bool progress;
} eviction;

static bool room_grow(neap_plan_room *room, size_t cap) {
    if (cap <= room->cap) return true;
    neap_policy_unit *units = realloc(room->units, cap * sizeof *units);
    if (units) room->units = units;
    neap_step *steps = units ? realloc(room->steps, 2 * cap * sizeof *steps) : NULL;
    if (!steps) return false;
    room->steps = steps;
    /* Touched now, so that the pages are there. */
    memset(units + room->cap, 0, (cap - room->cap) * sizeof *units);
    memset(steps + 2 * room->cap, 0, 2 * (cap - room->cap) * sizeof *steps);
    room->cap = cap;
    return true;
}

void neap_plan_reserve(neap_engine *engine) {
    pthread_mutex_lock(&engine->pool->lock);
    const size_t n = engine->pool->n_slots;
    if (!engine->room.taken && n > engine->room.cap) room_grow(&engine->room, n + n / 4);
    pthread_mutex_unlock(&engine->pool->lock);
    neap_crew_start(engine->crew);
}

/* [L] */
static void room_take(eviction *e) {
    e->room = e->engine->room;
    e->engine->room.taken = true;
}

/* [L] */
static void room_give(eviction *e) {
    e->engine->room = e->room;
    e->engine->room.taken = false;
}

/* Of the raw bytes, what the codec is expected to leave. */
static uint64_t expected_encoded(const eviction *e, uint64_t raw) {
    return (uint64_t)((double)raw * e->encoded_share);
}

/* Whether the unit is away and its copy in memory; klt's record, which one of
 * those that share it moves. [L] */
static bool is_in_memory(const neap_pool *pool, const neap_unit *unit) {
    size_t len;
    if (neap_unit_state_of(unit) != NEAP_UNIT_EVICTED) return false;
    return unit->memory.len > 0 ||
           (neap_klt_held(unit, &len) && neap_klt_mover(pool, unit) == unit);
}

/* [L] */
static uint64_t memory_bytes(const neap_unit *unit) {
    size_t len;
    return neap_klt_held(unit, &len) ? len : neap_unit_memory_bytes(unit);
}

/* Of a KV unit: what its restore from storage reads. */
static uint64_t expected_stored(const eviction *e, const neap_unit *unit, uint64_t raw,
                                uint64_t encoded) {
    if (unit->swap) return neap_unit_stored_bytes(unit);
    if (unit->memory.len > 0) return encoded; /* is moved as it is */
    return e->engine->pool->storage_codec ? expected_encoded(e, raw) : raw;
}

static bool weights_are_clean(const neap_unit *unit) {
    for (size_t i = 0; i < unit->n_parts; i++)
        if (!unit->parts[i].file && unit->parts[i].inner.len > 0 && !unit->swap) return false;
    return true;
}

/* Chunks that klt is to code together are one for the plan, the last layer's: that one. NULL: klt
 * is not to code the unit. [L] */
static const neap_unit *stands_for(const neap_pool *pool, const neap_unit *unit) {
    neap_unit *members[NEAP_KLT_LAYERS];
    const size_t n = unit->is_kv ? neap_klt_members(pool, unit, members) : 0;
    return n > 0 ? members[n - 1] : NULL;
}

static void add_candidate(neap_unit *unit, void *ctx) {
    eviction *e = ctx;
    const neap_unit_state state = neap_unit_state_of(unit);
    const bool in_memory = is_in_memory(e->engine->pool, unit);
    uint64_t evictable = neap_unit_size(unit).evictable;
    if ((state != NEAP_UNIT_RESIDENT && !in_memory) || evictable == 0) return;
    const neap_unit *together = stands_for(e->engine->pool, unit);
    if (together && together != unit) return;
    if (together) evictable = neap_klt_evictable(e->engine->pool, unit);
    if (unit->passed_over == e->sequence) return;
    if (e->request->only == NEAP_ONLY_WEIGHTS && unit->is_kv) return;
    if (e->request->only == NEAP_ONLY_KV && !unit->is_kv) return;
    if (e->n_units == e->room.cap && !room_grow(&e->room, 2 * e->room.cap + 256)) {
        e->out_of_memory = true;
        return;
    }
    const uint64_t encoded = in_memory ? memory_bytes(unit) : 0;
    e->room.units[e->n_units++] = (neap_policy_unit){
        .id = unit->id,
        .is_kv = unit->is_kv,
        .is_clean =
            !unit->is_kv ? weights_are_clean(unit) : !in_memory && (unit->swap || unit->klt),
        .in_memory = in_memory,
        .layer = unit->layer,
        .stream = unit->stream,
        .chunk = unit->chunk,
        .release_bytes = in_memory ? encoded : evictable,
        .raw_bytes = evictable,
        .encoded_bytes = in_memory     ? encoded
                         : unit->is_kv ? expected_encoded(e, evictable)
                                       : 0,
        .stored_bytes = together      ? neap_klt_expected(unit)
                        : unit->is_kv ? expected_stored(e, unit, evictable, encoded)
                                      : 0,
        .last_use = unit->last_use,
    };
}

static void mark_together(eviction *e, size_t n_steps) {
    neap_pool *pool = e->engine->pool;
    pthread_mutex_lock(&pool->lock);
    for (size_t i = 0; i < n_steps; i++) {
        neap_step *step = &e->room.steps[i];
        const bool codes =
            step->action == NEAP_ACTION_TO_MEMORY || step->action == NEAP_ACTION_TO_STORAGE;
        step->together = codes && stands_for(pool, neap_pool_unit(pool, step->id));
        if (step->together) step->action = NEAP_ACTION_TO_STORAGE;
    }
    pthread_mutex_unlock(&pool->lock);
}

/* Steps for so many bytes more into the room; their number, 0: nothing is left. */
static size_t make_plan(eviction *e, uint64_t target) {
    neap_engine *engine = e->engine;
    neap_pool *pool = engine->pool;
    pthread_mutex_lock(&pool->lock);
    e->n_units = 0;
    const neap_pool_counters *c = &pool->counters;
    e->encoded_share = c->encoded_from_bytes
                           ? (double)c->encoded_bytes / (double)c->encoded_from_bytes
                           : 17.0 / 32; /* f16 by q8 */
    neap_pool_each(pool, add_candidate, e);
    const neap_totals totals = neap_totals_get(engine);
    const neap_rates rates = engine->rates;
    const bool has_klt = neap_pool_klt(pool) != NULL;
    pthread_mutex_unlock(&pool->lock);

    const neap_policy_input input = {
        .units = e->room.units,
        .n = e->n_units,
        .target_bytes = target,
        .read_rate = rates.read.bps,
        .decode_rate = rates.decode.bps,
        /* klt's copies are on storage (pool/klt_unit.c), and with them all KV. */
        .memory_useful = strcmp(pool->codec->name, "none") != 0 && !has_klt,
        .n_weights_evicted = totals.n_weights_evicted,
        .weight_bytes_evicted = totals.weights - totals.weights_resident,
        .n_kv_on_storage = totals.n_kv_on_storage,
    };
    const size_t n_steps =
        e->n_units > 0 ? engine->policy->plan(&input, e->room.steps, &e->stage) : 0;
    mark_together(e, n_steps);
    return n_steps;
}

/* ---- carrying it out ---- */

static uint64_t stack_committed(const eviction *e) {
    uint64_t live, committed;
    neap_stack_usage(e->engine->pool->stack, &live, &committed);
    return committed;
}

/* What the kernel has got back by now; coded copies, whole pages, and fits count against it. While
 * steps run, half of one that is under way may show. [lock] */
static uint64_t released(const eviction *e) {
    const uint64_t gained = e->result.scratch_bytes + e->dropped + e->copies_before;
    const uint64_t copies = stack_committed(e) + e->fit_bytes;
    return gained > copies ? gained - copies : 0;
}

static void account(eviction *e, const neap_unit *unit, const neap_evicted *evicted) {
    e->dropped += evicted->dropped_bytes;
    if (evicted->action != NEAP_ACTION_MEMORY_TO_STORAGE)
        e->evicted += evicted->dropped_bytes + evicted->kept_bytes;
    e->given += evicted->dropped_bytes + evicted->unstacked_bytes - evicted->stacked_bytes;
    if (!unit->is_kv)
        e->result.weights_bytes += evicted->dropped_bytes;
    else if (evicted->action == NEAP_ACTION_TO_MEMORY)
        e->result.kv_memory_bytes += evicted->raw_bytes;
    else
        e->result.kv_storage_bytes += evicted->raw_bytes;
    /* What this eviction put into memory first counts where it ended up. */
    if (evicted->action == NEAP_ACTION_MEMORY_TO_STORAGE)
        e->result.kv_memory_bytes -= evicted->raw_bytes < e->result.kv_memory_bytes
                                         ? evicted->raw_bytes
                                         : e->result.kv_memory_bytes;
}

static turn turn_of(neap_action action) {
    return action == NEAP_ACTION_DROP                ? TURN_DROP
           : action == NEAP_ACTION_MEMORY_TO_STORAGE ? TURN_MOVE
                                                     : TURN_COPY;
}

static bool fits(const eviction *e, const neap_unit *unit, neap_action action) {
    const neap_unit_state state = neap_unit_state_of(unit);
    if (unit->passed_over == e->sequence) return false;
    if (action != NEAP_ACTION_MEMORY_TO_STORAGE) return state == NEAP_UNIT_RESIDENT;
    return is_in_memory(e->engine->pool, unit);
}

/* The most that a step releases. */
static uint64_t most_release(const eviction *e, const neap_step *step) {
    const neap_unit *unit = neap_pool_unit(e->engine->pool, step->id);
    return step->together ? neap_klt_evictable(e->engine->pool, unit)
                          : neap_unit_size(unit).evictable;
}

static uint64_t expected_release(const eviction *e, const neap_step *step) {
    const neap_unit *unit = neap_pool_unit(e->engine->pool, step->id);
    const neap_action action = step->action;
    const uint64_t evictable = most_release(e, step);
    if (action == NEAP_ACTION_MEMORY_TO_STORAGE)
        return is_in_memory(e->engine->pool, unit) ? memory_bytes(unit) : 0;
    if (action != NEAP_ACTION_TO_MEMORY) return evictable;
    const uint64_t encoded = expected_encoded(e, evictable);
    return encoded < evictable ? evictable - encoded : 0;
}

/* Whether the steps before the next one have not given, or are not expected to give, enough. [lock]
 */
static bool needs_next(const eviction *e) {
    const int64_t gain = (int64_t)(e->given + e->before) - (int64_t)e->ended;
    return gain < 0 || (uint64_t)gain < e->target - e->released_before;
}

static uint64_t units_gave(const eviction *e) {
    const uint64_t before = e->released_before;
    return e->given + (before > e->result.scratch_bytes ? before - e->result.scratch_bytes : 0);
}

/* The next step of this turn; false: none may begin now. A thread that comes back from a step looks
 * again, so none is forgotten that had to wait for what others bring. [lock] */
static bool begin_step(eviction *e, neap_step *ret_step, uint64_t *ret_expected) {
    for (; e->next < e->n_steps; e->next++) {
        const neap_step step = e->room.steps[e->next];
        neap_unit *unit = neap_pool_unit(e->engine->pool, step.id);
        const uint64_t expected = expected_release(e, &step);
        if (!needs_next(e)) return false;
        bool runs = turn_of(step.action) == e->turn && fits(e, unit, step.action);
        const uint64_t most = most_release(e, &step);
        if (runs && units_gave(e) + e->pending + most > e->spare) {
            if (e->n_running > 0) return false;
            unit->passed_over = e->sequence; /* keep_bytes */
            runs = false;
        }
        e->before += expected;
        if (!runs) continue;
        *ret_step = step;
        *ret_expected = expected;
        e->pending += most;
        e->n_running++;
        e->next++;
        return true;
    }
    return false;
}

static void end_step(eviction *e, neap_unit *unit, const neap_evicted *evicted, int err) {
    if (evicted->storage_error && !e->result.storage_error)
        e->result.storage_error = evicted->storage_error;
    if (!err) {
        account(e, unit, evicted);
        e->progress = true;
        return;
    }
    unit->passed_over = e->sequence;
    if (!evicted->storage_error)
        neap_log(NEAP_LOG_WARN, "unit %u stays: %s", unit->id, neap_strerror(err));
}

typedef struct outcome {
    neap_unit *unit;
    neap_evicted evicted;
    int err;
} outcome;

/* Of one unit, or of those that klt codes together; their number. */
static size_t run_step(const eviction *e, const neap_step *step, neap_worker *worker,
                       outcome ret_outcomes[NEAP_KLT_LAYERS]) {
    neap_pool *pool = e->engine->pool;
    neap_unit *units[NEAP_KLT_LAYERS] = {neap_pool_unit(pool, step->id)};
    const size_t n = step->together ? neap_pool_code_together(pool, units[0], worker, units) : 1;
    for (size_t i = 0; i < n; i++) {
        outcome *o = &ret_outcomes[i];
        o->unit = units[i];
        o->err = neap_pool_evict(pool, units[i], step->action, worker, &o->evicted);
        if (o->err || step->action == NEAP_ACTION_MEMORY_TO_STORAGE) continue;
        pthread_mutex_lock(&pool->lock);
        units[i]->by_pressure = e->request->by_pressure && !neap_unit_is_coded(units[i]);
        pthread_mutex_unlock(&pool->lock);
    }
    return n;
}

/* Each thread of the crew runs this. */
static void run_steps(void *ctx) {
    eviction *e = ctx;
    neap_worker worker = {0};
    neap_step step;
    uint64_t expected;
    outcome outcomes[NEAP_KLT_LAYERS];
    pthread_mutex_lock(&e->lock);
    while (begin_step(e, &step, &expected)) {
        pthread_mutex_unlock(&e->lock);
        const size_t n = run_step(e, &step, &worker, outcomes);
        pthread_mutex_lock(&e->lock);
        e->pending -= most_release(e, &step);
        e->ended += expected;
        e->n_running--;
        for (size_t i = 0; i < n; i++)
            end_step(e, outcomes[i].unit, &outcomes[i].evicted, outcomes[i].err);
    }
    pthread_mutex_unlock(&e->lock);
    neap_worker_fini(&worker);
}

/* Most bytes of weights and KV that may go. */
static uint64_t spare_bytes(neap_engine *engine) {
    pthread_mutex_lock(&engine->pool->lock);
    const neap_totals t = neap_totals_get(engine);
    pthread_mutex_unlock(&engine->pool->lock);
    const uint64_t held = t.weights_resident + t.kv_resident + t.kv_memory;
    return held > engine->keep_bytes ? held - engine->keep_bytes : 0;
}

static void run_plan(eviction *e, size_t n_steps) {
    neap_pool *pool = e->engine->pool;
    uint32_t n_of_turn[N_TURNS] = {0};
    uint64_t to_stack = 0;
    for (size_t i = 0; i < n_steps; i++) {
        const neap_step *step = &e->room.steps[i];
        n_of_turn[turn_of(step->action)]++;
        const neap_unit *unit = neap_pool_unit(pool, step->id);
        if (step->action == NEAP_ACTION_TO_MEMORY && !neap_kv_fits_in_place(unit))
            to_stack += expected_encoded(e, neap_unit_size(unit).evictable);
    }
    neap_stack_expect(pool->stack, to_stack);
    e->n_steps = n_steps;
    e->ended = e->given = 0;
    e->released_before = released(e);
    for (e->turn = 0; e->turn < N_TURNS; e->turn++) {
        e->next = e->before = 0;
        if (n_of_turn[e->turn] > 0)
            neap_crew_run(e->engine->crew, n_of_turn[e->turn], run_steps, e);
        if (e->turn == TURN_COPY) neap_stack_expect(pool->stack, 0);
    }
}

static void evict_units(eviction *e) {
    do {
        e->progress = false;
        if (e->out_of_memory || released(e) >= e->target) return;
        run_plan(e, make_plan(e, e->target - released(e)));
        if (e->progress) {
            pthread_mutex_lock(&e->engine->pool->lock);
            e->engine->stage = e->stage;
            pthread_mutex_unlock(&e->engine->pool->lock);
        }
    } while (e->progress);
}

/* What is evictable when all is resident. */
static uint64_t evictable_bytes(neap_engine *engine, int only) {
    pthread_mutex_lock(&engine->pool->lock);
    const neap_totals t = neap_totals_get(engine);
    const uint64_t scratch = only == NEAP_ONLY_ALL ? neap_scratch_held_bytes(engine) : 0;
    pthread_mutex_unlock(&engine->pool->lock);
    return scratch + (only == NEAP_ONLY_KV ? 0 : t.weights_evictable) +
           (only == NEAP_ONLY_WEIGHTS ? 0 : t.kv_evictable);
}

/* Who evicts on purpose wants all that is out then to stay out. */
static void stays_out(neap_unit *unit, void *ctx) {
    (void)ctx;
    unit->by_pressure = false;
}

static void evict_alone(eviction *e) {
    neap_engine *engine = e->engine;
    neap_pool *pool = engine->pool;
    const neap_evict_request *request = e->request;
    pthread_mutex_lock(&pool->lock);
    neap_pipeline_quiesce(engine->pipeline);
    e->sequence = ++pool->released_seq;
    if (!request->by_pressure) neap_pool_each(pool, stays_out, NULL);
    room_take(e);
    const uint64_t fits_before = neap_pool_guest_bytes(pool, NULL);
    pthread_mutex_unlock(&pool->lock);

    /* Whoever is short of memory does not wait for a fit. */
    if (!request->by_pressure && request->only != NEAP_ONLY_WEIGHTS) neap_lowram_prepare(engine);
    const uint64_t all = evictable_bytes(engine, request->only);
    uint64_t target = request->bytes;
    if (request->permille > 0) target = (uint64_t)((__uint128_t)all * request->permille / 1000);
    e->result.asked_bytes = target == UINT64_MAX ? all : target;
    e->copies_before = stack_committed(e) + fits_before;
    pthread_mutex_lock(&pool->lock);
    e->fit_bytes = neap_pool_guest_bytes(pool, NULL);
    if (request->only == NEAP_ONLY_ALL) e->result.scratch_bytes = neap_scratch_release(engine);
    pthread_mutex_unlock(&pool->lock);
    e->spare = engine->keep_bytes > 0 ? spare_bytes(engine) : UINT64_MAX / 2;
    e->target = target;
    evict_units(e);
    e->result.released_bytes = released(e);
    e->result.exhausted = e->result.released_bytes < target;
}

int neap_evict_unseen(neap_engine *engine, const neap_evict_request *request,
                      neap_evict_result *ret_result) {
    if (request->bytes == 0 && request->permille == 0) return -EINVAL;
    if (request->only < NEAP_ONLY_ALL || request->only > NEAP_ONLY_KV) return -EINVAL;
    const uint64_t began_ns = neap_clock_ns();
    eviction e = {.engine = engine, .request = request, .lock = PTHREAD_MUTEX_INITIALIZER};
    neap_alone_begin(engine, true);
    evict_alone(&e);
    pthread_mutex_lock(&engine->pool->lock);
    room_give(&e);
    engine->evictions += e.result.released_bytes > 0;
    if (e.result.storage_error) {
        engine->pool->counters.errors++;
        snprintf(engine->pool->last_error, sizeof engine->pool->last_error,
                 "the swap file took no more: %s", neap_strerror(e.result.storage_error));
    }
    engine->bytes_evicted += e.evicted + e.result.scratch_bytes;
#ifdef NEAP_FAULTS
    neap_pool_check(engine->pool, false);
#endif
    pthread_mutex_unlock(&engine->pool->lock);
    neap_alone_end(engine);
    pthread_mutex_destroy(&e.lock);
    e.result.duration_ns = neap_clock_ns() - began_ns;
    if (e.out_of_memory && e.result.released_bytes == 0) return -ENOMEM;
    *ret_result = e.result;
    return 0;
}

int neap_evict(neap_engine *engine, const neap_evict_request *request,
               neap_evict_result *ret_result) {
    const int err = neap_evict_unseen(engine, request, ret_result);
    if (!err && request->by_pressure) neap_watcher_wake(engine);
    return err;
}
