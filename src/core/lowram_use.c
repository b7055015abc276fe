/* lowram_use.c - see lowram_use.h.
 *
 * A fit is of a context: it is made from the chunks of one stream that are in memory, of that which
 * holds most. When, and what for, decide() tells.
 *
 * Codec lowram: a region's caches are fitted
 *   - when they hold a context that is not coded yet: first, and again when fewer than half of its
 *     chunks are those that the last fit was made from, because it grew or was written anew. While
 *     the engine is idle, so that evictions find it made; else by the eviction;
 *   - when what a coded context grew by is not of the kind of its fit: that shows while idle, when
 *     the last of the new chunks is coded to see its error. The new fit is of the new chunks alone;
 *     what others coded stays theirs (pool.h).
 * Whatever comes later is coded by the last fit, as far as its error allows.
 *
 * Kv lowram: they are fitted when none of their chunks is coded, at the end of a graph, as soon as
 * there are as many cells as a fit looks at, or once the prompt has ended, from LEAST_CELLS on; or
 * by an eviction before that. It is meant for a context that goes on: its rank is that of one of
 * NEAP_LOWRAM_SAMPLE cells, so a shorter one is compressed less than by the ratio, and no worse.
 * Between two contexts there is none, and no other beside it; nothing is left to do while idle.
 *
 * While idle a fit works on copies, of four layers at a time and of the chunks only that it looks
 * at; it gives up as soon as the engine is used. Else it is made while no use runs. */
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "clock.h"
#include "err.h"
#include "klt_file.h"
#include "lowram_module.h"
#include "lowram_use.h"
#include "rope.h"
#include "vm.h"

#define DEFAULT_RATIO 4.0

enum { LAYERS_MAX = 1024, LEAST_CELLS = 4 * NEAP_CHUNK_CELLS };
enum { GENERATED_CELLS = 32 }; /* a graph that writes no more is not of a prompt, but its end */

bool neap_lowram_option_parse(const char *text, double *ret_ratio) {
    const size_t len = strlen("lowram");
    if (strncmp(text, "lowram", len) != 0) return false;
    if (text[len] == '\0') {
        *ret_ratio = DEFAULT_RATIO;
        return true;
    }
    return text[len] == ':' && neap_ratio_parse(text + len + 1, ret_ratio);
}

static void note(neap_engine *engine, bool in_use, const char *text) {
    pthread_mutex_lock(&engine->pool->lock);
    const bool is_known = strcmp(engine->codec_note, text) == 0;
    snprintf(engine->codec_note, sizeof engine->codec_note, "%s", text);
    pthread_mutex_unlock(&engine->pool->lock);
    if (!is_known)
        neap_log(in_use ? NEAP_LOG_INFO : NEAP_LOG_WARN, "%s lowram: %s",
                 engine->pool->holds_coded ? "kv" : "codec", text);
}

/* ---- the module ---- */

/* Lines of the module's own log, which begin as ours do. */
static void forward(int level, const char *line, void *ctx) {
    const size_t prefix = strlen("neap: ");
    (void)ctx;
    neap_log(level, "%s", strncmp(line, "neap: ", prefix) == 0 ? line + prefix : line);
}

static void *load(char *path, size_t cap) {
    static const char *const places[] = {"", "../lib/", "../lib/neap/"};
    Dl_info own;
    char folder[PATH_MAX];
    void *library = NULL;
    if (!dladdr((void *)(uintptr_t)&neap_lowram_load, &own) || !own.dli_fname ||
        snprintf(folder, sizeof folder, "%s", own.dli_fname) >= (int)sizeof folder)
        return NULL;
    char *name = strrchr(folder, '/');
    if (name)
        name[1] = '\0';
    else
        snprintf(folder, sizeof folder, "./");
    for (size_t i = 0; i < sizeof places / sizeof *places && !library; i++)
        if (snprintf(path, cap, "%s%s" NEAP_LOWRAM_MODULE_FILE, folder, places[i]) < (int)cap)
            library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    return library;
}

