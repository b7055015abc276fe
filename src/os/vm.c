/* vm.c - see vm.h. Everything is private anonymous memory, so MADV_DONTNEED gives pages back at
 * once and the next access reads zeros. */
#include "vm.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bytes.h"
#include "fault.h"

#ifndef MADV_COLD
#define MADV_COLD 20
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define PAGEMAP_PRESENT (1ull << 63)
#define PAGEMAP_SWAPPED (1ull << 62)
#define PAGEMAP_BATCH 4096 /* entries of 8 bytes read at a time */

static pthread_once_t vm_once = PTHREAD_ONCE_INIT;
static size_t vm_page_bytes; /* constant after vm_once, as is the next */
static bool vm_has_populate;
static bool vm_prefers_huge; /* after vm_once only changed by tests */

#define BALLOON "/sys/bus/virtio/drivers/virtio_balloon"
#define BALLOON_REPORTING 5 /* VIRTIO_BALLOON_F_REPORTING */

/* Whether this is a virtual machine that gives free memory back to its host: whole huge pages, some
 * seconds after they became free. Such a page then takes longer than its small pages would. */
static bool vm_reports_free_pages(void) {
    DIR *dir = opendir(BALLOON);
    const struct dirent *entry;
    bool found = false;
    while (dir && !found && (entry = readdir(dir))) {
        char path[sizeof BALLOON + 300], bits[BALLOON_REPORTING + 2];
        snprintf(path, sizeof path, BALLOON "/%s/features", entry->d_name);
        FILE *file = strncmp(entry->d_name, "virtio", 6) == 0 ? fopen(path, "re") : NULL;
        found = file && fgets(bits, sizeof bits, file) && strlen(bits) > BALLOON_REPORTING &&
                bits[BALLOON_REPORTING] == '1';
        if (file) fclose(file);
    }
    if (dir) closedir(dir);
    return found;
}

static void vm_probe(void) {
    vm_page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    vm_prefers_huge = !vm_reports_free_pages();
    /* With length 0 the kernel only says whether it knows the advice. */
    vm_has_populate = madvise(NULL, 0, MADV_POPULATE_WRITE) == 0;
}

size_t neap_vm_page(void) {
    pthread_once(&vm_once, vm_probe);
    return vm_page_bytes;
}

bool neap_vm_prefers_huge(void) {
    pthread_once(&vm_once, vm_probe);
    return vm_prefers_huge;
}

void neap_vm_set_prefers_huge(bool prefers) {
    pthread_once(&vm_once, vm_probe);
    vm_prefers_huge = prefers;
}

int neap_vm_reserve(size_t len, size_t align, void **ret_addr) {
    int err = NEAP_FAULT("vm.reserve");
    if (err) return err;
    const size_t page = neap_vm_page();
    size_t padded;
    if (len == 0 || align < page || (align & (align - 1)) != 0) return -EINVAL;
    if (__builtin_add_overflow(len, align - page, &padded)) return -ENOMEM;
    char *raw = mmap(NULL, padded, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) return -errno;

    char *base = (char *)NEAP_ROUND_UP((uintptr_t)raw, align);
    if (base > raw) munmap(raw, (size_t)(base - raw));
    if (raw + padded > base + len) munmap(base + len, (size_t)(raw + padded - (base + len)));
    *ret_addr = base;
    return 0;
}

void neap_vm_unmap(void *addr, size_t len) {
    munmap(addr, len);
}

int neap_vm_drop(void *addr, size_t len) {
    int err = NEAP_FAULT("vm.drop");
    if (err) return err;
    return len == 0 || madvise(addr, len, MADV_DONTNEED) == 0 ? 0 : -errno;
}

int neap_vm_populate(void *addr, size_t len) {
    int err = NEAP_FAULT("vm.populate");
    if (err) return err;
    const size_t page = neap_vm_page();
    if (!vm_has_populate) {
        /* An atomic no-op write: whoever writes beside us loses nothing. */
        for (size_t i = 0; i < len; i += page)
            __atomic_fetch_or((unsigned char *)addr + i, 0, __ATOMIC_RELAXED);
        return 0;
    }
    while (len > 0 && madvise(addr, len, MADV_POPULATE_WRITE) != 0) {
        if (errno != EINTR && errno != EAGAIN) return -errno;
    }
    return 0;
}

/* Dropping the whole of a huge page's range at once makes the kernel forget the table of small
 * pages that was there (PT_RECLAIM, Linux 6.14), in place of which it could put no huge one. The
 * advice is taken back, so that no page of the range becomes a huge one later. */
