"""Tiny heads in the packagings of others: a head in the native layout, written as another writes it.

    as_speculators(save_tiny_dspark(folder), other)
    as_speculators(save_tiny_dflash(folder), other, algorithm="dflash")
    as_specforge(save_tiny_dspark(folder, own_embedding=False, own_head=False), other)
    as_nemotron(save_tiny_dspark(folder, logits_start=1), other, sinks=0.5)
    save_tiny_nemotron(folder, hidden=64)

Every further keyword is a config.json key that overrides what is written; None leaves it out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.tiny_drafters import save_tiny_dflash, save_tiny_dspark

BACKBONE_KEYS = (
    "hidden_size",
    "vocab_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "attention_bias",
    "layer_types",
    "sliding_window",
    "model_type",
)
HEAD_KEYS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "draft_vocab_size",
    "final_logit_softcapping",
)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}


def config_of(folder: Path) -> dict[str, Any]:
    """The config.json of `folder`, without nulls."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {key: value for key, value in values.items() if value is not None}


def weights_of(folder: Path) -> dict[str, mx.array]:
    """The tensors of `folder`."""
    loaded = mx.load(str(folder / "model.safetensors"))
    assert isinstance(loaded, dict)
    mx.eval(loaded)
    return loaded


def save(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> Path:
    """Write both into `folder`, over what is there; None leaves a key out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").unlink(missing_ok=True)
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def as_speculators(native: Path, folder: Path, *, algorithm: str = "dspark", **overrides: Any) -> Path:
    """vLLM's layout: a nested backbone, taps counted from 1, the slot rule as a number of drafts."""
    own = config_of(native) | config_of(native).get("dflash_config", {})
    first_slot = 1 if algorithm == "dflash" else own.get("logits_start", 0)
    inner = {key: own[key] for key in BACKBONE_KEYS if key in own}
    inner["use_sliding_window"] = "sliding_window" in own
    config = {key: own[key] for key in HEAD_KEYS if key in own} | {
        "architectures": ["DFlashDraftModel" if algorithm == "dflash" else "DSparkDraftModel"],
        "speculators_model_type": algorithm,
        "speculators_version": "0+source",
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": own["block_size"] - first_slot}
            ],
            "verifier": {"name_or_path": "some/model"},
        },
        "transformer_layer_config": inner,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in own["target_layer_ids"]],
        "block_size": own["block_size"],
        "mask_token_id": own["mask_token_id"],
        "sliding_window_non_causal": False,
    }
    if algorithm == "dflash":
        config["sample_from_anchor"] = False
    return save(folder, config | overrides, weights_of(native))


def as_specforge(native: Path, folder: Path, *, old_names: bool = False, **overrides: Any) -> Path:
    """SpecForge's layout: the drafting keys in `dflash_config`, old exports with the heads under a prefix."""
    own = config_of(native)
    nested = {key: own.pop(key) for key in ("target_layer_ids", "mask_token_id", *HEAD_KEYS) if key in own}
    own |= {
        "architectures": ["DSparkDraftModel"],
        "dflash_config": nested | {"projector_type": "dspark", "attention_mode": "gqa"},
    }
    weights = weights_of(native)
    if old_names:
        heads = ("markov_head.", "confidence_head.")
        weights = {f"logit_head.{n}" if n.startswith(heads) else n: w for n, w in weights.items()}
    return save(folder, own | overrides, weights)


def as_nemotron(native: Path, folder: Path, *, sinks: float | None = None, **overrides: Any) -> Path:
    """NVIDIA's layout; `sinks` is that of the first head, each further one's is 1 more. None: no sinks."""
    own = config_of(native)
    silent = own.pop("logits_start", 0) == 1
    section: dict[str, Any] = {"use_swa": "sliding_window" in own, "causal": "sliding_window" in own}
    own |= {
        "dflash_config": section,
        "dspark_bonus_anchor": silent,
        "sample_from_anchor": not silent,
        "dspark_markov_rank": own.pop("markov_rank"),
        "dspark_fixup_head_type": "markov",
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in own["target_layer_ids"]],
        "has_embed_tokens": True,
        "has_lm_head": False,
    }
    if "sliding_window" in own:
        section["swa_window_size"] = own.pop("sliding_window")
        own["dflash_query_causal"] = True
    weights = weights_of(native)
    if sinks is not None:
        own["attention_sink_bias"] = True
        for index in range(own["num_hidden_layers"]):
            heads = mx.arange(own["num_attention_heads"]) + sinks
            weights[f"layers.{index}.self_attn.attention_sink_bias"] = heads
    return save(folder, own | overrides, weights)


def save_tiny_speculators(folder: Path, *, algorithm: str = "dspark", **options: Any) -> Path:
    """A head of vLLM's in one step; `options` are those of the native layout."""
    factory = save_tiny_dflash if algorithm == "dflash" else save_tiny_dspark
    return as_speculators(factory(folder / "native", **options), folder, algorithm=algorithm)


def save_tiny_nemotron(folder: Path, *, sinks: float = -1.0, window: int = 9, **options: Any) -> Path:
    """A head of NVIDIA's in one step: causal windows, sinks, a silent anchor slot, a borrowed head."""
    layers = options.get("layers", 2)
    slides = {"layer_types": ["sliding_attention"] * layers, "sliding_window": window}
    native = {"logits_start": 1, "own_head": False, "confidence": False} | slides | options
    return as_nemotron(save_tiny_dspark(folder / "native", **native), folder, sinks=sinks)
