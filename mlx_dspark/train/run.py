"""The whole pipeline: check, answer, train, export, evaluate, describe."""

from __future__ import annotations

import dataclasses
import errno
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_dspark.catalog.checkpoint import computes_on_cpu
from mlx_dspark.catalog.progress import LoadProgress, Progress, silent
from mlx_dspark.catalog.resolve import resolve_model
from mlx_dspark.contracts import TargetSpec
from mlx_dspark.drafters.block import BlockDrafter
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.paths import default_cache_dir
from mlx_dspark.foundation.settings import LoadSettings, TrainSettings
from mlx_dspark.session.pair import load_parts
from mlx_dspark.train.answers import answers, data_stores, read_asked
from mlx_dspark.train.card import Facts, model_card
from mlx_dspark.train.checkpoint import checkpoints, write_json
from mlx_dspark.train.checks import SHAPE, check_settings, check_teacher
from mlx_dspark.train.data import TokenStore
from mlx_dspark.train.evaluate import Evaluation, as_dict, evaluate
from mlx_dspark.train.export import export_drafter
from mlx_dspark.train.folder import RunFolder
from mlx_dspark.train.generate import Answering
from mlx_dspark.train.progress import Remark, TrainEvent, TrainFinished
from mlx_dspark.train.shape import (
    DrafterShape,
    covering_tokens,
    deepspec_config,
    default_shape,
    mask_token,
)
from mlx_dspark.train.start import Base, Start, base_drafter, existing_drafter, new_drafter, parameters_of
from mlx_dspark.train.target import Teacher, load_teacher
from mlx_dspark.train.trainer import Trainer

SAMPLE_TOKENS = 256
"""Tokens on which a new drafter is scaled to its target."""

FREE = frozenset(
    {
        *("output", "data", "prompts", "self_prompts", "self_openers", "data_rows", "data_time_limit"),
        "held_out",
        *("held_out_prompts", "held_out_tokens", "steps", "time_limit", "checkpoint_every", "compile"),
    }
)
"""Settings that may change when a run goes on."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

PipelineEvent = TrainEvent | Answering | Remark
Emit = Callable[[PipelineEvent], None]


@dataclass(frozen=True)
class Outcome:
    """What a run left behind. `evaluation` is None when it was stopped, not asked for, or has no prompts."""

    folder: Path
    finished: TrainFinished
    evaluation: Evaluation | None


def run_training(
    settings: TrainSettings, *, progress: Progress = silent, emit: Emit = lambda _: None
) -> Outcome:
    """Make a drafter as `settings` say. An interrupted run goes on when it is called again.

    Raises UsageError, LoadError or DownloadError before the first answer, UsageError when a disk fills up
    later, and KeyboardInterrupt after an interrupt, when everything is saved.
    """
    check_settings(settings)
    folder, settings = RunFolder(Path(str(settings.output))), sized(settings, on_cpu=computes_on_cpu())
    asked = read_asked(settings)
    named = None if settings.target is None else str(settings.target)
    found = resolve_model(named, cache_dir=default_cache_dir(), progress=progress)
    teacher = load_teacher(found, progress=progress)
    check_teacher(teacher, settings)
    base = None if settings.warm_start is None else base_drafter(settings, teacher.target, progress)
    shape = None if base is not None else chosen_shape(settings, teacher.target.spec)
    with folder.claimed(_identity(settings, teacher.content_hash)), _disk_errors_told(folder):
        folder.check_room(_parameters(base, shape, teacher))
        stores = data_stores(settings, folder, teacher.content_hash)
        progress(LoadProgress("answering prompts"))
        with interrupts() as stopping:
            answered = answers(settings, asked, stores, teacher, emit, stopping)
            if stopping():
                raise KeyboardInterrupt
        progress(LoadProgress("preparing the drafter"))
        start = _start(settings, shape, base, folder, teacher, answered.store)
        trainer = Trainer(start, teacher.target, answered.store, settings, folder)
        with interrupts() as stopping:
            finished = trainer.run(emit, stopping)
        if finished.reason == "stopped":
            raise KeyboardInterrupt
        export_drafter(folder.output, start.config, trainer.weights(), bits=settings.bits)
        contents = answered.held_out or {"held-out": trainer.batches.held_out_prompts()}
        peak = trainer.peak
        del trainer
        mx.clear_cache()
        evaluation = _evaluation(settings, folder, contents, progress, emit)
        facts = Facts(
            teacher.name,
            teacher.content_hash,
            start,
            {**_effective(settings), "learning_rate": peak},
            len(answered.store),
            answered.sources,
            base,
            finished,
            evaluation,
        )
        (folder.output / "README.md").write_text(model_card(facts), encoding="utf-8")
        return Outcome(folder.output, finished, evaluation)


@contextmanager
def _disk_errors_told(folder: RunFolder) -> Iterator[None]:
    """Turns the system's errors, a full disk's above all, into one that says where the run goes on."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise UsageError(
                f"{error.filename or folder.output} cannot be read or written: {error.strerror or error}.",
                "Mend that and give the same command again; it goes on with what is saved.",
                field="output",
            ) from error
        saved = checkpoints(folder.checkpoints)
        kept = f"goes on from {saved[-1].name}" if saved else "goes on with the answers that are stored"
        raise UsageError(
            f"The disk is full: {error.filename or folder.output} cannot be written.",
            f"Make room and give the same command again; it {kept}.",
            field="output",
        ) from error


