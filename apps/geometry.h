/* geometry.h - the little that commands need to know of a model file: its geometry. */
#ifndef NEAP_APPS_GEOMETRY_H
#define NEAP_APPS_GEOMETRY_H

#include <stdint.h>

typedef struct neap_geometry {
    uint64_t digest;         /* of its size and first MiB, where metadata lies */
    uint32_t n_layers;       /* 0: not said */
    uint64_t kv_chunk_bytes; /* one layer's chunk of 256 cells in f16; 0: not said */
} neap_geometry;

/* Fails: -errno; NEAP_E_CORRUPT (not GGUF, or its metadata does not hold together). */
int neap_geometry_read(const char *path, neap_geometry *ret_geometry);
#endif
