/* test_codec.c - registry, the none codec, the bytes of the q8 format, its refusals. */
#include <string.h>

#include "check.h"
#include "codec.h"
#include "neap.h"
#include "q8_int.h"

static neap_codec_chunk f16_chunk(void *data, uint32_t n_rows, uint32_t row_elems) {
    size_t row_bytes = 2 * (size_t)row_elems;
    return (neap_codec_chunk){.n_planes = 1,
                              .planes = {{.data = data,
                                          .n_rows = n_rows,
                                          .row_elems = row_elems,
                                          .row_bytes = row_bytes,
                                          .row_stride = row_bytes,
                                          .type = NEAP_KV_F16}}};
}

static void test_registry(void) {
    CHECK(neap_codec_find("q8") && !neap_codec_find("q8")->lossless);
    CHECK(neap_codec_find("cachegen") && !neap_codec_find("cachegen")->lossless);
    CHECK(neap_codec_find("none") && neap_codec_find("none")->lossless);
    CHECK(!neap_codec_find("q9") && !neap_codec_find("") && !neap_codec_find(NULL));
    size_t n = 0;
    for (; neap_codec_at(n); n++)
        CHECK(neap_codec_find(neap_codec_at(n)->name) == neap_codec_at(n));
    CHECK(n == 3);
}

/* Rows of 3 bytes in strides of 5, and a contiguous plane. */
static void test_none(void) {
    uint8_t a[] = "abc--def--ghi", b[] = "0123", coded[64];
    neap_codec_chunk chunk = {
        .n_planes = 2, .planes = {{a, 3, 3, 3, 5, NEAP_KV_OTHER}, {b, 2, 1, 2, 2, NEAP_KV_F16}}};
    const neap_codec *none = neap_codec_find("none");
    size_t len = 99;
    CHECK(neap_codec_raw_bytes(&chunk) == 13 && none->bound(&chunk) == 13);
    CHECK(none->encode(&chunk, coded, 12, &len) == NEAP_E_BOUND && len == 99);
    CHECK(none->encode(&chunk, coded, 13, &len) == 0 && len == 13);
    CHECK(memcmp(coded, "abcdefghi0123", 13) == 0);
    memcpy(a, "xxx++xxx++xxx", sizeof a);
    memcpy(b, "xxxx", sizeof b);
    CHECK(none->decode(coded, 12, &chunk) == NEAP_E_CORRUPT);
    CHECK(none->decode(coded, 13, &chunk) == 0);
    CHECK(memcmp(a, "abc++def++ghi", sizeof a) == 0 && memcmp(b, "0123", sizeof b) == 0);
}

/* Every finite f16 survives the way to f32 and back, and every f32 between two neighbours goes to
 * the nearer one, the middle to the even one. */
static void test_f16_conversion(void) {
    for (uint32_t h = 0; h < 0x7bff; h++) {
        float low = neap_f32_of_f16((uint16_t)h), high = neap_f32_of_f16((uint16_t)(h + 1));
        float middle = (low + high) / 2;
        CHECK(low < high && low < middle && middle < high);
        CHECK(neap_f16_of_f32(low) == h && neap_f16_of_f32(-low) == (h | 0x8000));
        CHECK(neap_f16_of_f32(middle) == h + (h & 1));
        CHECK(neap_f16_of_f32(nextafterf(middle, low)) == h);
        CHECK(neap_f16_of_f32(nextafterf(middle, high)) == h + 1);
    }
    CHECK(neap_f32_of_f16(1) == 0x1p-24f && neap_f32_of_f16(0x7bff) == 65504.0f);
    CHECK(neap_f16_of_f32(nextafterf(65520.0f, 0)) == 0x7bff);
    CHECK(neap_f16_of_f32(65520.0f) == 0x7c00 && neap_f16_of_f32(-INFINITY) == 0xfc00);
    CHECK(isinf(neap_f32_of_f16(0xfc00)) && isnan(neap_f32_of_f16(0x7e01)));
}

/* The bytes of a small chunk, written out by hand: a change of the format must show here. */
static void test_q8_bytes(void) {
    /* 1.0, -0.5, 2.0, 0; and a row with a NaN. 4 elements: 2 + 4 bytes coded, 8 raw. */
    uint16_t data[8] = {0x3c00, 0xb800, 0x4000, 0, 0x3c00, 0x7e55, 0xfc00, 0x8000};
    static const uint8_t expected[] = {
        'N',  'Q',  '8',  1,    1,    0,    0,           0, /* magic, planes */
        2,    0,    0,    0,    4,    0,    0,           0,    8, 0,
        0,    0,    0,    0,    0,    0,    NEAP_KV_F16, 0,    0, 0, /* the plane */
        0,    1,                                                     /* row modes */
        0x00, 0x40, 64,   0xe0, 127,  0, /* amax 2.0; 63.5 and 31.75 round to even */
        0x00, 0x3c, 0x55, 0x7e, 0x00, 0xfc, 0x00,        0x80, /* raw */
    };
    neap_codec_chunk chunk = f16_chunk(data, 2, 4);
    const neap_codec *q8 = neap_codec_find("q8");
    uint8_t coded[128];
    size_t len = 0, cap = q8->bound(&chunk);
    CHECK(cap <= sizeof coded && cap >= sizeof expected);
    CHECK(q8->encode(&chunk, coded, cap, &len) == 0);
    CHECK(len == sizeof expected && memcmp(coded, expected, len) == 0);
    CHECK(q8->encode(&chunk, coded, len, &len) == 0);
    for (size_t short_cap = 0; short_cap < sizeof expected; short_cap++)
        CHECK(q8->encode(&chunk, coded, short_cap, &len) == NEAP_E_BOUND);
    CHECK(len == sizeof expected);
    uint16_t out[8];
    chunk = f16_chunk(out, 2, 4);
    CHECK(q8->decode(expected, sizeof expected, &chunk) == 0);
    CHECK(out[0] == neap_f16_of_f32(64 * 2.0f / 127) && out[2] == 0x4000 && out[3] == 0);
    CHECK(memcmp(out + 4, data + 4, 8) == 0);
}

