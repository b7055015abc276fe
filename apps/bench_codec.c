/* bench_codec.c - `neap bench codec`: how small and how fast the codecs are, on the KV cache of a
 * real model that has read real text.
 *
 * llama-server reads the text and saves its slot; the keys and values of that file are cut into
 * chunks as the engine does. The file is kept for the next run. Then, on one thread, repetition by
 * repetition: for each codec memcpy, compress, decompress, over all chunks; so that a noisy machine
 * disturbs them alike. LowRAM is fitted to the cache anew each time, which is timed by itself. What
 * is not timed: packing the coded chunks, and the checks: that coding what was decoded gives the
 * same bytes again, and decoding the coded bytes again the same cells. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bench.h"
#include "bytes.h"
#include "clock.h"
#include "codec.h"
#include "half.h"
#include "klt_file.h"
#include "kv_file.h"
#include "llama_session.h"
#include "lowram_module.h"
#include "proc.h"
#include "server_client.h"

#define DEFAULT_REPS 5
#define QUICK_CONTEXT 2048
#define DEFAULT_CONTEXT 4096
#define CODECS_MAX 32
/* English prose that every Debian has. */
#define DEFAULT_TEXT "/usr/share/common-licenses/GPL-3"

/* Has a codec or a klt. */
typedef struct coder {
    const neap_codec *codec;
    neap_klt_model *klt; /* of the model at hand; or LowRAM's fit of the cache */
    double lowram_ratio; /* 0: not LowRAM */
    double fit_seconds[NEAP_BENCH_REPS_MAX];
    size_t n_fits;
    char name[32];
} coder;

/* What LowRAM is fitted to: the cache, a layer's rows in one piece. */
typedef struct lowram_rows {
    neap_lowram_layer *layers;
    neap_klt_plane *k, *v;
    int32_t *positions;
} lowram_rows;

typedef struct result {
    double compress[NEAP_BENCH_REPS_MAX], decompress[NEAP_BENCH_REPS_MAX];
    double memcpy[NEAP_BENCH_REPS_MAX]; /* all GB/s */
    uint64_t coded_bytes;
    double error; /* squares of what was lost over squares */
    bool idempotent, repeatable, exact;
    size_t n;
} result;

typedef struct bench {
    neap_bench_options options;
    const char *text_path, *text_label;
    long context;
    char *text;
    neap_kv_file kv;
    lowram_rows rows;
    coder coders[CODECS_MAX];
    size_t n_coders;
    uint8_t *scratch;             /* of klt */
    uint8_t *out;                 /* where chunks are decoded to: as large as all of them */
    neap_codec_chunk *out_chunks; /* the same chunks there */
    uint8_t *room;                /* for one chunk, of any codec */
    uint8_t *packed;              /* all coded chunks */
    size_t cap_packed, *lens;
    result results[CODECS_MAX];
} bench;

/* ---- the cache ---- */

static int read_text(bench *b) {
    const char *path = b->text_path ? b->text_path : DEFAULT_TEXT;
    FILE *file = fopen(path, "re");
    b->text_label = path;
    if (!file && !b->text_path) {
        neap_cli_warn("%s: %s: the text is generated", path, neap_strerror(-errno));
        b->text_label = "generated";
        b->text = neap_text_generate((size_t)b->context);
        return b->text ? 0 : neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    }
    if (!file) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", path, neap_strerror(-errno));
    const size_t cap = (size_t)b->context * 16 + 4096;
    b->text = malloc(cap + 1);
    if (b->text) b->text[fread(b->text, 1, cap, file)] = '\0';
    fclose(file);
    if (!b->text) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    return 0;
}

