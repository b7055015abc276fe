/* llama_session.c - see llama_session.h.
 *
 * The one place that knows llama.cpp's interface. Structures are those of the header that neap was
 * built against, so the library must be of its very version; functions are looked up by name.
 * Which layers have a growing cache, and how their keys are turned, is read off the first graph
 * that is computed: the callback only looks at nodes, the graph is computed as a whole. Where
 * queries are wanted it is computed up to each attention instead, whose inputs are still there
 * then. */
#include "llama_session.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"
#include "ggml.h"
#include "llama.h"
#include "proc.h"
#include "rope.h"

#define BATCH 2048u
#define LAYERS_MAX 1024u
#define MESSAGE_BYTES 512

/* Names of functions, each a member of the table with the type of the header. */
/* clang-format off */
#define LLAMA_FUNCTIONS(F) \
    F(llama_backend_init) F(llama_log_set) F(llama_model_default_params) \
    F(llama_context_default_params) F(llama_model_load_from_file) F(llama_model_free) \
    F(llama_init_from_model) F(llama_free) F(llama_get_memory) F(llama_memory_clear) \
    F(llama_memory_seq_rm) F(llama_model_get_vocab) F(llama_model_n_head_kv) \
    F(llama_vocab_n_tokens) F(llama_tokenize) F(llama_decode) F(llama_get_logits) \
    F(llama_state_seq_get_size) F(llama_state_seq_get_data) \
    F(llama_state_seq_set_data) F(llama_model_quantize_default_params) F(llama_model_quantize) \
    F(ggml_version) F(ggml_type_name) F(ggml_row_size) F(ggml_get_type_traits)
/* clang-format on */
#define MEMBER(name) __typeof__(&name) name;

static struct { LLAMA_FUNCTIONS(MEMBER) } fn;

/* What llama.cpp last called an error: its reason for a call that failed. */
static char last_error[MESSAGE_BYTES];

typedef struct seen_layer {
    neap_session_layer shown;
    uint32_t n_cells; /* that its cache has room for */
    uint32_t k_elems, v_elems;
} seen_layer;

typedef struct seen_queries {
    uint32_t n_tokens, n_heads, head_dim;
    float scale;
    float *q;
} seen_queries;

struct neap_session {
    struct llama_model *model;
    struct llama_context *context;
    const struct llama_vocab *vocab;
    uint32_t n_tokens; /* in the context */
    bool can_get;
    struct llama_batch batch; /* of room for BATCH tokens; its arrays are ours */
    llama_seq_id sequence, *sequences[BATCH];
    seen_layer *seen; /* of the first graph; NULL once it is digested */
    uint32_t n_seen;
    neap_session_layer *layers;
    uint32_t n_layers;
    bool is_watching, lacks_memory; /* for queries */
    seen_queries *queries;          /* [LAYERS_MAX] by the model's number of the layer */
};

/* ---- the library ---- */

static void keep_error(enum ggml_log_level level, const char *text, void *user) {
    (void)user;
    if (level != GGML_LOG_LEVEL_ERROR || strspn(text, " \n") == strlen(text)) return;
    snprintf(last_error, sizeof last_error, "%s", text);
    last_error[strcspn(last_error, "\n")] = '\0';
}

static int failed(const char *what) {
    return neap_cli_error(NEAP_EXIT_FAILED, NULL, "llama.cpp: %s: %s", what,
                          *last_error ? last_error : "failed without a reason");
}

/* Folder of the llama-server that would be started, links resolved; false: there is none. */
static bool program_folder(char path[NEAP_PATH_MAX]) {
    char name[NEAP_PATH_MAX];
    neap_path_program("llama-server", name);
    const char *const search = getenv("PATH");
    char *real = strchr(name, '/') ? realpath(name, NULL) : NULL;
    for (const char *at = search; !real && at && *at; at += strspn(at, ":")) {
        const int len = (int)strcspn(at, ":");
        char found[NEAP_PATH_MAX];
        snprintf(found, sizeof found, "%.*s/llama-server", len, at);
        if (access(found, X_OK) == 0) real = realpath(found, NULL);
        at += len;
    }
    if (!real) return false;
    char *slash = strrchr(real, '/');
    if (slash) *slash = '\0';
    snprintf(path, NEAP_PATH_MAX, "%s", real);
    free(real);
    return true;
}

