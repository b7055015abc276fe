#!/usr/bin/env python3
"""A server with a 32k context and a chat of 200 tokens holds less memory with neap than without."""

import support as s


def total(pid):
    return s.held(pid) + s.smaps_rollup(pid).get("Pss_File", 0)


def body(work):
    got = {}
    for backend in (False, True):
        with s.Server(work, s.QWEN, backend=backend, ctx=32768) as server:
            server.tokens(s.prose(41, 160), 16)
            got[backend] = total(server.pid)
    s.say(f"32k context, 200-token chat, {s.QWEN}: stock holds {got[False] / s.MIB:.0f} MiB, "
          f"neap {got[True] / s.MIB:.0f} MiB")
    s.check(got[True] < got[False], "neap holds as much or more")


s.main(body)
