/* test_cachegen.c - the cachegen format: its bytes, what it saves, what it keeps, its refusals. */
#include <string.h>

#include "bytes.h"
#include "cachegen_int.h"
#include "check.h"
#include "neap.h"

enum { ROWS = 256, COLS = 128, ROOM = 1 << 19 };

static uint32_t next(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* Near to gaussian, deviation 4096. Whole numbers: alike on every machine. */
static int32_t gauss(uint32_t *state) {
    int32_t sum = 0;
    for (int i = 0; i < 12; i++)
        sum += (int32_t)(next(state) % 4096) - 2048;
    return sum;
}

/* Keys as models have them: channels of different spread, some with large means, tokens that follow
 * each other alike; the first row is small. */
static void fill(uint16_t *values, uint32_t rows, uint32_t cols) {
    uint32_t state = 7;
    int32_t last[COLS] = {0};
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t c = 0; c < cols; c++) {
            last[c] = last[c] * (int32_t)(c % 4) / 4 + gauss(&state);
            const int32_t x = (int32_t)(1 + c % 3) * last[c] + (c % 32 == 5 ? 30 * 4096 : 0);
            values[r * cols + c] = neap_f16_of_f32((float)(r == 0 ? x / 32 : x) * 0x1p-12f);
        }
}

static neap_codec_chunk chunk_of(void *data, uint32_t rows, uint32_t cols, int type) {
    const size_t row_bytes = (size_t)cols * (type == NEAP_KV_F32 ? 4 : 2);
    return (neap_codec_chunk){.n_planes = 1,
                              .planes = {{.data = data,
                                          .n_rows = rows,
                                          .row_elems = cols,
                                          .row_bytes = row_bytes,
                                          .row_stride = row_bytes,
                                          .type = type}}};
}

static uint16_t data[ROWS * COLS], decoded[ROWS * COLS];
static uint8_t coded[ROOM], again[ROOM];

static size_t encode(const neap_codec_chunk *chunk, uint8_t *dst) {
    const neap_codec *codec = neap_codec_find("cachegen");
    size_t len = 0;
    CHECK(codec->bound(chunk) <= ROOM);
    CHECK(codec->encode(chunk, dst, codec->bound(chunk), &len) == 0);
    return len;
}

/* A change of the format, or of what is rounded how, must show here. */
static void test_bytes(void) {
    fill(data, ROWS, COLS);
    neap_codec_chunk chunk = chunk_of(data, ROWS, COLS, NEAP_KV_F16);
    const size_t len = encode(&chunk, coded);
    static const uint8_t header[] = {'N', 'C', 'G', 1, 1, 0, 0, 0, 0, 1, 0,           0, COLS, 0,
                                     0,   0,   0,   1, 0, 0, 0, 0, 0, 0, NEAP_KV_F16, 0, 0,    0};
    CHECK(memcmp(coded, header, sizeof header) == 0);
    CHECK(len == 12618 && neap_checksum(coded, len) == 0x18d484b17b03173d);
    for (size_t k = 0; neap_cg_kernel_at(k); k++) {
        size_t other = 0;
        CHECK(neap_cg_encode_with(neap_cg_kernel_at(k), &chunk, again, ROOM, &other) == 0);
        CHECK(other == len && memcmp(again, coded, len) == 0);
    }
}

/* 80 % and more of data of several spreads; a small row stays precise. */
static void test_saves(void) {
    fill(data, ROWS, COLS);
    neap_codec_chunk chunk = chunk_of(data, ROWS, COLS, NEAP_KV_F16);
    const size_t len = encode(&chunk, coded);
    CHECK(len * 5 < sizeof data);
    chunk.planes[0].data = decoded;
    CHECK(neap_codec_find("cachegen")->decode(coded, len, &chunk) == 0);
    double small = 0, large = 0;
    for (size_t i = 0; i < ROWS * COLS; i++) {
        const double off = fabs(neap_f32_of_f16(data[i]) - neap_f32_of_f16(decoded[i]));
        if (i < COLS)
            small = fmax(small, off);
        else
            large = fmax(large, off);
    }
    CHECK(large <= 1 && small <= 0.07);
    CHECK(encode(&chunk, again) == len && memcmp(again, coded, len) == 0);
}

