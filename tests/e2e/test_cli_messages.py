#!/usr/bin/env python3
"""What `neap` says and how it exits: usage errors, and ps, stat, evict, restore against instances
that are played by this script. No model, no backend."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))
NEAP = os.environ.get("NEAP_BIN", os.path.join(ROOT, "build", "bin", "neap"))
MIB = 1 << 20


def neap(*args, env=None):
    done = subprocess.run([NEAP, *args], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=60, env={**os.environ, **(env or {})}, check=False)
    return done.returncode, done.stdout, done.stderr


def check(condition, *what):
    if not condition:
        print("failed:", *what)
        sys.exit(1)


def expect(args, status, err="", out=None, env=None):
    got = neap(*args, env=env)
    check(got[0] == status, args, "status", got, "expected", status)
    check(err in got[2] if err else got[2] == "", args, "stderr", got, "expected", err)
    check(out is None or out == got[1], args, "stdout", got, "expected", out)
    if status:
        check(got[2].startswith("neap: "), args, got)
    return got


class Instance(threading.Thread):
    """Answers on PID.sock of a live process; keeps the requests it got."""

    def __init__(self, folder, pid, state="idle", resident=200 * MIB):
        super().__init__(daemon=True)
        self.pid, self.state, self.resident, self.requests = pid, state, resident, []
        self.reply, self.more = None, {}
        self.path = os.path.join(folder, f"{pid}.sock")
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(self.path)
        self.socket.listen()
        self.start()

    def stat(self):
        return {"pid": self.pid, "program": "played", "model": "m.gguf", "state": self.state,
                "stage": "none", "n_ctx": 4096, "n_contexts": 1, "tokens": 7,
                "bytes": {"weights_total": 400 * MIB, "weights_resident": self.resident,
                          "kv_total": 10 * MIB, "kv_resident": 5 * MIB,
                          "kv_compressed_memory": 2 * MIB, "kv_storage": MIB, "released": 0},
                **self.more}

    def answer(self, request):
        if self.reply is not None:
            return self.reply
        if request["command"] == "stat":
            return {"ok": True, "instance": self.stat()}
        if request["command"] == "restore":
            return {"ok": True, "bytes": 3 * MIB, "duration_ns": 5000000}
        return {"ok": True, "asked_bytes": request.get("bytes", 8 * MIB), "released_bytes": 9 * MIB,
                "weights_bytes": 4 * MIB, "kv_memory_bytes": 6 * MIB, "kv_storage_bytes": MIB,
                "scratch_bytes": 0, "duration_ns": 35000000, "exhausted": False,
                "storage_error": 0}

    def run(self):
        while True:
            connection, _ = self.socket.accept()
            with connection, connection.makefile("rw") as stream:
                for line in stream:
                    request = json.loads(line)
                    self.requests.append(request)
                    reply = self.answer(request)
                    stream.write(reply if isinstance(reply, str) else json.dumps(reply))
                    stream.write("\n")
                    stream.flush()


def usage():
    expect([], 2, "which command?")
    expect(["frobnicate"], 2, "neap: frobnicate: unknown command (see neap --help)")
    for later in (["top"],
                  ["run", "--attn", "vulkan"], ["run", "--kv", "q4_0"],
                  ["serve", "--encrypt", "on"], ["serve", "--session", "a"]):
        expect(later, 2, "not in this version")
    expect(["run", "--kv", "lowram:1"], 2, "--kv lowram:1: not a ratio")
    expect(["train"], 2, "which model?")
    expect(["evict"], 2, "how much?")
    for size in ("0", "0%", "-5M", "5X", "1.5", "%", "99999999999999999999G", ""):
        check(neap("evict", size)[0] == 2, "evict", size)
        check(neap("evict", "--", size)[0] == 2, "evict --", size)
    expect(["evict", "--only", "disk", "1M"], 2, "--only disk")
    expect(["evict", "--pid", "-1", "1M"], 2, "--pid -1")
    expect(["evict", "--pid", "1", "--all", "1M"], 2, "exclude each other")
    expect(["stat", "--nonsense"], 2, "--nonsense: unknown option")
    expect(["run", "--codec", "zip"], 2, "known: q8, cachegen, none")
    for value in ("klt:", "klt:0.5", "klt:0x8", "klt:abc", "klt:65", "lowram:999", "lowram:"):
        expect(["run", "--codec", value], 2, f"--codec {value}: not a ratio from 1.5 to 64")
    for value in ("klt:", "klt:65"):
        expect(["run", "--kv", value], 2, f"--kv {value}: not a ratio from 1.5 to 64")
    for method in ("q9", "q8,klt-head:x"):
        expect(["bench", "fidelity", "--method", method], 2, "unknown", out="")
    expect(["bench", "decode", "--ratio", "65"], 2, "--ratio 65: not a ratio from 1.5 to 64")
    expect(["run"], 2, "known: q8, cachegen, none", env={"NEAP_CODEC": "zip"})
    for variable in ("NEAP_KEEP", "NEAP_SWAP_LIMIT", "NEAP_PRESSURE", "NEAP_THREADS", "NEAP_ATTN",
                     "NEAP_KV_SELECT"):
        expect(["run"], 2, f"environment variable {variable}", env={variable: "zzz"})
    expect(["run", "--policy", "x"], 2, "hybrid, partial-offload")
    expect(["run", "--swap-limit", "5%"], 2, "not a size")
    expect(["run", "--threads", "0"], 2, "--threads 0")
    expect(["exec"], 2, "which program?")
    expect(["models", "fetch", "nosuch"], 2, "neap models lists the names")
    for command in ("run", "serve", "exec", "models", "ps", "evict", "restore", "stat", "profile",
                    "watch", "bench"):
        for option, words in (("--help", f"usage: neap {command}"), ("-h", "usage: "),
                              ("--version", "neap ")):
            status, out, err = neap(command, option)
            check(status == 0 and out.startswith(words) and not err, command, option, out, err)


def models(folder):
    env = {"XDG_CACHE_HOME": folder}
    expect(["run", "nosuch"], 1, "neither a known name nor a file", env=env)
    expect(["run", "gemma3-270m"], 1, "(neap models fetch gemma3-270m)", env=env)
    expect(["run", "/no/such/file.gguf"], 1, "No such file", env=env)
    expect(["run", "/"], 1, "is a folder", env=env)
    damaged = os.path.join(folder, "damaged.gguf")
    for content in (b"", b"GGU", b"GGUFxxxx", b"GGML\3\0\0\0", b"GGUF\1\0\0\0"):
        with open(damaged, "wb") as file:
            file.write(content)
        expect(["run", damaged], 1, damaged, env=env)
    status, out, _ = neap("models", "--json", env=env)
    listed = json.loads(out)["models"]
    check(status == 0 and [m["fetched"] for m in listed] == [False] * 3, listed)
    check(listed[0]["name"] == "smollm2-135m" and listed[0]["default"], listed)


def instances(folder):
    env = {"XDG_RUNTIME_DIR": folder}
    sockets = os.path.join(folder, "neap")
    os.makedirs(sockets, mode=0o700)
    expect(["stat"], 1, "no instance is running", env=env)
    expect(["evict", "1M"], 1, "no instance is running", env=env)
    expect(["evict", "--all", "1M"], 1, "no instance is running", env=env)
    expect(["restore", "--all"], 1, "no instance is running", env=env)
    check(json.loads(neap("ps", "--json", env=env)[1]) == {"instances": []})

    first = Instance(sockets, os.getpid())
    dead = subprocess.Popen(["true"])
    dead.wait()
    stale = os.path.join(sockets, f"{dead.pid}.sock")
    socket.socket(socket.AF_UNIX).bind(stale)
    shown = json.loads(expect(["stat", "--json"], 0, env=env)[1])
    check(shown == {"instances": [first.stat()]}, shown)
    check(not os.path.exists(stale), "socket of a dead process left")
    expect(["evict", "8M"], 0, env=env,
           out="released 9.0 MiB of 8.0 MiB asked in 35 ms: weights 4.0 MiB dropped, "
               "KV 6.0 MiB to memory, 1.0 MiB to storage\n")
    check(first.requests[-1] == {"neap": 1, "command": "evict", "bytes": 8 * MIB, "only": "all"})
    expect(["evict", "--only", "kv", "50%"], 0, env=env)
    check(first.requests[-1] == {"neap": 1, "command": "evict", "permille": 500, "only": "kv"})
    expect(["evict", "300%"], 0, env=env)
    check(first.requests[-1]["bytes"] == 2**63 - 1)
    expect(["restore"], 0, out="restored 3.0 MiB in 5 ms\n", env=env)

    for kv, note, line in (("f16", "f16 instead: untrained", "kv          f16 instead: untrained"),
                           ("f16", "q8 instead: untrained", "codec       q8 instead: untrained"),
                           ("klt-head-4", "klt-head-4; f16 for 2 caches",
                            "kv          held and read as klt-head-4; f16 for 2 caches"),
                           ("f16", "klt-head-4", "codec       klt-head-4")):
        first.more = {"kv": kv, "codec_note": note}
        lines = [text.strip() for text in neap("stat", env=env)[1].splitlines()]
        check([text for text in lines if text.startswith(("kv ", "codec "))] == [line], line, lines)
    for units, line in (({}, "coded       3.50 times smaller, klt's error 1.25 of what is expected at most"),
                        ({"klt_left": 3}, "by q8"),
                        ({"klt_left": 3, "klt_refused": 2}, "3 chunks by q8 (2 of them for its error)")):
        first.more = {"codec": "klt", "codec_note": "klt-head-4", "ratio": 3.5, "error": 1.25,
                      "units": units}
        lines = [text.strip() for text in neap("stat", env=env)[1].splitlines()]
        check(any(text.startswith("coded ") and text.endswith(line) for text in lines), line, lines)
    first.more = {}

    for reply in ("", "garbage", "[]", '{"ok":true}' + "x", {"ok": True}, {"ok": False}, {}):
        first.reply = reply
        expect(["stat", "--pid", str(first.pid)], 1, f"pid {first.pid}", env=env)
    first.reply = {"ok": False, "error": -5, "message": "the disk burnt"}
    for command in (["evict", "1M"], ["evict", "--all", "1M"], ["stat"], ["ps"]):
        expect(command, 1, "does not answer", env=env)  # never taken for success
    first.reply = None
    several(sockets, first, env)


def several(sockets, first, env):
    other = subprocess.Popen(["sleep", "600"])
    try:
        second = Instance(sockets, other.pid, resident=300 * MIB)
        for command in (["stat"], ["evict", "1M"], ["restore"]):
            _, _, err = expect(command, 2, "2 instances are running", env=env)
            check(str(first.pid) in err and str(second.pid) in err, err)
        expect(["stat", "--pid", str(second.pid)], 0, env=env)
        expect(["stat", "--pid", "1"], 1, "no running instance", env=env)
        check(len(json.loads(neap("ps", "--json", env=env)[1])["instances"]) == 2)

        # The largest idle one first; 9 MiB of the 15 asked come from it.
        _, out, _ = expect(["evict", "--all", "15M"], 0, env=env)
        check([line.split(":")[0] for line in out.splitlines()] ==
              [f"pid {second.pid}", f"pid {first.pid}"], out)
        check(first.requests[-1]["bytes"] == 6 * MIB, first.requests[-1])
        second.state = "inference"
        _, out, _ = expect(["evict", "--all", "1M"], 0, env=env)
        check(out.startswith(f"pid {first.pid}:") and len(out.splitlines()) == 1, out)
    finally:
        other.kill()
        other.wait()


def put(root, path, text):
    path = os.path.join(root, path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)  # in place: neap keeps it open
    os.pwrite(fd, text.encode(), 0)
    os.close(fd)


def available(root, mib, some=0.0):
    """16 GiB, of which so much is available: low is 1 GiB, enough 2."""
    put(root, "proc/meminfo", f"MemTotal: {16 << 20:10} kB\nMemAvailable: {mib << 10:10} kB\n")
    put(root, "proc/pressure/memory", "".join(
        f"{kind} avg10={value:5.2f} avg60=0.00 avg300=0.00 total=1\n"
        for kind, value in (("some", some), ("full", 0))))


def watch(folder):
    env = {"XDG_RUNTIME_DIR": folder}
    root, sockets = os.path.join(folder, "root"), os.path.join(folder, "neap")
    os.makedirs(sockets, mode=0o700)
    once = ["watch", "--once", "--root", root]
    expect(["watch", "now"], 2, "one argument too many")
    expect([*once], 1, "is /proc mounted?", env=env)
    expect(["watch", "--once"], 1, "turns it off", env={**env, "MEMORY_PRESSURE_WATCH": "/dev/null"})
    available(root, 8000)
    expect(once, 0, out="no pressure: 7.8 GiB of 16.0 GiB available\n", env=env)
    available(root, 500)
    expect(once, 0, out="memory is short, but no instance can give any back: "
                        "500.0 MiB of 16.0 GiB available\n", env=env)
    first = Instance(sockets, os.getpid())
    expect([*once, "--dry-run"], 0, env=env,
           out=f"pid {first.pid} (played): would release 207.0 MiB of 207.0 MiB wanted; "
               "500.0 MiB of 16.0 GiB available\n")
    check("evict" not in [r["command"] for r in first.requests], "--dry-run evicted")
    said = json.loads(expect([*once, "--dry-run", "--json"], 0, env=env)[1])
    check(said["level"] == "critical" and said["wanted_bytes"] == 207 * MIB and said["dry_run"]
          and said["instances"][0]["pid"] == first.pid and said["group"] is None, said)
    available(root, 900)  # short, not critical: who computes is left alone
    first.state = "inference"
    expect([*once, "--dry-run"], 0, out="memory is short, but no instance can give any back: "
           "900.0 MiB of 16.0 GiB available\n", env=env)
    first.state = "idle"
    expect(once, 0, env=env,
           out=f"pid {first.pid} (played): released 9.0 MiB of 207.0 MiB wanted in 35 ms; "
               "900.0 MiB of 16.0 GiB available\n")
    check(first.requests[-1] == {"neap": 1, "command": "evict", "bytes": 207 * MIB, "only": "all",
                                 "by_pressure": True},
          first.requests[-1])

    # The limit of the memory group.
    available(root, 8000)
    put(root, "proc/self/cgroup", "0::/app\n")
    put(root, "proc/self/mountinfo", "25 30 0:23 / /cg rw - cgroup2 cgroup2 rw\n")
    for name, value in (("current", 1000 * MIB), ("max", 1024 * MIB)):
        put(root, f"cg/app/memory.{name}", f"{value}\n")
    expect([*once, "--dry-run"], 0, env=env,
           out=f"pid {first.pid} (played): would release 104.0 MiB of 104.0 MiB wanted; "
               "24.0 MiB of 1.0 GiB available in the memory group\n")
    put(root, "cg/app/memory.current", f"{100 * MIB:10}\n")
    service(root, first, env)


def service(root, first, env):
    available(root, 1500)
    seen = len(first.requests)
    with subprocess.Popen([NEAP, "watch", "--json", "--root", root], env={**os.environ, **env},
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            time.sleep(1)
            check(first.requests[seen:] == [], "asked without need", first.requests[seen:])
            expect(["watch", "--root", root], 1, "another neap watch is running", env=env)
            os.truncate(os.path.join(root, "proc/meminfo"), 0)  # a moment in which nothing is read
            os.truncate(os.path.join(root, "proc/pressure/memory"), 0)
            time.sleep(0.5)
            available(root, 700)
            line = json.loads(process.stdout.readline())
            check(line["level"] == "short" and line["instances"][0]["released_bytes"] == 9 * MIB,
                  line)
            available(root, 8000)
            process.terminate()
            out, err = process.communicate(timeout=20)
            check(process.returncode == 0 and not err, process.returncode, err, out)
            for more in out.splitlines():
                json.loads(more)
        finally:
            process.kill()


def main():
    if not os.access(NEAP, os.X_OK):
        print(f"{NEAP} is not built")
        sys.exit(1)
    with tempfile.TemporaryDirectory(prefix="neap-") as folder:
        usage()
        models(folder)
        instances(folder)
    with tempfile.TemporaryDirectory(prefix="neap-") as folder:
        watch(folder)
    print("ok")


if __name__ == "__main__":
    main()
