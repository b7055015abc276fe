/* bench_ttft.c - `neap bench ttft`: time to the first token after an eviction, neap's policy
 * against the paper's baselines.
 *
 * Servers run side by side, one a policy, with the same context of P tokens. The baseline runs
 * twice: with the attention that neap's policy has, which is what the time that an eviction adds is
 * compared with, and with llama.cpp's own, as in the paper. Contexts come one after the other, each
 * with servers of its own.
 *
 * Remaining counts resident bytes and copies compressed in memory, of weights and KV cells in use;
 * compute buffers are no part of it. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "bench.h"
#include "codec.h"
#include "geometry.h"
#include "policy.h"
#include "proc.h"
#include "shape_model.h"
#include "ttft_int.h"

#define QUICK_CONTEXT 4096
#define DEFAULT_CONTEXT 8192
#define CONTEXT_MIN 64
#define CONTEXT_MAX 1000000

const char *neap_ttft_model(const neap_ttft *b) {
    return neap_model_label(b->options.n_models ? b->options.models[0] : NULL);
}

/* ---- the whole ---- */

static int find_model(neap_ttft *b) {
    const char *model = b->options.n_models ? b->options.models[0] : NULL;
    struct stat info;
    neap_geometry geometry = {0};
    b->is_shape = neap_shape_model_known(model);
    int status = b->is_shape ? neap_shape_model_make(model, b->model_path)
                             : neap_model_resolve(model, b->model_path);
    if (status) return status;
    int err = neap_geometry_read(b->model_path, &geometry);
    if (!err && stat(b->model_path, &info) != 0) err = -errno;
    if (err)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "model %s: %s", b->model_path,
                              neap_strerror(err));
    b->weight_bytes = (uint64_t)info.st_size;
    b->kv_token_bytes = geometry.kv_chunk_bytes / NEAP_CHUNK_CELLS * geometry.n_layers;
    return 0;
}

static int find_folder(neap_ttft *b) {
    char cache[NEAP_PATH_MAX - 64];
    int err = neap_cache_dir(cache, sizeof cache);
    if (!err) {
        snprintf(b->folder, sizeof b->folder, "%s/bench/", cache);
        err = neap_make_dirs(b->folder, 0700);
    }
    return err ? neap_cli_error(NEAP_EXIT_FAILED, NULL, "bench folder: %s", neap_strerror(err)) : 0;
}

static void init_grid(const neap_ttft *b, long context, neap_ttft_grid *g) {
    *g = (neap_ttft_grid){.bench = b, .context = context, .n_sides = b->n_sides};
    for (size_t i = 0; i < b->n_sides; i++)
        g->sides[i] = (neap_ttft_side){
            .policy = b->sides[i].policy, .attn = b->sides[i].attn, .model_fd = -1};
}

static int run_grid(neap_ttft_grid *g) {
    neap_progress_start("starting");
    int status = neap_ttft_servers_start(g);
    neap_progress_stop();
    if (!status) status = neap_ttft_context_fill(g);
    if (!status) status = neap_ttft_measure_all(g);
    neap_ttft_context_free(g);
    neap_ttft_servers_stop(g);
    return status;
}

/* The contexts that were measured are reported although a later one failed. */
static int run_grids(const neap_ttft *b, neap_ttft_grid *grids, json_t *rows) {
    int failed = 0, status = 0;
    size_t n = 0;
    for (; n < b->n_contexts && !failed; n += !failed) {
        init_grid(b, b->contexts[n], &grids[n]);
        failed = run_grid(&grids[n]);
        const int changed = failed ? 0 : neap_ttft_report(&grids[n], rows);
        if (changed) status = changed;
    }
    if (b->plot_path && n) {
        const int unplotted = neap_ttft_plot(b, grids, n);
        if (!status) status = unplotted;
    }
    return failed ? failed : status;
}

