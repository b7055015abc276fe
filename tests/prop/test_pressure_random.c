/* test_pressure_random.c - the decision under random loads: a square wave of 10 s changes its mind
 * at most once a phase, nor does memory go out and come back in one; under a steady load nothing is
 * evicted after a restoration; memory that fills up is answered before it is full; noise is not
 * answered; worse signals never get a smaller answer; nothing is asked that is not there.
 * test_pressure_random [SEED] */
#include "decide.h"

#include <inttypes.h>
#include <string.h>

#include "check.h"
#include "temp.h"

#define MIB ((uint64_t)1 << 20)
#define GIB ((uint64_t)1 << 30)
#define MS 1000000ull
#define S (1000 * MS)

static uint64_t below(uint64_t *rng, uint64_t n) {
    return next_random(rng) % n;
}

static uint64_t random_size(uint64_t *rng) {
    return (64 * MIB) << below(rng, 13); /* to 256 GiB */
}

/* ---- bounds and order ---- */

static neap_pressure_domain random_domain(uint64_t *rng) {
    const uint64_t size = below(rng, 5) == 0 ? 0 : random_size(rng);
    const uint64_t near = size / (1 + below(rng, 8)) + 1;
    return (neap_pressure_domain){
        .size_bytes = size,
        .available_bytes = below(rng, below(rng, 2) ? near : near / 8 + 1),
        .some_permille = (uint32_t)below(rng, 200),
        .full_permille = below(rng, 2) ? (uint32_t)below(rng, 400) : 0,
        .event = (neap_pressure_event)below(rng, 3),
    };
}

static void worsen(uint64_t *rng, neap_pressure_domain *domain) {
    switch (below(rng, 4)) {
    case 0:
        domain->available_bytes -= below(rng, domain->available_bytes + 1);
        break;
    case 1:
        domain->some_permille += (uint32_t)below(rng, 300);
        break;
    case 2:
        domain->full_permille += (uint32_t)below(rng, 300);
        break;
    default:
        if (domain->event < NEAP_PRESSURE_EVENT_CRITICAL) domain->event++;
    }
}

static void worse_never_asks_less(uint64_t *rng) {
    neap_pressure_state state = {0};
    uint64_t now_ns = S;
    for (int step = 0; step < 400; step++) {
        now_ns += below(rng, 2) ? below(rng, 300 * MS) : below(rng, 20 * S);
        neap_pressure_signals signals = {.now_ns = now_ns,
                                         .machine = random_domain(rng),
                                         .group = random_domain(rng),
                                         .told = below(rng, 8) == 0,
                                         .woken = below(rng, 2),
                                         .blind = below(rng, 4) == 0,
                                         .busy = below(rng, 3) == 0,
                                         .resident_bytes = below(rng, 4 * GIB),
                                         .owed_bytes = below(rng, 2) ? below(rng, GIB) : 0};
        neap_pressure_signals worse = signals;
        worsen(rng, below(rng, 2) ? &worse.machine : &worse.group);
        if (below(rng, 4) == 0) worse.told = true;
        neap_pressure_state copy = state;
        const neap_pressure_decision bad = neap_pressure_decide(&copy, &worse);
        const neap_pressure_decision d = neap_pressure_decide(&state, &signals);
        CHECK(d.release_bytes <= signals.resident_bytes);
        CHECK(bad.release_bytes >= d.release_bytes && bad.severity >= d.severity);
        CHECK(bad.restore_bytes <= d.restore_bytes && d.restore_bytes <= signals.owed_bytes);
        CHECK(d.look_ns > now_ns && (d.restore_bytes == 0 || !state.pressed));
        CHECK(signals.owed_bytes == 0 || d.look_ns <= now_ns + 30 * S);
        CHECK(d.release_bytes == 0 || state.pressed);
        if (d.release_bytes > 0)
            neap_pressure_released(&state, below(rng, 2) ? d.release_bytes : 0);
        if (d.restore_bytes > 0)
            neap_pressure_restored(&state, now_ns, below(rng, 2) ? d.restore_bytes : 0);
    }
}

/* ---- a square wave ---- */

/* PSI avg10 as the kernel computes it: every 2 s, decaying by exp(-2/10). */
typedef struct average {
    double value;
    uint64_t updated_ns;
} average;

static uint32_t average_at(average *avg, uint64_t now_ns, double level) {
    while (avg->updated_ns + 2 * S <= now_ns) {
        avg->value += (level - avg->value) * (1 - 0.81873);
        avg->updated_ns += 2 * S;
    }
    return (uint32_t)(avg->value * 1000);
}

