/* pipeline.h - the restore pipeline: threads that bring units back in the order of need, over both
 * paths at once.
 * Threads    functions marked [L] want the pool's lock held; they may let go of it while waiting.
 * Idle       threads sleep until something is queued; the first one queued starts them. */
#ifndef NEAP_PIPELINE_H
#define NEAP_PIPELINE_H

#include "pool.h"
#include "profile.h"

typedef struct neap_pipeline neap_pipeline;

/* A path has run out of work: the bytes that it read (from storage, as they lie there) or decoded
 * (uncompressed), and the time from its first unit to its last, committing of pages included. Runs
 * with a failure in them, and those too short to tell, are left out. Called on a restore thread,
 * without the lock. */
typedef void (*neap_pipeline_measured)(void *ctx, neap_path path, uint64_t bytes, uint64_t ns);

/* measured may be NULL. */
int neap_pipeline_create(neap_pool *pool, neap_pipeline_measured measured, void *ctx,
                         neap_pipeline **ret_pipeline);
neap_path_threads neap_pipeline_path_threads(void);
void neap_pipeline_free(neap_pipeline *pipeline); /* nothing may be queued by others; takes NULL */

/* After start gave true: puts an EVICTED unit, or one that the caller claimed and allocated, at the
 * end of its path's queue, or at the front (also if it is queued already). [L] */
void neap_pipeline_push(neap_pipeline *pipeline, neap_unit *unit, bool front);
void neap_pipeline_remove(neap_pipeline *pipeline, neap_unit *unit); /* if queued; EVICTED [L] */
/* Takes EVICTED units out of the queues and waits until nothing is RESTORING or being
 * read. [L] */
void neap_pipeline_quiesce(neap_pipeline *pipeline);
uint32_t neap_pipeline_queued(const neap_pipeline *pipeline); /* [L] */
/* Starts the threads at the first call. False when there are none: whoever needs units then
 * restores them by itself. [L] */
bool neap_pipeline_start(neap_pipeline *pipeline);

/* Restores an EVICTED unit, or a queued one, on the calling thread; lets go of the lock meanwhile.
 * [L] */
int neap_pipeline_restore_here(neap_pipeline *pipeline, neap_unit *unit, neap_worker *worker);
/* For a thread that has to wait: restores the first unit of the memory queue, which takes a
 * processor and no device. False: not done, there is none for it. Lets go of the lock meanwhile.
 * [L] */
bool neap_pipeline_help(neap_pipeline *pipeline);
#endif
