/* bench_decode.c - `neap bench decode`: tokens per second of generation after a long context, by
 * how keys and values are held and who computes attention.
 *
 * Every method is a llama-server of its own; all of a context and batch run at once, hold the same
 * context - read once for each type of the cache and batch, by neap where it can, and kept in a
 * file - and generate in turns. Ratios are of turns. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bench.h"
#include "bytes.h"
#include "geometry.h"
#include "klt_file.h"
#include "plot.h"
#include "proc.h"
#include "server_client.h"
#include "server_task.h"

#define DEFAULT_REPS 5
#define QUICK_REPS 3
#define DEFAULT_CONTEXT 32768
#define QUICK_CONTEXT 4096
#define MORE_CELLS 256u                    /* of a slot: what is generated, rounded up */
#define ANSWER 33u                         /* the first token and 32 more, which are timed */
#define SERVER_BYTES ((uint64_t)192 << 20) /* without weights and KV: buffers, vocabulary */
enum { LIST_MAX = 8, GRIDS_MAX = LIST_MAX * LIST_MAX };

typedef struct method {
    const char *name, *type; /* of the cache */
    const char *held;        /* coded, by what; NULL: it is not */
    bool stock, selects;
    unsigned bits_of_32; /* of 32 elements of the cache as it is filled */
} method;

/* Those of a type that neap computes first: they read the context fastest. */
static const method methods[] = {
    {"f16-neap", "f16", .bits_of_32 = 512},
    {"q8_0-neap", "q8_0", .bits_of_32 = 272},
    {"q4_0-neap", "q4_0", .bits_of_32 = 144},
    {"klt", "f16", .held = "klt", .bits_of_32 = 512},
    {"klt-sr", "f16", .held = "klt", .selects = true, .bits_of_32 = 512},
    {"lowram", "f16", .held = "lowram", .bits_of_32 = 512},
    {"lowram-sr", "f16", .held = "lowram", .selects = true, .bits_of_32 = 512},
    {"f16", "f16", .stock = true, .bits_of_32 = 512},
    {"q8_0", "q8_0", .stock = true, .bits_of_32 = 272},
    {"q4_0", "q4_0", .stock = true, .bits_of_32 = 144},
};
enum { N_METHODS = sizeof methods / sizeof *methods, OURS_F16 = 0, STOCK_F16 = 7 };

/* One context and batch. */
typedef struct grid {
    long context, batch;
    neap_server *servers[N_METHODS];
    double tps[N_METHODS][NEAP_BENCH_REPS_MAX]; /* with --prefill ms */
    uint64_t kv_bytes[N_METHODS];
    double agreement[N_METHODS]; /* with the tokens of exact keys and values; negative: unknown */
    size_t right[N_METHODS], n_asked; /* questions */
    char kv[N_METHODS][32];           /* what the cache is */
    size_t n;
} grid;

typedef struct bench {
    neap_bench_options options;
    const char *plot_path;
    long contexts[LIST_MAX], batches[LIST_MAX];
    size_t n_contexts, n_batches, reps;
    long n_tasks; /* texts with questions */
    bool prefill; /* the time to the first token in the place of tokens per second */
    bool wanted[N_METHODS], asked, left_out;         /* methods; by name; one asked for */
    size_t order[N_METHODS];                         /* of rows: as asked for */
    char ratio[32], select[16];                      /* of NEAP_KV, with a colon; NEAP_KV_SELECT */
    char path[NEAP_PATH_MAX], folder[NEAP_PATH_MAX]; /* the model; of slot files, with a slash */
    uint64_t weight_bytes, kv_token_bytes;           /* f16 */
    neap_tokens text;                                /* of the longest context, and one token */
} bench;

/* ---- the context ---- */

static int read_text(bench *b, neap_server *server) {
    long longest = 0;
    for (size_t i = 0; i < b->n_contexts; i++)
        longest = b->contexts[i] > longest ? b->contexts[i] : longest;
    char *text = neap_text_generate((size_t)longest);
    if (!text) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    const int status = neap_server_tokenize(server, text, &b->text);
    free(text);
    if (status || b->text.n > (size_t)longest) return status;
    return neap_cli_error(NEAP_EXIT_FAILED, "give a smaller --context",
                          "text: %zu tokens are less than the context", b->text.n);
}

