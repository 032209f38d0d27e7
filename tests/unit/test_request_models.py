"""Requests hold numbers where the API's document says so: `true` and `"5"` are none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from reshard.models.access import NewTenant, NewToken, RotateRequest
from reshard.models.jobs import ConvertRequest, SubmitRequest
from reshard.options import DeepSpeedOptions, PeftOptions, WeightsOptions
from reshard.wire_model import RequestModel

MODELS: tuple[type[RequestModel], ...] = (
    ConvertRequest, DeepSpeedOptions, NewTenant, NewToken, PeftOptions, RotateRequest, SubmitRequest, WeightsOptions,
)  # fmt: skip


def numbers() -> Iterator[tuple[type[RequestModel], str]]:
    for model in MODELS:
        for name, field in model.model_json_schema()["properties"].items():
            kinds = {field.get("type"), *(option.get("type") for option in field.get("anyOf", ()))} - {None, "null"}
            if kinds and kinds <= {"integer", "number"}:
                yield model, name


def test_there_are_numbers() -> None:
    assert {model for model, _ in numbers()} == set(MODELS)


@pytest.mark.parametrize("wrong", [True, False, "5"])
@pytest.mark.parametrize(("model", "name"), list(numbers()))
def test_what_is_no_number_is_refused(model: type[RequestModel], name: str, wrong: object) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate({name: wrong})
    (own,) = [error for error in caught.value.errors() if error["loc"] == (name,)]
    assert "not a number" in own["msg"]