static int prefill(const bench *b, const char *model_path, const char *folder, const char *name) {
    const neap_server_options options = {.model_path = model_path,
                                         .n_ctx = (uint32_t)b->context + 256,
                                         .threads = neap_option_threads(),
                                         .codec = "none",
                                         .slot_dir = folder};
    neap_server *server = NULL;
    neap_tokens tokens = {0};
    neap_answer answer = {0};
    int status = neap_server_start(&options, &server);
    if (!status) status = neap_server_tokenize(server, b->text, &tokens);
    if (!status && tokens.n < (size_t)b->context)
        status = neap_cli_error(NEAP_EXIT_FAILED, "give a longer --text or a smaller --context",
                                "text: %zu tokens are less than the context", tokens.n);
    if (!status) {
        tokens.n = (size_t)b->context;
        status = neap_server_complete(server, &tokens, 0, true, &answer);
    }
    if (!status) status = neap_server_slot_save(server, name);
    neap_answer_free(&answer);
    neap_tokens_free(&tokens);
    neap_server_stop(server);
    return status;
}

/* Loads the cache kept from an earlier run, or has it made. */
static int load_cache(bench *b, const char *model) {
    char model_path[NEAP_PATH_MAX], cache[NEAP_PATH_MAX - 64], folder[NEAP_PATH_MAX];
    char name[128], path[NEAP_PATH_MAX + 128];
    struct stat info;
    int status = neap_model_resolve(model, model_path);
    if (status) return status;
    int err = neap_cache_dir(cache, sizeof cache);
    if (!err && stat(model_path, &info) != 0) err = -errno;
    if (!err) {
        snprintf(folder, sizeof folder, "%s/bench/", cache);
        err = neap_make_dirs(folder, 0700);
    }
    if (err) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "bench folder: %s", neap_strerror(err));
    snprintf(name, sizeof name, "kv-%lld-%lld-%ld-%016llx.bin", (long long)info.st_size,
             (long long)info.st_mtime, b->context,
             (unsigned long long)neap_checksum(b->text, strlen(b->text)));
    snprintf(path, sizeof path, "%s%s", folder, name);
    if (neap_kv_file_load(path, &b->kv) == 0) return 0;
    status = prefill(b, model_path, folder, name);
    if (status) return status;
    err = neap_kv_file_load(path, &b->kv);
    if (!err) return 0;
    unlink(path);
    return neap_cli_error(NEAP_EXIT_FAILED, NULL, "the saved context of %s: %s",
                          neap_model_label(model), neap_strerror(err));
}

/* ---- coding ---- */

/* Chunk i of the cache and those of the block's other layers, as klt sees them. False: chunk i goes
 * with that of an earlier layer. Every layer has the same number of chunks. */
static bool klt_chunk(const bench *b, const coder *c, const neap_codec_chunk *chunks, size_t i,
                      int32_t positions[NEAP_KLT_ROWS], neap_klt_chunk *ret_chunk) {
    const size_t n_per_layer = b->kv.n_chunks / b->kv.n_layers;
    uint32_t at;
    const int block = neap_klt_model_find(c->klt, (uint32_t)(i / n_per_layer), &at);
    if (at != 0) return false;
    for (uint32_t r = 0; r < NEAP_KLT_ROWS; r++)
        positions[r] = (int32_t)(i % n_per_layer * NEAP_KLT_ROWS + r);
    *ret_chunk = (neap_klt_chunk){
        .block = (uint32_t)block, .n_rows = chunks[i].planes[0].n_rows, .positions = positions};
    const uint32_t n_layers = neap_klt_model_spec(c->klt)->blocks[block].n_layers;
    for (uint32_t l = 0; l < n_layers; l++) {
        const neap_codec_plane *planes = chunks[i + l * n_per_layer].planes;
        ret_chunk->k[l] = (neap_klt_plane){planes[0].data, planes[0].row_stride};
        ret_chunk->v[l] = (neap_klt_plane){planes[1].data, planes[1].row_stride};
    }
    return true;
}

static size_t coder_bound(const bench *b, const coder *c, size_t i) {
    if (c->codec) return c->codec->bound(&b->kv.chunks[i]);
    int32_t positions[NEAP_KLT_ROWS];
    neap_klt_chunk chunk;
    return klt_chunk(b, c, b->kv.chunks, i, positions, &chunk) ? neap_klt_bound(c->klt, &chunk) : 0;
}

