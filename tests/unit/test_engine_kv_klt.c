/* KV held as klt coded it (option kv): what is full and old is coded at the end of a use, is read
 * from its record - the rows that a restoration brings, to the bit - and is coded again only after
 * it was written to; memory stays what stat says; records go to storage and come back; what klt
 * refuses, and a model that was never trained, stay f16. */
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <unistd.h>

#include "klt_file.h"
#include "klt_problem.h"
#include "neap.h"
#include "vm.h"

enum { CELLS = 2000, CHUNKS = 8, CACHES = 2, BATCH = 128 };

enum { ROW = 2 * 2 * 64, CHUNK = 256 * ROW };

typedef struct world {
    bool joint;
    char dir[64], gguf[96], folder[PATH_MAX], file[PATH_MAX], swap[96];
    klt_problem p;
    neap_engine *engine;
    neap_region *region;
    neap_kv *kv[CACHES];
    char *planes[CACHES][2];
    int32_t positions[CELLS];
    uint32_t used;
    void *scratch;
    char *exact[CACHES][2]; /* what was written */
} world;

static bool joint;

static void make_world(world *w) {
    memset(w, 0, sizeof *w);
    w->joint = joint;
    uint64_t digest;
    snprintf(w->dir, sizeof w->dir, "/tmp/neap-test-XXXXXX");
    CHECK(mkdtemp(w->dir) && setenv("XDG_CACHE_HOME", w->dir, 1) == 0);
    snprintf(w->gguf, sizeof w->gguf, "%s/model.gguf", w->dir);
    snprintf(w->swap, sizeof w->swap, "%s/swap", w->dir);
    FILE *out = fopen(w->gguf, "w");
    CHECK(out && fputs("some weights", out) >= 0 && fclose(out) == 0);
    CHECK(neap_model_digest(w->gguf, &digest) == 0);
    CHECK(neap_klt_folder(digest, w->folder, sizeof w->folder) == 0);
    CHECK(neap_klt_path(w->folder, joint ? "joint" : "layer", 8, w->file, sizeof w->file) == 0);
    klt_shape of = klt_two_layers;
    if (joint) of.n_blocks = 1, of.n_layers = CACHES;
    klt_problem_make(&w->p, &of, 7);
    w->p.spec.digest = digest;
    w->p.spec.profile = joint ? NEAP_KLT_FOUR_LAYERS : NEAP_KLT_ONE_LAYER;
    CHECK(neap_klt_model_write(w->file, &w->p.spec) == 0);
    for (int i = 0; i < 2 * CACHES; i++)
        w->exact[i / 2][i % 2] = klt_alloc(CELLS, ROW);
}

static void start(world *w, neap_options options) {
    if (!options.kv) options.kv = "klt:8";
    options.program = "test";
    options.swap_dir = w->swap;
    options.no_control = options.poison = true;
    w->used = 0;
    for (int32_t i = 0; i < CELLS; i++)
        w->positions[i] = i;
    CHECK(neap_engine_create(&options, &w->engine) == 0);
    neap_use_gguf(w->engine, w->gguf);
    CHECK(neap_region_create(w->engine, (size_t)CACHES * 2 * CELLS * ROW, NEAP_REGION_KV,
                             &w->region) == 0);
    for (int i = 0; i < CACHES; i++) {
        neap_kv_layout layout = {
            .layer = (int)(joint ? w->p.blocks[0].layers[i] : w->p.blocks[i].layers[0]),
            .n_cells = CELLS,
            .n_streams = 1,
            .n_planes = 2,
            .positions = w->positions};
        for (int plane = 0; plane < 2; plane++) {
            w->planes[i][plane] =
                (char *)neap_region_base(w->region) + (size_t)(2 * i + plane) * CELLS * ROW;
            layout.planes[plane] = (neap_kv_plane){.base = w->planes[i][plane],
                                                   .row_bytes = ROW,
                                                   .row_elems = ROW / 2,
                                                   .type = NEAP_KV_F16};
        }
        CHECK(neap_kv_add(w->engine, &layout, &w->kv[i]) == 0);
    }
    const size_t scratch = neap_kv_read_scratch(w->kv[0]);
    w->scratch = aligned_alloc(64, NEAP_ROUND_UP(scratch + 1, 64));
    CHECK(w->scratch);
}

