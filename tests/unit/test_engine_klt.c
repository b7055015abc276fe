/* Codec klt in the engine. With every profile of a model's file the first eviction rounds, every
 * later cycle is bit-identical, whatever the host does to positions meanwhile; what klt is not for
 * stays with q8; a file that is not there, damaged or of another model is said. With four layers
 * together the chunks of the same cells go with one eviction, into one record, and come back
 * together or alone; one that is written to leaves the others as they are; what is damaged is lost
 * for those that are away only. */
#include <errno.h>
#include <pthread.h>

#include "klt_world.h"
#include "vm.h"

enum { LAYERS = 4, CACHES = LAYERS + 1 }; /* of the joint profile */

typedef struct profile {
    const char *name, *note;
    const klt_shape *shape;
} profile;

static const klt_shape four_layers = {.n_blocks = 1,
                                      .n_layers = LAYERS,
                                      .n_heads = 1,
                                      .heads_a_group = 1,
                                      .k_dim = 32,
                                      .v_dim = 32,
                                      .mode = NEAP_KLT_ROPE_NEOX,
                                      .rope_dims = 32,
                                      .magnitude = 1,
                                      .bits = 2,
                                      .decay = 1e-3,
                                      .permille = 8,
                                      .metric = true};
static const profile layer = {"layer", "klt-layer-8; q8 for 1", &klt_two_layers};
static const profile joint = {"joint", "klt-joint-8; q8 for 1", &four_layers};

static void make(world *w, const profile *p) {
    make_world(w, p->shape, p->name);
}

static uint32_t n_known(const world *w) {
    return (uint32_t)w->n_known;
}

static bool is_resident(const world *w, int i, uint32_t chunk) {
    return neap_unit_resident(w->engine, neap_kv_unit(w->kv[i], 0, chunk));
}

static uint32_t n_resident(const world *w, uint32_t chunk) {
    uint32_t n = 0;
    for (int i = 0; i < LAYERS; i++)
        n += is_resident(w, i, chunk);
    return n;
}

static int wait_for(const world *w, int i, uint32_t chunk) {
    neap_use_begin(w->engine, NEAP_USE_COMPUTE);
    const int err = neap_wait(w->engine, neap_kv_unit(w->kv[i], 0, chunk));
    neap_use_end(w->engine, NEAP_USE_COMPUTE);
    return err;
}

/* Cells [first, end) of a cache. */
static bool same_cells(const world *w, const char *bytes, int i, uint32_t first, uint32_t end) {
    for (int plane = 0; plane < 2; plane++)
        if (memcmp(w->planes[i][plane] + first * w->row, bytes + snapshot_at(w, i, plane, first),
                   (end - first) * w->row) != 0)
            return false;
    return true;
}

/* ---- every profile ---- */

/* Makes a world whose caches were evicted and restored once; what they hold then. */
static char *begin_rounded(world *w, const profile *p) {
    make(w, p);
    start(w, (neap_options){0});
    fill(w);
    evict(w);
    restore(w);
    return snapshot(w);
}

static void test_cycles(const profile *p) {
    world w;
    make(&w, p);
    start(&w, (neap_options){0});
    fill(&w);
    char *exact = snapshot(&w);
    const neap_evict_result result = evict(&w);
    CHECK(result.storage_error == 0 && result.kv_memory_bytes == 0);
    neap_stat stat = stat_of(&w);
    CHECK(strcmp(stat.codec, "klt") == 0 && strstr(stat.codec_note, p->note));
    CHECK(stat.klt_chunks == n_known(&w) * FULL && stat.klt_left == n_known(&w));
    CHECK(stat.kv_ratio > 2.5 && stat.klt_error > 0 && stat.klt_error < 1.2);
    CHECK(stat.kv_compressed_memory == 0);
    /* What is said to be there is there once. */
    CHECK(stat.kv_storage <= stat.bytes_written_storage &&
          stat.kv_storage + n_known(&w) * FULL > stat.bytes_written_storage);
    restore(&w);
    CHECK(!same(&w, exact));
    for (int i = 0; i < w.n_known; i++) {
        CHECK(loss(&w, exact, i) > 1e-4 && loss(&w, exact, i) < 0.1);
        CHECK(same_cells(&w, exact, i, 0, 4));
    }
    CHECK(loss(&w, exact, w.n_known) < 1e-4); /* q8 */
    char *rounded = snapshot(&w);
    for (int cycle = 0; cycle < 3; cycle++) {
        evict(&w);
        restore(&w);
        CHECK(same(&w, rounded));
    }
    /* Nothing was coded again: klt's chunks were clean. Nor is what others of the tail's cache
     * change. */
    const uint64_t before = stat_of(&w).bytes_written_storage;
    evict(&w);
    CHECK(stat_of(&w).bytes_written_storage == before);
    restore(&w);
    stop(&w);
    free(exact);
    free(rounded);
    free_world(&w);
}

