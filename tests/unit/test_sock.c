/* test_sock.c - lines over local sockets: garbage, long lines, many at once, dead and dying peers.
 */
#include "sock.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "clock.h"
#include "fault.h"
#include "proc.h"
#include "temp.h"

static char *dir, path[600];
static atomic_int n_running, n_most;

static char *echo(const char *line, void *ctx) {
    (void)ctx;
    if (strcmp(line, "close") == 0) return NULL;
    if (strcmp(line, "slow") == 0) {
        const int running = atomic_fetch_add(&n_running, 1) + 1;
        for (int most = atomic_load(&n_most); running > most;)
            if (atomic_compare_exchange_weak(&n_most, &most, running)) break;
        usleep(50000);
        atomic_fetch_sub(&n_running, 1);
    }
    if (strcmp(line, "long") == 0) {
        char *reply = malloc(NEAP_LINE_MAX + 2);
        memset(reply, 'r', NEAP_LINE_MAX + 1);
        reply[NEAP_LINE_MAX + 1] = '\0';
        return reply;
    }
    char *reply = malloc(strlen(line) + 2);
    sprintf(reply, "<%s", line);
    return reply;
}

static int dial(void) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strcpy(address.sun_path, path);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
    return fd;
}

static void says(int fd, const char *text, size_t len) {
    CHECK(send(fd, text, len, MSG_NOSIGNAL) == (ssize_t)len);
}

static void hears(int fd, const char *text) {
    char got[256] = {0};
    size_t len = 0;
    while (len < strlen(text)) {
        const ssize_t n = recv(fd, got + len, strlen(text) - len, 0);
        CHECK(n > 0);
        len += (size_t)n;
    }
    CHECK(memcmp(got, text, len) == 0);
}

static void hears_end(int fd) {
    char byte;
    const ssize_t n = recv(fd, &byte, 1, 0);
    CHECK(n == 0 || (n < 0 && errno == ECONNRESET));
    close(fd);
}

static void test_call(void) {
    char *reply = NULL;
    CHECK(neap_sock_call(path, "hello", 5000, &reply) == 0);
    CHECK(strcmp(reply, "<hello") == 0);
    free(reply);
    CHECK(neap_sock_call(path, "", 0, &reply) == 0 && strcmp(reply, "<") == 0);
    free(reply);
    struct stat st;
    CHECK(stat(path, &st) == 0 && (st.st_mode & 0777) == 0600);
}

/* A fresh listener each: the fault must not hit what an earlier connection has still to do. */
static void test_call_faults(void) {
    static const char *const points[] = {"sock.connect", "sock.send", "sock.receive"};
    for (size_t i = 0; i < 3; i++) {
        neap_listener *listener;
        char *reply = NULL;
        CHECK(neap_listener_create(path, echo, NULL, &listener) == 0);
        neap_fault_arm(points[i], 1, -EIO, 0);
        const int err = neap_sock_call(path, "x", 1000, &reply);
        CHECK(neap_fault_fired() == 1 && reply == NULL);
        neap_fault_disarm();
        /* The first to receive is the listener's end, which hangs up. */
        CHECK(i == 2 ? err == -ECONNRESET || err == -EPIPE : err == -EIO);
        test_call();
        neap_listener_free(listener);
    }
    neap_listener *none = NULL;
    neap_fault_arm("sock.bind", 1, -EACCES, 0);
    CHECK(neap_listener_create(path, echo, NULL, &none) == -EACCES && !none);
    neap_fault_disarm();
}

static void test_call_errors(void) {
    char *reply = NULL, other[700];
    char *line = malloc(NEAP_LINE_MAX + 2);
    memset(line, 'x', NEAP_LINE_MAX + 1);
    line[NEAP_LINE_MAX + 1] = '\0';
    CHECK(neap_sock_call(path, line, 1000, &reply) == -EMSGSIZE);
    line[NEAP_LINE_MAX - 1] = '\0';
    CHECK(neap_sock_call(path, line, 5000, &reply) == 0 && strlen(reply) == NEAP_LINE_MAX);
    free(reply);
    reply = NULL;
    CHECK(neap_sock_call(path, "long", 5000, &reply) == -EMSGSIZE);
    CHECK(neap_sock_call(path, "close", 5000, &reply) == -ECONNRESET);
    CHECK(neap_sock_call(path, "slow", 10, &reply) == -ETIMEDOUT);
    snprintf(other, sizeof other, "%s/none.sock", dir);
    CHECK(neap_sock_call(other, "x", 1000, &reply) == -ENOENT);
    memset(line, 'p', 200);
    line[200] = '\0';
    CHECK(neap_sock_call(line, "x", 1000, &reply) == -ENAMETOOLONG);
    CHECK(reply == NULL);
    free(line);
}

