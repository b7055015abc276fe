/* test_lowram_value.c - the value predictor: what it computes, its gradient, Adam's step, the
 * readout against the normal equations, Slim, and the choice of the worst. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "neap.h"
#include "value_int.h"

enum { DK = 6, DV = 5, HIDDEN = 7, N = 150 };

static void fill(uint64_t seed, float deviation, size_t n, float *values) {
    neap_value_normal(seed, deviation, n, values);
}

static neap_value make(neap_value_shape shape, uint64_t seed) {
    neap_value value;
    CHECK(neap_value_create(&shape, &value) == 0);
    fill(seed, 0.5f, neap_value_n_params(&shape), value.w1);
    return value;
}

static void shapes(void) {
    neap_value value;
    const neap_value_shape bad[] = {{.dk = 0, .dv = 1},
                                    {.dk = 1, .dv = 0},
                                    {.dk = 4, .dv = 1, .row = 3},
                                    {.dk = 4, .dv = 1, .row = 6, .first = 3},
                                    {.dk = 4, .dv = 1, .d_lin = 5},
                                    {.dk = 4, .dv = 1, .hidden = NEAP_VALUE_WIDTH + 1}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK(neap_value_create(&bad[i], &value) == NEAP_E_BOUND);
}

/* By the formula, element by element; rows wider than the head. */
static void prediction(void) {
    const neap_value_shape shape = {
        .dk = DK, .dv = DV, .hidden = HIDDEN, .row = 2 * DK + 1, .first = DK, .d_lin = 2 * DK};
    neap_value value = make(shape, 1);
    static float keys[N * (2 * DK + 1)], predicted[N * DV];
    fill(2, 1, N * shape.row, keys);
    neap_value_predict(&value, keys, N, predicted);
    for (size_t i = 0; i < N; i++) {
        const float *k = keys + i * shape.row;
        for (size_t j = 0; j < DV; j++) {
            double sum = (double)value.b2[j];
            for (size_t c = 0; c < shape.d_lin; c++)
                sum += (double)k[c] * (double)value.wlin[c * DV + j];
            for (size_t h = 0; h < HIDDEN; h++) {
                double z = (double)value.b1[h];
                for (size_t c = 0; c < DK; c++)
                    z += (double)value.w1[h * DK + c] * (double)k[DK + c];
                sum += (z > 0 ? z : 0) * (double)value.w2[h * DV + j];
            }
            CHECK(fabs(sum - (double)predicted[i * DV + j]) < 1e-4);
        }
    }
    float mean[2 * DK + 1];
    static float again[N * DV];
    fill(3, 2, shape.row, mean);
    for (size_t i = 0; i < N * shape.row; i++)
        keys[i] -= mean[i % shape.row];
    neap_value_less_mean(mean, &value);
    neap_value_predict(&value, keys, N, again);
    for (size_t i = 0; i < N * DV; i++)
        CHECK(fabsf(again[i] - predicted[i]) < 1e-4f);
    neap_value_free(&value);
}

/* Every parameter's derivative against a central difference (units that switch within it are the
 * tolerance). */
static void gradient(void) {
    const neap_value_shape shape = {
        .dk = DK, .dv = DV, .hidden = HIDDEN, .row = DK + 2, .first = 1, .d_lin = DK + 2};
    enum { ROWS = NEAP_VALUE_BLOCK + 3 }; /* two blocks */
    neap_value value = make(shape, 3);
    const size_t n_params = neap_value_n_params(&shape);
    float *keys = malloc(ROWS * (DK + 2) * sizeof *keys),
          *values = malloc(ROWS * DV * sizeof *keys);
    float *scratch = malloc(neap_value_scratch(&shape) * sizeof *scratch);
    float *by_formula = malloc(n_params * sizeof *by_formula);
    float *unused = malloc(n_params * sizeof *unused);
    CHECK(keys && values && scratch && by_formula && unused);
    fill(4, 1, ROWS * shape.row, keys);
    fill(5, 1, ROWS * DV, values);
    const neap_value_rows rows = {keys, values, ROWS};
    neap_value_gradient(&value, &rows, false, scratch, by_formula);
    neap_value_gradient(&value, &rows, true, scratch, unused);
    CHECK(memcmp(unused, by_formula, HIDDEN * (DK + 1) * sizeof *unused) == 0);
    for (size_t i = 0; i < n_params; i++) {
        const float held = value.w1[i], h = 2e-3f;
        value.w1[i] = held + h;
        const double above = neap_value_gradient(&value, &rows, false, scratch, unused);
        value.w1[i] = held - h;
        const double below = neap_value_gradient(&value, &rows, false, scratch, unused);
        value.w1[i] = held;
        const double difference = (above - below) / (2 * (double)h);
        CHECK(fabs(difference - (double)by_formula[i]) < 5e-3 * (1 + fabs(difference)));
    }
    free(keys);
    free(values);
    free(scratch);
    free(by_formula);
    free(unused);
    neap_value_free(&value);
}