/* A growing tail is q8's, and none of its cells changes, until it is full. */
static void test_growing_tail(const profile *p) {
    world w;
    char *rounded = begin_rounded(&w, p);
    const uint64_t before = stat_of(&w).bytes_written_storage;
    neap_use_begin(w.engine, NEAP_USE_COMPUTE);
    put_block(&w, 0, -1, USED, 40);
    neap_use_end(w.engine, NEAP_USE_COMPUTE);
    evict(&w);
    CHECK(stat_of(&w).klt_chunks == n_known(&w) * FULL);
    const uint64_t more = stat_of(&w).bytes_written_storage - before;
    CHECK(more > 0 && more < p->shape->n_layers * (USED - TAIL + 40) * 2 * w.row);
    restore(&w);
    CHECK(same(&w, rounded));
    neap_use_begin(w.engine, NEAP_USE_COMPUTE);
    put_block(&w, 0, -1, USED + 40, 768 - USED - 40);
    neap_use_end(w.engine, NEAP_USE_COMPUTE);
    evict(&w);
    CHECK(stat_of(&w).klt_chunks == n_known(&w) * FULL + p->shape->n_layers);
    restore(&w);
    CHECK(same_cells(&w, rounded, 0, 0, TAIL) && !same(&w, rounded));
    stop(&w);
    free(rounded);
    free_world(&w);
}

/* Positions of any order; and K comes back as it was although the host has moved on. */
static void test_positions(const profile *p) {
    world w;
    make(&w, p);
    start(&w, (neap_options){0});
    for (int32_t i = 0; i < CELLS; i++)
        w.positions[i] = 10 + i * 7 % 1000;
    fill(&w);
    char *exact = snapshot(&w);
    evict(&w);
    CHECK(stat_of(&w).klt_chunks == n_known(&w) * FULL && stat_of(&w).klt_error < 1.2);
    restore(&w);
    for (int i = 0; i < w.n_known; i++)
        CHECK(loss(&w, exact, i) < 0.1);
    char *rounded = snapshot(&w);
    evict(&w);
    for (int32_t i = 0; i < CELLS; i++)
        w.positions[i] += 5;
    restore(&w);
    CHECK(same(&w, rounded));
    stop(&w);
    free(exact);
    free(rounded);
    free_world(&w);
}

/* Positions that are not those of the cells, as a guess may be: what that loses shows. */
static void test_wrong_positions(const profile *p) {
    world w;
    make(&w, p);
    start(&w, (neap_options){0});
    fill(&w);
    for (int32_t i = 256; i < 512; i++)
        w.positions[i] = 5000 - 3 * i;
    evict(&w);
    CHECK(stat_of(&w).klt_left == 2 * n_known(&w) && stat_of(&w).klt_chunks == n_known(&w));
    stop(&w);
    free_world(&w);
}

/* Where storage takes nothing q8 in memory holds the chunks. */
static void test_no_storage(const profile *p) {
    world w;
    make(&w, p);
    start(&w, (neap_options){.swap_limit_bytes = 4096});
    fill(&w);
    const neap_evict_result result = evict(&w);
    CHECK(result.storage_error == NEAP_E_BUDGET && result.kv_memory_bytes > 0);
    CHECK(stat_of(&w).kv_compressed_memory > 0 && stat_of(&w).klt_chunks == 0);
    CHECK(stat_of(&w).klt_left == n_known(&w) * CHUNKS);
    restore(&w);
    char *rounded = snapshot(&w);
    evict(&w);
    restore(&w);
    CHECK(same(&w, rounded));
    stop(&w);
    free(rounded);
    free_world(&w);
}

