"""From a prompt or a conversation to token ids, through the model's chat template or as raw text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlx_dspark.foundation.errors import BadCheckpoint, EmptyPrompt, RequestError
from mlx_dspark.foundation.numbers import brief, is_whole

_CALLED = {"prompt": "The prompt", "system": "The system message", "messages": "The role of a message"}
_SURROGATE = re.compile("[\ud800-\udfff]")
_TEMPLATE_FAULTS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What the Python code that a template's expressions amount to may raise, beside Jinja's own errors."""


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str


Prompt = str | Sequence[Message] | Sequence[tuple[str, str]] | Sequence[Mapping[str, str]]
"""One user turn, or a whole conversation as messages, pairs of role and content, or role-content mappings."""


def conversation(prompt: Prompt, system: str | None = None) -> list[Message]:
    """The messages of a prompt, `system` ahead of them.

    Raises RequestError naming the message that is not one, and EmptyPrompt when there is nothing to answer.
    """
    _check_kind(prompt)
    messages = (
        [Message("user", prompt)]
        if isinstance(prompt, str)
        else [_message(i, m) for i, m in enumerate(prompt)]
    )
    if not messages or not any(message.content.strip() for message in messages):
        raise EmptyPrompt("The prompt is empty.", "Give some text to answer.", field="prompt")
    for message in messages:
        _check_text(message.content)
        _check_text(message.role, "messages")
    if system is None:
        return messages
    _check_text(system, "system")
    if messages[0].role == "system":
        raise RequestError(
            "system is given, and messages begins with a system message too.",
            "Keep one of the two.",
            field="system",
        )
    return [Message("system", system), *messages]


def check_prompt(prompt: str, system: str | None = None, *, chat_template: bool = True) -> None:
    """What can be refused about one prompt before a model is loaded. Raises EmptyPrompt or RequestError."""
    _check_text(prompt)
    _check_text(system or "", "system")
    if chat_template:
        conversation(prompt, system)


def has_template(tokenizer: Any) -> bool:
    """Whether the model came with a chat template."""
    return bool(getattr(tokenizer, "chat_template", None) or getattr(tokenizer, "has_chat_template", False))


def render(tokenizer: Any, messages: Sequence[Message]) -> tuple[int, ...]:
    """Token ids of a conversation, up to where the assistant answers. Raises as `apply_template` does."""
    ids = apply_template(tokenizer, [message._asdict() for message in messages])
    return tuple(int(token) for token in ids)


def apply_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    *,
    tokenize: bool = True,
) -> Any:
    """The messages through the model's template, as token ids or as text; `variables` are the template's.

    Raises RequestError when the model has no template, or its template refuses the messages; BadCheckpoint
    when the template is not Jinja.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    if not has_template(tokenizer):
        raise RequestError(
            "The model has no chat template, so messages cannot be laid out for it.",
            "Give one prompt as raw text (--no-chat-template), or choose a chat model.",
            field="messages",
        )
    more = dict(variables or {}) | ({"tools": list(tools)} if tools else {})
    try:
        return tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=tokenize, return_dict=False, **more
        )
    except TemplateSyntaxError as error:
        raise BadCheckpoint(
            f"The chat template in {_template_file(tokenizer)} is not valid Jinja: line {error.lineno}: "
            f"{str(error.message).rstrip('.')}.",
            "Correct the file, or continue raw text (--no-chat-template).",
        ) from error
    except (TemplateError, *_TEMPLATE_FAULTS) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise RequestError(
            f"The chat template in {_template_file(tokenizer)} refuses these messages: {reason}.",
            _next_step(messages),
            field="messages",
        ) from error


def _next_step(messages: Sequence[Mapping[str, Any]]) -> str:
    """What to change about messages that a template refuses: where it refuses a lone prompt, the template."""
    roles = [message.get("role") for message in messages]
    if roles == ["user"]:
        return "Correct the file, or continue raw text (--no-chat-template)."
    if roles == ["system", "user"]:
        return "The model may know no system message: leave it out, and begin the prompt with it."
    return "Use the roles and the order that the model knows, such as user and assistant by turns."


def _template_file(tokenizer: Any) -> str:
    """Where the chat template was read from, as well as the tokenizer can tell."""
    home = Path(str(getattr(tokenizer, "name_or_path", "") or "the model"))
    files = [home / "chat_template.jinja", home / "tokenizer_config.json"]
    return str(next((file for file in files if file.is_file()), home))


def encode_text(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of raw text, with the begin-of-sequence token where the tokenizer puts one.

    Raises EmptyPrompt.
    """
    if not text:
        raise EmptyPrompt("The prompt is empty.", "Give some text to continue.", field="prompt")
    _check_text(text)
    begin = getattr(tokenizer, "bos_token", None)
    own_begin = begin is not None and text.startswith(begin)
    return tuple(int(token) for token in tokenizer.encode(text, add_special_tokens=not own_begin))


def encode_prompt(
    tokenizer: Any, prompt: Prompt, *, system: str | None = None, chat_template: bool = True
) -> tuple[int, ...]:
    """Token ids of a prompt.

    With `chat_template`, a prompt or a conversation goes through the model's template; a plain prompt for a
    model that has none is raw text, as with `chat_template=False`. Raw text takes no system message and no
    conversation.

    Raises EmptyPrompt, or RequestError naming what cannot be done.
    """
    _check_kind(prompt)
    templated = chat_template and (has_template(tokenizer) or not isinstance(prompt, str))
    if templated:
        return render(tokenizer, conversation(prompt, system))
    for field, given in (("system", system is not None), ("messages", not isinstance(prompt, str))):
        if given:
            raise RequestError(
                f"{field} is given, and raw text has no place for it.",
                "Use a model with a chat template, and leave the template on.",
                field=field,
            )
    assert isinstance(prompt, str)
    return encode_text(tokenizer, prompt)


def _message(index: int, given: Any) -> Message:
    if isinstance(given, Mapping):
        if set(given) != {"role", "content"}:
            raise _no_message(index, given)
        given = (given["role"], given["content"])
    if (
        not isinstance(given, tuple | list)
        or len(given) != 2
        or not all(isinstance(part, str) for part in given)
    ):
        raise _no_message(index, given)
    return Message(*given)


def _check_kind(prompt: object) -> None:
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise RequestError(
            f"prompt is {brief(prompt)}, neither text nor a list of messages.",
            "Give a text, or messages of a role and a content.",
            field="prompt",
        )
    if not isinstance(prompt, str) and prompt and all(map(is_whole, prompt)):
        raise RequestError(
            f"prompt is {brief(prompt)}, which looks like token ids, and those are not taken.",
            "Give the text itself, such as the model's tokenizer.decode makes of them.",
            field="prompt",
        )


def is_text(text: str) -> bool:
    """Whether text is valid Unicode, which can be written as UTF-8."""
    return _SURROGATE.search(text) is None


def _check_text(text: str, field: str = "prompt") -> None:
    if not is_text(text):
        raise RequestError(
            f"{_CALLED.get(field, field)} holds bytes that are not valid UTF-8.",
            "Give it as UTF-8 text.",
            field=field,
        )


def _no_message(index: int, given: object) -> RequestError:
    return RequestError(
        f"messages[{index}] is {brief(given)}, and not a message.",
        "Give its role and its content, both as text, such as ('user', 'Hello').",
        field="messages",
    )
