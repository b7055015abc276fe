#!/usr/bin/env python3
"""neap profile measures, prints and keeps; an instance starts from what was kept, corrects it by its
restores and writes it back; a damaged file harms nothing. No figure decides, only what is there and
what follows from what."""

import json
import os
import stat
import time

import support as s

SIZES, DEPTHS = [64 << 10, 256 << 10, 1 << 20, 4 << 20], [1, 2, 4, 8]


def profile(env, *args, status=0):
    return s.neap(env, "profile", "--quick", *args, status=status, limit_s=300)


def is_rate(value):
    return isinstance(value, float) and 0 < value < 1e6


def check_schema(shown):
    s.check({"machine", "device", "file", "direct", "read", "decode", "populate", "rates", "chunk",
             "compute"} <= set(shown), f"keys {sorted(shown)}")
    s.check(set(shown["device"]) == {"source", "fstype", "number", "kernel", "cpu"}
            and all(isinstance(v, str) and v for v in shown["device"].values()), shown["device"])
    s.check_equal([(r["request_bytes"], r["depth"]) for r in shown["read"]],
                  [(size, depth) for size in SIZES for depth in DEPTHS], "reads")
    s.check(all(is_rate(r["gbps"]) for r in shown["read"]), shown["read"])
    s.check(isinstance(shown["direct"], bool), shown["direct"])
    n_threads = min(os.cpu_count(), 16)
    for codec in ("q8", "none"):
        s.check_equal([r["threads"] for r in shown["decode"] if r["codec"] == codec],
                      list(range(1, n_threads + 1)), f"threads of {codec}")
    s.check(all(is_rate(r["gbps"]) for r in shown["decode"]), shown["decode"])
    s.check(is_rate(shown["populate"]["small_gbps"]) and is_rate(shown["populate"]["huge_gbps"]),
            shown["populate"])
    for row in shown["rates"]:
        s.check(is_rate(row["read_gbps"]) and is_rate(row["decode_gbps"]), row)
    chunk = shown["chunk"]
    best = max(r["gbps"] for r in shown["read"])
    s.check(abs(chunk["best_gbps"] - best) < 1e-6 and 0 < chunk["gbps"] <= best, chunk)
    # The rates printed are rounded, so nothing is said of those that lie on the border.
    if abs(chunk["gbps"] - 0.9 * best) > 1e-6:
        s.check_equal(chunk["saturates"], chunk["gbps"] > 0.9 * best, "chunk")
    s.check(chunk["saturating_bytes"] in (None, *SIZES), chunk)


def measuring(work, env):
    done = profile(env, "--json")
    s.check(done.stderr == "", done.stderr)
    shown = json.loads(done.stdout)
    check_schema(shown)
    s.check(shown["compute"] is None and shown["chunk"]["bytes"] == 512 << 10, shown["chunk"])
    path = shown["file"]
    s.check(path.startswith(os.path.join(env["XDG_CACHE_HOME"], "neap", "profile")), path)
    s.check_equal(stat.S_IMODE(os.stat(path).st_mode), 0o600, "mode of the file")
    s.check_equal(os.listdir(env["NEAP_SWAP_DIR"]), [], "left in the swap folder")

    with open(path, "r+", encoding="ascii") as file:  # damaged: said, and measured again
        file.truncate(100)
    done = profile(env, s.model_path(s.SMOLLM2))
    s.check("damaged" in done.stderr and "KV chunk  192.0 KiB of smollm2" in done.stdout,
            done.stdout + done.stderr)
    with open(path, encoding="ascii") as file:
        kept = json.load(file)
    s.check([m["n_layers"] for m in kept["models"]] == [30] and kept["models"][0]["decode_ns"] > 0
            and kept["models"][0]["kv_chunk_bytes"] == 196608, kept["models"])
    profile(env, "--json")
    with open(path, encoding="ascii") as file:
        s.check_equal(json.load(file)["models"], kept["models"], "models after measuring again")

    off = json.loads(profile(dict(env, NEAP_PROFILE="off"), "--json").stdout)
    s.check(off["file"] is None, off["file"])
    wrong = profile(env, "--swap-dir", "/proc/none", "--json", status=1)
    s.check(wrong.stdout == "" and "(give another folder with --swap-dir)" in wrong.stderr,
            wrong.stderr)
    profile(env, "a", "b", status=2)
    # Measured, but not kept: shown all the same, and a failure.
    lost = profile(dict(env, NEAP_PROFILE="/proc/none/p.json"), "--json", status=1)
    check_schema(json.loads(lost.stdout))
    s.check("could not be kept" in lost.stderr, lost.stderr)
    return path


def instance(work, path, codec="q8"):
    """With a swap folder on the device that was measured."""
    return s.Server(work, s.SMOLLM2, codec=codec, ctx=512, env={"NEAP_PROFILE": path})


def rounds_until(server, source):
    for _ in range(50):
        if server.stat()["profile"]["source"] == source:
            return
        server.evict("100%", only="weights")
        server.restore()
    raise s.Failed(f"never {source}: {server.stat()['profile']}")


def written_back(path):
    """The file once an instance has replaced the rate of 1 byte a second."""
    deadline = time.monotonic() + 60
    while True:
        with open(path, encoding="ascii") as file:
            kept = json.load(file)
        if kept["restored_read_bps"] != 1:
            return kept
        s.check(time.monotonic() < deadline, "the profile was not written back in 60 s")
        time.sleep(0.05)


def using(work, path):
    with open(path, encoding="ascii") as file:
        kept = json.load(file)
    with instance(work, path) as server:
        s.check_equal(server.stat()["profile"]["source"], "measured", "source")
        answer = server.tokens("The river", 16)

    # Nothing is so slow: the restores are off from it, and then the file is no longer so either.
    kept["restored_read_bps"] = 1
    with open(path, "w", encoding="ascii") as file:
        json.dump(kept, file)
    with instance(work, path) as server:
        s.check_equal(server.stat()["profile"]["read_gbps"], 1e-9, "rate of the file")
        s.check("throughput" in server.neap("stat").stdout, "neap stat for people")
        rounds_until(server, "drifted")
        s.check(server.stat()["profile"]["read_gbps"] > 1e-6, server.stat()["profile"])
        s.check_equal(server.tokens("The river", 16), answer, "answer after restores")
        written = written_back(path)
    s.check(written["restored_read_bps"] > 1000, written["restored_read_bps"])
    s.check_equal(written["read"], kept["read"], "what was measured, after writing back")

    for content in (b"", b'{"neap_profile": 1, "device": {', b"\xff" * 100):
        with open(path, "wb") as file:
            file.write(content)
        with instance(work, path) as server:
            s.check_equal(server.stat()["profile"],
                          {"read_gbps": 1.5, "decode_gbps": 8.0, "source": "default"}, "damaged")
            with open(server.log_path, encoding="utf-8", errors="replace") as log:
                s.check("device profile" in log.read(), "no word of the damaged file")
            rounds_until(server, "measured")
            s.check_equal(server.tokens("The river", 16), answer, "answer with a damaged profile")


def body(work):
    env = {k: v for k, v in os.environ.items() if not k.startswith("NEAP_")}
    env.update(XDG_CACHE_HOME=os.path.join(work, "cache"), XDG_RUNTIME_DIR=s.runtime_dir(work),
               NEAP_SWAP_DIR=os.path.join(work, "swap"))
    using(work, measuring(work, env))


s.main(body)
