"""Commands in a process that a launcher started as one of several: rank 0 answers, the others follow it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from mlx_dspark.cli.show import complain
from mlx_dspark.foundation.errors import DsparkError, FailedElsewhere, RequestError, UsageError
from mlx_dspark.foundation.ranks import closes_input, launched_rank
from mlx_dspark.foundation.settings import LoadSettings


def follows() -> bool:
    """Whether this process follows another one's command."""
    return bool(launched_rank())


def follow(loading: LoadSettings) -> int:
    """Load this rank's part of the model and do what rank 0 does; writes nothing but why it cannot.

    Ends after rank 0: mlx.launch ends all ranks at the first exit code that is not 0.
    """
    from mlx_dspark.distributed.link import joined
    from mlx_dspark.session.pair import load_parts

    with suppress(FailedElsewhere):
        load_parts(loading).session().follow()
    if (link := joined()) is not None:
        link.outlast_rank_0()
    return 0


def refuse_ranks(command: str) -> None:
    """Raises UsageError in a process of several: `command` is not for them."""
    if launched_rank() is not None:
        raise UsageError(
            f"{command} runs in one process, and a launcher started this one as one of several.",
            "Start it without the launcher; generate and chat can be launched.",
        )


def refuse_input_without_end() -> None:
    """Raises RequestError where standard input, read to its end, would never end."""
    if not closes_input():
        raise RequestError(
            "prompt is '-', and mlx.launch passes standard input on without its end.",
            'Give the text itself, such as --prompt "$(cat FILE)".',
            field="prompt",
        )


def report(error: DsparkError, arguments: Sequence[str] = ()) -> None:
    """`complain` of a command line, naming the rank where it is not 0."""
    rank = launched_rank()
    complain(error, who=f"mlx-dspark (rank {rank})" if rank else "mlx-dspark", arguments=arguments)
