"""Two tensors of one name: no layout is made of them, and no file that holds them is published."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from house.repository import ROOT
from reshard.choices import OpaquePolicy, TargetFormat
from reshard.engine import load_engine
from reshard.errors import IntegrityError, JobError, SourceError
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec
from reshard_engine.containers.safetensors import safetensors_template
from reshard_engine.formats.model_weights import weights_of
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.formats.weights import writer
from reshard_engine.formats.weights.format import Weights
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import open_location
from reshard_engine.tensors.dtypes import FLOAT32
from reshard_engine.tensors.layout import FileTemplate

_SOURCE = ROOT / "tests" / "data" / "zero2_tiny"


def _request(target: Path) -> ConvertRequest:
    return ConvertRequest(source=SourceSpec(url=str(_SOURCE)), target=str(target), to=TargetFormat.SAFETENSORS)


def test_a_layout_refuses_a_name_that_comes_twice() -> None:
    one = ("a.weight", FLOAT32, (2,), 2)
    with pytest.raises(SourceError, match=r"two tensors are called a\.weight") as caught:
        safetensors_template([one, ("b", FLOAT32, (2,), 2), one], {})
    assert caught.value.code == "checkpoint.ambiguous"


def test_a_checkpoint_refuses_a_name_that_comes_twice(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(open_location(str(_SOURCE)), None, OpaqueLedger(OpaquePolicy.REFUSE))
    first = checkpoint.parameters[0]
    for twice in (
        {"parameters": (*checkpoint.parameters, replace(first, group=None, states={}))},
        {"buffers": (*checkpoint.buffers, replace(checkpoint.buffers[0], fqn=first.fqn))},
    ):
        with pytest.raises(SourceError, match="the checkpoint has two tensors that are called") as caught:
            replace(checkpoint, **twice)
        assert caught.value.code == "checkpoint.ambiguous"
    renamed = replace(checkpoint)
    object.__setattr__(renamed, "parameters", (*checkpoint.parameters, first))
    with pytest.raises(SourceError, match="two tensors are called"):
        weights_of(renamed, _request(tmp_path))


@pytest.mark.parametrize("planned", [True, False])
def test_a_header_that_no_reader_takes_is_not_published(
    planned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the layout itself: what is planned, and what stands on the disk, is read as its readers do."""

    def twice(tensors: Any, metadata: Any) -> FileTemplate:
        template = safetensors_template(tensors, metadata)
        ((offset, head),) = template.literals
        names = sorted((n for n in json.loads(head[8:]) if n != "__metadata__"), key=len)
        one, other = next((a, b) for a, b in itertools.pairwise(names) if len(a) == len(b))
        return replace(template, literals=((offset, head.replace(f'"{one}"'.encode(), f'"{other}"'.encode())),))

    monkeypatch.setattr(writer, "safetensors_template", twice)
    if not planned:
        monkeypatch.setattr(Weights, "check_names", lambda *_: None)
    with pytest.raises(JobError if planned else IntegrityError, match="twice") as caught:
        load_engine().convert(_request(tmp_path / "out"))
    assert caught.value.code == ("internal.error" if planned else "integrity.mismatch")
    assert not (tmp_path / "out").exists()
