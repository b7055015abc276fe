#!/usr/bin/env python3
"""neap bench decode, whole but tiny: rows of every method for one sequence and two, bytes of the
caches, plot; a context is read once and used again, but anew for the time to the first token; one
that the model has no room for is cut. No figure decides."""

import json
import os
import xml.etree.ElementTree

import shape_models
import support as s

CONTEXT = 320
METHODS = ["f16-neap", "q4_0-neap", "f16", "q4_0"]
# K and V of SmolLM2: 30 layers, 3 heads of 64, f16.
F16_BYTES = CONTEXT * 30 * 2 * 3 * 64 * 2


def bench(env, *args, status=0):
    return s.neap(env, "bench", "decode", *args, status=status, limit_s=500)


def check_row(row, reps):
    s.check_equal(row["reps"], reps, row)
    s.check_equal(row["kv"], row["method"].removesuffix("-neap"), row)
    s.check(0 < row["tps_range"]["min"] <= row["tps"] <= row["tps_range"]["max"], row)
    if row["method"] == "f16":
        s.check_equal(row["ratio_to_f16"], 1, row)
    s.check(row["ratio_to_f16"] > 0 and row["ratio_to_neap"] > 0, row)
    s.check_equal(row["program"], "neap" if row["method"].endswith("-neap") else "llama.cpp", row)
    bits = {"f16": 16, "q8_0": 8.5, "q4_0": 4.5}[row["method"].split("-")[0]]
    s.check(row["tasks"] is None, row)
    if row["method"].startswith("f16"):
        s.check_equal(row["top1_agreement"], 1, row)
    s.check(0 <= row["top1_agreement"] <= 1, row)
    share = row["kv_bytes"] / (F16_BYTES * row["batch"] * bits / 16)
    s.check(1 <= share < 1.2, f"{share} of the bytes: {row}")  # of neap with what was generated


def body(work):
    cache = s.own_cache(work)
    env = dict(os.environ, XDG_CACHE_HOME=cache, XDG_RUNTIME_DIR=s.runtime_dir(work),
               NEAP_PROFILE="off")
    common = ["--model", s.SMOLLM2, "--context", str(CONTEXT), "--threads", "1", "--json"]  # two would wait for each other on a busy machine
    plot = os.path.join(work, "plot.svg")
    done = bench(env, *common, "--method", ",".join(METHODS), "--reps", "2", "--batch", "1,2",
                 "--plot", plot)
    rows = json.loads(done.stdout)["rows"]
    s.check_equal([(r["batch"], r["method"]) for r in rows],
                  [(batch, method) for batch in (1, 2) for method in METHODS], "rows")
    for row in rows:
        check_row(row, 2)
    texts = [t.text for t in xml.etree.ElementTree.parse(plot).getroot().iter(
        "{http://www.w3.org/2000/svg}text")]
    for text in (*METHODS, "batch 1", "batch 2", f"context of {CONTEXT} tokens"):
        s.check(text in texts, f"{text} is not in the plot")

    folder = os.path.join(cache, "neap", "bench")
    files = {name: os.stat(os.path.join(folder, name)).st_mtime_ns for name in os.listdir(folder)}
    s.check_equal(len(files), 4, f"a file for each type and batch: {files}")
    done = bench(env, *common, "--reps", "1", "--method", "q4_0,f16-neap")
    rows = json.loads(done.stdout)["rows"]
    s.check_equal([r["method"] for r in rows], ["q4_0", "f16-neap"], "methods, as asked for")
    s.check(all(r["ratio_to_f16"] is None and r["ratio_to_neap"] > 0 for r in rows), rows)
    s.check_equal({name: os.stat(os.path.join(folder, name)).st_mtime_ns
                   for name in os.listdir(folder)}, files, "files of the second run")

    done = bench(env, *common, "--reps", "1", "--method", "klt,f16-neap", status=1)
    s.check_equal([r["method"] for r in json.loads(done.stdout)["rows"]], ["f16-neap"],
                  "rows without the method that nothing was trained for")
    s.check_equal(done.stderr.count("neap train"), 1, done.stderr)

    done = bench(env, *common, "--reps", "2", "--method", "f16-neap,f16", "--batch", "2", "--prefill",
                 "--plot", plot)
    for row in json.loads(done.stdout)["rows"]:
        span = row["ttft_ms_range"]
        s.check("tps" not in row and 0 < span["min"] <= row["ttft_ms"] <= span["max"], row)
        s.check_equal((row["batch"], row["reps"]), (2, 2), row)
        s.check(F16_BYTES * 2 <= row["kv_bytes"] < F16_BYTES * 2.4, row)
    with open(plot, encoding="utf-8") as file:
        s.check("milliseconds" in file.read(), "the unit is not in the plot")

    model = os.path.join(work, "dense.gguf")  # trained for 4096 tokens, of which 256 are generated
    shape_models.write(model, s.model_path(s.SMOLLM2), "dense")
    done = bench(env, "--model", model, "--context", "9000", "--method", "f16-neap", "--reps", "1",
                 "--json")
    s.check_equal(json.loads(done.stdout)["rows"][0]["context"], 3840, "context with room")
    s.check("context of 3840 instead of 9000" in done.stderr, done.stderr)

    done = bench(env, "--model", s.SMOLLM2, "--context", "1024", "--method", "f16-neap,f16", "--reps",
                 "1", "--tasks", "1", "--json")
    tasks = [row["tasks"] for row in json.loads(done.stdout)["rows"]]
    s.check(tasks[0]["of"] >= 4 and 0 < tasks[0]["right"] <= tasks[0]["of"], tasks)
    s.check(tasks[1]["of"] == tasks[0]["of"] and abs(tasks[1]["right"] - tasks[0]["right"]) <= 1, tasks)

    for args in (["--context", "8"], ["--batch", "1,"], ["--method", "f32"], ["--method", ""], ["--tasks", "x"]):
        done = bench(env, *args, status=2)
        s.check(done.stdout == "" and done.stderr.startswith("neap: "), done.stderr)
    done = bench(env, "--plot", "/nowhere/x.svg", status=1)
    s.check("/nowhere/x.svg" in done.stderr, done.stderr)


s.main(body)
