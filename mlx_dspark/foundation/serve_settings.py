"""The knobs of the server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from mlx_dspark.foundation.chat import EFFORTS
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.knobs import (
    About,
    Choice,
    Number,
    Seconds,
    Settings,
    Switch,
    Texts,
    Whole,
    Words,
)

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

Logged = Literal["off", "requests", "prompts"]

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
_HOST_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_KEY = re.compile(r"[\x21-\x7e]+")


DEFAULT_URL = "http://127.0.0.1:8080"
_URL = re.compile(r"https?://[^/\s?#]+")


class Address(Words):
    """The address of a server, without a path."""

    def __init__(self) -> None:
        super().__init__(f"an address such as {DEFAULT_URL}, without a path")

    def accepts(self, value: Any) -> bool:
        return isinstance(value, str) and _URL.fullmatch(value.rstrip("/")) is not None


class OptionalAddress(Address):
    """The address of a server; None means "not set"."""

    def accepts(self, value: Any) -> bool:
        return value is None or super().accepts(value)


class Secret(Words):
    """A text that no message shows."""

    secret = True

    def __init__(self) -> None:
        super().__init__("a key of visible ASCII characters, without spaces")

    def accepts(self, value: Any) -> bool:
        return value is None or (isinstance(value, str) and _KEY.fullmatch(value) is not None)

    def shown(self, value: Any) -> str:
        return "not one that can be sent"


class _Listed(Texts):
    """Texts of one form."""

    def __init__(self, form: re.Pattern[str], want: str) -> None:
        self._form, self._want = form, want

    @property
    def want(self) -> str:
        return self._want

    def accepts(self, value: Any) -> bool:
        texts = [value] if isinstance(value, str) else value
        return super().accepts(value) and all(self._form.fullmatch(text) for text in texts)

    def shown(self, value: Any) -> str:
        texts = value if isinstance(value, list | tuple) else [value]
        strange = (text for text in texts if not isinstance(text, str) or not self._form.fullmatch(text))
        return super().shown(next(strange, value))


@dataclass(frozen=True)
class ServeSettings(Settings):
    """What is decided when the server is started."""

    group = "Server"

    host: Annotated[
        str,
        About(
            Words("an address or a name of this machine"),
            "Where to listen; anything but this machine's own loopback lets others in.",
        ),
    ] = "127.0.0.1"
    port: Annotated[int, About(Whole(0, 65535), "The port. 0: any free one.")] = 8080
    api_key: Annotated[
        str | None,
        About(
            Secret(),
            "Ask every route but GET /health for this key, as a bearer token or as x-api-key. In the "
            "environment it is hidden from the list of processes.",
        ),
    ] = None
    allow_host: Annotated[
        str | Sequence[str],
        About(
            _Listed(_HOST_NAME, "a host name, without port"),
            "Answer requests for this host name too; may be repeated. Addresses, localhost and --host are "
            "always answered.",
        ),
    ] = ()
    cors_origin: Annotated[
        str | Sequence[str],
        About(
            _Listed(_ORIGIN, "an origin such as https://chat.example.org, without path"),
            "Let web pages of this origin use the server; may be repeated.",
        ),
    ] = ()

    no_model: Annotated[
        bool,
        About(
            Switch(), "Start with nothing loaded: requests are told 503 until /admin/load has loaded a model."
        ),
    ] = False
    context_window: Annotated[
        int | None,
        About(
            Whole(16, optional=True),
            "Most tokens that prompt and answer may have together.",
            unset="the model's own, or as much of it as fits this machine's memory",
        ),
    ] = None
    default_max_tokens: Annotated[
        int, About(Whole(1), "Most tokens of an answer where a request names no number, or 0.")
    ] = 2048
    max_tokens_cap: Annotated[int, About(Whole(1), "The largest number of tokens a request gets.")] = 32768
    default_temperature: Annotated[
        float | None,
        About(
            Number(0, 100, optional=True),
            "Temperature where a request names none.",
            unset="the model's generation_config, else 0",
        ),
    ] = None
    default_top_p: Annotated[
        float | None,
        About(
            Number(0, 1, above=True, optional=True),
            "Nucleus where a request names none.",
            unset="the model's generation_config, else 1",
        ),
    ] = None
    default_top_k: Annotated[
        int | None,
        About(
            Whole(0, optional=True),
            "Likeliest tokens to draw from where a request names no number.",
            unset="the model's generation_config, else 0 (off)",
        ),
    ] = None
    thinking: Annotated[
        bool | None,
        About(
            Switch(optional=True),
            "Whether models that can think do, where a request does not say.",
            unset="as the model's template has it",
        ),
    ] = None
    reasoning_effort: Annotated[
        Effort | None,
        About(
            Choice(EFFORTS, optional=True),
            "How much models think where a request does not say; mapped to what the template knows.",
        ),
    ] = None

    queue: Annotated[
        int,
        About(Whole(0, 100_000), "Most answers that wait besides those being made; more are told 429."),
    ] = 128
    queue_timeout: Annotated[
        float, About(Seconds(), "Tell a request 503 that waited so long for its turn.")
    ] = 300.0
    request_timeout: Annotated[
        float | None,
        About(Seconds(), "Tell a request 504 whose answer is not complete after so long.", unset="no limit"),
    ] = None
    stall_timeout: Annotated[
        float,
        About(
            Seconds(),
            "Fail all requests and end the server when the engine has delivered nothing for so long, or for "
            "three times its longest wait of late where that is longer. /health tells of it within 5 s.",
        ),
    ] = 30.0
    drain_timeout: Annotated[
        float, About(Seconds(), "When asked to end, let answers that are being made go on for so long.")
    ] = 30.0
    max_body_mb: Annotated[
        float, About(Number(0, 4096, above=True), "Refuse request bodies larger than this many megabytes.")
    ] = 8.0
    stream_keepalive_s: Annotated[
        float,
        About(
            Number(0, 3600, above=True),
            "Seconds of silence after which a stream carries an empty frame.",
        ),
    ] = 15.0
    log: Annotated[
        Logged,
        About(
            Choice(("off", "requests", "prompts")),
            "What is written to standard error, a JSON object a line. requests: a line for each, without any "
            "text of it. prompts: with what was asked.",
        ),
    ] = "requests"
    warmup: Annotated[
        bool, About(Switch(), "Read a prompt and write a few tokens before the first request is taken.")
    ] = True

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if self.default_max_tokens > self.max_tokens_cap:
            raise UsageError(
                f"default_max_tokens is {self.default_max_tokens}, above the cap of {self.max_tokens_cap}.",
                "Lower it, or raise --max-tokens-cap.",
                field="default_max_tokens",
            )

    @property
    def allowed_hosts(self) -> tuple[str, ...]:
        """The host names that are answered besides addresses and localhost."""
        named = (self.allow_host,) if isinstance(self.allow_host, str) else tuple(self.allow_host)
        return (self.host, *named)

    @property
    def origins(self) -> tuple[str, ...]:
        """The origins whose pages may use the server."""
        return (self.cors_origin,) if isinstance(self.cors_origin, str) else tuple(self.cors_origin)
