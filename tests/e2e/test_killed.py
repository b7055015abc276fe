#!/usr/bin/env python3
"""A killed process leaves no swap file, and its stale socket is cleaned up."""

import os

import support as s


def files_under(folder):
    return [os.path.join(where, name) for where, _, names in os.walk(folder) for name in names]


def body(work):
    for rounds in range(3):
        with s.Server(work) as server:
            server.tokens(s.prose(131 + rounds, 500), 8)
            s.check(server.evict("100%")["kv_storage_bytes"] > 0, "nothing in the swap file")
            s.check(os.path.isdir(server.swap_dir), "no swap folder")
            server.kill()
            s.check_equal(files_under(server.swap_dir), [], "files left in the swap folder")
            done = server.neap("ps", "--json")
            s.check(f'"pid":{server.pid}' not in done.stdout.replace(" ", ""),
                    f"the dead are listed: {done.stdout}")
            s.check(not os.path.exists(server.socket_path()), "the stale socket is still there")
    with s.Server(work) as server:
        server.tokens(s.prose(135, 200), 4)
        server.evict("100%")
    s.check_equal(files_under(server.swap_dir), [], "files left after an orderly end")
    s.check(not os.path.exists(server.socket_path()), "socket left after an orderly end")


s.main(body)
