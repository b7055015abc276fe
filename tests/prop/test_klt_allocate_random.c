/* test_klt_allocate_random.c - the allocation of bits against dynamic programming over all of them.
 */
#include <math.h>
#include <string.h>

#include "check.h"
#include "klt.h"

enum { GROUPS = 3, MOST = 6, ALL = GROUPS * MOST };

static uint64_t state;

static uint32_t rnd(uint32_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((state >> 33) % n);
}

/* Deviations that fall; some equal, some zero. */
static void make(float *sd, uint32_t n) {
    float x = ldexpf(1 + (float)rnd(1000) / 1000, (int)rnd(6));
    for (uint32_t c = 0; c < n; c++) {
        sd[c] = x;
        if (rnd(3)) x *= (float)rnd(1000) / 1000;
        if (rnd(20) == 0) x = 0;
    }
}

/* The least distortion with at most so many bits. */
static double best(const float *sd, uint32_t n, uint32_t budget) {
    static double least[ALL * NEAP_KLT_BITS + 1], next[ALL * NEAP_KLT_BITS + 1];
    memset(least, 0, sizeof least);
    for (uint32_t c = 0; c < n; c++) {
        for (uint32_t b = 0; b <= budget; b++) {
            next[b] = INFINITY;
            for (uint32_t k = 0; k <= NEAP_KLT_BITS && k <= b; k++)
                next[b] =
                    fmin(next[b], least[b - k] + (double)sd[c] * sd[c] * neap_klt_distortion(k));
        }
        memcpy(least, next, sizeof least);
    }
    return least[budget];
}

int main(void) {
    for (uint32_t k = 1; k < NEAP_KLT_BITS; k++) /* what the method rests on */
        CHECK(neap_klt_distortion(k - 1) - neap_klt_distortion(k) >
              neap_klt_distortion(k) - neap_klt_distortion(k + 1));
    for (uint64_t seed = 1; seed <= 2000; seed++) {
        state = seed;
        float sd[GROUPS][MOST], all[ALL];
        uint8_t bits[GROUPS][MOST];
        neap_klt_spectrum groups[GROUPS];
        uint32_t n = 0;
        for (uint32_t g = 0; g < GROUPS; g++) {
            groups[g] = (neap_klt_spectrum){rnd(MOST + 1), sd[g], bits[g]};
            make(sd[g], groups[g].n);
            memcpy(all + n, sd[g], groups[g].n * sizeof *all);
            n += groups[g].n;
        }
        const uint32_t budget = rnd(n * NEAP_KLT_BITS + 10);
        double sum = 0, counted = 0;
        uint64_t given = 0;
        const uint64_t used = neap_klt_allocate(groups, GROUPS, budget, &sum);
        for (uint32_t g = 0; g < GROUPS; g++)
            for (uint32_t c = 0; c < groups[g].n; c++) {
                CHECK(bits[g][c] <= NEAP_KLT_BITS && (c == 0 || bits[g][c] <= bits[g][c - 1]));
                given += bits[g][c];
                counted += (double)sd[g][c] * sd[g][c] * neap_klt_distortion(bits[g][c]);
            }
        const uint32_t most = n * NEAP_KLT_BITS;
        const double least = best(all, n, budget < most ? budget : most);
        if (given != used || used > budget || fabs(counted - sum) > 1e-9 * sum ||
            fabs(sum - least) > 1e-9 * (least + 1e-30)) {
            fprintf(stderr, "seed %llu: budget %u, used %llu, sum %g, best %g\n",
                    (unsigned long long)seed, budget, (unsigned long long)used, sum, least);
            return 1;
        }
    }
    /* 8x of a group of 1024 columns: two bits a value less the mean and the outliers. */
    const uint64_t budget = neap_klt_budget_bits(1024, 4, 8);
    CHECK(budget > 1024 * 2 * 94 / 100 && budget < 1024 * 2);
    CHECK(neap_klt_budget_bits(1024, 4, 1e6) == 0);
    return 0;
}
