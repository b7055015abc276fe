/* bench_ttft.c - `neap bench ttft`: time to the first token after an eviction, neap's policy
 * against the paper's baseline.
 *
 * Servers run side by side, one a policy, with the same context of P tokens. The baseline runs
 * twice: with the attention that neap's policy has, which is what the time that an eviction adds is
 * compared with, and with llama.cpp's own, as in the paper. A measurement:
 *   1. reset   load the context again, so that no copy of it is left on storage by an earlier
 *              eviction, then the prefix and one other token: what an earlier request added is gone
 *   2. evict   down to the remaining share wanted
 *   3. ask     the prefix and 8 new tokens; the prefix must come from the cache
 *   4. restore everything
 * Levels and policies take turns (A B B A ...), so that a noisy machine disturbs both alike.
 *
 * Remaining counts resident bytes and copies compressed in memory, of weights and KV cells in use;
 * compute buffers are no part of it. The baseline goes first at every level and neap is evicted at
 * least as far, so that a difference is never in neap's favour. */
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bench.h"
#include "bytes.h"
#include "codec.h"
#include "device_rate.h"
#include "policy.h"
#include "proc.h"
#include "server_client.h"

#define DEFAULT_REPS 5
#define QUICK_CONTEXT 4096
#define DEFAULT_CONTEXT 8192
#define NEW_TOKENS 8
#define ANSWER_TOKENS 16
#define LEVELS_MAX 16
#define EVICT_TRIES 8
#define MATCH_POINTS 3.0

#define SIDES_MAX 10

enum { BASELINE, STOCK, NEAP }; /* sides; from NEAP on the policies compared */

/* All measurements of one policy at one level. */
typedef struct series {
    double ttft_ms[NEAP_BENCH_REPS_MAX], restore_ms[NEAP_BENCH_REPS_MAX];
    double alloc_ms[NEAP_BENCH_REPS_MAX];
    double storage_ms[NEAP_BENCH_REPS_MAX], memory_ms[NEAP_BENCH_REPS_MAX];
    double prefill_ms[NEAP_BENCH_REPS_MAX], cpu_s[NEAP_BENCH_REPS_MAX];
    double storage_bytes[NEAP_BENCH_REPS_MAX], memory_bytes[NEAP_BENCH_REPS_MAX];
    double remaining, agreement;
    bool identical, has_identity;
    size_t n;
} series;

typedef struct side {
    const char *policy, *attn; /* attn NULL: as in the environment */
    neap_server *server;
    int32_t unrounded[ANSWER_TOKENS]; /* the answer before anything was evicted */
    int32_t reference[ANSWER_TOKENS]; /* the answer that every later cycle must give */
    bool has_reference;
    bool reloads; /* the settled context can be loaded again */
    series levels[LEVELS_MAX];
} side;

typedef struct bench {
    neap_bench_options options;
    const char *codec;
    const char *text_path;
    long context;
    double levels[LEVELS_MAX]; /* remaining shares, the resident one first */
    size_t n_levels;
    char model_path[NEAP_PATH_MAX], slot_dir[NEAP_PATH_MAX], slot_name[128];
    neap_tokens prefix_reset, prefix_new; /* prefix + 1 other token; prefix + 8 new tokens */
    side sides[SIDES_MAX];
    size_t n_sides;
    neap_device_rate rate;
} bench;

/* ---- context ---- */

static char *read_text(const bench *b) {
    if (!b->text_path) return neap_text_generate((size_t)b->context);
    FILE *file = fopen(b->text_path, "re");
    if (!file) return NULL;
    const size_t cap = (size_t)b->context * 16 + 4096;
    char *text = malloc(cap + 1);
    if (text) text[fread(text, 1, cap, file)] = '\0';
    fclose(file);
    return text;
}

static int copy_tokens(const neap_tokens *from, size_t n, const int32_t *more, size_t n_more,
                       neap_tokens *ret_tokens) {
    int32_t *ids = malloc((n + n_more) * sizeof *ids);
    if (!ids) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    memcpy(ids, from->ids, n * sizeof *ids);
    memcpy(ids + n, more, n_more * sizeof *ids);
    *ret_tokens = (neap_tokens){.ids = ids, .n = n + n_more};
    return 0;
}

