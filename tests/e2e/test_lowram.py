#!/usr/bin/env python3
"""Codec lowram from end to end: llama-server with it fits a context as it is evicted and answers, a
second cycle changes no byte, the answer agrees with the resident one token by token; a context that
is too short is q8's, and that is said. While idle it is fitted in advance, which no request notices.
BLAS is loaded for this codec only."""

import time

import support as s

CONTEXT = 1300  # words, 1.2 tokens each
N_PREDICT = 16


def has_blas(pid):
    with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
        return "openblas" in maps.read()


def cycles(work):
    with s.Server(work, s.SMOLLM2, codec="lowram:4") as server:
        s.check(has_blas(server.pid), "the module is not there")
        prompt = server.tokenize(s.prose(31, CONTEXT))
        resident = server.tokens(prompt, N_PREDICT)
        files = [s.read_bytes(server.slot_save("0"))]
        for cycle in (1, 2, 3):
            result = server.evict("100%", only="kv" if cycle < 3 else None)
            s.check(result["kv_storage_bytes"] > 0 and result["kv_memory_bytes"] == 0,
                    f"lowram's place is storage: {result}")
            stat = server.stat()
            s.check_equal(stat["units"]["kv_evicted"], stat["units"]["kv"], "all KV evicted")
            files.append(s.read_bytes(server.slot_save(str(cycle))))
        s.check(files[1] != files[0], "lowram changed nothing: was it used?")
        s.check(files[2] == files[1] and files[3] == files[1], "a later cycle changed bytes")

        s.check_equal(stat["codec"], "lowram", "codec in use")
        s.check(stat["codec_note"].startswith("lowram-4, fitted to "), stat["codec_note"])
        s.check(stat["units"]["klt"] > 4 * stat["units"]["klt_left"], f"units: {stat['units']}")
        s.check(2 < stat["ratio"] < 4.5, f"ratio {stat['ratio']}")
        s.check(0 < stat["error"] < 4, f"error {stat['error']}")
        s.check("lowram-4" in server.neap("stat", "--pid", str(server.pid)).stdout, "neap stat")

        answers = s.next_tokens(server, prompt, resident)
        agree = sum(a == b for a, b in zip(answers, resident))
        s.check(agree >= 0.7 * N_PREDICT, f"only {agree} of {N_PREDICT} tokens agree")
        server.evict("100%")
        s.check_equal(s.next_tokens(server, prompt, resident), answers, "answers after another cycle")
        s.say(f"lowram: {stat['ratio']:.2f} times smaller, error {stat['error']:.2f}, "
              f"{agree} of {N_PREDICT} tokens agree; {stat['codec_note']}")

        # Another text in the same cells is fitted anew.
        prompt = server.tokenize(s.prose(32, CONTEXT))
        resident = server.tokens(prompt, N_PREDICT)
        server.evict("100%", only="kv")
        answers = s.next_tokens(server, prompt, resident)
        agree = sum(a == b for a, b in zip(answers, resident))
        s.check(agree >= 0.7 * N_PREDICT, f"second text: only {agree} of {N_PREDICT} tokens agree")
        s.check_equal(server.stat()["counters"]["errors"], 0, "errors")


def idle(work):
    with s.Server(work, s.SMOLLM2, codec="lowram:4") as server:
        prompt = server.tokenize(s.prose(34, CONTEXT))
        server.tokens(prompt, N_PREDICT)
        resident = server.tokens(prompt, N_PREDICT)
        deadline = time.monotonic() + 120
        while server.stat()["bytes"]["fits"] == 0:
            s.check(time.monotonic() < deadline, "nothing was fitted while idle")
            time.sleep(0.2)
        stat = server.stat()
        note = stat["codec_note"]
        s.check(note.startswith("lowram-4, fitted to ") and note.endswith(" while idle"), note)
        s.check(stat["units"]["kv_evicted"] == 0 and stat["bytes"]["kv_storage"] == 0, "evicted")
        s.check_equal(stat["contexts"][0]["fit"], stat["bytes"]["fits"], "bytes of the fit")
        s.check_equal(server.tokens(prompt, N_PREDICT), resident, "after a fit")
        result = server.evict("100%", only="kv")
        stat = server.stat()
        s.check_equal(stat["codec_note"], note, "the eviction made a fit of its own")
        s.check(stat["units"]["klt"] > 4 * stat["units"]["klt_left"], f"units: {stat['units']}")
        s.say(f"{note}; evicted in {result['duration_ns'] / 1e6:.0f} ms")


def too_short(work):
    with s.Server(work, s.SMOLLM2, codec="lowram:8") as server:
        prompt = s.prose(33, 300)
        resident = server.tokens(prompt, N_PREDICT)
        server.evict("100%")
        stat = server.stat()
        s.check_equal(stat["codec"], "q8", "codec in use")
        s.check("too short" in stat["codec_note"], stat["codec_note"])
        s.check("too short" in server.log_tail(200), "the log does not say too short")
        s.check_equal(len(server.tokens(prompt, N_PREDICT)), len(resident), "tokens")


def body(work):
    cycles(work)
    idle(work)
    too_short(work)
    with s.Server(work, s.SMOLLM2, codec="q8") as server:
        s.check(not has_blas(server.pid), "BLAS without need")


s.main(body)