/* Written behind a chunk is what an eviction would have made of it. */
static void test_write_behind(const profile *p) {
    world w;
    char *rounded = begin_rounded(&w, p);
    stop(&w);

    start(&w, (neap_options){.write_behind_bytes = (uint64_t)1 << 40,
                             .idle_ns = 1000000,
                             .write_behind_on_battery = true});
    fill(&w);
    await_clean(&w, (uint32_t)w.n_caches * FULL);
    CHECK(stat_of(&w).klt_chunks == n_known(&w) * FULL);
    CHECK(!same(&w, rounded)); /* still exact */
    evict(&w);
    restore(&w);
    CHECK(same(&w, rounded));
    stop(&w);
    free(rounded);
    free_world(&w);
}

static void test_damaged_record(const profile *p) {
    world w;
    make(&w, p);
    start(&w, (neap_options){0});
    fill(&w);
    evict(&w);
    spoil_swap(&w);
    uint64_t bytes;
    CHECK(neap_restore(w.engine, &bytes) < 0);
    CHECK(stat_of(&w).lost == (uint32_t)w.n_caches * CHUNKS);
    stop(&w);
    free_world(&w);
}

/* V transposed, as without flash attention. */
static void test_transposed(const profile *p) {
    world w;
    char note[16];
    make(&w, p);
    start(&w, (neap_options){0});
    for (int i = 0; i < w.n_caches; i++) {
        neap_kv_layout layout = layout_of(&w, i);
        layout.planes[1].transposed = true;
        CHECK(neap_kv_relayout(w.kv[i], &layout) == 0);
    }
    snprintf(note, sizeof note, "q8 for %d", w.n_caches);
    CHECK(strcmp(stat_of(&w).codec, "q8") == 0 && strstr(stat_of(&w).codec_note, note));
    fill(&w);
    evict(&w);
    CHECK(stat_of(&w).klt_chunks == 0 && stat_of(&w).kv_ratio < 2);
    restore(&w);
    stop(&w);
    free_world(&w);
}

static uint32_t test_random(const profile *p, uint64_t seed, bool behind) {
    world w;
    make(&w, p);
    const neap_options options = {.write_behind_bytes = behind ? (uint64_t)1 << 40 : 0,
                                  .idle_ns = 1,
                                  .write_behind_on_battery = true};
    const uint32_t by_klt = run_random(&w, seed, options);
    free_world(&w);
    return by_klt;
}

/* Two models of one shape: cells that are coded by the other's file are refused, not spoilt; and
 * the engine can be told which it is as long as nothing is coded. */
static void test_two_models(const profile *p) {
    world w;
    klt_problem other;
    char gguf[128], own[sizeof w.gguf], folder[PATH_MAX], file[PATH_MAX];
    uint64_t digest;
    make(&w, p);
    memcpy(own, w.gguf, sizeof own);
    snprintf(gguf, sizeof gguf, "%s/other.gguf", w.dir);
    write_file(gguf, "other weights");
    CHECK(neap_model_digest(gguf, &digest) == 0);
    CHECK(neap_klt_folder(digest, folder, sizeof folder) == 0);
    CHECK(neap_klt_path(folder, p->name, 8, file, sizeof file) == 0);
    klt_problem_make(&other, p->shape, 8);
    other.spec.digest = digest;
    other.spec.profile = w.p.spec.profile;
    CHECK(neap_klt_model_write(file, &other.spec) == 0);
    for (int is_told = 0; is_told < 2; is_told++) {
        snprintf(w.gguf, sizeof w.gguf, "%s/other.gguf", w.dir);
        start(&w, (neap_options){0});
        memcpy(w.gguf, own, sizeof own);
        neap_use_gguf(w.engine, own);
        if (is_told) neap_region_use_gguf(w.region, own);
        fill(&w);
        char *exact = snapshot(&w);
        evict(&w);
        const neap_stat stat = stat_of(&w);
        CHECK(stat.klt_chunks == (is_told ? n_known(&w) * FULL : 0));
        CHECK(!is_told || stat.klt_error < 1.2);
        neap_region_use_gguf(w.region, is_told ? gguf : own); /* too late: some is coded, or q8's */
        restore(&w);
        for (int i = 0; i < w.n_known; i++)
            CHECK(loss(&w, exact, i) < (is_told ? 0.1 : 1e-4));
        char *rounded = snapshot(&w);
        evict(&w);
        restore(&w);
        CHECK(same(&w, rounded));
        stop(&w);
        free(exact);
        free(rounded);
    }
    klt_problem_free(&other);
    CHECK(unlink(file) == 0 && rmdir(folder) == 0 && unlink(gguf) == 0);
    free_world(&w);
}