static void stop(world *w) {
    neap_check(w->engine);
    neap_region_free(w->region);
    neap_engine_free(w->engine);
    free(w->scratch);
    w->engine = NULL;
}

static void remove_in(const char *dir, const char *name) {
    char path[PATH_MAX + 32];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    (void)remove(path);
}

static void free_world(world *w) {
    klt_problem_free(&w->p);
    for (int i = 0; i < 2 * CACHES; i++)
        free(w->exact[i / 2][i % 2]);
    unlink(w->file);
    unlink(w->gguf);
    rmdir(w->folder);
    remove_in(w->dir, "neap/trained");
    remove_in(w->dir, "neap");
    rmdir(w->swap);
    CHECK(rmdir(w->dir) == 0);
}

/* Within a use: cells [first, first + n), n within one chunk, of all layers. */
static void put(world *w, uint32_t first, uint32_t n, bool noise) {
    const size_t at = (size_t)first * ROW;
    for (int i = 0; i < CACHES; i++)
        CHECK(neap_kv_write(w->kv[i], 0, first, n, true) == 0);
    for (uint32_t block = 0; block < w->p.shape.n_blocks; block++) {
        neap_klt_chunk chunk = {.block = block, .n_rows = n, .positions = w->positions + first};
        for (uint32_t l = 0; l < w->p.shape.n_layers; l++) {
            char *const *planes = w->planes[w->joint ? l : block];
            chunk.k[l] = (neap_klt_plane){planes[0] + at, ROW};
            chunk.v[l] = (neap_klt_plane){planes[1] + at, ROW};
        }
        klt_chunk_fill(&w->p, &chunk, NULL);
    }
    for (int i = 0; i < 2 * CACHES; i++) {
        char *bytes = w->planes[i / 2][i % 2] + at;
        for (uint32_t e = 0; noise && e < n * ROW / 2; e++)
            ((uint16_t *)(void *)bytes)[e] = neap_f16_of_f32((float)(100 * klt_gauss()));
        memcpy(w->exact[i / 2][i % 2] + at, bytes, (size_t)n * ROW);
    }
}

static neap_stat stat_of(const world *w) {
    neap_stat stat;
    neap_stat_get(w->engine, &stat);
    return stat;
}

/* A graph that writes the next n tokens. */
static void graph(world *w, uint32_t n, bool noise) {
    neap_use_begin(w->engine, NEAP_USE_COMPUTE);
    put(w, w->used, n, noise);
    neap_use_end(w->engine, NEAP_USE_COMPUTE);
    w->used += n;
    neap_check(w->engine);
}

static void prompt(world *w, uint32_t n) {
    while (w->used < n)
        graph(w, BATCH < n - w->used ? BATCH : n - w->used, false);
}

static bool is_coded(const world *w, int i, uint32_t chunk) {
    return neap_kv_is_coded(w->kv[i], 0, chunk);
}

/* Within a use: the chunk as it is read; malloc'd. */
static char *read_chunk(world *w, int i, uint32_t chunk) {
    char *bytes = klt_alloc(2, CHUNK);
    void *const rows[2] = {bytes, bytes + CHUNK};
    CHECK(neap_kv_read(w->kv[i], 0, chunk, 0, 256, rows, w->scratch) == 0);
    return bytes;
}

static bool same_pages(const world *w, int i, uint32_t chunk, const char *bytes) {
    for (int plane = 0; plane < 2; plane++)
        if (memcmp(w->planes[i][plane] + (size_t)chunk * CHUNK, bytes + plane * CHUNK, CHUNK) != 0)
            return false;
    return true;
}

