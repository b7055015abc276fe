/* klt_use.c - codec klt of an engine, or KV held as klt codes it: which model's file is in use, and
 * what is said about it, and about LowRAM's fits. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "core_int.h"
#include "err.h"
#include "klt_file.h"

static void note(neap_engine *engine, bool in_use, const char *text) {
    neap_log(in_use ? NEAP_LOG_INFO : NEAP_LOG_WARN, "%s klt: %s",
             engine->pool->holds_coded ? "kv" : "codec", text);
    pthread_mutex_lock(&engine->pool->lock);
    snprintf(engine->codec_note, sizeof engine->codec_note, "%s", text);
    pthread_mutex_unlock(&engine->pool->lock);
}

const char *neap_codec_learned(const neap_engine *engine) {
    return engine->wants_lowram ? "lowram" : "klt";
}

const char *neap_codec_fallback(const neap_engine *engine) {
    return engine->pool->holds_coded ? "f16" : engine->pool->codec->name;
}

/* trained: the file that could not be opened; empty: it was the model that failed. */
static void tell_why_not(neap_engine *engine, const char *path, const char *trained, int err) {
    const char *instead = neap_codec_fallback(engine);
    char text[sizeof engine->codec_note], ratio[32] = "";
    if (engine->klt_ratio > 0) snprintf(ratio, sizeof ratio, "--ratio %g ", engine->klt_ratio);
    if (err == -ENOENT)
        snprintf(text, sizeof text,
                 "%s instead: klt has learned nothing about this model%s (neap train %s%s)",
                 instead, engine->klt_ratio > 0 ? " at that ratio" : "", ratio, path);
    else if (err == NEAP_E_CORRUPT || err == NEAP_E_VERSION || err == NEAP_E_CHANGED)
        snprintf(text, sizeof text,
                 "%s instead: what klt learned is %s (make it anew: neap train %s%s)", instead,
                 err == NEAP_E_CORRUPT   ? "damaged"
                 : err == NEAP_E_CHANGED ? "of another model"
                                         : "of another version",
                 ratio, path);
    else
        snprintf(text, sizeof text, "%s instead: %.200s: %s", instead, *trained ? trained : path,
                 neap_strerror(err));
    note(engine, false, text);
}

void neap_use_gguf(neap_engine *engine, const char *path) {
    if (!engine->wants_klt) return;
    char text[sizeof engine->codec_note];
    neap_klt_found found = {0};
    uint64_t digest;
    neap_klt_model *model = NULL;
    if (engine->policy->clean_storage) {
        snprintf(text, sizeof text, "%s instead: policy %s writes KV as it is",
                 neap_codec_fallback(engine), engine->policy->name);
        note(engine, false, text);
        return;
    }
    int err = neap_model_digest(path, &digest);
    if (!err)
        err = neap_klt_file_open(digest, engine->klt_ratio, engine->reads_parts, &model, &found);
    const int set_err = neap_pool_set_klt(engine->pool, model); /* also: none any more */
    if (!err && set_err) {
        neap_klt_model_close(model);
        err = set_err;
    }
    if (err)
        tell_why_not(engine, path, found.path, err);
    else
        note(engine, true, found.name);
}

void neap_region_use_gguf(neap_region *region, const char *path) {
    neap_engine *engine = region->engine;
    uint64_t digest;
    if (!engine->wants_klt || neap_model_digest(path, &digest) != 0) return;
    pthread_mutex_lock(&engine->pool->lock);
    const bool is_new = neap_pool_bind_klt(engine->pool, region, digest);
    pthread_mutex_unlock(&engine->pool->lock);
    if (is_new)
        neap_log(NEAP_LOG_INFO, "klt: a context that was taken for another model's is %s's", path);
}

void neap_codec_kv_name(const neap_engine *engine, char *ret_name, size_t cap) {
    if (engine->wants_lowram)
        snprintf(ret_name, cap, "lowram-%g", engine->lowram_ratio);
    else
        snprintf(ret_name, cap, "%.31s", engine->codec_note);
}

void neap_codec_stat(const neap_engine *engine, neap_stat *inout_stat) {
    const neap_pool *pool = engine->pool;
    uint32_t n_klt = 0, n_others = 0;
    for (const neap_kv *kv = pool->kvs; kv; kv = kv->next)
        *(neap_klt_fits(kv) ? &n_klt : &n_others) += 1;
    const bool is_klt = n_klt > 0 || (n_others == 0 && neap_pool_klt(pool));
    snprintf(inout_stat->kv, sizeof inout_stat->kv, "f16");
    if (pool->holds_coded && n_klt > 0)
        neap_codec_kv_name(engine, inout_stat->kv, sizeof inout_stat->kv);
    snprintf(inout_stat->codec, sizeof inout_stat->codec, "%s",
             is_klt ? neap_codec_learned(engine) : pool->codec->name);
    const size_t cap = sizeof inout_stat->codec_note;
    if (!engine->wants_klt && !engine->wants_lowram)
        inout_stat->codec_note[0] = '\0';
    else if (!neap_pool_klt(pool) || n_others == 0)
        snprintf(inout_stat->codec_note, cap, "%s", engine->codec_note);
    else
        snprintf(inout_stat->codec_note, cap, "%.64s; %s for %u caches that it does not fit",
                 engine->codec_note, neap_codec_fallback(engine), n_others);
}
