/* kept_context.h - what `neap bench fidelity` has computed of a model and a text, kept for its next
 * runs in the cache folder's bench: contexts that were read, and scores of the floor.
 * At most 8 GiB of contexts; those not used for the longest time go first. A file that is damaged,
 * or of another version of llama.cpp, is as good as none, and one that cannot be written is said
 * once.
 * Errors    0, or the exit status of an error that has been printed. */
#ifndef NEAP_APPS_KEPT_CONTEXT_H
#define NEAP_APPS_KEPT_CONTEXT_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cli.h"
#include "llama_session.h"

typedef struct neap_kept {
    char folder[NEAP_PATH_MAX - 256];
    char model[64];                    /* part of the files' names */
    const volatile sig_atomic_t *stop; /* set: reading ends early, as failed; nothing is printed */
    bool has_warned;
} neap_kept;

/* weights: "f32" or "own". The folder is made. */
int neap_kept_open(const char *model_path, const char *weights, neap_kept *ret_kept);

/* The session's context becomes these tokens, the last NEAP_SESSION_WINDOW of them read watched.
 * Those before come from a kept context, the longest that they begin with, and are kept. */
int neap_kept_read(neap_kept *kept, neap_session *session, const int32_t *tokens, size_t n);

/* n_bytes of what was found out about n tokens; false: it is not kept. */
bool neap_kept_find(const neap_kept *kept, const char *what, const int32_t *tokens, size_t n,
                    void *ret_bytes, size_t n_bytes);
void neap_kept_put(neap_kept *kept, const char *what, const int32_t *tokens, size_t n,
                   const void *bytes, size_t n_bytes);
#endif