void neap_lowram_load(neap_engine *engine) {
    const char *instead = neap_codec_fallback(engine);
    char path[PATH_MAX], text[sizeof engine->codec_note];
    void *library = load(path, sizeof path);
    const neap_lowram_module *module = library ? dlsym(library, NEAP_LOWRAM_MODULE_SYMBOL) : NULL;
    const bool is_ours = module && strcmp(module->version, NEAP_VERSION) == 0;
    engine->lowram_library = library;
    if (!is_ours || engine->policy->clean_storage) {
        if (is_ours)
            snprintf(text, sizeof text, "%s instead: policy %s writes KV as it is", instead,
                     engine->policy->name);
        else
            snprintf(text, sizeof text, "%s instead: " NEAP_LOWRAM_MODULE_FILE " %s", instead,
                     library ? "is of another version" : "is not beside this library");
        note(engine, false, text);
        return;
    }
    module->open(forward, NULL);
    engine->lowram = module;
    note(engine, true, "no context yet");
}

void neap_lowram_unload(neap_engine *engine) {
    if (engine->lowram_library) dlclose(engine->lowram_library);
}

int neap_kv_set_rope(neap_kv *kv, uint32_t k_head_dim, const neap_kv_rope *rope) {
    neap_klt_rope *folded = malloc(sizeof *folded);
    if (!folded) return -ENOMEM;
    int err = neap_rope_fold(rope, k_head_dim, folded);
    pthread_mutex_lock(&kv->pool->lock);
    if (!err && !kv->rope) {
        kv->rope = folded;
        kv->k_head_dim = k_head_dim;
        folded = NULL;
    }
    pthread_mutex_unlock(&kv->pool->lock);
    free(folded);
    return err;
}

/* ---- contexts ---- */

/* What a fit is made from. */
typedef struct source {
    uint32_t n_layers, n_cells, n_streams;
    uint32_t stream, first, n_rows; /* of the stream: from which cell on, how many */
    uint32_t n_tokens;              /* in use from that cell on, those after the whole chunks too */
    uint64_t written;               /* cells of the stream, when it was found */
    const int32_t *positions;       /* [n_rows] */
    neap_kv *kvs[LAYERS_MAX];       /* by layer */
    neap_lowram_layer layers[LAYERS_MAX];
    neap_klt_plane k[LAYERS_MAX], v[LAYERS_MAX];
} source;

static bool are_rows(const neap_kv_plane *plane) {
    return !plane->transposed && plane->type == NEAP_KV_F16 &&
           plane->row_bytes == 2 * (size_t)plane->row_elems;
}

bool neap_lowram_knows(const neap_kv *kv) {
    const neap_kv_layout *layout = &kv->layout;
    if (!kv->rope || !layout->positions || layout->n_planes != 2 || layout->layer < 0 ||
        !are_rows(&layout->planes[0]) || !are_rows(&layout->planes[1]))
        return false;
    const uint32_t k_row = layout->planes[0].row_elems, v_row = layout->planes[1].row_elems;
    return k_row % kv->k_head_dim == 0 && v_row % (k_row / kv->k_head_dim) == 0;
}

/* The region's caches that grow with the context - those with a sliding window are smaller - in the
 * order of their layers. [L] */
static void find_layers(const neap_pool *pool, const neap_region *region, source *src) {
    for (neap_kv *kv = pool->kvs; kv; kv = kv->next)
        if (kv->region == region && neap_lowram_knows(kv) && kv->layout.n_cells > src->n_cells)
            src->n_cells = kv->layout.n_cells;
    for (neap_kv *kv = pool->kvs; kv; kv = kv->next) {
        if (kv->region != region || !neap_lowram_knows(kv) || kv->layout.n_cells != src->n_cells ||
            src->n_layers == LAYERS_MAX)
            continue;
        uint32_t at = src->n_layers++;
        for (; at > 0 && src->kvs[at - 1]->layout.layer > kv->layout.layer; at--)
            src->kvs[at] = src->kvs[at - 1];
        src->kvs[at] = kv;
    }
    src->n_streams = src->n_layers ? src->kvs[0]->layout.n_streams : 0;
}

