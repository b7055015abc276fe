#!/usr/bin/env python3
"""Random evictions and restorations against random requests lose nothing: every answer is that of a
server from which nothing was ever taken. The seed is printed; NEAP_TEST_SEED repeats a run."""

import os
import random
import threading

import support as s

ROUNDS = 1000 if s.ALL else 50
SLOTS = 2
LIMIT_WORDS = 800


def plan_requests(rng):
    """[(slot, prompt, n_predict)]: conversations that grow, are cut back and begin anew."""
    words, out = [[] for _ in range(SLOTS)], []
    for _ in range(ROUNDS):
        slot = rng.randrange(SLOTS)
        what = rng.random()
        if not words[slot] or what < 0.1 or len(words[slot]) > LIMIT_WORDS:
            words[slot] = s.prose(rng.random(), rng.randint(50, 400)).split()
        elif what < 0.25:
            words[slot] = words[slot][:rng.randint(10, len(words[slot]))]
        else:
            words[slot] += s.prose(rng.random(), rng.randint(1, 80)).split()
        out.append((slot, " ".join(words[slot]), rng.choice((1, 4, 8, 16))))
    return out


def disturb(server, rng):
    what = rng.random()
    if what < 0.15:
        server.restore()
    elif what < 0.2:
        server.slot_save("x", rng.randrange(SLOTS))
    else:
        size = rng.choice([f"{rng.randint(1, 100)}%", f"{rng.randint(1, 120)}M"])
        server.evict(size, rng.choice([None, None, "kv", "weights"]))


def body(work):
    seed = int(os.environ.get("NEAP_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    s.say(f"NEAP_TEST_SEED={seed}, {ROUNDS} rounds")
    rng = random.Random(seed)
    requests = plan_requests(rng)
    with s.Server(work, slots=SLOTS) as server:
        expected = [server.tokens(prompt, n, slot) for slot, prompt, n in requests]
        s.check_equal(server.stat()["counters"]["evictions"], 0, "evictions nobody asked for")
    with s.Server(work, slots=SLOTS) as server:
        for i, (slot, prompt, n) in enumerate(requests):
            # Every other round the memory is taken while the request runs.
            seed_of_round = rng.random()
            thread = threading.Thread(target=disturb, args=(server, random.Random(seed_of_round)))
            thread.start()
            if i % 2 == 0:
                thread.join()
            got = server.tokens(prompt, n, slot)
            thread.join()
            s.check_equal(got, expected[i], f"round {i} (slot {slot})")
        stat = server.stat()
        s.check_equal((stat["counters"]["errors"], stat["units"].get("lost", 0)), (0, 0), "errors, lost")
        s.check(stat["counters"]["evictions"] > ROUNDS // 3, f"too few evictions: {stat['counters']}")
        s.say(f"{ROUNDS} rounds identical: {stat['counters']}")


s.main(body)
