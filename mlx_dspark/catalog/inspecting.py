"""What a drafter or a model is, and whether it would run, from its config and the heads of its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_dspark.catalog.checkpoint import stored_model
from mlx_dspark.catalog.config_faults import check_numbers
from mlx_dspark.catalog.folder import check_folder, is_drafter_config, read_config, weight_files
from mlx_dspark.catalog.formats import read_drafter
from mlx_dspark.catalog.formats.base import DrafterCheckpoint
from mlx_dspark.catalog.formats.read import is_of_another_method
from mlx_dspark.catalog.gguf.drafter import ARCHITECTURE as DRAFTER_ARCHITECTURE
from mlx_dspark.catalog.gguf.drafter import gguf_file
from mlx_dspark.catalog.gguf.file import open_gguf
from mlx_dspark.catalog.hub import described_repository
from mlx_dspark.catalog.matching import Match, ModelFacts, facts_of, match
from mlx_dspark.catalog.pairs import SHIPPED, Pair
from mlx_dspark.catalog.resolve import ModelRef
from mlx_dspark.catalog.shipped import HOME
from mlx_dspark.foundation.errors import DsparkError


@dataclass(frozen=True)
class Finding:
    """What was found. `kind` is drafter or model; `facts` are JSON values by name, None where not known;
    `live` says whether it would run, and `refused` why not."""

    kind: str
    name: str
    live: bool
    refused: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def is_drafter(found: ModelRef) -> bool:
    """Whether it is a drafter, and not a language model, going by its config and the names of its tensors.

    A drafter names taps, masks or a drafting method, or is of a method that is not run. Raises BadCheckpoint.
    """
    if (packed := gguf_file(found.path)) is not None:
        try:
            return open_gguf(packed).need("general.architecture") == DRAFTER_ARCHITECTURE
        except DsparkError:
            return False
    config = read_config_or_nothing(found.path)
    if is_drafter_config(config):
        return True
    return bool(config) and is_of_another_method(found.path)


def read_config_or_nothing(folder: Path) -> dict[str, Any]:
    """config.json; drafters may name no model_type. Raises BadCheckpoint."""
    from mlx_dspark.catalog.folder import read_json

    file = folder / "config.json"
    return read_json(file) if file.is_file() else {}


def inspect_drafter(found: ModelRef, pairs: Sequence[Pair]) -> Finding:
    """A drafter's numbers. No matrix is read; one that cannot be used is a finding and no error."""
    names = {found.source, f"{SHIPPED}{found.path.name}" if found.path.parent == HOME else found.source}
    rows = [pair for pair in pairs if names & {*pair.drafters.values()}]
    matched = {"registered_for": [pair.id for pair in rows]}
    try:
        checkpoint = read_drafter(found.path, values=False)
    except DsparkError as error:
        config = read_config_or_nothing(found.path) if found.path.is_dir() else {}
        facts = {"architectures": config.get("architectures"), "model_type": config.get("model_type")}
        return Finding("drafter", found.name, False, str(error), facts | matched)
    return Finding("drafter", found.name, True, "", drafter_facts(checkpoint) | matched)


def drafter_facts(checkpoint: DrafterCheckpoint) -> dict[str, Any]:
    """What a drafter is, in numbers and words."""
    config = checkpoint.config
    slots = (
        "slot 0 (the anchor's) predicts too"
        if config.first_slot == 0
        else f"slots from {config.first_slot} on predict"
    )
    return {
        "packaging": checkpoint.packaging,
        "family": config.family,
        "backbone": config.backbone,
        "layers": config.layers,
        "hidden_size": config.hidden,
        "taps": list(config.taps),
        "block_size": config.block_size,
        "slot_rule": slots,
        "first_slot": config.first_slot,
        "max_draft": config.max_draft,
        "causal_layers": [i for i, causal in enumerate(config.layer_causal) if causal],
        "windows": list(config.layer_windows),
        "rope": {"kind": config.rope_kind, "theta": config.rope_theta, **config.rope_options},
        "heads": {
            "markov": config.markov,
            "markov_rank": config.markov_rank,
            "confidence": config.confidence,
            "embedding": "its own" if config.own_embedding else "the target's",
            "output": "its own" if config.own_head else "the target's",
        },
        "mask_token": config.mask_token,
        "vocabulary": config.vocab,
        "draft_vocabulary": config.draft_vocab,
        "vocabulary_map": "d2t" if checkpoint.d2t is not None else "none: ids are the target's",
        "precision": _precision(checkpoint),
        "target_layers": config.target_layers,
        "bytes": sum(file.stat().st_size for file in checkpoint.files),
    }


