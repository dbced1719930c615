"""Commands end to end on a tiny model: what is printed where, and what every bad input says."""

from __future__ import annotations

import io
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import ConcatenateKVCache

from mlx_dspark.cli.chat import Talk
from mlx_dspark.cli.main import run
from mlx_dspark.cli.show import Progress, closing_line
from mlx_dspark.foundation.events import EngineEvent
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.foundation.settings import GenerateSettings
from mlx_dspark.foundation.source import Source
from mlx_dspark.session import Result, Session
from mlx_dspark.session.overlong import overlong
from tests.laws.test_text_session import ScriptedEngine
from tests.tiny import CONTEXT, save_tiny, tiny_tokenizer

Cli = Callable[..., "Outcome"]


@dataclass
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def model(home: Path) -> Path:
    return save_tiny(home / "tiny")


@pytest.fixture
def cli(home: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command line in process; `{model}` stands for the tiny model's folder."""
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(home / "cache"))

    def invoke(*arguments: str, stdin: str = "") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = run([each.replace("{model}", str(model)) for each in arguments])
        shown = capsys.readouterr()
        return Outcome(code, shown.out, shown.err)

    return invoke


ASK = ("--model", "{model}", "--prompt", "the people and the time", "--max-new-tokens", "12")


def test_text_on_stdout_everything_else_on_stderr(cli: Cli) -> None:
    done = cli("generate", *ASK)
    assert done.code == 0
    assert done.out.endswith("\n")
    assert "tokens in" not in done.out
    closing = done.err.splitlines()[-1]
    for part in ("12 tokens in", "s (length)", "prompt", "decode", "accept length", "rounds", "lookup"):
        assert part in closing
    assert "reading tiny" in done.err
    assert "\x1b" not in done.err + done.out


def test_the_flat_form_is_generate(cli: Cli) -> None:
    assert cli(*ASK).out == cli("generate", *ASK).out


def test_no_stream_prints_the_same_text(cli: Cli) -> None:
    assert cli(*ASK, "--no-stream").out == cli(*ASK).out


@pytest.mark.parametrize("mode", ["auto", "lookup", "baseline"])
@pytest.mark.parametrize("max_draft", [None, "auto", "0", "full", "3"])
def test_every_mode_and_cap_writes_the_same_tokens(cli: Cli, mode: str, max_draft: str | None) -> None:
    if mode == "baseline" and max_draft is not None:
        assert cli(*ASK, "--mode", mode, "--max-draft", max_draft).code == 2
        return
    extra = () if max_draft is None else ("--max-draft", max_draft)
    plain = json.loads(cli(*ASK, "--json", "--mode", "baseline").out)
    assert json.loads(cli(*ASK, "--json", "--mode", mode, *extra).out)["token_ids"] == plain["token_ids"]


JSON_FIELDS = {
    "model", "weights", "text", "token_ids", "num_tokens", "num_rounds", "prefill_rounds", "parked_rounds",
    "accept_lengths", "mean_accept_len", "drafted", "accepted", "finish_reason", "prefill_seconds",
    "ttft_seconds", "decode_tokens_per_sec", "tokens_per_sec", "prefill_tokens_per_sec", "prompt_tokens",
    "reused_tokens", "seconds", "mode", "context_full", "cap", "caps", "logprobs", "sources", "troubles",
    "predicted_speedup", "observed_speedup", "kernels",
}  # fmt: skip


def test_json_is_one_object_with_every_field(cli: Cli) -> None:
    done = cli(*ASK, "--json", "--logprobs", "2")
    answer = json.loads(done.out)
    assert set(answer) == JSON_FIELDS
    assert done.out.count("\n") == 1
    assert answer["num_tokens"] == len(answer["token_ids"]) == len(answer["logprobs"]) == 12
    assert [entry["token"] for entry in answer["logprobs"]] == answer["token_ids"]
    assert answer["mode"] == "lookup"
    assert answer["weights"].keys() == {"choice", "reason", "timings"}


def test_a_start_says_how_weights_are_held_in_few_words(cli: Cli) -> None:
    said = cli(*ASK).err.splitlines()[-2]
    assert said.startswith("tiny · drafting: lookup · weights: ")
    assert said.split("weights: ")[1] in ("blocks", "dense", "stock")


