"""Stock mlx-lm as an arm: the same model, in a process of its own, by mlx-lm's own code."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from mlx_dspark.bench.arms import Answer, Measured
from mlx_dspark.bench.cases import Case
from mlx_dspark.bench.gap import PREFILL_CHUNK
from mlx_dspark.bench.stats import Work
from mlx_dspark.catalog.checkpoint import load_checkpoint
from mlx_dspark.catalog.export import export_model
from mlx_dspark.catalog.progress import Progress, silent
from mlx_dspark.catalog.resolve import resolve_model
from mlx_dspark.foundation.bench_settings import MLX_LM
from mlx_dspark.foundation.errors import LoadError
from mlx_dspark.foundation.paths import default_cache_dir
from mlx_dspark.foundation.settings import LoadSettings


class Stock:
    """The process of stock mlx-lm, over a model's folder and perhaps a draft model's.

    Raises LoadError with mlx-lm's own last words when it cannot load them, or ends. Ends with `close`.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._words = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mlx_dspark.bench.stock_worker", *map(str, folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
            start_new_session=True,
        )
        self._read()

    def ask(self, task: dict[str, Any]) -> dict[str, Any]:
        """One line to the process, and its answer."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
        return self._read()

    def generate(
        self,
        ids: Sequence[int],
        new: int,
        *,
        end_ids: Collection[int] = (),
        temperature: float = 0.0,
        seed: int = 0,
        kv_bits: int | None = None,
        draft: bool = False,
    ) -> dict[str, Any]:
        """What `stock_worker` answers; prompts are read in chunks of the length that this program has."""
        return self.ask(
            {
                "ids": list(ids),
                "new": new,
                "end_ids": sorted(end_ids),
                "temperature": temperature,
                "seed": seed,
                "chunk": PREFILL_CHUNK,
                "kv_bits": kv_bits,
                "draft": draft,
            }
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._words):
            with suppress(BrokenPipeError):
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._words.seek(0)
        said = [each.strip() for each in self._words.read().splitlines() if each.strip()]
        self.close()
        raise LoadError(
            f"The process of stock mlx-lm ended: {said[-1] if said else 'it said nothing'}.",
            "Leave --against out, or name a model that stock mlx-lm runs.",
            field="against",
        )


QUANTIZES_LATER = (
    "stock mlx-lm reads the first chunk of a prompt before it quantizes what it keeps of it, and here every "
    "token is quantized at once"
)


class StockArm:
    """Stock mlx-lm, alone or with its draft-model mode, on cases of one row."""

    def __init__(
        self, stock: Stock, settings: LoadSettings, end_ids: Collection[int], *, draft: bool
    ) -> None:
        self._stock = stock
        self._kv_bits = settings.kv_bits
        self._end_ids = end_ids
        self._draft = draft
        self.label = f"{MLX_LM} draft model" if draft else MLX_LM
        self.reason = "" if settings.kv_bits is None else QUANTIZES_LATER

    def takes(self, case: Case) -> bool:
        return case.rows == 1

    def answer(self, case: Case, seed: int) -> Measured:
        (prompt,) = case.prompts
        found = self._stock.generate(
            prompt,
            case.new,
            end_ids=self._end_ids,
            temperature=case.temperature,
            seed=seed,
            kv_bits=self._kv_bits,
            draft=self._draft,
        )
        tokens = tuple(found["tokens"])
        return Measured(
            answers=(Answer(tokens),),
            prefill=Work(len(prompt), found["prefill_seconds"]),
            first_token_seconds=found["prefill_seconds"],
            decode=Work(len(tokens) - 1, found["decode_seconds"]),
            peak_bytes=found["peak_bytes"],
            used_bytes=found["used_bytes"],
        )


def stock_folder(
    model: str | None, scratch: Path, *, trust_remote_code: bool = False, progress: Progress = silent
) -> Path:
    """A folder that stock mlx-lm can load: the model's own, or an export of it to `scratch`.

    Raises as `resolve_model` and `load_checkpoint` do.
    """
    found = resolve_model(
        model, cache_dir=default_cache_dir(), trust_remote_code=trust_remote_code, progress=progress
    )
    if found.packaging == "folder":
        return found.path
    return export_model(load_checkpoint(found, progress=progress), scratch / found.name)
