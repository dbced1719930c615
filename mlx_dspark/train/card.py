"""The model card beside a drafter: what it was made for, from what, and what it reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_dspark.train.evaluate import Accepted, Evaluation
from mlx_dspark.train.progress import TrainFinished

_SHOWN = (
    "num_hidden_layers",
    "block_size",
    "target_layer_ids",
    "markov_head_type",
    "markov_rank",
    "enable_confidence_head",
    "draft_vocab_size",
)


@dataclass(frozen=True)
class Facts:
    """What the card tells. `sources` name where prompts came from."""

    target: str
    parameters: int
    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    sequences: int
    sources: Sequence[str]
    finished: TrainFinished
    evaluation: Evaluation | None


def model_card(facts: Facts) -> str:
    """Markdown."""
    parts = [
        f"# DSpark drafter for {facts.target}",
        f"Drafts for `{facts.target}` and for no other model. {facts.parameters / 1e6:.1f} M parameters, in "
        "DeepSpec's layout. Output under it is the target's own; only the speed depends on the drafter.",
        f"```\nmlx-dspark generate --model {facts.target} --drafter FOLDER\n```",
        "## Made from",
        f"{facts.sequences} answers of the target itself, as token ids. Prompts: "
        + ("; ".join(facts.sources) or "unknown")
        + ".",
        f"Trained for {facts.finished.step} steps in {facts.finished.seconds:.0f} s with `mlx-dspark train`.",
        _table(("setting", "value"), [(name, _shown(value)) for name, value in facts.settings.items()]),
        "## Shape",
        _table(("key", "value"), [(k, _shown(facts.config[k])) for k in _SHOWN if k in facts.config]),
    ]
    if facts.evaluation is not None:
        parts += _measured(facts.evaluation)
    return "\n\n".join(parts) + "\n"


def _measured(evaluation: Evaluation) -> list[str]:
    parts = [
        "## Measured",
        "Held-out prompts, whole blocks. Accept length is the tokens a round commits, the target's own "
        "included; the columns give the share of rounds that accepted at least so many drafts.",
        _acceptance(evaluation.accepted),
        evaluation.verdict,
    ]
    for calibration in evaluation.calibrations:
        rows = [
            (f"{bucket.confidence:.2f}", f"{bucket.accepted:.2f}", str(bucket.drafts))
            for bucket in calibration.buckets
            if bucket.drafts
        ]
        parts += [
            f"At temperature {calibration.temperature:g}, confidence is off by {calibration.error:.3f}:",
            _table(("mean confidence", "accepted", "drafts"), rows),
        ]
    return parts


def _acceptance(accepted: Sequence[Accepted]) -> str:
    width = max((len(each.reached) for each in accepted), default=0)
    rows = [
        (
            each.content,
            f"{each.temperature:g}",
            str(each.prompts),
            f"{each.length:.2f}",
            *(f"{share:.2f}" for share in each.reached),
        )
        for each in accepted
    ]
    heads = ("content", "temperature", "prompts", "accept length", *(str(i + 1) for i in range(width)))
    return _table(heads, rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
