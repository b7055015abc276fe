#!/usr/bin/env python3
"""Bad sizes, bad options and garbage on the control socket get an error; the model keeps answering."""

import json
import os
import socket
import stat as modes

import support as s

GARBAGE = (b"\n", b"hello\n", b"{}\n", b"[]\n", b"null\n", b'{"neap":1}\n', b'{"neap":9,"command":"stat"}\n',
           b'{"neap":1,"command":"format"}\n', b'{"neap":1,"command":"evict"}\n',
           b'{"neap":1,"command":"evict","bytes":0}\n', b'{"neap":1,"command":"evict","bytes":-5}\n',
           b'{"neap":1,"command":"evict","bytes":"much"}\n',
           b'{"neap":1,"command":"evict","bytes":99999999999999999999999}\n',
           b'{"neap":1,"command":"evict","permille":-1}\n',
           b'{"neap":1,"command":"evict","bytes":1,"only":"soul"}\n',
           b'{"neap":1,"command":{"evict":[]}}\n', b"\x00\x01\x02\xff\xfe\n", b"\xc3\x28\n",
           b'{"neap":1,"command":"stat"', b"[" * 20000 + b"\n", b"a" * 300000)


def send(path, text):
    """The reply to one line, b"" when the connection was closed without one."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(5)
        peer.connect(path)
        try:
            peer.sendall(text)
            peer.shutdown(socket.SHUT_WR)
            return peer.recv(65536)
        except (BrokenPipeError, ConnectionResetError):
            return b""


def garbage(server):
    path = server.socket_path()
    s.check_equal(modes.S_IMODE(os.stat(path).st_mode), 0o600, "mode of the socket")
    for text in GARBAGE:
        reply = send(path, text)
        if reply:
            s.check_equal(json.loads(reply)["ok"], False, f"reply to {text[:60]!r}")
            s.check(json.loads(reply)["message"], f"no message for {text[:60]!r}")
    s.check_equal(json.loads(send(path, b'{"neap":1,"command":"stat"}\n'))["ok"], True, "a good line")
    # Connections that say nothing do not keep others out.
    silent = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for peer in silent:
        peer.connect(path)
    server.stat()
    for peer in silent:
        peer.close()


def refused(server, *args):
    done = server.neap(*args, status=None)
    s.check(done.returncode in (1, 2), f"neap {' '.join(args)}: exit {done.returncode}")
    s.check(done.stderr.startswith("neap: ") and len(done.stderr.splitlines()) >= 1,
            f"neap {' '.join(args)}: says {done.stderr!r}")
    s.check_equal(done.stdout, "", f"neap {' '.join(args)}: on standard output")


def body(work):
    prompt = s.prose(61, 300)
    with s.Server(work) as server:
        server.tokens(prompt, 24)
        resident = server.tokens(prompt, 24)
        pid = str(server.pid)
        for size in ("0", "-5", "-5M", "0%", "banana", "", "1.5.5G", "5Q", "99999999999999999999999G"):
            refused(server, "evict", "--pid", pid, "--", size)
        refused(server, "evict", "--pid", pid)
        refused(server, "evict", "--pid", pid, "--only", "soul", "1M")
        refused(server, "evict", "--pid", "1", "1M")
        refused(server, "evict", "--pid", "-3", "1M")
        refused(server, "stat", "--pid", "999999999")
        refused(server, "evict", "--nonsense", "1M")
        refused(server, "nonsense")
        s.check_equal(server.evicted_units(), 0, "a refused command evicted")
        garbage(server)
        s.check_equal(server.evicted_units(), 0, "garbage evicted")
        s.check_equal(server.tokens(prompt, 24), resident, "after bad requests")
        # More than there is: all of it, and that is said.
        s.check(server.evict("900G")["exhausted"], "900G not called exhausted")
        again = server.evict("900G")
        s.check(again["exhausted"] and again["released_bytes"] < 16 * s.MIB, f"second time: {again}")
        s.check_equal(server.tokens(prompt, 24), resident, "after evicting 900G")
        # Two instances, no --pid: they are listed, exit 2.
        with s.Server(work) as other:
            done = server.neap("evict", "1M", status=2)
            s.check(str(server.pid) in done.stderr + done.stdout and
                    str(other.pid) in done.stderr + done.stdout, f"not listed: {done}")
            s.check_equal(server.evicted_units() + other.evicted_units(), 0, "evicted all the same")
            server.neap("evict", "--all", "100%")
            s.check(server.evicted_units() > 0 and other.evicted_units() > 0, "--all left one out")
    s.check(not os.path.exists(server.socket_path()), "the socket outlived its process")
    refused(server, "stat")


s.main(body)
