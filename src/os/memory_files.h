/* memory_files.h - what the kernel says of memory: meminfo, PSI, and the memory group (cgroup v1 or
 * v2) of this process with the groups above it.
 * Opened once and read again and again: reading allocates nothing, here or (once read) in the
 * kernel. Errors    0 or -errno; what a machine does not have is no error, its values are 0.
 * Threads   one at a time. */
#ifndef NEAP_OS_MEMORY_FILES_H
#define NEAP_OS_MEMORY_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Groups looked at: that of the process, and those above it that have a limit. */
#define NEAP_GROUP_LEVELS 4

typedef struct neap_memory_files neap_memory_files;

typedef struct neap_memory_stall { /* avg10 of PSI: permille of the last 10 s */
    uint32_t some_permille, full_permille;
} neap_memory_stall;

typedef struct neap_memory_level {
    uint64_t limit_bytes; /* 0: none; v2: the lower of memory.high and memory.max */
    uint64_t usage_bytes;
    uint64_t available_bytes; /* below the limit, with the file pages that reclaim can take */
} neap_memory_level;

typedef struct neap_memory_reading {
    uint64_t total_bytes, available_bytes; /* of the machine; 0, 0: not known */
    neap_memory_stall machine_stall, group_stall;
    size_t n_levels;
    neap_memory_level levels[NEAP_GROUP_LEVELS];
} neap_memory_reading;

/* root is put before every path: "" for the machine, a folder of fixtures in tests. */
int neap_memory_files_open(const char *root, neap_memory_files **ret_files);
void neap_memory_files_close(neap_memory_files *files); /* takes NULL */
int neap_memory_files_read(neap_memory_files *files, neap_memory_reading *ret_reading);
/* When the process was moved into another group: finds that one; true if so. */
bool neap_memory_files_follow(neap_memory_files *files);

/* 0: no memory group; 1, 2: version of cgroup. */
int neap_memory_files_version(const neap_memory_files *files);
bool neap_memory_files_is_live(const neap_memory_files *files); /* root was "" */
/* Folders and files for those who want events; "" where there is none. The folder of a level, and
 * of the hierarchy's root as mounted. */
const char *neap_memory_files_level_dir(const neap_memory_files *files, size_t level);
size_t neap_memory_files_n_levels(const neap_memory_files *files);
const char *neap_memory_files_root_dir(const neap_memory_files *files);
const char *neap_memory_files_stall_path(const neap_memory_files *files);
const char *neap_memory_files_group_stall_path(const neap_memory_files *files);
#endif
