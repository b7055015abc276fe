/* paging.c - see paging.h.
 *
 * The helper makes the device and the group, tells by a pipe, and then waits until nobody holds the
 * other end of a second pipe. It has a session of its own, so Ctrl-C does not reach it. */
#include "paging.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "zram.h"

#define END_TRIES 100
#define END_PAUSE_NS 50000000l
#define RECLAIM_TRIES 64
#define RECLAIM_STEP ((uint64_t)256 << 20)
#define ENOUGH ((uint64_t)1 << 20) /* reclaim that gives less than this has come to its end */

typedef struct kept {
    int err;
    const char *what; /* a constant: the same address in both processes */
    neap_memory_group group;
    neap_zram zram;
} kept;

struct neap_paging {
    kept kept;
    pid_t helper;
    int alive_fd; /* open as long as the device and the group are wanted */
};

static void pause_shortly(void) {
    nanosleep(&(struct timespec){.tv_nsec = END_PAUSE_NS}, NULL);
}

/* ---- helper ---- */

/* Sends a signal (0: none) to what runs in the group; how many that are. */
static int signal_group(const neap_memory_group *group, int signal_number) {
    char path[256];
    int pid, n = 0;
    snprintf(path, sizeof path, "%s/cgroup.procs", group->dir);
    FILE *file = fopen(path, "re");
    while (file && fscanf(file, "%d", &pid) == 1) {
        if (signal_number) kill(pid, signal_number);
        n++;
    }
    if (file) fclose(file);
    return n;
}

static int remove_all(kept *k) {
    int tries = 0;
    while (tries < END_TRIES && signal_group(&k->group, tries > END_TRIES / 2 ? SIGKILL : 0)) {
        pause_shortly();
        tries++;
    }
    const int err = neap_zram_close(&k->zram);
    const int err_group = neap_memory_group_close(&k->group);
    return err ? err : err_group;
}

static void make_all(uint64_t swap_bytes, kept *k) {
    *k = (kept){.zram.number = -1, .what = "memory group"};
    k->err = neap_memory_group_open("paging", &k->group);
    if (k->err) return;
    k->what = "zRAM";
    k->err = neap_zram_open(swap_bytes, "lz4", &k->zram);
    if (k->err) neap_memory_group_close(&k->group);
}

static void helper(uint64_t swap_bytes, int told_fd, int alive_fd) {
    setsid();
    signal(SIGPIPE, SIG_IGN);
    kept k;
    char byte;
    make_all(swap_bytes, &k);
    const ssize_t told = write(told_fd, &k, sizeof k);
    close(told_fd);
    if (k.err) _exit(0);
    while (told == (ssize_t)sizeof k && read(alive_fd, &byte, 1) < 0 && errno == EINTR)
        continue;
    _exit(remove_all(&k) ? 1 : 0);
}

/* ---- life ---- */

static int start(uint64_t swap_bytes, neap_paging *p) {
    int told[2], alive[2];
    if (pipe2(told, O_CLOEXEC) != 0) return -errno;
    if (pipe2(alive, O_CLOEXEC) != 0) {
        const int err = -errno;
        close(told[0]);
        close(told[1]);
        return err;
    }
    fflush(NULL);
    p->helper = fork();
    int err = p->helper < 0 ? -errno : 0;
    if (p->helper == 0) {
        close(told[0]);
        close(alive[1]);
        helper(swap_bytes, told[1], alive[0]);
    }
    close(told[1]);
    close(alive[0]);
    p->alive_fd = alive[1];
    if (!err && read(told[0], &p->kept, sizeof p->kept) != (ssize_t)sizeof p->kept) err = -EIO;
    close(told[0]);
    return err ? err : p->kept.err;
}

int neap_paging_create(uint64_t swap_bytes, neap_paging **ret_paging, const char **ret_what) {
    neap_paging *p = calloc(1, sizeof *p);
    *ret_what = "memory group";
    if (!p) return -ENOMEM;
    const int err = start(swap_bytes, p);
    if (!err) {
        *ret_paging = p;
        return 0;
    }
    if (p->kept.what) *ret_what = p->kept.what;
    neap_paging_free(p);
    return err;
}

int neap_paging_free(neap_paging *p) {
    int status = 0;
    if (!p) return 0;
    close(p->alive_fd);
    while (p->helper > 0 && waitpid(p->helper, &status, 0) < 0 && errno == EINTR)
        continue;
    free(p);
    return status ? -EBUSY : 0;
}

const neap_memory_group *neap_paging_group(const neap_paging *p) {
    return &p->kept.group;
}

/* ---- memory ---- */

static int put(const neap_memory_group *group, const char *name, const char *text) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", group->dir, name);
    const int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -errno;
    const int err = write(fd, text, strlen(text)) < 0 ? -errno : 0;
    close(fd);
    return err;
}

/* One round; that the kernel cannot take as much as was asked is no error. */
static int reclaim(const neap_memory_group *group) {
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)RECLAIM_STEP);
    const int err = group->version == 1 ? put(group, "memory.force_empty", "0")
                                        : put(group, "memory.reclaim", text);
    return err == -EAGAIN || err == -EBUSY ? 0 : err;
}

int neap_paging_evict(neap_paging *p) {
    neap_memory_group_reading now, before;
    int err = neap_memory_group_read(&p->kept.group, &now), n_idle = 0;
    /* A round that gives nothing may only have aged the pages: it takes two in a row to end. */
    for (int tries = 0; !err && tries < RECLAIM_TRIES && n_idle < 2; tries++) {
        before = now;
        err = reclaim(&p->kept.group);
        if (!err) err = neap_memory_group_read(&p->kept.group, &now);
        n_idle = before.usage_bytes < now.usage_bytes + ENOUGH ? n_idle + 1 : 0;
    }
    return err;
}

int neap_paging_read(const neap_paging *p, neap_paging_usage *ret_usage) {
    neap_memory_group_reading group;
    neap_zram_usage zram;
    int err = neap_memory_group_read(&p->kept.group, &group);
    if (!err) err = neap_zram_read(&p->kept.zram, &zram);
    if (err) return err;
    const uint64_t file =
        group.file_bytes < group.usage_bytes ? group.file_bytes : group.usage_bytes;
    *ret_usage = (neap_paging_usage){.file_bytes = file,
                                     .anon_bytes = group.usage_bytes - file,
                                     .zram_bytes = zram.memory_bytes};
    return 0;
}
