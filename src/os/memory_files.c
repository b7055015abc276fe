/* memory_files.c - see memory_files.h.
 *
 * The group of the process is found as the kernel names it: its path in /proc/self/cgroup, below
 * the place where /proc/self/mountinfo says that hierarchy is mounted. A memory controller of v1 is
 * preferred when there is one: then v2 has none, but may still have memory.pressure.
 *
 * A group is full when nothing in it can be reclaimed: file pages that are not in use count as
 * available, as MemAvailable counts them for the machine, active ones by half. */
#include "memory_files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bytes.h"
#include "fault.h"

#define TEXT_MAX 8192         /* of a file that is read as a whole */
#define NO_LIMIT (1ull << 60) /* v1 writes 2^63 less a page */

typedef struct group_level {
    int usage_fd, limit_fd, high_fd, stat_fd; /* -1: none */
    char dir[PATH_MAX];
} group_level;

struct neap_memory_files {
    int meminfo_fd, stall_fd, group_stall_fd, own_fd; /* -1: none */
    int version;
    bool is_live;
    uint64_t own_sum; /* of /proc/self/cgroup at open */
    size_t n_levels;
    group_level levels[NEAP_GROUP_LEVELS];
    char root[PATH_MAX], root_dir[PATH_MAX], stall_path[PATH_MAX], group_stall_path[PATH_MAX];
};

/* ---- text ---- */

/* The whole file, cut at TEXT_MAX - 1; returns its length or -errno. */
static ssize_t read_text(int fd, char text[TEXT_MAX]) {
    size_t len = 0;
    if (fd < 0) return -ENOENT;
    const int err = NEAP_FAULT("memory.read");
    if (err) return err;
    while (len < TEXT_MAX - 1) {
        const ssize_t n = pread(fd, text + len, TEXT_MAX - 1 - len, (off_t)len);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return -errno;
        if (n == 0) break;
        len += (size_t)n;
    }
    text[len] = '\0';
    return (ssize_t)len;
}

/* The number after the line's first word; false: no such line. */
static bool field(const char *text, const char *name, uint64_t *ret_value) {
    const size_t len = strlen(name);
    for (const char *line = text; line; line = strchr(line, '\n'), line = line ? line + 1 : NULL) {
        if (strncmp(line, name, len) != 0 || (line[len] != ':' && line[len] != ' ')) continue;
        char *end;
        *ret_value = strtoull(line + len + 1, &end, 10);
        return end != line + len + 1;
    }
    return false;
}

/* "max" and what is too large to be a limit are 0. */
static uint64_t read_limit(int fd) {
    char text[TEXT_MAX];
    if (read_text(fd, text) <= 0) return 0;
    const uint64_t value = strtoull(text, NULL, 10);
    return value < NO_LIMIT ? value : 0;
}

static bool read_number(int fd, uint64_t *ret_value) {
    char text[TEXT_MAX], *end;
    if (read_text(fd, text) <= 0) return false;
    *ret_value = strtoull(text, &end, 10);
    return end != text;
}

/* "some avg10=12.34 ..." */
static uint32_t stall_permille(const char *text, const char *kind) {
    const char *line = strstr(text, kind);
    const char *value = line ? strstr(line, "avg10=") : NULL;
    if (!value) return 0;
    value += strlen("avg10=");
    uint32_t permille = 0;
    for (; *value >= '0' && *value <= '9' && permille < 1000; value++)
        permille = permille * 10 + (uint32_t)(*value - '0');
    permille *= 10;
    if (value[0] == '.' && value[1] >= '0' && value[1] <= '9')
        permille += (uint32_t)(value[1] - '0');
    return permille < 1000 ? permille : 1000;
}

static neap_memory_stall read_stall(int fd) {
    char text[TEXT_MAX];
    if (read_text(fd, text) <= 0) return (neap_memory_stall){0, 0};
    return (neap_memory_stall){stall_permille(text, "some "), stall_permille(text, "full ")};
}

/* Lines of a file of any length; those longer than a buffer are passed over. */
typedef struct line_reader {
    int fd;
    size_t len, at;
    char text[TEXT_MAX];
} line_reader;