static int coder_encode(const bench *b, const coder *c, const neap_codec_chunk *chunks, size_t i,
                        size_t *ret_len) {
    const size_t cap = coder_bound(b, c, i);
    if (c->codec) return c->codec->encode(&chunks[i], b->room, cap, ret_len);
    int32_t positions[NEAP_KLT_ROWS];
    neap_klt_chunk chunk;
    *ret_len = 0;
    if (!klt_chunk(b, c, chunks, i, positions, &chunk)) return 0;
    return neap_klt_encode(c->klt, &chunk, b->scratch, b->room, cap, ret_len, NULL);
}

static int coder_decode(const bench *b, const coder *c, const uint8_t *src, size_t i) {
    if (c->codec) return c->codec->decode(src, b->lens[i], &b->out_chunks[i]);
    int32_t positions[NEAP_KLT_ROWS];
    neap_klt_chunk chunk;
    if (!klt_chunk(b, c, b->out_chunks, i, positions, &chunk)) return 0;
    return neap_klt_decode(c->klt, src, b->lens[i], &chunk, b->scratch);
}

/* Whether the model's file codes all of the cache. */
static bool klt_fits(const bench *b, const neap_klt_model *klt) {
    const neap_klt_spec *spec = neap_klt_model_spec(klt);
    if (b->kv.n_caches != 1 || b->kv.n_chunks % b->kv.n_layers != 0) return false;
    const size_t n_per_layer = b->kv.n_chunks / b->kv.n_layers;
    for (size_t i = 0; i < b->kv.n_chunks; i++) {
        const neap_codec_plane *k = &b->kv.chunks[i].planes[0], *v = &b->kv.chunks[i].planes[1];
        const uint32_t layer = (uint32_t)(i / n_per_layer);
        uint32_t at;
        const int found = neap_klt_model_find(klt, layer, &at);
        if (found < 0 || b->kv.chunks[i].n_planes != 2) return false;
        const neap_klt_block *block = &spec->blocks[found];
        if (layer < at || block->layers[0] != layer - at || k->type != NEAP_KV_F16 ||
            v->type != NEAP_KV_F16 || k->n_rows > NEAP_KLT_ROWS ||
            k->row_elems != block->n_kv_heads * block->k_head_dim ||
            v->row_elems != block->n_kv_heads * block->v_head_dim)
            return false;
    }
    return true;
}

/* A file serves its ratio and those above. */
static void add_klt(bench *b, const char *folder, const char *profile, double ratio,
                    uint64_t digest) {
    coder *c = &b->coders[b->n_coders];
    *c = (coder){0};
    if (neap_klt_profile_open(folder, profile, digest, ratio, &c->klt) != 0) return;
    snprintf(c->name, sizeof c->name, "klt-%s-%g", profile, ratio);
    if (klt_fits(b, c->klt))
        b->n_coders++;
    else
        neap_klt_model_close(c->klt);
}

/* ---- LowRAM ---- */

static void free_rows(lowram_rows *r) {
    free(r->layers);
    free(r->k);
    free(r->v);
    free(r->positions);
    *r = (lowram_rows){0};
}

/* The cache as rows of these layers; fails: -ENOTSUP (not of them, or keys that cannot be turned
 * back to before RoPE). */
