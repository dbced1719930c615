"""Whether a launcher started this process as one of several. Reads the environment; knows no MLX."""

from __future__ import annotations

import os

_RANK_VARIABLES = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""Set by mlx.launch for ring, JACCL and NCCL, and by the launchers of MPI."""


def launched_rank() -> int | None:
    """The rank a launcher gave this process; None in an ordinary process."""
    for variable in _RANK_VARIABLES:
        if (rank := os.environ.get(variable, "")).isdecimal():
            return int(rank)
    return None


def closes_input() -> bool:
    """Whether the launcher, if there is one, tells the end of standard input: mlx.launch's own does not."""
    return "MLX_RANK" not in os.environ
