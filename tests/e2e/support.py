"""support.py - what the end-to-end tests share: servers, requests, control, memory, verdicts.

A test is a program: main(body) runs body(work), where work is a folder of its own that is gone
afterwards. Exit status 0 passed, 77 skipped with the reason as last line, else failed.
Everything a test starts lives in its process group and in its folder.
"""

import concurrent.futures
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback

ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))
BUILD = os.environ.get("NEAP_TEST_BUILD", os.path.join(ROOT, "build"))
BIN = os.path.join(BUILD, "bin")
NEAP = os.path.join(BIN, "neap")
PLUGIN = os.path.join(BUILD, "lib", "libggml-neap.so")
MODELS = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"),
                      "neap", "models")
ALL = os.environ.get("NEAP_TEST_ALL") == "1"

SMOLLM2 = "smollm2-135m"
QWEN = "qwen2.5-coder-0.5b"
GEMMA = "gemma3-270m"

MIB = 1 << 20
REQUEST_LIMIT_S = 300


class Failed(Exception):
    """A check of a test did not hold."""


class Skipped(Exception):
    """The test cannot run here; the text says why."""


def check(condition, text):
    if not condition:
        raise Failed(text)


def check_equal(got, expected, text):
    if got != expected:
        raise Failed(f"{text}\n  got      {got!r}\n  expected {expected!r}")


def say(text):
    print(text, flush=True)


# ---- text ----

WORDS = ("the river carried a small boat past mills and gardens while people on the bank spoke of "
         "rain harvest prices music and the long road north where old bridges wait for travellers "
         "each winter brings letters from far cities about ships glass paper silver maps and kind "
         "strangers who teach children to count stars name birds and mend what the storm broke").split()


def prose(seed, n_words):
    """Varied, reproducible text of n_words words, about 1.2 tokens each."""
    rng = random.Random(seed)
    out = []
    while len(out) < n_words:
        n = rng.randint(5, 12)
        sentence = [rng.choice(WORDS) for _ in range(n)]
        out += [sentence[0].capitalize(), *sentence[1:-1], sentence[-1] + "."]
    return " ".join(out[:n_words])


def read_bytes(path):
    with open(path, "rb") as file:
        return file.read()


def next_tokens(server, prompt, forced):
    """The most likely token after the prompt and each beginning of the forced tokens."""
    return [server.tokens(prompt + forced[:i], 1)[0] for i in range(len(forced))]


# ---- server ----

def neap(env, *args, status=0, limit_s=REQUEST_LIMIT_S):
    """Runs a command of the CLI, which must end with that status (None: any) within so many seconds;
    what it wrote is text."""
    done = subprocess.run([NEAP, *args], env=env, stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=limit_s, check=False)
    check(status is None or done.returncode == status,
          f"neap {' '.join(args)}: exit {done.returncode}, not {status}\n{done.stdout}{done.stderr}")
    return done


def model_path(name):
    path = name if os.sep in name else os.path.join(MODELS, name + ".gguf")
    if not os.path.exists(path):
        raise Skipped(f"no model {name} (tools/setup --tests fetches it)")
    return path


