#!/usr/bin/env python3
"""llama-completion, llama-perplexity, llama-bench and llama-cli run as they are, with the same
results as without neap."""

import json
import os
import re
import subprocess

import support as s


def run(work, command, through_neap):
    env = {k: v for k, v in os.environ.items() if not k.startswith("NEAP_")}
    env.update(XDG_RUNTIME_DIR=s.runtime_dir(work), NEAP_SWAP_DIR=os.path.join(work, "swap"),
               NEAP_POISON="1", NEAP_ATTN="ggml", NEAP_PROFILE="off")
    program = os.path.join(s.BIN, command[0])
    line = [s.NEAP, "exec", "--", *command] if through_neap else [program, *command[1:]]
    done = subprocess.run(line, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=300, check=False)
    s.check(done.returncode == 0, f"{' '.join(line)}: exit {done.returncode}\n{done.stderr[-3000:]}")
    return done


def same(work, name, command, pick):
    stock = pick(run(work, command, False))
    s.check(stock, f"{name}: no result")
    s.check_equal(pick(run(work, command, True)), stock, name)
    s.say(f"{name}: identical")


def body(work):
    model = s.model_path(s.SMOLLM2)
    text = os.path.join(work, "text")
    with open(text, "w", encoding="ascii") as file:
        file.write(s.prose(141, 1500))
    same(work, "llama-completion",
         ["llama-completion", "-m", model, "-f", text, "-n", "32", "-c", "4096", "--temp", "0",
          "-no-cnv", "-t", "2"], lambda done: done.stdout)
    same(work, "llama-perplexity",
         ["llama-perplexity", "-m", model, "-f", text, "-c", "512", "--chunks", "2", "-t", "2"],
         lambda done: re.findall(r"PPL = ([0-9.]+)", done.stdout + done.stderr))
    same(work, "llama-cli",
         ["llama-cli", "-m", model, "-p", "Name a river.", "-n", "24", "--temp", "0", "-st",
          "--no-display-prompt", "--simple-io", "--log-disable", "-t", "2"],
         lambda done: re.sub(r"\[ Prompt:.*", "", done.stdout))
    done = run(work, ["llama-bench", "-m", model, "-p", "32", "-n", "8", "-r", "1", "-t", "2",
                      "-o", "json"], True)
    s.check_equal({row["n_prompt"] for row in json.loads(done.stdout)}, {32, 0}, "llama-bench")
    s.check("NEAP" in done.stdout, "llama-bench did not use the device")


s.main(body)
