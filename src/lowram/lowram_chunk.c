/* lowram_chunk.c - chunks: rows of a group's layers to bytes and back (docs/formats/lowram.md).
 *
 * Encoding decodes as it goes: values are predicted from the keys that decoding will find. The fit
 * calls the same functions, so that its thresholds meet the same numbers. */
#include <cblas.h>
#include <math.h>
#include <string.h>

#include "bytes.h"
#include "half.h"
#include "lowram_int.h"
#include "neap.h"
#include "rope.h"

enum { ROWS = NEAP_LOWRAM_ROWS, MAGIC = 0x01434c4e /* "NLC", 1 */ };
/* Rows that are decoded together: always so many, for BLAS sums in an order that hangs on how many
 * there are. So a row is the same to the bit, whichever others are decoded. With 16, 32, 64, 256 a
 * chunk of 12 heads took 5.8, 5.2, 4.7, 4.5 ms, 8 rows of one head 31, 49, 82, 289 us. */
enum { STEP = 32 };
_Static_assert(ROWS % STEP == 0, "whole steps");
#define F16_MAX 65504.0f

typedef struct header {
    uint32_t magic, bytes;
    uint64_t checksum, id;
    uint16_t group, n_rows, n_exact, zero;
} header;
_Static_assert(sizeof(header) == NEAP_LOWRAM_CHUNK_HEADER, "the header of a chunk");

/* Where the parts of a chunk lie; the residuals end where the exact V rows begin. */
typedef struct chunk_places {
    size_t exact, a, exact_k, maps, residuals;
    size_t a_row, k_row, v_row, map, residual, exact_v_bytes;
} chunk_places;

static chunk_places places_of(const neap_lowram_part *part, uint32_t n_rows, uint32_t n_exact) {
    const neap_lowram_group *group = &part->shape;
    chunk_places p = {.exact = NEAP_LOWRAM_CHUNK_HEADER,
                      .a_row = neap_turbo_row_bytes(group->a_bits, group->rank),
                      .k_row = 2 * (size_t)group->n_kv_heads * group->k_head_dim,
                      .v_row = 2 * (size_t)group->n_kv_heads * group->v_head_dim,
                      .map = (n_rows + 7) / 8,
                      .residual = neap_turbo_row_bytes(group->residual_bits, group->v_head_dim)};
    p.a = p.exact + n_exact;
    p.exact_k = p.a + (n_rows - n_exact) * p.a_row;
    p.maps = p.exact_k + n_exact * group->n_layers * p.k_row;
    p.residuals = p.maps + neap_lowram_heads(group) * p.map;
    p.exact_v_bytes = n_exact * group->n_layers * p.v_row;
    return p;
}

/* ---- scratch ---- */

typedef struct chunk_room {
    float *x;         /* [ROWS][k_columns] */
    float *a;         /* [ROWS][rank] */
    float *inputs;    /* [ROWS][row of a predictor] */
    float *keys;      /* [ROWS][k_head_dim] */
    float *values;    /* [ROWS][v_head_dim] */
    float *predicted; /* [ROWS][v_head_dim] */
    float *errors;    /* [ROWS] */
    float *tables;    /* [ROWS][k_head_dim] cosines and sines */
    float *turned;    /* [v_head_dim] */
} chunk_room;

/* Returns the bytes; room's pointers follow from base. */
static size_t lay_out(const neap_lowram_part *part, float *base, chunk_room *ret_room) {
    const neap_lowram_group *group = &part->shape;
    const neap_value_shape shape = neap_lowram_value_shape(part, 0);
    const size_t widths[] = {neap_lowram_k_columns(group),
                             group->rank,
                             shape.row,
                             group->k_head_dim,
                             group->v_head_dim,
                             group->v_head_dim,
                             1,
                             group->k_head_dim,
                             group->v_head_dim};
    float **const arrays[] = {&ret_room->x,      &ret_room->a,      &ret_room->inputs,
                              &ret_room->keys,   &ret_room->values, &ret_room->predicted,
                              &ret_room->errors, &ret_room->tables, &ret_room->turned};
    size_t at = 0;
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        *arrays[i] = base ? base + at : NULL;
        at += NEAP_ROUND_UP(widths[i] * ROWS, 16);
    }
    return at * sizeof *base;
}

