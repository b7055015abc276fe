/* crew.h - threads that help one caller through a job, on as many cores.
 * Threads    one run at a time.
 * Idle       helpers sleep between runs. */
#ifndef NEAP_CREW_H
#define NEAP_CREW_H

#include <stdint.h>

typedef struct neap_crew neap_crew;

/* n_threads: the caller is one of them; 0: one a core, up to 4. Fails: -ENOMEM. */
int neap_crew_create(uint32_t n_threads, neap_crew **ret_crew);
void neap_crew_free(neap_crew *crew);           /* takes NULL */
uint32_t neap_crew_size(const neap_crew *crew); /* threads that a run may have */
/* Starts the helpers, once; before memory is short. Until then a run has none. */
void neap_crew_start(neap_crew *crew);
/* Calls job(ctx) on the calling thread and on up to n - 1 others, and returns when all calls have.
 * There may be fewer: on one alone a job must end, too. */
void neap_crew_run(neap_crew *crew, uint32_t n, void (*job)(void *ctx), void *ctx);
#endif
