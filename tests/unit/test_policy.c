/* test_policy.c - the stages of Algorithm 1 and the baselines on plans worked out by hand.
 * Plans are written as text: a step is M (to memory), S (to storage), D (drop), C (memory to
 * storage) and the unit, k<layer>.<chunk> or w<layer>. */
#include <string.h>

#include "check.h"
#include "policy.h"

enum { MAX_UNITS = 64 };

typedef struct model {
    neap_policy_unit units[MAX_UNITS];
    size_t n;
    neap_policy_input input;
} model;

/* Chunks of 100 bytes, 50 encoded, weights of 400; both rates 100 B/s: t_dkv = t_rkv = 1, t_rw = 4,
 * so four chunks a layer. Units are given front to back; the planner has to sort. */
static model make_model(int n_layers, uint32_t n_chunks) {
    model m = {.input = {.read_rate = 100,
                         .decode_rate = 100,
                         .memory_useful = true,
                         .target_bytes = UINT64_MAX}};
    for (int layer = 0; layer < n_layers; layer++) {
        for (uint32_t c = 0; c < n_chunks; c++)
            m.units[m.n++] = (neap_policy_unit){.is_kv = true,
                                                .layer = layer,
                                                .chunk = c,
                                                .release_bytes = 100,
                                                .raw_bytes = 100,
                                                .encoded_bytes = 50};
        m.units[m.n++] = (neap_policy_unit){
            .is_clean = true, .layer = layer, .release_bytes = 400, .raw_bytes = 400};
    }
    for (size_t i = 0; i < m.n; i++)
        m.units[i].id = (neap_unit_id)(i + 1000);
    return m;
}

static neap_policy_unit *unit_of(model *m, bool is_kv, int layer, uint32_t chunk) {
    for (size_t i = 0; i < m->n; i++)
        if (m->units[i].is_kv == is_kv && m->units[i].layer == layer && m->units[i].chunk == chunk)
            return &m->units[i];
    abort();
}

static void expect(model *m, const char *policy, neap_stage stage, const char *expected) {
    neap_step steps[2 * MAX_UNITS];
    neap_stage got_stage;
    char got[1024] = "";
    m->input.units = m->units;
    m->input.n = m->n;
    size_t n = neap_policy_find(policy)->plan(&m->input, steps, &got_stage);
    for (size_t i = 0; i < n; i++) {
        const neap_policy_unit *unit = &m->units[steps[i].id - 1000];
        char *end = got + strlen(got);
        size_t room = sizeof got - (size_t)(end - got);
        const char *space = i ? " " : "";
        char action = "DMSC"[steps[i].action];
        if (unit->is_kv)
            snprintf(end, room, "%s%ck%d.%u", space, action, unit->layer, unit->chunk);
        else
            snprintf(end, room, "%s%cw%d", space, action, unit->layer);
    }
    if (strcmp(got, expected) != 0 || got_stage != stage)
        fprintf(stderr, "%s: got      %s (stage %d)\nexpected %s (stage %d)\n", policy, got,
                (int)got_stage, expected, (int)stage);
    CHECK(strcmp(got, expected) == 0 && got_stage == stage);
}

static void test_registry(void) {
    const neap_policy *hybrid = neap_policy_find("hybrid");
    const neap_policy *offload = neap_policy_find("partial-offload");
    CHECK(hybrid && hybrid->overlap && !hybrid->clean_storage);
    CHECK(offload && !offload->overlap && offload->clean_storage && offload->allocate_first);
    const struct {
        const char *name;
        bool overlap, allocate_first;
    } overlaps[] = {{"hybrid", true, false},
                    {"mz-no", false, true},
                    {"mz-ar", false, false},
                    {"mz-rp", true, true}};
    for (size_t i = 0; i < sizeof overlaps / sizeof overlaps[0]; i++) {
        const neap_policy *policy = neap_policy_find(overlaps[i].name);
        CHECK(policy && policy->plan == hybrid->plan && !policy->sequential && !policy->by_use);
        CHECK(policy->overlap == overlaps[i].overlap);
        CHECK(policy->allocate_first == overlaps[i].allocate_first);
    }
    CHECK(!neap_policy_find("LRU") && !neap_policy_find("") && !neap_policy_find(NULL));
    CHECK(neap_policy_at(0) == hybrid); /* the default heads the list of the help texts */
    size_t n = 0;
    for (; neap_policy_at(n); n++)
        CHECK(neap_policy_find(neap_policy_at(n)->name));
    CHECK(n == 11);
}

