"""Measuring with models: arms, gaps, stock mlx-lm, races and both commands."""

from __future__ import annotations

import io
import itertools
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_dspark.bench.arms import OwnArm, session_of
from mlx_dspark.bench.cases import Case, cases_of, contents_of, deep_prompt
from mlx_dspark.bench.gap import logit_gap
from mlx_dspark.bench.race import Lane, laps, run_race
from mlx_dspark.bench.stock import Stock, StockArm, stock_folder
from mlx_dspark.bench.suite import judge, measure
from mlx_dspark.chat.template import encode_prompt
from mlx_dspark.cli.main import run
from mlx_dspark.drafters.lookup import LookupDrafter
from mlx_dspark.foundation.bench_settings import BenchmarkSettings
from mlx_dspark.foundation.errors import LoadError, UsageError
from mlx_dspark.foundation.events import Committed, Finished, RoundReport
from mlx_dspark.foundation.lists import Drafting
from mlx_dspark.foundation.settings import GenerateSettings, LoadSettings
from mlx_dspark.session.pair import Parts, load_parts
from mlx_dspark.session.result import SessionEvent
from mlx_dspark.session.variants import variant
from mlx_dspark.targets.load import target_of
from tests.tiny import EOS_IDS, save_tiny, tiny_config, tiny_llama, tiny_tokenizer
from tests.tiny_drafters import save_tiny_dflash, save_tiny_dspark
from tests.tiny_hybrids import hybrid_config, tiny_hybrid

CONTEXT = 4096
LOADING = LoadSettings()
PROMPT = "the people and the time and the people and the time and the people"


@cache
def parts(seed: int = 0) -> Parts:
    """A tiny target that lookup drafts for."""
    target = target_of(tiny_llama(seed), tiny_config(), context=CONTEXT)
    lookup = LookupDrafter(min_n=1, max_n=3)
    lookup.bind(target)
    return Parts(target, tiny_tokenizer(), lookup, tiny_config(), EOS_IDS, "lookup", "tiny")


def arm(mode: str, max_draft: int | str | None = None) -> OwnArm:
    return OwnArm(parts(), LOADING, Drafting(mode, max_draft))


def case(*lengths: int, new: int = 24, temperature: float = 0.0) -> Case:
    draw = np.random.default_rng(0)
    prompts = tuple(tuple(draw.integers(3, 30, length).tolist()) for length in lengths)
    return Case("chat", "chat 1", prompts, new, temperature)


# -- arms

ARMS = [
    ("lookup", None),
    ("lookup", "auto"),
    ("lookup", 0),
    ("lookup", 3),
    ("auto", None),
    ("control", None),
]


@pytest.mark.parametrize(("mode", "max_draft"), ARMS)
@pytest.mark.parametrize("lengths", [(40,), (1300,), (5, 40, 90)])
def test_every_arm_writes_plain_decodings_tokens_and_reads_in_its_chunks(
    mode: str, max_draft: int | str | None, lengths: tuple[int, ...]
) -> None:
    asked = case(*lengths)
    plain, found = arm("baseline").answer(asked, 0), arm(mode, max_draft).answer(asked, 0)
    assert [a.tokens for a in found.answers] == [a.tokens for a in plain.answers]
    assert [a.reading for a in found.answers] == [a.reading for a in plain.answers]
    if mode == "control":
        assert not any(answer.rounds for answer in found.answers)


def test_a_case_of_rows_is_its_rows() -> None:
    together = arm("lookup", 3).answer(case(5, 40, 90), 0)
    alone = [arm("lookup", 3).answer(Case("", "", (prompt,), 24), 0) for prompt in case(5, 40, 90).prompts]
    assert [answer.tokens for answer in together.answers] == [each.answers[0].tokens for each in alone]
    assert together.prefill.tokens == sum(each.prefill.tokens for each in alone) == 5 + 40 + 90


@pytest.mark.parametrize("lengths", [(40,), (5, 40, 90)])
def test_decoding_counts_every_token_after_the_prompts_are_read(lengths: tuple[int, ...]) -> None:
    found = arm("baseline").answer(case(*lengths), 0)
    assert found.decode.tokens == sum(len(answer.tokens) - 1 for answer in found.answers)
    assert 0 < found.first_token_seconds <= found.prefill.seconds
    assert found.decode.seconds > 0
    assert found.peak_bytes >= found.used_bytes > 0


