"""Opening a GGUF file: its metadata as plain values, its tensors as numpy views.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import ReaderTensor

from mlx_dspark.catalog.reading import reading
from mlx_dspark.compat.gguf_reader import CutShort, FastGGUFReader
from mlx_dspark.foundation.errors import BadCheckpoint

_MAGIC = b"GGUF"
FETCH_AGAIN = "Fetch or copy the file again."


@dataclass(frozen=True)
class GGUFFile:
    """`metadata` holds numbers, strings and lists; `tensors` are views of the mapped file, by GGUF name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, ReaderTensor]

    def need(self, key: str) -> Any:
        """The metadata value of `key`; raises BadCheckpoint when the file lacks it."""
        try:
            return self.metadata[key]
        except KeyError:
            raise BadCheckpoint(
                f"{self.path} lacks the metadata key {key}.", "Convert the model to GGUF with a current tool."
            ) from None


def open_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file. Raises BadCheckpoint when it is not one, is damaged or cut short."""
    with reading(path):
        size = path.stat().st_size
        with path.open("rb") as file:
            is_gguf = file.read(4) == _MAGIC
    if not is_gguf:
        what = "is empty" if size == 0 else "is not a GGUF file"
        raise BadCheckpoint(f"{path} {what}.", FETCH_AGAIN)
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
        raise BadCheckpoint(f"{path} is not a readable GGUF file: {error}.", FETCH_AGAIN) from error
    return GGUFFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})
