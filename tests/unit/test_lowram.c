/* test_lowram.c - fits and chunks of LowRAM: what is exact, what is counted, what is refused, what
 * tells that a fit no longer serves. */
#include <errno.h>

#include "lowram_problem.h"
#include "neap.h"

static const lowram_shape plain = {4, 2, 16, 24, 1000, 10, NEAP_KLT_ROPE_NEOX, 12, 0.02f};

static void no_log(int level, const char *line, void *ctx) {
    (void)level, (void)line, (void)ctx;
}

static neap_lowram *fit_of(const lowram_problem *p, const neap_lowram_options *options) {
    neap_lowram *fit = NULL;
    CHECK(neap_lowram_fit(options, p->layers, p->shape.n_layers, &p->context, &fit) == 0);
    return fit;
}

typedef struct coded {
    uint8_t *bytes;
    size_t len;
    neap_lowram_error error;
} coded;

static coded encode(const neap_lowram *fit, const neap_lowram_chunk *chunk) {
    coded c;
    const size_t cap = neap_lowram_bound(fit, chunk->group, chunk->n_rows);
    void *scratch = lowram_scratch(fit);
    uint8_t *bytes = lowram_alloc(cap, 1);
    CHECK(neap_lowram_encode(fit, chunk, scratch, bytes, cap, &c.len, &c.error) == 0);
    CHECK(c.len <= cap);
    /* Of its exact size, for AddressSanitizer. */
    c.bytes = lowram_alloc(c.len, 1);
    memcpy(c.bytes, bytes, c.len);
    free(bytes);
    free(scratch);
    return c;
}

static int decode(const neap_lowram *fit, const coded *c, const neap_lowram_chunk *chunk) {
    void *scratch = lowram_scratch(fit);
    const int err = neap_lowram_decode(fit, c->bytes, c->len, chunk, scratch);
    free(scratch);
    return err;
}

/* Full rank, nothing quantised, all residuals: what comes back differs by the rounding to f16. */
static void test_exact(void) {
    lowram_problem p;
    neap_lowram_options options;
    lowram_problem_make(&p, &plain, 1);
    neap_lowram_defaults(&options, 1);
    options.rank = 4 * 2 * 16;
    options.residual_share = 1;
    options.a_bits = options.residual_bits = NEAP_LOWRAM_F16;
    neap_lowram *fit = fit_of(&p, &options);
    for (uint32_t at = 0; at < plain.n_rows; at += NEAP_LOWRAM_ROWS) {
        const neap_lowram_chunk was = lowram_chunk_at(&p, 0, 0, 4, at);
        neap_lowram_chunk is = lowram_chunk_like(&p, &was, 4);
        coded c = encode(fit, &was);
        CHECK(c.error.keys < 1e-6f && c.error.values < 1e-6f);
        CHECK(decode(fit, &c, &is) == 0);
        for (uint32_t l = 0; l < 4; l++)
            for (uint32_t r = 0; r < was.n_rows; r++) {
                double k = 0, v = 0;
                CHECK(lowram_off(&was.k[l], &is.k[l], r, 2 * 16, &k) <= 2e-6 * k);
                CHECK(lowram_off(&was.v[l], &is.v[l], r, 2 * 24, &v) <= 2e-6 * v);
            }
        lowram_chunk_free(&is, 4);
        free(c.bytes);
    }
    neap_lowram_free(fit);
    lowram_problem_free(&p);
}

