/* Random writes, evictions, restores, clears and waits on one engine against a shadow copy of every
 * byte; evicted ranges are inaccessible. The seed is printed; NEAP_TEST_SEED repeats a run. */
#include "clock.h"
#include "policy.h"
#include "rig.h"

enum { N_STEPS = 1500 };

static void step_write(rig *r, rig_random *random) {
    rig_cache *cache = &r->caches[rig_below(random, RIG_CACHES)];
    const uint32_t stream = rig_below(random, RIG_STREAMS);
    uint32_t first, n;
    if (rig_below(random, 3) == 0) { /* whole chunks */
        first = NEAP_CHUNK_CELLS * rig_below(random, RIG_CHUNKS);
        n = NEAP_CHUNK_CELLS * (1 + rig_below(random, 2));
    } else { /* where a conversation goes on, or anywhere before */
        first = rig_below(random, 4) ? cache->used[stream] : rig_below(random, RIG_CELLS);
        n = 1 + rig_below(random, 40);
    }
    if (first >= RIG_CELLS) first = 0;
    if (n > RIG_CELLS - first) n = RIG_CELLS - first;
    neap_use_begin(r->engine, NEAP_USE_COMPUTE);
    CHECK(rig_write(r, cache, random, stream, first, n, rig_below(random, 4) != 0) == 0);
    CHECK(neap_kv_used(cache->kv, stream) == cache->used[stream]);
    neap_use_end(r->engine, NEAP_USE_COMPUTE);
}

static void step_evict(rig *r, rig_random *random) {
    neap_evict_request request = {.only = (int)rig_below(random, 3),
                                  .by_pressure = rig_below(random, 2)};
    const uint32_t kind = rig_below(random, 3);
    if (kind == 0) request.bytes = 1 + rig_below(random, 4 << 20);
    if (kind == 1) request.permille = 1 + rig_below(random, 1000);
    if (kind == 2) request.bytes = UINT64_MAX;
    neap_evict_result result;
    CHECK(neap_evict(r->engine, &request, &result) == 0);
    CHECK(result.exhausted || result.released_bytes >= result.asked_bytes);
    CHECK(result.storage_error == 0);
    rig_note_evicted(r);
}

static void step_request(rig *r, rig_random *random, const neap_policy *policy) {
    neap_unit_id units[RIG_WEIGHTS + RIG_CACHES * RIG_CHUNKS];
    size_t n = 0;
    const uint32_t stream = rig_below(random, RIG_STREAMS);
    neap_use_begin(r->engine, NEAP_USE_COMPUTE);
    neap_request_begin(r->engine, 0);
    for (int i = 0; i < RIG_WEIGHTS; i++)
        if (rig_below(random, 3)) units[n++] = r->weights[i];
    for (int i = 0; i < RIG_CACHES; i++)
        for (uint32_t c = 0; c < RIG_CHUNKS; c++)
            if (rig_below(random, 3)) units[n++] = neap_kv_unit(r->caches[i].kv, stream, c);
    CHECK(neap_need(r->engine, units, n) == 0);
    for (size_t i = 0; !policy->overlap && i < n; i++)
        CHECK(neap_unit_resident(r->engine, units[i]));
    const uint32_t n_waits = rig_below(random, 12);
    for (uint32_t i = 0; i < n_waits; i++) {
        if (rig_below(random, 2)) {
            const int w = (int)rig_below(random, RIG_WEIGHTS);
            CHECK(neap_wait(r->engine, r->weights[w]) == 0);
            CHECK(rig_weights_right(r, w));
        } else {
            rig_cache *cache = &r->caches[rig_below(random, RIG_CACHES)];
            const uint32_t chunk = rig_below(random, RIG_CHUNKS);
            CHECK(neap_wait(r->engine, neap_kv_unit(cache->kv, stream, chunk)) == 0);
            CHECK(rig_cells_right(r, cache, stream, chunk));
        }
    }
    neap_request_first_token(r->engine);
    neap_use_end(r->engine, NEAP_USE_COMPUTE);
}

