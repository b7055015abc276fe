/* bench_values.c - `neap bench values`: how much of its values each way of fitting LowRAM's
 * predictors explains on a context of a real model, and how long that takes.
 *
 * llama-server reads the text twice: once as it always does, for the time that takes, and once with
 * what each layer caches written down. Then, method by method, repetition by repetition, every
 * layer and KV head is fitted, to keys before RoPE as the model made them. Starts are those of
 * `neap train`; without them the methods that need one are left out. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "capture_file.h"
#include "clock.h"
#include "geometry.h"
#include "klt_file.h"
#include "learned.h"
#include "predictors.h"
#include "proc.h"
#include "server_client.h"
#include "textfile.h"

#define DEFAULT_REPS 1
#define QUICK_CONTEXT 1024
#define DEFAULT_CONTEXT 4096
#define DEFAULT_TEXT "/usr/share/common-licenses/GPL-3"
#define TEXT_BYTES_MAX ((size_t)64 << 20)

enum { NONE = -1 };
/* Adam's rate: the paper says 1e-3 (of meta-learning only); of 1e-3, 3e-3, 1e-2, 2e-2 the last
 * explained most, from a random start. */
static const struct {
    const char *name;
    int method, start;
    int learned; /* NEAP_LEARNED_*, or NONE */
    uint32_t steps;
    double rate;
    uint32_t sample;
    bool linear; /* without hidden units */
} methods[] = {
    {"slim", NEAP_VALUE_RIDGE, NEAP_VALUE_WLIN, NEAP_LEARNED_SLIM, 0, 0, 0, true},
    {"linear", NEAP_VALUE_RIDGE, NEAP_VALUE_RANDOM, NONE, 0, 0, 0, true},
    {"warm", NEAP_VALUE_ADAM, NEAP_VALUE_GIVEN, NEAP_LEARNED_WARM, 0, 0, 0, false},
    {"warm+adam-2", NEAP_VALUE_ADAM, NEAP_VALUE_GIVEN, NEAP_LEARNED_WARM, 2, 1e-3, 0, false},
    {"meta+adam-2", NEAP_VALUE_ADAM, NEAP_VALUE_GIVEN, NEAP_LEARNED_META, 2, 1e-3, 0, false},
    {"adam-150", NEAP_VALUE_ADAM, NEAP_VALUE_RANDOM, NONE, 150, 2e-2, 0, false},
    {"adam-300", NEAP_VALUE_ADAM, NEAP_VALUE_RANDOM, NONE, 300, 2e-2, 0, false},
    {"adam-300 slow", NEAP_VALUE_ADAM, NEAP_VALUE_RANDOM, NONE, 300, 1e-3, 0, false},
    {"slim+adam-300", NEAP_VALUE_ADAM, NEAP_VALUE_WLIN, NEAP_LEARNED_SLIM, 300, 2e-2, 0, false},
    {"warm+adam-300", NEAP_VALUE_ADAM, NEAP_VALUE_GIVEN, NEAP_LEARNED_WARM, 300, 1e-3, 0, false},
    {"ridge", NEAP_VALUE_RIDGE, NEAP_VALUE_RANDOM, NONE, 0, 0, 0, false},
    {"ridge+5", NEAP_VALUE_RIDGE, NEAP_VALUE_RANDOM, NONE, 5, 0, 0, false},
    {"ridge+7", NEAP_VALUE_RIDGE, NEAP_VALUE_RANDOM, NONE, 7, 0, 0, false},
    {"ridge+5 of 2048", NEAP_VALUE_RIDGE, NEAP_VALUE_RANDOM, NONE, 5, 0, 2048, false},
    {"ridge+5 of 1024", NEAP_VALUE_RIDGE, NEAP_VALUE_RANDOM, NONE, 5, 0, 1024, false},
    {"warm+ridge", NEAP_VALUE_RIDGE, NEAP_VALUE_GIVEN, NEAP_LEARNED_WARM, 0, 0, 0, false},
    {"warm+ridge+5", NEAP_VALUE_RIDGE, NEAP_VALUE_GIVEN, NEAP_LEARNED_WARM, 5, 0, 0, false},
    {"warm+ridge+5 of 2048", NEAP_VALUE_RIDGE, NEAP_VALUE_GIVEN, NEAP_LEARNED_WARM, 5, 0, 2048,
     false},
};
enum { N_METHODS = sizeof methods / sizeof *methods };
#define REFERENCE "adam-300" /* what times are compared with */

