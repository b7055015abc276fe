/* sock.c - see sock.h.
 * Threads   one accepts; every connection has a detached thread of its own, counted in n_active and
 *           at most CONNECTIONS_MAX. While nothing arrives all of them sleep; a connection whose
 * next line is not whole after LINE_MS ends. Full      When another one calls, the connection that
 * has waited longest for a line gives it its place, unless it has only waited for GRACE_MS: its
 * line may be on the way. Stopping  an eventfd wakes the accepting thread, shutdown() wakes the
 * others; free returns when the last of them is gone. Invariants
 *   1. fds[i] >= 0 exactly while the thread of connection i lives; n_active counts them. It is
 *      closed under the lock, so that free never shuts down a descriptor that is another's by now.
 *   2. The accepting thread takes a connection only when a place is free.
 *   3. waits_since[i] is not 0 exactly while connection i waits for a line and was not told to end.
 */
#include "sock.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "clock.h"
#include "err.h"
#include "fault.h"
#include "thread.h"

#define CONNECTIONS_MAX 16
#define LINE_MS 5000 /* for a line to come, and for a reply to be taken */
#define GRACE_MS 500 /* a caller sends at once */
#define RETRY_MS 100

struct neap_listener {
    int fd, stop_fd;
    char path[sizeof((struct sockaddr_un){0}.sun_path)];
    dev_t device; /* of the socket that we bound */
    ino_t inode;
    neap_line_handler handler;
    void *ctx;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* n_active fell, stopping, or while all places are taken one waits */
    bool stopping;          /* lock, as the rest */
    unsigned n_active;
    int fds[CONNECTIONS_MAX];
    uint64_t waits_since[CONNECTIONS_MAX]; /* CLOCK_MONOTONIC ns */
};

typedef struct connection {
    neap_listener *listener;
    unsigned index;
    int fd;
} connection;

/* A line being received: bytes beyond the newline stay for the next one. */
typedef struct line_buffer {
    char *bytes; /* cap + 1, so that a terminator fits */
    size_t len, scanned;
} line_buffer;
#define LINE_CAP ((size_t)NEAP_LINE_MAX + 1) /* with its newline */

static int address_of(const char *path, struct sockaddr_un *ret_address) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const size_t len = strlen(path);
    if (len >= sizeof address.sun_path) return -ENAMETOOLONG;
    memcpy(address.sun_path, path, len + 1);
    *ret_address = address;
    return 0;
}

/* Waits for fd; deadline_ns 0: for ever. */
static int wait_for(int fd, short events, uint64_t deadline_ns) {
    for (;;) {
        int timeout_ms = -1;
        if (deadline_ns) {
            const uint64_t now = neap_clock_ns();
            if (now >= deadline_ns) return -ETIMEDOUT;
            const uint64_t left_ms = (deadline_ns - now + 999999) / 1000000;
            timeout_ms = left_ms < 3600000 ? (int)left_ms : 3600000;
        }
        struct pollfd p = {.fd = fd, .events = events};
        const int n = poll(&p, 1, timeout_ms);
        if (n > 0) return 0;
        if (n < 0 && errno != EINTR) return -errno;
    }
}

static uint64_t deadline_in(uint64_t timeout_ms) {
    return neap_clock_ns() + timeout_ms * 1000000;
}

/* A peer that is gone is an error here, never SIGPIPE. */
static int send_all(int fd, const char *bytes, size_t len, uint64_t deadline_ns) {
    int err = NEAP_FAULT("sock.send");
    while (len > 0 && !err) {
        const ssize_t n = send(fd, bytes, len, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n >= 0) {
            bytes += n;
            len -= (size_t)n;
        } else if (errno == EAGAIN) {
            err = wait_for(fd, POLLOUT, deadline_ns);
        } else if (errno != EINTR) {
            err = -errno;
        }
    }
    return err;
}

/* Takes the next bytes. 1: some came; 0: the peer has closed. */
static int receive_some(int fd, line_buffer *buffer) {
    int err = NEAP_FAULT("sock.receive");
    if (err) return err;
    for (;;) {
        const ssize_t n =
            recv(fd, buffer->bytes + buffer->len, LINE_CAP - buffer->len, MSG_DONTWAIT);
        if (n > 0) buffer->len += (size_t)n;
        if (n >= 0) return n > 0;
        if (errno != EINTR) return -errno;
    }
}

