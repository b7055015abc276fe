/* bench_fidelity.c - `neap bench fidelity`: what a smaller cache costs in quality.
 *
 * A model reads the first tokens of a text exactly. Then its keys and values are replaced by what a
 * method makes of them, and the next 191 tokens of the text are read in one batch: what the model
 * expects after each of them is compared with what it expected on the untouched cache. All methods
 * are applied to the same exact cache, so that nothing but the method differs; the floor, which is
 * exact attention computed the other way (-fa off), says what a difference in rounding alone does.
 * What takes long and depends on the model and the text alone - contexts that were read, the floor
 * - is kept between runs (kept_context.h). Methods are single-threaded, so several compress at
 * once.
 *
 * Matrix products of quantised weights round their input to 8 bits, by which any difference,
 * however small, grows to a KL of some 0.005. So the weights are widened to f32 first, unless asked
 * otherwise; the file is kept.
 *
 * The tasks (tasks.h) work alike: the text is read exactly, compressed, then asked about. */
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"
#include "fidelity_method.h"
#include "fidelity_score.h"
#include "kept_context.h"
#include "klt_file.h"
#include "proc.h"
#include "task_fit.h"
#include "tasks.h"
#include "textfile.h"

#define N_NEXT 191u
#define CONTEXTS_MAX 8
#define METHODS_MAX 64
#define TEXTS_MAX 64
#define TEXT_BYTES_MAX ((size_t)64 << 20)
#define AT_ONCE_MAX 4u /* methods that compress, a state each */
#define TASK_ROOM 256u /* tokens of a question and its answer */
#define FLOOR "f16-fa-off"

static const char default_methods[] =
    FLOOR ",none,q8,cachegen,q8_0-rotated,q4_0,q4_0-rotated,turboquant:4,"
          "turboquant-centred:4,kivi:2,xkv:4,lowram:4,lowram-q:4.25,lowram-q:6,"
          "lowram-q-warm:4.25,lowram-q-warm:6,"
          "evict:2,evict-mass:2,lowram-e:4,lowram-eq:8,lowram-eq-mass:8,"
          "klt-head:4,klt-head:6,klt-joint:6,klt-joint:8,klt-joint:12,klt-joint:16";
static const char quick_methods[] =
    FLOOR ",q8,cachegen,q8_0-rotated,q4_0-rotated,klt-head:4,klt-joint:8";

/* What a method makes of an exact state. */
typedef struct compressed {
    neap_kv_file state; /* no bytes: it failed */
    neap_method_kept kept;
} compressed;

/* Answers to the questions of a kind. */
typedef struct tally {
    size_t n, n_right;
    size_t n_lost; /* right on the exact cache, and wrong */
    double share;  /* of the answers' tokens, summed up */
} tally;

/* A method and what was measured of it in the context at hand. */
typedef struct column {
    bool is_floor;
    bool is_out; /* it failed here, which has been said */
    neap_method method;
    neap_token_score *scores; /* [n_texts][N_NEXT] */
    uint64_t raw_bytes, kept_bytes, n_tokens, n_kept;
    uint64_t text_bytes, text_tokens; /* kept of the text at hand */
    compressed made;                  /* of the state at hand, while it is looked at */
    neap_method_loss loss;
    tally tasks[NEAP_TASK_KINDS], task[NEAP_TASK_KINDS]; /* all; those of the text at hand */
} column;

typedef struct bench {
    neap_bench_options options;
    long contexts[CONTEXTS_MAX];
    size_t n_contexts;
    const char *methods; /* list; NULL: the default one */
    const char *klt_file;
    char *texts[TEXTS_MAX]; /* paths */
    size_t n_texts;
    bool own_texts; /* --text */
    long max_texts, n_tasks;
    bool own_weights;
    /* The model at hand. */
    const char *label;
    char weights[NEAP_PATH_MAX];
    uint32_t n_ctx;
    neap_session *session, *floor; /* the latter once it is needed */
    neap_kept kept;
    column columns[METHODS_MAX];
    size_t n_columns;
    bool left_out;                                       /* some method, somewhere */
    size_t n_used;                                       /* texts long enough for the context */
    tally tasks[NEAP_TASK_KINDS], task[NEAP_TASK_KINDS]; /* of the exact cache */
    size_t n_steps, n_done;                              /* of the progress bar */
} bench;

/* Asked to end: what is measured whole is reported. A second signal ends it at once. */
static volatile sig_atomic_t stopped;

static void stop(int number) {
    (void)number;
    stopped = 1;
}

