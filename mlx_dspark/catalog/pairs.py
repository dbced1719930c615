"""The registry of pairs: targets and the drafters that were made for them.

`pairs.toml` beside this file holds the program's rows; `pairs.toml` in the user's configuration folder adds
to them, and a row there takes the place of one with the same id. docs/pairs.md lists the fields.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlx_dspark.catalog.pair_row import ALL, TARGET, Expected, Row
from mlx_dspark.foundation.errors import BadCheckpoint, DsparkError

PACKAGED = Path(__file__).parent / "pairs.toml"
DRAFTER_BYTES = 4.5 / 8
"""Bytes of a parameter in 4 bits, with 32 bits of scale and bias for each 64."""
USUAL_CAP = 7
"""Drafts of most blocks, taken for the cap of a published gain where the row names none."""
SHIPPED = "shipped:"
"""Begins the name of a drafter that comes with the program."""


@dataclass(frozen=True)
class Pair:
    """One row. What is not known is None or empty.

    `target` and the `drafters` by mode are hub ids, but for those that come with the program; `parents` are
    hub ids that a conversion of the target names as what it was made from. `architecture` is the config's
    `model_type`, `vocabulary` the hash of `catalog.vocabulary`, `bits` those of the target's quantization.
    `cap` is the published best number of drafts a round, `peak_bytes` of memory in a short conversation;
    `speedup` is the published gain over plain decoding, `speedups` by content. A token of context takes
    `kv_bytes_per_token`, a text of any length `fixed_state_bytes` besides: of recurrent states and full
    windows. `weights_source` and `kv_source` say where these figures come from. `drafter_parameters` are
    counts by mode, `licence` is that of the target and of the drafter by mode. `unknown` names what nothing
    could be found out about; `file` is where the row stands.
    """

    id: str
    target: str
    drafters: Mapping[str, str]
    mode: str
    source: str
    lookup: bool = True
    parents: tuple[str, ...] = ()
    architecture: str | None = None
    hidden_size: int | None = None
    layers: int | None = None
    vocabulary: str | None = None
    bits: int | None = None
    cap: int | None = None
    weights_bytes: int | None = None
    weights_source: str | None = None
    kv_bytes_per_token: int | None = None
    kv_source: str | None = None
    fixed_state_bytes: int | None = None
    drafter_parameters: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    peak_bytes: int | None = None
    speedup: float | None = None
    speedups: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    licence: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    expected: tuple[Expected, ...] = ()
    unknown: tuple[str, ...] = ()
    file: Path = field(default=PACKAGED, compare=False)

    def expectations(self, mode: str) -> Mapping[str, Expected]:
        """What is expected of a drafting mode, by content; `all` stands for all contents together.

        Without accept lengths on record, of the row's own mode, the published gains stand for them.
        """
        found = {each.content: each for each in self.expected if each.mode == mode}
        return MappingProxyType(found or self._of_gains(mode))

    def drafter_bytes(self, mode: str) -> int:
        """Bytes of a drafter's weights as they are held unless asked otherwise; 0 where not known."""
        return int(self.drafter_parameters.get(mode, 0) * DRAFTER_BYTES)

    def recorded(self) -> dict[str, Any]:
        """What the row tells of memory and licences, by name as JSON takes it, None for what is not known."""
        return {
            "weights_bytes": self.weights_bytes,
            "weights_source": self.weights_source,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kv_source": self.kv_source,
            "fixed_state_bytes": self.fixed_state_bytes,
            "peak_bytes": self.peak_bytes,
            "drafter_parameters": {mode: self.drafter_parameters.get(mode) for mode in self.drafters},
            "licence": {who: self.licence.get(who) for who in (TARGET, *self.drafters)},
            "not_known": list(self.unknown),
        }

    def _of_gains(self, mode: str) -> dict[str, Expected]:
        """A round takes no less than a plain step, so that a gain is no more than its accept length."""
        gains = self.speedups or ({} if self.speedup is None else {ALL: self.speedup})
        if mode != self.mode:
            return {}
        basis, cap = "the published gain, which takes at least so many tokens a round", self.cap or USUAL_CAP
        return {
            content: Expected(mode, content, cap, gain, basis=basis)
            for content, gain in gains.items()
            if 1 < gain <= cap + 1
        }


@dataclass(frozen=True)
class Registry:
    """All rows, and what is wrong with the user's file, if anything; its other rows count."""

    pairs: tuple[Pair, ...]
    faults: tuple[DsparkError, ...] = ()

    def named(self, name: str) -> Pair | None:
        """The row with this id, or None."""
        return next((pair for pair in self.pairs if pair.id == name), None)


def registry() -> tuple[Pair, ...]:
    """The program's rows and the user's good ones."""
    return load_registry().pairs


