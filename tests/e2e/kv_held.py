"""What the tests of KV that is held coded share: prompts, what they add to memory, f16's answers."""

import support as s

N_PREDICT = 16
CHUNK = 256


def peak(pid):
    with open(f"/proc/{pid}/status", encoding="ascii") as text:
        return next(int(line.split()[1]) * 1024 for line in text if line.startswith("VmHWM"))


def restart_peak(pid):
    with open(f"/proc/{pid}/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def kv_held(stat):
    """What the KV of an instance takes in memory by its own account."""
    return stat["bytes"]["kv_resident"] + stat["bytes"]["kv_compressed_memory"]


def a_prompt(server, seed, n_chunks):
    """So many chunks and a few tokens: no further chunk falls due while some are asked for."""
    tokens = server.tokenize(s.prose(seed, n_chunks * CHUNK))
    s.check(len(tokens) > n_chunks * CHUNK + 40, "the text is too short")
    return tokens[:n_chunks * CHUNK + 40]


def feed(server, prompt):
    """A long one in parts: no request takes longer than it may."""
    for n in [*range(4096, len(prompt), 4096), len(prompt)]:
        server.tokens(prompt[:n], 1)


def grow(server, prompt):
    """What the prompt adds to memory: held, at most meanwhile, said to be KV."""
    server.tokens(s.prose(42, 40), 8)
    server.slot_erase()
    held, said = server.held(), kv_held(server.stat())
    restart_peak(server.pid)
    most = peak(server.pid)
    feed(server, prompt)
    return server.held() - held, peak(server.pid) - most, kv_held(server.stat()) - said


def answers_f16(work, n_chunks, model=s.SMOLLM2, ctx=8192):
    """The prompt, what f16 answers, the most likely tokens along it, bytes of its KV, and what the
    server needs beside."""
    with s.Server(work, model, ctx=ctx) as server:
        prompt = a_prompt(server, 41, n_chunks)
        held, _, said = grow(server, prompt)
        answer = server.tokens(prompt, N_PREDICT)
        return prompt, answer, s.next_tokens(server, prompt, answer), said, held - said


def agreement(a, b):
    return sum(x == y for x, y in zip(a, b))
