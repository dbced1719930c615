"""The public face: few names, sorted, documented, and cheap to import."""

from __future__ import annotations

import subprocess
import sys

import mlx_dspark


def test_public_names_are_sorted_and_exist() -> None:
    assert mlx_dspark.__all__ == sorted(mlx_dspark.__all__)
    for name in mlx_dspark.__all__:
        assert getattr(mlx_dspark, name) is not None
    assert set(mlx_dspark.__all__) <= set(dir(mlx_dspark))
    assert len(mlx_dspark.__all__) <= 12


def test_public_things_are_documented() -> None:
    for name in mlx_dspark.__all__:
        value = getattr(mlx_dspark, name)
        assert isinstance(value, str) or value.__doc__, name


def test_session_exports_are_sorted_and_exist() -> None:
    from mlx_dspark import session

    assert session.__all__ == sorted(session.__all__)
    assert all(hasattr(session, name) for name in session.__all__)


def test_unknown_names_are_attribute_errors() -> None:
    assert not hasattr(mlx_dspark, "no_such_name")


def _modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = {"mlx", "mlx.core", "mlx_lm", "transformers", "numpy", "cyclopts"}
    assert not heavy & _modules_after("import mlx_dspark")


def test_help_imports_nothing_heavy() -> None:
    heavy = {"mlx", "mlx.core", "mlx_lm", "transformers", "numpy"}
    statement = "from mlx_dspark.cli.main import run\nrun(['--help'])\nrun(['generate', '--help'])"
    assert not heavy & _modules_after(statement)
