/* Codec klt in the engine: the first eviction rounds, every later cycle is bit-identical, whatever
 * the host does to positions meanwhile; what klt is not for stays with q8; a model's file that is
 * not there, damaged or of another model is said. */
#include <errno.h>

#include "klt_world.h"
#include "vm.h"

enum { CACHES = 3 }; /* two that the model fits, one of a layer it does not know */

static const klt_shape shape = {.n_blocks = 2,
                                .n_layers = 1,
                                .n_heads = 2,
                                .heads_a_group = 2,
                                .k_dim = 64,
                                .v_dim = 64,
                                .mode = NEAP_KLT_ROPE_NEOX,
                                .rope_dims = 64,
                                .magnitude = 1,
                                .bits = 2,
                                .decay = 1e-3,
                                .permille = 8,
                                .metric = true};
static void test_cycles(void) {
    world w;
    make_world(&w, &shape, "layer");
    start(&w, (neap_options){0});
    fill(&w);
    char *exact = snapshot(&w);
    const neap_evict_result result = evict(&w);
    CHECK(result.storage_error == 0 && result.kv_memory_bytes == 0);
    neap_stat stat = stat_of(&w);
    CHECK(strcmp(stat.codec, "klt") == 0 && strstr(stat.codec_note, "klt-layer-8") &&
          strstr(stat.codec_note, "q8 for 1"));
    CHECK(stat.klt_chunks == 2 * FULL && stat.klt_left == 2);
    CHECK(stat.kv_ratio > 2.5 && stat.klt_error > 0 && stat.klt_error < 1.2);
    CHECK(stat.kv_compressed_memory == 0);
    restore(&w);
    CHECK(!same(&w, exact));
    for (int i = 0; i < 2; i++) {
        CHECK(loss(&w, exact, i) > 1e-4 && loss(&w, exact, i) < 0.1);
        CHECK(memcmp(w.planes[i][0], exact + (size_t)(2 * i) * USED * w.row, 4 * w.row) == 0);
    }
    CHECK(loss(&w, exact, 2) < 1e-4); /* q8 */
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

    /* A growing tail is q8's, and none of its cells changes, until it is full. */
    neap_use_begin(w.engine, NEAP_USE_COMPUTE);
    put(&w, 0, USED, 40);
    neap_use_end(w.engine, NEAP_USE_COMPUTE);
    evict(&w);
    CHECK(stat_of(&w).klt_chunks == 2 * FULL);
    const uint64_t more = stat_of(&w).bytes_written_storage - before;
    CHECK(more > 0 && more < (USED - TAIL + 40) * 2 * w.row);
    restore(&w);
    CHECK(same(&w, rounded));
    neap_use_begin(w.engine, NEAP_USE_COMPUTE);
    put(&w, 0, USED + 40, 768 - USED - 40);
    neap_use_end(w.engine, NEAP_USE_COMPUTE);
    evict(&w);
    CHECK(stat_of(&w).klt_chunks == 2 * FULL + 1);
    restore(&w);
    CHECK(memcmp(w.planes[0][0], rounded, TAIL * w.row) == 0 && !same(&w, rounded));
    stop(&w);
    free(exact);
    free(rounded);
    free_world(&w);
}

