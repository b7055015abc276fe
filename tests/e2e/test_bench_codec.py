#!/usr/bin/env python3
"""neap bench codec on a small model: rows of every codec whose bytes can be counted by hand; LowRAM's
count its fit, and it is left out where the context is too short for it; a trained klt of four layers
has rows beside one of single heads (with NEAP_TEST_ALL=1: training takes longer than all the rest).
No speed decides."""

import json
import os

import klt_training
import support as s

# K and V of SmolLM2: 30 layers, 3 heads of 64, f16.
TOKEN_BYTES = 30 * 2 * 3 * 64 * 2
RATIOS = {"none": (0.99, 1), "q8": (1.8, 2), "lowram-4": (3.7, 4.3), "lowram-6": (5.4, 6.6)}
FIT_KEYS = {"fit_bytes", "fit_seconds", "fit_seconds_range"}


def bench(env, context, reps):
    done = s.neap(env, "bench", "codec", "--json", "--model", s.SMOLLM2, "--context", str(context),
                  "--reps", str(reps), limit_s=500)
    rows = {row["codec"]: row for row in json.loads(done.stdout)["rows"]}
    for name, row in rows.items():
        s.say(f"{name}: {row}")
        s.check_equal((row["context"], row["reps"], row["raw_bytes"]),
                      (context, reps, context * TOKEN_BYTES), name)
        s.check(abs(row["ratio"] * row["coded_bytes"] / row["raw_bytes"] - 1) < 1e-9, row)
        s.check(row["repeatable"], row)
        s.check_equal(row["idempotent"], not name.startswith(("klt", "lowram")), name)
        s.check(row["compress_gbps"] > 0 and row["decompress_gbps"] > 0, row)
        s.check_equal(FIT_KEYS <= set(row), name.startswith("lowram"), f"{name}: keys of a fit")
    return rows, done.stderr


def check_lowram(rows):
    for name in ("lowram-4", "lowram-6"):
        row = rows[name]
        seconds = row["fit_seconds_range"]
        s.check(0 < seconds["min"] <= row["fit_seconds"] <= seconds["max"], row)
        s.check(0 < row["fit_bytes"] < row["coded_bytes"], row)
        s.check_equal(row["model_bytes"], 0, name)
    s.check(0 < rows["lowram-4"]["error"] < rows["lowram-6"]["error"] < 0.5, "errors of LowRAM")


def body(work):
    cache = s.own_cache(work)
    env = dict(os.environ, XDG_CACHE_HOME=cache, XDG_RUNTIME_DIR=s.runtime_dir(work),
               NEAP_PROFILE="off")
    if s.ALL:
        for profile in ("head", "joint"):
            klt_training.train(cache, s.SMOLLM2, profile, 4)
    rows, said = bench(env, 1536, 2)
    for name, (least, most) in RATIOS.items():
        s.check(name in rows, f"no row {name}: {sorted(rows)}\n{said}")
        s.check(least <= rows[name]["ratio"] <= most, rows[name])
    s.check(rows["none"]["exact"] and not rows["lowram-4"]["exact"], "what is exact")
    check_lowram(rows)
    if s.ALL:
        for name in ("klt-head-4", "klt-head-6", "klt-joint-4", "klt-joint-8"):
            s.check(name in rows, f"no row {name}: {sorted(rows)}")
    rows, said = bench(env, 256, 1)
    s.check("lowram-4" not in rows and "lowram-4 is left out: the context is too short" in said,
            f"{sorted(rows)}\n{said}")


s.main(body)
