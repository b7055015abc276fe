/* train.c - `neap train`: makes the files that learned codecs need for a model.
 *
 * llama-server reads the texts, cut into contexts, through the backend, which writes down what each
 * layer caches (NEAP_CAPTURE) in a file without a name; after each context that file is taken in
 * and emptied. Then come the bases of each profile and one model file for each ratio. */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "capture_file.h"
#include "cli.h"
#include "clock.h"
#include "geometry.h"
#include "klt_file.h"
#include "proc.h"
#include "server_client.h"
#include "textfile.h"
#include "train.h"
#include "train_lowram.h"

#define CONTEXT_TOKENS 4096u
#define CONTEXT_TOKENS_MIN 512u
#define N_CTX 16384u /* more than sliding windows have, by which they are told apart */
#define TEXT_BYTES_MAX ((size_t)64 << 20)
#define TEXTS_MAX 256
enum { N_PROFILES = 3, RATIOS_MAX = 16 };

static const struct {
    const char *name;
    uint32_t profile;
    double ratio; /* default */
    bool by_default;
} profiles[N_PROFILES] = {{"head", NEAP_KLT_PER_HEAD, 4, true},
                          {"layer", NEAP_KLT_ONE_LAYER, 6, false},
                          {"joint", NEAP_KLT_FOUR_LAYERS, 8, true}};

typedef struct session {
    bool as_json, missing_only;
    const char *model;
    char model_path[NEAP_PATH_MAX], folder[NEAP_PATH_MAX - 64];
    int capture; /* descriptor */
    neap_geometry geometry;
    char *texts[TEXTS_MAX]; /* paths */
    size_t n_texts;
    bool wanted[N_PROFILES], wants_lowram;
    double ratios[RATIOS_MAX];
    size_t n_ratios;       /* 0: each profile's own */
    size_t n_tokens;       /* of all texts, at most; 0: all of them */
    size_t context_tokens; /* read at once */
    neap_trainer *trainer;
    neap_predictors *predictors;
    double share; /* of the bar that is done, and of the step at hand */
    double step_share;
    json_t *files, *lowram; /* NULL: nothing was learned */
} session;

static int no_memory(void) {
    return neap_cli_error(NEAP_EXIT_FAILED, NULL, "train: %s", neap_strerror(-ENOMEM));
}

/* ---- texts ---- */

static int add_text(session *s, const char *path) {
    if (s->n_texts == TEXTS_MAX)
        return neap_cli_error(NEAP_EXIT_USAGE, "put them together", "more than %d texts",
                              TEXTS_MAX);
    if (access(path, R_OK) != 0)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", path, neap_strerror(-errno));
    s->texts[s->n_texts] = strdup(path);
    return s->texts[s->n_texts] ? (s->n_texts++, 0) : no_memory();
}

static int is_text(const struct dirent *entry) {
    return entry->d_name[0] != '.' && strcmp(entry->d_name, "README") != 0;
}

/* Those that ship with neap, in the order of their names. */
static int add_own_texts(session *s) {
    char folder[NEAP_PATH_MAX], path[2 * NEAP_PATH_MAX];
    struct dirent **entries;
    if (neap_path_share("calibration", folder) != 0)
        return neap_cli_error(NEAP_EXIT_FAILED, "name texts, or install neap again",
                              "the calibration texts are not there");
    const int n = scandir(folder, &entries, is_text, alphasort);
    if (n < 0)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", folder, neap_strerror(-errno));
    int status = 0;
    for (int i = 0; i < n; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, entries[i]->d_name);
        if (!status) status = add_text(s, path);
        free(entries[i]);
    }
    free(entries);
    return status;
}

/* ---- capturing ---- */

