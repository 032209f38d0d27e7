"""A conversion option is one thing: field of requests, flag, argument of the client, and a line of docs/cli.md."""

from __future__ import annotations

import json
import re
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any

import annotated_types
import pytest
import typer
from fastapi.testclient import TestClient
from pydantic import ValidationError
from pydantic.fields import FieldInfo

import reshard
import reshard.models
from house.expected import raised
from house.repository import ROOT
from reshard.api.wire import convert_request
from reshard.choices import TargetFormat
from reshard.cli import flags as flags_module
from reshard.cli.flags import ConversionFlags
from reshard.cli.given import called
from reshard.dcp_options import Framework
from reshard.declared import declared_options, flags_of
from reshard.ensuring.call import loader_of
from reshard.ensuring.world import Wanted
from reshard.errors import RequestError
from reshard.functions import request_of
from reshard.installed_formats import former_layout, option_fields, plain_kind
from reshard.models.jobs import ConvertRequest, SubmitRequest
from reshard.models.keywords import ConvertOptions
from reshard.option import option_of as option_of_field
from reshard.options import (
    ConversionOptions,
    DeepSpeedOptions,
    Options,
    PeftOptions,
    RunLayout,
    SourceSpec,
    WeightsOptions,
    former_place,
)
from reshard.wire_model import invalid
from reshard_engine.plan.planner import request_facts
from reshard_jobs.queue.idempotency import fingerprint
from reshard_jobs.settings import JobSettings
from reshard_service.api.problems import of_validation
from reshard_service.app import create_app
from reshard_service.settings import ServiceSettings

OF_FORMATS = option_fields()
_NOT_OPTIONS = {"source", "target", "to", "layout", "options", "plan"}
FIELDS: dict[str, FieldInfo] = {
    **{n: f for n, f in SourceSpec.model_fields.items() if n != "url"},
    **{n: f for n, (_, f) in OF_FORMATS.items()},
    **{
        n: f
        for n, f in ConvertRequest.model_fields.items()
        if n not in {"source", "target", "to", "layout", "options", "plan"}
    },
}
"""Every option, by its name in requests."""
SAMPLES: dict[str, Any] = {
    "dp": 3,
    "rules": "rules.yaml",
    "family": "bloom",
    "max_shard_bytes": "5GB",
    "memory_limit_bytes": "2GiB",
    "part_bytes": "8MiB",
    "lora_alpha": 3.5,
    "threads": 3,
    "param_order": "model",
    "pointer": True,
    "fsdp_version": 2,
    "damaged": "drop-optimizer",
    "ckpt_format": "torch",
    "optimizer_sharding": "dp_reshardable",
    "common_state": "entry",
    "base_model": "org/name",
}
"""Values of flags whose kind does not say one."""
BYTES_KEPT = {
    "tag", "profile", "target_profile", "overwrite", "verify", "memory_limit_bytes", "part_bytes", "threads",
    "server_copy", "pointer",
}  # fmt: skip
"""Options that change how the bytes of a target are made, or nothing at all, and never which they are."""
IN_FILES = {"model_files", "base", "trainer_files"}
"""Options that a plan's digest holds by what they make: the bytes of files, and the facts of merged weights."""


OF_ENTRY_POINTS = {n for n, (place, _) in OF_FORMATS.items() if place[-1] not in (*Options.model_fields, "layout")}
"""Options of formats that an entry point names: the command line makes their flags of their fields."""


_PLACED: dict[str, Any] = {"source": "a", "target": "b", "to": "dcp"}
CALLED = called()


def flag_of(field: str) -> str:
    """The name of the flag that an option is, with underscores."""
    return CALLED[field].removeprefix("--").replace("-", "_") if field in CALLED else field


def made_flags(*, of_others: bool) -> list[Any]:
    """The parameters of the command line that are made of options: of entry points' formats, or all others."""
    parameters = flags_module._parameters(ConversionFlags, "", of_others=of_others)  # pyright: ignore[reportPrivateUsage]
    return flags_module._made(list(parameters))  # pyright: ignore[reportPrivateUsage]


FLAGS = {p.name: p for of_others in (False, True) for p in made_flags(of_others=of_others)}


