"""What a drafter is trained on: token ids of prompts and answers, kept on disk in shards.

Nothing but ids is stored; the target's hidden states are computed anew at every step. A shard is written
whole or not at all.

manifest.json        the target that answered, and the sources of the prompts
answers-00000.npz    ids, sizes `[n, 2]` of prompts and answers, keys and sources `[n]`, and under `dropped`
                     the keys of prompts whose answers were not worth keeping
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from mlx_dspark.foundation.errors import BadCheckpoint, UsageError
from mlx_dspark.train.checkpoint import write_json

Ids = NDArray[np.uint32]
MANIFEST = "manifest.json"
UNTOLD = "sources that are not recorded"


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
class Source:
    """Where prompts come from: the name that a card shows, and what tells its content from others'."""

    name: str
    content: str = ""


@dataclass(frozen=True)
class Answer:
    """One prompt and what the target answered.

    `key` tells the prompt from all others, None for `prompt_key(prompt)`.
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    key: int | None = None
    source: Source = Source(UNTOLD)


def prompt_key(ids: Sequence[int]) -> int:
    """Tells a prompt from all others by its token ids."""
    return key_of(np.array(ids, dtype="<u4").tobytes())


def key_of(content: bytes) -> int:
    """64 bits of a hash."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


class DiskStore:
    """A folder of shards, all answers of one target. `mark` names the target by the hash of its content.

    Sequences are in the order of their keys, so that it does not matter which was answered first. The folder
    is made when the first answers are stored. Raises UsageError when it holds other things or another
    target's answers, BadCheckpoint when a shard is damaged.
    """

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder, self._mark = folder, mark
        self._sources = self._read_manifest()
        self._shards = sorted(folder.glob("answers-*.npz"))
        parts = [_nothing(), *map(_read, self._shards)]
        self._ids, self._sizes, self._keys, self._from, dropped = (
            np.concatenate([part[name] for part in parts]) for name in _ARRAYS
        )
        self._dropped: set[int] = set(dropped.tolist())
        self._index()

    def _read_manifest(self) -> list[Source]:
        manifest = self.folder / MANIFEST
        if manifest.is_file():
            found = json.loads(manifest.read_text(encoding="utf-8"))
            if found.get("target") != self._mark:
                raise UsageError(
                    f"{self.folder} holds the answers of another target ({found.get('target')}, this one is "
                    f"{self._mark}).",
                    "Give this target a data folder of its own.",
                    field="data",
                )
            return [Source(**each) for each in found.get("sources", ())]
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise UsageError(
                f"{self.folder} is not an empty folder and holds no {MANIFEST}.",
                "Name a new folder for the data.",
                field="data",
            )
        return []

    def _index(self) -> None:
        self._starts = np.concatenate([[0], np.cumsum(self._sizes.sum(axis=1))]).astype(np.int64)
        self._order = np.argsort(self._keys, kind="stable")
        self._known = {*self._keys.tolist(), *self._dropped}

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def answer_tokens(self) -> int:
        return int(self._sizes[:, 1].sum())

    def knows(self, key: int) -> bool:
        """Whether the prompt of that key was answered, be its answer kept or dropped."""
        return key in self._known

    def keys(self) -> NDArray[np.uint64]:
        """Of each sequence that of its prompt, rising: `[sequences]`."""
        return self._keys[self._order]

    def sources(self, left_out: Collection[int] = ()) -> Counter[str]:
        """Answers by the name of their prompts' source, without those of the keys `left_out`."""
        counted = np.isin(self._keys, np.array(list(left_out), dtype=np.uint64), invert=True)
        numbers, counts = np.unique(self._from[counted], return_counts=True)
        named = zip(numbers.tolist(), counts.tolist(), strict=True)
        found: Counter[str] = Counter()
        for number, count in named:
            found[UNTOLD if number < 0 else self._sources[number].name] += count
        return found

    def sequence(self, index: int) -> tuple[Ids, int]:
        at = self._order[index]
        return self._ids[self._starts[at] : self._starts[at + 1]], int(self._sizes[at, 0])

    def lengths(self) -> NDArray[np.int64]:
        return np.stack([self._sizes.sum(axis=1), self._sizes[:, 0]], axis=1)[self._order]

    def counts(self, vocab: int) -> NDArray[np.int64]:
        spans = self._sizes.ravel()
        answered = np.repeat(np.tile([False, True], len(self._sizes)), spans)
        return np.bincount(self._ids[answered], minlength=vocab)

    def append(self, answers: Sequence[Answer], dropped: Iterable[int] = ()) -> None:
        """Add one shard; `dropped` are the keys of prompts whose answers are not kept.

        Raises OSError when the disk is full; nothing of the shard is kept then.
        """
        self._write_manifest([each.source for each in answers])
        keys = [prompt_key(a.prompt) if a.key is None else a.key for a in answers]
        new = {
            "ids": np.fromiter((t for a in answers for t in (*a.prompt, *a.answer)), dtype=np.uint32),
            "sizes": np.array([(len(a.prompt), len(a.answer)) for a in answers], np.int64).reshape(-1, 2),
            "keys": np.array(keys, dtype=np.uint64),
            "sources": np.array([self._sources.index(a.source) for a in answers], dtype=np.int64),
            "dropped": np.array(list(dropped), dtype=np.uint64),
        }
        target = self.folder / f"answers-{self._next_number():05d}.npz"
        handle, scratch = tempfile.mkstemp(dir=self.folder, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez_compressed(file, **new)
            os.replace(scratch, target)
        except BaseException:
            Path(scratch).unlink(missing_ok=True)
            raise
        self._shards.append(target)
        self._ids, self._sizes, self._keys, self._from = (
            np.concatenate([old, new[name]])
            for old, name in zip((self._ids, self._sizes, self._keys, self._from), _ARRAYS, strict=False)
        )
        self._dropped |= set(new["dropped"].tolist())
        self._index()

    def _next_number(self) -> int:
        return 1 + max((int(shard.stem.rpartition("-")[2]) for shard in self._shards), default=-1)

    def _write_manifest(self, sources: Iterable[Source]) -> None:
        new = [source for source in dict.fromkeys(sources) if source not in self._sources]
        manifest = self.folder / MANIFEST
        if manifest.is_file() and not new:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        listed = [asdict(source) for source in (*self._sources, *new)]
        write_json(manifest, {"target": self._mark, "sources": listed})
        self._sources += new


class JoinedStore:
    """Several stores of one target's answers as one, in the order of their keys."""

    def __init__(self, stores: Sequence[DiskStore]) -> None:
        self._stores = list(stores)
        self._ends = np.cumsum([len(store) for store in stores])
        self._order = np.argsort(np.concatenate([store.keys() for store in stores]), kind="stable")

    def __len__(self) -> int:
        return len(self._order)

    def sequence(self, index: int) -> tuple[Ids, int]:
        at = int(self._order[index])
        number = int(np.searchsorted(self._ends, at, side="right"))
        return self._stores[number].sequence(at - int(self._ends[number]) + len(self._stores[number]))

    def lengths(self) -> NDArray[np.int64]:
        return np.concatenate([store.lengths() for store in self._stores])[self._order]

    def counts(self, vocab: int) -> NDArray[np.int64]:
        return np.sum([store.counts(vocab) for store in self._stores], axis=0)

    def sources(self, left_out: Collection[int] = ()) -> Counter[str]:
        """Answers by the name of their prompts' source, without those of the keys `left_out`."""
        return sum((store.sources(left_out) for store in self._stores), Counter())


class PartStore:
    """The sequences of a store whose prompts are not among `left_out` (of `prompt_key`)."""

    def __init__(self, store: TokenStore, left_out: Collection[int]) -> None:
        self._store = store
        prompts = ((ids[:prompt].tolist()) for ids, prompt in map(store.sequence, range(len(store))))
        self._kept = [i for i, prompt in enumerate(prompts) if prompt_key(prompt) not in left_out]

    def __len__(self) -> int:
        return len(self._kept)

    def sequence(self, index: int) -> tuple[Ids, int]:
        return self._store.sequence(self._kept[index])

    def lengths(self) -> NDArray[np.int64]:
        return self._store.lengths()[self._kept]

    def counts(self, vocab: int) -> NDArray[np.int64]:
        answers = [ids[prompt:] for ids, prompt in map(self.sequence, range(len(self)))]
        return np.bincount(np.concatenate([np.zeros(0, np.uint32), *answers]), minlength=vocab)


_ARRAYS = ("ids", "sizes", "keys", "sources", "dropped")


def _nothing() -> dict[str, Any]:
    shapes = {"ids": np.uint32, "keys": np.uint64, "sources": np.int64, "dropped": np.uint64}
    return {name: np.zeros(0, kind) for name, kind in shapes.items()} | {"sizes": np.zeros((0, 2), np.int64)}


def _read(shard: Path) -> dict[str, Any]:
    try:
        with shard.open("rb") as file, np.load(file) as arrays:
            part = {name: arrays[name] for name in _ARRAYS if name in arrays}
        if part["sizes"].ndim != 2 or part["sizes"].sum() != len(part["ids"]):
            raise ValueError("its sizes do not add up")
        part = _with_keys(part)
        if not len(part["sizes"]) == len(part["keys"]) == len(part["sources"]):
            raise ValueError("its arrays do not belong together")
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise BadCheckpoint(
            f"The shard {shard} is damaged: {error}.", "Delete it; the other shards stay usable."
        ) from error
    return part


def _with_keys(part: dict[str, Any]) -> dict[str, Any]:
    """A shard that was written without keys gets those of its prompts."""
    if "keys" in part:
        return part
    starts = np.concatenate([[0], np.cumsum(part["sizes"].sum(axis=1))])
    prompts = (part["ids"][at : at + size] for at, size in zip(starts, part["sizes"][:, 0], strict=False))
    keys = np.array([prompt_key(ids) for ids in prompts], dtype=np.uint64)
    return _nothing() | part | {"keys": keys, "sources": np.full(len(keys), -1, np.int64)}
