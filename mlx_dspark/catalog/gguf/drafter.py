"""PrismML's DSpark drafters in GGUF, converted once to a folder that is read as any other drafter's is.

The metadata and the names are those of drafter-formats section 7. Values keep the type they are stored in.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from filelock import FileLock
from gguf import ReaderTensor

from mlx_dspark.catalog.gguf.facts import Facts
from mlx_dspark.catalog.gguf.file import GGUFFile, open_gguf
from mlx_dspark.catalog.gguf.weights import DENSE
from mlx_dspark.catalog.hashes import RememberedHashes
from mlx_dspark.catalog.integrity import sha256_of
from mlx_dspark.catalog.reading import reading
from mlx_dspark.foundation.errors import BadCheckpoint, UnsupportedModel

ARCHITECTURE = "dspark"
HOME = "converted-drafters"
CONFIG, WEIGHTS, SUMS = "config.json", "model.safetensors", "sha256.json"

_TABLES = {
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "norm.weight",
    "dspark.fc.weight": "fc.weight",
    "dspark.hidden_norm.weight": "hidden_norm.weight",
    "dspark.markov_head_a.weight": "markov_head.markov_w1.weight",
    "dspark.markov_head_b.weight": "markov_head.markov_w2.weight",
    "dspark.confidence_head.weight": "confidence_head.proj.weight",
    "dspark.confidence_head.bias": "confidence_head.proj.bias",
    "dspark.log_snr_fc1.weight": "log_snr_embed.fc1.weight",
    "dspark.log_snr_fc1.bias": "log_snr_embed.fc1.bias",
    "dspark.log_snr_fc2.weight": "log_snr_embed.fc2.weight",
    "dspark.log_snr_fc2.bias": "log_snr_embed.fc2.bias",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_file(path: Path) -> Path | None:
    """`path` if it is a GGUF file, or the only one in a folder without config.json. May raise OSError."""
    if path.is_dir():
        files = [] if (path / CONFIG).exists() else sorted(path.glob("*.gguf"))
        return files[0] if len(files) == 1 else None
    with path.open("rb") as file:
        return path if file.read(4) == b"GGUF" or path.suffix.lower() == ".gguf" else None


def converted(path: Path, cache_dir: Path) -> Path:
    """The folder of the drafter in GGUF file `path`, named by its content; a damaged one is made anew.

    Raises BadCheckpoint for a file that is damaged or lacks something, UnsupportedModel for another
    architecture or a number format of fewer bits.
    """
    file = open_gguf(path)
    architecture = file.need("general.architecture")
    if architecture != ARCHITECTURE:
        raise UnsupportedModel(
            f"{path} is a GGUF file of the architecture {architecture!r}, not a supported drafter.",
            f"Use a drafter of the architecture {ARCHITECTURE!r}; a language model is named with --model, or "
            "where it is to draft, with --draft-model.",
            field="drafter",
        )
    home = cache_dir / HOME
    hashes = RememberedHashes(cache_dir)
    with reading(path):
        target = home / hashes.of_content(file.shards)
    if _is_whole(target, hashes.sha256):
        return target
    config, weights = _config(file), _weights(file)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / "lock"):
            if not _is_whole(target, hashes.sha256):
                _put(target, config, weights)
    except OSError as error:
        raise BadCheckpoint(
            f"{path} cannot be converted into {home}: {error.strerror or error}.",
            "Make room or grant access, or set MLX_DSPARK_CACHE_DIR to another folder.",
        ) from error
    return target


def _is_whole(target: Path, hash_of: Callable[[Path], str]) -> bool:
    """Whether both files have the hashes that were written down with them."""
    try:
        sums = json.loads((target / SUMS).read_text(encoding="utf-8"))
        return sums == _sums(target, hash_of)
    except (OSError, ValueError):
        return False


def _sums(folder: Path, hash_of: Callable[[Path], str]) -> dict[str, str]:
    return {name: hash_of(folder / name) for name in (CONFIG, WEIGHTS)}


def _put(target: Path, config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> None:
    """The folder, whole or not at all. What was there is taken away only once the new one is complete."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="convert-") as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        (new / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")
        mx.save_safetensors(str(new / WEIGHTS), dict(weights), {"format": "mlx"})
        (new / SUMS).write_text(json.dumps(_sums(new, sha256_of)), encoding="utf-8")
        if target.exists():
            os.replace(target, Path(scratch) / "damaged")
        os.replace(new, target)
        with suppress(OSError):
            shutil.rmtree(Path(scratch) / "damaged")


