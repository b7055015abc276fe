/* test_select.c - selective reconstruction: a planted needle is chosen and answers like the whole,
 * ties go to the earlier span, what is there has a head start, keys that are not finite are kept
 * exactly, bad configurations are refused, and its bytes are what malloc gave. */
#include <malloc.h>
#include <math.h>
#include <string.h>

#include "check.h"
#include "half.h"
#include "neap.h"
#include "select.h"

enum { CHUNK = NEAP_ATTN_CHUNK_CELLS, N_CHUNKS = 16, CELLS = N_CHUNKS * CHUNK, ELEMS = 64 };
enum { NEEDLE = 1235 };

static uint16_t k[CELLS][ELEMS], v[CELLS][ELEMS];
static uint8_t asked[CELLS];

static uint32_t next_random(void) {
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

static float noise(void) {
    return (float)next_random() / (float)(1 << 23) - 1.0f;
}

static void fill(void) {
    for (size_t i = 0; i < CELLS * ELEMS; i++) {
        (&k[0][0])[i] = neap_f16_of_f32(noise());
        (&v[0][0])[i] = neap_f16_of_f32(noise());
    }
}

static int reconstruct(void *ctx, uint32_t thread, uint32_t head, uint32_t first, uint32_t n,
                       uint16_t *k_dst, uint16_t *v_dst) {
    (void)ctx;
    CHECK(thread == 0 && head == 0);
    asked[first] = 1;
    memcpy(k_dst, k[first], n * sizeof *k);
    memcpy(v_dst, v[first], n * sizeof *v);
    return 0;
}

static neap_select_config config_of(uint32_t budget) {
    return (neap_select_config){.n_heads = 1,
                                .n_kv_heads = 1,
                                .k_elems = ELEMS,
                                .v_elems = ELEMS,
                                .span_cells = 8,
                                .budget_cells = budget,
                                .max_cells = CELLS};
}

static neap_select *make(const neap_select_config *config) {
    neap_select *select;
    CHECK(neap_select_create(config, &select) == 0);
    for (uint32_t chunk = 0; chunk < N_CHUNKS; chunk++) {
        const neap_select_rows rows = {k[chunk * CHUNK], v[chunk * CHUNK], sizeof *k, sizeof *v};
        CHECK(neap_select_append(select, &rows) == 0);
    }
    return select;
}

static neap_attn_shape whole_shape(const float *q, float *out, const void **chunks) {
    for (uint32_t i = 0; i < N_CHUNKS; i++) {
        chunks[i] = k[i * CHUNK];
        chunks[N_CHUNKS + i] = v[i * CHUNK];
    }
    return (neap_attn_shape){.n_tokens = 1,
                             .n_heads = 1,
                             .n_kv_heads = 1,
                             .n_streams = 1,
                             .n_cells = CELLS,
                             .k = {NEAP_ATTN_F16, ELEMS, sizeof *k, sizeof *k, chunks},
                             .v = {NEAP_ATTN_F16, ELEMS, sizeof *v, sizeof *v, chunks + N_CHUNKS},
                             .q = {(char *)(uintptr_t)q, 4 * ELEMS, 4 * ELEMS, 0},
                             .out = {(char *)out, 4 * ELEMS, 4 * ELEMS, 0},
                             .scale = 0.5f};
}

static void attend(const neap_attn_shape *shape) {
    static neap_attn job;
    void *scratch = aligned_alloc(64, neap_attn_scratch_bytes(shape, 1));
    void *state = aligned_alloc(64, neap_attn_state_bytes(shape));
    CHECK(scratch && state);
    neap_attn_plan(&job, shape, 1, scratch, state);
    neap_attn_run(&job, 0);
    CHECK(neap_attn_result(&job) == 0);
    free(scratch);
    free(state);
}

/* Attention by selection into out. */
static void step(neap_select *select, const neap_attn_shape *whole) {
    static neap_select_step s;
    neap_attn_shape shape;
    void *scratch = aligned_alloc(64, neap_select_scratch_bytes(select));
    void *memory = aligned_alloc(64, neap_select_shape_bytes(select, whole));
    CHECK(scratch && memory && neap_select_applies(select, whole));
    memset(asked, 0, sizeof asked);
    neap_select_begin(&s, select, &whole->q, 1, whole->scale, reconstruct, NULL, scratch);
    CHECK(neap_select_run(&s, 0) == 0);
    neap_select_shape(select, whole, memory, &shape);
    attend(&shape);
    free(scratch);
    free(memory);
}

static double difference(const float *a, const float *b) {
    double error = 0.0, power = 0.0;
    for (int i = 0; i < ELEMS; i++) {
        error += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        power += (double)b[i] * (double)b[i];
    }
    return sqrt(error / power);
}

/* One key of a thousand spans answers the query; an eighth of the context is budget enough. */
static void needle(void) {
    float q[ELEMS], out[ELEMS], expected[ELEMS];
    const void *chunks[2 * N_CHUNKS];
    fill();
    for (int i = 0; i < ELEMS; i++) {
        q[i] = noise() * 2.0f;
        k[NEEDLE][i] = neap_f16_of_f32(q[i] * 2.0f);
    }
    const neap_attn_shape whole = whole_shape(q, out, chunks);
    attend(&whole);
    memcpy(expected, out, sizeof out);
    const neap_select_config config = config_of(CELLS / 8);
    neap_select *select = make(&config);
    step(select, &whole);
    CHECK(asked[NEEDLE / 8 * 8]);
    CHECK(difference(out, expected) < 0.01);
    uint64_t kept, fresh;
    neap_select_counts(select, &kept, &fresh);
    CHECK(kept == 0 && fresh == CELLS / 8 / 8);
    step(select, &whole); /* the same query: all is there */
    neap_select_counts(select, &kept, &fresh);
    CHECK(kept == CELLS / 8 / 8 && fresh == CELLS / 8 / 8 && !asked[NEEDLE / 8 * 8]);
    CHECK(difference(out, expected) < 0.01);
    neap_select_free(select);

    const neap_select_config all = config_of(CELLS);
    select = make(&all);
    step(select, &whole);
    CHECK(difference(out, expected) < 1e-5);
    neap_select_free(select);
}

static void ties(void) {
    float q[ELEMS] = {1.0f}, out[ELEMS];
    const void *chunks[2 * N_CHUNKS];
    fill();
    for (uint32_t cell = 0; cell < CELLS; cell++) {
        memcpy(k[cell], k[0], sizeof *k);
    }
    const neap_attn_shape whole = whole_shape(q, out, chunks);
    const neap_select_config config = config_of(80);
    neap_select *select = make(&config);
    step(select, &whole);
    for (uint32_t span = 0; span < CELLS / 8; span++) {
        CHECK(asked[span * 8] == (span < 10));
    }
    q[0] = NAN; /* whatever it chooses, it ends */
    step(select, &whole);
    neap_select_free(select);
}

/* Of nearly equal spans those that are there stay; others take their place when they are ahead by
 * more than the head start. */
static void head_start(void) {
    float q[ELEMS] = {1.0f}, out[ELEMS];
    const void *chunks[2 * N_CHUNKS];
    const uint32_t n = CELLS / 8;
    const float logits = 0.5f; /* of the last span, less those of the first one, at scale 0.5 */
    memset(k, 0, sizeof k);
    for (uint32_t cell = 0; cell < CELLS; cell++) {
        k[cell][0] = neap_f16_of_f32(1.0f + (float)(cell / 8) / (float)n * 2.0f * logits);
    }
    const neap_attn_shape whole = whole_shape(q, out, chunks);
    const neap_select_config config = config_of(80);
    neap_select *select = make(&config);
    step(select, &whole);
    for (uint32_t span = 0; span < n; span++) {
        CHECK(asked[span * 8] == (span >= n - 10));
    }
    q[0] = -0.9f * NEAP_SELECT_HEAD_START / logits; /* now the first ones are ahead, by less */
    step(select, &whole);
    for (uint32_t span = 0; span < n; span++) {
        CHECK(!asked[span * 8]);
    }
    q[0] = -1.2f * NEAP_SELECT_HEAD_START / logits;
    step(select, &whole);
    for (uint32_t span = 0; span < n; span++) {
        CHECK(asked[span * 8] == (span < 10));
    }
    neap_select_free(select);
}

static void not_finite(void) {
    float q[ELEMS] = {1.0f}, out[ELEMS];
    const void *chunks[2 * N_CHUNKS];
    fill();
    k[NEEDLE][3] = 0x7c00;
    const neap_attn_shape whole = whole_shape(q, out, chunks);
    neap_select_config config = config_of(CELLS);
    config.outlier_cells = 8; /* the one span that is least like its mean */
    neap_select *select = make(&config);
    step(select, &whole);
    for (uint32_t span = 0; span < CELLS / 8; span++) {
        CHECK(asked[span * 8] == (span != NEEDLE / 8));
    }
    neap_select_free(select);
}

static void refused(void) {
    const neap_select_config good = config_of(64);
    neap_select *select = NULL;
    neap_select_config bad[8];
    for (int i = 0; i < 8; i++) {
        bad[i] = good;
    }
    bad[0].n_kv_heads = 0;
    bad[1].n_heads = 3, bad[1].n_kv_heads = 2;
    bad[2].k_elems = 1025;
    bad[3].v_elems = 0;
    bad[4].span_cells = 12;
    bad[5].span_cells = 128;
    bad[6].budget_cells = 0;
    bad[7].max_cells = 100;
    for (int i = 0; i < 8; i++) {
        CHECK(neap_select_create(&bad[i], &select) == NEAP_E_BOUND && select == NULL);
    }
    select = make(&good);
    const neap_select_rows rows = {k, v, sizeof *k, sizeof *v};
    CHECK(neap_select_append(select, &rows) == NEAP_E_BOUND);
    CHECK(neap_select_cells(select) == CELLS);
    neap_select_free(select);
    neap_select_free(NULL);
}

/* Within what malloc adds to each block. */
static void bytes(void) {
    neap_select_config config = config_of(512);
    config.outlier_cells = 200;
    config.window_cells = 300;
    const size_t before = mallinfo2().uordblks + mallinfo2().hblkhd;
    neap_select *select = make(&config);
    const size_t after = mallinfo2().uordblks + mallinfo2().hblkhd;
    const size_t said = neap_select_bytes(select);
    CHECK(said == neap_select_expected_bytes(&config, CELLS));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    CHECK(after - before >= said && after - before < said + 64 * 24 + 2 * 4096);
#else
    (void)before, (void)after;
#endif
    /* By hand: K and V of the buffer, a landmark and its scale for each span, and lists. */
    const size_t buffer = (512 + 200 + 304 + CHUNK - 1) / CHUNK * CHUNK * ELEMS * 2 * 2;
    const size_t landmarks = CELLS / 8 * (ELEMS + sizeof(float));
    CHECK(said > buffer + landmarks && said < buffer + landmarks + 2048);
    neap_select_truncate(select, 0);
    CHECK(neap_select_bytes(select) == said - landmarks);
    neap_select_free(select);
}

int main(void) {
    needle();
    ties();
    head_start();
    not_finite();
    refused();
    bytes();
    return 0;
}
