"""Which row of the registry a model on this machine belongs to, and why none does.

docs/decisions/013-how-a-pair-is-matched.md gives the rule and its reasons.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import metadata_load

from mlx_dspark.catalog.folder import read_config
from mlx_dspark.catalog.pairs import Pair
from mlx_dspark.catalog.resolve import ModelRef
from mlx_dspark.catalog.vocabulary import vocabulary_hash
from mlx_dspark.foundation.numbers import is_whole

Proof = Literal["", "target", "parent"]
NUMBERS = ("architecture", "hidden_size", "layers", "vocabulary")
_NOT_CONVERSIONS = ("finetune", "adapter", "merge")


@dataclass(frozen=True)
class ModelFacts:
    """What a row is compared with. None or empty: not known.

    `origin` is the hub id it was fetched as or lies under in a model folder, `parents` the models that its
    card says it was made from, `relation` what the card calls that; `converted`: it is stored as MLX stores
    conversions.
    """

    origin: str | None = None
    parents: tuple[str, ...] = ()
    relation: str | None = None
    converted: bool = False
    architecture: str | None = None
    hidden_size: int | None = None
    layers: int | None = None
    vocabulary: str | None = None
    bits: int | None = None


@dataclass(frozen=True)
class Match:
    """The outcome for a model. `near` has the model's numbers, and no proof that it is the same model."""

    pair: Pair | None
    how: Proof = ""
    near: Pair | None = None
    reason: str = ""
    """Why there is none, as a sentence."""


def facts_of(found: ModelRef, *, with_vocabulary: bool = True) -> ModelFacts:
    """The facts of a resolved model; hashing a large vocabulary takes a moment.

    Raises BadCheckpoint for a folder without a readable config.json.
    """
    fetched = found.source == found.name and "/" in found.source
    origin = found.source if fetched else found.placed_as
    if found.packaging != "folder":
        return ModelFacts(origin)
    config = read_config(found.path)
    nested = config.get("text_config")
    text: dict[str, Any] = nested if isinstance(nested, dict) else {}
    quantization = config.get("quantization")
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    card = _card(found.path)
    tags = card.get("tags")
    is_mlx = card.get("library_name") == "mlx" or "mlx" in (tags if isinstance(tags, list) else ())
    relation = card.get("base_model_relation")
    return ModelFacts(
        origin=origin,
        parents=_texts(card.get("base_model")),
        relation=relation if isinstance(relation, str) else None,
        converted=is_mlx or isinstance(quantization, dict),
        architecture=config["model_type"],
        hidden_size=_whole(config, text, "hidden_size"),
        layers=_whole(config, text, "num_hidden_layers"),
        vocabulary=vocabulary_hash(found.path) if with_vocabulary else None,
        bits=bits if is_whole(bits) else None,
    )


def match(facts: ModelFacts, pairs: Iterable[Pair]) -> Match:
    """The row that `facts` belong to: the same numbers, and the row's target itself or a conversion of what
    that was made from. Of several, the one with the model's number of bits, else the first."""
    pairs = [pair for pair in pairs if pair.target != pair.id]
    proven: list[tuple[Pair, Proof]] = [(pair, how) for pair in pairs if (how := _proof(facts, pair)) != ""]
    fitting: list[tuple[Pair, Proof]] = [(pair, how) for pair, how in proven if not _differences(facts, pair)]
    if fitting:
        exact = [one for one in fitting if one[1] == "target"]
        wide = [one for one in fitting if one[0].bits is not None and one[0].bits == facts.bits]
        pair, how = (exact or wide or fitting)[0]
        return Match(pair, how)
    if proven:
        pair = proven[0][0]
        other = " and ".join(_differences(facts, pair))
        return Match(None, near=pair, reason=f"it is recorded as {pair.id}, but {other}")
    near = next((pair for pair in pairs if _same_numbers(facts, pair)), None)
    if near is None:
        return Match(None, reason="no known pair has such a target")
    return Match(None, near=near, reason=f"it has the numbers of {near.id}, but {_unproven(facts, near)}")


def _proof(facts: ModelFacts, pair: Pair) -> Proof:
    known = {name.lower() for name in (pair.target, *pair.parents)}
    if facts.origin is not None and facts.origin.lower() in known:
        return "target"
    named = len(facts.parents) == 1 and facts.parents[0].lower() in known
    quantized = facts.relation == "quantized" or (facts.relation is None and facts.converted)
    return "parent" if named and quantized else ""


def _differences(facts: ModelFacts, pair: Pair) -> list[str]:
    """What the row says and the model contradicts; what either does not know is no contradiction."""
    return [
        f"its {name.replace('_', ' ')} is {getattr(facts, name)}, not {getattr(pair, name)}"
        for name in NUMBERS
        if None not in (getattr(facts, name), getattr(pair, name))
        and getattr(facts, name) != getattr(pair, name)
    ]


def _same_numbers(facts: ModelFacts, pair: Pair) -> bool:
    stated = [name for name in NUMBERS if getattr(pair, name) is not None]
    return len(stated) > 1 and all(getattr(facts, name) == getattr(pair, name) for name in stated)


def _unproven(facts: ModelFacts, near: Pair) -> str:
    if not facts.parents:
        return "nothing records what it was made from"
    if facts.relation in _NOT_CONVERSIONS:
        return f"its card calls it a {facts.relation} of {', '.join(facts.parents)}"
    named = {name.lower() for name in facts.parents} <= {near.target.lower(), *map(str.lower, near.parents)}
    if named:
        return f"its card does not say that it is {', '.join(facts.parents)} and no fine-tune of it"
    return f"it was made from {', '.join(facts.parents)}"


def _card(folder: Path) -> dict[str, Any]:
    """The YAML at the head of README.md; empty where there is none that can be read."""
    file = folder / "README.md"
    if not file.is_file():
        return {}
    import yaml

    try:
        card = metadata_load(file)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return card if isinstance(card, dict) else {}


def _texts(value: object) -> tuple[str, ...]:
    listed = value if isinstance(value, list) else [value]
    return tuple(each for each in listed if isinstance(each, str) and each)


def _whole(config: dict[str, Any], text: dict[str, Any], name: str) -> int | None:
    value = config.get(name, text.get(name))
    return value if is_whole(value) else None