def option_of(flag: str) -> Any:
    """The parameter of the command line that is made of an option."""
    return FLAGS[flag]


def sample(field: str) -> Any:
    """A value of the flag that is not its default."""
    if field in SAMPLES:
        return SAMPLES[field]
    if field in OF_ENTRY_POINTS:
        info = FIELDS[field]
        kind = plain_kind(info)
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            return next(value.value for value in kind if value is not info.default)
        return 7 if kind is int else "something"
    default = option_of(flag_of(field)).default
    kind = plain_kind(FIELDS[field])
    if kind is bool:
        return not default
    if hasattr(kind, "__members__"):
        return next(value for value in kind if value is not default)
    return 7 if kind is int else "something"


def flags_with(field: str, value: Any) -> ConversionFlags:
    """Flags of which one is given."""
    given = {"options_of_formats": json.dumps({field: value})} if field in OF_ENTRY_POINTS else {flag_of(field): value}
    return ConversionFlags(to=TargetFormat.SAFETENSORS, **given)


def test_every_option_is_a_flag_and_every_flag_an_option() -> None:
    flags = {p.name for p in made_flags(of_others=False) if not p.hidden} - {"to"}
    assert flags == {flag_of(field) for field in FIELDS if field not in OF_ENTRY_POINTS}
    assert {p.name for p in made_flags(of_others=True) if not p.hidden} == OF_ENTRY_POINTS


@pytest.mark.parametrize("field", FIELDS)
def test_a_flag_arrives_in_its_field(field: str, tmp_path: Path) -> None:
    value = sample(field)
    if field in {"rules", "megatron_args"}:
        value = tmp_path / "rules.yaml"
        value.write_text("{}")
    before, after = (
        flags.request("a", "b").model_dump()
        for flags in (ConversionFlags(to=TargetFormat.SAFETENSORS), flags_with(field, value))
    )
    places = ["source"] if field in SourceSpec.model_fields else []
    places = [*OF_FORMATS[field][0]] if field in OF_FORMATS else places
    before = {"layout": RunLayout().model_dump()} | before  # left out where nothing is given
    after = {"layout": RunLayout().model_dump()} | after
    for place in [*places, field]:
        assert {n for n in before | after if before.get(n) != after.get(n)} == {place}
        before, after = before.get(place), after[place]


@pytest.mark.parametrize("field", FIELDS)
def test_a_request_says_its_flags(field: str, tmp_path: Path) -> None:
    """As a command line that asks for the same bytes; placeholders stand for what lies on another machine."""
    value = sample(field)
    if field in {"rules", "megatron_args"}:
        value = tmp_path / "rules.yaml"
        value.write_text("{}")
    flags = flags_of(flags_with(field, value).request("a", "b"))
    assert flags[:2] == ["--to", "safetensors"]
    option = declared_options()[flag_of(field)]
    if field in BYTES_KEPT - {"tag"}:
        assert flags[2:] == []
    elif option.kind is bool:
        assert flags[2:] == [option.flag]
    else:
        placeholder = option.names_place or option.kind is Path
        assert flags[2:] == [
            option.flag,
            (option.option.metavar or "FILE") if placeholder else str(option.value(value)),
        ]


@pytest.mark.parametrize("field", FIELDS)
def test_defaults_and_bounds_are_the_same(field: str) -> None:
    flag, info = flag_of(field), FIELDS[field]
    made = field in OF_ENTRY_POINTS
    default = info.default if made else option_of(flag).default
    if field not in {"memory_limit_bytes", "part_bytes", "max_shard_bytes", "rules", "megatron_args"}:
        assert default == info.default
    option = option_of(flag)
    bounds = {type(m): m for m in info.metadata}
    least, most = bounds.get(annotated_types.Ge), bounds.get(annotated_types.Le)
    if isinstance(sample(field), int) and not isinstance(sample(field), bool):
        assert option.min == (least.ge if least else None)
        assert option.max in (None, most.le if most else None)