typedef struct result {
    bool done;
    double seconds[NEAP_BENCH_REPS_MAX]; /* of all heads */
    double explained, least;             /* mean over the heads; of the worst */
    size_t n;
} result;

typedef struct bench {
    neap_bench_options options;
    const char *text_path;
    long context, hidden_percent; /* of a head's K elements */
    char *text;
    neap_trainer *trainer;
    neap_learned *learned; /* NULL: none */
    double prefill_seconds;
    result results[N_METHODS];
} bench;

static int failed(const char *what, int err) {
    return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", what, neap_strerror(err));
}

/* ---- the context ---- */

/* The first tokens of the text through a server. */
static int read_once(bench *b, const char *model_path, double *ret_seconds) {
    const neap_server_options options = {.model_path = model_path,
                                         .n_ctx = (uint32_t)b->context + 256,
                                         .threads = neap_option_threads(),
                                         .codec = "none"};
    neap_server *server = NULL;
    neap_tokens tokens = {0};
    neap_answer answer = {0};
    int status = neap_server_start(&options, &server);
    if (!status) status = neap_server_tokenize(server, b->text, &tokens);
    if (!status && tokens.n < (size_t)b->context)
        status = neap_cli_error(NEAP_EXIT_FAILED, "--text, or a smaller --context",
                                "%s: only %zu tokens", b->text_path, tokens.n);
    if (!status) {
        const neap_tokens prompt = {.ids = tokens.ids, .n = (size_t)b->context};
        status = neap_server_complete(server, &prompt, 0, true, &answer);
        *ret_seconds = answer.total_ms / 1e3;
    }
    neap_answer_free(&answer);
    neap_tokens_free(&tokens);
    neap_server_stop(server);
    return status;
}

static int load_context(bench *b, const char *model) {
    char path[NEAP_PATH_MAX], folder[NEAP_PATH_MAX - 64], file[NEAP_PATH_MAX];
    neap_geometry geometry;
    uint8_t *records = NULL;
    size_t n_bytes = 0;
    double unused;
    int fd, status = neap_model_resolve(model, path);
    if (status) return status;
    int err = neap_geometry_read(path, &geometry);
    if (!err) err = neap_klt_folder(geometry.digest, folder, sizeof folder);
    if (!err) err = neap_make_dirs(folder, 0700);
    if (err) return failed(path, err);
    snprintf(file, sizeof file, "%s/%s", folder, NEAP_LEARNED_FILE);
    err = neap_learned_open(file, geometry.digest, &b->learned);
    if (err)
        neap_cli_warn("%s: %s: starts are left out (neap train makes them)", file,
                      neap_strerror(err));
    neap_progress_set(0, "reading the text");
    status = read_once(b, path, &b->prefill_seconds);
    if (status) return status;
    err = neap_capture_begin(folder, &fd);
    if (err) return failed(folder, err);
    status = read_once(b, path, &unused);
    if (!status) {
        err = neap_capture_take(fd, &records, &n_bytes);
        if (!err) err = neap_trainer_create(&b->trainer);
        if (!err) err = neap_trainer_add(b->trainer, records, n_bytes);
        if (!err && neap_context_tokens(b->trainer) == 0) err = -ENODATA;
        if (err) status = failed(path, err);
    }
    free(records);
    neap_capture_end(fd);
    return status;
}

static void free_context(bench *b) {
    neap_trainer_free(b->trainer);
    neap_learned_free(b->learned);
    b->trainer = NULL;
    b->learned = NULL;
    memset(b->results, 0, sizeof b->results);
}

/* ---- measuring ---- */

