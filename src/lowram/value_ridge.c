/* value_ridge.c - the readout [Wlin, W2, b2] in closed form, and steps on W1, b1 with it solved
 * for.
 *
 * Variable projection: at the best readout of W1, b1 the gradient of the error by them is that with
 * the readout held (Golub and Pereyra). Steps are L-BFGS from a metric in which a step is Gauss and
 * Newton's for each hidden unit alone: the covariance of the keys times |w2|^2. A step that does
 * not lower the error is shortened, and not taken if that does not help. */
#include <cblas.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "neap.h"
#include "value_int.h"

/* LAPACK, of Fortran: what is the lower triangle there is the upper one here. */
void dpotrf_(const char *uplo, const int *n, double *a, const int *lda, int *info);
void dpotrs_(const char *uplo, const int *n, const int *nrhs, const double *a, const int *lda,
             double *b, const int *ldb, int *info);
void dpotri_(const char *uplo, const int *n, double *a, const int *lda, int *info);

enum { PAIRS = 6, TRIES = 5 };
#define UNIT_FLOOR 1e-2f /* least |w2|^2 in the metric, over the mean of the units */
#define KEY_FLOOR 1e-3   /* penalty on the covariance of the keys in the metric */
/* Tried first. On 6 heads of SmolLM2, 3005 tokens of the GPL, 5 steps: explained 0.765 with 1,
 * 0.770 with 2; with a KEY_FLOOR ten times smaller 0.773. */
#define FIRST_SHARE 2.0f

/* ---- readout ---- */

/* The normal equations: (features' features) readout = features' target. What does not depend on
 * W1, b1 is summed once for the rows. */
typedef struct normal {
    size_t m;             /* features: [keys,] hidden units, 1 */
    uint32_t d_lin;       /* keys among them: 0 where Wlin is fixed */
    const float *keys;    /* of the rows that gram and cross are of; NULL: none */
    float *hidden;        /* [NEAP_VALUE_BLOCK][hidden] */
    float *target;        /* [NEAP_VALUE_BLOCK][dv], where Wlin is fixed */
    float *block;         /* [m][m + dv]: a block's part */
    double *gram, *cross; /* [m][m] summed in the lower triangle, [m][dv] */
    double *factor;       /* [m][m] */
    double *solution;     /* [dv][m] */
    double energy;        /* |target|^2 */
} normal;

static int normal_init(const neap_value_shape *s, bool fix_linear, normal *ret_normal) {
    normal e = {.d_lin = fix_linear ? 0 : s->d_lin};
    e.m = e.d_lin + s->hidden + 1;
    float *floats = malloc(((size_t)NEAP_VALUE_BLOCK * (s->hidden + s->dv) + e.m * (e.m + s->dv)) *
                           sizeof *floats);
    double *doubles = malloc((2 * e.m * e.m + 2 * e.m * s->dv) * sizeof *doubles);
    if (!floats || !doubles) {
        free(floats);
        free(doubles);
        return -ENOMEM;
    }
    e.hidden = floats;
    e.target = e.hidden + (size_t)NEAP_VALUE_BLOCK * s->hidden;
    e.block = e.target + (size_t)NEAP_VALUE_BLOCK * s->dv;
    e.gram = doubles;
    e.factor = e.gram + e.m * e.m;
    e.cross = e.factor + e.m * e.m;
    e.solution = e.cross + e.m * s->dv;
    *ret_normal = e;
    return 0;
}

static void normal_fini(normal *e) {
    free(e->hidden);
    free(e->gram);
}

/* to[n_rows][..stride] += a block's part [n_rows][n_columns]; only the lower triangle of it. */
static void add_part(const float *part, size_t n_rows, size_t n_columns, bool is_triangle,
                     size_t stride, double *to) {
    for (size_t i = 0; i < n_rows; i++)
        for (size_t j = 0; j < (is_triangle ? i + 1 : n_columns); j++)
            to[i * stride + j] += (double)part[i * n_columns + j];
}

/* part[n_columns] = sums of the columns. */
static void sum_columns(const float *rows, size_t n, size_t n_columns, size_t stride, float *part) {
    memset(part, 0, n_columns * sizeof *part);
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < n_columns; j++)
            part[j] += rows[i * stride + j];
}

/* part[m][n_b] = a' b. */
static void inner(const float *a, size_t m, size_t a_stride, const float *b, size_t n_b,
                  size_t b_stride, size_t n, float *part) {
    if (m == 0 || n_b == 0) return;
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)m, (int)n_b, (int)n, 1, a,
                (int)a_stride, b, (int)b_stride, 0, part, (int)n_b);
}

