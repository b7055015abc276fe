/* test_swapfile_fail_n.c - fails the n-th system call of a fixed run of puts, gets and drops, for
 * n = 1, 2, ... until nothing fires. Whatever fails: the error is the one that was planted, records
 * put before stay readable, nothing leaks, and the swap file goes on working. */
#include "swapfile.h"

#include <dirent.h>
#include <errno.h>
#include <unistd.h>

#include "check.h"
#include "err.h"
#include "fault.h"
#include "temp.h"

enum { N_RECORDS = 6 };

static unsigned char *room;
static char *dir;

static int n_open_files(void) {
    DIR *fds = opendir("/proc/self/fd");
    CHECK(fds);
    int n = 0;
    while (readdir(fds))
        n++;
    closedir(fds);
    return n;
}

static size_t len_of(int i) {
    static const size_t lens[N_RECORDS] = {4096, 100, 1300000, 8192, 4097, 65536};
    return lens[i];
}

/* Two parts: whole blocks, then the rest one byte off a block boundary. */
static void parts_of(size_t len, struct iovec parts[2]) {
    const size_t blocks = len / 4096 * 4096;
    parts[0] = (struct iovec){room, blocks};
    parts[1] = (struct iovec){room + (2u << 20) + 1, len - blocks};
}

static void fill(int i, struct iovec parts[2]) {
    parts_of(len_of(i), parts);
    fill_random(parts[0].iov_base, parts[0].iov_len, (uint64_t)i);
    fill_random(parts[1].iov_base, parts[1].iov_len, (uint64_t)i + 100);
}

static int read_back(neap_swapfile *swapfile, const neap_swap_record *record, int i,
                     neap_reader *reader) {
    static unsigned char want[2][2u << 20];
    struct iovec parts[2];
    parts_of(len_of(i), parts);
    memset(room, 0, 4u << 20);
    const int err = neap_swapfile_get(swapfile, record, parts, 2, reader);
    if (err) return err;
    fill_random(want[0], parts[0].iov_len, (uint64_t)i);
    fill_random(want[1], parts[1].iov_len, (uint64_t)i + 100);
    CHECK(memcmp(parts[0].iov_base, want[0], parts[0].iov_len) == 0);
    CHECK(memcmp(parts[1].iov_base, want[1], parts[1].iov_len) == 0);
    return 0;
}

/* Reads everything with the fault disarmed, as often as a failure happens. */
static void all_readable(neap_swapfile *swapfile, neap_swap_record *const *records,
                         neap_reader *reader) {
    for (int i = 0; i < N_RECORDS; i++)
        if (records[i]) CHECK(read_back(swapfile, records[i], i, reader) == 0);
    neap_swapfile_check(swapfile);
}

/* err is allowed only where the planted fault fired since the last look. */
static void expect(int err, int planted, uint32_t *fired) {
    const uint32_t now = neap_fault_fired();
    CHECK(err == 0 || (err == planted && now > *fired));
    *fired = now;
}

/* One workload; returns how often the fault fired. */
static uint32_t run(const char *point, uint32_t n, int planted, int sticky) {
    neap_swap_record *records[N_RECORDS] = {0};
    struct iovec parts[2];
    neap_swapfile *swapfile;
    neap_reader *reader;
    uint32_t fired = 0;
    CHECK(neap_swapfile_create(dir, 0, &swapfile) == 0);
    neap_fault_arm(point, n, planted, sticky);
    CHECK(neap_reader_create(4, &reader) == 0);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < N_RECORDS; i++) {
            if (records[i]) continue;
            fill(i, parts);
            expect(neap_swapfile_put(swapfile, parts, 2, &records[i]), planted, &fired);
            neap_swapfile_check(swapfile);
        }
        for (int i = 0; i < N_RECORDS; i++)
            if (records[i])
                expect(read_back(swapfile, records[i], i, i % 2 ? reader : NULL), planted, &fired);
        for (int i = round; i < N_RECORDS; i += 2) {
            neap_swapfile_drop(swapfile, records[i]); /* must not fail */
            records[i] = NULL;
        }
    }
    fired = neap_fault_fired();
    neap_fault_disarm();
    all_readable(swapfile, records, reader);
    /* It goes on working. */
    for (int i = 0; i < N_RECORDS; i++) {
        fill(i, parts);
        if (!records[i]) CHECK(neap_swapfile_put(swapfile, parts, 2, &records[i]) == 0);
    }
    all_readable(swapfile, records, reader);
    for (int i = 0; i < N_RECORDS; i++)
        neap_swapfile_drop(swapfile, records[i]);
    uint64_t live, limit;
    neap_swapfile_usage(swapfile, &live, &limit);
    CHECK(live == 0 && limit == 0);
    neap_swapfile_check(swapfile);
    neap_reader_free(reader);
    neap_swapfile_free(swapfile);
    return fired;
}

