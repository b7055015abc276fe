/* fuzz_lowram_decode.c - the decoder of LowRAM's chunks on arbitrary bytes.
 *
 * Input: 3 bytes choose fit, rows, and (bit 0) whether header and checksum are repaired, so that
 * the rest of the decoder is reached; the rest is the encoded chunk. What is accepted decodes
 * inside the planes (heap blocks of the exact size, for AddressSanitizer), to finite values but for
 * exact rows, and alike where only V or a part is asked for. Without libFuzzer: a built-in corpus
 * of good and damaged chunks, after the files named. */
#include "lowram_problem.h"
#include "neap.h"
#ifndef NEAP_LIBFUZZER
#include "fuzz_files.h"
#endif

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { CHOICE = 3, FITS = 3 };

static lowram_problem problems[FITS];
static neap_lowram *fits[FITS];

static void make_fits(void) {
    static const lowram_shape shapes[FITS] = {{2, 2, 8, 12, 300, 4, NEAP_KLT_ROPE_NEOX, 8, 0.05f},
                                              {1, 1, 10, 6, 270, 4, NEAP_KLT_ROPE_NORM, 4, 0.05f},
                                              {3, 1, 4, 4, 260, 2, NEAP_KLT_ROPE_NONE, 0, 0.05f}};
    for (int i = 0; i < FITS && !fits[i]; i++) {
        neap_lowram_options options;
        neap_lowram_defaults(&options, 2);
        options.rank = 4;
        options.residual_share = 0.3;
        options.source = i;
        options.a_bits = i == 2 ? NEAP_LOWRAM_F16 : 3 + (uint32_t)i;
        options.residual_bits = i == 1 ? NEAP_LOWRAM_F16 : 2;
        lowram_problem_make(&problems[i], &shapes[i], (uint64_t)i + 1);
        CHECK(neap_lowram_fit(&options, problems[i].layers, shapes[i].n_layers,
                              &problems[i].context, &fits[i]) == 0);
    }
}

static uint32_t rows_of(const uint8_t *choice) {
    return 1 + choice[1] % NEAP_LOWRAM_ROWS;
}

/* What a decoder compares before it reads on. */
static void repair(uint8_t *src, size_t len, const uint8_t *choice) {
    const uint32_t bytes = (uint32_t)len;
    const uint64_t id = neap_lowram_id(fits[choice[0] % FITS]);
    const uint16_t place[2] = {0, (uint16_t)rows_of(choice)};
    memcpy(src, "NLC\1", 4);
    memcpy(src + 4, &bytes, sizeof bytes);
    memcpy(src + 16, &id, sizeof id);
    memcpy(src + 24, place, sizeof place);
    memset(src + 30, 0, 2);
    const uint64_t sum = neap_checksum(src + 16, len - 16);
    memcpy(src + 8, &sum, sizeof sum);
}

static bool is_finite(const neap_klt_plane *plane, uint32_t n_rows, uint32_t row_elems) {
    for (uint32_t r = 0; r < n_rows; r++)
        for (uint32_t i = 0; i < row_elems; i++)
            if ((lowram_row(plane, r)[i] & 0x7fff) >= NEAP_F16_INF) return false;
    return true;
}