/* One head by one method; *ret_ns: of the fit. NEAP_E_UNKNOWN: there is no start for it. */
static int fit_head(const bench *b, size_t m, const neap_context_layer *layer, uint32_t head,
                    const float *keys, const float *values, uint64_t *ret_ns,
                    double *ret_explained) {
    const uint32_t hidden = (uint32_t)(b->hidden_percent * layer->dk / 100);
    const neap_value_shape shape =
        neap_value_shape_of(layer->dk, layer->dv, methods[m].linear ? 0 : hidden);
    const size_t n = neap_context_tokens(b->trainer);
    neap_value_options options = neap_value_defaults(methods[m].method);
    neap_value value = {0};
    neap_value_norm norm = {0};
    options.start = methods[m].start;
    options.steps = methods[m].steps;
    options.sample = methods[m].sample;
    options.seed = layer->layer * 1000 + head;
    options.fix_linear = methods[m].learned == NEAP_LEARNED_SLIM && methods[m].linear;
    if (methods[m].rate > 0) options.rate = methods[m].rate;
    int err = neap_value_create(&shape, &value);
    if (!err && methods[m].learned != NONE) {
        err = b->learned ? neap_learned_start(b->learned, layer->layer, head, methods[m].learned,
                                              &value, &norm)
                         : NEAP_E_UNKNOWN;
        if (methods[m].method == NEAP_VALUE_ADAM) options.norm = &norm;
    }
    const uint64_t began = neap_clock_ns();
    if (!err) err = neap_value_fit(keys, values, n, &options, &value);
    *ret_ns = neap_clock_ns() - began;
    if (!err) err = neap_value_explained(&value, keys, values, n, ret_explained);
    neap_value_free(&value);
    neap_value_norm_free(&norm);
    return err;
}

static int fit_heads(bench *b, size_t m) {
    const uint32_t n_layers = neap_trainer_tell(b->trainer).n_layers;
    const size_t n = neap_context_tokens(b->trainer);
    result *r = &b->results[m];
    uint64_t ns, sum_ns = 0, n_heads = 0;
    double explained, sum = 0, least = 1;
    int err = 0;
    for (uint32_t i = 0; i < n_layers && !err; i++) {
        const neap_context_layer layer = neap_context_layer_at(b->trainer, i);
        float *keys = malloc(n * layer.dk * sizeof *keys);
        float *values = malloc(n * layer.dv * sizeof *values);
        if (!keys || !values) err = -ENOMEM;
        for (uint32_t h = 0; h < layer.n_kv_heads && !err; h++, n_heads++) {
            neap_context_head(b->trainer, i, h, keys, values);
            err = fit_head(b, m, &layer, h, keys, values, &ns, &explained);
            if (err) break;
            sum_ns += ns;
            sum += explained;
            least = explained < least ? explained : least;
        }
        free(keys);
        free(values);
    }
    if (err == NEAP_E_UNKNOWN) return 0; /* left out */
    if (err) return failed(methods[m].name, err);
    r->done = true;
    r->seconds[r->n++] = (double)sum_ns / 1e9;
    r->explained = sum / (double)n_heads;
    r->least = least;
    return 0;
}

static int measure(bench *b) {
    const size_t reps = b->options.reps ? (size_t)b->options.reps : DEFAULT_REPS;
    int status = 0;
    for (size_t rep = 0; rep < reps && !status; rep++)
        for (size_t m = 0; m < N_METHODS && !status; m++) {
            neap_progress_set((double)(rep * N_METHODS + m) / (double)(reps * N_METHODS),
                              methods[m].name);
            status = fit_heads(b, m);
        }
    return status;
}

/* ---- report ---- */

static double reference_seconds(const bench *b) {
    for (size_t m = 0; m < N_METHODS; m++)
        if (strcmp(methods[m].name, REFERENCE) == 0)
            return neap_summarise(b->results[m].seconds, b->results[m].n).median;
    return 0;
}

