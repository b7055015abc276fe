/* zram.h - a swap device of our own that compresses into memory (zRAM), for a benchmark. All
 * processes of the machine may swap to it while it is there. Needs root.
 * Units     bytes.
 * Errors    0 or -errno. */
#ifndef NEAP_APPS_ZRAM_H
#define NEAP_APPS_ZRAM_H

#include <stdint.h>

typedef struct neap_zram {
    int number; /* of /dev/zramN; -1: none is open */
} neap_zram;

typedef struct neap_zram_usage {
    uint64_t stored_bytes, memory_bytes; /* of pages swapped out; what they take now */
} neap_zram_usage;

/* Adds a device for so many bytes of pages, and swaps to it before all others.
 * algorithm: "zstd", "lz4", ... where the kernel has it, else the kernel's default is kept.
 * Fails: -ENOENT (no zram in this kernel), -EACCES, -EPERM (not root). */
int neap_zram_open(uint64_t size_bytes, const char *algorithm, neap_zram *ret_zram);
int neap_zram_read(const neap_zram *zram, neap_zram_usage *ret_usage);
/* Swaps in what is left and removes the device. Takes one that is not open. */
int neap_zram_close(neap_zram *zram);
#endif
