"""Standard streams that are closed, full or no longer read by anybody.

Standard output carries the answer, so a failure of it ends the command; standard error carries remarks, so a
failure of it is passed over.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from mlx_dspark.foundation.errors import DsparkError, RequestError


class OutputError(DsparkError):
    """Standard output cannot take the answer."""


class ReaderGone(Exception):
    """Whoever read standard output has closed it.

    Not a BrokenPipeError, for which rich ends the program with an exit code of its own.
    """


class Output:
    """Standard output whose failures are sentences; everything else is the stream's own."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def closed(self) -> bool:
        return self._stream is None

    def write(self, text: str) -> int:
        with self._explained():
            return self._open().write(text)

    def flush(self) -> None:
        if self._stream is not None:
            with self._explained():
                self._stream.flush()

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._open(), name)

    def _open(self) -> TextIO:
        if self._stream is None:
            raise OutputError("Standard output is closed.", "Leave it open: the answer goes there.")
        return self._stream

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError as error:
            _discard(self._stream)
            raise ReaderGone from error
        except OSError as error:
            _discard(self._stream)
            raise OutputError(
                f"Standard output cannot be written: {error.strerror or error}.",
                "Make room, or send it elsewhere.",
            ) from error


class Remarks:
    """Standard error, quiet where it is closed, full or no longer read."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                self._stream.write(text)
            except OSError:
                self._lose()
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except OSError:
                self._lose()

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self) -> None:
        _discard(self._stream)
        self._stream = None


@contextmanager
def guarded() -> Iterator[None]:
    """Standard output and error behave as this module says while the block runs."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    output, remarks = cast(TextIO, Output(sys.stdout)), cast(TextIO, Remarks(sys.stderr))
    with redirect_stdout(output), redirect_stderr(remarks):
        yield


def fill_closed_descriptors() -> None:
    """Give closed standard descriptors to the null device, lest the next file opened becomes one of them."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def require_output() -> None:
    """Raises OutputError when standard output is closed: asked before anything is loaded for it."""
    if isinstance(sys.stdout, Output) and sys.stdout.closed:
        sys.stdout.write("")


def require_input() -> TextIO:
    """Standard input. Raises RequestError when it is closed."""
    stream: TextIO | None = sys.stdin
    if stream is None:
        raise RequestError(
            "Standard input is closed, so no prompt can be read from it.",
            "Leave it open, or use generate with --prompt TEXT.",
            field="prompt",
        )
    return stream


def _discard(stream: TextIO | None) -> None:
    """Send what a failed stream still holds nowhere: Python writes it once more as it exits."""
    try:
        descriptor = stream.fileno() if stream is not None else -1
    except (OSError, ValueError):
        return
    if descriptor >= 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)
