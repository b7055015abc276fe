/* power.h - whether the machine runs on a battery. */
#ifndef NEAP_OS_POWER_H
#define NEAP_OS_POWER_H

#include <stdbool.h>

/* True when a battery of the machine discharges and nothing else feeds it. What cannot be read
 * counts as mains. root is put before every path: "" for the machine, a folder of fixtures in
 * tests. */
bool neap_on_battery(const char *root);
#endif
