#!/usr/bin/env python3
"""Codec klt from end to end: neap train makes its file, llama-server with it evicts a context and
answers, a second cycle changes no byte, the answer agrees with the resident one token by token;
slot files and context shifts work; without the file q8 does the work, and that is said."""

import os

import support as s
from klt_training import train

CONTEXT = 1300  # words, 1.2 tokens each
N_PREDICT = 16


def cycles(work, cache, codec):
    with s.Server(work, s.SMOLLM2, codec=codec, env={"XDG_CACHE_HOME": cache}) as server:
        s.check_equal(server.stat()["codec"], "klt", "codec in use")
        prompt = server.tokenize(s.prose(31, CONTEXT))
        resident = server.tokens(prompt, N_PREDICT)
        files = [s.read_bytes(server.slot_save("0"))]
        for cycle in (1, 2, 3):
            result = server.evict("100%", only="kv" if cycle < 3 else None)
            s.check(result["kv_storage_bytes"] > 0 and result["kv_memory_bytes"] == 0,
                    f"{codec}: klt's place is storage: {result}")
            stat = server.stat()
            s.check_equal(stat["units"]["kv_evicted"], stat["units"]["kv"], "all KV evicted")
            files.append(s.read_bytes(server.slot_save(str(cycle))))
        s.check(files[1] != files[0], "klt changed nothing: was it used?")
        s.check(files[2] == files[1] and files[3] == files[1], "a later cycle changed bytes")

        s.check_equal(stat["codec_note"], "klt-head-4", "file in use")
        s.check(stat["units"]["klt"] > 4 * stat["units"]["klt_left"], f"units: {stat['units']}")
        s.check(3.2 < stat["ratio"] < 4.5, f"ratio {stat['ratio']}")
        s.check(0 < stat["error"] < 4, f"error {stat['error']}")
        s.check("klt-head-4" in server.neap("stat", "--pid", str(server.pid)).stdout, "neap stat")

        answers = s.next_tokens(server, prompt, resident)
        agree = sum(a == b for a, b in zip(answers, resident))
        s.check(agree >= 0.8 * N_PREDICT, f"only {agree} of {N_PREDICT} tokens agree")
        server.evict("100%")
        again = s.next_tokens(server, prompt, resident)
        s.check_equal(again, answers, "answers after another cycle")
        s.say(f"{codec}: {stat['ratio']:.2f} times smaller, error {stat['error']:.2f}, "
              f"{agree} of {N_PREDICT} tokens agree")

        # A slot file comes into evicted memory, and can be evicted again.
        server.evict("100%")
        server.slot_erase()
        server.slot_restore("0")
        s.check_equal(server.tokens(prompt, N_PREDICT), resident, "after restoring the slot")
        server.evict("100%", only="kv")
        s.check(server.stat()["units"]["klt"] > 0, "klt codes what a slot file brought")
        s.check_equal(server.stat()["counters"]["errors"], 0, "errors")


def higher(work, cache):
    """A ratio above that of the file."""
    with s.Server(work, s.SMOLLM2, codec="klt:6", env={"XDG_CACHE_HOME": cache}) as server:
        server.tokens(server.tokenize(s.prose(31, CONTEXT)), 1)
        server.evict("100%", only="kv")
        stat = server.stat()
        s.check_equal(stat["codec_note"], "klt-head-6", "file in use")
        s.check(stat["ratio"] > 4.6, f"ratio {stat['ratio']}")


def shifts(work, cache):
    """Cells move to other positions while their chunks are away."""
    with s.Server(work, s.SMOLLM2, "--context-shift", codec="klt", ctx=1024,
                  env={"XDG_CACHE_HOME": cache}) as server:
        prompt = s.prose(32, 700)
        server.tokens(prompt, 16)
        server.evict("100%")
        server.tokens(prompt, 400)
        before = server.slot_save("1")
        server.evict("100%")
        first = s.read_bytes(server.slot_save("2"))
        server.evict("100%")
        s.check(s.read_bytes(server.slot_save("3")) == first, "after a shift: the second cycle changed bytes")
        s.check(len(first) == len(s.read_bytes(before)), "the slot's size")
        s.check_equal(server.stat()["counters"]["errors"], 0, "errors")


def without(work, cache, codec, words, flash="on"):
    with s.Server(work, s.SMOLLM2, codec=codec, flash=flash,
                  env={"XDG_CACHE_HOME": cache}) as server:
        for word in words:
            s.check(word in server.log_tail(200) or flash == "off", f"the log does not say {word}")
        prompt = s.prose(33, 400)
        resident = server.tokens(prompt, N_PREDICT)
        stat = server.stat()
        s.check_equal(stat["codec"], "q8", f"{codec}: codec in use")
        for word in words:
            s.check(word in stat["codec_note"], f"{word} is not in {stat['codec_note']}")
        server.evict("100%")
        s.check_equal(server.stat()["units"]["klt"], 0, "chunks by klt")
        s.check_equal(len(server.tokens(prompt, N_PREDICT)), len(resident), "tokens")
        s.say(f"{codec}: {stat['codec_note']}")


def body(work):
    model = s.model_path(s.SMOLLM2)
    cache, empty = os.path.join(work, "cache"), os.path.join(work, "empty")
    os.mkdir(cache)
    os.mkdir(empty)
    without(work, empty, "klt", ["q8 instead", "neap train", os.path.basename(model)])
    path = train(cache, model, "head", 4)
    for codec in ("klt", "klt:4"):
        cycles(work, cache, codec)
    higher(work, cache)
    shifts(work, cache)
    without(work, cache, "klt:3", ["neap train --ratio 3"])
    without(work, cache, "klt", ["does not fit"], flash="off")
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        file.write(b"spoilt")
    without(work, cache, "klt", ["damaged", "neap train"])


s.main(body)
