"""Writing the finished drafter: DeepSpec's layout, in bfloat16 or quantized."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_dspark.catalog.formats.packing import KEY, Packing
from mlx_dspark.train.checkpoint import save_arrays, write_json

GROUP_SIZE = 64
FEWEST_ROWS = 64
"""Matrices of fewer rows stay plain: next to nothing is saved, and the confidence is one row."""


def export_drafter(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, mx.array], *, bits: int = 0
) -> Path:
    """Write config.json and model.safetensors into `folder`, each whole or not at all.

    `bits` 0 stores bfloat16, which every loader of the format reads; 4 or 8 store MLX's affine quantization
    in groups of 64, as mlx-lm does, which ours reads. Returns `folder`. Raises OSError when the disk
    is full.
    """
    packing = Packing(bits, GROUP_SIZE) if bits else None
    stored: dict[str, mx.array] = {}
    for name, weight in weights.items():
        stored |= _stored(name, weight, packing)
    config = {**config, "dtype": "bfloat16"}
    if packing is not None:
        config[KEY] = packing.as_config()
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / "new.safetensors"
    save_arrays(scratch, stored, {"format": "mlx"})
    os.replace(scratch, folder / "model.safetensors")
    write_json(folder / "config.json", config)
    return folder


def rounded(weight: mx.array, bits: int) -> mx.array:
    """The float32 values that an export of `bits` bits stores for a float32 weight; 0 leaves it alone."""
    if not bits or not _packs(weight):
        return weight
    packed = mx.quantize(weight.astype(mx.bfloat16), group_size=GROUP_SIZE, bits=bits)
    return mx.dequantize(*packed, group_size=GROUP_SIZE, bits=bits).astype(mx.float32)


def _packs(weight: mx.array) -> bool:
    return weight.ndim == 2 and weight.shape[0] >= FEWEST_ROWS and weight.shape[1] % GROUP_SIZE == 0


def _stored(name: str, weight: mx.array, packing: Packing | None) -> dict[str, mx.array]:
    if not mx.issubdtype(weight.dtype, mx.floating):
        return {name: weight}
    weight = weight.astype(mx.bfloat16)
    if packing is None or not _packs(weight):
        return {name: weight}
    parts = mx.quantize(weight, group_size=packing.group_size, bits=packing.bits)
    module = name.removesuffix("weight")
    return {module + part: array for part, array in zip(("weight", "scales", "biases"), parts, strict=True)}
