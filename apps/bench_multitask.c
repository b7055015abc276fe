/* bench_multitask.c - `neap bench multitask`: a server beside a program that takes memory, both in
 * one memory group with a limit, with zRAM to swap to: who is killed, and what a question costs.
 *
 * A session is one server with a filled context, and so many rounds:
 *   1. grow    the other program dirties more memory, step by step, and keeps it
 *   2. ask     8 new tokens; a server that was killed is started again first (a cold start)
 * The limit is LIMIT_SHARE of what stock llama.cpp with the context takes; at the end the other
 * program holds COMPETITOR_SHARE of it. So in the last rounds both do not fit.
 *
 * Sides: stock llama.cpp (weights mapped from the file, KV anonymous: what the kernel can do
 * alone); neap giving back 15 and 25 points of its memory at a signal, as in mzCache's experiment;
 * neap as it is, which watches pressure by itself. A signal comes when less than 1/16 of the limit
 * is available, at most twice a second, while the other program grows: the place of onTrimMemory.
 *
 * What zRAM takes of the memory is taken off the limit, again and again by a thread: on a machine
 * both share the same memory, but the kernel does not charge zRAM's to the group. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"
#include "bytes.h"
#include "clock.h"
#include "competitor.h"
#include "paging.h"
#include "proc.h"
#include "server_client.h"

#define DEFAULT_MODEL "qwen2.5-coder-0.5b"
#define DEFAULT_CONTEXT 8192
#define QUICK_CONTEXT 2048
#define DEFAULT_ROUNDS 10
#define QUICK_ROUNDS 4
#define ROUNDS_MAX 100
#define NEW_TOKENS 8
#define ANSWER_TOKENS 16

#define LIMIT_SHARE 1.3
#define COMPETITOR_SHARE 0.8
#define ZRAM_SHARE 0.75 /* of the limit: pages that can be swapped out */
#define RATE ((uint64_t)128 << 20)

#define LOOK_NS 10000000l
#define SIGNAL_GAP_NS 500000000u
#define SETTLE_NS 500000000u
#define GROW_LIMIT_NS (120ull * 1000000000)
#define DEATH_TRIES 500
#define LIMIT_STEP ((uint64_t)1 << 20)

typedef struct side {
    const char *name;
    bool stock;
    unsigned points;      /* given back at a signal; 0: the bench sends none */
    const char *pressure; /* of the backend */
} side;

static const side sides[] = {
    {.name = "stock", .stock = true},
    {.name = "neap-15", .points = 15, .pressure = "off"},
    {.name = "neap-25", .points = 25, .pressure = "off"},
    {.name = "neap", .pressure = "on"},
};
enum { STOCK }; /* the first */
#define N_SIDES (sizeof sides / sizeof *sides)

typedef struct round {
    bool server_killed, competitor_killed, cold, answered;
    double ttft_ms;
    uint64_t server_bytes, competitor_bytes, swap_bytes, zram_bytes; /* before the question */
    uint64_t server_after_bytes;                                     /* after it */
    uint64_t major_faults, n_signals;
} round_result;

typedef struct bench {
    neap_bench_options options;
    long context, n_rounds, reps;
    char model_path[NEAP_PATH_MAX], slot_dir[NEAP_PATH_MAX], slot_name[128];
    neap_tokens prefix, question; /* question: tokens that the new ones are taken from */
    uint64_t footprint_bytes, limit_bytes;
    round_result *results; /* [reps][N_SIDES][n_rounds] */
} bench;

typedef struct session {
    bench *b;
    const side *side;
    neap_paging *paging;
    const neap_memory_group *group;
    neap_server *server; /* NULL: killed */
    neap_competitor *competitor;
    uint64_t signalled_ns;
    pthread_t keeper;
    bool keeping;
    atomic_bool stop;
    _Atomic uint64_t limit_bytes; /* now */
} session;

static void pause_ns(long ns) {
    nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
}

