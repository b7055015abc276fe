/* sensor.h - where the signals of memory pressure come from: waits for an event, reads the files,
 * and puts both into the terms of decide.h.
 * Errors    0 or -errno.
 * Threads   one at a time; wake from any. Waiting and reading allocate nothing. */
#ifndef NEAP_PRESSURE_SENSOR_H
#define NEAP_PRESSURE_SENSOR_H

#include <stddef.h>

#include "decide.h"

typedef struct neap_pressure_sensor neap_pressure_sensor;

/* root: put before /proc and what it names; "" but in tests, where no events come.
 * watch, write: systemd's MEMORY_PRESSURE_WATCH and MEMORY_PRESSURE_WRITE, or NULL.
 * Fails: -ECANCELED (watch is /dev/null: no pressure logic wanted), -ENOENT (nothing to read). */
int neap_pressure_sensor_open(const char *root, const char *watch, const char *write,
                              neap_pressure_sensor **ret_sensor);
void neap_pressure_sensor_close(neap_pressure_sensor *sensor); /* takes NULL */

/* Sleeps until an event, a wake-up, or until_ns (UINT64_MAX: none). */
void neap_pressure_sensor_wait(neap_pressure_sensor *sensor, uint64_t until_ns);
void neap_pressure_sensor_wake(neap_pressure_sensor *sensor);
/* All but resident_bytes and busy; takes in the events of the waits since the last read. */
int neap_pressure_sensor_read(neap_pressure_sensor *sensor, neap_pressure_signals *ret_signals);

/* Only looking tells: nothing here announces pressure. */
bool neap_pressure_sensor_blind(const neap_pressure_sensor *sensor);
/* "psi, cgroup v1, systemd"; "polling" when blind. */
void neap_pressure_sensor_describe(const neap_pressure_sensor *sensor, char *text, size_t cap);
#endif
