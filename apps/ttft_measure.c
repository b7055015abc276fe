/* ttft_measure.c - see ttft_int.h. A measurement:
 *   1. rewind  the context to what it was, and the prefix and one other token: what an earlier
 *              request added is gone
 *   2. evict   down to the remaining share wanted
 *   3. ask     the prefix and 8 new tokens; the prefix must come from the cache
 *   4. restore everything
 * Levels and sides take turns (A B B A ...), so that a noisy machine disturbs all alike. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ttft_int.h"

#define DEFAULT_REPS 5
#define EVICT_TRIES 8

/* What a server held and had restored, before and after a request. */
typedef struct snapshot {
    json_t *stat; /* of the backend */
    neap_paging_usage paging;
} snapshot;

/* Bytes of what is evicted: weights and KV, or (only_kv) KV alone; all, and those held. */
static void count_bytes(const json_t *stat, bool only_kv, double *ret_total, double *ret_held) {
    uint64_t total = neap_instance_count(stat, "bytes", "kv_total");
    uint64_t held = neap_instance_count(stat, "bytes", "kv_resident") +
                    neap_instance_count(stat, "bytes", "kv_compressed_memory");
    if (!only_kv) {
        total += neap_instance_count(stat, "bytes", "weights_total");
        held += neap_instance_count(stat, "bytes", "weights_resident");
    }
    *ret_total = (double)total;
    *ret_held = (double)held;
}

static int load_stat(const neap_ttft_side *s, json_t **ret_stat) {
    const int err = neap_instance_stat(neap_server_pid(s->server), ret_stat);
    if (!err) return 0;
    return neap_cli_error(NEAP_EXIT_FAILED, "does the server run through the backend?",
                          "llama-server (pid %d): control socket: %s", neap_server_pid(s->server),
                          neap_strerror(err));
}

static int take_snapshot(const neap_ttft_side *s, snapshot *ret_snapshot) {
    if (!s->paging) return load_stat(s, &ret_snapshot->stat);
    const int err = neap_paging_read(s->paging, &ret_snapshot->paging);
    return err ? neap_cli_error(NEAP_EXIT_FAILED, NULL, "memory group: %s", neap_strerror(err)) : 0;
}

/* ---- evicting ---- */

static int evict_bytes(const neap_ttft_side *s, bool only_kv, uint64_t bytes) {
    neap_evict_result result = {0};
    char *message = NULL;
    const neap_evict_request request = {.bytes = bytes,
                                        .only = only_kv ? NEAP_ONLY_KV : NEAP_ONLY_ALL};
    const int err = neap_instance_evict(neap_server_pid(s->server), &request, &result, &message);
    int status = 0;
    if (err || result.storage_error)
        status =
            neap_cli_error(NEAP_EXIT_FAILED, NULL, "eviction: %s",
                           message ? message : neap_strerror(err ? err : result.storage_error));
    free(message);
    return status;
}

/* Evicts until at most share is held, or nothing more goes; *ret_share is what is held then. What
 * an eviction takes of compute buffers does not count, hence the repetition. */
static int evict_to(const neap_ttft_side *s, bool only_kv, double share, double *ret_share) {
    double before = INFINITY, total, held;
    for (int tries = 0; tries < EVICT_TRIES; tries++) {
        json_t *stat;
        int status = load_stat(s, &stat);
        if (status) return status;
        count_bytes(stat, only_kv, &total, &held);
        json_decref(stat);
        *ret_share = total > 0 ? held / total : 0;
        if (held <= share * total || (tries > 1 && held >= before)) return 0;
        before = held;
        const uint64_t bytes = share <= 0 ? UINT64_MAX : (uint64_t)ceil(held - share * total);
        if ((status = evict_bytes(s, only_kv, bytes ? bytes : 1))) return status;
    }
    return 0;
}

static int restore(const neap_ttft_side *s) {
    uint64_t bytes = 0, ns = 0;
    char *message = NULL;
    const int err = neap_instance_restore(neap_server_pid(s->server), &bytes, &ns, &message);
    int status = 0;
    if (err)
        status = neap_cli_error(NEAP_EXIT_FAILED, NULL, "restore: %s",
                                message ? message : neap_strerror(err));
    free(message);
    return status;
}

int neap_ttft_evict_once(const neap_ttft_side *s) {
    double share;
    const int status = evict_to(s, false, 0, &share);
    return status ? status : restore(s);
}

/* All that the kernel reclaims, and what is then still held, in the group and compressed. */
static int page_out(const neap_ttft_grid *g, const neap_ttft_side *s, double *ret_share) {
    const neap_ttft *b = g->bench;
    neap_paging_usage usage;
    int err = neap_paging_evict(s->paging);
    if (!err) err = neap_paging_read(s->paging, &usage);
    if (err)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "reclaim of the memory group: %s",
                              neap_strerror(err));
    *ret_share = (double)(usage.file_bytes + usage.anon_bytes + usage.zram_bytes) /
                 ((double)b->weight_bytes + (double)b->kv_token_bytes * (double)g->prefix_reset.n);
    return 0;
}

/* ---- asking ---- */

int neap_ttft_ask(const neap_ttft_grid *g, const neap_ttft_side *s, neap_answer *ret_answer) {
    const int status =
        neap_server_complete(s->server, &g->prefix_new, NEAP_TTFT_ANSWER, true, ret_answer);
    if (status) return status;
    if (ret_answer->prompt_n == NEAP_TTFT_NEW && ret_answer->tokens.n == NEAP_TTFT_ANSWER) return 0;
    const int failed = neap_cli_error(
        NEAP_EXIT_FAILED, NULL, "the context was not reused: %llu tokens computed instead of %u",
        (unsigned long long)ret_answer->prompt_n, NEAP_TTFT_NEW);
    neap_answer_free(ret_answer);
    return failed;
}

