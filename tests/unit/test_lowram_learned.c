/* test_lowram_learned.c - the file of learned starts: what was written comes back; another model's,
 * another version's, damaged and cut ones are refused. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bytes.h"
#include "check.h"
#include "learned.h"
#include "neap.h"
#include "textfile.h"
#include "value_int.h"

enum { LAYERS = 3, HEADS = 2, DK = 5, DV = 3, HIDDEN = 4, DIGEST = 77, CHECKSUM_AT = 32 };

static neap_learned_layer layers[LAYERS];
static neap_learned_head heads[LAYERS * HEADS];
static neap_token_net net;
static char path[] = "/tmp/neap-learned-XXXXXX";

static void make(neap_learned_spec *spec) {
    for (uint32_t i = 0; i < LAYERS; i++)
        layers[i] = (neap_learned_layer){.layer = 2 * i + 1,
                                         .n_kv_heads = HEADS,
                                         .dk = DK,
                                         .dv = DV + i,
                                         .hidden = i == 1 ? 0 : HIDDEN,
                                         .is_slim = i != 2,
                                         .has_key_norm = i == 2};
    for (uint32_t i = 0; i < LAYERS * HEADS; i++) {
        const neap_learned_layer *l = &layers[i / HEADS];
        const neap_value_shape shape = neap_value_shape_of(l->dk, l->dv, l->hidden);
        neap_learned_head *h = &heads[i];
        CHECK(neap_value_norm_create(&shape, &h->norm) == 0);
        neap_value_normal(i, 3, DK, h->norm.k_mean);
        for (uint32_t c = 0; c < DK; c++)
            h->norm.k_deviation[c] = (float)(c + i + 1);
        h->norm.v_deviation = 0.25f;
        h->linear = malloc((size_t)DK * l->dv * sizeof *h->linear);
        CHECK(h->linear && neap_value_create(&shape, &h->warm) == 0);
        CHECK(neap_value_create(&shape, &h->meta) == 0);
        neap_value_normal(100 + i, 1, (size_t)DK * l->dv, h->linear);
        neap_value_normal(200 + i, 1, neap_value_n_params(&shape), h->warm.w1);
        neap_value_normal(300 + i, 1, neap_value_n_params(&shape), h->meta.w1);
    }
    neap_value_normal(400, 1, NEAP_TOKEN_PARAMS, net.params);
    *spec = (neap_learned_spec){.digest = DIGEST,
                                .name = "a model",
                                .n_layers = LAYERS,
                                .layers = layers,
                                .heads = heads,
                                .net = &net};
}

static bool alike(const float *a, const float *b, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (fabsf(a[i] - b[i]) > 0.02f * (1 + fabsf(b[i]))) return false; /* f16 */
    return true;
}

static void comes_back(void) {
    neap_learned *l;
    CHECK(neap_learned_open(path, DIGEST, &l) == 0);
    CHECK(neap_learned_n_layers(l) == LAYERS && !neap_learned_find(l, 2));
    CHECK(memcmp(neap_learned_net(l), &net, sizeof net) == 0);
    for (uint32_t i = 0; i < LAYERS * HEADS; i++) {
        const neap_learned_layer *layer = neap_learned_find(l, layers[i / HEADS].layer);
        CHECK(layer == neap_learned_layer_at(l, i / HEADS));
        CHECK(layer->dv == layers[i / HEADS].dv && layer->is_slim == (i / HEADS != 2));
        CHECK(layer->has_key_norm == (i / HEADS == 2));
        const neap_value_shape shape = heads[i].warm.shape;
        const size_t n = neap_value_n_params(&shape);
        neap_value value;
        neap_value_norm norm;
        CHECK(neap_value_create(&shape, &value) == 0);
        CHECK(neap_learned_start(l, layer->layer, i % HEADS, NEAP_LEARNED_WARM, &value, &norm) ==
              0);
        CHECK(alike(value.w1, heads[i].warm.w1, n));
        CHECK(memcmp(norm.k_mean, heads[i].norm.k_mean, DK * sizeof(float)) == 0);
        CHECK(memcmp(norm.k_deviation, heads[i].norm.k_deviation, DK * sizeof(float)) == 0);
        CHECK(norm.v_deviation == 0.25f);
        neap_value_norm_free(&norm);
        CHECK(neap_learned_start(l, layer->layer, i % HEADS, NEAP_LEARNED_META, &value, NULL) == 0);
        CHECK(alike(value.w1, heads[i].meta.w1, n));
        CHECK(neap_learned_start(l, layer->layer, i % HEADS, NEAP_LEARNED_SLIM, &value, NULL) == 0);
        CHECK(alike(value.wlin, heads[i].linear, (size_t)DK * shape.dv));
        CHECK(neap_learned_start(l, layer->layer, HEADS, NEAP_LEARNED_WARM, &value, NULL) ==
              NEAP_E_UNKNOWN);
        CHECK(neap_learned_start(l, 2, 0, NEAP_LEARNED_WARM, &value, NULL) == NEAP_E_UNKNOWN);
        value.shape.hidden++;
        CHECK(neap_learned_start(l, layer->layer, 0, NEAP_LEARNED_META, &value, NULL) ==
              NEAP_E_UNKNOWN);
        neap_value_free(&value);
    }
    neap_learned_free(l);
}