size_t neap_lowram_part_scratch(const neap_lowram_part *part) {
    chunk_room unused;
    return lay_out(part, NULL, &unused);
}

size_t neap_lowram_scratch_bytes(const neap_lowram *fit) {
    return fit->scratch_bytes;
}

/* ---- rows in the cache ---- */

static uint16_t *row_of(const neap_klt_plane *plane, uint32_t row) {
    return (uint16_t *)((char *)plane->data + row * plane->row_stride);
}

static bool is_finite_row(const neap_klt_plane *plane, uint32_t row, uint32_t n) {
    const uint16_t *x = row_of(plane, row);
    uint32_t worst = 0;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t magnitude = x[i] & 0x7fffu;
        worst = magnitude > worst ? magnitude : worst;
    }
    return worst < NEAP_F16_INF;
}

uint32_t neap_lowram_exact(const neap_lowram_part *part, const neap_lowram_chunk *chunk,
                           bool *ret_exact) {
    const neap_lowram_group *group = &part->shape;
    uint32_t n = 0;
    for (uint32_t r = 0; r < chunk->n_rows; r++) {
        bool is_exact = chunk->positions[r] < (int32_t)part->first_exact;
        for (uint32_t l = 0; l < group->n_layers && !is_exact; l++)
            is_exact = !is_finite_row(&chunk->k[l], r, group->n_kv_heads * group->k_head_dim) ||
                       !is_finite_row(&chunk->v[l], r, group->n_kv_heads * group->v_head_dim);
        ret_exact[r] = is_exact;
        n += !is_exact;
    }
    return n;
}

/* Tables of a layer's turns; *inout_filled: whose they are, NULL: nobody's. */
static void fill_tables(const neap_lowram_part *part, const neap_lowram_chunk *chunk,
                        const bool *exact, uint32_t layer, const neap_klt_rope **inout_filled,
                        float *tables) {
    const neap_klt_rope *rope = &part->ropes[layer];
    if (*inout_filled && memcmp(rope, *inout_filled, sizeof *rope) == 0) return;
    for (uint32_t r = 0, i = 0; r < chunk->n_rows; r++)
        if (!exact[r])
            neap_rope_table(rope, chunk->positions[r],
                            tables + (size_t)i++ * part->shape.k_head_dim);
    *inout_filled = rope;
}

void neap_lowram_read_keys(const neap_lowram_part *part, const neap_lowram_chunk *chunk,
                           const bool *exact, float *tables, float *ret_x) {
    const uint32_t heads = part->shape.n_kv_heads, dim = part->shape.k_head_dim;
    const size_t columns = neap_lowram_k_columns(&part->shape);
    const neap_klt_rope *filled = NULL;
    for (uint32_t l = 0; l < part->shape.n_layers; l++) {
        fill_tables(part, chunk, exact, l, &filled, tables);
        for (uint32_t r = 0, i = 0; r < chunk->n_rows; r++) {
            if (exact[r]) continue;
            const uint16_t *src = row_of(&chunk->k[l], r);
            const float *mean = part->mean + l * heads * dim;
            float *x = ret_x + i * columns + l * heads * dim;
            for (uint32_t c = 0; c < heads * dim; c++)
                x[c] = neap_f32_of_f16(src[c]);
            for (uint32_t h = 0; h < heads; h++)
                neap_rope_unturn(&part->ropes[l], tables + (size_t)i * dim, x + h * dim);
            for (uint32_t c = 0; c < heads * dim; c++)
                x[c] -= mean[c];
            i++;
        }
    }
}

void neap_lowram_read_values(const neap_lowram_part *part, const neap_lowram_chunk *chunk,
                             const bool *exact, uint32_t head, float *ret_values) {
    const uint32_t heads = part->shape.n_kv_heads, dim = part->shape.v_head_dim;
    for (uint32_t r = 0; r < chunk->n_rows; r++) {
        if (exact[r]) continue;
        const uint16_t *src = row_of(&chunk->v[head / heads], r) + head % heads * dim;
        for (uint32_t c = 0; c < dim; c++)
            *ret_values++ = neap_f32_of_f16(src[c]);
    }
}

/* To the nearest f16; NaN, of predictors out of all proportion, is 0. */
static void put_row(const float *x, uint32_t n, uint16_t *dst) {
    for (uint32_t i = 0; i < n; i++)
        dst[i] = neap_f16_of_f32(x[i] >= -F16_MAX ? (x[i] <= F16_MAX ? x[i] : F16_MAX)
                                 : x[i] < 0       ? -F16_MAX
                                                  : 0);
}

