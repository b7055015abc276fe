#!/usr/bin/env python3
"""Codec klt with the chunks of four layers coded together, end to end: neap train makes the file,
--codec klt and klt:8 take it; a context evicted at once, or little by little, comes back the same
from the second time on, and answers; a shift of the context."""

import os

import support as s
from klt_training import train

CONTEXT = 1300  # words, 1.2 tokens each
N_PREDICT = 16


def cycles(work, cache, codec):
    with s.Server(work, s.SMOLLM2, codec=codec, env={"XDG_CACHE_HOME": cache}) as server:
        s.check_equal(server.stat()["codec_note"], "klt-joint-8", "file in use")
        prompt = server.tokenize(s.prose(31, CONTEXT))
        resident = server.tokens(prompt, N_PREDICT)
        exact = s.read_bytes(server.slot_save("0"))
        result = server.evict("100%", only="kv")
        s.check(result["kv_storage_bytes"] > 0 and result["kv_memory_bytes"] == 0,
                f"{codec}: klt's place is storage: {result}")
        stat = server.stat()
        s.check_equal(stat["units"]["kv_evicted"], stat["units"]["kv"], "all KV evicted")
        s.check(stat["units"]["klt"] > 4 * stat["units"]["klt_left"], f"units: {stat['units']}")
        s.check(5 < stat["ratio"] < 7, f"ratio {stat['ratio']}")  # the rest of a chunk is q8's
        s.check(0 < stat["error"] < 4, f"error {stat['error']}")
        rounded = s.read_bytes(server.slot_save("1"))
        s.check(rounded != exact, "klt changed nothing: was it used?")
        for step in range(8):  # more and more of what is clean
            result = server.evict(f"{step * 12 + 4}%", only="kv")
            s.check(result["released_bytes"] > 0, f"nothing went: {result}")
            if step % 2:
                s.check_equal(s.read_bytes(server.slot_save("2")), rounded, f"after {step} evictions")

        answers = s.next_tokens(server, prompt, resident)
        agree = sum(a == b for a, b in zip(answers, resident))
        s.check(agree >= 0.7 * N_PREDICT, f"only {agree} of {N_PREDICT} tokens agree")
        server.evict("100%")
        s.check_equal(s.next_tokens(server, prompt, resident), answers, "after another cycle")
        s.check_equal(server.stat()["counters"]["errors"], 0, "errors")
        s.say(f"{codec}: {stat['ratio']:.2f} times smaller, error {stat['error']:.2f}, "
              f"{agree} of {N_PREDICT} tokens agree")


def little_by_little(work, cache):
    """Coded by many evictions, with answers in between, chunks are coded once, too."""
    with s.Server(work, s.SMOLLM2, codec="klt", env={"XDG_CACHE_HOME": cache}) as server:
        prompt = server.tokenize(s.prose(31, CONTEXT))
        server.tokens(prompt, 1)
        for _ in range(12):
            result = server.evict("9%", only="kv")
            s.check(result["released_bytes"] >= result["asked_bytes"] or result["exhausted"],
                    f"released too little: {result}")
            units = server.stat()["units"]
            s.check(units["klt"] % 2 == 0, f"layers apart: {units}")
        first = s.read_bytes(server.slot_save("1"))
        server.evict("100%", only="kv")
        s.check_equal(s.read_bytes(server.slot_save("2")), first, "a second cycle")
        s.check_equal(server.stat()["counters"]["errors"], 0, "errors")


def shifts(work, cache):
    """Cells move to other positions while their chunks are away."""
    with s.Server(work, s.SMOLLM2, "--context-shift", codec="klt:8", ctx=1024,
                  env={"XDG_CACHE_HOME": cache}) as server:
        server.tokens(s.prose(32, 700), 16)
        server.evict("100%")
        server.tokens(s.prose(32, 700), 400)
        server.evict("100%")
        first = s.read_bytes(server.slot_save("2"))
        s.check(server.stat()["units"]["klt"] > 0, "klt codes what was shifted")
        server.evict("100%")
        s.check(s.read_bytes(server.slot_save("3")) == first, "after a shift: the second cycle changed bytes")
        s.check_equal(server.stat()["counters"]["errors"], 0, "errors")


def body(work):
    model = s.model_path(s.SMOLLM2)
    cache = os.path.join(work, "cache")
    os.mkdir(cache)
    train(cache, model, "joint", 8)
    cycles(work, cache, "klt:8")
    little_by_little(work, cache)
    shifts(work, cache)


s.main(body)
