"""The modules and the attention that stand in a model on a GPU, where kernels of ours were admitted.

They hold what the modules they replace held, under the same names, and compute what these compute for every
number of rows that no kernel serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlx_dspark.kernels.attention import Attention, stock_attention
from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.framework.plan import QueryPlan, RowPlan
from mlx_dspark.kernels.recast import recast
from mlx_dspark.kernels.together import Siblings
from mlx_dspark.kernels.traced import traceable, traced


class _Planned(nn.Module):
    """What the modules share: the source, read anew when the weights have been replaced, and the plan."""

    plan: RowPlan
    _source: Source | None = None

    def source(self) -> Source:
        """The matrix as the kernels take it."""
        known = self._source
        if (
            known is None
            or known.weight is not self["weight"]
            or known.scales is not self["scales"]
            or known.biases is not self.get("biases")
        ):
            known = self._source = source_of(self)
            assert known is not None
        return known

    def hold(self, arrays: Mapping[str, mx.array]) -> None:
        """Hold these in the place of those of the same names; nothing else keeps what was held."""
        dict.update(self, arrays)
        self._source = None

    def product(self, x: mx.array) -> mx.array | None:
        """[..., inputs] -> [..., outputs] by a kernel; None where none serves so many rows."""
        choice = self.plan.at(x.size // x.shape[-1]) if x.dtype == self.plan.dtype and x.size else None
        if choice is None:
            return None
        return choice.kernel.multiply(x, self.source(), choice.geometry)


class KernelLinear(_Planned, nn.QuantizedLinear):
    """`nn.QuantizedLinear`: [..., inputs] -> [..., outputs]."""

    same_matrix = True
    siblings: Siblings | None = None

    def __call__(self, x: mx.array) -> mx.array:
        together = self.siblings.product(self, x) if self.siblings is not None else None
        out = self.product(x) if together is None else together
        if out is None:
            return super().__call__(x)
        return out + self["bias"] if "bias" in self else out


class KernelEmbedding(_Planned, nn.QuantizedEmbedding):
    """`nn.QuantizedEmbedding`, whose use as a vocabulary head a kernel may serve."""

    same_matrix = True

    def as_linear(self, x: mx.array) -> mx.array:
        """[..., dims] -> [..., vocab], the tied head."""
        out = self.product(x)
        return super().as_linear(x) if out is None else out


class KernelSwitchLinear(_Planned, QuantizedSwitchLinear):
    """mlx-lm's `QuantizedSwitchLinear`: rows sorted by their expert may be served by a kernel."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        fits = sorted_indices and indices.ndim == 1 and x.ndim == 3 and x.shape[1] == 1
        choice = self.plan.at(indices.size) if fits and x.dtype == self.plan.dtype else None
        experts = choice.experts if choice is not None else None
        if choice is None or experts is None:
            return super().__call__(x, indices, sorted_indices)
        out = experts.gather(x, self.source(), indices, choice.geometry)
        return out + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else out


_FORMS: Mapping[type[nn.Module], type[nn.Module]] = {
    nn.QuantizedLinear: KernelLinear,
    nn.QuantizedEmbedding: KernelEmbedding,
    QuantizedSwitchLinear: KernelSwitchLinear,
}


def source_of(module: nn.Module) -> Source | None:
    """The codes of a module whose product kernels may compute, those of experts with a first axis more; None
    for every other module."""
    if not isinstance(module, QuantizedSwitchLinear):
        found = Source.of(module)
        return found if found is not None and found.bits else None
    if type(module) not in (QuantizedSwitchLinear, KernelSwitchLinear) or module.get("biases") is None:
        return None
    weight, held = module["weight"], (module["scales"], module["biases"])
    inputs = weight.shape[2] * 32 // module.bits
    return Source(weight.shape[1], inputs, weight, *held, module.bits, module.group_size, module.mode)


def planned(module: nn.Module, plan: RowPlan) -> nn.Module:
    """A module with the arrays and the settings of `module`, whose product goes by the plan."""
    return recast(module, _FORMS[type(module)], plan=plan)


def joined(model: nn.Module) -> None:
    """Make planned modules of one part of the model, whose matrices are held alike, multiply together, and
    trace the feed-forwards that are made of such."""
    alike: dict[tuple[Any, ...], list[KernelLinear]] = {}
    for name, module in model.named_modules():
        if isinstance(module, KernelLinear):
            source = module.source()
            held = source.inputs, source.bits, source.group_size, source.mode, module.plan.dtype
            alike.setdefault((name.rpartition(".")[0], *held), []).append(module)
    for modules in alike.values():
        siblings = Siblings() if len(modules) > 1 else None
        for module in modules:
            object.__setattr__(module, "siblings", siblings)
    for name, module in list(model.named_modules()):
        if traceable(module):
            model.update_modules(tree_unflatten([(name, traced(module))]))


def planned_attention(plans: Mapping[tuple[Any, ...], QueryPlan]) -> Attention:
    """An attention that asks the plan of its shape, by `kind_of`, and is MLX's where none serves the call."""

    def attention(
        queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        plan = plans.get(kind_of(queries, keys, sinks))
        choice = plan.at(queries.shape[2], keys.shape[2]) if plan is not None else None
        if choice is None or not choice.kernel.takes(queries, keys, values, mask, sinks):
            return stock_attention(queries, keys, values, scale, mask, sinks)
        return choice.kernel.attend(queries, keys, values, scale, mask, sinks, choice.geometry)

    return attention


def kind_of(queries: mx.array, keys: mx.array, sinks: Any) -> tuple[Any, ...]:
    """Query heads, key heads, head size, type, and whether there are sinks."""
    return queries.shape[1], keys.shape[1], queries.shape[3], queries.dtype, sinks is not None