static void test_lines(void) {
    int fd = dial();
    says(fd, "one\ntwo\nthr", 11); /* several at once, one in pieces */
    hears(fd, "<one\n<two\n");
    says(fd, "ee\n", 3);
    hears(fd, "<three\n");
    says(fd, "nul\0!\n", 6);
    hears(fd, "<nul\1!\n");
    says(fd, "last\n", 5);
    CHECK(shutdown(fd, SHUT_WR) == 0);
    hears(fd, "<last\n");
    hears_end(fd);

    fd = dial(); /* a line without end */
    char *garbage = malloc(NEAP_LINE_MAX + 1);
    memset(garbage, 0xFF, NEAP_LINE_MAX + 1);
    says(fd, garbage, NEAP_LINE_MAX + 1);
    hears_end(fd);
    free(garbage);

    for (int i = 0; i < 50; i++) { /* gone before the reply: no SIGPIPE, nothing stuck */
        fd = dial();
        says(fd, "x\nx\nx\nx\n", 8);
        close(fd);
    }
    test_call();
}

static void *call_slow(void *arg) {
    char *reply = NULL;
    CHECK(neap_sock_call(path, "slow", 0, &reply) == 0 && strcmp(reply, "<slow") == 0);
    free(reply);
    return arg;
}

/* More callers than connections are served at once: the others wait, none is lost. */
static void test_many(void) {
    enum { N = 48 };
    pthread_t threads[N];
    atomic_store(&n_most, 0);
    for (int i = 0; i < N; i++)
        CHECK(pthread_create(&threads[i], NULL, call_slow, NULL) == 0);
    for (int i = 0; i < N; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(atomic_load(&n_most) > 1 && atomic_load(&n_most) <= 16);
}

static uint64_t switches(void) {
    struct rusage usage;
    CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
    return (uint64_t)usage.ru_nvcsw + (uint64_t)usage.ru_nivcsw;
}

/* With a client that is connected and silent, nothing wakes up. */
static void test_idle(void) {
    const int fd = dial();
    says(fd, "x\n", 2);
    hears(fd, "<x\n");
    usleep(50000);
    const uint64_t before = switches();
    sleep(1);               /* one switch of our own */
#ifndef __SANITIZE_THREAD__ /* has a thread of its own that wakes up */
    CHECK(switches() - before <= 3);
#else
    (void)before;
#endif
    says(fd, "y\n", 2);
    hears(fd, "<y\n");
    close(fd);
}

/* However many sit there in silence, a caller gets through, and who asks in time is answered. */
static void test_silent(void) {
    enum { N = 20 }; /* more than there are places */
    int fds[N];
    const uint64_t began = neap_clock_ns();
    for (int i = 0; i < N; i++) {
        fds[i] = dial();
        if (i % 2) says(fds[i], "half", 4);
    }
    char *reply = NULL;
    CHECK(neap_sock_call(path, "hello", 4000, &reply) == 0 && strcmp(reply, "<hello") == 0);
    free(reply);
    CHECK(neap_clock_ns() - began < 4000000000u);
    says(fds[N - 2], "late\n", 5);
    hears(fds[N - 2], "<late\n");
    for (int i = 0; i < N; i++) /* all are dropped in the end, the fed one, too */
        hears_end(fds[i]);
    CHECK(neap_clock_ns() - began < 15000000000u);
}

/* A byte now and then does not keep a line open. */
static void test_drip(void) {
    const int fd = dial();
    const uint64_t began = neap_clock_ns();
    while (send(fd, "x", 1, MSG_NOSIGNAL) == 1 && neap_clock_ns() - began < 12000000000u)
        usleep(100000);
    CHECK(neap_clock_ns() - began < 12000000000u);
    hears_end(fd);
}

static void test_refused(void) {
    if (geteuid() != 0) return; /* only root can play another user */
    CHECK(chmod(dir, 0755) == 0 && chmod(path, 0666) == 0);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        char *reply;
        if (setgid(65534) != 0 || setuid(65534) != 0) _exit(2);
        const int err = neap_sock_call(path, "x", 5000, &reply);
        _exit(err == -ECONNRESET || err == -EPIPE ? 0 : 1);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(chmod(path, 0600) == 0 && chmod(dir, 0700) == 0);
}

static void test_accept_fails(void) {
    neap_fault_arm("sock.accept", 1, -EMFILE, 0);
    char *reply;
    CHECK(neap_sock_call(path, "x", 5000, &reply) == 0); /* served at the second try */
    CHECK(neap_fault_fired() == 1);
    neap_fault_disarm();
    free(reply);
}

static void test_path_in_use(void) {
    neap_listener *second = NULL;
    CHECK(neap_listener_create(path, echo, NULL, &second) == -EADDRINUSE);
    test_call(); /* the first one is unharmed */

    char other[620];
    snprintf(other, sizeof other, "%s/file", dir);
    FILE *file = fopen(other, "w");
    CHECK(file && fclose(file) == 0);
    CHECK(neap_listener_create(other, echo, NULL, &second) == -EADDRINUSE);
    CHECK(access(other, F_OK) == 0);
    snprintf(other, sizeof other, "%s/no/such", dir);
    CHECK(neap_listener_create(other, echo, NULL, &second) == -ENOENT);
    CHECK(second == NULL);
}

/* A process that was killed leaves its socket; the next one takes its place. */
static void test_stale(void) {
    snprintf(path, sizeof path, "%s/stale.sock", dir);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strcpy(address.sun_path, path);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof address) == 0);
    close(fd);
    neap_listener *listener;
    CHECK(neap_listener_create(path, echo, NULL, &listener) == 0);
    test_call();
    const int busy = dial(); /* free does not wait for a silent client */
    says(busy, "half a li", 9);
    const uint64_t began = neap_clock_ns();
    neap_listener_free(listener);
    CHECK(neap_clock_ns() - began < 5000000000u);
    hears_end(busy);
    CHECK(access(path, F_OK) != 0);
}

