#!/usr/bin/env python3
"""Saving a context takes no second copy of it in memory."""

import os
import re

import support as s


def status_bytes(pid, name):
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return int(re.search(rf"^{name}:\s+(\d+) kB", file.read(), re.M).group(1)) * 1024


def body(work):
    with s.Server(work, ctx=4096) as server:
        server.tokens(s.prose(161, 2000), 4)
        server.slot_save("first")  # what is allocated once is there
        with open(f"/proc/{server.pid}/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # the high-water mark starts anew
        before = status_bytes(server.pid, "VmRSS")
        size = os.path.getsize(server.slot_save("second"))
        grown = status_bytes(server.pid, "VmHWM") - before
        s.say(f"saved {size / s.MIB:.1f} MiB, at most {grown / s.MIB:.1f} MiB more in memory")
        s.check(size > 32 * s.MIB, "the context is too small to tell")
        s.check(grown < size / 4, f"saving {size} bytes took {grown} more")


s.main(body)
