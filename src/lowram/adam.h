/* adam.h - the optimiser Adam (Kingma and Ba), with decay of the weights AdamW. */
#ifndef NEAP_LOWRAM_ADAM_H
#define NEAP_LOWRAM_ADAM_H

#include <stddef.h>
#include <stdint.h>

typedef struct neap_adam {
    float *m, *v; /* [n] first and second moments */
    size_t n;
    uint32_t step;
    double rate, decay; /* decay 0: Adam */
} neap_adam;

/* Fails: -ENOMEM. */
int neap_adam_init(neap_adam *adam, size_t n, double rate, double decay);
void neap_adam_restart(neap_adam *adam); /* as before the first step */
void neap_adam_fini(neap_adam *adam);    /* takes one that is all zero */
void neap_adam_step(neap_adam *adam, const float *gradient, float *params);
#endif
