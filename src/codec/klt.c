/* klt.c - see klt.h; the format and what is computed: docs/formats/klt.md.
 *
 *   encode   f16 rows -> x, K turned back -> panels [column][64 rows], less their mean -> y = F' x,
 *            or G S S x -> codes, each row's error -> outliers, over all groups -> mu
 *   decode   codes -> y -> x = G' y + mu, a tile of 64 columns at a time -> outliers -> K turned
 *            -> f16 rows -> exact rows
 *
 * Invariants
 *   1. A chunk's length follows from its header, the model and the numbers of rows; a good chunk
 *      has that length and its checksum, so sections are at known places before any is read.
 *   2. Rows of a panel that are not coded (exact ones, those that fill the last 64 up) are zero, so
 *      are their y: they add nothing to sums, and their codes are whatever zero gives. */
#include "klt.h"

#include <assert.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "bytes.h"
#include "klt_int.h"
#include "neap.h"

enum { MAGIC = 0x01434b4e /* "NKC" 1 */, RAW = 0xffff, STEP_COLUMNS = 64 };
/* Components that are widened at a time: whole strips, whole quads. */
enum { SPAN = 48 };
_Static_assert(SPAN % NEAP_KLT_STRIP == 0 && SPAN % 4 == 0, "spans of components");

/* What the roundings of F and S to f16 leave of |x S|^2 - |y|^2 where nothing should be left. */
#define METRIC_NOISE 0x1p-13f

typedef struct chunk_header {
    uint32_t magic, bytes;
    uint64_t checksum, id;
    uint16_t block, n_rows, n_exact, n_outliers;
} chunk_header;
enum { HEADER_BYTES = 32, SUMMED_FROM = 16 };
_Static_assert(sizeof(chunk_header) == HEADER_BYTES, "the header of a chunk");

/* ---- shape ---- */

static const neap_klt_block *block_of(const neap_klt_model *model, const neap_klt_chunk *chunk) {
    return &model->blocks[chunk->block];
}

static bool is_valid(const neap_klt_model *model, const neap_klt_chunk *chunk) {
    return chunk->block < model->spec.n_blocks && chunk->n_rows >= 1 &&
           chunk->n_rows <= NEAP_KLT_ROWS;
}

static uint32_t blocks_of_rows(uint32_t n_rows) {
    return (n_rows + NEAP_KLT_TILE - 1) / NEAP_KLT_TILE;
}

static size_t row_bytes(const neap_klt_block *block, bool is_v) {
    return (size_t)2 * block->n_kv_heads * (is_v ? block->v_head_dim : block->k_head_dim);
}

/* Of all planes. */
static size_t whole_row_bytes(const neap_klt_block *block) {
    return block->n_layers * (row_bytes(block, false) + row_bytes(block, true));
}

static size_t outlier_bytes(const neap_klt_basis *basis) {
    return 4 + 2 * (size_t)((basis->n_columns + STEP_COLUMNS - 1) / STEP_COLUMNS) +
           basis->n_columns;
}

static uint32_t outlier_budget(const neap_klt_model *model, const neap_klt_block *block,
                               uint32_t n_rows) {
    return (n_rows * block->n_groups * model->spec.outlier_permille + 500) / 1000;
}

static size_t codes_bytes(const neap_klt_model *model, const neap_klt_block *block,
                          uint32_t n_rows) {
    size_t bytes = 0;
    for (uint32_t g = 0; g < block->n_groups; g++)
        bytes += model->bases[block->first_group + g].code_bytes;
    return bytes * blocks_of_rows(n_rows);
}

static size_t outliers_bytes(const neap_klt_model *model, const neap_klt_block *block,
                             uint32_t n_outliers) {
    size_t most = 0;
    for (uint32_t g = 0; g < block->n_groups; g++) {
        const size_t here = outlier_bytes(&model->bases[block->first_group + g]);
        most = here > most ? here : most;
    }
    return most * n_outliers;
}

/* All but the outliers. */
static size_t fixed_bytes(const neap_klt_model *model, const neap_klt_block *block, uint32_t n_rows,
                          uint32_t n_exact) {
    const size_t row = whole_row_bytes(block);
    return HEADER_BYTES + codes_bytes(model, block, n_rows) + row + n_exact * (2 + row);
}

size_t neap_klt_raw_bytes(const neap_klt_model *model, const neap_klt_chunk *chunk) {
    return chunk->n_rows * whole_row_bytes(block_of(model, chunk));
}

size_t neap_klt_bound(const neap_klt_model *model, const neap_klt_chunk *chunk) {
    if (model->guest) return model->guest->bound(model->guest_self, chunk->block, chunk->n_rows);
    return HEADER_BYTES + neap_klt_raw_bytes(model, chunk);
}

size_t neap_klt_expected_bytes(const neap_klt_model *model, const neap_klt_chunk *chunk) {
    if (model->guest)
        return model->guest->expected_bytes(model->guest_self, chunk->block, chunk->n_rows);
    const neap_klt_block *block = block_of(model, chunk);
    const uint32_t budget = outlier_budget(model, block, chunk->n_rows);
    const size_t coded =
        fixed_bytes(model, block, chunk->n_rows, 0) + outliers_bytes(model, block, budget);
    const size_t raw = neap_klt_bound(model, chunk);
    return coded < raw ? coded : raw;
}

