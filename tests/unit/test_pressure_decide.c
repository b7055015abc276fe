/* test_pressure_decide.c - what each signal asks for, and when it may ask again. */
#include "decide.h"

#include <errno.h>

#include "check.h"

#define MIB ((uint64_t)1 << 20)
#define GIB ((uint64_t)1 << 30)
#define MS 1000000ull
#define NEVER UINT64_MAX

static neap_pressure_signals quiet(uint64_t now_ns) {
    return (neap_pressure_signals){.now_ns = now_ns,
                                   .machine = {.size_bytes = 16 * GIB, .available_bytes = 12 * GIB},
                                   .resident_bytes = 800 * MIB};
}

static void nothing_without_pressure(void) {
    neap_pressure_state state = {0};
    for (uint64_t s = 1; s < 100; s++) {
        neap_pressure_signals signals = quiet(s * 1000 * MS);
        signals.woken = s % 7 == 0;
        const neap_pressure_decision d = neap_pressure_decide(&state, &signals);
        CHECK(d.release_bytes == 0 && d.severity == NEAP_PRESSURE_CALM);
        CHECK(d.look_ns == NEVER); /* no call is asked for: an idle instance sleeps */
        CHECK(d.restore_bytes == 0);
    }
}

static void little_left_asks_for_what_is_missing(void) {
    neap_pressure_state state = {0};
    neap_pressure_signals signals = quiet(1000 * MS);
    signals.machine.available_bytes = 900 * MIB; /* low: 1 GiB, enough: 2 GiB */
    signals.resident_bytes = 8 * GIB;
    neap_pressure_decision d = neap_pressure_decide(&state, &signals);
    CHECK(d.release_bytes == 2 * GIB - 900 * MIB && d.severity == NEAP_PRESSURE_SHORT);
    CHECK(d.by_machine && state.pressed && d.restore_bytes == 0);
    CHECK(d.look_ns <= signals.now_ns + 100 * MS);
    neap_pressure_released(&state, d.release_bytes);

    signals.now_ns += 100 * MS; /* the gap is not over */
    CHECK(neap_pressure_decide(&state, &signals).release_bytes == 0);
    signals.machine.available_bytes = 300 * MIB; /* critical: it need not be */
    signals.now_ns += 1;
    d = neap_pressure_decide(&state, &signals);
    CHECK(d.release_bytes == 2 * GIB - 300 * MIB && d.severity == NEAP_PRESSURE_CRITICAL);

    signals.resident_bytes = 100 * MIB;
    signals.now_ns += 1000 * MS;
    CHECK(neap_pressure_decide(&state, &signals).release_bytes == 100 * MIB);
}

static void restoring_waits_until_it_holds(void) {
    neap_pressure_state state = {0};
    neap_pressure_signals signals = quiet(1000 * MS);
    signals.machine.available_bytes = 500 * MIB;
    CHECK(neap_pressure_decide(&state, &signals).release_bytes > 0);
    signals.owed_bytes = 3 * GIB;
    signals.machine.available_bytes = 1500 * MIB; /* between low and enough: not short, not over */
    signals.now_ns += 20000 * MS;
    neap_pressure_decision d = neap_pressure_decide(&state, &signals);
    CHECK(d.release_bytes == 0 && state.pressed && d.restore_bytes == 0);
    signals.machine.available_bytes = 6 * GIB; /* near: 4 GiB, low: 1 GiB */
    signals.now_ns += 1000 * MS;
    d = neap_pressure_decide(&state, &signals);
    CHECK(state.pressed && d.restore_bytes == 0 && d.look_ns <= signals.now_ns + 5000 * MS);
    signals.now_ns += 4999 * MS;
    CHECK(neap_pressure_decide(&state, &signals).restore_bytes == 0);
    signals.now_ns += 1 * MS;
    d = neap_pressure_decide(&state, &signals);
    CHECK(!state.pressed && d.restore_bytes == GIB); /* what leaves 5 GiB */
    CHECK(d.look_ns <= signals.now_ns + 100 * MS);   /* the rest may fit, too */

    signals.busy = true; /* the graph brings back what it needs */
    d = neap_pressure_decide(&state, &signals);
    CHECK(d.restore_bytes == 0 && d.look_ns <= signals.now_ns + 30000 * MS);
    signals.busy = false;
    signals.machine.available_bytes = 5 * GIB; /* no room: a look now and then */
    d = neap_pressure_decide(&state, &signals);
    CHECK(d.restore_bytes == 0);
    CHECK(d.look_ns >= signals.now_ns + 5000 * MS && d.look_ns <= signals.now_ns + 30000 * MS);
    signals.machine.available_bytes = 12 * GIB;
    signals.owed_bytes = 500 * MIB;
    d = neap_pressure_decide(&state, &signals);
    CHECK(d.restore_bytes == 0 && d.look_ns == signals.now_ns + 5000 * MS); /* room must last */
    signals.now_ns = d.look_ns;
    CHECK(neap_pressure_decide(&state, &signals).restore_bytes == 500 * MIB);
    signals.owed_bytes = 0; /* a use was faster: nothing to wake up for */
    d = neap_pressure_decide(&state, &signals);
    CHECK(d.restore_bytes == 0 && d.look_ns == NEVER);

    /* Somebody else saw a shortage, and evicted: it counts from now. */
    signals.owed_bytes = 100 * MIB;
    signals.now_ns += 60000 * MS;
    CHECK(neap_pressure_decide(&state, &signals).restore_bytes == 0 && state.pressed);
    signals.now_ns += 100 * MS;
    neap_pressure_decide(&state, &signals);
    signals.now_ns += 5000 * MS;
    CHECK(neap_pressure_decide(&state, &signals).restore_bytes == 100 * MIB);
}