def _parameters(base: Base | None, shape: DrafterShape | None, teacher: Teacher) -> int:
    """Numbers in the drafter that will be trained."""
    if shape is None:
        assert base is not None
        return sum(weight.size for weight in base.start.checkpoint.weights.values())
    return parameters_of(shape, deepspec_config(shape, teacher.target.spec, teacher.config, 0))


def sized(settings: TrainSettings, *, on_cpu: bool) -> TrainSettings:
    """`settings` with the sizes that depend on the device."""
    sizes = (
        {"data_rows": 16, "batch": 4, "anchors": 8}
        if on_cpu
        else {"data_rows": 256, "batch": 32, "anchors": 64}
    )
    unset = {name: size for name, size in sizes.items() if getattr(settings, name) is None}
    return dataclasses.replace(settings, **unset)


def chosen_shape(settings: TrainSettings, spec: TargetSpec) -> DrafterShape:
    """The default shape for the target, with what the settings choose. Raises UsageError for a misfit."""
    shape = default_shape(spec)
    given = {name: getattr(settings, name) for name in SHAPE if getattr(settings, name) is not None}
    if given.get("markov") == "none":
        given.setdefault("markov_rank", 0)
    if "draft_vocab" in given:
        given["draft_vocab"] = given["draft_vocab"] or None
        given.setdefault("own_head", given["draft_vocab"] is not None)
    if "taps" in given:
        given["taps"] = tuple(given["taps"])
    shape = dataclasses.replace(shape, **given)
    if shape.draft_vocab is not None and shape.draft_vocab >= spec.vocab:
        raise UsageError(
            f"--draft-vocab is {shape.draft_vocab}, and the target's vocabulary has {spec.vocab} tokens.",
            "Give a smaller number, or 0 for all of them.",
            field="draft_vocab",
        )
    if not shape.taps or shape.taps[-1] >= spec.layers:
        raise UsageError(
            f"--taps is {list(shape.taps)}, and the target has layers 0 to {spec.layers - 1}.",
            "Name layers that there are.",
            field="taps",
        )
    return shape


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Whether the process was asked to stop (Ctrl-C or SIGTERM). A second Ctrl-C stops at once.

    Only the main thread of a process is told; elsewhere the answer is always no.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        asked.set()
        signal.signal(number, before[signal.Signals(number)])

    before = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _identity(settings: TrainSettings, content_hash: str) -> dict[str, Any]:
    """What may not change between the parts of one run."""
    values = {k.name: getattr(settings, k.name) for k in settings.knobs() if k.name not in FREE}
    named = {name: str(values[name]) for name in ("target", "warm_start") if values[name] is not None}
    return {**values, **named, "target_hash": content_hash}


def _start(
    settings: TrainSettings,
    shape: DrafterShape | None,
    base: Base | None,
    folder: RunFolder,
    teacher: Teacher,
    store: TokenStore,
) -> Start:
    """The newest checkpoint, the drafter to warm up from, or a new one."""
    if saved := checkpoints(folder.checkpoints):
        return existing_drafter(saved[-1], teacher.target)
    if shape is None:
        assert base is not None
        return base.start
    spec = teacher.target.spec
    counts = store.counts(spec.vocab)
    kept = None if shape.draft_vocab is None else covering_tokens(counts, shape.draft_vocab)
    config = deepspec_config(shape, spec, teacher.config, mask_token(teacher.tokenizer, counts))
    return new_drafter(shape, config, kept, teacher.target, _sample(store, spec), settings.seed)


def _sample(store: TokenStore, spec: TargetSpec) -> mx.array:
    """Some answers, one after the other: `[1, n]`."""
    size = min(SAMPLE_TOKENS, spec.context)
    taken = [store.sequence(i)[0] for i in np.linspace(0, len(store) - 1, 32).astype(int)]
    return mx.array(np.concatenate([ids[: size // 4] for ids in taken])[:size].astype(np.int32))[None]


def _evaluation(
    settings: TrainSettings,
    folder: RunFolder,
    contents: Mapping[str, Sequence[tuple[int, ...]]],
    progress: Progress,
    emit: Emit,
) -> Evaluation | None:
    if not settings.held_out_prompts:
        return None
    contents = {name: each[: settings.held_out_prompts] for name, each in contents.items()}
    if not any(contents.values()):
        emit(Remark("Not evaluated: there are too few answers to hold one out. Give --held-out FILE."))
        return None
    progress(LoadProgress("evaluating on held-out prompts"))
    parts = load_parts(
        LoadSettings(model=settings.target, drafter=folder.output, mode="dspark", lookup_drafts=False),
        progress,
    )
    assert isinstance(parts.drafter, BlockDrafter)
    evaluation = evaluate(
        parts.target, parts.drafter, contents, end_ids=parts.end_ids, tokens=settings.held_out_tokens
    )
    write_json(folder.run / "evaluation.json", as_dict(evaluation))
    return evaluation


def _effective(settings: TrainSettings) -> dict[str, Any]:
    """The settings that matter to the result and are shown nowhere else, those left open left out."""
    shown = FREE - {"time_limit"} | {"target", "warm_start", *SHAPE}
    values = {k.name: getattr(settings, k.name) for k in settings.knobs() if k.name not in shown}
    return {name: value for name, value in values.items() if value is not None}