static void write_head(const neap_klt_plane *plane, uint32_t first_column, const bool *exact,
                       uint32_t n_rows, const float *x, uint32_t dim) {
    for (uint32_t r = 0; r < n_rows; r++) {
        if (exact[r]) continue;
        put_row(x, dim, row_of(plane, r) + first_column);
        x += dim;
    }
}

/* ---- keys ---- */

static void keys_of(const neap_lowram_part *part, const float *a, uint32_t n, uint32_t first_column,
                    uint32_t n_columns, float *ret_keys) {
    const size_t rank = part->shape.rank;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)n, (int)n_columns, (int)rank, 1, a,
                (int)rank, part->basis + first_column * rank, (int)rank, 0, ret_keys,
                (int)n_columns);
}

void neap_lowram_project(const neap_lowram_part *part, const float *x, uint32_t n, uint8_t *dst,
                         float *ret_a) {
    const uint32_t rank = part->shape.rank, columns = neap_lowram_k_columns(&part->shape);
    const size_t row_bytes = neap_turbo_row_bytes(part->shape.a_bits, rank);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)n, (int)rank, (int)columns, 1, x,
                (int)columns, part->projection, (int)rank, 0, ret_a, (int)rank);
    for (size_t r = 0; r < n; r++) {
        neap_turbo_encode(&part->a, ret_a + r * rank, rank, dst + r * row_bytes);
        neap_turbo_decode(&part->a, dst + r * row_bytes, rank, ret_a + r * rank);
    }
}

/* ---- values ---- */

void neap_lowram_inputs(const neap_lowram_part *part, const float *a, uint32_t n, uint32_t head,
                        float *inputs) {
    const uint32_t heads = part->shape.n_kv_heads, dim = part->shape.k_head_dim;
    switch (part->source) {
    case NEAP_LOWRAM_FROM_ROW:
        memcpy(inputs, a, (size_t)n * part->shape.rank * sizeof *a);
        break;
    case NEAP_LOWRAM_FROM_LAYER:
        if (head % heads == 0) keys_of(part, a, n, head * dim, heads * dim, inputs);
        break;
    case NEAP_LOWRAM_FROM_PREVIOUS:
        keys_of(part, a, n, (head < heads ? head : head - heads) * dim, dim, inputs);
        break;
    default:
        keys_of(part, a, n, head * dim, dim, inputs);
        break;
    }
}

/* Uniform in [0, 1). */
static float chance(uint64_t seed, uint32_t head, int32_t position) {
    const uint64_t key[2] = {seed, (uint64_t)head << 32 | (uint32_t)position};
    return (float)(neap_checksum(key, sizeof key) >> 40) * 0x1p-24f;
}

void neap_lowram_scores(const neap_lowram_part *part, const neap_lowram_chunk *chunk,
                        const bool *exact, uint32_t head, float *inout_errors) {
    if (part->residuals == NEAP_LOWRAM_WORST) return;
    for (uint32_t r = 0; r < chunk->n_rows; r++)
        if (!exact[r]) *inout_errors++ = chance(part->seed, head, chunk->positions[r]);
}

static void turn_residual(const neap_lowram_part *part, CBLAS_TRANSPOSE how, const float *x,
                          float *ret_turned) {
    const int dim = (int)part->shape.v_head_dim;
    cblas_sgemv(CblasRowMajor, how, dim, dim, 1, part->turn, dim, x, 1, 0, ret_turned, 1);
}

/* Codes a residual; returns what is left of it, squared. */
static double put_residual(const neap_lowram_part *part, const float *residual, float *turned,
                           uint8_t *dst) {
    const uint32_t dim = part->shape.v_head_dim;
    turn_residual(part, CblasNoTrans, residual, turned);
    neap_turbo_encode(&part->residual, turned, dim, dst);
    double power = 0;
    float *decoded = turned + dim;
    neap_turbo_decode(&part->residual, dst, dim, decoded);
    for (uint32_t c = 0; c < dim; c++)
        power += (double)(turned[c] - decoded[c]) * (double)(turned[c] - decoded[c]);
    return power;
}

/* ---- encoding ---- */

