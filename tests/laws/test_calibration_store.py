"""What is remembered comes back, whoever else writes, and whatever the file holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dspark.calibration import store as store_module
from mlx_dspark.calibration.key import NAME, describe, key_of
from mlx_dspark.calibration.store import (
    FILE,
    FIRST_WAIT,
    HEAL_WAIT,
    KEPT,
    LONGEST_WAIT,
    OLD,
    CalibrationStore,
)
from mlx_dspark.foundation.curves import CostCurves, DraftPoint, VerifyPoint

ABOUT = {"name": "tiny", "target": "ab"}


def curves(seconds: float = 0.01, *, at: float = 100.0, rows: int = 1) -> CostCurves:
    verify = tuple(VerifyPoint(rows, width, 128, seconds * width, 0.01) for width in (1, 8))
    return CostCurves(verify, {"lookup": (DraftPoint(rows, 7, 128, seconds, 0.02),)}, 0.001, at)


def test_what_is_remembered_comes_back(tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path)
    assert store.recall("a") is None
    assert store.remember("a", curves(), ABOUT) == ""
    assert store.remember("b", curves(0.02), ABOUT) == ""
    entry = CalibrationStore(tmp_path).recall("a")
    assert entry is not None
    assert (entry.curves, dict(entry.about), entry.stale) == (curves(), ABOUT, "")
    store.remember("a", curves(0.03), ABOUT)
    assert [each.curves for each in store.entries()] == [curves(0.02), curves(0.03)]
    assert {path.name for path in tmp_path.iterdir()} == {FILE, f"{FILE}.lock"}


def test_the_oldest_entries_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "KEPT", 3)
    store = CalibrationStore(tmp_path)
    for key in "abcd":
        store.remember(key, curves(), ABOUT)
    assert [entry.key for entry in store.entries()] == ["b", "c", "d"]
    assert KEPT > 3


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    def write(writer: int) -> None:
        store = CalibrationStore(tmp_path)
        for number in range(6):
            assert store.remember(f"{writer}-{number}", curves(0.01 * (number + 1)), ABOUT) == ""
            store.refuse(f"{writer}-{number}-refused")

    threads = [Thread(target=write, args=(writer,)) for writer in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = CalibrationStore(tmp_path)
    assert {entry.key for entry in store.entries()} == {f"{w}-{n}" for w in range(6) for n in range(6)}
    assert all(store.waiting(f"{w}-{n}-refused") for w in range(6) for n in range(6))


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    store, done = CalibrationStore(tmp_path), []
    store.remember("a", curves(), ABOUT)

    def write() -> None:
        for _ in range(40):
            store.remember("b", curves(), ABOUT)
        done.append(True)

    thread = Thread(target=write)
    thread.start()
    while not done:
        assert CalibrationStore(tmp_path).recall("a") is not None
    thread.join()


# damage --------------------------------------------------------------------------------------------------

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_WHOLE = {
    "schema": 1,
    "entries": {"a": {"curves": curves().to_json(), "about": ABOUT, "stale": "", "healed": 0}},
    "refused": {"b": {"at": 1.0, "count": 2}},
}


def check_survives(content: bytes) -> CalibrationStore:
    """Whatever the file holds: reading gives nothing or something whole, and writing works."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / FILE
        file.write_bytes(content)
        store = CalibrationStore(Path(folder), now=lambda: 2.0)
        for key in ("a", "b"):
            entry = store.recall(key)
            assert entry is None or isinstance(entry.outdated(2.0), str)
            assert 0 <= store.waiting(key) <= LONGEST_WAIT
        assert all(entry.curves.verify for entry in store.entries())
        assert store.mark_stale("a", 100.0, "why") == ""
        assert store.refuse("b") == ""
        assert store.remember("c", curves(), ABOUT) == ""
        kept = store.recall("c")
        assert kept is not None
        assert kept.curves == curves()
        return store


@settings(deadline=None)
@given(content=st.binary(max_size=64) | _JSON.map(lambda value: json.dumps(value).encode()))
def test_a_file_of_anything_is_never_fatal(content: bytes) -> None:
    check_survives(content)


@settings(deadline=None)
@given(data=st.data())
def test_a_file_with_anything_anywhere_is_never_fatal(data: st.DataObject) -> None:
    content = json.loads(json.dumps(_WHOLE))
    place, key = content, data.draw(st.sampled_from(list(content)))
    while isinstance(place[key], dict | list) and place[key] and data.draw(st.integers(0, 3)):
        place = place[key]
        key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
    if data.draw(st.booleans()) and isinstance(place, dict):
        del place[key]
    else:
        place[key] = data.draw(_JSON)
    check_survives(json.dumps(content).encode())


@settings(deadline=None)
@given(cut=st.integers(0, 400))
def test_a_file_that_is_cut_short_is_never_fatal(cut: int) -> None:
    check_survives(json.dumps(_WHOLE).encode()[:cut])


@pytest.mark.parametrize("nested", ["[" * 100_000, '{"a":' * 50_000])
def test_a_file_that_is_too_deep_is_never_fatal(nested: str) -> None:
    check_survives(nested.encode())


@pytest.mark.parametrize("content", ["", "[]", "null", '{"schema": 2, "entries": {}, "refused": {}}', "\x00"])
def test_a_file_of_another_kind_is_set_aside(tmp_path: Path, content: str) -> None:
    file = tmp_path / FILE
    file.write_text(content)
    store = CalibrationStore(tmp_path)
    assert store.recall("a") is None
    assert file.read_text() == content
    store.remember("a", curves(), ABOUT)
    assert (tmp_path / f"{FILE}.damaged").read_text() == content
    assert store.recall("a") is not None


