/* token_scores.c - attention so far, scores by it, and the choice of tokens. */
#include "token_scores.h"

#include <cblas.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "neap.h"
#include "token_int.h"
#include "value.h"

/* ---- history ---- */

/* Adds share times the attention of one head's query to the tokens that it sees. */
static void add_attention(const neap_token_attention *a, float *scores, size_t n_seen, float share,
                          float *history) {
    float most = -INFINITY, sum = 0;
    for (size_t j = 0; j < n_seen; j++)
        most = fmaxf(most, scores[j] *= a->scale);
    for (size_t j = 0; j < n_seen; j++)
        sum += scores[j] = expf(scores[j] - most);
    for (size_t j = 0; j < n_seen; j++)
        history[j] += share / sum * scores[j];
}

int neap_token_history(const neap_token_attention *a, float *ret_history) {
    const size_t group = a->n_kv_heads ? a->n_heads / a->n_kv_heads : 0, d = a->head_dim;
    if (a->n == 0 || a->n_queries == 0 || group == 0) return NEAP_E_BOUND;
    for (size_t i = 0; i < a->n_queries; i++)
        if (a->n_seen[i] == 0 || a->n_seen[i] > a->n) return NEAP_E_BOUND;
    float *scores = malloc(group * a->n * sizeof *scores);
    if (!scores) return -ENOMEM;
    memset(ret_history, 0, NEAP_TOKEN_GROUPS * a->n * sizeof *ret_history);
    for (size_t g = 0; g < NEAP_TOKEN_GROUPS; g++) {
        const size_t first = g * a->n_queries / NEAP_TOKEN_GROUPS;
        const size_t end = (g + 1) * a->n_queries / NEAP_TOKEN_GROUPS;
        const size_t n_queries = end > first ? end - first : 1;
        const float share = 1 / (float)(n_queries * a->n_heads);
        for (size_t i = first; i < first + n_queries; i++)
            for (size_t kv = 0; kv < a->n_kv_heads; kv++) {
                const float *q = a->q + (i * a->n_heads + kv * group) * d;
                cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)group, (int)a->n_seen[i],
                            (int)d, 1, q, (int)d, a->k + kv * d, (int)(a->n_kv_heads * d), 0,
                            scores, (int)a->n);
                for (size_t h = 0; h < group; h++)
                    add_attention(a, scores + h * a->n, a->n_seen[i], share,
                                  ret_history + g * a->n);
            }
    }
    free(scores);
    return 0;
}

/* ---- scores ---- */

void neap_token_mass(const float *history, size_t n, float *ret_scores) {
    memset(ret_scores, 0, n * sizeof *ret_scores);
    for (size_t g = 0; g < NEAP_TOKEN_GROUPS; g++)
        for (size_t i = 0; i < n; i++)
            ret_scores[i] += history[g * n + i];
}

int neap_token_predict(const neap_token_net *net, const float *history, size_t n,
                       float *ret_scores) {
    neap_token_pass pass;
    const int err = neap_token_pass_create(n, &pass);
    if (err) return err;
    neap_token_forward(net, history, &pass);
    memcpy(ret_scores, pass.score, n * sizeof *ret_scores);
    neap_token_pass_free(&pass);
    return 0;
}

/* ---- the choice ---- */

int neap_tokens_keep(const float *scores, size_t n, size_t n_kept, uint32_t *ret_tokens,
                     size_t *ret_n) {
    const size_t first = n < NEAP_TOKEN_FIRST ? n : NEAP_TOKEN_FIRST;
    const size_t last = n - first < NEAP_TOKEN_LAST ? n - first : NEAP_TOKEN_LAST;
    const size_t n_between = n - first - last;
    const size_t wanted = n_kept > first + last ? n_kept - first - last : 0;
    const size_t n_chosen = wanted < n_between ? wanted : n_between;
    float *positive = calloc(n_between + 1, sizeof *positive);
    if (!positive) return -ENOMEM;
    float least = 0;
    for (size_t i = 0; i < n_between; i++)
        least = fminf(least, scores[first + i]);
    for (size_t i = 0; i < n_between; i++) /* what neap_value_worst orders is not negative */
        positive[i] = scores[first + i] - least;
    for (size_t i = 0; i < first; i++)
        ret_tokens[i] = (uint32_t)i;
    neap_value_worst(positive, n_between, n_chosen, ret_tokens + first);
    for (size_t i = 0; i < n_chosen; i++)
        ret_tokens[first + i] += (uint32_t)first;
    for (size_t i = 0; i < last; i++)
        ret_tokens[first + n_chosen + i] = (uint32_t)(n - last + i);
    free(positive);
    *ret_n = first + n_chosen + last;
    return 0;
}

/* ---- eviction and what follows ---- */

neap_token_split neap_tokens_split(double ratio, double most_rest, size_t n) {
    const double evicted = fmax(ratio / most_rest, fmin(ratio, 2));
    const size_t least = NEAP_TOKEN_FIRST + NEAP_TOKEN_LAST;
    size_t n_kept = (size_t)((double)n / evicted);
    if (n_kept < least) n_kept = least < n ? least : n;
    return (neap_token_split){n_kept, ratio * (double)n_kept / (double)n};
}
