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

/* What needles are. */
static const char *const things[] = {"pass code of the old vault", "licence number of the ferry",
                                     "call sign of the blue boat"};
#define N_NEEDLES (sizeof things / sizeof *things)
static const char *const cities[] = {"Lisbon", "Oslo",    "Cairo", "Lima",
                                     "Dublin", "Nairobi", "Quito", "Vienna"};
#define N_CITIES (sizeof cities / sizeof *cities)
static const char *const names[] = {"ALPHA", "BRAVO", "DELTA", "GOLF",   "HOTEL", "KILO",
                                    "LIMA",  "OSCAR", "ROMEO", "SIERRA", "TANGO", "VICTOR"};
#define N_NAMES (sizeof names / sizeof *names)
static const char *const words[] = {"apple",  "bridge", "candle",   "desert", "engine", "forest",
                                    "garden", "hammer", "island",   "jacket", "kettle", "ladder",
                                    "marble", "needle", "orange",   "pencil", "quartz", "ribbon",
                                    "saddle", "timber", "umbrella", "velvet", "window", "yellow"};
#define N_WORDS (sizeof words / sizeof *words)
#define N_KEYS_ASKED 3
#define N_CHAIN 2       /* variables: the first has a value, each other that of the one before */
#define TIMES_COMMON 12 /* as often as the other words does the common one come */
#define N_LINES (N_NEEDLES + N_CITIES + N_CHAIN)

#define WHAT_BYTES 64
#define LINE_BYTES 96
#define VALUE_BYTES 20

#define TEXT_STEP 65536u

typedef struct maker {
    uint32_t state;
    char *text;
    size_t len, cap;
    bool failed;
    char lines[N_LINES][LINE_BYTES]; /* to be hidden in a logbook */
    size_t n_lines;
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

/* The ordinary text with the lines in it, spread over its length in that order. */
static void hide(maker *m, const uint32_t *order, size_t n_words) {
    char *around = neap_text_generate(n_words);
    if (!around) m->failed = true;
    if (!around) return;
    const size_t len = strlen(around);
    size_t done = 0;
    for (size_t i = 0; i < N_LINES; i++) {
        /* Somewhere in the line's own part of the text, after a sentence. */
        const size_t at = len / N_LINES * i + next(m, len / N_LINES + 1);
        const char *end = strstr(around + (at > done ? at : done), ". ");
        const size_t to = end ? (size_t)(end - around) + 2 : len;
        add(m, around + done, to - done);
        add(m, m->lines[order[i]], strlen(m->lines[order[i]]));
        done = to;
    }
    add(m, around + done, len - done);
    free(around);
}

/* Six digits: a small model finds them more often than four, or than words, which may follow "is"
 * in many ways. */
static void pick_value(maker *m, char value[VALUE_BYTES]) {
    snprintf(value, VALUE_BYTES, "%u", 100000 + next(m, 900000));
}

static void ask(neap_task *task, int kind, const char *what, const char *value) {
    neap_question *question = &task->questions[task->n_questions++];
    question->kind = kind;
    snprintf(question->text, sizeof question->text,
             "\n\nQuestion: What is the %s?\nAnswer: The %s is", what, what);
    snprintf(question->answer, sizeof question->answer, " %s", value);
}

/* Lines of values, the first n_asked of which are asked for. */
static void make_values(maker *m, neap_task *task, int kind, size_t n, size_t n_asked) {
    uint32_t order[N_CITIES];
    char what[WHAT_BYTES], value[VALUE_BYTES];
    shuffle(m, order, n);
    for (size_t i = 0; i < n; i++) {
        if (kind == NEAP_TASK_NEEDLE)
            snprintf(what, sizeof what, "%s", things[order[i]]);
        else
            snprintf(what, sizeof what, "secret number of %s", cities[order[i]]);
        pick_value(m, value);
        snprintf(m->lines[m->n_lines++], LINE_BYTES, "The %s is %s. ", what, value);
        if (i < n_asked) ask(task, kind, what, value);
    }
}

static void make_variables(maker *m, neap_task *task) {
    uint32_t order[N_NAMES];
    char what[WHAT_BYTES], value[VALUE_BYTES];
    shuffle(m, order, N_NAMES);
    pick_value(m, value);
    for (size_t i = 0; i < N_CHAIN; i++) {
        char *line = m->lines[m->n_lines++];
        snprintf(what, sizeof what, "value of the variable %s", names[order[i]]);
        if (i == 0)
            snprintf(line, LINE_BYTES, "The %s is %s. ", what, value);
        else
            snprintf(line, LINE_BYTES, "The %s is that of %s. ", what, names[order[i - 1]]);
    }
    ask(task, NEAP_TASK_VARIABLES, what, value);
}

/* Lines in any order, but the variables' in their own. */
static void order_lines(maker *m, uint32_t order[N_LINES]) {
    const uint32_t first = N_LINES - N_CHAIN;
    uint32_t n = first;
    shuffle(m, order, N_LINES);
    for (size_t i = 0; i < N_LINES; i++)
        if (order[i] >= first) order[i] = n++;
}

static void make_logbook(maker *m, neap_task *task, size_t n_words) {
    uint32_t order[N_LINES];
    make_values(m, task, NEAP_TASK_NEEDLE, N_NEEDLES, N_NEEDLES);
    make_values(m, task, NEAP_TASK_MULTI_KEY, N_CITIES, N_KEYS_ASKED);
    make_variables(m, task);
    order_lines(m, order);
    hide(m, order, n_words);
}

static void make_list(maker *m, neap_task *task, size_t n_words) {
    neap_question *question = &task->questions[task->n_questions++];
    const uint32_t common = next(m, N_WORDS);
    for (size_t i = 1; i <= n_words; i++) {
        const uint32_t lot = next(m, N_WORDS - 1 + TIMES_COMMON);
        const char *word = words[lot < N_WORDS ? lot : common];
        char line[48];
        add(m, line, (size_t)snprintf(line, sizeof line, "%zu. %s ", i, word));
    }
    question->kind = NEAP_TASK_COMMON_WORDS;
    snprintf(question->text, sizeof question->text,
             "\n\nQuestion: Which word comes most often in the list?\nAnswer: The word that comes "
             "most often in the list is");
    snprintf(question->answer, sizeof question->answer, " %s", words[common]);
}

int neap_task_make(int text, uint32_t seed, size_t n_words, neap_task *ret_task) {
    neap_task task = {0};
    maker m = {.state = seed * 2654435761u + (uint32_t)text};
    if (text == NEAP_TASK_LOGBOOK)
        make_logbook(&m, &task, n_words);
    else
        make_list(&m, &task, n_words);
    task.text = m.text;
    if (m.failed || !task.text) {
        neap_task_free(&task);
        return -ENOMEM;
    }
    *ret_task = task;
    return 0;
}

void neap_task_free(neap_task *task) {
    free(task->text);
    *task = (neap_task){0};
}