static round_result *result_of(const bench *b, size_t rep, size_t side_index, size_t n) {
    return &b->results[(rep * N_SIDES + side_index) * (size_t)b->n_rounds + n];
}

/* ---- the limit ---- */

/* Pages that zRAM takes; something where there is nothing to swap. */
static uint64_t swap_bytes(const bench *b) {
    const uint64_t bytes = (uint64_t)((double)b->limit_bytes * ZRAM_SHARE);
    return bytes > 0 ? bytes / LIMIT_STEP * LIMIT_STEP : LIMIT_STEP;
}

static void *keep_limit(void *ctx) {
    session *s = ctx;
    neap_paging_usage usage;
    while (!atomic_load(&s->stop)) {
        const uint64_t now = atomic_load(&s->limit_bytes);
        if (neap_paging_read(s->paging, &usage) == 0) {
            const uint64_t all = s->b->limit_bytes;
            const uint64_t want = usage.zram_bytes < all ? all - usage.zram_bytes : 0;
            const bool moved = want + LIMIT_STEP < now || want > now + LIMIT_STEP;
            /* A group that cannot shrink at once is asked again. */
            if (moved && neap_memory_group_limit(s->group, want, swap_bytes(s->b)) == 0)
                atomic_store(&s->limit_bytes, want);
        }
        pause_ns(LOOK_NS);
    }
    return NULL;
}

static int start_keeper(session *s) {
    int err = neap_memory_group_limit(s->group, s->b->limit_bytes, swap_bytes(s->b));
    atomic_store(&s->limit_bytes, s->b->limit_bytes);
    if (!err) err = -pthread_create(&s->keeper, NULL, keep_limit, s);
    s->keeping = !err;
    if (!err) return 0;
    return neap_cli_error(NEAP_EXIT_FAILED, NULL, "limit of the memory group: %s",
                          neap_strerror(err));
}

/* ---- server and context ---- */

static int start_server(session *s) {
    const neap_server_options options = {.model_path = s->b->model_path,
                                         .n_ctx = (uint32_t)s->b->context + 512,
                                         .threads = neap_option_threads(),
                                         .slot_dir = s->b->slot_dir,
                                         .pressure = s->side->pressure,
                                         .may_die = true,
                                         .stock = s->side->stock,
                                         .group = s->group};
    return neap_server_start(&options, &s->server);
}

/* Drops those that no process maps. Before a server starts, so that what it maps is charged to its
 * group; and when it has read the file, so that the limit finds only what the server holds. */
static void drop_model_pages(const bench *b) {
    const int fd = open(b->model_path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
}

static int make_prompts(bench *b, neap_server *server) {
    if (b->prefix.n > 0) return 0;
    const size_t n = (size_t)b->context;
    char *text = neap_text_generate(n);
    if (!text) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    int status = neap_server_tokenize(server, text, &b->prefix);
    free(text);
    if (!status)
        status = neap_server_tokenize(
            server, "Which of the people named above came first, and why was it so?", &b->question);
    if (!status && (b->prefix.n < n || b->question.n < NEW_TOKENS + 1))
        status = neap_cli_error(NEAP_EXIT_FAILED, "give a smaller --context",
                                "text: %zu tokens are less than the context", b->prefix.n);
    b->prefix.n = n;
    return status;
}

/* The context and n of the question's tokens, other ones each time. */
static int ask(session *s, size_t which, size_t n, unsigned n_predict, neap_answer *ret_answer) {
    const bench *b = s->b;
    neap_tokens prompt = {.ids = malloc((b->prefix.n + n) * sizeof *prompt.ids),
                          .n = b->prefix.n + n};
    if (!prompt.ids) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    memcpy(prompt.ids, b->prefix.ids, b->prefix.n * sizeof *prompt.ids);
    for (size_t i = 0; i < n; i++)
        prompt.ids[b->prefix.n + i] = b->question.ids[1 + (which + i) % (b->question.n - 1)];
    const int status = neap_server_complete(s->server, &prompt, n_predict, true, ret_answer);
    neap_tokens_free(&prompt);
    return status;
}

/* Named as bench ttft names it: by model, tokens and version. */
static int name_slot(bench *b) {
    struct stat info;
    if (stat(b->model_path, &info) != 0)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", b->model_path,
                              neap_strerror(-errno));
    snprintf(b->slot_name, sizeof b->slot_name, "multitask-%lld-%lld-%016llx.bin",
             (long long)info.st_size, (long long)info.st_mtime,
             (unsigned long long)neap_checksum(b->prefix.ids, b->prefix.n * sizeof *b->prefix.ids));
    return 0;
}

