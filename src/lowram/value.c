/* value.c - the predictor, its starts, and what it leaves; the fits are in value_ridge.c and
 * value_adam.c. */
#include <cblas.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "neap.h"
#include "value_int.h"

enum { STACK_FLOATS = 16384 };

/* ---- shape ---- */

neap_value_shape neap_value_shape_of(uint32_t dk, uint32_t dv, uint32_t hidden) {
    return (neap_value_shape){.dk = dk, .dv = dv, .hidden = hidden, .row = dk, .d_lin = dk};
}

size_t neap_value_n_params(const neap_value_shape *shape) {
    return (size_t)shape->hidden * (shape->dk + 1 + shape->dv) + shape->dv +
           (size_t)shape->d_lin * shape->dv;
}

static bool shape_is_good(const neap_value_shape *s) {
    return s->dv > 0 && s->dv <= NEAP_VALUE_WIDTH && s->row > 0 && s->row <= NEAP_VALUE_WIDTH &&
           s->dk > 0 && s->dk <= s->row && s->first <= s->row - s->dk && s->d_lin <= s->row &&
           s->hidden <= NEAP_VALUE_WIDTH;
}

int neap_value_create(const neap_value_shape *shape, neap_value *ret_value) {
    neap_value value = {.shape = *shape};
    neap_value_shape *s = &value.shape;
    if (s->row == 0) s->row = s->dk;
    if (!shape_is_good(s)) return NEAP_E_BOUND;
    value.w1 = calloc(neap_value_n_params(s), sizeof *value.w1);
    if (!value.w1) return -ENOMEM;
    value.b1 = value.w1 + (size_t)s->hidden * s->dk;
    value.w2 = value.b1 + s->hidden;
    value.b2 = value.w2 + (size_t)s->hidden * s->dv;
    value.wlin = value.b2 + s->dv;
    *ret_value = value;
    return 0;
}

void neap_value_free(neap_value *value) {
    free(value->w1);
    *value = (neap_value){0};
}

/* ---- prediction ---- */

void neap_value_hidden(const neap_value *value, const float *keys, size_t n, float *hidden,
                       size_t stride) {
    const neap_value_shape *s = &value->shape;
    if (s->hidden == 0) return;
    for (size_t i = 0; i < n; i++)
        memcpy(hidden + i * stride, value->b1, s->hidden * sizeof *hidden);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)n, (int)s->hidden, (int)s->dk, 1,
                keys + s->first, (int)s->row, value->w1, (int)s->dk, 1, hidden, (int)stride);
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < s->hidden; j++) {
            float *h = &hidden[i * stride + j];
            *h = *h > 0 ? *h : 0; /* not fmaxf, which is a call */
        }
}

void neap_value_predict(const neap_value *value, const float *keys, size_t n,
                        float *ret_predicted) {
    const neap_value_shape *s = &value->shape;
    float hidden[STACK_FLOATS];
    const size_t block = s->hidden ? STACK_FLOATS / s->hidden : n;
    for (size_t i = 0; i < n; i++)
        memcpy(ret_predicted + i * s->dv, value->b2, s->dv * sizeof *ret_predicted);
    if (n > 0 && s->d_lin > 0)
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)n, (int)s->dv, (int)s->d_lin, 1,
                    keys, (int)s->row, value->wlin, (int)s->dv, 1, ret_predicted, (int)s->dv);
    for (size_t at = 0; s->hidden && at < n; at += block) {
        const size_t left = n - at, size = left < block ? left : block;
        neap_value_hidden(value, keys + at * s->row, size, hidden, s->hidden);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)size, (int)s->dv,
                    (int)s->hidden, 1, hidden, (int)s->hidden, value->w2, (int)s->dv, 1,
                    ret_predicted + at * s->dv, (int)s->dv);
    }
}

void neap_value_less_mean(const float *mean, neap_value *io) {
    const neap_value_shape *s = &io->shape;
    for (size_t i = 0; i < s->hidden; i++)
        for (size_t c = 0; c < s->dk; c++)
            io->b1[i] += io->w1[i * s->dk + c] * mean[s->first + c];
    for (size_t c = 0; c < s->d_lin; c++)
        for (size_t j = 0; j < s->dv; j++)
            io->b2[j] += io->wlin[c * s->dv + j] * mean[c];
}

/* ---- means and deviations ---- */

