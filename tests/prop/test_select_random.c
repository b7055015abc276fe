/* test_select_random.c - selective reconstruction on random contexts that grow and shrink, against
 * brute force: what a step chooses, what it has reconstructed, and attention over what it reads.
 * Usage: test_select_random [SEED [CASES]]; the seed is printed. */
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "check.h"
#include "half.h"
#include "select.h"

enum {
    CHUNK = NEAP_ATTN_CHUNK_CELLS,
    CELLS = 12 * CHUNK,
    HEADS = 3,
    GROUP = 4,
    ELEMS = 80,
    TOKENS = 4,
    THREADS = 3
};

static uint64_t rng_state;

static uint32_t rnd(uint32_t n) /* 0 .. n - 1 */
{
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((rng_state >> 33) % n);
}

static float uniform(void) /* -1 .. 1 */
{
    return (float)rnd(2000001) / 1000000.0f - 1.0f;
}

/* The whole context, exact. The first elements of V say which cell it is, and whether it was
 * reconstructed. */
typedef struct context {
    neap_select_config config;
    uint16_t *k, *v; /* [CELLS][n_kv_heads][elems] */
    uint32_t n_cells;
    bool truncated; /* some outliers went: which are left is not those of brute force */
    bool shrunk;    /* since the last step: it may use fewer slots, and empties the others */
    uint8_t asked[HEADS][CELLS];
    atomic_uint n_asked;
    unsigned fail_at; /* the so-manyth call for a span fails */
} context;

static uint16_t *k_row(const context *c, uint32_t cell, uint32_t head) {
    return c->k + ((size_t)cell * c->config.n_kv_heads + head) * c->config.k_elems;
}

static uint16_t *v_row(const context *c, uint32_t cell, uint32_t head) {
    return c->v + ((size_t)cell * c->config.n_kv_heads + head) * c->config.v_elems;
}

static void fill(context *c) {
    float centre[ELEMS];
    for (uint32_t cell = 0; cell < CELLS; cell++) {
        for (uint32_t head = 0; head < c->config.n_kv_heads; head++) {
            for (uint32_t i = 0; i < c->config.k_elems; i++) {
                centre[i] =
                    cell % c->config.span_cells == 0 || rnd(16) == 0 ? uniform() * 2.0f : centre[i];
                k_row(c, cell, head)[i] = neap_f16_of_f32(centre[i] + uniform());
            }
            for (uint32_t i = 0; i < c->config.v_elems; i++) {
                v_row(c, cell, head)[i] = neap_f16_of_f32(uniform());
            }
            v_row(c, cell, head)[0] = neap_f16_of_f32((float)(cell / CHUNK));
            v_row(c, cell, head)[1] = neap_f16_of_f32((float)(cell % CHUNK));
            v_row(c, cell, head)[2] = 0;
        }
    }
}

static int reconstruct(void *ctx, uint32_t thread, uint32_t head, uint32_t first, uint32_t n,
                       uint16_t *k, uint16_t *v) {
    context *c = ctx;
    CHECK(thread < THREADS && n == c->config.span_cells && first + n <= c->n_cells);
    if (atomic_fetch_add(&c->n_asked, 1) + 1 == c->fail_at) {
        return -5;
    }
    c->asked[head][first]++;
    for (uint32_t i = 0; i < n; i++) {
        memcpy(k, k_row(c, first + i, head), 2 * c->config.k_elems);
        memcpy(v, v_row(c, first + i, head), 2 * c->config.v_elems);
        v[2] = neap_f16_of_f32(1.0f);
        k += c->config.n_kv_heads * c->config.k_elems;
        v += c->config.n_kv_heads * c->config.v_elems;
    }
    return 0;
}

/* ---- brute force ---- */

static void mean_of(const context *c, uint32_t head, uint32_t first, double *mean) {
    for (uint32_t i = 0; i < c->config.k_elems; i++) {
        mean[i] = 0.0;
        for (uint32_t r = 0; r < c->config.span_cells; r++) {
            mean[i] += (double)neap_f32_of_f16(k_row(c, first + r, head)[i]);
        }
        mean[i] /= c->config.span_cells;
    }
}

