"""Which kernels a loaded model runs on, why others are off, and what tells it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from mlx_dspark.kernels.framework.kernel import Case
from mlx_dspark.kernels.framework.plan import Switchboard
from mlx_dspark.kernels.framework.registry import BackEnd
from mlx_dspark.kernels.framework.verdict import Verdict

_SERVING = ("live",)
_SERVING_FORCED = ("live", "costly", "slower")


@dataclass(frozen=True)
class KernelState:
    """One kernel as it stands in one loaded model.

    `why` says why it is off, and is empty where it serves some case. `forced`: it was asked for by a setting,
    so that it serves where it is no faster, too. `remark` is what else there is to say. `edition` tells its
    text from others.
    """

    name: str
    version: int
    why: str = ""
    cases: Mapping[Case, Verdict] = field(default_factory=dict)
    forced: bool = False
    remark: str = ""
    edition: str = ""

    def serves(self, verdict: Verdict) -> bool:
        return verdict.state in (_SERVING_FORCED if self.forced else _SERVING)

    def serves_beside(self, verdict: Verdict) -> bool:
        """Whether it serves the case in one launch with others that it serves, and not alone."""
        return verdict.state == "costly" and not self.forced

    @property
    def serving(self) -> list[Case]:
        """The cases it serves, sorted; none where it is off."""
        return [] if self.why else sorted(case for case, found in self.cases.items() if self.serves(found))


@dataclass
class LiveKernels:
    """The kernels of one loaded model. `board` has those that were switched off since."""

    back_end: BackEnd
    board: Switchboard = field(default_factory=Switchboard)
    states: list[KernelState] = field(default_factory=list)

    @property
    def live(self) -> list[KernelState]:
        """Those that serve something now."""
        return [state for state in self.states if state.serving and state.name not in self.board.off]

    def why_off(self, state: KernelState) -> str:
        """Why a kernel serves nothing now; empty where it does."""
        return self.board.off.get(state.name, "") or state.why

    def switch_off(self, reason: str) -> list[str]:
        """Switch off all that are live, until the model is loaded anew; returns their names."""
        names = [state.name for state in self.live]
        for name in names:
            self.board.switch_off(name, reason)
        return names

    def add(self, state: KernelState) -> None:
        """Add a kernel, or what it was offered beside in another part of the model."""
        old = next((each for each in self.states if each.name == state.name), None)
        if old is None:
            self.states.append(state)
            return
        both = KernelState(
            state.name,
            state.version,
            "" if old.serving or state.serving else state.why if state.cases else old.why,
            {**old.cases, **state.cases},
            state.forced,
            state.remark or old.remark,
            state.edition or old.edition,
        )
        self.states[self.states.index(old)] = both

    def join(self, other: LiveKernels) -> None:
        """Take in the kernels of a second model, such as the one that drafts: they are told of and switched
        off together."""
        for state in other.states:
            self.add(state)

        def pass_on() -> None:
            for name, reason in self.board.off.items():
                other.board.switch_off(name, reason)

        self.board.tell(pass_on)

    def key(self) -> list[str]:
        """What the speed of the model depends on: kernels, their versions, and which cases they serve how."""
        return [f"{each.name} {each.version} {each.edition} {_digest(each)}" for each in self.live]

    def to_json(self) -> list[dict[str, Any]]:
        """Every kernel with its state; "cases" lists those that were tried."""
        return [
            {
                "name": state.name,
                "version": state.version,
                "live": state in self.live,
                "why_off": self.why_off(state),
                "remark": state.remark,
                "serves": len(state.serving),
                "cases": [case_json(case, found) for case, found in sorted(state.cases.items())],
            }
            for state in self.states
        ]

    def __str__(self) -> str:
        """`kernels: NAME 12 of 20 cases`; empty where none is live and none was switched off."""
        told = [f"{state.name} {len(state.serving)} of {len(state.cases)} cases" for state in self.live]
        told += [f"{name} off ({reason})" for name, reason in self.board.off.items()]
        return f"kernels: {', '.join(told)}" if told else ""


def case_json(case: Case, found: Verdict) -> dict[str, Any]:
    """A case and its verdict, flat."""
    numbers = {"speed_up": round(found.speed_up, 3), **found.to_json()}
    return {"shape": case.shape, "width": case.width, **numbers}


def _digest(state: KernelState) -> str:
    served = [f"{case} {state.cases[case].geometry}" for case in state.serving]
    served += [f"{case} beside" for case, found in sorted(state.cases.items()) if state.serves_beside(found)]
    return sha256("\n".join(served).encode()).hexdigest()[:8]


def why_none(cases: Mapping[Case, Verdict], served: Iterable[Case]) -> str:
    """Why a kernel serves none of its cases, by how often each happened; empty where it serves one."""
    if any(True for _ in served):
        return ""
    if not cases:
        return "the model has nothing for it"
    counts: dict[str, list[Verdict]] = {}
    for found in cases.values():
        counts.setdefault(found.state, []).append(found)
    return ", ".join(_counted(state, each, len(cases)) for state, each in counts.items())


def _counted(state: str, found: Sequence[Verdict], cases: int) -> str:
    share = "all" if len(found) == cases else str(len(found))
    return f"{state} in {share} of {cases} cases ({found[0].reason})"
