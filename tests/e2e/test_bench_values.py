#!/usr/bin/env python3
"""neap bench values against the number of steps: a row for each way of fitting that needs no training
and each number, more steps explain more, the plot has both panels; bad lists are refused. No time
decides."""

import json
import os
import xml.etree.ElementTree

import support as s

CONTEXT = 256
METHODS = ["adam-0", "adam-2", "adam-40", "ridge+0", "ridge+2"]


def bench(env, *args, status=0):
    return s.neap(env, "bench", "values", *args, status=status, limit_s=500)


def body(work):
    cache = s.own_cache(work)
    env = dict(os.environ, XDG_CACHE_HOME=cache, XDG_RUNTIME_DIR=s.runtime_dir(work),
               NEAP_PROFILE="off", OPENBLAS_NUM_THREADS="1")  # more yield to others for good
    plot = os.path.join(work, "plot.svg")
    done = bench(env, "--json", "--model", s.SMOLLM2, "--context", str(CONTEXT), "--threads", "1",
                 "--steps", "0,2,40", "--plot", plot)
    rows = {row["method"]: row for row in json.loads(done.stdout)["rows"]}
    s.check_equal(list(rows), METHODS, "rows")
    for name, row in rows.items():
        s.say(f"{name}: {row}")
        s.check_equal(f"{row['steps']}", name.replace("+", "-").split("-")[1], name)
        s.check(row["seconds"] > 0 and row["of_prefill"] > 0, row)
        s.check_equal((row["context"], row["of_reference"]), (CONTEXT, None), row)
        s.check(row["explained_least"] <= row["explained"] < 1, row)
    explained = [rows[name]["explained"] for name in METHODS]
    s.check(explained[0] < explained[1] < explained[2] < explained[3] < explained[4], explained)
    texts = [t.text for t in xml.etree.ElementTree.parse(plot).getroot().iter(
        "{http://www.w3.org/2000/svg}text")]
    for text in ("adam", "ridge", "steps"):
        s.check(text in texts, f"{text} is not in the plot")
    s.check(any("explained" in text for text in texts), texts)
    for args in (["--steps", "2,1"], ["--steps", "x"], ["--steps", "1,"]):
        done = bench(env, *args, status=2)
        s.check("--steps" in done.stderr, done.stderr)
    done = bench(env, "--plot", "/nowhere/x.svg", status=1)
    s.check("/nowhere/x.svg" in done.stderr, done.stderr)


s.main(body)
