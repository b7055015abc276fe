/* shape_model.c - see shape_model.h.
 *
 * GGUF, version 3: magic, u32 version, u64 tensors, u64 pairs of metadata; the pairs (key, u32
 * type, value); for each tensor its name, u32 dimensions, u64 each, u32 type, u64 offset; the
 * tensors, each at a multiple of 32. A string is u64 length and bytes.
 *
 * Weights are normal with variance 1 / inputs and norms are 1, so that activations keep their size
 * through all layers. Every tensor has a random sequence of its own, seeded by its number. */
#include "shape_model.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bytes.h"
#include "geometry.h"
#include "half.h"
#include "proc.h"

#define TOKENIZER_MODEL "qwen2.5-coder-0.5b"
#define ALIGNMENT 32u
#define TENSORS_MAX 512u
#define BLOCK_ELEMS ((size_t)1 << 18)

enum { PAIR_U32 = 4, PAIR_F32 = 6, PAIR_STRING = 8 };
enum { TENSOR_F32 = 0, TENSOR_F16 = 1 };

typedef struct shape {
    const char *name, *architecture, *file;
    uint32_t n_layers, n_embd, n_heads, n_kv_heads, head, n_ff, context;
    float rope_base, norm_eps;
    const char *norms[2]; /* of a layer: before attention and FFN, or behind them */
} shape;

/* The number in a file's name changes when other bytes are written for the same shape. */
static const shape shapes[] = {
    {.name = "qwen3-0.6b-shape",
     .architecture = "qwen3",
     .file = "qwen3-0.6b-shape-1.gguf",
     .n_layers = 28,
     .n_embd = 1024,
     .n_heads = 16,
     .n_kv_heads = 8,
     .head = 128,
     .n_ff = 3072,
     .context = 40960,
     .rope_base = 1e6f,
     .norm_eps = 1e-6f,
     .norms = {"attn_norm", "ffn_norm"}},
    {.name = "exaone-4.0-1.2b-shape",
     .architecture = "exaone4",
     .file = "exaone-4.0-1.2b-shape-1.gguf",
     .n_layers = 30,
     .n_embd = 2048,
     .n_heads = 32,
     .n_kv_heads = 8,
     .head = 64,
     .n_ff = 4096,
     .context = 65536,
     .rope_base = 1e6f,
     .norm_eps = 1e-5f,
     .norms = {"post_attention_norm", "post_ffw_norm"}},
    /* For trying: nobody's shape. */
    {.name = "tiny-shape",
     .architecture = "qwen3",
     .file = "tiny-shape-1.gguf",
     .n_layers = 3,
     .n_embd = 64,
     .n_heads = 4,
     .n_kv_heads = 2,
     .head = 32,
     .n_ff = 128,
     .context = 40960,
     .rope_base = 1e6f,
     .norm_eps = 1e-6f,
     .norms = {"attn_norm", "ffn_norm"}},
};

typedef struct tensor {
    char name[48];
    uint64_t n_in, n_out; /* n_out 0: a norm of n_in */
    uint64_t offset, len;
} tensor;

typedef struct model {
    const shape *shape;
    neap_geometry_pairs tokenizer;
    tensor tensors[TENSORS_MAX];
    size_t n_tensors;
    uint64_t data_len;
    char *head; /* everything before the tensors, a multiple of ALIGNMENT long */
    size_t head_len;
} model;

static const shape *find(const char *name) {
    for (size_t i = 0; name && i < sizeof shapes / sizeof *shapes; i++)
        if (strcmp(shapes[i].name, name) == 0) return &shapes[i];
    return NULL;
}

bool neap_shape_model_known(const char *name) {
    return find(name) != NULL;
}

/* ---- layout ---- */

__attribute__((format(printf, 4, 5))) static void add(model *m, uint64_t n_in, uint64_t n_out,
                                                      const char *format, ...) {
    tensor *t = &m->tensors[m->n_tensors++];
    va_list args;
    va_start(args, format);
    vsnprintf(t->name, sizeof t->name, format, args);
    va_end(args);
    t->n_in = n_in;
    t->n_out = n_out;
    t->offset = m->data_len;
    t->len = n_out ? n_in * n_out * sizeof(uint16_t) : n_in * sizeof(float);
    m->data_len = NEAP_ROUND_UP(t->offset + t->len, ALIGNMENT);
}

