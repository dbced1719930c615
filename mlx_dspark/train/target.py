"""The target as it answers and as it teaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import psutil
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from mlx_dspark.catalog.checkpoint import Checkpoint, computes_on_cpu, load_checkpoint
from mlx_dspark.catalog.progress import Progress, silent
from mlx_dspark.catalog.resolve import ModelRef
from mlx_dspark.foundation.paths import default_cache_dir
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.load import load_target, text_config

UNPACKED_SHARE = 1 / 8
"""Of the device's memory, for a quantized teacher's weights in 16 bits."""


@dataclass(frozen=True)
class Teacher:
    """The frozen target, its tokenizer, the language model's part of its config, and its content hash."""

    target: DenseTarget
    tokenizer: Any
    config: dict[str, Any]
    end_ids: frozenset[int]
    content_hash: str
    name: str


def load_teacher(found: ModelRef, *, progress: Progress = silent) -> Teacher:
    """Load the target to answer prompts and to compute features and logits for whole batches.

    On the CPU back end it has its kernels; elsewhere a quantized one is unpacked to the type of its scales
    where memory allows, since large batches are bound by arithmetic. Raises LoadError.
    """
    checkpoint = load_checkpoint(found, progress=progress)
    if not computes_on_cpu():
        _unpack(checkpoint.model)
    target = load_target(checkpoint, replay=False, cache_dir=default_cache_dir(), progress=progress)
    return teacher_of(target, checkpoint)


def teacher_of(target: DenseTarget, checkpoint: Checkpoint) -> Teacher:
    """A loaded target as a teacher."""
    return Teacher(
        target,
        checkpoint.tokenizer,
        text_config(checkpoint.config),
        frozenset(checkpoint.eos_token_ids),
        checkpoint.content_hash,
        checkpoint.name,
    )


def memory_bytes() -> int:
    """Memory of MLX's default device."""
    info = mx.device_info()
    sizes = (info.get(name) for name in ("memory_size", "total_memory"))
    return next((int(size) for size in sizes if size), psutil.virtual_memory().total)


def _unpack(model: nn.Module) -> None:
    quantized = [
        m for _, m in model.named_modules() if isinstance(m, nn.QuantizedLinear | nn.QuantizedEmbedding)
    ]
    if not quantized:
        return
    weights = sum(32 * m.weight.size // m.bits for m in quantized)
    if 2 * weights > UNPACKED_SHARE * memory_bytes():
        return
    dtype = quantized[0].scales.dtype
    dequantize_model(model)
    model.set_dtype(dtype)
    mx.eval([array for _, array in tree_flatten(model.parameters())])
