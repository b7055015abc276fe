/* token_net.c - the network for token scores: two convolutions over tokens with ReLU, one output
 * that is added to the mean of the groups; and its training. */
#include <cblas.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "adam.h"
#include "neap.h"
#include "token_int.h"
#include "value_int.h"

enum { CH = NEAP_TOKEN_CHANNELS, TAPS = NEAP_TOKEN_TAPS, HALF = TAPS / 2 };

float neap_token_log(float attention, size_t n) {
    return log2f(attention * (float)n + 0x1p-8f) / 4;
}

/* ---- forward ---- */

int neap_token_pass_create(size_t n, neap_token_pass *ret_pass) {
    const size_t widths[] = {NEAP_TOKEN_INPUTS, NEAP_TOKEN_IN_0, NEAP_TOKEN_IN_1, CH, CH, 1};
    size_t sum = 0;
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        sum += widths[i];
    float *at = malloc((n * sum + 1) * sizeof *at);
    if (!at) return -ENOMEM;
    neap_token_pass pass = {.n = n, .input = at};
    pass.columns[0] = pass.input + n * widths[0];
    pass.columns[1] = pass.columns[0] + n * widths[1];
    pass.hidden[0] = pass.columns[1] + n * widths[2];
    pass.hidden[1] = pass.hidden[0] + n * CH;
    pass.score = pass.hidden[1] + n * CH;
    *ret_pass = pass;
    return 0;
}

void neap_token_pass_free(neap_token_pass *pass) {
    free(pass->input);
}

/* columns[i] = rows i - 2 .. i + 2, zero beyond the ends. */
static void spread(const float *rows, size_t n, size_t width, float *columns) {
    for (size_t i = 0; i < n; i++)
        for (size_t t = 0; t < TAPS; t++) {
            float *to = columns + (i * TAPS + t) * width;
            if (i + t >= HALF && i + t - HALF < n)
                memcpy(to, rows + (i + t - HALF) * width, width * sizeof *to);
            else
                memset(to, 0, width * sizeof *to);
        }
}

/* The transpose: rows += what of columns came from them. */
static void gather(const float *columns, size_t n, size_t width, float *rows) {
    memset(rows, 0, n * width * sizeof *rows);
    for (size_t i = 0; i < n; i++)
        for (size_t t = 0; t < TAPS; t++)
            for (size_t c = 0; c < width && i + t >= HALF && i + t - HALF < n; c++)
                rows[(i + t - HALF) * width + c] += columns[(i * TAPS + t) * width + c];
}

static void convolve(const float *params, const float *columns, size_t n, size_t width,
                     float *hidden) {
    const float *bias = params + width * CH;
    for (size_t i = 0; i < n; i++)
        memcpy(hidden + i * CH, bias, CH * sizeof *hidden);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)n, CH, (int)width, 1, columns,
                (int)width, params, CH, 1, hidden, CH);
    for (size_t i = 0; i < n * CH; i++)
        hidden[i] = fmaxf(hidden[i], 0);
}

void neap_token_forward(const neap_token_net *net, const float *history, neap_token_pass *pass) {
    const size_t n = pass->n;
    const float *last = net->params + NEAP_TOKEN_LAYER_2;
    for (size_t i = 0; i < n; i++) {
        float *input = pass->input + i * NEAP_TOKEN_INPUTS;
        pass->score[i] = last[CH];
        for (size_t g = 0; g < NEAP_TOKEN_GROUPS; g++) {
            input[g] = neap_token_log(history[g * n + i], n);
            pass->score[i] += input[g] / NEAP_TOKEN_GROUPS;
        }
        input[NEAP_TOKEN_GROUPS] = (float)i / (float)n; /* how far in the context */
    }
    spread(pass->input, n, NEAP_TOKEN_INPUTS, pass->columns[0]);
    convolve(net->params, pass->columns[0], n, NEAP_TOKEN_IN_0, pass->hidden[0]);
    spread(pass->hidden[0], n, CH, pass->columns[1]);
    convolve(net->params + NEAP_TOKEN_LAYER_1, pass->columns[1], n, NEAP_TOKEN_IN_1,
             pass->hidden[1]);
    cblas_sgemv(CblasRowMajor, CblasNoTrans, (int)n, CH, 1, pass->hidden[1], CH, last, 1, 1,
                pass->score, 1);
}

/* ---- backward ---- */

/* From back[n][CH], the gradient by a convolution's output before ReLU: its parameters'. */
static void add_layer(const float *columns, const float *back, size_t n, size_t width,
                      float *gradient) {
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)width, CH, (int)n, 1, columns,
                (int)width, back, CH, 1, gradient, CH);
    for (size_t i = 0; i < n; i++)
        cblas_saxpy(CH, 1, back + i * CH, 1, gradient + width * CH, 1);
}

