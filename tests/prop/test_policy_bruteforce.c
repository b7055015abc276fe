/* test_policy_bruteforce.c - plans of random small cases against all placements there are.
 * Usage: test_policy_bruteforce [SEED [CASES]]; the seed is printed.
 *   balance      with equal units, at every prefix of KVonly and KVandW, the longer of the two
 *                restore paths is within one unit's time of the best placement that (a) evicts as
 *                many chunks and weight units, (b) releases as many bytes. What the algorithm's
 *                floor(t_rw / t_dkv) leaves unused for each weight unit dropped is allowed on top.
 *   small steps  many small evictions make the steps of one large one
 *   plans        every policy, ragged units: what the header promises of a plan */
#include <inttypes.h>
#include <math.h>
#include <string.h>
#include <time.h>

#include "check.h"
#include "policy.h"

enum { MAX_UNITS = 128 };

static uint64_t rng_state;

static uint32_t rnd(uint32_t n) /* 0 .. n - 1 */
{
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((rng_state >> 33) % n);
}

typedef struct model {
    neap_policy_unit units[MAX_UNITS];
    neap_policy_input input;
} model;

static neap_policy_unit *unit_by_id(model *m, neap_unit_id id) {
    for (size_t i = 0; i < m->input.n; i++)
        if (m->units[i].id == id) return &m->units[i];
    fprintf(stderr, "a step names unit %u, which was not given\n", id);
    abort();
}

/* Equal chunks and equal weight units, in random order and with random rates. */
static void make_equal(model *m) {
    uint32_t n_layers = 1 + rnd(6), n_chunks = rnd(6);
    uint64_t kv_bytes = 64 * (1 + rnd(16)), encoded = kv_bytes / 2 + rnd((uint32_t)kv_bytes / 4);
    uint64_t weight_bytes = kv_bytes * (1 + rnd(12)) + rnd(64);
    *m = (model){.input = {.units = m->units,
                           .target_bytes = UINT64_MAX,
                           .read_rate = 50 + rnd(400),
                           .decode_rate = 100 + rnd(1000),
                           .memory_useful = true}};
    for (uint32_t layer = 0; layer < n_layers; layer++)
        for (uint32_t c = 0; c <= n_chunks; c++) {
            bool is_kv = c < n_chunks;
            uint64_t bytes = is_kv ? kv_bytes : weight_bytes;
            m->units[m->input.n++] = (neap_policy_unit){.is_kv = is_kv,
                                                        .is_clean = !is_kv,
                                                        .layer = (int)layer,
                                                        .chunk = is_kv ? c : 0,
                                                        .release_bytes = bytes,
                                                        .raw_bytes = bytes,
                                                        .encoded_bytes = is_kv ? encoded : 0};
        }
    for (size_t i = 0; i < m->input.n; i++) {
        neap_policy_unit *other = &m->units[rnd((uint32_t)m->input.n)], swap = m->units[i];
        m->units[i] = *other;
        *other = swap;
    }
    for (size_t i = 0; i < m->input.n; i++)
        m->units[i].id = (neap_unit_id)(7 * i + 3);
}

typedef struct balance {
    double t_dkv, t_rkv, t_rw;
    uint64_t memory_release, storage_release, weight_release; /* of one unit */
    uint32_t n_kv, n_w;
} balance;

static double longer_path(const balance *b, uint32_t memory, uint32_t storage, uint32_t weights) {
    return fmax(memory * b->t_dkv, storage * b->t_rkv + weights * b->t_rw);
}

/* The least longer path of all placements of that many units (kv + weights), or, with counts off,
 * of all that release at least so many bytes. */
static double best_path(const balance *b, bool counts, uint32_t kv, uint32_t weights,
                        uint64_t released) {
    double best = INFINITY;
    for (uint32_t memory = 0; memory <= b->n_kv; memory++)
        for (uint32_t storage = 0; memory + storage <= b->n_kv; storage++)
            for (uint32_t w = 0; w <= b->n_w; w++) {
                uint64_t bytes = memory * b->memory_release + storage * b->storage_release +
                                 w * b->weight_release;
                bool same = counts ? memory + storage == kv && w == weights : bytes >= released;
                if (same) best = fmin(best, longer_path(b, memory, storage, w));
            }
    return best;
}

static balance balance_of(const model *m) {
    balance b = {0};
    for (size_t i = 0; i < m->input.n; i++) {
        const neap_policy_unit *unit = &m->units[i];
        if (unit->is_kv) {
            b.t_dkv = (double)unit->raw_bytes / (double)m->input.decode_rate;
            b.t_rkv = (double)unit->raw_bytes / (double)m->input.read_rate;
            b.memory_release = unit->release_bytes - unit->encoded_bytes;
            b.storage_release = unit->release_bytes;
            b.n_kv++;
        } else {
            b.t_rw = (double)unit->raw_bytes / (double)m->input.read_rate;
            b.weight_release = unit->release_bytes;
            b.n_w++;
        }
    }
    return b;
}

