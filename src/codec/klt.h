/* klt.h - the transform codec: 256 cells of K and V of adjacent layers against bases trained for
 * the model (Karhunen-Loeve transform), any ratio by the bits of each component.
 *
 * A klt *model* is a file made once for a GGUF (`neap train`). It divides the layers with a growing
 * cache into *blocks* of 1 to 4 adjacent layers; a block is what one call codes, a chunk of it
 * decodes alone. A block's columns - the elements of its K and V rows - belong to its *groups*,
 * each a range of KV heads with a transform of its own: one group of all heads (joint profiles) or
 * one for each head. Columns of a group: K of its heads for the first layer, the second, ..., then
 * V likewise; K before RoPE.
 *
 * Shapes     rows are cells, f16; f and g row-major.
 * Errors     0 or negative (neap.h); on failure ret_ values are untouched. decode: NEAP_E_CORRUPT;
 *            the planes may then be partly written. It never reads or writes outside what it is
 *            given, whatever the bytes.
 * Not idempotent: coding again what was decoded adds a little error (KLT grows by some 0.2 % a
 *            time); keep the bytes of a chunk that has not changed.
 * Exact      all kernels give the same bytes when they encode and when they decode: sums in f32 are
 *            chains of fused multiply-adds in the order of the components, integers are integers.
 * Threads    an open model is immutable: any number of threads, each with its own scratch.
 * Layout     docs/formats/klt.md (the file, the chunk, and what is computed). */
#ifndef NEAP_CODEC_KLT_H
#define NEAP_CODEC_KLT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    NEAP_KLT_LAYERS = 4,     /* most layers of a block */
    NEAP_KLT_ROWS = 256,     /* most rows of a chunk */
    NEAP_KLT_COLUMNS = 2048, /* most columns, and components, of a group */
    NEAP_KLT_HEAD_DIM = 512, /* most elements of a head */
    NEAP_KLT_HEADS = 256,    /* most KV heads of a layer */
    NEAP_KLT_BITS = 8,       /* most bits of a component */
    NEAP_KLT_ROPES = 16,     /* most RoPE tables, blocks and groups of a model */
    NEAP_KLT_BLOCKS = 4096,
    NEAP_KLT_GROUPS = 65536,
    NEAP_KLT_FIRST_EXACT = 4, /* rows of positions below this are kept exactly */
    NEAP_KLT_NAME = 64,       /* bytes of a name, with its NUL */
};

enum { NEAP_KLT_PER_HEAD = 1, NEAP_KLT_ONE_LAYER = 2, NEAP_KLT_FOUR_LAYERS = 3 }; /* profiles */
/* Which elements of a head are a pair: none, (2 i, 2 i + 1), (i, i + n_dims / 2). */
enum { NEAP_KLT_ROPE_NONE = 0, NEAP_KLT_ROPE_NORM = 1, NEAP_KLT_ROPE_NEOX = 2 };

/* The cached pair is magnitude * R(position * radians[i]) * (pair before RoPE); frequency factors,
 * scaling and YaRN are folded into radians and magnitude. Elements from n_dims on are not turned
 * but, like llama.cpp's, multiplied by nothing. */
typedef struct neap_klt_rope {
    uint32_t mode;                        /* NEAP_KLT_ROPE_* */
    uint32_t n_dims;                      /* even, at most the head's K elements; 0 for NONE */
    float magnitude;                      /* finite, above 0; 1 without YaRN */
    float radians[NEAP_KLT_HEAD_DIM / 2]; /* [n_dims / 2] for each position */
} neap_klt_rope;

typedef struct neap_klt_block {
    uint32_t n_layers;                           /* 1 .. NEAP_KLT_LAYERS */
    uint32_t layers[NEAP_KLT_LAYERS];            /* ascending; no layer is in two blocks */
    uint32_t ropes[NEAP_KLT_LAYERS];             /* RoPE table of each layer */
    uint32_t n_kv_heads, k_head_dim, v_head_dim; /* of every layer of the block */
    uint32_t first_group, n_groups;              /* its groups follow those of the block before */
} neap_klt_block;

