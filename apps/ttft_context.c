/* ttft_context.c - see ttft_int.h.
 *
 * A context comes to all servers of a grid from one slot file, which is kept for the next run. Of
 * models that only have a shape, a piece is read and kept, and the context's file is tiled from it.
 *
 * A measurement begins with the context as it is after an eviction, loaded from a file, so that no
 * copy on storage is left over from the one before. Where an eviction changes nothing this is the
 * file that everyone began with; lossy sides write their own, once where their bytes are equal. */
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bytes.h"
#include "codec.h"
#include "kv_file.h"
#include "policy.h"
#include "proc.h"
#include "ttft_int.h"

#define PIECE_TOKENS 2048u
#define KEPT_TOKENS 512u /* shorter contexts are read again by every server */
#define COMPARE_BYTES ((size_t)1 << 20)

/* ---- prompts ---- */

static char *read_text(const neap_ttft_grid *g) {
    const char *path = g->bench->text_path;
    if (!path) return neap_text_generate((size_t)g->context);
    FILE *file = fopen(path, "re");
    if (!file) return NULL;
    const size_t cap = (size_t)g->context * 16 + 4096;
    char *text = malloc(cap + 1);
    if (text) text[fread(text, 1, cap, file)] = '\0';
    fclose(file);
    return text;
}

static int copy_tokens(const neap_tokens *from, size_t n, const int32_t *more, size_t n_more,
                       neap_tokens *ret_tokens) {
    int32_t *ids = malloc((n + n_more) * sizeof *ids);
    if (!ids) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    memcpy(ids, from->ids, n * sizeof *ids);
    memcpy(ids + n, more, n_more * sizeof *ids);
    *ret_tokens = (neap_tokens){.ids = ids, .n = n + n_more};
    return 0;
}

/* Cuts the text to the context and makes the two prompts. */
static int make_prompts(neap_ttft_grid *g) {
    char *text = read_text(g);
    if (!text)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s",
                              g->bench->text_path ? g->bench->text_path : "text",
                              neap_strerror(-errno));
    neap_server *server = g->sides[NEAP_TTFT_BASELINE].server;
    neap_tokens all = {0}, question = {0};
    int status = neap_server_tokenize(server, text, &all);
    free(text);
    if (!status)
        status = neap_server_tokenize(
            server, "Which of the people named above came first, and why?", &question);
    const size_t n = (size_t)g->context;
    if (!status && (all.n < n || question.n < NEAP_TTFT_NEW + 1))
        status = neap_cli_error(NEAP_EXIT_FAILED, "give a longer --text or a smaller --context",
                                "text: %zu tokens are less than the context", all.n);
    if (!status) {
        /* The last tokens of the question: a beginning-of-text token stays out. */
        const int32_t *news = question.ids + question.n - NEAP_TTFT_NEW;
        const int32_t reset = news[1] != news[0] ? news[1] : all.ids[1];
        status = copy_tokens(&all, n, news, NEAP_TTFT_NEW, &g->prefix_new);
        if (!status) status = copy_tokens(&all, n, &reset, 1, &g->prefix_reset);
    }
    neap_tokens_free(&all);
    neap_tokens_free(&question);
    return status;
}

/* ---- files ---- */

static void make_path(const neap_ttft_grid *g, const char *name, char path[NEAP_PATH_MAX]) {
    snprintf(path, NEAP_PATH_MAX, "%.3800s%s", g->bench->folder, name);
}

/* Removes what benchmarks that were killed left behind. */
static void remove_stale(const char *folder) {
    DIR *dir = opendir(folder);
    const struct dirent *entry;
    while (dir && (entry = readdir(dir))) {
        int pid = 0;
        const char *name = entry->d_name;
        if ((sscanf(name, "settled-%d-", &pid) == 1 || sscanf(name, "part-%d-", &pid) == 1) &&
            !neap_proc_alive(pid))
            unlinkat(dirfd(dir), name, 0);
    }
    if (dir) closedir(dir);
}

/* Where a filled context is kept between runs: named by model and tokens. */
static int name_file(const neap_ttft_grid *g, const neap_tokens *tokens,
                     char name[NEAP_TTFT_NAME_MAX]) {
    struct stat info;
    if (stat(g->bench->model_path, &info) != 0)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", g->bench->model_path,
                              neap_strerror(-errno));
    snprintf(name, NEAP_TTFT_NAME_MAX, "ctx-%lld-%lld-%016llx.bin", (long long)info.st_size,
             (long long)info.st_mtime,
             (unsigned long long)neap_checksum(tokens->ids, tokens->n * sizeof(int32_t)));
    return 0;
}

