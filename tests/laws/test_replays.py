"""Laws of recorded forwards: what is replayed is what the model's own code gives, whatever changes."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from benchmarks.sides import Sides
from mlx_dspark.contracts import Forward, Logits
from mlx_dspark.engine.handover import settle
from mlx_dspark.kernels.framework.plan import Switchboard
from mlx_dspark.kernels.gpu_modules import joined
from mlx_dspark.session.trust import refuse_untrusted
from mlx_dspark.state.kv import STEP
from mlx_dspark.state.layout import Layout
from mlx_dspark.state.rows import RowStates
from mlx_dspark.targets.dense import replay
from mlx_dspark.targets.dense.replay import MOST_WIDTH, Replays
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.load import target_of
from tests.laws.test_kernels_traced import place
from tests.scripted_kernels import Doubled
from tests.tiny_families import family_config, tiny_family

RECORDED = ("qwen2", "qwen3")
DECLINED = ("gemma2", "gemma3_text", "gpt_oss")
CLOSE = 2e-4


def pair(family: str = "qwen3", layout: Layout | None = None, model: Any = None) -> list[DenseTarget]:
    """A target that walks through its code, and one that replays."""
    one, other = (model() if model is not None else tiny_family(family, seed=1) for _ in range(2))
    plain = target_of(one, family_config(family), context=2048, layout=layout)
    plain.replays = None
    return [plain, replaying(other, family, layout)]


def replaying(model: nn.Module, family: str = "qwen3", layout: Layout | None = None) -> DenseTarget:
    target = target_of(model, family_config(family), context=2048, layout=layout)
    target.replays = Replays(model, anyhow=True)
    return target


def ids(rows: int, width: int, seed: int = 0) -> mx.array:
    drawn = np.random.default_rng(seed).integers(2, 380, (rows, width))
    return mx.array(drawn.tolist(), mx.int32)


def fed(target: DenseTarget, rows: RowStates, tokens: mx.array, keep: list[int], **asked: Any) -> Forward:
    with rows.transaction(tokens.shape[1]) as transaction:
        made = target.forward(tokens, rows, **asked)
        mx.eval([each for each in made if each is not None])
        transaction.commit(keep)
    return made


def begun(target: DenseTarget, depths: list[int]) -> RowStates:
    rows = target.new_rows(len(depths))
    fed(target, rows, ids(len(depths), max(depths), 9), depths)
    return rows


def recordings(target: DenseTarget) -> int:
    """The comparison at the beginning makes two."""
    assert target.replays is not None
    return sum(each is not None for each in target.replays._known.values())


def same(a: mx.array | None, b: mx.array | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and bool(mx.allclose(a, b, atol=CLOSE).item())


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The widths of the forwards that went through a model's code."""
    seen: list[int] = []
    own = DenseTarget._run

    def run(self: DenseTarget, tokens: mx.array, *rest: Any) -> Forward:
        seen.append(tokens.shape[1])
        return own(self, tokens, *rest)

    monkeypatch.setattr(DenseTarget, "_run", run)
    return seen


@pytest.mark.parametrize("family", RECORDED)
@pytest.mark.parametrize("depths", [[5], [30, 30], [40, 21, 33]], ids=str)
def test_rounds_of_any_width_that_keep_any_number_are_those_of_the_code(
    family: str, depths: list[int], walks: list[int]
) -> None:
    plain, replayed = pair(family, Layout.COMPANY if len(depths) > 1 else None)
    states = [begun(target, depths) for target in (plain, replayed)]
    rng = np.random.default_rng(len(depths))
    for turn in range(60):
        width = int(rng.choice([1, 2, 3, 8, MOST_WIDTH, MOST_WIDTH + 1]))
        keep = [int(rng.integers(width + 1)) for _ in depths]
        tokens = ids(len(depths), width, turn)
        taps = (0, 1) if turn % 3 == 0 else ()
        logits = (Logits.ALL, Logits.LAST, Logits.NONE)[turn % 5 % 3]
        made = [
            fed(target, rows, tokens, keep, taps=taps, logits=logits)
            for target, rows in zip((plain, replayed), states, strict=True)
        ]
        assert same(made[0].logits, made[1].logits), (turn, width)
        assert same(made[0].features, made[1].features), (turn, width)
    assert states[0].depth == states[1].depth
    assert recordings(replayed) >= 6
    again = ids(len(depths), 3, 99)
    for _ in range(2):
        fed(replayed, states[1], again, [0] * len(depths))
    before = len(walks)
    fed(replayed, states[1], again, [0] * len(depths))
    assert len(walks) == before


