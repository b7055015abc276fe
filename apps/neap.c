/* neap.c - the command line: picks the command. */
#include <locale.h>
#include <signal.h>
#include <string.h>

#include "cli.h"

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help; /* NULL: not listed */
} commands[] = {
    {"run", neap_cmd_run, "chat with a model in the terminal; -p for one answer"},
    {"serve", neap_cmd_serve, "serve a model over HTTP: llama-server with elastic memory"},
    {"exec", neap_cmd_exec, "run any program that loads ggml backends"},
    {"models", neap_cmd_models, "list the models known by name, or fetch one"},
    {"ps", neap_cmd_ps, "list running instances"},
    {"evict", neap_cmd_evict, "give memory of a running instance back"},
    {"restore", neap_cmd_restore, "bring everything back now"},
    {"stat", neap_cmd_stat, "show what an instance holds and what it did"},
    {"profile", neap_cmd_profile, "measure what this device can do, and keep it"},
    {"train", neap_cmd_train, "learn what the codec klt needs for a model"},
    {"watch", neap_cmd_watch, "give memory of every instance back when memory gets short"},
    {"bench", neap_cmd_bench, "measure on this machine (see neap bench --help)"},
    {"demo", neap_cmd_demo, NULL},
};

/* Commands of a later version: a clear answer instead of "unknown". */
static const char *const later[] = {"top"};

static int usage(void) {
    puts("usage: neap COMMAND [OPTIONS] [ARGS]\n"
         "\n"
         "Elastic memory for local language models: weights and KV cache give their memory back\n"
         "when it is asked for, and come back when the next request needs them.\n");
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (commands[i].help) printf("  %-8s %s\n", commands[i].name, commands[i].help);
    puts("\n"
         "  -h, --help  this text; neap COMMAND --help for a command\n"
         "  --version   the version\n"
         "\n"
         "exit status: 0 done, 1 failed, 2 usage");
    return neap_cli_finish(NEAP_EXIT_OK);
}

int main(int argc, char **argv) {
    setlocale(LC_CTYPE, "");
    opterr = 0;
    if (argc < 2) return neap_cli_error(NEAP_EXIT_USAGE, "see neap --help", "which command?");
    const char *name = argv[1];
    if (strcmp(name, "-h") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "help") == 0)
        return usage();
    if (strcmp(name, "--version") == 0) {
        printf("neap %s\n", NEAP_VERSION);
        return neap_cli_finish(NEAP_EXIT_OK);
    }
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (strcmp(commands[i].name, name) == 0) return commands[i].run(argc - 1, argv + 1);
    for (size_t i = 0; i < sizeof later / sizeof *later; i++)
        if (strcmp(later[i], name) == 0)
            return neap_cli_error(NEAP_EXIT_USAGE, "see neap --help", "%s: not in this version",
                                  name);
    return neap_cli_error(NEAP_EXIT_USAGE, "see neap --help", "%s: unknown command", name);
}