/* Positions of any order; and K comes back as it was although the host has moved on. */
static void test_positions(void) {
    world w;
    make_world(&w, &shape, "layer");
    start(&w, (neap_options){0});
    for (int32_t i = 0; i < CELLS; i++)
        w.positions[i] = 10 + i * 7 % 1000;
    fill(&w);
    char *exact = snapshot(&w);
    evict(&w);
    CHECK(stat_of(&w).klt_chunks == 2 * FULL && stat_of(&w).klt_error < 1.2);
    restore(&w);
    CHECK(loss(&w, exact, 0) < 0.1 && loss(&w, exact, 1) < 0.1);
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

/* Chunks that are not of the kind that was learned, and cells without positions, go by q8 and stay
 * with it until they are written to. */
static void test_refused(void) {
    world w;
    make_world(&w, &shape, "layer");
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
    stop(&w);
    free(exact);
    free(rounded);
    free_world(&w);
}

/* Positions that are not those of the cells, as a guess may be: what that loses shows. */
static void test_wrong_positions(void) {
    world w;
    make_world(&w, &shape, "layer");
    start(&w, (neap_options){0});
    fill(&w);
    for (int32_t i = 256; i < 512; i++)
        w.positions[i] = 5000 - 3 * i;
    evict(&w);
    CHECK(stat_of(&w).klt_left == 4 && stat_of(&w).klt_chunks == 2);
    stop(&w);
    free_world(&w);
}

/* Where storage takes nothing q8 in memory holds the chunks. */
static void test_no_storage(void) {
    world w;
    make_world(&w, &shape, "layer");
    start(&w, (neap_options){.swap_limit_bytes = 4096});
    fill(&w);
    const neap_evict_result result = evict(&w);
    CHECK(result.storage_error == NEAP_E_BUDGET && result.kv_memory_bytes > 0);
    CHECK(stat_of(&w).kv_compressed_memory > 0 && stat_of(&w).klt_chunks == 0);
    CHECK(stat_of(&w).klt_left == 2 * CHUNKS);
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
static void test_write_behind(void) {
    world w;
    make_world(&w, &shape, "layer");
    start(&w, (neap_options){0});
    fill(&w);
    evict(&w);
    restore(&w);
    char *rounded = snapshot(&w);
    stop(&w);

    start(&w, (neap_options){.write_behind_bytes = (uint64_t)1 << 40,
                             .write_behind_idle_ns = 1000000,
                             .write_behind_on_battery = true});
    fill(&w);
    await_clean(&w, CACHES * FULL);
    CHECK(stat_of(&w).klt_chunks == 2 * FULL);
    CHECK(!same(&w, rounded)); /* still exact */
    evict(&w);
    restore(&w);
    CHECK(same(&w, rounded));
    stop(&w);
    free(rounded);
    free_world(&w);
}

static void test_damaged_record(void) {
    world w;
    make_world(&w, &shape, "layer");
    start(&w, (neap_options){0});
    fill(&w);
    evict(&w);
    spoil_swap(&w);
    uint64_t bytes;
    CHECK(neap_restore(w.engine, &bytes) < 0);
    CHECK(stat_of(&w).lost == CACHES * CHUNKS);
    stop(&w);
    free_world(&w);
}

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

    make_world(&w, &shape, "layer");
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

/* V transposed, as without flash attention. */
static void test_transposed(void) {
    world w;
    make_world(&w, &shape, "layer");
    start(&w, (neap_options){0});
    for (int i = 0; i < CACHES; i++) {
        neap_kv_layout layout = layout_of(&w, i);
        layout.planes[1].transposed = true;
        CHECK(neap_kv_relayout(w.kv[i], &layout) == 0);
    }
    CHECK(strcmp(stat_of(&w).codec, "q8") == 0 && strstr(stat_of(&w).codec_note, "q8 for 3"));
    fill(&w);
    evict(&w);
    CHECK(stat_of(&w).klt_chunks == 0 && stat_of(&w).kv_ratio < 2);
    restore(&w);
    stop(&w);
    free_world(&w);
}

static uint32_t test_random(uint64_t seed) {
    world w;
    make_world(&w, &shape, "layer");
    const uint32_t by_klt = run_random(&w, seed, (neap_options){0});
    free_world(&w);
    return by_klt;
}

int main(void) {
    test_cycles();
    test_positions();
    test_refused();
    test_wrong_positions();
    test_no_storage();
    test_write_behind();
    test_damaged_record();
    test_files();
    test_transposed();
    uint32_t by_klt = 0;
    for (uint64_t seed = 1; seed <= 6; seed++)
        by_klt += test_random(seed);
    CHECK(by_klt > 0);
    return 0;
}
