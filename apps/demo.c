/* demo.c - what `make demo` shows: a real model answers, gives its memory back, and answers again
 * from the same context. Hidden from the help: it has no options a user would want. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "server_client.h"

#define CONTEXT_WORDS 2000
#define CONTEXT_MAX 6144
#define ANSWER_TOKENS 48
#define QUESTION "What did the people of the harbour do? Answer in one sentence."
#define OTHER_QUESTION "How was the weather on the first day?"

static const unsigned levels_permille[] = {0, 500, 1000};
#define N_LEVELS (sizeof levels_permille / sizeof levels_permille[0])

typedef struct session {
    neap_server *server;
    neap_tokens question, other; /* the same context, two questions */
    neap_answer resident;
    double fill_ms;
    bool identical;        /* every later answer was the resident one, to the token */
    size_t same, compared; /* next tokens chosen as before, of those asked */
} session;

static int prepare_prompts(session *s) {
    char *text = neap_text_generate(CONTEXT_WORDS), *question = NULL, *other = NULL;
    int status = text ? 0 : neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    if (!status) status = neap_server_chat_prompt(s->server, text, QUESTION, &question);
    if (!status) status = neap_server_chat_prompt(s->server, text, OTHER_QUESTION, &other);
    if (!status) status = neap_server_tokenize(s->server, question, &s->question);
    if (!status) status = neap_server_tokenize(s->server, other, &s->other);
    free(text);
    free(question);
    free(other);
    return status;
}

static int fill(session *s) {
    neap_answer answer = {0};
    neap_progress_start("reading the context");
    const int status = neap_server_complete(s->server, &s->other, 0, false, &answer);
    neap_progress_stop();
    s->fill_ms = answer.ttft_ms;
    neap_answer_free(&answer);
    return status;
}

static bool equal(const neap_tokens *a, const neap_tokens *b) {
    return a->n == b->n && memcmp(a->ids, b->ids, a->n * sizeof *a->ids) == 0;
}

static int evict(session *s, unsigned permille) {
    if (permille == 0) return 0;
    neap_evict_request request = {.permille = permille};
    neap_evict_result result = {0};
    char *message = NULL;
    const int pid = neap_server_pid(s->server);
    const int err = neap_instance_evict(pid, &request, &result, &message);
    int status = 0;
    if (err)
        status = neap_cli_error(NEAP_EXIT_FAILED, "does the server run through the backend?",
                                "eviction: %s", message ? message : neap_strerror(err));
    else if (result.storage_error)
        neap_cli_warn("the swap file took no more: %s", neap_strerror(result.storage_error));
    free(message);
    return status;
}

static void print_row(unsigned permille, uint64_t held, const neap_answer *answer,
                      const char *verdict) {
    char state[32] = "all in memory";
    if (permille) snprintf(state, sizeof state, "%u %% given back", permille / 10);
    printf("  %-20s %12s %11.0f ms   %s\n", state, neap_cli_size(held), answer->ttft_ms, verdict);
    fflush(stdout);
}

/* Compares an answer with the resident one, in words for the table. */
static int compare(session *s, const neap_answer *answer, char *verdict, size_t cap) {
    const size_t n = s->resident.tokens.n;
    size_t same = n;
    int status = 0;
    if (equal(&s->resident.tokens, &answer->tokens)) {
        snprintf(verdict, cap, "identical (all %zu tokens)", n);
    } else {
        s->identical = false;
        status = neap_server_agreement(s->server, &s->question, s->resident.tokens.ids, n, &same);
        snprintf(verdict, cap, "same next token in %zu of %zu places", same, n);
    }
    s->same += same;
    s->compared += n;
    return status;
}

/* One level: the other question takes the first one's place, memory goes back, the first question
 * is asked again. The context itself must come from the cache. */