/* Two steps, worked out: with m = (1 - b1) g and v = (1 - b2) g^2 the first moves by the rate. */
static void adam(void) {
    neap_adam adam;
    float params[3] = {1, -2, 0.5f};
    const float first[3] = {4, -0.25f, 0}, second[3] = {-2, -0.25f, 1};
    CHECK(neap_adam_init(&adam, 3, 0.1, 0) == 0);
    neap_adam_step(&adam, first, params);
    CHECK(fabsf(params[0] - 0.9f) < 1e-6f && fabsf(params[1] + 1.9f) < 1e-6f);
    CHECK(params[2] == 0.5f);
    neap_adam_step(&adam, second, params);
    /* m = (0.9 * 0.4 - 0.1 * 2) / 0.19, v = (0.999 * 0.016 + 0.001 * 4) / 0.001999 */
    CHECK(fabs((double)params[0] - (0.9 - 0.1 * (0.16 / 0.19) / sqrt(0.019984 / 0.001999))) < 1e-5);
    CHECK(fabsf(params[1] + 1.8f) < 1e-5f); /* the same gradient: the rate again */
    /* m = 0.1 / 0.19, v = 0.001 / 0.001999 */
    CHECK(fabs((double)params[2] - (0.5 - 0.1 * (0.1 / 0.19) / sqrt(0.001 / 0.001999))) < 1e-5);
    neap_adam_restart(&adam);
    adam.decay = 0.5;
    params[0] = 2;
    neap_adam_step(&adam, first, params);
    CHECK(fabsf(params[0] - (2 * 0.95f - 0.1f)) < 1e-6f);
    neap_adam_fini(&adam);
}

/* At the readout the gradient by it is minus the penalty: 2 ridge * mean square * readout. */
static void normal_equations(bool fix_linear) {
    const neap_value_shape shape = neap_value_shape_of(DK, DV, HIDDEN);
    static float keys[N * DK], values[N * DV], hidden[N * HIDDEN];
    neap_value value = make(shape, 6);
    neap_value_options options = neap_value_defaults(NEAP_VALUE_RIDGE);
    options.ridge = 1e-2;
    options.fix_linear = fix_linear;
    fill(7, 1, N * DK, keys);
    fill(8, 1, N * DV, values);
    const neap_value_rows rows = {keys, values, N};
    const float wlin = value.wlin[0];
    double error, squares = 0, penalty = 0;
    CHECK(neap_value_readout(&rows, &options, &value, &error) == 0);
    neap_value_hidden(&value, keys, N, hidden, HIDDEN);
    for (size_t i = 0; i < N * HIDDEN; i++)
        squares += (double)(hidden[i] * hidden[i]);
    for (size_t i = 0; i < N * DK && !fix_linear; i++)
        squares += (double)(keys[i] * keys[i]);
    penalty = options.ridge * squares / (fix_linear ? HIDDEN : HIDDEN + DK) / N;
    float scratch[NEAP_VALUE_BLOCK * (2 * HIDDEN + DV)],
        slope[HIDDEN * (DK + 1 + DV) + DV + DK * DV];
    CHECK(sizeof scratch == neap_value_scratch(&shape) * sizeof *scratch);
    const double loss = neap_value_gradient(&value, &rows, false, scratch, slope);
    CHECK(fabs(loss - error) < 1e-4 * loss);
    const float *slope_w2 = slope + (value.w2 - value.w1),
                *slope_b2 = slope + (value.b2 - value.w1);
    const float *slope_wlin = slope + (value.wlin - value.w1);
    for (size_t i = 0; i < HIDDEN * DV; i++)
        CHECK(fabs((double)slope_w2[i] + 2 * penalty * (double)value.w2[i]) < 1e-4);
    for (size_t i = 0; i < DV; i++)
        CHECK(fabsf(slope_b2[i]) < 1e-4f);
    for (size_t i = 0; i < DK * DV && !fix_linear; i++)
        CHECK(fabs((double)slope_wlin[i] + 2 * penalty * (double)value.wlin[i]) < 1e-4);
    CHECK((value.wlin[0] == wlin) == fix_linear);
    neap_value_free(&value);
}

