"""The bodies of administration. That of a load is made from the declared knobs; nothing else lists them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, create_model

from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.knobs import Choice, Kind, Number, Switch, Whole, Words, suggestion
from mlx_dspark.foundation.knobs import refuse_unknown as refuse_unknown_settings
from mlx_dspark.foundation.lists import Drafting
from mlx_dspark.foundation.numbers import brief
from mlx_dspark.foundation.serve_settings import ServeSettings
from mlx_dspark.foundation.settings import DEFAULT_MODEL, LoadSettings

KEPT = (
    "max_batch",
    "memory_guard",
    "cpu_weights",
    "small_m",
    "multirow_attn",
    "wide_gemm",
    "replay",
    "trust_remote_code",
)
"""What a load that does not name it has as the server was started; everything else as it is declared."""
OF_A_MODEL = (
    "context_window",
    "default_max_tokens",
    "max_tokens_cap",
    "default_temperature",
    "default_top_p",
    "default_top_k",
    "thinking",
    "reasoning_effort",
    "warmup",
)
"""Settings of the server that belong to the model it has; not named, they are as the server was started."""

_LONGEST_NAME = 1024


def _schema(kind: Kind) -> dict[str, Any]:
    match kind:
        case Switch():
            types = ["boolean"]
        case Whole():
            types = ["integer"]
        case Number():
            types = ["number"]
        case Words():
            types = ["string"]
        case Choice():
            types = sorted({"integer" if isinstance(name, int) else "string" for name in kind.names})
        case _:
            types = ["number", "string"]
    return {"type": [*types, "null"]}


def _load_fields() -> dict[str, Any]:
    of_server = [knob for knob in ServeSettings.knobs() if knob.name in OF_A_MODEL]
    return {
        knob.name: (
            Annotated[Any, Field(description=knob.about.help, json_schema_extra=_schema(knob.kind))],
            None,
        )
        for knob in (*LoadSettings.knobs(), *of_server)
    }


class _Open(BaseModel):
    """Takes other names too, so that they are refused by name."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


LoadBody: type[BaseModel] = create_model(
    "LoadBody", __base__=_Open, __doc__="The body of `/admin/load`: settings by name.", **_load_fields()
)


def settings_of(
    body: BaseModel, started: tuple[LoadSettings, ServeSettings]
) -> tuple[LoadSettings, ServeSettings]:
    """What a body asks to load, with what the server was started with. Raises UsageError naming the field."""
    loading, serving = started
    given = {name: getattr(body, name) for name in body.model_fields_set}
    if given.get("model") is None:
        raise UsageError("model is not given.", "Name the model to load.", field="model")
    if given.get("trust_remote_code") and not loading.trust_remote_code:
        raise UsageError(
            "trust_remote_code is true, and the server was started without it.",
            "Start it with --trust-remote-code, or choose a model without code.",
            field="trust_remote_code",
        )
    for name in ("model", "drafter", "draft_model"):
        if isinstance(given.get(name), str) and len(given[name]) > _LONGEST_NAME:
            raise UsageError(
                f"{name} has {len(given[name])} characters.",
                f"Give a name or a path of up to {_LONGEST_NAME}.",
                field=name,
            )
    own = {knob.name for knob in ServeSettings.knobs()}
    if strange := [name for name in given if name in own and name not in OF_A_MODEL]:
        raise UsageError(
            f"{strange[0]} is decided when the server is started.", "Leave it out.", field=strange[0]
        )
    refuse_unknown_settings(given, list(LoadBody.model_fields))
    kept = {name: getattr(loading, name) for name in KEPT}
    of_model = {name: value for name, value in given.items() if name in OF_A_MODEL}
    asked = {name: value for name, value in given.items() if name not in OF_A_MODEL}
    return LoadSettings.of(kept | asked), replace(serving, **of_model)


class CancelBody(_Open):
    """The body of `/admin/load/cancel`. `cleanup`: what was fetched of the model is removed."""

    cleanup: StrictBool = False


class NoBody(_Open):
    """A body without fields."""


class ArmBody(_Open):
    """One way to draft; `cap` is the most drafts in a round: a number, "auto", or null, as it was loaded."""

    mode: StrictStr = "auto"
    cap: Any = Field(default=None, json_schema_extra={"type": ["integer", "string", "null"]})


class RaceBody(_Open):
    """The body of `/admin/race`: 2 to 4 arms answer one prompt."""

    prompt: StrictStr = Field(min_length=1)
    arms: list[ArmBody] = Field(
        default_factory=lambda: [ArmBody(mode="baseline"), ArmBody(mode="auto")], min_length=2, max_length=4
    )
    max_tokens: Annotated[int, Field(strict=True, ge=1, le=4096)] = 200
    system: StrictStr | None = None


def refuse_unknown(body: BaseModel) -> None:
    """Raises UsageError for a field that the route does not have."""
    known = list(type(body).model_fields)
    for name in body.model_extra or {}:
        listed = f"The fields are {', '.join(known)}." if known else "Give an empty object."
        raise UsageError(f"There is no field {brief(name)}.", suggestion(name, known) or listed, field=name)


def arms_of(body: RaceBody) -> list[Drafting]:
    """The ways to draft that a race compares. Raises UsageError naming the field."""
    refuse_unknown(body)
    for arm in body.arms:
        refuse_unknown(arm)
    arms = [_arm(arm) for arm in body.arms]
    if len({(arm.mode, arm.max_draft) for arm in arms}) < len(arms):
        raise UsageError("Two arms are the same.", "Give each another mode or cap.", field="arms")
    return arms


def _arm(arm: ArmBody) -> Drafting:
    as_loaded: Mapping[str, Any] = {"mode": arm.mode, "max_draft": arm.cap}
    for knob in LoadSettings.knobs():
        if knob.name in as_loaded:
            knob.check(as_loaded[knob.name], "mode" if knob.name == "mode" else "cap")
    if arm.mode == "baseline" and arm.cap is not None:
        raise UsageError("cap is given for an arm in mode baseline, which drafts nothing.", field="arms")
    return Drafting(arm.mode, arm.cap)


def as_json(settings: LoadSettings) -> dict[str, Any]:
    """Settings by name, as JSON takes them."""
    values = {knob.name: getattr(settings, knob.name) for knob in LoadSettings.knobs()}
    values["model"] = settings.model or DEFAULT_MODEL
    return {
        name: value if isinstance(value, int | float | str | None) else str(value)
        for name, value in values.items()
    }
