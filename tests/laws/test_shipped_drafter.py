"""A shipped drafter belongs to the content of its model; the default model's own is whole, small and good."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_dspark
from mlx_dspark.catalog import default_model, shipped
from mlx_dspark.catalog.formats import read_drafter
from mlx_dspark.catalog.integrity import sha256_of
from mlx_dspark.catalog.resolve import resolve_model
from mlx_dspark.catalog.shipped import may_have_shipped_drafter, shipped_drafter
from mlx_dspark.chat.template import encode_prompt
from mlx_dspark.drafters.block import BlockDrafter
from mlx_dspark.drafters.load import load_drafter
from mlx_dspark.foundation.errors import DrafterMismatch, UsageError
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.session.pair import load_parts
from mlx_dspark.train.evaluate import evaluate
from mlx_dspark.train.export import export_drafter
from tests.default_model import parts
from tests.tiny import save_tiny
from tests.tiny_drafters import save_tiny_dflash, save_tiny_dspark
from tests.tiny_gguf import save_tiny_gguf

ROOT = Path(__file__).parents[2]
SHIPPED = shipped.HOME / default_model.NAME
FILES = {"README.md", "config.json", "model.safetensors", "targets.json"}
CONTENTS = ("chat", "code", "math")
MOST_BYTES = 16_000_000
LEAST_ACCEPT_LENGTH = 2.0
"""Mean over three prompts at the whole block. A wrong slot, rope or tap brings a good drafter to about 1."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_tiny_gguf(tmp_path / "model.gguf")
    return tmp_path / "model.gguf"


