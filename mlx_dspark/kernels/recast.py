"""A module as one of another class."""

from __future__ import annotations

from typing import TypeVar

import mlx.nn as nn

M = TypeVar("M", bound=nn.Module)


def recast(module: nn.Module, kind: type[M], **more: object) -> M:
    """A `kind` with the arrays, the parts and the settings of `module`, and with `more` attributes that are
    none of its parts."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    for name, value in {**vars(module), **more}.items():
        object.__setattr__(made, name, value)
    dict.update(made, module)
    return made
