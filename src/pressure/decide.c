/* decide.c - see decide.h.
 *
 *            available < low (now, or in 0.5 s at the rate of the last two looks),
 *            stalls or events of a domain that is near its end, or told to
 *   CALM ------------------------------------------------------------------------> PRESSED
 *        <------------------------------------------------------------------------
 *            available >= enough and no stalls, for HOLD_NS
 *   CALM, and for HOLD_NS room to bring back what is owed: it comes back, as much as there is room
 *
 * Invariants
 *   1. Every reason to ask (a cause) is a triple of bytes, severity and the least gap since the
 *      last ask; all three only get worse with the signals, and the largest of those whose gap is
 *      over is asked. So the answer is monotone.
 *   2. Stalls (PSI) and events count only where the domain is near its end: a neighbour that
 *      thrashes inside its own limit raises the machine's PSI too, and nothing that is released
 *      here would help it. avg10 still shows a stall long after it ended, hence the long gap.
 *   3. Without pressure no call is asked for, but for a few looks after an event and where there
 *      are no events at all.
 *   4. Who computes needs the evicted units in the next graph again: only a critical cause asks.
 *   5. Restoring leaves a domain low above near, and above near nothing asks but a service manager:
 *      so a restoration cannot bring about the next eviction, even if a little more is taken then.
 *      When a shortage follows one all the same, the load comes and goes, and the next restoration
 *      waits twice as long. */
#include "decide.h"

#include <errno.h>
#include <stddef.h>

#define MIB ((uint64_t)1 << 20)
#define SECOND_NS 1000000000u

#define HOLD_NS (5ull * SECOND_NS)
#define LOOK_NS (SECOND_NS / 20)
#define LOOK_MAX_NS (60ull * SECOND_NS)
#define BURST_LOOKS 6u /* after an event: 0.05 + 0.1 + ... + 1.6 s */
#define GAP_CRITICAL_NS (SECOND_NS / 20)
#define GAP_SHORT_NS (SECOND_NS / 2)
#define GAP_STALL_NS (5ull * SECOND_NS)
#define GAP_MAX_NS (30ull * SECOND_NS)
#define RESTORE_GAP_NS (SECOND_NS / 20) /* between two steps: others take their turns */
#define OWED_LOOK_NS (10ull * SECOND_NS)
#define RELAPSE_NS (60ull * SECOND_NS)
#define RELAPSES_MAX 7u              /* 5 s << 7: some ten minutes */
#define FALL_MIN_NS (SECOND_NS / 50) /* a rate over less is noise, over more is history */
#define FALL_MAX_NS (10ull * SECOND_NS)
/* Where only looking tells: no program fills memory faster (first touch, bytes a second). */
#define BLIND_FILL (2048 * MIB)
#define BLIND_MIN_NS (SECOND_NS / 40)
#define BLIND_MAX_NS (10ull * SECOND_NS)

typedef struct cause {
    uint64_t bytes, gap_ns;
    neap_pressure severity;
} cause;

