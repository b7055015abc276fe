/* core_int.h - what the files behind the public API share.
 *
 *   engine.c    options, create, free        units.c     weights and KV caches
 *   region.c    address ranges, scratch      evict.c     evict
 *   use.c       uses against evictions       restore.c   need, wait, restore, request marks
 *   stat.c      counters                     endpoint.c  control socket
 *   rates.c     throughputs of restores  profile_file.c  where they are kept
 *   trim.c      releasing by level           pressure_watch.c  releasing by itself
 *   klt_file.c, klt_use.c  the codec klt: its files, which one is taken
 *   lowram_use.c    the codec lowram, or KV held as it codes it: its module, fits
 *   idle.c      the thread that works while nothing uses the engine
 *   write_behind.c  copies of chunks while idle  write_budget.c  how many a day
 *   coded.c     KV held and read as klt or lowram coded it
 *
 * Locks      use_lock, then the pool's lock; never the other way round. Nothing waits for a use
 *            while it holds the pool's lock. */
#ifndef NEAP_CORE_INT_H
#define NEAP_CORE_INT_H

#include <pthread.h>

#include "crew.h"
#include "pool.h"
#include "pipeline.h"
#include "profile.h"
#include "sock.h"

/* lowram: what the caches of a region were fitted to last. */
typedef struct neap_fit_mark {
    uint32_t stream, first, n_rows; /* n_rows 0: to nothing */
    uint64_t written;               /* of the stream when it was made */
    uint64_t tried;                 /* likewise, when it was last tried on what came later */
} neap_fit_mark;

struct neap_region {
    neap_engine *engine;
    neap_region *next; /* pool's lock, as the rest but base and size */
    char *base;
    size_t size;
    bool is_given; /* by region_alloc; constant */
    int kind;
    neap_fit_mark fit;
    uint64_t written; /* kv: of the stream, when a computation last ended (lowram_use.c) */
    bool may_release; /* scratch: neap_scratch_hold was called */
    uint64_t (*held)[2];
    size_t n_held;
};

typedef struct neap_watcher neap_watcher;
typedef struct neap_write_behind neap_write_behind;
typedef struct neap_idle neap_idle;

/* Room for the plan of an eviction, made when units are added: to make room when memory is short
 * would be late. */
typedef struct neap_plan_room {
    neap_policy_unit *units;
    neap_step *steps; /* two a unit */
    size_t cap;       /* units */
    bool taken;       /* by the eviction that runs */
} neap_plan_room;

struct neap_engine {
    neap_pool *pool;
    neap_pipeline *pipeline;
    neap_crew *crew; /* of the eviction that runs, or within uses of whoever is_allocating */
    const neap_policy *policy;
    char *program; /* constant, as the next */
    uint64_t keep_bytes;
    bool wants_klt; /* codec or kv klt was asked for; the next: of that ratio, 0: any */
    double klt_ratio;
    bool reads_parts;         /* neap_options.kv_in_parts */
    atomic_bool refusal_said; /* coded.c */
    bool wants_lowram;        /* codec or kv lowram was asked for; the next: at that ratio */
    double lowram_ratio;
    atomic_bool awaits_fit; /* kv lowram: of a context whose prompt may not have ended */
    const struct neap_lowram_module *lowram; /* NULL: not loaded; constant, as the next */
    void *lowram_library;
    int (*region_alloc)(void *ctx, size_t len_bytes, size_t align, void **ret_base);
    void (*region_free)(void *ctx, void *base);
    void *region_ctx;
    neap_listener *listener;
    neap_watcher *watcher;           /* NULL: pressure is not watched */
    neap_write_behind *write_behind; /* NULL: off; constant */
    neap_idle *idle;                 /* NULL: nothing is done while idle; constant */

    pthread_mutex_t use_lock; /* guards the next; see use.c */
    pthread_cond_t use_changed;
    uint32_t n_uses, n_computing, n_waiting_alone;
    bool alone, evicting;
    uint64_t n_alone; /* times that someone was alone */

    /* pool's lock */
    neap_region *regions;
    char model[256];
    char codec_note[320];
    neap_stage stage; /* of the last plan */
    neap_rates rates;
    struct neap_profile_link *profile; /* rates.c; NULL: none. The pointer is constant */
    neap_plan_room room;
    uint64_t evictions, bytes_evicted, wait_ns;
    uint64_t request_began_ns; /* 0: no request open */
    uint64_t request_waited_ns;
    uint64_t ttft_ns, restore_ns, allocate_ns, path_ns[NEAP_N_PATHS];
    double overlap;
    uint64_t n_needs; /* graphs that told what they need */
    bool is_allocating;
    const char *attention;
    uint64_t attentions, attentions_host;
    struct {
        neap_pressure level;
        uint64_t looks, releases, released_bytes, restored_bytes;
        char sources[64];
    } pressure;
};

