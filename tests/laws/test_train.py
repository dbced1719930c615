"""Laws of training: its forward is what drafts, its loss is the formula, a resumed run is the same run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_dspark.contracts import Observation
from mlx_dspark.drafters.dspark.drafter import DSparkDrafter
from mlx_dspark.drafters.load import load_drafter
from mlx_dspark.engine.engine import Engine
from mlx_dspark.foundation.events import Committed
from mlx_dspark.foundation.request import GenerateRequest, SamplingParams
from mlx_dspark.foundation.settings import TrainSettings
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.load import target_of
from mlx_dspark.train import step as step_module
from mlx_dspark.train.batches import Batches
from mlx_dspark.train.checkpoint import checkpoints
from mlx_dspark.train.evaluate import evaluate
from mlx_dspark.train.export import export_drafter
from mlx_dspark.train.folder import RunFolder
from mlx_dspark.train.forward import block_states, head_logits
from mlx_dspark.train.loss import slot_terms, summed
from mlx_dspark.train.progress import Acceptance, TrainEvent, TrainProgress
from mlx_dspark.train.shape import covering_tokens, deepspec_config, default_shape, spread_taps
from mlx_dspark.train.start import Start, existing_drafter, new_drafter
from mlx_dspark.train.step import Trainee
from mlx_dspark.train.trainer import Trainer
from tests.tiny import tiny_config, tiny_llama
from tests.tiny_drafters import save_tiny_dspark

LAYERS, VOCAB = 4, 384
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 128, "head_dim": 8}
KINDS = {
    "vanilla": {},
    "gated": {"markov": "gated"},
    "rnn": {"markov": "rnn"},
    "no markov": {"markov": "none"},
    "reduced": {"draft_vocab": 96},
    "borrowed": {"own_embedding": False, "own_head": False},
    "gemma4": {"backbone": "gemma4"},
    "late slot": {"logits_start": 1},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
}


@pytest.fixture(scope="module")
def target() -> DenseTarget:
    return target_of(tiny_llama(layers=LAYERS), tiny_config(num_hidden_layers=LAYERS))


@pytest.fixture(scope="module")
def store(target: DenseTarget) -> Answers:
    return answers_of(target, temperature=0.5)


def random_prompts(vocab: int, count: int, seed: int) -> list[list[int]]:
    """Prompts of 8 tokens."""
    return np.random.default_rng(seed).integers(3, vocab, (count, 8)).tolist()


class Answers:
    """Answers in memory, as the store on disk gives them."""

    def __init__(self, answers: list[tuple[Any, int]]) -> None:
        self.answers = answers

    def __len__(self) -> int:
        return len(self.answers)

    def sequence(self, index: int) -> tuple[Any, int]:
        return self.answers[index]

    def lengths(self) -> Any:
        return np.array([(len(ids), prompt) for ids, prompt in self.answers])

    def counts(self, vocab: int) -> Any:
        return np.bincount(np.concatenate([ids[n:] for ids, n in self.answers]), minlength=vocab)


def answers_of(target: DenseTarget, temperature: float) -> Answers:
    """A hundred answers of 32 tokens, drawn by the target."""
    texts = random_prompts(target.spec.vocab, 100, seed=7)
    requests = [
        GenerateRequest(tuple(text), 32, SamplingParams(temperature=temperature, seed=i))
        for i, text in enumerate(texts)
    ]
    for row, event in Engine(target, rectangle=True).run(requests):
        if isinstance(event, Committed):
            texts[row] += event.tokens
    return Answers([(np.array(text, dtype=np.uint32), 8) for text in texts])


def settings(**given: Any) -> TrainSettings:
    small = {"steps": 6, "batch": 4, "width": 64, "anchors": 3, "checkpoint_every": 100}
    return TrainSettings.of(small | given)


def fresh(target: DenseTarget, store: Answers, *, draft_vocab: int | None = 128, **given: Any) -> Start:
    """A new drafter of rank 16."""
    spec = target.spec
    chosen = {"markov_rank": 16, "draft_vocab": draft_vocab, "own_head": draft_vocab is not None} | given
    shape = dataclasses.replace(default_shape(spec), **chosen)
    kept = None if draft_vocab is None else covering_tokens(store.counts(spec.vocab), draft_vocab)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 10000.0}
    config = deepspec_config(shape, spec, heads, spec.vocab - 1)
    sample = mx.array(store.sequence(0)[0].astype(np.int32))[None]
    return new_drafter(shape, config, kept, target, sample, seed=0)


def flat(tree: Any) -> dict[str, mx.array]:
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(tree)))


def same(left: dict[str, mx.array], right: dict[str, mx.array], tolerance: float = 0.0) -> bool:
    assert left.keys() == right.keys()
    return all(bool(mx.allclose(left[n], right[n], rtol=tolerance, atol=tolerance).item()) for n in left)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_is_the_one_that_drafts(
    kind: str, recompute: bool, target: DenseTarget, tmp_path: Path
) -> None:
    """Every block of a packed forward has the logits it has when drafted alone, Markov chain included."""
    folder = save_tiny_dspark(tmp_path, target_layers=LAYERS, **KINDS[kind])
    drafter = cast(DSparkDrafter, load_drafter(folder, quantize_bits=0, window=0))
    drafter.bind(target)
    size, positions = drafter.config.max_draft, [[0, 5, 17], [1, 24, 30]]
    texts = np.random.default_rng(5).integers(0, 380, (2, 40), dtype=np.int32)
    for row, column in ((0, 0), (0, 2), (1, 1), (1, 2)):
        at = positions[row][column]
        anchor, context = int(texts[row, at]), texts[row, :at].tolist()
        features, _ = target.features(mx.array(texts[row : row + 1]), drafter.taps)
        rows = drafter.new_rows(1)
        drafter.observe(rows, Observation([context], features, [0], [0]))
        chain = drafter.trace(rows, [anchor]).chain
        seen = texts.copy()
        seen[row, at + 1 : at + 1 + size] = np.array(chain.tokens[0])
        tokens = mx.array(seen)
        features, _ = target.features(tokens, drafter.taps)
        states = block_states(drafter, features, tokens, mx.array(positions), recompute=recompute)
        block = row * 3 + column
        mine = states[block : block + 1, drafter.config.first_slot :]
        previous = mx.concatenate([mx.array([[anchor]]), chain.tokens[:, :-1]], axis=1)
        logits, confidence = head_logits(drafter, mine, previous)
        assert mx.allclose(logits, chain.logits, atol=1e-4, rtol=1e-4)
        assert confidence is not None
        assert chain.confidence_logits is not None
        assert mx.allclose(confidence, chain.confidence_logits, atol=1e-4, rtol=1e-4)


def reference_sums(
    logits: np.ndarray,
    confidence: np.ndarray,
    target_logits: np.ndarray,
    labels: np.ndarray,
    valid: np.ndarray,
    hard: bool,
) -> dict[str, Any]:
    """The formulas of `train/loss.py`, one slot at a time in float64, decay 4."""
    blocks, width, drafted = logits.shape
    scalars = ("cross_entropy", "variation", "confidence", "weight", "blocks")
    sums: dict[str, Any] = dict.fromkeys(scalars, 0.0)
    sums |= {name: np.zeros(width) for name in ("valid", "accepted", "reached", "chained")}
    for b in range(blocks):
        reach, chain = 1.0, 1.0
        sums["blocks"] += float(valid[b, 0])
        for i in range(width):
            if not valid[b, i]:
                break
            p = np.exp(target_logits[b, i] - target_logits[b, i].max())
            p /= p.sum()
            q = np.zeros_like(p)
            q[:drafted] = np.exp(logits[b, i] - logits[b, i].max())
            q /= q.sum()
            l1, weight = np.abs(p - q).sum(), np.exp(-i / 4)
            accept = 1 - l1 / 2
            sure = 1 / (1 + np.exp(-confidence[b, i]))
            if hard:
                entropy = -np.log(q[labels[b, i]]) if labels[b, i] < drafted else 0.0
            else:
                entropy = -(p[:drafted] * np.log(q[:drafted])).sum()
            sums["cross_entropy"] += weight * entropy
            sums["variation"] += weight * l1
            sums["confidence"] -= weight * (accept * np.log(sure) + (1 - accept) * np.log(1 - sure))
            sums["weight"] += weight
            reach, chain = reach * accept, chain * float(q.argmax() == p.argmax())
            sums["valid"][i] += 1
            sums["accepted"][i] += accept
            sums["reached"][i] += reach
            sums["chained"][i] += chain
    return sums


@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
@pytest.mark.parametrize("drafted", [13, 20], ids=["reduced", "whole"])
def test_loss_is_the_formula(drafted: int, hard: bool) -> None:
    rng = np.random.default_rng(0)
    target_logits = 3 * rng.normal(size=(6, 5, 20))
    logits = target_logits[..., :drafted] + rng.normal(size=(6, 5, drafted))
    confidence, labels = rng.normal(size=(6, 5)), rng.integers(0, 20, (6, 5))
    valid = np.arange(5) < np.array([5, 3, 0, 1, 5, 4])[:, None]
    slots = slot_terms(*map(mx.array, (logits, confidence, target_logits, labels)), hard=hard)
    mine = summed(slots, mx.array(valid.tolist()), 4.0)
    wanted = reference_sums(logits, confidence, target_logits, labels, valid, hard)
    for name, value in wanted.items():
        np.testing.assert_allclose(np.array(getattr(mine, name)), value, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("markov", ["vanilla", "rnn"])
def test_neither_chunks_nor_recomputation_show(
    markov: str, target: DenseTarget, store: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step from the same start gives the same weights, however the memory is spared."""
    start = fresh(target, store, markov=markov)
    batch = Batches(store, rows=4, width=64, anchors=3, seed=0).batch(0)
    plain = Trainee(start, target, settings())
    sums = plain.step(batch, 1e-3)
    monkeypatch.setattr(step_module, "_chunk_blocks", lambda *_: 5)
    spared = Trainee(start, target, settings(gradient_checkpointing=True))
    assert same(flat(spared.step(batch, 1e-3)._asdict()), flat(sums._asdict()), 1e-4)
    assert same(spared.weights(), plain.weights(), 2e-4)


