"""The run: steps, the learning rate, reports, checkpoints, and where it ends."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from time import perf_counter

import mlx.core as mx

from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.settings import TrainSettings
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.train.batches import Batch, Batches
from mlx_dspark.train.checkpoint import RunState, checkpoints, read_state, save_checkpoint
from mlx_dspark.train.data import TokenStore
from mlx_dspark.train.folder import RunFolder
from mlx_dspark.train.loss import Sums
from mlx_dspark.train.progress import (
    Acceptance,
    CheckpointSaved,
    TrainEvent,
    TrainFinished,
    TrainProgress,
    TrainStarted,
    measured,
    number,
)
from mlx_dspark.train.start import Start
from mlx_dspark.train.step import Trainee

PASSES = 4
ROUNDED_FROM = 0.6
"""The share of a run after which a drafter that will be stored in few bits computes with them."""

LOWEST_RATE = 0.02
"""Of the highest learning rate, at the end."""

REPORT_SECONDS, MEASURE_SECONDS = 2.0, 60.0
"""Between reports, and between measurements of the target's share of the time."""

CHECKPOINT_SECONDS = 300.0
"""Longest time between checkpoints, however many steps it takes."""

IN_FLIGHT = 2
"""Steps that may be scheduled and not yet computed."""

Emit = Callable[[TrainEvent], None]


class Trainer:
    """One run in `folder`, which must be claimed. It goes on from the newest checkpoint there, if any.

    `start` then holds that checkpoint's weights. With steps as the only limit the run is a function of its
    settings and data, interrupted or not; with a time limit the learning rate follows the clock. Raises
    UsageError when there is nothing to train on or no room on the disk.
    """

    def __init__(
        self, start: Start, target: DenseTarget, store: TokenStore, settings: TrainSettings, folder: RunFolder
    ) -> None:
        if not len(store):
            raise UsageError(
                "There is not a single answer to train on.",
                "Give --prompts or --self-prompts.",
                field="prompts",
            )
        self.settings, self.folder = settings, folder
        self.config = start.config
        self.trainee = Trainee(start, target, settings)
        assert settings.batch is not None
        assert settings.anchors is not None
        self.batches = Batches(
            store, rows=settings.batch, width=settings.width, anchors=settings.anchors, seed=settings.seed
        )
        self._held_out = self.batches.held_out()
        self._d2t = {} if start.checkpoint.d2t is None else {"d2t": start.checkpoint.d2t.astype(mx.int64)}
        self.parameters = sum(each.size for each in self.trainee.weights().values())
        folder.check_room(self.parameters)
        self.state = RunState()
        if saved := checkpoints(folder.checkpoints):
            self.state, optimizer = read_state(saved[-1])
            self.trainee.restore(start.checkpoint.weights, optimizer)
        self.steps = settings.steps
        if self.steps is None and settings.time_limit is None:
            self.steps = PASSES * self.batches.per_epoch
        self.peak = settings.learning_rate or 1.5e-3 * math.sqrt(576 / target.spec.hidden)

    def run(self, emit: Emit = lambda _: None, stop: Callable[[], bool] = lambda: False) -> TrainFinished:
        """Train until the run is complete, or `stop` says so between two steps; either way all is saved."""
        emit = self._logged(emit)
        batches = self.batches
        emit(
            TrainStarted(
                self.state.step,
                self.steps,
                self.settings.time_limit,
                self.parameters,
                batches.sequences,
                batches.per_epoch,
            )
        )
        clock = _Clock(self.state.seconds)
        reporter = _Reporter(self, clock, emit)
        saved_at, stopped, stream = self.state.step, False, batches.stream(self.state.step)
        saved_when = clock.seconds()
        try:
            while self.fraction(clock.seconds()) < 1 and not (stopped := stop()):
                batch = next(stream)
                fraction = self.fraction(clock.seconds())
                rate = self.learning_rate(fraction)
                sums = self.trainee.step(batch, rate, rounded=fraction >= ROUNDED_FROM)
                self.state = RunState(self.state.step + 1, clock.seconds())
                reporter.take(batch, sums, rate)
                by_time = clock.seconds() - saved_when >= CHECKPOINT_SECONDS
                if by_time or self.state.step % self.settings.checkpoint_every == 0:
                    reporter.report()
                    self._save(emit)
                    saved_at, saved_when = self.state.step, clock.seconds()
        finally:
            stream.close()
        reporter.report()
        self.state = RunState(self.state.step, clock.seconds())
        if self.state.step != saved_at:
            self._save(emit)
        done = TrainFinished(self.state.step, self.state.seconds, self._reason(stopped))
        emit(done)
        return done

    def fraction(self, seconds: float) -> float:
        """How much of the run is done, by steps or by time, whichever is further."""
        by_steps = self.state.step / self.steps if self.steps is not None else 0.0
        limit = self.settings.time_limit
        return max(by_steps, seconds / limit if limit is not None else 0.0)

    def learning_rate(self, fraction: float) -> float:
        """Rises to its peak over the warm-up, then falls as half a cosine."""
        warm_up = self.settings.warm_up
        if fraction < warm_up:
            return self.peak * max(fraction / warm_up, LOWEST_RATE)
        done = (fraction - warm_up) / (1 - warm_up) if warm_up < 1 else 1.0
        return self.peak * (LOWEST_RATE + (1 - LOWEST_RATE) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))

    def weights(self) -> dict[str, mx.array]:
        """Every tensor of the drafter, `d2t` included."""
        return self.trainee.weights() | self._d2t

    def _save(self, emit: Emit) -> None:
        if self._held_out:
            total = self.trainee.measure(self._held_out[0])
            for batch in self._held_out[1:]:
                total = total.plus(self.trainee.measure(batch))
            emit(measured(self.state.step, total, self.trainee.loss_weights))
        self.folder.bind()
        optimizer = self.trainee.optimizer_state()
        saved = save_checkpoint(self.folder.checkpoints, self.state, self.config, self.weights(), optimizer)
        emit(CheckpointSaved(self.state.step, saved))

    def _reason(self, stopped: bool) -> str:
        if stopped:
            return "stopped"
        return "steps" if self.steps is not None and self.state.step >= self.steps else "time"

    def _logged(self, emit: Emit) -> Emit:
        """`emit` that also appends to the run's log, from which what the run will repeat is taken out."""
        log = self.folder.log
        if log.is_file():
            lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if _step_of(line) <= self.state.step]
            log.write_text("".join(kept), encoding="utf-8")

        def both(event: TrainEvent) -> None:
            line = {"event": type(event).__name__, **asdict(event)}
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, default=str) + "\n")
            emit(event)

        return both