float neap_klt_expected_error(const neap_klt_model *model, uint32_t at) {
    if (model->guest) return 1;
    const neap_klt_block *block = &model->blocks[at];
    double sum = 0;
    for (uint32_t g = 0; g < block->n_groups; g++) {
        const neap_klt_group *group = &model->groups[block->first_group + g];
        const uint32_t n = neap_klt_group_columns(block, group);
        double last = 0;
        for (uint32_t i = 0; i < group->n_components; i++) {
            last = (double)group->sd[i] * (double)group->sd[i];
            sum += last * neap_klt_distortion(group->bits[i]);
        }
        sum += last * (n - group->n_components);
    }
    return (float)(sum / block->n_groups);
}

/* ---- scratch ---- */

typedef struct scratch {
    float *cos, *sin; /* [NEAP_KLT_ROWS][pairs] of the table that is current */
    uint32_t rope;    /* which that is; UINT32_MAX none */
    float *y;         /* [components][NEAP_KLT_PITCH], or for each 64 rows [components][64] */
    uint8_t *y8;      /* [quads][NEAP_KLT_PITCH][4] */
    float *x;         /* [NEAP_KLT_ROWS][pitch] of one head */
    float *mu;        /* [tiles][64] */
    float *panel;     /* [columns][64], for each 64 rows */
    float *sum;       /* [columns of all groups] x over the coded rows */
    float *error;     /* [groups][NEAP_KLT_ROWS] */
    float *y_mean;    /* [components] */
    float *coded;     /* [NEAP_KLT_ROWS] 1: the row is, 0: it is not, or not there */
} scratch;

static void *take(uint8_t *base, size_t *at, size_t bytes) {
    void *taken = base ? base + *at : NULL;
    *at += NEAP_ROUND_UP(bytes, 64);
    return taken;
}

static uint32_t pitch_of(uint32_t dim) {
    return NEAP_ROUND_UP(dim, NEAP_KLT_TILE);
}

static uint32_t max_u32(uint32_t a, uint32_t b) {
    return a > b ? a : b;
}

/* Elements of y of 64 rows: products of so many components write some more. */
static size_t padded(uint32_t width) {
    return (size_t)(width + 2 * NEAP_KLT_STRIP) * NEAP_KLT_TILE;
}

/* Lays the scratch out from base (NULL: only asks for the size); returns its size. */
static size_t lay_out(const neap_klt_model *model, const neap_klt_block *block, uint8_t *base,
                      scratch *s) {
    uint32_t exact = 0, quads = 0, tiles = 0, components = 0, columns = 0, all_columns = 0;
    for (uint32_t g = 0; g < block->n_groups; g++) {
        const neap_klt_basis *basis = &model->bases[block->first_group + g];
        exact = max_u32(exact, basis->n_exact);
        quads = max_u32(quads, basis->n_quads);
        tiles = max_u32(tiles, basis->n_tiles);
        components = max_u32(components, basis->n_components);
        columns = max_u32(columns, basis->n_columns);
        all_columns += basis->n_columns;
    }
    const uint32_t dim = max_u32(block->k_head_dim, block->v_head_dim);
    const size_t blocks = NEAP_KLT_ROWS / NEAP_KLT_TILE, coded = padded(components),
                 weighed = 2 * padded(dim), y_decode = (size_t)exact * NEAP_KLT_PITCH,
                 y_encode = blocks * (coded > weighed ? coded : weighed);
    const size_t rows = NEAP_KLT_ROWS, f32 = sizeof(float);
    size_t at = 0;
    s->rope = UINT32_MAX;
    s->cos = take(base, &at, rows * (block->k_head_dim / 2 + 1) * f32);
    s->sin = take(base, &at, rows * (block->k_head_dim / 2 + 1) * f32);
    s->y = take(base, &at, (y_decode > y_encode ? y_decode : y_encode) * f32);
    s->y8 = take(base, &at, (size_t)quads * NEAP_KLT_PITCH * 4);
    s->x = take(base, &at, max_u32(NEAP_KLT_ROWS * pitch_of(dim), columns + NEAP_KLT_TILE) * f32);
    s->mu = take(base, &at, (size_t)tiles * NEAP_KLT_TILE * f32);
    s->panel = take(base, &at, columns * rows * f32);
    s->sum = take(base, &at, all_columns * f32);
    s->error = take(base, &at, block->n_groups * rows * f32);
    s->y_mean = take(base, &at, (components + 4) * f32);
    s->coded = take(base, &at, rows * f32);
    return at;
}

size_t neap_klt_block_scratch(const neap_klt_model *model, uint32_t block) {
    scratch s;
    return lay_out(model, &model->blocks[block], NULL, &s);
}

/* ---- rows ---- */

static const neap_klt_plane *plane_of(const neap_klt_chunk *chunk, const neap_klt_head *head) {
    return &(head->is_v ? chunk->v : chunk->k)[head->layer];
}

/* Rows first .. first + n - 1 of a head, turned forward or back. */
static neap_klt_rows rows_of(const neap_klt_kernel *kernel, const neap_klt_model *model,
                             const neap_klt_chunk *chunk, const neap_klt_head *head, uint32_t first,
                             uint32_t n, bool forward, scratch *s) {
    const neap_klt_plane *plane = plane_of(chunk, head);
    const uint32_t rope = block_of(model, chunk)->ropes[head->layer];
    const neap_klt_turns *turns = &model->turns[rope];
    neap_klt_rows rows = {.data = (uint8_t *)plane->data + first * plane->row_stride +
                                  (size_t)2 * head->head * head->dim,
                          .stride = plane->row_stride,
                          .n = n,
                          .dim = head->dim};
    if (head->is_v || turns->mode == NEAP_KLT_ROPE_NONE) return rows;
    if (s->rope != rope) {
        const float scale = forward ? turns->magnitude : 1 / turns->magnitude;
        kernel->angles(turns, scale, chunk->positions, chunk->n_rows, s->cos, s->sin);
        s->rope = rope;
    }
    rows.mode = turns->mode;
    rows.n_pairs = turns->n_pairs;
    rows.cos = s->cos + (size_t)first * turns->n_pairs;
    rows.sin = s->sin + (size_t)first * turns->n_pairs;
    return rows;
}