static void test_q8_refuses(void) {
    uint16_t data[3 * 100] = {0x3c00}, other[4 * 100];
    neap_codec_chunk chunk = f16_chunk(data, 3, 100);
    const neap_codec *q8 = neap_codec_find("q8");
    uint8_t coded[1024];
    size_t len = 0;
    CHECK(q8->encode(&chunk, coded, sizeof coded, &len) == 0);
    CHECK(len == 28 + 3 + 3 * (2 * 2 + 100));
    for (size_t cut = 0; cut < len; cut++)
        CHECK(q8->decode(coded, cut, &chunk) == NEAP_E_CORRUPT);
    CHECK(q8->decode(coded, len + 1, &chunk) == NEAP_E_CORRUPT);
    neap_codec_chunk shapes[] = {f16_chunk(other, 4, 100), f16_chunk(other, 3, 99),
                                 f16_chunk(other, 3, 100), f16_chunk(other, 3, 100)};
    shapes[2].planes[0].type = NEAP_KV_BF16;
    shapes[3].n_planes = 2;
    for (size_t i = 0; i < 4; i++)
        CHECK(q8->decode(coded, len, &shapes[i]) == NEAP_E_CORRUPT);
    coded[28] = 2; /* a row mode that is not one */
    CHECK(q8->decode(coded, len, &chunk) == NEAP_E_CORRUPT);
    coded[28] = 0;
    CHECK(q8->decode(coded, len, &chunk) == 0);
    for (size_t k = 0; neap_q8_kernel_at(k); k++)
        for (size_t g = 0; g < 2; g++) {
            uint16_t bad[] = {0x7c00, 0x7e00, 0x8000, 0xbc00}, kept;
            uint8_t *scale = coded + 28 + 3 + 2 * g;
            memcpy(&kept, scale, 2);
            for (size_t i = 0; i < 4; i++) {
                memcpy(scale, &bad[i], 2);
                CHECK(neap_q8_decode_with(neap_q8_kernel_at(k), coded, len, &chunk) ==
                      NEAP_E_CORRUPT);
            }
            memcpy(scale, &kept, 2);
        }
}

/* What q8 does not understand it copies: quantised caches, odd row sizes, rows too short to gain.
 */
static void test_q8_copies(void) {
    uint8_t data[18 * 5], out[18 * 5], coded[256];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)(i * 7);
    neap_codec_plane planes[] = {
        {data, 5, 32, 18, 18, NEAP_KV_OTHER},
        {data, 5, 4, 9, 18, NEAP_KV_F16}, /* row_bytes is not 2 * row_elems */
        {data, 5, 2, 4, 18, NEAP_KV_F16}, /* coded as long as raw */
        {data, 5, 1, 4, 18, NEAP_KV_F32},
        {data, 5, 0, 0, 18, NEAP_KV_F16},
    };
    const neap_codec *q8 = neap_codec_find("q8");
    for (size_t i = 0; i < sizeof planes / sizeof planes[0]; i++) {
        neap_codec_chunk chunk = {.n_planes = 1, .planes = {planes[i]}};
        size_t len = 0;
        CHECK(q8->encode(&chunk, coded, q8->bound(&chunk), &len) == 0);
        CHECK(len == 28 + neap_codec_raw_bytes(&chunk) && len == q8->bound(&chunk));
        memset(out, 0xaa, sizeof out);
        chunk.planes[0].data = out;
        CHECK(q8->decode(coded, len, &chunk) == 0);
        for (size_t b = 0; b < sizeof out; b++)
            CHECK(out[b] == (b % 18 < planes[i].row_bytes ? data[b] : 0xaa));
    }
    neap_codec_chunk empty = {.n_planes = 1, .planes = {{NULL, 0, 64, 128, 128, NEAP_KV_F16}}};
    size_t len = 0;
    CHECK(q8->encode(&empty, coded, q8->bound(&empty), &len) == 0 && len == 28);
    CHECK(q8->decode(coded, len, &empty) == 0);
}

/* New rows at the end of a chunk leave the coded bytes of the earlier ones alone. */
static void test_q8_grows_by_rows(void) {
    uint16_t data[8 * 80];
    for (size_t i = 0; i < 8 * 80; i++)
        data[i] = neap_f16_of_f32((float)(i * 37 % 101) - 50.0f);
    neap_codec_chunk few = f16_chunk(data, 5, 80), more = f16_chunk(data, 8, 80);
    const neap_codec *q8 = neap_codec_find("q8");
    uint8_t a[2048], b[2048];
    size_t la = 0, lb = 0;
    CHECK(q8->encode(&few, a, sizeof a, &la) == 0);
    CHECK(q8->decode(a, la, &few) == 0); /* rows 0..4 are rounded now, 5..7 are new */
    CHECK(q8->encode(&more, b, sizeof b, &lb) == 0);
    CHECK(memcmp(a + 28 + 5, b + 28 + 8, la - 28 - 5) == 0);
}

int main(void) {
    test_registry();
    test_none();
    test_f16_conversion();
    test_q8_bytes();
    test_q8_refuses();
    test_q8_copies();
    test_q8_grows_by_rows();
    return 0;
}
