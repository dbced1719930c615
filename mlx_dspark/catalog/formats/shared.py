"""Config keys that DeepSpec and z-lab heads spell alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NoReturn

from mlx_dspark.catalog.formats.base import SINKS
from mlx_dspark.catalog.formats.fields import Fields
from mlx_dspark.foundation.errors import UnsupportedModel

FULL, SLIDING = "full_attention", "sliding_attention"
LONGEST_BLOCK, MOST_LAYERS = 1024, 1024
BACKBONE_KEYS = (
    "hidden_size",
    "vocab_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def unsupported(
    config: Fields, name: str, what: str, instead: str = "Use another drafter, or none."
) -> NoReturn:
    """Raises UnsupportedModel about key `name`."""
    raise UnsupportedModel(f"{config.file} declares {what}, which is not supported.", instead, field=name)


def kv_heads(config: Fields, name: str, heads: int, default: int | None = None) -> int:
    """Key-value heads, which must divide the query heads."""
    count = config.whole(name, default)
    if heads % count:
        config.bad(name, f"is {count}, which does not divide num_attention_heads ({heads})")
    return count


def head_width(config: Fields, name: str, default: int) -> int:
    """Width of one attention head; rotary pairs need an even one."""
    width = config.whole(name, default)
    if width % 2:
        config.bad(name, f"is {width}, not an even number")
    return width


def activation(config: Fields, name: str, only: str) -> None:
    """The MLP's activation is part of the backbone; another one is refused."""
    if config.text(name, only) != only:
        unsupported(config, name, f"{name} {config.values[name]!r}")


def layer_types(config: Fields, layers: int) -> tuple[str, ...]:
    """One attention kind per drafter layer; full attention where the config is silent."""
    kinds = config.texts("layer_types", (FULL,) * layers)
    if len(kinds) != layers:
        config.bad("layer_types", f"names {len(kinds)} layers, and num_hidden_layers is {layers}")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            unsupported(config, "layer_types", f"layer_types {kind!r}")
    return kinds


def windows(config: Fields, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """The window of each layer, None for full attention."""
    if SLIDING not in kinds:
        return (None,) * len(kinds)
    width = config.whole("sliding_window")
    return tuple(width if kind == SLIDING else None for kind in kinds)


def taps(config: Fields, name: str, target_layers: int | None) -> tuple[int, ...]:
    """Tapped target layers: strictly increasing, from -1 (the embedding output) up to the last layer."""
    ids = config.wholes(name)
    if any(after <= before for before, after in pairwise(ids)):
        config.bad(name, f"is {list(ids)}, not strictly increasing")
    if ids[0] < -1:
        config.bad(name, f"holds {ids[0]}, below -1 (the embedding output)")
    if target_layers is not None and ids[-1] >= target_layers:
        config.bad(name, f"holds {ids[-1]}, and num_target_layers is {target_layers}")
    return ids


def target_layers(config: Fields) -> int | None:
    """Decoder layers of the target the head was made for, where the file tells."""
    return config.whole("num_target_layers") if "num_target_layers" in config else None


def softcap(config: Fields, default: float | None = None) -> float | None:
    """Cap of the base logits; an explicit null switches the default off."""
    if "final_logit_softcapping" in config:
        return config.number("final_logit_softcapping", 1.0)
    return None if config.is_null("final_logit_softcapping") else default


def sinks(config: Fields, weights: Iterable[str]) -> bool:
    """Whether the attention has sinks: `attention_sink_bias` tells, or else the tensors."""
    return config.flag("attention_sink_bias", any(name.endswith(SINKS) for name in weights))
