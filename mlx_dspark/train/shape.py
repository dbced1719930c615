"""What a new drafter looks like: the few choices there are, and what follows from its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mlx_dspark.contracts import TargetSpec
from mlx_dspark.foundation.errors import UsageError

Markov = Literal["none", "vanilla", "gated", "rnn"]

MOST_TAPS = 5
RARE = 1e-5
"""Share of the sample up to which a token's frequency says little."""

SMALL, MEDIUM = 1024, 2048
"""Targets of less hidden width get a cheaper drafter."""


@dataclass(frozen=True)
class DrafterShape:
    """The choices. `draft_vocab` None is the target's whole vocabulary.

    `own_embedding` and `own_head` say whether the drafter carries copies of the target's tables or borrows
    the target's own; a reduced vocabulary needs a head of its own.
    """

    layers: int
    block_size: int
    taps: tuple[int, ...]
    markov: Markov
    markov_rank: int
    confidence: bool
    draft_vocab: int | None
    own_embedding: bool
    own_head: bool

    def __post_init__(self) -> None:
        if (self.markov == "none") != (self.markov_rank == 0):
            raise UsageError(
                f"markov is {self.markov!r}, and markov_rank is {self.markov_rank}.",
                "Give a head and a rank above 0, or neither.",
                field="markov_rank",
            )
        if self.draft_vocab is not None and not self.own_head:
            raise UsageError(
                f"draft_vocab is {self.draft_vocab}, and the head is borrowed from the target.",
                "A reduced vocabulary needs a head of its own: use --own-head, or leave draft_vocab out.",
                field="draft_vocab",
            )


def default_shape(spec: TargetSpec) -> DrafterShape:
    """A drafter in proportion: its cost per round has to stay small against its target's.

    Up to a hidden width of 2048 the proposal head is the greater cost, so it is cut to the likely tokens;
    from there on the target's own is borrowed, and the shape is DeepSpec's published one.
    """
    small, medium = spec.hidden < SMALL, spec.hidden < MEDIUM
    kept = 16384 if small else 32768 if medium else spec.vocab
    reduced = kept if kept < spec.vocab else None
    return DrafterShape(
        layers=2 if small else 3 if medium else 5,
        block_size=7,
        taps=spread_taps(spec.layers),
        markov="vanilla",
        markov_rank=64 if small else 128 if medium else 256,
        confidence=True,
        draft_vocab=reduced,
        own_embedding=False,
        own_head=reduced is not None,
    )


def spread_taps(layers: int) -> tuple[int, ...]:
    """Target layers to tap, evenly from the second to the third from last, as DeepSpec's published heads do.

    Shallow targets are tapped everywhere but at the last layer, whose output DeepSpec's packaging refuses.
    """
    if layers >= 2 * MOST_TAPS:
        return tuple(1 + step * (layers - 4) // (MOST_TAPS - 1) for step in range(MOST_TAPS))
    return tuple(range(-1, layers - 1))[-MOST_TAPS:]


def covering_tokens(counts: np.ndarray, size: int) -> np.ndarray:
    """The `size` likeliest token ids in rising order; `counts` `[vocab]` are those of a sample.

    Most frequent first, and after those that are too rare in the sample to be ranked the lowest ids: a
    tokenizer's merges are numbered by their frequency in the text it was made from.
    """
    known = np.where(counts > RARE * counts.sum(), counts, 0)
    return np.sort(np.argsort(-known, kind="stable")[:size])


def mask_token(tokenizer: Any, counts: np.ndarray) -> int:
    """The id that stands for the unknown slots of a block: one that text never holds.

    In order: an embedding row that the tokenizer does not use, as DeepSpec does for Qwen3; a reserved special
    token; the rarest token. `counts` `[vocab]` are token frequencies of the answers.
    """
    vocab = len(counts)
    if len(tokenizer) < vocab:
        return len(tokenizer)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    in_use = {*tokenizer.all_special_ids, *getattr(tokenizer, "eos_token_ids", ())}
    reserved = [int(i) for i in added if i < vocab and i not in in_use and not counts[i]]
    if reserved:
        return max(reserved)
    ranked = counts.astype(np.int64)
    ranked[[token for token in in_use if token < vocab]] = np.iinfo(np.int64).max
    return int(vocab - 1 - np.argmin(ranked[::-1]))


def deepspec_config(
    shape: DrafterShape, spec: TargetSpec, target_config: Mapping[str, Any], mask: int
) -> dict[str, Any]:
    """config.json in DeepSpec's layout; head counts, widths and rope base are the target's.

    `target_config` is the language model's part of the target's own config.json.
    """
    heads = int(target_config.get("num_attention_heads") or max(1, spec.hidden // 64))
    head_dim = int(target_config.get("head_dim") or spec.hidden // heads)
    rope = target_config.get("rope_parameters")
    theta = (rope or {}).get("rope_theta") or target_config.get("rope_theta") or 1e6
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "target_model_type": spec.architecture,
        "hidden_size": spec.hidden,
        "vocab_size": spec.vocab,
        "intermediate_size": int(target_config.get("intermediate_size") or 3 * spec.hidden),
        "num_hidden_layers": shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(target_config.get("num_key_value_heads") or heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": float(target_config.get("rms_norm_eps") or 1e-6),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(theta)},
        "rope_theta": float(theta),
        "max_position_embeddings": spec.context,
        "attention_bias": False,
        "layer_types": ["full_attention"] * shape.layers,
        "block_size": shape.block_size,
        "mask_token_id": mask,
        "target_layer_ids": list(shape.taps),
        "num_target_layers": spec.layers,
        "markov_rank": shape.markov_rank,
        "markov_head_type": "vanilla" if shape.markov == "none" else shape.markov,
        "enable_confidence_head": shape.confidence,
        "confidence_head_with_markov": shape.confidence and shape.markov_rank > 0,
        "tie_word_embeddings": False,
    }
    if shape.draft_vocab is not None and shape.draft_vocab < spec.vocab:
        config["draft_vocab_size"] = shape.draft_vocab
    return config
