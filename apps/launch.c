/* launch.c - run, serve, exec: an unmodified program with the backend in its environment. Nothing
 * of neap stays: the program takes this process over. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"

#define ARGS_MAX 32 /* of our own, before those of the user */

typedef struct command_line {
    const char *argv[ARGS_MAX];
    size_t n;
} command_line;

static void push(command_line *line, const char *word) {
    if (line->n < ARGS_MAX) line->argv[line->n++] = word;
}

/* Replaces this process; returns only on failure. extra ends with NULL. */
static int launch(const command_line *line, char **extra) {
    size_t n_extra = 0;
    while (extra && extra[n_extra])
        n_extra++;
    char **argv = calloc(line->n + n_extra + 1, sizeof *argv);
    if (!argv) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    memcpy(argv, line->argv, line->n * sizeof *argv);
    if (n_extra) memcpy(argv + line->n, extra, n_extra * sizeof *argv);
    fflush(stdout);
    execvp(argv[0], argv);
    const int err = -errno;
    const int status =
        neap_cli_error(NEAP_EXIT_FAILED, "is it installed, and does PATH name its folder?",
                       "%s: %s", argv[0], neap_strerror(err));
    free(argv);
    return status;
}

/* Cuts argv at the first "--": what follows goes to the program as it is. */
static char **cut_at_dashes(int *argc, char **argv) {
    for (int i = 1; i < *argc; i++) {
        if (strcmp(argv[i], "--") != 0) continue;
        *argc = i;
        argv[i] = NULL;
        return argv + i + 1;
    }
    return NULL;
}

/* The one MODEL argument, if there is one. */
static int model_argument(const neap_command *command, int argc, char **argv,
                          char path[NEAP_PATH_MAX]) {
    if (argc - optind > 1) {
        char remedy[96];
        snprintf(remedy, sizeof remedy, "options of the program come after --, see neap %s --help",
                 command->name);
        return neap_cli_error(NEAP_EXIT_USAGE, remedy, "%s: one argument too many",
                              argv[optind + 1]);
    }
    return neap_model_resolve(optind < argc ? argv[optind] : NULL, path);
}

static void push_threads(command_line *line, char text[16]) {
    if (!neap_option_threads()) return;
    snprintf(text, 16, "%d", neap_option_threads());
    push(line, "-t");
    push(line, text);
}

/* ---- run ---- */

static const neap_command run_command = {
    "run",
    "usage: neap run [OPTIONS] [MODEL] [-- options of llama-cli]\n"
    "\n"
    "Chats with a model in the terminal, with elastic memory: neap evict gives its memory back\n"
    "while it waits, the next message brings it back. MODEL is a name of neap models or the path "
    "of\n"
    "a GGUF file.\n"
    "\n"
    "  -p, --prompt TEXT  one answer, then exit (runs llama-completion)\n"
    "  -f, --file FILE    puts a text file into the context first\n"
    "  -h, --help         this text\n"
    "  --version          the version\n"
    "\n"};

static int run_help(const neap_command *command) {
    fputs(command->usage, stdout);
    fputs(neap_common_help, stdout);
    return neap_cli_finish(NEAP_EXIT_OK);
}

int neap_cmd_run(int argc, char **argv) {
    static const struct option options[] = {NEAP_OPTIONS_BASIC,
                                            NEAP_OPTIONS_COMMON,
                                            {"prompt", required_argument, NULL, 'p'},
                                            {"file", required_argument, NULL, 'f'},
                                            {0}};
    char **extra = cut_at_dashes(&argc, argv);
    const char *prompt = NULL, *file = NULL;
    int code, status;
    while ((code = getopt_long(argc, argv, ":hp:f:", options, NULL)) != -1) {
        if (code == 'h') return run_help(&run_command);
        if (neap_option_basic(&run_command, code, argv, &status)) return status;
        if (code == 'p')
            prompt = optarg;
        else if (code == 'f')
            file = optarg;
        else if ((status = neap_option_common(code, optarg)))
            return status;
    }
    char model[NEAP_PATH_MAX], program[NEAP_PATH_MAX], threads[16];
    if ((status = neap_option_environment())) return status;
    if ((status = model_argument(&run_command, argc, argv, model))) return status;
    if (prompt && *prompt == '\0')
        return neap_cli_error(NEAP_EXIT_USAGE, "leave -p out to chat", "-p: an empty prompt");
    if (file && access(file, R_OK) != 0)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", file, neap_strerror(-errno));
    if ((status = neap_path_load_backend())) return status;

    command_line line = {0};
    neap_path_program(prompt ? "llama-completion" : "llama-cli", program);
    push(&line, program);
    push(&line, "-m");
    push(&line, model);
    if (file) {
        push(&line, "-sysf");
        push(&line, file);
    }
    if (prompt) {
        static const char *const once[] = {"-cnv", "-st", "--no-display-prompt", "-lv", "1"};
        for (size_t i = 0; i < sizeof once / sizeof *once; i++)
            push(&line, once[i]);
        push(&line, "-p");
        push(&line, prompt);
    }
    push_threads(&line, threads);
    return launch(&line, extra);
}

