"""What can be wrong with a kernel."""

from __future__ import annotations


class ShimError(RuntimeError):
    """Something is wrong with a kernel, or the shim cannot run it."""


class NotMetal(ShimError):
    """The source is not Metal as the shim knows it: it cannot be read, or does not compile."""


class Fault(ShimError):
    """The kernel ran and did what it must not: memory, barriers, races, limits."""