static int make_rows(bench *b, const neap_session_layer *layers, uint32_t n_layers) {
    lowram_rows *r = &b->rows;
    if (b->kv.n_caches != 1 || b->kv.n_layers != n_layers ||
        b->kv.n_chunks != n_layers * neap_kv_file_layer_chunks(&b->kv))
        return -ENOTSUP;
    *r = (lowram_rows){.layers = calloc(n_layers, sizeof *r->layers),
                       .k = calloc(n_layers, sizeof *r->k),
                       .v = calloc(n_layers, sizeof *r->v),
                       .positions = calloc(b->kv.n_cells, sizeof *r->positions)};
    if (!r->layers || !r->k || !r->v || !r->positions) return -ENOMEM;
    for (uint32_t i = 0; i < n_layers; i++) {
        const neap_session_layer *from = &layers[i];
        const neap_codec_plane *k = neap_kv_file_rows(&b->kv, i, 0);
        const neap_codec_plane *v = neap_kv_file_rows(&b->kv, i, 1);
        if (!from->rope_known || k->type != NEAP_KV_F16 || v->type != NEAP_KV_F16 ||
            k->row_elems != from->n_kv_heads * from->k_head_dim ||
            v->row_elems != from->n_kv_heads * from->v_head_dim)
            return -ENOTSUP;
        r->layers[i] = (neap_lowram_layer){.layer = from->layer,
                                           .n_kv_heads = from->n_kv_heads,
                                           .k_head_dim = from->k_head_dim,
                                           .v_head_dim = from->v_head_dim,
                                           .rope = from->rope};
        r->k[i] = (neap_klt_plane){k->data, k->row_stride};
        r->v[i] = (neap_klt_plane){v->data, v->row_stride};
    }
    for (uint32_t i = 0; i < b->kv.n_cells; i++)
        r->positions[i] = (int32_t)i;
    return 0;
}

/* Heads and RoPE are read off the model's graph, for which it reads one token, no matter which. */
static bool read_rows(bench *b, const char *model_path) {
    const neap_session_options options = {.model_path = model_path,
                                          .n_ctx = (uint32_t)b->context + 256,
                                          .threads = neap_option_threads()};
    const int32_t token = 0;
    neap_session *session = NULL;
    int status = neap_session_open(&options, &session), err = 0;
    if (!status) status = neap_session_read(session, &token, 1);
    if (!status) {
        uint32_t n_layers;
        const neap_session_layer *layers = neap_session_layers(session, &n_layers);
        err = make_rows(b, layers, n_layers);
    }
    neap_session_close(session);
    if (status) neap_cli_warn("lowram is left out");
    if (err) neap_cli_warn("lowram is left out: the cache of this model: %s", neap_strerror(err));
    return !status && !err;
}

/* As an engine fits it, on one thread; in place of the fit that it has. */
static int fit_lowram(const bench *b, coder *c) {
    const neap_lowram_context context = {
        .n_rows = b->kv.n_cells, .positions = b->rows.positions, .k = b->rows.k, .v = b->rows.v};
    neap_lowram_options options;
    neap_klt_model *model = NULL;
    neap_lowram_entry.defaults(&options, c->lowram_ratio);
    options.sample_rows = NEAP_LOWRAM_SAMPLE;
    const uint64_t began = neap_clock_ns();
    const int err =
        neap_lowram_entry.make(&options, b->rows.layers, b->kv.n_layers, &context, &model);
    if (err) return err;
    c->fit_seconds[c->n_fits++] = (double)(neap_clock_ns() - began) / 1e9;
    neap_klt_model_close(c->klt);
    c->klt = model;
    return 0;
}

static void add_lowram(bench *b, double ratio) {
    coder *c = &b->coders[b->n_coders];
    *c = (coder){.lowram_ratio = ratio};
    snprintf(c->name, sizeof c->name, "lowram-%g", ratio);
    int err = fit_lowram(b, c);
    if (!err && !klt_fits(b, c->klt)) err = -ENOTSUP;
    if (!err) {
        b->n_coders++;
        return;
    }
    neap_klt_model_close(c->klt);
    neap_cli_warn("%s is left out: %s", c->name,
                  err == NEAP_E_BUDGET ? "the context is too short" : neap_strerror(err));
}

/* ---- room ---- */

