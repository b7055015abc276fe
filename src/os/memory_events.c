/* memory_events.c - see memory_events.h.
 *
 * Invariants
 *   1. Every source but the wake-up is one-shot in epoll: after it fired it is armed again when its
 *      rest is over, so a stream of events costs at most one wake-up a rest.
 *   2. A source whose file broke (its group was removed, its peer went away) is closed and
 * forgotten; it cannot make wait() spin.
 *   3. Waiting allocates nothing. */
#include "memory_events.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "clock.h"
#include "fault.h"

#define SOURCES_MAX 16
#define REST_NS 50000000u
#define MS_NS 1000000u
#define WRITE_MAX 1024 /* of MEMORY_PRESSURE_WRITE, decoded */

typedef enum source_kind {
    SOURCE_TRIGGER, /* a PSI file: EPOLLPRI, nothing to read */
    SOURCE_NOTICES, /* memory.events: EPOLLPRI, armed again by reading */
    SOURCE_COUNTER, /* eventfd */
    SOURCE_STREAM,  /* fifo, socket: what is said does not matter */
} source_kind;

typedef struct source {
    int fd; /* -1: free */
    source_kind kind;
    unsigned event;
    size_t level; /* of a usage counter */
    bool resting;
    uint64_t rest_until_ns;
} source;

struct neap_memory_events {
    int epoll_fd, wake_fd;
    source sources[SOURCES_MAX];
};

#define WAKE_INDEX SOURCES_MAX

static uint32_t mask_of(const source *s) {
    const bool is_urgent = s->kind == SOURCE_TRIGGER || s->kind == SOURCE_NOTICES;
    return (is_urgent ? EPOLLPRI : EPOLLIN) | EPOLLONESHOT;
}

static void drop(neap_memory_events *events, source *s) {
    if (s->fd < 0) return;
    epoll_ctl(events->epoll_fd, EPOLL_CTL_DEL, s->fd, NULL);
    close(s->fd);
    s->fd = -1;
}

/* Takes over fd. */
static int add(neap_memory_events *events, int fd, source_kind kind, unsigned event, size_t level) {
    size_t i = 0;
    while (i < SOURCES_MAX && events->sources[i].fd >= 0)
        i++;
    int err = i < SOURCES_MAX ? NEAP_FAULT("memory.epoll") : -ENOSPC;
    if (!err) {
        source *s = &events->sources[i];
        *s = (source){.fd = fd, .kind = kind, .event = event, .level = level};
        struct epoll_event e = {.events = mask_of(s), .data.u64 = i};
        if (epoll_ctl(events->epoll_fd, EPOLL_CTL_ADD, fd, &e) == 0) return 0;
        err = -errno;
        s->fd = -1;
    }
    close(fd);
    return err;
}

/* ---- PSI ---- */

/* Windows that are no multiple of 2 s need CAP_SYS_RESOURCE; the kernel looks ten times a window at
 * those, and once in 2 s at the others. */
static void add_trigger(neap_memory_events *events, const char *path, unsigned event) {
    static const char *const triggers[] = {"some 70000 1000000", "some 100000 2000000"};
    if (path[0] == '\0' || NEAP_FAULT("memory.trigger")) return;
    const int fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return;
    for (size_t i = 0; i < 2; i++) {
        if (write(fd, triggers[i], strlen(triggers[i]) + 1) < 0) continue;
        add(events, fd, SOURCE_TRIGGER, event, 0);
        return;
    }
    close(fd);
}

/* ---- cgroup v1 ---- */

static int open_in(const char *dir, const char *name, int flags) {
    char path[PATH_MAX];
    const int n = snprintf(path, sizeof path, "%s/%s", dir, name);
    if (n < 0 || n >= (int)sizeof path) return -ENAMETOOLONG;
    const int fd = open(path, flags | O_CLOEXEC);
    return fd >= 0 ? fd : -errno;
}

