/* bench_attn.c - `neap bench attn`: our attention against llama.cpp's.
 *
 * Kernel rows: our kernel alone, on made-up data of a model's shape, by one thread and by all, next
 * to how fast one thread streams the same memory. Node rows: each model's operation, timed by the
 * backend with either kernel as it does to choose one. Whole rows: llama-bench with neap, and stock
 * with -fa on and off, on a context of that many tokens; runs are interleaved, ratios are of runs
 * side by side. */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "attn.h"
#include "bench.h"
#include "clock.h"
#include "half.h"
#include "model_speed.h"
#include "proc.h"
#include "profile_file.h"

#define DEFAULT_REPS 5
#define DEFAULT_CONTEXT 8192
#define QUICK_CONTEXT 2048
#define THREADS_MAX 64
enum { N_TESTS = 3, N_VARIANTS = 3, KERNEL_RUNS = 7, FEW_TOKENS = 8 };
#define UNCACHED_BYTES (160u << 20)
enum { NEAP, FA_ON, FA_OFF };

static const neap_speed_test tests[N_TESTS] = {{"tg16", 0, 16}, {"pp8", 8, 0}, {"pp512", 512, 0}};

/* ---- the kernel alone ---- */

typedef struct attn_case {
    const char *name;
    uint32_t n_heads, n_kv_heads, elems;
} attn_case;

static const attn_case cases[] = {
    {"qwen2.5-0.5b", 14, 2, 64},
    {"smollm2-135m", 9, 3, 64},
    {"gemma3-270m", 4, 1, 256},
    {"llama-3.1-8b", 32, 8, 128},
};

typedef struct worker {
    neap_attn *job;
    uint32_t thread;
} worker;

static void *work(void *arg) {
    worker *w = arg;
    neap_attn_run(w->job, w->thread);
    return NULL;
}

static uint64_t time_job(neap_attn *job, uint32_t n_threads) {
    pthread_t threads[THREADS_MAX];
    worker workers[THREADS_MAX];
    const uint64_t began = neap_clock_ns();
    uint32_t n = 0;
    for (uint32_t i = 1; i < n_threads; i++) {
        workers[n] = (worker){job, i};
        if (pthread_create(&threads[n], NULL, work, &workers[n]) == 0) n++;
    }
    neap_attn_run(job, 0);
    for (uint32_t i = 0; i < n; i++)
        pthread_join(threads[i], NULL);
    return neap_clock_ns() - began;
}

/* Streaming reads of one thread, bytes a second: the most that attention by one thread can reach.
 */
static double stream_rate(const void *data, size_t bytes) {
    const uint64_t *words = data;
    uint64_t sum[8] = {0};
    const uint64_t began = neap_clock_ns();
    for (size_t i = 0; i + 8 <= bytes / 8; i += 8)
        for (size_t j = 0; j < 8; j++)
            sum[j] += words[i + j];
    const uint64_t ns = neap_clock_ns() - began;
    volatile uint64_t used = sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
    (void)used;
    return ns ? (double)bytes * 1e9 / (double)ns : 0;
}

typedef struct kernel_data {
    uint16_t *kv; /* [n_layers] K, then V */
    float *q, *out;
    uint16_t *mask;
    const void **k_chunks, **v_chunks; /* [n_layers][n_chunks] */
    size_t n_layers, n_chunks;
    void *scratch, *state;
} kernel_data;