/* Row of the i-th plane: K of the layers, then V. NULL: the plane is not wanted. */
static uint8_t *plane_row(const neap_klt_block *block, const neap_klt_chunk *chunk, uint32_t i,
                          uint32_t row, size_t *ret_bytes) {
    const bool is_v = i >= block->n_layers;
    const neap_klt_plane *plane = is_v ? &chunk->v[i - block->n_layers] : &chunk->k[i];
    *ret_bytes = row_bytes(block, is_v);
    return plane->data ? (uint8_t *)plane->data + row * plane->row_stride : NULL;
}

static uint8_t *gather_row(const neap_klt_block *block, const neap_klt_chunk *chunk, uint32_t row,
                           uint8_t *dst) {
    for (uint32_t i = 0; i < 2 * block->n_layers; i++) {
        size_t n;
        const uint8_t *src = plane_row(block, chunk, i, row, &n);
        memcpy(dst, src, n);
        dst += n;
    }
    return dst;
}

/* The part's heads of a row; row is counted from the part's first. */
static void scatter_row(const neap_klt_block *block, const neap_klt_chunk *rows,
                        const neap_klt_part *part, uint32_t row, const uint8_t *src) {
    for (uint32_t i = 0; i < 2 * block->n_layers; i++) {
        size_t n;
        uint8_t *dst = plane_row(block, rows, i, row, &n);
        const size_t head = n / block->n_kv_heads, at = part->first_head * head;
        if (dst) memcpy(dst + at, src + at, part->n_heads * head);
        src += n;
    }
}

static bool must_be_exact(const neap_klt_kernel *kernel, const neap_klt_block *block,
                          const neap_klt_chunk *chunk, uint32_t row) {
    if (chunk->positions[row] < NEAP_KLT_FIRST_EXACT) return true;
    for (uint32_t i = 0; i < 2 * block->n_layers; i++) {
        size_t n;
        const uint8_t *data = plane_row(block, chunk, i, row, &n);
        if (!kernel->is_finite((const uint16_t *)(const void *)data, n / 2)) return true;
    }
    return false;
}

/* ---- encoding ---- */

typedef struct encoding {
    const neap_klt_kernel *kernel;
    const neap_klt_model *model;
    const neap_klt_block *block;
    const neap_klt_chunk *chunk;
    scratch s;
    uint32_t n_coded; /* rows that are not exact */
} encoding;

static float *panel_at(const encoding *e, const neap_klt_basis *basis, uint32_t block,
                       uint32_t column) {
    return e->s.panel + ((size_t)block * basis->n_columns + column) * NEAP_KLT_TILE;
}

/* The group's panels, rows that are not coded zero. */
static void load_panels(encoding *e, const neap_klt_group *group, const neap_klt_basis *basis) {
    for (neap_klt_head head = {0}; neap_klt_next_head(e->block, group, &head);)
        for (uint32_t first = 0; first < e->chunk->n_rows; first += NEAP_KLT_TILE) {
            const uint32_t left = e->chunk->n_rows - first,
                           n = left < NEAP_KLT_TILE ? left : NEAP_KLT_TILE;
            const size_t pitch = pitch_of(head.dim);
            const neap_klt_rows rows =
                rows_of(e->kernel, e->model, e->chunk, &head, first, n, false, &e->s);
            e->kernel->load(&rows, e->s.x, pitch);
            for (uint32_t r = 0; r < NEAP_KLT_TILE; r++)
                if (e->s.coded[first + r] == 0)
                    memset(e->s.x + r * pitch, 0, head.dim * sizeof(float));
            e->kernel->transpose(e->s.x, pitch, head.dim,
                                 panel_at(e, basis, first / NEAP_KLT_TILE, head.column));
        }
}

/* For each 64 rows: columns x[n][64], and what products make of them, y[width][64]. */
typedef struct panels {
    uint32_t n_blocks;
    float *x, *y;
    size_t x_pitch, y_pitch; /* from block to block */
} panels;

static void clear(const panels *p) {
    memset(p->y, 0, p->n_blocks * p->y_pitch * sizeof *p->y);
}

/* Rows row .. of y += a by n columns of x from column on: a[n_rows][64], zero up to whole strips.
 * The first cache holds a and x of 64 rows. */
static void add_span(const encoding *e, const panels *p, const float *a, uint32_t n_rows,
                     uint32_t column, uint32_t n, uint32_t row) {
    for (uint32_t b = 0; b < p->n_blocks; b++)
        for (uint32_t c = 0; c < n_rows; c += NEAP_KLT_STRIP)
            e->kernel->project(a + (size_t)c * NEAP_KLT_TILE,
                               p->x + b * p->x_pitch + (size_t)column * NEAP_KLT_TILE, n,
                               p->y + b * p->y_pitch + (size_t)(row + c) * NEAP_KLT_TILE);
}

/* y += n columns of a, f16 [width][pitch], by x from column on. */
static void add_f16(const encoding *e, const panels *p, const uint16_t *a, size_t pitch,
                    uint32_t width, uint32_t column, uint32_t n) {
    for (uint32_t c = 0; c < width; c += SPAN) {
        float span[SPAN * NEAP_KLT_TILE] = {0};
        const uint32_t rows = width - c < SPAN ? width - c : SPAN;
        e->kernel->widen(a + c * pitch, pitch, rows, n, span);
        add_span(e, p, span, rows, column, n, c);
    }
}

