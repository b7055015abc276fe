#!/usr/bin/env python3
"""Two evictions at once, an eviction during inference, or of a request that has come and not begun,
two requests at once after an eviction."""

import threading

import support as s


def evictions_at_once(work):
    prompt = s.prose(71, 400)
    with s.Server(work) as server:
        server.tokens(prompt, 24)
        resident = server.tokens(prompt, 24)
        for _ in range(3):
            s.at_once(lambda: server.evict("100%"), lambda: server.evict("50%"), server.restore,
                      lambda: server.evict("30%", "kv"), server.stat)
            s.check_equal(server.tokens(prompt, 24), resident, "after evictions at once")
        s.say("evictions at once: identical")


def eviction_during_inference(work):
    prompt = s.prose(72, 400)
    with s.Server(work) as server:
        server.tokens(prompt, 96)
        resident = server.tokens(prompt, 96)
        results = []
        at = {n: (lambda share=share: results.append(server.evict(share)))
              for n, share in ((5, "100%"), (30, "40%"), (60, "100%"))}
        s.check_equal(server.stream(prompt, 96, at), resident, "evicted during inference")
        s.check(all(r["released_bytes"] > 0 for r in results), f"nothing released: {results}")
        # While a long prompt is read.
        long_prompt = s.prose(73, 1100)
        expected = server.tokens(long_prompt, 16)
        server.tokens(prompt, 1)
        thread = threading.Timer(0.3, lambda: results.append(server.evict("100%")))
        thread.start()
        s.check_equal(server.tokens(long_prompt, 16), expected, "evicted while reading a prompt")
        thread.join()
        s.say("evictions during inference: identical")


def eviction_before_start(work):
    """The only slot is busy: the second request waits while everything is evicted, and begins then."""
    first, second = s.prose(78, 300), s.prose(79, 300)
    with s.Server(work) as server:
        expected = server.tokens(second, 24)
        server.tokens(first, 64)
        resident = server.tokens(first, 64)
        late = []
        waiting = threading.Thread(target=lambda: late.append(server.tokens(second, 24)))

        def evict():
            s.check(waiting.is_alive() and not late, "the second request did not wait")
            s.check(server.evict("100%")["released_bytes"] > 0, "nothing released")

        s.check_equal(server.stream(first, 64, {4: waiting.start, 40: evict, 60: evict}), resident,
                      "evicted while another request waited")
        waiting.join()
        s.check_equal(late, [expected], "evicted between arrival and start")
        s.say("evicted between the arrival of a request and its start: identical")


def requests_at_once(work):
    prompts = [s.prose(74 + i, 500) for i in range(4)]
    with s.Server(work, slots=4) as server:
        def request(i):
            return lambda: server.complete(prompts[i], 24, i)

        for i in range(4):
            request(i)()
        server.restore()
        before = server.stat()
        server.evict("100%")
        replies = s.at_once(*[request(i) for i in range(4)])
        after = server.stat()
        for i, reply in enumerate(replies):
            s.check_equal(len(reply["tokens"]), 24, f"slot {i}")
            s.check(reply["timings"]["cache_n"] > 400, f"slot {i} reused nothing: {reply['timings']}")
        grown = sum(after["counters"][k] - before["counters"][k]
                    for k in ("bytes_restored_storage", "bytes_restored_memory"))
        whole = after["bytes"]["weights_total"] + after["bytes"]["kv_total"]
        s.check(0 < grown <= 1.05 * whole,
                f"{grown} bytes restored, weights and KV together are {whole}: loaded twice?")
        s.check(after["bytes"]["weights_resident"] <= after["bytes"]["weights_total"], "held twice")
        s.say(f"four requests after an eviction: {grown >> 20} of {whole >> 20} MiB restored, once")


def body(work):
    evictions_at_once(work)
    eviction_during_inference(work)
    eviction_before_start(work)
    requests_at_once(work)


s.main(body)
