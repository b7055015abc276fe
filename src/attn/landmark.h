/* landmark.h - landmarks of select.h: vectors in 8 bits, and their products with queries.
 *
 * A *panel* holds so many landmarks side by side: scales f32[lanes], then codes
 * i8[n_elems / 4, rounded up][lanes][4]. A query is rounded to 8 bits as well. The sums are of
 * integers, so that every kernel gives the same scores.
 * Memory     a panel is zero before its first landmark, and 64-byte aligned. */
#ifndef NEAP_ATTN_LANDMARK_H
#define NEAP_ATTN_LANDMARK_H

#include <stddef.h>
#include <stdint.h>

enum {
    NEAP_LANDMARK_LANES = 32,
    NEAP_LANDMARK_ELEMS = 1024, /* most of a vector */
    NEAP_LANDMARK_ROWS = 4,     /* most query rows of a call */
};

size_t neap_landmark_panel_bytes(uint32_t n_elems); /* a multiple of 128 */
void neap_landmark_put(void *panel, uint32_t lane, const float *vector, uint32_t n_elems);

typedef struct neap_landmark_query {
    uint32_t n_elems, n_rows;
    int8_t codes[NEAP_LANDMARK_ROWS][NEAP_LANDMARK_ELEMS]; /* zero past n_elems */
    float scales[NEAP_LANDMARK_ROWS];                      /* NaN: of a row that is not finite */
    int32_t sums[NEAP_LANDMARK_ROWS];                      /* of the codes */
} neap_landmark_query;

/* rows[i]: n_elems f32. */
void neap_landmark_query_of(const float *const rows[NEAP_LANDMARK_ROWS], uint32_t n_rows,
                            uint32_t n_elems, neap_landmark_query *ret_query);
/* best[lane] = the largest of itself and the products with the query's rows; NaN is never. */
void neap_landmark_score(const void *panel, const neap_landmark_query *query,
                         float best[NEAP_LANDMARK_LANES]);
/* Kernels of this machine, fastest first, by number: for tests. NULL past the last. */
typedef void (*neap_landmark_kernel)(const int8_t *codes, const neap_landmark_query *query,
                                     int32_t sums[NEAP_LANDMARK_ROWS][NEAP_LANDMARK_LANES]);
neap_landmark_kernel neap_landmark_kernel_at(uint32_t i);
#endif
