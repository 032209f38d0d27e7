"""A target that is planned looks as it does when it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from house.repository import ROOT
from reshard.api.wire import convert_request
from reshard.errors import RequestError
from reshard.local import load_engine
from reshard.models.jobs import ConvertRequest
from reshard.models.keywords import ConvertOptions
from reshard.models.reports import LayoutPicture
from reshard.options import SourceSpec
from reshard_engine.operations.conversion import Conversion
from reshard_engine.operations.layout_map import PlannedStore
from reshard_engine.storage.protocol import ObjectInfo, read_bytes

DATA = ROOT / "tests" / "data"
SHARED = ROOT.parent / "shared" / "checkpoints"
CASES: list[tuple[Path, str, ConvertOptions]] = [
    (DATA / "zero2_tiny", "zero", {"dp": 1}),
    (DATA / "zero2_tiny", "zero", {"dp": 4}),
    (DATA / "zero2_tiny", "zero", {"dp": 3, "zero_stage": "3"}),
    (DATA / "zero2_tiny", "universal", {}),
    (DATA / "zero3_tiny", "zero", {"dp": 5}),
    (DATA / "zero3_tiny", "safetensors", {"dtype": "bf16", "max_shard_bytes": 300}),
    (DATA / "zero3_tiny", "torch", {}),
    (SHARED / "llama_fp32_z1_tp2pp2dp2" / "src", "zero", {"dp": 2, "tp": 2, "pp": 1}),
    (SHARED / "moe_bf16_z1_ep2dp4" / "src", "zero", {"dp": 2, "ep": 2}),
]


def _request(source: Path, target: Path, to: str, options: ConvertOptions) -> ConvertRequest:
    if not source.is_dir():
        pytest.skip("the real checkpoint is not here: it lies outside the project")
    return convert_request(str(source), str(target), to, options)


def _comparable(picture: LayoutPicture) -> Any:
    """The picture without the file that only a finished target has."""
    files = [f for f in picture.files if f.file != "reshard.json"]
    return picture.model_copy(update={"files": tuple(files)})


@pytest.mark.parametrize(
    ("source", "to", "options"), CASES, ids=lambda value: value.name if isinstance(value, Path) else str(value)
)
def test_the_picture_of_a_plan_is_that_of_the_result(
    source: Path, to: str, options: ConvertOptions, tmp_path: Path
) -> None:
    target = tmp_path / "run" / "global_step7"
    request = _request(source, target, to, options)
    engine = load_engine()
    pair = engine.planned_pictures(request)
    before, planned = pair.source, pair.target
    assert not (tmp_path / "run").exists(), "a picture writes nothing"
    (shown,) = before.tensors
    assert before == engine.picture(request.source, f"{shown.fqn}/{shown.state}")
    states = [t.state for t in planned.tensors]
    assert shown.state in states or states == ["weight"]
    engine.convert(request)
    name = f"{shown.fqn}/{states[0]}"
    assert _comparable(planned) == _comparable(engine.picture(SourceSpec(url=str(target)), name))


def test_a_named_tensor_is_shown_on_both_sides_under_the_states_that_each_has(tmp_path: Path) -> None:
    request = _request(DATA / "zero2_tiny", tmp_path / "out", "safetensors", {})
    pair = load_engine().planned_pictures(request, "embed.weight/exp_avg")
    assert [t.state for t in pair.source.tensors] == ["exp_avg"]
    assert [t.state for t in pair.target.tensors] == ["weight"]
    with pytest.raises(RequestError) as caught:
        load_engine().planned_pictures(request, "nothing")
    assert caught.value.code == "request.invalid"


def test_a_planned_file_is_its_literals_and_zeros(tmp_path: Path) -> None:
    conversion = Conversion.prepare(_request(DATA / "zero2_tiny", tmp_path / "out", "universal", {}))
    store = PlannedStore("/t", conversion.layout)
    load_engine().convert(conversion.request)
    for file in conversion.layout.files:
        info = store.stat(f"/t/{file.path}")
        assert info == ObjectInfo(f"/t/{file.path}", file.size_bytes, "planned")
        planned = read_bytes(store, info)
        real = (tmp_path / "out" / file.path).read_bytes()
        unknown = [(b.offset, b.length_bytes) for b in file.template.bodies]
        unknown += [(offset, 4) for offset, _ in file.template.crc_slots]
        known = bytearray(real)
        for offset, length in unknown:
            known[offset : offset + length] = bytes(length)
        assert planned == bytes(known), file.path
        # Any part of it is that part.
        for begin in range(0, file.size_bytes, 997):
            length = min(1_500, file.size_bytes - begin)
            assert read_bytes(store, info, begin, length) == planned[begin : begin + length]