/* Whether all layers have the chunk, whole, and some are still to be coded. [L] */
static bool is_there(const neap_pool *pool, const source *src, uint32_t stream, uint32_t chunk,
                     bool *ret_is_coded, bool *ret_is_new) {
    *ret_is_coded = *ret_is_new = false;
    for (uint32_t l = 0; l < src->n_layers; l++) {
        const neap_unit *unit = neap_pool_unit(pool, neap_kv_unit(src->kvs[l], stream, chunk));
        if (neap_unit_state_of(unit) != NEAP_UNIT_RESIDENT || unit->used < NEAP_CHUNK_CELLS)
            return false;
        *ret_is_coded = *ret_is_coded || unit->klt;
        *ret_is_new = *ret_is_new || (!unit->swap && !unit->keeps_codec);
    }
    return true;
}

/* The whole chunks of a stream after the last that a fit coded, as far as all are there; 0: none is
 * to be coded. And the cells in use of the chunk after them. [L] */
static uint32_t rows_there(const neap_pool *pool, const source *src, uint32_t stream,
                           uint32_t *ret_first, uint32_t *ret_rest) {
    uint32_t chunk = 0, first = 0;
    bool has_new = false, is_coded, is_new;
    for (; (chunk + 1) * NEAP_CHUNK_CELLS <= src->n_cells &&
           is_there(pool, src, stream, chunk, &is_coded, &is_new);
         chunk++) {
        if (is_coded) first = chunk + 1;
        has_new = !is_coded && (has_new || is_new);
    }
    *ret_first = first * NEAP_CHUNK_CELLS;
    *ret_rest = chunk * NEAP_CHUNK_CELLS < src->n_cells
                    ? neap_pool_unit(pool, neap_kv_unit(src->kvs[0], stream, chunk))->used
                    : 0;
    return has_new ? (chunk - first) * NEAP_CHUNK_CELLS : 0;
}

/* Planes of a layer from the source's first cell on. */
static void set_layer(source *src, uint32_t l) {
    const neap_kv *kv = src->kvs[l];
    const neap_kv_plane *k = &kv->layout.planes[0], *v = &kv->layout.planes[1];
    const uint32_t n_heads = k->row_elems / kv->k_head_dim;
    const size_t first = (size_t)src->stream * src->n_cells + src->first;
    src->layers[l] = (neap_lowram_layer){.layer = (uint32_t)kv->layout.layer,
                                         .n_kv_heads = n_heads,
                                         .k_head_dim = kv->k_head_dim,
                                         .v_head_dim = v->row_elems / n_heads,
                                         .rope = *kv->rope};
    src->k[l] = (neap_klt_plane){(char *)k->base + first * k->row_bytes, k->row_bytes};
    src->v[l] = (neap_klt_plane){(char *)v->base + first * v->row_bytes, v->row_bytes};
}

/* False: nothing to fit. [L] */
static bool find_source(const neap_pool *pool, const neap_region *region, source *src) {
    memset(src, 0, sizeof *src);
    find_layers(pool, region, src);
    for (uint32_t s = 0; s < src->n_streams; s++) {
        uint32_t first, rest;
        const uint32_t n_rows = rows_there(pool, src, s, &first, &rest);
        if (n_rows <= src->n_rows) continue;
        src->n_rows = n_rows;
        src->n_tokens = n_rows + rest;
        src->first = first;
        src->stream = s;
    }
    if (src->n_rows == 0) return false;
    src->written = src->kvs[0]->written[src->stream];
    src->positions =
        src->kvs[0]->layout.positions + (size_t)src->stream * src->n_cells + src->first;
    for (uint32_t l = 0; l < src->n_layers; l++)
        set_layer(src, l);
    return true;
}

