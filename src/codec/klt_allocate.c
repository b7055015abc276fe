/* klt_allocate.c - how many bits each component gets.
 *
 * The k-th bit of a component of deviation sd saves sd^2 * (D(k - 1) - D(k)). These gains fall with
 * k (checked by the test), and every bit costs the same: so the largest gains of all together, as
 * many as there are bits, are the optimum - water-filling, the level being the least gain taken.
 * The level is found by bisection over the bit patterns of doubles, which order like their values;
 * gains equal to it are handed out in the order of the components. */
#include <math.h>
#include <string.h>

#include "klt.h"

static const double distortion[NEAP_KLT_BITS + 1] = {1,       .3634,   .1175,   .03454, .009497,
                                                     .002499, .000640, .000162, .000040};

double neap_klt_distortion(uint32_t bits) {
    return distortion[bits < NEAP_KLT_BITS ? bits : NEAP_KLT_BITS];
}

static double gain(float sd, uint32_t bit) {
    return (double)sd * (double)sd * (distortion[bit - 1] - distortion[bit]);
}

/* Bits whose gain is above the level. */
static uint32_t bits_above(float sd, double level) {
    uint32_t bits = 0;
    while (bits < NEAP_KLT_BITS && gain(sd, bits + 1) > level)
        bits++;
    return bits;
}

static uint64_t count_above(const neap_klt_spectrum *groups, size_t n_groups, double level) {
    uint64_t bits = 0;
    for (size_t g = 0; g < n_groups; g++)
        for (uint32_t c = 0; c < groups[g].n; c++) {
            const uint32_t here = bits_above(groups[g].sd[c], level);
            if (here == 0) break; /* deviations fall */
            bits += here;
        }
    return bits;
}

static double of_pattern(uint64_t pattern) {
    double value;
    memcpy(&value, &pattern, sizeof value);
    return value;
}

/* The least level above which no more gains lie than there are bits. */
static double find_level(const neap_klt_spectrum *groups, size_t n_groups, uint64_t budget_bits) {
    const double largest = INFINITY;
    uint64_t low = 0, high;
    memcpy(&high, &largest, sizeof high);
    while (low < high) {
        const uint64_t middle = low + (high - low) / 2;
        if (count_above(groups, n_groups, of_pattern(middle)) <= budget_bits)
            high = middle;
        else
            low = middle + 1;
    }
    return of_pattern(low);
}

uint64_t neap_klt_allocate(const neap_klt_spectrum *groups, size_t n_groups, uint64_t budget_bits,
                           double *ret_distortion) {
    const double level = find_level(groups, n_groups, budget_bits);
    uint64_t used = count_above(groups, n_groups, level);
    double sum = 0;
    for (size_t g = 0; g < n_groups; g++)
        for (uint32_t c = 0; c < groups[g].n; c++) {
            const float sd = groups[g].sd[c];
            uint32_t bits = bits_above(sd, level);
            if (level > 0 && used < budget_bits && bits < NEAP_KLT_BITS &&
                gain(sd, bits + 1) == level) {
                bits++;
                used++;
            }
            groups[g].bits[c] = (uint8_t)bits;
            sum += (double)sd * (double)sd * distortion[bits];
        }
    if (ret_distortion) *ret_distortion = sum;
    return used;
}

uint64_t neap_klt_budget_bits(uint32_t n_columns, uint32_t outlier_permille, double ratio) {
    const double rows = NEAP_KLT_ROWS, columns = n_columns;
    const double outlier = 4 + columns + 2 * ceil(columns / 64);
    const double bytes =
        rows * columns * 2 / ratio - 2 * columns - rows * outlier_permille / 1000 * outlier;
    return bytes > 0 ? (uint64_t)(bytes * 8 / rows) : 0;
}
