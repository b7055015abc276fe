/* server_client.c - see server_client.h.
 *
 * The server is a child that gets SIGTERM when this process ends, however it ends. Its output goes
 * to an unnamed file, of which the end is shown when it fails. All requests share one connection,
 * so that the time to the first token holds no connection set-up. */
#include "server_client.h"

#include <arpa/inet.h>
#include <curl/curl.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cli.h"
#include "clock.h"
#include "proc.h"

#define START_LIMIT_NS (600ull * 1000000000)
#define POLL_NS 50000000l
#define STOP_LIMIT_NS (10ull * 1000000000)
#define START_TRIES 3

struct neap_server {
    pid_t pid;
    int log_fd;
    unsigned port;
    CURL *curl;
    struct curl_slist *headers;
    clockid_t cpu_clock;
    bool may_die;
};

/* A response body as it arrives; of an event stream every "data:" line is looked at. */
typedef struct response {
    char *bytes;
    size_t len, cap, scanned;
    neap_answer *answer; /* NULL: plain response */
    neap_server *server;
    uint64_t sent_ns;
    double cpu_before_s;
    bool first_seen, failed;
} response;

static void pause_ns(long ns) {
    nanosleep(&(struct timespec){.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000}, NULL);
}

static double cpu_seconds(const neap_server *server) {
    struct timespec now = {0};
    if (clock_gettime(server->cpu_clock, &now) != 0) return 0;
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* ---- process ---- */

/* A loopback port that is free at this moment; 0 when there is none. */
static unsigned free_port(void) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return 0;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    unsigned port = 0;
    if (bind(fd, (struct sockaddr *)&address, len) == 0 &&
        getsockname(fd, (struct sockaddr *)&address, &len) == 0)
        port = ntohs(address.sin_port);
    close(fd);
    return port;
}

static void set_or_leave(const char *name, const char *value) {
    if (value) setenv(name, value, 1);
}

/* In the child: becomes llama-server. */
static void become_server(const neap_server_options *options, const neap_server *server,
                          pid_t parent) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(1);
    const int nothing = open("/dev/null", O_RDONLY);
    if (nothing >= 0) dup2(nothing, STDIN_FILENO);
    dup2(server->log_fd, STDOUT_FILENO);
    dup2(server->log_fd, STDERR_FILENO);
    if (options->stock) neap_path_leave_backend();
    const int err = options->group ? neap_memory_group_add(options->group, 0) : 0;
    if (err) {
        dprintf(STDERR_FILENO, "%s: %s\n", options->group->dir, neap_strerror(err));
        _exit(127);
    }
    set_or_leave("NEAP_CODEC", options->codec);
    set_or_leave("NEAP_POLICY", options->policy);
    set_or_leave("NEAP_ATTN", options->attn);
    set_or_leave("NEAP_KV", options->kv);
    set_or_leave("NEAP_KV_SELECT", options->kv_select);
    set_or_leave("NEAP_PRESSURE", options->pressure);

    char program[NEAP_PATH_MAX], port[16], n_ctx[16], threads[16], slots[16];
    neap_path_program("llama-server", program);
    snprintf(port, sizeof port, "%u", server->port);
    snprintf(n_ctx, sizeof n_ctx, "%u", options->n_ctx);
    snprintf(threads, sizeof threads, "%d", options->threads);
    snprintf(slots, sizeof slots, "%u", options->n_slots ? options->n_slots : 1);
    const char *argv[32] = {program,
                            "-m",
                            options->model_path,
                            "--host",
                            "127.0.0.1",
                            "--port",
                            port,
                            "-c",
                            n_ctx,
                            "-np",
                            slots,
                            "-fa",
                            "on",
                            "--cache-ram",
                            "0",
                            "--ctx-checkpoints",
                            "0",
                            "--no-webui"};
    size_t n = 18;
    if (options->threads) {
        argv[n++] = "-t";
        argv[n++] = threads;
    }
    if (options->cache_type) {
        argv[n++] = "-ctk";
        argv[n++] = options->cache_type;
        argv[n++] = "-ctv";
        argv[n++] = options->cache_type;
    }
    if (options->slot_dir) {
        argv[n++] = "--slot-save-path";
        argv[n++] = options->slot_dir;
    }
    execvp(program, (char **)argv);
    dprintf(STDERR_FILENO, "%s: %s\n", program, strerror(errno));
    _exit(127);
}

static bool ended(neap_server *server) {
    if (server->pid <= 0) return true;
    if (waitpid(server->pid, NULL, WNOHANG) != server->pid) return false;
    server->pid = 0;
    return true;
}

