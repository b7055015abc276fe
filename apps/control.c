/* control.c - the commands that talk to running instances: ps, stat, evict, restore. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "cli.h"

enum { OPT_JSON = NEAP_OPT_OWN, OPT_PID, OPT_ALL, OPT_ONLY };

typedef struct arguments {
    bool as_json, all;
    int pid, only;
} arguments;

static int parse_only(const char *value, int *ret_only) {
    if (strcmp(value, "weights") == 0)
        *ret_only = NEAP_ONLY_WEIGHTS;
    else if (strcmp(value, "kv") == 0)
        *ret_only = NEAP_ONLY_KV;
    else
        return neap_cli_error(NEAP_EXIT_USAGE, "weights or kv", "--only %s: no such part", value);
    return 0;
}

/* Takes the options; true when the command goes on, false with the exit status otherwise. */
static bool parse(const neap_command *command, const struct option *options, int argc, char **argv,
                  arguments *ret_arguments, int *ret_status) {
    int code;
    long number;
    while ((code = getopt_long(argc, argv, ":h", options, NULL)) != -1) {
        int status = 0;
        if (neap_option_basic(command, code, argv, ret_status)) return false;
        if (code == OPT_JSON) ret_arguments->as_json = true;
        if (code == OPT_ALL) ret_arguments->all = true;
        if (code == OPT_ONLY) status = parse_only(optarg, &ret_arguments->only);
        if (code == OPT_PID) {
            status = neap_option_number("--pid", optarg, 1, INT32_MAX, &number);
            if (!status) ret_arguments->pid = (int)number;
        }
        if (status) {
            *ret_status = status;
            return false;
        }
    }
    if (ret_arguments->all && ret_arguments->pid) {
        *ret_status = neap_cli_error(NEAP_EXIT_USAGE, "give one of the two",
                                     "--all and --pid exclude each other");
        return false;
    }
    return true;
}

static int no_more_arguments(const neap_command *command, int argc, char **argv) {
    if (optind >= argc) return 0;
    char remedy[96];
    snprintf(remedy, sizeof remedy, "see neap %s --help", command->name);
    return neap_cli_error(NEAP_EXIT_USAGE, remedy, "%s: one argument too many", argv[optind]);
}

/* The instances meant, or the status of the error printed. */
static int choose(const arguments *args, neap_instances *ret_instances) {
    if (!args->all) return neap_instances_pick(args->pid, ret_instances);
    const int err = neap_instances_load(ret_instances);
    if (!err) return 0;
    return neap_cli_error(NEAP_EXIT_FAILED, NULL, "control sockets: %s", neap_strerror(err));
}

static json_t *stats_json(const neap_instances *instances) {
    json_t *list = json_array();
    for (size_t i = 0; i < instances->n; i++)
        json_array_append(list, instances->items[i].stat);
    return json_pack("{s:o}", "instances", list);
}

/* An instance that did not answer was not listed, and nothing was done to it. */
static int with_silent(const neap_instances *instances, int status) {
    return status == NEAP_EXIT_OK && instances->n_silent > 0 ? NEAP_EXIT_FAILED : status;
}

/* For --all: nothing to act on is a failure, unlike an empty list. */
static int nobody(const neap_instances *instances) {
    if (instances->n > 0 || instances->n_silent > 0) return NEAP_EXIT_OK;
    return neap_cli_error(NEAP_EXIT_FAILED, "start one with neap serve or neap run",
                          "no instance is running");
}

/* Ends a command that did something to each instance; what was done is shown even if one failed. */
static int finish_list(const arguments *args, json_t *list, int status) {
    if (!args->as_json) {
        json_decref(list);
        return neap_cli_finish(status);
    }
    const int printed = neap_cli_print_json(json_pack("{s:o}", "instances", list));
    return status ? status : printed;
}

/* ---- ps ---- */

static const neap_command ps_command = {
    "ps",
    "usage: neap ps [--json]\n"
    "\n"
    "Lists the running instances: what they hold in memory, compressed in memory and on disk.\n"
    "\n"
    "  --json      one JSON document on standard output, as neap stat --json\n"
    "  -h, --help  this text\n"
    "  --version   the version\n"};