static void report(const bench *b, const char *model, json_t *rows) {
    const double reference = reference_seconds(b);
    if (!b->options.as_json)
        printf("%s, %ld tokens, read in %.1f s\n%-20s %9s %7s %10s %12s %10s\n", model, b->context,
               b->prefill_seconds, "METHOD", "EXPLAINED", "LEAST", "SECONDS", "OF " REFERENCE,
               "OF READING");
    for (size_t m = 0; m < N_METHODS; m++) {
        const result *r = &b->results[m];
        if (!r->done) continue;
        const neap_summary seconds = neap_summarise(r->seconds, r->n);
        json_array_append_new(
            rows,
            json_pack("{s:s, s:s, s:i, s:f, s:f, s:f, s:o, s:f, s:f}", "model", model, "method",
                      methods[m].name, "context", (int)b->context, "explained", r->explained,
                      "explained_least", r->least, "seconds", seconds.median, "seconds_range",
                      neap_summary_json(&seconds), "of_reference", seconds.median / reference,
                      "of_prefill", seconds.median / b->prefill_seconds));
        if (!b->options.as_json)
            printf("%-20s %9.3f %7.2f %10.3f %12.4f %10.3f\n", methods[m].name, r->explained,
                   r->least, seconds.median, seconds.median / reference,
                   seconds.median / b->prefill_seconds);
    }
    if (!b->options.as_json) fflush(stdout);
}

static int run(bench *b) {
    json_t *rows = json_array();
    size_t len;
    const int err = neap_textfile_read(b->text_path, TEXT_BYTES_MAX, &b->text, &len);
    int status = err ? failed(b->text_path, err) : 0;
    for (size_t i = 0; i < b->options.n_models && !status; i++) {
        neap_progress_start("bench values");
        status = load_context(b, b->options.models[i]);
        if (!status) status = measure(b);
        neap_progress_stop();
        if (!status) report(b, neap_model_label(b->options.models[i]), rows);
        free_context(b);
    }
    if (!b->options.as_json || json_array_size(rows) == 0) {
        json_decref(rows);
        return neap_cli_finish(status);
    }
    const int printed = neap_cli_print_json(json_pack(
        "{s:o, s:s, s:o}", "machine", neap_machine_json(), "text", b->text_path, "rows", rows));
    return status ? status : printed;
}

/* ---- options ---- */

enum { OPT_CONTEXT = NEAP_OPT_BENCH, OPT_TEXT, OPT_HIDDEN };

static const neap_command command = {
    "bench values",
    "usage: neap bench values [OPTIONS]\n"
    "\n"
    "How much of a model's values LowRAM's predictors explain from its keys, by each way of "
    "fitting\n"
    "them to a context, and how long that takes: beside 300 steps of Adam, and beside reading the\n"
    "text. --model may be given several times; default: all that are fetched.\n"
    "\n"
    "  --context N      tokens of the context (default 4096; 1024 with --quick)\n"
    "  --hidden N       hidden units, percent of a key's elements (default 100; with others "
    "learned\n"
    "                   starts do not fit and are left out)\n"
    "  --text FILE      the text (default: " DEFAULT_TEXT ")\n"};

static int take_option(void *ctx, int code, const char *value) {
    bench *b = ctx;
    switch (code) {
    case OPT_CONTEXT:
        return neap_option_number("--context", value, 64, 1000000, &b->context);
    case OPT_HIDDEN:
        return neap_option_number("--hidden", value, 1, 1600, &b->hidden_percent);
    case OPT_TEXT:
        b->text_path = value;
        return 0;
    default:
        return neap_bench_option(code, value, &b->options);
    }
}

int neap_bench_values(int argc, char **argv) {
    static const struct option long_options[] = {NEAP_OPTIONS_BASIC,
                                                 NEAP_OPTIONS_BENCH,
                                                 {"context", required_argument, NULL, OPT_CONTEXT},
                                                 {"hidden", required_argument, NULL, OPT_HIDDEN},
                                                 {"text", required_argument, NULL, OPT_TEXT},
                                                 {0}};
    bench *b = calloc(1, sizeof *b);
    if (!b) return failed("bench values", -ENOMEM);
    int status;
    b->hidden_percent = 100;
    b->text_path = DEFAULT_TEXT;
    if (!neap_bench_parse(&command, long_options, argc, argv, take_option, b, &status)) {
        free(b);
        return status;
    }
    if (!status && optind < argc)
        status = neap_cli_error(NEAP_EXIT_USAGE, "see neap bench values --help",
                                "%s: one argument too many", argv[optind]);
    if (!status) status = neap_bench_default_models(&b->options);
    if (!b->context) b->context = b->options.quick ? QUICK_CONTEXT : DEFAULT_CONTEXT;
    if (!status) status = neap_path_load_backend();
    if (!status) status = run(b);
    free(b->text);
    free(b);
    return status;
}
