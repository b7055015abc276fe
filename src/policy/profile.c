/* profile.c - see profile.h.
 *
 * Times are averaged, not rates: a path that moves half of its bytes at r and half at 2r has the
 * rate that follows from the sum of the times. All arithmetic is in double: rates are good to a few
 * per cent at best. */
#include "profile.h"

#include <errno.h>
#include <math.h>
#include <string.h>

const uint32_t neap_profile_sizes[NEAP_PROFILE_SIZES] = {64u << 10, 256u << 10, 1u << 20, 4u << 20};
const uint32_t neap_profile_depths[NEAP_PROFILE_DEPTHS] = {1, 2, 4, 8};

#define SATURATED 0.9
#define OFF 0.25
#define STEP 0.25 /* weight of a window that agrees with the rate */

/* ---- lists ---- */

const neap_profile_codec *neap_profile_codec_find(const neap_profile *profile, const char *name) {
    for (size_t i = 0; i < profile->n_codecs; i++)
        if (strcmp(profile->codecs[i].name, name) == 0) return &profile->codecs[i];
    return NULL;
}

neap_profile_codec *neap_profile_codec_add(neap_profile *profile, const char *name) {
    const size_t len = strlen(name);
    for (size_t i = 0; i < profile->n_codecs; i++)
        if (strcmp(profile->codecs[i].name, name) == 0) return &profile->codecs[i];
    if (profile->n_codecs == NEAP_PROFILE_CODECS || len == 0) return NULL;
    neap_profile_codec *codec = &profile->codecs[profile->n_codecs];
    if (len >= sizeof codec->name) return NULL;
    *codec = (neap_profile_codec){0};
    memcpy(codec->name, name, len + 1);
    profile->n_codecs++;
    return codec;
}

void neap_profile_model_put(neap_profile *profile, const neap_profile_model *model) {
    for (size_t i = 0; i < profile->n_models; i++)
        if (profile->models[i].digest == model->digest) {
            profile->models[i] = *model;
            return;
        }
    if (profile->n_models == NEAP_PROFILE_MODELS) {
        memmove(profile->models, profile->models + 1,
                (NEAP_PROFILE_MODELS - 1) * sizeof *profile->models);
        profile->n_models--;
    }
    profile->models[profile->n_models++] = *model;
}

const neap_profile_attention *neap_profile_attention_find(const neap_profile *profile,
                                                          const char *kind) {
    for (size_t i = 0; i < profile->n_attentions; i++)
        if (strcmp(profile->attentions[i].kind, kind) == 0) return &profile->attentions[i];
    return NULL;
}

int neap_profile_attention_put(neap_profile *profile, const char *kind,
                               neap_attention_times times) {
    neap_profile_attention entry = {.times = times};
    const size_t len = strlen(kind);
    if (len == 0 || len >= sizeof entry.kind) return -EINVAL;
    memcpy(entry.kind, kind, len);
    size_t i = 0;
    while (i < profile->n_attentions && strcmp(profile->attentions[i].kind, kind) != 0)
        i++;
    if (i == NEAP_PROFILE_ATTENTIONS) {
        i--;
        memmove(profile->attentions, profile->attentions + 1, i * sizeof *profile->attentions);
    }
    if (i >= profile->n_attentions) profile->n_attentions = i + 1;
    profile->attentions[i] = entry;
    return 0;
}

/* ---- storage ---- */

uint64_t neap_profile_best_read(const neap_profile *profile) {
    uint64_t best = 0;
    for (size_t s = 0; s < NEAP_PROFILE_SIZES; s++)
        for (size_t d = 0; d < NEAP_PROFILE_DEPTHS; d++)
            if (profile->read_bps[s][d] > best) best = profile->read_bps[s][d];
    return best;
}

uint64_t neap_profile_read_at(const neap_profile *profile, uint64_t request_bytes, uint32_t depth) {
    size_t d = 0, s = 0;
    while (d + 1 < NEAP_PROFILE_DEPTHS && neap_profile_depths[d + 1] <= depth)
        d++;
    if (request_bytes <= neap_profile_sizes[0]) { /* a smaller request is slower in proportion */
        const double share = (double)request_bytes / neap_profile_sizes[0];
        return (uint64_t)((double)profile->read_bps[0][d] * share);
    }
    while (s + 1 < NEAP_PROFILE_SIZES && neap_profile_sizes[s + 1] <= request_bytes)
        s++;
    const uint64_t low = profile->read_bps[s][d];
    if (s + 1 == NEAP_PROFILE_SIZES) return low;
    const uint64_t high = profile->read_bps[s + 1][d];
    if (low == 0 || high == 0) return 0;
    const double at = log2((double)request_bytes / neap_profile_sizes[s]) /
                      log2((double)neap_profile_sizes[s + 1] / neap_profile_sizes[s]);
    return (uint64_t)((double)low + at * ((double)high - (double)low));
}

static bool is_saturated(uint64_t bps, uint64_t best) {
    return best > 0 && (double)bps >= SATURATED * (double)best;
}

bool neap_profile_saturates(const neap_profile *profile, uint64_t request_bytes, uint32_t depth) {
    return is_saturated(neap_profile_read_at(profile, request_bytes, depth),
                        neap_profile_best_read(profile));
}

