#!/usr/bin/env python3
"""What `neap evict` says was released is what the kernel got back, within 5 %: with klt, too, whose
model is in memory beside the cache."""

import os

import support as s
from klt_training import train


def run(work, codec, steps, model=s.QWEN, env=None):
    with s.Server(work, model, codec=codec, ctx=4096, env=env) as server:
        server.tokens(s.prose(31, 2800), 4)
        for share, only in steps:
            before, stat_before = server.held(), server.stat()
            result = server.evict(share, only)
            after, stat_after = server.held(), server.stat()
            got, said = before - after, result["released_bytes"]
            text = (f"codec {codec}, {share} {only or ''}: said {said / s.MIB:.1f} MiB, "
                    f"kernel got {got / s.MIB:.1f} MiB")
            s.say(text)
            if said >= 64 * s.MIB:
                s.check(abs(got - said) <= 0.05 * said, text)
            else:
                s.check(abs(got - said) <= 4 * s.MIB, text)
            s.check(said >= result["asked_bytes"] * 0.999 or result["exhausted"],
                    f"asked {result['asked_bytes']}, released {said}, not exhausted")
            shown = resident(stat_before) - resident(stat_after)
            s.check(abs(got - result["scratch_bytes"] - shown) <= 0.05 * max(shown, 64 * s.MIB),
                    f"stat shows {shown / s.MIB:.1f} MiB less, {text}")
        grown = server.held()
        server.restore()
        grown = server.held() - grown
        s.say(f"codec {codec}: restored, {grown / s.MIB:.1f} MiB held more")
        s.check_equal(server.evicted_units(), 0, "units still evicted after restore")


def resident(stat):
    b = stat["bytes"]
    return b["weights_resident"] + b["kv_resident"] + b["kv_compressed_memory"]


def body(work):
    run(work, "none", (("25%", None), ("200M", None), ("100%", None)))
    run(work, "q8", (("100%", "kv"), ("50%", None), ("100%", None)))
    cache = os.path.join(work, "cache")
    os.mkdir(cache)
    train(cache, s.model_path(s.SMOLLM2), "head", 4)
    run(work, "klt:4", (("100%", "kv"), ("100%", None)), s.SMOLLM2, {"XDG_CACHE_HOME": cache})


s.main(body)