def test_what_was_written_is_what_the_code_writes() -> None:
    plain, replayed = pair()
    states = [begun(target, [7]) for target in (plain, replayed)]
    for turn, (width, kept) in enumerate([(3, 3), (3, 1), (3, 2), (8, 8), (8, 0), (8, 5)]):
        for target, rows in zip((plain, replayed), states, strict=True):
            fed(target, rows, ids(1, width, turn), [kept])
    ours, theirs = (rows.capture(0) for rows in reversed(states))
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert all(same(a, b) for a, b in zip(mine.arrays, other.arrays, strict=True))


def test_buffers_grow_under_recordings() -> None:
    plain, replayed = pair()
    states = [begun(target, [STEP - 20]) for target in (plain, replayed)]
    for turn in range(30):
        made = [fed(t, r, ids(1, 4, turn), [4]) for t, r in zip((plain, replayed), states, strict=True)]
        assert same(made[0].logits, made[1].logits), turn
    assert recordings(replayed) == 2 + 2
    captured = states[1].capture(0)
    fed(replayed, states[1], ids(1, 4, 77), [4])
    fresh = replayed.new_rows()
    fresh.restore(0, captured, 200)
    own = plain.new_rows()
    own.restore(0, states[0].capture(0), 200)
    for turn in range(3):
        made = [fed(t, r, ids(1, 4, turn), [4]) for t, r in ((plain, own), (replayed, fresh))]
        assert same(made[0].logits, made[1].logits)


def test_a_round_launched_ahead_of_another_goes_on_from_it() -> None:
    plain, replayed = pair()
    for kept in (2, 1):
        found = []
        for target in (plain, replayed):
            rows = begun(target, [9])
            for turn in range(3):
                first, second = rows.begin(2), None
                one = target.forward(ids(1, 2, turn), rows).logits
                second = rows.begin(2)
                two = target.forward(ids(1, 2, 50 + turn), rows).logits
                first.commit([kept])
                second.commit([kept if kept == 2 else 0])
                found.append((one, two))
        half = len(found) // 2
        for mine, other in zip(found[half:], found[:half], strict=True):
            assert same(mine[0], other[0])
            assert same(mine[1], other[1])


@pytest.mark.parametrize("change", ["replaced", "in place", "more", "a module", "a list"])
def test_what_changes_in_the_model_is_used(change: str) -> None:
    plain, replayed = pair()
    for target in (plain, replayed):
        target.model.layers[1].mlp = nn.Sequential(target.model.layers[1].mlp)
    states = [begun(target, [9]) for target in (plain, replayed)]
    both = list(zip((plain, replayed), states, strict=True))
    tokens = ids(1, 3)
    before = [fed(*each, tokens, [0]).logits for each in both for _ in range(3)]
    for target in (plain, replayed):
        part = target.model.layers[1].self_attn
        if change == "replaced":
            part.o_proj.weight = part.o_proj.weight * 2
        elif change == "in place":
            part.o_proj.weight *= 2
        elif change == "more":
            part.o_proj.bias = mx.ones((part.o_proj.weight.shape[0],))
        elif change == "a list":
            target.model.layers[1].mlp.layers.append(nn.Tanh())
        else:
            part.o_proj = nn.Sequential(part.o_proj, nn.Tanh())
    for _ in range(3):
        one, other = (fed(*each, tokens, [0]).logits for each in both)
        assert same(one, other)
        assert not same(one, before[0])


def test_modules_that_take_turns_are_those_that_compute() -> None:
    model, kernel = quantized("qwen3"), Doubled(adding=0.5)
    sides = Sides(model, lambda held: place(held["model"], kernel, Switchboard()))
    replayed, tokens, seen = replaying(model), ids(1, 3), []
    replays = replayed.replays
    for use in (sides.use_ours, sides.use_stock) * 2:
        use()
        replayed.replays = None
        wanted = fed(replayed, begun(replayed, [9]), tokens, [0]).logits
        replayed.replays, rows = replays, begun(replayed, [9])
        for _ in range(4):
            assert same(fed(replayed, rows, tokens, [0]).logits, wanted)
        assert recordings(replayed)
        seen.append(wanted)
    assert not same(seen[0], seen[1])


def quantized(family: str) -> Any:
    model = tiny_family(family, seed=1)
    nn.quantize(model, 32, 4)
    return model


def test_a_kernel_that_is_switched_off_is_in_no_recording() -> None:
    plain, replayed = pair(model=lambda: quantized("qwen3"))
    kernel, board = Doubled(adding=0.5), Switchboard()
    place(replayed.model, kernel, board)
    joined(replayed.model)
    replayed = replaying(replayed.model)
    rows, tokens = begun(replayed, [9]), ids(1, 3)
    wanted = fed(plain, begun(plain, [9]), tokens, [0]).logits
    made = [fed(replayed, rows, tokens, [0]).logits for _ in range(4)]
    assert not any(same(each, wanted) for each in made)
    settle(replayed, rows)
    assert recordings(replayed) == 2 + 1
    board.switch_off(kernel.name, "slow")
    rows = begun(replayed, [9])
    for _ in range(3):
        assert same(fed(replayed, rows, tokens, [0]).logits, wanted)


