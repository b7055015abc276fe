#!/usr/bin/env python3
"""A server and a program that dirties memory share a limit that is too small for both: neap gives
memory back before anybody is OOM-killed, takes it again by itself when the other has ended, once,
and answers as before, bit for bit. Without neap's watching the same load ends in a kill, so there
was something to prevent."""

import os
import subprocess
import sys
import time

import groups
import support as s

LIMIT = 480 * s.MIB
MORE_THAN_THERE_IS = 90 * s.MIB  # what the other program takes beyond what is available
RATE = 200 * s.MIB               # a second

DIRTY = """
import mmap, sys, time
size, rate = int(sys.argv[1]), int(sys.argv[2])
memory, step = mmap.mmap(-1, size), 1 << 20
began, page = time.monotonic(), b"x" * step
for at in range(0, size - step, step):
    memory[at:at + step] = page
    time.sleep(max(0, began + at / rate - time.monotonic()))
print("dirtied", flush=True)
sys.stdin.read()
"""


def comes_back(server):
    """What pressure took is restored before anybody asks, and stays."""
    with open("/proc/meminfo", encoding="ascii") as file:
        memory = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
    if memory["MemAvailable"] < min(memory["MemTotal"] / 16, 1 << 30) * 5 + LIMIT:
        s.say("  too little memory is available on this machine to take any again")
        return
    began, before = time.monotonic(), server.stat()["pressure"]
    while server.stat()["pressure"]["owed_bytes"]:
        s.check(time.monotonic() < began + 60, f"not restored by itself: {server.stat()}")
        time.sleep(0.5)
    after = server.stat()["pressure"]
    s.check(after["restored_bytes"] > 0, f"nothing restored: {after}")
    s.say(f"  {after['restored_bytes'] >> 20} MiB came back {time.monotonic() - began:.1f} s later")
    time.sleep(5)
    s.check_equal(server.stat()["pressure"]["releases"], before["releases"],
                  "evicted again what had just come back")


def share_the_limit(work, group, pressure):
    """Whether all survived; checks what they answered."""
    prompt, begun = s.prose(161, 700), group.kills()
    with group.entered():
        server = s.Server(work, s.SMOLLM2, through_serve=True, env={"NEAP_PRESSURE": pressure})
    with server:
        server.tokens(prompt, 24)
        resident = server.tokens(prompt, 24)
        s.check_equal(server.stat()["counters"]["evictions"], 0, "evicted before it was short")
        size = group.available() + MORE_THAN_THERE_IS
        with group.entered():
            dirty = subprocess.Popen([sys.executable, "-c", DIRTY, str(size), str(RATE)],
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            done = dirty.stdout.readline() == "dirtied\n"
            survived = group.kills() == begun and server.alive() and done
            s.say(f"pressure {pressure}: dirtied {size / s.MIB:.0f} MiB in {LIMIT // s.MIB}, "
                  f"{group.kills() - begun} killed")
            if pressure == "on":
                seen = server.stat()["pressure"]
                s.say(f"  {seen}, {group.available() / s.MIB:.0f} MiB left")
                s.check(survived, "somebody was killed, or gave up")
                s.check(seen["releases"] >= 1, "not by neap")
                s.check(seen["looks"] < 200, "it was awake all the time")
        finally:
            dirty.stdin.close()
            dirty.kill()
            dirty.wait()
        if survived and pressure == "on":
            comes_back(server)
        if survived:
            s.check_equal(server.tokens(prompt, 24), resident, "the answer after it")
            s.check_equal(server.tokens(prompt, 24), resident, "and once more")
    return survived


def body(work):
    group = groups.Group(f"neap-test-{os.getpid()}", LIMIT)
    group.keep_from_swap()  # no way out but to give memory back
    try:
        s.check(share_the_limit(work, group, "on"), "somebody was killed")
        s.check(not share_the_limit(work, group, "off"), "the limit did not bite")
    finally:
        group.remove()


s.main(body)
