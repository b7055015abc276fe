/* test_evicted_before_start.c - a model that is evicted between the arrival of a request and the
 * start of its first graph answers that request all the same; so does one whose evictions and
 * restorations race with requests: neither waits for the other for ever. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

#include "clock.h"
#include "core_int.h"
#include "rig.h"

enum { N_REQUESTS = 60 };

static atomic_bool ended;

static void *evict_again_and_again(void *ctx) {
    rig *r = ctx;
    for (uint32_t i = 0; !atomic_load(&ended); i++) {
        const neap_evict_request request = {.permille = 1000, .by_pressure = i % 2 == 0};
        neap_evict_result result;
        CHECK(neap_evict(r->engine, &request, &result) == 0);
    }
    return NULL;
}

/* What pressure took comes back ahead of need, also while it is evicted again. */
static void *bring_back_again_and_again(void *ctx) {
    rig *r = ctx;
    while (!atomic_load(&ended)) {
        uint64_t bytes = 0;
        const int err = neap_restore_owed(r->engine, UINT64_MAX, UINT64_MAX, &bytes);
        CHECK(err == 0 || err == -ECANCELED);
    }
    return NULL;
}

static void request(rig *r, bool evicts) {
    neap_request_begin(r->engine, neap_clock_ns());
    if (evicts) CHECK(rig_evict_all(r) > 0);
    rig_check_all(r);
    neap_request_first_token(r->engine);
}

static void one_at_a_time(rig *r) {
    neap_stat stat;
    rig_check_all(r);
    request(r, true);
    neap_stat_get(r->engine, &stat);
    CHECK(stat.ttft_ns > 0 && stat.restore_ns > 0 && stat.restore_ns <= stat.ttft_ns);
    CHECK(stat.units_weights_evicted == 0 && stat.errors == 0);
}

static void racing(rig *r) {
    pthread_t evictor, restorer;
    neap_stat stat;
    CHECK(pthread_create(&evictor, NULL, evict_again_and_again, r) == 0);
    CHECK(pthread_create(&restorer, NULL, bring_back_again_and_again, r) == 0);
    for (int i = 0; i < N_REQUESTS; i++)
        request(r, false);
    atomic_store(&ended, true);
    pthread_join(evictor, NULL);
    pthread_join(restorer, NULL);
    neap_stat_get(r->engine, &stat);
    CHECK(stat.evictions > 1 && stat.errors == 0 && stat.lost == 0);
    rig_check_all(r);
    neap_check(r->engine);
}

int main(void) {
    rig r;
    rig_random random = {99};
    rig_make(&r, (neap_options){.codec = "none", .poison = true}, false);
    neap_use_begin(r.engine, NEAP_USE_ACCESS);
    for (int i = 0; i < RIG_CACHES; i++)
        CHECK(rig_write(&r, &r.caches[i], &random, 1, 0, 700, true) == 0);
    neap_use_end(r.engine, NEAP_USE_ACCESS);
    one_at_a_time(&r);
    racing(&r);
    rig_free(&r);
    return 0;
}
