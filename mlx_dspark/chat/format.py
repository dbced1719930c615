"""One model's way of writing conversations: rendered into prompts, and read out of answers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from mlx_dspark.chat.channels import ChannelParser
from mlx_dspark.chat.detokenize import TextDecoder
from mlx_dspark.chat.facts import TemplateFacts, nearest_effort
from mlx_dspark.chat.family_turns import family_messages
from mlx_dspark.chat.flat_tools import flattened
from mlx_dspark.chat.grammars import grammar_of
from mlx_dspark.chat.grammars.hermes import HERMES
from mlx_dspark.chat.headers import state_after
from mlx_dspark.chat.layouts import PLAIN, State, layout_of
from mlx_dspark.chat.messages import check_conversation, template_tools, thinking_asked
from mlx_dspark.chat.template import apply_template
from mlx_dspark.compat.control_tokens import can_sanitize
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

    `facts` says what the template knows, `layout` how the model marks its reasoning, `grammar` how it calls
    tools. `decoder` gives an answer's text with the marks of both, where plain decoding leaves some of them
    out: a parser must be fed from it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.facts = TemplateFacts(tokenizer)
        added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
        self.layout = layout_of(self.facts.source, added)
        native = grammar_of(tokenizer, self.facts.source, added) if self.facts.knows_tools else None
        self.grammar = native or HERMES
        marks = (*self.layout.marks, *self.grammar.openers, *self.grammar.marks)
        shown = [token for text, token in added.items() if any(text in mark for mark in marks)]
        self.decoder = TextDecoder(tokenizer, shown)

    def render(self, conversation: Conversation) -> ChatPrompt:
        """The conversation up to where the assistant answers.

        Raises RequestError naming the field that cannot be rendered, and BadCheckpoint where the model's
        template is not Jinja.
        """
        check_conversation(conversation)
        variables, ignored = self._variables(conversation)
        text, ids = self._applied(conversation, variables)
        state = state_after(self.layout, text)
        if thinking_asked(conversation) is False:
            more = self._without_reasoning(state, tools=bool(conversation.callable))
            if more:
                ids = (*self._unbroken(ids), *self.encode(more))
                state = "text"
            elif state != "text":
                ignored = (*ignored, "thinking")
        return ChatPrompt(ids, state, ignored)

    def parser(self, prompt: ChatPrompt, conversation: Conversation) -> ChannelParser:
        """Reads the answer to a prompt that was rendered from the conversation."""
        schemas = {tool.name: tool.parameters for tool in conversation.callable}
        return ChannelParser(self.layout, prompt.state, self.grammar, schemas)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of text that follows a prompt; marks in it are marks."""
        return tuple(int(token) for token in self._tokenizer.encode(text, add_special_tokens=False))

    def _applied(self, conversation: Conversation, variables: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
        """The rendered text and its ids, of the first form of the conversation that the template takes."""
        turns, tools = conversation.turns, conversation.shown
        if not self.facts.knows_tools:
            turns, tools = flattened(turns, tools), ()
        declared = template_tools(tools)
        refusal: RequestError | None = None
        for messages in family_messages(self.facts.source, turns):
            try:
                text = apply_template(self._tokenizer, messages, declared, variables, tokenize=False)
            except RequestError as error:
                refusal = refusal or error
            else:
                ids = self._ids(messages, declared, variables)
                return str(text), tuple(int(token) for token in ids)
        assert refusal is not None
        raise refusal

    def _ids(
        self, messages: Sequence[Any], tools: Sequence[Any] | None, variables: dict[str, Any]
    ) -> Sequence[int]:
        """The ids; control tokens are those that the template writes, and in what was said they are text,
        where the tokenizer can tell them apart."""
        if self.facts.source and can_sanitize():
            with suppress(RequestError):
                apart = variables | {"sanitize_control_tokens": True}
                return apply_template(self._tokenizer, messages, tools, apart)
        return apply_template(self._tokenizer, messages, tools, variables)

    def _variables(self, conversation: Conversation) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The template's variables, and the fields that no variable stands for."""
        variables = dict(conversation.template_kwargs)
        ignored = [f"chat_template_kwargs.{name}" for name in self.facts.unread(tuple(variables))]
        if conversation.thinking_budget and not self.facts.unread(("thinking_budget",)):
            variables["thinking_budget"] = conversation.thinking_budget
        elif conversation.thinking_budget and self.layout is PLAIN:
            ignored.append("thinking_budget")
        thinking, effort = thinking_asked(conversation), conversation.effort
        if thinking is not None:
            variables |= dict.fromkeys(self.facts.switches, thinking)
            if thinking and self.layout is PLAIN and not (self.facts.switches or self.facts.efforts):
                ignored.append("thinking")
        if effort is not None and self.facts.efforts:
            nearest = nearest_effort(effort, self.facts.efforts)
            variables |= dict.fromkeys(self.facts.effort_names, nearest)
        elif effort not in (None, "none"):
            ignored.append("effort")
        return variables, tuple(ignored)

    def _without_reasoning(self, state: State, *, tools: bool) -> str:
        """What ends the reasoning that a prompt leaves open, or that the model would begin by itself.

        Where an answer is made of messages, tools are called in messages of their own, so that none can be
        begun for a model that is to choose.
        """
        layout, source = self.layout, self.facts.source
        if state == "reasoning":
            return layout.skip.removeprefix(layout.opener)
        if state == "header":
            return "" if tools else layout.skip
        unasked = not self.facts.switches and (layout.opener.strip() in source or layout.closer in source)
        return layout.skip if layout.opener and unasked else ""

    def _unbroken(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The ids without a line break at their end."""
        last = self._tokenizer.decode(list(ids[-1:]))
        return ids[:-1] if last and not last.strip("\n") else ids