static uint32_t check_balance(model *m) {
    neap_step steps[2 * MAX_UNITS];
    neap_stage stage;
    balance b = balance_of(m);
    size_t n = neap_policy_find("hybrid")->plan(&m->input, steps, &stage);
    uint32_t memory = 0, storage = 0, weights = 0, per_layer = 0, checked = 0;
    if (b.n_kv == 0) return 0;
    per_layer = (uint32_t)(b.t_rw / b.t_dkv * (1 + 1e-9));
    double unit = fmax(fmax(b.t_dkv, b.t_rkv), b.t_rw), unused = b.t_rw - per_layer * b.t_dkv;
    for (size_t i = 0; i < n; i++) {
        bool is_kv = unit_by_id(m, steps[i].id)->is_kv;
        /* Wonly and CompKV claim no balance: from where the chunks ran out. */
        if (steps[i].action == NEAP_ACTION_MEMORY_TO_STORAGE) break;
        if (!is_kv && memory + storage == b.n_kv && per_layer * (weights + 1) > memory) break;
        memory += steps[i].action == NEAP_ACTION_TO_MEMORY;
        storage += steps[i].action == NEAP_ACTION_TO_STORAGE;
        weights += !is_kv;
        if (weights && per_layer == 0) break; /* one read is shorter than one decode: T = 0 */
        uint64_t released =
            memory * b.memory_release + storage * b.storage_release + weights * b.weight_release;
        double got = longer_path(&b, memory, storage, weights);
        double allowed = unit + weights * unused + 1e-9;
        CHECK(got <= best_path(&b, true, memory + storage, weights, 0) + allowed);
        CHECK(got <= best_path(&b, false, 0, 0, released) + allowed);
        checked++;
    }
    return checked;
}

/* Carries out one step on the input, as the core would. */
static void apply(model *m, neap_step step) {
    neap_policy_unit *unit = unit_by_id(m, step.id);
    if (step.action == NEAP_ACTION_TO_MEMORY) {
        unit->in_memory = true;
        unit->release_bytes = unit->encoded_bytes;
        return;
    }
    if (unit->is_kv) {
        m->input.n_kv_on_storage++;
    } else {
        m->input.n_weights_evicted++;
        m->input.weight_bytes_evicted += unit->raw_bytes;
    }
    *unit = m->units[--m->input.n];
}

static void check_small_steps(model *m) {
    neap_step all[2 * MAX_UNITS], some[2 * MAX_UNITS];
    neap_stage stage;
    const neap_policy *hybrid = neap_policy_find("hybrid");
    size_t n_all = hybrid->plan(&m->input, all, &stage), done = 0;
    while (done < n_all) {
        m->input.target_bytes = 1 + rnd(3) * rnd(1000);
        size_t n = hybrid->plan(&m->input, some, &stage);
        CHECK(n > 0 && done + n <= n_all);
        for (size_t i = 0; i < n; i++) {
            CHECK(some[i].id == all[done + i].id && some[i].action == all[done + i].action);
            apply(m, some[i]);
        }
        done += n;
    }
    CHECK(m->input.n == 0);
}

/* Ragged units: any sizes, several streams, clean, in memory, nothing to release. */
static void make_ragged(model *m) {
    make_equal(m);
    for (size_t i = 0; i < m->input.n; i++) {
        neap_policy_unit *unit = &m->units[i];
        unit->raw_bytes = 1 + rnd(5000);
        unit->release_bytes = rnd(8) ? 4096 * rnd(3) + rnd(4096) : 0;
        unit->stream = rnd(3);
        unit->last_use = rnd(4);
        unit->encoded_bytes = unit->is_kv ? rnd((uint32_t)unit->raw_bytes + 100) : 0;
        unit->is_clean = unit->is_kv ? rnd(4) == 0 : rnd(8) != 0;
        unit->in_memory = unit->is_kv && !unit->is_clean && rnd(4) == 0;
        if (unit->in_memory) unit->release_bytes = unit->encoded_bytes;
    }
    m->input.target_bytes = rnd(4) ? rnd(200000) : UINT64_MAX;
    m->input.memory_useful = rnd(4) != 0;
    m->input.n_weights_evicted = rnd(3) * rnd(5);
    m->input.weight_bytes_evicted = m->input.n_weights_evicted * rnd(5000);
    m->input.n_kv_on_storage = rnd(3) * rnd(30);
    if (rnd(8) == 0) m->input.read_rate = 0;
    if (rnd(8) == 0) m->input.decode_rate = 0;
}

static bool is_before(const neap_policy_unit *x, const neap_policy_unit *y) {
    if (x->layer != y->layer) return x->layer > y->layer;
    if (x->stream != y->stream) return x->stream > y->stream;
    return x->chunk >= y->chunk;
}