/* Takes in what the backend has written since the last call. */
static int take_capture(session *s) {
    uint8_t *bytes = NULL;
    size_t size = 0;
    int err = neap_capture_take(s->capture, &bytes, &size);
    if (!err && size) err = neap_trainer_add(s->trainer, bytes, size);
    if (!err && size && s->wants_lowram) err = neap_predictors_add(s->predictors, s->trainer);
    free(bytes);
    if (!err) return 0;
    return neap_cli_error(NEAP_EXIT_FAILED, NULL, "the cache of %s: %s", neap_model_label(s->model),
                          err == -ENOTSUP ? "its keys or heads have a form that klt does not know"
                                          : neap_strerror(err));
}

/* One context after the other; what is left at the end of a text counts if it is worth it. */
static int read_context(session *s, neap_server *server, const neap_tokens *tokens, size_t first) {
    const size_t left = tokens->n - first;
    const neap_tokens context = {.ids = tokens->ids + first,
                                 .n = left < s->context_tokens ? left : s->context_tokens};
    neap_answer answer = {0};
    int status = neap_server_complete(server, &context, 0, true, &answer);
    neap_answer_free(&answer);
    return status ? status : take_capture(s);
}

static int read_text(session *s, neap_server *server, size_t at) {
    char *text = NULL;
    size_t len;
    neap_tokens tokens = {0};
    const int err = neap_textfile_read(s->texts[at], TEXT_BYTES_MAX, &text, &len);
    if (err)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", s->texts[at], neap_strerror(err));
    int status = neap_server_tokenize(server, text, &tokens);
    if (s->n_tokens && tokens.n > s->n_tokens / s->n_texts) tokens.n = s->n_tokens / s->n_texts;
    for (size_t first = 0; !status && first < tokens.n; first += s->context_tokens) {
        neap_progress_set(s->step_share * ((double)at + (double)first / (double)tokens.n) /
                              (double)s->n_texts,
                          "reading texts");
        if (first == 0 || tokens.n - first >= CONTEXT_TOKENS_MIN)
            status = read_context(s, server, &tokens, first);
    }
    neap_tokens_free(&tokens);
    free(text);
    return status;
}

static int read_texts(session *s) {
    const neap_server_options options = {.model_path = s->model_path,
                                         .n_ctx = N_CTX,
                                         .threads = neap_option_threads(),
                                         .codec = "none"};
    neap_server *server = NULL;
    int status = neap_capture_begin(s->folder, &s->capture);
    if (status)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", s->folder, neap_strerror(status));
    s->step_share = 0.5;
    status = neap_server_start(&options, &server);
    uint32_t most = 0; /* the answer's token, too */
    if (!status) status = neap_server_slot_tokens(server, &most);
    s->context_tokens = most > CONTEXT_TOKENS ? CONTEXT_TOKENS : most - 1;
    for (size_t i = 0; i < s->n_texts && !status; i++)
        status = read_text(s, server, i);
    neap_server_stop(server);
    neap_capture_end(s->capture);
    s->share = s->step_share;
    return status;
}

/* Before anything is made of them, and replaces what was learned before. */
static int check_read(const session *s) {
    const neap_trainer_info info = neap_trainer_tell(s->trainer);
    if (info.n_layers == 0)
        return neap_cli_error(NEAP_EXIT_FAILED, "its caches need a codec without training",
                              "%s: no layer keeps keys and values that grow with the context",
                              neap_model_label(s->model));
    if (info.n_tokens >= NEAP_TRAIN_TOKENS_MIN) return 0;
    return neap_cli_error(NEAP_EXIT_FAILED, "give more text",
                          "%s: %llu tokens are too few to learn from", neap_model_label(s->model),
                          (unsigned long long)info.n_tokens);
}

/* ---- bases ---- */

static session *showing; /* for the callback below */

static void show_step(double done) {
    neap_progress_set(showing->share + showing->step_share * done, "computing bases");
}

