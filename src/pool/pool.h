/* pool.h - the unit table: what is resident, where the copy of the rest lies, and the work of
 * moving one unit out or in.
 * Units      bytes; ns; a unit is one layer's weights or one KV chunk (whole stream when
 * transposed). Errors     0 or negative (neap.h); on failure ret_ values are untouched. Threads
 * `lock` guards every field that does not say otherwise. Functions marked [L] want it held by the
 * caller, the others take it themselves. States     see the picture at the top of pool.c. */
#ifndef NEAP_POOL_H
#define NEAP_POOL_H

#include <pthread.h>
#include <stdatomic.h>

#include "codec.h"
#include "file.h"
#include "klt.h"
#include "neap.h"
#include "policy.h"
#include "stack.h"
#include "swapfile.h"

typedef enum neap_unit_state {
    NEAP_UNIT_FREE,      /* no unit: the slot is on the free list */
    NEAP_UNIT_EMPTY,     /* KV in which nothing was written; holds no memory */
    NEAP_UNIT_RESIDENT,  /* usable */
    NEAP_UNIT_EVICTING,  /* one evictor copies or releases it */
    NEAP_UNIT_EVICTED,   /* released; a copy exists */
    NEAP_UNIT_RESTORING, /* one thread brings it back */
    NEAP_UNIT_LOST,      /* KV whose copy was damaged; holds no memory */
} neap_unit_state;

typedef enum neap_path { NEAP_PATH_STORAGE, NEAP_PATH_MEMORY, NEAP_N_PATHS } neap_path;

typedef struct neap_span {
    char *addr;
    size_t len;
} neap_span;

/* A model file, open once for all units of it. */
typedef struct neap_model_file neap_model_file;

/* One extent of a weight unit; constant after the unit was added. */
typedef struct neap_weight_part {
    neap_span whole;
    neap_span inner;       /* whole pages of it: what is released */
    neap_model_file *file; /* NULL: kept in the swap file or rebuilt */
    uint64_t file_offset;  /* of inner.addr */
    uint64_t checksum;     /* of inner */
    int (*rebuild)(void *ctx, void *addr, size_t len_bytes);
    void *rebuild_ctx;
} neap_weight_part;

/* How klt codes the chunks of a cache. The model stays open as long as a cache, a note or a copy
 * has it. */
typedef struct neap_klt_use {
    const neap_klt_model *model; /* the pool's when the cache was added; NULL: none */
    int block;                   /* -1: the pool's codec codes the cache */
    uint32_t at;                 /* which of the block's layers this is */
    float expected;              /* most error of a row that the model makes expect */
} neap_klt_use;

struct neap_kv {
    struct neap_pool *pool;
    struct neap_kv *next; /* of the pool's list */
    const void *region;
    neap_kv_layout layout;
    uint32_t n_chunks;       /* of one stream */
    bool whole_streams;      /* a plane is transposed: one unit a stream */
    neap_unit_id *units;     /* [n_streams * (whole_streams ? 1 : n_chunks)] */
    uint64_t *written;       /* [n_streams] cells written so far, again and again */
    uint64_t overhead_bytes; /* that its reader keeps beside it */

    neap_klt_use klt;
    /* What its K is turned by and the elements of a head, where the host has told; NULL: not yet.
     * Set once; the pool's lock. */
    neap_klt_rope *rope;
    uint32_t k_head_dim;
    /* The caches of the same region that are the layers of its block, itself among them. NULL: not
     * there (yet). */
    neap_kv *peers[NEAP_KLT_LAYERS];
};

/* How klt coded chunks, the same cells of the layers of a block: all have this note and its record.
 */
typedef struct neap_klt_note {
    uint32_t n_holders;          /* chunks whose copy the record is; the pool's lock, as the next */
    neap_stack_record *held;     /* the record in memory; NULL: it is not. The rest is constant */
    const neap_klt_model *model; /* that coded it: a cache may have had another since */
    float error;                 /* mean of its rows, in units of neap_klt_use.expected */
    int32_t first;       /* position of the first row; with n 0 the others follow it one by one */
    uint32_t n;          /* rows */
    int32_t positions[]; /* [n] that K was turned to */
} neap_klt_note;

/* The coded copy of a KV chunk in memory: on the stack, or in place, which is in the first of the
 * chunk's own pages (memory_copy.c). */
typedef struct neap_memory_copy {
    size_t len;               /* 0: there is none */
    neap_stack_record *stack; /* NULL: in place */
} neap_memory_copy;

