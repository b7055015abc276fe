/* bench_evict.c - `neap bench evict`: how fast memory is given back.
 *
 * Servers run side by side with the same context: two that keep chunks coded in memory (q8,
 * cachegen), one that writes them to storage. In turns each gives back what one kind of row names;
 * everything is restored after it, and where chunks must be dirty the context is loaded again
 * before. A kind is measured twice: the first 256 MiB, and all there is; where that is less, once.
 * Between them memcpy, on one thread and on as many as an eviction works on, so that a ratio is of
 * runs beside each other. */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "bench.h"
#include "bytes.h"
#include "clock.h"
#include "crew.h"
#include "proc.h"
#include "server_client.h"
#include "vm.h"

#define DEFAULT_REPS 5
#define DEFAULT_CONTEXT 8192
#define QUICK_CONTEXT 4096
#define DEFAULT_MODEL "qwen2.5-coder-0.5b"
#define FIRST_BYTES ((uint64_t)256 << 20)
#define COPY_BYTES ((size_t)256 << 20)
#define COPY_PIECE ((size_t)2 << 20)

enum { SIDE_Q8, SIDE_CACHEGEN, SIDE_STORAGE, N_SIDES };

static const struct {
    const char *codec, *policy;
} side_options[N_SIDES] = {
    {"q8", "memory-only"}, {"cachegen", "memory-only"}, {"q8", "storage-only"}};

/* In the order in which they run: "KV, clean" needs the copies that "KV to storage" made. */
static const struct {
    const char *what, *codec; /* codec NULL: none is at work */
    int side, only;
    bool reloads;
    /* Of the cells' bytes, what to ask for as all: more than coding leaves would go on to storage.
     * 0: everything. */
    double share;
} kinds[] = {
    {"weights", NULL, SIDE_Q8, NEAP_ONLY_WEIGHTS, false, 0},
    {"kv-memory", "q8", SIDE_Q8, NEAP_ONLY_KV, true, 0.4},
    {"kv-memory", "cachegen", SIDE_CACHEGEN, NEAP_ONLY_KV, true, 0.4},
    {"kv-storage", "q8", SIDE_STORAGE, NEAP_ONLY_KV, true, 0},
    {"kv-clean", NULL, SIDE_STORAGE, NEAP_ONLY_KV, false, 0},
};
enum { N_KINDS = sizeof kinds / sizeof kinds[0] };

typedef struct series {
    double first_ms[NEAP_BENCH_REPS_MAX], all_ms[NEAP_BENCH_REPS_MAX];
    double client_ms[NEAP_BENCH_REPS_MAX]; /* of all: as who asked sees it */
    double gbps[NEAP_BENCH_REPS_MAX], ratio[NEAP_BENCH_REPS_MAX];
    uint64_t first_bytes, raw_bytes, released_bytes;
    size_t n;
} series;

typedef struct bench {
    neap_bench_options options;
    long context;
    char model_path[NEAP_PATH_MAX], slot_dir[NEAP_PATH_MAX], slot_name[128];
    neap_tokens prompt;
    neap_server *servers[N_SIDES];
    series series[N_KINDS];
    neap_crew *crew;
    char *copy_from, *copy_to;
    double copy_one[NEAP_BENCH_REPS_MAX], copy_all[NEAP_BENCH_REPS_MAX];
    size_t n_copies;
} bench;

/* ---- memcpy ---- */

typedef struct copy_job {
    const bench *b;
    atomic_size_t next;
} copy_job;

static void copy_pieces(void *ctx) {
    copy_job *job = ctx;
    for (;;) {
        const size_t at = atomic_fetch_add(&job->next, COPY_PIECE);
        if (at >= COPY_BYTES) return;
        memcpy(job->b->copy_to + at, job->b->copy_from + at, COPY_PIECE);
    }
}

static double copy_gbps(const bench *b, uint32_t n_threads) {
    copy_job job = {.b = b};
    atomic_init(&job.next, 0);
    const uint64_t began_ns = neap_clock_ns();
    neap_crew_run(b->crew, n_threads, copy_pieces, &job);
    return (double)COPY_BYTES / (double)(neap_clock_ns() - began_ns);
}

static int make_copies(bench *b) {
    void *from = NULL, *to = NULL;
    int err = neap_crew_create(0, &b->crew);
    if (!err) err = neap_vm_reserve(COPY_BYTES, COPY_PIECE, &from);
    b->copy_from = from;
    if (!err) err = neap_vm_reserve(COPY_BYTES, COPY_PIECE, &to);
    b->copy_to = to;
    if (err) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "memcpy: %s", neap_strerror(err));
    neap_crew_start(b->crew);
    memset(b->copy_from, 1, COPY_BYTES);
    memset(b->copy_to, 1, COPY_BYTES);
    return 0;
}

