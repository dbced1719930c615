"""Where training starts: a new drafter with sensible weights, or one that exists already."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_dspark.catalog.formats import DrafterCheckpoint, DrafterConfig, deepspec, packing, read_drafter
from mlx_dspark.catalog.formats.fields import Fields
from mlx_dspark.catalog.progress import Progress
from mlx_dspark.catalog.resolve import resolve_drafter
from mlx_dspark.drafters.block import check_fit
from mlx_dspark.foundation.errors import DsparkError, UnsupportedModel
from mlx_dspark.foundation.settings import TrainSettings
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.train.shape import DrafterShape

MARKOV_STD = 0.02
DOUBT = 0.5
"""The final norm starts at this share of the spread of what the target's head reads, so that a drafter which
knows nothing yet is not sure of it."""

QUIET = 0.1
"""A tapped channel counts as at least this much of its tap's root mean square."""


@dataclass(frozen=True)
class Start:
    """A drafter before its first step: config.json, and the checkpoint with float32 weights."""

    config: dict[str, Any]
    checkpoint: DrafterCheckpoint


def new_drafter(
    shape: DrafterShape,
    config: Mapping[str, Any],
    kept: np.ndarray | None,
    target: DenseTarget,
    sample: mx.array,
    seed: int,
) -> Start:
    """A drafter of `config` (config.json in DeepSpec's layout) for `target`, the same for the same seed.

    `kept` are the target ids of a reduced draft vocabulary. Tables are copies of the target's. Matrices are
    uniform in +-1/sqrt(width); the fusion and the final norm are scaled to what the target shows on the
    tokens of `sample` `[rows, width]`, since its layers differ in size by an order of magnitude. The Markov
    bias starts at zero.
    """
    fields = Fields(config, Path("config.json"))
    translated = _translated(shape, config)
    weights = _random_weights(translated, seed)
    features, hidden = target.features(sample, translated.taps)
    loudness = _root_mean_square(features).reshape(len(translated.taps), -1)
    loudness = mx.maximum(loudness, QUIET * mx.sqrt(mx.mean(loudness**2, axis=1, keepdims=True)))
    weights["fc.weight"] = weights["fc.weight"] / loudness.flatten()
    spread = mx.sqrt(mx.var(hidden.astype(mx.float32), axis=(0, 1)))
    weights["norm.weight"] = DOUBT * spread
    if translated.own_embedding:
        weights["embed_tokens.weight"] = target.embed(mx.arange(translated.vocab)).astype(mx.float32)
    if translated.own_head:
        head = target.unembed(mx.eye(translated.hidden, dtype=hidden.dtype)).T.astype(mx.float32)
        weights["lm_head.weight"] = head if kept is None else head[mx.array(kept)]
    if kept is not None:
        weights["d2t"] = mx.array((kept - np.arange(len(kept))).astype(np.int64))
    mx.eval(weights)
    return Start(dict(config), deepspec.read(fields, weights, ()))


@dataclass(frozen=True)
class Base:
    """A drafter to train further: its name, the first line of its card, and what is in it."""

    name: str
    card: str
    start: Start


def base_drafter(settings: TrainSettings, target: DenseTarget, progress: Progress) -> Base:
    """The drafter that `warm_start` names: a folder, a hub id, or one that comes with the program.

    Raises LoadError or DownloadError when it cannot be had, or does not fit the target.
    """
    try:
        found = resolve_drafter(str(settings.warm_start), progress=progress)
        start = existing_drafter(found.path, target)
    except DsparkError as error:
        error.field = "warm_start"
        raise
    card = found.path / "README.md"
    lines = card.read_text(encoding="utf-8").splitlines() if card.is_file() else []
    titles = [line.lstrip("# ") for line in lines if line.startswith("# ")]
    return Base(found.name, titles[0] if titles else "", start)


def parameters_of(shape: DrafterShape, config: Mapping[str, Any]) -> int:
    """Numbers in a drafter of `config`, before it is made."""
    return sum(math.prod(each) for each in deepspec.expected_tensors(_translated(shape, config)).values())


def _translated(shape: DrafterShape, config: Mapping[str, Any]) -> DrafterConfig:
    tables = {"embed_tokens.weight": shape.own_embedding, "lm_head.weight": shape.own_head}
    present = [name for name, own in tables.items() if own]
    return deepspec.translate(Fields(config, Path("config.json")), present)


def existing_drafter(folder: Path, target: DenseTarget) -> Start:
    """The drafter in `folder`, to be trained further; a quantized one is unpacked.

    Raises LoadError when it cannot be read, is no DSpark drafter or does not fit the target.
    """
    checkpoint = read_drafter(folder)
    if checkpoint.packaging != deepspec.PACKAGING:
        raise UnsupportedModel(
            f"{folder} is a drafter in the {checkpoint.packaging} packaging, which is not trained here.",
            "Start from a DSpark drafter in DeepSpec's layout, or from none.",
            field="warm_start",
        )
    check_fit(checkpoint.config, target)
    config = json.loads((checkpoint.files[0].parent / "config.json").read_text(encoding="utf-8"))
    config.pop(packing.KEY, None)
    weights = {name: weight.astype(mx.float32) for name, weight in checkpoint.weights.items()}
    mx.eval(weights)
    return Start(
        config, DrafterCheckpoint(checkpoint.packaging, checkpoint.config, weights, (), checkpoint.d2t)
    )


def _random_weights(config: DrafterConfig, seed: int) -> dict[str, mx.array]:
    shapes = deepspec.expected_tensors(config)
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    return {
        name: _initial(name, shape, key)
        for key, (name, shape) in zip(keys, sorted(shapes.items()), strict=True)
    }


def _initial(name: str, shape: tuple[int, ...], key: mx.array) -> mx.array:
    if name.endswith(".bias") or name == "markov_head.markov_w2.weight":
        return mx.zeros(shape)
    if len(shape) == 1:
        return mx.ones(shape)
    if name == "markov_head.markov_w1.weight":
        return MARKOV_STD * mx.random.normal(shape, key=key)
    bound = shape[-1] ** -0.5
    return mx.random.uniform(-bound, bound, shape, key=key)


def _root_mean_square(x: mx.array) -> mx.array:
    """Per channel `[..., width]` to `[width]`."""
    return mx.sqrt(mx.mean(mx.square(x.astype(mx.float32)), axis=tuple(range(x.ndim - 1))))
