/* options.c - options that several commands take. The common ones become environment variables,
 * which is what the backend reads however a program came to load it. */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "cli.h"
#include "codec.h"
#include "klt_file.h"
#include "lowram_use.h"
#include "policy.h"
#include "proc.h"
#include "write_budget.h"

const char neap_common_help[] =
    "Options of elastic memory (each also an environment variable NEAP_...):\n"
    "  --codec NAME       how KV chunks are kept in memory: q8 (default: half the size),\n"
    "                     cachegen (less than a fifth), none (exact), klt or klt:RATIO\n"
    "                     (on storage, after `neap train MODEL`: a quarter to an eighth),\n"
    "                     lowram or lowram:RATIO (on storage, fitted to the context)\n"
    "  --kv klt[:RATIO]   decode from KV that is held compressed (after `neap train MODEL`),\n"
    "                     for contexts larger than memory; lowram[:RATIO]: likewise, fitted\n"
    "                     to the context instead of trained; default: f16\n"
    "  --kv-select N      of KV held so, generation reads the N tokens that a query asks\n"
    "                     for most, and not all: faster, an approximation; default: off\n"
    "  --swap-dir DIR     folder of the swap file (default: the cache folder's swap)\n"
    "  --swap-limit SIZE  most bytes in the swap file\n"
    "  --keep SIZE        never evict below this\n"
    "  --policy NAME      what is evicted, where to: hybrid (default), partial-offload, and\n"
    "                     others for experiments (neap-serve(1))\n"
    "  --attn NAME        attention: auto (default), neap (our kernels), opencl (on an\n"
    "                     OpenCL device that shares memory), ggml (the host's)\n"
    "  --pressure on|off  release by itself when memory gets short (default: on)\n"
    "  --write-behind WHEN  copy KV to the swap file while idle, so that evicting it is only\n"
    "                     dropping it: off (default), on (8 GiB a day at most, not on a\n"
    "                     battery), SIZE (so much a day), always (also on a battery)\n"
    "  --threads N        compute threads\n";

static int threads;

int neap_option_threads(void) {
    return threads;
}

uint32_t neap_option_n_threads(void) {
    return threads ? (uint32_t)threads : neap_cores();
}

bool neap_option_basic(const neap_command *command, int code, char **argv, int *ret_status) {
    const char *word = optind > 0 ? argv[optind - 1] : "";
    char remedy[96];
    snprintf(remedy, sizeof remedy, "see neap %s --help", command->name);
    switch (code) {
    case 'h':
        fputs(command->usage, stdout);
        *ret_status = neap_cli_finish(NEAP_EXIT_OK);
        return true;
    case NEAP_OPT_VERSION:
        printf("neap %s\n", NEAP_VERSION);
        *ret_status = neap_cli_finish(NEAP_EXIT_OK);
        return true;
    case ':':
        *ret_status = neap_cli_error(NEAP_EXIT_USAGE, remedy, "%s: needs a value", word);
        return true;
    case '?':
        if (optopt >= '0' && optopt <= '9')
            *ret_status = neap_cli_error(NEAP_EXIT_USAGE, "give a positive one",
                                         "-%c...: a size is never negative", optopt);
        else if (optopt > 0 && optopt < 256)
            *ret_status = neap_cli_error(NEAP_EXIT_USAGE, remedy, "-%c: unknown option", optopt);
        else
            *ret_status = neap_cli_error(NEAP_EXIT_USAGE, remedy, "%s: unknown option", word);
        return true;
    default:
        return false;
    }
}

int neap_option_number(const char *name, const char *value, long min, long max, long *ret_number) {
    char *end;
    errno = 0;
    const long number = strtol(value, &end, 10);
    if (*value == '\0' || *end != '\0' || errno || number < min || number > max)
        return neap_cli_error(NEAP_EXIT_USAGE, NULL, "%s %s: not a whole number from %ld to %ld",
                              name, value, min, max);
    *ret_number = number;
    return 0;
}