/* ---- context ---- */

static int make_prompt(bench *b) {
    char *text = neap_text_generate((size_t)b->context);
    if (!text) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    int status = neap_server_tokenize(b->servers[0], text, &b->prompt);
    free(text);
    if (status) return status;
    if (b->prompt.n < (size_t)b->context)
        return neap_cli_error(NEAP_EXIT_FAILED, "give a smaller --context",
                              "text: %zu tokens are less than the context", b->prompt.n);
    b->prompt.n = (size_t)b->context;
    return 0;
}

/* Where the filled context is kept between runs: named by model, tokens and version. */
static int name_slot(bench *b) {
    struct stat info;
    char cache[NEAP_PATH_MAX - 64];
    int err = neap_cache_dir(cache, sizeof cache);
    if (!err && stat(b->model_path, &info) != 0) err = -errno;
    if (!err) snprintf(b->slot_dir, sizeof b->slot_dir, "%s/bench/", cache);
    if (!err) err = neap_make_dirs(b->slot_dir, 0700);
    if (err) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "bench folder: %s", neap_strerror(err));
    snprintf(b->slot_name, sizeof b->slot_name, "evict-%lld-%lld-%ld.bin", (long long)info.st_size,
             (long long)info.st_mtime, b->context);
    return 0;
}

static int load_context(const bench *b, neap_server *server, bool *ret_loaded) {
    return neap_server_slot_load(server, b->slot_name, ret_loaded);
}

static int fill(bench *b, neap_server *server) {
    bool loaded = false;
    neap_answer answer = {0};
    int status = load_context(b, server, &loaded);
    if (status || loaded) return status;
    status = neap_server_complete(server, &b->prompt, 0, true, &answer);
    neap_answer_free(&answer);
    return status ? status : neap_server_slot_save(server, b->slot_name);
}

static int prepare(bench *b) {
    int status = name_slot(b);
    neap_progress_start("reading the context");
    for (size_t i = 0; i < N_SIDES && !status; i++) {
        const neap_server_options options = {.model_path = b->model_path,
                                             .n_ctx = (uint32_t)b->context + 64,
                                             .threads = neap_option_threads(),
                                             .codec = side_options[i].codec,
                                             .policy = side_options[i].policy,
                                             .slot_dir = b->slot_dir};
        status = neap_server_start(&options, &b->servers[i]);
        if (!status && i == 0) status = make_prompt(b);
        if (!status) status = fill(b, b->servers[i]);
    }
    neap_progress_stop();
    return status;
}

/* ---- one measurement ---- */

static int failed(const char *what, char *message, int err) {
    const int status = neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", what,
                                      message ? message : neap_strerror(err));
    free(message);
    return status;
}

static int evict(const neap_server *server, int only, uint64_t bytes, neap_evict_result *ret_result,
                 double *ret_client_ms) {
    char *message = NULL;
    const neap_evict_request request = {.bytes = bytes, .only = only};
    const uint64_t began_ns = neap_clock_ns();
    const int err = neap_instance_evict(neap_server_pid(server), &request, ret_result, &message);
    *ret_client_ms = (double)(neap_clock_ns() - began_ns) / 1e6;
    if (err || ret_result->storage_error)
        return failed("eviction", message, err ? err : ret_result->storage_error);
    free(message);
    return 0;
}

static int restore(const neap_server *server) {
    uint64_t bytes = 0, ns = 0;
    char *message = NULL;
    const int err = neap_instance_restore(neap_server_pid(server), &bytes, &ns, &message);
    return err ? failed("restore", message, err) : 0;
}

/* Evicts so much from all resident, then restores it. */
static int run_once(const bench *b, size_t kind, uint64_t bytes, neap_evict_result *ret_result,
                    double *ret_client_ms) {
    neap_server *server = b->servers[kinds[kind].side];
    int status = 0;
    if (kinds[kind].reloads) {
        bool loaded = false;
        status = load_context(b, server, &loaded);
        if (!status && !loaded)
            status = neap_cli_error(NEAP_EXIT_FAILED, NULL,
                                    "llama-server: cannot load the context again");
    }
    if (!status) status = evict(server, kinds[kind].only, bytes, ret_result, ret_client_ms);
    return status ? status : restore(server);
}

