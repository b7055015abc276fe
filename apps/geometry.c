/* geometry.c - see geometry.h. Reads metadata from front to back and keeps the whole numbers it
 * knows; lengths in a damaged file lead past its end, which is noticed. */
#include "geometry.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "klt_file.h"
#include "neap.h"

#define N_PAIRS_MAX 65536u
#define KEY_MAX 256u

enum { TYPE_BOOL = 7, TYPE_STRING = 8, TYPE_ARRAY = 9, TYPE_U64 = 10, N_TYPES = 13 };
static const uint8_t type_bytes[N_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

typedef struct metadata {
    uint64_t block_count, embedding_length, head_count, head_count_kv, key_length, value_length;
    uint64_t context_length;
    uint64_t n_array; /* entries of the array read last */
} metadata;

static bool get(FILE *file, uint64_t *ret_value, size_t n_bytes) {
    unsigned char bytes[8] = {0};
    if (fread(bytes, 1, n_bytes, file) != n_bytes) return false;
    *ret_value = 0;
    for (size_t i = n_bytes; i-- > 0;)
        *ret_value = *ret_value << 8 | bytes[i];
    return true;
}

/* Seeking past the end is no error; the next read then is. */
static bool skip(FILE *file, uint64_t n_bytes) {
    return n_bytes <= INT64_MAX / 2 && fseeko(file, (off_t)n_bytes, SEEK_CUR) == 0;
}

static bool get_string(FILE *file, char text[KEY_MAX]) {
    uint64_t len;
    if (!get(file, &len, 8)) return false;
    text[0] = '\0';
    if (len >= KEY_MAX) return skip(file, len);
    if (fread(text, 1, len, file) != len) return false;
    text[len] = '\0';
    return true;
}

static bool skip_array(FILE *file, uint64_t *ret_n) {
    uint64_t type, n, len;
    if (!get(file, &type, 4) || !get(file, &n, 8) || type >= N_TYPES || type == TYPE_ARRAY)
        return false;
    *ret_n = n;
    if (type != TYPE_STRING) return n <= INT64_MAX / 16 && skip(file, n * type_bytes[type]);
    for (uint64_t i = 0; i < n; i++)
        if (!get(file, &len, 8) || !skip(file, len)) return false;
    return true;
}

static void keep(metadata *g, const char *key, uint64_t value) {
    const struct {
        const char *end;
        uint64_t *value;
    } known[] = {
        {".block_count", &g->block_count},         {".embedding_length", &g->embedding_length},
        {".attention.head_count", &g->head_count}, {".attention.head_count_kv", &g->head_count_kv},
        {".attention.key_length", &g->key_length}, {".attention.value_length", &g->value_length},
        {".context_length", &g->context_length},
    };
    const char *dot = strchr(key, '.');
    for (size_t i = 0; dot && i < sizeof known / sizeof *known; i++)
        if (strcmp(dot, known[i].end) == 0) *known[i].value = value;
}

static bool read_pair(FILE *file, metadata *g, char key[KEY_MAX]) {
    char text[KEY_MAX];
    uint64_t type, value;
    if (!get_string(file, key) || !get(file, &type, 4) || type >= N_TYPES) return false;
    if (type == TYPE_ARRAY) return skip_array(file, &g->n_array);
    if (type == TYPE_STRING) return get_string(file, text);
    if (!get(file, &value, type_bytes[type])) return false;
    if (type < TYPE_BOOL || type == TYPE_U64) keep(g, key, value);
    return true;
}

/* The number of pairs, which come next. */
static bool read_head(FILE *file, uint64_t *ret_n_pairs) {
    char magic[4];
    uint64_t version, n_tensors;
    if (fread(magic, 1, 4, file) != 4 || memcmp(magic, "GGUF", 4) != 0) return false;
    if (!get(file, &version, 4) || !get(file, &n_tensors, 8) || !get(file, ret_n_pairs, 8))
        return false;
    return version >= 2 && *ret_n_pairs <= N_PAIRS_MAX;
}

static bool read_pairs(FILE *file, metadata *g) {
    char key[KEY_MAX];
    uint64_t n_pairs;
    if (!read_head(file, &n_pairs)) return false;
    for (uint64_t i = 0; i < n_pairs; i++)
        if (!read_pair(file, g, key)) return false;
    return true;
}

static uint64_t chunk_bytes(const metadata *g) {
    const uint64_t by_head = g->head_count ? g->embedding_length / g->head_count : 0;
    const uint64_t n_kv = g->head_count_kv ? g->head_count_kv : g->head_count;
    const uint64_t k = g->key_length ? g->key_length : by_head;
    const uint64_t v = g->value_length ? g->value_length : by_head;
    if (n_kv > UINT16_MAX || k > UINT16_MAX || v > UINT16_MAX) return 0;
    return n_kv * (k + v) * sizeof(uint16_t) * NEAP_CHUNK_CELLS;
}

int neap_geometry_read(const char *path, neap_geometry *ret_geometry) {
    FILE *file = fopen(path, "rbe");
    if (!file) return -errno;
    metadata g = {0};
    neap_geometry geometry = {0};
    int err = neap_model_digest(path, &geometry.digest);
    if (!err && !read_pairs(file, &g)) err = ferror(file) ? -EIO : NEAP_E_CORRUPT;
    fclose(file);
    if (err) return err;
    geometry.n_layers = g.block_count <= UINT16_MAX ? (uint32_t)g.block_count : 0;
    geometry.n_context = g.context_length <= UINT32_MAX ? (uint32_t)g.context_length : 0;
    geometry.kv_chunk_bytes = chunk_bytes(&g);
    *ret_geometry = geometry;
    return 0;
}

/* Appends what lies in the file from begin up to where it is read next. */
static int append(FILE *file, off_t begin, neap_geometry_pairs *pairs) {
    const off_t end = ftello(file);
    const size_t len = (size_t)(end - begin);
    uint8_t *bytes = realloc(pairs->bytes, pairs->n_bytes + len);
    if (!bytes) return -ENOMEM;
    pairs->bytes = bytes;
    if (fseeko(file, begin, SEEK_SET) != 0) return -errno;
    if (fread(bytes + pairs->n_bytes, 1, len, file) != len) return NEAP_E_CORRUPT;
    pairs->n_bytes += len;
    pairs->n_pairs++;
    return 0;
}

static int collect(FILE *file, const char *prefix, neap_geometry_pairs *pairs) {
    uint64_t n_pairs;
    if (!read_head(file, &n_pairs)) return NEAP_E_CORRUPT;
    for (uint64_t i = 0; i < n_pairs; i++) {
        char key[KEY_MAX];
        metadata g = {0};
        const off_t begin = ftello(file);
        if (!read_pair(file, &g, key)) return NEAP_E_CORRUPT;
        if (strcmp(key, "tokenizer.ggml.tokens") == 0) pairs->n_vocab = g.n_array;
        if (strncmp(key, prefix, strlen(prefix)) != 0) continue;
        const int err = append(file, begin, pairs);
        if (err) return err;
    }
    return 0;
}

int neap_geometry_pairs_read(const char *path, const char *prefix, neap_geometry_pairs *ret_pairs) {
    FILE *file = fopen(path, "rbe");
    if (!file) return -errno;
    neap_geometry_pairs pairs = {0};
    const int err = collect(file, prefix, &pairs);
    fclose(file);
    if (err)
        free(pairs.bytes);
    else
        *ret_pairs = pairs;
    return err;
}
