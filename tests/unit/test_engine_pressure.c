/* test_engine_pressure.c - an engine that watches memory pressure: told through a fifo (systemd's
 * protocol) it releases by itself, step by step, and what it released comes back; what pressure
 * took comes back by itself, what was evicted on purpose does not; it sleeps otherwise; neap_trim()
 * releases the share of its level and no more. */
#include <errno.h>
#include <stdatomic.h>
#include <fcntl.h>

#include "clock.h"
#include "decide.h"
#include "fault.h"
#include "proc.h"
#include "rig.h"

#define MS 1000000ull

/* Counts what threads other than the test's allocate; a sanitizer has an allocator of its own. */
static atomic_long n_allocated;
static _Thread_local bool is_test;
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
extern void *__libc_malloc(size_t size);
extern void *__libc_realloc(void *old, size_t size);
extern void *__libc_calloc(size_t n, size_t size);
void *malloc(size_t size) {
    if (!is_test) atomic_fetch_add(&n_allocated, 1);
    return __libc_malloc(size);
}
void *realloc(void *old, size_t size) {
    if (!is_test) atomic_fetch_add(&n_allocated, 1);
    return __libc_realloc(old, size);
}
void *calloc(size_t n, size_t size) {
    if (!is_test) atomic_fetch_add(&n_allocated, 1);
    return __libc_calloc(n, size);
}
#endif

static neap_stat stat_of(rig *r) {
    neap_stat stat;
    neap_stat_get(r->engine, &stat);
    return stat;
}

/* Waits until the engine has released by itself n times, at most 10 s. */
static neap_stat after_releases(rig *r, uint64_t n) {
    const uint64_t until_ns = neap_clock_ns() + 10000 * MS;
    for (;;) {
        const neap_stat stat = stat_of(r);
        if (stat.pressure_releases >= n) return stat;
        CHECK(neap_clock_ns() < until_ns);
        usleep(5000);
    }
}

static void told_by_fifo(void) {
    char fifo[] = "/tmp/neap-fifo-XXXXXX";
    CHECK(mkdtemp(fifo) && rmdir(fifo) == 0 && mkfifo(fifo, 0600) == 0);
    rig r;
    rig_make(&r,
             (neap_options){
                 .codec = "none", .poison = true, .watch_pressure = true, .pressure_watch = fifo},
             false);
    neap_stat stat = stat_of(&r);
    CHECK(stat.pressure >= NEAP_PRESSURE_CALM && strstr(stat.pressure_sources, "systemd"));
    const uint64_t had = stat.weights_resident;
    const int fd = open(fifo, O_WRONLY | O_NONBLOCK);
    CHECK(fd >= 0 && write(fd, "now", 3) == 3);
    stat = after_releases(&r, 1);
    CHECK(stat.pressure == NEAP_PRESSURE_SHORT);
    CHECK(stat.pressure_released_bytes >= had / 5 && stat.pressure_released_bytes <= had / 2);
    usleep(1100000); /* not more than one step a second */
    CHECK(stat_of(&r).pressure_releases == 1);
    /* The unit without a file is out: from waking to dropped weights nothing is allocated. */
    const long allocated = atomic_load(&n_allocated);
    CHECK(write(fd, "now", 3) == 3);
    stat = after_releases(&r, 2);
    CHECK(atomic_load(&n_allocated) == allocated);
    CHECK(stat.weights_resident < had);
    rig_check_all(&r);
    neap_check(r.engine);
    close(fd);
    unlink(fifo);
    rig_free(&r);
}

static void evict_half(rig *r, bool by_pressure) {
    neap_evict_result result;
    const neap_evict_request half = {.permille = 500, .by_pressure = by_pressure};
    CHECK(neap_evict(r->engine, &half, &result) == 0 && result.released_bytes > 0);
}

static void comes_back_after_pressure(void) {
    uint64_t available = 0, total = 0;
    CHECK(neap_mem_available(&available, &total) == 0);
    if (available < 2 * neap_pressure_marks_of(total).near_bytes) {
        puts("too little memory is available: not tested that it comes back");
        return;
    }
    rig r, on_purpose, both;
    const neap_options options = {.codec = "none", .poison = true, .watch_pressure = true};
    rig_make(&r, options, false);
    rig_make(&on_purpose, options, false);
    rig_make(&both, options, false);
    evict_half(&on_purpose, false);
    evict_half(&r, true);
    evict_half(&both, true);
    CHECK(stat_of(&on_purpose).pressure_owed_bytes == 0);
    CHECK(stat_of(&both).pressure_owed_bytes > 0);
    evict_half(&both, false); /* on purpose: now all of it stays out */
    CHECK(stat_of(&both).pressure_owed_bytes == 0);
    neap_stat stat = stat_of(&r);
    const uint64_t owed = stat.pressure_owed_bytes, began_ns = neap_clock_ns();
    const uint32_t out = stat_of(&on_purpose).units_weights_evicted;
    CHECK(owed > 0 && out > 0);
    while (stat.pressure_owed_bytes > 0) {
        CHECK(neap_clock_ns() < began_ns + 30000 * MS);
        usleep(50000);
        stat = stat_of(&r);
    }
    CHECK(neap_clock_ns() >= began_ns + 4500 * MS); /* pressure must be over */
    CHECK(stat.pressure_restored_bytes >= owed && stat.units_weights_evicted == 0);
    usleep(500000);
    CHECK(stat_of(&on_purpose).units_weights_evicted == out);
    CHECK(stat_of(&both).units_weights_evicted > 0);
    CHECK(stat_of(&both).pressure_restored_bytes == 0);
    stat = stat_of(&r);
    usleep(1000000);
    if (stat_of(&r).pressure == NEAP_PRESSURE_CALM && strcmp(stat.pressure_sources, "polling") != 0)
        CHECK(stat_of(&r).pressure_looks <= stat.pressure_looks + 1); /* nothing is owed: asleep */
    rig *all[] = {&r, &on_purpose, &both};
    for (size_t i = 0; i < 3; i++) {
        rig_check_all(all[i]);
        rig_free(all[i]);
    }
}

