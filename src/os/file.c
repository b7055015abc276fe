/* file.c - see file.h. Weights and swapped chunks are read and written around the page cache: a
 * copy there would cost the memory that eviction is to give back. Where a transfer is not aligned
 * it goes through a small aligned buffer of our own, and only where the file system knows no direct
 * I/O through the page cache, which is then told to forget the range. Threads: a file's descriptors
 * never change while it is open. */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "bytes.h"
#include "fault.h"
#include "file_int.h"
#include "proc.h"

#define WRITE_BATCH 64 /* pieces of one pwritev */

static bool is_aligned(uint64_t value) {
    return value % NEAP_DIRECT_ALIGN == 0;
}

/* Takes over fd; opens the same file once more for direct I/O. */
static int file_adopt(int fd, int flags, neap_file **ret_file) {
    neap_file *file = malloc(sizeof *file);
    if (!file) {
        close(fd);
        return -ENOMEM;
    }
    char self[64];
    snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
    file->buffered_fd = fd;
    file->direct_fd = NEAP_FAULT("file.direct") ? -1 : open(self, flags | O_DIRECT | O_CLOEXEC);
    atomic_init(&file->use_direct, file->direct_fd >= 0);
    *ret_file = file;
    return 0;
}

int neap_file_open_read(const char *path, neap_file **ret_file) {
    int err = NEAP_FAULT("file.open");
    if (err) return err;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not block us */
    if (fd < 0) return -errno;
    struct stat st;
    if (fstat(fd, &st) != 0)
        err = -errno;
    else if (!S_ISREG(st.st_mode))
        err = S_ISDIR(st.st_mode) ? -EISDIR : -EINVAL;
    if (err) {
        close(fd);
        return err;
    }
    return file_adopt(fd, O_RDONLY, ret_file);
}

/* File systems without O_TMPFILE: a named file whose name lives for an instant. */
static int swap_open_named(const char *dir) {
    char path[PATH_MAX];
    const int len = snprintf(path, sizeof path, "%s/swap-XXXXXX", dir);
    if (len < 0 || (size_t)len >= sizeof path) return -ENAMETOOLONG;
    const int fd = mkostemp(path, O_CLOEXEC); /* mode 0600 */
    if (fd < 0) return -errno;
    if (unlink(path) != 0) {
        const int err = -errno;
        close(fd);
        return err;
    }
    return fd;
}