/* What is asked for as all. */
static int all_bytes(const bench *b, size_t kind, uint64_t *ret_bytes) {
    const int pid = neap_server_pid(b->servers[kinds[kind].side]);
    json_t *stat;
    const int err = neap_instance_stat(pid, &stat);
    if (err)
        return neap_cli_error(NEAP_EXIT_FAILED, "does the server run through the backend?",
                              "llama-server (pid %d): control socket: %s", pid, neap_strerror(err));
    const uint64_t total = neap_instance_count(
        stat, "bytes", kinds[kind].only == NEAP_ONLY_KV ? "kv_total" : "weights_total");
    json_decref(stat);
    *ret_bytes = kinds[kind].share > 0 ? (uint64_t)((double)total * kinds[kind].share) : total;
    return 0;
}

static int measure(bench *b, size_t kind) {
    series *s = &b->series[kind];
    neap_evict_result first = {0}, all = {0};
    double first_client_ms = 0;
    uint64_t bytes = 0;
    int status = all_bytes(b, kind, &bytes);
    if (!status && bytes > FIRST_BYTES)
        status = run_once(b, kind, FIRST_BYTES, &first, &first_client_ms);
    if (!status)
        status = run_once(b, kind, kinds[kind].share > 0 ? bytes : UINT64_MAX, &all,
                          &s->client_ms[s->n]);
    if (status) return status;
    if (bytes <= FIRST_BYTES) first = all;
    s->first_ms[s->n] = (double)first.duration_ns / 1e6;
    s->all_ms[s->n] = (double)all.duration_ns / 1e6;
    s->first_bytes = first.released_bytes;
    s->released_bytes = all.released_bytes;
    s->raw_bytes = all.weights_bytes + all.kv_memory_bytes + all.kv_storage_bytes;
    s->gbps[s->n] = all.duration_ns ? (double)s->raw_bytes / (double)all.duration_ns : 0;
    s->ratio[s->n] = s->gbps[s->n] / b->copy_all[b->n_copies - 1];
    s->n++;
    return 0;
}

static int measure_all(bench *b, size_t model) {
    const size_t reps = b->options.reps ? (size_t)b->options.reps : DEFAULT_REPS;
    int status = 0;
    neap_progress_start("bench evict");
    for (size_t rep = 0; rep < reps && !status; rep++) {
        for (size_t kind = 0; kind < N_KINDS && !status; kind++) {
            neap_progress_set(
                ((double)model + ((double)rep + (double)kind / N_KINDS) / (double)reps) /
                    (double)b->options.n_models,
                kinds[kind].what);
            if (kind == 0) {
                b->copy_one[b->n_copies] = copy_gbps(b, 1);
                b->copy_all[b->n_copies++] = copy_gbps(b, neap_crew_size(b->crew));
            }
            status = measure(b, kind);
        }
    }
    neap_progress_stop();
    return status;
}

/* ---- report ---- */

static json_t *summary(const double *values, size_t n) {
    const neap_summary s = neap_summarise(values, n);
    return neap_summary_json(&s);
}

static json_t *row_json(const bench *b, const char *model, size_t kind) {
    const series *s = &b->series[kind];
    return json_pack(
        "{s:s, s:i, s:s, s:s?, s:i, s:i, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o}",
        "model", model, "context", (int)b->context, "what", kinds[kind].what, "codec",
        kinds[kind].codec, "reps", (int)s->n, "threads", (int)neap_crew_size(b->crew), "raw_bytes",
        (json_int_t)s->raw_bytes, "released_bytes", (json_int_t)s->released_bytes, "first_bytes",
        (json_int_t)s->first_bytes, "first_ms", summary(s->first_ms, s->n), "all_ms",
        summary(s->all_ms, s->n), "client_ms", summary(s->client_ms, s->n), "gbps",
        summary(s->gbps, s->n), "memcpy_one_gbps", summary(b->copy_one, b->n_copies), "memcpy_gbps",
        summary(b->copy_all, b->n_copies), "ratio_to_memcpy", summary(s->ratio, s->n));
}

static void print_row(const bench *b, const char *model, size_t kind) {
    const series *s = &b->series[kind];
    char what[48], range[48];
    const neap_summary gbps = neap_summarise(s->gbps, s->n);
    snprintf(what, sizeof what, "%s%s%s", kinds[kind].what, kinds[kind].codec ? " " : "",
             kinds[kind].codec ? kinds[kind].codec : "");
    snprintf(range, sizeof range, "%.2f (%.2f to %.2f)", gbps.median, gbps.min, gbps.max);
    printf("%-20s %7ld  %-18s %10s %10.1f %10s %9.1f  %-24s %7.2f\n", model, b->context, what,
           neap_cli_size(s->first_bytes), neap_summarise(s->first_ms, s->n).median,
           neap_cli_size(s->raw_bytes), neap_summarise(s->all_ms, s->n).median, range,
           neap_summarise(s->ratio, s->n).median);
}

