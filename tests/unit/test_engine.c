/* The public API, case by case: what is released, what comes back, what is refused. */
#include <errno.h>

#include "proc.h"
#include "rig.h"

static const neap_options plain = {.codec = "none", .poison = true};

static neap_evict_result evict(rig *r, uint64_t bytes, uint32_t permille, int only) {
    const neap_evict_request request = {.bytes = bytes, .permille = permille, .only = only};
    neap_evict_result result;
    CHECK(neap_evict(r->engine, &request, &result) == 0);
    rig_note_evicted(r);
    return result;
}

static neap_stat stat_of(rig *r) {
    neap_stat stat;
    neap_stat_get(r->engine, &stat);
    return stat;
}

/* Fills the first n cells of every stream. */
static void fill(rig *r, uint32_t n) {
    rig_random random = {4711};
    neap_use_begin(r->engine, NEAP_USE_COMPUTE);
    for (int i = 0; i < RIG_CACHES; i++)
        for (uint32_t s = 0; s < RIG_STREAMS; s++)
            CHECK(rig_write(r, &r->caches[i], &random, s, 0, n, true) == 0);
    neap_use_end(r->engine, NEAP_USE_COMPUTE);
}

static void test_refusals(void) {
    neap_engine *engine = NULL;
    neap_options options = {.codec = "zip", .no_control = true};
    CHECK(neap_engine_create(&options, &engine) == NEAP_E_UNKNOWN);
    options = (neap_options){.policy = "hope", .no_control = true};
    CHECK(neap_engine_create(&options, &engine) == NEAP_E_UNKNOWN && !engine);
    neap_engine_free(NULL);
    neap_region_free(NULL);

    rig r;
    rig_make(&r, plain, false);
    neap_evict_result result = {.asked_bytes = 42};
    CHECK(neap_evict(r.engine, &(neap_evict_request){0}, &result) == -EINVAL);
    CHECK(neap_evict(r.engine, &(neap_evict_request){.bytes = 1, .only = 3}, &result) == -EINVAL);
    CHECK(result.asked_bytes == 42);
    neap_unit_id unit;
    char outside[8192];
    neap_weight_extent extent = {.addr = outside, .len_bytes = sizeof outside};
    CHECK(neap_weights_add(r.engine, 0, &extent, 1, &unit) == NEAP_E_BOUND);
    extent = (neap_weight_extent){
        neap_region_base(r.weights_region), 8192, "/no/such/file", 0, NULL, NULL};
    CHECK(neap_weights_add(r.engine, 0, &extent, 1, &unit) == -ENOENT);
    CHECK(neap_wait(r.engine, NEAP_UNIT_NONE) == NEAP_E_BOUND);
    CHECK(neap_wait(r.engine, 100000) == NEAP_E_BOUND);
    CHECK(!neap_unit_resident(r.engine, NEAP_UNIT_NONE));
    neap_kv *kv = r.caches[0].kv;
    CHECK(neap_kv_unit(kv, RIG_STREAMS, 0) == NEAP_UNIT_NONE);
    CHECK(neap_kv_unit(kv, 0, RIG_CHUNKS) == NEAP_UNIT_NONE);
    CHECK(neap_kv_n_chunks(kv) == RIG_CHUNKS);
    neap_use_begin(r.engine, NEAP_USE_ACCESS);
    CHECK(neap_kv_write(kv, 0, RIG_CELLS - 1, 2, true) == NEAP_E_BOUND);
    CHECK(neap_kv_write(kv, RIG_STREAMS, 0, 1, true) == NEAP_E_BOUND);
    CHECK(neap_kv_write(kv, 0, 5, 0, true) == 0 && neap_kv_used(kv, 0) == 0);
    CHECK(neap_kv_forget(kv, 0, 0) == -EINVAL);
    neap_use_end(r.engine, NEAP_USE_ACCESS);
    neap_kv_layout layout = r.caches[0].layout;
    layout.n_cells *= 100;
    CHECK(neap_kv_add(r.engine, &layout, &kv) == NEAP_E_BOUND);
    rig_free(&r);
}

