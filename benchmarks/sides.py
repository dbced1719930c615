"""A target with the kernels that a load would use, whose own and MLX's modules can take turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlx_dspark.foundation.paths import default_cache_dir
from mlx_dspark.kernels.framework.offer import Offer, Wanted
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.load import target_of


class Sides:
    """The modules of a model before and after kernels were placed in it by `place`."""

    def __init__(self, model: nn.Module, place: Callable[[nn.Module], object]) -> None:
        before = dict(model.named_modules())
        place(model)
        after = dict(model.named_modules())
        changed = [name for name, module in after.items() if before[name] is not module]
        self._model = model
        self._stock = [(name, before[name]) for name in changed]
        self._ours = [(name, after[name]) for name in changed]
        self.replaced = len(changed)

    def use_stock(self) -> None:
        self._use(self._stock)

    def use_ours(self) -> None:
        self._use(self._ours)

    def _use(self, modules: list[tuple[str, nn.Module]]) -> None:
        """Parents are put before what they hold."""
        for name, module in sorted(modules, key=lambda pair: pair[0].count(".")):
            self._model.update_modules(tree_unflatten([(name, module)]))


def placed(
    model: nn.Module, config: dict[str, Any], wanted: Wanted, tell: Callable[[str], object]
) -> tuple[DenseTarget, Sides]:
    """A target of the model with kernels and attention put in as `targets.load.load_target` does it, told as
    it goes."""
    told: set[str] = set()

    def telling(words: str, part: float) -> None:
        line = f"{words} {part:4.0%}"
        if line not in told:
            told.add(line)
            tell(line)

    offer = Offer(wanted, default_cache_dir(), telling)
    sides = Sides(model, offer.place)
    target = target_of(model, config)
    target.kernels = offer.live
    if offer.wants_shapes:
        attention = offer.attention(target.attended(), target.spec.context)
        if attention is not None:
            target.attend_by(attention)
    return target, sides
