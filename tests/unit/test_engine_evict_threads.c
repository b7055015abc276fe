/* test_engine_evict_threads.c - an eviction on several threads takes the units that one on a single
 * thread takes, no fewer bytes than asked, and all of them come back as they were. */
#include <errno.h>

#include "core_int.h"
#include "fault.h"
#include "rig.h"

enum { MAX_UNITS = 256 };

/* Where each unit is: '.' resident, 'd' dropped, 's' in the swap file, 'm' coded in memory. */
typedef struct picture {
    char units[MAX_UNITS + 1];
    size_t n;
} picture;

static void draw(neap_unit *unit, void *ctx) {
    picture *p = ctx;
    const neap_unit_state state = neap_unit_state_of(unit);
    CHECK(p->n < MAX_UNITS && state != NEAP_UNIT_EVICTING);
    p->units[p->n++] = state != NEAP_UNIT_EVICTED ? '.'
                       : unit->memory.len > 0     ? 'm'
                       : unit->swap               ? 's'
                                                  : 'd';
}

static picture picture_of(rig *r) {
    picture p = {.n = 0};
    neap_pool_each(r->engine->pool, draw, &p);
    return p;
}

static void fill(rig *r) {
    rig_random random = {4711};
    neap_use_begin(r->engine, NEAP_USE_COMPUTE);
    for (int i = 0; i < RIG_CACHES; i++)
        for (uint32_t s = 0; s < RIG_STREAMS; s++)
            CHECK(rig_write(r, &r->caches[i], &random, s, 0, RIG_CELLS, true) == 0);
    neap_use_end(r->engine, NEAP_USE_COMPUTE);
}

static neap_evict_result evict(rig *r, uint32_t permille) {
    const neap_evict_request request = {.permille = permille};
    neap_evict_result result;
    CHECK(neap_evict(r->engine, &request, &result) == 0);
    CHECK(result.released_bytes >= result.asked_bytes || result.exhausted);
    rig_note_evicted(r);
    neap_check(r->engine);
    return result;
}

static size_t n_different(const picture *a, const picture *b) {
    size_t n = 0;
    CHECK(a->n == b->n);
    for (size_t i = 0; i < a->n; i++)
        n += a->units[i] != b->units[i];
    return n;
}

static void compare(const char *codec, const char *policy) {
    const bool exact = strcmp(codec, "none") == 0;
    rig one, many;
    rig_make(&one, (neap_options){.codec = codec, .policy = policy, .evict_threads = 1}, false);
    rig_make(&many,
             (neap_options){.codec = codec, .policy = policy, .evict_threads = 4, .poison = true},
             false);
    fill(&one);
    fill(&many);
    for (uint32_t permille = 50; permille <= 1000; permille += 190) {
        for (int times = 0; times < 1 + exact; times++) { /* from all resident, and on from there */
            const neap_evict_result a = evict(&one, permille), b = evict(&many, permille);
            const picture x = picture_of(&one), y = picture_of(&many);
            /* Where sizes are known beforehand, the same units. A guess that is wrong costs or
             * saves a step for each thread. */
            if (n_different(&x, &y) > (exact ? 0 : 4)) {
                fprintf(stderr, "%s %s %u\n%s\n%s\n", codec, policy, permille, x.units, y.units);
                CHECK(false);
            }
            if (exact) CHECK(a.released_bytes == b.released_bytes);
        }
        rig_check_all(&one);
        rig_check_all(&many);
        const picture all = picture_of(&many);
        for (size_t i = 0; i < all.n; i++)
            CHECK(all.units[i] == '.');
    }
    rig_free(&one);
    rig_free(&many);
}

/* Without threads of its own, and with each copy of a unit failing in turn, nothing is lost. */
static void test_failing(void) {
    rig r;
    neap_fault_arm("thread.create", 1, -EAGAIN, 1);
    rig_make(&r, (neap_options){.evict_threads = 4, .poison = true}, false);
    neap_fault_disarm();
    fill(&r);
    evict(&r, 1000);
    rig_check_all(&r);
    rig_free(&r);

    static const char *const points[] = {"vm.reserve", "file.write"};
    rig_make(&r, (neap_options){.evict_threads = 4, .poison = true}, false);
    fill(&r);
    for (size_t i = 0; i < 2; i++)
        for (uint32_t n = 1; n < 20; n++) {
            neap_fault_arm(points[i], n, -EIO, 0);
            evict(&r, 400);
            neap_fault_disarm();
            rig_check_all(&r);
        }
    rig_free(&r);
}

int main(void) {
    static const char *const codecs[] = {"none", "q8"};
    for (size_t i = 0; i < 2; i++) {
        compare(codecs[i], "hybrid");
        compare(codecs[i], "partial-offload");
        compare(codecs[i], "memory-only");
    }
    test_failing();
    return 0;
}
