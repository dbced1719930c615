"""The dense target: mlx-lm's model, our states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_dspark.contracts import Forward, Logits, TargetSpec
from mlx_dspark.foundation.errors import BadCheckpoint, UnsupportedModel
from mlx_dspark.kernels.attention import (
    Attention,
    cpu_attention,
    install_row_attention,
    stock_attention,
)
from mlx_dspark.kernels.dispatch import CpuWeightsReport
from mlx_dspark.kernels.framework.kernel import AttentionShape
from mlx_dspark.kernels.framework.live import LiveKernels
from mlx_dspark.state.alone import rows_alone
from mlx_dspark.state.layout import Layout, layout_here
from mlx_dspark.state.quantized import GROUP, QuantizedKVState
from mlx_dspark.state.rows import RowStates
from mlx_dspark.targets.dense.parts import find_parts
from mlx_dspark.targets.dense.replay import Replays
from mlx_dspark.targets.dense.together import rows_run_together
from mlx_dspark.targets.states import StatePlan
from mlx_dspark.targets.taps import tap_layers


class DenseTarget:
    """A text model of mlx-lm, with the states of its `plan` in place of its caches.

    The model's own forward computes everything. Where its vocabulary head is a separate last step (checked at
    construction on real numbers), only the positions asked for go through it. `weights` reports how the CPU
    back end holds them, `kernels` which of ours it runs on, when some were offered; `layout` is how its rows
    lie, by default as MLX's default device wants it; `replays` has its recorded forwards, where it records.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: TargetSpec,
        plan: StatePlan,
        *,
        weights: CpuWeightsReport | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.model: Any = model
        self.spec = spec
        self.report = weights
        self.kernels: LiveKernels | None = None
        self.layout = layout if layout is not None else layout_here()
        self._attention = stock_attention if spec.lazy else cpu_attention()
        self.replays = Replays(model) if spec.lazy and mx.cuda.is_available() else None
        self._plan = plan
        self._together: dict[bool, bool] = {}
        plan.place(model)
        install_row_attention(model)
        self._taps = tap_layers(model.layers)  # type: ignore[attr-defined]
        probe = mx.array([[spec.vocab // 4, spec.vocab // 3, spec.vocab // 2]])
        logits, entering = self._first_forward(probe)
        if self._taps.passes > 1:
            self.spec = replace(spec, layers=spec.layers * self._taps.passes)
        _refuse_not_finite(logits, spec)
        self._parts = find_parts(self.model, probe, logits, entering, spec.hidden)

    def _first_forward(self, probe: mx.array) -> tuple[mx.array, mx.array | None]:
        """Logits of the probe, and what enters the first layer.

        Raises UnsupportedModel where the model's code does not run on this device.
        """
        try:
            with self._taps.recording((-1,)):
                logits = self.model(probe)
                mx.eval(logits)
                return logits, self._taps.seen(-1)
        except RuntimeError as error:
            detail = str(error).partition("\n")[0].rstrip(". ")
            raise UnsupportedModel(
                f"The code of this {self.spec.architecture} model does not run on this device: {detail}.",
                "Choose another model or another device.",
                field="model_type",
            ) from error

    def new_rows(self, n: int = 1, *, rectangle: bool = False) -> RowStates:
        layout = Layout.RECTANGLE if rectangle else self.layout
        return self._plan.new_rows(
            n,
            self._attention,
            lambda depth: layout.padded(depth) and self._run_together(rectangle=True),
        )

    def forward(
        self,
        tokens: mx.array,
        rows: RowStates,
        *,
        taps: tuple[int, ...] = (),
        logits: Logits | mx.array = Logits.ALL,
    ) -> Forward:
        """As the protocol says. Where the model's code does not take several rows, they run one by one."""
        if self.replays is not None:
            made = self.replays.forward(self._run, self._new_row, tokens, rows, taps, logits)
            if made is not None:
                return made
        if len(rows) == 1 or rows.padded or self._run_together(rectangle=False):
            return self._run(tokens, rows.cache, taps, logits)
        outs = [
            self._run(
                tokens[row : row + 1],
                cache,
                taps,
                logits[row : row + 1] if isinstance(logits, mx.array) else logits,
            )
            for row, cache in enumerate(self._caches_alone(rows))
        ]
        return Forward(_joined([out.logits for out in outs]), _joined([out.features for out in outs]))

    @property
    def replayed(self) -> bool:
        return not self.why_not_replayed()

    def why_not_replayed(self) -> str:
        """Why its forwards of few tokens go through the model's code each time; empty where they are
        replayed. What this asks for is compiled when it is first asked."""
        if self.replays is None:
            return "it is switched off, or not for this device"
        self.replays.work(self._run, self._new_row)
        return self.replays.why_not

    def _new_row(self) -> RowStates:
        return self._plan.new_rows(1, self._attention)

    def _run(
        self, tokens: mx.array, cache: list[Any], taps: tuple[int, ...], logits: Logits | mx.array
    ) -> Forward:
        with self._taps.recording(taps):
            body, head = self._parts.body, self._parts.head
            if body is None or head is None:
                out = _positions(self.model(tokens, cache=cache), logits)
            else:
                hidden = _positions(body(tokens, cache=cache), logits)
                out = head(hidden) if hidden is not None else None
            return Forward(out, self._taps.features(taps))

    def own_logits(self, tokens: mx.array) -> mx.array:
        """Logits `[rows, width, vocab]` of whole texts by the model's own code on mlx-lm's own caches, which
        are quantized where the states are."""
        caches: list[Any] = make_prompt_cache(self.model)
        for index, layer in enumerate(self._plan.new_rows(1, self._attention).layers):
            if isinstance(layer, QuantizedKVState):
                caches[index] = caches[index].to_quantized(group_size=GROUP, bits=layer.bits)
        with self._taps.recording(()):
            return self.model(tokens, cache=caches)

    def attended(self) -> list[AttentionShape]:
        """The attentions that the model asks of its states, in the order of its layers; none of layers whose
        states attend in their own way. Runs two tokens."""
        seen: list[AttentionShape] = []

        def noted(
            queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: Any
        ) -> mx.array:
            sizes = (queries.shape[1], keys.shape[1], queries.shape[3])
            seen.append(AttentionShape(*sizes, queries.dtype, keys.shape[2], sinks is not None))
            return stock_attention(queries, keys, values, scale, mask, sinks)

        rows = self._plan.new_rows(1, noted)
        with rows.transaction(2):
            mx.eval(self.forward(mx.array([[0, 0]]), rows, logits=Logits.NONE).features or [])
        return seen

    def attend_by(self, attention: Attention) -> None:
        """Have new rows attended to in this way."""
        self._attention = attention

    @property
    def kv_bits(self) -> set[int]:
        """In how many bits keys and values are held, where they are quantized."""
        layers = self._plan.new_rows(1, self._attention).layers
        return {layer.bits for layer in layers if isinstance(layer, QuantizedKVState)}

    @property
    def state_kinds(self) -> list[str]:
        """The kinds of states, sorted, with the number of bits where they are quantized."""
        layers = self._plan.new_rows(1, self._attention).layers
        return sorted({f"{type(layer).__name__}{getattr(layer, 'bits', '')}" for layer in layers})

    def _run_together(self, *, rectangle: bool) -> bool:
        """Whether the model's code takes several rows, found out when it is first asked."""
        known = self._together.get(rectangle)
        if known is None:
            layout = Layout.RECTANGLE if rectangle else Layout.LIST
            with self._taps.recording(()):
                known = rows_run_together(
                    lambda tokens, rows: self.model(tokens, cache=rows.cache),
                    lambda n: self._plan.new_rows(n, self._attention, layout.padded),
                    self.spec.vocab,
                )
            self._together[rectangle] = known
        return known

    def _caches_alone(self, rows: RowStates) -> list[list[Any]]:
        caches = rows_alone(rows)
        if caches is None:
            raise UnsupportedModel(
                f"{type(self.model).__module__} does not take several rows.",
                "Ask for one answer at a time.",
                field="model_type",
            )
        return caches

    def features(self, tokens: mx.array, taps: tuple[int, ...]) -> tuple[mx.array, mx.array]:
        """Whole sequences in one causal pass, without a state: what a drafter is trained on.

        `tokens` `[rows, width]` gives the tapped features `[rows, width, taps * hidden]` and what enters the
        vocabulary head, `[rows, width, hidden]`, for `unembed`. Raises UnsupportedModel when the model's
        output is more than its head applied to that.
        """
        body = self._parts.body
        if body is None or not self._parts.plain:
            what = (
                "has no vocabulary head that can be told apart from its layers"
                if body is None
                else "does more to its logits than its vocabulary head, such as a multiplier or a soft cap"
            )
            raise UnsupportedModel(
                f"{type(self.model).__module__} {what}.",
                "A drafter cannot be trained for this model.",
                field="target",
            )
        with self._taps.recording(taps):
            hidden = body(tokens, cache=None)
            features = self._taps.features(taps)
        assert features is not None
        return features, hidden

    def embed(self, tokens: mx.array) -> mx.array:
        """`[...]` ids to `[..., hidden]`: rows of the table with the model's scale, but before a norm.

        Raises UnsupportedModel when the place of a token counts for its embedding.
        """
        if self._parts.embed is None:
            raise _no_embedding(self.model)
        return self._parts.embed(tokens)

    def unembed(self, hidden: mx.array) -> mx.array:
        """`[..., hidden]` to `[..., vocab]`, without the multiplier or soft cap of the model's own output.

        Raises UnsupportedModel when the model keeps its vocabulary head in an unknown place.
        """
        if self._parts.raw_head is None:
            raise _no_embedding(self.model)
        return self._parts.raw_head(hidden)


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


def _joined(parts: list[mx.array | None]) -> mx.array | None:
    arrays = [part for part in parts if part is not None]
    return mx.concatenate(arrays) if arrays else None


def _no_embedding(model: Any) -> UnsupportedModel:
    return UnsupportedModel(
        f"{type(model).__module__} keeps its embedding or head in a form that a drafter cannot borrow.",
        "Use a drafter with an embedding and head of its own, or --mode lookup.",
    )
