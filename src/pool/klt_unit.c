/* klt_unit.c - chunks of caches that a klt model fits: K and V as f16 rows.
 *
 * A model codes the same cells of up to four layers, a block's, together. They remain a unit each,
 * which is waited for, written and dropped alone, but share one record, and the note that counts
 * them: the last to let go of it drops it. They are coded, and go, together; coming back, each has
 * only its own planes made, or those that are wanted at the same time.
 *
 *   layer 4  | K V |--+
 *   layer 5  | K V |--+--> note (n_holders) --> record
 *   layer 6  | K V |--+
 *   layer 7  | K V |      was written to: on its own again, q8's, until all four are
 *
 * klt is lossy and not idempotent: coding a chunk again that it decoded would add error. So
 *   - its record outlives the restoration and makes the unit clean: a chunk is coded again only
 *     once it, and those it goes with, were written to. It is on storage; where the pool holds
 *     chunks coded, in memory, too, and what the chunk is read from as long as its pages are away;
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

void neap_klt_fit(neap_kv *kv) {
    const neap_kv_layout *layout = &kv->layout;
    uint32_t at;
    kv->klt.block = -1;
    if (!kv->klt.model || !layout->positions || layout->n_planes != 2 || layout->layer < 0) return;
    const int found = neap_klt_model_find(kv->klt.model, (uint32_t)layout->layer, &at);
    if (found < 0) return;
    const neap_klt_spec *spec = neap_klt_model_spec(kv->klt.model);
    const neap_klt_block *block = &spec->blocks[found];
    if (!is_rows_of(&layout->planes[0], block->n_kv_heads * block->k_head_dim) ||
        !is_rows_of(&layout->planes[1], block->n_kv_heads * block->v_head_dim))
        return;
    kv->klt.block = found;
    kv->klt.at = at;
    kv->klt.expected = neap_klt_expected_error(kv->klt.model, (uint32_t)found);
}

static int block_of_layer(const neap_kv *kv, uint32_t *ret_at) {
    if (!kv->klt.model || kv->layout.layer < 0) return -1;
    return neap_klt_model_find(kv->klt.model, (uint32_t)kv->layout.layer, ret_at);
}

void neap_klt_join(neap_pool *pool, neap_kv *kv) {
    uint32_t at, other_at;
    const int block = block_of_layer(kv, &at);
    if (block < 0) return;
    /* Whoever lacks this layer: there may be several contexts. */
    for (const neap_kv *other = pool->kvs; other; other = other->next)
        if (other->region == kv->region && other->klt.model == kv->klt.model && !other->peers[at] &&
            block_of_layer(other, &other_at) == block && other->peers[other_at]) {
            memcpy(kv->peers, other->peers, sizeof kv->peers);
            break;
        }
    kv->peers[at] = kv;
    for (uint32_t i = 0; i < NEAP_KLT_LAYERS; i++)
        if (kv->peers[i]) kv->peers[i]->peers[at] = kv;
}

/* ---- models of a context ---- */

static uint32_t n_units(const neap_kv *kv) {
    return kv->layout.n_streams * (kv->whole_streams ? 1 : kv->n_chunks);
}

static bool any_unit(const neap_pool *pool, const void *region, bool (*is)(const neap_unit *)) {
    for (const neap_kv *kv = pool->kvs; kv; kv = kv->next)
        for (uint32_t i = 0; kv->region == region && i < n_units(kv); i++)
            if (is(neap_pool_unit(pool, kv->units[i]))) return true;
    return false;
}

static bool is_copied(const neap_unit *unit) {
    return unit->copying;
}

static bool is_coded(const neap_unit *unit) {
    return unit->klt || unit->copying;
}

bool neap_pool_region_is_copied(const neap_pool *pool, const void *region) {
    return any_unit(pool, region, is_copied);
}

bool neap_pool_region_is_coded(const neap_pool *pool, const void *region) {
    return any_unit(pool, region, is_coded);
}

static bool has_coded(const neap_pool *pool, const neap_kv *kv, const neap_klt_model *model) {
    for (uint32_t i = 0; i < n_units(kv); i++) {
        const neap_klt_note *note = neap_pool_unit(pool, kv->units[i])->klt;
        if (note && note->model == model) return true;
    }
    return false;
}