/* Bytes of a context by the formula, and by counting; more of them for a lower ratio. */
static void test_budget(void) {
    const lowram_shape shape = {5, 2, 16, 24, 3000, 10, NEAP_KLT_ROPE_NEOX, 12, 0.02f};
    const double ratios[] = {5, 7, 9};
    lowram_problem p;
    lowram_problem_make(&p, &shape, 2);
    for (int i = 0; i < 3; i++) {
        neap_lowram_options options;
        neap_lowram_budget four, one;
        size_t fit_bytes;
        neap_lowram_defaults(&options, ratios[i]);
        CHECK(neap_lowram_plan(&options, p.layers, 4, shape.n_rows, &four) == 0);
        CHECK(neap_lowram_plan(&options, p.layers, 1, shape.n_rows, &one) == 0);
        CHECK(four.raw_bytes == 2 * 3000 * 4 * 2 * (16 + 24) && four.hidden == 16);
        neap_lowram *fit = fit_of(&p, &options);
        CHECK(neap_lowram_n_groups(fit) == 2);
        CHECK(neap_lowram_group_at(fit, 0)->rank == four.rank);
        CHECK(neap_lowram_group_at(fit, 1)->rank == one.rank);
        neap_lowram_bytes(fit, &fit_bytes);
        CHECK(fit_bytes == NEAP_LOWRAM_FILE_HEADER + four.fixed_key_bytes + four.fixed_value_bytes +
                               one.fixed_key_bytes + one.fixed_value_bytes);
        uint64_t bytes = fit_bytes - NEAP_LOWRAM_FILE_HEADER;
        for (uint32_t g = 0; g < 2; g++)
            for (uint32_t at = 0; at < shape.n_rows; at += NEAP_LOWRAM_ROWS) {
                const neap_lowram_chunk chunk = lowram_chunk_at(&p, g, 4 * g, g ? 1 : 4, at);
                coded c = encode(fit, &chunk);
                bytes += c.len;
                free(c.bytes);
            }
        CHECK(bytes == four.key_bytes + four.value_bytes + one.key_bytes + one.value_bytes);
        const uint64_t raw = four.raw_bytes + one.raw_bytes;
        CHECK((double)raw / (double)bytes >= ratios[i]);
        /* What is left over is less than one more rank and one more residual of each head. */
        CHECK((double)raw / (double)bytes < 1.03 * ratios[i]);
        neap_lowram_free(fit);
    }
    neap_lowram_options options;
    neap_lowram_budget budget;
    neap_lowram_defaults(&options, 6);
    CHECK(neap_lowram_plan(&options, p.layers, 4, 200, &budget) == NEAP_E_BUDGET);
    options.ratio = 0.5;
    CHECK(neap_lowram_plan(&options, p.layers, 4, 3000, &budget) == NEAP_E_BOUND);
    neap_lowram_defaults(&options, 6);
    options.a_bits = 9;
    CHECK(neap_lowram_plan(&options, p.layers, 4, 3000, &budget) == NEAP_E_BOUND);
    neap_lowram_defaults(&options, 6);
    options.rank = 129;
    CHECK(neap_lowram_plan(&options, p.layers, 4, 3000, &budget) == NEAP_E_BOUND);
    lowram_problem_free(&p);
}

