/* llama_session.h - a model and a context of llama.cpp in this process, for what needs a forward
 * pass and not a server: the cache of a text as arrays, logits of every token.
 * libllama is loaded at run time from beside the llama-server that neap starts; the CPU computes,
 * without neap's backend. A program built without NEAP_LLAMA_DIR has none and says so.
 * Errors    0, or the exit status of an error that has been printed.
 * Threads   one a session; sessions of one process take turns. */
#ifndef NEAP_APPS_LLAMA_SESSION_H
#define NEAP_APPS_LLAMA_SESSION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "klt.h"
#include "kv_file.h"
#include "server_client.h"

#define NEAP_SESSION_WINDOW 256

typedef struct neap_session neap_session;

typedef struct neap_session_options {
    const char *model_path;
    uint32_t n_ctx;
    int threads;                 /* 0: as many as cores */
    bool no_flash_attention;     /* V is then kept transposed: no get and set */
    const char *type_k, *type_v; /* of the cache, by ggml's names; NULL: f16 */
} neap_session_options;

/* A layer whose cache grows with the context. */
typedef struct neap_session_layer {
    uint32_t layer; /* its number in the model */
    uint32_t n_kv_heads, k_head_dim, v_head_dim;
    bool rope_known; /* false: keys are turned in a way that codec/rope.h does not know */
    neap_klt_rope rope;
} neap_session_layer;

/* Writes the model with all of its weights widened to f32: the same model, whose matrix products do
 * not round what they are given to 8 bits, as those of quantised weights do. */
int neap_session_widen(const char *model_path, const char *to_path);

/* Of the llama.cpp that neap was built for, whose states and results are its own. */
const char *neap_session_version(void);

int neap_session_open(const neap_session_options *options, neap_session **ret_session);
void neap_session_close(neap_session *session); /* takes NULL */

uint32_t neap_session_vocabulary(const neap_session *session); /* tokens */
/* is_start: with the token that texts of this model begin with, if it has one. */
int neap_session_tokenize(neap_session *session, const char *text, size_t len, bool is_start,
                          neap_tokens *ret_tokens);

/* Appends tokens to the context. */
int neap_session_read(neap_session *session, const int32_t *tokens, size_t n);
/* The same, and keeps the queries of the last NEAP_SESSION_WINDOW of them until its next call. */
int neap_session_read_watched(neap_session *session, const int32_t *tokens, size_t n);
/* The same as neap_session_read in one batch (n at most 2048), with what the model expects after
 * each of them: logits[n][vocabulary], the session's, until its next call. */
int neap_session_logits(neap_session *session, const int32_t *tokens, size_t n,
                        const float **ret_logits);
/* Forgets all but the first n tokens. */
int neap_session_keep(neap_session *session, size_t n);
/* Forgets all but these, ascending, the context's last one among them. The others keep their
 * positions, new tokens follow the last one; the state cannot be got then. */
int neap_session_keep_only(neap_session *session, const uint32_t *tokens, size_t n);

/* What a layer asked for while neap_session_read_watched read the last tokens. */
typedef struct neap_session_queries {
    uint32_t n_tokens, n_heads;
    float scale;    /* of the scores */
    const float *q; /* [n_tokens][n_heads][k_head_dim] after RoPE; the session's */
} neap_session_queries;

/* Of layer i of neap_session_layers. False: none were seen, as without flash attention. */
bool neap_session_queries_of(const neap_session *session, uint32_t i,
                             neap_session_queries *ret_queries);

/* The layers with a growing cache, in the order of the state; after the first tokens were read. */
const neap_session_layer *neap_session_layers(const neap_session *session, uint32_t *ret_n);
/* The state of the context: rows of f16 of its first cache, which is of these layers. Of a model
 * with sliding windows the second cache, of the other layers, is in it too. Fails also where rows
 * are something else. */
int neap_session_get(neap_session *session, neap_kv_file *ret_state);
/* Replaces the context by a state that get gave, whose rows may have been changed. */
int neap_session_set(neap_session *session, const neap_kv_file *state);

/* Rows of f16 to what a type of ggml ("q4_0") keeps of them, and back; *ret_bytes: what it takes.
 */
int neap_session_round(neap_session *session, const char *type, float *rows, size_t n_rows,
                       size_t n_per_row, size_t *ret_bytes);
#endif
