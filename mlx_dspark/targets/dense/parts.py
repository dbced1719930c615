"""Finding a model's embedding, body and vocabulary head, checked on real numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

Head = Callable[[mx.array], mx.array]

_BODIES = ("model", "backbone", "transformer")
_TABLES = ("embed_tokens", "embeddings", "embedding", "embed", "wte", "tok_embeddings", "word_embeddings")
_HEADS = ("lm_head", "output", "embed_out")
_WRAPPED = "language_model"
_FOREIGN = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Parts:
    """`[rows, width]` ids go through `body` and `head` to the model's own logits; both None where the two
    do not compose to it. `raw_head` is the head as it is stored, `plain` whether it is all of `head`.
    `embed` gives the embedding rows of ids `[...]` as drafters borrow them, `[..., hidden]`; None where what
    enters the first layer depends on places."""

    body: Callable[..., mx.array] | None
    head: Head | None
    raw_head: Head | None
    plain: bool
    embed: Head | None


def text_model(model: nn.Module) -> nn.Module:
    """The language model within a wrapper that adds nothing to it for text, or `model` itself."""
    inner = getattr(model, "language_model", None)
    return inner if isinstance(inner, nn.Module) and hasattr(inner, "layers") else model


def body_of(model: Any) -> Any:
    """What turns ids into what enters the vocabulary head, or None."""
    return _first(_holder(model), _BODIES)


def find_parts(
    model: Any, probe: mx.array, logits: mx.array, entering: mx.array | None, hidden: int
) -> Parts:
    """The parts of `model`, which gives `logits` for `probe` while `entering` goes into its first layer."""
    model = _holder(model)
    body = _first(model, _BODIES)
    table = _either(_first(body, _TABLES), _first(model, _TABLES))
    raw = _either(_first(model, _HEADS), getattr(table, "as_linear", None))
    embed = _embed(body, table, probe, entering)
    whole = Parts(None, None, raw, False, embed)
    leaving = _output(body, probe) if body is not None else None
    if raw is None or leaving is None or leaving.shape != (*probe.shape, hidden):
        return whole
    if _gives(raw, leaving, logits):
        return Parts(body, raw, raw, True, embed)
    head = _without_body(model, body)
    if head is not None and _gives(head, leaving, logits):
        return Parts(body, head, raw, False, embed)
    return whole


def _holder(model: Any) -> Any:
    """The module, `model` or one within it, that has the body and the head as its own attributes."""
    for each in (model, getattr(model, _WRAPPED, None), getattr(_first(model, _BODIES), _WRAPPED, None)):
        if isinstance(each, nn.Module) and _first(_first(each, _BODIES), _TABLES) is not None:
            return each
    return model


def _output(body: Any, probe: mx.array) -> mx.array | None:
    """What a body gives for ids, where it takes them alone and gives an array."""
    try:
        out = body(probe, cache=None)
    except _FOREIGN:
        return None
    return out if isinstance(out, mx.array) else None


def _first(owner: Any, names: tuple[str, ...]) -> Any:
    """The first of these attributes that is there and can be called."""
    return next((each for name in names if callable(each := getattr(owner, name, None))), None)


def _either(first: Any, second: Any) -> Any:
    """A module without parameters is an empty dict: what is there is told by None alone."""
    return second if first is None else first


class _Leaving:
    """Stands where a model's body stands: what it is given is what leaves it."""

    def __init__(self, body: Any) -> None:
        self._body = body

    def __call__(self, hidden: mx.array, *_: Any, **__: Any) -> mx.array:
        return hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)


def _without_body(model: Any, body: Any) -> Head | None:
    """What `model` does after its body: its head, with the multiplier or soft cap that may follow. None where
    the body cannot be taken out."""
    shell = copy.copy(model)
    name = next(name for name in _BODIES if getattr(model, name, None) is body)
    try:
        setattr(shell, name, _Leaving(body))
    except AttributeError:
        return None
    return shell


def _gives(part: Head, given: mx.array, expected: mx.array) -> bool:
    """Whether a part that was cut out of foreign code works at all, and gives what is expected."""
    try:
        return bool(mx.array_equal(part(given), expected).item())
    except _FOREIGN:
        return False


def _embed(body: Any, table: Any, probe: mx.array, entering: mx.array | None) -> Head | None:
    """The table with the model's own scale. What else the model does to a row, such as a norm, is its own:
    drafters are trained on the rows as they are stored."""
    if table is None or entering is None:
        return None
    scale = _embed_scale(table, probe, entering)
    if scale is not None:
        return lambda tokens: _scaled(table(tokens), scale)
    if not isinstance(body, nn.Module) or "layers" not in body:
        return None
    shell: Any = copy.copy(body)
    shell.layers, shell.norm = [], nn.Identity()

    def entered(tokens: mx.array) -> mx.array:
        return shell(tokens.reshape(-1, 1)).reshape(*tokens.shape, -1)

    return table if _gives(entered, probe, entering) else None


def _scaled(rows: mx.array, scale: float) -> mx.array:
    return rows if scale == 1.0 else rows * mx.array(scale, rows.dtype)


def _embed_scale(table: Any, probe: mx.array, entering: mx.array) -> float | None:
    """What the model multiplies its embedding rows with, or None when it does something else to them."""
    rows = table(probe)
    if rows.shape != entering.shape:
        return None
    wide, seen = rows.astype(mx.float32), entering.astype(mx.float32)
    size = cast(float, mx.abs(wide).sum().item())
    if size == 0.0 or mx.array_equal(rows, entering).item():
        return 1.0 if mx.array_equal(rows, entering).item() else None
    ratio = cast(float, mx.abs(seen).sum().item()) / size
    root = rows.shape[-1] ** 0.5
    short = cast(float, mx.array(root, mx.bfloat16).astype(mx.float32).item())
    for scale in (root, short, float(f"{ratio:.5g}"), ratio):
        if mx.array_equal(rows * mx.array(scale, rows.dtype), entering).item():
            return scale
    return ratio if mx.allclose(wide * ratio, seen, rtol=1e-2).item() else None
