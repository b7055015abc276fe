#!/usr/bin/env python3
"""klt and lowram are for any GGUF, not for models that someone prepared: of a made-up model with heads
of 48, klt is trained and both code what is evicted, and it comes back the same from then on. Where
there are no keys and values of that kind (latent attention, a recurrent state) q8 codes what there is,
or nothing is coded, which is said, and it answers."""

import os

import support as s
import shape_models
from klt_training import little_text

N_PREDICT = 16


def train(work, cache, model):
    path = os.path.join(work, "text.txt")
    with open(path, "w", encoding="utf-8") as text:
        text.write(little_text())
    return s.neap(dict(os.environ, XDG_CACHE_HOME=cache), "train", "--json", "--profile", "joint",
                  "--ratio", "4", model, path, status=None)


def codes(work, cache, model, codec):
    with s.Server(work, model, codec=codec, env={"XDG_CACHE_HOME": cache}) as server:
        prompt = server.tokenize(s.prose(61, 1300))
        answer = server.tokens(prompt, N_PREDICT)
        exact = s.read_bytes(server.slot_save("0"))
        server.evict("100%", only="kv")
        stat = server.stat()
        once = s.read_bytes(server.slot_save("1"))
        s.check_equal(stat["codec"], codec.split(":")[0], f"codec in use: {stat['codec_note']}")
        s.check(stat["units"]["klt"] >= 2 * stat["units"]["klt_left"], f"{codec}: {stat['units']}")
        s.check(stat["ratio"] > 2.2 and stat["error"] < 4, f"{codec}: {stat['ratio']}, {stat['error']}")
        s.check(once != exact and len(once) == len(exact), f"{codec} changed nothing: was it used?")
        server.evict("100%", only="kv")
        s.check(s.read_bytes(server.slot_save("2")) == once, f"{codec}: a second cycle changed bytes")
        first = s.next_tokens(server, prompt, answer)
        agree = sum(a == b for a, b in zip(first, answer))
        server.evict("100%")
        s.check_equal(s.next_tokens(server, prompt, answer), first, f"{codec}: after another cycle")
        s.check_equal(server.stat()["counters"]["errors"], 0, "errors")
        s.say(f"{codec}: {stat['ratio']:.2f} times smaller, error {stat['error']:.2f}, "
              f"{agree} of {N_PREDICT} tokens agree; {stat['codec_note']}")
        s.check(agree >= N_PREDICT // 2, f"{codec}: only {agree} tokens agree")


def falls_back(work, cache, model, codec, says):
    with s.Server(work, model, codec=codec, env={"XDG_CACHE_HOME": cache}) as server:
        prompt = server.tokenize(s.prose(62, 600))
        answer = server.tokens(prompt, N_PREDICT)
        server.evict("100%")
        stat = server.stat()
        s.check_equal(stat["codec"], "q8", f"{codec}: codec in use")
        s.check(says in stat["codec_note"], f"{codec} says {stat['codec_note']!r}")
        s.check(says in server.neap("stat").stdout and says in server.log_tail(200), "it is not said")
        s.check_equal(stat["units"]["klt"], 0, "chunks by it")
        again = server.tokens(prompt, N_PREDICT)
        agree = sum(a == b for a, b in zip(again, answer))
        s.say(f"{codec}: {agree} of {N_PREDICT} tokens agree; {stat['codec_note']}")
        s.check_equal(len(again), N_PREDICT, "tokens")
        s.check_equal(server.stat()["counters"]["errors"], 0, "errors")


def body(work):
    tokenizer = s.model_path(s.SMOLLM2)
    paths = {shape: shape_models.write(os.path.join(work, f"{shape}.gguf"), tokenizer, shape)
             for shape in ("dense", "latent", "recurrent")}
    cache = os.path.join(work, "cache")
    os.mkdir(cache)
    done = train(work, cache, paths["dense"])
    s.check(done.returncode == 0, f"neap train: exit {done.returncode}\n{done.stderr}")
    codes(work, cache, paths["dense"], "klt:4")
    codes(work, cache, paths["dense"], "lowram:4")
    for shape, says in (("latent", "no cache of this model has keys"),
                        ("recurrent", "no cache of keys and values")):
        falls_back(work, cache, paths[shape], "lowram", says)
        falls_back(work, cache, paths[shape], "klt", "q8 instead: klt has learned nothing")
        done = train(work, cache, paths[shape])
        s.check(done.returncode == 1 and done.stderr.startswith("neap: "),
                f"{shape}: neap train: exit {done.returncode}\n{done.stderr}")
        s.say(f"{shape}: {done.stderr.splitlines()[0]}")


s.main(body)