def test_what_is_drawn_depends_on_the_seed_alone() -> None:
    asked = case(40, 40, temperature=1.0)
    drawn = [arm("lookup", "auto").answer(asked, seed).answers for seed in (1, 1, 2)]
    ids = [[answer.tokens for answer in answers] for answers in drawn]
    assert ids[0] == ids[1] == [answer.tokens for answer in arm("baseline").answer(asked, 1).answers]
    assert ids[0] != ids[2]


# -- variants


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    save_tiny(folder / "tiny")
    save_tiny_dspark(folder / "dspark", taps=(0, 1))
    save_tiny_dflash(folder / "dflash")
    return folder


def about(found: Parts) -> tuple[Any, ...]:
    """The mode, the cap, and every drafter with the numbers it was made with."""
    drafters = getattr(found.drafter, "parts", () if found.drafter is None else (found.drafter,))
    numbers = [{k: v for k, v in vars(each).items() if isinstance(v, int | float)} for each in drafters]
    return found.mode, found.max_draft, [(each.sources, each.taps) for each in drafters], numbers


@pytest.mark.parametrize("max_draft", [None, "auto", 0, 3])
@pytest.mark.parametrize("drafter", [None, "dspark", "dflash"])
def test_a_variant_is_what_would_have_been_loaded(
    home: Path, drafter: str | None, max_draft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(home / "cache"))
    model = {"model": home / "tiny"}
    given = model if drafter is None else model | {"drafter": home / drafter}
    settings = LoadSettings.of(given)
    loaded = load_parts(settings)
    asked: list[tuple[str, dict[str, Any]]] = [("auto", given), ("lookup", model)]
    asked += [] if drafter is None else [(drafter, given)]
    for mode, options in asked:
        wanted = load_parts(LoadSettings.of({**options, "mode": mode, "max_draft": max_draft}))
        assert about(variant(loaded, settings, mode, max_draft)) == about(wanted)
    assert about(variant(loaded, settings, "baseline")) == ("baseline", None, [], [])
    other = "dflash" if drafter == "dspark" else "dspark"
    with pytest.raises(UsageError, match=f"needs a {other} drafter"):
        variant(loaded, settings, other)


# -- gaps

HYBRID = "qwen3_next"
TARGETS: dict[str, Callable[[], Any]] = {
    "llama": lambda: parts().target,
    "hybrid": lambda: target_of(
        tiny_hybrid("qwen3_next", seed=1), hybrid_config("qwen3_next"), context=CONTEXT
    ),
}


def logits_of(target: Any, tokens: Sequence[int]) -> np.ndarray:
    """By one forward over all of the tokens, in float32."""
    rows = target.new_rows()
    with rows.transaction(len(tokens)):
        return np.array(target.forward(mx.array([list(tokens)]), rows).logits[0, -1].astype(mx.float32))


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("length", [1, 3, 40, 700])
def test_a_gap_is_that_of_the_targets_logits(family: str, length: int) -> None:
    target = TARGETS[family]()
    tokens = case(length).prompts[0]
    logits = logits_of(target, tokens)
    best, second, third = (int(i) for i in np.argsort(logits)[::-1][:3])
    found = logit_gap(target, tokens, best, third)
    assert found.top == (best, second)
    assert found.top_gap == pytest.approx(float(logits[best] - logits[second]), abs=1e-3)
    assert found.token_gap == pytest.approx(float(logits[best] - logits[third]), abs=1e-3)
    assert 0 < found.rounding < 1e-3
    assert not found.tie


def test_two_tokens_with_the_same_logit_are_a_tie() -> None:
    model: Any = tiny_llama(3)
    tokens = case(20).prompts[0]
    best = int(np.argmax(logits_of(target_of(model, tiny_config()), tokens)))
    twin = (best + 7) % 300
    model.lm_head.weight[twin] = model.lm_head.weight[best]
    found = logit_gap(target_of(model, tiny_config()), tokens, best, twin)
    assert set(found.top) == {best, twin}
    assert found.tie


def test_an_arm_that_writes_something_else_is_found_out() -> None:
    """Another model answers in the second arm's place."""
    arms = [arm("baseline"), OwnArm(parts(seed=5), LOADING, Drafting("baseline"), "other")]
    found = measure(arms, [case(40)], trials=1, seed=0)
    verdicts = [each.verdict for each in judge(found, 0, lambda *asked: logit_gap(parts().target, *asked))]
    assert [verdict.kind for verdict in verdicts] == ["identical", "differs"]
    assert verdicts[1].gap is not None
    assert verdicts[1].gap.top[0] == verdicts[1].expected


# -- stock mlx-lm


