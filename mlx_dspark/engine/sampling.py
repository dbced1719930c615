"""Penalties and bias: what a request does to the target's logits before the sampler sees them.

Inside a draft run each slot is shaped by what the text would be there: the committed tokens and the drafts
before that slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_dspark.foundation.errors import RequestError
from mlx_dspark.foundation.request import SamplingParams
from mlx_dspark.nn.parting import Part
from mlx_dspark.nn.row_sampling import RowSampling


def check_sampling(sampling: SamplingParams, vocab: int) -> None:
    """Raises RequestError naming `logit_bias` when it biases a token that the vocabulary does not have."""
    beyond = [token for token in sampling.logit_bias if token >= vocab]
    if beyond:
        raise RequestError(
            f"logit_bias names token {max(beyond)}, and the model's vocabulary has {vocab} tokens.",
            f"Give token ids from 0 to {vocab - 1}.",
            field="logit_bias",
        )


@dataclass(frozen=True)
class RowHistory:
    """What the penalties of one row remember: `prompted` `[vocab]` bool, which tokens the prompt holds, and
    `counts` `[vocab]` int32, how often the output holds each. Never mutated."""

    prompted: mx.array
    counts: mx.array

    @classmethod
    def start(cls, prompt: Sequence[int], vocab: int) -> RowHistory:
        """The history before the first output token."""
        prompted = mx.zeros((vocab,), dtype=mx.bool_)
        prompted[mx.array(sorted(set(prompt)), dtype=mx.int32)] = True
        return cls(prompted, mx.zeros((vocab,), dtype=mx.int32))

    def extended(self, tokens: mx.array) -> RowHistory:
        """With `tokens` `[n]` added to the output; they may be lazy."""
        return RowHistory(self.prompted, self.counts.at[tokens].add(1))


def shape_logits(
    logits: mx.array,
    draft_tokens: mx.array,
    histories: Sequence[RowHistory | None],
    sampling: Sequence[SamplingParams],
) -> mx.array:
    """Repetition, presence and frequency penalties, then bias.

    `logits` `[rows, draft + 1, vocab]`; slot `i` sees its row's history and `draft_tokens[:, :i]` of
    `[rows, draft]`. Float32 when some row is shaped; otherwise `logits` as they came.

    The repetition penalty divides a positive logit of a seen token and multiplies a negative one (after
    Keskar et al. 2019, "CTRL"). Raises ValueError for a penalised row without a history.
    """
    settings = RowSampling.of(sampling)
    if settings.by_penalty is not None:
        unshaped = logits

        def shape(penalised: bool, part: Part) -> mx.array:
            of_kind = part.take(unshaped).astype(mx.float32)
            if not penalised:
                return of_kind
            remembered = [_history(histories[row], row) for row in part.rows]
            return _penalised(of_kind, part.take(draft_tokens), remembered, part.pick(settings))

        logits = settings.by_penalty.each(shape)
    return _biased(logits, settings)


def _history(history: RowHistory | None, row: int) -> RowHistory:
    if history is None:
        raise ValueError(f"row {row} has penalties and no history")
    return history


def _penalised(
    logits: mx.array,
    draft_tokens: mx.array,
    histories: Sequence[RowHistory],
    sampling: Sequence[SamplingParams],
) -> mx.array:
    shape = (len(histories), 1, logits.shape[-1])
    prompted = mx.concatenate([history.prompted for history in histories]).reshape(shape)
    counts = mx.concatenate([history.counts for history in histories]).reshape(shape)
    counts = counts + _draft_counts(draft_tokens, logits.shape[-1])

    def column(values: list[float]) -> mx.array:
        return mx.array(values, dtype=mx.float32)[:, None, None]

    repetition = column([row.repetition_penalty for row in sampling])
    presence = column([row.presence_penalty for row in sampling])
    frequency = column([row.frequency_penalty for row in sampling])
    repeated = mx.where(logits > 0, logits / repetition, logits * repetition)
    logits = mx.where(prompted | (counts > 0), repeated, logits)
    return logits - presence * (counts > 0) - frequency * counts


def _draft_counts(draft_tokens: mx.array, vocab: int) -> mx.array:
    """How often the drafts before each slot hold each token: `[rows, draft + 1, vocab]` int32."""
    rows, width = draft_tokens.shape
    added = mx.zeros((rows, width + 1, vocab), dtype=mx.int32)
    if width == 0:
        return added
    row, slot = mx.arange(rows)[:, None], mx.arange(1, width + 1)[None]
    return mx.cumsum(added.at[row, slot, draft_tokens].add(1), axis=1)


def _biased(logits: mx.array, settings: RowSampling) -> mx.array:
    if not settings.biases:
        return logits
    rows, tokens, values = zip(*settings.biases, strict=True)
    added = mx.array(values, dtype=mx.float32)[:, None]
    return logits.astype(mx.float32).at[mx.array(rows), :, mx.array(tokens)].add(added)