static void test_evict_and_back(void) {
    rig r;
    rig_make(&r, plain, false);
    fill(&r, 700);
    CHECK(neap_all_resident(r.engine));
    const neap_stat before = stat_of(&r);
    CHECK(before.units_weights == RIG_WEIGHTS && before.stage == NEAP_STAGE_NONE);
    CHECK(before.tokens == RIG_STREAMS * 700 && before.n_ctx == RIG_STREAMS * RIG_CELLS);
    CHECK(before.n_contexts == 1 && before.released == 0);
    CHECK(before.weights_resident == before.weights_total && before.kv_resident == before.kv_total);

    neap_evict_result result = evict(&r, UINT64_MAX, 0, NEAP_ONLY_ALL);
    CHECK(result.exhausted && result.storage_error == 0);
    CHECK(result.weights_bytes > 0 && result.kv_storage_bytes > 0 && result.kv_memory_bytes == 0);
    neap_stat stat = stat_of(&r);
    CHECK(stat.units_weights_evicted == RIG_WEIGHTS && stat.stage != NEAP_STAGE_NONE);
    CHECK(stat.weights_resident < stat.weights_total / 10);
    CHECK(stat.kv_resident < stat.kv_total / 4);
    CHECK(result.released_bytes == stat.released);
    CHECK(!neap_all_resident(r.engine) && !neap_unit_resident(r.engine, r.weights[0]));
    neap_check(r.engine);

    /* Nothing is left: that does not count as an eviction. */
    result = evict(&r, UINT64_MAX, 0, NEAP_ONLY_ALL);
    CHECK(result.exhausted && result.released_bytes == 0);

    neap_use_begin(r.engine, NEAP_USE_COMPUTE);
    CHECK(neap_wait(r.engine, r.weights[2]) == 0 && neap_unit_resident(r.engine, r.weights[2]));
    CHECK(!neap_unit_resident(r.engine, r.weights[3]));
    neap_use_end(r.engine, NEAP_USE_COMPUTE);
    uint64_t bytes = 0;
    CHECK(neap_restore(r.engine, &bytes) == 0 && bytes > 0 && neap_all_resident(r.engine));
    CHECK(neap_restore(r.engine, &bytes) == 0 && bytes == 0);
    stat = stat_of(&r);
    CHECK(stat.stage == NEAP_STAGE_NONE && stat.restores > 0 && stat.evictions == 1);
    CHECK(stat.bytes_restored_storage > 0 && stat.bytes_restored_memory == 0);
    rig_check_all(&r);
    rig_free(&r);
}

/* ---- regions in memory that the program gives ---- */

typedef struct giver {
    int asked, given, back;
} giver;

static int give(void *ctx, size_t len, size_t align, void **ret_base) {
    giver *g = ctx;
    if (g->asked++ == 1) return -ENOMEM; /* the second region lies in the system's memory */
    CHECK(neap_vm_reserve(len, align, ret_base) == 0);
    g->given++;
    return 0;
}

static void take_back(void *ctx, void *base) {
    giver *g = ctx;
    *(volatile char *)base = 1; /* accessible, though it was evicted and poisoned */
    g->back++;
}

static void test_given_regions(void) {
    giver g = {0};
    neap_options options = plain;
    options.region_alloc = give;
    options.region_free = take_back;
    options.region_ctx = &g;
    rig r;
    rig_make(&r, options, false);
    fill(&r, 700);
    evict(&r, UINT64_MAX, 0, NEAP_ONLY_ALL);
    neap_check(r.engine);
    uint64_t bytes = 0;
    CHECK(neap_restore(r.engine, &bytes) == 0 && bytes > 0);
    rig_check_all(&r);
    evict(&r, UINT64_MAX, 0, NEAP_ONLY_ALL);
    rig_free(&r);
    CHECK(g.asked > 1 && g.given == g.asked - 1 && g.back == g.given);
}

static void test_amounts(void) {
    rig r;
    rig_make(&r, (neap_options){.codec = "q8", .poison = true}, false);
    fill(&r, RIG_CELLS);
    const uint64_t all = evict(&r, 0, 1000, NEAP_ONLY_ALL).asked_bytes;
    uint64_t bytes;
    CHECK(neap_restore(r.engine, &bytes) == 0);
    neap_evict_result result = evict(&r, 0, 500, NEAP_ONLY_ALL);
    CHECK(result.asked_bytes == all / 2 && result.released_bytes >= all / 2 && !result.exhausted);
    CHECK(neap_restore(r.engine, &bytes) == 0);
    result = evict(&r, UINT64_MAX, 0, NEAP_ONLY_KV);
    CHECK(result.weights_bytes == 0 && stat_of(&r).units_weights_evicted == 0);
    CHECK(neap_restore(r.engine, &bytes) == 0);
    result = evict(&r, UINT64_MAX, 0, NEAP_ONLY_WEIGHTS);
    CHECK(result.kv_memory_bytes + result.kv_storage_bytes == 0 && result.weights_bytes > 0);
    CHECK(stat_of(&r).units_kv_evicted == 0);
    rig_check_all(&r);
    rig_free(&r);
}

