#!/usr/bin/env python3
"""A mixture-of-experts model: a request brings back the experts that its tokens route to and leaves
the others evicted, and whatever was taken before, answers are those of stock llama.cpp. The seed is
printed; NEAP_TEST_SEED repeats a run."""

import os
import random
import threading

import moe_model as moe
import support as s

ROUNDS = 300 if s.ALL else 30
N_EXPERTS = moe.LAYERS * moe.EXPERTS


def plan_requests(rng):
    """[(prompt, n_predict)]: of one token and of many."""
    words = [rng.choice(s.WORDS) for _ in range(ROUNDS)]
    return [(word if i % 3 else s.prose(rng.random(), rng.randint(5, 200)), rng.choice((1, 4, 16)))
            for i, word in enumerate(words)]


def check_routed_only(server):
    """Of what was evicted, two tokens bring back what they route to and nothing more."""
    expected = server.tokens("Hello", 2, cache_prompt=False)
    server.evict()
    units = server.stat()["units"]
    s.check_equal(units["weights_evicted"], units["weights"], "units that stay at 100 %")
    s.check(units["weights"] > N_EXPERTS, f"not a unit for each expert: {units}")
    reply = server.complete("Hello", 2, cache_prompt=False)
    s.check_equal((reply["timings"]["prompt_n"], reply["tokens"]), (1, expected), "two tokens")
    evicted = server.stat()["units"]["weights_evicted"]
    s.say(f"{evicted} of {N_EXPERTS} experts evicted after a request of two tokens")
    s.check(moe.LAYERS * (moe.EXPERTS - 2 * moe.USED) <= evicted
            <= moe.LAYERS * (moe.EXPERTS - moe.USED), "others came back than were routed to")
    s.check_equal(server.tokens("Hello", 2, cache_prompt=False), expected, "the same again")
    s.check_equal(server.stat()["units"]["weights_evicted"], evicted, "evicted after the same again")
    server.restore()
    s.check_equal(server.stat()["units"]["weights_evicted"], 0, "evicted after neap restore")


def disturb(server, rng):
    if rng.random() < 0.1:
        server.restore()
    else:
        server.evict(f"{rng.randint(1, 100)}%", rng.choice([None, "weights", "weights"]))


def check_random(server, requests, expected, rng):
    for i, (prompt, n) in enumerate(requests):
        # Every other round the memory is taken while the request runs.
        thread = threading.Thread(target=disturb, args=(server, random.Random(rng.random())))
        thread.start()
        if i % 2 == 0:
            thread.join()
        got = server.tokens(prompt, n)
        thread.join()
        s.check_equal(got, expected[i], f"round {i}")


def body(work):
    seed = int(os.environ.get("NEAP_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    s.say(f"NEAP_TEST_SEED={seed}, {ROUNDS} rounds")
    rng = random.Random(seed)
    # With experts that begin and end with a page, nothing of an evicted one is left to be read.
    for arch, kind, alignment, policy, swap_limit in (
            ("qwen3moe", "f16", 4096, "hybrid", None),
            ("qwen3moe", "q4_0", 32, "lru", None),
            ("gpt-oss", "q4_0", 32, "hybrid", "64K"),
            ("granite_swa", "q8_0", 32, "partial-offload", None)):
        model = moe.write(os.path.join(work, "moe.gguf"), s.model_path(s.SMOLLM2), arch, kind,
                          alignment)
        requests = plan_requests(rng)
        with s.Server(work, model, backend=False) as server:
            expected = [server.tokens(prompt, n) for prompt, n in requests]
        s.check(len({tuple(tokens) for tokens in expected}) > 10, "all answers alike")
        env = {"NEAP_ATTN": "ggml", "NEAP_POLICY": policy}
        if swap_limit:
            env["NEAP_SWAP_LIMIT"] = swap_limit  # no room: repacked weights are made again
        with s.Server(work, model, env=env) as server:
            check_routed_only(server)
            server.slot_erase()
            check_random(server, requests, expected, rng)
            stat = server.stat()
            s.check_equal(stat["units"]["lost"], 0, "lost")
            s.check(swap_limit or stat["counters"]["errors"] == 0, f"errors: {stat['counters']}")
        s.say(f"{arch}, {kind}, {policy}, swap limit {swap_limit}: {ROUNDS} rounds identical")


s.main(body)
