#!/usr/bin/env python3
"""A context shift moves cells that are evicted: the answer stays the one without evictions.

The context of 768 tokens is full twice while the answer comes; memory is taken before, between and
after the shifts.
"""

import support as s

SHARES = {60: "100%", 150: "50%", 300: "100%", 420: "100%"}


def body(work):
    prompt = s.prose(3, 560)
    for model, flash in ((s.SMOLLM2, "on"), (s.SMOLLM2, "off")) + \
            (((s.QWEN, "on"),) if s.ALL else ()):
        answers = []
        for evict in (False, True):
            with s.Server(work, model, "--context-shift", ctx=768, flash=flash) as server:
                at = {n: (lambda share=share: server.evict(share) if evict else None)
                      for n, share in SHARES.items()}
                answer = server.stream(prompt, 480, at)
                s.check(len(answer) >= 480, f"{len(answer)} tokens: the context did not shift")
                after = server.tokens(prompt, 32)
                answers.append((answer, after))
                if evict:
                    s.check(server.stat()["counters"]["evictions"] >= len(SHARES), "too few evictions")
                    s.check("context shift" in server.log_tail(10000), "the context did not shift")
        s.check_equal(answers[1], answers[0], f"{model} -fa {flash}: another answer")
        s.say(f"identical: {model} -fa {flash}")


s.main(body)
