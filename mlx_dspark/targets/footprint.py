"""What a text takes in a model's states, found without its weights.

The model's own code runs over two tokens with weights that are one zero each, seen as whole arrays; only the
shapes and types of what its states then hold are looked at, and nothing is computed.
"""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlx_dspark.catalog.fit import StateBytes
from mlx_dspark.compat.mlx_lm_models import empty_model
from mlx_dspark.foundation.errors import DsparkError
from mlx_dspark.kernels.attention import stock_attention
from mlx_dspark.state.base import LayerState
from mlx_dspark.state.kv import KVState
from mlx_dspark.state.rows import RowStates
from mlx_dspark.state.window import WindowState
from mlx_dspark.targets.dense.parts import text_model
from mlx_dspark.targets.states import state_plan

_WIDTH = 2
_FOREIGN = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def state_bytes(config: dict[str, Any], *, dtype: mx.Dtype, kv_bits: int | None = None) -> StateBytes | None:
    """What one text takes in the states of the model that `config` describes, computed in `dtype`.

    None where that cannot be told without the weights.
    """
    model = empty_model(copy.deepcopy(config))
    if model is None:
        return None
    model = text_model(model)
    _hollow(model, dtype)
    nested = config.get("text_config")
    settings = {**config, **nested} if isinstance(nested, dict) else config
    try:
        return _traced(model, settings, kv_bits)
    except (*_FOREIGN, DsparkError):
        return None


def _hollow(model: nn.Module, dtype: mx.Dtype) -> None:
    """Weights of the same shapes that take no memory, even where code evaluates them."""

    def hollow(array: mx.array) -> mx.array:
        floating = mx.issubdtype(array.dtype, mx.floating)
        return mx.broadcast_to(mx.zeros((), dtype if floating else array.dtype), array.shape)

    model.update(tree_map(hollow, model.parameters()))
    model.eval()


def _traced(model: nn.Module, config: dict[str, Any], kv_bits: int | None) -> StateBytes:
    plan = state_plan(model, config, kv_bits=kv_bits)
    plan.place(model)
    rows = plan.new_rows(1, stock_attention)
    code: Any = model
    with rows.transaction(_WIDTH) as transaction:
        code(mx.zeros((1, _WIDTH), mx.int32), cache=rows.cache)
        transaction.commit([_WIDTH])
    return sum((_layer(layer) for layer in _layers(rows)), StateBytes())


def _layers(rows: RowStates) -> list[LayerState]:
    return list(rows.layers)


def _layer(state: LayerState) -> StateBytes:
    written = state.capture(0, _WIDTH).nbytes
    if isinstance(state, WindowState):
        return StateBytes(windows=((written // _WIDTH, state.window + state.slack - 1),))
    if isinstance(state, KVState):
        return StateBytes(per_token=written // _WIDTH)
    return StateBytes(fixed=written)
