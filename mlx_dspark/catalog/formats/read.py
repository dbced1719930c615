"""Which packaging a drafter folder is, decided by its content, and the one way to read it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from mlx_dspark.catalog.formats import deepspec, packing, zlab
from mlx_dspark.catalog.formats.base import DrafterCheckpoint
from mlx_dspark.catalog.formats.fields import Fields, read_config
from mlx_dspark.catalog.formats.tensors import read_tensors
from mlx_dspark.catalog.reading import reading
from mlx_dspark.compat.mlx_lm_models import knows_model_type
from mlx_dspark.foundation.errors import ModelNotFound, UnsupportedModel

ADAPTERS = (deepspec, zlab)

_WHOLE_MODELS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")

OTHER_KINDS = ("eagle", "mtp", "laguna", "mimo", "muse_glimmer_assistant", "dfly", "medusa")
"""Other drafting methods, found in `architectures` or `model_type`."""

ORDINARY = {
    "enable_qwen35_gated_q_proj": False,
    "attention_sink_bias": False,
    "dflash_query_causal": False,
    "dspark_bonus_anchor": False,
    "dspark_fixup_head_type": False,
    "rope_is_neox_style": True,
    "causal": False,
}
"""Keys of heads for hybrid targets, on top or in `dflash_config`, with the value that changes nothing. Any
other value is math that is not built here, and ignoring it would draft noise."""


def read_drafter(folder: Path, *, values: bool = True) -> DrafterCheckpoint:
    """Read a drafter checkpoint: its config, checked, and its weights, checked against it.

    Without `values` no number of a matrix is read, so NaN in one goes unseen: names and shapes are checked.

    Raises ModelNotFound, BadCheckpoint or UnsupportedModel; each names the file, key or tensor.
    """
    with reading(folder):
        if not folder.exists():
            raise ModelNotFound(f"There is no drafter at {folder}.", "Check the path.", field="drafter")
        if _is_gguf(folder):
            _refuse(folder, "a GGUF file and no drafter folder")
        config = read_config(folder)
    _refuse_language_model(config)
    _refuse_other_packagings(config)
    stored = packing.declared(config)
    weights, files = read_tensors(folder, packed=stored is not None, values=values)
    packed = None
    if stored is not None:
        weights, packed = packing.unpacked(weights, stored, folder)
    _refuse_markov_hybrid(config, weights)
    return replace(_adapter(config).read(config, weights, files), packed=packed)


def _refuse_language_model(config: Fields) -> None:
    """Ahead of every other check: its quantization or its draft-like keys are not what is wrong with it."""
    if any(adapter.claims(config) for adapter in ADAPTERS) or "speculators_config" in config:
        return
    names = config.texts("architectures")
    whole = [name for name in names if name.endswith(_WHOLE_MODELS) and "Draft" not in name]
    kind = config.text("model_type", "")
    if whole or (not names and kind and knows_model_type({"model_type": kind})):
        raise UnsupportedModel(
            f"{config.file.parent} is a language model ({', '.join(whole) or kind}), not a drafter.",
            "Name it with --model, and a DSpark or DFlash drafter made for it with --drafter.",
            field="drafter",
        )


def _is_gguf(path: Path) -> bool:
    if path.is_file():
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    return not (path / "config.json").exists() and any(path.glob("*.gguf"))


def _refuse_other_packagings(config: Fields) -> None:
    """In the order of drafter-formats 0.11; each is named, so that the user knows what he has."""
    where = config.file
    speculators = config.section("speculators_config")
    if speculators.values or "speculators_model_type" in config:
        algorithm = config.text("speculators_model_type", speculators.text("algorithm", "unknown"))
        _refuse(where, f"a drafter in the speculators packaging (algorithm {algorithm!r})")
    for key in ("quantization", "quantization_config"):
        if key in config and not (key == packing.KEY and packing.declared(config)):
            method = config.section(key).values.get("quant_method", "already quantized")
            _refuse(where, f"a quantized drafter ({key}: {method})", key)
    if any(key.startswith("dspark_") for key in config.values) and "block_size" not in config:
        _refuse(where, "a full model with an embedded drafter")
    _refuse_by_dflash_section(config)
    for key, ordinary in ORDINARY.items():
        for values in (config.values, config.section("dflash_config").values):
            if values.get(key, ordinary) is not ordinary:
                _refuse(where, f"a head for hybrid targets ({key})", key)
    _refuse_by_name(config)


def _refuse_by_dflash_section(config: Fields) -> None:
    architectures, dflash = config.texts("architectures"), config.section("dflash_config")
    if "DFlash2DraftModel" in architectures or "selector_rank" in dflash:
        _refuse(config.file, "a DFlash 2 drafter")
    if "projector_type" in dflash:
        kind = dflash.text("projector_type", "")
        _refuse(config.file, f"a drafter in the SpecForge packaging (projector_type {kind!r})")
    named = ", ".join(name for name in architectures if "DSpark" in name)
    if named and "target_layer_ids" in dflash and "target_layer_ids" not in config:
        _refuse(config.file, f"a DSpark head with its taps inside dflash_config ({named})")


def _refuse_by_name(config: Fields) -> None:
    names = (*config.texts("architectures"), config.text("model_type", ""))
    for name in names:
        for kind in OTHER_KINDS:
            if kind.replace("_", "") in name.lower().replace("_", ""):
                _refuse(config.file, f"a drafter of another kind ({name})")
        if "DSpark" in name and name not in deepspec.ARCHITECTURES:
            _refuse(config.file, f"a DSpark variant ({name})")


def _refuse_markov_hybrid(config: Fields, weights: Iterable[str]) -> None:
    markov = config.whole("markov_rank", 0, low=0) or any("markov_head." in name for name in weights)
    if markov and zlab.claims(config) and not deepspec.claims(config):
        _refuse(config.file, "a DFlash head with a Markov head")


def _adapter(config: Fields):
    claimants = [adapter for adapter in ADAPTERS if adapter.claims(config)]
    if len(claimants) > 1:
        names = " and ".join(adapter.PACKAGING for adapter in claimants)
        raise UnsupportedModel(
            f"{config.file} claims to be of two packagings, {names}.",
            "Remove the keys of one of them.",
            field="architectures",
        )
    if not claimants:
        wanted = f"architectures, dflash_config, {', '.join(deepspec.SLOT_KEYS)}"
        raise UnsupportedModel(
            f"{config.file} is not of a known drafter packaging (looked for {wanted}).",
            "Give the folder of a DSpark or DFlash drafter.",
            field="drafter",
        )
    return claimants[0]


def _refuse(where: Path, what: str, field: str = "drafter") -> NoReturn:
    raise UnsupportedModel(
        f"{where} is {what}, which is not supported.",
        "Use a DSpark (DeepSpec) or DFlash (z-lab) drafter, lookup drafting, or none.",
        field=field,
    )
