#!/usr/bin/env python3
"""KV held as LowRAM, fitted to the context, coded it (--kv lowram): the fit comes in a long prompt,
or as a shorter one has ended; memory is what neap stat says, answers agree with those from f16;
evictions, slot files and context shifts change no byte; generation that reads only what a query asks
for (--kv-select) mostly says the same; a short context is f16; neap bench decode measures it."""

import json
import os

import support as s
from kv_held import N_PREDICT, a_prompt, agreement, answers_f16, grow, kv_held

LAYERS = 30
N_CHUNKS = 17
ENV = {"NEAP_KV": "lowram:4"}


def memory_and_answers(work, f16):
    prompt, answer, f16_next, f16_bytes, beside = f16
    with s.Server(work, s.SMOLLM2, ctx=8192, env=ENV) as server:
        held, most, said = grow(server, prompt)
        stat, held, most = server.stat(), held - beside, most - beside
        s.say(f"f16 {f16_bytes / s.MIB:.1f} MiB; held {held / s.MIB:.1f}, said {said / s.MIB:.1f}, "
              f"at most {most / s.MIB:.1f}; coded {stat['ratio']:.2f} times smaller, "
              f"error {stat['error']:.2f}; {stat['codec_note']}")
        s.check_equal((stat["kv"], stat["codec"]), ("lowram-4", "lowram"), "kv and codec")
        s.check(stat["codec_note"].startswith("lowram-4, fitted to 4096 cells"), stat["codec_note"])
        s.check(stat["units"]["klt"] + stat["units"]["klt_left"] == (N_CHUNKS - 1) * LAYERS and
                stat["units"]["klt_left"] * 10 < stat["units"]["klt"], f"units: {stat['units']}")
        s.check(2.3 < stat["ratio"] < 4.5 and 0 < stat["error"] < 4, f"{stat['ratio']}")
        # The window of attention: one layer's f16, two threads' scratch.
        s.check(abs(held - said - f16_bytes / LAYERS - 2 * 1.6 * s.MIB) < 0.05 * f16_bytes,
                "stat is not what smaps says")
        s.check(held < 0.5 * f16_bytes, "f16 copies stay in memory")
        s.check_equal(stat["contexts"][0]["kv"], "lowram-4", "kv of the context")
        s.check(stat["attention"]["nodes_host"] == 0, "attention by the host")

        coded_next = s.next_tokens(server, prompt, answer)
        agree = agreement(coded_next, f16_next)
        s.say(f"{agree} of {N_PREDICT} tokens agree with f16")
        s.check(agree >= 0.8 * N_PREDICT, "gibberish")

        # An eviction codes the last full chunk, too. From then on nothing changes any more.
        server.evict("100%")
        coded_next = s.next_tokens(server, prompt, answer)
        server.evict("100%")
        s.check_equal(s.next_tokens(server, prompt, answer), coded_next, "after an eviction")
        saved = s.read_bytes(server.slot_save("0"))
        s.check(kv_held(server.stat()) < 0.6 * f16_bytes, "after saving the slot")
        server.evict("100%")
        s.check(s.read_bytes(server.slot_save("1")) == saved, "an eviction changed bytes")

        # What a slot file brings is another context: it gets a fit of its own.
        server.slot_erase()
        server.slot_restore("0")
        agree = agreement(s.next_tokens(server, prompt, answer), f16_next)
        note = server.stat()["codec_note"]
        s.check(note.startswith("lowram-4, fitted to 4352 cells"), note)
        s.check(agree >= 0.8 * N_PREDICT, f"after restoring the slot only {agree} tokens agree")
        s.check_equal(server.stat()["counters"]["errors"], 0, "errors")
        return coded_next


def selected(work, f16, coded_next):
    prompt, answer = f16[:2]
    with s.Server(work, s.SMOLLM2, ctx=8192, env=dict(ENV, NEAP_KV_SELECT="1024")) as server:
        server.tokens(prompt, 1)
        agree = agreement(s.next_tokens(server, prompt, answer), coded_next)
        s.say(f"with 1024 cells {agree} of {N_PREDICT} tokens agree with reading all")
        s.check(agree >= 0.7 * N_PREDICT, f"selection: {agree} agree")
        s.check_equal(server.stat()["kv"], "lowram-4", "kv")


def shifts(work):
    with s.Server(work, s.SMOLLM2, "--context-shift", ctx=1536, env=ENV) as server:
        prompt = a_prompt(server, 43, 5)
        server.tokens(prompt, 4)
        s.check(server.stat()["units"]["klt"] > 0, "nothing is held coded")
        s.check_equal(len(server.tokens(prompt, 250)), 250, "tokens over a shift")
        s.check("context shift" in server.log_tail(100), "there was no shift")
        server.evict("100%")
        first = s.read_bytes(server.slot_save("1"))
        server.evict("100%")
        s.check(s.read_bytes(server.slot_save("2")) == first, "after a shift: an eviction changed bytes")
        s.check_equal(server.stat()["counters"]["errors"], 0, "errors")


def short(work):
    with s.Server(work, s.SMOLLM2, env=ENV) as server:
        s.check_equal(len(server.tokens(s.prose(33, 600), N_PREDICT)), N_PREDICT, "tokens")
        stat = server.stat()
        s.check_equal((stat["kv"], stat["codec_note"]), ("f16", "no context yet"), "a short context")


def bench(work):
    cache = s.own_cache(work)
    methods = ["f16-neap", "lowram", "lowram-sr"]
    done = s.neap(dict(os.environ, XDG_CACHE_HOME=cache, XDG_RUNTIME_DIR=s.runtime_dir(work)),
                  "bench", "decode", "--json", "--model", s.SMOLLM2, "--context", "1100", "--reps",
                  "1", "--threads", "1", "--ratio", "3", "--select", "256", "--method",
                  ",".join(methods))
    f16, coded, select = json.loads(done.stdout)["rows"]
    s.check_equal([r["method"] for r in (f16, coded, select)], methods, "rows")
    s.check_equal([r["kv"] for r in (f16, coded, select)], ["f16", "lowram-3", "lowram-3"], "kv")
    s.check(coded["kv_bytes"] < f16["kv_bytes"], f"{coded['kv_bytes']} of {f16['kv_bytes']}")
    s.check(select["kv_bytes"] > coded["kv_bytes"], "what selection keeps is not counted")


def body(work):
    f16 = answers_f16(work, N_CHUNKS)
    coded_next = memory_and_answers(work, f16)
    selected(work, f16, coded_next)
    shifts(work)
    short(work)
    bench(work)


s.main(body)
