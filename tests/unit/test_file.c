/* test_file.c - files and the reader: every alignment, short files, no direct I/O, no ring. */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "err.h"
#include "fault.h"
#include "proc.h"
#include "temp.h"

#define FILE_BYTES ((size_t)3 * 1024 * 1024 + 1234)

static char *dir;
static unsigned char *content; /* of the read file */
static unsigned char *room;    /* as large, on a block boundary, with a block before and after */

static char *path_in(const char *name) {
    static char path[600];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static void make_file(const char *path) {
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && write(fd, content, FILE_BYTES) == (ssize_t)FILE_BYTES && fsync(fd) == 0);
    close(fd);
}

/* Reads and looks whether exactly the bytes asked for have come. */
static void reads(neap_file *file, size_t addr_skew, size_t len, uint64_t offset) {
    unsigned char *addr = room + NEAP_DIRECT_ALIGN + addr_skew;
    memset(addr - 64, 0xA5, 64);
    memset(addr + len, 0xA5, 64);
    memset(addr, 0, len);
    CHECK(neap_file_read(file, addr, len, offset) == 0);
    CHECK(memcmp(addr, content + offset, len) == 0);
    for (size_t i = 0; i < 64; i++)
        CHECK(addr[i - 64] == 0xA5 && addr[len + i] == 0xA5);
}

static void test_read_all_alignments(neap_file *file) {
    static const size_t skews[] = {0, 1, 512, 4095};
    static const size_t lens[] = {0, 1, 511, 4095, 4096, 4097, 8192, 12288, 1u << 20, 1500001};
    for (size_t a = 0; a < 4; a++)
        for (size_t o = 0; o < 4; o++)
            for (size_t l = 0; l < sizeof lens / sizeof *lens; l++) {
                reads(file, skews[a], lens[l], skews[o]);
                reads(file, skews[a], lens[l], 4096 * 3 + skews[o]);
            }
    reads(file, 0, FILE_BYTES, 0);
    reads(file, 3, FILE_BYTES - 3, 3);
    reads(file, 0, 1234, FILE_BYTES - 1234);
    reads(file, 0, 1, FILE_BYTES - 1);
}

static void test_read_beyond_end(neap_file *file) {
    CHECK(neap_file_read(file, room, 1, FILE_BYTES) == -EIO);
    CHECK(neap_file_read(file, room, 4096, NEAP_DIRECT_ALIGN * 100000ull) == -EIO);
    CHECK(neap_file_read(file, room, FILE_BYTES + 1, 0) == -EIO);
    CHECK(neap_file_read(file, room, 8192, FILE_BYTES / 4096 * 4096) == -EIO);
    CHECK(neap_file_read(file, room + 1, 5000, FILE_BYTES - 4999) == -EIO);
}

/* Pages of the file in the page cache; the weights must not be held twice. */
static size_t cached_pages(const char *path) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const size_t n = (FILE_BYTES + 4095) / 4096;
    void *map = mmap(NULL, FILE_BYTES, PROT_READ, MAP_SHARED, fd, 0);
    unsigned char *present = malloc(n);
    CHECK(fd >= 0 && map != MAP_FAILED && present && mincore(map, FILE_BYTES, present) == 0);
    size_t count = 0;
    for (size_t i = 0; i < n; i++)
        count += present[i] & 1;
    free(present);
    munmap(map, FILE_BYTES);
    close(fd);
    return count;
}

static void test_read_file(bool direct) {
    char path[600];
    strcpy(path, path_in("model"));
    make_file(path);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
    close(fd);
    neap_file *file;
    if (!direct) neap_fault_arm("file.direct", 1, -EINVAL, 0);
    CHECK(neap_file_open_read(path, &file) == 0);
    neap_fault_disarm();
    const size_t cached = cached_pages(path);
    test_read_all_alignments(file);
    if (cached == 0) CHECK(cached_pages(path) == 0);
    test_read_beyond_end(file);
    neap_fault_arm("file.read", 1, -EIO, 0);
    CHECK(neap_file_read(file, room, 100, 0) == -EIO);
    neap_fault_disarm();
    neap_file_close(file);
    neap_file_close(NULL);
}

/* Opened for direct I/O, but every direct transfer is refused: falls back for good. */
static void test_direct_refused(void) {
    neap_file *file;
    make_file(path_in("model"));
    CHECK(neap_file_open_read(path_in("model"), &file) == 0);
    neap_fault_arm("file.read", 1, -EINVAL, 0);
    reads(file, 0, 8192, 4096);
    neap_fault_disarm();
    test_read_all_alignments(file);
    neap_file_close(file);
}

static void test_open_errors(void) {
    neap_file *file = NULL;
    CHECK(neap_file_open_read(path_in("missing"), &file) == -ENOENT);
    CHECK(neap_file_open_read(dir, &file) == -EISDIR);
    CHECK(mkfifo(path_in("fifo"), 0600) == 0);
    CHECK(neap_file_open_read(path_in("fifo"), &file) == -EINVAL);
    make_file(path_in("plain"));
    CHECK(neap_file_open_swap(path_in("plain"), &file) == -ENOTDIR);
    CHECK(neap_file_open_swap(path_in("plain/below"), &file) == -ENOTDIR);
    CHECK(neap_file_open_swap("", &file) == -ENOENT);
    CHECK(neap_file_open_swap("/proc/neap", &file) < 0);
    CHECK(file == NULL);
}

