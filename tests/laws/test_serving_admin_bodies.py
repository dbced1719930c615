"""What a load may name is what is declared, and bodies that nobody should send change nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as Step
from hypothesis import strategies as st
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import content_type_conformance

from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.serve_settings import ServeSettings
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.serving.admin import swap as module
from mlx_dspark.serving.admin.body import KEPT, OF_A_MODEL, LoadBody, settings_of
from mlx_dspark.serving.admin.swap import Swap
from mlx_dspark.serving.app import create_app
from mlx_dspark.serving.host import Host
from mlx_dspark.serving.loading import Loaded
from mlx_dspark.serving.observe.folds import Histogram
from mlx_dspark.serving.stage import Phase
from tests.admin_server import admin_server, answered, load
from tests.tiny import save_tiny

BODIES = int(os.environ.get("FUZZED_BODIES", "60"))
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much]
KNOBS = {knob.name: knob for knob in LoadSettings.knobs()}
STARTED = (
    LoadSettings(
        model="started",
        drafter="a-drafter",
        max_draft=3,
        max_batch=4,
        memory_guard=False,
        cpu_weights="stock",
    ),
    ServeSettings(context_window=512, default_max_tokens=99, thinking=False, port=1234),
)


def asked(**fields: Any) -> tuple[LoadSettings, ServeSettings]:
    return settings_of(LoadBody.model_validate({"model": "m", **fields}), STARTED)


def test_every_setting_of_a_load_can_be_named() -> None:
    assert set(LoadBody.model_fields) == {*KNOBS, *OF_A_MODEL}
    schema = LoadBody.model_json_schema()["properties"]
    assert all(schema[name]["description"] == knob.about.help for name, knob in KNOBS.items())


def test_what_is_not_named_is_as_declared_or_as_the_server_was_started() -> None:
    loading, serving = asked()
    for name, knob in KNOBS.items():
        expected = "m" if name == "model" else getattr(STARTED[0], name) if name in KEPT else knob.default
        assert getattr(loading, name) == expected, name
    assert serving == STARTED[1]
    loading, serving = asked(max_batch=2, drafter="d", thinking=True, context_window=None)
    assert (loading.max_batch, loading.drafter, loading.memory_guard) == (2, "d", False)
    assert serving == replace(STARTED[1], thinking=True, context_window=None)


@pytest.mark.parametrize("name", [knob.name for knob in ServeSettings.knobs() if knob.name not in OF_A_MODEL])
def test_what_is_decided_at_the_start_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        asked(**{name: getattr(STARTED[1], name)})
    assert refused.value.field == name


def test_a_setting_that_is_none_is_refused_with_all_that_there_are() -> None:
    with pytest.raises(UsageError) as refused:
        asked(qqqq=1)
    assert [name for name in LoadBody.model_fields if name not in str(refused.value)] == []
    with pytest.raises(UsageError, match="Did you mean context_window"):
        asked(contex_window=1)


def test_a_request_lets_no_code_run_that_the_server_was_not_started_to_run() -> None:
    with pytest.raises(UsageError):
        asked(trust_remote_code=True)
    allowed = (replace(STARTED[0], trust_remote_code=True), STARTED[1])
    body = LoadBody.model_validate({"model": "m"})
    assert settings_of(body, allowed)[0].trust_remote_code


def test_the_page_of_the_server_names_what_stays_the_phases_and_the_routes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    administration = page.partition("## Administration")[2].partition("## Observation")[0]
    names = [*OF_A_MODEL, *KEPT, *get_args(Phase)]
    assert [name for name in names if f"`{name}`" not in administration] == []
    app = create_app(Host(None), swap=Swap(Host(None), STARTED))
    routes = [path for path in app.openapi()["paths"] if path.startswith("/admin")]
    assert len(routes) == 6
    observed = {"/metrics", "/rounds", "/calibration", "/machine", "/doctor"}
    assert observed <= set(app.openapi()["paths"])
    assert [path for path in (*routes, *observed, "/events") if f"`{path}" not in page] == []


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Swap, Path]]:
    folder = save_tiny(tmp_path_factory.mktemp("fuzzed") / "one", seed=1)
    with pytest.MonkeyPatch.context() as patched, admin_server() as (client, swap):
        patched.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert load(client, folder, mode="baseline").status_code == 200
        yield client, swap, folder


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\x00")
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=5), SCALARS, max_size=3)
PATHS = ("/admin/load", "/admin/load/cancel", "/admin/race")


@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_nobody_should_send_are_refused_and_change_nothing(
    server: tuple[httpx.Client, Swap, Path], path: str
) -> None:
    client, swap, _ = server
    first, loaded = answered(client), swap.host.loaded
    names = st.sampled_from([*LoadBody.model_fields, "prompt", "arms", "max_tokens", "cleanup", "x"])

    @settings(max_examples=BODIES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.dictionaries(names, VALUES, max_size=4) | VALUES)
    def check(body: Any) -> None:
        told = client.post(
            path, content=json.dumps(body).encode(), headers={"content-type": "application/json"}
        )
        assert told.status_code < 500 or "offline" in told.text, told.text
        if told.status_code != 200:
            assert told.json()["error"]["message"]

    check()
    assert loaded is not None
    assert swap.host.loaded is not None
    assert swap.host.loaded.parts is loaded.parts
    assert answered(client) == first


def test_no_administration_that_the_openapi_page_allows_fails(
    server: tuple[httpx.Client, Swap, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, swap, folder = server
    first = swap.host.loaded
    assert first is not None

    def again(loading: LoadSettings, serving: ServeSettings, *_: Any) -> Loaded:
        return replace(first.again(), loading=loading, settings=serving)

    monkeypatch.setattr(module, "examine", lambda *_, **__: None)
    monkeypatch.setattr(module, "load_model", again)
    schema = schemathesis.openapi.from_url(f"{client.base_url}/openapi.json").include(path_regex="^/admin/")
    routes: set[str] = set()

    for operation in schema.get_all_operations():
        assert isinstance(operation, Ok)
        routes.add(operation.ok().path)

        @settings(max_examples=25, deadline=None, suppress_health_check=SLOW, phases=[Step.generate])
        @given(operation.ok().as_strategy())
        def check(case: Any) -> None:
            if isinstance(case.body, dict) and "prompt" in case.body:
                case.body["max_tokens"] = 2
            response = case.call(timeout=20)
            assert response.status_code in (*range(200, 500), 503), response.text
            case.validate_response(response, checks=[content_type_conformance])

        check()
    assert len(routes) == 6
    assert load(client, folder, mode="baseline").status_code == 200
    assert answered(client)


@given(st.lists(st.floats(0, 100), max_size=30))
def test_a_histogram_counts_what_lies_within_each_bound(values: list[float]) -> None:
    histogram = Histogram((1, 5, 20))
    for value in values:
        histogram.add(value)
    within = {bound: sum(value <= float(bound) for value in values) for bound in ("1", "5", "20", "+Inf")}
    assert dict(histogram.cumulated()) == within
    assert histogram.count == len(values)
    assert histogram.mean == pytest.approx(sum(values) / len(values) if values else 0.0)
