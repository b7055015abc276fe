#!/usr/bin/env python3
"""neap bench ttft, whole but tiny: rows and plot of several contexts, one of them tiled; a model file
cut short is written again, byte for byte; os-paging takes its zRAM device and its group away, also
when the benchmark is killed; nothing is left but what serves the next run. No figure decides."""

import contextlib
import glob
import hashlib
import json
import os
import signal
import subprocess
import time
import xml.etree.ElementTree

import support as s

MODEL, FILE = "tiny-shape", "tiny-shape-1.gguf"
SIDES = [("partial-offload", "auto"), ("partial-offload", "ggml"), ("hybrid", "auto")]
PAGING = ("os-paging", "ggml")
KEYS = {"context", "remaining", "remaining_measured", "remaining_matched", "policy", "codec", "attn",
        "reps", "ttft_ms", "phase_ms", "bytes", "bound_ms", "ratio_to_partial_offload",
        "ratio_to_partial_offload_range", "added_ratio_to_partial_offload", "ratio_to_os_paging",
        "ratio_to_resident", "cpu_s", "top1_agreement", "output_identical"}


def environment(work):
    s.model_path(s.QWEN)  # whose tokenizer is copied
    cache = s.own_cache(work)
    env = {name: value for name, value in os.environ.items() if not name.startswith("NEAP_")}
    env.update(XDG_CACHE_HOME=cache, XDG_RUNTIME_DIR=s.runtime_dir(work), NEAP_PROFILE="off")
    return env, os.path.join(cache, "neap", "bench")


def arguments(*more):
    return ["bench", "ttft", "--model", MODEL, "--reps", "1", *more]


def bench(env, *args, status=0):
    return s.neap(env, *arguments(*args), status=status, limit_s=500)


def digest(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def check_rows(rows, expected):
    got = [(r["context"], r["remaining"], r["policy"], r["attn"]) for r in rows]
    s.check_equal(sorted(got), sorted(expected), "rows")
    for row in rows:
        s.check(KEYS <= set(row), f"keys missing: {KEYS - set(row)}")
        s.check(row["output_identical"] and row["reps"] == 1, row)
        times = row["ttft_ms"]
        s.check(0 < times["min"] <= times["median"] <= times["max"], row)


def check_plot(path, contexts, sides):
    svg = xml.etree.ElementTree.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    texts = [t.text for t in svg.iter(space + "text")]
    for context in contexts:
        s.check(f"context of {context} tokens" in texts, f"{context}: not among {texts}")
    for side in sides:
        s.check_equal(texts.count(side), 1, f"{side} in the legend")
    s.check_equal(texts.count("remaining in memory, %"), len(contexts), "x axes")
    lines = [p.get("points").split() for p in svg.iter(space + "polyline")]
    s.check_equal(len(lines), len(contexts) * len(sides), "lines")
    s.check(all(len(points) == 2 for points in lines), f"two levels a line: {lines}")


def grids(work, env, folder):
    plot = os.path.join(work, "plot.svg")
    done = bench(env, "--context", "256,2304", "--remaining", "0", "--json", "--plot", plot)
    rows = json.loads(done.stdout)["rows"]
    check_rows(rows, [(context, share, *side) for context in (256, 2304) for share in (0, 1)
                      for side in SIDES])
    s.check(all(r["ratio_to_os_paging"] is None for r in rows), "no paging was asked for")
    for row in rows:
        if row["remaining"] == 0:  # K and V of 3 layers, 2 heads of 32, f16
            s.check(sum(row["bytes"].values()) >= row["context"] * 3 * 2 * 64 * 2, row)
    check_plot(plot, (256, 2304), ["partial-offload", "partial-offload ggml", "hybrid"])
    # The piece that the large context was tiled from; neither what was tiled nor the small one.
    names = sorted(os.listdir(folder))
    s.check(len(names) == 2 and names[0].startswith("ctx-") and names[1] == FILE, names)


def model_file_cut_short(env, folder):
    path = os.path.join(folder, FILE)
    before = digest(path)
    os.truncate(path, os.path.getsize(path) // 2)
    bench(env, "--context", "64", "--remaining", "100")
    s.check_equal(digest(path), before, "model written again")


def read(path):
    with open(path, encoding="ascii") as text:
        return text.read()


def group_dirs(pid):
    return [d for top in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup")
            for d in glob.glob(f"{top}/neap-paging-{pid}")]


def paging_possible():
    if os.geteuid() != 0 or not os.path.exists("/sys/class/zram-control/hot_add"):
        return False
    controllers = "/sys/fs/cgroup/cgroup.controllers"
    return (os.path.exists("/sys/fs/cgroup/memory/memory.stat")
            or os.path.exists(controllers) and "memory" in read(controllers))


def paging(env):
    done = bench(env, "--context", "256", "--remaining", "0", "--policy", "os-paging", "--json")
    rows = json.loads(done.stdout)["rows"]
    expected = [(256, share, *side) for share in (0, 1) for side in SIDES]
    if "os-paging is left out" in done.stderr:
        check_rows(rows, expected)
        s.check(not paging_possible(), done.stderr)
        s.say(done.stderr.strip())
        return
    check_rows(rows, [*expected, (256, 0, *PAGING)])
    for row in rows:
        s.check((row["ratio_to_os_paging"] is not None)
                == (row["remaining"] == 0 and row["policy"] != "os-paging"), row)
        if row["policy"] == "os-paging":
            # It went out: all of the model's file and the context came back for the answer.
            s.check(row["bytes"]["storage"] > 16 * s.MIB and row["bytes"]["memory"] > 0, row)


def children(pid):
    with contextlib.suppress(OSError):
        return [int(n) for n in read(f"/proc/{pid}/task/{pid}/children").split()]
    return []


def gone(what, limit_s=60):
    """Waits until what() is empty."""
    deadline = time.monotonic() + limit_s
    while what() and time.monotonic() < deadline:
        time.sleep(0.05)
    s.check(not what(), f"still there: {what()}")


def group_in_use(process):
    """(helper, folder) of the group once a server runs in it; by then the device is there, too."""
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        for child in children(process.pid):
            for folder in group_dirs(child):
                if read(folder + "/cgroup.procs").strip():
                    return child, folder
        time.sleep(0.01)
    raise s.Failed("no server ran in a group")


def killed(env):
    """Killed with the group and the device there: the helper takes them away."""
    before = zram_devices()
    for number in (signal.SIGINT, signal.SIGKILL):
        command = [s.NEAP, *arguments("--context", "256", "--remaining", "0", "--policy",
                                      "os-paging")]
        with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            helper, folder = group_in_use(process)
            process.send_signal(number)
        gone(lambda at=folder: os.path.exists(at))
        gone(lambda pid=helper: os.path.exists(f"/proc/{pid}"))
    gone(lambda: zram_devices() - before)


def zram_devices():
    return set(glob.glob("/sys/block/zram*"))


def bad_options(env):
    for args in (["--context", "32"], ["--context", "512,"], ["--context", "512,x"],
                 ["--policy", "os-paging", "--remaining", "50"], ["--policy", "no-such"],
                 ["--policy", "hybrid", "--policy", "hybrid"]):
        done = bench(env, *args, status=2)
        s.check(done.stdout == "" and done.stderr.startswith("neap: "), done.stderr)
    done = bench(env, "--plot", "/nowhere/x.svg", status=1)
    s.check("/nowhere/x.svg" in done.stderr, done.stderr)


def body(work):
    env, folder = environment(work)
    bad_options(env)
    grids(work, env, folder)
    model_file_cut_short(env, folder)
    paging(env)
    if paging_possible():
        killed(env)


s.main(body)
