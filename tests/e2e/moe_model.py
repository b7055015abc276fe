"""moe_model.py - writes a small random mixture-of-experts model as GGUF.

Of an architecture that has its experts plain (qwen3moe), with biases (gpt-oss), or gate and up in
one tensor (granite_swa).

Weights are random and scaled so that values neither vanish nor grow from layer to layer: the text
is nonsense, but it depends on every token before it, and tokens route to different experts. The
tokenizer is that of a model that is there anyway.
"""

import array
import math
import random
import struct

LAYERS, EXPERTS, USED = 4, 16, 2
EMBED, FEED, HEADS, KV_HEADS, HEAD = 256, 512, 4, 2, 64

U32, F32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
FIXED_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, U32: 4, 5: 4, F32: 4, BOOL: 1, 10: 8, 11: 8, 12: 8}


# ---- the tokenizer of another file ----

def skip_value(data, at, kind):
    if kind == STRING:
        return at + 8 + struct.unpack_from("<Q", data, at)[0]
    if kind != ARRAY:
        return at + FIXED_BYTES[kind]
    of, n = struct.unpack_from("<IQ", data, at)
    at += 12
    if of in FIXED_BYTES:
        return at + n * FIXED_BYTES[of]
    for _ in range(n):
        at = skip_value(data, at, of)
    return at


def read_tokenizer(path):
    """The tokenizer's pairs of key and value as they stand in the file, and the number of tokens."""
    with open(path, "rb") as file:
        data = file.read(1 << 24)
    n_pairs = struct.unpack_from("<Q", data, 16)[0]
    at, pairs, n_tokens = 24, [], 0
    for _ in range(n_pairs):
        begin = at
        key_len = struct.unpack_from("<Q", data, at)[0]
        key = data[at + 8:at + 8 + key_len].decode()
        at += 8 + key_len
        kind = struct.unpack_from("<I", data, at)[0]
        if key == "tokenizer.ggml.tokens":
            n_tokens = struct.unpack_from("<IQ", data, at + 4)[1]
        at = skip_value(data, at + 4, kind)
        if key.startswith("tokenizer."):
            pairs.append(data[begin:at])
    return pairs, n_tokens


# ---- random tensors ----

def f16_bytes(rng, n, std):
    """Evenly spread within about std * sqrt(3): random sign and mantissa, every exponent half as
    often as the next."""
    top = 14 + round(math.log2(std * math.sqrt(3)))
    high = bytearray(256)
    for byte in range(256):
        below = 7 - (byte & 0x7f).bit_length()
        high[byte] = byte & 0x80 | (top - min(below, 4)) << 2 | byte & 3
    data = bytearray(rng.randbytes(2 * n))
    data[1::2] = data[1::2].translate(bytes(high))
    return data