static void test_identity(void) {
    neap_file *file;
    neap_file_id opened, named;
    make_file(path_in("model"));
    CHECK(neap_file_open_read(path_in("model"), &file) == 0);
    CHECK(neap_file_identity(file, &opened) == 0);
    CHECK(neap_path_identity(path_in("model"), &named) == 0);
    CHECK(neap_file_id_equal(&opened, &named) && opened.size_bytes == FILE_BYTES);
    CHECK(truncate(path_in("model"), 100) == 0);
    CHECK(neap_path_identity(path_in("model"), &named) == 0);
    CHECK(!neap_file_id_equal(&opened, &named));
    /* Replaced by a rename, as downloads do it. */
    make_file(path_in("new"));
    CHECK(rename(path_in("new"), strcat(strcpy((char[600]){0}, dir), "/model")) == 0);
    CHECK(neap_path_identity(path_in("model"), &named) == 0);
    CHECK(!neap_file_id_equal(&opened, &named));
    CHECK(neap_path_identity(path_in("missing"), &named) == -ENOENT);
    neap_file_close(file);
}

typedef struct piece {
    size_t skew, len;
} piece;

/* Writes pieces that begin skew bytes after block boundaries and reads them back as one. */
static void writes(neap_file *file, const piece *pieces, size_t n, uint64_t offset) {
    struct iovec parts[200];
    size_t total = 0, at = 0;
    CHECK(n <= 200);
    for (size_t i = 0; i < n; i++) {
        at = (at + NEAP_DIRECT_ALIGN - 1) / NEAP_DIRECT_ALIGN * NEAP_DIRECT_ALIGN + pieces[i].skew;
        CHECK(at + pieces[i].len <= FILE_BYTES);
        parts[i] = (struct iovec){content + at, pieces[i].len};
        at += pieces[i].len;
        total += pieces[i].len;
    }
    CHECK(neap_file_write(file, parts, n, offset) == 0);
    memset(room, 0, total);
    CHECK(neap_file_read(file, room, total, offset) == 0);
    for (size_t i = 0, done = 0; i < n; done += parts[i].iov_len, i++)
        CHECK(memcmp(room + done, parts[i].iov_base, parts[i].iov_len) == 0);
}

static void test_write(neap_file *file) {
    writes(file, (piece[]){{0, 65536}, {0, 4096}}, 2, 0);
    writes(file, (piece[]){{0, 1}}, 1, 4096);
    writes(file, (piece[]){{5, 3000000}}, 1, 8192);
    writes(file, (piece[]){{0, 8192 + 17}, {17, 4096 * 3 - 17}, {0, 4096}}, 3, 4096 * 10);
    writes(file, (piece[]){{0, 100}, {100, 1500000}, {7, 12}, {0, 1 << 20}}, 4, 0);
    writes(file, (piece[]){{3, 1 << 20}, {0, 4096}, {9, 1 << 20}, {0, 0}, {0, 8192}}, 5, 0);
    piece many[200];
    for (size_t i = 0; i < 200; i++)
        many[i] = (piece){i % 3 == 0 ? 0 : i * 11, i % 2 == 0 ? 4096 : 4096 + (i % 5) * 100};
    writes(file, many, 200, 4096 * 7);
    /* An unaligned offset leaves its neighbours alone. */
    writes(file, (piece[]){{0, 5000}}, 1, 10);
}

static void test_swap(bool direct, bool tmpfile) {
    neap_file *file;
    char path[700];
    snprintf(path, sizeof path, "%s/a/b/swap", dir);
    if (!direct) neap_fault_arm("file.direct", 1, -EINVAL, 0);
    if (!tmpfile) neap_fault_arm("file.tmpfile", 1, -EOPNOTSUPP, 0);
    CHECK(neap_file_open_swap(path, &file) == 0);
    neap_fault_disarm();
    struct stat st;
    CHECK(stat(path, &st) == 0 && (st.st_mode & 0777) == 0700);
    CHECK(rmdir(path) == 0); /* the file has no name */
    test_write(file);

    neap_file_id id;
    const struct iovec part = {content, 1 << 20};
    CHECK(neap_file_truncate(file, 0) == 0);
    CHECK(neap_file_write(file, &part, 1, 0) == 0 && neap_file_sync(file) == 0);
    CHECK(neap_file_punch(file, 4096, 8192) == 0);
    CHECK(neap_file_read(file, room, 1 << 20, 0) == 0);
    CHECK(memcmp(room, content, 4096) == 0 && room[4096] == 0 && room[12287] == 0);
    CHECK(memcmp(room + 12288, content + 12288, (1 << 20) - 12288) == 0);
    CHECK(neap_file_truncate(file, 4096) == 0);
    CHECK(neap_file_identity(file, &id) == 0 && id.size_bytes == 4096);
    CHECK(neap_file_read(file, room, 8192, 0) == -EIO);
    neap_file_close(file);
}