static void stop_on_signals(void) {
    struct sigaction action = {.sa_handler = stop, .sa_flags = (int)SA_RESETHAND};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

static int no_memory(void) {
    return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
}

/* Fails once it is to stop. */
static int step(bench *b, const char *what) {
    char text[128];
    snprintf(text, sizeof text, "%s, %s", b->label, what);
    neap_progress_set((double)b->n_done++ / (double)b->n_steps, text);
    return stopped ? NEAP_EXIT_FAILED : 0;
}

/* ---- texts ---- */

static int add_text(bench *b, const char *path) {
    if (b->n_texts == TEXTS_MAX)
        return neap_cli_error(NEAP_EXIT_USAGE, NULL, "more than %d texts", TEXTS_MAX);
    b->texts[b->n_texts] = strdup(path);
    return b->texts[b->n_texts] ? (b->n_texts++, 0) : no_memory();
}

static int is_text(const struct dirent *entry) {
    return entry->d_name[0] != '.';
}

/* Fetches those of the default texts that are not there; what is missing then is said by it. */
static void fetch_texts(void) {
    char tool[NEAP_PATH_MAX];
    int ended;
    if (neap_path_tool("fetch-texts", tool) != 0) return;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        dup2(STDERR_FILENO, STDOUT_FILENO);
        execlp("python3", "python3", tool, (char *)NULL);
        _exit(127);
    }
    while (child > 0 && waitpid(child, &ended, 0) < 0 && errno == EINTR)
        ;
}

static int list_texts(bench *b) {
    char cache[NEAP_PATH_MAX - 64], folder[NEAP_PATH_MAX], path[2 * NEAP_PATH_MAX];
    struct dirent **entries;
    const int err = neap_cache_dir(cache, sizeof cache);
    if (err) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(err));
    snprintf(folder, sizeof folder, "%s/texts", cache);
    fetch_texts();
    const int n = scandir(folder, &entries, is_text, alphasort);
    if (n <= 0)
        return neap_cli_error(NEAP_EXIT_FAILED, "give some with --text, or run tools/fetch-texts",
                              "%s: no texts are there", folder);
    int status = 0;
    for (int i = 0; i < n; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, entries[i]->d_name);
        if (!status && b->n_texts < (size_t)b->max_texts) status = add_text(b, path);
        free(entries[i]);
    }
    free(entries);
    return status;
}

static int read_tokens(bench *b, const char *path, neap_tokens *ret_tokens) {
    char *text = NULL;
    size_t len;
    const int err = neap_textfile_read(path, TEXT_BYTES_MAX, &text, &len);
    if (err) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", path, neap_strerror(err));
    const int status = neap_session_tokenize(b->session, text, len, true, ret_tokens);
    free(text);
    return status;
}

/* ---- the cache, compressed ---- */

typedef struct compressor {
    pthread_t thread;
    bench *b;
    column *column;
    const neap_kv_file *exact;
    int status;
} compressor;

static void free_made(column *c) {
    neap_kv_file_free(&c->made.state);
    free(c->made.kept.tokens);
    c->made = (compressed){0};
}

/* A method that cannot - a context too short for it, a model it does not know - is left out, and
 * the others go on. */
static void *compress(void *ctx) {
    compressor *job = ctx;
    column *c = job->column;
    const size_t n_bytes = job->exact->n_bytes;
    uint8_t *bytes = malloc(n_bytes);
    if (bytes) memcpy(bytes, job->exact->bytes, n_bytes);
    const int err = bytes ? neap_kv_file_of_state(bytes, n_bytes, &c->made.state) : -ENOMEM;
    if (err)
        job->status =
            neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", c->method.name, neap_strerror(err));
    else
        c->is_out =
            neap_method_apply(&c->method, job->b->session, &c->made.state, &c->made.kept) != 0;
    if (c->is_out || job->status)
        free_made(c);
    else
        neap_method_add_loss(job->b->session, job->exact, &c->made.state, &c->made.kept, &c->loss);
    return NULL;
}

/* Has the method of column i compress, unless it has, and the next ones at the same time: as many
 * as there are threads. */
static int make_compressed(bench *b, size_t i, const neap_kv_file *exact) {
    const size_t n_threads = neap_option_n_threads();
    compressor jobs[AT_ONCE_MAX];
    size_t n = 0, n_started = 0;
    if (b->columns[i].made.state.bytes) return 0;
    for (; i < b->n_columns && n < n_threads && n < AT_ONCE_MAX; i++)
        if (!b->columns[i].is_floor && !b->columns[i].is_out)
            jobs[n++] = (compressor){.b = b, .column = &b->columns[i], .exact = exact};
    while (n_started < n &&
           pthread_create(&jobs[n_started].thread, NULL, compress, &jobs[n_started]) == 0)
        n_started++;
    for (size_t j = n_started; j < n; j++)
        compress(&jobs[j]);
    int status = 0;
    for (size_t j = 0; j < n; j++) {
        if (j < n_started) pthread_join(jobs[j].thread, NULL);
        status = status ? status : jobs[j].status;
        b->left_out |= jobs[j].column->is_out;
    }
    return status;
}