static void test_refuses(void) {
    const neap_codec *codec = neap_codec_find("cachegen");
    fill(data, 64, 64);
    neap_codec_chunk chunk = chunk_of(data, 64, 64, NEAP_KV_F16), other;
    size_t len = 99;
    CHECK(codec->encode(&chunk, coded, codec->bound(&chunk) - 1, &len) == NEAP_E_BOUND &&
          len == 99);
    len = encode(&chunk, coded);
    chunk.planes[0].data = decoded;
    for (size_t cut = 0; cut < len; cut++)
        CHECK(codec->decode(coded, cut, &chunk) == NEAP_E_CORRUPT);
    CHECK(codec->decode(coded, len + 1, &chunk) == NEAP_E_CORRUPT);
    other = chunk_of(decoded, 63, 64, NEAP_KV_F16);
    CHECK(codec->decode(coded, len, &other) == NEAP_E_CORRUPT);
    other = chunk_of(decoded, 64, 64, NEAP_KV_BF16);
    CHECK(codec->decode(coded, len, &other) == NEAP_E_CORRUPT);
    for (size_t i = 0; i < 64; i++) { /* fields of the header, the first tile and its lanes */
        if (i == 32) continue;        /* the exponent of the step: any will do */
        coded[i] ^= 0xff;
        for (size_t k = 0; neap_cg_kernel_at(k); k++)
            CHECK(neap_cg_decode_with(neap_cg_kernel_at(k), coded, len, &chunk) == NEAP_E_CORRUPT);
        coded[i] ^= 0xff;
    }
    CHECK(codec->decode(coded, len, &chunk) == 0);
}

/* Quantised caches, rows with something not finite, and what is too small to gain are copied. */
static void test_copies(void) {
    const neap_codec *codec = neap_codec_find("cachegen");
    uint8_t bytes[18 * 5], out[18 * 5];
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)(i * 7);
    const neap_codec_plane planes[] = {
        {bytes, 5, 32, 18, 18, NEAP_KV_OTHER},
        {bytes, 5, 4, 9, 18, NEAP_KV_F16}, /* row_bytes is not 2 * row_elems */
        {bytes, 5, 2, 4, 18, NEAP_KV_F16},
        {bytes, 5, 0, 0, 18, NEAP_KV_F16},
    };
    for (size_t i = 0; i < sizeof planes / sizeof planes[0]; i++) {
        neap_codec_chunk chunk = {.n_planes = 1, .planes = {planes[i]}};
        const size_t len = encode(&chunk, coded);
        memset(out, 0xaa, sizeof out);
        chunk.planes[0].data = out;
        CHECK(codec->decode(coded, len, &chunk) == 0);
        for (size_t b = 0; b < sizeof out; b++)
            CHECK(out[b] == (b % 18 < planes[i].row_bytes ? bytes[b] : 0xaa));
    }
    fill(data, ROWS, COLS);
    data[3 * COLS + 1] = 0x7e55;
    data[9 * COLS] = 0xfc00;
    neap_codec_chunk chunk = chunk_of(data, ROWS, COLS, NEAP_KV_F16);
    const size_t len = encode(&chunk, coded);
    CHECK(len * 4 < sizeof data);
    chunk.planes[0].data = decoded;
    CHECK(codec->decode(coded, len, &chunk) == 0);
    CHECK(memcmp(decoded + 3 * COLS, data + 3 * COLS, 2 * COLS) == 0);
    CHECK(memcmp(decoded + 9 * COLS, data + 9 * COLS, 2 * COLS) == 0);
    CHECK(encode(&chunk, again) == len && memcmp(again, coded, len) == 0);
    neap_codec_chunk empty = chunk_of(NULL, 0, 64, NEAP_KV_F16);
    CHECK(encode(&empty, coded) == 28 && codec->decode(coded, 28, &empty) == 0);
}

/* Steps are powers of two: rows that were rounded before others came keep their values, unless the
 * newcomers double the step. */
static void test_grows_by_rows(void) {
    fill(data, ROWS, COLS);
    neap_codec_chunk few = chunk_of(data, 100, COLS, NEAP_KV_F16);
    CHECK(neap_codec_find("cachegen")->decode(coded, encode(&few, coded), &few) == 0);
    neap_codec_chunk more = chunk_of(data, ROWS, COLS, NEAP_KV_F16);
    const size_t len = encode(&more, coded);
    more.planes[0].data = decoded;
    CHECK(neap_codec_find("cachegen")->decode(coded, len, &more) == 0);
    CHECK(memcmp(decoded, data, 100 * COLS * 2) == 0);
}

int main(void) {
    test_bytes();
    test_saves();
    test_refuses();
    test_copies();
    test_grows_by_rows();
    return 0;
}
