/* write_budget.h - how many bytes may still be written behind today. The count is kept in the file
 * "write-behind" of the swap folder (docs/formats/write-behind.md), so that the instances that
 * write there share it and a restart does not reset it. What is taken and not given back, because
 * the process was killed, counts as written.
 * Units      bytes; days as neap_clock_day().
 * Errors     a file that cannot be read or written is logged once; then the count is this
 *            process's own.
 * Threads    one a budget. */
#ifndef NEAP_CORE_WRITE_BUDGET_H
#define NEAP_CORE_WRITE_BUDGET_H

#include <stdbool.h>
#include <stdint.h>

#define NEAP_WRITE_BEHIND_BYTES ((uint64_t)8 << 30) /* a day, unless another size is asked for */

/* "off" (0 bytes), "on", "always" (also on battery), or the bytes of a day like "2G".
 * Fails: NEAP_E_SYNTAX, -ERANGE. */
int neap_write_behind_parse(const char *text, uint64_t *ret_bytes, bool *ret_on_battery);

typedef struct neap_write_budget {
    char *path;
    uint64_t limit_bytes;      /* of a day */
    uint64_t day, spent_bytes; /* as last seen in the file */
    int turn;                  /* of turn.h */
    bool is_silent;
} neap_write_budget;

/* Looks how much of the day is spent. -ENOMEM. */
int neap_write_budget_open(const char *swap_folder, uint64_t limit_bytes, uint64_t day,
                           neap_write_budget *ret_budget);
void neap_write_budget_close(neap_write_budget *budget); /* takes a zeroed one */
/* Up to want bytes of what is left of the day. */
uint64_t neap_write_budget_take(neap_write_budget *budget, uint64_t day, uint64_t want_bytes);
/* Gives back what was taken on that day and not written. */
void neap_write_budget_give(neap_write_budget *budget, uint64_t day, uint64_t bytes);
#endif