static bool is_within(const neap_lowram *fit, const neap_lowram_chunk *chunk) {
    return chunk->group < fit->n_groups && chunk->n_rows >= 1 && chunk->n_rows <= ROWS;
}

/* Bytes where the residuals of all coded rows are kept: n_exact of them are exact. */
static size_t most_bytes(const neap_lowram_part *part, uint32_t n_rows, uint32_t n_exact) {
    const chunk_places p = places_of(part, n_rows, n_exact);
    return p.residuals + (size_t)neap_lowram_heads(&part->shape) * (n_rows - n_exact) * p.residual +
           p.exact_v_bytes;
}

size_t neap_lowram_bound(const neap_lowram *fit, uint32_t group, uint32_t n_rows) {
    if (group >= fit->n_groups || n_rows > ROWS) return 0;
    const size_t coded = most_bytes(&fit->parts[group], n_rows, 0),
                 exact = most_bytes(&fit->parts[group], n_rows, n_rows);
    return coded > exact ? coded : exact;
}

typedef struct chunk_sums {
    double keys, key_errors, values, value_errors;
} chunk_sums;

static double power_of(const float *x, size_t n) {
    double power = 0;
    for (size_t i = 0; i < n; i++)
        power += (double)x[i] * (double)x[i];
    return power;
}

static void add_key_errors(const neap_lowram_part *part, const chunk_room *room, uint32_t n,
                           uint32_t head, chunk_sums *sums) {
    const uint32_t dim = part->shape.k_head_dim;
    const size_t columns = neap_lowram_k_columns(&part->shape);
    keys_of(part, room->a, n, head * dim, dim, room->keys);
    for (uint32_t i = 0; i < n; i++) {
        const float *x = room->x + i * columns + head * dim;
        float *keys = room->keys + (size_t)i * dim;
        sums->keys += power_of(x, dim);
        for (uint32_t c = 0; c < dim; c++)
            keys[c] -= x[c];
    }
    sums->key_errors += power_of(room->keys, (size_t)n * dim);
}

/* Residuals of one head; returns where the next ones go. */
static uint8_t *encode_head(const neap_lowram_part *part, const neap_lowram_chunk *chunk,
                            const bool *exact, uint32_t n, uint32_t head, const chunk_room *room,
                            uint8_t *map, uint8_t *dst, chunk_sums *sums) {
    const uint32_t dim = part->shape.v_head_dim;
    const size_t row_bytes = neap_turbo_row_bytes(part->shape.residual_bits, dim);
    neap_lowram_inputs(part, room->a, n, head, room->inputs);
    neap_lowram_read_values(part, chunk, exact, head, room->values);
    neap_value_predict(neap_lowram_predictor(part, head), room->inputs, n, room->predicted);
    sums->values += power_of(room->values, (size_t)n * dim);
    neap_value_residuals(room->values, room->predicted, n, dim, room->values, room->errors);
    float errors[ROWS];
    memcpy(errors, room->errors, n * sizeof *errors);
    neap_lowram_scores(part, chunk, exact, head, room->errors);
    for (uint32_t r = 0, i = 0; r < chunk->n_rows; r++) {
        if (exact[r]) continue;
        if (room->errors[i] > part->limits[head]) {
            map[r / 8] = (uint8_t)(map[r / 8] | 1u << r % 8);
            sums->value_errors +=
                put_residual(part, room->values + (size_t)i * dim, room->turned, dst);
            dst += row_bytes;
        } else {
            sums->value_errors += (double)errors[i];
        }
        i++;
    }
    return dst;
}

static uint8_t *put_exact(const neap_klt_plane *planes, uint32_t n_layers, size_t row_bytes,
                          const bool *exact, uint32_t n_rows, uint8_t *dst) {
    for (uint32_t r = 0; r < n_rows; r++)
        for (uint32_t l = 0; l < n_layers && exact[r]; l++, dst += row_bytes)
            memcpy(dst, row_of(&planes[l], r), row_bytes);
    return dst;
}

static bool has_planes(const neap_lowram_part *part, const neap_lowram_chunk *chunk) {
    for (uint32_t l = 0; l < part->shape.n_layers; l++)
        if (!chunk->k[l].data || !chunk->v[l].data) return false;
    return true;
}