static void test_keep(void) {
    rig r;
    rig_make(&r, (neap_options){.codec = "none", .keep_bytes = 3 << 20, .poison = true}, false);
    fill(&r, RIG_CELLS);
    const neap_evict_result result = evict(&r, UINT64_MAX, 0, NEAP_ONLY_ALL);
    const neap_stat stat = stat_of(&r);
    CHECK(result.exhausted && result.released_bytes > 0);
    const uint64_t kept = stat.weights_resident + stat.kv_resident + stat.kv_compressed_memory;
    CHECK(kept >= 3u << 20 && kept < (3u << 20) + 2 * RIG_EXTENT);
    rig_check_all(&r);
    rig_free(&r);
}

/* A unit whose cells are all overwritten is not read back. */
static void test_overwrite_needs_no_restore(void) {
    rig r;
    rig_make(&r, plain, false);
    fill(&r, 300);
    evict(&r, UINT64_MAX, 0, NEAP_ONLY_KV);
    const uint64_t restores = stat_of(&r).restores;
    fill(&r, 300);
    CHECK(stat_of(&r).restores == restores);
    rig_random random = {7};
    evict(&r, UINT64_MAX, 0, NEAP_ONLY_KV);
    neap_use_begin(r.engine, NEAP_USE_COMPUTE);
    CHECK(rig_write(&r, &r.caches[0], &random, 0, 0, 255, true) == 0);
    neap_use_end(r.engine, NEAP_USE_COMPUTE);
    CHECK(stat_of(&r).restores == restores + 1);
    rig_check_all(&r);
    rig_free(&r);
}

/* A chunk read back from storage and not written is clean: evicting it again needs no room. */
static void test_clean_chunks_are_dropped(void) {
    rig r;
    rig_make(&r, plain, false);
    fill(&r, 512);
    evict(&r, UINT64_MAX, 0, NEAP_ONLY_KV);
    const uint64_t stored = stat_of(&r).kv_storage;
    uint64_t bytes;
    CHECK(neap_restore(r.engine, &bytes) == 0 && stat_of(&r).kv_storage == stored);
    evict(&r, UINT64_MAX, 0, NEAP_ONLY_KV);
    CHECK(stat_of(&r).kv_storage == stored);
    rig_check_all(&r);
    fill(&r, 512);
    CHECK(stat_of(&r).kv_storage == 0); /* stale copies are gone */
    rig_check_all(&r);
    rig_free(&r);
}

static void test_clear(void) {
    rig r;
    rig_make(&r, plain, false);
    fill(&r, 600);
    evict(&r, 0, 500, NEAP_ONLY_KV);
    for (int i = 0; i < RIG_CACHES; i++) {
        CHECK(neap_kv_relayout(r.caches[i].kv, &r.caches[i].layout) == -EBUSY);
        CHECK(neap_kv_clear(r.caches[i].kv) == 0);
        rig_forget_cache(&r.caches[i]);
        CHECK(neap_kv_relayout(r.caches[i].kv, &r.caches[i].layout) == 0);
    }
    const neap_stat stat = stat_of(&r);
    CHECK(stat.kv_total == 0 && stat.tokens == 0 && stat.kv_storage == 0 && stat.units_kv == 0);
    rig_check_all(&r);
    fill(&r, 10);
    rig_check_all(&r);
    rig_free(&r);
}