static void report(const bench *b, const char *model, json_t *rows) {
    for (size_t kind = 0; kind < N_KINDS; kind++) {
        json_array_append_new(rows, row_json(b, model, kind));
        if (!b->options.as_json) print_row(b, model, kind);
    }
    if (b->options.as_json) return;
    printf("memcpy: %.2f GB/s on one thread, %.2f GB/s on %u\n",
           neap_summarise(b->copy_one, b->n_copies).median,
           neap_summarise(b->copy_all, b->n_copies).median, neap_crew_size(b->crew));
    fflush(stdout);
}

static void free_model(bench *b) {
    for (size_t i = 0; i < N_SIDES; i++) {
        neap_server_stop(b->servers[i]);
        b->servers[i] = NULL;
    }
    neap_tokens_free(&b->prompt);
    memset(b->series, 0, sizeof b->series);
    b->n_copies = 0;
}

static void free_bench(bench *b) {
    free_model(b);
    neap_crew_free(b->crew);
    if (b->copy_from) neap_vm_unmap(b->copy_from, COPY_BYTES);
    if (b->copy_to) neap_vm_unmap(b->copy_to, COPY_BYTES);
    free(b);
}

static int run(bench *b) {
    json_t *rows = json_array();
    int status = make_copies(b);
    for (size_t i = 0; i < b->options.n_models && !status; i++) {
        const char *model = neap_model_label(b->options.models[i]);
        status = neap_model_resolve(b->options.models[i], b->model_path);
        if (!status) status = prepare(b);
        if (!status) status = measure_all(b, i);
        if (!status && i == 0 && !b->options.as_json)
            printf("%-20s %7s  %-18s %10s %10s %10s %9s  %-24s %7s\n", "MODEL", "CONTEXT", "WHAT",
                   "FIRST", "MS", "ALL", "MS", "GB/S (MIN TO MAX)", "MEMCPY");
        if (!status) report(b, model, rows);
        free_model(b);
    }
    if (!b->options.as_json || json_array_size(rows) == 0) {
        json_decref(rows);
        return neap_cli_finish(status);
    }
    const int printed =
        neap_cli_print_json(json_pack("{s:o, s:o}", "machine", neap_machine_json(), "rows", rows));
    return status ? status : printed;
}

/* ---- options ---- */

enum { OPT_CONTEXT = NEAP_OPT_BENCH };

static const neap_command command = {
    "bench evict",
    "usage: neap bench evict [OPTIONS]\n"
    "\n"
    "How fast memory is given back: weights, and the KV cache compressed in memory, written to\n"
    "storage, and clean. FIRST is the first 256 MiB, or all; GB/S counts uncompressed bytes, "
    "MEMCPY\n"
    "is their ratio to memcpy on as many threads. --model may be given several times; "
    "default:\n" DEFAULT_MODEL ", or the default model where that is not fetched.\n"
    "\n"
    "  --context N      tokens of the context (default 8192; 4096 with --quick)\n"};

static int default_model(bench *b) {
    const int status = neap_bench_default_models(&b->options);
    for (size_t i = 0; i < b->options.n_models && !status; i++)
        if (strcmp(b->options.models[i], DEFAULT_MODEL) == 0)
            b->options.models[0] = b->options.models[i];
    b->options.n_models = 1;
    return status;
}

static int take_option(void *ctx, int code, const char *value) {
    bench *b = ctx;
    return code == OPT_CONTEXT ? neap_option_number("--context", value, 256, 1000000, &b->context)
                               : neap_bench_option(code, value, &b->options);
}

int neap_bench_evict(int argc, char **argv) {
    static const struct option long_options[] = {NEAP_OPTIONS_BASIC,
                                                 NEAP_OPTIONS_BENCH,
                                                 {"context", required_argument, NULL, OPT_CONTEXT},
                                                 {0}};
    bench *b = calloc(1, sizeof *b);
    if (!b) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    int status;
    if (!neap_bench_parse(&command, long_options, argc, argv, take_option, b, &status)) {
        free(b);
        return status;
    }
    if (!status && optind < argc)
        status = neap_cli_error(NEAP_EXIT_USAGE, "see neap bench evict --help",
                                "%s: one argument too many", argv[optind]);
    if (!b->context) b->context = b->options.quick ? QUICK_CONTEXT : DEFAULT_CONTEXT;
    if (!status && b->options.n_models == 0) status = default_model(b);
    if (!status) status = run(b);
    free_bench(b);
    return status;
}
