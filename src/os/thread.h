/* thread.h - threads of the library's own.
 * Errors    0 or -errno. */
#ifndef NEAP_OS_THREAD_H
#define NEAP_OS_THREAD_H

#include <pthread.h>

/* Starts a thread with all signals blocked: a host's signals go to the host's threads.
 * name: at most 15 characters. */
int neap_thread_create(pthread_t *ret_thread, void *(*main)(void *ctx), void *ctx,
                       const char *name);
/* The calling thread takes the processor from no other that runs, and keeps its share of it. */
void neap_thread_lower(void);
/* Lets others run, while waiting for what another thread is about to do. */
void neap_thread_yield(void);
#endif
