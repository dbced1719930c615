"""An engine that says what it is told to: answers cut at will, pauses, failures, a death. No MLX."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mlx_dspark.engine.stream import Stream, Ticket
from mlx_dspark.foundation.events import Committed, Finished, Prefilled, RoundReport, Started, TokenLogprob
from mlx_dspark.foundation.request import FinishReason, GenerateRequest
from mlx_dspark.session.session import Session
from tests.tiny import EOS_IDS, tiny_tokenizer

THINKING = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "Call with <tool_call>.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""A template in the manner of Qwen3's: tools, reasoning, and a switch for it."""


def thinking_tokenizer() -> Any:
    """The tiny tokenizer with a template that knows tools and reasoning."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = THINKING
    return tokenizer


def _report(committed: int) -> RoundReport:
    now = time.perf_counter()
    return RoundReport(now, now, 1, committed, 1, 0, 0, 0, committed, 0)


@dataclass
class ScriptedEngine:
    """Answers every request with `reply`, `step` tokens at a time.

    `admit` holds all requests back while it is cleared, `go` pauses their answers; `before` is called before
    each step, with the request and the number of tokens so far, and may raise. `alive` False: the thread is
    gone.
    """

    reply: str | Callable[[GenerateRequest], str] = "Hello there."
    step: int = 3
    max_rows: int = 4
    before: Callable[[GenerateRequest, int], None] = lambda *_: None
    admit: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    alive: bool = True
    tokenizer: Any = field(default_factory=tiny_tokenizer)
    steps: int = 0
    asked: int = 0
    cancelled: int = 0

    def __post_init__(self) -> None:
        self.admit.set()
        self.go.set()

    @property
    def running(self) -> bool:
        return self.alive

    def submit(self, request: GenerateRequest, notify: Callable[[], None] | None = None) -> Stream:
        self.asked += 1
        ticket = Ticket(request, notify=notify)
        threading.Thread(target=self._answer, args=(ticket,), daemon=True).start()
        return Stream(ticket, self._cancel)

    def _cancel(self, ticket: Ticket) -> None:
        ticket.cancelled = True

    def _answer(self, ticket: Ticket) -> None:
        request = ticket.request
        self.admit.wait()
        try:
            ticket.put(Started(len(request.prompt), 0, time.perf_counter()))
            ticket.put(Prefilled(len(request.prompt), len(request.prompt), _report(0)))
            reason, said = self._say(ticket)
            self.cancelled += reason == "cancelled"
            ticket.put(Finished(reason, len(request.prompt), said))
        except Exception as error:  # noqa: BLE001
            ticket.put(error)

    def _say(self, ticket: Ticket) -> tuple[FinishReason, int]:
        request, said = ticket.request, 0
        text = self.reply(request) if callable(self.reply) else self.reply
        tokens = [*self.tokenizer.encode(text, add_special_tokens=False), min(EOS_IDS)]
        while True:
            while not self.go.wait(0.01):
                if ticket.cancelled:
                    return "cancelled", said
            if ticket.cancelled:
                return "cancelled", said
            self.before(request, said)
            self.steps += 1
            piece, reason = self._piece(request, tokens[said : said + self.step], said)
            said += len(piece)
            ticket.put(Committed(tuple(piece), _report(len(piece)), _logprobs(request, piece)))
            if reason is not None:
                return reason, said

    def _piece(
        self, request: GenerateRequest, tokens: list[int], said: int
    ) -> tuple[list[int], FinishReason | None]:
        piece: list[int] = []
        for token in tokens:
            piece.append(token)
            if token in request.end_ids or (request.stop_check is not None and request.stop_check(token)):
                return piece, "stop"
            if said + len(piece) == request.max_new_tokens:
                return piece, "length"
        return piece, None


def _logprobs(request: GenerateRequest, piece: list[int]) -> tuple[TokenLogprob, ...]:
    asked = request.sampling.logprobs
    if asked is None:
        return ()
    return tuple(TokenLogprob(t, -0.5, tuple((t + i, -0.5 - i) for i in range(asked))) for t in piece)


def scripted_session(engine: ScriptedEngine, tokenizer: Any = None) -> Session:
    """A session whose engine follows a script."""
    known = tokenizer or engine.tokenizer
    return Session(engine, known, end_ids=EOS_IDS, mode="scripted", name="scripted", context=4096)  # pyright: ignore[reportArgumentType]
