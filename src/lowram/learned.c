/* learned.c - the file of learned starts: written and read. Both check the same ranges; where
 * everything lies follows from the table of layers. */
#include "learned.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "err.h"
#include "half.h"
#include "textfile.h"
#include "value_int.h"

enum { VERSION = 1, HEADER_BYTES = 128, LAYER_BYTES = 32 };
#define FILE_MAX ((uint64_t)1 << 32)

static const char magic[8] = "NEAPLRM";

typedef struct header {
    char magic[8];
    uint32_t version, n_layers;
    uint64_t file_bytes, digest, checksum;
    uint32_t has_net, zero;
    char name[NEAP_LEARNED_NAME];
    uint32_t zeros[4];
} header;
_Static_assert(sizeof(header) == HEADER_BYTES, "the header of the file");

typedef struct entry {
    uint32_t layer, n_kv_heads, dk, dv, hidden, is_slim, has_key_norm, zero;
} entry;
_Static_assert(sizeof(entry) == LAYER_BYTES, "a layer of the table");

struct neap_learned {
    char *bytes;
    header head;
    neap_learned_layer *layers;
    uint64_t *begin; /* [n_layers] where the heads of a layer are in the bytes */
    neap_token_net net;
};

/* ---- shape ---- */

static bool layer_is_good(const neap_learned_layer *l, int64_t before) {
    return l->layer > before && l->layer < NEAP_LEARNED_LAYERS && l->n_kv_heads > 0 &&
           l->n_kv_heads <= NEAP_LEARNED_HEADS && l->dk > 0 && l->dk <= NEAP_VALUE_WIDTH &&
           l->dv > 0 && l->dv <= NEAP_VALUE_WIDTH && l->hidden <= NEAP_VALUE_WIDTH &&
           !(l->is_slim && l->has_key_norm);
}

static uint64_t norm_bytes(const neap_learned_layer *l) {
    return (2 * (uint64_t)l->dk + l->dv + 1) * sizeof(float);
}

/* A head: norm in f32; in f16 Slim's map, warm start, meta-initialisation. */
static uint64_t head_bytes(const neap_learned_layer *l) {
    const neap_value_shape shape = neap_value_shape_of(l->dk, l->dv, l->hidden);
    const uint64_t n_halves = (uint64_t)l->dk * l->dv + 2 * neap_value_n_params(&shape);
    return NEAP_ROUND_UP(norm_bytes(l) + n_halves * sizeof(uint16_t), 4);
}

/* ---- writing ---- */

static bool put_halves(const float *values, size_t n, char **at) {
    for (size_t i = 0; i < n; i++) {
        const uint16_t half = neap_f16_of_f32(values[i]);
        if ((half & 0x7fffu) >= NEAP_F16_INF) return false;
        memcpy(*at, &half, sizeof half);
        *at += sizeof half;
    }
    return true;
}

static void put_floats(const float *values, size_t n, char **at) {
    memcpy(*at, values, n * sizeof *values);
    *at += n * sizeof *values;
}

/* A start in the terms of the norm, where its parameters are about 1. */
static int put_start(const neap_value_norm *norm, const neap_value *value, char **at) {
    neap_value standard;
    const size_t n = neap_value_n_params(&value->shape);
    const int err = neap_value_create(&value->shape, &standard);
    if (err) return err;
    memcpy(standard.w1, value->w1, n * sizeof *value->w1);
    neap_value_to_standard(norm, &standard);
    const bool is_good = put_halves(standard.w1, n, at);
    neap_value_free(&standard);
    return is_good ? 0 : NEAP_E_BOUND;
}

static int put_linear(const neap_learned_layer *l, const neap_learned_head *h, char **at) {
    for (size_t c = 0; c < l->dk; c++)
        for (size_t j = 0; j < l->dv; j++) {
            const float x = h->linear[c * l->dv + j] * h->norm.k_deviation[c] / h->norm.v_deviation;
            if (!put_halves(&x, 1, at)) return NEAP_E_BOUND;
        }
    return 0;
}

