#!/usr/bin/env python3
"""Lossy codecs round a KV chunk once: a second cycle changes no byte of the cache."""

import support as s


def settles(work, model, codec):
    with s.Server(work, model, codec=codec) as server:
        server.tokens(s.prose(21, 1100), 16)
        files = [s.read_bytes(server.slot_save("0"))]
        for cycle in (1, 2, 3):
            result = server.evict("100%", only="kv")
            s.check(result["kv_memory_bytes"] + result["kv_storage_bytes"] > 0,
                    f"{model}, {codec}: no KV evicted: {result}")
            if cycle == 3:
                server.evict("100%")
            files.append(s.read_bytes(server.slot_save(str(cycle))))
        s.check(files[1] != files[0], f"{model}: {codec} changed nothing: was it used?")
        s.check(files[2] == files[1], f"{model}: {codec}: the second cycle changed bytes")
        s.check(files[3] == files[1], f"{model}: {codec}: the third cycle changed bytes")
        s.say(f"{model}, {codec}: {len(files[0])} bytes, settled after one cycle")


def body(work):
    for codec in ("q8", "cachegen"):
        for model in (s.SMOLLM2, s.QWEN):
            settles(work, model, codec)


s.main(body)
