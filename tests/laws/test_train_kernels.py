"""Laws of training on the CPU back end: the target's kernels teach what its own modules teach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_dspark.kernels.dispatch import install_cpu_weights
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.load import target_of
from mlx_dspark.train import step as step_module
from mlx_dspark.train.batches import Batches
from mlx_dspark.train.lessons import PlainTables, lessons
from mlx_dspark.train.product import product, use_products
from mlx_dspark.train.step import Trainee
from tests.laws.test_train import LAYERS, Answers, flat, fresh, same, settings
from tests.tiny import tiny_config, tiny_model

WAYS = ("blocks", "dense")
TAPS = (-1, 0, 2)


@pytest.fixture(autouse=True, scope="module")
def on_cpu() -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


def made(way: str | None, tmp_path_factory: pytest.TempPathFactory, **config: Any) -> DenseTarget:
    """The same target every time, its weights held in `way`, or None for MLX's own modules."""
    full = tiny_config(num_hidden_layers=LAYERS, **config)
    model = tiny_model(full)
    if way is None:
        return target_of(model, full)
    report = install_cpu_weights(model, choice=way, cache_dir=tmp_path_factory.mktemp("races"))
    return target_of(model, full, weights=report)


@pytest.fixture(scope="module", params=[False, True], ids=["head", "tied"])
def stock(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DenseTarget:
    return made(None, tmp_path_factory, tie_word_embeddings=request.param)


@pytest.fixture(scope="module", params=WAYS)
def kernels(
    request: pytest.FixtureRequest, stock: DenseTarget, tmp_path_factory: pytest.TempPathFactory
) -> DenseTarget:
    target = made(request.param, tmp_path_factory, tie_word_embeddings="lm_head" not in stock.model)
    assert not target.spec.lazy
    return target


@pytest.fixture(scope="module")
def store() -> Answers:
    rng = np.random.default_rng(2)
    sizes = rng.integers(20, 60, 100)
    return Answers([(rng.integers(3, 380, size).astype(np.uint32), 8) for size in sizes])


def close(left: mx.array, right: mx.array, share: float = 1e-4) -> bool:
    """Whether they differ by float32 rounding that a few layers have passed on."""
    assert left.shape == right.shape
    return bool((mx.abs(left - right).max() <= share * mx.abs(right).max()).item())


@pytest.mark.parametrize("width", [1, 3, 70, 300])
@pytest.mark.parametrize("rows", [1, 3])
def test_features_through_kernels_are_the_stock_ones(
    rows: int, width: int, stock: DenseTarget, kernels: DenseTarget
) -> None:
    """Whole sequences without a cache: features, and what the head makes of what enters it."""
    rng = np.random.default_rng(width)
    tokens = mx.array(rng.integers(0, 380, (rows, width), dtype=np.int32))
    wanted, hidden = stock.features(tokens, TAPS)
    features, entering = kernels.features(tokens, TAPS)
    assert close(features, wanted)
    assert close(kernels.unembed(entering), stock.unembed(hidden))


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("width", [2, 70, 300])
def test_lessons_through_kernels_are_the_stock_ones(
    width: int, reduced: bool, stock: DenseTarget, kernels: DenseTarget
) -> None:
    """Features of every position, and logits at any positions in any order, repeated ones too."""
    rng = np.random.default_rng(width)
    tokens = mx.array(rng.integers(0, 380, (3, width), dtype=np.int32))
    at = mx.array(rng.integers(0, width, (3, 5), dtype=np.int32))
    ids = mx.array([5, 9, 200, 380], dtype=mx.int32) if reduced else None
    mine, theirs = lessons(kernels, TAPS, ids), lessons(stock, TAPS, ids)
    assert type(mine) is not type(theirs)
    (features, seen), (wanted, other) = mine.taught(tokens, at), theirs.taught(tokens, at)
    assert close(features, wanted)
    assert close(mine.logits(seen), theirs.logits(other))


def test_the_teachers_order_begins_with_the_draft_vocabulary(
    stock: DenseTarget, kernels: DenseTarget
) -> None:
    ids = mx.array([5, 9, 200, 380], dtype=mx.int32)
    tokens, at = mx.array([[3, 77, 200, 9]]), mx.array([[3, 0]])
    _, hidden = stock.features(tokens, (0,))
    plain = stock.unembed(hidden[:, mx.array([3, 0])])
    for target in (stock, kernels):
        taught = lessons(target, (0,), ids)
        ordered = taught.logits(taught.taught(tokens, at)[1])
        assert close(ordered[..., :4], plain[..., ids])
        assert close(ordered[..., taught.positions(mx.arange(target.spec.vocab))], plain)
        assert taught.positions(ids).tolist() == [0, 1, 2, 3]


SHAPES: dict[str, dict[str, Any]] = {
    "reduced": {},
    "borrowed head": {"draft_vocab": None},
    "own tables": {"draft_vocab": None, "own_embedding": True, "own_head": True},
}


@pytest.mark.parametrize("spared", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_with_kernels_is_the_step_without(
    shape: str,
    spared: bool,
    stock: DenseTarget,
    kernels: DenseTarget,
    store: Answers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same start, sums and gradients, however the memory is spared.

    The variation counts nothing in these gradients: its own jumps where both distributions agree.
    """
    begun = [fresh(target, store, **SHAPES[shape]) for target in (stock, kernels)]
    assert same(begun[1].checkpoint.weights, begun[0].checkpoint.weights, 1e-3)
    if spared:
        monkeypatch.setattr(step_module, "_chunk_blocks", lambda *_: 5)
    batch = Batches(store, rows=4, width=64, anchors=3, seed=0).batch(0)
    asked = settings(gradient_checkpointing=spared, clip=1000.0, variation_weight=0.0)
    plain, mine = (Trainee(begun[0], target, asked) for target in (stock, kernels))
    assert same(flat(mine.measure(batch)._asdict()), flat(plain.measure(batch)._asdict()), 1e-3)
    assert same(flat(mine.step(batch, 1e-3)._asdict()), flat(plain.step(batch, 1e-3)._asdict()), 1e-3)
    for name, moment in plain.optimizer_state().items():
        assert close(mine.optimizer_state()[name], moment), name


@pytest.mark.parametrize("shape", SHAPES)
def test_a_compiled_step_is_the_step(shape: str, kernels: DenseTarget, store: Answers) -> None:
    """Nothing of the target is computed within it."""
    start = fresh(kernels, store, **SHAPES[shape])
    batch = Batches(store, rows=4, width=64, anchors=3, seed=0).batch(0)
    plain, fused = (Trainee(start, kernels, settings(compile=each)) for each in (False, True))
    assert same(flat(fused.step(batch, 1e-3)._asdict()), flat(plain.step(batch, 1e-3)._asdict()), 1e-4)
    assert same(fused.weights(), plain.weights(), 1e-4)


def test_borrowed_tables_are_the_targets(stock: DenseTarget, kernels: DenseTarget) -> None:
    """Gradients flow through them."""
    tables = PlainTables(kernels, embedding=True, head=True)
    ids = mx.array([[0, 5], [380, 5]])
    assert close(tables.embed(ids), stock.embed(ids))
    hidden = mx.random.normal((2, 3, stock.spec.hidden), key=mx.random.key(1))
    assert close(tables.unembed(hidden), stock.unembed(hidden))

    def gradient(target: Any) -> mx.array:
        return mx.grad(lambda x: mx.sin(target.unembed(x)).sum())(hidden)

    assert close(gradient(tables), gradient(stock))


@pytest.mark.parametrize("shape", [(1, 1, 8), (5, 8), (2, 3, 8), (2, 3, 4, 8)])
@pytest.mark.parametrize("spared", [False, True], ids=["kept", "recomputed"])
def test_products_and_their_gradients_are_mlx_own(shape: tuple[int, ...], spared: bool) -> None:
    keys = mx.random.split(mx.random.key(3), 2)
    x, weight = mx.random.normal(shape, key=keys[0]), mx.random.normal((6, 8), key=keys[1])

    def outcome(multiply: Any) -> list[mx.array]:
        run = mx.checkpoint(multiply) if spared else multiply
        both = mx.value_and_grad(lambda x, w: mx.sin(run(x, w)).sum(), argnums=(0, 1))
        value, gradients = both(x, weight)
        return [value, *gradients]

    for mine, theirs in zip(outcome(product), outcome(lambda x, w: x @ w.T), strict=True):
        assert mine.shape == theirs.shape
        assert close(mine, theirs)


@pytest.mark.parametrize("bias", [False, True])
def test_linear_modules_stay_what_they_were(bias: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=bias), nn.GELU(), nn.Linear(16, 4, bias=bias))
    x = mx.random.normal((3, 8), key=mx.random.key(0))
    before, names = model(x), flat(model.parameters()).keys()
    use_products(model)
    assert close(model(x), before)
    assert flat(model.parameters()).keys() == names