/* Exact rows, positions moved on, planes left out. */
static void test_rows(void) {
    lowram_problem p;
    neap_lowram_options options;
    lowram_problem_make(&p, &plain, 3);
    lowram_row(&p.k[1], 70)[5] = 0x7c00;
    lowram_row(&p.v[3], 200)[1] = 0xfe00;
    p.positions[90] = -1;
    neap_lowram_defaults(&options, 3);
    neap_lowram *fit = fit_of(&p, &options);
    const neap_lowram_chunk was = lowram_chunk_at(&p, 0, 0, 4, 0);
    neap_lowram_chunk is = lowram_chunk_like(&p, &was, 4), part = lowram_chunk_like(&p, &was, 4),
                      moved = lowram_chunk_like(&p, &was, 4);
    coded c = encode(fit, &was);
    CHECK(decode(fit, &c, &is) == 0);
    for (uint32_t r = 0; r < was.n_rows; r++)
        for (uint32_t l = 0; l < 4; l++) {
            double power = 0;
            const double k = lowram_off(&was.k[l], &is.k[l], r, 32, &power),
                         v = lowram_off(&was.v[l], &is.v[l], r, 48, &power);
            const bool is_exact = r < 4 || r == 70 || r == 90 || r == 200;
            const neap_klt_plane k_was = {lowram_row(&was.k[l], r), 0},
                                 k_is = {lowram_row(&is.k[l], r), 0},
                                 v_was = {lowram_row(&was.v[l], r), 0},
                                 v_is = {lowram_row(&is.v[l], r), 0};
            CHECK(is_exact == (lowram_rows_equal(&k_was, &k_is, 1, 32) &&
                               lowram_rows_equal(&v_was, &v_is, 1, 48)));
            CHECK(is_exact || k + v < 0.1 * power);
        }
    /* Only V of layer 2, then only K of layers 0 and 3. */
    neap_lowram_chunk view = part;
    for (uint32_t l = 0; l < 4; l++) {
        view.k[l].data = NULL;
        if (l != 2) view.v[l].data = NULL;
    }
    CHECK(decode(fit, &c, &view) == 0);
    CHECK(lowram_rows_equal(&is.v[2], &part.v[2], was.n_rows, 48));
    CHECK(lowram_row(&part.k[2], 9)[0] == 0xffff && lowram_row(&part.v[1], 9)[0] == 0xffff);
    view.v[2].data = NULL;
    view.k[0].data = part.k[0].data;
    view.k[3].data = part.k[3].data;
    CHECK(decode(fit, &c, &view) == 0);
    CHECK(lowram_rows_equal(&is.k[0], &part.k[0], was.n_rows, 32));
    CHECK(lowram_rows_equal(&is.k[3], &part.k[3], was.n_rows, 32));
    CHECK(lowram_row(&part.k[1], 9)[0] == 0xffff);
    /* 37 positions on: as if K had been turned there. */
    int32_t positions[NEAP_LOWRAM_ROWS];
    for (uint32_t r = 0; r < was.n_rows; r++)
        positions[r] = was.positions[r] + 37;
    moved.positions = positions;
    CHECK(decode(fit, &c, &moved) == 0);
    for (uint32_t l = 0; l < 4; l++) {
        const neap_klt_rope *rope = &p.layers[l].rope;
        CHECK(lowram_rows_equal(&is.v[l], &moved.v[l], was.n_rows, 48));
        for (uint32_t r = 4; r < 60; r++) {
            float table[16], head[16];
            for (uint32_t i = 0; i < 16; i++)
                head[i] = neap_f32_of_f16(lowram_row(&is.k[l], r)[16 + i]);
            neap_rope_table(rope, was.positions[r], table);
            neap_rope_unturn(rope, table, head);
            neap_rope_table(rope, positions[r], table);
            neap_rope_turn(rope, table, head);
            for (uint32_t i = 0; i < 16; i++)
                CHECK(fabsf(neap_f32_of_f16(lowram_row(&moved.k[l], r)[16 + i]) - head[i]) < 0.03f);
        }
    }
    lowram_chunk_free(&is, 4);
    lowram_chunk_free(&part, 4);
    lowram_chunk_free(&moved, 4);
    free(c.bytes);
    neap_lowram_free(fit);
    lowram_problem_free(&p);
}

/* What came after the fit is coded with it: as well where it is alike, and said where it is not. */
static void test_grown(void) {
    lowram_shape shape = plain;
    shape.n_rows = 2048;
    lowram_problem p, other;
    neap_lowram_options options;
    lowram_problem_make(&p, &shape, 4);
    lowram_problem_make(&other, &shape, 5);
    neap_lowram_defaults(&options, 3);
    options.rank = 20;
    p.context.n_rows = 1536;
    neap_lowram *fit = fit_of(&p, &options);
    const neap_lowram_error made = neap_lowram_group_at(fit, 0)->error;
    CHECK(made.keys > 0 && made.keys < 0.05f && made.values > 0 && made.values < 0.2f);
    const neap_lowram_chunk next = lowram_chunk_at(&p, 0, 0, 4, 1536),
                            foreign = lowram_chunk_at(&other, 0, 0, 4, 1536);
    coded c = encode(fit, &next), d = encode(fit, &foreign);
    CHECK(c.error.keys < 1.3f * made.keys && c.error.values < 1.5f * made.values);
    CHECK(d.error.keys > 4 * made.keys);
    free(c.bytes);
    free(d.bytes);
    neap_lowram_free(fit);
    lowram_problem_free(&p);
    lowram_problem_free(&other);
}

