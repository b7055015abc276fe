/* bench.h - what the benchmarks share: their options, and the files they run on. */
#ifndef NEAP_APPS_BENCH_H
#define NEAP_APPS_BENCH_H

#include "cli.h"

#define NEAP_BENCH_MODELS_MAX 16
#define NEAP_BENCH_REPS_MAX 101

typedef struct neap_bench_options {
    bool as_json, quick;
    long reps; /* 0: the benchmark's default */
    const char *models[NEAP_BENCH_MODELS_MAX];
    size_t n_models;
} neap_bench_options;

enum {
    NEAP_OPT_JSON = NEAP_OPT_OWN,
    NEAP_OPT_QUICK,
    NEAP_OPT_REPS,
    NEAP_OPT_MODEL,
    NEAP_OPT_BENCH /* first code of a benchmark's own */
};
#define NEAP_OPTIONS_BENCH                                                                    \
    {"json", no_argument, NULL, NEAP_OPT_JSON}, {"quick", no_argument, NULL, NEAP_OPT_QUICK}, \
        {"reps", required_argument, NULL, NEAP_OPT_REPS},                                     \
        {"model", required_argument, NULL, NEAP_OPT_MODEL}, {                                 \
        "threads", required_argument, NULL, NEAP_OPT_THREADS                                  \
    }
extern const char neap_bench_help[];

/* Takes one of the shared options; 0, the status of the error printed, or -1: not one of them. */
int neap_bench_option(int code, const char *value, neap_bench_options *options);
/* Parses the command line of a benchmark; take gets each option but the basic ones, and gives 0 or
 * the status of the error printed. False: help or the version was printed, or an error: the command
 * ends with *ret_status. Arguments follow from optind on. */
bool neap_bench_parse(const neap_command *command, const struct option *long_options, int argc,
                      char **argv, int (*take)(void *ctx, int code, const char *value), void *ctx,
                      int *ret_status);
/* Without --model: every model of the table that has been fetched. 0, or the status of the error.
 */
int neap_bench_default_models(neap_bench_options *options);
#endif
