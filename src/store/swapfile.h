/* swapfile.h - the storage swap: records in an unnamed file of the swap folder that dies with the
 * process. Payloads start at multiples of NEAP_DIRECT_ALIGN, so that aligned payloads are read and
 * written in place; each record keeps an XXH3 checksum in memory, verified by every get.
 * Errors    put: NEAP_E_BUDGET (limit; nothing written), -ENOSPC, -EDQUOT, -EROFS, -EIO: nothing
 *           is stored, earlier records stay good and later puts may succeed.
 *           get: NEAP_E_CORRUPT (checksum), -EIO.
 * Threads   any; file I/O runs outside the internal lock. */
#ifndef NEAP_STORE_SWAPFILE_H
#define NEAP_STORE_SWAPFILE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "file.h"

typedef struct neap_swapfile neap_swapfile;
typedef struct neap_swap_record neap_swap_record;

/* dir is created on the first put; limit 0: none. */
int neap_swapfile_create(const char *dir, uint64_t limit_bytes, neap_swapfile **ret_swapfile);
void neap_swapfile_free(neap_swapfile *swapfile); /* all records with it; takes NULL */
int neap_swapfile_put(neap_swapfile *swapfile, const struct iovec *parts, size_t n,
                      neap_swap_record **ret_record);
size_t neap_swap_record_len(const neap_swap_record *record);
/* Reads the whole record into the parts (total length = record length) and verifies it. reader may
 * be NULL; with one, the reads of aligned parts are in flight together. */
int neap_swapfile_get(neap_swapfile *swapfile, const neap_swap_record *record,
                      const struct iovec *parts, size_t n, neap_reader *reader);
/* Frees the record; its blocks go back to the file system. */
void neap_swapfile_drop(neap_swapfile *swapfile, neap_swap_record *record);
void neap_swapfile_usage(neap_swapfile *swapfile, uint64_t *ret_live, uint64_t *ret_limit);
uint64_t neap_swapfile_written(neap_swapfile *swapfile); /* by all puts that went well */
void neap_swapfile_check(neap_swapfile *swapfile);       /* invariants; aborts */
#endif