/* Starts the server and has it read the context, or load it as an earlier session left it. */
static int fill(session *s) {
    bench *b = s->b;
    bool loaded = false;
    neap_answer answer = {0};
    int status = start_server(s);
    if (!status) status = make_prompts(b, s->server);
    if (!status && !b->slot_name[0]) status = name_slot(b);
    if (!status) status = neap_server_slot_load(s->server, b->slot_name, &loaded);
    if (!status) status = ask(s, 0, 1, 0, &answer);
    if (!status && answer.prompt_n > 512) status = neap_server_slot_save(s->server, b->slot_name);
    neap_answer_free(&answer);
    return status;
}

/* ---- a round ---- */

/* 0, or the status of the error: a server that was killed, now or while it started, is none. */
static int if_killed(session *s, round_result *r, int status) {
    if (!status) return 0;
    /* Of a process that ends, memory goes first, then its connections, and then it can be told. */
    for (int tries = 0; s->server && neap_server_alive(s->server) && tries < DEATH_TRIES; tries++) {
        if (neap_server_memory(s->server) > 0) break;
        pause_ns(LOOK_NS);
    }
    if (s->server && neap_server_alive(s->server))
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "llama-server: no answer");
    neap_server_stop(s->server);
    s->server = NULL;
    r->server_killed = true;
    return 0;
}

static void give_back(session *s, round_result *r) {
    neap_evict_result result;
    char *message = NULL;
    const neap_evict_request request = {.permille = s->side->points * 10};
    if (neap_instance_evict(neap_server_pid(s->server), &request, &result, &message) == 0)
        r->n_signals++;
    free(message); /* one that was killed meanwhile does not answer */
    s->signalled_ns = neap_clock_ns();
}

/* Looks once; what a signal asks for is done here. */
static void look(session *s, round_result *r) {
    neap_memory_group_reading now;
    if (s->server && !neap_server_alive(s->server)) if_killed(s, r, NEAP_EXIT_FAILED);
    if (!neap_competitor_alive(s->competitor)) r->competitor_killed = true;
    if (!s->server || s->side->points == 0 || neap_memory_group_read(s->group, &now) != 0) return;
    const uint64_t used = now.usage_bytes - now.file_bytes, limit = atomic_load(&s->limit_bytes);
    const bool is_short = used + s->b->limit_bytes / 16 > limit;
    if (is_short && neap_clock_ns() >= s->signalled_ns + SIGNAL_GAP_NS) give_back(s, r);
}

static int start_competitor(session *s) {
    const uint64_t most = (uint64_t)((double)s->b->footprint_bytes * COMPETITOR_SHARE) + LIMIT_STEP;
    const int err = neap_competitor_start(s->group, most, RATE, &s->competitor);
    if (!err) return 0;
    return neap_cli_error(NEAP_EXIT_FAILED, NULL, "a program that takes memory: %s",
                          neap_strerror(err));
}

