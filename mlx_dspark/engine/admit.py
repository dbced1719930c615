"""From a request to a batch of rows: what is refused, and what a new row starts with."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_dspark.contracts import Drafter, Target, TargetSpec
from mlx_dspark.engine.drafting import Drafting
from mlx_dspark.engine.loop import Batch
from mlx_dspark.engine.row import Row
from mlx_dspark.engine.sampling import check_sampling
from mlx_dspark.foundation.caps import CapPolicy
from mlx_dspark.foundation.errors import ContextOverflow, RequestError
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.nn.noise import RowNoise


def check_request(request: GenerateRequest, spec: TargetSpec) -> None:
    """Raises RequestError or ContextOverflow when the request cannot run on this target."""
    if len(request.prompt) >= spec.context:
        raise ContextOverflow(len(request.prompt), spec.context)
    strangers = [token for token in request.prompt if not 0 <= token < spec.vocab]
    if strangers:
        raise RequestError(
            f"The prompt holds the token id {strangers[0]}; the model's ids end at {spec.vocab - 1}.",
            "Use the model's own tokenizer.",
            field="prompt",
        )
    check_sampling(request.sampling, spec.vocab)


def new_batch(
    target: Target,
    drafter: Drafter | None,
    cap: CapPolicy,
    requests: Sequence[tuple[int, GenerateRequest]],
    *,
    rectangle: bool = False,
) -> Batch:
    """Rows of these requests, none of them read yet; each comes with the index that its events name."""
    spec, n = target.spec, len(requests)
    rows = []
    for index, request in requests:
        limit = min(request.max_new_tokens, spec.context - len(request.prompt))
        rows.append(Row(request, cap.row(), limit, spec.vocab, index))
    drafting = Drafting(drafter, n) if drafter is not None else None
    states = target.new_rows(n, rectangle=rectangle)
    noise = RowNoise.of_seeds([request.sampling.seed for _, request in requests])
    return Batch(rows, states, drafting, noise)


def read_again(target: Target, drafter: Drafter | None, row: Row) -> Batch:
    """A batch of one row under way, whose tokens are to be read from the first on."""
    drafting = Drafting(drafter) if drafter is not None else None
    return Batch([row], target.new_rows(), drafting, RowNoise.of_seeds([row.request.sampling.seed]))