static uint64_t min_u64(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static uint64_t max_u64(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

static uint64_t less(uint64_t a, uint64_t b) { /* a - b, not below 0 */
    return a > b ? a - b : 0;
}

neap_pressure_marks neap_pressure_marks_of(uint64_t size_bytes) {
    uint64_t low = min_u64(max_u64(size_bytes / 16, 16 * MIB), 1024 * MIB);
    low = min_u64(low, size_bytes / 4);
    return (neap_pressure_marks){low / 2, low, 2 * low, 4 * low};
}

static bool is_near(const neap_pressure_domain *domain) {
    return domain->size_bytes > 0 &&
           domain->available_bytes < neap_pressure_marks_of(domain->size_bytes).near_bytes;
}

/* Notes what is available; bytes a second by which it fell in the last two looks both. */
static uint64_t follow(neap_pressure_track *track, const neap_pressure_domain *domain,
                       uint64_t now_ns) {
    uint64_t both = 0, fall = 0;
    const uint64_t passed_ns = less(now_ns, track->seen_ns);
    if (track->known && passed_ns < FALL_MIN_NS) return 0;
    if (track->known && passed_ns <= FALL_MAX_NS) {
        const uint64_t fell = less(track->available_bytes, domain->available_bytes);
        fall = (uint64_t)((double)fell * (double)SECOND_NS / (double)passed_ns);
        both = min_u64(fall, track->fall);
    }
    *track = (neap_pressure_track){true, now_ns, domain->available_bytes, fall};
    return both;
}

/* So fast, so near to its end, that the next look must come soon. */
static bool is_falling(const neap_pressure_domain *domain, uint64_t fall) {
    return is_near(domain) && fall >= neap_pressure_marks_of(domain->size_bytes).low_bytes / 8;
}

/* Too little is left, or will be in half a second. */
static cause shortage(const neap_pressure_domain *domain, uint64_t fall) {
    if (domain->size_bytes == 0) return (cause){0};
    const neap_pressure_marks marks = neap_pressure_marks_of(domain->size_bytes);
    const uint64_t soon = is_near(domain) ? fall / 2 : 0, left = domain->available_bytes;
    if (left >= marks.low_bytes + soon) return (cause){0};
    const bool critical = left < marks.critical_bytes + soon;
    return (cause){marks.enough_bytes + soon - left, critical ? GAP_CRITICAL_NS : GAP_SHORT_NS,
                   critical ? NEAP_PRESSURE_CRITICAL : NEAP_PRESSURE_SHORT};
}

/* Somebody waits for memory; how much would help is not said, so a share is given. */
static cause stall(const neap_pressure_domain *domain, uint64_t resident) {
    if (domain->event == NEAP_PRESSURE_EVENT_CRITICAL)
        return (cause){resident / 2, SECOND_NS, NEAP_PRESSURE_CRITICAL};
    if (domain->full_permille >= 250)
        return (cause){resident / 2, GAP_STALL_NS, NEAP_PRESSURE_CRITICAL};
    if (domain->full_permille >= 100)
        return (cause){resident / 4, GAP_STALL_NS, NEAP_PRESSURE_SHORT};
    if (domain->full_permille >= 50 || domain->some_permille >= 100 ||
        domain->event == NEAP_PRESSURE_EVENT_MEDIUM)
        return (cause){resident / 8, GAP_STALL_NS, NEAP_PRESSURE_SHORT};
    return (cause){0};
}

static bool is_quiet(const neap_pressure_domain *domain, bool is_counted) {
    if (domain->size_bytes > 0 &&
        domain->available_bytes < neap_pressure_marks_of(domain->size_bytes).enough_bytes)
        return false;
    return !is_counted || (domain->some_permille < 50 && domain->full_permille < 25);
}

static uint64_t gap_of(const neap_pressure_state *state, uint64_t gap_ns) {
    return min_u64(gap_ns << min_u64(state->fruitless, 10), GAP_MAX_NS);
}

/* Bytes of the largest cause that may ask now. */
static uint64_t ask(const neap_pressure_state *state, const neap_pressure_signals *signals,
                    const cause *causes, size_t n) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < n; i++) {
        const bool gap_over = !state->has_asked || less(signals->now_ns, state->asked_ns) >=
                                                       gap_of(state, causes[i].gap_ns);
        if (signals->busy && causes[i].severity != NEAP_PRESSURE_CRITICAL) continue;
        if (gap_over) bytes = max_u64(bytes, causes[i].bytes);
    }
    return min_u64(bytes, signals->resident_bytes);
}

static void change_phase(neap_pressure_state *state, uint64_t now_ns, bool is_short, bool quiet) {
    if (is_short) {
        if (!state->pressed && state->has_restored) {
            const bool soon = less(now_ns, state->restored_ns) < RELAPSE_NS;
            state->relapses = soon ? (uint32_t)min_u64(state->relapses + 1, RELAPSES_MAX) : 0;
            state->has_restored = false;
        }
        state->pressed = true;
        state->relieved = false;
        return;
    }
    if (!state->pressed) return;
    if (!quiet) {
        state->relieved = false;
        return;
    }
    if (!state->relieved) state->relieved_ns = now_ns;
    state->relieved = true;
    if (less(now_ns, state->relieved_ns) >= HOLD_NS) state->pressed = state->relieved = false;
}

/* How far away the end is where nothing announces it. */
static uint64_t blind_look(const neap_pressure_signals *signals) {
    uint64_t ns = BLIND_MAX_NS;
    const neap_pressure_domain *domains[] = {&signals->machine, &signals->group};
    for (size_t i = 0; i < 2; i++) {
        if (domains[i]->size_bytes == 0) continue;
        const uint64_t low = neap_pressure_marks_of(domains[i]->size_bytes).low_bytes;
        const double headroom = (double)less(domains[i]->available_bytes, low);
        ns = min_u64(ns, (uint64_t)(headroom / (double)BLIND_FILL * SECOND_NS));
    }
    return max_u64(ns, BLIND_MIN_NS);
}

/* How long there must have been room. */
static uint64_t room_until(const neap_pressure_state *state) {
    return state->room_ns + (HOLD_NS << state->relapses);
}

/* While something is owed. */
static uint64_t restore_look(const neap_pressure_state *state, const neap_pressure_signals *signals,
                             uint64_t restore_bytes) {
    const uint64_t wait_ns = less(room_until(state), signals->now_ns);
    if (restore_bytes > 0) return RESTORE_GAP_NS;
    return state->has_room && wait_ns > 0 ? min_u64(wait_ns, OWED_LOOK_NS) : OWED_LOOK_NS;
}

