/* What goes wrong around the engine: a full disk, failing reads, a model changed on disk, damaged
 * records, and every system call failing in turn. Nothing resident is lost, nothing wrong is handed
 * out, and what can come back later does. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>

#include "fault.h"
#include "rig.h"

static const neap_options plain = {.codec = "none", .poison = true};

static void fill(rig *r, uint32_t n) {
    rig_random random = {4711};
    neap_use_begin(r->engine, NEAP_USE_COMPUTE);
    for (int i = 0; i < RIG_CACHES; i++)
        for (uint32_t s = 0; s < RIG_STREAMS; s++)
            CHECK(rig_write(r, &r->caches[i], &random, s, 0, n, true) == 0);
    neap_use_end(r->engine, NEAP_USE_COMPUTE);
}

static neap_evict_result evict_all(rig *r) {
    const neap_evict_request all = {.bytes = UINT64_MAX};
    neap_evict_result result;
    CHECK(neap_evict(r->engine, &all, &result) == 0);
    rig_note_evicted(r);
    return result;
}

static neap_stat stat_of(rig *r) {
    neap_stat stat;
    neap_stat_get(r->engine, &stat);
    return stat;
}

static int wait_within_use(rig *r, neap_unit_id unit) {
    neap_use_begin(r->engine, NEAP_USE_ACCESS);
    const int err = neap_wait(r->engine, unit);
    CHECK((err == 0) == neap_unit_resident(r->engine, unit));
    neap_use_end(r->engine, NEAP_USE_ACCESS);
    return err;
}

/* ---- storage ---- */

static void test_no_room(bool by_limit) {
    neap_options options = plain;
    if (by_limit) options.swap_limit_bytes = 8192;
    rig r;
    rig_make(&r, options, false);
    fill(&r, 700);
    if (!by_limit) neap_fault_arm("file.write", 1, -ENOSPC, 1);
    const neap_evict_result result = evict_all(&r);
    CHECK(result.storage_error == (by_limit ? NEAP_E_BUDGET : -ENOSPC) && result.exhausted);
    /* Weights that lie in the model file went; what has no other copy stayed. */
    CHECK(result.weights_bytes > RIG_LAYERS * RIG_EXTENT);
    CHECK(neap_unit_resident(r.engine, r.weights[RIG_LAYERS]));
    CHECK(stat_of(&r).units_kv_evicted == 0);
    rig_check_all(&r);
    neap_fault_disarm();
    if (!by_limit) { /* room again */
        CHECK(evict_all(&r).storage_error == 0 && stat_of(&r).units_kv_evicted > 0);
        rig_check_all(&r);
    }
    rig_free(&r);
}

/* With a codec that makes chunks smaller, a full disk leaves the memory path. */
static void test_no_room_but_memory(void) {
    rig r;
    rig_make(&r, (neap_options){.codec = "q8", .poison = true}, false);
    fill(&r, 700);
    neap_fault_arm("file.write", 1, -ENOSPC, 1);
    const neap_evict_result result = evict_all(&r);
    CHECK(result.kv_memory_bytes > 0 && stat_of(&r).kv_storage == 0);
    rig_check_all(&r);
    neap_fault_disarm();
    rig_free(&r);
}

/* Weights without a file are made again where they cannot be stored. */
static void test_rebuild(void) {
    rig r;
    rig_make(&r, plain, true);
    neap_fault_arm("file.write", 1, -EROFS, 1);
    CHECK(evict_all(&r).storage_error == 0);
    CHECK(!neap_unit_resident(r.engine, r.weights[RIG_LAYERS]));
    rig_check_all(&r);
    CHECK(r.rebuilt == 1);
    neap_fault_disarm();
    evict_all(&r);
    rig_check_all(&r);
    CHECK(r.rebuilt == 1); /* there was room this time */
    rig_free(&r);
}

/* Reads that fail: with the ring where the kernel has one, else plain ones. */
static int wait_with_failing_reads(rig *r, neap_unit_id unit) {
    neap_fault_arm("ring.read", 1, -EIO, 1);
    int err = wait_within_use(r, unit);
    if (neap_fault_fired() == 0) {
        evict_all(r);
        neap_fault_arm("file.read", 1, -EIO, 1);
        err = wait_within_use(r, unit);
    }
    neap_fault_disarm();
    return err;
}

