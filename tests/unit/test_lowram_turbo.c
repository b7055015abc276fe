/* test_lowram_turbo.c - TurboQuant: distortion near theory, scales of any size, turns. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "half.h"
#include "turbo.h"
#include "value_int.h"

enum { N = 96, ROWS = 2000 };

static double power_of(const float *x, uint32_t n) {
    double power = 0;
    for (uint32_t i = 0; i < n; i++)
        power += (double)x[i] * (double)x[i];
    return power;
}

/* Of rows as they are, over their power. */
static double distortion(const neap_turbo *turbo, const float *rows, uint32_t n, uint32_t n_rows) {
    uint8_t coded[2 * N];
    float back[N];
    double off = 0, power = 0;
    for (uint32_t r = 0; r < n_rows; r++) {
        const float *row = rows + (size_t)r * n;
        neap_turbo_encode(turbo, row, n, coded);
        CHECK(neap_turbo_decode(turbo, coded, n, back));
        power += power_of(row, n);
        for (uint32_t i = 0; i < n; i++)
            back[i] -= row[i];
        off += power_of(back, n);
    }
    return off / power;
}

/* Max's distortions of a normal variable; no quantiser of so many levels is better. */
static void codebooks(void) {
    static const double known[] = {1, 0.3634, 0.1175, 0.03454, 0.009497, 0.002499, 0.000642};
    static float rows[ROWS * N];
    neap_value_normal(1, 3, ROWS * N, rows);
    for (uint32_t bits = 1; bits <= NEAP_TURBO_BITS; bits++) {
        neap_turbo turbo;
        neap_turbo_init(&turbo, bits);
        for (uint32_t i = 1; i < 1u << bits; i++)
            CHECK(turbo.values[i - 1] < turbo.limits[i - 1] &&
                  turbo.limits[i - 1] < turbo.values[i]);
        if (bits <= 6) CHECK(fabs(turbo.distortion / known[bits] - 1) < 0.004);
        const double measured = distortion(&turbo, rows, N, ROWS);
        CHECK(measured > 0.93 * turbo.distortion && measured < 1.05 * turbo.distortion);
    }
}

/* Codes and sizes of few elements; f16 as it is. */
static void bytes(void) {
    neap_turbo turbo;
    uint8_t coded[64];
    float back[8];
    const float row[8] = {-3, -0.1f, 0.1f, 3, 0.1f, -3, 3, -0.1f};
    CHECK(neap_turbo_row_bytes(2, 5) == 4 && neap_turbo_row_bytes(4, 5) == 5);
    CHECK(neap_turbo_row_bytes(1, 8) == 3 && neap_turbo_row_bytes(NEAP_TURBO_F16, 5) == 10);
    neap_turbo_init(&turbo, 2);
    neap_turbo_encode(&turbo, row, 5, coded);
    CHECK(coded[2] == (0 | 1 << 2 | 2 << 4 | 3 << 6) && coded[3] == 2);
    neap_turbo_init(&turbo, 3);
    neap_turbo_encode(&turbo, row, 8, coded);
    CHECK(neap_turbo_decode(&turbo, coded, 8, back));
    for (int i = 0; i < 8; i++)
        CHECK(row[i] * back[i] > 0 && back[i] == (fabsf(row[i]) > 1 ? copysignf(back[3], row[i])
                                                                    : copysignf(back[2], row[i])));
    neap_turbo_init(&turbo, NEAP_TURBO_F16);
    neap_turbo_encode(&turbo, row, 8, coded);
    CHECK(neap_turbo_decode(&turbo, coded, 8, back));
    for (int i = 0; i < 8; i++)
        CHECK(back[i] == neap_f32_of_f16(neap_f16_of_f32(row[i])));
}

/* The scale carries the size of a row, its codes the direction. */
static void scales(void) {
    neap_turbo turbo;
    float row[N], scaled[N], back[N];
    uint8_t coded[2 * N], other[2 * N];
    neap_turbo_init(&turbo, 4);
    const size_t len = neap_turbo_row_bytes(4, N);
    neap_value_normal(7, 1, N, row);
    neap_turbo_encode(&turbo, row, N, coded);
    for (int e = -12; e <= 15; e++) {
        for (uint32_t i = 0; i < N; i++)
            scaled[i] = ldexpf(row[i], e);
        neap_turbo_encode(&turbo, scaled, N, other);
        CHECK(memcmp(coded + 2, other + 2, len - 2) == 0);
        CHECK(neap_turbo_decode(&turbo, other, N, back));
        double off = 0;
        for (uint32_t i = 0; i < N; i++)
            off += pow((double)(back[i] - scaled[i]), 2);
        CHECK(off < 0.02 * power_of(scaled, N));
    }
    /* Of all scales the best: what is left stands at right angles to what is decoded. */
    neap_turbo_init(&turbo, 2);
    for (uint64_t seed = 0; seed < 20; seed++) {
        neap_value_normal(seed, 1, N, row);
        neap_turbo_encode(&turbo, row, N, coded);
        CHECK(neap_turbo_decode(&turbo, coded, N, back));
        double dot = 0;
        for (uint32_t i = 0; i < N; i++)
            dot += (double)((row[i] - back[i]) * back[i]);
        CHECK(fabs(dot) < 1e-3 * power_of(back, N));
    }
    neap_turbo_init(&turbo, 4);
    memset(row, 0, sizeof row);
    neap_turbo_encode(&turbo, row, N, coded);
    CHECK(neap_turbo_decode(&turbo, coded, N, back) && power_of(back, N) == 0);
    for (uint32_t i = 0; i < N; i++)
        row[i] = i % 2 ? 1e9f : -1e9f;
    for (uint32_t bits = 4; bits <= NEAP_TURBO_F16; bits += 12) {
        neap_turbo_init(&turbo, bits);
        neap_turbo_encode(&turbo, row, N, coded);
        CHECK(neap_turbo_decode(&turbo, coded, N, back));
        CHECK(back[1] > 6e4f && back[0] < -6e4f && isfinite(back[1]));
    }
    const uint16_t infinite = 0x7c00;
    memcpy(coded, &infinite, sizeof infinite);
    neap_turbo_init(&turbo, 4);
    CHECK(!neap_turbo_decode(&turbo, coded, N, back));
}

/* Rows with one large element are coded as well as others once they are turned. */
static void turns(void) {
    static float turn[N * N], rows[ROWS * N], turned[ROWS * N];
    CHECK(neap_turbo_turn(3, N, turn) == 0);
    for (uint32_t i = 0; i < N; i++)
        for (uint32_t j = 0; j < N; j++) {
            double sum = 0;
            for (uint32_t c = 0; c < N; c++)
                sum += (double)turn[i * N + c] * (double)turn[j * N + c];
            CHECK(fabs(sum - (i == j)) < 1e-5);
        }
    neap_value_normal(4, 0.02f, ROWS * N, rows);
    for (uint32_t r = 0; r < ROWS; r++) {
        rows[r * N + r % N] = 5;
        for (uint32_t i = 0; i < N; i++) {
            float sum = 0;
            for (uint32_t c = 0; c < N; c++)
                sum += turn[i * N + c] * rows[r * N + c];
            turned[r * N + i] = sum;
        }
    }
    neap_turbo turbo;
    neap_turbo_init(&turbo, 3);
    const double plain = distortion(&turbo, rows, N, ROWS),
                 better = distortion(&turbo, turned, N, ROWS);
    CHECK(plain > 3 * turbo.distortion && better < 1.15 * turbo.distortion);
}

int main(void) {
    codebooks();
    bytes();
    scales();
    turns();
    return 0;
}
