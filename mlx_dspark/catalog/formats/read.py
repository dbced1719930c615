"""Which packaging a drafter folder is, decided by its content, and the one way to read it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from mlx_dspark.catalog.formats import (
    agreement,
    deepspec,
    dflash2,
    lfm2,
    markers,
    nemotron,
    nvfp4,
    packing,
    prism,
    qwen35,
    refusals,
    specforge,
    speculators,
    zlab,
)
from mlx_dspark.catalog.formats.base import DrafterCheckpoint
from mlx_dspark.catalog.formats.fields import Fields, read_config
from mlx_dspark.catalog.formats.tensors import read_tensors, tensor_names
from mlx_dspark.catalog.gguf.drafter import converted, gguf_file
from mlx_dspark.catalog.reading import reading
from mlx_dspark.compat.mlx_lm_models import knows_model_type
from mlx_dspark.foundation.errors import ModelNotFound, UnsupportedModel
from mlx_dspark.foundation.paths import default_cache_dir

ADAPTERS = (deepspec, dflash2, zlab, speculators, specforge, nemotron, qwen35, lfm2, prism)

_WHOLE_MODELS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")

ORDINARY = {
    "enable_qwen35_gated_q_proj": False,
    "attention_sink_bias": False,
    "dflash_query_causal": False,
    "dspark_bonus_anchor": False,
    "dspark_fixup_head_type": False,
    "rope_is_neox_style": True,
    "causal": False,
    "use_swa": False,
}
"""Keys of heads for hybrid targets, on top or in `dflash_config`, with the value that changes nothing. Any
other value is math that is not built here, and ignoring it would draft noise."""


def read_drafter(path: Path, *, cache_dir: Path | None = None, values: bool = True) -> DrafterCheckpoint:
    """Read a drafter checkpoint: its config, checked, and its weights, checked against it.

    `path` is a folder or a GGUF file, or a folder with nothing but one; that is converted once and kept in
    `cache_dir` (None: the program's own). Without `values` no number of a matrix is read, so NaN in one goes
    unseen: names and shapes are checked. Raises ModelNotFound, BadCheckpoint or UnsupportedModel; each names
    the file, key or tensor.
    """
    with reading(path):
        if not path.exists():
            raise ModelNotFound(f"There is no drafter at {path}.", "Check the path.", field="drafter")
        packed_file = gguf_file(path)
    if packed_file is not None:
        path = converted(packed_file, default_cache_dir() if cache_dir is None else cache_dir)
    return _read_folder(path, values)


def _read_folder(folder: Path, values: bool) -> DrafterCheckpoint:
    with reading(folder):
        config = read_config(folder)
    _refuse_other_methods(config, folder)
    _refuse_language_model(config)
    _refuse_other_packagings(config)
    stored, four_bits = packing.declared(config), nvfp4.declared(config)
    kinds = packing.DTYPES if stored is not None else nvfp4.DTYPES if four_bits else frozenset()
    weights, files = read_tensors(folder, packed=kinds, values=values)
    packed = None
    if four_bits:
        weights = nvfp4.unpacked(weights, folder)
    if stored is not None:
        weights, packed = packing.unpacked(weights, stored, folder)
    _refuse_markov_hybrid(config, weights)
    found = _adapter(config).read(config, weights, files)
    agreement.check(config, found.packaging, found.config)
    return replace(found, packed=packed)


def _refuse_language_model(config: Fields) -> None:
    """Ahead of every other check: its quantization or its draft-like keys are not what is wrong with it."""
    if any(adapter.claims(config) for adapter in ADAPTERS):
        return
    names = config.texts("architectures")
    whole = [name for name in names if name.endswith(_WHOLE_MODELS) and "Draft" not in name]
    kind = config.text("model_type", "")
    if whole or (not names and kind and knows_model_type({"model_type": kind})):
        raise UnsupportedModel(
            f"{config.file.parent} is a language model ({', '.join(whole) or kind}), not a drafter.",
            "Name it with --model, or where it is to draft, with --draft-model; --drafter takes a DSpark or "
            "DFlash drafter that was made for the model.",
            field="drafter",
        )


def is_of_another_method(folder: Path) -> bool:
    """Whether the folder holds a drafter of a method that is not run. Raises BadCheckpoint for its config.

    A whole model may bear the name of such a method, and only what else it holds tells.
    """
    config = read_config(folder)
    if any(name.endswith(_WHOLE_MODELS) for name in config.texts("architectures")):
        return refusals.of_content(config, tensor_names(folder)) is not None
    return _other_method(config, folder) is not None


def _other_method(config: Fields, folder: Path) -> tuple[str, refusals.Method] | None:
    """Where no packaging claims the folder, its keys and tensors may still name another method."""
    if any(adapter.claims(config) for adapter in ADAPTERS):
        return None
    return refusals.named(config) or refusals.of_content(config, tensor_names(folder))


def _refuse_other_methods(config: Fields, folder: Path) -> None:
    if (found := _other_method(config, folder)) is not None:
        _refuse_method(config, *found)


def _refuse_method(config: Fields, sign: str, method: refusals.Method) -> NoReturn:
    _refuse(config.file, f"a drafter of another kind ({sign}): {method.name}", why=method.why)


def _refuse_other_packagings(config: Fields) -> None:
    """In the order of drafter-formats 0.11; each is named, so that the user knows what he has."""
    where = config.file
    if markers.speculators(config):
        speculators.algorithm_of(config)
    for key in ("quantization", "quantization_config"):
        known = packing.declared(config) if key == packing.KEY else nvfp4.declared(config)
        if key in config and not known:
            method = config.section(key).values.get("quant_method", "already quantized")
            _refuse(where, f"a quantized drafter ({key}: {method})", field=key)
    if any(key.startswith("dspark_") for key in config.values) and "block_size" not in config:
        _refuse(where, *refusals.EMBEDDED)
    _refuse_by_dflash_section(config)
    _refuse_unknown_math(config)
    if not markers.elsewhere(config):
        _refuse_by_name(config)
    elif config.text("model_type", "") == markers.NATIVE:
        _refuse(where, *refusals.NATIVE, field="model_type")


def _refuse_unknown_math(config: Fields) -> None:
    known = markers.known_keys(config)
    sections = ("dflash_config", speculators.BACKBONE)
    for key, ordinary in ORDINARY.items():
        for values in (config.values, *(config.section(name).values for name in sections)):
            if key not in known and values.get(key, ordinary) is not ordinary:
                _refuse(config.file, f"a head for hybrid targets ({key})", field=key)


def _refuse_by_dflash_section(config: Fields) -> None:
    dflash = config.section("dflash_config")
    if "projector_type" in dflash and not markers.specforge(config):
        kind = dflash.text("projector_type", "")
        _refuse(config.file, f"a drafter in the SpecForge packaging (projector_type {kind!r})")


def _refuse_by_name(config: Fields) -> None:
    if (found := refusals.named(config)) is not None:
        _refuse_method(config, *found)
    for name in config.texts("architectures"):
        if "DSpark" in name and name not in deepspec.ARCHITECTURES and not markers.lfm2(config):
            _refuse(config.file, f"a DSpark variant ({name})")


def _refuse_markov_hybrid(config: Fields, weights: Iterable[str]) -> None:
    markov = config.whole("markov_rank", 0, low=0) or any("markov_head." in name for name in weights)
    dflash = zlab.claims(config) or dflash2.claims(config)
    if markov and dflash and not deepspec.claims(config):
        _refuse(config.file, *refusals.HYBRID)


def _adapter(config: Fields):
    heads = sorted({name for name in config.texts("architectures") if "DSpark" in name or "DFlash" in name})
    if len(heads) > 1:
        _refuse(config.file, f"of several heads at once ({', '.join(heads)})", field="architectures")
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


def _refuse(where: Path, what: str, why: str = "", field: str = "drafter") -> NoReturn:
    reason = f": {why}" if why else ""
    raise UnsupportedModel(
        f"{where} is {what}, which is not supported{reason}.",
        "Use another DSpark or DFlash drafter, lookup drafting, or none.",
        field=field,
    )