def test_only_the_drafter_learns(target: DenseTarget, store: Answers) -> None:
    """A step leaves the target alone, and a copied embedding."""
    before = {name: mx.array(weight) for name, weight in flat(target.model.parameters()).items()}
    start = fresh(target, store, draft_vocab=None, own_embedding=True)
    trainee = Trainee(start, target, settings())
    trainee.step(Batches(store, rows=4, width=64, anchors=3, seed=0).batch(0), 1e-2)
    assert same(flat(target.model.parameters()), before)
    after = trainee.weights()
    still = {name for name, old in start.checkpoint.weights.items() if bool(mx.array_equal(after[name], old))}
    assert still == {"embed_tokens.weight"}


def test_a_batch_depends_on_seed_and_step_alone(store: Answers) -> None:
    def batches(seed: int = 3) -> Batches:
        return Batches(store, rows=8, width=48, anchors=5, seed=seed)

    walked = [batch for _, batch in zip(range(20), batches().stream(0), strict=False)]
    jumped = batches()
    for step in (19, 3, 12):
        for left, right in zip(walked[step], jumped.batch(step), strict=True):
            np.testing.assert_array_equal(left, right)
    assert any((a.tokens != b.tokens).any() for a, b in zip(walked, batches(4).stream(0), strict=False))