static int ask_again(session *s, unsigned permille) {
    neap_answer answer = {0}, ignored = {0};
    int status = neap_server_complete(s->server, &s->other, 0, false, &ignored);
    neap_answer_free(&ignored);
    if (!status) status = evict(s, permille);
    if (status) return status;
    const uint64_t held = neap_server_memory(s->server);
    status = neap_server_complete(s->server, &s->question, ANSWER_TOKENS, false, &answer);
    if (status) return status;
    if (answer.prompt_n > 256)
        status = neap_cli_error(NEAP_EXIT_FAILED, NULL,
                                "demo: the context was read again (%llu tokens computed)",
                                (unsigned long long)answer.prompt_n);
    char verdict[64] = "the answer to compare with";
    if (!status && permille) status = compare(s, &answer, verdict, sizeof verdict);
    if (!status) print_row(permille, held, &answer, verdict);
    if (!status && permille == 0) {
        s->resident = answer;
        answer = (neap_answer){0};
        s->identical = true;
    }
    neap_answer_free(&answer);
    return status;
}

static int run_codec(const char *model_path, const char *codec, const char *title, session *s) {
    const neap_server_options options = {.model_path = model_path,
                                         .n_ctx = CONTEXT_MAX,
                                         .threads = neap_option_threads(),
                                         .codec = codec,
                                         .policy = "hybrid"};
    neap_progress_start("starting the model");
    int status = neap_server_start(&options, &s->server);
    neap_progress_stop();
    if (!status) status = prepare_prompts(s);
    if (!status) status = fill(s);
    if (!status) {
        printf("\n%s\n", title);
        printf("A context of %zu tokens; reading it took %.1f s, and is not done again below.\n",
               s->other.n, s->fill_ms / 1000);
        printf("  %-20s %12s %14s   %s\n", "state", "memory held", "first token", "answer");
    }
    for (size_t i = 0; i < N_LEVELS && !status; i++)
        status = ask_again(s, levels_permille[i]);
    neap_server_stop(s->server);
    neap_tokens_free(&s->question);
    neap_tokens_free(&s->other);
    return status;
}

static void print_answer(const neap_answer *answer) {
    fputs("\nIt was asked: " QUESTION "\nIt said: ", stdout);
    for (const char *c = answer->text ? answer->text : ""; *c; c++)
        putchar(*c == '\n' ? ' ' : *c);
    fputs("\n\n", stdout);
}

static const neap_command command = {
    "demo", "usage: neap demo [--threads N] [MODEL]\n"
            "\n"
            "Fills a context, answers, gives memory back, answers again.\n"};

int neap_cmd_demo(int argc, char **argv) {
    static const struct option options[] = {
        NEAP_OPTIONS_BASIC, {"threads", required_argument, NULL, NEAP_OPT_THREADS}, {0}};
    int code, status;
    while ((code = getopt_long(argc, argv, ":h", options, NULL)) != -1) {
        if (neap_option_basic(&command, code, argv, &status)) return status;
        if ((status = neap_option_common(code, optarg))) return status;
    }
    const char *model = optind < argc ? argv[optind] : NULL;
    char path[NEAP_PATH_MAX];
    if ((status = neap_model_resolve(model, path))) return status;
    printf("neap %s: %s in llama-server, with elastic memory\n", NEAP_VERSION,
           neap_model_label(model));

    session lossy = {0}, exact = {0};
    status =
        run_codec(path, "q8", "Default codec q8: the KV cache is kept at half its size.", &lossy);
    if (!status)
        printf("  agreement with the answer before: %.0f %%\n",
               lossy.compared ? 100.0 * (double)lossy.same / (double)lossy.compared : 0.0);
    if (!status) status = run_codec(path, "none", "Codec none: exact.", &exact);
    if (!status) {
        print_answer(&exact.resident);
        printf("answers identical: %s\n", exact.identical ? "yes" : "no");
        if (!exact.identical) status = NEAP_EXIT_FAILED;
    }
    neap_answer_free(&lossy.resident);
    neap_answer_free(&exact.resident);
    return neap_cli_finish(status);
}