static int write_model(session *s, const neap_bases *bases, size_t profile, double ratio) {
    char path[NEAP_PATH_MAX];
    struct stat info;
    neap_bases_result result;
    int err = neap_klt_path(s->folder, profiles[profile].name, ratio, path, sizeof path);
    if (!err)
        err = neap_bases_write(bases, ratio, path, neap_model_label(s->model), s->geometry.digest,
                               &result);
    if (err == NEAP_E_BOUND)
        return neap_cli_error(NEAP_EXIT_FAILED, "ask for less", "profile %s cannot reach %g times",
                              profiles[profile].name, ratio);
    if (err || stat(path, &info) != 0)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", path,
                              neap_strerror(err ? err : -errno));
    json_array_append_new(s->files,
                          json_pack("{s:s, s:f, s:s, s:I, s:i, s:I, s:I, s:f}", "profile",
                                    profiles[profile].name, "ratio", ratio, "path", path, "bytes",
                                    (json_int_t)info.st_size, "groups", (int)result.n_groups,
                                    "columns", (json_int_t)result.n_columns, "components",
                                    (json_int_t)result.n_kept, "expected_loss", result.distortion));
    return 0;
}

static int make_profile(session *s, size_t profile) {
    neap_bases *bases = NULL;
    showing = s;
    const int err = neap_bases_make(s->trainer, profiles[profile].profile, show_step, &bases);
    s->share += s->step_share;
    if (err)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "profile %s: %s", profiles[profile].name,
                              neap_strerror(err));
    int status = 0;
    for (size_t i = 0; i < s->n_ratios && !status; i++)
        status = write_model(s, bases, profile, s->ratios[i]);
    if (s->n_ratios == 0) status = write_model(s, bases, profile, profiles[profile].ratio);
    neap_bases_free(bases);
    return status;
}

static int make_profiles(session *s) {
    size_t n = 0;
    for (size_t i = 0; i < N_PROFILES; i++)
        n += s->wanted[i];
    s->step_share = n > 0 ? (1 - s->share) / (double)n : 0;
    int status = 0;
    for (size_t i = 0; i < N_PROFILES && !status; i++)
        if (s->wanted[i]) status = make_profile(s, i);
    return status;
}

/* ---- showing ---- */

static json_t *document(const session *s, double seconds) {
    char digest[32];
    const neap_trainer_info info = neap_trainer_tell(s->trainer);
    snprintf(digest, sizeof digest, "%016llx", (unsigned long long)s->geometry.digest);
    return json_pack("{s:s, s:s, s:I, s:i, s:i, s:b, s:f, s:O, s:O*}", "model",
                     neap_model_label(s->model), "digest", digest, "tokens",
                     (json_int_t)info.n_tokens, "layers", (int)info.n_layers, "layers_left",
                     (int)info.n_left, "weighed", info.has_grams && info.has_residuals ? 1 : 0,
                     "seconds", seconds, "files", s->files, "lowram", s->lowram);
}

static void print_table(const session *s, double seconds) {
    const neap_trainer_info info = neap_trainer_tell(s->trainer);
    size_t i;
    json_t *file;
    printf("%s: %u layers, learned from %llu tokens in %.0f s\n", neap_model_label(s->model),
           info.n_layers, (unsigned long long)info.n_tokens, seconds);
    if (info.n_left)
        printf("%u layers with a sliding window are left to another codec\n", info.n_left);
    if (!info.has_grams)
        neap_cli_warn("the output matrix was not found: all directions of the values count alike");
    if (!info.has_residuals)
        neap_cli_warn("the residual stream was not found: all layers count alike");
    printf("\n%-8s %5s %11s %11s  %s\n", "profile", "ratio", "components", "size", "file");
    json_array_foreach(s->files, i, file) {
        char kept[48];
        snprintf(kept, sizeof kept, "%lld/%lld",
                 (long long)json_integer_value(json_object_get(file, "components")),
                 (long long)json_integer_value(json_object_get(file, "columns")));
        printf("%-8s %5g %11s %11s  %s\n", json_string_value(json_object_get(file, "profile")),
               json_number_value(json_object_get(file, "ratio")), kept,
               neap_cli_size((uint64_t)json_integer_value(json_object_get(file, "bytes"))),
               json_string_value(json_object_get(file, "path")));
    }
    if (s->lowram) neap_train_lowram_print(s->lowram);
}

