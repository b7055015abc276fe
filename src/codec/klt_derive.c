/* klt_derive.c - F from G and the metric S, for files that do not hold it.
 *
 * With Q = S S', the y that minimise |(x - y G) S|^2 are x F, F = Q G' (G Q G')^-1. Had G not been
 * rounded, G Q G' would be 1. It is nearly, so F is found by Newton's iteration from F = Q G':
 * E = 1 - G F, F += F E, which squares E. All products are the kernel's project(): f32 in a fixed
 * order, so the same on every kernel.
 *
 * Matrices are in one of two forms, as project() wants them: strips [columns / 6][rows][6] on the
 * left, transposed, and panels [columns / 64][rows][64] on the right. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "bytes.h"
#include "klt_int.h"
#include "neap.h"

#define STRIP NEAP_KLT_STRIP
#define TILE NEAP_KLT_TILE
#define GOOD 1e-4f /* of an element of E: the roundings of a stored F are no smaller */

enum { MOST_ROUNDS = 6 };

static float *strip_at(float *a, uint32_t rows, uint32_t row, uint32_t column) {
    return a + ((size_t)(column / STRIP) * rows + row) * STRIP + column % STRIP;
}

static float *panel_at(float *x, uint32_t rows, uint32_t row, uint32_t column) {
    return x + ((size_t)(column / TILE) * rows + row) * TILE + column % TILE;
}

static uint32_t tiles(uint32_t n) {
    return (n + TILE - 1) / TILE;
}

static uint32_t strips(uint32_t n) {
    return (n + STRIP - 1) / STRIP;
}

/* out += a' x: rows of out are the columns of a; out's panels have out_rows rows, of which these
 * begin at first. */
static void multiply(const neap_klt_kernel *kernel, const float *a, uint32_t a_columns,
                     const float *x, uint32_t rows, uint32_t n_tiles, float *out, uint32_t out_rows,
                     uint32_t first, size_t x_panel) {
    for (uint32_t t = 0; t < n_tiles; t++)
        for (uint32_t s = 0; s < strips(a_columns); s++) {
            float y[STRIP * TILE] = {0};
            const uint32_t left = a_columns - s * STRIP, n = left < STRIP ? left : STRIP;
            kernel->project(a + (size_t)s * rows * STRIP, a, x + t * x_panel, rows, y);
            float *to = panel_at(out, out_rows, first + s * STRIP, t * TILE);
            for (uint32_t i = 0; i < n * TILE; i++)
                to[i] += y[i];
        }
}

typedef struct derivation {
    const neap_klt_kernel *kernel;
    uint32_t n, k;   /* columns, components */
    float *g_strips; /* G' [n][k] */
    float *f;        /* [n][k] panels */
    float *f_strips; /* F' [k][n] */
    float *e;        /* [k][k] panels */
} derivation;

static int make_room(derivation *d) {
    const size_t panels = (size_t)tiles(d->k) * TILE;
    d->g_strips = calloc((size_t)strips(d->k) * STRIP * d->n, sizeof(float));
    d->f = calloc(panels * d->n, sizeof(float));
    d->f_strips = calloc((size_t)strips(d->n) * STRIP * d->k, sizeof(float));
    d->e = malloc(panels * d->k * sizeof(float));
    return d->g_strips && d->f && d->f_strips && d->e ? 0 : -ENOMEM;
}

static void free_room(derivation *d) {
    free(d->g_strips);
    free(d->f);
    free(d->f_strips);
    free(d->e);
}

/* F = S S G'; S is symmetric. */
static int begin(derivation *d, const neap_klt_block *block, const neap_klt_group *group,
                 const neap_klt_basis *basis) {
    const size_t panels = (size_t)tiles(d->k) * TILE;
    float *x = calloc(panels * d->n, sizeof *x), *once = calloc(panels * d->n, sizeof *once);
    for (uint32_t c = 0; x && once && c < d->k; c++)
        for (uint32_t j = 0; j < d->n; j++) {
            const float value = neap_f32_of_f16(group->g[(size_t)c * d->n + j]);
            *strip_at(d->g_strips, d->n, j, c) = value;
            *panel_at(x, d->n, j, c) = value;
        }
    const float *metric = basis->metric;
    for (neap_klt_head head = {0}; x && once && neap_klt_next_head(block, group, &head);) {
        const size_t panel = (size_t)d->n * TILE, at = (size_t)head.column * TILE;
        multiply(d->kernel, metric, head.dim, x + at, head.dim, tiles(d->k), once, d->n,
                 head.column, panel);
        multiply(d->kernel, metric, head.dim, once + at, head.dim, tiles(d->k), d->f, d->n,
                 head.column, panel);
        metric += (size_t)strips(head.dim) * head.dim * STRIP;
    }
    const int err = x && once ? 0 : -ENOMEM;
    free(x);
    free(once);
    return err;
}

/* E = 1 - G F; returns its largest element. */
static float make_error(derivation *d) {
    memset(d->e, 0, (size_t)tiles(d->k) * TILE * d->k * sizeof *d->e);
    multiply(d->kernel, d->g_strips, d->k, d->f, d->n, tiles(d->k), d->e, d->k, 0,
             (size_t)d->n * TILE);
    float largest = 0;
    for (uint32_t i = 0; i < d->k; i++)
        for (uint32_t c = 0; c < d->k; c++) {
            float *e = panel_at(d->e, d->k, i, c);
            *e = (i == c ? 1.0f : 0.0f) - *e;
            if (!(fabsf(*e) <= largest)) largest = fabsf(*e); /* NaN, too */
        }
    return largest;
}

static void improve(derivation *d) {
    for (uint32_t j = 0; j < d->n; j++)
        for (uint32_t c = 0; c < d->k; c++)
            *strip_at(d->f_strips, d->k, c, j) = *panel_at(d->f, d->n, j, c);
    multiply(d->kernel, d->f_strips, d->n, d->e, d->k, tiles(d->k), d->f, d->n, 0,
             (size_t)d->k * TILE);
}

int neap_klt_derive_f(const neap_klt_block *block, const neap_klt_group *group,
                      const neap_klt_basis *basis, float *f) {
    derivation d = {
        .kernel = neap_klt_kernel_at(0), .n = basis->n_columns, .k = basis->n_components};
    int err = make_room(&d);
    if (!err) err = begin(&d, block, group, basis);
    float error = INFINITY;
    for (uint32_t round = 0; !err && error > GOOD; round++) {
        const float now = make_error(&d);
        if (now > GOOD && (round == MOST_ROUNDS || !(now < error) || !(now < 1)))
            err = NEAP_E_CORRUPT; /* G and S are not of one basis */
        else if (now > GOOD)
            improve(&d);
        error = now;
    }
    for (uint32_t j = 0; !err && j < d.n; j++)
        for (uint32_t c = 0; c < d.k; c++)
            *strip_at(f, d.n, j, c) = *panel_at(d.f, d.n, j, c);
    free_room(&d);
    return err;
}