void neap_server_stop(neap_server *server) {
    if (!server) return;
    if (!ended(server)) {
        kill(server->pid, SIGTERM);
        const uint64_t limit = neap_clock_ns() + STOP_LIMIT_NS;
        while (!ended(server) && neap_clock_ns() < limit)
            pause_ns(POLL_NS / 5);
        if (server->pid > 0) {
            kill(server->pid, SIGKILL);
            waitpid(server->pid, NULL, 0);
        }
    }
    if (server->curl) curl_easy_cleanup(server->curl);
    curl_slist_free_all(server->headers);
    if (server->log_fd >= 0) close(server->log_fd);
    free(server);
}

int neap_server_pid(const neap_server *server) {
    return server->pid;
}

bool neap_server_alive(neap_server *server) {
    return !ended(server);
}

uint64_t neap_server_memory(const neap_server *server) {
    neap_proc_memory memory = {0};
    if (server->pid <= 0 || neap_proc_memory_read(server->pid, &memory) != 0) return 0;
    return memory.anon_bytes + memory.swap_bytes + memory.file_bytes;
}

/* ---- HTTP ---- */

static void note_first(response *r) {
    if (r->first_seen) return;
    r->first_seen = true;
    r->answer->ttft_ms = (double)(neap_clock_ns() - r->sent_ns) / 1e6;
    r->answer->cpu_s = cpu_seconds(r->server) - r->cpu_before_s;
}

static int append_text(neap_answer *answer, const char *text) {
    const size_t had = answer->text ? strlen(answer->text) : 0;
    char *joined = realloc(answer->text, had + strlen(text) + 1);
    if (!joined) return -ENOMEM;
    memcpy(joined + had, text, strlen(text) + 1);
    answer->text = joined;
    return 0;
}

static int append_tokens(neap_tokens *tokens, const json_t *list) {
    const size_t n = json_array_size(list);
    if (n == 0) return 0;
    int32_t *ids = realloc(tokens->ids, (tokens->n + n) * sizeof *ids);
    if (!ids) return -ENOMEM;
    for (size_t i = 0; i < n; i++)
        ids[tokens->n + i] = (int32_t)json_integer_value(json_array_get(list, i));
    tokens->ids = ids;
    tokens->n += n;
    return 0;
}

static void take_event(response *r, const char *json) {
    json_t *event = json_loads(json, 0, NULL);
    if (!json_is_object(event) || json_object_get(event, "error")) {
        r->failed = true;
        json_decref(event);
        return;
    }
    const char *content = json_string_value(json_object_get(event, "content"));
    const json_t *tokens = json_object_get(event, "tokens");
    const bool last = json_is_true(json_object_get(event, "stop"));
    if ((content && *content) || json_array_size(tokens) || last) note_first(r);
    if (content && append_text(r->answer, content) != 0) r->failed = true;
    if (append_tokens(&r->answer->tokens, tokens) != 0) r->failed = true;
    if (last) {
        const json_t *timings = json_object_get(event, "timings");
        r->answer->prompt_n = neap_instance_count(timings, NULL, "prompt_n");
        r->answer->cache_n = neap_instance_count(timings, NULL, "cache_n");
    }
    json_decref(event);
}

static size_t receive(char *bytes, size_t size, size_t n, void *ctx) {
    response *r = ctx;
    const size_t len = size * n;
    if (r->len + len + 1 > r->cap) {
        const size_t cap = (r->len + len + 1) * 2;
        char *grown = realloc(r->bytes, cap);
        if (!grown) return 0;
        r->bytes = grown;
        r->cap = cap;
    }
    memcpy(r->bytes + r->len, bytes, len);
    r->len += len;
    r->bytes[r->len] = '\0';
    if (!r->answer) return len;
    char *newline;
    while ((newline = strchr(r->bytes + r->scanned, '\n'))) {
        char *line = r->bytes + r->scanned;
        r->scanned = (size_t)(newline + 1 - r->bytes);
        *newline = '\0';
        if (strncmp(line, "data: ", 6) == 0 && strcmp(line + 6, "[DONE]") != 0)
            take_event(r, line + 6);
        *newline = '\n';
    }
    return len;
}