/* Squares of the differences from what was written, over its squares. */
static double loss(const world *w, int i, uint32_t chunk, const char *bytes) {
    double lost = 0, all = 0;
    for (int plane = 0; plane < 2; plane++)
        for (size_t e = 0; e < CHUNK / 2; e++) {
            uint16_t was, is;
            memcpy(&was, w->exact[i][plane] + (size_t)chunk * CHUNK + 2 * e, 2);
            memcpy(&is, bytes + plane * CHUNK + 2 * e, 2);
            const double x = (double)neap_f32_of_f16(was), d = x - (double)neap_f32_of_f16(is);
            lost += d * d;
            all += x * x;
        }
    return lost / all;
}

static uint64_t held(const world *w) {
    uint64_t bytes = 0;
    CHECK(neap_vm_held(neap_region_base(w->region), neap_region_size(w->region), &bytes) == 0);
    return bytes;
}

/* A long prompt never takes the memory of its f16 cache, and what is said is what is held. */
static void test_prompt(void) {
    world w;
    make_world(&w);
    start(&w, (neap_options){0});
    uint64_t most = 0;
    while (w.used < 7 * 256) {
        graph(&w, BATCH, false);
        most = held(&w) > most ? held(&w) : most;
        const neap_stat stat = stat_of(&w);
        CHECK(stat.kv_resident == held(&w));
        for (int i = 0; i < CACHES; i++)
            for (uint32_t c = 0; c < CHUNKS; c++)
                CHECK(is_coded(&w, i, c) == (256 * (c + 2) <= w.used));
    }
    CHECK(most <= (uint64_t)CACHES * 2 * (3 * CHUNK + 4096));
    const neap_stat stat = stat_of(&w);
    CHECK(stat.klt_chunks == CACHES * 6 && stat.klt_left == 0);
    CHECK(stat.kv_compressed_memory > 0 && stat.kv_compressed_memory < CACHES * 6 * 2 * CHUNK / 2);
    CHECK(stat.kv_storage == 0 && stat.klt_error > 0 && stat.klt_error < 1.2);
    CHECK(strcmp(stat.kv, joint ? "klt-joint-8" : "klt-layer-8") == 0);
    CHECK(stat.n_context_stats == 1 && stat.contexts[0].klt_chunks == CACHES * 6 &&
          stat.contexts[0].tokens == w.used && stat.contexts[0].kv_ratio > 2);
    stop(&w);
    free_world(&w);
}

/* Who reads one head of some rows gets those, and touches nothing else; a stamp tells of writes;
 * what a reader keeps is counted. */
static void test_read_head(void) {
    world w;
    make_world(&w);
    start(&w, (neap_options){0});
    CHECK(neap_kv_stamp(w.kv[0], 0, 0) == 0);
    prompt(&w, 1100);
    neap_use_begin(w.engine, NEAP_USE_COMPUTE);
    char *whole = read_chunk(&w, 0, 1), part[2][8 * ROW];
    void *const rows[2] = {part[0], part[1]};
    memset(part, 0x55, sizeof part);
    CHECK(neap_kv_read_head(w.kv[0], 0, 1, 72, 8, 1, rows, w.scratch) == 0);
    for (int plane = 0; plane < 2; plane++)
        for (int row = 0; row < 8; row++) {
            const char *got = part[plane] + row * ROW;
            const char *its = whole + plane * CHUNK + (72 + row) * ROW;
            CHECK(memcmp(got + ROW / 2, its + ROW / 2, ROW / 2) == 0);
            for (int i = 0; i < ROW / 2; i++)
                CHECK(got[i] == 0x55);
        }
    CHECK(neap_kv_read_head(w.kv[0], 0, 1, 72, 8, 2, rows, w.scratch) == NEAP_E_BOUND);
    const uint64_t first = neap_kv_stamp(w.kv[0], 0, 0), second = neap_kv_stamp(w.kv[0], 0, 1);
    CHECK(first != 0 && second != 0 && neap_kv_stamp(w.kv[0], 0, 4) == 0); /* not full */
    CHECK(neap_kv_write(w.kv[0], 0, 300, 1, false) == 0);
    CHECK(neap_kv_stamp(w.kv[0], 0, 0) == first && neap_kv_stamp(w.kv[0], 0, 1) != second);
    neap_use_end(w.engine, NEAP_USE_COMPUTE);
    const neap_stat before = stat_of(&w);
    neap_kv_set_overhead(w.kv[0], 1 << 20);
    const neap_stat after = stat_of(&w);
    CHECK(after.kv_compressed_memory == before.kv_compressed_memory + (1 << 20));
    CHECK(after.contexts[0].kv_ratio < before.contexts[0].kv_ratio);
    stop(&w);
    free_world(&w);
    free(whole);
}

