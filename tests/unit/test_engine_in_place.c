/* Coded copies that stay in the chunk's own pages: what they keep and give back, what is not to be
 * had of them while they are there, and that nothing is lost by what fails. */
#include <errno.h>

#include "core_int.h"
#include "fault.h"
#include "rig.h"

enum { ROW = 512, CELLS = 2 * NEAP_CHUNK_CELLS + 20, PLANE = CELLS * ROW };
enum { CHUNK_PAGES = 2 * NEAP_CHUNK_CELLS * ROW / 4096 };

typedef struct world {
    rig r; /* for its engine */
    neap_region *region;
    neap_kv *kv;
    char *base;
    unsigned char before[2 * PLANE];
} world;

static void make(world *w, bool poison) {
    rig_make(&w->r, (neap_options){.codec = "q8", .policy = "memory-only", .poison = poison},
             false);
    neap_engine *engine = w->r.engine;
    CHECK(neap_region_create(engine, 2 * PLANE, NEAP_REGION_KV, &w->region) == 0);
    w->base = neap_region_base(w->region);
    const neap_kv_layout layout = {.layer = 50, /* goes first */
                                   .n_cells = CELLS,
                                   .n_streams = 1,
                                   .n_planes = 2,
                                   .planes = {{w->base, ROW, ROW / 2, NEAP_KV_F16, false},
                                              {w->base + PLANE, ROW, ROW / 2, NEAP_KV_F16, false}}};
    CHECK(neap_kv_add(engine, &layout, &w->kv) == 0);
}

static void drop(world *w) {
    neap_check(w->r.engine);
    neap_region_free(w->region);
    rig_free(&w->r);
}

static void write_cells(world *w, uint32_t n, uint64_t seed) {
    rig_random random = {seed};
    neap_use_begin(w->r.engine, NEAP_USE_ACCESS);
    CHECK(neap_kv_write(w->kv, 0, 0, n, true) == 0);
    for (int plane = 0; plane < 2; plane++)
        for (uint32_t i = 0; i < n * ROW / 2; i++)
            ((uint16_t *)(w->base + plane * PLANE))[i] = rig_value(&random);
    memcpy(w->before, w->base, sizeof w->before);
    neap_use_end(w->r.engine, NEAP_USE_ACCESS);
}

static neap_unit *unit_of(const world *w, uint32_t chunk) {
    return neap_pool_unit(w->r.engine->pool, neap_kv_unit(w->kv, 0, chunk));
}

static neap_evict_result evict(world *w, uint64_t bytes) {
    const neap_evict_request request = {.bytes = bytes, .only = NEAP_ONLY_KV};
    neap_evict_result result;
    CHECK(neap_evict(w->r.engine, &request, &result) == 0);
    return result;
}

static uint64_t held(const world *w) {
    uint64_t bytes;
    CHECK(neap_vm_held(w->base, neap_region_size(w->region), &bytes) == 0);
    return bytes;
}

static bool in_place(const world *w, uint32_t chunk) {
    const neap_unit *unit = unit_of(w, chunk);
    return neap_unit_state_of(unit) == NEAP_UNIT_EVICTED && unit->memory.len > 0 &&
           !unit->memory.stack;
}

static int wait_for(world *w, uint32_t chunk) {
    neap_use_begin(w->r.engine, NEAP_USE_ACCESS);
    const int err = neap_wait(w->r.engine, neap_kv_unit(w->kv, 0, chunk));
    neap_use_end(w->r.engine, NEAP_USE_ACCESS);
    return err;
}

/* Cells [0, n) of both planes are what they were but for q8's rounding; the next ones up to end are
 * zero. */
static bool is_right(const world *w, uint32_t n, uint32_t end) {
    for (int plane = 0; plane < 2; plane++) {
        const size_t at = (size_t)plane * PLANE;
        const uint16_t *now = (uint16_t *)(w->base + at), *then = (uint16_t *)(w->before + at);
        for (uint32_t i = 0; i < end * ROW / 2; i++)
            if (fabsf(rig_f16(now[i]) - (i < n * ROW / 2 ? rig_f16(then[i]) : 0)) >
                (i < n * ROW / 2 ? 2.0f / 127 : 0))
                return false;
    }
    return true;
}