/* 1: bytes begins with a whole line, its newline now NUL, *ret_len long with it; 0: not yet;
 * -EMSGSIZE: it will never be. */
static int line_ready(line_buffer *buffer, size_t *ret_len) {
    char *newline = memchr(buffer->bytes + buffer->scanned, '\n', buffer->len - buffer->scanned);
    buffer->scanned = buffer->len;
    if (!newline) return buffer->len == LINE_CAP ? -EMSGSIZE : 0;
    *newline = '\0';
    *ret_len = (size_t)(newline - buffer->bytes) + 1;
    return 1;
}

static void line_consume(line_buffer *buffer, size_t len) {
    memmove(buffer->bytes, buffer->bytes + len, buffer->len - len);
    buffer->len -= len;
    buffer->scanned = 0;
}

/* 0: a line is there; else the connection is over. */
static int receive_line(int fd, line_buffer *buffer, uint64_t deadline_ns, size_t *ret_len) {
    for (;;) {
        int rc = line_ready(buffer, ret_len);
        if (rc != 0) return rc < 0 ? rc : 0;
        rc = wait_for(fd, POLLIN, deadline_ns);
        if (rc) return rc;
        rc = receive_some(fd, buffer);
        if (rc == 0) return -ECONNRESET;
        if (rc < 0 && rc != -EAGAIN) return rc;
    }
}

static void connection_waits(const connection *c, uint64_t since_ns) {
    neap_listener *listener = c->listener;
    pthread_mutex_lock(&listener->lock);
    listener->waits_since[c->index] = since_ns;
    if (since_ns && listener->n_active == CONNECTIONS_MAX)
        pthread_cond_broadcast(&listener->changed);
    pthread_mutex_unlock(&listener->lock);
}

static int connection_line(const connection *c, line_buffer *buffer, size_t *ret_len) {
    connection_waits(c, neap_clock_ns());
    const int err = receive_line(c->fd, buffer, deadline_in(LINE_MS), ret_len);
    connection_waits(c, 0);
    return err;
}

static void connection_serve(const connection *c) {
    line_buffer buffer = {.bytes = malloc(LINE_CAP + 1)};
    size_t len;
    while (buffer.bytes && connection_line(c, &buffer, &len) == 0) {
        /* A NUL inside would hide the rest of the line from the handler: it gets another control
         * character, which no message of ours contains either. */
        for (char *nul = buffer.bytes;
             (nul = memchr(nul, '\0', len - 1 - (size_t)(nul - buffer.bytes)));)
            *nul = '\1';
        char *reply = c->listener->handler(buffer.bytes, c->listener->ctx);
        if (!reply) break;
        const size_t reply_len = strlen(reply);
        reply[reply_len] = '\n';
        const int err = send_all(c->fd, reply, reply_len + 1, deadline_in(LINE_MS));
        free(reply);
        if (err) break;
        line_consume(&buffer, len);
    }
    free(buffer.bytes);
}

static void connection_end(const connection *c) {
    neap_listener *listener = c->listener;
    pthread_mutex_lock(&listener->lock);
    close(c->fd);
    listener->fds[c->index] = -1;
    listener->waits_since[c->index] = 0;
    listener->n_active--;
    pthread_cond_broadcast(&listener->changed);
    pthread_mutex_unlock(&listener->lock);
}

static void *connection_main(void *arg) {
    const connection c = *(connection *)arg;
    free(arg);
    connection_serve(&c);
    connection_end(&c);
    return NULL;
}

static bool peer_allowed(int fd) {
    struct ucred peer;
    socklen_t len = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) != 0) return false;
    return peer.uid == geteuid() || peer.uid == 0;
}

/* Takes over fd. */
static void connection_begin(neap_listener *listener, int fd) {
    connection *c = peer_allowed(fd) ? malloc(sizeof *c) : NULL;
    if (!c) {
        close(fd);
        return;
    }
    pthread_mutex_lock(&listener->lock);
    unsigned index = 0;
    while (listener->fds[index] >= 0)
        index++; /* the accepting thread has seen a free place */
    listener->fds[index] = fd;
    listener->n_active++;
    const bool stopping = listener->stopping;
    pthread_mutex_unlock(&listener->lock);

    *c = (connection){.listener = listener, .index = index, .fd = fd};
    pthread_t thread;
    if (stopping || neap_thread_create(&thread, connection_main, c, "neap-client") != 0) {
        connection_end(c);
        free(c);
        return;
    }
    pthread_detach(thread);
}