/* Read, restored, dropped again: the same rows each time, and nothing is coded twice. */
static void test_read(void) {
    world w;
    make_world(&w);
    start(&w, (neap_options){0});
    prompt(&w, 1100);
    neap_use_begin(w.engine, NEAP_USE_COMPUTE);
    char *first = read_chunk(&w, 0, 0), *second = read_chunk(&w, 1, 1);
    CHECK(loss(&w, 0, 0, first) > 1e-4 && loss(&w, 0, 0, first) < 0.1);
    CHECK(loss(&w, 1, 1, second) > 1e-4 && loss(&w, 1, 1, second) < 0.1);
    CHECK(memcmp(first, w.exact[0][0], 4 * ROW) == 0); /* exact rows */
    char part[2][40 * ROW];
    void *const rows[2] = {part[0], part[1]};
    CHECK(neap_kv_read(w.kv[1], 0, 1, 100, 40, rows, w.scratch) == 0);
    for (int plane = 0; plane < 2; plane++)
        CHECK(memcmp(part[plane], second + plane * CHUNK + 100 * ROW, 40 * ROW) == 0);
    CHECK(neap_kv_read(w.kv[1], 0, 1, 250, 7, rows, w.scratch) == NEAP_E_BOUND);
    CHECK(neap_kv_read(w.kv[1], 0, CHUNKS, 0, 1, rows, w.scratch) == NEAP_E_BOUND);
    CHECK(neap_kv_read(w.kv[1], 0, 4, 0, 1, rows, w.scratch) == -EAGAIN); /* being written */
    neap_use_end(w.engine, NEAP_USE_COMPUTE);
    const uint64_t before = held(&w), compressed = stat_of(&w).kv_compressed_memory;

    neap_use_begin(w.engine, NEAP_USE_ACCESS);
    CHECK(neap_wait(w.engine, neap_kv_unit(w.kv[0], 0, 0)) == 0);
    CHECK(neap_wait(w.engine, neap_kv_unit(w.kv[1], 0, 1)) == 0);
    CHECK(same_pages(&w, 0, 0, first) && same_pages(&w, 1, 1, second));
    CHECK(!is_coded(&w, 0, 0));
    CHECK(neap_kv_read(w.kv[0], 0, 0, 0, 1, rows, w.scratch) == -EAGAIN);
    neap_check(w.engine);
    neap_use_end(w.engine, NEAP_USE_ACCESS);
    CHECK(is_coded(&w, 0, 0) && held(&w) == before);
    CHECK(stat_of(&w).kv_compressed_memory == compressed);
    neap_use_begin(w.engine, NEAP_USE_ACCESS);
    char *again = read_chunk(&w, 0, 0);
    CHECK(memcmp(again, first, 2 * CHUNK) == 0);
    neap_use_end(w.engine, NEAP_USE_ACCESS);
    uint64_t bytes;
    CHECK(neap_restore(w.engine, &bytes) == 0); /* they are where they belong */
    CHECK(is_coded(&w, 0, 0) && held(&w) == before);
    stop(&w);
    free(first);
    free(second);
    free(again);
    free_world(&w);
}