static double similarity_of(const context *c, uint32_t head, uint32_t first) {
    double mean[ELEMS], least = 1.0;
    mean_of(c, head, first, mean);
    for (uint32_t r = 0; r < c->config.span_cells; r++) {
        double dot = 0.0, key2 = 0.0, mean2 = 0.0;
        for (uint32_t i = 0; i < c->config.k_elems; i++) {
            double x = (double)neap_f32_of_f16(k_row(c, first + r, head)[i]);
            dot += x * mean[i];
            key2 += x * x;
            mean2 += mean[i] * mean[i];
        }
        least = fmin(least, dot / sqrt(key2 * mean2));
    }
    return least;
}

/* The best score of a query row with the span's mean; *ret_slack: what 8 bits may change. */
static double score_of(const context *c, const float *q, uint32_t n_tokens, uint32_t head,
                       uint32_t first, double *ret_slack) {
    double mean[ELEMS], best = -INFINITY, largest = 0.0;
    const uint32_t group = c->config.n_heads / c->config.n_kv_heads;
    mean_of(c, head, first, mean);
    for (uint32_t i = 0; i < c->config.k_elems; i++) {
        largest = fmax(largest, fabs(mean[i]));
    }
    *ret_slack = 0.0;
    for (uint32_t row = 0; row < n_tokens * group; row++) {
        const float *at =
            q + ((size_t)(row / group) * c->config.n_heads + head * group + row % group) *
                    c->config.k_elems;
        double score = 0.0, size = 0.0, size_mean = 0.0, largest_q = 0.0;
        for (uint32_t i = 0; i < c->config.k_elems; i++) {
            score += (double)at[i] * mean[i];
            size += fabs((double)at[i]);
            size_mean += fabs(mean[i]);
            largest_q = fmax(largest_q, fabs((double)at[i]));
        }
        best = fmax(best, score);
        /* Both are rounded, by at most half a step; the last term: both at once. */
        const double step = largest / 254.0, step_q = largest_q / 254.0;
        const double more = size * step + size_mean * step_q + c->config.k_elems * step * step_q;
        *ret_slack = fmax(*ret_slack, more + 1e-4);
    }
    return best;
}

/* What the buffer shows of a head: 0 nothing, 1 exact, 2 reconstructed, for each cell. */
static void read_buffer(const context *c, const neap_attn_shape *shape, uint32_t n_kept,
                        uint32_t head, uint8_t *held) {
    memset(held, 0, CELLS);
    const uint16_t *mask = (const uint16_t *)(const void *)shape->mask.base;
    for (uint32_t cell = 0; cell < n_kept * CHUNK; cell++) {
        if (mask[cell] == 0xfc00) {
            continue;
        }
        const char *v = (const char *)shape->v.chunks[cell / CHUNK] +
                        cell % CHUNK * shape->v.cell_bytes + head * shape->v.head_bytes;
        const char *k = (const char *)shape->k.chunks[cell / CHUNK] +
                        cell % CHUNK * shape->k.cell_bytes + head * shape->k.head_bytes;
        uint16_t marks[3];
        memcpy(marks, v, sizeof marks);
        const uint32_t which =
            (uint32_t)neap_f32_of_f16(marks[0]) * CHUNK + (uint32_t)neap_f32_of_f16(marks[1]);
        CHECK(which < c->n_cells && held[which] == 0); /* each once */
        CHECK(memcmp(k, k_row(c, which, head), 2 * c->config.k_elems) == 0);
        CHECK(memcmp(v + 6, v_row(c, which, head) + 3, 2 * c->config.v_elems - 6) == 0);
        held[which] = marks[2] == 0 ? 1 : 2;
    }
}

