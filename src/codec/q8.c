/* q8.c - 8-bit codes with one scale for each 64 elements: the format, the scalar kernel, dispatch.
 *
 * Format (little-endian)
 *   u32 magic "NQ8" 1, u32 n_planes; for each plane u32 n_rows, u32 row_elems, u64 row_bytes,
 *   u8 type, u8 mode, u16 0. Then for each plane its data:
 *     mode RAW    the rows, row_bytes each (quantised caches; rows so short that codes save
 * nothing) mode CODED  n_rows row modes of one byte, then the rows: RAW row_bytes, or CODED:
 *                 ceil(row_elems / 64) scales in the element type, then row_elems codes (i8)
 *   A group is 64 consecutive elements of one row (the last of a row may be shorter), so a row's
 *   bytes depend on that row alone: cells added to a plane leave the rows of earlier ones as they
 *   were. In a transposed plane the cells run along the rows, and a last group that grows may get
 *   a larger scale.
 *
 * Coding. amax = largest |x| of the group, stored exactly (it is one of the elements).
 *   code = round(x * (127 / amax)), decoded x = T(code * (amax * (1/127))), all in f32, T rounding
 *   to the element type; a zero amax gives codes and values of zero.
 *   A row with an element that is not finite is kept RAW (NaN payloads survive). So is a bf16 or
 * f32 row with a group of 0 < amax < 2^-90: then no product here is subnormal in f32, and the
 * result does not hang on the thread's flush-to-zero mode. (f16's are far from f32's subnormals.)
 *
 * Invariant: encode(decode(encode(x))) == encode(x), byte for byte. Let a = amax, c a code, y what
 * it decodes to. f32 arithmetic is off by a few 2^-24 of each value, which no bound below notices.
 *   1. The scale returns. Some code is +-127 (the largest element's) and decodes to +-a: in f16 and
 *      bf16 127 * (a/127) is within 2^-22 a of a, which rounds to a; in f32 +-127 is decoded as
 *      +-a itself. Rounding is monotone, so no other |y| is above a.
 *   2. The codes return when |y - c * a/127| < (a/127) / 2, that is, when T moves the value by less
 *      than half a code:
 *      f32   by 2^-24 of c codes.                    bf16  by at most 2^-8 of c codes: 127/256 <
 * 1/2. f16   normal y: by at most 2^-11 of c codes: 127/2048 < 1/2. subnormal y: by at most half of
 * q = 2^-24, which is less than half a code when a > 127 q. f16, a = k q with k <= 127: x = j q is
 * itself a whole number of q. |c - 127 j / k| <= 1/2 gives |c k/127 - j| <= k/254 <= 1/2, reached
 * only for k = 127 where c = j is exact: y is x, the coding is lossless, and what encodes the same
 * decodes the same.
 *   3. RAW rows are copies; decoded rows are finite with the same amax, so modes return too. */
#include <assert.h>
#include <stdatomic.h>

#include "codec_int.h"
#include "neap.h"
#include "q8_int.h"

enum { Q8_CODED = 0, Q8_RAW = 1 };
enum { Q8_MAGIC = 0x0138514e /* "NQ8" 1 */, Q8_HEADER_BYTES = 8, Q8_PLANE_BYTES = 20 };
enum { Q8_MIN_EXPONENT = 127 - 90 };

static inline uint32_t elem_bytes(int type) {
    return type == NEAP_KV_F32 ? 4 : 2;
}

static inline uint32_t load_bits(int type, const uint8_t *src, uint32_t i) {
    uint32_t wide;
    uint16_t narrow;
    if (type == NEAP_KV_F32) {
        memcpy(&wide, src + 4 * (size_t)i, sizeof wide);
        return wide;
    }
    memcpy(&narrow, src + 2 * (size_t)i, sizeof narrow);
    return narrow;
}

static inline void store_bits(int type, uint8_t *dst, uint32_t i, uint32_t bits) {
    uint16_t narrow = (uint16_t)bits;
    if (type == NEAP_KV_F32)
        memcpy(dst + 4 * (size_t)i, &bits, sizeof bits);
    else
        memcpy(dst + 2 * (size_t)i, &narrow, sizeof narrow);
}

