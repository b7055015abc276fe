/* klt_unit.c - chunks of caches that a klt model fits: one layer's, K and V as f16 rows.
 *
 * klt is lossy and not idempotent: coding a chunk again that it decoded would add error. So
 *   - its copies are on storage only, where a record outlives the restoration and makes the unit
 *     clean: a chunk is coded again only once it was written to;
 *   - a chunk that another lossy codec has rounded - klt refused it, or storage took nothing when
 *     it went - stays with that one until it is written to (keeps_codec);
 *   - chunks with cells to spare, which change with every token, are left to the other codec, which
 *     is idempotent.
 *
 * K is decoded to the positions that it had when it was coded: they are noted with the record, for
 * the host may change its own (a context shift) before the chunk is back. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "pool_int.h"

/* A chunk whose rows are off by more than so many times what the model makes expect is not of the
 * kind that the model learned from. */
#define ERROR_LIMIT 4.0f

/* ---- models ---- */

typedef struct neap_klt_open {
    struct neap_klt_open *next;
    neap_klt_model *model; /* NULL: none for the caches that came after */
} neap_klt_open;

int neap_pool_set_klt(neap_pool *pool, neap_klt_model *model) {
    neap_klt_open *entry = malloc(sizeof *entry);
    if (!entry) return -ENOMEM;
    entry->model = model;
    pthread_mutex_lock(&pool->lock);
    entry->next = pool->klt_models;
    pool->klt_models = entry;
    pthread_mutex_unlock(&pool->lock);
    return 0;
}

const neap_klt_model *neap_pool_klt(const neap_pool *pool) {
    return pool->klt_models ? pool->klt_models->model : NULL;
}

void neap_klt_close_models(neap_pool *pool) {
    while (pool->klt_models) {
        neap_klt_open *entry = pool->klt_models;
        pool->klt_models = entry->next;
        neap_klt_model_close(entry->model);
        free(entry);
    }
}

/* ---- caches ---- */

static bool is_rows_of(const neap_kv_plane *plane, uint32_t n_elems) {
    return !plane->transposed && plane->type == NEAP_KV_F16 && plane->row_elems == n_elems &&
           plane->row_bytes == 2 * (size_t)n_elems;
}

/* What bits and deviations make expect of a row, mean of the groups; a component that is not kept
 * has at most the deviation of the last one kept. */
static float expected_error(const neap_klt_spec *spec, const neap_klt_block *block) {
    double sum = 0;
    for (uint32_t g = 0; g < block->n_groups; g++) {
        const neap_klt_group *group = &spec->groups[block->first_group + g];
        const uint32_t n = neap_klt_group_columns(block, group);
        double last = 0;
        for (uint32_t i = 0; i < group->n_components; i++) {
            last = (double)group->sd[i] * (double)group->sd[i];
            sum += last * neap_klt_distortion(group->bits[i]);
        }
        sum += last * (n - group->n_components);
    }
    return (float)(sum / block->n_groups);
}

void neap_klt_fit(neap_kv *kv) {
    const neap_kv_layout *layout = &kv->layout;
    uint32_t at;
    kv->klt.block = -1;
    if (!kv->klt.model || !layout->positions || layout->n_planes != 2 || layout->layer < 0) return;
    const int found = neap_klt_model_find(kv->klt.model, (uint32_t)layout->layer, &at);
    if (found < 0) return;
    const neap_klt_spec *spec = neap_klt_model_spec(kv->klt.model);
    const neap_klt_block *block = &spec->blocks[found];
    if (block->n_layers != 1 ||
        !is_rows_of(&layout->planes[0], block->n_kv_heads * block->k_head_dim) ||
        !is_rows_of(&layout->planes[1], block->n_kv_heads * block->v_head_dim))
        return;
    kv->klt.block = found;
    kv->klt.expected = expected_error(spec, block);
}

bool neap_klt_takes(const neap_pool *pool, const neap_unit *unit) {
    const neap_kv *kv = unit->kv;
    if (kv->klt.block < 0 || unit->keeps_codec || !pool->storage_codec) return false;
    const uint32_t left = kv->layout.n_cells - unit->chunk * NEAP_CHUNK_CELLS;
    return unit->used == (left < NEAP_CHUNK_CELLS ? left : NEAP_CHUNK_CELLS);
}

/* ---- chunks ---- */

