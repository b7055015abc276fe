/* test_lowram_value_random.c - fits of random shapes and sizes: a planted predictor is found, more
 * steps are never worse, starts and coordinates do not matter to what is predicted, the same input
 * gives the same bytes, and any number of tokens is good. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "neap.h"
#include "value_int.h"

static uint64_t state;

static uint32_t rnd(uint32_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((state >> 33) % n);
}

/* Keys with means and deviations of their own; values of a planted predictor and noise. */
typedef struct problem {
    neap_value_shape shape;
    neap_value planted;
    float *keys, *values;
    size_t n;
} problem;

static problem make(size_t n, float noise) {
    problem p = {.n = n};
    neap_value_shape *s = &p.shape;
    s->dk = 1 + rnd(20);
    s->dv = 1 + rnd(20);
    s->hidden = rnd(4) ? 1 + rnd(30) : 0;
    s->first = rnd(2) * rnd(5);
    s->row = s->first + s->dk + rnd(2) * rnd(5);
    s->d_lin = rnd(4) ? s->dk : rnd(s->row + 1);
    CHECK(neap_value_create(s, &p.planted) == 0);
    p.keys = malloc((n + 1) * s->row * sizeof *p.keys);
    p.values = malloc((n + 1) * s->dv * sizeof *p.values);
    float *error = malloc((n + 1) * s->dv * sizeof *error);
    CHECK(p.keys && p.values && error);
    neap_value_normal(state, 1, neap_value_n_params(s), p.planted.w1);
    neap_value_normal(state + 1, 1, n * s->row, p.keys);
    neap_value_normal(state + 2, noise, n * s->dv, error);
    for (size_t i = 0; i < n * s->row; i++)
        p.keys[i] = p.keys[i] * (float)(1 + i % s->row % 3) + (float)(i % s->row % 7) - 3;
    neap_value_predict(&p.planted, p.keys, n, p.values);
    for (size_t i = 0; i < n * s->dv; i++)
        p.values[i] += error[i];
    free(error);
    return p;
}

static void drop(problem *p) {
    neap_value_free(&p->planted);
    free(p->keys);
    free(p->values);
}

static double fit(const problem *p, const neap_value_options *options, neap_value *io) {
    double explained;
    CHECK(neap_value_fit(p->keys, p->values, p->n, options, io) == 0);
    CHECK(neap_value_explained(io, p->keys, p->values, p->n, &explained) == 0);
    return explained;
}

static neap_value empty(const problem *p) {
    neap_value value;
    CHECK(neap_value_create(&p->shape, &value) == 0);
    return value;
}

/* W1, b1 of the planted predictor: the readout finds the rest. */
static void planted(void) {
    problem p = make(1500, 0);
    neap_value value = empty(&p);
    neap_value_options options = neap_value_defaults(NEAP_VALUE_RIDGE);
    options.start = NEAP_VALUE_GIVEN;
    options.steps = 0;
    options.ridge = 1e-9;
    memcpy(value.w1, p.planted.w1, (size_t)p.shape.hidden * (p.shape.dk + 1) * sizeof *value.w1);
    CHECK(fit(&p, &options, &value) > 0.9999);
    neap_value_free(&value);
    drop(&p);
}

static void never_worse(void) {
    problem p = make(300 + rnd(900), 0.5f);
    double last = -INFINITY;
    neap_value_options options = neap_value_defaults(NEAP_VALUE_RIDGE);
    options.seed = state;
    for (options.steps = 0; options.steps < 8; options.steps++) {
        neap_value value = empty(&p);
        const double explained = fit(&p, &options, &value);
        CHECK(explained >= last - 1e-5);
        last = explained;
        neap_value_free(&value);
    }
    options.steps = 0;
    neap_value value = empty(&p);
    const double none = fit(&p, &options, &value);
    options.steps = 5;
    options.sample = 1 + rnd((uint32_t)p.n);
    CHECK(fit(&p, &options, &value) >= none - 1e-5);
    neap_value_free(&value);
    drop(&p);
}

/* A start that is given and not moved is what it was, whichever way it went through. */
static void unmoved(void) {
    problem p = make(1 + rnd(300), 1);
    neap_value value = empty(&p);
    neap_value_options options = neap_value_defaults(NEAP_VALUE_ADAM);
    options.start = NEAP_VALUE_GIVEN;
    options.steps = 0;
    const size_t n_params = neap_value_n_params(&p.shape);
    memcpy(value.w1, p.planted.w1, n_params * sizeof *value.w1);
    CHECK(neap_value_fit(p.keys, p.values, p.n, &options, &value) == 0);
    for (size_t i = 0; i < n_params; i++)
        CHECK(fabsf(value.w1[i] - p.planted.w1[i]) < 1e-3f * (1 + fabsf(p.planted.w1[i])));
    neap_value_free(&value);
    drop(&p);
}

static void adam_learns(void) {
    problem p = make(400, 0.1f);
    neap_value value = empty(&p);
    neap_value_options options = neap_value_defaults(NEAP_VALUE_ADAM);
    options.rate = 1e-2;
    options.steps = 5;
    const double few = fit(&p, &options, &value);
    options.steps = 200;
    CHECK(fit(&p, &options, &value) > few || few > 0.99);
    neap_value_free(&value);
    drop(&p);
}

/* Contexts of one predictor, each with a shift of its own: after the few steps that it was learned
 * for, the start from all of them does better than the predictor that all began with. */