/* region NULL: in any, or by a copy that is being coded. */
static bool is_needed(const neap_pool *pool, const void *region, const neap_klt_model *model) {
    if (!region && pool->copied_by == model) return true;
    for (const neap_kv *kv = pool->kvs; kv; kv = kv->next)
        if ((!region || kv->region == region) &&
            (kv->klt.model == model || has_coded(pool, kv, model)))
            return true;
    return false;
}

uint64_t neap_pool_guest_bytes(const neap_pool *pool, const void *region) {
    uint64_t bytes = 0;
    for (const neap_klt_open *entry = pool->klt_models; entry; entry = entry->next)
        if (entry->model && neap_klt_is_guest(entry->model) &&
            (!region || is_needed(pool, region, entry->model)))
            bytes += neap_klt_model_memory(entry->model);
    return bytes;
}

static bool is_same_block(const neap_klt_block *a, const neap_klt_block *b) {
    return a->n_layers == b->n_layers &&
           memcmp(a->layers, b->layers, a->n_layers * sizeof *a->layers) == 0;
}

/* Whether it has the blocks of all models that coded chunks of the region. */
static bool goes_on(const neap_pool *pool, const void *region, const neap_klt_model *model) {
    const neap_klt_spec *spec = neap_klt_model_spec(model);
    for (const neap_klt_open *entry = pool->klt_models; entry; entry = entry->next) {
        if (!entry->model) continue;
        const neap_klt_spec *other = neap_klt_model_spec(entry->model);
        bool same = other->n_blocks == spec->n_blocks;
        for (uint32_t i = 0; i < spec->n_blocks && same; i++)
            same = is_same_block(&other->blocks[i], &spec->blocks[i]);
        if (same) continue;
        for (const neap_kv *kv = pool->kvs; kv; kv = kv->next)
            if (kv->region == region && has_coded(pool, kv, entry->model)) return false;
    }
    return true;
}

void neap_klt_close_unneeded(neap_pool *pool) {
    for (neap_klt_open **at = &pool->klt_models; *at;) {
        neap_klt_open *entry = *at;
        if (!entry->model || !neap_klt_is_guest(entry->model) ||
            is_needed(pool, NULL, entry->model)) {
            at = &entry->next;
            continue;
        }
        *at = entry->next;
        neap_klt_model_close(entry->model);
        free(entry);
    }
}

/* What another model refused may be to the liking of this one, unless q8 has rounded it. */
static void use_model(neap_pool *pool, neap_kv *kv, const neap_klt_model *model) {
    kv->klt.model = model;
    memset(kv->peers, 0, sizeof kv->peers);
    neap_klt_fit(kv);
    for (uint32_t i = 0; i < n_units(kv); i++) {
        neap_unit *unit = neap_pool_unit(pool, kv->units[i]);
        unit->klt_refused = unit->klt_refused && unit->keeps_codec;
    }
}

static void bind_region(neap_pool *pool, const void *region, const neap_klt_model *model) {
    for (neap_kv *kv = pool->kvs; kv; kv = kv->next)
        if (kv->region == region) use_model(pool, kv, model);
    for (neap_kv *kv = pool->kvs; kv; kv = kv->next)
        if (kv->region == region) neap_klt_join(pool, kv);
}

static bool is_of(const neap_klt_model *model, uint64_t digest) {
    return model && neap_klt_model_spec(model)->digest == digest;
}

bool neap_pool_bind_klt(neap_pool *pool, const void *region, uint64_t digest) {
    const neap_klt_open *entry = pool->klt_models;
    while (entry && !is_of(entry->model, digest))
        entry = entry->next;
    const neap_klt_model *model = entry ? entry->model : NULL;
    bool is_other = false;
    for (const neap_kv *kv = pool->kvs; kv; kv = kv->next)
        is_other = is_other || (kv->region == region && kv->klt.model != model &&
                                !is_of(kv->klt.model, digest));
    if (!is_other || neap_pool_region_is_coded(pool, region)) return false;
    bind_region(pool, region, model);
    return true;
}

int neap_pool_adopt_klt(neap_pool *pool, const void *region, neap_klt_model *model) {
    if (!goes_on(pool, region, model)) return NEAP_E_BOUND;
    neap_klt_open *entry = malloc(sizeof *entry);
    if (!entry) return -ENOMEM;
    *entry = (neap_klt_open){pool->klt_models, model};
    pool->klt_models = entry;
    bind_region(pool, region, model);
    neap_klt_close_unneeded(pool);
    return 0;
}

