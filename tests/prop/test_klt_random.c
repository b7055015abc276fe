/* test_klt_random.c - random models and caches: all kernels give the same bytes; what comes back is
 * as near as the quantisers say; exact rows are exact; nothing outside the rows is touched, nor
 * planes that are not wanted. */
#include "klt_problem.h"
#include "neap.h"

static klt_shape random_shape(void) {
    static const uint32_t dims[] = {16, 64, 32, 80, 128, 24};
    klt_shape shape = {.n_blocks = 1 + klt_next(2),
                       .n_layers = 1 + klt_next(4),
                       .n_heads = 1 + klt_next(3),
                       .k_dim = dims[klt_next(6)],
                       .mode = klt_next(3),
                       .magnitude = klt_next(2) ? 1 : 1.25f,
                       .bits = 0.75 + klt_next(64) / 16.0,
                       .decay = 1e-2 / (1 + klt_next(100)),
                       .permille = klt_next(4) * 4,
                       .metric = klt_next(2)};
    shape.v_dim = klt_next(3) ? shape.k_dim : dims[klt_next(6)];
    shape.heads_a_group = 1 + klt_next(shape.n_heads);
    while (shape.n_layers * shape.heads_a_group * (shape.k_dim + shape.v_dim) > 400)
        if (shape.n_layers > 1)
            shape.n_layers--;
        else if (shape.heads_a_group > 1)
            shape.heads_a_group--;
        else
            shape.k_dim = shape.v_dim = 64;
    shape.no_f = shape.metric && klt_next(2);
    if (shape.mode != NEAP_KLT_ROPE_NONE)
        shape.rope_dims = klt_next(2) ? shape.k_dim : 2 * (1 + klt_next(shape.k_dim / 2));
    return shape;
}

static uint8_t wild[NEAP_KLT_HEADS][NEAP_KLT_ROWS];

/* Some rows of a chunk are the first of a sequence, unknown, or not finite; and as many others as
 * outliers are allowed are 30 times as far from the mean in a group. */
static void spoil(const klt_problem *p, neap_klt_chunk *chunk, bool *exact) {
    int32_t *positions = (int32_t *)(uintptr_t)chunk->positions;
    const uint32_t n_groups = p->blocks[chunk->block].n_groups;
    uint32_t left = n_groups * chunk->n_rows * p->shape.permille / 1000;
    memset(wild, 0, sizeof wild);
    for (uint32_t r = 0; r < chunk->n_rows; r++) {
        const uint32_t kind = klt_next(40), g = klt_next(n_groups);
        exact[r] = kind < 3;
        positions[r] = kind < 2 ? (int32_t)klt_next(NEAP_KLT_FIRST_EXACT + 1) - 1
                                : (int32_t)klt_next(100000) + NEAP_KLT_FIRST_EXACT;
        if (exact[r] || left == 0 || klt_next(10)) continue;
        wild[g][r] = 30;
        left--;
    }
    klt_chunk_fill(p, chunk, wild);
    for (uint32_t r = 0; r < chunk->n_rows; r++)
        if (exact[r] && positions[r] >= NEAP_KLT_FIRST_EXACT)
            ((uint16_t *)(void *)((uint8_t *)chunk->v[0].data + r * chunk->v[0].row_stride))[0] =
                0x7e01;
}

static bool row_equal(const klt_problem *p, const neap_klt_chunk *a, const neap_klt_chunk *b,
                      uint32_t row) {
    for (uint32_t l = 0; l < p->shape.n_layers; l++)
        if (memcmp((uint8_t *)a->k[l].data + row * a->k[l].row_stride,
                   (uint8_t *)b->k[l].data + row * b->k[l].row_stride,
                   klt_row_bytes(&p->shape, false)) ||
            memcmp((uint8_t *)a->v[l].data + row * a->v[l].row_stride,
                   (uint8_t *)b->v[l].data + row * b->v[l].row_stride,
                   klt_row_bytes(&p->shape, true)))
            return false;
    return true;
}

