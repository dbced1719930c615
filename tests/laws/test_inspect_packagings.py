"""`inspect` tells every packaging as its reader has it, and why one is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlx_dspark.catalog import default_model
from mlx_dspark.catalog.formats import read_drafter
from mlx_dspark.catalog.shipped import HOME
from mlx_dspark.cli.main import run
from mlx_dspark.foundation.errors import DsparkError
from tests import tiny_packagings as others
from tests import tiny_variants as hybrids
from tests.tiny import save_tiny, tiny_config
from tests.tiny_dflash2 import save_tiny_dflash2
from tests.tiny_drafters import save_tiny_dflash, save_tiny_dspark
from tests.tiny_gguf import save_tiny_gguf

TAPS = (0, 1)
BORROWED = {"own_embedding": False, "own_head": False}


@pytest.fixture(autouse=True)
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(tmp_path / "cache"))


def inspected(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code = run(["inspect", str(path), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == (0 if told["live"] else 2)
    return told


@dataclass(frozen=True)
class Packaged:
    """How a head is written, and what must be told of it."""

    write: Callable[[Path], Path]
    packaging: str
    first_slot: int = 0
    taps: tuple[int, ...] = TAPS


def _from_native(write: Callable[..., Path], **options: Any) -> Callable[[Path], Path]:
    return lambda home: write(save_tiny_dspark(home / "native", taps=TAPS, **options), home / "head")


def _hybrid(write: Callable[..., Path]) -> Callable[[Path], Path]:
    return _from_native(lambda old, new: write(old, new, same=False))


def _prism_gguf(home: Path) -> Path:
    folder = hybrids.save_prism(save_tiny_dspark(home / "native", taps=TAPS), home / "head", same=False)
    return hybrids.save_prism_gguf(folder, home / "alone" / "head.gguf")


PACKAGINGS = {
    "deepspec": Packaged(lambda home: save_tiny_dspark(home / "head", taps=TAPS), "deepspec"),
    "deepspec, silent anchor": Packaged(
        lambda home: save_tiny_dspark(home / "head", taps=TAPS, logits_start=1), "deepspec", 1
    ),
    "zlab": Packaged(lambda home: save_tiny_dflash(home / "head", taps=TAPS), "z-lab DFlash", 1),
    "dflash2": Packaged(lambda home: save_tiny_dflash2(home / "head", taps=TAPS), "DFlash 2", 1),
    "speculators": Packaged(_from_native(others.as_speculators), "speculators"),
    "speculators, dflash": Packaged(
        lambda home: others.save_tiny_speculators(home / "head", algorithm="dflash", taps=TAPS),
        "speculators",
        1,
    ),
    "specforge": Packaged(_from_native(others.as_specforge, **BORROWED), "SpecForge"),
    "nemotron": Packaged(lambda home: others.save_tiny_nemotron(home / "head", taps=TAPS), "Nemotron", 1),
    "qwen3_5": Packaged(_hybrid(hybrids.save_qwen35), "Qwen 3.5 native"),
    "lfm2": Packaged(_hybrid(hybrids.save_lfm2), "LFM2"),
    "nvfp4": Packaged(_hybrid(hybrids.save_nvfp4), "deepspec"),
    "prism": Packaged(_hybrid(hybrids.save_prism), "PrismML"),
    "prism, GGUF": Packaged(_prism_gguf, "PrismML"),
    "prism, GGUF in a folder": Packaged(lambda home: _prism_gguf(home).parent, "PrismML"),
    "shipped": Packaged(lambda _: HOME / default_model.NAME, "deepspec", 0, (1, 7, 14, 20, 27)),
}


@pytest.mark.parametrize("name", PACKAGINGS)
def test_every_packaging_is_told_as_its_reader_has_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packaged = PACKAGINGS[name]
    path = packaged.write(tmp_path)
    found, config = inspected(path, capsys), read_drafter(path).config
    facts = found["facts"]
    assert (found["kind"], found["live"], found["refused"]) == ("drafter", True, "")
    assert facts["packaging"] == read_drafter(path).packaging == packaged.packaging
    assert facts["taps"] == list(config.taps) == list(packaged.taps)
    assert facts["first_slot"] == config.first_slot == packaged.first_slot
    assert ("slot 0" in facts["slot_rule"]) == (packaged.first_slot == 0)
    assert (facts["block_size"], facts["max_draft"]) == (config.block_size, config.max_draft)
    assert facts["family"] == config.family
    assert facts["bytes"] > 0
    assert run(["inspect", str(path)]) == 0
    told = capsys.readouterr().out
    assert f"packaging          {packaged.packaging}\n" in told
    assert f"taps               {', '.join(map(str, packaged.taps))}\n" in told


def changed(folder: Path, **values: Any) -> Path:
    """The folder, its config.json changed; None leaves a key out."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | values
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    return folder


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "eagle3": (
        lambda home: changed(save_tiny_dspark(home), architectures=["Eagle3LlamaForCausalLM"]),
        "an EAGLE-3 head.*token by token",
    ),
    "mtp": (
        lambda home: changed(save_tiny_dspark(home), architectures=["Qwen3NextMTP"]),
        "multi-token prediction",
    ),
    "medusa": (
        lambda home: changed(
            save_tiny_dspark(home), architectures=None, target_layer_ids=None, medusa_num_heads=4
        ),
        "a Medusa head.*without a block",
    ),
    "quantized otherwise": (
        lambda home: changed(save_tiny_dspark(home), quantization_config={"quant_method": "fp8"}),
        "a quantized drafter.*fp8",
    ),
    "unknown math": (
        lambda home: changed(save_tiny_dspark(home), rope_is_neox_style=False),
        "rope_is_neox_style",
    ),
    "another DSpark": (
        lambda home: changed(save_tiny_dspark(home), architectures=["NewDSparkModel"]),
        "NewDSparkModel",
    ),
    "a slot rule that contradicts itself": (
        lambda home: changed(
            others.as_nemotron(save_tiny_dspark(home / "native", logits_start=1), home / "head"),
            sample_from_anchor=True,
        ),
        "anchor",
    ),
    "taps beyond the target": (
        lambda home: changed(save_tiny_dspark(home), target_layer_ids=[0, 99]),
        "target_layer_ids",
    ),
    "GGUF without taps": (
        lambda home: hybrids.save_prism_gguf(
            save_tiny_dspark(home), home / "head.gguf", metadata={"dspark.dspark.target_layers": None}
        ),
        "target_layers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_drafter_that_is_refused_is_told_as_one_with_the_readers_reason(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write, reason = REFUSED[name]
    path = write(tmp_path / "home")
    found = inspected(path, capsys)
    assert (found["kind"], found["live"]) == ("drafter", False)
    assert re.search(reason, found["refused"])
    with pytest.raises(DsparkError) as refused:
        read_drafter(path)
    assert found["refused"] == str(refused.value)


def _gguf_model(home: Path) -> Path:
    save_tiny_gguf(home / "model.gguf", family="qwen3")
    return home / "model.gguf"


MODELS: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "mlx-lm": (lambda home: save_tiny(home / "model", "qwen3"), {"architecture": "qwen3"}),
    "with the name of a method": (
        lambda home: changed(save_tiny(home / "model", "qwen3"), architectures=["MiMoForCausalLM"]),
        {"architecture": "qwen3"},
    ),
    "GGUF": (
        _gguf_model,
        {"architecture": "qwen3"},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_target_is_told_as_one(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write, values = MODELS[name]
    found = inspected(write(tmp_path / "home"), capsys)
    assert (found["kind"], found["live"], found["facts"]["pair"]) == ("model", True, None)
    config = tiny_config("qwen3")
    values = values | {"hidden_size": config["hidden_size"], "layers": config["num_hidden_layers"]}
    assert {key: found["facts"][key] for key in values} == values
    assert found["facts"]["no_pair_because"]


@pytest.mark.weights
def test_the_default_model_is_told_with_its_pair(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MLX_DSPARK_CACHE_DIR")
    found = inspected(Path(default_model.NAME), capsys)
    facts = found["facts"]
    assert (found["kind"], found["live"], facts["pair"]) == ("model", True, default_model.NAME)
    assert facts["drafters"] == {"dspark": f"shipped:{default_model.NAME}"}
    assert (facts["architecture"], facts["layers"]) == ("llama", 30)