static uint32_t least_of(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

static uint32_t spans(const context *c, uint32_t cells) {
    return (least_of(cells, CELLS) + c->config.span_cells - 1) / c->config.span_cells;
}

static void check_head(const context *c, const neap_select *select, const neap_attn_shape *shape,
                       const float *q, uint32_t n_tokens, uint32_t head, const uint8_t *before,
                       uint8_t *held) {
    const uint32_t span = c->config.span_cells, n = c->n_cells / span;
    read_buffer(c, shape, neap_select_kept_chunks(select), head, held);
    uint32_t exact = 0, chosen = 0;
    double least_chosen = INFINITY, least_new = INFINITY, most_left = -INFINITY, slack = 0.0, more;
    double most_exact = -INFINITY, least_pool = INFINITY;
    const uint32_t window = c->truncated ? 0 : least_of(n, spans(c, c->config.window_cells));
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t first = i * span;
        for (uint32_t r = 1; r < span; r++) {
            CHECK(held[first + r] == held[first]); /* whole spans */
        }
        exact += held[first] == 1;
        chosen += held[first] == 2;
        CHECK(i + window < n || held[first] == 1);
        CHECK(c->asked[head][first] == (held[first] == 2 && before[first] != 2) ||
              (c->shrunk && held[first] == 2 && c->asked[head][first] == 1));
        if (held[first] == 1) {
            most_exact =
                i + window < n ? fmax(most_exact, similarity_of(c, head, first)) : most_exact;
            continue;
        }
        const double score = score_of(c, q, n_tokens, head, first, &more);
        slack = fmax(slack, more);
        least_chosen = held[first] == 2 ? fmin(least_chosen, score) : least_chosen;
        if (held[first] == 2 && before[first] != 2) {
            least_new = fmin(least_new, score);
        }
        most_left = held[first] == 0 ? fmax(most_left, score) : most_left;
        least_pool = fmin(least_pool, similarity_of(c, head, first));
    }
    CHECK(chosen == least_of(n - exact, spans(c, c->config.budget_cells)));
    CHECK(least_new >= most_left - 2.0 * slack);
    const double ahead = (double)NEAP_SELECT_HEAD_START / (double)shape->scale;
    CHECK(least_chosen >= most_left - 2.0 * slack - ahead);
    if (!c->truncated) {
        CHECK(exact == window + least_of(n - window, spans(c, c->config.outlier_cells)));
        CHECK(most_exact <= least_pool + 1e-4);
    }
}

/* ---- attention ---- */

static void expected_row(const context *c, const neap_attn_shape *whole, const uint8_t *held,
                         const float *q, uint32_t token, uint32_t head, double *out) {
    const uint32_t kv = head / (c->config.n_heads / c->config.n_kv_heads);
    const uint16_t *mask =
        (const uint16_t *)(const void *)(whole->mask.base + token * whole->mask.token_bytes);
    double sum = 0.0;
    memset(out, 0, c->config.v_elems * sizeof *out);
    for (uint32_t cell = 0; cell < whole->n_cells; cell++) {
        if (cell < c->n_cells ? held[cell] == 0 : mask[cell] == 0xfc00) {
            continue;
        }
        double score = 0.0;
        for (uint32_t i = 0; i < c->config.k_elems; i++) {
            score += (double)q[((size_t)token * c->config.n_heads + head) * c->config.k_elems + i] *
                     (double)neap_f32_of_f16(k_row(c, cell, kv)[i]);
        }
        const double weight = exp((double)whole->scale * score);
        sum += weight;
        for (uint32_t i = 0; i < c->config.v_elems; i++) {
            const double x = (double)neap_f32_of_f16(v_row(c, cell, kv)[i]);
            out[i] += weight * (i == 2 && held[cell] == 2 && cell < c->n_cells ? 1.0 : x);
        }
    }
    for (uint32_t i = 0; i < c->config.v_elems; i++) {
        out[i] /= sum;
    }
}

static void check_attention(const context *c, const neap_attn_shape *shape,
                            const neap_attn_shape *whole, const float *q,
                            uint8_t held[HEADS][CELLS]) {
    static neap_attn job;
    void *scratch = aligned_alloc(64, neap_attn_scratch_bytes(shape, 1));
    void *state = aligned_alloc(64, neap_attn_state_bytes(shape));
    CHECK(scratch && state && neap_attn_supported(shape));
    neap_attn_plan(&job, shape, 1, scratch, state);
    neap_attn_run(&job, 0);
    CHECK(neap_attn_result(&job) == 0);
    double error = 0.0, power = 0.0, expected[ELEMS];
    const uint32_t group = c->config.n_heads / c->config.n_kv_heads;
    for (uint32_t t = 0; t < whole->n_tokens; t++) {
        for (uint32_t h = 0; h < c->config.n_heads; h++) {
            expected_row(c, whole, held[h / group], q, t, h, expected);
            const float *out =
                (const float *)(const void *)(whole->out.base + t * whole->out.token_bytes +
                                              h * whole->out.head_bytes);
            for (uint32_t i = 0; i < c->config.v_elems; i++) {
                const double d = (double)out[i] - expected[i];
                error += d * d;
                power += expected[i] * expected[i];
            }
        }
    }
    CHECK(error <= 1e-9 * power);
    free(scratch);
    free(state);
}

