"""What a drafter is trained on: token ids of prompts and answers, kept on disk in shards.

Nothing but ids is stored; the target's hidden states are computed anew at every step. A shard is written
whole or not at all, so an interrupt loses at most the wave that was being generated.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from mlx_dspark.foundation.errors import BadCheckpoint, UsageError

Ids = NDArray[np.uint32]
MANIFEST = "manifest.json"


class TokenStore(Protocol):
    """Sequences of token ids, a prompt and an answer each."""

    def __len__(self) -> int: ...

    def sequence(self, index: int) -> tuple[Ids, int]:
        """Ids of prompt and answer, and how many of them are the prompt."""
        ...

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence, and of its prompt: `[sequences, 2]`."""
        ...

    def counts(self, vocab: int) -> NDArray[np.int64]:
        """How often each id occurs in the answers: `[vocab]`."""
        ...


@dataclass(frozen=True)
class Answer:
    """One prompt and what the target answered."""

    prompt: Sequence[int]
    answer: Sequence[int]


class DiskStore:
    """A folder of shards, all answers of one target. `mark` names the target by the hash of its content.

    Raises UsageError when the folder holds other things or another target's answers, BadCheckpoint when a
    shard is damaged.
    """

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder = folder
        self._check(mark)
        self._shards = sorted(folder.glob("answers-*.npz"))
        parts = [_read(shard) for shard in self._shards]
        self._sizes = np.concatenate([part["sizes"] for part in parts] or [np.zeros((0, 2), np.int64)])
        self._ids = np.concatenate([part["ids"] for part in parts] or [np.zeros(0, np.uint32)])
        self._index()

    def _check(self, mark: str) -> None:
        manifest = self.folder / MANIFEST
        if manifest.is_file():
            found = json.loads(manifest.read_text(encoding="utf-8")).get("target")
            if found != mark:
                raise UsageError(
                    f"{self.folder} holds the answers of another target ({found}, this one is {mark}).",
                    "Give this target a data folder of its own.",
                    field="data",
                )
            return
        if self.folder.exists() and any(self.folder.iterdir()):
            raise UsageError(
                f"{self.folder} is not empty and holds no {MANIFEST}.",
                "Name a new folder for the data.",
                field="data",
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        manifest.write_text(json.dumps({"target": mark}), encoding="utf-8")

    def _index(self) -> None:
        self._starts = np.concatenate([[0], np.cumsum(self._sizes.sum(axis=1))]).astype(np.int64)

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def answer_tokens(self) -> int:
        return int(self._sizes[:, 1].sum())

    @property
    def waves(self) -> int:
        """Shards written so far."""
        return len(self._shards)

    def sequence(self, index: int) -> tuple[Ids, int]:
        return self._ids[self._starts[index] : self._starts[index + 1]], int(self._sizes[index, 0])

    def lengths(self) -> NDArray[np.int64]:
        return np.stack([self._sizes.sum(axis=1), self._sizes[:, 0]], axis=1)

    def counts(self, vocab: int) -> NDArray[np.int64]:
        spans = self._sizes.ravel()
        answered = np.repeat(np.tile([False, True], len(self._sizes)), spans)
        return np.bincount(self._ids[answered], minlength=vocab)

    def append(self, answers: Sequence[Answer]) -> None:
        """Add one shard. Raises OSError when the disk is full; nothing of the shard is kept then."""
        sizes = np.array([(len(a.prompt), len(a.answer)) for a in answers], dtype=np.int64).reshape(-1, 2)
        ids = np.fromiter((t for a in answers for t in (*a.prompt, *a.answer)), dtype=np.uint32)
        target = self.folder / f"answers-{len(self._shards):05d}.npz"
        handle, scratch = tempfile.mkstemp(dir=self.folder, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez_compressed(file, ids=ids, sizes=sizes)
            os.replace(scratch, target)
        except BaseException:
            Path(scratch).unlink(missing_ok=True)
            raise
        self._shards.append(target)
        self._ids, self._sizes = np.concatenate([self._ids, ids]), np.concatenate([self._sizes, sizes])
        self._index()


class JoinedStore:
    """Several stores of one target's answers as one, in their order."""

    def __init__(self, stores: Sequence[DiskStore]) -> None:
        self._stores = list(stores)

    def __len__(self) -> int:
        return sum(map(len, self._stores))

    def sequence(self, index: int) -> tuple[Ids, int]:
        for store in self._stores:
            if index < len(store):
                return store.sequence(index)
            index -= len(store)
        raise IndexError(index)

    def lengths(self) -> NDArray[np.int64]:
        return np.concatenate([store.lengths() for store in self._stores])

    def counts(self, vocab: int) -> NDArray[np.int64]:
        return np.sum([store.counts(vocab) for store in self._stores], axis=0)


def _read(shard: Path) -> dict[str, Any]:
    try:
        with shard.open("rb") as file, np.load(file) as arrays:
            part = {name: arrays[name] for name in ("ids", "sizes")}
        if part["sizes"].ndim != 2 or part["sizes"].sum() != len(part["ids"]):
            raise ValueError("its sizes do not add up")
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise BadCheckpoint(
            f"The shard {shard} is damaged: {error}.", "Delete it; the other shards stay usable."
        ) from error
    return part
