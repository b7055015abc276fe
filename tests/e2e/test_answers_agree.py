#!/usr/bin/env python3
"""What a benchmark of speed never notices: a lossy cache whose answers are gibberish, and structured
answers that are lost deep in a context. A context of 3.4k tokens begins with a document of keys and
values; then, whatever the codec, what comes next is as likely as from the exact cache, and each value
that the exact cache continues with (looked up in the document) is still the first choice. A cache with
the signs of some values flipped fails the same checks, so they can fail."""

import json
import math
import os
import random
import re
import shutil
import struct

import support as s
from klt_training import train

CONTEXT = 2600  # words after the document
N_ITEMS, N_NEXT = 12, 16
TOP = 100
MOST_KL = 0.1
LAYERS, ROW_BYTES = 30, 384  # of SmolLM2: 3 heads of 64, f16


def document(rng):
    """The arguments of a tool, as a model is shown them: names and values that no model knows."""
    names = rng.sample([f"{a}_{b}" for a in ("harbour", "bridge", "silver", "winter", "kiln", "garden")
                        for b in ("code", "owner", "level", "route")], N_ITEMS)
    return {name: "-".join(rng.choice(s.WORDS) for _ in range(2)) + str(rng.randint(10, 99))
            for name in names}


def choices(server, prompt):
    """{token: log of its probability} of the likeliest next tokens."""
    reply = server.complete(prompt, 1, n_probs=TOP)
    return {one["id"]: one["logprob"]
            for one in reply["completion_probabilities"][0]["top_logprobs"]}


def walk(server, prompt, forced):
    """What comes next after the prompt and each beginning of the forced tokens."""
    return [choices(server, prompt + forced[:i]) for i in range(len(forced))]


def divergence(exact, other):
    """KL divergence over the likeliest tokens and all others together; a token that is not among the
    likeliest of the other is as likely as the last of them."""
    least = min(other.values())
    q = {token: other.get(token, least) for token in exact}
    rest_p, rest_q = (max(1 - sum(math.exp(x) for x in of.values()), 1e-6) for of in (exact, q))
    return (sum(math.exp(p) * (p - q[token]) for token, p in exact.items())
            + rest_p * math.log(rest_p / rest_q))


def is_first(step, token):
    return max(step, key=step.get) == token


class Task:
    """Made with the exact cache: the context, what comes next, the values it finds."""

    def __init__(self, server):
        self.values = document(random.Random(9))
        text = "Arguments of the call:\n" + json.dumps(self.values, indent=1) + "\n"
        self.context = server.tokenize(text + s.prose(91, CONTEXT))
        self.next = server.tokens(self.context, N_NEXT)
        self.exact_next = walk(server, self.context, self.next)
        self.slot = server.slot_save("exact")
        self.items = []
        for name, value in self.values.items():
            prompt = self.context + server.tokenize(f'\nArguments of the call:\n{{\n "{name}": "')
            forced = server.tokenize(value)
            steps = walk(server, prompt, forced)
            if all(is_first(step, token) for step, token in zip(steps, forced)):
                self.items.append((prompt, forced, steps))

    def measure(self, server):
        """Mean KL along the next tokens and along the values, and how many values are still found."""
        kl = [divergence(exact, other) for exact, other in
              zip(self.exact_next, walk(server, self.context, self.next))]
        found, of_values = 0, []
        for prompt, forced, exact in self.items:
            steps = walk(server, prompt, forced)
            of_values += [divergence(a, b) for a, b in zip(exact, steps)]
            found += all(is_first(step, token) for step, token in zip(steps, forced))
        return sum(kl) / len(kl), sum(of_values) / len(of_values), found


def from_slot(work, task, path, **options):
    with s.Server(work, s.SMOLLM2, ctx=4096, **options) as server:
        shutil.copy(path, os.path.join(server.slot_dir, "exact"))
        server.slot_restore("exact")
        server.tokens(task.context, 1)
        if "NEAP_KV" not in options.get("env", {}):
            result = server.evict("100%", only="kv")
            s.check(result["kv_memory_bytes"] + result["kv_storage_bytes"] > 0, f"{result}")
        measured = task.measure(server)
        return measured, server.stat()


def holds(task, measured):
    kl, kl_values, found = measured
    return max(kl, kl_values) <= MOST_KL and found >= len(task.items) - 1


def flip_signs(path, to):
    """Of a slot file: the signs of every fourth number of the values, layer by layer after the keys."""
    data = bytearray(s.read_bytes(path))
    header = struct.pack("<iQ", 1, ROW_BYTES)  # f16, bytes of a row
    begins = [match.end() for match in re.finditer(re.escape(header), data)]
    s.check_equal(len(begins), 2 * LAYERS, "planes in the slot file")
    for begin, end in zip(begins[LAYERS:], begins[LAYERS + 1:] + [len(data)]):
        for at in range(begin + 1, end - len(header), 8):
            data[at] ^= 0x80
    with open(to, "wb") as file:
        file.write(data)


def body(work):
    cache = os.path.join(work, "cache")
    os.mkdir(cache)
    model = s.model_path(s.SMOLLM2)
    train(cache, model, "head", 4)
    train(cache, model, "joint", 8)
    with s.Server(work, s.SMOLLM2, ctx=4096) as server:
        task = Task(server)
    s.say(f"{len(task.context)} tokens, {len(task.items)} of {N_ITEMS} values found uncompressed")
    s.check(len(task.items) >= 3, "the model does not do the task at all")
    env = {"XDG_CACHE_HOME": cache}
    for name, options in (("q8", {"codec": "q8"}), ("cachegen", {"codec": "cachegen"}),
                          ("klt:4", {"codec": "klt:4", "env": env}),
                          ("lowram:4", {"codec": "lowram:4"}),
                          ("kv klt:8", {"env": dict(env, NEAP_KV="klt:8")})):
        measured, stat = from_slot(work, task, task.slot, **options)
        s.say(f"{name}: KL {measured[0]:.4f}, of the values {measured[1]:.4f}, {measured[2]} of "
              f"{len(task.items)} found; {stat['codec_note']}")
        if name not in ("q8", "cachegen"):
            s.check(stat["units"]["klt"] > 4 * stat["units"]["klt_left"], f"{name}: {stat['units']}")
        s.check(holds(task, measured), f"{name}: answers are not those of the exact cache")
    flip_signs(task.slot, os.path.join(work, "flipped"))
    measured, _ = from_slot(work, task, os.path.join(work, "flipped"), codec="none")
    s.say(f"signs flipped: KL {measured[0]:.2f}, {measured[1]:.2f}, {measured[2]} found")
    s.check(not holds(task, measured), "a cache of gibberish passes")


s.main(body)