void neap_pool_disown_klt(neap_pool *pool, const void *region) {
    for (neap_kv *kv = pool->kvs; kv; kv = kv->next)
        if (kv->region == region) use_model(pool, kv, NULL);
    neap_klt_close_unneeded(pool);
}

static uint32_t n_layers_of(const neap_klt_use *use) {
    return neap_klt_model_spec(use->model)->blocks[use->block].n_layers;
}

bool neap_klt_fits(const neap_kv *kv) {
    if (kv->klt.block < 0) return false;
    for (uint32_t i = 0; i < n_layers_of(&kv->klt); i++) {
        const neap_kv *peer = kv->peers[i];
        if (!peer || peer->klt.block < 0 || peer->layout.n_cells != kv->layout.n_cells ||
            peer->layout.n_streams != kv->layout.n_streams)
            return false;
    }
    return true;
}

/* ---- members ---- */

/* The unit of the same cells in a layer of the block; NULL: there is none. */
static neap_unit *member(const neap_pool *pool, const neap_unit *unit, uint32_t at) {
    const neap_kv *kv = unit->kv->peers[at];
    if (!kv || kv->whole_streams || unit->stream >= kv->layout.n_streams ||
        unit->chunk >= kv->n_chunks)
        return NULL;
    return neap_pool_unit(pool, kv->units[unit->stream * kv->n_chunks + unit->chunk]);
}

bool neap_klt_is_full(const neap_unit *unit) {
    const uint32_t left = unit->kv->layout.n_cells - unit->chunk * NEAP_CHUNK_CELLS;
    return unit->used == (left < NEAP_CHUNK_CELLS ? left : NEAP_CHUNK_CELLS);
}

bool neap_klt_is_whole(const neap_unit *unit) {
    return unit->kv->klt.block >= 0 && !unit->keeps_codec && !unit->klt_refused &&
           neap_klt_is_full(unit);
}

bool neap_klt_awaits(const neap_unit *unit) {
    const neap_pool *pool = unit->kv->pool;
    return pool->holds_coded &&
           (neap_klt_is_whole(unit) ||
            (pool->fits_contexts && unit->kv->klt.block < 0 && !unit->keeps_codec));
}

static bool is_to_be_coded(const neap_unit *unit) {
    return neap_unit_state_of(unit) == NEAP_UNIT_RESIDENT && !unit->swap && !unit->klt &&
           neap_klt_is_whole(unit) && neap_kv_unit_size(unit).evictable > 0;
}

size_t neap_klt_members(const neap_pool *pool, const neap_unit *unit,
                        neap_unit *ret_units[NEAP_KLT_LAYERS]) {
    if (!pool->storage_codec && !pool->holds_coded) return 0;
    if (!neap_klt_fits(unit->kv)) return 0;
    const uint32_t n = n_layers_of(&unit->kv->klt);
    for (uint32_t i = 0; i < n; i++) {
        ret_units[i] = member(pool, unit, i);
        if (!is_to_be_coded(ret_units[i])) return 0;
    }
    return n;
}

uint64_t neap_klt_evictable(const neap_pool *pool, const neap_unit *unit) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < n_layers_of(&unit->kv->klt); i++)
        bytes += neap_kv_unit_size(member(pool, unit, i)).evictable;
    return bytes;
}

/* ---- records ---- */

void neap_klt_give(neap_unit *const *units, size_t n, neap_swap_record *record,
                   neap_klt_note *note) {
    note->n_holders = (uint32_t)n;
    for (size_t i = 0; i < n; i++) {
        units[i]->swap = record;
        units[i]->klt = note;
    }
}

size_t neap_pool_sharers(const neap_pool *pool, const neap_unit *unit,
                         neap_unit *ret_units[NEAP_KLT_LAYERS]) {
    size_t n = 0;
    for (uint32_t i = 0; unit->klt && i < NEAP_KLT_LAYERS; i++) {
        neap_unit *other = member(pool, unit, i);
        if (other && other != unit && other->klt == unit->klt) ret_units[n++] = other;
    }
    return n;
}

