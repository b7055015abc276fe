/* bytes.h - checked arithmetic, rounding, checksums, how files begin. */
#ifndef NEAP_BASE_BYTES_H
#define NEAP_BASE_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NEAP_ROUND_UP(x, a) (((x) + ((a)-1)) / (a) * (a))
#define NEAP_ROUND_DOWN(x, a) ((x) / (a) * (a))

/* XXH3, 64 bit. */
uint64_t neap_checksum(const void *bytes, size_t len);
/* The same over the concatenation of parts fed one by one. */
typedef struct neap_sum neap_sum;
neap_sum *neap_sum_create(void); /* NULL: no memory */
void neap_sum_reset(neap_sum *sum);
void neap_sum_feed(neap_sum *sum, const void *bytes, size_t len);
uint64_t neap_sum_value(const neap_sum *sum);
void neap_sum_free(neap_sum *sum);
/* Whether the 8 bytes at sum_at (sum_at + 8 <= len) are the checksum of all len, they themselves
 * taken as zero. Fails: NEAP_E_CORRUPT (they are not); -ENOMEM. */
int neap_checksum_verify(const void *bytes, size_t len, size_t sum_at);

/* The first thing that is wrong with how a file of ours begins: char magic[8], u32 version, 4 bytes
 * of its own, u64 length; a header of header_len bytes in all. */
typedef enum neap_head_fault {
    NEAP_HEAD_GOOD,
    NEAP_HEAD_MAGIC, /* or shorter than a header */
    NEAP_HEAD_VERSION,
    NEAP_HEAD_LENGTH
} neap_head_fault;
neap_head_fault neap_head_check(const void *bytes, size_t len, size_t header_len,
                                const char magic[8], uint32_t version);

/* Parses "512M", "1.5G", "123", "64 KiB" (powers of 1024) into bytes, or "50%" into *ret_permille
 * (then *ret_bytes is 0). Fails: NEAP_E_SYNTAX, -ERANGE (negative or too large). */
int neap_size_parse(const char *text, uint64_t *ret_bytes, uint32_t *ret_permille);
/* "1.5 GiB", "87.9 MiB", "512 B" into buf; returns buf. */
char *neap_size_format(uint64_t bytes, char *buf, size_t cap);
#endif
