/* turbo.h - TurboQuant: a row of nearly normal elements as one scale and Lloyd-Max codes.
 * A row is made nearly normal by a random turn (an orthogonal matrix) before it is coded. Its
 * scale is not its norm but what makes its codes fit best (least squares).
 * Source     TurboQuant (Zandieh et al., 2026), the quantiser of least squared error. */
#ifndef NEAP_LOWRAM_TURBO_H
#define NEAP_LOWRAM_TURBO_H

#include <stddef.h>
#include <stdint.h>

enum { NEAP_TURBO_BITS = 8, NEAP_TURBO_F16 = 16 };

typedef struct neap_turbo {
    uint32_t bits;                      /* 1 .. NEAP_TURBO_BITS, or NEAP_TURBO_F16: no codes */
    float values[1 << NEAP_TURBO_BITS]; /* of the codes, for a normal variable of unit variance */
    float limits[1 << NEAP_TURBO_BITS]; /* between the values of code i and i + 1 */
    double distortion; /* mean squared error of a normal variable of unit variance */
} neap_turbo;

/* bits as above. */
void neap_turbo_init(neap_turbo *turbo, uint32_t bits);
/* A row of n elements: codes from the lowest bit of a byte up, after the scale, an f16; or n f16.
 */
size_t neap_turbo_row_bytes(uint32_t bits, uint32_t n);
/* Elements beyond f16's range, or such a scale, are brought to its ends; what is no number is 0. */
void neap_turbo_encode(const neap_turbo *turbo, const float *row, uint32_t n, uint8_t *dst);
/* Any bytes: the scale may be infinite or NaN; returns 0 then, else 1. */
int neap_turbo_decode(const neap_turbo *turbo, const uint8_t *src, uint32_t n, float *ret_row);

/* A random orthogonal matrix [n][n], by seed. Fails: -ENOMEM, -EDOM. */
int neap_turbo_turn(uint64_t seed, uint32_t n, float *ret_turn);
#endif