/* Where a filled context is kept between runs: named by model, type, tokens, and number of slots,
 * for a server of another number refuses it. */
static int name_file(const bench *b, const grid *g, const char *type, const neap_tokens *context,
                     char name[96]) {
    struct stat info;
    if (stat(b->path, &info) != 0)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", b->path, neap_strerror(-errno));
    snprintf(name, 96, "decode-%lld-%lld-%s-%ld-%016llx.bin", (long long)info.st_size,
             (long long)info.st_mtime, type, g->batch,
             (unsigned long long)neap_checksum(context->ids, context->n * sizeof *context->ids));
    return 0;
}

/* The context in all slots of the server, from the file, which it writes if there is none. */
static int fill(const bench *b, const grid *g, const method *m, neap_server *server,
                const neap_tokens *context) {
    char name[96], part[128], from[NEAP_PATH_MAX], to[NEAP_PATH_MAX];
    int status = name_file(b, g, m->type, context, name);
    for (unsigned slot = 0; slot < (unsigned)g->batch && !status; slot++) {
        bool loaded = false;
        status = neap_server_slot_load_into(server, slot, name, &loaded);
        if (status || loaded) continue;
        if (slot > 0)
            return neap_cli_error(NEAP_EXIT_FAILED, NULL,
                                  "llama-server: cannot load the context into slot %u", slot);
        neap_answer answer = {0};
        status = neap_server_complete(server, context, 0, true, &answer);
        neap_answer_free(&answer);
        snprintf(part, sizeof part, "part-%d-%s", neap_server_pid(server), name);
        snprintf(from, sizeof from, "%.3900s%s", b->folder, part);
        snprintf(to, sizeof to, "%.3900s%s", b->folder, name);
        if (!status) status = neap_server_slot_save(server, part);
        if (!status && rename(from, to) != 0)
            status = neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", to, neap_strerror(-errno));
    }
    return status;
}

/* ---- servers ---- */

static int check_room(const bench *b, const grid *g) {
    uint64_t need = 0, available = 0, total = 0;
    const uint64_t kv =
        b->kv_token_bytes * (uint64_t)(g->context + MORE_CELLS) * (uint64_t)g->batch;
    for (size_t m = 0; m < N_METHODS; m++)
        if (b->wanted[m]) need += SERVER_BYTES + b->weight_bytes + kv / 512 * methods[m].bits_of_32;
    if (neap_mem_available(&available, &total) != 0 || need <= available) return 0;
    return neap_cli_error(NEAP_EXIT_FAILED, "a smaller --context or --batch, fewer methods",
                          "context of %ld tokens, batch %ld: the servers take %s, available is %s",
                          g->context, g->batch, neap_cli_size(need), neap_cli_size(available));
}

/* What is to be held coded is left out where it is f16. */
static int name_cache(bench *b, grid *g, size_t m) {
    json_t *stat = NULL;
    snprintf(g->kv[m], sizeof g->kv[m], "%s", methods[m].type);
    if (!methods[m].held) return 0;
    const int err = neap_instance_stat(neap_server_pid(g->servers[m]), &stat);
    if (err) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "neap stat: %s", neap_strerror(err));
    snprintf(g->kv[m], sizeof g->kv[m], "%s", neap_instance_text(stat, "kv"));
    if (strcmp(g->kv[m], "f16") == 0) {
        neap_cli_warn("%s is left out: %s", methods[m].name,
                      neap_instance_text(stat, "codec_note"));
        b->wanted[m] = false;
        b->left_out |= b->asked;
    }
    json_decref(stat);
    return 0;
}

/* LowRAM is fitted to what is there, when the next tokens have come. */
static int fit(const bench *b, const grid *g, neap_server *server) {
    const neap_tokens prompt = {.ids = b->text.ids, .n = (size_t)g->context + 1};
    neap_answer answer = {0};
    const int status = neap_server_complete(server, &prompt, 4, true, &answer);
    neap_answer_free(&answer);
    return status;
}

