#!/usr/bin/env python3
"""Generation that reads of KV held coded only what a query asks for (--kv-select): with a quarter of
the context it mostly says what reading all of it says, with a budget for all of it the same; after the
context was written anew, grew by chunks and was evicted, too; what it keeps is counted."""

import os

import support as s
from klt_training import next_tokens, train

N_PREDICT = 16
N_CHUNKS = 8
CHUNK = 256
LAYERS = 30


def agreement(a, b):
    return sum(x == y for x, y in zip(a, b))


def grown_answer(server, prompt):
    """A chunk more than the prompt, then tokens from where it stands."""
    longer = prompt + server.tokenize(s.prose(63, 400))[:CHUNK + 60]
    server.tokens(longer[:-40], 1)
    return server.tokens(longer, N_PREDICT)


def run(work, env, prompts, forced=None):
    """Answers to both prompts, each the only context at its time; and after the cache was evicted,
    and grown. forced: tokens along which the next ones are asked for."""
    answers = []
    with s.Server(work, s.SMOLLM2, ctx=4096, env=env) as server:
        for i, prompt in enumerate(prompts):
            words = forced[i] if forced else server.tokens(prompt, N_PREDICT)
            answers.append((words, next_tokens(server, prompt, words)))
        stat = server.stat()
        s.check(stat["attention"]["nodes_host"] == 0, "attention by the host")
        server.evict("100%")
        answers.append((None, next_tokens(server, prompts[-1], answers[-1][0])))
        answers.append((None, grown_answer(server, prompts[-1])))
        log = server.log_path if hasattr(server, "log_path") else None
    return answers, stat, log


def body(work):
    cache = os.path.join(work, "cache")
    os.mkdir(cache)
    train(cache, s.model_path(s.SMOLLM2))
    env = {"XDG_CACHE_HOME": cache, "NEAP_KV": "klt"}
    with s.Server(work, s.SMOLLM2, ctx=4096) as server:
        prompts = [server.tokenize(s.prose(seed, N_CHUNKS * CHUNK))[:N_CHUNKS * CHUNK + 40]
                   for seed in (61, 62)]
    full, full_stat, _ = run(work, env, prompts)
    forced = [words for words, _ in full[:2]]
    for budget, least in ((N_CHUNKS * CHUNK // 4, 0.75), (4096, 0.95)):
        got, stat, _ = run(work, dict(env, NEAP_KV_SELECT=str(budget)), prompts, forced)
        same = [agreement(a[1], b[1]) for a, b in zip(got[:3], full[:3])]
        s.say(f"{budget} cells: {same} of {N_PREDICT} tokens agree with reading all, "
              f"grown {agreement(got[3][1], full[3][1])}")
        s.check(min(same) >= least * N_PREDICT, f"{budget} cells: {same} agree")
        # K and V of the buffer (budget, outliers, window, to whole chunks), landmarks of all spans.
        kept = (min(budget, 4096) + 384 + 256 + CHUNK - 1) // CHUNK * CHUNK * 2 * 192 * 2
        more = stat["bytes"]["kv_compressed_memory"] - full_stat["bytes"]["kv_compressed_memory"]
        landmarks = N_CHUNKS * CHUNK // 8 * 3 * (64 + 4)
        expected = LAYERS * (kept + landmarks)
        s.check(expected <= more < 1.1 * expected + 4 * s.MIB, f"{more} bytes more, not {expected}")


s.main(body)
