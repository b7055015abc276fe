/* test_crew.c - as many calls at once as threads were asked for, and one where there are none. */
#include "crew.h"

#include <errno.h>
#include <pthread.h>

#include "check.h"
#include "fault.h"

typedef struct meeting {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t n_wanted, n_here, n_calls;
} meeting;

/* Returns when so many calls are in it at once. */
static void meet(void *ctx) {
    meeting *m = ctx;
    pthread_mutex_lock(&m->lock);
    m->n_calls++;
    m->n_here++;
    pthread_cond_broadcast(&m->changed);
    while (m->n_here < m->n_wanted)
        pthread_cond_wait(&m->changed, &m->lock);
    pthread_mutex_unlock(&m->lock);
}

static uint32_t calls_of(neap_crew *crew, uint32_t n, uint32_t n_wanted) {
    meeting m = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, n_wanted, 0, 0};
    neap_crew_run(crew, n, meet, &m);
    return m.n_calls; /* all have returned: no lock */
}

int main(void) {
    neap_crew *crew;
    CHECK(neap_crew_create(3, &crew) == 0);
    CHECK(calls_of(crew, 3, 1) == 1); /* not started */
    neap_crew_start(crew);
    neap_crew_start(crew);
    for (int i = 0; i < 200; i++) {
        CHECK(calls_of(crew, 3, 3) == 3);
        CHECK(calls_of(crew, 9, 3) == 3);
        CHECK(calls_of(crew, 2, 2) == 2);
        CHECK(calls_of(crew, 1, 1) == 1);
        const uint32_t n = calls_of(crew, 3, 1); /* others may come too late */
        CHECK(n >= 1 && n <= 3);
    }
    neap_crew_free(crew);

    CHECK(neap_crew_create(3, &crew) == 0);
    neap_fault_arm("thread.create", 1, -EAGAIN, 0); /* one of two */
    neap_crew_start(crew);
    neap_fault_disarm();
    CHECK(calls_of(crew, 3, 2) == 2);
    neap_crew_free(crew);

    CHECK(neap_crew_create(0, &crew) == 0);
    neap_crew_free(crew);
    neap_crew_free(NULL);
    return 0;
}