/* Puts what the method made into the context. */
static int load_compressed(bench *b, const column *c) {
    const neap_method_kept *kept = &c->made.kept;
    const int status = neap_session_set(b->session, &c->made.state);
    if (status || !kept->tokens) return status;
    return neap_session_keep_only(b->session, kept->tokens, kept->n_tokens);
}

/* ---- texts: how far expectations move ---- */

static int open_floor(bench *b) {
    const neap_session_options options = {.model_path = b->weights,
                                          .n_ctx = b->n_ctx,
                                          .threads = neap_option_threads(),
                                          .no_flash_attention = true};
    return b->floor ? 0 : neap_session_open(&options, &b->floor);
}

static int score_floor(bench *b, const neap_tokens *tokens, size_t context,
                       const float *exact_logits, neap_token_score *scores) {
    const size_t n_tokens = context + N_NEXT + 1, n_bytes = N_NEXT * sizeof *scores;
    const float *logits;
    if (neap_kept_find(&b->kept, FLOOR, tokens->ids, n_tokens, scores, n_bytes)) return 0;
    int status = open_floor(b);
    if (!status) status = neap_session_keep(b->floor, 0);
    if (!status) status = neap_session_read_watched(b->floor, tokens->ids, context);
    if (!status) status = neap_session_logits(b->floor, tokens->ids + context, N_NEXT, &logits);
    if (status) return status;
    neap_token_scores(exact_logits, logits, tokens->ids + context + 1, N_NEXT,
                      neap_session_vocabulary(b->session), scores);
    neap_kept_put(&b->kept, FLOOR, tokens->ids, n_tokens, scores, n_bytes);
    return 0;
}

static int score_method(bench *b, column *c, const neap_tokens *tokens, size_t context,
                        const float *exact_logits, neap_token_score *scores) {
    const float *logits;
    int status = load_compressed(b, c);
    if (!status) status = neap_session_logits(b->session, tokens->ids + context, N_NEXT, &logits);
    if (!status)
        neap_token_scores(exact_logits, logits, tokens->ids + context + 1, N_NEXT,
                          neap_session_vocabulary(b->session), scores);
    return status;
}

static int score_methods(bench *b, const neap_tokens *tokens, size_t context,
                         const neap_kv_file *exact, const float *exact_logits) {
    int status = 0;
    for (size_t i = 0; i < b->n_columns && !status; i++) {
        column *c = &b->columns[i];
        neap_token_score *scores = c->scores + b->n_used * N_NEXT;
        status = step(b, c->method.name);
        if (!status && c->is_floor) status = score_floor(b, tokens, context, exact_logits, scores);
        if (status || c->is_floor || c->is_out) continue;
        status = make_compressed(b, i, exact);
        if (!status && !c->is_out)
            status = score_method(b, c, tokens, context, exact_logits, scores);
        c->text_bytes = c->made.kept.bytes;
        c->text_tokens = c->made.kept.tokens ? c->made.kept.n_tokens : exact->n_cells;
        free_made(c);
    }
    return status;
}

/* A text that every method was measured on. */
static void count_text(bench *b, const neap_kv_file *exact) {
    for (size_t i = 0; i < b->n_columns; i++) {
        column *c = &b->columns[i];
        c->kept_bytes += c->text_bytes;
        c->n_kept += c->text_tokens;
        c->n_tokens += exact->n_cells;
        c->raw_bytes += neap_method_raw_bytes(b->session, exact);
    }
    b->n_used++;
}

static int measure_text(bench *b, const neap_tokens *tokens, size_t context) {
    const size_t n_logits = (size_t)N_NEXT * neap_session_vocabulary(b->session);
    neap_kv_file exact = {0};
    const float *logits = NULL;
    float *kept = malloc(n_logits * sizeof *kept);
    int status = kept ? step(b, "reading") : no_memory();
    if (!status) status = neap_kept_read(&b->kept, b->session, tokens->ids, context);
    if (!status) status = neap_session_get(b->session, &exact);
    if (!status) status = neap_session_logits(b->session, tokens->ids + context, N_NEXT, &logits);
    if (!status) {
        memcpy(kept, logits, n_logits * sizeof *kept);
        status = score_methods(b, tokens, context, &exact, kept);
    }
    for (size_t i = 0; i < b->n_columns; i++)
        free_made(&b->columns[i]);
    if (!status) count_text(b, &exact);
    neap_kv_file_free(&exact);
    free(kept);
    return status;
}