/* One request; body NULL: GET. 0 when the status is 200, else a printed error (quiet: none). */
static int request(neap_server *server, const char *path, const char *body, bool quiet,
                   response *r) {
    char url[128];
    snprintf(url, sizeof url, "http://127.0.0.1:%u%s", server->port, path);
    curl_easy_reset(server->curl);
    curl_easy_setopt(server->curl, CURLOPT_URL, url);
    curl_easy_setopt(server->curl, CURLOPT_PROXY, "");
    curl_easy_setopt(server->curl, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(server->curl, CURLOPT_TCP_NODELAY, 1L);
    curl_easy_setopt(server->curl, CURLOPT_HTTPHEADER, server->headers);
    curl_easy_setopt(server->curl, CURLOPT_WRITEFUNCTION, receive);
    curl_easy_setopt(server->curl, CURLOPT_WRITEDATA, r);
    if (body) {
        curl_easy_setopt(server->curl, CURLOPT_POSTFIELDSIZE, (long)strlen(body));
        curl_easy_setopt(server->curl, CURLOPT_POSTFIELDS, body);
    }
    r->server = server;
    r->cpu_before_s = cpu_seconds(server);
    r->sent_ns = neap_clock_ns();
    const CURLcode code = curl_easy_perform(server->curl);
    long http_status = 0;
    curl_easy_getinfo(server->curl, CURLINFO_RESPONSE_CODE, &http_status);
    if (code == CURLE_OK && http_status == 200 && !r->failed) return 0;
    if (quiet || (server->may_die && code != CURLE_OK)) return NEAP_EXIT_FAILED;
    const int status =
        neap_cli_error(NEAP_EXIT_FAILED, NULL, "llama-server %s: %s (HTTP %ld) %.300s", path,
                       code == CURLE_OK ? "refused" : curl_easy_strerror(code), http_status,
                       r->bytes ? r->bytes : "");
    if (ended(server)) neap_cli_print_tail("llama-server", server->log_fd);
    return status;
}

/* POST of a JSON body (taken), reply parsed. */
static int ask(neap_server *server, const char *path, json_t *body, json_t **ret_reply) {
    char *text = body ? json_dumps(body, JSON_COMPACT) : NULL;
    json_decref(body);
    if (!text) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    response r = {0};
    int status = request(server, path, text, false, &r);
    free(text);
    if (!status) {
        *ret_reply = json_loads(r.bytes ? r.bytes : "", 0, NULL);
        if (!*ret_reply)
            status =
                neap_cli_error(NEAP_EXIT_FAILED, NULL, "llama-server %s: reply is not JSON", path);
    }
    free(r.bytes);
    return status;
}

/* ---- start ---- */

/* Waits for /health. 0; 1: the server ended; 2: it took too long. */
static int wait_until_healthy(neap_server *server) {
    const uint64_t limit = neap_clock_ns() + START_LIMIT_NS;
    while (!ended(server)) {
        response r = {0};
        const int failed = request(server, "/health", NULL, true, &r);
        free(r.bytes);
        if (!failed) return 0;
        if (neap_clock_ns() > limit) return 2;
        pause_ns(POLL_NS);
    }
    return 1;
}

static neap_server *prepare(void) {
    neap_server *server = calloc(1, sizeof *server);
    if (!server) return NULL;
    server->log_fd = memfd_create("llama-server", MFD_CLOEXEC);
    server->curl = curl_easy_init();
    server->headers = curl_slist_append(NULL, "Content-Type: application/json");
    struct curl_slist *more = curl_slist_append(server->headers, "Expect:");
    if (more) server->headers = more;
    server->port = free_port();
    if (server->log_fd >= 0 && server->curl && more && server->port) return server;
    neap_server_stop(server);
    return NULL;
}

static int spawn(neap_server *server, const neap_server_options *options) {
    const pid_t parent = getpid();
    fflush(NULL);
    server->pid = fork();
    if (server->pid < 0)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "llama-server: %s", neap_strerror(-errno));
    if (server->pid == 0) become_server(options, server, parent);
    if (clock_getcpuclockid(server->pid, &server->cpu_clock) != 0)
        server->cpu_clock = CLOCK_PROCESS_CPUTIME_ID;
    return 0;
}

static bool log_says(const neap_server *server, const char *words) {
    char text[16384];
    const ssize_t got = pread(server->log_fd, text, sizeof text - 1, 0);
    text[got > 0 ? got : 0] = '\0';
    return strstr(text, words) != NULL;
}

int neap_server_start(const neap_server_options *options, neap_server **ret_server) {
    int status = neap_path_load_backend();
    if (status) return status;
    for (int tries = 1;; tries++) {
        neap_server *server = prepare();
        if (!server)
            return neap_cli_error(NEAP_EXIT_FAILED, NULL, "llama-server: no port, memory or curl");
        server->may_die = options->may_die;
        if ((status = spawn(server, options))) {
            neap_server_stop(server);
            return status;
        }
        const int failed = wait_until_healthy(server);
        if (!failed) {
            *ret_server = server;
            return 0;
        }
        /* Another program may have taken the port in the meantime. */
        const bool again = failed == 1 && tries < START_TRIES && log_says(server, "couldn't bind");
        if (!again) status = NEAP_EXIT_FAILED;
        if (!again && !(server->may_die && failed == 1)) {
            neap_cli_error(NEAP_EXIT_FAILED, NULL, "llama-server: %s",
                           failed == 1 ? "ended before it answered" : "does not answer");
            neap_cli_print_tail("llama-server", server->log_fd);
        }
        neap_server_stop(server);
        if (!again) return status;
    }
}

