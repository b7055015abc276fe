/* test_fidelity.c - the figures of `neap bench fidelity`: divergence, costs and intervals against
 * values worked out by hand; tasks whose answers lie in their texts. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "fidelity_score.h"
#include "tasks.h"

static bool is_near(double x, double wanted) {
    return fabs(x - wanted) < 1e-6;
}

static void divergence(void) {
    /* p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4); a constant added to logits changes nothing. */
    const float p[] = {3 + logf(2), 3, 3}, q[] = {0, logf(2), 0};
    const float exact[] = {p[0], p[1], p[2], p[0], p[1], p[2]};
    const float other[] = {p[0] + 5, p[1] + 5, p[2] + 5, q[0], q[1], q[2]};
    const int32_t next[] = {1, 0};
    neap_token_score scores[2];
    neap_token_scores(exact, other, next, 2, 3, scores);
    CHECK(is_near(scores[0].kl, 0) && is_near(scores[0].cost, 0) && scores[0].agrees);
    CHECK(is_near(scores[1].kl, 0.25 * log(2)));
    CHECK(is_near(scores[1].cost, log(2)) && !scores[1].agrees);
    const neap_fidelity f = neap_fidelity_summarise(scores, 1, 2);
    CHECK(is_near(f.kl, 0.125 * log(2)) && is_near(f.ppl_ratio, sqrt(2)));
    CHECK(is_near(f.top1_agreement, 0.5));
}

/* Two texts that differ: the interval must reach from one to the other, however many tokens. */
static void interval(void) {
    enum { TEXTS = 6, TOKENS = 200 };
    static neap_token_score scores[TEXTS * TOKENS];
    for (size_t i = 0; i < TEXTS * TOKENS; i++)
        scores[i].kl = 1;
    neap_fidelity f = neap_fidelity_summarise(scores, TEXTS, TOKENS);
    CHECK(is_near(f.kl, 1) && is_near(f.kl_low, 1) && is_near(f.kl_high, 1));
    for (size_t i = 0; i < TEXTS * TOKENS; i++)
        scores[i].kl = i / TOKENS % 2 ? 3 : 1;
    f = neap_fidelity_summarise(scores, TEXTS, TOKENS);
    CHECK(is_near(f.kl, 2) && f.kl_low < 1.5 && f.kl_high > 2.5);
    CHECK(f.kl_low >= 1 && f.kl_high <= 3);
}

static size_t times(const char *text, const char *what) {
    size_t n = 0;
    for (const char *at = text; (at = strstr(at, what)); at++)
        n++;
    return n;
}

static bool same_tasks(const neap_task *a, const neap_task *b) {
    return strcmp(a->text, b->text) == 0 && a->n_questions == b->n_questions &&
           memcmp(a->questions, b->questions, sizeof a->questions) == 0;
}

/* The same text and questions again; other ones with another seed; of every kind there is one. */
static void tasks(void) {
    size_t n_of_kind[NEAP_TASK_KINDS] = {0};
    for (int text = 0; text < NEAP_TASK_TEXTS; text++) {
        neap_task task, again, other;
        CHECK(neap_task_make(text, 1, 900, &task) == 0);
        CHECK(neap_task_make(text, 1, 900, &again) == 0);
        CHECK(neap_task_make(text, 2, 900, &other) == 0);
        CHECK(same_tasks(&task, &again) && !same_tasks(&task, &other));
        for (size_t i = 0; i < task.n_questions; i++) {
            const neap_question *question = &task.questions[i];
            n_of_kind[question->kind]++;
            CHECK(*question->answer == ' ' && strlen(question->answer) > 1);
            CHECK(times(question->text, question->answer) == 0);
            CHECK(times(task.text, question->answer) >= 1);
        }
        neap_task_free(&task);
        neap_task_free(&again);
        neap_task_free(&other);
    }
    for (int kind = 0; kind < NEAP_TASK_KINDS; kind++)
        CHECK(n_of_kind[kind] >= 1);
}

/* What is asked for is said once, behind what it is the value of, anywhere in the text. */
static void needles(void) {
    double least = 1, most = 0;
    for (uint32_t seed = 1; seed <= 20; seed++) {
        neap_task task;
        CHECK(neap_task_make(NEAP_TASK_LOGBOOK, seed, 900, &task) == 0);
        for (size_t i = 0; i < task.n_questions; i++) {
            const neap_question *question = &task.questions[i];
            if (question->kind == NEAP_TASK_VARIABLES) continue;
            char line[200];
            snprintf(line, sizeof line, "%s%s.", strstr(question->text, "Answer: ") + 8,
                     question->answer);
            const char *at = strstr(task.text, line);
            CHECK(at && times(task.text, question->answer) == 1);
            const double where = (double)(at - task.text) / (double)strlen(task.text);
            least = where < least ? where : least;
            most = where > most ? where : most;
        }
        neap_task_free(&task);
    }
    CHECK(least < 0.1 && most > 0.9);
}

/* The word asked for comes most often in the list. */
static void common_words(void) {
    neap_task task;
    CHECK(neap_task_make(NEAP_TASK_LIST, 3, 900, &task) == 0);
    CHECK(task.n_questions == 1);
    const size_t n = times(task.text, task.questions[0].answer);
    CHECK(n > 900 / 5 && n < 900 / 2); /* the others come 26 times */
    neap_task_free(&task);
}

int main(void) {
    divergence();
    interval();
    tasks();
    needles();
    common_words();
    return 0;
}
