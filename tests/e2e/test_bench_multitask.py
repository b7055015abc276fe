#!/usr/bin/env python3
"""neap bench multitask, small: every side and round is in the rows, memory really went to the other
program, and neither the memory group nor the zRAM device stays behind, also when it is ended."""

import glob
import json
import os
import signal
import subprocess
import time

import groups
import support as s

ROUNDS = 2


def devices():
    return sorted(glob.glob("/sys/block/zram*"))


def own_groups():
    return [path for top in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup")
            for path in glob.glob(top + "/neap-paging-*")]


def command(work):
    env = dict(os.environ, XDG_CACHE_HOME=os.path.join(work, "cache"),
               XDG_RUNTIME_DIR=s.runtime_dir(work))
    return {"args": [s.NEAP, "bench", "multitask", "--json", "--model",
                     os.path.join(s.MODELS, s.SMOLLM2 + ".gguf"), "--context", "256",
                     "--rounds", str(ROUNDS)],
            "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def gone(before):
    """Other programs may have devices and groups of their own: those here before may go, too."""
    for _ in range(200):
        if set(devices()) <= set(before[0]) and set(own_groups()) <= set(before[1]):
            return True
        time.sleep(0.1)
    return False


def whole(work):
    before = devices(), own_groups()
    done = subprocess.run(**command(work), check=False)
    s.check_equal(done.returncode, 0, "exit status")
    if "another program holds the model's pages" in done.stderr:
        raise s.Skipped("another program holds the model's pages")
    out = json.loads(done.stdout)
    rows = out["rows"]
    sides = ["stock", "neap-15", "neap-25", "neap"]
    s.check_equal([(r["side"], r["round"]) for r in rows],
                  [(side, n + 1) for side in sides for n in range(ROUNDS)], "rows")
    s.check(out["limit_bytes"] > out["footprint_bytes"] > 100 * s.MIB, f"sizes: {out}")
    for row in rows:
        s.check(row["killed"] in ("none", "server", "competitor", "both"), f"killed: {row}")
        s.check(row["killed"] != "none" or row["ttft_ms"] > 0, f"no answer: {row}")
        if row["killed"] in ("none", "server"):
            wanted = 0.8 * out["footprint_bytes"] * row["round"] / ROUNDS
            s.check(abs(row["competitor_bytes"] - wanted) <= 2 * s.MIB, f"not {wanted}: {row}")
    s.check(any(r["signals"] > 0 for r in rows if r["side"] == "neap-25"), f"no signal: {rows}")
    s.check_equal([t["side"] for t in out["summary"]], sides, "summary")
    s.check(gone(before), f"left behind: {devices()}, {own_groups()}; before {before}")


def ended(work):
    before = devices(), own_groups()
    # pylint: disable-next=consider-using-with
    process = subprocess.Popen(**command(work))
    for _ in range(600):
        if set(own_groups()) > set(before[1]):
            break
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=30)
    process.stdout.close()
    s.check(gone(before), f"left behind when ended: {devices()}, {own_groups()}; before {before}")


def body(work):
    groups.Group(f"neap-test-{os.getpid()}", 64 * s.MIB).remove()  # or skipped
    if not os.path.exists("/sys/class/zram-control/hot_add"):
        raise s.Skipped("no zRAM device can be made")
    whole(work)
    ended(work)


s.main(body)
