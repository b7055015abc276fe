/* test_codec_random.c - the codecs on random chunks, every q8 kernel of this machine against the
 * scalar one, and damaged input (cachegen's kernels: test_cachegen_random.c). Usage:
 * test_codec_random [SEED [CASES]]; the seed is printed. All buffers are heap blocks of exactly the
 * size the contract allows, so that AddressSanitizer sees a byte read or written beyond; bytes
 * between strided rows are checked here. */
#include <inttypes.h>
#include <string.h>
#include <time.h>

#include "check.h"
#include "codec_random.h"
#include "codec.h"
#include "neap.h"
#include "q8_int.h"

enum { FILL = 0xa5 };

static uint32_t rnd_bits(void) {
    return rnd(1u << 16) << 16 | rnd(1u << 16);
}

/* The same shape with memory of its own, filled with FILL. */
static neap_codec_chunk blank_like(const neap_codec_chunk *chunk) {
    neap_codec_chunk copy = *chunk;
    for (size_t i = 0; i < chunk->n_planes; i++) {
        copy.planes[i].data = exact_block(span(&chunk->planes[i]));
        memset(copy.planes[i].data, FILL, span(&chunk->planes[i]));
    }
    return copy;
}

static void free_chunk(neap_codec_chunk *chunk) {
    for (size_t i = 0; i < chunk->n_planes; i++)
        free(chunk->planes[i].data);
}

enum {
    ROW_GAUSS,
    ROW_BITS,
    ROW_TINY,
    ROW_ZERO,
    ROW_LARGE,
    ROW_SPARSE,
    ROW_NAN,
    ROW_INF,
    ROW_KINDS
};

static void fill_row(int type, uint8_t *row, uint32_t n, uint32_t kind) {
    uint32_t bits;
    float scale = ldexpf(1.0f, (int)rnd(40) - 30);
    for (uint32_t i = 0; i < n; i++) {
        float unit = ((float)rnd(1 << 12) + (float)rnd(1 << 12) - (float)(1 << 12)) * 0x1p-12f;
        switch (kind) {
        case ROW_BITS: /* any bits at all: not finite somewhere in most long rows */
        case ROW_NAN:
        case ROW_TINY:
            bits = rnd_bits();
            if (kind == ROW_TINY) bits &= 0x800003ffu; /* subnormals of f16; bf16, f32: tiny */
            memcpy(row + elem_bytes(type) * (size_t)i, &bits, elem_bytes(type));
            if (kind == ROW_TINY && type == NEAP_KV_F16) {
                uint16_t h = (uint16_t)((bits & 0x3ffu) >> rnd(11) | bits >> 31 << 15);
                memcpy(row + 2 * (size_t)i, &h, 2);
            }
            break;
        case ROW_ZERO:
            set_value(type, row, i, rnd(2) ? 0.0f : -0.0f);
            break;
        case ROW_LARGE:
            set_value(type, row, i, (rnd(2) ? 1.0f : -1.0f) * (rnd(2) ? 65504.0f : 65000.0f));
            break;
        case ROW_SPARSE:
            set_value(type, row, i, rnd(16) ? 0.0f : unit * scale);
            break;
        default:
            set_value(type, row, i, unit * (rnd(50) ? scale : 30 * scale));
        }
    }
    if (kind == ROW_NAN && n) set_value(type, row, rnd(n), NAN);
    if (kind == ROW_INF && n) set_value(type, row, rnd(n), rnd(2) ? INFINITY : -INFINITY);
}

static neap_codec_plane random_plane(void) {
    static const uint32_t lengths[] = {1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 192, 200, 512};
    int type = 1 + (int)rnd(4);
    if (rnd(2)) type = NEAP_KV_F16;
    uint32_t n = rnd(3) ? lengths[rnd(sizeof lengths / sizeof lengths[0])] : rnd(300);
    size_t row_bytes = type == NEAP_KV_OTHER ? rnd(100) : (size_t)n * elem_bytes(type);
    neap_codec_plane plane = {.n_rows = rnd(12),
                              .row_elems = n,
                              .row_bytes = row_bytes,
                              .row_stride = row_bytes + (rnd(2) ? 0 : 2 * rnd(40)),
                              .type = type};
    plane.data = exact_block(span(&plane));
    memset(plane.data, FILL, span(&plane));
    uint32_t plane_kind = rnd(ROW_KINDS + 1);
    for (size_t r = 0; r < plane.n_rows; r++) {
        uint8_t *row = (uint8_t *)plane.data + r * plane.row_stride;
        uint32_t kind = plane_kind == ROW_KINDS ? rnd(ROW_KINDS) : plane_kind;
        if (type == NEAP_KV_OTHER)
            for (size_t b = 0; b < row_bytes; b++)
                row[b] = (uint8_t)rnd(256);
        else
            fill_row(type, row, n, kind);
    }
    return plane;
}

