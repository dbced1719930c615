"""Forwards of few tokens, recorded once for each shape and replayed.

On a GPU the host takes as long to walk through a model's code as the device takes to compute what it asks
for. A recording is that walk, done once by `mx.compile` with the places of the tokens as an input: keys and
values are whole buffers, of which attention is told how much is filled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from threading import Lock, get_ident
from typing import Any, NamedTuple, cast
from weakref import WeakMethod

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.contracts import Forward, Logits
from mlx_dspark.kernels.attention import attends_buffers, buffer_attention
from mlx_dspark.kernels.framework.plan import RowPlan
from mlx_dspark.state.base import Span
from mlx_dspark.state.kv import KVState
from mlx_dspark.state.rectangle import RectangleKV
from mlx_dspark.state.rows import RowStates, arranged

MOST_WIDTH = 16
"""More tokens of a row are a prompt's, of ever other numbers."""

MOST_ALONE = 4096
"""MLX's own attention reads more keys than these faster for the one query of a plain round."""

MOST_KEPT = 128
"""Recordings: the least recently used goes first."""

MOST_AWAY = 0.25
"""The largest difference of a logit that rounding may make, in standard deviations of all."""

_FIRST, _KEPT, _WIDTHS = 5, 3, (2, 1, 2)
"""Tokens of a first text, how many of them are kept, and those of the rounds that are compared."""

_FOREIGN = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

Run = Callable[[mx.array, list[Any], tuple[int, ...], Logits], Forward]
"""A method: a forward of tokens `[rows, width]` by the model's own code, on the caches of all layers."""

Recorded = Callable[[mx.array, "Places", list[mx.array], list[mx.array]], list[mx.array]]
"""Logits and features, those that were asked for, and then keys and values of all layers."""


class Unrecordable(Exception):
    """The model's code wants something of its states that differs from round to round."""


class Places(NamedTuple):
    """Where the tokens of a round are: int32, `offset` the first of each row as model code wants it, `at`
    `[rows, width]` all of them, `lengths` `[rows]` how many positions are filled then."""

    offset: mx.array
    at: mx.array
    lengths: mx.array

    @classmethod
    def of(cls, span: Span) -> Places:
        base, width = span.base, span.width
        return cls(
            mx.array(base[0] if len(base) == 1 else base, mx.int32),
            mx.array([list(range(each, each + width)) for each in base], mx.int32),
            mx.array([each + width for each in base], mx.int32),
        )


