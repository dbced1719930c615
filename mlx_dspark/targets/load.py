"""From a checkpoint to a target: choose the family, place the kernels."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_dspark.catalog.checkpoint import Checkpoint, computes_on_cpu
from mlx_dspark.catalog.progress import LoadProgress, Progress, silent
from mlx_dspark.compat.mlx_lm_models import empty_model
from mlx_dspark.contracts import TargetSpec
from mlx_dspark.foundation.errors import UnsupportedModel
from mlx_dspark.kernels.dispatch import STOCK, CpuWeightsReport, install_cpu_weights
from mlx_dspark.kernels.framework.live import LiveKernels
from mlx_dspark.kernels.framework.offer import Offer, Wanted
from mlx_dspark.kernels.framework.registry import back_end_here
from mlx_dspark.state.layout import Layout
from mlx_dspark.state.quantized import cannot_quantize
from mlx_dspark.targets.dense.parts import body_of, text_model
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.split import refuse_unsplittable, split
from mlx_dspark.targets.states import state_plan


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a model config that describes the language model."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def load_target(
    checkpoint: Checkpoint,
    *,
    cpu_weights: str | None = None,
    kernels: Wanted | None = None,
    kv_bits: int | None = None,
    ranks: int = 1,
    replay: bool = True,
    cache_dir: Path,
    progress: Progress = silent,
) -> DenseTarget:
    """The target of a checkpoint with its kernels placed; its `report` says how its weights are held, its
    `kernels` which of ours it runs on.

    The checkpoint's model is changed in place and can no longer be exported. `cpu_weights` pins the layout on
    the CPU back end, `kernels` says which are wanted on a GPU; `kv_bits` holds growing keys and values in so
    many; `replay` off, its code is gone through in every forward. A model of which `ranks` processes hold a
    part each keeps MLX's own layout and kernels, and is not replayed. Raises UnsupportedModel, or UsageError
    for a layout or a kernel that cannot be had here.
    """
    refuse_untracked_states(checkpoint.model, checkpoint.config, kv_bits=kv_bits)
    report = install_cpu_weights(
        checkpoint.model,
        choice=STOCK if ranks > 1 and computes_on_cpu() else cpu_weights,
        cache_dir=cache_dir,
        progress=lambda message: progress(LoadProgress(message)),
    )
    if ranks > 1 and report.choice is not None:
        report = dataclasses.replace(report, reason=f"shared by {ranks} processes")
    offer = None
    if ranks == 1:
        offer = Offer(kernels or Wanted(), cache_dir, lambda words, part: progress(LoadProgress(words, part)))
        offer.place(checkpoint.model)
    target = target_of(
        checkpoint.model,
        checkpoint.config,
        name=checkpoint.name,
        context=checkpoint.context,
        weights=report,
        kv_bits=kv_bits,
    )
    target.kernels = LiveKernels(back_end_here()) if offer is None else offer.live
    if offer is not None and offer.wants_shapes:
        attention = offer.attention(target.attended(), target.spec.context)
        if attention is not None:
            target.attend_by(attention)
    if not replay or ranks > 1:
        target.replays = None
    elif target.replays is not None:
        progress(LoadProgress("compiling the model's forward"))
        target.why_not_replayed()
    return target


def refuse_untracked_states(model: nn.Module, config: dict[str, Any], *, kv_bits: int | None = None) -> None:
    """Raises UnsupportedModel when a layer keeps something that cannot be taken back, or not in few bits."""
    state_plan(text_model(model), text_config(config), kv_bits=kv_bits)


def refuse_config(config: dict[str, Any], *, kv_bits: int | None = None, ranks: int = 1) -> None:
    """As `refuse_model`, without weights, where config.json alone tells what model it is of."""
    model = empty_model(copy.deepcopy(config))
    if model is not None:
        refuse_model(model, config, kv_bits=kv_bits, ranks=ranks)


def refuse_model(
    model: nn.Module, config: dict[str, Any], *, kv_bits: int | None = None, ranks: int = 1
) -> None:
    """As `refuse_untracked_states`; raises UnsupportedModel too where `ranks` processes cannot share it."""
    refuse_untracked_states(model, config, kv_bits=kv_bits)
    if ranks > 1:
        refuse_unsplittable(model, text_config(config), ranks)


def divide_model(model: nn.Module, config: dict[str, Any], *, group: mx.distributed.Group) -> None:
    """Keep this process's part of the model. Raises UnsupportedModel where it cannot be shared."""
    split(model, text_config(config), group)


def target_of(
    model: nn.Module,
    config: dict[str, Any],
    *,
    name: str = "",
    context: int = 0,
    weights: CpuWeightsReport | None = None,
    kv_bits: int | None = None,
    layout: Layout | None = None,
) -> DenseTarget:
    """The target for an mlx-lm model.

    `context` is the most tokens prompt and answer may have together; 0 reads `max_position_embeddings`.
    `weights` reports how the CPU back end holds them, when something was installed; `kv_bits` holds growing
    keys and values in so many; `layout` is as for DenseTarget. Raises UnsupportedModel when a layer keeps
    something that cannot be taken back, or not in few bits, or a width cannot be told, and BadCheckpoint for
    weights that give no finite logits.
    """
    model = text_model(model)
    settings = text_config(config)
    plan = state_plan(model, settings, kv_bits=kv_bits)
    spec = TargetSpec(
        architecture=str(settings.get("model_type", "")),
        vocab=int(settings.get("vocab_size") or _width(model, "vocab_size", config)),
        hidden=_hidden(settings) or _width(body_of(model), "hidden_size", config),
        layers=len(model.layers),  # type: ignore[attr-defined]
        context=context or int(settings.get("max_position_embeddings", 0)) or 1 << 20,
        name=name,
        lazy=weights is None or weights.choice in (None, STOCK),
    )
    target = DenseTarget(model, spec, plan, weights=weights, layout=layout)
    _try_states(target, quantized=kv_bits is not None)
    return target


def _try_states(target: DenseTarget, *, quantized: bool) -> None:
    """Raises UnsupportedModel where the model's own code cannot work with its states."""
    rows = target.new_rows()
    try:
        with rows.transaction(2):
            mx.eval(target.forward(mx.array([[0, 0]]), rows).logits)
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        if quantized:
            raise cannot_quantize("its code does not take them so") from error
        raise UnsupportedModel(
            f"The code of this {target.spec.architecture} model does not work with states that can be taken "
            "back.",
            "Choose another model.",
            field="model_type",
        ) from error


def _hidden(settings: dict[str, Any]) -> int:
    """The width of the residual stream by one of the names that configs have for it, or 0."""
    named = (settings.get(name) for name in ("hidden_size", "model_dim", "d_model", "n_embd", "hidden_dim"))
    return next((width for width in named if isinstance(width, int)), 0)


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
