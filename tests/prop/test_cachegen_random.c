/* test_cachegen_random.c - cachegen on random tiles as caches have them and as they do not: coding
 * twice changes nothing, errors stay within the step, all kernels give the same bytes, rows that
 * are added, damaged input. Usage: test_cachegen_random [SEED [CASES]]; the seed is printed.
 * All buffers are heap blocks of exactly the size the contract allows. */
#include <inttypes.h>
#include <string.h>
#include <time.h>

#include "cachegen_int.h"
#include "check.h"
#include "codec_random.h"
#include "neap.h"

static float unit(void) /* -1 .. 1, more often near 0 */
{
    return ((float)rnd(1 << 16) + (float)rnd(1 << 16) - 65536.0f) * 0x1p-16f;
}

static neap_codec_chunk blank_like(const neap_codec_chunk *chunk) {
    neap_codec_chunk copy = *chunk;
    for (size_t i = 0; i < chunk->n_planes; i++) {
        copy.planes[i].data = exact_block(span(&chunk->planes[i]));
        memset(copy.planes[i].data, 0xa5, span(&chunk->planes[i]));
    }
    return copy;
}

static void free_chunk(neap_codec_chunk *chunk) {
    for (size_t i = 0; i < chunk->n_planes; i++)
        free(chunk->planes[i].data);
}

enum {
    FILL_CACHE,   /* channels of many spreads and means, neighbours alike, some rows small */
    FILL_FLAT,    /* one spread, no mean */
    FILL_LATTICE, /* whole multiples of steps */
    FILL_FAR,     /* rows of very different magnitudes */
    FILL_STEP,    /* means far above the spread, channels constant or nearly so */
    FILL_BITS,    /* any finite values */
    FILL_KINDS
};

static float value_of(uint32_t kind, uint32_t r, uint32_t c, float *last, float scale) {
    const float spread = ldexpf(1.0f, (int)(c * 7 % 6)), mean = c % 5 == 2 ? 40 * spread : 0;
    switch (kind) {
    case FILL_CACHE:
        *last = *last * (float)(c % 4) * 0.25f + unit() * spread;
        return (mean + *last + (rnd(500) ? 0 : 60 * unit() * spread)) * scale *
               (r % 37 == 0 ? 0.02f : 1);
    case FILL_LATTICE:
        return (float)((int)rnd(31) - 15) * 0.25f * (r % 5 ? 1 : 0.125f);
    case FILL_FAR:
        return unit() * ldexpf(scale, (int)(r * 11 % 40) - 20);
    case FILL_STEP:
        return (c % 3 ? 100.0f + (rnd(30) == 0) * 0.1f : unit() * 0.001f) * scale;
    default:
        return unit() * scale;
    }
}

static void fill_plane(const neap_codec_plane *plane) {
    const uint32_t kind = rnd(FILL_KINDS), odd = rnd(4);
    const float scale =
        ldexpf(1.0f, (int)rnd(20) - 12 + (plane->type == NEAP_KV_F16 ? 0 : (int)rnd(160) - 80));
    float *last = calloc(plane->row_elems + 1, sizeof *last);
    CHECK(last);
    for (uint32_t r = 0; r < plane->n_rows; r++) {
        uint8_t *row = (uint8_t *)plane->data + r * plane->row_stride;
        for (uint32_t c = 0; c < plane->row_elems; c++) {
            float x = value_of(kind, r, c, &last[c], scale);
            if (kind == FILL_BITS) x = neap_f32_of_bits(rnd(1u << 16) << 16 | rnd(1u << 16));
            if (plane->type == NEAP_KV_F16) x = fmaxf(-65504, fminf(65504, x));
            set_value(plane->type, row, c, x);
        }
        if (odd == 0 && rnd(20) == 0)
            set_value(plane->type, row, rnd(plane->row_elems), rnd(2) ? NAN : -INFINITY);
        if (odd == 1 && rnd(10) == 0)
            for (uint32_t c = 0; c < plane->row_elems; c++)
                set_value(plane->type, row, c, rnd(2) ? 0.0f : -0.0f);
    }
    free(last);
}

