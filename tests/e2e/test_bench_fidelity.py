#!/usr/bin/env python3
"""neap bench fidelity: the rows and figures of a small model on two short texts. What is exact moves
nothing, what is coarse moves much, ratios are those that can be counted by hand; a trained klt has a
row (with NEAP_TEST_ALL=1: training takes longer than all the rest); what cannot be measured is
refused by name. Dropped tokens are not looked at, and count. LowRAM's options do what they say. Contexts
kept between runs change nothing, damaged ones are read again; an interrupted run gives the rows of what
it has measured. Of tasks that are done nothing is lost by what is exact, and much by what is coarse."""

import glob
import json
import os
import shutil
import signal
import subprocess
import time

import support as s

CONTEXT = 512
KEYS = {"model", "context", "method", "ratio", "kl", "kl_low", "kl_high", "ppl_ratio",
        "top1_agreement", "key_error", "value_error", "task_score", "task_baseline", "model_bytes", "texts"}
TEXTS = ["/usr/share/common-licenses/GPL-3", os.path.join(s.ROOT, "src", "attn", "tile.h")]
# Least and greatest ratio; bits of an element and of what a group of them shares.
RATIOS = {"none": (0.99, 1), "q8": (1.8, 2), "q4_0": (3.555, 3.556),
          "q4_0-rotated": (3.555, 3.556), "turboquant-centred:4": (3.7, 3.77),
          "kivi:1": (2.85, 2.95), "xkv:4": (3.9, 4.1)}
if s.ALL:
    RATIOS["klt-head:4"] = (3.5, 4.1)


BAD_OPTIONS = ["q8/g=2", "lowram:2/", "lowram:2/h=2", "lowram:2/g=9", "lowram:2/g=1.5", "lowram:2/g=",
               "lowram:2/a=9", "lowram:2/linear=1", "lowram:2/p=nan", "lowram-e:4/v-from-k",
               "lowram:2/shared/start-warm", "lowram:2/k-from-v/start-slim"]


def environment(work):
    cache = s.own_cache(work)
    env = {k: v for k, v in os.environ.items() if not k.startswith("NEAP_")}
    env.update(XDG_CACHE_HOME=cache, XDG_RUNTIME_DIR=s.runtime_dir(work), NEAP_PROFILE="off",
               NEAP_PRESSURE="off", OMP_WAIT_POLICY="passive", OPENBLAS_NUM_THREADS="1")
    return env


def neap(env, *args, status=0):
    return s.neap(env, *args, status=status, limit_s=550)


def fidelity_args(*args):
    texts = [arg for text in TEXTS for arg in ("--text", text)]
    return ["bench", "fidelity", "--model", s.SMOLLM2, "--weights", "own", *texts, *args]


def fidelity(env, *args, status=0):
    return neap(env, *fidelity_args(*args), status=status)


def refusals(env):
    for args, status, text in ((("--method", "q9"), 2, "q9"),
                               (("--method", "kivi:x"), 2, "kivi:x"),
                               (("--method", "klt-head:4"), 1, "neap train"),
                               (("--method", "lowram-eq:8"), 1, "neap train"),
                               (("--method", "lowram-e:2"), 2, "lowram-e:2"),
                               (("--method", "lowram:2/start-warm"), 1, "neap train"),
                               *((("--method", name), 2, name) for name in BAD_OPTIONS),
                               (("--klt-file", TEXTS[0]), 1, "GPL-3"),
                               (("--method", "none", "--context", "100000"), 1, "too few"),
                               (("--weights", "f64"), 2, "f64")):
        said = fidelity(env, *args, "--context", str(CONTEXT), *args, status=status).stderr
        s.check(text in said, f"{args}: {said}")


def training_text(work):
    """Enough to see that it works, not to work well."""
    path = os.path.join(work, "text")
    with open(os.path.join(s.ROOT, "share", "calibration", "01-devils-dictionary-en.txt"),
              encoding="utf-8") as file, open(path, "w", encoding="utf-8") as out:
        out.write(file.read(12000))
    return path