static void test_read_error(void) {
    rig r;
    rig_make(&r, plain, false);
    fill(&r, 700);
    const neap_unit_id units[] = {r.weights[1], r.weights[RIG_LAYERS],
                                  neap_kv_unit(r.caches[0].kv, 0, 0),
                                  neap_kv_unit(r.caches[1].kv, 1, 0)};
    evict_all(&r);
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        const uint64_t errors = stat_of(&r).errors;
        CHECK(wait_with_failing_reads(&r, units[i]) == -EIO);
        CHECK(stat_of(&r).errors == errors + 1 && stat_of(&r).lost == 0);
        neap_check(r.engine);
        CHECK(wait_within_use(&r, units[i]) == 0);
    }
    rig_check_all(&r);
    rig_free(&r);
}

/* ---- the model file ---- */

static void flip_bytes(const rig *r) {
    FILE *out = fopen(r->model, "r+b");
    CHECK(out);
    for (int layer = 0; layer < RIG_LAYERS; layer++) {
        const size_t at = rig_weight_offset(layer, 0) + 9000;
        CHECK(fseek(out, (long)at, SEEK_SET) == 0 && fputc(r->file[at] ^ 1, out) != EOF);
    }
    CHECK(fclose(out) == 0);
}

static void test_model_changed(void) {
    rig r;
    rig_make(&r, plain, false);
    evict_all(&r);
    flip_bytes(&r);
    CHECK(wait_within_use(&r, r.weights[0]) == NEAP_E_CHANGED);
    CHECK(wait_within_use(&r, r.weights[0]) == NEAP_E_CHANGED);
    uint64_t bytes;
    CHECK(neap_restore(r.engine, &bytes) == NEAP_E_CHANGED);
    const neap_stat stat = stat_of(&r);
    CHECK(stat.errors > 0 && strstr(stat.last_error, "weights of layer"));
    neap_check(r.engine);
    rig_write_model(&r); /* put back */
    rig_check_all(&r);

    /* Another file of that name does not matter while the first one is open. */
    evict_all(&r);
    char other[128];
    snprintf(other, sizeof other, "%s.other", r.model);
    CHECK(rename(r.model, other) == 0);
    rig_write_model(&r);
    flip_bytes(&r);
    rig_check_all(&r);
    /* Now the first is changed too, and then the second is put right: it serves. */
    evict_all(&r);
    CHECK(truncate(other, 5000) == 0);
    CHECK(wait_within_use(&r, r.weights[0]) == NEAP_E_CHANGED);
    rig_write_model(&r);
    rig_check_all(&r);
    evict_all(&r);
    rig_check_all(&r);
    CHECK(unlink(other) == 0);
    rig_free(&r);
}

/* ---- damaged records ---- */

/* Overwrites a byte in every block of the (unnamed) swap file. */
static void damage_swap(const rig *r) {
    DIR *dir = opendir("/proc/self/fd");
    CHECK(dir);
    int n_damaged = 0;
    for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir)) {
        char path[300], target[300];
        snprintf(path, sizeof path, "/proc/self/fd/%s", entry->d_name);
        const ssize_t len = readlink(path, target, sizeof target - 1);
        if (len <= 0) continue;
        target[len] = '\0';
        if (strncmp(target, r->swap, strlen(r->swap)) != 0) continue;
        const int fd = atoi(entry->d_name);
        if (fcntl(fd, F_GETFL) & O_DIRECT) continue;
        struct stat st;
        CHECK(fstat(fd, &st) == 0);
        for (off_t at = 0; at < st.st_size; at += 4096) {
            unsigned char byte;
            CHECK(pread(fd, &byte, 1, at) == 1);
            byte ^= 0x10;
            CHECK(pwrite(fd, &byte, 1, at) == 1);
        }
        CHECK(fsync(fd) == 0);
        n_damaged++;
    }
    closedir(dir);
    CHECK(n_damaged == 1);
}

static bool is_zero(const rig_cache *cache, uint32_t stream, uint32_t chunk) {
    const neap_kv_plane *plane = &cache->layout.planes[0];
    const unsigned char *at = (unsigned char *)plane->base +
                              rig_cell_at(cache, 0, stream, chunk * NEAP_CHUNK_CELLS, 0, 0);
    for (size_t i = 0; i < NEAP_CHUNK_CELLS * plane->row_bytes; i++)
        if (at[i] != 0) return false;
    return true;
}

