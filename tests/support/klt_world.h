/* klt_world.h - an engine with codec klt, a model's file that it finds, and caches: those that the
 * model fits, block by block, and one of a layer that it does not know. Evicted ranges are
 * inaccessible. */
#ifndef NEAP_TESTS_KLT_WORLD_H
#define NEAP_TESTS_KLT_WORLD_H

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include "clock.h"
#include "klt_file.h"
#include "klt_problem.h"
#include "neap.h"

/* Two full chunks, which are klt's where it fits, and one that has cells to spare. */
enum { CELLS = 900, USED = 700, TAIL = 512, CHUNKS = 3, FULL = 2, MOST_CACHES = 5 };

typedef struct world {
    char dir[64], gguf[96], folder[PATH_MAX], file[PATH_MAX], swap[96];
    klt_problem p;
    int n_caches, n_known; /* the known ones come first */
    size_t row;            /* bytes, of K as of V */
    neap_engine *engine;
    neap_region *region;
    neap_kv *kv[MOST_CACHES];
    char *planes[MOST_CACHES][2];
    int32_t positions[CELLS];
} world;

static inline void write_file(const char *path, const char *text) {
    FILE *out = fopen(path, "w");
    CHECK(out && fputs(text, out) >= 0 && fclose(out) == 0);
}

/* A GGUF (which the engine only digests) and what was learned from it, at ratio 8. */
static inline void make_world(world *w, const klt_shape *shape, const char *profile) {
    memset(w, 0, sizeof *w);
    uint64_t digest;
    snprintf(w->dir, sizeof w->dir, "/tmp/neap-test-XXXXXX");
    CHECK(mkdtemp(w->dir) && setenv("XDG_CACHE_HOME", w->dir, 1) == 0);
    snprintf(w->gguf, sizeof w->gguf, "%s/model.gguf", w->dir);
    snprintf(w->swap, sizeof w->swap, "%s/swap", w->dir);
    write_file(w->gguf, "some weights");
    CHECK(neap_model_digest(w->gguf, &digest) == 0);
    CHECK(neap_klt_folder(digest, w->folder, sizeof w->folder) == 0);
    CHECK(neap_klt_path(w->folder, profile, 8, w->file, sizeof w->file) == 0);
    CHECK(shape->k_dim == shape->v_dim);
    w->n_known = (int)(shape->n_blocks * shape->n_layers);
    w->n_caches = w->n_known + 1;
    w->row = klt_row_bytes(shape, false);
    CHECK(w->n_caches <= MOST_CACHES);
    klt_problem_make(&w->p, shape, 7);
    w->p.spec.digest = digest;
    w->p.spec.profile = shape->n_layers > 1 ? NEAP_KLT_FOUR_LAYERS : NEAP_KLT_ONE_LAYER;
    CHECK(neap_klt_model_write(w->file, &w->p.spec) == 0);
}

static inline uint32_t block_of(const world *w, int i) {
    return i < w->n_known ? (uint32_t)i / w->p.shape.n_layers : 0;
}

static inline uint32_t layer_at(const world *w, int i) {
    return i < w->n_known ? (uint32_t)i % w->p.shape.n_layers : 0;
}

static inline neap_kv_layout layout_of(const world *w, int i) {
    neap_kv_layout layout = {
        .layer = i < w->n_known ? (int)w->p.blocks[block_of(w, i)].layers[layer_at(w, i)] : 99,
        .n_cells = CELLS,
        .n_streams = 1,
        .n_planes = 2,
        .positions = w->positions};
    for (int plane = 0; plane < 2; plane++)
        layout.planes[plane] = (neap_kv_plane){.base = w->planes[i][plane],
                                               .row_bytes = w->row,
                                               .row_elems = (uint32_t)w->row / 2,
                                               .type = NEAP_KV_F16};
    return layout;
}