static void free_data(kernel_data *d) {
    void *const all[] = {d->kv,       d->q,        d->out,     d->mask,
                         d->k_chunks, d->v_chunks, d->scratch, d->state};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static size_t padded(size_t bytes) {
    return (bytes + 63) / 64 * 64;
}

/* With few tokens as many layers as a processor's cache does not hold, for a model reads each once
 * a token. Causal mask over the last tokens. 0 or -ENOMEM. */
static int make_data(const attn_case *shape, uint32_t n_tokens, uint32_t n_cells,
                     uint32_t n_threads, kernel_data *d, neap_attn_shape *ret_shape) {
    const size_t cell = (size_t)shape->n_kv_heads * shape->elems, n = (size_t)n_cells * cell;
    const size_t row = (size_t)shape->n_heads * shape->elems, n_chunks = (n_cells + 255) / 256;
    const size_t n_layers =
        n_tokens > FEW_TOKENS || 4 * n > UNCACHED_BYTES ? 1 : UNCACHED_BYTES / (4 * n);
    d->n_layers = n_layers;
    d->n_chunks = n_chunks;
    d->kv = aligned_alloc(64, padded(n_layers * 2 * n * 2));
    d->q = malloc(n_tokens * row * sizeof *d->q);
    d->out = malloc(n_tokens * row * sizeof *d->out);
    d->mask = calloc((size_t)n_tokens * n_cells, sizeof *d->mask);
    d->k_chunks = malloc(n_layers * n_chunks * sizeof *d->k_chunks);
    d->v_chunks = malloc(n_layers * n_chunks * sizeof *d->v_chunks);
    if (!d->kv || !d->q || !d->out || !d->mask || !d->k_chunks || !d->v_chunks) return -ENOMEM;
    uint32_t state = 1;
    for (size_t i = 0; i < n_layers * 2 * n; i++) {
        state = state * 1664525u + 1013904223u;
        d->kv[i] = neap_f16_of_f32((float)(state >> 8) * 0x1p-23f - 1.0f);
    }
    for (size_t i = 0; i < n_tokens * row; i++)
        d->q[i] = (float)(i % 101) * 0.02f - 1.0f;
    for (size_t t = 0; t < n_tokens; t++)
        for (size_t c = n_cells - n_tokens + t + 1; c < n_cells; c++)
            d->mask[t * n_cells + c] = 0xfc00;
    for (size_t i = 0; i < n_layers * n_chunks; i++) {
        d->k_chunks[i] = d->kv + i / n_chunks * 2 * n + i % n_chunks * 256 * cell;
        d->v_chunks[i] = (const uint16_t *)d->k_chunks[i] + n;
    }
    neap_attn_plane plane = {.type = NEAP_ATTN_F16,
                             .head_elems = shape->elems,
                             .cell_bytes = cell * 2,
                             .head_bytes = (size_t)shape->elems * 2,
                             .chunks = d->k_chunks};
    *ret_shape = (neap_attn_shape){.n_tokens = n_tokens,
                                   .n_heads = shape->n_heads,
                                   .n_kv_heads = shape->n_kv_heads,
                                   .n_streams = 1,
                                   .n_cells = n_cells,
                                   .k = plane,
                                   .v = plane,
                                   .q = {(char *)d->q, row * 4, (size_t)shape->elems * 4, 0},
                                   .out = {(char *)d->out, row * 4, (size_t)shape->elems * 4, 0},
                                   .mask = {(const char *)d->mask, 2 * (size_t)n_cells, 0, 0, 1, 1},
                                   .scale = 1.0f / sqrtf((float)shape->elems)};
    ret_shape->v.chunks = d->v_chunks;
    d->scratch = aligned_alloc(64, padded(neap_attn_scratch_bytes(ret_shape, n_threads)));
    d->state = aligned_alloc(64, padded(neap_attn_state_bytes(ret_shape)));
    return d->scratch && d->state ? 0 : -ENOMEM;
}

/* Milliseconds of a layer. */
static double time_layers(const kernel_data *d, neap_attn_shape *problem, uint32_t n_threads) {
    static neap_attn job;
    uint64_t ns = 0;
    for (size_t layer = 0; layer < d->n_layers; layer++) {
        problem->k.chunks = d->k_chunks + layer * d->n_chunks;
        problem->v.chunks = d->v_chunks + layer * d->n_chunks;
        neap_attn_plan(&job, problem, n_threads, d->scratch, d->state);
        ns += time_job(&job, n_threads);
    }
    return (double)ns / 1e6 / (double)d->n_layers;
}

static int kernel_row(const attn_case *shape, uint32_t n_tokens, uint32_t n_cells,
                      uint32_t n_threads, bool as_json, json_t *rows) {
    kernel_data data = {0};
    neap_attn_shape problem;
    int err = make_data(shape, n_tokens, n_cells, n_threads, &data, &problem);
    if (err) {
        free_data(&data);
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "bench attn: %s", neap_strerror(err));
    }
    const size_t bytes = 4 * (size_t)n_cells * shape->n_kv_heads * shape->elems;
    double one[KERNEL_RUNS], all[KERNEL_RUNS], share[KERNEL_RUNS], stream[KERNEL_RUNS];
    for (size_t i = 0; i < KERNEL_RUNS; i++) {
        stream[i] = stream_rate(data.kv, bytes * data.n_layers);
        one[i] = time_layers(&data, &problem, 1);
        share[i] = (double)bytes / (one[i] * 1e-3) / stream[i];
        all[i] = time_layers(&data, &problem, n_threads);
    }
    free_data(&data);
    const neap_summary one_ms = neap_summarise(one, KERNEL_RUNS);
    const neap_summary all_ms = neap_summarise(all, KERNEL_RUNS);
    const neap_summary shares = neap_summarise(share, KERNEL_RUNS);
    const neap_summary streams = neap_summarise(stream, KERNEL_RUNS);
    const double gflops = 4e-9 * n_tokens * (double)n_cells * shape->n_heads * shape->elems;
    if (!as_json) {
        printf("%-14s %6u %7u %10.3f %10.3f %9.1f %7.0f %% %9.1f\n", shape->name, n_tokens, n_cells,
               one_ms.median, all_ms.median, (double)bytes / one_ms.median * 1e-6,
               100 * shares.median, gflops / (one_ms.median * 1e-3));
        fflush(stdout);
        return 0;
    }
    json_array_append_new(
        rows,
        json_pack("{s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:s, s:s, s:i, s:o, s:o, s:f, s:f, s:f, "
                  "s:f}",
                  "row", "kernel", "shape", shape->name, "n_tokens", (int)n_tokens, "context",
                  (int)n_cells, "n_heads", (int)shape->n_heads, "n_kv_heads",
                  (int)shape->n_kv_heads, "head_elems", (int)shape->elems, "type", "f16", "kernel",
                  neap_attn_kernel_name(0), "threads", (int)n_threads, "one_thread_ms",
                  neap_summary_json(&one_ms), "ms", neap_summary_json(&all_ms), "bytes",
                  (double)bytes, "stream_gbps", streams.median * 1e-9, "share_of_stream",
                  shares.median, "gflops", gflops / (one_ms.median * 1e-3)));
    return 0;
}