/* y = (x - mean) * f; codes of y; x^ = y^ * g + mu. Read-only views, owned by whoever filled them.
 */
typedef struct neap_klt_group {
    uint32_t first_head, n_heads; /* the groups of a block cover its heads in order */
    uint32_t n_components;        /* kept: 1 .. columns */
    /* sd * unit is in the same unit in all groups: what is left of bits at a higher ratio goes by
     * it.
     */
    float unit; /* 1e-20 .. 1e20 */
    /* A row whose error (see metric) is above this may become an outlier; 0: every row may. */
    float outlier_error;
    const uint8_t *bits; /* [n_components] 1 .. NEAP_KLT_BITS, not ascending */
    const float *sd;     /* [n_components] finite, above 0, not ascending */
    /* f16 [n_columns][n_components]. NULL where the metric is given: half the file, and of the
     * memory, is not needed; then y = (x - mean) S S g', up to the rounding of g. */
    const uint16_t *f;
    const uint16_t *g; /* f16 [n_components][n_columns] */
    /* S, f16, symmetric: for each head of each plane, in the order of the columns, [dim][dim]; B is
     * orthonormal, f = S B, g = B' S^-1. The error of a row is that of its components and, where
     * they are fewer than 3/4 of the columns, what they do not span: |(x - x^) S|^2. What is
     * decoded with integers is rounded so that its error is small in this measure. NULL: neither.
     */
    const uint16_t *metric;
} neap_klt_group;

/* A model as it is written, and as an open one shows itself. */
typedef struct neap_klt_spec {
    char name[NEAP_KLT_NAME]; /* of the GGUF, for messages */
    uint64_t digest;  /* of the GGUF: XXH3 of its size (8 bytes, little-endian), first MiB */
    uint32_t profile; /* NEAP_KLT_PER_HEAD ... */
    /* Of the rows of the groups of a chunk at most so many, to the nearest, become outliers. */
    uint32_t outlier_permille; /* 0 .. 100; the study: 4 .. 8 */
    float ratio;               /* 1 .. 1000: what the bits are for, and the least that opens */
    uint32_t n_ropes, n_blocks, n_groups;
    const neap_klt_rope *ropes;
    const neap_klt_block *blocks;
    const neap_klt_group *groups;
    /* Decoded values of the codes 0 .. 2^b - 1 at tables[b], of unit variance, ascending, finite;
     * b = 1 .. NEAP_KLT_BITS; tables[0] is not used. */
    const float *tables[NEAP_KLT_BITS + 1];
} neap_klt_spec;

/* The tables of the study (trimmed, unit-variance data), for `neap train`. */
const float *neap_klt_default_table(uint32_t bits);

uint32_t neap_klt_group_columns(const neap_klt_block *block, const neap_klt_group *group);

/* Writes the model file; whoever reads the path meanwhile finds the old file or the new one.
 * Folders that are missing are made. Fails: NEAP_E_BOUND (a field outside its range; says which in
 * the log); -ENOMEM, -errno of the file. */
int neap_klt_model_write(const char *path, const neap_klt_spec *spec);

typedef struct neap_klt_model neap_klt_model;
/* Reads and validates the whole file. Fails: NEAP_E_CORRUPT (damaged: a checksum, a size, a value),
 * NEAP_E_VERSION (not a klt model of this version), NEAP_E_CHANGED (it belongs to another GGUF than
 * digest); each is said in the log with the path and what was wrong. -ENOMEM, -errno of the file.
 */
int neap_klt_model_open(const char *path, uint64_t digest, neap_klt_model **ret_model);
/* The same at a higher ratio than the file's own: bits are allocated again, which leaves components
 * out. Each ratio has an id of its own. Ratio 0: the file's. Fails also: NEAP_E_BOUND (the ratio is
 * below the file's, whose components would not do, or out of reach; nothing is logged). */