static void *open_library(void) {
    static const char *const places[] = {"libllama.so", "../lib/libllama.so"};
    char folder[NEAP_PATH_MAX], path[NEAP_PATH_MAX + 32];
    const bool has_folder = program_folder(folder);
    void *library = NULL;
    for (size_t i = 0; has_folder && !library && i < sizeof places / sizeof *places; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, places[i]);
        if (access(path, R_OK) == 0) library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    return library ? library : dlopen("libllama.so", RTLD_NOW | RTLD_LOCAL);
}

static const char *missing_function(void *library) {
#define ENTRY(name) {#name, &fn.name},
    const struct {
        const char *name;
        void *slot;
    } entries[] = {LLAMA_FUNCTIONS(ENTRY)};
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        void *address = dlsym(library, entries[i].name);
        if (!address) return entries[i].name;
        memcpy(entries[i].slot, &address, sizeof address);
    }
    return NULL;
}

static int load_library(void) {
    static const char remedy[] = "build llama.cpp with shared libraries beside llama-server";
    static bool is_loaded;
    if (is_loaded) return 0;
    /* OpenMP's threads that spin between operations starve all others; see paths.c. */
    if (!getenv("OMP_WAIT_POLICY")) setenv("GOMP_SPINCOUNT", "1000", 0);
    void *library = open_library();
    if (!library) return neap_cli_error(NEAP_EXIT_FAILED, remedy, "libllama.so: %s", dlerror());
    const char *missing = missing_function(library);
    if (missing)
        return neap_cli_error(NEAP_EXIT_FAILED, remedy, "libllama.so: no function %s", missing);
    if (strcmp(fn.ggml_version(), NEAP_GGML_VERSION) != 0)
        return neap_cli_error(NEAP_EXIT_FAILED, "build neap with -DNEAP_LLAMA_DIR=<its llama.cpp>",
                              "libllama.so: its ggml is %s, neap was built for %s",
                              fn.ggml_version(), NEAP_GGML_VERSION);
    fn.llama_log_set(keep_error, NULL);
    fn.llama_backend_init();
    is_loaded = true;
    return 0;
}

/* ---- what the first graph shows ---- */

static seen_layer *seen_of(neap_session *s, uint32_t layer) {
    for (uint32_t i = 0; i < s->n_seen; i++)
        if (s->seen[i].shown.layer == layer) return &s->seen[i];
    if (s->n_seen == LAYERS_MAX) return NULL;
    s->seen[s->n_seen].shown.layer = layer;
    return &s->seen[s->n_seen++];
}

/* The ROPE that made these rows, behind views; NULL: something else did. */
static const struct ggml_tensor *rope_of(const struct ggml_tensor *rows) {
    while (rows && (rows->op == GGML_OP_VIEW || rows->op == GGML_OP_RESHAPE))
        rows = rows->src[0];
    return rows && rows->op == GGML_OP_ROPE ? rows : NULL;
}

static void see_keys(neap_session *s, seen_layer *seen, const struct ggml_tensor *node) {
    const struct ggml_tensor *rope = rope_of(node->src[0]);
    neap_session_layer *layer = &seen->shown;
    seen->n_cells = (uint32_t)node->view_src->ne[1];
    seen->k_elems = (uint32_t)node->view_src->ne[0];
    layer->n_kv_heads = rope ? (uint32_t)rope->ne[1] : (uint32_t)fn.llama_model_n_head_kv(s->model);
    if (layer->n_kv_heads == 0 || seen->k_elems % layer->n_kv_heads != 0) return;
    layer->k_head_dim = seen->k_elems / layer->n_kv_heads;
    if (!rope) return;
    const struct ggml_tensor *factors = rope->src[2];
    int32_t offset;
    const neap_kv_rope turned =
        neap_rope_of_node(rope->op_params, factors ? factors->data : NULL, &offset);
    layer->rope_known =
        offset == 0 && neap_rope_fold(&turned, layer->k_head_dim, &layer->rope) == 0;
}

