/* llama_session_none.c - llama_session.h of a program that was built without llama.cpp: there never
 * is a session, so that the rest is never called. */
#include "llama_session.h"

#include "cli.h"

int neap_session_open(const neap_session_options *options, neap_session **ret_session) {
    (void)options;
    (void)ret_session;
    return neap_cli_error(NEAP_EXIT_FAILED, "build it with -DNEAP_LLAMA_DIR=<sources of llama.cpp>",
                          "this neap was built without llama.cpp");
}

const char *neap_session_version(void) {
    return "none";
}

int neap_session_widen(const char *model_path, const char *to_path) {
    (void)model_path, (void)to_path;
    return neap_session_open(NULL, NULL);
}

void neap_session_close(neap_session *session) {
    (void)session;
}

uint32_t neap_session_vocabulary(const neap_session *session) {
    (void)session;
    return 0;
}

int neap_session_tokenize(neap_session *session, const char *text, size_t len, bool is_start,
                          neap_tokens *ret_tokens) {
    (void)session, (void)text, (void)len, (void)is_start, (void)ret_tokens;
    return NEAP_EXIT_FAILED;
}

int neap_session_read(neap_session *session, const int32_t *tokens, size_t n) {
    (void)session, (void)tokens, (void)n;
    return NEAP_EXIT_FAILED;
}

int neap_session_read_watched(neap_session *session, const int32_t *tokens, size_t n) {
    return neap_session_read(session, tokens, n);
}

bool neap_session_queries_of(const neap_session *session, uint32_t i,
                             neap_session_queries *ret_queries) {
    (void)session, (void)i, (void)ret_queries;
    return false;
}

int neap_session_logits(neap_session *session, const int32_t *tokens, size_t n,
                        const float **ret_logits) {
    (void)session, (void)tokens, (void)n, (void)ret_logits;
    return NEAP_EXIT_FAILED;
}

int neap_session_keep(neap_session *session, size_t n) {
    (void)session, (void)n;
    return NEAP_EXIT_FAILED;
}

int neap_session_keep_only(neap_session *session, const uint32_t *tokens, size_t n) {
    (void)session, (void)tokens, (void)n;
    return NEAP_EXIT_FAILED;
}

const neap_session_layer *neap_session_layers(const neap_session *session, uint32_t *ret_n) {
    (void)session;
    *ret_n = 0;
    return NULL;
}

int neap_session_get(neap_session *session, neap_kv_file *ret_state) {
    (void)session, (void)ret_state;
    return NEAP_EXIT_FAILED;
}

int neap_session_set(neap_session *session, const neap_kv_file *state) {
    (void)session, (void)state;
    return NEAP_EXIT_FAILED;
}

int neap_session_round(neap_session *session, const char *type, float *rows, size_t n_rows,
                       size_t n_per_row, size_t *ret_bytes) {
    (void)session, (void)type, (void)rows, (void)n_rows, (void)n_per_row, (void)ret_bytes;
    return NEAP_EXIT_FAILED;
}
