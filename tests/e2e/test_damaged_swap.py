#!/usr/bin/env python3
"""Damaged bytes in the swap file never become an answer, and poison nothing that comes later."""

import os

import support as s


def swap_files(server):
    """One descriptor of the server for each swap file it has open."""
    folder, out = f"/proc/{server.pid}/fd", {}
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.readlink(path).startswith(os.path.realpath(server.swap_dir) + "/"):
            out[os.stat(path).st_ino] = path
    return out.values()


def damage(server):
    """Flips one bit in every 4 KiB of what the swap file holds."""
    flipped = 0
    for path in swap_files(server):
        with open(path, "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            for offset in range(64, size, 4096):
                file.seek(offset)
                byte = file.read(1)
                file.seek(offset)
                file.write(bytes([byte[0] ^ 0x10]))
                flipped += 1
            os.fsync(file.fileno())
    return flipped


def body(work):
    prompt = s.prose(111, 900)
    with s.Server(work) as server:
        server.tokens(prompt, 24)
        resident = server.tokens(prompt, 24)
        s.check(server.evict("100%", only="kv")["kv_storage_bytes"] > 0, "no KV on storage")
        s.check(damage(server) > 0, "no swap file found to damage")
        status, reply = server.call("POST", "/completion", {
            "prompt": prompt, "n_predict": 24, "temperature": 0, "id_slot": 0,
            "cache_prompt": True, "return_tokens": True, "ignore_eos": True})
        s.check(status != 200 or reply["tokens"] == resident,
                f"answered from damaged bytes: {reply}")
        s.check(server.alive(), "the server died of it")
        stat = server.stat()
        s.say(f"status {status}, errors {stat['counters']['errors']}, lost {stat['units']['lost']}, "
              f"last error: {stat.get('last_error')}")
        s.check(stat["counters"]["errors"] > 0, "no error was counted")
        s.check(stat.get("last_error"), "no word of what happened")
        # Anew, in the same server.
        for _ in range(2):
            status, _ = server.call("POST", "/slots/0?action=erase", {})
            s.check_equal(status, 200, "erasing the slot")
        fresh = server.tokens(prompt, 24)
        s.check_equal(server.tokens(prompt, 24), resident, "recomputed, then cached")
        server.evict("100%")
        s.check_equal(server.tokens(prompt, 24), resident, "evicted and restored later")
        s.check_equal(len(fresh), 24, "recomputed")


s.main(body)
