/* fuzz_main.c - runs a fuzz target as a regression test: on every file named, then on cut and
 * flipped copies of each. Bounded and always the same. */
#include <stdint.h>
#include <string.h>

#include "check.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint32_t next(uint32_t *state) {
    return (*state = *state * 1664525u + 1013904223u) >> 8;
}

/* A heap block of exactly size bytes, so that AddressSanitizer sees a read past the end. */
static void run_copy(const uint8_t *data, size_t size, size_t flip) {
    uint8_t *copy = malloc(size + !size);
    CHECK(copy);
    memcpy(copy, data, size);
    if (flip < size * 8) copy[flip / 8] ^= (uint8_t)(1u << flip % 8);
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
}

static void run_file(const char *path) {
    static uint8_t data[1 << 20];
    FILE *file = fopen(path, "rb");
    CHECK(file);
    const size_t size = fread(data, 1, sizeof data, file);
    fclose(file);
    uint32_t state = (uint32_t)size;
    run_copy(data, size, SIZE_MAX);
    for (int i = 0; size > 0 && i < 500; i++) {
        run_copy(data, next(&state) % size, SIZE_MAX);
        run_copy(data, size, next(&state) % (size * 8));
    }
}

int main(int argc, char **argv) {
    run_copy((const uint8_t *)"", 0, SIZE_MAX);
    for (int i = 1; i < argc; i++)
        run_file(argv[i]);
    printf("%d inputs\n", argc - 1);
    return 0;
}