static int parse(const uint8_t *bytes, size_t len) {
    neap_learned *l = NULL;
    const int err = neap_learned_parse(bytes, len, "test", DIGEST, &l);
    neap_learned_free(l);
    return err;
}

static void is_refused(void) {
    char *text;
    size_t len;
    neap_learned *l;
    CHECK(neap_textfile_read(path, (size_t)1 << 20, &text, &len) == 0);
    uint8_t *bytes = malloc(len);
    CHECK(bytes && parse((uint8_t *)text, len) == 0);
    for (size_t i = 0; i < len; i++) { /* any bit */
        memcpy(bytes, text, len);
        bytes[i] ^= (uint8_t)(1u << i % 8);
        CHECK(parse(bytes, len) < 0);
        if (i >= CHECKSUM_AT && i < CHECKSUM_AT + 8) continue;
        uint64_t sum = 0; /* with the checksum repaired: never beyond the bytes */
        memcpy(bytes + CHECKSUM_AT, &sum, sizeof sum);
        sum = neap_checksum(bytes, len);
        memcpy(bytes + CHECKSUM_AT, &sum, sizeof sum);
        parse(bytes, len);
    }
    for (size_t cut = 0; cut < len; cut += 1 + cut / 50) {
        uint8_t *part = malloc(cut + 1);
        CHECK(part);
        memcpy(part, text, cut);
        CHECK(parse(part, cut) == NEAP_E_CORRUPT);
        free(part);
    }
    text[8] = 2;
    CHECK(parse((uint8_t *)text, len) == NEAP_E_VERSION);
    free(text);
    free(bytes);
    CHECK(neap_learned_open(path, DIGEST + 1, &l) == NEAP_E_CHANGED);
}

static void is_not_written(neap_learned_spec *spec) {
    heads[1].warm.wlin[0] = 1e9f; /* no f16 */
    CHECK(neap_learned_write(path, spec) == NEAP_E_BOUND);
    heads[1].warm.wlin[0] = NAN;
    CHECK(neap_learned_write(path, spec) == NEAP_E_BOUND);
    heads[1].warm.wlin[0] = 0;
    heads[1].norm.k_mean[0] = INFINITY;
    CHECK(neap_learned_write(path, spec) == NEAP_E_BOUND);
    heads[1].norm.k_mean[0] = 0;
    layers[1].layer = layers[0].layer;
    CHECK(neap_learned_write(path, spec) == NEAP_E_BOUND);
    layers[1].layer++;
    net.params[3] = NAN;
    CHECK(neap_learned_write(path, spec) == NEAP_E_BOUND);
    spec->net = NULL;
    CHECK(neap_learned_write(path, spec) == 0);
}

int main(void) {
    neap_learned_spec spec;
    const int fd = mkstemp(path);
    CHECK(fd >= 0);
    close(fd);
    make(&spec);
    CHECK(neap_learned_write(path, &spec) == 0);
    comes_back();
    is_refused();
    is_not_written(&spec);
    unlink(path);
    for (uint32_t i = 0; i < LAYERS * HEADS; i++) {
        neap_value_norm_free(&heads[i].norm);
        neap_value_free(&heads[i].warm);
        neap_value_free(&heads[i].meta);
        free(heads[i].linear);
    }
    return 0;
}