/* Seconds from the end of a shortage until something is restored; 100: not within that. */
static int seconds_to_restore(neap_pressure_state *state, neap_pressure_signals *signals) {
    signals->owed_bytes = 100 * MIB;
    signals->machine.available_bytes = 500 * MIB;
    signals->now_ns += 1000 * MS;
    neap_pressure_decide(state, signals);
    signals->machine.available_bytes = 12 * GIB;
    for (int s = 0; s < 100; s++, signals->now_ns += 1000 * MS)
        if (neap_pressure_decide(state, signals).restore_bytes > 0) return s;
    return 100;
}

static void a_load_that_comes_back_makes_restoring_rare(void) {
    neap_pressure_state state = {0};
    neap_pressure_signals signals = quiet(1000 * MS);
    CHECK(seconds_to_restore(&state, &signals) == 5);
    neap_pressure_restored(&state, signals.now_ns, 100 * MIB);
    CHECK(seconds_to_restore(&state, &signals) == 10);
    CHECK(seconds_to_restore(&state, &signals) == 10); /* was not restored in between */
    neap_pressure_restored(&state, signals.now_ns, 100 * MIB);
    CHECK(seconds_to_restore(&state, &signals) == 20);
    neap_pressure_restored(&state, signals.now_ns, 100 * MIB);
    signals.now_ns += 61000 * MS; /* it lasted */
    CHECK(seconds_to_restore(&state, &signals) == 5);

    /* Restoring that fails is tried again, ever later. */
    int tries = 0;
    for (uint64_t until_ns = signals.now_ns + 600000 * MS; signals.now_ns < until_ns;) {
        const neap_pressure_decision d = neap_pressure_decide(&state, &signals);
        CHECK(d.look_ns > signals.now_ns);
        if (d.restore_bytes > 0) neap_pressure_restored(&state, signals.now_ns, 0);
        tries += d.restore_bytes > 0;
        signals.now_ns = d.look_ns;
    }
    CHECK(tries >= 4 && tries <= 8);
}

/* What comes back takes memory fast: that is no program which fills it. */
static void restoring_is_no_growing_load(void) {
    neap_pressure_state state = {0};
    neap_pressure_signals signals = quiet(1000 * MS);
    signals.machine.size_bytes = GIB; /* low 64, near 256 MiB */
    signals.machine.available_bytes = 900 * MIB;
    signals.owed_bytes = 700 * MIB;
    neap_pressure_decide(&state, &signals); /* owed by a shortage that somebody else saw */
    signals.now_ns += 1000 * MS;
    neap_pressure_decide(&state, &signals);
    signals.now_ns += 6000 * MS;
    uint64_t restored = 0;
    for (int i = 0; i < 50; i++, signals.now_ns += 50 * MS) {
        const neap_pressure_decision d = neap_pressure_decide(&state, &signals);
        CHECK(d.release_bytes == 0 && d.severity == NEAP_PRESSURE_CALM);
        const uint64_t bytes = d.restore_bytes < 64 * MIB ? d.restore_bytes : 64 * MIB;
        if (bytes == 0) signals.machine.available_bytes = 250 * MIB; /* others took some, too */
        if (bytes == 0) continue;
        signals.machine.available_bytes -= bytes;
        signals.owed_bytes -= bytes;
        restored += bytes;
        neap_pressure_restored(&state, signals.now_ns, bytes);
    }
    CHECK(restored == 580 * MIB);
}

