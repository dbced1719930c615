"""The accept rule: how many drafts of each row stand, and which token follows them.

Whatever was proposed, the committed tokens are distributed as the plain sampler's. Rows with a real q and no
seed use rejection sampling; all others accept a draft exactly when it is the token that the plain sampler
draws there. The reasons stand in `docs/decisions/004-accept-rule.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_dspark.engine.sampling import RowHistory, shape_logits
from mlx_dspark.foundation.request import SamplingParams
from mlx_dspark.nn.noise import RowNoise
from mlx_dspark.nn.parting import Part, Parting
from mlx_dspark.nn.probs import DraftProbs
from mlx_dspark.nn.row_sampling import RowSampling
from mlx_dspark.nn.sampling import distribution, draw

_NO_RESIDUAL = 1e-8
"""Below this mass of max(p - q, 0), p and q are equal up to rounding and p is drawn from instead."""


class Acceptance(NamedTuple):
    """A round's verdict, not yet evaluated.

    `accepted` `[rows]` int32 counts the drafts that stand; `next` `[rows]` int32 is the token after them.
    `logprobs` `[rows, draft + 1]` is that of each committed token, the drafts and then `next`. `top` holds
    ids (int32) and log-probabilities of the most likely tokens, `[rows, draft + 1, n]`, likeliest first, for
    the largest `n` asked. Slots past `accepted` mean nothing. Both are None when no row asked; both are the
    log-softmax in float32 of the logits after penalties and bias, before temperature and filters.
    """

    accepted: mx.array
    next: mx.array
    logprobs: mx.array | None
    top: tuple[mx.array, mx.array] | None


def accept(
    logits: mx.array,
    drafts: mx.array,
    lengths: tuple[int, ...],
    q: DraftProbs | None,
    sampling: Sequence[SamplingParams],
    histories: Sequence[RowHistory | None],
    noise: RowNoise,
    positions: mx.array,
) -> Acceptance:
    """Judge a round, in the graph.

    `logits` `[rows, draft + 1, vocab]`, slot `i` after `i` drafts; `drafts` `[rows, draft]`, of which
    `lengths[r]` count (padding is any valid id); `q` what they were drawn from, None for a point mass;
    `positions` `[rows]` the absolute position of slot 0's token. No drafts at all is plain sampling.
    """
    settings = RowSampling.of(sampling)
    logits = shape_logits(logits, drafts, histories, settings)
    if not drafts.shape[1] and settings.just_greedy:
        following = mx.argmax(logits[:, 0], axis=-1).astype(mx.int32)
        return Acceptance(mx.zeros_like(following), following, None, None)
    limits = mx.array(lengths, dtype=mx.int32)
    slots = positions[:, None] + mx.arange(drafts.shape[1] + 1)
    if q is None:
        verdict = _coupling(logits, drafts, limits, settings, noise, slots)
    else:
        proposed = q

        def judge(rejecting: bool, part: Part) -> mx.array:
            of_kind = (part.take(logits), part.take(drafts), part.take(limits))
            drawing = (settings.of_part(part), noise.select(part.rows), part.take(slots))
            if rejecting:
                return _rejection(*of_kind, proposed.select(part.rows), *drawing)
            return _coupling(*of_kind, *drawing)

        rejects = [
            length > 0 and not (row.greedy or seeded or q.point(index))
            for index, (row, seeded, length) in enumerate(zip(settings, noise.seeded, lengths, strict=True))
        ]
        verdict = Parting(rejects).each(judge)
    accepted, following = mx.split(verdict, 2, axis=1)
    logprobs, top = _report(logits, drafts, accepted, following, settings)
    return Acceptance(accepted[:, 0], following[:, 0], logprobs, top)


def _coupling(
    logits: mx.array,
    drafts: mx.array,
    limits: mx.array,
    sampling: Sequence[SamplingParams],
    noise: RowNoise,
    slots: mx.array,
) -> mx.array:
    """Accept the drafts that are the plain sampler's own tokens. `[rows, 2]`: accepted, next."""
    own = draw(logits, sampling, noise, slots)
    accepted = _prefix(own[:, :-1] == drafts, limits)
    return mx.concatenate([accepted, mx.take_along_axis(own, accepted, axis=1)], axis=1)


def _rejection(
    logits: mx.array,
    drafts: mx.array,
    limits: mx.array,
    q: DraftProbs,
    sampling: Sequence[SamplingParams],
    noise: RowNoise,
    slots: mx.array,
) -> mx.array:
    """Leviathan, Kalman & Matias 2023; Chen et al. 2023. `[rows, 2]`: accepted, next."""
    p = distribution(logits, sampling)
    p_draft = mx.take_along_axis(p[:, :-1], drafts[..., None], axis=-1)[..., 0]
    accepted = _prefix(noise.uniform(slots[:, :-1]) * q.of_tokens(drafts) < p_draft, limits)
    following = residual(
        mx.take_along_axis(p, accepted[..., None], axis=1)[:, 0],
        mx.where(accepted < limits[:, None], q.at(accepted[:, 0]), 0.0),
    )
    gumbel = noise.gumbel(mx.take_along_axis(slots, accepted, axis=1), p.shape[-1])[:, 0]
    token = mx.argmax(mx.log(following) + gumbel, axis=-1, keepdims=True)
    return mx.concatenate([accepted, token.astype(mx.int32)], axis=1)


def residual(p: mx.array, q: mx.array) -> mx.array:
    """What is left to draw from after a draft of `q` was refused: `[..., vocab]`, normalised.

    A `q` that is not a number refuses every draft, and leaves `p`.
    """
    left = mx.maximum(p - q, 0.0)
    mass = mx.sum(left, axis=-1, keepdims=True)
    return mx.where(mass > _NO_RESIDUAL, left / mass, p)


def _prefix(stands: mx.array, limits: mx.array) -> mx.array:
    """How many drafts stand before the first that does not: `[rows, draft]` bool to `[rows, 1]` int32."""
    rows, width = stands.shape
    if width == 0:
        return mx.zeros((rows, 1), dtype=mx.int32)
    stands = stands & (mx.arange(width) < limits[:, None])
    return mx.sum(mx.cumprod(stands.astype(mx.int32), axis=1), axis=1, keepdims=True).astype(mx.int32)


def _report(
    logits: mx.array,
    drafts: mx.array,
    accepted: mx.array,
    following: mx.array,
    settings: RowSampling,
) -> tuple[mx.array | None, tuple[mx.array, mx.array] | None]:
    """Log-probabilities of the committed tokens and of the likeliest ones, for the rows that asked."""
    asked = settings.most_logprobs
    if asked is None:
        return None, None
    logits = logits.astype(mx.float32)
    normaliser = mx.logsumexp(logits, axis=-1, keepdims=True)
    padded = mx.concatenate([drafts.astype(mx.int32), following], axis=1)
    committed = mx.where(mx.arange(padded.shape[1]) < accepted, padded, following)[..., None]
    logprobs = (mx.take_along_axis(logits, committed, axis=-1) - normaliser)[..., 0]
    count = min(asked, logits.shape[-1])
    if count == 0:
        return logprobs, None
    ids = mx.argpartition(-logits, count - 1, axis=-1)[..., :count]
    values = mx.take_along_axis(logits, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)
    ranked = mx.take_along_axis(values, order, axis=-1) - normaliser
    return logprobs, (mx.take_along_axis(ids, order, axis=-1).astype(mx.int32), ranked)
