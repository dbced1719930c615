"""Weights out of safetensors files, with damage found before any of it can be computed with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from mlx_dspark.catalog.safetensors import read_header
from mlx_dspark.foundation.errors import BadCheckpoint, UnsupportedModel

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = frozenset({"F32", "F16", "BF16"})
INDEX_TABLES = frozenset({"d2t", "t2d"})
AGAIN = "Download the drafter again."


def read_tensors(
    folder: Path, *, packed: frozenset[str] = frozenset(), values: bool = True
) -> tuple[dict[str, mx.array], tuple[Path, ...]]:
    """All tensors of the checkpoint in `folder`, and the files they came from.

    Raises BadCheckpoint for a missing, truncated or damaged file and for NaN or infinite weights, and
    UnsupportedModel for weights that are not plain floating point, or of one of the types `packed`. Without
    `values` the weights are not looked into.
    """
    kinds = FLOATS | packed
    weights: dict[str, mx.array] = {}
    files = _weight_files(folder)
    for path, listed in files.items():
        names = _checked_names(path, kinds)
        if lost := sorted(listed - names):
            raise BadCheckpoint(f"{path} lacks {', '.join(lost)}, which {INDEX} places there.", AGAIN)
        if twice := sorted(names & weights.keys()):
            raise BadCheckpoint(f"{path} repeats {', '.join(twice)} of another file.", AGAIN)
        weights |= _load(path)
    if values:
        _refuse_not_finite(weights, folder)
    return weights, tuple(files)


def tensor_names(folder: Path) -> set[str]:
    """The names of all tensors, by the headers alone; none of a checkpoint that cannot be read."""
    try:
        return {name for path in _weight_files(folder) for name in read_header(path, next_step=AGAIN)}
    except (BadCheckpoint, UnsupportedModel):
        return set()


def _weight_files(folder: Path) -> dict[Path, set[str]]:
    """The weight files, each with the tensor names that an index promises there."""
    index = folder / INDEX
    if index.exists():
        return _indexed_files(index)
    if (folder / SINGLE).exists():
        return {folder / SINGLE: set()}
    if (folder / "pytorch_model.bin").exists():
        raise UnsupportedModel(
            f"{folder} holds pickled weights (pytorch_model.bin).", "Convert them to safetensors first."
        )
    raise BadCheckpoint(
        f"{folder} holds neither {SINGLE} nor {INDEX}.", "Give the folder of a complete drafter checkpoint."
    )


def _indexed_files(index: Path) -> dict[Path, set[str]]:
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        entries = [(str(name), str(file)) for name, file in placed.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{index} cannot be read as a weight index.", AGAIN) from error
    files: dict[Path, set[str]] = {}
    for name, file in entries:
        if Path(file).name != file:
            raise BadCheckpoint(f"{index} places {name} outside its own folder ({file}).", AGAIN)
        files.setdefault(index.parent / file, set()).add(name)
    return files


def _checked_names(path: Path, kinds: frozenset[str]) -> set[str]:
    header = read_header(path, next_step=AGAIN)
    for name, stored in header.items():
        if stored.dtype not in kinds and name.rsplit(".", 1)[-1] not in INDEX_TABLES:
            raise UnsupportedModel(
                f"{name} in {path} is stored as {stored.dtype}, not as a plain floating-point tensor.",
                "Use the unquantized checkpoint (F32, F16 or BF16); it is quantized at load.",
                field=name,
            )
    return set(header)


def _load(path: Path) -> dict[str, mx.array]:
    try:
        loaded = mx.load(str(path), format="safetensors")
    except (RuntimeError, ValueError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}.", AGAIN) from error
    assert isinstance(loaded, dict)
    return loaded


def _refuse_not_finite(weights: Mapping[str, mx.array], folder: Path) -> None:
    floating = {name: w for name, w in weights.items() if mx.issubdtype(w.dtype, mx.floating)}
    finite = {name: mx.all(mx.isfinite(weight)) for name, weight in floating.items()}
    mx.eval(finite)
    if broken := sorted(name for name, good in finite.items() if not good.item()):
        raise BadCheckpoint(
            f"{', '.join(broken[:8])} in {folder} holds NaN or infinite values.", AGAIN, field=broken[0]
        )
