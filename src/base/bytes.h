/* bytes.h - checked arithmetic, rounding, checksums, little-endian access. */
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

/* Parses "512M", "1.5G", "123", "64 KiB" (powers of 1024) into bytes, or "50%" into *ret_permille
 * (then *ret_bytes is 0). Fails: NEAP_E_SYNTAX, -ERANGE (negative or too large). */
int neap_size_parse(const char *text, uint64_t *ret_bytes, uint32_t *ret_permille);
/* "1.5 GiB", "87.9 MiB", "512 B" into buf; returns buf. */
char *neap_size_format(uint64_t bytes, char *buf, size_t cap);
#endif
