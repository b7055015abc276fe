/* test_klt.c - the formats of klt: their bytes, what comes back exactly, what is refused. */
#include <errno.h>

#include "klt_problem.h"
#include "neap.h"
#include "temp.h"

/* ---- a model of whole numbers: alike on every machine ---- */

enum { DIM = 8, COLUMNS = 4 * DIM, COMPONENTS = 22, ROWS = 100 };

static const uint8_t golden_bits[COMPONENTS] = {8, 7, 6, 5, 5, 4, 4, 4, 4, 3, 3,
                                                3, 3, 2, 2, 2, 2, 2, 1, 1, 1, 1};

typedef struct golden {
    uint16_t f[COLUMNS * COMPONENTS], g[COMPONENTS * COLUMNS], metric[COLUMNS * DIM];
    float sd[COMPONENTS];
    neap_klt_rope rope;
    neap_klt_block block;
    neap_klt_group group;
    neap_klt_spec spec;
    int32_t positions[ROWS];
    uint16_t k[2][ROWS * DIM], v[2][ROWS * DIM];
    neap_klt_chunk chunk;
} golden;

/* Whole multiples of 2^-6. */
static uint16_t number(int32_t spread) {
    int32_t sum = 0;
    for (int i = 0; i < 12; i++)
        sum += (int32_t)klt_next(4096) - 2048;
    return neap_f16_of_f32((float)(sum * spread / 1024) * 0x1p-6f);
}

/* Hadamard's matrix: G F = 1. */
static float sign_at(uint32_t i, uint32_t j) {
    return __builtin_popcount(i & j) % 2 ? -1 : 1;
}

static void make_golden(golden *m) {
    klt_state = 5;
    *m = (golden){.rope = {NEAP_KLT_ROPE_NEOX, 6, 1.5f, {1, 0.25f, 0.03125f}}};
    for (uint32_t c = 0; c < COMPONENTS; c++) {
        m->sd[c] = 16;
        for (uint32_t i = 0; i < c; i += 4)
            m->sd[c] *= 0.5f;
        for (uint32_t j = 0; j < COLUMNS; j++) {
            m->f[j * COMPONENTS + c] = neap_f16_of_f32(sign_at(c, j) * 0x1p-5f);
            m->g[c * COLUMNS + j] = neap_f16_of_f32(sign_at(c, j));
        }
    }
    for (uint32_t i = 0; i < COLUMNS; i++)
        for (uint32_t j = 0; j < DIM; j++)
            m->metric[i * DIM + j] =
                neap_f16_of_f32(0.125f * (float)(i % DIM == j ? 1 + j % 3 : (i + j) % 4 == 1));
    m->block = (neap_klt_block){.n_layers = 2,
                                .layers = {4, 6},
                                .n_kv_heads = 1,
                                .k_head_dim = DIM,
                                .v_head_dim = DIM,
                                .n_groups = 1};
    m->group = (neap_klt_group){.n_heads = 1,
                                .n_components = COMPONENTS,
                                .unit = 1,
                                .outlier_error = 1,
                                .bits = golden_bits,
                                .sd = m->sd,
                                .f = m->f,
                                .g = m->g,
                                .metric = m->metric};
    m->spec = (neap_klt_spec){.name = "golden.gguf",
                              .digest = KLT_DIGEST,
                              .profile = NEAP_KLT_FOUR_LAYERS,
                              .outlier_permille = 20,
                              .ratio = 2,
                              .n_ropes = 1,
                              .n_blocks = 1,
                              .n_groups = 1,
                              .ropes = &m->rope,
                              .blocks = &m->block,
                              .groups = &m->group};
    for (uint32_t b = 1; b <= NEAP_KLT_BITS; b++)
        m->spec.tables[b] = neap_klt_default_table(b);
    m->chunk = (neap_klt_chunk){.n_rows = ROWS, .positions = m->positions};
    for (uint32_t r = 0; r < ROWS; r++)
        m->positions[r] = (int32_t)(r + 2);
    for (uint32_t l = 0; l < 2; l++) {
        for (uint32_t i = 0; i < ROWS * DIM; i++) {
            m->k[l][i] = number(i / DIM == 50 ? 300 : 16);
            m->v[l][i] = number(4);
        }
        m->chunk.k[l] = (neap_klt_plane){m->k[l], 2 * DIM};
        m->chunk.v[l] = (neap_klt_plane){m->v[l], 2 * DIM};
    }
}

