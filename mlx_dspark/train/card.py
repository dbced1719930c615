"""The model card beside a drafter: what it was made for, from what, and what it reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_dspark.train.evaluate import Accepted, Evaluation
from mlx_dspark.train.progress import TrainFinished
from mlx_dspark.train.start import Base, Start

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
    """What the card tells. `sources` are answers by where their prompts came from; `base` is the drafter
    that was trained further, if any."""

    target: str
    target_hash: str
    start: Start
    settings: Mapping[str, Any]
    sequences: int
    sources: Mapping[str, int]
    base: Base | None
    finished: TrainFinished
    evaluation: Evaluation | None


def model_card(facts: Facts) -> str:
    """Markdown."""
    checkpoint, config = facts.start.checkpoint, facts.start.config
    parameters = sum(weight.size for weight in checkpoint.weights.values())
    shape = [(key, _shown(config[key])) for key in _SHOWN if key in config]
    shape += [("own embedding", _shown(checkpoint.config.own_embedding))]
    shape += [("own head", _shown(checkpoint.config.own_head))]
    parts = [
        f"# DSpark drafter for {facts.target}",
        f"Drafts for `{facts.target}` and for no other model. {parameters / 1e6:.1f} M parameters, in "
        "DeepSpec's layout. Output under it is the target's own; only the speed depends on the drafter.",
        f"```\nmlx-dspark generate --model {facts.target} --drafter FOLDER\n```",
        f"Content hash of the target: `{facts.target_hash}`",
        "## Made from",
        f"{_count(facts.sequences, 'answer')} of the target itself, as token ids, to prompts of:",
        _table(("source", "answers"), [(name, str(n)) for name, n in sorted(facts.sources.items())]),
        *_begun_with(facts.base),
        f"Trained for {_count(facts.finished.step, 'step')} in {facts.finished.seconds:.0f} s with "
        "`mlx-dspark train`.",
        _table(("setting", "value"), [(name, _shown(value)) for name, value in facts.settings.items()]),
        "## Shape",
        _table(("key", "value"), shape),
    ]
    if facts.evaluation is not None:
        parts += _measured(facts.evaluation)
    return "\n\n".join(parts) + "\n"


def _begun_with(base: Base | None) -> list[str]:
    if base is None:
        return []
    return [f"Begun with the weights of `{base.name}`" + (f" ({base.card})." if base.card else ".")]


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


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
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