/* After the attention of a layer: its inputs, of f32 and in memory, as the CPU computes. */
static void take_queries(neap_session *s, const struct ggml_tensor *node) {
    const struct ggml_tensor *q = node->src[0], *k = node->src[1];
    unsigned number;
    if (!k->view_src || sscanf(k->view_src->name, "cache_k_l%u", &number) != 1 ||
        number >= LAYERS_MAX || q->type != GGML_TYPE_F32)
        return;
    seen_queries *seen = &s->queries[number];
    const size_t dim = (size_t)q->ne[0], n_tokens = (size_t)q->ne[1], n_heads = (size_t)q->ne[2];
    float *rows = realloc(seen->q, n_tokens * n_heads * dim * sizeof *rows);
    s->lacks_memory |= !rows;
    if (!rows) return;
    for (size_t t = 0; t < n_tokens; t++)
        for (size_t h = 0; h < n_heads; h++)
            memcpy(rows + (t * n_heads + h) * dim,
                   (const char *)q->data + t * q->nb[1] + h * q->nb[2], dim * sizeof *rows);
    *seen = (seen_queries){(uint32_t)n_tokens, (uint32_t)n_heads, (uint32_t)dim, 0, rows};
    memcpy(&seen->scale, node->op_params, sizeof seen->scale);
}

/* Called with each node before the graph is computed; false: its result is not wanted. Of those
 * that are, called again afterwards. */
static bool look_at_node(struct ggml_tensor *node, bool asks, void *user) {
    neap_session *s = user;
    unsigned number;
    if (!asks) take_queries(s, node);
    if (!asks || (s->is_watching && node->op == GGML_OP_FLASH_ATTN_EXT)) return true;
    if (!s->seen || node->op != GGML_OP_SET_ROWS || !node->view_src) return false;
    const char *name = node->view_src->name;
    const bool is_k = sscanf(name, "cache_k_l%u", &number) == 1;
    if (!is_k && sscanf(name, "cache_v_l%u", &number) != 1) return false;
    seen_layer *seen = seen_of(s, number);
    if (!seen) return false;
    if (is_k)
        see_keys(s, seen, node);
    else
        seen->v_elems = (uint32_t)node->view_src->ne[0];
    return false;
}

static int by_layer(const void *a, const void *b) {
    const seen_layer *x = a, *y = b;
    return (x->shown.layer > y->shown.layer) - (x->shown.layer < y->shown.layer);
}

/* Layers with a growing cache are those with room for the most cells. */
static int digest_seen(neap_session *s) {
    uint32_t most = 0;
    s->layers = calloc(s->n_seen ? s->n_seen : 1, sizeof *s->layers);
    if (!s->layers) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    qsort(s->seen, s->n_seen, sizeof *s->seen, by_layer);
    for (uint32_t i = 0; i < s->n_seen; i++)
        most = s->seen[i].n_cells > most ? s->seen[i].n_cells : most;
    for (uint32_t i = 0; i < s->n_seen; i++) {
        seen_layer *seen = &s->seen[i];
        neap_session_layer *layer = &seen->shown;
        if (seen->n_cells != most || layer->n_kv_heads == 0) continue;
        layer->v_head_dim = seen->v_elems / layer->n_kv_heads;
        s->layers[s->n_layers++] = *layer;
    }
    free(s->seen);
    s->seen = NULL;
    return 0;
}

/* ---- opening ---- */