/* Asks the group for notices on a counter: "EVENTFD FILE ARGUMENT" into cgroup.event_control. */
static int control(const char *dir, const char *file, int counter, const char *argument) {
    int err = NEAP_FAULT("memory.control");
    if (err) return err;
    const int control_fd = open_in(dir, "cgroup.event_control", O_WRONLY);
    const int file_fd = open_in(dir, file, O_RDONLY);
    char line[128];
    const int len = snprintf(line, sizeof line, "%d %d %s", counter, file_fd, argument);
    if (control_fd < 0 || file_fd < 0)
        err = control_fd < 0 ? control_fd : file_fd;
    else if (write(control_fd, line, (size_t)len) < 0)
        err = -errno;
    if (control_fd >= 0) close(control_fd);
    if (file_fd >= 0) close(file_fd);
    return err;
}

static void add_level_notices(neap_memory_events *events, const char *dir, const char *argument,
                              unsigned event) {
    const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fd < 0) return;
    if (control(dir, "memory.pressure_level", fd, argument) != 0)
        close(fd);
    else
        add(events, fd, SOURCE_COUNTER, event, 0);
}

int neap_memory_events_marks(neap_memory_events *events, const neap_memory_files *files,
                             size_t level, const uint64_t *usage_bytes, size_t n) {
    if (!neap_memory_files_is_live(files) || neap_memory_files_version(files) != 1 ||
        level >= neap_memory_files_n_levels(files))
        return -ENOTSUP;
    for (size_t i = 0; i < SOURCES_MAX; i++) {
        source *s = &events->sources[i];
        if (s->event == NEAP_MEMORY_GROUP_USAGE && s->level == level) drop(events, s);
    }
    const int fd = n > 0 ? eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) : -1;
    if (fd < 0) return n > 0 ? -errno : 0;
    int err = 0;
    for (size_t i = 0; i < n && !err; i++) {
        char argument[32];
        snprintf(argument, sizeof argument, "%llu", (unsigned long long)usage_bytes[i]);
        err = control(neap_memory_files_level_dir(files, level), "memory.usage_in_bytes", fd,
                      argument);
    }
    if (!err) return add(events, fd, SOURCE_COUNTER, NEAP_MEMORY_GROUP_USAGE, level);
    close(fd);
    return err;
}

static void add_v1(neap_memory_events *events, const neap_memory_files *files) {
    const char *own = neap_memory_files_level_dir(files, 0);
    const char *root = neap_memory_files_root_dir(files);
    /* A notice of medium comes for critical, too. In the root group "local" means reclaim of the
     * machine, not of a group below. */
    add_level_notices(events, root, "medium,local", NEAP_MEMORY_MEDIUM);
    add_level_notices(events, root, "critical,local", NEAP_MEMORY_CRITICAL);
    if (strcmp(own, root) == 0) return;
    add_level_notices(events, own, "medium", NEAP_MEMORY_GROUP_MEDIUM);
    add_level_notices(events, own, "critical", NEAP_MEMORY_GROUP_CRITICAL);
}

/* ---- cgroup v2 ---- */

static void add_v2(neap_memory_events *events, const neap_memory_files *files) {
    for (size_t i = 0; i < neap_memory_files_n_levels(files); i++) {
        const int fd = open_in(neap_memory_files_level_dir(files, i), "memory.events", O_RDONLY);
        char text[512];
        if (fd < 0) continue;
        if (read(fd, text, sizeof text) < 0)
            close(fd);
        else
            add(events, fd, SOURCE_NOTICES, NEAP_MEMORY_GROUP_LIMIT, 0);
    }
}

/* ---- systemd's protocol ---- */

