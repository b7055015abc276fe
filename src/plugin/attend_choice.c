/* attend_choice.c - who computes an attention, by measurement.
 *
 * For each kind of attention (types, heads, head sizes; one, few or many tokens; a short or a long
 * context) both are timed once, at its first use, on made-up data of that kind; the host's kernel
 * is taken only where it is clearly faster. A kind's choice never changes in a process, so text
 * stays what it is whatever is evicted meanwhile; where there is a device profile the times are
 * kept in it, and later processes choose alike.
 *
 * Threads   under the graph's thread; the table has a lock, for several contexts. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "err.h"
#include "ggml-impl.h"
#include "plugin_int.h"

enum {
    KINDS_MAX = 64,
    RUNS = 3,
    SHORT_CELLS = 256,
    FEW_TOKENS = 8,
    MANY_TOKENS = 64,
    /* The host's kernel must take less than this many percent of our time. */
    HOST_PERCENT = 80
};

typedef struct attn_kind {
    enum ggml_type k_type, v_type;
    int64_t k_elems, v_elems, n_heads, n_kv_heads, n_tokens, n_cells;
} attn_kind;

int64_t neap_attend_long_cells = 1024;

typedef struct choice {
    attn_kind kind;
    bool ours;
} choice;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static choice choices[KINDS_MAX];
static size_t n_choices;

static attn_kind kind_of(const struct ggml_tensor *node) {
    const struct ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2];
    attn_kind kind;
    memset(&kind, 0, sizeof kind); /* compared as bytes */
    kind.k_type = k->type;
    kind.v_type = v->type;
    kind.k_elems = k->ne[0];
    kind.v_elems = v->ne[0];
    kind.n_heads = q->ne[2];
    kind.n_kv_heads = k->ne[2];
    kind.n_tokens = q->ne[1] == 1 ? 1 : q->ne[1] <= 2 * FEW_TOKENS ? FEW_TOKENS : MANY_TOKENS;
    kind.n_cells = k->ne[1] <= SHORT_CELLS ? SHORT_CELLS : neap_attend_long_cells;
    return kind;
}

static struct ggml_tensor made_up(enum ggml_type type, int64_t n0, int64_t n1, int64_t n2) {
    struct ggml_tensor tensor = {.type = type, .ne = {n0, n1, n2, 1}};
    tensor.nb[0] = neap_host_fn.type_size(type);
    tensor.nb[1] = neap_host_fn.row_size(type, n0);
    tensor.nb[2] = tensor.nb[1] * (size_t)n1;
    tensor.nb[3] = tensor.nb[2] * (size_t)n2;
    return tensor;
}

/* Least time of a few runs of the one node, ns; 0 when it failed. */
static uint64_t time_node(ggml_backend_t cpu, struct ggml_tensor *node) {
    struct ggml_cgraph graph = {.n_nodes = 1, .nodes = &node};
    uint64_t best = 0;
    for (int i = 0; i < RUNS; i++) {
        uint64_t start = neap_clock_ns();
        if (cpu->iface.graph_compute(cpu, &graph) != GGML_STATUS_SUCCESS) {
            return 0;
        }
        uint64_t ns = neap_clock_ns() - start;
        best = best == 0 || ns < best ? ns : best;
    }
    return best;
}

