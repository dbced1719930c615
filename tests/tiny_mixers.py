"""Recurrent mixers of mlx-lm, a few numbers wide, fed with numbered positions, for the laws of states."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mlx.core as mx
import pytest

from mlx_dspark.state.recurrent import RecurrentState
from mlx_dspark.targets.gated_delta import rule
from mlx_dspark.targets.mixers import MIXERS
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


def feed(name: str, state: RecurrentState, inputs: list[list[int]]) -> None:
    """Write positions `[rows, width]`; positions of the same number have the same input."""
    mixer, call = _mixer(name)
    numbers = mx.array(inputs, dtype=mx.float32)[..., None]
    with pytest.MonkeyPatch.context() as patch:
        if name.endswith("replayed"):
            patch.setattr(rule, "HELD", 0)
        call(mixer, mx.cos(numbers * (1 + mx.arange(64) / 7)), state)