static int run(neap_ttft *b) {
    int status = find_model(b);
    if (!status) status = find_folder(b);
    /* What is short of memory on this machine must not evict in between. */
    if (!status) status = neap_option_common(NEAP_OPT_PRESSURE, "off");
    if (status) return status;
    neap_device_rate_measure(b->model_path, b->codec, &b->rate);
    neap_ttft_grid *grids = calloc(b->n_contexts, sizeof *grids);
    if (!grids) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    json_t *rows = json_array();
    status = run_grids(b, grids, rows);
    free(grids);
    if (!b->options.as_json || json_array_size(rows) == 0) {
        json_decref(rows);
        return neap_cli_finish(status);
    }
    const int printed = neap_cli_print_json(json_pack(
        "{s:o, s:s, s:{s:f, s:f, s:f}, s:o}", "machine", neap_machine_json(), "model",
        neap_ttft_model(b), "rates", "read_bytes_per_s", b->rate.read_bps, "decode_bytes_per_s",
        b->rate.decode_bps, "commit_bytes_per_s", b->rate.commit_bps, "rows", rows));
    return status ? status : printed;
}

/* ---- options ---- */

enum { OPT_CONTEXT = NEAP_OPT_BENCH, OPT_REMAINING, OPT_TEXT, OPT_PLOT, OPT_ONLY };

static int add_side(neap_ttft *b, const char *policy, const char *attn) {
    if (b->n_sides == NEAP_TTFT_SIDES_MAX)
        return neap_cli_error(NEAP_EXIT_USAGE, NULL, "--policy: more than %d",
                              NEAP_TTFT_SIDES_MAX - NEAP_TTFT_COMPARED);
    for (size_t i = NEAP_TTFT_COMPARED; i < b->n_sides; i++)
        if (strcmp(policy, b->sides[i].policy) == 0)
            return neap_cli_error(NEAP_EXIT_USAGE, NULL, "--policy %s: given twice", policy);
    if (strcmp(policy, NEAP_TTFT_PAGING) != 0 && !neap_policy_find(policy))
        return neap_option_policy(policy); /* says which there are */
    b->sides[b->n_sides].policy = policy;
    b->sides[b->n_sides++].attn = attn;
    return 0;
}

