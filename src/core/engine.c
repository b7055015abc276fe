/* engine.c - options in, the parts of an engine wired together. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core_int.h"
#include "err.h"
#include "file.h"
#include "klt_file.h"
#include "lowram_use.h"
#include "profile_file.h"

/* The swap file itself is made when the first eviction needs it: too late to learn that it cannot
 * be. */
static void try_swap_folder(const char *dir) {
    neap_file *file;
    const int err = neap_file_open_swap(dir, &file);
    if (err)
        neap_log(NEAP_LOG_WARN,
                 "no swap file can be made in %s: %s; KV stays in memory (see --swap-dir)", dir,
                 neap_strerror(err));
    else
        neap_file_close(file);
}

/* One of the learned codecs, for evictions too; at kv's ratio. False: there is no such one. */
static bool take_kv(neap_engine *engine, const char *kv) {
    double ratio = 0;
    const bool is_klt = neap_klt_option_parse(kv, &ratio);
    if (!is_klt && !neap_lowram_option_parse(kv, &ratio)) return false;
    bool *wanted = is_klt ? &engine->wants_klt : &engine->wants_lowram,
         *other = is_klt ? &engine->wants_lowram : &engine->wants_klt;
    double *own = is_klt ? &engine->klt_ratio : &engine->lowram_ratio;
    const char *name = is_klt ? "klt" : "lowram";
    if (*other)
        neap_log(NEAP_LOG_WARN, "codec %s does not go with kv %s: q8 instead",
                 is_klt ? "lowram" : "klt", name);
    if (*wanted && ratio > 0 && *own > 0 && ratio != *own)
        neap_log(NEAP_LOG_WARN, "codec %s takes kv's ratio: %g", name, ratio);
    if (ratio > 0) *own = ratio;
    *wanted = true;
    *other = false;
    return true;
}

static void idle_start(neap_engine *engine, const neap_options *options, const char *swap_dir) {
    const bool writes = options->write_behind_bytes > 0;
    int err = writes ? neap_write_behind_create(engine, options, swap_dir) : 0;
    if (err) neap_log(NEAP_LOG_WARN, "nothing is written behind: %s", neap_strerror(err));
    if (!engine->write_behind && !neap_lowram_fits_idle(engine)) return;
    err = neap_idle_start(engine, options);
    if (!err) return;
    neap_log(NEAP_LOG_WARN, "nothing is done while idle: %s", neap_strerror(err));
    neap_write_behind_free(engine->write_behind);
    engine->write_behind = NULL;
}

static int wire(neap_engine *engine, const neap_options *options) {
    char dir[PATH_MAX];
    const char *name = options->codec ? options->codec : "q8";
    const char *kv = options->kv ? options->kv : "f16";
    const bool is_f16 = strcmp(kv, "f16") == 0;
    engine->wants_klt = neap_klt_option_parse(name, &engine->klt_ratio);
    engine->wants_lowram = neap_lowram_option_parse(name, &engine->lowram_ratio);
    if (engine->wants_klt || engine->wants_lowram) name = "q8"; /* for what they do not code */
    if (!is_f16 && !take_kv(engine, kv)) return NEAP_E_UNKNOWN;
    const neap_codec *codec = neap_codec_find(name);
    engine->policy = neap_policy_find(options->policy ? options->policy : "hybrid");
    if (!codec || !engine->policy) return NEAP_E_UNKNOWN;
    engine->program = strdup(options->program ? options->program : "?");
    engine->keep_bytes = options->keep_bytes;
    engine->reads_parts = options->kv_in_parts;
    engine->region_alloc = options->region_alloc;
    engine->region_free = options->region_free;
    engine->region_ctx = options->region_ctx;
    if (!engine->program) return -ENOMEM;
    int err = neap_swap_folder(options->swap_dir, dir, sizeof dir);
    if (err) return err;
    const neap_pool_options pool_options = {
        .codec = codec,
        .clean_storage = engine->policy->clean_storage,
        .poison = options->poison,
        .holds_coded = !is_f16,
        .fits_contexts = !is_f16 && engine->wants_lowram,
        .swap_dir = dir,
        .swap_limit_bytes = options->swap_limit_bytes,
    };
    err = neap_pool_create(&pool_options, &engine->pool);
    if (err) return err;
    try_swap_folder(dir);
    if (engine->wants_lowram) neap_lowram_load(engine);
    neap_engine_rates_open(engine, options->profile, dir);
    err = neap_crew_create(options->evict_threads, &engine->crew);
    if (err) return err;
    err = neap_pipeline_create(engine->pool, neap_engine_rates_note, engine, &engine->pipeline);
    if (!err) idle_start(engine, options, dir);
    return err;
}

int neap_engine_create(const neap_options *options, neap_engine **ret_engine) {
    const neap_options defaults = {0};
    if (!options) options = &defaults;
    neap_engine *engine = calloc(1, sizeof *engine);
    if (!engine) return -ENOMEM;
    pthread_mutex_init(&engine->use_lock, NULL);
    pthread_cond_init(&engine->use_changed, NULL);
    const int err = wire(engine, options);
    if (err) {
        neap_engine_free(engine);
        return err;
    }
    if (options->watch_pressure)
        neap_watcher_start(engine, options->pressure_watch, options->pressure_write);
    if (!options->no_control) neap_endpoint_open(engine);
    *ret_engine = engine;
    return 0;
}

void neap_engine_free(neap_engine *engine) {
    if (!engine) return;
    neap_endpoint_close(engine); /* first: its threads evict and restore, as does the next */
    neap_watcher_stop(engine);
    neap_idle_stop(engine);
    neap_write_behind_free(engine->write_behind);
    neap_pipeline_free(engine->pipeline);
    neap_crew_free(engine->crew);
    neap_engine_rates_close(engine);
    if (engine->regions) neap_log(NEAP_LOG_ERROR, "engine freed before its regions");
    neap_pool_free(engine->pool);
    neap_lowram_unload(engine);
    free(engine->room.units);
    free(engine->room.steps);
    pthread_cond_destroy(&engine->use_changed);
    pthread_mutex_destroy(&engine->use_lock);
    free(engine->program);
    free(engine);
}

void neap_engine_set_model(neap_engine *engine, const char *model) {
    const char *last = strrchr(model, '/');
    pthread_mutex_lock(&engine->pool->lock);
    snprintf(engine->model, sizeof engine->model, "%s", last && last[1] ? last + 1 : model);
    pthread_mutex_unlock(&engine->pool->lock);
}

void neap_check(neap_engine *engine) {
    pthread_mutex_lock(&engine->pool->lock);
    neap_pool_check(engine->pool, true);
    pthread_mutex_unlock(&engine->pool->lock);
}
