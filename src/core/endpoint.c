/* endpoint.c - the control socket of an engine. Without it the engine works all the same. */
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "core_int.h"
#include "ctl.h"
#include "err.h"
#include "proc.h"

static int answer_evict(neap_engine *engine, const neap_evict_request *request, char **ret_line) {
    neap_evict_result result;
    const int err = neap_evict(engine, request, &result);
    return err ? err : neap_ctl_evict_format(&result, ret_line);
}

static int answer_restore(neap_engine *engine, char **ret_line) {
    const uint64_t began_ns = neap_clock_ns();
    uint64_t bytes;
    const int err = neap_restore(engine, &bytes);
    return err ? err : neap_ctl_restore_format(bytes, neap_clock_ns() - began_ns, ret_line);
}

static int answer_stat(neap_engine *engine, char **ret_line) {
    neap_stat stat;
    neap_stat_get(engine, &stat);
    return neap_ctl_stat_format(neap_proc_self(), engine->program, &stat, ret_line);
}

static char *answer(const char *line, void *ctx) {
    neap_engine *engine = ctx;
    neap_ctl_request request;
    char *reply = NULL;
    int err = neap_ctl_request_parse(line, &request);
    if (!err && request.command == NEAP_CTL_EVICT)
        err = answer_evict(engine, &request.evict, &reply);
    else if (!err && request.command == NEAP_CTL_RESTORE)
        err = answer_restore(engine, &reply);
    else if (!err)
        err = answer_stat(engine, &reply);
    if (err && neap_ctl_error_format(err, neap_strerror(err), &reply) != 0) return NULL;
    return reply;
}

/* A program may end with its engine alive: its socket must not outlive it. The lock keeps engines
 * of several threads, and an exit beside the freeing of an engine, from meeting here. */
static pthread_mutex_t at_exit_lock = PTHREAD_MUTEX_INITIALIZER;
static const neap_listener *listener_at_exit; /* at_exit_lock, as the next */
static int owner_at_exit;                     /* a forked child leaves its parent's socket */

static void unlink_at_exit(void) {
    pthread_mutex_lock(&at_exit_lock);
    if (listener_at_exit && owner_at_exit == neap_proc_self())
        neap_listener_unlink(listener_at_exit);
    pthread_mutex_unlock(&at_exit_lock);
}

void neap_endpoint_close(neap_engine *engine) {
    pthread_mutex_lock(&at_exit_lock);
    if (listener_at_exit == engine->listener) listener_at_exit = NULL;
    pthread_mutex_unlock(&at_exit_lock);
    neap_listener_free(engine->listener);
}

void neap_endpoint_open(neap_engine *engine) {
    char path[PATH_MAX];
    int err = neap_runtime_dir(path, sizeof path - 32);
    if (!err) {
        const size_t len = strlen(path);
        snprintf(path + len, sizeof path - len, "/%d.sock", neap_proc_self());
        err = neap_listener_create(path, answer, engine, &engine->listener);
    }
    if (!err) {
        pthread_mutex_lock(&at_exit_lock);
        const bool is_first = !listener_at_exit;
        if (is_first) {
            listener_at_exit = engine->listener;
            owner_at_exit = neap_proc_self();
        }
        pthread_mutex_unlock(&at_exit_lock);
        if (is_first) atexit(unlink_at_exit);
    }
    if (err)
        neap_log(NEAP_LOG_WARN, "no control socket: %s (neap ps, evict and stat will not see this)",
                 neap_strerror(err));
}