def test_a_damaged_entry_costs_the_others_nothing(tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path)
    for key in "abc":
        store.remember(key, curves(), ABOUT)
    content = json.loads(store.file.read_text())
    content["entries"]["b"]["curves"]["verify"][0]["seconds"] = "fast"
    store.file.write_text(json.dumps(content))
    assert store.recall("b") is None
    assert [entry.key for entry in store.entries()] == ["a", "c"]
    store.remember("b", curves(0.5), ABOUT)
    assert {entry.key for entry in store.entries()} == set("abc")
    assert not (tmp_path / f"{FILE}.damaged").exists()


def test_what_cannot_be_written_is_said_and_never_fatal(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = CalibrationStore(tmp_path / "file" / "cache")
    assert "cannot be written" in store.remember("a", curves(), ABOUT)
    assert store.recall("a") is None
    locked = CalibrationStore(tmp_path)
    with FileLock(f"{locked.file}.lock"):
        assert "cannot be written" in locked._write(lambda content: None, 0.01)


# ageing --------------------------------------------------------------------------------------------------


def test_entries_age(tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path)
    store.remember("a", curves(at=0.0), ABOUT)
    entry = store.recall("a")
    assert entry is not None
    assert not entry.outdated(OLD - 1)
    assert "days old" in entry.outdated(OLD + 1)


def test_doubted_entries_are_measured_anew_but_ever_less_often(tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path)
    stands, waits = [], (0.0, *(HEAL_WAIT * 8**n for n in range(9)))
    for time in range(4):
        store.remember("a", curves(at=float(time)), ABOUT)
        entry = store.recall("a")
        assert entry is not None
        assert not entry.outdated(time)
        store.mark_stale("a", float(time), "it differs")
        entry = store.recall("a")
        assert entry is not None
        assert entry.outdated(time + OLD) == "it differs"
        stands.append(next(wait for wait in waits if entry.outdated(time + wait)))
    assert stands == [0, HEAL_WAIT, 8 * HEAL_WAIT, 64 * HEAL_WAIT]


def test_a_doubt_about_what_was_measured_anew_meanwhile_counts_for_nothing(tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path)
    store.remember("a", curves(at=2.0), ABOUT)
    store.mark_stale("a", 1.0, "it differs")
    store.mark_stale("gone", 1.0, "it differs")
    assert [entry.stale for entry in store.entries()] == [""]


def test_more_rows_are_added_to_the_entry_they_belong_to(tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path)
    store.remember("a", curves(), ABOUT)
    store.extend("a", curves(0.02, rows=4))
    store.extend("a", curves(0.02, rows=2))
    store.extend("a", curves(0.02, rows=8, at=99.0))
    entry = store.recall("a")
    assert entry is not None
    assert {point.rows for point in entry.curves.verify} == {1, 2, 4}
    assert entry.curves.verify_seconds(8, depth=128) == curves().verify_seconds(8, depth=128)


def test_a_refused_measurement_waits_longer_each_time(tmp_path: Path) -> None:
    now = 1000.0
    store = CalibrationStore(tmp_path, now=lambda: now)
    assert store.waiting("a") == 0
    waits = []
    for _ in range(12):
        store.refuse("a")
        waits.append(store.waiting("a"))
    assert waits[:3] == [FIRST_WAIT, 2 * FIRST_WAIT, 4 * FIRST_WAIT]
    assert waits[-1] == LONGEST_WAIT
    now += LONGEST_WAIT
    assert store.waiting("a") == 0
    store.remember("a", curves(), ABOUT)
    store.refuse("a")
    assert store.waiting("a") == FIRST_WAIT
    now -= 10 * LONGEST_WAIT
    assert store.waiting("a") == 0, "a clock that went back does not keep anybody waiting"


# keys ----------------------------------------------------------------------------------------------------

FACTS: Mapping[str, Any] = {
    "name": "tiny",
    "target": "ab",
    "drafter": "cd",
    "quantization": {"target": {"bits": 4}, "drafter_bits": None},
    "sources": [("lookup", 32, True)],
    "states": ["KVState"],
    "kernels": ["weights blocks"],
}


@pytest.mark.parametrize(
    ("fact", "other"),
    [
        ("target", "ac"),
        ("drafter", ""),
        ("quantization", {"target": {"bits": 8}, "drafter_bits": None}),
        ("sources", [("lookup", 6, True)]),
        ("states", ["QuantizedKVState4"]),
        ("kernels", ["weights dense"]),
    ],
)
def test_a_key_depends_on_every_fact(fact: str, other: Any) -> None:
    assert key_of(describe(**FACTS)) != key_of(describe(**{**FACTS, fact: other}))


@pytest.mark.parametrize("fact", ["device", "mlx", "cores", "memory", "method"])
def test_a_key_depends_on_the_machine_and_its_libraries(fact: str) -> None:
    facts = describe(**FACTS)
    assert key_of(facts) != key_of({**facts, fact: "another"})


def test_a_key_depends_on_content_and_not_on_names() -> None:
    facts = describe(**FACTS)
    assert key_of(facts) == key_of({**facts, NAME: "another"})
    assert key_of(facts) == key_of(dict(reversed(facts.items())))
