"""DeepSpec-native DSpark heads: a flat config.json (drafter-formats section 1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from mlx_dspark.catalog.formats import markers, rope, shared
from mlx_dspark.catalog.formats.base import (
    NOISE_FEATURES,
    DrafterCheckpoint,
    DrafterConfig,
    Shape,
    backbone_tensors,
    check_tensors,
    without_prefix,
)
from mlx_dspark.catalog.formats.fields import Fields
from mlx_dspark.foundation.errors import BadCheckpoint

PACKAGING = "deepspec"
ARCHITECTURES = {"Qwen3DSparkModel": "qwen3", "Gemma4DSparkModel": "gemma4", "Qwen35DSparkModel": "qwen3"}
SLOT_KEYS = ("block_size", "mask_token_id", "target_layer_ids")
MARKOV_TYPES = ("vanilla", "gated", "rnn")


def claims(config: Fields) -> bool:
    """Whether config.json is of this packaging: by architecture, or nameless with the slot keys on top."""
    if markers.elsewhere(config) or markers.for_hybrids(config):
        return False
    architectures = config.texts("architectures")
    if any(name in ARCHITECTURES for name in architectures):
        return True
    named = any(name.startswith("DFlash") for name in architectures) or "dflash_config" in config
    return not named and all(name in config for name in SLOT_KEYS)


def read(config: Fields, weights: Mapping[str, mx.array], files: tuple[Path, ...]) -> DrafterCheckpoint:
    """Translate one head. Raises BadCheckpoint or UnsupportedModel naming the key or tensor."""
    weights = without_prefix(weights)
    return checked(PACKAGING, config, translate(config, weights), weights, files)


def checked(
    packaging: str,
    config: Fields,
    translated: DrafterConfig,
    weights: Mapping[str, mx.array],
    files: tuple[Path, ...],
) -> DrafterCheckpoint:
    """The checkpoint of a head in these numbers; its tensors must be exactly those it needs.

    Raises BadCheckpoint naming the tensors that are not.
    """
    d2t = _offsets(config, weights, translated)
    trained = {name: weight for name, weight in weights.items() if name not in ("d2t", "t2d")}
    check_tensors(trained, expected_tensors(translated), config.file.parent)
    return DrafterCheckpoint(packaging, translated, trained, files, d2t)


def translate(config: Fields, weights: Iterable[str]) -> DrafterConfig:
    """One head in numbers; `weights` names the tensors it has.

    Raises BadCheckpoint or UnsupportedModel naming the key.
    """
    weights = frozenset(weights)
    config.require((*shared.BACKBONE_KEYS, *SLOT_KEYS))
    vocab = config.whole("vocab_size")
    layers = config.whole("num_hidden_layers", high=shared.MOST_LAYERS)
    kinds = shared.layer_types(config, layers)
    backbone = _backbone(config)
    numbers = _gemma4(config) if backbone == "gemma4" else _qwen3(config, kinds)
    windows = shared.windows(config, kinds)
    target_layers = shared.target_layers(config)
    own_embedding, own_head = "embed_tokens.weight" in weights, "lm_head.weight" in weights
    block = config.whole("block_size", high=shared.LONGEST_BLOCK)
    first_slot = _first_slot(config, block)
    return DrafterConfig(
        family="dspark",
        backbone=backbone,
        hidden=config.whole("hidden_size"),
        vocab=vocab,
        draft_vocab=config.whole("draft_vocab_size", vocab, high=vocab),
        intermediate=config.whole("intermediate_size"),
        layers=layers,
        heads=config.whole("num_attention_heads"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        attention_bias=config.flag("attention_bias", False),
        block_size=block,
        first_slot=first_slot,
        mask_token=config.whole("mask_token_id", low=0, high=vocab - 1),
        taps=shared.taps(config, "target_layer_ids", target_layers),
        layer_causal=tuple(window is not None for window in windows),
        layer_windows=windows,
        target_layers=target_layers,
        own_embedding=own_embedding,
        own_head=own_head,
        tied=own_embedding and not own_head and config.flag("tie_word_embeddings", False),
        **numbers,
        **_heads(config, weights),
    )


def _backbone(config: Fields) -> Literal["qwen3", "gemma4"]:
    kind = config.text("model_type", "")
    backbone = "gemma4" if "gemma4" in kind else "qwen3"
    if backbone not in kind:
        shared.unsupported(config, "model_type", f"model_type {kind!r} (known are qwen3 and gemma4)")
    for name in config.texts("architectures"):
        if ARCHITECTURES.get(name, backbone) != backbone:
            config.bad("model_type", f"is {kind!r}, and architectures names {name}")
    return backbone


def _qwen3(config: Fields, kinds: tuple[str, ...]) -> dict[str, Any]:
    shared.activation(config, "hidden_act", "silu")
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    return {
        "kv_heads": shared.kv_heads(config, "num_key_value_heads", heads, 8),
        "head_dim": shared.head_width(config, "head_dim", max(1, hidden // heads)),
        "rope_theta": rope.theta_only(config, kinds).theta,
        "softcap": shared.softcap(config),
    }


def _gemma4(config: Fields) -> dict[str, Any]:
    shared.activation(config, "hidden_activation", "gelu_pytorch_tanh")
    if config.flag("enable_moe_block", False):
        shared.unsupported(config, "enable_moe_block", "a mixture of experts")
    if config.whole("hidden_size_per_layer_input", 0, low=0):
        shared.unsupported(config, "hidden_size_per_layer_input", "per-layer inputs")
    heads, shares = config.whole("num_attention_heads"), config.flag("attention_k_eq_v", True)
    name, default = ("num_global_key_value_heads", 1) if shares else ("num_key_value_heads", 8)
    if config.is_null(name):
        name = "num_key_value_heads"
    width = "head_dim" if config.is_null("global_head_dim") else "global_head_dim"
    rotary = rope.gemma4(config)
    return {
        "kv_heads": shared.kv_heads(config, name, heads, default),
        "head_dim": shared.head_width(config, width, 256 if width == "head_dim" else 512),
        "values_from_keys": shares,
        "rope_theta": rotary.theta,
        "rope_kind": rotary.kind,
        "rope_options": rotary.options,
        "softcap": shared.softcap(config, 30.0),
    }


def _first_slot(config: Fields, block: int) -> int:
    from_anchor = config.flag("sample_from_anchor", True)
    first = config.whole("logits_start", 0 if from_anchor else 1, low=0, high=1)
    if block - first < 1:
        config.bad("block_size", f"is {block}, which leaves no slot to draft from")
    return first


def _heads(config: Fields, weights: Iterable[str]) -> dict[str, Any]:
    """Explicit keys bind; where the config is silent, the tensors that are there decide."""
    has_markov = any(name.startswith("markov_head.") for name in weights)
    has_confidence = any(name.startswith("confidence_head.") for name in weights)
    rank = config.whole("markov_rank", 256 if has_markov else 0, low=0)
    kind = config.text("markov_head_type", "vanilla")
    if rank and kind not in MARKOV_TYPES:
        shared.unsupported(config, "markov_head_type", f"markov_head_type {kind!r}")
    confidence = config.flag("enable_confidence_head", has_confidence)
    with_markov = confidence and config.flag("confidence_head_with_markov", rank > 0)
    if with_markov and not rank:
        config.bad("confidence_head_with_markov", "is true, and markov_rank is 0")
    return {
        "markov": kind if rank else "none",
        "markov_rank": rank,
        "confidence": confidence,
        "confidence_with_markov": with_markov,
    }


def _offsets(config: Fields, weights: Mapping[str, mx.array], translated: DrafterConfig) -> mx.array | None:
    """`d2t`, checked: distinct ids inside the vocabulary. `t2d` only has to agree with it."""
    reduced = translated.draft_vocab < translated.vocab
    if not reduced and "d2t" in weights:
        config.bad("draft_vocab_size", "is not below vocab_size, and the checkpoint holds d2t")
    if not reduced:
        return None
    if "d2t" not in weights:
        raise BadCheckpoint(
            f"draft_vocab_size in {config.file} is reduced to {translated.draft_vocab}, and there is no d2t.",
            "Download the drafter again.",
            field="d2t",
        )
    check_tensors({"d2t": weights["d2t"]}, {"d2t": (translated.draft_vocab,)}, config.file.parent)
    offsets = np.array(weights["d2t"], dtype=np.int64)
    ids = np.arange(translated.draft_vocab) + offsets
    if ids.min() < 0 or ids.max() >= translated.vocab or len(np.unique(ids)) != len(ids):
        _bad_table("d2t", config, f"does not map to distinct ids below {translated.vocab}")
    if "t2d" in weights:
        check_tensors({"t2d": weights["t2d"]}, {"t2d": (translated.vocab,)}, config.file.parent)
        if not np.array_equal(np.flatnonzero(np.array(weights["t2d"])), np.sort(ids)):
            _bad_table("t2d", config, "does not mark the ids that d2t maps to")
    return mx.array(offsets.astype(np.int32))


def _bad_table(name: str, config: Fields, problem: str) -> None:
    raise BadCheckpoint(
        f"{name} in {config.file.parent} {problem}.", "Download the drafter again.", field=name
    )


def expected_tensors(config: DrafterConfig) -> dict[str, Shape]:
    """Name and shape of every trained tensor."""
    expected = backbone_tensors(config)
    if config.own_embedding:
        expected["embed_tokens.weight"] = (config.vocab, config.hidden)
    if config.own_head or config.draft_vocab < config.vocab:
        expected["lm_head.weight"] = (config.draft_vocab, config.hidden)
    if config.noise_levels:
        expected |= _noise_tensors(config.hidden)
    return expected | _expected_heads(config)


def _noise_tensors(hidden: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"fc1": (hidden, NOISE_FEATURES), "fc2": (hidden, hidden)}
    weights: dict[str, Shape] = {f"log_snr_embed.{name}.weight": shape for name, shape in shapes.items()}
    return weights | {f"log_snr_embed.{name}.bias": (hidden,) for name in shapes}


def _expected_heads(config: DrafterConfig) -> dict[str, Shape]:
    hidden, rank = config.hidden, config.markov_rank
    expected: dict[str, Shape] = {}
    if rank:
        expected["markov_head.markov_w1.weight"] = (config.vocab, rank)
        expected["markov_head.markov_w2.weight"] = (config.draft_vocab, rank)
    if config.markov == "gated":
        expected["markov_head.gate_proj.weight"] = (rank, hidden + rank)
        expected["markov_head.gate_proj.bias"] = (rank,)
    if config.markov == "rnn":
        expected["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
        expected["markov_head.joint_proj.bias"] = (3 * rank,)
    if config.confidence:
        width = hidden + (rank if config.confidence_with_markov else 0)
        expected["confidence_head.proj.weight"] = (1, width)
        expected["confidence_head.proj.bias"] = (1,)
    return expected