/* ---- steps ---- */

typedef struct runner {
    neap_select_step *step;
    uint32_t thread;
    int err;
} runner;

static void *run_thread(void *arg) {
    runner *r = arg;
    r->err = neap_select_run(r->step, r->thread);
    return NULL;
}

static int run(neap_select *select, const neap_attn_shape *whole, context *c) {
    static neap_select_step step;
    pthread_t threads[THREADS];
    runner runners[THREADS];
    const size_t bytes = neap_select_scratch_bytes(select);
    void *scratch = aligned_alloc(64, bytes);
    CHECK(scratch && bytes % 64 == 0);
    memset(scratch, 0xff, bytes);
    neap_select_begin(&step, select, &whole->q, whole->n_tokens, whole->scale, reconstruct, c,
                      scratch);
    const uint32_t n = 1 + rnd(THREADS);
    for (uint32_t i = 0; i < n; i++) {
        runners[i] = (runner){.step = &step, .thread = i};
        CHECK(pthread_create(&threads[i], NULL, run_thread, &runners[i]) == 0);
    }
    for (uint32_t i = 0; i < n; i++) {
        pthread_join(threads[i], NULL);
        CHECK(runners[i].err == runners[0].err);
    }
    free(scratch);
    return runners[0].err;
}

static neap_attn_shape whole_shape(const context *c, uint32_t n_tokens, uint32_t n_cells,
                                   const float *q, float *out, uint16_t *mask,
                                   const void **k_chunks, const void **v_chunks) {
    const neap_select_config *o = &c->config;
    for (uint32_t i = 0; i < CELLS / CHUNK; i++) { /* of the prefix nothing may be read */
        k_chunks[i] = i < c->n_cells / CHUNK ? NULL : k_row(c, i * CHUNK, 0);
        v_chunks[i] = i < c->n_cells / CHUNK ? NULL : v_row(c, i * CHUNK, 0);
    }
    memset(mask, 0, 2 * (size_t)TOKENS * CELLS);
    for (uint32_t t = 0; t < n_tokens; t++) {
        for (uint32_t cell = c->n_cells; cell < n_cells; cell++) {
            mask[t * CELLS + cell] = rnd(3) == 0 ? 0xfc00 : 0;
        }
    }
    return (neap_attn_shape){
        .n_tokens = n_tokens,
        .n_heads = o->n_heads,
        .n_kv_heads = o->n_kv_heads,
        .n_streams = 1,
        .n_cells = n_cells,
        .k = {NEAP_ATTN_F16, o->k_elems, 2 * o->n_kv_heads * o->k_elems, 2 * o->k_elems, k_chunks},
        .v = {NEAP_ATTN_F16, o->v_elems, 2 * o->n_kv_heads * o->v_elems, 2 * o->v_elems, v_chunks},
        .q = {(char *)(uintptr_t)q, 4 * (size_t)o->n_heads * o->k_elems, 4 * (size_t)o->k_elems, 0},
        .out = {(char *)out, 4 * (size_t)o->n_heads * o->v_elems, 4 * (size_t)o->v_elems, 0},
        .mask = {(const char *)mask, 2 * CELLS, 0, 0, 1, 1},
        .scale = 0.1f,
    };
}

/* Queries that stay much the same from step to step. */
static void turn_queries(float *q, size_t n) {
    for (size_t i = 0; i < n; i++) {
        q[i] = rnd(8) == 0 ? uniform() * 2.0f : q[i];
    }
}

