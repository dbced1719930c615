"""What every packaging is translated into: one config and one dict of weights, checked against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import mlx.core as mx

from mlx_dspark.catalog.formats.packing import PackedWeights
from mlx_dspark.foundation.errors import BadCheckpoint

Shape = tuple[int, ...]

SINKS = "self_attn.attention_sink_bias"
"""The sinks within a layer."""

NOISE_FEATURES = 128
"""Sines and cosines that a slot's noise level is given to `log_snr_embed` as."""


@dataclass(frozen=True)
class Selector:
    """The choice among `candidates` ids per slot, through codebooks of rank `rank`."""

    rank: int
    candidates: int


@dataclass(frozen=True)
class Convolution:
    """Convolutions over the block's slots, of `taps` slots; `group` channels share a dynamic coefficient."""

    taps: int
    group: int


@dataclass(frozen=True)
class DrafterConfig:
    """A block drafter in numbers, whatever packaging it came in.

    `family` names the forward math and `backbone` its layer style. `taps` are 0-based target layers, -1 the
    embedding output. `first_slot` is the first block slot that predicts (0: the anchor slot predicts too).
    `layer_causal[i]` and `layer_windows[i]` (positions, None = unbounded) are the mask of drafter layer `i`.
    `target_layers` is None where the file does not tell. `softcap` None means no cap. With `sinks`, each
    attention head has a learned logit that takes weight and gives no value. With `gated`, a head's queries
    come with a gate on what it gives. With `noise_levels`, anchor and masks each have a constant added to
    their embeddings, which `log_snr_embed` makes. `selector` and `convolution` belong to family `dflash2`,
    None elsewhere.
    """

    family: Literal["dspark", "dflash", "dflash2"]
    backbone: Literal["qwen3", "gemma4"]
    hidden: int
    vocab: int
    draft_vocab: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    attention_bias: bool
    rope_theta: float
    block_size: int
    first_slot: int
    mask_token: int
    taps: tuple[int, ...]
    layer_causal: tuple[bool, ...]
    layer_windows: tuple[int | None, ...]
    rope_kind: str = "default"
    rope_options: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    target_layers: int | None = None
    values_from_keys: bool = False
    sinks: bool = False
    gated: bool = False
    noise_levels: bool = False
    markov: Literal["none", "vanilla", "gated", "rnn"] = "none"
    markov_rank: int = 0
    confidence: bool = False
    confidence_with_markov: bool = False
    softcap: float | None = None
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    own_embedding: bool = False
    own_head: bool = False
    tied: bool = False
    selector: Selector | None = None
    convolution: Convolution | None = None

    @property
    def max_draft(self) -> int:
        """Most drafts one block can hold."""
        return self.block_size - self.first_slot


@dataclass(frozen=True)
class DrafterCheckpoint:
    """A drafter as read from disk. `weights` are named as `drafter-formats` section 1.3 names them.

    `d2t` `[draft_vocab]` int32 belongs to a reduced draft vocabulary: draft id `j` is target id `j + d2t[j]`.
    `packed` holds the matrices that are stored quantized, which `weights` has as plain, unevaluated ones.
    """

    packaging: str
    config: DrafterConfig
    weights: dict[str, mx.array]
    files: tuple[Path, ...]
    d2t: mx.array | None = None
    packed: PackedWeights | None = None


def without_prefix(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The same weights without a leading `model.`, where every name has it."""
    if weights and all(name.startswith("model.") for name in weights):
        return {name.removeprefix("model."): weight for name, weight in weights.items()}
    return dict(weights)


def backbone_tensors(config: DrafterConfig) -> dict[str, Shape]:
    """Names and shapes of the fusion, the layers and the final norm."""
    hidden = config.hidden
    expected: dict[str, Shape] = {
        "fc.weight": (hidden, len(config.taps) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config.layers):
        expected |= {f"layers.{index}.{name}": shape for name, shape in _layer_tensors(config).items()}
    return expected


def _layer_tensors(config: DrafterConfig) -> dict[str, Shape]:
    hidden, wide = config.hidden, config.intermediate
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    linear: dict[str, Shape] = {
        "q_proj": (queries * (2 if config.gated else 1), hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    if config.values_from_keys:
        del linear["v_proj"]
    expected: dict[str, Shape] = {f"self_attn.{name}.weight": shape for name, shape in linear.items()}
    if config.attention_bias:
        expected |= {f"self_attn.{name}.bias": shape[:1] for name, shape in linear.items()}
    expected |= {f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    if config.sinks:
        expected[SINKS] = (config.heads,)
    expected |= {f"mlp.{name}.weight": (wide, hidden) for name in ("gate_proj", "up_proj")}
    expected["mlp.down_proj.weight"] = (hidden, wide)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.backbone == "gemma4":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        expected["layer_scalar"] = (1,)
    return expected | {f"{name}.weight": (hidden,) for name in norms}


def check_tensors(weights: Mapping[str, mx.array], expected: Mapping[str, Shape], where: Path) -> None:
    """The names must be exactly the expected ones, and every shape must fit.

    A partially loaded drafter runs without an error and drafts noise, so nothing is forgiven here.
    Raises BadCheckpoint naming every missing, unexpected and misshaped tensor.
    """
    faults = []
    if missing := sorted(expected.keys() - weights.keys()):
        faults.append(f"lacks {_listed(missing)}")
    if extra := sorted(weights.keys() - expected.keys()):
        faults.append(f"holds unexpected {_listed(extra)}")
    wrong = [
        f"{name} of shape {list(weights[name].shape)} in place of {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in weights and weights[name].shape != shape
    ]
    if wrong:
        faults.append(f"holds {_listed(wrong)}")
    if faults:
        raise BadCheckpoint(
            f"The drafter in {where} {', and '.join(faults)}.",
            "Download it again, or check that config.json belongs to these weights.",
        )


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
