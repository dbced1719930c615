"""Models come from the hub whole or not at all, whatever the network does, and nothing comes twice."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest

from mlx_dspark.catalog import downloads
from mlx_dspark.catalog.downloads import Meter
from mlx_dspark.catalog.fit import Memory
from mlx_dspark.catalog.hub import cached_repository
from mlx_dspark.catalog.progress import LoadProgress
from mlx_dspark.catalog.resolve import resolve_drafter, resolve_model
from mlx_dspark.cli.main import run
from mlx_dspark.foundation.errors import DownloadError, ModelNotFound, RemoteCodeRefused
from tests.fake_hub import Hub, running_hub, use_hub
from tests.tiny import save_tiny
from tests.tiny_drafters import save_tiny_dspark
from tests.tiny_gguf import save_tiny_gguf

ID, WEIGHTS = "owner/model", "model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("offered") / "model")


@pytest.fixture
def hub(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Hub]:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(tmp_path / "own"))
    with running_hub() as running:
        running.add(ID, folder)
        use_hub(running, tmp_path / "hub", monkeypatch)
        yield running


def same_files(found: Path, offered: Hub, repository: str = ID) -> bool:
    files = offered.files[repository]
    return all((found / name).read_bytes() == data for name, data in files.items())


def fetched(tmp_path: Path) -> tuple[Path, list[LoadProgress]]:
    steps: list[LoadProgress] = []
    return resolve_model(ID, cache_dir=tmp_path, progress=steps.append).path, steps


def gets(hub: Hub, name: str = WEIGHTS) -> list[str]:
    return [asked for method, each, asked in hub.asked if (method, each) == ("GET", name)]


def test_a_repository_is_fetched_once_and_told_of(tmp_path: Path, hub: Hub) -> None:
    path, steps = fetched(tmp_path)
    assert same_files(path, hub)
    last = [step for step in steps if step.detail][-1]
    assert last.fraction == 1.0
    size = len(hub.files[ID][WEIGHTS])
    assert last.detail.startswith(f"{size / 1e6:.0f} MB of {size / 1e6:.0f} MB")
    asked = len(hub.asked)
    assert fetched(tmp_path) == (path, [])
    assert len(hub.asked) == asked
    assert not list((tmp_path / "hub").rglob("*.incomplete*"))


@pytest.mark.parametrize("failure", ["cut", "stalled"])
def test_a_download_that_breaks_goes_on_where_it_ended(tmp_path: Path, hub: Hub, failure: str) -> None:
    if failure == "cut":
        hub.cut[WEIGHTS] = [5000, 7000]
    else:
        hub.stalled[WEIGHTS] = 5000
    path, _ = fetched(tmp_path)
    assert same_files(path, hub)
    assert [asked.startswith("bytes=") for asked in gets(hub)[:2]] == [False, True]


def test_a_download_that_fails_is_kept_and_the_next_goes_on(tmp_path: Path, hub: Hub) -> None:
    size = len(hub.files[ID][WEIGHTS])
    hub.cut[WEIGHTS] = [20_480] + [0] * 40
    with pytest.raises(DownloadError, match="could not be fetched"):
        fetched(tmp_path)
    assert cached_repository(ID) is None
    hub.cut.clear()
    hub.sent.clear()
    path, steps = fetched(tmp_path)
    assert same_files(path, hub)
    assert hub.sent[WEIGHTS] < size - 16_384
    assert steps[-1].fraction == 1.0


def test_what_arrives_damaged_is_not_kept(tmp_path: Path, hub: Hub) -> None:
    hub.damaged.add(WEIGHTS)
    with pytest.raises(DownloadError, match="sha256"):
        fetched(tmp_path)
    hub.damaged.clear()
    path, _ = fetched(tmp_path)
    assert same_files(path, hub)


def test_a_full_disk_is_told_before_the_first_byte(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda _: usage(1, 1, 1_000_000))
    with pytest.raises(DownloadError, match=r"no room for the model owner/model: .* are missing") as refusal:
        fetched(tmp_path)
    assert "HF_HOME" in refusal.value.next_step
    assert gets(hub) == []


def test_a_model_that_does_not_fit_is_refused_before_its_weights(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.files["owner/packed"] = {"m.gguf": bytes(200_000)}
    monkeypatch.setattr("mlx_dspark.catalog.memory.memory_here", lambda: Memory(100_000, "a test"))
    for name in (ID, "gguf:owner/packed/m.gguf"):
        assert run(["pull", name]) == 2
        assert "needs" in capsys.readouterr().err
    assert gets(hub) == gets(hub, "m.gguf") == []
    assert run(["pull", ID, "--no-memory-guard"]) == 0


def test_code_is_refused_before_weights_and_a_drafter_may_have_it(tmp_path: Path, hub: Hub) -> None:
    hub.files[ID]["modeling.py"] = b"raise SystemExit"
    with pytest.raises(RemoteCodeRefused):
        fetched(tmp_path)
    assert gets(hub) == []
    assert same_files(resolve_drafter(ID).path, hub)


def test_a_file_with_its_parts_is_fetched_once(tmp_path: Path, hub: Hub) -> None:
    save_tiny_gguf(tmp_path / "packed" / "m.gguf", parts=3)
    hub.add("owner/packed", tmp_path / "packed")
    for _ in range(2):
        ref = resolve_model("gguf:owner/packed/m-00001-of-00003.gguf", cache_dir=tmp_path)
        assert same_files(ref.path.parent, hub, "owner/packed")
    assert [len(gets(hub, name)) for name in hub.files["owner/packed"]] == [1, 1, 1]


def test_what_the_hub_has_not_is_named(tmp_path: Path, hub: Hub) -> None:
    with pytest.raises(ModelNotFound, match="no model owner/nothing"):
        resolve_model("owner/nothing", cache_dir=tmp_path)
    with pytest.raises(ModelNotFound, match=r"no file x\.gguf"):
        resolve_model("gguf:owner/model/x.gguf", cache_dir=tmp_path)


def _arrived(home: Path) -> int:
    return sum(part.stat().st_size for part in home.rglob("*.mlx_dspark.incomplete"))


def test_ctrl_c_ends_a_pull_at_once_and_loses_nothing(tmp_path: Path, hub: Hub) -> None:
    hub.stalled[WEIGHTS] = 20_480
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub")}
    environment |= {"HF_HUB_DOWNLOAD_TIMEOUT": "30", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    small = "from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 1024; "
    code = small + f"from mlx_dspark.cli.main import run; raise SystemExit(run(['pull', '{ID}']))"
    pull = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
    begun = time.monotonic()
    while not _arrived(tmp_path / "hub"):
        assert pull.poll() is None, pull.communicate()
        assert time.monotonic() < begun + 60, "nothing arrived"
        Event().wait(0.05)
    pull.send_signal(signal.SIGINT)
    _, said = pull.communicate(timeout=10)
    assert pull.returncode == 130, said
    hub.sent.clear()
    path, _ = fetched(tmp_path)
    assert same_files(path, hub)
    assert hub.sent[WEIGHTS] == len(hub.files[ID][WEIGHTS]) - 20_480


def test_the_meter_tells_bytes_rate_and_time_left() -> None:
    now = [0.0]
    meter = Meter("it", 4_700_000_000, lambda _: None, clock=lambda: now[0])
    for _ in range(4):
        now[0] += 10
        meter.add(350_000_000)
    assert meter.line() == "1.4 GB of 4.7 GB, 35 MB/s, 1 min 34 s left"
    meter.add(-1_400_000_000)
    assert meter.line().startswith("0 MB of 4.7 GB")


# rm ------------------------------------------------------------------------------------------------------


def test_rm_takes_a_repository_or_a_file_out_of_the_cache(
    tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    fetched(tmp_path)
    hub.files["owner/packed"] = {"a.gguf": b"GGUF" * 9, "b.gguf": b"GGUF" * 7}
    for name in ("a", "b"):
        resolve_model(f"gguf:owner/packed/{name}.gguf", cache_dir=tmp_path)
    assert run(["rm", ID, "--yes"]) == 0
    assert not (tmp_path / "hub" / "models--owner--model").exists()
    assert run(["rm", "gguf:owner/packed/a.gguf", "--yes"]) == 0
    left = [path.name for path in (tmp_path / "hub").rglob("*.gguf")]
    assert left == ["b.gguf"]
    assert len(list((tmp_path / "hub" / "models--owner--packed" / "blobs").glob("?" * 64))) == 1
    assert run(["rm", "gguf:owner/packed/b.gguf", "--yes"]) == 0
    assert not (tmp_path / "hub" / "models--owner--packed").exists()
    capsys.readouterr()
    assert run(["rm", ID, "--yes"]) == 2
    assert "has no owner/model" in capsys.readouterr().err


def test_rm_asks(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = fetched(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert run(["rm", ID]) == 2
    assert "--yes" in capsys.readouterr().err
    for answer, kept in (("n\n", True), ("\n", True), ("y\n", False)):
        stdin = io.StringIO(answer)
        monkeypatch.setattr(stdin, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", stdin)
        assert run(["rm", ID]) == 0
        assert path.exists() is kept


@pytest.mark.parametrize("named", ["path", "name"])
def test_rm_never_touches_a_folder_of_the_users(
    tmp_path: Path, hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    home = tmp_path / "home" / ".lmstudio" / "models" / "some" / "model"
    shutil.copytree(folder, home)
    assert run(["rm", str(home) if named == "path" else "some/model", "--yes"]) == 2
    assert str(home) in capsys.readouterr().err
    assert (home / WEIGHTS).is_file()


# places --------------------------------------------------------------------------------------------------


def placed(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of models of each kind of place."""
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    folders = {
        "lmstudio": home / ".lmstudio" / "models",
        "older": home / ".cache" / "lm-studio" / "models",
        "settings": tmp_path / "elsewhere",
        "pointer": tmp_path / "pointed" / "models",
        "variable": tmp_path / "mine",
    }
    if where == "settings":
        (home / ".lmstudio").mkdir()
        told = {"downloadsFolder": str(folders[where])}
        (home / ".lmstudio" / "settings.json").write_text(json.dumps(told))
    if where == "pointer":
        (home / ".lmstudio-home-pointer").write_text(f"{tmp_path / 'pointed'}\n")
    if where == "variable":
        listed = os.pathsep.join([str(tmp_path / "absent"), str(folders[where]), ""])
        monkeypatch.setenv("MLX_DSPARK_MODEL_DIRS", listed)
    return folders[where]