/* Where W_K has full column rank and values are a map of the keys, that map comes back. */
static void slim(void) {
    enum { INPUTS = 20 };
    float w_k[INPUTS * DK], map[DK * DV], w_v[INPUTS * DV] = {0}, gram[DK * DK] = {0};
    float cross[DK * DV] = {0}, found[DK * DV];
    fill(9, 1, INPUTS * DK, w_k);
    fill(10, 1, DK * DV, map);
    for (int pass = 0; pass < 2; pass++) {
        memset(w_v, 0, sizeof w_v);
        memset(gram, 0, sizeof gram);
        memset(cross, 0, sizeof cross);
        for (size_t i = 0; i < INPUTS && pass; i++) /* the last two columns are one: no inverse */
            w_k[i * DK + DK - 1] = w_k[i * DK + DK - 2];
        for (size_t i = 0; i < INPUTS; i++)
            for (size_t c = 0; c < DK; c++)
                for (size_t j = 0; j < DV; j++)
                    w_v[i * DV + j] += w_k[i * DK + c] * map[c * DV + j];
        for (size_t i = 0; i < INPUTS; i++)
            for (size_t c = 0; c < DK; c++) {
                for (size_t d = 0; d < DK; d++)
                    gram[c * DK + d] += w_k[i * DK + c] * w_k[i * DK + d];
                for (size_t j = 0; j < DV; j++)
                    cross[c * DV + j] += w_k[i * DK + c] * w_v[i * DV + j];
            }
        CHECK(neap_value_slim(gram, cross, DK, DV, found) == 0);
        for (size_t c = 0; c < DK; c++)
            for (size_t j = 0; j < DV; j++) {
                float wanted = map[c * DV + j];
                if (pass && c >= DK - 2) /* the least: both alike */
                    wanted = (map[(DK - 2) * DV + j] + map[(DK - 1) * DV + j]) / 2;
                CHECK(fabsf(found[c * DV + j] - wanted) < 1e-3f);
            }
    }
    gram[1] = NAN;
    CHECK(neap_value_slim(gram, cross, DK, DV, found) == -EDOM);
}

static void leftovers(void) {
    const float values[] = {1, 2, 3, 4}, predicted[] = {1, 0, 0, 4};
    float residuals[4], errors[2];
    neap_value_residuals(values, predicted, 2, 2, residuals, errors);
    CHECK(residuals[0] == 0 && residuals[1] == 2 && residuals[2] == 3 && residuals[3] == 0);
    CHECK(errors[0] == 4 && errors[1] == 9);
    const float many[] = {3, 1, 3, 0, 3, 1e30f, 0};
    uint32_t worst[7];
    neap_value_worst(many, 7, 3, worst);
    CHECK(worst[0] == 0 && worst[1] == 2 && worst[2] == 5);
    neap_value_worst(many, 7, 7, worst);
    for (uint32_t i = 0; i < 7; i++)
        CHECK(worst[i] == i);
    neap_value_worst(many, 7, 0, worst);
}

int main(void) {
    shapes();
    prediction();
    gradient();
    adam();
    normal_equations(false);
    normal_equations(true);
    slim();
    leftovers();
    return 0;
}