uint64_t neap_profile_saturating(const neap_profile *profile, uint32_t depth) {
    uint64_t from = 0;
    for (size_t s = NEAP_PROFILE_SIZES; s-- > 0;) {
        if (!neap_profile_saturates(profile, neap_profile_sizes[s], depth)) break;
        from = neap_profile_sizes[s];
    }
    return from;
}

/* ---- rates ---- */

/* n threads that commit pages and then fill them, of which the filling shares one device: no faster
 * than the device, and no faster than the threads. populate 0: not measured, so left out. */
static double with_populate(double fill_bps, double populate_bps, double n) {
    if (fill_bps <= 0 || populate_bps <= 0) return fill_bps;
    const double threads_bps = n / (1 / fill_bps + 1 / populate_bps);
    return threads_bps < fill_bps ? threads_bps : fill_bps;
}

/* Weights come in huge pages where there are any, and are most of what is read. */
static double storage_path(const neap_profile *profile, uint32_t n_threads) {
    const uint64_t populate =
        profile->populate_huge_bps ? profile->populate_huge_bps : profile->populate_small_bps;
    return with_populate((double)neap_profile_best_read(profile), (double)populate, n_threads);
}

/* KV chunks come in small pages; a thread that decodes commits them first, one after the other. */
static double memory_path(const neap_profile *profile, const neap_profile_codec *codec,
                          uint32_t n_threads) {
    size_t i = n_threads < NEAP_PROFILE_THREADS ? n_threads - 1 : NEAP_PROFILE_THREADS - 1;
    while (i > 0 && codec->decode_bps[i] == 0)
        i--;
    const double decode = (double)codec->decode_bps[i];
    const double populate = (double)profile->populate_small_bps * n_threads;
    return decode > 0 && populate > 0 ? 1 / (1 / decode + 1 / populate) : decode;
}

static neap_rate make_rate(uint64_t restored_bps, double measured_bps, uint64_t default_bps) {
    uint64_t bps = restored_bps;
    if (bps == 0 && measured_bps >= 1) bps = (uint64_t)measured_bps;
    return (neap_rate){.bps = bps ? bps : default_bps, .reference_bps = bps, .is_guess = bps == 0};
}

void neap_rates_init(neap_rates *rates, const neap_profile *profile, const char *codec,
                     neap_path_threads threads) {
    const neap_profile_codec *entry = profile ? neap_profile_codec_find(profile, codec) : NULL;
    const uint32_t n_storage = threads.storage ? threads.storage : 1;
    const uint32_t n_memory = threads.memory ? threads.memory : 1;
    rates->read = make_rate(profile ? profile->restored_read_bps : 0,
                            profile ? storage_path(profile, n_storage) : 0, NEAP_DEFAULT_READ_BPS);
    rates->decode =
        make_rate(entry ? entry->restored_bps : 0,
                  entry ? memory_path(profile, entry, n_memory) : 0, NEAP_DEFAULT_DECODE_BPS);
}

bool neap_rate_is_off(uint64_t bps, uint64_t reference_bps) {
    const double difference = (double)bps - (double)reference_bps;
    return fabs(difference) > OFF * (double)reference_bps;
}

static uint64_t bps_of(double bytes, double seconds) {
    const double bps = bytes / seconds;
    return bps < 1 ? 1 : bps > (double)NEAP_BPS_MAX ? NEAP_BPS_MAX : (uint64_t)bps;
}

bool neap_rate_observe(neap_rate *rate, uint64_t bytes, uint64_t ns) {
    if (bytes == 0 || ns == 0) return false;
    if (__builtin_add_overflow(rate->window_bytes, bytes, &rate->window_bytes))
        rate->window_bytes = UINT64_MAX;
    if (__builtin_add_overflow(rate->window_ns, ns, &rate->window_ns)) rate->window_ns = UINT64_MAX;
    if (rate->window_bytes < NEAP_RATE_WINDOW_BYTES) return false;
    const uint64_t seen = bps_of((double)rate->window_bytes, (double)rate->window_ns / 1e9);
    const uint64_t before = rate->bps;
    rate->window_bytes = rate->window_ns = 0;
    if (rate->is_guess || neap_rate_is_off(seen, rate->bps)) {
        rate->bps = seen;
    } else {
        const double time = (1 - STEP) / (double)rate->bps + STEP / (double)seen;
        rate->bps = bps_of(1, time);
    }
    const bool changed = rate->is_guess || rate->bps != before;
    rate->is_guess = false;
    return changed;
}

static neap_rate_source source_of(const neap_rate *rate) {
    if (rate->is_guess) return NEAP_RATES_DEFAULT;
    const bool drifted =
        rate->reference_bps > 0 && neap_rate_is_off(rate->bps, rate->reference_bps);
    return drifted ? NEAP_RATES_DRIFTED : NEAP_RATES_MEASURED;
}

neap_rate_source neap_rates_source(const neap_rates *rates) {
    const neap_rate_source read = source_of(&rates->read), decode = source_of(&rates->decode);
    return read > decode ? read : decode;
}
