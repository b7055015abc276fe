/* token_int.h - what the files of the network for token scores share. */
#ifndef NEAP_LOWRAM_TOKEN_INT_H
#define NEAP_LOWRAM_TOKEN_INT_H

#include "token_scores.h"

/* How the network sees attention: 0 is an equal share of it, 1 is 16 times that. */
float neap_token_log(float attention, size_t n);

/* One sequence on its way through the network; one allocation that begins at input. */
typedef struct neap_token_pass {
    size_t n;
    float *input;      /* [n][INPUTS] */
    float *columns[2]; /* [n][inputs or channels * TAPS]: what each convolution sees of a token */
    float *hidden[2];  /* [n][CHANNELS] */
    float *score;      /* [n] */
} neap_token_pass;
int neap_token_pass_create(size_t n, neap_token_pass *ret_pass);
void neap_token_pass_free(neap_token_pass *pass);
void neap_token_forward(const neap_token_net *net, const float *history, neap_token_pass *pass);

/* The layers' parameters within params: weights [taps * inputs][CHANNELS], then biases. */
enum {
    NEAP_TOKEN_IN_0 = NEAP_TOKEN_INPUTS * NEAP_TOKEN_TAPS,
    NEAP_TOKEN_IN_1 = NEAP_TOKEN_CHANNELS * NEAP_TOKEN_TAPS,
    NEAP_TOKEN_BIAS_0 = NEAP_TOKEN_IN_0 * NEAP_TOKEN_CHANNELS,
    NEAP_TOKEN_LAYER_1 = NEAP_TOKEN_BIAS_0 + NEAP_TOKEN_CHANNELS,
    NEAP_TOKEN_BIAS_1 = NEAP_TOKEN_LAYER_1 + NEAP_TOKEN_IN_1 * NEAP_TOKEN_CHANNELS,
    NEAP_TOKEN_LAYER_2 = NEAP_TOKEN_BIAS_1 + NEAP_TOKEN_CHANNELS,
};

/* The gradient of the mean squared error of the scores, error[n] = score - wanted, added to
 * gradient[NEAP_TOKEN_PARAMS]. The pass's hidden layers and columns are overwritten. */
void neap_token_backward(const neap_token_net *net, const float *error, neap_token_pass *pass,
                         float *gradient);
#endif