/* A change of the formats, or of what is rounded how, must show here. */
static void test_bytes(void) {
    golden *m = klt_alloc(1, sizeof *m), *back = klt_alloc(1, sizeof *m);
    uint8_t *bytes = NULL, coded[16384];
    size_t len = 0;
    float error = 0;
    neap_klt_model *model = NULL;
    make_golden(m);
    CHECK(neap_klt_model_build(&m->spec, "golden", &bytes, &len) == 0);
    CHECK(memcmp(bytes, "NEAPKLT\0\2\0\0\0\3\0\0", 15) == 0);
    CHECK(len == 7104 && neap_checksum(bytes, len) == 0xdf6dbd0cf24cbfa4);
    CHECK(neap_klt_model_parse(bytes, len, KLT_DIGEST, "golden", &model) == 0);
    free(bytes);
    void *scratch = klt_scratch(model);
    for (size_t k = 0; neap_klt_kernel_at(k); k++) {
        const neap_klt_kernel *kernel = neap_klt_kernel_at(k);
        CHECK(neap_klt_encode_with(kernel, model, &m->chunk, scratch, coded, sizeof coded, &len,
                                   &error) == 0);
        CHECK(memcmp(coded, "NKC\1", 4) == 0);
        CHECK(len == 1472 && neap_checksum(coded, len) == 0xa3d41aed5f360f8f);
        make_golden(back);
        memset(back->k, 0, sizeof back->k);
        memset(back->v, 0, sizeof back->v);
        CHECK(neap_klt_decode_with(kernel, model, coded, len, &back->chunk, scratch) == 0);
        CHECK(neap_checksum(back->k, sizeof back->k) == 0x15c69fc093f38866);
        CHECK(neap_checksum(back->v, sizeof back->v) == 0xcc069061a6b57548);
    }
    free(scratch);
    neap_klt_model_close(model);
    free(m);
    free(back);
}

/* ---- the model file ---- */

static void no_log(int level, const char *line, void *ctx) {
    (void)level, (void)line, (void)ctx;
}

static void test_model_file(void) {
    char *dir = temp_dir(), path[600];
    snprintf(path, sizeof path, "%s/sub/model.klt", dir);
    golden *m = klt_alloc(1, sizeof *m);
    make_golden(m);
    neap_klt_model *model = NULL;
    CHECK(neap_klt_model_open(path, KLT_DIGEST, &model) == -ENOENT);
    CHECK(neap_klt_model_write(path, &m->spec) == 0);
    CHECK(neap_klt_model_open(path, KLT_DIGEST + 1, &model) == NEAP_E_CHANGED && model == NULL);
    CHECK(neap_klt_model_open(path, KLT_DIGEST, &model) == 0);
    const neap_klt_spec *spec = neap_klt_model_spec(model);
    CHECK(strcmp(spec->name, "golden.gguf") == 0 && spec->profile == NEAP_KLT_FOUR_LAYERS);
    CHECK(spec->outlier_permille == 20 && spec->n_blocks == 1 && spec->n_groups == 1);
    CHECK(memcmp(spec->ropes, &m->rope, sizeof m->rope) == 0);
    CHECK(memcmp(spec->blocks, &m->block, sizeof m->block) == 0);
    CHECK(memcmp(spec->groups[0].bits, golden_bits, sizeof golden_bits) == 0);
    CHECK(memcmp(spec->groups[0].sd, m->sd, sizeof m->sd) == 0);
    for (uint32_t b = 1; b <= NEAP_KLT_BITS; b++)
        CHECK(memcmp(spec->tables[b], neap_klt_default_table(b), sizeof(float) << b) == 0);
    uint32_t at = 9;
    CHECK(neap_klt_model_find(model, 6, &at) == 0 && at == 1);
    CHECK(neap_klt_model_find(model, 5, &at) == -1);
    neap_klt_model_close(model);
    temp_remove(dir);
    free(m);
}

/* No byte of a file, and no end but its own, goes unnoticed. */
static void test_damaged_model(void) {
    golden *m = klt_alloc(1, sizeof *m);
    uint8_t *bytes = NULL;
    size_t len = 0;
    neap_klt_model *model = NULL;
    make_golden(m);
    CHECK(neap_klt_model_build(&m->spec, "golden", &bytes, &len) == 0);
    for (size_t i = 0; i < len; i++) {
        bytes[i] ^= 1u << i % 8;
        const int err = neap_klt_model_parse(bytes, len, KLT_DIGEST, "golden", &model);
        CHECK(err == (i < 12 ? NEAP_E_VERSION : NEAP_E_CORRUPT) && model == NULL);
        bytes[i] ^= 1u << i % 8;
        uint8_t *cut = malloc(i + !i);
        CHECK(cut);
        memcpy(cut, bytes, i);
        CHECK(neap_klt_model_parse(cut, i, KLT_DIGEST, "golden", &model) ==
              (i < 128 ? NEAP_E_VERSION : NEAP_E_CORRUPT));
        free(cut);
    }
    free(bytes);
    free(m);
}