/* The other program grows to its share of this round. */
static int grow(session *s, size_t n, round_result *r) {
    if (s->competitor && !neap_competitor_alive(s->competitor)) {
        neap_competitor_stop(s->competitor);
        s->competitor = NULL;
    }
    const int status = s->competitor ? 0 : start_competitor(s);
    if (status) return status;
    const uint64_t target = (uint64_t)((double)s->b->footprint_bytes * COMPETITOR_SHARE *
                                       (double)(n + 1) / (double)s->b->n_rounds);
    const uint64_t limit_ns = neap_clock_ns() + GROW_LIMIT_NS;
    uint64_t until_ns = 0; /* it has grown: what follows of it */
    neap_competitor_grow(s->competitor, target);
    while (!r->competitor_killed && (until_ns == 0 || neap_clock_ns() < until_ns)) {
        look(s, r);
        if (until_ns == 0 && neap_competitor_bytes(s->competitor) + LIMIT_STEP > target)
            until_ns = neap_clock_ns() + SETTLE_NS;
        if (neap_clock_ns() > limit_ns)
            return neap_cli_error(NEAP_EXIT_FAILED, NULL,
                                  "the other program has not got its memory in 2 minutes");
        pause_ns(LOOK_NS);
    }
    return 0;
}

static int measure(session *s, round_result *r) {
    neap_memory_group_reading group;
    neap_paging_usage usage;
    int err = neap_memory_group_read(s->group, &group);
    if (!err) err = neap_paging_read(s->paging, &usage);
    if (err) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "memory group: %s", neap_strerror(err));
    r->server_bytes = s->server ? neap_server_memory(s->server) : 0;
    r->competitor_bytes = r->competitor_killed ? 0 : neap_competitor_bytes(s->competitor);
    r->swap_bytes = group.swap_bytes;
    r->zram_bytes = usage.zram_bytes;
    return 0;
}

static uint64_t faults(const session *s) {
    neap_memory_group_reading group;
    return neap_memory_group_read(s->group, &group) == 0 ? group.major_faults : 0;
}

static int run_round(session *s, size_t n, round_result *r) {
    const uint64_t faults_before = faults(s);
    int status = grow(s, n, r);
    if (!status) status = measure(s, r);
    if (status) return status;
    const uint64_t began_ns = neap_clock_ns();
    r->cold = !s->server;
    if (r->cold) status = if_killed(s, r, fill(s));
    const double before_ms = r->cold ? (double)(neap_clock_ns() - began_ns) / 1e6 : 0;
    neap_answer answer = {0};
    if (!status && s->server) {
        const int failed = ask(s, n, NEW_TOKENS, ANSWER_TOKENS, &answer);
        r->answered = !failed;
        r->ttft_ms = failed ? 0 : before_ms + answer.ttft_ms;
        status = if_killed(s, r, failed);
    }
    if (r->answered && answer.prompt_n > 2 * NEW_TOKENS)
        neap_cli_warn("%s, round %zu: the context was read again (%llu tokens)", s->side->name,
                      n + 1, (unsigned long long)answer.prompt_n);
    neap_answer_free(&answer);
    r->server_after_bytes = s->server ? neap_server_memory(s->server) : 0;
    if (!neap_competitor_alive(s->competitor)) r->competitor_killed = true;
    r->major_faults = faults(s) - faults_before;
    return status;
}

/* ---- a session ---- */

/* How much memory is too little: from what stock takes without a limit. */
static int choose_sizes(session *s) {
    bench *b = s->b;
    b->footprint_bytes = neap_server_memory(s->server);
    b->limit_bytes = (uint64_t)((double)b->footprint_bytes * LIMIT_SHARE) / LIMIT_STEP * LIMIT_STEP;
    neap_memory_group_reading group;
    struct stat info;
    if (neap_memory_group_read(s->group, &group) != 0 || stat(b->model_path, &info) != 0) return 0;
    if (!group.has_swap) neap_cli_warn("this kernel does not account swap: swap_bytes is 0");
    if (group.file_bytes < (uint64_t)info.st_size / 2)
        neap_cli_warn(
            "another program holds the model's pages: stock has more memory than is said");
    return 0;
}

