/* zram.c - see zram.h. */
#include "zram.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/swap.h>
#include <time.h>
#include <unistd.h>

#define CONTROL "/sys/class/zram-control"
#define PRIORITY 32767
#define OPEN_TRIES 100
#define REMOVE_TRIES 20
#define PAUSE_NS 20000000l

static int get(const char *path, char *text, size_t cap) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -errno;
    const ssize_t n = read(fd, text, cap - 1);
    const int err = n < 0 ? -errno : 0;
    text[n > 0 ? n : 0] = '\0';
    close(fd);
    return err;
}

static int put(const char *path, const char *text) {
    const int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -errno;
    const int err = write(fd, text, strlen(text)) < 0 ? -errno : 0;
    close(fd);
    return err;
}

static int put_attribute(const neap_zram *zram, const char *name, const char *text) {
    char path[96];
    snprintf(path, sizeof path, "/sys/block/zram%d/%s", zram->number, name);
    return put(path, text);
}

static void device_path(const neap_zram *zram, char path[32]) {
    snprintf(path, 32, "/dev/zram%d", zram->number);
}

static void pause_shortly(void) {
    nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
}

/* The header that makes it a swap area (version 1): without bad pages, without a name. */
static int write_header(int fd, uint64_t size_bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *header = calloc(1, page);
    if (!header) return -ENOMEM;
    const uint32_t words[] = {1, (uint32_t)(size_bytes / page - 1)}; /* version, last page */
    memcpy(header + 1024, words, sizeof words);
    memcpy(header + page - 10, "SWAPSPACE2", 10);
    const int err = pwrite(fd, header, page, 0) == (ssize_t)page ? 0 : -errno;
    free(header);
    return err;
}

/* The node in /dev comes a little after the device. */
static int make_area(const neap_zram *zram, uint64_t size_bytes) {
    char path[32];
    int fd = -1;
    device_path(zram, path);
    for (int tries = 0; tries < OPEN_TRIES && fd < 0; tries++) {
        if (tries > 0) pause_shortly();
        fd = open(path, O_RDWR | O_CLOEXEC);
        if (fd < 0 && errno != ENOENT) break;
    }
    if (fd < 0) return -errno;
    int err = write_header(fd, size_bytes);
    if (!err && fsync(fd) != 0) err = -errno;
    close(fd);
    if (!err && swapon(path, SWAP_FLAG_PREFER | PRIORITY) != 0) err = -errno;
    return err;
}

int neap_zram_open(uint64_t size_bytes, const char *algorithm, neap_zram *ret_zram) {
    char text[32];
    int err = get(CONTROL "/hot_add", text, sizeof text); /* reading it adds one */
    if (err) return err;
    neap_zram zram = {.number = (int)strtol(text, NULL, 10)};
    (void)put_attribute(&zram, "comp_algorithm", algorithm);
    snprintf(text, sizeof text, "%llu", (unsigned long long)size_bytes);
    err = put_attribute(&zram, "disksize", text);
    if (!err) err = make_area(&zram, size_bytes);
    if (err)
        neap_zram_close(&zram);
    else
        *ret_zram = zram;
    return err;
}

/* mm_stat: bytes stored, compressed, used in memory with the allocator's own, ... */
int neap_zram_read(const neap_zram *zram, neap_zram_usage *ret_usage) {
    char path[96], text[256], *end;
    snprintf(path, sizeof path, "/sys/block/zram%d/mm_stat", zram->number);
    const int err = get(path, text, sizeof text);
    if (err) return err;
    const uint64_t stored = strtoull(text, &end, 10);
    (void)strtoull(end, &end, 10);
    *ret_usage = (neap_zram_usage){.stored_bytes = stored, .memory_bytes = strtoull(end, NULL, 10)};
    return 0;
}

int neap_zram_close(neap_zram *zram) {
    char path[32], text[16];
    if (zram->number < 0) return 0;
    device_path(zram, path);
    if (swapoff(path) != 0 && errno != EINVAL) return -errno; /* EINVAL: not swapped to */
    snprintf(text, sizeof text, "%d", zram->number);
    int err = -EBUSY; /* udev may have it open for a moment */
    for (int tries = 0; tries < REMOVE_TRIES && err == -EBUSY; tries++) {
        if (tries > 0) pause_shortly();
        err = put_attribute(zram, "reset", "1");
        if (!err) err = put(CONTROL "/hot_remove", text);
    }
    if (!err) zram->number = -1;
    return err;
}