def _step_of(line: str) -> float:
    """The step of a line of the log; infinite for one that was cut off."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return math.inf


class _Clock:
    """Seconds of training, those of earlier runs included."""

    def __init__(self, before: float) -> None:
        self._start = perf_counter() - before

    def seconds(self) -> float:
        return perf_counter() - self._start


class _Reporter:
    """Adds up what steps give and tells it now and then, so that no step waits for the host."""

    def __init__(self, trainer: Trainer, clock: _Clock, emit: Emit) -> None:
        self._trainer, self._clock, self._emit = trainer, clock, emit
        self._flying: deque[mx.array] = deque()
        self._target_seconds = 0.0
        self._measured_at = -math.inf
        self._clear()

    def take(self, batch: Batch, sums: Sums, rate: float) -> None:
        """One step that has been scheduled and counted in the trainer's state."""
        loss = sums.loss(self._trainer.trainee.loss_weights)
        self._losses.append(loss)
        self._total = sums if self._total is None else self._total.plus(sums)
        mx.async_eval(loss, *self._total)
        self._tokens += int(batch.lengths.sum())
        self._padded += batch.tokens.size
        self._last, self._rate = batch, rate
        self._flying.append(loss)
        if len(self._flying) > IN_FLIGHT:
            mx.eval(self._flying.popleft())
        if self._clock.seconds() - self._since >= REPORT_SECONDS:
            self.report()

    def report(self) -> None:
        """Tell what there is, if anything. Waits for the steps that are in flight."""
        if self._total is None or self._last is None:
            return
        mx.eval(self._losses, self._total)
        seconds = self._clock.seconds()
        spent = max(seconds - self._since, 1e-9)
        fraction = min(self._trainer.fraction(seconds), 1.0)
        self._emit(
            TrainProgress(
                step=self._trainer.state.step,
                fraction=fraction,
                seconds=seconds,
                seconds_left=seconds * (1 - fraction) / fraction if fraction else math.inf,
                losses=tuple(number(loss) for loss in self._losses),
                acceptance=Acceptance.of(self._total),
                learning_rate=self._rate,
                tokens_per_sec=self._tokens / spent,
                target_share=min(1.0, self._target_share(self._last) * self._padded / spent),
            )
        )
        self._clear()

    def _target_share(self, batch: Batch) -> float:
        """Seconds that the target's forward takes for each position, padding included."""
        if self._clock.seconds() - self._measured_at >= MEASURE_SECONDS:
            begun = perf_counter()
            mx.eval(self._trainer.trainee.taught(batch))
            self._target_seconds = (perf_counter() - begun) / batch.tokens.size
            self._measured_at = self._clock.seconds()
        return self._target_seconds

    def _clear(self) -> None:
        self._total: Sums | None = None
        self._last: Batch | None = None
        self._losses: list[mx.array] = []
        self._tokens = self._padded = 0
        self._rate = 0.0
        self._since = self._clock.seconds()