void neap_klt_disown(neap_pool *pool, const neap_unit *unit) {
    neap_unit *others[NEAP_KLT_LAYERS];
    const size_t n = neap_pool_sharers(pool, unit, others);
    for (size_t i = 0; i < n; i++)
        if (neap_unit_state_of(others[i]) == NEAP_UNIT_RESIDENT)
            neap_unit_forget_copies(pool, others[i]);
}

bool neap_klt_is_counted(const neap_pool *pool, const neap_unit *unit) {
    neap_unit *others[NEAP_KLT_LAYERS];
    const size_t n = neap_pool_sharers(pool, unit, others);
    for (size_t i = 0; i < n; i++)
        if (others[i]->swap != unit->swap) return false;
    return unit->klt->n_holders == n + 1;
}

/* ---- chunks ---- */

static void set_planes(neap_klt_chunk *chunk, uint32_t at, const neap_codec_chunk *planes) {
    chunk->n_rows = planes->planes[0].n_rows;
    chunk->k[at] = (neap_klt_plane){planes->planes[0].data, planes->planes[0].row_stride};
    chunk->v[at] = (neap_klt_plane){planes->planes[1].data, planes->planes[1].row_stride};
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

bool neap_klt_positions(neap_unit *const *units, size_t n, int32_t positions[NEAP_CHUNK_CELLS]) {
    const neap_unit *unit = units[0];
    const size_t first = (size_t)unit->stream * unit->kv->layout.n_cells +
                         (size_t)unit->chunk * NEAP_CHUNK_CELLS,
                 len = unit->used * sizeof *positions;
    memcpy(positions, unit->kv->layout.positions + first, len);
    for (size_t i = 1; i < n; i++)
        if (memcmp(positions, units[i]->kv->layout.positions + first, len) != 0) return false;
    return true;
}

static neap_klt_note *make_note(const neap_klt_model *model, float error, const int32_t *positions,
                                uint32_t n_rows) {
    bool in_turn = true;
    for (uint32_t i = 1; i < n_rows; i++)
        in_turn = in_turn && (uint32_t)positions[i] == (uint32_t)positions[0] + i;
    const uint32_t n = in_turn ? 0 : n_rows;
    neap_klt_note *note = malloc(sizeof *note + n * sizeof *positions);
    if (!note) return NULL;
    note->n_holders = 0;
    note->held = NULL;
    note->model = model;
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
    neap_klt_chunk chunk = {.block = (uint32_t)use->block, .positions = positions};
    for (uint32_t i = 0; i < n_layers_of(use); i++)
        set_planes(&chunk, i, &planes[i]);
    const size_t cap = neap_klt_bound(model, &chunk);
    size_t len;
    float error;
    const int err =
        neap_klt_encode(model, &chunk, (char *)room + scratch_at(cap), room, cap, &len, &error);
    if (err) return err;
    error /= use->expected;
    if (!(error <= ERROR_LIMIT) || len > neap_klt_raw_bytes(model, &chunk) / 2) return NEAP_E_BOUND;
    neap_klt_note *note = make_note(model, error, positions, chunk.n_rows);
    if (!note) return -ENOMEM;
    *ret_len = len;
    *ret_note = note;
    return 0;
}

/* The positions that the unit was coded with; in_turn: room for them. */
static const int32_t *positions_of(const neap_unit *unit, int32_t in_turn[NEAP_CHUNK_CELLS]) {
    const neap_klt_note *note = unit->klt;
    assert(note->n == 0 || note->n == unit->used);
    for (uint32_t i = 0; note->n == 0 && i < unit->used; i++)
        in_turn[i] = (int32_t)((uint32_t)note->first + i);
    return note->n ? note->positions : in_turn;
}

int neap_klt_load(neap_pool *pool, neap_unit *const *units, const neap_codec_chunk *planes,
                  size_t n, neap_worker *worker) {
    const neap_unit *unit = units[0];
    const neap_klt_use *use = &unit->kv->klt;
    int32_t in_turn[NEAP_CHUNK_CELLS];
    neap_klt_chunk chunk = {.block = (uint32_t)use->block,
                            .positions = positions_of(unit, in_turn)};
    for (size_t i = 0; i < n; i++)
        set_planes(&chunk, units[i]->kv->klt.at, &planes[i]);
    size_t len;
    const void *record = neap_klt_held(unit, &len);
    if (!record) len = neap_swap_record_len(unit->swap);
    const size_t scratch = record ? 0 : scratch_at(len);
    const neap_klt_model *model = unit->klt->model;
    char *room = neap_worker_bounce(worker, scratch + neap_klt_scratch_bytes(model));
    if (!room) return -ENOMEM;
    const struct iovec part = {room, len};
    const int err =
        record ? 0 : neap_swapfile_get(pool->swapfile, unit->swap, &part, 1, worker->reader);
    return err ? err : neap_klt_decode(model, record ? record : room, len, &chunk, room + scratch);
}

/* ---- records in memory ---- */

const void *neap_klt_held(const neap_unit *unit, size_t *ret_len) {
    return unit->klt && unit->klt->held ? neap_stack_bytes(unit->klt->held, ret_len) : NULL;
}

uint64_t neap_klt_held_bytes(const neap_unit *unit) {
    size_t len;
    return neap_klt_held(unit, &len) ? len / unit->klt->n_holders : 0;
}

void neap_klt_forget(neap_pool *pool, neap_klt_note *note) {
    if (note) neap_stack_drop(pool->stack, note->held);
    free(note);
}

int neap_klt_fetch(neap_pool *pool, neap_unit *unit) {
    const size_t len = neap_swap_record_len(unit->swap);
    neap_worker worker = {0};
    const struct iovec part = {neap_worker_bounce(&worker, len), len};
    neap_stack_record *record = NULL;
    void *bytes;
    int err =
        part.iov_base ? neap_swapfile_get(pool->swapfile, unit->swap, &part, 1, NULL) : -ENOMEM;
    if (!err) err = neap_stack_push(pool->stack, len, &record, &bytes);
    if (!err) {
        memcpy(bytes, part.iov_base, len);
        pthread_mutex_lock(&pool->lock);
        if (unit->klt->held) /* another layer's reader was faster */
            neap_stack_drop(pool->stack, record);
        else
            unit->klt->held = record;
        pthread_mutex_unlock(&pool->lock);
    }
    neap_worker_fini(&worker);
    return err;
}

int neap_klt_store(neap_pool *pool, neap_unit *unit, uint64_t *ret_bytes) {
    neap_unit *others[NEAP_KLT_LAYERS];
    neap_swap_record *record = unit->swap;
    size_t len;
    const struct iovec part = {(void *)(uintptr_t)neap_klt_held(unit, &len), len};
    const int err = record ? 0 : neap_swapfile_put(pool->swapfile, &part, 1, &record);
    if (err) return err;
    pthread_mutex_lock(&pool->lock);
    const size_t n = neap_pool_sharers(pool, unit, others);
    unit->swap = record;
    for (size_t i = 0; i < n; i++)
        others[i]->swap = record;
    neap_stack_drop(pool->stack, unit->klt->held);
    unit->klt->held = NULL;
    pthread_mutex_unlock(&pool->lock);
    *ret_bytes = len;
    return 0;
}

const neap_unit *neap_klt_mover(const neap_pool *pool, const neap_unit *unit) {
    neap_unit *others[NEAP_KLT_LAYERS];
    const size_t n = neap_pool_sharers(pool, unit, others);
    for (size_t i = 0; i < n; i++)
        if (neap_unit_state_of(others[i]) == NEAP_UNIT_EVICTED && others[i]->layer > unit->layer)
            unit = others[i];
    return unit;
}

int neap_klt_read_unit(const neap_unit *unit, const neap_klt_part *wanted, void *const rows[2],
                       void *scratch) {
    const neap_klt_use *use = &unit->kv->klt;
    const neap_kv_plane *planes = unit->kv->layout.planes;
    int32_t in_turn[NEAP_CHUNK_CELLS];
    size_t len;
    const void *record = neap_klt_held(unit, &len);
    neap_klt_chunk chunk = {.block = (uint32_t)use->block,
                            .n_rows = unit->used,
                            .positions = positions_of(unit, in_turn)};
    chunk.k[use->at] = (neap_klt_plane){rows[0], planes[0].row_bytes};
    chunk.v[use->at] = (neap_klt_plane){rows[1], planes[1].row_bytes};
    neap_klt_part part = *wanted;
    if (part.n_heads == 0)
        part.n_heads = neap_klt_model_spec(unit->klt->model)->blocks[use->block].n_kv_heads;
    return neap_klt_decode_part(unit->klt->model, record, len, &chunk, &part, scratch);
}
