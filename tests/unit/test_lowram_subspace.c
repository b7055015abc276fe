/* test_lowram_subspace.c - what the directions leave of a matrix against the least there is (Eckart
 * and Young, by LAPACK's singular values), for both ways and matrices that are hard. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "subspace.h"
#include "value_int.h"

void dgesvd_(const char *jobu, const char *jobv, const int *m, const int *n, double *a,
             const int *lda, double *s, double *u, const int *ldu, double *v, const int *ldv,
             double *work, const int *lwork, int *info);

enum { ROWS = 300, COLUMNS = 130, R = 24 };

static float m[ROWS * COLUMNS], basis[COLUMNS * COLUMNS];

/* Deviations fall as decay^i along random directions. */
static void make(double decay, uint64_t seed) {
    static float a[ROWS * COLUMNS], b[COLUMNS * COLUMNS];
    neap_value_normal(seed, 1, ROWS * COLUMNS, a);
    neap_value_normal(seed + 1, 1, COLUMNS * COLUMNS, b);
    for (uint32_t r = 0; r < ROWS; r++)
        for (uint32_t c = 0; c < COLUMNS; c++) {
            double sum = 0;
            for (uint32_t i = 0; i < COLUMNS; i++)
                sum += (double)a[r * COLUMNS + i] * pow(decay, i) * (double)b[i * COLUMNS + c];
            m[r * COLUMNS + c] = (float)sum;
        }
}

/* The least that r directions leave, and the whole. */
static double least(uint32_t r, double *ret_all) {
    static double a[ROWS * COLUMNS], s[COLUMNS], work[20000];
    const int rows = COLUMNS, columns = ROWS, size = 20000, one = 1;
    int info = 0;
    double sum = 0;
    for (uint32_t i = 0; i < ROWS * COLUMNS; i++)
        a[i] = (double)m[i];
    dgesvd_("N", "N", &rows, &columns, a, &rows, s, NULL, &one, NULL, &one, work, &size, &info);
    CHECK(info == 0);
    *ret_all = 0;
    for (uint32_t i = 0; i < COLUMNS; i++) {
        *ret_all += s[i] * s[i];
        if (i >= r) sum += s[i] * s[i];
    }
    return sum;
}

static double left_by(uint32_t r) {
    double sum = 0;
    for (uint32_t row = 0; row < ROWS; row++) {
        double x[COLUMNS];
        for (uint32_t c = 0; c < COLUMNS; c++)
            x[c] = (double)m[row * COLUMNS + c];
        for (uint32_t i = 0; i < r; i++) {
            double dot = 0;
            for (uint32_t c = 0; c < COLUMNS; c++)
                dot += (double)m[row * COLUMNS + c] * (double)basis[i * COLUMNS + c];
            for (uint32_t c = 0; c < COLUMNS; c++)
                x[c] -= dot * (double)basis[i * COLUMNS + c];
        }
        for (uint32_t c = 0; c < COLUMNS; c++)
            sum += x[c] * x[c];
    }
    return sum;
}

static bool is_orthonormal(uint32_t r) {
    for (uint32_t i = 0; i < r; i++)
        for (uint32_t j = 0; j <= i; j++) {
            double dot = 0;
            for (uint32_t c = 0; c < COLUMNS; c++)
                dot += (double)basis[i * COLUMNS + c] * (double)basis[j * COLUMNS + c];
            if (!(fabs(dot - (i == j)) < 2e-5)) return false;
        }
    return true;
}

static void both_ways(double decay, double slack) {
    double all;
    make(decay, 11);
    for (uint32_t r = 1; r <= R; r += 7) {
        const double best = least(r, &all), rounding = 1e-9 * all;
        CHECK(neap_subspace_gram(m, ROWS, COLUMNS, r, basis) == 0 && is_orthonormal(r));
        CHECK(left_by(r) <= 1.0002 * best + rounding);
        memset(basis, 0, sizeof basis);
        CHECK(neap_subspace_randomised(m, ROWS, COLUMNS, r, 5, basis) == 0 && is_orthonormal(r));
        CHECK(left_by(r) <= slack * best + rounding);
        CHECK(left_by(r) >= 0.9999 * best - rounding); /* or the test counts wrong */
    }
}

/* Fewer different rows than directions, none at all, all directions, and numbers that are none. */
static void corners(void) {
    make(0.9, 3);
    for (uint32_t r = 0; r < ROWS; r++)
        memcpy(m + r * COLUMNS, m + r % 5 * COLUMNS, COLUMNS * sizeof *m);
    double all, best = least(R, &all);
    CHECK(best < 1e-9 * all);
    CHECK(neap_subspace_randomised(m, ROWS, COLUMNS, R, 5, basis) == 0 && is_orthonormal(R));
    CHECK(left_by(R) < 1e-6 * all);
    CHECK(neap_subspace_gram(m, ROWS, COLUMNS, R, basis) == 0 && is_orthonormal(R));
    CHECK(left_by(R) < 1e-6 * all);
    memset(m, 0, sizeof m);
    CHECK(neap_subspace_randomised(m, ROWS, COLUMNS, R, 5, basis) == 0 && is_orthonormal(R));
    make(0.97, 3);
    CHECK(neap_subspace_gram(m, ROWS, COLUMNS, COLUMNS, basis) == 0 && is_orthonormal(COLUMNS));
    CHECK(neap_subspace_randomised(m, ROWS, COLUMNS, COLUMNS, 5, basis) == 0);
    CHECK(is_orthonormal(COLUMNS));
    m[7] = NAN;
    CHECK(neap_subspace_gram(m, ROWS, COLUMNS, R, basis) == -EDOM);
    CHECK(neap_subspace_randomised(m, ROWS, COLUMNS, R, 5, basis) == -EDOM);
}

/* Columns that differ by a part in 10^5 only: plain Cholesky-QR fails on them. */
static void shifted_cholesky(void) {
    enum { N = 20 };
    static float y[ROWS * N], noise[ROWS * N], scratch[N * N];
    neap_value_normal(1, 1, ROWS * N, y);
    neap_value_normal(2, 1e-5f, ROWS * N, noise);
    for (uint32_t r = 0; r < ROWS; r++)
        for (uint32_t c = 0; c < N; c++)
            y[r * N + c] = y[r * N] + noise[r * N + c];
    CHECK(neap_subspace_orthonormalise(y, ROWS, N, scratch) == 0);
    for (uint32_t i = 0; i < N; i++)
        for (uint32_t j = 0; j <= i; j++) {
            double dot = 0;
            for (uint32_t r = 0; r < ROWS; r++)
                dot += (double)y[r * N + i] * (double)y[r * N + j];
            CHECK(fabs(dot - (i == j)) < 2e-5);
        }
}

int main(void) {
    both_ways(0.8, 1.001);
    both_ways(0.99, 1.05);
    corners();
    shifted_cholesky();
    CHECK(!neap_subspace_is_wide(768, 60) && neap_subspace_is_wide(4096, 400) &&
          !neap_subspace_is_wide(4096, 2040));
    return 0;
}
