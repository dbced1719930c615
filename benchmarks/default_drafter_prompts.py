"""Prompts for training the default model's drafter, from openly licensed records and packages.

    python benchmarks/default_drafter_prompts.py FOLDER > prompts.jsonl

FOLDER holds JSONL files whose records have `kind` and either `prompt` (math, reasoning), `reference` and
`doc` (code: a Python function with its docstring), or `text` (prose); and wheels, whose functions with
docstrings become records of code. A fixed seed shuffles the output.
"""

from __future__ import annotations

import ast
import json
import random
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEPS = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TASK = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n\n```"
)
READING = (
    "Explain the following text in simple words:\n\n{}",
    "Summarize this:\n\n{}",
    "{}\n\nWhat are the main points of this text?",
    "Rewrite the following text so that it is easier to read.\n\n{}",
    "Continue this text:\n\n{}",
)


def header_of(source: str) -> str | None:
    """A function's signature and docstring."""
    try:
        (function,) = ast.parse(source).body
    except (SyntaxError, ValueError):
        return None
    if not isinstance(function, ast.FunctionDef) or ast.get_docstring(function) is None:
        return None
    end = function.body[0].end_lineno
    return "\n".join(source.splitlines()[:end])


def prompts_of(record: dict[str, Any], rng: random.Random) -> Iterator[str]:
    kind = record.get("kind")
    if kind == "code":
        sentence = " ".join(record["doc"].split()).split(". ")[0].rstrip(".")
        if 10 < len(sentence) < 200:
            yield f"Write a python function to {sentence[0].lower()}{sentence[1:]}."
        header = header_of(record["reference"])
        if header and len(header) < 1200:
            yield TASK.format(header)
        if len(record["reference"]) < 1200:
            yield rng.choice(
                ["Explain this code:\n```python\n{}\n```", "Add comments to this code:\n\n{}"]
            ).format(record["reference"])
    elif "prompt" in record:
        yield record["prompt"]
        if kind == "math":
            yield record["prompt"].split(" Give the result as")[0] + rng.choice([STEPS, ""])
    elif "text" in record:
        yield rng.choice(READING).format(record["text"][:1200])


def functions_of(wheel: Path) -> Iterator[dict[str, Any]]:
    """Records of a wheel's documented functions, tests left out."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".py") and "test" not in name:
                yield from _functions_in(archive.read(name).decode("utf-8", "replace"))


def _functions_in(source: str) -> Iterator[dict[str, Any]]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not node.decorator_list:
            doc = ast.get_docstring(node)
            text = ast.get_source_segment(source, node)
            if doc and text:
                yield {"kind": "code", "doc": doc, "reference": text}


def records_of(folder: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(folder.glob("*.jsonl")):
        yield from map(json.loads, file.read_text(encoding="utf-8").splitlines())
    for wheel in sorted(folder.glob("*.whl")):
        yield from functions_of(wheel)


def main() -> None:
    rng = random.Random(0)
    prompts = [prompt for record in records_of(Path(sys.argv[1])) for prompt in prompts_of(record, rng)]
    prompts = sorted(set(prompts))
    rng.shuffle(prompts)
    for prompt in prompts:
        print(json.dumps({"prompt": prompt}, ensure_ascii=False))


if __name__ == "__main__":
    main()
