"""What is wrong with the config.json of a language model, in terms of its keys.

Loaders fail on such a file in words of their own, from deep within a model's code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_dspark.catalog.folder import weight_files
from mlx_dspark.catalog.formats.fields import Fields
from mlx_dspark.catalog.safetensors import read_header
from mlx_dspark.compat.mlx_lm_models import LAYER_KEYS, MOST_LAYERS
from mlx_dspark.foundation.errors import BadCheckpoint
from mlx_dspark.foundation.numbers import brief, is_finite, is_whole

_WHOLES = ("hidden_size", "max_position_embeddings", "num_attention_heads", "vocab_size")
_NEEDED = ("hidden_size", "intermediate_size", *LAYER_KEYS, "num_attention_heads", "vocab_size")
_NUMBERS = (*_NEEDED, "num_key_value_heads", "head_dim", "rms_norm_eps", "norm_eps", "layer_norm_eps")
_OBJECTS = ("rope_scaling", "rope_parameters")
_SHAPES = "hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, head_dim and vocab_size"
AGAIN = "Correct the file, or download the model again."

_MISFIT = re.compile(r"Expected shape (\(.*?\)) but received shape (\(.*?\)) for parameter (\S+?)\.?$")
_COUNTED = re.compile(r"(Missing|Received) (\d+) parameters( not in model)?:?\s*(\S*?),?\s")
_LACKS = re.compile(r"missing \d+ required positional arguments?: (.+)$")
_LAYER = re.compile(r"^(?!.*(?:vision|audio|mtp)).*?\blayers\.(\d+)\.")
"""The number of a layer of the language model."""


def check_numbers(path: Path, config: dict[str, Any]) -> None:
    """Raises BadCheckpoint naming the key of config.json that no model can be built with.

    A list is left to the model's own class: some give one number for each layer.
    """
    for fields in _sections(path, config):
        for name in _WHOLES:
            if name in fields and not isinstance(fields.values[name], list):
                fields.whole(name)
        for name in LAYER_KEYS:
            if name in fields and not isinstance(fields.values[name], list):
                fields.whole(name, high=MOST_LAYERS)
        if "rope_theta" in fields and not isinstance(fields.values["rope_theta"], list):
            fields.number("rope_theta", 1.0)
    _check_quantization(Fields(config, path / "config.json"))


def _check_quantization(fields: Fields) -> None:
    """`quantization` is MLX's own section: an object with two numbers."""
    if "quantization" not in fields:
        return
    section = fields.section("quantization")
    for name in ("group_size", "bits"):
        if name not in section:
            fields.bad("quantization", f"has no {name}")
        if not is_whole(section.values[name]):
            section.bad(f"quantization.{name}", f"is {brief(section.values[name])}, not an integer")


def fault_of(path: Path, config: dict[str, Any], error: Exception) -> BadCheckpoint | None:
    """What a loader's error about the model in `path` comes from; None where its keys do not tell."""
    said = str(error)
    if found := _LACKS.search(said):
        lacking = found[1].replace("'", "").replace(" and ", ", ")
        return _about(path, lacking.partition(",")[0], f"lacks {lacking}")
    if (fault := _of_values(path, config)) is not None:
        return fault
    if (found := _MISFIT.search(said)) is not None:
        wanted, stored, name = found.groups()
        sentence = f"{name} in {path} is of shape {stored}, and its config.json asks for {wanted}."
        return BadCheckpoint(sentence, f"Check {_SHAPES} there, or download the model again.", field=name)
    if (found := _COUNTED.search(f"{said} ")) is not None:
        return _of_names(path, config, *found.groups())
    return None


def _of_values(path: Path, config: dict[str, Any]) -> BadCheckpoint | None:
    """The first key whose value is of a kind that it never has."""
    for fields in _sections(path, config):
        for name in _NEEDED:
            if fields.is_null(name):
                return _about(path, name, f"says null for {name}")
        for name in _NUMBERS:
            value = fields.values.get(name, 0)
            if not is_finite(value) and not isinstance(value, list):
                return _about(path, name, f"says {brief(value)} for {name}, which is no number")
        for name in _OBJECTS:
            if not isinstance(value := fields.values.get(name, {}), dict):
                return _about(path, name, f"says {brief(value)} for {name}, which is no object")
    return None


def _of_names(
    path: Path, config: dict[str, Any], kind: str, count: str, _: str | None, first: str
) -> BadCheckpoint:
    stored, sections = _layers_in(path), [config, config.get("text_config")]
    for section in filter(None, map(_mapping, sections)):
        for key in LAYER_KEYS:
            declared = section.get(key)
            if stored and is_whole(declared) and declared != stored:
                told = f"says {declared} for {key}, and the weights have {stored} layers"
                return _about(path, key, told)
    others = int(count) - 1
    more = f" and {others} more tensor{'s' * (others > 1)}" if others else ""
    verb = "lacks" if kind == "Missing" else "holds unexpected"
    return BadCheckpoint(
        f"{path} {verb} {first or 'tensors'}{more}.",
        "Check that its config.json belongs to its weights, or download the model again.",
        field=first or None,
    )


def _layers_in(path: Path) -> int:
    """How many layers the names of the tensors count; 0 where that cannot be told."""
    try:
        headers: Iterable[str] = (
            name for file in weight_files(path) for name in read_header(file, next_step=AGAIN)
        )
        return max((int(found[1]) + 1 for name in headers if (found := _LAYER.search(name))), default=0)
    except BadCheckpoint:
        return 0


def _about(path: Path, field: str, told: str) -> BadCheckpoint:
    return BadCheckpoint(f"{path / 'config.json'} {told}.", AGAIN, field=field)


def _sections(path: Path, config: dict[str, Any]) -> Iterator[Fields]:
    """The config, and the part of it that describes the language model where there is one."""
    for section in (config, config.get("text_config")):
        if isinstance(section, dict):
            yield Fields(section, path / "config.json")


def _mapping(value: object) -> Mapping[str, Any] | None:
    return value if isinstance(value, dict) else None
