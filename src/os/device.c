/* device.c - see device.h. */
#include "device.h"

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/utsname.h>

#include "fault.h"

/* The folder or the next one above that exists, with no links in it; malloc'd. */
static char *existing(const char *folder) {
    char path[PATH_MAX];
    const size_t len = strlen(folder);
    if (len >= sizeof path) return NULL;
    memcpy(path, folder, len + 1);
    for (;;) {
        char *real = realpath(path[0] ? path : ".", NULL);
        if (real || (errno != ENOENT && errno != ENOTDIR)) return real;
        if (!path[0]) return NULL;
        char *slash = strrchr(path, '/');
        const bool is_root = slash == path && slash[1];
        (slash ? slash : path)[is_root ? 1 : 0] = '\0';
    }
}

static bool is_octal(char c) {
    return c >= '0' && c <= '7';
}

/* Blanks and the like are written as \040. */
static void unescape(char *text) {
    char *out = text;
    for (const char *in = text; *in; out++) {
        if (in[0] == '\\' && is_octal(in[1]) && is_octal(in[2]) && is_octal(in[3])) {
            *out = (char)((in[1] - '0') * 64 + (in[2] - '0') * 8 + (in[3] - '0'));
            in += 4;
        } else {
            *out = *in++;
        }
    }
    *out = '\0';
}

static bool lies_under(const char *path, const char *mount) {
    const size_t len = strlen(mount);
    if (strcmp(mount, "/") == 0) return true;
    return strncmp(path, mount, len) == 0 && (path[len] == '\0' || path[len] == '/');
}

/* One line of mountinfo; takes source and type of a mount that the path lies under and that is at
 * least as deep as *inout_depth. */
static void take_mount(char *line, const char *path, size_t *inout_depth, neap_device *device) {
    char *saved, *mount = NULL, *field = strtok_r(line, " \n", &saved);
    for (int i = 0; field && i < 4; i++)
        mount = field = strtok_r(NULL, " \n", &saved);
    while (field && strcmp(field, "-") != 0)
        field = strtok_r(NULL, " \n", &saved);
    char *type = field ? strtok_r(NULL, " \n", &saved) : NULL;
    char *source = type ? strtok_r(NULL, " \n", &saved) : NULL;
    if (!source) return;
    unescape(mount);
    unescape(source);
    if (!lies_under(path, mount) || strlen(mount) < *inout_depth) return;
    *inout_depth = strlen(mount);
    snprintf(device->source, sizeof device->source, "%s", source);
    snprintf(device->fstype, sizeof device->fstype, "%s", type);
}

static void find_mount(const char *path, neap_device *device) {
    FILE *file = fopen("/proc/self/mountinfo", "re");
    if (!file) return;
    char *line = NULL;
    size_t cap = 0, depth = 0;
    while (getline(&line, &cap, file) >= 0)
        take_mount(line, path, &depth, device);
    free(line);
    fclose(file);
}

static void find_cpu(neap_device *device) {
    static const char *const keys[] = {"model name", "Model", "Hardware", "uarch"};
    FILE *file = fopen("/proc/cpuinfo", "re");
    if (!file) return;
    char line[512];
    while (fgets(line, sizeof line, file)) {
        for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
            const size_t len = strlen(keys[i]);
            char *colon = strchr(line, ':');
            if (strncmp(line, keys[i], len) != 0 || !colon) continue;
            colon += strspn(colon + 1, " \t") + 1;
            colon[strcspn(colon, "\n")] = '\0';
            snprintf(device->cpu, sizeof device->cpu, "%.*s", (int)sizeof device->cpu - 1, colon);
            fclose(file);
            return;
        }
    }
    fclose(file);
}

/* Names go into JSON, which takes no bytes that are not UTF-8. */
static void plain(char *text) {
    for (; *text; text++)
        if ((unsigned char)*text < 0x20 || (unsigned char)*text > 0x7e) *text = '?';
}

int neap_device_identify(const char *folder, neap_device *ret_device) {
    int err = NEAP_FAULT("device.identify");
    if (err) return err;
    neap_device device = {"?", "?", "?", "?", "?"};
    char *path = existing(folder);
    if (!path) return errno ? -errno : -ENAMETOOLONG;
    struct stat st;
    if (stat(path, &st) == 0)
        snprintf(device.number, sizeof device.number, "%u:%u", major(st.st_dev), minor(st.st_dev));
    find_mount(path, &device);
    find_cpu(&device);
    struct utsname name;
    if (uname(&name) == 0)
        snprintf(device.kernel, sizeof device.kernel, "%.60s %.30s", name.release, name.machine);
    free(path);
    plain(device.source);
    plain(device.fstype);
    plain(device.kernel);
    plain(device.cpu);
    *ret_device = device;
    return 0;
}
