"""A row is used for its target and conversions of it, never for a lookalike; a bad file is told."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mlx_dspark
from mlx_dspark.catalog.matching import ModelFacts, facts_of, match
from mlx_dspark.catalog.pairs import PACKAGED, Pair, load_registry, read_pairs, registry
from mlx_dspark.catalog.resolve import resolve_model
from mlx_dspark.cli.main import run
from mlx_dspark.foundation.errors import BadCheckpoint, ModelNotFound, RemoteCodeRefused, UsageError
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.session.measured import measured_gains, remember_gains
from mlx_dspark.session.pair import load_parts
from mlx_dspark.session.registered import MARGIN, chosen_mode
from tests.tiny import save_tiny
from tests.tiny_drafters import save_tiny_dspark

PARENT, TARGET = "maker/Small-it", "converter/Small-it-8bit"
ROW = Pair(
    "small", TARGET, {"dspark": "someone/head"}, "dspark", "a test", parents=(PARENT,),
    architecture="qwen3", hidden_size=64, layers=2, vocabulary="aa",
)  # fmt: skip
SAME = ModelFacts(None, (PARENT,), None, True, "qwen3", 64, 2, "aa", 8)


@pytest.fixture(autouse=True)
def config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "config"


@pytest.mark.parametrize(
    ("change", "how"),
    [
        ({}, "parent"),
        ({"relation": "quantized", "converted": False}, "parent"),
        ({"origin": TARGET, "parents": ()}, "target"),
        ({"origin": TARGET.upper(), "parents": ()}, "target"),
        ({"origin": PARENT, "parents": ("maker/Small-base",)}, "target"),
        ({"parents": (TARGET,)}, "parent"),
        ({"vocabulary": None}, "parent"),
    ],
)
def test_the_target_and_its_conversions_match(change: dict[str, Any], how: str) -> None:
    found = match(replace(SAME, **change), [ROW])
    assert (found.pair, found.how) == (ROW, how)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden_size": 128}, "its hidden size is 128, not 64"),
        ({"layers": 3}, "its layers is 3, not 2"),
        ({"architecture": "llama"}, "its architecture is llama, not qwen3"),
        ({"vocabulary": "bb"}, "its vocabulary is bb, not aa"),
        ({"origin": TARGET, "hidden_size": 128}, "its hidden size is 128, not 64"),
        ({"parents": ()}, "nothing records what it was made from"),
        ({"parents": ("maker/Small-base",)}, "it was made from maker/Small-base"),
        ({"parents": ("other/Small-it-tuned",)}, "it was made from other/Small-it-tuned"),
        ({"parents": (PARENT, "other/Twin")}, "it was made from"),
        ({"relation": "finetune"}, "calls it a finetune"),
        ({"relation": "merge"}, "calls it a merge"),
        ({"converted": False}, "no fine-tune of it"),
        ({"origin": "someone/Small-it-8bit", "parents": ()}, "nothing records"),
        ({"origin": "x/small", "parents": (), "hidden_size": 128}, "no known pair"),
    ],
)
def test_near_misses_do_not_match_and_are_told(change: dict[str, Any], told: str) -> None:
    found = match(replace(SAME, **change), [ROW])
    assert found.pair is None
    assert told in found.reason


def test_of_two_rows_the_one_with_the_models_bits_is_taken() -> None:
    rows = [replace(ROW, id="four", target="c/4", bits=4), replace(ROW, id="eight", target="c/8", bits=8)]
    assert [match(replace(SAME, bits=bits), rows).pair for bits in (4, 8, 6)] == [rows[0], rows[1], rows[0]]


@pytest.mark.parametrize("pair", registry(), ids=lambda pair: pair.id)
def test_a_row_finds_its_own_target_and_by_its_id(pair: Pair) -> None:
    if pair.target != pair.id:
        facts = ModelFacts(pair.target, bits=pair.bits)
        assert match(facts, registry()).pair == pair
    assert load_registry().named(pair.id) == pair
    assert pair.mode in pair.drafters
    assert pair.source


PUBLISHED = {
    "qwen3-4b": ("mlx-community/Qwen3-4B-8bit", "dspark", True, 8, 2.0),
    "qwen3-8b": ("mlx-community/Qwen3-8B-8bit", "dspark", True, 11, 2.2),
    "qwen3-14b": ("mlx-community/Qwen3-14B-8bit", "dspark", True, 19, 2.0),
    "gemma-4-12b": ("mlx-community/gemma-4-12B-it-8bit", "dspark", True, 15, 3.2),
    "ternary-bonsai-27b": ("prism-ml/Ternary-Bonsai-27B-mlx-2bit", "dspark", True, 12, 1.15),
    "qwen3.6-27b": ("mlx-community/Qwen3.6-27B-8bit", "dspark", True, 32, 2.3),
    "ornith-1.0-9b": ("mlx-community/Ornith-1.0-9B-8bit", "dspark", True, 13, 2.4),
    "qwen3.6-35b-a3b": ("mlx-community/Qwen3.6-35B-A3B-4bit", "dspark", False, 23, 1.3),
    "qwen3.8-27b": ("mlx-community/Qwen3.8-27B-4bit", "dflash", False, 18, 2.7),
    "qwen3.8-27b-8bit": ("mlx-community/Qwen3.8-27B-8bit", "dflash", False, 29, 3.7),
    "nemotron-3.5-lightning-30b-a3b": (
        "mlx-community/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-4bit",
        "dspark",
        False,
        20,
        1.25,
    ),
    "muse-glimmer-30b": ("mlx-community/Muse-Glimmer-30B-4bit", "dspark", False, 26, 1.7),
    "muse-glimmer-30b-8bit": ("mlx-community/Muse-Glimmer-30B-8bit", "dspark", False, 40, 2.5),
    "lfm2.5-2.6b": ("LiquidAI/LFM2.5-2.6B-MLX-bf16", "dspark", True, 7, 2.8),
    "lfm2.5-1.2b": ("LiquidAI/LFM2.5-1.2B-Instruct-MLX-bf16", "dspark", True, 4, 3.4),
    "lfm2.5-8b-a1b": ("LiquidAI/LFM2.5-8B-A1B-MLX-bf16", "dspark", False, 19, 1.2),
    "nanbeige4.2-3b": ("MercuriusDream/Nanbeige4.2-3B-mlx-bf16", "dspark", True, 10, 2.9),
    "minicpm5-2b": ("mlx-community/MiniCPM5-2B-bf16", "dspark", True, 6, 3.2),
}
"""By id: target, mode, whether lookup drafts first, stated GB and gain."""
WITHOUT_ACCEPT_LENGTH = {"nanbeige4.2-3b"}
"""Their published gain is expected instead."""


def test_every_published_row_is_there() -> None:
    own = {pair.id: pair for pair in read_pairs(PACKAGED)}
    assert own.keys() == PUBLISHED.keys() | {"smollm2-135m"}
    for name, (target, mode, lookup, gigabytes, gain) in PUBLISHED.items():
        pair = own[name]
        assert (pair.target, pair.mode, pair.lookup, pair.speedup) == (target, mode, lookup, gain)
        assert pair.peak_bytes == gigabytes * 10**9
        assert (pair.weights_bytes or 0) <= gigabytes * 10**9
    assert {name for name, pair in own.items() if not pair.expected} == WITHOUT_ACCEPT_LENGTH


def test_what_is_not_recorded_is_told(config_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(config_home, GOOD.replace("dspark =", "dflash ="))
    assert run(["models"]) == 0
    (told,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("No accept length")]
    assert "me/model" in told
    assert not any(target in told for target, *_ in PUBLISHED.values())
    assert run(["models", "--json"]) == 0
    listed = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert listed["me/model"]["accept_lengths"] == []
    dflash = listed["mlx-community/Qwen3.8-27B-8bit"]
    (length,) = dflash["accept_lengths"]
    assert length == {"mode": "dflash", "content": "all", "cap": 7, "mean": 5.53, "basis": None}
    assert dflash["speedups"] == {"chat": 2.79, "code": 4.05, "math": 4.06}


def write(home: Path, text: str) -> Path:
    file = home / "mlx_dspark" / "pairs.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


GOOD = '[[pair]]\nid = "mine"\ntarget = "me/model"\ndrafters = { dspark = "me/head" }\n'


def test_user_rows_add_and_replace(config_home: Path) -> None:
    write(config_home, GOOD + GOOD.replace("mine", "qwen3-4b"))
    known = load_registry()
    assert not known.faults
    mine, theirs = known.named("mine"), known.named("qwen3-4b")
    assert mine is not None
    assert theirs is not None
    assert mine.drafters == theirs.drafters == {"dspark": "me/head"}
    assert len(known.pairs) == len(read_pairs(PACKAGED)) + 1


@pytest.mark.parametrize(
    ("row", "field", "told"),
    [
        ("", "drafters", "is missing"),
        ('drafters = { eagle = "x" }', "drafters", "eagle"),
        ('drafters = { dspark = "x" }\nmode = "dflash"', "mode", "names dspark"),
        ('drafters = { dspark = "x" }\nlayers = 0', "layers", "at least 1"),
        ('drafters = { dspark = "x" }\nlayers = true', "layers", "whole number"),
        ('drafters = { dspark = "x" }\nspeedup = "2x"', "speedup", "above 0"),
        ('drafters = { dspark = "x" }\nspeedups = 2.0', "speedups", "table of numbers"),
        ('drafters = { dspark = "x" }\nspeedups = { chat = 0 }', "speedups.chat", "above 0"),
        ('drafters = { dspark = "x" }\nparents = "x"', "parents", "list of texts"),
        ('drafters = { dspark = "x" }\nlicense = "MIT"', "license", "not a field"),
        ('target = "/a/folder"\ndrafters = { dspark = "x" }', "target", "no hub id"),
        (
            'drafters = { dspark = "x" }\n[[pair.expected]]\nmode = "dspark"\ncap = 2\naccept_length = 4.0',
            "expected.accept_length",
            "from 1 to 3",
        ),
    ],
)
def test_a_bad_row_is_told_by_file_line_and_field_and_costs_itself(
    config_home: Path, row: str, field: str, told: str
) -> None:
    target = "" if row.startswith("target") else 'target = "me/other"'
    file = write(config_home, f'{GOOD}\n[[pair]]\nid = "bad"\n{target}\n{row}\n')
    known = load_registry()
    (fault,) = known.faults
    assert fault.field == field
    assert re.search(rf"{re.escape(str(file))}, line 6: {field} of the pair 'bad'.*{told}", str(fault))
    assert known.named("mine") is not None
    assert known.named("bad") is None
    with pytest.raises(BadCheckpoint):
        read_pairs(file)


@pytest.mark.parametrize("text", ["[[pair]\n", "x = \n", '[pair]\nid = "x"\n', "other = 1\n", "\x00"])
def test_a_file_that_is_no_registry_is_told_and_the_programs_rows_stay(config_home: Path, text: str) -> None:
    file = write(config_home, text)
    known = load_registry()
    (fault,) = known.faults
    assert str(file) in str(fault)
    assert known.pairs == read_pairs(PACKAGED)


def save_pair(tmp_path: Path, config_home: Path, card: str, **fields: str) -> Path:
    """A tiny model whose README has `card`, and a user row for it with a drafter beside it."""
    head = save_tiny_dspark(tmp_path / "head")
    model = save_tiny(tmp_path / "model", "qwen3")
    (model / "README.md").write_text(f"---\n{card}\n---\n# a model\n")
    facts = facts_of(resolve_model(str(model), cache_dir=tmp_path))
    known = {
        "architecture": f'"{facts.architecture}"',
        "hidden_size": facts.hidden_size,
        "layers": facts.layers,
    }
    known |= {"vocabulary": f'"{facts.vocabulary}"'} | fields
    lines = "\n".join(f"{name} = {value}" for name, value in known.items())
    write(
        config_home,
        f'[[pair]]\nid = "small"\ntarget = "{TARGET}"\nparents = ["{PARENT}"]\n'
        f'drafters = {{ dspark = "{head}" }}\n{lines}\n',
    )
    return model


CONVERSION = f"base_model: {PARENT}\nlibrary_name: mlx"


def test_a_conversion_gets_the_drafter_of_its_row(tmp_path: Path, config_home: Path) -> None:
    model = save_pair(tmp_path, config_home, CONVERSION, lookup="false")
    parts = load_parts(LoadSettings(model=model))
    assert parts.mode == "dspark"
    assert parts.drafter is not None
    assert [source.name for source in parts.drafter.sources] == ["dspark"]
    assert "small" in parts.pairing


@pytest.mark.parametrize("named", ["small", TARGET])
def test_a_target_is_known_by_where_it_lies_in_a_model_folder(
    tmp_path: Path, config_home: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """By publisher and repository, as LM Studio lays models out; and only with the row's numbers."""
    model = save_pair(tmp_path, config_home, "tags: []", lookup="false")
    monkeypatch.setenv("MLX_DSPARK_MODEL_DIRS", str(tmp_path / "models"))
    place = tmp_path / "models" / TARGET
    place.parent.mkdir(parents=True)
    model.rename(place)
    assert load_parts(LoadSettings(model=named)).mode == "dspark"
    save_pair(tmp_path, config_home, "tags: []", lookup="false", layers="7")
    assert load_parts(LoadSettings(model=named)).mode == "lookup"


