/* tasks.c - see tasks.h. The text around what is asked for is that of neap_text_generate(), so that
 * nothing else in it looks like an answer. */
#include "tasks.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

const char *const neap_task_names[NEAP_TASK_KINDS] = {"needle", "multi-key", "variables",
                                                      "common-words"};

static const char *const cities[] = {"Lisbon",  "Oslo",  "Cairo",  "Lima",   "Hanoi", "Dublin",
                                     "Nairobi", "Quito", "Vienna", "Athens", "Tunis", "Riga"};
#define N_CITIES (sizeof cities / sizeof *cities)
static const char *const names[] = {"ALPHA", "BRAVO", "DELTA", "GOLF",   "HOTEL", "KILO",
                                    "LIMA",  "OSCAR", "ROMEO", "SIERRA", "TANGO", "VICTOR"};
#define N_NAMES (sizeof names / sizeof *names)
static const char *const words[] = {"apple",  "bridge", "candle",   "desert", "engine", "forest",
                                    "garden", "hammer", "island",   "jacket", "kettle", "ladder",
                                    "marble", "needle", "orange",   "pencil", "quartz", "ribbon",
                                    "saddle", "timber", "umbrella", "velvet", "window", "yellow"};
#define N_WORDS (sizeof words / sizeof *words)
#define N_HOPS 3       /* assignments of a chain of variables after the first */
#define N_COMMON 3     /* words that come often */
#define TIMES_COMMON 6 /* as often as the others */

#define TEXT_STEP 65536u

typedef struct maker {
    uint32_t state;
    char *text;
    size_t len, cap;
    bool failed;
} maker;

static uint32_t next(maker *m, size_t n) {
    m->state = m->state * 1664525u + 1013904223u;
    return (uint32_t)((uint64_t)(m->state >> 8) * n >> 24);
}

static void add(maker *m, const char *text, size_t len) {
    while (!m->failed && m->cap - m->len <= len) {
        char *larger = realloc(m->text, m->cap + TEXT_STEP);
        if (!larger) m->failed = true;
        if (!larger) return;
        m->text = larger;
        m->cap += TEXT_STEP;
    }
    if (m->failed) return;
    memcpy(m->text + m->len, text, len);
    m->len += len;
    m->text[m->len] = '\0';
}

/* A random order of 0 .. n - 1, n at most 32. */
static void shuffle(maker *m, uint32_t *order, size_t n) {
    for (uint32_t i = 0; i < n; i++)
        order[i] = i;
    for (size_t i = n; i > 1; i--) {
        const uint32_t j = next(m, i), was = order[i - 1];
        order[i - 1] = order[j];
        order[j] = was;
    }
}

/* The ordinary text with the lines in it, spread over its length in their order. */
static void hide(maker *m, char lines[][80], size_t n_lines, size_t n_words) {
    char *around = neap_text_generate(n_words);
    if (!around) m->failed = true;
    if (!around) return;
    const size_t len = strlen(around);
    size_t done = 0;
    for (size_t i = 0; i < n_lines; i++) {
        /* Somewhere in the line's own part of the text, after a sentence. */
        size_t at = len / n_lines * i + next(m, len / n_lines + 1);
        const char *end = strstr(around + (at > done ? at : done), ". ");
        at = end ? (size_t)(end - around) + 2 : len;
        add(m, around + done, at - done);
        add(m, lines[i], strlen(lines[i]));
        done = at;
    }
    add(m, around + done, len - done);
    free(around);
}

static void make_needles(maker *m, size_t n, size_t n_words, neap_task *task) {
    char lines[N_CITIES][80];
    uint32_t order[N_CITIES];
    shuffle(m, order, N_CITIES);
    const uint32_t asked = next(m, n);
    for (uint32_t i = 0; i < n; i++) {
        const unsigned number = 100000 + next(m, 900000);
        snprintf(lines[i], sizeof *lines, "The secret number of %s is %u. ", cities[order[i]],
                 number);
        if (i == asked) snprintf(task->answers[0], sizeof *task->answers, "%u", number);
    }
    hide(m, lines, n, n_words);
    task->n_answers = 1;
    task->n_predict = 12;
    task->question = malloc(160);
    if (task->question)
        snprintf(task->question, 160,
                 "\n\nQuestion: What is the secret number of %s?\nAnswer: The secret number of %s "
                 "is",
                 cities[order[asked]], cities[order[asked]]);
}

