/* fidelity_score.h - how far a model's expectations have moved: for each token of each text the KL
 * divergence, what the true next token costs, and whether the likeliest one is the same. Pure. */
#ifndef NEAP_APPS_FIDELITY_SCORE_H
#define NEAP_APPS_FIDELITY_SCORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

size_t neap_likeliest(const float *logits, size_t n_vocab);

typedef struct neap_token_score {
    double kl;   /* of the expectation from the exact one, nats */
    double cost; /* -log of the next token's probability, less that of the exact run */
    bool agrees; /* the same token is the likeliest */
} neap_token_score;

/* logits[n][n_vocab] of both runs; next[n]: the tokens that came. */
void neap_token_scores(const float *exact, const float *logits, const int32_t *next, size_t n,
                       size_t n_vocab, neap_token_score *ret_scores);

typedef struct neap_fidelity {
    double kl, kl_low, kl_high; /* mean over all tokens, 95 % */
    double ppl_ratio, top1_agreement;
} neap_fidelity;

/* scores[n_texts][n_tokens]. The interval is a bootstrap in two steps, texts and then tokens of
 * each: tokens of one text are alike, and it is other texts that the mean is to hold for. */
neap_fidelity neap_fidelity_summarise(const neap_token_score *scores, size_t n_texts,
                                      size_t n_tokens);
#endif
