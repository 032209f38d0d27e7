"""`adapter_config.json` is what somebody uploaded: it describes LoRA, or it is refused with field and value."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from house.expected import raised, some
from reshard.errors import SourceError
from reshard.models.jobs import ConvertRequest
from reshard.options import PeftOptions, SourceSpec
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.peft.adapter_config import CONFIG, AdapterConfig, adapter_config
from reshard_engine.formats.peft.adapters import scaling_of

REQUEST = ConvertRequest(source=SourceSpec(url="/run"), target="/out", to="peft")
RIGHT = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "use_dora": False, "rank_pattern": {}}


def config_in(data: bytes) -> AdapterConfig:
    checkpoint = cast("Checkpoint", SimpleNamespace(model_files={CONFIG: data}))
    return some(adapter_config(checkpoint, REQUEST))


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"r": (1 << 31) - 1, "rank_pattern": {"q_proj": 1}},
        {"lora_alpha": 0.5, "alpha_pattern": {"q_proj": 3}, "use_rslora": True},
        {"rank_pattern": None, "alpha_pattern": None, "fan_in_fan_out": None, "lora_dropout": 0},
    ],
)
def test_what_peft_writes_is_taken(changed: dict[str, Any]) -> None:
    facts = RIGHT | changed
    assert scaling_of(config_in(json.dumps(facts).encode()), PeftOptions(), ()).alpha == facts["lora_alpha"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 1 << 70), ("r", 0), ("r", -8), ("r", True), ("r", 8.0), ("r", "8"), ("r", [8]),
        ("lora_alpha", True), ("lora_alpha", "16"), ("lora_alpha", 10**400), ("lora_alpha", {}),
        ("lora_dropout", -0.1), ("lora_dropout", 2), ("lora_dropout", False),
        ("rank_pattern", {"q_proj": -1}), ("rank_pattern", {"q_proj": True}), ("rank_pattern", {"q_proj": 1 << 70}),
        ("rank_pattern", [1]), ("alpha_pattern", {"q_proj": "1"}), ("alpha_pattern", {"q_proj": False}),
        ("alpha_pattern", "q_proj"), ("use_dora", 1), ("use_rslora", "yes"), ("fan_in_fan_out", 0), ("lora_bias", []),
        ("peft_type", None), ("peft_type", 1),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_field(field: str, value: object) -> None:
    error = raised(SourceError, config_in, json.dumps(RIGHT | {field: value}).encode())
    assert error.code == "checkpoint.malformed"
    shown = next(iter(value.values())) if isinstance(value, dict) and value else value
    assert CONFIG in error.message
    assert f"`{field}" in error.message
    assert repr(shown)[:60] in error.message
    assert "--model-files" in error.fix


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["lora_alpha", "r", "lora_dropout"])
def test_what_is_no_number_is_refused(field: str, name: str) -> None:
    text = json.dumps({k: v for k, v in RIGHT.items() if k != field})[:-1] + f', "{field}": {name}}}'
    with pytest.raises(SourceError, match=r"checkpoint\.malformed") as refused:
        config_in(text.encode())
    assert ("inf" if name == "1e999" else name) in refused.value.message


@pytest.mark.parametrize(
    "data",
    [b"", b"LORA", b"[]", b'"LORA"', b"null", b"8", b"{", b"\xff\xfe", b"[" * 100_000, b'{"r": ' + b"9" * 9000 + b"}"],
)
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(
        SourceError, match=r"checkpoint\.malformed: adapter_config\.json describes no LoRA adapter: it "
    ):
        config_in(data)


@pytest.mark.parametrize(
    ("facts", "why"),
    [({"alpha_pattern": {"(": 1}}, r"`alpha_pattern` has '\('"), ({"lora_alpha": None}, "no `lora_alpha`")],
)
def test_a_scale_that_cannot_be_known_is_refused(facts: dict[str, Any], why: str) -> None:
    with pytest.raises(SourceError, match=why):
        scaling_of(config_in(json.dumps(RIGHT | facts).encode()), PeftOptions(), ())
