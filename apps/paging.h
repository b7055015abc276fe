/* paging.h - the operating system's own way to take memory from an idle program, for measuring it:
 * a memory group whose pages the kernel reclaims, and zRAM to swap to. Needs root. Lifetime  a
 * helper process makes both and removes them when the paging is freed or this process has ended,
 * however it ended; what still runs in the group is then killed. Errors    0 or -errno. */
#ifndef NEAP_APPS_PAGING_H
#define NEAP_APPS_PAGING_H

#include <stdint.h>

#include "memory_group.h"

typedef struct neap_paging neap_paging;

typedef struct neap_paging_usage {
    uint64_t file_bytes, anon_bytes; /* resident, as the kernel accounts the group */
    uint64_t zram_bytes;             /* memory that pages swapped out take */
} neap_paging_usage;

/* swap_bytes: of pages that can be swapped out. Fails with *ret_what, what could not be had. */
int neap_paging_create(uint64_t swap_bytes, neap_paging **ret_paging, const char **ret_what);
/* Takes NULL. -errno: the device or the group is still there. */
int neap_paging_free(neap_paging *paging);
/* The group that a program is started in. */
const neap_memory_group *neap_paging_group(const neap_paging *paging);
/* Has the kernel reclaim until no more goes. */
int neap_paging_evict(neap_paging *paging);
int neap_paging_read(const neap_paging *paging, neap_paging_usage *ret_usage);
#endif
