"""Opening a GGUF file, or one that was split: its metadata as plain values, its tensors as numpy views.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A split model is `NAME-00001-of-0000N.gguf`
and its neighbours; the first holds the metadata, each its share of the tensors.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from gguf import ReaderTensor

from mlx_dspark.catalog.gguf.names import shard_names
from mlx_dspark.catalog.reading import reading
from mlx_dspark.compat.gguf_reader import CutShort, FastGGUFReader
from mlx_dspark.foundation.errors import BadCheckpoint, UnsupportedModel
from mlx_dspark.foundation.numbers import brief, is_whole

_MAGIC = b"GGUF"
FETCH_AGAIN = "Fetch or copy the file again."


@dataclass(frozen=True)
class GGUFFile:
    """`metadata` holds numbers, strings and lists; `tensors` are views of the mapped files, by GGUF name.

    `path` is the file that was named, `shards` are all files of the model, the one with the metadata first.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, ReaderTensor]
    shards: tuple[Path, ...] = ()

    def need(self, key: str) -> Any:
        """The metadata value of `key`; raises BadCheckpoint when the file lacks it."""
        try:
            return self.metadata[key]
        except KeyError:
            raise BadCheckpoint(
                f"{self.path} lacks the metadata key {key}.", "Convert the model to GGUF with a current tool."
            ) from None

    def listed(self, key: str, of: type, default: list[Any] | None = None) -> list[Any]:
        """The list under `key`, its items of type `of`. Raises BadCheckpoint when it is something else."""
        value = self.need(key) if default is None else self.metadata.get(key, default)
        if not isinstance(value, list) or not all(isinstance(item, of) for item in value):
            raise BadCheckpoint(f"{key} in {self.path} is not a list of {of.__name__}.", FETCH_AGAIN)
        return value

    def unsupported(self, found: str, wanted: str) -> UnsupportedModel:
        """The error for a file that has `found`, where only `wanted` can be run."""
        return UnsupportedModel(
            f"{self.path} has {found}.", f"Use a GGUF file with {wanted}, or an MLX model folder."
        )


def open_gguf(path: Path) -> GGUFFile:
    """Read the headers of a GGUF file and of those it was split into.

    Raises BadCheckpoint when a file is missing, is not a GGUF file, is damaged or cut short, or does not
    belong with the others; UnsupportedModel for a big-endian one.
    """
    named = _open_one(path)
    count = _whole(named, "split.count", 1)
    if count <= 1:
        return named
    parts = [named if shard == path else _open_one(shard) for shard in _shards(named, count)]
    tensors: dict[str, ReaderTensor] = {}
    for number, part in enumerate(parts):
        if (_whole(part, "split.no", -1), _whole(part, "split.count", 0)) != (number, count):
            raise BadCheckpoint(
                f"{part.path} is not part {number + 1} of {count}: its metadata says otherwise.", FETCH_AGAIN
            )
        if twice := tensors.keys() & part.tensors.keys():
            raise BadCheckpoint(f"{part.path} holds {min(twice)}, as another part does.", FETCH_AGAIN)
        tensors |= part.tensors
    if (total := _whole(parts[0], "split.tensors.count", len(tensors))) != len(tensors):
        raise BadCheckpoint(
            f"The {count} parts of {path} hold {len(tensors)} tensors in place of {total}.", FETCH_AGAIN
        )
    return GGUFFile(path, parts[0].metadata, tensors, tuple(part.path for part in parts))


def _open_one(path: Path) -> GGUFFile:
    with reading(path):
        found = path.stat()
    return _opened(path, found.st_ino, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=2)
def _opened(path: Path, inode: int, size: int, changed: int) -> GGUFFile:
    """The file as it is: one that was replaced or written to since has another `inode`, `size` or `changed`.
    Reading a header with a vocabulary takes about a second, and loading asks for it several times."""
    del inode, changed
    with reading(path), path.open("rb") as file:
        start = file.read(8)
    if start[:4] != _MAGIC:
        what = "is empty" if size == 0 else "is not a GGUF file"
        raise BadCheckpoint(f"{path} {what}.", FETCH_AGAIN)
    if len(start) == 8 and not struct.unpack("<I", start[4:])[0] & 0xFFFF:
        raise UnsupportedModel(
            f"{path} is a big-endian GGUF file.", "Fetch the little-endian file of this model."
        )
    try:
        reader = FastGGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except CutShort as error:
        raise BadCheckpoint(
            f"{path} is cut short: {size} bytes in place of {error.expected}.", FETCH_AGAIN
        ) from error
    except IndexError as error:
        raise BadCheckpoint(
            f"{path} is cut short: its header does not end within its {size} bytes.", FETCH_AGAIN
        ) from error
    except (ValueError, KeyError, OverflowError, OSError) as error:
        said = str(error).rstrip(". ")
        raise BadCheckpoint(f"{path} is not a readable GGUF file: {said}.", FETCH_AGAIN) from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    return GGUFFile(path, metadata, tensors, (path,))


def _shards(named: GGUFFile, count: int) -> list[Path]:
    """The files of a model of `count` parts. Raises BadCheckpoint naming the first that is missing."""
    shards = [named.path.with_name(name) for name in shard_names(named.path.name)]
    if len(shards) != count:
        raise BadCheckpoint(
            f"{named.path} is one part of {count}, and its name does not tell the others.",
            f"Name the parts as they were fetched: model-00001-of-{count:05d}.gguf and so on.",
        )
    for shard in shards:
        if not shard.is_file():
            raise BadCheckpoint(
                f"{shard} is missing: {named.path.name} is one part of {count}.",
                "Fetch all parts into one folder.",
            )
    return shards


def _whole(file: GGUFFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if not is_whole(value):
        raise BadCheckpoint(f"{key} in {file.path} is {brief(value)}, not an integer.", FETCH_AGAIN)
    return value
