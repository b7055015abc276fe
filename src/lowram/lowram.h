/* lowram.h - LowRAM: keys of adjacent layers on a shared low-rank basis, values predicted from the
 * keys, both made for one context (papers/lowram: 3, Appendices B and C).
 *
 * A *fit* is made once from the rows of a context. It divides the layers into *groups* of up to g
 * adjacent layers of one shape. Of a group it holds the mean of the keys, the basis B, and for each
 * layer and KV head a predictor of the values (value.h); from then on *chunks* of up to 256 cells
 * of a group's layers code and decode alone:
 *
 *     k = mean + a B'           k: a cell's keys of all layers of the group before RoPE, a: its row
 *     v = predictor(k) + residual        residuals: of the rows that are predicted worst
 *
 * a and residuals are quantised (TurboQuant): turned at random, so that their elements are nearly
 * normal, one scale a row, Lloyd-Max codes. The turn of a lies in B and costs nothing. Cells that
 * came after the fit are coded with it as well (incremental); the error that encoding reports,
 * beside the fit's own, tells when they have left it behind.
 *
 * Departures from the paper, each of them an option: keys are centred; the first rows of a context
 * are exact. Which residuals are kept follows from a threshold for each head, that of the paper's
 * share over the whole context.
 *
 * Shapes     rows are cells, f16; columns of a group: for each layer, its KV heads' elements.
 * Errors     0 or negative (neap.h); on failure ret_ values are untouched. It never reads or writes
 *            outside what it is given, whatever the bytes.
 * Not idempotent: coding again what was decoded adds error; keep the bytes of an unchanged chunk.
 * Threads    a fit is immutable: any number of threads, each with its own scratch. The matrix
 *            products are BLAS's, with the threads that the program gives it.
 * Layout     docs/formats/lowram.md. */
#ifndef NEAP_LOWRAM_LOWRAM_H
#define NEAP_LOWRAM_LOWRAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "klt.h"
#include "value.h"

enum {
    NEAP_LOWRAM_LAYERS = 8, /* most layers of a group */
    NEAP_LOWRAM_ROWS = 256, /* most rows of a chunk */
    NEAP_LOWRAM_COLUMNS = 8192,
    NEAP_LOWRAM_HEAD_DIM = NEAP_KLT_HEAD_DIM,
    NEAP_LOWRAM_HEADS = NEAP_KLT_HEADS,
    NEAP_LOWRAM_GROUPS = 1024, /* most groups of a fit */
    NEAP_LOWRAM_F16 = 16,      /* bits: not quantised; else 1 .. 8 */
    NEAP_LOWRAM_SAMPLE = 4096, /* rows an engine's fit looks at: more hardly change it */
};

/* The chunk of n_chunks of NEAP_LOWRAM_ROWS rows that is the i-th of the n which a fit looks at. */
static inline uint32_t neap_lowram_sampled(uint32_t i, uint32_t n, uint32_t n_chunks) {
    return (uint32_t)((uint64_t)i * n_chunks / n);
}

/* ---- options ---- */

enum {
    NEAP_LOWRAM_AUTO = 0,       /* by the number of columns */
    NEAP_LOWRAM_GRAM = 1,       /* eigenvectors of the Gram matrix */
    NEAP_LOWRAM_RANDOMISED = 2, /* randomised SVD with shifted Cholesky-QR */
};
enum { NEAP_LOWRAM_WORST = 0, NEAP_LOWRAM_RANDOM = 1 }; /* whose residuals are kept */
enum {                                                  /* what values are predicted from */
       NEAP_LOWRAM_FROM_KEYS = 0,                       /* the keys of their own layer and head */
       NEAP_LOWRAM_FROM_LAYER = 1, /* likewise, and the linear branch from all heads of the layer */
       NEAP_LOWRAM_FROM_PREVIOUS = 2, /* those of the layer before (a group's first: its own) */
       NEAP_LOWRAM_FROM_ROW = 3,      /* the group's row a */
};

