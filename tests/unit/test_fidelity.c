/* test_fidelity.c - the figures of `neap bench fidelity`: divergence, costs and intervals against
 * values worked out by hand; tasks whose answers lie in their texts. */
#include <math.h>
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

static void tasks(void) {
    for (int kind = 0; kind < NEAP_TASK_KINDS; kind++) {
        neap_task task, again, other;
        CHECK(neap_task_make(kind, 1, 900, &task) == 0);
        CHECK(neap_task_make(kind, 1, 900, &again) == 0);
        CHECK(neap_task_make(kind, 2, 900, &other) == 0);
        CHECK(strcmp(task.context, again.context) == 0 &&
              strcmp(task.question, again.question) == 0);
        CHECK(strcmp(task.context, other.context) != 0);
        CHECK(task.n_answers >= 1 && task.n_predict > 0);
        CHECK(neap_task_score(&task, task.context) == 1);
        CHECK(neap_task_score(&task, "") == 0);
        for (size_t i = 0; i < task.n_answers; i++) {
            CHECK(strstr(task.question, task.answers[i]) == NULL);
            CHECK(is_near(neap_task_score(&task, task.answers[i]), 1.0 / (double)task.n_answers));
        }
        neap_task_free(&task);
        neap_task_free(&again);
        neap_task_free(&other);
    }
}

/* The common words of the list are those that come most often in it. */
static void common_words(void) {
    neap_task task;
    CHECK(neap_task_make(NEAP_TASK_COMMON_WORDS, 3, 900, &task) == 0);
    for (size_t i = 0; i < task.n_answers; i++) {
        size_t n = 0;
        for (const char *at = task.context; (at = strstr(at, task.answers[i])); at++)
            n++;
        CHECK(n > 900 / 10); /* of 24 words the others come 23 times */
    }
    neap_task_free(&task);
}

int main(void) {
    divergence();
    interval();
    tasks();
    common_words();
    return 0;
}
