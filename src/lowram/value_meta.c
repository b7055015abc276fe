/* value_meta.c - a start from which few steps lead far, by first-order MAML. */
#include <cblas.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "neap.h"
#include "value_int.h"

neap_value_meta_options neap_value_meta_defaults(void) {
    return (neap_value_meta_options){.inner_steps = 2,
                                     .inner_rate = 1e-3,
                                     .updates = 48,
                                     .contexts = 8,
                                     .rate = 3e-4,
                                     .decay = 1e-2};
}

typedef struct work {
    neap_value start, adapted;
    neap_adam inner, outer;
    float *scratch, *gradient, *sum;
    size_t n; /* parameters */
} work;

static void work_fini(work *w) {
    neap_value_free(&w->start);
    neap_value_free(&w->adapted);
    neap_adam_fini(&w->inner);
    neap_adam_fini(&w->outer);
    free(w->scratch);
}

static int work_init(const neap_value *from, const neap_value_norm *norm,
                     const neap_value_meta_options *o, work *w) {
    *w = (work){.n = neap_value_n_params(&from->shape)};
    int err = neap_value_create(&from->shape, &w->start);
    if (!err) err = neap_value_create(&from->shape, &w->adapted);
    if (!err) err = neap_adam_init(&w->inner, w->n, o->inner_rate, 0);
    if (!err) err = neap_adam_init(&w->outer, w->n, o->rate, o->decay);
    w->scratch = malloc((neap_value_scratch(&from->shape) + 2 * w->n) * sizeof *w->scratch);
    if (!w->scratch) err = -ENOMEM;
    if (err) {
        work_fini(w);
        return err;
    }
    w->gradient = w->scratch + neap_value_scratch(&from->shape);
    w->sum = w->gradient + w->n;
    memcpy(w->start.w1, from->w1, w->n * sizeof *from->w1);
    neap_value_to_standard(norm, &w->start);
    return 0;
}

/* The gradient where the inner steps lead, into the sum. */
static void add_task(work *w, const neap_value_meta_options *o, const neap_value_rows *rows) {
    memcpy(w->adapted.w1, w->start.w1, w->n * sizeof *w->start.w1);
    neap_adam_restart(&w->inner);
    for (uint32_t i = 0; i < o->inner_steps; i++) {
        neap_value_gradient(&w->adapted, rows, false, w->scratch, w->gradient);
        neap_adam_step(&w->inner, w->gradient, w->adapted.w1);
    }
    neap_value_gradient(&w->adapted, rows, false, w->scratch, w->gradient);
    cblas_saxpy((int)w->n, 1 / (float)o->contexts, w->gradient, 1, w->sum, 1);
}

static int learn(work *w, const neap_value_rows *rows, size_t n_rows,
                 const neap_value_meta_options *o) {
    size_t at = 0;
    for (uint32_t update = 0; update < o->updates; update++) {
        memset(w->sum, 0, w->n * sizeof *w->sum);
        for (uint32_t i = 0; i < o->contexts; i++, at = (at + 1) % n_rows)
            add_task(w, o, &rows[at]);
        neap_adam_step(&w->outer, w->sum, w->start.w1);
    }
    return isfinite(cblas_sasum((int)w->n, w->start.w1, 1)) ? 0 : -EDOM;
}

int neap_value_meta(const neap_value_task *tasks, size_t n_tasks, const neap_value_norm *norm,
                    const neap_value_meta_options *options, neap_value *io) {
    neap_value_rows *rows = calloc(n_tasks + 1, sizeof *rows);
    work w = {0};
    int err = rows ? 0 : -ENOMEM;
    if (n_tasks == 0 || options->contexts == 0) err = NEAP_E_BOUND;
    for (size_t i = 0; i < n_tasks && !err; i++) {
        const neap_value_rows given = {tasks[i].keys, tasks[i].values, tasks[i].n};
        err = tasks[i].n == 0 ? NEAP_E_BOUND
                              : neap_value_standardise(&io->shape, norm, &given, &rows[i]);
    }
    if (!err) err = work_init(io, norm, options, &w);
    if (!err) err = learn(&w, rows, n_tasks, options);
    if (!err) {
        neap_value_to_plain(norm, &w.start);
        memcpy(io->w1, w.start.w1, w.n * sizeof *io->w1);
    }
    for (size_t i = 0; i < n_tasks && rows; i++)
        free((void *)rows[i].k);
    free(rows);
    work_fini(&w);
    return err;
}
