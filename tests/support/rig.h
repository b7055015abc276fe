/* rig.h - a small synthetic model on an engine: weights from a file made up here, KV caches of
 * several shapes, and a shadow copy of every byte that must come back.
 *
 * Weights   N_LAYERS units of two extents at odd offsets in one file, and one unit without a file.
 * Caches    0: f16, long rows, so that coded copies stay in place; 1: f16 with V transposed;
 *           2: quantised rows of an odd size, whose chunks share pages.
 * A chunk written since it was last evicted may come back rounded by a lossy codec, once. */
#ifndef NEAP_TESTS_RIG_H
#define NEAP_TESTS_RIG_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bytes.h"
#include "check.h"
#include "neap.h"
#include "vm.h"

#define RIG_LAYERS 6
#define RIG_EXTENT 300001u /* odd: extents start and end inside pages */
#define RIG_HEADER 4100u   /* of the model file */
#define RIG_WEIGHTS (RIG_LAYERS + 1)
#define RIG_CACHES 3
#define RIG_STREAMS 2u
#define RIG_CELLS 900u /* the last chunk of a stream is a short one */
#define RIG_CHUNKS 4u

typedef enum rig_mark { RIG_SETTLED, RIG_WRITTEN, RIG_ROUNDED } rig_mark;

typedef struct rig_cache {
    neap_kv *kv;
    neap_kv_layout layout;
    unsigned char *shadow[2];
    size_t plane_bytes;
    uint32_t used[RIG_STREAMS];
    rig_mark marks[RIG_STREAMS][RIG_CHUNKS];
} rig_cache;

typedef struct rig {
    neap_engine *engine;
    char dir[64], model[96], swap[96];
    neap_region *weights_region, *kv_region, *scratch_region;
    unsigned char *file; /* the model's bytes */
    size_t file_len;
    unsigned char *loose; /* bytes of the unit without a file */
    neap_unit_id weights[RIG_WEIGHTS];
    rig_cache caches[RIG_CACHES];
    bool lossless;
    int rebuilt; /* calls of rebuild */
} rig;

typedef struct rig_random {
    uint64_t state;
} rig_random;

static inline uint32_t rig_next(rig_random *r) {
    r->state ^= r->state << 13;
    r->state ^= r->state >> 7;
    r->state ^= r->state << 17;
    return (uint32_t)(r->state >> 32);
}

static inline uint32_t rig_below(rig_random *r, uint32_t n) {
    return rig_next(r) % n;
}

static inline size_t rig_weight_offset(int layer, int extent) {
    return RIG_HEADER + (size_t)layer * (2 * RIG_EXTENT + 64) + (size_t)extent * (RIG_EXTENT + 32);
}

static inline void rig_write_model(const rig *r) {
    FILE *out = fopen(r->model, "wb");
    CHECK(out && fwrite(r->file, 1, r->file_len, out) == r->file_len);
    CHECK(fclose(out) == 0);
}

static inline int rig_rebuild(void *ctx, void *addr, size_t len) {
    rig *r = ctx;
    r->rebuilt++;
    memcpy(addr, r->loose, len);
    return 0;
}

static inline void rig_add_weights(rig *r, bool can_rebuild) {
    const size_t loose_at = NEAP_ROUND_UP(r->file_len, (size_t)4096) + 777;
    CHECK(neap_region_create(r->engine, loose_at + 2 * RIG_EXTENT, NEAP_REGION_WEIGHTS,
                             &r->weights_region) == 0);
    unsigned char *base = neap_region_base(r->weights_region);
    memcpy(base, r->file, r->file_len);
    memcpy(base + loose_at, r->loose, RIG_EXTENT);
    for (int layer = 0; layer < RIG_LAYERS; layer++) {
        neap_weight_extent extents[2];
        for (int i = 0; i < 2; i++) {
            const size_t at = rig_weight_offset(layer, i);
            extents[i] = (neap_weight_extent){
                .addr = base + at, .len_bytes = RIG_EXTENT, .path = r->model, .file_offset = at};
        }
        CHECK(neap_weights_add(r->engine, layer, extents, 2, &r->weights[layer]) == 0);
    }
    const neap_weight_extent extent = {.addr = base + loose_at,
                                       .len_bytes = RIG_EXTENT,
                                       .rebuild = can_rebuild ? rig_rebuild : NULL,
                                       .rebuild_ctx = r};
    CHECK(neap_weights_add(r->engine, RIG_LAYERS, &extent, 1, &r->weights[RIG_LAYERS]) == 0);
}

