/* units.c - registering weights and KV caches, and writing cells. */
#include <errno.h>
#include <stdlib.h>

#include "core_int.h"

/* ---- weights ---- */

int neap_weights_add(neap_engine *engine, int layer, const neap_weight_extent *extents, size_t n,
                     neap_unit_id *ret_unit) {
    if (n == 0) return -EINVAL;
    int err = 0;
    pthread_mutex_lock(&engine->pool->lock);
    for (size_t i = 0; i < n && !err; i++)
        if (!neap_region_of(engine, extents[i].addr, extents[i].len_bytes)) err = NEAP_E_BOUND;
    pthread_mutex_unlock(&engine->pool->lock);
    if (!err) err = neap_pool_add_weights(engine->pool, layer, extents, n, ret_unit);
    if (!err) neap_plan_reserve(engine);
    return err;
}

/* ---- KV caches ---- */

static int check_layout(const neap_engine *engine, const neap_kv_layout *layout,
                        const neap_region **ret_region) {
    if (layout->n_planes < 1 || layout->n_planes > 2 || !layout->n_cells || !layout->n_streams)
        return -EINVAL;
    const neap_region *region = NULL;
    for (size_t i = 0; i < layout->n_planes; i++) {
        const neap_kv_plane *plane = &layout->planes[i];
        size_t bytes;
        if (plane->row_bytes == 0 || plane->row_elems == 0) return -EINVAL;
        if (plane->transposed && plane->row_bytes % plane->row_elems != 0) return -EINVAL;
        if (__builtin_mul_overflow((size_t)layout->n_cells * layout->n_streams, plane->row_bytes,
                                   &bytes))
            return NEAP_E_BOUND;
        const neap_region *of = neap_region_of(engine, plane->base, bytes);
        if (!of || of->kind != NEAP_REGION_KV || (region && of != region)) return NEAP_E_BOUND;
        region = of;
    }
    *ret_region = region;
    return 0;
}

/* The pool knows its caches by the engine's region; a cache finds its engine through it. */
static neap_engine *engine_of(const neap_kv *kv) {
    return ((const neap_region *)kv->region)->engine;
}

int neap_kv_add(neap_engine *engine, const neap_kv_layout *layout, neap_kv **ret_kv) {
    const neap_region *region;
    pthread_mutex_lock(&engine->pool->lock);
    int err = check_layout(engine, layout, &region);
    pthread_mutex_unlock(&engine->pool->lock);
    if (!err) err = neap_pool_add_kv(engine->pool, region, layout, ret_kv);
    if (!err) neap_plan_reserve(engine);
    return err;
}

int neap_kv_relayout(neap_kv *kv, const neap_kv_layout *layout) {
    neap_engine *engine = engine_of(kv);
    const neap_region *region;
    pthread_mutex_lock(&engine->pool->lock);
    int err = check_layout(engine, layout, &region);
    if (!err && region != kv->region) err = NEAP_E_BOUND;
    pthread_mutex_unlock(&engine->pool->lock);
    return err ? err : neap_pool_relayout(kv, layout);
}

neap_unit_id neap_kv_unit(const neap_kv *kv, uint32_t stream, uint32_t chunk) {
    if (stream >= kv->layout.n_streams || chunk >= kv->n_chunks) return NEAP_UNIT_NONE;
    return kv->whole_streams ? kv->units[stream] : kv->units[stream * kv->n_chunks + chunk];
}

uint32_t neap_kv_n_chunks(const neap_kv *kv) {
    return kv->n_chunks;
}

uint32_t neap_kv_used(const neap_kv *kv, uint32_t stream) {
    if (stream >= kv->layout.n_streams) return 0;
    pthread_mutex_lock(&kv->pool->lock);
    const uint32_t used = neap_pool_kv_used(kv, stream);
    pthread_mutex_unlock(&kv->pool->lock);
    return used;
}

/* ---- writing ---- */

/* Cells [first, first + n) counted from the unit's first one. */
static int write_unit(neap_engine *engine, neap_unit *unit, uint32_t first, uint32_t n,
                      bool whole) {
    for (;;) {
        const neap_unit_state state = neap_unit_state_of(unit);
        if (engine->pool->reading) { /* by the idle thread, for a moment */
            pthread_cond_wait(&engine->pool->changed, &engine->pool->lock);
            continue;
        }
        const bool covers = whole && first == 0 && n >= unit->used;
        const bool away = state == NEAP_UNIT_EVICTED || state == NEAP_UNIT_LOST;
        if (state == NEAP_UNIT_EMPTY || state == NEAP_UNIT_RESIDENT || (away && covers)) {
            neap_pipeline_remove(engine->pipeline, unit);
            unit->kv->written[unit->stream] += n;
            return neap_pool_dirty(engine->pool, unit, first + n, away);
        }
        /* A failed restore does not matter to a unit that is to be overwritten. */
        const int err = neap_unit_wait(engine, unit);
        if (err && !(covers && neap_unit_state_of(unit) != NEAP_UNIT_RESTORING)) return err;
    }
}

int neap_kv_write(neap_kv *kv, uint32_t stream, uint32_t first, uint32_t n, bool whole) {
    const uint32_t n_cells = kv->layout.n_cells;
    if (stream >= kv->layout.n_streams || first > n_cells || n > n_cells - first)
        return NEAP_E_BOUND;
    if (n == 0) return 0;
    neap_engine *engine = engine_of(kv);
    int err = 0;
    pthread_mutex_lock(&kv->pool->lock);
    while (n > 0 && !err) {
        const uint32_t chunk = kv->whole_streams ? 0 : first / NEAP_CHUNK_CELLS;
        const uint32_t at = first - chunk * NEAP_CHUNK_CELLS;
        const uint32_t room = kv->whole_streams ? n_cells - at : NEAP_CHUNK_CELLS - at;
        const uint32_t len = n < room ? n : room;
        neap_unit *unit = neap_pool_unit(kv->pool, neap_kv_unit(kv, stream, chunk));
        err = write_unit(engine, unit, at, len, whole);
        first += len;
        n -= len;
    }
    pthread_mutex_unlock(&kv->pool->lock);
    return err;
}

int neap_kv_forget(neap_kv *kv, uint32_t stream, uint32_t chunk) {
    const neap_unit_id id = neap_kv_unit(kv, stream, chunk);
    if (id == NEAP_UNIT_NONE) return NEAP_E_BOUND;
    pthread_mutex_lock(&kv->pool->lock);
    const int err = neap_pool_forget(kv->pool, neap_pool_unit(kv->pool, id));
    pthread_mutex_unlock(&kv->pool->lock);
    return err;
}

int neap_kv_clear(neap_kv *kv) {
    neap_engine *engine = engine_of(kv);
    neap_alone_begin(engine, false);
    pthread_mutex_lock(&kv->pool->lock);
    neap_pipeline_quiesce(engine->pipeline);
    const int err = neap_pool_clear(kv);
    pthread_mutex_unlock(&kv->pool->lock);
    neap_alone_end(engine);
    return err;
}
