"""Loading a resolved model: its weights in mlx-lm's own modules, its tokenizer, and when an answer ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub.errors import StrictDataclassError
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_model, load_tokenizer

from mlx_dspark.catalog.config_faults import check_numbers, fault_of
from mlx_dspark.catalog.folder import check_folder, read_config, read_json, weight_files
from mlx_dspark.catalog.gguf.file import open_gguf
from mlx_dspark.catalog.gguf.layouts import gguf_config
from mlx_dspark.catalog.gguf.model import build_model, load_weights
from mlx_dspark.catalog.gguf.tokenizer import gguf_tokenizer
from mlx_dspark.catalog.gguf.weights import Requantized, float_type
from mlx_dspark.catalog.integrity import content_fingerprint, content_hash
from mlx_dspark.catalog.progress import LoadProgress, Progress, silent
from mlx_dspark.catalog.resolve import ModelRef
from mlx_dspark.compat.tokenizer_length import without_length_warning
from mlx_dspark.compat.tokenizers_errors import tokenizer_errors
from mlx_dspark.foundation.errors import BadCheckpoint
from mlx_dspark.foundation.numbers import brief, is_whole

Accept = Callable[[nn.Module, dict[str, Any]], None]
UNBOUNDED_CONTEXT = 1 << 20
_EVAL_STEPS = 16


def fingerprint_of(ref: ModelRef) -> str:
    """The `fingerprint` of a model's checkpoint, without loading it. Raises BadCheckpoint."""
    if ref.packaging == "gguf":
        return content_fingerprint(open_gguf(ref.path).shards)
    read_config(ref.path)
    return content_fingerprint((ref.path / "config.json", *weight_files(ref.path)))


@dataclass(frozen=True)
class Checkpoint:
    """A model as stock mlx-lm would hold it, before any kernel is placed.

    `config` is its config.json, with the `quantization` section that its modules have; `context` is the most
    tokens prompt and answer may have together; `files` hold weights and config; `source` says where they came
    from; `requantized` reports what weights lost that MLX cannot hold as they are stored, None for none.
    """

    name: str
    path: Path
    config: dict[str, Any]
    model: nn.Module
    tokenizer: TokenizerWrapper
    eos_token_ids: frozenset[int]
    context: int
    files: tuple[Path, ...]
    source: str
    requantized: Requantized | None = None

    @cached_property
    def content_hash(self) -> str:
        """Names weights and config by their content alone; reads the files whole when first asked for."""
        return content_hash(self.files)

    @cached_property
    def fingerprint(self) -> str:
        """Tells the weights and config apart from others by samples of their content, in a moment."""
        return content_fingerprint(self.files)


def load_checkpoint(
    ref: ModelRef,
    *,
    progress: Progress = silent,
    accept: Accept | None = None,
    divide: Accept | None = None,
) -> Checkpoint:
    """Check and load a model.

    A folder keeps the number formats it is stored in; `catalog/gguf/blocks.py` says how those of a GGUF file
    are held, `catalog.gguf.weights.float_type` in which type its scales. `accept` sees the model and its
    config before the weights are read, and those of a GGUF file before its tokenizer is made, and may raise.
    `divide` drops what this process does not hold of it: of a folder before that is read, of a GGUF file
    afterwards. Raises BadCheckpoint, UnsupportedModel or RemoteCodeRefused.
    """
    progress(LoadProgress(f"reading {ref.name}", 0.0))
    if ref.packaging == "gguf":
        checkpoint = _load_gguf(ref, progress, accept)
    else:
        checkpoint = _load_folder(ref)
        if accept is not None:
            accept(checkpoint.model, checkpoint.config)
    if divide is not None:
        divide(checkpoint.model, checkpoint.config)
    if divide is not None or ref.packaging != "gguf":
        _evaluate(checkpoint.model, ref.name, progress)
    return checkpoint


def computes_on_cpu() -> bool:
    """Whether MLX's default device is the CPU."""
    return mx.default_device().type == mx.DeviceType.cpu


def _load_gguf(ref: ModelRef, progress: Progress, accept: Accept | None) -> Checkpoint:
    file = open_gguf(ref.path)
    config = gguf_config(file)
    model = build_model(file, config)
    if accept is not None:
        accept(model, config)
    context = int(config["max_position_embeddings"])
    tokenizer = without_length_warning(gguf_tokenizer(file, context))
    dtype = float_type(file.tensors.values(), on_cpu=computes_on_cpu())
    eos = frozenset(tokenizer.eos_token_ids)
    config |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": sorted(eos)}
    config |= {"pad_token_id": tokenizer.pad_token_id, "torch_dtype": str(dtype).removeprefix("mlx.core.")}
    requantized = load_weights(
        file,
        model,
        config,
        dtype,
        lambda fraction: progress(LoadProgress(f"reading {ref.name}", fraction)),
    )
    return Checkpoint(
        name=ref.name,
        path=ref.path,
        config=config,
        model=model,
        tokenizer=tokenizer,
        eos_token_ids=eos,
        context=context,
        files=file.shards,
        source=ref.source,
        requantized=requantized,
    )


