/* test_memory_events.c - waiting for pressure: wake-ups, time, systemd's protocol over a fifo, a
 * socket and a file, sources that break, a stream of events that must not become a stream of
 * wake-ups. */
#include "memory_events.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "check.h"
#include "clock.h"
#include "temp.h"

#define MS 1000000ull

static char *dir;

static neap_memory_events *opened(const char *watch, const char *write) {
    neap_memory_events *events;
    CHECK(neap_memory_events_open(watch, write, &events) == 0);
    return events;
}

static void path_of(char path[600], const char *name) {
    snprintf(path, 600, "%s/%s", dir, name);
}

static void time_and_wake(void) {
    neap_memory_events *events = opened(NULL, NULL);
    CHECK(neap_memory_events_sources(events) == NEAP_MEMORY_WAKE);
    const uint64_t began_ns = neap_clock_ns();
    CHECK(neap_memory_events_wait(events, began_ns + 30 * MS) == 0);
    CHECK(neap_clock_ns() - began_ns >= 30 * MS);
    CHECK(neap_memory_events_wait(events, 0) == 0); /* past: a look */
    neap_memory_events_wake(events);
    neap_memory_events_wake(events);
    CHECK(neap_memory_events_wait(events, UINT64_MAX) == NEAP_MEMORY_WAKE);
    CHECK(neap_memory_events_wait(events, 0) == 0);
    neap_memory_events_close(events);
    neap_memory_events_close(NULL);
}

static void dev_null_means_none(void) {
    neap_memory_events *events = NULL;
    CHECK(neap_memory_events_open("/dev/null", NULL, &events) == -ECANCELED && !events);
    /* What is not understood is left out. */
    const char *const odd[] = {"relative", "/no/such/file", "/", "/dev/zero"};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        events = opened(odd[i], NULL);
        CHECK(neap_memory_events_sources(events) == NEAP_MEMORY_WAKE);
        neap_memory_events_close(events);
    }
}

/* Thousands of messages a second are a few wake-ups. */
static void fifo(void) {
    char path[600];
    path_of(path, "fifo");
    CHECK(mkfifo(path, 0600) == 0);
    neap_memory_events *events = opened(path, NULL);
    CHECK(neap_memory_events_sources(events) == (NEAP_MEMORY_WAKE | NEAP_MEMORY_TOLD));
    const int fd = open(path, O_WRONLY | O_NONBLOCK);
    CHECK(fd >= 0 && write(fd, "pressure", 8) == 8);
    CHECK(neap_memory_events_wait(events, UINT64_MAX) == NEAP_MEMORY_TOLD);
    const uint64_t end_ns = neap_clock_ns() + 500 * MS;
    int wakes = 0;
    while (neap_clock_ns() < end_ns) {
        for (int i = 0; i < 100; i++)
            CHECK(write(fd, "pressure", 8) == 8 || errno == EAGAIN);
        wakes += neap_memory_events_wait(events, neap_clock_ns() + MS) != 0;
    }
    CHECK(wakes >= 3 && wakes <= 11);
    close(fd);
    neap_memory_events_close(events);
    unlink(path);
}

static void socket_with_words(void) {
    char path[600], got[64];
    path_of(path, "socket");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    CHECK(strlen(path) < sizeof address.sun_path);
    strcpy(address.sun_path, path);
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(bind(listener, (struct sockaddr *)&address, sizeof address) == 0);
    CHECK(listen(listener, 4) == 0);
    neap_memory_events *events = opened(path, "aGVsbG8gd29ybGQ="); /* hello world */
    const int peer = accept(listener, NULL, NULL);
    CHECK(recv(peer, got, sizeof got, 0) == 11 && memcmp(got, "hello world", 11) == 0);
    CHECK(send(peer, "x", 1, MSG_NOSIGNAL) == 1);
    CHECK(neap_memory_events_wait(events, UINT64_MAX) == NEAP_MEMORY_TOLD);
    close(peer); /* gone: forgotten, and no spinning */
    CHECK(neap_memory_events_wait(events, neap_clock_ns() + 200 * MS) == 0);
    CHECK(neap_memory_events_sources(events) == NEAP_MEMORY_WAKE);
    neap_memory_events_close(events);

    events = opened(path, "not base64!");
    CHECK(neap_memory_events_sources(events) == NEAP_MEMORY_WAKE);
    neap_memory_events_close(events);
    close(listener);
    events = opened(path, NULL); /* nobody listens */
    CHECK(neap_memory_events_sources(events) == NEAP_MEMORY_WAKE);
    neap_memory_events_close(events);
    unlink(path);
}

static void psi_file(void) {
    char path[600];
    path_of(path, "file"); /* a plain file cannot be waited for */
    FILE *file = fopen(path, "w");
    CHECK(file && fclose(file) == 0);
    neap_memory_events *events = opened(path, NULL);
    CHECK(neap_memory_events_sources(events) == NEAP_MEMORY_WAKE);
    neap_memory_events_close(events);
    if (access("/proc/pressure/memory", W_OK) != 0) {
        printf("no PSI here: its file was not tried\n");
        return;
    }
    events =
        opened("/proc/pressure/memory", "c29tZSAxNTAwMDAgMjAwMDAwMAA="); /* some 150000 2000000 */
    CHECK(neap_memory_events_sources(events) == (NEAP_MEMORY_WAKE | NEAP_MEMORY_TOLD));
    neap_memory_events_close(events);
    events = opened("/proc/pressure/memory", "bm9uc2Vuc2U="); /* refused by the kernel */
    CHECK(neap_memory_events_sources(events) == NEAP_MEMORY_WAKE);
    neap_memory_events_close(events);
}

static void *wake_later(void *arg) {
    usleep(50000);
    neap_memory_events_wake(arg);
    return NULL;
}

/* What this machine has: it opens, does not fire by itself all the time, and wakes. */
static void live(void) {
    neap_memory_files *files;
    CHECK(neap_memory_files_open("", &files) == 0 && neap_memory_files_is_live(files));
    neap_memory_events *events = opened(NULL, NULL);
    neap_memory_events_listen(events, files);
    printf("sources here: %#x, cgroup v%d\n", neap_memory_events_sources(events),
           neap_memory_files_version(files));
    neap_memory_events_listen(events, files); /* again: replaces */
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, wake_later, events) == 0);
    int others = 0;
    while (!(neap_memory_events_wait(events, UINT64_MAX) & NEAP_MEMORY_WAKE))
        CHECK(++others < 100);
    pthread_join(thread, NULL);
    neap_memory_events_close(events);
    neap_memory_files_close(files);
}

int main(void) {
    dir = temp_dir();
    time_and_wake();
    dev_null_means_none();
    fifo();
    socket_with_words();
    psi_file();
    live();
    temp_remove(dir);
    return 0;
}
