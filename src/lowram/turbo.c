/* turbo.c - see turbo.h. */
#include "turbo.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "half.h"
#include "value_int.h"

#define F16_MAX 65504.0f

/* ---- codes ---- */

#define SQRT_2 1.41421356237309505
#define SQRT_2_PI 2.50662827463100050

static double density(double x) {
    return exp(-x * x / 2) / SQRT_2_PI;
}

static double below(double x) {
    return erfc(-x / SQRT_2) / 2;
}

/* Lloyd's iteration: each value the mean of its cell, each limit the middle of two values. It
 * starts from the density that is best for many bits, a normal one three times as wide, so that
 * what is left to do is at the ends. */
void neap_turbo_init(neap_turbo *turbo, uint32_t bits) {
    *turbo = (neap_turbo){.bits = bits};
    if (bits > NEAP_TURBO_BITS) return;
    const uint32_t n = 1u << bits;
    double values[1 << NEAP_TURBO_BITS], limits[1 + (1 << NEAP_TURBO_BITS)];
    for (uint32_t i = 0; i < n; i++) { /* the quantiles, by bisection */
        double low = -10, high = 10;
        for (int step = 0; step < 50; step++) {
            const double middle = (low + high) / 2;
            *(below(middle / sqrt(3)) < (i + 0.5) / n ? &low : &high) = middle;
        }
        values[i] = low;
    }
    double moved = 1, weight = 0;
    limits[0] = -40, limits[n] = 40;
    for (int step = 0; step < 2000 && moved > 1e-7; step++) {
        moved = weight = 0;
        for (uint32_t i = 1; i < n; i++)
            limits[i] = (values[i - 1] + values[i]) / 2;
        for (uint32_t i = 0; i < n; i++) {
            const double mass = limits[i] < 0 ? below(limits[i + 1]) - below(limits[i])
                                              : below(-limits[i]) - below(-limits[i + 1]);
            const double mean = (density(limits[i]) - density(limits[i + 1])) / mass;
            moved = fmax(moved, fabs(mean - values[i]));
            weight += mass * mean * mean;
            values[i] = mean;
        }
    }
    turbo->distortion = 1 - weight;
    for (uint32_t i = 0; i < n; i++) {
        turbo->values[i] = (float)values[i];
        turbo->limits[i] = (float)limits[i + 1];
    }
}

size_t neap_turbo_row_bytes(uint32_t bits, uint32_t n) {
    return bits > NEAP_TURBO_BITS ? (size_t)n * 2 : 2 + ((size_t)n * bits + 7) / 8;
}

/* NaN is 0. */
static uint16_t f16_within(float x) {
    return neap_f16_of_f32(x >= -F16_MAX ? fminf(x, F16_MAX) : x < 0 ? -F16_MAX : 0);
}

static void put_half(uint8_t *dst, float x) {
    const uint16_t half = f16_within(x);
    memcpy(dst, &half, sizeof half);
}

static float get_half(const uint8_t *src) {
    uint16_t half;
    memcpy(&half, src, sizeof half);
    return neap_f32_of_f16(half);
}

static uint32_t code_of(const neap_turbo *turbo, float x) {
    uint32_t code = 0;
    for (uint32_t step = 1u << (turbo->bits - 1); step; step /= 2)
        code += x > turbo->limits[code + step - 1] ? step : 0;
    return code;
}

void neap_turbo_encode(const neap_turbo *turbo, const float *row, uint32_t n, uint8_t *dst) {
    if (turbo->bits > NEAP_TURBO_BITS) {
        for (uint32_t i = 0; i < n; i++)
            put_half(dst + 2 * (size_t)i, row[i]);
        return;
    }
    double power = 0, match = 0, coded = 0;
    for (uint32_t i = 0; i < n; i++)
        power += (double)row[i] * (double)row[i];
    const float inverse = power > 0 ? (float)(1 / sqrt(power / n)) : 0;
    uint32_t held = 0, n_held = 0;
    uint8_t *at = dst + 2;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t code = code_of(turbo, row[i] * inverse);
        const double value = (double)turbo->values[code];
        match += value * (double)row[i];
        coded += value * value;
        held |= code << n_held;
        for (n_held += turbo->bits; n_held >= 8; n_held -= 8, held >>= 8)
            *at++ = (uint8_t)held;
    }
    if (n_held) *at = (uint8_t)held;
    put_half(dst, (float)(match / coded));
}

int neap_turbo_decode(const neap_turbo *turbo, const uint8_t *src, uint32_t n, float *ret_row) {
    if (turbo->bits > NEAP_TURBO_BITS) {
        int is_good = 1;
        for (uint32_t i = 0; i < n; i++) {
            ret_row[i] = get_half(src + 2 * (size_t)i);
            is_good &= isfinite(ret_row[i]) != 0;
        }
        return is_good;
    }
    const float scale = get_half(src);
    if (!isfinite(scale)) return 0;
    float scaled[1 << NEAP_TURBO_BITS];
    const uint32_t mask = (1u << turbo->bits) - 1;
    for (uint32_t i = 0; i <= mask; i++)
        scaled[i] = scale * turbo->values[i];
    uint32_t held = 0, n_held = 0;
    const uint8_t *at = src + 2;
    for (uint32_t i = 0; i < n; i++) {
        if (n_held < turbo->bits) {
            held |= (uint32_t)*at++ << n_held;
            n_held += 8;
        }
        ret_row[i] = scaled[held & mask];
        held >>= turbo->bits;
        n_held -= turbo->bits;
    }
    return 1;
}

/* ---- turns ---- */

/* LAPACK, of Fortran. */
void sgeqrf_(const int *m, const int *n, float *a, const int *lda, float *tau, float *work,
             const int *lwork, int *info);
void sorgqr_(const int *m, const int *n, const int *k, float *a, const int *lda, const float *tau,
             float *work, const int *lwork, int *info);

int neap_turbo_turn(uint64_t seed, uint32_t n, float *ret_turn) {
    const int order = (int)n, work_size = 64 * (int)n;
    int info = 0;
    float *tau = malloc((n + (size_t)work_size) * sizeof *tau);
    if (!tau) return -ENOMEM;
    float *work = tau + n;
    neap_value_normal(seed, 1, (size_t)n * n, ret_turn);
    sgeqrf_(&order, &order, ret_turn, &order, tau, work, &work_size, &info);
    if (!info) sorgqr_(&order, &order, &order, ret_turn, &order, tau, work, &work_size, &info);
    free(tau);
    return info ? -EDOM : 0;
}
