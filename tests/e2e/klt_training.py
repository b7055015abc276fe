"""What klt learns, small and quick, for the tests that use it."""

import json
import os
import subprocess

import support as s


def train(cache, model, profile, ratio, more=""):
    """A training on little text, and more of it; the path of its file."""
    texts = os.path.join(s.ROOT, "share", "calibration")
    text = os.path.join(cache, "text.txt")
    with open(text, "w", encoding="utf-8") as out:
        for name in ("01-devils-dictionary-en.txt", "07-own-documents.txt"):
            with open(os.path.join(texts, name), encoding="utf-8") as part:
                out.write(part.read()[:9000])
        out.write(more)
    done = subprocess.run([s.NEAP, "train", "--json", "--profile", profile, "--ratio", str(ratio),
                           model, text], env=dict(os.environ, XDG_CACHE_HOME=cache), check=False,
                          capture_output=True, text=True, timeout=s.REQUEST_LIMIT_S)
    s.check(done.returncode == 0, f"neap train: exit {done.returncode}\n{done.stderr}")
    path = json.loads(done.stdout)["files"][0]["path"]
    s.check(path.startswith(cache) and path.endswith(f"klt-{profile}-{ratio}.bin") and
            os.path.getsize(path) > 0, f"{path} is not there")
    return path


def next_tokens(server, prompt, forced):
    """The most likely token after the prompt and each beginning of the forced tokens."""
    return [server.tokens(prompt + forced[:i], 1)[0] for i in range(len(forced))]
