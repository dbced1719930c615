"""What a drafter is trained for, and how well it does it.

Per slot, with p the target's distribution after the true tokens so far and q the drafter's:

    cross-entropy   -sum p log q over the draft vocabulary (soft), or -log q of the true token (hard)
    variation       ||p - q||_1, tokens outside the draft vocabulary counted with q = 0
    confidence      binary cross-entropy of the confidence against 1 - ||p - q||_1 / 2

1 - ||p - q||_1 / 2 is the probability that a sampled draft is accepted once those before it were. The terms
are weighted by exp(-slot / decay), since a slot is worth nothing unless all before it are accepted (DeepSpec
`modeling/dspark/loss.py` and `config/dspark/`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn


@dataclass(frozen=True)
class LossWeights:
    """The published weights of DSpark. `hard` takes the true token in place of the target's distribution."""

    cross_entropy: float = 0.1
    variation: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    hard: bool = False


class Slots(NamedTuple):
    """Float32 `[blocks, width]`: the three terms, the acceptance probability, greedy agreement (0 or 1)."""

    cross_entropy: mx.array
    variation: mx.array
    confidence: mx.array
    acceptance: mx.array
    agrees: mx.array


class Sums(NamedTuple):
    """Sums over blocks, which chunks and steps may add up.

    The terms are weighted scalars and `weight` the sum of their weights. Per slot `[width]`: `valid` slots
    with a true token, `accepted` the sum of acceptance probabilities, `reached` the sum of their products up
    to the slot, `chained` how often the greedy drafts agree up to the slot. `blocks` have a valid slot.
    """

    cross_entropy: mx.array
    variation: mx.array
    confidence: mx.array
    weight: mx.array
    valid: mx.array
    accepted: mx.array
    reached: mx.array
    chained: mx.array
    blocks: mx.array

    def plus(self, other: Sums) -> Sums:
        return Sums(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def loss(self, weights: LossWeights) -> mx.array:
        """The scalar that is minimised."""
        terms = (
            weights.cross_entropy * self.cross_entropy
            + weights.variation * self.variation
            + weights.confidence * self.confidence
        )
        return terms / mx.maximum(self.weight, 1e-6)


def slot_terms(
    logits: mx.array,
    confidence_logits: mx.array | None,
    target_logits: mx.array,
    true_tokens: mx.array,
    *,
    hard: bool = False,
) -> Slots:
    """`logits` `[blocks, width, draft_vocab]`, `target_logits` `[blocks, width, vocab]`, the rest
    `[blocks, width]`.

    The target's logits and the true tokens are in an order of the vocabulary that begins with the draft
    vocabulary. Gradients flow through `logits` and `confidence_logits` only.
    """
    logits, target_logits = logits.astype(mx.float32), mx.stop_gradient(target_logits.astype(mx.float32))
    drafted, reduced = logits.shape[-1], logits.shape[-1] < target_logits.shape[-1]
    p = mx.exp(target_logits[..., :drafted] - mx.logsumexp(target_logits, axis=-1, keepdims=True))
    log_q = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    outside = mx.maximum(1 - p.sum(axis=-1), 0) if reduced else 0.0
    variation = mx.abs(p - mx.exp(log_q)).sum(axis=-1) + outside
    acceptance = mx.stop_gradient(mx.clip(1 - 0.5 * variation, 0, 1))
    confidence = mx.zeros_like(acceptance)
    if confidence_logits is not None:
        confidence = nn.losses.binary_cross_entropy(
            confidence_logits.astype(mx.float32), acceptance, with_logits=True, reduction="none"
        )
    cross_entropy = _hard(log_q, true_tokens) if hard else -(p * log_q).sum(axis=-1)
    agrees = (mx.argmax(logits, axis=-1) == mx.argmax(target_logits, axis=-1)).astype(mx.float32)
    return Slots(cross_entropy, variation, confidence, acceptance, agrees)


def _hard(log_q: mx.array, true_tokens: mx.array) -> mx.array:
    """-log q of the true token, 0 where the draft vocabulary lacks it."""
    known = true_tokens < log_q.shape[-1]
    taken = mx.take_along_axis(log_q, mx.where(known, true_tokens, 0)[..., None], axis=-1)[..., 0]
    return mx.where(known, -taken, 0.0)


def summed(slots: Slots, valid: mx.array, decay: float) -> Sums:
    """`valid` `[blocks, width]` bool: slots with a true token, without a gap from the first on."""
    counted = valid.astype(mx.float32)
    weight = counted * mx.exp(-mx.arange(valid.shape[1]) / decay)
    return Sums(
        (slots.cross_entropy * weight).sum(),
        (slots.variation * weight).sum(),
        (slots.confidence * weight).sum(),
        weight.sum(),
        counted.sum(axis=0),
        (slots.acceptance * counted).sum(axis=0),
        mx.cumprod(slots.acceptance * counted, axis=1).sum(axis=0),
        mx.cumprod(slots.agrees * counted, axis=1).sum(axis=0),
        counted[:, 0].sum(),
    )