/* Under its name the file is whole. */
static int save(const neap_ttft_grid *g, const neap_ttft_side *s, const char *name) {
    char part[NEAP_TTFT_NAME_MAX], from[NEAP_PATH_MAX], to[NEAP_PATH_MAX];
    snprintf(part, sizeof part, "part-%d-%.128s", neap_server_pid(s->server), name);
    make_path(g, part, from);
    make_path(g, name, to);
    const int status = neap_server_slot_save(s->server, part);
    if (status || rename(from, to) == 0) return status;
    return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", to, neap_strerror(-errno));
}

/* False also where one cannot be read. */
static bool same_bytes(const neap_ttft_grid *g, const char *name_a, const char *name_b) {
    char path_a[NEAP_PATH_MAX], path_b[NEAP_PATH_MAX];
    make_path(g, name_a, path_a);
    make_path(g, name_b, path_b);
    FILE *a = fopen(path_a, "rbe"), *b = fopen(path_b, "rbe");
    char *buffer = malloc(2 * COMPARE_BYTES);
    bool same = a && b && buffer;
    for (size_t n = COMPARE_BYTES; same && n == COMPARE_BYTES;) {
        n = fread(buffer, 1, COMPARE_BYTES, a);
        same = fread(buffer + COMPARE_BYTES, 1, COMPARE_BYTES, b) == n && !ferror(a) &&
               !ferror(b) && memcmp(buffer, buffer + COMPARE_BYTES, n) == 0;
    }
    free(buffer);
    if (a) fclose(a);
    if (b) fclose(b);
    return same;
}

/* ---- filling ---- */

/* Loads a prompt's context or has it computed, and then saves it unless it is short. */
static int load_or_read(const neap_ttft_grid *g, const neap_ttft_side *s, const neap_tokens *prompt,
                        const char *name) {
    bool loaded = false;
    neap_answer answer = {0};
    int status = neap_server_slot_load(s->server, name, &loaded);
    if (!status) status = neap_server_complete(s->server, prompt, 0, true, &answer);
    if (!status && answer.prompt_n > KEPT_TOKENS) status = save(g, s, name);
    neap_answer_free(&answer);
    return status;
}

/* The context's file, tiled from the first tokens that one server has really read. */
static int tile(neap_ttft_grid *g) {
    const neap_tokens piece = {.ids = g->prefix_reset.ids, .n = PIECE_TOKENS};
    char name[NEAP_TTFT_NAME_MAX], from[NEAP_PATH_MAX], to[NEAP_PATH_MAX];
    int status = name_file(g, &piece, name);
    if (!status) status = load_or_read(g, &g->sides[NEAP_TTFT_BASELINE], &piece, name);
    if (status) return status;
    snprintf(g->context_file, sizeof g->context_file, "part-%d-tiled-%ld.bin", (int)getpid(),
             g->context);
    g->remove_context_file = true;
    make_path(g, name, from);
    make_path(g, g->context_file, to);
    const int err = neap_kv_file_tile(from, to, g->prefix_reset.ids, (uint32_t)g->context);
    return err ? neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", to, neap_strerror(err)) : 0;
}

/* ---- the context after an eviction ---- */

/* Tokens computed go to *ret_computed: 1 when the context was reused. */
static int reset(const neap_ttft_grid *g, const neap_ttft_side *s, uint64_t *ret_computed) {
    neap_answer answer = {0};
    const int status = neap_server_complete(s->server, &g->prefix_reset, 0, true, &answer);
    *ret_computed = answer.prompt_n;
    neap_answer_free(&answer);
    return status;
}

static int load_settled(const neap_ttft_side *s) {
    bool loaded = false;
    const int status = neap_server_slot_load(s->server, s->settled, &loaded);
    if (status || loaded) return status;
    return neap_cli_error(NEAP_EXIT_FAILED, NULL, "llama-server: cannot load the context again");
}

int neap_ttft_context_rewind(const neap_ttft_grid *g, const neap_ttft_side *s) {
    uint64_t computed = 0;
    int status = s->reloads ? load_settled(s) : 0;
    if (!status) status = reset(g, s, &computed);
    if (!status && computed > 1)
        status = neap_cli_error(NEAP_EXIT_FAILED, NULL,
                                "the context was not reused: %llu tokens computed instead of 1",
                                (unsigned long long)computed);
    return status;
}

static bool is_klt(const neap_ttft_grid *g) {
    return neap_codec_find(g->bench->codec) == NULL;
}