static bool is_readable(const void *addr) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    const bool readable = write(ends[1], addr, 1) == 1;
    CHECK(readable || errno == EFAULT);
    close(ends[0]);
    close(ends[1]);
    return readable;
}

/* The two full chunks in place, the last one, of few pages, on the stack. */
static void test_there_and_back(void) {
    static world w;
    make(&w, true);
    write_cells(&w, CELLS, 1);
    const uint64_t whole = held(&w);
    const neap_evict_result result = evict(&w, 3 * CHUNK_PAGES * 4096 / 4);
    CHECK(in_place(&w, 0) && in_place(&w, 1) && unit_of(&w, 2)->memory.stack);
    neap_check(w.r.engine);
    uint64_t live, committed;
    neap_stack_usage(w.r.engine->pool->stack, &live, &committed);
    CHECK(live == unit_of(&w, 2)->memory.len);
    CHECK(result.released_bytes == whole - held(&w) - committed);
    neap_stat stat;
    neap_stat_get(w.r.engine, &stat);
    const uint64_t said = stat.kv_resident + stat.kv_compressed_memory - live;
    CHECK(said == held(&w));
    CHECK(!is_readable(w.base) && !is_readable(w.base + NEAP_CHUNK_CELLS * ROW));
    for (uint32_t chunk = 0; chunk < 3; chunk++)
        CHECK(wait_for(&w, chunk) == 0);
    CHECK(held(&w) == whole && is_right(&w, CELLS, CELLS));
    /* What was rounded stays as it is. */
    memcpy(w.before, w.base, sizeof w.before);
    evict(&w, 3 * CHUNK_PAGES * 4096 / 4);
    CHECK(in_place(&w, 0));
    uint64_t bytes;
    CHECK(neap_restore(w.r.engine, &bytes) == 0);
    CHECK(memcmp(w.before, w.base, sizeof w.before) == 0);
    drop(&w);
}

/* Where nothing else is left, copies leave memory for storage; a full disk leaves them. */
static void test_move_to_storage(void) {
    static world w;
    make(&w, true);
    write_cells(&w, CELLS, 2);
    evict(&w, 3 * CHUNK_PAGES * 4096 / 4);
    const uint64_t before = held(&w);
    neap_fault_arm("file.write", 1, -ENOSPC, 1);
    CHECK(evict(&w, UINT64_MAX).storage_error == -ENOSPC && held(&w) == before);
    neap_fault_disarm();
    CHECK(in_place(&w, 0) && !is_readable(w.base));
    neap_fault_arm("vm.protect", 1, -ENOMEM, 1);
    evict(&w, UINT64_MAX);
    neap_fault_disarm();
    CHECK(in_place(&w, 0) && held(&w) == before);
    const uint64_t kept = unit_of(&w, 0)->memory.len + unit_of(&w, 1)->memory.len;
    CHECK(evict(&w, UINT64_MAX).released_bytes >= kept);
    CHECK(unit_of(&w, 0)->swap && unit_of(&w, 0)->memory.len == 0 && !is_readable(w.base));
    neap_check(w.r.engine);
    for (uint32_t chunk = 0; chunk < 3; chunk++)
        CHECK(wait_for(&w, chunk) == 0);
    CHECK(is_right(&w, CELLS, CELLS));
    drop(&w);
}

/* Cells that are not in use read as zero, whatever lay there meanwhile. */
static void test_forgotten(void) {
    static world w;
    for (int fails = 0; fails < 2; fails++) {
        make(&w, true);
        const uint32_t n = NEAP_CHUNK_CELLS - 20;
        write_cells(&w, n, 3);
        evict(&w, 1);
        CHECK(in_place(&w, 0));
        if (fails) neap_fault_arm("vm.drop", 1, -EINVAL, 1);
        write_cells(&w, n, 4); /* instead of what is evicted */
        neap_fault_disarm();
        CHECK(wait_for(&w, 0) == 0 && is_right(&w, n, NEAP_CHUNK_CELLS));
        evict(&w, 1);
        CHECK(in_place(&w, 0));
        CHECK(wait_for(&w, 0) == 0 && is_right(&w, n, NEAP_CHUNK_CELLS));
        evict(&w, 1);
        CHECK(in_place(&w, 0));
        if (fails) neap_fault_arm("vm.drop", 1, -EINVAL, 1);
        CHECK(neap_kv_clear(w.kv) == 0);
        neap_fault_disarm();
        CHECK(is_right(&w, 0, CELLS));
        write_cells(&w, n, 5);
        evict(&w, 1); /* goes with its region */
        CHECK(in_place(&w, 0));
        drop(&w);
    }
}

