"""Tiny heads for hybrid targets in their published layouts, made from those of `tests/tiny_drafters.py`.

Each takes the folder of a DeepSpec head and a new folder. With `same`, the new one drafts what the old one
does, whatever the packaging adds being put so that it changes nothing; else what it adds is random.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from tests.reference_numpy import nvfp4
from tests.tiny_drafters import HEAD_DIM, HEADS, save_tiny_dspark

Arrays = dict[str, Any]
"""Numpy arrays by name."""
T = GGMLQuantizationType
NORMS = ("_layernorm.weight", "_norm.weight")


def native(folder: Path, seed: int, **options: Any) -> Path:
    """The DeepSpec head to start from."""
    return save_tiny_dspark(folder, seed=seed, **options)


def save_qwen35(old: Path, new: Path, *, same: bool, seed: int = 0) -> Path:
    config, weights = opened(old)
    rng = np.random.default_rng(seed)
    for name, weight in weights.items():
        if name == "norm.weight" or name.endswith(NORMS):
            weights[name] = weight - 1
        if name.endswith("q_proj.weight"):
            queries = weight.reshape(HEADS, HEAD_DIM, -1)
            gates = np.zeros_like(queries) if same else rng.normal(0, 0.2, queries.shape)
            weights[name] = np.concatenate([queries, gates], axis=1).reshape(-1, weight.shape[1])
        if name.endswith("o_proj.weight") and same:
            weights[name] = weight * 2
    config |= {
        "architectures": ["Qwen35DSparkModel"],
        "model_type": "qwen3_5",
        "enable_qwen35_gated_q_proj": True,
        "partial_rotary_factor": 1.0 if same else 0.25,
        "attn_output_gate": True,
        "confidence_temperatures": [1.0] * config["block_size"],
    }
    return put(new, config, weights)


def save_lfm2(old: Path, new: Path, *, same: bool, seed: int = 0) -> Path:
    config, weights = opened(old)
    near = np.arange(HEAD_DIM).reshape(2, -1).T.ravel()
    if same:
        for name, weight in weights.items():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                heads = weight.reshape(-1, HEAD_DIM, weight.shape[1])
                weights[name] = heads[:, near].reshape(weight.shape)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weights[name] = weight[near]
    nested = {key: config.pop(key) for key in ("target_layer_ids", "mask_token_id", "num_target_layers")}
    config |= {
        "architectures": ["Lfm2DSparkDraftModel"],
        "model_type": "lfm2",
        "rope_is_neox_style": False,
        "dflash_config": nested,
    }
    return put(new, config, weights)


def save_nvfp4(old: Path, new: Path, *, same: bool, seed: int = 0) -> Path:
    """`same`: `old` is written over with the values that the new one stands for."""
    config, weights = opened(old)
    rng, plain = np.random.default_rng(seed), dict(weights)
    for name in [name for name in weights if name.startswith("fc.") or ".mlp." in name]:
        rows, width = weights[name].shape
        codes = rng.integers(0, 256, (rows, width // 2), dtype=np.uint8)
        scales = rng.integers(0, 0x48, (rows, width // 16), dtype=np.uint8)
        scale_2 = np.float32(0.3 / width**0.5)
        weights |= {name: codes, f"{name}_scale": scales, f"{name}_scale_2": scale_2}
        plain[name] = nvfp4(codes, scales, float(scale_2))
    if same:
        put(old, config, plain)
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    return put(new, config, weights)


def save_prism(old: Path, new: Path, *, same: bool, seed: int = 0) -> Path:
    config, weights = opened(old)
    hidden, rng = config["hidden_size"], np.random.default_rng(seed)
    shapes = {"fc1.weight": (hidden, 128), "fc1.bias": (hidden,), "fc2.weight": (hidden, hidden)}
    shapes["fc2.bias"] = (hidden,)
    for name, shape in shapes.items():
        noise = rng.normal(0, 0.2, shape)
        weights[f"log_snr_embed.{name}"] = noise * (0.0 if same and name.startswith("fc2") else 1.0)
    config |= {"log_snr_conditioning": True, "min_log_snr": -9.0, "max_log_snr": 9.0}
    return put(new, config, weights)


def save_prism_gguf(
    folder: Path,
    path: Path,
    *,
    kind: GGMLQuantizationType = T.F32,
    metadata: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    extra: Arrays | None = None,
) -> Path:
    """The head in `folder` as PrismML's converter writes it. `metadata` None values leave a key out."""
    config, weights = opened(folder)
    keys: dict[str, Any] = {
        "dspark.block_count": config["num_hidden_layers"],
        "dspark.embedding_length": config["hidden_size"],
        "dspark.feed_forward_length": config["intermediate_size"],
        "dspark.attention.head_count": config["num_attention_heads"],
        "dspark.attention.head_count_kv": config["num_key_value_heads"],
        "dspark.attention.key_length": config["head_dim"],
        "dspark.attention.value_length": config["head_dim"],
        "dspark.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "dspark.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "dspark.vocab_size": config["vocab_size"],
        "dspark.dspark.block_size": config["block_size"],
        "dspark.dspark.mask_token_id": config["mask_token_id"],
        "dspark.dspark.target_layers": config["target_layer_ids"],
        "dspark.dspark.markov_rank": config["markov_rank"],
        "dspark.dspark.confidence_head": config["enable_confidence_head"],
        "dspark.dspark.confidence_head_with_markov": config["confidence_head_with_markov"],
    }
    if config.get("log_snr_conditioning"):
        names = ("log_snr_conditioning", "min_log_snr", "max_log_snr")
        keys |= {f"dspark.dspark.{name}": config[name] for name in names}
    keys |= metadata or {}
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, str(keys.pop("general.architecture", "dspark")))
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in keys.items():
        if value is not None:
            add.get(type(value), writer.add_array)(key, value)
    for name, weight in (weights | (extra or {})).items():
        if name not in without:
            _add(writer, _gguf_name(name), weight, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, name: str, weight: NDArray[Any], kind: GGMLQuantizationType) -> None:
    weight = np.ascontiguousarray(weight.astype(np.float32))
    if "confidence" in name:
        weight = weight.reshape(-1)
    if kind == T.F32 or weight.ndim == 1 or (kind == T.Q4_1 and weight.shape[1] % 32):
        writer.add_tensor(name, weight)
    elif kind == T.F16:
        writer.add_tensor(name, weight.astype(np.float16))
    elif kind == T.BF16:
        halves = np.array(mx.array(weight).astype(mx.bfloat16).view(mx.uint16))
        writer.add_tensor(name, halves.view(np.uint8), raw_dtype=kind)
    else:
        from gguf.quants import quantize

        writer.add_tensor(name, quantize(weight, kind), raw_dtype=kind)


