/* test_profile.c - rates out of a profile, their correction by restores, and what a drifted rate
 * does to the placement. Numbers are worked out by hand. */
#include <math.h>
#include <errno.h>
#include <string.h>

#include "check.h"
#include "policy.h"
#include "profile.h"

#define MB 1000000u
#define GB 1000000000u
#define WINDOW NEAP_RATE_WINDOW_BYTES

static const neap_path_threads threads = {.storage = 2, .memory = 1};

static bool near(uint64_t got, double expected) {
    const bool is_near = fabs((double)got - expected) <= 1e-6 * expected + 1;
    if (!is_near) fprintf(stderr, "got %llu, expected %.0f\n", (unsigned long long)got, expected);
    return is_near;
}

/* Reads of 1 MiB saturate from two in flight on; smaller ones never do. */
static neap_profile make_profile(void) {
    static const uint64_t reads[NEAP_PROFILE_SIZES][NEAP_PROFILE_DEPTHS] = {
        {200 * MB, 300 * MB, 400 * MB, 500 * MB},
        {500 * MB, 800 * MB, 900 * MB, 1000 * MB},
        {900 * MB, 1900 * MB, 2000 * MB, 2000 * MB},
        {1000 * MB, 1900 * MB, 2000 * MB, 2000 * MB}};
    neap_profile profile = {.populate_small_bps = 2 * (uint64_t)GB,
                            .populate_huge_bps = 8 * (uint64_t)GB};
    memcpy(profile.read_bps, reads, sizeof reads);
    neap_profile_codec *q8 = neap_profile_codec_add(&profile, "q8");
    q8->decode_bps[0] = 6 * (uint64_t)GB;
    q8->decode_bps[1] = 10 * (uint64_t)GB;
    return profile;
}

static neap_rates rates_of(const neap_profile *profile, const char *codec) {
    neap_rates rates;
    neap_rates_init(&rates, profile, codec, threads);
    return rates;
}

static void test_defaults(void) {
    const neap_profile nothing = {0};
    const neap_profile *const profiles[] = {NULL, &nothing};
    for (size_t i = 0; i < 2; i++) {
        const neap_rates rates = rates_of(profiles[i], "q8");
        CHECK(rates.read.bps == NEAP_DEFAULT_READ_BPS && rates.read.is_guess);
        CHECK(rates.decode.bps == NEAP_DEFAULT_DECODE_BPS && rates.decode.is_guess);
        CHECK(neap_rates_source(&rates) == NEAP_RATES_DEFAULT);
    }
}

/* Two storage threads hide committing pages (2 / (1/2 + 1/8) = 3.2 > 2 GB/s); the one that decodes
 * cannot: 1 / (1/6 + 1/2) = 1.5. */
static void test_rates_of_profile(void) {
    neap_profile profile = make_profile();
    neap_rates rates = rates_of(&profile, "q8");
    CHECK(near(rates.read.bps, 2e9) && near(rates.decode.bps, 1.5e9));
    CHECK(neap_rates_source(&rates) == NEAP_RATES_MEASURED);
    /* Pages so slow that both threads wait for them: 2 / (1/2 + 1/0.5) = 0.8. */
    profile.populate_huge_bps = 500 * MB;
    CHECK(near(rates_of(&profile, "q8").read.bps, 0.8e9));
    /* Two threads that decode: 1 / (1/10 + 1/4). */
    neap_rates_init(&rates, &profile, "q8", (neap_path_threads){2, 2});
    CHECK(near(rates.decode.bps, 1e9 / 0.35));
    /* More than were measured: as the most measured. */
    neap_rates_init(&rates, &profile, "q8", (neap_path_threads){2, 3});
    CHECK(near(rates.decode.bps, 1e9 / (0.1 + 1.0 / 6)));
    /* An unknown codec has no decoding rate; first touch not measured is left out. */
    CHECK(rates_of(&profile, "other").decode.is_guess);
    profile.populate_small_bps = profile.populate_huge_bps = 0;
    rates = rates_of(&profile, "q8");
    CHECK(near(rates.read.bps, 2e9) && near(rates.decode.bps, 6e9));
    /* Real restores go before all of it. */
    profile.restored_read_bps = 700 * MB;
    profile.codecs[0].restored_bps = 900 * MB;
    rates = rates_of(&profile, "q8");
    CHECK(rates.read.bps == 700 * MB && rates.decode.bps == 900 * MB);
}