static inline float value_of_bits(int type, uint32_t bits) {
    if (type == NEAP_KV_F16) return neap_f32_of_f16((uint16_t)bits);
    return neap_f32_of_bits(type == NEAP_KV_BF16 ? bits << 16 : bits);
}

static inline uint32_t bits_of_value(int type, float x) {
    if (type == NEAP_KV_F16) return neap_f16_of_f32(x);
    return type == NEAP_KV_BF16 ? neap_bf16_of_f32(x) : neap_f32_bits(x);
}

/* Whether these bits can be a group's amax (the sign bit must be off). */
static inline bool is_scale(int type, uint32_t bits) {
    if (type == NEAP_KV_F16) return bits < NEAP_F16_INF;
    uint32_t shift = type == NEAP_KV_BF16 ? 7 : 23;
    return bits == 0 || (bits >= (uint32_t)Q8_MIN_EXPONENT << shift && bits < 255u << shift);
}

/* The two row functions are inlined into one specialised copy for each element type. */
static inline __attribute__((always_inline)) bool encode_row(int type, const uint8_t *src,
                                                             uint32_t n, uint8_t *dst) {
    uint8_t *codes = dst + (size_t)neap_q8_groups(n) * elem_bytes(type);
    uint32_t sign = type == NEAP_KV_F32 ? 0x80000000u : 0x8000u;
    for (uint32_t first = 0, g = 0; first < n; first += NEAP_Q8_GROUP, g++) {
        uint32_t end = n - first < NEAP_Q8_GROUP ? n : first + NEAP_Q8_GROUP, amax = 0;
        for (uint32_t i = first; i < end; i++) {
            uint32_t magnitude = load_bits(type, src, i) & ~sign;
            amax = magnitude > amax ? magnitude : amax;
        }
        if (!is_scale(type, amax)) return false;
        store_bits(type, dst, g, amax);
        float inverse = amax == 0 ? 0.0f : NEAP_Q8_MAX_CODE / value_of_bits(type, amax);
        for (uint32_t i = first; i < end; i++)
            codes[i] =
                (uint8_t)neap_q8_round(value_of_bits(type, load_bits(type, src, i)) * inverse);
    }
    return true;
}

static inline __attribute__((always_inline)) bool decode_row(int type, const uint8_t *src,
                                                             uint32_t n, uint8_t *dst) {
    const uint8_t *codes = src + (size_t)neap_q8_groups(n) * elem_bytes(type);
    for (uint32_t first = 0, g = 0; first < n; first += NEAP_Q8_GROUP, g++) {
        uint32_t end = n - first < NEAP_Q8_GROUP ? n : first + NEAP_Q8_GROUP;
        uint32_t bits = load_bits(type, src, g);
        if (!is_scale(type, bits)) return false;
        float amax = value_of_bits(type, bits), step = amax * NEAP_Q8_STEP;
        for (uint32_t i = first; i < end; i++) {
            int8_t code = (int8_t)codes[i];
            float y = (float)code * step;
            if (type == NEAP_KV_F32 && code == 127) y = amax;
            if (type == NEAP_KV_F32 && code == -127) y = -amax;
            store_bits(type, dst, i, bits_of_value(type, y));
        }
    }
    return true;
}

static bool scalar_encode_f16(const void *src, uint32_t n, uint8_t *dst) {
    return encode_row(NEAP_KV_F16, src, n, dst);
}

static bool scalar_decode_f16(const uint8_t *src, uint32_t n, void *dst) {
    return decode_row(NEAP_KV_F16, src, n, dst);
}

static bool always(void) {
    return true;
}

static const neap_q8_kernel scalar_kernel = {
    .name = "scalar",
    .supported = always,
    .encode_f16 = scalar_encode_f16,
    .decode_f16 = scalar_decode_f16,
};

static const neap_q8_kernel *const kernels[] = {
#if defined(__x86_64__)
    &neap_q8_avx512,
    &neap_q8_avx2,
#elif defined(__aarch64__)
    &neap_q8_neon,
#endif
    &scalar_kernel,
};

const neap_q8_kernel *neap_q8_kernel_at(size_t i) {
    for (size_t k = 0; k < sizeof kernels / sizeof kernels[0]; k++)
        if (kernels[k]->supported() && i-- == 0) return kernels[k];
    return NULL;
}

