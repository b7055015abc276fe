/* Codec klt in the engine: the first eviction rounds, every later cycle is bit-identical, whatever
 * the host does to positions meanwhile; what klt is not for stays with q8; a model's file that is
 * not there, damaged or of another model is said. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include "clock.h"
#include "klt_file.h"
#include "klt_problem.h"
#include "neap.h"
#include "vm.h"

/* Two full chunks, which are klt's where it fits, and one that has cells to spare. */
enum { CELLS = 900, USED = 700, TAIL = 512, CACHES = 3, CHUNKS = 3, FULL = 2 };

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
enum { ROW = 2 * 2 * 64 };

typedef struct world {
    char dir[64], gguf[96], folder[PATH_MAX], file[PATH_MAX], swap[96];
    klt_problem p;
    neap_engine *engine;
    neap_region *region;
    neap_kv *kv[CACHES]; /* two that the model fits, one of a layer it does not know */
    char *planes[CACHES][2];
    int32_t positions[CELLS];
} world;

static void write_file(const char *path, const char *text) {
    FILE *out = fopen(path, "w");
    CHECK(out && fputs(text, out) >= 0 && fclose(out) == 0);
}

/* A GGUF (which the engine only digests) and what was learned from it. */
static void make_world(world *w) {
    memset(w, 0, sizeof *w);
    uint64_t digest;
    snprintf(w->dir, sizeof w->dir, "/tmp/neap-test-XXXXXX");
    CHECK(mkdtemp(w->dir) && setenv("XDG_CACHE_HOME", w->dir, 1) == 0);
    snprintf(w->gguf, sizeof w->gguf, "%s/model.gguf", w->dir);
    snprintf(w->swap, sizeof w->swap, "%s/swap", w->dir);
    write_file(w->gguf, "some weights");
    CHECK(neap_model_digest(w->gguf, &digest) == 0);
    CHECK(neap_klt_folder(digest, w->folder, sizeof w->folder) == 0);
    CHECK(neap_klt_path(w->folder, "layer", 8, w->file, sizeof w->file) == 0);
    klt_problem_make(&w->p, &shape, 7);
    w->p.spec.digest = digest;
    w->p.spec.profile = NEAP_KLT_ONE_LAYER;
    CHECK(neap_klt_model_write(w->file, &w->p.spec) == 0);
}

static neap_kv_layout layout_of(const world *w, int i) {
    neap_kv_layout layout = {.layer = i == 2 ? 99 : (int)w->p.blocks[i].layers[0],
                             .n_cells = CELLS,
                             .n_streams = 1,
                             .n_planes = 2,
                             .positions = w->positions};
    for (int plane = 0; plane < 2; plane++)
        layout.planes[plane] = (neap_kv_plane){.base = w->planes[i][plane],
                                               .row_bytes = ROW,
                                               .row_elems = ROW / 2,
                                               .type = NEAP_KV_F16};
    return layout;
}

static void start(world *w, neap_options options) {
    if (!options.codec) options.codec = "klt";
    options.program = "test";
    options.swap_dir = w->swap;
    options.no_control = options.poison = true;
    for (int32_t i = 0; i < CELLS; i++)
        w->positions[i] = i;
    CHECK(neap_engine_create(&options, &w->engine) == 0);
    neap_use_gguf(w->engine, w->gguf);
    CHECK(neap_region_create(w->engine, (size_t)CACHES * 2 * CELLS * ROW, NEAP_REGION_KV,
                             &w->region) == 0);
    for (int i = 0; i < CACHES; i++) {
        for (int plane = 0; plane < 2; plane++)
            w->planes[i][plane] =
                (char *)neap_region_base(w->region) + (size_t)(2 * i + plane) * CELLS * ROW;
        const neap_kv_layout layout = layout_of(w, i);
        CHECK(neap_kv_add(w->engine, &layout, &w->kv[i]) == 0);
    }
}

static void stop(world *w) {
    neap_check(w->engine);
    neap_region_free(w->region);
    neap_engine_free(w->engine);
    w->engine = NULL;
}

static void remove_in(const char *dir, const char *name) {
    char path[PATH_MAX + 32];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    (void)remove(path);
}