/* How many rows of the region's fit are still those that it was made from. [L] */
static uint32_t rows_left(const neap_pool *pool, const neap_region *region, const source *src) {
    const neap_fit_mark *fit = &region->fit;
    uint32_t n = 0;
    if (fit->stream >= src->n_streams || fit->first + fit->n_rows > src->n_cells) return 0;
    for (uint32_t at = fit->first; at < fit->first + fit->n_rows; at += NEAP_CHUNK_CELLS) {
        const neap_unit *unit =
            neap_pool_unit(pool, neap_kv_unit(src->kvs[0], fit->stream, at / NEAP_CHUNK_CELLS));
        n += unit->used == NEAP_CHUNK_CELLS && unit->written_at <= fit->written ? NEAP_CHUNK_CELLS
                                                                                : 0;
    }
    return n;
}

/* ---- when ---- */

typedef enum occasion { BY_EVICTION, AFTER_COMPUTATION, WHILE_IDLE } occasion;
typedef enum action { LEAVE, FIT, TRY } action; /* TRY: the fit that there is on what came later */

/* A fit in the making. */
typedef struct fitting {
    neap_engine *engine;
    occasion when;
    neap_region *region;
    source src;
    /* While idle: copies of the positions and, in a buffer as large as the rows of some layers, of
     * the planes; there are pages where some are copied. */
    int32_t *positions;
    char *buffer;
    size_t cap;
} fitting;

/* Takes the pool's lock, while idle both, unless the engine is used: -EAGAIN. Regions and caches
 * are there as long as it is not. */
static int lock(const fitting *f) {
    neap_engine *engine = f->engine;
    if (f->when == WHILE_IDLE) {
        pthread_mutex_lock(&engine->use_lock);
        if (neap_idle_is_over(engine)) {
            pthread_mutex_unlock(&engine->use_lock);
            return -EAGAIN;
        }
    }
    pthread_mutex_lock(&engine->pool->lock);
    return 0;
}

static void unlock(const fitting *f) {
    pthread_mutex_unlock(&f->engine->pool->lock);
    if (f->when == WHILE_IDLE) pthread_mutex_unlock(&f->engine->use_lock);
}

/* A region that has caches after the one given; NULL: the first; none. [L] */
static neap_region *next_region(const neap_engine *engine, const neap_region *region) {
    neap_region *at = region ? region->next : engine->regions;
    while (at && at->kind != NEAP_REGION_KV)
        at = at->next;
    return at;
}

/* Whether the prompt has ended, or has enough cells; else it is asked for again. [L] */
static bool is_time(neap_engine *engine, neap_region *region, const source *src) {
    const uint64_t since = src->written - region->written;
    region->written = src->written;
    if (src->n_rows >= NEAP_LOWRAM_SAMPLE || since <= GENERATED_CELLS) return true;
    atomic_store(&engine->awaits_fit, true);
    return false;
}

/* Kv lowram: a fit that codes nothing any more was of another context; chunks are not coded by it
 * as they come. [L] */
static void forget_last(neap_pool *pool, neap_region *region) {
    if (region->fit.n_rows == 0 || neap_pool_region_is_coded(pool, region)) return;
    neap_pool_disown_klt(pool, region);
    region->fit = (neap_fit_mark){0};
}

/* What is to be done about the region's caches, from the source that is found in them. [L] */
static action decide(fitting *f) {
    neap_pool *pool = f->engine->pool;
    neap_region *region = f->region;
    source *src = &f->src;
    if (pool->holds_coded) forget_last(pool, region);
    if (!find_source(pool, region, src) || neap_pool_region_is_copied(pool, region)) return LEAVE;
    const bool is_first = region->fit.n_rows == 0;
    if (pool->holds_coded)
        return is_first && src->n_rows >= LEAST_CELLS &&
                       (f->when != AFTER_COMPUTATION || is_time(f->engine, region, src))
                   ? FIT
                   : LEAVE;
    if (is_first || (src->first == 0 && src->n_rows > 2 * rows_left(pool, region, src))) return FIT;
    return f->when == WHILE_IDLE && src->stream == region->fit.stream ? TRY : LEAVE;
}

static bool copy_positions(fitting *f) {
    const size_t size = f->src.n_rows * sizeof *f->positions;
    free(f->positions);
    f->positions = malloc(size);
    if (!f->positions) return false;
    memcpy(f->positions, f->src.positions, size);
    f->src.positions = f->positions;
    return true;
}