/* What the tables, made for heavier tails, do to a normal variable of unit variance. */
static double klt_normal_distortion(uint32_t bits) {
    static double known[NEAP_KLT_BITS + 1];
    const float *table = neap_klt_default_table(bits);
    if (bits == 0) return 1;
    if (known[bits] > 0) return known[bits];
    double sum = 0, weight = 0;
    uint32_t k = 0;
    for (double x = -5; x < 5; x += 1e-3) {
        while (k + 1 < 1u << bits && x > ((double)table[k] + (double)table[k + 1]) / 2)
            k++;
        const double w = exp(-x * x / 2), off = x - (double)table[k];
        sum += w * off * off;
        weight += w;
    }
    return known[bits] = sum / weight;
}

/* The error that a row is expected to have: distortion of the kept, power of the others. */
static double klt_expected_error(const klt_problem *p, uint32_t g) {
    double sum = 0;
    for (uint32_t c = 0; c < p->columns[g]; c++)
        sum += p->sd[g][c] * p->sd[g][c] * klt_normal_distortion(p->bits[g][c]);
    return sum;
}

/* Rows are quantised as they lie from the mean of all n of them. Whether wild ones move it by so
 * much of a deviation that others have an error that is not expected. */
static bool mean_is_moved(uint32_t group, uint32_t n_rows, const bool *exact) {
    uint32_t n_wild = 0, n = 0;
    for (uint32_t r = 0; r < n_rows; r++) {
        n_wild += wild[group][r] > 0;
        n += !exact[r];
    }
    return 30 * sqrt(n_wild) > 0.2 * n;
}

/* The mean error of rows against what the quantisers give, and against what encoding said; wild
 * rows have one of 8-bit codes. */
static bool errors_hold(const klt_problem *p, const neap_klt_chunk *was, const neap_klt_chunk *is,
                        const bool *exact, float said) {
    const neap_klt_block *block = &p->blocks[was->block];
    double total = 0, compared = 0, expected = 0, floor = 0, unseen = 0, noise = 0;
    uint32_t n = 0, n_compared = 0;
    for (uint32_t i = 0; i < block->n_groups; i++) {
        const bool is_moved = mean_is_moved(i, was->n_rows, exact);
        for (uint32_t r = 0; r < was->n_rows; r++) {
            double rounding;
            const uint32_t g = block->first_group + i;
            if (exact[r]) continue;
            const double error = klt_row_error(p, was, is, g, r, &rounding);
            if (wild[i][r]) {
                double power = 0;
                for (uint32_t c = 0; c < p->columns[g]; c++)
                    power += p->sd[g][c] * p->sd[g][c] * 900;
                if (error > power * (p->shape.metric ? 0.06 : 0.01)) return false;
                continue;
            }
            total += error;
            if (!is_moved) {
                compared += error;
                expected += klt_expected_error(p, g);
                n_compared++;
            }
            const bool seen = p->shape.metric && 4 * p->groups[g].n_components < 3 * p->columns[g];
            for (uint32_t c = 0; !seen && c < p->columns[g]; c++)
                unseen += p->bits[g][c] ? 0 : p->sd[g][c] * p->sd[g][c];
            floor += 3 * rounding;
            for (uint32_t c = 0; p->shape.metric && c < p->columns[g]; c++)
                noise += p->sd[g][c] * p->sd[g][c] * 0x1p-9;
            n++;
        }
    }
    if (n < 100) return true;                           /* too few for a mean */
    const double least = p->shape.permille ? 0.6 : 0.7; /* outliers are the worst rows */
    const bool as_expected =
        n_compared < 100 || (compared <= 1.25 * expected + floor && compared >= least * expected);
    return as_expected &&
           fabs((total - unseen) / n - (double)said) <= (0.2 * total + floor + noise) / n;
}

