/* turn.h - turns among the processes of one user: a file in the runtime folder that one holds.
 * Errors    0 or -errno. */
#ifndef NEAP_OS_TURN_H
#define NEAP_OS_TURN_H

#include <stdbool.h>
#include <stdint.h>

int neap_turn_open(const char *name, int *ret_turn);
void neap_turn_close(int turn); /* gives it back; takes -1 */
/* Waits until the turn is ours, at most so long; false: it is not. */
bool neap_turn_take(int turn, uint64_t at_most_ns);
void neap_turn_give(int turn);
bool neap_turn_taken(int turn); /* by another process */
#endif
