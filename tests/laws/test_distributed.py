"""A target whose parts several processes hold answers what one process answers.

The tie rule: the sums over the parts are made in another order than in one process, so texts may differ where
the best two logits are closer than the rounding of the model's number format. These models are float32 and
no two logits of these texts are that close, so their texts are equal.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import mlx_dspark
from mlx_dspark.cli.chat import stop_on_interrupt
from mlx_dspark.cli.main import run
from mlx_dspark.distributed.link import loss_explained
from mlx_dspark.engine.engine import Engine
from mlx_dspark.engine.follow import Follower
from mlx_dspark.foundation.errors import RanksLost, RequestError, UnsupportedModel
from mlx_dspark.foundation.ranks import launched_rank
from mlx_dspark.session import Session
from mlx_dspark.targets.load import refuse_config, target_of
from mlx_dspark.targets.split import split
from tests.rank_worker import Case, answers
from tests.ranks import launch
from tests.tiny import save_tiny, tiny_config, tiny_model, tiny_tokenizer
from tests.tiny_drafters import save_tiny_dspark
from tests.tiny_gguf import save_tiny_gguf
from tests.tiny_hybrids import hybrid_config, tiny_hybrid

PROMPTS = ["the quick brown", "one two one two one two one two one"]
GREEDY = {"max_new_tokens": 8}
SEEDED = GREEDY | {"temperature": 0.8, "top_p": 0.95, "seed": 11}

CASES: dict[str, Case] = {
    "plain": {"load": {"model": "llama", "mode": "baseline"}, "ask": GREEDY},
    "message of two parts": {"load": {"model": "llama"}, "prompts": ["the quick " * 60], "ask": GREEDY},
    "lookup": {"load": {"model": "llama", "mode": "lookup", "max_draft": 4}, "ask": GREEDY},
    "quantized, seeded": {"load": {"model": "qwen3-q8", "max_draft": 3}, "ask": SEEDED},
    "drafter": {"load": {"model": "llama", "drafter": "drafter", "max_draft": 3}, "ask": GREEDY},
    "drafter, seeded, confident": {
        "load": {"model": "llama", "drafter": "drafter", "max_draft": 5, "confidence_threshold": 0.45},
        "ask": SEEDED,
    },
    "borrowed head, live caps": {
        "load": {"model": "qwen3_5", "drafter": "headless", "max_draft": "auto"},
        "ask": GREEDY,
    },
    "GGUF": {"load": {"model": "packed.gguf", "max_draft": 3}, "ask": GREEDY},
    "windows, experts, sinks": {"load": {"model": "gpt_oss", "mode": "baseline"}, "ask": GREEDY},
    "few bits for keys": {
        "load": {"model": "wide-heads", "kv_bits": 8, "max_draft": 3},
        "ask": GREEDY | {"repetition_penalty": 1.3, "stop": ["h"]},
    },
    "threads": {"load": {"model": "llama", "max_batch": 2, "max_draft": 2}, "ask": SEEDED, "how": "threads"},
    "threads, in a rectangle": {
        "load": {"model": "llama", "max_batch": 3, "max_draft": 2},
        "ask": SEEDED,
        "prompts": [*PROMPTS, "three four three four"],
        "how": "threads",
        "layout": ["company", "company"],
    },
    "after a cancelled answer": {"load": {"model": "llama"}, "ask": GREEDY, "how": "cancelled first"},
    "after an interrupted answer": {"load": {"model": "llama"}, "ask": GREEDY, "how": "interrupted first"},
}

DRAWN: dict[str, Case] = {
    "drawn": {
        "load": {"model": "llama", "drafter": "drafter", "max_draft": 3},
        "ask": GREEDY | {"temperature": 1.0},
    }
}
"""Without a seed, so one process draws other tokens."""

TROUBLES: dict[str, tuple[Case, str, str]] = {
    "heads": ({"load": {"model": "9-heads"}}, "UnsupportedModel", "9 attention heads, 3 key-value heads"),
    "groups": (
        {"load": {"model": "groups"}},
        "UnsupportedModel",
        "a feed-forward width of 96 in quantization",
    ),
    "family": ({"load": {"model": "gemma3"}}, "UnsupportedModel", "gemma3_text"),
    "rank 1 has no model": (
        {"load": {"model": "llama"}, "load on others": {"model": "nowhere/at all/none"}},
        "LoadError",
        "Rank 1 cannot load what was asked for: There is no model",
    ),
    "rank 1 has another model": (
        {"load": {"model": "llama"}, "load on others": {"model": "qwen3-q8"}},
        "LoadError",
        "Rank 1 has another model config than rank 0",
    ),
    "rank 1 lays out rows otherwise": (
        {"load": {"model": "llama"}, "layout": ["company", "list"]},
        "LoadError",
        "Rank 1 has another layout of rows than rank 0",
    ),
    "weights": (
        {"load": {"model": "llama", "cpu_weights": "dense"}},
        "UsageError",
        "weights that 2 processes share",
    ),
    "kernels": (
        {"load": {"model": "llama", "small_m": True}},
        "UsageError",
        "a model that 2 processes share has no such kernel",
    ),
}
"""By name: the case, the error that rank 0 has, and a part of its sentence."""

DEATH: Case = {"load": {"model": "llama"}, "ask": GREEDY, "dies in round": 4}


def _located(case: Case, home: Path) -> Case:
    def located(load: dict[str, Any]) -> dict[str, Any]:
        names = {key: str(home / name) for key, name in load.items() if key in ("model", "drafter")}
        return load | {key: path for key, path in names.items() if Path(path).exists()}

    placed = case | {"load": located(case["load"])}
    if "load on others" in case:
        placed["load on others"] = located(case["load on others"])
    return placed | {"prompts": case.get("prompts", PROMPTS)}


def _save_models(home: Path) -> None:
    save_tiny(home / "llama")
    save_tiny(home / "qwen3-q8", "qwen3", bits=8)
    save_tiny(home / "gpt_oss", "gpt_oss")
    save_tiny_gguf(home / "packed.gguf", intermediate_size=128)
    save_tiny(home / "wide-heads", "qwen2", head_dim=64, hidden_size=256)
    save_tiny(home / "gemma3", "gemma3_text")
    save_tiny(home / "9-heads", num_attention_heads=9, num_key_value_heads=3, hidden_size=144)
    save_tiny(home / "groups", bits=8, intermediate_size=96)
    save_tiny_dspark(home / "drafter")
    _save_hybrid(home / "qwen3_5")
    layers = hybrid_config("qwen3_5")["num_hidden_layers"]
    save_tiny_dspark(home / "headless", own_head=False, own_embedding=False, target_layers=layers)


def _save_hybrid(folder: Path) -> None:
    folder.mkdir()
    weights: Any = dict(tree_flatten(tiny_hybrid("qwen3_5").parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(hybrid_config("qwen3_5")))
    tiny_tokenizer().save_pretrained(folder)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("ranks")
    _save_models(home)
    return home


@pytest.fixture(scope="module")
def said(home: Path) -> Path:
    """The folder of what two ranks said to every case, all in one launch."""
    cases = CASES | DRAWN | {name: case for name, (case, _, _) in TROUBLES.items()}
    placed = {name: _located(case, home) for name, case in (cases | {"death": DEATH}).items()}
    (home / "cases.json").write_text(json.dumps(placed))
    (home / "said").mkdir()
    launched = launch(["-m", "tests.rank_worker", str(home / "cases.json"), str(home / "said")], home)
    (home / "said" / "log").write_text(launched.out + launched.err)
    return home / "said"


def _of_rank(said: Path, name: str, rank: int) -> Any:
    file = said / f"{name}.{rank}.json"
    assert file.exists(), (said / "log").read_text()
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", CASES)
def test_two_processes_answer_what_one_does(
    name: str, said: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(home / "cache"))
    case = _located(CASES[name], home)
    with mlx_dspark.load(**case["load"], cpu_weights="stock") as alone:
        assert _of_rank(said, name, 0) == answers(alone, case | {"how": CASES[name].get("how", "")})


@pytest.mark.parametrize("name", CASES | DRAWN)
def test_every_rank_decides_the_same(name: str, said: Path) -> None:
    followed = _of_rank(said, name, 1)
    assert followed["rounds"] > 1
    assert followed["differed"] == 0


@pytest.mark.parametrize("name", TROUBLES)
def test_trouble_is_told_once_by_rank_0(name: str, said: Path) -> None:
    _, error, sentence = TROUBLES[name]
    told = _of_rank(said, name, 0)
    assert told["error"] == error
    assert sentence in told["says"]
    assert _of_rank(said, name, 1)["error"] == "FailedElsewhere"


def test_a_rank_that_dies_ends_the_run(said: Path) -> None:
    """`launch` raises when the run does not end. Rank 0 says so itself, unless mlx.launch was quicker."""
    assert "Node with rank 1 exited with code -9" in (said / "log").read_text()
    assert not (said / "death.1.json").exists()
    if (said / "death.0.json").exists():
        assert _of_rank(said, "death", 0)["error"] == "RanksLost"


def test_only_rank_0_asks() -> None:
    engine = Follower(None, SimpleNamespace(rank=1, size=2))  # type: ignore[arg-type]
    session = Session(engine, tiny_tokenizer(), end_ids=(), mode="baseline")
    with pytest.raises(RequestError, match="rank 1 of 2, and only rank 0 asks"):
        session.generate("Hi!")


def test_rank_0_follows_nobody() -> None:
    session = Session(
        Engine(target_of(tiny_model(tiny_config()), tiny_config())),
        tiny_tokenizer(),
        end_ids=(),
        mode="baseline",
    )
    assert session.rank == 0
    with pytest.raises(RequestError, match="follows nobody"):
        session.follow()


@pytest.mark.parametrize("back_end", ["ring", "jaccl", "nccl", "mpi"])
def test_a_lost_connection_is_told_from_other_errors(back_end: str) -> None:
    with pytest.raises(RanksLost, match="connection to a peer was lost"), loss_explained():
        raise RuntimeError(f"[{back_end}] connection to a peer was lost")
    with pytest.raises(RuntimeError, match="out of memory"), loss_explained():
        raise RuntimeError("out of memory")


def test_a_launched_command_writes_one_answer(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(home / "cache"))
    line = ["generate", "--model", str(home / "llama"), "--drafter", str(home / "drafter")]
    line += ["--prompt", "the quick brown", "--max-new-tokens", "6", "--max-draft", "3"]
    launched = launch(["-m", "mlx_dspark", *line], home)
    assert run([*line, "--cpu-weights", "stock"]) == 0
    alone = capsys.readouterr()
    assert launched.out == alone.out
    assert "shared by 2 processes" in launched.err
    assert "rank 1" not in launched.err
    assert len(launched.err.splitlines()) == len(alone.err.splitlines())


@pytest.mark.parametrize("variable", ["MLX_RANK", "OMPI_COMM_WORLD_RANK"])
@pytest.mark.parametrize("command", [["demo"], ["export", "a", "b"], ["train", "--output", "a"]])
def test_other_commands_run_in_one_process(
    variable: str,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, "1")
    assert run(command) == 2
    assert f"mlx-dspark (rank 1): {command[0]} runs in one process" in capsys.readouterr().err


def test_input_without_an_end_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_RANK", "0")
    assert run(["generate", "--prompt", "-"]) == 2
    assert "mlx.launch passes standard input on without its end" in capsys.readouterr().err


def test_ctrl_c_leaves_a_launched_chat_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_RANK", "0")
    with stop_on_interrupt() as stopped:
        assert not stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_an_ordinary_process_has_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_RANK", raising=False)
    assert launched_rank() is None
    monkeypatch.setenv("MLX_RANK", "none")
    assert launched_rank() is None


@pytest.mark.parametrize(
    ("overrides", "ranks", "numbers", "advice"),
    [
        (
            {"num_attention_heads": 9, "num_key_value_heads": 3},
            2,
            "9 attention heads, 3 key-value",
            "-n 3 or",
        ),
        ({"num_key_value_heads": 1}, 2, "1 key-value heads", "-n 1."),
        ({"num_attention_heads": 8, "num_key_value_heads": 4}, 3, "8 attention heads, 4", "-n 2 or -n 4 or"),
        (
            {"num_attention_heads": 8, "head_dim": 12, "quantization": {"group_size": 64, "bits": 4}},
            2,
            "an attention width of 96 in",
            "-n 1.",
        ),
        ({"intermediate_size": 127}, 2, "a feed-forward width of 127", "-n 1."),
        (
            {"quantization": {"group_size": 64, "bits": 4}},
            2,
            "width of 64 in quantization groups of 64",
            "-n 1.",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_numbers(
    overrides: dict[str, Any], ranks: int, numbers: str, advice: str
) -> None:
    config = tiny_config("llama", intermediate_size=144, head_dim=16) | overrides
    with pytest.raises(UnsupportedModel) as refused:
        refuse_config(config, ranks=ranks)
    assert numbers in refused.value.sentence
    assert advice in refused.value.next_step


class _Group:
    """Rank 1 of 2, of whom nobody asks anything but that."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_part_is_half_of_what_is_split(family: str) -> None:
    config = tiny_config(family)
    model: Any = tiny_model(config)
    whole: Any = dict(tree_flatten(model.parameters()))
    split(model, config, _Group())  # type: ignore[arg-type]
    parts: Any = tree_flatten(model.parameters())
    for name, part in parts:
        cut = any(word in name for word in ("self_attn.", "mlp.")) and "_norm" not in name
        cut = cut and not name.endswith(("o_proj.bias", "down_proj.bias"))
        assert part.size * (2 if cut else 1) == whole[name].size, name
