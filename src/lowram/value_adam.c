/* value_adam.c - the gradient of the error by all parameters, and Adam with it. */
#include <cblas.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "value_int.h"

size_t neap_value_scratch(const neap_value_shape *shape) {
    return (size_t)NEAP_VALUE_BLOCK * (2 * shape->hidden + shape->dv);
}

/* error[n][dv] = f(keys) - values. */
static void errors_of(const neap_value *value, const neap_value_rows *rows, const float *hidden,
                      float *error) {
    const neap_value_shape *s = &value->shape;
    const int n = (int)rows->n, dv = (int)s->dv;
    for (size_t i = 0; i < rows->n; i++)
        for (size_t j = 0; j < s->dv; j++)
            error[i * s->dv + j] = value->b2[j] - rows->v[i * s->dv + j];
    if (s->d_lin)
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, dv, (int)s->d_lin, 1, rows->k,
                    (int)s->row, value->wlin, dv, 1, error, dv);
    if (s->hidden)
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, dv, (int)s->hidden, 1, hidden,
                    (int)s->hidden, value->w2, dv, 1, error, dv);
}

static void add_columns(const float *rows, size_t n, size_t width, float scale, float *sums) {
    for (size_t i = 0; i < n; i++)
        cblas_saxpy((int)width, scale, rows + i * width, 1, sums, 1);
}

/* Adds a block's part, over scale, to the gradient. */
static double add_block(const neap_value *value, const neap_value_rows *rows, bool only_hidden,
                        float scale, float *scratch, neap_value *gradient) {
    const neap_value_shape *s = &value->shape;
    const int n = (int)rows->n, dv = (int)s->dv, hidden = (int)s->hidden;
    float *h = scratch, *back = h + rows->n * s->hidden, *error = back + rows->n * s->hidden;
    neap_value_hidden(value, rows->k, rows->n, h, s->hidden);
    errors_of(value, rows, h, error);
    const double sum = (double)cblas_sdot(n * dv, error, 1, error, 1);
    if (!only_hidden) add_columns(error, rows->n, s->dv, scale, gradient->b2);
    if (s->d_lin && !only_hidden)
        cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)s->d_lin, dv, n, scale, rows->k,
                    (int)s->row, error, dv, 1, gradient->wlin, dv);
    if (hidden == 0) return sum;
    if (!only_hidden)
        cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, hidden, dv, n, scale, h, hidden, error,
                    dv, 1, gradient->w2, dv);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n, hidden, dv, scale, error, dv, value->w2,
                dv, 0, back, hidden);
    for (size_t i = 0; i < rows->n * s->hidden; i++)
        back[i] = h[i] > 0 ? back[i] : 0;
    add_columns(back, rows->n, s->hidden, 1, gradient->b1);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, hidden, (int)s->dk, n, 1, back, hidden,
                rows->k + s->first, (int)s->row, 1, gradient->w1, (int)s->dk);
    return sum;
}

double neap_value_gradient(const neap_value *value, const neap_value_rows *rows, bool only_hidden,
                           float *scratch, float *ret_gradient) {
    const neap_value_shape *s = &value->shape;
    const ptrdiff_t b1 = value->b1 - value->w1, w2 = value->w2 - value->w1;
    neap_value gradient = {.shape = *s,
                           .w1 = ret_gradient,
                           .b1 = ret_gradient + b1,
                           .w2 = ret_gradient + w2,
                           .b2 = ret_gradient + (value->b2 - value->w1),
                           .wlin = ret_gradient + (value->wlin - value->w1)};
    double sum = 0;
    memset(ret_gradient, 0, neap_value_n_params(s) * sizeof *ret_gradient);
    for (size_t at = 0; at < rows->n; at += NEAP_VALUE_BLOCK) {
        const size_t left = rows->n - at;
        const neap_value_rows block = {rows->k + at * s->row, rows->v + at * s->dv,
                                       left < NEAP_VALUE_BLOCK ? left : NEAP_VALUE_BLOCK};
        sum += add_block(value, &block, only_hidden, 2 / (float)rows->n, scratch, &gradient);
    }
    return sum / (double)rows->n;
}

/* ---- the fit ---- */

int neap_value_fit_adam(const neap_value_rows *rows, const neap_value_options *options,
                        neap_value *io) {
    const size_t n_all = neap_value_n_params(&io->shape);
    const size_t n = options->fix_linear ? (size_t)(io->wlin - io->w1) : n_all;
    neap_adam adam = {0};
    float *scratch = malloc((n_all + neap_value_scratch(&io->shape)) * sizeof *scratch);
    int err = scratch ? neap_adam_init(&adam, n, options->rate, 0) : -ENOMEM;
    for (uint32_t step = 0; step < options->steps && !err; step++) {
        neap_value_gradient(io, rows, false, scratch + n_all, scratch);
        neap_adam_step(&adam, scratch, io->w1);
    }
    neap_adam_fini(&adam);
    free(scratch);
    return err;
}
