/* Requests, evictions, restores, write-behind, counters and coming and going regions from several
 * threads at once: every byte a request reads must be right. Made for the thread sanitizer; the
 * sizes are small so that it ends in time there too. */
#include <errno.h>
#include <pthread.h>

#include "clock.h"
#include "rig.h"

enum { N_REQUESTS = 150, N_EVICTIONS = 150, N_OTHERS = 60 };

typedef struct actor {
    rig *r;
    uint64_t seed;
    uint32_t stream; /* of a requester: its own */
} actor;

/* Whether an eviction by another thread has rounded a chunk is not known: it may have. */
static void note_rounded(rig *r, uint32_t stream) {
    for (int k = 0; k < RIG_CACHES; k++)
        for (uint32_t c = 0; c < RIG_CHUNKS; c++)
            r->caches[k].marks[stream][c] = RIG_ROUNDED;
}

/* A conversation on a stream of its own: needs everything, checks what it reads, writes on. */
static void *request_main(void *ctx) {
    const actor *self = ctx;
    rig *r = self->r;
    rig_random random = {self->seed};
    for (int i = 0; i < N_REQUESTS; i++) {
        neap_unit_id units[RIG_WEIGHTS + RIG_CACHES * RIG_CHUNKS];
        size_t n = 0;
        for (int w = 0; w < RIG_WEIGHTS; w++)
            units[n++] = r->weights[w];
        for (int k = 0; k < RIG_CACHES; k++)
            for (uint32_t c = 0; c < RIG_CHUNKS; c++)
                units[n++] = neap_kv_unit(r->caches[k].kv, self->stream, c);
        neap_use_begin(r->engine, NEAP_USE_COMPUTE);
        note_rounded(r, self->stream);
        neap_request_begin(r->engine, 0);
        CHECK(neap_need(r->engine, units, n) == 0);
        for (int k = 0; k < RIG_CACHES; k++) {
            rig_cache *cache = &r->caches[k];
            CHECK(neap_wait(r->engine, r->weights[k]) == 0);
            CHECK(rig_weights_right(r, k));
            const uint32_t chunk = rig_below(&random, RIG_CHUNKS);
            CHECK(neap_wait(r->engine, neap_kv_unit(cache->kv, self->stream, chunk)) == 0);
            CHECK(rig_cells_right(r, cache, self->stream, chunk));
            const uint32_t first = rig_below(&random, RIG_CELLS - 60);
            const bool whole = rig_below(&random, 3) != 0;
            CHECK(rig_write(r, cache, &random, self->stream, first, 1 + rig_below(&random, 60),
                            whole) == 0);
        }
        neap_request_first_token(r->engine);
        neap_use_end(r->engine, NEAP_USE_COMPUTE);
        usleep(rig_below(&random, 500)); /* now and then nobody is at it */
    }
    return NULL;
}

static void *evict_main(void *ctx) {
    const actor *self = ctx;
    rig_random random = {self->seed};
    for (int i = 0; i < N_EVICTIONS; i++) {
        const neap_evict_request request = {.permille = 1 + rig_below(&random, 1000),
                                            .only = (int)rig_below(&random, 3)};
        neap_evict_result result;
        CHECK(neap_evict(self->r->engine, &request, &result) == 0);
        CHECK(result.storage_error == 0);
        usleep(rig_below(&random, 3000));
    }
    return NULL;
}

static void *restore_main(void *ctx) {
    const actor *self = ctx;
    rig_random random = {self->seed};
    for (int i = 0; i < N_OTHERS; i++) {
        uint64_t bytes;
        const int err = neap_restore(self->r->engine, &bytes);
        CHECK(err == 0 || err == -ECANCELED); /* an eviction came in between */
        usleep(rig_below(&random, 5000));
    }
    return NULL;
}

static void *watch_main(void *ctx) {
    const actor *self = ctx;
    for (int i = 0; i < N_OTHERS; i++) {
        neap_stat stat;
        neap_stat_get(self->r->engine, &stat);
        CHECK(stat.lost == 0 && stat.errors == 0);
        usleep(4000);
    }
    return NULL;
}

