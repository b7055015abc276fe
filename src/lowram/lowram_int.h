/* lowram_int.h - what the files of a fit share.
 *   lowram_plan.c   options, shapes, budgets
 *   lowram_fit.c    bases and predictors from a context
 *   lowram_file.c   the fit as bytes
 *   lowram_chunk.c  chunks */
#ifndef NEAP_LOWRAM_LOWRAM_INT_H
#define NEAP_LOWRAM_LOWRAM_INT_H

#include "lowram.h"
#include "turbo.h"

enum { /* bytes, see docs/formats/lowram.md */
       NEAP_LOWRAM_FILE_HEADER = 32,
       NEAP_LOWRAM_GROUP_HEADER = 104,
       NEAP_LOWRAM_ROPE_HEADER = 12,
       NEAP_LOWRAM_CHUNK_HEADER = 32,
};

/* One group, open. Its head h is KV head h % n_kv_heads of its layer h / n_kv_heads. */
typedef struct neap_lowram_part {
    neap_lowram_group shape;
    uint32_t source, residuals, first_exact, shared_predictor;
    uint64_t seed;
    neap_klt_rope ropes[NEAP_LOWRAM_LAYERS];
    uint8_t *basis_rows;    /* B as stored; NULL once it is open */
    float *mean;            /* [k_columns] */
    float *basis;           /* B [k_columns][rank] */
    float *projection;      /* [k_columns][rank]: a = x projection; may be basis */
    float *limits;          /* [heads]: rows that score more keep their residual */
    neap_value *predictors; /* [n_predictors] */
    float *turn;            /* [v_head_dim][v_head_dim]: residuals are coded turned by it */
    neap_turbo a, residual;
} neap_lowram_part;

struct neap_lowram {
    uint32_t n_groups;
    neap_lowram_part *parts;
    uint8_t *bytes;
    size_t len, scratch_bytes, memory;
    uint64_t id;
};

/* ---- shapes (lowram_plan.c) ---- */

uint32_t neap_lowram_heads(const neap_lowram_group *group); /* of all layers */
uint32_t neap_lowram_k_columns(const neap_lowram_group *group);
uint32_t neap_lowram_v_columns(const neap_lowram_group *group);
uint32_t neap_lowram_n_predictors(const neap_lowram_part *part);
const neap_value *neap_lowram_predictor(const neap_lowram_part *part, uint32_t head);
neap_value_shape neap_lowram_value_shape(const neap_lowram_part *part, uint32_t head);
/* Bytes of a group in the fit: of its keys, of its values. */
uint64_t neap_lowram_fixed_key_bytes(const neap_lowram_part *part);
uint64_t neap_lowram_fixed_value_bytes(const neap_lowram_part *part);
/* NULL, or what is out of its range; of the shape, not of the arrays. */
const char *neap_lowram_wrong(const neap_lowram_part *part);
/* Rows that the budget of a context of n_rows is for. */
uint32_t neap_lowram_budget_rows(const neap_lowram_options *options, uint32_t n_rows);
/* A group as the options want it for a context of n_rows, without arrays. Fails: as
 * neap_lowram_plan(). */
int neap_lowram_part_plan(const neap_lowram_options *options, const neap_lowram_layer *layers,
                          uint32_t n_layers, uint32_t n_rows, neap_lowram_part *ret_part,
                          neap_lowram_budget *ret_budget);

/* ---- groups (lowram_file.c) ---- */

/* Memory for the arrays that the shape asks for; predictors and limits are 0. Fails: -ENOMEM. */
int neap_lowram_part_alloc(neap_lowram_part *part);
void neap_lowram_part_free(neap_lowram_part *part);
/* What follows from B and from the seed. Fails: -EDOM (B is not of full rank); -ENOMEM. */
int neap_lowram_part_derive(neap_lowram_part *part);
/* Values become what two bytes hold of them. */
void neap_lowram_round(float *values, size_t n);
/* Bytes of parts whose mean and predictors are rounded. Fails: -ENOMEM. */
int neap_lowram_store(const neap_lowram_part *parts, uint32_t n_parts, uint8_t **ret_bytes,
                      size_t *ret_len);

/* ---- rows of a chunk (lowram_chunk.c); n: those that are not exact ---- */

size_t neap_lowram_part_scratch(const neap_lowram_part *part); /* bytes */
/* Which rows are exact; returns n. */
uint32_t neap_lowram_exact(const neap_lowram_part *part, const neap_lowram_chunk *chunk,
                           bool *ret_exact);
/* Keys before RoPE, less the mean: [n][k_columns]. tables: [NEAP_LOWRAM_ROWS][head_dim]. */
void neap_lowram_read_keys(const neap_lowram_part *part, const neap_lowram_chunk *chunk,
                           const bool *exact, float *tables, float *ret_x);
/* [n][v_head_dim] */
void neap_lowram_read_values(const neap_lowram_part *part, const neap_lowram_chunk *chunk,
                             const bool *exact, uint32_t head, float *ret_values);
/* x[n][k_columns] as rows that are stored one after the other, and what they decode to. */
void neap_lowram_project(const neap_lowram_part *part, const float *x, uint32_t n, uint8_t *dst,
                         float *ret_a);
/* What the predictor of a head is given for rows a[n][rank]: [n][row of its shape]. Heads are asked
 * for in order, with the same inputs. */
void neap_lowram_inputs(const neap_lowram_part *part, const float *a, uint32_t n, uint32_t head,
                        float *inputs);
/* Scores of errors[n]: which residuals are kept. */
void neap_lowram_scores(const neap_lowram_part *part, const neap_lowram_chunk *chunk,
                        const bool *exact, uint32_t head, float *inout_errors);
#endif
