/* bytes.c - checksums (XXH3), how files begin, and sizes as text. */
#include "bytes.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <xxhash.h>

#include "err.h"

/* A neap_sum is an XXH3 state; the name keeps xxhash.h out of the headers. */
static XXH3_state_t *sum_state(neap_sum *sum) {
    return (XXH3_state_t *)(void *)sum;
}

uint64_t neap_checksum(const void *bytes, size_t len) {
    return XXH3_64bits(bytes, len);
}

neap_sum *neap_sum_create(void) {
    neap_sum *sum = (neap_sum *)(void *)XXH3_createState();
    if (sum) neap_sum_reset(sum);
    return sum;
}

void neap_sum_reset(neap_sum *sum) {
    XXH3_64bits_reset(sum_state(sum));
}

void neap_sum_feed(neap_sum *sum, const void *bytes, size_t len) {
    XXH3_64bits_update(sum_state(sum), bytes, len);
}

uint64_t neap_sum_value(const neap_sum *sum) {
    return XXH3_64bits_digest((const XXH3_state_t *)(const void *)sum);
}

void neap_sum_free(neap_sum *sum) {
    if (sum) XXH3_freeState(sum_state(sum));
}

int neap_checksum_verify(const void *bytes, size_t len, size_t sum_at) {
    const uint8_t *const first = bytes;
    const uint64_t zero = 0;
    uint64_t said;
    neap_sum *sum = neap_sum_create();
    if (!sum) return -ENOMEM;
    memcpy(&said, first + sum_at, sizeof said);
    neap_sum_feed(sum, first, sum_at);
    neap_sum_feed(sum, &zero, sizeof zero);
    neap_sum_feed(sum, first + sum_at + sizeof zero, len - sum_at - sizeof zero);
    const bool is_good = neap_sum_value(sum) == said;
    neap_sum_free(sum);
    return is_good ? 0 : NEAP_E_CORRUPT;
}

neap_head_fault neap_head_check(const void *bytes, size_t len, size_t header_len,
                                const char magic[8], uint32_t version) {
    struct {
        char magic[8];
        uint32_t version, own;
        uint64_t len;
    } head;
    if (len < header_len || len < sizeof head) return NEAP_HEAD_MAGIC;
    memcpy(&head, bytes, sizeof head);
    if (memcmp(head.magic, magic, sizeof head.magic) != 0) return NEAP_HEAD_MAGIC;
    if (head.version != version) return NEAP_HEAD_VERSION;
    return head.len == len ? NEAP_HEAD_GOOD : NEAP_HEAD_LENGTH;
}

/* A decimal number without sign or exponent, kept exact. */
typedef struct decimal {
    uint64_t whole;
    uint64_t fraction; /* in units of 1 / FRACTION_ONE */
    bool has_fraction;
} decimal;
#define FRACTION_ONE 1000000000ull

static int decimal_parse(const char **text, decimal *ret_number) {
    const char *p = *text;
    decimal number = {0};
    bool digits = false;
    for (; isdigit((unsigned char)*p); p++, digits = true) {
        const uint64_t digit = (uint64_t)(*p - '0');
        if (__builtin_mul_overflow(number.whole, 10u, &number.whole) ||
            __builtin_add_overflow(number.whole, digit, &number.whole))
            return -ERANGE;
    }
    if (*p == '.') {
        uint64_t weight = FRACTION_ONE / 10;
        for (p++, digits = false; isdigit((unsigned char)*p); p++, digits = true) {
            number.fraction += (uint64_t)(*p - '0') * weight;
            weight /= 10; /* digits beyond the ninth weigh nothing */
        }
        number.has_fraction = true;
    }
    if (!digits) return NEAP_E_SYNTAX;
    *text = p;
    *ret_number = number;
    return 0;
}

/* number * unit, rounded down. */
static int decimal_scale(const decimal *number, uint64_t unit, uint64_t *ret_value) {
    const unsigned __int128 fraction = (unsigned __int128)number->fraction * unit / FRACTION_ONE;
    uint64_t value;
    if (__builtin_mul_overflow(number->whole, unit, &value) ||
        __builtin_add_overflow(value, (uint64_t)fraction, &value))
        return -ERANGE;
    *ret_value = value;
    return 0;
}

/* "", "B", "K", "KB", "KiB", ... in any case; 0: no unit of that name. */
static uint64_t unit_parse(const char *text) {
    static const char letters[] = "KMGTPE";
    if (*text == '\0' || strcasecmp(text, "B") == 0) return 1;
    const char *letter = strchr(letters, toupper((unsigned char)*text));
    if (!letter) return 0;
    text++;
    if (*text != '\0' && strcasecmp(text, "B") != 0 && strcasecmp(text, "iB") != 0) return 0;
    return 1ull << (10 * (letter - letters + 1));
}

int neap_size_parse(const char *text, uint64_t *ret_bytes, uint32_t *ret_permille) {
    const char *p = text;
    while (isspace((unsigned char)*p))
        p++;
    const bool negative = *p == '-';
    if (*p == '-' || *p == '+') p++;
    decimal number;
    int err = decimal_parse(&p, &number);
    if (err) return err;
    while (isspace((unsigned char)*p))
        p++;

    uint64_t bytes = 0, permille = 0;
    if (strcmp(p, "%") == 0 && ret_permille) {
        err = decimal_scale(&number, 10, &permille);
        if (!err && permille > UINT32_MAX) err = -ERANGE;
    } else {
        const uint64_t unit = unit_parse(p);
        if (unit == 0 || (unit == 1 && number.has_fraction)) return NEAP_E_SYNTAX;
        err = decimal_scale(&number, unit, &bytes);
    }
    if (err) return err;
    if (negative) return -ERANGE;
    *ret_bytes = bytes;
    if (ret_permille) *ret_permille = (uint32_t)permille;
    return 0;
}

char *neap_size_format(uint64_t bytes, char *buf, size_t cap) {
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    if (bytes < 1024) {
        snprintf(buf, cap, "%u B", (unsigned)bytes);
        return buf;
    }
    double value = (double)bytes / 1024;
    size_t unit = 0;
    /* 1023.95 would be printed as 1024.0. */
    for (; value >= 1023.95 && unit + 1 < sizeof units / sizeof *units; unit++)
        value /= 1024;
    snprintf(buf, cap, "%.1f %s", value, units[unit]);
    return buf;
}
