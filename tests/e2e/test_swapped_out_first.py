#!/usr/bin/env python3
"""The kernel has swapped idle pages out before neap is asked: an eviction gives those back, too,
and frees their swap; the answers stay the same, bit for bit."""

import contextlib
import os
import time

import groups
import support as s

ROOM = 1024 * s.MIB
SQUEEZED = 40 * s.MIB


def swapped(server):
    return s.smaps_rollup(server.pid).get("SwapPss", 0)


def squeeze(group, server):
    """Has the kernel swap out what is idle; how much of the server that is."""
    for _ in range(20):
        with contextlib.suppress(OSError):
            group.set_limit(SQUEEZED)
            break
        time.sleep(0.1)
    group.set_limit(ROOM)
    out = swapped(server)
    s.check(out > 64 * s.MIB, f"only {out >> 20} MiB swapped out: nothing to test")
    return out


def body(work):
    prompt = s.prose(171, 700)
    group = groups.Group(f"neap-test-{os.getpid()}", ROOM)
    try:
        with groups.zram(ROOM):
            with group.entered():
                server = s.Server(work, s.SMOLLM2, env={"NEAP_PRESSURE": "off"})
            with server:
                server.tokens(prompt, 24)
                resident = server.tokens(prompt, 24)
                squeeze(group, server)
                s.check_equal(server.tokens(prompt, 24), resident, "with pages swapped in")
                out = squeeze(group, server)
                result = server.evict("100%")
                left = swapped(server)
                s.say(f"{out >> 20} MiB swapped out; {result['released_bytes'] >> 20} MiB "
                      f"released, {left >> 20} MiB still in swap")
                s.check(left < out / 3, "evicted pages keep their place in swap")
                bytes_ = server.stat()["bytes"]
                s.check(bytes_["weights_resident"] < bytes_["weights_total"] / 2, "weights stay")
                s.check_equal(server.tokens(prompt, 24), resident, "after an eviction of them")
                s.check_equal(server.stat()["units"]["lost"], 0, "lost units")
    finally:
        group.remove()


s.main(body)