def load_registry(user: Path | None = None) -> Registry:
    """The rows of the program and of `user`, None for the file `user_file` names. A faulty user row is left
    out and told in `faults`."""
    path = user_file() if user is None else user
    pairs = {pair.id: pair for pair in read_pairs(PACKAGED)}
    faults: list[DsparkError] = []
    try:
        rows = _rows(path) if os.path.lexists(path) else []
    except DsparkError as error:
        return Registry(tuple(pairs.values()), (error,))
    own: set[str] = set()
    for row in rows:
        try:
            pair = _pair(row)
            if pair.id in own:
                row.bad("id", f"is {pair.id!r}, as an earlier row's is")
            own.add(pair.id)
            pairs[pair.id] = pair
        except DsparkError as error:
            faults.append(error)
    return Registry(tuple(pairs.values()), tuple(faults))


def user_file() -> Path:
    """`mlx_dspark/pairs.toml` in `$XDG_CONFIG_HOME`, else in `~/.config`."""
    named = os.environ.get("XDG_CONFIG_HOME", "")
    home = Path(named) if named and Path(named).is_absolute() else Path(os.path.expanduser("~/.config"))
    return home / "mlx_dspark" / "pairs.toml"


def read_pairs(path: Path) -> tuple[Pair, ...]:
    """Every row of a file. Raises BadCheckpoint naming file, row and field."""
    pairs: dict[str, Pair] = {}
    for row in _rows(path):
        pair = _pair(row)
        if pair.id in pairs:
            row.bad("id", f"is {pair.id!r}, as an earlier row's is")
        pairs[pair.id] = pair
    return tuple(pairs.values())


def target_of(name: str) -> str:
    """The target's name where `name` is the id of a row, else `name`."""
    found = load_registry().named(name)
    return name if found is None else found.target


def _rows(path: Path) -> list[Row]:
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except OSError as error:
        raise BadCheckpoint(
            f"{path} cannot be read: {error.strerror or error}.", "Check the file and its rights."
        ) from error
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(
            f"{path} is not valid TOML: {str(error).rstrip('.')}.", "Correct the file, or remove it."
        ) from error
    rows = content.pop("pair", [])
    listed = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    if content or not listed:
        odd = next(iter(content), "pair")
        raise BadCheckpoint(
            f"{path} has the key {odd!r}, where each row begins with [[pair]].",
            "Correct the file, or remove it.",
            field=odd,
        )
    starts = [number for number, line in enumerate(text.splitlines(), 1) if _starts_row(line)]
    return [Row(row, path, starts[i] if len(starts) == len(rows) else 0, i + 1) for i, row in enumerate(rows)]


def _starts_row(line: str) -> bool:
    return line.partition("#")[0].replace(" ", "").strip() == "[[pair]]"


_WHOLES = (
    *("hidden_size", "layers", "bits", "cap"),
    *("weights_bytes", "kv_bytes_per_token", "fixed_state_bytes", "peak_bytes"),
)
_WORDS = ("architecture", "vocabulary", "weights_source", "kv_source")
MODES = ("dspark", "dflash", "lookup")


def _target(row: Row) -> str:
    """A hub id, or the short name of the program's own model."""
    from mlx_dspark.catalog.default_model import NAME
    from mlx_dspark.catalog.hub import is_hub_id

    target = row.required("target")
    if target != NAME and not is_hub_id(target):
        row.bad(
            "target",
            f"is {target!r}, no hub id (publisher/repository); for a model in a model folder "
            "give publisher/repository as it lies there, for one elsewhere name the drafter with --drafter",
        )
    return target


def _pair(row: Row) -> Pair:
    drafters = row.drafters(MODES[:2])
    mode = row.word("mode") or next(iter(drafters), "lookup")
    if mode not in (*drafters, "lookup"):
        row.bad("mode", f"is {mode!r}, and drafters names {_listed(drafters)}")
    known: dict[str, Any] = {name: row.whole(name) for name in _WHOLES}
    known |= {name: row.word(name) for name in _WORDS}
    pair = Pair(
        id=row.required("id"),
        target=_target(row),
        drafters=MappingProxyType(drafters),
        mode=mode,
        source=row.word("source") or str(row.file),
        lookup=row.flag("lookup", True),
        parents=row.words("parents"),
        speedup=row.number("speedup"),
        speedups=MappingProxyType(row.numbers("speedups")),
        drafter_parameters=MappingProxyType(row.wholes("drafter_parameters", tuple(drafters))),
        licence=MappingProxyType(row.texts("licence", (TARGET, *drafters))),
        expected=row.expected(drafters),
        unknown=row.unknown(tuple(drafters)),
        file=row.file,
        **known,
    )
    row.refuse_unknown()
    return pair


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