class Filling:
    """Keys and values of a layer while its forward is recorded, as mlx-lm's model code sees a cache."""

    def __init__(self, keys: mx.array, values: mx.array, places: Places, *, anyhow: bool) -> None:
        self._held = keys, values
        self._places = places
        self._anyhow = anyhow
        self.offset = places.offset

    @property
    def held(self) -> tuple[mx.array, mx.array]:
        """The buffers as they are now."""
        return self._held

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._held = self._written(self._held[0], keys), self._written(self._held[1], values)
        return self._held

    def _written(self, buffer: mx.array, new: mx.array) -> mx.array:
        if (new.dtype, new.shape[:2], new.shape[3:]) != (buffer.dtype, buffer.shape[:2], buffer.shape[3:]):
            raise Unrecordable("its keys or values are of another form than those held")
        at = mx.broadcast_to(self._places.at[:, None, :, None], new.shape)
        return mx.put_along_axis(buffer, at, new, axis=2)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self._held

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if return_array or window_size is not None:
            raise Unrecordable("it asks for masks as arrays")
        return None if N == 1 else "causal"

    def attention(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        if isinstance(mask, mx.array):
            raise Unrecordable("it makes masks of its own")
        if not self._anyhow and not attends_buffers(queries, keys, sinks):
            raise Unrecordable("no kernel attends to such buffers")
        return buffer_attention(queries, keys, values, scale, sinks, self._places.lengths)


class Weights:
    """The arrays of a model by their places, as they are at each forward. It is `whole` for as long as the
    model's tree is of the same modules, with the same arrays by name. Numbers that modules hold beside arrays
    are not looked at."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[Any] = [module for _, module in model.named_modules()]
        self._holders: list[Any] = list(self._modules)
        self._arrays: list[tuple[Any, str]] = []
        self._children: list[tuple[Any, Any, Any]] = []
        for module in self._modules:
            for name, value in module.items():
                if isinstance(value, mx.array):
                    self._arrays.append((module, name))
                else:
                    self._note(module, name, value)
        self._sizes = list(map(len, self._holders))

    def _note(self, owner: Any, name: Any, value: Any) -> None:
        if isinstance(value, mx.array):
            raise Unrecordable("it keeps arrays in lists")
        self._children.append((owner, name, value))
        if isinstance(value, nn.Module):
            return
        if isinstance(value, dict | list | tuple):
            self._holders.append(value)
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                self._note(value, key, each)

    @property
    def whole(self) -> bool:
        try:
            same = all(owner[name] is value for owner, name, value in self._children)
            return same and self._sizes == list(map(len, self._holders))
        except LookupError:
            return False

    def now(self) -> list[mx.array]:
        return [module[name] for module, name in self._arrays]

    def put(self, arrays: Sequence[mx.array]) -> None:
        for (module, name), array in zip(self._arrays, arrays, strict=True):
            dict.__setitem__(module, name, array)

    def forget(self) -> None:
        """Have modules keep nothing that they made of arrays which are gone."""
        for module in self._modules:
            if isinstance(vars(module).get("plan"), RowPlan):
                module.hold({})
            siblings = getattr(module, "siblings", None)
            if siblings is not None:
                siblings.drop()


class _Recording(NamedTuple):
    run: Recorded
    with_logits: bool
    with_features: bool


class Replays:
    """The recordings of one target. `anyhow` records where no kernel attends to buffers, too.

    A shape is recorded when it is asked for the second time. Before the first the model is recorded once to
    see that it computes the same: where it does not, or cannot be recorded, nothing is, and `why_not` says
    why. A shape that fails later is walked through from then on. While a forward is recorded the model holds
    arrays of the recording: one thread at a time may use it.
    """

    def __init__(self, model: nn.Module, *, anyhow: bool = False) -> None:
        self._model = model
        self._anyhow = anyhow
        self._weights: Weights | None = None
        self._known: OrderedDict[Any, _Recording | None] = OrderedDict()
        self._failed: set[Any] = set()
        self._checking = Lock()
        self._eager = False
        self._boards: list[dict[str, str]] = []
        self._switched = 0
        self._checked = False
        self.why_not = ""

    def forward(
        self,
        run: Run,
        new_rows: Callable[[], RowStates],
        tokens: mx.array,
        rows: RowStates,
        taps: tuple[int, ...],
        logits: Logits | mx.array,
    ) -> Forward | None:
        """A forward in the newest transaction of `rows`; None where the model's code is to be run."""
        if self.why_not or tokens.shape[1] > MOST_WIDTH or isinstance(logits, mx.array):
            return None
        buffers = _buffers(rows)
        if not buffers or (tokens.size == 1 and buffers[0].shape[2] > MOST_ALONE):
            return None
        if not self.work(run, new_rows):
            return None
        return self._forward(run, tokens, rows, taps, logits, buffers)

    def work(self, run: Run, new_rows: Callable[[], RowStates]) -> bool:
        """Whether forwards are replayed, found out when it is first asked."""
        with self._checking:
            if not self._checked:
                self._check(run, new_rows)
                self._checked = True
        return not self.why_not

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Record what is asked for the first time, too."""
        self._eager = True
        try:
            yield
        finally:
            self._eager = False

    def _forward(
        self,
        run: Run,
        tokens: mx.array,
        rows: RowStates,
        taps: tuple[int, ...],
        logits: Logits,
        buffers: list[mx.array],
        *,
        checking: bool = False,
    ) -> Forward | None:
        weights = self._held()
        if weights is None:
            return None
        key = get_ident(), tokens.shape, buffers[0].shape, taps, logits, rows.padded
        if key in self._failed:
            return None
        recording = self._known.get(key)
        if recording is None:
            if key not in self._known and not (checking or self._eager):
                self._keep(key, None)
                return None
            recording = self._record(run, rows, taps, logits)
            self._keep(key, recording)
        else:
            self._known.move_to_end(key)
        assert rows.newest is not None, "a forward needs an open transaction"
        try:
            made = recording.run(tokens, Places.of(rows.newest), buffers, weights)
        except (Unrecordable, *_FOREIGN):
            if checking:
                raise
            self._failed.add(key)
            self._known.pop(key)
            return None
        given = iter(made)
        out = next(given) if recording.with_logits else None
        features = next(given) if recording.with_features else None
        for layer in cast("list[KVState | RectangleKV]", rows.layers):
            layer.fill(next(given), next(given))
        return Forward(out, features)

    def _keep(self, key: Any, recording: _Recording | None) -> None:
        self._known[key] = recording
        self._known.move_to_end(key)
        while len(self._known) > MOST_KEPT:
            self._known.popitem(last=False)

    def _held(self) -> list[mx.array] | None:
        """The model's arrays; what was recorded of other modules or kernels is dropped."""
        try:
            if self._weights is None or self._switched != self._off() or not self._weights.whole:
                self._known.clear()
                self._failed.clear()
                self._weights = Weights(self._model)
                plans = [plan for module in self._model.modules() if (plan := vars(module).get("plan"))]
                self._boards = list({id(plan.board): plan.board.off for plan in plans}.values())
                self._switched = self._off()
            return self._weights.now()
        except Unrecordable as error:
            self._give_up(str(error))
        except LookupError:
            self._weights = None
        return None

    def _off(self) -> int:
        """How many kernels were switched off since they were placed."""
        return sum(map(len, self._boards))

    def _record(self, run: Run, rows: RowStates, taps: tuple[int, ...], logits: Logits) -> _Recording:
        weights, anyhow, groups = self._weights, self._anyhow, rows.groups
        assert weights is not None
        weakly = WeakMethod(run)

        def recorded(
            tokens: mx.array, places: Places, buffers: list[mx.array], arrays: list[mx.array]
        ) -> list[mx.array]:
            pairs = zip(buffers[::2], buffers[1::2], strict=True)
            layers = [Filling(*pair, Places(*places), anyhow=anyhow) for pair in pairs]
            kept, run = weights.now(), weakly()
            assert run is not None
            try:
                weights.put(arrays)
                forward = run(tokens, arranged(layers, groups), taps, logits)
            finally:
                weights.put(kept)
                weights.forget()
            asked = [each for each in forward if each is not None]
            return [*asked, *(array for layer in layers for array in layer.held)]

        return _Recording(mx.compile(recorded), logits is not Logits.NONE, bool(taps))

    def _give_up(self, why: str) -> None:
        self.why_not = why
        self._known.clear()
        self._weights = None

    # whether it is right --------------------------------------------------------------------------

    def _check(self, run: Run, new_rows: Callable[[], RowStates]) -> None:
        """A round and one after it, by the model's code and recorded; behind what is filled lies what would
        be seen. Rounding may differ; a wrong place, mask or buffer makes far more of a difference."""
        kinds = {type(layer) for layer in new_rows().layers}
        if kinds - {KVState, RectangleKV}:
            self._give_up("some of its layers keep other states than all keys and values")
            return
        try:
            wanted, got = (self._rounds(run, new_rows(), replayed=each) for each in (False, True))
        except (Unrecordable, *_FOREIGN) as error:
            self._give_up(f"its code cannot be recorded: {error}")
            return
        if self.why_not:
            return
        away = _away(*(np.array(each.astype(mx.float32)) for each in (got, wanted)))
        if not away <= MOST_AWAY:
            self._give_up(f"what was recorded of it is away by {away:.2g} of its logits' spread")

    def _rounds(self, run: Run, rows: RowStates, *, replayed: bool) -> mx.array:
        tokens = mx.array([[1 + 7 * place % 23 for place in range(_FIRST + sum(_WIDTHS))]])
        with rows.transaction(_FIRST) as transaction:
            mx.eval(run(tokens[:, :_FIRST], rows.cache, (), Logits.ALL).logits)
            transaction.commit([_KEPT])
        for layer in rows.layers:
            if isinstance(layer, KVState) and len(held := layer.buffers(0)) == 2:
                for which, array in enumerate(held):
                    rest = mx.full_like(array[..., _KEPT:, :], 8)
                    layer.put_buffer(0, which, mx.concatenate([array[..., :_KEPT, :], rest], axis=2))
        seen: list[mx.array] = []
        for turn, width in enumerate(_WIDTHS):
            begin = _FIRST + sum(_WIDTHS[:turn])
            part = tokens[:, begin : begin + width]
            with rows.transaction(width) as transaction:
                if replayed:
                    made = self._forward(run, part, rows, (), Logits.ALL, _buffers(rows), checking=True)
                    if made is None:
                        return mx.array(mx.nan)
                else:
                    made = run(part, rows.cache, (), Logits.ALL)
                assert made.logits is not None
                mx.eval(made.logits)
                seen.append(made.logits)
                transaction.commit([width])
        return mx.concatenate(seen, axis=1)


def _away(got: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """The largest difference of a logit in standard deviations of all; endless where others are none."""
    seen = np.isfinite(wanted)
    if not np.array_equal(seen, np.isfinite(got)):
        return inf
    return float(np.abs(got[seen] - wanted[seen]).max() / wanted[seen].std())


def _buffers(rows: RowStates) -> list[mx.array]:
    """Keys and values of all layers, one after the other, with room for the newest transaction; nothing where
    some layer is of another kind, or a row has nothing yet."""
    found: list[mx.array] = []
    for layer in rows.layers:
        if type(layer) is not KVState and type(layer) is not RectangleKV:
            return []
        held = layer.room()
        if len(held) != 2:
            return []
        found += held
    return found