/* ---- command ---- */

static int locate(session *s) {
    int err = neap_geometry_read(s->model_path, &s->geometry);
    if (err)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "model %s: %s", s->model_path,
                              neap_strerror(err));
    err = neap_klt_folder(s->geometry.digest, s->folder, sizeof s->folder);
    if (!err) err = neap_make_dirs(s->folder, 0700);
    if (!err) return 0;
    return neap_cli_error(NEAP_EXIT_FAILED, "set HOME or XDG_CACHE_HOME", "%s: %s", s->folder,
                          neap_strerror(err));
}

static bool is_there(const session *s, size_t profile, double ratio) {
    char path[NEAP_PATH_MAX];
    neap_klt_model *model = NULL;
    const int err = neap_klt_path(s->folder, profiles[profile].name, ratio, path, sizeof path);
    const bool there = !err && neap_klt_model_open(path, s->geometry.digest, &model) == 0;
    neap_klt_model_close(model);
    return there;
}

static bool all_there(const session *s) {
    for (size_t i = 0; i < N_PROFILES; i++) {
        if (!s->wanted[i]) continue;
        for (size_t r = 0; r < s->n_ratios; r++)
            if (!is_there(s, i, s->ratios[r])) return false;
        if (s->n_ratios == 0 && !is_there(s, i, profiles[i].ratio)) return false;
    }
    return !s->wants_lowram || neap_train_lowram_is_there(s->folder, s->geometry.digest);
}

static int run(session *s) {
    const uint64_t began = neap_clock_ns();
    int status = s->n_texts ? 0 : add_own_texts(s);
    if (!status) status = locate(s);
    if (!status && s->missing_only && all_there(s)) return NEAP_EXIT_OK;
    if (!status &&
        (neap_trainer_create(&s->trainer) != 0 || neap_predictors_create(&s->predictors) != 0))
        status = no_memory();
    if (status) return status;
    neap_progress_start("train");
    status = read_texts(s);
    if (!status) status = check_read(s);
    if (!status && s->wants_lowram) {
        status = neap_train_lowram(s->predictors, s->folder, neap_model_label(s->model),
                                   s->geometry.digest, s->share, 0.3, &s->lowram);
        s->share += 0.3;
    }
    if (!status) status = make_profiles(s);
    neap_progress_stop();
    if (status) return status;
    const double seconds = (double)(neap_clock_ns() - began) / 1e9;
    if (s->as_json) return neap_cli_print_json(document(s, seconds));
    print_table(s, seconds);
    return neap_cli_finish(NEAP_EXIT_OK);
}

static int take_profile(session *s, const char *name) {
    if (strcmp(name, "lowram") == 0) {
        s->wants_lowram = true;
        return 0;
    }
    for (size_t i = 0; i < N_PROFILES; i++)
        if (strcmp(profiles[i].name, name) == 0) {
            s->wanted[i] = true;
            return 0;
        }
    return neap_cli_error(NEAP_EXIT_USAGE, "head, layer, joint or lowram", "--profile %s: unknown",
                          name);
}

static int take_ratio(session *s, const char *text) {
    double ratio;
    if (!neap_ratio_parse(text, &ratio))
        return neap_cli_error(NEAP_EXIT_USAGE, NULL, "--ratio %s: not a number from %g to %g", text,
                              NEAP_RATIO_MIN, NEAP_RATIO_MAX);
    if (s->n_ratios == RATIOS_MAX)
        return neap_cli_error(NEAP_EXIT_USAGE, NULL, "more than %d ratios", RATIOS_MAX);
    s->ratios[s->n_ratios++] = ratio;
    return 0;
}

