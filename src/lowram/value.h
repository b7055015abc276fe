/* value.h - values predicted from keys, for a layer and KV head (LowRAM 3.2, Appendix B):
 *     v ~ W2 relu(W1 k + b1) + b2 + Wlin k
 * fitted to a context; what is predicted worst keeps its residual.
 *
 * Keys       [n][row] f32: before RoPE, as they will be reconstructed. row is dk, or wider where
 *            Wlin sees all heads of the layer.
 * Values     [n][dv] f32.
 * Fits       see keys whose elements have mean 0 and deviation 1, values of mean 0 and mean square
 *            1; the predictor that they give takes keys as they are.
 * Errors     0 or negative (neap.h); on failure a predictor is what it was.
 * Threads    pure; BLAS has threads of its own. The same input gives the same predictor. */
#ifndef NEAP_LOWRAM_VALUE_H
#define NEAP_LOWRAM_VALUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { NEAP_VALUE_WIDTH = 4096 }; /* most elements of a row, of a value, and hidden units */

typedef struct neap_value_shape {
    uint32_t dk, dv;
    uint32_t hidden; /* 0: only the linear branch */
    uint32_t row;    /* elements of a row of keys; 0: dk */
    uint32_t first;  /* the MLP sees elements [first, first + dk) of a row */
    uint32_t d_lin;  /* the linear branch sees the first d_lin elements; 0: no such branch */
} neap_value_shape;

/* The parameters lie in this order in one allocation that begins at w1. */
typedef struct neap_value {
    neap_value_shape shape;
    float *w1;   /* [hidden][dk] */
    float *b1;   /* [hidden] */
    float *w2;   /* [hidden][dv] */
    float *b2;   /* [dv] */
    float *wlin; /* [d_lin][dv] */
} neap_value;

/* One head alone, with a linear branch. */
neap_value_shape neap_value_shape_of(uint32_t dk, uint32_t dv, uint32_t hidden);
size_t neap_value_n_params(const neap_value_shape *shape);
/* All parameters 0. Fails: NEAP_E_BOUND (a shape without output or beyond NEAP_VALUE_WIDTH);
 * -ENOMEM. */
int neap_value_create(const neap_value_shape *shape, neap_value *ret_value);
void neap_value_free(neap_value *value); /* takes one that is all zero */

/* predicted: [n][dv]. */
void neap_value_predict(const neap_value *value, const float *keys, size_t n, float *ret_predicted);

/* The same function of keys less mean [row]. */
void neap_value_less_mean(const float *mean, neap_value *io);

/* ---- fitting ---- */

enum {
    /* Least squares with a small penalty for [Wlin, W2, b2], given W1 and b1, in closed form; then
     * steps on W1, b1, the others solved for in each (variable projection). */
    NEAP_VALUE_RIDGE = 0,
    NEAP_VALUE_ADAM, /* steps on all parameters, the whole context in each, as in the paper */
};

enum {
    NEAP_VALUE_RANDOM = 0,    /* He for the MLP, Wlin 0 */
    NEAP_VALUE_WLIN,          /* Wlin is the predictor's (neap_value_slim), the MLP random */
    NEAP_VALUE_LEAST_SQUARES, /* Wlin of the best linear prediction, the MLP random */
    NEAP_VALUE_GIVEN,         /* the predictor's: warm start, meta-initialisation */
};

/* Means and deviations; of the context, or of all that a start was learned from. */
typedef struct neap_value_norm {
    float *k_mean, *k_deviation; /* [row]; above 0 */
    float *v_mean;               /* [dv] */
    float v_deviation;           /* one for all elements: errors keep their weights */
} neap_value_norm;
int neap_value_norm_create(const neap_value_shape *shape, neap_value_norm *ret_norm);
void neap_value_norm_free(neap_value_norm *norm); /* takes one that is all zero */
void neap_value_norm_measure(const neap_value_shape *shape, const float *keys, const float *values,
                             size_t n, neap_value_norm *norm);

typedef struct neap_value_options {
    int method, start;
    uint64_t seed;               /* of what is random */
    uint32_t steps;              /* updates of Adam; steps of variable projection */
    uint32_t sample;             /* those look at so many rows, evenly spaced; 0: all */
    double rate;                 /* of Adam */
    double ridge;                /* penalty, over the mean square of a feature */
    bool fix_linear;             /* Wlin stays that of the start */
    const neap_value_norm *norm; /* NULL: the context's own */
} neap_value_options;
/* From a random start: 5 steps of projection that look at 2048 tokens; 300 of Adam at a rate of
 * 0.02. On 15 heads of SmolLM2 (3005 tokens of the GPL) those explain 0.690 and 0.706 of the
 * variance, 7 steps that look at all tokens 0.709, in 1/35, 1 and 1/24 of the time. */
neap_value_options neap_value_defaults(int method);

/* Fits the predictor, whose shape is given, to n tokens. Fails: NEAP_E_BOUND (n is 0, an option out
 * of range); -EDOM (a key or value is not finite); -ENOMEM. Any other n is good: with fewer tokens
 * than features the penalty decides. */
int neap_value_fit(const float *keys, const float *values, size_t n,
                   const neap_value_options *options, neap_value *io);

/* ---- starts, learned offline ---- */

/* A context; many of them make a start. A warm start is a fit to the tokens of all. */
typedef struct neap_value_task {
    const float *keys, *values;
    size_t n;
} neap_value_task;

typedef struct neap_value_meta_options {
    uint32_t inner_steps; /* Adam's, in a context; as many as will be taken from the start */
    double inner_rate;
    uint32_t updates;  /* AdamW's, of the start, ... */
    uint32_t contexts; /* ... each by the mean gradient after the inner steps of so many */
    double rate, decay;
} neap_value_meta_options;
/* LowRAM's table 12; its number of updates is not known. */
neap_value_meta_options neap_value_meta_defaults(void);

/* First-order MAML (Appendix E): moves the predictor to where a few steps of Adam lead to the
 * least error in each of the tasks, which are taken in turn. Fits from it must use norm, too.
 * Fails: as neap_value_fit. */
int neap_value_meta(const neap_value_task *tasks, size_t n_tasks, const neap_value_norm *norm,
                    const neap_value_meta_options *options, neap_value *io);

/* Wlin = pinv(W_K) W_V, from W_K' W_K [d_lin][d_lin] and W_K' W_V [d_lin][dv] of the model's
 * projections (k = W_K' x): the best linear prediction for inputs x without correlation. ret_wlin:
 * [d_lin][dv]. Fails: -EDOM (not finite); -ENOMEM. */
int neap_value_slim(const float *k_gram, const float *kv_cross, uint32_t d_lin, uint32_t dv,
                    float *ret_wlin);

/* ---- what is left ---- */

/* residuals[n][dv] = values - predicted (may be the array that holds either); errors[n]: their
 * squared lengths. */
void neap_value_residuals(const float *values, const float *predicted, size_t n, uint32_t dv,
                          float *ret_residuals, float *ret_errors);
/* The n_kept (at most n) tokens with the largest errors, ascending; of equals the first. */
void neap_value_worst(const float *errors, size_t n, size_t n_kept, uint32_t *ret_tokens);
/* 1 - |values - predicted|^2 / |values - their mean|^2. Fails: -ENOMEM. */
int neap_value_explained(const neap_value *value, const float *keys, const float *values, size_t n,
                         double *ret_explained);
#endif
