/* fuzz_files.h - runs a fuzz target, which includes this, on the files named on the command line.
 */
#ifndef NEAP_TESTS_FUZZ_FILES_H
#define NEAP_TESTS_FUZZ_FILES_H

#include <stdint.h>
#include <stdio.h>

#include "check.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void fuzz_files(int argc, char **argv) {
    static uint8_t bytes[1 << 20];
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        CHECK(file);
        const size_t len = fread(bytes, 1, sizeof bytes, file);
        fclose(file);
        LLVMFuzzerTestOneInput(bytes, len);
    }
}
#endif
