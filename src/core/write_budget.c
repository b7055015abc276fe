/* write_budget.c - see write_budget.h. Instances change the file in turns; one that does not get
 * its turn goes on without: the count may then be off by what it took. */
#include "write_budget.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "err.h"
#include "neap.h"
#include "textfile.h"
#include "turn.h"

#define FILE_NAME "/write-behind"
#define FILE_MAX 64
#define TURN_NS 500000000u

int neap_write_behind_parse(const char *text, uint64_t *ret_bytes, bool *ret_on_battery) {
    const bool always = strcmp(text, "always") == 0;
    uint64_t bytes = NEAP_WRITE_BEHIND_BYTES;
    if (strcmp(text, "off") == 0) {
        bytes = 0;
    } else if (!always && strcmp(text, "on") != 0) {
        const int err = neap_size_parse(text, &bytes, NULL);
        if (err) return err;
    }
    *ret_bytes = bytes;
    *ret_on_battery = always;
    return 0;
}

/* "DAY BYTES\n". */
static int parse(const char *text, uint64_t *ret_day, uint64_t *ret_bytes) {
    int end = 0;
    uint64_t day, bytes;
    if (text[strspn(text, "0123456789 \n")] != '\0') return NEAP_E_CORRUPT; /* no sign */
    if (sscanf(text, "%8" SCNu64 " %18" SCNu64 "%n", &day, &bytes, &end) != 2)
        return NEAP_E_CORRUPT;
    if (strcmp(text + end, "\n") != 0) return NEAP_E_CORRUPT;
    *ret_day = day;
    *ret_bytes = bytes;
    return 0;
}

static void tell(neap_write_budget *budget, int err) {
    if (!budget->is_silent)
        neap_log(NEAP_LOG_WARN, "%s: %s; what was written today is counted for this process alone",
                 budget->path, neap_strerror(err));
    budget->is_silent = true;
}

/* What the file says, or, where it says nothing, what was known. */
static void refresh(neap_write_budget *budget) {
    char *text;
    size_t len;
    int err = neap_textfile_read(budget->path, FILE_MAX, &text, &len);
    if (!err) {
        err = parse(text, &budget->day, &budget->spent_bytes);
        free(text);
    }
    if (err && err != -ENOENT) tell(budget, err);
}

static void begin_day(neap_write_budget *budget, uint64_t day) {
    if (budget->day != day) budget->spent_bytes = 0;
    budget->day = day;
}

static void save(neap_write_budget *budget) {
    char text[FILE_MAX];
    const int len =
        snprintf(text, sizeof text, "%" PRIu64 " %" PRIu64 "\n", budget->day, budget->spent_bytes);
    const int err = neap_textfile_replace(budget->path, text, (size_t)len);
    if (err) tell(budget, err);
}

int neap_write_budget_open(const char *swap_folder, uint64_t limit_bytes, uint64_t day,
                           neap_write_budget *ret_budget) {
    neap_write_budget budget = {.limit_bytes = limit_bytes, .turn = -1};
    budget.path = malloc(strlen(swap_folder) + sizeof FILE_NAME);
    if (!budget.path) return -ENOMEM;
    strcat(strcpy(budget.path, swap_folder), FILE_NAME);
    (void)neap_turn_open("write-behind.lock", &budget.turn); /* without it: see above */
    refresh(&budget);
    begin_day(&budget, day);
    *ret_budget = budget;
    return 0;
}

void neap_write_budget_close(neap_write_budget *budget) {
    if (!budget->path) return;
    neap_turn_close(budget->turn);
    free(budget->path);
}

uint64_t neap_write_budget_take(neap_write_budget *budget, uint64_t day, uint64_t want_bytes) {
    const bool ours = budget->turn >= 0 && neap_turn_take(budget->turn, TURN_NS);
    refresh(budget);
    begin_day(budget, day);
    const uint64_t left =
        budget->limit_bytes > budget->spent_bytes ? budget->limit_bytes - budget->spent_bytes : 0;
    const uint64_t taken = want_bytes < left ? want_bytes : left;
    budget->spent_bytes += taken;
    if (taken > 0) save(budget);
    if (ours) neap_turn_give(budget->turn);
    return taken;
}

void neap_write_budget_give(neap_write_budget *budget, uint64_t day, uint64_t bytes) {
    if (bytes == 0) return;
    const bool ours = budget->turn >= 0 && neap_turn_take(budget->turn, TURN_NS);
    refresh(budget);
    if (budget->day == day) {
        budget->spent_bytes -= bytes < budget->spent_bytes ? bytes : budget->spent_bytes;
        save(budget);
    }
    if (ours) neap_turn_give(budget->turn);
}
