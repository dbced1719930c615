"""From a drafter's folder to a drafter: read, build, check, quantize."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from mlx_dspark.catalog.formats import DrafterCheckpoint, read_drafter
from mlx_dspark.catalog.formats.packing import PackedWeights
from mlx_dspark.drafters.block import BlockDrafter
from mlx_dspark.foundation.errors import UsageError

FAMILIES = {
    "dspark": ("mlx_dspark.drafters.dspark.drafter", "DSparkDrafter"),
    "dflash": ("mlx_dspark.drafters.dflash.drafter", "DFlashDrafter"),
    "dflash2": ("mlx_dspark.drafters.dflash2.drafter", "DFlash2Drafter"),
}
"""Module and class per family; a module is imported when its family is first loaded."""

NEVER_QUANTIZED = ("_conv.", "candidate_selector.", "log_snr_embed.")
"""In the names of small modules that decide much: DFlash 2's convolutions and selector, noise levels."""


def load_drafter(
    path: Path,
    *,
    quantize_bits: int | None = None,
    group_size: int = 64,
    window: int = 4096,
    confidence_threshold: float | Literal["auto"] = 0.0,
    dtype: mx.Dtype | None = None,
) -> BlockDrafter:
    """Load the drafter in `path`, a folder or a GGUF file; it must then be bound to its target.

    `quantize_bits` (4, 8, or 0 for none) and `group_size` (32, 64, 128) are of MLX's affine quantization;
    layers whose width is not a multiple of the group stay as they are. None stands for 4, or for none where
    the checkpoint is stored quantized. A checkpoint that is stored in so many bits is taken as it is, as is
    any with `quantize_bits` 0. `window` is the number of most recent context positions a bidirectional layer
    attends to, 0 for all. `confidence_threshold`, from 0 (off) up to 1, cuts drafts by the head's confidence;
    "auto" by what each proposal is asked with.
    `dtype` None: float32 on the CPU, elsewhere the checkpoint's.

    Raises UsageError for a value out of range, ModelNotFound, BadCheckpoint or UnsupportedModel for a
    checkpoint that cannot be used.
    """
    _check("quantize_bits", quantize_bits, quantize_bits in (None, 0, 4, 8), "4, 8, or 0 for none")
    _check("group_size", group_size, group_size in (32, 64, 128), "32, 64 or 128")
    _check("window", window, window >= 0, "a number of positions, 0 for all")
    _check(
        "confidence_threshold",
        confidence_threshold,
        confidence_threshold == "auto" or 0 <= confidence_threshold <= 1,
        'a number from 0 to 1, or "auto"',
    )
    checkpoint = read_drafter(path)
    if confidence_threshold and not checkpoint.config.confidence:
        raise UsageError(
            f"confidence_threshold is {confidence_threshold}, and {path} has no confidence head.",
            "Leave it at 0 for this drafter.",
            field="confidence_threshold",
        )
    if quantize_bits is None:
        quantize_bits = 4 if checkpoint.packed is None else 0
    dtype = _compute_dtype(checkpoint) if dtype is None else dtype
    family: Any = import_module(FAMILIES[checkpoint.config.family][0])
    model = family.build_model(checkpoint, window)
    if checkpoint.packed is not None and quantize_bits in (0, checkpoint.packed.packing.bits):
        _load_packed(model, checkpoint, checkpoint.packed, dtype)
    else:
        model.load_weights([(name, weight.astype(dtype)) for name, weight in checkpoint.weights.items()])
        if quantize_bits:
            _quantize(model, quantize_bits, group_size)
    mx.eval(model.parameters())
    build = getattr(family, FAMILIES[checkpoint.config.family][1])
    drafter: BlockDrafter = build(
        checkpoint.config, model, dtype, d2t=checkpoint.d2t, confidence_threshold=confidence_threshold
    )
    drafter.folder = checkpoint.files[0].parent
    return drafter


def _check(name: str, value: float | str | None, good: bool, want: str) -> None:
    if not good:
        raise UsageError(f"{name} is {value}, which is out of range.", f"Give {want}.", field=name)


def _compute_dtype(checkpoint: DrafterCheckpoint) -> mx.Dtype:
    """Half precision is slower than float32 on the CPU; float16 overflows in some heads' residuals."""
    wide = all(weight.dtype == mx.float32 for weight in checkpoint.weights.values())
    return mx.float32 if wide or mx.default_device().type == mx.DeviceType.cpu else mx.bfloat16


def _load_packed(
    model: nn.Module, checkpoint: DrafterCheckpoint, packed: PackedWeights, dtype: mx.Dtype
) -> None:
    """The checkpoint's matrices as they are stored; scales and biases in `dtype`."""
    bits, group_size = packed.packing.bits, packed.packing.group_size
    nn.quantize(
        model, group_size=group_size, bits=bits, class_predicate=lambda name, _: name in packed.matrices
    )
    weights = dict(checkpoint.weights)
    for name, matrix in packed.matrices.items():
        weights |= {f"{name}.{part}": array for part, array in matrix._asdict().items()}
    model.load_weights(
        [(name, w if w.dtype == mx.uint32 else w.astype(dtype)) for name, w in weights.items()]
    )


def _quantize(model: nn.Module, bits: int, group_size: int) -> None:
    def fits(name: str, module: nn.Module) -> bool:
        if not isinstance(module, (nn.Linear, nn.Embedding)) or any(part in name for part in NEVER_QUANTIZED):
            return False
        return module.weight.shape[-1] % group_size == 0

    nn.quantize(model, group_size=group_size, bits=bits, class_predicate=fits)