static neap_codec_chunk random_chunk(void) {
    neap_codec_chunk chunk = {.n_planes = 1 + rnd(2)};
    for (size_t i = 0; i < chunk.n_planes; i++)
        chunk.planes[i] = random_plane();
    return chunk;
}

/* Bytes between the rows of a decoded chunk are as blank_like left them. */
static void check_gaps(const neap_codec_chunk *chunk) {
    for (size_t i = 0; i < chunk->n_planes; i++) {
        const neap_codec_plane *plane = &chunk->planes[i];
        for (size_t b = 0; b < span(plane); b++)
            if (b % plane->row_stride >= plane->row_bytes)
                CHECK(((const uint8_t *)plane->data)[b] == FILL);
    }
}

static void check_same(const neap_codec_chunk *a, const neap_codec_chunk *b) {
    for (size_t i = 0; i < a->n_planes; i++)
        CHECK(memcmp(a->planes[i].data, b->planes[i].data, span(&a->planes[i])) == 0);
}

/* Every element is off by at most half a code and the rounding to its type. */
static void check_group(int type, const uint8_t *x, const uint8_t *y, uint32_t first,
                        uint32_t end) {
    float amax = 0, got = 0;
    for (uint32_t i = first; i < end; i++) {
        amax = fmaxf(amax, fabsf(value_at(type, x, i)));
        got = fmaxf(got, fabsf(value_at(type, y, i)));
    }
    CHECK(got == amax);
    double relative = type == NEAP_KV_F32 ? 0x1p-23 : type == NEAP_KV_F16 ? 0x1p-11 : 0x1p-8;
    for (uint32_t i = first; i < end; i++) {
        double value = value_at(type, x, i), decoded = value_at(type, y, i);
        double allowed = amax / 254.0 * 1.0001 + fabs(decoded) * relative;
        if (type == NEAP_KV_F16) allowed += 0x1p-25; /* half of its smallest subnormal */
        CHECK(fabs(value - decoded) <= allowed);
    }
}

static bool is_kept(int type, const uint8_t *row, uint32_t n) {
    for (uint32_t first = 0; first < n; first += NEAP_Q8_GROUP) {
        float amax = 0;
        for (uint32_t i = first; i < n && i < first + NEAP_Q8_GROUP; i++) {
            float x = fabsf(value_at(type, row, i));
            if (!isfinite(x)) return true;
            amax = fmaxf(amax, x);
        }
        if (type != NEAP_KV_F16 && amax > 0 && amax < 0x1p-90f) return true;
    }
    return false;
}

static void check_precision(const neap_codec_chunk *in, const neap_codec_chunk *out) {
    for (size_t p = 0; p < in->n_planes; p++) {
        const neap_codec_plane *plane = &in->planes[p];
        for (size_t r = 0; r < plane->n_rows; r++) {
            const uint8_t *x = (const uint8_t *)plane->data + r * plane->row_stride;
            const uint8_t *y = (const uint8_t *)out->planes[p].data + r * plane->row_stride;
            if (plane->type == NEAP_KV_OTHER || is_kept(plane->type, x, plane->row_elems)) {
                CHECK(memcmp(x, y, plane->row_bytes) == 0);
                continue;
            }
            for (uint32_t i = 0; i < plane->row_elems; i += NEAP_Q8_GROUP) {
                uint32_t end =
                    plane->row_elems - i < NEAP_Q8_GROUP ? plane->row_elems : i + NEAP_Q8_GROUP;
                check_group(plane->type, x, y, i, end);
            }
        }
    }
}

/* Encodes into a block of exactly the bound; the result is moved to a block of exactly its size. */
static uint8_t *encode(const neap_codec *codec, const neap_q8_kernel *kernel,
                       const neap_codec_chunk *chunk, size_t *ret_len) {
    size_t cap = codec->bound(chunk), len = 0;
    uint8_t *room = exact_block(cap);
    int err = kernel ? neap_q8_encode_with(kernel, chunk, room, cap, &len)
                     : codec->encode(chunk, room, cap, &len);
    CHECK(err == 0 && len <= cap);
    uint8_t *exact = exact_block(len);
    memcpy(exact, room, len);
    if (len) {
        size_t unused = 0;
        CHECK(codec->encode(chunk, room, rnd((uint32_t)len), &unused) == NEAP_E_BOUND);
    }
    free(room);
    *ret_len = len;
    return exact;
}

static int decode(const neap_codec *codec, const neap_q8_kernel *kernel, const uint8_t *src,
                  size_t len, const neap_codec_chunk *chunk) {
    return kernel ? neap_q8_decode_with(kernel, src, len, chunk) : codec->decode(src, len, chunk);
}

