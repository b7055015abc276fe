/* klt_slot.c - what a klt model does to a real cache: klt_slot MODEL DIGEST SLOT [OUT]
 * Codes and decodes the slot file of llama-server (one context from its beginning on), prints ratio
 * and error as JSON, and writes the slot with what came back to OUT. The layers of the model are
 * the first ones of the file. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "half.h"
#include "klt.h"
#include "kv_file.h"
#include "neap.h"

typedef struct account {
    uint64_t raw, coded;
    double error[2], energy[2]; /* K, V: squares */
} account;

static void add_error(account *sum, uint32_t plane, const uint16_t *was, const uint16_t *is,
                      size_t n) {
    for (size_t i = 0; i < n; i++) {
        const double x = (double)neap_f32_of_f16(was[i]);
        const double e = (double)neap_f32_of_f16(is[i]) - x;
        sum->error[plane] += e * e;
        sum->energy[plane] += x * x;
    }
}

/* Chunk at of a block whose first layer is the file's layer-th. */
static void code(const neap_klt_model *model, uint32_t block, neap_kv_file *file, size_t layer,
                 size_t n_per_layer, size_t at, void *scratch, account *sum) {
    const neap_klt_block *b = &neap_klt_model_spec(model)->blocks[block];
    int32_t positions[NEAP_KLT_ROWS];
    uint16_t *was[2 * NEAP_KLT_LAYERS];
    neap_klt_chunk chunk = {.block = block, .positions = positions};
    for (uint32_t i = 0; i < 2 * b->n_layers; i++) {
        const neap_codec_plane *plane =
            &file->chunks[(layer + i / 2) * n_per_layer + at].planes[i % 2];
        CHECK(plane->type == NEAP_KV_F16 && plane->row_stride == plane->row_bytes);
        (i % 2 ? chunk.v : chunk.k)[i / 2] = (neap_klt_plane){plane->data, plane->row_stride};
        chunk.n_rows = plane->n_rows;
        was[i] = malloc(plane->n_rows * plane->row_bytes);
        CHECK(was[i]);
        memcpy(was[i], plane->data, plane->n_rows * plane->row_bytes);
    }
    for (uint32_t r = 0; r < chunk.n_rows; r++)
        positions[r] = (int32_t)(at * NEAP_KLT_ROWS + r);
    const size_t cap = neap_klt_bound(model, &chunk);
    void *coded = malloc(cap);
    size_t len = 0;
    CHECK(coded);
    CHECK(neap_klt_encode(model, &chunk, scratch, coded, cap, &len, NULL) == 0);
    CHECK(neap_klt_decode(model, coded, len, &chunk, scratch) == 0);
    sum->raw += neap_klt_raw_bytes(model, &chunk);
    sum->coded += len;
    for (uint32_t i = 0; i < 2 * b->n_layers; i++) {
        const neap_codec_plane *plane =
            &file->chunks[(layer + i / 2) * n_per_layer + at].planes[i % 2];
        add_error(sum, i % 2, was[i], plane->data, (size_t)plane->n_rows * plane->row_elems);
        free(was[i]);
    }
    free(coded);
}

int main(int argc, char **argv) {
    neap_klt_model *model = NULL;
    neap_kv_file file = {0};
    account sum = {0};
    CHECK(argc >= 4);
    CHECK(neap_klt_model_open(argv[1], strtoull(argv[2], NULL, 16), &model) == 0);
    CHECK(neap_kv_file_load(argv[3], &file) == 0);
    size_t n_per_layer = 0;
    uint64_t rows = 0;
    do /* a layer ends with a chunk that is not full, or where the token count is reached */
        rows = file.chunks[n_per_layer++].planes[0].n_rows;
    while (rows == NEAP_KLT_ROWS && n_per_layer < file.n_chunks);
    void *scratch = aligned_alloc(64, (neap_klt_scratch_bytes(model) + 63) / 64 * 64);
    CHECK(scratch);
    const neap_klt_spec *spec = neap_klt_model_spec(model);
    size_t layer = 0;
    for (uint32_t block = 0; block < spec->n_blocks; block++) {
        for (size_t at = 0; at < n_per_layer; at++)
            code(model, block, &file, layer, n_per_layer, at, scratch, &sum);
        layer += spec->blocks[block].n_layers;
    }
    printf("{\"ratio\": %.4f, \"k_error\": %.6f, \"v_error\": %.6f, \"layers\": %zu}\n",
           (double)sum.raw / (double)sum.coded, sum.error[0] / sum.energy[0],
           sum.error[1] / sum.energy[1], layer);
    if (argc > 4) {
        FILE *out = fopen(argv[4], "wb");
        CHECK(out && fwrite(file.bytes, 1, file.n_bytes, out) == file.n_bytes);
        CHECK(fclose(out) == 0);
    }
    free(scratch);
    neap_kv_file_free(&file);
    neap_klt_model_close(model);
    return 0;
}
