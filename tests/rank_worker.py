"""What each rank runs in `laws/test_distributed.py`: all cases one after the other, in one launch.

python -m tests.rank_worker CASES.json OUT: rank `r` writes `OUT/CASE.r.json` for each case.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import mlx.core as mx

import mlx_dspark
from mlx_dspark.distributed import link
from mlx_dspark.engine.follow import FollowLoop
from mlx_dspark.foundation.errors import DsparkError
from mlx_dspark.session import Session
from mlx_dspark.state import layout as state_layout
from mlx_dspark.targets.dense import target as dense_target

Case = dict[str, Any]


def answers(session: Session, case: Case) -> Any:
    """What the asking process says to a case: token ids of each answer."""
    asked, options = case["prompts"], case.get("ask", {})
    match case.get("how", "one by one"):
        case "threads":
            got: dict[int, list[int]] = {}

            def ask(index: int) -> None:
                more = options | {"max_new_tokens": options["max_new_tokens"] + 3 * index}
                got[index] = list(session.generate(asked[index], **more).token_ids)

            threads = [Thread(target=ask, args=(index,)) for index in range(len(asked))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return [got[index] for index in range(len(asked))]
        case "cancelled first":
            for _ in zip(session.stream(asked[0], **options), range(6), strict=False):
                pass
        case "interrupted first":
            interrupt_within_a_round(session, asked[0], options)
    return [list(session.generate(prompt, **options).token_ids) for prompt in asked]


def interrupt_within_a_round(session: Session, prompt: str, options: dict[str, Any]) -> None:
    """Ctrl-C while a round is under way."""
    target: Any = session.engine.target  # type: ignore[attr-defined]
    forward, rounds = target.forward, iter(range(100))

    def interrupting(*arguments: Any, **more: Any) -> Any:
        if next(rounds) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return forward(*arguments, **more)

    target.forward = interrupting
    try:
        session.generate(prompt, **options)
        raise AssertionError("no interrupt")
    except KeyboardInterrupt:
        pass
    finally:
        target.forward = forward


def die_in_round(number: int) -> None:
    """This process is killed while it computes its `number`th round."""
    launch = FollowLoop.launch_as_told

    def dying(self: FollowLoop, *arguments: Any) -> Any:
        if self.rounds == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return launch(self, *arguments)

    FollowLoop.launch_as_told = dying  # type: ignore[method-assign]


def lay_out(layout: str) -> None:
    """Rows lie so, whatever the device."""
    for module in (state_layout, dense_target):
        module.layout_here = lambda: state_layout.Layout(layout)  # type: ignore[attr-defined]


def run(case: Case, rank: int) -> Any:
    load = case["load"] | (case.get("load on others", {}) if rank else {})
    lay_out(case.get("layout", ["list", "list"])[rank])
    if rank and "dies in round" in case:
        die_in_round(case["dies in round"])
    try:
        session = mlx_dspark.load(**load)
        if session.rank:
            session.follow()
            loop = session.engine.loop  # type: ignore[attr-defined]
            return {"rounds": loop.rounds, "differed": loop.differed}
        said = answers(session, case)
        session.close()
        return said
    except DsparkError as error:
        return {"error": type(error).__name__, "says": str(error)}


def main() -> None:
    mx.set_default_device(mx.cpu)
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    rank = int(os.environ["MLX_RANK"])
    for name, case in cases.items():
        link._JOINED.clear()
        said = run(case, rank)
        (out / f"{name}.{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