int neap_lowram_encode(const neap_lowram *fit, const neap_lowram_chunk *chunk, void *scratch,
                       void *dst, size_t cap, size_t *ret_len, neap_lowram_error *ret_error) {
    if (!is_within(fit, chunk)) return NEAP_E_BOUND;
    const neap_lowram_part *part = &fit->parts[chunk->group];
    const neap_lowram_group *group = &part->shape;
    if (!has_planes(part, chunk)) return NEAP_E_BOUND;
    bool exact[ROWS];
    chunk_room room;
    lay_out(part, scratch, &room);
    const uint32_t n = neap_lowram_exact(part, chunk, exact), n_exact = chunk->n_rows - n;
    if (cap < most_bytes(part, chunk->n_rows, n_exact)) return NEAP_E_BOUND;
    const chunk_places p = places_of(part, chunk->n_rows, n_exact);
    uint8_t *bytes = dst, *at = bytes + p.exact;
    for (uint32_t r = 0; r < chunk->n_rows; r++)
        if (exact[r]) *at++ = (uint8_t)r;
    neap_lowram_read_keys(part, chunk, exact, room.tables, room.x);
    neap_lowram_project(part, room.x, n, bytes + p.a, room.a);
    put_exact(chunk->k, group->n_layers, p.k_row, exact, chunk->n_rows, bytes + p.exact_k);
    memset(bytes + p.maps, 0, p.residuals - p.maps);
    at = bytes + p.residuals;
    chunk_sums sums = {0};
    for (uint32_t h = 0; h < neap_lowram_heads(group); h++) {
        add_key_errors(part, &room, n, h, &sums);
        at = encode_head(part, chunk, exact, n, h, &room, bytes + p.maps + h * p.map, at, &sums);
    }
    at = put_exact(chunk->v, group->n_layers, p.v_row, exact, chunk->n_rows, at);
    header head = {.magic = MAGIC,
                   .bytes = (uint32_t)(at - bytes),
                   .id = fit->id,
                   .group = (uint16_t)chunk->group,
                   .n_rows = (uint16_t)chunk->n_rows,
                   .n_exact = (uint16_t)n_exact};
    memcpy(bytes, &head, sizeof head);
    head.checksum = neap_checksum(bytes + 16, head.bytes - 16);
    memcpy(bytes, &head, sizeof head);
    *ret_len = head.bytes;
    if (ret_error)
        *ret_error =
            (neap_lowram_error){sums.keys > 0 ? (float)(sums.key_errors / sums.keys) : 0,
                                sums.values > 0 ? (float)(sums.value_errors / sums.values) : 0};
    return 0;
}

/* ---- decoding ---- */

/* What is asked for of a chunk, and where the matrices in scratch begin. Of the rows that are coded
 * those asked for are [first, end); they are worked on in whole steps, from row base on. */
typedef struct decoding {
    const neap_lowram_part *part;
    const neap_klt_part *wanted;
    neap_lowram_chunk rows; /* of the wanted rows */
    bool exact[ROWS];       /* of the chunk */
    chunk_places p;
    chunk_room room;
    uint32_t first, end, base, n_steps;
    const neap_klt_rope *filled;
} decoding;

/* Whether as many residuals are there as the maps say, none of them of an exact row. */
static bool are_maps(const neap_lowram_part *part, const chunk_places *p, const bool *exact,
                     uint32_t n_rows, const uint8_t *src, size_t len) {
    size_t n_residuals = 0;
    for (uint32_t h = 0; h < neap_lowram_heads(&part->shape); h++)
        for (uint32_t r = 0; r < 8 * p->map; r++)
            if (src[p->maps + h * p->map + r / 8] >> r % 8 & 1) {
                if (r >= n_rows || exact[r]) return false;
                n_residuals++;
            }
    return p->residuals + n_residuals * p->residual + p->exact_v_bytes == len;
}