static int export(const char *variable, const char *value) {
    if (setenv(variable, value, 1) == 0) return 0;
    return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", variable, neap_strerror(-errno));
}

static int export_size(const char *option, const char *variable, const char *value) {
    uint64_t bytes = 0;
    const int err = neap_size_parse(value, &bytes, NULL);
    if (err == -ERANGE)
        return neap_cli_error(NEAP_EXIT_USAGE, NULL,
                              "%s %s: a size is neither negative nor so large", option, value);
    if (err)
        return neap_cli_error(NEAP_EXIT_USAGE, "write 512M, 1.5G or plain bytes",
                              "%s %s: not a size", option, value);
    /* To the backend 0 means "no limit"; one byte has room for no record. */
    if (bytes == 0 && strcmp(option, "--swap-limit") == 0) bytes = 1;
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)bytes);
    return export(variable, text);
}

static int export_write_behind(const char *value) {
    uint64_t bytes;
    bool on_battery;
    if (neap_write_behind_parse(value, &bytes, &on_battery) == 0)
        return export("NEAP_WRITE_BEHIND", value);
    return neap_cli_error(NEAP_EXIT_USAGE, "on, off, always, or the bytes of a day like 2G",
                          "--write-behind %s: none of these", value);
}

static void append_name(char *list, size_t cap, const char *name) {
    const size_t len = strlen(list);
    snprintf(list + len, cap - len, "%s%s", len ? ", " : "known: ", name);
}

int neap_option_ratio_error(const char *option, const char *value) {
    return neap_cli_error(NEAP_EXIT_USAGE, "as in 4 or 6.5", "%s %s: not a ratio from %g to %g",
                          option, value, NEAP_RATIO_MIN, NEAP_RATIO_MAX);
}

int neap_option_codec(const char *value) {
    double ratio;
    if (neap_codec_find(value) || neap_klt_option_parse(value, &ratio) ||
        neap_lowram_option_parse(value, &ratio))
        return export("NEAP_CODEC", value);
    if (strncmp(value, "klt:", 4) == 0 || strncmp(value, "lowram:", 7) == 0)
        return neap_option_ratio_error("--codec", value);
    char known[256] = "";
    for (size_t i = 0; neap_codec_at(i); i++)
        append_name(known, sizeof known, neap_codec_at(i)->name);
    append_name(known, sizeof known, "klt, klt:RATIO, lowram, lowram:RATIO");
    return neap_cli_error(NEAP_EXIT_USAGE, known, "--codec %s: no such codec", value);
}

static int export_kv(const char *value) {
    double ratio;
    if (strcmp(value, "f16") == 0 || neap_klt_option_parse(value, &ratio) ||
        neap_lowram_option_parse(value, &ratio))
        return export("NEAP_KV", value);
    if (strncmp(value, "klt:", 4) == 0 || strncmp(value, "lowram:", 7) == 0)
        return neap_option_ratio_error("--kv", value);
    return neap_cli_error(NEAP_EXIT_USAGE,
                          "this one knows f16, klt, klt:RATIO, lowram, lowram:RATIO",
                          "--kv %s: not in this version", value);
}

static int export_select(const char *value) {
    long n = 0;
    const bool off = strcmp(value, "off") == 0;
    const int status = off ? 0 : neap_option_number("--kv-select", value, 8, 1 << 24, &n);
    return status ? status : export("NEAP_KV_SELECT", value);
}

int neap_option_policy(const char *value) {
    if (neap_policy_find(value)) return export("NEAP_POLICY", value);
    char known[256] = "";
    for (size_t i = 0; neap_policy_at(i); i++)
        append_name(known, sizeof known, neap_policy_at(i)->name);
    return neap_cli_error(NEAP_EXIT_USAGE, known, "--policy %s: no such policy", value);
}

