/* Write-behind when something fails: said once, nothing is lost, no attempt follows the next at
 * once, and after a use it is tried again. */
#include <errno.h>

#include "clock.h"
#include "fault.h"
#include "rig.h"

enum { CELLS = 700, FULL = 2 * RIG_STREAMS * 2 }; /* as in test_engine_write_behind.c */

static int n_told; /* log lines of warnings and errors */

static void count_line(int level, const char *line, void *ctx) {
    (void)ctx;
    if (level <= 1) {
        n_told++;
        printf("%s\n", line);
    }
}

static neap_stat stat_of(const rig *r) {
    neap_stat stat;
    neap_stat_get(r->engine, &stat);
    return stat;
}

static void make(rig *r, const char *codec) {
    const neap_options options = {.codec = codec,
                                  .poison = true,
                                  .write_behind_bytes = (uint64_t)1 << 40,
                                  .idle_ns = 1000000,
                                  .write_behind_on_battery = true};
    rig_make(r, options, false);
    n_told = 0;
}

static void fill(rig *r) {
    rig_random random = {4711};
    neap_use_begin(r->engine, NEAP_USE_COMPUTE);
    for (int i = 0; i < RIG_CACHES; i++)
        for (uint32_t s = 0; s < RIG_STREAMS; s++)
            CHECK(rig_write(r, &r->caches[i], &random, s, 0, CELLS, true) == 0);
    neap_use_end(r->engine, NEAP_USE_COMPUTE);
}

static void use(rig *r) {
    neap_use_begin(r->engine, NEAP_USE_ACCESS);
    neap_use_end(r->engine, NEAP_USE_ACCESS);
}

static void wait_for(const rig *r, neap_write_behind_state state, uint32_t n_clean) {
    const uint64_t until_ns = neap_clock_ns() + 20000000000u;
    while (stat_of(r).write_behind != state || stat_of(r).clean_chunks < n_clean) {
        CHECK(neap_clock_ns() < until_ns);
        usleep(1000);
    }
}

static void evict_all_and_check(rig *r) {
    rig_evict_all(r);
    neap_check(r->engine);
    rig_check_all(r);
}

/* The n-th write fails, and all after it. */
static void test_write_fails(const char *codec, uint32_t n) {
    rig r;
    make(&r, codec);
    neap_fault_arm("file.write", n, -ENOSPC, 1);
    fill(&r);
    wait_for(&r, NEAP_WRITE_BEHIND_FAILED, n - 1);
    CHECK(stat_of(&r).clean_chunks == n - 1 && neap_fault_fired() == 1 && n_told == 1);
    CHECK(stat_of(&r).errors == 1 && strstr(stat_of(&r).last_error, "write-behind"));
    usleep(50000); /* without a use nothing is tried again */
    CHECK(neap_fault_fired() == 1);
    neap_check(r.engine);
    rig_check_all(&r); /* a use: once more, without another word */
    const uint64_t until_ns = neap_clock_ns() + 20000000000u;
    while (neap_fault_fired() < 2)
        CHECK(neap_clock_ns() < until_ns);
    usleep(50000);
    CHECK(neap_fault_fired() == 2 && n_told == 1);
    neap_fault_disarm();
    use(&r);
    wait_for(&r, NEAP_WRITE_BEHIND_WAITING, FULL);
    evict_all_and_check(&r);
    rig_free(&r);
}

/* Without its file the day's bytes are counted in memory. */
static void test_count_fails(const char *point) {
    rig r;
    make(&r, "q8");
    neap_fault_arm(point, 1, -EIO, 1);
    fill(&r);
    wait_for(&r, NEAP_WRITE_BEHIND_WAITING, FULL);
    CHECK(neap_fault_fired() > 0 && n_told == 1 && stat_of(&r).errors == 0);
    CHECK(stat_of(&r).write_behind_bytes_today == stat_of(&r).bytes_written_storage);
    neap_fault_disarm();
    evict_all_and_check(&r);
    rig_free(&r);
}

/* No memory for the copy; no thread at all. */
static void test_no_memory(void) {
    rig r;
    make(&r, "q8");
    neap_fault_arm("vm.", 1, -ENOMEM, 1);
    fill(&r);
    wait_for(&r, NEAP_WRITE_BEHIND_FAILED, 0);
    CHECK(stat_of(&r).clean_chunks == 0 && n_told == 1);
    neap_fault_disarm();
    use(&r);
    wait_for(&r, NEAP_WRITE_BEHIND_WAITING, FULL);
    evict_all_and_check(&r);
    rig_free(&r);

    neap_fault_arm("thread.create", 1, -EAGAIN, 0);
    make(&r, "q8");
    CHECK(neap_fault_fired() == 1);
    neap_fault_disarm();
    fill(&r);
    usleep(20000);
    CHECK(stat_of(&r).write_behind == NEAP_WRITE_BEHIND_OFF && stat_of(&r).clean_chunks == 0);
    evict_all_and_check(&r);
    rig_free(&r);
}

int main(void) {
    neap_set_log(count_line, NULL);
    for (uint32_t n = 1; n <= FULL; n++) {
        test_write_fails("q8", n);
        test_write_fails("none", n);
    }
    static const char *const points[] = {"text.open", "text.read", "text.create", "text.write",
                                         "text.rename"};
    for (size_t i = 0; i < sizeof points / sizeof points[0]; i++)
        test_count_fails(points[i]);
    test_no_memory();
    return 0;
}
