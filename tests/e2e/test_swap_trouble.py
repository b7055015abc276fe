#!/usr/bin/env python3
"""A swap folder that is full, read-only, missing or limited costs memory that stays, nothing else."""

import contextlib
import os
import subprocess

import support as s


@contextlib.contextmanager
def tmpfs(work, options):
    path = os.path.join(work, "tmpfs")
    os.makedirs(path, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "neap-test", path],
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        yield None
        return
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=False)


def stays_whole(work, name, swap_dir, limit=None, then=None, unusable=False):
    env = {"NEAP_SWAP_DIR": swap_dir}
    if limit:
        env["NEAP_SWAP_LIMIT"] = limit
    prompt = s.prose(101, 900)
    with s.Server(work, env=env) as server:
        server.tokens(prompt, 24)
        resident = server.tokens(prompt, 24)
        warned = "no swap file can be made in " + swap_dir in server.log_tail(10000)
        s.check_equal(warned, unusable, f"{name}: warned at the start")
        result = server.evict("100%", only="kv")
        s.check(result["storage_error"], f"{name}: no word of it: {result}")
        stat = server.stat()
        s.check(stat["units"]["kv_evicted"] < stat["units"]["kv"], f"{name}: all KV gone: {stat}")
        s.check_equal(server.tokens(prompt, 24), resident, f"{name}: another answer")
        result = server.evict("100%")
        s.check(result["weights_bytes"] > 0, f"{name}: weights not evicted: {result}")
        s.check_equal(server.tokens(prompt, 24), resident, f"{name}: another answer")
        s.check_equal(server.stat()["units"]["lost"], 0, f"{name}: lost units")
        if then:
            then()
            result = server.evict("100%", only="kv")
            s.check_equal(result["storage_error"], None, f"{name}: after room was made")
            s.check(result["kv_storage_bytes"] > 0, f"{name}: after room was made: {result}")
            s.check_equal(server.tokens(prompt, 24), resident, f"{name}: after room was made")
        s.say(f"{name}: told ({result['storage_error']}), identical")


def remount(path, options):
    subprocess.run(["mount", "-o", "remount," + options, path], check=True)


def body(work):
    in_the_way = os.path.join(work, "a-file")
    with open(in_the_way, "w", encoding="ascii") as file:
        file.write("not a folder\n")
    stays_whole(work, "swap folder is a file", os.path.join(in_the_way, "swap"),
                unusable=True)
    limited = os.path.join(work, "limited")
    stays_whole(work, "swap limit of 4 MiB", limited, limit="4M")
    with tmpfs(work, "size=6m") as path:
        if path is None:
            s.say("full and read-only folder not tried: no right to mount")
            return
        stays_whole(work, "full disk", path, then=lambda: remount(path, "size=512m"))
        remount(path, "ro")
        stays_whole(work, "read-only folder", path, then=lambda: remount(path, "rw,size=512m"),
                    unusable=True)


s.main(body)
