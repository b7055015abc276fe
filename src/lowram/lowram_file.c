/* lowram_file.c - a fit as bytes, and back (docs/formats/lowram.md).
 *
 * A fit just made goes through its bytes too: what codes a chunk is what will decode it. */
#include <cblas.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "err.h"
#include "half.h"
#include "lowram_int.h"

enum { VERSION = 1, GROUP_WORDS = NEAP_LOWRAM_GROUP_HEADER / 4, LAYERS_AT = 1, SHAPE_AT = 9 };
#define F16_MAX 65504.0f

static const char magic[8] = "NEAPLRK";

typedef struct header {
    char magic[8];
    uint32_t version, n_groups;
    uint64_t bytes, id;
} header;
_Static_assert(sizeof(header) == NEAP_LOWRAM_FILE_HEADER, "the header of a fit");

/* LAPACK, of Fortran. */
void spotrf_(const char *uplo, const int *n, float *a, const int *lda, int *info);
void spotrs_(const char *uplo, const int *n, const int *n_rhs, const float *a, const int *lda,
             float *b, const int *ldb, int *info);

/* ---- parts ---- */

int neap_lowram_part_alloc(neap_lowram_part *part) {
    const size_t columns = neap_lowram_k_columns(&part->shape),
                 heads = neap_lowram_heads(&part->shape), rank = part->shape.rank,
                 dim = part->shape.v_head_dim, n_predictors = neap_lowram_n_predictors(part);
    part->mean = calloc(columns + columns * rank + heads + dim * dim, sizeof *part->mean);
    part->basis_rows = malloc(columns * neap_turbo_row_bytes(part->shape.b_bits, part->shape.rank));
    part->predictors = calloc(n_predictors, sizeof *part->predictors);
    int err = part->mean && part->basis_rows && part->predictors ? 0 : -ENOMEM;
    if (err) return err;
    part->basis = part->mean + columns;
    part->limits = part->basis + columns * rank;
    part->turn = part->limits + heads;
    for (uint32_t i = 0; i < n_predictors && !err; i++) {
        const neap_value_shape shape = neap_lowram_value_shape(part, i);
        err = neap_value_create(&shape, &part->predictors[i]);
    }
    neap_turbo_init(&part->a, part->shape.a_bits);
    neap_turbo_init(&part->residual, part->shape.residual_bits);
    return err;
}

void neap_lowram_part_free(neap_lowram_part *part) {
    for (uint32_t i = 0; part->predictors && i < neap_lowram_n_predictors(part); i++)
        neap_value_free(&part->predictors[i]);
    free(part->predictors);
    if (part->projection != part->basis) free(part->projection);
    free(part->basis_rows);
    free(part->mean);
}

/* Whether B is orthonormal as far as f16 goes: g[rank][rank] = B' B, its upper triangle. */
static bool is_orthonormal(const float *g, size_t rank) {
    for (size_t i = 0; i < rank; i++)
        for (size_t j = i; j < rank; j++)
            if (!(fabsf(g[i * rank + j] - (i == j)) < 1e-3f)) return false;
    return true;
}

/* B (B' B)^-1, which is B itself where that is orthonormal: B in f16 is, and makes half the memory
 * of a fit. */
static int invert(neap_lowram_part *part) {
    const size_t columns = neap_lowram_k_columns(&part->shape), rank = part->shape.rank;
    const int n = (int)rank, n_rhs = (int)columns;
    int info = 0;
    float *g = malloc(rank * rank * sizeof *g);
    if (!g) return -ENOMEM;
    cblas_ssyrk(CblasRowMajor, CblasUpper, CblasTrans, n, n_rhs, 1, part->basis, n, 0, g, n);
    part->projection = part->basis;
    if (is_orthonormal(g, rank)) {
        free(g);
        return 0;
    }
    part->projection = malloc(columns * rank * sizeof *g);
    if (!part->projection) {
        free(g);
        return -ENOMEM;
    }
    memcpy(part->projection, part->basis, columns * rank * sizeof *g);
    spotrf_("L", &n, g, &n, &info);
    if (!info) spotrs_("L", &n, &n_rhs, g, &n, part->projection, &n, &info);
    free(g);
    return info ? -EDOM : 0;
}

