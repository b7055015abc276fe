/* Chunks that klt codes together, with every system call failing in turn: nothing is lost, what is
 * there is what was written as klt or q8 rounds it, and once rounded it does not change. And what
 * is wanted at once comes back by one read. */
#include <errno.h>

#include "fault.h"
#include "klt_world.h"

enum { LAYERS = 4 };

static const klt_shape shape = {.n_blocks = 1,
                                .n_layers = LAYERS,
                                .n_heads = 1,
                                .heads_a_group = 1,
                                .k_dim = 16,
                                .v_dim = 16,
                                .mode = NEAP_KLT_ROPE_NORM,
                                .rope_dims = 16,
                                .magnitude = 1,
                                .bits = 2,
                                .decay = 1e-3,
                                .permille = 8,
                                .metric = true};

/* An eviction, two chunks waited for by themselves, the rest; one of them is written to. */
static void try_round(world *w) {
    const neap_evict_request request = {.bytes = UINT64_MAX, .only = NEAP_ONLY_KV};
    neap_evict_result result;
    CHECK(neap_evict(w->engine, &request, &result) == 0);
    neap_use_begin(w->engine, NEAP_USE_COMPUTE);
    (void)neap_wait(w->engine, neap_kv_unit(w->kv[1], 0, 0));
    (void)neap_wait(w->engine, neap_kv_unit(w->kv[3], 0, 1));
    neap_use_end(w->engine, NEAP_USE_COMPUTE);
    uint64_t bytes;
    (void)neap_restore(w->engine, &bytes);
}

static uint32_t walk(const char *prefix, int sticky, bool behind) {
    world w;
    uint32_t n_fired = 0, n = 1;
    make_world(&w, &shape, "joint");
    start(&w, (neap_options){.write_behind_bytes = behind ? (uint64_t)1 << 40 : 0,
                             .idle_ns = 1,
                             .write_behind_on_battery = true});
    for (bool fired = true; fired && n < 1000; n++) {
        fill(&w);
        char *exact = snapshot(&w);
        neap_fault_arm(prefix, n, -EIO, sticky);
        try_round(&w);
        fired = neap_fault_fired() > 0;
        n_fired += fired;
        neap_fault_disarm();
        try_round(&w); /* all that stayed is rounded now */
        CHECK(stat_of(&w).lost == 0 && neap_all_resident(w.engine));
        neap_check(w.engine);
        char *rounded = snapshot(&w);
        for (int i = 0; i < w.n_caches; i++)
            CHECK(loss(&w, exact, i) < (i < LAYERS ? 0.1 : 1e-4));
        try_round(&w);
        CHECK(same(&w, rounded));
        free(exact);
        free(rounded);
    }
    CHECK(n < 1000);
    stop(&w);
    free_world(&w);
    return n_fired;
}

/* Whether waiting for the chunks of the same cells went well while the n-th read of that name, and
 * those that follow, failed. */
static bool wait_for_all(world *w, const char *prefix, uint32_t n, uint32_t *ret_fired) {
    neap_unit_id units[LAYERS];
    bool all = true;
    evict(w);
    neap_fault_arm(prefix, n, -EIO, 1);
    neap_use_begin(w->engine, NEAP_USE_COMPUTE);
    for (int l = 0; l < LAYERS; l++)
        units[l] = neap_kv_unit(w->kv[l], 0, 0);
    CHECK(neap_need(w->engine, units, LAYERS) == 0);
    for (int l = 0; l < LAYERS; l++)
        all = neap_wait(w->engine, units[l]) == 0 && all;
    neap_use_end(w->engine, NEAP_USE_COMPUTE);
    *ret_fired = neap_fault_fired();
    neap_fault_disarm();
    restore(w);
    return all;
}

/* All reads but the first fail: one brings the chunks of all layers. */
static void test_one_read(void) {
    world w;
    make_world(&w, &shape, "joint");
    start(&w, (neap_options){0});
    fill(&w);
    uint32_t fired;
    const char *reads = "ring.read";
    if (wait_for_all(&w, reads, 1, &fired)) reads = "file.read";
    CHECK(!wait_for_all(&w, reads, 1, &fired) && fired > 0);
    CHECK(wait_for_all(&w, reads, 2, &fired) && fired == 0);
    stop(&w);
    free_world(&w);
}

int main(void) {
    const char *prefixes[] = {"file.read",  "file.write", "ring.read", "ring.submit", "vm.populate",
                              "vm.protect", "vm.drop",    "vm.held",   "vm.reserve",  "thread."};
    test_one_read();
    for (size_t i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++)
        for (int sticky = 0; sticky < 2; sticky++)
            printf("%s%s: failed at %u places, at %u with write-behind\n", prefixes[i],
                   sticky ? " for good" : "", walk(prefixes[i], sticky, false),
                   walk(prefixes[i], sticky, true));
    return 0;
}