def test_an_epoch_sees_every_sequence_once_and_anchors_lie_in_answers(store: Answers) -> None:
    batches = Batches(store, rows=7, width=48, anchors=5, seed=0)
    assert batches.sequences == 92
    assert batches.per_epoch == 13
    seen = np.concatenate([batches.batch(step).tokens for step in range(13)])
    assert len(np.unique(seen, axis=0)) == 91
    for step in range(13):
        batch = batches.batch(step)
        assert (batch.anchors >= 8).all()
        assert (batch.anchors + 1 < batch.lengths[:, None]).all()
        assert (np.diff(batch.anchors, axis=1) >= 0).all()


def test_long_prompts_leave_room_for_the_answer() -> None:
    ids = np.arange(3, 203, dtype=np.uint32)
    batch = Batches(Answers([(ids, 150)]), rows=2, width=60, anchors=4, seed=0).batch(0)
    assert batch.tokens[:, :60].tolist() == [ids[110:170].tolist()] * 2
    assert (batch.anchors >= 40).all()


def test_an_answer_too_short_for_a_block_counts_nothing(target: DenseTarget, store: Answers) -> None:
    empty = Answers([(np.arange(3, 20, dtype=np.uint32), 16)])
    batch = Batches(empty, rows=2, width=32, anchors=3, seed=0).batch(0)
    sums = Trainee(fresh(target, store), target, settings()).measure(batch)
    assert sums.weight.item() == 0
    assert sums.blocks.item() == 0