static inline void rig_add_caches(rig *r) {
    const uint32_t elems[RIG_CACHES] = {192, 64, 64};
    const size_t row_bytes[RIG_CACHES] = {2 * elems[0], 2 * elems[1], 102};
    CHECK(neap_region_create(r->engine, (size_t)RIG_CACHES * 2 * RIG_STREAMS * RIG_CELLS * 256,
                             NEAP_REGION_KV, &r->kv_region) == 0);
    char *at = neap_region_base(r->kv_region);
    for (int i = 0; i < RIG_CACHES; i++) {
        rig_cache *cache = &r->caches[i];
        cache->layout = (neap_kv_layout){
            .layer = i, .n_cells = RIG_CELLS, .n_streams = RIG_STREAMS, .n_planes = 2};
        cache->plane_bytes = (size_t)RIG_STREAMS * RIG_CELLS * row_bytes[i];
        for (int p = 0; p < 2; p++) {
            cache->layout.planes[p] = (neap_kv_plane){.base = at,
                                                      .row_bytes = row_bytes[i],
                                                      .row_elems = elems[i],
                                                      .type = i == 2 ? NEAP_KV_OTHER : NEAP_KV_F16,
                                                      .transposed = i == 1 && p == 1};
            at += NEAP_ROUND_UP(cache->plane_bytes, (size_t)64);
            cache->shadow[p] = calloc(1, cache->plane_bytes);
            CHECK(cache->shadow[p]);
        }
        CHECK(neap_kv_add(r->engine, &cache->layout, &cache->kv) == 0);
    }
}

static inline void rig_make(rig *r, neap_options options, bool can_rebuild) {
    memset(r, 0, sizeof *r);
    snprintf(r->dir, sizeof r->dir, "/tmp/neap-test-XXXXXX");
    CHECK(mkdtemp(r->dir));
    snprintf(r->model, sizeof r->model, "%s/model.bin", r->dir);
    snprintf(r->swap, sizeof r->swap, "%s/swap", r->dir);
    r->file_len = rig_weight_offset(RIG_LAYERS, 0) + 100;
    r->file = malloc(r->file_len);
    r->loose = malloc(RIG_EXTENT);
    CHECK(r->file && r->loose);
    rig_random random = {88172645463325252u};
    for (size_t i = 0; i < r->file_len; i++)
        r->file[i] = (unsigned char)rig_next(&random);
    for (size_t i = 0; i < RIG_EXTENT; i++)
        r->loose[i] = (unsigned char)rig_next(&random);
    rig_write_model(r);
    options.program = "test";
    if (!options.swap_dir) options.swap_dir = r->swap;
    options.no_control = true;
    r->lossless = options.codec && strcmp(options.codec, "none") == 0;
    CHECK(neap_engine_create(&options, &r->engine) == 0);
    rig_add_weights(r, can_rebuild);
    rig_add_caches(r);
    CHECK(neap_region_create(r->engine, 1 << 20, NEAP_REGION_SCRATCH, &r->scratch_region) == 0);
}

static inline void rig_free(rig *r) {
    neap_region_free(r->weights_region);
    neap_region_free(r->kv_region);
    neap_region_free(r->scratch_region);
    neap_engine_free(r->engine);
    for (int i = 0; i < RIG_CACHES; i++)
        for (int p = 0; p < 2; p++)
            free(r->caches[i].shadow[p]);
    free(r->file);
    free(r->loose);
    char written[128]; /* the count of write-behind */
    snprintf(written, sizeof written, "%s/write-behind", r->swap);
    unlink(written);
    unlink(r->model);
    rmdir(r->swap);
    CHECK(rmdir(r->dir) == 0);
}

