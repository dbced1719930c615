"""Check drafters against reference vectors: `python tests/golden.py DIR...`.

Each DIR is a case or a folder of cases. A case holds config.json, model.safetensors, io.safetensors and
meta.json (tests/golden/README.md tells what they mean). Everything runs in float32, unquantized. One line a
case with the largest relative error; the exit status is 1 when a case fails or there is none.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_dspark.contracts import Ask, Observation, TargetSpec
from mlx_dspark.drafters.block import BlockDrafter
from mlx_dspark.drafters.load import load_drafter
from mlx_dspark.foundation.errors import DsparkError
from mlx_dspark.foundation.request import SamplingParams
from mlx_dspark.kernels.dispatch import STOCK
from mlx_dspark.nn.context import ContextRows
from mlx_dspark.nn.noise import RowNoise

TOLERANCE = 1e-4
FILES = ("config.json", "io.safetensors", "meta.json")


class TableTarget:
    """A target that is nothing but its tables `[vocab, hidden]`; None where it has none."""

    def __init__(
        self, spec: TargetSpec, embed: mx.array | None, head: mx.array | None, embed_scale: float = 1.0
    ) -> None:
        self.spec = spec
        self._embed, self._head, self._scale = embed, head, embed_scale

    def new_rows(self, n: int = 1, *, rectangle: bool = False) -> Any:
        raise NotImplementedError("a table target holds no state")

    def forward(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("a table target computes nothing")

    def embed(self, tokens: mx.array) -> mx.array:
        assert self._embed is not None, "the case has no target_embed to borrow"
        return self._embed[tokens] * self._scale

    def unembed(self, hidden: mx.array) -> mx.array:
        assert self._head is not None, "the case has no target_lm_head to borrow"
        return hidden @ self._head.T


@dataclass(frozen=True)
class Verdict:
    """The outcome of one case: the largest relative error, where it was, and what went wrong, if anything."""

    name: str
    error: float
    where: str = ""
    fault: str = ""

    def __str__(self) -> str:
        status = f"FAIL: {self.fault}" if self.fault else "ok"
        return f"{self.name:32} {self.error:9.2e} {self.where:26} {status}"


def cases(folder: Path) -> list[Path]:
    """`folder` itself, when it is a case, or the cases in it."""
    if _is_case(folder):
        return [folder]
    if not folder.is_dir():
        return []
    return sorted(child for child in folder.iterdir() if child.is_dir() and _is_case(child))


def _is_case(folder: Path) -> bool:
    return any((folder / name).is_file() for name in FILES)


def check_case(folder: Path, held_as: str = STOCK) -> Verdict:
    """Run both rounds of one case; a broken case is a failed one. `held_as` is a way of the CPU back end."""
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        return Verdict(folder.name, math.inf, fault=f"lacks {', '.join(missing)}")
    try:
        errors = _relative_errors(folder, held_as)
    except (DsparkError, AssertionError, KeyError, ValueError) as error:
        return Verdict(folder.name, math.inf, fault=f"{type(error).__name__}: {error}")
    where, worst = max(errors.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])
    fault = "" if worst <= TOLERANCE else f"{where} is off by more than {TOLERANCE:g}"
    return Verdict(folder.name, worst, where, fault)


def _relative_errors(folder: Path, held_as: str) -> dict[str, float]:
    io = mx.load(str(folder / "io.safetensors"))
    assert isinstance(io, dict)
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    drafter = load_drafter(folder, quantize_bits=0, dtype=mx.float32)
    drafter.bind(_target(drafter, io))
    if held_as != STOCK:
        drafter.hold_weights(held_as, folder)
    rows, seen, errors = drafter.new_rows(), 0, {}
    for number, anchor in enumerate(meta["anchors"]):
        position = meta["context_len"] + number * (meta["accepted"] + 1)
        _observe(drafter, rows, io["features"][seen:position])
        seen = position
        expected = {key: value for key, value in io.items() if key.startswith(f"round{number}.")}
        assert expected, f"io.safetensors holds no round{number}"
        errors |= _round_errors(drafter, rows, anchor, expected)
    return errors


def _target(drafter: BlockDrafter, io: Mapping[str, mx.array]) -> TableTarget:
    """The case's target: its tables, where the case has them; a lone embedding serves as the head too."""
    config = drafter.config
    layers = config.target_layers or config.taps[-1] + 2
    spec = TargetSpec("reference", config.vocab, config.hidden, layers, context=1 << 20)
    embed = io.get("target_embed")
    scale = math.sqrt(config.hidden) if config.backbone == "gemma4" else 1.0
    return TableTarget(spec, embed, io.get("target_lm_head", embed), scale)


def _observe(drafter: BlockDrafter, rows: ContextRows, features: mx.array) -> None:
    """Hand over the features in two chunks, as a prefill would."""
    half = features.shape[0] // 2
    for chunk in (features[:half], features[half:]):
        tokens = [[0] * chunk.shape[0]]
        drafter.observe(rows, Observation(tokens, chunk[None], drafted=[0], accepted=[0]))


def _round_errors(
    drafter: BlockDrafter, rows: ContextRows, anchor: int, expected: Mapping[str, mx.array]
) -> dict[str, float]:
    trace = drafter.trace(rows, [anchor])
    found = {
        "block_hidden": trace.hidden,
        "base_logits": trace.chain.base_logits,
        "draft_logits": trace.chain.logits,
        "draft_tokens": trace.chain.tokens,
        "confidence_logits": trace.chain.confidence_logits,
    }
    errors = {}
    for key, reference in expected.items():
        value = found[key.split(".", 1)[1]]
        assert value is not None, f"the drafter has no {key}"
        assert value[0].shape == reference.shape, f"{key} is {value[0].shape}, not {reference.shape}"
        if key.endswith("draft_tokens"):
            drafts = _proposed(drafter, rows, anchor)
            assert value[0].tolist() == drafts == reference.tolist(), f"{key} is {drafts}"
        else:
            errors[key] = _relative_error(value[0], reference)
    return errors


def _proposed(drafter: BlockDrafter, rows: ContextRows, anchor: int) -> list[int]:
    """What the loop would be given, at the widest cap."""
    ask = Ask([anchor], [drafter.max_draft], rows.depth, [SamplingParams()], RowNoise.of_seeds([None]))
    proposal = drafter.propose(rows, ask)
    return [int(token) for token in proposal.tokens[0, : proposal.lengths[0]]]


def _relative_error(value: mx.array, reference: mx.array) -> float:
    return (mx.max(mx.abs(value - reference)) / mx.max(mx.abs(reference))).item()  # pyright: ignore[reportReturnType]


def verdicts(folders: Sequence[Path]) -> Iterator[Verdict]:
    """One verdict a case; a folder without a case is a failed one."""
    for folder in folders:
        found = cases(folder)
        if not found:
            yield Verdict(str(folder), math.inf, fault="holds no case")
        for case in found:
            yield check_case(case)


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    failed = 0
    for verdict in verdicts([Path(argument) for argument in arguments]):
        print(verdict, flush=True)
        failed += bool(verdict.fault)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
