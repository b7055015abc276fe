/* test_landmark - products of landmarks with queries: against sums in double of what 8 bits leave,
 * and every kernel against the plain one. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "landmark.h"

enum { LANES = NEAP_LANDMARK_LANES, ROWS = NEAP_LANDMARK_ROWS };

static float random_value(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(*state >> 33) / (double)(1u << 30) - 1.0);
}

static double quantised(const float *x, uint32_t n, uint32_t i) {
    float largest = 0.0f;
    for (uint32_t j = 0; j < n; j++) {
        largest = fmaxf(largest, fabsf(x[j]));
    }
    return largest > 0.0f ? rint((double)x[i] * 127.0 / (double)largest) * (double)largest / 127.0
                          : 0.0;
}

static void check(uint32_t n, uint32_t n_rows, uint64_t seed) {
    float vectors[LANES][NEAP_LANDMARK_ELEMS], queries[ROWS][NEAP_LANDMARK_ELEMS];
    const float *rows[ROWS];
    neap_landmark_query query;
    void *panel = aligned_alloc(64, (neap_landmark_panel_bytes(n) + 63) / 64 * 64);
    CHECK(panel != NULL);
    memset(panel, 0, neap_landmark_panel_bytes(n));
    for (uint32_t i = 0; i < LANES; i++) {
        for (uint32_t e = 0; e < n; e++) {
            vectors[i][e] = (i == 7 ? 0.0f : 1.0f) * random_value(&seed);
        }
        neap_landmark_put(panel, i, vectors[i], n);
    }
    for (uint32_t r = 0; r < ROWS; r++) {
        rows[r] = queries[r];
        for (uint32_t e = 0; e < n; e++) {
            queries[r][e] = 100.0f * random_value(&seed);
        }
    }
    neap_landmark_query_of(rows, n_rows, n, &query);

    float best[LANES];
    for (uint32_t i = 0; i < LANES; i++) {
        best[i] = -INFINITY;
    }
    neap_landmark_score(panel, &query, best);
    for (uint32_t i = 0; i < LANES; i++) {
        double most = -INFINITY;
        for (uint32_t r = 0; r < n_rows; r++) {
            double sum = 0.0;
            for (uint32_t e = 0; e < n; e++) {
                sum += quantised(queries[r], n, e) * quantised(vectors[i], n, e);
            }
            most = fmax(most, sum);
        }
        /* One code of either may be rounded the other way. */
        CHECK(fabs((double)best[i] - most) <= 1e-5 * n * 100.0 + 100.0 / 127.0);
    }

    const int8_t *codes = (const int8_t *)panel + LANES * sizeof(float);
    int32_t plain[ROWS][LANES], sums[ROWS][LANES];
    uint32_t last = 0;
    while (neap_landmark_kernel_at(last + 1) != NULL) {
        last++;
    }
    neap_landmark_kernel_at(last)(codes, &query, plain);
    for (uint32_t k = 0; k < last; k++) {
        memset(sums, 0x55, sizeof sums);
        neap_landmark_kernel_at(k)(codes, &query, sums);
        CHECK(memcmp(sums, plain, n_rows * sizeof plain[0]) == 0);
    }
    free(panel);
}

static void check_extremes(void) {
    float vector[NEAP_LANDMARK_ELEMS], row[NEAP_LANDMARK_ELEMS], best[LANES] = {0};
    const float *rows[ROWS] = {row, row, row, row};
    neap_landmark_query query;
    void *panel = aligned_alloc(64, neap_landmark_panel_bytes(NEAP_LANDMARK_ELEMS));
    CHECK(panel != NULL);
    memset(panel, 0, neap_landmark_panel_bytes(NEAP_LANDMARK_ELEMS));
    for (uint32_t e = 0; e < NEAP_LANDMARK_ELEMS; e++) {
        vector[e] = 3.0f;
        row[e] = -2.0f;
    }
    neap_landmark_put(panel, 0, vector, NEAP_LANDMARK_ELEMS);
    neap_landmark_query_of(rows, 1, NEAP_LANDMARK_ELEMS, &query);
    best[0] = -INFINITY;
    neap_landmark_score(panel, &query, best);
    CHECK(fabsf(best[0] + 6.0f * NEAP_LANDMARK_ELEMS) < 1.0f);
    row[5] = NAN; /* is never the best */
    neap_landmark_query_of(rows, 1, NEAP_LANDMARK_ELEMS, &query);
    best[0] = -7.0f;
    neap_landmark_score(panel, &query, best);
    CHECK(best[0] == -7.0f);
    row[5] = INFINITY;
    neap_landmark_query_of(rows, 1, NEAP_LANDMARK_ELEMS, &query);
    neap_landmark_score(panel, &query, best);
    CHECK(best[0] == -7.0f);
    free(panel);
}

int main(void) {
    const uint32_t sizes[] = {1, 3, 4, 6, 48, 64, 128, 257, 1024};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (uint32_t n_rows = 1; n_rows <= ROWS; n_rows++) {
            check(sizes[i], n_rows, 77 * i + n_rows);
        }
    }
    check_extremes();
    return 0;
}
