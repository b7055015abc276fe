"""shape_models.py - writes small random models of shapes that no model of ours has, as GGUF: dense
with heads of 48, latent attention (one cache a layer, of rows that are no keys), and recurrent."""

import math

import moe_model as m

LAYERS, EMBED, FEED = 4, 192, 384
HEADS, KV_HEADS, HEAD = 6, 3, 48
RANK, TURNED, PLAIN, VALUE = 64, 16, 32, 32  # latent attention
INNER, STATE, STEP = 2 * EMBED, 16, 12       # recurrent


def matrix(name, *dims, std=None):
    spread = std or 1 / math.sqrt(dims[0])
    return f"{name}.weight", dims, 1, lambda rng: m.f16_bytes(rng, math.prod(dims), spread)


def constant(name, value, *dims):
    return name, dims, 0, lambda rng: m.f32_bytes([value] * math.prod(dims))


def ends(n_tokens):
    yield matrix("token_embd", EMBED, n_tokens, std=1)
    yield matrix("output", EMBED, n_tokens)
    yield constant("output_norm.weight", 1, EMBED)


def feed_forward(block):
    yield constant(block + "ffn_norm.weight", 1, EMBED)
    yield matrix(block + "ffn_gate", EMBED, FEED)
    yield matrix(block + "ffn_up", EMBED, FEED)
    yield matrix(block + "ffn_down", FEED, EMBED)


def dense(n_tokens):
    yield from ends(n_tokens)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        yield constant(block + "attn_norm.weight", 1, EMBED)
        yield matrix(block + "attn_q", EMBED, HEADS * HEAD)
        yield matrix(block + "attn_k", EMBED, KV_HEADS * HEAD)
        yield matrix(block + "attn_v", EMBED, KV_HEADS * HEAD)
        yield matrix(block + "attn_output", HEADS * HEAD, EMBED)
        yield from feed_forward(block)


def latent(n_tokens):
    yield from ends(n_tokens)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        yield constant(block + "attn_norm.weight", 1, EMBED)
        yield constant(block + "attn_q_a_norm.weight", 1, RANK)
        yield constant(block + "attn_kv_a_norm.weight", 1, RANK)
        yield matrix(block + "attn_q_a", EMBED, RANK)
        yield matrix(block + "attn_q_b", RANK, HEADS * (PLAIN + TURNED))
        yield matrix(block + "attn_kv_a_mqa", EMBED, RANK + TURNED)
        yield matrix(block + "attn_k_b", PLAIN, RANK, HEADS)
        yield matrix(block + "attn_v_b", RANK, VALUE, HEADS)
        yield matrix(block + "attn_output", HEADS * VALUE, EMBED)
        yield from feed_forward(block)


def recurrent(n_tokens):
    yield from ends(n_tokens)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        yield constant(block + "attn_norm.weight", 1, EMBED)
        yield matrix(block + "ssm_in", EMBED, 2 * INNER)
        yield constant(block + "ssm_conv1d.weight", 0.25, 4, INNER)
        yield constant(block + "ssm_conv1d.bias", 0, INNER)
        yield matrix(block + "ssm_x", INNER, STEP + 2 * STATE)
        yield matrix(block + "ssm_dt", STEP, INNER)
        yield constant(block + "ssm_dt.bias", 0, INNER)
        yield constant(block + "ssm_a", -1, STATE, INNER)
        yield constant(block + "ssm_d", 1, INNER)
        yield matrix(block + "ssm_out", INNER, EMBED)


COMMON = {"block_count": LAYERS, "context_length": 4096, "embedding_length": EMBED,
          "attention.layer_norm_rms_epsilon": 1e-6}
OF_SHAPE = {
    "dense": ("llama", dense,
              {"feed_forward_length": FEED, "attention.head_count": HEADS,
               "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD,
               "attention.value_length": HEAD, "rope.dimension_count": HEAD,
               "rope.freq_base": 10000.0}),
    "latent": ("deepseek2", latent,
               {"feed_forward_length": FEED, "attention.head_count": HEADS,
                "attention.head_count_kv": 1, "attention.q_lora_rank": RANK,
                "attention.kv_lora_rank": RANK, "attention.key_length": RANK + TURNED,
                "attention.value_length": RANK, "attention.key_length_mla": PLAIN + TURNED,
                "attention.value_length_mla": VALUE, "rope.dimension_count": TURNED,
                "rope.freq_base": 10000.0, "leading_dense_block_count": LAYERS,
                "expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": FEED,
                "expert_shared_count": 1}),
    "recurrent": ("mamba", recurrent,
                  {"feed_forward_length": 0, "attention.head_count": 0, "ssm.conv_kernel": 4,
                   "ssm.inner_size": INNER, "ssm.state_size": STATE,
                   "ssm.time_step_rank": STEP}),
}


def write(path, tokenizer_of, shape):
    """shape: dense, latent or recurrent."""
    arch, tensors_of, options = OF_SHAPE[shape]
    return m.write_model(path, tokenizer_of, arch, {**COMMON, **options}, tensors_of)
