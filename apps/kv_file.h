/* kv_file.h - the KV cache in a slot file of llama-server (llama.cpp's sequence state, version 3),
 * as the chunks that codecs code; and such a state in memory.
 * Errors     0 or negative (neap.h): NEAP_E_CORRUPT for what is not such a file, or one of a model
 *            whose state holds more than keys and values.
 * Ownership  the chunks point into the file's bytes and go with it. */
#ifndef NEAP_APPS_KV_FILE_H
#define NEAP_APPS_KV_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "codec.h"

typedef struct neap_kv_file {
    uint8_t *bytes;
    size_t n_bytes;
    neap_codec_chunk *chunks; /* K and V of 256 cells of a layer; all cells where V is transposed */
    size_t n_chunks, cap_chunks;
    uint32_t n_caches, n_layers, n_cells; /* layers and cells of the first cache */
    uint64_t raw_bytes;                   /* of all chunks */
} neap_kv_file;

int neap_kv_file_load(const char *path, neap_kv_file *ret_file);
/* The same of what llama_state_seq_get_data() gave (malloc'd; taken over, also on failure). */
int neap_kv_file_of_state(uint8_t *bytes, size_t n_bytes, neap_kv_file *ret_file);
void neap_kv_file_free(neap_kv_file *file); /* takes a zeroed one */
/* Chunks of each layer of the first cache, where V is not transposed. */
size_t neap_kv_file_layer_chunks(const neap_kv_file *file);
/* The first cache's rows of a layer, all cells, one after the other: K (plane 0) or V (1), which is
 * not transposed. n_rows is of the first chunk only. */
const neap_codec_plane *neap_kv_file_rows(const neap_kv_file *file, uint32_t layer, size_t plane);

/* Writes the file `to` of a context of these tokens, whose keys and values are those of the file
 * `from` again and again: for measuring time, where what they are does not matter.
 * Fails     also NEAP_E_VERSION where V is transposed, keys and values are not f16, or there are
 * two caches. `to` is then not whole. */
int neap_kv_file_tile(const char *from, const char *to, const int32_t *tokens, uint32_t n_tokens);
#endif