int neap_lowram_part_derive(neap_lowram_part *part) {
    const uint32_t columns = neap_lowram_k_columns(&part->shape), rank = part->shape.rank;
    const size_t row_bytes = neap_turbo_row_bytes(part->shape.b_bits, rank);
    neap_turbo turbo;
    neap_turbo_init(&turbo, part->shape.b_bits);
    for (size_t c = 0; c < columns; c++)
        if (!neap_turbo_decode(&turbo, part->basis_rows + c * row_bytes, rank,
                               part->basis + c * rank))
            return -EDOM;
    const int err = invert(part);
    return err ? err : neap_turbo_turn(part->seed, part->shape.v_head_dim, part->turn);
}

void neap_lowram_round(float *values, size_t n) {
    for (size_t i = 0; i < n; i++)
        values[i] = neap_f32_of_f16(neap_f16_of_f32(fminf(fmaxf(values[i], -F16_MAX), F16_MAX)));
}

/* ---- writing ---- */

static uint8_t *put(uint8_t *dst, const void *src, size_t len) {
    memcpy(dst, src, len);
    return dst + len;
}

static uint8_t *put_halves(uint8_t *dst, const float *values, size_t n) {
    for (size_t i = 0; i < n; i++, dst += 2) {
        const uint16_t half = neap_f16_of_f32(values[i]);
        memcpy(dst, &half, sizeof half);
    }
    return dst;
}

static uint8_t *put_part(const neap_lowram_part *part, uint8_t *dst) {
    const neap_lowram_group *group = &part->shape;
    const uint32_t columns = neap_lowram_k_columns(group);
    uint32_t words[GROUP_WORDS] = {group->n_layers};
    memcpy(words + LAYERS_AT, group->layers, group->n_layers * sizeof *words);
    const uint32_t rest[] = {group->n_kv_heads,
                             group->k_head_dim,
                             group->v_head_dim,
                             group->rank,
                             group->hidden,
                             group->a_bits,
                             group->b_bits,
                             group->residual_bits,
                             part->source,
                             part->residuals,
                             part->first_exact,
                             part->shared_predictor,
                             neap_f32_bits(group->error.keys),
                             neap_f32_bits(group->error.values),
                             (uint32_t)part->seed,
                             (uint32_t)(part->seed >> 32)};
    memcpy(words + SHAPE_AT, rest, sizeof rest);
    dst = put(dst, words, sizeof words);
    for (uint32_t l = 0; l < group->n_layers; l++) {
        dst = put(dst, &part->ropes[l], NEAP_LOWRAM_ROPE_HEADER);
        dst = put(dst, part->ropes[l].radians, part->ropes[l].n_dims / 2 * sizeof(float));
    }
    dst = put_halves(dst, part->mean, columns);
    dst = put(dst, part->basis_rows, columns * neap_turbo_row_bytes(group->b_bits, group->rank));
    dst = put(dst, part->limits, neap_lowram_heads(group) * sizeof *part->limits);
    for (uint32_t i = 0; i < neap_lowram_n_predictors(part); i++)
        dst = put_halves(dst, part->predictors[i].w1,
                         neap_value_n_params(&part->predictors[i].shape));
    return dst;
}

static uint64_t part_bytes(const neap_lowram_part *part) {
    return neap_lowram_fixed_key_bytes(part) + neap_lowram_fixed_value_bytes(part);
}

int neap_lowram_store(const neap_lowram_part *parts, uint32_t n_parts, uint8_t **ret_bytes,
                      size_t *ret_len) {
    header head = {.version = VERSION, .n_groups = n_parts, .bytes = sizeof head};
    memcpy(head.magic, magic, sizeof magic);
    for (uint32_t i = 0; i < n_parts; i++)
        head.bytes += part_bytes(&parts[i]);
    uint8_t *bytes = malloc(head.bytes), *at = bytes + sizeof head;
    if (!bytes) return -ENOMEM;
    for (uint32_t i = 0; i < n_parts; i++)
        at = put_part(&parts[i], at);
    memcpy(bytes, &head, sizeof head);
    head.id = neap_checksum(bytes, head.bytes);
    memcpy(bytes, &head, sizeof head);
    *ret_bytes = bytes;
    *ret_len = head.bytes;
    return 0;
}