/* ---- weights ---- */

static inline bool rig_weights_right(const rig *r, int i) {
    const unsigned char *base = neap_region_base(r->weights_region);
    if (i == RIG_LAYERS)
        return memcmp(base + NEAP_ROUND_UP(r->file_len, (size_t)4096) + 777, r->loose,
                      RIG_EXTENT) == 0;
    const size_t at = rig_weight_offset(i, 0);
    return memcmp(base + at, r->file + at, 2 * RIG_EXTENT + 32) == 0;
}

/* ---- cells ---- */

/* Offset in its plane of element e (of elem_bytes; 0: the whole row) of a cell. */
static inline size_t rig_cell_at(const rig_cache *cache, int plane, uint32_t stream, uint32_t cell,
                                 uint32_t e, size_t elem) {
    const neap_kv_plane *p = &cache->layout.planes[plane];
    if (p->transposed) return (((size_t)stream * p->row_elems + e) * RIG_CELLS + cell) * elem;
    return ((size_t)stream * RIG_CELLS + cell) * p->row_bytes + e * elem;
}

static inline void rig_put(rig_cache *cache, int plane, size_t at, const void *bytes, size_t len) {
    memcpy((char *)cache->layout.planes[plane].base + at, bytes, len);
    memcpy(cache->shadow[plane] + at, bytes, len);
}

/* A number of f16 between 0.5 and 2 in size; any bytes for other types. */
static inline uint16_t rig_value(rig_random *random) {
    const uint32_t x = rig_next(random);
    return (uint16_t)((x & 0x8000u) | (14u + (x >> 16 & 1u)) << 10 | (x & 0x3ffu));
}

static inline uint32_t rig_chunk_of(const rig_cache *cache, uint32_t cell) {
    return cache->layout.planes[1].transposed ? 0 : cell / NEAP_CHUNK_CELLS;
}

static inline float rig_f16(uint16_t h) {
    const int exponent = h >> 10 & 31;
    const float m = (float)(h & 0x3ff);
    const float size = exponent ? ldexpf(1024 + m, exponent - 25) : ldexpf(m, -24);
    return h & 0x8000 ? -size : size;
}

/* Compares one row or channel run; a rounded one may be off by what q8 is off, and is adopted. */
static inline bool rig_same(rig_cache *cache, int plane, size_t at, size_t len, bool rounded) {
    const unsigned char *now = (unsigned char *)cache->layout.planes[plane].base + at;
    unsigned char *shadow = cache->shadow[plane] + at;
    if (!rounded || cache->layout.planes[plane].type == NEAP_KV_OTHER)
        return memcmp(now, shadow, len) == 0;
    for (size_t i = 0; i < len; i += 2) {
        uint16_t a, b;
        memcpy(&a, now + i, 2);
        memcpy(&b, shadow + i, 2);
        if (fabsf(rig_f16(a) - rig_f16(b)) > 2.0f / 127) return false;
    }
    memcpy(shadow, now, len);
    return true;
}

/* The unit of a resident chunk is what it must be. */
static inline bool rig_cells_right(rig *r, rig_cache *cache, uint32_t stream, uint32_t chunk) {
    const bool whole_stream = cache->layout.planes[1].transposed;
    const uint32_t begin = whole_stream ? 0 : chunk * NEAP_CHUNK_CELLS;
    uint32_t end = whole_stream ? RIG_CELLS : begin + NEAP_CHUNK_CELLS;
    if (end > RIG_CELLS) end = RIG_CELLS;
    rig_mark *mark = &cache->marks[stream][whole_stream ? 0 : chunk];
    const bool rounded = *mark == RIG_ROUNDED && !r->lossless;
    for (int p = 0; p < 2; p++) {
        const neap_kv_plane *plane = &cache->layout.planes[p];
        const uint32_t n = plane->transposed ? plane->row_elems : end - begin;
        for (uint32_t i = 0; i < n; i++) {
            const size_t at = plane->transposed ? rig_cell_at(cache, p, stream, 0, i, 2)
                                                : rig_cell_at(cache, p, stream, begin + i, 0, 0);
            const size_t len = plane->transposed ? 2 * RIG_CELLS : plane->row_bytes;
            if (!rig_same(cache, p, at, len, rounded)) return false;
        }
    }
    if (*mark == RIG_ROUNDED) *mark = RIG_SETTLED;
    return true;
}

