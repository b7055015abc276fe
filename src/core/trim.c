/* trim.c - what could be released now, and neap_trim(). */
#include <errno.h>

#include "core_int.h"
#include "decide.h"

typedef struct shares {
    uint64_t all, here; /* evictable when all is resident; of that, what still can go */
} shares;

static shares shares_of(neap_engine *engine) {
    pthread_mutex_lock(&engine->pool->lock);
    const neap_totals t = neap_totals_get(engine);
    const uint64_t scratch = neap_scratch_held_bytes(engine);
    pthread_mutex_unlock(&engine->pool->lock);
    const uint64_t fixed = t.weights - t.weights_evictable + t.kv - t.kv_evictable;
    const uint64_t held = t.weights_resident + t.kv_resident;
    const uint64_t units = (held > fixed ? held - fixed : 0) + t.kv_memory;
    const uint64_t total_held = held + t.kv_memory;
    const uint64_t spare = total_held > engine->keep_bytes ? total_held - engine->keep_bytes : 0;
    return (shares){.all = t.weights_evictable + t.kv_evictable + scratch,
                    .here = (units < spare ? units : spare) + scratch};
}

uint64_t neap_releasable_bytes(neap_engine *engine) {
    return shares_of(engine).here;
}

int neap_trim(neap_engine *engine, int level) {
    const int permille = neap_pressure_trim_permille(level);
    if (permille < 0) return permille;
    const shares s = shares_of(engine);
    const uint64_t stays = (uint64_t)((__uint128_t)s.all * (uint32_t)(1000 - permille) / 1000);
    if (s.here <= stays) return 0;
    neap_evict_result result;
    const neap_evict_request request = {.bytes = permille == 1000 ? UINT64_MAX : s.here - stays};
    return neap_evict(engine, &request, &result);
}