int neap_value_norm_create(const neap_value_shape *shape, neap_value_norm *ret_norm) {
    const size_t row = shape->row ? shape->row : shape->dk;
    float *at = calloc(2 * row + shape->dv, sizeof *at);
    if (!at) return -ENOMEM;
    *ret_norm = (neap_value_norm){
        .k_mean = at, .k_deviation = at + row, .v_mean = at + 2 * row, .v_deviation = 1};
    for (size_t i = 0; i < row; i++)
        ret_norm->k_deviation[i] = 1;
    return 0;
}

void neap_value_norm_free(neap_value_norm *norm) {
    free(norm->k_mean);
    *norm = (neap_value_norm){0};
}

/* Mean and variance of each column. */
static void measure_columns(const float *rows, size_t n, size_t width, double *ret_means,
                            double *ret_variances) {
    memset(ret_means, 0, width * sizeof *ret_means);
    memset(ret_variances, 0, width * sizeof *ret_variances);
    for (size_t i = 0; i < n; i++)
        for (size_t c = 0; c < width; c++)
            ret_means[c] += (double)rows[i * width + c];
    for (size_t c = 0; c < width; c++)
        ret_means[c] /= (double)n;
    for (size_t i = 0; i < n; i++)
        for (size_t c = 0; c < width; c++) {
            const double x = (double)rows[i * width + c] - ret_means[c];
            ret_variances[c] += x * x;
        }
    for (size_t c = 0; c < width; c++)
        ret_variances[c] /= (double)n;
}

void neap_value_norm_measure(const neap_value_shape *shape, const float *keys, const float *values,
                             size_t n, neap_value_norm *norm) {
    const size_t row = shape->row ? shape->row : shape->dk;
    double means[NEAP_VALUE_WIDTH], variances[NEAP_VALUE_WIDTH], sum = 0;
    measure_columns(keys, n, row, means, variances);
    for (size_t c = 0; c < row; c++) {
        norm->k_mean[c] = (float)means[c];
        norm->k_deviation[c] = (float)sqrt(variances[c]);
        sum += variances[c];
    }
    /* An element that does not vary is not blown up. */
    const float least = (float)sqrt(sum / (double)row) * 1e-3f;
    for (size_t c = 0; c < row; c++)
        if (!(norm->k_deviation[c] > least)) norm->k_deviation[c] = least > 0 ? least : 1;
    sum = 0;
    measure_columns(values, n, shape->dv, means, variances);
    for (size_t c = 0; c < shape->dv; c++) {
        norm->v_mean[c] = (float)means[c];
        sum += variances[c];
    }
    norm->v_deviation = sum > 0 ? (float)sqrt(sum / (double)shape->dv) : 1;
}

int neap_value_standardise(const neap_value_shape *shape, const neap_value_norm *norm,
                           const neap_value_rows *rows, neap_value_rows *ret_rows) {
    const size_t row = shape->row, dv = shape->dv;
    float *at = malloc(rows->n * (row + dv) * sizeof *at), sum = 0;
    if (!at) return -ENOMEM;
    float *v = at + rows->n * row;
    for (size_t i = 0; i < rows->n; i++)
        for (size_t c = 0; c < row; c++)
            at[i * row + c] = (rows->k[i * row + c] - norm->k_mean[c]) / norm->k_deviation[c];
    for (size_t i = 0; i < rows->n; i++)
        for (size_t c = 0; c < dv; c++)
            v[i * dv + c] = (rows->v[i * dv + c] - norm->v_mean[c]) / norm->v_deviation;
    for (size_t i = 0; i < rows->n * (row + dv); i++)
        sum += fabsf(at[i]);
    if (!isfinite(sum)) {
        free(at);
        return -EDOM;
    }
    *ret_rows = (neap_value_rows){at, v, rows->n};
    return 0;
}

/* With x = (k - mean) / deviation: W x + b = (W / deviation) k + (b - (W / deviation) mean). */
void neap_value_to_plain(const neap_value_norm *norm, neap_value *value) {
    const neap_value_shape *s = &value->shape;
    const float *mean = norm->k_mean + s->first, *deviation = norm->k_deviation + s->first;
    for (size_t i = 0; i < s->hidden; i++)
        for (size_t c = 0; c < s->dk; c++) {
            value->w1[i * s->dk + c] /= deviation[c];
            value->b1[i] -= value->w1[i * s->dk + c] * mean[c];
        }
    for (size_t i = 0; i < (size_t)s->hidden * s->dv; i++)
        value->w2[i] *= norm->v_deviation;
    for (size_t j = 0; j < s->dv; j++)
        value->b2[j] = value->b2[j] * norm->v_deviation + norm->v_mean[j];
    for (size_t c = 0; c < s->d_lin; c++)
        for (size_t j = 0; j < s->dv; j++) {
            value->wlin[c * s->dv + j] *= norm->v_deviation / norm->k_deviation[c];
            value->b2[j] -= value->wlin[c * s->dv + j] * norm->k_mean[c];
        }
}