static enum ggml_type type_of(const char *name) {
    for (int type = 0; type < GGML_TYPE_COUNT; type++) {
        const char *known = fn.ggml_type_name((enum ggml_type)type);
        if (known && strcmp(known, name) == 0) return (enum ggml_type)type;
    }
    return GGML_TYPE_COUNT;
}

static int open_context(neap_session *s, const neap_session_options *options) {
    struct llama_context_params params = fn.llama_context_default_params();
    const int threads = options->threads ? options->threads : (int)neap_cores();
    params.n_ctx = options->n_ctx;
    params.n_batch = BATCH;
    params.n_threads = params.n_threads_batch = threads;
    params.flash_attn_type = options->no_flash_attention ? LLAMA_FLASH_ATTN_TYPE_DISABLED
                                                         : LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.swa_full = false; /* as llama-server: caches of sliding windows do not grow */
    params.cb_eval = look_at_node;
    params.cb_eval_user_data = s;
    if (options->type_k) params.type_k = type_of(options->type_k);
    if (options->type_v) params.type_v = type_of(options->type_v);
    if (params.type_k == GGML_TYPE_COUNT || params.type_v == GGML_TYPE_COUNT)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "llama.cpp: no such type of cache: %s",
                              params.type_k == GGML_TYPE_COUNT ? options->type_k : options->type_v);
    s->can_get = !options->no_flash_attention && params.type_k == GGML_TYPE_F16 &&
                 params.type_v == GGML_TYPE_F16;
    s->context = fn.llama_init_from_model(s->model, params);
    return s->context ? 0 : failed("making a context");
}

static int make_batch(neap_session *s) {
    struct llama_batch *batch = &s->batch;
    batch->token = malloc(BATCH * sizeof *batch->token);
    batch->pos = malloc(BATCH * sizeof *batch->pos);
    batch->n_seq_id = malloc(BATCH * sizeof *batch->n_seq_id);
    batch->logits = malloc(BATCH);
    batch->seq_id = s->sequences;
    s->seen = calloc(LAYERS_MAX, sizeof *s->seen);
    s->queries = calloc(LAYERS_MAX, sizeof *s->queries);
    if (!batch->token || !batch->pos || !batch->n_seq_id || !batch->logits || !s->seen ||
        !s->queries)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    for (uint32_t i = 0; i < BATCH; i++) {
        batch->n_seq_id[i] = 1;
        s->sequences[i] = &s->sequence;
    }
    return 0;
}

const char *neap_session_version(void) {
    return NEAP_GGML_VERSION;
}

int neap_session_open(const neap_session_options *options, neap_session **ret_session) {
    int status = load_library();
    if (status) return status;
    neap_session *s = calloc(1, sizeof *s);
    if (!s) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    struct llama_model_params params = fn.llama_model_default_params();
    params.n_gpu_layers = 0;
    *last_error = '\0';
    s->model = fn.llama_model_load_from_file(options->model_path, params);
    status = s->model ? make_batch(s) : failed(options->model_path);
    if (!status) status = open_context(s, options);
    if (status) {
        neap_session_close(s);
        return status;
    }
    s->vocab = fn.llama_model_get_vocab(s->model);
    *ret_session = s;
    return 0;
}

static void forget_queries(neap_session *s) {
    for (uint32_t i = 0; i < LAYERS_MAX && s->queries; i++) {
        free(s->queries[i].q);
        s->queries[i] = (seen_queries){0};
    }
}

void neap_session_close(neap_session *s) {
    if (!s) return;
    forget_queries(s);
    free(s->queries);
    if (s->context) fn.llama_free(s->context);
    if (s->model) fn.llama_model_free(s->model);
    free(s->batch.token);
    free(s->batch.pos);
    free(s->batch.n_seq_id);
    free(s->batch.logits);
    free(s->seen);
    free(s->layers);
    free(s);
}

