/* test_engine_lowram.c - codec lowram of an engine: the first eviction fits the context, chunks of
 * four layers go together and come back the same from then on, what the context grew by is coded
 * with the same fit, another context gets another; what it is not for is q8's, and said. */
#include <errno.h>
#include <math.h>
#include <unistd.h>

#include "lowram_problem.h"
#include "neap.h"
#include "temp.h"

enum { LAYERS = 5, CELLS = 1400, USED = 1100, GROWN = 1300, FULL = 4, K_ROW = 64, V_ROW = 48 };

static const lowram_shape shape = {LAYERS, 2, 32, 24, CELLS, 10, NEAP_KLT_ROPE_NEOX, 16, 0.02f};

typedef struct world {
    char *dir;
    neap_engine *engine;
    neap_region *region;
    neap_kv *kv[LAYERS];
    char *k[LAYERS], *v[LAYERS];
    int32_t positions[CELLS];
} world;

static void start(world *w, const char *codec, bool with_rope) {
    *w = (world){.dir = temp_dir()};
    const neap_options options = {
        .program = "test", .codec = codec, .swap_dir = w->dir, .no_control = true, .poison = true};
    CHECK(neap_engine_create(&options, &w->engine) == 0);
    const size_t layer_bytes = (size_t)CELLS * 2 * (K_ROW + V_ROW);
    CHECK(neap_region_create(w->engine, LAYERS * layer_bytes, NEAP_REGION_KV, &w->region) == 0);
    for (int32_t i = 0; i < CELLS; i++)
        w->positions[i] = i;
    for (int l = LAYERS - 1; l >= 0; l--) { /* in no order */
        w->k[l] = (char *)neap_region_base(w->region) + (size_t)l * layer_bytes;
        w->v[l] = w->k[l] + (size_t)CELLS * 2 * K_ROW;
        const neap_kv_layout layout = {.layer = l,
                                       .n_cells = CELLS,
                                       .n_streams = 1,
                                       .n_planes = 2,
                                       .planes = {{w->k[l], 2 * K_ROW, K_ROW, NEAP_KV_F16, false},
                                                  {w->v[l], 2 * V_ROW, V_ROW, NEAP_KV_F16, false}},
                                       .positions = w->positions};
        CHECK(neap_kv_add(w->engine, &layout, &w->kv[l]) == 0);
        const neap_kv_rope rope = {.mode = 2,
                                   .n_dims = 16,
                                   .freq_base = l == 1 ? 100 : 1000, /* lowram_problem_make */
                                   .freq_scale = 1,
                                   .attn_factor = 1};
        if (with_rope) CHECK(neap_kv_set_rope(w->kv[l], 32, &rope) == 0);
    }
}

static void stop(world *w) {
    neap_check(w->engine);
    neap_region_free(w->region);
    neap_engine_free(w->engine);
    temp_remove(w->dir);
}

static void put(world *w, const lowram_problem *p, uint32_t first, uint32_t end) {
    neap_use_begin(w->engine, NEAP_USE_COMPUTE);
    for (int l = 0; l < LAYERS; l++) {
        CHECK(neap_kv_write(w->kv[l], 0, first, end - first, true) == 0);
        for (uint32_t r = first; r < end; r++) {
            memcpy(w->k[l] + (size_t)r * 2 * K_ROW, lowram_row(&p->k[l], r), 2 * K_ROW);
            memcpy(w->v[l] + (size_t)r * 2 * V_ROW, lowram_row(&p->v[l], r), 2 * V_ROW);
        }
    }
    neap_use_end(w->engine, NEAP_USE_COMPUTE);
}

/* Whether the fit is counted: in the ratio of a context, and against what was released. */
static void check_bytes(const neap_stat *before, const neap_stat *after,
                        const neap_evict_result *result) {
    const uint64_t gone = before->kv_resident - after->kv_resident;
    const int64_t fits =
        (int64_t)after->kv_compressed_memory - (int64_t)before->kv_compressed_memory;
    CHECK((int64_t)result->released_bytes == (int64_t)gone - fits);
    CHECK(after->released == after->kv_total - after->kv_resident - after->kv_compressed_memory);
    CHECK(after->n_context_stats == 1);
    /* Pages at the edges of chunks stay. */
    const uint64_t kept = after->kv_resident + after->kv_compressed_memory + after->kv_storage;
    const double raw = (double)after->tokens * LAYERS * 2 * (K_ROW + V_ROW);
    CHECK(fabs(after->contexts[0].kv_ratio * (double)kept / raw - 1) < 1e-6);
}

static neap_stat evict(world *w) {
    const neap_evict_request request = {.bytes = UINT64_MAX, .only = NEAP_ONLY_KV};
    neap_evict_result result;
    neap_stat before, stat;
    neap_stat_get(w->engine, &before);
    CHECK(neap_evict(w->engine, &request, &result) == 0);
    neap_stat_get(w->engine, &stat);
    check_bytes(&before, &stat, &result);
    CHECK(stat.units_kv_evicted == stat.units_kv && stat.last_error[0] == '\0');
    neap_check(w->engine);
    return stat;
}

static void restore(world *w) {
    uint64_t bytes;
    CHECK(neap_restore(w->engine, &bytes) == 0);
    neap_check(w->engine);
}

/* Squares of the differences over squares, of K or of V. */
static double loss(const world *w, const lowram_problem *p, int l, bool is_v, uint32_t first,
                   uint32_t end) {
    double off = 0, power = 0;
    const uint32_t row = is_v ? V_ROW : K_ROW;
    const neap_klt_plane now = {is_v ? w->v[l] : w->k[l], 2 * (size_t)row};
    for (uint32_t r = first; r < end; r++)
        off += lowram_off(is_v ? &p->v[l] : &p->k[l], &now, r, row, &power);
    return off / power;
}