@pytest.fixture
def home(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that ships a drafter for `model`."""
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(shipped, "HOME", tmp_path / "shipped")
    ship(save_tiny_dspark(tmp_path / "shipped" / "tiny"), model)
    return tmp_path / "shipped"


def ship(folder: Path, model: Path) -> None:
    target = {"size_bytes": model.stat().st_size, "sha256": sha256_of(model)}
    (folder / "targets.json").write_text(json.dumps([target]))


def found(path: Path) -> Path | None:
    return shipped_drafter(resolve_model(str(path), cache_dir=path.parent))


def test_the_content_finds_it_under_any_name(home: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.gguf").write_bytes(model.read_bytes())
    assert found(model) == found(tmp_path / "elsewhere.gguf") == home / "tiny"


def test_a_folder_that_holds_the_model_alone_stands_for_it(home: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "any.gguf").write_bytes(model.read_bytes())
    assert mlx_dspark.load(tmp_path / "folder", lookup_drafts=False).mode == "dspark"


def test_another_content_of_that_name_and_size_does_not(home: Path, model: Path) -> None:
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(content)
    assert found(model) is None
    session = mlx_dspark.load(model)
    assert session.mode == "lookup"
    with pytest.raises(UsageError, match="none is shipped with this model") as refusal:
        mlx_dspark.load(model, mode="dspark")
    assert "--drafter" in refusal.value.next_step


def test_a_folder_of_the_same_shape_does_not(home: Path, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    assert found(folder) is None
    assert mlx_dspark.load(folder).mode == "lookup"


@pytest.mark.parametrize("mode", ["auto", "dspark"])
def test_it_is_used_where_no_drafter_is_named(home: Path, model: Path, mode: str) -> None:
    session = mlx_dspark.load(model, mode=mode, lookup_drafts=False, max_draft=0)
    plain = mlx_dspark.load(model, mode="baseline")
    options: dict[str, Any] = {"max_new_tokens": 16, "chat_template": False}
    result = session.generate("Say", **options)
    assert result.mode == "dspark"
    assert result.sources["dspark"].rounds
    assert result.token_ids == plain.generate("Say", **options).token_ids
    assert plain.generate("Say", **options).sources == {}


def test_a_named_drafter_goes_before_it(home: Path, model: Path, tmp_path: Path) -> None:
    other = save_tiny_dflash(tmp_path / "other")
    assert mlx_dspark.load(model, drafter=other).mode == "dflash"
    assert mlx_dspark.load(model, mode="lookup").mode == "lookup"


def test_one_of_another_kind_is_refused(home: Path, model: Path) -> None:
    with pytest.raises(DrafterMismatch, match="shipped with the model is a dspark drafter"):
        mlx_dspark.load(model, mode="dflash")


@pytest.mark.parametrize("mode", ["dspark", "dflash"])
def test_a_model_that_cannot_have_one_is_refused_before_it_is_fetched(home: Path, mode: str) -> None:
    assert not may_have_shipped_drafter("owner/name")
    with pytest.raises(UsageError, match="no drafter is given"):
        mlx_dspark.load("owner/name", mode=mode)


@pytest.mark.parametrize("named", ["owner/name", "name"])
def test_a_packed_model_in_a_model_folder_has_its_drafter_by_either_name(
    home: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    place = tmp_path / "models" / "owner" / "name"
    place.mkdir(parents=True)
    model.rename(place / "model.gguf")
    monkeypatch.setenv("MLX_DSPARK_MODEL_DIRS", str(tmp_path / "models"))
    assert may_have_shipped_drafter(named)
    parts = load_parts(LoadSettings(model=named))
    assert parts.mode == "dspark"


@pytest.mark.parametrize("bits", [4, 8])
def test_a_drafter_stored_quantized_stays_as_it_is(tmp_path: Path, bits: int) -> None:
    source = save_tiny_dspark(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    weights = mx.load(str(source / "model.safetensors"))
    assert isinstance(weights, dict)
    folder = export_drafter(tmp_path / "packed", config, weights, bits=bits)
    stored = read_drafter(folder).packed
    assert stored is not None
    model: Any = load_drafter(folder).model
    assert model.fc.bits == bits
    assert mx.array_equal(model.fc.weight, stored.matrices["fc"].weight)


# The default model's own ----------------------------------------------------------------------------------


def test_the_default_model_has_one() -> None:
    weights = default_model.WEIGHTS
    assert {path.name for path in SHIPPED.iterdir()} == FILES
    listed = json.loads((SHIPPED / "targets.json").read_text())
    assert (weights.size_bytes, weights.sha256) in [(each["size_bytes"], each["sha256"]) for each in listed]
    drafter = read_drafter(SHIPPED)
    assert all(len(each["acceptance"]) == drafter.config.block_size for each in listed)


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= MOST_BYTES
    assert read_drafter(SHIPPED).packed is not None


def test_its_card_names_every_source_with_its_licence() -> None:
    card = (SHIPPED / "README.md").read_text(encoding="utf-8")
    table = re.search(r"^\| source \| licence \|\n\|[-| ]+\|\n((?:\|.+\|\n)+)", card, re.MULTILINE)
    assert table is not None
    for row in table.group(1).splitlines():
        source, licence = (cell.strip() for cell in row.strip("|").split("|"))
        assert source
        assert licence
    assert "Apache-2.0" in card
    assert "accept length" in card


def test_wheel_and_source_distribution_hold_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    with tarfile.open(source) as archive:
        packed_source = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {f"mlx_dspark/catalog/shipped/{default_model.NAME}/{name}" for name in FILES}
    wanted |= {f"mlx_dspark/bench/prompts/{name}.jsonl" for name in CONTENTS}
    assert wanted <= packed
    assert wanted <= packed_source


@pytest.mark.weights
def test_it_drafts_what_the_model_says() -> None:
    loaded = parts("dspark", lookup_drafts=False)
    assert isinstance(loaded.drafter, BlockDrafter)
    prompts = [
        encode_prompt(loaded.tokenizer, json.loads(path.read_text().splitlines()[0])["prompt"])
        for path in (ROOT / "mlx_dspark" / "bench" / "prompts" / f"{name}.jsonl" for name in CONTENTS)
    ]
    evaluation = evaluate(
        loaded.target,
        loaded.drafter,
        {"all": prompts},
        end_ids=loaded.end_ids,
        tokens=64,
        temperatures=(0.0,),
        timed=0,
    )
    (accepted,) = evaluation.accepted
    print(f"accept length {accepted.length:.2f}, per position {accepted.reached}")
    assert accepted.length >= LEAST_ACCEPT_LENGTH
