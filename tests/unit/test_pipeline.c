/* What a graph waits for comes first, on either restore path. */
#include "core_int.h"
#include "rig.h"

static void test_front_comes_first(const char *policy, neap_path path) {
    rig r;
    rig_make(&r, (neap_options){.codec = "q8", .policy = policy, .poison = true}, false);
    rig_random random = {4711};
    neap_use_begin(r.engine, NEAP_USE_COMPUTE);
    CHECK(rig_write(&r, &r.caches[0], &random, 0, 0, RIG_CELLS, true) == 0);
    neap_use_end(r.engine, NEAP_USE_COMPUTE);
    neap_unit *units[RIG_CHUNKS];
    for (uint32_t c = 0; c < RIG_CHUNKS; c++) {
        const neap_evict_request one = {.bytes = 1, .only = NEAP_ONLY_KV};
        neap_evict_result result;
        CHECK(neap_evict(r.engine, &one, &result) == 0);
        units[c] = neap_pool_unit(r.engine->pool, neap_kv_unit(r.caches[0].kv, 0, c));
    }
    rig_note_evicted(&r);

    const uint32_t last = RIG_CHUNKS - 1;
    pthread_mutex_lock(&r.engine->pool->lock);
    CHECK(neap_pipeline_start(r.engine->pipeline));
    for (uint32_t c = 0; c < RIG_CHUNKS; c++) {
        CHECK(neap_unit_state_of(units[c]) == NEAP_UNIT_EVICTED &&
              neap_unit_path(units[c]) == path);
        neap_pipeline_push(r.engine->pipeline, units[c], false);
    }
    neap_pipeline_push(r.engine->pipeline, units[last], true);
    CHECK(neap_pipeline_queued(r.engine->pipeline) == RIG_CHUNKS);
    while (r.engine->pool->n_restoring + neap_pipeline_queued(r.engine->pipeline) > 0) {
        pthread_cond_wait(&r.engine->pool->changed, &r.engine->pool->lock);
        for (uint32_t c = 0; c < last; c++)
            CHECK(units[c]->queued || !units[last]->queued);
    }
    pthread_mutex_unlock(&r.engine->pool->lock);
    rig_check_all(&r);
    rig_free(&r);
}

int main(void) {
    test_front_comes_first("memory-only", NEAP_PATH_MEMORY);
    test_front_comes_first("storage-only", NEAP_PATH_STORAGE);
    return 0;
}
