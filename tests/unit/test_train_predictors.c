/* test_train_predictors.c - from captured records to the file of learned starts. Of two made-up
 * layers one has values that are a linear map of its keys, which its weights tell; the other, with
 * a norm before its keys, has values that no linear map of them explains. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "capture.h"
#include "check.h"
#include "half.h"
#include "learned.h"
#include "neap.h"
#include "predictors.h"
#include "rope.h"
#include "temp.h"
#include "value_int.h"

enum { N_LAYERS = 2, HEADS = 4, KV_HEADS = 2, HEAD = 8, INPUTS = 24, ROWS = 640, CONTEXTS = 4 };
enum { WIDTH = KV_HEADS * HEAD, DIGEST = 77 };

static uint64_t state = 1;
static float w_k[N_LAYERS][WIDTH][INPUTS], w_v[N_LAYERS][WIDTH][INPUTS], map[HEAD][HEAD];
static neap_klt_rope turns;

static float normal(void) {
    float x;
    neap_value_normal(state++, 1, 1, &x);
    return x;
}

static uint8_t *records;
static size_t n_records, cap_records;

static void put(const void *data, size_t n) {
    if (n_records + n > cap_records) {
        cap_records = 2 * (n_records + n);
        records = realloc(records, cap_records);
        CHECK(records);
    }
    memcpy(records + n_records, data, n);
    n_records += n;
}

static void put_head(uint32_t kind, uint32_t layer, size_t n_bytes) {
    const neap_capture_head head = {.kind = kind, .layer = layer, .n_bytes = n_bytes};
    put(&head, sizeof head);
}

static void put_layers(void) {
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        const neap_capture_layer layer = {.n_heads = HEADS,
                                          .n_kv_heads = KV_HEADS,
                                          .head_k = HEAD,
                                          .head_v = HEAD,
                                          .n_cells = 16384,
                                          .scale = 0.3f,
                                          .rope_mode = 2,
                                          .rope_dims = HEAD,
                                          .freq_base = 10000,
                                          .freq_scale = 1,
                                          .attn_factor = 1};
        const neap_capture_projections projections = {.n_inputs = INPUTS, .has_key_norm = l == 1};
        put_head(NEAP_CAPTURE_LAYER, l, sizeof layer);
        put(&layer, sizeof layer);
        put_head(NEAP_CAPTURE_PROJECTIONS, l, sizeof projections + 2 * sizeof w_k[l]);
        put(&projections, sizeof projections);
        put(w_k[l], sizeof w_k[l]);
        put(w_v[l], sizeof w_v[l]);
    }
}

/* Keys before RoPE and values of a token. */
static void make_token(uint32_t l, float k[WIDTH], float v[WIDTH]) {
    float x[INPUTS];
    for (int i = 0; i < INPUTS; i++)
        x[i] = normal();
    for (int c = 0; c < WIDTH; c++) {
        k[c] = 2; /* a bias */
        for (int i = 0; i < INPUTS; i++)
            k[c] += w_k[l][c][i] * x[i];
    }
    for (int c = 0; c < WIDTH; c++) {
        v[c] = -1;
        for (int i = 0; i < INPUTS && l == 0; i++)
            v[c] += w_v[l][c][i] * x[i];
        if (l == 1) v[c] = fabsf(k[c] - 2) + 0.2f * fabsf(k[c / HEAD * HEAD] - 2.5f);
    }
}

static void put_context(void) {
    static uint16_t rows[2][ROWS][WIDTH];
    neap_capture_tokens tokens = {.n_tokens = ROWS, .n_queries = ROWS / NEAP_CAPTURE_Q_STEP};
    const size_t n_floats = tokens.n_queries * (HEADS * HEAD + 1);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        for (int32_t r = 0; r < ROWS; r++) {
            float k[WIDTH], v[WIDTH], table[HEAD];
            make_token(l, k, v);
            neap_rope_table(&turns, r, table);
            for (int h = 0; h < KV_HEADS; h++)
                for (int i = 0; i < HEAD / 2; i++) {
                    float *a = &k[h * HEAD + i], *b = a + HEAD / 2, x = *a, y = *b;
                    *a = x * table[2 * i] - y * table[2 * i + 1];
                    *b = x * table[2 * i + 1] + y * table[2 * i];
                }
            for (int c = 0; c < WIDTH; c++) {
                rows[0][r][c] = neap_f16_of_f32(k[c]);
                rows[1][r][c] = neap_f16_of_f32(v[c]);
            }
        }
        put_head(NEAP_CAPTURE_TOKENS, l,
                 sizeof tokens + ROWS * sizeof(int32_t) + sizeof rows + n_floats * sizeof(float));
        put(&tokens, sizeof tokens);
        for (int32_t r = 0; r < ROWS; r++)
            put(&r, sizeof r);
        put(rows, sizeof rows);
        for (size_t i = 0; i < n_floats; i++) {
            const float value = i < n_floats - tokens.n_queries ? normal() : 10;
            put(&value, sizeof value);
        }
    }
}

static void ignore(double done) {
    CHECK(done >= 0 && done <= 1);
}

