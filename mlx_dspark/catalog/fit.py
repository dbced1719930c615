"""Will it fit: the memory that a model asks for, against what this machine has. Arithmetic, without MLX.

`targets/footprint.py` finds what a text takes, by state; `catalog/memory.py` what this machine has.
"""

from __future__ import annotations

from dataclasses import dataclass

STEP = 256
"""Buffers of keys and values are sized in multiples of this many positions."""
SMALLEST_CONTEXT = 512
"""A model does not fit where prompt and answer cannot have this many tokens, or all of a shorter context."""
_LARGEST = 1 << 24


@dataclass(frozen=True)
class StateBytes:
    """What the states of one text take: `fixed` whatever its length, `per_token` for each token of it, and
    for each of `windows` so many bytes for each of its newest tokens, as `(bytes, most tokens)`."""

    fixed: int = 0
    per_token: int = 0
    windows: tuple[tuple[int, int], ...] = ()

    def content(self, tokens: int) -> int:
        """Bytes of what is remembered of a text of so many tokens, 1 or more."""
        seen = sum(each * min(tokens, most) for each, most in self.windows)
        return self.fixed + self.per_token * tokens + seen

    def held(self, tokens: int) -> int:
        """Bytes of the buffers for it; of windows the most that they come to."""
        seen = sum(each * min(_stepped(tokens), _stepped(most + STEP)) for each, most in self.windows)
        return self.fixed + self.per_token * _stepped(tokens) + seen

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.fixed + other.fixed, self.per_token + other.per_token, self.windows + other.windows
        )


@dataclass(frozen=True)
class Need:
    """What a model and who drafts for it ask for, in bytes, with `rows` texts of so many tokens at once.

    `states` and `drafter_states` are of one text; `working` is what a round needs besides, and
    `working_per_token` for each token that it attends to.
    """

    weights: int
    states: StateBytes
    drafter: int = 0
    drafter_states: StateBytes = StateBytes()
    working: int = 0
    working_per_token: int = 0
    rows: int = 1

    def at(self, tokens: int) -> int:
        """All of it at a context of so many tokens."""
        texts = self.rows * (self.states.held(tokens) + self.drafter_states.held(tokens))
        return self.weights + self.drafter + texts + self.working + self.working_per_token * tokens


@dataclass(frozen=True)
class Memory:
    """The memory that models can have on this machine, in bytes, and what says so."""

    bytes: int
    source: str


@dataclass(frozen=True)
class Verdict:
    """Whether a model fits: `context` is the largest in tokens that does, 0 for none, of the `declared` one.

    `smallest` is what the shortest useful context asks for, `whole` what the declared one does, `have` what
    there is; `fits` says whether the shortest does.
    """

    fits: bool
    context: int
    declared: int
    smallest: int
    whole: int
    have: Memory

    def __str__(self) -> str:
        if not self.fits:
            return f"needs {gigabytes(self.smallest)}, has {gigabytes(self.have.bytes)}"
        if self.context < self.declared:
            return f"fits to {self.context} of {self.declared} tokens"
        return f"fits, {gigabytes(self.whole)} at {self.declared} tokens"


def verdict(need: Need, declared: int, have: Memory) -> Verdict:
    """Whether `need` fits into `have`; `declared` is the model's context in tokens."""
    shortest, declared = min(SMALLEST_CONTEXT, declared), min(declared, _LARGEST)
    smallest = need.at(shortest)
    fits = smallest <= have.bytes
    context = _largest(need, shortest, declared, have.bytes) if fits else 0
    return Verdict(fits, context, declared, smallest, need.at(declared), have)


def gigabytes(count: int) -> str:
    """Bytes as people read them: in GB with one decimal place, in MB below one."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _stepped(tokens: int) -> int:
    return -(-tokens // STEP) * STEP


def _largest(need: Need, fitting: int, most: int, bytes_: int) -> int:
    """The most tokens from `fitting` to `most` that stay within the bytes."""
    if need.at(most) <= bytes_:
        return most
    while most - fitting > 1:
        middle = (fitting + most) // 2
        if need.at(middle) <= bytes_:
            fitting = middle
        else:
            most = middle
    return fitting