def test_a_cache_that_cannot_be_written_only_forgets(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "a file").write_text("")
    expected = cli(*ASK).out
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(home / "a file" / "cache"))
    done = cli(*ASK)
    assert (done.code, done.out) == (0, expected)
    assert "measured, not remembered: " in done.err
    assert "cpu-weights.json cannot be written" in done.err


def test_a_full_context_is_told_from_the_token_limit(cli: Cli) -> None:
    endless = (*ASK[:-1], "99999999999999999999")
    done = cli(*endless)
    assert "(context full)" in done.err
    answer = json.loads(cli(*endless, "--json").out)
    assert answer["prompt_tokens"] + answer["num_tokens"] == CONTEXT
    assert (answer["finish_reason"], answer["context_full"]) == ("length", True)
    assert json.loads(cli(*ASK, "--json").out)["context_full"] is False


def test_states_that_cannot_be_taken_back_are_refused_before_weights_are_read(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny(tmp_path / "joined")
    monkeypatch.setattr(llama.Model, "make_cache", lambda self: [ConcatenateKVCache() for _ in self.layers])
    monkeypatch.setattr(
        "mlx_dspark.catalog.checkpoint._evaluate", lambda *_: pytest.fail("weights were read")
    )
    done = cli("--model", str(folder), "--prompt", "hi")
    _refused(done, "ConcatenateKVCache")
    assert "such as a Llama" not in done.err


@pytest.mark.parametrize("count", [1, 2, 10])
def test_token_limits_are_exact(cli: Cli, count: int) -> None:
    arguments = (
        "--model",
        "{model}",
        "--prompt",
        "the the the the",
        "--max-new-tokens",
        str(count),
        "--json",
    )
    assert json.loads(cli(*arguments).out)["num_tokens"] == count


def test_a_prompt_of_one_token(cli: Cli) -> None:
    arguments = (
        "--model",
        "{model}",
        "--prompt",
        "a",
        "--no-chat-template",
        "--max-new-tokens",
        "3",
        "--json",
    )
    answer = json.loads(cli(*arguments).out)
    assert (answer["prompt_tokens"], answer["num_tokens"]) == (1, 3)


def test_the_prompt_comes_from_stdin(cli: Cli) -> None:
    from_stdin = cli("--model", "{model}", "--prompt", "-", "--max-new-tokens", "12", stdin=ASK[3])
    assert from_stdin.out == cli(*ASK).out


def test_a_seed_repeats_its_text(cli: Cli) -> None:
    drawn = [cli(*ASK, "--temperature", "1", "--seed", seed).out for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_stop_string_is_not_shown(cli: Cli) -> None:
    text = cli(*ASK).out.rstrip("\n")
    stop = text[5:8]
    done = cli(*ASK, "--stop", stop)
    assert done.out == text[: text.index(stop)] + "\n"
    assert "(stop)" in done.err


def test_a_model_without_template_continues_raw_text(cli: Cli, home: Path, model: Path) -> None:
    bare = _without_template(save_tiny(home / "bare"))
    arguments = ("--prompt", "the people", "--max-new-tokens", "5")
    done = cli("--model", str(bare), *arguments)
    assert "no chat template" in done.err
    assert done.out == cli("--model", "{model}", "--no-chat-template", *arguments).out
    refused = cli("chat", "--model", str(bare))
    assert (refused.code, "no chat template" in refused.err) == (2, True)


def test_a_long_prompt_shows_progress(cli: Cli, home: Path) -> None:
    longer = save_tiny(home / "longer", max_position_embeddings=2048)
    done = cli("--model", str(longer), "--prompt", "the people " * 150, "--max-new-tokens", "2")
    assert done.code == 0
    assert "reading the prompt" in done.err


def test_export_writes_a_folder_with_the_same_answer(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert cli("export", "{model}", str(folder)).code == 0
    assert cli("--model", str(folder), *ASK[2:]).out == cli(*ASK).out
    again = cli("export", "{model}", str(folder))
    assert (again.code, str(folder) in again.err) == (2, True)
    assert "reading" not in again.err


def test_the_command_that_export_prints_works(cli: Cli, tmp_path: Path) -> None:
    said = cli("export", "{model}", str(tmp_path / "it's here")).err
    command = shlex.split(said.strip().rpartition("reads it: ")[2])
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_demo_answers_and_compares(cli: Cli, home: Path) -> None:
    done = cli("demo", "--model", "{model}")
    assert done.code == 0
    assert done.out.strip()
    assert "baseline" in done.err
    assert "lookup" in done.err
    assert "same tokens" in done.err


# Bad input ---------------------------------------------------------------------------------------


def _without_template(folder: Path) -> Path:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _truncated(folder: Path) -> Path:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


def _with_code(folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text()) | {"model_file": "mine.py"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("raise SystemExit('ran')\n")
    return folder


def _without_config(folder: Path) -> Path:
    (folder / "config.json").unlink()
    return folder


def _with_broken_template(folder: Path) -> Path:
    _without_template(folder)
    (folder / "chat_template.jinja").write_text("hello\n{% for %}\n")
    return folder


def _of_unknown_kind(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "toaster", "vocab_size": 3}))
    return folder


BROKEN = {
    "truncated weights": (_truncated, "model.safetensors"),
    "python code": (_with_code, "--trust-remote-code"),
    "no config": (_without_config, "config.json"),
    "unknown architecture": (_of_unknown_kind, "toaster"),
}


@pytest.mark.parametrize("kind", sorted(BROKEN))
@pytest.mark.parametrize("command", [["--prompt", "hi", "--model"], ["export"]])
def test_broken_models_are_refused(cli: Cli, tmp_path: Path, kind: str, command: list[str]) -> None:
    break_, named = BROKEN[kind]
    folder = break_(save_tiny(tmp_path / "broken"))
    extra = [str(tmp_path / "out")] if command == ["export"] else []
    _refused(cli(*command, str(folder), *extra), named)


def test_a_broken_template_is_named(cli: Cli, tmp_path: Path) -> None:
    folder = _with_broken_template(save_tiny(tmp_path / "broken"))
    _refused(cli("--model", str(folder), "--prompt", "hi"), "chat_template.jinja is not valid Jinja: line 2")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "no/such/folder/at-all", "--prompt", "x"], "no/such/folder/at-all"),
        (
            ["--model", "{model}", "--drafter", "{model}", "--prompt", "x"],
            "tiny is a language model (LlamaForCausalLM), not a drafter.",
        ),
        (
            ["--model", "{model}", "--drafter", "./no-such-drafter", "--prompt", "x"],
            "There is no drafter './no-such-drafter'",
        ),
        (["--model", "{model}", "--drafter", "shipped:none", "--prompt", "x"], "'shipped:none'"),
        (["--model", "{model}", "--prompt", "the people " * CONTEXT], "context"),
        (["--model", "{model}", "--prompt", "   "], "empty"),
        (["--model", "{model}", "--prompt", "-"], "prompt"),
        (["--model", "{model}", "--prompt", "x", "--logit-bias", "999999=1"], "--logit-bias"),
        (["--model", "{model}", "--prompt", "x", "--cpu-weights", "granite"], "granite"),
        (["--model", "{model}", "--prompt", "x", "--no-chat-template", "--system", "y"], "--system"),
        (["--model", "{model}", "--prompt", "\udcff"], "UTF-8"),
    ],
    ids=lambda value: " ".join(value)[-30:].encode("ascii", "replace").decode(),
)
def test_bad_requests_are_refused(cli: Cli, arguments: list[str], named: str) -> None:
    _refused(cli(*arguments), named)


