/* bench_values.c - `neap bench values`: how much of its values each way of fitting LowRAM's
 * predictors explains on a context of a real model, and how long that takes.
 *
 * llama-server reads the text twice: once as it always does, for the time that takes, and once with
 * what each layer caches written down. Then, method by method, repetition by repetition, every
 * layer and KV head is fitted, to keys before RoPE as the model made them. Starts are those of
 * `neap train`; without them the methods that need one are left out. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "capture_file.h"
#include "clock.h"
#include "geometry.h"
#include "klt_file.h"
#include "learned.h"
#include "plot.h"
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
typedef struct method {
    char name[24];
    int method, start;
    int learned; /* NEAP_LEARNED_*, or NONE */
    uint32_t steps;
    double rate;
    uint32_t sample;
    bool linear; /* without hidden units */
} method;

static const method standard[] = {
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
enum { N_STANDARD = sizeof standard / sizeof *standard };

/* What --steps goes through: methods "adam-150", "ridge+5" and so on. Projection soon gains no
 * more, and takes longer for a step. */
static const struct {
    method of;
    uint32_t most_steps;
} families[] = {
    {{"adam", NEAP_VALUE_ADAM, NEAP_VALUE_RANDOM, NONE, 0, 2e-2, 0, false}, UINT32_MAX},
    {{"slim+adam", NEAP_VALUE_ADAM, NEAP_VALUE_WLIN, NEAP_LEARNED_SLIM, 0, 2e-2, 0, false},
     UINT32_MAX},
    {{"warm+adam", NEAP_VALUE_ADAM, NEAP_VALUE_GIVEN, NEAP_LEARNED_WARM, 0, 1e-3, 0, false},
     UINT32_MAX},
    {{"meta+adam", NEAP_VALUE_ADAM, NEAP_VALUE_GIVEN, NEAP_LEARNED_META, 0, 1e-3, 0, false},
     UINT32_MAX},
    {{"ridge", NEAP_VALUE_RIDGE, NEAP_VALUE_RANDOM, NONE, 0, 0, 2048, false}, 20},
    {{"warm+ridge", NEAP_VALUE_RIDGE, NEAP_VALUE_GIVEN, NEAP_LEARNED_WARM, 0, 0, 2048, false}, 20},
};
enum { N_FAMILIES = sizeof families / sizeof *families, STEPS_MAX = 12 };
enum { METHODS_MAX = N_FAMILIES * STEPS_MAX };
_Static_assert((int)METHODS_MAX >= (int)N_STANDARD, "room for the methods");
static const long default_steps[] = {0, 2, 5, 10, 20, 50, 150, 300}, quick_steps[] = {0, 2, 10};
#define REFERENCE "adam-300" /* what times are compared with */

typedef struct result {
    bool done;
    double seconds[NEAP_BENCH_REPS_MAX]; /* of all heads */
    double explained, least;             /* mean over the heads; of the worst */
    size_t n;
} result;

enum { EXPLAINED, TTFT, N_PANELS };

/* Panels of a model; points of a family by steps. */
typedef struct figure {
    char titles[N_PANELS][96];
    neap_plot_point points[N_PANELS][N_FAMILIES][STEPS_MAX];
} figure;

typedef struct bench {
    neap_bench_options options;
    const char *text_path, *plot_path;
    long context, hidden_percent; /* of a head's K elements */
    long steps[STEPS_MAX];
    size_t n_steps; /* 0: the standard methods */
    method methods[METHODS_MAX];
    size_t n_methods;
    figure *figures; /* of each model */
    neap_plot_panel *panels;
    char *text;
    neap_trainer *trainer;
    neap_learned *learned; /* NULL: none */
    double prefill_seconds;
    result results[METHODS_MAX];
} bench;

static int failed(const char *what, int err) {
    return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", what, neap_strerror(err));
}

/* ---- methods ---- */

static void choose_methods(bench *b) {
    if (b->n_steps == 0) {
        memcpy(b->methods, standard, sizeof standard);
        b->n_methods = N_STANDARD;
        return;
    }
    for (size_t f = 0; f < N_FAMILIES; f++)
        for (size_t i = 0; i < b->n_steps; i++) {
            if (b->steps[i] > families[f].most_steps) continue;
            method *m = &b->methods[b->n_methods++];
            *m = families[f].of;
            m->steps = (uint32_t)b->steps[i];
            snprintf(m->name, sizeof m->name, "%.12s%c%u", families[f].of.name,
                     m->method == NEAP_VALUE_ADAM ? '-' : '+', m->steps);
        }
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
        neap_value_shape_of(layer->dk, layer->dv, b->methods[m].linear ? 0 : hidden);
    const size_t n = neap_context_tokens(b->trainer);
    neap_value_options options = neap_value_defaults(b->methods[m].method);
    neap_value value = {0};
    neap_value_norm norm = {0};
    options.start = b->methods[m].start;
    options.steps = b->methods[m].steps;
    options.sample = b->methods[m].sample;
    options.seed = layer->layer * 1000 + head;
    options.fix_linear = b->methods[m].learned == NEAP_LEARNED_SLIM && b->methods[m].linear;
    if (b->methods[m].rate > 0) options.rate = b->methods[m].rate;
    int err = neap_value_create(&shape, &value);
    if (!err && b->methods[m].learned != NONE) {
        err = b->learned ? neap_learned_start(b->learned, layer->layer, head, b->methods[m].learned,
                                              &value, &norm)
                         : NEAP_E_UNKNOWN;
        if (b->methods[m].method == NEAP_VALUE_ADAM) options.norm = &norm;
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
    if (err) return failed(b->methods[m].name, err);
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
        for (size_t m = 0; m < b->n_methods && !status; m++) {
            neap_progress_set((double)(rep * b->n_methods + m) / (double)(reps * b->n_methods),
                              b->methods[m].name);
            status = fit_heads(b, m);
        }
    return status;
}

/* ---- report ---- */

static double reference_seconds(const bench *b) {
    for (size_t m = 0; m < b->n_methods; m++)
        if (strcmp(b->methods[m].name, REFERENCE) == 0)
            return neap_summarise(b->results[m].seconds, b->results[m].n).median;
    return 0;
}

static void report(const bench *b, const char *model, json_t *rows) {
    const double reference = reference_seconds(b);
    if (!b->options.as_json)
        printf("%s, %ld tokens, read in %.1f s\n%-20s %9s %7s %10s %12s %10s\n", model, b->context,
               b->prefill_seconds, "METHOD", "EXPLAINED", "LEAST", "SECONDS", "OF " REFERENCE,
               "OF READING");
    for (size_t m = 0; m < b->n_methods; m++) {
        const result *r = &b->results[m];
        if (!r->done) continue;
        const neap_summary seconds = neap_summarise(r->seconds, r->n);
        const double of_reference = reference > 0 ? seconds.median / reference : 0;
        json_array_append_new(rows, json_pack("{s:s, s:s, s:i, s:i, s:f, s:f, s:f, s:o, s:o, s:f}",
                                              "model", model, "method", b->methods[m].name, "steps",
                                              (int)b->methods[m].steps, "context", (int)b->context,
                                              "explained", r->explained, "explained_least",
                                              r->least, "seconds", seconds.median, "seconds_range",
                                              neap_summary_json(&seconds), "of_reference",
                                              reference > 0 ? json_real(of_reference) : json_null(),
                                              "of_prefill", seconds.median / b->prefill_seconds));
        if (!b->options.as_json)
            printf("%-20s %9.3f %7.2f %10.3f %12.4f %10.3f\n", b->methods[m].name, r->explained,
                   r->least, seconds.median, of_reference, seconds.median / b->prefill_seconds);
    }
    if (!b->options.as_json) fflush(stdout);
}

/* ---- figure ---- */

/* What is explained, and reading and fitting over reading alone, against the steps. The axis begins
 * at 0: what explains less than the mean does is left out. */
static void draw(bench *b, size_t number, const char *model) {
    figure *f = &b->figures[number];
    neap_plot_panel *panels = b->panels + number * N_PANELS;
    snprintf(f->titles[EXPLAINED], sizeof *f->titles, "%.40s: variance explained", model);
    snprintf(f->titles[TTFT], sizeof *f->titles, "%.40s: time to first token over reading alone",
             model);
    for (size_t p = 0; p < N_PANELS; p++)
        panels[p] = (neap_plot_panel){.title = f->titles[p], .n_series = N_FAMILIES};
    for (size_t family = 0, m = 0; family < N_FAMILIES; family++) {
        size_t n = 0;
        for (; m < b->n_methods && b->methods[m].method == families[family].of.method &&
               b->methods[m].learned == families[family].of.learned;
             m++) {
            const result *r = &b->results[m];
            if (!r->done) continue;
            const neap_summary s = neap_summarise(r->seconds, r->n);
            const double x = b->methods[m].steps, whole = b->prefill_seconds,
                         y = r->explained < 0 ? NAN : r->explained;
            f->points[EXPLAINED][family][n] = (neap_plot_point){x, y, y, y};
            f->points[TTFT][family][n++] =
                (neap_plot_point){x, 1 + s.median / whole, 1 + s.min / whole, 1 + s.max / whole};
        }
        for (size_t p = 0; p < N_PANELS; p++)
            panels[p].series[family] =
                (neap_plot_series){families[family].of.name, f->points[p][family], n};
    }
}

static int plot(const bench *b) {
    char title[96];
    snprintf(title, sizeof title, "Fitting the values to %ld tokens", b->context);
    const neap_plot drawing = {.title = title,
                               .x_label = "steps",
                               .y_label = "",
                               .panels = b->panels,
                               .n_panels = N_PANELS * b->options.n_models};
    const int err = neap_plot_write(b->plot_path, &drawing);
    return err ? failed(b->plot_path, err) : 0;
}

static int run(bench *b) {
    json_t *rows = json_array();
    size_t len;
    int err = neap_textfile_read(b->text_path, TEXT_BYTES_MAX, &b->text, &len);
    int status = err ? failed(b->text_path, err) : 0;
    b->figures = calloc(b->options.n_models, sizeof *b->figures);
    b->panels = calloc(b->options.n_models, N_PANELS * sizeof *b->panels);
    if (!status && (!b->figures || !b->panels)) status = failed("bench values", -ENOMEM);
    choose_methods(b);
    for (size_t i = 0; i < b->options.n_models && !status; i++) {
        neap_progress_start("bench values");
        status = load_context(b, b->options.models[i]);
        if (!status) status = measure(b);
        neap_progress_stop();
        if (!status) report(b, neap_model_label(b->options.models[i]), rows);
        if (!status && b->plot_path) draw(b, i, neap_model_label(b->options.models[i]));
        free_context(b);
    }
    if (!status && b->plot_path) status = plot(b);
    if (!b->options.as_json || json_array_size(rows) == 0) {
        json_decref(rows);
        return neap_cli_finish(status);
    }
    const int printed = neap_cli_print_json(json_pack(
        "{s:o, s:s, s:o}", "machine", neap_machine_json(), "text", b->text_path, "rows", rows));
    return status ? status : printed;
}

/* ---- options ---- */

enum { OPT_CONTEXT = NEAP_OPT_BENCH, OPT_TEXT, OPT_HIDDEN, OPT_STEPS, OPT_PLOT };

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
    "  --steps LIST     instead of the methods: each that takes steps, with so many, as in "
    "0,2,150\n"
    "  --plot FILE      draws what is explained, and the time to the first token, against the "
    "steps\n"
    "                   into an SVG file (--steps: 0,2,5,10,20,50,150,300)\n"
    "  --text FILE      the text (default: " DEFAULT_TEXT ")\n"};

static int take_steps(bench *b, const char *list) {
    int status = 0;
    b->n_steps = 0;
    for (const char *at = list;;) {
        char item[16];
        const size_t len = strcspn(at, ",");
        if (b->n_steps == STEPS_MAX)
            return neap_cli_error(NEAP_EXIT_USAGE, NULL, "--steps %s: more than %d", list,
                                  STEPS_MAX);
        snprintf(item, sizeof item, "%.*s", (int)len, at);
        status = neap_option_number("--steps", item, 0, 10000, &b->steps[b->n_steps++]);
        if (!status && b->n_steps > 1 && b->steps[b->n_steps - 1] <= b->steps[b->n_steps - 2])
            status = neap_cli_error(NEAP_EXIT_USAGE, NULL, "--steps %s: not ascending", list);
        if (status || !at[len]) return status;
        at += len + 1;
    }
}

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
    case OPT_STEPS:
        return take_steps(b, value);
    case OPT_PLOT:
        b->plot_path = value;
        return 0;
    default:
        return neap_bench_option(code, value, &b->options);
    }
}

