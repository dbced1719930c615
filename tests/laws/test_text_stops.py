"""Stop strings and end-of-sequence ids: found wherever the text is cut, never shown."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dspark.chat.detokenize import TextDecoder
from mlx_dspark.chat.stops import StopFinder, TextStops
from mlx_dspark.foundation.errors import RequestError
from tests.tiny import tiny_tokenizer

DECODER = TextDecoder(tiny_tokenizer())
END = 2


def _expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: read character by character; the first that completes a stop string ends the text."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))], True
    return text, False


def _ids(text: str) -> list[int]:
    return tiny_tokenizer().encode(text, add_special_tokens=False)


def _run(ids: list[int], stops: list[str], take_after: Collection[int] = ()) -> tuple[str, list[str], bool]:
    """The whole text, the pieces as they were shown, and whether a stop string ended it."""
    answer = TextStops(DECODER.start(), stops, {END})
    pieces, ended = [], False
    for i, token in enumerate(ids):
        ended = answer(token)
        if i in take_after:
            pieces.append(answer.take())
        if ended:
            break
    pieces += [answer.take(), answer.finish()]
    return "".join(pieces), pieces, ended


SMALL = st.text(alphabet="ab \n你", min_size=0, max_size=14)
STOPS = st.lists(st.text(alphabet="ab \n你", min_size=1, max_size=4), max_size=3)


@given(text=SMALL, stops=STOPS, cuts=st.sets(st.integers(0, 14)))
@settings(max_examples=500, deadline=None)
def test_pieces_do_not_matter(text: str, stops: list[str], cuts: set[int]) -> None:
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    finder = StopFinder(stops)
    shown = [finder.push(text[a:b]) for a, b in itertools.pairwise(bounds)]
    assert ("".join(shown) + finder.finish(), finder.found) == _expected(text, stops)


@given(text=SMALL, stops=STOPS, take_after=st.sets(st.integers(0, 40)))
@settings(max_examples=300, deadline=None)
def test_tokens_and_rounds_do_not_matter(text: str, stops: list[str], take_after: set[int]) -> None:
    shown, pieces, found = _run(_ids(text), stops, take_after)
    assert (shown, found) == _expected(text, stops)
    so_far = ""
    for piece in pieces:
        so_far += piece
        assert shown.startswith(so_far)


@pytest.mark.parametrize("start", range(8))
@pytest.mark.parametrize("stop", ["\n\n", "END", "你好", " stop here"])
def test_a_stop_string_at_every_place(start: int, stop: str) -> None:
    text = "abcdefgh"[:start] + stop + "tail that must not be seen"
    assert _run(_ids(text), [stop])[0] == "abcdefgh"[:start]


@pytest.mark.parametrize("stop", ["END", "你好"])
def test_only_a_possible_beginning_waits(stop: str) -> None:
    finder = StopFinder([stop])
    assert finder.push("abc" + stop[:1]) == "abc"
    assert finder.push("x") == stop[:1] + "x"
    assert finder.push(stop[:-1]) == ""
    assert finder.finish() == stop[:-1]


def test_the_match_that_ends_first_wins_and_the_longest_of_those() -> None:
    finder = StopFinder(["abcd", "bc", "abc"])
    assert finder.push("xabcd") == "x"
    assert finder.found


@pytest.mark.parametrize("at", range(6))
def test_an_end_id_at_every_index_of_a_run(at: int) -> None:
    run = _ids("abcdef")
    run[at] = END
    shown, _, ended = _run(run, [])
    assert ended
    assert shown == "abcdef"[:at]


def test_an_end_id_that_is_ordinary_text_is_not_shown_either() -> None:
    newline = _ids("\n")[0]
    answer = TextStops(DECODER.start(), [], {newline})
    assert [answer(token) for token in _ids("ab\ncd")] == [False, False, True, True, True]
    assert answer.take() + answer.finish() == "ab"


def test_held_text_appears_when_the_end_id_comes() -> None:
    assert _run([*_ids("abEN"), END], ["END"])[0] == "abEN"


def test_a_cut_character_is_still_checked_for_stops() -> None:
    ids = _ids("ab你")[:-1]
    assert _run(ids, ["zz"])[0] == "ab\ufffd"
    assert _run(ids, ["\ufffd"])[0] == "ab"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="stop"):
        TextStops(DECODER.start(), ["a", ""])
