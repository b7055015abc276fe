/* profile.c - `neap profile`: measures this device, says what it means for restores, and keeps it
 * where running instances look for it. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "geometry.h"
#include "measure.h"
#include "model_speed.h"
#include "pipeline.h"
#include "profile_file.h"

#define CHUNK_BYTES (512u << 10) /* without MODEL: 256 cells of 512 values, K and V, in f16 */

typedef struct session {
    bool as_json, quick;
    const char *model; /* as given; NULL: none */
    char model_path[NEAP_PATH_MAX];
    char folder[NEAP_PATH_MAX]; /* swap */
    char file[NEAP_PATH_MAX];   /* "": not kept */
    neap_device device;
    neap_profile profile;
    bool has_run; /* the next is filled */
    neap_profile_model run;
} session;

/* ---- measuring ---- */

static int locate(session *s) {
    char file[NEAP_PATH_MAX];
    const char *wanted = getenv("NEAP_PROFILE");
    int err = neap_swap_folder(getenv("NEAP_SWAP_DIR"), s->folder, sizeof s->folder);
    if (!err) err = neap_profile_locate(s->folder, &s->device, file, sizeof file);
    if (err)
        return neap_cli_error(NEAP_EXIT_FAILED, "set HOME or XDG_CACHE_HOME, or --swap-dir",
                              "profile: %s", neap_strerror(err));
    if (!wanted || !*wanted) wanted = file;
    if (strlen(wanted) >= sizeof s->file)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "NEAP_PROFILE: %s",
                              neap_strerror(-ENAMETOOLONG));
    if (strcmp(wanted, "off") != 0) memcpy(s->file, wanted, strlen(wanted) + 1);
    return 0;
}

/* Runs of other models are kept; all else is measured anew. */
static void keep_models(session *s) {
    neap_profile old;
    const int err = s->file[0] ? neap_profile_load(s->file, &s->device, &old) : -ENOENT;
    if (err && err != -ENOENT)
        neap_cli_warn("%s: %s; measured again", s->file,
                      err == NEAP_E_CHANGED   ? "of another device"
                      : err == NEAP_E_CORRUPT ? "damaged"
                                              : neap_strerror(err));
    if (err) return;
    memcpy(s->profile.models, old.models, sizeof old.models);
    s->profile.n_models = old.n_models;
}

static int measure_device(session *s) {
    const neap_measure_plan plan =
        neap_measure_plan_make(s->folder, s->quick, neap_option_n_threads());
    neap_progress_set(0, "reading");
    int err = neap_measure_reads(&plan, &s->profile);
    if (err)
        return neap_cli_error(NEAP_EXIT_FAILED, "give another folder with --swap-dir",
                              "reading in %s could not be measured (%s are needed): %s", s->folder,
                              neap_cli_size(plan.file_bytes), neap_strerror(err));
    neap_progress_set(0.4, "decoding");
    err = neap_measure_decoding(&plan, &s->profile);
    if (!err) {
        neap_progress_set(0.7, "first touch");
        err = neap_measure_touching(&plan, &s->profile);
    }
    if (err)
        return neap_cli_error(NEAP_EXIT_FAILED, "is there enough free memory?", "profile: %s",
                              neap_strerror(err));
    return 0;
}

static int run_model(session *s) {
    neap_geometry geometry;
    const int err = neap_geometry_read(s->model_path, &geometry);
    if (err || geometry.n_layers == 0)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "model %s: %s", s->model_path,
                              err ? neap_strerror(err) : "its number of layers is not said");
    neap_progress_set(0.8, "computing");
    const char *const args[] = {"-p", s->quick ? "64" : "512", "-n", s->quick ? "8" : "64", NULL};
    const neap_speed_test tests[] = {{"prefill", s->quick ? 64 : 512, 0},
                                     {"decode", 0, s->quick ? 8 : 64}};
    neap_speed_run run = {.path = s->model_path, .with_neap = true, .args = args};
    double tps[2];
    const int status = neap_model_speed(&run, tests, 2, tps);
    if (status) return status;
    s->run = (neap_profile_model){.digest = geometry.digest,
                                  .n_layers = geometry.n_layers,
                                  .kv_chunk_bytes = geometry.kv_chunk_bytes};
    snprintf(s->run.name, sizeof s->run.name, "%.*s", (int)sizeof s->run.name - 1,
             neap_model_label(s->model_path));
    s->run.prefill_ns = (uint64_t)(1e9 / tps[0] / geometry.n_layers);
    s->run.decode_ns = (uint64_t)(1e9 / tps[1] / geometry.n_layers);
    s->run.n_threads = run.n_threads;
    s->has_run = true;
    neap_profile_model_put(&s->profile, &s->run);
    return 0;
}

/* ---- showing ---- */

static uint64_t chunk_bytes(const session *s) {
    return s->has_run && s->run.kv_chunk_bytes ? s->run.kv_chunk_bytes : CHUNK_BYTES;
}

/* What a chunk's read reaches, every storage thread reading one of its own. */
static uint64_t chunk_bps(const session *s) {
    return neap_profile_read_at(&s->profile, chunk_bytes(s), neap_pipeline_path_threads().storage);
}

