/* test_train_model.c - from captured records to a model file that codes: keys and values of made-up
 * layers with few directions in common, which the wider profile finds and the narrower one cannot.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "capture.h"
#include "check.h"
#include "half.h"
#include "klt.h"
#include "neap.h"
#include "rope.h"
#include "temp.h"
#include "train.h"

enum { N_LAYERS = 5, SMALL = 2, HEADS = 4, KV_HEADS = 2, HEAD = 16, LATENT = 12, ROWS = 900 };
enum { WIDTH = KV_HEADS * HEAD, DIGEST = 77 };

static uint64_t state = 1;

static float normal(void) {
    float sum = -6;
    for (int i = 0; i < 12; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        sum += (float)(state >> 40) * 0x1p-24f;
    }
    return sum;
}

/* ---- a made-up model ---- */

static float mix[N_LAYERS][2][WIDTH][LATENT]; /* of latents that all layers share to K, V */
static neap_klt_rope turns;

static void turn(int32_t position, float *head) {
    float table[HEAD];
    neap_rope_table(&turns, position, table);
    for (int i = 0; i < HEAD / 2; i++) {
        const float c = table[2 * i], s = table[2 * i + 1], x = head[i], y = head[i + HEAD / 2];
        head[i] = x * c - y * s;
        head[i + HEAD / 2] = x * s + y * c;
    }
}

/* One token's K and V of every layer as they lie in the cache. */
static void make_token(int32_t position, uint16_t out[N_LAYERS][2][WIDTH]) {
    float latent[LATENT];
    for (int i = 0; i < LATENT; i++)
        latent[i] = normal() * (float)(LATENT - i);
    for (int l = 0; l < N_LAYERS; l++)
        for (int p = 0; p < 2; p++) {
            float row[WIDTH];
            for (int c = 0; c < WIDTH; c++) {
                row[c] = 3 + 0.02f * normal();
                for (int i = 0; i < LATENT; i++)
                    row[c] += mix[l][p][c][i] * latent[i];
            }
            for (int h = 0; h < KV_HEADS && p == 0; h++)
                turn(position, row + h * HEAD);
            for (int c = 0; c < WIDTH; c++)
                out[l][p][c] = neap_f16_of_f32(row[c]);
        }
}

/* ---- records ---- */

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

static void put_layers(int32_t rope_mode) {
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        const neap_capture_layer layer = {.n_heads = HEADS,
                                          .n_kv_heads = KV_HEADS,
                                          .head_k = HEAD,
                                          .head_v = HEAD,
                                          .n_cells = l == SMALL ? 512 : 16384,
                                          .scale = 0.25f,
                                          .rope_mode = rope_mode,
                                          .rope_dims = HEAD,
                                          .freq_base = 10000,
                                          .freq_scale = 1,
                                          .attn_factor = 1,
                                          .n_grams = HEADS};
        float gram[HEADS][HEAD][HEAD] = {0};
        for (int h = 0; h < HEADS; h++)
            for (int i = 0; i < HEAD; i++)
                gram[h][i][i] = 1 + (float)(i % 3);
        put_head(NEAP_CAPTURE_LAYER, l, sizeof layer + sizeof gram);
        put(&layer, sizeof layer);
        put(gram, sizeof gram);
    }
}

static void put_tokens(int32_t first, uint32_t n) {
    uint16_t(*rows)[N_LAYERS][2][WIDTH] = malloc(n * sizeof *rows);
    neap_capture_tokens tokens = {.n_tokens = n};
    CHECK(rows);
    for (uint32_t i = 0; i < n; i++) {
        make_token(first + (int32_t)i, rows[i]);
        tokens.n_queries += (first + (int32_t)i) % NEAP_CAPTURE_Q_STEP == 0;
    }
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        put_head(NEAP_CAPTURE_TOKENS, l,
                 sizeof tokens + n * (sizeof(int32_t) + 2 * sizeof rows[0][0][0]) +
                     tokens.n_queries * (HEADS * HEAD + 1) * sizeof(float));
        put(&tokens, sizeof tokens);
        for (uint32_t i = 0; i < n; i++) {
            const int32_t position = first + (int32_t)i;
            put(&position, sizeof position);
        }
        for (int p = 0; p < 2; p++)
            for (uint32_t i = 0; i < n; i++)
                put(rows[i][l][p], sizeof rows[i][l][p]);
        for (uint32_t i = 0; i < tokens.n_queries * (HEADS * HEAD + 1); i++) {
            const float value = i < tokens.n_queries * HEADS * HEAD ? normal() : 10;
            put(&value, sizeof value);
        }
    }
    free(rows);
}

