/* What a graph waits for comes first, on either restore path. */
#include <errno.h>

#include "core_int.h"
#include "fault.h"
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

/* Who has to wait restores what is first in the memory queue. */
static void test_help(void) {
    rig r;
    rig_make(&r, (neap_options){.codec = "q8", .policy = "memory-only", .poison = true}, false);
    rig_random random = {4711};
    neap_use_begin(r.engine, NEAP_USE_COMPUTE);
    CHECK(rig_write(&r, &r.caches[0], &random, 0, 0, RIG_CELLS, true) == 0);
    neap_use_end(r.engine, NEAP_USE_COMPUTE);
    const neap_evict_request half = {.permille = 400, .only = NEAP_ONLY_KV};
    neap_evict_result result;
    CHECK(neap_evict(r.engine, &half, &result) == 0);
    rig_note_evicted(&r);
    neap_pipeline *pipeline = r.engine->pipeline;
    neap_unit *units[2];
    pthread_mutex_lock(&r.engine->pool->lock);
    CHECK(!neap_pipeline_help(pipeline) && neap_pipeline_start(pipeline));
    for (uint32_t i = 0; i < 2; i++) {
        units[i] =
            neap_pool_unit(r.engine->pool, neap_kv_unit(r.caches[0].kv, 0, RIG_CHUNKS - 2 + i));
        CHECK(neap_unit_path(units[i]) == NEAP_PATH_MEMORY);
        neap_pipeline_push(pipeline, units[i], false);
    }
    CHECK(neap_pipeline_help(pipeline)); /* the queue's thread has not had the lock */
    CHECK(neap_unit_state_of(units[0]) == NEAP_UNIT_RESIDENT);
    neap_fault_arm("vm.populate", 1, -ENOMEM, 1);
    const bool helped = neap_pipeline_help(pipeline); /* the thread may have been faster */
    CHECK(!helped || units[1]->last_error == -ENOMEM);
    neap_fault_disarm();
    neap_pipeline_quiesce(pipeline);
    CHECK(!neap_pipeline_help(pipeline));
    pthread_mutex_unlock(&r.engine->pool->lock);
    rig_check_all(&r);
    rig_free(&r);
}

int main(void) {
    test_front_comes_first("memory-only", NEAP_PATH_MEMORY);
    test_front_comes_first("storage-only", NEAP_PATH_STORAGE);
    neap_vm_set_prefers_huge(false); /* one at a time */
    test_help();
    return 0;
}
