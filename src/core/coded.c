/* coded.c - KV held as klt, or a fit of LowRAM, coded it (option kv): what becomes due is coded,
 * and read again.
 *
 * A coded chunk is an evicted one whose record stays in memory. Coding it is a small eviction of
 * its own, between two uses, by all threads of the crew; so the cells of a long prompt are f16 for
 * about one batch. */
#include <errno.h>
#include <stdlib.h>

#include "core_int.h"
#include "err.h"
#include "lowram_use.h"

bool neap_kv_is_held_coded(const neap_kv *kv) {
    if (!kv->pool->holds_coded) return false; /* constant: graphs ask it for every layer */
    pthread_mutex_lock(&kv->pool->lock);
    const bool fits = neap_klt_fits(kv);
    pthread_mutex_unlock(&kv->pool->lock);
    return fits;
}

bool neap_kv_may_be_held_coded(const neap_kv *kv) {
    if (!kv->pool->fits_contexts) return neap_kv_is_held_coded(kv);
    pthread_mutex_lock(&kv->pool->lock);
    const bool is_known = neap_lowram_knows(kv);
    pthread_mutex_unlock(&kv->pool->lock);
    return is_known;
}

/* NULL: no such chunk. */
static neap_unit *unit_of(const neap_kv *kv, uint32_t stream, uint32_t chunk) {
    const neap_unit_id id = neap_kv_unit(kv, stream, chunk);
    return id == NEAP_UNIT_NONE ? NULL : neap_pool_unit(kv->pool, id);
}

bool neap_kv_is_coded(const neap_kv *kv, uint32_t stream, uint32_t chunk) {
    const neap_unit *unit = unit_of(kv, stream, chunk);
    if (!unit || neap_unit_state_of(unit) != NEAP_UNIT_EVICTED) return false;
    pthread_mutex_lock(&kv->pool->lock);
    const bool coded = neap_unit_is_coded(unit);
    pthread_mutex_unlock(&kv->pool->lock);
    return coded;
}

/* ---- reading ---- */

size_t neap_kv_read_scratch(const neap_kv *kv) {
    return neap_kv_is_held_coded(kv) ? neap_klt_scratch_bytes(kv->klt.model) : 0;
}

/* Until the record is in memory. [L] */
static int fetch(neap_pool *pool, neap_unit *unit) {
    for (;;) {
        while (unit->queued || neap_unit_state_of(unit) == NEAP_UNIT_RESTORING)
            pthread_cond_wait(&pool->changed, &pool->lock);
        if (neap_unit_state_of(unit) == NEAP_UNIT_LOST) return NEAP_E_LOST;
        if (!neap_unit_is_coded(unit)) return -EAGAIN;
        if (unit->klt->held) return 0;
        const int err = neap_pool_fetch(pool, unit);
        if (err) return err;
    }
}

int neap_kv_fetch(neap_kv *kv, uint32_t stream, uint32_t chunk) {
    neap_unit *unit = unit_of(kv, stream, chunk);
    if (!unit) return NEAP_E_BOUND;
    pthread_mutex_lock(&kv->pool->lock);
    const int err = fetch(kv->pool, unit);
    pthread_mutex_unlock(&kv->pool->lock);
    return err;
}

int neap_kv_read(neap_kv *kv, uint32_t stream, uint32_t chunk, uint32_t first, uint32_t n,
                 void *const rows[2], void *scratch) {
    const neap_klt_part part = {.first_row = first, .n_rows = n};
    const int err = neap_kv_fetch(kv, stream, chunk);
    return err ? err : neap_klt_read_unit(unit_of(kv, stream, chunk), &part, rows, scratch);
}

int neap_kv_read_head(neap_kv *kv, uint32_t stream, uint32_t chunk, uint32_t first, uint32_t n,
                      uint32_t head, void *const rows[2], void *scratch) {
    const neap_klt_part part = {
        .first_row = first, .n_rows = n, .first_head = head, .n_heads = 1, .is_checked = true};
    const int err = neap_kv_fetch(kv, stream, chunk);
    return err ? err : neap_klt_read_unit(unit_of(kv, stream, chunk), &part, rows, scratch);
}

uint64_t neap_kv_stamp(const neap_kv *kv, uint32_t stream, uint32_t chunk) {
    const neap_unit *unit = unit_of(kv, stream, chunk);
    if (!unit || kv->whole_streams) return 0;
    pthread_mutex_lock(&kv->pool->lock);
    const neap_unit_state state = neap_unit_state_of(unit);
    const bool whole = unit->used == NEAP_CHUNK_CELLS && state != NEAP_UNIT_LOST;
    const uint64_t stamp = whole ? unit->written_at : 0;
    pthread_mutex_unlock(&kv->pool->lock);
    return stamp;
}

void neap_kv_set_overhead(neap_kv *kv, uint64_t bytes) {
    pthread_mutex_lock(&kv->pool->lock);
    kv->overhead_bytes = bytes;
    pthread_mutex_unlock(&kv->pool->lock);
}

/* ---- coding ---- */

typedef struct holding {
    neap_engine *engine;
    neap_unit **units;
    size_t n;
    atomic_size_t next;
    atomic_size_t n_refused;
} holding;

/* Each thread of the crew runs this. */
static void hold_some(void *ctx) {
    holding *h = ctx;
    neap_worker worker = {0};
    for (size_t i; (i = atomic_fetch_add(&h->next, 1)) < h->n;) {
        const int err = neap_pool_hold(h->engine->pool, h->units[i], &worker);
        if (err == NEAP_E_BOUND)
            atomic_fetch_add(&h->n_refused, 1);
        else if (err)
            neap_log(NEAP_LOG_WARN, "kv %s: unit %u stays f16 for now: %s",
                     neap_codec_learned(h->engine), h->units[i]->id, neap_strerror(err));
    }
    neap_worker_fini(&worker);
}

void neap_settle(neap_engine *engine, bool computed) {
    neap_pool *pool = engine->pool;
    if (!pool->holds_coded) return;
    const bool drop = atomic_exchange(&pool->drop_due, false);
    bool code = computed && atomic_exchange(&pool->code_due, false);
    const bool looks = computed && engine->lowram && (code || atomic_load(&engine->awaits_fit));
    if (!drop && !code && !looks) return;
    holding h = {.engine = engine};
    neap_alone_begin(engine, false);
    if (looks && neap_lowram_follow(engine)) code = true;
    pthread_mutex_lock(&pool->lock);
    h.units = malloc(pool->n_slots * sizeof *h.units);
    if (h.units)
        h.n = neap_pool_to_hold(pool, code ? NEAP_KV_EXACT_CELLS : UINT32_MAX, h.units,
                                pool->n_slots);
    pthread_mutex_unlock(&pool->lock);
    if (h.n > 0) neap_crew_run(engine->crew, (uint32_t)h.n, hold_some, &h);
    neap_alone_end(engine);
    free(h.units);
    if (h.n_refused > 0 && !atomic_exchange(&engine->refusal_said, true))
        neap_log(NEAP_LOG_WARN,
                 "kv %s: some chunks are too unlike what %s and stay f16 (neap stat: klt_left)",
                 neap_codec_learned(engine),
                 engine->wants_lowram ? "the fit was made from" : "klt learned from");
}
