"""Recurrent mixers of mlx-lm, a few numbers wide, fed with numbered positions, for the laws of states."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mlx.core as mx
import pytest

from mlx_dspark.state.recurrent import RecurrentRow, RecurrentState
from mlx_dspark.targets.gated_delta import rule
from mlx_dspark.targets.mixers import MIXERS
from mlx_dspark.targets.rerun.mixer import rerun
from tests.tiny_families import tiny_family
from tests.tiny_hybrids import tiny_hybrid

_PLACES = {
    "short conv": ("lfm2", lambda model: model.layers[0].conv),
    "gated delta": ("qwen3_5", lambda model: model.layers[0].linear_attn),
    "gated delta, replayed": ("qwen3_5", lambda model: model.layers[0].linear_attn),
    "mamba2": ("nemotron_h", lambda model: model.layers[0].mixer),
}


@lru_cache
def _mixer(name: str) -> tuple[Any, Callable[..., mx.array]]:
    family, find = _PLACES[name]
    mixer = find(tiny_hybrid(family, seed=5))
    kind = type(mixer)
    return mixer, MIXERS[f"{kind.__module__.removeprefix('mlx_lm.models.')}.{kind.__name__}"]


@lru_cache
def _rerun_mixer() -> Any:
    model: Any = tiny_family("mamba", seed=5)
    return model.backbone.layers[0].mixer


def _numbered(inputs: list[list[int]]) -> mx.array:
    return mx.cos(mx.array(inputs, dtype=mx.float32)[..., None] * (1 + mx.arange(64) / 7))


def feed_again(state: RecurrentState, inputs: list[list[int]]) -> None:
    """As `feed`, to a mixer that is run again for less of a round."""
    rerun(_rerun_mixer(), state, [(None, _numbered(inputs)), (None, state)])


def feed_alone(name: str, state: RecurrentState, inputs: list[list[int]]) -> None:
    """As `feed`, one row after another."""
    mixer, call = _mixer(name)
    for row, view in enumerate(RecurrentRow.all_of(state)):
        call(mixer, _numbered(inputs[row : row + 1]), view)


def feed(name: str, state: RecurrentState, inputs: list[list[int]]) -> None:
    """Write positions `[rows, width]`; positions of the same number have the same input."""
    mixer, call = _mixer(name)
    with pytest.MonkeyPatch.context() as patch:
        if name.endswith("replayed"):
            patch.setattr(rule, "HELD", 0)
        call(mixer, _numbered(inputs), state)