typedef struct neap_unit {
    _Atomic(int) state; /* neap_unit_state; written under the lock, read anywhere */
    bool is_kv;
    neap_unit_id id;
    uint32_t generation; /* counts the units that had this slot */
    int layer;

    /* The restore queue it stands in; see invariant 2. */
    bool queued;
    neap_path queue;
    struct neap_unit *next, *prev; /* also the free list */

    bool copying;         /* KV: its bytes as they are are on their way to the swap file */
    int last_error;       /* of its last restore; 0 when that went well */
    uint64_t passed_over; /* the eviction that could not evict it */
    uint64_t last_use;    /* number of the last graph that needed it, where the policy asks; or 0 */
    uint64_t allocate_ns; /* committing its pages; of whoever restores it */
    bool by_pressure;     /* away because memory was short: comes back without being needed */
    uint64_t stayed_bytes; /* away: pages that the kernel did not take back */

    /* Copies. For KV a swap record beside residency means clean. Changed under the lock; stable
     * for the thread that evicts or restores the unit. */
    neap_swap_record *swap;
    neap_memory_copy memory;
    const neap_codec *coded; /* how the record's KV bytes are coded; NULL: raw, read in place */
    neap_klt_note *klt;      /* klt coded the record (coded is NULL); NULL: it did not */
    bool keeps_codec;        /* a lossy codec has rounded its cells: no other may after it */
    bool klt_refused;        /* klt's error was over the limit; until it is written to */

    neap_weight_part *parts;
    size_t n_parts;
    bool to_rebuild; /* evicted without a copy of the parts that have no file */

    neap_kv *kv;
    uint32_t stream, chunk;
    uint32_t used;       /* one past the highest cell in use, counted from the unit's first */
    uint64_t written_at; /* what kv->written of its stream was when it was last written to */
} neap_unit;

typedef struct neap_pool_counters {
    uint64_t restores, bytes_restored[NEAP_N_PATHS], errors;
    uint64_t bytes_read, bytes_committed; /* by restores: from storage, as they lie; of pages */
    uint64_t encoded_bytes, encoded_from_bytes; /* what the codec made of how much */
    /* Since a request began: start and end of restores (0: none), all and of each path, and the
     * time that threads committed pages, summed. */
    uint64_t restore_first_ns, restore_last_ns;
    uint64_t path_first_ns[NEAP_N_PATHS], path_last_ns[NEAP_N_PATHS];
    uint64_t allocate_ns;
} neap_pool_counters;

#define NEAP_POOL_BLOCK 1024u
#define NEAP_POOL_BLOCKS 4096u

typedef struct neap_pool {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* some unit left RESTORING, a queue was emptied, a unit was read */
    const neap_codec *codec;
    const neap_codec *storage_codec; /* NULL: raw where planes are contiguous */
    bool poison;                     /* constant, as the two above and the next */
    bool holds_coded;                /* chunks by klt stay in memory as it coded them */
    bool fits_contexts; /* with it: the model is a fit of the context, so there is none at first */
    atomic_bool code_due, drop_due;   /* with it: there may be chunks to be coded, to be dropped */
    struct neap_klt_open *klt_models; /* open ones, the current one first */
    neap_swapfile *swapfile;          /* these two lock themselves */
    neap_stack *stack;

    _Atomic(neap_unit *) blocks[NEAP_POOL_BLOCKS]; /* a published block stays until the end */
    uint32_t n_slots;
    neap_unit *free_units;
    atomic_uint n_absent; /* units EVICTING, EVICTED, RESTORING or LOST */
    uint32_t n_restoring;
    bool reading;                    /* bytes of chunks are being taken, they must stay */
    const neap_klt_model *copied_by; /* of the copy that was taken and is not stored; NULL: none */
    uint64_t released_seq;           /* the running eviction; see passed_over */
    neap_kv *kvs;
    neap_model_file *files;
    neap_pool_counters counters;
    char last_error[256];
} neap_pool;

typedef struct neap_pool_options {
    const neap_codec *codec;
    bool clean_storage, poison, holds_coded, fits_contexts;
    const char *swap_dir;
    uint64_t swap_limit_bytes;
} neap_pool_options;

int neap_pool_create(const neap_pool_options *options, neap_pool **ret_pool);
void neap_pool_free(neap_pool *pool); /* takes NULL */

/* The unit of that number, NULL when there never was one. Lock-free. */
neap_unit *neap_pool_unit(const neap_pool *pool, neap_unit_id id);
static inline neap_unit_state neap_unit_state_of(const neap_unit *unit) {
    return (neap_unit_state)atomic_load_explicit(&unit->state, memory_order_acquire);
}
/* Calls visit for every slot that holds a unit. [L] */
void neap_pool_each(neap_pool *pool, void (*visit)(neap_unit *unit, void *ctx), void *ctx);

