/* test_opencl_random.c - attention on the OpenCL device, on the random problems of the CPU kernels
 * against the same f64 reference, in f32 and, where the device has it, in f16. Chunks that the mask
 * hides are away: reading one ends the process, as does a read past a chunk's last cell. Runs
 * repeat to the bit. Usage: test_opencl_random [SEED [CASES]]; the seed is printed. */
#include <time.h>

#include "attn_problem.h"
#include "opencl_attn.h"
#include "vm.h"

static neap_opencl *cl;

/* ---- chunks in memory that the device shares ---- */

typedef struct piece {
    char *base, *chunk; /* the chunk ends where an inaccessible page begins */
    size_t bytes;       /* accessible */
} piece;
static piece pieces[4096];
static size_t n_pieces;

static void *piece_alloc(size_t bytes) {
    const size_t page = neap_vm_page(), whole = (bytes + page - 1) / page * page;
    void *base;
    CHECK(n_pieces < sizeof pieces / sizeof pieces[0]);
    CHECK(neap_opencl_reserve(cl, whole + page, page, &base) == 0);
    CHECK(((const char *)base)[whole - 1] == 0);
    CHECK(neap_vm_protect((char *)base + whole, page, false) == 0);
    pieces[n_pieces++] = (piece){base, (char *)base + whole - bytes, whole};
    return (char *)base + whole - bytes;
}

static piece *piece_of(const void *chunk) {
    size_t i = 0;
    while (pieces[i].chunk != chunk) {
        CHECK(++i < n_pieces);
    }
    return &pieces[i];
}

static void piece_free(void *chunk) {
    piece *p = piece_of(chunk);
    CHECK(neap_vm_protect(p->base, p->bytes + neap_vm_page(), true) == 0);
    neap_opencl_release(cl, p->base);
    *p = pieces[--n_pieces];
}

static void set_there(const problem *p, size_t i, bool there) {
    const piece *k = piece_of(p->k.chunks[i]), *v = piece_of(p->v.chunks[i]);
    CHECK(neap_vm_protect(k->base, k->bytes, there) == 0);
    CHECK(neap_vm_protect(v->base, v->bytes, there) == 0);
}

/* ---- cases ---- */

static void check_answer(const problem *p, uint64_t seed) {
    double error = nmse(p);
    if (!(error <= (neap_opencl_uses_half(cl) ? 1e-5 : 1e-6))) {
        fprintf(stderr,
                "seed %" PRIu64 ": NMSE %g; heads %u/%u tokens %u cells %u streams %u elems %u %u "
                "cap %g bias %g sinks %d mask %d\n",
                seed, error, p->shape.n_heads, p->shape.n_kv_heads, p->shape.n_tokens,
                p->shape.n_cells, p->shape.n_streams, p->shape.k.head_elems, p->shape.v.head_elems,
                (double)p->shape.softcap, (double)p->shape.max_bias, p->shape.sinks != NULL,
                p->mask != NULL);
        abort();
    }
}

static void run(problem *p) {
    memset(p->out, 0xff, p->out_floats * sizeof *p->out);
    CHECK(neap_opencl_attn(cl, &p->shape) == 0);
}

static void check_case(uint64_t seed) {
    problem p = make_problem(NEAP_ATTN_F16, NEAP_ATTN_F16);
    size_t n = (size_t)p.shape.n_streams * p.n_chunks;
    float *first = malloc(p.out_floats * sizeof *first);
    CHECK(first);
    const char *why = neap_opencl_refuses(cl, &p.shape);
    if (why != NULL) {
        fprintf(stderr, "seed %" PRIu64 ": refused: %s\n", seed, why);
        abort();
    }
    run(&p);
    check_answer(&p, seed);
    memcpy(first, p.out, p.out_floats * sizeof *first);
    for (size_t i = 0; i < n; i++) {
        set_there(&p, i, chunk_seen(&p, (uint32_t)(i / p.n_chunks), (uint32_t)(i % p.n_chunks)));
    }
    run(&p);
    CHECK(memcmp(first, p.out, p.out_floats * sizeof *first) == 0);
    for (size_t i = 0; i < n; i++) {
        set_there(&p, i, true);
    }
    free(first);
    free_problem(&p);
}

/* A hidden cell may hold anything. */
static void check_hidden_nan(uint64_t seed) {
    problem p = make_problem(NEAP_ATTN_F16, NEAP_ATTN_F16);
    CHECK(neap_opencl_refuses(cl, &p.shape) == NULL);
    for (uint32_t s = 0; s < p.shape.n_streams && p.mask != NULL; s++) {
        for (uint32_t c = 0; c < p.shape.n_cells; c++) {
            bool hidden = true;
            for (uint32_t t = 0; t < p.shape.n_tokens; t++) {
                hidden = hidden && mask_row(&p, s, t)[c] == 0xfc00;
            }
            if (hidden) {
                size_t chunk = s * p.n_chunks + c / CHUNK, inside = c % CHUNK;
                memset((char *)p.k.chunks[chunk] + inside * p.shape.k.cell_bytes, 0x7f,
                       p.shape.k.cell_bytes);
                memset((char *)p.v.chunks[chunk] + inside * p.shape.v.cell_bytes, 0x7f,
                       p.shape.v.cell_bytes);
            }
        }
    }
    run(&p);
    check_answer(&p, seed);
    free_problem(&p);
}

