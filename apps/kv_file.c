/* kv_file.c - see kv_file.h.
 *
 * The file: u32 magic "ggsq", u32 version, u32 words, the words (i32), then one or two caches
 * (a sliding-window model has two) up to the end of the file. The words of llama-server: -1, its
 * version (1), number of tokens, the tokens, number of images (0). A cache: u32 streams; for each
 * stream u32 cells and, unless there are none, for each cell  i32 position, u32 sequences, the
 * sequences (i32 each) u32 whether V is transposed, u32 layers for each layer K: i32 type, u64
 * bytes of a row, the rows for each layer V: the same, or transposed: i32 type, u32 bytes of an
 * element, u32 channels, the channels, each of all cells.
 * A state in memory has a magic and the sequence (8 bytes) in place of what precedes the caches. */
#include "kv_file.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "neap.h"

#define MAGIC 0x67677371u
#define VERSION 3u
#define SERVER_VERSION 1u
#define STATE_HEAD 8u
enum { TYPE_F32 = 0, TYPE_F16 = 1, TYPE_BF16 = 30 }; /* of ggml */

typedef struct cursor {
    uint8_t *pos, *end;
    bool failed;
} cursor;

static uint8_t *take(cursor *c, uint64_t n, uint64_t size) {
    uint8_t *at = c->pos;
    if (c->failed || (size && n > (uint64_t)(c->end - c->pos) / size)) {
        c->failed = true;
        return NULL;
    }
    c->pos += n * size;
    return at;
}