/* Records go to storage and come back into memory, when they are read or all together. */
static void test_evict(void) {
    world w;
    make_world(&w);
    start(&w, (neap_options){0});
    prompt(&w, 1100);
    neap_use_begin(w.engine, NEAP_USE_ACCESS);
    char *first = read_chunk(&w, 0, 0);
    neap_use_end(w.engine, NEAP_USE_ACCESS);
    for (int cycle = 0; cycle < 3; cycle++) {
        const neap_evict_request all = {.bytes = UINT64_MAX, .by_pressure = cycle == 2};
        neap_evict_result result;
        CHECK(neap_evict(w.engine, &all, &result) == 0);
        neap_check(w.engine);
        neap_stat stat = stat_of(&w);
        CHECK(stat.kv_compressed_memory == 0 && stat.kv_storage > 0 && is_coded(&w, 0, 0));
        neap_use_begin(w.engine, NEAP_USE_ACCESS);
        if (cycle == 1) {
            neap_use_end(w.engine, NEAP_USE_ACCESS);
            uint64_t bytes;
            CHECK(neap_restore(w.engine, &bytes) == 0);
            CHECK(is_coded(&w, 0, 0) && stat_of(&w).kv_compressed_memory > 0);
            neap_use_begin(w.engine, NEAP_USE_ACCESS);
        }
        char *again = read_chunk(&w, 0, 0);
        CHECK(memcmp(again, first, 2 * CHUNK) == 0 && stat_of(&w).kv_compressed_memory > 0);
        free(again);
        /* Pages, straight from a record on storage. */
        CHECK(neap_wait(w.engine, neap_kv_unit(w.kv[1], 0, 0)) == 0);
        neap_use_end(w.engine, NEAP_USE_ACCESS);
        neap_check(w.engine);
    }
    stop(&w);
    free(first);
    free_world(&w);
}

/* A coded chunk that is written to is exact in what was written, and coded again when it is old. */
static void test_written_again(void) {
    world w;
    make_world(&w);
    start(&w, (neap_options){0});
    prompt(&w, 1100);
    neap_use_begin(w.engine, NEAP_USE_COMPUTE);
    put(&w, 300, 10, false);
    CHECK(memcmp(w.planes[0][0] + 300 * ROW, w.exact[0][0] + 300 * ROW, 10 * ROW) == 0);
    neap_use_end(w.engine, NEAP_USE_COMPUTE);
    CHECK(!is_coded(&w, 0, 1) && !is_coded(&w, 1, 1) && is_coded(&w, 0, 0));
    CHECK(memcmp(w.planes[0][1] + 300 * ROW, w.exact[0][1] + 300 * ROW, 10 * ROW) == 0);
    prompt(&w, 1536);
    CHECK(is_coded(&w, 0, 1));
    neap_use_begin(w.engine, NEAP_USE_COMPUTE);
    char *bytes = read_chunk(&w, 0, 1);
    CHECK(loss(&w, 0, 1, bytes) < 0.1);
    free(bytes);
    put(&w, 256, 256, false); /* all of it: nothing need come back */
    CHECK(!is_coded(&w, 0, 1));
    neap_use_end(w.engine, NEAP_USE_COMPUTE);
    CHECK(neap_kv_clear(w.kv[0]) == 0);
    CHECK(!is_coded(&w, 0, 0) && is_coded(&w, 1, 0));
    stop(&w);
    free_world(&w);
}

/* What klt refuses stays f16 and exact, and goes by q8 when it is evicted. */
static void test_refused(void) {
    world w;
    make_world(&w);
    start(&w, (neap_options){0});
    graph(&w, 256, true);
    prompt(&w, 1100);
    CHECK(!is_coded(&w, 0, 0) && is_coded(&w, 0, 1));
    CHECK(stat_of(&w).klt_left == CACHES);
    CHECK(memcmp(w.planes[0][0], w.exact[0][0], CHUNK) == 0);
    const neap_evict_request all = {.bytes = UINT64_MAX, .only = NEAP_ONLY_KV};
    neap_evict_result result;
    CHECK(neap_evict(w.engine, &all, &result) == 0);
    CHECK(stat_of(&w).kv_resident == 0);
    neap_use_begin(w.engine, NEAP_USE_ACCESS);
    CHECK(neap_wait(w.engine, neap_kv_unit(w.kv[0], 0, 0)) == 0);
    neap_use_end(w.engine, NEAP_USE_ACCESS);
    CHECK(!is_coded(&w, 0, 0));
    stop(&w);
    free_world(&w);
}