/* Keys against keys, 1 and the target. */
static void add_fixed(const neap_value_shape *s, const neap_value_rows *rows, const float *target,
                      normal *e) {
    const size_t d = e->d_lin, bias = e->m - 1;
    e->energy += (double)cblas_sdot((int)(rows->n * s->dv), target, 1, target, 1);
    inner(rows->k, d, s->row, rows->k, d, s->row, rows->n, e->block);
    add_part(e->block, d, d, true, e->m, e->gram);
    inner(rows->k, d, s->row, target, s->dv, s->dv, rows->n, e->block);
    add_part(e->block, d, s->dv, false, s->dv, e->cross);
    sum_columns(rows->k, rows->n, d, s->row, e->block);
    add_part(e->block, 1, d, false, e->m, e->gram + bias * e->m);
    sum_columns(target, rows->n, s->dv, s->dv, e->block);
    add_part(e->block, 1, s->dv, false, s->dv, e->cross + bias * s->dv);
    e->gram[bias * e->m + bias] += (double)rows->n;
}

/* Hidden units against all. */
static void add_hidden(const neap_value *value, const neap_value_rows *rows, const float *target,
                       normal *e) {
    const neap_value_shape *s = &value->shape;
    const size_t h = s->hidden, d = e->d_lin, bias = e->m - 1;
    if (h == 0) return;
    neap_value_hidden(value, rows->k, rows->n, e->hidden, h);
    inner(e->hidden, h, h, rows->k, d, s->row, rows->n, e->block);
    add_part(e->block, h, d, false, e->m, e->gram + d * e->m);
    cblas_ssyrk(CblasRowMajor, CblasLower, CblasTrans, (int)h, (int)rows->n, 1, e->hidden, (int)h,
                0, e->block, (int)h);
    add_part(e->block, h, h, true, e->m, e->gram + d * e->m + d);
    sum_columns(e->hidden, rows->n, h, h, e->block);
    add_part(e->block, 1, h, false, e->m, e->gram + bias * e->m + d);
    inner(e->hidden, h, h, target, s->dv, s->dv, rows->n, e->block);
    add_part(e->block, h, s->dv, false, s->dv, e->cross + d * s->dv);
}

/* The target of the rows: what Wlin leaves of the values where it is fixed. */
static const float *target_of(const neap_value *value, const neap_value_rows *rows, normal *e) {
    const neap_value_shape *s = &value->shape;
    if (e->d_lin == s->d_lin) return rows->v;
    memcpy(e->target, rows->v, rows->n * s->dv * sizeof *e->target);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)rows->n, (int)s->dv, (int)s->d_lin,
                -1, rows->k, (int)s->row, value->wlin, (int)s->dv, 1, e->target, (int)s->dv);
    return e->target;
}

static void add_rows(const neap_value *value, const neap_value_rows *rows, normal *e) {
    const neap_value_shape *s = &value->shape;
    const bool is_new = e->keys != rows->k;
    for (size_t i = is_new ? 0 : e->d_lin; i < e->m; i++) {
        const bool is_bias = i + 1 == e->m; /* its sums of the keys are fixed */
        const size_t first = is_bias && !is_new ? e->d_lin : 0, end = is_bias && !is_new ? i : e->m;
        memset(e->gram + i * e->m + first, 0, (end - first) * sizeof *e->gram);
        if (!is_bias || is_new) memset(e->cross + i * s->dv, 0, s->dv * sizeof *e->cross);
    }
    if (is_new) e->energy = 0;
    e->keys = rows->k;
    for (size_t at = 0; at < rows->n; at += NEAP_VALUE_BLOCK) {
        const size_t left = rows->n - at;
        const neap_value_rows block = {rows->k + at * s->row, rows->v + at * s->dv,
                                       left < NEAP_VALUE_BLOCK ? left : NEAP_VALUE_BLOCK};
        const float *target = target_of(value, &block, e);
        if (is_new) add_fixed(s, &block, target, e);
        add_hidden(value, &block, target, e);
    }
}

/* (gram + penalty) readout = cross. A unit that is never active has a row of zeros: the penalty is
 * on the mean square of all features, and grows until the factors exist. */