/* Cuts the text to the context and makes the two prompts. */
static int make_prompts(bench *b) {
    char *text = read_text(b);
    if (!text)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s",
                              b->text_path ? b->text_path : "text", neap_strerror(-errno));
    neap_server *server = b->sides[NEAP].server;
    neap_tokens all = {0}, question = {0};
    int status = neap_server_tokenize(server, text, &all);
    free(text);
    if (!status)
        status = neap_server_tokenize(
            server, "Which of the people named above came first, and why?", &question);
    const size_t n = (size_t)b->context;
    if (!status && (all.n < n || question.n < NEW_TOKENS + 1))
        status = neap_cli_error(NEAP_EXIT_FAILED, "give a longer --text or a smaller --context",
                                "text: %zu tokens are less than the context", all.n);
    if (!status) {
        /* The last tokens of the question: a beginning-of-text token stays out. */
        const int32_t *news = question.ids + question.n - NEW_TOKENS;
        const int32_t other = question.ids[question.n - NEW_TOKENS + 1];
        const int32_t reset = other != news[0] ? other : all.ids[1];
        status = copy_tokens(&all, n, news, NEW_TOKENS, &b->prefix_new);
        if (!status) status = copy_tokens(&all, n, &reset, 1, &b->prefix_reset);
    }
    neap_tokens_free(&all);
    neap_tokens_free(&question);
    return status;
}

/* Removes what benchmarks that were killed left behind. */
static void remove_stale(const char *folder) {
    DIR *dir = opendir(folder);
    const struct dirent *entry;
    while (dir && (entry = readdir(dir))) {
        int pid = 0;
        if (sscanf(entry->d_name, "settled-%d-", &pid) == 1 && !neap_proc_alive(pid))
            unlinkat(dirfd(dir), entry->d_name, 0);
    }
    if (dir) closedir(dir);
}

/* Where the filled context is kept between runs: named by model, tokens and version. */
static int name_slot(bench *b) {
    struct stat info;
    char cache[NEAP_PATH_MAX - 64];
    int err = neap_cache_dir(cache, sizeof cache);
    if (!err && stat(b->model_path, &info) != 0) err = -errno;
    if (!err) {
        snprintf(b->slot_dir, sizeof b->slot_dir, "%s/bench/", cache);
        err = neap_make_dirs(b->slot_dir, 0700);
    }
    if (err) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "bench folder: %s", neap_strerror(err));
    remove_stale(b->slot_dir);
    snprintf(b->slot_name, sizeof b->slot_name, "ctx-%lld-%lld-%016llx.bin",
             (long long)info.st_size, (long long)info.st_mtime,
             (unsigned long long)neap_checksum(b->prefix_reset.ids,
                                               b->prefix_reset.n * sizeof(int32_t)));
    return 0;
}

static int fill(bench *b, side *s) {
    bool loaded = false;
    neap_answer answer = {0};
    int status = neap_server_slot_load(s->server, b->slot_name, &loaded);
    if (!status) status = neap_server_complete(s->server, &b->prefix_reset, 0, true, &answer);
    if (!status && answer.prompt_n > 512) status = neap_server_slot_save(s->server, b->slot_name);
    neap_answer_free(&answer);
    return status;
}

/* ---- one measurement ---- */

static double share_held(const json_t *stat) {
    const uint64_t total = neap_instance_count(stat, "bytes", "weights_total") +
                           neap_instance_count(stat, "bytes", "kv_total");
    const uint64_t held = neap_instance_count(stat, "bytes", "weights_resident") +
                          neap_instance_count(stat, "bytes", "kv_resident") +
                          neap_instance_count(stat, "bytes", "kv_compressed_memory");
    return total ? (double)held / (double)total : 0;
}

