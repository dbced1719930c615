"""Writing a checkpoint as a standard MLX model folder, which stock mlx-lm runs to the same tokens."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import save_config, save_model

from mlx_dspark.catalog.checkpoint import Checkpoint
from mlx_dspark.foundation.errors import UsageError


def export_model(checkpoint: Checkpoint, directory: Path) -> Path:
    """Write `checkpoint` to `directory`, whole or not at all, and return the folder.

    Weights and scales are stored in the type they compute in: float32 on the CPU back end. The checkpoint
    must be as `load_checkpoint` gave it; modules that kernels have replaced are refused. Raises UsageError
    when `directory` exists and is not an empty folder, or cannot be written.
    """
    directory = check_destination(directory)
    _refuse_foreign_modules(checkpoint.model)
    partial = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        _write(checkpoint, partial)
        os.replace(partial, directory)
    except OSError as error:
        raise _unwritable(directory, error.strerror or str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def check_destination(directory: Path) -> Path:
    """`directory` as an absolute path. Raises UsageError when nothing can be exported to it."""
    directory = directory.expanduser().absolute()
    try:
        taken = directory.exists() and not (directory.is_dir() and not any(directory.iterdir()))
        above = next(parent for parent in directory.parents if parent.exists())
    except OSError as error:
        raise _unwritable(directory, error.strerror or str(error)) from error
    if taken:
        raise UsageError(
            f"{directory} exists and is not an empty folder.", "Name a new folder.", field="directory"
        )
    if not above.is_dir():
        raise _unwritable(directory, f"{above} is not a folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise _unwritable(directory, f"{above} may not be written")
    return directory


def _unwritable(directory: Path, reason: str) -> UsageError:
    return UsageError(f"{directory} cannot be written: {reason}.", "Name another folder.", field="directory")


def _write(checkpoint: Checkpoint, folder: Path) -> None:
    eos = sorted(checkpoint.eos_token_ids)
    save_model(folder, checkpoint.model)
    save_config(_config(checkpoint) | {"eos_token_id": eos}, folder / "config.json", keep_vision_config=True)
    checkpoint.tokenizer.save_pretrained(folder)
    generation = {"eos_token_id": eos}
    for key in ("bos_token_id", "pad_token_id"):
        if (token := checkpoint.config.get(key)) is not None:
            generation[key] = token
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if "model_file" in checkpoint.config:
        for script in checkpoint.path.glob("*.py"):
            shutil.copy(script, folder)


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The config with the type the weights are stored in: the commonest floating type by size."""
    sizes: dict[str, int] = {}
    arrays = cast(dict[str, mx.array], tree_flatten(checkpoint.model.parameters(), destination={}))
    for array in arrays.values():
        if mx.issubdtype(array.dtype, mx.floating):
            name = str(array.dtype).removeprefix("mlx.core.")
            sizes[name] = sizes.get(name, 0) + array.size
    config = {key: value for key, value in checkpoint.config.items() if key != "dtype"}
    return config | {"torch_dtype": max(sizes, key=lambda name: sizes[name])}


def _refuse_foreign_modules(model: nn.Module) -> None:
    """Stock mlx-lm can only hold MLX's and its own modules; others have been placed over them."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("mlx_dspark."):
            raise UsageError(
                f"{name} of the model is a {type(module).__name__}, which replaced a stock module.",
                "Export the checkpoint before kernels are placed.",
            )
