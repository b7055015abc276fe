/* power.c - see power.h. The power supplies of the kernel (sysfs, class power_supply): a battery
 * with scope "Device" is that of a mouse or the like. */
#include "power.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* The first line of an attribute, "" when there is none. */
static void read_attribute(int folder, const char *supply, const char *name, char *ret_text,
                           size_t cap) {
    char path[NAME_MAX + 32];
    snprintf(path, sizeof path, "%s/%s", supply, name);
    const int fd = openat(folder, path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    const ssize_t n = fd >= 0 ? read(fd, ret_text, cap - 1) : 0;
    if (fd >= 0) close(fd);
    ret_text[n > 0 ? n : 0] = '\0';
    ret_text[strcspn(ret_text, "\n")] = '\0';
}

bool neap_on_battery(const char *root) {
    char path[PATH_MAX], text[32];
    const int len = snprintf(path, sizeof path, "%s/sys/class/power_supply", root);
    DIR *folder = len > 0 && (size_t)len < sizeof path ? opendir(path) : NULL;
    if (!folder) return false;
    bool discharges = false, is_fed = false;
    for (const struct dirent *entry; (entry = readdir(folder));) {
        if (entry->d_name[0] == '.') continue;
        read_attribute(dirfd(folder), entry->d_name, "type", text, sizeof text);
        if (strcmp(text, "Battery") == 0) {
            read_attribute(dirfd(folder), entry->d_name, "scope", text, sizeof text);
            if (strcmp(text, "Device") == 0) continue;
            read_attribute(dirfd(folder), entry->d_name, "status", text, sizeof text);
            discharges = discharges || strcmp(text, "Discharging") == 0;
        } else {
            read_attribute(dirfd(folder), entry->d_name, "online", text, sizeof text);
            is_fed = is_fed || (text[0] != '\0' && strcmp(text, "0") != 0);
        }
    }
    closedir(folder);
    return discharges && !is_fed;
}
