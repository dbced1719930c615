"""Writes tests/golden/agents anew: the bodies that each agent sent while it mended a bug, scrubbed.

python -m tests.agents.record
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.agents.bug_fix import AGENTS, RECORDED, broken, mend, scrubbed


def main() -> None:
    """Run every agent once."""
    for agent in AGENTS.values():
        with tempfile.TemporaryDirectory() as folder:
            outcome = mend(agent, Path(folder), first=[*agent.others, broken(agent)])
        assert outcome.done.returncode == 0, outcome.done.stderr
        bodies = [scrubbed(body) for body in outcome.asked]
        RECORDED.mkdir(exist_ok=True)
        (RECORDED / f"{agent.name}.json").write_text(json.dumps(bodies, indent=1) + "\n")


if __name__ == "__main__":
    main()
