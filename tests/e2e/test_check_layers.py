#!/usr/bin/env python3
"""The layer check sees each kind of breach, and passes sources that keep the law."""

import os
import subprocess
import sys
import tempfile

CHECK = os.path.join(os.path.dirname(os.path.realpath(__file__)), "..", "..", "tools",
                     "check-layers")
GOOD = {"src/base/err.h": '#include "neap.h"\n#include <errno.h>\n',
        "src/os/vm.c": '#include <sys/mman.h>\n#include "err.h"\n',
        "src/os/vm.h": "#include <stddef.h>\n",
        "src/store/stack.h": '#include "vm.h"\n',
        "src/policy/policy.h": '#include "neap.h"\n',
        "src/pool/pool.c": '#include "stack.h"\n#include "policy.h"\n',
        "src/attn/opencl/device.c": '#include <CL/cl.h>\n#include "vm.h"\n',
        "src/plugin/plugin.c": '#include "ggml.h"\n#include "pool.h"\n',
        "src/lowram/turn.c": "#include <cblas.h>\n",
        "src/train/train.c": '#include <cblas.h>\n#include "turn.h"\n',
        "src/lowram/turn.h": "\n",
        "apps/llama_session.h": "\n",
        "apps/llama_session.c": '#include "llama.h"\n#include "llama_session.h"\n',
        "apps/bench.c": '#include "llama_session.h"\n',
        "src/pool/pool.h": "\n"}
BAD = {"src/base/up.c": '#include "vm.h"\n',
       "src/store/sibling.c": '#include "policy.h"\n',
       "src/store/call.c": "#include <unistd.h>\n",
       "src/pool/ggml.c": '#include "ggml-backend.h"\n',
       "src/pool/lost.c": '#include "nowhere.h"\n',
       "apps/bench.c": '#include "llama.h"\n',
       "src/attn/opencl.c": "#include <CL/cl.h>\n",
       "src/policy/blas.c": "#include <cblas.h>\n",
       "src/elsewhere/new.c": "\n"}


def run(files):
    with tempfile.TemporaryDirectory() as root:
        for path, text in files.items():
            os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
            with open(os.path.join(root, path), "w", encoding="ascii") as out:
                out.write(text)
        done = subprocess.run([sys.executable, CHECK, root], capture_output=True, text=True,
                              check=False)
        return done.returncode, done.stdout


def main():
    status, out = run(GOOD)
    assert (status, out) == (0, ""), (status, out)
    for path, text in BAD.items():
        status, out = run({**GOOD, path: text})
        assert status == 1 and out.count("\n") == 1 and path in out, (path, status, out)
    assert run({})[0] == 1, "no sources at all passed"


main()