def test_a_model_that_cannot_run_is_refused_before_its_drafter_is_fetched(
    tmp_path: Path, config_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny(tmp_path / "model")
    (model / "modeling.py").write_text("print(1)")
    edited = json.loads((model / "config.json").read_text()) | {"auto_map": {"AutoModel": "modeling.M"}}
    (model / "config.json").write_text(json.dumps(edited))
    monkeypatch.setattr(
        "mlx_dspark.session.pair.read_drafter", lambda *_: pytest.fail("the drafter is fetched")
    )
    with pytest.raises(RemoteCodeRefused):
        load_parts(LoadSettings(model=model, drafter="me/head"))


@pytest.mark.parametrize(
    "card", ["tags: [mlx]", CONVERSION + "\nbase_model_relation: finetune", ": not [yaml"]
)
def test_a_lookalike_gets_lookup_and_is_told(tmp_path: Path, config_home: Path, card: str) -> None:
    model = save_pair(tmp_path, config_home, card)
    parts = load_parts(LoadSettings(model=model))
    assert parts.mode == "lookup"
    assert "it has the numbers of small" in parts.pairing
    assert "--drafter" in parts.pairing
    with pytest.raises(UsageError, match="registered"):
        load_parts(LoadSettings(model=model, mode="dspark"))
    assert load_parts(LoadSettings(model=model, drafter=tmp_path / "head")).mode == "dspark"


def test_another_vocabulary_with_the_same_numbers_does_not_match(tmp_path: Path, config_home: Path) -> None:
    model = save_pair(tmp_path, config_home, CONVERSION)
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    first, second = list(content["model"]["vocab"])[-2:]
    vocab = content["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(content))
    parts = load_parts(LoadSettings(model=model))
    assert parts.mode == "lookup"
    assert "vocabulary" in parts.pairing


def test_a_registered_drafter_that_cannot_be_had_gives_way_only_where_nobody_asked(
    tmp_path: Path, config_home: Path
) -> None:
    model = save_pair(tmp_path, config_home, CONVERSION)
    (tmp_path / "head" / "model.safetensors").write_bytes(b"")
    parts = load_parts(LoadSettings(model=model))
    assert parts.mode == "lookup"
    assert "cannot be used" in parts.pairing
    with pytest.raises(BadCheckpoint):
        load_parts(LoadSettings(model=model, mode="dspark"))


def test_a_registered_drafter_that_does_not_fit_gives_way(tmp_path: Path, config_home: Path) -> None:
    model = save_pair(tmp_path, config_home, CONVERSION)
    save_tiny_dspark(tmp_path / "head", hidden=32)
    parts = load_parts(LoadSettings(model=model))
    assert parts.mode == "lookup"
    assert "cannot be used" in parts.pairing


def test_a_broken_user_file_does_not_stop_a_model(tmp_path: Path, config_home: Path) -> None:
    model = save_pair(tmp_path, config_home, CONVERSION)
    write(config_home, "[[pair]\n")
    assert "pairs.toml" in load_parts(LoadSettings(model=model)).pairing
    assert load_parts(LoadSettings(model=model, mode="lookup")).pairing == ""


@pytest.mark.parametrize("kind", ["a folder", "a loop"])
def test_a_user_file_that_is_none_is_told(config_home: Path, kind: str) -> None:
    file = write(config_home, "")
    file.unlink()
    file.mkdir() if kind == "a folder" else file.symlink_to(file.name)
    (fault,) = load_registry().faults
    assert str(file) in str(fault)


def test_a_short_name_stands_for_its_target(config_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(config_home, GOOD)
    with pytest.raises(mlx_dspark.DsparkError, match="me/model"):
        resolve_model("mine", cache_dir=config_home, offline=True)
    with pytest.raises(ModelNotFound, match="qwen3-4b"):
        resolve_model("qwen3-4bb", cache_dir=config_home, offline=True)


def test_what_was_measured_here_beats_the_row(tmp_path: Path) -> None:
    heads = {"dspark": "a", "dflash": "b"}
    assert chosen_mode("dflash", heads, {}) == "dflash"
    assert chosen_mode("dflash", heads, {"dspark": 9.0}) == "dflash"
    assert chosen_mode("dflash", heads, {"dspark": 2.2, "dflash": 2.0}) == "dspark"
    assert chosen_mode("dflash", heads, {"lookup": 2.2, "dflash": 2.0}) == "lookup"
    assert chosen_mode("dflash", heads, {"dspark": 2.0 * MARGIN, "dflash": 2.0}) == "dflash"
    assert chosen_mode("dflash", heads, {"lookup": 9.0, "dflash": 2.0}, insists=True) == "dflash"
    assert chosen_mode("lookup", heads, {}, insists=True) in heads
    assert chosen_mode("lookup", {}, {}, insists=True) == "lookup"
    assert remember_gains(tmp_path, "model", {"dspark": 2.2, "dflash": 2.0}) == ""
    assert remember_gains(tmp_path, "other", {"lookup": 1.1}) == ""
    assert measured_gains(tmp_path, "model") == {"dspark": 2.2, "dflash": 2.0}
    (tmp_path / "modes.json").write_text("{")
    assert measured_gains(tmp_path, "model") == {}