static neap_rates rates_of(const session *s, const char *codec) {
    neap_rates rates;
    neap_rates_init(&rates, &s->profile, codec, neap_pipeline_path_threads());
    return rates;
}

static double gbps(uint64_t bps) {
    return (double)bps / 1e9;
}

static void print_device(const session *s) {
    const neap_profile *p = &s->profile;
    printf("device    %s (%s), %s, kernel %s\n\n", s->device.source, s->device.fstype,
           s->device.cpu, s->device.kernel);
    printf("reading   GB/s %s, by size and number of requests in flight\n%10s",
           p->is_direct ? "around the page cache" : "through the page cache", "");
    for (size_t d = 0; d < NEAP_PROFILE_DEPTHS; d++)
        printf("%8u", neap_profile_depths[d]);
    putchar('\n');
    for (size_t i = 0; i < NEAP_PROFILE_SIZES; i++) {
        printf("%10s", neap_cli_size(neap_profile_sizes[i]));
        for (size_t d = 0; d < NEAP_PROFILE_DEPTHS; d++)
            printf("%8.2f", gbps(p->read_bps[i][d]));
        putchar('\n');
    }
    printf("\ndecoding  GB/s of uncompressed bytes, by threads\n");
    for (size_t i = 0; i < p->n_codecs; i++) {
        printf("%10s", p->codecs[i].name);
        for (size_t t = 0; t < NEAP_PROFILE_THREADS && p->codecs[i].decode_bps[t]; t++)
            printf("%8.2f", gbps(p->codecs[i].decode_bps[t]));
        putchar('\n');
    }
    printf("\nmemory    first touch %.2f GB/s in small pages, %.2f GB/s where huge ones are asked "
           "for\n",
           gbps(p->populate_small_bps), gbps(p->populate_huge_bps));
}

static void print_meaning(const session *s) {
    const neap_profile *p = &s->profile;
    const uint64_t best = neap_profile_best_read(p);
    const uint32_t depth = neap_pipeline_path_threads().storage;
    const uint64_t from = neap_profile_saturating(p, depth);
    for (size_t i = 0; i < p->n_codecs; i++) {
        const neap_rates rates = rates_of(s, p->codecs[i].name);
        printf("restoring with %s: %.2f GB/s from storage, %.2f GB/s from memory\n",
               p->codecs[i].name, gbps(rates.read.bps), gbps(rates.decode.bps));
    }
    const bool saturates = neap_profile_saturates(p, chunk_bytes(s), depth);
    printf("KV chunk  %s%s%s: %.2f of %.2f GB/s, %s", neap_cli_size(chunk_bytes(s)),
           s->has_run ? " of " : "", s->has_run ? s->run.name : "", gbps(chunk_bps(s)), gbps(best),
           saturates ? "saturates storage" : "does not saturate storage");
    if (!saturates && from) printf(" (from %s on it would)", neap_cli_size(from));
    putchar('\n');
    if (s->has_run)
        printf("compute   %s: %u layers, each %.3f ms a prompt token, %.3f ms a token alone (%u "
               "threads)\n",
               s->run.name, s->run.n_layers, (double)s->run.prefill_ns / 1e6,
               (double)s->run.decode_ns / 1e6, s->run.n_threads);
    if (s->file[0]) printf("kept in   %s\n", s->file);
}

static json_t *reads_json(const neap_profile *p) {
    json_t *list = json_array();
    for (size_t i = 0; i < NEAP_PROFILE_SIZES; i++)
        for (size_t d = 0; d < NEAP_PROFILE_DEPTHS; d++)
            json_array_append_new(list, json_pack("{s:i, s:i, s:f}", "request_bytes",
                                                  (int)neap_profile_sizes[i], "depth",
                                                  (int)neap_profile_depths[d], "gbps",
                                                  gbps(p->read_bps[i][d])));
    return list;
}

static json_t *decoding_json(const neap_profile *p) {
    json_t *list = json_array();
    for (size_t i = 0; i < p->n_codecs; i++)
        for (size_t t = 0; t < NEAP_PROFILE_THREADS && p->codecs[i].decode_bps[t]; t++)
            json_array_append_new(list, json_pack("{s:s, s:i, s:f}", "codec", p->codecs[i].name,
                                                  "threads", (int)t + 1, "gbps",
                                                  gbps(p->codecs[i].decode_bps[t])));
    return list;
}

static json_t *rates_json(const session *s) {
    json_t *list = json_array();
    for (size_t i = 0; i < s->profile.n_codecs; i++) {
        const char *codec = s->profile.codecs[i].name;
        const neap_rates rates = rates_of(s, codec);
        json_array_append_new(list, json_pack("{s:s, s:f, s:f}", "codec", codec, "read_gbps",
                                              gbps(rates.read.bps), "decode_gbps",
                                              gbps(rates.decode.bps)));
    }
    return list;
}