@pytest.mark.parametrize("where", ["lmstudio", "older", "settings", "pointer", "variable"])
@pytest.mark.parametrize("packaging", ["folder", "gguf"])
def test_a_model_is_found_where_it_is_and_not_fetched_again(
    tmp_path: Path, hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, where: str, packaging: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    home = placed(tmp_path, where, monkeypatch) / "owner" / "model"
    if packaging == "folder":
        shutil.copytree(folder, home)
    else:
        save_tiny_gguf(home / "model-Q4.gguf")
    for name in (ID, "model"):
        ref = resolve_model(name, cache_dir=tmp_path)
        assert ref.packaging == packaging
        assert ref.path.is_relative_to(home)
    assert hub.asked == []
    assert run(["models", "--local", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["name"], found["installed"], found["trouble"]) == (ID, True, None)
    assert Path(found["path"]).is_relative_to(home)
    assert found["fit"]["context"] == found["fit"]["declared_context"] == 512
    if packaging == "folder":
        assert resolve_drafter(ID).path == home


@pytest.mark.parametrize("damage", ["{", "[]", '{"downloadsFolder": 3}', '{"downloadsFolder": "a\\u0000b"}'])
def test_settings_that_make_no_sense_are_passed_over(
    tmp_path: Path, hub: Hub, folder: Path, damage: str
) -> None:
    home = tmp_path / "home" / ".lmstudio"
    shutil.copytree(folder, home / "models" / "a" / "b")
    (home / "settings.json").write_text(damage)
    assert resolve_model("a/b", cache_dir=tmp_path).path == home / "models" / "a" / "b"


def test_a_bare_name_of_several_models_is_refused_and_every_place_that_is_none_is_told(
    tmp_path: Path,
    hub: Hub,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = (placed(tmp_path, where, monkeypatch) for where in ("lmstudio", "variable"))
    for home in (first / "a" / "model", second / "model"):
        shutil.copytree(folder, home)
    with pytest.raises(ModelNotFound) as error:
        resolve_model("model", cache_dir=tmp_path)
    assert str(first / "a" / "model") in str(error.value)
    assert str(second / "model") in str(error.value)
    assert run(["models", "--local", "--json"]) == 0
    assert f"{tmp_path / 'absent'}, which is no folder" in capsys.readouterr().err


def test_a_short_name_is_removed_as_it_is_pulled(
    hub: Hub, tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("mlx-community/Qwen3-8B-8bit", folder)
    assert run(["pull", "qwen3-8b"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.is_dir()
    assert run(["rm", "qwen3-8b", "--yes"]) == 0
    assert not path.exists()
    assert run(["rm", "qwen3-8b", "--yes"]) == 2
    assert "mlx-community/Qwen3-8B-8bit" in capsys.readouterr().err


# inspect -------------------------------------------------------------------------------------------------


def test_a_model_is_inspected_without_its_weights(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the small files alone, which tell its row too; a drafter is fetched: its tensors tell of it."""
    hub.add("mlx-community/Qwen3-8B-8bit", save_tiny(tmp_path / "m", "qwen3"))
    assert run(["inspect", "qwen3-8b", "--json"]) == 0
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert (told["name"], told["kind"], told["live"]) == ("mlx-community/Qwen3-8B-8bit", "model", True)
    assert told["facts"]["hub_id"] == told["name"]
    assert "qwen3-8b" in told["facts"]["no_pair_because"]
    assert (told["facts"]["fetched"], told["facts"]["bytes"] > 0) == (False, True)
    assert "`mlx-dspark pull mlx-community/Qwen3-8B-8bit` fetches them" in shown.err
    assert not [name for method, name, _ in hub.asked if method == "GET" and name.endswith(".safetensors")]
    hub.add("maker/head", save_tiny_dspark(tmp_path / "d"))
    assert run(["inspect", "maker/head", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "drafter"
    broken = tmp_path / "m" / "config.json"
    broken.write_text(json.dumps(json.loads(broken.read_text()) | {"quantization": "4bit"}))
    hub.add("maker/broken", tmp_path / "m")
    assert run(["inspect", "maker/broken"]) == 2
    assert "quantization" in capsys.readouterr().out


def _cut(folder: Path) -> Path:
    save_tiny(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return folder


LOCAL: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a model": (save_tiny, ""),
    "a drafter": (save_tiny_dspark, "is a drafter and no model"),
    "a model that is cut short": (_cut, "cut short"),
    "a folder of something else": (lambda folder: (folder.mkdir(), folder)[1], "config.json"),
}


@pytest.mark.parametrize("kind", LOCAL)
def test_what_is_here_already_is_pulled_only_if_it_could_be_loaded(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make, told = LOCAL[kind]
    folder = make(tmp_path / "it")
    assert run(["pull", str(folder)]) == (2 if told else 0)
    said = capsys.readouterr()
    assert told in said.err if told else str(folder) in said.out