static char *next_line(line_reader *r) {
    bool skipping = false;
    for (;;) {
        char *line = r->text + r->at;
        char *end = memchr(line, '\n', r->len - r->at);
        if (end) {
            *end = '\0';
            r->at = (size_t)(end - r->text) + 1;
            if (!skipping) return line;
            skipping = false;
            continue;
        }
        if (r->at == 0 && r->len == sizeof r->text) {
            skipping = true;
            r->len = 0;
        }
        memmove(r->text, line, r->len - r->at);
        r->len -= r->at;
        r->at = 0;
        const ssize_t n = read(r->fd, r->text + r->len, sizeof r->text - r->len);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return NULL;
        r->len += (size_t)n;
    }
}

/* ---- where the group is ---- */

static bool join(char out[PATH_MAX], const char *a, const char *b, const char *c) {
    const int n = snprintf(out, PATH_MAX, "%s%s%s", a, b, c);
    if (n >= 0 && n < PATH_MAX) return true;
    out[0] = '\0';
    return false;
}

static int open_under(const char *root, const char *path) {
    char whole[PATH_MAX];
    if (!join(whole, root, path, "")) return -ENAMETOOLONG;
    const int err = NEAP_FAULT("memory.open");
    if (err) return err;
    const int fd = open(whole, O_RDONLY | O_CLOEXEC);
    return fd >= 0 ? fd : -errno;
}

static bool has_word(const char *list, const char *word) {
    const size_t len = strlen(word);
    for (const char *at = list; (at = strstr(at, word)); at += len)
        if ((at == list || at[-1] == ',') && (at[len] == ',' || at[len] == '\0')) return true;
    return false;
}

/* The process's path in the hierarchy of the memory controller (v1) or in that of v2. */
static bool own_path(const char *root, bool v1, char ret_path[PATH_MAX]) {
    line_reader reader = {.fd = open_under(root, "/proc/self/cgroup")};
    bool found = false;
    if (reader.fd < 0) return false;
    for (char *line; !found && (line = next_line(&reader));) {
        char *controllers = strchr(line, ':');
        char *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path) continue;
        *path++ = '\0';
        const bool is_v2 = strcmp(line, "0:") == 0;
        if (v1 ? has_word(controllers + 1, "memory") : is_v2) found = join(ret_path, path, "", "");
    }
    close(reader.fd);
    return found;
}

/* Mountinfo writes space, tab, newline and backslash as \ooo. */
static void unescape(char *text) {
    char *out = text;
    for (const char *in = text; *in; out++) {
        if (in[0] == '\\' && in[1] >= '0' && in[1] <= '3' && in[2] >= '0' && in[2] <= '7' &&
            in[3] >= '0' && in[3] <= '7') {
            *out = (char)((in[1] - '0') * 64 + (in[2] - '0') * 8 + (in[3] - '0'));
            in += 4;
        } else {
            *out = *in++;
        }
    }
    *out = '\0';
}

/* "ID PARENT DEV ROOT PLACE OPTIONS [FIELDS] - TYPE SOURCE SUPEROPTIONS" */
static bool is_mount(char *line, bool v1, char **ret_root, char **ret_place) {
    char *rest = strstr(line, " - "), *words[6] = {0};
    if (!rest) return false;
    *rest = '\0';
    char *at = line, *after = rest + 3;
    for (size_t i = 0; i < 6; i++)
        words[i] = strsep(&at, " ");
    char *type = strsep(&after, " ");
    strsep(&after, " ");
    if (!words[4] || !type) return false;
    if (v1 ? strcmp(type, "cgroup") != 0 || !after || !has_word(after, "memory")
           : strcmp(type, "cgroup2") != 0)
        return false;
    *ret_root = words[3];
    *ret_place = words[4];
    unescape(*ret_root);
    unescape(*ret_place);
    return true;
}

