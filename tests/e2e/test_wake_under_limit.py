#!/usr/bin/env python3
"""Waking where memory is short may wait or fail, but the server lives, and once there is memory
again the same context answers as if nothing had been."""

import contextlib
import os
import threading

import support as s

GROUPS = "/sys/fs/cgroup/memory"


@contextlib.contextmanager
def group(pid, limit):
    """A memory group (cgroup v1) that stops its tasks at the limit instead of killing them."""
    path = os.path.join(GROUPS, f"neap-test-{os.getpid()}")
    try:
        os.mkdir(path)
        for name, value in (("memory.limit_in_bytes", limit), ("memory.oom_control", 1),
                            ("cgroup.procs", pid)):
            with open(os.path.join(path, name), "w", encoding="ascii") as file:
                file.write(str(value))
    except OSError as error:
        with contextlib.suppress(OSError):
            os.rmdir(path)
        raise s.Skipped(f"no memory cgroup (v1) to be had: {error}") from error
    try:
        yield path
    finally:
        with contextlib.suppress(OSError), open(os.path.join(GROUPS, "cgroup.procs"), "w",
                                                encoding="ascii") as file:
            file.write(str(pid))
        with contextlib.suppress(OSError):
            os.rmdir(path)


def body(work):
    prompt = s.prose(151, 500)
    with s.Server(work) as server:
        server.tokens(prompt, 24)
        resident = server.tokens(prompt, 24)
        server.evict("100%")
        answers = []

        def ask():
            status, reply = server.call("POST", "/completion", {
                "prompt": prompt, "n_predict": 24, "temperature": 0, "id_slot": 0,
                "cache_prompt": True, "return_tokens": True, "ignore_eos": True})
            answers.append((status, reply.get("tokens")))

        with group(server.pid, 24 * s.MIB) as path:
            asking = threading.Thread(target=ask)
            asking.start()
            asking.join(5)
            s.say("waits for memory" if asking.is_alive() else f"answered {answers[0][0]}")
            s.check(server.alive(), "the server died of it")
            s.check(asking.is_alive() or answers[0][0] != 200, "the limit did not bite")
            with open(os.path.join(path, "memory.limit_in_bytes"), "w", encoding="ascii") as file:
                file.write("-1")
            asking.join(60)
            s.check(not asking.is_alive(), "still waiting, with memory there")
            status, tokens = answers[0]
            s.check(status != 200 or tokens == resident, f"answered {answers[0]}")
            s.check_equal(len(server.tokens(prompt, 24)), 24, "the same prompt again")
            s.check_equal(server.tokens(prompt, 24), resident, "the same prompt, cached")


s.main(body)