/* use.c: no use runs or begins between the two; one caller at a time. Not within a use. */
void neap_alone_begin(neap_engine *engine, bool to_evict);
void neap_alone_end(neap_engine *engine);

/* region.c [L] */
neap_region *neap_region_of(const neap_engine *engine, const void *addr, size_t len);
/* Releases what no scratch region must hold. Alone. */
uint64_t neap_scratch_release(neap_engine *engine);
uint64_t neap_scratch_held_bytes(neap_engine *engine);

/* restore.c: blocks until the unit is resident or its restore failed. Lets go of the lock. [L] */
int neap_unit_wait(neap_engine *engine, neap_unit *unit);
/* Brings back units that pressure took, in the order of need, as long as they have no more than
 * limit_bytes, and about step_bytes at most. Errors: as neap_restore(), but of those units. */
int neap_restore_owed(neap_engine *engine, uint64_t limit_bytes, uint64_t step_bytes,
                      uint64_t *ret_bytes);

/* coded.c: with kv klt or lowram, drops the pages of coded chunks that came back and, after a
 * computation, codes what has become due: other uses may write K now and V in the next. Within no
 * use. */
void neap_settle(neap_engine *engine, bool computed);

/* klt_use.c: name and note of the codec at work; how KV is held that is held coded. [L] */
void neap_codec_stat(const neap_engine *engine, neap_stat *inout_stat);
void neap_codec_kv_name(const neap_engine *engine, char *ret_name, size_t cap);
/* The learned codec that was asked for, of the two. */
const char *neap_codec_learned(const neap_engine *engine);
/* What there is where the learned codec is not: of evictions a codec, of kv f16. */
const char *neap_codec_fallback(const neap_engine *engine);

/* evict.c */
typedef struct neap_totals {
    uint64_t weights, weights_resident, weights_evictable;
    uint64_t kv, kv_resident, kv_evictable;
    uint64_t kv_memory, kv_storage; /* bytes of copies */
    uint64_t owed;                  /* evictable bytes that pressure took and that are not back */
    uint32_t n_weights, n_weights_evicted, n_kv, n_kv_evicted, n_kv_on_storage, n_kv_clean, n_lost;
    uint64_t kv_coded, kv_coded_from; /* bytes of coded copies, of what they are copies of */
    uint32_t n_klt, n_klt_left;       /* chunks coded by klt; of its layers, by another codec */
    uint32_t n_klt_refused;           /* of the latter: klt's error was over the limit */
    double klt_error;                 /* sum over the former */
} neap_totals;
neap_totals neap_totals_get(neap_engine *engine); /* [L] */
/* neap_evict() without waking the watcher: for the watcher itself. */
int neap_evict_unseen(neap_engine *engine, const neap_evict_request *request,
                      neap_evict_result *ret_result);
/* Room for a plan of all units there are, and the threads that carry it out. What fails of the room
 * is tried again by the eviction. */
void neap_plan_reserve(neap_engine *engine);

/* trim.c: what an eviction could release now. */
uint64_t neap_releasable_bytes(neap_engine *engine);

/* pressure_watch.c: logs what fails. */
void neap_watcher_start(neap_engine *engine, const char *watch, const char *write);
void neap_watcher_stop(neap_engine *engine);
/* Has it look now: something was evicted that it must bring back. Not for its own thread. */
void neap_watcher_wake(neap_engine *engine);

/* idle.c */
int neap_idle_start(neap_engine *engine, const neap_options *options);
void neap_idle_stop(neap_engine *engine);
void neap_idle_used(neap_idle *idle); /* a use has ended; use_lock is held */
/* For its own thread: whether the engine is used, was since the work began, or ends. Then the work
 * gives up, and is begun again once the engine has been idle. use_lock is held. */
bool neap_idle_is_over(neap_engine *engine);
void neap_idle_later(neap_engine *engine); /* looks again after a while */
bool neap_idle_on_battery(const neap_engine *engine);

/* write_behind.c */
int neap_write_behind_create(neap_engine *engine, const neap_options *options,
                             const char *swap_dir);
void neap_write_behind_free(neap_write_behind *writer); /* takes NULL */
/* Copies what there is, until the engine is used. By the idle thread. */
void neap_write_behind_run(neap_write_behind *writer);
void neap_write_behind_stat(const neap_write_behind *writer, neap_stat *inout_stat); /* [L] */

/* rates.c: what goes wrong is logged. profile_path may be NULL. */
void neap_engine_rates_open(neap_engine *engine, const char *profile_path, const char *swap_dir);
void neap_engine_rates_close(neap_engine *engine);
/* As neap_pipeline_measured; ctx is the engine. */
void neap_engine_rates_note(void *ctx, neap_path path, uint64_t bytes, uint64_t ns);

/* endpoint.c: logs what fails. */
void neap_endpoint_open(neap_engine *engine);
void neap_endpoint_close(neap_engine *engine);
#endif
