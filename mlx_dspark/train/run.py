"""The whole pipeline: check, answer, train, export, evaluate, describe."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
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
from mlx_dspark.train.card import Facts, model_card
from mlx_dspark.train.checkpoint import checkpoints, write_json
from mlx_dspark.train.data import DiskStore, JoinedStore, TokenStore
from mlx_dspark.train.evaluate import Evaluation, as_dict, evaluate
from mlx_dspark.train.export import export_drafter
from mlx_dspark.train.folder import RunFolder
from mlx_dspark.train.generate import Answerer, Recipe, WaveDone
from mlx_dspark.train.progress import TrainEvent, TrainFinished
from mlx_dspark.train.prompts import OPENERS, Opener, encode, read_openers, read_prompts
from mlx_dspark.train.shape import (
    DrafterShape,
    covering_tokens,
    deepspec_config,
    default_shape,
    mask_token,
)
from mlx_dspark.train.start import Start, existing_drafter, new_drafter
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

SHAPE = ("layers", "block_size", "taps", "markov", "markov_rank", "confidence", "draft_vocab")
SHAPE += ("own_embedding", "own_head")

PipelineEvent = TrainEvent | WaveDone
Emit = Callable[[PipelineEvent], None]


@dataclass(frozen=True)
class Outcome:
    """What a run left behind. `evaluation` is None when it was stopped, or not asked for."""

    folder: Path
    finished: TrainFinished
    evaluation: Evaluation | None


def run_training(
    settings: TrainSettings, *, progress: Progress = silent, emit: Emit = lambda _: None
) -> Outcome:
    """Make a drafter as `settings` say. An interrupted run goes on when it is called again.

    Raises UsageError, LoadError or DownloadError before the first step, and KeyboardInterrupt after an
    interrupt, when everything is saved.
    """
    folder, settings = _checked(settings), sized(settings, on_cpu=computes_on_cpu())
    prompts = [prompt for path in _texts(settings.prompts) for prompt in read_prompts(Path(path))]
    openers = OPENERS if settings.self_openers is None else read_openers(Path(settings.self_openers))
    held_out = {Path(path).stem: read_prompts(Path(path)) for path in _texts(settings.held_out)}
    named = None if settings.target is None else str(settings.target)
    found = resolve_model(named, cache_dir=default_cache_dir(), progress=progress)
    teacher = load_teacher(found, progress=progress)
    shape = None if settings.warm_start is not None else chosen_shape(settings, teacher.target.spec)
    _refuse_unfit(teacher, settings)
    with folder.claimed(_identity(settings, teacher.content_hash)):
        store = _answers(settings, folder, prompts, openers, teacher, progress, emit)
        progress(LoadProgress("preparing the drafter"))
        start = _start(settings, shape, folder, teacher, store)
        trainer = Trainer(start, teacher.target, store, settings, folder)
        with interrupts() as stopping:
            finished = trainer.run(emit, stopping)
        if finished.reason == "stopped":
            raise KeyboardInterrupt
        export_drafter(folder.output, start.config, trainer.weights(), bits=settings.bits)
        contents = {name: [encode(teacher.tokenizer, p) for p in each] for name, each in held_out.items()}
        contents = contents or {"held-out": trainer.batches.held_out_prompts()}
        del trainer
        mx.clear_cache()
        evaluation = _evaluation(settings, folder, contents, progress)
        facts = Facts(
            teacher.name,
            sum(weight.size for weight in start.checkpoint.weights.values()),
            start.config,
            _changed(settings),
            len(store),
            _sources(settings),
            finished,
            evaluation,
        )
        (folder.output / "README.md").write_text(model_card(facts), encoding="utf-8")
        return Outcome(folder.output, finished, evaluation)


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
            f"draft_vocab is {shape.draft_vocab}, and the target's vocabulary has {spec.vocab} tokens.",
            "Give a smaller number, or 0 for all of them.",
            field="draft_vocab",
        )
    if not shape.taps or shape.taps[-1] >= spec.layers:
        raise UsageError(
            f"taps is {list(shape.taps)}, and the target has layers 0 to {spec.layers - 1}.",
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


def _checked(settings: TrainSettings) -> RunFolder:
    """The output folder, after everything that settings alone can tell."""
    if settings.output is None:
        raise UsageError(
            "output is not given.", "Name the folder of the drafter with --output.", field="output"
        )
    if settings.self_openers is not None and not settings.self_prompts:
        raise UsageError(
            "self_openers is given, and self_prompts is 0.",
            "Say with --self-prompts how many turns to write.",
            field="self_openers",
        )
    if not settings.prompts and not settings.self_prompts and not settings.data:
        raise UsageError(
            "There is nothing to answer: prompts, self_prompts and data are all absent.",
            "Give --prompts FILE, --self-prompts NUMBER, or the --data of an earlier run.",
            field="prompts",
        )
    if settings.warm_start is not None:
        for name in SHAPE:
            if getattr(settings, name) is not None:
                raise UsageError(
                    f"{name} is given, and the drafter of warm_start has its own.",
                    "Leave one of the two out.",
                    field=name,
                )
    return RunFolder(Path(settings.output))


def _refuse_unfit(teacher: Teacher, settings: TrainSettings) -> None:
    """Raises UnsupportedModel for a target that cannot teach, UsageError for sequences beyond its context."""
    teacher.target.features(mx.array([[0]]), (-1,))
    teacher.target.embed(mx.array([0]))
    context = teacher.target.spec.context
    if settings.width > context:
        raise UsageError(
            f"width is {settings.width}, and the target's context holds {context} tokens.",
            "Give a smaller one.",
            field="width",
        )


def _identity(settings: TrainSettings, content_hash: str) -> dict[str, Any]:
    """What may not change between the parts of one run."""
    values = {k.name: getattr(settings, k.name) for k in settings.knobs() if k.name not in FREE}
    named = {name: str(values[name]) for name in ("target", "warm_start") if values[name] is not None}
    return {**values, **named, "target_hash": content_hash}


def _answers(
    settings: TrainSettings,
    folder: RunFolder,
    prompts: Sequence[Any],
    openers: Sequence[Opener],
    teacher: Teacher,
    progress: Progress,
    emit: Emit,
) -> TokenStore:
    """The answers on disk, after making those that are still to be made."""
    homes = [Path(home).expanduser() for home in _texts(settings.data)] or [folder.run / "data"]
    stores = [DiskStore(home, teacher.content_hash) for home in homes]
    if prompts or settings.self_prompts:
        recipe = Recipe(
            rows=settings.data_rows or Recipe.rows,
            answer_tokens=settings.answer_tokens,
            temperature=settings.data_temperature,
            seed=settings.seed,
            openers=tuple(openers),
        )
        progress(LoadProgress("answering prompts"))
        limit = settings.data_time_limit
        Answerer(teacher.target, teacher.tokenizer, teacher.end_ids, recipe).fill(
            stores[0],
            prompts,
            settings.self_prompts,
            deadline=None if limit is None else monotonic() + limit,
            progress=emit,
        )
        mx.clear_cache()
    return stores[0] if len(stores) == 1 else JoinedStore(stores)


def _start(
    settings: TrainSettings,
    shape: DrafterShape | None,
    folder: RunFolder,
    teacher: Teacher,
    store: TokenStore,
) -> Start:
    """The newest checkpoint, the drafter to warm up from, or a new one."""
    if saved := checkpoints(folder.checkpoints):
        return existing_drafter(saved[-1], teacher.target)
    if shape is None:
        return existing_drafter(Path(str(settings.warm_start)), teacher.target)
    if not len(store):
        raise UsageError(
            "There is not a single answer to train on.", "Give other or more prompts.", field="prompts"
        )
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
) -> Evaluation | None:
    contents = {name: each[: settings.held_out_prompts] for name, each in contents.items()}
    if not any(contents.values()):
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


def _changed(settings: TrainSettings) -> dict[str, Any]:
    """The settings that matter to the result."""
    return {k.name: getattr(settings, k.name) for k in settings.knobs() if k.name not in FREE | {"target"}}


def _sources(settings: TrainSettings) -> list[str]:
    named = [Path(path).name for path in _texts(settings.prompts)]
    return named + (
        [f"{settings.self_prompts} user turns of the target's own"] if settings.self_prompts else []
    )


def _texts(value: str | Sequence[str]) -> Sequence[str]:
    return (value,) if isinstance(value, str) else value
