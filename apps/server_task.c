/* server_task.c - see server_task.h. */
#include "server_task.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "task_fit.h"

static int tokenize(void *ctx, const char *text, neap_tokens *ret_tokens) {
    return neap_server_tokenize(ctx, text, ret_tokens);
}

int neap_server_task_make(neap_server *server, uint32_t seed, size_t n_tokens,
                          neap_server_task *ret_task) {
    neap_task task = {0};
    neap_server_task made = {0};
    int status =
        neap_task_fit(NEAP_TASK_LOGBOOK, seed, n_tokens, tokenize, server, &task, &made.context);
    for (; made.n_questions < task.n_questions && !status; made.n_questions++) {
        const neap_question *q = &task.questions[made.n_questions];
        status = neap_server_tokenize(server, q->text, &made.questions[made.n_questions]);
        if (!status)
            status = neap_server_tokenize(server, q->answer, &made.answers[made.n_questions]);
    }
    neap_task_free(&task);
    if (status)
        neap_server_task_free(&made);
    else
        *ret_task = made;
    return status;
}

void neap_server_task_free(neap_server_task *task) {
    neap_tokens_free(&task->context);
    for (size_t i = 0; i < NEAP_TASK_QUESTIONS; i++) {
        neap_tokens_free(&task->questions[i]);
        neap_tokens_free(&task->answers[i]);
    }
    *task = (neap_server_task){0};
}

static int ask(neap_server *server, const neap_server_task *task, size_t i, bool *ret_right) {
    const neap_tokens *question = &task->questions[i], *answer = &task->answers[i];
    neap_tokens prompt = {.ids = malloc((task->context.n + question->n) * sizeof *prompt.ids),
                          .n = task->context.n + question->n};
    neap_answer read = {0};
    size_t same = 0;
    if (!prompt.ids) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    memcpy(prompt.ids, task->context.ids, task->context.n * sizeof *prompt.ids);
    memcpy(prompt.ids + task->context.n, question->ids, question->n * sizeof *prompt.ids);
    const neap_tokens but_last = {.ids = prompt.ids, .n = prompt.n - 1};
    int status = neap_server_complete(server, &but_last, 0, true, &read);
    if (!status) status = neap_server_agreement(server, &prompt, answer->ids, answer->n, &same);
    *ret_right = same == answer->n;
    neap_answer_free(&read);
    neap_tokens_free(&prompt);
    return status;
}

int neap_server_task_ask(neap_server *server, const neap_server_task *task, size_t *ret_right) {
    size_t n = 0;
    int status = 0;
    for (size_t i = 0; i < task->n_questions && !status; i++) {
        bool right = false;
        status = ask(server, task, i, &right);
        n += right;
    }
    if (!status) *ret_right = n;
    return status;
}
