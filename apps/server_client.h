/* server_client.h - a llama-server of our own on a free loopback port, and what the demo and the
 * benchmarks ask of it: tokens in, first token and answer out.
 * Errors    0, or the exit status of an error that has been printed (NEAP_EXIT_FAILED).
 * Threads   one thread a server.
 * Ownership token arrays and texts are malloc'd. */
#ifndef NEAP_APPS_SERVER_CLIENT_H
#define NEAP_APPS_SERVER_CLIENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "memory_group.h"

typedef struct neap_server neap_server;

typedef struct neap_server_options {
    const char *model_path;
    uint32_t n_ctx;
    int threads;                    /* 0: the server's default */
    const char *pressure;           /* on or off; NULL: as in the environment */
    bool may_die;                   /* it may be killed: what fails then is not printed */
    const char *codec;              /* NULL: as in the environment */
    const char *policy;             /* NULL: as in the environment */
    const char *attn;               /* the same */
    const char *slot_dir;           /* folder of saved slots; NULL: none are saved */
    bool stock;                     /* without the backend */
    unsigned n_slots;               /* 0: one; n_ctx is that of all */
    const char *cache_type;         /* of K and V, as q8_0; NULL: f16 */
    const char *kv, *kv_select;     /* NEAP_KV, NEAP_KV_SELECT; NULL: as in the environment */
    const neap_memory_group *group; /* it runs in; NULL: that of this process */
} neap_server_options;

typedef struct neap_tokens {
    int32_t *ids;
    size_t n;
} neap_tokens;

typedef struct neap_answer {
    char *text;
    neap_tokens tokens;
    double ttft_ms; /* request sent to first token received */
    double total_ms;
    double cpu_s; /* processor time of the server from the request to the first token */
    uint64_t prompt_n, cache_n; /* prompt tokens computed, and taken from the cache */
} neap_answer;

/* Starts llama-server and waits until it answers. It ends with this process. */
int neap_server_start(const neap_server_options *options, neap_server **ret_server);
void neap_server_stop(neap_server *server); /* takes NULL */
int neap_server_pid(const neap_server *server);
bool neap_server_alive(neap_server *server);
/* Pss_Anon + SwapPss + Pss_File; 0 when it has ended. */
uint64_t neap_server_memory(const neap_server *server);

/* Tokens that a slot holds: the server grants no more than the model was trained with. */
int neap_server_slot_tokens(neap_server *server, uint32_t *ret_n);
int neap_server_tokenize(neap_server *server, const char *text, neap_tokens *ret_tokens);
/* The model's chat form of a system text and a question. */
int neap_server_chat_prompt(neap_server *server, const char *system, const char *question,
                            char **ret_text);
/* Greedy completion of the prompt in slot 0, its cached prefix reused; n_predict 0 only fills the
 * cache. exactly: goes on past the end of the answer until n_predict tokens are there. */
int neap_server_complete(neap_server *server, const neap_tokens *prompt, unsigned n_predict,
                         bool exactly, neap_answer *ret_answer);
/* How often the model now chooses the next token of an earlier answer, given the prompt and the
 * answer up to there: one request a token, so that one difference does not make all that follow
 * count as different. */
int neap_server_agreement(neap_server *server, const neap_tokens *prompt, const int32_t *answer,
                          size_t n, size_t *ret_same);
/* The same prompt in n slots at once, its cached prefix reused, n_predict (at least 2) tokens in
 * each: tokens per second of all together, from each one's first token on. Fails also when a slot
 * computed more of the prompt than its last token. */
int neap_server_decode_speed(neap_server *server, const neap_tokens *prompt, unsigned n,
                             unsigned n_predict, double *ret_tps);
/* The same, read anew in each of the n slots: milliseconds from the request until all of them have
 * their first token. Fails also when a slot took part of it from its cache. */
int neap_server_prefill(neap_server *server, const neap_tokens *prompt, unsigned n, double *ret_ms);
void neap_answer_free(neap_answer *answer);
void neap_tokens_free(neap_tokens *tokens);
/* Slot 0 to and from a file of slot_dir. load: false when there is none, or it is unusable. */
int neap_server_slot_save(neap_server *server, const char *name);
int neap_server_slot_load(neap_server *server, const char *name, bool *ret_loaded);
int neap_server_slot_load_into(neap_server *server, unsigned slot, const char *name,
                               bool *ret_loaded);
#endif