int neap_vm_populate_huge(void *addr, size_t len) {
    char *first = (char *)NEAP_ROUND_UP((uintptr_t)addr, NEAP_HUGE_PAGE);
    char *end = (char *)(((uintptr_t)addr + len) / NEAP_HUGE_PAGE * NEAP_HUGE_PAGE);
    if (first < end) {
        madvise(first, (size_t)(end - first), MADV_DONTNEED);
        neap_vm_huge(first, (size_t)(end - first), true);
    }
    const int err = neap_vm_populate(addr, len);
    if (first < end) neap_vm_huge(first, (size_t)(end - first), false);
    return err;
}

int neap_vm_protect(void *addr, size_t len, bool accessible) {
    int err = NEAP_FAULT("vm.protect");
    if (err) return err;
    const int prot = accessible ? PROT_READ | PROT_WRITE : PROT_NONE;
    return len == 0 || mprotect(addr, len, prot) == 0 ? 0 : -errno;
}

void neap_vm_huge(void *addr, size_t len, bool huge) {
    madvise(addr, len, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
}

/* MADV_COLD over a part of a huge page splits it and otherwise only marks the part as unused. */
void neap_vm_split(const void *addr) {
    const uintptr_t page = neap_vm_page(), skew = (uintptr_t)addr % page;
    madvise((void *)(uintptr_t)((const char *)addr - skew), page, MADV_COLD);
}

/* A page that was only read is the kernel's shared zero page, which pagemap shows as present: such
 * pages count as held although dropping them frees nothing. */
int neap_vm_held(const void *addr, size_t len, uint64_t *ret_bytes) {
    int err = NEAP_FAULT("vm.held");
    if (err) return err;
    const size_t page = neap_vm_page();
    const int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -errno;

    uint64_t entries[PAGEMAP_BATCH];
    uint64_t held = 0;
    uint64_t index = (uintptr_t)addr / page;
    const uint64_t end = ((uintptr_t)addr + len + page - 1) / page;
    while (index < end) {
        const size_t want = end - index < PAGEMAP_BATCH ? end - index : PAGEMAP_BATCH;
        const ssize_t got =
            pread(fd, entries, want * sizeof *entries, (off_t)(index * sizeof *entries));
        if (got < 0 && errno == EINTR) continue;
        if (got < (ssize_t)sizeof *entries) {
            err = got < 0 ? -errno : -EIO;
            goto out;
        }
        const size_t n = (size_t)got / sizeof *entries;
        for (size_t i = 0; i < n; i++)
            held += (entries[i] & (PAGEMAP_PRESENT | PAGEMAP_SWAPPED)) != 0;
        index += n;
    }
    *ret_bytes = held * page;
out:
    close(fd);
    return err;
}

/* The kernel writes a newline in a path as \012, and nothing else escaped. */
static void maps_unescape(char *path) {
    char *out = path;
    for (const char *in = path; *in; out++) {
        if (strncmp(in, "\\012", 4) == 0) {
            *out = '\n';
            in += 4;
        } else {
            *out = *in++;
        }
    }
    *out = '\0';
}

/* One line of maps; 1: it holds addr in a file. */
static int maps_line(char *line, uintptr_t addr, char **ret_path, uint64_t *ret_offset) {
    uintptr_t begin, end;
    uint64_t offset, inode;
    int path_at = 0;
    if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %*s %" SCNx64 " %*s %" SCNu64 " %n", &begin, &end,
               &offset, &inode, &path_at) < 4)
        return 0;
    if (addr < begin || addr >= end || inode == 0 || path_at == 0 || line[path_at] != '/') return 0;
    line[strcspn(line, "\n")] = '\0';
    maps_unescape(line + path_at);
    *ret_path = line + path_at;
    *ret_offset = offset + (addr - begin);
    return 1;
}

int neap_vm_mapping(const void *addr, char *ret_path, size_t cap, uint64_t *ret_offset) {
    int err = NEAP_FAULT("vm.mapping");
    if (err) return err;
    FILE *maps = fopen("/proc/self/maps", "re");
    if (!maps) return -errno;

    char *line = NULL, *path;
    size_t line_cap = 0;
    uint64_t offset;
    err = -ENOENT;
    while (getline(&line, &line_cap, maps) >= 0) {
        if (!maps_line(line, (uintptr_t)addr, &path, &offset)) continue;
        const size_t len = strlen(path);
        err = -ENAMETOOLONG;
        if (len < cap) {
            memcpy(ret_path, path, len + 1);
            *ret_offset = offset;
            err = 0;
        }
        break;
    }
    free(line);
    fclose(maps);
    return err;
}
