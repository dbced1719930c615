"""Rotary settings of a config.json, in the spellings that transformers has used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mlx_dspark.catalog.formats.fields import Fields
from mlx_dspark.foundation.errors import UnsupportedModel

DEFAULT_THETA = 1e6

OPTIONS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    ),
    "proportional": ((), ("partial_rotary_factor", "factor")),
}
"""Per rope type the options it needs and the ones it may have."""


class RopeFields(NamedTuple):
    theta: float
    kind: str = "default"
    options: Mapping[str, float] = {}


def theta_only(config: Fields, layer_types: Sequence[str]) -> RopeFields:
    """The base alone: a DeepSpec head inherits its target's config, whose scaling its rope ignores."""
    parameters = _of_layer_types(config, layer_types)
    return RopeFields(_theta(parameters, config))


def declared(config: Fields, layer_types: Sequence[str]) -> RopeFields:
    """The whole of the config's own rope: `rope_parameters`, or `rope_theta` with `rope_scaling`."""
    parameters = _of_layer_types(config, layer_types)
    if "rope_scaling" in config and not {"rope_type", "type"} & parameters.values.keys():
        parameters = Fields(parameters.values | config.section("rope_scaling").values, config.file)
    theta = _theta(parameters, config)
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    return RopeFields(theta, kind, _options(parameters, kind, config))


def gemma4(config: Fields) -> RopeFields:
    """The entry of the full-attention layers, which is the one the drafter was built with; or the only one,
    where the section is not by layer type."""
    section = config.section("rope_parameters")
    by_type = any(name in section for name in ("full_attention", "sliding_attention"))
    parameters = section.section("full_attention") if by_type else section
    theta = parameters.number("rope_theta", DEFAULT_THETA, above=1.0)
    if not parameters.values:
        return RopeFields(theta, "proportional", {"partial_rotary_factor": 0.25})
    kind = parameters.text("rope_type", "default")
    if kind not in ("default", "proportional"):
        _refuse(kind, config)
    return RopeFields(theta, kind, _options(parameters, kind, config))


def _theta(parameters: Fields, config: Fields) -> float:
    """The base, whose logarithm divides: above 1."""
    return parameters.number("rope_theta", config.number("rope_theta", DEFAULT_THETA, above=1.0), above=1.0)


def _of_layer_types(config: Fields, layer_types: Sequence[str]) -> Fields:
    """`rope_parameters`, of the used layer types when it is nested by layer type."""
    parameters = config.section("rope_parameters")
    nested = [parameters.section(kind) for kind in sorted(set(layer_types)) if kind in parameters]
    if not nested:
        return parameters
    if any(other.values != nested[0].values for other in nested):
        raise UnsupportedModel(
            f"rope_parameters in {config.file} differ between the layer types the drafter uses.",
            "Only one rope for all drafter layers is supported; use another drafter, or none.",
            field="rope_parameters",
        )
    return nested[0]


def _options(parameters: Fields, kind: str, config: Fields) -> dict[str, float]:
    if kind not in OPTIONS:
        _refuse(kind, config)
    needed, optional = OPTIONS[kind]
    values = dict(parameters.values)
    if "original_max_position_embeddings" in needed and "max_position_embeddings" in config:
        values.setdefault("original_max_position_embeddings", config.values["max_position_embeddings"])
    filled = Fields(values, config.file)
    filled.require(needed)
    options = {name: filled.number(name, 1.0) for name in (*needed, *optional) if name in filled}
    if kind == "llama3" and options["high_freq_factor"] <= options["low_freq_factor"]:
        filled.bad("high_freq_factor", f"is {options['high_freq_factor']:g}, not above low_freq_factor")
    return options


def _refuse(kind: str, config: Fields) -> None:
    raise UnsupportedModel(
        f"rope_type {kind!r} in {config.file} is not supported for drafters.",
        f"Supported are {', '.join(OPTIONS)}; use another drafter, or none.",
        field="rope_type",
    )