/* ---- files ---- */

static void expect_q8(world *w, const char *codec, const char *why) {
    start(w, (neap_options){.codec = codec});
    const neap_stat stat = stat_of(w);
    CHECK(strcmp(stat.codec, "q8") == 0 && strstr(stat.codec_note, why));
    CHECK(strstr(stat.codec_note, "neap train") && strstr(stat.codec_note, "model.gguf"));
    fill(w);
    char *exact = snapshot(w);
    evict(w);
    CHECK(stat_of(w).klt_chunks == 0 && stat_of(w).kv_ratio < 2);
    restore(w);
    CHECK(loss(w, exact, 0) < 1e-4);
    stop(w);
    free(exact);
}

static void test_files(void) {
    world w;
    double ratio = -1;
    neap_engine *engine;
    CHECK(neap_klt_option_parse("klt", &ratio) && ratio == 0);
    CHECK(neap_klt_option_parse("klt:6.5", &ratio) && ratio == 6.5);
    CHECK(!neap_klt_option_parse("klt:", &ratio) && !neap_klt_option_parse("klt:1", &ratio));
    CHECK(!neap_klt_option_parse("klt:8x", &ratio) && !neap_klt_option_parse("klt8", &ratio));
    CHECK(!neap_klt_option_parse("klt:nan", &ratio) && !neap_klt_option_parse("kl", &ratio));
    CHECK(neap_klt_option_parse("klt:1.5", &ratio) && neap_klt_option_parse("klt:64", &ratio));
    CHECK(!neap_klt_option_parse("klt:64.1", &ratio) && !neap_klt_option_parse("klt:1.4", &ratio));
    CHECK(!neap_klt_option_parse("klt:0x8", &ratio) && !neap_klt_option_parse("klt: 8", &ratio));
    CHECK(!neap_klt_option_parse("klt:1e1", &ratio) && !neap_klt_option_parse("klt:.", &ratio));
    CHECK(ratio == 64);
    CHECK(neap_engine_create(&(neap_options){.codec = "klt:x"}, &engine) == NEAP_E_UNKNOWN);

    make(&w, &layer);
    expect_q8(&w, "klt:6", "--ratio 6");
    start(&w, (neap_options){.codec = "klt:8"});
    CHECK(strcmp(stat_of(&w).codec, "klt") == 0);
    stop(&w);

    FILE *file = fopen(w.file, "r+b");
    CHECK(file && fseek(file, 5000, SEEK_SET) == 0 && fputs("spoilt", file) > 0);
    CHECK(fclose(file) == 0);
    expect_q8(&w, "klt", "damaged");

    w.p.spec.digest++;
    CHECK(neap_klt_model_write(w.file, &w.p.spec) == 0);
    expect_q8(&w, "klt", "another model");

    CHECK(unlink(w.file) == 0);
    expect_q8(&w, "klt", "learned nothing");

    CHECK(mkdir(w.file, 0700) == 0);
    start(&w, (neap_options){.codec = "klt"});
    CHECK(strstr(stat_of(&w).codec_note, "klt-layer-8.bin: ")); /* and not the model */
    stop(&w);
    CHECK(rmdir(w.file) == 0);
    free_world(&w);
}

/* Which file is taken, of several. */
static bool takes_first(const world *w, double ratio, bool heads_first, const char *name) {
    neap_klt_model *model = NULL;
    neap_klt_found found;
    const int err = neap_klt_file_open(w->p.spec.digest, ratio, heads_first, &model, &found);
    neap_klt_model_close(model);
    return !err && strcmp(found.name, name) == 0;
}

static bool takes(const world *w, double ratio, const char *name) {
    return takes_first(w, ratio, false, name);
}

