"""Whether a model can be trusted with what it was loaded for, asked once and remembered."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mlx_dspark.foundation.errors import DrafterMismatch, UnsupportedModel

if TYPE_CHECKING:
    from mlx_dspark.catalog.checkpoint import Checkpoint
    from mlx_dspark.catalog.progress import Progress
    from mlx_dspark.contracts import Drafter
    from mlx_dspark.targets.dense.target import DenseTarget
    from mlx_dspark.targets.faithful.probes import Faithfulness


def refuse_untrusted(
    target: DenseTarget,
    checkpoint: Checkpoint,
    drafter: Drafter | None,
    *,
    called: str,
    max_batch: int,
    cache_dir: Path | None,
    progress: Progress,
) -> Faithfulness | None:
    """Ask what matters: of a model that something drafts for, and of one that is to answer several at once.

    Where the answer is bad, forwards are no longer replayed, then kernels of ours switched off, and it is
    asked again. Returns the answer, or None where nothing was asked: nobody drafts, or lookup drafts and
    every state is of keys and values that stay. `called` names the drafter to its user; without `cache_dir`
    nothing is remembered. Raises DrafterMismatch where a drafter cannot read the model, and UnsupportedModel
    where drafts cannot be taken back or rows do not keep apart.
    """
    from mlx_dspark.catalog.progress import LoadProgress
    from mlx_dspark.targets.faithful.memory import remembered_faithfulness
    from mlx_dspark.targets.faithful.probes import faithfulness

    taps = drafter.taps if drafter is not None else ()
    plain_states = set(target.state_kinds) <= {"KVState"}
    if not taps and max_batch == 1 and (drafter is None or plain_states):
        return None
    progress(LoadProgress(f"checking {checkpoint.name}"))
    rows = max_batch > 1

    def ask() -> Faithfulness:
        if cache_dir is None:
            return faithfulness(target, taps, rows=rows)
        mark = checkpoint.fingerprint
        return remembered_faithfulness(target, taps, rows=rows, fingerprint=mark, cache_dir=cache_dir)

    found, kernels = ask(), target.kernels
    if found.bad and target.replayed:
        target.replays = None
        found = ask()
    if found.bad and kernels is not None and kernels.live:
        kernels.switch_off("a check of the model failed with it")
        found = ask()
    refuse_unfaithful(found, called=called, taps=taps, drafts=drafter is not None, max_batch=max_batch)
    return found


def refuse_unfaithful(
    found: Faithfulness, *, called: str, taps: tuple[int, ...], drafts: bool, max_batch: int
) -> None:
    """Raises as `refuse_untrusted` does, for an answer."""
    if drafts and found.replay:
        raise UnsupportedModel(
            f"Drafts cannot be taken back from this model: {found.replay}.",
            "Use --mode baseline.",
            field="mode",
        )
    if taps and found.taps:
        raise DrafterMismatch(
            f"The drafter {called} cannot be used with this model: {found.taps}.",
            "Use --mode lookup, or --mode baseline.",
            field="drafter",
        )
    if max_batch > 1 and found.rows:
        raise UnsupportedModel(
            f"This model cannot answer several requests at once: {found.rows}.",
            "Leave max_batch out.",
            field="max_batch",
        )
