/* fuzz_lowram_fit.c - the reader of LowRAM's fits on arbitrary bytes.
 *
 * Input: 1 byte (bit 0: whether header and checksum are repaired, so that the groups are reached),
 * then the fit. Whatever is accepted codes and decodes a chunk of its first group. Without
 * libFuzzer: a built-in corpus of good and damaged fits, after the files named. */
#include "lowram_problem.h"
#include "neap.h"
#ifndef NEAP_LIBFUZZER
#include "fuzz_files.h"
#endif

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { ROWS = 40 };

static void no_log(int level, const char *line, void *ctx) {
    (void)level, (void)line, (void)ctx;
}

static void repair(uint8_t *bytes, size_t len) {
    const uint64_t file_bytes = len, none = 0;
    memcpy(bytes, "NEAPLRK\0\1\0\0\0", 12);
    memcpy(bytes + 16, &file_bytes, sizeof file_bytes);
    memcpy(bytes + 24, &none, sizeof none);
    const uint64_t id = neap_checksum(bytes, len);
    memcpy(bytes + 24, &id, sizeof id);
}

/* Rows of any finite bits; one is not. */
static void use(const neap_lowram *fit) {
    const neap_lowram_group *group = neap_lowram_group_at(fit, 0);
    const lowram_problem p = {.shape = {.n_heads = group->n_kv_heads,
                                        .k_dim = group->k_head_dim,
                                        .v_dim = group->v_head_dim}};
    int32_t positions[ROWS];
    for (int32_t r = 0; r < ROWS; r++)
        positions[r] = 3 * r - 5;
    const neap_lowram_chunk shape = {.n_rows = ROWS, .positions = positions};
    neap_lowram_chunk was = lowram_chunk_like(&p, &shape, group->n_layers),
                      is = lowram_chunk_like(&p, &shape, group->n_layers);
    lowram_state = 1;
    for (uint32_t l = 0; l < group->n_layers; l++)
        for (uint32_t r = 0; r < ROWS; r++) {
            for (uint32_t i = 0; i < group->n_kv_heads * group->k_head_dim; i++)
                lowram_row(&was.k[l], r)[i] = (uint16_t)(lowram_next(1 << 16) & 0xbbff);
            for (uint32_t i = 0; i < group->n_kv_heads * group->v_head_dim; i++)
                lowram_row(&was.v[l], r)[i] = (uint16_t)(lowram_next(1 << 16) & 0xbbff);
        }
    lowram_row(&was.k[0], 20)[0] = 0x7c00;
    const size_t cap = neap_lowram_bound(fit, 0, ROWS);
    size_t len = 0;
    uint8_t *coded = lowram_alloc(cap, 1);
    void *scratch = lowram_scratch(fit);
    CHECK(neap_lowram_encode(fit, &was, scratch, coded, cap, &len, NULL) == 0 && len <= cap);
    CHECK(neap_lowram_decode(fit, coded, len, &is, scratch) == 0);
    free(scratch);
    free(coded);
    lowram_chunk_free(&was, group->n_layers);
    lowram_chunk_free(&is, group->n_layers);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 1) return 0;
    const size_t len = size - 1;
    uint8_t *bytes = lowram_alloc(len, 1);
    memcpy(bytes, data + 1, len);
    if ((data[0] & 1) && len >= NEAP_LOWRAM_FILE_HEADER) repair(bytes, len);
    neap_lowram *fit = NULL;
    neap_set_log(no_log, NULL);
    const int err = neap_lowram_open(bytes, len, &fit);
    CHECK(err == 0 || err == NEAP_E_CORRUPT || err == NEAP_E_VERSION);
    free(bytes);
    if (!err) use(fit);
    neap_lowram_free(fit);
    return 0;
}

#ifndef NEAP_LIBFUZZER
static void run_shape(const lowram_shape *shape, const neap_lowram_options *options) {
    lowram_problem p;
    neap_lowram *fit = NULL;
    size_t made;
    lowram_problem_make(&p, shape, 9);
    CHECK(neap_lowram_fit(options, p.layers, shape->n_layers, &p.context, &fit) == 0);
    const void *bytes = neap_lowram_bytes(fit, &made);
    const size_t len = made;
    CHECK(len > 300 && len < 1 << 20);
    uint8_t *input = lowram_alloc(1 + len, 1);
    input[0] = 1;
    memcpy(input + 1, bytes, len);
    LLVMFuzzerTestOneInput(input, 1 + len);
    for (uint32_t i = 0; i < 1200; i++) {
        memcpy(input + 1, bytes, len);
        /* Mostly what comes before the arrays. */
        const uint32_t most = i % 4 ? 32 + 104 + 40 : (uint32_t)len;
        input[1 + lowram_next(most < len ? most : (uint32_t)len)] ^=
            (uint8_t)(1u << lowram_next(8));
        if (i % 3 == 0) input[1 + lowram_next((uint32_t)len)] = (uint8_t)lowram_next(256);
        LLVMFuzzerTestOneInput(input, 1 + len);
    }
    for (uint32_t i = 0; i < 200; i++)
        LLVMFuzzerTestOneInput(input, 1 + lowram_next((uint32_t)len));
    free(input);
    neap_lowram_free(fit);
    lowram_problem_free(&p);
}

int main(int argc, char **argv) {
    neap_lowram_options options;
    fuzz_files(argc, argv);
    neap_lowram_defaults(&options, 2);
    options.rank = 5;
    options.residual_share = 0.2;
    run_shape(&(lowram_shape){5, 1, 8, 6, 300, 4, NEAP_KLT_ROPE_NEOX, 8, 0.05f}, &options);
    options.shared_predictor = true;
    options.b_bits = 3;
    options.hidden_factor = 0;
    run_shape(&(lowram_shape){1, 2, 6, 10, 300, 4, NEAP_KLT_ROPE_NORM, 4, 0.05f}, &options);
    return 0;
}
#endif