static void test_scratch(void) {
    rig r;
    rig_make(&r, plain, false);
    unsigned char *base = neap_region_base(r.scratch_region);
    memset(base, 7, 1 << 20);
    CHECK(evict(&r, 1, 0, NEAP_ONLY_ALL).scratch_bytes == 0); /* nothing was said of it yet */
    const uint64_t held[2][2] = {{700000, 5000}, {10000, 100}};
    CHECK(neap_scratch_hold(r.scratch_region, held, 2) == 0);
    CHECK(stat_of(&r).scratch_resident == 1 << 20);
    const neap_evict_result result = evict(&r, 1, 0, NEAP_ONLY_ALL);
    CHECK(result.scratch_bytes > 1000000 && result.weights_bytes == 0);
    CHECK(stat_of(&r).scratch_resident == (1 << 20) - result.scratch_bytes);
    for (size_t i = 0; i < 2; i++)
        for (size_t j = 0; j < held[i][1]; j++)
            CHECK(base[held[i][0] + j] == 7);
    CHECK(base[300000] == 0);
    const uint64_t bad[1][2] = {{1 << 20, 1}};
    CHECK(neap_scratch_hold(r.scratch_region, bad, 1) == NEAP_E_BOUND);
    CHECK(neap_scratch_hold(r.kv_region, held, 1) == -EINVAL);
    rig_free(&r);
}

/* A unit may lie in two regions; it goes with the first of them. */
static void test_unit_in_two_regions(void) {
    rig r;
    rig_make(&r, plain, false);
    neap_region *regions[2];
    neap_weight_extent extents[2];
    for (int i = 0; i < 2; i++) {
        CHECK(neap_region_create(r.engine, 1 << 20, NEAP_REGION_WEIGHTS, &regions[i]) == 0);
        memset(neap_region_base(regions[i]), 5 + i, 1 << 20);
        extents[i] =
            (neap_weight_extent){.addr = neap_region_base(regions[i]), .len_bytes = 1 << 20};
    }
    neap_unit_id unit;
    CHECK(neap_weights_add(r.engine, 9, extents, 2, &unit) == 0);
    evict(&r, UINT64_MAX, 0, NEAP_ONLY_WEIGHTS);
    neap_use_begin(r.engine, NEAP_USE_ACCESS);
    CHECK(neap_wait(r.engine, unit) == 0);
    CHECK(((char *)extents[0].addr)[4096] == 5 && ((char *)extents[1].addr)[(1 << 20) - 1] == 6);
    neap_use_end(r.engine, NEAP_USE_ACCESS);
    evict(&r, UINT64_MAX, 0, NEAP_ONLY_WEIGHTS);
    neap_region_free(regions[0]);
    CHECK(neap_wait(r.engine, unit) == NEAP_E_BOUND);
    CHECK(stat_of(&r).units_weights == RIG_WEIGHTS);
    neap_region_free(regions[1]);
    rig_check_all(&r);
    rig_free(&r);
}

/* The handle opened at load outlives the file's name. */
static void test_model_moved_or_deleted(void) {
    rig r;
    rig_make(&r, plain, false);
    char moved[128];
    snprintf(moved, sizeof moved, "%s.moved", r.model);
    CHECK(rename(r.model, moved) == 0);
    evict(&r, UINT64_MAX, 0, NEAP_ONLY_WEIGHTS);
    rig_check_all(&r);
    CHECK(unlink(moved) == 0);
    evict(&r, UINT64_MAX, 0, NEAP_ONLY_WEIGHTS);
    rig_check_all(&r);
    rig_free(&r);
}

static uint64_t anonymous_bytes(void) {
    neap_proc_memory memory;
    CHECK(neap_proc_memory_read(0, &memory) == 0);
    return memory.anon_bytes + memory.swap_bytes;
}

static void check_within(uint64_t a, uint64_t b, double share) {
    if (fabs((double)a - (double)b) <= share * (double)b) return;
    fprintf(stderr, "%llu and %llu differ too much\n", (unsigned long long)a,
            (unsigned long long)b);
    abort();
}