/* ---- coding with the result ---- */

/* Energy lost over energy around the mean, on fresh tokens. */
static double lost_by(const char *path, uint32_t n_blocks, double ratio) {
    enum { FIRST = 5000 };
    state = 99; /* the same tokens every time */
    static uint16_t rows[NEAP_KLT_ROWS][N_LAYERS][2][WIDTH],
        back[NEAP_KLT_ROWS][N_LAYERS][2][WIDTH];
    int32_t positions[NEAP_KLT_ROWS];
    neap_klt_model *model = NULL;
    double error = 0, energy = 0;
    CHECK(neap_klt_model_open(path, DIGEST + 1, &model) == NEAP_E_CHANGED);
    CHECK(neap_klt_model_open_at(path, DIGEST, ratio, &model) == 0);
    const neap_klt_spec *spec = neap_klt_model_spec(model);
    CHECK(spec->n_blocks == n_blocks);
    CHECK(neap_klt_model_find(model, SMALL, &(uint32_t){0}) == -1);
    for (int r = 0; r < NEAP_KLT_ROWS; r++) {
        positions[r] = FIRST + r;
        make_token(positions[r], rows[r]);
    }
    memset(back, 0, sizeof back);
    void *scratch = aligned_alloc(64, (neap_klt_scratch_bytes(model) + 63) / 64 * 64);
    size_t raw = 0, coded = 0;
    for (uint32_t b = 0; b < n_blocks; b++) {
        neap_klt_chunk chunk = {.block = b, .n_rows = NEAP_KLT_ROWS, .positions = positions};
        neap_klt_chunk to = chunk;
        for (uint32_t i = 0; i < spec->blocks[b].n_layers; i++) {
            const uint32_t l = spec->blocks[b].layers[i];
            chunk.k[i] = (neap_klt_plane){rows[0][l][0], sizeof rows[0]};
            chunk.v[i] = (neap_klt_plane){rows[0][l][1], sizeof rows[0]};
            to.k[i] = (neap_klt_plane){back[0][l][0], sizeof back[0]};
            to.v[i] = (neap_klt_plane){back[0][l][1], sizeof back[0]};
        }
        const size_t cap = neap_klt_bound(model, &chunk);
        void *bytes = malloc(cap);
        size_t len = 0;
        CHECK(scratch && bytes);
        CHECK(neap_klt_encode(model, &chunk, scratch, bytes, cap, &len, NULL) == 0);
        CHECK(neap_klt_decode(model, bytes, len, &to, scratch) == 0);
        raw += neap_klt_raw_bytes(model, &chunk);
        coded += len;
        free(bytes);
    }
    for (int r = 0; r < NEAP_KLT_ROWS; r++)
        for (int l = 0; l < N_LAYERS; l++)
            for (int p = 0; p < 2 && l != SMALL; p++)
                for (int c = 0; c < WIDTH; c++) {
                    const double was = (double)neap_f32_of_f16(rows[r][l][p][c]);
                    const double is = (double)neap_f32_of_f16(back[r][l][p][c]);
                    error += (is - was) * (is - was);
                    energy += (was - 3) * (was - 3);
                }
    CHECK((double)raw / (double)coded > 0.9 * ratio); /* the chunk's head weighs with such rows */
    free(scratch);
    neap_klt_model_close(model);
    return error / energy;
}

static void ignore(double done) {
    CHECK(done >= 0 && done <= 1);
}

