"""The real default model for tests: loaded once, and exported once for stock mlx-lm to be the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, cast

import mlx.core as mx
import mlx_lm

from mlx_dspark.catalog.checkpoint import load_checkpoint
from mlx_dspark.catalog.export import export_model
from mlx_dspark.catalog.resolve import resolve_model
from mlx_dspark.foundation.paths import default_cache_dir
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.session.pair import Parts, load_parts

TIE = 2e-3
"""Two logits of the default model closer than this are a tie: float32 sums in another order differ by up to
a few 1e-4 after thirty layers."""


@lru_cache
def parts(mode: str = "baseline", **settings: Any) -> Parts:
    return load_parts(LoadSettings.of({"mode": mode, **settings}))


@lru_cache
def stock() -> Any:
    """Stock mlx-lm's model of the exported folder."""
    folder = Path(mkdtemp(prefix="mlx-dspark-export-")) / "smollm2-135m"
    export_model(load_checkpoint(resolve_model(None, cache_dir=default_cache_dir())), folder)
    return mlx_lm.load(str(folder))[0]


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Where two id lists part; None when one is a prefix of the other."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)


def top_two_gap(prefix: Sequence[int]) -> float:
    """How far stock mlx-lm's best next token is ahead of its second, in logits."""
    logits = stock()(mx.array([list(prefix)]))[0, -1].astype(mx.float32)
    second, first = mx.split(mx.sort(logits)[-2:], 2)
    return cast(float, (first - second).item())


def assert_same_or_tie(prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> None:
    """Ids are equal, or part where the top two logits are a tie."""
    at = first_difference(ours, theirs)
    if at is None:
        assert len(ours) == len(theirs)
        return
    gap = top_two_gap([*prompt, *theirs[:at]])
    assert gap < TIE, f"ids differ from token {at} on; the top two logits there are {gap:.5f} apart"