/* Goes on to the next region; false: there is none left, or the engine is used. */
static bool next_source(fitting *f, action *ret_action) {
    if (lock(f)) return false;
    f->region = next_region(f->engine, f->region);
    *ret_action = f->region ? decide(f) : LEAVE;
    if (*ret_action != LEAVE && f->when == WHILE_IDLE && !copy_positions(f)) *ret_action = LEAVE;
    unlock(f);
    return f->region != NULL;
}

/* ---- copies, while idle ---- */

/* Layers that can be in a group take as much. */
static int make_buffer(fitting *f, uint32_t group_layers) {
    const size_t page = neap_vm_page();
    size_t row = 0;
    for (uint32_t l = 0; l < f->src.n_layers; l++) {
        const size_t layer = f->src.k[l].row_stride + f->src.v[l].row_stride;
        if (layer > row) row = layer;
    }
    f->cap = NEAP_ROUND_UP(group_layers * row * f->src.n_rows, page);
    void *buffer;
    const int err = neap_vm_reserve(f->cap, page, &buffer);
    if (!err) f->buffer = buffer;
    return err;
}

/* Rows [at, at + NEAP_CHUNK_CELLS) of layers. Uses may begin meanwhile: they wait before they write
 * cells, and evictions before they take any. */
static int copy_rows(fitting *f, uint32_t first_layer, uint32_t n_layers, uint32_t at) {
    neap_pool *pool = f->engine->pool;
    const int err = lock(f);
    if (err) return err;
    bool there = true;
    for (uint32_t l = first_layer; l < first_layer + n_layers; l++) {
        const uint32_t chunk = (f->src.first + at) / NEAP_CHUNK_CELLS;
        const neap_unit *unit =
            neap_pool_unit(pool, neap_kv_unit(f->src.kvs[l], f->src.stream, chunk));
        there = there && neap_unit_state_of(unit) == NEAP_UNIT_RESIDENT;
    }
    pool->reading = there;
    unlock(f);
    if (!there) return -EAGAIN;
    for (uint32_t l = first_layer; l < first_layer + n_layers; l++) {
        const neap_kv_layout *layout = &f->src.kvs[l]->layout;
        const size_t first = (size_t)f->src.stream * f->src.n_cells + f->src.first + at;
        for (uint32_t p = 0; p < 2; p++) {
            const size_t row = layout->planes[p].row_bytes;
            memcpy((char *)(p ? f->src.v[l] : f->src.k[l]).data + at * row,
                   (const char *)layout->planes[p].base + first * row, NEAP_CHUNK_CELLS * row);
        }
    }
    pthread_mutex_lock(&pool->lock);
    pool->reading = false;
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->lock);
    return 0;
}

/* As neap_lowram_options.go_on: copies the chunks that the fit looks at. */
static int go_on(void *ctx, uint32_t first_layer, uint32_t n_layers) {
    fitting *f = ctx;
    const uint32_t n_chunks = f->src.n_rows / NEAP_CHUNK_CELLS,
                   most = NEAP_LOWRAM_SAMPLE / NEAP_CHUNK_CELLS,
                   n = n_chunks < most ? n_chunks : most;
    int err = lock(f);
    if (!err) unlock(f);
    char *at = f->buffer;
    for (uint32_t l = first_layer; l < first_layer + n_layers; l++) {
        f->src.k[l].data = at;
        at += f->src.n_rows * f->src.k[l].row_stride;
        f->src.v[l].data = at;
        at += f->src.n_rows * f->src.v[l].row_stride;
    }
    for (uint32_t i = 0; i < n && n_layers > 0 && !err; i++)
        err = copy_rows(f, first_layer, n_layers,
                        neap_lowram_sampled(i, n, n_chunks) * NEAP_CHUNK_CELLS);
    return err;
}

/* ---- making it ---- */

