/* ctl.h - the control protocol: one JSON object a line, request and reply. Pure text in and out.
 * Request {"neap":1,"command":"stat|evict|restore","bytes":N,"permille":N,"only":"all|weights|kv"}
 * Reply     {"ok":true, ...result...} or {"ok":false,"error":N,"message":"..."}
 * Format    docs/formats/control.md
 * Errors    NEAP_E_SYNTAX (not JSON, not an object, wrong types, unknown command), NEAP_E_VERSION,
 *           -EINVAL / -ERANGE (a size of 0, negative or too large), -ENOMEM. */
#ifndef NEAP_CTL_H
#define NEAP_CTL_H

#include "neap.h"

typedef enum neap_ctl_command { NEAP_CTL_STAT, NEAP_CTL_EVICT, NEAP_CTL_RESTORE } neap_ctl_command;

typedef struct neap_ctl_request {
    neap_ctl_command command;
    neap_evict_request evict;
} neap_ctl_request;

/* All ret_ strings are malloc'd lines without a newline. */
int neap_ctl_request_parse(const char *line, neap_ctl_request *ret_request);
int neap_ctl_request_format(const neap_ctl_request *request, char **ret_line);

int neap_ctl_stat_format(int pid, const char *program, const neap_stat *stat, char **ret_line);
int neap_ctl_evict_format(const neap_evict_result *result, char **ret_line);
int neap_ctl_restore_format(uint64_t bytes, uint64_t duration_ns, char **ret_line);
int neap_ctl_error_format(int err, const char *message, char **ret_line);

/* On a reply of {"ok":false}: returns its error number and, when ret_message is not NULL, its text.
 */
int neap_ctl_evict_parse(const char *line, neap_evict_result *ret_result, char **ret_message);
int neap_ctl_restore_parse(const char *line, uint64_t *ret_bytes, uint64_t *ret_ns,
                           char **ret_message);
/* The instance object of `neap stat --json` (CONTRACT: stat) as text inside the reply's "instance"
 * is handled by the CLI with jansson. */
#endif
