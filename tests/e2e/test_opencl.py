#!/usr/bin/env python3
"""--attn opencl: whole models compute as with our CPU kernels, evictions change nothing, and what
the device cannot do falls back with a warning."""

import os
import re
import subprocess

import support as s


def environment(work, attn, **more):
    env = {k: v for k, v in os.environ.items() if not k.startswith("NEAP_")}
    env.update(XDG_RUNTIME_DIR=s.runtime_dir(work), NEAP_SWAP_DIR=os.path.join(work, "swap"),
               NEAP_POISON="1", NEAP_ATTN=attn, NEAP_LOG="info", OMP_WAIT_POLICY="passive", **more)
    return env


def counts(log):
    """(attentions by the device, by the CPU) of the last context; None: no device was opened."""
    found = re.findall(r"attentions by OpenCL: (\d+), by the CPU's kernels: (\d+)", log)
    return max((int(device), int(cpu)) for device, cpu in found) if found else None


def perplexity(work, attn, *more):
    command = [s.NEAP, "exec", "--", "llama-perplexity", "-m", os.path.join(work, "f32.gguf"),
               "-f", os.path.join(work, "text"), "-c", "512", "--chunks", "4", "-t", "2",
               "--kl-divergence-base", os.path.join(work, "logits"), *more]
    done = subprocess.run(command, env=environment(work, attn), stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=300, check=False)
    out = done.stdout + done.stderr
    reason = re.search(r"no attention by OpenCL: ([^;]*)", out)
    if reason:
        raise s.Skipped(reason.group(1))
    s.check(done.returncode == 0, f"{command}: exit {done.returncode}\n{out[-3000:]}")
    return out


def number(out, pattern):
    found = re.findall(pattern + r"\s*:?\s*([0-9.]+)", out)
    s.check(found, f"no {pattern} in\n{out[-3000:]}")
    return float(found[-1])


def fidelity(work):
    """The weights are widened: quantised ones round the activations to 8 bits too, and what is half
    a step from one value or the other turns any rounding of attention, ours or the host's, into
    1/250 of the distribution."""
    subprocess.run([os.path.join(s.BIN, "llama-quantize"), "--allow-requantize",
                    s.model_path(s.SMOLLM2), os.path.join(work, "f32.gguf"), "F32"],
                   stdin=subprocess.DEVNULL, capture_output=True, timeout=300, check=True)
    with open(os.path.join(work, "text"), "w", encoding="ascii") as file:
        file.write(s.prose(141, 2000))
    perplexity(work, "neap")
    out = perplexity(work, "opencl", "--kl-divergence")
    os.unlink(os.path.join(work, "logits"))
    os.unlink(os.path.join(work, "f32.gguf"))
    device, cpu = counts(out)
    s.check(device > 0 and cpu == 0, f"{device} attentions by the device, {cpu} by the CPU")
    base, own = number(out, r"Mean PPL\(base\)"), number(out, r"Mean PPL\(Q\)")
    same = number(out, "Same top p")
    s.say(f"perplexity {own} against {base}, same first choice {same} %")
    s.check(abs(own / base - 1) <= 0.0005, f"perplexity {own} against {base}")
    s.check(same >= 99.5, f"the same first choice in {same} % only")


def evictions(work, model, slots):
    name = f"{model}, {slots} slots"
    prompts = [s.prose(1000 + i, 1150 - 60 * i) for i in range(slots)]
    with s.Server(work, model, slots=slots, ctx=1536,
                  env=environment(work, "opencl")) as server:
        def answers():
            return [server.tokens(p, 24, i) for i, p in enumerate(prompts)]

        answers()
        resident = answers()
        s.check_equal(answers(), resident, f"{name}: resident answers differ among themselves")
        for share, only in ((50, None), (100, None), (100, "kv")):
            s.check(server.evict(f"{share}%", only)["released_bytes"] > 0,
                    f"{name}: nothing released of {only or 'all'}")
            s.check(server.evicted_units() > 0, f"{name}: no unit evicted at {share} %")
            s.check_equal(answers(), resident, f"{name}: another answer after evicting {share} %")
        s.check_equal(server.stat()["counters"]["errors"], 0, f"{name}: errors counted")
        server.stop()
        device, cpu = counts(server.log_tail(2000))
        s.check(device > 0 and cpu == 0, f"{name}: {device} by the device, {cpu} by the CPU")
    s.say(f"identical after evictions: {name}")


def fallback(work, words, *args, **more):
    """As with --attn neap, and the log says why."""
    prompt = s.prose(5, 300)
    with s.Server(work, s.SMOLLM2, *args, env=environment(work, "neap")) as server:
        expected = server.tokens(prompt, 24)
    with s.Server(work, s.SMOLLM2, *args, env=environment(work, "opencl", **more)) as server:
        s.check_equal(server.tokens(prompt, 24), expected, f"fallback: {words}")
        server.stop()
        log = server.log_tail(2000)
        s.check(log.count(words) == 1, f"{words!r} is not once in the log")
        s.check(counts(log) is None or counts(log)[0] == 0, f"the device computed: {counts(log)}")
    s.say(f"falls back: {words}")


def body(work):
    fidelity(work)
    evictions(work, s.SMOLLM2, 1)
    evictions(work, s.SMOLLM2, 2)
    evictions(work, s.GEMMA, 1)
    fallback(work, "K or V is not f16", "-ctk", "q8_0", "-ctv", "q8_0")
    fallback(work, "no attention by OpenCL: no OpenCL device",
             OCL_ICD_VENDORS=os.path.join(work, "none"), POCL_DEVICES="none")


s.main(body)