static bool encode_row_of(const neap_q8_kernel *kernel, const neap_codec_plane *plane,
                          const uint8_t *src, uint8_t *dst) {
    if (plane->type == NEAP_KV_F16) return kernel->encode_f16(src, plane->row_elems, dst);
    if (plane->type == NEAP_KV_BF16) return encode_row(NEAP_KV_BF16, src, plane->row_elems, dst);
    return encode_row(NEAP_KV_F32, src, plane->row_elems, dst);
}

static bool decode_row_of(const neap_q8_kernel *kernel, const neap_codec_plane *plane,
                          const uint8_t *src, uint8_t *dst) {
    if (plane->type == NEAP_KV_F16) return kernel->decode_f16(src, plane->row_elems, dst);
    if (plane->type == NEAP_KV_BF16) return decode_row(NEAP_KV_BF16, src, plane->row_elems, dst);
    return decode_row(NEAP_KV_F32, src, plane->row_elems, dst);
}

static size_t coded_row_bytes(const neap_codec_plane *plane) {
    return (size_t)neap_q8_groups(plane->row_elems) * elem_bytes(plane->type) + plane->row_elems;
}

static int plane_mode(const neap_codec_plane *plane) {
    bool known =
        plane->type == NEAP_KV_F16 || plane->type == NEAP_KV_BF16 || plane->type == NEAP_KV_F32;
    if (!known || plane->row_bytes != (size_t)plane->row_elems * elem_bytes(plane->type))
        return Q8_RAW;
    return coded_row_bytes(plane) < plane->row_bytes ? Q8_CODED : Q8_RAW;
}

static size_t header_bytes(const neap_codec_chunk *chunk) {
    return Q8_HEADER_BYTES + Q8_PLANE_BYTES * chunk->n_planes;
}

static void put_u32(uint8_t *dst, uint32_t value) {
    memcpy(dst, &value, sizeof value);
}

/* The header has no freedom: decoding compares it with the one of the chunk it decodes into. */
static void write_header(const neap_codec_chunk *chunk, uint8_t *dst) {
    put_u32(dst, Q8_MAGIC);
    put_u32(dst + 4, (uint32_t)chunk->n_planes);
    for (size_t i = 0; i < chunk->n_planes; i++) {
        const neap_codec_plane *plane = &chunk->planes[i];
        uint8_t *entry = dst + Q8_HEADER_BYTES + Q8_PLANE_BYTES * i;
        uint64_t row_bytes = plane->row_bytes;
        put_u32(entry, plane->n_rows);
        put_u32(entry + 4, plane->row_elems);
        memcpy(entry + 8, &row_bytes, sizeof row_bytes);
        entry[16] = (uint8_t)plane->type;
        entry[17] = (uint8_t)plane_mode(plane);
        entry[18] = entry[19] = 0;
    }
}

static size_t q8_bound(const neap_codec_chunk *chunk) {
    size_t bytes = header_bytes(chunk) + neap_codec_raw_bytes(chunk);
    for (size_t i = 0; i < chunk->n_planes; i++)
        if (plane_mode(&chunk->planes[i]) == Q8_CODED) bytes += chunk->planes[i].n_rows;
    return bytes;
}

static int encode_plane(const neap_q8_kernel *kernel, const neap_codec_plane *plane, uint8_t **pos,
                        const uint8_t *end) {
    if (plane->row_bytes == 0) return 0;
    int mode = plane_mode(plane);
    size_t coded_bytes = mode == Q8_CODED ? coded_row_bytes(plane) : 0;
    uint8_t *row_modes = *pos, *out = *pos;
    if (mode == Q8_CODED) {
        if ((size_t)(end - out) < plane->n_rows) return NEAP_E_BOUND;
        out += plane->n_rows;
    }
    for (size_t r = 0; r < plane->n_rows; r++) {
        const uint8_t *row = (const uint8_t *)plane->data + r * plane->row_stride;
        size_t left = (size_t)(end - out);
        if (mode == Q8_CODED) {
            if (left < coded_bytes) return NEAP_E_BOUND;
            bool coded = encode_row_of(kernel, plane, row, out);
            row_modes[r] = coded ? Q8_CODED : Q8_RAW;
            if (coded) {
                out += coded_bytes;
                continue;
            }
        }
        if (left < plane->row_bytes) return NEAP_E_BOUND;
        memcpy(out, row, plane->row_bytes);
        out += plane->row_bytes;
    }
    *pos = out;
    return 0;
}