/* ---- reading ---- */

typedef struct cursor {
    const uint8_t *at;
    size_t left;
} cursor;

static bool get(cursor *src, void *dst, size_t len) {
    if (len > src->left) return false;
    memcpy(dst, src->at, len);
    src->at += len;
    src->left -= len;
    return true;
}

static bool get_halves(cursor *src, float *values, size_t n) {
    if (n > src->left / 2) return false;
    uint32_t worst = 0;
    for (size_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, src->at + 2 * i, sizeof half);
        values[i] = neap_f32_of_f16(half);
        worst = (half & 0x7fffu) > worst ? half & 0x7fffu : worst;
    }
    src->at += 2 * n;
    src->left -= 2 * n;
    return worst < NEAP_F16_INF;
}

static const char *get_shape(cursor *src, neap_lowram_part *part) {
    uint32_t words[GROUP_WORDS];
    const uint32_t *w = words + SHAPE_AT;
    if (!get(src, words, sizeof words)) return "it ends within a group";
    if (words[0] < 1 || words[0] > NEAP_LOWRAM_LAYERS) return "the layers of a group";
    *part =
        (neap_lowram_part){.shape = {.n_layers = words[0],
                                     .n_kv_heads = w[0],
                                     .k_head_dim = w[1],
                                     .v_head_dim = w[2],
                                     .rank = w[3],
                                     .hidden = w[4],
                                     .a_bits = w[5],
                                     .b_bits = w[6],
                                     .residual_bits = w[7],
                                     .error = {neap_f32_of_bits(w[12]), neap_f32_of_bits(w[13])}},
                           .source = w[8],
                           .residuals = w[9],
                           .first_exact = w[10],
                           .shared_predictor = w[11],
                           .seed = w[14] | (uint64_t)w[15] << 32};
    memcpy(part->shape.layers, words + LAYERS_AT, sizeof part->shape.layers);
    for (uint32_t l = 0; l < part->shape.n_layers; l++) {
        neap_klt_rope *rope = &part->ropes[l];
        if (!get(src, rope, NEAP_LOWRAM_ROPE_HEADER) || rope->n_dims > NEAP_LOWRAM_HEAD_DIM ||
            !get(src, rope->radians, rope->n_dims / 2 * sizeof(float)))
            return "the RoPE of a layer";
    }
    return neap_lowram_wrong(part);
}

static const char *get_arrays(cursor *src, neap_lowram_part *part) {
    const neap_lowram_group *group = &part->shape;
    const uint32_t columns = neap_lowram_k_columns(group), heads = neap_lowram_heads(group);
    if (!get_halves(src, part->mean, columns)) return "the mean of the keys";
    if (!get(src, part->basis_rows, columns * neap_turbo_row_bytes(group->b_bits, group->rank)))
        return "the basis of the keys";
    if (!get(src, part->limits, heads * sizeof *part->limits)) return "the thresholds";
    for (uint32_t h = 0; h < heads; h++)
        if (isnan(part->limits[h])) return "the thresholds";
    for (uint32_t i = 0; i < neap_lowram_n_predictors(part); i++)
        if (!get_halves(src, part->predictors[i].w1,
                        neap_value_n_params(&part->predictors[i].shape)))
            return "a predictor";
    return NULL;
}

/* *ret_wrong: NULL, or what is wrong with the bytes. */
static int get_part(cursor *src, neap_lowram_part *part, const char **ret_wrong) {
    *ret_wrong = get_shape(src, part);
    /* All that is allocated is in the bytes, too. */
    if (!*ret_wrong && part_bytes(part) - NEAP_LOWRAM_GROUP_HEADER > src->left + (1u << 14))
        *ret_wrong = "it ends within a group";
    if (*ret_wrong) return NEAP_E_CORRUPT;
    int err = neap_lowram_part_alloc(part);
    if (err) return err;
    *ret_wrong = get_arrays(src, part);
    if (*ret_wrong) return NEAP_E_CORRUPT;
    err = neap_lowram_part_derive(part);
    if (err != -EDOM) return err;
    *ret_wrong = "the basis of the keys";
    return NEAP_E_CORRUPT;
}

