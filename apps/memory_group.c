/* memory_group.c - see memory_group.h. */
#include "memory_group.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define TEXT_MAX 8192
#define REMOVE_TRIES 100
#define REMOVE_PAUSE_NS 50000000l

/* Where the memory controller lies; v1 first, for then v2 is without it. */
static const struct {
    int version;
    const char *dir;
} tops[] = {{1, "/sys/fs/cgroup/memory"}, {2, "/sys/fs/cgroup"}};

/* Into a file that is there. */
static int put(const char *dir, const char *name, const char *text) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    const int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -errno;
    const ssize_t n = write(fd, text, strlen(text));
    const int err = n < 0 ? -errno : 0;
    close(fd);
    return err;
}

static int put_number(const char *dir, const char *name, uint64_t value) {
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    return put(dir, name, text);
}

static int get(const char *dir, const char *name, char text[TEXT_MAX]) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -errno;
    const ssize_t n = read(fd, text, TEXT_MAX - 1);
    const int err = n < 0 ? -errno : 0;
    text[n > 0 ? n : 0] = '\0';
    close(fd);
    return err;
}

/* The number after the line's name; 0: no such line. */
static uint64_t field(const char *text, const char *name) {
    const size_t len = strlen(name);
    for (const char *line = text; line; line = strchr(line, '\n'), line = line ? line + 1 : NULL)
        if (strncmp(line, name, len) == 0 && line[len] == ' ')
            return strtoull(line + len, NULL, 10);
    return 0;
}

static int open_below(int version, const char *top, const char *name,
                      neap_memory_group *ret_group) {
    neap_memory_group group = {.version = version};
    if (version == 2) (void)put(top, "cgroup.subtree_control", "+memory"); /* seen below */
    snprintf(group.dir, sizeof group.dir, "%s/neap-%.32s-%d", top, name, (int)getpid());
    if (mkdir(group.dir, 0700) != 0) return errno == ENOENT ? -ENOTSUP : -errno;
    char text[TEXT_MAX];
    if (get(group.dir, "memory.stat", text) != 0) {
        rmdir(group.dir);
        return -ENOTSUP;
    }
    *ret_group = group;
    return 0;
}

int neap_memory_group_open(const char *name, neap_memory_group *ret_group) {
    char text[TEXT_MAX];
    if (get(tops[0].dir, "memory.stat", text) == 0)
        return open_below(tops[0].version, tops[0].dir, name, ret_group);
    return open_below(tops[1].version, tops[1].dir, name, ret_group);
}

int neap_memory_group_limit(const neap_memory_group *group, uint64_t bytes, uint64_t swap_bytes) {
    const bool v1 = group->version == 1;
    const char *memory = v1 ? "memory.limit_in_bytes" : "memory.max";
    const char *swap = v1 ? "memory.memsw.limit_in_bytes" : "memory.swap.max";
    const uint64_t swap_value = v1 ? bytes + swap_bytes : swap_bytes; /* v1: of both together */
    int err = put_number(group->dir, memory, bytes);
    if (err == -EINVAL && v1) { /* above that of both, which must go first then */
        err = put_number(group->dir, swap, swap_value);
        if (!err) err = put_number(group->dir, memory, bytes);
    }
    if (!err) err = put_number(group->dir, swap, swap_value);
    return err == -ENOENT ? 0 : err;
}

int neap_memory_group_add(const neap_memory_group *group, int pid) {
    return put_number(group->dir, "cgroup.procs", (uint64_t)pid);
}

static void read_v1(const neap_memory_group *group, const char *stat,
                    neap_memory_group_reading *reading) {
    char text[TEXT_MAX];
    reading->file_bytes = field(stat, "total_inactive_file") + field(stat, "total_active_file");
    reading->swap_bytes = field(stat, "total_swap");
    reading->has_swap = get(group->dir, "memory.memsw.usage_in_bytes", text) == 0;
    if (get(group->dir, "memory.oom_control", text) == 0)
        reading->oom_kills = field(text, "oom_kill");
}

static void read_v2(const neap_memory_group *group, const char *stat,
                    neap_memory_group_reading *reading) {
    char text[TEXT_MAX];
    reading->file_bytes = field(stat, "inactive_file") + field(stat, "active_file");
    reading->has_swap = get(group->dir, "memory.swap.current", text) == 0;
    if (reading->has_swap) reading->swap_bytes = strtoull(text, NULL, 10);
    if (get(group->dir, "memory.events", text) == 0) reading->oom_kills = field(text, "oom_kill");
}

int neap_memory_group_read(const neap_memory_group *group, neap_memory_group_reading *ret_reading) {
    const bool v1 = group->version == 1;
    char usage[TEXT_MAX], stat[TEXT_MAX];
    int err = get(group->dir, v1 ? "memory.usage_in_bytes" : "memory.current", usage);
    if (!err) err = get(group->dir, "memory.stat", stat);
    if (err) return err;
    *ret_reading = (neap_memory_group_reading){
        .usage_bytes = strtoull(usage, NULL, 10),
        .major_faults = field(stat, v1 ? "total_pgmajfault" : "pgmajfault"),
    };
    if (v1)
        read_v1(group, stat, ret_reading);
    else
        read_v2(group, stat, ret_reading);
    return 0;
}

int neap_memory_group_close(neap_memory_group *group) {
    if (group->version == 0) return 0;
    int err = -EBUSY;
    for (int tries = 0; tries < REMOVE_TRIES && err == -EBUSY; tries++) {
        if (tries > 0) nanosleep(&(struct timespec){.tv_nsec = REMOVE_PAUSE_NS}, NULL);
        err = rmdir(group->dir) == 0 ? 0 : -errno;
    }
    if (!err) group->version = 0;
    return err;
}