/* What is said to be released is what the kernel got back: 160 MiB of KV, then of weights. */
static void test_released_is_real(const char *codec, int kind) {
    const size_t size = (size_t)160 << 20;
    rig r;
    rig_make(&r, (neap_options){.codec = codec}, false);
    neap_region *region;
    CHECK(neap_region_create(r.engine, size, kind, &region) == 0);
    if (kind == NEAP_REGION_KV) {
        const uint32_t n_cells = (uint32_t)(size / 2048);
        const neap_kv_layout layout = {
            .n_cells = n_cells,
            .n_streams = 1,
            .n_planes = 1,
            .planes = {{neap_region_base(region), 2048, 1024, NEAP_KV_F16, false}}};
        neap_kv *kv;
        CHECK(neap_kv_add(r.engine, &layout, &kv) == 0);
        neap_use_begin(r.engine, NEAP_USE_ACCESS);
        CHECK(neap_kv_write(kv, 0, 0, n_cells, true) == 0);
        neap_use_end(r.engine, NEAP_USE_ACCESS);
    }
    memset(neap_region_base(region), 0x3c, size);
    if (kind == NEAP_REGION_WEIGHTS) {
        for (size_t at = 0; at < size; at += size / 8) {
            const neap_weight_extent extent = {.addr = (char *)neap_region_base(region) + at + 100,
                                               .len_bytes = size / 8 - 200};
            neap_unit_id unit;
            CHECK(neap_weights_add(r.engine, 0, &extent, 1, &unit) == 0);
        }
    }
    const int only = kind == NEAP_REGION_KV ? NEAP_ONLY_KV : NEAP_ONLY_WEIGHTS;
    const uint64_t before = anonymous_bytes();
    const neap_evict_result half = evict(&r, 0, 400, only);
    check_within(before - anonymous_bytes(), half.released_bytes, 0.05);
    CHECK(half.released_bytes >= half.asked_bytes);
    const neap_stat stat = stat_of(&r);
    uint64_t held;
    CHECK(neap_vm_held(neap_region_base(region), size, &held) == 0);
    const uint64_t in_place = neap_vm_prefers_huge() ? 0 : stat.kv_compressed_memory;
    if (kind == NEAP_REGION_KV) check_within(stat.kv_resident + in_place, held, 0.05);
    const neap_evict_result rest = evict(&r, UINT64_MAX, 0, only);
    check_within(before - anonymous_bytes(), half.released_bytes + rest.released_bytes, 0.05);
    check_within(stat_of(&r).released, half.released_bytes + rest.released_bytes, 0.05);
    uint64_t bytes;
    CHECK(neap_restore(r.engine, &bytes) == 0);
    check_within(anonymous_bytes(), before, 0.05);
    neap_region_free(region);
    rig_free(&r);
}

static void test_request_marks(void) {
    rig r;
    rig_make(&r, plain, false);
    evict(&r, UINT64_MAX, 0, NEAP_ONLY_WEIGHTS);
    neap_use_begin(r.engine, NEAP_USE_COMPUTE);
    CHECK(stat_of(&r).state == NEAP_STATE_INFERENCE);
    neap_request_begin(r.engine, 0);
    CHECK(neap_need(r.engine, r.weights, RIG_WEIGHTS) == 0);
    for (int i = 0; i < RIG_WEIGHTS; i++)
        CHECK(neap_wait(r.engine, r.weights[i]) == 0);
    neap_request_first_token(r.engine);
    neap_use_end(r.engine, NEAP_USE_COMPUTE);
    const neap_stat stat = stat_of(&r);
    CHECK(stat.state == NEAP_STATE_IDLE && stat.ttft_ns > 0 && stat.restore_ns > 0);
    CHECK(stat.restore_ns <= stat.ttft_ns && stat.wait_ns > 0);
    CHECK(stat.allocate_ns > 0 && stat.storage_ns > 0 && stat.memory_ns == 0);
    CHECK(stat.storage_ns <= stat.restore_ns);
    neap_request_begin(r.engine, 0);
    neap_request_first_token(r.engine);
    CHECK(stat_of(&r).restore_ns == 0 && stat_of(&r).overlap == 0);
    CHECK(stat_of(&r).allocate_ns == 0 && stat_of(&r).storage_ns == 0);
    rig_free(&r);
}

/* Chunks come back from memory alone: what the memory path took is told apart. */
static void test_time_of_memory_path(void) {
    rig r;
    rig_make(&r, (neap_options){.codec = "q8", .policy = "memory-only"}, false);
    rig_random random = {4711};
    neap_use_begin(r.engine, NEAP_USE_COMPUTE);
    CHECK(rig_write(&r, &r.caches[0], &random, 0, 0, 700, true) == 0);
    neap_use_end(r.engine, NEAP_USE_COMPUTE);
    evict(&r, 1, 0, NEAP_ONLY_KV);
    neap_use_begin(r.engine, NEAP_USE_COMPUTE);
    neap_request_begin(r.engine, 0);
    for (uint32_t c = 0; c < RIG_CHUNKS; c++)
        CHECK(neap_wait(r.engine, neap_kv_unit(r.caches[0].kv, 0, c)) == 0);
    neap_request_first_token(r.engine);
    neap_use_end(r.engine, NEAP_USE_COMPUTE);
    const neap_stat stat = stat_of(&r);
    CHECK(stat.restore_ns > 0 && stat.memory_ns == stat.restore_ns && stat.storage_ns == 0);
    rig_free(&r);
}

