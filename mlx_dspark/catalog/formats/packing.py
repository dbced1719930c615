"""Drafters whose matrices are stored in MLX's affine quantization, as mlx-lm writes its models.

A matrix `name.weight` is then `[rows, width * bits / 32]` of U32, with `name.scales` and `name.biases`
`[rows, width / group_size]` beside it; config.json says `"quantization": {"group_size": 64, "bits": 4}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_dspark.catalog.formats.fields import Fields
from mlx_dspark.foundation.errors import BadCheckpoint

KEY = "quantization"
DTYPES = frozenset({"U32"})
BITS, GROUP_SIZES = (4, 8), (32, 64, 128)


@dataclass(frozen=True)
class Packing:
    """MLX's affine quantization: `bits` a weight, a scale and a bias for each `group_size` of them."""

    bits: int
    group_size: int

    def as_config(self) -> dict[str, Any]:
        """What config.json says of it."""
        return {"group_size": self.group_size, "bits": self.bits}


class PackedMatrix(NamedTuple):
    """One stored matrix."""

    weight: mx.array
    scales: mx.array
    biases: mx.array


@dataclass(frozen=True)
class PackedWeights:
    """The packed matrices of a checkpoint, by module name."""

    packing: Packing
    matrices: Mapping[str, PackedMatrix]


def declared(config: Fields) -> Packing | None:
    """The packing of a config that declares just this one; None for none or any other."""
    values = config.section(KEY).values
    if not {"bits", "group_size"} <= values.keys() <= {"bits", "group_size", "mode"}:
        return None
    if values.get("mode", "affine") != "affine":
        return None
    if values["bits"] not in BITS or values["group_size"] not in GROUP_SIZES:
        return None
    return Packing(values["bits"], values["group_size"])


def unpacked(
    weights: Mapping[str, mx.array], packing: Packing, folder: Path
) -> tuple[dict[str, mx.array], PackedWeights]:
    """All weights as plain matrices, not yet evaluated, and the packed ones as they are stored.

    Raises BadCheckpoint naming a tensor whose parts are missing or do not fit each other.
    """
    names = {name.rpartition(".")[0] for name, weight in weights.items() if _is_part(name, weight)}
    matrices = {name: _matrix(weights, name, packing, folder) for name in sorted(names)}
    if not matrices:
        raise BadCheckpoint(
            f"{folder}/config.json declares {KEY}, and no tensor is quantized.",
            "Download the drafter again.",
            field=KEY,
        )
    parts = {f"{name}.{part}" for name in names for part in PackedMatrix._fields}
    plain = {name: weight for name, weight in weights.items() if name not in parts}
    for name, matrix in matrices.items():
        plain[f"{name}.weight"] = mx.dequantize(*matrix, group_size=packing.group_size, bits=packing.bits)
    return plain, PackedWeights(packing, matrices)


def _is_part(name: str, weight: mx.array) -> bool:
    end = name.rpartition(".")[2]
    return end in ("scales", "biases") or (end == "weight" and weight.dtype == mx.uint32)


def _matrix(weights: Mapping[str, mx.array], name: str, packing: Packing, folder: Path) -> PackedMatrix:
    parts = [weights.get(f"{name}.{part}") for part in PackedMatrix._fields]
    weight, scales, biases = parts
    if weight is None or scales is None or biases is None or not _fits(weight, scales, biases, packing):
        shapes = ", ".join("absent" if part is None else str(list(part.shape)) for part in parts)
        raise BadCheckpoint(
            f"{name} in {folder} is not a matrix of {packing.bits} bits in groups of {packing.group_size}: "
            f"weight, scales and biases are {shapes}.",
            "Download the drafter again.",
            field=f"{name}.weight",
        )
    return PackedMatrix(weight, scales, biases)


def _fits(weight: mx.array, scales: mx.array, biases: mx.array, packing: Packing) -> bool:
    if weight.dtype != mx.uint32 or weight.ndim != 2 or weight.shape[1] * 32 % packing.bits:
        return False
    width = weight.shape[1] * 32 // packing.bits
    groups = (weight.shape[0], width // packing.group_size)
    return width % packing.group_size == 0 and scales.shape == biases.shape == groups