/* No byte of a fit or of a chunk, and no end but its own, goes unnoticed; nor another's chunk. */
static void test_damaged(void) {
    const lowram_shape shape = {2, 1, 8, 8, 400, 5, NEAP_KLT_ROPE_NORM, 8, 0.02f};
    lowram_problem p;
    neap_lowram_options options;
    lowram_problem_make(&p, &shape, 6);
    neap_lowram_defaults(&options, 2);
    neap_lowram *fit = fit_of(&p, &options), *same = NULL, *other;
    options.seed++;
    other = fit_of(&p, &options);
    size_t len;
    const void *bytes = neap_lowram_bytes(fit, &len);
    uint8_t *copy = lowram_alloc(len, 1);
    memcpy(copy, bytes, len);
    for (size_t i = 0; i < len; i++) {
        copy[i] ^= (uint8_t)(1u << i % 8);
        CHECK(neap_lowram_open(copy, len, &same) == (i < 12 ? NEAP_E_VERSION : NEAP_E_CORRUPT));
        copy[i] ^= (uint8_t)(1u << i % 8);
        CHECK(neap_lowram_open(copy, i, &same) == (i < 32 ? NEAP_E_VERSION : NEAP_E_CORRUPT));
    }
    CHECK(same == NULL && neap_lowram_open(copy, len, &same) == 0);
    free(copy);
    CHECK(neap_lowram_id(same) == neap_lowram_id(fit) &&
          neap_lowram_id(fit) != neap_lowram_id(other));
    const neap_lowram_chunk was = lowram_chunk_at(&p, 0, 0, 2, 256);
    neap_lowram_chunk is = lowram_chunk_like(&p, &was, 2), also = lowram_chunk_like(&p, &was, 2);
    coded c = encode(fit, &was);
    for (size_t i = 0; i < c.len; i++) {
        c.bytes[i] ^= (uint8_t)(1u << i % 8);
        CHECK(decode(fit, &c, &is) == NEAP_E_CORRUPT);
        c.bytes[i] ^= (uint8_t)(1u << i % 8);
        const coded cut = {c.bytes, i, c.error};
        CHECK(decode(fit, &cut, &is) == NEAP_E_CORRUPT);
    }
    CHECK(decode(fit, &c, &is) == 0 && decode(same, &c, &also) == 0);
    for (uint32_t l = 0; l < 2; l++)
        CHECK(lowram_rows_equal(&is.k[l], &also.k[l], was.n_rows, 8) &&
              lowram_rows_equal(&is.v[l], &also.v[l], was.n_rows, 8));
    CHECK(decode(other, &c, &is) == NEAP_E_CORRUPT);
    is.n_rows--;
    CHECK(decode(fit, &c, &is) == NEAP_E_CORRUPT);
    is.n_rows = NEAP_LOWRAM_ROWS + 1;
    CHECK(decode(fit, &c, &is) == NEAP_E_BOUND);
    is.group = 1;
    CHECK(decode(fit, &c, &is) == NEAP_E_BOUND);
    size_t none = 0;
    void *scratch = lowram_scratch(fit);
    CHECK(neap_lowram_encode(fit, &was, scratch, c.bytes, 100, &none, NULL) == NEAP_E_BOUND);
    free(scratch);
    free(c.bytes);
    lowram_chunk_free(&is, 2);
    lowram_chunk_free(&also, 2);
    neap_lowram_free(fit);
    neap_lowram_free(same);
    neap_lowram_free(other);
    lowram_problem_free(&p);
}

