/* progress.c - one bar on stderr. A thread draws it, so that a command may block in a call.
 * The thread exists only while stderr is a terminal and something runs; it sleeps between frames.
 */
#include <pthread.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cli.h"
#include "clock.h"

#define FRAME_NS 200000000ull
#define FIRST_NS 1000000000ull /* what takes less shows nothing */
#define BAR_CELLS 28

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t thread;
    bool running, stop, shown;
    double fraction; /* below 0: unknown */
    char what[80], text[80];
    uint64_t began_ns;
} progress = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void draw(unsigned frame) {
    char bar[BAR_CELLS + 1];
    memset(bar, ' ', BAR_CELLS);
    bar[BAR_CELLS] = '\0';
    if (progress.fraction >= 0) {
        memset(bar, '=', (size_t)(progress.fraction * BAR_CELLS));
    } else {
        for (unsigned i = 0; i < 4; i++)
            bar[(frame + i) % BAR_CELLS] = '=';
    }
    const double seconds = (double)(neap_clock_ns() - progress.began_ns) / 1e9;
    fprintf(stderr, "\r\033[K%s [%s] ", progress.what, bar);
    if (progress.fraction >= 0) fprintf(stderr, "%3.0f %% ", progress.fraction * 100);
    fprintf(stderr, "%.0f s %s", seconds, progress.text);
    fflush(stderr);
    progress.shown = true;
}

static void *draw_frames(void *unused) {
    (void)unused;
    pthread_mutex_lock(&progress.lock);
    for (unsigned frame = 0; !progress.stop; frame++) {
        if (neap_clock_ns() - progress.began_ns >= FIRST_NS) draw(frame);
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += (long)FRAME_NS;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&progress.wake, &progress.lock, &until);
    }
    if (progress.shown) fputs("\r\033[K", stderr);
    pthread_mutex_unlock(&progress.lock);
    return NULL;
}

void neap_progress_start(const char *what) {
    if (progress.running || !isatty(STDERR_FILENO)) return;
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&progress.wake, &attr);
    pthread_condattr_destroy(&attr);
    snprintf(progress.what, sizeof progress.what, "%s", what);
    progress.text[0] = '\0';
    progress.fraction = -1;
    progress.stop = progress.shown = false;
    progress.began_ns = neap_clock_ns();
    progress.running = pthread_create(&progress.thread, NULL, draw_frames, NULL) == 0;
}

void neap_progress_set(double fraction, const char *text) {
    pthread_mutex_lock(&progress.lock);
    progress.fraction = fraction > 1 ? 1 : fraction;
    if (text) snprintf(progress.text, sizeof progress.text, "%s", text);
    pthread_mutex_unlock(&progress.lock);
}

void neap_progress_stop(void) {
    if (!progress.running) return;
    pthread_mutex_lock(&progress.lock);
    progress.stop = true;
    pthread_cond_signal(&progress.wake);
    pthread_mutex_unlock(&progress.lock);
    pthread_join(progress.thread, NULL);
    pthread_cond_destroy(&progress.wake);
    progress.running = false;
}