static int refuse(int err, const char *why) {
    neap_log(NEAP_LOG_ERROR, "LowRAM fit refused: %s", why);
    return err;
}

static int check_header(const void *bytes, size_t len, header *ret_head) {
    const neap_head_fault fault = neap_head_check(bytes, len, sizeof *ret_head, magic, VERSION);
    if (fault == NEAP_HEAD_MAGIC) return refuse(NEAP_E_VERSION, "not a fit");
    if (fault == NEAP_HEAD_VERSION) return refuse(NEAP_E_VERSION, "it is of another version");
    memcpy(ret_head, bytes, sizeof *ret_head);
    if (fault || ret_head->n_groups < 1 || ret_head->n_groups > NEAP_LOWRAM_GROUPS)
        return refuse(NEAP_E_CORRUPT, "its size");
    const int err = neap_checksum_verify(bytes, len, offsetof(header, id));
    return err == NEAP_E_CORRUPT ? refuse(err, "its checksum") : err;
}

/* What is kept of the arrays, now that they are complete. */
static void settle(neap_lowram *fit, neap_lowram_part *part) {
    const size_t columns = neap_lowram_k_columns(&part->shape), dim = part->shape.v_head_dim;
    free(part->basis_rows);
    part->basis_rows = NULL;
    const size_t n_bases = part->projection == part->basis ? 1 : 2;
    fit->memory += sizeof *part + 4 * (columns * (1 + n_bases * part->shape.rank) + dim * dim);
    for (uint32_t i = 0; i < neap_lowram_n_predictors(part); i++)
        fit->memory += 4 * neap_value_n_params(&part->predictors[i].shape);
    const size_t scratch = neap_lowram_part_scratch(part);
    if (scratch > fit->scratch_bytes) fit->scratch_bytes = scratch;
}

int neap_lowram_open(const void *bytes, size_t len, neap_lowram **ret_fit) {
    header head;
    int err = check_header(bytes, len, &head);
    if (err) return err;
    const char *wrong = NULL;
    neap_lowram *fit = calloc(1, sizeof *fit);
    if (!fit) return -ENOMEM;
    fit->id = head.id;
    fit->len = fit->memory = len;
    fit->bytes = malloc(len);
    fit->parts = calloc(head.n_groups, sizeof *fit->parts);
    if (!fit->bytes || !fit->parts) err = -ENOMEM;
    cursor src = {(const uint8_t *)bytes + sizeof head, len - sizeof head};
    if (!err) memcpy(fit->bytes, bytes, len);
    while (!err && fit->n_groups < head.n_groups) {
        neap_lowram_part *part = &fit->parts[fit->n_groups++];
        err = get_part(&src, part, &wrong);
        if (!err) settle(fit, part);
    }
    if (!err && src.left > 0) wrong = "its size", err = NEAP_E_CORRUPT;
    if (wrong) refuse(err, wrong);
    if (err)
        neap_lowram_free(fit);
    else
        *ret_fit = fit;
    return err;
}

void neap_lowram_free(neap_lowram *fit) {
    if (!fit) return;
    for (uint32_t i = 0; i < fit->n_groups; i++)
        neap_lowram_part_free(&fit->parts[i]);
    free(fit->parts);
    free(fit->bytes);
    free(fit);
}

/* ---- what a fit shows ---- */

const void *neap_lowram_bytes(const neap_lowram *fit, size_t *ret_len) {
    *ret_len = fit->len;
    return fit->bytes;
}

void neap_lowram_forget_bytes(neap_lowram *fit) {
    free(fit->bytes);
    fit->memory -= fit->len;
    fit->bytes = NULL;
    fit->len = 0;
}

uint64_t neap_lowram_id(const neap_lowram *fit) {
    return fit->id;
}

size_t neap_lowram_memory(const neap_lowram *fit) {
    return fit->memory;
}

uint32_t neap_lowram_n_groups(const neap_lowram *fit) {
    return fit->n_groups;
}

const neap_lowram_group *neap_lowram_group_at(const neap_lowram *fit, uint32_t group) {
    return &fit->parts[group].shape;
}