/* y = a x, of a[width][n] in f16. */
static void project_f16(const encoding *e, const panels *p, const uint16_t *a, uint32_t n,
                        uint32_t width) {
    clear(p);
    for (uint32_t first = 0; first < n; first += NEAP_KLT_TILE) {
        const uint32_t step = n - first < NEAP_KLT_TILE ? n - first : NEAP_KLT_TILE;
        add_f16(e, p, a + first, n, width, first, step);
    }
}

/* y += a tile's n columns of G by x, the integer components in their units. */
static void add_tile(const encoding *e, const panels *p, const neap_klt_basis *basis, uint32_t tile,
                     uint32_t column, uint32_t n) {
    add_f16(e, p, basis->g + (size_t)tile * basis->n_exact * NEAP_KLT_TILE, NEAP_KLT_TILE,
            basis->n_exact, column, n);
    for (uint32_t q = 0; q < basis->n_quads; q += SPAN / 4) {
        float span[SPAN * NEAP_KLT_TILE] = {0};
        const uint32_t left = basis->n_quads - q, quads = left < SPAN / 4 ? left : SPAN / 4;
        for (uint32_t i = 0; i < quads; i++)
            e->kernel->widen_quad(basis, tile, q + i, span + i * 4 * NEAP_KLT_TILE);
        add_span(e, p, span, 4 * quads, column, n, basis->n_exact + 4 * q);
    }
}

/* y = G x. */
static void project_on_g(const encoding *e, const panels *p, const neap_klt_group *group,
                         const neap_klt_basis *basis) {
    clear(p);
    for (neap_klt_head head = {0}; neap_klt_next_head(e->block, group, &head);)
        for (uint32_t at = 0; at < head.dim; at += NEAP_KLT_TILE) {
            const uint32_t left = head.dim - at, n = left < NEAP_KLT_TILE ? left : NEAP_KLT_TILE;
            add_tile(e, p, basis, head.tile + at / NEAP_KLT_TILE, head.column + at, n);
        }
    for (uint32_t b = 0; b < p->n_blocks; b++)
        for (uint32_t c = basis->n_exact; c < basis->n_components; c++)
            for (uint32_t r = 0; r < NEAP_KLT_TILE; r++)
                p->y[b * p->y_pitch + (size_t)c * NEAP_KLT_TILE + r] *=
                    basis->inverse_unit[c - basis->n_exact];
}

/* Whether what the components do not span is worth measuring: not for a few of the directions. */
static bool is_measured(const neap_klt_basis *basis) {
    return basis->metric && 4 * basis->n_components < 3 * basis->n_columns;
}

/* |x S|^2 of the rows; and x, where that is wanted, becomes S S x. */
static void weigh_rows(const encoding *e, const panels *x, const neap_klt_group *group,
                       const neap_klt_basis *basis, bool becomes, float *power) {
    const uint16_t *metric = basis->metric;
    memset(power, 0, NEAP_KLT_ROWS * sizeof *power);
    for (neap_klt_head head = {0}; neap_klt_next_head(e->block, group, &head);) {
        const uint32_t dim = head.dim;
        const size_t pitch = padded(dim);
        const panels once = {x->n_blocks, x->x + (size_t)head.column * NEAP_KLT_TILE, x->y,
                             x->x_pitch, pitch},
                     twice = {x->n_blocks, once.y, once.y + x->n_blocks * pitch, pitch, pitch};
        project_f16(e, &once, metric, dim, dim);
        for (uint32_t b = 0; b < x->n_blocks; b++)
            for (uint32_t k = 0; k < dim; k++)
                for (uint32_t r = 0; r < NEAP_KLT_TILE; r++) {
                    const float y = once.y[b * pitch + k * NEAP_KLT_TILE + r];
                    power[b * NEAP_KLT_TILE + r] += y * y;
                }
        if (becomes) project_f16(e, &twice, metric, dim, dim);
        for (uint32_t b = 0; becomes && b < x->n_blocks; b++)
            memcpy(once.x + b * once.x_pitch, twice.y + b * pitch,
                   (size_t)dim * NEAP_KLT_TILE * sizeof *once.x);
        metric += (size_t)dim * dim;
    }
}

/* Codes of the group and the errors of its rows. */
static void code_group(encoding *e, uint32_t g, float *sum, uint8_t *codes) {
    const neap_klt_group *group = &e->model->groups[e->block->first_group + g];
    const neap_klt_basis *basis = &e->model->bases[e->block->first_group + g];
    const uint32_t n_blocks = blocks_of_rows(e->chunk->n_rows);
    const bool measured = is_measured(basis);
    const panels p = {n_blocks, e->s.panel, e->s.y, (size_t)basis->n_columns * NEAP_KLT_TILE,
                      padded(basis->n_components)};
    float *error = e->s.error + (size_t)g * NEAP_KLT_ROWS, all[NEAP_KLT_ROWS],
          power[NEAP_KLT_ROWS] = {0};
    memset(error, 0, NEAP_KLT_ROWS * sizeof *error);
    load_panels(e, group, basis);
    e->kernel->centre(e->s.panel, basis->n_columns, n_blocks, e->s.coded, (float)e->n_coded, sum);
    if (measured || !basis->f) weigh_rows(e, &p, group, basis, !basis->f, all);
    if (basis->f)
        project_f16(e, &p, basis->f, basis->n_columns, basis->n_components);
    else
        project_on_g(e, &p, group, basis);
    for (uint32_t b = 0; b < n_blocks; b++) {
        uint8_t *at = codes;
        for (uint32_t c = 0; c < basis->n_components; c++) {
            const uint32_t bits = basis->bits[c], bytes = bits * NEAP_KLT_TILE / 8;
            e->kernel->quantise(e->model, bits, basis->sd[c], basis->inverse_sd[c],
                                p.y + b * p.y_pitch + (size_t)c * NEAP_KLT_TILE, at + b * bytes,
                                error + b * NEAP_KLT_TILE, power + b * NEAP_KLT_TILE);
            at += n_blocks * bytes;
        }
    }
    for (uint32_t r = 0; measured && r < n_blocks * NEAP_KLT_TILE; r++)
        if (all[r] - power[r] > all[r] * METRIC_NOISE) error[r] += all[r] - power[r];
}

