"""Drafters of other methods: how each is known, what it is called, and why it is not run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mlx_dspark.catalog.formats.fields import Fields


class Method(NamedTuple):
    """`name` with its article; `why` completes "not supported: "."""

    name: str
    why: str


_BY_TOKEN = "it drafts token by token from hidden states of its own, not in blocks"
EAGLE3 = Method("an EAGLE-3 head", _BY_TOKEN)
EAGLE = Method("an EAGLE head", _BY_TOKEN)
MTP = Method(
    "a head for multi-token prediction (MTP)", "it is a layer of its target and drafts token by token"
)
MEDUSA = Method("a Medusa head", "it guesses every position from one hidden state, without a block")
HYDRA = Method("a Hydra head", "it guesses position after position from one hidden state, without a block")

NAMES = {
    "eagle3": EAGLE3,
    "eagle": EAGLE,
    "mtp": MTP,
    "nextn": MTP,
    "medusa": MEDUSA,
    "hydra": HYDRA,
    "laguna": Method("a Laguna head", "its fused projections and norms per tap are not built"),
    "mimo": Method("a MiMo head", "its learned mask embedding is not built"),
    "museglimmerassistant": Method("a Muse Glimmer assistant", "its window is not known to the position"),
    "dfly": Method("a DFly head", "its method is not built"),
    "domino": Method("a Domino head", "its recurrent projector is not built"),
}
"""By a part of `architectures` or `model_type`, without case and underscores; the first found counts."""

KEYS = {
    "medusa_num_heads": MEDUSA,
    "medusa_num_layers": MEDUSA,
    "hydra_num_heads": HYDRA,
    "eagle_config": EAGLE,
}
"""By a key of config.json."""

PREFIXES = {"midlayer.": EAGLE3, "medusa_head.": MEDUSA, "hydra_head.": HYDRA, "mtp.": MTP}
"""By how the names of tensors begin."""

EMBEDDED = Method("a full model with an embedded drafter", "the drafter is not a checkpoint of its own")
NATIVE = Method(
    "a head in Qwen 3.5's own style (model_type) in a packaging of plain heads",
    "whether its norms are stored as offsets is not known",
)
HYBRID = Method(
    "a DFlash head with a Markov head", "how its first slot and its Markov head go together is not known"
)


def named(config: Fields) -> tuple[str, Method] | None:
    """The entry of `architectures` or `model_type` that names another method, and the method."""
    for name in (*config.texts("architectures"), config.text("model_type", "")):
        plain = name.lower().replace("_", "").replace("-", "")
        for kind, method in NAMES.items():
            if kind in plain:
                return name, method
    return None


def of_content(config: Fields, tensors: Iterable[str]) -> tuple[str, Method] | None:
    """The key or the tensor that belongs to another method, and the method.

    A whole model may have tensors of a drafter beside its own: all but a fusion must be the drafter's.
    """
    for key, method in KEYS.items():
        if key in config:
            return key, method
    names = sorted(tensors)
    for prefix, method in PREFIXES.items():
        own = [name for name in names if name.removeprefix("model.").startswith(prefix)]
        if own and not any(name.startswith("model.layers.") for name in names):
            return own[0], method
    return None