static void test_damaged_record(void) {
    rig r;
    rig_make(&r, plain, true);
    fill(&r, 700);
    rig_cache *cache = &r.caches[0];
    evict_all(&r);
    damage_swap(&r);
    CHECK(wait_within_use(&r, neap_kv_unit(cache->kv, 0, 0)) == NEAP_E_LOST);
    CHECK(wait_within_use(&r, neap_kv_unit(cache->kv, 0, 0)) == NEAP_E_LOST);
    uint64_t bytes;
    CHECK(neap_restore(r.engine, &bytes) == NEAP_E_LOST);
    CHECK(stat_of(&r).lost == stat_of(&r).units_kv_evicted && stat_of(&r).lost > 5);
    CHECK(r.rebuilt == 1 && neap_unit_resident(r.engine, r.weights[RIG_LAYERS]));
    neap_check(r.engine);

    const neap_unit_id unit = neap_kv_unit(cache->kv, 0, 1);
    neap_use_begin(r.engine, NEAP_USE_COMPUTE);
    CHECK(neap_need(r.engine, &unit, 1) == 0);
    CHECK(neap_kv_write(cache->kv, 0, 0, 100, true) == NEAP_E_LOST); /* not all that was there */
    CHECK(neap_kv_write(cache->kv, 0, 0, 256, false) == NEAP_E_LOST);
    CHECK(neap_kv_write(cache->kv, 0, 0, 256, true) == 0); /* all of it */
    CHECK(neap_unit_resident(r.engine, neap_kv_unit(cache->kv, 0, 0)));
    CHECK(neap_kv_forget(cache->kv, 0, 0) == -EINVAL);
    CHECK(neap_kv_forget(cache->kv, 0, 1) == 0);
    CHECK(neap_unit_resident(r.engine, unit) && is_zero(cache, 0, 1));
    neap_use_end(r.engine, NEAP_USE_COMPUTE);
    for (int i = 0; i < RIG_CACHES; i++) {
        CHECK(neap_kv_clear(r.caches[i].kv) == 0);
        rig_forget_cache(&r.caches[i]);
    }
    CHECK(stat_of(&r).lost == 0);
    fill(&r, 300);
    evict_all(&r);
    rig_check_all(&r);
    rig_free(&r);
}

/* ---- memory that the kernel does not take back ---- */

static void fill_chunk(rig *r) {
    rig_random random = {815};
    neap_use_begin(r->engine, NEAP_USE_COMPUTE);
    CHECK(rig_write(r, &r->caches[0], &random, 0, 0, NEAP_CHUNK_CELLS, true) == 0);
    neap_use_end(r->engine, NEAP_USE_COMPUTE);
}

/* The pages of a plane wholly in its first chunk are zero. */
static bool pages_are_zero(const rig_cache *cache, int plane) {
    const neap_kv_plane *p = &cache->layout.planes[plane];
    const uintptr_t page = neap_vm_page(), base = (uintptr_t)p->base;
    const unsigned char *at = (unsigned char *)NEAP_ROUND_UP(base, page);
    const unsigned char *end =
        (unsigned char *)NEAP_ROUND_DOWN(base + NEAP_CHUNK_CELLS * p->row_bytes, page);
    CHECK(at < end);
    while (at < end && *at == 0)
        at++;
    return at == end;
}

/* A chunk's second plane stays: what is said to have gone is what went, and nothing of the cells
 * can be read where they were. */
static void test_plane_stays(void) {
    rig r;
    rig_make(&r, (neap_options){.codec = "none"}, false);
    fill_chunk(&r);
    const uint64_t before = stat_of(&r).kv_resident;
    const neap_evict_request request = {.bytes = UINT64_MAX, .only = NEAP_ONLY_KV};
    neap_evict_result result;
    neap_fault_arm("vm.drop", 2, -EAGAIN, 0);
    CHECK(neap_evict(r.engine, &request, &result) == 0);
    CHECK(neap_fault_fired() == 1);
    neap_fault_disarm();
    rig_note_evicted(&r);
    neap_check(r.engine);
    CHECK(stat_of(&r).units_kv_evicted == 1);
    CHECK(result.released_bytes > 0 && result.released_bytes < before / 2 + neap_vm_page());
    CHECK(before - stat_of(&r).kv_resident == result.released_bytes);
    CHECK(pages_are_zero(&r.caches[0], 0) && pages_are_zero(&r.caches[0], 1));
    rig_check_all(&r);
    CHECK(stat_of(&r).kv_resident == before);
    rig_free(&r);
}