int neap_cmd_ps(int argc, char **argv) {
    static const struct option options[] = {
        NEAP_OPTIONS_BASIC, {"json", no_argument, NULL, OPT_JSON}, {0}};
    arguments args = {.all = true};
    int status;
    if (!parse(&ps_command, options, argc, argv, &args, &status)) return status;
    if ((status = no_more_arguments(&ps_command, argc, argv))) return status;
    neap_instances instances = {0};
    if ((status = choose(&args, &instances))) return status;
    if (args.as_json) {
        status = neap_cli_print_json(stats_json(&instances));
    } else {
        neap_instances_print(&instances, stdout);
        status = neap_cli_finish(NEAP_EXIT_OK);
    }
    status = with_silent(&instances, status);
    neap_instances_free(&instances);
    return status;
}

/* ---- stat ---- */

static void print_counters(const json_t *stat) {
    const json_t *request = json_object_get(stat, "last_request");
    printf("  counters    %llu evictions (%s), %llu restores (%s from storage, %s from memory),\n"
           "              %.1f ms waited, %llu errors\n",
           (unsigned long long)neap_instance_count(stat, "counters", "evictions"),
           neap_cli_size(neap_instance_count(stat, "counters", "bytes_evicted")),
           (unsigned long long)neap_instance_count(stat, "counters", "restores"),
           neap_cli_size(neap_instance_count(stat, "counters", "bytes_restored_storage")),
           neap_cli_size(neap_instance_count(stat, "counters", "bytes_restored_memory")),
           (double)neap_instance_count(stat, "counters", "wait_ns") / 1e6,
           (unsigned long long)neap_instance_count(stat, "counters", "errors"));
    printf("  last        first token after %.1f ms, restoring %.1f ms (from storage %.1f ms,\n"
           "              from memory %.1f ms), %.0f %% of it overlapped\n",
           json_number_value(json_object_get(request, "ttft_ms")),
           json_number_value(json_object_get(request, "restore_ms")),
           json_number_value(json_object_get(request, "storage_ms")),
           json_number_value(json_object_get(request, "memory_ms")),
           100 * json_number_value(json_object_get(request, "overlap")));
}

static void print_attention(const json_t *stat) {
    const uint64_t ours = neap_instance_count(stat, "attention", "nodes");
    const uint64_t host = neap_instance_count(stat, "attention", "nodes_host");
    if (ours + host > 0)
        printf("  attention   %.0f %% by our kernels (%s)\n",
               100.0 * (double)ours / (double)(ours + host),
               neap_instance_text(json_object_get(stat, "attention"), "kernel"));
}

static void print_pressure(const json_t *pressure) {
    const char *sources = neap_instance_text(pressure, "sources");
    if (!pressure) return;
    printf("  pressure    %s%s%s%s, released by itself %s in %llu times, brought back %s\n",
           neap_instance_text(pressure, "level"), *sources ? " (" : "", sources,
           *sources ? ")" : "",
           neap_cli_size(neap_instance_count(pressure, NULL, "released_bytes")),
           (unsigned long long)neap_instance_count(pressure, NULL, "releases"),
           neap_cli_size(neap_instance_count(pressure, NULL, "restored_bytes")));
}

static void print_write_behind(const json_t *stat) {
    const json_t *writes = json_object_get(stat, "write_behind");
    const char *state = neap_instance_text(writes, "state");
    if (!writes || strcmp(state, "off") == 0) return;
    printf("  write-behind  %s, %llu clean chunks, %s written today\n", state,
           (unsigned long long)neap_instance_count(writes, NULL, "clean_chunks"),
           neap_cli_size(neap_instance_count(writes, NULL, "bytes_today")));
}

static void print_profile(const json_t *stat) {
    const json_t *profile = json_object_get(stat, "profile");
    if (!profile) return;
    printf("  throughput  %.2f GB/s from storage, %.2f GB/s decoding (%s)\n",
           json_number_value(json_object_get(profile, "read_gbps")),
           json_number_value(json_object_get(profile, "decode_gbps")),
           neap_instance_text(profile, "source"));
}