static void sleeps_when_calm(void) {
    rig r;
    rig_make(&r, (neap_options){.watch_pressure = true}, false);
    usleep(200000);
    const neap_stat before = stat_of(&r);
    usleep(1500000);
    const neap_stat after = stat_of(&r);
    CHECK(before.pressure_looks >= 1);
    if (before.pressure == NEAP_PRESSURE_CALM && after.pressure == NEAP_PRESSURE_CALM &&
        strcmp(before.pressure_sources, "polling") != 0)
        CHECK(after.pressure_looks == before.pressure_looks);
    rig_free(&r);

    rig_make(&r, (neap_options){.watch_pressure = true, .pressure_watch = "/dev/null"}, false);
    CHECK(stat_of(&r).pressure == NEAP_PRESSURE_OFF); /* the service manager wants none */
    rig_free(&r);
    rig_make(&r, (neap_options){0}, false);
    CHECK(stat_of(&r).pressure == NEAP_PRESSURE_OFF && stat_of(&r).pressure_looks == 0);
    rig_free(&r);
}

/* Without a thread, files or turns the engine works all the same. */
static void failing_parts(void) {
    static const char *const parts[] = {"memory.", "turn.", "thread.create"};
    for (size_t i = 0; i < 2; i++)
        for (uint32_t n = 1; n < 40; n++) {
            neap_options options = {.program = "test", .no_control = true, .watch_pressure = true};
            neap_engine *engine;
            neap_fault_arm(parts[i], n, -EIO, 0);
            CHECK(neap_engine_create(&options, &engine) == 0);
            neap_fault_disarm();
            neap_engine_free(engine);
        }
    neap_options options = {.program = "test", .no_control = true, .watch_pressure = true};
    neap_engine *engine;
    for (uint32_t n = 1; n < 10; n++) {
        neap_fault_arm(parts[2], n, -EAGAIN, 0);
        const int err = neap_engine_create(&options, &engine);
        neap_fault_disarm();
        CHECK(err == 0 || err == -EAGAIN);
        if (!err) neap_engine_free(engine);
    }
}

static void trim(void) {
    static const struct {
        int level, permille;
    } levels[] = {{5, 125}, {10, 250}, {20, 250}, {40, 500}, {15, 500}, {60, 750}, {80, 1000}};
    rig r;
    rig_make(&r, (neap_options){.codec = "none", .poison = true}, false);
    rig_check_all(&r);
    const uint64_t all = stat_of(&r).weights_resident;
    CHECK(neap_trim(r.engine, 4) == -EINVAL && neap_trim(r.engine, -5) == -EINVAL);
    CHECK(stat_of(&r).released == 0);
    uint64_t released = 0;
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++) {
        const uint64_t before = stat_of(&r).evictions;
        CHECK(neap_trim(r.engine, levels[i].level) == 0);
        const neap_stat stat = stat_of(&r);
        const bool same = i > 0 && levels[i].permille == levels[i - 1].permille;
        CHECK(!same || stat.evictions == before); /* it is out already */
        CHECK(stat.released >= released);
        released = stat.released;
        const uint64_t share = all * (uint64_t)levels[i].permille / 1000;
        CHECK(released + all / 20 >= share && released <= share + all / 5); /* whole units */
    }
    CHECK(stat_of(&r).units_weights_evicted == RIG_WEIGHTS);
    CHECK(neap_trim(r.engine, 80) == 0); /* nothing left */
    rig_check_all(&r);
    rig_free(&r);
}

int main(void) {
    is_test = true;
    char dir[] = "/tmp/neap-run-XXXXXX"; /* turns of this test alone */
    CHECK(mkdtemp(dir) && setenv("XDG_RUNTIME_DIR", dir, 1) == 0);
    trim();
    told_by_fifo();
    comes_back_after_pressure();
    sleeps_when_calm();
    failing_parts();
    char command[64];
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    CHECK(system(command) == 0);
    return 0;
}
