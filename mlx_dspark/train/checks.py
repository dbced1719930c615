"""What can be refused before a model is loaded, and before anything is answered or written."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from mlx_dspark.foundation.errors import UnsupportedModel, UsageError
from mlx_dspark.foundation.settings import TrainSettings
from mlx_dspark.train.answers import texts
from mlx_dspark.train.data import MANIFEST
from mlx_dspark.train.target import Teacher

SHAPE = ("layers", "block_size", "taps", "markov", "markov_rank", "confidence", "draft_vocab")
SHAPE += ("own_embedding", "own_head")
"""Settings that a drafter to train further has of its own."""


def check_settings(settings: TrainSettings) -> None:
    """Raises UsageError for what settings and folders alone can tell."""
    if settings.output is None:
        raise UsageError(
            "--output is not given.", "Name the folder of the drafter with --output.", field="output"
        )
    if settings.self_openers is not None and not settings.self_prompts:
        raise UsageError(
            "--self-openers is given, and --self-prompts is not.",
            "Say with --self-prompts how many turns to write.",
            field="self_openers",
        )
    if not settings.prompts and not settings.self_prompts and not settings.data:
        raise UsageError(
            "There is nothing to answer: --prompts, --self-prompts and --data are all absent.",
            "Give --prompts FILE, --self-prompts NUMBER, or the --data of an earlier run.",
            field="prompts",
        )
    if settings.warm_start is not None:
        for name in SHAPE:
            if getattr(settings, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise UsageError(
                    f"{flag} is given, and the drafter of --warm-start has a shape of its own.",
                    "Leave one of the two out.",
                    field=name,
                )
    _check_data(settings)


def _check_data(settings: TrainSettings) -> None:
    """A folder that gets no new answers must have some."""
    homes = [Path(home).expanduser() for home in texts(settings.data)]
    fills = bool(settings.prompts or settings.self_prompts)
    for home in homes[1:] if fills else homes:
        if not (home / MANIFEST).is_file():
            what = f"holds no {MANIFEST}" if home.exists() else "does not exist"
            raise UsageError(
                f"--data {home} {what}, so there are no answers in it.",
                "Name the data folder of an earlier run, or give --prompts or --self-prompts to fill it.",
                field="data",
            )


def check_teacher(teacher: Teacher, settings: TrainSettings) -> None:
    """Raises UnsupportedModel for a target that cannot teach, UsageError for sequences beyond its context."""
    try:
        teacher.target.features(mx.array([[0]]), (-1,))
        teacher.target.embed(mx.array([0]))
    except UnsupportedModel as error:
        raise UnsupportedModel(
            f"No drafter can be trained for {teacher.name}. {error.sentence}",
            "docs/train.md names the families for which none can be trained.",
            field="target",
        ) from error
    context = teacher.target.spec.context
    if settings.width > context:
        raise UsageError(
            f"--width is {settings.width}, and the target's context holds {context} tokens.",
            "Give a smaller one.",
            field="width",
        )