static void check_loss(const world *w, const lowram_problem *p, uint32_t end) {
    for (int l = 0; l < LAYERS; l++) {
        CHECK(loss(w, p, l, false, 0, 4) < 1e-9 && loss(w, p, l, true, 0, 4) < 1e-9);
        CHECK(loss(w, p, l, false, 4, end) < 0.02 && loss(w, p, l, true, 4, end) < 0.1);
        CHECK(loss(w, p, l, true, 4, end) > 1e-4);
    }
}

static uint64_t sum_of(const world *w) {
    return neap_checksum(neap_region_base(w->region), (size_t)LAYERS * CELLS * 2 * (K_ROW + V_ROW));
}

static void test_contexts(void) {
    world w;
    lowram_problem p, other;
    lowram_problem_make(&p, &shape, 21);
    lowram_problem_make(&other, &shape, 22);
    start(&w, "lowram:4", true);
    put(&w, &p, 0, USED);
    neap_stat stat = evict(&w);
    CHECK(strcmp(stat.codec, "lowram") == 0);
    CHECK(strstr(stat.codec_note, "lowram-4, fitted to 1024 cells") != NULL);
    CHECK(stat.klt_chunks == LAYERS * FULL && stat.klt_left == LAYERS); /* the tails */
    CHECK(stat.klt_error > 0.5 && stat.klt_error < 1.5);
    CHECK(stat.kv_ratio > 3 && stat.kv_ratio < 4); /* the tails are q8's, the fit is counted */
    restore(&w);
    check_loss(&w, &p, FULL * 256);
    const uint64_t rounded = sum_of(&w), written = stat.bytes_written_storage;
    stat = evict(&w);
    CHECK(stat.bytes_written_storage == written);
    restore(&w);
    CHECK(sum_of(&w) == rounded);

    put(&w, &p, USED, GROWN); /* the fifth chunk is full */
    stat = evict(&w);
    CHECK(stat.klt_chunks == LAYERS * (FULL + 1) && stat.klt_left == LAYERS);
    CHECK(stat.klt_error < 1.5);
    CHECK(strstr(stat.codec_note, "fitted to 1024 cells") != NULL);
    restore(&w);
    check_loss(&w, &p, 1280);

    put(&w, &other, 0, 512); /* of another kind: the old fit does not serve */
    stat = evict(&w);
    CHECK(stat.klt_chunks == LAYERS * (FULL - 1) && stat.klt_left >= 2 * LAYERS);
    restore(&w);
    for (int l = 0; l < LAYERS; l++)
        CHECK(loss(&w, &other, l, false, 0, 512) < 1e-3 &&
              loss(&w, &other, l, true, 0, 512) < 1e-3);
    put(&w, &other, 0, GROWN);
    stat = evict(&w);
    CHECK(stat.klt_chunks == LAYERS * (FULL + 1) && stat.klt_error < 1.5);
    CHECK(strstr(stat.codec_note, "fitted to 1280 cells") != NULL);
    restore(&w);
    check_loss(&w, &other, 1280);
    stop(&w);
    lowram_problem_free(&p);
    lowram_problem_free(&other);
}

/* Too short for the ratio; keys whose turns nobody told. */
static void test_instead(void) {
    world w;
    lowram_problem p;
    lowram_problem_make(&p, &shape, 23);
    start(&w, "lowram:8", true);
    put(&w, &p, 0, 300);
    neap_stat stat = evict(&w);
    CHECK(strcmp(stat.codec, "q8") == 0 && stat.klt_chunks == 0);
    const char *said = strstr(stat.codec_note, "q8 instead: a context of 300 tokens is too short");
    unsigned needed = 0;
    CHECK(said && sscanf(said, "%*[^,], which needs %u", &needed) == 1);
    restore(&w);
    stop(&w);
    CHECK(needed % 256 == 0 && needed > 256 && needed <= CELLS);
    for (uint32_t n = needed - 1; n <= needed; n++) {
        start(&w, "lowram:8", true);
        put(&w, &p, 0, n);
        CHECK((evict(&w).klt_chunks > 0) == (n == needed));
        stop(&w);
    }
    start(&w, "lowram", false);
    put(&w, &p, 0, USED);
    stat = evict(&w);
    CHECK(strcmp(stat.codec, "q8") == 0 && stat.klt_chunks == 0);
    CHECK(strstr(stat.codec_note, "no context yet") != NULL);
    restore(&w);
    stop(&w);
    lowram_problem_free(&p);
}

/* Memory that is short is released at once: no fit. */
static void test_pressure(void) {
    world w;
    lowram_problem p;
    lowram_problem_make(&p, &shape, 24);
    start(&w, "lowram", true);
    put(&w, &p, 0, USED);
    const neap_evict_request request = {
        .bytes = UINT64_MAX, .only = NEAP_ONLY_KV, .by_pressure = true};
    neap_evict_result result;
    neap_stat stat;
    CHECK(neap_evict(w.engine, &request, &result) == 0);
    neap_stat_get(w.engine, &stat);
    CHECK(stat.units_kv_evicted == stat.units_kv && stat.klt_chunks == 0);
    stop(&w);
    lowram_problem_free(&p);
}

static void test_options(void) {
    neap_engine *engine;
    const char *const wrong[] = {"lowram:", "lowram:1", "lowram:x", "lowramx", "lowram:999"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK(neap_engine_create(&(neap_options){.codec = wrong[i], .no_control = true}, &engine) ==
              NEAP_E_UNKNOWN);
}

int main(void) {
    test_contexts();
    test_instead();
    test_pressure();
    test_options();
    return 0;
}