def rows_of(env, *args, context=CONTEXT):
    shown = json.loads(fidelity(env, "--context", str(context), "--json", *args).stdout)
    rows = {row["method"]: row for row in shown["rows"]}
    for name, row in rows.items():
        s.say(f"{name}: {row}")
        s.check(KEYS <= set(row), f"{name}: keys missing: {KEYS - set(row)}")
        s.check(row["context"] == context and row["texts"] == 2, row)
        s.check(row["kl_low"] <= row["kl"] <= row["kl_high"], row)
    return rows


def check_texts(rows):
    s.check_equal(list(rows), ["f16-fa-off", *RATIOS], "rows in the order asked for")
    for name, (least, most) in RATIOS.items():
        s.check(least <= rows[name]["ratio"] <= most, f"{name}: ratio {rows[name]['ratio']}")
    s.check(rows["none"]["kl"] == 0 and rows["none"]["top1_agreement"] == 1, "none is not exact")
    s.check_equal(rows["none"]["ppl_ratio"], 1, "perplexity of none")
    for name in ("f16-fa-off", "q8"):
        s.check(0 < rows[name]["kl"] < 0.05, f"{name} moves too much, or nothing")
    s.check(rows["kivi:1"]["kl"] > 0.2 and rows["kivi:1"]["top1_agreement"] < 0.9, "one bit is kept?")
    s.check(rows["q8"]["kl"] < rows["q4_0"]["kl"] < rows["kivi:1"]["kl"], "order")
    s.check_equal(rows["q8"]["model_bytes"], 0, "model bytes of q8")
    if s.ALL:
        klt = rows["klt-head:4"]
        s.check(klt["kl"] < rows["xkv:4"]["kl"] and klt["model_bytes"] > 0, klt)
    s.check_equal(rows["none"]["task_score"], None, "no tasks were asked for")


def check_evictions(rows):
    """Ratios are those of all tokens, whatever of them is dropped and whatever compressed."""
    s.check_equal(rows["none"]["kept_share"], 1, "all tokens are kept")
    for name, share, ratio in (("evict-mass:2", 1 / 2, 2), ("evict-mass:4", 1 / 4, 4),
                               ("lowram-e-mass:4", 1 / 2, 4), ("lowram-eq-mass:4", 1 / 2, 4)):
        s.check_equal(rows[name]["kept_share"], share, f"{name}: tokens kept")
        s.check(0.9 * ratio < rows[name]["ratio"] < 1.02 * ratio, f"{name}: {rows[name]['ratio']}")
    s.check(1.99 < rows["evict-mass:2"]["ratio"] < 2, "what says which tokens are kept counts")
    # What is kept of evict-mass is exact: only that the others are gone can move anything.
    s.check(0 < rows["evict-mass:2"]["kl"] < rows["evict-mass:4"]["kl"], "more dropped, no worse")
    s.check(rows["evict-mass:2"]["kl"] < rows["lowram-e-mass:4"]["kl"], "LowRAM costs nothing")


def check_options(env):
    """One half is exact where only the other is predicted; what is left out is missed."""
    base = "lowram:2/v-from-k"
    names = [base, *(base + option for option in (
                 "/p=1", "/no-residuals", "/random-residuals", "/adam=5", "/adam=5/fixed-linear")),
             "lowram:2/v-from-previous-v", "lowram:2/k-from-v", "xkv-v:2",
             "lowram-q:3/g=2", "lowram-q:3/g=2/b=4/exact=0"]
    rows = rows_of(env, "--tasks", "0", "--method", ",".join(names), context=1024)
    s.check_equal(list(rows), names, "rows in the order asked for")
    for name, row in rows.items():
        s.check((row["key_error"] == 0) == ("v-from" in name or "-v:" in name), f"{name}: keys")
        s.check((row["value_error"] == 0) == ("k-from" in name), f"{name}: values")
    # All of one half and a half of the other: 4/3.
    for name in (base, "lowram:2/v-from-previous-v", "lowram:2/k-from-v", "xkv-v:2"):
        s.check(1.3 < rows[name]["ratio"] < 1.34, f"{name}: ratio {rows[name]['ratio']}")
    error = {name: row["value_error"] for name, row in rows.items()}
    s.check(error[base + "/p=1"] < 1e-5 and rows[base + "/p=1"]["ratio"] < 1, "all residuals kept")
    s.check(rows[base + "/no-residuals"]["ratio"] > 1.5, "residuals cost nothing")
    s.check(error[base + "/no-residuals"] > error[base + "/random-residuals"] > error[base], error)
    s.check(error[base + "/adam=5"] > error[base], "five updates are as good as the closed form")
    s.check(error[base + "/adam=5/fixed-linear"] != error[base + "/adam=5"], "fixed-linear is not")
    coarse = rows["lowram-q:3/g=2/b=4/exact=0"]
    fine = rows["lowram-q:3/g=2"]
    s.check(coarse["key_error"] < fine["key_error"], "what B saves in 4 bits gives no rank")
    s.check(coarse["kl"] > 2 * fine["kl"], "the first tokens are as good as any")


