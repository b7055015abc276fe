/* capture_file.c - see capture_file.h. The backend opens the file by this process's descriptor. */
#include "capture_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli.h"

int neap_capture_begin(const char *folder, int *ret_fd) {
    char path[NEAP_PATH_MAX];
    if (snprintf(path, sizeof path, "%s/capture-%d", folder, (int)getpid()) >= (int)sizeof path)
        return -ENAMETOOLONG;
    const int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) return -errno;
    unlink(path);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)getpid(), fd);
    if (setenv("NEAP_CAPTURE", path, 1) != 0) {
        close(fd);
        return -ENOMEM;
    }
    *ret_fd = fd;
    return 0;
}

int neap_capture_take(int fd, uint8_t **ret_bytes, size_t *ret_len) {
    struct stat info;
    int err = fstat(fd, &info) == 0 ? 0 : -errno;
    const size_t size = err ? 0 : (size_t)info.st_size;
    uint8_t *bytes = malloc(size + 1);
    if (!err && !bytes) err = -ENOMEM;
    for (size_t at = 0; at < size && !err;) {
        const ssize_t n = pread(fd, bytes + at, size - at, (off_t)at);
        err = n > 0 ? 0 : n == 0 ? -EIO : -errno;
        at += err ? 0 : (size_t)n;
    }
    if (!err && ftruncate(fd, 0) != 0) err = -errno;
    if (err) {
        free(bytes);
        return err;
    }
    *ret_bytes = bytes;
    *ret_len = size;
    return 0;
}

void neap_capture_end(int fd) {
    unsetenv("NEAP_CAPTURE");
    close(fd);
}
