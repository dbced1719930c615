"""Kernels enter a model here, at load, by replacing modules.

On the CPU back end the way of holding and multiplying the weights is chosen by a race (decision 002) and
installed. All ways compute in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import psutil
from mlx.utils import tree_unflatten

from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.kernels import race
from mlx_dspark.kernels.base import Floats, Source, Way
from mlx_dspark.kernels.cpu_check import fault
from mlx_dspark.kernels.cpu_dense.matrix import Dense
from mlx_dspark.kernels.cpu_small.modules import host_module
from mlx_dspark.kernels.framework.live import LiveKernels
from mlx_dspark.kernels.framework.shapes import MatrixShape
from mlx_dspark.kernels.modules import HeldEmbedding, HeldLinear
from mlx_dspark.kernels.race import RaceMemory, Timing, Wrong

STOCK = "stock"
CHOICES = ("blocks", "dense", STOCK)


_LEAST = 16
"""Matrices of fewer inputs stay as they are: model code may read and replace the weights of such."""


@dataclass(frozen=True)
class CpuWeightsReport:
    """How the CPU back end holds a model's weights, and why.

    choice      a name of CHOICES; None on any other device
    reason      "measured", "remembered", "pinned", or what kept it from being one of these
    timings     what the race measured, one per way; empty when pinned
    absent      (way, why it did not take part)
    left_stock  (module, why it keeps MLX's own way)
    shapes      the kinds of affine and plain matrices it has, as `framework.shapes.MatrixShape` writes them
    """

    choice: str | None
    reason: str
    timings: tuple[Timing, ...] = ()
    absent: tuple[tuple[str, str], ...] = ()
    left_stock: tuple[tuple[str, str], ...] = ()
    shapes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.choice is None:
            return f"weights: MLX's own way ({self.reason})"
        measured = ", ".join(
            f"{timing.name} {timing.plain_ms:.0f}/{timing.verify_ms:.0f} ms" for timing in self.timings
        )
        return f"weights: {self.choice} ({self.reason}{'; ' + measured if measured else ''})"


def install_cpu_weights(
    model: nn.Module,
    *,
    choice: str | None = None,
    cache_dir: Path,
    progress: Callable[[str], None] | None = None,
) -> CpuWeightsReport:
    """Make `model` hold its weights the way that is fastest here, or the way named by `choice`.

    Replaces linear and embedding modules in place, with them the norms and rotations between, and turns what
    is left to float32: the model can no longer be saved. The race's timings are remembered in `cache_dir`.
    Does nothing unless MLX's default device is the CPU. Raises UsageError for a `choice` that does not exist
    or cannot be had here, as on another device.
    """
    if choice is not None and choice not in CHOICES:
        raise UsageError(
            f"There is no way of holding CPU weights called {choice!r}.",
            f"Choose one of {', '.join(CHOICES)}.",
            field="cpu_weights",
        )
    if mx.default_device() != mx.Device(mx.cpu):
        if choice is not None:
            raise UsageError(
                f"cpu_weights is {choice!r}, and the device is not the CPU.",
                "Leave it out.",
                field="cpu_weights",
            )
        return CpuWeightsReport(None, "the device is not the CPU")
    sources = {
        name: source for name, module in model.named_modules() if (source := Source.of(module)) is not None
    }
    ways, absent = _ways(sources)
    if choice is not None:
        if choice in ways and (wrong := fault(ways[choice], list(sources.values()))):
            absent[choice] = wrong
            del ways[choice]
        if choice not in (*ways, STOCK):
            raise UsageError(
                f"The CPU weights cannot be held as {choice!r}: {absent[choice]}.",
                f"Choose one of {', '.join((*ways, STOCK))}.",
                field="cpu_weights",
            )
        chosen, reason, timings = choice, "pinned", ()
    else:
        chosen, reason, timings, wrong = _race(list(sources.values()), ways, cache_dir, progress)
        absent |= wrong
    shapes = tuple(dict.fromkeys(filter(None, map(_shape, sources.values()))))
    left = _install(model, sources, ways[chosen]) if chosen in ways else {}
    model.set_dtype(mx.float32)
    left_stock = (*left.items(), *_unknown_quantized(model, left))
    return CpuWeightsReport(chosen, reason, timings, tuple(absent.items()), left_stock, shapes)


def kernel_set(report: CpuWeightsReport | None, live: LiveKernels | None = None) -> list[str]:
    """The kernels that a model runs on, with their versions: what its speed depends on beside MLX. `live` are
    those that were offered to it on a GPU."""
    from mlx_dspark._version import __version__

    choice = report.choice if report is not None and report.choice is not None else STOCK
    llvmlite = "with llvmlite" if find_spec("llvmlite") is not None else "without llvmlite"
    offered = live.key() if live is not None else []
    return [f"weights {choice}", llvmlite, f"mlx-dspark {__version__}", *offered]


def _shape(source: Source) -> str | None:
    if not source.bits:
        return str(MatrixShape.of(source, source.weight.dtype))
    if source.mode != "affine" or source.scales is None:
        return None
    return str(MatrixShape.of(source, source.scales.dtype))


def _ways(sources: dict[str, Source]) -> tuple[dict[str, Way], dict[str, str]]:
    """The ways that can be offered for these matrices, and why the others cannot."""
    ways: dict[str, Way] = {}
    absent: dict[str, str] = {}
    if find_spec("llvmlite") is None:
        absent["blocks"] = "the package llvmlite is not installed"
    else:
        from mlx_dspark.kernels.cpu_blocks.matrix import Blocks

        ways["blocks"] = Blocks()
    dense_bytes = 4 * sum(source.weights for source in sources.values())
    if dense_bytes > psutil.virtual_memory().available / 2:
        absent["dense"] = f"{dense_bytes / 1e9:.1f} GB in float32 are more than half of the free memory"
    else:
        ways["dense"] = Dense()
    return ways, absent


def _race(
    sources: list[Source],
    ways: dict[str, Way],
    cache_dir: Path,
    progress: Callable[[str], None] | None,
) -> tuple[str, str, tuple[Timing, ...], dict[str, str]]:
    if not any(way.refusal(source) is None for way in ways.values() for source in sources):
        return STOCK, "no matrix that another way could hold", (), {}
    memory = RaceMemory(cache_dir)
    key = race.race_key(sources, {name: way.version for name, way in ways.items()})
    raced = memory.recall(key, (STOCK, *ways))
    reason = "remembered"
    if raced is None:
        if progress is not None:
            progress("measuring how this processor multiplies the weights best")
        faults = {name: fault(way, sources) for name, way in ways.items()}
        wrong = [Wrong(name, why) for name, why in faults.items() if why]
        offered = {name: _holder(way) for name, way in ways.items() if not faults[name]}
        raced = [*race.measure(sources, {STOCK: _stock, **offered}), *wrong]
        obstacle = memory.remember(key, raced)
        reason = f"measured, not remembered: {obstacle}" if obstacle else "measured"
    timings = tuple(each for each in raced if isinstance(each, Timing))
    return (
        race.fastest(timings, STOCK),
        reason,
        timings,
        {each.name: each.wrong for each in raced if isinstance(each, Wrong)},
    )


def _holder(way: Way) -> Callable[[Source], race.Multiply]:
    return lambda source: way.hold(source).multiply if way.refusal(source) is None else _stock(source)


def _stock(source: Source) -> race.Multiply:
    """MLX's own product of the matrix in float32."""
    if not source.bits:
        weight = source.weight.astype(mx.float32)
        return lambda rows: mx.eval(mx.array(rows) @ weight.T)
    scales, biases = source.float32_scales()

    def multiply(rows: Floats) -> None:
        form = {"group_size": source.group_size, "bits": source.bits, "mode": source.mode}
        mx.eval(mx.quantized_matmul(mx.array(rows), source.weight, scales, biases, transpose=True, **form))

    return multiply


def _install(model: nn.Module, sources: dict[str, Source], way: Way) -> dict[str, str]:
    """Replace module by module, so that at most one matrix is held twice; returns what was left, and why."""
    left = {}
    modules = dict(model.named_modules())
    while sources:
        name, source = sources.popitem()
        refusal = way.refusal(source) if source.inputs >= _LEAST else "too small to gain anything"
        if refusal is not None:
            left[name] = refusal
            continue
        module = modules.pop(name)
        matrix = way.hold(source)
        embedding = isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
        held = HeldEmbedding(matrix) if embedding else HeldLinear(matrix, module.get("bias"))
        model.update_modules(tree_unflatten([(name, held)]))
    _replace(model, host_module)
    if way.name == "blocks":
        from mlx_dspark.kernels.cpu_swiglu.module import fused

        _replace(model, fused)
    return left


def _replace(model: nn.Module, other_form: Callable[[nn.Module], nn.Module | None]) -> None:
    for name, module in list(model.named_modules()):
        other = other_form(module)
        if other is not None:
            model.update_modules(tree_unflatten([(name, other)]))


def _unknown_quantized(model: nn.Module, known: dict[str, str]) -> list[tuple[str, str]]:
    return [
        (name, f"{type(module).__name__} has no other way yet")
        for name, module in model.named_modules()
        if "scales" in module and name not in known and Source.of(module) is None
    ]