static void default_the_steps(bench *b) {
    const bool quick = b->options.quick;
    b->n_steps = quick ? sizeof quick_steps / sizeof *quick_steps
                       : sizeof default_steps / sizeof *default_steps;
    memcpy(b->steps, quick ? quick_steps : default_steps, b->n_steps * sizeof *b->steps);
}

/* Before minutes of measuring rather than after them. */
static int check_plot_path(const char *path) {
    FILE *file = fopen(path, "ae");
    if (!file)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "--plot %s: %s", path, neap_strerror(-errno));
    fclose(file);
    return 0;
}

int neap_bench_values(int argc, char **argv) {
    static const struct option long_options[] = {NEAP_OPTIONS_BASIC,
                                                 NEAP_OPTIONS_BENCH,
                                                 {"context", required_argument, NULL, OPT_CONTEXT},
                                                 {"hidden", required_argument, NULL, OPT_HIDDEN},
                                                 {"text", required_argument, NULL, OPT_TEXT},
                                                 {"steps", required_argument, NULL, OPT_STEPS},
                                                 {"plot", required_argument, NULL, OPT_PLOT},
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
    if (b->plot_path && b->n_steps == 0) default_the_steps(b);
    if (!status && b->plot_path) status = check_plot_path(b->plot_path);
    if (!status) status = neap_path_load_backend();
    if (!status) status = run(b);
    free(b->text);
    free(b->figures);
    free(b->panels);
    free(b);
    return status;
}