static void print_codec(const json_t *stat) {
    const char *note = neap_instance_text(stat, "codec_note");
    const double ratio = json_number_value(json_object_get(stat, "ratio"));
    const double error = json_number_value(json_object_get(stat, "error"));
    const uint64_t left = neap_instance_count(stat, "units", "klt_left");
    const uint64_t refused = neap_instance_count(stat, "units", "klt_refused");
    const uint64_t fits = neap_instance_count(stat, "bytes", "fits");
    const char *kv = neap_instance_text(stat, "kv");
    const bool is_coded = strcmp(kv, "f16") != 0 && strcmp(kv, "?") != 0;
    /* f16 is not a codec: the note is about --kv, which could not be had. */
    const bool of_kv = is_coded || strncmp(note, "f16 ", 4) == 0;
    if (*note && strcmp(note, "?") != 0)
        printf("  %-10s  %s%s\n", of_kv ? "kv" : "codec", is_coded ? "held and read as " : "",
               note);
    if (fits > 0) printf("  fits        %s in memory\n", neap_cli_size(fits));
    if (ratio > 0) printf("  coded       %.2f times smaller", ratio);
    if (ratio > 0 && error > 0)
        printf(", %s's error %.2f of what is expected at most", neap_instance_text(stat, "codec"),
               error);
    if (ratio > 0 && left > 0)
        printf(", %llu chunks %s", (unsigned long long)left, is_coded ? "not by it" : "by q8");
    if (ratio > 0 && refused > 0)
        printf(" (%llu of them for its error)", (unsigned long long)refused);
    if (ratio > 0) putchar('\n');
}

static void print_stat(const json_t *stat) {
    printf("%s (pid %llu), %s\n", neap_instance_text(stat, "program"),
           (unsigned long long)neap_instance_count(stat, NULL, "pid"),
           neap_instance_text(stat, "state"));
    printf("  model       %s\n", neap_instance_text(stat, "model"));
    printf("  context     %llu of %llu tokens in %llu contexts\n",
           (unsigned long long)neap_instance_count(stat, NULL, "tokens"),
           (unsigned long long)neap_instance_count(stat, NULL, "n_ctx"),
           (unsigned long long)neap_instance_count(stat, NULL, "n_contexts"));
    printf("  weights     %s of %s in memory, %llu of %llu units evicted\n",
           neap_cli_size(neap_instance_count(stat, "bytes", "weights_resident")),
           neap_cli_size(neap_instance_count(stat, "bytes", "weights_total")),
           (unsigned long long)neap_instance_count(stat, "units", "weights_evicted"),
           (unsigned long long)neap_instance_count(stat, "units", "weights"));
    printf("  KV cache    %s of %s in memory, %llu of %llu units evicted:\n"
           "              %s compressed in memory, %s on storage\n",
           neap_cli_size(neap_instance_count(stat, "bytes", "kv_resident")),
           neap_cli_size(neap_instance_count(stat, "bytes", "kv_total")),
           (unsigned long long)neap_instance_count(stat, "units", "kv_evicted"),
           (unsigned long long)neap_instance_count(stat, "units", "kv"),
           neap_cli_size(neap_instance_count(stat, "bytes", "kv_compressed_memory")),
           neap_cli_size(neap_instance_count(stat, "bytes", "kv_storage")));
    printf("  released    %s (stage %s, codec %s, policy %s)\n",
           neap_cli_size(neap_instance_count(stat, "bytes", "released")),
           neap_instance_text(stat, "stage"), neap_instance_text(stat, "codec"),
           neap_instance_text(stat, "policy"));
    print_codec(stat);
    print_attention(stat);
    print_profile(stat);
    print_counters(stat);
    print_pressure(json_object_get(stat, "pressure"));
    print_write_behind(stat);
    const uint64_t lost = neap_instance_count(stat, "units", "lost");
    if (lost) printf("  lost        %llu units\n", (unsigned long long)lost);
    const char *error = neap_instance_text(stat, "last_error");
    if (*error && strcmp(error, "?") != 0) printf("  last error  %s\n", error);
}

static const neap_command stat_command = {
    "stat", "usage: neap stat [--pid P | --all] [--json]\n"
            "\n"
            "Shows the counters of a running instance; without --pid, of the only one.\n"
            "neap-stat(1) has the meaning of each.\n"
            "\n"
            "  --pid P     the instance of this process\n"
            "  --all       every instance\n"
            "  --json      one JSON document on standard output\n"
            "  -h, --help  this text\n"
            "  --version   the version\n"};