/* What a start explains of fresh tokens. */
static double explained_by(const neap_learned *learned, uint32_t l, uint32_t head, int which) {
    static float keys[ROWS * HEAD], values[ROWS * HEAD];
    for (size_t r = 0; r < ROWS; r++) {
        float k[WIDTH], v[WIDTH];
        make_token(l, k, v);
        memcpy(keys + r * HEAD, k + head * HEAD, HEAD * sizeof *keys);
        memcpy(values + r * HEAD, v + head * HEAD, HEAD * sizeof *values);
    }
    const neap_value_shape shape = neap_value_shape_of(HEAD, HEAD, HEAD);
    neap_value value;
    double explained;
    CHECK(neap_value_create(&shape, &value) == 0);
    CHECK(neap_learned_start(learned, l, head, which, &value, NULL) == 0);
    if (which == NEAP_LEARNED_SLIM) { /* the means are the context's */
        float predicted[ROWS * HEAD], mean[HEAD] = {0};
        neap_value_predict(&value, keys, ROWS, predicted);
        for (size_t i = 0; i < ROWS * HEAD; i++)
            mean[i % HEAD] += (values[i] - predicted[i]) / ROWS;
        memcpy(value.b2, mean, sizeof mean);
    }
    CHECK(neap_value_explained(&value, keys, values, ROWS, &explained) == 0);
    neap_value_free(&value);
    return explained;
}

static void learns(void) {
    char *folder = temp_dir(), path[600];
    neap_trainer *trainer;
    neap_predictors *predictors;
    neap_predictors_result r;
    neap_learned *learned;
    snprintf(path, sizeof path, "%s/%s", folder, NEAP_LEARNED_FILE);
    CHECK(neap_trainer_create(&trainer) == 0 && neap_predictors_create(&predictors) == 0);
    CHECK(neap_predictors_write(predictors, path, "made-up", DIGEST, ignore, &r) == -ENODATA);
    for (int i = 0; i < CONTEXTS; i++) {
        n_records = 0;
        if (i == 0) put_layers();
        put_context();
        CHECK(neap_trainer_add(trainer, records, n_records) == 0);
        CHECK(neap_predictors_add(predictors, trainer) == 0);
    }
    CHECK(neap_predictors_write(predictors, path, "made-up", DIGEST, ignore, &r) == 0);
    CHECK(r.n_layers == N_LAYERS && r.n_heads == N_LAYERS * KV_HEADS && r.n_slim == 1);
    CHECK(r.n_key_norms == 1 && r.n_tokens == CONTEXTS * (ROWS - NEAP_KLT_FIRST_EXACT));
    CHECK(r.net_error > 0 && r.untrained_error > 0 && r.net_error < r.untrained_error);
    CHECK(neap_learned_open(path, DIGEST, &learned) == 0);
    CHECK(neap_learned_layer_at(learned, 0)->is_slim &&
          !neap_learned_layer_at(learned, 1)->is_slim);
    CHECK(neap_learned_layer_at(learned, 1)->has_key_norm && neap_learned_net(learned));
    for (uint32_t h = 0; h < KV_HEADS; h++) {
        CHECK(explained_by(learned, 0, h, NEAP_LEARNED_SLIM) > 0.99);
        CHECK(explained_by(learned, 0, h, NEAP_LEARNED_WARM) > 0.99);
        const double linear = explained_by(learned, 1, h, NEAP_LEARNED_SLIM);
        const double warm = explained_by(learned, 1, h, NEAP_LEARNED_WARM);
        const double meta = explained_by(learned, 1, h, NEAP_LEARNED_META);
        printf("head %u: linear %.3f, warm %.3f, meta %.3f\n", h, linear, warm, meta);
        CHECK(linear < 0.3 && warm > linear + 0.3 && meta > linear + 0.3);
    }
    /* What the bench fits is the same as was learned from. */
    CHECK(neap_context_tokens(trainer) == ROWS - NEAP_KLT_FIRST_EXACT);
    const neap_context_layer shown = neap_context_layer_at(trainer, 0);
    CHECK(shown.layer == 0 && shown.n_kv_heads == KV_HEADS && shown.dk == HEAD && shown.dv == HEAD);
    static float keys[ROWS * HEAD], values[ROWS * HEAD];
    neap_value value;
    double explained;
    const neap_value_shape shape = neap_value_shape_of(HEAD, HEAD, 0);
    const neap_value_options options = neap_value_defaults(NEAP_VALUE_RIDGE);
    neap_context_head(trainer, 0, 1, keys, values);
    CHECK(neap_value_create(&shape, &value) == 0);
    CHECK(neap_value_fit(keys, values, neap_context_tokens(trainer), &options, &value) == 0);
    CHECK(neap_value_explained(&value, keys, values, neap_context_tokens(trainer), &explained) ==
          0);
    CHECK(explained > 0.99);
    neap_value_free(&value);
    neap_learned_free(learned);
    neap_predictors_free(predictors);
    neap_trainer_free(trainer);
    temp_remove(folder);
}

static void refusals(void) {
    n_records = 0;
    put_layers();
    for (size_t n = 1; n < n_records; n += 7) {
        neap_trainer *trainer;
        uint8_t *cut = malloc(n);
        CHECK(cut && neap_trainer_create(&trainer) == 0);
        memcpy(cut, records, n);
        const int err = neap_trainer_add(trainer, cut, n); /* whole records are all it may take */
        CHECK(err == 0 || err == NEAP_E_CORRUPT);
        free(cut);
        neap_trainer_free(trainer);
    }
}

int main(void) {
    const neap_kv_rope rope = {
        .mode = 2, .n_dims = HEAD, .freq_base = 10000, .freq_scale = 1, .attn_factor = 1};
    CHECK(neap_rope_fold(&rope, HEAD, &turns) == 0);
    neap_value_normal(1000, 0.3f, sizeof w_k / sizeof(float), &w_k[0][0][0]);
    neap_value_normal(1001, 0.5f, HEAD * HEAD, &map[0][0]);
    for (int l = 0; l < N_LAYERS; l++)
        for (int h = 0; h < KV_HEADS; h++)
            for (int i = 0; i < INPUTS; i++)
                for (int j = 0; j < HEAD; j++)
                    for (int c = 0; c < HEAD; c++)
                        w_v[l][h * HEAD + j][i] += map[c][j] * w_k[l][h * HEAD + c][i];
    learns();
    refusals();
    free(records);
    return 0;
}