/* 10 chunks, T = 8: KVonly for 2, then four chunks a layer; nothing is left for Wonly. */
static void test_many_chunks(void) {
    model m = make_model(2, 5);
    m.input.target_bytes = 50 + 100;
    expect(&m, "hybrid", NEAP_STAGE_KVONLY, "Mk1.4 Sk1.3");
    m.input.target_bytes = 50 + 100 + 4 * 50 + 1;
    expect(&m, "hybrid", NEAP_STAGE_KVANDW, "Mk1.4 Sk1.3 Mk1.2 Mk1.1 Mk1.0 Mk0.4 Dw1");
    m.input.target_bytes = 50 + 100 + 8 * 50 + 800;
    expect(&m, "hybrid", NEAP_STAGE_KVANDW,
           "Mk1.4 Sk1.3 Mk1.2 Mk1.1 Mk1.0 Mk0.4 Dw1 Mk0.3 Mk0.2 Mk0.1 Mk0.0 Dw0");
    m.input.target_bytes += 51;
    expect(&m, "hybrid", NEAP_STAGE_COMPKV,
           "Mk1.4 Sk1.3 Mk1.2 Mk1.1 Mk1.0 Mk0.4 Dw1 Mk0.3 Mk0.2 Mk0.1 Mk0.0 Dw0 Ck1.4 Ck1.2");
}

/* Half of a mean weight unit is paired with half of its chunks, also when the half went earlier. */
static void test_ragged_weights(void) {
    model m = make_model(2, 4);
    unit_of(&m, false, 1, 0)->raw_bytes = unit_of(&m, false, 1, 0)->release_bytes = 200;
    unit_of(&m, false, 0, 0)->raw_bytes = unit_of(&m, false, 0, 0)->release_bytes = 600;
    m.input.target_bytes = 8 * 50 + 800;
    expect(&m, "hybrid", NEAP_STAGE_KVANDW,
           "Mk1.3 Mk1.2 Dw1 Mk1.1 Mk1.0 Mk0.3 Mk0.2 Mk0.1 Mk0.0 Dw0");
    unit_of(&m, false, 1, 0)->release_bytes = 0;
    m.input.n_weights_evicted = 1;
    m.input.weight_bytes_evicted = 200;
    for (uint32_t c = 2; c < 4; c++) {
        unit_of(&m, true, 1, c)->in_memory = true;
        unit_of(&m, true, 1, c)->release_bytes = 50;
    }
    m.input.target_bytes = 6 * 50 + 600;
    expect(&m, "hybrid", NEAP_STAGE_KVANDW, "Mk1.1 Mk1.0 Mk0.3 Mk0.2 Mk0.1 Mk0.0 Dw0");
}

/* 2 chunks, T = 12: KVandW from the start, then Wonly. */
static void test_few_chunks(void) {
    model m = make_model(2, 1);
    m.input.target_bytes = 1;
    expect(&m, "hybrid", NEAP_STAGE_KVANDW, "Mk1.0");
    m.input.target_bytes = 101;
    expect(&m, "hybrid", NEAP_STAGE_WONLY, "Mk1.0 Mk0.0 Dw1");
    m.input.target_bytes = UINT64_MAX;
    expect(&m, "hybrid", NEAP_STAGE_COMPKV, "Mk1.0 Mk0.0 Dw1 Dw0 Ck1.0 Ck0.0");
}