int neap_file_open_swap(const char *dir, neap_file **ret_file) {
    int err = NEAP_FAULT("file.open");
    if (!err) err = neap_make_dirs(dir, 0700);
    if (err) return err;
    int fd =
        NEAP_FAULT("file.tmpfile") ? -1 : open(dir, O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    /* Old kernels and file systems without it say EISDIR, ENOENT, EINVAL or EOPNOTSUPP; a real
     * obstacle (EROFS, ENOSPC, EACCES, ...) shows again. */
    if (fd < 0) fd = swap_open_named(dir);
    if (fd < 0) return fd;
    return file_adopt(fd, O_RDWR, ret_file);
}

int neap_folder_space(const char *dir, uint64_t *ret_available, uint64_t *ret_total) {
    struct statvfs space;
    int err = NEAP_FAULT("file.space");
    if (err) return err;
    if (statvfs(dir, &space) != 0) return -errno;
    *ret_available = (uint64_t)space.f_bavail * space.f_frsize;
    *ret_total = (uint64_t)space.f_blocks * space.f_frsize;
    return 0;
}

void neap_file_close(neap_file *file) {
    if (!file) return;
    if (file->direct_fd >= 0) close(file->direct_fd);
    close(file->buffered_fd);
    free(file);
}

bool neap_file_is_direct(const neap_file *file) {
    return atomic_load_explicit(&file->use_direct, memory_order_relaxed);
}

static neap_file_id id_of(const struct stat *st) {
    return (neap_file_id){
        .device = st->st_dev,
        .inode = st->st_ino,
        .size_bytes = (uint64_t)st->st_size,
        .mtime_ns = (uint64_t)st->st_mtim.tv_sec * 1000000000u + (uint64_t)st->st_mtim.tv_nsec,
    };
}

int neap_file_identity(const neap_file *file, neap_file_id *ret_id) {
    struct stat st;
    int err = NEAP_FAULT("file.stat");
    if (err) return err;
    if (fstat(file->buffered_fd, &st) != 0) return -errno;
    *ret_id = id_of(&st);
    return 0;
}

int neap_path_identity(const char *path, neap_file_id *ret_id) {
    struct stat st;
    int err = NEAP_FAULT("file.stat");
    if (err) return err;
    if (stat(path, &st) != 0) return -errno;
    *ret_id = id_of(&st);
    return 0;
}

bool neap_file_id_equal(const neap_file_id *a, const neap_file_id *b) {
    return a->device == b->device && a->inode == b->inode && a->size_bytes == b->size_bytes &&
           a->mtime_ns == b->mtime_ns;
}

/* Reads until len bytes are there or the file ends. */
static int pread_some(int fd, void *addr, size_t len, uint64_t offset, size_t *ret_got) {
    int err = NEAP_FAULT("file.read");
    if (err) return err;
    size_t got = 0;
    while (got < len) {
        const ssize_t n = pread(fd, (char *)addr + got, len - got, (off_t)(offset + got));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return -errno;
        if (n == 0) break;
        got += (size_t)n;
    }
    *ret_got = got;
    return 0;
}

static int read_buffered(neap_file *file, void *addr, size_t len, uint64_t offset) {
    size_t got = 0;
    int err = pread_some(file->buffered_fd, addr, len, offset, &got);
    posix_fadvise(file->buffered_fd, (off_t)NEAP_ROUND_DOWN(offset, NEAP_DIRECT_ALIGN),
                  (off_t)NEAP_ROUND_UP(len + offset % NEAP_DIRECT_ALIGN, NEAP_DIRECT_ALIGN),
                  POSIX_FADV_DONTNEED);
    return err ? err : got < len ? -EIO : 0;
}

/* Everything aligned. A direct read that stops between blocks has met the end of the file, and the
 * next one at that offset would be refused: no second try. */
static int read_direct(neap_file *file, void *addr, size_t len, uint64_t offset, size_t *ret_got) {
    int err = NEAP_FAULT("file.read");
    if (err) return err;
    size_t got = 0;
    while (got < len && is_aligned(got)) {
        const ssize_t n =
            pread(file->direct_fd, (char *)addr + got, len - got, (off_t)(offset + got));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return -errno;
        if (n == 0) break;
        got += (size_t)n;
    }
    *ret_got = got;
    return 0;
}

/* Reads the blocks that cover the range into an aligned buffer and copies what was asked for. */
static int read_bounced(neap_file *file, void *addr, size_t len, uint64_t offset) {
    const size_t skew = offset % NEAP_DIRECT_ALIGN;
    const size_t cover = NEAP_ROUND_UP(skew + len, (size_t)NEAP_DIRECT_ALIGN);
    const size_t cap = cover < NEAP_IO_BLOCK ? cover : NEAP_IO_BLOCK;
    char *bounce = aligned_alloc(NEAP_DIRECT_ALIGN, cap);
    if (!bounce) return -ENOMEM;

    int err = 0;
    for (size_t done = 0; done < len && !err;) {
        const size_t in = (offset + done) % NEAP_DIRECT_ALIGN;
        const size_t want = len - done < cap - in ? len - done : cap - in;
        size_t got = 0;
        err = read_direct(file, bounce, NEAP_ROUND_UP(in + want, (size_t)NEAP_DIRECT_ALIGN),
                          offset + done - in, &got);
        if (!err && got < in + want) err = -EIO;
        if (!err) memcpy((char *)addr + done, bounce + in, want);
        done += want;
    }
    free(bounce);
    return err;
}

static int read_around(neap_file *file, char *addr, size_t len, uint64_t offset) {
    if (((uintptr_t)addr - offset) % NEAP_DIRECT_ALIGN != 0)
        return read_bounced(file, addr, len, offset);

    size_t head = (size_t)(NEAP_ROUND_UP(offset, NEAP_DIRECT_ALIGN) - offset);
    if (head > len) head = len;
    const size_t middle = NEAP_ROUND_DOWN(len - head, (size_t)NEAP_DIRECT_ALIGN);
    const size_t tail = len - head - middle;
    size_t got = 0;
    int err = middle ? read_direct(file, addr + head, middle, offset + head, &got) : 0;
    if (!err && got < middle) err = -EIO;
    if (!err && head) err = read_bounced(file, addr, head, offset);
    if (!err && tail) err = read_bounced(file, addr + head + middle, tail, offset + head + middle);
    return err;
}

int neap_file_read(neap_file *file, void *addr, size_t len, uint64_t offset) {
    if (len == 0) return 0;
    if (atomic_load_explicit(&file->use_direct, memory_order_relaxed)) {
        const int err = read_around(file, addr, len, offset);
        if (err != -EINVAL) return err;
        /* Opened for direct I/O but refused it: some network and stacked file systems. */
        atomic_store_explicit(&file->use_direct, false, memory_order_relaxed);
    }
    return read_buffered(file, addr, len, offset);
}

/* Writes all of iov; consumes it. */
static int pwritev_all(int fd, struct iovec *iov, size_t n, uint64_t offset) {
    int err = NEAP_FAULT("file.write");
    if (err) return err;
    while (n > 0) {
        const ssize_t done = pwritev(fd, iov, (int)n, (off_t)offset);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return -errno;
        if (done == 0) return -EIO;
        offset += (uint64_t)done;
        size_t left = (size_t)done;
        for (; n > 0 && left >= iov->iov_len; iov++, n--)
            left -= iov->iov_len;
        if (n > 0) {
            iov->iov_base = (char *)iov->iov_base + left;
            iov->iov_len -= left;
        }
    }
    return 0;
}

static int write_buffered(neap_file *file, const struct iovec *parts, size_t n, uint64_t offset) {
    struct iovec batch[WRITE_BATCH];
    for (size_t at = 0; at < n;) {
        size_t count = n - at < WRITE_BATCH ? n - at : WRITE_BATCH, bytes = 0;
        memcpy(batch, parts + at, count * sizeof *batch);
        for (size_t i = 0; i < count; i++)
            bytes += batch[i].iov_len;
        const int err = pwritev_all(file->buffered_fd, batch, count, offset);
        if (err) return err;
        at += count;
        offset += bytes;
    }
    return 0;
}

/* Collects a payload into pieces that direct I/O takes: whole blocks of the caller's memory where
 * they lie on block boundaries of both memory and file, copies in the bounce buffer elsewhere.
 * The payload position of every piece, and of bounced bytes once complete, is on a block boundary.
 */
typedef struct gather {
    neap_file *file;
    uint64_t offset; /* of the first piece not yet written */
    size_t n;
    struct iovec pieces[WRITE_BATCH];
    char *bounce;
    size_t bounced;     /* bytes of bounce in use */
    size_t piece_begin; /* first byte of bounce not yet in a piece */
} gather;

static int gather_flush(gather *g) {
    size_t bytes = 0;
    for (size_t i = 0; i < g->n; i++)
        bytes += g->pieces[i].iov_len;
    int err = g->n ? pwritev_all(g->file->direct_fd, g->pieces, g->n, g->offset) : 0;
    g->offset += bytes;
    g->n = 0;
    g->bounced = g->piece_begin = 0;
    return err;
}

static void gather_piece(gather *g, const void *addr, size_t len) {
    g->pieces[g->n++] = (struct iovec){.iov_base = (void *)(uintptr_t)addr, .iov_len = len};
}

/* Makes a piece of what was bounced so far, whole blocks by now. */
static void gather_close_bounce(gather *g) {
    if (g->bounced > g->piece_begin)
        gather_piece(g, g->bounce + g->piece_begin, g->bounced - g->piece_begin);
    g->piece_begin = g->bounced;
}

static int gather_bounce(gather *g, const char *addr, size_t len) {
    if (!g->bounce) {
        g->bounce = aligned_alloc(NEAP_DIRECT_ALIGN, NEAP_IO_BLOCK);
        if (!g->bounce) return -ENOMEM;
    }
    memcpy(g->bounce + g->bounced, addr, len);
    g->bounced += len;
    if (g->bounced < NEAP_IO_BLOCK) return 0;
    gather_close_bounce(g);
    return gather_flush(g);
}

static int gather_part(gather *g, const char *addr, size_t len) {
    int err = 0;
    while (len > 0 && !err) {
        const size_t skew = g->bounced % NEAP_DIRECT_ALIGN;
        size_t take;
        if (skew == 0 && is_aligned((uintptr_t)addr) && len >= NEAP_DIRECT_ALIGN) {
            gather_close_bounce(g);
            take = NEAP_ROUND_DOWN(len, (size_t)NEAP_DIRECT_ALIGN);
            gather_piece(g, addr, take);
            /* Room for a piece of the bounce buffer and one more of the caller's is always kept. */
            if (g->n > WRITE_BATCH - 2) err = gather_flush(g);
        } else {
            const size_t room = NEAP_IO_BLOCK - g->bounced;
            take = len < room ? len : room;
            /* Stop at the block boundary if the rest can then go in place. */
            const size_t to_block = (NEAP_DIRECT_ALIGN - skew) % NEAP_DIRECT_ALIGN;
            if (to_block < take && is_aligned((uintptr_t)addr + to_block) && to_block > 0)
                take = to_block;
            err = gather_bounce(g, addr, take);
        }
        addr += take;
        len -= take;
    }
    return err;
}

static int write_around(neap_file *file, const struct iovec *parts, size_t n, uint64_t offset) {
    gather g = {.file = file, .offset = offset};
    int err = 0;
    for (size_t i = 0; i < n && !err; i++)
        err = gather_part(&g, parts[i].iov_base, parts[i].iov_len);
    if (!err) {
        const size_t tail = g.bounced % NEAP_DIRECT_ALIGN;
        if (tail) {
            memset(g.bounce + g.bounced, 0, NEAP_DIRECT_ALIGN - tail);
            g.bounced += NEAP_DIRECT_ALIGN - tail;
        }
        gather_close_bounce(&g);
        err = gather_flush(&g);
    }
    free(g.bounce);
    return err;
}

int neap_file_write(neap_file *file, const struct iovec *parts, size_t n, uint64_t offset) {
    if (is_aligned(offset) && atomic_load_explicit(&file->use_direct, memory_order_relaxed)) {
        const int err = write_around(file, parts, n, offset);
        if (err != -EINVAL) return err;
        atomic_store_explicit(&file->use_direct, false, memory_order_relaxed);
    }
    return write_buffered(file, parts, n, offset);
}

int neap_file_sync(neap_file *file) {
    int err = NEAP_FAULT("file.sync");
    if (err) return err;
    return fdatasync(file->buffered_fd) == 0 ? 0 : -errno;
}

int neap_file_punch(neap_file *file, uint64_t offset, uint64_t len) {
    int err = NEAP_FAULT("file.punch");
    if (err) return err;
    int rc;
    do
        rc = fallocate(file->buffered_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset,
                       (off_t)len);
    while (rc != 0 && errno == EINTR);
    return rc == 0 ? 0 : -errno;
}

int neap_file_truncate(neap_file *file, uint64_t len) {
    int err = NEAP_FAULT("file.truncate");
    if (err) return err;
    int rc;
    do
        rc = ftruncate(file->buffered_fd, (off_t)len);
    while (rc != 0 && errno == EINTR);
    return rc == 0 ? 0 : -errno;
}