static void meta(void) {
    enum { TASKS = 6 };
    problem p = make(TASKS * 100, 0.1f);
    neap_value_task tasks[TASKS];
    neap_value_norm norm;
    const neap_value_shape *s = &p.shape;
    for (size_t t = 0; t < TASKS; t++) {
        tasks[t] = (neap_value_task){p.keys + t * 100 * s->row, p.values + t * 100 * s->dv, 100};
        for (size_t i = 0; i < 100 * s->dv; i++)
            p.values[t * 100 * s->dv + i] += (float)t;
    }
    CHECK(neap_value_norm_create(s, &norm) == 0);
    neap_value_norm_measure(s, p.keys, p.values, p.n, &norm);
    neap_value start = empty(&p), learned = empty(&p);
    neap_value_options adapt = neap_value_defaults(NEAP_VALUE_ADAM);
    adapt.norm = &norm;
    adapt.steps = 0;
    CHECK(neap_value_fit(p.keys, p.values, p.n, &adapt, &start) == 0); /* random */
    memcpy(learned.w1, start.w1, neap_value_n_params(s) * sizeof *start.w1);
    neap_value_meta_options options = neap_value_meta_defaults();
    options.rate = 1e-2;
    CHECK(neap_value_meta(tasks, TASKS, &norm, &options, &learned) == 0);
    adapt.start = NEAP_VALUE_GIVEN;
    adapt.steps = options.inner_steps;
    double before = 0, after = 0, explained;
    for (size_t t = 0; t < TASKS; t++) {
        neap_value a = empty(&p), b = empty(&p);
        memcpy(a.w1, start.w1, neap_value_n_params(s) * sizeof *a.w1);
        memcpy(b.w1, learned.w1, neap_value_n_params(s) * sizeof *b.w1);
        CHECK(neap_value_fit(tasks[t].keys, tasks[t].values, 100, &adapt, &a) == 0);
        CHECK(neap_value_explained(&a, tasks[t].keys, tasks[t].values, 100, &explained) == 0);
        before += explained;
        CHECK(neap_value_fit(tasks[t].keys, tasks[t].values, 100, &adapt, &b) == 0);
        CHECK(neap_value_explained(&b, tasks[t].keys, tasks[t].values, 100, &explained) == 0);
        after += explained;
        neap_value_free(&a);
        neap_value_free(&b);
    }
    CHECK(after > before);
    CHECK(neap_value_meta(tasks, 0, &norm, &options, &learned) == NEAP_E_BOUND);
    neap_value_free(&start);
    neap_value_free(&learned);
    neap_value_norm_free(&norm);
    drop(&p);
}

static neap_value_options any_options(void) {
    neap_value_options options = neap_value_defaults((int)rnd(2));
    options.start = (int)rnd(4);
    options.steps = rnd(4);
    options.sample = rnd(2) * rnd(60);
    options.fix_linear = rnd(3) == 0;
    options.seed = rnd(100);
    return options;
}

static void same_bytes(void) {
    problem p = make(1 + rnd(2500), 1);
    const neap_value_options options = any_options();
    neap_value a = empty(&p), b = empty(&p);
    CHECK(isfinite(fit(&p, &options, &a)) && isfinite(fit(&p, &options, &b)));
    CHECK(memcmp(a.w1, b.w1, neap_value_n_params(&p.shape) * sizeof *a.w1) == 0);
    neap_value_free(&a);
    neap_value_free(&b);
    drop(&p);
}

/* Fewer tokens than features, equal tokens, elements that do not vary. */
static void degenerate(void) {
    problem p = make(1 + rnd(12), 1);
    neap_value value = empty(&p);
    const int kind = (int)rnd(3);
    for (size_t i = 0; i < p.n * p.shape.row && kind; i++)
        p.keys[i] = kind == 1 ? 3 : p.keys[i % p.shape.row];
    for (size_t i = 0; i < p.n * p.shape.dv && kind == 2; i++)
        p.values[i] = -1;
    const neap_value_options options = any_options();
    CHECK(neap_value_fit(p.keys, p.values, p.n, &options, &value) == 0);
    for (size_t i = 0; i < neap_value_n_params(&p.shape); i++)
        CHECK(isfinite(value.w1[i]));
    neap_value kept = empty(&p);
    memcpy(kept.w1, value.w1, neap_value_n_params(&p.shape) * sizeof *kept.w1);
    p.keys[rnd((uint32_t)(p.n * p.shape.row))] = rnd(2) ? NAN : INFINITY;
    CHECK(neap_value_fit(p.keys, p.values, p.n, &options, &value) == -EDOM);
    CHECK(neap_value_fit(p.keys, p.values, 0, &options, &value) == NEAP_E_BOUND);
    CHECK(memcmp(kept.w1, value.w1, neap_value_n_params(&p.shape) * sizeof *kept.w1) == 0);
    neap_value_free(&value);
    neap_value_free(&kept);
    drop(&p);
}

/* Against sorting by error, then by token. */
static void worst(void) {
    enum { MOST = 300 };
    float errors[MOST];
    uint32_t tokens[MOST];
    const uint32_t n = 1 + rnd(MOST), n_kept = rnd(n + 1);
    for (uint32_t i = 0; i < n; i++)
        errors[i] = rnd(4) ? (float)rnd(20) / 4 : ldexpf((float)rnd(1000), (int)rnd(80) - 40);
    neap_value_worst(errors, n, n_kept, tokens);
    uint32_t found = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t ahead = 0;
        for (uint32_t j = 0; j < n; j++)
            ahead += errors[j] > errors[i] || (errors[j] == errors[i] && j < i);
        if (ahead < n_kept) CHECK(tokens[found++] == i);
    }
    CHECK(found == n_kept);
}

int main(void) {
    for (uint64_t seed = 1; seed <= 60; seed++) {
        state = seed;
        printf("seed %llu\n", (unsigned long long)seed);
        planted();
        never_worse();
        unmoved();
        adam_learns();
        meta();
        same_bytes();
        degenerate();
        for (int i = 0; i < 20; i++)
            worst();
    }
    return 0;
}
