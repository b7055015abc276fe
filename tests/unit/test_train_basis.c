/* test_train_basis.c - the linear algebra of a basis on synthetic covariances. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "basis.h"
#include "check.h"

enum { BLOCK = 12, N_BLOCKS = 4, N = BLOCK * N_BLOCKS };

static uint64_t state = 1;

static double uniform(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 11) * 0x1p-53;
}

static double normal(void) {
    return sqrt(-2 * log(uniform() + 1e-300)) * cos(6.283185307179586 * uniform());
}

/* a' a of random a[rank][n]. */
static void random_form(double *out, uint32_t n, uint32_t rank) {
    memset(out, 0, (size_t)n * n * sizeof *out);
    double row[N];
    for (uint32_t r = 0; r < rank; r++) {
        for (uint32_t i = 0; i < n; i++)
            row[i] = normal() * (double)(r + 1);
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t j = 0; j < n; j++)
                out[i * n + j] += row[i] * row[j];
    }
}

static double entry(const double *a, const double *b, uint32_t n, uint32_t i, uint32_t j) {
    double sum = 0;
    for (uint32_t k = 0; k < n; k++)
        sum += a[i * n + k] * b[k * n + j];
    return sum;
}

static void roots(void) {
    double m[BLOCK * BLOCK], root[BLOCK * BLOCK], inverse[BLOCK * BLOCK];
    random_form(m, BLOCK, 2 * BLOCK);
    CHECK(neap_metric_roots(m, BLOCK, 1e-12, root, inverse) == 0);
    for (uint32_t i = 0; i < BLOCK; i++)
        for (uint32_t j = 0; j < BLOCK; j++) {
            CHECK(fabs(entry(root, root, BLOCK, i, j) - m[i * BLOCK + j]) < 1e-8 * m[0]);
            CHECK(fabs(entry(root, inverse, BLOCK, i, j) - (i == j)) < 1e-8);
            CHECK(fabs(root[i * BLOCK + j] - root[j * BLOCK + i]) < 1e-9 * root[0]);
        }
    /* one direction only: the others get the floor */
    double line[BLOCK * BLOCK] = {[0] = 4};
    CHECK(neap_metric_roots(line, BLOCK, 1e-4, root, inverse) == 0);
    CHECK(fabs(root[0] - 2) < 1e-12 && fabs(root[BLOCK + 1] - 0.02) < 1e-12);
    CHECK(fabs(inverse[BLOCK + 1] - 50) < 1e-9);
    double nothing[BLOCK * BLOCK] = {0};
    CHECK(neap_metric_roots(nothing, BLOCK, 1e-4, root, inverse) == 0);
    CHECK(fabs(root[0] - 1) < 1e-12 && fabs(inverse[BLOCK + 1] - 1) < 1e-12);
    nothing[0] = NAN;
    CHECK(neap_metric_roots(nothing, BLOCK, 1e-4, root, inverse) != 0);
}

static void covariance(void) {
    enum { ROWS = 37 };
    static float rows[ROWS * N], scratch[N * N];
    static double cov[N * N], expected[N * N];
    for (int pass = 0; pass < 2; pass++) {
        double mean[N] = {0};
        for (int i = 0; i < ROWS * N; i++)
            rows[i] = (float)(normal() + 5 * pass + i % 3);
        for (int i = 0; i < ROWS * N; i++)
            mean[i % N] += (double)rows[i] / ROWS;
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < N; i++)
                for (int j = 0; j <= i; j++)
                    expected[i * N + j] +=
                        ((double)rows[r * N + i] - mean[i]) * ((double)rows[r * N + j] - mean[j]);
        neap_covariance_add(cov, N, rows, ROWS, scratch);
    }
    for (int i = 0; i < N; i++)
        for (int j = 0; j <= i; j++)
            CHECK(fabs(cov[i * N + j] - expected[i * N + j]) < 1e-3);
}

static void basis(void) {
    static double cov[N * N], given[N * N], values[N_BLOCKS][2][BLOCK * BLOCK];
    static float ft[N * N], g[N * N], sd[N];
    neap_metric_block blocks[N_BLOCKS];
    for (int b = 0; b < N_BLOCKS; b++) {
        double m[BLOCK * BLOCK];
        random_form(m, BLOCK, BLOCK);
        CHECK(neap_metric_roots(m, BLOCK, 1e-4, values[b][0], values[b][1]) == 0);
        blocks[b] = (neap_metric_block){BLOCK, values[b][0], values[b][1]};
    }
    random_form(given, N, 2 * N);
    memcpy(cov, given, sizeof cov);
    CHECK(neap_basis_make(cov, N, blocks, N_BLOCKS, ft, g, sd) == 0);
    for (int a = 0; a < N; a++) {
        CHECK(a == 0 || sd[a] <= sd[a - 1]);
        for (int b = 0; b < N; b++) {
            double same = 0, variance = 0; /* g f = 1, f' cov f = sd^2 */
            for (int i = 0; i < N; i++) {
                same += (double)g[a * N + i] * (double)ft[b * N + i];
                for (int j = 0; j < N; j++)
                    variance += (double)ft[a * N + i] * given[i * N + j] * (double)ft[b * N + j];
            }
            CHECK(fabs(same - (a == b)) < 1e-3);
            CHECK(fabs(variance - (a == b ? (double)(sd[a] * sd[a]) : 0)) <
                  1e-4 * (double)(sd[0] * sd[0]));
        }
    }
}

static void spread(void) {
    enum { ROWS = 1000, COLUMNS = 3 };
    static float rows[ROWS * COLUMNS];
    const float ft[COLUMNS * COLUMNS] = {0, 0, 1, 0, 1, 0, 1, 0, 0}; /* in reverse */
    double sum[COLUMNS] = {0};
    for (int i = 0; i < ROWS * COLUMNS; i++) {
        rows[i] = (float)normal() * (float)(1 + i % COLUMNS);
        if (i / COLUMNS % 200 == 0) rows[i] *= 100; /* 5 rows, within the trimmed hundredth */
        sum[i % COLUMNS] += (double)(rows[i] * rows[i]);
    }
    float sd[COLUMNS];
    for (int c = 0; c < COLUMNS; c++)
        sd[c] = (float)sqrt(sum[COLUMNS - 1 - c] / ROWS);
    CHECK(sd[0] > 6);
    CHECK(neap_spread(rows, ROWS, ft, COLUMNS, 0.01f, sd) == 0);
    for (int c = 0; c < COLUMNS; c++)
        CHECK(fabsf(sd[c] - (float)(COLUMNS - c)) < 0.1f * (float)(COLUMNS - c));
}

int main(void) {
    roots();
    covariance();
    basis();
    spread();
    return 0;
}
