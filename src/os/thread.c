/* thread.c - see thread.h. */
#include "thread.h"

#include <signal.h>
#include <sys/resource.h>

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

/* Not the lowest: it holds a lock now and then that others want. To Linux "process 0" is the
 * calling thread. A refusal harms nothing. */
void neap_thread_lower(void) {
    (void)setpriority(PRIO_PROCESS, 0, 10);
}