/* Every codec; klt as far as it was trained for the model. */
static int list_coders(bench *b, const char *model) {
    static const char *const profiles[] = {"head", "layer", "joint"};
    static const double ratios[] = {4, 6, 8, 12, 16};
    char path[NEAP_PATH_MAX], folder[NEAP_PATH_MAX];
    uint64_t digest;
    for (b->n_coders = 0; neap_codec_at(b->n_coders); b->n_coders++) {
        coder *c = &b->coders[b->n_coders];
        *c = (coder){.codec = neap_codec_at(b->n_coders)};
        snprintf(c->name, sizeof c->name, "%s", c->codec->name);
    }
    const int status = neap_model_resolve(model, path);
    if (status) return status;
    const bool has_folder = neap_model_digest(path, &digest) == 0 &&
                            neap_klt_folder(digest, folder, sizeof folder) == 0;
    for (size_t i = 0; i < sizeof profiles / sizeof *profiles && has_folder; i++)
        for (size_t k = 0; k < sizeof ratios / sizeof *ratios; k++)
            add_klt(b, folder, profiles[i], ratios[k], digest);
    neap_lowram_entry.open(NULL, NULL);
    if (read_rows(b, path)) {
        add_lowram(b, 4);
        add_lowram(b, 6);
    }
    size_t scratch = 64;
    for (size_t k = 0; k < b->n_coders; k++) {
        const size_t needed = b->coders[k].klt ? neap_klt_scratch_bytes(b->coders[k].klt) : 0;
        scratch = needed > scratch ? needed : scratch;
    }
    b->scratch = aligned_alloc(64, NEAP_ROUND_UP(scratch, 64));
    return b->scratch ? 0 : neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
}

static size_t bound_of_all(const bench *b, bool packed) {
    size_t most = 0, sum = 0;
    for (size_t k = 0; k < b->n_coders; k++)
        for (size_t i = 0; i < b->kv.n_chunks; i++) {
            const size_t bound = coder_bound(b, &b->coders[k], i);
            most = bound > most ? bound : most;
        }
    for (size_t i = 0; i < b->kv.n_chunks; i++)
        sum += neap_codec_raw_bytes(&b->kv.chunks[i]) + 4096;
    return packed ? sum : most;
}

static int make_room(bench *b) {
    const size_t n = b->kv.n_chunks, cap = bound_of_all(b, false);
    b->cap_packed = bound_of_all(b, true);
    b->out = malloc(b->kv.raw_bytes);
    b->out_chunks = malloc(n * sizeof *b->out_chunks);
    b->room = malloc(cap);
    b->packed = malloc(b->cap_packed);
    b->lens = malloc(n * sizeof *b->lens);
    if (!b->out || !b->out_chunks || !b->room || !b->packed || !b->lens)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    memset(b->out, 0, b->kv.raw_bytes); /* pages come before the clock runs */
    memset(b->packed, 0, b->cap_packed);
    memset(b->room, 0, cap);
    uint8_t *at = b->out;
    for (size_t i = 0; i < n; i++) {
        b->out_chunks[i] = b->kv.chunks[i];
        for (size_t p = 0; p < b->kv.chunks[i].n_planes; p++) {
            neap_codec_plane *plane = &b->out_chunks[i].planes[p];
            plane->data = at;
            at += plane->n_rows * plane->row_bytes;
        }
    }
    return 0;
}

static void free_model(bench *b) {
    neap_kv_file_free(&b->kv);
    free_rows(&b->rows);
    free(b->out);
    free(b->out_chunks);
    free(b->room);
    free(b->packed);
    free(b->lens);
    free(b->scratch);
    b->scratch = NULL;
    for (size_t k = 0; k < b->n_coders; k++)
        neap_klt_model_close(b->coders[k].klt);
    b->n_coders = 0;
    b->out = b->room = b->packed = NULL;
    b->out_chunks = NULL;
    b->lens = NULL;
    memset(b->results, 0, sizeof b->results);
}

/* ---- measuring ---- */

static double gbps(const bench *b, uint64_t ns) {
    return ns ? (double)b->kv.raw_bytes / (double)ns : 0;
}

static double copy_all(bench *b) {
    const uint64_t began = neap_clock_ns();
    for (size_t i = 0; i < b->kv.n_chunks; i++)
        for (size_t p = 0; p < b->kv.chunks[i].n_planes; p++) {
            const neap_codec_plane *from = &b->kv.chunks[i].planes[p];
            memcpy(b->out_chunks[i].planes[p].data, from->data, from->n_rows * from->row_bytes);
        }
    return gbps(b, neap_clock_ns() - began);
}

