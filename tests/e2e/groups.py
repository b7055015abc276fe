"""Memory groups with a limit, and a swap device in memory, for tests that need little memory."""

import contextlib
import os
import subprocess
import time

import support as s


def write(path, text):
    """Into a file that is there: no file is made where the kernel has none."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


class Group:
    """A memory group with a limit, of cgroup v2 or v1, whichever this machine lets us make."""

    def __init__(self, name, limit):
        self.path, self.limit, tried = None, limit, []
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
                self.set_limit(limit)
                return
            except OSError as error:
                tried.append(str(error))
                os.rmdir(path)
        raise s.Skipped("no memory group with a limit can be made: " + "; ".join(tried))

    def set_limit(self, limit):
        """OSError: the kernel cannot reclaim as much at once (v1)."""
        self.put("memory.limit_in_bytes" if self.v1 else "memory.max", limit)
        self.limit = limit

    def keep_from_swap(self):
        with contextlib.suppress(OSError):
            self.put("memory.swappiness" if self.v1 else "memory.swap.max", 0)

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
        return self.limit - usage + stat[total + "inactive_file"] + stat[total + "active_file"] // 2

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


@contextlib.contextmanager
def zram(size):
    """Swap into compressed memory, used before any other."""
    try:
        with open("/sys/class/zram-control/hot_add", encoding="ascii") as file:
            number = file.read().strip()
    except OSError as error:
        raise s.Skipped(f"no zRAM device can be made: {error}") from error
    device = f"/dev/zram{number}"
    try:
        write(f"/sys/block/zram{number}/disksize", str(size))
        for _ in range(100):
            if os.path.exists(device):
                break
            time.sleep(0.02)
        subprocess.run(["mkswap", device], check=True, capture_output=True)
        subprocess.run(["swapon", "-p", "32767", device], check=True, capture_output=True)
        yield
    finally:
        subprocess.run(["swapoff", device], check=False, capture_output=True)
        for _ in range(100):
            with contextlib.suppress(OSError):
                write(f"/sys/block/zram{number}/reset", "1")
                write("/sys/class/zram-control/hot_remove", number)
                break
            time.sleep(0.02)
