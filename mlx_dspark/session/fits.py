"""Whether a model, and who drafts for it, fit into this machine's memory, asked before they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlx_dspark.catalog.fit import Memory, Need, StateBytes, Verdict, gigabytes, verdict
from mlx_dspark.foundation.errors import OutOfMemory

if TYPE_CHECKING:
    from mlx_dspark.catalog.resolve import ModelRef
    from mlx_dspark.drafters.block import BlockDrafter
    from mlx_dspark.foundation.settings import LoadSettings

_CHUNK = 512
"""Tokens of a prompt that are fed at once."""
_FLOATS = 4
_WIDTHS = 8
"""Arrays as wide as the residual stream that a layer holds at once, and half as many as its inner one."""


def need_of(
    config: dict[str, Any],
    weights: int,
    *,
    dtype: str = "",
    kv_bits: int | None = None,
    rows: int = 1,
    drafter: BlockDrafter | None = None,
    window: int = 0,
) -> Need | None:
    """What a model of this config with so many bytes of weights asks for; None where that cannot be told.

    `dtype` names the type it computes in, where it is not the config's; `window` is the drafter's.
    """
    import mlx.core as mx

    from mlx_dspark.targets.footprint import state_bytes
    from mlx_dspark.targets.load import text_config

    settings = text_config(config)
    named = dtype or settings.get("torch_dtype") or settings.get("dtype")
    computed = getattr(mx, named, None) if isinstance(named, str) else None
    computed = computed if isinstance(computed, mx.Dtype) else mx.bfloat16
    states = state_bytes(config, dtype=computed, kv_bits=kv_bits)
    if states is None:
        return None
    heads = _whole(settings, "num_attention_heads")
    scores = heads * _CHUNK * _FLOATS if mx.default_device().type == mx.DeviceType.cpu else 0
    drafter_weights, drafter_states = (0, StateBytes()) if drafter is None else _drafter(drafter, window)
    return Need(
        weights=weights,
        states=states,
        drafter=drafter_weights,
        drafter_states=drafter_states,
        working=_working(settings, computed.size),
        working_per_token=scores,
        rows=rows,
    )


def declared_context(config: dict[str, Any]) -> int:
    """The model's context in tokens, as its config tells it."""
    from mlx_dspark.catalog.checkpoint import context_of

    return context_of(config)


def fit_of(config: dict[str, Any], weights: int, have: Memory | None, **asked: Any) -> Verdict | None:
    """Whether such a model fits into `have`; `asked` is as for `need_of`. None where that cannot be told.

    Of a model whose states cannot be told, the weights alone are known.
    """
    if have is None:
        return None
    return verdict(need_or_weights(config, weights, **asked), declared_context(config), have)


def need_or_weights(config: dict[str, Any], weights: int, **asked: Any) -> Need:
    """As `need_of`; of a model whose states cannot be told, the weights alone."""
    return need_of(config, weights, **asked) or Need(weights=weights, states=StateBytes())


def beside(need: Need, draft: Need) -> Need:
    """What a model needs together with a draft model: they compute by turns, and both remember each text."""
    return replace(
        need,
        drafter=need.drafter + draft.weights,
        drafter_states=need.drafter_states + draft.states,
        working=max(need.working, draft.working),
        working_per_token=max(need.working_per_token, draft.working_per_token),
    )


class MemoryGuard:
    """Refuses a model that needs more than this machine has, before its weights are fetched or read.

    It never refuses what it cannot tell. With several `ranks` each holds its share of the weights, and all of
    a draft model. `room` is the largest context that fits, of the model weighed last, 0 where that cannot be
    told.
    """

    def __init__(self, settings: LoadSettings, have: Memory | None, *, ranks: int = 1) -> None:
        self._settings = settings
        self._have = have if settings.memory_guard else None
        self._ranks = ranks
        self.room = 0

    def weigh(self, config: dict[str, Any], weights: int) -> None:
        """Raises OutOfMemory where a model of this config with so many bytes of weights does not fit."""
        self._weigh(config, weights)

    def weigh_found(
        self,
        found: ModelRef,
        config: dict[str, Any],
        drafter: BlockDrafter | None = None,
        draft_model: ModelRef | None = None,
    ) -> None:
        """As `weigh`, for a model on this machine with who drafts for it."""
        if self._have is None:
            return
        draft = None
        if draft_model is not None:
            draft_config, bytes_ = config_of(draft_model), stored_bytes(draft_model)
            draft = _draft_need(draft_config, bytes_, dtype_of(draft_model))
        self._weigh(config, stored_bytes(found), dtype=dtype_of(found), drafter=drafter, draft=draft)

    def weigh_draft_model(self, found: ModelRef) -> Callable[[dict[str, Any], int], None]:
        """Takes config and bytes of weights of a draft model that is to be fetched; raises OutOfMemory where
        it and the model do not fit together."""

        def weigh(config: dict[str, Any], weights: int) -> None:
            if self._have is not None:
                draft = _draft_need(config, weights)
                self._weigh(config_of(found), stored_bytes(found), dtype=dtype_of(found), draft=draft)

        return weigh

    def _weigh(
        self, config: dict[str, Any], weights: int, *, draft: Need | None = None, **asked: Any
    ) -> None:
        if self._have is None:
            return
        settings, share = self._settings, weights // self._ranks
        asked |= {"kv_bits": settings.kv_bits, "rows": settings.max_batch, "window": settings.drafter_window}
        need = need_of(config, share, **asked) or Need(weights=share, states=StateBytes())
        need = need if draft is None else beside(need, draft)
        found = verdict(need, declared_context(config), self._have)
        if not found.fits:
            raise out_of_memory(found, share, need.drafter)
        self.room = found.context