/* What a damaged copy left is not taken for cells. */
static void test_lost_stays(void) {
    rig r;
    rig_make(&r, plain, false);
    fill_chunk(&r);
    evict_all(&r);
    damage_swap(&r);
    const neap_unit_id unit = neap_kv_unit(r.caches[0].kv, 0, 0);
    neap_fault_arm("vm.drop", 1, -EAGAIN, 1);
    CHECK(wait_within_use(&r, unit) == NEAP_E_LOST && neap_fault_fired() > 0);
    neap_fault_disarm();
    neap_check(r.engine);
    neap_use_begin(r.engine, NEAP_USE_COMPUTE);
    CHECK(neap_kv_forget(r.caches[0].kv, 0, 0) == 0 && is_zero(&r.caches[0], 0, 0));
    neap_use_end(r.engine, NEAP_USE_COMPUTE);
    rig_free(&r);
}

/* ---- every call failing in turn ---- */

static bool try_round(rig *r, rig_random *random) {
    bool all = true;
    const neap_evict_request request = {.bytes = UINT64_MAX};
    neap_evict_result result;
    all = neap_evict(r->engine, &request, &result) == 0 && all;
    rig_note_evicted(r);
    neap_use_begin(r->engine, NEAP_USE_COMPUTE);
    all = neap_need(r->engine, r->weights, RIG_WEIGHTS) == 0 && all;
    for (int i = 0; i < RIG_WEIGHTS; i++) {
        if (neap_wait(r->engine, r->weights[i]) == 0)
            CHECK(rig_weights_right(r, i));
        else
            all = false;
    }
    for (int i = 0; i < RIG_CACHES; i++) {
        const neap_unit_id unit = neap_kv_unit(r->caches[i].kv, 1, 1);
        if (neap_wait(r->engine, unit) != 0 ||
            neap_kv_write(r->caches[i].kv, 1, 256, 9, false) != 0)
            all = false;
        else
            CHECK(rig_write(r, &r->caches[i], random, 1, 256, 9, false) == 0);
    }
    neap_use_end(r->engine, NEAP_USE_COMPUTE);
    uint64_t bytes;
    return neap_restore(r->engine, &bytes) == 0 && all;
}

static uint32_t walk(const char *prefix, int err, int sticky, const char *codec,
                     const char *policy) {
    rig r;
    rig_random random = {99};
    uint32_t n_fired = 0, n = 1;
    rig_make(&r, (neap_options){.codec = codec, .policy = policy, .poison = true}, true);
    fill(&r, 700);
    for (bool fired = true; fired && n < 3000; n++) {
        neap_fault_arm(prefix, n, err, sticky);
        (void)try_round(&r, &random);
        fired = neap_fault_fired() > 0;
        n_fired += fired;
        neap_fault_disarm();
        CHECK(try_round(&r, &random));
        CHECK(stat_of(&r).lost == 0);
        if (n % 16 == 0) rig_check_all(&r);
    }
    CHECK(n < 3000);
    rig_check_all(&r);
    neap_check(r.engine);
    rig_free(&r);
    return n_fired;
}

static void test_walk(void) {
    const char *prefixes[] = {"file.read",   "file.write",  "file.punch", "ring.read",
                              "ring.submit", "vm.populate", "vm.protect", "vm.drop",
                              "vm.held",     "vm.reserve",  "thread."};
    for (size_t i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++)
        for (int sticky = 0; sticky < 2; sticky++) {
            const char *codec = sticky ? "q8" : "none";
            const uint32_t fired = walk(prefixes[i], -EIO, sticky, codec, "hybrid");
            const uint32_t apart = walk(prefixes[i], -EIO, sticky, codec, "mz-rp");
            printf("%s%s: failed at %u places, at %u with pages committed first\n", prefixes[i],
                   sticky ? " for good" : "", fired, apart);
        }
}

int main(void) {
    test_no_room(true);
    test_no_room(false);
    test_no_room_but_memory();
    test_rebuild();
    test_read_error();
    test_model_changed();
    test_damaged_record();
    test_plane_stays();
    test_lost_stays();
    test_walk();
    return 0;
}
