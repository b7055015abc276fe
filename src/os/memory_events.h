/* memory_events.h - one epoll set of everything that announces memory pressure: PSI triggers, the
 * notices of cgroup v1 and v2, systemd's MEMORY_PRESSURE_WATCH, and a wake-up of our own.
 * A source that fired is not listened to for 50 ms: cgroup v1 can send thousands a second.
 * Errors    0 or -errno; a source that a machine does not have, or does not let us have, is no
 * error. Threads   wait by one thread; wake from any. */
#ifndef NEAP_OS_MEMORY_EVENTS_H
#define NEAP_OS_MEMORY_EVENTS_H

#include "memory_files.h"

enum {
    NEAP_MEMORY_WAKE = 1,            /* neap_memory_events_wake() */
    NEAP_MEMORY_STALL = 2,           /* PSI of the machine */
    NEAP_MEMORY_GROUP_STALL = 4,     /* PSI of the group */
    NEAP_MEMORY_MEDIUM = 8,          /* v1 pressure_level of the root group: the machine's */
    NEAP_MEMORY_CRITICAL = 16,       /* the same */
    NEAP_MEMORY_GROUP_MEDIUM = 32,   /* v1 pressure_level */
    NEAP_MEMORY_GROUP_CRITICAL = 64, /* v1 pressure_level */
    NEAP_MEMORY_GROUP_USAGE = 128,   /* v1 usage threshold crossed */
    NEAP_MEMORY_GROUP_LIMIT = 256,   /* v2 memory.events: high, max or oom was counted */
    NEAP_MEMORY_TOLD = 512,          /* systemd's protocol */
};

typedef struct neap_memory_events neap_memory_events;

/* watch, write: values of MEMORY_PRESSURE_WATCH and MEMORY_PRESSURE_WRITE, NULL when not set. A
 * watch of /dev/null asks for no pressure logic at all: -ECANCELED. */
int neap_memory_events_open(const char *watch, const char *write, neap_memory_events **ret_events);
/* Listens to what those files have; replaces all but systemd's. No allocation. */
void neap_memory_events_listen(neap_memory_events *events, const neap_memory_files *files);
void neap_memory_events_close(neap_memory_events *events); /* takes NULL */
/* Which of the above can come; without any but WAKE and TOLD only looking tells. */
unsigned neap_memory_events_sources(const neap_memory_events *events);
/* v1: announces when the usage of the group of that level crosses one of the values; replaces the
 * earlier ones of that level. -ENOTSUP elsewhere. */
int neap_memory_events_marks(neap_memory_events *events, const neap_memory_files *files,
                             size_t level, const uint64_t *usage_bytes, size_t n);
/* Sleeps until something happens or the time (CLOCK_MONOTONIC; UINT64_MAX: none) comes: then 0. */
unsigned neap_memory_events_wait(neap_memory_events *events, uint64_t until_ns);
void neap_memory_events_wake(neap_memory_events *events);
#endif