def _load_folder(ref: ModelRef) -> Checkpoint:
    trust = ref.trust_remote_code
    stored = check_folder(ref.path, trust_remote_code=trust)
    declared = _declared_eos(ref.path, stored)
    model, config = stored_model(ref.path, stored, trust_remote_code=trust)
    config_file = str(ref.path / "config.json")
    with _blaming(f"The tokenizer of {ref.path}", config_file), tokenizer_errors():
        tokenizer = without_length_warning(
            load_tokenizer(ref.path, {"trust_remote_code": trust}, eos_token_ids=sorted(declared))
        )
    return Checkpoint(
        name=ref.name,
        path=ref.path,
        config=config,
        model=model,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        context=context_of(stored),
        files=(ref.path / "config.json", *weight_files(ref.path)),
        source=ref.source,
    )


def stored_model(
    path: Path, stored: dict[str, Any], *, trust_remote_code: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    """The model in a checked folder, none of its weights read yet, and its config as loading completes it.

    `stored` is its config.json. Raises BadCheckpoint naming a key or tensor, where these tell.
    """
    check_numbers(path, stored)
    with _blaming(f"The model in {path}"):
        try:
            return load_model(path, lazy=True, trust_remote_code=trust_remote_code)
        except _LOADER_FAULTS as error:
            fault = fault_of(path, stored, error)
            raise error if fault is None else fault from error


def _declared_eos(path: Path, config: dict[str, Any]) -> frozenset[int]:
    """The end-of-sequence ids of config.json and generation_config.json together."""
    generation = path / "generation_config.json"
    sections = {path / "config.json": config}
    if generation.is_file():
        sections[generation] = read_json(generation)
    ids: set[int] = set()
    for file, section in sections.items():
        value = section.get("eos_token_id")
        listed = [] if value is None else value if isinstance(value, list) else [value]
        if not all(map(is_whole, listed)):
            raise BadCheckpoint(
                f"eos_token_id in {file} is {brief(value)}, not an integer or a list of integers.",
                "Correct the file, or download it again.",
                field="eos_token_id",
            )
        ids.update(listed)
    return frozenset(ids)


def context_of(config: dict[str, Any]) -> int:
    """The declared context in tokens; recurrent models that declare none are taken as unbounded."""
    nested = config.get("text_config")
    for section in (config, nested if isinstance(nested, dict) else {}):
        for key in (
            "max_position_embeddings",
            "n_positions",
            "max_seq_len",
            "seq_length",
            "model_max_length",
        ):
            if isinstance(length := section.get(key), int) and length > 0:
                return length
    return UNBOUNDED_CONTEXT


_LOADER_FAULTS = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
    OSError,
    StrictDataclassError,
)
"""What mlx-lm, transformers and tokenizers raise about files that they cannot use."""


@contextmanager
def _blaming(part: str, config: str = "") -> Iterator[None]:
    """What a foreign loader raises of a folder's content becomes BadCheckpoint, naming `part`; or `config`,
    where it is a value in there."""
    try:
        yield
    except _LOADER_FAULTS as error:
        at_fault = config if config and isinstance(error, StrictDataclassError) else part
        raise BadCheckpoint(
            f"{at_fault} cannot be loaded: {_detail(error)}.",
            "Check that its config, weights and tokenizer belong together.",
        ) from error


def _detail(error: Exception) -> str:
    """What a foreign error says: its first line, and the second where the first only announces it."""
    if isinstance(error, KeyError) and len(error.args) == 1:
        return f"it has no {error.args[0]!r}"
    first, *more = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    told = f"{first} {more[0]}" if more and first.endswith(":") else first
    return told.rstrip(". :,") or "its loader failed"


def _evaluate(model: nn.Module, name: str, progress: Progress) -> None:
    """Bring all weights into memory, a slice at a time so that progress is real."""
    arrays = [array for _, array in tree_flatten(model.parameters())]
    for step in range(_EVAL_STEPS):
        mx.eval(arrays[step * len(arrays) // _EVAL_STEPS : (step + 1) * len(arrays) // _EVAL_STEPS])
        progress(LoadProgress(f"reading {name}", (step + 1) / _EVAL_STEPS))