def own_cache(work):
    """A cache folder of the test's own, with the models of the user's; its path."""
    cache = os.path.join(work, "cache")
    os.makedirs(os.path.join(cache, "neap"))
    os.symlink(MODELS, os.path.join(cache, "neap", "models"))
    return cache


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """An unmodified llama-server; backend=False: without neap."""

    def __init__(self, work, model=SMOLLM2, *args, backend=True, codec="none", env=None,
                 through_serve=False, ctx=2048, slots=1, flash="on", poison=True):
        self.port = free_port()
        self.model = model_path(model)
        self.folder = tempfile.mkdtemp(prefix="server-", dir=work)
        self.swap_dir = os.path.join(self.folder, "swap")
        self.slot_dir = os.path.join(self.folder, "slots")
        os.mkdir(self.slot_dir)
        self.log_path = os.path.join(self.folder, "log")
        self.env = dict(os.environ, XDG_RUNTIME_DIR=runtime_dir(work), LLAMA_ARG_CACHE_RAM="0",
                        OMP_WAIT_POLICY="passive")  # two cores that others may use too
        for name in [n for n in self.env if n.startswith("NEAP_")]:
            del self.env[name]
        options = ["--host", "127.0.0.1", "--port", str(self.port), "-c", str(ctx * slots),
                   "-np", str(slots), "-t", "2", "-fa", flash, "--slot-save-path", self.slot_dir,
                   *args]
        command = [os.path.join(BIN, "llama-server"), "-m", self.model]
        if backend:
            # Placement of a test does not depend on what was measured here, nor change it; and what
            # others do on this machine must not evict here, unless a test is about that.
            self.env.update(NEAP_CODEC=codec, NEAP_SWAP_DIR=self.swap_dir, NEAP_PROFILE="off",
                            NEAP_PRESSURE="off")
            if poison:
                self.env["NEAP_POISON"] = "1"
            if through_serve:
                command = [NEAP, "serve", self.model, "--"]
            else:
                self.env.update(GGML_BACKEND_PATH=PLUGIN, LLAMA_ARG_DEVICE="NEAP")
        self.env.update(env or {})
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(command + options, env=self.env, stdout=log,
                                            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        self.pid = self.process.pid
        try:
            self.wait_healthy(backend)
        except BaseException:
            self.stop()
            raise

    def wait_healthy(self, backend):
        deadline = time.monotonic() + 120
        while True:
            if self.process.poll() is not None:
                raise Failed(f"llama-server ended with {self.process.returncode}\n{self.log_tail()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.get("/health", limit_s=5)[0] == 200:
                    break
            check(time.monotonic() < deadline, f"not healthy after 120 s\n{self.log_tail()}")
            time.sleep(0.05)
        if backend:
            self.stat()  # the backend is really there

    def log_tail(self, n=40):
        with open(self.log_path, encoding="utf-8", errors="replace") as log:
            return "".join(log.readlines()[-n:])

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is not None:
            say(f"--- log of llama-server {self.pid}, exit {self.process.poll()}\n"
                + self.log_tail())
        self.stop()

    # requests

    def call(self, method, path, body=None, limit_s=REQUEST_LIMIT_S):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=limit_s)
        try:
            connection.request(method, path, None if body is None else json.dumps(body),
                               {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"null")
        finally:
            connection.close()

    def get(self, path, limit_s=REQUEST_LIMIT_S):
        return self.call("GET", path, limit_s=limit_s)

    def post(self, path, body):
        status, reply = self.call("POST", path, body)
        check(status == 200, f"POST {path}: status {status}: {reply}")
        return reply

    def complete(self, prompt, n_predict=128, slot=0, **more):
        """Greedy answer; the reply has content, tokens and timings (prompt_n, cache_n)."""
        body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "seed": 1,
                "cache_prompt": True, "id_slot": slot, "return_tokens": True, "ignore_eos": True}
        body.update(more)
        return self.post("/completion", body)

    def tokens(self, prompt, n_predict=128, slot=0, **more):
        return self.complete(prompt, n_predict, slot, **more)["tokens"]

    def stream(self, prompt, n_predict, at, slot=0, **more):
        """Greedy answer, streamed; at[k]() is called once k tokens have come."""
        body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "seed": 1,
                "cache_prompt": True, "id_slot": slot, "return_tokens": True, "ignore_eos": True,
                "stream": True}
        body.update(more)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_LIMIT_S)
        tokens, due = [], sorted(at)
        try:
            connection.request("POST", "/completion", json.dumps(body),
                               {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise Failed(f"stream: status {response.status}: {response.read()!r}")
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                tokens += json.loads(line[len(b"data: "):]).get("tokens", [])
                while due and len(tokens) >= due[0]:
                    at[due.pop(0)]()
        finally:
            connection.close()
        check(not due, f"the stream ended after {len(tokens)} tokens, before token {due}")
        return tokens

    def tokenize(self, text):
        return self.post("/tokenize", {"content": text})["tokens"]

    def slot_save(self, name, slot=0):
        """Saves the slot; the path of the file."""
        self.post(f"/slots/{slot}?action=save", {"filename": name})
        return os.path.join(self.slot_dir, name)

    def slot_restore(self, name, slot=0):
        return self.post(f"/slots/{slot}?action=restore", {"filename": name})

    def slot_erase(self, slot=0):
        return self.post(f"/slots/{slot}?action=erase", {})

    # control

    def neap(self, *args, status=0):
        """Runs a command of the CLI against this instance; its standard output."""
        return neap(self.env, *args, status=status)

    def evict(self, size="100%", only=None):
        part = ["--only", only] if only else []
        out = self.neap("evict", "--pid", str(self.pid), "--json", *part, str(size)).stdout
        return json.loads(out)["instances"][0]

    def restore(self):
        out = self.neap("restore", "--pid", str(self.pid), "--json").stdout
        return json.loads(out)["instances"][0]

    def stat(self):
        out = self.neap("stat", "--pid", str(self.pid), "--json").stdout
        instances = json.loads(out)["instances"]
        check(len(instances) == 1 and instances[0]["pid"] == self.pid, f"neap stat says {out}")
        return instances[0]

    def evicted_units(self):
        units = self.stat()["units"]
        return units["weights_evicted"] + units["kv_evicted"]

    def socket_path(self):
        return os.path.join(self.env["XDG_RUNTIME_DIR"], "neap", f"{self.pid}.sock")

    # memory and threads

    def held(self):
        return held(self.pid)

    def alive(self):
        return self.process.poll() is None


def runtime_dir(work):
    """Short, for socket paths are limited to 108 bytes; of this test alone."""
    path = os.path.join(work, "run")
    os.makedirs(path, mode=0o700, exist_ok=True)
    return path


def smaps_rollup(pid):
    values = {}
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as text:
        for line in text:
            match = re.match(r"(\w+):\s+(\d+) kB", line)
            if match:
                values[match.group(1)] = int(match.group(2)) * 1024
    return values


def held(pid):
    """Bytes of anonymous and shared memory of the process, swapped ones included."""
    values = smaps_rollup(pid)
    return values.get("Pss_Anon", 0) + values.get("Pss_Shmem", 0) + values.get("SwapPss", 0)


def threads(pid):
    """{tid: (name, context switches so far)}"""
    out = {}
    for tid in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError):
            with open(f"/proc/{pid}/task/{tid}/status", encoding="ascii") as text:
                fields = dict(line.rstrip("\n").split(":\t", 1) for line in text if ":\t" in line)
            out[int(tid)] = (fields["Name"], int(fields["voluntary_ctxt_switches"])
                             + int(fields["nonvoluntary_ctxt_switches"]))
    return out


def cpu_ticks(pid):
    with open(f"/proc/{pid}/stat", encoding="ascii") as text:
        fields = text.read().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def at_once(*calls):
    """Runs the calls at the same time; their results in order."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [f.result() for f in [pool.submit(c) for c in calls]]


# ---- verdict ----

def main(body):
    for path in (NEAP, PLUGIN, os.path.join(BIN, "llama-server")):
        if not os.path.exists(path):
            print(f"{path} is not built (make build)")
            sys.exit(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    work = tempfile.mkdtemp(prefix="neap-e2e-")
    try:
        body(work)
        status = 0
    except Skipped as reason:
        print(f"skipped: {reason}")
        status = 77
    except Failed as reason:
        traceback.print_exc()
        print(f"failed: {reason}")
        status = 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    sys.exit(status)
