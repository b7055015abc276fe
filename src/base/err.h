/* err.h - errors: 0, -errno unchanged, or NEAP_E_* (neap.h). Log lines go through one sink. */
#ifndef NEAP_BASE_ERR_H
#define NEAP_BASE_ERR_H

#include "neap.h"

enum { NEAP_LOG_ERROR = 0, NEAP_LOG_WARN = 1, NEAP_LOG_INFO = 2, NEAP_LOG_DEBUG = 3 };

/* Formats one line ("neap: " is put before it) and hands it to the sink; no newline. */
void neap_log(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));
#endif
