/* test_attn_random.c - every attention kernel of this machine on random problems against an f64
 * reference, and against itself: other thread counts and orders of arrival give the same bits.
 * Usage: test_attn_random [SEED [CASES]]; the seed is printed. */
#include <pthread.h>
#include <time.h>

#include "attn_problem.h"

enum { THREADS_MAX = 5 };

/* ---- running it ---- */

typedef struct runner {
    neap_attn *job;
    uint32_t thread;
} runner;

static void *run_thread(void *arg) {
    runner *r = arg;
    neap_attn_run(r->job, r->thread);
    return NULL;
}

static int run(const neap_attn_shape *shape, uint32_t n_threads) {
    static neap_attn job;
    size_t bytes = neap_attn_scratch_bytes(shape, n_threads);
    void *scratch = aligned_alloc(64, bytes),
         *state = aligned_alloc(64, neap_attn_state_bytes(shape));
    pthread_t threads[THREADS_MAX];
    runner runners[THREADS_MAX];
    CHECK(scratch && state);
    memset(scratch, 0xff, bytes); /* NaN everywhere: what is read unwritten shows */
    neap_attn_plan(&job, shape, n_threads, scratch, state);
    for (uint32_t i = 0; i < n_threads; i++) {
        runners[i] = (runner){.job = &job, .thread = i};
        CHECK(pthread_create(&threads[i], NULL, run_thread, &runners[i]) == 0);
    }
    for (uint32_t i = 0; i < n_threads; i++) {
        pthread_join(threads[i], NULL);
    }
    int err = neap_attn_result(&job);
    free(scratch);
    free(state);
    return err;
}

/* Chunks that come while others are asked for. */
typedef struct arrival {
    uint32_t n_chunks;
    const problem *problem;
    atomic_uint there[2 * 16];
    atomic_uint asked;
    int fail_after;
} arrival;

static bool is_ready(void *ctx, uint32_t stream, uint32_t chunk) {
    arrival *a = ctx;
    return atomic_load(&a->there[stream * a->n_chunks + chunk]) != 0;
}

static int await(void *ctx, uint32_t stream, uint32_t chunk) {
    arrival *a = ctx;
    CHECK(chunk_seen(a->problem, stream, chunk)); /* hidden ones are never asked for */
    if (atomic_fetch_add(&a->asked, 1) >= (unsigned)a->fail_after) {
        return -5;
    }
    atomic_store(&a->there[stream * a->n_chunks + chunk], 1);
    atomic_store(&a->there[stream * a->n_chunks + (chunk * 7 + 3) % a->n_chunks], 1);
    return 0;
}

/* All that is seen is there after neap_attn_await; the mask's other chunks are left alone. */
static void check_await(const problem *p, arrival *a) {
    static neap_attn job;
    void *scratch = aligned_alloc(64, neap_attn_scratch_bytes(&p->shape, 1));
    void *state = aligned_alloc(64, neap_attn_state_bytes(&p->shape));
    CHECK(scratch && state);
    for (uint32_t i = 0; i < 2 * p->n_chunks; i++) {
        atomic_store(&a->there[i], rnd(2));
    }
    neap_attn_plan(&job, &p->shape, 1, scratch, state);
    CHECK(neap_attn_await(&job) == 0);
    for (uint32_t i = 0; i < p->shape.n_streams * p->n_chunks; i++) {
        uint32_t stream = i / p->n_chunks, chunk = i % p->n_chunks;
        CHECK(is_ready(a, stream, chunk) || !chunk_seen(p, stream, chunk));
    }
    free(scratch);
    free(state);
}

static void check_arrivals(problem *p, const float *first) {
    arrival a = {.n_chunks = p->n_chunks, .problem = p, .fail_after = 1 << 20};
    if (p->n_chunks > 16) {
        return;
    }
    for (uint32_t i = 0; i < 2 * p->n_chunks; i++) {
        atomic_init(&a.there[i], rnd(2));
    }
    p->shape.ready = is_ready;
    p->shape.wait = await;
    p->shape.ctx = &a;
    memset(p->out, 0xff, p->out_floats * sizeof *p->out);
    CHECK(run(&p->shape, 1 + rnd(THREADS_MAX)) == 0);
    CHECK(memcmp(first, p->out, p->out_floats * sizeof *p->out) == 0);
    unsigned asked = atomic_load(&a.asked);
    check_await(p, &a);
    for (uint32_t i = 0; i < 2 * p->n_chunks; i++) {
        atomic_store(&a.there[i], 0);
    }
    atomic_store(&a.asked, 0);
    a.fail_after = 0;
    int err = run(&p->shape, 2);
    CHECK(err == (atomic_load(&a.asked) > 0 ? -5 : 0));
    CHECK(asked == 0 || err == -5);
    p->shape.ready = NULL;
    p->shape.wait = NULL;
}