static int measure_texts(bench *b, size_t context) {
    int status = 0;
    b->n_used = 0;
    for (size_t i = 0; i < b->n_texts && !status; i++) {
        neap_tokens tokens = {0};
        status = read_tokens(b, b->texts[i], &tokens);
        if (!status && tokens.n > context + N_NEXT)
            status = measure_text(b, &tokens, context);
        else if (!status)
            neap_cli_warn("%s: %zu tokens are too few for a context of %zu", b->texts[i], tokens.n,
                          context);
        neap_tokens_free(&tokens);
    }
    if (!status && b->n_used == 0)
        status = neap_cli_error(NEAP_EXIT_FAILED, "give a smaller --context",
                                "no text has %zu tokens", context + N_NEXT + 1);
    return status;
}

/* ---- tasks ---- */

typedef struct asked {
    int kind;
    neap_tokens tokens; /* of the question and the right answer */
    size_t n_question;
    bool is_right; /* on the exact cache */
} asked;

static int tokenize_question(bench *b, const neap_question *question, asked *ret_asked) {
    neap_tokens text = {0}, answer = {0};
    int status =
        neap_session_tokenize(b->session, question->text, strlen(question->text), false, &text);
    if (!status)
        status = neap_session_tokenize(b->session, question->answer, strlen(question->answer),
                                       false, &answer);
    int32_t *ids = status ? NULL : malloc((text.n + answer.n) * sizeof *ids);
    if (ids) {
        memcpy(ids, text.ids, text.n * sizeof *ids);
        memcpy(ids + text.n, answer.ids, answer.n * sizeof *ids);
        *ret_asked = (asked){question->kind, {ids, text.n + answer.n}, text.n, false};
    } else if (!status) {
        status = no_memory();
    }
    neap_tokens_free(&text);
    neap_tokens_free(&answer);
    return status;
}

/* Whether each token of the answer is the likeliest after those before it: then the model, which
 * takes the likeliest, would have given it. One batch. */
static int answer(bench *b, const asked *q, tally *tasks, bool *ret_right) {
    const size_t n_vocab = neap_session_vocabulary(b->session);
    const size_t n = q->tokens.n - q->n_question;
    const float *logits = NULL;
    size_t n_hit = 0;
    const int status = neap_session_logits(b->session, q->tokens.ids, q->tokens.n - 1, &logits);
    if (status) return status;
    for (size_t i = 0; i < n; i++) {
        const size_t at = q->n_question + i;
        n_hit += neap_likeliest(logits + (at - 1) * n_vocab, n_vocab) == (size_t)q->tokens.ids[at];
    }
    *ret_right = n_hit == n;
    tasks[q->kind].n++;
    tasks[q->kind].n_right += n_hit == n;
    tasks[q->kind].share += (double)n_hit / (double)n;
    return 0;
}

static int ask_exact(bench *b, asked *questions, size_t n, const neap_kv_file *exact) {
    int status = 0;
    for (size_t i = 0; i < n && !status; i++) {
        status = neap_session_set(b->session, exact);
        if (!status) status = answer(b, &questions[i], b->task, &questions[i].is_right);
    }
    return status;
}

static int ask_method(bench *b, column *c, const asked *questions, size_t n) {
    int status = 0;
    for (size_t i = 0; i < n && !status; i++) {
        bool is_right = false;
        status = load_compressed(b, c);
        if (!status) status = answer(b, &questions[i], c->task, &is_right);
        c->task[questions[i].kind].n_lost += questions[i].is_right && !is_right;
    }
    return status;
}

static int ask_methods(bench *b, const asked *questions, size_t n, const neap_kv_file *exact) {
    int status = 0;
    for (size_t i = 0; i < b->n_columns && !status; i++) {
        column *c = &b->columns[i];
        status = step(b, c->method.name);
        if (status || c->is_floor || c->is_out) continue;
        status = make_compressed(b, i, exact);
        if (!status && !c->is_out) status = ask_method(b, c, questions, n);
        free_made(c);
    }
    return status;
}

static void add_tallies(tally *sums, const tally *more) {
    for (size_t i = 0; i < NEAP_TASK_KINDS; i++) {
        sums[i].n += more[i].n;
        sums[i].n_right += more[i].n_right;
        sums[i].n_lost += more[i].n_lost;
        sums[i].share += more[i].share;
    }
}

/* A text that every method was asked about. */
static void count_task(bench *b) {
    add_tallies(b->tasks, b->task);
    for (size_t i = 0; i < b->n_columns; i++)
        add_tallies(b->columns[i].tasks, b->columns[i].task);
}