static void test_storage(void) {
    const neap_profile profile = make_profile();
    CHECK(neap_profile_best_read(&profile) == 2000 * MB);
    CHECK(neap_profile_read_at(&profile, 256 << 10, 2) == 800 * MB);
    CHECK(neap_profile_read_at(&profile, 256 << 10, 3) == 800 * MB);  /* next depth below */
    CHECK(neap_profile_read_at(&profile, 512 << 10, 2) == 1350 * MB); /* halfway in powers of two */
    CHECK(neap_profile_read_at(&profile, 32 << 10, 1) == 100 * MB);
    CHECK(neap_profile_read_at(&profile, 64 << 20, 100) == 2000 * MB);
    CHECK(neap_profile_saturates(&profile, 1 << 20, 2) && !neap_profile_saturates(&profile, 1, 2));
    CHECK(!neap_profile_saturates(&profile, 512 << 10, 2));
    CHECK(neap_profile_saturating(&profile, 2) == 1 << 20);
    CHECK(neap_profile_saturating(&profile, 1) == 0);
    const neap_profile nothing = {0};
    CHECK(neap_profile_read_at(&nothing, 1 << 20, 2) == 0);
    CHECK(!neap_profile_saturates(&nothing, 1 << 20, 2) && !neap_profile_saturating(&nothing, 2));
}

static void test_lists(void) {
    neap_profile profile = {0};
    CHECK(!neap_profile_codec_add(&profile, ""));
    CHECK(!neap_profile_codec_add(&profile, "a name that is longer than any codec's name"));
    for (int i = 0; i < NEAP_PROFILE_CODECS; i++) {
        const char name[] = {(char)('a' + i), 0};
        CHECK(!neap_profile_codec_find(&profile, name));
        CHECK(neap_profile_codec_add(&profile, name) == neap_profile_codec_find(&profile, name));
    }
    CHECK(!neap_profile_codec_add(&profile, "z") && neap_profile_codec_add(&profile, "c"));
    for (uint32_t i = 0; i < NEAP_PROFILE_MODELS + 2; i++)
        neap_profile_model_put(&profile, &(neap_profile_model){.digest = i, .n_layers = i});
    CHECK(profile.n_models == NEAP_PROFILE_MODELS && profile.models[0].digest == 2);
    neap_profile_model_put(&profile, &(neap_profile_model){.digest = 5, .n_layers = 77});
    CHECK(profile.n_models == NEAP_PROFILE_MODELS && profile.models[3].n_layers == 77);
    char kind[200];
    for (uint64_t i = 0; i < NEAP_PROFILE_ATTENTIONS + 2; i++) {
        snprintf(kind, sizeof kind, "kind %d", (int)i);
        CHECK(neap_profile_attention_put(&profile, kind, (neap_attention_times){i, i}) == 0);
    }
    CHECK(profile.n_attentions == NEAP_PROFILE_ATTENTIONS);
    CHECK(!neap_profile_attention_find(&profile, "kind 1"));
    CHECK(neap_profile_attention_find(&profile, "kind 2")->times.our_ns == 2);
    CHECK(neap_profile_attention_put(&profile, "kind 9", (neap_attention_times){1, 77}) == 0);
    CHECK(profile.n_attentions == NEAP_PROFILE_ATTENTIONS);
    CHECK(neap_profile_attention_find(&profile, "kind 9")->times.our_ns == 77);
    memset(kind, 'x', sizeof kind);
    kind[sizeof profile.attentions[0].kind] = '\0';
    CHECK(neap_profile_attention_put(&profile, kind, (neap_attention_times){1, 1}) == -EINVAL);
}

