"""Laws of the last look at a kernel: what its trial admitted must be right in the process that runs on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.framework.live import LiveKernels
from mlx_dspark.kernels.framework.offer import Offer, Wanted
from mlx_dspark.kernels.framework.registry import Entry
from mlx_dspark.kernels.framework.store import VerdictStore
from mlx_dspark.kernels.framework.verdict import Verdict
from mlx_dspark.kernels.gpu_modules import KernelLinear
from tests import scripted_kernels
from tests.scripted_kernels import Doubled

ENTRY = Entry("doubled", ("metal",), "tests.scripted_kernels:current", "small_m")


class Idle(Doubled):
    """A launch that does nothing, as one whose text was lost."""

    def multiply(self, x: mx.array, source: Source, geometry: Any) -> mx.array:
        return mx.zeros((*x.shape[:-1], source.outputs), x.dtype)


class Senseless(Doubled):
    def multiply(self, x: mx.array, source: Source, geometry: Any) -> mx.array:
        return super().multiply(x, source, geometry) * mx.nan


class Refused(Doubled):
    def multiply(self, x: mx.array, source: Source, geometry: Any) -> mx.array:
        raise ValueError("too many threads")


def layers_of(model: nn.Module) -> list[nn.Module]:
    return list(model.layers or ())


def offered(kernel: Doubled, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, LiveKernels]:
    """A model and its kernels, all of whose cases were admitted before."""
    monkeypatch.setitem(scripted_kernels.MADE, "kernel", kernel)
    model = nn.Sequential(
        nn.QuantizedLinear(64, 96, bias=False, group_size=32, bits=4),
        nn.QuantizedLinear(96, 64, bias=False, group_size=32, bits=4),
    )
    cases = {}
    for layer in layers_of(model):
        source = Source.of(layer)
        assert source is not None
        for width in kernel.widths:
            cases[kernel.case(source, mx.float32, width)] = Verdict("live", geometry=repr(("laid", 1)))
    VerdictStore(folder).remember(kernel, cases)
    offer = Offer(Wanted(), folder, back_end="metal", device="Apple M2", entries=[ENTRY])
    offer.place(model)
    return model, offer.live


def test_a_kernel_that_is_right_is_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, live = offered(kernel := Doubled(), tmp_path, monkeypatch)
    assert all(isinstance(layer, KernelLinear) for layer in layers_of(model))
    assert [state.name for state in live.live] == ["doubled"]
    assert kernel.rows == [max(kernel.widths)] * 2


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (Idle(), "off by 1.0e+00 of the largest output here"),
        (Senseless(), "off by nan"),
        (Doubled(adding=0.5), "of the largest output here, which it was not at its trial"),
        (Refused(), "too many threads"),
    ],
    ids=["idle", "senseless", "off", "refused"],
)
def test_a_kernel_that_is_wrong_here_is_left_out_and_said(
    kernel: Doubled, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, live = offered(kernel, tmp_path, monkeypatch)
    assert not any(isinstance(layer, KernelLinear) for layer in layers_of(model))
    assert live.live == []
    assert why in live.why_off(live.states[0])