static int start(bench *b, grid *g, size_t m) {
    char kv[48] = "f16";
    if (methods[m].held) snprintf(kv, sizeof kv, "%s%s", methods[m].held, b->ratio);
    const neap_server_options options = {.model_path = b->path,
                                         .n_ctx = (uint32_t)((g->context + MORE_CELLS) * g->batch),
                                         .threads = neap_option_threads(),
                                         .n_slots = (unsigned)g->batch,
                                         .cache_type = methods[m].type,
                                         .attn = methods[m].stock ? NULL : "neap",
                                         .kv = kv,
                                         .kv_select = methods[m].selects ? b->select : "off",
                                         .stock = methods[m].stock,
                                         .slot_dir = b->folder};
    const bool is_fitted = methods[m].held && strcmp(methods[m].held, "lowram") == 0;
    int status = neap_server_start(&options, &g->servers[m]);
    if (!status && !is_fitted) status = name_cache(b, g, m);
    if (status || !b->wanted[m]) return status;
    if (!b->text.ids) status = read_text(b, g->servers[m]);
    if (b->prefill) {
        if (is_fitted) snprintf(g->kv[m], sizeof g->kv[m], "%s", kv);
        return status;
    }
    const neap_tokens context = {.ids = b->text.ids, .n = (size_t)g->context};
    if (!status) status = fill(b, g, &methods[m], g->servers[m], &context);
    if (!status && is_fitted) status = fit(b, g, g->servers[m]);
    return status || !is_fitted ? status : name_cache(b, g, m);
}

/* All bytes kept for the context: of stock what its cells take, of neap what it says. */
static int count_bytes(const bench *b, grid *g, size_t m) {
    json_t *stat = NULL;
    const uint64_t cells = (uint64_t)g->context * (uint64_t)g->batch;
    g->kv_bytes[m] = cells * b->kv_token_bytes / 512 * methods[m].bits_of_32;
    if (methods[m].stock) return 0;
    const int err = neap_instance_stat(neap_server_pid(g->servers[m]), &stat);
    if (err) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "neap stat: %s", neap_strerror(err));
    g->kv_bytes[m] = neap_instance_count(stat, "bytes", "kv_resident") +
                     neap_instance_count(stat, "bytes", "kv_compressed_memory") +
                     neap_instance_count(stat, "bytes", "kv_storage");
    json_decref(stat);
    return 0;
}

/* ---- measuring ---- */

static int measure(const bench *b, grid *g) {
    const neap_tokens prompt = {.ids = b->text.ids, .n = (size_t)g->context + 1};
    for (size_t rep = 0; rep < b->reps; rep++) {
        for (size_t i = 0; i < N_METHODS; i++) {
            const size_t m = (rep + i) % N_METHODS; /* each goes first in turn */
            neap_progress_set((double)(rep * N_METHODS + i) / (double)(b->reps * N_METHODS), NULL);
            if (!b->wanted[m]) continue;
            int status = b->prefill
                             ? neap_server_prefill(g->servers[m], &prompt, (unsigned)g->batch,
                                                   &g->tps[m][rep])
                             : neap_server_decode_speed(g->servers[m], &prompt, (unsigned)g->batch,
                                                        ANSWER, &g->tps[m][rep]);
            if (!status && rep == 0) status = count_bytes(b, g, m);
            if (status) return status;
        }
        g->n++;
    }
    return 0;
}

/* The method whose answer the others are held against. */
static size_t exact_of(const bench *b) {
    return b->wanted[OURS_F16] ? OURS_F16 : STOCK_F16;
}

/* Speed says nothing of what is generated: how often each method's likeliest token is the one after
 * exact keys and values, given those before it. Of one sequence; of several all are the same. */
static int measure_agreement(const bench *b, grid *g) {
    const neap_tokens prompt = {.ids = b->text.ids, .n = (size_t)g->context + 1};
    const size_t exact = exact_of(b);
    neap_answer answer = {0};
    for (size_t m = 0; m < N_METHODS; m++)
        g->agreement[m] = -1;
    if (b->prefill || !b->wanted[exact]) return 0;
    int status = neap_server_complete(g->servers[exact], &prompt, ANSWER, true, &answer);
    for (size_t m = 0; m < N_METHODS && !status; m++) {
        size_t same = 0;
        if (!b->wanted[m]) continue;
        status = neap_server_agreement(g->servers[m], &prompt, answer.tokens.ids, answer.tokens.n,
                                       &same);
        g->agreement[m] = (double)same / (double)answer.tokens.n;
    }
    neap_answer_free(&answer);
    return status;
}

