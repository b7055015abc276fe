/* rates.c - the throughputs that evictions place by: out of the device profile at first, then
 * corrected by what restores took, and written back now and then.
 *
 * The times of attention kernels are kept in the same file, but only where there is one already.
 *
 * The file is written on a restore thread that has run out of work, whatever was restored being
 * back by then; at most once in SAVE_EVERY_NS, and only for rates that really changed. Nothing
 * depends on it: an engine whose profile cannot be read or written works with what it measures. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "core_int.h"
#include "err.h"
#include "profile_file.h"

#define SAVE_EVERY_NS (600 * UINT64_C(1000000000))
#define SAVE_CHANGE 0.05 /* smaller ones are not worth a write */

struct neap_profile_link {
    char *path; /* constant, as the next */
    neap_device device;
    /* pool's lock */
    bool saving, is_silent; /* is_silent: a failure to save was told of */
    uint64_t saved_ns;      /* 0: not yet */
    uint64_t filed_bps[NEAP_N_PATHS];
    bool seen[NEAP_N_PATHS]; /* by restores; only that is written */
    neap_profile filed;      /* as it was when the engine was made, and attention timed since */
    bool has_file;           /* constant */
};

/* One change of the file at a time. */
static pthread_mutex_t file_lock = PTHREAD_MUTEX_INITIALIZER;

static neap_rate *rate_of(neap_engine *engine, neap_path path) {
    return path == NEAP_PATH_STORAGE ? &engine->rates.read : &engine->rates.decode;
}

static void load(struct neap_profile_link *link) {
    const int err = neap_profile_load(link->path, &link->device, &link->filed);
    link->has_file = err == 0;
    if (err == 0 || err == -ENOENT) return;
    const char *reason = err == NEAP_E_CHANGED   ? "measured on another device"
                         : err == NEAP_E_CORRUPT ? "damaged"
                                                 : neap_strerror(err);
    neap_log(NEAP_LOG_WARN, "device profile %s ignored: %s (neap profile measures again)",
             link->path, reason);
}

static int link_create(const char *path, const char *swap_dir, struct neap_profile_link **ret) {
    struct neap_profile_link *link = calloc(1, sizeof *link);
    if (!link) return -ENOMEM;
    link->path = strdup(path);
    const int err = link->path ? neap_device_identify(swap_dir, &link->device) : -ENOMEM;
    if (err) {
        free(link->path);
        free(link);
        return err;
    }
    *ret = link;
    return 0;
}

void neap_engine_rates_open(neap_engine *engine, const char *profile_path, const char *swap_dir) {
    if (profile_path && profile_path[0]) {
        const int err = link_create(profile_path, swap_dir, &engine->profile);
        if (err)
            neap_log(NEAP_LOG_WARN, "no device profile: %s", neap_strerror(err));
        else
            load(engine->profile);
    }
    const struct neap_profile_link *link = engine->profile;
    neap_rates_init(&engine->rates, link && link->has_file ? &link->filed : NULL,
                    engine->pool->codec->name, neap_pipeline_path_threads());
    if (!link) return;
    for (int i = 0; i < NEAP_N_PATHS; i++)
        engine->profile->filed_bps[i] = rate_of(engine, (neap_path)i)->reference_bps;
}

void neap_engine_rates_close(neap_engine *engine) {
    if (!engine->profile) return;
    free(engine->profile->path);
    free(engine->profile);
}

static bool is_changed(uint64_t bps, uint64_t filed_bps) {
    const double difference = (double)bps - (double)filed_bps;
    const double limit = SAVE_CHANGE * (double)filed_bps;
    return filed_bps == 0 || difference > limit || difference < -limit;
}

/* Whether to save now, and what; then nobody else does. [L] */
static bool claim_save(neap_engine *engine, uint64_t ret_bps[NEAP_N_PATHS]) {
    struct neap_profile_link *link = engine->profile;
    const uint64_t now_ns = neap_clock_ns();
    bool changed = false;
    if (!link || link->saving) return false;
    if (link->saved_ns && now_ns - link->saved_ns < SAVE_EVERY_NS) return false;
    for (int i = 0; i < NEAP_N_PATHS; i++) {
        ret_bps[i] = link->seen[i] ? rate_of(engine, (neap_path)i)->bps : 0;
        changed = changed || (ret_bps[i] && is_changed(ret_bps[i], link->filed_bps[i]));
    }
    if (!changed) return false;
    link->saving = true;
    link->saved_ns = now_ns;
    return true;
}

static void save(neap_engine *engine, const uint64_t bps[NEAP_N_PATHS]) {
    struct neap_profile_link *link = engine->profile;
    pthread_mutex_lock(&file_lock);
    const int err = neap_profile_save_restored(link->path, &link->device, engine->pool->codec->name,
                                               bps[NEAP_PATH_STORAGE], bps[NEAP_PATH_MEMORY]);
    pthread_mutex_unlock(&file_lock);
    pthread_mutex_lock(&engine->pool->lock);
    link->saving = false;
    const bool tell = err && !link->is_silent;
    link->is_silent = link->is_silent || err;
    for (int i = 0; i < NEAP_N_PATHS && !err; i++)
        if (bps[i]) link->filed_bps[i] = bps[i];
    pthread_mutex_unlock(&engine->pool->lock);
    if (tell)
        neap_log(NEAP_LOG_WARN, "device profile %s not written: %s", link->path,
                 neap_strerror(err));
}

void neap_engine_rates_note(void *ctx, neap_path path, uint64_t bytes, uint64_t ns) {
    neap_engine *engine = ctx;
    uint64_t bps[NEAP_N_PATHS];
    pthread_mutex_lock(&engine->pool->lock);
    const neap_rate_source before = neap_rates_source(&engine->rates);
    const bool changed = neap_rate_observe(rate_of(engine, path), bytes, ns);
    const neap_rates rates = engine->rates;
    if (changed && engine->profile) engine->profile->seen[path] = true;
    const bool due = changed && claim_save(engine, bps);
    pthread_mutex_unlock(&engine->pool->lock);
    if (neap_rates_source(&rates) == NEAP_RATES_DRIFTED && before != NEAP_RATES_DRIFTED)
        neap_log(NEAP_LOG_INFO,
                 "restores are off from the device profile: storage %" PRIu64
                 " MB/s, memory %" PRIu64 " MB/s",
                 rates.read.bps / 1000000, rates.decode.bps / 1000000);
    if (due) save(engine, bps);
}

bool neap_attention_recall(neap_engine *engine, const char *kind, neap_attention_times *ret_times) {
    const struct neap_profile_link *link = engine->profile;
    if (!link) return false;
    pthread_mutex_lock(&engine->pool->lock);
    const neap_profile_attention *entry = neap_profile_attention_find(&link->filed, kind);
    if (entry) *ret_times = entry->times;
    pthread_mutex_unlock(&engine->pool->lock);
    return entry != NULL;
}

void neap_attention_keep(neap_engine *engine, const char *kind, const neap_attention_times *times) {
    struct neap_profile_link *link = engine->profile;
    if (!link) return;
    pthread_mutex_lock(&engine->pool->lock);
    neap_profile_attention_put(&link->filed, kind, *times);
    pthread_mutex_unlock(&engine->pool->lock);
    if (!link->has_file) return;
    pthread_mutex_lock(&file_lock);
    const int err = neap_profile_save_attention(link->path, &link->device, kind, *times);
    pthread_mutex_unlock(&file_lock);
    if (err)
        neap_log(NEAP_LOG_DEBUG, "device profile %s not written: %s", link->path,
                 neap_strerror(err));
}