static int codec_failed(const coder *codec, const char *what, int err) {
    return neap_cli_error(NEAP_EXIT_FAILED, NULL, "codec %s: %s: %s", codec->name, what,
                          neap_strerror(err));
}

static int compress_all(bench *b, const coder *codec, result *r) {
    uint64_t ns = 0, total = 0;
    for (size_t i = 0; i < b->kv.n_chunks; i++) {
        const uint64_t began = neap_clock_ns();
        const int err = coder_encode(b, codec, b->kv.chunks, i, &b->lens[i]);
        ns += neap_clock_ns() - began;
        if (err || b->lens[i] > b->cap_packed - total)
            return codec_failed(codec, "compressing", err ? err : NEAP_E_BOUND);
        memcpy(b->packed + total, b->room, b->lens[i]);
        total += b->lens[i];
    }
    /* What is made for one context counts with it. */
    r->coded_bytes = total + (codec->lowram_ratio > 0 ? neap_klt_model_bytes(codec->klt) : 0);
    r->compress[r->n] = gbps(b, ns);
    return 0;
}

static int decode_all(const bench *b, const coder *codec) {
    const uint8_t *at = b->packed;
    for (size_t i = 0; i < b->kv.n_chunks; at += b->lens[i++]) {
        const int err = coder_decode(b, codec, at, i);
        if (err) return codec_failed(codec, "decompressing", err);
    }
    return 0;
}

static int decompress_all(bench *b, const coder *codec, result *r) {
    const uint64_t began = neap_clock_ns();
    const int status = decode_all(b, codec);
    if (!status) r->decompress[r->n] = gbps(b, neap_clock_ns() - began);
    return status;
}

/* Whether the coded bytes, decoded once more, give the same cells. */
static int check_again(bench *b, const coder *codec, result *r) {
    const uint64_t was = neap_checksum(b->out, b->kv.raw_bytes);
    memset(b->out, 0xff, b->kv.raw_bytes);
    const int status = decode_all(b, codec);
    r->repeatable = neap_checksum(b->out, b->kv.raw_bytes) == was;
    return status;
}

/* Squares of f16 values, and of what decoding changed of them. */
static void add_error(const neap_codec_plane *was, const neap_codec_plane *is, double *inout_lost,
                      double *inout_all) {
    const uint16_t *x = was->data, *y = is->data;
    if (was->type != NEAP_KV_F16) return;
    for (size_t i = 0; i < (size_t)was->n_rows * was->row_elems; i++) {
        const double value = (double)neap_f32_of_f16(x[i]);
        const double lost = (double)neap_f32_of_f16(y[i]) - value;
        *inout_lost += lost * lost;
        *inout_all += value * value;
    }
}

/* What was decoded: how far it is from what it had been, and whether coding it once more gives the
 * same bytes. */
static int check(bench *b, const coder *codec, result *r) {
    const uint8_t *at = b->packed;
    double lost = 0, all = 0;
    r->idempotent = r->exact = true;
    for (size_t i = 0; i < b->kv.n_chunks; at += b->lens[i++]) {
        size_t len = 0;
        const int err = coder_encode(b, codec, b->out_chunks, i, &len);
        if (err) return codec_failed(codec, "compressing again", err);
        if (len != b->lens[i] || memcmp(b->room, at, len) != 0) r->idempotent = false;
        for (size_t p = 0; p < b->kv.chunks[i].n_planes; p++) {
            const neap_codec_plane *from = &b->kv.chunks[i].planes[p];
            const neap_codec_plane *to = &b->out_chunks[i].planes[p];
            if (memcmp(to->data, from->data, from->n_rows * from->row_bytes) != 0) r->exact = false;
            add_error(from, to, &lost, &all);
        }
    }
    r->error = all > 0 ? lost / all : 0;
    return 0;
}

