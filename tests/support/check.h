/* check.h - the whole of the test harness of one-program tests: CHECK aborts with file and line. */
#ifndef NEAP_TESTS_CHECK_H
#define NEAP_TESTS_CHECK_H
#include <stdio.h>
#include <stdlib.h>
#define CHECK(cond)                                                            \
    do {                                                                       \
        if (!(cond)) {                                                         \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #cond); \
            abort();                                                           \
        }                                                                      \
    } while (0)
#define SKIP(reason)                     \
    do {                                 \
        printf("skipped: %s\n", reason); \
        exit(77);                        \
    } while (0)
#endif
