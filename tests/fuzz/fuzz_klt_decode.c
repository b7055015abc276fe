/* fuzz_klt_decode.c - the klt decoder on arbitrary bytes, all kernels side by side.
 *
 * Input: 3 bytes choose model, rows, and (bit 0) whether header and checksum are repaired, so that
 * the rest of the decoder is reached; the rest is the encoded chunk. Whatever is accepted decodes
 * alike with every kernel, inside the planes (heap blocks of the exact size, for AddressSanitizer),
 * to finite values but for exact rows. Without libFuzzer: a built-in corpus of good and damaged
 * chunks, after the files named. */
#include "klt_problem.h"
#include "neap.h"
#ifndef NEAP_LIBFUZZER
#include "fuzz_files.h"
#endif

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { CHOICE = 3, HEADER = 32, MODELS = 3 };

static klt_problem problems[MODELS];
static neap_klt_model *models[MODELS];

static void make_models(void) {
    static const klt_shape shapes[MODELS] = {
        {1, 1, 2, 1, 16, 16, NEAP_KLT_ROPE_NEOX, 16, 1, 4.5, 1e-4, 20, true, false},
        {1, 2, 1, 1, 24, 70, NEAP_KLT_ROPE_NORM, 12, 1.5f, 2, 1e-3, 8, false, false},
        {1, 1, 1, 1, 8, 8, NEAP_KLT_ROPE_NONE, 0, 1, 1, 1e-1, 0, false, false}};
    for (int i = 0; i < MODELS && !models[i]; i++) {
        klt_problem_make(&problems[i], &shapes[i], (uint64_t)i + 1);
        models[i] = klt_model_of(&problems[i].spec);
    }
}

static uint32_t rows_of(const uint8_t *choice) {
    return 1 + choice[1] % NEAP_KLT_ROWS;
}

/* What a decoder compares before it reads on. */
static void repair(uint8_t *src, size_t len, const uint8_t *choice) {
    const uint32_t magic = 0x01434b4e, bytes = (uint32_t)len;
    const uint64_t id = neap_klt_model_id(models[choice[0] % MODELS]);
    const uint16_t place[2] = {0, (uint16_t)rows_of(choice)};
    memcpy(src, &magic, sizeof magic);
    memcpy(src + 4, &bytes, sizeof bytes);
    memcpy(src + 16, &id, sizeof id);
    memcpy(src + 24, place, sizeof place);
    const uint64_t sum = neap_checksum(src + 16, len - 16);
    memcpy(src + 8, &sum, sizeof sum);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < CHOICE) return 0;
    make_models();
    const klt_problem *p = &problems[data[0] % MODELS];
    const neap_klt_model *model = models[data[0] % MODELS];
    const size_t len = size - CHOICE;
    uint8_t *src = klt_alloc(len, 1);
    memcpy(src, data + CHOICE, len);
    if ((data[2] & 1) && len >= HEADER) repair(src, len, data);
    neap_klt_chunk first, other;
    klt_chunk_make(p, 0, rows_of(data), 2, &first);
    klt_chunk_make(p, 0, rows_of(data), 2, &other);
    void *scratch = klt_scratch(model);
    const int err = neap_klt_decode_with(neap_klt_kernel_at(0), model, src, len, &first, scratch);
    CHECK(err == 0 || err == NEAP_E_CORRUPT);
    for (size_t k = 1; neap_klt_kernel_at(k); k++) {
        CHECK(neap_klt_decode_with(neap_klt_kernel_at(k), model, src, len, &other, scratch) == err);
        CHECK(err || klt_chunk_equal(p, &first, &other));
    }
    uint16_t n_exact;
    if (err == 0) memcpy(&n_exact, src + 28, sizeof n_exact);
    for (uint32_t r = 0; err == 0 && n_exact == 0 && r < first.n_rows; r++)
        for (neap_klt_head head = {0}; neap_klt_next_head(p->blocks, p->groups, &head);)
            for (uint32_t i = 0; i < head.dim; i++)
                CHECK((klt_head_at(&first, &head, r)[i] & 0x7fff) < NEAP_F16_INF);
    klt_chunk_free(p, &first);
    klt_chunk_free(p, &other);
    free(scratch);
    free(src);
    return 0;
}

#ifndef NEAP_LIBFUZZER
/* A good chunk, then copies cut and flipped. */
static void run_shape(uint8_t which, uint8_t rows) {
    const uint8_t choice[CHOICE] = {which, rows, 1};
    make_models();
    neap_klt_chunk chunk;
    klt_chunk_make(&problems[which], 0, rows_of(choice), 0, &chunk);
    ((int32_t *)(uintptr_t)chunk.positions)[0] = 0;
    klt_chunk_fill(&problems[which], &chunk, NULL);
    const size_t cap = neap_klt_bound(models[which], &chunk);
    size_t len = 0;
    uint8_t *input = klt_alloc(CHOICE + cap, 1), *good = klt_alloc(cap, 1);
    void *scratch = klt_scratch(models[which]);
    CHECK(neap_klt_encode(models[which], &chunk, scratch, good, cap, &len, NULL) == 0);
    memcpy(input, choice, CHOICE);
    memcpy(input + CHOICE, good, len);
    LLVMFuzzerTestOneInput(input, CHOICE + len);
    CHECK(neap_klt_decode(models[which], good, len, &chunk, scratch) == 0);
    for (uint32_t i = 0; i < 60; i++) {
        memcpy(input + CHOICE, good, len);
        const size_t at = i < 8 ? 28 + i / 2 : klt_next((uint32_t)len);
        input[CHOICE + at] ^= (uint8_t)(1u << klt_next(8));
        LLVMFuzzerTestOneInput(input, CHOICE + len);
        LLVMFuzzerTestOneInput(input, CHOICE + klt_next((uint32_t)len));
    }
    free(scratch);
    free(input);
    free(good);
    klt_chunk_free(&problems[which], &chunk);
}

int main(int argc, char **argv) {
    fuzz_files(argc, argv);
    static const uint8_t rows[] = {0, 1, 62, 63, 64, 99, 255};
    for (uint8_t which = 0; which < MODELS; which++)
        for (size_t i = 0; i < sizeof rows; i++)
            run_shape(which, rows[i]);
    for (int i = 0; i < MODELS; i++) {
        neap_klt_model_close(models[i]);
        klt_problem_free(&problems[i]);
    }
    return 0;
}
#endif