@pytest.mark.parametrize("family", DECLINED)
def test_models_of_other_states_or_masks_are_walked_through(family: str) -> None:
    plain, replayed = pair(family)
    states = [begun(target, [20]) for target in (plain, replayed)]
    for turn in range(4):
        made = [fed(t, r, ids(1, 3, turn), [2]) for t, r in zip((plain, replayed), states, strict=True)]
        assert same(made[0].logits, made[1].logits)
    assert recordings(replayed) == 0


class Peeks(nn.Module):
    """Stands in a layer and does what no recording can follow, or what it would get wrong."""

    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner = inner
        self.how = how

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if cache is not None and self.how == "reads the place":
            x = x * (1 + 0 * int(cache.offset))
        if cache is not None and self.how == "reads the state":
            x = x + 0 * len(cache._rows)
        if self.how == "makes masks":
            mask = mx.zeros((x.shape[1], 1))
        if cache is not None and self.how == "asks for masks":
            mask = cache.make_mask(x.shape[1], return_array=True)
        out = self.inner(x, mask, cache)
        alone = self.how == "sees all keys alone" and x.shape[1] == 1
        if cache is not None and (self.how == "sees all keys" or alone):
            keys, _ = cache.keys_and_values()
            return out + keys.max()
        return out


HOW = {
    "reads the place": "function transformations",
    "reads the state": "_rows",
    "makes masks": "masks of its own",
    "asks for masks": "masks as arrays",
    "sees all keys": "away by",
    "sees all keys alone": "away by",
}


@pytest.mark.parametrize("how", HOW)
def test_code_that_cannot_be_recorded_is_walked_through(how: str) -> None:
    plain, replayed = pair()
    for target in (plain, replayed):
        layer = target.model.layers[0]
        layer.self_attn = Peeks(layer.self_attn, how)
    states = [begun(target, [20]) for target in (plain, replayed)]
    for turn in range(4):
        made = [fed(t, r, ids(1, 3, turn), [2]) for t, r in zip((plain, replayed), states, strict=True)]
        assert same(made[0].logits, made[1].logits)
    assert replayed.replays is not None
    assert HOW[how] in replayed.replays.why_not