static int measure(bench *b, size_t model) {
    const size_t reps = b->options.reps ? (size_t)b->options.reps : DEFAULT_REPS;
    int status = 0;
    for (size_t rep = 0; rep < reps && !status; rep++) {
        for (size_t k = 0; k < b->n_coders && !status; k++) {
            coder *codec = &b->coders[k];
            result *r = &b->results[k];
            neap_progress_set(((double)model + (double)rep / (double)reps) /
                                  (double)b->options.n_models,
                              codec->name);
            if (codec->lowram_ratio > 0 && rep > 0) { /* has its first fit */
                const int err = fit_lowram(b, codec);
                if (err) status = codec_failed(codec, "fitting", err);
            }
            r->memcpy[r->n] = copy_all(b);
            if (!status) status = compress_all(b, codec, r);
            if (!status) status = decompress_all(b, codec, r);
            if (!status && rep == 0) status = check(b, codec, r);
            if (!status && rep == 0) status = check_again(b, codec, r);
            r->n++;
        }
    }
    return status;
}

/* ---- report ---- */

static json_t *row_json(const bench *b, const char *model, const coder *codec, const result *r) {
    const neap_summary compress = neap_summarise(r->compress, r->n);
    const neap_summary decompress = neap_summarise(r->decompress, r->n);
    const neap_summary copy = neap_summarise(r->memcpy, r->n);
    const double ratio = (double)b->kv.raw_bytes / (double)r->coded_bytes;
    const json_int_t klt_bytes = codec->klt ? (json_int_t)neap_klt_model_bytes(codec->klt) : 0;
    const bool is_lowram = codec->lowram_ratio > 0;
    json_t *row = json_pack(
        "{s:s, s:s, s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:b, s:b, s:b, s:I, s:I, s:i, s:o, "
        "s:o, s:o, s:I}",
        "codec", codec->name, "model", model, "context", (int)b->context, "ratio", ratio, "saved",
        1 - 1 / ratio, "compress_gbps", compress.median, "decompress_gbps", decompress.median,
        "memcpy_gbps", copy.median, "error", r->error, "idempotent", r->idempotent, "repeatable",
        r->repeatable, "exact", r->exact, "raw_bytes", (json_int_t)b->kv.raw_bytes, "coded_bytes",
        (json_int_t)r->coded_bytes, "reps", (int)r->n, "compress_gbps_range",
        neap_summary_json(&compress), "decompress_gbps_range", neap_summary_json(&decompress),
        "memcpy_gbps_range", neap_summary_json(&copy), "model_bytes",
        is_lowram ? (json_int_t)0 : klt_bytes);
    if (!is_lowram) return row;
    const neap_summary fit = neap_summarise(codec->fit_seconds, codec->n_fits);
    json_object_set_new(row, "fit_bytes", json_integer(klt_bytes));
    json_object_set_new(row, "fit_seconds", json_real(fit.median));
    json_object_set_new(row, "fit_seconds_range", neap_summary_json(&fit));
    return row;
}

/* LowRAM's fit takes that long before the first chunk can be coded; others have none. */
static void print_fit(const coder *codec) {
    if (codec->lowram_ratio > 0)
        printf(" %7.2f\n", neap_summarise(codec->fit_seconds, codec->n_fits).median);
    else
        printf(" %7s\n", "-");
}

