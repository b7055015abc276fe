/* lowram_use.c - see lowram_use.h.
 *
 * A fit is of a context: it is made from what is in memory when the caches of a region are evicted
 * and none of their chunks is coded yet, of the stream that holds most. Until all chunks that it
 * coded were written to again it stays; the chunks of the next context are then fitted anew.
 *
 * With kv lowram it is made earlier, at the end of a graph: as soon as there are as many cells as a
 * fit looks at, or once the prompt has ended, from LEAST_CELLS on. It is meant for a context that
 * goes on: its rank is that of one of NEAP_LOWRAM_SAMPLE cells, so a shorter one is compressed less
 * than by the ratio, and no worse. Between two contexts there is none. */
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "err.h"
#include "klt_file.h"
#include "lowram_module.h"
#include "lowram_use.h"
#include "rope.h"

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
    uint32_t stream, n_rows;
    uint32_t n_tokens;        /* in use from the first on, those after the whole chunks too */
    neap_kv *kvs[LAYERS_MAX]; /* by layer */
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
static void find_layers(const neap_pool *pool, const void *region, source *src) {
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

/* Whole chunks of a stream from its first on that are there in all layers; and the cells in use of
 * the one after them. [L] */
static uint32_t rows_there(const neap_pool *pool, const source *src, uint32_t stream,
                           bool *ret_has_new, uint32_t *ret_rest) {
    uint32_t chunk = 0;
    *ret_has_new = false;
    *ret_rest = 0;
    for (; (chunk + 1) * NEAP_CHUNK_CELLS <= src->n_cells; chunk++)
        for (uint32_t l = 0; l < src->n_layers; l++) {
            const neap_unit *unit = neap_pool_unit(pool, neap_kv_unit(src->kvs[l], stream, chunk));
            if (neap_unit_state_of(unit) != NEAP_UNIT_RESIDENT || unit->used < NEAP_CHUNK_CELLS) {
                *ret_rest = unit->used;
                return chunk * NEAP_CHUNK_CELLS;
            }
            *ret_has_new = *ret_has_new || (!unit->swap && !unit->keeps_codec);
        }
    return chunk * NEAP_CHUNK_CELLS;
}

/* False: nothing to fit. [L] */
static bool find_source(const neap_pool *pool, const void *region, source *src) {
    memset(src, 0, sizeof *src);
    find_layers(pool, region, src);
    for (uint32_t s = 0; s < src->n_streams; s++) {
        bool has_new;
        uint32_t rest;
        const uint32_t n_rows = rows_there(pool, src, s, &has_new, &rest);
        if (!has_new || n_rows <= src->n_rows) continue;
        src->n_rows = n_rows;
        src->n_tokens = n_rows + rest;
        src->stream = s;
    }
    for (uint32_t l = 0; l < src->n_layers; l++) {
        const neap_kv *kv = src->kvs[l];
        const neap_kv_plane *k = &kv->layout.planes[0], *v = &kv->layout.planes[1];
        const uint32_t n_heads = k->row_elems / kv->k_head_dim;
        const size_t first = (size_t)src->stream * src->n_cells;
        src->layers[l] = (neap_lowram_layer){.layer = (uint32_t)kv->layout.layer,
                                             .n_kv_heads = n_heads,
                                             .k_head_dim = kv->k_head_dim,
                                             .v_head_dim = v->row_elems / n_heads,
                                             .rope = *kv->rope};
        src->k[l] = (neap_klt_plane){(char *)k->base + first * k->row_bytes, k->row_bytes};
        src->v[l] = (neap_klt_plane){(char *)v->base + first * v->row_bytes, v->row_bytes};
    }
    return src->n_rows > 0;
}

static void tell_too_short(const neap_engine *engine, const neap_lowram_options *options,
                           const source *src, char *text, size_t cap) {
    const uint32_t needed = engine->lowram->rows_needed(options, src->layers, src->n_layers);
    const uint32_t rows = options->budget_rows;
    char more[48] = "";
    if (needed > src->n_rows) snprintf(more, sizeof more, ", which needs %u", needed);
    snprintf(text, cap, "%s instead: a context of %u tokens is too short for ratio %g%s",
             neap_codec_fallback(engine), src->n_tokens > rows ? src->n_tokens : rows,
             engine->lowram_ratio, more);
}

static bool fit(neap_engine *engine, const void *region, const source *src) {
    const uint64_t began_ns = neap_clock_ns();
    char text[sizeof engine->codec_note];
    neap_lowram_options options;
    neap_klt_model *model = NULL;
    engine->lowram->defaults(&options, engine->lowram_ratio);
    options.sample_rows = NEAP_LOWRAM_SAMPLE;
    if (engine->pool->holds_coded)
        options.budget_rows = src->n_cells < NEAP_LOWRAM_SAMPLE ? src->n_cells : NEAP_LOWRAM_SAMPLE;
    const neap_lowram_context context = {.n_rows = src->n_rows,
                                         .positions =
                                             src->kvs[0]->layout.positions +
                                             (size_t)src->stream * src->kvs[0]->layout.n_cells,
                                         .k = src->k,
                                         .v = src->v};
    int err = engine->lowram->make(&options, src->layers, src->n_layers, &context, &model);
    if (!err) {
        pthread_mutex_lock(&engine->pool->lock);
        err = neap_pool_adopt_klt(engine->pool, region, model);
        pthread_mutex_unlock(&engine->pool->lock);
        if (err) neap_klt_model_close(model);
    }
    if (err == NEAP_E_BUDGET)
        tell_too_short(engine, &options, src, text, sizeof text);
    else if (err)
        snprintf(text, sizeof text, "%s instead: no fit of %u cells: %s",
                 neap_codec_fallback(engine), src->n_rows, neap_strerror(err));
    else
        snprintf(text, sizeof text, "lowram-%g, fitted to %u cells in %.1f s", engine->lowram_ratio,
                 src->n_rows, (double)(neap_clock_ns() - began_ns) * 1e-9);
    note(engine, !err, text);
#ifdef __GLIBC__
    malloc_trim(0); /* it has freed a multiple of what a fit keeps */
#endif
    return !err;
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
    const uint64_t written = src->kvs[0]->written[src->stream], since = written - region->written;
    region->written = written;
    if (src->n_rows >= NEAP_LOWRAM_SAMPLE || since <= GENERATED_CELLS) return true;
    atomic_store(&engine->awaits_fit, true);
    return false;
}

/* A fit that codes nothing any more was of another context: where KV is held coded, chunks are not
 * coded by it as they come. */
static bool prepare(neap_engine *engine, bool in_time) {
    source *src = engine->lowram ? malloc(sizeof *src) : NULL;
    bool has_fitted = false;
    neap_region *region = NULL;
    while (src) {
        pthread_mutex_lock(&engine->pool->lock);
        region = next_region(engine, region);
        bool is_due = region && !neap_pool_region_is_coded(engine->pool, region);
        if (is_due && engine->pool->holds_coded) neap_pool_disown_klt(engine->pool, region);
        is_due = is_due && find_source(engine->pool, region, src) &&
                 (!engine->pool->holds_coded || src->n_rows >= LEAST_CELLS) &&
                 (!in_time || is_time(engine, region, src));
        pthread_mutex_unlock(&engine->pool->lock);
        if (!region) break;
        if (is_due && fit(engine, region, src)) has_fitted = true;
    }
    free(src);
    return has_fitted;
}

void neap_lowram_prepare(neap_engine *engine) {
    prepare(engine, false);
}

bool neap_lowram_follow(neap_engine *engine) {
    atomic_store(&engine->awaits_fit, false);
    return prepare(engine, true);
}