/* Errors of rows that cannot become outliers are zeroed in a copy of their pattern: errors are not
 * negative, so they order like their bits. Returns the level above which rows are outliers. */
static float outlier_level(const encoding *e) {
    const uint32_t budget = outlier_budget(e->model, e->block, e->chunk->n_rows);
    const uint32_t n = e->block->n_groups * NEAP_KLT_ROWS;
    uint32_t low = 0, high = neap_f32_bits(INFINITY);
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        const float level = neap_f32_of_bits(middle);
        uint32_t above = 0;
        for (uint32_t i = 0; i < n; i++)
            above += e->s.error[i] > level;
        if (above <= budget)
            high = middle;
        else
            low = middle + 1;
    }
    return neap_f32_of_bits(low);
}

/* Errors below their group's limit, and those of rows that are not coded, become 0; returns the sum
 * of all. */
static double limit_errors(encoding *e) {
    double total = 0;
    for (uint32_t g = 0; g < e->block->n_groups; g++) {
        const float limit = e->model->groups[e->block->first_group + g].outlier_error;
        float *error = e->s.error + (size_t)g * NEAP_KLT_ROWS;
        for (uint32_t r = 0; r < NEAP_KLT_ROWS; r++) {
            const bool coded = e->s.coded[r] > 0;
            if (coded) total += error[r];
            if (!coded || !(error[r] > limit)) error[r] = 0;
        }
    }
    return total;
}

/* The row's x of all columns of the group. */
static void load_row(encoding *e, const neap_klt_group *group, uint32_t row, float *x) {
    for (neap_klt_head head = {0}; neap_klt_next_head(e->block, group, &head);) {
        const neap_klt_rows rows =
            rows_of(e->kernel, e->model, e->chunk, &head, row, 1, false, &e->s);
        e->kernel->load(&rows, x + head.column, 0);
    }
}

/* mu of the group, as f16, and in s.mu column by column; rows whose error is above level are left
 * out. */
static void put_mean(encoding *e, uint32_t g, float level, const float *sum, const uint8_t *codes,
                     uint8_t *dst) {
    const neap_klt_group *group = &e->model->groups[e->block->first_group + g];
    const neap_klt_basis *basis = &e->model->bases[e->block->first_group + g];
    const uint32_t n_rows = e->chunk->n_rows, n_blocks = blocks_of_rows(n_rows);
    const float *error = e->s.error + (size_t)g * NEAP_KLT_ROWS;
    float *x = e->s.x, *mu = e->s.panel, *total = e->s.panel + basis->n_columns;
    uint32_t n = 0;
    const neap_klt_row_blocks all = {.n = n_blocks, .end = n_blocks};
    e->kernel->unpack(e->model, basis, codes, all, e->s.y, e->s.y8);
    memcpy(total, sum, basis->n_columns * sizeof *total);
    for (uint32_t r = 0; r < n_blocks * NEAP_KLT_TILE; r++) {
        const bool coded = e->s.coded[r] > 0, outlier = coded && error[r] > level;
        n += coded && !outlier;
        if (coded && !outlier) continue;
        for (uint32_t c = 0; c < basis->n_exact; c++)
            e->s.y[(size_t)c * NEAP_KLT_PITCH + r] = 0;
        for (uint32_t q = 0; q < basis->n_quads; q++)
            memset(e->s.y8 + ((size_t)q * NEAP_KLT_PITCH + r) * 4, 128, 4);
        if (!outlier) continue;
        load_row(e, group, r, x);
        for (uint32_t j = 0; j < basis->n_columns; j++)
            total[j] -= x[j];
    }
    const float count = (float)(n ? n : 1);
    e->kernel->means(basis, e->s.y, e->s.y8, n_blocks, count, e->s.y_mean);
    for (neap_klt_head head = {0}; neap_klt_next_head(e->block, group, &head);)
        for (uint32_t t = 0; t * NEAP_KLT_TILE < head.dim; t++) {
            float mean[NEAP_KLT_TILE];
            e->kernel->product_mean(basis, head.tile + t, e->s.y_mean, mean);
            for (uint32_t i = 0; i < NEAP_KLT_TILE && t * NEAP_KLT_TILE + i < head.dim; i++) {
                const uint32_t j = head.column + t * NEAP_KLT_TILE + i;
                const float value = fminf(fmaxf(total[j] / count - mean[i], -65504), 65504);
                const uint16_t half = neap_f16_of_f32(n ? value : 0);
                memcpy(dst + 2 * (size_t)j, &half, sizeof half);
                mu[j] = neap_f32_of_f16(half);
            }
        }
}