@pytest.mark.parametrize("field", [n for n, f in FIELDS.items() if plain_kind(f) is float])
def test_a_flag_for_a_fraction_is_checked_as_its_field(field: str) -> None:
    bounds = {type(m): m for m in FIELDS[field].metadata}
    option = declared_options()[field]
    for wrong in (bounds[annotated_types.Gt].gt, bounds[annotated_types.Lt].lt, "nan", "x", -1.0):
        assert option.problem_of(str(wrong)) is not None
        with pytest.raises(typer.BadParameter):
            option_of(flag_of(field)).type_descriptor.parameter_info.parser(str(wrong))
    assert option_of(flag_of(field)).type_descriptor.parameter_info.parser("3.5") == 3.5


def test_the_client_takes_every_option() -> None:
    own = set(ConvertOptions.__annotations__)
    named = {o.field: o.name for o in declared_options().values()}
    assert own == {*(named.get(field, field) for field in FIELDS), "options", "layout"}


@pytest.mark.parametrize("field", OF_FORMATS)
def test_an_argument_of_the_client_arrives_nested(field: str) -> None:
    value = {"max_shard_bytes": 5, "rules": "{}", "megatron_args": "{}"}.get(field) or sample(field)
    options: Any = {field: value}
    made = convert_request("a", "b", TargetFormat.TORCH, options)
    within = made.layout if OF_FORMATS[field][0] == ("layout",) else getattr(made.options, OF_FORMATS[field][0][-1])
    assert within.given() == {field: value}
    assert sum(map(len, made.options.given().values())) + len(made.layout.given()) == 1
    assert ConvertRequest.model_validate_json(made.model_dump_json()) == made


def test_the_client_takes_a_layout_as_one_value() -> None:
    def made(**options: Any) -> ConvertRequest:
        return convert_request("a", "b", TargetFormat.ZERO, {"family": "bloom", "adapter": None, **options})  # type: ignore[typeddict-item]

    found = made(layout={"dp": 3, "tp": 2})
    assert (found.layout, found.options.given()) == (RunLayout(dp=3, tp=2), {"deepspeed": {"family": "bloom"}})
    assert found == made(layout=RunLayout(dp=3, tp=2)) == made(dp=3, tp=2) == made(layout={"dp": 3}, tp=2)
    assert made(layout=None).layout == RunLayout()


@pytest.mark.parametrize("field", OF_FORMATS)
def test_an_option_of_a_format_stands_below_it(field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ConvertRequest.model_validate({**_PLACED, field: None})
    place = ".".join((*OF_FORMATS[field][0], field))
    assert invalid(caught.value).message == f"{field} is not a known field here: its place is {place}"
    with pytest.raises(ValidationError) as caught:
        SubmitRequest.model_validate({**_PLACED, "labels": {}, field: None, "colour": 1})
    assert of_validation(caught.value).message == f"{field} is not a known field here: its place is {place}"


def test_a_field_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValidationError) as caught:
        ConvertRequest.model_validate({**_PLACED, "layouts": {"dp": 1}})
    assert invalid(caught.value).message == "layouts is not a known field"


# The places that options had in 0.1.0, among those of a format.

MOVED: dict[str, tuple[tuple[str, ...], str, Any]] = {
    "dp": (("layout",), "deepspeed.dp", 3),
    "tp": (("layout",), "deepspeed.tp", 2),
    "pp": (("layout",), "deepspeed.pp", 2),
    "ep": (("layout",), "deepspeed.ep", 2),
    "vpp": (("layout",), "megatron.virtual_pipeline", 2),
    "vocab_divisor": ((), "deepspeed.vocab_divisor", 128),
    "names": ((), "deepspeed.names", "hf"),
    "rng": ((), "deepspeed.rng", "drop"),
    "missing_moments": ((), "dcp.missing_moments", "omit"),
}
"""The present place of the model, the former place below `options`, and a value."""