/* Tells the connection that has waited longest for a line to end, if that is long enough; what has
 * reached it is still answered. When to look again; 0: when something changes. [lock] */
static uint64_t end_idle(neap_listener *listener) {
    unsigned oldest = CONNECTIONS_MAX;
    for (unsigned i = 0; i < CONNECTIONS_MAX; i++)
        if (listener->waits_since[i] > 0 &&
            (oldest == CONNECTIONS_MAX || listener->waits_since[i] < listener->waits_since[oldest]))
            oldest = i;
    if (oldest == CONNECTIONS_MAX) return 0;
    const uint64_t due_ns = listener->waits_since[oldest] + (uint64_t)GRACE_MS * 1000000;
    if (neap_clock_ns() < due_ns) return due_ns;
    shutdown(listener->fds[oldest], SHUT_RD);
    listener->waits_since[oldest] = 0;
    return 0;
}

/* [lock] */
static void wait_changed(neap_listener *listener, uint64_t until_ns) {
    const struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000u),
                                   .tv_nsec = (long)(until_ns % 1000000000u)};
    if (until_ns)
        pthread_cond_timedwait(&listener->changed, &listener->lock, &until);
    else
        pthread_cond_wait(&listener->changed, &listener->lock);
}

/* Waits until a connection can be taken; false: stop. */
static bool listener_wait(neap_listener *listener) {
    struct pollfd fds[2] = {{.fd = listener->fd, .events = POLLIN},
                            {.fd = listener->stop_fd, .events = POLLIN}};
    poll(fds, 2, -1);
    pthread_mutex_lock(&listener->lock);
    while (!listener->stopping && listener->n_active == CONNECTIONS_MAX)
        wait_changed(listener, end_idle(listener));
    const bool stopping = listener->stopping;
    pthread_mutex_unlock(&listener->lock);
    return !stopping;
}

static void *listener_main(void *arg) {
    neap_listener *listener = arg;
    while (listener_wait(listener)) {
        int err = NEAP_FAULT("sock.accept");
        const int fd = err ? -1 : accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0) {
            connection_begin(listener, fd);
            continue;
        }
        if (!err) err = -errno;
        if (err == -EMFILE || err == -ENFILE || err == -ENOMEM || err == -ENOBUFS) {
            /* The connection stays in the backlog; asking again at once would spin. */
            neap_log(NEAP_LOG_WARN, "control socket: %s", neap_strerror(err));
            struct pollfd stop = {.fd = listener->stop_fd, .events = POLLIN};
            poll(&stop, 1, RETRY_MS);
        }
    }
    return NULL;
}

/* Nobody answers at the socket that is in the way: it is of a dead process. */
static int remove_stale(const struct sockaddr_un *address) {
    struct stat st;
    if (lstat(address->sun_path, &st) != 0) return errno == ENOENT ? 0 : -errno;
    if (!S_ISSOCK(st.st_mode)) return -EADDRINUSE;
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -errno;
    const bool refused = connect(fd, (const struct sockaddr *)address, sizeof *address) != 0 &&
                         errno == ECONNREFUSED;
    close(fd);
    if (!refused) return -EADDRINUSE;
    return unlink(address->sun_path) == 0 || errno == ENOENT ? 0 : -errno;
}

static int listener_bind(neap_listener *listener, const char *path) {
    struct sockaddr_un address;
    struct stat st;
    int err = NEAP_FAULT("sock.bind");
    if (!err) err = address_of(path, &address);
    if (err) return err;
    listener->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener->fd < 0) return -errno;
    int rc = bind(listener->fd, (struct sockaddr *)&address, sizeof address);
    if (rc != 0 && errno == EADDRINUSE) {
        err = remove_stale(&address);
        if (err) return err;
        rc = bind(listener->fd, (struct sockaddr *)&address, sizeof address);
    }
    if (rc != 0) return -errno;
    /* From here on the file is ours to remove. Nobody can connect before listen(). */
    memcpy(listener->path, address.sun_path, sizeof listener->path);
    if (chmod(path, 0600) != 0 || lstat(path, &st) != 0) {
        err = -errno;
        unlink(path);
        return err;
    }
    listener->device = st.st_dev;
    listener->inode = st.st_ino;
    return listen(listener->fd, CONNECTIONS_MAX) == 0 ? 0 : -errno;
}

