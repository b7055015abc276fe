/* tasks.h - questions about a long text whose answers lie in it, after RULER (Hsieh et al., 2024)
 * but with words of our own: made by a small generator, the same on every machine.
 * Ownership  texts are malloc'd. */
#ifndef NEAP_APPS_TASKS_H
#define NEAP_APPS_TASKS_H

#include <stddef.h>
#include <stdint.h>

enum {
    NEAP_TASK_NEEDLE,       /* a number said once, somewhere in the text */
    NEAP_TASK_MULTI_KEY,    /* one of many alike */
    NEAP_TASK_VARIABLES,    /* names that a value has been handed on to */
    NEAP_TASK_COMMON_WORDS, /* words of a list that come most often */
    NEAP_TASK_KINDS
};
#define NEAP_TASK_ANSWERS 8

typedef struct neap_task {
    char *context;  /* of about as many words as asked for */
    char *question; /* ends where the answer is to follow */
    char answers[NEAP_TASK_ANSWERS][24];
    size_t n_answers;
    size_t n_predict; /* tokens that an answer takes at most */
} neap_task;

extern const char *const neap_task_names[NEAP_TASK_KINDS];

/* Fails: -ENOMEM. */
int neap_task_make(int kind, uint32_t seed, size_t n_words, neap_task *ret_task);
void neap_task_free(neap_task *task); /* takes a zeroed one */
/* The share of the answers that the text contains. */
double neap_task_score(const neap_task *task, const char *text);
#endif
