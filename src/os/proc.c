/* proc.c - see proc.h. The only reader of XDG_RUNTIME_DIR, XDG_CACHE_HOME and HOME. */
#include "proc.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pwd.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fault.h"

/* Reads "Name:   123 kB" lines of a /proc file into values (bytes); -ENOENT if one is missing. */
static int read_kb_fields(const char *path, const char *const *names, uint64_t *values, size_t n) {
    FILE *file = fopen(path, "re");
    if (!file) return -errno;
    char line[256];
    size_t found = 0;
    while (found < n && fgets(line, sizeof line, file)) {
        char *colon = strchr(line, ':');
        if (!colon) continue;
        *colon = '\0';
        for (size_t i = 0; i < n; i++) {
            if (strcmp(line, names[i]) != 0) continue;
            values[i] = strtoull(colon + 1, NULL, 10) * 1024;
            found++;
        }
    }
    const int err = ferror(file) ? -EIO : 0;
    fclose(file);
    return err ? err : found == n ? 0 : -ENOENT;
}

int neap_proc_memory_read(int pid, neap_proc_memory *ret_memory) {
    static const char *const names[] = {"Pss_Anon", "Pss_File", "Pss_Shmem", "SwapPss"};
    char path[64];
    uint64_t values[4] = {0};
    if (pid == 0)
        snprintf(path, sizeof path, "/proc/self/smaps_rollup");
    else
        snprintf(path, sizeof path, "/proc/%d/smaps_rollup", pid);
    const int err = read_kb_fields(path, names, values, 4);
    if (err) return err;
    *ret_memory = (neap_proc_memory){values[0], values[1], values[2], values[3]};
    return 0;
}

int neap_mem_available(uint64_t *ret_available, uint64_t *ret_total) {
    static const char *const names[] = {"MemAvailable", "MemTotal"};
    uint64_t values[2] = {0};
    const int err = read_kb_fields("/proc/meminfo", names, values, 2);
    if (err) return err;
    *ret_available = values[0];
    *ret_total = values[1];
    return 0;
}

int neap_proc_self(void) {
    return (int)getpid();
}

uint32_t neap_cores(void) {
    cpu_set_t mine;
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    const int n = sched_getaffinity(0, sizeof mine, &mine) == 0 ? CPU_COUNT(&mine) : (int)online;
    return n > 0 ? (uint32_t)n : 1;
}

bool neap_proc_alive(int pid) {
    return pid > 0 && (kill(pid, 0) == 0 || errno == EPERM);
}

static int copy_text(char *to, size_t cap, const char *from) {
    const size_t len = strlen(from);
    if (len >= cap) return -ENAMETOOLONG;
    memcpy(to, from, len + 1);
    return 0;
}

int neap_make_dirs(const char *path, unsigned mode) {
    int err = NEAP_FAULT("file.mkdir");
    if (err) return err;
    char part[PATH_MAX];
    const size_t len = strlen(path);
    if (len == 0) return -ENOENT;
    if (len >= sizeof part) return -ENAMETOOLONG;
    memcpy(part, path, len + 1);
    for (char *slash = part + 1; slash;) {
        slash = strchr(slash, '/');
        if (slash) *slash = '\0';
        if (mkdir(part, (mode_t)mode) != 0 && errno != EEXIST) {
            const int failure = -errno;
            struct stat st; /* EROFS, EACCES for what is there already is no failure */
            if (stat(part, &st) != 0) return failure;
        }
        if (slash) *slash++ = '/';
    }
    struct stat st;
    if (stat(path, &st) != 0) return -errno;
    return S_ISDIR(st.st_mode) ? 0 : -ENOTDIR;
}

/* A directory of ours that no other user can enter. */
static int make_private_dir(const char *path) {
    const int err = neap_make_dirs(path, 0700);
    if (err) return err;
    struct stat st;
    if (lstat(path, &st) != 0) return -errno;
    if (!S_ISDIR(st.st_mode) || st.st_uid != geteuid()) return -EPERM;
    if ((st.st_mode & 077) != 0 && chmod(path, 0700) != 0) return -errno;
    return 0;
}

int neap_runtime_dir(char *ret_path, size_t cap) {
    char base[PATH_MAX - 8], path[PATH_MAX];
    const char *xdg = getenv("XDG_RUNTIME_DIR");
    struct stat st;
    if (xdg && xdg[0] == '/') {
        if (copy_text(base, sizeof base, xdg) != 0) return -ENAMETOOLONG;
    } else {
        snprintf(base, sizeof base, "/run/user/%u", (unsigned)geteuid());
        if (stat(base, &st) != 0 || !S_ISDIR(st.st_mode)) {
            /* In a folder that everybody can write to, ours must be proved ours. */
            snprintf(base, sizeof base, "/tmp/neap-%u", (unsigned)geteuid());
            const int err = make_private_dir(base);
            if (err) return err;
        }
    }
    snprintf(path, sizeof path, "%s/neap", base);
    const int err = make_private_dir(path);
    if (err) return err;
    return copy_text(ret_path, cap, path);
}

int neap_cache_dir(char *ret_path, size_t cap) {
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    struct passwd entry, *found = NULL;
    char names[4096], path[PATH_MAX];
    int len;
    if (xdg && xdg[0] == '/') {
        len = snprintf(path, sizeof path, "%s/neap", xdg);
    } else {
        if (!home || home[0] != '/') {
            const int err = getpwuid_r(geteuid(), &entry, names, sizeof names, &found);
            if (!found) return err ? -err : -ENOENT;
            home = entry.pw_dir;
        }
        len = snprintf(path, sizeof path, "%s/.cache/neap", home);
    }
    if (len < 0 || (size_t)len >= sizeof path) return -ENAMETOOLONG;
    return copy_text(ret_path, cap, path);
}

int neap_proc_open_path(int i, char *ret_path, size_t cap) {
    DIR *dir = opendir("/proc/self/fd");
    if (dir == NULL) {
        return -errno;
    }
    struct dirent *entry;
    int at = 0;
    while ((entry = readdir(dir)) != NULL && (entry->d_name[0] == '.' || at++ < i)) {
    }
    int err = entry != NULL ? 0 : -ENOENT;
    if (err == 0) {
        struct stat st;
        ssize_t len = readlinkat(dirfd(dir), entry->d_name, ret_path, cap - 1);
        bool regular =
            len > 0 && fstatat(dirfd(dir), entry->d_name, &st, 0) == 0 && S_ISREG(st.st_mode);
        ret_path[regular ? len : 0] = '\0';
    }
    closedir(dir);
    return err;
}