def blocks(rng, n, std, size, levels, levels_std):
    """Blocks of 32: an f16 scale, then random bytes, each replaced by that of levels."""
    data = bytearray(rng.randbytes(n // 32 * size).translate(levels))
    scale = struct.pack("<e", std / levels_std)
    data[0::size] = scale[0:1] * (n // 32)
    data[1::size] = scale[1:2] * (n // 32)
    return data


def without_lowest():
    """Two 4-bit levels a byte; the lowest, -8, becomes 0, so that their mean is 0."""
    return bytes((byte & 0x0f or 8) | (byte & 0xf0 or 0x80) for byte in range(256))


KINDS = {  # name: type in GGUF, bytes of n random values
    "f16": (1, f16_bytes),
    "q4_0": (2, lambda rng, n, std: blocks(rng, n, std, 18, without_lowest(), 4.2)),
    "q8_0": (8, lambda rng, n, std: blocks(rng, n, std, 34, bytes(range(256)), 73.9)),
}


def f32_bytes(values):
    return array.array("f", values).tobytes()


def tensors(arch, kind, n_tokens):
    """(name, dimensions, type, function that makes the bytes)"""
    def matrix(name, *dims, std=None):
        number, make = KINDS[kind]
        spread = std or 1 / math.sqrt(dims[0])
        return name, dims, number, lambda rng: make(rng, math.prod(dims), spread)

    def ones(name, n):
        return name, (n,), 0, lambda rng: f32_bytes([1] * n)

    def normal(name, *dims):
        return name, dims, 0, lambda rng: f32_bytes(rng.gauss(0, 1 / 8)
                                                    for _ in range(math.prod(dims)))

    yield matrix("token_embd.weight", EMBED, n_tokens, std=1)
    yield matrix("output.weight", EMBED, n_tokens)
    yield ones("output_norm.weight", EMBED)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        yield ones(block + "attn_norm.weight", EMBED)
        yield matrix(block + "attn_q.weight", EMBED, HEADS * HEAD)
        yield matrix(block + "attn_k.weight", EMBED, KV_HEADS * HEAD)
        yield matrix(block + "attn_v.weight", EMBED, KV_HEADS * HEAD)
        yield matrix(block + "attn_output.weight", HEADS * HEAD, EMBED)
        yield normal(block + "ffn_gate_inp.weight", EMBED, EXPERTS)
        yield matrix(block + "ffn_down_exps.weight", FEED, EMBED, EXPERTS, std=3 / math.sqrt(FEED))
        if arch == "granite_swa":
            yield matrix(block + "ffn_gate_up_exps.weight", EMBED, 2 * FEED, EXPERTS)
        else:
            yield matrix(block + "ffn_gate_exps.weight", EMBED, FEED, EXPERTS)
            yield matrix(block + "ffn_up_exps.weight", EMBED, FEED, EXPERTS)
        if arch == "qwen3moe":
            yield ones(block + "attn_q_norm.weight", HEAD)
            yield ones(block + "attn_k_norm.weight", HEAD)
        else:
            yield normal(block + "attn_sinks.weight", HEADS)
        if arch == "gpt-oss":
            yield ones(block + "post_attention_norm.weight", EMBED)
            yield normal(block + "attn_output.bias", EMBED)
            yield normal(block + "ffn_gate_inp.bias", EXPERTS)
            yield normal(block + "ffn_gate_exps.bias", FEED, EXPERTS)
            yield normal(block + "ffn_up_exps.bias", FEED, EXPERTS)
            yield normal(block + "ffn_down_exps.bias", EMBED, EXPERTS)
        else:
            yield ones(block + "ffn_norm.weight", EMBED)


# ---- the file ----

def string(text):
    return struct.pack("<Q", len(text)) + text.encode()


def settings(arch):
    out = {"block_count": LAYERS, "context_length": 4096, "embedding_length": EMBED,
           "feed_forward_length": FEED, "attention.head_count": HEADS,
           "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD,
           "attention.value_length": HEAD, "attention.layer_norm_rms_epsilon": 1e-6,
           "rope.freq_base": 10000.0, "expert_count": EXPERTS, "expert_used_count": USED,
           "expert_feed_forward_length": FEED}
    if arch != "qwen3moe":
        out["attention.sliding_window"] = 128
    if arch == "granite_swa":
        out.update({"attention.sliding_window_pattern": [i % 2 == 0 for i in range(LAYERS)],
                    "logit_scale": 1.0})
    return out


def value(of):
    if isinstance(of, list):
        return struct.pack("<IIQ", ARRAY, BOOL, len(of)) + bytes(of)
    return struct.pack("<If", F32, of) if isinstance(of, float) else struct.pack("<II", U32, of)


def write(path, tokenizer_of, arch="qwen3moe", kind="f16", alignment=32):
    """A model whose matrices are of this kind (f16, q4_0, q8_0)."""
    return write_model(path, tokenizer_of, arch, settings(arch),
                       lambda n_tokens: tensors(arch, kind, n_tokens), alignment)


def write_model(path, tokenizer_of, arch, options, tensors_of, alignment=32):
    """Any model: options of the architecture, and tensors_of(n_tokens) as of tensors()."""
    rng = random.Random(4)
    pairs, n_tokens = read_tokenizer(tokenizer_of)
    pairs.append(string("general.architecture") + struct.pack("<I", STRING) + string(arch))
    pairs.append(string("general.alignment") + value(alignment))
    pairs += [string(f"{arch}.{key}") + value(of) for key, of in options.items()]

    infos, blobs, offset = [], [], 0
    for name, dims, number, make in tensors_of(n_tokens):
        data = make(rng)
        infos.append(string(name) + struct.pack("<I", len(dims))
                     + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", number, offset))
        blobs.append(bytes(data) + bytes(-len(data) % alignment))
        offset += len(blobs[-1])
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(pairs)) + b"".join(pairs + infos)
    with open(path, "wb") as file:
        file.write(head + bytes(-len(head) % alignment))
        file.writelines(blobs)
    return path
