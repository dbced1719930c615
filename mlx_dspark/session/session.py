"""A loaded model that answers: prompt in, typed events or a result out."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, Self

from mlx_dspark.chat.detokenize import TextDecoder
from mlx_dspark.chat.format import ChatFormat
from mlx_dspark.chat.reader import ChatReader
from mlx_dspark.chat.stops import TextStops
from mlx_dspark.chat.template import Prompt, encode_prompt
from mlx_dspark.foundation.chat import Conversation
from mlx_dspark.foundation.errors import RequestError, UsageError
from mlx_dspark.foundation.events import Committed, EngineEvent, Finished, RoundReport, Started, Text
from mlx_dspark.foundation.numbers import brief
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.foundation.settings import GenerateSettings, LoadSettings
from mlx_dspark.session.conversing import Answering
from mlx_dspark.session.result import Result, SessionEvent

if TYPE_CHECKING:
    from mlx_dspark.catalog.gguf.weights import Requantized
    from mlx_dspark.catalog.progress import Progress
    from mlx_dspark.distributed.link import Link
    from mlx_dspark.kernels.dispatch import CpuWeightsReport
    from mlx_dspark.kernels.framework.live import LiveKernels
    from mlx_dspark.session.calibrate import Calibration


class StreamsEvents(Protocol):
    """The part of an engine that a session needs; one with a `close` is closed with the session."""

    def stream(self, request: GenerateRequest) -> Iterator[EngineEvent]: ...


class Session:
    """One engine, its tokenizer and the ids that end a text.

    `name` is the model's, `mode` says who drafts, `weights` how the weights are held and why, `requantized`
    what those lost that MLX cannot hold as they are stored, `context` the most tokens prompt and answer may
    have together, 0 where that is not known, `calibration` what is known of the costs of its rounds,
    `pairing` what the registry of pairs had to say, `kernels` which kernels of ours the model runs on. `see`
    is told every round that commits tokens to an answer.

    Threads may share a session: at most `max_batch` of their answers are made at once, as one batch, and the
    others wait. Answers are made whether they are read or not, until they are cancelled.
    """

    def __init__(
        self,
        engine: StreamsEvents,
        tokenizer: Any,
        *,
        end_ids: Collection[int],
        mode: str,
        name: str = "",
        weights: CpuWeightsReport | None = None,
        requantized: Requantized | None = None,
        context: int = 0,
        link: Link | None = None,
        calibration: Calibration | None = None,
        see: Callable[[RoundReport], None] | None = None,
        pairing: str = "",
        kernels: LiveKernels | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.end_ids = frozenset(end_ids)
        self.mode = mode
        self.name = name
        self.weights = weights
        self.requantized = requantized
        self.context = context
        self.calibration = calibration
        self.pairing = pairing
        self.kernels = kernels
        self.see = see or _unseen
        self._decoder = TextDecoder(tokenizer)
        self._link = link

    @property
    def rank(self) -> int:
        """This process's number in a run of several, of which 0 asks and the others `follow`; else 0."""
        return 0 if self._link is None else self._link.rank

    @property
    def live_kernels(self) -> list[str]:
        """The names of the kernels of ours that the model runs on now."""
        return [] if self.kernels is None else [state.name for state in self.kernels.live]

    @property
    def shared(self) -> bool:
        """Whether several processes hold the model."""
        return self._link is not None

    def follow(self) -> None:
        """In a process whose rank is not 0: do this process's part of every answer, until rank 0 ends.

        Raises RequestError where the rank is 0, and RanksLost when another process is gone.
        """
        follow = getattr(self.engine, "follow", None)
        if follow is None:
            raise RequestError("This process asks, and follows nobody.", "Call generate or stream.")
        follow()

    @cached_property
    def format(self) -> ChatFormat:
        """How the model writes conversations. Raises BadCheckpoint where its template is not Jinja."""
        return ChatFormat(self.tokenizer)

    def stream(
        self,
        prompt: Prompt | Conversation,
        settings: GenerateSettings | None = None,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        **options: Any,
    ) -> Iterator[SessionEvent]:
        """The answer as it is decided: the engine's events, with Text after the Committed that released it.
        The answer to a Conversation comes with its reasoning apart and its tool calls as events.

        `settings`, or as `options` its fields. `cancelled` is asked before each of the engine's events;
        closing the iterator cancels too. Raises UsageError or RequestError here, before anything runs.
        """
        if settings is not None and options:
            raise UsageError("settings and options are both given.", "Give one of the two.", field="settings")
        if not isinstance(settings, GenerateSettings | None):
            raise UsageError(
                f"settings is {brief(settings)}, and not GenerateSettings.",
                "Give its fields by name instead, such as max_new_tokens=50.",
                field="settings",
            )
        if not callable(cancelled):
            raise UsageError(
                f"cancelled is {brief(cancelled)}, which cannot be called.",
                "Give a function that answers true or false, or leave it out.",
                field="cancelled",
            )
        settings = settings or GenerateSettings.of(options)
        if isinstance(prompt, Conversation):
            return self._converse(prompt, settings).events(cancelled, self.see)
        ids = encode_prompt(
            self.tokenizer, prompt, system=settings.system, chat_template=settings.chat_template
        )
        check = self._text(settings) if settings.stops else None
        request = GenerateRequest(ids, settings.max_new_tokens, settings.sampling, self.end_ids, check)
        events = self.engine.stream(request)
        return _with_text(events, self._text(settings), cancelled, self.see)

    def _converse(self, conversation: Conversation, settings: GenerateSettings) -> Answering:
        for field, given in (
            ("system", settings.system is not None),
            ("chat_template", not settings.chat_template),
        ):
            if given:
                raise RequestError(
                    f"{field} is set, and a Conversation has no place for it.",
                    "Leave it out; a system message is the conversation's first turn.",
                    field=field,
                )
        prompt = self.format.render(conversation)
        reader, check = (
            ChatReader(self.format, prompt, conversation, stops=settings.stops, end_ids=self.end_ids)
            for _ in range(2)
        )
        request = GenerateRequest(prompt.ids, settings.max_new_tokens, settings.sampling, self.end_ids)
        checked = bool(settings.stops) or conversation.thinking_budget is not None
        return Answering(self.engine, request, reader, check if checked else None, context=self.context)

    def _text(self, settings: GenerateSettings) -> TextStops:
        """The text of an answer. Engine and reader have one each, since they may be different threads."""
        return TextStops(self._decoder.start(), settings.stops, self.end_ids)

    def generate(
        self, prompt: Prompt | Conversation, settings: GenerateSettings | None = None, **options: Any
    ) -> Result:
        """The whole answer: `stream`, folded. Raises as `stream` does."""
        return self.fold(self.stream(prompt, settings, **options))

    def close(self) -> None:
        """End the engine's thread, and the other processes of a run: answers still being made are cancelled,
        and nothing can be asked afterwards. Dropping the session, or the end of the program, closes it too.
        """
        close = getattr(self.engine, "close", None)
        if close is not None:
            close()
        if self._link is not None:
            self._link.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fold(self, events: Iterable[SessionEvent]) -> Result:
        """The result of a stream of this session."""
        return Result.fold(events, mode=self.mode, end_ids=self.end_ids, context=self.context)


