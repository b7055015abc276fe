/* sock.h - local stream sockets of one owner: messages are lines of text.
 * Errors    0 or -errno. A line longer than NEAP_LINE_MAX is -EMSGSIZE. */
#ifndef NEAP_OS_SOCK_H
#define NEAP_OS_SOCK_H

#include <stddef.h>
#include <stdint.h>

#define NEAP_LINE_MAX 65536u

typedef struct neap_listener neap_listener;
/* Called on the listener's own threads, several at once; one line in (no newline, NUL-terminated),
 * one line out (malloc'd, freed by the listener; NULL closes the connection). */
typedef char *(*neap_line_handler)(const char *line, void *ctx);

/* Binds path (mode 0600; a stale socket of a dead process is replaced), listens, and serves on
 * threads that sleep while nothing arrives. Peers of another user than the owner or root are
 * refused by SO_PEERCRED. A client whose next line does not come within 5 s is dropped; when too
 * many are connected, the one that has been silent longest makes room for another. */
int neap_listener_create(const char *path, neap_line_handler handler, void *ctx,
                         neap_listener **ret_listener);
/* Removes the socket's name only: for the end of a process whose threads may be anywhere. */
void neap_listener_unlink(const neap_listener *listener);
void neap_listener_free(neap_listener *listener); /* removes the socket; takes NULL */

/* Connects, sends one line, returns the reply (malloc'd). timeout_ms 0: wait for ever. */
int neap_sock_call(const char *path, const char *line, uint64_t timeout_ms, char **ret_reply);
#endif
