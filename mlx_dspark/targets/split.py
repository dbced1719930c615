"""Splitting a target over several processes, with mlx-lm's own tensor parallel `shard`.

Each process keeps a part of the attention heads and of the feed-forward width; what leaves a layer is summed
over all of them, so the residual stream, its taps and the vocabulary head are whole everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_dspark.foundation.errors import UnsupportedModel
from mlx_dspark.targets.dense.parts import text_model

_HEADS = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key-value heads",
    "linear_num_key_heads": "key heads of linear attention",
    "linear_num_value_heads": "value heads of linear attention",
}
_WIDTHS = {
    "intermediate_size": "feed-forward width",
    "moe_intermediate_size": "width of an expert",
    "shared_expert_intermediate_size": "width of the shared expert",
}
_FOREIGN = (AssertionError, AttributeError, LookupError, TypeError, ValueError, ZeroDivisionError)


def refuse_unsplittable(model: nn.Module, config: dict[str, Any], ranks: int) -> None:
    """Raises UnsupportedModel, with the numbers, when `ranks` processes cannot share the model evenly, or
    when mlx-lm cannot split its family. `config` is that of its text part; weights are not looked at."""
    if _splitter(model) is None:
        raise UnsupportedModel(
            f"mlx-lm cannot split a {config.get('model_type')} model over processes.",
            "Run it in one process, or choose a model of another family, such as llama, qwen3 or gpt_oss.",
            field="model_type",
        )
    uneven = list(_uneven(config, ranks))
    if uneven:
        raise UnsupportedModel(
            f"{ranks} processes cannot share this {config.get('model_type')} model evenly: it has "
            f"{', '.join(uneven)}.",
            _advice(config),
            field="num_attention_heads",
        )


def split(model: nn.Module, config: dict[str, Any], group: mx.distributed.Group) -> None:
    """Keep this process's part of a model whose weights are lazy: only that part is then read into memory.

    The vocabulary head stays whole, since drafters borrow it. Raises as `refuse_unsplittable` does.
    """
    refuse_unsplittable(model, config, group.size())
    text: Any = text_model(model)
    head = text.get("lm_head")
    try:
        _splitter(model)(group)  # type: ignore[misc]
    except _FOREIGN as error:
        raise UnsupportedModel(
            f"mlx-lm cannot split this {config.get('model_type')} model in {group.size()} parts: {error}.",
            "Run it in one process, or choose another model.",
            field="model_type",
        ) from error
    if head is not None and text.get("lm_head") is not head:
        text.lm_head, text.sharding_group = head, None


def _splitter(model: nn.Module) -> Any:
    return getattr(model, "shard", None) or getattr(text_model(model), "shard", None)


def _uneven(config: dict[str, Any], ranks: int) -> Iterator[str]:
    """What `ranks` does not divide, in words."""
    for name, words in _HEADS.items():
        if (heads := _whole(config, name)) % ranks:
            yield f"{heads} {words}"
    group = _group_size(config)
    for words, width in _split_widths(config):
        if width % (ranks * group):
            groups = f" in quantization groups of {group}" if group > 1 else ""
            article = "an" if words[0] in "aeiou" else "a"
            yield f"{article} {words} of {width}{groups}"


def _split_widths(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """The inputs of matrices that are cut across their inputs, where a quantization group must stay whole."""
    for name, words in _WIDTHS.items():
        if width := _whole(config, name):
            yield words, width
    heads, hidden = _whole(config, "num_attention_heads"), _whole(config, "hidden_size")
    if heads and (size := _whole(config, "head_dim") or hidden // heads):
        yield "attention width", heads * size


def _advice(config: dict[str, Any]) -> str:
    most = gcd(*(heads for name in _HEADS if (heads := _whole(config, name))))
    fitting = [f"-n {n}" for n in range(2, most + 1) if not any(_uneven(config, n))]
    return f"Launch it with {' or '.join([*fitting, '-n 1'])}."


def _whole(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) else 0


def _group_size(config: dict[str, Any]) -> int:
    """Weights in a quantization group; 1 where the model is not quantized."""
    section = config.get("quantization") or config.get("quantization_config")
    size = section.get("group_size") if isinstance(section, dict) else None
    return size if isinstance(size, int) else 1
