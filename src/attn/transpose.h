/* transpose.h - 64 rows to a panel of 64 columns, by 128-bit vectors of the compiler: for every
 * machine that has such registers. */
#ifndef NEAP_ATTN_TRANSPOSE_H
#define NEAP_ATTN_TRANSPOSE_H

#include <stdint.h>
#include <string.h>

typedef uint16_t neap_u16x8 __attribute__((vector_size(16)));
typedef uint32_t neap_u32x4 __attribute__((vector_size(16)));

#define NEAP_ZIP16_LOW(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define NEAP_ZIP16_HIGH(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define NEAP_ZIP32_LOW(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define NEAP_ZIP32_HIGH(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)

/* panel[e][r] = rows[r][e] for 64 rows of n_elems elements of 16 bits, stride bytes apart. */
static inline void neap_transpose_16(const char *rows, size_t stride, uint32_t n_elems,
                                     uint16_t *panel) {
    uint32_t e = 0;
    for (; e + 8 <= n_elems; e += 8) {
        for (uint32_t r = 0; r < 64; r += 8) {
            neap_u16x8 a[8], b[8];
#pragma GCC unroll 8
            for (uint32_t i = 0; i < 8; i++) {
                memcpy(&a[i], rows + (r + i) * stride + 2 * (size_t)e, sizeof a[i]);
            }
            /* Three rounds of zipping row i with row i + 4. */
#pragma GCC unroll 3
            for (int round = 0; round < 3; round++) {
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    b[2 * i] = NEAP_ZIP16_LOW(a[i], a[i + 4]);
                    b[2 * i + 1] = NEAP_ZIP16_HIGH(a[i], a[i + 4]);
                }
                memcpy(a, b, sizeof a);
            }
#pragma GCC unroll 8
            for (uint32_t i = 0; i < 8; i++) {
                memcpy(panel + (size_t)(e + i) * 64 + r, &a[i], sizeof a[i]);
            }
        }
    }
    for (; e < n_elems; e++) {
        for (uint32_t r = 0; r < 64; r++) {
            memcpy(panel + (size_t)e * 64 + r, rows + r * stride + 2 * (size_t)e, 2);
        }
    }
}

/* The same for elements of 32 bits. */
static inline void neap_transpose_32(const float *rows, size_t stride, uint32_t n_elems,
                                     float *panel) {
    const char *bytes = (const char *)rows;
    uint32_t e = 0;
    for (; e + 4 <= n_elems; e += 4) {
        for (uint32_t r = 0; r < 64; r += 4) {
            neap_u32x4 a[4], b[4];
#pragma GCC unroll 4
            for (uint32_t i = 0; i < 4; i++) {
                memcpy(&a[i], bytes + (r + i) * stride + 4 * (size_t)e, sizeof a[i]);
            }
#pragma GCC unroll 2
            for (int round = 0; round < 2; round++) {
#pragma GCC unroll 2
                for (int i = 0; i < 2; i++) {
                    b[2 * i] = NEAP_ZIP32_LOW(a[i], a[i + 2]);
                    b[2 * i + 1] = NEAP_ZIP32_HIGH(a[i], a[i + 2]);
                }
                memcpy(a, b, sizeof a);
            }
#pragma GCC unroll 4
            for (uint32_t i = 0; i < 4; i++) {
                memcpy(panel + (size_t)(e + i) * 64 + r, &a[i], sizeof a[i]);
            }
        }
    }
    for (; e < n_elems; e++) {
        for (uint32_t r = 0; r < 64; r++) {
            memcpy(panel + (size_t)e * 64 + r, bytes + r * stride + 4 * (size_t)e, 4);
        }
    }
}
#endif
