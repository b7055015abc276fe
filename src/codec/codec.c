/* codec.c - the registry of codecs. */
#include "codec.h"

#include <string.h>

#include "codec_int.h"

static const neap_codec *const codecs[] = {&neap_codec_q8, &neap_codec_cachegen, &neap_codec_none};

const neap_codec *neap_codec_at(size_t i) {
    return i < sizeof codecs / sizeof codecs[0] ? codecs[i] : NULL;
}

const neap_codec *neap_codec_find(const char *name) {
    for (size_t i = 0; name && neap_codec_at(i); i++)
        if (strcmp(codecs[i]->name, name) == 0) return codecs[i];
    return NULL;
}

size_t neap_codec_raw_bytes(const neap_codec_chunk *chunk) {
    size_t bytes = 0;
    for (size_t i = 0; i < chunk->n_planes; i++)
        bytes += chunk->planes[i].n_rows * chunk->planes[i].row_bytes;
    return bytes;
}