def test_stock_writes_the_same_alone_and_with_a_draft_model(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(home / "cache"))
    settings = LoadSettings(model=home / "tiny")
    plain = OwnArm(load_parts(settings), settings, Drafting("baseline"))
    asked = case(40)
    expected = plain.answer(asked, 0).answers[0].tokens
    folder = stock_folder(str(home / "tiny"), home / "scratch")
    with Stock([folder, folder]) as stock:
        arms = [StockArm(stock, settings, (), draft=draft) for draft in (False, True)]
        assert [each.label for each in arms] == ["mlx-lm", "mlx-lm draft model"]
        assert not any(each.takes(case(5, 6)) for each in arms)
        for each in arms:
            found = each.answer(asked, 0)
            assert found.answers[0].tokens == expected
            assert found.decode.tokens == len(expected) - 1
            assert min(found.decode.seconds, found.prefill.seconds, found.peak_bytes) > 0
        ended = StockArm(stock, settings, {expected[5]}, draft=False).answer(asked, 0)
        assert ended.answers[0].tokens == expected[: expected.index(expected[5]) + 1]
        drawn = [arms[0].answer(case(40, temperature=1.0), seed).answers[0].tokens for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]


def test_stock_that_cannot_load_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(LoadError, match="No safetensors found"):
        Stock([tmp_path])


# -- cases


@pytest.mark.parametrize("depth", [64, 200, 1111, 3000])
def test_a_deep_prompt_is_as_long_as_asked_and_laid_out_by_the_template(depth: int) -> None:
    tokenizer: Any = tiny_tokenizer()
    contents = contents_of(BenchmarkSettings(num_prompts=1))
    ids = deep_prompt(tokenizer, contents, depth)
    assert len(ids) == depth
    text = tokenizer.decode(ids)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    if depth > 1000:
        assert contents["chat"][0] in text


def test_cases_are_contents_alone_then_temperature_depths_and_rows(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("one\n\ntwo\n\nthree")
    settings = BenchmarkSettings(
        prompts=file, num_prompts=2, temperature=0.5, depth=(64, 128), rows=(1, 3), max_new_tokens=8
    )
    found = cases_of(settings, contents_of(settings), tiny_tokenizer(), CONTEXT)
    groups = [(each.group, each.rows, each.temperature) for each in found]
    assert groups == [
        *[("mine", 1, 0.0)] * 2,
        *[("mine, T=0.5", 1, 0.5)] * 2,
        ("depth 64", 1, 0.0),
        ("depth 128", 1, 0.0),
        ("3 rows", 3, 0.0),
    ]
    first, second = found[0].prompts[0], found[1].prompts[0]
    assert found[-1].prompts == (first, second, first)


@pytest.mark.parametrize(
    ("wanted", "field"),
    [({"depth": (4000,), "max_new_tokens": 128}, "depth"), ({"max_new_tokens": 4090}, "prompts")],
)
def test_what_does_not_fit_the_context_is_refused_before_anything_runs(
    wanted: dict[str, Any], field: str
) -> None:
    settings = BenchmarkSettings(**wanted)
    with pytest.raises(UsageError) as refused:
        cases_of(settings, contents_of(settings), tiny_tokenizer(), CONTEXT)
    assert refused.value.field == field


# -- races


class Clock:
    """Time that passes only where somebody works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def works(self, tokens: int, seconds: float) -> Iterator[SessionEvent]:
        """So many tokens, one each `seconds`."""
        for token in range(tokens):
            self.now += seconds
            yield Committed((token,), RoundReport(0, self.now, 1, 1, 1, 0, 0, 0, 1, token))
        yield Finished("length", 1, tokens)


def test_lanes_keep_their_own_time_and_stay_abreast() -> None:
    clock = Clock()
    lanes = [Lane("slow", clock.works(20, 0.2)), Lane("fast", clock.works(40, 0.05))]
    for _ in laps(lanes, lap_seconds=0.1, clock=clock):
        if not any(lane.done for lane in lanes):
            assert abs(lanes[0].seconds - lanes[1].seconds) <= 0.2 + 1e-9
    slow, fast = lanes
    assert (slow.seconds, fast.seconds) == pytest.approx((4.0, 2.0))
    assert (slow.rate, fast.rate) == pytest.approx((5.0, 20.0))
    assert fast.answer.tokens == tuple(range(40))


def raced(names: Sequence[str] = ("baseline", "lookup", "control"), **options: Any) -> Any:
    sessions = {name: session_of(parts(), LOADING, Drafting(name)) for name in names}
    return run_race(
        options.pop("sessions", sessions),
        session_of(parts(), LOADING, Drafting("control")),
        PROMPT,
        GenerateSettings(max_new_tokens=40),
        ask=lambda *asked: logit_gap(parts().target, *asked),
        **options,
    )


def test_a_race_ends_with_the_controls_tokens_in_every_lane() -> None:
    outcome = raced()
    assert outcome.identical
    assert outcome.same_reading
    assert [lane.label for lane in outcome.lanes] == ["baseline", "lookup", "control"]
    plain = session_of(parts(), LOADING, Drafting("baseline")).generate(PROMPT, max_new_tokens=40)
    assert all(lane.text == plain.text and lane.tokens == 40 for lane in outcome.lanes)


def test_a_race_finds_out_a_lane_that_writes_something_else() -> None:
    sessions = {
        "good": session_of(parts(), LOADING, Drafting("lookup")),
        "bad": session_of(parts(seed=5), LOADING, Drafting("baseline")),
    }
    outcome = raced(sessions=sessions)
    assert [verdict.kind for verdict in outcome.verdicts] == ["identical", "differs"]
    assert not outcome.identical


@pytest.mark.parametrize("at", ["warming up lookup", "the control answers", 1, 3])
def test_an_interrupted_race_keeps_what_the_lanes_wrote(at: str | int) -> None:
    seen = itertools.count(1)

    def tell(message: str, _: float | None) -> None:
        if message == at:
            raise KeyboardInterrupt

    def show(_: Sequence[Lane]) -> None:
        if next(seen) == at:
            raise KeyboardInterrupt

    outcome = raced(tell=tell, show=show)
    assert outcome.interrupted
    assert bool(outcome.verdicts) == isinstance(at, int)
    assert all(verdict.same for verdict in outcome.verdicts)
    assert all(bool(lane.tokens) <= (lane.seconds > 0) for lane in outcome.lanes)
    assert any(lane.tokens for lane in outcome.lanes) == isinstance(at, int)


def test_a_lap_that_is_interrupted_counts() -> None:
    clock = Clock()

    def works() -> Iterator[SessionEvent]:
        yield from itertools.islice(clock.works(4, 0.5), 3)
        raise KeyboardInterrupt

    lane = Lane("cut", works())
    with pytest.raises(KeyboardInterrupt):
        lane.lap(10.0, clock, lambda: None)
    assert (lane.tokens, lane.seconds) == (3, 1.5)


# -- commands

Cli = Callable[..., tuple[int, str, str]]
SHORT = ("--max-new-tokens", "12")


@pytest.fixture
def cli(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command on the tiny model."""
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(home / "cache"))
    (home / "mine.txt").write_text(f"{PROMPT}\n\nsay it again")

    def invoke(*arguments: str) -> tuple[int, str, str]:
        code = run([*arguments, "--model", str(home / "tiny"), *SHORT])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return invoke