int neap_session_widen(const char *model_path, const char *to_path) {
    const int status = load_library();
    if (status) return status;
    struct llama_model_quantize_params params = fn.llama_model_quantize_default_params();
    params.ftype = LLAMA_FTYPE_ALL_F32;
    params.allow_requantize = true;
    *last_error = '\0';
    return fn.llama_model_quantize(model_path, to_path, &params) == 0 ? 0 : failed(to_path);
}

/* ---- text and tokens ---- */

uint32_t neap_session_vocabulary(const neap_session *s) {
    return (uint32_t)fn.llama_vocab_n_tokens(s->vocab);
}

int neap_session_tokenize(neap_session *s, const char *text, size_t len, bool is_start,
                          neap_tokens *ret_tokens) {
    const size_t cap = len + 2; /* a token is a byte of the text at least */
    neap_tokens tokens = {.ids = malloc(cap * sizeof *tokens.ids)};
    if (!tokens.ids || cap > INT32_MAX) {
        free(tokens.ids);
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "text: %s", neap_strerror(-ENOMEM));
    }
    const int32_t n =
        fn.llama_tokenize(s->vocab, text, (int32_t)len, tokens.ids, (int32_t)cap, is_start, false);
    if (n < 0) {
        free(tokens.ids);
        return failed("cutting a text into tokens");
    }
    tokens.n = (size_t)n;
    *ret_tokens = tokens;
    return 0;
}

/* ---- forward passes ---- */

static int decode(neap_session *s, const int32_t *tokens, uint32_t n, bool with_logits) {
    struct llama_batch *batch = &s->batch;
    batch->n_tokens = (int32_t)n;
    memcpy(batch->token, tokens, n * sizeof *tokens);
    memset(batch->logits, with_logits, n);
    for (uint32_t i = 0; i < n; i++)
        batch->pos[i] = (llama_pos)(s->n_tokens + i);
    *last_error = '\0';
    if (fn.llama_decode(s->context, *batch) != 0) return failed("reading tokens");
    s->n_tokens += n;
    return s->seen ? digest_seen(s) : 0;
}

int neap_session_read(neap_session *s, const int32_t *tokens, size_t n) {
    int status = 0;
    for (size_t done = 0; done < n && !status; done += BATCH)
        status = decode(s, tokens + done, n - done < BATCH ? (uint32_t)(n - done) : BATCH, false);
    return status;
}

int neap_session_read_watched(neap_session *s, const int32_t *tokens, size_t n) {
    const size_t window = n < NEAP_SESSION_WINDOW ? n : NEAP_SESSION_WINDOW;
    forget_queries(s);
    int status = neap_session_read(s, tokens, n - window);
    s->is_watching = true;
    s->lacks_memory = false;
    if (!status) status = neap_session_read(s, tokens + n - window, window);
    s->is_watching = false;
    if (!status && s->lacks_memory)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    return status;
}

bool neap_session_queries_of(const neap_session *s, uint32_t i, neap_session_queries *ret_queries) {
    const neap_session_layer *layer = &s->layers[i];
    if (layer->layer >= LAYERS_MAX) return false;
    const seen_queries *seen = &s->queries[layer->layer];
    if (!seen->q || seen->head_dim != layer->k_head_dim) return false;
    *ret_queries = (neap_session_queries){seen->n_tokens, seen->n_heads, seen->scale, seen->q};
    return true;
}

int neap_session_logits(neap_session *s, const int32_t *tokens, size_t n,
                        const float **ret_logits) {
    if (n > BATCH)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "more than %u tokens at once", BATCH);
    const int status = decode(s, tokens, (uint32_t)n, true);
    if (!status) *ret_logits = fn.llama_get_logits(s->context);
    return status;
}

int neap_session_keep(neap_session *s, size_t n) {
    llama_memory_t memory = fn.llama_get_memory(s->context);
    if (n == 0)
        fn.llama_memory_clear(memory, false);
    else if (n < s->n_tokens && !fn.llama_memory_seq_rm(memory, 0, (llama_pos)n, -1))
        return failed("forgetting tokens");
    if (n < s->n_tokens) s->n_tokens = (uint32_t)n;
    return 0;
}

