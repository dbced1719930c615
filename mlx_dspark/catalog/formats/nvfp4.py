"""Drafters whose matrices are stored in NVFP4, as NVIDIA's modelopt writes them.

A matrix `name.weight` is then `[rows, width / 2]` bytes of two 4-bit floats each (E2M1, the even column in
the low half), with `name.weight_scale` `[rows, width / 16]` in E4M3 and one float32 `name.weight_scale_2`
beside it (drafter-formats section 8.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_dspark.catalog.folder import read_json
from mlx_dspark.catalog.formats.fields import Fields
from mlx_dspark.foundation.errors import BadCheckpoint, UnsupportedModel

KEY, BESIDE = "quantization_config", "hf_quant_config.json"
DTYPES = frozenset({"U8", "F8_E4M3"})
ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
GROUP = 16
SCALE, SCALE_2 = "weight_scale", "weight_scale_2"

_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
"""The value of each of the 16 codes."""


def declared(config: Fields) -> bool:
    """Whether config.json, or else hf_quant_config.json beside it, says modelopt's NVFP4.

    Raises UnsupportedModel for another format of modelopt's, BadCheckpoint for a file that cannot be read.
    """
    section, beside = config.section(KEY), config.file.with_name(BESIDE)
    if KEY not in config and beside.is_file():
        section = Fields(read_json(beside), beside).section("quantization")
    elif section.values.get("quant_method") != "modelopt":
        return False
    algorithm = section.text("quant_algo", "unknown")
    if algorithm not in ALGORITHMS:
        raise UnsupportedModel(
            f"{section.file} declares modelopt's {algorithm}, which is not supported.",
            "Use the drafter in NVFP4 or without quantization.",
            field=KEY,
        )
    return True


def unpacked(weights: Mapping[str, mx.array], folder: Path) -> dict[str, mx.array]:
    """All weights as plain matrices; those of NVFP4 in float32 and not yet evaluated.

    Raises BadCheckpoint naming a tensor whose parts are missing, do not fit each other or are not finite.
    """
    names = sorted({name.rpartition(".")[0] for name, weight in weights.items() if _is_part(name, weight)})
    if not names:
        raise BadCheckpoint(
            f"{folder}/config.json declares NVFP4, and no tensor is quantized.",
            "Download the drafter again.",
            field=KEY,
        )
    plain = dict(weights)
    for name in names:
        parts = [plain.pop(f"{name}.{part}", None) for part in ("weight", SCALE, SCALE_2)]
        plain[f"{name}.weight"] = _matrix(name, parts, folder)
    return plain


def _is_part(name: str, weight: mx.array) -> bool:
    return name.endswith((f".{SCALE}", f".{SCALE_2}")) or weight.dtype == mx.uint8


def _matrix(name: str, parts: list[mx.array | None], folder: Path) -> mx.array:
    weight, scale, scale_2 = parts
    if weight is None or scale is None or scale_2 is None or not _fits(weight, scale, scale_2):
        shapes = ", ".join("absent" if part is None else f"{part.dtype} {list(part.shape)}" for part in parts)
        raise BadCheckpoint(
            f"{name} in {folder} is not a matrix in NVFP4: weight, {SCALE} and {SCALE_2} are {shapes}.",
            "Download the drafter again.",
            field=f"{name}.weight",
        )
    if (scale & 0x7F == 0x7F).any().item():
        raise BadCheckpoint(
            f"{name}.{SCALE} in {folder} holds NaN.", "Download the drafter again.", field=f"{name}.{SCALE}"
        )
    return decoded(weight, scale, scale_2)


def _fits(weight: mx.array, scale: mx.array, scale_2: mx.array) -> bool:
    kinds = (weight.dtype, scale.dtype, scale_2.dtype) == (mx.uint8, mx.uint8, mx.float32)
    if not kinds or weight.ndim != 2 or scale_2.size != 1:
        return False
    rows, width = weight.shape[0], weight.shape[1] * 2
    return width % GROUP == 0 and scale.shape == (rows, width // GROUP)


def decoded(weight: mx.array, scale: mx.array, scale_2: mx.array) -> mx.array:
    """`[rows, width]` float32: the code's value, times its group's scale, times the matrix's."""
    codes = mx.stack([weight & 0xF, weight >> 4], axis=-1).reshape(weight.shape[0], -1, GROUP)
    values = mx.array(E2M1)[codes] * e4m3(scale)[..., None]
    return values.reshape(weight.shape[0], -1) * scale_2.reshape(())


def e4m3(codes: mx.array) -> mx.array:
    """Bytes to float32: a sign, four bits of exponent with bias 7, three of mantissa; 0x7F is NaN."""
    exponent, mantissa = np.arange(256) >> 3 & 0xF, np.arange(256) & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    values[[0x7F, 0xFF]] = np.nan
    return mx.array(np.where(np.arange(256) < 128, values, -values).astype(np.float32))[codes]