static double counted(const snapshot *before, const snapshot *after, const char *counter) {
    return (double)(neap_instance_count(after->stat, "counters", counter) -
                    neap_instance_count(before->stat, "counters", counter));
}

static double grown(uint64_t before, uint64_t after) {
    return after > before ? (double)(after - before) : 0;
}

/* What the backend says of the request; of paging, by how much the group has grown. */
static void record_memory(const neap_ttft_side *s, neap_ttft_series *e, size_t i,
                          const snapshot *before, const snapshot *after) {
    if (s->paging) {
        e->storage_bytes[i] = grown(before->paging.file_bytes, after->paging.file_bytes);
        e->memory_bytes[i] = grown(before->paging.anon_bytes, after->paging.anon_bytes);
        return;
    }
    const json_t *request = json_object_get(after->stat, "last_request");
    const double wait_ms = counted(before, after, "wait_ns") / 1e6;
    const double ttft_ms = json_number_value(json_object_get(request, "ttft_ms"));
    const bool restored = e->remaining < 1;
    e->restore_ms[i] = restored ? json_number_value(json_object_get(request, "restore_ms")) : 0;
    e->alloc_ms[i] = restored ? json_number_value(json_object_get(request, "alloc_ms")) : 0;
    e->storage_ms[i] = restored ? json_number_value(json_object_get(request, "storage_ms")) : 0;
    e->memory_ms[i] = restored ? json_number_value(json_object_get(request, "memory_ms")) : 0;
    e->prefill_ms[i] = ttft_ms > wait_ms ? ttft_ms - wait_ms : 0;
    e->storage_bytes[i] = counted(before, after, "bytes_restored_storage");
    e->memory_bytes[i] = counted(before, after, "bytes_restored_memory");
    e->read_bytes[i] = counted(before, after, "bytes_read_storage");
    e->committed_bytes[i] = counted(before, after, "bytes_committed");
}

static void record(neap_ttft_side *s, size_t level, const neap_answer *answer, double remaining,
                   const snapshot *before, const snapshot *after) {
    neap_ttft_series *e = &s->levels[level];
    const size_t i = e->n++;
    e->ttft_ms[i] = answer->ttft_ms;
    e->cpu_s[i] = answer->cpu_s;
    e->remaining = remaining;
    record_memory(s, e, i, before, after);
    if (!s->has_reference) {
        memcpy(s->reference, answer->tokens.ids, sizeof s->reference);
        s->has_reference = true;
    }
    const bool same = memcmp(answer->tokens.ids, s->reference, sizeof s->reference) == 0;
    e->identical = e->has_identity ? e->identical && same : same;
    e->has_identity = true;
}

/* Once a level: how often the next token is that of the context never evicted. */
static int measure_agreement(const neap_ttft_grid *g, neap_ttft_side *s, size_t level,
                             const neap_answer *answer) {
    neap_ttft_series *e = &s->levels[level];
    if (e->n > 1) return 0;
    e->agreement = 1;
    if (memcmp(answer->tokens.ids, s->unrounded, sizeof s->unrounded) == 0) return 0;
    size_t same = 0;
    const int status =
        neap_server_agreement(s->server, &g->prefix_new, s->unrounded, NEAP_TTFT_ANSWER, &same);
    e->agreement = (double)same / NEAP_TTFT_ANSWER;
    return status;
}

static int measure(const neap_ttft_grid *g, neap_ttft_side *s, size_t level, double share) {
    double remaining = 1;
    snapshot before = {0}, after = {0};
    neap_answer answer = {0};
    int status = neap_ttft_context_rewind(g, s);
    if (!status && s->paging)
        status = page_out(g, s, &remaining);
    else if (!status && share < 1)
        status = evict_to(s, g->bench->only_kv, share, &remaining);
    if (!status) status = take_snapshot(s, &before);
    if (!status) status = neap_ttft_ask(g, s, &answer);
    if (!status) status = take_snapshot(s, &after);
    if (!status) record(s, level, &answer, remaining, &before, &after);
    if (!status) status = measure_agreement(g, s, level, &answer);
    if (!status && !s->paging) status = restore(s);
    json_decref(before.stat);
    json_decref(after.stat);
    neap_answer_free(&answer);
    return status;
}

/* ---- the whole ---- */

/* The baseline goes first at every level, and neap is evicted at least as far: a difference is
 * never in neap's favour. How far the baseline goes is known from the first repetition on. Paging
 * is measured where everything goes that can. */
static int measure_level(neap_ttft_grid *g, size_t rep, size_t level) {
    int status = 0;
    for (size_t turn = 0; turn < g->n_sides && !status; turn++) {
        const size_t i = rep % 2 ? g->n_sides - 1 - turn : turn;
        neap_ttft_side *s = &g->sides[i];
        double share = g->bench->levels[level];
        const double baseline = g->sides[NEAP_TTFT_BASELINE].levels[level].remaining;
        if (s->paging && share > 0) continue;
        if (i != NEAP_TTFT_BASELINE && share < 1 && baseline < share) share = baseline;
        status = measure(g, s, level, share);
    }
    return status;
}

int neap_ttft_measure_all(neap_ttft_grid *g) {
    const size_t n_levels = g->bench->n_levels;
    const size_t reps = g->bench->options.reps ? (size_t)g->bench->options.reps : DEFAULT_REPS;
    int status = 0;
    neap_progress_start("bench ttft");
    for (size_t rep = 0; rep < reps && !status; rep++)
        for (size_t level = 0; level < n_levels && !status; level++) {
            neap_progress_set((double)(rep * n_levels + level) / (double)(reps * n_levels), NULL);
            status = measure_level(g, rep, level);
        }
    neap_progress_stop();
    return status;
}