static int put_head(const neap_learned_layer *l, const neap_learned_head *h, char *at) {
    put_floats(h->norm.k_mean, l->dk, &at);
    put_floats(h->norm.k_deviation, l->dk, &at);
    put_floats(h->norm.v_mean, l->dv, &at);
    put_floats(&h->norm.v_deviation, 1, &at);
    int err = put_linear(l, h, &at);
    if (!err) err = put_start(&h->norm, &h->warm, &at);
    if (!err) err = put_start(&h->norm, &h->meta, &at);
    return err;
}

static int put_all(const neap_learned_spec *spec, const header *head, char *bytes) {
    const neap_learned_head *h = spec->heads;
    char *at = bytes + HEADER_BYTES;
    for (uint32_t i = 0; i < spec->n_layers; i++, at += LAYER_BYTES) {
        const neap_learned_layer *l = &spec->layers[i];
        const entry e = {.layer = l->layer,
                         .n_kv_heads = l->n_kv_heads,
                         .dk = l->dk,
                         .dv = l->dv,
                         .hidden = l->hidden,
                         .is_slim = l->is_slim,
                         .has_key_norm = l->has_key_norm};
        memcpy(at, &e, sizeof e);
    }
    for (uint32_t i = 0; i < spec->n_layers; i++)
        for (uint32_t k = 0; k < spec->layers[i].n_kv_heads; k++) {
            const int err = put_head(&spec->layers[i], h++, at);
            if (err) return err;
            at += head_bytes(&spec->layers[i]);
        }
    if (spec->net) memcpy(at, spec->net->params, sizeof spec->net->params);
    header summed = *head;
    memcpy(bytes, &summed, sizeof summed);
    summed.checksum = neap_checksum(bytes, summed.file_bytes);
    memcpy(bytes, &summed, sizeof summed);
    return 0;
}

int neap_learned_write(const char *path, const neap_learned_spec *spec) {
    header head = {.version = VERSION,
                   .n_layers = spec->n_layers,
                   .digest = spec->digest,
                   .has_net = spec->net != NULL};
    int64_t before = -1;
    memcpy(head.magic, magic, sizeof magic);
    memcpy(head.name, spec->name, strnlen(spec->name, sizeof head.name - 1));
    if (spec->n_layers == 0 || spec->n_layers > NEAP_LEARNED_LAYERS) return NEAP_E_BOUND;
    head.file_bytes = HEADER_BYTES + (uint64_t)LAYER_BYTES * spec->n_layers +
                      (spec->net ? sizeof spec->net->params : 0);
    for (uint32_t i = 0; i < spec->n_layers; before = spec->layers[i++].layer) {
        if (!layer_is_good(&spec->layers[i], before)) return NEAP_E_BOUND;
        head.file_bytes += spec->layers[i].n_kv_heads * head_bytes(&spec->layers[i]);
    }
    if (head.file_bytes > FILE_MAX) return NEAP_E_BOUND;
    char *bytes = calloc(1, head.file_bytes);
    if (!bytes) return -ENOMEM;
    int err = put_all(spec, &head, bytes);
    neap_learned *checked = NULL; /* what is refused when it is read is not written */
    if (!err && neap_learned_parse(bytes, head.file_bytes, path, spec->digest, &checked) != 0)
        err = NEAP_E_BOUND;
    neap_learned_free(checked);
    if (!err) err = neap_textfile_replace(path, bytes, head.file_bytes);
    free(bytes);
    return err;
}

/* ---- reading ---- */

static bool halves_are_finite(const char *at, uint64_t n) {
    uint32_t worst = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, at + i * sizeof half, sizeof half);
        worst = (half & 0x7fffu) > worst ? half & 0x7fffu : worst;
    }
    return worst < NEAP_F16_INF;
}

static bool floats_are_finite(const char *at, uint64_t n) {
    float sum = 0, x;
    for (uint64_t i = 0; i < n; i++) {
        memcpy(&x, at + i * sizeof x, sizeof x);
        sum += fabsf(x) > 1e30f ? INFINITY : x * 0; /* NaN stays NaN */
    }
    return sum == 0;
}

static bool deviations_are_good(const char *at, uint64_t n) {
    float x;
    for (uint64_t i = 0; i < n; i++) {
        memcpy(&x, at + i * sizeof x, sizeof x);
        if (!(x >= 1e-20f && x <= 1e20f)) return false;
    }
    return true;
}