static double train(const neap_trainer *trainer, uint32_t profile, uint32_t n_blocks) {
    char *folder = temp_dir(), path[600];
    const double ratio = 24;
    neap_bases *bases = NULL;
    neap_bases_result result;
    snprintf(path, sizeof path, "%s/klt.bin", folder);
    CHECK(neap_bases_make(trainer, profile, ignore, &bases) == 0);
    CHECK(neap_bases_write(bases, 1000, path, "made-up", DIGEST, &result) == NEAP_E_BOUND);
    CHECK(neap_bases_write(bases, ratio, path, "made-up", DIGEST, &result) == 0);
    CHECK(result.n_blocks == n_blocks && result.n_columns == 4 * 2 * WIDTH);
    CHECK(result.n_kept > 0 && result.n_kept <= result.n_columns);
    const double lost = lost_by(path, n_blocks, ratio);
    /* A file of less is as good at this ratio. */
    CHECK(neap_bases_write(bases, 6, path, "made-up", DIGEST, &(neap_bases_result){0}) == 0);
    const double at = lost_by(path, n_blocks, ratio);
    CHECK(fabs(at / lost - 1) < 0.01);
    neap_bases_free(bases);
    temp_remove(folder);
    printf("profile %u: lost %.5f, expected %.5f\n", profile, lost, result.distortion);
    return lost;
}

static void refusals(void) {
    for (size_t n = 1; n < n_records; n += n < 4096 ? 13 : 9973) {
        neap_trainer *trainer;
        uint8_t *cut = malloc(n);
        CHECK(cut && neap_trainer_create(&trainer) == 0);
        memcpy(cut, records, n);
        const int err = neap_trainer_add(trainer, cut, n); /* whole records are all it may take */
        CHECK(err == 0 || err == NEAP_E_CORRUPT);
        free(cut);
        neap_trainer_free(trainer);
    }
    neap_trainer *trainer;
    neap_bases *bases = NULL;
    CHECK(neap_trainer_create(&trainer) == 0);
    CHECK(neap_bases_make(trainer, NEAP_KLT_PER_HEAD, ignore, &bases) == -ENODATA);
    n_records = 0;
    put_layers(24);
    CHECK(neap_trainer_add(trainer, records, n_records) == -ENOTSUP);
    neap_trainer_free(trainer);
}

int main(void) {
    neap_trainer *trainer;
    const neap_kv_rope rope = {
        .mode = 2, .n_dims = HEAD, .freq_base = 10000, .freq_scale = 1, .attn_factor = 1};
    CHECK(neap_rope_fold(&rope, HEAD, &turns) == 0);
    float *const mixed = &mix[0][0][0][0];
    for (size_t i = 0; i < sizeof mix / sizeof *mixed; i++)
        mixed[i] = normal() / 8;
    CHECK(neap_trainer_create(&trainer) == 0);
    put_layers(2);
    put_tokens(0, 2); /* a warm-up */
    put_tokens(0, 500);
    put_tokens(500, ROWS - 500);
    CHECK(neap_trainer_add(trainer, records, n_records) == 0);
    for (int i = 0; i < 3; i++) {
        n_records = 0;
        put_tokens(0, ROWS);
        CHECK(neap_trainer_add(trainer, records, n_records) == 0);
    }
    const neap_trainer_info info = neap_trainer_tell(trainer);
    CHECK(info.n_layers == N_LAYERS - 1 && info.n_left == 1 && info.has_grams);
    CHECK(info.n_tokens == 4 * 3 * NEAP_KLT_ROWS && info.cell_bytes == 4 * 2 * WIDTH * 2);
    const double joint = train(trainer, NEAP_KLT_FOUR_LAYERS, 1);
    const double layer = train(trainer, NEAP_KLT_ONE_LAYER, 4);
    const double head = train(trainer, NEAP_KLT_PER_HEAD, 4);
    CHECK(joint < 0.001 && joint < layer / 10 && layer < head / 2 && head < 1);
    neap_trainer_free(trainer);
    n_records = 0;
    put_layers(2);
    put_tokens(0, 300);
    refusals();
    free(records);
    return 0;
}