/* True when an eviction may not change a bit. */
static bool is_exact(const neap_ttft_grid *g, const neap_ttft_side *s) {
    return neap_ttft_is_paging(s) || (!is_klt(g) && neap_codec_find(g->bench->codec)->lossless) ||
           neap_policy_find(s->policy)->clean_storage;
}

static bool is_own(const neap_ttft_grid *g, const char *name) {
    return name[0] && strcmp(name, g->context_file) != 0;
}

static void remove_file(const neap_ttft_grid *g, const char *name) {
    char path[NEAP_PATH_MAX];
    make_path(g, name, path);
    unlink(path);
}

/* The file of a side; that of an earlier side where the bytes are the same. */
static int save_settled(const neap_ttft_grid *g, neap_ttft_side *s) {
    char path[NEAP_PATH_MAX];
    make_path(g, g->context_file, path);
    if (is_exact(g, s) && access(path, R_OK) == 0) return 0; /* the file that it began with */
    snprintf(s->settled, sizeof s->settled, "settled-%d-%ld.bin", neap_server_pid(s->server),
             g->context);
    const int status = neap_server_slot_save(s->server, s->settled);
    for (const neap_ttft_side *other = g->sides; !status && other < s; other++) {
        if (!is_own(g, other->settled) || !same_bytes(g, other->settled, s->settled)) continue;
        remove_file(g, s->settled);
        memcpy(s->settled, other->settled, sizeof s->settled);
        break;
    }
    return status;
}

/* Tries to load the file. llama-server cannot reuse a loaded context of a sliding-window model: it
 * reads it again, which undoes the rounding. Such a context is left where it is from then on, and
 * copies of earlier evictions stay on storage. */
static int keep_settled(const neap_ttft_grid *g, neap_ttft_side *s) {
    uint64_t computed = 0;
    /* klt would round a loaded context again; what it rounded once is clean where it is. */
    if (is_klt(g) && !is_exact(g, s)) return 0;
    int status = save_settled(g, s);
    if (!status) status = load_settled(s);
    if (!status) status = reset(g, s, &computed);
    s->reloads = !status && computed == 1;
    if (status || s->reloads) return status;
    neap_cli_warn("this model's context cannot be loaded again: chunks that were evicted once are "
                  "clean from then on, and restored from storage");
    return neap_ttft_evict_once(s);
}

/* Before the first measurement: the answer of a context that was never evicted, which is what exact
 * sides must always give; then the context is rounded (a lossy codec changes nothing after one
 * eviction) and kept. Memory that the kernel pages out needs neither. */
static int settle(const neap_ttft_grid *g, neap_ttft_side *s) {
    neap_answer answer = {0};
    uint64_t computed = 0;
    int status = reset(g, s, &computed);
    if (!status) status = neap_ttft_ask(g, s, &answer);
    if (!status) memcpy(s->unrounded, answer.tokens.ids, sizeof s->unrounded);
    s->has_reference = !status && is_exact(g, s);
    if (s->has_reference) memcpy(s->reference, s->unrounded, sizeof s->reference);
    neap_answer_free(&answer);
    if (!status) status = reset(g, s, &computed);
    if (status || neap_ttft_is_paging(s)) return status;
    status = neap_ttft_evict_once(s);
    return status ? status : keep_settled(g, s);
}

static int fill(neap_ttft_grid *g) {
    const bool tiled = g->bench->is_shape && g->context > PIECE_TOKENS;
    int status = tiled ? tile(g) : name_file(g, &g->prefix_reset, g->context_file);
    for (size_t i = 0; i < g->n_sides && !status; i++) {
        neap_ttft_side *s = &g->sides[i];
        memcpy(s->settled, g->context_file, sizeof s->settled);
        s->reloads = tiled; /* what is tiled must not be read instead */
        status = tiled ? neap_ttft_context_rewind(g, s)
                       : load_or_read(g, s, &g->prefix_reset, g->context_file);
        s->reloads = false;
    }
    return status;
}

int neap_ttft_context_fill(neap_ttft_grid *g) {
    remove_stale(g->bench->folder);
    int status = make_prompts(g);
    neap_progress_start("reading the context");
    if (!status) status = fill(g);
    for (size_t i = 0; i < g->n_sides && !status; i++)
        status = settle(g, &g->sides[i]);
    neap_progress_stop();
    return status;
}

void neap_ttft_context_free(neap_ttft_grid *g) {
    for (size_t i = 0; i < g->n_sides; i++)
        if (is_own(g, g->sides[i].settled)) remove_file(g, g->sides[i].settled);
    if (g->remove_context_file) remove_file(g, g->context_file);
    neap_tokens_free(&g->prefix_new);
    neap_tokens_free(&g->prefix_reset);
}
