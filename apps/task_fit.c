/* task_fit.c - see task_fit.h. */
#include "task_fit.h"

#include <errno.h>
#include <stdbool.h>

#include "cli.h"

int neap_task_fit(int text, uint32_t seed, size_t n_tokens, neap_task_tokenize tokenize, void *ctx,
                  neap_task *ret_task, neap_tokens *ret_context) {
    size_t n_words = n_tokens / 2;
    for (int tries = 0;; tries++) {
        neap_task task;
        neap_tokens context = {0};
        const int err = neap_task_make(text, seed, n_words, &task);
        if (err) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(err));
        const int status = tokenize(ctx, task.text, &context);
        const bool fits = context.n <= n_tokens && (tries >= 5 || context.n >= n_tokens / 20 * 19);
        if (!status && fits) {
            *ret_task = task;
            *ret_context = context;
            return 0;
        }
        n_words = (size_t)((double)n_words * 0.98 * (double)n_tokens / (double)(context.n + 1));
        neap_tokens_free(&context);
        neap_task_free(&task);
        if (status) return status;
        if (n_words == 0)
            return neap_cli_error(NEAP_EXIT_FAILED, "a longer context, or --tasks 0",
                                  "tasks: do not fit into %zu tokens", n_tokens);
    }
}