KEPT_METHODS = ("--tasks", "0", "--method", "f16-fa-off,none,evict-mass:2,kivi:1")


def kept_states(env):
    return sorted(glob.glob(os.path.join(env["XDG_CACHE_HOME"], "neap", "bench", "state-own-*.bin")))


def check_kept(env, rows):
    """rows: of the run that kept the contexts."""
    states = kept_states(env)
    s.check_equal(len(states), 2, "contexts kept")
    s.check_equal(rows_of(env, *KEPT_METHODS, context=1024), rows, "rows from kept contexts")
    with open(states[0], "r+b") as file:
        file.seek(1000000)
        byte = file.read(1)
        file.seek(1000000)
        file.write(bytes([byte[0] ^ 1]))
    s.check_equal(rows_of(env, *KEPT_METHODS, context=1024), rows, "rows after damage")
    # That they are used: with another text's context in its place nothing is as it was.
    shutil.copy(states[0], states[1])
    s.check(rows_of(env, *KEPT_METHODS, context=1024) != rows, "kept contexts are not used")
    os.unlink(states[1])


def check_interrupted(env):
    for path in kept_states(env):
        os.unlink(path)
    args = fidelity_args("--context", "1024", "--json", "--tasks", "0", "--method",
                         "none,lowram:4,lowram:3,lowram:2")
    running = subprocess.Popen([s.NEAP, *args], env=env, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 300
    while len(kept_states(env)) < 2 and running.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=300)
    s.check(running.returncode == 1 and "stopped" in err, f"{running.returncode}: {err}")
    rows = json.loads(out)["rows"]
    s.check_equal([row["texts"] for row in rows], [1] * 4, "rows of the first text")


def check_tasks(rows):
    none, coarse = rows["none"], rows["kivi:1"]
    s.check(4.2 < coarse["ratio"] < 4.3, "ratio with tasks")  # 2 bits, and 16 of 128 tokens
    s.check_equal(list(none["tasks"]), ["needle", "multi-key", "variables", "common-words"], "kinds")
    s.check(none["tasks"]["needle"]["baseline"] > 0.5, "needles are not found uncompressed")
    s.check_equal((none["task_score"], none["task_lost"]), (none["task_baseline"], 0), "exact tasks")
    s.check_equal(coarse["task_baseline"], none["task_baseline"], "one baseline")
    s.check(coarse["task_score"] < none["task_score"] and coarse["task_lost"] > 0, "coarse tasks")


def body(work):
    env = environment(work)
    refusals(env)
    if s.ALL:
        neap(env, "train", s.SMOLLM2, "--profile", "head", training_text(work))
    check_texts(rows_of(env, "--tasks", "0", "--method", ",".join(["f16-fa-off", *RATIOS])))
    check_evictions(rows_of(env, "--tasks", "0", "--method", "none,evict-mass:2,evict-mass:4,"
                            "lowram-e-mass:4,lowram-eq-mass:4", context=1024))
    check_options(env)
    check_kept(env, rows_of(env, *KEPT_METHODS, context=1024))
    check_interrupted(env)
    check_tasks(rows_of(env, "--tasks", "2", "--method", "none,kivi:1", context=1024))


s.main(body)