/* A cell that one token sees as NaN while another does not see it. */
static void check_seen_nan(void) {
    enum { CELLS = 300, ELEMS = 64 };
    uint16_t mask[2][CELLS] = {{0}};
    float q[2][ELEMS] = {{0}}, out[2][ELEMS];
    void *chunks[4];
    for (int i = 0; i < 4; i++) {
        chunks[i] = piece_alloc((i % 2 == 0 ? CHUNK : CELLS - CHUNK) * ELEMS * 2);
        memset(chunks[i], 0, (i % 2 == 0 ? CHUNK : CELLS - CHUNK) * ELEMS * 2);
    }
    memset((char *)chunks[3] + (CELLS - CHUNK - 1) * ELEMS * 2, 0x7f, ELEMS * 2);
    mask[0][CELLS - 1] = 0xfc00;
    neap_attn_plane rows = {.type = NEAP_ATTN_F16, .head_elems = ELEMS, .cell_bytes = ELEMS * 2};
    neap_attn_shape shape = {
        .n_tokens = 2,
        .n_heads = 1,
        .n_kv_heads = 1,
        .n_streams = 1,
        .n_cells = CELLS,
        .k = rows,
        .v = rows,
        .q = {.base = (char *)q, .token_bytes = sizeof q[0]},
        .out = {.base = (char *)out, .token_bytes = sizeof out[0]},
        .mask = {.base = (char *)mask, .token_bytes = sizeof mask[0], .n_heads = 1, .n_streams = 1},
        .scale = 1.0f,
    };
    shape.k.chunks = (const void *const *)chunks;
    shape.v.chunks = (const void *const *)chunks + 2;
    CHECK(neap_opencl_refuses(cl, &shape) == NULL);
    CHECK(neap_opencl_attn(cl, &shape) == 0);
    CHECK(out[0][3] == 0.0f);
    CHECK(isnan(out[1][3]));
    for (int i = 0; i < 4; i++) {
        piece_free(chunks[i]);
    }
}

/* What the device cannot do is refused, not done wrongly. */
static void check_refusals(void) {
    problem p = make_problem(NEAP_ATTN_F16, NEAP_ATTN_Q8_0);
    CHECK(neap_opencl_refuses(cl, &p.shape) != NULL);
    free_problem(&p);
    if (neap_opencl_needs_reserve(cl)) {
        chunk_alloc = malloc;
        chunk_free = free;
        p = make_problem(NEAP_ATTN_F16, NEAP_ATTN_F16);
        CHECK(neap_opencl_refuses(cl, &p.shape) != NULL);
        free_problem(&p);
    }
}

static void check_device(uint32_t cases, uint64_t seed) {
    printf("device %s, %s, seed %" PRIu64 "\n", neap_opencl_device(cl),
           neap_opencl_uses_half(cl) ? "f16" : "f32", seed);
    fflush(stdout);
    rng_state = seed;
    any_scale = !neap_opencl_uses_half(cl);
    chunk_alloc = piece_alloc;
    chunk_free = piece_free;
    for (uint32_t i = 0; i < cases; i++) {
        check_case(seed);
        if (i % 4 == 0) {
            check_hidden_nan(seed);
        }
    }
    check_seen_nan();
    check_refusals();
    CHECK(n_pieces == 0);
    neap_opencl_close(cl);
}

int main(int argc, char **argv) {
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : (uint64_t)time(NULL);
    uint32_t cases = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 40;
    const char *reason = NULL;
    if (neap_opencl_open(false, &cl, &reason) != 0) {
        SKIP(reason);
    }
    /* Every pair of sizes is a build of its own: few of them in one run. */
    rng_state = seed;
    uint32_t sizes[3] = {64, head_sizes[rnd(11)], head_sizes[rnd(11)]};
    for (size_t i = 0; i < 11; i++) {
        head_sizes[i] = sizes[i % 3];
    }
    check_device(cases, seed);
    CHECK(neap_opencl_open(true, &cl, &reason) == 0);
    if (neap_opencl_uses_half(cl)) {
        check_device(cases, seed);
    } else {
        printf("not checked: f16 arithmetic (the device lacks cl_khr_fp16)\n");
        neap_opencl_close(cl);
    }
    return 0;
}