static int load_stat(const side *s, json_t **ret_stat) {
    const int err = neap_instance_stat(neap_server_pid(s->server), ret_stat);
    if (!err) return 0;
    return neap_cli_error(NEAP_EXIT_FAILED, "does the server run through the backend?",
                          "llama-server (pid %d): control socket: %s", neap_server_pid(s->server),
                          neap_strerror(err));
}

static int evict_bytes(const side *s, uint64_t bytes) {
    neap_evict_result result = {0};
    char *message = NULL;
    const neap_evict_request request = {.bytes = bytes};
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
static int evict_to(const side *s, double share, double *ret_share) {
    double before = 2;
    for (int tries = 0; tries < EVICT_TRIES; tries++) {
        json_t *stat;
        int status = load_stat(s, &stat);
        if (status) return status;
        const double held = share_held(stat);
        const double total = (double)(neap_instance_count(stat, "bytes", "weights_total") +
                                      neap_instance_count(stat, "bytes", "kv_total"));
        json_decref(stat);
        *ret_share = held;
        if (held <= share || (tries > 1 && held >= before)) return 0;
        before = held;
        const uint64_t bytes = share <= 0 ? UINT64_MAX : (uint64_t)ceil((held - share) * total);
        if ((status = evict_bytes(s, bytes ? bytes : 1))) return status;
    }
    return 0;
}

/* The slot file of a side holds its context as it is after the first eviction. */
static void settled_name(const bench *b, const side *s, char name[192]) {
    snprintf(name, 192, "settled-%d-%s", neap_server_pid(s->server), b->slot_name);
}

static int load_settled(const bench *b, const side *s) {
    char name[192];
    bool loaded = false;
    settled_name(b, s, name);
    const int status = neap_server_slot_load(s->server, name, &loaded);
    if (status || loaded) return status;
    return neap_cli_error(NEAP_EXIT_FAILED, NULL, "llama-server: cannot load the context again");
}

/* Tokens computed go to *ret_computed: 1 when the context was reused. */
static int reset(const bench *b, const side *s, uint64_t *ret_computed) {
    neap_answer answer = {0};
    const int status = neap_server_complete(s->server, &b->prefix_reset, 0, true, &answer);
    *ret_computed = answer.prompt_n;
    neap_answer_free(&answer);
    return status;
}

/* Brings the context back to what it was before the last measurement; it must not be read again. */
static int rewind_context(const bench *b, const side *s) {
    uint64_t computed = 0;
    int status = s->reloads ? load_settled(b, s) : 0;
    if (!status) status = reset(b, s, &computed);
    if (!status && computed > 1)
        status = neap_cli_error(NEAP_EXIT_FAILED, NULL,
                                "the context was not reused: %llu tokens computed instead of 1",
                                (unsigned long long)computed);
    return status;
}

/* Asks the question; the prefix must have come from the cache. */
static int ask(const bench *b, const side *s, neap_answer *ret_answer) {
    const int status =
        neap_server_complete(s->server, &b->prefix_new, ANSWER_TOKENS, true, ret_answer);
    if (status) return status;
    if (ret_answer->prompt_n == NEW_TOKENS && ret_answer->tokens.n == ANSWER_TOKENS) return 0;
    const int failed = neap_cli_error(
        NEAP_EXIT_FAILED, NULL, "the context was not reused: %llu tokens computed instead of %d",
        (unsigned long long)ret_answer->prompt_n, NEW_TOKENS);
    neap_answer_free(ret_answer);
    return failed;
}

static int restore(const side *s) {
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

static void record(side *s, size_t level, const neap_answer *answer, double remaining,
                   const json_t *before, const json_t *after) {
    series *e = &s->levels[level];
    const size_t i = e->n++;
    const json_t *request = json_object_get(after, "last_request");
    const double wait_ms = (double)(neap_instance_count(after, "counters", "wait_ns") -
                                    neap_instance_count(before, "counters", "wait_ns")) /
                           1e6;
    const double ttft_ms = json_number_value(json_object_get(request, "ttft_ms"));
    e->ttft_ms[i] = answer->ttft_ms;
    e->cpu_s[i] = answer->cpu_s;
    const bool restored = remaining < 1;
    e->restore_ms[i] = restored ? json_number_value(json_object_get(request, "restore_ms")) : 0;
    e->alloc_ms[i] = restored ? json_number_value(json_object_get(request, "alloc_ms")) : 0;
    e->storage_ms[i] = restored ? json_number_value(json_object_get(request, "storage_ms")) : 0;
    e->memory_ms[i] = restored ? json_number_value(json_object_get(request, "memory_ms")) : 0;
    e->prefill_ms[i] = ttft_ms > wait_ms ? ttft_ms - wait_ms : 0;
    e->storage_bytes[i] =
        (double)(neap_instance_count(after, "counters", "bytes_restored_storage") -
                 neap_instance_count(before, "counters", "bytes_restored_storage"));
    e->memory_bytes[i] = (double)(neap_instance_count(after, "counters", "bytes_restored_memory") -
                                  neap_instance_count(before, "counters", "bytes_restored_memory"));
    e->remaining = remaining;
    if (!s->has_reference) {
        memcpy(s->reference, answer->tokens.ids, sizeof s->reference);
        s->has_reference = true;
    }
    const bool same = memcmp(answer->tokens.ids, s->reference, sizeof s->reference) == 0;
    e->identical = e->has_identity ? e->identical && same : same;
    e->has_identity = true;
}

/* Once a level: how often the next token is that of the context never evicted. */
static int measure_agreement(const bench *b, side *s, size_t level, const neap_answer *answer) {
    series *e = &s->levels[level];
    if (e->n > 1) return 0;
    e->agreement = 1;
    if (memcmp(answer->tokens.ids, s->unrounded, sizeof s->unrounded) == 0) return 0;
    size_t same = 0;
    const int status =
        neap_server_agreement(s->server, &b->prefix_new, s->unrounded, ANSWER_TOKENS, &same);
    e->agreement = (double)same / ANSWER_TOKENS;
    return status;
}

static int measure(bench *b, side *s, size_t level, double share) {
    double remaining = 1;
    json_t *before = NULL, *after = NULL;
    neap_answer answer = {0};
    int status = rewind_context(b, s);
    if (!status && share < 1) status = evict_to(s, share, &remaining);
    if (!status) status = load_stat(s, &before);
    if (!status) status = ask(b, s, &answer);
    if (!status) status = load_stat(s, &after);
    if (!status) record(s, level, &answer, remaining, before, after);
    if (!status) status = measure_agreement(b, s, level, &answer);
    if (!status) status = restore(s);
    json_decref(before);
    json_decref(after);
    neap_answer_free(&answer);
    return status;
}

/* True when an eviction may not change a bit. */
static bool is_exact(const bench *b, const char *policy) {
    return neap_codec_find(b->codec)->lossless || neap_policy_find(policy)->clean_storage;
}

/* One full eviction: a lossy codec changes nothing more after it. */
static int round_once(side *s) {
    double share;
    const int status = evict_to(s, 0, &share);
    return status ? status : restore(s);
}

/* Keeps the rounded context in a slot file and tries to load it. llama-server cannot reuse a loaded
 * context of a sliding-window model: it reads it again, which undoes the rounding. Such a context
 * is left where it is from then on, and copies of earlier evictions stay on storage. */
static int keep_settled(bench *b, side *s) {
    char name[192];
    uint64_t computed = 0;
    settled_name(b, s, name);
    int status = neap_server_slot_save(s->server, name);
    if (!status) status = load_settled(b, s);
    if (!status) status = reset(b, s, &computed);
    s->reloads = !status && computed == 1;
    if (status || s->reloads) return status;
    neap_cli_warn("this model's context cannot be loaded again: chunks that were evicted once are "
                  "clean from then on, and restored from storage");
    return round_once(s);
}

/* Before the first measurement: the answer of a context that was never evicted, which is what exact
 * ones must always give; then the context is rounded and kept. */
static int settle(bench *b, side *s, bool exact) {
    neap_answer answer = {0};
    uint64_t computed = 0;
    int status = reset(b, s, &computed);
    if (!status) status = ask(b, s, &answer);
    if (!status) memcpy(s->unrounded, answer.tokens.ids, sizeof s->unrounded);
    if (!status && exact) memcpy(s->reference, s->unrounded, sizeof s->reference);
    s->has_reference = !status && exact;
    neap_answer_free(&answer);
    if (!status) status = reset(b, s, &computed);
    if (!status) status = round_once(s);
    if (!status) status = keep_settled(b, s);
    return status;
}

/* ---- the whole ---- */

static int start_servers(bench *b) {
    neap_progress_start("starting");
    int status = 0;
    for (size_t i = 0; i < b->n_sides && !status; i++) {
        const neap_server_options options = {.model_path = b->model_path,
                                             .n_ctx = (uint32_t)b->context + 512,
                                             .threads = neap_option_threads(),
                                             .codec = b->codec,
                                             .policy = b->sides[i].policy,
                                             .attn = b->sides[i].attn,
                                             .slot_dir = b->slot_dir};
        status = neap_server_start(&options, &b->sides[i].server);
    }
    neap_progress_stop();
    return status;
}

static int prepare(bench *b) {
    int status = start_servers(b);
    if (!status) status = make_prompts(b);
    if (!status) status = name_slot(b);
    neap_progress_start("reading the context");
    for (size_t i = 0; i < b->n_sides && !status; i++)
        status = fill(b, &b->sides[i]);
    for (size_t i = 0; i < b->n_sides && !status; i++)
        status = settle(b, &b->sides[i], is_exact(b, b->sides[i].policy));
    neap_progress_stop();
    return status;
}

static int measure_all(bench *b) {
    const size_t reps = b->options.reps ? (size_t)b->options.reps : DEFAULT_REPS;
    int status = 0;
    neap_progress_start("bench ttft");
    for (size_t rep = 0; rep < reps && !status; rep++) {
        for (size_t level = 0; level < b->n_levels && !status; level++) {
            neap_progress_set((double)(rep * b->n_levels + level) / (double)(reps * b->n_levels),
                              NULL);
            for (size_t turn = 0; turn < b->n_sides && !status; turn++) {
                /* How far the baseline goes is known from the first repetition on. */
                const size_t policy = rep % 2 ? b->n_sides - 1 - turn : turn;
                double share = b->levels[level];
                const double baseline = b->sides[BASELINE].levels[level].remaining;
                if (policy != BASELINE && share < 1 && baseline < share) share = baseline;
                status = measure(b, &b->sides[policy], level, share);
            }
        }
    }
    neap_progress_stop();
    return status;
}

/* ---- report ---- */

/* Level 0 is the resident one. added: what the eviction adds, against the same attention. */
static neap_summary paired_ratio(const bench *b, size_t level, size_t policy, bool added) {
    double ratios[NEAP_BENCH_REPS_MAX];
    size_t n = 0;
    const series *mine = &b->sides[policy].levels[level],
                 *base = &b->sides[added ? BASELINE : STOCK].levels[level];
    const series *mine_resident = &b->sides[policy].levels[0];
    const series *base_resident = &b->sides[BASELINE].levels[0];
    const double mine_sub =
        added ? neap_summarise(mine_resident->ttft_ms, mine_resident->n).median : 0;
    const double base_sub =
        added ? neap_summarise(base_resident->ttft_ms, base_resident->n).median : 0;
    for (size_t i = 0; i < mine->n && i < base->n; i++) {
        const double below = base->ttft_ms[i] - base_sub;
        if (below > 0) ratios[n++] = (mine->ttft_ms[i] - mine_sub) / below;
    }
    return neap_summarise(ratios, n);
}

static double median(const double *values, size_t n) {
    return neap_summarise(values, n).median;
}

static double bound_ms(const bench *b, size_t level, size_t policy) {
    const series *e = &b->sides[policy].levels[level], *resident = &b->sides[policy].levels[0];
    double bound = median(resident->ttft_ms, resident->n);
    if (b->rate.read_bps > 0)
        bound = fmax(bound, median(e->storage_bytes, e->n) / b->rate.read_bps * 1000);
    if (b->rate.decode_bps > 0)
        bound = fmax(bound, median(e->memory_bytes, e->n) / b->rate.decode_bps * 1000);
    return bound;
}

static json_t *phases_json(const series *e) {
    return json_pack("{s:f, s:f, s:f}", "alloc", median(e->alloc_ms, e->n), "reload",
                     median(e->restore_ms, e->n), "prefill", median(e->prefill_ms, e->n));
}

static json_t *paths_json(const series *e) {
    return json_pack("{s:f, s:f}", "storage", median(e->storage_ms, e->n), "memory",
                     median(e->memory_ms, e->n));
}

static json_t *row_json(const bench *b, size_t level, size_t policy) {
    const series *e = &b->sides[policy].levels[level], *resident = &b->sides[policy].levels[0];
    const neap_summary ttft = neap_summarise(e->ttft_ms, e->n);
    const neap_summary ratio = paired_ratio(b, level, policy, false);
    const neap_summary added = paired_ratio(b, level, policy, true);
    const double resident_ms = median(resident->ttft_ms, resident->n);
    const bool matched = fabs(e->remaining - b->levels[level]) * 100 <= MATCH_POINTS;
    json_t *row = json_pack(
        "{s:i, s:f, s:f, s:b, s:s, s:s, s:i, s:o, s:o, s:{s:I, s:I}, s:f, s:f, s:o, s:f, s:f, "
        "s:f, s:b, s:s}",
        "context", (int)b->context, "remaining", b->levels[level], "remaining_measured",
        e->remaining, "remaining_matched", matched, "policy", b->sides[policy].policy, "codec",
        b->codec, "reps", (int)e->n, "ttft_ms", neap_summary_json(&ttft), "phase_ms",
        phases_json(e), "bytes", "storage", (json_int_t)median(e->storage_bytes, e->n), "memory",
        (json_int_t)median(e->memory_bytes, e->n), "bound_ms", bound_ms(b, level, policy),
        "ratio_to_partial_offload", ratio.median, "ratio_to_partial_offload_range",
        neap_summary_json(&ratio), "ratio_to_resident",
        resident_ms > 0 ? ttft.median / resident_ms : 0, "cpu_s", median(e->cpu_s, e->n),
        "top1_agreement", e->agreement, "output_identical", e->identical, "attn",
        b->sides[policy].attn ? b->sides[policy].attn : "auto");
    if (row) json_object_set_new(row, "path_ms", paths_json(e));
    if (row)
        json_object_set_new(row, "added_ratio_to_partial_offload",
                            level && added.n ? json_real(added.median) : json_null());
    return row;
}

static const char *model_label(const bench *b) {
    return neap_model_label(b->options.n_models ? b->options.models[0] : NULL);
}

static void side_name(const side *s, char name[48]) {
    snprintf(name, 48, "%s%s%s", s->policy, s->attn ? " " : "", s->attn ? s->attn : "");
}

static void print_table(const bench *b) {
    printf("%s, context of %ld tokens, %d new ones, codec %s\n", model_label(b), b->context,
           NEW_TOKENS, b->codec);
    printf("%9s  %-22s %24s %10s %10s %9s %9s  %s\n", "REMAINING", "POLICY", "TTFT ms (min to max)",
           "STORAGE", "MEMORY", "RATIO", "ADDED", "OUTPUT");
    for (size_t level = 0; level < b->n_levels; level++) {
        for (size_t i = 0; i < b->n_sides; i++) {
            const size_t policy = b->n_sides - 1 - i;
            const series *e = &b->sides[policy].levels[level];
            const neap_summary ttft = neap_summarise(e->ttft_ms, e->n);
            const neap_summary ratio = paired_ratio(b, level, policy, false);
            const neap_summary added = paired_ratio(b, level, policy, true);
            char range[64], added_text[16] = "-", name[48];
            side_name(&b->sides[policy], name);
            snprintf(range, sizeof range, "%.0f (%.0f to %.0f)", ttft.median, ttft.min, ttft.max);
            if (level && added.n) snprintf(added_text, sizeof added_text, "%.2f", added.median);
            printf("%7.0f %%  %-22s %24s %10s %10s %9.2f %9s  %s\n", e->remaining * 100, name,
                   range, neap_cli_size((uint64_t)median(e->storage_bytes, e->n)),
                   neap_cli_size((uint64_t)median(e->memory_bytes, e->n)), ratio.median, added_text,
                   e->identical ? "identical" : "DIFFERS");
        }
    }
}

static int report(const bench *b, json_t *rows) {
    int status = 0;
    for (size_t level = 0; level < b->n_levels; level++) {
        for (size_t policy = 0; policy < b->n_sides; policy++) {
            const series *e = &b->sides[policy].levels[level];
            json_array_append_new(rows, row_json(b, level, policy));
            if (fabs(e->remaining - b->levels[level]) * 100 > MATCH_POINTS)
                neap_cli_warn("%s: %.0f %% remaining instead of %.0f %%", b->sides[policy].policy,
                              e->remaining * 100, b->levels[level] * 100);
            if (!e->identical)
                status = neap_cli_error(NEAP_EXIT_FAILED, NULL,
                                        "%s at %.0f %% remaining: the answer changed",
                                        b->sides[policy].policy, b->levels[level] * 100);
        }
    }
    if (!b->options.as_json) print_table(b);
    return status;
}

static void free_bench(bench *b) {
    for (size_t i = 0; i < b->n_sides; i++) {
        const side *s = &b->sides[i];
        if (!s->server) continue;
        char name[192], path[NEAP_PATH_MAX + 192];
        settled_name(b, s, name);
        snprintf(path, sizeof path, "%s%s", b->slot_dir, name);
        if (b->slot_name[0]) unlink(path);
        neap_server_stop(s->server);
    }
    neap_tokens_free(&b->prefix_new);
    neap_tokens_free(&b->prefix_reset);
    free(b);
}

static int run(bench *b) {
    char cache[NEAP_PATH_MAX - 64];
    int status =
        neap_model_resolve(b->options.n_models ? b->options.models[0] : NULL, b->model_path);
    if (!status && neap_cache_dir(cache, sizeof cache) == 0)
        snprintf(b->slot_dir, sizeof b->slot_dir, "%s/bench/", cache);
    if (!status && neap_make_dirs(b->slot_dir, 0700) != 0)
        status = neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: cannot be made", b->slot_dir);
    if (!status) status = prepare(b);
    if (!status) neap_device_rate_measure(b->model_path, b->codec, &b->rate);
    if (!status) status = measure_all(b);
    if (status) return status;
    json_t *rows = json_array();
    status = report(b, rows);
    if (!b->options.as_json) {
        json_decref(rows);
        return neap_cli_finish(status);
    }
    const int printed = neap_cli_print_json(
        json_pack("{s:o, s:s, s:{s:f, s:f}, s:o}", "machine", neap_machine_json(), "model",
                  model_label(b), "rates", "read_bytes_per_s", b->rate.read_bps,
                  "decode_bytes_per_s", b->rate.decode_bps, "rows", rows));
    return status ? status : printed;
}

/* ---- options ---- */

enum { OPT_CONTEXT = NEAP_OPT_BENCH, OPT_REMAINING, OPT_TEXT };

static int add_side(bench *b, const char *policy, const char *attn) {
    if (b->n_sides == SIDES_MAX)
        return neap_cli_error(NEAP_EXIT_USAGE, NULL, "--policy: more than %d", SIDES_MAX - NEAP);
    if (!neap_policy_find(policy)) return neap_option_policy(policy); /* says which there are */
    b->sides[b->n_sides++] = (side){.policy = policy, .attn = attn};
    return 0;
}

static int compare_down(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

/* "0,25,50": per cent. The resident level is always measured. */
static int parse_levels(bench *b, const char *value) {
    b->levels[0] = 1;
    b->n_levels = 1;
    for (const char *p = value; *p;) {
        char *end;
        const double percent = strtod(p, &end);
        if (end == p || (*end && *end != ',') || !(percent >= 0 && percent <= 100) ||
            b->n_levels == LEVELS_MAX)
            return neap_cli_error(NEAP_EXIT_USAGE, "as in 0,25,50,75",
                                  "--remaining %s: not a list of percentages", value);
        if (percent < 100) b->levels[b->n_levels++] = percent / 100;
        p = *end ? end + 1 : end;
    }
    qsort(b->levels, b->n_levels, sizeof b->levels[0], compare_down);
    return 0;
}

static const neap_command command = {
    "bench ttft",
    "usage: neap bench ttft [OPTIONS]\n"
    "\n"
    "Fills a context in several servers, gives memory back, and measures the time to the first\n"
    "token of the next request: neap's policy against partial-offload, with neap's attention and\n"
    "with llama.cpp's (ggml), in turns. RATIO is to partial-offload with llama.cpp's attention,\n"
    "ADDED that of what an eviction adds, with the same attention.\n"
    "\n"
    "  --context N      tokens of the context (default 8192; 4096 with --quick)\n"
    "  --remaining L    shares still in memory, in per cent (default 0,25,50,75,100)\n"
    "  --policy NAME    what to compare with partial-offload (default hybrid); may be given again\n"
    "  --codec NAME     q8 (default), cachegen or none\n"
    "  --text FILE      text of the context (default: generated)\n"};

static int take_option(bench *b, int code, const char *value) {
    switch (code) {
    case OPT_CONTEXT:
        return neap_option_number("--context", value, 64, 1000000, &b->context);
    case OPT_REMAINING:
        return parse_levels(b, value);
    case OPT_TEXT:
        b->text_path = value;
        return 0;
    case NEAP_OPT_POLICY:
        return add_side(b, value, NULL);
    case NEAP_OPT_CODEC:
        b->codec = value;
        return neap_option_codec(value);
    default:
        return neap_bench_option(code, value, &b->options);
    }
}

int neap_bench_ttft(int argc, char **argv) {
    static const struct option long_options[] = {
        NEAP_OPTIONS_BASIC,
        NEAP_OPTIONS_BENCH,
        {"context", required_argument, NULL, OPT_CONTEXT},
        {"remaining", required_argument, NULL, OPT_REMAINING},
        {"codec", required_argument, NULL, NEAP_OPT_CODEC},
        {"policy", required_argument, NULL, NEAP_OPT_POLICY},
        {"text", required_argument, NULL, OPT_TEXT},
        {0}};
    bench *b = calloc(1, sizeof *b);
    if (!b) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    b->codec = "q8";
    int code, status = parse_levels(b, "0,25,50,75,100");
    if (!status) status = add_side(b, "partial-offload", NULL);
    if (!status) status = add_side(b, "partial-offload", "ggml");
    while (!status && (code = getopt_long(argc, argv, ":h", long_options, NULL)) != -1) {
        const bool done = neap_option_basic(&command, code, argv, &status);
        if (done && code == 'h') fputs(neap_bench_help, stdout);
        if (done) {
            free_bench(b);
            return neap_cli_finish(status);
        }
        status = take_option(b, code, optarg);
    }
    if (!status && (optind < argc || b->options.n_models > 1))
        status = neap_cli_error(NEAP_EXIT_USAGE, "see neap bench ttft --help",
                                "%s: one argument too many",
                                optind < argc ? argv[optind] : b->options.models[1]);
    if (!b->context) b->context = b->options.quick ? QUICK_CONTEXT : DEFAULT_CONTEXT;
    if (!status && b->n_sides == NEAP) status = add_side(b, "hybrid", NULL);
    if (!status) status = run(b);
    free_bench(b);
    return status;
}