static void stalls_count_only_near_the_end(void) {
    neap_pressure_state state = {0};
    neap_pressure_signals signals = quiet(1000 * MS);
    signals.machine.some_permille = 900; /* a neighbour thrashes inside its own limit */
    signals.machine.full_permille = 800;
    signals.machine.event = NEAP_PRESSURE_EVENT_CRITICAL;
    CHECK(neap_pressure_decide(&state, &signals).release_bytes == 0 && !state.pressed);

    signals.machine.event = NEAP_PRESSURE_EVENT_NONE;
    signals.machine.full_permille = 0;
    signals.machine.some_permille = 150;
    signals.machine.available_bytes = 3 * GIB;
    signals.now_ns += 60000 * MS;
    CHECK(neap_pressure_decide(&state, &signals).release_bytes == 100 * MIB && state.pressed);
    signals.now_ns += 2000 * MS; /* avg10 still shows it */
    CHECK(neap_pressure_decide(&state, &signals).release_bytes == 0);
    signals.machine.some_permille = 40;
    signals.now_ns += 10000 * MS;
    CHECK(neap_pressure_decide(&state, &signals).release_bytes == 0 && state.pressed);
    signals.now_ns += 5000 * MS;
    CHECK(neap_pressure_decide(&state, &signals).release_bytes == 0 && !state.pressed);
}

static void a_group_is_a_machine_of_its_own(void) {
    neap_pressure_state state = {0};
    neap_pressure_signals signals = quiet(1000 * MS);
    signals.group = (neap_pressure_domain){.size_bytes = GIB, .available_bytes = 50 * MIB};
    neap_pressure_decision d = neap_pressure_decide(&state, &signals);
    CHECK(d.release_bytes == 78 * MIB && !d.by_machine);
    signals.group.available_bytes = 200 * MIB;
    signals.group.event = NEAP_PRESSURE_EVENT_CRITICAL;
    signals.now_ns += 1000 * MS;
    CHECK(neap_pressure_decide(&state, &signals).release_bytes == 400 * MIB);

    /* Without a limit its stalls are the machine's. */
    neap_pressure_state other = {0};
    signals.group = (neap_pressure_domain){.full_permille = 900};
    CHECK(neap_pressure_decide(&other, &signals).release_bytes == 0);
    signals.machine.available_bytes = 2 * GIB + 1;
    CHECK(neap_pressure_decide(&other, &signals).release_bytes == 400 * MIB);
}

static void told_gives_a_quarter(void) {
    neap_pressure_state state = {0};
    neap_pressure_signals signals = quiet(1000 * MS);
    signals.told = true;
    CHECK(neap_pressure_decide(&state, &signals).release_bytes == 200 * MIB);
    signals.now_ns += 500 * MS;
    CHECK(neap_pressure_decide(&state, &signals).release_bytes == 0);
    signals.now_ns += 500 * MS;
    CHECK(neap_pressure_decide(&state, &signals).release_bytes == 200 * MIB);
}

static void computing_gives_only_what_saves(void) {
    neap_pressure_state state = {0};
    neap_pressure_signals signals = quiet(1000 * MS);
    signals.busy = true;
    signals.machine.available_bytes = 800 * MIB;
    CHECK(neap_pressure_decide(&state, &signals).release_bytes == 0 && state.pressed);
    signals.busy = false; /* idle again: the next look finds it */
    signals.now_ns += 100 * MS;
    CHECK(neap_pressure_decide(&state, &signals).release_bytes > 0);
    signals.busy = true;
    signals.now_ns += 100 * MS;
    signals.machine.available_bytes = 100 * MIB;
    CHECK(neap_pressure_decide(&state, &signals).release_bytes > 0);
}

