#!/usr/bin/env python3
"""KV held as klt coded it (--kv klt) and read so: memory is what neap stat says, not what bits would
give; a memory group that could not hold the f16 cache holds the context; answers agree with those
from f16, token by token; evictions, slot files and context shifts work on it; without a training,
or where the cache does not fit, it is f16, and that is said."""

import os

import groups
import support as s
from klt_training import train
from kv_held import CHUNK, N_PREDICT, answers_f16, feed, grow, kv_held


def memory_and_answers(work, env, f16):
    prompt, answer, f16_next, f16_bytes, beside = f16
    n_chunks, n_layers = len(prompt) // CHUNK, 30
    with s.Server(work, s.SMOLLM2, ctx=8192, env=env) as server:
        held, most, said = grow(server, prompt)
        stat, held, most = server.stat(), held - beside, most - beside
        s.say(f"f16 {f16_bytes / s.MIB:.1f} MiB; held {held / s.MIB:.1f}, said {said / s.MIB:.1f}, "
              f"at most {most / s.MIB:.1f}; coded {stat['ratio']:.2f} times smaller, "
              f"error {stat['error']:.2f}")
        s.check_equal(stat["kv"], "klt-joint-8", "kv")
        s.check(stat["units"]["klt"] + stat["units"]["klt_left"] == (n_chunks - 1) * n_layers and
                stat["units"]["klt_left"] * 10 < stat["units"]["klt"], f"units: {stat['units']}")
        s.check(5.5 < stat["ratio"] < 9 and 0 < stat["error"] < 4, f"{stat['ratio']}")
        # One layer's f16 is in the window of attention.
        s.check(abs(held - said - f16_bytes / n_layers) < 0.05 * f16_bytes,
                "stat is not what smaps says")
        s.check(held < 0.4 * f16_bytes, "f16 copies stay in memory")
        s.check(most < 0.7 * f16_bytes, "all was f16 at some time")
        context = stat["contexts"][0]
        s.check(context["kv"] == "klt-joint-8" and context["tokens"] == stat["tokens"] and
                1.5 < context["ratio"] < stat["ratio"], f"contexts: {stat['contexts']}")
        s.check(stat["attention"]["nodes"] > 0 and stat["attention"]["nodes_host"] == 0, "attention")

        coded_next = s.next_tokens(server, prompt, answer)
        agree = sum(a == b for a, b in zip(coded_next, f16_next))
        s.say(f"{agree} of {N_PREDICT} tokens agree with f16")
        s.check(agree >= 0.8 * N_PREDICT, "gibberish")

        # An eviction codes the last full chunk, too. From then on, away and back, pages or records,
        # nothing changes any more.
        server.evict("100%")
        coded_next = s.next_tokens(server, prompt, answer)
        result = server.evict("100%")
        s.check(server.stat()["bytes"]["kv_compressed_memory"] == 0 and
                result["kv_storage_bytes"] > 0, f"evicted: {result}")
        s.check_equal(s.next_tokens(server, prompt, answer), coded_next, "after an eviction")
        server.evict("100%")
        server.restore()
        stat = server.stat()
        s.check(stat["bytes"]["kv_compressed_memory"] > 0, "records are back")
        s.check(kv_held(stat) < 0.5 * f16_bytes, "restoring brings records only")
        saved = s.read_bytes(server.slot_save("0"))
        s.check(kv_held(server.stat()) < 0.5 * f16_bytes, "after saving the slot")
        s.check_equal(s.next_tokens(server, prompt, answer), coded_next, "after saving the slot")
        again = s.read_bytes(server.slot_save("1"))
        server.evict("100%")
        s.check(s.read_bytes(server.slot_save("2")) == again and len(again) == len(saved),
                "an eviction changed bytes")
        server.slot_erase()
        server.slot_restore("0")
        again = s.next_tokens(server, prompt, answer)
        s.check(server.stat()["units"]["klt"] > 0, "a restored slot is held coded")
        agree = sum(a == b for a, b in zip(again, f16_next))
        s.check(agree >= 0.8 * N_PREDICT, f"after restoring the slot only {agree} tokens agree")
        s.check_equal(server.stat()["counters"]["errors"], 0, "errors")


