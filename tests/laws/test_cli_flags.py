"""Flags come from the declarations: help, environment, ranges, reference page, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlx_dspark.cli import reference
from mlx_dspark.cli.calibrate import _refuse_unused
from mlx_dspark.cli.flags import negative_of, with_flags
from mlx_dspark.cli.main import ONE_ANSWER, build_app, run
from mlx_dspark.foundation.bench_settings import BenchmarkSettings
from mlx_dspark.foundation.errors import RequestError, UsageError
from mlx_dspark.foundation.knobs import Knob, Number, Switch, Whole
from mlx_dspark.foundation.request import SamplingParams
from mlx_dspark.foundation.settings import CPU_WEIGHTS, AskSettings, GenerateSettings, LoadSettings
from mlx_dspark.session import Result
from mlx_dspark.session.pair import drafting_mode

SECTIONS = (LoadSettings, GenerateSettings, AskSettings)
KNOBS = [knob for section in SECTIONS for knob in section.knobs()]
FLAGS = [knob for knob in KNOBS if knob.name != ONE_ANSWER]
COMMANDS = (
    *("benchmark", "calibrate", "chat", "claude", "demo", "doctor", "export", "generate"),
    *("inspect", "kernels", "models", "opencode", "pi", "pull", "race", "rm", "serve", "train"),
)
WITHOUT_MODEL = (
    *("claude", "doctor", "export", "inspect", "models", "opencode", "pi", "pull", "rm", "train"),
)
"""The commands that load no model as the settings say."""


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for knob in KNOBS:
        if knob.env:
            monkeypatch.delenv(knob.env, raising=False)


def _given(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """What `generate` would be called with."""
    import mlx_dspark.cli.generate as module

    got: list[tuple[Any, ...]] = []

    def generate(*sections: Any) -> int:
        got.append(sections)
        return 0

    monkeypatch.setattr(module, "generate", generate)
    assert run(arguments) == 0
    return got[0]


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.name)
def test_every_knob_says_what_it_does_and_takes_its_default(knob: Knob) -> None:
    assert knob.about.help.endswith((".", "off"))
    assert knob.kind.want
    assert knob.kind.accepts(knob.default)
    assert knob.shown_default


def test_knob_names_are_unique() -> None:
    assert len({knob.name for knob in KNOBS}) == len(KNOBS)


def test_top_level_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        assert run(arguments) == 0
        shown = capsys.readouterr().out
        assert all(command in shown for command in COMMANDS)
    assert {name for name in build_app() if not name.startswith("-")} == set(COMMANDS)


def test_command_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--help"]) == 0
    shown = capsys.readouterr().out
    for knob in FLAGS:
        assert knob.flag in shown
        assert negative_of(knob) in shown
    assert "--max-batch" not in shown
    assert run(["chat", "--help"]) == 0
    assert "--no-stream" not in capsys.readouterr().out


def test_flat_help_is_that_of_generate(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--prompt", "hi", "--help"]) == 0
    assert "--max-new-tokens" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from mlx_dspark import __version__

    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"mlx-dspark {__version__}\n"


def test_reference_page_is_fresh() -> None:
    written = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
    assert written.read_text() == reference.page(), (
        "run: python -m mlx_dspark.cli.reference > docs/reference/cli.md"
    )
    assert all(f"`{knob.flag}`" in reference.page() for knob in FLAGS)
    assert all(f"mlx-dspark {command}" in reference.page() for command in COMMANDS)


REFUSED = [
    (["generat"], "generate"),
    (["--promt", "hi"], "--prompt"),
    (["generate", "--max-new-token", "3"], "--max-new-tokens"),
    (["chat", "--systm", "x"], "--system"),
    (["--mode", "dsprk"], "dspark"),
    (["generate", "word"], "word"),
    (["--max-draft", "-1"], "--max-draft"),
    (["--max-draft", "many"], "--max-draft"),
    (["--max-new-tokens", "0"], "--max-new-tokens"),
    (["--max-new-tokens", "-5"], "--max-new-tokens"),
    (["--max-new-tokens", "1.5"], "--max-new-tokens"),
    (["--temperature", "hot"], "--temperature"),
    (["--temperature", "nan"], "--temperature"),
    (["--temperature", "-0.1"], "--temperature"),
    (["--top-p", "0"], "--top-p"),
    (["--top-k", "-1"], "--top-k"),
    (["--min-p", "1.1"], "--min-p"),
    (["--seed", "-1"], "--seed"),
    (["--repetition-penalty", "0"], "--repetition-penalty"),
    (["--logit-bias", "7"], "--logit-bias"),
    (["--logit-bias", "-7=1"], "--logit-bias"),
    (["--stop", ""], "--stop"),
    (["--drafter-bits", "5"], "--drafter-bits"),
    (["--prompt", ""], "--prompt"),
    (["--prompt"], "--prompt"),
    (["--logprobs", "2"], "--json"),
    (["--model", "owner/name", "--mode", "dspark"], "--drafter"),
    (["--model", "owner/name", "--mode", "dflash"], "--drafter"),
    (["--mode", "lookup", "--drafter", "x"], "--drafter"),
    (["--mode", "baseline", "--max-draft", "3"], "--max-draft"),
    (["--mode", "lookup", "--drafter-bits", "8"], "--drafter-bits"),
    (["--model", "owner/name", "--confidence-threshold", "0.5"], "--confidence-threshold"),
    (["--model", "owner/name", "--no-lookup-drafts"], "--lookup-drafts"),
    (["export"], "MODEL"),
    (["export", "x"], "DIR"),
    (["export", "x", ""], "DIR is empty"),
    (["export", "", "x"], "MODEL is empty"),
    (["generate", "hi there"], 'mlx-dspark --prompt "hi there"'),
    (["hi there"], 'mlx-dspark --prompt "hi there"'),
    (["say $5"], "mlx-dspark --prompt 'say $5'"),
    (["--stop", ""], "--stop is '', which"),
    (["--max-new-tokens", "0"], "--max-new-tokens is 0, which"),
    (["--max-new-tokens", "1.5"], "--max-new-tokens is 1.5, which"),
    (["--max-new-tokens", "many"], "--max-new-tokens is 'many', which"),
    (["--logit-bias=-7=1"], "--logit-bias is -7=1, which"),
    (
        ["--trust-remote-code=maybe"],
        "--trust-remote-code is 'maybe', which is not a value it takes.",
    ),
    (["--cpu-weights", "granite"], "Give one of blocks, dense, stock."),
    (["--seed"], "--seed is given without a value."),
    (["--seed", "1", "--seed", "2"], "--seed is given more than once."),
    (["--prompt", "  "], "empty"),
    (["--prompt", "\udcff"], "UTF-8"),
    (["--system", "\udcff"], "UTF-8"),
    (["demo", "--mode", "baseline"], "--mode"),
    (["benchmark", "--mode", "lookup"], "--mode"),
    (["benchmark", "--modes", "dspark", "lookup"], "Commas"),
    (["benchmark", "--modes", "lookup,lookup"], "--modes"),
    (["benchmark", "--modes", "dsprk"], "--modes"),
    (["benchmark", "--caps", "auto,many"], "--caps"),
    (["benchmark", "--caps", "-1"], "--caps"),
    (["benchmark", "--caps", "derived,-1"], "--caps is derived,-1, which"),
    (["benchmark", "--depth", "8q"], "--depth"),
    (["benchmark", "--rows", "0"], "--rows"),
    (["benchmark", "--trials", "0"], "--trials"),
    (["benchmark", "--temperature", "0"], "--temperature"),
    (["benchmark", "--against", "vllm"], "Give one of mlx-lm"),
    (["benchmark", "--against-draft-model", "x"], "--against mlx-lm"),
    (["benchmark", "--prompts", "no-such-file.jsonl"], "no-such-file.jsonl"),
    (["benchmark", "--plot", "rates.txt"], "--plot rates.png"),
    (["benchmark", "--plot", "no-such-folder/rates.png"], "its folder"),
    (["benchmark", "--json", "--plot", "terminal"], "--plot"),
    (["race", "--arms", "auto"], "--arms is auto, which"),
    (["race", "--arms", "auto,lookup:3,lookup:3"], "--arms is auto,lookup:3,lookup:3, where"),
    (["race", "--arms", "auto,baseline:3"], "MODE:CAP"),
    (["race", "--arms", "auto,lookup,auto:1,auto:2,auto:3"], "--arms"),
    (["race", "--arms", "auto,lookup:x"], "--arms"),
    (["race", "--prompt", "  "], "empty"),
]


@pytest.mark.parametrize(("arguments", "named"), REFUSED, ids=lambda value: ascii(" ".join(value))[:40])
def test_bad_command_lines_are_one_sentence_and_exit_code_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert named in shown.err
    assert "Traceback" not in shown.err
    assert shown.err.count("\n") == 1


def test_flags_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "--prompt - --no-stream --max-draft full --stop a --stop b --logit-bias 1=-2,5=3 --logit-bias 7=0.5"
    )
    words += " --no-lookup-drafts --drafter d --seed 5 --no-chat-template --presence-penalty -0.5"
    ask, loading, answer = _given(words.split(), monkeypatch)
    assert (ask.prompt, ask.stream, loading.max_draft, answer.stops) == ("-", False, 0, ("a", "b"))
    assert answer.logit_bias == {1: -2.0, 5: 3.0, 7: 0.5}
    assert (loading.lookup_drafts, answer.seed, answer.chat_template) == (False, 5, False)
    assert answer.sampling.presence_penalty == -0.5


@pytest.mark.parametrize("word", ["full", "auto"])
def test_python_takes_the_words_that_a_flag_takes(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = LoadSettings.of({"max_draft": word})
    assert given == _given(["--prompt", "a", "--max-draft", word], monkeypatch)[1]
    assert BenchmarkSettings.of({"caps": [word, 3]}).caps == (given.max_draft, 3)


def test_no_flags_are_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _given(["generate"], monkeypatch) == (AskSettings(), LoadSettings(), GenerateSettings())


def test_a_flag_wins_over_the_environment_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_DSPARK_MAX_NEW_TOKENS", "7")
    monkeypatch.setenv("MLX_DSPARK_STOP", "a b")
    monkeypatch.setenv("MLX_DSPARK_TRUST_REMOTE_CODE", "true")
    _, loading, answer = _given(["generate"], monkeypatch)
    assert (answer.max_new_tokens, answer.stops, loading.trust_remote_code) == (7, ("a b",), True)
    assert _given(["--max-new-tokens", "9"], monkeypatch)[2].max_new_tokens == 9


@pytest.mark.parametrize(
    "name", ["MLX_DSPARK_TEMPERATURE", "MLX_DSPARK_TRUST_REMOTE_CODE", "MLX_DSPARK_MAX_DRAFT"]
)
def test_a_bad_environment_value_is_refused_by_its_name(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "wrong")
    assert run(["generate"]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize("flag", [False, True])
def test_what_is_refused_is_called_as_it_was_given(
    flag: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_DSPARK_MODE", "dflash")
    assert (
        run(["generate", "--prompt", "a", "--model", "./none", *(["--mode", "dflash"] if flag else [])]) == 2
    )
    called = capsys.readouterr().err
    assert ("MLX_DSPARK_MODE is 'dflash'" in called, "--mode is 'dflash'" in called) == (not flag, flag)


def test_the_environment_asks_nothing_of_a_command_that_has_no_use_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = LoadSettings(mode="baseline", max_draft=4)
    with pytest.raises(UsageError, match="max_draft"):
        drafting_mode(settings)
    with pytest.raises(UsageError, match="mode"):
        _refuse_unused(settings)
    monkeypatch.setenv("MLX_DSPARK_MAX_DRAFT", "5")
    with pytest.raises(UsageError, match="max_draft"):
        drafting_mode(settings)
    monkeypatch.setenv("MLX_DSPARK_MAX_DRAFT", "4")
    assert drafting_mode(settings) == "baseline"
    monkeypatch.setenv("MLX_DSPARK_MODE", "baseline")
    _refuse_unused(settings)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("benchmark --modes lookup,lookup", "named twice"),
        ("benchmark --depth 2k,2048", "2048 is named twice"),
        ("race --arms auto,auto", "auto is named twice"),
        ("generate --max-batch 3", "belongs to serve and, from Python, to load()"),
        ("generate --trials 4", "belongs to benchmark."),
    ],
)
def test_a_refusal_says_what_is_amiss(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words.split()) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("pair", ["true false", "1 0", "yes no", "ON Off"])
def test_switches_in_the_environment(pair: str, value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_DSPARK_CHAT_TEMPLATE", pair.split()[not value])
    assert _given(["generate"], monkeypatch)[2].chat_template is value


def test_the_demo_reads_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_DSPARK_MODEL", "./no-such-model")
    assert run(["demo"]) == 2
    assert "no-such-model" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_speaks_of_the_environment_where_it_is_read(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--help"]) == 0
    shown = capsys.readouterr().out
    has_settings = command not in WITHOUT_MODEL
    assert ("MLX_DSPARK_MODEL" in shown) == ("Accept length:" in shown) == has_settings


def test_the_weight_layouts_are_those_of_the_kernels() -> None:
    from mlx_dspark.kernels.dispatch import CHOICES

    assert CPU_WEIGHTS == CHOICES


def test_the_reference_page_explains_every_field_of_json() -> None:
    fields = Result.fold([]).to_dict()
    assert Result.meanings().keys() == fields.keys()
    assert all(f"| `{name}` | {meaning} |" in reference.page() for name, meaning in Result.meanings().items())


@pytest.mark.parametrize("code", [0, 2, 130, 141])
def test_the_reference_page_lists_every_exit_code(code: int) -> None:
    assert f"\n| {code} | " in reference.page()


def test_a_command_takes_only_the_knobs_it_uses() -> None:
    def show(answer: GenerateSettings) -> int:
        """Show."""
        return answer.max_new_tokens

    command = with_flags(show, GenerateSettings, without=("seed",))
    assert command(max_new_tokens=5) == 5
    assert "seed" not in command.__annotations__


EDGES = [
    (knob, value)
    for knob in GenerateSettings.knobs()
    if isinstance(knob.kind, Number | Whole) and knob.name != "max_new_tokens"
    for bound in (knob.kind.low, knob.kind.high)
    if bound is not None
    for value in (bound, bound - 1, bound + 1)
]


def _refuses(make: Callable[[], object]) -> bool:
    try:
        make()
    except (UsageError, RequestError):
        return True
    return False


@pytest.mark.parametrize(("knob", "value"), EDGES, ids=lambda value: getattr(value, "name", str(value)))
def test_declared_ranges_are_those_of_the_engine(knob: Knob, value: float) -> None:
    option: dict[str, Any] = {knob.name: value}
    assert _refuses(lambda: GenerateSettings.of(option)) == _refuses(lambda: SamplingParams(**option))


@pytest.mark.parametrize(
    ("settings", "alone", "with_shipped"),
    [
        ({}, "lookup", "model"),
        ({"mode": "lookup"}, "lookup", "lookup"),
        ({"mode": "baseline"}, "baseline", "baseline"),
        ({"mode": "dspark"}, "refused", "model"),
        ({"drafter": "x"}, "model", "model"),
    ],
)
def test_who_drafts(settings: dict[str, Any], alone: str, with_shipped: str) -> None:
    def drafting(has_shipped: bool) -> str:
        try:
            return drafting_mode(LoadSettings(**settings), has_shipped=has_shipped)
        except UsageError:
            return "refused"

    assert drafting(False) == alone
    assert drafting(True) == with_shipped


def test_switches_can_be_turned_off_where_they_can_be_on() -> None:
    for knob in KNOBS:
        if isinstance(knob.kind, Switch):
            assert bool(negative_of(knob)) == (knob.default is not False)


@pytest.mark.parametrize(
    ("section", "given", "said"),
    [
        (LoadSettings, {"max_batch": "2"}, "max_batch is '2', which"),
        (LoadSettings, {"kv_bits": "4"}, "kv_bits is '4', which"),
        (LoadSettings, {"max_batch": 2.5}, "max_batch is 2.5, which"),
        (GenerateSettings, {"temperature": "1"}, "temperature is '1', which"),
    ],
)
def test_a_text_in_place_of_a_number_is_shown_as_one(section: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refusal:
        section.of(given)
    assert refusal.value.sentence.startswith(said)


def test_variables_that_nothing_reads_are_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("MLX_DSPARK_TEMPRATURE", "MLX_DSPARK_MAX_BATCH", "MLX_DSPARK_MODLE", "MLX_DSPARK_STEPS"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("MLX_DSPARK_TOP_K", "3")
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", "/nowhere")
    _given(["--prompt", "hi"], monkeypatch)
    batch, *others = capsys.readouterr().err.splitlines()
    assert batch == "mlx-dspark: MLX_DSPARK_MAX_BATCH is set, and nothing reads it."
    strays = ["MLX_DSPARK_MODLE", "MLX_DSPARK_STEPS", "MLX_DSPARK_TEMPRATURE"]
    assert [line.split()[1] for line in others] == strays
    assert others[0].endswith("Did you mean MLX_DSPARK_MODEL?")
    assert others[2].endswith("Did you mean MLX_DSPARK_TEMPERATURE?")


def test_a_model_in_the_environment_is_told_where_it_is_not_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_DSPARK_MODEL", "some/model")
    assert run(["export", "", "somewhere"]) == 2
    assert "MLX_DSPARK_MODEL is set, and nothing reads it." in capsys.readouterr().err
    assert run(["--version"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--thinking", "--no-thinking"], "--thinking and --no-thinking are both given."),
        (["--no-thinking", "--thinking"], "--no-thinking and --thinking are both given."),
        (["--port", "1", "--port", "2"], "--port is given more than once."),
    ],
)
def test_a_flag_that_is_given_twice_is_named(
    given: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", *given]) == 2
    assert told in capsys.readouterr().err
