/* adam.c - see adam.h. */
#include "adam.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BETA1 0.9
#define BETA2 0.999
#define EPSILON 1e-8f

int neap_adam_init(neap_adam *adam, size_t n, double rate, double decay) {
    float *m = calloc(2 * n + 1, sizeof *m);
    if (!m) return -ENOMEM;
    *adam = (neap_adam){.m = m, .v = m + n, .n = n, .rate = rate, .decay = decay};
    return 0;
}

void neap_adam_restart(neap_adam *adam) {
    memset(adam->m, 0, 2 * adam->n * sizeof *adam->m);
    adam->step = 0;
}

void neap_adam_fini(neap_adam *adam) {
    free(adam->m);
    *adam = (neap_adam){0};
}

void neap_adam_step(neap_adam *adam, const float *gradient, float *params) {
    adam->step++;
    const float rate = (float)(adam->rate / (1 - pow(BETA1, adam->step)));
    const float root = (float)(1 / sqrt(1 - pow(BETA2, adam->step)));
    const float keep = (float)(1 - adam->rate * adam->decay);
    for (size_t i = 0; i < adam->n; i++) {
        const float g = gradient[i];
        adam->m[i] += (float)(1 - BETA1) * (g - adam->m[i]);
        adam->v[i] += (float)(1 - BETA2) * (g * g - adam->v[i]);
        params[i] = params[i] * keep - rate * adam->m[i] / (sqrtf(adam->v[i]) * root + EPSILON);
    }
}
