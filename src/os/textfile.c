/* textfile.c - see textfile.h. */
#include "textfile.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fault.h"
#include "proc.h"

/* Until the file ends or len bytes are there. */
static int read_some(int fd, char *text, size_t len, size_t *ret_got) {
    int err = NEAP_FAULT("text.read");
    if (err) return err;
    size_t got = 0;
    while (got < len) {
        const ssize_t n = read(fd, text + got, len - got);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return -errno;
        if (n == 0) break;
        got += (size_t)n;
    }
    *ret_got = got;
    return 0;
}

int neap_textfile_read(const char *path, size_t max, char **ret_text, size_t *ret_len) {
    int err = NEAP_FAULT("text.open");
    if (err) return err;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not block us */
    if (fd < 0) return -errno;
    struct stat st;
    char *text = NULL;
    size_t got = 0;
    if (fstat(fd, &st) != 0)
        err = -errno;
    else if (!S_ISREG(st.st_mode))
        err = S_ISDIR(st.st_mode) ? -EISDIR : -EINVAL;
    if (!err && !(text = malloc(max + 2))) err = -ENOMEM;
    if (!err) err = read_some(fd, text, max + 1, &got);
    if (!err && got > max) err = -EFBIG;
    close(fd);
    if (err) {
        free(text);
        return err;
    }
    text[got] = '\0';
    *ret_text = text;
    *ret_len = got;
    return 0;
}

static int write_all(int fd, const char *text, size_t len) {
    int err = NEAP_FAULT("text.write");
    if (err) return err;
    while (len > 0) {
        const ssize_t n = write(fd, text, len);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return -errno;
        if (n == 0) return -EIO;
        text += n;
        len -= (size_t)n;
    }
    return 0;
}

static int make_parent(const char *path) {
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    if (!slash || slash == path) return 0;
    const size_t len = (size_t)(slash - path);
    if (len >= sizeof folder) return -ENAMETOOLONG;
    memcpy(folder, path, len);
    folder[len] = '\0';
    return neap_make_dirs(folder, 0700);
}

int neap_textfile_replace(const char *path, const char *text, size_t len) {
    char fresh[PATH_MAX];
    const int n = snprintf(fresh, sizeof fresh, "%s.XXXXXX", path);
    if (n < 0 || (size_t)n >= sizeof fresh) return -ENAMETOOLONG;
    int err = make_parent(path);
    if (!err) err = NEAP_FAULT("text.create");
    if (err) return err;
    const int fd = mkostemp(fresh, O_CLOEXEC); /* mode 0600 */
    if (fd < 0) return -errno;
    err = write_all(fd, text, len);
    if (close(fd) != 0 && !err) err = -errno;
    if (!err) err = NEAP_FAULT("text.rename");
    if (!err && rename(fresh, path) != 0) err = -errno;
    if (err) unlink(fresh);
    return err;
}
