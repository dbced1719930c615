"""The page of the server names every field and every figure that there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_dspark.serving.dialects import openai_body, openai_chat_body, openai_text
from mlx_dspark.serving.stats import stats_of
from mlx_dspark.session.result import Result

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
FIELDS = {
    **dict.fromkeys(openai_chat_body.ChatBody.model_fields, "Served:"),
    **dict.fromkeys(openai_text.TextBody.model_fields, "Served:"),
    **dict.fromkeys(openai_chat_body.CHAT_HARMLESS | openai_body.HARMLESS, "Taken without effect"),
    **dict.fromkeys({**openai_chat_body.CHAT_UNSERVED, **openai_text.UNSERVED}, "Refused by name"),
}


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_every_field_is_listed_under_what_becomes_of_it(field: str) -> None:
    paragraph = next(each for each in PAGE.split("\n\n") if each.startswith(FIELDS[field]))
    assert f"`{field}`" in paragraph


def test_every_figure_is_explained() -> None:
    told = stats_of([Result.fold([])] * 2, ["x"])
    table = PAGE.partition("## `x_mlx_dspark`")[2]
    assert all(f"`{name}`" in table for name in [*told, "prefill_tokens_per_sec"])