int neap_klt_model_open_at(const char *path, uint64_t digest, double ratio,
                           neap_klt_model **ret_model);
/* The same of the file's bytes in memory; name is for messages. */
int neap_klt_model_parse(const void *bytes, size_t len, uint64_t digest, const char *name,
                         neap_klt_model **ret_model);
void neap_klt_model_close(neap_klt_model *model); /* takes NULL */
/* Everything but f, g and metric of the groups (NULL). */
const neap_klt_spec *neap_klt_model_spec(const neap_klt_model *model);
/* Checksum of the file, and of a ratio that is not its own: chunks carry it and decode with no
 * other model. */
uint64_t neap_klt_model_id(const neap_klt_model *model);
/* Bytes of the open model; of a guest, what it would take to store. And of memory that it takes. */
size_t neap_klt_model_bytes(const neap_klt_model *model);
size_t neap_klt_model_memory(const neap_klt_model *model);
/* The block of a layer; -1: the layer is not coded by this model. *ret_at: which of its layers. */
int neap_klt_model_find(const neap_klt_model *model, uint32_t layer, uint32_t *ret_at);

/* Row r of a plane is at data + r * row_stride: all KV heads of one cell, f16. */
typedef struct neap_klt_plane {
    void *data;
    size_t row_stride;
} neap_klt_plane;

/* Cells of the block's layers, with the position that the K of each is turned to. Rows of positions
 * below NEAP_KLT_FIRST_EXACT - so unknown ones, -1, too - and rows with an element that is not
 * finite come back exactly. Decoding to other positions than were encoded turns the K of the other
 * rows to the new ones. */
typedef struct neap_klt_chunk {
    uint32_t block;
    uint32_t n_rows;                                       /* 1 .. NEAP_KLT_ROWS */
    const int32_t *positions;                              /* [n_rows] */
    neap_klt_plane k[NEAP_KLT_LAYERS], v[NEAP_KLT_LAYERS]; /* of the block's layers */
} neap_klt_chunk;

/* f16 bytes of the chunk's rows. */
size_t neap_klt_raw_bytes(const neap_klt_model *model, const neap_klt_chunk *chunk);
/* Upper bound of the encoded bytes (about the raw bytes: rows may have to be kept exactly). */
size_t neap_klt_bound(const neap_klt_model *model, const neap_klt_chunk *chunk);
/* What encoding takes without exact rows, outliers included: for planning. */
size_t neap_klt_expected_bytes(const neap_klt_model *model, const neap_klt_chunk *chunk);
/* Bytes of scratch, aligned to 64, for one call of any block of the model. */
size_t neap_klt_scratch_bytes(const neap_klt_model *model);

/* Fails: NEAP_E_BOUND (cap too small; a field of the chunk out of range). *ret_error, where not
 * NULL: the mean error of the rows and groups that are neither exact nor outliers, in the measure
 * of the outliers. With a metric of a real model it was within 6 % of |(x - x^) S|^2 of what
 * decodes. */
int neap_klt_encode(const neap_klt_model *model, const neap_klt_chunk *chunk, void *scratch,
                    void *dst, size_t cap, size_t *ret_len, float *ret_error);
/* A plane whose data is NULL is not wanted: it is not reconstructed, which is most of the work, and
 * the others get the same bytes. Fails: NEAP_E_CORRUPT (damaged, of another model, block or number
 * of rows); NEAP_E_BOUND. */
int neap_klt_decode(const neap_klt_model *model, const void *src, size_t len,
                    const neap_klt_chunk *chunk, void *scratch);

/* Rows [first_row, first_row + n_rows) and KV heads [first_head, first_head + n_heads) of a chunk.
 */