static void test_make_dirs(void) {
    char path[700];
    snprintf(path, sizeof path, "%s/x//y/z/", dir);
    CHECK(neap_make_dirs(path, 0700) == 0 && neap_make_dirs(path, 0700) == 0);
    CHECK(neap_make_dirs("/", 0700) == 0 && neap_make_dirs("", 0700) == -ENOENT);
}

static void read_ranges(neap_reader *reader, neap_file *file, int expect) {
    /* Whole, congruent but unaligned, incongruent, empty, tiny. */
    const neap_read_range ranges[] = {
        {file, room, 2500 * 1024, 0},
        {file, room + 2500 * 1024 + 100, 9000, 4096 * 5 + 100},
        {file, room + 2600 * 1024 + 7, 300000, 1000},
        {file, room, 0, 0},
        {file, room + 2900 * 1024, 20 * 4096, 4096 * 600},
        {file, room + 3000 * 1024, 10, FILE_BYTES - 10},
    };
    const size_t n = sizeof ranges / sizeof *ranges;
    memset(room, 0, FILE_BYTES + 4096);
    CHECK(neap_reader_read(reader, ranges, n) == expect);
    for (size_t i = 0; i < n && expect == 0; i++)
        CHECK(memcmp(ranges[i].addr, content + ranges[i].offset, ranges[i].len) == 0);
}

static void test_reader(unsigned depth, bool ring, bool direct) {
    neap_reader *reader;
    neap_file *file;
    make_file(path_in("model"));
    if (!direct) neap_fault_arm("file.direct", 1, -EINVAL, 0);
    CHECK(neap_file_open_read(path_in("model"), &file) == 0);
    if (!ring) neap_fault_arm("ring.init", 1, -ENOSYS, 0);
    CHECK(neap_reader_create(depth, &reader) == 0);
    neap_fault_disarm();
    for (int round = 0; round < 3; round++)
        read_ranges(reader, file, 0);
    const size_t requests[] = {3 * 4096, 64 << 10, 4 << 20, 1 << 20};
    for (size_t i = 0; i < sizeof requests / sizeof *requests; i++) {
        neap_reader_set_request(reader, requests[i]);
        read_ranges(reader, file, 0);
    }
    CHECK(neap_file_is_direct(file) == direct);
    CHECK(neap_reader_read(reader, NULL, 0) == 0);

    neap_read_range beyond = {file, room, 1 << 20, 4096 * 600};
    CHECK(neap_reader_read(reader, &beyond, 1) == -EIO);
    beyond.offset = 1ull << 40;
    CHECK(neap_reader_read(reader, &beyond, 1) == -EIO);
    read_ranges(reader, file, 0); /* works on after an error */

    /* The n-th call fails: the error comes out, and the reader works on. */
    uint32_t fired = 1;
    for (uint32_t n = 1; fired; n++) {
        neap_fault_arm(ring && direct ? "ring.read" : "file.read", n, -ENXIO, 0);
        neap_read_range both[2] = {{file, room, 1 << 20, 0}, {file, room, 1 << 20, 1 << 20}};
        const int err = neap_reader_read(reader, both, 2);
        fired = neap_fault_fired();
        neap_fault_disarm();
        CHECK(err == (fired ? -ENXIO : 0));
        CHECK(n > 1 || fired); /* the point is there */
        read_ranges(reader, file, 0);
    }
    neap_reader_free(reader);
    neap_file_close(file);
}

static void silent(int level, const char *line, void *ctx) {
    (void)level;
    (void)line;
    (void)ctx;
}

/* The ring dies in the middle of a read: what it had in flight is waited for, the rest is read
 * plainly. */
static void test_ring_breaks(void) {
    neap_file *file;
    CHECK(neap_file_open_read(path_in("model"), &file) == 0);
    for (uint32_t n = 1; n < 4; n++) {
        neap_reader *reader;
        CHECK(neap_reader_create(2, &reader) == 0);
        neap_fault_arm("ring.submit", n, -EIO, 0);
        read_ranges(reader, file, 0);
        neap_fault_disarm();
        read_ranges(reader, file, 0);
        neap_reader_free(reader);
    }
    neap_file_close(file);
}

int main(void) {
    neap_set_log(silent, NULL);
    dir = temp_dir();
    content = aligned_alloc(NEAP_DIRECT_ALIGN, (FILE_BYTES / 4096 + 2) * 4096);
    room = aligned_alloc(NEAP_DIRECT_ALIGN, (FILE_BYTES / 4096 + 5) * 4096);
    CHECK(content && room);
    fill_random(content, FILE_BYTES, 1);
    test_read_file(true);
    test_read_file(false);
    test_direct_refused();
    test_open_errors();
    test_identity();
    test_swap(true, true);
    test_swap(false, true);
    test_swap(true, false);
    test_make_dirs();
    test_reader(1, true, true);
    test_reader(8, true, true);
    test_reader(8, true, false);
    test_reader(8, false, true);
    test_ring_breaks();
    temp_remove(dir);
    free(content);
    free(room);
    return 0;
}
