/* file.h - files: direct reads in place, an anonymous swap file, identity of a file.
 * Errors    0 or -errno; short transfers are -EIO. */
#ifndef NEAP_OS_FILE_H
#define NEAP_OS_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* Alignment that direct I/O asks of offset, address and length. */
#define NEAP_DIRECT_ALIGN 4096u

typedef struct neap_file neap_file;

typedef struct neap_file_id {
    uint64_t device, inode, size_bytes, mtime_ns; /* no ctime: renaming a file changes it */
} neap_file_id;

int neap_file_open_read(const char *path, neap_file **ret_file);
/* An unnamed file in dir (made with mode 0700 if missing) of mode 0600; gone when the process ends.
 */
int neap_file_open_swap(const char *dir, neap_file **ret_file);
/* Of the file system that the folder is on: bytes that an ordinary user may still write, and all.
 */
int neap_folder_space(const char *dir, uint64_t *ret_available, uint64_t *ret_total);
void neap_file_close(neap_file *file);           /* takes NULL */
bool neap_file_is_direct(const neap_file *file); /* reads go around the page cache */
int neap_file_identity(const neap_file *file, neap_file_id *ret_id);
/* Identity of what the path names now. */
int neap_path_identity(const char *path, neap_file_id *ret_id);
bool neap_file_id_equal(const neap_file_id *a, const neap_file_id *b);

/* Reads len bytes at offset into addr. Where offset, addr and len are multiples of
 * NEAP_DIRECT_ALIGN the transfer is direct; otherwise the aligned middle is direct where addr and
 * offset are congruent, and the rest goes through a small aligned buffer. On file systems without
 * direct I/O everything goes through the page cache, which then forgets it. Threads: any number. */
int neap_file_read(neap_file *file, void *addr, size_t len, uint64_t offset);
/* Writes all parts, one after the other, at offset. Direct where offset is aligned (unaligned parts
 * through an aligned buffer): the last block is then filled up with zeros. */
int neap_file_write(neap_file *file, const struct iovec *parts, size_t n, uint64_t offset);
int neap_file_sync(neap_file *file);
/* Gives the blocks of the range back to the file system. */
int neap_file_punch(neap_file *file, uint64_t offset, uint64_t len);
int neap_file_truncate(neap_file *file, uint64_t len);

/* Reads several ranges with many requests in flight (io_uring; one pread after the other where the
 * kernel refuses the ring). The reader is owned by one thread. */
typedef struct neap_reader neap_reader;
typedef struct neap_read_range {
    neap_file *file;
    void *addr;
    size_t len;
    uint64_t offset;
} neap_read_range;
int neap_reader_create(unsigned depth, neap_reader **ret_reader);
void neap_reader_free(neap_reader *reader);
/* Cuts ranges into requests of so many bytes, a multiple of NEAP_DIRECT_ALIGN (default 1 MiB). */
void neap_reader_set_request(neap_reader *reader, size_t bytes);
int neap_reader_read(neap_reader *reader, const neap_read_range *ranges, size_t n);
#endif
