/* test_profile_random.c - what holds of rates whatever was measured: they lie between what was
 * seen, do not depend on how a window came in pieces, and follow a device that changed. */
#include "check.h"
#include "profile.h"
#include "temp.h"

static uint64_t state;

static uint64_t between(uint64_t low, uint64_t high) {
    return low + next_random(&state) % (high - low + 1);
}

/* Of any order of size. */
static uint64_t any_bps(void) {
    return between(1, 10) * (uint64_t)1 << between(10, 36);
}

static neap_profile random_profile(void) {
    neap_profile profile = {0};
    for (size_t s = 0; s < NEAP_PROFILE_SIZES; s++)
        for (size_t d = 0; d < NEAP_PROFILE_DEPTHS; d++)
            profile.read_bps[s][d] = between(0, 9) ? any_bps() : 0;
    if (between(0, 3)) profile.populate_small_bps = any_bps();
    if (between(0, 3)) profile.populate_huge_bps = any_bps();
    if (between(0, 3) == 0) profile.restored_read_bps = any_bps();
    neap_profile_codec *codec = between(0, 3) ? neap_profile_codec_add(&profile, "q8") : NULL;
    for (size_t i = 0; codec && i < NEAP_PROFILE_THREADS; i++)
        codec->decode_bps[i] = between(0, 3) ? any_bps() : 0;
    return profile;
}

static uint64_t lower(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static void check_profile(void) {
    const neap_profile profile = random_profile();
    neap_rates rates;
    const neap_path_threads threads = {(uint32_t)between(0, 20), (uint32_t)between(0, 20)};
    neap_rates_init(&rates, &profile, "q8", threads);
    CHECK(rates.read.bps > 0 && rates.decode.bps > 0);
    const uint64_t best = neap_profile_best_read(&profile);
    if (profile.restored_read_bps)
        CHECK(rates.read.bps == profile.restored_read_bps);
    else if (!rates.read.is_guess)
        CHECK(rates.read.bps <= best);
    const neap_profile_codec *codec = neap_profile_codec_find(&profile, "q8");
    uint64_t fastest = 0;
    for (size_t i = 0; codec && i < NEAP_PROFILE_THREADS; i++)
        if (codec->decode_bps[i] > fastest) fastest = codec->decode_bps[i];
    if (!rates.decode.is_guess) CHECK(rates.decode.bps <= fastest);

    const uint64_t request = between(1, 8u << 20);
    const uint32_t depth = (uint32_t)between(1, 20);
    const uint64_t bps = neap_profile_read_at(&profile, request, depth);
    CHECK(bps <= best);
    size_t d = 0, s = 0;
    while (d + 1 < NEAP_PROFILE_DEPTHS && neap_profile_depths[d + 1] <= depth)
        d++;
    while (s + 1 < NEAP_PROFILE_SIZES && neap_profile_sizes[s + 1] <= request)
        s++;
    CHECK(neap_profile_read_at(&profile, neap_profile_sizes[s], depth) == profile.read_bps[s][d] ||
          (s + 1 < NEAP_PROFILE_SIZES && profile.read_bps[s + 1][d] == 0));
    if (s + 1 < NEAP_PROFILE_SIZES && bps && request >= neap_profile_sizes[0])
        CHECK(bps + 1 >= lower(profile.read_bps[s][d], profile.read_bps[s + 1][d]));
    const uint64_t from = neap_profile_saturating(&profile, depth);
    if (from) CHECK(neap_profile_saturates(&profile, from, depth) && from <= neap_profile_sizes[3]);
}

/* Windows of any rates: the rate stays between the slowest and the fastest of them and the start,
 * and one that is off is taken over. */
static void check_windows(void) {
    neap_rate rate = {.bps = any_bps(), .is_guess = between(0, 1)};
    rate.reference_bps = rate.is_guess ? 0 : rate.bps;
    uint64_t low = rate.is_guess ? UINT64_MAX : rate.bps, high = rate.is_guess ? 0 : rate.bps;
    for (int i = 0; i < 30; i++) {
        const uint64_t ns = between(1, (uint64_t)1 << between(20, 36)), before = rate.bps;
        const bool was_guess = rate.is_guess;
        const double seen = (double)NEAP_RATE_WINDOW_BYTES / ((double)ns / 1e9);
        const uint64_t seen_bps = seen > (double)NEAP_BPS_MAX ? NEAP_BPS_MAX : (uint64_t)seen;
        if (seen_bps < low) low = seen_bps;
        if (seen_bps > high) high = seen_bps;
        neap_rate_observe(&rate, NEAP_RATE_WINDOW_BYTES, ns);
        CHECK(!rate.is_guess && rate.bps + rate.bps / 1000000 + 2 >= low &&
              rate.bps <= high + high / 1000000 + 2);
        const bool taken_over = rate.bps == seen_bps;
        CHECK(taken_over || (!was_guess && !neap_rate_is_off(seen_bps, before)));
    }
    /* A device that stays what it is becomes the rate within a few windows. */
    const uint64_t ns = between(1000000, 1000000000);
    for (int i = 0; i < 40; i++)
        neap_rate_observe(&rate, NEAP_RATE_WINDOW_BYTES, ns);
    const double settled = (double)NEAP_RATE_WINDOW_BYTES * 1e9 / (double)ns;
    CHECK((double)rate.bps > 0.999 * settled && (double)rate.bps < 1.001 * settled);
}

/* The pieces in which a window came do not matter. */
static void check_pieces(void) {
    neap_rate whole = {.bps = any_bps()}, pieces = whole;
    const uint64_t ns = between(1000000, 10000000000u);
    neap_rate_observe(&whole, NEAP_RATE_WINDOW_BYTES, ns);
    uint64_t bytes_left = NEAP_RATE_WINDOW_BYTES, ns_left = ns;
    while (bytes_left > 1 && ns_left > 1 && between(0, 9)) {
        const uint64_t bytes = between(1, bytes_left - 1), part_ns = between(1, ns_left - 1);
        CHECK(!neap_rate_observe(&pieces, bytes, part_ns));
        bytes_left -= bytes;
        ns_left -= part_ns;
    }
    neap_rate_observe(&pieces, bytes_left, ns_left);
    CHECK(whole.bps == pieces.bps && pieces.window_bytes == 0);
}

int main(int argc, char **argv) {
    const uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : 20260301;
    printf("seed %llu\n", (unsigned long long)seed);
    state = seed * 2 + 1;
    for (int i = 0; i < 20000; i++) {
        check_profile();
        check_windows();
        check_pieces();
    }
    return 0;
}
