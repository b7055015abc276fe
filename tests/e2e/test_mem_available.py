#!/usr/bin/env python3
"""The machine has as much more available memory as `neap evict` says it released (within 10 %, for
512 MiB and more)."""

import os
import re
import subprocess

import support as s


def available():
    """MemAvailable, and what lies in the processors' lists of free pages: the kernel (6.7 and later)
    keeps hundreds of MiB there after a release, free for any program but not counted as free."""
    with open("/proc/meminfo", encoding="ascii") as text:
        kib = int(re.search(r"^MemAvailable: +(\d+)", text.read(), re.MULTILINE).group(1))
    with open("/proc/zoneinfo", encoding="ascii") as text:
        pages = sum(int(n) for n in re.findall(r"^ +count: +(\d+)", text.read(), re.MULTILINE))
    return kib * 1024 + pages * os.sysconf("SC_PAGE_SIZE")


def f16_model(work):
    """The largest of the test models, four times as large."""
    path = os.path.join(work, "f16.gguf")
    subprocess.run([os.path.join(s.BIN, "llama-quantize"), "--allow-requantize",
                    s.model_path(s.QWEN), path, "F16"], check=True, stdin=subprocess.DEVNULL,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return path


def body(work):
    if not s.ALL:
        raise s.Skipped("the machine must be quiet (make test-all)")
    with s.Server(work, f16_model(work), ctx=2048) as server:
        server.tokens(s.prose(31, 300), 4)
        off = []
        for _ in range(3):  # other programs of the machine move too: the median counts
            server.restore()
            server.evict("1%")  # compute buffers are given back before
            before = available()
            said = server.evict("100%")["released_bytes"]
            got = available() - before
            s.say(f"said {said / s.MIB:.1f} MiB, available {got / s.MIB:.1f} MiB more")
            s.check(said >= 512 * s.MIB, "an eviction too small to tell")
            off.append(abs(got - said) / said)
        s.check(sorted(off)[1] <= 0.1, f"off by {sorted(off)[1]:.3f}")


s.main(body)
