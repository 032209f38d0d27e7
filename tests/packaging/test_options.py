"""A conversion option is one thing: field of requests, flag, argument of the client, and a line of docs/cli.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import annotated_types
import pytest
import typer
from fastapi.testclient import TestClient
from pydantic.fields import FieldInfo

from house.repository import ROOT
from reshard._wire import ConvertOptions
from reshard.cli.flags import CALLED, ConversionFlags
from reshard.models import ConvertRequest, NativeLayout, SourceSpec, SubmitRequest, TargetFormat
from reshard_engine.plan.planner import request_facts
from reshard_jobs.settings import JobSettings
from reshard_service.app import create_app
from reshard_service.settings import ServiceSettings

FIELDS: dict[str, FieldInfo] = {
    **{n: f for n, f in SourceSpec.model_fields.items() if n != "url"},
    **NativeLayout.model_fields,
    **{n: f for n, f in ConvertRequest.model_fields.items() if n not in {"source", "target", "to", "layout"}},
}
"""Every option, by its name in requests."""
FORMER = {"offload": "server_copy"}
"""Hidden flags of the release before, and the options that they mean."""
SAMPLES: dict[str, Any] = {
    "dp": 3,
    "rules": "rules.yaml",
    "family": "bloom",
    "max_shard_bytes": "5GB",
    "memory_limit_bytes": "2GiB",
    "part_bytes": "8MiB",
    "lora_alpha": 3.5,
    "threads": 3,
}
"""Values of flags whose kind does not say one."""
BYTES_KEPT = {
    "tag", "profile", "target_profile", "overwrite", "verify", "memory_limit_bytes", "part_bytes", "threads",
    "server_copy",
}  # fmt: skip
"""Options that change how the bytes of a target are made, or nothing at all, and never which they are."""
IN_FILES = {"model_files", "merge_adapter", "lora_alpha", "base"}
"""Options that a plan's digest holds by what they make: the bytes of files, and the facts of merged weights."""


def flag_of(field: str) -> str:
    """The attribute of `ConversionFlags` that an option is."""
    return CALLED[field].removeprefix("--").replace("-", "_") if field in CALLED else field


def option_of(flag: str) -> Any:
    """The typer option of a flag."""
    hint = get_type_hints(ConversionFlags, include_extras=True)[flag]
    return next(a for a in get_args(hint) if isinstance(a, typer.models.OptionInfo))


def sample(field: str) -> Any:
    """A value of the flag that is not its default."""
    if field in SAMPLES:
        return SAMPLES[field]
    default = ConversionFlags.__dataclass_fields__[flag_of(field)].default
    hint = get_type_hints(ConversionFlags)[flag_of(field)]
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)]
    if kinds == [bool]:
        return not default
    if hasattr(kinds[0], "__members__"):
        return next(value for value in kinds[0] if value is not default)
    return 7 if kinds == [int] else "something"


def test_every_option_is_a_flag_and_every_flag_an_option() -> None:
    flags = set(ConversionFlags.__dataclass_fields__) - {"to"} - set(FORMER)
    assert flags == {flag_of(field) for field in FIELDS}


@pytest.mark.parametrize("field", FIELDS)
def test_a_flag_arrives_in_its_field(field: str, tmp_path: Path) -> None:
    value = sample(field)
    if field == "rules":
        value = tmp_path / "rules.yaml"
        value.write_text("{}")
    layout = field in NativeLayout.model_fields
    given: dict[str, Any] = {"dp": 2} if layout else {}
    to = TargetFormat.ZERO if layout else TargetFormat.SAFETENSORS
    before, after = (
        ConversionFlags(to=to, **{**given, **more}).request("a", "b").model_dump()
        for more in ({}, {flag_of(field): value})
    )
    place = "layout" if layout else "source" if field in SourceSpec.model_fields else None
    changed = {n for n in before if before[n] != after[n]}
    assert changed == {place or field}
    if place is not None:
        assert {n for n in before[place] if before[place][n] != after[place][n]} == {field}


@pytest.mark.parametrize("field", FIELDS)
def test_defaults_and_bounds_are_the_same(field: str) -> None:
    flag, info = flag_of(field), FIELDS[field]
    default = ConversionFlags.__dataclass_fields__[flag].default
    if field not in {"dp", "memory_limit_bytes", "part_bytes", "max_shard_bytes", "rules"}:
        assert default == info.default
    option = option_of(flag)
    bounds = {type(m): m for m in info.metadata}
    least, most = bounds.get(annotated_types.Ge), bounds.get(annotated_types.Le)
    if isinstance(sample(field), int) and not isinstance(sample(field), bool):
        assert option.min == (least.ge if least else None)
        assert option.max in (None, most.le if most else None)


@pytest.mark.parametrize("flag", FORMER)
def test_a_former_flag_means_what_it_was_renamed_to(flag: str) -> None:
    assert option_of(flag).hidden
    value = sample(FORMER[flag])
    old, new = (ConversionFlags(to=TargetFormat.TORCH, **{n: value}).request("a", "b") for n in (flag, FORMER[flag]))
    assert old == new
    fields = new.model_dump(mode="json")
    fields[flag] = fields.pop(FORMER[flag])
    assert ConvertRequest.model_validate(fields) == new


def test_the_client_takes_every_option() -> None:
    own = set(ConvertOptions.__annotations__)
    assert own == {f for f in FIELDS if f not in NativeLayout.model_fields} | {"layout"}


# fastapi 0.165.0 names a body in a way that pydantic 2.14.3 takes for a mistake.
@pytest.mark.filterwarnings("ignore:The 'alias' attribute with value 'body'")
def test_the_api_takes_every_option(tmp_path: Path) -> None:
    settings = ServiceSettings(jobs=JobSettings(database_url=f"sqlite:///{tmp_path}/jobs.db"))
    with TestClient(create_app(settings)) as api:
        schemas = api.get("/openapi.json").json()["components"]["schemas"]
    for model in (SubmitRequest, NativeLayout, SourceSpec):
        assert set(schemas[model.__name__]["properties"]) == set(model.model_fields)


@pytest.mark.parametrize("field", FIELDS)
def test_the_handbook_names_every_option(field: str) -> None:
    name = "--" + flag_of(field).replace("_", "-")
    pages = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("cli.md", "rules.md", "peft.md"))
    assert re.search(rf"{re.escape(name)}\b", pages), f"{name} is in none of docs/cli.md, rules.md and peft.md"


@pytest.mark.parametrize("field", sorted(set(FIELDS) - set(NativeLayout.model_fields) - BYTES_KEPT - IN_FILES))
def test_what_decides_the_bytes_is_in_the_plan(field: str, tmp_path: Path) -> None:
    value = sample(field)
    if field == "rules":
        value = tmp_path / "rules.yaml"
        value.write_text("{}")
    plain = ConversionFlags(to=TargetFormat.SAFETENSORS).request("a", "b")
    other = ConversionFlags(to=TargetFormat.SAFETENSORS, **{flag_of(field): value}).request("a", "b")
    assert request_facts(plain) != request_facts(other)