static int measure_tasks(const bench *b, grid *g) {
    int status = 0;
    for (long i = 0; i < (b->prefill ? 0 : b->n_tasks) && !status; i++) {
        neap_server_task task = {0};
        for (size_t m = 0; m < N_METHODS && !status; m++) {
            size_t right = 0;
            if (!b->wanted[m]) continue;
            if (task.n_questions == 0)
                status = neap_server_task_make(g->servers[m], (uint32_t)i + 1, (size_t)g->context,
                                               &task);
            if (!status) status = fill(b, g, &methods[m], g->servers[m], &task.context);
            if (!status) status = neap_server_task_ask(g->servers[m], &task, &right);
            g->right[m] += right;
        }
        g->n_asked += task.n_questions;
        neap_server_task_free(&task);
    }
    return status;
}

static int run_grid(bench *b, grid *g) {
    int status = check_room(b, g);
    neap_progress_start("reading the context");
    for (size_t m = 0; m < N_METHODS && !status; m++)
        if (b->wanted[m]) status = start(b, g, m);
    neap_progress_stop();
    neap_progress_start("bench decode");
    if (!status) status = measure(b, g);
    if (!status) status = measure_agreement(b, g);
    if (!status) status = measure_tasks(b, g);
    neap_progress_stop();
    for (size_t m = 0; m < N_METHODS; m++)
        neap_server_stop(g->servers[m]);
    return status;
}

/* ---- results ---- */

/* n 0: one of the two was not measured. */
static neap_summary ratio_of(const bench *b, const grid *g, size_t m, size_t base) {
    double ratios[NEAP_BENCH_REPS_MAX];
    for (size_t i = 0; i < g->n && b->wanted[base]; i++)
        ratios[i] = g->tps[m][i] / g->tps[base][i];
    return neap_summarise(ratios, b->wanted[base] ? g->n : 0);
}

static json_t *ratio_json(const neap_summary *ratio) {
    return ratio->n ? json_real(ratio->median) : json_null();
}

static void report(const bench *b, const char *model, const grid *g, json_t *rows) {
    for (size_t i = 0; i < N_METHODS; i++) {
        const size_t m = b->order[i];
        if (!b->wanted[m]) continue;
        const neap_summary tps = neap_summarise(g->tps[m], g->n);
        const neap_summary to_f16 = ratio_of(b, g, m, STOCK_F16);
        const neap_summary to_ours = ratio_of(b, g, m, OURS_F16);
        json_array_append_new(
            rows,
            json_pack("{s:s, s:i, s:s, s:s, s:s, s:i, s:i, s:f, s:o, s:o, s:o, s:o, s:I, s:o, s:o}",
                      "model", model, "context", (int)g->context, "method", methods[m].name, "kv",
                      g->kv[m], "program", methods[m].stock ? "llama.cpp" : "neap", "batch",
                      (int)g->batch, "reps", (int)g->n, b->prefill ? "ttft_ms" : "tps", tps.median,
                      b->prefill ? "ttft_ms_range" : "tps_range", neap_summary_json(&tps),
                      "ratio_to_f16", ratio_json(&to_f16), "ratio_to_f16_range",
                      neap_summary_json(&to_f16), "ratio_to_neap", ratio_json(&to_ours), "kv_bytes",
                      (json_int_t)g->kv_bytes[m], "top1_agreement",
                      g->agreement[m] < 0 ? json_null() : json_real(g->agreement[m]), "tasks",
                      g->n_asked == 0 ? json_null()
                                      : json_pack("{s:I, s:I}", "right", (json_int_t)g->right[m],
                                                  "of", (json_int_t)g->n_asked)));
        if (b->options.as_json) continue;
        char same[16] = "-", tasks[48] = "-";
        if (g->n_asked > 0) snprintf(tasks, sizeof tasks, "%zu of %zu", g->right[m], g->n_asked);
        if (g->agreement[m] >= 0) snprintf(same, sizeof same, "%.0f %%", g->agreement[m] * 100);
        printf("%-22s %7ld %5ld  %-10s %8.1f (%.1f to %.1f)  %6.2f %6.2f  %10s %6s  %s\n", model,
               g->context, g->batch, methods[m].name, tps.median, tps.min, tps.max, to_f16.median,
               to_ours.median, neap_cli_size(g->kv_bytes[m]), same, tasks);
        fflush(stdout);
    }
}

