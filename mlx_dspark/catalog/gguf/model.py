"""A GGUF file as mlx-lm's own model with the file's weights in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from gguf import ReaderTensor
from mlx.utils import tree_flatten

from mlx_dspark.catalog.gguf.file import FETCH_AGAIN, GGUFFile
from mlx_dspark.catalog.gguf.layouts import IGNORED, Layout, layout_of
from mlx_dspark.catalog.gguf.weights import (
    Loss,
    Requantized,
    held_bits,
    quantization_section,
    read_tensor,
)
from mlx_dspark.compat.mlx_lm_models import empty_model
from mlx_dspark.foundation.errors import BadCheckpoint

_NORM = "norm.weight"


def build_model(file: GGUFFile, config: dict[str, Any]) -> nn.Module:
    """The model of `config` without its weights, its modules quantized as `load_weights` will fill them.

    `config` gets the `quantization` section that the file's formats come to. Raises BadCheckpoint for a
    tensor that is missing or of the wrong shape, UnsupportedModel for one that the layout has not.
    """
    model: Any = empty_model(config)
    if model is None:
        raise BadCheckpoint(
            f"{file.path} describes a model that cannot be built: its sizes do not fit each other.",
            FETCH_AGAIN,
        )
    model.sanitize({} if config["tie_word_embeddings"] else {"lm_head.weight": mx.zeros(1)})
    tensors = _named(file, model)
    bits_of = {
        name.removesuffix(".weight"): held_bits(tensor)
        for name, tensor in tensors.items()
        if held_bits(tensor)
    }
    if section := quantization_section(bits_of):
        config["quantization"] = section
        nn.quantize(
            model,
            section["group_size"],
            section["bits"],
            mode=section["mode"],
            class_predicate=lambda name, _: section.get(name, True) if name in bits_of else False,
        )
    model.eval()
    return model


def load_weights(
    file: GGUFFile,
    model: nn.Module,
    config: dict[str, Any],
    dtype: mx.Dtype,
    progress: Callable[[float], None] = lambda _: None,
) -> Requantized | None:
    """Read the weights into a model that `build_model` made, and report on those that lost something.

    Scales, biases and norms are held in `dtype`. `progress` hears which part has been read. Raises as
    `read_tensor` does.
    """
    layout = layout_of(file)
    losses: list[Loss] = []
    whole = sum(tensor.n_bytes for tensor in file.tensors.values())
    done = 0
    for gguf_name, tensor in file.tensors.items():
        name = layout.name(gguf_name)
        done += tensor.n_bytes
        if name is None:
            continue
        has_offset = layout.norm_offset and name.endswith(_NORM)
        read = read_tensor(file, tensor, mx.float32 if has_offset else dtype)
        module, _, leaf = name.rpartition(".")
        parts = {
            f"{module}.{leaf if part == 'weight' else part}": (
                (value - layout.norm_offset).astype(dtype)
                if has_offset
                else _in_order(layout, name, value, config)
            )
            for part, value in read.parts.items()
        }
        mx.eval(list(parts.values()))
        model.load_weights(list(parts.items()), strict=False)
        losses.append(Loss(gguf_name, tensor.tensor_type.name, read.error))
        progress(done / whole)
    return Requantized.of(losses)


def _named(file: GGUFFile, model: nn.Module) -> dict[str, ReaderTensor]:
    """The tensors under mlx-lm's names. Raises for one too many, one that is missing, and a wrong shape."""
    layout = layout_of(file)
    wanted = cast(dict[str, mx.array], tree_flatten(model.parameters(), destination={}))
    found: dict[str, ReaderTensor] = {}
    for gguf_name, tensor in file.tensors.items():
        name = layout.name(gguf_name)
        if name in wanted:
            found[name] = tensor
        elif gguf_name not in IGNORED:
            raise file.unsupported(
                f"the tensor {gguf_name}", f"the tensors of a {layout.model_type} model and no others"
            )
    for name, parameter in wanted.items():
        if name not in found:
            raise BadCheckpoint(f"{file.path} lacks the tensor {layout.tensor(name)}.", FETCH_AGAIN)
        shape = tuple(int(size) for size in reversed(found[name].shape))
        if shape != parameter.shape:
            raise BadCheckpoint(
                f"{file.path} has {found[name].name} in shape {shape}, where its metadata asks for "
                f"{parameter.shape}.",
                FETCH_AGAIN,
            )
    return found


def _in_order(layout: Layout, name: str, rows: mx.array, config: dict[str, Any]) -> mx.array:
    """A part of a tensor with its rows as mlx-lm's rope expects them.

    GGUF makes rotated pairs of a head neighbours; mlx-lm pairs a head's first half with its second.
    """
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }.get(name.split(".")[-2])
    if not (layout.reorders and heads):
        return rows
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return mx.contiguous(pairs.swapaxes(1, 2)).reshape(rows.shape)
