/* test_train_low_rank.c - a matrix of low rank comes back, one of more loses what its smaller
 * singular values hold and no more. */
#include <math.h>

#include "check.h"
#include "low_rank.h"

enum { ROWS = 40, N = 12 };

static uint64_t state = 7;

static float uniform(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)(state >> 40) * 0x1p-23f - 1;
}

/* A sum of products of columns and rows, the k-th weighed by scale[k]. */
static void fill(float *m, const float *scale, size_t rank) {
    for (size_t i = 0; i < ROWS * N; i++)
        m[i] = 0;
    for (size_t k = 0; k < rank; k++) {
        float row[N];
        for (size_t c = 0; c < N; c++)
            row[c] = uniform() * scale[k];
        for (size_t r = 0; r < ROWS; r++) {
            const float weight = uniform();
            for (size_t c = 0; c < N; c++)
                m[r * N + c] += weight * row[c];
        }
    }
}

static double lost(const float *a, const float *b) {
    double error = 0, all = 0;
    for (size_t i = 0; i < ROWS * N; i++) {
        error += pow((double)(a[i] - b[i]), 2);
        all += pow((double)a[i], 2);
    }
    return sqrt(error / all);
}

int main(void) {
    const float scale[] = {1, 0.5f, 0.01f};
    float m[ROWS * N], was[ROWS * N];
    fill(m, scale, 2);
    for (size_t i = 0; i < ROWS * N; i++)
        was[i] = m[i];
    CHECK(neap_low_rank(m, ROWS, N, 2) == 0);
    CHECK(lost(was, m) < 1e-3); /* factors in f16 */
    fill(m, scale, 3);
    for (size_t i = 0; i < ROWS * N; i++)
        was[i] = m[i];
    CHECK(neap_low_rank(m, ROWS, N, 2) == 0);
    CHECK(lost(was, m) > 2e-3 && lost(was, m) < 2e-2);
    CHECK(neap_low_rank(m, ROWS, N, 1) == 0);
    CHECK(lost(was, m) > 0.1);
    m[3] = NAN;
    CHECK(neap_low_rank(m, ROWS, N, 1) != 0);
    return 0;
}