/* need commits all pages before it returns; only the files' bytes may still be on their way. */
static void test_allocate_first(void) {
    rig r;
    rig_make(&r, (neap_options){.codec = "none", .policy = "mz-rp"}, false);
    evict(&r, UINT64_MAX, 0, NEAP_ONLY_WEIGHTS);
    neap_use_begin(r.engine, NEAP_USE_COMPUTE);
    neap_request_begin(r.engine, 0);
    CHECK(neap_need(r.engine, r.weights, RIG_WEIGHTS) == 0);
    const char *base = neap_region_base(r.weights_region);
    uint64_t held;
    CHECK(neap_vm_held(base, NEAP_ROUND_DOWN(r.file_len, neap_vm_page()), &held) == 0);
    CHECK(held == NEAP_ROUND_DOWN(r.file_len, neap_vm_page()));
    for (int i = 0; i < RIG_WEIGHTS; i++)
        CHECK(neap_wait(r.engine, r.weights[i]) == 0 && rig_weights_right(&r, i));
    neap_request_first_token(r.engine);
    neap_use_end(r.engine, NEAP_USE_COMPUTE);
    /* The path began when all pages were there. */
    const neap_stat stat = stat_of(&r);
    CHECK(stat.allocate_ns > 0 && stat.storage_ns < stat.restore_ns);
    rig_free(&r);
}

static void test_least_recently_used_goes_first(void) {
    rig r;
    rig_make(&r, (neap_options){.codec = "none", .policy = "lru", .poison = true}, false);
    CHECK(neap_tracks_use(r.engine));
    neap_use_begin(r.engine, NEAP_USE_COMPUTE);
    CHECK(neap_need(r.engine, r.weights, RIG_WEIGHTS) == 0);
    for (int i = 0; i < RIG_WEIGHTS; i++)
        if (i != 4) CHECK(neap_need(r.engine, &r.weights[i], 1) == 0);
    neap_use_end(r.engine, NEAP_USE_COMPUTE);
    evict(&r, 1, 0, NEAP_ONLY_WEIGHTS);
    for (int i = 0; i < RIG_WEIGHTS; i++)
        CHECK(neap_unit_resident(r.engine, r.weights[i]) == (i != 4));
    neap_use_begin(r.engine, NEAP_USE_COMPUTE);
    CHECK(neap_need(r.engine, &r.weights[0], 1) == 0);
    neap_use_end(r.engine, NEAP_USE_COMPUTE);
    evict(&r, 1, 0, NEAP_ONLY_WEIGHTS);
    CHECK(neap_unit_resident(r.engine, r.weights[0]));
    CHECK(!neap_unit_resident(r.engine, r.weights[1]));
    rig_free(&r);
}

int main(void) {
    test_refusals();
    test_evict_and_back();
    test_given_regions();
    test_amounts();
    test_keep();
    test_overwrite_needs_no_restore();
    test_clean_chunks_are_dropped();
    test_clear();
    test_scratch();
    test_unit_in_two_regions();
    test_model_moved_or_deleted();
    test_request_marks();
    test_time_of_memory_path();
    test_allocate_first();
    test_least_recently_used_goes_first();
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    printf("not checked: what the kernel got back (a sanitizer holds memory of its own)\n");
    (void)test_released_is_real;
#else
    test_released_is_real("none", NEAP_REGION_KV);
    const bool prefers_huge = neap_vm_prefers_huge();
    for (int huge = 0; huge < 2; huge++) { /* copies in place, on the stack */
        neap_vm_set_prefers_huge(huge);
        test_released_is_real("q8", NEAP_REGION_KV);
    }
    neap_vm_set_prefers_huge(prefers_huge);
    test_released_is_real("none", NEAP_REGION_WEIGHTS);
#endif
    return 0;
}