void neap_listener_unlink(const neap_listener *listener) {
    struct stat st;
    if (listener->path[0] && lstat(listener->path, &st) == 0 && st.st_dev == listener->device &&
        st.st_ino == listener->inode)
        unlink(listener->path);
}

/* Closes and frees what create has made so far; no thread runs. */
static void listener_destroy(neap_listener *listener) {
    neap_listener_unlink(listener);
    if (listener->fd >= 0) close(listener->fd);
    if (listener->stop_fd >= 0) close(listener->stop_fd);
    pthread_mutex_destroy(&listener->lock);
    pthread_cond_destroy(&listener->changed);
    free(listener);
}

int neap_listener_create(const char *path, neap_line_handler handler, void *ctx,
                         neap_listener **ret_listener) {
    neap_listener *listener = calloc(1, sizeof *listener);
    if (!listener) return -ENOMEM;
    listener->handler = handler;
    listener->ctx = ctx;
    listener->fd = -1;
    pthread_mutex_init(&listener->lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&listener->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    for (unsigned i = 0; i < CONNECTIONS_MAX; i++)
        listener->fds[i] = -1;
    listener->stop_fd = eventfd(0, EFD_CLOEXEC);
    int err = listener->stop_fd < 0 ? -errno : listener_bind(listener, path);
    if (!err) err = neap_thread_create(&listener->thread, listener_main, listener, "neap-control");
    if (err) {
        listener_destroy(listener);
        return err;
    }
    *ret_listener = listener;
    return 0;
}

void neap_listener_free(neap_listener *listener) {
    if (!listener) return;
    pthread_mutex_lock(&listener->lock);
    listener->stopping = true;
    pthread_cond_broadcast(&listener->changed);
    pthread_mutex_unlock(&listener->lock);
    eventfd_write(listener->stop_fd, 1);
    pthread_join(listener->thread, NULL);

    pthread_mutex_lock(&listener->lock);
    for (unsigned i = 0; i < CONNECTIONS_MAX; i++)
        if (listener->fds[i] >= 0) shutdown(listener->fds[i], SHUT_RDWR);
    while (listener->n_active > 0)
        pthread_cond_wait(&listener->changed, &listener->lock);
    pthread_mutex_unlock(&listener->lock);
    listener_destroy(listener);
}

static int call_connect(const struct sockaddr_un *address, uint64_t timeout_ms, int *ret_fd) {
    int err = NEAP_FAULT("sock.connect");
    if (err) return err;
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return -errno;
    /* connect() waits while the backlog is full, for as long as a send may. */
    const struct timeval limit = {.tv_sec = (time_t)(timeout_ms / 1000),
                                  .tv_usec = (suseconds_t)(timeout_ms % 1000 * 1000)};
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    int rc;
    do
        rc = connect(fd, (const struct sockaddr *)address, sizeof *address);
    while (rc != 0 && errno == EINTR);
    if (rc != 0) {
        err = errno == EAGAIN ? -ETIMEDOUT : -errno;
        close(fd);
        return err;
    }
    *ret_fd = fd;
    return 0;
}

static int call_receive(int fd, line_buffer *buffer, uint64_t deadline_ns) {
    for (;;) {
        size_t len;
        int rc = line_ready(buffer, &len);
        if (rc != 0) return rc < 0 ? rc : 0;
        rc = wait_for(fd, POLLIN, deadline_ns);
        if (rc) return rc;
        rc = receive_some(fd, buffer);
        if (rc == 0) return -ECONNRESET;
        if (rc < 0 && rc != -EAGAIN) return rc;
    }
}

int neap_sock_call(const char *path, const char *line, uint64_t timeout_ms, char **ret_reply) {
    struct sockaddr_un address;
    const size_t len = strlen(line);
    const uint64_t deadline_ns = timeout_ms ? deadline_in(timeout_ms) : 0;
    int fd = -1, err = address_of(path, &address);
    if (err) return err;
    if (len > NEAP_LINE_MAX) return -EMSGSIZE;
    err = call_connect(&address, timeout_ms, &fd);
    if (err) return err;

    line_buffer buffer = {.bytes = malloc(LINE_CAP + 1)};
    err = buffer.bytes ? send_all(fd, line, len, deadline_ns) : -ENOMEM;
    if (!err) err = send_all(fd, "\n", 1, deadline_ns);
    if (!err) err = call_receive(fd, &buffer, deadline_ns);
    if (!err)
        *ret_reply = buffer.bytes;
    else
        free(buffer.bytes);
    close(fd);
    return err;
}