int neap_session_keep_only(neap_session *s, const uint32_t *tokens, size_t n) {
    llama_memory_t memory = fn.llama_get_memory(s->context);
    uint32_t next = 0; /* not yet looked at */
    *last_error = '\0';
    for (size_t i = 0; i < n; next = tokens[i++] + 1)
        if (tokens[i] > next &&
            !fn.llama_memory_seq_rm(memory, 0, (llama_pos)next, (llama_pos)tokens[i]))
            return failed("forgetting tokens");
    return 0;
}

/* ---- the state ---- */

const neap_session_layer *neap_session_layers(const neap_session *s, uint32_t *ret_n) {
    *ret_n = s->n_layers;
    return s->layers;
}

/* Whether the first cache of the state is that of our layers, as rows of f16. */
static bool is_ours(const neap_session *s, const neap_kv_file *state) {
    if (s->n_layers == 0 || state->n_layers != s->n_layers || state->n_cells != s->n_tokens)
        return false;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const neap_session_layer *layer = &s->layers[i];
        const neap_codec_plane *k = neap_kv_file_rows(state, i, 0);
        const neap_codec_plane *v = neap_kv_file_rows(state, i, 1);
        if (k->type != NEAP_KV_F16 || k->row_elems != layer->n_kv_heads * layer->k_head_dim ||
            v->type != NEAP_KV_F16 || v->row_elems != layer->n_kv_heads * layer->v_head_dim)
            return false;
    }
    return true;
}

int neap_session_get(neap_session *s, neap_kv_file *ret_state) {
    const size_t size = s->can_get ? fn.llama_state_seq_get_size(s->context, 0) : 0;
    uint8_t *bytes = size ? malloc(size) : NULL;
    if (!bytes || fn.llama_state_seq_get_data(s->context, bytes, size, 0) != size) {
        free(bytes);
        return failed("saving the state");
    }
    neap_kv_file state;
    const int err = neap_kv_file_of_state(bytes, size, &state);
    if (err || !is_ours(s, &state)) {
        if (!err) neap_kv_file_free(&state);
        return neap_cli_error(NEAP_EXIT_FAILED, NULL,
                              "the state of this model is not rows of keys and values in a form "
                              "that neap knows");
    }
    *ret_state = state;
    return 0;
}

int neap_session_set(neap_session *s, const neap_kv_file *state) {
    fn.llama_memory_clear(fn.llama_get_memory(s->context), false);
    *last_error = '\0';
    if (fn.llama_state_seq_set_data(s->context, state->bytes, state->n_bytes, 0) == 0)
        return failed("loading a state");
    s->n_tokens = state->n_cells;
    return 0;
}

int neap_session_round(neap_session *s, const char *name, float *rows, size_t n_rows,
                       size_t n_per_row, size_t *ret_bytes) {
    (void)s;
    const enum ggml_type type = type_of(name);
    const struct ggml_type_traits *traits =
        type < GGML_TYPE_COUNT ? fn.ggml_get_type_traits(type) : NULL;
    if (!traits || !traits->from_float_ref || !traits->to_float ||
        n_per_row % (size_t)traits->blck_size != 0)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "llama.cpp: rows of %zu cannot be %s",
                              n_per_row, name);
    const size_t row_bytes = fn.ggml_row_size(type, (int64_t)n_per_row);
    void *room = malloc(row_bytes);
    if (!room) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    for (size_t r = 0; r < n_rows; r++) {
        traits->from_float_ref(rows + r * n_per_row, room, (int64_t)n_per_row);
        traits->to_float(room, rows + r * n_per_row, (int64_t)n_per_row);
    }
    free(room);
    *ret_bytes = n_rows * row_bytes;
    return 0;
}
