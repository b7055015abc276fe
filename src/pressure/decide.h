/* decide.h - memory pressure: signals in, bytes wanted out.
 * Pure: no clock, no files, no allocation; the caller keeps the state between calls.
 * Units      bytes; ns of one clock; permille.
 * Promises   never asks for more than is resident; of two signals that differ only in severity the
 *            worse one never asks for less; at most one change of `pressed`, and of evicting to
 *            restoring or back, in a phase of 10 s; under a load that stays as it is nothing is
 *            evicted after a restoration.
 * Numbers    marks of a domain of size T: low = T/16 within [16 MiB, 1 GiB] and T/4, critical =
 *            low/2, enough = 2 low, near = 4 low. */
#ifndef NEAP_PRESSURE_DECIDE_H
#define NEAP_PRESSURE_DECIDE_H

#include <stdbool.h>
#include <stdint.h>

#include "neap.h"

typedef enum neap_pressure_event {
    NEAP_PRESSURE_EVENT_NONE,
    NEAP_PRESSURE_EVENT_MEDIUM,   /* reclaim finds less and less */
    NEAP_PRESSURE_EVENT_CRITICAL, /* reclaim finds nothing: the next step is an OOM kill */
} neap_pressure_event;

/* The machine, or the memory group (cgroup) of the process. */
typedef struct neap_pressure_domain {
    uint64_t size_bytes;      /* MemTotal; the group's limit; 0: no such bound */
    uint64_t available_bytes; /* may still be taken before somebody is stopped or killed */
    uint32_t some_permille, full_permille; /* PSI avg10; 0 where not known */
    neap_pressure_event event;             /* since the last call */
} neap_pressure_domain;

typedef struct neap_pressure_signals {
    uint64_t now_ns;
    neap_pressure_domain machine, group;
    uint64_t resident_bytes; /* what could be released */
    bool told;               /* a service manager asks to release what can be spared */
    bool woken;              /* called because of an event, not because of look_ns */
    bool blind;              /* no source of events: only looking tells */
    bool busy;               /* computing: what is released now is needed again at once */
    uint64_t owed_bytes;     /* evicted because of pressure, by whomever, and not back */
} neap_pressure_signals;

typedef struct neap_pressure_track {
    bool known;
    uint64_t seen_ns, available_bytes, fall; /* fall: bytes a second, at the last two looks */
} neap_pressure_track;

/* All zero at the start. */
typedef struct neap_pressure_state {
    bool pressed;
    bool relieved; /* while pressed: nothing is short since relieved_ns */
    bool has_asked;
    uint32_t fruitless; /* asks in a row that released nothing */
    uint32_t looks;     /* in a row in which there was nothing to ask */
    uint64_t relieved_ns, asked_ns;
    uint64_t owed_bytes;  /* at the last look */
    bool has_restored;    /* since the last shortage */
    uint32_t relapses;    /* restorations in a row that failed or were followed by a shortage */
    uint64_t restored_ns; /* last restoration */
    bool has_room;        /* for what is owed, since room_ns */
    uint64_t room_ns;
    neap_pressure_track machine, group;
} neap_pressure_state;

typedef struct neap_pressure_decision {
    uint64_t release_bytes; /* now; 0: nothing */
    uint64_t restore_bytes; /* now, of what is owed, ahead of need; 0: nothing */
    uint64_t look_ns;       /* call again then; UINT64_MAX: at the next event */
    neap_pressure severity; /* CALM, SHORT, CRITICAL */
    bool by_machine;        /* the machine is short, not only the group */
} neap_pressure_decision;

typedef struct neap_pressure_marks {
    uint64_t critical_bytes, low_bytes, enough_bytes, near_bytes;
} neap_pressure_marks;
neap_pressure_marks neap_pressure_marks_of(uint64_t size_bytes);

neap_pressure_decision neap_pressure_decide(neap_pressure_state *state,
                                            const neap_pressure_signals *signals);
/* What became of the last release_bytes: when nothing was released, the next ask waits longer. */
void neap_pressure_released(neap_pressure_state *state, uint64_t bytes);
/* What became of restore_bytes: when nothing came back, the next try waits longer. */
void neap_pressure_restored(neap_pressure_state *state, uint64_t now_ns, uint64_t bytes);

/* Share of what is evictable that shall be out of memory after Android's trim level (onTrimMemory:
 * 5, 10, 15 running; 20 UI hidden; 40, 60, 80 in the background); levels between two of them mean
 * the lower one. -EINVAL below 5. */
int neap_pressure_trim_permille(int level);
#endif
