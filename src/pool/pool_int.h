/* pool_int.h - what the files of the pool share. */
#ifndef NEAP_POOL_INT_H
#define NEAP_POOL_INT_H

#include "bytes.h"
#include "err.h"
#include "pool.h"
#include "vm.h"

struct neap_model_file {
    struct neap_model_file *next;
    char *path;
    neap_file_id id;     /* what was loaded */
    neap_file *file;     /* open handle; replaced when the path names another, equal file */
    neap_file **retired; /* replaced handles: another thread may still read from one */
    size_t n_retired;
    size_t n_parts; /* parts that refer to this */
};

/* pool.c */
void neap_unit_move(neap_pool *pool, neap_unit *unit, neap_unit_state to);  /* [L] */
void neap_unit_forget_copies(neap_pool *pool, neap_unit *unit);             /* [L] */
void neap_pool_note_error(neap_pool *pool, const neap_unit *unit, int err); /* [L] */
/* A unit in state EMPTY that no one sees yet, NULL: no memory. [L] */
neap_unit *neap_unit_new(neap_pool *pool);
void neap_unit_delete(neap_pool *pool, neap_unit *unit); /* [L] */
neap_span neap_span_inward(void *addr, size_t len);

/* After spans were dropped: unusable in poison builds; and the reverse, with the pages committed.
 */
void neap_span_seal(const neap_pool *pool, neap_span span);
int neap_span_open(const neap_pool *pool, neap_span span);

/* weight_unit.c */
int neap_weight_unit_evict(neap_pool *pool, neap_unit *unit, neap_evicted *ret_evicted);
int neap_weight_unit_allocate(neap_pool *pool, neap_unit *unit);
int neap_weight_unit_load(neap_pool *pool, neap_unit *unit, neap_worker *worker);
/* Drops what a failed restore committed and seals again; -> bytes that the kernel did not take. */
uint64_t neap_weight_unit_release(neap_pool *pool, neap_unit *unit);
void neap_weight_unit_unref(neap_pool *pool, neap_unit *unit); /* [L] */
void neap_weight_unit_free_files(neap_pool *pool);

/* kv_unit.c */
neap_span neap_kv_unit_inner(const neap_unit *unit, size_t plane);
/* The inner pages that hold cells in use; of a transposed plane, all inner pages. */
neap_span neap_kv_unit_in_use(const neap_unit *unit, size_t plane);
neap_unit_bytes neap_kv_unit_size(const neap_unit *unit);
int neap_kv_unit_evict(neap_pool *pool, neap_unit *unit, neap_action action, neap_worker *worker,
                       neap_evicted *ret_evicted);
int neap_kv_unit_allocate(neap_pool *pool, neap_unit *unit);
size_t neap_kv_unit_allocation(neap_pool *pool, neap_unit *unit, neap_unit **ret_units);
int neap_kv_units_allocate(neap_pool *pool, neap_unit *const *units, size_t n);
int neap_kv_unit_load(neap_pool *pool, neap_unit *unit, neap_worker *worker);
int neap_kv_units_load(neap_pool *pool, neap_unit *const *units, size_t n, neap_worker *worker);
/* Drops what a failed restore committed and seals again; with_copy: a copy in place goes, too.
 * What the kernel does not take reads as zero all the same; its bytes are returned. */
uint64_t neap_kv_unit_release(neap_pool *pool, neap_unit *unit, bool with_copy);
int neap_kv_unit_open(neap_pool *pool, neap_unit *unit); /* accessible, nothing committed */
void neap_kv_unit_zero_edges(const neap_unit *unit);

/* memory_copy.c: copies in place. Without the lock: by who evicts or restores the unit. */
static inline bool neap_unit_in_place(const neap_unit *unit) {
    return unit->memory.len > 0 && !unit->memory.stack;
}
neap_span neap_kv_unit_kept(const neap_unit *unit, size_t plane);  /* pages of the copy */
neap_span neap_kv_unit_spare(const neap_unit *unit, size_t plane); /* the other inner pages */
/* Where its bytes lie; the number of parts. The chunk is open, as for the next three. */
size_t neap_kv_copy_parts(const neap_unit *unit, struct iovec parts[2]);
void neap_kv_copy_write(const neap_unit *unit, const void *coded);
void neap_kv_copy_read(const neap_unit *unit, void *coded);
/* Gives its pages back, so that they read as zero. */
void neap_kv_copy_drop(const neap_unit *unit, uint64_t *inout_dropped);

/* klt_unit.c */
/* Whether the pool's current model codes a cache of this layout; sets what the cache keeps of it.
 */
void neap_klt_fit(neap_kv *kv);
/* Makes a new cache, not on the pool's list yet, and those of its block's layers each other's
 * peers. [L] */
void neap_klt_join(neap_pool *pool, neap_kv *kv);
/* Room to code the chunk and those that go with it, page-aligned: encoded bytes from its start,
 * scratch behind them. */
size_t neap_klt_room(const neap_unit *unit);
/* The positions of the cells of chunks that klt codes together. False: they are not the same. */
bool neap_klt_positions(neap_unit *const *units, size_t n, int32_t positions[NEAP_CHUNK_CELLS]);
/* Codes the planes of those chunks (of each one element), or copies of them. NEAP_E_BOUND: klt is
 * not for them (the error is over the limit, or it saves less than q8). *ret_note is malloc'd, and
 * held by none. */
int neap_klt_encode_planes(const neap_klt_use *use, const neap_codec_chunk *planes,
                           const int32_t *positions, void *room, size_t *ret_len,
                           neap_klt_note **ret_note);
/* They hold record and note from now on. [L] */
void neap_klt_give(neap_unit *const *units, size_t n, neap_swap_record *record,
                   neap_klt_note *note);
/* Reads the record of units that share it and decodes their planes (of each one element). */
int neap_klt_load(neap_pool *pool, neap_unit *const *units, const neap_codec_chunk *planes,
                  size_t n, neap_worker *worker);
/* The record was found damaged: RESIDENT units that share it with this one do not count on it any
 * more. [L] */
void neap_klt_disown(neap_pool *pool, const neap_unit *unit);
/* Whether the note counts those that hold it. [L] */
bool neap_klt_is_counted(const neap_pool *pool, const neap_unit *unit);
/* Codes chunks that klt codes together (neap_klt_members) into memory; they hold the record then,
 * and are still resident. Fails: NEAP_E_BOUND (klt refuses them), -ENOMEM. */
int neap_kv_units_hold(neap_pool *pool, neap_unit *const *units, size_t n, neap_worker *worker);
/* Reads the unit's record from storage into memory. Without the lock. */
int neap_klt_fetch(neap_pool *pool, neap_unit *unit);
/* Writes the record, which is in memory, to storage, unless it is there, and drops it; *ret_bytes
 * is its size. Of those that share it one at a time. Without the lock. */
int neap_klt_store(neap_pool *pool, neap_unit *unit, uint64_t *ret_bytes);
void neap_klt_forget(neap_pool *pool, neap_klt_note *note); /* takes NULL [L] */
/* Whether the chunk's cells are all in use; and klt could code it when it goes with others. */
bool neap_klt_is_full(const neap_unit *unit);
bool neap_klt_is_whole(const neap_unit *unit);
/* Whether the chunk is kept from other codecs: it is for klt, or will be when there is a model. */
bool neap_klt_awaits(const neap_unit *unit);
void neap_klt_close_models(neap_pool *pool);
/* Those made for a context that no cache and no chunk needs any more. [L] */
void neap_klt_close_unneeded(neap_pool *pool);
#endif
