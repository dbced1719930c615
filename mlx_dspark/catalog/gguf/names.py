"""The names of GGUF files: a split model is `NAME-00001-of-0000N.gguf` and its neighbours."""

from __future__ import annotations

import re
from pathlib import Path

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


def shard_names(name: str) -> list[str]:
    """The names of all parts of a split model, from that of one; of any other file, its own."""
    part = _SHARD.fullmatch(name)
    count = int(part["count"]) if part else 0
    if part is None or count == 0:
        return [name]
    ending = name[-len(".gguf") :]
    return [f"{part['stem']}-{number:05d}-of-{count:05d}{ending}" for number in range(1, count + 1)]


def model_name(path: Path) -> str:
    """What a GGUF model is called: its file's name without the ending and the number of the part."""
    part = _SHARD.fullmatch(path.name)
    return part["stem"] if part else path.stem