void neap_value_to_standard(const neap_value_norm *norm, neap_value *value) {
    const neap_value_shape *s = &value->shape;
    const float *mean = norm->k_mean + s->first, *deviation = norm->k_deviation + s->first;
    for (size_t i = 0; i < s->hidden; i++)
        for (size_t c = 0; c < s->dk; c++) {
            value->b1[i] += value->w1[i * s->dk + c] * mean[c];
            value->w1[i * s->dk + c] *= deviation[c];
        }
    for (size_t i = 0; i < (size_t)s->hidden * s->dv; i++)
        value->w2[i] /= norm->v_deviation;
    for (size_t c = 0; c < s->d_lin; c++)
        for (size_t j = 0; j < s->dv; j++) {
            value->b2[j] += value->wlin[c * s->dv + j] * norm->k_mean[c];
            value->wlin[c * s->dv + j] *= norm->k_deviation[c] / norm->v_deviation;
        }
    for (size_t j = 0; j < s->dv; j++)
        value->b2[j] = (value->b2[j] - norm->v_mean[j]) / norm->v_deviation;
}

/* ---- starts ---- */

static double uniform(uint64_t *state) { /* 0 < x < 1 */
    *state += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t x = *state;
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return ((double)((x ^ x >> 31) >> 11) + 0.5) * 0x1p-53;
}

void neap_value_normal(uint64_t seed, float deviation, size_t n, float *ret_values) {
    uint64_t state = seed;
    for (size_t i = 0; i < n; i++) {
        const double radius = sqrt(-2 * log(uniform(&state)));
        ret_values[i] = deviation * (float)(radius * cos(6.283185307179586 * uniform(&state)));
    }
}

void neap_value_randomise(neap_value *value, uint64_t seed) {
    const neap_value_shape *s = &value->shape;
    if (s->hidden == 0) return;
    neap_value_normal(2 * seed, sqrtf(2 / (float)s->dk), (size_t)s->hidden * s->dk, value->w1);
    neap_value_normal(2 * seed + 1, sqrtf(2 / (float)s->hidden), (size_t)s->hidden * s->dv,
                      value->w2);
    memset(value->b1, 0, s->hidden * sizeof *value->b1);
}

/* Wlin and b2 of the best linear prediction. */
static int start_linear(const neap_value_rows *rows, const neap_value_options *options,
                        neap_value *io) {
    neap_value_shape shape = io->shape;
    neap_value linear = {0};
    shape.hidden = 0;
    int err = neap_value_create(&shape, &linear);
    neap_value_options solve = *options;
    solve.fix_linear = false;
    if (!err) err = neap_value_readout(rows, &solve, &linear, &(double){0});
    if (!err) memcpy(io->wlin, linear.wlin, (size_t)shape.d_lin * shape.dv * sizeof *io->wlin);
    neap_value_free(&linear);
    return err;
}

/* The predictor where the steps begin, in the terms of the fits. */
static int start(const neap_value_rows *rows, const neap_value_norm *norm,
                 const neap_value_options *options, neap_value *io) {
    const neap_value_shape *s = &io->shape;
    if (options->start == NEAP_VALUE_WLIN || options->start == NEAP_VALUE_GIVEN)
        neap_value_to_standard(norm, io);
    if (options->start == NEAP_VALUE_GIVEN) return 0;
    memset(io->b2, 0, s->dv * sizeof *io->b2);
    neap_value_randomise(io, options->seed);
    if (options->start == NEAP_VALUE_LEAST_SQUARES) return start_linear(rows, options, io);
    if (options->start == NEAP_VALUE_RANDOM)
        memset(io->wlin, 0, (size_t)s->d_lin * s->dv * sizeof *io->wlin);
    return 0;
}

/* ---- fitting ---- */

neap_value_options neap_value_defaults(int method) {
    neap_value_options options = {.method = method, .seed = 1, .ridge = 1e-4, .rate = 2e-2};
    options.steps = method == NEAP_VALUE_ADAM ? 300 : 5;
    options.sample = 2048;
    return options;
}

static bool options_are_good(const neap_value_options *o) {
    return (o->method == NEAP_VALUE_RIDGE || o->method == NEAP_VALUE_ADAM) &&
           o->start >= NEAP_VALUE_RANDOM && o->start <= NEAP_VALUE_GIVEN && o->rate >= 0 &&
           o->rate < 1 && o->ridge > 0 && o->ridge < 1;
}

