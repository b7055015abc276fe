#!/usr/bin/env python3
"""A model file that is missing, damaged, replaced or changed under a running server."""

import os
import shutil
import subprocess

import support as s


def ask(server, prompt):
    status, reply = server.call("POST", "/completion", {
        "prompt": prompt, "n_predict": 16, "temperature": 0, "id_slot": 0, "cache_prompt": True,
        "return_tokens": True, "ignore_eos": True})
    return reply["tokens"] if status == 200 else None


def does_not_start(work, name, path):
    env = dict(os.environ, XDG_RUNTIME_DIR=s.runtime_dir(work))
    done = subprocess.run([s.NEAP, "serve", path, "--", "--port", str(s.free_port())], env=env,
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
                          check=False)
    s.check(done.returncode in (1, 2), f"{name}: exit {done.returncode}\n{done.stderr[-2000:]}")
    s.check(done.stderr.strip(), f"{name}: not a word")
    s.say(f"{name}: exit {done.returncode}: {done.stderr.strip().splitlines()[-1]}")


def replaced(work, before):
    """Another file takes the model's name, as an update does."""
    path = os.path.join(work, "replaced.gguf")
    shutil.copyfile(s.model_path(s.SMOLLM2), path)
    prompt = s.prose(121, 300)
    with s.Server(work, path) as server:
        server.tokens(prompt, 16)
        resident = server.tokens(prompt, 16)
        if not before:
            server.evict("100%")
        shutil.copyfile(s.model_path(s.SMOLLM2 + "-q4_0"), path + ".new")
        os.rename(path + ".new", path)
        if before:
            server.evict("100%")
        answer = ask(server, prompt)
        s.check(answer in (resident, None), f"answered from another file: {answer}, not {resident}")
        s.check(server.alive(), "the server died of it")
        if before:
            s.check_equal(answer, resident, "replaced before an eviction: nothing may be lost")
        s.say(f"replaced {'before' if before else 'after'} an eviction: "
              f"{'identical' if answer else 'refused'}")
        if answer is None:
            s.check(server.stat().get("last_error"), "refused without a word")


def written_to(work):
    """Bytes of the weights change in place, after they were evicted."""
    path = os.path.join(work, "written.gguf")
    shutil.copyfile(s.model_path(s.SMOLLM2), path)
    prompt = s.prose(122, 300)
    with s.Server(work, path) as server:
        server.tokens(prompt, 16)
        resident = server.tokens(prompt, 16)
        server.evict("100%")
        with open(path, "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            for offset in range(size // 2, size - 65536, 65536):
                file.seek(offset)
                file.write(b"\x5a" * 512)
        answer = ask(server, prompt)
        s.check(answer in (resident, None), f"answered from changed weights: {answer}")
        s.check(server.alive(), "the server died of it")
        stat = server.stat()
        s.check(stat["counters"]["errors"] > 0 and stat.get("last_error"), f"not a word: {stat}")
        s.say(f"written to: {'identical' if answer else 'refused'}: {stat['last_error']}")


def body(work):
    does_not_start(work, "missing", os.path.join(work, "nowhere.gguf"))
    short = os.path.join(work, "short.gguf")
    with open(s.model_path(s.SMOLLM2), "rb") as source, open(short, "wb") as target:
        target.write(source.read(30 * s.MIB))
    does_not_start(work, "cut off", short)
    noise = os.path.join(work, "noise.gguf")
    with open(noise, "wb") as target:
        target.write(b"GGUF" + b"\xff" * 4096)
    does_not_start(work, "damaged", noise)
    replaced(work, before=True)
    replaced(work, before=False)
    written_to(work)


s.main(body)