/* A part of what decodes to whole (err: or does not); is: room. */
static void check_part(const lowram_problem *p, const neap_lowram *fit, const uint8_t *src,
                       size_t len, const neap_klt_part *part, int err,
                       const neap_lowram_chunk *whole, const neap_lowram_chunk *is, void *scratch) {
    const int part_err = neap_lowram_decode_part(fit, src, len, is, part, scratch);
    CHECK(part_err == 0 || (err && part_err == NEAP_E_CORRUPT));
    const size_t head_bytes = 2 * (size_t)p->shape.k_dim;
    for (uint32_t l = 0; err == 0 && l < p->shape.n_layers; l++)
        for (uint32_t r = 0; r < part->n_rows; r++)
            CHECK(memcmp((char *)lowram_row(&is->k[l], r) + part->first_head * head_bytes,
                         (char *)lowram_row(&whole->k[l], part->first_row + r) +
                             part->first_head * head_bytes,
                         part->n_heads * head_bytes) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < CHOICE) return 0;
    make_fits();
    const lowram_problem *p = &problems[data[0] % FITS];
    const neap_lowram *fit = fits[data[0] % FITS];
    const uint32_t n_layers = p->shape.n_layers, v_row = p->shape.n_heads * p->shape.v_dim;
    const size_t len = size - CHOICE;
    uint8_t *src = lowram_alloc(len, 1);
    memcpy(src, data + CHOICE, len);
    if ((data[2] & 1) && len >= NEAP_LOWRAM_CHUNK_HEADER) repair(src, len, data);
    neap_lowram_chunk shape = lowram_chunk_at(p, 0, 0, n_layers, 0);
    shape.n_rows = rows_of(data);
    neap_lowram_chunk is = lowram_chunk_like(p, &shape, n_layers),
                      only_v = lowram_chunk_like(p, &shape, n_layers);
    neap_lowram_chunk view = only_v;
    for (uint32_t l = 0; l < n_layers; l++)
        view.k[l].data = NULL;
    void *scratch = lowram_scratch(fit);
    const int err = neap_lowram_decode(fit, src, len, &is, scratch);
    CHECK(err == 0 || err == NEAP_E_CORRUPT);
    CHECK(neap_lowram_decode(fit, src, len, &view, scratch) == err || err);
    uint16_t n_exact;
    if (err == 0) memcpy(&n_exact, src + 28, sizeof n_exact);
    for (uint32_t l = 0; err == 0 && l < n_layers; l++) {
        CHECK(lowram_rows_equal(&is.v[l], &only_v.v[l], shape.n_rows, v_row));
        CHECK(n_exact > 0 ||
              (is_finite(&is.v[l], shape.n_rows, v_row) &&
               is_finite(&is.k[l], shape.n_rows, p->shape.n_heads * p->shape.k_dim)));
    }
    const uint32_t row = data[1] * 37u % shape.n_rows, left = shape.n_rows - row;
    const neap_klt_part part = {.first_row = row,
                                .n_rows = left < 8 ? left : 8,
                                .first_head = data[1] % p->shape.n_heads,
                                .n_heads = 1};
    check_part(p, fit, src, len, &part, err, &is, &only_v, scratch);
    lowram_chunk_free(&is, n_layers);
    lowram_chunk_free(&only_v, n_layers);
    free(scratch);
    free(src);
    return 0;
}

#ifndef NEAP_LIBFUZZER
/* A good chunk, then copies cut and flipped. */
static void run_fit(uint8_t which, uint8_t rows) {
    const uint8_t choice[CHOICE] = {which, rows, 1};
    make_fits();
    const lowram_problem *p = &problems[which];
    neap_lowram_chunk chunk = lowram_chunk_at(p, 0, 0, p->shape.n_layers, 0);
    chunk.n_rows = rows_of(choice);
    const size_t cap = neap_lowram_bound(fits[which], 0, chunk.n_rows);
    size_t len = 0;
    uint8_t *input = lowram_alloc(CHOICE + cap, 1), *good = lowram_alloc(cap, 1);
    void *scratch = lowram_scratch(fits[which]);
    CHECK(neap_lowram_encode(fits[which], &chunk, scratch, good, cap, &len, NULL) == 0);
    memcpy(input, choice, CHOICE);
    memcpy(input + CHOICE, good, len);
    LLVMFuzzerTestOneInput(input, CHOICE + len);
    for (uint32_t i = 0; i < 150; i++) {
        memcpy(input + CHOICE, good, len);
        const size_t at = i < 16 ? 28 + i / 2 : lowram_next((uint32_t)len);
        input[CHOICE + at] ^= (uint8_t)(1u << lowram_next(8));
        LLVMFuzzerTestOneInput(input, CHOICE + len);
        LLVMFuzzerTestOneInput(input, CHOICE + lowram_next((uint32_t)len));
    }
    free(scratch);
    free(input);
    free(good);
}

int main(int argc, char **argv) {
    fuzz_files(argc, argv);
    for (uint8_t which = 0; which < FITS; which++) {
        run_fit(which, 255);
        run_fit(which, 2);
        run_fit(which, 100);
    }
    return 0;
}
#endif