static void tell_too_short(const fitting *f, const neap_lowram_options *options, char *text,
                           size_t cap) {
    const neap_engine *engine = f->engine;
    const source *src = &f->src;
    const uint32_t needed = engine->lowram->rows_needed(options, src->layers, src->n_layers);
    const uint32_t rows = options->budget_rows;
    char more[48] = "";
    if (needed > src->n_rows) snprintf(more, sizeof more, ", which needs %u", needed);
    snprintf(text, cap, "%s instead: a context of %u tokens is too short for ratio %g%s",
             neap_codec_fallback(engine), src->n_tokens > rows ? src->n_tokens : rows,
             engine->lowram_ratio, more);
}

/* err: how it ended. */
static void tell(const fitting *f, const neap_lowram_options *options, int err, uint64_t ns) {
    neap_engine *engine = f->engine;
    char text[sizeof engine->codec_note];
    if (err == NEAP_E_BUDGET)
        tell_too_short(f, options, text, sizeof text);
    else if (err)
        snprintf(text, sizeof text, "%s instead: no fit of %u cells: %s",
                 neap_codec_fallback(engine), f->src.n_rows, neap_strerror(err));
    else
        snprintf(text, sizeof text, "lowram-%g, fitted to %u cells in %.1f s%s",
                 engine->lowram_ratio, f->src.n_rows, (double)ns * 1e-9,
                 f->when == WHILE_IDLE ? " while idle" : "");
    note(engine, !err, text);
}

/* While idle: nothing has used the engine since the source was found, it is still what it was. */
static int adopt(fitting *f, neap_klt_model *model) {
    neap_pool *pool = f->engine->pool;
    const source *src = &f->src;
    int err = lock(f);
    if (err) return err;
    if (f->when == WHILE_IDLE &&
        (pool->n_restoring > 0 || neap_pipeline_queued(f->engine->pipeline) > 0))
        err = -EAGAIN;
    else
        err = neap_pool_adopt_klt(pool, f->region, model);
    if (!err)
        f->region->fit = (neap_fit_mark){.stream = src->stream,
                                         .first = src->first,
                                         .n_rows = src->n_rows,
                                         .written = src->written,
                                         .tried = src->written};
    unlock(f);
    return err;
}

static int fit(fitting *f) {
    const neap_engine *engine = f->engine;
    const source *src = &f->src;
    const uint64_t began_ns = neap_clock_ns();
    const neap_lowram_context context = {
        .n_rows = src->n_rows, .positions = src->positions, .k = src->k, .v = src->v};
    neap_lowram_options options;
    neap_klt_model *model = NULL;
    int err = 0;
    engine->lowram->defaults(&options, engine->lowram_ratio);
    options.sample_rows = NEAP_LOWRAM_SAMPLE;
    if (engine->pool->holds_coded)
        options.budget_rows = src->n_cells < NEAP_LOWRAM_SAMPLE ? src->n_cells : NEAP_LOWRAM_SAMPLE;
    if (f->when == WHILE_IDLE) {
        options.go_on = go_on;
        options.go_on_ctx = f;
        err = make_buffer(f, options.group_layers);
    }
    if (!err) err = engine->lowram->make(&options, src->layers, src->n_layers, &context, &model);
    if (!err) {
        err = adopt(f, model);
        if (err) neap_klt_model_close(model);
    }
    if (f->buffer) neap_vm_unmap(f->buffer, f->cap);
    f->buffer = NULL;
    /* What goes wrong while idle an eviction will tell, if it is so then, too. */
    if (!err || f->when != WHILE_IDLE) tell(f, &options, err, neap_clock_ns() - began_ns);
#ifdef __GLIBC__
    /* It has freed a multiple of what a fit keeps; who has begun to use the engine does not wait.
     */
    if (err != -EAGAIN) malloc_trim(0);
#endif
    return err;
}

/* ---- trying one ---- */

/* The next chunk of those that the region's fit is to be tried on: the last one of the stream, of
 * one block after the other; NULL: it was tried on them. [L] */