static bool is_refused(const golden *m) {
    uint8_t *bytes = NULL;
    size_t len = 0;
    const int err = neap_klt_model_build(&m->spec, "golden", &bytes, &len);
    free(bytes);
    CHECK(err == 0 || err == NEAP_E_BOUND);
    return err != 0;
}

/* Each field out of its range. */
static void test_refused_specs(void) {
    golden *m = klt_alloc(1, sizeof *m);
    uint8_t bits[COMPONENTS];
    make_golden(m);
    CHECK(!is_refused(m));
#define REFUSED(change)       \
    do {                      \
        make_golden(m);       \
        change;               \
        CHECK(is_refused(m)); \
    } while (0)
    REFUSED(memset(m->spec.name, 'a', sizeof m->spec.name));
    REFUSED(m->spec.profile = 4);
    REFUSED(m->spec.outlier_permille = 101);
    REFUSED(m->spec.n_ropes = NEAP_KLT_ROPES + 1);
    REFUSED(m->spec.n_blocks = 0);
    REFUSED(m->spec.n_groups = 0);
    REFUSED(m->spec.tables[3] = neap_klt_default_table(3) + 1); /* then 4-bit values: a step down */
    REFUSED(m->rope.mode = 3);
    REFUSED(m->rope.n_dims = 5);
    REFUSED(m->rope.n_dims = DIM + 2);
    REFUSED(m->rope.magnitude = NAN);
    REFUSED(m->rope.radians[2] = 65);
    REFUSED(m->block.n_layers = 5);
    REFUSED(m->block.layers[1] = 4);
    REFUSED(m->block.ropes[1] = 1);
    REFUSED(m->block.n_groups = 2);
    REFUSED(m->block.first_group = 1);
    REFUSED(m->block.k_head_dim = 0);
    REFUSED(m->block.k_head_dim = NEAP_KLT_HEAD_DIM + 1);
    REFUSED(m->group.n_heads = 2);
    REFUSED(m->group.first_head = 1);
    REFUSED(m->group.n_components = COLUMNS + 1);
    REFUSED(m->group.outlier_error = -1);
    memset(bits, 3, sizeof bits);
    REFUSED((m->group.bits = bits, bits[COMPONENTS - 1] = 4));
    REFUSED((m->group.bits = bits, bits[COMPONENTS - 1] = 0));
    REFUSED(m->group.unit = 0);
    REFUSED(m->spec.ratio = 0.5f);
    REFUSED(m->sd[3] = 0);
    REFUSED(m->sd[3] = 2 * m->sd[2]);
    REFUSED(m->f[7] = 0x7c00);
    REFUSED(m->g[7] = 0xfe00);
    REFUSED(m->metric[7] = 0xfc00);
    REFUSED((m->group.f = NULL, m->group.metric = NULL));
#undef REFUSED
    free(m);
}

/* ---- a higher ratio than the file's ---- */

/* The group with the first components only, F copied; bits are the caller's. */
static void cut_group(const neap_klt_block *block, neap_klt_group *group, uint32_t kept,
                      const uint8_t *bits) {
    const uint32_t n = neap_klt_group_columns(block, group);
    uint16_t *f = klt_alloc((size_t)n * kept, sizeof *f);
    for (size_t j = 0; j < n; j++)
        memcpy(f + j * kept, group->f + j * group->n_components, kept * sizeof *f);
    group->f = f;
    group->n_components = kept;
    group->bits = bits;
}