static uint32_t take_u32(cursor *c) {
    uint32_t value = 0;
    const uint8_t *at = take(c, 1, sizeof value);
    if (at) memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t take_u64(cursor *c) {
    const uint64_t low = take_u32(c);
    return low | (uint64_t)take_u32(c) << 32;
}

static int kv_type(uint32_t type) {
    return type == TYPE_F16    ? NEAP_KV_F16
           : type == TYPE_BF16 ? NEAP_KV_BF16
           : type == TYPE_F32  ? NEAP_KV_F32
                               : NEAP_KV_OTHER;
}

/* Keys, or values that are not transposed: a row a cell. */
static void take_rows(cursor *c, uint32_t n_cells, neap_codec_plane *plane) {
    const int type = kv_type(take_u32(c));
    const size_t row = take_u64(c), elem = type == NEAP_KV_F32 ? 4 : type == NEAP_KV_OTHER ? 1 : 2;
    if (row % elem != 0 || row / elem > UINT32_MAX) c->failed = true;
    *plane = (neap_codec_plane){.data = take(c, n_cells, row),
                                .n_rows = n_cells,
                                .row_elems = (uint32_t)(row / elem),
                                .row_bytes = row,
                                .row_stride = row,
                                .type = type};
}

static void take_channels(cursor *c, uint32_t n_cells, neap_codec_plane *plane) {
    const int type = kv_type(take_u32(c));
    const size_t row = (size_t)take_u32(c) * n_cells;
    const uint32_t n_channels = take_u32(c);
    *plane = (neap_codec_plane){.data = take(c, n_channels, row),
                                .n_rows = n_channels,
                                .row_elems = n_cells,
                                .row_bytes = row,
                                .row_stride = row,
                                .type = type};
}

static int add_chunk(neap_kv_file *file, const neap_codec_chunk *chunk) {
    if (file->n_chunks == file->cap_chunks) {
        const size_t cap = file->cap_chunks ? 2 * file->cap_chunks : 256;
        neap_codec_chunk *chunks = realloc(file->chunks, cap * sizeof *chunks);
        if (!chunks) return -ENOMEM;
        file->chunks = chunks;
        file->cap_chunks = cap;
    }
    file->chunks[file->n_chunks++] = *chunk;
    file->raw_bytes += neap_codec_raw_bytes(chunk);
    return 0;
}

/* Cuts a layer into chunks, as the engine does. */
static int add_layer(neap_kv_file *file, const neap_codec_plane planes[2], uint32_t n_cells,
                     bool transposed) {
    const uint32_t step = transposed ? n_cells : NEAP_CHUNK_CELLS;
    int err = 0;
    for (uint32_t first = 0; first < n_cells && !err; first += step) {
        neap_codec_chunk chunk = {.n_planes = 2, .planes = {planes[0], planes[1]}};
        for (size_t i = 0; i < 2 && !transposed; i++) {
            neap_codec_plane *plane = &chunk.planes[i];
            plane->data = (uint8_t *)plane->data + first * plane->row_stride;
            plane->n_rows = n_cells - first < step ? n_cells - first : step;
        }
        err = add_chunk(file, &chunk);
    }
    return err;
}

static int take_stream(cursor *c, neap_kv_file *file) {
    const uint32_t n_cells = take_u32(c);
    if (n_cells == 0) return 0;
    for (uint32_t i = 0; i < n_cells && !c->failed; i++) {
        take_u32(c);
        take(c, take_u32(c), sizeof(int32_t));
    }
    const uint32_t transposed = take_u32(c), n_layers = take_u32(c);
    if (c->failed || transposed > 1 || n_layers == 0 || n_layers > 4096) return NEAP_E_CORRUPT;
    neap_codec_plane(*planes)[2] = calloc(n_layers, sizeof *planes);
    if (!planes) return -ENOMEM;
    for (uint32_t i = 0; i < n_layers; i++)
        take_rows(c, n_cells, &planes[i][0]);
    for (uint32_t i = 0; i < n_layers; i++) {
        if (transposed)
            take_channels(c, n_cells, &planes[i][1]);
        else
            take_rows(c, n_cells, &planes[i][1]);
    }
    int err = c->failed ? NEAP_E_CORRUPT : 0;
    for (uint32_t i = 0; i < n_layers && !err; i++)
        err = add_layer(file, planes[i], n_cells, transposed);
    free(planes);
    if (file->n_caches++ == 0) {
        file->n_layers = n_layers;
        file->n_cells = n_cells;
    }
    return err;
}

static int take_caches(cursor *c, neap_kv_file *file) {
    int err = 0;
    while (!err && !c->failed && c->pos < c->end) {
        const uint32_t n_streams = take_u32(c);
        for (uint32_t s = 0; s < n_streams && !err && !c->failed; s++)
            err = take_stream(c, file);
    }
    return err ? err : c->failed || file->n_chunks == 0 ? NEAP_E_CORRUPT : 0;
}

static int parse(neap_kv_file *file) {
    cursor c = {.pos = file->bytes, .end = file->bytes + file->n_bytes};
    const uint32_t magic = take_u32(&c), version = take_u32(&c);
    if (c.failed || magic != MAGIC) return NEAP_E_CORRUPT;
    if (version != VERSION) return NEAP_E_VERSION;
    take(&c, take_u32(&c), sizeof(int32_t));
    return take_caches(&c, file);
}

static int read_all(const char *path, neap_kv_file *file) {
    FILE *stream = fopen(path, "rbe");
    if (!stream) return -errno;
    int err = fseek(stream, 0, SEEK_END) == 0 ? 0 : -errno;
    const long size = err ? 0 : ftell(stream);
    if (size > 0) file->bytes = malloc((size_t)size);
    rewind(stream);
    if (size > 0 && !file->bytes) err = -ENOMEM;
    if (!err) file->n_bytes = file->bytes ? fread(file->bytes, 1, (size_t)size, stream) : 0;
    if (!err && file->n_bytes != (size_t)size) err = -EIO;
    fclose(stream);
    return err;
}

int neap_kv_file_load(const char *path, neap_kv_file *ret_file) {
    neap_kv_file file = {0};
    int err = read_all(path, &file);
    if (!err) err = parse(&file);
    if (err)
        neap_kv_file_free(&file);
    else
        *ret_file = file;
    return err;
}

int neap_kv_file_of_state(uint8_t *bytes, size_t n_bytes, neap_kv_file *ret_file) {
    neap_kv_file file = {.bytes = bytes, .n_bytes = n_bytes};
    cursor c = {.pos = bytes, .end = bytes + n_bytes};
    take(&c, 1, STATE_HEAD);
    const int err = take_caches(&c, &file);
    if (err)
        neap_kv_file_free(&file);
    else
        *ret_file = file;
    return err;
}

void neap_kv_file_free(neap_kv_file *file) {
    free(file->bytes);
    free(file->chunks);
    *file = (neap_kv_file){0};
}

size_t neap_kv_file_layer_chunks(const neap_kv_file *file) {
    return (file->n_cells + NEAP_CHUNK_CELLS - 1) / NEAP_CHUNK_CELLS;
}

const neap_codec_plane *neap_kv_file_rows(const neap_kv_file *file, uint32_t layer, size_t plane) {
    return &file->chunks[layer * neap_kv_file_layer_chunks(file)].planes[plane];
}

/* ---- tiling ---- */

static void put_u32(FILE *out, uint32_t value) {
    fwrite(&value, sizeof value, 1, out);
}

static void put_head(FILE *out, const int32_t *tokens, uint32_t n_tokens) {
    const uint32_t words[] = {MAGIC, VERSION, n_tokens + 4, UINT32_MAX, SERVER_VERSION, n_tokens};
    fwrite(words, sizeof words, 1, out);
    fwrite(tokens, sizeof *tokens, n_tokens, out);
    put_u32(out, 0);
}

/* One stream of cells, each of sequence 0 at the position that is its number. */
static void put_cells(FILE *out, uint32_t n_cells) {
    put_u32(out, 1);
    put_u32(out, n_cells);
    for (uint32_t i = 0; i < n_cells; i++) {
        const uint32_t cell[] = {i, 1, 0};
        fwrite(cell, sizeof cell, 1, out);
    }
}

/* Rows of all cells lie together in the file read: its first chunk's plane begins there. */
static void put_rows(FILE *out, const neap_codec_plane *first, uint32_t n_from, uint32_t n_cells) {
    const uint64_t row = first->row_bytes;
    put_u32(out, TYPE_F16);
    fwrite(&row, sizeof row, 1, out);
    for (uint32_t done = 0, n; done < n_cells && !ferror(out); done += n) {
        n = n_cells - done < n_from ? n_cells - done : n_from;
        fwrite(first->data, row, n, out);
    }
}

static int write_tiled(FILE *out, const neap_kv_file *file, const int32_t *tokens,
                       uint32_t n_tokens) {
    const size_t step = file->n_chunks / file->n_layers;
    put_head(out, tokens, n_tokens);
    put_cells(out, n_tokens);
    put_u32(out, 0); /* V is not transposed */
    put_u32(out, file->n_layers);
    for (size_t plane = 0; plane < 2; plane++)
        for (size_t i = 0; i < file->n_layers; i++)
            put_rows(out, &file->chunks[i * step].planes[plane], file->n_cells, n_tokens);
    return ferror(out) ? -errno : 0;
}

/* Chunks of a transposed V hold all cells of it as columns. */
static bool can_tile(const neap_kv_file *file) {
    if (file->n_caches != 1 || file->n_chunks % file->n_layers != 0) return false;
    for (size_t i = 0; i < file->n_chunks; i++)
        for (size_t p = 0; p < 2; p++)
            if (file->chunks[i].planes[p].type != NEAP_KV_F16 ||
                file->chunks[i].planes[p].n_rows > NEAP_CHUNK_CELLS)
                return false;
    return true;
}

int neap_kv_file_tile(const char *from, const char *to, const int32_t *tokens, uint32_t n_tokens) {
    neap_kv_file file;
    int err = neap_kv_file_load(from, &file);
    if (err) return err;
    FILE *out = can_tile(&file) ? fopen(to, "wbe") : NULL;
    err = out ? 0 : can_tile(&file) ? -errno : NEAP_E_VERSION;
    if (!err) err = write_tiled(out, &file, tokens, n_tokens);
    if (out && fclose(out) != 0 && !err) err = -errno;
    neap_kv_file_free(&file);
    return err;
}
