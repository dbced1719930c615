"""A llama-architecture GGUF file as an mlx-lm config and weights, without rounding a single weight.

Both formats store `scale * q + bias` per group of 32, so the blocks are only repacked:

| GGUF block | weight                | MLX affine, group 32                |
|------------|-----------------------|-------------------------------------|
| Q4_1       | d * q + m, q in 0..15 | 4 bits, scale d, bias m             |
| Q4_0       | d * (q - 8)           | 4 bits, scale d, bias -8 d          |
| Q8_0       | d * q, q in -128..127 | 8 bits of q + 128, scale d, bias -128 d |

Block layouts: ggml-quants of https://github.com/ggml-org/ggml, as in the `gguf` package's `gguf.quants`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as GGMLType
from gguf import ReaderTensor

from mlx_dspark.catalog.gguf_file import FETCH_AGAIN, GGUFFile
from mlx_dspark.foundation.errors import BadCheckpoint, UnsupportedModel

GROUP = 32

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Repacking(NamedTuple):
    """How one block type becomes affine groups of 32 weights.

    `repack` takes bytes `[out, bytes]` and gives `weight` uint32 `[out, in * bits / 32]`, and `scales` and
    `biases` float32 `[out, in / 32]`.
    """

    bits: int
    repack: Callable[[np.ndarray], dict[str, np.ndarray]]


def llama_config(file: GGUFFile) -> dict[str, Any]:
    """The config.json, in the Hugging Face llama layout, of a GGUF file of the llama architecture.

    Raises UnsupportedModel for another architecture or for features that the plain layout does not express
    (scaled rope, experts, partial rotary), BadCheckpoint for missing metadata.
    """
    architecture = file.need("general.architecture")
    if architecture != "llama":
        raise _unsupported(file, f"architecture {architecture!r}", "the llama architecture")

    def get(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"llama.{key}", default)

    def need(key: str) -> Any:
        return file.need(f"llama.{key}")

    hidden, heads = need("embedding_length"), need("attention.head_count")
    head_dim = get("attention.key_length", hidden // heads)
    if get("rope.scaling.type", "none") != "none" or "rope_freqs.weight" in file.tensors:
        raise _unsupported(file, "a scaled rope", "plain rope")
    if get("expert_count", 0):
        raise _unsupported(file, "experts", "dense layers")
    if (
        get("rope.dimension_count", head_dim) != head_dim
        or get("attention.value_length", head_dim) != head_dim
    ):
        raise _unsupported(
            file, "heads of unequal or partly rotated width", "fully rotated heads of one width"
        )
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": need("block_count"),
        "intermediate_size": need("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _shortest_float(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": get("rope.freq_base", 10000.0),
        "max_position_embeddings": need("context_length"),
        "vocab_size": _tensor(file, "token_embd.weight").shape.tolist()[1],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": False,
    }


def llama_weights(
    file: GGUFFile, config: dict[str, Any], dtype: mx.Dtype = mx.float32
) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """The weights of a llama GGUF under mlx-lm's names, and the `quantization` section of their config.

    Scales, biases and dense tensors are held in `dtype`; in float32 and float16 scales are exact. The
    quantization section is empty for a dense file; else its top level names the commonest width and each
    tensor that differs has an entry of its own. Raises UnsupportedModel naming a tensor or type it cannot
    hold.
    """
    weights: dict[str, mx.array] = {}
    bits_of: dict[str, int] = {}
    for name, tensor in file.tensors.items():
        module, leaf = _module_of(file, name)
        heads = _rotated_heads(module, config)
        for part, value in read_tensor(file, tensor).items():
            array = mx.array(_unpermute(value, heads) if heads else value)
            weights[f"{module}.{leaf if part == 'weight' else part}"] = (
                array if array.dtype == mx.uint32 else array.astype(dtype)
            )
        if tensor.tensor_type in REPACKINGS:
            bits_of[module] = REPACKINGS[tensor.tensor_type].bits
    return weights, _quantization(bits_of)


def read_tensor(file: GGUFFile, tensor: ReaderTensor) -> dict[str, np.ndarray]:
    """One tensor as `weight`, with `scales` and `biases` when it is quantized; rows stay in the file's order.

    Raises UnsupportedModel naming a tensor whose type has no exact repacking.
    """
    kind = tensor.tensor_type
    if kind in (GGMLType.F16, GGMLType.F32):
        return {"weight": tensor.data}
    if kind is GGMLType.BF16:
        return {"weight": (tensor.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)}
    if kind in REPACKINGS and tensor.data.ndim == 2:
        return REPACKINGS[kind].repack(tensor.data)
    known = ", ".join(kind.name for kind in (*REPACKINGS, GGMLType.F16, GGMLType.BF16, GGMLType.F32))
    raise _unsupported(file, f"the tensor {tensor.name} of type {kind.name}", f"matrices of type {known}")


def _repack_q4_1(data: np.ndarray) -> dict[str, np.ndarray]:
    """Blocks of 20 bytes: d and m in float16, then 16 bytes of nibbles."""
    blocks = data.reshape(data.shape[0], -1, 20)
    ends = _halves(blocks[:, :, :4])
    return _affine(_pack_nibbles(blocks[:, :, 4:]), ends[:, :, 0], ends[:, :, 1])


def _repack_q4_0(data: np.ndarray) -> dict[str, np.ndarray]:
    """Blocks of 18 bytes: d in float16, then 16 bytes of nibbles that stand for q + 8."""
    blocks = data.reshape(data.shape[0], -1, 18)
    scales = _halves(blocks[:, :, :2])[:, :, 0]
    return _affine(_pack_nibbles(blocks[:, :, 2:]), scales, scales * np.float32(-8))


def _repack_q8_0(data: np.ndarray) -> dict[str, np.ndarray]:
    """Blocks of 34 bytes: d in float16, then 32 signed bytes; flipping the top bit adds 128."""
    blocks = data.reshape(data.shape[0], -1, 34)
    scales = _halves(blocks[:, :, :2])[:, :, 0]
    return _affine(blocks[:, :, 2:] ^ np.uint8(0x80), scales, scales * np.float32(-128))


REPACKINGS = {
    GGMLType.Q4_0: Repacking(4, _repack_q4_0),
    GGMLType.Q4_1: Repacking(4, _repack_q4_1),
    GGMLType.Q8_0: Repacking(8, _repack_q8_0),
}


def _affine(packed: np.ndarray, scales: np.ndarray, biases: np.ndarray) -> dict[str, np.ndarray]:
    words = np.ascontiguousarray(packed.reshape(packed.shape[0], -1)).view(np.uint32)
    return {"weight": words, "scales": scales, "biases": biases}


def _halves(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _pack_nibbles(data: np.ndarray) -> np.ndarray:
    """ggml keeps weights 0-15 of a block in the low nibbles, 16-31 in the high; MLX packs neighbours."""
    nibbles = np.concatenate([data & np.uint8(15), data >> np.uint8(4)], axis=-1)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << np.uint8(4))


def _module_of(file: GGUFFile, name: str) -> tuple[str, str]:
    """`blk.3.attn_q.weight` -> (`model.layers.3.self_attn.q_proj`, `weight`)."""
    stem, _, leaf = name.rpartition(".")
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block and block[2] in _BLOCK:
        return f"model.layers.{block[1]}.{_BLOCK[block[2]]}", leaf
    if stem in _TOP:
        return _TOP[stem], leaf
    raise _unsupported(file, f"the tensor {name}", "the tensors of a dense llama model")


def _rotated_heads(module: str, config: dict[str, Any]) -> int:
    """How many heads the rows of `module` hold in GGUF's rope order; 0 for rows in plain order."""
    match module.rsplit(".", 1)[-1]:
        case "q_proj":
            return config["num_attention_heads"]
        case "k_proj":
            return config["num_key_value_heads"]
        case _:
            return 0


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """GGUF makes rotated pairs of a head neighbours; mlx-lm's rope pairs its first half with its second."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _quantization(bits_of: dict[str, int]) -> dict[str, Any]:
    if not bits_of:
        return {}
    widths = list(bits_of.values())
    common = max(sorted(set(widths)), key=widths.count)
    section: dict[str, Any] = {"group_size": GROUP, "bits": common, "mode": "affine"}
    others = {name: bits for name, bits in bits_of.items() if bits != common}
    return section | {name: {"group_size": GROUP, "bits": bits} for name, bits in others.items()}


def _shortest_float(value: float) -> float:
    """The decimal that a float32 was written from: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))


def _tensor(file: GGUFFile, name: str) -> ReaderTensor:
    try:
        return file.tensors[name]
    except KeyError:
        raise BadCheckpoint(f"{file.path} lacks the tensor {name}.", FETCH_AGAIN) from None


def _unsupported(file: GGUFFile, found: str, wanted: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{file.path} has {found}.", f"Use a GGUF file with {wanted}, or an MLX model folder."
    )
