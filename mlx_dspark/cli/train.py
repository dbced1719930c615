"""`train`: make a drafter for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_dspark.cli.ranks import refuse_ranks
from mlx_dspark.cli.show import Progress, count, note
from mlx_dspark.foundation.settings import TrainSettings

if TYPE_CHECKING:
    from mlx_dspark.train.generate import Answering
    from mlx_dspark.train.progress import Acceptance, TrainProgress, TrainStarted
    from mlx_dspark.train.run import Outcome, PipelineEvent


def train(settings: TrainSettings) -> int:
    """Make a drafter for a model, from the model's own answers."""
    from mlx_dspark.train.run import run_training

    refuse_ranks("train")
    progress = Progress()
    try:
        outcome = run_training(settings, progress=progress, emit=_Teller(progress))
    except KeyboardInterrupt:
        progress.clear()
        note("Stopped. What was finished is saved, and the same command goes on from here.")
        raise
    progress.clear()
    _conclude(outcome)
    return 0


class _Teller:
    """Shows every event of the pipeline as a line."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __call__(self, event: PipelineEvent) -> None:
        from mlx_dspark.train.generate import Answering
        from mlx_dspark.train.progress import (
            CheckpointSaved,
            HeldOutMeasured,
            Remark,
            TrainFinished,
            TrainProgress,
            TrainStarted,
        )

        if isinstance(event, Answering) and not event.stored:
            detail = f"{event.tokens_per_sec:.0f} tok/s, {count(event.left, 'prompt')} left"
            self._progress.tell("answering prompts", 1 - event.left / max(1, event.prompts), detail)
            return
        self._progress.clear()
        match event:
            case Answering():
                note(_stored(event))
            case Remark():
                note(event.text)
            case TrainStarted():
                note(_opening(event))
            case TrainProgress():
                note(_line(event))
            case HeldOutMeasured():
                note(f"held out: loss {event.loss:.3f} · {_acceptance(event.acceptance)}")
            case CheckpointSaved():
                note(f"saved {event.folder.name}")
            case TrainFinished():
                note(f"trained {count(event.step, 'step')} in {event.seconds:.0f} s ({event.reason})")


def _stored(event: Answering) -> str:
    dropped = [f"{count(event.short, 'short answer')} dropped"] if event.short else []
    dropped += [f"{count(event.long, 'long prompt')} left out"] if event.long else []
    known = [f"{count(event.known, 'prompt')} answered before"] if event.known else []
    parts = [
        f"{count(event.sequences, 'answer')} stored",
        count(event.answer_tokens, "token"),
        f"{event.tokens_per_sec:.0f} tok/s",
        *known,
        *dropped,
        f"{count(event.left, 'prompt')} left",
    ]
    return " · ".join(parts)


def _opening(event: TrainStarted) -> str:
    length = count(event.steps, "step") if event.steps is not None else f"{event.time_limit:.0f} s"
    begun = f" from step {event.step}" if event.step else ""
    return (
        f"training {event.parameters / 1e6:.1f} M parameters for {length}{begun} on "
        f"{count(event.sequences, 'sequence')}, {count(event.steps_per_epoch, 'step')} a pass"
    )


def _line(event: TrainProgress) -> str:
    loss = sum(event.losses) / max(1, len(event.losses))
    return (
        f"step {event.step} · {event.fraction:.0%} · loss {loss:.3f} · {_acceptance(event.acceptance)} · "
        f"lr {event.learning_rate:.1e} · {event.tokens_per_sec:.0f} tok/s · "
        f"target {event.target_share:.0%} · {event.seconds_left:.0f} s left"
    )


def _acceptance(acceptance: Acceptance) -> str:
    each = " ".join(f"{share:.2f}" for share in acceptance.greedy)
    return f"accept {acceptance.length:.2f} (sampled {acceptance.expected_length:.2f}) [{each}]"


def _conclude(outcome: Outcome) -> None:
    if outcome.evaluation is not None:
        for each in outcome.evaluation.accepted:
            reached = " ".join(f"{share:.2f}" for share in each.reached)
            where = f"{each.content} at temperature {each.temperature:g}"
            note(f"{where}: accept length {each.length:.2f} [{reached}]")
        note(outcome.evaluation.verdict)
    note(f"Wrote {outcome.folder}. Use it with --drafter {outcome.folder}.")
