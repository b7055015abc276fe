#!/usr/bin/env python3
"""With the backend and the host's attention, nothing evicted or much, a server answers as stock
llama.cpp does. (Our own attention differs from it by rounding.)"""

import support as s


def session(server, evict):
    out = []
    for i in range(3):
        prompt = s.prose(7, 200 + 150 * i)
        out.append(server.tokens(prompt, 48))
        if evict:
            server.evict("60%")
    return out


def body(work):
    for model in (s.SMOLLM2, s.QWEN, s.GEMMA, s.SMOLLM2 + "-q4_0"):
        with s.Server(work, model, backend=False) as server:
            stock = session(server, False)
        with s.Server(work, model, env={"NEAP_ATTN": "ggml"}) as server:
            s.check_equal(session(server, False), stock, f"{model}: neap differs from stock")
        with s.Server(work, model, through_serve=True, env={"NEAP_ATTN": "ggml"}) as server:
            s.check_equal(session(server, True), stock,
                          f"{model}: neap serve with evictions differs from stock")
        s.say(f"identical: {model}")


s.main(body)