def bench_arguments(home: Path) -> tuple[str, ...]:
    return ("benchmark", "--prompts", str(home / "mine.txt"), "--trials", "2")


def test_benchmark_json_has_every_arm_and_case(cli: Cli, home: Path) -> None:
    extra = ("--caps", "derived,auto,2", "--depth", "100", "--rows", "2", "--temperature", "1", "--json")
    code, out, _ = cli(*bench_arguments(home), *extra)
    values = json.loads(out)
    assert code == 0
    assert out.count("\n") == 1
    assert values["arms"] == ["baseline", "lookup", "lookup auto", "lookup 2"]
    groups = ["mine", "mine, T=1", "depth 100", "2 rows"]
    assert [(line["group"], line["arm"]) for line in values["lines"]] == list(
        itertools.product(groups, values["arms"])
    )
    assert {verdict["verdict"] for verdict in values["verdicts"]} == {"identical"}
    assert len(values["verdicts"]) == 4 * (2 + 1 + 2)
    assert len(values["turns"]) == 2 * 4 * (2 + 2 + 1 + 1)
    assert all(line["decode"]["count"] == 2 for line in values["lines"])
    assert values["settings"]["rows"] == [2]
    assert values["machine"]["versions"].keys() >= {"mlx", "mlx-lm", "mlx-dspark", "python"}


