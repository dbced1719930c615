"""One training step: the frozen target's features, the loss, its gradient, AdamW."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlx_dspark.drafters.dspark.drafter import DSparkDrafter, build_model
from mlx_dspark.foundation.settings import TrainSettings
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.train.batches import Batch
from mlx_dspark.train.export import rounded
from mlx_dspark.train.forward import block_states, head_logits, picked, recomputed
from mlx_dspark.train.lessons import PlainTables, lessons
from mlx_dspark.train.loss import LossWeights, Sums, slot_terms, summed
from mlx_dspark.train.product import use_products
from mlx_dspark.train.start import Start
from mlx_dspark.train.target import memory_bytes

BETAS = (0.9, 0.95)
LOGIT_SHARE = 1 / 32
"""Of the memory, for the float32 logits of one chunk of blocks; several such arrays are alive at a time."""

Parameters = dict[str, Any]


class Trainee:
    """A drafter in training: float32 master weights, optimizer state, the drafter that computes with them.

    The drafter computes in `dtype`: float32 on the CPU, else bfloat16. Its tables that are copies of the
    target's embedding stay as they are, as DeepSpec keeps them. A step may compute with the weights as they
    will be stored in `bits` bits, with gradients as if they had not been rounded (the straight-through
    estimator of Bengio et al. 2013); measurements then do so always.
    """

    def __init__(self, start: Start, target: DenseTarget, settings: TrainSettings) -> None:
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        self.dtype = mx.float32 if on_cpu else mx.bfloat16
        fused = settings.compile if settings.compile is not None else mx.metal.is_available() and not on_cpu
        self.config = start.checkpoint.config
        model = build_model(start.checkpoint, window=0)
        model.load_weights(list(start.checkpoint.weights.items()))
        self.drafter = DSparkDrafter(self.config, model, self.dtype, d2t=start.checkpoint.d2t)
        self.drafter.bind(target if target.spec.lazy else self._plain_tables(target, fused))
        if on_cpu:
            use_products(model)
        if self.config.own_embedding:
            model.embed_tokens.freeze()
            model.embed_tokens.weight = model.embed_tokens.weight.astype(self.dtype)
        self.parameters: Parameters = model.trainable_parameters()
        self.optimizer = optim.AdamW(
            settings.learning_rate or 0.0,
            betas=list(BETAS),
            weight_decay=settings.weight_decay,
            bias_correction=True,
        )
        self.optimizer.init(self.parameters)
        self._lessons = lessons(target, self.config.taps, self.drafter.vocab.ids)
        self.loss_weights = LossWeights(
            settings.cross_entropy_weight,
            settings.variation_weight,
            settings.confidence_weight if self.config.confidence else 0.0,
            settings.decay,
            hard=settings.labels == "hard",
        )
        self._clip = settings.clip
        self._recompute = settings.gradient_checkpointing
        self._chunk = _chunk_blocks(self.config.max_draft, self.config.vocab + self.config.draft_vocab)
        self._bits = settings.bits
        updates = {bits: partial(self._updated, bits) for bits in {0, self._bits}}
        self._updates = {bits: mx.compile(each) if fused else each for bits, each in updates.items()}
        self._measure = mx.compile(self._measured) if fused else self._measured

    def taught(self, batch: Batch) -> tuple[mx.array, mx.array]:
        """What the target has to say: features, and what its logits before every draft come from."""
        last = batch.tokens.shape[1] - 1
        at = mx.minimum(_slots(mx.array(batch.anchors), self.config.max_draft), last)
        return self._lessons.taught(mx.array(batch.tokens), at)

    def step(self, batch: Batch, learning_rate: float, *, rounded: bool = False) -> Sums:
        """Change the weights by one step, without waiting for it; returns what the batch gave before.

        `rounded` computes with the weights as they will be stored.
        """
        tokens, lengths, anchors = (mx.array(part) for part in batch)
        state = (self.parameters, self.optimizer.state, mx.array(learning_rate))
        self.parameters, self.optimizer.state, sums = self._updates[self._bits if rounded else 0](
            *state, *self.taught(batch), tokens, lengths, anchors
        )
        mx.async_eval(self.parameters, self.optimizer.state, sums)
        return Sums(*sums)

    def measure(self, batch: Batch) -> Sums:
        """What the batch gives with the weights as they are."""
        tokens, lengths, anchors = (mx.array(part) for part in batch)
        sums = self._measure(self.parameters, *self.taught(batch), tokens, lengths, anchors)
        mx.eval(sums)
        return Sums(*sums)

    def weights(self) -> dict[str, mx.array]:
        """Every weight by its name in files, float32 but for a copied embedding."""
        flat = cast(dict[str, mx.array], tree_flatten(self.parameters, destination={}))
        if self.config.own_embedding:
            flat["embed_tokens.weight"] = self.drafter.model.embed_tokens.weight
        return flat

    def optimizer_state(self) -> dict[str, mx.array]:
        """The optimizer's state, flat."""
        return cast(dict[str, mx.array], tree_flatten(self.optimizer.state, destination={}))

    def restore(self, weights: dict[str, mx.array], optimizer_state: dict[str, mx.array]) -> None:
        """Go on from what `weights` and `optimizer_state` returned."""
        self.parameters = _refilled(self.parameters, weights)
        self.optimizer.state = _refilled(self.optimizer.state, optimizer_state)

    def _updated(
        self,
        bits: int,
        parameters: Parameters,
        optimizer_state: dict[str, Any],
        learning_rate: mx.array,
        *data: mx.array,
    ) -> tuple[Parameters, dict[str, Any], tuple[mx.array, ...]]:
        def objective(parameters: Parameters) -> tuple[mx.array, tuple[mx.array, ...]]:
            sums = self._sums(bits, parameters, *data)
            return sums.loss(self.loss_weights), tuple(sums)

        (_, sums), gradients = mx.value_and_grad(objective)(parameters)
        gradients, _ = optim.clip_grad_norm(gradients, self._clip)
        self.optimizer.state = optimizer_state
        self.optimizer.learning_rate = learning_rate
        parameters = self.optimizer.apply_gradients(gradients, parameters)
        return parameters, self.optimizer.state, sums

    def _measured(self, parameters: Parameters, *data: mx.array) -> tuple[mx.array, ...]:
        return tuple(self._sums(self._bits, parameters, *data))

    def _sums(
        self,
        bits: int,
        parameters: Parameters,
        features: mx.array,
        seen: mx.array,
        tokens: mx.array,
        lengths: mx.array,
        anchors: mx.array,
    ) -> Sums:
        """The loss's parts over all blocks, chunk by chunk."""
        self._place(parameters, bits)
        states = block_states(self.drafter, features, tokens, anchors, recompute=self._recompute)
        states = states[:, self.config.first_slot :]
        at = _slots(anchors, self.config.max_draft)
        last = tokens.shape[1] - 1
        here, there = mx.minimum(at, last), mx.minimum(at + 1, last)
        valid = at + 1 < lengths[:, None]
        taken = (seen, picked(tokens, here), picked(tokens, there), valid)
        given = [part.reshape(*states.shape[:2], *part.shape[2:]) for part in taken]
        if states.shape[0] <= self._chunk:
            return self._chunk_sums(states, *given)
        total: Sums | None = None
        for begin in range(0, states.shape[0], self._chunk):
            sums = self._spared_sums(*(part[begin : begin + self._chunk] for part in (states, *given)))
            total = sums if total is None else total.plus(sums)
        assert total is not None
        return total

    def _spared_sums(self, states: mx.array, *given: mx.array) -> Sums:
        """As `_chunk_sums`, which it computes again for the gradient in place of keeping the logits."""
        return Sums(
            *recomputed(self._heads(), lambda states: tuple(self._chunk_sums(states, *given)))(states)
        )

    def _chunk_sums(
        self, states: mx.array, seen: mx.array, previous: mx.array, true: mx.array, valid: mx.array
    ) -> Sums:
        logits, confidence = head_logits(self.drafter, states, previous)
        slots = slot_terms(
            logits,
            confidence,
            self._lessons.logits(seen),
            self._lessons.positions(true),
            hard=self.loss_weights.hard,
        )
        return summed(slots, valid, self.loss_weights.decay)

    def _plain_tables(self, target: DenseTarget, fused: bool) -> PlainTables:
        """Of a target that computes as it goes, the borrowed tables that must not."""
        config = self.config
        return PlainTables(
            target,
            embedding=fused and not config.own_embedding,
            head=not config.own_head and not config.tied,
        )

    def _heads(self) -> list[Any]:
        model = self.drafter.model
        names = ("lm_head", "markov_head", "confidence_head")
        return [model[name] for name in names if name in model]

    def _place(self, parameters: Parameters, bits: int) -> None:
        def placed(weight: mx.array) -> mx.array:
            if bits:
                weight = weight + mx.stop_gradient(rounded(weight, bits) - weight)
            return weight.astype(self.dtype)

        self.drafter.model.update(tree_map(placed, parameters))


def _slots(anchors: mx.array, drafts: int) -> mx.array:
    """The positions before each draft of blocks at `anchors` `[rows, n]`: `[rows, n * drafts]`."""
    return (anchors[:, :, None] + mx.arange(drafts)).flatten(1)


def _refilled(tree: dict[str, Any], arrays: dict[str, mx.array]) -> dict[str, Any]:
    """`tree` with other arrays in the same order, in which the gradient's norm is summed."""
    names = [name for name, _ in cast(list[tuple[str, mx.array]], tree_flatten(tree))]
    return cast(dict[str, Any], tree_unflatten([(name, arrays[name]) for name in names]))


def _chunk_blocks(width: int, logits: int) -> int:
    """Blocks whose draft and target logits, `logits` a slot together, fit the share of memory."""
    return max(1, int(LOGIT_SHARE * memory_bytes() / (4 * width * logits)))
