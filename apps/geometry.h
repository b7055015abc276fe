/* geometry.h - the little that commands need to know of a model file: its geometry. */
#ifndef NEAP_APPS_GEOMETRY_H
#define NEAP_APPS_GEOMETRY_H

#include <stddef.h>
#include <stdint.h>

typedef struct neap_geometry {
    uint64_t digest;         /* of its size and first MiB, where metadata lies */
    uint32_t n_layers;       /* 0: not said */
    uint32_t n_context;      /* tokens that it was trained for; 0: not said */
    uint64_t kv_chunk_bytes; /* one layer's chunk of 256 cells in f16; 0: not said */
} neap_geometry;

/* Fails: -errno; NEAP_E_CORRUPT (not GGUF, or its metadata does not hold together). */
int neap_geometry_read(const char *path, neap_geometry *ret_geometry);

/* Metadata as it lies in the file, for a copy of it. */
typedef struct neap_geometry_pairs {
    uint8_t *bytes; /* malloc'd: key, type and value of one pair after the other */
    size_t n_bytes;
    uint64_t n_pairs;
    uint64_t n_vocab; /* tokens of the tokenizer */
} neap_geometry_pairs;

/* The pairs whose keys begin with prefix. Fails as neap_geometry_read; -ENOMEM. */
int neap_geometry_pairs_read(const char *path, const char *prefix, neap_geometry_pairs *ret_pairs);
#endif
