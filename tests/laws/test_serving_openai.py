"""The official OpenAI client against the real server: streamed and plain, equal after folding."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.tiny_server import tiny_server


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with tiny_server() as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_plain_equals_streamed(client: OpenAI) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}
    plain = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert plain.usage
    assert plain.usage.completion_tokens == 12
    assert plain.choices[0].finish_reason == "length"