/* ---- adding and removing ---- */

/* Extents as in neap.h, in any regions; merges neighbours, computes checksums. */
int neap_pool_add_weights(neap_pool *pool, int layer, const neap_weight_extent *extents, size_t n,
                          neap_unit_id *ret_unit);
/* The layout must have been checked against its region. */
int neap_pool_add_kv(neap_pool *pool, const void *region, const neap_kv_layout *layout,
                     neap_kv **ret_kv);
/* Caches added from now on are coded by that model as far as it fits them; NULL: none. Takes it
 * over where it succeeds. Fails: -ENOMEM. */
int neap_pool_set_klt(neap_pool *pool, neap_klt_model *model);
const neap_klt_model *neap_pool_klt(const neap_pool *pool); /* the current one [L] */
/* The caches of the region are coded by the open model of that GGUF as far as it fits them, by none
 * if none is open. False: so it was, or chunks of theirs are coded. [L] */
bool neap_pool_bind_klt(neap_pool *pool, const void *region, uint64_t digest);
/* Bytes of the models that were made for a context of the region, NULL: of any: they count among
 * its copies. [L] */
uint64_t neap_pool_guest_bytes(const neap_pool *pool, const void *region);
/* Whether chunks of caches of the region are being copied; or are, or are coded by a model. [L] */
bool neap_pool_region_is_copied(const neap_pool *pool, const void *region);
bool neap_pool_region_is_coded(const neap_pool *pool, const void *region);
/* The caches of the region are coded by that model from now on as far as it fits them; chunks that
 * another coded stay so, and it stays open; those made for a context that nobody needs any more are
 * closed. Takes it over where it succeeds. No chunk of them may be copied or, if it is coded,
 * RESTORING or queued. Fails: -ENOMEM; NEAP_E_BOUND (chunks are coded by a model of other blocks).
 * [L] */
int neap_pool_adopt_klt(neap_pool *pool, const void *region, neap_klt_model *model);
/* They are coded by none until then. None of their chunks is coded or copied. [L] */
void neap_pool_disown_klt(neap_pool *pool, const void *region);
/* -EBUSY when cells are in use. */
int neap_pool_relayout(neap_kv *kv, const neap_kv_layout *layout);
/* Removes the caches added with that region and the weight units that touch its addresses. Nothing
 * of them may be EVICTING, RESTORING or queued. */
void neap_pool_remove_region(neap_pool *pool, const void *region, neap_span addresses);

/* ---- sizes ---- */

typedef struct neap_unit_bytes {
    uint64_t in_use;    /* bytes of the unit in use, whole pages for KV */
    uint64_t evictable; /* of those: what evicting releases */
} neap_unit_bytes;
neap_unit_bytes neap_unit_size(const neap_unit *unit);  /* [L] */
uint64_t neap_unit_gone_bytes(const neap_unit *unit);   /* of evictable, while it is away [L] */
uint64_t neap_kv_raw_bytes(const neap_unit *unit);      /* of its cells in use, uncompressed [L] */
uint64_t neap_unit_stored_bytes(const neap_unit *unit); /* its part of its record on storage [L] */
/* What its copy in memory takes: in place whole pages; 0: there is none. [L] */
uint64_t neap_unit_memory_bytes(const neap_unit *unit);
/* Whether a copy in memory is to lie in place. [L], or who evicts it */
bool neap_kv_fits_in_place(const neap_unit *unit);
/* Whether klt codes chunks of the cache: it fits the model, and so do those of the other layers of
 * its block. [L] */
bool neap_klt_fits(const neap_kv *kv);
/* The chunks that klt is to code together: the same cells of the layers of a block, this one among
 * them, in the order of the layers. 0: klt is not for it now, because of one of them - its cache
 * does not fit, cells are unused, another codec has rounded it, it has a copy. [L] */
size_t neap_klt_members(const neap_pool *pool, const neap_unit *unit,
                        neap_unit *ret_units[NEAP_KLT_LAYERS]);
/* Of all of them: what evicting releases, and bytes when coded. */
uint64_t neap_klt_evictable(const neap_pool *pool, const neap_unit *unit);
size_t neap_klt_expected(const neap_unit *unit);

/* ---- transitions ---- */

