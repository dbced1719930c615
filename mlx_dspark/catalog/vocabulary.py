"""One hash for a vocabulary, the same for every file that writes the same tokens with the same ids."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_dspark.catalog.folder import read_json
from mlx_dspark.foundation.numbers import is_whole


def vocabulary_hash(folder: Path) -> str | None:
    """sha256 over id and token of every entry of tokenizer.json, added ones included, in order of ids.

    Merges, normalizers and the file's layout play no part. None where there is no tokenizer.json or it lists
    no tokens. Raises BadCheckpoint where it is not JSON.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    content = read_json(file)
    tokens = _listed(content) | _added(content)
    if not tokens:
        return None
    digest = hashlib.sha256()
    for number, token in sorted(tokens.items()):
        digest.update(f"{number}\t{token}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _listed(content: Mapping[str, Any]) -> dict[int, str]:
    model = content.get("model")
    listed = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(listed, dict):
        return {number: token for token, number in listed.items() if is_whole(number)}
    if isinstance(listed, list):
        return {i: str(entry[0]) for i, entry in enumerate(listed) if isinstance(entry, list) and entry}
    return {}


def _added(content: Mapping[str, Any]) -> dict[int, str]:
    added = content.get("added_tokens")
    entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    return {entry["id"]: str(entry.get("content")) for entry in entries if is_whole(entry.get("id"))}