/* Without what klt needs all stays as it is, and that is said. */
static void test_without(void) {
    world w;
    make_world(&w);
    start(&w, (neap_options){.kv = "klt:5"});
    prompt(&w, 1100);
    CHECK(!neap_kv_is_held_coded(w.kv[0]) && neap_kv_read_scratch(w.kv[0]) == 0);
    CHECK(strstr(stat_of(&w).codec_note, "f16 instead") && strcmp(stat_of(&w).kv, "f16") == 0);
    CHECK(stat_of(&w).kv_compressed_memory == 0 && !is_coded(&w, 0, 0));
    stop(&w);
    start(&w, (neap_options){.kv = "f16"});
    prompt(&w, 600);
    CHECK(!neap_kv_is_held_coded(w.kv[0]) && stat_of(&w).codec_note[0] == '\0');
    stop(&w);
    neap_engine *engine;
    const neap_options wrong = {.kv = "klt:x", .no_control = true, .swap_dir = w.swap};
    CHECK(neap_engine_create(&wrong, &engine) == NEAP_E_UNKNOWN);
    free_world(&w);
}

typedef struct reader {
    world *w;
    char *expected;
    pthread_t thread;
} reader;

static void *read_some(void *ctx) {
    reader *r = ctx;
    void *scratch = aligned_alloc(64, NEAP_ROUND_UP(neap_kv_read_scratch(r->w->kv[0]), 64));
    char *bytes = klt_alloc(2, CHUNK);
    void *const rows[2] = {bytes, bytes + CHUNK};
    CHECK(scratch);
    for (int n = 0; n < 100; n++) {
        neap_use_begin(r->w->engine, NEAP_USE_ACCESS);
        if (n % 7 == 6) {
            CHECK(neap_wait(r->w->engine, neap_kv_unit(r->w->kv[0], 0, 0)) == 0);
            CHECK(same_pages(r->w, 0, 0, r->expected));
        } else {
            const int err = neap_kv_read(r->w->kv[0], 0, 0, 0, 256, rows, scratch);
            CHECK(err == 0 || err == -EAGAIN);
            CHECK(err || memcmp(bytes, r->expected, 2 * CHUNK) == 0);
        }
        neap_use_end(r->w->engine, NEAP_USE_ACCESS);
    }
    free(bytes);
    free(scratch);
    return NULL;
}

/* Readers, restorers and evictions at once. */
static void test_threads(void) {
    world w;
    make_world(&w);
    start(&w, (neap_options){0});
    prompt(&w, 1100);
    neap_use_begin(w.engine, NEAP_USE_ACCESS);
    char *expected = read_chunk(&w, 0, 0);
    neap_use_end(w.engine, NEAP_USE_ACCESS);
    reader readers[2];
    for (int i = 0; i < 2; i++) {
        readers[i] = (reader){.w = &w, .expected = expected};
        CHECK(pthread_create(&readers[i].thread, NULL, read_some, &readers[i]) == 0);
    }
    for (int i = 0; i < 40; i++) {
        const neap_evict_request some = {.permille = 500};
        neap_evict_result result;
        uint64_t bytes;
        CHECK(neap_evict(w.engine, &some, &result) == 0);
        const int err = neap_restore(w.engine, &bytes);
        CHECK(err == 0 || err == -ECANCELED);
    }
    for (int i = 0; i < 2; i++)
        CHECK(pthread_join(readers[i].thread, NULL) == 0);
    stop(&w);
    free(expected);
    free_world(&w);
}

int main(void) {
    for (int i = 0; i < 2; i++) {
        joint = i == 1;
        test_prompt();
        test_read();
        test_read_head();
        test_evict();
        test_written_again();
        test_refused();
        test_without();
        test_threads();
    }
    return 0;
}