/* Decodes some of the planes: those come out as in whole, the others stay as they are. */
static void decode_some(const klt_problem *p, const neap_klt_model *model, const uint8_t *coded,
                        size_t len, const neap_klt_chunk *whole, neap_klt_chunk *room,
                        void *scratch) {
    neap_klt_chunk some = *room, blank;
    klt_chunk_make(p, whole->block, whole->n_rows,
                   (uint32_t)(whole->v[0].row_stride - klt_row_bytes(&p->shape, true)), &blank);
    for (uint32_t i = 0; i < 2 * p->shape.n_layers; i++) {
        const bool is_v = i >= p->shape.n_layers;
        const uint32_t l = i % p->shape.n_layers;
        neap_klt_plane *plane = is_v ? &some.v[l] : &some.k[l];
        const size_t n = (whole->n_rows - 1) * plane->row_stride + klt_row_bytes(&p->shape, is_v);
        memset(plane->data, 0, n);
        if (klt_next(2)) plane->data = NULL;
    }
    CHECK(neap_klt_decode(model, coded, len, &some, scratch) == 0);
    for (uint32_t i = 0; i < 2 * p->shape.n_layers; i++) {
        const bool is_v = i >= p->shape.n_layers;
        const uint32_t l = i % p->shape.n_layers;
        const bool wanted = (is_v ? some.v[l] : some.k[l]).data != NULL;
        const neap_klt_chunk *expected = wanted ? whole : &blank;
        const neap_klt_plane *plane = is_v ? &room->v[l] : &room->k[l];
        const size_t n = (whole->n_rows - 1) * plane->row_stride + klt_row_bytes(&p->shape, is_v);
        CHECK(memcmp(plane->data, (is_v ? expected->v[l] : expected->k[l]).data, n) == 0);
    }
    klt_chunk_free(p, &blank);
}

/* Every byte of the planes: of rows and heads of the part as in whole, else as they were. */
static bool part_holds(const klt_problem *p, const neap_klt_chunk *whole, const neap_klt_chunk *is,
                       const neap_klt_part *part, uint8_t canary) {
    for (uint32_t i = 0; i < 2 * p->shape.n_layers; i++) {
        const bool is_v = i >= p->shape.n_layers;
        const uint32_t l = i % p->shape.n_layers;
        const neap_klt_plane *a = is_v ? &whole->v[l] : &whole->k[l],
                             *b = is_v ? &is->v[l] : &is->k[l];
        const size_t row = klt_row_bytes(&p->shape, is_v), head = row / p->shape.n_heads,
                     n = (whole->n_rows - 1) * a->row_stride + row;
        for (size_t at = 0; at < n; at++) {
            const size_t r = at / a->row_stride, inside = at % a->row_stride;
            const bool wanted = r < part->n_rows && inside < row &&
                                inside / head - part->first_head < part->n_heads;
            const uint8_t *was = (const uint8_t *)a->data + part->first_row * a->row_stride;
            if (((const uint8_t *)b->data)[at] != (wanted ? was[at] : canary)) return false;
        }
    }
    return true;
}

/* Parts of a chunk that decodes to whole; other: room. */
static void check_parts(const klt_problem *p, const neap_klt_model *model, const uint8_t *coded,
                        size_t len, const neap_klt_chunk *whole, const neap_klt_chunk *other,
                        void *scratch) {
    for (int i = 0; i < 8; i++) {
        neap_klt_part part = {.first_row = klt_next(whole->n_rows),
                              .first_head = klt_next(p->shape.n_heads)};
        if (i % 2) part.first_row -= part.first_row % 8; /* 8 rows have a way of their own */
        part.n_rows = 1 + klt_next(whole->n_rows - part.first_row);
        if (i % 2 && part.first_row + 8 <= whole->n_rows) part.n_rows = 8;
        part.n_heads = 1 + klt_next(p->shape.n_heads - part.first_head);
        const neap_klt_kernel *kernel;
        for (size_t k = 0; (kernel = neap_klt_kernel_at(k)) != NULL; k++) {
            for (uint32_t l = 0; l < p->shape.n_layers; l++) {
                memset(other->k[l].data, 0xa5,
                       (whole->n_rows - 1) * other->k[l].row_stride +
                           klt_row_bytes(&p->shape, false));
                memset(other->v[l].data, 0xa5,
                       (whole->n_rows - 1) * other->v[l].row_stride +
                           klt_row_bytes(&p->shape, true));
            }
            CHECK(neap_klt_decode_part_with(kernel, model, coded, len, other, &part, scratch) == 0);
            CHECK(part_holds(p, whole, other, &part, 0xa5));
        }
    }
    const neap_klt_part beyond[] = {{0, whole->n_rows + 1, 0, 1, false},
                                    {whole->n_rows, 1, 0, 1, false},
                                    {0, 0, 0, 1, false},
                                    {0, 1, 0, 0, false},
                                    {0, 1, p->shape.n_heads, 1, false},
                                    {1, UINT32_MAX, 0, 1, false}};
    for (size_t i = 0; i < sizeof beyond / sizeof *beyond; i++)
        CHECK(neap_klt_decode_part(model, coded, len, other, &beyond[i], scratch) == NEAP_E_BOUND);
}