static int report(const bench *b, const char *model, json_t *rows) {
    int status = 0;
    for (size_t k = 0; k < b->n_coders; k++) {
        const coder *codec = &b->coders[k];
        const result *r = &b->results[k];
        json_array_append_new(rows, row_json(b, model, codec, r));
        if (!b->options.as_json) {
            printf("%-20s %-12s %6ld %6.2f %7.1f %% %9.2f %10.2f %8.2f %8.1e  %-10s", model,
                   codec->name, b->context, (double)b->kv.raw_bytes / (double)r->coded_bytes,
                   100 - 100 * (double)r->coded_bytes / (double)b->kv.raw_bytes,
                   neap_summarise(r->compress, r->n).median,
                   neap_summarise(r->decompress, r->n).median,
                   neap_summarise(r->memcpy, r->n).median, r->error, r->idempotent ? "yes" : "NO");
            print_fit(codec);
        }
        if (!r->repeatable)
            status = neap_cli_error(NEAP_EXIT_FAILED, NULL,
                                    "%s, codec %s: the same bytes decoded to other cells", model,
                                    codec->name);
        /* klt and LowRAM are not: the engine never codes an unchanged chunk again. */
        if (codec->codec && (!r->idempotent || (codec->codec->lossless && !r->exact)))
            status = neap_cli_error(NEAP_EXIT_FAILED, NULL,
                                    "%s, codec %s: a second cycle changed it", model, codec->name);
    }
    if (!b->options.as_json) fflush(stdout);
    return status;
}

static int run(bench *b) {
    json_t *rows = json_array();
    int status = read_text(b);
    for (size_t i = 0; i < b->options.n_models && !status; i++) {
        const char *model = b->options.models[i];
        neap_progress_start("bench codec");
        status = load_cache(b, model);
        if (!status) status = list_coders(b, model);
        if (!status) status = make_room(b);
        if (!status) status = measure(b, i);
        neap_progress_stop();
        if (!status && i == 0 && !b->options.as_json)
            printf("%-20s %-12s %6s %6s %9s %9s %10s %8s %8s  %s %7s\n", "MODEL", "CODEC", "TOKENS",
                   "RATIO", "SAVED", "COMPRESS", "DECOMPRESS", "MEMCPY", "ERROR", "IDEMPOTENT",
                   "FIT S");
        if (!status) status = report(b, neap_model_label(model), rows);
        free_model(b);
    }
    if (!b->options.as_json || json_array_size(rows) == 0) {
        json_decref(rows);
        return neap_cli_finish(status);
    }
    const int printed = neap_cli_print_json(json_pack(
        "{s:o, s:s, s:o}", "machine", neap_machine_json(), "text", b->text_label, "rows", rows));
    return status ? status : printed;
}

/* ---- options ---- */

enum { OPT_CONTEXT = NEAP_OPT_BENCH, OPT_TEXT };

static const neap_command command = {
    "bench codec",
    "usage: neap bench codec [OPTIONS]\n"
    "\n"
    "Size and speed of every codec on the KV cache of a model that has read a text; one thread.\n"
    "--model may be given several times; default: all that are fetched.\n"
    "\n"
    "  --context N      tokens of the context (default 4096; 2048 with --quick)\n"
    "  --text FILE      the text (default: " DEFAULT_TEXT ")\n"};

static int take_option(void *ctx, int code, const char *value) {
    bench *b = ctx;
    switch (code) {
    case OPT_CONTEXT:
        return neap_option_number("--context", value, 64, 1000000, &b->context);
    case OPT_TEXT:
        b->text_path = value;
        return 0;
    default:
        return neap_bench_option(code, value, &b->options);
    }
}

int neap_bench_codec(int argc, char **argv) {
    static const struct option long_options[] = {NEAP_OPTIONS_BASIC,
                                                 NEAP_OPTIONS_BENCH,
                                                 {"context", required_argument, NULL, OPT_CONTEXT},
                                                 {"text", required_argument, NULL, OPT_TEXT},
                                                 {0}};
    bench *b = calloc(1, sizeof *b);
    if (!b) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    int status;
    if (!neap_bench_parse(&command, long_options, argc, argv, take_option, b, &status)) {
        free(b);
        return status;
    }
    if (!status && optind < argc)
        status = neap_cli_error(NEAP_EXIT_USAGE, "see neap bench codec --help",
                                "%s: one argument too many", argv[optind]);
    if (!status) status = neap_bench_default_models(&b->options);
    if (!b->context) b->context = b->options.quick ? QUICK_CONTEXT : DEFAULT_CONTEXT;
    if (!status) status = run(b);
    free(b->text);
    free(b);
    return status;
}
