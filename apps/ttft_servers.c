/* ttft_servers.c - see ttft_int.h. The servers of one context, all at once: nothing else makes
 * their turns comparable. So all of them must fit into memory. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "policy.h"
#include "proc.h"
#include "ttft_int.h"

#define MORE_CELLS 512u /* of a context: the question and the answer */
#define SERVER_BYTES \
    ((uint64_t)192 << 20) /* a server without weights and KV: buffers, vocabulary */
#define COPY_STEP ((size_t)64 << 20)

bool neap_ttft_is_paging(const neap_ttft_side *s) {
    return strcmp(s->policy, NEAP_TTFT_PAGING) == 0;
}

/* ---- room ---- */

/* Servers hold weights and KV; each swap file may take the KV, and so do two slot files. */
static int check_room(const neap_ttft_grid *g) {
    const neap_ttft *b = g->bench;
    const uint64_t kv = b->kv_token_bytes * (uint64_t)g->context;
    const uint64_t memory = g->n_sides * (b->weight_bytes + kv + SERVER_BYTES);
    uint64_t disk = (g->n_sides + 2) * kv, available = 0, total = 0;
    struct statvfs info;
    for (size_t i = 0; i < g->n_sides; i++)
        if (neap_ttft_is_paging(&g->sides[i])) disk += b->weight_bytes;
    if (neap_mem_available(&available, &total) == 0 && memory > available)
        return neap_cli_error(NEAP_EXIT_FAILED, "a smaller --context, fewer policies",
                              "context of %ld tokens: %zu servers take %s, available is %s",
                              g->context, g->n_sides, neap_cli_size(memory),
                              neap_cli_size(available));
    if (statvfs(b->folder, &info) == 0 && disk > (uint64_t)info.f_bavail * info.f_frsize)
        return neap_cli_error(NEAP_EXIT_FAILED, "make room there", "%s: %s are needed, %s are free",
                              b->folder, neap_cli_size(disk),
                              neap_cli_size((uint64_t)info.f_bavail * info.f_frsize));
    return 0;
}

/* ---- os-paging ---- */

/* A page of a file belongs to the group of the first process that read it. The copy is read by the
 * one server alone; it has no name and is gone when it is closed. */
static int copy_model(const neap_ttft *b, int *ret_fd) {
    const int from = open(b->model_path, O_RDONLY | O_CLOEXEC);
    const int to = from < 0 ? -1 : open(b->folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    int err = to < 0 ? -errno : 0;
    ssize_t n = 1;
    while (!err && n > 0)
        if ((n = copy_file_range(from, NULL, to, NULL, COPY_STEP, 0)) < 0) err = -errno;
    if (!err && fsync(to) != 0) err = -errno;
    if (!err) err = -posix_fadvise(to, 0, 0, POSIX_FADV_DONTNEED);
    if (from >= 0) close(from);
    if (!err)
        *ret_fd = to;
    else if (to >= 0)
        close(to);
    return err;
}

static int prepare_paging(const neap_ttft_grid *g, neap_ttft_side *s, bool *ret_left_out) {
    const char *what;
    const uint64_t swap =
        g->bench->weight_bytes + g->bench->kv_token_bytes * (uint64_t)g->context + SERVER_BYTES;
    int err = neap_paging_create(swap, &s->paging, &what);
    if (err) {
        neap_cli_warn(NEAP_TTFT_PAGING " is left out: %s: %s%s", what, neap_strerror(err),
                      geteuid() ? " (it needs root)" : "");
        *ret_left_out = true;
        return 0;
    }
    err = copy_model(g->bench, &s->model_fd);
    return err ? neap_cli_error(NEAP_EXIT_FAILED, NULL, "copy of %s: %s", g->bench->model_path,
                                neap_strerror(err))
               : 0;
}

/* ---- life ---- */

static int start(const neap_ttft_grid *g, neap_ttft_side *s) {
    char copy[64];
    neap_server_options options = {.model_path = g->bench->model_path,
                                   .n_ctx = (uint32_t)g->context + MORE_CELLS,
                                   .threads = neap_option_threads(),
                                   .slot_dir = g->bench->folder};
    if (s->paging) {
        snprintf(copy, sizeof copy, "/proc/%d/fd/%d", (int)getpid(), s->model_fd);
        options.model_path = copy;
        options.group = neap_paging_group(s->paging);
        options.stock = true;
    } else {
        options.codec = g->bench->codec;
        options.policy = s->policy;
        options.attn = s->attn;
    }
    return neap_server_start(&options, &s->server);
}

int neap_ttft_servers_start(neap_ttft_grid *g) {
    int status = check_room(g);
    for (size_t i = 0; i < g->n_sides && !status; i++) {
        neap_ttft_side *s = &g->sides[i];
        bool left_out = false;
        if (neap_ttft_is_paging(s)) status = prepare_paging(g, s, &left_out);
        if (left_out) {
            g->n_sides--;
            memmove(s, s + 1, (g->n_sides - i) * sizeof *s);
            i--;
        } else if (!status) {
            status = start(g, s);
        }
    }
    return status;
}

void neap_ttft_servers_stop(neap_ttft_grid *g) {
    for (size_t i = 0; i < g->n_sides; i++) {
        neap_ttft_side *s = &g->sides[i];
        neap_server_stop(s->server);
        s->server = NULL;
        if (s->model_fd >= 0) close(s->model_fd);
        s->model_fd = -1;
        const int err = neap_paging_free(s->paging);
        if (err) neap_cli_warn("the zRAM device or the memory group neap-paging-* is still there");
        s->paging = NULL;
    }
}