static void check_step(neap_select *select, context *c, float *q, uint8_t held[HEADS][CELLS]) {
    static float out[TOKENS * HEADS * GROUP * ELEMS];
    static uint16_t mask[TOKENS * CELLS];
    static uint8_t before[HEADS][CELLS];
    const void *k_chunks[CELLS / CHUNK], *v_chunks[CELLS / CHUNK];
    const uint32_t n_tokens = 1 + rnd(TOKENS);
    uint32_t n_cells = c->n_cells + rnd(CELLS - c->n_cells + 1);
    turn_queries(q, (size_t)TOKENS * HEADS * GROUP * ELEMS);
    neap_attn_shape whole = whole_shape(c, n_tokens, n_cells, q, out, mask, k_chunks, v_chunks);
    CHECK(neap_select_applies(select, &whole) == (c->n_cells > 0));
    if (c->n_cells == 0) {
        return;
    }
    mask[rnd(n_tokens) * CELLS + rnd(c->n_cells)] = 0xfc00;
    CHECK(!neap_select_applies(select, &whole)); /* a cell of the prefix is hidden */
    memcpy(before, held, sizeof before);
    memset(c->asked, 0, sizeof c->asked);
    atomic_store(&c->n_asked, 0);
    c->fail_at = rnd(4) == 0 ? 1 + rnd(20) : 0;
    int err = run(select, &whole, c);
    CHECK(err == (c->fail_at != 0 && atomic_load(&c->n_asked) >= c->fail_at ? -5 : 0));
    if (err != 0) { /* what failed is asked for again */
        c->fail_at = 0;
        const unsigned asked = atomic_load(&c->n_asked);
        CHECK(run(select, &whole, c) == 0 && atomic_load(&c->n_asked) == asked + 1);
    }
    neap_attn_shape shape;
    void *memory = aligned_alloc(64, neap_select_shape_bytes(select, &whole));
    CHECK(memory);
    neap_select_shape(select, &whole, memory, &shape);
    for (uint32_t head = 0; head < c->config.n_kv_heads; head++) {
        check_head(c, select, &shape, q, n_tokens, head, before[head], held[head]);
    }
    check_attention(c, &shape, &whole, q, held);
    free(memory);
}

static void check_case(void) {
    static const uint32_t span_cells[] = {4, 8, 16, 32, 64};
    static uint8_t held[HEADS][CELLS];
    static float q[TOKENS * HEADS * GROUP * ELEMS];
    static context c;
    c.config = (neap_select_config){.n_kv_heads = 1 + rnd(HEADS),
                                    .k_elems = 1 + rnd(ELEMS),
                                    .v_elems = 4 + rnd(ELEMS - 3),
                                    .span_cells = span_cells[rnd(5)],
                                    .budget_cells = 1 + rnd(rnd(2) ? CELLS : 600),
                                    .outlier_cells = rnd(3) * rnd(300),
                                    .window_cells = rnd(3) * rnd(300),
                                    .max_cells = CELLS};
    c.config.n_heads = c.config.n_kv_heads * (1 + rnd(GROUP));
    c.n_cells = 0;
    c.truncated = c.shrunk = false;
    c.k = malloc(2 * (size_t)CELLS * c.config.n_kv_heads * c.config.k_elems);
    c.v = malloc(2 * (size_t)CELLS * c.config.n_kv_heads * c.config.v_elems);
    CHECK(c.k && c.v);
    fill(&c);
    memset(held, 0, sizeof held);
    neap_select *select;
    CHECK(neap_select_create(&c.config, &select) == 0);
    for (int i = 0; i < 12; i++) {
        if (rnd(6) == 0) {
            const uint32_t n = rnd(c.n_cells / CHUNK + 1) * CHUNK;
            c.truncated = n > 0 && (c.truncated || n < c.n_cells);
            c.shrunk = true;
            c.n_cells = n;
            neap_select_truncate(select, n);
            for (uint32_t head = 0; head < HEADS; head++) {
                memset(held[head] + n, 0, CELLS - n);
            }
        }
        for (uint32_t n = rnd(4); n > 0 && c.n_cells < CELLS; n--) {
            const neap_select_rows rows = {k_row(&c, c.n_cells, 0), v_row(&c, c.n_cells, 0),
                                           2 * (size_t)c.config.n_kv_heads * c.config.k_elems,
                                           2 * (size_t)c.config.n_kv_heads * c.config.v_elems};
            CHECK(neap_select_append(select, &rows) == 0);
            c.n_cells += CHUNK;
        }
        CHECK(neap_select_cells(select) == c.n_cells);
        CHECK(neap_select_bytes(select) == neap_select_expected_bytes(&c.config, c.n_cells));
        check_step(select, &c, q, held);
        c.shrunk = false;
    }
    neap_select_free(select);
    free(c.k);
    free(c.v);
}

int main(int argc, char **argv) {
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    long cases = argc > 2 ? atol(argv[2]) : 40;
    printf("seed %" PRIu64 "\n", seed);
    fflush(stdout);
    rng_state = seed;
    for (long i = 0; i < cases; i++) {
        check_case();
    }
    return 0;
}