static uint64_t next_look(const neap_pressure_state *state, const neap_pressure_signals *signals,
                          uint64_t restore_bytes) {
    const uint64_t now_ns = signals->now_ns;
    const bool near = is_near(&signals->machine) || is_near(&signals->group);
    uint64_t in_ns = UINT64_MAX;
    if (state->pressed || (near && state->looks < BURST_LOOKS))
        in_ns = min_u64((uint64_t)LOOK_NS << min_u64(state->looks, 10), LOOK_MAX_NS);
    else if (signals->blind)
        in_ns = BLIND_MAX_NS;
    if (state->pressed && state->relieved)
        in_ns = min_u64(in_ns, less(state->relieved_ns + HOLD_NS, now_ns));
    if (signals->blind && signals->resident_bytes > 0) in_ns = min_u64(in_ns, blind_look(signals));
    if (signals->owed_bytes > 0)
        in_ns = min_u64(in_ns, restore_look(state, signals, restore_bytes));
    return in_ns == UINT64_MAX ? UINT64_MAX : now_ns + max_u64(in_ns, 1);
}

static uint64_t room(const neap_pressure_domain *domain) {
    if (domain->size_bytes == 0) return UINT64_MAX;
    const neap_pressure_marks marks = neap_pressure_marks_of(domain->size_bytes);
    return less(domain->available_bytes, marks.near_bytes + marks.low_bytes);
}

/* Who computes restores what it needs by itself. */
static uint64_t restorable(neap_pressure_state *state, const neap_pressure_signals *signals) {
    const uint64_t bytes =
        min_u64(signals->owed_bytes, min_u64(room(&signals->machine), room(&signals->group)));
    if (bytes > 0 && !state->has_room) state->room_ns = signals->now_ns;
    state->has_room = bytes > 0;
    const bool is_late_enough = signals->now_ns >= room_until(state);
    return is_late_enough && !state->pressed && !signals->busy ? bytes : 0;
}

static neap_pressure worst(const cause *causes, size_t n) {
    neap_pressure severity = NEAP_PRESSURE_CALM;
    for (size_t i = 0; i < n; i++)
        if (causes[i].severity > severity) severity = causes[i].severity;
    return severity;
}

neap_pressure_decision neap_pressure_decide(neap_pressure_state *state,
                                            const neap_pressure_signals *signals) {
    const neap_pressure_domain *machine = &signals->machine, *group = &signals->group;
    const uint64_t now_ns = signals->now_ns, resident = signals->resident_bytes;
    /* A group without a limit stalls when the machine does. */
    const bool machine_near = is_near(machine);
    const bool group_near = group->size_bytes > 0 ? is_near(group) : machine_near;
    const uint64_t machine_fall = follow(&state->machine, machine, now_ns);
    const uint64_t group_fall = follow(&state->group, group, now_ns);
    const cause causes[] = {
        shortage(machine, machine_fall),
        machine_near ? stall(machine, resident) : (cause){0},
        shortage(group, group_fall),
        group_near ? stall(group, resident) : (cause){0},
        signals->told ? (cause){resident / 4, SECOND_NS, NEAP_PRESSURE_SHORT} : (cause){0},
    };
    const size_t n = sizeof causes / sizeof *causes;

    neap_pressure_decision decision = {
        .severity = worst(causes, n),
        .by_machine = worst(causes, 2) != NEAP_PRESSURE_CALM,
    };
    /* More is owed than before: a neap watch saw a shortage that was over before this look. */
    const bool was_taken = signals->owed_bytes > state->owed_bytes;
    state->owed_bytes = signals->owed_bytes;
    change_phase(state, now_ns, decision.severity != NEAP_PRESSURE_CALM || was_taken,
                 is_quiet(machine, machine_near) && is_quiet(group, group_near));
    decision.release_bytes = ask(state, signals, causes, n);
    if (signals->woken || decision.release_bytes > 0 || is_falling(machine, machine_fall) ||
        is_falling(group, group_fall))
        state->looks = 0;
    else if (state->looks < 64)
        state->looks++;
    if (decision.release_bytes > 0) {
        state->has_asked = true;
        state->asked_ns = now_ns;
    }
    decision.restore_bytes = restorable(state, signals);
    decision.look_ns = next_look(state, signals, decision.restore_bytes);
    return decision;
}

void neap_pressure_released(neap_pressure_state *state, uint64_t bytes) {
    if (bytes > 0)
        state->fruitless = 0;
    else if (state->fruitless < 64)
        state->fruitless++;
}

void neap_pressure_restored(neap_pressure_state *state, uint64_t now_ns, uint64_t bytes) {
    state->machine.known = state->group.known = false; /* what was taken is no load that grows */
    state->has_restored = state->has_restored || bytes > 0;
    state->restored_ns = now_ns;
    if (bytes > 0) return;
    state->has_room = false;
    state->relapses = (uint32_t)min_u64(state->relapses + 1, RELAPSES_MAX);
}

int neap_pressure_trim_permille(int level) {
    static const struct {
        int level, permille;
    } shares[] = {{80, 1000}, {60, 750}, {40, 500}, {20, 250}, {15, 500}, {10, 250}, {5, 125}};
    for (size_t i = 0; i < sizeof shares / sizeof *shares; i++)
        if (level >= shares[i].level) return shares[i].permille;
    return -EINVAL;
}
