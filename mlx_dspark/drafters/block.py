"""The rounds of a block drafter: one parallel forward over an anchor and masks, read off as drafts.

DSpark and DFlash share everything here and differ in how hidden slots become drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlx.core as mx
import mlx.nn as nn

from mlx_dspark.catalog.formats import DrafterConfig
from mlx_dspark.contracts import Ask, Observation, Proposal, Source, Target
from mlx_dspark.drafters.device import DeviceForward
from mlx_dspark.drafters.draw import DraftVocab, GreedyDraw, SampledDraw, draw_of, proposal_of
from mlx_dspark.foundation.errors import DrafterMismatch
from mlx_dspark.kernels.attention import cpu_attention
from mlx_dspark.kernels.cpu_small.modules import HostRoPE
from mlx_dspark.kernels.dispatch import STOCK, install_cpu_weights
from mlx_dspark.nn.block import BlockBackbone
from mlx_dspark.nn.context import ContextRow, ContextRows
from mlx_dspark.nn.probs import PointMass

Draw = GreedyDraw | SampledDraw

BLOCKS = "blocks"
"""The way of holding weights whose layers also have a form outside MLX."""

ABSORB_AT = 32
"""Observed positions of a row that wait for the next proposal before they are absorbed. A row that does not
draft (its cap is 0) then pays for the backbone's projections once in so many tokens, not at every one."""


@dataclass(frozen=True)
class Chain:
    """Drafts as they came about. `logits` and `base_logits` `[rows, width, draft_vocab]` are with and without
    the Markov bias; `confidence_logits` `[rows, width]`, None without a confidence head."""

    tokens: mx.array
    base_logits: mx.array
    logits: mx.array
    confidence_logits: mx.array | None = None


@dataclass(frozen=True)
class Trace:
    """A greedy block with all its intermediate values; `hidden` `[rows, block, hidden]` is after the norm."""

    hidden: mx.array
    chain: Chain