/* What opens at a ratio codes like a file that was written with those bits, but for its id. */
static void test_ratio(void) {
    const klt_shape shape = {2,  1, 2, 1,    16, 16,   NEAP_KLT_ROPE_NEOX,
                             16, 1, 4, 1e-3, 8,  true, false};
    klt_problem p;
    klt_problem_make(&p, &shape, 4);
    char *dir = temp_dir(), path[600];
    snprintf(path, sizeof path, "%s/model.klt", dir);
    p.spec.ratio = 3;
    p.groups[1].unit = 4; /* worth more */
    CHECK(neap_klt_model_write(path, &p.spec) == 0);
    neap_klt_model *own = NULL, *model = NULL, *none = NULL;
    CHECK(neap_klt_model_open(path, KLT_DIGEST, &own) == 0);
    CHECK(neap_klt_model_open_at(path, KLT_DIGEST, 3, &model) == 0);
    CHECK(neap_klt_model_id(model) == neap_klt_model_id(own));
    neap_klt_model_close(model);
    CHECK(neap_klt_model_open_at(path, KLT_DIGEST, 2.9, &none) == NEAP_E_BOUND && !none);
    CHECK(neap_klt_model_open_at(path, KLT_DIGEST, 900, &none) == NEAP_E_BOUND && !none);
    CHECK(neap_klt_model_open_at(path, KLT_DIGEST, 6, &model) == 0);
    CHECK(neap_klt_model_id(model) != neap_klt_model_id(own));

    const neap_klt_spec *spec = neap_klt_model_spec(model);
    CHECK(spec->ratio == 6);
    neap_klt_group groups[4], *whole = p.groups;
    uint64_t bits[4] = {0}, budget = 0;
    for (uint32_t g = 0; g < 4; g++) {
        groups[g] = whole[g];
        CHECK(spec->groups[g].n_components < whole[g].n_components);
        for (uint32_t c = 0; c < spec->groups[g].n_components; c++)
            bits[g] += spec->groups[g].bits[c];
        budget += neap_klt_budget_bits(p.columns[g], shape.permille, 6);
        cut_group(&p.blocks[g / 2], &groups[g], spec->groups[g].n_components, spec->groups[g].bits);
    }
    CHECK(bits[0] + bits[1] + bits[2] + bits[3] == budget && bits[1] > bits[0]);
    p.spec.groups = groups;
    neap_klt_model *cut = klt_model_of(&p.spec);
    neap_klt_chunk chunk;
    klt_chunk_make(&p, 0, 200, 0, &chunk);
    klt_chunk_fill(&p, &chunk, NULL);
    const size_t cap = neap_klt_bound(own, &chunk);
    uint8_t *a = klt_alloc(cap, 1), *b = klt_alloc(cap, 1);
    void *scratch = klt_scratch(own);
    size_t a_len, b_len;
    CHECK(neap_klt_encode(model, &chunk, scratch, a, cap, &a_len, NULL) == 0);
    CHECK(neap_klt_encode(cut, &chunk, scratch, b, cap, &b_len, NULL) == 0);
    CHECK(a_len == b_len && memcmp(a + 24, b + 24, a_len - 24) == 0);
    CHECK(neap_klt_decode(own, a, a_len, &chunk, scratch) == NEAP_E_CORRUPT);
    CHECK(neap_klt_decode(model, a, a_len, &chunk, scratch) == 0);
    for (uint32_t g = 0; g < 4; g++)
        free((void *)(uintptr_t)groups[g].f);
    free(a);
    free(b);
    free(scratch);
    klt_chunk_free(&p, &chunk);
    neap_klt_model_close(own);
    neap_klt_model_close(model);
    neap_klt_model_close(cut);
    p.spec.groups = whole;
    klt_problem_free(&p);
    temp_remove(dir);
}

/* ---- chunks ---- */

static const klt_shape small = {.n_blocks = 2,
                                .n_layers = 2,
                                .n_heads = 2,
                                .heads_a_group = 1,
                                .k_dim = 16,
                                .v_dim = 16,
                                .mode = NEAP_KLT_ROPE_NORM,
                                .rope_dims = 16,
                                .magnitude = 1,
                                .bits = 2.5,
                                .decay = 1e-3,
                                .permille = 8,
                                .metric = true};

typedef struct fixture {
    klt_problem p;
    neap_klt_model *model;
    neap_klt_chunk was, is;
    void *scratch;
    uint8_t *coded;
    size_t cap, len;
} fixture;

static void set_up(fixture *f, const klt_shape *shape, uint32_t n_rows) {
    klt_problem_make(&f->p, shape, 3);
    f->model = klt_model_of(&f->p.spec);
    klt_chunk_make(&f->p, 0, n_rows, 6, &f->was);
    klt_chunk_make(&f->p, 0, n_rows, 6, &f->is);
    klt_chunk_fill(&f->p, &f->was, NULL);
    f->scratch = klt_scratch(f->model);
    f->cap = neap_klt_bound(f->model, &f->was);
    f->coded = klt_alloc(f->cap, 1);
    CHECK(neap_klt_encode(f->model, &f->was, f->scratch, f->coded, f->cap, &f->len, NULL) == 0);
}