/* Contexts that come and go beside the others. */
static void *region_main(void *ctx) {
    const actor *self = ctx;
    rig_random random = {self->seed};
    for (int i = 0; i < N_OTHERS; i++) {
        neap_region *region;
        neap_kv *kv;
        CHECK(neap_region_create(self->r->engine, 512 * 256, NEAP_REGION_KV, &region) == 0);
        const neap_kv_layout layout = {
            .layer = 1,
            .n_cells = 512,
            .n_streams = 1,
            .n_planes = 1,
            .planes = {{neap_region_base(region), 256, 128, NEAP_KV_F16, false}}};
        CHECK(neap_kv_add(self->r->engine, &layout, &kv) == 0);
        neap_use_begin(self->r->engine, NEAP_USE_ACCESS);
        CHECK(neap_kv_write(kv, 0, 0, 300, true) == 0);
        memset(neap_region_base(region), 1 + i % 100, 300 * 256);
        neap_use_end(self->r->engine, NEAP_USE_ACCESS);
        usleep(rig_below(&random, 4000));
        neap_use_begin(self->r->engine, NEAP_USE_ACCESS);
        CHECK(neap_wait(self->r->engine, neap_kv_unit(kv, 0, 1)) == 0);
        CHECK(((char *)neap_region_base(region))[299 * 256 + 255] == 1 + i % 100);
        neap_use_end(self->r->engine, NEAP_USE_ACCESS);
        if (rig_below(&random, 2)) CHECK(neap_kv_clear(kv) == 0);
        neap_region_free(region);
    }
    return NULL;
}

static void run(uint64_t seed, const char *codec, const char *policy, bool write_behind) {
    rig r;
    const neap_options options = {.codec = codec,
                                  .policy = policy,
                                  .poison = true,
                                  .write_behind_bytes = write_behind ? (uint64_t)1 << 40 : 0,
                                  .idle_ns = 1,
                                  .write_behind_on_battery = true};
    rig_make(&r, options, true);
    void *(*const mains[])(void *) = {request_main, request_main, evict_main, evict_main,
                                      restore_main, watch_main,   region_main};
    enum { N = sizeof mains / sizeof mains[0] };
    pthread_t threads[N];
    actor actors[N];
    for (uint32_t i = 0; i < N; i++) {
        actors[i] = (actor){&r, (seed + i) | 1, i % RIG_STREAMS};
        CHECK(pthread_create(&threads[i], NULL, mains[i], &actors[i]) == 0);
    }
    for (uint32_t i = 0; i < N; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    for (uint32_t stream = 0; stream < RIG_STREAMS; stream++)
        note_rounded(&r, stream);
    rig_check_all(&r); /* brings all back */
    neap_check(r.engine);
    neap_stat stat;
    neap_stat_get(r.engine, &stat);
    /* On a busy machine its thread may not have run until now. */
    for (int i = 0; write_behind && stat.write_behind_bytes_today == 0 && i < 30000; i++) {
        usleep(1000);
        neap_stat_get(r.engine, &stat);
    }
    CHECK((stat.write_behind_bytes_today > 0) == write_behind);
    rig_free(&r);
}

int main(void) {
    const char *given = getenv("NEAP_TEST_SEED");
    const uint64_t seed = given ? strtoull(given, NULL, 10) : neap_clock_ns();
    printf("seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
    run(seed, "none", "hybrid", false);
    run(seed, "none", "partial-offload", false);
    run(seed, "none", "lru", false);
    run(seed, "none", "mz-no", false);
    run(seed, "none", "mz-rp", false);
    run(seed, "none", "hybrid", true);
    neap_vm_set_prefers_huge(false); /* then q8's copies stay in place, else on the stack */
    run(seed, "q8", "hybrid", false);
    run(seed, "q8", "memory-only", true);
    neap_vm_set_prefers_huge(true);
    run(seed, "q8", "memory-only", false);
    return 0;
}