int neap_option_attn(const char *value) {
    static const char *const known[] = {"auto", "ggml", "neap", "opencl"};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (strcmp(value, known[i]) == 0) return export("NEAP_ATTN", value);
    return neap_cli_error(NEAP_EXIT_USAGE, "this one knows auto, ggml, neap, opencl",
                          "--attn %s: not in this version", value);
}

/* Options whose other values come in a later version: only what holds anyway is taken. */
static int accept_only(const char *option, const char *value, const char *first,
                       const char *second) {
    if (strcmp(value, first) == 0 || (second && strcmp(value, second) == 0)) return 0;
    char remedy[64];
    snprintf(remedy, sizeof remedy, "this one knows %s%s%s", first, second ? ", " : "",
             second ? second : "");
    return neap_cli_error(NEAP_EXIT_USAGE, remedy, "%s %s: not in this version", option, value);
}

int neap_option_common(int code, const char *value) {
    long number = 0;
    int status;
    switch (code) {
    case NEAP_OPT_CODEC:
        return neap_option_codec(value);
    case NEAP_OPT_POLICY:
        return neap_option_policy(value);
    case NEAP_OPT_SWAP_DIR:
        if (*value == '\0')
            return neap_cli_error(NEAP_EXIT_USAGE, NULL, "--swap-dir: needs the name of a folder");
        return export("NEAP_SWAP_DIR", value);
    case NEAP_OPT_SWAP_LIMIT:
        return export_size("--swap-limit", "NEAP_SWAP_LIMIT", value);
    case NEAP_OPT_KEEP:
        return export_size("--keep", "NEAP_KEEP", value);
    case NEAP_OPT_ENCRYPT:
        return accept_only("--encrypt", value, "off", NULL);
    case NEAP_OPT_ATTN:
        return neap_option_attn(value);
    case NEAP_OPT_KV:
        return export_kv(value);
    case NEAP_OPT_KV_SELECT:
        return export_select(value);
    case NEAP_OPT_SESSION:
        return neap_cli_error(NEAP_EXIT_USAGE, "leave it out", "--session %s: not in this version",
                              value);
    case NEAP_OPT_PRESSURE:
        if (strcmp(value, "on") == 0 || strcmp(value, "off") == 0)
            return export("NEAP_PRESSURE", value);
        return neap_cli_error(NEAP_EXIT_USAGE, "on or off", "--pressure %s: neither", value);
    case NEAP_OPT_BEHIND:
        return export_write_behind(value);
    case NEAP_OPT_THREADS:
        status = neap_option_number("--threads", value, 1, 4096, &number);
        threads = (int)number;
        return status;
    default:
        return neap_cli_error(NEAP_EXIT_USAGE, NULL, "option %d: unknown", code);
    }
}

int neap_option_environment(void) {
    static const struct {
        const char *variable;
        int code;
    } known[] = {
        {"NEAP_CODEC", NEAP_OPT_CODEC},
        {"NEAP_KV", NEAP_OPT_KV},
        {"NEAP_KV_SELECT", NEAP_OPT_KV_SELECT},
        {"NEAP_POLICY", NEAP_OPT_POLICY},
        {"NEAP_SWAP_LIMIT", NEAP_OPT_SWAP_LIMIT},
        {"NEAP_KEEP", NEAP_OPT_KEEP},
        {"NEAP_ATTN", NEAP_OPT_ATTN},
        {"NEAP_PRESSURE", NEAP_OPT_PRESSURE},
        {"NEAP_WRITE_BEHIND", NEAP_OPT_BEHIND},
        {"NEAP_THREADS", NEAP_OPT_THREADS},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        const char *value = getenv(known[i].variable);
        /* The option has been taken already, and goes before the variable. */
        if (!value || !*value || (known[i].code == NEAP_OPT_THREADS && threads != 0)) continue;
        const int status = neap_option_common(known[i].code, value);
        if (status) {
            neap_cli_warn("the environment variable %s says so", known[i].variable);
            return status;
        }
    }
    return 0;
}
