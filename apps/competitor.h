/* competitor.h - a program that takes memory: a child that dirties page after page, at a steady
 * rate, up to what it is told, and holds it.
 * Units     bytes; bytes a second.
 * Errors    0 or -errno.
 * Lifetime  it ends with this process. */
#ifndef NEAP_APPS_COMPETITOR_H
#define NEAP_APPS_COMPETITOR_H

#include <stdbool.h>
#include <stdint.h>

#include "memory_group.h"

typedef struct neap_competitor neap_competitor;

/* Starts it in the group, holding nothing. A third of each page does not compress. */
int neap_competitor_start(const neap_memory_group *group, uint64_t max_bytes, uint64_t rate,
                          neap_competitor **ret_competitor);
void neap_competitor_stop(neap_competitor *competitor); /* takes NULL */
/* From now on it grows to so many bytes, if it has fewer; returns at once. */
void neap_competitor_grow(neap_competitor *competitor, uint64_t bytes);
uint64_t neap_competitor_bytes(const neap_competitor *competitor); /* dirtied so far */
bool neap_competitor_alive(neap_competitor *competitor);
#endif
