/* Write-behind: full chunks become clean while nothing uses the engine, evicting them then writes
 * nothing, and what limits it stops it. */
#include <dirent.h>
#include <errno.h>

#include "clock.h"
#include "rig.h"
#include "write_budget.h"

/* Of 700 cells in a stream two chunks are full, in the two caches that are cut into chunks. */
enum { CELLS = 700, FULL = 2 * RIG_STREAMS * 2 };

static neap_options options_of(const char *codec) {
    return (neap_options){.codec = codec,
                          .poison = true,
                          .write_behind_bytes = (uint64_t)1 << 40,
                          .idle_ns = 1000000,
                          .write_behind_on_battery = true};
}

static neap_stat stat_of(const rig *r) {
    neap_stat stat;
    neap_stat_get(r->engine, &stat);
    return stat;
}

static void fill(rig *r, uint32_t first, uint32_t n) {
    rig_random random = {4711};
    neap_use_begin(r->engine, NEAP_USE_COMPUTE);
    for (int i = 0; i < RIG_CACHES; i++)
        for (uint32_t s = 0; s < RIG_STREAMS; s++)
            CHECK(rig_write(r, &r->caches[i], &random, s, first, n, true) == 0);
    neap_use_end(r->engine, NEAP_USE_COMPUTE);
}

static void use(rig *r) {
    neap_use_begin(r->engine, NEAP_USE_ACCESS);
    neap_use_end(r->engine, NEAP_USE_ACCESS);
}

/* Until it rests in that state with at least so many chunks clean. */
static void wait_for(const rig *r, neap_write_behind_state state, uint32_t n_clean) {
    const uint64_t until_ns = neap_clock_ns() + 20000000000u;
    neap_stat stat = stat_of(r);
    while (stat.write_behind != state || stat.clean_chunks < n_clean) {
        if (neap_clock_ns() > until_ns)
            printf("state %d, %u clean\n", (int)stat.write_behind, stat.clean_chunks);
        CHECK(neap_clock_ns() < until_ns);
        usleep(1000);
        stat = stat_of(r);
    }
}

static neap_evict_result evict_kv(rig *r) {
    const neap_evict_request request = {.bytes = UINT64_MAX, .only = NEAP_ONLY_KV};
    neap_evict_result result;
    CHECK(neap_evict(r->engine, &request, &result) == 0 && result.storage_error == 0);
    rig_note_evicted(r);
    return result;
}

/* Bytes that evicting all KV writes without write-behind. */
static uint64_t written_by_evicting(neap_options options) {
    rig r;
    options.write_behind_bytes = 0;
    rig_make(&r, options, false);
    fill(&r, 0, CELLS);
    evict_kv(&r);
    const uint64_t written = stat_of(&r).bytes_written_storage;
    rig_free(&r);
    return written;
}

static void test_becomes_clean(const char *codec, const char *policy) {
    rig r;
    neap_options options = options_of(codec);
    options.policy = policy;
    rig_make(&r, options, false);
    CHECK(stat_of(&r).write_behind == NEAP_WRITE_BEHIND_WAITING);
    fill(&r, 0, CELLS);
    wait_for(&r, NEAP_WRITE_BEHIND_WAITING, FULL);
    neap_stat stat = stat_of(&r);
    CHECK(stat.clean_chunks == FULL);
    CHECK(stat.write_behind_bytes_today == stat.bytes_written_storage);
    CHECK(stat.bytes_written_storage == stat.kv_storage && stat.kv_storage > 0);
    CHECK(stat.kv_resident == stat.kv_total && stat.released == 0);
    rig_check_all(&r); /* what is in memory is as exact as before */
    neap_check(r.engine);

    /* Only the tails are written. */
    evict_kv(&r);
    CHECK(stat_of(&r).clean_chunks == 0 && stat_of(&r).units_kv_evicted > FULL);
    const uint64_t tails = stat_of(&r).bytes_written_storage - stat.bytes_written_storage;
    rig_check_all(&r);
    neap_check(r.engine);

    /* Restored from storage a chunk keeps its copy, and is what it was made the first time. */
    CHECK(stat_of(&r).clean_chunks >= FULL);
    evict_kv(&r);
    rig_check_all(&r);
    CHECK(stat_of(&r).bytes_written_storage - stat.bytes_written_storage <= 2 * tails);

    CHECK(tails + stat.bytes_written_storage == written_by_evicting(options));
    rig_free(&r);
}

/* A chunk that came back from memory has no copy left; writing behind makes it clean again. */
static void test_after_memory(void) {
    rig r;
    neap_options options = options_of("q8");
    options.policy = "memory-only";
    rig_make(&r, options, false);
    fill(&r, 0, CELLS);
    const neap_evict_request some = {.bytes = 400000, .only = NEAP_ONLY_KV};
    neap_evict_result result;
    CHECK(neap_evict(r.engine, &some, &result) == 0 && result.kv_memory_bytes > 0);
    rig_note_evicted(&r);
    rig_check_all(&r);
    CHECK(stat_of(&r).kv_compressed_memory == 0);
    wait_for(&r, NEAP_WRITE_BEHIND_WAITING, FULL);
    rig_check_all(&r);
    rig_free(&r);
}

