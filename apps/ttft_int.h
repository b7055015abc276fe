/* ttft_int.h - inside `neap bench ttft`: the grid of one context, and who does what with it.
 *   bench_ttft.c    options; one grid after the other
 *   ttft_servers.c  room, servers, what they run under
 *   ttft_context.c  prompts, filled contexts and their files
 *   ttft_measure.c  one measurement, and all of a grid in turns
 *   ttft_report.c   rows, table, plot
 * Errors    0, or the exit status of an error that has been printed. */
#ifndef NEAP_APPS_TTFT_INT_H
#define NEAP_APPS_TTFT_INT_H

#include "bench.h"
#include "device_rate.h"
#include "paging.h"
#include "server_client.h"

#define NEAP_TTFT_NEW 8u
#define NEAP_TTFT_ANSWER 16u
#define NEAP_TTFT_LEVELS_MAX 16
#define NEAP_TTFT_SIDES_MAX 12
#define NEAP_TTFT_CONTEXTS_MAX 8
#define NEAP_TTFT_NAME_MAX 192

/* Stock llama.cpp under the kernel's own paging; a side like a policy, but none of the backend's.
 */
#define NEAP_TTFT_PAGING "os-paging"

enum {
    NEAP_TTFT_BASELINE,
    NEAP_TTFT_STOCK,
    NEAP_TTFT_COMPARED
}; /* sides; then the compared ones */

/* All measurements of one side at one level. */
typedef struct neap_ttft_series {
    double ttft_ms[NEAP_BENCH_REPS_MAX], restore_ms[NEAP_BENCH_REPS_MAX];
    double alloc_ms[NEAP_BENCH_REPS_MAX];
    double storage_ms[NEAP_BENCH_REPS_MAX], memory_ms[NEAP_BENCH_REPS_MAX]; /* of the paths */
    double prefill_ms[NEAP_BENCH_REPS_MAX], cpu_s[NEAP_BENCH_REPS_MAX];
    double storage_bytes[NEAP_BENCH_REPS_MAX], memory_bytes[NEAP_BENCH_REPS_MAX];
    double read_bytes[NEAP_BENCH_REPS_MAX], committed_bytes[NEAP_BENCH_REPS_MAX];
    double remaining, agreement;
    bool identical, has_identity;
    size_t n; /* 0: not measured at this level */
} neap_ttft_series;

typedef struct neap_ttft_side {
    const char *policy, *attn; /* attn NULL: as in the environment */
    neap_paging *paging;       /* of os-paging while its server runs */
    int model_fd;              /* its own copy of the model; -1: the common file */
    neap_server *server;
    int32_t unrounded[NEAP_TTFT_ANSWER]; /* the answer before anything was evicted */
    int32_t reference[NEAP_TTFT_ANSWER]; /* the answer that every later cycle must give */
    bool has_reference;
    char settled[NEAP_TTFT_NAME_MAX]; /* file of its context as it is after an eviction */
    bool reloads;                     /* that file can be loaded again and again */
    neap_ttft_series levels[NEAP_TTFT_LEVELS_MAX];
} neap_ttft_side;

/* What is common to all contexts. */
typedef struct neap_ttft {
    neap_bench_options options;
    const char *codec, *text_path, *plot_path;
    bool is_shape; /* random weights: contexts are tiled */
    bool only_kv;  /* weights stay, and are no part of what remains */
    long contexts[NEAP_TTFT_CONTEXTS_MAX];
    size_t n_contexts;
    double levels[NEAP_TTFT_LEVELS_MAX]; /* remaining shares, the resident one first */
    size_t n_levels;
    struct {
        const char *policy, *attn;
    } sides[NEAP_TTFT_SIDES_MAX];
    size_t n_sides;
    char model_path[NEAP_PATH_MAX], folder[NEAP_PATH_MAX]; /* of slot files; ends with a slash */
    uint64_t weight_bytes, kv_token_bytes;                 /* of the model; a token's K and V */
    neap_device_rate rate;
} neap_ttft;

typedef struct neap_ttft_grid {
    const neap_ttft *bench;
    long context;
    char context_file[NEAP_TTFT_NAME_MAX]; /* of the context never evicted; "": not there yet */
    bool remove_context_file;
    neap_tokens prefix_reset, prefix_new; /* prefix + 1 other token; prefix + 8 new tokens */
    neap_ttft_side sides[NEAP_TTFT_SIDES_MAX];
    size_t n_sides;
} neap_ttft_grid;

const char *neap_ttft_model(const neap_ttft *b); /* for tables */
bool neap_ttft_is_paging(const neap_ttft_side *s);

/* ---- ttft_servers.c ---- */

/* Starts a server a side, after a look whether memory and disk have room for all of them. A side
 * os-paging that this machine cannot have is left out with a warning. */
int neap_ttft_servers_start(neap_ttft_grid *g);
void neap_ttft_servers_stop(neap_ttft_grid *g);

/* ---- ttft_context.c ---- */

/* Prompts; the context in every server, answers to compare with, one eviction behind it. */
int neap_ttft_context_fill(neap_ttft_grid *g);
/* Brings the context back to what it was before the last measurement; it is not read again. */
int neap_ttft_context_rewind(const neap_ttft_grid *g, const neap_ttft_side *s);
/* Removes the files that do not serve the next run; frees the prompts. */
void neap_ttft_context_free(neap_ttft_grid *g);

/* ---- ttft_measure.c ---- */

/* Asks the question; the prefix must have come from the cache. */
int neap_ttft_ask(const neap_ttft_grid *g, const neap_ttft_side *s, neap_answer *ret_answer);
/* Evicts everything that can be, then brings it back. */
int neap_ttft_evict_once(const neap_ttft_side *s);
int neap_ttft_measure_all(neap_ttft_grid *g);

/* ---- ttft_report.c ---- */

/* Appends the grid's rows, prints its table unless JSON is wanted. Fails where an answer changed.
 */
int neap_ttft_report(const neap_ttft_grid *g, json_t *rows);
int neap_ttft_plot(const neap_ttft *b, const neap_ttft_grid *grids, size_t n);
#endif