static neap_unit *to_try(const neap_pool *pool, const neap_region *region, const source *src,
                         uint32_t *inout_layer) {
    const uint32_t last = (src->first + src->n_rows) / NEAP_CHUNK_CELLS - 1;
    neap_unit *members[NEAP_KLT_LAYERS];
    for (; *inout_layer < src->n_layers; ++*inout_layer) {
        neap_unit *unit =
            neap_pool_unit(pool, neap_kv_unit(src->kvs[*inout_layer], src->stream, last));
        if (unit->written_at <= region->fit.tried) return NULL;
        const size_t n = neap_klt_members(pool, unit, members);
        if (n > 0 && members[0] == unit) return unit;
    }
    return NULL;
}

/* Until later chunks are full, err is what comes of trying. */
static int note_trial(fitting *f, int err) {
    const int used = lock(f);
    if (used) return used;
    f->region->fit.tried = f->src.written;
    unlock(f);
    return err;
}

/* Whether a fit that there is does not do for what came after it: NEAP_E_BOUND. */
static int try_fit(fitting *f, neap_worker *worker) {
    neap_pool *pool = f->engine->pool;
    for (uint32_t layer = 0;; layer++) {
        neap_copy copy;
        int err = lock(f);
        if (err) return err;
        size_t most;
        neap_unit *unit = to_try(pool, f->region, &f->src, &layer);
        const size_t size = unit ? neap_pool_copy_size(pool, unit, &most) : 0;
        if (unit && !neap_worker_bounce(worker, size)) err = -ENOMEM;
        if (unit && !err) err = neap_pool_copy_take(pool, unit, size, &copy);
        if (!unit || err) {
            unlock(f);
            return unit ? err : note_trial(f, 0);
        }
        pthread_mutex_unlock(&f->engine->use_lock);
        neap_pool_copy_read(pool, &copy, worker->bounce);
        pthread_mutex_unlock(&pool->lock);
        err = neap_pool_copy_try(pool, &copy);
        if (err) return err == NEAP_E_BOUND ? note_trial(f, err) : err;
    }
}

/* ---- of all regions ---- */

/* Says so where no cache is of a kind that can be fitted, as of recurrent models and of latent
 * attention. */
static void tell_unfit(neap_engine *engine) {
    const neap_pool *pool = engine->pool;
    char text[sizeof engine->codec_note];
    bool none = true, unfit = true;
    snprintf(text, sizeof text,
             "%s instead: no cache of this model has keys, turned by RoPE, and values as f16 rows",
             neap_codec_fallback(engine));
    pthread_mutex_lock(&engine->pool->lock);
    for (const neap_kv *kv = pool->kvs; kv; kv = kv->next) {
        none = false;
        unfit = unfit && !neap_lowram_knows(kv);
    }
    pthread_mutex_unlock(&engine->pool->lock);
    if (none)
        note(engine, false, "nothing to code: this model has no cache of keys and values");
    else if (unfit)
        note(engine, false, text);
}

/* Whether there is a new fit. */
static bool fit_regions(neap_engine *engine, occasion when) {
    fitting *f = calloc(1, sizeof *f);
    neap_worker worker = {0};
    bool has_fitted = false;
    action what;
    if (!f) return false;
    f->engine = engine;
    f->when = when;
    while (next_source(f, &what)) {
        int err = what == TRY ? try_fit(f, &worker) : 0;
        if (what == FIT || err == NEAP_E_BOUND) {
            err = fit(f);
            has_fitted = has_fitted || !err;
        }
        if (err == -EAGAIN) break;
    }
    neap_worker_fini(&worker);
    free(f->positions);
    free(f);
    return has_fitted;
}

void neap_lowram_prepare(neap_engine *engine) {
    if (!engine->lowram) return;
    tell_unfit(engine);
    fit_regions(engine, BY_EVICTION);
}

bool neap_lowram_follow(neap_engine *engine) {
    atomic_store(&engine->awaits_fit, false);
    tell_unfit(engine);
    return fit_regions(engine, AFTER_COMPUTATION);
}

bool neap_lowram_fits_idle(const neap_engine *engine) {
    return engine->lowram && !engine->pool->holds_coded;
}

void neap_lowram_fit_idle(neap_engine *engine) {
    if (neap_lowram_fits_idle(engine) && !neap_idle_on_battery(engine))
        fit_regions(engine, WHILE_IDLE);
}
