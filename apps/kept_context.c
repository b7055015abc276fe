/* kept_context.c - see kept_context.h.
 *
 * Files are called WHAT-WEIGHTS-SIZE-MTIME-N-HASH.bin: size and time of the model's file, number
 * and hash of the tokens. In each are the bytes and, last, their checksum. Under its name a file is
 * whole. A context is kept without its last tokens: these are read again, so that the session sees
 * the graph and their queries, and what is computed does not depend on what was kept. */
#include "kept_context.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bytes.h"
#include "proc.h"

#define STATE "state"
#define STATES_MAX ((uint64_t)8 << 30) /* bytes */
#define LEAST_TOKENS 512u              /* that are worth a file */
#define STEP 2048u /* tokens between two looks at stop: llama_session.c's batch */

int neap_kept_open(const char *model_path, const char *weights, neap_kept *ret_kept) {
    neap_kept kept = {0};
    char cache[NEAP_PATH_MAX - 512];
    struct stat info;
    int err = neap_cache_dir(cache, sizeof cache);
    if (!err && stat(model_path, &info) != 0) err = -errno;
    if (err)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", model_path, neap_strerror(err));
    snprintf(kept.folder, sizeof kept.folder, "%s/bench", cache);
    snprintf(kept.model, sizeof kept.model, "%s-%lld-%lld", weights, (long long)info.st_size,
             (long long)info.st_mtime);
    err = neap_make_dirs(kept.folder, 0700);
    if (err)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", kept.folder, neap_strerror(err));
    *ret_kept = kept;
    return 0;
}

/* ---- files ---- */

static uint64_t hash_of(const int32_t *tokens, size_t n) {
    const char *version = neap_session_version();
    return neap_checksum(tokens, n * sizeof *tokens) ^ neap_checksum(version, strlen(version));
}

static void path_of(const neap_kept *kept, const char *what, const int32_t *tokens, size_t n,
                    char path[NEAP_PATH_MAX]) {
    snprintf(path, NEAP_PATH_MAX, "%s/%s-%s-%zu-%016llx.bin", kept->folder, what, kept->model, n,
             (unsigned long long)hash_of(tokens, n));
}

/* Bytes of the file, malloc'd; NULL: there are none that can be used. */
static uint8_t *load(const char *path, size_t *ret_n) {
    FILE *file = fopen(path, "rbe");
    struct stat info;
    uint64_t sum;
    uint8_t *bytes = NULL;
    if (file && fstat(fileno(file), &info) == 0 && info.st_size > (off_t)sizeof sum)
        bytes = malloc((size_t)info.st_size);
    const size_t n = bytes ? (size_t)info.st_size - sizeof sum : 0;
    const bool is_read = bytes && fread(bytes, 1, n + sizeof sum, file) == n + sizeof sum;
    if (is_read) memcpy(&sum, bytes + n, sizeof sum);
    if (file) fclose(file);
    if (is_read && neap_checksum(bytes, n) == sum) {
        utimensat(AT_FDCWD, path, NULL, 0); /* used just now */
        *ret_n = n;
        return bytes;
    }
    free(bytes);
    return NULL;
}

static void save(neap_kept *kept, const char *path, const void *bytes, size_t n) {
    char part[NEAP_PATH_MAX];
    const uint64_t sum = neap_checksum(bytes, n);
    snprintf(part, sizeof part, "%s/part-%d-kept.bin", kept->folder, neap_proc_self());
    FILE *file = fopen(part, "wbe");
    int err = file ? 0 : -errno;
    if (file && (fwrite(bytes, 1, n, file) != n || fwrite(&sum, sizeof sum, 1, file) != 1))
        err = -errno;
    if (file && fclose(file) != 0 && !err) err = -errno;
    if (!err && rename(part, path) != 0) err = -errno;
    if (!err) return;
    unlink(part);
    if (!kept->has_warned)
        neap_cli_warn("%s: %s; the next run computes it again", path, neap_strerror(err));
    kept->has_warned = true;
}

bool neap_kept_find(const neap_kept *kept, const char *what, const int32_t *tokens, size_t n,
                    void *ret_bytes, size_t n_bytes) {
    char path[NEAP_PATH_MAX];
    size_t n_found = 0;
    path_of(kept, what, tokens, n, path);
    uint8_t *found = load(path, &n_found);
    const bool fits = found && n_found == n_bytes;
    if (fits) memcpy(ret_bytes, found, n_bytes);
    free(found);
    return fits;
}

