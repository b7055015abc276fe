/* tasks.h - texts, each with questions whose answers lie in it, after RULER (Hsieh et al., 2024)
 * but with words of our own: made by a small generator, the same on every machine.
 * Ownership  texts are malloc'd. */
#ifndef NEAP_APPS_TASKS_H
#define NEAP_APPS_TASKS_H

#include <stddef.h>
#include <stdint.h>

/* Kinds of questions. */
enum {
    NEAP_TASK_NEEDLE,       /* a number said once, somewhere in the text, of its own sort */
    NEAP_TASK_MULTI_KEY,    /* one of many alike */
    NEAP_TASK_VARIABLES,    /* the value of a name that was handed on from others */
    NEAP_TASK_COMMON_WORDS, /* the word of a list that comes most often */
    NEAP_TASK_KINDS
};
extern const char *const neap_task_names[NEAP_TASK_KINDS];

/* Kinds of texts. */
enum {
    NEAP_TASK_LOGBOOK, /* needles, keys and variables among sentences of no matter */
    NEAP_TASK_LIST,    /* a list of words */
    NEAP_TASK_TEXTS
};

typedef struct neap_question {
    int kind;
    char text[192];  /* ends where the answer is to follow */
    char answer[24]; /* begins with a space */
} neap_question;

#define NEAP_TASK_QUESTIONS 8

typedef struct neap_task {
    char *text;
    neap_question questions[NEAP_TASK_QUESTIONS];
    size_t n_questions;
} neap_task;

/* A text of about so many words. Fails: -ENOMEM. */
int neap_task_make(int text, uint32_t seed, size_t n_words, neap_task *ret_task);
void neap_task_free(neap_task *task); /* takes a zeroed one */
#endif