/* ---- requests ---- */

void neap_tokens_free(neap_tokens *tokens) {
    free(tokens->ids);
    *tokens = (neap_tokens){0};
}

void neap_answer_free(neap_answer *answer) {
    neap_tokens_free(&answer->tokens);
    free(answer->text);
    *answer = (neap_answer){0};
}

int neap_server_slot_tokens(neap_server *server, uint32_t *ret_n) {
    response r = {0};
    const int status = request(server, "/props", NULL, false, &r);
    json_t *props = status ? NULL : json_loads(r.bytes ? r.bytes : "", 0, NULL);
    free(r.bytes);
    const json_int_t n = json_integer_value(
        json_object_get(json_object_get(props, "default_generation_settings"), "n_ctx"));
    json_decref(props);
    if (status) return status;
    if (n < 1 || n > UINT32_MAX)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "llama-server /props: no n_ctx");
    *ret_n = (uint32_t)n;
    return 0;
}

int neap_server_tokenize(neap_server *server, const char *text, neap_tokens *ret_tokens) {
    json_t *reply = NULL;
    int status =
        ask(server, "/tokenize",
            json_pack("{s:s, s:b, s:b}", "content", text, "add_special", 1, "parse_special", 1),
            &reply);
    if (status) return status;
    neap_tokens tokens = {0};
    const int err = append_tokens(&tokens, json_object_get(reply, "tokens"));
    json_decref(reply);
    if (err || tokens.n == 0) {
        neap_tokens_free(&tokens);
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "llama-server /tokenize: no tokens");
    }
    *ret_tokens = tokens;
    return 0;
}

int neap_server_chat_prompt(neap_server *server, const char *system, const char *question,
                            char **ret_text) {
    json_t *reply = NULL;
    int status = ask(server, "/apply-template",
                     json_pack("{s:[{s:s, s:s}, {s:s, s:s}]}", "messages", "role", "system",
                               "content", system, "role", "user", "content", question),
                     &reply);
    if (status) return status;
    const char *prompt = json_string_value(json_object_get(reply, "prompt"));
    char *copy = prompt ? strdup(prompt) : NULL;
    json_decref(reply);
    if (!copy)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "llama-server /apply-template: no prompt");
    *ret_text = copy;
    return 0;
}

static json_t *ids_json(const neap_tokens *tokens) {
    json_t *ids = json_array();
    for (size_t i = 0; i < tokens->n; i++)
        json_array_append_new(ids, json_integer(tokens->ids[i]));
    return ids;
}

int neap_server_complete(neap_server *server, const neap_tokens *prompt, unsigned n_predict,
                         bool exactly, neap_answer *ret_answer) {
    json_t *body =
        json_pack("{s:o, s:i, s:b, s:b, s:i, s:f, s:i, s:b, s:b}", "prompt", ids_json(prompt),
                  "n_predict", (int)n_predict, "stream", 1, "cache_prompt", 1, "id_slot", 0,
                  "temperature", 0.0, "top_k", 1, "return_tokens", 1, "ignore_eos", exactly);
    char *text = body ? json_dumps(body, JSON_COMPACT) : NULL;
    json_decref(body);
    if (!text) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));

    neap_answer answer = {0};
    response r = {.answer = &answer};
    int status = request(server, "/completion", text, false, &r);
    answer.total_ms = (double)(neap_clock_ns() - r.sent_ns) / 1e6;
    free(text);
    free(r.bytes);
    if (!status && !r.first_seen)
        status = neap_cli_error(NEAP_EXIT_FAILED, NULL, "llama-server /completion: no answer");
    if (status)
        neap_answer_free(&answer);
    else
        *ret_answer = answer;
    return status;
}

int neap_server_agreement(neap_server *server, const neap_tokens *prompt, const int32_t *answer,
                          size_t n, size_t *ret_same) {
    neap_tokens longer = {.ids = malloc((prompt->n + n) * sizeof *longer.ids)};
    if (!longer.ids) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    memcpy(longer.ids, prompt->ids, prompt->n * sizeof *longer.ids);
    memcpy(longer.ids + prompt->n, answer, n * sizeof *longer.ids);
    size_t same = 0;
    int status = 0;
    for (size_t i = 0; i < n && !status; i++) {
        neap_answer one = {0};
        longer.n = prompt->n + i;
        status = neap_server_complete(server, &longer, 1, true, &one);
        same += !status && one.tokens.n == 1 && one.tokens.ids[0] == answer[i];
        neap_answer_free(&one);
    }
    neap_tokens_free(&longer);
    if (!status) *ret_same = same;
    return status;
}