static void test_choice(void) {
    world w;
    const struct {
        const char *profile;
        double ratio;
    } made[] = {{"head", 4}, {"joint", 4}, {"head", 8}};
    enum { N = sizeof made / sizeof *made };
    char paths[N][PATH_MAX];
    make(&w, &joint);
    for (int i = 0; i < N; i++) {
        CHECK(neap_klt_path(w.folder, made[i].profile, made[i].ratio, paths[i], PATH_MAX) == 0);
        CHECK(neap_klt_model_write(paths[i], &w.p.spec) == 0);
    }
    CHECK(takes(&w, 0, "klt-joint-8") && takes(&w, 8, "klt-joint-8"));
    CHECK(takes_first(&w, 0, true, "klt-head-4") && takes_first(&w, 8, true, "klt-head-8"));
    CHECK(takes(&w, 4, "klt-head-4") && !takes(&w, 2, "klt-head-4"));
    CHECK(unlink(w.file) == 0 && takes(&w, 0, "klt-head-4"));
    CHECK(unlink(paths[0]) == 0 && takes(&w, 4, "klt-joint-4"));
    CHECK(unlink(paths[1]) == 0 && takes(&w, 8, "klt-head-8"));
    CHECK(unlink(paths[2]) == 0 && !takes(&w, 0, "klt-head-8"));
    free_world(&w);
}

/* ---- one layer ---- */

/* Chunks that are not of the kind that was learned, and cells without positions, go by q8 and stay
 * with it until they are written to. */
static void test_refused(void) {
    world w;
    make(&w, &layer);
    start(&w, (neap_options){0});
    for (int32_t i = 256; i < 512; i++)
        w.positions[i] = -1;
    fill(&w);
    neap_use_begin(w.engine, NEAP_USE_COMPUTE);
    put_noise(&w, 0, 0, 256);
    neap_use_end(w.engine, NEAP_USE_COMPUTE);
    char *exact = snapshot(&w);
    evict(&w);
    neap_stat stat = stat_of(&w);
    CHECK(stat.klt_left == 5 && stat.klt_chunks == 1);
    CHECK(stat.klt_refused == 3 && stat.contexts[0].klt_refused == 3); /* not the tails */
    restore(&w);
    char *rounded = snapshot(&w);
    CHECK(loss(&w, exact, 0) < 0.1);
    for (int32_t i = 0; i < CELLS; i++)
        w.positions[i] = i;
    evict(&w);
    CHECK(stat_of(&w).klt_left == 5);
    restore(&w);
    CHECK(same(&w, rounded));
    neap_use_begin(w.engine, NEAP_USE_COMPUTE);
    put(&w, 0, 0, 256);
    neap_use_end(w.engine, NEAP_USE_COMPUTE);
    evict(&w);
    CHECK(stat_of(&w).klt_left == 4 && stat_of(&w).klt_chunks == 2);
    CHECK(stat_of(&w).klt_refused == 2);
    stop(&w);
    free(exact);
    free(rounded);
    free_world(&w);
}

/* ---- four layers together ---- */

/* Little by little: a chunk is away with all of its layers, or with none. */
static void test_goes_together(void) {
    world w;
    make(&w, &joint);
    for (uint32_t threads = 1; threads <= 4; threads += 3) {
        start(&w, (neap_options){.evict_threads = threads});
        fill(&w);
        uint32_t n_calls = 0;
        while (stat_of(&w).units_kv_evicted < stat_of(&w).units_kv) {
            const neap_evict_request request = {.bytes = 1};
            neap_evict_result result;
            CHECK(neap_evict(w.engine, &request, &result) == 0 && result.released_bytes > 0);
            for (uint32_t c = 0; c < FULL; c++)
                CHECK(n_resident(&w, c) == 0 || n_resident(&w, c) == LAYERS);
            n_calls++;
        }
        /* All of the unknown cache and the tails one by one, the others four by four. */
        CHECK(n_calls == CHUNKS + LAYERS + FULL);
        /* Clean ones go alone. */
        restore(&w);
        const neap_evict_request request = {.bytes = 1};
        neap_evict_result result;
        for (int i = 0; i < CHUNKS + 2; i++)
            CHECK(neap_evict(w.engine, &request, &result) == 0);
        CHECK(!is_resident(&w, 3, 1) && is_resident(&w, 2, 1));
        stop(&w);
    }
    free_world(&w);
}

