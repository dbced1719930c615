"""Recurrent mixers of mlx-lm's models, made to work on states that can be taken back.

A mixer object gets a subclass of its own class. On our state its call is ours, which computes the same and
leaves a tape, or its own, which is run again to take a part back; with any other cache, or none, the model's
own call runs, so that one stays the authority.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_dspark.foundation.errors import UnsupportedModel
from mlx_dspark.state.recurrent import RecurrentState
from mlx_dspark.targets.faithful.mixers import mixer_is_faithful
from mlx_dspark.targets.gated_delta.mixer import qwen3_5_delta_net, qwen3_next_delta_net
from mlx_dspark.targets.mamba2.mixer import mamba2
from mlx_dspark.targets.rerun.mixer import rerun
from mlx_dspark.targets.shortconv.mixer import short_conv

Mixer = Callable[[Any, mx.array, RecurrentState], mx.array]

MIXERS: dict[str, Mixer] = {
    "lfm2.ShortConv": short_conv,
    "lfm2_moe.ShortConv": short_conv,
    "qwen3_next.Qwen3NextGatedDeltaNet": qwen3_next_delta_net,
    "qwen3_5.GatedDeltaNet": qwen3_5_delta_net,
    "nemotron_h.NemotronHMamba2Mixer": mamba2,
}
"""By module and class in `mlx_lm.models`."""

RERUN = frozenset(
    {
        "bailing_hybrid.LinearAttention",
        "bailing_moe_linear.LinearAttention",
        "bailing_moe_v3.BailingKDA",
        "falcon_h1.FalconH1Mixer",
        "gear.ConvKVGatedMixer",
        "granitemoehybrid.GraniteMoeHybridMamba2Mixer",
        "jamba.JambaMambaMixer",
        "kimi_k3.KimiK3DeltaAttention",
        "kimi_linear.KimiDeltaAttention",
        "mamba.MambaBlock",
        "mamba2.Mamba2Block",
        "olmo_hybrid.GatedDeltaNet",
        "plamo2.Mamba",
        "recurrent_gemma.RecurrentBlock",
        "rwkv7.Rwkv7Layer",
    }
)
"""Those that are run again: whatever takes the cache, and reads and writes nothing else of it."""

_HOME = "mlx_lm.models."


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}".removeprefix(_HOME)


def _mixer_of(kind: type) -> Mixer | None:
    return MIXERS.get(_name_of(kind))


def taped_mixers(model: nn.Module) -> int:
    """How many mixers of `model` can work, or work already, on a RecurrentState."""
    kinds = [type(module) for module in model.modules()]
    return sum(hasattr(kind, "taped") or _name_of(kind) in {*MIXERS, *RERUN} for kind in kinds)


def place_mixers(model: nn.Module) -> None:
    """Make every mixer known here work on a RecurrentState; doing it twice changes nothing.

    Raises UnsupportedModel when the installed mlx-lm's mixers compute something else than ours.
    """
    placed: dict[type, Any] = {}
    for module in model.modules():
        mixer = _mixer_of(type(module))
        if _name_of(type(module)) in RERUN:
            module.__class__ = _rerun(type(module))
        elif mixer is not None:
            module.__class__ = _taped(type(module), mixer)
            placed[type(module)] = module
    for kind, module in placed.items():
        if not mixer_is_faithful(module, *_input_of(module)):
            raise UnsupportedModel(
                f"The recurrent layers of this model ({kind.__module__}, mlx-lm {version('mlx-lm')}) compute "
                "something else than this version knows, so their state cannot be taken back.",
                "Install the mlx-lm that this version was made for, or choose another model.",
                field="model_type",
            )


def _input_of(mixer: Any) -> tuple[int, mx.Dtype]:
    """Width and type of what a mixer takes."""
    conv = mixer.conv if "conv" in mixer else mixer.conv1d
    holder = mixer if hasattr(mixer, "hidden_size") else mixer.args
    return holder.hidden_size, conv.weight.dtype


@cache
def _taped(kind: type[nn.Module], mixer: Mixer) -> type[nn.Module]:
    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if isinstance(cache, RecurrentState):
            return mixer(self, x, cache)
        return kind.__call__(self, x, mask, cache)  # type: ignore[operator]

    body = {"__call__": call, "__module__": kind.__module__, "taped": True}
    return type(f"Taped{kind.__name__}", (kind,), body)


@cache
def _rerun(kind: type[nn.Module]) -> type[nn.Module]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = next((each for each in (*args, *kwargs.values()) if isinstance(each, RecurrentState)), None)
        if state is None:
            return kind.__call__(self, *args, **kwargs)  # type: ignore[operator]
        given = [*((None, value) for value in args), *kwargs.items()]
        return rerun(partial(kind.__call__, self), state, given)  # type: ignore[operator]

    body = {"__call__": call, "__module__": kind.__module__, "taped": True}
    return type(f"Rerun{kind.__name__}", (kind,), body)