static int kernel_rows(const neap_bench_options *options, long context, json_t *rows) {
    static const uint32_t tokens[] = {1, 8, 64, 512};
    const uint32_t asked = neap_option_n_threads();
    const uint32_t n_threads = asked > THREADS_MAX ? THREADS_MAX : asked;
    if (!options->as_json)
        printf("Our kernel (%s) alone, one layer, f16; 1 thread, and %u:\n"
               "%-14s %6s %7s %10s %10s %9s %9s %9s\n",
               neap_attn_kernel_name(0), n_threads, "SHAPE", "TOKENS", "CONTEXT", "1 THREAD ms",
               "ALL ms", "GB/s", "OF STREAM", "GFLOP/s");
    for (size_t s = 0; s < sizeof cases / sizeof *cases; s++)
        for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++) {
            int status = kernel_row(&cases[s], tokens[t], (uint32_t)context, n_threads,
                                    options->as_json, rows);
            if (status) return status;
        }
    return 0;
}

/* ---- whole models ---- */

typedef struct results {
    double tps[N_VARIANTS][N_TESTS][NEAP_BENCH_REPS_MAX];
    size_t n;
} results;

static int measure(const char *path, const char *context, size_t reps, results *r) {
    const char *const on[] = {"-p", "8,512", "-n", "16", "-d", context, "-fa", "1", NULL};
    const char *const off[] = {"-p", "8,512", "-n", "16", "-d", context, "-fa", "0", NULL};
    for (size_t rep = 0; rep < reps; rep++) {
        for (size_t i = 0; i < N_VARIANTS; i++) {
            const size_t variant = (rep + i) % N_VARIANTS; /* each goes first in turn */
            double tps[N_TESTS];
            neap_progress_set((double)(rep * N_VARIANTS + i) / (double)(reps * N_VARIANTS), NULL);
            neap_speed_run run = {
                .path = path, .with_neap = variant == NEAP, .args = variant == FA_OFF ? off : on};
            const int status = neap_model_speed(&run, tests, N_TESTS, tps);
            if (status) return status;
            for (size_t t = 0; t < N_TESTS; t++)
                r->tps[variant][t][r->n] = tps[t];
        }
        r->n++;
    }
    return 0;
}