int neap_cmd_stat(int argc, char **argv) {
    static const struct option options[] = {NEAP_OPTIONS_BASIC,
                                            {"json", no_argument, NULL, OPT_JSON},
                                            {"pid", required_argument, NULL, OPT_PID},
                                            {"all", no_argument, NULL, OPT_ALL},
                                            {0}};
    arguments args = {0};
    int status;
    if (!parse(&stat_command, options, argc, argv, &args, &status)) return status;
    if ((status = no_more_arguments(&stat_command, argc, argv))) return status;
    neap_instances instances = {0};
    if ((status = choose(&args, &instances))) return status;
    if (args.as_json) {
        status = neap_cli_print_json(stats_json(&instances));
    } else {
        for (size_t i = 0; i < instances.n; i++)
            print_stat(instances.items[i].stat);
        status = neap_cli_finish(NEAP_EXIT_OK);
    }
    status = with_silent(&instances, status);
    neap_instances_free(&instances);
    return status;
}

/* ---- evict ---- */

static void print_evicted(int pid, bool name_pid, const neap_evict_result *result) {
    if (name_pid) printf("pid %d: ", pid);
    printf("released %s", neap_cli_size(result->released_bytes));
    if (result->asked_bytes < INT64_MAX) printf(" of %s asked", neap_cli_size(result->asked_bytes));
    printf(" in %.0f ms:", (double)result->duration_ns / 1e6);
    printf(" weights %s dropped, KV %s to memory, %s to storage",
           neap_cli_size(result->weights_bytes), neap_cli_size(result->kv_memory_bytes),
           neap_cli_size(result->kv_storage_bytes));
    if (result->scratch_bytes) printf(", compute buffers %s", neap_cli_size(result->scratch_bytes));
    if (result->exhausted) fputs("; no more could be released", stdout);
    putchar('\n');
    if (result->storage_error)
        neap_cli_warn("pid %d: the swap file took no more: %s; what could not be stored stays in "
                      "memory (make room, or see --swap-dir and --swap-limit)",
                      pid, neap_strerror(result->storage_error));
}

static json_t *evicted_json(int pid, const neap_evict_result *result) {
    const uint64_t asked = result->asked_bytes > INT64_MAX ? INT64_MAX : result->asked_bytes;
    return json_pack(
        "{s:i, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:b, s:o}", "pid", pid, "asked_bytes",
        (json_int_t)asked, "released_bytes", (json_int_t)result->released_bytes, "weights_bytes",
        (json_int_t)result->weights_bytes, "kv_memory_bytes", (json_int_t)result->kv_memory_bytes,
        "kv_storage_bytes", (json_int_t)result->kv_storage_bytes, "scratch_bytes",
        (json_int_t)result->scratch_bytes, "duration_ns", (json_int_t)result->duration_ns,
        "exhausted", result->exhausted, "storage_error",
        result->storage_error ? json_string(neap_strerror(result->storage_error)) : json_null());
}

/* Parses SIZE. A share above 100 % asks for more than there is: all of it. */
static int parse_size(const char *value, neap_evict_request *request) {
    const int err = neap_size_parse(value, &request->bytes, &request->permille);
    if (err == -ERANGE)
        return neap_cli_error(NEAP_EXIT_USAGE, "give a positive size that a machine can have",
                              "%s: neither negative nor so large", value);
    if (err)
        return neap_cli_error(NEAP_EXIT_USAGE, "write 512M, 1.5G, plain bytes or 50%",
                              "%s: not a size", value);
    if (request->bytes == 0 && request->permille == 0)
        return neap_cli_error(NEAP_EXIT_USAGE, "give a positive size",
                              "%s: nothing would be released", value);
    if (request->permille > 1000) {
        request->permille = 0;
        request->bytes = UINT64_MAX;
    }
    return 0;
}

/* Evicts from one after the other until the size is reached (a share: that share of each). */
static int evict_from(neap_instances *instances, neap_evict_request request,
                      const arguments *args) {
    json_t *list = json_array();
    int status = NEAP_EXIT_OK;
    neap_instances_sort(instances);
    for (size_t i = 0; i < instances->n && (request.bytes || request.permille); i++) {
        const int pid = instances->items[i].pid;
        neap_evict_result result = {0};
        char *message = NULL;
        neap_progress_start("evicting");
        const int err = neap_instance_evict(pid, &request, &result, &message);
        neap_progress_stop();
        if (err) {
            status = neap_cli_error(NEAP_EXIT_FAILED, NULL, "pid %d: nothing released: %s", pid,
                                    message ? message : neap_strerror(err));
            free(message);
            continue;
        }
        if (args->as_json)
            json_array_append_new(list, evicted_json(pid, &result));
        else
            print_evicted(pid, args->all, &result);
        if (request.bytes != UINT64_MAX)
            request.bytes -=
                result.released_bytes < request.bytes ? result.released_bytes : request.bytes;
    }
    return finish_list(args, list, status);
}

