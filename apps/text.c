/* text.c - text to fill a context with: a harbour's logbook, written by a small generator, so that
 * no two sentences are alike and every machine reads the same. */
#include <stdlib.h>

#include "cli.h"

static uint32_t next(uint32_t *state, uint32_t n) {
    *state = *state * 1664525u + 1013904223u;
    return (*state >> 16) % n;
}

static const char *pick(uint32_t *state, const char *const *words, size_t n) {
    return words[next(state, (uint32_t)n)];
}

#define PICK(state, words) pick(state, words, sizeof(words) / sizeof((words)[0]))

static const char *const people[] = {"the harbour master",    "the pilot",  "an old sailor",
                                     "the lighthouse keeper", "the cook",   "a young captain",
                                     "the sail maker",        "a merchant", "the doctor"};
static const char *const deeds[] = {"counted",  "repaired", "sold",      "painted", "found",
                                    "borrowed", "unloaded", "inspected", "promised"};
static const char *const things[] = {
    "barrels of salt", "coils of rope", "lanterns",     "crates of tea",  "anchors",
    "oak planks",      "letters",       "fishing nets", "sacks of flour", "brass bells"};
static const char *const places[] = {"on the north quay",  "below the lighthouse",
                                     "in the old store",   "behind the chapel",
                                     "at the fish market", "by the dry dock"};
static const char *const winds[] = {
    "the wind came from the west", "fog lay over the water", "the tide was lower than usual",
    "rain fell until noon",        "the sea was calm",       "a storm kept the boats in"};

#define SENTENCE_WORDS 22
#define SENTENCE_BYTES 256

char *neap_text_generate(size_t n_words) {
    const size_t n = n_words / SENTENCE_WORDS + 1;
    char *text = malloc(n * SENTENCE_BYTES + 1);
    if (!text) return NULL;
    uint32_t state = 20251;
    size_t len = 0;
    text[0] = '\0';
    for (size_t day = 1; day <= n; day++) {
        const char *wind = PICK(&state, winds), *who = PICK(&state, people);
        const char *did = PICK(&state, deeds), *what = PICK(&state, things);
        const unsigned count = 2 + next(&state, 90), hour = 5 + next(&state, 15);
        const char *where = PICK(&state, places);
        len += (size_t)snprintf(text + len, SENTENCE_BYTES,
                                "On day %zu %s, and at %u o'clock %s %s %u %s %s. ", day, wind,
                                hour, who, did, count, what, where);
    }
    return text;
}