static bool params_are_finite(const neap_value *value) {
    float sum = 0;
    for (size_t i = 0; i < neap_value_n_params(&value->shape); i++)
        sum += fabsf(value->w1[i]);
    return isfinite(sum);
}

int neap_value_fit(const float *keys, const float *values, size_t n,
                   const neap_value_options *options, neap_value *io) {
    const neap_value_rows given = {keys, values, n};
    neap_value_rows rows = {0};
    neap_value_norm own = {0};
    neap_value fitted = {0};
    if (n == 0 || n > INT32_MAX || !options_are_good(options)) return NEAP_E_BOUND;
    int err = neap_value_create(&io->shape, &fitted);
    if (!err && !options->norm) err = neap_value_norm_create(&io->shape, &own);
    if (!err && !options->norm) neap_value_norm_measure(&io->shape, keys, values, n, &own);
    const neap_value_norm *norm = options->norm ? options->norm : &own;
    const size_t n_bytes = neap_value_n_params(&io->shape) * sizeof *io->w1;
    if (!err) err = neap_value_standardise(&io->shape, norm, &given, &rows);
    if (!err) {
        memcpy(fitted.w1, io->w1, n_bytes);
        err = start(&rows, norm, options, &fitted);
    }
    if (!err)
        err = options->method == NEAP_VALUE_ADAM ? neap_value_fit_adam(&rows, options, &fitted)
                                                 : neap_value_fit_ridge(&rows, options, &fitted);
    if (!err) {
        neap_value_to_plain(norm, &fitted);
        err = params_are_finite(&fitted) ? 0 : -EDOM;
    }
    if (!err) memcpy(io->w1, fitted.w1, n_bytes);
    free((void *)rows.k);
    neap_value_free(&fitted);
    neap_value_norm_free(&own);
    return err;
}

/* ---- what is left ---- */

void neap_value_residuals(const float *values, const float *predicted, size_t n, uint32_t dv,
                          float *ret_residuals, float *ret_errors) {
    for (size_t i = 0; i < n; i++) {
        float sum = 0;
        for (size_t j = i * dv; j < (i + 1) * dv; j++) {
            ret_residuals[j] = values[j] - predicted[j];
            sum += ret_residuals[j] * ret_residuals[j];
        }
        ret_errors[i] = sum;
    }
}

/* Errors are not negative: their bits are in the order of their values. */
static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

void neap_value_worst(const float *errors, size_t n, size_t n_kept, uint32_t *ret_tokens) {
    /* The bits of the n_kept-th largest, 11 at a time from the top; of those equal to it so many
     * are kept. */
    static const int shifts[] = {21, 10, 0}, widths[] = {11, 11, 10};
    uint32_t limit = 0;
    size_t left = n_kept, found = 0;
    for (int pass = 0; pass < 3 && n_kept > 0; pass++) {
        size_t count[2048] = {0};
        const int shift = shifts[pass], above = shift + widths[pass];
        for (size_t i = 0; i < n; i++) {
            const uint32_t bits = bits_of(errors[i]);
            if (above == 32 || bits >> above == limit >> above)
                count[bits >> shift & ((1u << widths[pass]) - 1)]++;
        }
        uint32_t digit = (1u << widths[pass]) - 1;
        for (; count[digit] < left; digit--)
            left -= count[digit];
        limit |= digit << shift;
    }
    for (size_t i = 0; i < n && found < n_kept; i++) {
        const uint32_t bits = bits_of(errors[i]);
        if (bits < limit || (bits == limit && left == 0)) continue;
        left -= bits == limit;
        ret_tokens[found++] = (uint32_t)i;
    }
}

int neap_value_explained(const neap_value *value, const float *keys, const float *values, size_t n,
                         double *ret_explained) {
    const uint32_t dv = value->shape.dv;
    float *predicted = malloc((n * dv + 1) * sizeof *predicted);
    double error = 0, all = 0, means[NEAP_VALUE_WIDTH], variances[NEAP_VALUE_WIDTH];
    if (!predicted) return -ENOMEM;
    neap_value_predict(value, keys, n, predicted);
    for (size_t i = 0; i < n * dv; i++)
        error += (double)(values[i] - predicted[i]) * (double)(values[i] - predicted[i]);
    if (n > 0) measure_columns(values, n, dv, means, variances);
    for (size_t c = 0; c < dv && n > 0; c++)
        all += variances[c] * (double)n;
    free(predicted);
    *ret_explained = all > 0 ? 1 - error / all : error > 0 ? -INFINITY : 1;
    return 0;
}