static neap_klt_chunk chunk_of(const neap_klt_use *use, const neap_codec_chunk *planes,
                               const int32_t *positions) {
    neap_klt_chunk chunk = {
        .block = (uint32_t)use->block, .n_rows = planes->planes[0].n_rows, .positions = positions};
    chunk.k[0] = (neap_klt_plane){planes->planes[0].data, planes->planes[0].row_stride};
    chunk.v[0] = (neap_klt_plane){planes->planes[1].data, planes->planes[1].row_stride};
    return chunk;
}

/* Only its shape. */
static neap_klt_chunk shape_of(const neap_unit *unit) {
    return (neap_klt_chunk){.block = (uint32_t)unit->kv->klt.block, .n_rows = unit->used};
}

static size_t scratch_at(size_t encoded) {
    return NEAP_ROUND_UP(encoded, neap_vm_page());
}

size_t neap_klt_expected(const neap_unit *unit) {
    const neap_klt_chunk chunk = shape_of(unit);
    return neap_klt_expected_bytes(unit->kv->klt.model, &chunk);
}

size_t neap_klt_room(const neap_unit *unit) {
    const neap_klt_chunk chunk = shape_of(unit);
    const neap_klt_model *model = unit->kv->klt.model;
    return scratch_at(neap_klt_bound(model, &chunk)) + neap_klt_scratch_bytes(model);
}

void neap_klt_positions(const neap_unit *unit, int32_t positions[NEAP_CHUNK_CELLS]) {
    const neap_kv_layout *layout = &unit->kv->layout;
    const size_t first =
        (size_t)unit->stream * layout->n_cells + (size_t)unit->chunk * NEAP_CHUNK_CELLS;
    memcpy(positions, layout->positions + first, unit->used * sizeof *positions);
}

static neap_klt_note *make_note(float error, const int32_t *positions, uint32_t n_rows) {
    bool in_turn = true;
    for (uint32_t i = 1; i < n_rows; i++)
        in_turn = in_turn && (uint32_t)positions[i] == (uint32_t)positions[0] + i;
    const uint32_t n = in_turn ? 0 : n_rows;
    neap_klt_note *note = malloc(sizeof *note + n * sizeof *positions);
    if (!note) return NULL;
    note->error = error;
    note->first = positions[0];
    note->n = n;
    memcpy(note->positions, positions, n * sizeof *positions);
    return note;
}

int neap_klt_encode_planes(const neap_klt_use *use, const neap_codec_chunk *planes,
                           const int32_t *positions, void *room, size_t *ret_len,
                           neap_klt_note **ret_note) {
    const neap_klt_model *model = use->model;
    const neap_klt_chunk chunk = chunk_of(use, planes, positions);
    const size_t cap = neap_klt_bound(model, &chunk);
    size_t len;
    float error;
    const int err =
        neap_klt_encode(model, &chunk, (char *)room + scratch_at(cap), room, cap, &len, &error);
    if (err) return err;
    error /= use->expected;
    if (!(error <= ERROR_LIMIT) || len > neap_klt_raw_bytes(model, &chunk) / 2) return NEAP_E_BOUND;
    neap_klt_note *note = make_note(error, positions, chunk.n_rows);
    if (!note) return -ENOMEM;
    *ret_len = len;
    *ret_note = note;
    return 0;
}

int neap_klt_load_unit(neap_pool *pool, const neap_unit *unit, const neap_codec_chunk *planes,
                       neap_worker *worker) {
    const neap_klt_note *note = unit->klt;
    const size_t len = neap_swap_record_len(unit->swap);
    int32_t in_turn[NEAP_CHUNK_CELLS];
    const neap_klt_use *use = &unit->kv->klt;
    char *room = neap_worker_bounce(worker, scratch_at(len) + neap_klt_scratch_bytes(use->model));
    if (!room) return -ENOMEM;
    for (uint32_t i = 0; i < unit->used; i++)
        in_turn[i] = (int32_t)((uint32_t)note->first + i);
    assert(note->n == 0 || note->n == unit->used);
    const neap_klt_chunk chunk = chunk_of(use, planes, note->n ? note->positions : in_turn);
    const struct iovec part = {room, len};
    const int err = neap_swapfile_get(pool->swapfile, unit->swap, &part, 1, worker->reader);
    return err ? err : neap_klt_decode(use->model, room, len, &chunk, room + scratch_at(len));
}
