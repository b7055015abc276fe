/* test_huge_pages.c - chunks that come back side by side lie on huge pages, hold what they held,
 * and take no memory that is not theirs; one of them evicted alone leaves the others whole. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>

#include "check.h"
#include "neap.h"
#include "temp.h"
#include "vm.h"

enum { N_CELLS = 16 * 256 + 100, ROW_BYTES = 2048, N_PLANES = 2, SKIPPED = 77 };

/* Whether the kernel makes them where small pages were before. */
static bool has_huge_pages(void) {
    struct utsname name;
    int major = 0, minor = 0;
    CHECK(uname(&name) == 0 && sscanf(name.release, "%d.%d", &major, &minor) == 2);
    if (major < 6 || (major == 6 && minor < 14)) return false;
    char text[128] = "";
    FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "re");
    if (file && !fgets(text, sizeof text, file)) text[0] = '\0';
    if (file) fclose(file);
    return strstr(text, "[madvise]") || strstr(text, "[always]");
}

/* Bytes on huge pages of all mappings that begin in the range. */
static uint64_t huge_bytes(const char *base, size_t len) {
    FILE *smaps = fopen("/proc/self/smaps", "re");
    CHECK(smaps);
    char line[512];
    uint64_t total = 0, kib;
    bool inside = false;
    while (fgets(line, sizeof line, smaps)) {
        uintptr_t begin, end;
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &begin, &end) == 2)
            inside = begin < (uintptr_t)base + len && end > (uintptr_t)base;
        if (inside && sscanf(line, "AnonHugePages: %" SCNu64, &kib) == 1) total += kib << 10;
    }
    fclose(smaps);
    return total;
}

static uint16_t value_at(size_t i) {
    return (uint16_t)(0x3000 + i * 2654435761u % 0x800);
}

static void check_bytes(const char *base, size_t first_cell, size_t n_cells) {
    for (size_t plane = 0; plane < N_PLANES; plane++) {
        const uint16_t *elems = (const uint16_t *)(base + plane * N_CELLS * ROW_BYTES);
        for (size_t i = first_cell * 1024; i < (first_cell + n_cells) * 1024; i++)
            CHECK(elems[i] == value_at(plane + i));
    }
}

static uint64_t held(const char *base, size_t len) {
    uint64_t bytes;
    CHECK(neap_vm_held(base, len, &bytes) == 0);
    return bytes;
}

static void run(const char *dir, const char *codec, uint64_t kv_bytes) {
    const neap_options options = {
        .codec = codec, .swap_dir = dir, .no_control = true, .poison = true};
    neap_engine *engine;
    neap_region *region;
    neap_kv *kv;
    CHECK(neap_engine_create(&options, &engine) == 0);
    CHECK(neap_region_create(engine, N_PLANES * N_CELLS * ROW_BYTES, NEAP_REGION_KV, &region) == 0);
    char *base = neap_region_base(region);
    neap_kv_layout layout = {
        .n_cells = N_CELLS,
        .n_streams = 1,
        .n_planes = N_PLANES,
        .planes = {{base, ROW_BYTES, ROW_BYTES / 2, NEAP_KV_F16, false},
                   {base + N_CELLS * ROW_BYTES, ROW_BYTES, ROW_BYTES / 2, NEAP_KV_F16, false}}};
    CHECK(neap_kv_add(engine, &layout, &kv) == 0);
    neap_use_begin(engine, NEAP_USE_ACCESS);
    CHECK(neap_kv_write(kv, 0, 0, N_CELLS, true) == 0);
    for (size_t plane = 0; plane < N_PLANES; plane++)
        for (size_t i = 0; i < (size_t)N_CELLS * 1024; i++)
            ((uint16_t *)(base + plane * N_CELLS * ROW_BYTES))[i] = value_at(plane + i);
    neap_use_end(engine, NEAP_USE_ACCESS);
    const uint64_t whole = held(base, neap_region_size(region));
    CHECK(huge_bytes(base, neap_region_size(region)) == 0);

    neap_evict_result result;
    uint64_t bytes;
    const neap_evict_request all = {.bytes = UINT64_MAX, .only = NEAP_ONLY_KV};
    CHECK(neap_evict(engine, &all, &result) == 0 && result.released_bytes > kv_bytes / 3);
    CHECK(neap_restore(engine, &bytes) == 0);
    /* Two planes of 8 MiB, somewhere between pages of 2 MiB. */
    CHECK(huge_bytes(base, neap_region_size(region)) >= 2 * (6u << 20));
    CHECK(held(base, neap_region_size(region)) == whole);
    neap_use_begin(engine, NEAP_USE_ACCESS);
    if (strcmp(codec, "none") == 0) check_bytes(base, 0, N_CELLS);
    neap_use_end(engine, NEAP_USE_ACCESS);

    /* A chunk or two alone: only their pages go, and no more come back. */
    const neap_evict_request some = {.bytes = 1, .only = NEAP_ONLY_KV};
    CHECK(neap_evict(engine, &some, &result) == 0 && result.released_bytes > 0);
    const uint64_t rest = held(base, neap_region_size(region));
    CHECK(rest < whole && rest >= whole - 4 * 256 * ROW_BYTES);
    CHECK(neap_restore(engine, &bytes) == 0);
    CHECK(held(base, neap_region_size(region)) == whole);
    neap_use_begin(engine, NEAP_USE_ACCESS);
    if (strcmp(codec, "none") == 0) check_bytes(base, 0, N_CELLS);
    neap_use_end(engine, NEAP_USE_ACCESS);
    neap_check(engine);
    neap_region_free(region);
    neap_engine_free(engine);
}

int main(void) {
    if (!has_huge_pages()) {
        puts("huge pages are turned off, or Linux is older than 6.14");
        return SKIPPED;
    }
    char *dir = temp_dir();
    neap_vm_set_prefers_huge(true);
    run(dir, "none", 2 * (uint64_t)N_CELLS * ROW_BYTES);
    run(dir, "q8", 2 * (uint64_t)N_CELLS * ROW_BYTES);
    temp_remove(dir);
    return 0;
}
