"""A race over the loaded model, told as it goes: arms answer one prompt in laps and are compared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx

from mlx_dspark.bench.arms import label_of, session_of
from mlx_dspark.bench.gap import logit_gap
from mlx_dspark.bench.race import Lane, Outcome, run_race
from mlx_dspark.bench.report import verdict_values
from mlx_dspark.chat.template import encode_prompt
from mlx_dspark.engine.caps import MaxDraft
from mlx_dspark.foundation.bench_settings import CONTROL
from mlx_dspark.foundation.errors import ContextOverflow, DsparkError
from mlx_dspark.foundation.lists import Drafting
from mlx_dspark.foundation.settings import GenerateSettings
from mlx_dspark.serving.admin.body import RaceBody, arms_of
from mlx_dspark.serving.admin.swap import Swap
from mlx_dspark.serving.admin.threads import in_mlx_thread
from mlx_dspark.serving.dialects.base import Frame
from mlx_dspark.serving.faults import Refused, fault_of, refused
from mlx_dspark.serving.loading import Loaded, beyond
from mlx_dspark.serving.log import LOG
from mlx_dspark.session.variants import variant

if TYPE_CHECKING:
    from mlx_dspark.session.pair import Parts

_LOOK = 0.5


class _Left(BaseException):
    """Nobody watches the race any more."""


async def race(swap: Swap, body: RaceBody) -> AsyncIterator[bytes]:
    """Its frames: start, arm (a piece of text, or the end of one), verdict, done; or error.

    The model answers nobody else meanwhile. The race ends when its frames are no longer read.
    """
    frames: asyncio.Queue[Frame | None] = asyncio.Queue()
    left = Event()
    running = asyncio.create_task(_run(swap, body, frames, left))
    try:
        while (frame := await _next(frames, swap, left)) is not None:
            yield frame.encode()
    finally:
        left.set()
        running.add_done_callback(lambda task: task.cancelled() or task.exception())


async def _next(frames: asyncio.Queue[Frame | None], swap: Swap, left: Event) -> Frame | None:
    while True:
        with suppress(TimeoutError):
            return await asyncio.wait_for(frames.get(), _LOOK)
        if swap.host.ending:
            left.set()


async def _run(swap: Swap, body: RaceBody, frames: asyncio.Queue[Frame | None], left: Event) -> None:
    loop = asyncio.get_running_loop()

    def tell(event: str, **about: Any) -> None:
        if left.is_set():
            raise _Left
        loop.call_soon_threadsafe(frames.put_nowait, Frame(about, event))

    try:
        async with swap.exclusively() as loaded:
            await in_mlx_thread(lambda: _raced(loaded, body, _Teller(tell)))
    except _Left:
        pass
    except Exception as error:  # noqa: BLE001
        if not isinstance(error, DsparkError | Refused):
            LOG.error("A race failed: %r", error, exc_info=error)
        message = str(error) if isinstance(error, DsparkError) else fault_of(error).message
        frames.put_nowait(Frame({"message": message}, "error"))
    finally:
        frames.put_nowait(None)


class _Teller:
    """Tells what is new of each lane."""

    def __init__(self, tell: Any) -> None:
        self.tell = tell
        self._told: dict[str, int] = {}
        self._done: set[str] = set()

    def lanes(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            known = self._told.get(lane.label, 0)
            if len(lane.text) > known:
                self._told[lane.label] = len(lane.text)
                about = {"tokens": lane.tokens, "seconds": round(lane.seconds, 4)}
                self.tell("arm", arm=lane.label, text=lane.text[known:], **about)
            if lane.done and lane.label not in self._done:
                self._done.add(lane.label)
                self.tell("arm_done", **_figures(lane))


def _figures(lane: Lane) -> dict[str, Any]:
    return {
        "arm": lane.label,
        "tokens": lane.tokens,
        "seconds": round(lane.seconds, 4),
        "first_token_seconds": lane.first_at,
        "decode_tokens_per_sec": round(lane.rate, 3),
    }


def check_arms(parts: Parts, arms: Sequence[Drafting]) -> None:
    """Raises UsageError where the loaded model has no drafter for an arm."""
    for arm in arms:
        if arm.mode not in ("auto", "baseline", "lookup", parts.mode):
            raise refused(
                "invalid_request",
                f"arms asks for mode {arm.mode}, and what drafts for {parts.name} is {parts.mode}.",
                field="arms",
            )


async def check_prompt(swap: Swap, loaded: Loaded, body: RaceBody) -> None:
    """Raises RequestError or ContextOverflow where the loaded model cannot answer the prompt."""
    session = loaded.model.session
    encode = partial(encode_prompt, session.tokenizer, body.prompt, system=body.system)
    ids = await swap.host.rendered(encode)
    if 0 < loaded.model.context <= len(ids):
        raise ContextOverflow(len(ids), loaded.model.context)


def _beyond(loaded: Loaded, arm: Drafting) -> str:
    cap = cast(MaxDraft, arm.max_draft)
    return beyond(variant(loaded.parts, loaded.loading, arm.mode, cap), cap, "cap")


def _raced(loaded: Loaded, body: RaceBody, teller: _Teller) -> None:
    parts = loaded.parts
    named = [Drafting(parts.mode, arm.max_draft) if arm.mode == "auto" else arm for arm in arms_of(body)]
    arms = {label_of(arm): session_of(parts, loaded.loading, arm, warn=False) for arm in named}
    warnings = [told for arm in named if (told := _beyond(loaded, arm))]
    teller.tell("start", model=parts.name, arms=list(arms), warnings=warnings)
    outcome = run_race(
        arms,
        session_of(parts, loaded.loading, Drafting(CONTROL), warn=False),
        body.prompt,
        GenerateSettings(max_new_tokens=body.max_tokens, system=body.system),
        ask=lambda tokens, expected, got: logit_gap(parts.target, tokens, expected, got),
        show=teller.lanes,
        tell=lambda message, _: teller.tell("phase", message=message),
        settle=mx.synchronize,
    )
    teller.tell("verdict", **_verdict(outcome, parts))
    results = {lane.label: arms[lane.label].fold(lane.seen) for lane in outcome.lanes}
    teller.tell(
        "done",
        arms=[
            _figures(lane)
            | {
                "accept_len": round(results[lane.label].mean_accept_len, 4),
                "target_forwards": results[lane.label].num_rounds,
                "troubles": list(results[lane.label].troubles),
            }
            for lane in outcome.lanes
        ],
    )


def _verdict(outcome: Outcome, parts: Parts) -> dict[str, Any]:
    lanes = [
        {"arm": lane.label} | verdict_values(verdict, lambda id_: parts.tokenizer.decode([id_]))
        for lane, verdict in zip(outcome.lanes, outcome.verdicts, strict=False)
    ]
    return {"identical": outcome.identical, "same_reading": outcome.same_reading, "arms": lanes}