/* Tokens per second of the slots of a reply, from the first token on. */
static int speed_of(const json_t *slots, unsigned n, double *ret_tps) {
    double tokens = 0, ms = 0;
    for (unsigned i = 0; i < n; i++) {
        const json_t *timings = json_object_get(json_array_get(slots, i), "timings");
        const double took = json_number_value(json_object_get(timings, "predicted_ms"));
        const double count = json_number_value(json_object_get(timings, "predicted_n"));
        const uint64_t computed = neap_instance_count(timings, NULL, "prompt_n");
        if (!(took > 0) || !(count > 1))
            return neap_cli_error(NEAP_EXIT_FAILED, NULL,
                                  "llama-server /completion: no timings of slot %u", i);
        if (computed > 1)
            return neap_cli_error(NEAP_EXIT_FAILED, NULL,
                                  "the context was not reused: %llu tokens computed instead of 1",
                                  (unsigned long long)computed);
        tokens += count - 1;
        ms = took > ms ? took : ms;
    }
    *ret_tps = tokens / ms * 1000;
    return 0;
}

/* The same prompt in n slots at once; *ret_slots: what is said of each. */
static int complete_slots(neap_server *server, const neap_tokens *prompt, unsigned n,
                          unsigned n_predict, bool reused, json_t **ret_slots) {
    json_t *prompts = json_array(), *reply = NULL;
    for (unsigned i = 0; i < n; i++)
        json_array_append_new(prompts, ids_json(prompt));
    const int status = ask(server, "/completion",
                           json_pack("{s:o, s:i, s:b, s:f, s:i, s:b}", "prompt", prompts,
                                     "n_predict", (int)n_predict, "cache_prompt", reused,
                                     "temperature", 0.0, "top_k", 1, "ignore_eos", 1),
                           &reply);
    if (status) return status;
    *ret_slots = json_is_object(reply) ? json_pack("[o]", reply) : reply; /* of one prompt */
    return 0;
}

int neap_server_decode_speed(neap_server *server, const neap_tokens *prompt, unsigned n,
                             unsigned n_predict, double *ret_tps) {
    json_t *slots = NULL;
    int status = complete_slots(server, prompt, n, n_predict, true, &slots);
    if (!status) status = speed_of(slots, n, ret_tps);
    json_decref(slots);
    return status;
}

int neap_server_prefill(neap_server *server, const neap_tokens *prompt, unsigned n,
                        double *ret_ms) {
    json_t *slots = NULL;
    const uint64_t began = neap_clock_ns();
    int status = complete_slots(server, prompt, n, 1, false, &slots);
    const double ms = (double)(neap_clock_ns() - began) / 1e6;
    for (unsigned i = 0; i < n && !status; i++) {
        const json_t *timings = json_object_get(json_array_get(slots, i), "timings");
        const uint64_t computed = neap_instance_count(timings, NULL, "prompt_n");
        if (computed != prompt->n)
            status = neap_cli_error(NEAP_EXIT_FAILED, NULL,
                                    "the context was not read anew: %llu tokens of %zu in slot %u",
                                    (unsigned long long)computed, prompt->n, i);
    }
    json_decref(slots);
    if (!status) *ret_ms = ms;
    return status;
}

int neap_server_slot_save(neap_server *server, const char *name) {
    json_t *reply = NULL;
    const int status =
        ask(server, "/slots/0?action=save", json_pack("{s:s}", "filename", name), &reply);
    if (!status) json_decref(reply);
    return status;
}

int neap_server_slot_load(neap_server *server, const char *name, bool *ret_loaded) {
    return neap_server_slot_load_into(server, 0, name, ret_loaded);
}

int neap_server_slot_load_into(neap_server *server, unsigned slot, const char *name,
                               bool *ret_loaded) {
    json_t *body = json_pack("{s:s}", "filename", name);
    char path[48], *text = body ? json_dumps(body, JSON_COMPACT) : NULL;
    json_decref(body);
    if (!text) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    response r = {0};
    snprintf(path, sizeof path, "/slots/%u?action=restore", slot);
    *ret_loaded = request(server, path, text, true, &r) == 0;
    free(text);
    free(r.bytes);
    return 0;
}
