#!/usr/bin/env python3
"""A request brings back only the chunks that its attention sees: another conversation's, in the same
cache, stay evicted, and both answer as if nothing had been."""

import support as s


def body(work):
    first, second = s.prose(41, 900), s.prose(42, 900)
    with s.Server(work, s.SMOLLM2, "--kv-unified", slots=2, ctx=4096,
                  env={"NEAP_ATTN": "neap"}) as server:
        for slot, prompt in enumerate((first, second)):
            server.tokens(prompt, 1, slot=slot)  # read once: from here on all come from the cache
        answers = [server.tokens(first, 16, slot=0), server.tokens(second, 16, slot=1)]
        server.evict("100%", "kv")
        evicted = server.stat()["units"]["kv_evicted"]
        s.check_equal(server.tokens(first, 16, slot=0), answers[0], "first conversation")
        left = server.stat()["units"]["kv_evicted"]
        s.say(f"{evicted} chunks evicted, {left} still after a request of one of two conversations")
        s.check(0.3 * evicted < left < 0.7 * evicted, "chunks that the mask hides were restored")
        s.check_equal(server.tokens(second, 16, slot=1), answers[1], "second conversation")


s.main(body)