static void free_world(world *w) {
    klt_problem_free(&w->p);
    unlink(w->file);
    unlink(w->gguf);
    rmdir(w->folder);
    remove_in(w->swap, "write-behind");
    remove_in(w->dir, "neap/trained");
    remove_in(w->dir, "neap");
    rmdir(w->swap);
    CHECK(rmdir(w->dir) == 0);
}

/* Cells [first, first + n), n within one chunk, of the distribution that the model was made for;
 * noise: of no such thing. */
static void put(world *w, int i, uint32_t first, uint32_t n, bool noise) {
    const size_t at = (size_t)first * ROW;
    CHECK(neap_kv_write(w->kv[i], 0, first, n, true) == 0);
    neap_klt_chunk chunk = {.block = i == 2 ? 0 : (uint32_t)i,
                            .n_rows = n,
                            .positions = w->positions + first,
                            .k = {{w->planes[i][0] + at, ROW}},
                            .v = {{w->planes[i][1] + at, ROW}}};
    if (!noise) {
        klt_chunk_fill(&w->p, &chunk, NULL);
        return;
    }
    for (uint32_t e = 0; e < n * ROW / 2; e++)
        for (int plane = 0; plane < 2; plane++)
            ((uint16_t *)(void *)(w->planes[i][plane] + at))[e] =
                neap_f16_of_f32((float)(100 * klt_gauss()));
}

static void fill(world *w) {
    klt_state = 99;
    neap_use_begin(w->engine, NEAP_USE_COMPUTE);
    for (int i = 0; i < CACHES; i++)
        for (uint32_t first = 0; first < USED; first += 256)
            put(w, i, first, first == TAIL ? USED - TAIL : 256, false);
    neap_use_end(w->engine, NEAP_USE_COMPUTE);
}

static neap_stat stat_of(const world *w) {
    neap_stat stat;
    neap_stat_get(w->engine, &stat);
    return stat;
}

static neap_evict_result evict(world *w) {
    const neap_evict_request request = {.bytes = UINT64_MAX, .only = NEAP_ONLY_KV};
    neap_evict_result result;
    CHECK(neap_evict(w->engine, &request, &result) == 0);
    CHECK(stat_of(w).units_kv_evicted == stat_of(w).units_kv);
    neap_check(w->engine);
    return result;
}

static void restore(world *w) {
    uint64_t bytes;
    CHECK(neap_restore(w->engine, &bytes) == 0);
    neap_check(w->engine);
}

/* All cells in use; malloc'd. */
static char *snapshot(const world *w) {
    char *bytes = malloc((size_t)CACHES * 2 * USED * ROW), *at = bytes;
    CHECK(bytes);
    for (int i = 0; i < CACHES; i++)
        for (int plane = 0; plane < 2; plane++, at += (size_t)USED * ROW)
            memcpy(at, w->planes[i][plane], (size_t)USED * ROW);
    return bytes;
}

static bool same(const world *w, const char *bytes) {
    char *now = snapshot(w);
    const bool equal = memcmp(now, bytes, (size_t)CACHES * 2 * USED * ROW) == 0;
    free(now);
    return equal;
}

/* Squares of the differences over squares, of a cache's K and V. */
static double loss(const world *w, const char *bytes, int i) {
    double lost = 0, all = 0;
    for (int plane = 0; plane < 2; plane++)
        for (size_t e = 0; e < (size_t)USED * ROW / 2; e++) {
            uint16_t was, is;
            memcpy(&was, bytes + (size_t)(2 * i + plane) * USED * ROW + 2 * e, 2);
            memcpy(&is, w->planes[i][plane] + 2 * e, 2);
            const double x = (double)neap_f32_of_f16(was), d = x - (double)neap_f32_of_f16(is);
            lost += d * d;
            all += x * x;
        }
    return lost / all;
}

