#!/usr/bin/env python3
"""A server and a program that dirties memory share a limit that is too small for both: neap gives
memory back before anybody is OOM-killed, and afterwards answers as before, bit for bit. Without
neap's watching the same load ends in a kill, so there was something to prevent."""

import contextlib
import os
import subprocess
import sys
import time

import support as s

LIMIT = 480 * s.MIB
MORE_THAN_THERE_IS = 90 * s.MIB  # what the other program takes beyond what is available
RATE = 200 * s.MIB               # a second

DIRTY = """
import mmap, sys, time
size, rate = int(sys.argv[1]), int(sys.argv[2])
memory, step = mmap.mmap(-1, size), 1 << 20
began, page = time.monotonic(), b"x" * step
for at in range(0, size - step, step):
    memory[at:at + step] = page
    time.sleep(max(0, began + at / rate - time.monotonic()))
print("dirtied", flush=True)
sys.stdin.read()
"""


def write(path, text):
    """Into a file that is there: no file is made where the kernel has none."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


class Group:
    """A memory group with a limit, of cgroup v2 or v1, whichever this machine lets us make."""

    def __init__(self, name):
        self.path, tried = None, []
        for parent, v1 in (("/sys/fs/cgroup", False), ("/sys/fs/cgroup/memory", True)):
            self.parent, self.v1, path = parent, v1, os.path.join(parent, name)
            try:
                if not v1:
                    write(os.path.join(parent, "cgroup.subtree_control"), "+memory")
                elif not os.path.exists(os.path.join(parent, "memory.limit_in_bytes")):
                    raise OSError(f"{parent} is no cgroup v1")
                os.mkdir(path)
            except OSError as error:
                tried.append(str(error))
                continue
            try:
                self.path = path
                self.put("memory.limit_in_bytes" if v1 else "memory.max", LIMIT)
                with contextlib.suppress(OSError):  # no way out but to give memory back
                    self.put("memory.swappiness" if v1 else "memory.swap.max", 0)
                return
            except OSError as error:
                tried.append(str(error))
                os.rmdir(path)
        raise s.Skipped("no memory group with a limit can be made: " + "; ".join(tried))

    def put(self, name, value):
        write(os.path.join(self.path, name), str(value))

    def get(self, name):
        with open(os.path.join(self.path, name), encoding="ascii") as file:
            return file.read()

    def fields(self, name):
        return {line.split()[0]: int(line.split()[1]) for line in self.get(name).splitlines()}

    def kills(self):
        return self.fields("memory.oom_control" if self.v1 else "memory.events")["oom_kill"]

    def available(self):
        usage = int(self.get("memory.usage_in_bytes" if self.v1 else "memory.current"))
        stat, total = self.fields("memory.stat"), "total_" if self.v1 else ""
        return LIMIT - usage + stat[total + "inactive_file"] + stat[total + "active_file"] // 2

    @contextlib.contextmanager
    def entered(self):
        """What this process starts inside lies in the group; it itself only meanwhile."""
        with open("/proc/self/cgroup", encoding="ascii") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
        home = [path for _, controllers, path in lines
                if ("memory" in controllers.split(",") if self.v1 else controllers == "")]
        self.put("cgroup.procs", os.getpid())
        try:
            yield
        finally:
            write(self.parent + home[0].rstrip("/") + "/cgroup.procs", str(os.getpid()))

    def remove(self):
        for _ in range(100):
            with contextlib.suppress(OSError):
                os.rmdir(self.path)
                return
            time.sleep(0.05)


def share_the_limit(work, group, pressure):
    """Whether all survived; checks what they answered."""
    prompt, begun = s.prose(161, 700), group.kills()
    with group.entered():
        server = s.Server(work, s.SMOLLM2, through_serve=True, env={"NEAP_PRESSURE": pressure})
    with server:
        server.tokens(prompt, 24)
        resident = server.tokens(prompt, 24)
        s.check_equal(server.stat()["counters"]["evictions"], 0, "evicted before it was short")
        size = group.available() + MORE_THAN_THERE_IS
        with group.entered():
            dirty = subprocess.Popen([sys.executable, "-c", DIRTY, str(size), str(RATE)],
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            done = dirty.stdout.readline() == "dirtied\n"
            survived = group.kills() == begun and server.alive() and done
            s.say(f"pressure {pressure}: dirtied {size / s.MIB:.0f} MiB in {LIMIT // s.MIB}, "
                  f"{group.kills() - begun} killed")
            if pressure == "on":
                seen = server.stat()["pressure"]
                s.say(f"  {seen}, {group.available() / s.MIB:.0f} MiB left")
                s.check(survived, "somebody was killed, or gave up")
                s.check(seen["releases"] >= 1, "not by neap")
                s.check(seen["looks"] < 200, "it was awake all the time")
        finally:
            dirty.stdin.close()
            dirty.kill()
            dirty.wait()
        if survived:
            s.check_equal(server.tokens(prompt, 24), resident, "the answer after it")
            s.check_equal(server.tokens(prompt, 24), resident, "and once more")
    return survived


def body(work):
    group = Group(f"neap-test-{os.getpid()}")
    try:
        s.check(share_the_limit(work, group, "on"), "somebody was killed")
        s.check(not share_the_limit(work, group, "off"), "the limit did not bite")
    finally:
        group.remove()


s.main(body)