void neap_kept_put(neap_kept *kept, const char *what, const int32_t *tokens, size_t n,
                   const void *bytes, size_t n_bytes) {
    char path[NEAP_PATH_MAX];
    path_of(kept, what, tokens, n, path);
    save(kept, path, bytes, n_bytes);
}

/* ---- contexts ---- */

static bool is_older(const struct stat *a, const struct stat *b) {
    return a->st_mtim.tv_sec != b->st_mtim.tv_sec ? a->st_mtim.tv_sec < b->st_mtim.tv_sec
                                                  : a->st_mtim.tv_nsec < b->st_mtim.tv_nsec;
}

/* Removes the kept context that was not used for the longest time, if all of them are more than
 * so many bytes; false: it did not. */
static bool remove_oldest(const neap_kept *kept, uint64_t most_bytes) {
    DIR *dir = opendir(kept->folder);
    const struct dirent *entry;
    struct stat info, oldest = {0};
    char name[NAME_MAX + 1] = "";
    uint64_t sum = 0;
    while (dir && (entry = readdir(dir))) {
        if (strncmp(entry->d_name, STATE "-", strlen(STATE "-")) != 0 ||
            fstatat(dirfd(dir), entry->d_name, &info, 0) != 0)
            continue;
        sum += (uint64_t)info.st_size;
        if (*name && !is_older(&info, &oldest)) continue;
        oldest = info;
        snprintf(name, sizeof name, "%s", entry->d_name);
    }
    const bool removed = sum > most_bytes && unlinkat(dirfd(dir), name, 0) == 0;
    if (dir) closedir(dir);
    return removed;
}

/* The tokens of the longest kept context that these begin with; 0: there is none. */
static size_t longest_kept(const neap_kept *kept, const int32_t *tokens, size_t n) {
    char prefix[128];
    size_t best = 0;
    DIR *dir = opendir(kept->folder);
    const struct dirent *entry;
    const size_t len = (size_t)snprintf(prefix, sizeof prefix, STATE "-%s-", kept->model);
    while (dir && (entry = readdir(dir))) {
        size_t n_kept = 0;
        unsigned long long hash = 0;
        if (strncmp(entry->d_name, prefix, len) == 0 &&
            sscanf(entry->d_name + len, "%zu-%llx.bin", &n_kept, &hash) == 2 && n_kept > best &&
            n_kept <= n && hash == hash_of(tokens, n_kept))
            best = n_kept;
    }
    if (dir) closedir(dir);
    return best;
}

static int load_state(const neap_kept *kept, neap_session *session, const int32_t *tokens, size_t n,
                      bool *ret_loaded) {
    char path[NEAP_PATH_MAX];
    size_t n_bytes;
    neap_kv_file state;
    path_of(kept, STATE, tokens, n, path);
    uint8_t *bytes = load(path, &n_bytes);
    *ret_loaded = bytes && neap_kv_file_of_state(bytes, n_bytes, &state) == 0;
    if (!*ret_loaded) return 0;
    const int status = neap_session_set(session, &state);
    neap_kv_file_free(&state);
    return status;
}

static int save_state(neap_kept *kept, neap_session *session, const int32_t *tokens, size_t n) {
    char path[NEAP_PATH_MAX];
    neap_kv_file state;
    const int status = neap_session_get(session, &state);
    if (status) return status;
    path_of(kept, STATE, tokens, n, path);
    while (state.n_bytes < STATES_MAX && remove_oldest(kept, STATES_MAX - state.n_bytes))
        ;
    save(kept, path, state.bytes, state.n_bytes);
    neap_kv_file_free(&state);
    return 0;
}

int neap_kept_read(neap_kept *kept, neap_session *session, const int32_t *tokens, size_t n) {
    const size_t n_before = n > NEAP_SESSION_WINDOW ? n - NEAP_SESSION_WINDOW : 0;
    size_t done = longest_kept(kept, tokens, n_before);
    bool loaded = false;
    int status = neap_session_keep(session, 0);
    if (!status && done > 0) status = load_state(kept, session, tokens, done, &loaded);
    if (!loaded) done = 0;
    const bool is_new = done < n_before && n_before >= LEAST_TOKENS;
    while (!status && done < n_before && !*kept->stop) {
        const size_t more = n_before - done < STEP ? n_before - done : STEP;
        status = neap_session_read(session, tokens + done, more);
        done += more;
    }
    if (!status && *kept->stop) status = NEAP_EXIT_FAILED;
    if (!status && is_new) status = save_state(kept, session, tokens, n_before);
    if (!status) status = neap_session_read_watched(session, tokens + n_before, n - n_before);
    return status;
}