def _gguf_name(name: str) -> str:
    tables = {
        "embed_tokens": "token_embd",
        "lm_head": "output",
        "norm": "output_norm",
        "fc": "dspark.fc",
        "hidden_norm": "dspark.hidden_norm",
        "markov_head.markov_w1": "dspark.markov_head_a",
        "markov_head.markov_w2": "dspark.markov_head_b",
        "confidence_head.proj": "dspark.confidence_head",
        "log_snr_embed.fc1": "dspark.log_snr_fc1",
        "log_snr_embed.fc2": "dspark.log_snr_fc2",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
    }
    stem, _, leaf = name.rpartition(".")
    if not stem.startswith("layers."):
        return f"{tables.get(stem, stem)}.{leaf}"
    _, index, part = stem.split(".", 2)
    short = part.replace("self_attn.", "attn_").replace("mlp.", "ffn_").replace("_proj", "")
    return f"blk.{index}.{tables.get(part, short)}.{leaf}"


def opened(folder: Path) -> tuple[dict[str, Any], Arrays]:
    loaded = mx.load(str(folder / "model.safetensors"))
    assert isinstance(loaded, dict)
    config = json.loads((folder / "config.json").read_text())
    return config, {name: np.array(weight) for name, weight in loaded.items()}


def put(folder: Path, config: dict[str, Any], weights: Arrays) -> Path:
    """Floats are stored in float32, bytes as bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {
        name: mx.array(np.ascontiguousarray(w if w.dtype == np.uint8 else w.astype(np.float32)))
        for name, w in weights.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    return folder