/* Where the hierarchy is mounted, and the folder of the group of that path in it. */
static bool find_mount(const char *root, bool v1, const char *path, char ret_mount[PATH_MAX],
                       char ret_dir[PATH_MAX]) {
    line_reader reader = {.fd = open_under(root, "/proc/self/mountinfo")};
    bool found = false;
    if (reader.fd < 0) return false;
    for (char *line, *mount_root, *place; !found && (line = next_line(&reader));) {
        if (!is_mount(line, v1, &mount_root, &place)) continue;
        const size_t len = strcmp(mount_root, "/") == 0 ? 0 : strlen(mount_root);
        /* In a container only a part of the tree is mounted, and its top may be our group. */
        const bool is_below =
            strncmp(path, mount_root, len) == 0 && (path[len] == '/' || path[len] == '\0');
        const char *rest = is_below && strcmp(path + len, "/") != 0 ? path + len : "";
        found = join(ret_mount, root, place, "") && join(ret_dir, ret_mount, rest, "");
    }
    close(reader.fd);
    return found;
}

/* ---- levels ---- */

static int open_in(const char *dir, const char *name) {
    char path[PATH_MAX];
    if (!join(path, dir, "/", name)) return -1;
    const int fd = open_under("", path);
    return fd >= 0 ? fd : -1;
}

