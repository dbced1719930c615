"""The dense target: mlx-lm's model, our states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_dspark.contracts import Forward, Logits, TargetSpec
from mlx_dspark.foundation.errors import BadCheckpoint, UnsupportedModel
from mlx_dspark.kernels.attention import (
    cpu_attention,
    install_row_attention,
    masked_attention,
    stock_attention,
)
from mlx_dspark.kernels.dispatch import CpuWeightsReport
from mlx_dspark.state.kv import KVState
from mlx_dspark.state.rectangle import RectangleKV
from mlx_dspark.state.rows import RowStates
from mlx_dspark.targets.taps import tap_layers

Head = Callable[[mx.array], mx.array]


class DenseTarget:
    """A model of mlx-lm with one growing key/value cache per layer.

    The model's own forward computes everything. Where its vocabulary head is a separate last step (checked at
    construction on real numbers), only the positions asked for go through it. `weights` reports how the CPU
    back end holds them.
    """

    def __init__(
        self, model: nn.Module, spec: TargetSpec, *, weights: CpuWeightsReport | None = None
    ) -> None:
        self.model: Any = model
        self.spec = spec
        self.report = weights
        self._attention = stock_attention if spec.lazy else cpu_attention()
        install_row_attention(model)
        self._taps = tap_layers(model.layers)  # type: ignore[attr-defined]
        probe = mx.array([[0, 1 % spec.vocab, 2 % spec.vocab]])
        with self._taps.recording((-1,)):
            logits = self.model(probe)
            entering = self._taps.features((-1,))
        _refuse_not_finite(logits, spec)
        self._body, self._head = _split(self.model, probe, logits, spec.hidden)
        self._embed_scale = _embed_scale(self.model, probe, entering)

    def new_rows(self, n: int = 1, *, rectangle: bool = False) -> RowStates:
        layers = range(self.spec.layers)
        if rectangle:
            return RowStates([RectangleKV(n, masked_attention()) for _ in layers], n)
        return RowStates([KVState(n, self._attention) for _ in layers], n)

    def forward(
        self,
        tokens: mx.array,
        rows: RowStates,
        *,
        taps: tuple[int, ...] = (),
        logits: Logits | mx.array = Logits.ALL,
    ) -> Forward:
        with self._taps.recording(taps):
            if self._body is None or self._head is None:
                out = _positions(self.model(tokens, cache=rows.cache), logits)
            else:
                hidden = _positions(self._body(tokens, cache=rows.cache), logits)
                out = self._head(hidden) if hidden is not None else None
            return Forward(out, self._taps.features(taps))

    def features(self, tokens: mx.array, taps: tuple[int, ...]) -> tuple[mx.array, mx.array]:
        """Whole sequences in one causal pass, without a state: what a drafter is trained on.

        `tokens` `[rows, width]` gives the tapped features `[rows, width, taps * hidden]` and what enters the
        vocabulary head, `[rows, width, hidden]`, for `unembed`. Raises UnsupportedModel when the model's
        output is more than its head applied to that.
        """
        if self._body is None or not taps:
            raise UnsupportedModel(
                f"{type(self.model).__module__} has no separate vocabulary head, or no taps are asked for.",
                "A drafter cannot be trained for this model.",
                field="target",
            )
        with self._taps.recording(taps):
            hidden = self._body(tokens)
            features = self._taps.features(taps)
        assert features is not None
        return features, hidden

    def embed(self, tokens: mx.array) -> mx.array:
        """`[...]` ids to `[..., hidden]`, as the first layer sees them.

        Raises UnsupportedModel when the model does more to its embedding than look it up and scale it.
        """
        if self._embed_scale is None:
            raise _no_embedding(self.model)
        rows = self.model.model.embed_tokens(tokens)
        return rows if self._embed_scale == 1.0 else rows * mx.array(self._embed_scale, rows.dtype)

    def unembed(self, hidden: mx.array) -> mx.array:
        """`[..., hidden]` to `[..., vocab]`, without the multiplier or soft cap of the model's own output.

        Raises UnsupportedModel when the model keeps its vocabulary head in an unknown place.
        """
        head = _raw_head(self.model)
        if head is None:
            raise _no_embedding(self.model)
        return head(hidden)


def _refuse_not_finite(logits: mx.array, spec: TargetSpec) -> None:
    """Minus infinity alone is no fault: it rules a token out."""
    if mx.any(mx.isnan(logits) | mx.isposinf(logits)).item():
        raise BadCheckpoint(
            f"The weights of {spec.name or 'the model'} are damaged: its logits are NaN or infinite.",
            "Fetch or copy the model again.",
        )


def _positions(values: mx.array, wanted: Logits | mx.array) -> mx.array | None:
    """The wanted positions of `[rows, width, n]`."""
    if isinstance(wanted, mx.array):
        return mx.take_along_axis(values, wanted[:, :, None], axis=1)
    return {Logits.ALL: values, Logits.LAST: values[:, -1:], Logits.NONE: None}[wanted]


def _no_embedding(model: Any) -> UnsupportedModel:
    return UnsupportedModel(
        f"{type(model).__module__} keeps its embedding or head in a form that a drafter cannot borrow.",
        "Use a drafter with an embedding and head of its own, or --mode lookup.",
    )


def _table(model: Any) -> Any:
    return getattr(getattr(model, "model", None), "embed_tokens", None)


def _raw_head(model: Any) -> Head | None:
    head = getattr(model, "lm_head", None)
    return head if head is not None else getattr(_table(model), "as_linear", None)


def _split(model: Any, probe: mx.array, logits: mx.array, hidden_size: int) -> tuple[Any, Head | None]:
    """The model as body and head where composing the two gives the model's own logits, else nothing."""
    body, head = getattr(model, "model", None), _raw_head(model)
    if body is None or head is None:
        return None, None
    hidden = body(probe)
    if not isinstance(hidden, mx.array) or hidden.shape[-1] != hidden_size:
        return None, None
    return (body, head) if mx.array_equal(head(hidden), logits).item() else (None, None)


def _embed_scale(model: Any, probe: mx.array, entering: mx.array | None) -> float | None:
    """What the model multiplies its embedding rows with, or None when it does something else to them."""
    table = _table(model)
    if table is None or entering is None:
        return None
    rows = table(probe)
    if mx.array_equal(rows, entering).item():
        return 1.0
    wide = rows.astype(mx.float32)
    ratio = mx.abs(entering).sum() / mx.maximum(mx.abs(wide).sum(), 1e-20)
    scale = cast(float, ratio.item())
    return scale if mx.allclose(wide * scale, entering.astype(mx.float32), rtol=1e-2).item() else None