static void test_rewritten(void) {
    rig r;
    rig_make(&r, options_of("q8"), false);
    fill(&r, 0, CELLS);
    wait_for(&r, NEAP_WRITE_BEHIND_WAITING, FULL);
    const uint64_t before = stat_of(&r).bytes_written_storage;
    rig_random random = {99};
    neap_use_begin(r.engine, NEAP_USE_COMPUTE);
    CHECK(rig_write(&r, &r.caches[0], &random, 1, 300, 1, true) == 0);
    CHECK(stat_of(&r).clean_chunks == FULL - 1);
    usleep(50000); /* in use: nothing is written, however long */
    CHECK(stat_of(&r).clean_chunks == FULL - 1 && stat_of(&r).bytes_written_storage == before);
    neap_use_end(r.engine, NEAP_USE_COMPUTE);
    wait_for(&r, NEAP_WRITE_BEHIND_WAITING, FULL);
    CHECK(stat_of(&r).bytes_written_storage > before);
    evict_kv(&r);
    rig_check_all(&r);
    CHECK(neap_kv_clear(r.caches[0].kv) == 0);
    rig_forget_cache(&r.caches[0]);
    neap_check(r.engine);
    rig_free(&r);
}

/* Times that the thread has gone to sleep. */
static long sleeps(void) {
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks);
    long n = -1;
    for (const struct dirent *entry; (entry = readdir(tasks));) {
        char path[300], line[128];
        snprintf(path, sizeof path, "/proc/self/task/%s/status", entry->d_name);
        FILE *file = fopen(path, "r");
        bool ours = false;
        while (file && fgets(line, sizeof line, file)) {
            ours = ours || strcmp(line, "Name:\tneap-idle\n") == 0;
            if (ours) (void)sscanf(line, "voluntary_ctxt_switches: %ld", &n);
        }
        if (file) fclose(file);
    }
    closedir(tasks);
    return n;
}

static void test_sleeps(void) {
    rig r;
    rig_make(&r, options_of("none"), false);
    fill(&r, 0, CELLS);
    wait_for(&r, NEAP_WRITE_BEHIND_WAITING, FULL);
    usleep(100000);
    const long before = sleeps();
    CHECK(before >= 0);
    usleep(300000);
    CHECK(sleeps() == before);
    use(&r);
    usleep(100000);
    CHECK(sleeps() > before); /* what is counted does count */
    rig_free(&r);
}

static void test_limits(void) {
    rig r;
    neap_options options = options_of("none");
    options.swap_limit_bytes = 300000; /* of 8 chunks of 40 and 56 KiB */
    rig_make(&r, options, false);
    fill(&r, 0, CELLS);
    wait_for(&r, NEAP_WRITE_BEHIND_NO_ROOM, 1);
    CHECK(stat_of(&r).clean_chunks < FULL && stat_of(&r).bytes_written_storage <= 150000);
    rig_free(&r);

    options = options_of("none");
    options.write_behind_bytes = 300000;
    rig_make(&r, options, false);
    fill(&r, 0, CELLS);
    wait_for(&r, NEAP_WRITE_BEHIND_SPENT, 1);
    const uint64_t today = stat_of(&r).write_behind_bytes_today;
    CHECK(today <= 300000 && today == stat_of(&r).bytes_written_storage);
    CHECK(stat_of(&r).clean_chunks < FULL);
    neap_engine *second; /* another instance shares what is left */
    options.no_control = true;
    options.swap_dir = r.swap;
    CHECK(neap_engine_create(&options, &second) == 0);
    neap_stat stat;
    neap_stat_get(second, &stat);
    CHECK(stat.write_behind_bytes_today == today && stat.bytes_written_storage == 0);
    neap_engine_free(second);
    evict_kv(&r); /* real evictions have no such bound */
    rig_check_all(&r);
    rig_free(&r);

    options.write_behind_bytes = 0;
    options.swap_dir = NULL;
    rig_make(&r, options, false);
    fill(&r, 0, CELLS);
    usleep(50000);
    CHECK(stat_of(&r).write_behind == NEAP_WRITE_BEHIND_OFF && stat_of(&r).clean_chunks == 0);
    CHECK(sleeps() == -1);
    rig_free(&r);
}

int main(void) {
    test_becomes_clean("none", "hybrid");
    test_becomes_clean("q8", "hybrid");
    test_becomes_clean("q8", "storage-only");
    test_becomes_clean("q8", "partial-offload");
    test_after_memory();
    test_rewritten();
    test_sleeps();
    test_limits();
    return 0;
}
