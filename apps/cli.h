/* cli.h - what the commands of `neap` share: errors, options, models, instances, paths.
 * Exit      a command returns 0 (done), 1 (failed) or 2 (usage).
 * Threads   one, but for the progress bar's own. */
#ifndef NEAP_APPS_CLI_H
#define NEAP_APPS_CLI_H

#include <getopt.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jansson.h>

#include "neap.h"

enum { NEAP_EXIT_OK = 0, NEAP_EXIT_FAILED = 1, NEAP_EXIT_USAGE = 2 };

#define NEAP_PATH_MAX 4096

/* ---- neap.c ---- */

/* One entry a command; argv[0] is the command's name. */
int neap_cmd_run(int argc, char **argv);
int neap_cmd_serve(int argc, char **argv);
int neap_cmd_exec(int argc, char **argv);
int neap_cmd_models(int argc, char **argv);
int neap_cmd_ps(int argc, char **argv);
int neap_cmd_evict(int argc, char **argv);
int neap_cmd_restore(int argc, char **argv);
int neap_cmd_stat(int argc, char **argv);
int neap_cmd_profile(int argc, char **argv);
int neap_cmd_train(int argc, char **argv);
int neap_cmd_watch(int argc, char **argv);
int neap_cmd_demo(int argc, char **argv);
int neap_cmd_bench(int argc, char **argv);
int neap_bench_parity(int argc, char **argv);
int neap_bench_ttft(int argc, char **argv);
int neap_bench_evict(int argc, char **argv);
int neap_bench_attn(int argc, char **argv);
int neap_bench_decode(int argc, char **argv);
int neap_bench_codec(int argc, char **argv);
int neap_bench_values(int argc, char **argv);
int neap_bench_fidelity(int argc, char **argv);
int neap_bench_multitask(int argc, char **argv);

/* ---- report.c: errors, tables, numbers ---- */