static void test_apart(void) {
    world w;
    char *rounded = begin_rounded(&w, &joint);
    evict(&w);
    CHECK(wait_for(&w, 2, 0) == 0);
    CHECK(is_resident(&w, 2, 0) && n_resident(&w, 0) == 1);
    CHECK(same_cells(&w, rounded, 2, 0, 256));
    for (int i = 0; i < LAYERS; i++)
        CHECK(wait_for(&w, i, 1) == 0 && same_cells(&w, rounded, i, 256, 512));
    restore(&w);
    CHECK(same(&w, rounded));

    /* What is wanted comes with the first of it. */
    evict(&w);
    neap_use_begin(w.engine, NEAP_USE_COMPUTE);
    neap_unit_id units[] = {neap_kv_unit(w.kv[0], 0, 1), neap_kv_unit(w.kv[1], 0, 1),
                            neap_kv_unit(w.kv[3], 0, 1)};
    CHECK(neap_need(w.engine, units, 3) == 0);
    for (int i = 0; i < 3; i++)
        CHECK(neap_wait(w.engine, units[i]) == 0);
    neap_use_end(w.engine, NEAP_USE_COMPUTE);
    CHECK(n_resident(&w, 1) == 3 && !is_resident(&w, 2, 1));
    CHECK(same_cells(&w, rounded, 0, 256, 512) && same_cells(&w, rounded, 1, 256, 512) &&
          same_cells(&w, rounded, 3, 256, 512));
    stop(&w);
    free(rounded);
    free_world(&w);
}

static void test_one_written(void) {
    world w;
    char *rounded = begin_rounded(&w, &joint);
    evict(&w);
    const neap_stat before = stat_of(&w);
    neap_use_begin(w.engine, NEAP_USE_COMPUTE);
    CHECK(neap_kv_write(w.kv[1], 0, 10, 20, true) == 0);
    CHECK(n_resident(&w, 0) == 1);
    memset(w.planes[1][0] + 10 * w.row, 0, 20 * w.row);
    memset(w.planes[1][1] + 10 * w.row, 0, 20 * w.row);
    neap_use_end(w.engine, NEAP_USE_COMPUTE);
    CHECK(stat_of(&w).klt_chunks == LAYERS * FULL - 1);
    CHECK(stat_of(&w).kv_storage + 4 > before.kv_storage); /* the others have all of it */
    evict(&w);
    CHECK(stat_of(&w).klt_chunks == LAYERS * FULL - 1 && stat_of(&w).klt_left == LAYERS + 1);
    CHECK(stat_of(&w).bytes_written_storage - before.bytes_written_storage < 256 * 2 * w.row);
    restore(&w);
    for (int i = 0; i < CACHES; i++)
        CHECK(i == 1 || same_cells(&w, rounded, i, 0, USED));
    CHECK(!same_cells(&w, rounded, 1, 10, 30) && same_cells(&w, rounded, 1, 256, USED));
    CHECK(loss(&w, rounded, 1) < 0.1);
    char *after = snapshot(&w);
    evict(&w);
    restore(&w);
    CHECK(same(&w, after));

    /* Overwritten while it is away. */
    evict(&w);
    neap_use_begin(w.engine, NEAP_USE_COMPUTE);
    put(&w, 3, 256, 256);
    neap_use_end(w.engine, NEAP_USE_COMPUTE);
    CHECK(n_resident(&w, 1) == 1 && stat_of(&w).klt_chunks == LAYERS * FULL - 2);
    restore(&w);
    CHECK(same_cells(&w, after, 0, 0, USED) && same_cells(&w, after, 2, 0, USED));

    /* Written all, they go together again. */
    neap_use_begin(w.engine, NEAP_USE_COMPUTE);
    put_block(&w, 0, -1, 0, 256);
    put_block(&w, 0, -1, 256, 256);
    neap_use_end(w.engine, NEAP_USE_COMPUTE);
    CHECK(stat_of(&w).klt_chunks == 0);
    evict(&w);
    CHECK(stat_of(&w).klt_chunks == LAYERS * FULL && stat_of(&w).klt_left == LAYERS);
    restore(&w);
    CHECK(neap_kv_clear(w.kv[2]) == 0);
    CHECK(stat_of(&w).klt_chunks == (LAYERS - 1) * FULL);
    evict(&w);
    restore(&w);
    stop(&w);
    free(rounded);
    free(after);
    free_world(&w);
}