static void square_wave(uint64_t *rng) {
    const uint64_t size = random_size(rng), low = neap_pressure_marks_of(size).low_bytes;
    const uint64_t high_level = low * (1 + below(rng, 12)), low_level = below(rng, low * 3);
    const uint64_t noise = low / 16 + 1;
    const double stall = (double)below(rng, 900) / 1000;
    const bool in_group = below(rng, 2);
    neap_pressure_state state = {0};
    average avg = {0};
    bool before = false;
    int changes = 0;
    uint64_t phase = 0;
    for (uint64_t now_ns = 0; now_ns < 300 * S; now_ns += 50 * MS + below(rng, 500 * MS)) {
        if (now_ns / (10 * S) != phase) {
            phase = now_ns / (10 * S);
            changes = 0;
        }
        const bool loaded = phase % 2 == 1;
        neap_pressure_signals signals = {.now_ns = now_ns, .resident_bytes = GIB, .woken = true};
        neap_pressure_domain *domain = in_group ? &signals.group : &signals.machine;
        domain->size_bytes = size;
        domain->available_bytes = (loaded ? low_level : high_level) + below(rng, noise);
        domain->some_permille = average_at(&avg, now_ns, loaded ? stall : 0);
        domain->full_permille = domain->some_permille / 2;
        const neap_pressure_decision d = neap_pressure_decide(&state, &signals);
        if (d.release_bytes > 0) neap_pressure_released(&state, d.release_bytes);
        changes += state.pressed != before;
        before = state.pressed;
        CHECK(changes <= 1);
    }
}

/* ---- an instance whose memory goes out and comes back ---- */

/* What is available is what others leave, less what the instance holds. */
typedef struct instance {
    neap_pressure_state state;
    uint64_t held, owed;
    int last; /* 1: restored, -1: evicted, 0: neither yet */
    uint64_t n_turns;
} instance;

/* One look; true: it evicted. */
static bool live(instance *one, neap_pressure_signals *signals, neap_pressure_domain *domain,
                 uint64_t free_bytes) {
    domain->available_bytes = free_bytes > one->held ? free_bytes - one->held : 0;
    signals->resident_bytes = one->held;
    signals->owed_bytes = one->owed;
    const neap_pressure_decision d = neap_pressure_decide(&one->state, signals);
    const uint64_t back = d.restore_bytes < 64 * MIB ? d.restore_bytes : 64 * MIB;
    CHECK(d.release_bytes == 0 || d.restore_bytes == 0);
    if (d.release_bytes > 0) {
        neap_pressure_released(&one->state, d.release_bytes);
        one->n_turns += one->last > 0;
        one->last = -1;
    } else if (back > 0) {
        neap_pressure_restored(&one->state, signals->now_ns, back);
        one->n_turns += one->last < 0;
        one->last = 1;
    }
    one->held += back - d.release_bytes;
    one->owed += d.release_bytes - back;
    return d.release_bytes > 0;
}

/* Others take much and little in turns, 10 s each: out or in, once a phase, and not for long. */
static void square_wave_of_an_instance(uint64_t *rng) {
    const uint64_t size = 256 * MIB << below(rng, 8);
    const uint64_t calm = size / 2 + below(rng, size / 2), loaded = below(rng, size / 2);
    const uint64_t noise = neap_pressure_marks_of(size).low_bytes / 16 + 1;
    instance one = {.held = below(rng, size / 2)};
    uint64_t phase = 0, turns_before = 0;
    for (uint64_t now_ns = 0; now_ns < 600 * S; now_ns += 50 * MS + below(rng, 300 * MS)) {
        if (now_ns / (10 * S) != phase) {
            phase = now_ns / (10 * S);
            turns_before = one.n_turns;
        }
        neap_pressure_signals signals = {.now_ns = now_ns, .woken = true};
        signals.machine.size_bytes = size;
        live(&one, &signals, &signals.machine, (phase % 2 ? loaded : calm) + below(rng, noise));
        CHECK(one.n_turns - turns_before <= 1);
    }
    CHECK(one.n_turns <= 20); /* of 60 phases: it has seen that the load comes back */
}

