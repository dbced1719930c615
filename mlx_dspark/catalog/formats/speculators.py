"""vLLM's speculators: DSpark and DFlash heads whose backbone is a nested config (drafter-formats section 4).

DaoCloud's head for Muse-Glimmer is one of these (section 6).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_dspark.catalog.formats import deepspec, markers, shared
from mlx_dspark.catalog.formats.base import DrafterCheckpoint, without_prefix
from mlx_dspark.catalog.formats.fields import Fields

PACKAGING = "speculators"
DSPARK, DFLASH = "dspark", "dflash"
ALGORITHMS = (DSPARK, DFLASH)
VERIFIER = ("verifier_lm_head.", "verifier_norm.")
"""Beginnings of the names of the target's tensors, which some exports repeat."""

BACKBONE, TAPS = "transformer_layer_config", "aux_hidden_state_layer_ids"
USED_BLOCK, USED_WINDOW, USED_THETA = 8, 4096, 1e4
"""What stands for keys that are left out when they say what the classes of the writer say: speculators' block
size, and Qwen3's window and rotary base."""

HEAD_KEYS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "final_logit_softcapping",
    "num_target_layers",
)

claims = markers.speculators


def read(config: Fields, weights: Mapping[str, mx.array], files: tuple[Path, ...]) -> DrafterCheckpoint:
    """Translate one head. Raises BadCheckpoint or UnsupportedModel naming the key or tensor."""
    algorithm = algorithm_of(config)
    weights = without_prefix(weights)
    weights = {name: weight for name, weight in weights.items() if not name.startswith(VERIFIER)}
    flat = _flat(config, weights, algorithm)
    translated = deepspec.translate(flat, weights)
    if algorithm == DFLASH:
        translated = replace(translated, family="dflash")
    if config.flag("sliding_window_non_causal", False):
        translated = replace(translated, layer_causal=(False,) * translated.layers)
    translated = replace(translated, sinks=shared.sinks(flat, weights))
    return deepspec.checked(PACKAGING, flat, translated, weights, files)


def algorithm_of(config: Fields) -> str:
    """The drafting method. Raises UnsupportedModel naming one that is not translated."""
    section = config.section("speculators_config")
    name = config.text("speculators_model_type", section.text("algorithm", "unknown"))
    other = section.text("algorithm", name)
    if name not in ALGORITHMS:
        shared.unsupported(
            config,
            "speculators_model_type",
            f"a drafter in the speculators packaging (algorithm {name!r})",
            "Known are dspark and dflash; or use a DFlash drafter of z-lab's, lookup drafting, or none.",
        )
    if other != name:
        config.bad(
            "speculators_model_type", f"is {name!r}, and the algorithm in speculators_config {other!r}"
        )
    return name


def _flat(config: Fields, weights: Mapping[str, mx.array], algorithm: str) -> Fields:
    """The same head in DeepSpec's keys."""
    config.require((BACKBONE, TAPS, "mask_token_id"))
    inner = config.section(BACKBONE)
    inner.require(shared.BACKBONE_KEYS)
    hidden = inner.whole("hidden_size")
    if config.whole("target_hidden_size", hidden) != hidden:
        config.bad("target_hidden_size", f"is {config.values['target_hidden_size']}, not {hidden}")
    flat: dict[str, Any] = {"model_type": "qwen3", "rope_theta": USED_THETA} | inner.values
    flat.pop("tie_word_embeddings", None)
    flat |= _attention_widths(inner, weights) | _window(inner)
    flat |= {key: config.values[key] for key in HEAD_KEYS if key in config}
    if algorithm == DFLASH:
        flat |= {"markov_rank": 0, "enable_confidence_head": False}
    block = config.whole("block_size", USED_BLOCK, high=shared.LONGEST_BLOCK)
    flat |= {
        "architectures": None,
        "block_size": block,
        "mask_token_id": config.values["mask_token_id"],
        "target_layer_ids": list(_taps(config)),
        "draft_vocab_size": config.whole("draft_vocab_size", _draft_rows(weights, inner.whole("vocab_size"))),
        "logits_start": _first_slot(config, algorithm, block),
    }
    if "attention_sink_bias" in config:
        flat["attention_sink_bias"] = config.values["attention_sink_bias"]
    return Fields(flat, config.file)


def _attention_widths(inner: Fields, weights: Mapping[str, mx.array]) -> dict[str, int]:
    """Head width and key-value heads, of the tensors where the nested config leaves them out."""
    norm = weights.get("layers.0.self_attn.q_norm.weight")
    keys = weights.get("layers.0.self_attn.k_proj.weight")
    heads = inner.whole("num_attention_heads")
    width = inner.whole(
        "head_dim", max(1, norm.size if norm is not None else inner.whole("hidden_size") // heads)
    )
    found = keys.shape[0] // width if keys is not None and keys.ndim else heads
    return {"head_dim": width, "num_key_value_heads": inner.whole("num_key_value_heads", max(1, found))}


def _window(inner: Fields) -> dict[str, Any]:
    """Sliding layers slide only where the nested config uses its window."""
    if inner.flag("use_sliding_window", False) and not inner.is_null("sliding_window"):
        return {"sliding_window": inner.whole("sliding_window", USED_WINDOW)}
    return {"layer_types": None, "sliding_window": None}


def _taps(config: Fields) -> tuple[int, ...]:
    """An id names the state that enters a layer, and so the layer before. `tap_origin`, a key of ours that
    is 1 unless it says 0, is for heads whose ids name the layer itself."""
    origin = config.whole("tap_origin", 1, low=0, high=1)
    ids = [each - origin for each in config.wholes(TAPS)]
    return shared.taps(Fields({TAPS: ids}, config.file), TAPS, None)


def _draft_rows(weights: Mapping[str, mx.array], vocab: int) -> int:
    """The draft vocabulary where the config is silent."""
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        if name in weights and weights[name].ndim:
            return weights[name].shape[0]
    return vocab


def _first_slot(config: Fields, algorithm: str, block: int) -> int:
    """Whether the anchor's slot drafts: 0, or 1 where it does not.

    The number of drafts tells, where it is that of all slots or all but one; then `sample_from_anchor`.
    DSpark heads without either were written before there was a choice, when the anchor's slot was silent.
    """
    if "logits_start" in config:
        return config.whole("logits_start", low=0, high=1)
    drafts = _drafts(config) if algorithm == DSPARK else None
    if drafts in (block, block - 1):
        return block - drafts
    if "sample_from_anchor" in config:
        return 0 if config.flag("sample_from_anchor", True) else 1
    if algorithm == DSPARK:
        warnings.warn(
            f"{config.file} does not tell whether the anchor's slot drafts (speculative_tokens,"
            " sample_from_anchor), and is read as if it did not. Where few drafts are accepted, write"
            " logits_start 0 there.",
            stacklevel=2,
        )
    return 1


def _drafts(config: Fields) -> int | None:
    """`speculative_tokens` of the first proposal method, where there is one."""
    methods = config.section("speculators_config").values.get("proposal_methods", [])
    if not isinstance(methods, list) or not all(isinstance(method, dict) for method in methods):
        config.bad("proposal_methods", "is not a list of objects")
    first = Fields(methods[0] if methods else {}, config.file)
    return first.whole("speculative_tokens") if "speculative_tokens" in first else None