static int digit_of(char c) {
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Base64, padded or not. Returns the length, or -EBADMSG. */
static int decode_base64(const char *text, char out[WRITE_MAX]) {
    uint32_t bits = 0;
    int n_bits = 0, len = 0;
    for (; *text && *text != '='; text++) {
        const int digit = digit_of(*text);
        if (digit < 0 || len == WRITE_MAX) return -EBADMSG;
        bits = bits << 6 | (uint32_t)digit;
        n_bits += 6;
        if (n_bits >= 8) {
            n_bits -= 8;
            out[len++] = (char)(bits >> n_bits & 0xff);
        }
    }
    while (*text == '=')
        text++;
    return *text ? -EBADMSG : len;
}

static int open_socket(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const size_t len = strlen(path);
    if (len >= sizeof address.sun_path) return -ENAMETOOLONG;
    memcpy(address.sun_path, path, len + 1);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -errno;
    if (connect(fd, (const struct sockaddr *)&address, sizeof address) == 0) return fd;
    const int err = -errno;
    close(fd);
    return err;
}

static int add_told(neap_memory_events *events, const char *watch, const char *words) {
    char data[WRITE_MAX];
    struct stat st;
    const int len = words ? decode_base64(words, data) : 0;
    if (watch[0] != '/') return -EINVAL;
    if (len < 0) return len;
    const int err = NEAP_FAULT("memory.told");
    if (err) return err;
    if (stat(watch, &st) != 0) return -errno;
    const bool is_file = S_ISREG(st.st_mode);
    if (!is_file && !S_ISFIFO(st.st_mode) && !S_ISSOCK(st.st_mode)) return -EINVAL;
    int fd = S_ISSOCK(st.st_mode)
                 ? open_socket(watch)
                 : open(watch, (is_file && len == 0 ? O_RDONLY : O_RDWR) | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return S_ISSOCK(st.st_mode) ? fd : -errno;
    if (len > 0 && write(fd, data, (size_t)len) != len) {
        const int failure = -errno;
        close(fd);
        return failure;
    }
    return add(events, fd, is_file ? SOURCE_TRIGGER : SOURCE_STREAM, NEAP_MEMORY_TOLD, 0);
}

/* ---- open, close ---- */

static int open_epoll(neap_memory_events *events) {
    int err = NEAP_FAULT("memory.events");
    if (err) return err;
    events->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    events->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event e = {.events = EPOLLIN, .data.u64 = WAKE_INDEX};
    if (events->epoll_fd < 0 || events->wake_fd < 0 ||
        epoll_ctl(events->epoll_fd, EPOLL_CTL_ADD, events->wake_fd, &e) != 0)
        err = -errno;
    return err;
}

int neap_memory_events_open(const char *watch, const char *write, neap_memory_events **ret_events) {
    if (watch && strcmp(watch, "/dev/null") == 0) return -ECANCELED;
    neap_memory_events *events = malloc(sizeof *events);
    if (!events) return -ENOMEM;
    events->epoll_fd = events->wake_fd = -1;
    for (size_t i = 0; i < SOURCES_MAX; i++)
        events->sources[i] = (source){.fd = -1};
    const int err = open_epoll(events);
    if (err) {
        neap_memory_events_close(events);
        return err;
    }
    if (watch) add_told(events, watch, write);
    *ret_events = events;
    return 0;
}

void neap_memory_events_listen(neap_memory_events *events, const neap_memory_files *files) {
    for (size_t i = 0; i < SOURCES_MAX; i++)
        if (events->sources[i].event != NEAP_MEMORY_TOLD) drop(events, &events->sources[i]);
    if (!neap_memory_files_is_live(files)) return;
    add_trigger(events, neap_memory_files_stall_path(files), NEAP_MEMORY_STALL);
    add_trigger(events, neap_memory_files_group_stall_path(files), NEAP_MEMORY_GROUP_STALL);
    if (neap_memory_files_version(files) == 1) add_v1(events, files);
    if (neap_memory_files_version(files) == 2) add_v2(events, files);
}

void neap_memory_events_close(neap_memory_events *events) {
    if (!events) return;
    for (size_t i = 0; i < SOURCES_MAX; i++)
        drop(events, &events->sources[i]);
    if (events->wake_fd >= 0) close(events->wake_fd);
    if (events->epoll_fd >= 0) close(events->epoll_fd);
    free(events);
}

unsigned neap_memory_events_sources(const neap_memory_events *events) {
    unsigned sources = NEAP_MEMORY_WAKE;
    for (size_t i = 0; i < SOURCES_MAX; i++)
        if (events->sources[i].fd >= 0) sources |= events->sources[i].event;
    return sources;
}

/* ---- waiting ---- */

/* Takes what the source said, so that it can say it again; false: it is broken. */
static bool consume(const source *s, uint32_t happened) {
    char text[4096];
    ssize_t n = 1;
    switch (s->kind) {
    case SOURCE_TRIGGER:
        return (happened & EPOLLERR) == 0;
    case SOURCE_NOTICES: /* epoll reports each notice as PRI and ERR */
        return pread(s->fd, text, sizeof text, 0) >= 0;
    case SOURCE_COUNTER:
        return read(s->fd, text, 8) == 8 || errno == EAGAIN;
    case SOURCE_STREAM:
        while ((n = read(s->fd, text, sizeof text)) > 0) {
        }
        return n < 0 && (errno == EAGAIN || errno == EINTR);
    }
    return false;
}

static unsigned take(neap_memory_events *events, const struct epoll_event *e, uint64_t now_ns) {
    if (e->data.u64 == WAKE_INDEX) {
        uint64_t count;
        while (read(events->wake_fd, &count, sizeof count) == sizeof count) {
        }
        return NEAP_MEMORY_WAKE;
    }
    source *s = &events->sources[e->data.u64];
    const unsigned event = s->event;
    if (!consume(s, e->events)) {
        drop(events, s);
        return 0;
    }
    s->resting = true;
    s->rest_until_ns = now_ns + REST_NS;
    return event;
}

/* Listens again to those whose rest is over; when the next rest ends. */
static uint64_t arm(neap_memory_events *events, uint64_t now_ns) {
    uint64_t next_ns = UINT64_MAX;
    for (size_t i = 0; i < SOURCES_MAX; i++) {
        source *s = &events->sources[i];
        if (s->fd < 0 || !s->resting) continue;
        if (s->rest_until_ns > now_ns) {
            if (s->rest_until_ns < next_ns) next_ns = s->rest_until_ns;
            continue;
        }
        struct epoll_event e = {.events = mask_of(s), .data.u64 = i};
        s->resting = false;
        if (epoll_ctl(events->epoll_fd, EPOLL_CTL_MOD, s->fd, &e) != 0) drop(events, s);
    }
    return next_ns;
}

static int timeout_ms(uint64_t now_ns, uint64_t until_ns) {
    if (until_ns == UINT64_MAX) return -1;
    const uint64_t ms = until_ns > now_ns ? (until_ns - now_ns + MS_NS - 1) / MS_NS : 0;
    return ms < INT_MAX ? (int)ms : INT_MAX;
}

unsigned neap_memory_events_wait(neap_memory_events *events, uint64_t until_ns) {
    struct epoll_event list[SOURCES_MAX + 1];
    for (;;) {
        uint64_t now_ns = neap_clock_ns();
        const uint64_t rest_ns = arm(events, now_ns);
        const int n = epoll_wait(events->epoll_fd, list, SOURCES_MAX + 1,
                                 timeout_ms(now_ns, rest_ns < until_ns ? rest_ns : until_ns));
        now_ns = neap_clock_ns();
        unsigned happened = 0;
        for (int i = 0; i < n; i++)
            happened |= take(events, &list[i], now_ns);
        if (happened || now_ns >= until_ns) return happened;
    }
}

void neap_memory_events_wake(neap_memory_events *events) {
    eventfd_write(events->wake_fd, 1);
}
