"""Products of one x with several matrices, such as queries, keys and values of a layer, by one launch.

On a GPU the host takes as long to launch a product of a few rows as the device takes to compute it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.framework.plan import RowPlan


class Member(Protocol):
    """A module whose product goes by a plan."""

    @property
    def plan(self) -> RowPlan: ...

    def source(self) -> Source: ...


class Siblings:
    """Modules of one part of a model whose matrices are held alike. The first that is asked for an x
    multiplies for all that are asked for the same.

    Which these are is seen in the first forward. Where a result was not asked for after all, each module
    multiplies for itself from then on. Only the thread that calls the model calls this.
    """

    def __init__(self) -> None:
        self._runs: list[list[Member]] = []
        self._groups: dict[int, Sequence[Member]] | None = None
        self._x: mx.array | None = None
        self._made: dict[int, mx.array] = {}

    @property
    def known(self) -> bool:
        """Whether the first forward has been."""
        return self._groups is not None

    def product(self, member: Member, x: mx.array) -> mx.array | None:
        """[.., inputs] -> [.., outputs]; None where `member` multiplies for itself."""
        if self._groups is None:
            self._learn(member, x)
        if self._groups is None:
            return None
        if x is self._x and id(member) in self._made:
            made = self._made.pop(id(member))
            if not self._made:
                self._x = None
            return made
        group = self._groups.get(id(member))
        return self._multiply(group, x) if group is not None else None

    def drop(self) -> None:
        """Keep nothing that was made and not asked for."""
        self._made, self._x = {}, None

    def _learn(self, member: Member, x: mx.array) -> None:
        if any(member is each for run in self._runs for each in run):
            self._groups = {id(run[0]): run for run in self._runs if len(run) > 1}
            self._runs, self._x = [], None
        elif x is self._x:
            self._runs[-1].append(member)
        else:
            self._runs.append([member])
            self._x = x

    def _multiply(self, group: Sequence[Member], x: mx.array) -> mx.array | None:
        if self._made:
            self._groups, self._made, self._x = {}, {}, None
            return None
        if x.dtype != group[0].plan.dtype or not x.size:
            return None
        rows, sources = x.size // x.shape[-1], [member.source() for member in group]
        if all(member.plan.at(rows) is None for member in group):
            return None
        choices = [choice for member in group if (choice := member.plan.at_beside(rows)) is not None]
        kernel = choices[0].together if len(choices) == len(group) else None
        if kernel is None or len(group) > kernel.most_together:
            return None
        if any(choice.kernel is not kernel for choice in choices):
            return None
        largest = max(range(len(group)), key=lambda place: sources[place].outputs)
        own, *others = kernel.multiply_together(x, sources, choices[largest].geometry)
        self._x = x
        self._made = {id(member): made for member, made in zip(group[1:], others, strict=True)}
        return own
