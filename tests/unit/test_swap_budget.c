/* test_swap_budget.c - what others have reported of caches on disk, and must not happen here: a
 * limit that is kept only when allocating fails; a file that grows past it as its records are
 * replaced; a budget that forgets the files of another model in the same folder; swap pages that
 * fill the page cache and push the model's own out. Asks the kernel, not the swap file. */
#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>

#include "rig.h"

#define LIMIT (512u << 10)
#define PAGE 4096u

/* Calls visit once for every open file of this process below dir, unnamed ones included: a file may
 * be open twice, for direct I/O and without. */
static uint64_t each_open(const char *dir, uint64_t (*visit)(int fd)) {
    DIR *fds = opendir("/proc/self/fd");
    const struct dirent *entry;
    ino_t seen[16];
    size_t n_seen = 0;
    uint64_t sum = 0;
    CHECK(fds);
    while ((entry = readdir(fds))) {
        char path[300], target[300];
        snprintf(path, sizeof path, "/proc/self/fd/%s", entry->d_name);
        const ssize_t len = readlink(path, target, sizeof target - 1);
        target[len > 0 ? len : 0] = '\0';
        if (strncmp(target, dir, strlen(dir)) != 0 || target[strlen(dir)] != '/') continue;
        struct stat info;
        CHECK(fstat(atoi(entry->d_name), &info) == 0 && n_seen < 16);
        size_t i = 0;
        while (i < n_seen && seen[i] != info.st_ino)
            i++;
        if (i < n_seen) continue;
        seen[n_seen++] = info.st_ino;
        sum += visit(atoi(entry->d_name));
    }
    closedir(fds);
    return sum;
}

static uint64_t bytes_on_disk(int fd) {
    struct stat info;
    CHECK(fstat(fd, &info) == 0);
    return (uint64_t)info.st_blocks * 512;
}

static uint64_t pages_cached(int fd) {
    struct stat info;
    CHECK(fstat(fd, &info) == 0);
    const size_t len = (size_t)info.st_size, n = (len + PAGE - 1) / PAGE;
    if (len == 0) return 0;
    void *map = mmap(NULL, len, PROT_READ, MAP_SHARED, fd, 0);
    unsigned char *present = malloc(n);
    CHECK(map != MAP_FAILED && present && mincore(map, len, present) == 0);
    uint64_t count = 0;
    for (size_t i = 0; i < n; i++)
        count += present[i] & 1;
    free(present);
    munmap(map, len);
    return count;
}

static void write_everywhere(rig *r, rig_random *random) {
    neap_use_begin(r->engine, NEAP_USE_ACCESS);
    for (int i = 0; i < RIG_CACHES; i++)
        for (uint32_t s = 0; s < RIG_STREAMS; s++)
            CHECK(rig_write(r, &r->caches[i], random, s, 0, RIG_CELLS, true) == 0);
    neap_use_end(r->engine, NEAP_USE_ACCESS);
}

static neap_stat stat_of(const rig *r) {
    neap_stat stat;
    neap_stat_get(r->engine, &stat);
    return stat;
}

/* More is evicted than fits, and replaced, over and over. */
static void limit_holds_as_records_are_replaced(void) {
    rig r;
    rig_random random = {4711};
    rig_make(&r, (neap_options){.codec = "none", .swap_limit_bytes = LIMIT}, false);
    uint64_t most = 0;
    for (int i = 0; i < 40; i++) {
        write_everywhere(&r, &random);
        rig_evict_all(&r);
        const uint64_t bytes = each_open(r.swap, bytes_on_disk);
        if (bytes > most) most = bytes;
        CHECK(bytes <= LIMIT && stat_of(&r).kv_storage <= LIMIT);
        rig_check_all(&r);
    }
    CHECK(most > LIMIT / 2); /* it was used */
    rig_free(&r);
}

/* Each model has its limit, whatever else lies in the folder. */
static void another_model_has_its_own(void) {
    char dir[] = "/tmp/neap-swap-XXXXXX", other[64];
    CHECK(mkdtemp(dir));
    snprintf(other, sizeof other, "%s/left-by-another", dir);
    FILE *file = fopen(other, "w");
    CHECK(file && fputs("not ours", file) >= 0 && fclose(file) == 0);
    const neap_options options = {.codec = "none", .swap_dir = dir, .swap_limit_bytes = LIMIT};
    rig a, b;
    rig_random random = {4712};
    rig_make(&a, options, false);
    rig_make(&b, options, false);
    write_everywhere(&a, &random);
    write_everywhere(&b, &random);
    rig_evict_all(&a);
    const uint64_t of_a = each_open(dir, bytes_on_disk);
    CHECK(of_a > LIMIT / 2 && of_a <= LIMIT);
    rig_evict_all(&b);
    const uint64_t of_both = each_open(dir, bytes_on_disk);
    CHECK(of_both > of_a + LIMIT / 2 && of_both <= of_a + LIMIT);
    rig_check_all(&a);
    rig_check_all(&b);
    rig_free(&a);
    CHECK(each_open(dir, bytes_on_disk) <= LIMIT);
    rig_free(&b);
    CHECK(each_open(dir, bytes_on_disk) == 0);
    CHECK(unlink(other) == 0 && rmdir(dir) == 0); /* untouched; nothing else is left */
}

static bool has_direct_io(const char *dir) {
    const int fd = open(dir, O_TMPFILE | O_RDWR | O_DIRECT, 0600);
    if (fd >= 0) close(fd);
    return fd >= 0;
}

static uint64_t model_pages(const rig *r) {
    const int fd = open(r->model, O_RDONLY);
    CHECK(fd >= 0);
    const uint64_t n = pages_cached(fd);
    close(fd);
    return n;
}

static void swap_stays_out_of_the_page_cache(void) {
    rig r;
    rig_random random = {4713};
    rig_make(&r, (neap_options){.codec = "none"}, false);
    if (!has_direct_io(r.dir)) {
        puts("no direct I/O in /tmp: the page cache was not looked at");
        rig_free(&r);
        return;
    }
    const uint64_t had = model_pages(&r);
    for (int i = 0; i < 3; i++) {
        write_everywhere(&r, &random);
        rig_evict_all(&r);
        CHECK(stat_of(&r).kv_storage > LIMIT);
        CHECK(each_open(r.swap, pages_cached) == 0);
        rig_check_all(&r);
        CHECK(each_open(r.swap, pages_cached) == 0);
        CHECK(model_pages(&r) >= had * 9 / 10); /* others may take some */
    }
    rig_free(&r);
}

int main(void) {
    limit_holds_as_records_are_replaced();
    another_model_has_its_own();
    swap_stays_out_of_the_page_cache();
    return 0;
}