def test_a_comparison_that_was_interrupted_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _, replayed = pair()
    replayed.model.layers[0].self_attn = Peeks(replayed.model.layers[0].self_attn, "sees all keys")
    monkeypatch.setattr(replay, "buffer_attention", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        _ = replayed.replayed
    monkeypatch.undo()
    assert "away by" in replayed.why_not_replayed()


def test_logits_that_rule_tokens_out_are_compared_where_they_are_numbers() -> None:
    _, replayed = pair()
    replayed.model.lm_head = Ruling(replayed.model.lm_head)
    assert replaying(replayed.model).replayed


class Ruling(nn.Module):
    """A vocabulary head that rules some tokens out."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array) -> mx.array:
        logits = self.inner(x)
        return mx.where(mx.arange(logits.shape[-1]) < 7, -mx.inf, logits)


@pytest.mark.parametrize("depths", [[9], [9, 12]], ids=str)
def test_a_forward_without_a_transaction_is_refused(depths: list[int]) -> None:
    _, replayed = pair(layout=Layout.COMPANY)
    rows = begun(replayed, depths)
    for _ in range(3):
        fed(replayed, rows, ids(len(depths), 3), [0] * len(depths))
    with pytest.raises(AssertionError):
        replayed.forward(ids(len(depths), 3), rows)


def test_wide_forwards_and_chosen_positions_are_walked_through(walks: list[int]) -> None:
    _, replayed = pair()
    rows = begun(replayed, [9])
    for asked in (Logits.ALL, mx.array([[1]], mx.int32)):
        for width in (3, MOST_WIDTH + 1):
            for _ in range(3):
                fed(replayed, rows, ids(1, width), [0], logits=asked)
            before = len(walks)
            fed(replayed, rows, ids(1, width), [0], logits=asked)
            assert (len(walks) > before) == (width > MOST_WIDTH or asked is not Logits.ALL)


def test_a_shape_is_recorded_at_the_second_time(walks: list[int]) -> None:
    _, replayed = pair()
    rows = begun(replayed, [9])
    assert replayed.replayed
    before = recordings(replayed)
    for known in (0, 1, 1):
        fed(replayed, rows, ids(1, 4), [0])
        assert recordings(replayed) == before + known


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_a_target_says_whether_it_is_replayed(family: str) -> None:
    plain, replayed = pair(family)
    assert not plain.replayed
    assert replayed.replayed == (family == "qwen2")
    assert bool(replayed.why_not_replayed()) != replayed.replayed


def test_without_a_kernel_nothing_is_recorded() -> None:
    _, replayed = pair()
    replayed.replays = Replays(replayed.model)
    rows = begun(replayed, [9])
    for _ in range(3):
        fed(replayed, rows, ids(1, 3), [0])
    assert replayed.replays.why_not
    assert recordings(replayed) == 0


def test_recordings_are_few_and_the_least_used_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_KEPT", 3)
    plain, replayed = pair()
    states = [begun(target, [9]) for target in (plain, replayed)]
    for width in (2, 3, 4, 5, 2, 3, 5):
        for turn in range(2):
            tokens = ids(1, width, turn)
            made = [fed(t, r, tokens, [0]) for t, r in zip((plain, replayed), states, strict=True)]
            assert same(made[0].logits, made[1].logits)
        assert replayed.replays is not None
        assert len(replayed.replays._known) <= 3
    fed(replayed, states[1], ids(1, 3), [0])
    fed(replayed, states[1], ids(1, 6), [0])
    assert replayed.replays is not None
    assert [key[1][1] for key in replayed.replays._known] == [5, 3, 6]


def test_one_query_over_many_keys_is_attended_to_by_mlx(
    monkeypatch: pytest.MonkeyPatch, walks: list[int]
) -> None:
    _, replayed = pair()
    monkeypatch.setattr(replay, "MOST_ALONE", STEP)
    for depth, walked in ((9, False), (STEP + 9, True)):
        rows = begun(replayed, [depth])
        for _ in range(3):
            fed(replayed, rows, ids(1, 1), [1])
        before = len(walks)
        fed(replayed, rows, ids(1, 1), [1])
        assert (len(walks) > before) == walked


def test_a_target_can_go_to_another_thread_and_be_left() -> None:
    """Nothing that was recorded keeps the model, nor its rows."""
    plain, replayed = pair()
    tokens = ids(1, 3)
    wanted = fed(plain, begun(plain, [9]), tokens, [0]).logits
    rows = begun(replayed, [9])
    for _ in range(3):
        fed(replayed, rows, tokens, [0])
    settle(replayed, rows)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(_as_wanted, replayed, rows, tokens, wanted).result()
    gone = ref(replayed.model), ref(rows), ref(replayed)
    del replayed, rows
    gc.collect()
    assert [each() for each in gone] == [None] * 3


def _as_wanted(target: DenseTarget, rows: RowStates, tokens: mx.array, wanted: Any) -> bool:
    both = [rows, begun(target, [9])]
    made = [fed(target, each, tokens, [0]).logits for each in both for _ in range(3)]
    return all(same(each, wanted) for each in made)


def test_a_failure_within_a_recording_leaves_the_rows_as_they_were(
    monkeypatch: pytest.MonkeyPatch, walks: list[int]
) -> None:
    plain, replayed = pair()
    states = [begun(target, [9]) for target in (plain, replayed)]
    for turn in range(3):
        for target, rows in zip((plain, replayed), states, strict=True):
            fed(target, rows, ids(1, 3, turn), [2])
    monkeypatch.setattr(replay, "buffer_attention", _fails)
    made = [fed(t, r, ids(1, 5), [5]) for t, r in zip((plain, replayed), states, strict=True)]
    made += [fed(t, r, ids(1, 5, 1), [5]) for t, r in zip((plain, replayed), states, strict=True)]
    assert same(made[0].logits, made[1].logits)
    assert same(made[2].logits, made[3].logits)
    assert replayed.replayed
    before = len(walks)
    fed(replayed, states[1], ids(1, 3), [2])
    assert len(walks) == before


def _interrupted(*_: Any) -> mx.array:
    raise KeyboardInterrupt


def _fails(*_: Any) -> mx.array:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize("remembered", [True, False])
def test_a_model_that_answers_wrongly_when_replayed_is_walked_through(
    remembered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that see each other are found by the check of the model, and it is asked again."""
    _, replayed = pair(layout=Layout.COMPANY)
    own = replay.buffer_attention

    def mixed(queries: mx.array, *rest: Any) -> mx.array:
        out = own(queries, *rest)
        return out if queries.shape[0] == 1 else out[::-1]

    monkeypatch.setattr(replay, "buffer_attention", mixed)
    checkpoint: Any = SimpleNamespace(name="tiny", fingerprint="f")
    asked: dict[str, Any] = {"called": "", "max_batch": 2, "progress": lambda report: None}
    asked["cache_dir"] = tmp_path if remembered else None
    for target in (replayed, replaying(replayed.model, layout=Layout.COMPANY)):
        assert target.replayed
        found = refuse_untrusted(target, checkpoint, None, **asked)
        assert found is not None
        assert not found.bad
        assert not target.replayed
