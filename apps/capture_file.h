/* capture_file.h - the file in which the backend writes down what a model caches (fmt/capture.h).
 * It has no name: it goes with this process and the server, however they end.
 * Errors    0 or -errno. */
#ifndef NEAP_APPS_CAPTURE_FILE_H
#define NEAP_APPS_CAPTURE_FILE_H

#include <stddef.h>
#include <stdint.h>

/* Makes it in the folder; servers started from now on write to it. */
int neap_capture_begin(const char *folder, int *ret_fd);
/* What has been written since the last call, malloc'd, and the file empty again. */
int neap_capture_take(int fd, uint8_t **ret_bytes, size_t *ret_len);
void neap_capture_end(int fd);
#endif
