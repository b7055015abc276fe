/* memory_group.h - a memory group (cgroup v2 or v1, as the machine has it) for a benchmark: made
 * with a limit, filled with processes, read, and removed. Needs root.
 * Units     bytes.
 * Errors    0 or -errno. */
#ifndef NEAP_APPS_MEMORY_GROUP_H
#define NEAP_APPS_MEMORY_GROUP_H

#include <stdbool.h>
#include <stdint.h>

typedef struct neap_memory_group {
    int version;   /* of cgroup; 0: none is open */
    char dir[128]; /* its folder */
} neap_memory_group;

typedef struct neap_memory_group_reading {
    uint64_t usage_bytes, file_bytes; /* all; of it, pages of files */
    uint64_t swap_bytes;              /* uncompressed; 0 where has_swap is false */
    bool has_swap;                    /* the kernel accounts swap (v1: memory.memsw) */
    uint64_t major_faults, oom_kills; /* since it was made */
} neap_memory_group_reading;

/* Makes the group neap-NAME-PID, without a limit, below the top of the hierarchy.
 * Fails: -EACCES, -EPERM (not root), -ENOTSUP (no memory controller). */
int neap_memory_group_open(const char *name, neap_memory_group *ret_group);
/* At most so much memory in it from now on, and so much swapped out where the kernel accounts swap.
 * A lower limit than usage has the kernel reclaim at once: -EBUSY when it cannot (v1). */
int neap_memory_group_limit(const neap_memory_group *group, uint64_t bytes, uint64_t swap_bytes);
/* Moves a process (0: the caller) into the group; what it holds already stays charged elsewhere. */
int neap_memory_group_add(const neap_memory_group *group, int pid);
int neap_memory_group_read(const neap_memory_group *group, neap_memory_group_reading *ret_reading);
/* Removes the group, whose processes must have been ended: waits up to 5 s for them. Takes one that
 * is not open. */
int neap_memory_group_close(neap_memory_group *group);
#endif
