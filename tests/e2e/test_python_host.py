#!/usr/bin/env python3
"""llama-cpp-python, a host that loads its own libraries, answers the same with the backend, and its
memory can be evicted like that of any other program."""

import os
import subprocess

import support as s

HOST = """
import ctypes, os, subprocess, sys
import llama_cpp
library = os.environ["LLAMA_CPP_LIB_PATH"]
elastic = "GGML_BACKEND_PATH" in os.environ
if elastic:  # llama-cpp-python never loads backends by itself
    ctypes.CDLL(os.path.join(library, "libggml.so")).ggml_backend_load_all()
model = llama_cpp.Llama(sys.argv[1], n_ctx=1024, n_gpu_layers=-1 if elastic else 0, n_threads=2,
                        verbose=False)
for _ in range(2):
    answer = model(sys.argv[2], max_tokens=40, temperature=0)
    print("answer:", answer["choices"][0]["text"].replace("\\n", " "), flush=True)
    if elastic:
        done = subprocess.run([sys.argv[3], "evict", "--pid", str(os.getpid()), "100%"])
        print("evict:", done.returncode, flush=True)
"""


def package_dir():
    """The Python part of the pinned sources, as set-up laid it beside llama.cpp."""
    root = os.path.join(os.path.dirname(s.MODELS), "llama.cpp-0c1e570")
    if not os.path.isdir(os.path.join(root, "python", "llama_cpp")):
        raise s.Skipped("no llama_cpp package (tools/setup --tests lays it)")
    return root


def answers(work, model, through_neap):
    root = package_dir()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("NEAP_", "GGML_"))}
    env.update(PYTHONPATH=os.path.join(root, "python"), XDG_RUNTIME_DIR=s.runtime_dir(work),
               LLAMA_CPP_LIB_PATH=os.path.join(root, "build", "bin"),
               OMP_WAIT_POLICY="passive")
    if through_neap:
        env.update(GGML_BACKEND_PATH=s.PLUGIN, NEAP_CODEC="none", NEAP_POISON="1", NEAP_ATTN="ggml",
                   NEAP_SWAP_DIR=os.path.join(work, "swap"), NEAP_PROFILE="off")
    done = subprocess.run(["/usr/bin/python3", "-c", HOST, model, "Once upon a time, by the sea,",
                           s.NEAP], env=env, stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=300, check=False)
    if "ModuleNotFoundError" in done.stderr:
        raise s.Skipped(done.stderr.strip().splitlines()[-1])
    s.check(done.returncode == 0, f"exit {done.returncode}\n{done.stderr[-2000:]}")
    s.say(done.stdout)
    if through_neap:
        s.check_equal(done.stdout.count("evict: 0"), 2, "evictions that worked")
    return [line for line in done.stdout.splitlines() if line.startswith("answer:")]


def body(work):
    model = s.model_path(s.SMOLLM2)
    stock = answers(work, model, False)
    s.check_equal(len(stock), 2, "answers")
    s.check_equal(answers(work, model, True), stock, "answers through the backend")


s.main(body)