static inline void start(world *w, neap_options options) {
    if (!options.codec) options.codec = "klt";
    options.program = "test";
    options.swap_dir = w->swap;
    options.no_control = options.poison = true;
    for (int32_t i = 0; i < CELLS; i++)
        w->positions[i] = i;
    CHECK(neap_engine_create(&options, &w->engine) == 0);
    neap_use_gguf(w->engine, w->gguf);
    CHECK(neap_region_create(w->engine, (size_t)w->n_caches * 2 * CELLS * w->row, NEAP_REGION_KV,
                             &w->region) == 0);
    for (int i = 0; i < w->n_caches; i++) {
        for (int plane = 0; plane < 2; plane++)
            w->planes[i][plane] =
                (char *)neap_region_base(w->region) + (size_t)(2 * i + plane) * CELLS * w->row;
        const neap_kv_layout layout = layout_of(w, i);
        CHECK(neap_kv_add(w->engine, &layout, &w->kv[i]) == 0);
    }
}

static inline void stop(world *w) {
    neap_check(w->engine);
    neap_region_free(w->region);
    neap_engine_free(w->engine);
    w->engine = NULL;
}

static inline void remove_in(const char *dir, const char *name) {
    char path[PATH_MAX + 32];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    (void)remove(path);
}

static inline void free_world(world *w) {
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

/* Cells [first, first + n), n within one chunk, of all caches of a block, of the distribution that
 * the model was made for: rows of one draw belong together. only: of that cache alone; -1: of all.
 */
static inline void put_block(world *w, uint32_t block, int only, uint32_t first, uint32_t n) {
    neap_klt_chunk drawn;
    klt_chunk_make(&w->p, block, n, 0, &drawn);
    memcpy((void *)(uintptr_t)drawn.positions, w->positions + first, n * sizeof *w->positions);
    klt_chunk_fill(&w->p, &drawn, NULL);
    for (int i = 0; i < w->n_caches; i++) {
        const bool is_of_block = i < w->n_known && block_of(w, i) == block;
        if (only >= 0 ? i != only : !is_of_block) continue;
        const size_t at = (size_t)first * w->row;
        CHECK(neap_kv_write(w->kv[i], 0, first, n, true) == 0);
        memcpy(w->planes[i][0] + at, drawn.k[layer_at(w, i)].data, n * w->row);
        memcpy(w->planes[i][1] + at, drawn.v[layer_at(w, i)].data, n * w->row);
    }
    klt_chunk_free(&w->p, &drawn);
}

static inline void put(world *w, int i, uint32_t first, uint32_t n) {
    put_block(w, block_of(w, i), i, first, n);
}

/* Cells of no such distribution. */
static inline void put_noise(world *w, int i, uint32_t first, uint32_t n) {
    CHECK(neap_kv_write(w->kv[i], 0, first, n, true) == 0);
    for (size_t e = 0; e < n * w->row / 2; e++)
        for (int plane = 0; plane < 2; plane++)
            ((uint16_t *)(void *)(w->planes[i][plane] + (size_t)first * w->row))[e] =
                neap_f16_of_f32((float)(100 * klt_gauss()));
}

static inline void fill(world *w) {
    klt_state = 99;
    neap_use_begin(w->engine, NEAP_USE_COMPUTE);
    for (uint32_t first = 0; first < USED; first += 256) {
        const uint32_t n = first == TAIL ? USED - TAIL : 256;
        for (uint32_t b = 0; b < w->p.shape.n_blocks; b++)
            put_block(w, b, -1, first, n);
        put(w, w->n_known, first, n);
    }
    neap_use_end(w->engine, NEAP_USE_COMPUTE);
}

static inline neap_stat stat_of(const world *w) {
    neap_stat stat;
    neap_stat_get(w->engine, &stat);
    return stat;
}

static inline neap_evict_result evict(world *w) {
    const neap_evict_request request = {.bytes = UINT64_MAX, .only = NEAP_ONLY_KV};
    neap_evict_result result;
    CHECK(neap_evict(w->engine, &request, &result) == 0);
    CHECK(stat_of(w).units_kv_evicted == stat_of(w).units_kv);
    neap_check(w->engine);
    return result;
}

static inline void restore(world *w) {
    uint64_t bytes;
    CHECK(neap_restore(w->engine, &bytes) == 0);
    neap_check(w->engine);
}

/* Where a cell lies in a snapshot. */
static inline size_t snapshot_at(const world *w, int i, int plane, uint32_t cell) {
    return ((size_t)(2 * i + plane) * USED + cell) * w->row;
}

/* All cells in use; malloc'd. */
static inline char *snapshot(const world *w) {
    char *bytes = malloc(snapshot_at(w, w->n_caches, 0, 0));
    CHECK(bytes);
    for (int i = 0; i < w->n_caches; i++)
        for (int plane = 0; plane < 2; plane++)
            memcpy(bytes + snapshot_at(w, i, plane, 0), w->planes[i][plane], USED * w->row);
    return bytes;
}

static inline bool same(const world *w, const char *bytes) {
    char *now = snapshot(w);
    const bool equal = memcmp(now, bytes, snapshot_at(w, w->n_caches, 0, 0)) == 0;
    free(now);
    return equal;
}

/* Squares of the differences over squares, of cells [first, end) of a cache's K and V. */
static inline double loss_in(const world *w, const char *bytes, int i, uint32_t first,
                             uint32_t end) {
    double lost = 0, all = 0;
    for (int plane = 0; plane < 2; plane++)
        for (size_t e = first * w->row / 2; e < end * w->row / 2; e++) {
            uint16_t was, is;
            memcpy(&was, bytes + snapshot_at(w, i, plane, 0) + 2 * e, 2);
            memcpy(&is, w->planes[i][plane] + 2 * e, 2);
            const double x = (double)neap_f32_of_f16(was), d = x - (double)neap_f32_of_f16(is);
            lost += d * d;
            all += x * x;
        }
    return lost / all;
}

static inline double loss(const world *w, const char *bytes, int i) {
    return loss_in(w, bytes, i, 0, USED);
}

/* Overwrites bytes in every block of the (unnamed) swap file. */
static inline void spoil_swap(const world *w) {
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

/* Waits until so many chunks have been written behind. */
static inline void await_clean(const world *w, uint32_t n) {
    const uint64_t until_ns = neap_clock_ns() + 20000000000u;
    while (stat_of(w).clean_chunks < n) {
        CHECK(neap_clock_ns() < until_ns);
        usleep(1000);
    }
}

/* ---- at random ---- */

typedef enum mark { SETTLED, WRITTEN, ROUNDED } mark;

typedef struct shadow {
    char *bytes, *bank; /* as snapshot(): what must be there, and cells to be written */
    mark marks[MOST_CACHES][CHUNKS];
    uint32_t n_rounded;
} shadow;

static inline uint32_t cells_of(int chunk) {
    return chunk == FULL ? USED - TAIL : 256;
}

/* Some of a chunk's first cells become what another cell was: of the kind that was learned, or (V
 * and K of a wrong position) not. */
static inline void rewrite(world *w, shadow *sh, int i, int chunk, uint32_t n, uint32_t first) {
    CHECK(neap_wait(w->engine, neap_kv_unit(w->kv[i], 0, (uint32_t)chunk)) == 0);
    const uint32_t begin = (uint32_t)chunk * 256;
    for (int plane = 0; plane < 2; plane++) { /* what it was rounded to, if it was */
        if (sh->marks[i][chunk] == ROUNDED)
            memcpy(sh->bytes + snapshot_at(w, i, plane, begin),
                   w->planes[i][plane] + begin * w->row, cells_of(chunk) * w->row);
    }
    CHECK(neap_kv_write(w->kv[i], 0, begin, n, false) == 0);
    for (int plane = 0; plane < 2; plane++) {
        const char *source = sh->bank + snapshot_at(w, i, plane, first);
        memcpy(w->planes[i][plane] + begin * w->row, source, n * w->row);
        memcpy(sh->bytes + snapshot_at(w, i, plane, begin), source, n * w->row);
    }
    sh->marks[i][chunk] = WRITTEN;
}

/* One cache's chunk, or those of all caches. */
static inline void rewrite_some(world *w, shadow *sh, bool all) {
    const int which = (int)klt_next((uint32_t)w->n_caches), chunk = (int)klt_next(CHUNKS);
    const uint32_t n = 1 + klt_next(cells_of(chunk)), from = klt_next(USED - n);
    const uint32_t first = klt_next(2) ? from : (uint32_t)chunk * 256;
    neap_use_begin(w->engine, NEAP_USE_COMPUTE);
    for (int i = 0; i < w->n_caches; i++)
        if (all || i == which) rewrite(w, sh, i, chunk, n, first);
    neap_use_end(w->engine, NEAP_USE_COMPUTE);
}

static inline void evict_some(world *w, shadow *sh) {
    const neap_evict_request request = {.permille = 1 + klt_next(1000), .only = NEAP_ONLY_KV};
    neap_evict_result result;
    CHECK(neap_evict(w->engine, &request, &result) == 0);
    CHECK(result.exhausted || result.released_bytes >= result.asked_bytes);
    for (int i = 0; i < w->n_caches; i++)
        for (uint32_t c = 0; c < CHUNKS; c++)
            if (sh->marks[i][c] == WRITTEN &&
                !neap_unit_resident(w->engine, neap_kv_unit(w->kv[i], 0, c)))
                sh->marks[i][c] = ROUNDED;
}

/* A chunk changes with its first eviction only. */
static inline void check_chunk(world *w, shadow *sh, int i, int c) {
    for (int plane = 0; plane < 2; plane++) {
        char *was = sh->bytes + snapshot_at(w, i, plane, (uint32_t)c * 256);
        const char *now = w->planes[i][plane] + (size_t)c * 256 * w->row;
        const size_t len = cells_of(c) * w->row;
        const bool equal = memcmp(now, was, len) == 0;
        CHECK(equal || sh->marks[i][c] == ROUNDED);
        sh->n_rounded += !equal;
        memcpy(was, now, len);
    }
    if (sh->marks[i][c] == ROUNDED) sh->marks[i][c] = SETTLED;
}

/* Some chunks are waited for by themselves. */
static inline void look_at_some(world *w, shadow *sh) {
    neap_use_begin(w->engine, NEAP_USE_COMPUTE);
    for (uint32_t n = 1 + klt_next(4); n > 0; n--) {
        const int i = (int)klt_next((uint32_t)w->n_caches), c = (int)klt_next(CHUNKS);
        const neap_unit_id unit = neap_kv_unit(w->kv[i], 0, (uint32_t)c);
        if (klt_next(2)) CHECK(neap_need(w->engine, &unit, 1) == 0);
        CHECK(neap_wait(w->engine, unit) == 0);
        check_chunk(w, sh, i, c);
    }
    neap_use_end(w->engine, NEAP_USE_COMPUTE);
}

/* Evictions, restores, writes of one cache's or all caches' chunks, positions that are not known.
 * With an odd seed storage takes little. Returns how many chunks klt had coded, summed over the
 * steps. */
static inline uint32_t run_random(world *w, uint64_t seed, neap_options options) {
    shadow sh = {0};
    uint32_t by_klt = 0, left = 0;
    printf("seed %d\n", (int)seed);
    fflush(stdout);
    options.swap_limit_bytes = seed % 2 ? w->row * 400 * (size_t)w->n_caches : 0;
    start(w, options);
    fill(w);
    sh.bank = snapshot(w);
    sh.bytes = snapshot(w);
    for (int i = 0; i < w->n_caches; i++)
        for (int c = 0; c < CHUNKS; c++)
            sh.marks[i][c] = WRITTEN;
    klt_state = seed;
    for (int step = 0; step < 150; step++) {
        const uint32_t what = klt_next(10);
        if (what < 3) {
            evict_some(w, &sh);
        } else if (what < 6) {
            rewrite_some(w, &sh, what == 3);
        } else if (what < 7) {
            neap_use_begin(w->engine, NEAP_USE_COMPUTE);
            for (int32_t i = 0; i < CELLS; i++)
                w->positions[i] = klt_next(4) ? i : -1;
            neap_use_end(w->engine, NEAP_USE_COMPUTE);
        } else if (what < 8) {
            look_at_some(w, &sh);
        } else {
            restore(w);
            for (int i = 0; i < w->n_caches; i++)
                for (int c = 0; c < CHUNKS; c++)
                    check_chunk(w, &sh, i, c);
            for (int32_t i = 0; i < CELLS; i++)
                w->positions[i] = i;
        }
        neap_check(w->engine);
        by_klt += stat_of(w).klt_chunks;
        left += stat_of(w).klt_left;
    }
    CHECK(sh.n_rounded > 0 && left > 0);
    stop(w);
    free(sh.bank);
    free(sh.bytes);
    return by_klt;
}
#endif
