#!/usr/bin/env python3
"""Chunks written behind while idle: the next eviction writes only the tail, answers are the same."""

import os
import time

import support as s

ENV = {"NEAP_WRITE_BEHIND": "always", "NEAP_ATTN": "neap"}
PROMPT = s.prose(77, 700)
ANSWER = 24


def written(server):
    return server.stat()["counters"]["bytes_written_storage"]


def wait_until_clean(server):
    """Until nothing is left to write; the units that are clean."""
    stat = server.stat()
    n_layers = stat["units"]["kv"] // -(-stat["tokens"] // 256)
    full = stat["tokens"] // 256 * n_layers
    deadline = time.monotonic() + 60
    while stat["write_behind"]["clean_chunks"] < full or stat["write_behind"]["state"] != "waiting":
        s.check(time.monotonic() < deadline, f"not clean after 60 s: {stat}")
        time.sleep(0.2)
        stat = server.stat()
    s.check_equal(stat["write_behind"]["clean_chunks"], full, "clean chunks")
    return full


def without(work, codec):
    """What a server without write-behind writes and answers."""
    with s.Server(work, codec=codec, env=dict(ENV, NEAP_WRITE_BEHIND="off")) as server:
        server.tokens(PROMPT, ANSWER)
        resident = server.tokens(PROMPT, ANSWER)
        s.check_equal(server.stat()["write_behind"]["state"], "off", "asked for off")
        s.check("write-behind" not in server.neap("stat").stdout, "a line about what is off")
        server.evict("100%", only="kv")
        return resident, server.tokens(PROMPT, ANSWER), written(server)


def body(work):
    for codec in ("none", "q8"):
        resident, expected, all_bytes = without(work, codec)
        with s.Server(work, codec=codec, env=ENV) as server:
            server.tokens(PROMPT, ANSWER)
            s.check_equal(server.tokens(PROMPT, ANSWER), resident, f"{codec}: before")
            full = wait_until_clean(server)
            behind = written(server)
            s.check_equal(server.stat()["write_behind"]["bytes_today"], behind, "bytes today")
            s.check_equal(server.stat()["bytes"]["released"], 0, "nothing is evicted yet")
            s.check("write-behind" in server.neap("stat").stdout, "no line about it")
            s.check_equal(server.tokens(PROMPT, ANSWER), resident, f"{codec}: memory has changed")
            wait_until_clean(server)

            behind = written(server)
            result = server.evict("100%", only="kv")
            s.check(server.stat()["units"]["kv_evicted"] >= full, f"not evicted: {result}")
            tail = written(server) - behind
            s.check(tail * 3 < all_bytes, f"{codec}: wrote {tail} of {all_bytes} when evicting")
            s.check(result["kv_memory_bytes"] * 3 < result["kv_storage_bytes"],
                    f"{codec}: coded into memory: {result}")
            s.check_equal(server.tokens(PROMPT, ANSWER), expected, f"{codec}: another answer")

            server.evict("100%", only="kv")  # from storage they came back clean
            before = written(server)
            server.restore()
            server.evict("100%", only="kv")
            again = written(server) - before
            s.check(again * 3 < all_bytes, f"{codec}: wrote {again} of {all_bytes} again")
            s.check_equal(server.tokens(PROMPT, ANSWER), expected, f"{codec}: a second time")
            s.say(f"{codec}: {full} clean chunks; evicting wrote {tail} bytes, not {all_bytes}")

    # Killed while it writes: nothing stays but the count of the day, and the next start works.
    with s.Server(work, codec="q8", env=ENV) as server:
        server.tokens(PROMPT, 1)
        deadline = time.monotonic() + 60
        while server.stat()["write_behind"]["clean_chunks"] == 0:
            s.check(time.monotonic() < deadline, "nothing is written")
        swap_dir = server.swap_dir
        server.kill()
    s.check_equal(os.listdir(swap_dir), ["write-behind"], "left in the swap folder")
    with s.Server(work, codec="q8", env=dict(ENV, NEAP_SWAP_DIR=swap_dir)) as server:
        s.check(server.stat()["write_behind"]["bytes_today"] > 0, "the day was begun anew")
        server.tokens(PROMPT, 1)
        wait_until_clean(server)
    with s.Server(work, codec="q8", env=dict(ENV, NEAP_WRITE_BEHIND="often")) as server:
        s.check_equal(server.stat()["write_behind"]["state"], "off", "NEAP_WRITE_BEHIND=often")
        s.check("NEAP_WRITE_BEHIND=often ignored" in server.log_tail(10000), "nothing was said")


s.main(body)
