/* test_engine_lowram.c - codec lowram of an engine: the first eviction fits the context, chunks of
 * four layers go together and come back the same from then on, what the context grew by is coded
 * with the same fit, another context gets another; what it is not for is q8's, and said. While idle
 * fits are made in advance, anew when the context has changed, and given up when it is used. Option
 * kv: the fit is made when a prompt has ended, chunks are held as it codes them, and read so. */
#include <errno.h>
#include <math.h>
#include <unistd.h>

#include "clock.h"
#include "lowram_problem.h"
#include "neap.h"
#include "temp.h"
#include "vm.h"

enum {
    LAYERS = 5,
    CELLS = 2680,
    USED = 1100,
    GROWN = 1300,
    MOST = 2600,
    FULL = 4,
    K_ROW = 64,
    V_ROW = 48,
    BATCH = 128
};

static const lowram_shape shape = {LAYERS, 2, 32, 24, CELLS, 10, NEAP_KLT_ROPE_NEOX, 16, 0.02f};

typedef struct world {
    char *dir;
    neap_engine *engine;
    neap_region *region;
    neap_kv *kv[LAYERS];
    char *k[LAYERS], *v[LAYERS];
    int32_t positions[CELLS];
} world;

static void add_context(world *w, bool with_rope) {
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

/* idle_ns 0: it is never idle. */
static void start_with(world *w, const char *codec, const char *kv, bool with_rope,
                       uint64_t idle_ns) {
    *w = (world){.dir = temp_dir()};
    const neap_options options = {.program = "test",
                                  .codec = codec,
                                  .kv = kv,
                                  .swap_dir = w->dir,
                                  .no_control = true,
                                  .poison = true,
                                  .write_behind_on_battery = true,
                                  .idle_ns = idle_ns ? idle_ns : UINT64_MAX / 4};
    CHECK(neap_engine_create(&options, &w->engine) == 0);
    add_context(w, with_rope);
}

static void start(world *w, const char *codec, bool with_rope) {
    start_with(w, codec, NULL, with_rope, 0);
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
    /* Of what is held coded records move, too. */
    if (strcmp(before.kv, "f16") == 0) check_bytes(&before, &stat, &result);
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
    /* The tails are q8's; the fit is counted with the memory that it takes. */
    CHECK(stat.kv_ratio > 1.5 && stat.kv_ratio < 4);
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
    CHECK(stat.klt_refused == 2 * LAYERS && stat.contexts[0].klt_refused == 2 * LAYERS);
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
    CHECK(strstr(stat.codec_note, "q8 instead: no cache of this model has keys") != NULL);
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

/* ---- while idle ---- */

/* Until a fit of so many cells was made while idle. */
static void wait_for_fit(const world *w, uint32_t n_cells) {
    const uint64_t until_ns = neap_clock_ns() + 60000000000u;
    char text[64];
    neap_stat stat;
    snprintf(text, sizeof text, "fitted to %u cells", n_cells);
    do {
        CHECK(neap_clock_ns() < until_ns);
        usleep(1000);
        neap_stat_get(w->engine, &stat);
    } while (!strstr(stat.codec_note, text) || !strstr(stat.codec_note, "while idle"));
}

static void test_idle(void) {
    world w;
    lowram_problem p, other;
    lowram_problem_make(&p, &shape, 25);
    lowram_problem_make(&other, &shape, 26);
    start_with(&w, "lowram:4", NULL, true, 1000000);
    put(&w, &p, 0, USED);
    wait_for_fit(&w, 1024);
    neap_stat stat;
    neap_stat_get(w.engine, &stat);
    CHECK(stat.fit_bytes > 0 && stat.kv_compressed_memory == stat.fit_bytes);
    CHECK(stat.contexts[0].fit_bytes == stat.fit_bytes && stat.units_kv_evicted == 0);
    const uint64_t before = sum_of(&w);
    put(&w, &other, 0, 256); /* a part is written anew: the fit stays, and refuses it */
    put(&w, &p, 0, 256);
    CHECK(sum_of(&w) == before);

    put(&w, &p, USED, 1500); /* five chunks: less than twice the three */
    usleep(200000);
    stat = evict(&w);
    CHECK(strstr(stat.codec_note, "fitted to 1024 cells") && strstr(stat.codec_note, "while idle"));
    CHECK(stat.klt_chunks == LAYERS * 5 && stat.klt_left == LAYERS && stat.klt_error < 1.5);
    restore(&w);
    check_loss(&w, &p, 5 * 256);

    /* A coded context grows by what its fit is not for: that gets its own, and those chunks keep
     * the one that coded them. */
    const uint64_t one_fit = stat.fit_bytes;
    put(&w, &other, 5 * 256, MOST);
    wait_for_fit(&w, 1280);
    stat = evict(&w);
    CHECK(stat.klt_chunks == LAYERS * 10 && stat.klt_left == LAYERS && stat.klt_error < 1.5);
    CHECK(stat.fit_bytes > one_fit);
    restore(&w);
    check_loss(&w, &p, 5 * 256);
    for (int l = 0; l < LAYERS; l++)
        CHECK(loss(&w, &other, l, true, 5 * 256, 10 * 256) < 0.1);

    /* All is written anew: a fit of all, and the other two are given back. */
    put(&w, &other, 0, MOST);
    wait_for_fit(&w, 2560);
    stat = evict(&w);
    CHECK(stat.klt_chunks == LAYERS * 10 && stat.klt_error < 1.5);
    CHECK(stat.fit_bytes < 2 * one_fit);
    restore(&w);
    check_loss(&w, &other, 10 * 256);
    stop(&w);
    lowram_problem_free(&p);
    lowram_problem_free(&other);
}

/* Uses and evictions at any time while fits are made: nothing is lost, and in the end one is made.
 */
static void test_interrupted(void) {
    world w;
    lowram_problem p;
    neap_stat stat;
    lowram_problem_make(&p, &shape, 27);
    start_with(&w, "lowram:4", NULL, true, 1);
    put(&w, &p, 0, USED);
    for (uint32_t i = 0; i < 200; i++) {
        usleep(i * 37 % 5000);
        if (i % 40 == 39) {
            evict(&w);
            restore(&w);
        }
        put(&w, &p, 0, USED);
        if (i % 50 == 49) CHECK(neap_kv_clear(w.kv[i / 50]) == 0);
    }
    const uint64_t exact = sum_of(&w);
    put(&w, &p, 0, USED);
    wait_for_fit(&w, 1024);
    CHECK(exact != 0 && loss(&w, &p, 0, false, 0, USED) == 0);
    stat = evict(&w);
    CHECK(stat.klt_chunks == LAYERS * FULL);
    restore(&w);
    check_loss(&w, &p, 1024);
    stop(&w);
    lowram_problem_free(&p);
}

/* ---- held coded ---- */

static neap_stat stat_of(const world *w) {
    neap_stat stat;
    neap_stat_get(w->engine, &stat);
    return stat;
}

static void prompt(world *w, const lowram_problem *p, uint32_t first, uint32_t end) {
    for (uint32_t at = first; at < end; at += BATCH)
        put(w, p, at, at + BATCH < end ? at + BATCH : end);
}

/* How many of the first chunks are coded, in all layers. */
static uint32_t n_coded(const world *w) {
    uint32_t n = 0;
    while (neap_kv_is_coded(w->kv[0], 0, n))
        n++;
    for (int l = 0; l < LAYERS; l++)
        for (uint32_t c = 0; c < CELLS / 256; c++)
            CHECK(neap_kv_is_coded(w->kv[l], 0, c) == (c < n));
    return n;
}

/* Rows and heads as they are read, before and after the pages are there. */
static void check_reading(world *w, int l, uint32_t chunk) {
    enum { FIRST = 77, N = 11 };
    static char whole[2][256 * 2 * K_ROW], part[2][256 * 2 * K_ROW];
    const size_t row[2] = {2 * K_ROW, 2 * V_ROW};
    void *const rows[2] = {whole[0], whole[1]}, *const parts[2] = {part[0], part[1]};
    const size_t size = NEAP_ROUND_UP(neap_kv_read_scratch(w->kv[l]), 64);
    void *scratch = aligned_alloc(64, size);
    CHECK(scratch);
    neap_use_begin(w->engine, NEAP_USE_COMPUTE);
    CHECK(neap_kv_read(w->kv[l], 0, chunk, 0, 256, rows, scratch) == 0);
    CHECK(neap_kv_read(w->kv[l], 0, chunk, FIRST, N, parts, scratch) == 0);
    for (int plane = 0; plane < 2; plane++)
        CHECK(memcmp(part[plane], whole[plane] + FIRST * row[plane], N * row[plane]) == 0);
    memset(part, 0x55, sizeof part);
    CHECK(neap_kv_read_head(w->kv[l], 0, chunk, FIRST, N, 1, parts, scratch) == 0);
    for (int plane = 0; plane < 2; plane++)
        for (size_t i = 0; i < N * row[plane]; i++)
            CHECK(part[plane][i] ==
                  (i % row[plane] < row[plane] / 2 ? 0x55 : whole[plane][FIRST * row[plane] + i]));
    CHECK(neap_kv_read_head(w->kv[l], 0, chunk, FIRST, N, 2, parts, scratch) == NEAP_E_BOUND);
    CHECK(neap_wait(w->engine, neap_kv_unit(w->kv[l], 0, chunk)) == 0);
    CHECK(memcmp(w->k[l] + chunk * 256 * row[0], whole[0], 256 * row[0]) == 0);
    CHECK(memcmp(w->v[l] + chunk * 256 * row[1], whole[1], 256 * row[1]) == 0);
    neap_use_end(w->engine, NEAP_USE_COMPUTE);
    free(scratch);
}

/* Nothing during the prompt, nor while idle; then a fit, and what is old enough is coded; it never
 * serves another context, neither beside it nor after it. */
static void test_held(void) {
    world w, beside = {0};
    lowram_problem p, other;
    lowram_problem_make(&p, &shape, 25);
    lowram_problem_make(&other, &shape, 26);
    start_with(&w, NULL, "lowram:3", true, 1000000);
    prompt(&w, &p, 0, USED);
    usleep(100000);
    neap_stat stat = stat_of(&w);
    CHECK(n_coded(&w) == 0 && strcmp(stat.kv, "f16") == 0 && !neap_kv_is_held_coded(w.kv[0]));
    CHECK(neap_kv_may_be_held_coded(w.kv[0]) && stat.kv_compressed_memory == 0);
    const uint64_t f16 = stat.kv_resident;

    put(&w, &p, USED, USED + 1);
    stat = stat_of(&w);
    CHECK(n_coded(&w) == FULL - 1 && neap_kv_is_held_coded(w.kv[0]));
    CHECK(strcmp(stat.kv, "lowram-3") == 0 && strcmp(stat.contexts[0].kv, "lowram-3") == 0);
    CHECK(strstr(stat.codec_note, "lowram-3, fitted to 1024 cells") != NULL);
    CHECK(stat.klt_chunks == LAYERS * (FULL - 1) && stat.klt_left == 0 && stat.kv_storage == 0);
    CHECK(stat.klt_error > 0.5 && stat.klt_error < 1.5);
    uint64_t held;
    CHECK(neap_vm_held(neap_region_base(w.region), neap_region_size(w.region), &held) == 0);
    CHECK(held - stat.kv_resident <= 4096u * LAYERS && held < f16 / 2); /* edges */
    for (int l = 0; l < LAYERS; l++)
        check_reading(&w, l, (uint32_t)l % (FULL - 1));
    CHECK(n_coded(&w) == FULL - 1);
    prompt(&w, &p, USED + 1, GROWN + 1);
    CHECK(n_coded(&w) == FULL);

    beside.engine = w.engine;
    add_context(&beside, true);
    put(&beside, &other, 0, 700);
    put(&beside, &other, 700, 701);
    CHECK(!neap_kv_is_held_coded(beside.kv[0]) && n_coded(&beside) == 0);
    neap_region_free(beside.region);

    prompt(&w, &other, 0, 500); /* chunks 2 and 3 are as they were */
    CHECK(strstr(stat_of(&w).codec_note, "fitted to 1024 cells") != NULL);
    CHECK(neap_kv_is_coded(w.kv[0], 0, 3) && !neap_kv_is_coded(w.kv[0], 0, 0));
    prompt(&w, &other, 500, GROWN + 1); /* now there is nothing left of the old context */
    CHECK(n_coded(&w) == 0 && !neap_kv_is_held_coded(w.kv[0]));
    CHECK(stat_of(&w).kv_compressed_memory == 0);
    put(&w, &other, GROWN + 1, GROWN + 2);
    CHECK(n_coded(&w) == FULL);
    CHECK(strstr(stat_of(&w).codec_note, "fitted to 1280 cells") != NULL);
    stat = evict(&w);
    CHECK(stat.klt_chunks == LAYERS * (FULL + 1));
    restore(&w);
    neap_use_begin(w.engine, NEAP_USE_COMPUTE);
    for (int l = 0; l < LAYERS; l++)
        for (uint32_t c = 0; c <= FULL; c++)
            CHECK(neap_wait(w.engine, neap_kv_unit(w.kv[l], 0, c)) == 0);
    check_loss(&w, &other, (FULL + 1) * 256);
    neap_use_end(w.engine, NEAP_USE_COMPUTE);
    stop(&w);
    lowram_problem_free(&p);
    lowram_problem_free(&other);
}

/* What is too short is exact while it stays, and q8's where it goes. */
static void test_held_short(void) {
    world w;
    lowram_problem p;
    lowram_problem_make(&p, &shape, 27);
    start_with(&w, "klt:4", "lowram", true, 0);
    put(&w, &p, 0, 700);
    put(&w, &p, 700, 701);
    CHECK(n_coded(&w) == 0 && strcmp(stat_of(&w).kv, "f16") == 0);
    const neap_stat stat = evict(&w);
    CHECK(strcmp(stat.codec, "q8") == 0 && stat.klt_chunks == 0);
    restore(&w);
    for (int l = 0; l < LAYERS; l++)
        CHECK(loss(&w, &p, l, false, 0, 701) < 1e-3);
    stop(&w);
    start_with(&w, NULL, "lowram:64", true, 0);
    put(&w, &p, 0, USED);
    put(&w, &p, USED, USED + 1);
    CHECK(n_coded(&w) == 0 && strstr(stat_of(&w).codec_note,
                                     "f16 instead: a context of 2680 tokens is too short") != NULL);
    stop(&w);
    lowram_problem_free(&p);
}

static void test_options(void) {
    neap_engine *engine;
    const char *const wrong[] = {"lowram:", "lowram:1", "lowram:x", "lowramx", "lowram:999"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK(neap_engine_create(&(neap_options){.codec = wrong[i], .no_control = true}, &engine) ==
              NEAP_E_UNKNOWN);
        CHECK(neap_engine_create(&(neap_options){.kv = wrong[i], .no_control = true}, &engine) ==
              NEAP_E_UNKNOWN);
    }
}

int main(void) {
    test_contexts();
    test_instead();
    test_pressure();
    test_idle();
    test_interrupted();
    test_held();
    test_held_short();
    test_options();
    return 0;
}