typedef struct neap_klt_part {
    uint32_t first_row, n_rows, first_head, n_heads;
    bool is_checked; /* an earlier call found the bytes good: they are not looked through again */
} neap_klt_part;
static inline bool neap_klt_part_is_within(const neap_klt_part *part, uint32_t n_rows,
                                           uint32_t n_heads) {
    return part->n_rows > 0 && part->n_heads > 0 && part->first_row <= n_rows &&
           part->n_rows <= n_rows - part->first_row && part->first_head <= n_heads &&
           part->n_heads <= n_heads - part->first_head;
}
/* Decodes only that: the same bytes for less work, which goes with the rows, in whole 64 of them
 * for some of it, and with the heads. chunk is the whole chunk as for neap_klt_decode(), but data
 * of a plane is where row first_row goes; bytes of other rows and heads are not touched. */
int neap_klt_decode_part(const neap_klt_model *model, const void *src, size_t len,
                         const neap_klt_chunk *chunk, const neap_klt_part *part, void *scratch);

/* What the error of encoding is measured against: the mean error of a row that bits and deviations
 * make expect; a component that is not kept has at most the deviation of the last one kept. */
float neap_klt_expected_error(const neap_klt_model *model, uint32_t block);

/* ---- guests (klt_guest.c) ---- */

/* Another codec of the same chunks, behind the same functions: whoever holds blocks coded by klt
 * holds them coded by it. Its ROPE, groups and tables are its own; its expected error is 1. */
typedef struct neap_klt_guest {
    size_t (*bound)(const void *self, uint32_t block, uint32_t n_rows);
    size_t (*expected_bytes)(const void *self, uint32_t block, uint32_t n_rows);
    int (*encode)(const void *self, const neap_klt_chunk *chunk, void *scratch, void *dst,
                  size_t cap, size_t *ret_len, float *ret_error);
    /* part NULL: all of it */
    int (*decode)(const void *self, const void *src, size_t len, const neap_klt_chunk *chunk,
                  const neap_klt_part *part, void *scratch);
    void (*free)(void *self);
} neap_klt_guest;

typedef struct neap_klt_guest_model {
    const neap_klt_guest *guest;
    void *self;                   /* the model's where it is made */
    const neap_klt_block *blocks; /* copied; without ropes and groups */
    uint32_t n_blocks;
    uint64_t id;
    size_t bytes, memory_bytes, scratch_bytes; /* kept for it; while it is open; of one call */
} neap_klt_guest_model;

/* Fails: -ENOMEM. */
int neap_klt_model_of_guest(const neap_klt_guest_model *guest, neap_klt_model **ret_model);
bool neap_klt_is_guest(const neap_klt_model *model);

/* ---- allocation of bits (klt_allocate.c) ---- */

typedef struct neap_klt_spectrum {
    uint32_t n;      /* components */
    const float *sd; /* [n] descending */
    uint8_t *bits;   /* [n] out: 0 .. NEAP_KLT_BITS, not ascending */
} neap_klt_spectrum;

/* Distortion of unit variance at so many bits (0: 1). */
double neap_klt_distortion(uint32_t bits);
/* Chooses the bits of all groups together: the least sum of sd^2 * distortion(bits) whose bits, all
 * together, are at most budget_bits (a row's). Greedy on the falling gains of each component, which
 * is optimal at every budget it reaches exactly. Returns the bits given out. *ret_distortion, where
 * not NULL: the sum. */
uint64_t neap_klt_allocate(const neap_klt_spectrum *groups, size_t n_groups, uint64_t budget_bits,
                           double *ret_distortion);
/* Codes, mean and expected outliers of a chunk of NEAP_KLT_ROWS rows, in bytes, over its f16 bytes:
 * the row's bits that a group's share of a ratio leaves. 0: not reachable. */
uint64_t neap_klt_budget_bits(uint32_t n_columns, uint32_t outlier_permille, double ratio);
#endif