static void step_stat(rig *r) {
    neap_stat stat;
    const bool all_before = neap_all_resident(r->engine);
    neap_stat_get(r->engine, &stat);
    const bool all_after = neap_all_resident(r->engine);
    CHECK(stat.weights_resident <= stat.weights_total && stat.kv_resident <= stat.kv_total);
    CHECK(stat.units_weights == RIG_WEIGHTS && stat.lost == 0 && stat.errors == 0);
    CHECK(stat.overlap >= 0 && stat.overlap <= 1);
    /* What a request asked for and did not wait for still comes back beside this thread, and only
     * this thread evicts: between the three looks units return but none goes. */
    const bool all_counted = stat.units_weights_evicted + stat.units_kv_evicted == 0;
    CHECK(!all_before || all_counted);
    CHECK(!all_counted || all_after);
    if (stat.state == NEAP_STATE_IDLE) CHECK(all_counted == all_after);
}

/* write_behind: with a thread that makes chunks clean whenever nothing uses the engine. */
static void run(uint64_t seed, const char *codec, const char *policy, bool write_behind,
                int n_steps) {
    printf("seed %llu codec %s policy %s write-behind %d\n", (unsigned long long)seed, codec,
           policy, write_behind);
    fflush(stdout);
    rig r;
    rig_random random = {seed | 1};
    const neap_options options = {.codec = codec,
                                  .policy = policy,
                                  .poison = true,
                                  .write_behind_bytes = write_behind ? (uint64_t)1 << 40 : 0,
                                  .idle_ns = 1,
                                  .write_behind_on_battery = true};
    rig_make(&r, options, rig_below(&random, 2));
    for (int i = 0; i < n_steps; i++) {
        const uint32_t what = rig_below(&random, 100);
        if (what < 45)
            step_write(&r, &random);
        else if (what < 65)
            step_evict(&r, &random);
        else if (what < 88)
            step_request(&r, &random, neap_policy_find(policy));
        else if (what < 92)
            step_stat(&r);
        else if (what < 94) {
            rig_cache *cache = &r.caches[rig_below(&random, RIG_CACHES)];
            CHECK(neap_kv_clear(cache->kv) == 0);
            rig_forget_cache(cache);
        } else if (what < 96) {
            uint64_t bytes;
            CHECK(neap_restore(r.engine, &bytes) == 0);
            CHECK(neap_all_resident(r.engine));
        } else if (what < 97) {
            rig_check_all(&r);
        } else if (write_behind) { /* lets it get somewhere */
            usleep(rig_below(&random, 3000));
        }
        if (i % 50 == 0) neap_check(r.engine);
    }
    rig_check_all(&r);
    neap_check(r.engine);
    neap_stat stat;
    neap_stat_get(r.engine, &stat);
    CHECK((stat.write_behind_bytes_today > 0) == write_behind);
    rig_free(&r);
}

int main(void) {
    const char *given = getenv("NEAP_TEST_SEED");
    const uint64_t seed = given ? strtoull(given, NULL, 10) : neap_clock_ns();
    neap_vm_set_prefers_huge(false); /* then q8's copies stay in place, else on the stack */
    run(seed, "none", "hybrid", false, N_STEPS);
    run(seed + 1, "q8", "hybrid", false, N_STEPS);
    run(seed + 2, "none", "partial-offload", false, N_STEPS / 2);
    run(seed + 3, "q8", "partial-offload", false, N_STEPS / 2);
    run(seed + 4, "q8", "lru", false, N_STEPS / 2);
    run(seed + 5, "q8", "mz-no", false, N_STEPS / 2);
    run(seed + 6, "none", "mz-ar", false, N_STEPS / 2);
    run(seed + 7, "q8", "mz-rp", false, N_STEPS / 2);
    run(seed + 8, "none", "hybrid", true, N_STEPS);
    run(seed + 9, "q8", "hybrid", true, N_STEPS);
    run(seed + 10, "q8", "partial-offload", true, N_STEPS / 2);
    run(seed + 11, "q8", "memory-only", true, N_STEPS);
    neap_vm_set_prefers_huge(true);
    run(seed + 12, "q8", "hybrid", false, N_STEPS);
    return 0;
}