typedef struct figure {
    neap_plot_panel panels[GRIDS_MAX];
    char titles[LIST_MAX][48], names[LIST_MAX][32];
    const char *groups[LIST_MAX];
    neap_plot_point points[LIST_MAX][N_METHODS][LIST_MAX];
} figure;

/* A panel for each context, bars by batch. */
static int plot(const bench *b, const char *model, const grid *grids) {
    char title[128];
    figure *f = calloc(1, sizeof *f);
    if (!f) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    for (size_t i = 0; i < b->n_batches; i++) {
        snprintf(f->names[i], sizeof f->names[i], "batch %ld", b->batches[i]);
        f->groups[i] = f->names[i];
    }
    for (size_t c = 0; c < b->n_contexts; c++) {
        snprintf(f->titles[c], sizeof f->titles[c], "context of %ld tokens", b->contexts[c]);
        neap_plot_panel *panel = &f->panels[c];
        panel->title = f->titles[c];
        for (size_t m = 0; m < N_METHODS; m++) {
            neap_plot_point *points = f->points[c][panel->n_series];
            for (size_t i = 0; i < b->n_batches && b->wanted[m]; i++) {
                const grid *g = &grids[c * b->n_batches + i];
                const neap_summary tps = neap_summarise(g->tps[m], g->n);
                points[i] = (neap_plot_point){
                    .x = (double)i, .y = tps.median, .low = tps.min, .high = tps.max};
            }
            if (b->wanted[m])
                panel->series[panel->n_series++] = (neap_plot_series){
                    .name = methods[m].name, .points = points, .n = b->n_batches};
        }
    }
    snprintf(title, sizeof title, "%.64s: %s, median, least and greatest", model,
             b->prefill ? "time to first token" : "generation");
    const neap_plot drawing = {.title = title,
                               .x_label = "sequences at once",
                               .y_label = b->prefill ? "milliseconds" : "tokens per second",
                               .panels = f->panels,
                               .n_panels = b->n_contexts,
                               .groups = f->groups,
                               .n_groups = b->n_batches};
    const int err = neap_plot_write(b->plot_path, &drawing);
    free(f);
    return err ? neap_cli_error(NEAP_EXIT_FAILED, NULL, "--plot %s: %s", b->plot_path,
                                neap_strerror(err))
               : 0;
}

/* ---- the whole ---- */

/* llama-server has no more cells a slot than the model was trained for. */
static void cut_contexts(bench *b, uint32_t n_trained) {
    const long most = (long)n_trained - (long)MORE_CELLS;
    for (size_t i = 0; most > 0 && i < b->n_contexts; i++) {
        if (b->contexts[i] <= most) continue;
        neap_cli_warn("the model has room for %u tokens: context of %ld instead of %ld", n_trained,
                      most, b->contexts[i]);
        b->contexts[i] = most;
    }
}

static int find_files(bench *b, const char *model) {
    struct stat info;
    neap_geometry geometry = {0};
    char cache[NEAP_PATH_MAX - 64];
    const int status = neap_model_resolve(model, b->path);
    if (status) return status;
    int err = neap_geometry_read(b->path, &geometry);
    if (!err && stat(b->path, &info) != 0) err = -errno;
    if (err)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "model %s: %s", b->path, neap_strerror(err));
    b->weight_bytes = (uint64_t)info.st_size;
    b->kv_token_bytes = geometry.kv_chunk_bytes / NEAP_CHUNK_CELLS * geometry.n_layers;
    cut_contexts(b, geometry.n_context);
    err = neap_cache_dir(cache, sizeof cache);
    if (!err) snprintf(b->folder, sizeof b->folder, "%s/bench/", cache);
    if (!err) err = neap_make_dirs(b->folder, 0700);
    return err ? neap_cli_error(NEAP_EXIT_FAILED, NULL, "bench folder: %s", neap_strerror(err)) : 0;
}

