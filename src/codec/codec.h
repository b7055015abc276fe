/* codec.h - turns a KV chunk into bytes and back. Pure: no allocation, no I/O, no state.
 * Shapes     a chunk is 1 or 2 planes; a plane is n_rows rows of row_elems elements, row r at
 *            data + r * row_stride.
 * Errors     encode: NEAP_E_BOUND (cap too small). decode: NEAP_E_CORRUPT; the planes may then be
 *            partly written. decode never reads or writes outside what it is given.
 * Idempotent encode(decode(encode(x))) == encode(x) byte for byte, and so decode is stable.
 * Threads    any. */
#ifndef NEAP_CODEC_H
#define NEAP_CODEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct neap_codec_plane {
    void *data;
    uint32_t n_rows, row_elems;
    size_t row_bytes, row_stride;
    int type; /* NEAP_KV_* of neap.h */
} neap_codec_plane;

typedef struct neap_codec_chunk {
    size_t n_planes;
    neap_codec_plane planes[2];
} neap_codec_chunk;

typedef struct neap_codec {
    const char *name;
    bool lossless;
    /* Upper bound of the encoded bytes. */
    size_t (*bound)(const neap_codec_chunk *chunk);
    int (*encode)(const neap_codec_chunk *chunk, void *dst, size_t cap, size_t *ret_len);
    int (*decode)(const void *src, size_t len, const neap_codec_chunk *chunk);
} neap_codec;

/* "none", "q8" or "cachegen"; NULL when unknown. */
const neap_codec *neap_codec_find(const char *name);
/* The i-th codec, NULL past the end: for help texts, tests and benchmarks. */
const neap_codec *neap_codec_at(size_t i);
/* Uncompressed bytes of the chunk. */
size_t neap_codec_raw_bytes(const neap_codec_chunk *chunk);
#endif