/* x - mu in steps of 64 columns. */
static uint8_t *put_outlier(const neap_klt_basis *basis, uint32_t g, uint32_t row, const float *x,
                            const float *mu, uint8_t *dst) {
    const uint16_t place[2] = {(uint16_t)g, (uint16_t)row};
    const uint32_t n = basis->n_columns, n_steps = (n + STEP_COLUMNS - 1) / STEP_COLUMNS;
    uint8_t *codes = dst + sizeof place + 2 * (size_t)n_steps;
    memcpy(dst, place, sizeof place);
    for (uint32_t first = 0, s = 0; s < n_steps; first += STEP_COLUMNS, s++) {
        const uint32_t end = n - first < STEP_COLUMNS ? n : first + STEP_COLUMNS;
        float largest = 0;
        for (uint32_t j = first; j < end; j++)
            largest = fmaxf(largest, fabsf(x[j] - mu[j]));
        const uint16_t half = neap_f16_of_f32(fminf(largest * (1 / 127.0f), 65504));
        const float scale = neap_f32_of_f16(half);
        memcpy(dst + sizeof place + 2 * (size_t)s, &half, sizeof half);
        for (uint32_t j = first; j < end; j++) {
            const float code = scale > 0 ? rintf((x[j] - mu[j]) / scale) : 0;
            codes[j] = (uint8_t)(int8_t)fminf(fmaxf(code, -127), 127);
        }
    }
    return codes + n;
}

/* Returns the bytes written. */
static size_t encode_raw(const encoding *e, chunk_header *header, uint8_t *dst) {
    uint8_t *pos = dst + HEADER_BYTES;
    for (uint32_t r = 0; r < e->chunk->n_rows; r++)
        pos = gather_row(e->block, e->chunk, r, pos);
    header->n_exact = RAW;
    return (size_t)(pos - dst);
}

static size_t encode_coded(encoding *e, chunk_header *header, uint8_t *dst, float *ret_error) {
    const uint32_t n_groups = e->block->n_groups, n_rows = e->chunk->n_rows,
                   n_blocks = blocks_of_rows(n_rows);
    const neap_klt_basis *bases = &e->model->bases[e->block->first_group];
    const neap_klt_group *groups = &e->model->groups[e->block->first_group];
    uint8_t *codes = dst + HEADER_BYTES;
    float *sum = e->s.sum;
    for (uint32_t g = 0; g < n_groups; g++) {
        code_group(e, g, sum, codes);
        codes += (size_t)bases[g].code_bytes * n_blocks;
        sum += bases[g].n_columns;
    }
    double total = limit_errors(e);
    const float level = outlier_level(e);
    uint8_t *mu = codes, *pos = mu + whole_row_bytes(e->block), *rows;
    for (uint32_t r = 0; r < n_rows; r++) {
        const uint16_t row = (uint16_t)r;
        if (e->s.coded[r] > 0) continue;
        memcpy(pos, &row, sizeof row);
        pos += sizeof row;
    }
    rows = pos;
    for (uint32_t r = 0; r < n_rows; r++)
        if (e->s.coded[r] == 0) rows = gather_row(e->block, e->chunk, r, rows);
    pos = rows;
    codes = dst + HEADER_BYTES;
    sum = e->s.sum;
    for (uint32_t g = 0; g < n_groups; g++) {
        put_mean(e, g, level, sum, codes, mu);
        for (uint32_t r = 0; r < n_rows; r++) {
            const float error = e->s.error[(size_t)g * NEAP_KLT_ROWS + r];
            if (!(error > level)) continue;
            load_row(e, &groups[g], r, e->s.x);
            pos = put_outlier(&bases[g], g, r, e->s.x, e->s.panel, pos);
            header->n_outliers++;
            total -= error;
        }
        codes += (size_t)bases[g].code_bytes * n_blocks;
        mu += 2 * (size_t)bases[g].n_columns;
        sum += bases[g].n_columns;
    }
    const uint32_t n = e->n_coded * n_groups - header->n_outliers;
    *ret_error = n ? (float)(total / n) : 0;
    return (size_t)(pos - dst);
}

int neap_klt_encode_with(const neap_klt_kernel *kernel, const neap_klt_model *model,
                         const neap_klt_chunk *chunk, void *scratch_bytes, void *dst, size_t cap,
                         size_t *ret_len, float *ret_error) {
    if (!is_valid(model, chunk)) return NEAP_E_BOUND;
    encoding e = {
        .kernel = kernel, .model = model, .block = block_of(model, chunk), .chunk = chunk};
    assert((uintptr_t)scratch_bytes % 64 == 0);
    lay_out(model, e.block, scratch_bytes, &e.s);
    memset(e.s.coded, 0, NEAP_KLT_ROWS * sizeof *e.s.coded);
    for (uint32_t r = 0; r < chunk->n_rows; r++) {
        const bool coded = !must_be_exact(kernel, e.block, chunk, r);
        e.s.coded[r] = coded;
        e.n_coded += coded;
    }
    chunk_header header = {.magic = MAGIC,
                           .id = model->id,
                           .block = (uint16_t)chunk->block,
                           .n_rows = (uint16_t)chunk->n_rows,
                           .n_exact = (uint16_t)(chunk->n_rows - e.n_coded)};
    const uint32_t budget = outlier_budget(model, e.block, chunk->n_rows);
    const size_t most = fixed_bytes(model, e.block, chunk->n_rows, header.n_exact) +
                        outliers_bytes(model, e.block, budget);
    const size_t raw = neap_klt_bound(model, chunk);
    if (cap < (most < raw ? most : raw)) return NEAP_E_BOUND;
    float error = 0;
    const size_t len =
        most < raw ? encode_coded(&e, &header, dst, &error) : encode_raw(&e, &header, dst);
    header.bytes = (uint32_t)len;
    memcpy(dst, &header, sizeof header);
    header.checksum = neap_checksum((uint8_t *)dst + SUMMED_FROM, len - SUMMED_FROM);
    memcpy(dst, &header, sizeof header);
    *ret_len = len;
    if (ret_error) *ret_error = error;
    return 0;
}