static void tear_down(fixture *f) {
    klt_chunk_free(&f->p, &f->was);
    klt_chunk_free(&f->p, &f->is);
    free(f->scratch);
    free(f->coded);
    neap_klt_model_close(f->model);
    klt_problem_free(&f->p);
}

static void test_damaged_chunk(void) {
    fixture f;
    set_up(&f, &small, 70);
    neap_klt_chunk *is = &f.is;
    CHECK(neap_klt_decode(f.model, f.coded, f.len, is, f.scratch) == 0);
    for (size_t i = 0; i < f.len; i++) {
        f.coded[i] ^= 1u << i % 8;
        CHECK(neap_klt_decode(f.model, f.coded, f.len, is, f.scratch) == NEAP_E_CORRUPT);
        f.coded[i] ^= 1u << i % 8;
        CHECK(neap_klt_decode(f.model, f.coded, i, is, f.scratch) == NEAP_E_CORRUPT);
    }
    is->block = 1;
    CHECK(neap_klt_decode(f.model, f.coded, f.len, is, f.scratch) == NEAP_E_CORRUPT);
    is->block = 2;
    CHECK(neap_klt_decode(f.model, f.coded, f.len, is, f.scratch) == NEAP_E_BOUND);
    is->block = 0;
    is->n_rows = 69;
    CHECK(neap_klt_decode(f.model, f.coded, f.len, is, f.scratch) == NEAP_E_CORRUPT);
    is->n_rows = 70;
    /* A model that differs in one value decodes nothing of this one's. */
    ((float *)(uintptr_t)f.p.groups[3].sd)[0] *= 1.5f;
    neap_klt_model *other = klt_model_of(&f.p.spec);
    CHECK(neap_klt_model_id(other) != neap_klt_model_id(f.model));
    CHECK(neap_klt_decode(other, f.coded, f.len, is, f.scratch) == NEAP_E_CORRUPT);
    neap_klt_model_close(other);
    tear_down(&f);
}

static void test_bounds(void) {
    fixture f;
    set_up(&f, &small, 256);
    const size_t raw = neap_klt_raw_bytes(f.model, &f.was);
    CHECK(raw == 256 * 2 * 2 * 2 * 16 * 2);
    CHECK(f.len <= neap_klt_expected_bytes(f.model, &f.was) && f.len * 5 < raw);
    size_t len = 7;
    CHECK(neap_klt_encode(f.model, &f.was, f.scratch, f.coded, f.len - 1, &len, NULL) ==
              NEAP_E_BOUND &&
          len == 7);
    f.was.n_rows = 257;
    CHECK(neap_klt_encode(f.model, &f.was, f.scratch, f.coded, f.cap, &len, NULL) == NEAP_E_BOUND);
    f.was.n_rows = 0;
    CHECK(neap_klt_encode(f.model, &f.was, f.scratch, f.coded, f.cap, &len, NULL) == NEAP_E_BOUND);
    f.was.n_rows = 256;
    /* Positions that nobody knows: every row is exact, and the chunk no larger than the bound. */
    memset((void *)(uintptr_t)f.was.positions, 0xff, 256 * sizeof(int32_t));
    CHECK(neap_klt_encode(f.model, &f.was, f.scratch, f.coded, f.cap, &len, NULL) == 0);
    CHECK(len == f.cap);
    CHECK(neap_klt_decode(f.model, f.coded, len, &f.is, f.scratch) == 0);
    CHECK(klt_chunk_equal(&f.p, &f.was, &f.is));
    tear_down(&f);
}

