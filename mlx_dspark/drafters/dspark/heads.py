"""DSpark's small heads: the Markov bias, which makes slots depend on the draft before, and the confidence.

Three Markov heads as in DeepSpec `modeling/dspark/markov_head.py`. All look up the previous token in a table
of rank `r` and project to the draft vocabulary; they differ in what happens between.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn


class MarkovHead(nn.Module):
    """Vanilla: `W2 W1[previous]`, whatever the slot holds."""

    def __init__(self, vocab: int, draft_vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab, bias=False)

    def step(
        self, previous: mx.array, hidden: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """Bias `[rows, draft_vocab]` for one slot, and the state for the next slot (None at the first).

        `previous` `[rows, rank]` is the embedded token before; `hidden` `[rows, hidden]` the slot.
        """
        return self.markov_w2(previous), state


class GatedMarkovHead(MarkovHead):
    """The slot decides, per rank, how much of the previous token counts."""

    def __init__(self, vocab: int, draft_vocab: int, rank: int, hidden: int) -> None:
        super().__init__(vocab, draft_vocab, rank)
        self.gate_proj = nn.Linear(hidden + rank, rank)

    def step(
        self, previous: mx.array, hidden: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        gate = mx.sigmoid(self.gate_proj(mx.concatenate([hidden, previous], axis=-1)))
        return self.markov_w2(gate * previous), state


class RecurrentMarkovHead(MarkovHead):
    """A gated recurrence along the block; its state starts at zero in every block."""

    def __init__(self, vocab: int, draft_vocab: int, rank: int, hidden: int) -> None:
        super().__init__(vocab, draft_vocab, rank)
        self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def step(
        self, previous: mx.array, hidden: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        state = mx.zeros_like(previous) if state is None else state
        joint = self.joint_proj(mx.concatenate([state, previous, hidden], axis=-1))
        gate, candidate, output = mx.split(joint, 3, axis=-1)
        gate = mx.sigmoid(gate)
        return self.markov_w2(mx.tanh(output)), gate * state + (1 - gate) * mx.tanh(candidate)


def markov_head(kind: str, vocab: int, draft_vocab: int, rank: int, hidden: int) -> MarkovHead | None:
    """The head of a config's `markov_head_type`; None for `none`."""
    if kind == "none":
        return None
    if kind == "gated":
        return GatedMarkovHead(vocab, draft_vocab, rank, hidden)
    if kind == "rnn":
        return RecurrentMarkovHead(vocab, draft_vocab, rank, hidden)
    return MarkovHead(vocab, draft_vocab, rank)


class ConfidenceHead(nn.Module):
    """The probability that a draft is accepted if those before it were, as a logit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def __call__(self, *parts: mx.array) -> mx.array:
        """`[rows, width, n]` parts, joined, to logits `[rows, width]`."""
        return self.proj(mx.concatenate(list(parts), axis=-1))[..., 0]