typedef struct neap_evicted {
    uint64_t dropped_bytes; /* pages of the unit that went back */
    uint64_t kept_bytes;    /* pages that a copy in place keeps */
    uint64_t stayed_bytes;  /* pages that the kernel did not take back */
    uint64_t raw_bytes;     /* KV: bytes in use, uncompressed */
    uint64_t stacked_bytes,
        unstacked_bytes; /* coded copies that went onto the stack, and left it */
    neap_action action;  /* what was done; it may differ from what was asked */
    int storage_error;   /* 0, or why the swap file did not take it */
} neap_evicted;

/* Memory for one thread's transfers. */
typedef struct neap_worker {
    neap_reader *reader; /* may be NULL */
    void *bounce;
    size_t bounce_cap;
} neap_worker;
void neap_worker_fini(neap_worker *worker);                /* frees both */
void neap_worker_trim(neap_worker *worker);                /* frees the bounce buffer */
void *neap_worker_bounce(neap_worker *worker, size_t len); /* page-aligned; NULL: no memory */

/* Evicts a RESIDENT unit, or moves an in-memory copy to storage. Nothing may use the unit.
 * Not done (unit as before): returns the reason, also in storage_error when that was it. */
int neap_pool_evict(neap_pool *pool, neap_unit *unit, neap_action action, neap_worker *worker,
                    neap_evicted *ret_evicted);

/* Before the eviction of a RESIDENT chunk that klt is to code: codes and writes it and those that
 * go with it (neap_klt_members), which are clean then, and still resident. Nothing may use them.
 * Where klt turns out not to be for them, or storage takes nothing, they are as before. Returns how
 * many are to be evicted: the chunk alone when it need not be coded any more. */
size_t neap_pool_code_together(neap_pool *pool, neap_unit *unit, neap_worker *worker,
                               neap_unit *ret_units[NEAP_KLT_LAYERS]);

/* ---- chunks held as klt coded them (holds_coded) ---- */

/* Whether the chunk is away and klt coded it: it can be read from its record. [L] */
static inline bool neap_unit_is_coded(const neap_unit *unit) {
    return unit->kv && unit->kv->pool->holds_coded && unit->klt &&
           neap_unit_state_of(unit) == NEAP_UNIT_EVICTED;
}
/* The record in memory of a chunk that klt coded; NULL: it is not there. [L], or within a use that
 * has fetched it */
const void *neap_klt_held(const neap_unit *unit, size_t *ret_len);
uint64_t neap_klt_held_bytes(const neap_unit *unit); /* its part of it [L] */
/* Of the chunks that share the unit's record, those away, the last: it moves the record. [L] */
const neap_unit *neap_klt_mover(const neap_pool *pool, const neap_unit *unit);
/* The RESIDENT chunks that are to be held so: those that klt has coded; and of those that it is to
 * code together one, when none was written to while so many other cells of their stream were. At
 * most cap of them; their number. [L] */
size_t neap_pool_to_hold(neap_pool *pool, uint32_t cells, neap_unit **ret_units, size_t cap);
/* RESIDENT -> EVICTED: codes it, and those that go with it, into memory, or, where klt's record is
 * there already, only drops its pages. Nothing may use them. Not done (resident as before):
 * NEAP_E_BOUND (klt refuses them, from now on), -ENOMEM, ... */
int neap_pool_hold(neap_pool *pool, neap_unit *unit, neap_worker *worker);
/* Brings a coded unit's record from storage into memory. Lets go of the lock meanwhile. Fails: as a
 * restore, and with the same states. [L] */
int neap_pool_fetch(neap_pool *pool, neap_unit *unit);
/* Decodes a part (n_heads 0: all heads) of a coded unit whose record is in memory: its first row of
 * a plane goes to rows[plane], the others follow. Nothing may write to the unit meanwhile. Without
 * the lock. Fails: NEAP_E_CORRUPT, NEAP_E_BOUND. scratch: neap_klt_scratch_bytes(), aligned to 64.
 */
int neap_klt_read_unit(const neap_unit *unit, const neap_klt_part *part, void *const rows[2],
                       void *scratch);

/* KV chunks as they were, in a buffer of their writer's, on their way to the swap file: one, or
 * those that klt codes together. */
typedef struct neap_copy {
    neap_unit *units[NEAP_KLT_LAYERS];
    size_t n;
    const neap_codec *codec;                  /* NULL: raw */
    neap_codec_chunk chunks[NEAP_KLT_LAYERS]; /* to be coded */
    struct iovec bytes;                       /* raw bytes, or room for the coded ones */
    bool by_klt; /* all of them; where klt takes them: else the last by codec */
    neap_klt_use klt;
    int32_t positions[NEAP_CHUNK_CELLS];
} neap_copy;

