/* task_fit.h - tasks of a number of tokens, whatever tokens are. */
#ifndef NEAP_APPS_TASK_FIT_H
#define NEAP_APPS_TASK_FIT_H

#include "server_client.h"
#include "tasks.h"

/* The task whose text is the longest that this number of tokens holds, or nearly; tokenize says
 * what tokens are. Fails: the exit status of an error that has been printed. */
typedef int (*neap_task_tokenize)(void *ctx, const char *text, neap_tokens *ret_tokens);
int neap_task_fit(int text, uint32_t seed, size_t n_tokens, neap_task_tokenize tokenize, void *ctx,
                  neap_task *ret_task, neap_tokens *ret_context);
#endif