static void whole_row(const char *model, long context, size_t test, const results *r, bool as_json,
                      json_t *rows) {
    double to_on[NEAP_BENCH_REPS_MAX], to_better[NEAP_BENCH_REPS_MAX];
    for (size_t i = 0; i < r->n; i++) {
        const double on = r->tps[FA_ON][test][i], off = r->tps[FA_OFF][test][i];
        to_on[i] = r->tps[NEAP][test][i] / on;
        to_better[i] = r->tps[NEAP][test][i] / (on > off ? on : off);
    }
    const neap_summary neap = neap_summarise(r->tps[NEAP][test], r->n);
    const neap_summary on = neap_summarise(r->tps[FA_ON][test], r->n);
    const neap_summary off = neap_summarise(r->tps[FA_OFF][test], r->n);
    const neap_summary ratio_on = neap_summarise(to_on, r->n);
    const neap_summary ratio_better = neap_summarise(to_better, r->n);
    if (!as_json) {
        printf("%-22s %-6s %7ld %8.1f %8.1f %8.1f  %5.2f (%.2f to %.2f)  %5.2f (%.2f to %.2f)\n",
               model, tests[test].name, context, neap.median, on.median, off.median,
               ratio_on.median, ratio_on.min, ratio_on.max, ratio_better.median, ratio_better.min,
               ratio_better.max);
        fflush(stdout);
        return;
    }
    json_array_append_new(rows,
                          json_pack("{s:s, s:s, s:s, s:I, s:I, s:f, s:f, s:f, s:o, s:o}", "row",
                                    "whole", "model", model, "test", tests[test].name, "context",
                                    (json_int_t)context, "reps", (json_int_t)r->n, "neap_tps",
                                    neap.median, "stock_fa_on_tps", on.median, "stock_fa_off_tps",
                                    off.median, "ratio_to_fa_on", neap_summary_json(&ratio_on),
                                    "ratio_to_better", neap_summary_json(&ratio_better)));
}

static int whole_rows(const neap_bench_options *options, long context, json_t *rows) {
    const size_t reps = options->reps ? (size_t)options->reps : options->quick ? 3 : DEFAULT_REPS;
    char depth[24];
    snprintf(depth, sizeof depth, "%ld", context);
    if (!options->as_json)
        printf("\nWhole models, tokens per second (stock llama.cpp with -fa on, with -fa off):\n"
               "%-22s %-6s %7s %8s %8s %8s  %s  %s\n",
               "MODEL", "TEST", "CONTEXT", "NEAP", "FA ON", "FA OFF", "TO FA ON             ",
               "TO THE BETTER");
    int status = 0;
    for (size_t i = 0; i < options->n_models && !status; i++) {
        char path[NEAP_PATH_MAX];
        const char *model = neap_model_label(options->models[i]);
        results *r = calloc(1, sizeof *r);
        if (!r) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
        status = neap_model_resolve(options->models[i], path);
        neap_progress_start("bench attn");
        if (!status) status = measure(path, depth, reps, r);
        neap_progress_stop();
        for (size_t test = 0; test < N_TESTS && !status; test++)
            whole_row(model, context, test, r, options->as_json, rows);
        free(r);
    }
    return status;
}

/* ---- the operation in llama.cpp ---- */

static void put_node_row(const char *model, long context, const neap_profile_attention *entry,
                         bool as_json, json_t *rows) {
    const double host_ms = (double)entry->times.host_ns / 1e6;
    const double our_ms = (double)entry->times.our_ns / 1e6;
    if (as_json) {
        json_array_append_new(rows, json_pack("{s:s, s:s, s:s, s:I, s:f, s:f, s:f}", "row", "node",
                                              "model", model, "kind", entry->kind, "context",
                                              (json_int_t)context, "ms", our_ms, "ggml_ms", host_ms,
                                              "ratio", our_ms > 0 ? host_ms / our_ms : 0));
        return;
    }
    const char *kind = strchr(entry->kind, ':');
    printf("%-22s %-60s %10.3f %10.3f %7.2f\n", model, kind ? kind + 2 : entry->kind, our_ms,
           host_ms, our_ms > 0 ? host_ms / our_ms : 0);
    fflush(stdout);
}

/* One run of llama-bench with a device profile of its own: what the backend timed to choose is in
 * it afterwards. Only kinds with a context of the length asked for count. */
static int measure_nodes(const char *path, const char *profile_path, long context,
                         neap_profile *ret_profile) {
    static const char *const args[] = {"-p", "8,512", "-n", "16", "-d", "512", "-fa", "1", NULL};
    const neap_profile empty = {0};
    neap_device device;
    char cells[24], folder[NEAP_PATH_MAX];
    int err = neap_swap_folder(getenv("NEAP_SWAP_DIR"), folder, sizeof folder);
    if (!err) err = neap_device_identify(folder, &device);
    if (!err) err = neap_profile_save(profile_path, &device, &empty);
    if (!err) {
        double tps[N_TESTS];
        snprintf(cells, sizeof cells, "%ld", context);
        setenv("NEAP_PROFILE", profile_path, 1);
        setenv("NEAP_ATTN_CELLS", cells, 1);
        neap_speed_run run = {.path = path, .with_neap = true, .args = args};
        const int status = neap_model_speed(&run, tests, N_TESTS, tps);
        unsetenv("NEAP_PROFILE");
        unsetenv("NEAP_ATTN_CELLS");
        if (status) return status;
        err = neap_profile_load(profile_path, &device, ret_profile);
    }
    if (!err) return 0;
    return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", profile_path, neap_strerror(err));
}

