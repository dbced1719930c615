"""Laws of the pipeline: what it writes loads and drafts; what cannot work is refused before it begins."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from filelock import FileLock

from mlx_dspark.catalog.formats import DrafterCheckpoint, read_drafter
from mlx_dspark.catalog.resolve import resolve_drafter
from mlx_dspark.cli.main import run as command_line
from mlx_dspark.cli.show import Progress
from mlx_dspark.cli.train import _Teller
from mlx_dspark.contracts import Observation
from mlx_dspark.drafters.load import load_drafter
from mlx_dspark.foundation.errors import (
    BadCheckpoint,
    DsparkError,
    LoadError,
    UnsupportedModel,
    UsageError,
)
from mlx_dspark.foundation.settings import TrainSettings
from mlx_dspark.session import load
from mlx_dspark.targets.load import target_of
from mlx_dspark.train import run as run_module
from mlx_dspark.train import trainer as trainer_module
from mlx_dspark.train.checkpoint import checkpoints
from mlx_dspark.train.data import Answer, DiskStore
from mlx_dspark.train.export import export_drafter
from mlx_dspark.train.folder import RunFolder
from mlx_dspark.train.generate import Answering
from mlx_dspark.train.progress import CheckpointSaved, Remark, TrainFinished, TrainProgress, TrainStarted
from mlx_dspark.train.run import PipelineEvent, run_training
from tests.tiny import save_tiny, tiny_config, tiny_llama
from tests.tiny_drafters import save_tiny_dspark

PROMPTS = [f"Say the word {i}" for i in range(60)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target") / "tiny", num_hidden_layers=4)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "words.txt"
    path.write_text("\n\n".join(PROMPTS), encoding="utf-8")
    return path


def settings(target: Path, prompts: Path, output: Path, **given: Any) -> TrainSettings:
    """Six quick steps."""
    small = {"steps": 6, "batch": 4, "width": 64, "anchors": 3, "checkpoint_every": 4, "draft_vocab": 128}
    small |= {"answer_tokens": 24, "data_rows": 64, "markov_rank": 64, "held_out_prompts": 0}
    named = {"target": str(target), "output": str(output), "prompts": str(prompts)}
    return TrainSettings.of(named | small | given)


def test_the_whole_pipeline(target: Path, prompts: Path, tmp_path: Path) -> None:
    """Answers, steps, checkpoints, a drafter that loads, its card, and figures of the real engine."""
    events: list[PipelineEvent] = []
    (tmp_path / "others.txt").write_text("Say other words\n\nSay the word 3\n\nAnd more", encoding="utf-8")
    asked = settings(
        target,
        prompts,
        tmp_path / "out",
        bits=4,
        held_out=str(tmp_path / "others.txt"),
        held_out_prompts=3,
        held_out_tokens=12,
    )
    outcome = run_training(asked, emit=events.append)
    assert outcome.finished.reason == "steps"
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [4, 6]
    assert sum(len(event.losses) for event in events if isinstance(event, TrainProgress)) == 6
    assert outcome.evaluation is not None
    assert {each.content for each in outcome.evaluation.accepted} == {"others"}
    assert [e.text for e in events if isinstance(e, Remark)] == [
        "1 of 60 prompts is also held out, and is not trained on."
    ]
    assert all(1 <= each.length <= 8 for each in outcome.evaluation.accepted)
    assert [each.temperature for each in outcome.evaluation.calibrations] == [0.0, 1.0]
    assert "plain decoding" in outcome.evaluation.verdict
    card = (outcome.folder / "README.md").read_text(encoding="utf-8")
    stored = DiskStore(outcome.folder / "run" / "data", _mark(outcome.folder / "run" / "data"))
    assert f"| words.txt | {len(stored)} |" in card
    assert stored._mark in card
    assert "| learning_rate | 0.0045 |" in card
    assert "None" not in card
    assert outcome.evaluation.verdict in card
    logged = (outcome.folder / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["event"] for line in logged][-1] == "TrainFinished"
    session = load(target, drafter=outcome.folder, max_draft=0, lookup_drafts=False)
    plain = load(target, mode="baseline")
    options = {"max_new_tokens": 16, "chat_template": False}
    assert session.generate("Say", **options).token_ids == plain.generate("Say", **options).token_ids
    assert session.generate("Say", **options).sources["dspark"].rounds


def test_the_command_goes_on_where_it_was_stopped(
    target: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An interrupt saves and exits with 130; the same command then ends as an uninterrupted one."""
    flags = (
        "--steps 6 --batch 4 --width 64 --anchors 3 --draft-vocab 128 --answer-tokens 24 --held-out-prompts 0"
    )

    def command(output: str) -> int:
        named = ["--target", str(target), "--prompts", str(prompts), "--output", str(tmp_path / output)]
        return command_line(["train", *named, *flags.split()])

    assert command("whole") == 0
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "interrupts", stopping_after(2, phase=2))
        assert command("parts") == 130
    assert "goes on from here" in capsys.readouterr().err
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    assert command("parts") == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]
    err = capsys.readouterr().err
    assert "from step 2" in err
    assert "--drafter" in err