static void test_cycles(void) {
    world w;
    make_world(&w);
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
        CHECK(memcmp(w.planes[i][0], exact + (size_t)(2 * i) * USED * ROW, 4 * ROW) == 0);
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
    put(&w, 0, USED, 40, false);
    neap_use_end(w.engine, NEAP_USE_COMPUTE);
    evict(&w);
    CHECK(stat_of(&w).klt_chunks == 2 * FULL);
    const uint64_t more = stat_of(&w).bytes_written_storage - before;
    CHECK(more > 0 && more < (USED - TAIL + 40) * 2 * ROW);
    restore(&w);
    CHECK(same(&w, rounded));
    neap_use_begin(w.engine, NEAP_USE_COMPUTE);
    put(&w, 0, USED + 40, 768 - USED - 40, false);
    neap_use_end(w.engine, NEAP_USE_COMPUTE);
    evict(&w);
    CHECK(stat_of(&w).klt_chunks == 2 * FULL + 1);
    restore(&w);
    CHECK(memcmp(w.planes[0][0], rounded, (size_t)TAIL * ROW) == 0 && !same(&w, rounded));
    stop(&w);
    free(exact);
    free(rounded);
    free_world(&w);
}

/* Positions of any order; and K comes back as it was although the host has moved on. */
static void test_positions(void) {
    world w;
    make_world(&w);
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
    make_world(&w);
    start(&w, (neap_options){0});
    for (int32_t i = 256; i < 512; i++)
        w.positions[i] = -1;
    fill(&w);
    neap_use_begin(w.engine, NEAP_USE_COMPUTE);
    put(&w, 0, 0, 256, true);
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
    put(&w, 0, 0, 256, false);
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
    make_world(&w);
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
    make_world(&w);
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
    make_world(&w);
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
    const uint64_t until_ns = neap_clock_ns() + 20000000000u;
    while (stat_of(&w).clean_chunks < CACHES * FULL) {
        CHECK(neap_clock_ns() < until_ns);
        usleep(1000);
    }
    CHECK(stat_of(&w).klt_chunks == 2 * FULL);
    CHECK(!same(&w, rounded)); /* still exact */
    evict(&w);
    restore(&w);
    CHECK(same(&w, rounded));
    stop(&w);
    free(rounded);
    free_world(&w);
}

static void spoil_swap(const world *w) {
    DIR *fds = opendir("/proc/self/fd");
    CHECK(fds);
    int n = 0;
    for (struct dirent *entry; (entry = readdir(fds));) {
        char path[64], target[PATH_MAX];
        snprintf(path, sizeof path, "/proc/self/fd/%.20s", entry->d_name);
        const ssize_t len = readlink(path, target, sizeof target - 1);
        if (len <= 0) continue;
        target[len] = '\0';
        if (strncmp(target, w->swap, strlen(w->swap)) != 0) continue;
        const int fd = open(path, O_WRONLY | O_CLOEXEC);
        struct stat st;
        CHECK(fd >= 0 && fstat(fd, &st) == 0);
        for (off_t at = 200; at < st.st_size; at += 4096)
            CHECK(pwrite(fd, "spoilt", 6, at) == 6);
        CHECK(close(fd) == 0);
        n++;
    }
    closedir(fds);
    CHECK(n > 0);
}

static void test_damaged_record(void) {
    world w;
    make_world(&w);
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
    CHECK(neap_engine_create(&(neap_options){.codec = "klt:x"}, &engine) == NEAP_E_UNKNOWN);

    make_world(&w);
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
    free_world(&w);
}

