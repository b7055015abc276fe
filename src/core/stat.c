/* stat.c - the counters, without waiting for a use or an eviction. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core_int.h"

static neap_state state_of(neap_engine *engine) {
    pthread_mutex_lock(&engine->use_lock);
    const bool evicting = engine->evicting, computing = engine->n_computing > 0;
    pthread_mutex_unlock(&engine->use_lock);
    pthread_mutex_lock(&engine->pool->lock);
    const bool restoring =
        engine->pool->n_restoring > 0 || neap_pipeline_queued(engine->pipeline) > 0;
    pthread_mutex_unlock(&engine->pool->lock);
    return evicting    ? NEAP_STATE_EVICTING
           : computing ? NEAP_STATE_INFERENCE
           : restoring ? NEAP_STATE_RESTORING
                       : NEAP_STATE_IDLE;
}

/* Every context has one cache for a layer; layers with a sliding window have smaller ones. */
typedef struct layer_cells {
    int layer;
    uint32_t n_caches;
    uint64_t cells, used;
} layer_cells;

static void add_cache(layer_cells *layers, size_t *n, const neap_kv *kv) {
    size_t i = 0;
    while (i < *n && layers[i].layer != kv->layout.layer)
        i++;
    if (i == *n) layers[(*n)++] = (layer_cells){.layer = kv->layout.layer};
    layers[i].n_caches++;
    layers[i].cells += (uint64_t)kv->layout.n_cells * kv->layout.n_streams;
    for (uint32_t stream = 0; stream < kv->layout.n_streams; stream++)
        layers[i].used += neap_pool_kv_used(kv, stream);
}

/* [L] */
static void count_cells(const neap_pool *pool, neap_stat *stat) {
    size_t n_kvs = 0, n = 0;
    for (const neap_kv *kv = pool->kvs; kv; kv = kv->next)
        n_kvs++;
    layer_cells *layers = malloc((n_kvs + 1) * sizeof *layers);
    if (!layers) return;
    for (const neap_kv *kv = pool->kvs; kv; kv = kv->next)
        add_cache(layers, &n, kv);
    for (size_t i = 0; i < n; i++) {
        if (layers[i].n_caches > stat->n_contexts) stat->n_contexts = layers[i].n_caches;
        if (layers[i].cells > stat->n_ctx) stat->n_ctx = (uint32_t)layers[i].cells;
        if (layers[i].used > stat->tokens) stat->tokens = layers[i].used;
    }
    free(layers);
}

/* ---- by region ---- */

typedef struct region_sums {
    neap_engine *engine;
    neap_stat *stat;
    const void *regions[NEAP_STAT_CONTEXTS];
    uint64_t raw[NEAP_STAT_CONTEXTS], kept[NEAP_STAT_CONTEXTS];
    double error[NEAP_STAT_CONTEXTS];
} region_sums;

static size_t region_index(const region_sums *sums, const void *region) {
    size_t i = 0;
    while (i < sums->stat->n_context_stats && sums->regions[i] != region)
        i++;
    return i;
}

static void add_region(region_sums *sums, const neap_kv *kv) {
    neap_stat *stat = sums->stat;
    const size_t i = region_index(sums, kv->region);
    if (i == NEAP_STAT_CONTEXTS) return;
    neap_context_stat *c = &stat->contexts[i];
    if (i == stat->n_context_stats) {
        sums->regions[i] = kv->region;
        stat->n_context_stats++;
        c->fit_bytes = neap_pool_guest_bytes(kv->pool, kv->region);
        sums->kept[i] += c->fit_bytes;
        snprintf(c->kv, sizeof c->kv, "f16");
    }
    if (kv->pool->holds_coded && neap_klt_fits(kv))
        neap_codec_kv_name(sums->engine, c->kv, sizeof c->kv);
    const uint32_t n_ctx = kv->layout.n_cells * kv->layout.n_streams;
    uint64_t used = 0;
    for (uint32_t stream = 0; stream < kv->layout.n_streams; stream++)
        used += neap_pool_kv_used(kv, stream);
    sums->kept[i] += kv->overhead_bytes;
    if (n_ctx > c->n_ctx) c->n_ctx = n_ctx;
    if (used > c->tokens) c->tokens = used;
}

static void add_chunk(neap_unit *unit, void *ctx) {
    region_sums *sums = ctx;
    const size_t i = unit->is_kv ? region_index(sums, unit->kv->region) : NEAP_STAT_CONTEXTS;
    const neap_unit_state state = neap_unit_state_of(unit);
    if (i >= sums->stat->n_context_stats || state == NEAP_UNIT_EMPTY || state == NEAP_UNIT_LOST)
        return;
    neap_context_stat *c = &sums->stat->contexts[i];
    const neap_unit_bytes bytes = neap_unit_size(unit);
    const bool away = state == NEAP_UNIT_EVICTED || state == NEAP_UNIT_RESTORING;
    uint64_t len = unit->memory.len + neap_klt_held_bytes(unit);
    sums->raw[i] += neap_kv_raw_bytes(unit);
    if (len == 0) len = neap_unit_stored_bytes(unit); /* else both are the same */
    sums->kept[i] += bytes.in_use - (away ? neap_unit_gone_bytes(unit) : 0) + len;
    sums->error[i] += unit->klt ? (double)unit->klt->error : 0;
    c->klt_chunks += unit->klt != NULL;
    c->klt_left += (unit->keeps_codec || unit->klt_refused) && neap_klt_fits(unit->kv);
    c->klt_refused += unit->klt_refused && neap_klt_fits(unit->kv);
}