def test_benchmark_prints_tables_and_bars_without_escape_codes(cli: Cli, home: Path) -> None:
    code, out, err = cli(*bench_arguments(home), "--plot", "terminal")
    assert code == 0
    for part in ("decode tok/s", "[lowest, highest]", "baseline", "lookup", "2/2", "█"):
        assert part in out
    assert "\x1b" not in out + err
    assert "tiny · drafting: lookup" in err


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_an_interrupted_benchmark_shows_what_it_measured(
    cli: Cli, home: Path, form: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, turns = OwnArm.answer, itertools.count()

    def interrupted(self: OwnArm, asked: Case, seed: int) -> Any:
        if next(turns) == 6:
            raise KeyboardInterrupt
        return answer(self, asked, seed)

    monkeypatch.setattr(OwnArm, "answer", interrupted)
    code, out, err = cli(*bench_arguments(home), *form)
    assert code == 130
    assert "Interrupted" in err
    if form:
        assert len(json.loads(out)["turns"]) == 4
    else:
        assert "decode tok/s" in out


@pytest.mark.parametrize("arms", ["baseline,auto", "lookup:2,lookup:auto,control,baseline"])
def test_race_prints_a_line_for_each_arm_and_the_verdict(cli: Cli, arms: str) -> None:
    code, out, err = cli("race", "--prompt", PROMPT, "--arms", arms)
    assert code == 0
    assert out.splitlines()[-1] == "All arms wrote the tokens of plain decoding at a cap of 0."
    assert "\x1b" not in out + err
    code, out, _ = cli("race", "--prompt", PROMPT, "--arms", arms, "--json")
    values = json.loads(out)
    named = [each.replace("auto", "lookup") if each == "auto" else each for each in arms.split(",")]
    assert [lane["arm"] for lane in values["lanes"]] == [each.replace(":", " ") for each in named]
    assert {lane["verdict"] for lane in values["lanes"]} == {"identical"}
    assert values["identical"]
    assert values["same_reading"]


def test_arms_that_are_the_same_are_told_and_race_once(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookup is what drafts for this model by itself. The prompt comes from standard input."""
    code, out, err = cli("race", "--prompt", PROMPT, "--arms", "lookup,auto")
    assert (code, out) == (2, "")
    assert "auto is the same as lookup here" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    code, out, err = cli("race", "--prompt", "-", "--arms", "baseline,lookup,auto", "--json")
    values = json.loads(out)
    assert ([lane["arm"] for lane in values["lanes"]], values["prompt"]) == (["baseline", "lookup"], PROMPT)
    assert "auto is the same as lookup here" in err


def test_a_mode_without_its_drafter_is_refused(cli: Cli, home: Path) -> None:
    for arguments in (
        ("race", "--arms", "baseline,dspark"),
        (*bench_arguments(home), "--modes", "dflash"),
    ):
        code, out, err = cli(*arguments)
        assert (code, out) == (2, "")
        assert "Name one with --drafter" in err
        assert "Traceback" not in err


def test_a_race_on_a_terminal_is_side_by_side(home: Path) -> None:
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "mlx_dspark", "race", "--model", str(home / "tiny"), "--prompt", PROMPT]
    environment = {
        **os.environ,
        "MLX_DSPARK_CACHE_DIR": str(home / "cache"),
        "COLUMNS": "100",
        "TERM": "xterm",
    }
    with subprocess.Popen(
        [*command, *SHORT], stdout=child, stderr=subprocess.DEVNULL, env=environment
    ) as going:
        os.close(child)
        shown = b""
        while True:
            try:
                piece = os.read(parent, 65536)
            except OSError:
                break
            if not piece:
                break
            shown += piece
        assert going.wait() == 0
    os.close(parent)
    text = shown.decode()
    assert any("baseline · done" in line and "lookup · done" in line for line in text.splitlines())
    assert "12 tokens · " in text
    assert "All arms wrote the tokens" in text


@pytest.mark.weights
def test_the_default_model_is_measured_and_raced() -> None:
    from tests.default_model import parts as default_parts

    loaded = default_parts("dspark", lookup_drafts=True)
    text = "Repeat this line twice: alpha beta gamma delta epsilon zeta"
    drafting = [Drafting("baseline"), Drafting("auto"), Drafting("lookup")]
    arms = [OwnArm(loaded, LOADING, each) for each in drafting]
    asked = Case("chat", "chat 1", (encode_prompt(loaded.tokenizer, text),), 10)
    found = measure(arms, [asked], trials=1, seed=0)
    judged = judge(found, 0, lambda *each: logit_gap(loaded.target, *each))
    assert {each.verdict.kind for each in judged} <= {"identical", "tie"}
    outcome = run_race(
        {arm.label: session_of(loaded, LOADING, arm.drafting) for arm in arms[:2]},
        session_of(loaded, LOADING, Drafting("control")),
        text,
        GenerateSettings(max_new_tokens=10),
        ask=lambda *each: logit_gap(loaded.target, *each),
        settle=mx.synchronize,
    )
    assert {verdict.kind for verdict in outcome.verdicts} <= {"identical", "tie"}
    assert outcome.same_reading
