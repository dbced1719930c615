"""`inspect` tells what a folder is from its config and heads alone, and `doctor` evaluates what it says."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest

from mlx_dspark.catalog.formats import read_drafter
from mlx_dspark.cli.main import run
from tests.tiny import save_tiny
from tests.tiny_drafters import save_tiny_dflash, save_tiny_dspark
from tests.tiny_packagings import save_tiny_speculators

GOLDEN = sorted(path.parent for path in (Path(__file__).parents[1] / "golden").glob("*/config.json"))


@pytest.fixture(autouse=True)
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(tmp_path / "cache"))


def inspected(path: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    code = run(["inspect", str(path), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == (0 if told["live"] else 2)
    return told


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_every_golden_drafter_is_told_as_it_is_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(folder, capsys)
    checkpoint = read_drafter(folder)
    config, facts = checkpoint.config, found["facts"]
    assert (found["kind"], found["live"], facts["packaging"]) == ("drafter", True, checkpoint.packaging)
    assert (facts["taps"], facts["first_slot"]) == (list(config.taps), config.first_slot)
    assert (facts["block_size"], facts["heads"]["markov"]) == (config.block_size, config.markov)
    assert facts["precision"] == "float32"
    assert run(["inspect", str(folder)]) == 0
    assert "would run" in capsys.readouterr().out


def test_a_vocabulary_map_and_precision_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = inspected(save_tiny_dspark(tmp_path / "head", draft_vocab=64), capsys)["facts"]
    assert (facts["vocabulary_map"], facts["draft_vocabulary"]) == ("d2t", 64)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "eagle|language model|another kind"),
        ({"block_size": 1}, "block_size"),
        ({"num_hidden_layers": 3}, "layer_types"),
    ],
)
def test_a_refused_drafter_is_told_with_the_reason(
    change: dict, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_dflash(tmp_path / "head")
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    found = inspected(folder, capsys)
    assert not found["live"]
    assert re.search(told, found["refused"], re.IGNORECASE)


def test_no_matrix_of_a_drafter_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_dspark(tmp_path / "head")
    monkeypatch.setattr(
        "mlx_dspark.catalog.formats.tensors._refuse_not_finite", lambda *_: pytest.fail("values were read")
    )
    assert inspected(folder, capsys)["live"]


@pytest.mark.parametrize("damage", [None, "short"])
def test_a_model_is_told_with_its_pair_or_why_it_has_none(
    damage: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny(tmp_path / "model", "qwen3")
    shard = next(model.glob("model*.safetensors"))
    if damage:
        shard.write_bytes(shard.read_bytes()[:-1])
    found = inspected(model, capsys)
    assert (found["kind"], found["live"]) == ("model", damage is None)
    assert found["facts"]["architecture"] == "qwen3"
    assert found["facts"]["no_pair_because"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_hidden_layers": 5}, "num_hidden_layers"),
        ({"quantization": "4bit"}, "quantization"),
        ({"hidden_size": None}, "hidden_size"),
        ({"model_type": "bert"}, "model_type"),
        ({"auto_map": {}}, "auto_map"),
    ],
)
def test_a_model_that_would_not_load_is_refused_in_both_forms(
    change: dict, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny(tmp_path / "model", "qwen3")
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    found = inspected(model, capsys)
    assert not found["live"]
    assert told in found["refused"]
    assert run(["inspect", str(model)]) == 2
    assert "refused" in capsys.readouterr().out


def test_a_warning_is_one_remark_without_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny_speculators(tmp_path / "head")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["speculators_config"]["proposal_methods"] = []
    file.write_text(json.dumps(config))
    shown = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run(["inspect", str(folder)]) == 0
    assert warnings.showwarning is shown
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mlx-dspark: {file} does not tell whether the anchor's slot drafts")


def checks(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, dict]:
    run(["doctor", "--json", *more])
    return {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}


def test_doctor_fails_what_is_broken_and_names_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = checks(capsys)
    found.pop("server")
    assert {check["status"] for check in found.values()} == {"ok"}
    file = tmp_path / "config" / "mlx_dspark" / "pairs.toml"
    file.parent.mkdir(parents=True)
    file.write_text("[[pair]\n")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(tmp_path / "file" / "cache"))
    broken = checks(capsys)
    for name in ("registry", "cache"):
        assert broken[name]["status"] == "fail"
        assert broken[name]["fix"]
    assert run(["doctor", "--json"]) == 2
    capsys.readouterr()


def test_doctor_of_an_unregistered_model_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny(tmp_path / "model", "qwen3")
    pair = checks(capsys, "--pair", str(model))["pair"]
    assert pair["status"] == "warn"
    assert "--drafter" in pair["fix"]