/* Prints "neap: WHAT: WHY (REMEDY)" on stderr and returns status; remedy may be NULL. */
int neap_cli_error(int status, const char *remedy, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void neap_cli_warn(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* After an error of a program that neap started: the end of what it printed into log_fd. */
void neap_cli_print_tail(const char *program, int log_fd);
/* Prints one JSON document and frees it; a write that fails is an error like any other. */
int neap_cli_print_json(json_t *document);
/* Flushes stdout; status, or NEAP_EXIT_FAILED with a message when the output could not be written.
 */
int neap_cli_finish(int status);
/* Two of the sizes formatted in one call of printf need two buffers: four take turns. */
const char *neap_cli_size(uint64_t bytes);

typedef struct neap_summary {
    double min, median, max;
    size_t n;
} neap_summary;
neap_summary neap_summarise(const double *values, size_t n); /* n 0: all zero */
json_t *neap_summary_json(const neap_summary *summary);
/* What this ran on: processor, cores, memory, kernel. */
json_t *neap_machine_json(void);

/* ---- text.c ---- */

/* English-like text of about n_words words, the same on every machine; malloc'd, NULL: no memory.
 */
char *neap_text_generate(size_t n_words);

/* ---- progress.c: a bar on stderr, only on a terminal and only after a second ---- */

void neap_progress_start(const char *what);
/* 0..1; until first called the bar only shows that something runs. text may be NULL. */
void neap_progress_set(double fraction, const char *text);
void neap_progress_stop(void);

/* ---- options.c ---- */

/* Codes of long options without a letter start here. */
enum {
    NEAP_OPT_VERSION = 256,
    NEAP_OPT_CODEC,
    NEAP_OPT_SWAP_DIR,
    NEAP_OPT_SWAP_LIMIT,
    NEAP_OPT_KEEP,
    NEAP_OPT_POLICY,
    NEAP_OPT_ENCRYPT,
    NEAP_OPT_SESSION,
    NEAP_OPT_ATTN,
    NEAP_OPT_KV,
    NEAP_OPT_KV_SELECT,
    NEAP_OPT_THREADS,
    NEAP_OPT_PRESSURE,
    NEAP_OPT_BEHIND,
    NEAP_OPT_OWN /* first code of a command's own */
};

#define NEAP_OPTIONS_BASIC                             \
    {"help", no_argument, NULL, 'h'}, {                \
        "version", no_argument, NULL, NEAP_OPT_VERSION \
    }
#define NEAP_OPTIONS_COMMON                                           \
    {"codec", required_argument, NULL, NEAP_OPT_CODEC},               \
        {"swap-dir", required_argument, NULL, NEAP_OPT_SWAP_DIR},     \
        {"swap-limit", required_argument, NULL, NEAP_OPT_SWAP_LIMIT}, \
        {"keep", required_argument, NULL, NEAP_OPT_KEEP},             \
        {"policy", required_argument, NULL, NEAP_OPT_POLICY},         \
        {"encrypt", required_argument, NULL, NEAP_OPT_ENCRYPT},       \
        {"session", required_argument, NULL, NEAP_OPT_SESSION},       \
        {"attn", required_argument, NULL, NEAP_OPT_ATTN},             \
        {"kv", required_argument, NULL, NEAP_OPT_KV},                 \
        {"kv-select", required_argument, NULL, NEAP_OPT_KV_SELECT},   \
        {"write-behind", required_argument, NULL, NEAP_OPT_BEHIND},   \
        {"pressure", required_argument, NULL, NEAP_OPT_PRESSURE}, {   \
        "threads", required_argument, NULL, NEAP_OPT_THREADS          \
    }
extern const char neap_common_help[]; /* lines of the common options for a help text */

typedef struct neap_command {
    const char *name;  /* "evict", "bench ttft" */
    const char *usage; /* whole help text */
} neap_command;

/* Handles what getopt_long returned and no command needs to know of: help, version, an unknown
 * option, a missing argument. Returns the exit status to end with in *ret_status and true, or false
 * when the code is the command's own. */
bool neap_option_basic(const neap_command *command, int code, char **argv, int *ret_status);
/* Takes one of the common options into the environment that the backend reads. 0, or a usage error
 * that has been printed. */
int neap_option_common(int code, const char *value);
/* Says that the value of the option is none; the status. */
int neap_option_ratio_error(const char *option, const char *value);
int neap_option_codec(const char *value); /* 0 or the status of the error printed */
int neap_option_policy(const char *value);
int neap_option_attn(const char *value);
/* Takes the same options from the user's environment (NEAP_CODEC, ...), after those of the command
 * line, which go before. 0, or a usage error that has been printed. */
int neap_option_environment(void);
/* Number of threads asked for by --threads; 0: not asked. */
int neap_option_threads(void);
uint32_t neap_option_n_threads(void); /* the same; one a core where it was not asked */
/* Parses a whole number in [min, max]; prints the error otherwise. */
int neap_option_number(const char *name, const char *value, long min, long max, long *ret_number);

/* ---- models.c ---- */

typedef struct neap_model {
    const char *name, *file, *sha256, *licence, *packages;
} neap_model;
extern const neap_model neap_models[]; /* ends with a NULL name; the first is the default */

/* Finds the file of a model given by name or path (NULL: the default model) and looks at its first
 * bytes. 0, or the status of the error printed. */
int neap_model_resolve(const char *model, char path[NEAP_PATH_MAX]);
/* Short name for tables: the name of the table, or the last part of the path. */
const char *neap_model_label(const char *model);

/* ---- paths.c: what lies around the executable ---- */

/* Absolute path of a file beside the executable ("llama-server"); the bare name if none is there.
 */
void neap_path_program(const char *name, char path[NEAP_PATH_MAX]);
/* The backend's library. 0, or the status of the error printed. */
int neap_path_backend(char path[NEAP_PATH_MAX]);
/* A script of tools/. 0 or -ENOENT. */
int neap_path_tool(const char *name, char path[NEAP_PATH_MAX]);
/* A folder of share/. 0 or -ENOENT. */
int neap_path_share(const char *name, char path[NEAP_PATH_MAX]);
/* Puts GGML_BACKEND_PATH and LLAMA_ARG_DEVICE into the environment unless the user has set them.
 * 0, or the status of the error printed. */
int neap_path_load_backend(void);
/* Takes them out again, and what else was set there: the environment of a program without neap. */
void neap_path_leave_backend(void);

/* ---- instances.c: running instances, by their control sockets ---- */

typedef struct neap_instance {
    int pid;
    json_t *stat; /* the instance object of `neap stat --json` */
} neap_instance;

typedef struct neap_instances {
    neap_instance *items;
    size_t n;
    size_t n_silent; /* live ones that did not answer (said on stderr) */
} neap_instances;

/* Every instance that answers, by pid; sockets of dead processes are removed. 0 or -errno. */
int neap_instances_load(neap_instances *ret_instances);
void neap_instances_free(neap_instances *instances);
void neap_instances_print(const neap_instances *instances, FILE *out); /* the table of `neap ps` */
/* Leaves the instance meant: that of pid, or with pid 0 the only one. 0, or the status of the error
 * printed (several: they are listed). */
int neap_instances_pick(int pid, neap_instances *ret_instances);
const char *neap_instance_text(const json_t *stat, const char *key); /* "?" when not there */
uint64_t neap_instance_held(const json_t *stat); /* bytes in memory, compressed copies counted */
bool neap_instance_idle(const json_t *stat);
/* In the order in which they are evicted from: idle ones first, the largest of them first. */
void neap_instances_sort(neap_instances *instances);
/* A count inside the instance object: group "bytes", key "kv_total"; group NULL: top level. */
uint64_t neap_instance_count(const json_t *stat, const char *group, const char *key);

/* Calls to one instance. Errors: those of the socket and of the reply; *ret_message, when set, is
 * malloc'd and says why. timeout 0: none. */
int neap_instance_stat(int pid, json_t **ret_stat);
int neap_instance_evict(int pid, const neap_evict_request *request, neap_evict_result *ret_result,
                        char **ret_message);
int neap_instance_restore(int pid, uint64_t *ret_bytes, uint64_t *ret_ns, char **ret_message);

#endif