def losses(events: list[TrainEvent]) -> list[float]:
    return [loss for event in events if isinstance(event, TrainProgress) for loss in event.losses]


def stop_after(steps: int) -> Callable[[], bool]:
    """Answers yes from the question after so many steps on."""
    asked = iter(range(1000))
    return lambda: next(asked) >= steps


def test_a_resumed_run_is_the_same_run(target: DenseTarget, store: Answers, tmp_path: Path) -> None:
    """Interrupted anywhere, it has the losses and weights of the run that was not, bit for bit."""

    def run(name: str, *stops: Callable[[], bool]) -> tuple[list[float], dict[str, mx.array]]:
        folder, events, weights = RunFolder(tmp_path / name), [], {}
        for stop in stops:
            with folder.claimed({}):
                saved = checkpoints(folder.checkpoints)
                start = existing_drafter(saved[-1], target) if saved else fresh(target, store)
                trainer = Trainer(start, target, store, settings(), folder)
                trainer.run(events.append, stop)
                weights = trainer.weights()
        return losses(events), weights

    curve, weights = run("whole", lambda: False)
    parts, their_weights = run("parts", stop_after(2), stop_after(3), lambda: False)
    assert len(curve) == 6
    assert parts == curve
    assert same(their_weights, weights)


@pytest.mark.parametrize("crashed_at", [1, 3, 5])
def test_a_crash_loses_only_what_came_after_the_last_checkpoint(
    crashed_at: int, target: DenseTarget, store: Answers, tmp_path: Path
) -> None:
    """Begun again, it goes on from that checkpoint, and ends as the run that did not crash."""

    class PowerCut(Exception):
        pass

    def crash(asked: Iterator[int]) -> bool:
        if next(asked) >= crashed_at:
            raise PowerCut
        return False

    def trainer(folder: RunFolder) -> Trainer:
        saved = checkpoints(folder.checkpoints)
        start = existing_drafter(saved[-1], target) if saved else fresh(target, store)
        return Trainer(start, target, store, settings(checkpoint_every=2), folder)

    whole, cut = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "cut")
    with whole.claimed({}):
        uncut = trainer(whole)
        uncut.run()
    asked = iter(range(1000))
    with pytest.raises(PowerCut), cut.claimed({}):
        trainer(cut).run(stop=lambda: crash(asked))
    with cut.claimed({}):
        again = trainer(cut)
        assert again.state.step == crashed_at - crashed_at % 2
        events: list[TrainEvent] = []
        again.run(events.append)
    assert len(losses(events)) == 6 - (crashed_at - crashed_at % 2)
    assert same(again.weights(), uncut.weights())


