/* bench_parity.c - `neap bench parity`: the same llama-bench with the backend and without it.
 * A pair is one run of each, one right after the other; which goes first alternates. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "model_speed.h"

#define DEFAULT_REPS 5
enum { N_TESTS = 2 };
static const neap_speed_test tests[N_TESTS] = {{"pp512", 512, 0}, {"tg128", 0, 128}};
static const char *const bench_args[] = {"-p", "512", "-n", "128", NULL};

typedef struct pairs {
    double neap[NEAP_BENCH_REPS_MAX], stock[NEAP_BENCH_REPS_MAX], ratio[NEAP_BENCH_REPS_MAX];
    size_t n;
} pairs;

static int measure(const char *model, const char *path, size_t reps, double done, double share,
                   pairs results[N_TESTS]) {
    for (size_t rep = 0; rep < reps; rep++) {
        double tps[2][N_TESTS];
        for (size_t half = 0; half < 2; half++) {
            const bool with_neap = (rep + half) % 2 == 0;
            neap_progress_set(done + share * (double)(2 * rep + half) / (double)(2 * reps), model);
            const int status = neap_model_speed(
                &(neap_speed_run){.path = path, .with_neap = with_neap, .args = bench_args}, tests,
                N_TESTS, tps[with_neap]);
            if (status) return status;
        }
        for (size_t test = 0; test < N_TESTS; test++) {
            pairs *p = &results[test];
            p->neap[p->n] = tps[1][test];
            p->stock[p->n] = tps[0][test];
            p->ratio[p->n++] = tps[1][test] / tps[0][test];
        }
    }
    return 0;
}

static void add_row(const char *model, const char *test, const pairs *p, bool as_json,
                    json_t *rows) {
    const neap_summary neap = neap_summarise(p->neap, p->n);
    const neap_summary stock = neap_summarise(p->stock, p->n);
    const neap_summary ratio = neap_summarise(p->ratio, p->n);
    if (!as_json) {
        printf("%-24s %-6s %10.1f %10.1f %7.3f  (%.3f to %.3f, %zu pairs)\n", model, test,
               neap.median, stock.median, ratio.median, ratio.min, ratio.max, p->n);
        fflush(stdout);
        return;
    }
    json_array_append_new(rows, json_pack("{s:s, s:s, s:f, s:f, s:f, s:f, s:f, s:i}", "model",
                                          model, "test", test, "neap_tps", neap.median, "stock_tps",
                                          stock.median, "ratio", ratio.median, "ratio_min",
                                          ratio.min, "ratio_max", ratio.max, "reps", (int)p->n));
}

static int run_all(const neap_bench_options *options) {
    json_t *rows = json_array();
    int status = 0;
    const size_t reps = options->reps ? (size_t)options->reps : DEFAULT_REPS;
    if (!options->as_json)
        printf("%-24s %-6s %10s %10s %7s\n", "MODEL", "TEST", "NEAP t/s", "STOCK t/s", "RATIO");
    for (size_t i = 0; i < options->n_models && !status; i++) {
        char path[NEAP_PATH_MAX];
        const char *model = neap_model_label(options->models[i]);
        pairs *results = calloc(N_TESTS, sizeof *results);
        if (!results) status = neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
        if (!status) status = neap_model_resolve(options->models[i], path);
        neap_progress_start("bench parity");
        if (!status)
            status = measure(model, path, reps, (double)i / (double)options->n_models,
                             1.0 / (double)options->n_models, results);
        neap_progress_stop();
        for (size_t test = 0; results && test < N_TESTS && !status; test++)
            add_row(model, tests[test].name, &results[test], options->as_json, rows);
        free(results);
    }
    if (!status && options->as_json)
        return neap_cli_print_json(
            json_pack("{s:o, s:o}", "machine", neap_machine_json(), "rows", rows));
    json_decref(rows);
    return neap_cli_finish(status);
}

static const neap_command command = {
    "bench parity",
    "usage: neap bench parity [OPTIONS]\n"
    "\n"
    "Compares the speed of llama-bench (prompt of 512 tokens, generation of 128) with neap, "
    "nothing\n"
    "evicted, and without. --model may be given several times; default: all that are fetched.\n"
    "\n"};

static int take_option(void *ctx, int code, const char *value) {
    return neap_bench_option(code, value, ctx);
}

int neap_bench_parity(int argc, char **argv) {
    static const struct option long_options[] = {NEAP_OPTIONS_BASIC, NEAP_OPTIONS_BENCH, {0}};
    neap_bench_options options = {0};
    int status;
    if (!neap_bench_parse(&command, long_options, argc, argv, take_option, &options, &status))
        return status;
    if (optind < argc)
        return neap_cli_error(NEAP_EXIT_USAGE, "see neap bench parity --help",
                              "%s: one argument too many", argv[optind]);
    if ((status = neap_bench_default_models(&options))) return status;
    if ((status = neap_path_load_backend())) return status;
    return run_all(&options);
}