static int run_rounds(session *s, size_t rep, size_t index) {
    int status = 0;
    for (size_t n = 0; n < (size_t)s->b->n_rounds && !status; n++) {
        char text[64];
        snprintf(text, sizeof text, "%s, round %zu", s->side->name, n + 1);
        neap_progress_set((double)((rep * N_SIDES + index) * (size_t)s->b->n_rounds + n) /
                              (double)((size_t)s->b->reps * N_SIDES * (size_t)s->b->n_rounds),
                          text);
        status = run_round(s, n, result_of(s->b, rep, index, n));
    }
    return status;
}

static void end_session(session *s) {
    atomic_store(&s->stop, true);
    if (s->keeping) pthread_join(s->keeper, NULL);
    neap_competitor_stop(s->competitor);
    neap_server_stop(s->server);
    const int err = neap_paging_free(s->paging);
    if (err) neap_cli_warn("zRAM or the memory group could not be removed: %s", neap_strerror(err));
}

/* The first session has no rounds: it chooses the sizes. *ret_lacks: what this machine lacks, NULL:
 * nothing. */
static int run_session(bench *b, size_t rep, size_t index, const char **ret_lacks) {
    const bool to_choose = b->limit_bytes == 0;
    session s = {.b = b, .side = &sides[index]};
    atomic_init(&s.stop, false);
    atomic_init(&s.limit_bytes, 0);
    drop_model_pages(b);
    const int err = neap_paging_create(swap_bytes(b), &s.paging, ret_lacks);
    if (err) return NEAP_EXIT_FAILED;
    *ret_lacks = NULL;
    s.group = neap_paging_group(s.paging);
    int status = fill(&s);
    if (status && !s.server)
        status = neap_cli_error(NEAP_EXIT_FAILED, NULL, "llama-server does not start");
    if (!status && to_choose) status = choose_sizes(&s);
    drop_model_pages(b);
    if (!status && !to_choose) status = start_keeper(&s);
    if (!status && !to_choose) status = run_rounds(&s, rep, index);
    end_session(&s);
    return status;
}

/* ---- report ---- */

static const char *killed_name(const round_result *r) {
    return r->server_killed && r->competitor_killed ? "both"
           : r->server_killed                       ? "server"
           : r->competitor_killed                   ? "competitor"
                                                    : "none";
}

static json_t *row_json(const round_result *r, size_t rep, size_t index, size_t n) {
    return json_pack(
        "{s:s, s:i, s:i, s:o, s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s}", "side",
        sides[index].name, "rep", (int)rep + 1, "round", (int)n + 1, "ttft_ms",
        r->answered ? json_real(r->ttft_ms) : json_null(), "cold_start", r->cold, "server_bytes",
        (json_int_t)r->server_bytes, "server_after_bytes", (json_int_t)r->server_after_bytes,
        "competitor_bytes", (json_int_t)r->competitor_bytes, "swap_bytes",
        (json_int_t)r->swap_bytes, "zram_bytes", (json_int_t)r->zram_bytes, "major_faults",
        (json_int_t)r->major_faults, "signals", (json_int_t)r->n_signals, "killed", killed_name(r));
}

typedef struct total {
    neap_summary ttft;
    uint64_t major_faults;
    int n_rounds, n_server, n_competitor, n_cold;
} total;

static total total_of(const bench *b, size_t index) {
    const size_t cap = (size_t)b->reps * (size_t)b->n_rounds;
    double *ttft = malloc(cap * sizeof *ttft);
    total t = {0};
    size_t n_answers = 0;
    for (size_t rep = 0; rep < (size_t)b->reps; rep++)
        for (size_t n = 0; n < (size_t)b->n_rounds; n++) {
            const round_result *r = result_of(b, rep, index, n);
            t.n_rounds++;
            t.n_server += r->server_killed;
            t.n_competitor += r->competitor_killed;
            t.n_cold += r->cold;
            t.major_faults += r->major_faults;
            if (ttft && r->answered) ttft[n_answers++] = r->ttft_ms;
        }
    if (ttft) t.ttft = neap_summarise(ttft, n_answers);
    free(ttft);
    return t;
}