/* ---- serve ---- */

static const neap_command serve_command = {
    "serve",
    "usage: neap serve [OPTIONS] [MODEL] [-- options of llama-server]\n"
    "\n"
    "Serves a model over HTTP (OpenAI-compatible): llama-server, unmodified, with elastic memory.\n"
    "MODEL is a name of neap models or the path of a GGUF file; port, context size and all else "
    "are\n"
    "options of llama-server, as in: neap serve -- --port 8080 -c 8192\n"
    "\n"
    "  -h, --help  this text\n"
    "  --version   the version\n"
    "\n"};

int neap_cmd_serve(int argc, char **argv) {
    static const struct option options[] = {NEAP_OPTIONS_BASIC, NEAP_OPTIONS_COMMON, {0}};
    char **extra = cut_at_dashes(&argc, argv);
    int code, status;
    while ((code = getopt_long(argc, argv, ":h", options, NULL)) != -1) {
        if (code == 'h') return run_help(&serve_command);
        if (neap_option_basic(&serve_command, code, argv, &status)) return status;
        if ((status = neap_option_common(code, optarg))) return status;
    }
    char model[NEAP_PATH_MAX], program[NEAP_PATH_MAX], threads[16];
    if ((status = neap_option_environment())) return status;
    if ((status = model_argument(&serve_command, argc, argv, model))) return status;
    if ((status = neap_path_load_backend())) return status;

    command_line line = {0};
    neap_path_program("llama-server", program);
    push(&line, program);
    push(&line, "-m");
    push(&line, model);
    push_threads(&line, threads);
    return launch(&line, extra);
}

/* ---- exec ---- */

static const neap_command exec_command = {
    "exec",
    "usage: neap exec [OPTIONS] -- PROGRAM [ARGS...]\n"
    "\n"
    "Runs any program that loads ggml backends, with elastic memory; its own options all work.\n"
    "Sets GGML_BACKEND_PATH, and LLAMA_ARG_DEVICE=NEAP, unless they are set already. A PROGRAM\n"
    "without a slash is looked up beside neap, then in PATH.\n"
    "\n"
    "  -h, --help  this text\n"
    "  --version   the version\n"
    "\n"};

static bool names_device(char **args) {
    for (; *args; args++) {
        if (strcmp(*args, "-dev") == 0 || strncmp(*args, "--device", 8) == 0) return true;
    }
    return false;
}

int neap_cmd_exec(int argc, char **argv) {
    static const struct option options[] = {NEAP_OPTIONS_BASIC, NEAP_OPTIONS_COMMON, {0}};
    int code, status;
    while ((code = getopt_long(argc, argv, "+:h", options, NULL)) != -1) {
        if (code == 'h') return run_help(&exec_command);
        if (neap_option_basic(&exec_command, code, argv, &status)) return status;
        if ((status = neap_option_common(code, optarg))) return status;
    }
    if (optind >= argc)
        return neap_cli_error(NEAP_EXIT_USAGE, "neap exec -- PROGRAM ARGS", "exec: which program?");
    if ((status = neap_option_environment())) return status;
    if ((status = neap_path_load_backend())) return status;
    if (names_device(argv + optind + 1)) unsetenv("LLAMA_ARG_DEVICE");

    char program[NEAP_PATH_MAX], threads[16];
    snprintf(threads, sizeof threads, "%d", neap_option_threads());
    if (neap_option_threads()) setenv("LLAMA_ARG_THREADS", threads, 1);
    command_line line = {0};
    if (strchr(argv[optind], '/'))
        snprintf(program, sizeof program, "%s", argv[optind]);
    else
        neap_path_program(argv[optind], program);
    push(&line, program);
    return launch(&line, argv + optind + 1);
}
