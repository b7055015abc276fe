/* textfile.h - small files that are read and replaced whole.
 * Errors    0 or -errno. */
#ifndef NEAP_OS_TEXTFILE_H
#define NEAP_OS_TEXTFILE_H

#include <stddef.h>

/* malloc'd, a NUL after its len bytes. Fails: -EFBIG (longer than max); -EINVAL (not a regular
 * file). */
int neap_textfile_read(const char *path, size_t max, char **ret_text, size_t *ret_len);
/* Whoever reads the path meanwhile gets the old text or the new one; on failure the old one stays.
 * Folders that are missing are made (mode 0700); the file has mode 0600. Not durable: after a
 * power cut it may be empty. */
int neap_textfile_replace(const char *path, const char *text, size_t len);
#endif
