"""Laws of drafters in GGUF: the file drafts what the folder it was made from drafts, is converted once, and a
damaged conversion is made anew."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T

from mlx_dspark.catalog import hashes
from mlx_dspark.catalog.formats import read_drafter
from mlx_dspark.catalog.gguf import drafter as conversion
from mlx_dspark.catalog.integrity import sha256_of
from mlx_dspark.catalog.resolve import resolve_drafter
from mlx_dspark.drafters.load import load_drafter
from mlx_dspark.foundation.errors import BadCheckpoint, LoadError, ModelNotFound, UnsupportedModel
from mlx_dspark.foundation.paths import CACHE_DIR_VARIABLE
from tests.laws.test_format_variants import assert_equal, bound, reference, saved, traced
from tests.tiny_variants import native, save_prism_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / conversion.HOME


def packed(tmp_path: Path, seed: int = 1, **options: Any) -> Path:
    return save_prism_gguf(saved("prism", tmp_path, seed), tmp_path / "gguf" / "head.gguf", **options)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_file_drafts_what_its_folder_drafts(seed: int, tmp_path: Path) -> None:
    folder = saved("prism", tmp_path, seed)
    file = save_prism_gguf(folder, tmp_path / "gguf" / "head.gguf")
    ours, theirs = traced(bound(file, seed), seed), traced(bound(folder, seed), seed)
    assert mx.array_equal(ours.chain.logits, theirs.chain.logits)
    assert_equal(ours, reference(folder, seed))
    known = replace(read_drafter(folder).config, target_layers=None)  # the metadata do not tell
    assert read_drafter(file).config == known
    assert read_drafter(file.parent).packaging == "PrismML"


@pytest.mark.parametrize(("kind", "dtype"), [(T.F32, mx.float32), (T.F16, mx.float16), (T.BF16, mx.bfloat16)])
def test_values_keep_their_type(kind: T, dtype: mx.Dtype, tmp_path: Path) -> None:
    folder = saved("prism", tmp_path)
    wanted = read_drafter(folder).weights
    for name, weight in read_drafter(save_prism_gguf(folder, tmp_path / "h.gguf", kind=kind)).weights.items():
        if weight.ndim == 2 and "confidence" not in name:
            assert weight.dtype == dtype
        assert mx.array_equal(weight, wanted[name].astype(weight.dtype)), name


def test_a_head_without_levels_is_deepspec_s(tmp_path: Path) -> None:
    file = save_prism_gguf(native(tmp_path / "native", 1, confidence=False), tmp_path / "h.gguf")
    checkpoint = read_drafter(file)
    assert (checkpoint.packaging, checkpoint.config.confidence) == ("deepspec", False)


def test_a_file_is_converted_once_whatever_it_is_called(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = packed(tmp_path)
    first = load_drafter(file)
    assert first.folder is not None
    assert first.folder.parent == cache
    moved = file.rename(tmp_path / "other.gguf")
    monkeypatch.setattr(conversion, "_put", lambda *_: pytest.fail("converted again"))
    assert load_drafter(moved).folder == first.folder
    monkeypatch.undo()
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(cache.parent))
    assert load_drafter(packed(tmp_path, 2)).folder != first.folder


def test_no_byte_is_hashed_twice_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr(hashes, "sha256_of", counted)
    monkeypatch.setattr(hashes, "SETTLED", -1.0)
    file = packed(tmp_path)
    first = load_drafter(file).folder
    assert load_drafter(file).folder == first
    assert sorted(hashed) == [conversion.CONFIG, file.name, conversion.WEIGHTS] * (len(hashed) // 3)
    hashed.clear()
    load_drafter(file)
    assert hashed == []
    before = file.stat()
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load_drafter(file).folder != first
    assert file.name in hashed


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_bytes(b"1")
    known = hashes.RememberedHashes(tmp_path, now=lambda: file.stat().st_mtime + hashes.SETTLED / 2)
    assert known.sha256(file) == sha256_of(file)
    assert not (tmp_path / hashes.FILE).exists()
    (tmp_path / hashes.FILE).write_text("[")
    later = hashes.RememberedHashes(tmp_path, now=lambda: file.stat().st_mtime + hashes.SETTLED * 2)
    assert later.sha256(file) == sha256_of(file)
    assert str(file) in (tmp_path / hashes.FILE).read_text()


@pytest.mark.parametrize("name", [conversion.WEIGHTS, conversion.CONFIG, conversion.SUMS])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_conversion_is_made_anew(name: str, damage: str, tmp_path: Path) -> None:
    file = packed(tmp_path)
    (whole,) = read_drafter(file).files
    target = whole.with_name(name)
    data = target.read_bytes()
    if damage == "remove":
        target.unlink()
    else:
        flipped = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
        target.write_bytes(flipped if damage == "flip" else data[: len(data) // 2])
    read_drafter(file)
    assert target.read_bytes() == data
    assert {path.name for path in whole.parent.parent.iterdir()} == {whole.parent.name, "lock"}


def test_a_conversion_that_fails_leaves_what_was_there(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    file = packed(tmp_path)
    (weights,) = read_drafter(file).files
    damaged = weights.with_name(conversion.CONFIG)
    damaged.write_text("{}")
    monkeypatch.setattr(conversion.mx, "save_safetensors", full)
    with pytest.raises(BadCheckpoint, match=r"converted into .*: No space left on device") as caught:
        read_drafter(file)
    assert "MLX_DSPARK_CACHE_DIR" in caught.value.next_step
    assert damaged.read_text() == "{}"
    assert len(list(cache.iterdir())) == 2


def test_names_of_files_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = packed(tmp_path)
    assert resolve_drafter(str(file)).path == file
    asked: list[Any] = []

    def fetch(repository: str, names: list[str], **_: object) -> Path:
        asked.extend([repository, names])
        return file

    monkeypatch.setattr("mlx_dspark.catalog.resolve.fetch_files", fetch)
    assert resolve_drafter("gguf:prism-ml/bonsai-gguf/sub/head.gguf").path == file
    assert asked == ["prism-ml/bonsai-gguf", ["sub/head.gguf"]]
    with pytest.raises(ModelNotFound, match="does not name a GGUF file"):
        resolve_drafter("gguf:prism-ml/bonsai-gguf")


def refused(kind: type[LoadError], file: Path) -> str:
    with pytest.raises(kind) as caught:
        read_drafter(file)
    assert caught.value.next_step
    return caught.value.sentence


@pytest.mark.parametrize(
    ("options", "kind", "named"),
    [
        ({"metadata": {"general.architecture": "dflash"}}, UnsupportedModel, "architecture 'dflash'"),
        ({"metadata": {"general.architecture": "llama"}}, UnsupportedModel, "architecture 'llama'"),
        ({"kind": T.Q4_1}, UnsupportedModel, "is stored as Q4_1"),
        ({"metadata": {"dspark.block_count": None}}, BadCheckpoint, "dspark.block_count"),
        ({"metadata": {"dspark.embedding_length": "x"}}, BadCheckpoint, "dspark.embedding_length"),
        ({"metadata": {"dspark.attention.value_length": 8}}, UnsupportedModel, "values of another width"),
        ({"metadata": {"dspark.dspark.block_size": 0}}, BadCheckpoint, "dspark.dspark.block_size"),
        ({"metadata": {"dspark.dspark.target_layers": [1, 0]}}, BadCheckpoint, "target_layer_ids"),
        ({"metadata": {"dspark.dspark.target_layers": None}}, BadCheckpoint, "dspark.dspark.target_layers"),
        ({"metadata": {"dspark.dspark.min_log_snr": None}}, BadCheckpoint, "dspark.dspark.min_log_snr"),
        ({"metadata": {"dspark.dspark.min_log_snr": 9.5}}, BadCheckpoint, "min_log_snr"),
        ({"metadata": {"dspark.dspark.confidence_head": 2}}, BadCheckpoint, "enable_confidence_head"),
        ({"without": ("fc.weight",)}, BadCheckpoint, "lacks fc.weight"),
        ({"extra": {"new.weight": np.ones((2, 2))}}, BadCheckpoint, "unexpected new.weight"),
        (
            {"extra": {"layers.x.mlp.up_proj.weight": np.ones((2, 2))}},
            BadCheckpoint,
            "unexpected blk.x.ffn_up",
        ),
        ({"extra": {"norm.weight": np.ones(3)}}, BadCheckpoint, "norm.weight of shape [3]"),
        ({"extra": {"norm.weight": np.full(64, np.nan)}}, BadCheckpoint, "norm.weight in"),
    ],
)
def test_what_does_not_fit_is_named(
    options: dict[str, Any], kind: type[LoadError], named: str, tmp_path: Path
) -> None:
    assert named in refused(kind, packed(tmp_path, **options))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    file = packed(tmp_path)
    data = file.read_bytes()
    for content in (b"", data[:3], data[:8], data[:100], data[: len(data) // 2], b"GGUF" + bytes(100)):
        file.write_bytes(content)
        assert str(file) in refused(LoadError, file)  # pyright: ignore[reportArgumentType]
