"""What klt learns, small and quick, for the tests that use it: one training of a model for all of
them, made anew when the program or the backend is."""

import hashlib
import json
import os
import shutil

import support as s

KEPT = os.path.join(s.BUILD, "test-trained")
LIMIT_S = 900  # reading and bases together, on a busy machine


def little_text():
    texts = os.path.join(s.ROOT, "share", "calibration")
    parts = []
    for name in ("01-devils-dictionary-en.txt", "07-own-documents.txt"):
        with open(os.path.join(texts, name), encoding="utf-8") as part:
            parts.append(part.read()[:9000])
    return "".join(parts) + s.prose(30, 1500)


def key_of(model, text):
    used = [s.NEAP, os.path.join(s.BUILD, "lib", "libggml-neap.so"), model]
    stats = [os.stat(path) for path in used]
    what = repr([(info.st_size, info.st_mtime_ns) for info in stats]) + text
    return hashlib.sha256(what.encode()).hexdigest()[:16]


def kept_training(model):
    """The folder of files learned from the model; made if it is not there."""
    text = little_text()
    kept = os.path.join(KEPT, key_of(model, text))
    if os.path.isdir(kept):
        return kept
    made = kept + ".new"
    shutil.rmtree(made, ignore_errors=True)
    os.makedirs(made)
    path = os.path.join(made, "text.txt")
    with open(path, "w", encoding="utf-8") as out:
        out.write(text)
    done = s.neap(dict(os.environ, XDG_CACHE_HOME=made), "train", "--json", "--profile", "head",
                  "--profile", "joint", "--ratio", "4", "--ratio", "8", model, path,
                  limit_s=LIMIT_S)
    files = json.loads(done.stdout)["files"]
    s.check(len(files) == 4 and all(file["path"].startswith(made) for file in files), f"{files}")
    os.rename(made, kept)
    return kept


def train(cache, model, profile, ratio):
    """Puts the file of that profile and ratio into a cache folder; its path."""
    name = f"klt-{profile}-{ratio}.bin"
    kept = os.path.join(kept_training(model), "neap", "trained")
    digest, = os.listdir(kept)
    folder = os.path.join(cache, "neap", "trained", digest)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return shutil.copy(os.path.join(kept, digest, name), os.path.join(folder, name))