/* Two chains, one of which is asked for. */
static void make_variables(maker *m, size_t n_words, neap_task *task) {
    enum { CHAIN = N_HOPS + 1, LINES = 2 * CHAIN };
    char lines[LINES][80];
    uint32_t order[N_NAMES];
    unsigned values[2];
    shuffle(m, order, N_NAMES);
    for (uint32_t i = 0; i < LINES; i++) {
        const char *name = names[order[i]];
        if (i < 2) {
            values[i] = 10000 + next(m, 90000);
            snprintf(lines[i], sizeof *lines, "Set the variable %s to %u. ", name, values[i]);
        } else {
            snprintf(lines[i], sizeof *lines, "Set the variable %s to the value of %s. ", name,
                     names[order[i - 2]]);
        }
        if (i % 2 == 0)
            snprintf(task->answers[task->n_answers++], sizeof *task->answers, "%s", name);
    }
    hide(m, lines, LINES, n_words);
    task->n_predict = 32;
    task->question = malloc(200);
    if (task->question)
        snprintf(task->question, 200,
                 "\n\nQuestion: Which variables have the value %u?\nAnswer: The %d variables that "
                 "have the value %u are",
                 values[0], CHAIN, values[0]);
}

static void make_common_words(maker *m, size_t n_words, neap_task *task) {
    uint32_t order[N_WORDS];
    const size_t n_lots = N_WORDS - N_COMMON + N_COMMON * TIMES_COMMON;
    shuffle(m, order, N_WORDS);
    for (size_t i = 1; i <= n_words; i++) {
        const uint32_t lot = next(m, n_lots);
        const size_t which = lot < N_COMMON * TIMES_COMMON
                                 ? lot / TIMES_COMMON
                                 : lot - N_COMMON * TIMES_COMMON + N_COMMON;
        char line[48];
        add(m, line, (size_t)snprintf(line, sizeof line, "%zu. %s ", i, words[order[which]]));
    }
    for (size_t i = 0; i < N_COMMON; i++)
        snprintf(task->answers[task->n_answers++], sizeof *task->answers, "%s", words[order[i]]);
    task->n_predict = 24;
    task->question = malloc(160);
    if (task->question)
        snprintf(task->question, 160,
                 "\n\nQuestion: Which %d words come most often in the list?\nAnswer: The %d words "
                 "that come most often in the list are",
                 N_COMMON, N_COMMON);
}

int neap_task_make(int kind, uint32_t seed, size_t n_words, neap_task *ret_task) {
    neap_task task = {0};
    maker m = {.state = seed * 2654435761u + (uint32_t)kind};
    if (kind == NEAP_TASK_NEEDLE)
        make_needles(&m, 1, n_words, &task);
    else if (kind == NEAP_TASK_MULTI_KEY)
        make_needles(&m, N_CITIES, n_words, &task);
    else if (kind == NEAP_TASK_VARIABLES)
        make_variables(&m, n_words, &task);
    else
        make_common_words(&m, n_words, &task);
    task.context = m.text;
    if (m.failed || !task.context || !task.question) {
        neap_task_free(&task);
        return -ENOMEM;
    }
    *ret_task = task;
    return 0;
}

void neap_task_free(neap_task *task) {
    free(task->context);
    free(task->question);
    *task = (neap_task){0};
}

double neap_task_score(const neap_task *task, const char *text) {
    size_t n = 0;
    for (size_t i = 0; i < task->n_answers; i++)
        n += strstr(text, task->answers[i]) != NULL;
    return (double)n / (double)task->n_answers;
}
