#!/usr/bin/env python3
"""Asking how it is does not wake it: polling and tokenising while evicted restore nothing."""

import support as s


def body(work):
    prompt = s.prose(81, 400)
    with s.Server(work, s.SMOLLM2, "--metrics") as server:
        server.tokens(prompt, 16)
        resident = server.tokens(prompt, 16)
        words = server.tokenize(prompt)
        server.evict("100%")
        evicted, held = server.evicted_units(), server.held()
        s.check(evicted > 0, "nothing evicted")
        for _ in range(5):
            for path in ("/health", "/props", "/slots", "/v1/models"):
                s.check_equal(server.get(path)[0], 200, path)
            s.check_equal(server.tokenize(prompt), words, "tokens while evicted")
            s.check_equal(server.post("/detokenize", {"tokens": words[:20]})["content"].strip(),
                          server.post("/detokenize", {"tokens": words[:20]})["content"].strip(), "text")
            server.post("/apply-template", {"messages": [{"role": "user", "content": "hello"}]})
            server.stat()
            server.neap("ps")
        s.check_equal(server.evicted_units(), evicted, "units evicted after polling")
        s.check(server.held() - held < 8 * s.MIB, "memory grew while polling")
        reply = server.complete(prompt, 16)
        s.check_equal(reply["tokens"], resident, "the answer afterwards")
        s.check(reply["timings"]["prompt_n"] <= 2, f"recomputed: {reply['timings']}")


s.main(body)