/* Decoding three times as fast as reading: three chunks in four go to memory. */
static void test_inverse_proportion(void) {
    model m = make_model(1, 8);
    m.n--; /* no weights: T = 0 */
    m.input.decode_rate = 300;
    m.input.target_bytes = 6 * 50 + 2 * 100;
    expect(&m, "hybrid", NEAP_STAGE_KVONLY, "Mk0.7 Mk0.6 Mk0.5 Sk0.4 Mk0.3 Mk0.2 Mk0.1 Sk0.0");
    m.input.target_bytes = UINT64_MAX;
    expect(&m, "hybrid", NEAP_STAGE_COMPKV,
           "Mk0.7 Mk0.6 Mk0.5 Sk0.4 Mk0.3 Mk0.2 Mk0.1 Sk0.0 Ck0.7 Ck0.6 Ck0.5 Ck0.3 Ck0.2 Ck0.1");
    /* The next call goes on with the split: three are in memory, none on storage. */
    m = make_model(1, 8);
    m.n = 5;
    m.input.decode_rate = 300;
    m.input.target_bytes = 1;
    for (uint32_t c = 2; c < 5; c++) {
        m.units[c].in_memory = true;
        m.units[c].release_bytes = 50;
    }
    expect(&m, "hybrid", NEAP_STAGE_KVONLY, "Sk0.1");
    m.input.n_kv_on_storage = 1;
    expect(&m, "hybrid", NEAP_STAGE_KVONLY, "Mk0.1");
}

/* Coded to a quarter on storage, reading is three times as slow as decoding only for what is left:
 * t_dkv : t_rkv = 1 : 0.75. */
static void test_coded_on_storage(void) {
    model m = make_model(1, 7);
    m.n--;
    m.input.decode_rate = 300;
    for (size_t i = 0; i < m.n; i++)
        m.units[i].stored_bytes = 25;
    m.input.target_bytes = 3 * 50 + 4 * 100;
    expect(&m, "hybrid", NEAP_STAGE_KVONLY, "Sk0.6 Mk0.5 Sk0.4 Mk0.3 Sk0.2 Mk0.1 Sk0.0");
}

static void test_weights_only(void) {
    model m = make_model(3, 0);
    m.input.target_bytes = 401;
    expect(&m, "hybrid", NEAP_STAGE_WONLY, "Dw2 Dw1");
    m.units[1].is_clean = false; /* no file holds it */
    expect(&m, "hybrid", NEAP_STAGE_WONLY, "Dw2 Sw1");
    m.units[2].release_bytes = 0; /* nothing to gain: left alone */
    expect(&m, "hybrid", NEAP_STAGE_WONLY, "Sw1 Dw0");
}

static void test_clean_and_incompressible(void) {
    model m = make_model(1, 4);
    unit_of(&m, true, 0, 3)->is_clean = true;
    unit_of(&m, true, 0, 2)->encoded_bytes = 100;
    m.input.target_bytes = 300;
    expect(&m, "hybrid", NEAP_STAGE_KVANDW, "Dk0.3 Sk0.2 Mk0.1 Mk0.0");
    m.input.memory_useful = false;
    m.input.target_bytes = UINT64_MAX;
    expect(&m, "hybrid", NEAP_STAGE_KVANDW, "Dk0.3 Sk0.2 Sk0.1 Sk0.0 Dw0");
}

/* Chunks that earlier calls left in memory are merged with this call's, rearmost first. */
static void test_compkv_merges(void) {
    model m = make_model(2, 2);
    m.n = 5; /* k0.0 k0.1 w0 k1.0 k1.1 */
    unit_of(&m, true, 1, 0)->in_memory = true;
    unit_of(&m, true, 1, 0)->release_bytes = 50;
    unit_of(&m, true, 0, 0)->in_memory = true;
    unit_of(&m, true, 0, 0)->release_bytes = 50;
    expect(&m, "hybrid", NEAP_STAGE_COMPKV, "Mk1.1 Mk0.1 Dw0 Ck1.1 Ck1.0 Ck0.1 Ck0.0");
}

