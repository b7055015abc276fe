/* proc.h - what the kernel says of processes and of memory. Errors: 0 or -errno. */
#ifndef NEAP_OS_PROC_H
#define NEAP_OS_PROC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct neap_proc_memory {
    uint64_t anon_bytes, file_bytes, shmem_bytes,
        swap_bytes; /* Pss_Anon, Pss_File, Pss_Shmem, SwapPss */
} neap_proc_memory;

int neap_proc_memory_read(int pid, neap_proc_memory *ret_memory); /* smaps_rollup; pid 0: self */
int neap_mem_available(uint64_t *ret_available, uint64_t *ret_total);
/* Path of this process's i-th open descriptor that is a regular file (i counts all descriptors: an
 * index of another kind gives an empty path). -ENOENT: past the last. */
int neap_proc_open_path(int i, char *ret_path, size_t cap);
int neap_proc_self(void);  /* own process id */
uint32_t neap_cores(void); /* that this process may run on; at least 1 */
bool neap_proc_alive(int pid);
/* Directory of control sockets: ${XDG_RUNTIME_DIR:-/run/user/UID, else /tmp/neap-UID}/neap, made
 * with mode 0700; refuses one of another owner (-EPERM). */
int neap_runtime_dir(char *ret_path, size_t cap);
/* ${XDG_CACHE_HOME:-~/.cache}/neap, not made. */
int neap_cache_dir(char *ret_path, size_t cap);
int neap_make_dirs(const char *path, unsigned mode);
#endif