static int solve(normal *e, size_t n_rows, uint32_t n_outputs, double ridge) {
    const int m = (int)e->m, dv = (int)n_outputs;
    double mean = 0;
    int info = 1;
    for (size_t i = 0; i + 1 < e->m; i++)
        mean += e->gram[i * e->m + i] / (double)(e->m - 1);
    for (; info != 0 && ridge < 1; ridge *= 10) {
        memcpy(e->factor, e->gram, e->m * e->m * sizeof *e->factor);
        for (size_t i = 0; i + 1 < e->m; i++)
            e->factor[i * e->m + i] += ridge * mean + 1e-12 * (double)n_rows;
        dpotrf_("U", &m, e->factor, &m, &info);
    }
    if (info != 0) return -EDOM;
    for (size_t i = 0; i < e->m; i++)
        for (size_t j = 0; j < n_outputs; j++)
            e->solution[j * e->m + i] = e->cross[i * n_outputs + j];
    dpotrs_("U", &m, &dv, e->factor, &m, e->solution, &m, &info);
    return info == 0 ? 0 : -EDOM;
}

/* |target - features readout|^2, from the sums; the factors' place is overwritten. */
static double error_of(const normal *e, size_t n_outputs) {
    const size_t m = e->m;
    double sum = e->energy;
    for (size_t i = 0; i < m; i++) /* the whole of gram, for a product that is fast */
        for (size_t j = 0; j <= i; j++)
            e->gram[j * m + i] = e->gram[i * m + j];
    double *product = e->factor; /* as many outputs at once as there is room for */
    for (size_t first = 0; first < n_outputs; first += m) {
        const size_t left = n_outputs - first, n = left < m ? left : m;
        const double *c = e->solution + first * m;
        cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)n, (int)m, (int)m, 1, c, (int)m,
                    e->gram, (int)m, 0, product, (int)m);
        for (size_t j = 0; j < n; j++)
            for (size_t i = 0; i < m; i++)
                sum +=
                    c[j * m + i] * (product[j * m + i] - 2 * e->cross[i * n_outputs + first + j]);
    }
    return sum > 0 ? sum : 0;
}

static void take_solution(const normal *e, neap_value *io) {
    const size_t dv = io->shape.dv, bias = e->m - 1;
    for (size_t j = 0; j < dv; j++) {
        const double *c = e->solution + j * e->m;
        for (size_t i = 0; i < e->d_lin; i++)
            io->wlin[i * dv + j] = (float)c[i];
        for (size_t i = e->d_lin; i < bias; i++)
            io->w2[(i - e->d_lin) * dv + j] = (float)c[i];
        io->b2[j] = (float)c[bias];
    }
}

static int readout(const neap_value_rows *rows, double ridge, normal *e, neap_value *io,
                   double *ret_error) {
    add_rows(io, rows, e);
    const int err = solve(e, rows->n, io->shape.dv, ridge);
    if (err) return err;
    take_solution(e, io);
    *ret_error = error_of(e, io->shape.dv) / (double)rows->n;
    return 0;
}

int neap_value_readout(const neap_value_rows *rows, const neap_value_options *options,
                       neap_value *io, double *ret_error) {
    normal e;
    int err = normal_init(&io->shape, options->fix_linear, &e);
    if (err) return err;
    err = readout(rows, options->ridge, &e, io, ret_error);
    normal_fini(&e);
    return err;
}

/* ---- steps on W1, b1 ---- */

typedef struct search {
    size_t n; /* hidden * (dk + 1): W1, then b1 */
    neap_value best, next;
    float *inverse;       /* [dk][dk] of the keys' covariance */
    float *scratch;       /* of neap_value_gradient */
    float *gradient;      /* of all parameters */
    float *old, *step;    /* the gradient before; the step being tried */
    float *s[PAIRS];      /* what was moved, ... */
    float *y[PAIRS];      /* ... and how the gradient changed by it */
    double sy[PAIRS];     /* their products */
    uint32_t n_pairs, at; /* the latest is at - 1 */
    float *floats;        /* all of these */
} search;

