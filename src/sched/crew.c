/* crew.c - see crew.h.
 *
 * A run hands out tickets; a helper that is awake takes one and calls the job. The caller, once its
 * own call has returned, takes back the tickets that no helper has taken: whoever wakes late finds
 * nothing to do, and a run never waits for a thread that has not begun. */
#include "crew.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#include "err.h"
#include "proc.h"
#include "thread.h"

enum { CREW_DEFAULT_MAX = 4 };

struct neap_crew {
    uint32_t n_wanted; /* helpers; constant */
    pthread_mutex_t lock;
    pthread_cond_t wanted, left; /* the rest: lock */
    void (*job)(void *ctx);
    void *ctx;
    uint32_t n_tickets, n_busy, n_threads;
    bool started, stopping;
    pthread_t threads[];
};

int neap_crew_create(uint32_t n_threads, neap_crew **ret_crew) {
    if (n_threads == 0) {
        n_threads = neap_cores();
        if (n_threads > CREW_DEFAULT_MAX) n_threads = CREW_DEFAULT_MAX;
    }
    neap_crew *crew = calloc(1, sizeof *crew + (n_threads - 1) * sizeof crew->threads[0]);
    if (!crew) return -ENOMEM;
    crew->n_wanted = n_threads - 1;
    pthread_mutex_init(&crew->lock, NULL);
    pthread_cond_init(&crew->wanted, NULL);
    pthread_cond_init(&crew->left, NULL);
    *ret_crew = crew;
    return 0;
}

uint32_t neap_crew_size(const neap_crew *crew) {
    return crew->n_wanted + 1;
}

static void *helper_main(void *ctx) {
    neap_crew *crew = ctx;
    pthread_mutex_lock(&crew->lock);
    while (!crew->stopping) {
        if (crew->n_tickets == 0) {
            pthread_cond_wait(&crew->wanted, &crew->lock);
            continue;
        }
        crew->n_tickets--;
        crew->n_busy++;
        pthread_mutex_unlock(&crew->lock);
        crew->job(crew->ctx); /* stays as it is until n_busy is 0 */
        pthread_mutex_lock(&crew->lock);
        if (--crew->n_busy == 0) pthread_cond_signal(&crew->left);
    }
    pthread_mutex_unlock(&crew->lock);
    return NULL;
}

void neap_crew_start(neap_crew *crew) {
    pthread_mutex_lock(&crew->lock);
    for (uint32_t i = 0; !crew->started && i < crew->n_wanted; i++) {
        const int err =
            neap_thread_create(&crew->threads[crew->n_threads], helper_main, crew, "neap-evict");
        if (err)
            neap_log(NEAP_LOG_WARN, "eviction thread: %s", neap_strerror(err));
        else
            crew->n_threads++;
    }
    crew->started = true;
    pthread_mutex_unlock(&crew->lock);
}

void neap_crew_run(neap_crew *crew, uint32_t n, void (*job)(void *ctx), void *ctx) {
    pthread_mutex_lock(&crew->lock);
    crew->job = job;
    crew->ctx = ctx;
    const uint32_t n_helpers = n > 1 ? n - 1 : 0;
    crew->n_tickets = n_helpers < crew->n_threads ? n_helpers : crew->n_threads;
    if (crew->n_tickets > 0) pthread_cond_broadcast(&crew->wanted);
    pthread_mutex_unlock(&crew->lock);

    job(ctx);

    pthread_mutex_lock(&crew->lock);
    crew->n_tickets = 0;
    while (crew->n_busy > 0)
        pthread_cond_wait(&crew->left, &crew->lock);
    pthread_mutex_unlock(&crew->lock);
}

void neap_crew_free(neap_crew *crew) {
    if (!crew) return;
    pthread_mutex_lock(&crew->lock);
    crew->stopping = true;
    pthread_cond_broadcast(&crew->wanted);
    pthread_mutex_unlock(&crew->lock);
    for (uint32_t i = 0; i < crew->n_threads; i++)
        pthread_join(crew->threads[i], NULL);
    pthread_cond_destroy(&crew->left);
    pthread_cond_destroy(&crew->wanted);
    pthread_mutex_destroy(&crew->lock);
    free(crew);
}