static int node_rows(const neap_bench_options *options, long context, json_t *rows) {
    char cache[NEAP_PATH_MAX - 64], profile_path[NEAP_PATH_MAX], cells[32];
    int status = 0;
    if (!options->as_json)
        printf("\nThe operation within llama.cpp, one layer, warm, by all threads (ggml: -fa on):\n"
               "%-22s %-60s %10s %10s %7s\n",
               "MODEL", "KIND", "NEAP ms", "GGML ms", "RATIO");
    int err = neap_cache_dir(cache, sizeof cache);
    if (err) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "cache folder: %s", neap_strerror(err));
    snprintf(profile_path, sizeof profile_path, "%s/bench-attn-%d.json", cache, (int)getpid());
    snprintf(cells, sizeof cells, " %ld cells", context);
    for (size_t i = 0; i < options->n_models && !status; i++) {
        char path[NEAP_PATH_MAX];
        neap_profile profile = {0};
        status = neap_model_resolve(options->models[i], path);
        neap_progress_start("bench attn");
        if (!status) status = measure_nodes(path, profile_path, context, &profile);
        neap_progress_stop();
        for (size_t k = 0; k < profile.n_attentions && !status; k++)
            if (strstr(profile.attentions[k].kind, cells))
                put_node_row(neap_model_label(options->models[i]), context, &profile.attentions[k],
                             options->as_json, rows);
    }
    unlink(profile_path);
    return status;
}

static const neap_command command = {
    "bench attn",
    "usage: neap bench attn [OPTIONS]\n"
    "\n"
    "Compares neap's attention with llama.cpp's: our kernel alone, beside how fast memory "
    "streams;\n"
    "each model's attention operation by both; and whole models by llama-bench, with neap and "
    "stock\n"
    "with -fa on and off, after a context of many tokens. --model may be given several times;\n"
    "default: all that are fetched.\n"
    "\n"
    "  --context N    tokens of the context (default 8192; 2048 with --quick)\n"
    "  --kernel       only the kernel alone\n"};

enum { OPT_CONTEXT = NEAP_OPT_BENCH, OPT_KERNEL };

typedef struct attn_options {
    neap_bench_options common;
    long context;
    bool only_kernel;
} attn_options;

static int take_option(void *ctx, int code, const char *value) {
    attn_options *o = ctx;
    switch (code) {
    case OPT_CONTEXT:
        return neap_option_number("--context", value, 512, 1 << 20, &o->context);
    case OPT_KERNEL:
        o->only_kernel = true;
        return 0;
    default:
        return neap_bench_option(code, value, &o->common);
    }
}

int neap_bench_attn(int argc, char **argv) {
    static const struct option long_options[] = {NEAP_OPTIONS_BASIC,
                                                 NEAP_OPTIONS_BENCH,
                                                 {"context", required_argument, NULL, OPT_CONTEXT},
                                                 {"kernel", no_argument, NULL, OPT_KERNEL},
                                                 {0}};
    attn_options o = {0};
    int status;
    if (!neap_bench_parse(&command, long_options, argc, argv, take_option, &o, &status))
        return status;
    if (optind < argc)
        return neap_cli_error(NEAP_EXIT_USAGE, "see neap bench attn --help",
                              "%s: one argument too many", argv[optind]);
    if (o.context == 0) o.context = o.common.quick ? QUICK_CONTEXT : DEFAULT_CONTEXT;
    if (!o.only_kernel && (status = neap_bench_default_models(&o.common))) return status;
    if (!o.only_kernel && (status = neap_path_load_backend())) return status;
    json_t *rows = json_array();
    status = kernel_rows(&o.common, o.context, rows);
    if (!status && !o.only_kernel) status = node_rows(&o.common, o.context, rows);
    if (!status && !o.only_kernel) status = whole_rows(&o.common, o.context, rows);
    if (!status && o.common.as_json)
        return neap_cli_print_json(
            json_pack("{s:o, s:o}", "machine", neap_machine_json(), "rows", rows));
    json_decref(rows);
    return status ? status : neap_cli_finish(0);
}