static void add_tensors(model *m) {
    const shape *s = m->shape;
    const uint64_t n_q = (uint64_t)s->n_heads * s->head, n_kv = (uint64_t)s->n_kv_heads * s->head;
    add(m, s->n_embd, m->tokenizer.n_vocab, "token_embd.weight");
    add(m, s->n_embd, 0, "output_norm.weight");
    for (uint32_t i = 0; i < s->n_layers; i++) {
        add(m, s->n_embd, 0, "blk.%u.%s.weight", i, s->norms[0]);
        add(m, s->n_embd, n_q, "blk.%u.attn_q.weight", i);
        add(m, s->n_embd, n_kv, "blk.%u.attn_k.weight", i);
        add(m, s->n_embd, n_kv, "blk.%u.attn_v.weight", i);
        add(m, s->head, 0, "blk.%u.attn_q_norm.weight", i);
        add(m, s->head, 0, "blk.%u.attn_k_norm.weight", i);
        add(m, n_q, s->n_embd, "blk.%u.attn_output.weight", i);
        add(m, s->n_embd, 0, "blk.%u.%s.weight", i, s->norms[1]);
        add(m, s->n_embd, s->n_ff, "blk.%u.ffn_gate.weight", i);
        add(m, s->n_embd, s->n_ff, "blk.%u.ffn_up.weight", i);
        add(m, s->n_ff, s->n_embd, "blk.%u.ffn_down.weight", i);
    }
}

/* ---- metadata ---- */

static void put(FILE *out, uint64_t value, size_t n_bytes) {
    for (size_t i = 0; i < n_bytes; i++)
        fputc((int)(value >> 8 * i & 0xff), out);
}

static void put_string(FILE *out, const char *text) {
    put(out, strlen(text), 8);
    fputs(text, out);
}

static void put_text(FILE *out, const char *key, const char *text) {
    put_string(out, key);
    put(out, PAIR_STRING, 4);
    put_string(out, text);
}

/* Keys of the architecture: name without its prefix. */
static void put_key(FILE *out, const shape *s, const char *name, uint32_t type, uint32_t bits) {
    char key[96];
    snprintf(key, sizeof key, "%s.%s", s->architecture, name);
    put_string(out, key);
    put(out, type, 4);
    put(out, bits, 4);
}

static void put_metadata(FILE *out, const model *m) {
    const shape *s = m->shape;
    const struct {
        const char *name;
        uint32_t value;
    } numbers[] = {
        {"block_count", s->n_layers},         {"context_length", s->context},
        {"embedding_length", s->n_embd},      {"feed_forward_length", s->n_ff},
        {"attention.head_count", s->n_heads}, {"attention.head_count_kv", s->n_kv_heads},
        {"attention.key_length", s->head},    {"attention.value_length", s->head},
    };
    const size_t n_numbers = sizeof numbers / sizeof *numbers;
    fputs("GGUF", out);
    put(out, 3, 4);
    put(out, m->n_tensors, 8);
    put(out, 2 + n_numbers + 2 + m->tokenizer.n_pairs, 8);
    put_text(out, "general.architecture", s->architecture);
    put_text(out, "general.name", s->name);
    for (size_t i = 0; i < n_numbers; i++)
        put_key(out, s, numbers[i].name, PAIR_U32, numbers[i].value);
    put_key(out, s, "rope.freq_base", PAIR_F32, neap_f32_bits(s->rope_base));
    put_key(out, s, "attention.layer_norm_rms_epsilon", PAIR_F32, neap_f32_bits(s->norm_eps));
    fwrite(m->tokenizer.bytes, 1, m->tokenizer.n_bytes, out);
    for (size_t i = 0; i < m->n_tensors; i++) {
        const tensor *t = &m->tensors[i];
        put_string(out, t->name);
        put(out, t->n_out ? 2 : 1, 4);
        put(out, t->n_in, 8);
        if (t->n_out) put(out, t->n_out, 8);
        put(out, t->n_out ? TENSOR_F16 : TENSOR_F32, 4);
        put(out, t->offset, 8);
    }
    while (ftello(out) % ALIGNMENT)
        fputc(0, out);
}

static int make_head(model *m) {
    FILE *out = open_memstream(&m->head, &m->head_len);
    if (!out) return -errno;
    put_metadata(out, m);
    const bool failed = ferror(out) != 0;
    return fclose(out) != 0 || failed ? -ENOMEM : 0;
}

/* ---- weights ---- */

