"""What a model folder must hold before anything of it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlx_dspark.catalog.gguf.names import model_name
from mlx_dspark.catalog.integrity import check_safetensors
from mlx_dspark.catalog.reading import reading
from mlx_dspark.compat.mlx_lm_models import knows_model_type
from mlx_dspark.foundation.errors import BadCheckpoint, NotAModel, RemoteCodeRefused, UnsupportedModel

_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), ("tiktoken.model",))
_FETCH_AGAIN = "Fetch or copy the model again."


def check_folder(path: Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """The parsed config.json of a complete, loadable model folder.

    Raises BadCheckpoint naming the missing or damaged file, RemoteCodeRefused when the folder carries Python
    code and `trust_remote_code` is false, UnsupportedModel when mlx-lm has no class for its model type.
    """
    with reading(path):
        return _checked(path, trust_remote_code)


def is_drafter_config(config: dict[str, Any]) -> bool:
    """Whether a config.json names taps, masks or a drafting method, as a drafter's does and no model's."""
    names = config.get("architectures")
    named = " ".join(map(str, names)) if isinstance(names, list) else ""
    marks = ("dflash_config", "speculators_config", "speculators_model_type", "target_layer_ids")
    return any(key in config for key in marks) or any(mark in named for mark in ("DSpark", "DFlash", "Eagle"))


def drafter_as_model(path: Path) -> NotAModel:
    """The error for a drafter that is named where a model belongs."""
    return NotAModel(
        f"{path} is a drafter and no model.",
        "Name it with --drafter, and with --model the model that it was made for.",
        field="model",
    )


def _checked(path: Path, trust_remote_code: bool) -> dict[str, Any]:
    config = read_config(path)
    if is_drafter_config(config):
        raise drafter_as_model(path)
    if not trust_remote_code:
        refuse_remote_code(path, config)
    if "model_file" not in config and not knows_model_type(config):
        raise UnsupportedModel(
            f"{path / 'config.json'} has model_type {config['model_type']!r}, which mlx-lm does not know.",
            "Choose a model that mlx-lm supports, or a newer mlx-lm.",
            field="model_type",
        )
    for shard in weight_files(path):
        check_safetensors(shard)
    if not any(all((path / name).is_file() for name in names) for names in _TOKENIZERS):
        raise BadCheckpoint(f"{path} has no tokenizer (tokenizer.json or tokenizer.model).", _FETCH_AGAIN)
    return config


def read_config(path: Path) -> dict[str, Any]:
    """config.json with a `model_type`. Raises BadCheckpoint, or UnsupportedModel for a drafter's."""
    with reading(path):
        if not (path / "config.json").is_file():
            raise _without_config(path)
    config = read_json(path / "config.json")
    if not isinstance(config.get("model_type"), str):
        if is_drafter_config(config):
            raise drafter_as_model(path)
        raise BadCheckpoint(
            f"{path / 'config.json'} names no model_type.", "Name the folder of a language model."
        )
    classes = config.get("architectures")
    if classes is not None and not isinstance(classes, list):
        raise BadCheckpoint(
            f"{path / 'config.json'} says {json.dumps(classes)[:80]} for architectures, "
            "where a list belongs.",
            'Write names of classes, as in ["LlamaForCausalLM"], or leave it out.',
            field="architectures",
        )
    return config


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises BadCheckpoint naming the file and the place where it stops making sense."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadCheckpoint(
            f"{path} cannot be read: {error.strerror}.", "Check the file and its rights."
        ) from error
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path} is not valid JSON: {error}.", _FETCH_AGAIN) from error
    if not isinstance(value, dict):
        raise BadCheckpoint(
            f"{path} holds a JSON {type(value).__name__} in place of an object.", _FETCH_AGAIN
        )
    return value


def weight_files(path: Path) -> list[Path]:
    """The shards that mlx-lm would load; raises BadCheckpoint for none, or an index that names others."""
    shards = sorted(path.glob("model*.safetensors"))
    index = path / "model.safetensors.index.json"
    if index.is_file():
        named = read_json(index).get("weight_map")
        if not isinstance(named, dict):
            raise BadCheckpoint(f"{index} has no weight_map.", _FETCH_AGAIN)
        absent = sorted({str(name) for name in named.values()} - {shard.name for shard in shards})
        if absent:
            raise BadCheckpoint(f"{path} lacks {', '.join(absent[:3])}, which its index names.", _FETCH_AGAIN)
    if not shards:
        raise BadCheckpoint(
            f"{path} has no model*.safetensors.",
            "Convert other weights with `mlx_lm.convert`.",
            seen=_contents(path),
        )
    return shards


def refuse_remote_code(path: Path, config: dict[str, Any]) -> None:
    """Raises RemoteCodeRefused when loading the folder could run code from it.

    mlx-lm executes the file that `model_file` names, transformers the modules that `auto_map` names in
    config.json or tokenizer_config.json; a stray *.py is refused too, since another file may run it.
    """
    reasons = [f"config.json sets {key}" for key in ("model_file", "auto_map") if key in config]
    tokenizer_config = path / "tokenizer_config.json"
    if tokenizer_config.is_file() and "auto_map" in read_json(tokenizer_config):
        reasons.append("tokenizer_config.json sets auto_map")
    reasons += [f"it holds {script.relative_to(path)}" for script in sorted(path.rglob("*.py"))[:1]]
    if reasons:
        raise RemoteCodeRefused(
            f"{path} carries Python code: {', '.join(reasons)}.",
            "Read the code, and pass --trust-remote-code if you trust it.",
            field="trust_remote_code",
        )


def packed_models(path: Path) -> list[Path]:
    """The GGUF models of a folder, sorted: the first part of a split one, and no image encoders (mmproj)."""
    found: dict[str, Path] = {}
    for file in sorted(path.glob("*.[gG][gG][uU][fF]")):
        if "mmproj" not in file.name.lower():
            found.setdefault(model_name(file), file)
    return list(found.values())


def _without_config(path: Path) -> BadCheckpoint:
    sentence, seen = f"{path} has no config.json.", ""
    if (path / "config.json").is_dir():
        sentence = f"{path / 'config.json'} is a folder, and should be a file."
    else:
        seen = _contents(path)
    return BadCheckpoint(
        sentence,
        "Name a folder with config.json, *.safetensors and a tokenizer, such as "
        "`mlx-dspark export smollm2-135m my-model` writes.",
        seen=seen,
        near=_packed(path),
    )


def _packed(path: Path) -> str:
    """What to name in place of a folder of GGUF files; empty for another."""
    packed = packed_models(path)
    if not packed:
        return ""
    return f"Name the file: {packed[0]}" if len(packed) == 1 else f"Name one file, such as {packed[0]}"


def _contents(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"It holds {', '.join(names[:5]) or 'nothing'}{more}."
