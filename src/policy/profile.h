/* profile.h - what this device does a second, and the rates that placement reckons with. Pure.
 * Units     bytes, bytes per second (bps), ns. 0 bps: not measured.
 * Source    mzCache (arXiv 2609.01338) section 4.3, "offline profiling"; here it goes on: rates are
 *           corrected by what real restores took.
 * Threads   no state; the caller keeps changes of one struct apart. */
#ifndef NEAP_POLICY_PROFILE_H
#define NEAP_POLICY_PROFILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "neap.h"

/* Until anything was measured. */
#define NEAP_DEFAULT_READ_BPS 1500000000u
#define NEAP_DEFAULT_DECODE_BPS 8000000000u

#define NEAP_BPS_MAX 1000000000000000u /* what is above is no measurement */

enum {
    NEAP_PROFILE_SIZES = 4,
    NEAP_PROFILE_DEPTHS = 4,
    NEAP_PROFILE_CODECS = 8,
    NEAP_PROFILE_THREADS = 16,
    NEAP_PROFILE_MODELS = 32,
    NEAP_PROFILE_ATTENTIONS = 64,
};
extern const uint32_t neap_profile_sizes[NEAP_PROFILE_SIZES];   /* bytes of a request, rising */
extern const uint32_t neap_profile_depths[NEAP_PROFILE_DEPTHS]; /* requests in flight, rising */

typedef struct neap_profile_codec {
    char name[32];
    uint64_t decode_bps[NEAP_PROFILE_THREADS]; /* uncompressed, all threads: [n - 1] for n */
    uint64_t restored_bps;                     /* of the memory path, from real restores */
} neap_profile_codec;

/* A resident run of one model. */
typedef struct neap_profile_model {
    uint64_t digest;
    char name[64];
    uint32_t n_layers, n_threads;
    uint64_t kv_chunk_bytes; /* one layer's chunk in f16 */
    uint64_t prefill_ns;     /* of one layer, for each token of a prompt */
    uint64_t decode_ns;      /* of one layer, for one token alone */
} neap_profile_model;

/* One kind of attention, timed once by each kernel. */
typedef struct neap_profile_attention {
    char kind[128]; /* whatever tells kinds apart, as text */
    neap_attention_times times;
} neap_profile_attention;

typedef struct neap_profile {
    bool is_direct; /* reads went around the page cache */
    uint64_t read_bps[NEAP_PROFILE_SIZES][NEAP_PROFILE_DEPTHS];
    uint64_t populate_small_bps, populate_huge_bps; /* first touch, one thread */
    uint64_t restored_read_bps;                     /* of the storage path, from real restores */
    size_t n_codecs;
    neap_profile_codec codecs[NEAP_PROFILE_CODECS];
    size_t n_models;
    neap_profile_model models[NEAP_PROFILE_MODELS];
    size_t n_attentions;
    neap_profile_attention attentions[NEAP_PROFILE_ATTENTIONS];
} neap_profile;

/* The codec's entry; NULL when there is none. The second adds it: NULL when full or no name. */
const neap_profile_codec *neap_profile_codec_find(const neap_profile *profile, const char *name);
neap_profile_codec *neap_profile_codec_add(neap_profile *profile, const char *name);
/* Replaces the model of the same digest, else adds it; when full the oldest one goes. */
void neap_profile_model_put(neap_profile *profile, const neap_profile_model *model);
/* The same by kind; -EINVAL for a kind that is empty or too long. */
int neap_profile_attention_put(neap_profile *profile, const char *kind, neap_attention_times times);
const neap_profile_attention *neap_profile_attention_find(const neap_profile *profile,
                                                          const char *kind);

/* ---- what storage does ---- */

uint64_t neap_profile_best_read(const neap_profile *profile); /* of all sizes and depths */
/* Requests of so many bytes, so many at a time; between the sizes measured by their logarithm, at
 * the next depth below. 0: not measured. */
uint64_t neap_profile_read_at(const neap_profile *profile, uint64_t request_bytes, uint32_t depth);
/* Whether reads of that kind reach nine tenths of the best. */
bool neap_profile_saturates(const neap_profile *profile, uint64_t request_bytes, uint32_t depth);
/* The smallest size measured from which on they do; 0: none. */
uint64_t neap_profile_saturating(const neap_profile *profile, uint32_t depth);

/* ---- rates of the two restore paths ---- */

/* One path's throughput: what was believed, and what restores say. */
typedef struct neap_rate {
    uint64_t bps;           /* reckon with this; never 0 after init */
    uint64_t reference_bps; /* of the profile; 0: there was none */
    bool is_guess;          /* nothing measured yet */
    uint64_t window_bytes, window_ns;
} neap_rate;

typedef struct neap_rates {
    neap_rate read, decode;
} neap_rates;

/* Threads of the restore pipeline on each path. */
typedef struct neap_path_threads {
    uint32_t storage, memory;
} neap_path_threads;

/* Rates out of a profile (NULL: defaults) for that codec. What real restores took goes before what
 * was measured alone; otherwise committing the pages is reckoned with, for each thread does that
 * before it reads or decodes. */
void neap_rates_init(neap_rates *rates, const neap_profile *profile, const char *codec,
                     neap_path_threads threads);

/* So many bytes took a path so long. After each window of bytes: the rate becomes the window's when
 * it was a guess or is off by more than a quarter, else it moves a quarter of the way. True when it
 * changed. */
#define NEAP_RATE_WINDOW_BYTES ((uint64_t)64 << 20)
bool neap_rate_observe(neap_rate *rate, uint64_t bytes, uint64_t ns);
bool neap_rate_is_off(uint64_t bps, uint64_t reference_bps); /* by more than a quarter */
neap_rate_source neap_rates_source(const neap_rates *rates);
#endif