static int run(bench *b) {
    const char *model = neap_model_label(b->options.models[0]);
    int status = find_files(b, b->options.models[0]);
    /* What is short of memory on this machine must not evict in between. */
    if (!status) status = neap_option_common(NEAP_OPT_PRESSURE, "off");
    if (status) return status;
    grid *grids = calloc(b->n_contexts * b->n_batches, sizeof *grids);
    if (!grids) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    json_t *rows = json_array();
    if (!b->options.as_json)
        printf("%-22s %7s %5s  %-10s %26s  %6s %6s  %10s %6s  %s\n", "MODEL", "CONTEXT", "BATCH",
               "METHOD", b->prefill ? "FIRST TOKEN ms (min to max)" : "TOKENS/s (min to max)",
               "TO F16", "TO OUR", "KV", "SAME", "TASKS");
    for (size_t i = 0; i < b->n_contexts * b->n_batches && !status; i++) {
        grids[i].context = b->contexts[i / b->n_batches];
        grids[i].batch = b->batches[i % b->n_batches];
        status = run_grid(b, &grids[i]);
        if (!status) report(b, model, &grids[i], rows);
    }
    const bool any = json_array_size(rows) > 0;
    if (!status && any && b->plot_path) status = plot(b, model, grids);
    free(grids);
    neap_tokens_free(&b->text);
    if (!status && b->left_out) status = NEAP_EXIT_FAILED;
    if (any && b->options.as_json) {
        const int printed = neap_cli_print_json(
            json_pack("{s:o, s:o}", "machine", neap_machine_json(), "rows", rows));
        return status ? status : printed;
    }
    json_decref(rows);
    return neap_cli_finish(status);
}

/* ---- options ---- */

static const neap_command command = {
    "bench decode",
    "usage: neap bench decode [OPTIONS]\n"
    "\n"
    "Tokens per second of generation after a long context: llama-server with neap and without,\n"
    "with f16 keys and values and compressed ones, in turns. --model once; default:\n"
    "qwen2.5-coder-0.5b.\n"
    "\n"
    "  --context LIST   tokens of the context, as in 8192,32768 (default 32768; 4096 with "
    "--quick)\n"
    "  --batch LIST     sequences at once, as in 1,2,4 (default 1); each holds the context\n"
    "  --method LIST    of f16,q8_0,q4_0 (llama.cpp), f16-neap,q8_0-neap,q4_0-neap,klt,klt-sr,\n"
    "                   lowram,lowram-sr (default: all that can be had)\n"
    "  --ratio R        of klt and lowram (default: as of --kv)\n"
    "  --select N       tokens that klt-sr and lowram-sr choose (default 512)\n"
    "  --tasks N        also: N texts as long as the context, with questions (default 0)\n"
    "  --prefill        instead: the time from the request to the first token of all sequences, "
    "the\n"
    "                   context read anew\n"
    "  --plot FILE      draws tokens per second, or that time, into an SVG file\n"};

enum {
    OPT_CONTEXT = NEAP_OPT_BENCH,
    OPT_BATCH,
    OPT_METHOD,
    OPT_RATIO,
    OPT_SELECT,
    OPT_PREFILL,
    OPT_TASKS,
    OPT_PLOT
};

/* "1,2,4" */
static int parse_list(const char *option, const char *value, long min, long max, long *list,
                      size_t *ret_n) {
    *ret_n = 0;
    for (const char *p = value;; p++) {
        char *end;
        errno = 0;
        const long n = strtol(p, &end, 10);
        if (end == p || (*end && *end != ',') || errno || n < min || n > max || *ret_n == LIST_MAX)
            return neap_cli_error(NEAP_EXIT_USAGE, NULL,
                                  "%s %s: not a list of up to %d numbers from %ld to %ld", option,
                                  value, LIST_MAX, min, max);
        list[(*ret_n)++] = n;
        p = end;
        if (!*p) return 0;
    }
}