static void print_table(const bench *b) {
    printf("%s, context of %ld tokens: %s; limit %s, the other program takes up to %s\n",
           neap_model_label(b->options.models[0]), b->context, neap_cli_size(b->footprint_bytes),
           neap_cli_size(b->limit_bytes),
           neap_cli_size((uint64_t)((double)b->footprint_bytes * COMPETITOR_SHARE)));
    printf("%-8s %5s %10s %11s %11s %11s %11s %8s %7s  %s\n", "SIDE", "ROUND", "TTFT ms", "SERVER",
           "AFTER", "OTHER", "SWAPPED", "FAULTS", "SIGNALS", "KILLED");
    for (size_t index = 0; index < N_SIDES; index++)
        for (size_t rep = 0; rep < (size_t)b->reps; rep++)
            for (size_t n = 0; n < (size_t)b->n_rounds; n++) {
                const round_result *r = result_of(b, rep, index, n);
                char ttft[32] = "-";
                if (r->answered)
                    snprintf(ttft, sizeof ttft, "%.0f%s", r->ttft_ms, r->cold ? " cold" : "");
                printf("%-8s %5zu %10s %11s %11s %11s %11s %8llu %7llu  %s\n", sides[index].name,
                       n + 1, ttft, neap_cli_size(r->server_bytes),
                       neap_cli_size(r->server_after_bytes), neap_cli_size(r->competitor_bytes),
                       neap_cli_size(r->swap_bytes), (unsigned long long)r->major_faults,
                       (unsigned long long)r->n_signals, killed_name(r));
            }
    for (size_t index = 0; index < N_SIDES; index++) {
        const total t = total_of(b, index);
        printf("%-8s ", sides[index].name);
        if (t.n_server + t.n_competitor == 0)
            printf("survived all %d rounds", t.n_rounds);
        else
            printf("of %d rounds: server killed in %d, the other program in %d", t.n_rounds,
                   t.n_server, t.n_competitor);
        if (t.ttft.n > 0)
            printf("; TTFT %.0f ms (%.0f to %.0f)", t.ttft.median, t.ttft.min, t.ttft.max);
        printf("; %llu major faults\n", (unsigned long long)t.major_faults);
    }
}

static int report(const bench *b) {
    if (!b->options.as_json) {
        print_table(b);
        return neap_cli_finish(NEAP_EXIT_OK);
    }
    json_t *rows = json_array(), *summary = json_array();
    for (size_t index = 0; index < N_SIDES; index++) {
        const total t = total_of(b, index);
        for (size_t rep = 0; rep < (size_t)b->reps; rep++)
            for (size_t n = 0; n < (size_t)b->n_rounds; n++)
                json_array_append_new(rows, row_json(result_of(b, rep, index, n), rep, index, n));
        json_array_append_new(summary, json_pack("{s:s, s:i, s:b, s:i, s:i, s:i, s:o, s:I}", "side",
                                                 sides[index].name, "rounds", t.n_rounds,
                                                 "survived", t.n_server + t.n_competitor == 0,
                                                 "server_kills", t.n_server, "competitor_kills",
                                                 t.n_competitor, "cold_starts", t.n_cold, "ttft_ms",
                                                 neap_summary_json(&t.ttft), "major_faults",
                                                 (json_int_t)t.major_faults));
    }
    return neap_cli_print_json(
        json_pack("{s:o, s:s, s:i, s:I, s:I, s:o, s:o}", "machine", neap_machine_json(), "model",
                  neap_model_label(b->options.models[0]), "context", (int)b->context,
                  "footprint_bytes", (json_int_t)b->footprint_bytes, "limit_bytes",
                  (json_int_t)b->limit_bytes, "rows", rows, "summary", summary));
}

/* ---- the whole ---- */

/* A machine that cannot do it is no failure. */
static int skip(const bench *b, const char *lacks) {
    neap_cli_warn("bench multitask: skipped: no %s of its own can be made%s", lacks,
                  geteuid() == 0 ? "" : " (run it as root)");
    if (!b->options.as_json) return neap_cli_finish(NEAP_EXIT_OK);
    return neap_cli_print_json(
        json_pack("{s:o, s:s, s:[]}", "machine", neap_machine_json(), "skipped", lacks, "rows"));
}