/* One layer's cells are of another kind, or its positions are others: all four go by q8. */
static void test_one_refused(bool behind) {
    world w;
    make(&w, &joint);
    static int32_t others[CELLS];
    start(&w, (neap_options){.write_behind_bytes = behind ? (uint64_t)1 << 40 : 0,
                             .idle_ns = 1000000,
                             .write_behind_on_battery = true});
    for (int32_t i = 0; i < CELLS; i++)
        others[i] = i < 500 ? i : 0;
    neap_kv_layout layout = layout_of(&w, 2);
    layout.positions = others;
    CHECK(neap_kv_relayout(w.kv[2], &layout) == 0);
    neap_use_begin(w.engine, NEAP_USE_COMPUTE);
    put_block(&w, 0, -1, 0, 256);
    put_block(&w, 0, -1, 256, 256);
    neap_use_end(w.engine, NEAP_USE_COMPUTE);
    if (behind) await_clean(&w, LAYERS * FULL);
    evict(&w);
    CHECK(stat_of(&w).klt_chunks == LAYERS && stat_of(&w).klt_left == LAYERS);
    neap_use_begin(w.engine, NEAP_USE_COMPUTE);
    put_noise(&w, 3, 0, 256);
    for (int i = 0; i < 3; i++)
        put(&w, i, 0, 256);
    neap_use_end(w.engine, NEAP_USE_COMPUTE);
    if (behind) await_clean(&w, LAYERS);
    evict(&w);
    CHECK(stat_of(&w).klt_chunks == 0 && stat_of(&w).klt_left == LAYERS * FULL);
    restore(&w);
    stop(&w);
    free_world(&w);
}

/* A cache of the block that klt is not for takes it from the others. */
static void test_one_transposed(void) {
    world w;
    make(&w, &joint);
    start(&w, (neap_options){0});
    neap_kv_layout layout = layout_of(&w, 1);
    layout.planes[1].transposed = true;
    CHECK(neap_kv_relayout(w.kv[1], &layout) == 0);
    CHECK(strcmp(stat_of(&w).codec, "q8") == 0 && strstr(stat_of(&w).codec_note, "q8 for 5"));
    fill(&w);
    evict(&w);
    CHECK(stat_of(&w).klt_chunks == 0 && stat_of(&w).klt_left == 0);
    restore(&w);
    stop(&w);
    free_world(&w);
}

static void test_keep(void) {
    world w;
    make(&w, &joint);
    start(&w, (neap_options){0});
    fill(&w);
    const uint64_t all = stat_of(&w).kv_total;
    stop(&w);
    for (uint64_t keep = all / 8; keep < all; keep += all / 8) {
        start(&w, (neap_options){.keep_bytes = keep});
        fill(&w);
        const neap_evict_request request = {.bytes = UINT64_MAX};
        neap_evict_result result;
        CHECK(neap_evict(w.engine, &request, &result) == 0);
        CHECK(stat_of(&w).kv_resident >= keep);
        stop(&w);
    }
    free_world(&w);
}

/* Those of a damaged record that are in memory stay, and are not clean. */
static void test_damaged_joint_record(void) {
    world w;
    char *rounded = begin_rounded(&w, &joint);
    evict(&w);
    CHECK(wait_for(&w, 0, 0) == 0);
    spoil_swap(&w);
    CHECK(stat_of(&w).clean_chunks == 1);
    CHECK(wait_for(&w, 1, 0) == NEAP_E_LOST);
    CHECK(stat_of(&w).clean_chunks == 0 && stat_of(&w).lost == 1 && is_resident(&w, 0, 0));
    neap_check(w.engine);
    evict(&w); /* its cells are coded again: they must not hang on the damaged record */
    CHECK(wait_for(&w, 0, 0) == 0);
    CHECK(!same_cells(&w, rounded, 0, 0, 256) && loss_in(&w, rounded, 0, 0, 256) < 1e-4);
    uint64_t bytes;
    CHECK(neap_restore(w.engine, &bytes) < 0);
    CHECK(stat_of(&w).lost == CACHES * CHUNKS - 1);
    stop(&w);
    free(rounded);
    free_world(&w);
}