static int measure_task(bench *b, const neap_task *task, const neap_tokens *context) {
    asked questions[NEAP_TASK_QUESTIONS] = {0};
    neap_kv_file exact = {0};
    int status = step(b, "reading a task");
    memset(b->task, 0, sizeof b->task);
    for (size_t i = 0; i < b->n_columns; i++)
        memset(b->columns[i].task, 0, sizeof b->columns[i].task);
    for (size_t i = 0; i < task->n_questions && !status; i++)
        status = tokenize_question(b, &task->questions[i], &questions[i]);
    if (!status) status = neap_kept_read(&b->kept, b->session, context->ids, context->n);
    if (!status) status = neap_session_get(b->session, &exact);
    if (!status) status = ask_exact(b, questions, task->n_questions, &exact);
    if (!status) status = ask_methods(b, questions, task->n_questions, &exact);
    if (!status) count_task(b);
    for (size_t i = 0; i < b->n_columns; i++)
        free_made(&b->columns[i]);
    for (size_t i = 0; i < task->n_questions; i++)
        neap_tokens_free(&questions[i].tokens);
    neap_kv_file_free(&exact);
    return status;
}

static int tokenize_text(void *ctx, const char *text, neap_tokens *ret_tokens) {
    const bench *b = ctx;
    return neap_session_tokenize(b->session, text, strlen(text), true, ret_tokens);
}

static int measure_tasks(bench *b, size_t n_tokens) {
    int status = 0;
    for (int text = 0; text < NEAP_TASK_TEXTS && !status; text++)
        for (long i = 0; i < b->n_tasks && !status; i++) {
            neap_task task = {0};
            neap_tokens context = {0};
            status =
                neap_task_fit(text, (uint32_t)i + 1, n_tokens, tokenize_text, b, &task, &context);
            if (!status) status = measure_task(b, &task, &context);
            neap_tokens_free(&context);
            neap_task_free(&task);
        }
    return status;
}

/* ---- the model ---- */

static int add_column(bench *b, const char *name, const char *model_path) {
    column *c = &b->columns[b->n_columns];
    bool is_there = true;
    if (b->n_columns == METHODS_MAX)
        return neap_cli_error(NEAP_EXIT_USAGE, NULL, "more than %d methods", METHODS_MAX);
    *c = (column){.is_floor = strcmp(name, FLOOR) == 0};
    if (c->is_floor)
        snprintf(c->method.name, sizeof c->method.name, "%s", name);
    else {
        const int status = neap_method_open(name, model_path, &c->method, &is_there);
        if (status) return status;
    }
    if (!is_there && b->methods == neap_method_ablations)
        neap_cli_warn("%s is left out: neap train has not learned its start for %s", name,
                      b->label);
    if (!is_there && b->methods && b->methods != neap_method_ablations)
        return neap_cli_error(NEAP_EXIT_FAILED, "neap train makes it, with --profile and --ratio",
                              "%s: not trained for %s", name, b->label);
    b->n_columns += is_there;
    return 0;
}

static int add_klt_file(bench *b, const char *model_path) {
    uint64_t digest;
    const int err = neap_model_digest(model_path, &digest);
    if (err)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", model_path, neap_strerror(err));
    column *c = &b->columns[b->n_columns];
    *c = (column){0};
    const int status = neap_method_open_klt(b->klt_file, digest, &c->method);
    b->n_columns += status == 0;
    return status;
}

/* Of a list "q8,klt-head:4"; false: it has no more. */
static bool next_name(const char **inout_names, char ret_name[NEAP_METHOD_NAME]) {
    const char *names = *inout_names;
    const size_t len = strcspn(names, ",");
    if (!*names) return false;
    snprintf(ret_name, NEAP_METHOD_NAME, "%.*s", (int)len, names);
    *inout_names = names + len + (names[len] == ',');
    return true;
}

static int open_methods(bench *b, const char *model_path) {
    const char *names = b->methods         ? b->methods
                        : b->options.quick ? quick_methods
                                           : default_methods;
    char name[NEAP_METHOD_NAME];
    int status = 0;
    while (!status && next_name(&names, name))
        status = add_column(b, name, model_path);
    if (!status && b->klt_file && b->n_columns < METHODS_MAX) status = add_klt_file(b, model_path);
    for (size_t i = 0; i < b->n_columns && !status; i++) {
        b->columns[i].scores = calloc(b->n_texts * N_NEXT, sizeof *b->columns[i].scores);
        if (!b->columns[i].scores) status = no_memory();
    }
    return status;
}

/* The model with weights in f32, made once. */
static int find_weights(bench *b, const char *model_path) {
    char made[NEAP_PATH_MAX];
    snprintf(b->weights, sizeof b->weights, "%s", model_path);
    if (b->own_weights) return 0;
    snprintf(b->weights, sizeof b->weights, "%s/%s.gguf", b->kept.folder, b->kept.model);
    if (access(b->weights, R_OK) == 0) return 0;
    snprintf(made, sizeof made, "%s/.f32-%d", b->kept.folder, neap_proc_self());
    neap_progress_set(0, "widening the weights");
    const int status = neap_session_widen(model_path, made);
    if (!status && rename(made, b->weights) != 0)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", b->weights, neap_strerror(-errno));
    if (status) unlink(made);
    return status;
}