static int run_all(bench *b, const char **ret_lacks) {
    neap_progress_start("bench multitask");
    int status = run_session(b, 0, STOCK, ret_lacks);
    for (size_t rep = 0; rep < (size_t)b->reps && !status; rep++)
        for (size_t turn = 0; turn < N_SIDES && !status; turn++)
            status = run_session(b, rep, rep % 2 ? N_SIDES - 1 - turn : turn, ret_lacks);
    neap_progress_stop();
    return status;
}

static int run(bench *b) {
    char cache[NEAP_PATH_MAX - 64];
    const char *lacks = NULL;
    int status = neap_model_resolve(b->options.models[0], b->model_path);
    if (status) return status;
    int err = neap_cache_dir(cache, sizeof cache);
    if (!err) {
        snprintf(b->slot_dir, sizeof b->slot_dir, "%s/bench/", cache);
        err = neap_make_dirs(b->slot_dir, 0700);
    }
    if (err) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "bench folder: %s", neap_strerror(err));
    b->results = calloc((size_t)b->reps * N_SIDES * (size_t)b->n_rounds, sizeof *b->results);
    if (!b->results) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    status = run_all(b, &lacks);
    if (lacks) return skip(b, lacks);
    return status ? status : report(b);
}

enum { OPT_CONTEXT = NEAP_OPT_BENCH, OPT_ROUNDS };

static const neap_command command = {
    "bench multitask",
    "usage: neap bench multitask [OPTIONS]\n"
    "\n"
    "A server with a filled context beside a program that takes more memory each round, in one\n"
    "memory group with a limit, with zRAM to swap to; after each round one question. Stock\n"
    "llama.cpp, neap giving back 15 and 25 points of its memory at a signal, and neap watching\n"
    "pressure by itself. Needs root.\n"
    "\n"
    "  --context N    tokens of the context (default 8192; 2048 with --quick)\n"
    "  --rounds N     rounds (default 10; 4 with --quick)\n"};

static int take_option(void *ctx, int code, const char *value) {
    bench *b = ctx;
    switch (code) {
    case OPT_CONTEXT:
        return neap_option_number("--context", value, 64, 1000000, &b->context);
    case OPT_ROUNDS:
        return neap_option_number("--rounds", value, 1, ROUNDS_MAX, &b->n_rounds);
    default:
        return neap_bench_option(code, value, &b->options);
    }
}

int neap_bench_multitask(int argc, char **argv) {
    static const struct option long_options[] = {NEAP_OPTIONS_BASIC,
                                                 NEAP_OPTIONS_BENCH,
                                                 {"context", required_argument, NULL, OPT_CONTEXT},
                                                 {"rounds", required_argument, NULL, OPT_ROUNDS},
                                                 {0}};
    bench b = {0};
    int status;
    if (!neap_bench_parse(&command, long_options, argc, argv, take_option, &b, &status))
        return status;
    if (optind < argc || b.options.n_models > 1)
        status = neap_cli_error(NEAP_EXIT_USAGE, "see neap bench multitask --help",
                                "%s: one argument too many",
                                optind < argc ? argv[optind] : b.options.models[1]);
    if (status) return status;
    if (b.options.n_models == 0) b.options.models[b.options.n_models++] = DEFAULT_MODEL;
    if (!b.context) b.context = b.options.quick ? QUICK_CONTEXT : DEFAULT_CONTEXT;
    if (!b.n_rounds) b.n_rounds = b.options.quick ? QUICK_ROUNDS : DEFAULT_ROUNDS;
    b.reps = b.options.reps ? b.options.reps : 1;
    status = run(&b);
    neap_tokens_free(&b.prefix);
    neap_tokens_free(&b.question);
    free(b.results);
    return status;
}