class BlockDrafter(ABC):
    """A drafter whose model is a BlockBackbone; implements the Drafter protocol.

    `confidence_threshold` "auto" leaves it to what each proposal is asked with.

    `dtype` is what the model computes in; `d2t` belongs to a reduced vocabulary. `confidence_threshold` above
    0 ends a draft where the product of its confidences falls below it, at a synchronisation in `propose`.
    """

    def __init__(
        self,
        config: DrafterConfig,
        model: BlockBackbone,
        dtype: mx.Dtype,
        *,
        d2t: mx.array | None = None,
        confidence_threshold: float | Literal["auto"] = 0.0,
    ) -> None:
        self.config = config
        self.model = model
        self.dtype = dtype
        self.vocab = DraftVocab(config.vocab, d2t)
        self.confident = confidence_threshold == "auto"
        self.confidence_threshold = 0.0 if confidence_threshold == "auto" else confidence_threshold
        self._target: Target | None = None
        self._device: DeviceForward | None = None
        self.folder: Path | None = None
        """Where it was read from; None where it was made in memory."""

    @property
    def name(self) -> str:
        return self.config.family

    @property
    def sources(self) -> tuple[Source, ...]:
        return (Source(self.name, self.max_draft, self.confidence_threshold > 0, self.confident),)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def max_draft(self) -> int:
        return self.config.max_draft

    @property
    def target(self) -> Target:
        """The bound target, whose tables are borrowed. Raises RuntimeError before `bind`."""
        if self._target is None:
            raise RuntimeError(f"the {self.name} drafter is not bound to a target")
        return self._target

    def bind(self, target: Target) -> None:
        """Raises DrafterMismatch naming the field that does not fit, with both values."""
        check_fit(self.config, target)
        self._target = target
        self._device = self._device_forward() if mx.cuda.is_available() else None

    def _device_forward(self) -> DeviceForward | None:
        """The forward as one kernel, where that is right."""
        found = DeviceForward.of(self.model)
        right = found is not None and found.right_here(self.model, self._slots(self.max_draft))
        return found if right else None

    @property
    def one_kernel(self) -> bool:
        """Whether the forward of one row is one kernel."""
        return self._device is not None

    def hold_weights(self, choice: str, cache_dir: Path) -> None:
        """Hold the model's weights the way its target holds its own on the CPU back end.

        `choice` names the way (`kernels.dispatch.CHOICES`).
        """
        install_cpu_weights(self.model, choice=choice, cache_dir=cache_dir)
        if choice == STOCK:
            return
        attention = cpu_attention()
        for layer in self.model.layers:
            layer.self_attn.attention = attention
        if choice == BLOCKS and self.config.rope_kind == "default":
            from mlx_dspark.drafters.host import host_layer  # needs llvmlite

            rope = HostRoPE(nn.RoPE(self.config.head_dim, base=self.config.rope_theta))
            self.model.layers = [host_layer(layer, rope) for layer in self.model.layers]

    def new_rows(self, n: int = 1) -> ContextRows:
        return ContextRows([self.model.new_row() for _ in range(n)])

    def observe(self, rows: ContextRows, seen: Observation) -> None:
        """Features past `len(tokens[r])` are not read."""
        if seen.features is None:
            if any(seen.tokens):
                raise ValueError(f"the {self.name} drafter needs the features of what it observes")
            return
        grown = []
        for row, tokens, its in zip(rows.rows, seen.tokens, self._by_row(seen.features), strict=True):
            if not tokens:
                continue
            row.observe(its if len(tokens) == its.shape[0] else its[: len(tokens)])
            if row.depth - row.absorbed >= ABSORB_AT:
                grown.append(row)
        if grown:
            self.model.absorb(grown)
            mx.async_eval([array for row in grown for array in row.arrays()])

    def _by_row(self, features: mx.array) -> Sequence[mx.array]:
        """`[rows, width, taps * hidden]` as so many `[width, taps * hidden]`, by one call for all of them:
        slicing row by row takes longer than anything else of observing a large batch."""
        flat = features.astype(self.dtype).flatten(0, 1)
        return [flat] if features.shape[0] == 1 else list(mx.split(flat, features.shape[0]))

    def blind(self, rows: ContextRows, anchors: Sequence[int], asked: Collection[str]) -> bool:
        """Never: it can draft after any token."""
        return False

    def propose(self, rows: ContextRows, ask: Ask) -> Proposal:
        """One block for the rows with a cap; no synchronisation unless drafts are cut by confidence."""
        lengths = [min(cap, self.max_draft) for cap in ask.caps]
        active = [row for row, length in enumerate(lengths) if length > 0]
        rows.confidences = None
        if not active:
            tokens = mx.zeros((len(lengths), 0), dtype=mx.int32)
            return Proposal(tokens, (0,) * len(lengths), PointMass(tokens, self.config.vocab))
        for row in active:
            if rows.rows[row].depth != ask.positions[row]:
                raise ValueError(
                    f"row {row} is at {ask.positions[row]}, and {rows.rows[row].depth} tokens were seen"
                )
        width, draw = max(lengths), self._draw(ask, active)
        hidden = self._block([rows.rows[row] for row in active], [ask.anchors[row] for row in active], width)
        chain = self._chain(hidden, [ask.anchors[row] for row in active], width, draw)
        if chain.confidence_logits is not None:
            rows.confidences = mx.sigmoid(chain.confidence_logits.astype(mx.float32))
        thresholds = self._thresholds(ask, active)
        if any(thresholds) and rows.confidences is not None:
            for row, most in zip(active, _confident(rows.confidences, thresholds), strict=True):
                lengths[row] = min(lengths[row], most)
        width = max(lengths)
        tokens, q = chain.tokens[:, :width], draw.probs(chain.tokens)
        return proposal_of(self.name, tokens, q, lengths, active)

    def trace(self, rows: ContextRows, anchors: Sequence[int]) -> Trace:
        """A greedy block of full width for all rows, kept whole: for checks against reference values."""
        hidden = self._block(rows.rows, anchors, self.max_draft)
        return Trace(hidden, self._chain(hidden, anchors, self.max_draft, GreedyDraw(self.vocab)))

    @abstractmethod
    def embed_ids(self, tokens: mx.array) -> mx.array:
        """Embeddings of the block's ids, as the first drafter layer takes them."""

    @abstractmethod
    def _drafts(self, hidden: mx.array, anchors: mx.array, draw: Draw) -> Chain:
        """Drafts from the predicting slots' hidden states `[rows, width, hidden]`."""

    def _block(self, rows: Sequence[ContextRow], anchors: Sequence[int], drafts: int) -> mx.array:
        """Hidden states of the block. It is cut short only where no slot looks at a later one: under a
        bidirectional mask every slot counts, whether it is read or not."""
        ids = [[anchor] + [self.config.mask_token] * (self._slots(drafts) - 1) for anchor in anchors]
        embedded = self.embed_ids(mx.array(ids, dtype=mx.int32)).astype(self.dtype)
        if self._device is not None and self._device.takes(rows):
            return self._device(embedded, rows[0])
        self.model.absorb(rows)
        return self.model(embedded, rows)

    def _slots(self, drafts: int) -> int:
        """Slots of a block for so many drafts."""
        first, size = self.config.first_slot, self.config.block_size
        return min(size, first + drafts) if self.model.causal else size

    def _chain(self, hidden: mx.array, anchors: Sequence[int], width: int, draw: Draw) -> Chain:
        first = self.config.first_slot
        return self._drafts(hidden[:, first : first + width], mx.array(list(anchors), dtype=mx.int32), draw)

    def _draw(self, ask: Ask, active: Sequence[int]) -> Draw:
        return draw_of(self.vocab, ask, active)

    def _thresholds(self, ask: Ask, active: Sequence[int]) -> list[float]:
        if not self.confident:
            return [self.confidence_threshold] * len(active)
        asked = ask.thresholds.get(self.name)
        return [0.0 if asked is None else asked[row] for row in active]


def _confident(confidences: mx.array, thresholds: Sequence[float]) -> list[int]:
    """Per row the longest draft whose confidences' product reaches the threshold, at least one."""
    reached = mx.cumprod(confidences, axis=1) >= mx.array(list(thresholds))[:, None]
    return [max(1, sum(row)) for row in reached.tolist()]  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]


def check_fit(config: DrafterConfig, target: Target) -> None:
    """Raises DrafterMismatch naming the field, with both values, when they do not belong together."""
    spec = target.spec
    _same("hidden_size", config.hidden, spec.hidden)
    _same("vocab_size", config.vocab, spec.vocab)
    if config.target_layers is not None:
        _same("num_target_layers", config.target_layers, spec.layers)
    if config.taps[-1] >= spec.layers:
        _mismatch("target_layer_ids", f"reads layer {config.taps[-1]}", f"has layers 0 to {spec.layers - 1}")
    if config.mask_token >= spec.vocab:
        _mismatch("mask_token_id", f"is {config.mask_token}", f"embeds ids below {spec.vocab}")


def _same(field: str, drafter: int, target: int) -> None:
    if drafter != target:
        _mismatch(field, f"is {drafter}", f"has {target}")


def _mismatch(field: str, drafter: str, target: str) -> None:
    raise DrafterMismatch(
        f"The drafter's {field} {drafter}, and the target {target}.",
        "Choose the drafter that was made for this model, or run without one.",
        field=field,
    )
