"""Malformed bodies for every route that answers, thousands of them: the laws of the tests with more examples.

python benchmarks/fuzz_server.py [BODIES]     so many a route, 1000 where no number is given
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = ("test_serving_fuzz.py", "test_serving_admin_bodies.py")


def main(bodies: str = "1000") -> int:
    """Run them; returns pytest's exit code."""
    root = Path(__file__).parents[1]
    files = [str(root / "tests" / "laws" / name) for name in TESTS]
    command = [sys.executable, "-m", "pytest", *files, "-k", "bad_bodies or nobody_should_send"]
    return subprocess.run(
        command, cwd=root, env=os.environ | {"FUZZED_BODIES": bodies}, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
