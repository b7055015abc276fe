/* fidelity_score.c - see fidelity_score.h. */
#include "fidelity_score.h"

#include <math.h>
#include <stdlib.h>

#define RESAMPLES 2000

size_t neap_likeliest(const float *logits, size_t n) {
    size_t best = 0;
    for (size_t i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

/* log of the sum of exp(logits). */
static double log_sum(const float *logits, size_t n) {
    const double most = (double)logits[neap_likeliest(logits, n)];
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += exp((double)logits[i] - most);
    return most + log(sum);
}

void neap_token_scores(const float *exact, const float *logits, const int32_t *next, size_t n,
                       size_t n_vocab, neap_token_score *ret_scores) {
    for (size_t t = 0; t < n; t++, exact += n_vocab, logits += n_vocab) {
        const double p_sum = log_sum(exact, n_vocab), q_sum = log_sum(logits, n_vocab);
        double kl = 0;
        for (size_t i = 0; i < n_vocab; i++) {
            const double p = (double)exact[i] - p_sum;
            kl += exp(p) * (p - ((double)logits[i] - q_sum));
        }
        ret_scores[t] = (neap_token_score){
            .kl = kl,
            .cost = ((double)exact[next[t]] - p_sum) - ((double)logits[next[t]] - q_sum),
            .agrees = neap_likeliest(exact, n_vocab) == neap_likeliest(logits, n_vocab)};
    }
}

static size_t pick(uint64_t *state, size_t n) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (size_t)((*state >> 32) * n >> 32);
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double resample(const neap_token_score *scores, size_t n_texts, size_t n_tokens,
                       uint64_t *state) {
    double sum = 0;
    for (size_t i = 0; i < n_texts; i++) {
        const neap_token_score *text = scores + pick(state, n_texts) * n_tokens;
        for (size_t t = 0; t < n_tokens; t++)
            sum += text[pick(state, n_tokens)].kl;
    }
    return sum / (double)(n_texts * n_tokens);
}

neap_fidelity neap_fidelity_summarise(const neap_token_score *scores, size_t n_texts,
                                      size_t n_tokens) {
    const size_t n = n_texts * n_tokens;
    double means[RESAMPLES], cost = 0;
    size_t same = 0;
    neap_fidelity f = {0};
    uint64_t state = 1;
    if (n == 0) return f;
    for (size_t i = 0; i < n; i++) {
        f.kl += scores[i].kl / (double)n;
        cost += scores[i].cost / (double)n;
        same += scores[i].agrees;
    }
    for (size_t i = 0; i < RESAMPLES; i++)
        means[i] = resample(scores, n_texts, n_tokens, &state);
    qsort(means, RESAMPLES, sizeof *means, by_value);
    f.kl_low = means[RESAMPLES / 40];
    f.kl_high = means[RESAMPLES - 1 - RESAMPLES / 40];
    f.ppl_ratio = exp(cost);
    f.top1_agreement = (double)same / (double)n;
    return f;
}