def _refused(done: Outcome, named: str) -> None:
    assert done.code == 2
    assert done.out == ""
    last = done.err.splitlines()[-1]
    assert last.startswith("mlx-dspark: ")
    assert named in last
    assert "Traceback" not in done.err


# As a program ------------------------------------------------------------------------------------


def _program(*arguments: str, home: Path, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MLX_DSPARK_CACHE_DIR": str(home / "cache"), "COLUMNS": "120"}
    command = [sys.executable, "-m", "mlx_dspark", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, **options)  # type: ignore[call-overload]


def test_python_m_is_the_same_program(cli: Cli, home: Path, model: Path) -> None:
    done = _program("--model", str(model), *ASK[2:], home=home)
    assert (done.returncode, done.stdout) == (0, cli(*ASK).out)


def test_errors_of_the_program_have_no_traceback(home: Path) -> None:
    done = _program("--model", "no-such-model", "--prompt", "x", home=home)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no-such-model" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_pipe_is_quiet(home: Path, model: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    environment = {**os.environ, "MLX_DSPARK_CACHE_DIR": str(home / "cache")}
    command = [sys.executable, "-m", "mlx_dspark", "--model", str(model), "--prompt", "hi"]
    done = subprocess.run(
        command, stdout=write_end, stderr=subprocess.PIPE, text=True, env=environment, timeout=120
    )
    os.close(write_end)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


class Terminal:
    """A program on a pseudo-terminal, read until something is shown."""

    def __init__(self, *arguments: str, home: Path) -> None:
        environment = {**os.environ, "MLX_DSPARK_CACHE_DIR": str(home / "cache"), "TERM": "dumb"}
        main, side = pty.openpty()
        self._main = main
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlx_dspark", *arguments],
            stdin=side,
            stdout=side,
            stderr=side,
            env=environment,
            start_new_session=True,
            close_fds=True,
        )
        os.close(side)
        os.set_blocking(main, False)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def wait_for(self, text: str, seconds: float = 60.0) -> str:
        """What was shown up to `text`, taken off what is waiting to be read."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < deadline, f"no {text!r} in {self.shown!r}"
            self._read()
        before, _, self.shown = self.shown.partition(text)
        return before

    def close(self) -> int:
        try:
            return self.process.wait(timeout=30)
        finally:
            self.process.kill()
            os.close(self._main)

    def _read(self) -> None:
        try:
            self.shown += os.read(self._main, 65536).decode(errors="replace")
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:
            assert self.process.poll() is None, f"the program ended: {self.shown!r}"


def test_chat_on_a_terminal(home: Path) -> None:
    folder = save_tiny(home / "chatty", max_position_embeddings=100_000)
    terminal = Terminal("chat", "--model", str(folder), "--max-new-tokens", "20000", home=home)
    terminal.wait_for("> ")
    terminal.type("tell me more\n")
    terminal.wait_for("tell me more")
    time.sleep(1.0)
    terminal.interrupt()
    terminal.wait_for("(cancelled)")
    terminal.wait_for("> ")
    terminal.type("/stats\n")
    assert "(cancelled)" in terminal.wait_for("1 answer ")
    terminal.wait_for("> ")
    terminal.interrupt()
    terminal.wait_for("Ctrl-D or /quit leaves")
    terminal.type("/resett\n")
    terminal.wait_for("Did you mean /reset?")
    terminal.wait_for("> ")
    terminal.type("/reset\n")
    terminal.wait_for("forgotten")
    terminal.type("/help\n")
    terminal.wait_for("/stats ")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.close() == 0


def test_chat_remembers_turns_and_survives_a_refused_one(cli: Cli) -> None:
    script = "hi\nagain\n" + "the people " * CONTEXT + "\n/stats\n/reset\nhi\n/quit\nnever read\n"
    done = cli("chat", "--model", "{model}", "--max-new-tokens", "6", stdin=script)
    assert done.code == 0
    lines = [line for line in done.err.splitlines() if line.startswith("[")]
    assert len(lines) == 3
    prompts = [int(line.split("prompt ")[1].split()[0]) for line in lines]
    assert prompts[1] > prompts[0] == prompts[2]
    assert "context" in done.err
    assert done.err.count("2 answers") == 1


class InterruptedEngine(ScriptedEngine):
    """Ctrl-C comes while its second run is being decided; keeps the prompts it was asked."""

    prompts: list[tuple[int, ...]]

    def _events(self, request: GenerateRequest) -> Iterator[EngineEvent]:
        self.prompts = [*getattr(self, "prompts", []), request.prompt]
        for count, event in enumerate(super()._events(request)):
            if count == 3 and len(self.prompts) == 1:
                signal.raise_signal(signal.SIGINT)
            yield event


def test_what_was_said_before_ctrl_c_stays_in_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tiny_tokenizer()
    runs = [tokenizer.encode(text, add_special_tokens=False) for text in ("one", " two", " three")]
    engine = InterruptedEngine(runs)
    session = Session(engine, tokenizer, end_ids={2}, mode="lookup")
    monkeypatch.setattr(sys, "stdin", io.StringIO("count\ngo on\n"))
    Talk(session, GenerateSettings(), Progress()).run()
    assert capsys.readouterr().out == "one two\none two three\n"
    second = tokenizer.decode(engine.prompts[1])
    assert (
        "user\ncount<|im_end|>\n<|im_start|>assistant\none two<|im_end|>\n<|im_start|>user\ngo on" in second
    )


def test_an_interrupted_answer_exits_with_130(home: Path) -> None:
    folder = save_tiny(home / "endless", max_position_embeddings=100_000)
    terminal = Terminal("--model", str(folder), "--prompt", "hi", "--max-new-tokens", "50000", home=home)
    terminal.wait_for("drafting: lookup")
    time.sleep(1.0)
    terminal.interrupt()
    assert terminal.close() == 130
    assert "Traceback" not in terminal.shown


# Progress and closing line -----------------------------------------------------------------------


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_redraws_on_a_terminal_and_is_plain_elsewhere() -> None:
    terminal, plain = FakeTerminal(), io.StringIO()
    for stream in (terminal, plain):
        progress = Progress(stream)
        progress.tell("reading", 0.0)
        progress.tell("reading", 0.5)
        progress.clear()
    assert terminal.getvalue() == "\r\x1b[Kreading   0%\r\x1b[Kreading  50%\r\x1b[K"
    assert plain.getvalue() == "reading\n"


def test_the_closing_line_of_nothing() -> None:
    line = closing_line(Result.fold([], mode="baseline"))
    assert line.startswith("[0 tokens in 0.00 s (cancelled)")
    assert "accept length -" in line
    assert "decode" not in line


@pytest.mark.parametrize(
    ("caps", "told"),
    [({0: 2, 5: 4}, "· cap 5 ·"), ({0: 9, 5: 4, 6: 1}, "· cap 5, from 5 to 6 ·")],
)
def test_the_closing_line_tells_the_usual_cap_and_the_range(caps: dict[int, int], told: str) -> None:
    result = replace(Result.fold([], mode="lookup"), drafted=9, caps=caps)
    assert told in closing_line(result)


@pytest.mark.parametrize("bits", [None, "8"])
def test_the_first_line_says_how_keys_and_values_are_held(
    cli: Cli, home: Path, bits: str | None, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "wide", head_dim=64)
    words = ("--model", str(folder), *ASK[2:], *(("--kv-bits", bits) if bits else ()))
    done = cli("generate", *words)
    assert done.code == 0
    assert ("keys and values: 8 bits" in done.err) == (bits is not None)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("pin", "said"), [("99", 1), ("64", 0)])
def test_a_cap_that_no_drafter_reaches_is_told_once(cli: Cli, pin: str, said: int) -> None:
    done = cli("generate", *ASK, "--max-draft", pin)
    assert done.code == 0
    assert done.err.count("lookup drafts at most 64") == said


def test_a_cap_is_measured_against_the_drafter_that_always_drafts() -> None:
    sources = (Source("lookup", 64, sporadic=True), Source("dspark", 7))
    assert "the drafter's block is 7" in overlong(8, sources)
    assert not any(overlong(fine, sources) for fine in (None, "auto", 0, 7))
    assert not overlong(8, ())


def test_the_closing_line_counts_in_words() -> None:
    tokenizer = tiny_tokenizer()
    session = Session(ScriptedEngine([[5], [6, 7]]), tokenizer, end_ids={2}, mode="lookup")
    one, three = session.generate("hi", max_new_tokens=1), session.generate("hi")
    rounds = ScriptedEngine([[5], [6, 7], [8], [9]])
    longer = Session(rounds, tokenizer, end_ids={2}, mode="lookup").generate("hi")
    assert closing_line(one).startswith("[1 token in 1.00 s")
    assert "· accept length - · 1 round, 1 for the prompt · lookup drafted nothing]" in closing_line(one)
    assert closing_line(three).startswith("[3 tokens in 2.00 s")
    assert "· accept length 2.00 · 2 rounds, 1 for the prompt" in closing_line(three)
    assert all("decode" not in closing_line(short) for short in (one, three))
    assert f"· decode {longer.decode_tokens_per_sec:.1f} tok/s · accept length" in closing_line(longer)
    assert closing_line(three).endswith("lookup 1/1 draft accepted]")