/* (covariance of the keys that the MLP sees + floor)^-1. */
static int invert_covariance(const neap_value_rows *rows, const neap_value_shape *s,
                             float *ret_inverse) {
    const int dk = (int)s->dk;
    const size_t n = (size_t)s->dk * s->dk;
    double *a = malloc(n * sizeof *a);
    if (!a) return -ENOMEM;
    cblas_ssyrk(CblasRowMajor, CblasLower, CblasTrans, dk, (int)rows->n, 1 / (float)rows->n,
                rows->k + s->first, (int)s->row, 0, ret_inverse, dk);
    for (size_t i = 0; i < s->dk; i++)
        for (size_t j = 0; j <= i; j++)
            a[i * s->dk + j] = (double)ret_inverse[i * s->dk + j] + (i == j ? KEY_FLOOR : 0);
    int info;
    dpotrf_("U", &dk, a, &dk, &info);
    if (info == 0) dpotri_("U", &dk, a, &dk, &info);
    for (size_t i = 0; i < s->dk && info == 0; i++)
        for (size_t j = 0; j <= i; j++)
            ret_inverse[i * s->dk + j] = ret_inverse[j * s->dk + i] = (float)a[i * s->dk + j];
    free(a);
    return info == 0 ? 0 : -EDOM;
}

static void search_fini(search *q) {
    neap_value_free(&q->best);
    neap_value_free(&q->next);
    free(q->floats);
}

static int search_init(const neap_value_rows *rows, const neap_value *from, search *q) {
    const neap_value_shape *s = &from->shape;
    const size_t n_params = neap_value_n_params(s);
    *q = (search){.n = (size_t)s->hidden * (s->dk + 1)};
    int err = neap_value_create(s, &q->best);
    if (!err) err = neap_value_create(s, &q->next);
    q->floats =
        malloc(((size_t)s->dk * s->dk + neap_value_scratch(s) + n_params + (2 + 2 * PAIRS) * q->n) *
               sizeof *q->floats);
    if (!q->floats) err = -ENOMEM;
    if (!err) {
        q->inverse = q->floats;
        q->scratch = q->inverse + (size_t)s->dk * s->dk;
        q->gradient = q->scratch + neap_value_scratch(s);
        q->old = q->gradient + n_params;
        q->step = q->old + q->n;
        for (size_t i = 0; i < PAIRS; i++) {
            q->s[i] = q->step + (1 + 2 * i) * q->n;
            q->y[i] = q->s[i] + q->n;
        }
        memcpy(q->best.w1, from->w1, n_params * sizeof *from->w1);
        err = invert_covariance(rows, s, q->inverse);
    }
    if (err) search_fini(q);
    return err;
}

static double dot(const float *a, const float *b, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)a[i] * (double)b[i];
    return sum;
}

/* x = metric^-1 x; scratch: as x. */
static void precondition(const search *q, float *x, float *scratch) {
    const neap_value_shape *s = &q->best.shape;
    const int hidden = (int)s->hidden, dk = (int)s->dk;
    float *b = x + (size_t)s->hidden * s->dk;
    const float least = UNIT_FLOOR * (float)dot(q->best.w2, q->best.w2, (size_t)s->hidden * s->dv) /
                        (float)s->hidden;
    memcpy(scratch, x, (size_t)s->hidden * s->dk * sizeof *x);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, hidden, dk, dk, 1, scratch, dk,
                q->inverse, dk, 0, x, dk);
    for (size_t i = 0; i < s->hidden; i++) {
        const float *w2 = q->best.w2 + i * s->dv;
        const float weight = (float)dot(w2, w2, s->dv), scale = 1 / (weight + least + 1e-20f);
        cblas_sscal(dk, scale, x + i * s->dk, 1);
        b[i] *= scale;
    }
}

/* step = -H gradient, H by the pairs from the metric on (two-loop recursion). */
static void choose_direction(search *q) {
    const int n = (int)q->n;
    double alpha[PAIRS];
    memcpy(q->step, q->gradient, q->n * sizeof *q->step);
    for (uint32_t i = 1; i <= q->n_pairs; i++) {
        const uint32_t p = (q->at + PAIRS - i) % PAIRS;
        alpha[p] = dot(q->s[p], q->step, q->n) / q->sy[p];
        cblas_saxpy(n, (float)-alpha[p], q->y[p], 1, q->step, 1);
    }
    precondition(q, q->step, q->scratch);
    for (uint32_t i = q->n_pairs; i >= 1; i--) {
        const uint32_t p = (q->at + PAIRS - i) % PAIRS;
        const double beta = dot(q->y[p], q->step, q->n) / q->sy[p];
        cblas_saxpy(n, (float)(alpha[p] - beta), q->s[p], 1, q->step, 1);
    }
    cblas_sscal(n, -1, q->step, 1);
}