/* Weights, chunks and moves out of memory each go from the back of the model to its front. */
static void check_backward(model *m, const neap_step *steps, size_t n) {
    const neap_policy_unit *last[3] = {NULL};
    for (size_t i = 0; i < n; i++) {
        const neap_policy_unit *unit = unit_by_id(m, steps[i].id);
        int list = steps[i].action == NEAP_ACTION_MEMORY_TO_STORAGE ? 2 : unit->is_kv;
        CHECK(!last[list] || is_before(last[list], unit));
        last[list] = unit;
    }
}

/* The same lists, each from the least recently used to the last used. */
static void check_by_use(model *m, const neap_step *steps, size_t n) {
    uint64_t last[3] = {0};
    for (size_t i = 0; i < n; i++) {
        const neap_policy_unit *unit = unit_by_id(m, steps[i].id);
        int list = steps[i].action == NEAP_ACTION_MEMORY_TO_STORAGE ? 2 : unit->is_kv;
        CHECK(last[list] <= unit->last_use);
        last[list] = unit->last_use;
    }
}

/* What the action asks of the unit, given whether this plan put it into memory; its release. */
static uint64_t check_step(model *m, neap_step step, const bool *put_in_memory) {
    const neap_policy_unit *unit = unit_by_id(m, step.id);
    switch (step.action) {
    case NEAP_ACTION_DROP:
        CHECK(unit->is_clean && !unit->in_memory);
        return unit->release_bytes;
    case NEAP_ACTION_TO_MEMORY:
        CHECK(unit->is_kv && !unit->is_clean && !unit->in_memory && m->input.memory_useful);
        CHECK(unit->encoded_bytes < unit->release_bytes);
        return unit->release_bytes - unit->encoded_bytes;
    case NEAP_ACTION_TO_STORAGE:
        CHECK(!unit->is_clean && !unit->in_memory);
        return unit->release_bytes;
    case NEAP_ACTION_MEMORY_TO_STORAGE:
        CHECK(unit->in_memory || *put_in_memory);
        return unit->in_memory ? unit->release_bytes : unit->encoded_bytes;
    }
    abort();
}

static void check_plan(model *m, const neap_policy *policy) {
    size_t room = 2 * m->input.n;
    neap_step *steps = malloc(room * sizeof *steps + 1); /* exact, for AddressSanitizer */
    bool seen[MAX_UNITS] = {false}, put_in_memory[MAX_UNITS] = {false};
    neap_stage stage;
    CHECK(steps);
    size_t n = policy->plan(&m->input, steps, &stage);
    CHECK(n <= room && (n == 0) == (stage == NEAP_STAGE_NONE));
    uint64_t released = 0, last = 0;
    bool whole_layers = strcmp(policy->name, "partial-offload") == 0;
    for (size_t i = 0; i < n; i++) {
        size_t u = (size_t)(unit_by_id(m, steps[i].id) - m->units);
        CHECK(!seen[u] || (put_in_memory[u] && steps[i].action == NEAP_ACTION_MEMORY_TO_STORAGE));
        last = check_step(m, steps[i], &put_in_memory[u]);
        seen[u] = true;
        put_in_memory[u] = steps[i].action == NEAP_ACTION_TO_MEMORY;
        CHECK(m->units[u].release_bytes > 0);
        released += last;
    }
    if (!whole_layers) CHECK(n == 0 || released - last < m->input.target_bytes);
    if (released < m->input.target_bytes) /* then nothing is left, in memory neither */
        for (size_t u = 0; u < m->input.n; u++)
            CHECK(m->units[u].release_bytes == 0 ||
                  (seen[u] && !(put_in_memory[u] && m->units[u].encoded_bytes > 0)));
    for (size_t u = 0; whole_layers && u < m->input.n; u++)
        for (size_t v = 0; v < m->input.n; v++)
            if (seen[u] && m->units[v].layer >= m->units[u].layer)
                CHECK(seen[v] || m->units[v].release_bytes == 0);
    if (policy->by_use)
        check_by_use(m, steps, n);
    else if (strcmp(policy->name, "forward-out") != 0 &&
             strncmp(policy->name, "random-out", 10) != 0)
        check_backward(m, steps, n);
    free(steps);
}

int main(int argc, char **argv) {
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    uint32_t cases = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 0) : 2000;
    printf("seed %" PRIu64 ", %u cases\n", seed, cases);
    fflush(stdout);
    rng_state = seed;
    static model m;
    uint32_t prefixes = 0;
    for (uint32_t i = 0; i < cases; i++) {
        make_equal(&m);
        prefixes += check_balance(&m);
        check_small_steps(&m);
        make_ragged(&m);
        for (size_t p = 0; neap_policy_at(p); p++)
            check_plan(&m, neap_policy_at(p));
    }
    printf("%u prefixes compared with all placements\n", prefixes);
    CHECK(prefixes > cases);
    return 0;
}