int neap_q8_encode_with(const neap_q8_kernel *kernel, const neap_codec_chunk *chunk, void *dst,
                        size_t cap, size_t *ret_len) {
    assert(chunk->n_planes <= 2);
    size_t header = header_bytes(chunk);
    if (cap < header) return NEAP_E_BOUND;
    uint8_t *pos = (uint8_t *)dst + header;
    for (size_t i = 0; i < chunk->n_planes; i++) {
        int err = encode_plane(kernel, &chunk->planes[i], &pos, (uint8_t *)dst + cap);
        if (err) return err;
    }
    write_header(chunk, dst);
    *ret_len = (size_t)(pos - (uint8_t *)dst);
    return 0;
}

static int decode_plane(const neap_q8_kernel *kernel, const neap_codec_plane *plane,
                        const uint8_t **pos, const uint8_t *end) {
    if (plane->row_bytes == 0) return 0;
    int mode = plane_mode(plane);
    size_t coded_bytes = mode == Q8_CODED ? coded_row_bytes(plane) : 0;
    const uint8_t *row_modes = *pos, *in = *pos;
    if (mode == Q8_CODED) {
        if ((size_t)(end - in) < plane->n_rows) return NEAP_E_CORRUPT;
        in += plane->n_rows;
    }
    for (size_t r = 0; r < plane->n_rows; r++) {
        uint8_t *row = (uint8_t *)plane->data + r * plane->row_stride;
        int row_mode = mode == Q8_CODED ? row_modes[r] : Q8_RAW;
        size_t bytes = row_mode == Q8_CODED ? coded_bytes : plane->row_bytes;
        if (row_mode > Q8_RAW || (size_t)(end - in) < bytes) return NEAP_E_CORRUPT;
        if (row_mode == Q8_RAW)
            memcpy(row, in, bytes);
        else if (!decode_row_of(kernel, plane, in, row))
            return NEAP_E_CORRUPT;
        in += bytes;
    }
    *pos = in;
    return 0;
}

int neap_q8_decode_with(const neap_q8_kernel *kernel, const void *src, size_t len,
                        const neap_codec_chunk *chunk) {
    assert(chunk->n_planes <= 2);
    uint8_t expected[Q8_HEADER_BYTES + 2 * Q8_PLANE_BYTES];
    size_t header = header_bytes(chunk);
    write_header(chunk, expected);
    if (len < header || memcmp(src, expected, header) != 0) return NEAP_E_CORRUPT;
    const uint8_t *pos = (const uint8_t *)src + header, *end = (const uint8_t *)src + len;
    for (size_t i = 0; i < chunk->n_planes; i++) {
        int err = decode_plane(kernel, &chunk->planes[i], &pos, end);
        if (err) return err;
    }
    return pos == end ? 0 : NEAP_E_CORRUPT;
}

/* The fastest kernel, looked up once: asking the CPU is slow under a hypervisor. */
static const neap_q8_kernel *best_kernel(void) {
    static _Atomic(const neap_q8_kernel *) best;
    const neap_q8_kernel *kernel = atomic_load_explicit(&best, memory_order_relaxed);
    if (kernel) return kernel;
    kernel = neap_q8_kernel_at(0);
    atomic_store_explicit(&best, kernel, memory_order_relaxed);
    return kernel;
}

static int q8_encode(const neap_codec_chunk *chunk, void *dst, size_t cap, size_t *ret_len) {
    return neap_q8_encode_with(best_kernel(), chunk, dst, cap, ret_len);
}

static int q8_decode(const void *src, size_t len, const neap_codec_chunk *chunk) {
    return neap_q8_decode_with(best_kernel(), src, len, chunk);
}

const neap_codec neap_codec_q8 = {
    .name = "q8",
    .lossless = false,
    .bound = q8_bound,
    .encode = q8_encode,
    .decode = q8_decode,
};