/* Two contexts of a model, in regions of their own: neither takes the other's cells. */
static void test_two_contexts(void) {
    world w, other;
    make(&w, &joint);
    start(&w, (neap_options){0});
    other = w;
    CHECK(neap_region_create(w.engine, (size_t)CACHES * 2 * CELLS * w.row, NEAP_REGION_KV,
                             &other.region) == 0);
    for (int i = 0; i < CACHES; i++) {
        for (int plane = 0; plane < 2; plane++)
            other.planes[i][plane] =
                (char *)neap_region_base(other.region) + (size_t)(2 * i + plane) * CELLS * w.row;
        const neap_kv_layout layout = layout_of(&other, i);
        CHECK(neap_kv_add(w.engine, &layout, &other.kv[i]) == 0);
    }
    fill(&w);
    neap_use_begin(w.engine, NEAP_USE_COMPUTE);
    put_block(&other, 0, -1, 0, 256);
    put_block(&other, 0, -1, 256, USED - 512);
    neap_use_end(w.engine, NEAP_USE_COMPUTE);
    evict(&w);
    CHECK(stat_of(&w).klt_chunks == LAYERS * (FULL + 1));
    restore(&w);
    char *rounded = snapshot(&w);
    evict(&w);
    neap_region_free(other.region);
    CHECK(stat_of(&w).klt_chunks == LAYERS * FULL);
    restore(&w);
    CHECK(same(&w, rounded));
    stop(&w);
    free(rounded);
    free_world(&w);
}

enum { READERS = 3, LOOKS = 150, EVICTIONS = 60 };

typedef struct reader {
    const world *w;
    const char *rounded;
    uint64_t state;
    pthread_t thread;
} reader;

static uint32_t pick(reader *r, uint32_t n) {
    r->state = r->state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((r->state >> 33) % n);
}

static void *look(void *arg) {
    reader *r = arg;
    for (int n = 0; n < LOOKS; n++) {
        neap_unit_id units[LAYERS];
        const int i = (int)pick(r, LAYERS);
        const uint32_t chunk = pick(r, FULL), wanted = pick(r, LAYERS + 1);
        for (uint32_t l = 0; l < wanted; l++)
            units[l] = neap_kv_unit(r->w->kv[(i + (int)l) % LAYERS], 0, chunk);
        neap_use_begin(r->w->engine, NEAP_USE_COMPUTE);
        if (wanted > 0) CHECK(neap_need(r->w->engine, units, wanted) == 0);
        CHECK(neap_wait(r->w->engine, neap_kv_unit(r->w->kv[i], 0, chunk)) == 0);
        CHECK(same_cells(r->w, r->rounded, i, chunk * 256, chunk * 256 + 256));
        neap_use_end(r->w->engine, NEAP_USE_COMPUTE);
    }
    return NULL;
}

/* Several wait for chunks that share records while they are evicted again and again. */
static void test_at_once(void) {
    world w;
    reader readers[READERS];
    char *rounded = begin_rounded(&w, &joint);
    for (int i = 0; i < READERS; i++) {
        readers[i] = (reader){.w = &w, .rounded = rounded, .state = (uint64_t)i};
        CHECK(pthread_create(&readers[i].thread, NULL, look, &readers[i]) == 0);
    }
    for (uint32_t i = 0; i < EVICTIONS; i++) {
        const neap_evict_request request = {.permille = 200 + i * 400 % 801};
        neap_evict_result result;
        CHECK(neap_evict(w.engine, &request, &result) == 0);
        usleep(500);
    }
    for (int i = 0; i < READERS; i++)
        CHECK(pthread_join(readers[i].thread, NULL) == 0);
    restore(&w);
    CHECK(same(&w, rounded) && stat_of(&w).klt_chunks == LAYERS * FULL);
    stop(&w);
    free(rounded);
    free_world(&w);
}

static void test_profile(const profile *p) {
    test_cycles(p);
    test_growing_tail(p);
    test_positions(p);
    test_wrong_positions(p);
    test_no_storage(p);
    test_write_behind(p);
    test_damaged_record(p);
    test_transposed(p);
    test_two_models(p);
    uint32_t by_klt = 0;
    for (uint64_t seed = 1; seed <= 8; seed++)
        by_klt += test_random(p, seed, seed > 4);
    CHECK(by_klt > 0);
}

int main(void) {
    test_profile(&layer);
    test_profile(&joint);
    test_files();
    test_choice();
    test_refused();
    test_goes_together();
    test_apart();
    test_one_written();
    test_one_refused(false);
    test_one_refused(true);
    test_one_transposed();
    test_keep();
    test_damaged_joint_record();
    test_two_contexts();
    test_at_once();
    return 0;
}