def test_training_helps(tmp_path: Path) -> None:
    """On unseen prompts, in the real engine, the trained drafter has more accepted than the untrained."""
    target = target_of(
        tiny_llama(layers=2, hidden=32, vocab=SMALL["vocab_size"]), tiny_config(**SMALL, intermediate_size=64)
    )
    store = answers_of(target, temperature=1.0)
    start = fresh(target, store, draft_vocab=None, layers=1)
    prompts = random_prompts(target.spec.vocab, 64, seed=99)

    def accept_length(weights: dict[str, mx.array], name: str) -> float:
        drafter = load_drafter(export_drafter(tmp_path / name, start.config, weights), quantize_bits=0)
        drafter.bind(target)
        contents, ends = {"random": prompts}, frozenset()
        measured = evaluate(target, drafter, contents, end_ids=ends, tokens=24, temperatures=(1.0,), timed=0)
        return measured.accepted[0].length

    folder = RunFolder(tmp_path / "run")
    with folder.claimed({}):
        trainer = Trainer(start, target, store, settings(steps=80, batch=8, anchors=8), folder)
        untrained = accept_length(trainer.weights(), "untrained")
        before = Acceptance.of(trainer.trainee.measure(trainer.batches.held_out()[0]))
        trainer.run()
        after = Acceptance.of(trainer.trainee.measure(trainer.batches.held_out()[0]))
        assert after.expected_length > before.expected_length + 0.2
        assert accept_length(trainer.weights(), "trained") > untrained + 0.1


def test_taps_are_those_of_the_published_heads() -> None:
    """DeepSpec `config/dspark`: 36, 40 and 64 layers."""
    assert spread_taps(36) == (1, 9, 17, 25, 33)
    assert spread_taps(40) == (1, 10, 19, 28, 37)
    assert spread_taps(64) == (1, 16, 31, 46, 61)
    assert spread_taps(30) == (1, 7, 14, 20, 27)
    for layers in range(1, 12):
        taps = spread_taps(layers)
        assert list(taps) == sorted({*taps})
        assert -1 <= taps[0] <= taps[-1] < layers - (layers > 1)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_rounded_step_computes_with_what_is_stored(
    bits: int, target: DenseTarget, store: Answers, tmp_path: Path
) -> None:
    """Its sums are those of the exported drafter, read again; its gradients move the float32 weights."""
    start = fresh(target, store)
    batch = Batches(store, rows=4, width=64, anchors=3, seed=0).batch(0)
    trainee = Trainee(start, target, settings(bits=bits))
    stored = existing_drafter(
        export_drafter(tmp_path / "stored", start.config, trainee.weights() | d2t_of(start), bits=bits),
        target,
    )
    again = Trainee(stored, target, settings())
    assert same(flat(trainee.measure(batch)._asdict()), flat(again.measure(batch)._asdict()), 1e-4)
    before = trainee.weights()
    sums = trainee.step(batch, 1e-3, rounded=True)
    assert same(flat(sums._asdict()), flat(again.step(batch, 1e-3)._asdict()), 1e-4)
    moved, theirs = trainee.weights(), again.weights()
    for name, weight in stored.checkpoint.weights.items():
        apart = cast(float, mx.abs(moved[name] - before[name] - (theirs[name] - weight)).mean().item())
        assert apart < 0.05 * 1e-3, f"{name}: Adam's first step is the gradient's sign times the rate"


def d2t_of(start: Start) -> dict[str, mx.array]:
    return {} if start.checkpoint.d2t is None else {"d2t": start.checkpoint.d2t.astype(mx.int64)}