static int parse_methods(bench *b, const char *value) {
    size_t n = 0;
    memset(b->wanted, 0, sizeof b->wanted);
    b->asked = true;
    for (const char *p = value; *p;) {
        const size_t len = strcspn(p, ",");
        size_t m = 0;
        while (m < N_METHODS &&
               (strlen(methods[m].name) != len || memcmp(methods[m].name, p, len) != 0))
            m++;
        if (m == N_METHODS)
            return neap_cli_error(NEAP_EXIT_USAGE, "see neap bench decode --help",
                                  "--method %.*s: no such method", (int)len, p);
        if (!b->wanted[m]) b->order[n++] = m;
        b->wanted[m] = true;
        p += len + (p[len] == ',');
    }
    for (size_t m = 0; m < N_METHODS; m++)
        if (!b->wanted[m]) b->order[n++] = m;
    return *value ? 0
                  : neap_cli_error(NEAP_EXIT_USAGE, "see neap bench decode --help",
                                   "--method: which one?");
}

static int take_option(void *ctx, int code, const char *value) {
    char *end;
    bench *b = ctx;
    long n = 0;
    double ratio;
    int status;
    switch (code) {
    case OPT_CONTEXT:
        return parse_list("--context", value, 64, 1 << 20, b->contexts, &b->n_contexts);
    case OPT_BATCH:
        return parse_list("--batch", value, 1, 64, b->batches, &b->n_batches);
    case OPT_METHOD:
        return parse_methods(b, value);
    case OPT_RATIO:
        snprintf(b->ratio, sizeof b->ratio, ":%.24s", value);
        return neap_ratio_parse(value, &ratio) ? 0 : neap_option_ratio_error("--ratio", value);
    case OPT_SELECT:
        status = neap_option_number("--select", value, 8, 1 << 24, &n);
        snprintf(b->select, sizeof b->select, "%ld", n);
        return status;
    case OPT_TASKS:
        b->n_tasks = strtol(value, &end, 10);
        if (*value && !*end && b->n_tasks >= 0 && b->n_tasks <= 64) return 0;
        return neap_cli_error(NEAP_EXIT_USAGE, NULL, "--tasks %s: not a number up to 64", value);
    case OPT_PREFILL:
        b->prefill = true;
        return 0;
    case OPT_PLOT:
        b->plot_path = value;
        return 0;
    default:
        return neap_bench_option(code, value, &b->options);
    }
}

static void complete_options(bench *b) {
    const bool quick = b->options.quick;
    if (b->options.n_models == 0) b->options.models[b->options.n_models++] = "qwen2.5-coder-0.5b";
    if (b->n_contexts == 0) b->contexts[b->n_contexts++] = quick ? QUICK_CONTEXT : DEFAULT_CONTEXT;
    if (b->n_batches == 0) b->batches[b->n_batches++] = 1;
    b->reps = b->options.reps ? (size_t)b->options.reps : quick ? QUICK_REPS : DEFAULT_REPS;
}

int neap_bench_decode(int argc, char **argv) {
    static const struct option long_options[] = {NEAP_OPTIONS_BASIC,
                                                 NEAP_OPTIONS_BENCH,
                                                 {"context", required_argument, NULL, OPT_CONTEXT},
                                                 {"batch", required_argument, NULL, OPT_BATCH},
                                                 {"method", required_argument, NULL, OPT_METHOD},
                                                 {"ratio", required_argument, NULL, OPT_RATIO},
                                                 {"select", required_argument, NULL, OPT_SELECT},
                                                 {"prefill", no_argument, NULL, OPT_PREFILL},
                                                 {"tasks", required_argument, NULL, OPT_TASKS},
                                                 {"plot", required_argument, NULL, OPT_PLOT},
                                                 {0}};
    bench b = {.select = "512"};
    int status;
    memset(b.wanted, 1, sizeof b.wanted);
    for (size_t m = 0; m < N_METHODS; m++)
        b.order[m] = m;
    if (!neap_bench_parse(&command, long_options, argc, argv, take_option, &b, &status))
        return status;
    if (optind < argc || b.options.n_models > 1)
        return neap_cli_error(NEAP_EXIT_USAGE, "see neap bench decode --help",
                              "%s: one argument too many",
                              optind < argc ? argv[optind] : b.options.models[1]);
    complete_options(&b);
    /* Before hours of measuring rather than after them. */
    FILE *file = b.plot_path ? fopen(b.plot_path, "ae") : NULL;
    if (b.plot_path && !file)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "--plot %s: %s", b.plot_path,
                              neap_strerror(-errno));
    if (file) fclose(file);
    return run(&b);
}
