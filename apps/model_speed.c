/* model_speed.c - one run of llama-bench, with the backend or without it. */
#include "model_speed.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli.h"

enum { ARGS_MAX = 48 };

/* In the child: becomes llama-bench with its output in fd. */
static void become_bench(const neap_speed_run *run, int fd, int log_fd, pid_t parent) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(1);
    dup2(fd, STDOUT_FILENO);
    if (log_fd >= 0) dup2(log_fd, STDERR_FILENO);
    if (!run->with_neap) neap_path_leave_backend();
    char program[NEAP_PATH_MAX], threads[16];
    neap_path_program("llama-bench", program);
    snprintf(threads, sizeof threads, "%d", neap_option_threads());
    const char *argv[ARGS_MAX] = {program, "-m", run->path, "-r", "1", "-o", "json"};
    size_t n = 7;
    for (size_t i = 0; run->args[i] && n < ARGS_MAX - 8; i++)
        argv[n++] = run->args[i];
    if (run->with_neap) {
        argv[n++] = "-dev";
        argv[n++] = "NEAP";
    }
    argv[n++] = "-ngl";
    argv[n++] = run->with_neap ? "99" : "0";
    if (neap_option_threads()) {
        argv[n++] = "-t";
        argv[n++] = threads;
    }
    execvp(program, (char **)argv);
    dprintf(STDERR_FILENO, "%s: %s\n", program, strerror(errno));
    _exit(127);
}

/* The JSON that llama-bench printed, or NULL with the error printed. */
static json_t *run_bench(const neap_speed_run *run) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
        neap_cli_error(NEAP_EXIT_FAILED, NULL, "pipe: %s", neap_strerror(-errno));
        return NULL;
    }
    const pid_t parent = getpid();
    const int log_fd = memfd_create("llama-bench", MFD_CLOEXEC);
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) become_bench(run, ends[1], log_fd, parent);
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
                       run->with_neap ? "with" : "without",
                       pid < 0 ? neap_strerror(err) : "failed");
        neap_cli_print_tail("llama-bench", log_fd);
    }
    if (log_fd >= 0) close(log_fd);
    return reply;
}

int neap_model_speed(neap_speed_run *run, const neap_speed_test *tests, size_t n_tests,
                     double *ret_tps) {
    json_t *reply = run_bench(run);
    if (!reply) return NEAP_EXIT_FAILED;
    int status = 0;
    size_t i;
    json_t *row;
    for (size_t t = 0; t < n_tests; t++)
        ret_tps[t] = 0;
    json_array_foreach(reply, i, row) {
        const json_int_t n_prompt = json_integer_value(json_object_get(row, "n_prompt"));
        const json_int_t n_gen = json_integer_value(json_object_get(row, "n_gen"));
        const char *backends = json_string_value(json_object_get(row, "backends"));
        const bool is_neap = backends && strstr(backends, "NEAP");
        if (is_neap != run->with_neap)
            status = neap_cli_error(NEAP_EXIT_FAILED, "is the backend built for these programs?",
                                    "llama-bench ran on %s", backends ? backends : "?");
        run->n_threads = (uint32_t)json_integer_value(json_object_get(row, "n_threads"));
        for (size_t t = 0; t < n_tests; t++)
            if (tests[t].n_prompt == n_prompt && tests[t].n_gen == n_gen)
                ret_tps[t] = json_number_value(json_object_get(row, "avg_ts"));
    }
    json_decref(reply);
    for (size_t t = 0; t < n_tests && !status; t++)
        if (ret_tps[t] <= 0)
            status = neap_cli_error(NEAP_EXIT_FAILED, NULL, "llama-bench: no result in its output");
    return status;
}
