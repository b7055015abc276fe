#!/usr/bin/env python3
"""neap train makes a model file that codes the cache of a text it has not seen; what it cannot learn
from, and files that are damaged or another model's, are refused by name."""

import json
import os
import re
import subprocess

import support as s

CALIBRATION = os.path.join(s.ROOT, "share", "calibration")
KLT_SLOT = os.path.join(s.BUILD, "tests", "klt_slot")
UNSEEN = "/usr/share/common-licenses/GPL-3"
TOKENS = 700  # no multiple of 256: klt_slot tells layers apart by their last chunk


def train(work, *args, status=0):
    env = {k: v for k, v in os.environ.items() if not k.startswith("NEAP_")}
    env.update(XDG_CACHE_HOME=work, XDG_RUNTIME_DIR=s.runtime_dir(work), NEAP_PROFILE="off",
               NEAP_PRESSURE="off", OMP_WAIT_POLICY="passive")
    return s.neap(env, "train", *args, status=status, limit_s=1200)


def refusals(work, model, short):
    for args, status, text in (((), 2, "which model?"),
                               ((model, "--ratio", "1"), 2, "--ratio 1"),
                               ((model, "--tokens", "many"), 2, "--tokens many"),
                               ((model, "--profile", "wide"), 2, "--profile wide"),
                               ((model, os.path.join(work, "none")), 1, "No such file"),
                               ((short,), 1, "not a model"),
                               ((model, short), 1, "too few")):
        said = train(work, *args, status=status).stderr
        s.check(text in said or text == "not a model" and short in said, f"{args}: {said}")


def training_texts(work):
    """Some of each kind: enough to see that it works, not to work well."""
    texts = []
    for name in ("01-devils-dictionary-en.txt", "05-own-code-c.txt", "07-own-documents.txt"):
        with open(os.path.join(CALIBRATION, name), encoding="utf-8") as file:
            head = file.read(5000)
        texts.append(os.path.join(work, name))
        with open(texts[-1], "w", encoding="utf-8") as file:
            file.write(head)
    return texts


def told_without_terminal(work, model, texts):
    """No bar; once it is done, what was learned, from how much, in what time, and where it is."""
    done = train(work, model, *texts, "--profile", "head")
    s.check_equal(done.stderr, "", "said while it learned")
    first, *_, last = done.stdout.splitlines()
    s.check(re.fullmatch(r".*: 30 layers, learned from \d+ tokens in \d+ s", first), done.stdout)
    s.check(last.startswith("head ") and os.path.isfile(last.split()[-1]), done.stdout)


def save_slot(work):
    with open(UNSEEN, encoding="ascii") as file:
        text = file.read(8000)
    with s.Server(work, s.SMOLLM2, ctx=1024, backend=False) as server:
        tokens = server.tokenize(text)[:TOKENS]
        s.check_equal(len(tokens), TOKENS, "tokens of the text")
        server.complete(tokens, 0)
        return server.slot_save("slot")


def code(path, digest, slot):
    return subprocess.run([KLT_SLOT, path, digest, slot], capture_output=True, text=True,
                          timeout=300, check=False)


def body(work):
    model = s.model_path(s.SMOLLM2)
    short = os.path.join(work, "short")
    with open(short, "w", encoding="ascii") as file:
        file.write(s.prose(7, 100))
    refusals(work, model, short)
    texts = training_texts(work)
    told_without_terminal(work, model, texts)
    shown = json.loads(train(work, model, *texts, "--json").stdout)
    s.check(shown["layers"] == 30 and shown["layers_left"] == 0 and shown["weighed"], shown)
    s.check(shown["tokens"] >= 2048, shown)
    s.check_equal([(f["profile"], f["ratio"]) for f in shown["files"]],
                  [("head", 4.0), ("joint", 8.0)], "files")
    folder = os.path.join(work, "neap", "trained", shown["digest"])
    s.check_equal(sorted(os.listdir(folder)), ["klt-head-4.bin", "klt-joint-8.bin", "lowram.bin"],
                  folder)
    learned = shown["lowram"]
    s.say(f"lowram: {learned}")
    s.check_equal(os.path.getsize(learned["path"]), learned["bytes"], "size said")
    s.check(learned["heads"] == 90 and learned["layers_slim"] == 30 and
            learned["layers_key_norm"] == 0, learned)
    s.check(0 < learned["linear"] < learned["warm"] < 1 and 0 < learned["meta"] < 1, learned)
    s.check(learned["attention_error"] < learned["attention_untrained"], learned)
    slot = save_slot(work)
    for made, limit in zip(shown["files"], (0.03, 0.1)):
        s.check_equal(os.path.getsize(made["path"]), made["bytes"], "size said")
        done = code(made["path"], shown["digest"], slot)
        s.check(done.returncode == 0, done.stderr)
        result = json.loads(done.stdout)
        s.say(f"{made['profile']}: {result}")
        s.check_equal(result["layers"], 30, "layers coded")
        # The first rows, kept exactly, weigh with so few tokens.
        s.check(abs(result["ratio"] / made["ratio"] - 1) < 0.08, result)
        s.check(0 < result["k_error"] < limit and 0 < result["v_error"] < limit, result)
    s.check(code(made["path"], "0" * 15 + "1", slot).returncode != 0, "another model's was taken")
    with open(made["path"], "r+b") as file:
        file.seek(made["bytes"] // 2)
        byte = file.read(1)[0]
        file.seek(made["bytes"] // 2)
        file.write(bytes([byte ^ 1]))
    done = code(made["path"], shown["digest"], slot)
    s.check(done.returncode != 0 and made["path"] in done.stderr, f"damaged: {done.stderr}")


s.main(body)