static void check_case(neap_attn_type k_type, neap_attn_type v_type, uint64_t seed) {
    problem p = make_problem(k_type, v_type);
    CHECK(neap_attn_supported(&p.shape));
    float *first = malloc(p.out_floats * sizeof *first);
    CHECK(first);
    for (size_t kernel = 0; neap_attn_kernel_name(kernel) != NULL; kernel++) {
        neap_attn_kernel_choose(kernel);
        memset(p.out, 0xff, p.out_floats * sizeof *p.out);
        CHECK(run(&p.shape, 1) == 0);
        double error = nmse(&p);
        if (!(error <= 1e-6)) {
            fprintf(stderr,
                    "seed %" PRIu64 " kernel %s: NMSE %g; types %d %d heads %u/%u tokens %u cells "
                    "%u streams %u elems %u %u cap %g bias %g sinks %d mask %d\n",
                    seed, neap_attn_kernel_name(kernel), error, (int)k_type, (int)v_type,
                    p.shape.n_heads, p.shape.n_kv_heads, p.shape.n_tokens, p.shape.n_cells,
                    p.shape.n_streams, p.shape.k.head_elems, p.shape.v.head_elems,
                    (double)p.shape.softcap, (double)p.shape.max_bias, p.shape.sinks != NULL,
                    p.mask != NULL);
            abort();
        }
        memcpy(first, p.out, p.out_floats * sizeof *first);
        memset(p.out, 0xff, p.out_floats * sizeof *p.out);
        CHECK(run(&p.shape, 2 + rnd(THREADS_MAX - 1)) == 0);
        CHECK(memcmp(first, p.out, p.out_floats * sizeof *first) == 0);
        check_arrivals(&p, first);
    }
    free(first);
    free_problem(&p);
}

/* A hidden cell may hold anything. */
static void check_hidden_nan(void) {
    problem p = make_problem(NEAP_ATTN_F16, NEAP_ATTN_F16);
    float *first = malloc(p.out_floats * sizeof *first);
    CHECK(first);
    for (size_t kernel = 0; neap_attn_kernel_name(kernel) != NULL; kernel++) {
        neap_attn_kernel_choose(kernel);
        CHECK(run(&p.shape, 1) == 0);
        memcpy(first, p.out, p.out_floats * sizeof *first);
        for (uint32_t s = 0; s < p.shape.n_streams && p.mask != NULL; s++) {
            for (uint32_t c = 0; c < p.shape.n_cells; c++) {
                bool hidden = true;
                for (uint32_t t = 0; t < p.shape.n_tokens; t++) {
                    hidden = hidden && mask_row(&p, s, t)[c] == 0xfc00;
                }
                if (hidden) {
                    size_t at = c % CHUNK * p.shape.k.cell_bytes;
                    memset((char *)p.k.chunks[s * p.n_chunks + c / CHUNK] + at, 0x7f,
                           p.shape.k.cell_bytes);
                    at = c % CHUNK * p.shape.v.cell_bytes;
                    memset((char *)p.v.chunks[s * p.n_chunks + c / CHUNK] + at, 0x7f,
                           p.shape.v.cell_bytes);
                }
            }
        }
        CHECK(run(&p.shape, 2) == 0);
        CHECK(nmse(&p) <= 1e-6);
    }
    free(first);
    free_problem(&p);
}

/* 70,000 cells; and cells that one token sees as NaN while another does not see them. */
static void check_long(void) {
    uint32_t n = 70001;
    uint16_t *k = calloc((size_t)n + CHUNK, 32), *v = calloc((size_t)n + CHUNK, 32);
    uint16_t *mask = calloc(n, 2 * sizeof *mask);
    const void *k_chunks[274], *v_chunks[274];
    float q[2][16], out[2][16];
    CHECK(k && v && mask);
    for (uint32_t c = 0; c < n; c++) {
        for (uint32_t i = 0; i < 16; i++) {
            v[16 * c + i] = neap_f16_of_f32(c < n / 2 ? 1.0f : 3.0f);
        }
    }
    memset(v + 16 * (size_t)(n - 1), 0x7f, 32); /* NaN, shown to token 1 only */
    mask[n - 1] = 0xfc00;
    memset(q, 0, sizeof q);
    for (uint32_t c = 0; c * CHUNK < n; c++) {
        k_chunks[c] = k + (size_t)c * CHUNK * 16;
        v_chunks[c] = v + (size_t)c * CHUNK * 16;
    }
    neap_attn_shape shape = {
        .n_tokens = 2,
        .n_heads = 1,
        .n_kv_heads = 1,
        .n_streams = 1,
        .n_cells = n,
        .k = {.type = NEAP_ATTN_F16, .head_elems = 16, .cell_bytes = 32, .chunks = k_chunks},
        .v = {.type = NEAP_ATTN_F16, .head_elems = 16, .cell_bytes = 32, .chunks = v_chunks},
        .q = {.base = (char *)q, .token_bytes = sizeof q[0]},
        .out = {.base = (char *)out, .token_bytes = sizeof out[0]},
        .mask = {.base = (char *)mask, .token_bytes = 2 * (size_t)n, .n_heads = 1, .n_streams = 1},
        .scale = 1.0f,
    };
    for (size_t kernel = 0; neap_attn_kernel_name(kernel) != NULL; kernel++) {
        neap_attn_kernel_choose(kernel);
        CHECK(run(&shape, 3) == 0);
        CHECK(fabsf(out[0][3] - 2.0f) < 1e-4f);
        CHECK(isnan(out[1][3]));
    }
    free(k);
    free(v);
    free(mask);
}

int main(int argc, char **argv) {
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : (uint64_t)time(NULL);
    uint32_t cases = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 60;
    printf("seed %" PRIu64 "\n", seed);
    fflush(stdout);
    rng_state = seed;
    for (uint32_t i = 0; i < cases; i++) {
        neap_attn_type k = (neap_attn_type)rnd(5), v = rnd(2) == 0 ? k : (neap_attn_type)rnd(5);
        check_case(k, v, seed);
        if (i % 4 == 0) {
            check_hidden_nan();
        }
    }
    check_long();
    return 0;
}