def load(
    model: str | os.PathLike[str] | None = None, *, progress: Progress | None = None, **settings: Any
) -> Session:
    """Load a model, and what drafts for it, into a session. Without a name: the default model.

    `settings` are the fields of LoadSettings; `progress` is told what is being fetched, read and measured:
    what drafts cost here is measured once for each pair, in up to 20 seconds, unless `calibrate` is False.
    Of the environment only MLX_DSPARK_CACHE_DIR and MLX_DSPARK_MODEL_DIRS are read, and the rank that a
    launcher gives each of several processes, which then share the target; the variables named after flags are
    the command line's. Raises UsageError, LoadError or DownloadError naming the field or file at fault.
    """
    from mlx_dspark.session.calibrate import calibrated
    from mlx_dspark.session.pair import load_parts

    if progress is not None and not callable(progress):
        raise UsageError(
            f"progress is {brief(progress)}, which cannot be called.",
            "Give a function that takes a LoadProgress, or leave it out.",
            field="progress",
        )
    asked = LoadSettings.of({"model": model, **settings})
    return calibrated(load_parts(asked, progress), asked.calibrate, progress).session()


def _unseen(_: RoundReport) -> None:
    """Where nobody wants to see rounds."""


def _with_text(
    events: Iterator[EngineEvent],
    text: TextStops,
    cancelled: Callable[[], bool],
    see: Callable[[RoundReport], None],
) -> Iterator[SessionEvent]:
    prompt_tokens = committed = 0
    try:
        while not cancelled():
            event = next(events, None)
            if event is None:
                break
            if isinstance(event, Finished) and (last := text.finish()):
                yield Text(last)
            yield event
            if isinstance(event, Finished):
                return
            if isinstance(event, Started):
                prompt_tokens = event.prompt_tokens
            if isinstance(event, Committed):
                committed += len(event.tokens)
                see(event.report)
                for token in event.tokens:
                    text(token)
                if shown := text.take():
                    yield Text(shown)
        if last := text.finish():
            yield Text(last)
        yield Finished("cancelled", prompt_tokens, committed)
    finally:
        close = getattr(events, "close", None)
        if close is not None:
            close()
