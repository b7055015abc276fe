/* thread.c - see thread.h. */
#include "thread.h"

#include <sched.h>
#include <signal.h>

#include "fault.h"

int neap_thread_create(pthread_t *ret_thread, void *(*main)(void *ctx), void *ctx,
                       const char *name) {
    int err = NEAP_FAULT("thread.create");
    if (err) return err;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    err = -pthread_create(ret_thread, NULL, main, ctx);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!err) pthread_setname_np(*ret_thread, name);
    return err;
}

/* Not a higher nice value: the thread holds locks now and then, and whoever wants one would wait
 * for it to get its turn at the processor. A refusal harms nothing. */
void neap_thread_lower(void) {
    (void)pthread_setschedparam(pthread_self(), SCHED_BATCH, &(struct sched_param){0});
}

void neap_thread_yield(void) {
    sched_yield();
}
