"""Writes a tiny GGUF file as llama.cpp's converter would, and says what dense weights it stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from mlx.utils import tree_flatten

from mlx_dspark.catalog.checkpoint import Checkpoint, load_checkpoint
from mlx_dspark.catalog.resolve import ModelRef
from tests.tiny import EOS_IDS, SPECIAL_TOKENS, tiny_config, tiny_model, tiny_tokenizer

T = GGMLQuantizationType

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
"""mlx-lm's model types and GGUF's names of them."""

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
"""Sizes that blocks of 256 weights divide."""

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_SCALES_AT = {
    T.Q2_K: (80, 82),
    T.Q3_K: (108,),
    T.Q4_K: (0, 2),
    T.Q5_K: (0, 2),
    T.Q6_K: (208,),
    T.IQ4_NL: (0,),
    T.IQ4_XS: (0,),
    T.IQ3_S: (0,),
    T.IQ2_XXS: (0,),
    T.IQ1_S: (0,),
    T.TQ1_0: (52,),
    T.TQ2_0: (64,),
}
"""Where the float16 scales of a block lie, for the formats that the `gguf` package does not write."""


def save_tiny_gguf(
    path: Path,
    *,
    family: str = "llama",
    matrices: GGMLQuantizationType = T.Q4_1,
    embedding: GGMLQuantizationType = T.Q8_0,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
    parts: int = 1,
    seed: int = 0,
    **overrides: Any,
) -> dict[str, mx.array]:
    """Write a file of random weights; returns the dense float32 weights it stands for, under mlx-lm's names.

    `overrides` are config.json fields, `metadata` further GGUF keys, `tensors` further tensors; tensors and
    keys in `without` are left out. With `parts` it is split, and `path` is the first part.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **({"tie_word_embeddings": True} | overrides))
    weights = cast(dict[str, mx.array], dict(tree_flatten(tiny_model(config, seed=seed).parameters())))
    share = -(-len(weights) // parts) if parts > 1 else 0
    writer = _Writer(path, ARCHITECTURES[family], without, share)
    _add_metadata(writer, config)
    for key, value in (metadata or {}).items():
        writer.set(key, value)
    rng = np.random.default_rng(seed)
    dense = {}
    for name, array in weights.items():
        kind = embedding if "embed_tokens" in name else matrices
        dense[name] = _add_tensor(writer, name, np.array(array), kind, config, rng)
    for name, value in (tensors or {}).items():
        writer.add_tensor(name, value)
    writer.write()
    return dense


def load_gguf(path: Path) -> Checkpoint:
    """The checkpoint of a GGUF file."""
    return load_checkpoint(ModelRef("tiny", path, "gguf", str(path)))


class _Writer(GGUFWriter):
    """Leaves some keys and tensors out, and takes a key a second time in place of the first."""

    def __init__(self, path: Path, architecture: str, without: tuple[str, ...], share: int) -> None:
        self.without = without
        super().__init__(path, architecture, split_max_tensors=share)

    def add_key_value(self, key: str, val: Any, *rest: Any, **options: Any) -> None:
        for held in self.kv_data:
            held.pop(key, None)
        if key not in self.without:
            super().add_key_value(key, val, *rest, **options)

    def add_tensor(self, name: str, *rest: Any, **options: Any) -> None:
        if name not in self.without:
            super().add_tensor(name, *rest, **options)

    def set(self, key: str, value: Any) -> None:
        add = {bool: self.add_bool, int: self.add_uint32, float: self.add_float32, str: self.add_string}
        add.get(type(value), self.add_array)(key, value)

    def write(self) -> None:
        self.write_header_to_file()
        self.write_kv_data_to_file()
        self.write_tensors_to_file()
        self.close()


def gguf_name(name: str, family: str = "llama") -> str:
    """`model.layers.0.self_attn.q_proj.weight` -> `blk.0.attn_q.weight`."""
    names = _NAMES | (_GEMMA_NAMES if family == "gemma3_text" else {})
    stem, leaf = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, index, part = stem.split(".", 3)
        return f"blk.{index}.{names[part]}.{leaf}"
    return f"{names[stem]}.{leaf}"


def random_blocks(
    shape: tuple[int, int], kind: GGMLQuantizationType, rng: np.random.Generator, size: float = 1.0
) -> np.ndarray:
    """Bytes `[rows, bytes]` of a format, all valid, that stand for weights of RMS `size`."""
    weights, block = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // weights, block), dtype=np.uint8)

    def scaled(scales: np.ndarray) -> np.ndarray:
        for at in _SCALES_AT[kind]:
            blocks[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
        return blocks.reshape(shape[0], -1)

    ones = np.ones(blocks.shape[:2])
    rms = float(np.sqrt(np.mean(np.square(dequantize(scaled(ones), kind)))))
    return scaled(rng.uniform(0.5, 1.5, blocks.shape[:2]) * size / rms)


def _add_tensor(
    writer: GGUFWriter,
    name: str,
    value: np.ndarray,
    kind: GGMLQuantizationType,
    config: dict[str, Any],
    rng: np.random.Generator,
) -> mx.array:
    family = config["model_type"]
    stored_name = gguf_name(name, family)
    if value.ndim == 1:
        offset = np.float32(family == "gemma3_text" and name.endswith("norm.weight"))
        stored = value + offset
        writer.add_tensor(stored_name, _ordered(stored, name, config))
        return mx.array(stored - offset)
    if kind in _SCALES_AT:
        data = random_blocks(value.shape, kind, rng, float(value.std()))
    else:
        data = quantize(value, kind)
    writer.add_tensor(stored_name, _ordered(data, name, config), raw_dtype=kind)
    return mx.array(dequantize(data, kind))


def _ordered(rows: np.ndarray, name: str, config: dict[str, Any]) -> np.ndarray:
    """llama.cpp's converter: the first and second half of each head of llama become even and odd rows."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None or config["model_type"] != "llama":
        return rows
    halves = rows.reshape(config[heads], 2, rows.shape[0] // config[heads] // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def _add_metadata(writer: _Writer, config: dict[str, Any]) -> None:
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
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
        writer.set("gemma3.attention.sliding_window_pattern", config["sliding_window_pattern"])
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
