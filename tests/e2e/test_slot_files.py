#!/usr/bin/env python3
"""Slot files: saved from evicted memory they have the same bytes; restored into evicted memory they
give the same answer; saving needs little memory beside the state."""

import os

import support as s


def peak_growth(server, action):
    """Bytes by which the resident set peaked above where it was."""
    with open(f"/proc/{server.pid}/clear_refs", "w", encoding="ascii") as refs:
        refs.write("5")
    before = status_bytes(server.pid, "VmRSS")
    action()
    return status_bytes(server.pid, "VmHWM") - before


def status_bytes(pid, key):
    with open(f"/proc/{pid}/status", encoding="ascii") as text:
        for line in text:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    raise s.Failed(f"no {key}")


def run(work, model, slots, flash, kv):
    name = f"{model}, {slots} slots, -fa {flash}, cache {kv}"
    prompt, slot = s.prose(11, 900), slots - 1
    with s.Server(work, model, "-ctk", kv, "-ctv", kv, slots=slots, flash=flash) as server:
        server.tokens(prompt, 32, slot)
        resident = server.tokens(prompt, 32, slot)
        path = server.slot_save("resident", slot)
        saved = s.read_bytes(path)

        server.evict("100%")
        s.check_equal(s.read_bytes(server.slot_save("evicted", slot)) == saved, True,
                      f"{name}: the file saved while evicted differs")
        server.evict("100%")
        server.slot_erase(slot)
        server.slot_restore("resident", slot)
        s.check_equal(server.tokens(prompt, 32, slot), resident, f"{name}: after restoring the slot")

        server.slot_restore("evicted", slot)
        server.evict("100%")
        reply = server.complete(prompt, 32, slot)
        s.check_equal(reply["tokens"], resident, f"{name}: evicted after restoring the slot")
        s.check(reply["timings"]["cache_n"] > 900, f"{name}: nothing reused: {reply['timings']}")

        # Other content over evicted cells, then back.
        other = server.tokens(s.prose(12, 500), 16, slot)
        server.evict("100%")
        server.slot_restore("resident", slot)
        s.check_equal(server.tokens(prompt, 32, slot), resident, f"{name}: restored over others")
        s.check(other != resident[:16], f"{name}: both prompts give the same answer")

        growth = peak_growth(server, lambda: server.slot_save("peak", slot))
        size = os.path.getsize(path)
        s.check(growth < size / 2 + 4 * s.MIB, f"{name}: saving {size} bytes took {growth} more")
        s.say(f"{name}: identical; state {size >> 10} KiB, peak while saving +{growth >> 10} KiB")


def body(work):
    run(work, s.SMOLLM2, 1, "on", "f16")
    run(work, s.SMOLLM2, 4, "off", "f16")
    run(work, s.SMOLLM2, 1, "on", "q8_0")
    if s.ALL:
        run(work, s.SMOLLM2, 4, "on", "f16")
        run(work, s.SMOLLM2, 1, "off", "f16")
        run(work, s.QWEN, 1, "on", "f16")
        run(work, s.QWEN, 4, "off", "f16")


s.main(body)
