"""Growing keys and values of several rows: each row apart (`KVState`), or all in one padded rectangle
(`RectangleKV`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import mlx.core as mx

from mlx_dspark.kernels.attention import Attention
from mlx_dspark.state.base import LayerState
from mlx_dspark.state.kv import STEP, KVState
from mlx_dspark.state.rectangle import RectangleKV

MOST = 2
"""A rectangle holds at most so many times the positions that its rows would hold apart."""


class Layout(Enum):
    """`LIST`: rows lie apart; `RECTANGLE`: always in a rectangle; `COMPANY`: a row alone by itself, two and
    more in a rectangle, unless it would be padding for the most part."""

    LIST = "list"
    RECTANGLE = "rectangle"
    COMPANY = "company"

    def padded(self, depth: Sequence[int]) -> bool:
        """Whether rows of these depths lie in a rectangle."""
        if self is not Layout.COMPANY:
            return self is Layout.RECTANGLE
        held = [-(-each // STEP) * STEP for each in depth]
        return len(held) > 1 and len(held) * max(held) <= MOST * sum(held)


def layout_here() -> Layout:
    """The layout for MLX's default device (decision 012)."""
    return Layout.COMPANY if mx.default_device().type == mx.gpu else Layout.LIST


@dataclass(frozen=True)
class Forms:
    """The two forms of growing keys and values in a batch: `padded` says whether rows of these depths lie in
    a rectangle, `apart` and `masked` how a list and a rectangle are attended to. Other kinds of states have
    one form."""

    padded: Callable[[Sequence[int]], bool]
    apart: Attention
    masked: Attention

    def of(self, layer: LayerState, depth: Sequence[int], *, padded: bool) -> LayerState:
        """A layer, with no transaction open, as it is to lie; no more room than that takes is held."""
        if padded and type(layer) is KVState:
            return RectangleKV.of(layer, depth, self.masked)
        if isinstance(layer, RectangleKV):
            if not padded:
                return layer.apart(depth, self.apart)
            layer.fit(max(depth, default=0))
        return layer