static int open_session(bench *b) {
    long most = 0;
    for (size_t i = 0; i < b->n_contexts; i++)
        most = b->contexts[i] > most ? b->contexts[i] : most;
    b->n_ctx = (uint32_t)most + TASK_ROOM;
    const neap_session_options options = {
        .model_path = b->weights, .n_ctx = b->n_ctx, .threads = neap_option_threads()};
    return neap_session_open(&options, &b->session);
}

static void close_model(bench *b) {
    neap_session_close(b->session);
    neap_session_close(b->floor);
    b->session = b->floor = NULL;
    for (size_t i = 0; i < b->n_columns; i++) {
        neap_method_close(&b->columns[i].method);
        free(b->columns[i].scores);
    }
    b->n_columns = 0;
}

/* ---- report ---- */

/* Of all questions of the kinds that the model can answer: half of them or more, on the exact
 * cache. n 0: there are none. */
static tally sum_of(const bench *b, const tally tasks[NEAP_TASK_KINDS]) {
    tally sum = {0};
    for (size_t i = 0; i < NEAP_TASK_KINDS; i++) {
        if (2 * b->tasks[i].n_right < b->tasks[i].n) continue;
        sum.n += tasks[i].n;
        sum.n_right += tasks[i].n_right;
        sum.n_lost += tasks[i].n_lost;
    }
    return sum;
}

static bool has_tasks(const bench *b, const column *c) {
    return !c->is_floor && sum_of(b, c->tasks).n > 0;
}

static double score_of(const bench *b, const tally tasks[NEAP_TASK_KINDS]) {
    const tally sum = sum_of(b, tasks);
    return (double)sum.n_right / (double)sum.n;
}

static json_t *tasks_json(const bench *b, const column *c) {
    json_t *tasks = json_object();
    for (size_t i = 0; i < NEAP_TASK_KINDS && b->tasks[i].n > 0; i++) {
        const tally *exact = &b->tasks[i], *own = &c->tasks[i];
        const double n = (double)exact->n;
        json_object_set_new(tasks, neap_task_names[i],
                            json_pack("{s:I, s:f, s:f, s:I, s:f, s:f}", "questions",
                                      (json_int_t)exact->n, "baseline", (double)exact->n_right / n,
                                      "score", (double)own->n_right / n, "lost",
                                      (json_int_t)own->n_lost, "baseline_tokens", exact->share / n,
                                      "score_tokens", own->share / n));
    }
    return tasks;
}

static double mean_kl(const neap_token_score *scores) {
    double sum = 0;
    for (size_t i = 0; i < N_NEXT; i++)
        sum += scores[i].kl;
    return sum / N_NEXT;
}

static double share_of(const neap_method_loss *loss, size_t plane) {
    return loss->power[plane] > 0 ? loss->lost[plane] / loss->power[plane] : 0;
}

static json_t *row_json(const bench *b, const column *c, long context, const neap_fidelity *f) {
    const bool has = has_tasks(b, c);
    json_t *by_text = json_array();
    for (size_t i = 0; i < b->n_used; i++)
        json_array_append_new(by_text, json_real(mean_kl(c->scores + i * N_NEXT)));
    return json_pack("{s:s, s:I, s:s, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:o, s:o, s:o, "
                     "s:o, s:I, s:I, s:I, s:o, s:s}",
                     "model", b->label, "context", (json_int_t)context, "method", c->method.name,
                     "ratio", c->is_floor ? 1.0 : (double)c->raw_bytes / (double)c->kept_bytes,
                     "kept_share", c->is_floor ? 1.0 : (double)c->n_kept / (double)c->n_tokens,
                     "key_error", share_of(&c->loss, 0), "value_error", share_of(&c->loss, 1), "kl",
                     f->kl, "kl_low", f->kl_low, "kl_high", f->kl_high, "ppl_ratio", f->ppl_ratio,
                     "top1_agreement", f->top1_agreement, "task_score",
                     has ? json_real(score_of(b, c->tasks)) : json_null(), "task_baseline",
                     has ? json_real(score_of(b, b->tasks)) : json_null(), "task_lost",
                     has ? json_integer((json_int_t)sum_of(b, c->tasks).n_lost) : json_null(),
                     "tasks", !c->is_floor && b->n_tasks > 0 ? tasks_json(b, c) : json_null(),
                     "model_bytes", (json_int_t)neap_method_model_bytes(&c->method, b->session),
                     "texts", (json_int_t)b->n_used, "tokens", (json_int_t)(b->n_used * N_NEXT),
                     "kl_by_text", by_text, "weights", b->own_weights ? "own" : "f32");
}