static void test_fail_n(const char *point, int err) {
    const int open_files = n_open_files();
    uint32_t n = 1;
    while (run(point, n, err, 0) > 0)
        n++;
    CHECK(n > 1); /* the point is on the way */
    CHECK(run(point, 1, err, 1) > 0);
    CHECK(n_open_files() == open_files);
}

/* A damaged block is noticed, and only its record is lost. */
static void test_corrupt(void) {
    neap_swap_record *records[2];
    struct iovec parts[2];
    neap_swapfile *swapfile;
    CHECK(neap_swapfile_create(dir, 0, &swapfile) == 0);
    for (int i = 0; i < 2; i++) {
        fill(i + 3, parts);
        CHECK(neap_swapfile_put(swapfile, parts, 2, &records[i]) == 0);
    }
    /* Find the unnamed file among our descriptors and turn over one bit in its first record. */
    char path[64], target[600];
    bool damaged = false;
    for (int fd = 3; fd < 64 && !damaged; fd++) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        FILE *file = NULL;
        const ssize_t len = readlink(path, target, sizeof target - 1);
        if (len > 0 && strncmp(target, dir, strlen(dir)) == 0) file = fopen(path, "r+");
        if (!file) continue;
        const int byte = fgetc(file);
        CHECK(byte != EOF && fseek(file, 0, SEEK_SET) == 0 && fputc(byte ^ 1, file) != EOF);
        CHECK(fclose(file) == 0);
        damaged = true;
    }
    CHECK(damaged);
    CHECK(read_back(swapfile, records[0], 3, NULL) == NEAP_E_CORRUPT);
    CHECK(read_back(swapfile, records[1], 4, NULL) == 0);
    parts[0] = (struct iovec){room, 1};
    CHECK(neap_swapfile_get(swapfile, records[1], parts, 1, NULL) == NEAP_E_BOUND);
    neap_swapfile_free(swapfile);
}

static void silent(int level, const char *line, void *ctx) {
    (void)level;
    (void)line;
    (void)ctx;
}

static void test_no_folder(void) {
    neap_swapfile *swapfile;
    neap_swap_record *record = NULL;
    struct iovec parts[2];
    CHECK(neap_swapfile_create("/proc/neap", 0, &swapfile) == 0); /* nobody can make this one */
    fill(0, parts);
    CHECK(neap_swapfile_put(swapfile, parts, 2, &record) < 0 && !record);
    CHECK(neap_swapfile_put(swapfile, parts, 0, &record) == -EINVAL && !record);
    neap_swapfile_check(swapfile);
    neap_swapfile_free(swapfile);
    neap_swapfile_free(NULL);
}

int main(void) {
    neap_set_log(silent, NULL);
    room = aligned_alloc(4096, 4u << 20);
    dir = temp_dir();
    CHECK(room);
    test_fail_n("file.open", -EROFS);
    test_fail_n("file.mkdir", -EACCES);
    test_fail_n("file.write", -ENOSPC);
    test_fail_n("file.read", -EIO);
    test_fail_n("file.punch", -EOPNOTSUPP);
    test_fail_n("ring.read", -EIO);
    test_fail_n("ring.submit", -EIO);
    test_fail_n("file.", -EIO);
    test_corrupt();
    test_no_folder();
    temp_remove(dir);
    free(room);
    return 0;
}
