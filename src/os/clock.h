/* clock.h - CLOCK_MONOTONIC in ns. */
#ifndef NEAP_OS_CLOCK_H
#define NEAP_OS_CLOCK_H
#include <stdint.h>
uint64_t neap_clock_ns(void);
#endif