def _draft_need(config: dict[str, Any], weights: int, dtype: str = "") -> Need:
    """What a draft model asks for; of one whose states cannot be told, the weights alone are known."""
    return need_of(config, weights, dtype=dtype) or Need(weights=weights, states=StateBytes())


def out_of_memory(found: Verdict, weights: int, drafter: int = 0) -> OutOfMemory:
    """The refusal of a model, with its drafter, that does not fit: its numbers and what to do."""
    who, smaller = ("The model", "a smaller model or one in fewer bits")
    held = f"{gigabytes(weights)} of it for its weights"
    if drafter:
        who, smaller = "The model with its drafter", f"{smaller}, or a smaller drafter or none"
        held = f"{gigabytes(weights)} of it for the model's weights, {gigabytes(drafter)} for the drafter's"
    return OutOfMemory(
        f"{who} needs {gigabytes(found.smallest)} of memory, {held}, "
        f"and this machine has {gigabytes(found.have.bytes)} ({found.have.source}).",
        f"Choose {smaller}, close other programs, or try it with --no-memory-guard.",
        field="memory_guard",
    )


def stored_bytes(found: ModelRef) -> int:
    """Bytes of a model's weights on the disk. Raises BadCheckpoint."""
    from mlx_dspark.catalog.folder import weight_files
    from mlx_dspark.catalog.gguf.file import open_gguf
    from mlx_dspark.catalog.reading import reading

    with reading(found.path):
        files = open_gguf(found.path).shards if found.packaging == "gguf" else weight_files(found.path)
        return sum(file.stat().st_size for file in files)


def config_of(found: ModelRef) -> dict[str, Any]:
    """The config of a model on this machine. Raises BadCheckpoint or UnsupportedModel."""
    from mlx_dspark.catalog.config_faults import check_numbers
    from mlx_dspark.catalog.folder import read_config
    from mlx_dspark.catalog.gguf.file import open_gguf
    from mlx_dspark.catalog.gguf.layouts import gguf_config

    if found.packaging == "folder":
        config = read_config(found.path)
        check_numbers(found.path, config)
        return config
    return gguf_config(open_gguf(found.path))


def dtype_of(found: ModelRef) -> str:
    """The type that a GGUF file is computed in; empty for a folder, whose config tells."""
    from mlx_dspark.catalog.checkpoint import computes_on_cpu
    from mlx_dspark.catalog.gguf.file import open_gguf
    from mlx_dspark.catalog.gguf.weights import float_type

    if found.packaging == "folder":
        return ""
    dtype = float_type(open_gguf(found.path).tensors.values(), on_cpu=computes_on_cpu())
    return str(dtype).removeprefix("mlx.core.")


def _working(settings: dict[str, Any], width: int) -> int:
    """Bytes of a round's own arrays: a chunk of the prompt in one layer, and two rows of logits."""
    hidden, inner = _whole(settings, "hidden_size"), _whole(settings, "intermediate_size")
    return _CHUNK * width * (_WIDTHS * hidden + _WIDTHS // 2 * inner) + 2 * _FLOATS * _whole(
        settings, "vocab_size"
    )


def _whole(settings: dict[str, Any], name: str) -> int:
    value = settings.get(name)
    return value if isinstance(value, int) and value > 0 else 0


def _drafter(drafter: BlockDrafter, window: int) -> tuple[int, StateBytes]:
    """Bytes of a drafter's weights, and of what it remembers of a text."""
    from mlx.utils import tree_flatten

    config: Any = drafter.config
    arrays: Any = tree_flatten(drafter.model.parameters())
    weights = sum(array.nbytes for _, array in arrays)
    token = 2 * config.layers * config.kv_heads * config.head_dim * drafter.dtype.size
    return weights, StateBytes(windows=((token, window),)) if window else StateBytes(per_token=token)
