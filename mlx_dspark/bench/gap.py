"""What the target thinks of a token that two answers disagree about."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_dspark.bench.verdict import Gap
from mlx_dspark.contracts import Logits, Target
from mlx_dspark.state.rows import RowStates

PREFILL_CHUNK = 512
WIDEST, NARROWEST = 256, 8


def logit_gap(target: Target, tokens: Sequence[int], expected: int, got: int) -> Gap:
    """The gap between two candidates for the token after `tokens`, prompt and answer so far.

    The last tokens are read twice, in one forward and one by one as plain decoding reads them; `rounding` is
    how far apart the two say a logit is, at least the spacing of the logits' own type. All in logits.
    """
    tail = min(max(NARROWEST, len(tokens) // 2), WIDEST, len(tokens))
    head, rest = tokens[: len(tokens) - tail], tokens[len(tokens) - tail :]
    rows = target.new_rows()
    for start in range(0, len(head), PREFILL_CHUNK):
        _read(target, rows, head[start : start + PREFILL_CHUNK], Logits.NONE, keep=True)
    wide = _last(target, rows, rest, keep=False)
    for token in rest[:-1]:
        _read(target, rows, [token], Logits.NONE, keep=True)
    single = _last(target, rows, rest[-1:], keep=True)
    return _gap(_float32(single), _float32(wide), _spacing(single), expected, got)


def _gap(single: np.ndarray, wide: np.ndarray, spacing: float, expected: int, got: int) -> Gap:
    second, first = (int(i) for i in np.argsort(single)[-2:])
    return Gap(
        top=(first, second),
        top_gap=float(single[first] - single[second]),
        token_gap=float(single[expected] - single[got]),
        rounding=max(float(np.max(np.abs(single - wide))), spacing),
    )


def _last(target: Target, rows: RowStates, tokens: Sequence[int], *, keep: bool) -> mx.array:
    """Logits `[vocab]` after `tokens`."""
    logits = _read(target, rows, tokens, Logits.LAST, keep=keep)
    assert logits is not None
    return logits[0, -1]


def _read(
    target: Target, rows: RowStates, tokens: Sequence[int], logits: Logits, *, keep: bool
) -> mx.array | None:
    with rows.transaction(len(tokens)) as transaction:
        found = target.forward(mx.array([list(tokens)], dtype=mx.int32), rows, logits=logits).logits
        if found is not None:
            mx.eval(found)
        if keep:
            transaction.commit([len(tokens)])
            mx.eval(rows.arrays())
    return found


def _float32(logits: mx.array) -> np.ndarray:
    return np.array(logits.astype(mx.float32))


def _spacing(logits: mx.array) -> float:
    """The distance of neighbouring numbers of the logits' type at the highest of them."""
    return mx.finfo(logits.dtype).eps * float(np.max(np.abs(_float32(logits))))
