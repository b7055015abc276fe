/* server_task.h - a text of tasks.h and its questions, asked of a llama-server that has read it.
 * Errors     0, or the exit status of an error that has been printed. */
#ifndef NEAP_APPS_SERVER_TASK_H
#define NEAP_APPS_SERVER_TASK_H

#include "server_client.h"
#include "tasks.h"

typedef struct neap_server_task {
    neap_tokens context;
    neap_tokens questions[NEAP_TASK_QUESTIONS], answers[NEAP_TASK_QUESTIONS];
    size_t n_questions;
} neap_server_task;

/* A logbook nearly as long as this number of tokens; the server says what tokens are. */
int neap_server_task_make(neap_server *server, uint32_t seed, size_t n_tokens,
                          neap_server_task *ret_task);
void neap_server_task_free(neap_server_task *task); /* takes a zeroed one */
/* Of a server with the context in slot 0: how many answers are right, each token being the
 * likeliest after those before it. The last token of a question is computed alone, as those of an
 * answer are. */
int neap_server_task_ask(neap_server *server, const neap_server_task *task, size_t *ret_right);
#endif
