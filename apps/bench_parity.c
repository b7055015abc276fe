/* bench_parity.c - `neap bench parity`: the same llama-bench with the backend and without it.
 * A pair is one run of each, one right after the other; which goes first alternates. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"

#define DEFAULT_REPS 5
enum { TEST_PP, TEST_TG, N_TESTS };
static const char *const test_names[N_TESTS] = {"pp512", "tg128"};

typedef struct pairs {
    double neap[NEAP_BENCH_REPS_MAX], stock[NEAP_BENCH_REPS_MAX], ratio[NEAP_BENCH_REPS_MAX];
    size_t n;
} pairs;

/* In the child: becomes llama-bench with its output in fd. */
static void become_bench(const char *model, bool with_neap, const char *n_prompt, const char *n_gen,
                         int fd, int log_fd, pid_t parent) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(1);
    dup2(fd, STDOUT_FILENO);
    if (log_fd >= 0) dup2(log_fd, STDERR_FILENO);
    if (!with_neap) {
        unsetenv("GGML_BACKEND_PATH");
        unsetenv("LLAMA_ARG_DEVICE");
    }
    char program[NEAP_PATH_MAX], threads[16];
    neap_path_program("llama-bench", program);
    snprintf(threads, sizeof threads, "%d", neap_option_threads());
    const char *argv[32] = {program, "-m", model, "-p", n_prompt, "-n",
                            n_gen,   "-r", "1",   "-o", "json"};
    size_t n = 11;
    if (with_neap) {
        argv[n++] = "-dev";
        argv[n++] = "NEAP";
    }
    argv[n++] = "-ngl";
    argv[n++] = with_neap ? "99" : "0";
    if (neap_option_threads()) {
        argv[n++] = "-t";
        argv[n++] = threads;
    }
    execvp(program, (char **)argv);
    dprintf(STDERR_FILENO, "%s: %s\n", program, strerror(errno));
    _exit(127);
}

json_t *neap_llama_bench(const char *model, bool with_neap, const char *n_prompt,
                         const char *n_gen) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
        neap_cli_error(NEAP_EXIT_FAILED, NULL, "pipe: %s", neap_strerror(-errno));
        return NULL;
    }
    const pid_t parent = getpid();
    const int log_fd = memfd_create("llama-bench", MFD_CLOEXEC);
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) become_bench(model, with_neap, n_prompt, n_gen, ends[1], log_fd, parent);
    const int err = -errno;
    close(ends[1]);
    json_t *reply = NULL;
    FILE *out = pid > 0 ? fdopen(ends[0], "r") : NULL;
    if (out) reply = json_loadf(out, 0, NULL);
    if (out)
        fclose(out);
    else
        close(ends[0]);
    int wait_status = 0;
    if (pid > 0) waitpid(pid, &wait_status, 0);
    const bool good =
        json_is_array(reply) && WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == 0;
    if (!good) {
        json_decref(reply);
        reply = NULL;
        neap_cli_error(NEAP_EXIT_FAILED, NULL, "llama-bench %s neap: %s",
                       with_neap ? "with" : "without", pid < 0 ? neap_strerror(err) : "failed");
        neap_cli_print_tail("llama-bench", log_fd);
    }
    if (log_fd >= 0) close(log_fd);
    return reply;
}

/* Tokens per second of both tests; checks that it ran on what it should have. */
static int tokens_per_second(const char *model, bool with_neap, double ret_tps[N_TESTS]) {
    json_t *reply = neap_llama_bench(model, with_neap, "512", "128");
    if (!reply) return NEAP_EXIT_FAILED;
    int status = 0;
    ret_tps[TEST_PP] = ret_tps[TEST_TG] = 0;
    size_t i;
    json_t *row;
    json_array_foreach(reply, i, row) {
        const json_int_t n_gen = json_integer_value(json_object_get(row, "n_gen"));
        const char *backends = json_string_value(json_object_get(row, "backends"));
        const bool is_neap = backends && strstr(backends, "NEAP");
        if (is_neap != with_neap)
            status = neap_cli_error(NEAP_EXIT_FAILED, "is the backend built for these programs?",
                                    "llama-bench ran on %s", backends ? backends : "?");
        ret_tps[n_gen ? TEST_TG : TEST_PP] = json_number_value(json_object_get(row, "avg_ts"));
    }
    json_decref(reply);
    if (!status && (ret_tps[TEST_PP] <= 0 || ret_tps[TEST_TG] <= 0))
        status = neap_cli_error(NEAP_EXIT_FAILED, NULL, "llama-bench: no result in its output");
    return status;
}

static int measure(const char *model, const char *path, size_t reps, double done, double share,
                   pairs results[N_TESTS]) {
    for (size_t rep = 0; rep < reps; rep++) {
        double tps[2][N_TESTS];
        for (size_t half = 0; half < 2; half++) {
            const bool with_neap = (rep + half) % 2 == 0;
            neap_progress_set(done + share * (double)(2 * rep + half) / (double)(2 * reps), model);
            const int status = tokens_per_second(path, with_neap, tps[with_neap]);
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
            add_row(model, test_names[test], &results[test], options->as_json, rows);
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

int neap_bench_parity(int argc, char **argv) {
    static const struct option long_options[] = {NEAP_OPTIONS_BASIC, NEAP_OPTIONS_BENCH, {0}};
    neap_bench_options options = {0};
    int code, status;
    while ((code = getopt_long(argc, argv, ":h", long_options, NULL)) != -1) {
        const bool done = neap_option_basic(&command, code, argv, &status);
        if (done && code == 'h') fputs(neap_bench_help, stdout);
        if (done) return neap_cli_finish(status);
        if ((status = neap_bench_option(code, optarg, &options))) return status;
    }
    if (optind < argc)
        return neap_cli_error(NEAP_EXIT_USAGE, "see neap bench parity --help",
                              "%s: one argument too many", argv[optind]);
    if ((status = neap_bench_default_models(&options))) return status;
    if ((status = neap_path_load_backend())) return status;
    return run_all(&options);
}
