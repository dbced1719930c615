"""From a checkpoint to a target: choose the family, place the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_dspark.catalog.checkpoint import Checkpoint
from mlx_dspark.catalog.progress import LoadProgress, Progress, silent
from mlx_dspark.contracts import TargetSpec
from mlx_dspark.foundation.errors import UnsupportedModel
from mlx_dspark.kernels.dispatch import STOCK, CpuWeightsReport, install_cpu_weights
from mlx_dspark.targets.dense.target import DenseTarget


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a model config that describes the language model."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def load_target(
    checkpoint: Checkpoint,
    *,
    cpu_weights: str | None = None,
    cache_dir: Path,
    progress: Progress = silent,
) -> DenseTarget:
    """The target of a checkpoint with its kernels placed; its `report` says how its weights are held.

    The checkpoint's model is changed in place and can no longer be exported. `cpu_weights` pins the layout on
    the CPU back end. Raises UnsupportedModel, or UsageError for a layout that does not exist.
    """
    refuse_untracked_states(checkpoint.model, checkpoint.config)
    report = install_cpu_weights(
        checkpoint.model,
        choice=cpu_weights,
        cache_dir=cache_dir,
        progress=lambda message: progress(LoadProgress(message)),
    )
    return target_of(
        checkpoint.model,
        checkpoint.config,
        name=checkpoint.name,
        context=checkpoint.context,
        weights=report,
    )


def refuse_untracked_states(model: nn.Module, config: dict[str, Any]) -> None:
    """Raises UnsupportedModel when a layer's state is not a growing key/value cache."""
    kinds = {type(cache).__name__ for cache in make_prompt_cache(model)}
    if kinds != {KVCache.__name__}:
        found = ", ".join(sorted(kinds - {KVCache.__name__}))
        kind = "sliding window" if "RotatingKVCache" in kinds else "recurrent or otherwise special"
        raise UnsupportedModel(
            f"This {config.get('model_type')} model has {kind} layers, whose state ({found}) this version "
            "cannot take back.",
            "Choose a model in which every layer attends to the whole text.",
            field="model_type",
        )


def target_of(
    model: nn.Module,
    config: dict[str, Any],
    *,
    name: str = "",
    context: int = 0,
    weights: CpuWeightsReport | None = None,
) -> DenseTarget:
    """The target for an mlx-lm model.

    `context` is the most tokens prompt and answer may have together; 0 reads `max_position_embeddings`.
    `weights` reports how the CPU back end holds them, when something was installed. Raises UnsupportedModel
    when a layer's state is not a growing key/value cache or a width cannot be told, and
    BadCheckpoint for weights that give no finite logits.
    """
    refuse_untracked_states(model, config)
    settings, body = text_config(config), getattr(model, "model", None)
    spec = TargetSpec(
        architecture=str(settings.get("model_type", "")),
        vocab=int(settings.get("vocab_size") or _width(model, "vocab_size", config)),
        hidden=int(settings.get("hidden_size") or _width(body, "hidden_size", config)),
        layers=len(model.layers),  # type: ignore[attr-defined]
        context=context or int(settings.get("max_position_embeddings", 0)) or 1 << 20,
        name=name,
        lazy=weights is None or weights.choice in (None, STOCK),
    )
    return DenseTarget(model, spec, weights=weights)


def _width(module: Any, name: str, config: dict[str, Any]) -> int:
    """The width of what `module` gives for one token, where config.json does not tell it as `name`."""
    out = module(mx.array([[0]])) if module is not None else None
    if not isinstance(out, mx.array):
        raise UnsupportedModel(
            f"The config of this {config.get('model_type')} model has no {name}, and its layers do not tell.",
            "Choose another model.",
            field=name,
        )
    return out.shape[-1]
