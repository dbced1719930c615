"""Seam: huggingface_hub changes its HTTP library between majors, and with it the base of its errors.

Versions: huggingface-hub 1 (httpx) and 2 (httpx2). Reason: a refused proxy or a dropped connection surfaces
as that library's `HTTPError`, which is neither an OSError nor one of the hub's own. Delete when every error
of `snapshot_download` has a hub class.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers
from tqdm.asyncio import tqdm_asyncio

HUB_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    EntryNotFoundError,
    HFValidationError,
    HfHubHTTPError,
    HTTPError,
)
"""What `snapshot_download` may raise when the hub, the network or the disk fails."""


def resumed_get(url: str, part: Path, *, size: int | None, bar: type[tqdm_asyncio[Any]]) -> None:
    """Fetch what is missing of a file of the hub into `part`, which keeps what has come when this ends early.

    Seam: `hf_hub_download` deletes what it has when it is interrupted. Versions: huggingface-hub 2. Delete
    when an interrupted download goes on where it ended.
    """
    with part.open("r+b" if part.exists() else "w+b") as file, _chunks_of(_CHUNK):
        file.seek(0, os.SEEK_END)
        http_get(
            url,
            file,
            resume_size=file.tell(),
            headers=build_hf_headers(),
            expected_size=size,
            tqdm_class=bar,
        )


_CHUNK = 1 << 20


@contextmanager
def _chunks_of(size: int) -> Iterator[None]:
    """Bytes reach the file in pieces of this size; what is short of one is lost when a download ends."""
    before = constants.DOWNLOAD_CHUNK_SIZE
    constants.DOWNLOAD_CHUNK_SIZE = min(before, size)
    try:
        yield
    finally:
        constants.DOWNLOAD_CHUNK_SIZE = before