static const neap_command evict_command = {
    "evict",
    "usage: neap evict [--pid P | --all] [--only weights|kv] [--json] SIZE\n"
    "\n"
    "Gives at least SIZE of an instance's memory back; without --pid, of the only one. SIZE is\n"
    "512M, 1.5G, plain bytes, or a share like 50% of what can be evicted when everything is in\n"
    "memory. The next request brings back what it needs.\n"
    "\n"
    "  --pid P            the instance of this process\n"
    "  --all              every instance, the largest idle one first, until SIZE is reached\n"
    "  --only weights|kv  only weights, or only KV cache\n"
    "  --json             one JSON document on standard output\n"
    "  -h, --help         this text\n"
    "  --version          the version\n"};

int neap_cmd_evict(int argc, char **argv) {
    static const struct option options[] = {NEAP_OPTIONS_BASIC,
                                            {"json", no_argument, NULL, OPT_JSON},
                                            {"pid", required_argument, NULL, OPT_PID},
                                            {"all", no_argument, NULL, OPT_ALL},
                                            {"only", required_argument, NULL, OPT_ONLY},
                                            {0}};
    arguments args = {.only = NEAP_ONLY_ALL};
    int status;
    if (!parse(&evict_command, options, argc, argv, &args, &status)) return status;
    if (optind >= argc)
        return neap_cli_error(NEAP_EXIT_USAGE, "see neap evict --help", "evict: how much?");
    neap_evict_request request = {.only = args.only};
    if ((status = parse_size(argv[optind], &request))) return status;
    optind++;
    if ((status = no_more_arguments(&evict_command, argc, argv))) return status;
    neap_instances instances = {0};
    if ((status = choose(&args, &instances))) return status;
    if ((status = nobody(&instances))) return status;
    status = with_silent(&instances, evict_from(&instances, request, &args));
    neap_instances_free(&instances);
    return status;
}

/* ---- restore ---- */

static const neap_command restore_command = {
    "restore",
    "usage: neap restore [--pid P | --all] [--json]\n"
    "\n"
    "Brings everything back now, before a request has to wait for it; without --pid, of the only\n"
    "running instance.\n"
    "\n"
    "  --pid P     the instance of this process\n"
    "  --all       every instance\n"
    "  --json      one JSON document on standard output\n"
    "  -h, --help  this text\n"
    "  --version   the version\n"};

static int restore_one(int pid, const arguments *args, json_t *list) {
    uint64_t bytes = 0, ns = 0;
    char *message = NULL;
    neap_progress_start("restoring");
    const int err = neap_instance_restore(pid, &bytes, &ns, &message);
    neap_progress_stop();
    if (err) {
        neap_cli_error(NEAP_EXIT_FAILED, "neap stat tells what is lost",
                       "pid %d: not all could be brought back: %s", pid,
                       message ? message : neap_strerror(err));
        free(message);
        return NEAP_EXIT_FAILED;
    }
    if (args->as_json) {
        json_array_append_new(list, json_pack("{s:i, s:I, s:I}", "pid", pid, "bytes",
                                              (json_int_t)bytes, "duration_ns", (json_int_t)ns));
        return NEAP_EXIT_OK;
    }
    if (args->all) printf("pid %d: ", pid);
    printf("restored %s in %.0f ms\n", neap_cli_size(bytes), (double)ns / 1e6);
    return NEAP_EXIT_OK;
}

int neap_cmd_restore(int argc, char **argv) {
    static const struct option options[] = {NEAP_OPTIONS_BASIC,
                                            {"json", no_argument, NULL, OPT_JSON},
                                            {"pid", required_argument, NULL, OPT_PID},
                                            {"all", no_argument, NULL, OPT_ALL},
                                            {0}};
    arguments args = {0};
    int status;
    if (!parse(&restore_command, options, argc, argv, &args, &status)) return status;
    if ((status = no_more_arguments(&restore_command, argc, argv))) return status;
    neap_instances instances = {0};
    if ((status = choose(&args, &instances))) return status;
    if ((status = nobody(&instances))) return status;
    json_t *list = json_array();
    for (size_t i = 0; i < instances.n; i++) {
        const int failed = restore_one(instances.items[i].pid, &args, list);
        if (failed) status = failed;
    }
    status = with_silent(&instances, status);
    neap_instances_free(&instances);
    return finish_list(&args, list, status);
}
