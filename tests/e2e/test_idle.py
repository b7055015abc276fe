#!/usr/bin/env python3
"""An idle instance with nothing left to do uses no CPU: neap's threads do not wake up."""

import time

import support as s

SECONDS = 60 if s.ALL else 10
ENV = {"NEAP_PRESSURE": "on", "NEAP_WRITE_BEHIND": "always"}


def settle(server):
    """Waits until neap's threads have stopped moving, at most 10 s."""
    before = None
    for _ in range(20):
        now = ours(server)
        if now == before:
            return
        before = now
        time.sleep(0.5)


def ours(server):
    return {tid: t for tid, t in s.threads(server.pid).items() if t[0].startswith("neap")}


def stalls():
    """What the kernel has counted of tasks that waited for memory, anywhere on this machine."""
    try:
        with open("/proc/pressure/memory", encoding="ascii") as text:
            return text.readline().rsplit("=", 1)[1]
    except OSError:
        return None


def body(work):
    for after in ("an answer", "an eviction", "a restoration"):
        with s.Server(work, env=ENV) as server:
            server.tokens(s.prose(51, 300), 16)
            if after != "an answer":
                server.evict("100%")
            if after == "a restoration":
                server.restore()
            time.sleep(3)  # write-behind begins after two seconds
            settle(server)
            before = ours(server)
            s.check("neap-pressure" in [t[0] for t in before.values()], "pressure is not watched")
            s.check("neap-idle" in [t[0] for t in before.values()], "nothing is written behind")
            s.check(before, f"no thread named neap*: {s.threads(server.pid)}")
            ticks, stalled = s.cpu_ticks(server.pid), stalls()
            time.sleep(SECONDS)
            after_all = ours(server)
            if stalls() != stalled:  # another program's: then it is right to have a look
                for tid in [tid for tid, t in before.items() if t[0] == "neap-pressure"]:
                    after_all[tid] = before[tid]
            s.check_equal(after_all, before, f"after {after}: neap's threads woke up")
            ticks = s.cpu_ticks(server.pid) - ticks
            s.check(ticks <= SECONDS // 10, f"after {after}: {ticks} CPU ticks in {SECONDS} s")
            s.say(f"after {after}: {len(before)} threads of neap, no wake-up in {SECONDS} s")


s.main(body)
