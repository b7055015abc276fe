/* test_lowram_random.c - LowRAM with shapes and options at random: exact rows are exact, the errors
 * that encoding reports are those of what decodes, a fit that was stored decodes the same, the
 * bytes are those of the budget. */
#include "lowram_problem.h"
#include "neap.h"

static const uint32_t some_bits[] = {1, 2, 3, 4, 4, 5, 8, NEAP_LOWRAM_F16};

static uint32_t bits(void) {
    return some_bits[lowram_next(sizeof some_bits / sizeof *some_bits)];
}

static lowram_shape random_shape(void) {
    lowram_shape s = {.n_layers = 1 + lowram_next(LOWRAM_LAYERS),
                      .n_heads = 1 + lowram_next(3),
                      .k_dim = 2 + lowram_next(40),
                      .v_dim = 1 + lowram_next(40),
                      .n_rows = 300 + lowram_next(900),
                      .n_directions = 1 + lowram_next(12),
                      .noise = 0.01f * (float)(1 + lowram_next(5))};
    s.mode = lowram_next(3);
    s.rope_dims = s.mode ? 2 + 2 * lowram_next(s.k_dim / 2) : 0;
    return s;
}

static neap_lowram_options random_options(const lowram_shape *s) {
    neap_lowram_options o;
    neap_lowram_defaults(&o, 3);
    o.group_layers = 1 + lowram_next(5);
    o.rank = 1 + lowram_next(s->n_heads * s->k_dim);
    o.residual_share = lowram_next(4) ? 0.1 * lowram_next(11) : 0;
    o.a_bits = bits();
    o.b_bits = lowram_next(2) ? NEAP_LOWRAM_F16 : bits();
    o.residual_bits = bits();
    o.hidden_factor = 0.5 * lowram_next(4);
    o.first_exact = lowram_next(6);
    o.not_centred = lowram_next(4) == 0;
    o.source = (int)lowram_next(4);
    o.shared_predictor = o.source != NEAP_LOWRAM_FROM_LAYER && lowram_next(4) == 0;
    o.factorisation = (int)lowram_next(3);
    o.residuals = (int)lowram_next(2);
    o.seed = lowram_next(1000);
    o.sample_rows = lowram_next(3) ? 0 : 512;
    return o;
}

/* Errors over power, of rows that are not exact; false: an exact row is not. */
static bool compare(const lowram_problem *p, const neap_lowram_group *group,
                    const neap_lowram_chunk *was, const neap_lowram_chunk *is, uint32_t first_exact,
                    double *ret_keys, double *ret_values) {
    double k_off = 0, k_power = 0, v_off = 0, v_power = 0;
    for (uint32_t l = 0; l < group->n_layers; l++)
        for (uint32_t r = 0; r < was->n_rows; r++) {
            double k_row = 0, v_row = 0;
            const double k =
                lowram_off(&was->k[l], &is->k[l], r, p->shape.n_heads * p->shape.k_dim, &k_row);
            const double v =
                lowram_off(&was->v[l], &is->v[l], r, p->shape.n_heads * p->shape.v_dim, &v_row);
            if (was->positions[r] < (int32_t)first_exact) {
                if (k > 0 || v > 0) return false;
                continue;
            }
            k_off += k, k_power += k_row, v_off += v, v_power += v_row;
        }
    *ret_keys = k_off / k_power;
    *ret_values = v_off / v_power;
    return true;
}

/* Every byte of a plane: of rows and heads of the part as in whole, else as it was. */
static bool is_part(const neap_klt_plane *whole, const neap_klt_plane *is, uint32_t n_rows,
                    size_t head_bytes, uint32_t n_heads, const neap_klt_part *part) {
    for (uint32_t r = 0; r < n_rows; r++)
        for (uint32_t h = 0; h < n_heads; h++) {
            const uint8_t *now = (const uint8_t *)lowram_row(is, r) + h * head_bytes;
            const bool wanted = r < part->n_rows && h - part->first_head < part->n_heads;
            for (size_t i = 0; i < head_bytes && !wanted; i++)
                if (now[i] != 0xa5) return false;
            if (wanted &&
                memcmp(now,
                       (const uint8_t *)lowram_row(whole, part->first_row + r) + h * head_bytes,
                       head_bytes) != 0)
                return false;
        }
    return true;
}

/* Parts of a chunk that decodes to whole; is: room. */
static void check_parts(const lowram_problem *p, const neap_lowram *fit, const uint8_t *coded,
                        size_t len, const neap_lowram_chunk *whole, neap_lowram_chunk *is,
                        void *scratch) {
    const neap_lowram_group *group = neap_lowram_group_at(fit, whole->group);
    const uint32_t n_rows = whole->n_rows, n_heads = p->shape.n_heads;
    for (int i = 0; i < 6; i++) {
        neap_klt_part part = {.first_row = lowram_next(n_rows),
                              .first_head = lowram_next(n_heads),
                              .is_checked = i % 2};
        part.n_rows = 1 + lowram_next(i < 3 ? 8 : n_rows);
        if (part.n_rows > n_rows - part.first_row) part.n_rows = n_rows - part.first_row;
        part.n_heads = 1 + lowram_next(n_heads - part.first_head);
        neap_lowram_chunk view = *is;
        const uint32_t only = lowram_next(2 * group->n_layers); /* of the layers this one, or all */
        for (uint32_t l = 0; l < group->n_layers; l++) {
            memset(is->k[l].data, 0xa5, n_rows * is->k[l].row_stride);
            memset(is->v[l].data, 0xa5, n_rows * is->v[l].row_stride);
            if (only < group->n_layers && l != only) view.k[l].data = view.v[l].data = NULL;
        }
        CHECK(neap_lowram_decode_part(fit, coded, len, &view, &part, scratch) == 0);
        for (uint32_t l = 0; l < group->n_layers; l++)
            if (view.k[l].data)
                CHECK(is_part(&whole->k[l], &is->k[l], n_rows, 2 * (size_t)p->shape.k_dim, n_heads,
                              &part) &&
                      is_part(&whole->v[l], &is->v[l], n_rows, 2 * (size_t)p->shape.v_dim, n_heads,
                              &part));
    }
    const neap_klt_part beyond[] = {{0, n_rows + 1, 0, 1, false},
                                    {n_rows, 1, 0, 1, false},
                                    {0, 0, 0, 1, false},
                                    {0, 1, 0, 0, false},
                                    {0, 1, n_heads, 1, false},
                                    {1, UINT32_MAX, 0, 1, false},
                                    {0, 1, n_heads - 1, UINT32_MAX, 0}};
    for (size_t i = 0; i < sizeof beyond / sizeof *beyond; i++)
        CHECK(neap_lowram_decode_part(fit, coded, len, is, &beyond[i], scratch) == NEAP_E_BOUND);
}