typedef struct neap_lowram_options {
    double ratio; /* f16 bytes of the context over all bytes kept for it; above 1 */
    double key_ratio, value_ratio; /* of either alone; 0: ratio */
    uint32_t group_layers;         /* g */
    uint32_t rank;                 /* 0: from the budget (eq. 11, 14) */
    double residual_share;         /* p, of the rows; negative: from the budget (eq. 13, 15) */
    uint32_t a_bits, b_bits, residual_bits; /* 1 .. 8 or NEAP_LOWRAM_F16 */
    double hidden_factor;  /* gamma: hidden units of a predictor over its inputs; 0: only linear */
    uint32_t first_exact;  /* rows of positions below this are kept exactly */
    bool not_centred;      /* as in the paper: the mean is zero */
    bool shared_predictor; /* one for all KV heads of a layer */
    int factorisation, residuals, source; /* NEAP_LOWRAM_AUTO, _WORST, _FROM_KEYS ... */
    uint64_t seed;                        /* of the random turns */
    const neap_value_options *values;     /* NULL: the defaults of NEAP_VALUE_RIDGE */
    /* May change the fit of one predictor: its options, and the predictor (of its shape, all zero)
     * that it starts from, for keys less mean (of the first of the heads that share it). What the
     * options point to must live until the next call or the end of the fit. NULL: no. */
    void (*start)(void *ctx, uint32_t layer, uint32_t head, const float *mean,
                  neap_value_options *inout_options, neap_value *io);
    void *start_ctx;
    /* The fit looks at no more rows than about this many, whole chunks, evenly spread; 0: at all.
     */
    uint32_t sample_rows;
    /* The ratio is that of a context of so many rows, to which this one is to grow; fewer than it
     * has: its own. */
    uint32_t budget_rows;
    /* Called before the fit first reads the planes of n_layers from first_layer on, which it does
     * until the next such call, and with n_layers 0 now and then between: anything but 0 ends the
     * fit, which fails with it. NULL: none. */
    int (*go_on)(void *ctx, uint32_t first_layer, uint32_t n_layers);
    void *go_on_ctx;
} neap_lowram_options;

/* The paper's g = 4, B f16, residuals 2 bit, gamma = 1; A 5 bit where the paper has 4: at the same
 * bytes the error is less by a quarter to a third. Keys centred, 4 rows exact. */
void neap_lowram_defaults(neap_lowram_options *ret_options, double ratio);

/* ---- a context ---- */

typedef struct neap_lowram_layer {
    uint32_t layer; /* the model's number; ascending */
    uint32_t n_kv_heads, k_head_dim, v_head_dim;
    neap_klt_rope rope; /* what its cached keys are turned by */
} neap_lowram_layer;

typedef struct neap_lowram_context {
    uint32_t n_rows;
    const int32_t *positions; /* [n_rows] that K is turned to; -1: unknown, such rows are exact */
    const neap_klt_plane *k, *v; /* [n_layers] each: n_rows rows */
} neap_lowram_context;

/* What a group of so many layers like this one costs, for a context of n_rows (Appendix C), or of
 * budget_rows. Bytes
 * that values do not need, all rows having their residuals, are the keys'. */
typedef struct neap_lowram_budget {
    uint32_t rank, hidden;
    uint32_t n_residuals; /* of each layer and head; residual_share = n_residuals / n_rows */
    uint64_t raw_bytes;   /* f16 */
    uint64_t fixed_key_bytes, fixed_value_bytes; /* in the fit: mean, B; predictors, thresholds */
    uint64_t key_bytes, value_bytes; /* all, with those and the rows; exact rows and headers too */
} neap_lowram_budget;

/* Fails: NEAP_E_BUDGET (what does not depend on the rows takes more than the ratio allows: the
 * context is too short); NEAP_E_BOUND (an option or a shape out of its range). */
int neap_lowram_plan(const neap_lowram_options *options, const neap_lowram_layer *layer,
                     uint32_t n_layers, uint32_t n_rows, neap_lowram_budget *ret_budget);

/* The fewest rows, in whole chunks, of a context that all layers can be planned for; 0: none. */
uint32_t neap_lowram_rows_needed(const neap_lowram_options *options,
                                 const neap_lowram_layer *layers, uint32_t n_layers);