/* Decoding to other positions is decoding, then turning by the difference. */
static void test_other_positions(void) {
    klt_shape shape = small;
    for (shape.mode = NEAP_KLT_ROPE_NORM; shape.mode <= NEAP_KLT_ROPE_NEOX; shape.mode++) {
        fixture f;
        set_up(&f, &shape, 64);
        neap_klt_chunk moved;
        klt_chunk_make(&f.p, 0, 64, 6, &moved);
        for (uint32_t r = 0; r < 64; r++)
            ((int32_t *)(uintptr_t)moved.positions)[r] = f.was.positions[r] - 90;
        CHECK(neap_klt_decode(f.model, f.coded, f.len, &f.is, f.scratch) == 0);
        CHECK(neap_klt_decode(f.model, f.coded, f.len, &moved, f.scratch) == 0);
        for (uint32_t l = 0; l < 2; l++)
            for (uint32_t r = 0; r < 64; r++)
                for (uint32_t h = 0; h < 2; h++) {
                    const neap_klt_head head = {.layer = l, .head = h, .dim = 16};
                    double x[16], largest = 1;
                    for (uint32_t i = 0; i < 16; i++) {
                        x[i] = (double)neap_f32_of_f16(klt_head_at(&f.is, &head, r)[i]);
                        largest = fmax(largest, fabs(x[i]));
                    }
                    klt_turn(&f.p, -90, false, x);
                    for (uint32_t i = 0; i < 16; i++)
                        CHECK(fabs(x[i] - (double)neap_f32_of_f16(
                                              klt_head_at(&moved, &head, r)[i])) < 2e-3 * largest);
                }
        klt_chunk_free(&f.p, &moved);
        tear_down(&f);
    }
}

/* Coding again what was decoded adds a little error; it does not run away. */
static void test_again(void) {
    fixture f;
    klt_shape shape = small;
    shape.metric = false; /* so that rounding to f16 is the least of the errors */
    set_up(&f, &shape, 256);
    double first = 0, last = 0, floor;
    for (int i = 0; i < 10; i++) {
        CHECK(neap_klt_decode(f.model, f.coded, f.len, &f.is, f.scratch) == 0);
        CHECK(neap_klt_encode(f.model, &f.is, f.scratch, f.coded, f.cap, &f.len, NULL) == 0);
        last = 0;
        for (uint32_t g = 0; g < 2; g++)
            for (uint32_t r = 0; r < 256; r++)
                last += klt_row_error(&f.p, &f.was, &f.is, g, r, &floor);
        if (i == 0) first = last;
    }
    CHECK(first > 0 && last < 1.01 * first);
    tear_down(&f);
}

/* Mean error, in the metric, of what a model made of the problem decodes. */
static double error_of(klt_problem *p, const neap_klt_model *model, const neap_klt_chunk *was) {
    neap_klt_chunk is;
    size_t len;
    double error = 0, floor;
    void *scratch = klt_scratch(model);
    uint8_t *coded = klt_alloc(neap_klt_bound(model, was), 1);
    klt_chunk_make(p, 0, was->n_rows, 6, &is);
    CHECK(neap_klt_encode(model, was, scratch, coded, neap_klt_bound(model, was), &len, NULL) == 0);
    CHECK(neap_klt_decode(model, coded, len, &is, scratch) == 0);
    for (uint32_t g = 0; g < p->blocks[0].n_groups; g++)
        for (uint32_t r = 0; r < was->n_rows; r++)
            error += klt_row_error(p, was, &is, g, r, &floor);
    klt_chunk_free(p, &is);
    free(scratch);
    free(coded);
    return error / was->n_rows;
}

/* Coding by G and S is as good as by F but for their rounding (2 % here; by the first integers of G
 * alone it is 66 %), and an open model takes little more than its file. */
static void test_without_f(void) {
    klt_shape shape = small;
    shape.heads_a_group = 2;
    shape.k_dim = shape.v_dim = shape.rope_dims = 64;
    klt_problem with, without;
    klt_problem_make(&with, &shape, 3);
    shape.no_f = true;
    klt_problem_make(&without, &shape, 3);
    neap_klt_model *a = klt_model_of(&with.spec), *b = klt_model_of(&without.spec);
    neap_klt_chunk chunk;
    klt_chunk_make(&with, 0, 256, 6, &chunk);
    klt_chunk_fill(&with, &chunk, NULL);
    const double by_f = error_of(&with, a, &chunk), by_g = error_of(&without, b, &chunk);
    CHECK(by_f > 0 && fabs(by_g - by_f) < 0.04 * by_f);
    uint8_t *bytes = NULL;
    size_t len = 0;
    CHECK(neap_klt_model_build(&without.spec, "test", &bytes, &len) == 0);
    CHECK(neap_klt_model_bytes(b) < len + len / 4);
    free(bytes);
    klt_chunk_free(&with, &chunk);
    neap_klt_model_close(a);
    neap_klt_model_close(b);
    klt_problem_free(&with);
    klt_problem_free(&without);
}

int main(void) {
    neap_set_log(no_log, NULL);
    test_bytes();
    test_model_file();
    test_damaged_model();
    test_refused_specs();
    test_ratio();
    test_damaged_chunk();
    test_bounds();
    test_other_positions();
    test_again();
    test_without_f();
    return 0;
}