static const char *check_heads(const neap_learned_layer *l, const char *at) {
    for (uint32_t h = 0; h < l->n_kv_heads; h++, at += head_bytes(l)) {
        const uint64_t n_floats = norm_bytes(l) / sizeof(float);
        if (!floats_are_finite(at, n_floats) ||
            !deviations_are_good(at + l->dk * sizeof(float), l->dk) ||
            !deviations_are_good(at + (n_floats - 1) * sizeof(float), 1))
            return "means or deviations of a head";
        if (!halves_are_finite(at + norm_bytes(l), (head_bytes(l) - norm_bytes(l)) / 2))
            return "a parameter is not finite";
    }
    return NULL;
}

/* The table of layers, and what it says about the file's length. */
static const char *get_layers(neap_learned *l) {
    uint64_t end = HEADER_BYTES + (uint64_t)LAYER_BYTES * l->head.n_layers;
    int64_t before = -1;
    for (uint32_t i = 0; i < l->head.n_layers; i++) {
        entry e;
        memcpy(&e, l->bytes + HEADER_BYTES + (size_t)i * LAYER_BYTES, sizeof e);
        neap_learned_layer *layer = &l->layers[i];
        *layer = (neap_learned_layer){.layer = e.layer,
                                      .n_kv_heads = e.n_kv_heads,
                                      .dk = e.dk,
                                      .dv = e.dv,
                                      .hidden = e.hidden,
                                      .is_slim = e.is_slim,
                                      .has_key_norm = e.has_key_norm};
        if (e.is_slim > 1 || e.has_key_norm > 1 || e.zero || !layer_is_good(layer, before))
            return "a layer of the table";
        before = e.layer;
        l->begin[i] = end;
        end += layer->n_kv_heads * head_bytes(layer);
        if (end > l->head.file_bytes) return "shorter than its layers";
        const char *wrong = check_heads(layer, l->bytes + l->begin[i]);
        if (wrong) return wrong;
    }
    if (end + (l->head.has_net ? sizeof l->net.params : 0) != l->head.file_bytes)
        return "not as long as its layers";
    if (l->head.has_net && !floats_are_finite(l->bytes + end, NEAP_TOKEN_PARAMS))
        return "a parameter of the network is not finite";
    if (l->head.has_net) memcpy(l->net.params, l->bytes + end, sizeof l->net.params);
    return NULL;
}

static const char *check_header(const header *head, size_t len) {
    if (head->n_layers == 0 || head->n_layers > NEAP_LEARNED_LAYERS ||
        len < HEADER_BYTES + (uint64_t)LAYER_BYTES * head->n_layers)
        return "the number of layers";
    if (head->has_net > 1 || head->zero || head->name[sizeof head->name - 1]) return "the header";
    for (size_t i = 0; i < sizeof head->zeros / sizeof *head->zeros; i++)
        if (head->zeros[i]) return "the header";
    return NULL;
}

static int refuse(neap_learned *l, const char *name, const char *why, int err) {
    if (why) neap_log(NEAP_LOG_ERROR, "%s refused: %s", name, why);
    neap_learned_free(l);
    return err;
}

int neap_learned_parse(const void *bytes, size_t len, const char *name, uint64_t digest,
                       neap_learned **ret_learned) {
    const neap_head_fault fault = neap_head_check(bytes, len, HEADER_BYTES, magic, VERSION);
    if (fault == NEAP_HEAD_MAGIC)
        return refuse(NULL, name, "not a file of learned starts", NEAP_E_CORRUPT);
    if (fault == NEAP_HEAD_VERSION)
        return refuse(NULL, name, "it is of another version of neap", NEAP_E_VERSION);
    if (fault) return refuse(NULL, name, "its length", NEAP_E_CORRUPT);
    const int err = neap_checksum_verify(bytes, len, offsetof(header, checksum));
    if (err) return refuse(NULL, name, err == NEAP_E_CORRUPT ? "the checksum" : NULL, err);
    neap_learned *l = calloc(1, sizeof *l);
    if (!l) return -ENOMEM;
    memcpy(&l->head, bytes, sizeof l->head);
    l->bytes = malloc(len);
    if (!l->bytes) return refuse(l, name, NULL, -ENOMEM);
    memcpy(l->bytes, bytes, len);
    const char *wrong = check_header(&l->head, len);
    if (!wrong) {
        l->layers = calloc(l->head.n_layers, sizeof *l->layers);
        l->begin = calloc(l->head.n_layers, sizeof *l->begin);
        if (!l->layers || !l->begin) return refuse(l, name, NULL, -ENOMEM);
        wrong = get_layers(l);
    }
    if (wrong) return refuse(l, name, wrong, NEAP_E_CORRUPT);
    if (l->head.digest != digest)
        return refuse(l, name, "it was learned from another model", NEAP_E_CHANGED);
    *ret_learned = l;
    return 0;
}

