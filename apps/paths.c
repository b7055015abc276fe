/* paths.c - what lies around the executable: build/bin/neap beside build/lib, or an installed
 * PREFIX/bin/neap beside PREFIX/lib/neap. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"

/* Folder of this executable; "." when the kernel does not say. */
static void own_folder(char path[NEAP_PATH_MAX]) {
    const ssize_t len = readlink("/proc/self/exe", path, NEAP_PATH_MAX - 1);
    path[len > 0 ? len : 0] = '\0';
    char *slash = strrchr(path, '/');
    if (slash)
        *slash = '\0';
    else
        memcpy(path, ".", sizeof ".");
}

static bool join(char path[NEAP_PATH_MAX], const char *folder, const char *rest) {
    return (size_t)snprintf(path, NEAP_PATH_MAX, "%s/%s", folder, rest) < NEAP_PATH_MAX;
}

void neap_path_program(const char *name, char path[NEAP_PATH_MAX]) {
    char folder[NEAP_PATH_MAX];
    own_folder(folder);
    if (!join(path, folder, name) || access(path, X_OK) != 0)
        snprintf(path, NEAP_PATH_MAX, "%s", name);
}

int neap_path_backend(char path[NEAP_PATH_MAX]) {
    static const char *const places[] = {"../lib/libggml-neap.so", "../lib/neap/libggml-neap.so"};
    char folder[NEAP_PATH_MAX], found[NEAP_PATH_MAX];
    own_folder(folder);
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        if (!join(found, folder, places[i]) || access(found, R_OK) != 0) continue;
        char *real = realpath(found, NULL);
        snprintf(path, NEAP_PATH_MAX, "%s", real ? real : found);
        free(real);
        return 0;
    }
    return neap_cli_error(NEAP_EXIT_FAILED, "build or install neap again, or set GGML_BACKEND_PATH",
                          "libggml-neap.so: not in %s/../lib", folder);
}

static int find(const char *const places[2], const char *name, char path[NEAP_PATH_MAX]) {
    char folder[NEAP_PATH_MAX], rest[256];
    own_folder(folder);
    for (size_t i = 0; i < 2; i++) {
        snprintf(rest, sizeof rest, "%s/%s", places[i], name);
        if (join(path, folder, rest) && access(path, R_OK) == 0) return 0;
    }
    return -ENOENT;
}

int neap_path_tool(const char *name, char path[NEAP_PATH_MAX]) {
    static const char *const places[] = {"../../tools", "../share/neap/tools"};
    return find(places, name, path);
}

int neap_path_share(const char *name, char path[NEAP_PATH_MAX]) {
    static const char *const places[] = {"../../share", "../share/neap"};
    return find(places, name, path);
}

static bool spin_count_is_ours;

void neap_path_leave_backend(void) {
    unsetenv("GGML_BACKEND_PATH");
    unsetenv("LLAMA_ARG_DEVICE");
    if (spin_count_is_ours) unsetenv("GOMP_SPINCOUNT");
}

int neap_path_load_backend(void) {
    const char *set = getenv("GGML_BACKEND_PATH");
    if (!set || !*set) {
        char path[NEAP_PATH_MAX];
        const int status = neap_path_backend(path);
        if (status) return status;
        if (setenv("GGML_BACKEND_PATH", path, 1) != 0)
            return neap_cli_error(NEAP_EXIT_FAILED, NULL, "GGML_BACKEND_PATH: %s",
                                  neap_strerror(-errno));
    }
    /* By default OpenMP's threads spin for a millisecond between operations and starve whatever
     * restores memory meanwhile. Not to spin at all (OMP_WAIT_POLICY=passive) halves the speed of
     * decoding on a quiet machine; a short spin costs nothing there, and with two other programs on
     * two cores it decodes 1.6 to 2.6 times as fast as the default. A user's own setting is kept.
     */
    if (!getenv("GOMP_SPINCOUNT") && !getenv("OMP_WAIT_POLICY")) {
        if (setenv("GOMP_SPINCOUNT", "1000", 0) != 0)
            return neap_cli_error(NEAP_EXIT_FAILED, NULL, "GOMP_SPINCOUNT: %s",
                                  neap_strerror(-errno));
        spin_count_is_ours = true;
    }
    if (setenv("LLAMA_ARG_DEVICE", "NEAP", 0) != 0)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "LLAMA_ARG_DEVICE: %s",
                              neap_strerror(-errno));
    return 0;
}
