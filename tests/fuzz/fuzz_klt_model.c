/* fuzz_klt_model.c - the reader of klt models on arbitrary bytes.
 *
 * Input: 1 byte (bit 0: whether header, directory and their checksums are repaired, so that the
 * values themselves are reached), then the file. Whatever is accepted codes and decodes a chunk of
 * its first block, with every kernel alike. Without libFuzzer: a built-in corpus of good and
 * damaged files, after the files named. */
#include "klt_problem.h"
#include "neap.h"
#ifndef NEAP_LIBFUZZER
#include "fuzz_files.h"
#endif

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { HEADER = 128, ENTRY = 32, ROWS = 70 };

static void no_log(int level, const char *line, void *ctx) {
    (void)level, (void)line, (void)ctx;
}

/* Checksums of the sections that lie in the file, then the id. */
static void repair(uint8_t *bytes, size_t len) {
    uint32_t n;
    const uint64_t file_bytes = len, digest = KLT_DIGEST, none = 0;
    memcpy(bytes, "NEAPKLT\0\2\0\0", 12);
    memcpy(bytes + 16, &file_bytes, sizeof file_bytes);
    memcpy(bytes + 24, &digest, sizeof digest);
    memcpy(&n, bytes + 48, sizeof n);
    if (n > (len - HEADER) / ENTRY) return;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t fields[2];
        uint8_t *entry = bytes + HEADER + (size_t)i * ENTRY;
        memcpy(fields, entry + 8, sizeof fields);
        if (fields[0] > len || fields[1] > len - fields[0]) continue;
        const uint64_t sum = neap_checksum(bytes + fields[0], fields[1]);
        memcpy(entry + 24, &sum, sizeof sum);
    }
    memcpy(bytes + 56, &none, sizeof none);
    const uint64_t id = neap_checksum(bytes, HEADER + (size_t)n * ENTRY);
    memcpy(bytes + 56, &id, sizeof id);
}

/* Rows of any finite bits; one is not. */
static void use(neap_klt_model *model) {
    const neap_klt_spec *spec = neap_klt_model_spec(model);
    const neap_klt_block *block = &spec->blocks[0];
    klt_problem p = {.shape = {.n_layers = block->n_layers,
                               .n_heads = block->n_kv_heads,
                               .k_dim = block->k_head_dim,
                               .v_dim = block->v_head_dim}};
    neap_klt_chunk was, is, other;
    klt_chunk_make(&p, 0, ROWS, 0, &was);
    klt_chunk_make(&p, 0, ROWS, 0, &is);
    klt_chunk_make(&p, 0, ROWS, 0, &other);
    klt_state = 1;
    for (uint32_t l = 0; l < block->n_layers; l++) {
        uint16_t *k = was.k[l].data, *v = was.v[l].data;
        for (uint32_t i = 0; i < ROWS * block->n_kv_heads * block->k_head_dim; i++)
            k[i] = (uint16_t)(klt_next(1 << 16) & 0xbbff);
        for (uint32_t i = 0; i < ROWS * block->n_kv_heads * block->v_head_dim; i++)
            v[i] = (uint16_t)(klt_next(1 << 16) & 0xbbff);
    }
    ((uint16_t *)was.k[0].data)[0] = 0x7c00;
    const size_t cap = neap_klt_bound(model, &was);
    size_t len = 0, again_len = 0;
    uint8_t *coded = klt_alloc(cap, 1), *again = klt_alloc(cap, 1);
    void *scratch = klt_scratch(model);
    const neap_klt_kernel *kernel = neap_klt_kernel_at(0);
    CHECK(neap_klt_encode_with(kernel, model, &was, scratch, coded, cap, &len, NULL) == 0);
    CHECK(neap_klt_decode_with(kernel, model, coded, len, &is, scratch) == 0);
    for (size_t k = 1; (kernel = neap_klt_kernel_at(k)) != NULL; k++) {
        CHECK(neap_klt_encode_with(kernel, model, &was, scratch, again, cap, &again_len, NULL) ==
              0);
        CHECK(again_len == len && memcmp(again, coded, len) == 0);
        CHECK(neap_klt_decode_with(kernel, model, coded, len, &other, scratch) == 0);
        CHECK(klt_chunk_equal(&p, &is, &other));
    }
    free(scratch);
    free(coded);
    free(again);
    klt_chunk_free(&p, &was);
    klt_chunk_free(&p, &is);
    klt_chunk_free(&p, &other);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 1) return 0;
    const size_t len = size - 1;
    uint8_t *bytes = klt_alloc(len, 1);
    memcpy(bytes, data + 1, len);
    if ((data[0] & 1) && len >= HEADER) repair(bytes, len);
    neap_klt_model *model = NULL;
    neap_set_log(no_log, NULL);
    const int err = neap_klt_model_parse(bytes, len, KLT_DIGEST, "fuzz", &model);
    CHECK(err == 0 || err == NEAP_E_CORRUPT || err == NEAP_E_VERSION || err == NEAP_E_CHANGED);
    free(bytes);
    if (!err) use(model);
    neap_klt_model_close(model);
    return 0;
}

#ifndef NEAP_LIBFUZZER
static void run_shape(const klt_shape *shape) {
    klt_problem p;
    uint8_t *bytes = NULL;
    size_t built = 0;
    klt_problem_make(&p, shape, 9);
    CHECK(neap_klt_model_build(&p.spec, "fuzz", &bytes, &built) == 0);
    const size_t len = built;
    CHECK(len > 4000 && len < 1 << 20);
    uint8_t *input = klt_alloc(1 + len, 1);
    input[0] = 1;
    memcpy(input + 1, bytes, len);
    LLVMFuzzerTestOneInput(input, 1 + len);
    /* Mostly the small sections: what comes before the matrices. */
    for (uint32_t i = 0; i < 1500; i++) {
        memcpy(input + 1, bytes, len);
        const size_t most = i % 4 ? 128 + 32 * (4 + p.spec.n_groups * 4) : len;
        input[1 + klt_next((uint32_t)(most < len ? most : len))] ^= (uint8_t)(1u << klt_next(8));
        if (i % 3 == 0) /* after the tables and the RoPE table: blocks, groups, components */
            input[len - klt_next(4000)] ^= (uint8_t)(1u << klt_next(8));
        LLVMFuzzerTestOneInput(input, 1 + len);
    }
    for (uint32_t i = 0; i < 200; i++)
        LLVMFuzzerTestOneInput(input, 1 + klt_next((uint32_t)len));
    free(input);
    free(bytes);
    klt_problem_free(&p);
}

int main(int argc, char **argv) {
    fuzz_files(argc, argv);
    run_shape(&(klt_shape){2, 1, 2, 1, 8, 8, NEAP_KLT_ROPE_NEOX, 8, 1, 3, 1e-3, 20, true, false});
    run_shape(&(klt_shape){1, 2, 2, 1, 8, 8, NEAP_KLT_ROPE_NEOX, 8, 1, 2, 1e-3, 20, true, true});
    run_shape(
        &(klt_shape){1, 2, 1, 1, 6, 10, NEAP_KLT_ROPE_NORM, 4, 1.5f, 2, 1e-2, 8, false, false});
    return 0;
}
#endif
