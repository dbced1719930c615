"""Drafters that come with the program, each found by the content of its target and by nothing else.

A folder beside this file holds one drafter: config.json and model.safetensors in a layout of
`catalog/formats`, README.md (its card), and targets.json, which lists the single-file models it was made for:

    [{"size_bytes": 98362432, "sha256": "b179...", "acceptance": [0.53, 0.53, 0.63]}]

`acceptance`, which may be absent, holds the chance that each draft of a block is accepted given those before
it, at temperature 0, as it was measured.
"""

from __future__ import annotations

import json
from pathlib import Path

from mlx_dspark.catalog.default_model import NAME
from mlx_dspark.catalog.folder import packed_models
from mlx_dspark.catalog.integrity import sha256_of
from mlx_dspark.catalog.places import find_placed
from mlx_dspark.catalog.reading import reading
from mlx_dspark.catalog.resolve import ModelRef

HOME = Path(__file__).parent
TARGETS = "targets.json"


def shipped_drafter(found: ModelRef, home: Path | None = None) -> Path | None:
    """The folder of the drafter made for this very file; None where there is none.

    `home` holds the drafters' folders, None for those of the program. A file is hashed only when a drafter's
    target has its size. Raises BadCheckpoint when it cannot be read.
    """
    if found.packaging != "gguf":
        return None
    with reading(found.path):
        size = found.path.stat().st_size
        for folder, size_bytes, sha256 in _targets(home):
            if size_bytes == size and sha256 == (found.sha256 or sha256_of(found.path)):
                return folder
    return None


def drafter_named(name: str, home: Path | None = None) -> Path | None:
    """The folder of the drafter of this name; None where none is called so."""
    return next((folder for folder, _, _ in _targets(home) if folder.name == name), None)


def recorded_acceptance(folder: Path) -> tuple[float, ...]:
    """What is recorded of the drafter in a folder that `shipped_drafter` found; () where nothing is."""
    first, *_ = json.loads((folder / TARGETS).read_text(encoding="utf-8"))
    return tuple(first.get("acceptance", ()))


def may_have_shipped_drafter(name: str | None, home: Path | None = None) -> bool:
    """Whether a model of this name could have one, as far as can be told before it is fetched."""
    single_file = name is None or name == NAME or name.lower().endswith(".gguf")
    return (single_file or _holds_one_file(name)) and bool(_targets(home))


def _holds_one_file(name: str | None) -> bool:
    """Whether this is, or names, a folder of which `resolve_model` takes the only GGUF model."""
    folder = Path(name or "")
    try:
        if not folder.exists():
            folder = find_placed(name or "") or folder
        return not (folder / "config.json").exists() and len(packed_models(folder)) == 1
    except OSError:
        return False


def _targets(home: Path | None) -> list[tuple[Path, int, str]]:
    """Folder, size in bytes and sha256, for every target of every drafter."""
    return [
        (listing.parent, target["size_bytes"], target["sha256"])
        for listing in sorted((home or HOME).glob(f"*/{TARGETS}"))
        for target in json.loads(listing.read_text(encoding="utf-8"))
    ]