static void test_runtime_dir(void) {
    char got[600], want[620], other[620];
    struct stat st;
    CHECK(setenv("XDG_RUNTIME_DIR", dir, 1) == 0);
    snprintf(want, sizeof want, "%s/neap", dir);
    CHECK(neap_runtime_dir(got, sizeof got) == 0 && strcmp(got, want) == 0);
    CHECK(stat(got, &st) == 0 && (st.st_mode & 0777) == 0700);
    CHECK(neap_runtime_dir(got, 5) == -ENAMETOOLONG);
    CHECK(rmdir(want) == 0);
    snprintf(other, sizeof other, "%s/elsewhere", dir);
    CHECK(mkdir(other, 0700) == 0 && symlink(other, want) == 0);
    CHECK(neap_runtime_dir(got, sizeof got) == -EPERM); /* a link may lead anywhere */
    CHECK(unlink(want) == 0);
    if (geteuid() == 0) {
        CHECK(mkdir(want, 0777) == 0 && chown(want, 65534, 65534) == 0);
        CHECK(neap_runtime_dir(got, sizeof got) == -EPERM);
    }
    CHECK(setenv("XDG_CACHE_HOME", dir, 1) == 0);
    CHECK(neap_cache_dir(got, sizeof got) == 0 && strcmp(got, want) == 0);
    CHECK(unsetenv("XDG_CACHE_HOME") == 0 && setenv("HOME", dir, 1) == 0);
    snprintf(want, sizeof want, "%s/.cache/neap", dir);
    CHECK(neap_cache_dir(got, sizeof got) == 0 && strcmp(got, want) == 0);
    CHECK(unsetenv("HOME") == 0 && neap_cache_dir(got, sizeof got) == 0 && got[0] == '/');
}

int main(void) {
    dir = temp_dir();
    snprintf(path, sizeof path, "%s/1.sock", dir);
    neap_listener *listener;
    test_call_faults();
    CHECK(neap_listener_create(path, echo, NULL, &listener) == 0);
    test_call();
    test_call_errors();
    test_lines();
    test_many();
    test_idle();
    test_silent();
    test_drip();
    test_refused();
    test_accept_fails();
    test_path_in_use();
    neap_listener_free(listener);
    neap_listener_free(NULL);
    test_stale();
    test_runtime_dir();
    temp_remove(dir);
    return 0;
}