/* [L] */
static void count_contexts(neap_engine *engine, neap_stat *stat) {
    region_sums sums = {.engine = engine, .stat = stat};
    for (const neap_kv *kv = engine->pool->kvs; kv; kv = kv->next)
        add_region(&sums, kv);
    neap_pool_each(engine->pool, add_chunk, &sums);
    for (uint32_t i = 0; i < stat->n_context_stats; i++) {
        neap_context_stat *c = &stat->contexts[i];
        if (sums.kept[i]) c->kv_ratio = (double)sums.raw[i] / (double)sums.kept[i];
        if (c->klt_chunks) c->klt_error = sums.error[i] / c->klt_chunks;
    }
}

/* [L] */
static void count_bytes(neap_engine *engine, neap_stat *stat) {
    const neap_totals t = neap_totals_get(engine);
    stat->weights_total = t.weights;
    stat->weights_resident = t.weights_resident;
    stat->kv_total = t.kv;
    stat->kv_resident = t.kv_resident;
    stat->fit_bytes = neap_pool_guest_bytes(engine->pool, NULL);
    stat->kv_compressed_memory = t.kv_memory + stat->fit_bytes;
    for (const neap_kv *kv = engine->pool->kvs; kv; kv = kv->next)
        stat->kv_compressed_memory += kv->overhead_bytes;
    stat->kv_storage = t.kv_storage;
    stat->units_weights = t.n_weights;
    stat->units_weights_evicted = t.n_weights_evicted;
    stat->units_kv = t.n_kv;
    stat->units_kv_evicted = t.n_kv_evicted;
    stat->lost = t.n_lost;
    stat->clean_chunks = t.n_kv_clean;
    stat->pressure_owed_bytes = t.owed;
    stat->kv_ratio = t.kv_coded ? (double)t.kv_coded_from / (double)t.kv_coded : 0;
    stat->klt_error = t.n_klt ? t.klt_error / t.n_klt : 0;
    stat->klt_chunks = t.n_klt;
    stat->klt_left = t.n_klt_left;
    stat->klt_refused = t.n_klt_refused;
    const uint64_t total = t.weights + t.kv;
    const uint64_t held = t.weights_resident + t.kv_resident + t.kv_memory + stat->fit_bytes;
    stat->released = total > held ? total - held : 0;
    stat->stage = t.n_weights_evicted + t.n_kv_evicted > 0 ? engine->stage : NEAP_STAGE_NONE;
    stat->scratch_resident = neap_scratch_held_bytes(engine);
}

void neap_stat_get(neap_engine *engine, neap_stat *ret_stat) {
    neap_pool *pool = engine->pool;
    neap_stat stat = {.state = state_of(engine)};
    pthread_mutex_lock(&pool->lock);
    count_cells(pool, &stat);
    count_bytes(engine, &stat);
    count_contexts(engine, &stat);
    const neap_pool_counters *c = &pool->counters;
    stat.evictions = engine->evictions;
    stat.restores = c->restores;
    stat.bytes_evicted = engine->bytes_evicted;
    stat.bytes_restored_storage = c->bytes_restored[NEAP_PATH_STORAGE];
    stat.bytes_restored_memory = c->bytes_restored[NEAP_PATH_MEMORY];
    stat.bytes_read_storage = c->bytes_read;
    stat.bytes_committed = c->bytes_committed;
    stat.bytes_written_storage = neap_swapfile_written(pool->swapfile);
    if (engine->write_behind) neap_write_behind_stat(engine->write_behind, &stat);
    stat.wait_ns = engine->wait_ns;
    stat.errors = c->errors;
    stat.ttft_ns = engine->ttft_ns;
    stat.restore_ns = engine->restore_ns;
    stat.allocate_ns = engine->allocate_ns;
    stat.storage_ns = engine->path_ns[NEAP_PATH_STORAGE];
    stat.memory_ns = engine->path_ns[NEAP_PATH_MEMORY];
    stat.overlap = engine->overlap;
    stat.read_bps = engine->rates.read.bps;
    stat.decode_bps = engine->rates.decode.bps;
    stat.rate_source = neap_rates_source(&engine->rates);
    memcpy(stat.model, engine->model, sizeof stat.model);
    memcpy(stat.last_error, pool->last_error, sizeof stat.last_error);
    neap_codec_stat(engine, &stat);
    snprintf(stat.attention, sizeof stat.attention, "%s",
             engine->attention ? engine->attention : "");
    stat.attentions = engine->attentions;
    stat.attentions_host = engine->attentions_host;
    snprintf(stat.policy, sizeof stat.policy, "%s", engine->policy->name);
    stat.pressure = engine->pressure.level;
    stat.pressure_looks = engine->pressure.looks;
    stat.pressure_releases = engine->pressure.releases;
    stat.pressure_released_bytes = engine->pressure.released_bytes;
    stat.pressure_restored_bytes = engine->pressure.restored_bytes;
    memcpy(stat.pressure_sources, engine->pressure.sources, sizeof stat.pressure_sources);
    pthread_mutex_unlock(&pool->lock);
    *ret_stat = stat;
}

void neap_attention_count(neap_engine *engine, const char *kernel, uint64_t n_ours,
                          uint64_t n_host) {
    if (n_ours == 0 && n_host == 0) return;
    pthread_mutex_lock(&engine->pool->lock);
    if (n_ours > 0) engine->attention = kernel;
    engine->attentions += n_ours;
    engine->attentions_host += n_host;
    pthread_mutex_unlock(&engine->pool->lock);
}
