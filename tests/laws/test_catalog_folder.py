"""A model folder is checked whole before anything of it is loaded, and loads as mlx-lm would load it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_dspark.catalog.checkpoint import UNBOUNDED_CONTEXT, Checkpoint, load_checkpoint
from mlx_dspark.catalog.formats import read_drafter
from mlx_dspark.catalog.inspecting import inspect_model
from mlx_dspark.catalog.integrity import content_hash, sha256_of
from mlx_dspark.catalog.progress import LoadProgress
from mlx_dspark.catalog.resolve import resolve_drafter, resolve_model
from mlx_dspark.foundation.errors import (
    BadCheckpoint,
    LoadError,
    NotAModel,
    RemoteCodeRefused,
    UnsupportedModel,
)
from mlx_dspark.targets.footprint import state_bytes
from tests.tiny import save_tiny
from tests.tiny_drafters import save_tiny_dflash, save_tiny_dspark
from tests.tiny_gguf import save_tiny_gguf
from tests.tiny_packagings import weights_of

PROMPT = mx.array([[5, 9, 120, 300, 7, 7, 44]])


def load(folder: Path, *, trust_remote_code: bool = False) -> Checkpoint:
    ref = resolve_model(
        str(folder), cache_dir=folder.parent, offline=True, trust_remote_code=trust_remote_code
    )
    return load_checkpoint(ref)


def edit(folder: Path, name: str, **changes: Any) -> None:
    """Set fields of a JSON file; None removes a field."""
    path = folder / name
    merged = (json.loads(path.read_text()) if path.exists() else {}) | changes
    path.write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"family": "qwen3"},
        {"bits": 4},
        {"bits": 8, "tie_word_embeddings": True},
        {"dtype": mx.bfloat16},
        {"dtype": mx.float16, "bits": 4},
    ],
)
def test_a_folder_loads_as_in_mlx_lm(tmp_path: Path, form: dict[str, Any]) -> None:
    folder = save_tiny(tmp_path / "model", **form)
    checkpoint = load(folder)
    stock = mlx_lm.load(str(folder))[0]
    assert mx.array_equal(checkpoint.model(PROMPT), stock(PROMPT)).item()
    ours, theirs = (
        cast(dict[str, mx.array], tree_flatten(model.parameters(), destination={}))
        for model in (checkpoint.model, stock)
    )
    assert {name: array.dtype for name, array in ours.items()} == {
        name: array.dtype for name, array in theirs.items()
    }
    assert checkpoint.context == 512
    assert checkpoint.tokenizer.has_chat_template


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, {"eos_token_id": [0, 2]}, {0, 2}),
        ({"eos_token_id": [5, 2]}, {"eos_token_id": 7}, {2, 5, 7}),
        ({"eos_token_id": None}, {"eos_token_id": None}, {2}),
    ],
)
def test_every_end_of_sequence_id_counts(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any], expected: set[int]
) -> None:
    folder = save_tiny(tmp_path / "model")
    edit(folder, "config.json", **config)
    edit(folder, "generation_config.json", **generation)
    checkpoint = load(folder)
    assert checkpoint.eos_token_ids == expected == checkpoint.tokenizer.eos_token_ids


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 77}, 77),
        ({"max_position_embeddings": None, "text_config": {"max_position_embeddings": 99}}, 99),
        ({"max_position_embeddings": None}, UNBOUNDED_CONTEXT),
    ],
)
def test_the_context_is_the_declared_one(tmp_path: Path, config: dict[str, Any], expected: int) -> None:
    folder = save_tiny(tmp_path / "model")
    edit(folder, "config.json", **config)
    assert load(folder).context == expected


def test_the_content_hash_follows_the_content_and_not_the_name(tmp_path: Path) -> None:
    first = load(save_tiny(tmp_path / "a", seed=1)).content_hash
    assert load(save_tiny(tmp_path / "b", seed=1)).content_hash == first
    assert load(save_tiny(tmp_path / "c", seed=2)).content_hash != first
    assert load(save_tiny(tmp_path / "d", seed=1, rope_theta=5e5)).content_hash != first


def test_a_single_file_is_named_by_its_content(tmp_path: Path) -> None:
    save_tiny_gguf(tmp_path / "one.gguf")
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(tmp_path / "one.gguf", tmp_path / "elsewhere" / "other.gguf")
    first, second = (
        load_checkpoint(resolve_model(str(path), cache_dir=tmp_path)).content_hash
        for path in (tmp_path / "one.gguf", tmp_path / "elsewhere" / "other.gguf")
    )
    assert first == second == sha256_of(tmp_path / "one.gguf")


@pytest.mark.parametrize("at", [0, 4096, 777_777, 1_499_999])
def test_every_byte_counts_in_a_content_hash(tmp_path: Path, at: int) -> None:
    content = bytearray(np.random.default_rng(0).bytes(1_500_000))
    for name in "ab":
        (tmp_path / name).write_bytes(content)
    content[at] ^= 1
    (tmp_path / "changed").write_bytes(content)
    alone, twin, changed = (tmp_path / name for name in ("a", "b", "changed"))
    assert content_hash([alone]) == content_hash([twin]) != content_hash([changed])
    assert content_hash([alone, changed]) == content_hash([changed, twin]) != content_hash([alone, twin])


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    seen: list[LoadProgress] = []
    ref = resolve_model(str(save_tiny(tmp_path / "model")), cache_dir=tmp_path, offline=True)
    load_checkpoint(ref, progress=seen.append)
    fractions = [step.fraction for step in seen if step.fraction is not None]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


# Bad input ------------------------------------------------------------------------------------------------


def cut(name: str, keep: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


def append(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + data)


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def change(name: str, **fields: Any) -> Callable[[Path], object]:
    return lambda folder: edit(folder, name, **fields)


def edit_raw(**fields: Any) -> Callable[[Path], object]:
    """As `change`, but None is written as null."""

    def write_null(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return write_null


def rename_a_tensor(folder: Path) -> None:
    weights = weights_of(folder)
    weights["model.layers.0.other.weight"] = weights.pop("model.layers.0.mlp.up_proj.weight")
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

BAD = {
    "no config": (remove("config.json"), BadCheckpoint, "has no config.json. It holds chat_template.jinja"),
    "config cut short": (cut("config.json", 40), BadCheckpoint, "config.json is not valid JSON"),
    "config not text": (append("config.json", b"\xff"), BadCheckpoint, "config.json is not valid JSON"),
    "config a list": (write("config.json", "[1]"), BadCheckpoint, "holds a JSON list"),
    "no model type": (change("config.json", model_type=None), BadCheckpoint, "names no model_type"),
    "unknown model type": (change("config.json", model_type="bert"), UnsupportedModel, "model_type 'bert'"),
    "helper as model type": (
        change("config.json", model_type="cache"),
        UnsupportedModel,
        "model_type 'cache'",
    ),
    "path as model type": (change("config.json", model_type="../x"), UnsupportedModel, "model_type '../x'"),
    "no weights": (remove(WEIGHTS), BadCheckpoint, "has no model*.safetensors"),
    "weights cut short": (cut(WEIGHTS, -4), BadCheckpoint, f"{WEIGHTS} is cut short"),
    "header cut short": (cut(WEIGHTS, 100), BadCheckpoint, f"{WEIGHTS} is cut short"),
    "empty weights": (cut(WEIGHTS, 0), BadCheckpoint, f"{WEIGHTS} is cut short"),
    "padded weights": (append(WEIGHTS, b"\0"), BadCheckpoint, f"{WEIGHTS} is longer than its header says"),
    "damaged header": (
        write(WEIGHTS, "\x04\0\0\0\0\0\0\0nope"),
        BadCheckpoint,
        f"{WEIGHTS} has a damaged safetensors header",
    ),
    "large file pointer": (write(WEIGHTS, "version https://git-lfs\n"), BadCheckpoint, "Git LFS pointer"),
    "absent shard": (
        write(INDEX, json.dumps({"weight_map": {"a": "model-00002-of-00002.safetensors"}})),
        BadCheckpoint,
        "lacks model-00002-of-00002.safetensors",
    ),
    "index without map": (write(INDEX, "{}"), BadCheckpoint, f"{INDEX} has no weight_map"),
    "no tokenizer": (remove("tokenizer.json"), BadCheckpoint, "has no tokenizer"),
    "damaged tokenizer": (write("tokenizer.json", "{}"), BadCheckpoint, "cannot be loaded"),
    "tokenizer of no kind": (
        write("tokenizer.json", '{"added_tokens": [], "model": {}}'),
        BadCheckpoint,
        "The tokenizer of",
    ),
    "another tokenizer": (write("tokenizer.json", '{"x": 1}'), BadCheckpoint, "it has no 'added_tokens'"),
    "words in the config that the tokenizer reads": (
        change("config.json", initializer_range="small"),
        BadCheckpoint,
        "config.json cannot be loaded: Validation error for field 'initializer_range': TypeError: Field",
    ),
    "tokenizer not JSON": (write("tokenizer.json", "{"), BadCheckpoint, "cannot be loaded"),
    "weights of another size": (
        change("config.json", hidden_size=96),
        BadCheckpoint,
        "is of shape (384, 64), and its config.json asks for (384, 96). Check hidden_size",
    ),
    "weights of fewer layers": (
        change("config.json", num_hidden_layers=3),
        BadCheckpoint,
        "says 3 for num_hidden_layers, and the weights have 2 layers",
    ),
    "weights of more layers": (
        change("config.json", num_hidden_layers=1),
        BadCheckpoint,
        "says 1 for num_hidden_layers, and the weights have 2 layers",
    ),
    "null hidden size": (edit_raw(hidden_size=None), BadCheckpoint, "says null for hidden_size"),
    "null heads": (edit_raw(num_attention_heads=None), BadCheckpoint, "says null for num_attention_heads"),
    "missing hidden size": (change("config.json", hidden_size=None), BadCheckpoint, "lacks hidden_size"),
    "words for eps": (change("config.json", rms_norm_eps="small"), BadCheckpoint, "'small' for rms_norm_eps"),
    "words for rope": (change("config.json", rope_scaling="yarn"), BadCheckpoint, "'yarn' for rope_scaling"),
    "words for quantization": (change("config.json", quantization="4bit"), BadCheckpoint, "'4bit'"),
    "quantization without group": (
        change("config.json", quantization={"bits": 4}),
        BadCheckpoint,
        "quantization in",
    ),
    "other names": (rename_a_tensor, BadCheckpoint, "unexpected model.layers.0.other.weight"),
    "a drafter without model type": (
        lambda folder: edit(folder, "config.json", model_type=None, speculators_model_type="dspark"),
        NotAModel,
        "is a drafter and no model. Name it with --drafter",
    ),
    "missing field": (change("config.json", rms_norm_eps=None), BadCheckpoint, "rms_norm_eps"),
    "a number for architectures": (
        change("config.json", architectures=5),
        BadCheckpoint,
        "says 5 for architectures",
    ),
    "a word for architectures": (
        change("config.json", architectures="LlamaForCausalLM"),
        BadCheckpoint,
        'says "LlamaForCausalLM" for architectures, where a list belongs',
    ),
    "damaged generation config": (
        write("generation_config.json", "{"),
        BadCheckpoint,
        "generation_config.json is not valid JSON",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_refused_by_name_with_a_next_step(tmp_path: Path, case: str) -> None:
    damage, kind, message = BAD[case]
    folder = save_tiny(tmp_path / "model")
    damage(folder)
    with pytest.raises(LoadError, match=re.escape(message)) as refusal:
        load(folder)
    assert type(refusal.value) is kind
    assert refusal.value.next_step
    assert "\n" not in str(refusal.value)


def test_an_empty_folder_is_refused_with_an_example(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadCheckpoint, match="It holds nothing") as refusal:
        load(tmp_path / "empty")
    assert "mlx-dspark export" in refusal.value.next_step


def test_a_folder_of_gguf_files_leads_to_one_of_them(tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    for name in ("m.gguf", "other.GGUF"):
        (tmp_path / "packed" / name).write_bytes(b"GGUF")
    with pytest.raises(BadCheckpoint, match="has no config") as refusal:
        load(tmp_path / "packed")
    assert str(tmp_path / "packed" / "m.gguf") in refusal.value.next_step


def test_a_config_that_is_a_folder_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").mkdir(parents=True)
    with pytest.raises(BadCheckpoint, match=r"config.json is a folder"):
        load(tmp_path / "model")


@pytest.mark.parametrize("read", [load, read_drafter, lambda folder: resolve_drafter(str(folder))])
def test_a_folder_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object]
) -> None:
    folder, stat = save_tiny(tmp_path / "locked"), Path.stat

    def refusing(path: Path, **options: Any) -> Any:
        if path.is_relative_to(folder) and (path != folder or read is not load):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refusing)
    with pytest.raises(BadCheckpoint, match=r"locked.* cannot be read: Permission denied") as refusal:
        read(folder)
    assert refusal.value.next_step


CODE = "import mlx.nn as nn\nraise SystemExit('the folder ran code')\n"


@pytest.mark.parametrize(
    "carry",
    [
        change("config.json", model_file="model.py"),
        change("config.json", auto_map={"AutoModel": "modeling.Model"}),
        change("tokenizer_config.json", auto_map={"AutoTokenizer": ["tok.Tokenizer", None]}),
        write("model.py", CODE),
        lambda folder: ((folder / "deep").mkdir(), (folder / "deep" / "x.py").write_text(CODE)),
    ],
)
def test_code_in_a_folder_is_refused(tmp_path: Path, carry: Callable[[Path], object]) -> None:
    folder = save_tiny(tmp_path / "model")
    carry(folder)
    with pytest.raises(RemoteCodeRefused, match="carries Python code") as refusal:
        load(folder)
    assert "--trust-remote-code" in refusal.value.next_step


def test_trusted_code_runs(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    edit(folder, "config.json", model_file="model.py", model_type="mine")
    (folder / "model.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n")
    trusted = load(folder, trust_remote_code=True)
    plain = load(save_tiny(tmp_path / "plain"))
    assert np.array_equal(np.array(trusted.model(PROMPT)), np.array(plain.model(PROMPT)))


@pytest.mark.parametrize("layers", [1025, 10**9])
@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layers"])
def test_a_number_of_layers_beyond_all_models_is_refused_before_anything_is_built(
    tmp_path: Path, key: str, layers: int
) -> None:
    folder = save_tiny(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {key: layers}
    (folder / "config.json").write_text(json.dumps(config))
    ref = resolve_model(str(folder), cache_dir=tmp_path)
    with pytest.raises(BadCheckpoint, match=f"{key} .* outside 1 to 1024"):
        load_checkpoint(ref)
    assert not inspect_model(ref, (), lambda _: None).live
    assert state_bytes(config, dtype=mx.float16) is None


@pytest.mark.parametrize("save", [save_tiny_dspark, save_tiny_dflash])
def test_a_drafter_named_as_a_model_is_told_to_be_one(tmp_path: Path, save: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModel, match=r"is a drafter and no model.*--drafter"):
        load(save(tmp_path / "head"))