def _config(file: GGUFFile) -> dict[str, Any]:
    """The metadata in DeepSpec's keys."""
    facts = Facts(file, ARCHITECTURE)
    hidden, heads = facts.whole("embedding_length"), facts.whole("attention.head_count")
    width = facts.whole("attention.key_length", max(1, hidden // heads))
    if facts.whole("attention.value_length", width) != width:
        raise file.unsupported("values of another width than keys", "both of one width")
    rank = facts.whole("dspark.markov_rank", 0, low=0)
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        "hidden_size": hidden,
        "vocab_size": facts.whole("vocab_size", _rows(file, "token_embd.weight")),
        "intermediate_size": facts.whole("feed_forward_length"),
        "num_hidden_layers": facts.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.whole("attention.head_count_kv"),
        "head_dim": width,
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": facts.number("rope.freq_base", 1e6),
        "block_size": facts.whole("dspark.block_size"),
        "mask_token_id": facts.whole("dspark.mask_token_id", low=0),
        "target_layer_ids": file.listed(f"{ARCHITECTURE}.dspark.target_layers", int),
        "markov_rank": rank,
        "enable_confidence_head": facts.raw("dspark.confidence_head", False),
        "confidence_head_with_markov": facts.raw("dspark.confidence_head_with_markov", False),
    }
    conditioned = facts.raw("dspark.log_snr_conditioning", False)
    if conditioned is not False:
        config["log_snr_conditioning"] = conditioned
        for end in ("min_log_snr", "max_log_snr"):
            config[end] = file.need(f"{ARCHITECTURE}.dspark.{end}")
    return config


def _rows(file: GGUFFile, name: str) -> int | None:
    return int(file.tensors[name].data.shape[0]) if name in file.tensors else None


def _weights(file: GGUFFile) -> dict[str, mx.array]:
    weights = {}
    for name, tensor in file.tensors.items():
        weight = _dense(file, tensor)
        renamed = _renamed(file, name)
        if renamed == "confidence_head.proj.weight":
            weight = weight.reshape(1, -1)
        weights[renamed] = weight.reshape(1) if renamed == "confidence_head.proj.bias" else weight
    return weights


def _renamed(file: GGUFFile, name: str) -> str:
    if name in _TABLES:
        return _TABLES[name]
    block, _, rest = name.partition(".")
    index, _, leaf = rest.partition(".")
    part = leaf.removesuffix(".weight")
    if block != "blk" or not (index.isascii() and index.isdigit()) or leaf == part or part not in _LAYER:
        raise BadCheckpoint(
            f"{file.path} holds unexpected {name}.",
            "Convert the drafter again, or check that it is one of PrismML's.",
            field=name,
        )
    return f"layers.{int(index)}.{_LAYER[part]}.weight"


def _dense(file: GGUFFile, tensor: ReaderTensor) -> mx.array:
    dtype = DENSE.get(tensor.tensor_type)
    if dtype is None:
        raise UnsupportedModel(
            f"{tensor.name} in {file.path} is stored as {tensor.tensor_type.name}, not as F32, F16 or BF16.",
            "Use the drafter's bf16 file; it is quantized at load.",
            field=tensor.name,
        )
    data = np.ascontiguousarray(tensor.data)
    if dtype == mx.bfloat16:
        return mx.array(data.view(np.uint16)).view(mx.bfloat16)
    return mx.array(data)