/* splitmix64 */
static uint64_t next_random(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Normal enough: the sum of four uniform values, of variance 4 * 65536^2 / 12. */
static void fill_weights(uint16_t *values, size_t n, float deviation, uint64_t *state) {
    const float scale = deviation / 37837.23f;
    for (size_t i = 0; i < n; i++) {
        const uint64_t r = next_random(state);
        const int32_t sum =
            (int32_t)((r & 0xffff) + (r >> 16 & 0xffff) + (r >> 32 & 0xffff) + (r >> 48)) -
            2 * 65535;
        values[i] = neap_f16_of_f32((float)sum * scale);
    }
}

static int write_tensor(FILE *out, const tensor *t, uint64_t seed, uint16_t *block) {
    static const char zeros[ALIGNMENT];
    const float one = 1, deviation = 1 / sqrtf((float)t->n_in);
    for (uint64_t i = 0; t->n_out == 0 && i < t->n_in; i++)
        fwrite(&one, sizeof one, 1, out);
    for (uint64_t done = 0, n; done < t->n_in * t->n_out; done += n) {
        n = t->n_in * t->n_out - done;
        if (n > BLOCK_ELEMS) n = BLOCK_ELEMS;
        fill_weights(block, n, deviation, &seed);
        if (fwrite(block, sizeof *block, n, out) != n) return -errno;
    }
    fwrite(zeros, 1, NEAP_ROUND_UP(t->len, ALIGNMENT) - t->len, out);
    return ferror(out) ? -errno : 0;
}

static int write_tensors(FILE *out, const model *m) {
    uint16_t *block = malloc(BLOCK_ELEMS * sizeof *block);
    int err = block ? 0 : -ENOMEM;
    for (size_t i = 0; i < m->n_tensors && !err; i++) {
        neap_progress_set((double)m->tensors[i].offset / (double)m->data_len, NULL);
        err = write_tensor(out, &m->tensors[i], (uint64_t)i << 32, block);
    }
    free(block);
    return err;
}

/* ---- file ---- */

/* Room first: a full disk is noticed before the work. */
static int write_model(const model *m, int fd) {
    int err = -posix_fallocate(fd, 0, (off_t)(m->head_len + m->data_len));
    FILE *out = err ? NULL : fdopen(fd, "wb");
    if (!out) {
        if (!err) err = -errno;
        close(fd);
        return err;
    }
    if (fwrite(m->head, 1, m->head_len, out) != m->head_len) err = -errno;
    if (!err) err = write_tensors(out, m);
    if (!err && (fflush(out) != 0 || fsync(fd) != 0)) err = -errno;
    if (fclose(out) != 0 && !err) err = -errno;
    return err;
}

static int write_whole(const model *m, const char *folder, const char *path) {
    char part[NEAP_PATH_MAX];
    snprintf(part, sizeof part, "%s/part-%d-%s", folder, (int)getpid(), m->shape->file);
    const int fd = open(part, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    int err = fd < 0 ? -errno : write_model(m, fd);
    if (!err && rename(part, path) != 0) err = -errno;
    if (err && fd >= 0) unlink(part);
    return err;
}

static bool is_whole(const model *m, const char *path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISREG(info.st_mode) &&
           (uint64_t)info.st_size == m->head_len + m->data_len;
}

static int make(model *m, char path[NEAP_PATH_MAX]) {
    char cache[NEAP_PATH_MAX - 256], folder[NEAP_PATH_MAX - 128];
    int err = neap_cache_dir(cache, sizeof cache);
    snprintf(folder, sizeof folder, "%s/bench", cache);
    if (!err) err = neap_make_dirs(folder, 0700);
    add_tensors(m);
    if (!err) err = make_head(m);
    if (err) return err;
    snprintf(path, NEAP_PATH_MAX, "%s/%s", folder, m->shape->file);
    if (is_whole(m, path)) return 0;
    neap_progress_start("writing the model");
    err = write_whole(m, folder, path);
    neap_progress_stop();
    return err;
}

int neap_shape_model_make(const char *name, char path[NEAP_PATH_MAX]) {
    char tokenizer[NEAP_PATH_MAX];
    int status = neap_model_resolve(TOKENIZER_MODEL, tokenizer);
    if (status) return status;
    model *m = calloc(1, sizeof *m);
    int err = m ? 0 : -ENOMEM;
    if (!err) m->shape = find(name);
    if (!err) err = neap_geometry_pairs_read(tokenizer, "tokenizer.", &m->tokenizer);
    if (!err && m->tokenizer.n_vocab == 0) err = NEAP_E_CORRUPT;
    if (err)
        status = neap_cli_error(NEAP_EXIT_FAILED, NULL, "tokenizer of %s: %s", tokenizer,
                                neap_strerror(err));
    else if ((err = make(m, path)))
        status = neap_cli_error(NEAP_EXIT_FAILED, NULL, "model %s: %s", name, neap_strerror(err));
    if (m) {
        free(m->tokenizer.bytes);
        free(m->head);
    }
    free(m);
    return status;
}
