/* sensor.c - see sensor.h. Of the group and those above it that have a limit, the one that is
 * nearest to it is the group of the signals. */
#include "sensor.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "memory_events.h"

#define ANNOUNCING (~(unsigned)(NEAP_MEMORY_WAKE | NEAP_MEMORY_TOLD))
#define MARKS 4

struct neap_pressure_sensor {
    neap_memory_files *files;
    neap_memory_events *events;
    unsigned happened;                       /* since the last read */
    uint64_t armed_bytes[NEAP_GROUP_LEVELS]; /* limits that the marks were made for */
};

/* Usage thresholds (v1) where the marks of the decision lie. */
static void arm_level(neap_pressure_sensor *sensor, size_t i, uint64_t limit) {
    const neap_pressure_marks marks = neap_pressure_marks_of(limit);
    const uint64_t usage[MARKS] = {limit - marks.near_bytes, limit - marks.enough_bytes,
                                   limit - marks.low_bytes, limit - marks.critical_bytes};
    if (sensor->armed_bytes[i] == limit) return;
    sensor->armed_bytes[i] = limit;
    neap_memory_events_marks(sensor->events, sensor->files, i, usage, limit > 0 ? MARKS : 0);
}

static void arm(neap_pressure_sensor *sensor, const neap_memory_reading *reading) {
    for (size_t i = 0; i < reading->n_levels; i++)
        arm_level(sensor, i, reading->levels[i].limit_bytes);
}

static void listen_to_group(neap_pressure_sensor *sensor) {
    neap_memory_reading reading;
    neap_memory_events_listen(sensor->events, sensor->files);
    memset(sensor->armed_bytes, 0, sizeof sensor->armed_bytes);
    if (neap_memory_files_read(sensor->files, &reading) == 0) arm(sensor, &reading);
}

int neap_pressure_sensor_open(const char *root, const char *watch, const char *write,
                              neap_pressure_sensor **ret_sensor) {
    neap_pressure_sensor *sensor = calloc(1, sizeof *sensor);
    if (!sensor) return -ENOMEM;
    int err = neap_memory_events_open(watch, write, &sensor->events);
    if (!err) err = neap_memory_files_open(root, &sensor->files);
    if (err) {
        neap_pressure_sensor_close(sensor);
        return err;
    }
    listen_to_group(sensor);
    *ret_sensor = sensor;
    return 0;
}

void neap_pressure_sensor_close(neap_pressure_sensor *sensor) {
    if (!sensor) return;
    neap_memory_events_close(sensor->events);
    neap_memory_files_close(sensor->files);
    free(sensor);
}

void neap_pressure_sensor_wait(neap_pressure_sensor *sensor, uint64_t until_ns) {
    sensor->happened |= neap_memory_events_wait(sensor->events, until_ns);
}

void neap_pressure_sensor_wake(neap_pressure_sensor *sensor) {
    neap_memory_events_wake(sensor->events);
}

static neap_pressure_event event_of(unsigned happened, unsigned medium, unsigned critical) {
    return happened & critical ? NEAP_PRESSURE_EVENT_CRITICAL
           : happened & medium ? NEAP_PRESSURE_EVENT_MEDIUM
                               : NEAP_PRESSURE_EVENT_NONE;
}

static bool is_tighter(const neap_memory_level *a, const neap_memory_level *b) {
    if (a->limit_bytes == 0 || b->limit_bytes == 0)
        return b->limit_bytes == 0 && a->limit_bytes > 0;
    return (double)a->available_bytes / (double)a->limit_bytes <
           (double)b->available_bytes / (double)b->limit_bytes;
}

static neap_pressure_domain group_of(const neap_memory_reading *reading, unsigned happened) {
    neap_memory_level tightest = {0};
    for (size_t i = 0; i < reading->n_levels; i++)
        if (is_tighter(&reading->levels[i], &tightest)) tightest = reading->levels[i];
    return (neap_pressure_domain){
        .size_bytes = tightest.limit_bytes,
        .available_bytes = tightest.available_bytes,
        .some_permille = reading->group_stall.some_permille,
        .full_permille = reading->group_stall.full_permille,
        .event = event_of(happened, NEAP_MEMORY_GROUP_MEDIUM, NEAP_MEMORY_GROUP_CRITICAL),
    };
}

int neap_pressure_sensor_read(neap_pressure_sensor *sensor, neap_pressure_signals *ret_signals) {
    neap_memory_reading reading;
    if (neap_memory_files_follow(sensor->files)) listen_to_group(sensor);
    const int err = neap_memory_files_read(sensor->files, &reading);
    if (err) return err;
    arm(sensor, &reading);
    const unsigned happened = sensor->happened;
    sensor->happened = 0;
    *ret_signals = (neap_pressure_signals){
        .now_ns = neap_clock_ns(),
        .machine = {.size_bytes = reading.total_bytes,
                    .available_bytes = reading.available_bytes,
                    .some_permille = reading.machine_stall.some_permille,
                    .full_permille = reading.machine_stall.full_permille,
                    .event = event_of(happened, NEAP_MEMORY_MEDIUM, NEAP_MEMORY_CRITICAL)},
        .group = group_of(&reading, happened),
        .told = happened & NEAP_MEMORY_TOLD,
        .woken = happened & (ANNOUNCING | NEAP_MEMORY_TOLD),
        .blind = neap_pressure_sensor_blind(sensor),
    };
    return 0;
}

bool neap_pressure_sensor_blind(const neap_pressure_sensor *sensor) {
    return (neap_memory_events_sources(sensor->events) & ANNOUNCING) == 0;
}

void neap_pressure_sensor_describe(const neap_pressure_sensor *sensor, char *text, size_t cap) {
    const unsigned sources = neap_memory_events_sources(sensor->events);
    const struct {
        unsigned mask;
        const char *name;
    } names[] = {
        {NEAP_MEMORY_STALL | NEAP_MEMORY_GROUP_STALL, "psi"},
        {NEAP_MEMORY_MEDIUM | NEAP_MEMORY_CRITICAL | NEAP_MEMORY_GROUP_MEDIUM |
             NEAP_MEMORY_GROUP_CRITICAL | NEAP_MEMORY_GROUP_USAGE,
         "cgroup v1"},
        {NEAP_MEMORY_GROUP_LIMIT, "cgroup v2"},
        {NEAP_MEMORY_TOLD, "systemd"},
    };
    size_t len = 0;
    text[0] = '\0';
    if (neap_pressure_sensor_blind(sensor)) len = (size_t)snprintf(text, cap, "polling");
    for (size_t i = 0; i < sizeof names / sizeof *names && len < cap; i++)
        if (sources & names[i].mask)
            len += (size_t)snprintf(text + len, cap - len, "%s%s", len ? ", " : "", names[i].name);
}
