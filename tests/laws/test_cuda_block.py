"""Laws of the CUDA kernel for a block drafter's forward, run on a CPU: it gives what the layers give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_dspark.drafters.device import DeviceForward
from mlx_dspark.kernels.cuda_block.forward import TAIL, BlockForward, Context
from mlx_dspark.nn.block import AttentionShape, BlockBackbone, BlockLayer, BlockMask, ContextAttention
from mlx_dspark.nn.context import ContextRow
from mlx_dspark.nn.rope import Rope
from tests.cuda_shim.forward import ran

SLOTS = 3
SHAPE = AttentionShape(hidden=128, heads=4, kv_heads=2, head_dim=64, norm_eps=1e-5)


@dataclass(frozen=True)
class Kind:
    """A drafter, and where its context is: `absorbed` positions, and `waiting` ones after them."""

    layers: int = 2
    shape: AttentionShape = SHAPE
    causal: bool = False
    window: int = 0
    bits: int = 4
    dtype: mx.Dtype = mx.float16
    absorbed: int = 40
    waiting: int = 5
    slots: int = SLOTS


def backbone(kind: Kind) -> BlockBackbone:
    rope, mask = Rope(kind.shape.head_dim, 10000.0), BlockMask(kind.causal)
    layers = [
        BlockLayer(ContextAttention(kind.shape, rope, mask, kind.window), 192) for _ in range(kind.layers)
    ]
    model = BlockBackbone(layers, taps=2)
    mx.random.seed(kind.layers)
    leaves: Any = tree_flatten(model.parameters())
    for name, value in leaves:
        noise = mx.random.normal(value.shape)
        wide = 1 + 0.3 * noise if value.ndim == 1 else noise * value.shape[-1] ** -0.5
        model.load_weights([(name, wide)], strict=False)
    if kind.bits < 16:
        nn.quantize(model, group_size=64, bits=kind.bits)
    model.set_dtype(kind.dtype)
    return model


def row_of(model: BlockBackbone, kind: Kind) -> ContextRow:
    row = model.new_row()
    fill = mx.random.normal((kind.absorbed + kind.waiting, 2 * kind.shape.hidden), key=mx.random.key(1))
    fill = fill.astype(kind.dtype)
    if kind.absorbed:
        row.observe(fill[: kind.absorbed])
        model.absorb([row])
    for at in range(kind.absorbed, kind.absorbed + kind.waiting, 2):
        row.observe(fill[at : min(at + 2, kind.absorbed + kind.waiting)])
    return row


def both(kind: Kind, folder: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str] | None = None):
    """The kernel's hidden states, and those of the model's layers in float32."""
    model = backbone(kind)
    row, embedded = row_of(model, kind), mx.random.normal((1, kind.slots, kind.shape.hidden))
    embedded = embedded.astype(kind.dtype)
    device = DeviceForward.of(model)
    assert device is not None
    assert device.takes([row])
    monkeypatch.setattr(BlockForward, "__call__", lambda self, x, c: ran(self, x, c, folder, change))
    got = np.array(device(embedded, row).astype(mx.float32))
    model.set_dtype(mx.float32)
    wide = row_of(model, replace(kind, dtype=mx.float32))
    model.absorb([wide])
    return got, np.array(model(embedded.astype(mx.float32), [wide]))


KINDS = {
    "as shipped": Kind(),
    "one layer, 8 bits": Kind(layers=1, bits=8, dtype=mx.bfloat16),
    "halves": Kind(bits=16),
    "causal": Kind(causal=True),
    "no context": Kind(absorbed=0, waiting=0),
    "nothing absorbed": Kind(absorbed=0, waiting=9),
    "nothing waits": Kind(waiting=0),
    "as much waits as may": Kind(waiting=TAIL),
    "a window of the last positions": Kind(absorbed=60, window=24),
    "a window of no more than waits": Kind(waiting=7, window=7),
    "wide heads": Kind(layers=1, shape=replace(SHAPE, head_dim=128, heads=2, kv_heads=1)),
    "more slots than a tile": Kind(layers=1, slots=11),
    "unscaled scores": Kind(layers=1, shape=replace(SHAPE, scaled=False)),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_the_kernel_gives_what_the_layers_give(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got, wanted = both(kind, tmp_path, monkeypatch)
    tolerance = 2e-2 if kind.dtype == mx.bfloat16 else 8e-3
    np.testing.assert_allclose(got, wanted, atol=tolerance * np.abs(wanted).max())


THEN_MLP = "; });\n    } else if (step == 2)"
CHANGES = {
    "leaves out the biases": ("(1u << BITS) - 1u)) + bias", "(1u << BITS) - 1u))"),
    "skips a norm": ("w[j] *= norm[k + j];", "w[j] *= 1.f;"),
    "does not rotate": ("const float angle = position * angles", "const float angle = 0 * angles"),
    "rotates the other way": ("low * c - high * s", "low * c + high * s"),
    "forgets what waits": ("const bool old = i < seen + tail;", "const bool old = false;"),
    "reads from the beginning": ("+ from) * D;\n        const T* values", ") * D;\n        const T* values"),
    "drops the other warps": ("for (int w = 0; w < WARPS; w++) {", "for (int w = 0; w < 1; w++) {"),
    "loses the residual": (
        f"h[r * HIDDEN + column] + x{THEN_MLP}",
        f"x{THEN_MLP}",
    ),
    "activates the wrong half": ("x / (1.f + expf(-x))", "x"),
    "takes one layer's weights": (
        "own = AFTER_FC + layer * LAYER;",
        "own = AFTER_FC;",
    ),
    "sees a later slot less": ("CAUSAL ? slot + 1 : SLOTS", "slot + 1"),
    "takes another head's keys": ("head / (HEADS / KV_HEADS)", "head % KV_HEADS"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_for_the_worse_is_noticed(
    change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = Kind(absorbed=60, window=24)
    got, wanted = both(kind, tmp_path, monkeypatch, change)
    assert not np.allclose(got, wanted, atol=2e-2 * np.abs(wanted).max())


def unusual(change: Callable[[BlockBackbone], None]) -> BlockBackbone:
    model = backbone(Kind())
    change(model)
    return model


def _other_activation(model: BlockBackbone) -> None:
    model.layers[1].mlp.activation = nn.gelu


def _mixed_bits(model: BlockBackbone) -> None:
    linear: Any = nn.Linear(SHAPE.hidden, SHAPE.hidden * 2, bias=False).to_quantized(64, 8)
    model.layers[0].self_attn.q_proj = linear


def _other_rope(model: BlockBackbone) -> None:
    model.layers[0].self_attn.rope = Rope(64, 10000.0, "interleaved")


def _window(model: BlockBackbone) -> None:
    model.layers[0].self_attn.mask = BlockMask(False, 16)


@pytest.mark.parametrize("change", [_other_activation, _mixed_bits, _other_rope, _window])
def test_layers_that_compute_something_else_are_not_taken(change: Callable[[BlockBackbone], None]) -> None:
    assert DeviceForward.of(backbone(Kind())) is not None
    assert DeviceForward.of(unusual(change)) is None


def test_a_row_with_more_waiting_or_company_is_not_taken() -> None:
    model = backbone(Kind())
    device = DeviceForward.of(model)
    assert device is not None
    row = row_of(model, Kind(absorbed=0, waiting=TAIL))
    assert device.takes([row])
    assert not device.takes([row, row])
    row.observe(mx.zeros((1, 2 * SHAPE.hidden), mx.float16))
    assert not device.takes([row])
    narrow = DeviceForward.of(backbone(Kind(window=4)))
    assert narrow is not None
    assert narrow.takes([row_of(model, Kind(waiting=4))])
    assert not narrow.takes([row_of(model, Kind(waiting=5))])


@pytest.mark.parametrize("right", [True, False])
def test_a_kernel_that_is_off_is_found_out(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at load, with the model's own operations, or worse ones, in the kernel's place."""
    model = backbone(Kind())
    device = DeviceForward.of(model)
    assert device is not None

    def call(self: BlockForward, embedded: mx.array, context: Context) -> mx.array:
        row = model.new_row()
        fill = mx.random.normal(
            (context.position, 2 * SHAPE.hidden), key=mx.random.split(mx.random.key(SLOTS), 2)[0]
        )
        row.observe(fill.astype(mx.float16))
        model.absorb([row])
        hidden = model(embedded, [row])
        return hidden if right else hidden[:, ::-1]

    monkeypatch.setattr(BlockForward, "__call__", call)
    assert device.right_here(model, SLOTS) == right