/* Writes cells within a use, the whole of them or a part. */
static inline int rig_write(rig *r, rig_cache *cache, rig_random *random, uint32_t stream,
                            uint32_t first, uint32_t n, bool whole) {
    /* What a chunk was rounded to must be known before parts of it change. */
    for (uint32_t c = first / NEAP_CHUNK_CELLS; c <= (first + n - 1) / NEAP_CHUNK_CELLS; c++) {
        const uint32_t at = rig_chunk_of(cache, c * NEAP_CHUNK_CELLS);
        const bool covers = whole && !cache->layout.planes[1].transposed &&
                            first <= c * NEAP_CHUNK_CELLS &&
                            first + n >= (c + 1) * NEAP_CHUNK_CELLS;
        if (r->lossless || cache->marks[stream][at] != RIG_ROUNDED || covers) continue;
        CHECK(neap_wait(r->engine, neap_kv_unit(cache->kv, stream, at)) == 0);
        CHECK(rig_cells_right(r, cache, stream, at));
    }
    const int err = neap_kv_write(cache->kv, stream, first, n, whole);
    if (err) return err;
    for (uint32_t cell = first; cell < first + n; cell++) {
        for (int p = 0; p < 2; p++) {
            const uint32_t n_values = (uint32_t)(cache->layout.planes[p].row_bytes / 2);
            for (uint32_t e = whole ? 0 : n_values / 2; e < n_values; e++) {
                const uint16_t value = rig_value(random);
                rig_put(cache, p, rig_cell_at(cache, p, stream, cell, e, 2), &value, 2);
            }
        }
        cache->marks[stream][rig_chunk_of(cache, cell)] = RIG_WRITTEN;
    }
    if (first + n > cache->used[stream]) cache->used[stream] = first + n;
    return 0;
}

/* After an eviction: written chunks that went may come back rounded. */
static inline void rig_note_evicted(rig *r) {
    for (int i = 0; i < RIG_CACHES; i++)
        for (uint32_t s = 0; s < RIG_STREAMS; s++)
            for (uint32_t c = 0; c < RIG_CHUNKS; c++) {
                rig_cache *cache = &r->caches[i];
                if (cache->marks[s][c] == RIG_WRITTEN &&
                    !neap_unit_resident(r->engine, neap_kv_unit(cache->kv, s, c)))
                    cache->marks[s][c] = RIG_ROUNDED;
            }
}

static inline void rig_forget_cache(rig_cache *cache) {
    for (int p = 0; p < 2; p++)
        memset(cache->shadow[p], 0, cache->plane_bytes);
    memset(cache->used, 0, sizeof cache->used);
    memset(cache->marks, 0, sizeof cache->marks);
}

/* Waits for everything, within a use, and checks every byte. */
static inline void rig_check_all(rig *r) {
    neap_use_begin(r->engine, NEAP_USE_ACCESS);
    for (int i = 0; i < RIG_WEIGHTS; i++) {
        CHECK(neap_wait(r->engine, r->weights[i]) == 0);
        CHECK(rig_weights_right(r, i));
    }
    for (int i = 0; i < RIG_CACHES; i++)
        for (uint32_t s = 0; s < RIG_STREAMS; s++)
            for (uint32_t c = 0; c < RIG_CHUNKS; c++) {
                CHECK(neap_wait(r->engine, neap_kv_unit(r->caches[i].kv, s, c)) == 0);
                CHECK(rig_cells_right(r, &r->caches[i], s, c));
            }
    neap_use_end(r->engine, NEAP_USE_ACCESS);
}

static inline uint64_t rig_evict_all(rig *r) {
    const neap_evict_request all = {.bytes = UINT64_MAX};
    neap_evict_result result;
    CHECK(neap_evict(r->engine, &all, &result) == 0);
    rig_note_evicted(r);
    return result.released_bytes;
}
#endif