static void run(uint64_t seed) {
    klt_problem p;
    neap_klt_chunk was, is, other;
    bool exact[NEAP_KLT_ROWS];
    klt_state = seed;
    const klt_shape shape = random_shape();
    klt_problem_make(&p, &shape, seed);
    neap_klt_model *model = klt_model_of(&p.spec);
    const uint32_t n_rows = klt_next(2) ? 256 : 1 + klt_next(256), gap = 2 * klt_next(9),
                   block = klt_next(shape.n_blocks);
    klt_chunk_make(&p, block, n_rows, gap, &was);
    klt_chunk_make(&p, block, n_rows, gap, &is);
    klt_chunk_make(&p, block, n_rows, gap, &other);
    spoil(&p, &was, exact);
    memcpy((void *)(uintptr_t)is.positions, was.positions, n_rows * sizeof *was.positions);
    memcpy((void *)(uintptr_t)other.positions, was.positions, n_rows * sizeof *was.positions);
    const size_t cap = neap_klt_bound(model, &was);
    uint8_t *coded = malloc(cap), *again = malloc(cap);
    void *scratch = klt_scratch(model);
    CHECK(coded && again);
    size_t len = 0, other_len = 0;
    float said = 0, other_said = 0;
    const neap_klt_kernel *kernel = neap_klt_kernel_at(0);
    CHECK(neap_klt_encode_with(kernel, model, &was, scratch, coded, cap, &len, &said) == 0);
    CHECK(len <= cap);
    CHECK(neap_klt_decode_with(kernel, model, coded, len, &is, scratch) == 0);
    for (size_t k = 1; (kernel = neap_klt_kernel_at(k)) != NULL; k++) {
        CHECK(neap_klt_encode_with(kernel, model, &was, scratch, again, cap, &other_len,
                                   &other_said) == 0);
        CHECK(other_len == len && memcmp(coded, again, len) == 0 && said == other_said);
        CHECK(neap_klt_decode_with(kernel, model, coded, len, &other, scratch) == 0);
        CHECK(klt_chunk_equal(&p, &is, &other));
    }
    for (int i = 0; i < 3; i++)
        decode_some(&p, model, coded, len, &is, &other, scratch);
    check_parts(&p, model, coded, len, &is, &other, scratch);
    for (uint32_t r = 0; r < n_rows; r++)
        CHECK(!exact[r] || row_equal(&p, &was, &is, r));
    if (!errors_hold(&p, &was, &is, exact, said)) {
        fprintf(stderr, "seed %llu: errors\n", (unsigned long long)seed);
        exit(1);
    }
    free(coded);
    free(again);
    free(scratch);
    klt_chunk_free(&p, &was);
    klt_chunk_free(&p, &is);
    klt_chunk_free(&p, &other);
    neap_klt_model_close(model);
    klt_problem_free(&p);
}

int main(int argc, char **argv) {
    const uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1,
                   n = argc > 2 ? strtoull(argv[2], NULL, 10) : 40;
    printf("seed %llu, %llu cases, kernels:", (unsigned long long)first, (unsigned long long)n);
    for (size_t k = 0; neap_klt_kernel_at(k); k++)
        printf(" %s", neap_klt_kernel_at(k)->name);
    printf("\n");
    for (uint64_t seed = first; seed < first + n; seed++)
        run(seed);
    return 0;
}