def _precision(checkpoint: DrafterCheckpoint) -> str:
    if checkpoint.packed is not None:
        packing = checkpoint.packed.packing
        return f"{packing.bits} bits, groups of {packing.group_size}"
    matrices = [weight.dtype for weight in checkpoint.weights.values() if weight.ndim > 1]
    return ", ".join(sorted({str(dtype).removeprefix("mlx.core.") for dtype in matrices}))


def inspect_model(found: ModelRef, pairs: Sequence[Pair], accept: Any) -> Finding:
    """A target's numbers and its row. `accept` is given the model, none of whose matrices is read, and its
    config, and raises where it would not run."""
    if found.packaging == "gguf":
        return _inspect_gguf(found, accept)
    facts = facts_of(found)
    outcome = match(facts, pairs)
    values = model_facts(facts) | matched_values(outcome)
    try:
        values["bytes"] = sum(shard.stat().st_size for shard in weight_files(found.path))
        accept(*stored_model(found.path, check_folder(found.path)))
    except DsparkError as error:
        return Finding("model", found.name, False, str(error), values)
    return Finding("model", found.name, True, "", values)


def inspect_description(name: str, size: int, pairs: Sequence[Pair], accept: Any) -> Finding:
    """As `inspect_model`, for a hub repository of which only the small files are here; `size` is that of its
    weights in bytes. `accept` is given the config."""
    folder = described_repository(name)
    found = ModelRef(name, folder, "folder", name)
    facts = facts_of(found)
    values = model_facts(facts) | matched_values(match(facts, pairs)) | {"bytes": size, "fetched": False}
    try:
        config = read_config(folder)
        check_numbers(folder, config)
        accept(config)
    except DsparkError as error:
        return Finding("model", name, False, str(error), values)
    return Finding("model", name, True, "", values)


def model_facts(facts: ModelFacts) -> dict[str, Any]:
    """What a model is compared by."""
    return {
        "architecture": facts.architecture,
        "hidden_size": facts.hidden_size,
        "layers": facts.layers,
        "bits": facts.bits,
        "vocabulary_hash": facts.vocabulary,
        "hub_id": facts.origin,
        "made_from": list(facts.parents),
        "relation": facts.relation,
    }


def matched_values(outcome: Match) -> dict[str, Any]:
    """The registry's answer for a model."""
    pair = outcome.pair
    return {
        "pair": None if pair is None else pair.id,
        "matched_by": outcome.how or None,
        "mode": None if pair is None else pair.mode,
        "drafters": {} if pair is None else dict(pair.drafters),
        "no_pair_because": outcome.reason or None,
    } | ({} if pair is None else {"recorded": pair.recorded()})


def _inspect_gguf(found: ModelRef, accept: Any) -> Finding:
    from mlx_dspark.catalog.gguf.layouts import gguf_config
    from mlx_dspark.catalog.gguf.model import build_model
    from mlx_dspark.catalog.shipped import shipped_drafter

    try:
        config = gguf_config(open_gguf(found.path))
        shipped = shipped_drafter(found)
        values = {
            "architecture": config.get("model_type"),
            "hidden_size": config.get("hidden_size"),
            "layers": config.get("num_hidden_layers"),
            "pair": None if shipped is None else shipped.name,
            "drafters": {} if shipped is None else {"dspark": f"shipped:{shipped.name}"},
            "no_pair_because": "a GGUF file is matched by its content alone" if shipped is None else None,
        }
        accept(build_model(open_gguf(found.path), config), config)
    except DsparkError as error:
        return Finding("model", found.name, False, str(error))
    return Finding("model", found.name, True, "", values)