static int take_tokens(session *s, const char *text) {
    char *end;
    const unsigned long n = strtoul(text, &end, 10);
    if (!isdigit((unsigned char)*text) || *end || n < CONTEXT_TOKENS_MIN)
        return neap_cli_error(NEAP_EXIT_USAGE, NULL, "--tokens %s: not a number from %u on", text,
                              CONTEXT_TOKENS_MIN);
    s->n_tokens = n;
    return 0;
}

static const neap_command command = {
    "train",
    "usage: neap train [OPTIONS] MODEL [TEXT...]\n"
    "\n"
    "Makes what the learned codecs need for this model: it reads the texts (without any: those\n"
    "that come with neap), learns how its keys and values vary, which errors of them matter and\n"
    "how values follow from keys, and keeps that in the cache folder, under the model's digest.\n"
    "\n"
    "  --profile P   of klt: head (each head alone), layer, or joint (up to four layers); lowram\n"
    "                (where its fits start from); may be repeated\n"
    "                (default: head, joint and lowram)\n"
    "  --ratio R     bytes before to bytes after; may be repeated (default: 4 for head, 6 for\n"
    "                layer, 8 for joint)\n"
    "  --missing     does nothing if all of these files are there and good\n"
    "  --threads N   compute threads of the model\n"
    "  --tokens N    reads at most N tokens, as many of each text\n"
    "  --json        one JSON document on standard output\n"
    "  -h, --help    this text\n"
    "  --version     the version\n"};

static int take_arguments(session *s, int argc, char **argv) {
    int status = 0;
    bool any = s->wants_lowram;
    if (argc == optind)
        return neap_cli_error(NEAP_EXIT_USAGE, "see neap train --help", "which model?");
    s->model = argv[optind];
    for (size_t i = 0; i < N_PROFILES; i++)
        any = any || s->wanted[i];
    for (size_t i = 0; i < N_PROFILES && !any; i++)
        s->wanted[i] = profiles[i].by_default;
    s->wants_lowram = s->wants_lowram || !any;
    for (int i = optind + 1; i < argc && !status; i++)
        status = add_text(s, argv[i]);
    if (!status) status = neap_model_resolve(s->model, s->model_path);
    return status ? status : neap_path_load_backend();
}

int neap_cmd_train(int argc, char **argv) {
    enum { JSON = NEAP_OPT_OWN, MISSING, PROFILE, RATIO, TOKENS };
    static const struct option options[] = {NEAP_OPTIONS_BASIC,
                                            {"json", no_argument, NULL, JSON},
                                            {"missing", no_argument, NULL, MISSING},
                                            {"profile", required_argument, NULL, PROFILE},
                                            {"ratio", required_argument, NULL, RATIO},
                                            {"threads", required_argument, NULL, NEAP_OPT_THREADS},
                                            {"tokens", required_argument, NULL, TOKENS},
                                            {0}};
    int code, status = 0;
    bool done = false;
    session *s = calloc(1, sizeof *s);
    if (s) s->files = json_array();
    if (!s || !s->files) {
        free(s);
        return no_memory();
    }
    while (!done && (code = getopt_long(argc, argv, ":h", options, NULL)) != -1) {
        done = neap_option_basic(&command, code, argv, &status);
        if (done) break;
        s->as_json = s->as_json || code == JSON;
        s->missing_only = s->missing_only || code == MISSING;
        if (code == PROFILE) status = take_profile(s, optarg);
        if (code == RATIO) status = take_ratio(s, optarg);
        if (code == TOKENS) status = take_tokens(s, optarg);
        if (code == NEAP_OPT_THREADS) status = neap_option_common(code, optarg);
        done = status != 0;
    }
    if (!done) status = take_arguments(s, argc, argv);
    if (!done && !status) status = run(s);
    for (size_t i = 0; i < s->n_texts; i++)
        free(s->texts[i]);
    neap_trainer_free(s->trainer);
    neap_predictors_free(s->predictors);
    json_decref(s->files);
    json_decref(s->lowram);
    free(s);
    return status;
}