/* An eviction that fails leaves every bit as it was, a restoration the copy. */
static void test_failing(void) {
    static world w;
    make(&w, true);
    write_cells(&w, 2 * NEAP_CHUNK_CELLS, 6);
    neap_fault_arm("vm.drop", 1, -EINVAL, 1);
    CHECK(evict(&w, UINT64_MAX).released_bytes == 0);
    neap_fault_disarm();
    CHECK(wait_for(&w, 0) == 0 && memcmp(w.base, w.before, sizeof w.before) == 0);
    evict(&w, CHUNK_PAGES * 4096 / 2);
    static const char *const points[] = {"vm.populate", "vm.reserve", "vm.protect"};
    for (size_t i = 0; i < 3; i++) {
        CHECK(in_place(&w, 0) && in_place(&w, 1));
        neap_fault_arm(points[i], 1, -ENOMEM, 1);
        CHECK(wait_for(&w, 0) == -ENOMEM);
        neap_fault_disarm();
        neap_check(w.r.engine);
    }
    CHECK(wait_for(&w, 0) == 0 && wait_for(&w, 1) == 0);
    CHECK(is_right(&w, 2 * NEAP_CHUNK_CELLS, CELLS));
    drop(&w);
}

/* A damaged copy is lost, and leaves nothing of itself behind. */
static void test_damaged(void) {
    static world w;
    make(&w, false);
    write_cells(&w, NEAP_CHUNK_CELLS, 7);
    evict(&w, 1);
    CHECK(in_place(&w, 0));
    w.base[0] ^= 1;
    CHECK(wait_for(&w, 0) == NEAP_E_LOST);
    uint64_t left;
    CHECK(neap_vm_held(w.base, NEAP_CHUNK_CELLS * ROW, &left) == 0 && left == 0);
    neap_check(w.r.engine);
    neap_use_begin(w.r.engine, NEAP_USE_ACCESS);
    CHECK(neap_kv_forget(w.kv, 0, 0) == 0);
    neap_use_end(w.r.engine, NEAP_USE_ACCESS);
    CHECK(is_right(&w, 0, CELLS));
    drop(&w);
}

/* Machines that prefer huge pages use the stack; a copy made before that comes back by itself. */
static void test_huge(void) {
    static world w;
    make(&w, true);
    write_cells(&w, 2 * NEAP_CHUNK_CELLS, 8);
    evict(&w, CHUNK_PAGES * 4096 / 2);
    CHECK(in_place(&w, 0) && in_place(&w, 1));
    neap_vm_set_prefers_huge(true);
    const neap_unit_id units[] = {neap_kv_unit(w.kv, 0, 0), neap_kv_unit(w.kv, 0, 1)};
    neap_use_begin(w.r.engine, NEAP_USE_ACCESS);
    CHECK(neap_need(w.r.engine, units, 2) == 0);
    neap_use_end(w.r.engine, NEAP_USE_ACCESS);
    CHECK(wait_for(&w, 0) == 0 && wait_for(&w, 1) == 0);
    CHECK(is_right(&w, 2 * NEAP_CHUNK_CELLS, CELLS));
    evict(&w, 1);
    CHECK(unit_of(&w, 1)->memory.stack);
    neap_vm_set_prefers_huge(false);
    drop(&w);
}

int main(void) {
    if (neap_vm_page() != 4096) SKIP("sizes are for pages of 4096 bytes");
    neap_vm_set_prefers_huge(false);
    test_there_and_back();
    test_move_to_storage();
    test_forgotten();
    test_failing();
    test_damaged();
    test_huge();
    return 0;
}