/* The pair of the step that was taken last, now that the gradient behind it is known. */
static void add_pair(search *q) {
    float *y = q->y[q->at];
    for (size_t i = 0; i < q->n; i++)
        y[i] = q->gradient[i] - q->old[i];
    q->sy[q->at] = dot(q->s[q->at], y, q->n);
    if (!(q->sy[q->at] > 0)) return; /* no curvature to learn from */
    q->at = (q->at + 1) % PAIRS;
    q->n_pairs += q->n_pairs < PAIRS;
}

/* Takes as much of the step as lowers the error. *ret_taken: any. */
static int take_step(const neap_value_rows *rows, double ridge, normal *e, search *q,
                     double *io_error, bool *ret_taken) {
    const size_t n_params = neap_value_n_params(&q->best.shape);
    float share = FIRST_SHARE;
    *ret_taken = false;
    for (int i = 0; i < TRIES && !*ret_taken; i++, share /= 4) {
        double error;
        memcpy(q->next.w1, q->best.w1, n_params * sizeof *q->best.w1);
        cblas_saxpy((int)q->n, share, q->step, 1, q->next.w1, 1);
        const int err = readout(rows, ridge, e, &q->next, &error);
        if (err == -EDOM) continue; /* too far */
        if (err) return err;
        *ret_taken = error < *io_error;
        if (*ret_taken) *io_error = error;
    }
    if (!*ret_taken) return 0;
    for (size_t i = 0; i < q->n; i++)
        q->s[q->at][i] = q->next.w1[i] - q->best.w1[i];
    memcpy(q->best.w1, q->next.w1, n_params * sizeof *q->best.w1);
    return 0;
}

static int project(const neap_value_rows *rows, const neap_value_options *options, normal *e,
                   neap_value *io) {
    search q;
    double error;
    bool going = true;
    int err = readout(rows, options->ridge, e, io, &error);
    if (err || options->steps == 0 || io->shape.hidden == 0) return err;
    err = search_init(rows, io, &q);
    if (err) return err;
    for (uint32_t step = 0; step < options->steps && going && !err; step++) {
        memcpy(q.old, q.gradient, q.n * sizeof *q.old);
        neap_value_gradient(&q.best, rows, true, q.scratch, q.gradient);
        if (step > 0) add_pair(&q);
        choose_direction(&q);
        err = take_step(rows, options->ridge, e, &q, &error, &going);
    }
    if (!err) memcpy(io->w1, q.best.w1, neap_value_n_params(&io->shape) * sizeof *io->w1);
    search_fini(&q);
    return err;
}

/* Rows evenly spaced; malloc'd in one piece that begins at k. */
static int take_sample(const neap_value_rows *rows, const neap_value_shape *s, size_t n,
                       neap_value_rows *ret_sample) {
    float *k = malloc(n * (s->row + s->dv) * sizeof *k);
    if (!k) return -ENOMEM;
    float *v = k + n * s->row;
    for (size_t i = 0; i < n; i++) {
        const size_t from = i * rows->n / n;
        memcpy(k + i * s->row, rows->k + from * s->row, s->row * sizeof *k);
        memcpy(v + i * s->dv, rows->v + from * s->dv, s->dv * sizeof *v);
    }
    *ret_sample = (neap_value_rows){k, v, n};
    return 0;
}

/* W1, b1 by a sample of the rows, the readout by all of them; unless the start does better. */
static int project_by_sample(const neap_value_rows *rows, const neap_value_options *options,
                             normal *e, neap_value *io) {
    neap_value_rows sample;
    neap_value moved = {0};
    double error, moved_error;
    const size_t n_bytes = neap_value_n_params(&io->shape) * sizeof *io->w1;
    int err = take_sample(rows, &io->shape, options->sample, &sample);
    if (err) return err;
    err = neap_value_create(&io->shape, &moved);
    if (!err) {
        memcpy(moved.w1, io->w1, n_bytes);
        err = project(&sample, options, e, &moved);
    }
    if (!err) err = readout(rows, options->ridge, e, io, &error);
    if (!err) err = readout(rows, options->ridge, e, &moved, &moved_error);
    if (!err && moved_error < error) memcpy(io->w1, moved.w1, n_bytes);
    neap_value_free(&moved);
    free((void *)sample.k);
    return err;
}

int neap_value_fit_ridge(const neap_value_rows *rows, const neap_value_options *options,
                         neap_value *io) {
    normal e;
    int err = normal_init(&io->shape, options->fix_linear, &e);
    if (err) return err;
    err = options->steps && io->shape.hidden && options->sample && options->sample < rows->n
              ? project_by_sample(rows, options, &e, io)
              : project(rows, options, &e, io);
    normal_fini(&e);
    return err;
}
