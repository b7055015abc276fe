#!/usr/bin/env python3
"""Generation that reads of KV held coded only what a query asks for (--kv-select): with a quarter of
the context it mostly says what reading all of it says, with a budget for all of it the same; after the
context was written anew, grew by chunks and was evicted, too, and for two sequences at once; what it keeps is
counted; neap bench decode measures it."""

import json
import os
import threading

import support as s
from klt_training import train

N_PREDICT = 16
N_CHUNKS = 8
CHUNK = 256
LAYERS = 30


def agreement(a, b):
    return sum(x == y for x, y in zip(a, b))


def run(work, env, prompts, forced=None):
    """The most likely tokens along an answer to each prompt; the second is read over the first, then
    evicted and asked again; the third goes on from the second, by more than a chunk."""
    answers = []
    with s.Server(work, s.SMOLLM2, ctx=4096, env=env) as server:
        for i, prompt in enumerate(prompts):
            words = forced[i][0] if forced else server.tokens(prompt, N_PREDICT)
            answers.append((words, s.next_tokens(server, prompt, words)))
            if i == 1:
                stat = server.stat()
                server.evict("100%")
                answers[1] += (s.next_tokens(server, prompt, words),)
        s.check(stat["attention"]["nodes_host"] == 0, "attention by the host")
    return answers, stat


def together(work, env, prompts):
    """The answers of two slots that generate at the same time."""
    answers = [None, None]

    def ask(server, slot):
        answers[slot] = server.tokens(prompts[slot], N_PREDICT, slot=slot)

    with s.Server(work, s.SMOLLM2, ctx=4096, slots=2, env=env) as server:
        for slot in (0, 1):
            server.tokens(prompts[slot], 1, slot=slot)
        asking = [threading.Thread(target=ask, args=(server, slot)) for slot in (0, 1)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
    return answers


def bench(work, env):
    methods = ["f16-neap", "klt", "klt-sr"]
    done = s.neap(dict(os.environ, XDG_RUNTIME_DIR=s.runtime_dir(work), **env), "bench", "decode",
                  "--json", "--model", s.SMOLLM2, "--context", "1100", "--batch", "2", "--reps", "1",
                  "--threads", "1", "--select", "256", "--method", ",".join(methods))
    f16, klt, selected = json.loads(done.stdout)["rows"]
    s.check_equal([r["method"] for r in (f16, klt, selected)], methods, "rows")
    s.check_equal([r["kv"] for r in (f16, klt, selected)], ["f16", "klt-head-4", "klt-head-4"], "kv")
    s.check(klt["kv_bytes"] < 0.7 * f16["kv_bytes"], f"{klt['kv_bytes']} of {f16['kv_bytes']}")
    s.check(selected["kv_bytes"] > klt["kv_bytes"], "what selection keeps is not counted")


def body(work):
    cache = os.path.join(work, "cache")
    os.mkdir(cache)
    train(cache, s.model_path(s.SMOLLM2), "head", 4)
    env = {"XDG_CACHE_HOME": cache, "NEAP_KV": "klt"}
    with s.Server(work, s.SMOLLM2, ctx=4096, env={"NEAP_KV_SELECT": "64"}) as server:
        s.check("NEAP_KV_SELECT=64 has no effect" in server.log_tail(300), "nothing is held coded")
        prompts = [server.tokenize(s.prose(seed, N_CHUNKS * CHUNK))[:N_CHUNKS * CHUNK + 40]
                   for seed in (61, 62)]
        prompts.append(prompts[1] + server.tokenize(s.prose(63, 400))[1:CHUNK + 60])
    full, full_stat = run(work, env, prompts)
    for budget, least in ((N_CHUNKS * CHUNK // 4, 0.75), (4096, 0.95)):
        got, stat = run(work, dict(env, NEAP_KV_SELECT=str(budget)), prompts, full)
        same = [agreement(a, b) for mine, its in zip(got, full) for a, b in zip(mine[1:], its[1:])]
        s.say(f"{budget} cells: {same} of {N_PREDICT} tokens agree with reading all")
        # What an eviction coded at last, and outliers, selection may hold as they were before.
        s.check(min(same[:2]) >= least * N_PREDICT and min(same) >= 0.7 * N_PREDICT,
                f"{budget} cells: {same} agree")
        # K and V of the buffer (budget, outliers, window, to whole chunks), landmarks of all spans.
        kept = (budget + 384 + 256 + CHUNK - 1) // CHUNK * CHUNK * 2 * 192 * 2
        more = stat["bytes"]["kv_compressed_memory"] - full_stat["bytes"]["kv_compressed_memory"]
        landmarks = N_CHUNKS * CHUNK // 8 * 3 * (64 + 4)
        expected = LAYERS * (kept + landmarks)
        s.check(expected <= more < 1.1 * expected + 4 * s.MIB, f"{more} bytes more, not {expected}")
    both = [together(work, dict(env, NEAP_KV_SELECT=select), prompts[:2])
            for select in ("off", "4096")]
    same = [agreement(a, b) for a, b in zip(*both)]
    s.say(f"two at once: {same} of {N_PREDICT} tokens agree with reading all")
    s.check(min(same) >= 0.75 * N_PREDICT, f"two at once: {same} agree")
    os.symlink(s.MODELS, os.path.join(cache, "neap", "models"))
    bench(work, env)


s.main(body)