static json_t *chunk_json(const session *s) {
    const uint32_t depth = neap_pipeline_path_threads().storage;
    const uint64_t best = neap_profile_best_read(&s->profile);
    const uint64_t from = neap_profile_saturating(&s->profile, depth);
    return json_pack("{s:I, s:i, s:f, s:f, s:b, s:o}", "bytes", (json_int_t)chunk_bytes(s), "depth",
                     (int)depth, "gbps", gbps(chunk_bps(s)), "best_gbps", gbps(best), "saturates",
                     neap_profile_saturates(&s->profile, chunk_bytes(s), depth) ? 1 : 0,
                     "saturating_bytes", from ? json_integer((json_int_t)from) : json_null());
}

static json_t *run_json(const session *s) {
    if (!s->has_run) return json_null();
    char digest[32];
    snprintf(digest, sizeof digest, "%016llx", (unsigned long long)s->run.digest);
    return json_pack("{s:s, s:s, s:i, s:i, s:f, s:f}", "name", s->run.name, "digest", digest,
                     "layers", (int)s->run.n_layers, "threads", (int)s->run.n_threads, "prefill_ms",
                     (double)s->run.prefill_ns / 1e6, "decode_ms", (double)s->run.decode_ns / 1e6);
}

static json_t *document(const session *s) {
    const neap_device *d = &s->device;
    return json_pack("{s:o, s:{s:s, s:s, s:s, s:s, s:s}, s:o, s:b, s:o, s:o, s:{s:f, s:f}, s:o, "
                     "s:o, s:o}",
                     "machine", neap_machine_json(), "device", "source", d->source, "fstype",
                     d->fstype, "number", d->number, "kernel", d->kernel, "cpu", d->cpu, "file",
                     s->file[0] ? json_string(s->file) : json_null(), "direct",
                     s->profile.is_direct ? 1 : 0, "read", reads_json(&s->profile), "decode",
                     decoding_json(&s->profile), "populate", "small_gbps",
                     gbps(s->profile.populate_small_bps), "huge_gbps",
                     gbps(s->profile.populate_huge_bps), "rates", rates_json(s), "chunk",
                     chunk_json(s), "compute", run_json(s));
}

/* ---- command ---- */

static int measure_all(session *s) {
    keep_models(s);
    neap_progress_start("profile");
    int status = measure_device(s);
    if (!status && s->model) status = run_model(s);
    neap_progress_stop();
    return status;
}

static int run(session *s) {
    int status = measure_all(s);
    if (status) return status;
    if (s->as_json) {
        status = neap_cli_print_json(document(s));
    } else {
        print_device(s);
        print_meaning(s);
        status = neap_cli_finish(NEAP_EXIT_OK);
    }
    const int err = s->file[0] ? neap_profile_save(s->file, &s->device, &s->profile) : 0;
    if (err)
        return neap_cli_error(NEAP_EXIT_FAILED, "set NEAP_PROFILE to a file that can be written",
                              "the profile could not be kept in %s: %s", s->file,
                              neap_strerror(err));
    return status;
}

static const neap_command command = {
    "profile",
    "usage: neap profile [--quick] [--json] [--swap-dir DIR] [--threads N] [MODEL]\n"
    "\n"
    "Measures what evictions place by: direct reads in the swap folder, decoding of each codec,\n"
    "first touch of memory; with MODEL also what computing one of its layers takes. The result is\n"
    "kept for instances that start from now on; they correct it as their restores show.\n"
    "\n"
    "  --quick         a few seconds\n"
    "  --swap-dir DIR  the swap folder (default: the cache folder's swap)\n"
    "  --threads N     most threads that decode, and compute threads\n"
    "  --json          one JSON document on standard output\n"
    "  -h, --help      this text\n"
    "  --version       the version\n"};

int neap_cmd_profile(int argc, char **argv) {
    enum { JSON = NEAP_OPT_OWN, QUICK };
    static const struct option options[] = {
        NEAP_OPTIONS_BASIC,
        {"json", no_argument, NULL, JSON},
        {"quick", no_argument, NULL, QUICK},
        {"swap-dir", required_argument, NULL, NEAP_OPT_SWAP_DIR},
        {"threads", required_argument, NULL, NEAP_OPT_THREADS},
        {0}};
    int code, status = 0;
    session *s = calloc(1, sizeof *s);
    if (!s) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    bool done = false;
    while (!done && (code = getopt_long(argc, argv, ":h", options, NULL)) != -1) {
        done = neap_option_basic(&command, code, argv, &status);
        if (done) break;
        s->as_json = s->as_json || code == JSON;
        s->quick = s->quick || code == QUICK;
        if (code == NEAP_OPT_SWAP_DIR || code == NEAP_OPT_THREADS)
            status = neap_option_common(code, optarg);
        done = status != 0;
    }
    if (!done && argc - optind > 1) {
        done = true;
        status = neap_cli_error(NEAP_EXIT_USAGE, "see neap profile --help",
                                "%s: one argument too many", argv[optind + 1]);
    }
    if (!done && argc - optind == 1) s->model = argv[optind];
    if (!done && s->model) {
        status = neap_model_resolve(s->model, s->model_path);
        if (!status) status = neap_path_load_backend();
    }
    if (!done && !status) status = locate(s);
    if (!done && !status) status = run(s);
    free(s);
    return status;
}