static void asks_in_vain_become_rare(void) {
    neap_pressure_state state = {0};
    neap_pressure_signals signals = quiet(1000 * MS);
    signals.machine.available_bytes = 100 * MIB;
    int asks = 0;
    for (; signals.now_ns < 121000 * MS; signals.now_ns += 100 * MS) {
        if (neap_pressure_decide(&state, &signals).release_bytes == 0) continue;
        asks++;
        neap_pressure_released(&state, 0);
    }
    CHECK(asks >= 5 && asks <= 16);
    CHECK(signals.now_ns - state.asked_ns <= 31000 * MS); /* but never stop */
    neap_pressure_released(&state, 1);
    neap_pressure_decide(&state, &signals);
    signals.now_ns += 100 * MS;
    CHECK(state.fruitless == 0 && neap_pressure_decide(&state, &signals).release_bytes > 0);
}

static void looks_end_when_nothing_comes_of_them(void) {
    neap_pressure_state state = {0};
    neap_pressure_signals signals = quiet(1000 * MS);
    signals.machine.available_bytes = 3 * GIB; /* near */
    signals.woken = true;
    int looks = 0;
    for (;; looks++) {
        const neap_pressure_decision d = neap_pressure_decide(&state, &signals);
        CHECK(d.release_bytes == 0);
        if (d.look_ns == NEVER) break;
        CHECK(d.look_ns > signals.now_ns && looks < 20);
        signals.now_ns = d.look_ns;
        signals.woken = false;
    }
    CHECK(looks >= 3);

    /* A shortage that nothing here can end: looks become rare. */
    signals.machine.available_bytes = 100 * MIB;
    signals.resident_bytes = 0;
    const uint64_t began_ns = signals.now_ns;
    for (looks = 0; signals.now_ns < began_ns + 600000 * MS; looks++)
        signals.now_ns = neap_pressure_decide(&state, &signals).look_ns;
    CHECK(looks < 30);

    /* Without events it looks, the more often the nearer the end. */
    neap_pressure_state blind = {0};
    signals = quiet(1000 * MS);
    signals.blind = true;
    uint64_t look_ns = neap_pressure_decide(&blind, &signals).look_ns - signals.now_ns;
    CHECK(look_ns >= 1000 * MS && look_ns <= 10000 * MS);
    signals.now_ns += look_ns;
    signals.machine.available_bytes = GIB + 100 * MIB;
    look_ns = neap_pressure_decide(&blind, &signals).look_ns - signals.now_ns;
    CHECK(look_ns <= 50 * MS);
}

static void trim_levels(void) {
    CHECK(neap_pressure_trim_permille(5) == 125 && neap_pressure_trim_permille(10) == 250);
    CHECK(neap_pressure_trim_permille(15) == 500 && neap_pressure_trim_permille(20) == 250);
    CHECK(neap_pressure_trim_permille(40) == 500 && neap_pressure_trim_permille(60) == 750);
    CHECK(neap_pressure_trim_permille(80) == 1000 && neap_pressure_trim_permille(1000) == 1000);
    CHECK(neap_pressure_trim_permille(59) == 500 && neap_pressure_trim_permille(7) == 125);
    CHECK(neap_pressure_trim_permille(4) == -EINVAL && neap_pressure_trim_permille(-1) == -EINVAL);
}

static void marks(void) {
    const neap_pressure_marks small = neap_pressure_marks_of(32 * MIB);
    CHECK(small.low_bytes == 8 * MIB && small.near_bytes == 32 * MIB);
    const neap_pressure_marks large = neap_pressure_marks_of(512 * GIB);
    CHECK(large.low_bytes == GIB && large.enough_bytes == 2 * GIB &&
          large.critical_bytes == GIB / 2);
    CHECK(neap_pressure_marks_of(0).near_bytes == 0);
}

int main(void) {
    nothing_without_pressure();
    little_left_asks_for_what_is_missing();
    restoring_waits_until_it_holds();
    a_load_that_comes_back_makes_restoring_rare();
    restoring_is_no_growing_load();
    stalls_count_only_near_the_end();
    a_group_is_a_machine_of_its_own();
    told_gives_a_quarter();
    computing_gives_only_what_saves();
    asks_in_vain_become_rare();
    looks_end_when_nothing_comes_of_them();
    trim_levels();
    marks();
    return 0;
}
