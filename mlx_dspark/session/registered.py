"""What the registry of pairs says of a model: who drafts for it, and in which mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_dspark.foundation.errors import DsparkError

if TYPE_CHECKING:
    from mlx_dspark.catalog.pairs import Pair
    from mlx_dspark.catalog.resolve import ModelRef


@dataclass(frozen=True)
class Registered:
    """What is known of a model without a drafter named. `drafter` is a hub id or path, None for none.

    `told` says in a sentence what a user should know: which drafter was taken, or why none was.
    `leaves_shipped`: lookup drafts in the place of the drafter that is shipped with the model.
    """

    pair: Pair | None = None
    drafter: str | None = None
    told: str = ""
    leaves_shipped: bool = False


def may_be_registered(name: str | None) -> bool:
    """Whether a model of this name could have a row, as far as can be told before it is fetched."""
    from mlx_dspark.catalog.hub import cached_repository, is_hub_id
    from mlx_dspark.catalog.pairs import registry

    if name is None:
        return False
    if any(name in (pair.id, pair.target, *pair.parents) for pair in registry()):
        return True
    return _is_folder(name) or (is_hub_id(name) and cached_repository(name) is not None)


def _is_folder(name: str) -> bool:
    try:
        return Path(name).is_dir()
    except OSError:  # a name longer than the file system allows
        return False


def registered(
    found: ModelRef, mode: str, measured: Mapping[str, float], *, insists: bool = False
) -> Registered:
    """The drafter that the registry names for a model in `mode`, which is auto, dspark or dflash.

    In auto `measured`, gains over plain decoding by mode on this machine, comes before the row's own mode;
    with `insists` lookup is not chosen. A faulty registry file is told and costs its own rows only. Raises
    BadCheckpoint for a model folder without a readable config.json.
    """
    from mlx_dspark.catalog.matching import facts_of, match
    from mlx_dspark.catalog.pairs import load_registry

    known = load_registry()
    faults = " ".join(map(str, known.faults))
    with_vocabulary = any(pair.vocabulary for pair in known.pairs)
    outcome = match(facts_of(found, with_vocabulary=with_vocabulary), known.pairs)
    pair = outcome.pair
    if pair is None:
        why = f"No registered drafter is used: {outcome.reason}; --drafter names one." if outcome.near else ""
        return Registered(told=f"{why} {faults}".strip())
    wanted = chosen_mode(pair.mode, pair.drafters, measured, insists=insists) if mode == "auto" else mode
    drafter = pair.drafters.get(wanted)
    if drafter is None:
        what = "lookup drafts" if mode == "auto" else f"it has no {mode} drafter"
        return Registered(pair, told=f"The pair {pair.id}: {what}. {faults}".strip())
    return Registered(pair, drafter, f"The pair {pair.id}: {drafter} drafts. {faults}".strip())


def registered_as_shipped(
    pair: Pair | None, measured: Mapping[str, float], *, insists: bool = False
) -> Registered:
    """The row of a drafter that is shipped with its model, and whether lookup was measured faster here.

    `insists` is as for `registered`.
    """
    if pair is None or chosen_mode(pair.mode, pair.drafters, measured, insists=insists) != "lookup":
        return Registered(pair)
    return Registered(pair, told=f"The pair {pair.id}: lookup drafts.", leaves_shipped=True)


MARGIN = 1.05
"""How much faster another mode must have been than the row's for it to be taken in its place."""


def chosen_mode(
    mode: str, drafters: Mapping[str, str], measured: Mapping[str, float], *, insists: bool = False
) -> str:
    """The row's `mode`, unless another that this pair has was measured well faster here, beside it.

    With `insists` it is a mode with a drafter, where the row has one.
    """
    insists = insists and bool(drafters)
    if insists and mode not in drafters:
        mode = next(iter(drafters))
    if mode not in measured:
        return mode
    others = () if insists else ("lookup",)
    rivals = {name: gain for name, gain in measured.items() if name in others or name in drafters}
    best = max(rivals, key=lambda name: rivals[name], default=mode)
    return best if rivals.get(best, 0.0) > MARGIN * measured[mode] else mode


def without_drafter(known: Registered, error: DsparkError) -> Registered:
    """The same model where its registered drafter cannot be used: lookup drafts, and it is told why."""
    return Registered(known.pair, None, f"{known.told} It cannot be used, so lookup drafts: {error}".strip())