/* ---- the fit ---- */

typedef struct neap_lowram neap_lowram;

/* Fails: as neap_lowram_plan(); as go_on; -ENOMEM; -EDOM (numbers that no factorisation exists
 * for). */
int neap_lowram_fit(const neap_lowram_options *options, const neap_lowram_layer *layers,
                    uint32_t n_layers, const neap_lowram_context *context, neap_lowram **ret_fit);
void neap_lowram_free(neap_lowram *fit); /* takes NULL */

/* The fit as bytes, which live as long as it does; opening them gives the same fit. They count
 * among what is kept for the context. */
const void *neap_lowram_bytes(const neap_lowram *fit, size_t *ret_len);
/* There are none any more: whoever only codes with the fit does not need them. */
void neap_lowram_forget_bytes(neap_lowram *fit);
/* Fails: NEAP_E_CORRUPT (a checksum, a size, a value), NEAP_E_VERSION (not a fit of this version),
 * -ENOMEM. */
int neap_lowram_open(const void *bytes, size_t len, neap_lowram **ret_fit);
/* Checksum of the fit: chunks carry it and decode with no other. */
uint64_t neap_lowram_id(const neap_lowram *fit);
/* Bytes of memory that the fit takes while it is open. */
size_t neap_lowram_memory(const neap_lowram *fit);

/* Errors over deviations, squared: sum |k - k^|^2 / sum |k - mean|^2 of keys, of values likewise,
 * over the rows that are not exact. */
typedef struct neap_lowram_error {
    float keys, values;
} neap_lowram_error;

typedef struct neap_lowram_group {
    uint32_t n_layers;
    uint32_t layers[NEAP_LOWRAM_LAYERS]; /* the model's numbers */
    uint32_t n_kv_heads, k_head_dim, v_head_dim;
    uint32_t rank, hidden;
    uint32_t a_bits, b_bits, residual_bits;
    neap_lowram_error error; /* of the context it was made from */
} neap_lowram_group;

uint32_t neap_lowram_n_groups(const neap_lowram *fit);
const neap_lowram_group *neap_lowram_group_at(const neap_lowram *fit, uint32_t group);

/* ---- chunks ---- */

/* Cells of the group's layers. Rows of the first positions, and rows with an element that is not
 * finite, come back exactly. Decoding to other positions than were encoded turns the K of the other
 * rows to the new ones; planes of NULL data are not decoded. */
typedef struct neap_lowram_chunk {
    uint32_t group;
    uint32_t n_rows;                                             /* 1 .. NEAP_LOWRAM_ROWS */
    const int32_t *positions;                                    /* [n_rows] */
    neap_klt_plane k[NEAP_LOWRAM_LAYERS], v[NEAP_LOWRAM_LAYERS]; /* of the group's layers */
} neap_lowram_chunk;

/* Upper bound of the encoded bytes of a chunk. */
size_t neap_lowram_bound(const neap_lowram *fit, uint32_t group, uint32_t n_rows);
/* Bytes of scratch, aligned to 64, for one call of any group. */
size_t neap_lowram_scratch_bytes(const neap_lowram *fit);
/* Fails: NEAP_E_BOUND (cap too small; a field of the chunk out of range). */
int neap_lowram_encode(const neap_lowram *fit, const neap_lowram_chunk *chunk, void *scratch,
                       void *dst, size_t cap, size_t *ret_len, neap_lowram_error *ret_error);
/* Fails: NEAP_E_CORRUPT (damaged, of another fit, group or number of rows; the planes may then be
 * partly written); NEAP_E_BOUND. */
int neap_lowram_decode(const neap_lowram *fit, const void *src, size_t len,
                       const neap_lowram_chunk *chunk, void *scratch);
/* Only a part of it, as neap_klt_decode_part(); NULL: all. The same bytes for less work, which goes
 * with the rows, in steps of 32, and with the heads. */
int neap_lowram_decode_part(const neap_lowram *fit, const void *src, size_t len,
                            const neap_lowram_chunk *chunk, const neap_klt_part *wanted,
                            void *scratch);
#endif