/* V transposed, as without flash attention. */
static void test_transposed(void) {
    world w;
    make_world(&w);
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

/* ---- at random ---- */

typedef enum mark { SETTLED, WRITTEN, ROUNDED } mark;

typedef struct shadow {
    char *bytes; /* as snapshot() */
    mark marks[CACHES][CHUNKS];
    uint32_t n_rounded;
} shadow;

static uint32_t cells_of(int chunk) {
    return chunk == FULL ? USED - TAIL : 256;
}

static char *shadow_at(const shadow *sh, int i, int plane, int chunk) {
    return sh->bytes + ((size_t)(2 * i + plane) * USED + (size_t)chunk * 256) * ROW;
}

/* Some of a chunk's first cells become what another cell was: of the kind that was learned, or (V
 * and K of a wrong position) not. */
static void rewrite(world *w, shadow *sh, const char *bank) {
    const int i = (int)klt_next(CACHES), chunk = (int)klt_next(CHUNKS);
    const uint32_t n = 1 + klt_next(cells_of(chunk)), from = klt_next(USED - n);
    const uint32_t first = klt_next(2) ? from : (uint32_t)chunk * 256;
    neap_use_begin(w->engine, NEAP_USE_COMPUTE);
    CHECK(neap_wait(w->engine, neap_kv_unit(w->kv[i], 0, (uint32_t)chunk)) == 0);
    for (int plane = 0; plane < 2; plane++) { /* what it was rounded to, if it was */
        char *now = w->planes[i][plane] + (size_t)chunk * 256 * ROW;
        if (sh->marks[i][chunk] == ROUNDED)
            memcpy(shadow_at(sh, i, plane, chunk), now, cells_of(chunk) * (size_t)ROW);
    }
    CHECK(neap_kv_write(w->kv[i], 0, (uint32_t)chunk * 256, n, false) == 0);
    for (int plane = 0; plane < 2; plane++) {
        const char *source = bank + ((size_t)(2 * i + plane) * USED + first) * ROW;
        memcpy(w->planes[i][plane] + (size_t)chunk * 256 * ROW, source, (size_t)n * ROW);
        memcpy(shadow_at(sh, i, plane, chunk), source, (size_t)n * ROW);
    }
    neap_use_end(w->engine, NEAP_USE_COMPUTE);
    sh->marks[i][chunk] = WRITTEN;
}

static void evict_some(world *w, shadow *sh) {
    const neap_evict_request request = {.permille = 1 + klt_next(1000), .only = NEAP_ONLY_KV};
    neap_evict_result result;
    CHECK(neap_evict(w->engine, &request, &result) == 0);
    for (int i = 0; i < CACHES; i++)
        for (uint32_t c = 0; c < CHUNKS; c++)
            if (sh->marks[i][c] == WRITTEN &&
                !neap_unit_resident(w->engine, neap_kv_unit(w->kv[i], 0, c)))
                sh->marks[i][c] = ROUNDED;
}

/* A chunk changes with its first eviction only. */
static void check_all(world *w, shadow *sh) {
    for (int i = 0; i < CACHES; i++)
        for (int c = 0; c < CHUNKS; c++)
            for (int plane = 0; plane < 2; plane++) {
                char *now = w->planes[i][plane] + (size_t)c * 256 * ROW;
                const size_t len = cells_of(c) * (size_t)ROW;
                const bool equal = memcmp(now, shadow_at(sh, i, plane, c), len) == 0;
                CHECK(equal || sh->marks[i][c] == ROUNDED);
                sh->n_rounded += !equal;
                memcpy(shadow_at(sh, i, plane, c), now, len);
                if (plane == 1 && sh->marks[i][c] == ROUNDED) sh->marks[i][c] = SETTLED;
            }
}

static void test_random(uint64_t seed) {
    world w;
    shadow sh = {0};
    make_world(&w);
    start(&w, (neap_options){.swap_limit_bytes = seed % 2 ? 300000 : 0});
    fill(&w);
    char *bank = snapshot(&w);
    sh.bytes = snapshot(&w);
    for (int i = 0; i < CACHES; i++)
        for (int c = 0; c < CHUNKS; c++)
            sh.marks[i][c] = WRITTEN;
    klt_state = seed;
    uint32_t by_klt = 0, left = 0;
    for (int step = 0; step < 150; step++) {
        const uint32_t what = klt_next(8);
        if (what < 3) {
            evict_some(&w, &sh);
        } else if (what < 5) {
            rewrite(&w, &sh, bank);
        } else if (what < 6) {
            neap_use_begin(w.engine, NEAP_USE_COMPUTE);
            for (int32_t i = 0; i < CELLS; i++)
                w.positions[i] = klt_next(4) ? i : -1;
            neap_use_end(w.engine, NEAP_USE_COMPUTE);
        } else {
            restore(&w);
            check_all(&w, &sh);
            for (int32_t i = 0; i < CELLS; i++)
                w.positions[i] = i;
        }
        neap_check(w.engine);
        by_klt += stat_of(&w).klt_chunks;
        left += stat_of(&w).klt_left;
    }
    CHECK(sh.n_rounded > 0 && by_klt > 0 && left > 0);
    stop(&w);
    free(bank);
    free(sh.bytes);
    free_world(&w);
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
    for (uint64_t seed = 1; seed <= 6; seed++) {
        printf("seed %d\n", (int)seed);
        test_random(seed);
    }
    return 0;
}
