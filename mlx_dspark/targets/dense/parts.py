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
_TABLES = ("embed_tokens", "embeddings", "wte", "tok_embeddings")
_HEADS = ("lm_head", "output", "embed_out")
_FOREIGN = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Parts:
    """`[rows, width]` ids go through `body` and `head` to the model's own logits; both None where the two
    do not compose to it. `raw_head` is the head as it is stored, `plain` whether it is all of `head`.
    `embed` gives what of ids `[...]` enters the first layer, `[..., hidden]`; None where places count."""

    body: Callable[..., mx.array] | None
    head: Head | None
    raw_head: Head | None
    plain: bool
    embed: Head | None


def text_model(model: nn.Module) -> nn.Module:
    """The language model within a wrapper that adds nothing to it for text, or `model` itself."""
    inner = getattr(model, "language_model", None)
    return inner if isinstance(inner, nn.Module) and hasattr(inner, "layers") else model


def find_parts(
    model: Any, probe: mx.array, logits: mx.array, entering: mx.array | None, hidden: int
) -> Parts:
    """The parts of `model`, which gives `logits` for `probe` while `entering` goes into its first layer."""
    body, raw = _first(model, _BODIES), _first(model, _HEADS)
    table = _first(body, _TABLES)
    raw = raw if raw is not None else getattr(table, "as_linear", None)
    embed = _embed(body, table, probe, entering)
    if body is None or raw is None:
        return Parts(None, None, raw, False, embed)
    leaving = body(probe, cache=None)
    if not isinstance(leaving, mx.array) or leaving.shape[-1] != hidden:
        return Parts(None, None, raw, False, embed)
    if mx.array_equal(raw(leaving), logits).item():
        return Parts(body, raw, raw, True, embed)
    head = _without_body(model, body)
    if _gives(head, leaving, logits):
        return Parts(body, head, raw, False, embed)
    return Parts(None, None, raw, False, embed)


def _first(owner: Any, names: tuple[str, ...]) -> Any:
    """The first of these attributes that is there."""
    return next((each for name in names if (each := getattr(owner, name, None)) is not None), None)


class _Leaving:
    """Stands where a model's body stands: what it is given is what leaves it."""

    def __init__(self, body: Any) -> None:
        self._body = body

    def __call__(self, hidden: mx.array, *_: Any, **__: Any) -> mx.array:
        return hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)


def _without_body(model: Any, body: Any) -> Head:
    """What `model` does after its body: its head, with the multiplier or soft cap that may follow."""
    shell = copy.copy(model)
    name = next(name for name in _BODIES if getattr(model, name, None) is body)
    setattr(shell, name, _Leaving(body))
    return shell


def _gives(part: Head, given: mx.array, expected: mx.array) -> bool:
    """Whether a part that was cut out of foreign code works at all, and gives what is expected."""
    try:
        return bool(mx.array_equal(part(given), expected).item())
    except _FOREIGN:
        return False


def _embed(body: Any, table: Any, probe: mx.array, entering: mx.array | None) -> Head | None:
    if table is None or entering is None:
        return None
    scale = _embed_scale(table, probe, entering)
    if scale is not None:
        return lambda tokens: _scaled(table(tokens), scale)
    if not isinstance(body, nn.Module) or "layers" not in body:
        return None
    shell: Any = copy.copy(body)
    shell.layers, shell.norm = [], nn.Identity()

    def embed(tokens: mx.array) -> mx.array:
        return shell(tokens.reshape(-1, 1)).reshape(*tokens.shape, -1)

    return embed if _gives(embed, probe, entering) else None


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