static int compare_down(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

/* "0,25,50": per cent. The resident level is always measured. */
static int parse_levels(neap_ttft *b, const char *value) {
    b->levels[0] = 1;
    b->n_levels = 1;
    for (const char *p = value; *p;) {
        char *end;
        const double percent = strtod(p, &end);
        if (end == p || (*end && *end != ',') || !(percent >= 0 && percent <= 100) ||
            b->n_levels == NEAP_TTFT_LEVELS_MAX)
            return neap_cli_error(NEAP_EXIT_USAGE, "as in 0,25,50,75",
                                  "--remaining %s: not a list of percentages", value);
        if (percent < 100) b->levels[b->n_levels++] = percent / 100;
        p = *end ? end + 1 : end;
    }
    qsort(b->levels, b->n_levels, sizeof b->levels[0], compare_down);
    return 0;
}

/* "8192,16384": tokens. */
static int parse_contexts(neap_ttft *b, const char *value) {
    b->n_contexts = 0;
    for (const char *p = value;; p++) {
        char *end;
        errno = 0;
        const long n = strtol(p, &end, 10);
        if (end == p || (*end && *end != ',') || errno || n < CONTEXT_MIN || n > CONTEXT_MAX ||
            b->n_contexts == NEAP_TTFT_CONTEXTS_MAX)
            return neap_cli_error(NEAP_EXIT_USAGE, "as in 8192,16384",
                                  "--context %s: not a list of up to %d numbers from %d to %d",
                                  value, NEAP_TTFT_CONTEXTS_MAX, CONTEXT_MIN, CONTEXT_MAX);
        b->contexts[b->n_contexts++] = n;
        p = end;
        if (!*p) return 0;
    }
}

static const neap_command command = {
    "bench ttft",
    "usage: neap bench ttft [OPTIONS]\n"
    "\n"
    "Fills a context in several servers, gives memory back, and measures the time to the first\n"
    "token of the next request: neap's policy against partial-offload, with neap's attention and\n"
    "with llama.cpp's (ggml), in turns. RATIO is to partial-offload with llama.cpp's attention,\n"
    "ADDED that of what an eviction adds, with the same attention.\n"
    "\n"
    "  --context LIST   tokens of the context, as in 8192,16384 (default 8192; 4096 with --quick)\n"
    "  --remaining L    shares still in memory, in per cent (default 0,25,50,75,100)\n"
    "  --only kv        evict KV alone; shares are of KV then\n"
    "  --policy NAME    what to compare with partial-offload (default hybrid); may be given "
    "again;\n"
    "                   os-paging: llama.cpp without neap, paged out by the kernel (needs root)\n"
    "  --codec NAME     q8 (default), cachegen, none, or klt[:RATIO] (after neap train)\n"
    "  --text FILE      text of the context (default: generated)\n"
    "  --plot FILE      draws TTFT against remaining into an SVG file\n"
    "\n"
    "MODEL may also be qwen3-0.6b-shape or exaone-4.0-1.2b-shape: random weights, for time "
    "only.\n"};

static int take_option(void *ctx, int code, const char *value) {
    neap_ttft *b = ctx;
    switch (code) {
    case OPT_CONTEXT:
        return parse_contexts(b, value);
    case OPT_REMAINING:
        return parse_levels(b, value);
    case OPT_TEXT:
        b->text_path = value;
        return 0;
    case OPT_ONLY:
        b->only_kv = true;
        return strcmp(value, "kv") == 0
                   ? 0
                   : neap_cli_error(NEAP_EXIT_USAGE, "give kv", "--only %s: not kv", value);
    case OPT_PLOT:
        b->plot_path = value;
        return 0;
    case NEAP_OPT_POLICY:
        return add_side(b, value, NULL);
    case NEAP_OPT_CODEC:
        b->codec = value;
        return neap_option_codec(value);
    default:
        return neap_bench_option(code, value, &b->options);
    }
}

/* What follows from all options together. */
static int complete_options(neap_ttft *b) {
    bool compares = false;
    if (b->n_contexts == 0)
        b->contexts[b->n_contexts++] = b->options.quick ? QUICK_CONTEXT : DEFAULT_CONTEXT;
    for (size_t i = NEAP_TTFT_COMPARED; i < b->n_sides; i++)
        if (strcmp(b->sides[i].policy, NEAP_TTFT_PAGING) != 0)
            compares = true;
        else if (b->only_kv)
            return neap_cli_error(NEAP_EXIT_USAGE, "leave --only out",
                                  NEAP_TTFT_PAGING " takes weights, too");
        else if (b->levels[b->n_levels - 1] > 0)
            return neap_cli_error(NEAP_EXIT_USAGE, "add 0 to --remaining",
                                  NEAP_TTFT_PAGING " is measured at 0 %% only");
    return compares ? 0 : add_side(b, "hybrid", NULL);
}

/* Before hours of measuring rather than after them. */
static int check_plot_path(const char *path) {
    FILE *file = path ? fopen(path, "ae") : NULL;
    if (path && !file)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "--plot %s: %s", path, neap_strerror(-errno));
    if (file) fclose(file);
    return 0;
}

int neap_bench_ttft(int argc, char **argv) {
    static const struct option long_options[] = {
        NEAP_OPTIONS_BASIC,
        NEAP_OPTIONS_BENCH,
        {"context", required_argument, NULL, OPT_CONTEXT},
        {"remaining", required_argument, NULL, OPT_REMAINING},
        {"codec", required_argument, NULL, NEAP_OPT_CODEC},
        {"policy", required_argument, NULL, NEAP_OPT_POLICY},
        {"text", required_argument, NULL, OPT_TEXT},
        {"plot", required_argument, NULL, OPT_PLOT},
        {"only", required_argument, NULL, OPT_ONLY},
        {0}};
    neap_ttft b = {.codec = "q8"};
    int status = parse_levels(&b, "0,25,50,75,100");
    if (!status) status = add_side(&b, "partial-offload", NULL);
    if (!status) status = add_side(&b, "partial-offload", "ggml");
    if (!status && !neap_bench_parse(&command, long_options, argc, argv, take_option, &b, &status))
        return status;
    if (!status && (optind < argc || b.options.n_models > 1))
        status = neap_cli_error(NEAP_EXIT_USAGE, "see neap bench ttft --help",
                                "%s: one argument too many",
                                optind < argc ? argv[optind] : b.options.models[1]);
    if (!status) status = complete_options(&b);
    if (!status) status = check_plot_path(b.plot_path);
    return status ? status : run(&b);
}