static void test_observe(void) {
    neap_rate rate = {.bps = GB, .reference_bps = GB};
    neap_rates rates = {.read = rate, .decode = rate};
    /* Nothing changes within a window, nor by what took no time or moved nothing. */
    CHECK(!neap_rate_observe(&rate, WINDOW - 1, GB) && rate.bps == GB);
    CHECK(!neap_rate_observe(&rate, 0, GB) && !neap_rate_observe(&rate, WINDOW, 0));
    CHECK(rate.window_bytes == WINDOW - 1 && rate.window_ns == GB);
    /* A window that agrees moves the time for a byte a quarter of the way: 0.75 + 0.25 / 1.2. */
    rate = rates.read;
    CHECK(neap_rate_observe(&rate, WINDOW, (uint64_t)((double)WINDOW / 1.2)));
    CHECK(near(rate.bps, 1e9 / (0.75 + 0.25 / 1.2)));
    rates.read = rate;
    CHECK(neap_rates_source(&rates) == NEAP_RATES_MEASURED);
    /* One that is off replaces it. */
    CHECK(neap_rate_observe(&rate, WINDOW, WINDOW * 3) && near(rate.bps, 1e9 / 3));
    CHECK(rate.window_bytes == 0 && rate.window_ns == 0);
    rates.read = rate;
    CHECK(neap_rates_source(&rates) == NEAP_RATES_DRIFTED);
    /* Back again: no longer drifted. */
    CHECK(neap_rate_observe(&rate, WINDOW, WINDOW) && near(rate.bps, 1e9));
    rates.read = rate;
    CHECK(neap_rates_source(&rates) == NEAP_RATES_MEASURED);
    /* Small steps that add up to more than a quarter are a drift too. */
    for (int i = 0; i < 40; i++)
        neap_rate_observe(&rates.decode, WINDOW, (uint64_t)((double)WINDOW * (1 + 0.02 * i)));
    CHECK(rates.decode.bps < 700 * MB && neap_rates_source(&rates) == NEAP_RATES_DRIFTED);
    /* A guess gives way at once, and then nothing has drifted: there was no profile. */
    rates = rates_of(NULL, "q8");
    CHECK(neap_rate_observe(&rates.read, WINDOW, WINDOW * 100) && near(rates.read.bps, 1e7));
    CHECK(neap_rates_source(&rates) == NEAP_RATES_MEASURED);
    CHECK(neap_rate_observe(&rates.read, WINDOW, WINDOW) && near(rates.read.bps, 1e9));
    CHECK(neap_rates_source(&rates) == NEAP_RATES_MEASURED);
    /* Absurd numbers stay in range. */
    rate = (neap_rate){.bps = 1};
    neap_rate_observe(&rate, UINT64_MAX, 1);
    CHECK(rate.bps <= NEAP_BPS_MAX);
    neap_rate_observe(&rate, WINDOW, UINT64_MAX);
    CHECK(rate.bps >= 1);
}

/* ---- placement ---- */

enum { N_CHUNKS = 40, N_LAYERS = 2 };

/* Of all chunks of 1 MB evicted with two weight units of 2 MB: those that went to memory. */
static size_t to_memory(const neap_rates *rates, neap_stage *ret_stage) {
    neap_policy_unit units[N_CHUNKS + N_LAYERS];
    neap_step steps[2 * (N_CHUNKS + N_LAYERS)];
    for (uint32_t i = 0; i < N_CHUNKS + N_LAYERS; i++)
        units[i] = (neap_policy_unit){.id = i,
                                      .is_kv = i < N_CHUNKS,
                                      .is_clean = i >= N_CHUNKS,
                                      .layer = (int)i % N_LAYERS,
                                      .chunk = i,
                                      .release_bytes = i < N_CHUNKS ? MB : 2 * MB,
                                      .raw_bytes = i < N_CHUNKS ? MB : 2 * MB,
                                      .encoded_bytes = i < N_CHUNKS ? MB / 2 : 0};
    const neap_policy_input input = {
        .units = units,
        .n = N_CHUNKS + N_LAYERS,
        .target_bytes = 10 * MB,
        .read_rate = rates->read.bps,
        .decode_rate = rates->decode.bps,
        .memory_useful = true,
    };
    const size_t n = neap_policy_find("hybrid")->plan(&input, steps, ret_stage);
    size_t n_memory = 0;
    for (size_t i = 0; i < n; i++)
        n_memory += steps[i].action == NEAP_ACTION_TO_MEMORY;
    return n_memory;
}

static void test_drift_moves_placement(void) {
    neap_profile profile = make_profile(); /* reads 2.0, decodes 1.5 GB/s */
    neap_rates rates = rates_of(&profile, "q8");
    neap_stage stage;
    const size_t before = to_memory(&rates, &stage);
    CHECK(stage == NEAP_STAGE_KVONLY);
    /* Storage throttled to a tenth: it gets fewer chunks. */
    CHECK(neap_rate_observe(&rates.read, WINDOW, WINDOW * 5));
    CHECK(near(rates.read.bps, 0.2e9) && neap_rates_source(&rates) == NEAP_RATES_DRIFTED);
    const size_t throttled = to_memory(&rates, &stage);
    CHECK(throttled > before);
    /* Decoding slow instead: more than at first go to storage. */
    CHECK(neap_rate_observe(&rates.read, WINDOW, WINDOW / 2));
    CHECK(neap_rate_observe(&rates.decode, WINDOW, WINDOW * 5));
    CHECK(to_memory(&rates, &stage) < before);
    /* A fast disk and slow decoding change the threshold: no chunks are set aside for weights;
     * reads at a crawl set all of them aside, which is another stage. */
    CHECK(neap_rate_observe(&rates.decode, WINDOW, WINDOW / 2));
    CHECK(neap_rate_observe(&rates.read, WINDOW, WINDOW * 100));
    to_memory(&rates, &stage);
    CHECK(stage == NEAP_STAGE_KVANDW);
}

int main(void) {
    test_defaults();
    test_rates_of_profile();
    test_storage();
    test_lists();
    test_observe();
    test_drift_moves_placement();
    return 0;
}