def in_a_group(work, env, f16, model=s.SMOLLM2, ctx=8192):
    """A memory group that the f16 cache does not fit in."""
    prompt, answer, f16_next, f16_bytes, beside = f16
    group = groups.Group(f"neap-kv-klt-{os.getpid()}", 4 << 30)
    try:
        with group.entered():
            server = s.Server(work, model, ctx=ctx, env=env)
        with server:
            server.tokens(s.prose(42, 40), 8)
            server.slot_erase()
            group.keep_from_swap()
            spare = f16_bytes * 6 // 10 + beside
            group.set_limit(server.held() + spare)
            feed(server, prompt)
            coded = s.next_tokens(server, prompt, answer)
            agree = sum(a == b for a, b in zip(coded, f16_next))
            s.say(f"with {spare / s.MIB:.1f} MiB where f16 takes {(f16_bytes + beside) / s.MIB:.1f}: "
                  f"{agree} of {N_PREDICT} tokens agree")
            s.check(server.alive() and group.kills() == 0, "killed")
            s.check(agree >= 0.8 * N_PREDICT, "gibberish")
    finally:
        group.remove()


def shifts(work, env):
    with s.Server(work, s.SMOLLM2, "--context-shift", ctx=1024, env=env) as server:
        server.tokens(s.prose(43, 700), 16)
        s.check(server.stat()["units"]["klt"] > 0, "nothing is held coded")
        s.check_equal(len(server.tokens(s.prose(43, 700), 250)), 250, "tokens over a shift")
        s.check("context shift" in server.log_tail(100), "there was no shift")
        server.evict("100%")
        first = s.read_bytes(server.slot_save("1"))
        server.evict("100%")
        s.check(s.read_bytes(server.slot_save("2")) == first, "after a shift: an eviction changed bytes")
        stat = server.stat()
        s.check(stat["units"]["klt"] > 0 and stat["error"] < 4, f"after a shift: {stat['units']}")
        s.check_equal(stat["counters"]["errors"], 0, "errors")


def without(work, env, words, flash="on"):
    with s.Server(work, s.SMOLLM2, flash=flash, env=env) as server:
        for word in words:
            s.check(flash == "off" or word in server.log_tail(300), f"the log does not say {word}")
        s.check_equal(len(server.tokens(s.prose(33, 900), N_PREDICT)), N_PREDICT, "tokens")
        stat = server.stat()
        s.check_equal(stat["kv"], "f16", "kv")
        for word in words:
            s.check(word in stat["codec_note"], f"{word} is not in {stat['codec_note']}")
        s.check_equal(stat["bytes"]["kv_compressed_memory"], 0, "compressed")
        s.say(stat["codec_note"])


def body(work):
    model = s.model_path(s.SMOLLM2)
    cache, empty = os.path.join(work, "cache"), os.path.join(work, "empty")
    os.mkdir(cache)
    os.mkdir(empty)
    without(work, {"NEAP_KV": "klt", "XDG_CACHE_HOME": empty}, ["f16 instead", "neap train"])
    train(cache, model, "joint", 8)
    env = {"NEAP_KV": "klt:8", "XDG_CACHE_HOME": cache}
    without(work, env, ["f16 for"], flash="off")
    without(work, dict(env, NEAP_KV="klt:5"), ["f16 instead", "--ratio 5"])
    f16 = answers_f16(work, 14)
    memory_and_answers(work, env, f16)
    in_a_group(work, env, f16)
    shifts(work, env)
    if s.ALL:  # a context of 32k
        train(cache, s.model_path(s.QWEN), "joint", 8)
        f16 = answers_f16(work, 126, s.QWEN, 32768)
        in_a_group(work, env, f16, s.QWEN, 32768)


s.main(body)
