/* clock.c - see clock.h. */
#include "clock.h"

#include <time.h>

uint64_t neap_clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now); /* cannot fail with this clock */
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t neap_clock_day(void) {
    const time_t now = time(NULL);
    return now > 0 ? (uint64_t)now / 86400u : 0;
}