/* Header and all that says how much there is; marks the exact rows. */
static bool is_chunk(const neap_lowram *fit, const neap_lowram_chunk *chunk, const uint8_t *src,
                     size_t len, bool is_checked, chunk_places *ret_places, bool *ret_exact) {
    header head;
    if (len < sizeof head) return false;
    memcpy(&head, src, sizeof head);
    if (head.magic != MAGIC || head.bytes != len || head.id != fit->id ||
        head.group != chunk->group || head.n_rows != chunk->n_rows || head.zero ||
        head.n_exact > head.n_rows ||
        (!is_checked && head.checksum != neap_checksum(src + 16, len - 16)))
        return false;
    const neap_lowram_part *part = &fit->parts[chunk->group];
    const chunk_places p = places_of(part, head.n_rows, head.n_exact);
    if (p.residuals + p.exact_v_bytes > len) return false;
    memset(ret_exact, 0, head.n_rows * sizeof *ret_exact);
    for (uint32_t i = 0; i < head.n_exact; i++) {
        const uint32_t row = src[p.exact + i];
        if (row >= head.n_rows || (i > 0 && row <= src[p.exact + i - 1])) return false;
        ret_exact[row] = true;
    }
    *ret_places = p;
    return is_checked || are_maps(part, &p, ret_exact, head.n_rows, src, len);
}

static uint32_t count_coded(const bool *exact, uint32_t n_rows) {
    uint32_t n = 0;
    for (uint32_t r = 0; r < n_rows; r++)
        n += !exact[r];
    return n;
}

/* The rows a of all steps; those beyond the last one are 0. */
static bool decode_a(const decoding *d, uint32_t n_coded, const uint8_t *bytes) {
    const size_t rank = d->part->shape.rank;
    for (uint32_t i = 0; i < d->n_steps * STEP; i++) {
        const uint32_t at = d->base + i;
        float *a = d->room.a + i * rank;
        if (at >= n_coded)
            memset(a, 0, rank * sizeof *a);
        else if (!neap_turbo_decode(&d->part->a, bytes + d->p.a + at * d->p.a_row, (uint32_t)rank,
                                    a))
            return false;
    }
    return true;
}

/* Adds the residuals of a head to what was predicted; src: those of all its rows. */
static bool add_residuals(const decoding *d, const uint8_t *map, const uint8_t *src) {
    const neap_lowram_part *part = d->part;
    const uint32_t dim = part->shape.v_head_dim, first = d->wanted->first_row;
    float *predicted = d->room.predicted + (size_t)(d->first - d->base) * dim,
          *residual = d->room.turned + dim;
    for (uint32_t r = 0; r < first + d->wanted->n_rows; r++) {
        if (d->exact[r]) continue;
        const bool has_residual = map[r / 8] >> r % 8 & 1;
        if (has_residual && r >= first) {
            if (!neap_turbo_decode(&part->residual, src, dim, d->room.turned)) return false;
            turn_residual(part, CblasTrans, d->room.turned, residual);
            for (uint32_t c = 0; c < dim; c++)
                predicted[c] += residual[c];
        }
        if (has_residual) src += d->p.residual;
        if (r >= first) predicted += dim;
    }
    return true;
}

static void decode_keys(decoding *d, uint32_t head) {
    const neap_lowram_part *part = d->part;
    const uint32_t dim = part->shape.k_head_dim, heads = part->shape.n_kv_heads,
                   layer = head / heads;
    const bool *exact = d->exact + d->wanted->first_row;
    const float *mean = part->mean + head * dim;
    float *keys = d->room.keys + (size_t)(d->first - d->base) * dim;
    fill_tables(part, &d->rows, exact, layer, &d->filled, d->room.tables);
    for (size_t s = 0; s < d->n_steps; s++)
        keys_of(part, d->room.a + s * STEP * part->shape.rank, STEP, head * dim, dim,
                d->room.keys + s * STEP * dim);
    for (uint32_t i = 0; i < d->end - d->first; i++) {
        float *key = keys + (size_t)i * dim;
        for (uint32_t c = 0; c < dim; c++)
            key[c] += mean[c];
        neap_rope_turn(&part->ropes[layer], d->room.tables + (size_t)i * dim, key);
    }
    write_head(&d->rows.k[layer], head % heads * dim, exact, d->rows.n_rows, keys, dim);
}

static bool decode_values(const decoding *d, uint32_t head, const uint8_t *map,
                          const uint8_t *residuals) {
    const neap_lowram_part *part = d->part;
    const neap_value *predictor = neap_lowram_predictor(part, head);
    const uint32_t dim = part->shape.v_head_dim, heads = part->shape.n_kv_heads;
    for (size_t s = 0; s < d->n_steps; s++) {
        const float *a = d->room.a + s * STEP * part->shape.rank;
        float *inputs = d->room.inputs + s * STEP * predictor->shape.row;
        /* All heads of a layer have the inputs that its first one made. */
        if (part->source == NEAP_LOWRAM_FROM_LAYER && head % heads == d->wanted->first_head)
            neap_lowram_inputs(part, a, STEP, head - head % heads, inputs);
        else
            neap_lowram_inputs(part, a, STEP, head, inputs);
        neap_value_predict(predictor, inputs, STEP, d->room.predicted + s * STEP * dim);
    }
    if (!add_residuals(d, map, residuals)) return false;
    write_head(&d->rows.v[head / heads], head % heads * dim, d->exact + d->wanted->first_row,
               d->rows.n_rows, d->room.predicted + (size_t)(d->first - d->base) * dim, dim);
    return true;
}

