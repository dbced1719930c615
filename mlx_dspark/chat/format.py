"""One model's way of writing conversations: rendered into prompts, and read out of answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from mlx_dspark.chat.channels import ChannelParser
from mlx_dspark.chat.detokenize import TextDecoder
from mlx_dspark.chat.facts import EFFORT_NAMES, THINKING_NAMES, efforts_of, names_in, nearest_effort
from mlx_dspark.chat.layouts import Layout, State, layout_of
from mlx_dspark.chat.messages import check_conversation, template_messages, template_tools
from mlx_dspark.chat.template import apply_template
from mlx_dspark.foundation.chat import Conversation
from mlx_dspark.foundation.errors import RequestError


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as token ids, and the state in which the answer begins.

    `ignored` names the fields of the conversation that this model's template has no place for.
    """

    ids: tuple[int, ...]
    state: State = "text"
    ignored: tuple[str, ...] = ()

    @property
    def opens(self) -> Literal["text", "reasoning"]:
        """The channel that the prompt leaves open."""
        return "reasoning" if self.state == "reasoning" else "text"


class ChatFormat:
    """Renders conversations for one tokenizer, and makes the parsers of their answers.

    `decoder` gives an answer's text with the marks that a parser reads, where plain decoding leaves them out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.template = _source(tokenizer)
        self.layout: Layout = layout_of(self.template, _added(tokenizer))
        self.decoder = TextDecoder(tokenizer)

    @cached_property
    def efforts(self) -> tuple[str, ...]:
        """The efforts that the template tells apart, from least to most; empty where it has none."""
        names = names_in(self.template, EFFORT_NAMES)
        return efforts_of(self.template, names[0], self._probe) if names else ()

    @cached_property
    def thinks(self) -> bool:
        """Whether the model reasons in marks that are known here."""
        return bool(self.layout.marks)

    def render(self, conversation: Conversation) -> ChatPrompt:
        """The conversation up to where the assistant answers.

        Raises RequestError naming the field that cannot be rendered, and BadCheckpoint where the model's
        template is not Jinja.
        """
        check_conversation(conversation)
        variables, ignored = self._variables(conversation)
        messages = template_messages(conversation.turns)
        tools = template_tools(conversation.callable)
        text = apply_template(self._tokenizer, messages, tools, variables, tokenize=False)
        ids = apply_template(self._tokenizer, messages, tools, variables, tokenize=True)
        assert isinstance(text, str)
        return ChatPrompt(tuple(ids), self._state(text), ignored)

    def parser(self, prompt: ChatPrompt, conversation: Conversation) -> ChannelParser:
        """Reads the answer to a prompt that was rendered from the conversation."""
        return ChannelParser(self.layout, prompt.state)

    def _state(self, text: str) -> State:
        return (
            "reasoning"
            if self.layout.opener and text.rstrip().endswith(self.layout.opener.rstrip())
            else "text"
        )

    def _variables(self, conversation: Conversation) -> tuple[dict[str, Any], tuple[str, ...]]:
        variables = dict(conversation.template_kwargs)
        ignored: list[str] = []
        if conversation.thinking is not None:
            names = names_in(self.template, THINKING_NAMES)
            variables |= dict.fromkeys(names, conversation.thinking)
            if not names:
                ignored.append("thinking")
        if conversation.effort is not None:
            names = names_in(self.template, EFFORT_NAMES)
            if self.efforts:
                variables |= dict.fromkeys(names, nearest_effort(conversation.effort, self.efforts))
            else:
                ignored.append("effort")
        return variables, tuple(ignored)

    def _probe(self, variables: Mapping[str, Any]) -> str | None:
        try:
            text = apply_template(
                self._tokenizer, [{"role": "user", "content": "?"}], None, variables, tokenize=False
            )
        except RequestError:
            return None
        return str(text)


def _source(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("default") or next(iter(template.values()), "")
    return template if isinstance(template, str) else ""


def _added(tokenizer: Any) -> frozenset[str]:
    """The vocabulary entries that are whole tokens in any text."""
    return frozenset(getattr(tokenizer, "get_added_vocab", dict)())