/* The load stays: with all the noise of stalls and notices, what came back stays. */
static void steady_load(uint64_t *rng) {
    const uint64_t size = 256 * MIB << below(rng, 8);
    const uint64_t free_bytes = below(rng, size), noise = neap_pressure_marks_of(size).low_bytes;
    instance one = {.held = below(rng, size / 2), .owed = below(rng, size / 2)};
    const bool in_group = below(rng, 2);
    bool was_restored = false;
    uint64_t now_ns = S;
    for (int i = 0; i < 2000; i++) {
        neap_pressure_signals signals = {.now_ns = now_ns, .woken = below(rng, 2)};
        neap_pressure_domain *domain = in_group ? &signals.group : &signals.machine;
        domain->size_bytes = size;
        const uint64_t left = free_bytes > one.held ? free_bytes - one.held : 0;
        if (left < neap_pressure_marks_of(size).near_bytes) { /* reclaim has something to do */
            domain->event = (neap_pressure_event)below(rng, 3);
            domain->some_permille = (uint32_t)below(rng, 300);
        }
        const bool evicted = live(&one, &signals, domain, free_bytes + below(rng, noise / 64));
        CHECK(!evicted || !was_restored);
        was_restored = was_restored || one.last > 0;
        now_ns += 50 * MS + below(rng, 2 * S);
    }
}

/* ---- noise ---- */

static void noise_is_not_answered(uint64_t *rng) {
    const uint64_t size = random_size(rng), low = neap_pressure_marks_of(size).low_bytes;
    const uint64_t base = low * 2 + below(rng, size);
    neap_pressure_state state = {0};
    uint64_t now_ns = S, looks = 0;
    for (int step = 0; step < 2000; step++) {
        neap_pressure_signals signals = {.now_ns = now_ns,
                                         .machine = {.size_bytes = size,
                                                     .available_bytes = base + below(rng, low / 16),
                                                     .some_permille = (uint32_t)below(rng, 60),
                                                     .full_permille = (uint32_t)below(rng, 40)},
                                         .resident_bytes = GIB,
                                         .woken = below(rng, 50) == 0};
        const neap_pressure_decision d = neap_pressure_decide(&state, &signals);
        CHECK(d.release_bytes == 0 && !state.pressed);
        looks += d.look_ns != UINT64_MAX;
        now_ns += 100 * MS + below(rng, 400 * MS);
    }
    CHECK(base < 4 * low || looks == 0);
}

/* ---- memory that fills up ---- */

/* A program takes `rate` bytes a second; the kernel announces marks (unless blind), and a release
 * takes 15 ms and 4 GiB/s, during which the other goes on. It must end with all released, and
 * before that never at zero. */
static void filling_up(uint64_t *rng, bool blind) {
    const uint64_t size = GIB << below(rng, 6);
    const neap_pressure_marks marks = neap_pressure_marks_of(size);
    uint64_t rate = 10 * MIB + below(rng, blind ? 1000 * MIB : 600 * MIB);
    uint64_t available = marks.near_bytes + below(rng, size / 2);
    uint64_t resident = 256 * MIB + below(rng, size / 4), now_ns = S,
             look_ns = blind ? S : UINT64_MAX;
    const uint64_t tick_ns = MS, mark[] = {marks.near_bytes, marks.low_bytes, marks.critical_bytes};
    neap_pressure_state state = {0};
    while (resident > 0) {
        const uint64_t was = available, taken = rate / 1000;
        CHECK(taken < available); /* else somebody would have been killed */
        available -= taken;
        now_ns += tick_ns;
        bool woken = false;
        for (int i = 0; !blind && i < 3; i++)
            woken = woken || (was >= mark[i] && available < mark[i]);
        if (!woken && now_ns < look_ns) continue;
        const neap_pressure_signals signals = {
            .now_ns = now_ns,
            .machine = {.size_bytes = size, .available_bytes = available},
            .resident_bytes = resident,
            .woken = woken,
            .blind = blind};
        const neap_pressure_decision d = neap_pressure_decide(&state, &signals);
        look_ns = d.look_ns;
        if (d.release_bytes == 0) continue;
        CHECK(rate * 15 / 1000 < available); /* until the first byte is back */
        const uint64_t took_ns = 15 * MS + d.release_bytes * S / (4 * GIB);
        available += d.release_bytes - rate / 1000 * (took_ns / MS);
        resident -= d.release_bytes;
        now_ns += took_ns;
        neap_pressure_released(&state, d.release_bytes);
        if (look_ns < now_ns) look_ns = now_ns;
    }
}

int main(int argc, char **argv) {
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 20261130;
    printf("seed %" PRIu64 "\n", seed);
    fflush(stdout);
    uint64_t rng = seed * 2 + 1;
    for (int i = 0; i < 500; i++) {
        worse_never_asks_less(&rng);
        square_wave(&rng);
        square_wave_of_an_instance(&rng);
        steady_load(&rng);
        filling_up(&rng, false);
        filling_up(&rng, true);
    }
    for (int i = 0; i < 50; i++)
        noise_is_not_answered(&rng);
    return 0;
}