static neap_codec_plane random_plane(void) {
    static const uint32_t lengths[] = {1,   8,   31,  32,  33,  63,  64,   80,  96,
                                       128, 192, 256, 511, 512, 513, 1024, 1100};
    static const uint32_t heights[] = {1, 2, 17, 64, 100, 255, 256, 257, 300, 512};
    const int type = rnd(2) ? NEAP_KV_F16 : 1 + (int)rnd(3);
    const uint32_t cols = rnd(4) ? lengths[rnd(12)] : lengths[rnd(17)];
    const size_t row_bytes = (size_t)cols * elem_bytes(type);
    neap_codec_plane plane = {.n_rows = heights[cols > 256 ? rnd(5) : rnd(10)],
                              .row_elems = cols,
                              .row_bytes = row_bytes,
                              .row_stride = row_bytes + (rnd(2) ? 0 : 2 * rnd(40)),
                              .type = type};
    plane.data = exact_block(span(&plane));
    memset(plane.data, 0xa5, span(&plane));
    fill_plane(&plane);
    return plane;
}

static uint8_t *encode(const neap_cg_kernel *kernel, const neap_codec_chunk *chunk,
                       size_t *ret_len) {
    const size_t cap = neap_codec_find("cachegen")->bound(chunk);
    uint8_t *room = exact_block(cap);
    CHECK(neap_cg_encode_with(kernel, chunk, room, cap, ret_len) == 0 && *ret_len <= cap);
    uint8_t *exact = exact_block(*ret_len);
    memcpy(exact, room, *ret_len);
    free(room);
    return exact;
}

static void check_same(const neap_codec_chunk *a, const neap_codec_chunk *b) {
    for (size_t i = 0; i < a->n_planes; i++)
        for (size_t r = 0; r < a->planes[i].n_rows; r++)
            CHECK(memcmp((uint8_t *)a->planes[i].data + r * a->planes[i].row_stride,
                         (uint8_t *)b->planes[i].data + r * b->planes[i].row_stride,
                         a->planes[i].row_bytes) == 0);
}

static void check_gaps(const neap_codec_plane *plane) {
    for (size_t b = 0; b < span(plane); b++)
        if (b % plane->row_stride >= plane->row_bytes)
            CHECK(((const uint8_t *)plane->data)[b] == 0xa5);
}

static bool row_is_kept(int type, const uint8_t *row, uint32_t first, uint32_t end) {
    for (uint32_t c = first; c < end; c++)
        if (!(fabsf(value_at(type, row, c)) < 0x1p100f)) return true;
    return false;
}

/* No value moves by more than its row's step, which min(d, m) and the digits of the type bound. */
static void check_tile(const neap_codec_plane *in, const neap_codec_plane *out, uint32_t r0,
                       uint32_t r1, uint32_t c0, uint32_t c1) {
    const int digits = in->type == NEAP_KV_F16 ? 11 : in->type == NEAP_KV_BF16 ? 8 : 13;
    double d = 0;
    uint32_t n = 0;
    for (uint32_t c = c0; c < c1; c++) {
        double mean = 0;
        n = 0;
        for (int pass = 0; pass < 2; pass++)
            for (uint32_t r = r0; r < r1; r++) {
                const uint8_t *row = (const uint8_t *)in->data + r * in->row_stride;
                if (row_is_kept(in->type, row, c0, c1)) continue;
                const double x = value_at(in->type, row, c);
                if (pass == 0)
                    mean += x, n++;
                else
                    d += fabs(x - mean / n);
            }
    }
    d /= (double)(c1 - c0) * (n ? n : 1);
    for (uint32_t r = r0; r < r1; r++) {
        const uint8_t *x = (const uint8_t *)in->data + r * in->row_stride;
        const uint8_t *y = (const uint8_t *)out->data + r * out->row_stride;
        if (row_is_kept(in->type, x, c0, c1)) {
            const size_t first = (size_t)c0 * elem_bytes(in->type);
            CHECK(memcmp(x + first, y + first, (size_t)(c1 - c0) * elem_bytes(in->type)) == 0);
            continue;
        }
        double m = 0, top = 0;
        for (uint32_t c = c0; c < c1; c++) {
            m += fabs(value_at(in->type, x, c)) / (c1 - c0);
            top = fmax(top, fabs(value_at(in->type, x, c)));
        }
        const double step = fmin(d, m) * 1.28 + top * ldexp(2, -digits) + 0x1p-100;
        for (uint32_t c = c0; c < c1; c++)
            CHECK(fabs((double)value_at(in->type, x, c) - (double)value_at(in->type, y, c)) <=
                  step);
    }
}