/* ---- decoding ---- */

/* Where the sections of a good chunk begin. */
typedef struct decoding {
    const neap_klt_kernel *kernel;
    const neap_klt_model *model;
    const neap_klt_block *block;
    const neap_klt_chunk *chunk;
    const neap_klt_part *part;
    neap_klt_chunk rows; /* of the part */
    const uint8_t *codes, *mu, *exact, *exact_rows, *outliers, *end;
    uint32_t n_exact, n_outliers;
    scratch s;
} decoding;

static uint16_t u16_at(const uint8_t *src) {
    uint16_t value;
    memcpy(&value, src, sizeof value);
    return value;
}

/* Whether exact rows and outliers are in order and in range, scales too. */
static bool check_sections(decoding *d) {
    const uint8_t *pos = d->outliers;
    int64_t last = -1;
    for (uint32_t i = 0; i < d->n_exact; i++) {
        const int64_t row = u16_at(d->exact + 2 * (size_t)i);
        if (row <= last || row >= d->chunk->n_rows) return false;
        last = row;
    }
    for (const uint8_t *mu = d->mu; mu < d->exact; mu += 2)
        if ((u16_at(mu) & NEAP_F16_INF) == NEAP_F16_INF) return false;
    last = -1;
    for (uint32_t i = 0; i < d->n_outliers; i++) {
        if (d->end - pos < 4) return false;
        const uint32_t group = u16_at(pos), row = u16_at(pos + 2);
        const int64_t place = (int64_t)group << 16 | row;
        if (place <= last || group >= d->block->n_groups || row >= d->chunk->n_rows) return false;
        last = place;
        const neap_klt_basis *basis = &d->model->bases[d->block->first_group + group];
        if ((size_t)(d->end - pos) < outlier_bytes(basis)) return false;
        for (uint32_t s = 0; s * STEP_COLUMNS < basis->n_columns; s++)
            if (u16_at(pos + 4 + 2 * (size_t)s) >= NEAP_F16_INF) return false;
        pos += outlier_bytes(basis);
    }
    return pos == d->end;
}

static bool is_in_part(const neap_klt_part *part, uint32_t row) {
    return row - part->first_row < part->n_rows;
}

/* Overwrites the head's columns of the group's outliers, which begin at pos. */
static void put_outliers(const decoding *d, uint32_t g, const neap_klt_basis *basis,
                         const neap_klt_head *head, const uint8_t *pos, float *x, size_t pitch) {
    const uint32_t n_steps = (basis->n_columns + STEP_COLUMNS - 1) / STEP_COLUMNS;
    for (; pos < d->end && u16_at(pos) == g; pos += outlier_bytes(basis)) {
        const uint8_t *scales = pos + 4, *codes = scales + 2 * (size_t)n_steps;
        if (!is_in_part(d->part, u16_at(pos + 2))) continue;
        float *row = x + (u16_at(pos + 2) - d->part->first_row) * pitch;
        for (uint32_t i = 0; i < head->dim; i++) {
            const uint32_t j = head->column + i;
            row[i] = fmaf((float)(int8_t)codes[j],
                          neap_f32_of_f16(u16_at(scales + 2 * (size_t)(j / STEP_COLUMNS))),
                          neap_f32_of_f16(u16_at(d->mu + 2 * (size_t)j)));
        }
    }
}

static void decode_group(decoding *d, uint32_t g) {
    const neap_klt_group *group = &d->model->groups[d->block->first_group + g];
    const neap_klt_basis *basis = &d->model->bases[d->block->first_group + g];
    const uint32_t n_rows = d->part->n_rows, first = d->part->first_row;
    const neap_klt_row_blocks blocks = {.n = blocks_of_rows(d->chunk->n_rows),
                                        .first = first / NEAP_KLT_TILE,
                                        .end = blocks_of_rows(first + n_rows)};
    const float *y = d->s.y + first;
    const uint8_t *y8 = d->s.y8 + 4 * (size_t)first;
    bool unpacked = false;
    for (neap_klt_head head = {0}; neap_klt_next_head(d->block, group, &head);) {
        const uint32_t pitch = pitch_of(head.dim);
        if (head.head - d->part->first_head >= d->part->n_heads) continue;
        if (!plane_of(d->chunk, &head)->data) continue;
        if (!unpacked && n_rows == 8 && first % 8 == 0)
            d->kernel->unpack_8(d->model, basis, d->codes, blocks.n, first, d->s.y, d->s.y8);
        else if (!unpacked)
            d->kernel->unpack(d->model, basis, d->codes, blocks, d->s.y, d->s.y8);
        unpacked = true;
        for (uint32_t t = 0; t * NEAP_KLT_TILE < head.dim; t++) {
            const uint32_t at = t * NEAP_KLT_TILE, left = head.dim - at;
            uint16_t half[NEAP_KLT_TILE] = {0};
            float mu[NEAP_KLT_TILE];
            memcpy(half, d->mu + 2 * (size_t)(head.column + at),
                   sizeof *half * (left < NEAP_KLT_TILE ? left : NEAP_KLT_TILE));
            d->kernel->widen(half, NEAP_KLT_TILE, 1, NEAP_KLT_TILE, mu);
            d->kernel->product(basis, head.tile + t, mu, y, y8, n_rows, d->s.x + t * NEAP_KLT_TILE,
                               pitch);
        }
        put_outliers(d, g, basis, &head, d->outliers, d->s.x, pitch);
        const neap_klt_rows rows =
            rows_of(d->kernel, d->model, &d->rows, &head, 0, n_rows, true, &d->s);
        d->kernel->store(d->s.x, pitch, &rows);
    }
    while (d->outliers < d->end && u16_at(d->outliers) == g)
        d->outliers += outlier_bytes(basis);
    d->codes += (size_t)basis->code_bytes * blocks.n;
    d->mu += 2 * (size_t)basis->n_columns;
}