static int name_width(const bench *b) {
    const char *names = b->methods ? b->methods : default_methods;
    char name[NEAP_METHOD_NAME];
    size_t width = 20;
    while (next_name(&names, name))
        width = strlen(name) > width ? strlen(name) : width;
    return (int)width;
}

static void print_row(const bench *b, const column *c, long context, const neap_fidelity *f) {
    char tasks[24] = "-";
    if (has_tasks(b, c))
        snprintf(tasks, sizeof tasks, "%.2f/%.2f", score_of(b, c->tasks), score_of(b, b->tasks));
    printf("%-20s %7ld %-*s %6.2f %9.6f [%.6f %.6f] %7.4f %6.3f %10s %10s %5zu\n", b->label,
           context, name_width(b), c->method.name,
           c->is_floor ? 1.0 : (double)c->raw_bytes / (double)c->kept_bytes, f->kl, f->kl_low,
           f->kl_high, f->ppl_ratio, f->top1_agreement, tasks,
           neap_cli_size(neap_method_model_bytes(&c->method, b->session)), b->n_used);
}

static void report(bench *b, long context, json_t *rows) {
    for (size_t i = 0; i < b->n_columns; i++) {
        column *c = &b->columns[i];
        const neap_fidelity f = neap_fidelity_summarise(c->scores, b->n_used, N_NEXT);
        if (!c->is_out) json_array_append_new(rows, row_json(b, c, context, &f));
        if (!c->is_out && !b->options.as_json) print_row(b, c, context, &f);
        c->is_out = false;
        c->raw_bytes = c->kept_bytes = c->n_tokens = c->n_kept = 0;
        c->loss = (neap_method_loss){0};
        memset(c->tasks, 0, sizeof c->tasks);
    }
    memset(b->tasks, 0, sizeof b->tasks);
    if (!b->options.as_json) fflush(stdout);
}

static int run_model(bench *b, const char *model, json_t *rows) {
    char model_path[NEAP_PATH_MAX];
    b->label = neap_model_label(model);
    neap_progress_start("bench fidelity");
    int status = neap_model_resolve(model, model_path);
    if (!status) status = open_methods(b, model_path);
    if (!status) status = neap_kept_open(model_path, b->own_weights ? "own" : "f32", &b->kept);
    b->kept.stop = &stopped;
    if (!status) status = find_weights(b, model_path);
    if (!status) status = open_session(b);
    const size_t n_items = b->n_texts + (size_t)b->n_tasks * NEAP_TASK_TEXTS;
    b->n_steps = b->n_contexts * n_items * (b->n_columns + 1);
    b->n_done = 0;
    for (size_t i = 0; i < b->n_contexts && !status; i++) {
        status = measure_texts(b, (size_t)b->contexts[i]);
        if (!status) status = measure_tasks(b, (size_t)b->contexts[i]);
        if (!status || (stopped && b->n_used > 0)) report(b, b->contexts[i], rows);
    }
    neap_progress_stop();
    close_model(b);
    return status;
}

static int run(bench *b) {
    json_t *rows = json_array();
    stop_on_signals();
    int status = b->own_texts ? 0 : list_texts(b);
    if (!status && !b->options.as_json)
        printf("%-20s %7s %-*s %6s %9s %-19s %7s %6s %10s %10s %5s\n", "MODEL", "CONTEXT",
               name_width(b), "METHOD", "RATIO", "KL", "95 %", "PPL", "TOP-1", "TASKS", "FOR MODEL",
               "TEXTS");
    for (size_t i = 0; i < b->options.n_models && !status; i++)
        status = run_model(b, b->options.models[i], rows);
    if (!status && b->left_out) status = NEAP_EXIT_FAILED;
    if (stopped) neap_cli_warn("stopped: rows are of the texts that were read whole");
    if (!b->options.as_json || json_array_size(rows) == 0) {
        json_decref(rows);
        return neap_cli_finish(status);
    }
    json_t *texts = json_array();
    for (size_t i = 0; i < b->n_texts; i++)
        json_array_append_new(texts, json_string(b->texts[i]));
    const int printed = neap_cli_print_json(
        json_pack("{s:o, s:o, s:o}", "machine", neap_machine_json(), "texts", texts, "rows", rows));
    return status ? status : printed;
}

/* ---- options ---- */

enum {
    OPT_CONTEXT = NEAP_OPT_BENCH,
    OPT_METHOD,
    OPT_TEXTS,
    OPT_TEXT,
    OPT_TASKS,
    OPT_KLT,
    OPT_WEIGHTS
};

