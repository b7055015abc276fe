/* bench.c - `neap bench NAME`. */
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bench.h"
#include "proc.h"

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} benches[] = {
    {"parity", neap_bench_parity, "speed of llama-bench with neap and without"},
    {"attn", neap_bench_attn, "neap's attention against llama.cpp's"},
    {"ttft", neap_bench_ttft, "time to first token after an eviction, against partial-offload"},
    {"evict", neap_bench_evict, "how fast memory is given back, against memcpy"},
    {"codec", neap_bench_codec, "size and speed of the codecs on a model's KV cache"},
    {"values", neap_bench_values, "fits of LowRAM's value predictors, what they explain and cost"},
    {"fidelity", neap_bench_fidelity, "what smaller caches cost in quality"},
    {"decode", neap_bench_decode, "speed of generation after a long context, by how KV is held"},
    {"multitask", neap_bench_multitask, "who survives beside a program that takes memory"},
};

const char neap_bench_help[] = "  --model MODEL  a name of neap models or a path\n"
                               "  --reps N       pairs of runs, interleaved (default 5)\n"
                               "  --quick        a few minutes\n"
                               "  --threads N    compute threads\n"
                               "  --json         one JSON document on standard output\n"
                               "  -h, --help     this text\n"
                               "  --version      the version\n";

int neap_bench_option(int code, const char *value, neap_bench_options *options) {
    switch (code) {
    case NEAP_OPT_JSON:
        options->as_json = true;
        return 0;
    case NEAP_OPT_QUICK:
        options->quick = true;
        return 0;
    case NEAP_OPT_REPS:
        return neap_option_number("--reps", value, 1, NEAP_BENCH_REPS_MAX, &options->reps);
    case NEAP_OPT_MODEL:
        if (options->n_models == NEAP_BENCH_MODELS_MAX)
            return neap_cli_error(NEAP_EXIT_USAGE, NULL, "--model: more than %d",
                                  NEAP_BENCH_MODELS_MAX);
        options->models[options->n_models++] = value;
        return 0;
    case NEAP_OPT_THREADS:
        return neap_option_common(code, value);
    default:
        return -1;
    }
}

bool neap_bench_parse(const neap_command *command, const struct option *long_options, int argc,
                      char **argv, int (*take)(void *ctx, int code, const char *value), void *ctx,
                      int *ret_status) {
    int code, status = 0;
    while (!status && (code = getopt_long(argc, argv, ":h", long_options, NULL)) != -1) {
        if (neap_option_basic(command, code, argv, &status)) {
            if (code == 'h') fputs(neap_bench_help, stdout);
            *ret_status = neap_cli_finish(status);
            return false;
        }
        status = take(ctx, code, optarg);
    }
    *ret_status = status;
    return status == 0;
}

int neap_bench_default_models(neap_bench_options *options) {
    if (options->n_models) return 0;
    char cache[NEAP_PATH_MAX - 256], path[NEAP_PATH_MAX];
    const int err = neap_cache_dir(cache, sizeof cache);
    for (const neap_model *model = neap_models; !err && model->name; model++) {
        snprintf(path, sizeof path, "%s/models/%s", cache, model->file);
        if (access(path, R_OK) == 0) options->models[options->n_models++] = model->name;
    }
    if (options->n_models) return 0;
    return neap_cli_error(NEAP_EXIT_FAILED, "neap models fetch smollm2-135m, or --model",
                          "bench: no model is there");
}

static int usage(void) {
    puts("usage: neap bench NAME [OPTIONS]\n"
         "\n"
         "Measures on this machine, always as ratios of interleaved runs.\n");
    for (size_t i = 0; i < sizeof benches / sizeof *benches; i++)
        printf("  %-9s %s\n", benches[i].name, benches[i].help);
    puts("\n"
         "  -h, --help  this text; neap bench NAME --help for one of them\n"
         "  --version   the version");
    return neap_cli_finish(NEAP_EXIT_OK);
}

int neap_cmd_bench(int argc, char **argv) {
    if (argc < 2)
        return neap_cli_error(NEAP_EXIT_USAGE, "see neap bench --help", "bench: which one?");
    const char *name = argv[1];
    if (strcmp(name, "-h") == 0 || strcmp(name, "--help") == 0) return usage();
    if (strcmp(name, "--version") == 0) {
        printf("neap %s\n", NEAP_VERSION);
        return neap_cli_finish(NEAP_EXIT_OK);
    }
    for (size_t i = 0; i < sizeof benches / sizeof *benches; i++)
        if (strcmp(benches[i].name, name) == 0) return benches[i].run(argc - 1, argv + 1);
    return neap_cli_error(NEAP_EXIT_USAGE, "see neap bench --help", "bench %s: no such benchmark",
                          name);
}
