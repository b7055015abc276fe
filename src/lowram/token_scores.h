/* token_scores.h - which tokens of a context to keep (LowRAM-E, paper 4.1): the first and the last,
 * and those that later tokens will look at, by what the last ones looked at.
 *
 * A layer's *history* is the attention of the latest queries, in groups of equal size from the
 * oldest to the newest, to each token, averaged over queries and heads. From it either the mass of
 * all groups is taken, or a small convolutional network over tokens predicts the attention to come.
 *
 * Shapes     history [NEAP_TOKEN_GROUPS][n] f32, not negative, row-major.
 * Errors     0 or negative (neap.h).
 * Threads    pure. */
#ifndef NEAP_LOWRAM_TOKEN_SCORES_H
#define NEAP_LOWRAM_TOKEN_SCORES_H

#include <stddef.h>
#include <stdint.h>

enum {
    NEAP_TOKEN_GROUPS = 8,
    NEAP_TOKEN_FIRST = 8, /* always kept */
    NEAP_TOKEN_LAST = 64,
    NEAP_TOKEN_TAPS = 5,      /* of both convolutions */
    NEAP_TOKEN_CHANNELS = 16, /* of the hidden layers */
    NEAP_TOKEN_INPUTS = NEAP_TOKEN_GROUPS + 1,
    /* weights and biases of 9 x 5 -> 16, 16 x 5 -> 16, 16 -> 1 */
    NEAP_TOKEN_PARAMS = (NEAP_TOKEN_INPUTS * NEAP_TOKEN_TAPS + 1) * NEAP_TOKEN_CHANNELS +
                        (NEAP_TOKEN_CHANNELS * NEAP_TOKEN_TAPS + 1) * NEAP_TOKEN_CHANNELS +
                        NEAP_TOKEN_CHANNELS + 1,
};

typedef struct neap_token_attention {
    size_t n, n_queries; /* tokens; the latest queries, in order */
    uint32_t n_heads, n_kv_heads, head_dim;
    float scale;            /* of the scores */
    const float *q;         /* [n_queries][n_heads][head_dim] after RoPE */
    const float *k;         /* [n][n_kv_heads][head_dim] after RoPE */
    const uint32_t *n_seen; /* [n_queries] tokens that a query sees: the first so many */
} neap_token_attention;

/* With fewer queries than groups the same queries count in several. Fails: NEAP_E_BOUND (nothing to
 * look at); -ENOMEM. */
int neap_token_history(const neap_token_attention *attention, float *ret_history);

/* ---- scores[n] ---- */

/* The attention in all groups. */
void neap_token_mass(const float *history, size_t n, float *ret_scores);

typedef struct neap_token_net {
    float params[NEAP_TOKEN_PARAMS]; /* all zero: the mean of the groups' logarithms */
} neap_token_net;
/* The logarithm of the attention to come. Fails: -ENOMEM. */
int neap_token_predict(const neap_token_net *net, const float *history, size_t n,
                       float *ret_scores);

/* The n_kept tokens to keep, ascending: the first and the last ones, then those with the highest
 * scores, of equals the first. Returns how many: n_kept, but no fewer than those kept always and no
 * more than there are. ret_tokens: room for n. Fails: -ENOMEM. */
int neap_tokens_keep(const float *scores, size_t n, size_t n_kept, uint32_t *ret_tokens,
                     size_t *ret_n);

/* ---- eviction and what follows ---- */

typedef struct neap_token_split {
    size_t n_kept;
    double rest; /* what the kept tokens are to be compressed by */
} neap_token_split;

/* Divides a ratio - f16 bytes of all n tokens over the bytes kept - as the paper does (Tables 10
 * and 11): half of the tokens go, and more than half where the rest would be compressed by more
 * than most_rest; 1: eviction alone. Tokens that are kept always are the rest's to make up for. */
neap_token_split neap_tokens_split(double ratio, double most_rest, size_t n);

/* ---- training ---- */

typedef struct neap_token_sample {
    const float *history;
    const float *future; /* [n] attention of later queries, averaged as the history is */
    size_t n;
} neap_token_sample;

typedef struct neap_token_training {
    uint32_t passes; /* over the samples */
    double rate;
    uint64_t seed;
} neap_token_training;
neap_token_training neap_token_training_defaults(void);

/* The errors are mean squares of the logarithms: in the last pass, and of a net of zeros. Fails:
 * NEAP_E_BOUND (no samples, or an empty one); -EDOM (not finite); -ENOMEM. */
int neap_token_train(const neap_token_sample *samples, size_t n_samples,
                     const neap_token_training *training, neap_token_net *ret_net,
                     double *ret_error, double *ret_untrained_error);
#endif