static const neap_command command = {
    "bench fidelity",
    "usage: neap bench fidelity [OPTIONS]\n"
    "\n"
    "What smaller caches cost: how far a model's expectations of the next tokens of real texts "
    "move\n"
    "when the context before them is compressed, and whether it still answers questions about it.\n"
    "--model may be given several times; default: all that are fetched.\n"
    "\n"
    "  --context LIST   tokens of the context (default 4096; 2048 with --quick)\n"
    "  --method LIST    what to compare (see below; default: all, klt as far as it was trained)\n"
    "  --klt-file FILE  one more method: this file of codec klt\n"
    "  --texts N        the first N of the texts that tools/fetch-texts brings (6; --quick: 3)\n"
    "  --text FILE      this text instead of those; may be repeated\n"
    "  --tasks N        texts of each kind with questions (2; --quick: 1; 0: none)\n"
    "  --weights W      f32 (default: widened, so that their rounding hides nothing) or own\n"
    "\n"
    "methods:\n"
    "  " FLOOR
    "             the exact cache, attention computed without -fa: the floor\n" NEAP_METHOD_HELP};

static int take_contexts(bench *b, const char *list) {
    char item[32];
    int status = 0;
    b->n_contexts = 0;
    for (size_t len; *list && !status; list += len + (list[len] == ',')) {
        len = strcspn(list, ",");
        if (b->n_contexts == CONTEXTS_MAX)
            return neap_cli_error(NEAP_EXIT_USAGE, NULL, "more than %d contexts", CONTEXTS_MAX);
        snprintf(item, sizeof item, "%.*s", (int)len, list);
        status = neap_option_number("--context", item, 64, 1000000, &b->contexts[b->n_contexts++]);
    }
    return status;
}

static int take_methods(bench *b, const char *list) {
    char name[NEAP_METHOD_NAME];
    int status = 0;
    b->methods = list = strcmp(list, "ablations") == 0 ? neap_method_ablations : list;
    while (!status && next_name(&list, name))
        if (strcmp(name, FLOOR) != 0) status = neap_method_check(name);
    return status;
}

static int take_option(void *ctx, int code, const char *value) {
    bench *b = ctx;
    switch (code) {
    case OPT_CONTEXT:
        return take_contexts(b, value);
    case OPT_METHOD:
        return take_methods(b, value);
    case OPT_KLT:
        b->klt_file = value;
        return 0;
    case OPT_TEXTS:
        return neap_option_number("--texts", value, 1, TEXTS_MAX, &b->max_texts);
    case OPT_TEXT:
        b->own_texts = true;
        return add_text(b, value);
    case OPT_TASKS:
        return neap_option_number("--tasks", value, 0, 100, &b->n_tasks);
    case OPT_WEIGHTS:
        b->own_weights = strcmp(value, "own") == 0;
        if (b->own_weights || strcmp(value, "f32") == 0) return 0;
        return neap_cli_error(NEAP_EXIT_USAGE, "f32 or own", "--weights %s: unknown", value);
    default:
        return neap_bench_option(code, value, &b->options);
    }
}

static void fill_defaults(bench *b) {
    const bool quick = b->options.quick;
    if (b->n_contexts == 0) b->contexts[b->n_contexts++] = quick ? 2048 : 4096;
    if (b->max_texts == 0) b->max_texts = quick ? 3 : 6;
    if (b->n_tasks < 0) b->n_tasks = quick ? 1 : 2;
    if (quick && b->options.n_models == 0)
        b->options.models[b->options.n_models++] = neap_models[0].name;
}

int neap_bench_fidelity(int argc, char **argv) {
    static const struct option long_options[] = {NEAP_OPTIONS_BASIC,
                                                 NEAP_OPTIONS_BENCH,
                                                 {"context", required_argument, NULL, OPT_CONTEXT},
                                                 {"method", required_argument, NULL, OPT_METHOD},
                                                 {"klt-file", required_argument, NULL, OPT_KLT},
                                                 {"texts", required_argument, NULL, OPT_TEXTS},
                                                 {"text", required_argument, NULL, OPT_TEXT},
                                                 {"tasks", required_argument, NULL, OPT_TASKS},
                                                 {"weights", required_argument, NULL, OPT_WEIGHTS},
                                                 {0}};
    bench *b = calloc(1, sizeof *b);
    if (!b) return no_memory();
    int status;
    b->n_tasks = -1;
    if (neap_bench_parse(&command, long_options, argc, argv, take_option, b, &status)) {
        if (optind < argc)
            status = neap_cli_error(NEAP_EXIT_USAGE, "see neap bench fidelity --help",
                                    "%s: one argument too many", argv[optind]);
        fill_defaults(b);
        if (!status) status = neap_bench_default_models(&b->options);
        if (!status) status = run(b);
    }
    for (size_t i = 0; i < b->n_texts; i++)
        free(b->texts[i]);
    free(b);
    return status;
}
