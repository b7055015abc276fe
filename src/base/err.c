/* err.c - names of errors, and the one place log lines go through.
 * Threads: the sink is read under a lock and called outside it, so a sink may log or be replaced
 * while another thread is in it. NEAP_LOG is read once, by the first line. */
#include "err.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LOG_LINE_MAX 1024

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t log_once = PTHREAD_ONCE_INIT;
static void (*log_sink)(int level, const char *line, void *ctx); /* log_lock */
static void *log_ctx;                                            /* log_lock */
static int log_stderr_level = NEAP_LOG_WARN;                     /* constant after log_once */

const char *neap_strerror(int err) {
    switch (err) {
    case 0:
        return "no error";
    case NEAP_E_CORRUPT:
        return "stored bytes are damaged (checksum or format does not match)";
    case NEAP_E_VERSION:
        return "made by another version";
    case NEAP_E_BOUND:
        return "size or index out of bounds";
    case NEAP_E_BUDGET:
        return "the limit that was set would be exceeded";
    case NEAP_E_LATCHED:
        return "unusable after an earlier failure";
    case NEAP_E_CHANGED:
        return "the model file has changed since it was loaded";
    case NEAP_E_LOST:
        return "the content could not be brought back";
    case NEAP_E_SYNTAX:
        return "malformed text";
    case NEAP_E_UNKNOWN:
        return "no such name";
    default:
        break;
    }
    /* Static strings for every errno; NULL for numbers that are none. */
    const char *text = err < 0 && err > -4096 ? strerrordesc_np(-err) : NULL;
    return text ? text : "unknown error";
}

void neap_set_log(void (*sink)(int level, const char *line, void *ctx), void *ctx) {
    pthread_mutex_lock(&log_lock);
    log_sink = sink;
    log_ctx = ctx;
    pthread_mutex_unlock(&log_lock);
}

static void log_read_level(void) {
    const char *level = getenv("NEAP_LOG");
    if (level && strcmp(level, "debug") == 0)
        log_stderr_level = NEAP_LOG_DEBUG;
    else if (level && strcmp(level, "info") == 0)
        log_stderr_level = NEAP_LOG_INFO;
}

void neap_log(int level, const char *format, ...) {
    const int saved = errno;
    pthread_once(&log_once, log_read_level);
    pthread_mutex_lock(&log_lock);
    void (*sink)(int, const char *, void *) = log_sink;
    void *ctx = log_ctx;
    pthread_mutex_unlock(&log_lock);
    if (sink || level <= log_stderr_level) {
        char line[LOG_LINE_MAX] = "neap: ";
        const size_t prefix = strlen(line);
        va_list args;
        va_start(args, format);
        vsnprintf(line + prefix, sizeof line - prefix, format, args);
        va_end(args);
        if (sink)
            sink(level, line, ctx);
        else
            fprintf(stderr, "%s\n", line);
    }
    errno = saved;
}