/* The paper's ablations, by their sign: centred keys, the worst residuals, a hidden layer. */
static void test_choices(void) {
    lowram_problem p;
    neap_lowram_options options;
    lowram_problem_make(&p, &plain, 7);
    neap_lowram_defaults(&options, 3);
    options.rank = 12;
    options.a_bits = 4;
    options.residual_share = 0.2;
    neap_lowram_error base, error;
#define ERROR_WITH(change, ret)                    \
    do {                                           \
        const neap_lowram_options held = options;  \
        change;                                    \
        neap_lowram *fit = fit_of(&p, &options);   \
        ret = neap_lowram_group_at(fit, 0)->error; \
        neap_lowram_free(fit);                     \
        options = held;                            \
    } while (0)
    ERROR_WITH((void)0, base);
    ERROR_WITH(options.residual_share = 0, error);
    CHECK(error.values > 1.2f * base.values && error.keys == base.keys);
    ERROR_WITH(options.residuals = NEAP_LOWRAM_RANDOM, error);
    CHECK(error.values > 1.05f * base.values);
    ERROR_WITH(options.hidden_factor = 0, error);
    CHECK(error.values > 1.5f * base.values);
    ERROR_WITH(options.shared_predictor = true, error);
    CHECK(error.values > 1.2f * base.values);
    ERROR_WITH(options.a_bits = 2, error);
    CHECK(error.keys > 3 * base.keys);
    ERROR_WITH(options.b_bits = 4, error);
    CHECK(error.keys > 1.2f * base.keys);
    ERROR_WITH(options.b_bits = 8, error);
    CHECK(error.keys < 1.1f * base.keys);
    ERROR_WITH(options.rank = 6, error);
    CHECK(error.keys > 2 * base.keys);
    ERROR_WITH(options.factorisation = NEAP_LOWRAM_RANDOMISED, error);
    CHECK(fabsf(error.keys / base.keys - 1) < 0.05f);
    ERROR_WITH(options.sample_rows = 500, error);
    CHECK(error.keys < 1.3f * base.keys && error.keys != base.keys);
    /* Over the power of what is left: it has the mean in it now. */
    ERROR_WITH((options.not_centred = true, options.a_bits = 3), error);
    CHECK(error.keys < base.keys * 4);
    lowram_problem_free(&p);
}

/* The predictor that a fit starts from, of keys as they are. */
static void start_fitted(void *ctx, uint32_t layer, uint32_t head, const float *mean,
                         neap_value_options *inout_options, neap_value *io) {
    const lowram_problem *p = ctx;
    const size_t n = p->shape.n_rows, dk = p->shape.k_dim, dv = p->shape.v_dim;
    float *keys = lowram_alloc(n * dk, sizeof *keys), *values = lowram_alloc(n * dv, sizeof *keys);
    for (size_t i = 0; i < n * dk; i++)
        keys[i] = neap_f32_of_f16(lowram_row(&p->k[layer], (uint32_t)(i / dk))[head * dk + i % dk]);
    for (size_t i = 0; i < n * dv; i++)
        values[i] =
            neap_f32_of_f16(lowram_row(&p->v[layer], (uint32_t)(i / dv))[head * dv + i % dv]);
    CHECK(neap_value_fit(keys, values, n, inout_options, io) == 0);
    neap_value_less_mean(mean, io);
    inout_options->method = NEAP_VALUE_ADAM;
    inout_options->start = NEAP_VALUE_GIVEN;
    inout_options->steps = 0;
    free(keys);
    free(values);
}

/* A start is taken as it is: without a step it explains what it did. */
static void test_start(void) {
    const lowram_shape shape = {2, 2, 16, 24, 600, 10, NEAP_KLT_ROPE_NONE, 0, 0.02f};
    lowram_problem p;
    neap_lowram_options options;
    lowram_problem_make(&p, &shape, 8);
    neap_lowram_defaults(&options, 2);
    options.rank = 2 * 2 * 16;
    options.residual_share = 0;
    options.a_bits = NEAP_LOWRAM_F16;
    neap_lowram *own = fit_of(&p, &options);
    options.start = start_fitted;
    options.start_ctx = &p;
    neap_lowram *given = fit_of(&p, &options);
    const float a = neap_lowram_group_at(own, 0)->error.values,
                b = neap_lowram_group_at(given, 0)->error.values;
    CHECK(b < 1.05f * a && a < 1.05f * b);
    neap_lowram_free(own);
    neap_lowram_free(given);
    lowram_problem_free(&p);
}

int main(void) {
    neap_set_log(no_log, NULL);
    test_exact();
    test_budget();
    test_rows();
    test_grown();
    test_damaged();
    test_choices();
    test_start();
    return 0;
}
