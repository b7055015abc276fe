/* test_swapfile_full_disk.c - a file system that is really full, then one that is read-only: a
 * small tmpfs in a mount namespace of our own. */
#include "swapfile.h"

#include <errno.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/statvfs.h>

#include "check.h"
#include "temp.h"

enum { RECORD = 200 * 1024, MOST = 64 };

static char *dir;
static unsigned char *room;

static uint64_t free_blocks(void) {
    struct statvfs fs;
    CHECK(statvfs(dir, &fs) == 0);
    return fs.f_bfree;
}

static int put(neap_swapfile *swapfile, uint64_t seed, neap_swap_record **ret_record) {
    fill_random(room, RECORD, seed);
    const struct iovec part = {room, RECORD};
    return neap_swapfile_put(swapfile, &part, 1, ret_record);
}

static void readable(neap_swapfile *swapfile, const neap_swap_record *record, uint64_t seed) {
    static unsigned char want[RECORD];
    const struct iovec part = {room, RECORD};
    memset(room, 0, RECORD);
    CHECK(neap_swapfile_get(swapfile, record, &part, 1, NULL) == 0);
    fill_random(want, RECORD, seed);
    CHECK(memcmp(room, want, RECORD) == 0);
}

static void test_full(void) {
    neap_swap_record *records[MOST] = {0}, *none = NULL;
    neap_swapfile *swapfile;
    const uint64_t before = free_blocks();
    CHECK(neap_swapfile_create(dir, 0, &swapfile) == 0);
    int n = 0, err = 0;
    while (n < MOST && (err = put(swapfile, (uint64_t)n, &records[n])) == 0)
        n++;
    CHECK(err == -ENOSPC && n > 5);
    CHECK(put(swapfile, 99, &none) == -ENOSPC && !none);
    neap_swapfile_check(swapfile);
    for (int i = 0; i < n; i++)
        readable(swapfile, records[i], (uint64_t)i);
    /* What is dropped makes room, in the middle too. */
    neap_swapfile_drop(swapfile, records[2]);
    CHECK(put(swapfile, 2, &records[2]) == 0);
    for (int i = 0; i < n; i++) {
        readable(swapfile, records[i], (uint64_t)i);
        neap_swapfile_drop(swapfile, records[i]);
    }
    neap_swapfile_check(swapfile);
    CHECK(free_blocks() == before);
    CHECK(put(swapfile, 7, &records[0]) == 0);
    neap_swapfile_free(swapfile);
    CHECK(free_blocks() == before); /* it dies with its last handle */
}

static void test_read_only(void) {
    neap_swap_record *record = NULL;
    neap_swapfile *swapfile;
    CHECK(neap_swapfile_create(dir, 0, &swapfile) == 0);
    CHECK(mount(NULL, dir, NULL, MS_REMOUNT | MS_RDONLY, NULL) == 0);
    CHECK(put(swapfile, 1, &record) == -EROFS && !record);
    CHECK(mount(NULL, dir, NULL, MS_REMOUNT, NULL) == 0);
    CHECK(put(swapfile, 1, &record) == 0); /* the next try finds it writable */
    readable(swapfile, record, 1);
    neap_swapfile_free(swapfile);
}

int main(void) {
    if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
        SKIP("no right to mount a small file system");
    room = aligned_alloc(4096, NEAP_DIRECT_ALIGN * 64);
    dir = temp_dir();
    CHECK(room);
    if (mount("tmpfs", dir, "tmpfs", 0, "size=2M") != 0) SKIP("no tmpfs");
    test_full();
    test_read_only();
    CHECK(umount(dir) == 0);
    temp_remove(dir);
    free(room);
    return 0;
}
