"""`chat`: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from mlx_dspark.chat.template import Message, has_template
from mlx_dspark.cli.ranks import follow, follows
from mlx_dspark.cli.show import (
    Progress,
    accept_length,
    closing_line,
    complain,
    count,
    note,
    open_session,
    printing,
)
from mlx_dspark.cli.streams import require_input, require_output
from mlx_dspark.foundation.errors import RequestError, UnsupportedModel
from mlx_dspark.foundation.knobs import suggestion
from mlx_dspark.foundation.ranks import closes_input
from mlx_dspark.foundation.settings import GenerateSettings, LoadSettings

if TYPE_CHECKING:
    from mlx_dspark.session import Result, Session

HELP = """\
/reset   forget the conversation
/stats   what the last answer and all answers together took
/help    this list
/quit    leave (Ctrl-D too)
"""
INTERRUPT = "Ctrl-C stops the answer; what was said so far stays in the conversation."
INTERRUPT_ENDS = "Ctrl-C leaves: mlx.launch passes on no line after it."
COMMANDS = ("/reset", "/stats", "/help", "/quit")


def chat(loading: LoadSettings, answer: GenerateSettings) -> int:
    """Talk to a model; Ctrl-C stops an answer, Ctrl-D leaves."""
    if follows():
        return follow(loading)
    require_output()
    require_input()
    progress = Progress()
    session = open_session(loading, progress)
    if not has_template(session.tokenizer):
        raise UnsupportedModel(
            f"The model {session.name} has no chat template, and a conversation needs one.",
            "Choose a chat model, or use `mlx-dspark generate`, which continues raw text.",
            field="model",
        )
    note("/help lists the commands.")
    Talk(session, answer, progress).run()
    return 0


class Talk:
    """One conversation with a session, and what its answers took."""

    def __init__(self, session: Session, answer: GenerateSettings, progress: Progress) -> None:
        self._session = session
        self._answer = answer
        self._progress = progress
        self._messages: list[Message] = []
        self._results: list[Result] = []

    def run(self) -> None:
        """Read lines until the user leaves."""
        for line in _lines():
            if not line.strip():
                continue
            if line.startswith("/"):
                if not self._obey(line.strip()):
                    return
            else:
                self._reply(line)

    def _obey(self, command: str) -> bool:
        """Carry out a slash command; False to leave."""
        match command:
            case "/quit" | "/exit":
                return False
            case "/help":
                note(HELP + (INTERRUPT if closes_input() else INTERRUPT_ENDS))
            case "/reset":
                self._messages.clear()
                note("The conversation is forgotten.")
            case "/stats":
                note(_statistics(self._results))
            case _:
                known = suggestion(command, COMMANDS) or "/help lists the commands."
                note(f"There is no command {command}. {known}")
        return True

    def _reply(self, line: str) -> None:
        """Answer one turn. A refused turn leaves the conversation as it was."""
        turn = Message("user", line)
        try:
            with stop_on_interrupt() as stopped:
                events = self._session.stream([*self._messages, turn], self._answer, cancelled=stopped)
                result = self._session.fold(printing(self._progress.reading(events), sys.stdout))
        except RequestError as error:
            complain(error)
            return
        self._progress.clear()
        self._messages += [turn, Message("assistant", result.text)]
        self._results.append(result)
        note(closing_line(result))


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks for a stop, which the yielded function tells; a second one interrupts, as the first does
    where no line could follow."""
    asked = not closes_input()

    def ask(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked and closes_input()
    finally:
        signal.signal(signal.SIGINT, before)


def _lines() -> Iterator[str]:
    """Lines the user typed, with editing and history on a terminal."""
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401  (importing it gives input() editing and history)
    while True:
        try:
            yield input("> " if terminal else "")
        except KeyboardInterrupt:
            if not closes_input():
                raise
            note("\nCtrl-D or /quit leaves.")
        except EOFError:
            if terminal:
                note("")
            return


def _statistics(results: list[Result]) -> str:
    if not results:
        return "Nothing has been answered yet."
    lengths = [length for result in results for length in result.accept_lengths]
    return "\n".join(
        [
            f"last answer  {closing_line(results[-1])}",
            f"all answers  [{count(len(results), 'answer')} · "
            f"{count(sum(r.num_tokens for r in results), 'token')} "
            f"in {sum(r.seconds for r in results):.2f} s · "
            f"accept length {accept_length(lengths)} · "
            f"{sum(r.accepted for r in results)}/{count(sum(r.drafted for r in results), 'draft')} accepted]",
        ]
    )