static size_t residual_bytes(const chunk_places *p, const uint8_t *map) {
    size_t n = 0;
    for (size_t i = 0; i < p->map; i++)
        n += (size_t)__builtin_popcount(map[i]);
    return n * p->residual;
}

/* src: exact rows of all layers. */
static void get_exact(const decoding *d, const neap_klt_plane *planes, size_t row_bytes,
                      const uint8_t *src) {
    const neap_klt_part *wanted = d->wanted;
    const size_t head_bytes = row_bytes / d->part->shape.n_kv_heads,
                 at = wanted->first_head * head_bytes, len = wanted->n_heads * head_bytes;
    for (uint32_t r = 0; r < wanted->first_row + wanted->n_rows; r++)
        for (uint32_t l = 0; l < d->part->shape.n_layers && d->exact[r]; l++, src += row_bytes)
            if (r >= wanted->first_row && planes[l].data)
                memcpy((char *)row_of(&planes[l], r - wanted->first_row) + at, src + at, len);
}

static int decode_heads(decoding *d, const uint8_t *bytes) {
    const neap_lowram_group *group = &d->part->shape;
    const uint8_t *residuals = bytes + d->p.residuals;
    for (uint32_t h = 0; h < neap_lowram_heads(group); h++) {
        const uint32_t layer = h / group->n_kv_heads, head = h % group->n_kv_heads;
        const uint8_t *map = bytes + d->p.maps + h * d->p.map;
        const bool is_wanted = d->n_steps > 0 && head - d->wanted->first_head < d->wanted->n_heads;
        if (is_wanted && d->rows.k[layer].data) decode_keys(d, h);
        if (is_wanted && d->rows.v[layer].data && !decode_values(d, h, map, residuals))
            return NEAP_E_CORRUPT;
        residuals += residual_bytes(&d->p, map);
    }
    get_exact(d, d->rows.k, d->p.k_row, bytes + d->p.exact_k);
    get_exact(d, d->rows.v, d->p.v_row, residuals);
    return 0;
}

int neap_lowram_decode_part(const neap_lowram *fit, const void *src, size_t len,
                            const neap_lowram_chunk *chunk, const neap_klt_part *wanted,
                            void *scratch) {
    if (!is_within(fit, chunk)) return NEAP_E_BOUND;
    decoding d = {.part = &fit->parts[chunk->group], .wanted = wanted, .rows = *chunk};
    const neap_klt_part all = {.n_rows = chunk->n_rows, .n_heads = d.part->shape.n_kv_heads};
    if (!wanted) d.wanted = wanted = &all;
    if (!neap_klt_part_is_within(wanted, chunk->n_rows, d.part->shape.n_kv_heads))
        return NEAP_E_BOUND;
    if (!is_chunk(fit, chunk, src, len, wanted->is_checked, &d.p, d.exact)) return NEAP_E_CORRUPT;
    d.rows.positions += wanted->first_row;
    d.rows.n_rows = wanted->n_rows;
    d.first = count_coded(d.exact, wanted->first_row);
    d.end = d.first + count_coded(d.exact + wanted->first_row, wanted->n_rows);
    d.base = d.first / STEP * STEP;
    d.n_steps = d.end > d.first ? (d.end - d.base + STEP - 1) / STEP : 0;
    lay_out(d.part, scratch, &d.room);
    if (!decode_a(&d, count_coded(d.exact, chunk->n_rows), src)) return NEAP_E_CORRUPT;
    return decode_heads(&d, src);
}

int neap_lowram_decode(const neap_lowram *fit, const void *src, size_t len,
                       const neap_lowram_chunk *chunk, void *scratch) {
    return neap_lowram_decode_part(fit, src, len, chunk, NULL, scratch);
}