/* The same attention node on made-up data, timed by the host and by us. 0 ns: could not be. */
static neap_attention_times measure(const struct ggml_tensor *node, const attn_kind *kind,
                                    ggml_backend_t cpu, int n_threads) {
    struct ggml_tensor q = made_up(GGML_TYPE_F32, kind->k_elems, kind->n_tokens, kind->n_heads);
    struct ggml_tensor k = made_up(kind->k_type, kind->k_elems, kind->n_cells, kind->n_kv_heads);
    struct ggml_tensor v = made_up(kind->v_type, kind->v_elems, kind->n_cells, kind->n_kv_heads);
    struct ggml_tensor mask = made_up(GGML_TYPE_F16, kind->n_cells, kind->n_tokens, 1);
    struct ggml_tensor out = made_up(GGML_TYPE_F32, kind->v_elems, kind->n_heads, kind->n_tokens);
    struct ggml_tensor *all[] = {&q, &k, &v, &mask, &out};
    size_t bytes = 0;
    for (int i = 0; i < 5; i++) {
        bytes += (all[i]->nb[3] + 63) / 64 * 64;
    }
    neap_attend *attend = neap_attend_create();
    char *data = aligned_alloc(64, bytes);
    neap_attention_times times = {0};
    if (attend != NULL && data != NULL) {
        memset(data, 0x2c, bytes); /* a small number in every type */
        char *at = data;
        for (int i = 0; i < 5; i++) {
            all[i]->data = at;
            at += (all[i]->nb[3] + 63) / 64 * 64;
        }
        memset(mask.data, 0, mask.nb[3]);
        out.op = node->op;
        out.flags = node->flags;
        memcpy(out.op_params, node->op_params, sizeof out.op_params);
        memcpy(out.src, (struct ggml_tensor *[]){&q, &k, &v, &mask, node->src[4]},
               5 * sizeof out.src[0]);
        struct ggml_tensor *nodes = &out;
        struct ggml_cgraph graph = {.n_nodes = 1, .nodes = &nodes};
        const neap_attend_job job = {
            .cpu = cpu, .n_threads = n_threads, .all_resident = true, .measuring = true};
        times.host_ns = time_node(cpu, &out);
        for (int i = 0; i < RUNS && times.host_ns != 0; i++) {
            if (neap_attend_plan(attend, &graph, &job) != 0) {
                break;
            }
            uint64_t start = neap_clock_ns();
            struct ggml_cgraph planned = {.n_nodes = 1, .nodes = neap_attend_nodes(attend, &graph)};
            cpu->iface.graph_compute(cpu, &planned);
            uint64_t ns = neap_clock_ns() - start;
            times.our_ns = times.our_ns == 0 || ns < times.our_ns ? ns : times.our_ns;
        }
    }
    neap_attend_free(attend);
    free(data);
    return times;
}

/* All that the times hang on beside the device. */
static void describe(const attn_kind *kind, int n_threads, char text[128]) {
    snprintf(text, 128,
             NEAP_VERSION " %s, %d threads: %s/%s, %lld/%lld heads x %lld/%lld, %lld tokens, %lld "
                          "cells",
             neap_attend_kernel(), n_threads, neap_host_fn.type_name(kind->k_type),
             neap_host_fn.type_name(kind->v_type), (long long)kind->n_heads,
             (long long)kind->n_kv_heads, (long long)kind->k_elems, (long long)kind->v_elems,
             (long long)kind->n_tokens, (long long)kind->n_cells);
}

static bool choose(const struct ggml_tensor *node, const attn_kind *kind, ggml_backend_t cpu,
                   int n_threads) {
    neap_engine *engine = neap_plugin_engine();
    neap_attention_times times;
    char text[128];
    describe(kind, n_threads, text);
    bool known = neap_attention_recall(engine, text, &times);
    if (!known) {
        times = measure(node, kind, cpu, n_threads);
    }
    if (!known && times.our_ns != 0) {
        neap_attention_keep(engine, text, &times);
    }
    neap_log(NEAP_LOG_INFO, "attention %s: host %.3f ms, ours %.3f ms%s", text,
             (double)times.host_ns * 1e-6, (double)times.our_ns * 1e-6,
             known ? " (device profile)" : "");
    return times.host_ns == 0 || times.our_ns == 0 ||
           times.host_ns * 100 >= times.our_ns * HOST_PERCENT;
}

bool neap_attend_choose(const struct ggml_tensor *node, ggml_backend_t cpu, int n_threads) {
    attn_kind wanted = kind_of(node);
    pthread_mutex_lock(&lock);
    size_t i = 0;
    while (i < n_choices && memcmp(&choices[i].kind, &wanted, sizeof wanted) != 0) {
        i++;
    }
    bool ours = true; /* of more kinds than the table has room for */
    if (i < n_choices) {
        ours = choices[i].ours;
    } else if (i < KINDS_MAX) {
        ours = choose(node, &wanted, cpu, n_threads);
        choices[n_choices++] = (choice){.kind = wanted, .ours = ours};
    }
    pthread_mutex_unlock(&lock);
    return ours;
}
