"""Three questions to a target, answered by some twenty tokens: taps, rows, and taking drafts back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_dspark.foundation.errors import DsparkError
from mlx_dspark.state.rows import RowStates
from mlx_dspark.targets.dense.target import DenseTarget

VERSION = 1
"""Counts the changes of what is asked: an answer to other questions is none."""

_FOREIGN = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_BEGUN, _KEPT, _WIDTH, _NEXT = 4, 3, 5, 2
_TEXT = _BEGUN + _WIDTH + _NEXT


@dataclass(frozen=True)
class Faithfulness:
    """Why a model cannot be trusted with something, in a few words; empty where it can.

    taps    features for a drafter, and the model's own logits beside them
    replay  taking back a part of a round
    rows    several texts at once
    """

    taps: str = ""
    replay: str = ""
    rows: str = ""

    @property
    def bad(self) -> bool:
        """Whether there is something that it cannot be trusted with."""
        return bool(self.taps or self.replay or self.rows)


def faithfulness(target: DenseTarget, taps: tuple[int, ...], *, rows: bool = True) -> Faithfulness:
    """Ask `target`, whose drafter reads `taps`, () being the logits alone; `rows` asks of several texts.
    Forwards that are replayed later are replayed here."""
    with target.replays.at_once() if target.replays is not None else nullcontext():
        return Faithfulness(
            taps=_answer(lambda: _tapped_equals_own(target, taps)),
            replay=_answer(lambda: _replayed_equals_stepped(target)),
            rows=_answer(lambda: _rows_equal_single_rows(target)) if rows else "",
        )


def _answer(question: Callable[[], str]) -> str:
    """What is wrong; a question that the model's code cannot take is one."""
    try:
        return question()
    except DsparkError as error:
        return error.sentence.rstrip(".")
    except _FOREIGN as error:
        detail = str(error).partition("\n")[0].rstrip(". ")
        return f"its code fails ({type(error).__name__}{': ' if detail else ''}{detail})"


def _tapped_equals_own(target: DenseTarget, taps: tuple[int, ...]) -> str:
    tokens = _tokens(target, 2)[:1]
    rows = target.new_rows()
    with rows.transaction(_TEXT):
        out = target.forward(tokens, rows, taps=taps)
    assert out.logits is not None
    if not _alike(target, out.logits, target.own_logits(tokens)):
        return "its logits are not those of the model's own code"
    if out.features is None:
        return ""
    if out.features.shape != (1, _TEXT, len(taps) * target.spec.hidden):
        return f"its layers give {out.features.shape[-1]} numbers a token"
    return "" if mx.all(mx.isfinite(out.features)).item() else "what its layers give is not finite"


def _replayed_equals_stepped(target: DenseTarget) -> str:
    """A round that is taken back whole and one that is cut, and the text token by token, each against the
    model's own code on the text."""
    text = _tokens(target, 2)[:1]
    replayed, stepped = target.new_rows(), target.new_rows()
    _feed(target, replayed, _tokens(target, 2)[1:, :_BEGUN], [0])
    for rows in (replayed, stepped):
        _feed(target, rows, text[:, :_BEGUN], [_BEGUN])
    _feed(target, replayed, text[:, _BEGUN : _BEGUN + _WIDTH], [_KEPT])
    for at in range(_BEGUN, _BEGUN + _KEPT):
        _feed(target, stepped, text[:, at : at + 1], [1])
    last = text[:, -_NEXT:]
    own = target.own_logits(mx.concatenate([text[:, : _BEGUN + _KEPT], last], axis=1))[:, -_NEXT:]
    if not _alike(target, _feed(target, stepped, last, [0]), own):
        return "what it remembers of a text fed token by token is not what its own code remembers"
    if not _alike(target, _feed(target, replayed, last, [0]), own):
        return "what it remembers after a rejected draft is not what it would remember without"
    return ""


def _rows_equal_single_rows(target: DenseTarget) -> str:
    texts = _tokens(target, 2)
    keep = [_KEPT, 1]
    together = _ragged(target, target.new_rows(2), texts, keep)
    alone = [_ragged(target, target.new_rows(), texts[r : r + 1], keep[r : r + 1]) for r in range(2)]
    same = all(_alike(target, together[r : r + 1], each) for r, each in enumerate(alone))
    return "" if same else "a text beside another gets other logits than alone"


def _ragged(target: DenseTarget, rows: RowStates, texts: mx.array, keep: Sequence[int]) -> mx.array:
    """The logits of a round after one of which each row kept another number."""
    _feed(target, rows, texts[:, :_BEGUN], [_BEGUN] * len(rows))
    _feed(target, rows, texts[:, _BEGUN : _BEGUN + _WIDTH], keep)
    return _feed(target, rows, texts[:, -_NEXT:], [0] * len(rows))


def _feed(target: DenseTarget, rows: RowStates, tokens: mx.array, keep: Sequence[int]) -> mx.array:
    with rows.transaction(tokens.shape[1]) as transaction:
        logits = target.forward(tokens, rows).logits
        assert logits is not None
        mx.eval(logits)
        transaction.commit(keep)
    return logits


def _tokens(target: DenseTarget, n: int) -> mx.array:
    """`[n, _TEXT]` ids from all over the vocabulary."""
    vocab = target.spec.vocab
    return ((mx.arange(n * _TEXT) + 1) * (vocab // 29 + 1) % vocab).reshape(n, _TEXT)


def _alike(target: DenseTarget, a: mx.array, b: mx.array) -> bool:
    """Whether two logits differ by no more than rounding of the model's numbers, on average.

    NaN is unlike everything; minus infinity, which rules a token out, must stand in the same places. Compared
    in NumPy, since a GPU would first compile a kernel for each step.
    """
    got, wanted = (np.array(each.astype(mx.float32)) for each in (a, b))
    counts = ~np.isneginf(wanted)
    if not np.array_equal(~np.isneginf(got), counts) or np.isnan(got).any() or np.isnan(wanted).any():
        return False
    floor = np.finfo(np.float32).min
    x, y = (np.where(counts, np.maximum(each, floor), 0.0) for each in (got, wanted))
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.abs(x - y).mean() <= y.std() * _tolerance(target))


def _tolerance(target: DenseTarget) -> float:
    """A few roundings of the coarsest numbers that the model is made of, and of long sums in float32; with
    quantized keys and values a step of theirs, which the smallest rounding before it can tip."""
    weights: Any = tree_flatten(target.model.parameters())
    kinds = {weight.dtype for _, weight in weights if mx.issubdtype(weight.dtype, mx.floating)}
    return max([1e-3, *(8 * mx.finfo(kind).eps for kind in kinds), *(2.0**-bits for bits in target.kv_bits)])
