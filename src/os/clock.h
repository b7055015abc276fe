/* clock.h - CLOCK_MONOTONIC in ns, and the calendar. */
#ifndef NEAP_OS_CLOCK_H
#define NEAP_OS_CLOCK_H
#include <stdint.h>
uint64_t neap_clock_ns(void);
uint64_t neap_clock_day(void); /* days since 1970, UTC */
#endif