/* The RESIDENT chunk without a copy that an eviction would send first (the rearmost), if all of its
 * cells are in use: such a one does not change until it is rewritten. NULL: none. [L] */
neap_unit *neap_pool_next_to_copy(neap_pool *pool);
/* Size of the buffer that copying the unit, and those that go with it, takes; *ret_most: most bytes
 * that may be written to storage. [L] */
size_t neap_pool_copy_size(const neap_pool *pool, const neap_unit *unit, size_t *ret_most);
/* Begins a copy: what is known of the units now, the positions of their cells included. The caller
 * has seen that no use runs, and lets none begin until it returns. From here until the bytes are
 * read pool->reading is set, which whoever writes cells, evicts or removes the units waits for. One
 * copy at a time. Fails: -EAGAIN (it is not such a unit any more, or one of another size). [L] */
int neap_pool_copy_take(neap_pool *pool, neap_unit *unit, size_t size, neap_copy *ret_copy);
/* Reads their bytes into the page-aligned buffer of that size; uses may begin. Afterwards the units
 * may be used as any other. Lets go of the lock meanwhile. [L] */
void neap_pool_copy_read(neap_pool *pool, neap_copy *copy, void *buffer);
/* Codes what was taken, for nothing but to see whether klt does: NEAP_E_BOUND, it refuses it.
 * Without the lock. */
int neap_pool_copy_try(neap_pool *pool, const neap_copy *copy);
/* Codes and writes what was taken. The units are clean then, unless one has changed or gone: in
 * that case the record is dropped. Without the lock. */
int neap_pool_copy_store(neap_pool *pool, const neap_copy *copy, size_t *ret_bytes);

/* EVICTED -> RESTORING, by the thread that then calls load and finish. [L] */
void neap_pool_claim(neap_pool *pool, neap_unit *unit);
neap_path neap_unit_path(const neap_unit *unit); /* of an EVICTED unit [L] */
/* Commits the pages of a claimed unit. Without the lock. */
int neap_pool_allocate(neap_pool *pool, neap_unit *unit);
/* The units to be allocated together with an EVICTED one, so that it lies on huge pages: KV chunks
 * beside it, EVICTED and queued, in the order of their cells, itself among them. 1: only itself.
 * [L] */
#define NEAP_ALLOCATION_MAX 64
size_t neap_pool_allocation(neap_pool *pool, neap_unit *unit,
                            neap_unit *ret_units[NEAP_ALLOCATION_MAX]);
/* Commits the pages of those, claimed. Without the lock. */
int neap_pool_allocate_together(neap_pool *pool, neap_unit *const *units, size_t n);
/* Fills a claimed and allocated unit. Without the lock. */
int neap_pool_load(neap_pool *pool, neap_unit *unit, neap_worker *worker);
/* The other chunks whose copy is in the record of this one. [L] */
size_t neap_pool_sharers(const neap_pool *pool, const neap_unit *unit,
                         neap_unit *ret_units[NEAP_KLT_LAYERS]);
/* Fills units, one or such that share a record, claimed and allocated; all or none. Without the
 * lock. */
int neap_pool_load_together(neap_pool *pool, neap_unit *const *units, size_t n,
                            neap_worker *worker);
/* RESTORING -> RESIDENT (err 0), LOST or EVICTED. Takes the lock, wakes the waiters. began_ns: when
 * a thread of the unit's path took it. */
void neap_pool_finish(neap_pool *pool, neap_unit *unit, int err, uint64_t began_ns);

/* RESIDENT, EMPTY, and with overwrite also EVICTED (not queued) and LOST -> RESIDENT with cells
 * [0, used) in use; copies are forgotten. The pages of an overwritten unit read as zero. [L] */
int neap_pool_dirty(neap_pool *pool, neap_unit *unit, uint32_t used, bool overwrite);
/* LOST -> RESIDENT, all cells zero; -EINVAL when not LOST. [L] */
int neap_pool_forget(neap_pool *pool, neap_unit *unit);
/* All units of the cache EMPTY, its memory zero. Nothing of it EVICTING, RESTORING or queued. [L]
 */
int neap_pool_clear(neap_kv *kv);

/* First unit's cell range: one past the last cell of the stream that is in use. [L] */
uint32_t neap_pool_kv_used(const neap_kv *kv, uint32_t stream);

/* Checks the invariants (numbers in pool.c); full also asks the kernel about pages. Aborts. [L] */
void neap_pool_check(neap_pool *pool, bool full);
#endif