int neap_learned_open(const char *path, uint64_t digest, neap_learned **ret_learned) {
    char *bytes;
    size_t len;
    int err = neap_textfile_read(path, FILE_MAX, &bytes, &len);
    if (err) return err;
    err = neap_learned_parse(bytes, len, path, digest, ret_learned);
    free(bytes);
    return err;
}

void neap_learned_free(neap_learned *learned) {
    if (!learned) return;
    free(learned->bytes);
    free(learned->layers);
    free(learned->begin);
    free(learned);
}

uint32_t neap_learned_n_layers(const neap_learned *learned) {
    return learned->head.n_layers;
}

const neap_learned_layer *neap_learned_layer_at(const neap_learned *learned, uint32_t i) {
    return &learned->layers[i];
}

const neap_learned_layer *neap_learned_find(const neap_learned *learned, uint32_t layer) {
    for (uint32_t i = 0; i < learned->head.n_layers; i++)
        if (learned->layers[i].layer == layer) return &learned->layers[i];
    return NULL;
}

const neap_token_net *neap_learned_net(const neap_learned *learned) {
    return learned->head.has_net ? &learned->net : NULL;
}

static void get_norm(const neap_learned_layer *l, const char *at, neap_value_norm *norm) {
    memcpy(norm->k_mean, at, l->dk * sizeof(float));
    memcpy(norm->k_deviation, at + l->dk * sizeof(float), l->dk * sizeof(float));
    memcpy(norm->v_mean, at + 2 * (size_t)l->dk * sizeof(float), l->dv * sizeof(float));
    memcpy(&norm->v_deviation, at + norm_bytes(l) - sizeof(float), sizeof(float));
}

static void get_halves(const char *at, size_t n, float *values) {
    for (size_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, at + i * sizeof half, sizeof half);
        values[i] = neap_f32_of_f16(half);
    }
}

static void get_start(const neap_learned_layer *l, const char *at, int which,
                      const neap_value_norm *norm, neap_value *io) {
    const size_t n = neap_value_n_params(&io->shape), n_linear = (size_t)l->dk * l->dv;
    at += norm_bytes(l);
    if (which == NEAP_LEARNED_SLIM) {
        get_halves(at, n_linear, io->wlin);
        for (size_t i = 0; i < n_linear; i++)
            io->wlin[i] *= norm->v_deviation / norm->k_deviation[i / l->dv];
        return;
    }
    at += n_linear * sizeof(uint16_t) + (which == NEAP_LEARNED_META) * n * sizeof(uint16_t);
    get_halves(at, n, io->w1);
    neap_value_to_plain(norm, io);
}

int neap_learned_start(const neap_learned *learned, uint32_t layer, uint32_t head, int which,
                       neap_value *io, neap_value_norm *ret_norm) {
    const neap_learned_layer *l = neap_learned_find(learned, layer);
    const neap_value_shape *s = &io->shape;
    if (!l || head >= l->n_kv_heads || which < NEAP_LEARNED_SLIM || which > NEAP_LEARNED_META ||
        s->row != l->dk || s->dk != l->dk || s->d_lin != l->dk || s->dv != l->dv ||
        (which != NEAP_LEARNED_SLIM && s->hidden != l->hidden))
        return NEAP_E_UNKNOWN;
    neap_value_norm norm;
    const int err = neap_value_norm_create(s, &norm);
    if (err) return err;
    const uint64_t begin = learned->begin[l - learned->layers] + head * head_bytes(l);
    get_norm(l, learned->bytes + begin, &norm);
    get_start(l, learned->bytes + begin, which, &norm, io);
    if (ret_norm)
        *ret_norm = norm;
    else
        neap_value_norm_free(&norm);
    return 0;
}
