"""`models`, `pull` and `rm`: what is known and what is here, fetching one, taking one out of the cache."""

from __future__ import annotations

import json as json_
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from mlx_dspark.cli.ranks import refuse_ranks
from mlx_dspark.cli.show import Progress, note
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.paths import default_cache_dir

if TYPE_CHECKING:
    from mlx_dspark.catalog.pairs import Pair
    from mlx_dspark.session.shelf import Shelved

_MODEL = "A hub repository, or gguf:owner/repository/file.gguf for one file of it."


def models(
    *,
    local: Annotated[
        bool, Parameter(negative="", help="Everything found on this machine, with its place.")
    ] = False,
    json: Annotated[bool, Parameter(negative="", help="Print one JSON array, and nothing else.")] = False,
) -> int:
    """List the models that drafters are known for, or those on this machine."""
    from mlx_dspark.catalog.memory import memory_here
    from mlx_dspark.catalog.places import not_folders, places
    from mlx_dspark.session.shelf import known, on_this_machine

    refuse_ranks("models")
    have, cache_dir = memory_here(), default_cache_dir()
    found = list(on_this_machine(cache_dir, have) if local else known(_registry(), cache_dir, have))
    for folder in not_folders():
        note(f"MLX_DSPARK_MODEL_DIRS names {folder}, which is no folder.")
    if json:
        print(json_.dumps([each.as_dict() for each in found], indent=2))
        return 0
    lines = _table(_local_rows(found) if local else _known_rows(found))
    print("\n".join(lines) if found else "None.")
    if not local and (silent := [each.name for each in found if each.drafters and not each.expected]):
        note(f"No accept length is recorded for {', '.join(silent)}: how well drafts do there is not judged.")
    if have is not None:
        note(f"Memory: {_size(have.bytes)} ({have.source}).")
    if local:
        note("Searched: " + ", ".join(["the hub's cache", *(str(place.folder) for place in places())]) + ".")
    return 0


def pull(
    model: Annotated[str, Parameter(help=_MODEL)],
    /,
    *,
    drafter: Annotated[
        bool, Parameter(negative="", help="It is a drafter, none of whose code runs.")
    ] = False,
    trust_remote_code: Annotated[
        bool, Parameter(negative="", help="Fetch a model that carries Python code, too.")
    ] = False,
    memory_guard: Annotated[
        bool, Parameter(help="Refuse a model that needs more memory than this machine has.")
    ] = True,
) -> int:
    """Fetch a model or drafter into the hub's cache, unless it is on this machine; prints where it lies.

    A model that is on this machine already is refused if it could not be loaded. Ctrl-C loses nothing: the
    next pull goes on from there.
    """
    from functools import partial

    from mlx_dspark.catalog.memory import memory_here
    from mlx_dspark.catalog.resolve import resolve_drafter, resolve_model
    from mlx_dspark.foundation.settings import LoadSettings
    from mlx_dspark.session.fits import MemoryGuard
    from mlx_dspark.session.pair import refuse_unfit
    from mlx_dspark.targets.load import refuse_config

    refuse_ranks("pull")
    _refuse_empty(model)
    progress = Progress()
    if drafter:
        found = resolve_drafter(model, progress=progress)
    else:
        guard = MemoryGuard(LoadSettings(memory_guard=memory_guard), memory_here())
        found = resolve_model(
            model,
            cache_dir=default_cache_dir(),
            trust_remote_code=trust_remote_code,
            progress=progress,
            accept=partial(refuse_config),
            weigh=guard.weigh,
        )
        refuse_unfit(found, LoadSettings(trust_remote_code=trust_remote_code))
    progress.clear()
    print(found.path)
    return 0


def rm(
    model: Annotated[str, Parameter(help=_MODEL)],
    /,
    *,
    yes: Annotated[bool, Parameter(negative="", help="Do not ask.")] = False,
) -> int:
    """Take a model out of the hub's cache. Other folders are yours, and never touched."""
    from mlx_dspark.catalog.remove import removal_of

    refuse_ranks("rm")
    _refuse_empty(model)
    removal = removal_of(model, cache_dir=default_cache_dir())
    what = f"{removal.name} ({_size(removal.bytes)}) from {removal.home}"
    if not yes and not _agreed(f"Remove {what}? [y/N] "):
        note("Nothing was removed.")
        return 0
    removal.execute()
    note(f"Removed {what}.")
    return 0


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("rm asks before it removes, and nobody can answer here.", "Pass --yes.", field="yes")
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _refuse_empty(model: str) -> None:
    if not model:
        raise UsageError("MODEL is empty.", "Name a model, such as owner/repository.")


def _registry() -> tuple[Pair, ...]:
    """The rows; what is wrong with the user's file is told beside them."""
    from mlx_dspark.catalog.pairs import load_registry

    found = load_registry()
    for fault in found.faults:
        note(str(fault))
    return found.pairs


def _known_rows(found: Iterable[Shelved]) -> Iterable[Sequence[str]]:
    yield "model", "size", "here", "fits", "speed", "accept", "drafters", "licence"
    for each in found:
        speed = "-" if each.speedup is None else f"{each.speedup:.2f}x"
        drafters = ", ".join(each.drafters) or "lookup"
        licence = each.licence or "not known"
        yield (
            each.name,
            _size(each.bytes),
            each.place or "-",
            _fits(each),
            speed,
            _accept(each),
            drafters,
            licence,
        )


def _accept(each: Shelved) -> str:
    """The recorded accept lengths, from the least to the most of the contents; loose ones with a ~."""
    lengths = [expected.accept_length for expected in each.expected]
    if not lengths:
        return "not known"
    low, high = min(lengths), max(lengths)
    about = "~" if any(expected.loose for expected in each.expected) else ""
    return about + (f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}")


def _local_rows(found: Iterable[Shelved]) -> Iterable[Sequence[str]]:
    yield "model", "size", "place", "fits", "path"
    for each in found:
        yield each.name, _size(each.bytes), each.place, _fits(each), str(each.path)


def _fits(each: Shelved) -> str:
    if each.trouble:
        return each.trouble
    return "not known" if each.fits is None else str(each.fits)


def _size(count: int) -> str:
    from mlx_dspark.catalog.fit import gigabytes

    return gigabytes(count) if count else "not known"


def _table(rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
