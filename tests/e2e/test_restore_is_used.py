#!/usr/bin/env python3
"""What is restored is used: after evict and restore nothing is recomputed, regenerating works, and
other ways of llama-server to keep or drop contexts work beside it."""

import support as s


def restore_then_reuse(work):
    prompt = s.prose(91, 700)
    with s.Server(work) as server:
        server.tokens(prompt, 24)
        first = server.complete(prompt, 24)
        for restore in (False, True):
            server.evict("100%")
            s.check(server.stat()["bytes"]["released"] > 0, "nothing released")
            if restore:
                s.check(server.restore()["bytes"] > 0, "neap restore says nothing was restored")
                s.check_equal(server.evicted_units(), 0, "evicted after neap restore")
                before = server.stat()["counters"]
            for time in ("first", "again", "once more"):
                reply = server.complete(prompt, 24)
                s.check_equal(reply["tokens"], first["tokens"], f"regenerated {time}")
                s.check_equal(reply["timings"]["prompt_n"], first["timings"]["prompt_n"],
                              f"{time}: tokens of the prompt read again")
            if restore:
                after = server.stat()["counters"]
                s.check_equal(after["bytes_restored_storage"] + after["bytes_restored_memory"],
                              before["bytes_restored_storage"] + before["bytes_restored_memory"],
                              "the request restored what neap restore had brought back")
        s.say("restored and reused, regenerated")


def prompt_cache(work):
    """llama-server's own prompt cache copies contexts out of and into evicted cells."""
    prompts = [s.prose(92 + i, 350) for i in range(3)]
    answers = []
    for evict in (False, True):
        with s.Server(work, env={"LLAMA_ARG_CACHE_RAM": "256"}) as server:
            got = []
            for i in (0, 1, 2, 0, 1, 0, 2):
                got.append(server.tokens(prompts[i], 16))
                if evict:
                    server.evict("100%")
            answers.append(got)
    s.check_equal(answers[1], answers[0], "with llama-server's prompt cache")
    s.say("prompt cache: identical")


def copies(work):
    """Several answers to one prompt: llama-server copies the context to other slots."""
    prompt = s.prose(95, 500)
    for unified in ("--no-kv-unified", "--kv-unified"):
        answers = []
        for evict in (False, True):
            with s.Server(work, s.SMOLLM2, unified, slots=4) as server:
                server.tokens(prompt, 8)
                if evict:
                    server.evict("100%")
                reply = server.post("/completion", {
                    "prompt": prompt, "n_predict": 16, "temperature": 0, "n_cmpl": 3,
                    "cache_prompt": True, "return_tokens": True, "ignore_eos": True})
                answers.append(sorted(r["tokens"] for r in reply))
        s.check_equal(len(answers[0]), 3, f"{unified}: answers")
        s.check_equal(answers[1], answers[0], f"{unified}: three answers after an eviction")
        s.say(f"copies, {unified}: identical")


def sleep(work):
    """llama-server's sleep drops everything; neap must not hold what is gone, nor fail on waking."""
    prompt = s.prose(96, 300)
    with s.Server(work, s.SMOLLM2, "--sleep-idle-seconds", "2") as server:
        first = server.tokens(prompt, 16)
        server.evict("60%")
        for _ in range(100):
            if "sleeping" in server.log_tail(2000):
                break
            s.at_once(lambda: __import__("time").sleep(0.1))
        else:
            raise s.Failed("llama-server did not go to sleep")
        s.check_equal(server.tokens(prompt, 16), first, "after llama-server slept")
        server.evict("100%")
        s.check_equal(server.complete(prompt, 16, cache_prompt=False)["tokens"], first,
                      "evicted after waking")
        s.say("sleep and wake: identical")


def body(work):
    restore_then_reuse(work)
    prompt_cache(work)
    copies(work)
    sleep(work)


s.main(body)
