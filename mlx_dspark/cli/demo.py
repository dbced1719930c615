"""`demo`: one prompt answered before your eyes, then plain against speculative decoding on it."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

from mlx_dspark.cli.ranks import refuse_ranks
from mlx_dspark.cli.show import Progress, accept_length, closing_line, note, printing
from mlx_dspark.cli.streams import require_output
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.settings import LoadSettings

if TYPE_CHECKING:
    from mlx_dspark.session import Result

TASK = "Write a Python function that says whether a number is prime, and explain each line of it."

COPYING = (
    "Proofread this paragraph and give it back whole:\n\n"
    "The lighthouse keeper climbed the stairs every evening to light the lamp. From the top of the tower he "
    "could see the harbour, the fishing boats and the long grey line of the sea. When the fog came in, he "
    "rang the bell until the last of the fishing boats was safe in the harbour."
)
"""For lookup, which drafts only text that repeats."""

REPEATS = 2
WARM_UP_TOKENS = 16


def demo(loading: LoadSettings) -> int:
    """Answer a prompt, then race plain against speculative decoding on it."""
    from mlx_dspark.session.calibrate import calibrated
    from mlx_dspark.session.pair import load_parts

    refuse_ranks("demo")
    if loading.mode == "baseline":
        raise UsageError(
            "mode is 'baseline', and the demo compares that with a mode that drafts.",
            "Leave it out, or choose another mode.",
            field="mode",
        )
    require_output()
    progress = Progress()
    parts = calibrated(load_parts(loading, progress), loading.calibrate, progress)
    speculative = parts.session(own_thread=False)
    plain = dataclasses.replace(parts, drafter=None, mode="baseline").session(own_thread=False)
    costs = str(parts.calibration or "")
    prompt = COPYING if parts.mode == "lookup" else TASK
    progress.tell("warming up")
    plain.generate(prompt, max_new_tokens=WARM_UP_TOKENS)
    speculative.generate(prompt)
    progress.clear()
    weights = f" · {parts.weights}" if parts.weights is not None else ""
    note(f"{parts.name}{weights}" + (f"\n{costs}" if costs else "") + f"\n\n{prompt}\n")
    shown = progress.reading(speculative.stream(prompt))
    note(closing_line(speculative.fold(printing(shown, sys.stdout))))
    progress.tell(f"answering it {REPEATS} more times each way, by turns")
    runs = [(plain.generate(prompt), speculative.generate(prompt)) for _ in range(REPEATS)]
    progress.clear()
    _compare([_fastest(results) for results in zip(*runs, strict=True)])
    return 0


def _fastest(results: tuple[Result, ...]) -> Result:
    return max(results, key=lambda result: result.decode_tokens_per_sec)


def _compare(results: list[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    plain, speculative = results
    table = Table("mode", "decode tok/s", "against plain", "accept length", "rounds")
    for result in results:
        rate, unit = result.decode_tokens_per_sec, plain.decode_tokens_per_sec
        table.add_row(
            result.mode,
            f"{rate:.1f}",
            f"{rate / unit:.2f}x" if unit else "",
            accept_length(result.accept_lengths),
            str(result.num_rounds),
        )
    Console(stderr=True).print(table)
    note(f"The table shows the faster of {REPEATS} runs each way, so it may be ahead of the answer above.")
    same = plain.token_ids == speculative.token_ids
    note("Both wrote the same tokens." if same else "The two texts differ where two tokens are all but tied.")
    if speculative.mode == "lookup":
        note("Lookup drafts text that repeats, as here; on text that does not, it steps aside.")