static void check_chunk(const lowram_problem *p, const neap_lowram *fit, const neap_lowram *same,
                        const neap_lowram_chunk *was, uint32_t first_exact, bool not_centred,
                        size_t *ret_len) {
    const neap_lowram_group *group = neap_lowram_group_at(fit, was->group);
    const size_t cap = neap_lowram_bound(fit, was->group, was->n_rows);
    uint8_t *coded = lowram_alloc(cap, 1), *again = lowram_alloc(cap, 1);
    void *scratch = lowram_scratch(fit);
    neap_lowram_chunk is = lowram_chunk_like(p, was, group->n_layers),
                      other = lowram_chunk_like(p, was, group->n_layers);
    neap_lowram_error said;
    size_t again_len;
    double keys, values;
    CHECK(neap_lowram_encode(fit, was, scratch, coded, cap, ret_len, &said) == 0);
    CHECK(*ret_len <= cap);
    CHECK(neap_lowram_encode(same, was, scratch, again, cap, &again_len, NULL) == 0);
    CHECK(again_len == *ret_len && memcmp(again, coded, again_len) == 0);
    CHECK(neap_lowram_decode(fit, coded, *ret_len, &is, scratch) == 0);
    CHECK(neap_lowram_decode(same, coded, *ret_len, &other, scratch) == 0);
    for (uint32_t l = 0; l < group->n_layers; l++)
        CHECK(lowram_rows_equal(&is.k[l], &other.k[l], was->n_rows,
                                group->n_kv_heads * group->k_head_dim) &&
              lowram_rows_equal(&is.v[l], &other.v[l], was->n_rows,
                                group->n_kv_heads * group->v_head_dim));
    check_parts(p, fit, coded, *ret_len, &is, &other, scratch);
    CHECK(compare(p, group, was, &is, first_exact, &keys, &values));
    /* Rounding to f16 comes on top. Errors of keys are over the power around the mean, or all. */
    CHECK(fabs(values - (double)said.values) <= 0.01 * values + 1e-6);
    if (not_centred)
        CHECK(fabs(keys - (double)said.keys) <= 0.01 * keys + 1e-6);
    else
        CHECK(keys <= 1.01 * (double)said.keys + 1e-6);
    free(coded);
    free(again);
    free(scratch);
    lowram_chunk_free(&is, group->n_layers);
    lowram_chunk_free(&other, group->n_layers);
}

static void run(uint64_t seed) {
    lowram_problem p;
    lowram_state = seed;
    const lowram_shape shape = random_shape();
    const neap_lowram_options options = random_options(&shape);
    lowram_problem_make(&p, &shape, seed + 1000);
    neap_lowram *fit = NULL, *same = NULL;
    CHECK(neap_lowram_fit(&options, p.layers, shape.n_layers, &p.context, &fit) == 0);
    size_t fit_len, len;
    const void *bytes = neap_lowram_bytes(fit, &fit_len);
    CHECK(neap_lowram_open(bytes, fit_len, &same) == 0);
    CHECK(neap_lowram_id(same) == neap_lowram_id(fit));
    uint64_t counted = fit_len - NEAP_LOWRAM_FILE_HEADER, planned = 0;
    for (uint32_t g = 0, layer = 0; g < neap_lowram_n_groups(fit); g++) {
        const neap_lowram_group *group = neap_lowram_group_at(fit, g);
        neap_lowram_budget budget;
        CHECK(neap_lowram_plan(&options, &p.layers[layer], group->n_layers, shape.n_rows,
                               &budget) == 0);
        planned += budget.key_bytes + budget.value_bytes;
        for (uint32_t at = 0; at < shape.n_rows; at += NEAP_LOWRAM_ROWS) {
            const neap_lowram_chunk was = lowram_chunk_at(&p, g, layer, group->n_layers, at);
            check_chunk(&p, fit, same, &was, options.first_exact, options.not_centred, &len);
            counted += len;
        }
        layer += group->n_layers;
    }
    if (options.sample_rows == 0 && counted != planned) {
        fprintf(stderr, "seed %llu: %llu bytes, planned %llu\n", (unsigned long long)seed,
                (unsigned long long)counted, (unsigned long long)planned);
        exit(1);
    }
    neap_lowram_free(fit);
    neap_lowram_free(same);
    lowram_problem_free(&p);
}

int main(int argc, char **argv) {
    const uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1,
                   n = argc > 2 ? strtoull(argv[2], NULL, 10) : 40;
    printf("seed %llu, %llu cases\n", (unsigned long long)first, (unsigned long long)n);
    for (uint64_t seed = first; seed < first + n; seed++)
        run(seed);
    return 0;
}
