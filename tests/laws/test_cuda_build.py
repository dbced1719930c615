"""Laws of the text of CUDA kernels: MLX is given a short one, which the compiler reads as the whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_dspark.kernels.cuda_attention import attend as attention
from mlx_dspark.kernels.cuda_block import forward
from mlx_dspark.kernels.cuda_chain import chain
from mlx_dspark.kernels.cuda_common import build
from mlx_dspark.kernels.cuda_common.build import Block, File, Text, built
from mlx_dspark.kernels.cuda_small_m import kernel as small_m
from mlx_dspark.kernels.framework.kernel import Case

FACTS = ("shape", "strides", "ndim")


class Noted:
    """`mx.fast.cuda_kernel` that notes what it is given and launches nothing."""

    def __init__(self) -> None:
        self.forms: dict[str, dict[str, Any]] = {}

    def __call__(self, **form: Any) -> Callable[..., list[mx.array]]:
        self.forms[form["name"]] = form
        return lambda **call: [
            mx.zeros(shape, dtype)
            for shape, dtype in zip(call["output_shapes"], call["output_dtypes"], strict=True)
        ]


def passed(form: dict[str, Any]) -> list[str]:
    """What MLX passes with the inputs: it looks for their names in the text of the function."""
    named = [f"{name}_{fact}" for name in form["input_names"] for fact in FACTS]
    return [each for each in named if each in form["source"]]


def as_compiled(text: str) -> str:
    """The text after the compiler has read the files that it names."""
    read = re.sub(r'#include "(/[^"]*)"\n', lambda found: Path(found[1]).read_text(), text)
    lines = (line.strip() for line in read.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


def forget() -> None:
    caches = attention._launches, attention._kernel, attention._combine, small_m._launch, small_m._kernel
    for cached in caches:
        cached.cache_clear()


def made(factory: Noted | None) -> None:
    """Kernels of every kind."""
    forget()
    kernel = small_m.CudaSmallM(factory)
    inputs = kernel.draw(Case("48x64-4b-g64-float16", 3), 0)
    launch = kernel.geometries(Case("48x64-4b-g64-float16", 3))[0]
    kernel.multiply(inputs.x, inputs.source, launch)
    kernel.multiply_together(inputs.x, [inputs.source] * 3, launch)
    for length in (40, 6000):
        queries, keys = mx.zeros((1, 4, 3, 64), mx.float16), mx.zeros((1, 2, length, 64), mx.float16)
        for mask in (None, "causal", mx.zeros((3, length), mx.bool_)):
            attention.attend(queries, keys, keys, 1.0, mask, None, None, factory)


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Noted, Noted]]:
    """What MLX is given, and what stands in for it."""
    short, whole = Noted(), Noted()
    monkeypatch.setattr(mx.fast, "cuda_kernel", short)
    made(None)
    made(whole)
    yield short, whole
    forget()


def test_what_mlx_is_given_is_compiled_to_the_same(both: tuple[Noted, Noted]) -> None:
    short, whole = both
    assert short.forms.keys() == whole.forms.keys()
    assert len(short.forms) == 9, "two products, three masks short and split, and what adds those up"
    for name, form in short.forms.items():
        same = whole.forms[name]
        assert as_compiled(form["header"]) == as_compiled(same["header"])
        assert as_compiled(form["source"]) == as_compiled(same["source"])
        assert passed(form) == passed(same)
        others = {key: value for key, value in same.items() if key not in ("header", "source")}
        assert {key: form[key] for key in others} == others


def test_what_mlx_is_given_is_short(both: tuple[Noted, Noted]) -> None:
    short, whole = both
    for name, form in short.forms.items():
        length = len(form["header"] + form["source"])
        assert length < 2500
        assert length < len(whole.forms[name]["header"] + whole.forms[name]["source"])


SHAPE = forward.Dimensions(2, 64, 2, 1, 64, 128, 128, 1e-5, 0.125, causal=False)
TEMPLATES: dict[str, tuple[str, Any, str, list[str]]] = {
    f"chain {' '.join(map(str, map(int, form)))}": (
        "cuda_chain",
        partial(chain._kernel, *form),
        f"{chain.defines(*form)}NUMBERS.CUH",
        chain.names(*form)[0],
    )
    for form in product((False, True), repeat=5)
} | {
    f"block of {bits} bits": (
        "cuda_block",
        partial(forward._kernel, SHAPE, bits, 32, 5),
        f"PARTS.CUH{forward.defines(SHAPE, bits, 32, 5)}",
        forward.names(2, bits != 16),
    )
    for bits in (4, 8, 16)
}


@pytest.mark.parametrize("which", TEMPLATES)
def test_templates_are_given_short_too(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, make, header, inputs = TEMPLATES[which]
    home = Path(build.__file__).parents[1] / folder
    texts = {path.name.upper(): path.read_text() for path in home.iterdir() if path.suffix in (".cu", ".cuh")}
    noted = Noted()
    monkeypatch.setattr(mx.fast, "cuda_kernel", noted)
    make.func.cache_clear()
    make()
    make.func.cache_clear()
    [form] = noted.forms.values()
    whole = next(text for name, text in texts.items() if name.endswith(".CU"))
    for name, text in texts.items():
        header = header.replace(name, text)
    assert as_compiled(form["header"]) == as_compiled(header)
    assert as_compiled(form["source"]) == as_compiled(whole)
    assert form["input_names"] == inputs
    assert passed(form) == passed({**form, "source": whole})
    assert passed(form) or folder == "cuda_block"
    assert len(form["header"] + form["source"]) < 2000


@pytest.mark.parametrize("wrong", ['a "quoted" folder', "a\nline", "a\\b", None])
def test_files_that_no_line_can_name_are_given_whole(
    wrong: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / (wrong or "packed")
    (home / "few").mkdir(parents=True)
    (home / "few" / "body.cu").write_text("// what it does\n  y[0] = x_ndim;\n")
    monkeypatch.setattr(build, "files", lambda _: home if wrong else Packed(home))
    monkeypatch.setattr(build, "source_text", build.source_text.__wrapped__)
    noted = Noted()
    monkeypatch.setattr(mx.fast, "cuda_kernel", noted)
    monkeypatch.setattr(build, "LANES", File("few", "body.cu"))
    built("few", Text([], File("few", "body.cu"), {"x": "float"}, {"y": "float"}), Block(32, 1, 0))
    [form] = noted.forms.values()
    assert form["source"].endswith("y[0] = x_ndim;\n")
    assert "#include" not in form["header"] + form["source"]


class Packed:
    """A place that is no path, as in an archive."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __truediv__(self, name: str) -> Packed:
        return Packed(self._path / name)

    def read_text(self) -> str:
        return self._path.read_text()


def test_another_text_has_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "few").mkdir()
    monkeypatch.setattr(build, "files", lambda _: tmp_path)
    monkeypatch.setattr(build, "source_text", build.source_text.__wrapped__)
    monkeypatch.setattr(build, "LANES", File("few", "body.cu"))
    noted = Noted()
    monkeypatch.setattr(mx.fast, "cuda_kernel", noted)
    for body in ("y[0] = 1;", "y[0] = 2;"):
        (tmp_path / "few" / "body.cu").write_text(body)
        built("few", Text([], File("few", "body.cu"), {"x": "float"}, {"y": "float"}), Block(32, 1, 0))
    assert len(noted.forms) == 2
