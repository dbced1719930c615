"""Whether a model's code computes several rows at once as it computes each alone."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from mlx_dspark.state.rows import RowStates

Run = Callable[[mx.array, RowStates], mx.array]
"""Logits `[rows, width, vocab]` of tokens `[rows, width]`, fed in an open transaction."""

_FOREIGN = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_BEGUN, _NEXT = (3, 1), 3


def rows_run_together(run: Run, new_rows: Callable[[int], RowStates], vocab: int) -> bool:
    """Two rows of different depth against each of them alone, on real numbers.

    Rounding may differ; a row that gets the positions, keys or mask of another differs by far more.
    """
    tokens = (mx.arange(2 * (_BEGUN[0] + _NEXT)) * (vocab // 13 + 1) % vocab).reshape(2, -1)
    try:
        together = _logits(run, new_rows(2), tokens, list(_BEGUN))
    except _FOREIGN:
        return False
    alone = [_logits(run, new_rows(1), tokens[r : r + 1], [kept]) for r, kept in enumerate(_BEGUN)]
    expected = mx.concatenate(alone).astype(mx.float32)
    apart = mx.abs(together.astype(mx.float32) - expected).max()
    return bool((apart <= mx.std(expected) / 2).item())


def _logits(run: Run, rows: RowStates, tokens: mx.array, kept: list[int]) -> mx.array:
    """Of a round that comes after one of which `kept` positions are kept."""
    with rows.transaction(_BEGUN[0]) as transaction:
        mx.eval(run(tokens[:, : _BEGUN[0]], rows))
        transaction.commit(kept)
    with rows.transaction(_NEXT):
        logits = run(tokens[:, _BEGUN[0] :], rows)
        mx.eval(logits)
    return logits