def stopping_after(steps: int, *, phase: int) -> Callable[[], Any]:
    """Stands for Ctrl-C after so many questions in the first phase, of answers, or the second, of steps."""
    phases = iter(range(1, 1000))

    @contextmanager
    def interrupts() -> Iterator[Callable[[], bool]]:
        asked = iter(range(100_000))
        stops = next(phases) == phase
        yield lambda: stops and next(asked) >= steps

    return interrupts


def test_answers_are_kept_when_the_command_is_stopped(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = settings(target, prompts, tmp_path / "out", data_rows=4)
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "interrupts", stopping_after(150, phase=1))
        with pytest.raises(KeyboardInterrupt):
            run_training(asked)
    data = tmp_path / "out" / "run" / "data"
    kept = DiskStore(data, _mark(data))
    assert 0 < len(kept) < 60
    events: list[PipelineEvent] = []
    run_training(asked, emit=events.append)
    told = [event for event in events if isinstance(event, Answering)][-1]
    assert told.known == sum(kept.knows(key) for key in DiskStore(data, _mark(data))._known)


def test_an_unfinished_run_is_no_drafter_yet(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "out").claimed({}), pytest.raises(BadCheckpoint, match="unfinished") as refusal:
        resolve_drafter(str(tmp_path / "out"))
    assert "again" in refusal.value.next_step


@pytest.mark.parametrize("name", ["shipped:smollm2-135m", "smollm2-135m"])
def test_a_shipped_drafter_is_found_by_its_name(name: str) -> None:
    assert read_drafter(resolve_drafter(name).path).packed is not None


def test_a_second_run_answers_the_prompts_that_are_new(target: Path, prompts: Path, tmp_path: Path) -> None:
    """Of an output that is made longer, and of a data folder that is shared; the card names all sources."""
    (tmp_path / "more.txt").write_text("Say nothing\n\nSay the word 3\n\nSay all of it", encoding="utf-8")
    data = tmp_path / "shared"
    run_training(settings(target, prompts, tmp_path / "a", data=str(data), steps=1))
    before = len(DiskStore(data, _mark(data)))
    events: list[PipelineEvent] = []
    more = tmp_path / "more.txt"
    run_training(settings(target, more, tmp_path / "b", data=str(data), steps=1), emit=events.append)
    told = [event for event in events if isinstance(event, Answering)][-1]
    assert (told.prompts, told.known) == (3, 1)
    store = DiskStore(data, _mark(data))
    assert len(store) == before + 2 - told.short
    alone = settings(target, prompts, tmp_path / "c", data=str(data), steps=1)
    run_training(dataclasses.replace(alone, prompts=()))
    for name in ("b", "c"):
        card = (tmp_path / name / "README.md").read_text(encoding="utf-8")
        for source, count in store.sources().items():
            assert f"| {source} | {count} |" in card


def test_a_warm_start_keeps_shape_and_weights(target: Path, prompts: Path, tmp_path: Path) -> None:
    """Training further what an earlier run wrote; with no learning to speak of it stays what it was."""
    first = run_training(settings(target, prompts, tmp_path / "first"))
    further = TrainSettings.of(
        {
            **{"target": str(target), "output": str(tmp_path / "further"), "warm_start": str(first.folder)},
            **{"data": str(first.folder / "run" / "data"), "steps": 1, "batch": 4, "width": 64, "anchors": 3},
            **{"learning_rate": 1e-9, "held_out_prompts": 0},
        }
    )
    second = run_training(further)
    old, new = read_drafter(first.folder), read_drafter(second.folder)
    assert new.config == old.config
    card = (second.folder / "README.md").read_text(encoding="utf-8")
    assert "Begun with the weights of `first` (DSpark drafter for tiny)." in card
    assert "Trained for 1 step in" in card
    assert str(tmp_path) not in card
    assert all(bool(mx.allclose(new.weights[n], w, atol=1e-3).item()) for n, w in old.weights.items())


