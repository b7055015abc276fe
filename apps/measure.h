/* measure.h - what `neap profile` measures. Figures are medians of rounds that visit everything in
 * turn, so that a disturbance does not fall on one of them alone.
 * Errors    0 or -errno; figures that could not be had stay 0. */
#ifndef NEAP_APPS_MEASURE_H
#define NEAP_APPS_MEASURE_H

#include "cli.h"
#include "codec.h"
#include "profile.h"

typedef struct neap_measure_plan {
    const char *folder;   /* swap folder: where the file for reading is made */
    uint64_t file_bytes;  /* read once for each size, depth and round */
    uint64_t touch_bytes; /* first touched once a round, in small pages and in huge ones */
    uint64_t decode_ns;   /* for each codec and number of threads, a round */
    uint32_t n_rounds, n_threads;
} neap_measure_plan;

/* The plan for this machine; folder and so on as given. */
neap_measure_plan neap_measure_plan_make(const char *folder, bool quick, uint32_t n_threads);
/* Reads by size and depth, into profile->read_bps and is_direct. Fails: errors of the file. */
int neap_measure_reads(const neap_measure_plan *plan, neap_profile *profile);
int neap_measure_decoding(const neap_measure_plan *plan, neap_profile *profile);
int neap_measure_touching(const neap_measure_plan *plan, neap_profile *profile);

/* The chunk that decoding is measured on: one plane of f16, K or V of 8 heads of 64. */
#define NEAP_MEASURE_ROW_ELEMS 512u
neap_codec_chunk neap_measure_chunk(uint16_t *values);
/* Normal-looking f16 values: random mantissa and sign, exponents near 1. */
void neap_measure_fill(uint16_t *values, size_t n);
#endif
