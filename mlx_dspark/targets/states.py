"""From mlx-lm's caches to our layer states: which cache of a model becomes which state.

A family adds a kind by an entry in KINDS, by the class of cache that mlx-lm makes for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_dspark.foundation.errors import UnsupportedModel
from mlx_dspark.kernels.attention import Attention, stock_attention
from mlx_dspark.state.base import LayerState
from mlx_dspark.state.chunked import ChunkedState
from mlx_dspark.state.kv import KVState
from mlx_dspark.state.layout import Forms, Layout
from mlx_dspark.state.quantized import QuantizedKVState, cannot_quantize, check_head_size
from mlx_dspark.state.recurrent import RecurrentState
from mlx_dspark.state.rows import RowStates
from mlx_dspark.state.window import WindowState
from mlx_dspark.targets.mixers import place_mixers, taped_mixers


@dataclass(frozen=True)
class Slot:
    """One cache of a model: `index` in the list that mlx-lm makes, which may be shorter than the layers.

    Lists of caches in that list count as what they hold.

    `kv_bits`: growing keys and values are to be quantized to so many; None leaves them as they are.
    """

    cache: Any
    index: int
    model: nn.Module
    config: dict[str, Any]
    kv_bits: int | None = None


Maker = Callable[[int, Attention], LayerState]
"""A state of so many empty rows, attended to in this way where it is attended to at all."""


def _nothing(model: nn.Module) -> None:
    del model


@dataclass(frozen=True)
class Kind:
    """What becomes of one class of mlx-lm's caches.

    `plan` looks at a slot, changes nothing and gives the maker of its states; it raises UnsupportedModel,
    naming the reason, where there is none. `place` makes a model's layers fit these states; it is called once
    for each model that has such a cache, after its weights are read.
    """

    plan: Callable[[Slot], Maker]
    place: Callable[[nn.Module], None] = _nothing


def _growing(slot: Slot) -> Maker:
    bits = slot.kv_bits
    if bits is None:
        return KVState
    if head_size := _head_size(slot.config):
        check_head_size(head_size)
    return lambda n, attention: QuantizedKVState(n, bits=bits)


def _head_size(config: dict[str, Any]) -> int | None:
    """The head size that a config tells, if it does."""
    if isinstance(size := config.get("head_dim"), int):
        return size
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None


def _window(slot: Slot) -> Maker:
    cache: RotatingKVCache = slot.cache
    if cache.keep:
        raise UnsupportedModel(
            f"Layer cache {slot.index} of this {slot.config.get('model_type')} model keeps its first "
            f"{cache.keep} tokens beside a window, which this version cannot take back.",
            "Choose another model.",
            field="model_type",
        )
    if slot.kv_bits is not None:
        raise cannot_quantize("it has sliding windows, whose states (RotatingKVCache) are held in full")
    return lambda n, attention: WindowState(n, attention, window=cache.max_size)


def _chunked(slot: Slot) -> Maker:
    if slot.kv_bits is not None:
        raise cannot_quantize("it attends within chunks, whose states (ChunkedKVCache) are held in full")
    return ChunkedState


def _recurrent(slot: Slot) -> Maker:
    caches, _ = _flat(make_prompt_cache(slot.model))
    if taped_mixers(slot.model) != sum(isinstance(cache, ArraysCache) for cache in caches):
        raise UnsupportedModel(
            f"This {slot.config.get('model_type')} model has recurrent layers of a kind that this version "
            "cannot take back.",
            "Choose another model.",
            field="model_type",
        )
    return lambda n, attention: RecurrentState(n, slots=len(slot.cache.cache))


KINDS: dict[type, Kind] = {
    KVCache: Kind(_growing),
    RotatingKVCache: Kind(_window),
    ChunkedKVCache: Kind(_chunked),
    ArraysCache: Kind(_recurrent, place_mixers),
}
"""By the exact class of the cache; what is not here is refused."""

UNEVEN = {
    "phi3small": "which keys a token sees in its block-sparse layers depends on the tokens fed beside it",
}
"""Models, by type, whose code does not give a text the same logits however it is cut into rounds, and why."""


def _flat(caches: list[Any]) -> tuple[list[Any], list[int | None]]:
    """The caches with lists of them opened, and how those are put together again: see RowStates."""
    flat: list[Any] = []
    groups: list[int | None] = []
    for cache in caches:
        inner = list(cache.caches) if type(cache) is CacheList else [cache]
        flat += inner
        groups.append(len(inner) if type(cache) is CacheList else None)
    return flat, groups


class StatePlan:
    """The states of a model, one for each of mlx-lm's caches, in their order; `groups` is as in RowStates."""

    def __init__(self, makers: list[Maker], kinds: list[Kind], groups: list[int | None]) -> None:
        self._groups = groups
        self._makers = makers
        self._kinds = kinds

    def place(self, model: nn.Module) -> None:
        """Make the layers of `model` fit their states."""
        for place in dict.fromkeys(kind.place for kind in self._kinds):
            place(model)

    def new_rows(
        self, n: int, attention: Attention, padded: Callable[[Sequence[int]], bool] = Layout.LIST.padded
    ) -> RowStates:
        """`n` empty rows. Growing keys and values lie in a rectangle where `padded`, which is first asked in
        the first round, says so of the depths of all rows; elsewhere `attention` is how they are attended to.
        """
        layers = [maker(n, attention) for maker in self._makers]
        if KVState not in self._makers:
            return RowStates(layers, n, groups=self._groups)
        forms = Forms(padded, attention, stock_attention)
        return RowStates(layers, n, groups=self._groups, forms=forms)


def state_plan(model: nn.Module, config: dict[str, Any], *, kv_bits: int | None = None) -> StatePlan:
    """The states for an mlx-lm model, which is only looked at; `config` is that of its text part.

    `kv_bits` holds growing keys and values in so many bits. Raises UnsupportedModel when a layer keeps
    something that cannot be taken back, or not in few bits.
    """
    if reason := UNEVEN.get(str(config.get("model_type"))):
        raise UnsupportedModel(
            f"This {config['model_type']} model cannot be run in rounds of any length: {reason}.",
            "Choose another model.",
            field="model_type",
        )
    caches, groups = _flat(make_prompt_cache(model))
    unknown = {type(cache).__name__ for cache in caches if type(cache) not in KINDS}
    if unknown:
        raise UnsupportedModel(
            f"This {config.get('model_type')} model has layers whose state ({', '.join(sorted(unknown))}) "
            "this version cannot take back.",
            "Choose another model.",
            field="model_type",
        )
    if kv_bits is not None and KVCache not in map(type, caches):
        raise cannot_quantize("no layer of it keeps all keys and values")
    slots = [Slot(cache, index, model, config, kv_bits) for index, cache in enumerate(caches)]
    kinds = [KINDS[type(slot.cache)] for slot in slots]
    return StatePlan([kind.plan(slot) for kind, slot in zip(kinds, slots, strict=True)], kinds, groups)
