/* codec_random.h - what the random tests of the codecs share: numbers, values of the element types,
 * and heap blocks of exactly a size. */
#ifndef NEAP_TESTS_CODEC_RANDOM_H
#define NEAP_TESTS_CODEC_RANDOM_H

#include <stdint.h>
#include <string.h>

#include "check.h"
#include "codec.h"
#include "half.h"
#include "neap.h"

static uint64_t rng_state;

static uint32_t rnd(uint32_t n) /* 0 .. n - 1 */
{
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((rng_state >> 33) % n);
}

static uint32_t elem_bytes(int type) {
    return type == NEAP_KV_F32 ? 4 : 2;
}

static float value_at(int type, const uint8_t *row, uint32_t i) {
    uint16_t narrow;
    float wide;
    if (type == NEAP_KV_F32) {
        memcpy(&wide, row + 4 * (size_t)i, 4);
        return wide;
    }
    memcpy(&narrow, row + 2 * (size_t)i, 2);
    return type == NEAP_KV_F16 ? neap_f32_of_f16(narrow) : neap_f32_of_bits((uint32_t)narrow << 16);
}

static void set_value(int type, uint8_t *row, uint32_t i, float x) {
    uint16_t narrow = type == NEAP_KV_F16 ? neap_f16_of_f32(x) : neap_bf16_of_f32(x);
    if (type == NEAP_KV_F32)
        memcpy(row + 4 * (size_t)i, &x, 4);
    else
        memcpy(row + 2 * (size_t)i, &narrow, 2);
}

static size_t span(const neap_codec_plane *plane) {
    return plane->n_rows == 0 ? 0 : (plane->n_rows - 1) * plane->row_stride + plane->row_bytes;
}

static void *exact_block(size_t bytes) {
    void *block = malloc(bytes ? bytes : 1);
    CHECK(block);
    return block;
}
#endif
