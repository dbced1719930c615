"""Writes a tiny llama GGUF file as llama.cpp's converter would, and says what dense weights it stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from mlx.utils import tree_flatten

from tests.tiny import EOS_IDS, SPECIAL_TOKENS, tiny_config, tiny_model, tiny_tokenizer

Q4_1, Q8_0 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def save_tiny_gguf(
    path: Path,
    *,
    matrices: GGMLQuantizationType = Q4_1,
    embedding: GGMLQuantizationType = Q8_0,
    metadata: dict[str, Any] | None = None,
    extra_tensor: str | None = None,
    seed: int = 0,
    **overrides: Any,
) -> dict[str, mx.array]:
    """Write a file of random weights; returns the dense float32 weights it stands for, under mlx-lm's names.

    `overrides` are config.json fields, `metadata` further GGUF keys with string values.
    """
    config = tiny_config("llama", **({"tie_word_embeddings": True} | overrides))
    weights = cast(dict[str, mx.array], dict(tree_flatten(tiny_model(config, seed=seed).parameters())))
    writer = GGUFWriter(path, "llama")
    _add_metadata(writer, config)
    for key, value in (metadata or {}).items():
        writer.add_string(key, value)
    dense = {}
    for name, array in weights.items():
        kind = embedding if "embed_tokens" in name else matrices
        dense[name] = _add_tensor(writer, name, np.array(array), kind, config)
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dense


def gguf_name(name: str) -> str:
    """`model.layers.0.self_attn.q_proj.weight` -> `blk.0.attn_q.weight`."""
    stem, leaf = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, index, part = stem.split(".", 3)
        return f"blk.{index}.{_NAMES[part]}.{leaf}"
    return f"{_NAMES[stem]}.{leaf}"


def _add_tensor(
    writer: GGUFWriter, name: str, value: np.ndarray, kind: GGMLQuantizationType, config: dict[str, Any]
) -> mx.array:
    if value.ndim == 1:
        writer.add_tensor(gguf_name(name), value)
        return mx.array(value)
    data = quantize(value, kind)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    stored = _permute(data, config[heads]) if heads else data
    writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
    return mx.array(dequantize(data, kind))


def _permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's converter: the first and second half of each head become even and odd rows."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def _add_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    tokenizer = tiny_tokenizer()
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if t in SPECIAL_TOKENS else TokenType.NORMAL for t in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(max(EOS_IDS))
    writer.add_add_bos_token(False)
    assert isinstance(tokenizer.chat_template, str)
    writer.add_chat_template(tokenizer.chat_template)