static void test_nothing(void) {
    model m = make_model(1, 1);
    m.input.target_bytes = 0;
    for (size_t i = 0; neap_policy_at(i); i++)
        expect(&m, neap_policy_at(i)->name, NEAP_STAGE_NONE, "");
    m.input.target_bytes = UINT64_MAX;
    m.n = 0;
    for (size_t i = 0; neap_policy_at(i); i++)
        expect(&m, neap_policy_at(i)->name, NEAP_STAGE_NONE, "");
}

/* The default rates: 8 / 1.5 GB/s, so five chunks in six or so go to memory. */
static void test_default_rates(void) {
    model m = make_model(1, 6);
    m.n--;
    m.input.read_rate = m.input.decode_rate = 0;
    m.input.target_bytes = 5 * 50 + 1;
    expect(&m, "hybrid", NEAP_STAGE_KVONLY, "Mk0.5 Mk0.4 Mk0.3 Mk0.2 Mk0.1 Sk0.0");
}

static void test_baselines(void) {
    model m = make_model(3, 2);
    unit_of(&m, true, 1, 1)->is_clean = true;
    m.input.target_bytes = 601; /* one byte more than a layer: two layers */
    expect(&m, "partial-offload", NEAP_STAGE_KVANDW, "Dw2 Sk2.1 Sk2.0 Dw1 Dk1.1 Sk1.0");
    m.input.target_bytes = 600;
    expect(&m, "partial-offload", NEAP_STAGE_KVANDW, "Dw2 Sk2.1 Sk2.0");
    m = make_model(3, 2);
    m.input.target_bytes = 4 * 50 + 1;
    expect(&m, "hybrid", NEAP_STAGE_KVANDW, "Mk2.1 Mk2.0 Mk1.1 Mk1.0 Dw2");
    expect(&m, "memory-only", NEAP_STAGE_KVANDW, "Mk2.1 Mk2.0 Mk1.1 Mk1.0 Dw2");
    expect(&m, "forward-out", NEAP_STAGE_KVANDW, "Mk0.0 Mk0.1 Mk1.0 Mk1.1 Dw0");
    expect(&m, "storage-only", NEAP_STAGE_KVANDW, "Sk2.1 Sk2.0 Sk1.1");
}

/* Least recently used first: a chunk of another conversation before those of the last graph, and of
 * one graph what it needed first. Weights that no graph has needed yet go before all others. */
static void test_lru(void) {
    model m = make_model(3, 2);
    for (size_t i = 0; i < m.n; i++)
        m.units[i].last_use = 7;
    unit_of(&m, true, 1, 1)->last_use = 3;
    unit_of(&m, true, 2, 0)->last_use = 6;
    unit_of(&m, false, 1, 0)->last_use = 0;
    CHECK(neap_policy_find("lru")->by_use && neap_policy_find("lru")->overlap);
    m.input.target_bytes = 4 * 50 + 400 + 2 * 50 + 1;
    expect(&m, "lru", NEAP_STAGE_WONLY, "Mk1.1 Mk2.0 Mk0.0 Mk0.1 Dw1 Mk1.0 Mk2.1 Dw0");
    m.input.target_bytes = UINT64_MAX;
    expect(&m, "lru", NEAP_STAGE_COMPKV,
           "Mk1.1 Mk2.0 Mk0.0 Mk0.1 Dw1 Mk1.0 Mk2.1 Dw0 Dw2 Ck1.1 Ck2.0 Ck0.0 Ck0.1 Ck1.0 Ck2.1");
}

int main(void) {
    test_registry();
    test_lru();
    test_many_chunks();
    test_ragged_weights();
    test_few_chunks();
    test_inverse_proportion();
    test_coded_on_storage();
    test_weights_only();
    test_clean_and_incompressible();
    test_compkv_merges();
    test_nothing();
    test_default_rates();
    test_baselines();
    return 0;
}