NO_SHAPE = {"draft_vocab": None, "markov_rank": None}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no output": ({"output": None}, "output"),
    "nothing to answer": ({"prompts": ()}, "prompts"),
    "openers of no turns": ({"self_openers": "openers.txt"}, "self_openers"),
    "absent openers": ({"self_openers": "no such file.txt", "self_prompts": 4}, "self_openers"),
    "absent held-out prompts": ({"held_out": "no such file.txt"}, "held_out"),
    "absent prompts": ({"prompts": "no such file.jsonl"}, "prompts"),
    "too wide": ({"width": 4096}, "width"),
    "too many tokens": ({"draft_vocab": 5000}, "draft_vocab"),
    "borrowed reduced head": ({"own_head": False}, "draft_vocab"),
    "rank of no head": ({"markov": "none"}, "markov_rank"),
    "taps beyond": ({"taps": (0, 9)}, "taps"),
    "shape of another": ({"warm_start": "somewhere"}, "markov_rank"),
    "absent drafter": ({**NO_SHAPE, "warm_start": "no such folder"}, "warm_start"),
    "a model for a drafter": ({**NO_SHAPE, "warm_start": "TARGET"}, "warm_start"),
    "drafter of another width": ({**NO_SHAPE, "warm_start": "shipped:smollm2-135m"}, "warm_start"),
    "absent data": ({"prompts": (), "data": "no such folder"}, "data"),
    "absent second data": ({"data": ("new", "no such folder")}, "data"),
    "the same prompts twice": ({"held_out": "PROMPTS"}, "held_out"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_refused(
    case: str, target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is answered, no folder is made for data, and the corrected command works on that output."""
    monkeypatch.chdir(tmp_path)
    given, field = BAD[case]
    named = {"TARGET": str(target), "PROMPTS": str(prompts)}
    given = {name: named[value] if value in tuple(named) else value for name, value in given.items()}
    asked = {
        k.name: getattr(settings(target, prompts, tmp_path / "out"), k.name) for k in TrainSettings.knobs()
    }
    with pytest.raises((UsageError, LoadError)) as refusal:
        run_training(TrainSettings.of(asked | given))
    assert refusal.value.field == field
    assert refusal.value.next_step
    assert not (tmp_path / "out" / "run" / "data").exists()
    assert not (tmp_path / "no such folder").exists()
    assert not (tmp_path / "out" / "run" / "run.json").exists()


def test_answers_of_several_folders_add_up(target: Path, prompts: Path, tmp_path: Path) -> None:
    """A run on two folders sees the answers of both, and is the run on one folder that holds them all."""
    lines = prompts.read_text(encoding="utf-8").split("\n\n")
    homes, stores = [tmp_path / "a", tmp_path / "b"], []
    for home, some in zip(homes, (lines[:10], lines[10:22]), strict=True):
        given = tmp_path / f"{home.name}.txt"
        given.write_text("\n\n".join(some), encoding="utf-8")
        run_training(settings(target, given, tmp_path / f"run {home.name}", data=str(home), steps=1))
        stores.append(DiskStore(home, _mark(home)))
    both = DiskStore(tmp_path / "both", _mark(homes[0]))
    for store in stores:
        sequences = [store.sequence(index) for index in range(len(store))]
        both.append([Answer(ids[:n].tolist(), ids[n:].tolist()) for ids, n in sequences])
    events: list[PipelineEvent] = []
    weights = []
    for name, data in {"joined": homes, "one": [both.folder]}.items():
        asked = settings(target, prompts, tmp_path / name, data=tuple(map(str, data)), steps=3)
        outcome = run_training(dataclasses.replace(asked, prompts=()), emit=events.append)
        weights.append((outcome.folder / "model.safetensors").read_bytes())
    begun = [event.sequences for event in events if isinstance(event, TrainStarted)]
    assert len(both) == len(stores[0]) + len(stores[1])
    assert begun == [len(both) - 4] * 2
    assert weights[0] == weights[1]


def _mark(home: Path) -> str:
    """The target that the answers in a folder are of."""
    return json.loads((home / "manifest.json").read_text(encoding="utf-8"))["target"]


def test_a_folder_that_is_not_ours_is_refused(target: Path, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="was not written by train"):
        run_training(settings(target, prompts, tmp_path))


def test_a_folder_in_use_is_refused(target: Path, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "run").mkdir(parents=True)
    with FileLock(tmp_path / "out" / "run" / "lock"), pytest.raises(UsageError, match="in use"):
        run_training(settings(target, prompts, tmp_path / "out"))


def test_a_run_does_not_go_on_with_other_settings(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "out")
    with folder.claimed({"batch": 16}):
        pass
    with folder.claimed({"batch": 4, "taps": (0, 1)}):
        folder.bind()
        (folder.checkpoints / "step-00000001").mkdir()
        (folder.checkpoints / "step-00000001" / "state.json").write_text("{}")
    with folder.claimed({"batch": 4, "taps": (0, 1)}):
        pass
    with pytest.raises(UsageError, match="begun with 4") as refusal, folder.claimed({"batch": 8}):
        pass
    assert refusal.value.field == "batch"


def test_a_full_disk_is_refused(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000))
    with pytest.raises(UsageError, match="has room for") as refusal:
        run_training(settings(target, prompts, tmp_path / "out"))
    assert refusal.value.field == "output"
    assert not checkpoints(tmp_path / "out" / "run" / "checkpoints")
    assert not (tmp_path / "out" / "run" / "data").exists()


@pytest.mark.parametrize("full_at", ["checkpoint", "export", "log"])
def test_a_disk_that_fills_up_leaves_the_last_checkpoint(
    full_at: str, target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command then goes on from there and ends as a run that had room."""
    asked = settings(target, prompts, tmp_path / "out", steps=3, checkpoint_every=2)
    names = {"export": "new.safetensors", "log": "log.jsonl"}
    name, fails = names.get(full_at, "model.safetensors"), iter([full_at != "checkpoint", True])
    saves, opened = mx.save_safetensors, Path.open

    def save(file: str, *rest: Any) -> None:
        if Path(file).name == name and next(fails):
            Path(file).write_bytes(b"half")
            raise RuntimeError("[write] Unable to write 8 bytes to file.")
        saves(file, *rest)

    def open_(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if path.name == name and mode == "a" and checkpoints(tmp_path / "out" / "run" / "checkpoints"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return opened(path, mode, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(mx, "save_safetensors", save)
        patch.setattr(Path, "open", open_)
        with pytest.raises(UsageError, match="disk is full") as refusal:
            run_training(asked)
    saved = checkpoints(tmp_path / "out" / "run" / "checkpoints")
    assert saved
    assert saved[-1].name in refusal.value.next_step
    assert not list((tmp_path / "out").rglob("*.partial"))
    assert not list((tmp_path / "out").rglob("new.*"))
    events: list[PipelineEvent] = []
    run_training(asked, emit=events.append)
    begun = next(event.step for event in events if isinstance(event, TrainStarted))
    assert f"step-{begun:08d}" == saved[-1].name
    run_training(settings(target, prompts, tmp_path / "whole", steps=3, checkpoint_every=2))
    made = [(tmp_path / home / "model.safetensors").read_bytes() for home in ("out", "whole")]
    assert made[0] == made[1]


@pytest.mark.parametrize("where", ["file/out", "/proc/out", "x" * 300, "~nobody of that name/out"])
def test_an_output_that_cannot_be_made_is_refused(
    where: str, target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written") as refusal:
        run_training(settings(target, prompts, Path(where)))
    assert refusal.value.field == "output"


def test_checkpoints_come_by_time_too(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "CHECKPOINT_SECONDS", 0.0)
    events: list[PipelineEvent] = []
    run_training(settings(target, prompts, tmp_path / "out", steps=3), emit=events.append)
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [1, 2, 3]


@pytest.mark.parametrize("few", [4, 12])
def test_held_out_answers_come_from_the_data_or_it_says_why_not(
    few: int, target: Path, tmp_path: Path
) -> None:
    (tmp_path / "few.txt").write_text("\n\n".join(PROMPTS[:few]), encoding="utf-8")
    events: list[PipelineEvent] = []
    asked = settings(
        target, tmp_path / "few.txt", tmp_path / "out", steps=1, held_out_prompts=2, held_out_tokens=8
    )
    outcome = run_training(asked, emit=events.append)
    told = [event.text for event in events if isinstance(event, Remark)]
    assert (outcome.evaluation is None) == (few == 4) == any("too few answers" in text for text in told)


def test_a_target_without_a_head_of_its_own_is_refused() -> None:
    """Its output is more than its head applied to what enters it, so there is nothing to learn from."""

    class Capped(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner, self.model, self.lm_head = [inner], inner.model, inner.lm_head

        @property
        def layers(self) -> Any:
            return self.model.layers

        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            return mx.tanh(self.inner[0](tokens, cache=cache))

    target = target_of(Capped(tiny_llama()), tiny_config())
    with pytest.raises(UnsupportedModel, match="cannot be trained") as refusal:
        target.features(mx.array([[1, 2]]), (0,))
    assert refusal.value.field == "target"


def drafts(folder: Path, bits: int) -> mx.array:
    """Logits of one block after three random positions."""
    drafter = load_drafter(folder, quantize_bits=bits, dtype=mx.float32)
    drafter.bind(target_of(tiny_llama(), tiny_config()))
    features = mx.random.normal((1, 3, 2 * 64), key=mx.random.key(3))
    rows = drafter.new_rows(1)
    drafter.observe(rows, Observation([[4, 5, 6]], features, [0], [0]))
    return drafter.trace(rows, [7]).chain.logits


def exported(tmp_path: Path, bits: int, **given: Any) -> Path:
    source = save_tiny_dspark(tmp_path / "source", **given)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    weights = mx.load(str(source / "model.safetensors"))
    assert isinstance(weights, dict)
    return export_drafter(tmp_path / "exported", config, weights, bits=bits)


def plain_copy(checkpoint: DrafterCheckpoint, weights: dict[str, mx.array], source: Path, copy: Path) -> Path:
    """The drafter of `source` with these weights, nothing packed."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization")
    offsets = {} if checkpoint.d2t is None else {"d2t": checkpoint.d2t}
    copy.mkdir()
    mx.save_safetensors(str(copy / "model.safetensors"), weights | offsets)
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return copy


@pytest.mark.parametrize(
    "given", [{}, {"draft_vocab": 96}, {"markov": "rnn"}], ids=["plain", "reduced", "rnn"]
)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_drafter_is_what_its_numbers_say(bits: int, given: dict[str, Any], tmp_path: Path) -> None:
    """Taken as it is stored, or repacked at load to the bits asked for."""
    folder, other = exported(tmp_path, bits, **given), 12 - bits
    checkpoint = read_drafter(folder)
    assert checkpoint.packed is not None
    assert checkpoint.packed.packing.bits == bits
    exact = {name: weight.astype(mx.float32) for name, weight in checkpoint.weights.items()}
    for name, (weight, scales, biases) in checkpoint.packed.matrices.items():
        wide = (scales.astype(mx.float32), biases.astype(mx.float32))
        exact[f"{name}.weight"] = mx.dequantize(weight, *wide, group_size=64, bits=bits)
    unpacked = plain_copy(checkpoint, exact, folder, tmp_path / "exact")
    for asked in (0, bits):
        assert mx.allclose(drafts(folder, asked), drafts(unpacked, 0), atol=1e-4, rtol=1e-4)
    rounded = plain_copy(checkpoint, checkpoint.weights, folder, tmp_path / "rounded")
    assert mx.array_equal(drafts(folder, other), drafts(rounded, other))
    before = (tmp_path / "source" / "model.safetensors").stat().st_size
    assert (folder / "model.safetensors").stat().st_size < before * bits / 16


DAMAGE: dict[str, Callable[[dict[str, Any], dict[str, mx.array]], Any]] = {
    "scales gone": lambda _, w: w.pop("fc.scales"),
    "biases gone": lambda _, w: w.pop("fc.biases"),
    "weight gone": lambda _, w: w.pop("fc.weight"),
    "scales cut": lambda _, w: w.update({"fc.scales": w["fc.scales"][:, :1]}),
    "rows gone": lambda _, w: w.update({n: w[n][:8] for n in ("fc.weight", "fc.scales", "fc.biases")}),
    "bits lie": lambda c, _: c["quantization"].update(bits=8),
    "group lies": lambda c, _: c["quantization"].update(group_size=32),
    "nothing packed": lambda _, w: [w.pop(n) for n in list(w) if n.endswith(("scales", "biases"))],
    "undeclared": lambda c, _: c.pop("quantization"),
    "another mode": lambda c, _: c["quantization"].update(mode="mxfp4"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_packed_drafter_is_refused(damage: str, tmp_path: Path) -> None:
    folder = exported(tmp_path, 4)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    mx.eval(weights)
    DAMAGE[damage](config, weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises((BadCheckpoint, UnsupportedModel)) as refusal:
        load_drafter(folder)
    assert isinstance(refusal.value, DsparkError)
    assert refusal.value.next_step


@pytest.mark.parametrize(("step", "said"), [(1, "trained 1 step in"), (2, "trained 2 steps in")])
def test_numbers_agree_with_their_nouns(step: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    _Teller(Progress())(TrainFinished(step, 1.0, "steps"))
    assert capsys.readouterr().err.startswith(said)