void neap_token_backward(const neap_token_net *net, const float *error, neap_token_pass *pass,
                         float *gradient) {
    const size_t n = pass->n;
    const float *last = net->params + NEAP_TOKEN_LAYER_2, scale = 2 / (float)n;
    float *back = pass->hidden[1];
    for (size_t i = 0; i < n; i++) {
        const float e = scale * error[i];
        gradient[NEAP_TOKEN_LAYER_2 + CH] += e;
        for (size_t c = 0; c < CH; c++) {
            gradient[NEAP_TOKEN_LAYER_2 + c] += e * back[i * CH + c];
            back[i * CH + c] = back[i * CH + c] > 0 ? e * last[c] : 0;
        }
    }
    add_layer(pass->columns[1], back, n, NEAP_TOKEN_IN_1, gradient + NEAP_TOKEN_LAYER_1);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)n, NEAP_TOKEN_IN_1, CH, 1, back, CH,
                net->params + NEAP_TOKEN_LAYER_1, CH, 0, pass->columns[1], NEAP_TOKEN_IN_1);
    gather(pass->columns[1], n, CH, back);
    for (size_t i = 0; i < n * CH; i++)
        back[i] = pass->hidden[0][i] > 0 ? back[i] : 0;
    add_layer(pass->columns[0], back, n, NEAP_TOKEN_IN_0, gradient);
}

/* ---- training ---- */

neap_token_training neap_token_training_defaults(void) {
    return (neap_token_training){.passes = 8, .rate = 2e-3, .seed = 1};
}

static void randomise(uint64_t seed, neap_token_net *net) {
    memset(net, 0, sizeof *net); /* the output starts at zero: the mean of the groups */
    neap_value_normal(2 * seed, sqrtf(2 / (float)NEAP_TOKEN_IN_0), NEAP_TOKEN_BIAS_0, net->params);
    neap_value_normal(2 * seed + 1, sqrtf(2 / (float)NEAP_TOKEN_IN_1), (size_t)NEAP_TOKEN_IN_1 * CH,
                      net->params + NEAP_TOKEN_LAYER_1);
}

static double mean_square(const float *values, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)(values[i] * values[i]);
    return sum / (double)n;
}

/* *ret_error of one sample, and where gradient is not NULL, what it adds to that. */
static int look_at(const neap_token_sample *sample, const neap_token_net *net, float *gradient,
                   double *ret_error) {
    neap_token_pass pass;
    float *error = malloc(sample->n * sizeof *error);
    const int err = error ? neap_token_pass_create(sample->n, &pass) : -ENOMEM;
    if (!err) {
        neap_token_forward(net, sample->history, &pass);
        for (size_t i = 0; i < sample->n; i++)
            error[i] = pass.score[i] - neap_token_log(sample->future[i], sample->n);
        *ret_error = mean_square(error, sample->n);
        if (gradient) neap_token_backward(net, error, &pass, gradient);
        neap_token_pass_free(&pass);
    }
    free(error);
    return err;
}

/* A step by each of the samples. *ret_error: the mean before the steps. */
static int go_through(const neap_token_sample *samples, size_t n_samples, neap_adam *adam,
                      neap_token_net *net, double *ret_error) {
    double sum = 0, error = 0;
    for (size_t i = 0; i < n_samples; i++) {
        float gradient[NEAP_TOKEN_PARAMS] = {0};
        const int err = look_at(&samples[i], net, adam ? gradient : NULL, &error);
        if (err) return err;
        if (adam) neap_adam_step(adam, gradient, net->params);
        sum += error;
    }
    *ret_error = sum / (double)n_samples;
    return 0;
}

int neap_token_train(const neap_token_sample *samples, size_t n_samples,
                     const neap_token_training *training, neap_token_net *ret_net,
                     double *ret_error, double *ret_untrained_error) {
    neap_token_net net = {{0}};
    neap_adam adam;
    double error = 0, untrained_error;
    for (size_t i = 0; i < n_samples; i++)
        if (samples[i].n == 0) return NEAP_E_BOUND;
    if (n_samples == 0) return NEAP_E_BOUND;
    int err = go_through(samples, n_samples, NULL, &net, &untrained_error);
    if (!err) err = neap_adam_init(&adam, NEAP_TOKEN_PARAMS, training->rate, 0);
    if (err) return err;
    randomise(training->seed, &net);
    for (uint32_t pass = 0; pass < training->passes && !err; pass++) {
        adam.rate = training->rate * (1 - (double)pass / training->passes); /* calms down */
        err = go_through(samples, n_samples, &adam, &net, &error);
    }
    neap_adam_fini(&adam);
    if (!err && !isfinite(mean_square(net.params, NEAP_TOKEN_PARAMS))) err = -EDOM;
    if (err) return err;
    *ret_net = net;
    *ret_error = error;
    *ret_untrained_error = untrained_error;
    return 0;
}
