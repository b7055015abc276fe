/* none.c - the codec that keeps every byte: the rows of the planes one after another, no header. */
#include <string.h>

#include "codec_int.h"
#include "neap.h"

static bool is_contiguous(const neap_codec_plane *plane) {
    return plane->row_stride == plane->row_bytes;
}

static int none_encode(const neap_codec_chunk *chunk, void *dst, size_t cap, size_t *ret_len) {
    size_t len = neap_codec_raw_bytes(chunk);
    if (cap < len) return NEAP_E_BOUND;
    uint8_t *out = dst;
    for (size_t i = 0; i < chunk->n_planes; i++) {
        const neap_codec_plane *plane = &chunk->planes[i];
        size_t bytes = plane->n_rows * plane->row_bytes;
        if (bytes == 0) continue;
        if (is_contiguous(plane)) {
            memcpy(out, plane->data, bytes);
        } else {
            for (size_t r = 0; r < plane->n_rows; r++)
                memcpy(out + r * plane->row_bytes,
                       (const uint8_t *)plane->data + r * plane->row_stride, plane->row_bytes);
        }
        out += bytes;
    }
    *ret_len = len;
    return 0;
}

static int none_decode(const void *src, size_t len, const neap_codec_chunk *chunk) {
    if (len != neap_codec_raw_bytes(chunk)) return NEAP_E_CORRUPT;
    const uint8_t *in = src;
    for (size_t i = 0; i < chunk->n_planes; i++) {
        const neap_codec_plane *plane = &chunk->planes[i];
        size_t bytes = plane->n_rows * plane->row_bytes;
        if (bytes == 0) continue;
        if (is_contiguous(plane)) {
            memcpy(plane->data, in, bytes);
        } else {
            for (size_t r = 0; r < plane->n_rows; r++)
                memcpy((uint8_t *)plane->data + r * plane->row_stride, in + r * plane->row_bytes,
                       plane->row_bytes);
        }
        in += bytes;
    }
    return 0;
}

const neap_codec neap_codec_none = {
    .name = "none",
    .lossless = true,
    .bound = neap_codec_raw_bytes,
    .encode = none_encode,
    .decode = none_decode,
};