/* Damaged input: refused, or decoded inside the planes. */
static void check_damage(const neap_codec *codec, const neap_q8_kernel *kernel,
                         const neap_codec_chunk *shape, const uint8_t *coded, size_t len) {
    neap_codec_chunk out = blank_like(shape);
    size_t cut = len ? rnd((uint32_t)len) : 0;
    uint8_t *damaged = exact_block(cut);
    memcpy(damaged, coded, cut);
    if (len) CHECK(decode(codec, kernel, damaged, cut, &out) == NEAP_E_CORRUPT);
    free(damaged);
    for (int i = 0; i < 4 && len; i++) {
        damaged = exact_block(len);
        memcpy(damaged, coded, len);
        for (uint32_t flips = 1 + rnd(4); flips; flips--)
            damaged[rnd(2) ? rnd((uint32_t)len) : rnd(len < 64 ? (uint32_t)len : 64)] ^=
                (uint8_t)(1u << rnd(8));
        int err = decode(codec, kernel, damaged, len, &out);
        CHECK(err == 0 || err == NEAP_E_CORRUPT);
        check_gaps(&out);
        free(damaged);
    }
    free_chunk(&out);
}

static void check_codec(const neap_codec *codec, const neap_q8_kernel *kernel,
                        const neap_codec_chunk *in) {
    size_t len = 0, again_len = 0;
    uint8_t *coded = encode(codec, kernel, in, &len);
    neap_codec_chunk out = blank_like(in), twice = blank_like(in);
    CHECK(decode(codec, kernel, coded, len, &out) == 0);
    check_gaps(&out);
    if (codec->lossless)
        check_same(in, &out);
    else if (codec == neap_codec_find("q8"))
        check_precision(in, &out);
    uint8_t *again = encode(codec, kernel, &out, &again_len);
    CHECK(again_len == len && memcmp(again, coded, len) == 0);
    CHECK(decode(codec, kernel, again, len, &twice) == 0);
    check_same(&out, &twice);
    if (kernel) {
        size_t best_len = 0;
        uint8_t *best = encode(codec, NULL, in, &best_len);
        CHECK(best_len == len && memcmp(best, coded, len) == 0);
        memset(twice.planes[0].data, FILL, span(&twice.planes[0]));
        CHECK(codec->decode(best, best_len, &twice) == 0);
        check_same(&out, &twice);
        free(best);
    }
    check_damage(codec, kernel, in, coded, len);
    free(again);
    free(coded);
    free_chunk(&out);
    free_chunk(&twice);
}

/* Every scale of f16 and bf16 with every code: the proof at the top of q8.c, tried. */
static void check_all_scales(int type, const neap_q8_kernel *kernel) {
    enum { N = 256 };
    uint16_t row[N], decoded[N];
    uint8_t coded[2 * N + 64], again[2 * N + 64];
    neap_codec_chunk chunk = {.n_planes = 1, .planes = {{row, 1, N, 2 * N, 2 * N, type}}};
    uint32_t end = type == NEAP_KV_F16 ? 0x7c00 : 0x7f80;
    for (uint32_t amax = 0; amax < end; amax++) {
        float step = value_at(type, (uint8_t *)&(uint16_t){(uint16_t)amax}, 0) / 127;
        for (uint32_t i = 0; i < N; i++) { /* both signs of all codes, amax leads each group */
            int code = (int)i - 128 + (i < 128);
            set_value(type, (uint8_t *)row, i, (float)code * step);
            if (i % NEAP_Q8_GROUP == 0) row[i] = (uint16_t)(amax | rnd(2) << 15);
        }
        size_t len = 0, again_len = 0;
        chunk.planes[0].data = row;
        CHECK(neap_q8_encode_with(kernel, &chunk, coded, sizeof coded, &len) == 0);
        chunk.planes[0].data = decoded;
        CHECK(neap_q8_decode_with(kernel, coded, len, &chunk) == 0);
        CHECK(neap_q8_encode_with(kernel, &chunk, again, sizeof again, &again_len) == 0);
        CHECK(again_len == len && memcmp(again, coded, len) == 0);
    }
}

int main(int argc, char **argv) {
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    uint32_t cases = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 0) : 3000;
    printf("seed %" PRIu64 ", %u cases, kernels:", seed, cases);
    for (size_t k = 0; neap_q8_kernel_at(k); k++)
        printf(" %s", neap_q8_kernel_at(k)->name);
    printf("\n");
    fflush(stdout);
    rng_state = seed;
    for (uint32_t i = 0; i < cases; i++) {
        neap_codec_chunk chunk = random_chunk();
        for (size_t c = 0; neap_codec_at(c); c++)
            check_codec(neap_codec_at(c), NULL, &chunk);
        for (size_t k = 0; neap_q8_kernel_at(k); k++)
            check_codec(neap_codec_find("q8"), neap_q8_kernel_at(k), &chunk);
        free_chunk(&chunk);
    }
    for (size_t k = 0; neap_q8_kernel_at(k); k++)
        check_all_scales(NEAP_KV_F16, neap_q8_kernel_at(k));
    check_all_scales(NEAP_KV_BF16, neap_q8_kernel_at(0));
    return 0;
}
