"""Seam: the `tokenizers` library reports damaged content as a bare `Exception`.

Versions: tokenizers 0.22 to 0.23. Reason: a caller would need a broad `except`, which hides its own mistakes
too. Delete when the library raises a class of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def tokenizer_errors() -> Iterator[None]:
    """Turn the library's bare Exception into ValueError; every other error passes unchanged."""
    try:
        yield
    except Exception as error:
        if type(error) is Exception:
            raise ValueError(str(error)) from error
        raise