def at(place: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A value nested at a place."""
    return value if not place else {place[0]: at(place[1:], value)}


def test_every_moved_option_is_tried() -> None:
    fields = {**dict(ConversionOptions.model_fields), **dict(RunLayout.model_fields)}
    assert {n for n, info in fields.items() if former_place(info) is not None} == {*MOVED}


@pytest.mark.parametrize("field", MOVED)
def test_a_moved_option_is_taken_at_its_former_place(field: str) -> None:
    """By requests without a word, for they may be stored; by the client with a warning. Digests are of that place."""
    within, former, value = MOVED[field]
    before = {**_PLACED, **at(("options", *former.split(".")), value)}
    after = {**_PLACED, **at((*within, field), value)}
    old, new = (SubmitRequest.model_validate(body) for body in (before, after))
    assert old == new != SubmitRequest.model_validate(_PLACED)
    said = new.digested()
    assert said == old.digested()
    assert not {"layout", *MOVED} & said.keys()
    format_name, name = former.split(".")
    assert said["options"][format_name][name] == value
    assert request_facts(new)["options"][format_name] == {name: value}  # type: ignore[index]
    text = f"options.{former} is now {'.'.join((*within, field))}; the former place works for this release"
    with pytest.warns(DeprecationWarning, match=re.escape(text)):
        made = convert_request("a", "b", "dcp", at(("options", *former.split(".")), value))  # type: ignore[arg-type]
    assert made == ConvertRequest.model_validate(after)
    with pytest.raises(ValidationError) as caught:
        ConvertRequest.model_validate({**before, **at((*within, field), value)})
    assert f"options.{former} is the former place of {'.'.join((*within, field))}" in str(caught.value)


def test_a_native_layout_works_for_one_more_release() -> None:
    with pytest.warns(DeprecationWarning, match="NativeLayout is now RunLayout"):
        layout = reshard.models.NativeLayout(dp=2, zero_stage="3", rng="drop")
    said = [
        f"layout.{n} is now {place}" for n, place in (("zero_stage", "options.deepspeed.zero_stage"), ("rng", "rng"))
    ]
    with pytest.warns(DeprecationWarning, match=said[0]), pytest.warns(DeprecationWarning, match=said[1]):
        made = convert_request("a", "b", "zero", {"layout": layout})
    expected = {"layout": {"dp": 2}, "options": {"deepspeed": {"zero_stage": "3"}}, "rng": "drop"}
    assert made == ConvertRequest.model_validate({**_PLACED, "to": "zero", **expected})


def test_the_api_names_places_that_have_moved(tmp_path: Path) -> None:
    """A request of 0.1.0 is taken, and its answer warns, in the header that RFC 9111 had for it."""
    settings = ServiceSettings(jobs=JobSettings(database_url=f"sqlite:///{tmp_path}/jobs.db"))
    source = str(ROOT / "tests" / "data" / "zero2_tiny")
    with TestClient(create_app(settings)) as api:
        before, after = (
            api.post("/v1/plans", json={"source": source, "target": str(tmp_path / "to"), "to": "zero", **body})
            for body in ({"options": {"deepspeed": {"dp": 2}}}, {"layout": {"dp": 2}})
        )
    assert (before.status_code, after.status_code) == (200, 200)
    assert before.json()["digest"] == after.json()["digest"]
    assert before.headers["Warning"] == '299 - "options.deepspeed.dp is now layout.dp"'
    assert "Warning" not in after.headers


FORMER = {"framework": ("grammar", "torchtitan")}
"""Options that had another name: that name, and a value."""


_FORMER_LAYOUT = {"layout": former_layout()(dp=3, tp=1, zero_stage="2", rng="drop")}  # type: ignore[call-arg]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "given",
    [
        {**_FORMER_LAYOUT, "rng": "synthesize"},
        {**_FORMER_LAYOUT, "tp": 2},
        {"layout": {"tp": 2}, "tp": 1},
        {**_FORMER_LAYOUT, "options": {"deepspeed": {"zero_stage": "1"}}},
        {**_FORMER_LAYOUT, "options": {"deepspeed": {"tp": 2}}},
        {"dp": 3, "zero_stage": "2", "options": {"deepspeed": {"zero_stage": "1"}}},
        {"dp": 3, "options": {"deepspeed": {"dp": 4}}},
        {"layout": {"virtual_pipeline": 2, "vpp": 3}},
    ],
)
def test_an_option_that_is_given_twice_is_refused(given: Any) -> None:
    error = raised(RequestError, convert_request, "a", "b", "zero", given)
    assert error.code == "request.invalid"
    assert "twice" in error.message or "both" in error.message
    # And in the form of REST, where nothing is put together.
    assert convert_request("a", "b", "zero", {"layout": {"dp": 3}, "dp": 3, "tp": 1}).layout == RunLayout(dp=3)


@pytest.mark.parametrize("layout", [[], "", 0, False, None, "x"])
def test_a_malformed_layout_beside_a_former_place_is_refused(layout: Any) -> None:
    body = {"source": {"url": "a"}, "target": "b", "to": "zero", "layout": layout, "options": {"deepspeed": {"dp": 3}}}
    with pytest.raises(ValidationError, match="layout"):
        ConvertRequest.model_validate(body)


def test_both_places_over_the_wire_are_named() -> None:
    body = {
        "source": {"url": "a"},
        "target": "b",
        "to": "zero",
        "layout": {"dp": 3},
        "options": {"deepspeed": {"dp": 3}},
    }
    with pytest.raises(ValidationError) as caught:
        ConvertRequest.model_validate(body)
    assert "options.deepspeed.dp is the former place of layout.dp, and both are given" in invalid(caught.value).message


def test_options_that_are_no_mapping_are_refused() -> None:
    error = raised(RequestError, lambda: reshard.plan("a", "b", to="zero", dp=3, options="x"))  # type: ignore[arg-type]
    assert error.code == "request.invalid"


def test_a_warning_is_of_the_line_that_called() -> None:
    with pytest.warns(DeprecationWarning, match="former place") as caught:
        convert_request("a", "b", "zero", {"options": {"deepspeed": {"dp": 3}}})
    assert [warned.filename for warned in caught] == [__file__]


def test_every_former_name_is_tried() -> None:
    assert {n: o.former for n, o in declared_options().items() if o.former} == {n: (f,) for n, (f, _) in FORMER.items()}


@pytest.mark.parametrize("field", FORMER)
def test_a_former_name_still_works(field: str) -> None:
    former, value = FORMER[field]
    given: list[dict[str, Any]] = [{name: value} for name in (field, former)]
    nested_below = [ConvertRequest.model_validate({**_PLACED, "options": {"dcp": options}}) for options in given]
    of_client = [convert_request("a", "b", "dcp", options) for options in given]  # type: ignore[arg-type]
    of_flags = [ConversionFlags(to="dcp", **options).request("a", "b") for options in given]
    named = {"source": "a", "target": "b", "to": "dcp", "options": None}
    of_function = [request_of(options, "", to_service=False, named=named) for options in given]
    made = [*nested_below, *of_client, *of_flags, *of_function]
    assert [request.options.given() for request in made] == [{"dcp": {field: value}}] * 8
    assert option_of(former).opts == [f"--{former}"]
    assert (option_of(former).hidden, option_of(field).hidden) == (True, False)


def test_an_option_has_one_name_at_a_time() -> None:
    with pytest.raises(RequestError, match="grammar is the former name of framework, and both were given"):
        ConversionFlags(to="dcp", framework="trainer", grammar="trainer").request("a", "b")


def test_a_renamed_option_keeps_its_name_in_digests(tmp_path: Path) -> None:
    """The digests are those of the program before the rename: a target is found again, and so is a job."""
    source = {"url": "a", "tag": "t", "model_key": "m"}
    dcp = {"framework": "torchtitan", "files": 3, "trainer_files": "x"}
    options = {"dcp": dcp, "deepspeed": {"family": "bloom", "dp": 2}}
    body = {**_PLACED, "source": source, "dtype": "bf16", "memory_limit_bytes": 99999, "options": options}
    facts = request_facts(ConvertRequest.model_validate(body))
    assert facts["options"]["dcp"] == {"files": 3, "grammar": "torchtitan"}  # type: ignore[index]
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    assert sha256(text.encode()).hexdigest() == "d189cb53ed2acd47f85ae109a46df9f9e01748d1aa1bef3e28d8d075915609c2"
    said = fingerprint(SubmitRequest.model_validate(body).digested())
    assert said == "536317affcb3ce8e01b2fe1b99fd770acef605ef4ccecd4bb56a013b680abfa0"
    loader = loader_of(tmp_path, None, to="dcp", framework=Framework.TRAINER)
    key = Wanted.of({"dp": 4, "zero_stage": 2, "dtype": "bf16"}, environ={}, loader=loader).key()
    assert "('framework', {'to': 'dcp', 'grammar': 'trainer', 'source_is_distributed': False})" in key


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"options": []}, "options is not an object"),
        ({"options": {"deepspeed": 5}}, "options.deepspeed is not an object"),
        ({"layout": {"dp": 0}}, "layout.dp is below 1"),
        ({"options": {"deepspeed": {"dq": 1}}}, "options.deepspeed.dq is not a known field"),
        ({"layout": 7}, "layout is not an object"),
        ({"layout": {"dq": 1}}, "layout.dq is not a known field"),
        ({"layout": {"dp": "x"}}, "layout.dp is not a whole number"),
        ({"layout": 7, "dp": 1}, "layout is not an object"),
        ({"options": {"deepspeed": 5}, "layout": {"dp": 1}}, "options.deepspeed is not an object"),
    ],
)
def test_options_of_another_shape_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as caught:
        convert_request("a", "b", TargetFormat.ZERO, fields)  # type: ignore[arg-type]
    assert caught.value.message == says


# fastapi 0.165.0 names a body in a way that pydantic 2.14.3 takes for a mistake.
@pytest.mark.filterwarnings("ignore:The 'alias' attribute with value 'body'")
def test_the_api_takes_every_option(tmp_path: Path) -> None:
    settings = ServiceSettings(jobs=JobSettings(database_url=f"sqlite:///{tmp_path}/jobs.db"))
    with TestClient(create_app(settings)) as api:
        schemas = api.get("/openapi.json").json()["components"]["schemas"]
    for model in (SubmitRequest, DeepSpeedOptions, WeightsOptions, PeftOptions, SourceSpec):
        assert set(schemas[model.__name__]["properties"]) == set(model.model_fields)
        if "source" in model.model_fields:
            object_schema, text = schemas[model.__name__]["properties"]["source"]["anyOf"]
            assert object_schema == {"$ref": "#/components/schemas/SourceSpec"}
            assert (text["type"], text["minLength"], text["maxLength"]) == ("string", 1, 4096)


def test_a_text_is_a_source() -> None:
    fields = {"target": "b", "to": "zero", "layout": {"dp": 3}}
    short = ConvertRequest.model_validate({"source": "s3://bucket/run", **fields})
    assert short == ConvertRequest.model_validate({"source": {"url": "s3://bucket/run"}, **fields})
    assert ConvertRequest.model_validate_json(short.model_dump_json()) == short
    for place, says in (
        ("", "source.url is empty"),
        ("a" * 4097, "source.url is longer than 4096"),
        (5, "source is not"),
    ):
        with pytest.raises(ValidationError) as caught:
            ConvertRequest.model_validate({"source": place, **fields})
        assert invalid(caught.value).message.startswith(says)


@pytest.mark.parametrize("field", FIELDS)
def test_the_handbook_names_every_option(field: str) -> None:
    name = "--" + flag_of(field).replace("_", "-")
    pages = "".join(
        (ROOT / "docs" / page).read_text(encoding="utf-8")
        for page in ("cli.md", "rules.md", "peft.md", "formats/megatron-core.md", "formats/megatron-hf.md")
    )
    assert re.search(rf"{re.escape(name)}\b", pages), (
        f"{name} is in none of docs/cli.md, rules.md, peft.md and formats/megatron-*.md"
    )


def test_what_keeps_the_bytes_says_so() -> None:
    said = {n for n, info in ConversionOptions.model_fields.items() if option_of_field(info).of_run}
    assert said == BYTES_KEPT - set(SourceSpec.model_fields)


@pytest.mark.parametrize("field", sorted(set(FIELDS) - BYTES_KEPT - IN_FILES))
def test_what_decides_the_bytes_is_in_the_plan(field: str, tmp_path: Path) -> None:
    value = sample(field)
    if field in {"rules", "megatron_args"}:
        value = tmp_path / "rules.yaml"
        value.write_text("{}")
    plain = ConversionFlags(to=TargetFormat.SAFETENSORS).request("a", "b")
    other = flags_with(field, value).request("a", "b")
    assert request_facts(plain) != request_facts(other)