static void close_fd(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

static void close_level(group_level *level) {
    close_fd(&level->usage_fd);
    close_fd(&level->limit_fd);
    close_fd(&level->high_fd);
    close_fd(&level->stat_fd);
}

static uint64_t level_limit(const group_level *level) {
    const uint64_t limit = read_limit(level->limit_fd), high = read_limit(level->high_fd);
    return high > 0 && (high < limit || limit == 0) ? high : limit;
}

/* Takes the group of that folder in when it can be read and, above the first, has a limit. */
static void add_level(neap_memory_files *files, const char *dir) {
    if (files->n_levels == NEAP_GROUP_LEVELS) return;
    group_level *level = &files->levels[files->n_levels];
    const bool v1 = files->version == 1;
    level->usage_fd = open_in(dir, v1 ? "memory.usage_in_bytes" : "memory.current");
    level->limit_fd = open_in(dir, v1 ? "memory.limit_in_bytes" : "memory.max");
    level->high_fd = v1 ? -1 : open_in(dir, "memory.high");
    level->stat_fd = open_in(dir, "memory.stat");
    if (level->usage_fd < 0 || level->limit_fd < 0 ||
        (files->n_levels > 0 && level_limit(level) == 0)) {
        close_level(level);
        return;
    }
    memcpy(level->dir, dir, PATH_MAX);
    files->n_levels++;
}

static void add_levels(neap_memory_files *files, const char *dir) {
    char at[PATH_MAX];
    const size_t top = strlen(files->root_dir);
    join(at, dir, "", "");
    for (;;) {
        add_level(files, at);
        char *slash = strrchr(at, '/');
        if (strlen(at) <= top || !slash) return;
        memset(slash, 0, sizeof at - (size_t)(slash - at));
    }
}

static void forget_group(neap_memory_files *files) {
    while (files->n_levels > 0)
        close_level(&files->levels[--files->n_levels]);
    close_fd(&files->group_stall_fd);
    files->version = 0;
    files->root_dir[0] = files->group_stall_path[0] = '\0';
}

static void find_group(neap_memory_files *files) {
    const char *root = files->root;
    forget_group(files);
    char path[PATH_MAX] = "", dir[PATH_MAX] = "", mount[PATH_MAX] = "";
    if (own_path(root, true, path) && find_mount(root, true, path, files->root_dir, dir)) {
        files->version = 1;
        add_levels(files, dir);
    }
    if (!own_path(root, false, path) || !find_mount(root, false, path, mount, dir)) return;
    if (files->n_levels == 0) {
        files->version = 2;
        memcpy(files->root_dir, mount, PATH_MAX);
        add_levels(files, dir);
    }
    if (files->n_levels == 0) files->version = 0;
    /* That of the root is the machine's. */
    if (strcmp(dir, mount) == 0 && strcmp(path, "/") == 0 && files->version != 2) return;
    files->group_stall_fd = open_in(dir, "memory.pressure");
    if (files->group_stall_fd >= 0) join(files->group_stall_path, dir, "/memory.pressure", "");
}

/* ---- open, read ---- */

static uint64_t sum_of(int fd) {
    char text[TEXT_MAX];
    const ssize_t len = read_text(fd, text);
    return len > 0 ? neap_checksum(text, (size_t)len) : 0;
}

int neap_memory_files_open(const char *root, neap_memory_files **ret_files) {
    neap_memory_files *files = calloc(1, sizeof *files);
    if (!files) return -ENOMEM;
    for (size_t i = 0; i < NEAP_GROUP_LEVELS; i++)
        files->levels[i] =
            (group_level){.usage_fd = -1, .limit_fd = -1, .high_fd = -1, .stat_fd = -1};
    if (!join(files->root, root, "", "")) {
        free(files);
        return -ENAMETOOLONG;
    }
    files->group_stall_fd = -1;
    files->meminfo_fd = open_under(root, "/proc/meminfo");
    files->stall_fd = open_under(root, "/proc/pressure/memory");
    files->own_fd = open_under(root, "/proc/self/cgroup");
    if (files->stall_fd >= 0) join(files->stall_path, root, "/proc/pressure/memory", "");
    files->is_live = root[0] == '\0';
    files->own_sum = sum_of(files->own_fd);
    find_group(files);
    /* The first reading makes the kernel keep its buffers. */
    neap_memory_reading reading;
    const int err = neap_memory_files_read(files, &reading);
    if (err) {
        neap_memory_files_close(files);
        return err;
    }
    *ret_files = files;
    return 0;
}

void neap_memory_files_close(neap_memory_files *files) {
    if (!files) return;
    forget_group(files);
    close_fd(&files->meminfo_fd);
    close_fd(&files->stall_fd);
    close_fd(&files->own_fd);
    free(files);
}

static neap_memory_level read_level(const group_level *level, int version) {
    neap_memory_level out = {.limit_bytes = level_limit(level)};
    char text[TEXT_MAX];
    uint64_t inactive = 0, active = 0;
    if (!read_number(level->usage_fd, &out.usage_bytes)) return (neap_memory_level){0};
    if (out.limit_bytes > 0 && read_text(level->stat_fd, text) > 0) {
        field(text, version == 1 ? "total_inactive_file" : "inactive_file", &inactive);
        field(text, version == 1 ? "total_active_file" : "active_file", &active);
    }
    const uint64_t held = out.usage_bytes, file = inactive + active / 2;
    const uint64_t used = held > file ? held - file : 0;
    out.available_bytes = out.limit_bytes > used ? out.limit_bytes - used : 0;
    return out;
}

int neap_memory_files_read(neap_memory_files *files, neap_memory_reading *ret_reading) {
    neap_memory_reading reading = {.n_levels = files->n_levels};
    char text[TEXT_MAX];
    uint64_t total = 0, available = 0;
    if (read_text(files->meminfo_fd, text) > 0 && field(text, "MemTotal", &total) &&
        field(text, "MemAvailable", &available)) {
        reading.total_bytes = total * 1024;
        reading.available_bytes = available * 1024;
    }
    reading.machine_stall = read_stall(files->stall_fd);
    reading.group_stall = read_stall(files->group_stall_fd);
    for (size_t i = 0; i < files->n_levels; i++)
        reading.levels[i] = read_level(&files->levels[i], files->version);
    if (reading.total_bytes == 0 && files->stall_fd < 0 && files->n_levels == 0) return -ENOENT;
    *ret_reading = reading;
    return 0;
}

bool neap_memory_files_follow(neap_memory_files *files) {
    const uint64_t sum = sum_of(files->own_fd);
    if (sum == 0 || sum == files->own_sum) return false;
    files->own_sum = sum;
    find_group(files);
    return true;
}

int neap_memory_files_version(const neap_memory_files *files) {
    return files->version;
}

bool neap_memory_files_is_live(const neap_memory_files *files) {
    return files->is_live;
}

const char *neap_memory_files_level_dir(const neap_memory_files *files, size_t level) {
    return level < files->n_levels ? files->levels[level].dir : "";
}

size_t neap_memory_files_n_levels(const neap_memory_files *files) {
    return files->n_levels;
}

const char *neap_memory_files_root_dir(const neap_memory_files *files) {
    return files->root_dir;
}

const char *neap_memory_files_stall_path(const neap_memory_files *files) {
    return files->stall_path;
}

const char *neap_memory_files_group_stall_path(const neap_memory_files *files) {
    return files->group_stall_path;
}
