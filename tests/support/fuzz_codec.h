/* fuzz_codec.h - a codec's decoder on arbitrary bytes, all kernels side by side; included by the
 * fuzz target of the codec, which defines
 *   FUZZ_CODEC                 its name
 *   FUZZ_KERNEL_AT(k)          its k-th kernel or NULL
 *   FUZZ_DECODE_WITH(kernel, src, len, chunk)
 *   FUZZ_ROWS                  shapes have fewer rows than this
 *   FUZZ_HIGH_BYTE(x)          the high byte of a value of the built-in corpus, from random x
 *
 * Input: 6 bytes choose the shape (planes; type; rows; elements; stride; bit 0: whether the header
 * is repaired, so that the rest of the decoder is reached), the rest is the encoded chunk.
 * Whatever is accepted must decode alike with every kernel, stay inside the planes (heap blocks of
 * the exact size, for AddressSanitizer) and be a fixed point of coding after one more cycle.
 * Without libFuzzer (NEAP_LIBFUZZER undefined) fuzz_main() runs the files named, and a built-in
 * corpus of good and damaged chunks. */
#ifndef NEAP_TESTS_FUZZ_CODEC_H
#define NEAP_TESTS_FUZZ_CODEC_H

#include <string.h>

#include "check.h"
#ifndef NEAP_LIBFUZZER
#include "fuzz_files.h"
#endif
#include "neap.h"
#include "codec.h"

enum { SHAPE_BYTES = 6, HEADER_BYTES = 8, PLANE_BYTES = 20 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static size_t span(const neap_codec_plane *plane) {
    return plane->n_rows == 0 ? 0 : (plane->n_rows - 1) * plane->row_stride + plane->row_bytes;
}

static neap_codec_chunk shape_of(const uint8_t *choice) {
    neap_codec_chunk chunk = {.n_planes = 1 + (choice[0] & 1)};
    for (size_t i = 0; i < chunk.n_planes; i++) {
        neap_codec_plane *plane = &chunk.planes[i];
        plane->type = 1 + (choice[1] >> 2 * i & 3);
        plane->n_rows = choice[2] % FUZZ_ROWS;
        plane->row_elems = choice[3];
        plane->row_bytes = (size_t)plane->row_elems * (plane->type == NEAP_KV_F32 ? 4 : 2);
        plane->row_stride = plane->row_bytes + choice[4] % 16u;
    }
    return chunk;
}

static void allocate(neap_codec_chunk *chunk) {
    for (size_t i = 0; i < chunk->n_planes; i++) {
        chunk->planes[i].data = calloc(1, span(&chunk->planes[i]) + !span(&chunk->planes[i]));
        CHECK(chunk->planes[i].data);
    }
}

static void release(neap_codec_chunk *chunk) {
    for (size_t i = 0; i < chunk->n_planes; i++)
        free(chunk->planes[i].data);
}

static uint8_t *encode(const neap_codec_chunk *chunk, size_t *ret_len) {
    size_t cap = neap_codec_find(FUZZ_CODEC)->bound(chunk);
    uint8_t *coded = malloc(cap);
    CHECK(coded && neap_codec_find(FUZZ_CODEC)->encode(chunk, coded, cap, ret_len) == 0);
    return coded;
}

static void check_fixed_point(neap_codec_chunk *chunk) {
    size_t len = 0, again_len = 0;
    uint8_t *coded = encode(chunk, &len);
    CHECK(neap_codec_find(FUZZ_CODEC)->decode(coded, len, chunk) == 0);
    uint8_t *again = encode(chunk, &again_len);
    CHECK(again_len == len && memcmp(again, coded, len) == 0);
    free(again);
    free(coded);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < SHAPE_BYTES) return 0;
    neap_codec_chunk first = shape_of(data), other = first;
    size_t len = size - SHAPE_BYTES, header = HEADER_BYTES + PLANE_BYTES * first.n_planes,
           unused = 0;
    uint8_t *src = malloc(len + !len);
    CHECK(src);
    memcpy(src, data + SHAPE_BYTES, len);
    allocate(&first);
    allocate(&other);
    if ((data[5] & 1) && len >= header) {
        uint8_t *good = encode(&first, &unused);
        memcpy(src, good, header);
        free(good);
    }
    int err = FUZZ_DECODE_WITH(FUZZ_KERNEL_AT(0), src, len, &first);
    CHECK(err == 0 || err == NEAP_E_CORRUPT);
    for (size_t k = 1; FUZZ_KERNEL_AT(k); k++) {
        CHECK(FUZZ_DECODE_WITH(FUZZ_KERNEL_AT(k), src, len, &other) == err);
        for (size_t i = 0; err == 0 && i < first.n_planes; i++)
            CHECK(memcmp(first.planes[i].data, other.planes[i].data, span(&first.planes[i])) == 0);
    }
    if (err == 0) check_fixed_point(&first);
    release(&first);
    release(&other);
    free(src);
    return 0;
}

#ifndef NEAP_LIBFUZZER
static uint32_t next(uint32_t *state) {
    return (*state = *state * 1664525u + 1013904223u) >> 8;
}

/* A good chunk of the shape chosen with its values from state, then copies cut and flipped. */
static void run_shape(const uint8_t *choice, uint32_t *state) {
    neap_codec_chunk chunk = shape_of(choice);
    allocate(&chunk);
    for (size_t i = 0; i < chunk.n_planes; i++)
        for (size_t b = 0; b < span(&chunk.planes[i]); b++)
            ((uint8_t *)chunk.planes[i].data)[b] =
                (uint8_t)(b & 1 ? FUZZ_HIGH_BYTE(next(state)) : next(state));
    size_t len = 0;
    uint8_t *coded = encode(&chunk, &len), *input = malloc(SHAPE_BYTES + len);
    CHECK(input);
    memcpy(input, choice, SHAPE_BYTES);
    memcpy(input + SHAPE_BYTES, coded, len);
    LLVMFuzzerTestOneInput(input, SHAPE_BYTES + len);
    for (int i = 0; i < 8; i++) {
        memcpy(input + SHAPE_BYTES, coded, len);
        input[SHAPE_BYTES + next(state) % len] ^= (uint8_t)(1u << next(state) % 8);
        LLVMFuzzerTestOneInput(input, SHAPE_BYTES + len);
        LLVMFuzzerTestOneInput(input, SHAPE_BYTES + next(state) % len);
    }
    free(input);
    free(coded);
    release(&chunk);
}

static int fuzz_main(int argc, char **argv) {
    fuzz_files(argc, argv);
    static const uint8_t lengths[] = {0, 1, 3, 16, 63, 64, 65, 100, 128, 255};
    uint32_t state = 3;
    for (size_t n = 0; n < sizeof lengths; n++)
        for (uint8_t type = 0; type < 16; type++)
            for (uint8_t flags = 0; flags < 4; flags++) {
                uint8_t choice[SHAPE_BYTES] = {
                    flags & 1,  type,      (uint8_t)(flags * (FUZZ_ROWS / 4) + n % 3),
                    lengths[n], flags * 3, flags >> 1};
                run_shape(choice, &state);
            }
    return 0;
}
#endif
#endif
