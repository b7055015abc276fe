/* temp.h - a folder of a test's own, and bytes that are easy to tell apart. */
#ifndef NEAP_TESTS_TEMP_H
#define NEAP_TESTS_TEMP_H
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

/* Made under $TMPDIR or /tmp; malloc'd; remove with temp_remove. */
static inline char *temp_dir(void) {
    const char *base = getenv("TMPDIR");
    char path[512];
    snprintf(path, sizeof path, "%s/neap-test-XXXXXX", base && base[0] ? base : "/tmp");
    CHECK(mkdtemp(path));
    return strdup(path);
}

static inline void temp_remove(char *dir) {
    char command[600];
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    CHECK(system(command) == 0);
    free(dir);
}

/* xorshift64*: good enough to choose test cases, the same everywhere. */
static inline uint64_t next_random(uint64_t *state) {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 2685821657736338717ull;
}

static inline void fill_random(void *bytes, size_t len, uint64_t seed) {
    uint64_t state = seed * 2 + 1;
    unsigned char *out = bytes;
    for (size_t i = 0; i < len; i += 8) {
        const uint64_t value = next_random(&state);
        memcpy(out + i, &value, len - i < 8 ? len - i : 8);
    }
}
#endif
