#!/usr/bin/env python3
"""Codec none: greedy output after any eviction is the one without it, byte for byte.

The same request is sent again and again: all but the last token of its prompt come from the cache,
so that every run computes the same graphs on the same cells, and only evictions lie between them.
"""

import itertools

import support as s


def configurations():
    """(model, slots, flash, cache type, n_predict, shares evicted[, policy])"""
    shares = (25, 50, 75, 100)
    if s.ALL:
        for model, slots, (flash, kv) in itertools.product(
                (s.SMOLLM2, s.QWEN, s.GEMMA), (1, 4),
                (("on", "f16"), ("off", "f16"), ("on", "q8_0"))):
            yield model, slots, flash, kv, 128, shares
        return
    for flash, kv in (("on", "f16"), ("off", "f16"), ("on", "q8_0")):
        yield s.SMOLLM2, 1, flash, kv, 128, shares
        yield s.SMOLLM2, 4, flash, kv, 32, (50, 100)
    yield s.QWEN, 1, "on", "f16", 128, (25, 100)
    yield s.QWEN, 1, "off", "f16", 32, (50,)
    yield s.GEMMA, 1, "on", "f16", 128, (50, 100)
    yield s.GEMMA, 4, "off", "f16", 16, (75,)
    for policy in ("mz-no", "mz-ar", "mz-rp", "lru", "partial-offload"):
        yield s.SMOLLM2, 1, "on", "f16", 32, (50, 100), policy


def check_times(name, server, prompt, policy):
    """Of a prompt's graph, which is always a request; a token after a pause may be one as well."""
    server.evict("100%")
    server.tokens(prompt + " And so it goes on and on.", 1)
    last = server.stat()["last_request"]
    s.check(last["alloc_ms"] > 0 and 0 < last["storage_ms"] <= last["restore_ms"], f"{name}: {last}")
    if policy in ("mz-no", "mz-ar", "partial-offload"):  # nothing is computed meanwhile
        s.check(last["ttft_ms"] >= last["restore_ms"] and last["overlap"] < 0.2, f"{name}: {last}")


def run(work, model, slots, flash, kv, n_predict, shares, policy="hybrid"):
    name = f"{model}, {slots} slots, -fa {flash}, cache {kv}, {policy}"
    prompts = [s.prose(1000 + i, 420 + 60 * i) for i in range(slots)]
    with s.Server(work, model, "-ctk", kv, "-ctv", kv, flash=flash, slots=slots,
                  ctx=1536, env={"NEAP_POLICY": policy}) as server:
        def answers():
            return [server.tokens(p, n_predict, i) for i, p in enumerate(prompts)]

        answers()
        resident = answers()
        s.check(all(len(a) == n_predict for a in resident), f"{name}: short answers")
        s.check_equal(answers(), resident, f"{name}: resident answers differ among themselves")
        for share in shares:
            result = server.evict(f"{share}%")
            s.check(result["released_bytes"] > 0, f"{name}: nothing released at {share} %")
            s.check(server.evicted_units() > 0, f"{name}: no unit evicted at {share} %")
            s.check_equal(answers(), resident, f"{name}: another answer after evicting {share} %")
            s.say(f"identical: {name}, {share} % evicted, "
                  f"{result['released_bytes'] // s.MIB} MiB released")
        stat = server.stat()
        s.check_equal((stat["policy"], stat["counters"]["errors"]), (policy, 0), f"{name}: errors")
        if slots == 1:
            check_times(name, server, prompts[0], policy)


def body(work):
    for configuration in configurations():
        run(work, *configuration)


s.main(body)