static int decode_coded(decoding *d, const uint8_t *src, size_t len) {
    const size_t fixed = fixed_bytes(d->model, d->block, d->chunk->n_rows, d->n_exact);
    if (d->n_exact > d->chunk->n_rows || len < fixed) return NEAP_E_CORRUPT;
    d->codes = src + HEADER_BYTES;
    d->mu = d->codes + codes_bytes(d->model, d->block, d->chunk->n_rows);
    d->exact = d->mu + whole_row_bytes(d->block);
    d->exact_rows = d->exact + 2 * (size_t)d->n_exact;
    d->outliers = src + fixed;
    d->end = src + len;
    if (!d->part->is_checked && !check_sections(d)) return NEAP_E_CORRUPT;
    for (uint32_t g = 0; g < d->block->n_groups; g++)
        decode_group(d, g);
    for (uint32_t i = 0; i < d->n_exact; i++) {
        const uint32_t row = u16_at(d->exact + 2 * (size_t)i);
        if (is_in_part(d->part, row))
            scatter_row(d->block, &d->rows, d->part, row - d->part->first_row,
                        d->exact_rows + i * whole_row_bytes(d->block));
    }
    return 0;
}

int neap_klt_decode_part_with(const neap_klt_kernel *kernel, const neap_klt_model *model,
                              const void *src, size_t len, const neap_klt_chunk *chunk,
                              const neap_klt_part *part, void *scratch_bytes) {
    chunk_header header;
    if (!is_valid(model, chunk)) return NEAP_E_BOUND;
    const neap_klt_part all = {.n_rows = chunk->n_rows,
                               .n_heads = block_of(model, chunk)->n_kv_heads};
    if (!part) part = &all;
    if (!neap_klt_part_is_within(part, all.n_rows, all.n_heads)) return NEAP_E_BOUND;
    if (len < sizeof header) return NEAP_E_CORRUPT;
    memcpy(&header, src, sizeof header);
    if (header.magic != MAGIC || header.bytes != len || header.id != model->id ||
        header.block != chunk->block || header.n_rows != chunk->n_rows ||
        (!part->is_checked &&
         header.checksum != neap_checksum((const uint8_t *)src + SUMMED_FROM, len - SUMMED_FROM)))
        return NEAP_E_CORRUPT;
    const uint8_t *pos = (const uint8_t *)src + HEADER_BYTES;
    decoding d = {.kernel = kernel,
                  .model = model,
                  .block = block_of(model, chunk),
                  .chunk = chunk,
                  .part = part,
                  .rows = *chunk,
                  .n_exact = header.n_exact,
                  .n_outliers = header.n_outliers};
    d.rows.positions += part->first_row;
    d.rows.n_rows = part->n_rows;
    if (header.n_exact == RAW) {
        if (header.n_outliers != 0 || len != neap_klt_bound(model, chunk)) return NEAP_E_CORRUPT;
        for (uint32_t r = 0; r < part->n_rows; r++)
            scatter_row(d.block, &d.rows, part, r,
                        pos + (part->first_row + r) * whole_row_bytes(d.block));
        return 0;
    }
    assert((uintptr_t)scratch_bytes % 64 == 0);
    lay_out(model, d.block, scratch_bytes, &d.s);
    return decode_coded(&d, src, len);
}

int neap_klt_decode_with(const neap_klt_kernel *kernel, const neap_klt_model *model,
                         const void *src, size_t len, const neap_klt_chunk *chunk,
                         void *scratch_bytes) {
    return neap_klt_decode_part_with(kernel, model, src, len, chunk, NULL, scratch_bytes);
}

/* The fastest kernel, looked up once: asking the CPU is slow under a hypervisor. */
static const neap_klt_kernel *best_kernel(void) {
    static _Atomic(const neap_klt_kernel *) best;
    const neap_klt_kernel *kernel = atomic_load_explicit(&best, memory_order_relaxed);
    if (kernel) return kernel;
    kernel = neap_klt_kernel_at(0);
    atomic_store_explicit(&best, kernel, memory_order_relaxed);
    return kernel;
}

int neap_klt_encode(const neap_klt_model *model, const neap_klt_chunk *chunk, void *scratch_bytes,
                    void *dst, size_t cap, size_t *ret_len, float *ret_error) {
    if (model->guest)
        return model->guest->encode(model->guest_self, chunk, scratch_bytes, dst, cap, ret_len,
                                    ret_error);
    return neap_klt_encode_with(best_kernel(), model, chunk, scratch_bytes, dst, cap, ret_len,
                                ret_error);
}

int neap_klt_decode(const neap_klt_model *model, const void *src, size_t len,
                    const neap_klt_chunk *chunk, void *scratch_bytes) {
    if (model->guest)
        return model->guest->decode(model->guest_self, src, len, chunk, NULL, scratch_bytes);
    return neap_klt_decode_with(best_kernel(), model, src, len, chunk, scratch_bytes);
}

int neap_klt_decode_part(const neap_klt_model *model, const void *src, size_t len,
                         const neap_klt_chunk *chunk, const neap_klt_part *part,
                         void *scratch_bytes) {
    if (model->guest)
        return model->guest->decode(model->guest_self, src, len, chunk, part, scratch_bytes);
    return neap_klt_decode_part_with(best_kernel(), model, src, len, chunk, part, scratch_bytes);
}
