/* file_int.h - what file.c and ring.c share. */
#ifndef NEAP_OS_FILE_INT_H
#define NEAP_OS_FILE_INT_H

#include <stdatomic.h>

#include "file.h"

/* A file is open twice: through the page cache, and around it where the file system can. */
struct neap_file {
    int buffered_fd;
    int direct_fd;          /* -1: none */
    atomic_bool use_direct; /* cleared for good when the file system refuses a direct transfer */
};

/* The largest single request, and the size of a bounce buffer. */
#define NEAP_IO_BLOCK ((size_t)1 << 20)
#endif