static void check_precision(const neap_codec_plane *in, const neap_codec_plane *out) {
    if (in->row_elems > NEAP_CG_COLS) return; /* how tiles share out columns is the codec's own */
    for (uint32_t r = 0; r < in->n_rows; r += NEAP_CG_ROWS) {
        const uint32_t end = in->n_rows - r < NEAP_CG_ROWS ? in->n_rows : r + NEAP_CG_ROWS;
        check_tile(in, out, r, end, 0, in->row_elems);
    }
}

static void check_damage(const neap_cg_kernel *kernel, const neap_codec_chunk *shape,
                         const uint8_t *coded, size_t len) {
    neap_codec_chunk out = blank_like(shape), other = blank_like(shape);
    for (int i = 0; i < 6; i++) {
        const size_t cut = i ? len : rnd((uint32_t)len);
        uint8_t *damaged = exact_block(cut);
        memcpy(damaged, coded, cut);
        for (uint32_t flips = i ? 1 + rnd(3) : 0; flips; flips--)
            damaged[rnd(2) ? rnd((uint32_t)len) : rnd(len < 400 ? (uint32_t)len : 400)] ^=
                (uint8_t)(1u << rnd(8));
        const int err = neap_cg_decode_with(kernel, damaged, cut, &out);
        CHECK(err == NEAP_E_CORRUPT || (i && err == 0));
        CHECK(neap_cg_decode_with(neap_cg_kernel_at(0), damaged, cut, &other) == err);
        if (err == 0) check_same(&out, &other);
        for (size_t p = 0; p < out.n_planes; p++)
            check_gaps(&out.planes[p]);
        free(damaged);
    }
    free_chunk(&out);
    free_chunk(&other);
}

static void check_kernel(const neap_cg_kernel *kernel, const neap_codec_chunk *in,
                         const uint8_t *expected, size_t expected_len) {
    size_t len = 0, again_len = 0;
    uint8_t *coded = encode(kernel, in, &len);
    if (expected) CHECK(len == expected_len && memcmp(coded, expected, len) == 0);
    neap_codec_chunk out = blank_like(in), twice = blank_like(in);
    CHECK(neap_cg_decode_with(kernel, coded, len, &out) == 0);
    for (size_t i = 0; i < in->n_planes; i++) {
        check_gaps(&out.planes[i]);
        check_precision(&in->planes[i], &out.planes[i]);
    }
    uint8_t *again = encode(kernel, &out, &again_len);
    CHECK(again_len == len && memcmp(again, coded, len) == 0);
    CHECK(neap_cg_decode_with(kernel, again, again_len, &twice) == 0);
    check_same(&out, &twice);
    check_damage(kernel, in, coded, len);
    free(again);
    free(coded);
    free_chunk(&out);
    free_chunk(&twice);
}

/* Rows coded once, then coded with new ones: settles after one more cycle. */
static void check_growth(neap_codec_chunk *chunk) {
    neap_codec_chunk part = *chunk;
    size_t len = 0;
    for (size_t i = 0; i < part.n_planes; i++)
        part.planes[i].n_rows = 1 + rnd(part.planes[i].n_rows);
    uint8_t *coded = encode(neap_cg_kernel_at(0), &part, &len);
    CHECK(neap_cg_decode_with(neap_cg_kernel_at(0), coded, len, &part) == 0);
    free(coded);
    check_kernel(neap_cg_kernel_at(0), chunk, NULL, 0);
}

int main(int argc, char **argv) {
    const uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    const uint32_t cases = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 0) : 150;
    printf("seed %" PRIu64 ", %u cases, kernels:", seed, cases);
    for (size_t k = 0; neap_cg_kernel_at(k); k++)
        printf(" %s", neap_cg_kernel_at(k)->name);
    printf("\n");
    fflush(stdout);
    rng_state = seed;
    for (uint32_t i = 0; i < cases; i++) {
        neap_codec_chunk chunk = {.n_planes = 1 + rnd(2)};
        for (size_t p = 0; p < chunk.n_planes; p++)
            chunk.planes[p] = random_plane();
        size_t len = 0;
        uint8_t *coded = encode(neap_cg_kernel_at(0), &chunk, &len);
        for (size_t k = 0; neap_cg_kernel_at(k); k++)
            check_kernel(neap_cg_kernel_at(k), &chunk, coded, len);
        check_growth(&chunk);
        free(coded);
        free_chunk(&chunk);
    }
    return 0;
}
