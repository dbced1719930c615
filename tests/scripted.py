"""A model that answers what a test tells it to, behind the real engine: conversations in, given text out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
from transformers import PreTrainedTokenizerFast

from mlx_dspark.contracts import Forward, Logits, TargetSpec
from mlx_dspark.drafters.lookup.drafter import LookupDrafter
from mlx_dspark.engine.scheduler import Scheduler
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.session.session import Session
from mlx_dspark.state.base import LayerCapture, Span
from mlx_dspark.state.rows import RowStates
from tests.tiny import EOS_IDS, IM_END, VOCAB, tiny_tokenizer

Script = Callable[[str], str]
"""From the text of a prompt to the text of its answer."""

ANSWERS, NO_THINKING = "<|im_start|>assistant\n", "<think>\n\n</think>\n\n"
TEMPLATE = (
    "{%- macro said(m) %}{{ m.content }}{% endmacro %}"
    "{%- set first = messages[0].content if messages[0].role == 'system' else '' %}"
    "{%- if first or tools %}<|im_start|>system\n{{ first }}"
    "{% if tools %}{{ '\n' }}# Tools\n<tools>{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}"
    "{{ '\n' }}</tools>\n"
    'Call with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>{% endif %}<|im_end|>\n{% endif %}'
    "{%- for m in messages %}{% if m.role == 'system' and loop.first %}{% continue %}{% endif %}"
    "{%- if m.role == 'system' %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{%- if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ said(m) }}\n</tool_response><|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ said(m) }}"
    "{% for call in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ said(m) }}<|im_end|>\n{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
"""ChatML with tools as Hermes has them, and reasoning that can be switched off, as Qwen3 has it."""


def scripted_tokenizer(context: int = 400_000) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with a template that knows tools and thinking."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.model_max_length = context
    return tokenizer


class Heard:
    """One layer's memory: the tokens themselves."""

    def __init__(self, n: int = 1) -> None:
        self.rows: list[list[int]] = [[] for _ in range(n)]
        self._open: deque[list[list[int]]] = deque()

    def begin(self, span: Span) -> None:
        self._open.append([[] for _ in self.rows])

    def write(self, tokens: list[list[int]]) -> list[list[int]]:
        """The positions of the newest transaction; gives what each row held before them."""
        before = [
            [*row, *(token for each in self._open for token in each[r])] for r, row in enumerate(self.rows)
        ]
        self._open[-1] = tokens
        return before

    def commit(self, keep: Sequence[int]) -> None:
        for row, written, kept in zip(self.rows, self._open.popleft(), keep, strict=True):
            row += written[:kept]

    def rollback(self) -> None:
        self._open.clear()

    def join(self, other: Heard) -> None:
        self.rows += other.rows

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def replace(self, rows: Sequence[int], other: Heard) -> None:
        for row, heard in zip(rows, other.rows, strict=True):
            self.rows[row] = heard

    def capture(self, row: int, depth: int) -> LayerCapture:
        return LayerCapture((mx.array(self.rows[row][:depth]),), depth)

    def restore(self, row: int, capture: LayerCapture, to: int) -> None:
        held: Any = capture.arrays[0].tolist()
        self.rows[row] = held[:to]

    def rewindable(self, depth: int, to: int) -> int:
        return min(depth, to)

    def arrays(self) -> list[mx.array]:
        return []


class ScriptedTarget:
    """Its arg-max after a prompt is the script's answer, and then the end of the turn; after anything that is
    no beginning of the answer, the end of the turn."""

    def __init__(self, script: Script, tokenizer: Any, context: int = 400_000) -> None:
        self.spec = TargetSpec("scripted", VOCAB, hidden=1, layers=1, context=context, lazy=False)
        self._tokenizer = tokenizer
        self._mark, self._closed = self._encoded(ANSWERS), self._encoded(NO_THINKING)
        self._end = tokenizer.convert_tokens_to_ids(IM_END)
        self._answer = lru_cache(maxsize=64)(lambda prompt: self._encoded(script(tokenizer.decode(prompt))))

    def new_rows(self, n: int = 1, *, rectangle: bool = False) -> RowStates:
        return RowStates([Heard(n)], n)

    def forward(
        self,
        tokens: mx.array,
        rows: RowStates,
        *,
        taps: tuple[int, ...] = (),
        logits: Logits | mx.array = Logits.ALL,
    ) -> Forward:
        assert not taps
        fed: Any = tokens.tolist()
        heard: Any = rows.layers[0]
        before = heard.write(fed)
        if logits is Logits.NONE:
            return Forward(None, None)
        width = tokens.shape[1]
        places: Any = {Logits.ALL: [range(width)] * len(fed), Logits.LAST: [[width - 1]] * len(fed)}
        wanted: Any = logits.tolist() if isinstance(logits, mx.array) else places[logits]
        following = [
            [self._next([*old, *new[: at + 1]]) for at in row]
            for old, new, row in zip(before, fed, wanted, strict=True)
        ]
        return Forward(10.0 * (mx.array(following)[:, :, None] == mx.arange(VOCAB)), None)

    def embed(self, tokens: mx.array) -> mx.array:
        raise NotImplementedError("a script has no embedding")

    def unembed(self, hidden: mx.array) -> mx.array:
        raise NotImplementedError("a script has no head")

    def _encoded(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _next(self, heard: list[int]) -> int:
        """Answers hold no mark of a turn, so the last one ends the prompt."""
        for at in range(len(heard) - len(self._mark), -1, -1):
            if tuple(heard[at : at + len(self._mark)]) == self._mark:
                begun = at + len(self._mark)
                if tuple(heard[begun : begun + len(self._closed)]) == self._closed:
                    begun += len(self._closed)
                answer, said = (*self._answer(tuple(heard[:begun])), self._end), tuple(heard[begun:])
                matches = len(said) < len(answer) and answer[: len(said)] == said
                return answer[len(said)] if matches else self._end
        return self._end


def scripted_session(script: Script, *, rows: int = 4, context: int = 400_000) -> Session:
    """A session whose model follows the script, drafted by prompt lookup."""
    tokenizer = scripted_tokenizer(context)
    target = ScriptedTarget(script, tokenizer, context)
    caps = FixedCaps({"lookup": 6})
    scheduler = Scheduler(target, LookupDrafter(), cap=caps, max_rows=rows, prefill_chunk=4096)
    return Session(scheduler, tokenizer, end_ids=EOS_IDS, mode="lookup", name="scripted", context=context)
