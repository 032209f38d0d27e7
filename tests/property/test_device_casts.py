"""Casts through the device's program on the device that is here, the CPU: same bits and counts, whatever goes wrong."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from house.casts import BITS, PAIRS, by_the_rule, elements, hold, special, weights
from house.conversions import convert
from house.repository import DATA
from reshard.choices import TargetFormat, WeightDtype
from reshard.errors import IntegrityError
from reshard_engine.execute import executor
from reshard_engine.execute.casts import device, device as lanes
from reshard_engine.execute.casts.cast import CastKernel, NumpyCast
from reshard_engine.execute.casts.device import (
    LANE_FACTOR,
    ROW_BYTES,
    CostModel,
    DeviceCast,
    Line,
    Outcome,
    Pair,
    Station,
    padded_bytes,
    position_sum,
    run,
)
from reshard_engine.execute.casts.rows import Kind, Rows
from reshard_engine.execute.checks import full, source as agreements
from reshard_engine.integrity.manifest import MANIFEST_NAME
from reshard_engine.operations import conversion
from reshard_engine.tensors.dtypes import BY_NAME, Dtype

FP32, BF16, FP16 = BY_NAME["float32"], BY_NAME["bfloat16"], BY_NAME["float16"]


def on_device(**options: Any) -> DeviceCast:
    """A kernel that sends everything through the device's program, in slices small enough that there are several."""
    return DeviceCast("cpu", **{"least_bytes": 0, "slice_bytes": 64 << 10, "memory_bytes": 64 << 20, **options})


KERNEL = on_device()


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda d: d.name)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_pair_follows_the_rule(source: Dtype, target: Dtype, data: st.DataObject) -> None:
    values = np.array(data.draw(elements(source)), dtype=BITS[source.itemsize_bytes]).view(np.uint8)
    hold(KERNEL, values, source, target, shift=data.draw(st.integers(0, 7)))
    assert not KERNEL.take_warnings()


@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("source", ["bfloat16", "float16"])
def test_every_element_of_sixteen_bits(source: str, target: str) -> None:
    if source != target:
        hold(KERNEL, np.arange(1 << 16, dtype=np.uint16).view(np.uint8), BY_NAME[source], BY_NAME[target], shift=0)


@st.composite
def scattered(draw: st.DrawFn, pair: Pair) -> tuple[Rows, int, int]:
    """Rows of elements with gaps, in an order of their own; the bytes of both memories."""
    wide, narrow = (d.itemsize_bytes for d in pair)
    counts = draw(st.lists(st.integers(1, draw(st.sampled_from([3, 40, 30_000]))), min_size=1, max_size=40))
    gaps = draw(st.lists(st.integers(0, 5), min_size=len(counts), max_size=len(counts)))
    shift = draw(st.sampled_from([0, 0, 1]))  # elements need not lie where their type wants them
    begin: list[int] = []
    at: list[int] = []
    low, to = shift, 0
    for count, gap in zip(counts, gaps, strict=True):
        begin.append(low + gap * wide)
        at.append(to + gap * narrow)
        low, to = begin[-1] + count * wide, at[-1] + count * narrow
    order = draw(st.permutations(range(len(counts))))
    columns = [np.array(c, dtype=np.int64)[order] for c in (begin, [n * wide for n in counts], at)]
    return Rows(*columns), low, to


@pytest.mark.parametrize("pair", [(FP32, BF16), (FP32, FP16), (BF16, FP32), (BY_NAME["float64"], FP16)], ids=str)
@given(data=st.data(), seed=st.integers(0, 1 << 16))
@settings(max_examples=60, deadline=None)
def test_scattered_rows_land_where_they_belong(pair: Pair, data: st.DataObject, seed: int) -> None:
    rows, source_bytes, target_bytes = data.draw(scattered(pair))
    source = np.random.default_rng(seed).integers(0, 256, source_bytes, dtype=np.uint8)
    ours, theirs = (np.full(target_bytes, 0x5A, dtype=np.uint8) for _ in range(2))
    KERNEL.start()
    staged = KERNEL.staging(source_bytes) if data.draw(st.booleans()) else np.empty(source_bytes, dtype=np.uint8)
    staged[:] = source
    pairs = ((KERNEL, staged, ours), (NumpyCast(), source, theirs))
    counts = [k.cast_rows(rows, s, t, Kind(*pair)) for k, s, t in pairs]
    assert ours.tobytes() == theirs.tobytes()
    assert counts[0] == counts[1]
    assert not KERNEL.take_warnings()


def test_threads_share_a_device() -> None:
    kernel = on_device()

    def one(seed: int) -> bool:
        data = weights(100_003, seed)
        return kernel.cast(data, FP32, BF16).tobytes() == NumpyCast().cast(data, FP32, BF16).tobytes()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(64)))
    assert kernel.report()["device_bytes"] > 0
    assert not kernel.take_warnings()


class _Broken:
    """The device's program with something done to it."""

    def __init__(self, times: int, act: Callable[[Outcome], Outcome]) -> None:
        self.times, self.act, self.counts = times, act, list[int]()

    def __call__(self, data: torch.Tensor, rows: Any, count: int, kinds: Pair, padded: int) -> Outcome:
        outcome = run(data, rows, count, kinds, padded)
        if self.times > 0:
            self.times -= 1
            return self.act(outcome)
        self.counts.append(count)
        return outcome


def _no_room(_: Outcome) -> Outcome:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(("times", "fallbacks"), [(1, 0), (2, 1)])
def test_out_of_memory_halves_the_slice_then_leaves_it_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch, times: int, fallbacks: int
) -> None:
    broken = _Broken(times, _no_room)
    monkeypatch.setattr(lanes, "run", broken)
    kernel, data = on_device(slice_bytes=256 << 10), weights(200_000)
    assert kernel.cast(data, FP32, BF16).tobytes() == NumpyCast().cast(data, FP32, BF16).tobytes()
    report = kernel.report()
    assert (report["out_of_memory"], report["fallbacks"]) == (times, fallbacks)
    assert len(kernel.take_warnings()) == fallbacks
    assert not kernel.take_warnings(), "said once"
    if not fallbacks:
        assert max(broken.counts) == (128 << 10) // 4


def test_a_device_that_never_has_room_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = _Broken(1 << 30, _no_room)
    monkeypatch.setattr(lanes, "run", broken)
    kernel, data = on_device(), weights(1000)
    for _ in range(10):
        assert kernel.cast(data, FP32, FP16).tobytes() == NumpyCast().cast(data, FP32, FP16).tobytes()
    assert kernel.report()["out_of_memory"] == 6
    assert "again and again" in kernel.take_warnings()[0]


def test_a_device_that_fails_otherwise_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Outcome) -> Outcome:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(lanes, "run", _Broken(1 << 30, fails))
    kernel, data = on_device(), weights(1000)
    for _ in range(3):
        assert kernel.cast(data, FP32, BF16).tobytes() == NumpyCast().cast(data, FP32, BF16).tobytes()
    assert kernel.take_warnings()[0].endswith("an illegal memory access was encountered")


def _flipped(at: int) -> Callable[[Outcome], Outcome]:
    def act(outcome: Outcome) -> Outcome:
        outcome.data[at] ^= 1
        return outcome

    return act


def test_a_byte_damaged_on_the_way_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "run", _Broken(1, _flipped(4711)))
    with pytest.raises(IntegrityError, match="other bytes came back"):
        on_device().cast(weights(10_000), FP32, BF16)


def test_a_byte_damaged_on_the_way_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(data: torch.Tensor, *rest: Any) -> Outcome:
        data = data.clone()
        data[1234] ^= 0x80
        return run(data, *rest)

    monkeypatch.setattr(lanes, "run", damaged)
    with pytest.raises(IntegrityError, match="cpu received other bytes"):
        on_device().cast(weights(10_000), FP32, BF16)


def test_a_program_that_computes_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def truncates(data: torch.Tensor, rows: Any, count: int, kinds: Pair, padded: int) -> Outcome:
        outcome = run(data, rows, count, kinds, padded)
        wrong = torch.zeros_like(outcome.data)
        wrong.view(torch.int16)[:count] = (data.view(torch.int32)[:count] >> 16).to(torch.int16)
        outcome.facts[1] = position_sum(wrong.numpy())
        return Outcome(wrong, outcome.facts)

    monkeypatch.setattr(lanes, "run", truncates)
    with pytest.raises(IntegrityError, match="differently from the reference"):
        on_device().cast(weights(10_000), FP32, BF16)


@given(st.binary(min_size=1, max_size=5 * ROW_BYTES), st.data())
@settings(max_examples=60, deadline=None)
def test_sums_know_every_bit_and_where_rows_lie(content: bytes, data: st.DataObject) -> None:
    held = np.zeros(padded_bytes(len(content)), dtype=np.uint8)
    held[: len(content)] = np.frombuffer(content, dtype=np.uint8)
    before = position_sum(held)
    at = data.draw(st.integers(0, len(content) - 1))
    held[at] ^= 1 << data.draw(st.integers(0, 7))
    assert position_sum(held) != before
    turned = np.concatenate((held[ROW_BYTES:], held[:ROW_BYTES]))
    assert (position_sum(turned) == position_sum(held)) == (turned.tobytes() == held.tobytes())


class _Live(TorchDispatchMode):
    """The most bytes of storages that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.most, self._known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self._take(tensor.untyped_storage())
        return result

    def _take(self, storage: Any) -> None:
        # Storages die with their last tensor; their Python objects may die before, so the C++ one is watched.
        if storage._cdata in self._known:
            return
        size, number = storage.nbytes(), storage._cdata
        self._known.add(number)
        self.held += size
        self.most = max(self.most, self.held)
        weakref.finalize(storage, self._drop, number, size)

    def _drop(self, number: int, size: int) -> None:
        self._known.discard(number)
        self.held -= size


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda d: d.name)
def test_a_slice_takes_no_more_memory_than_is_planned(source: Dtype, target: Dtype, gathered: bool) -> None:
    slice_bytes = 1 << 20
    size, held = source.itemsize_bytes, slice_bytes * (2 if gathered else 1)
    count = slice_bytes // size
    step = 8
    begin = torch.arange(0, 2 * count, 2 * step, dtype=torch.int32)
    rows = torch.stack([begin, torch.full_like(begin, step)]) if gathered else 0
    with _Live() as live:
        data = torch.zeros(padded_bytes(held), dtype=torch.uint8)
        outcome = run(data, rows, count, (source, target), padded_bytes(count * target.itemsize_bytes))
        del outcome
    assert live.most <= LANE_FACTOR * slice_bytes
    assert live.most > 2 * slice_bytes, "the trace sees something"


def test_stations_keep_to_the_memory_that_they_are_given() -> None:
    for memory in (4 << 20, 20 << 20, 1 << 30):
        stations = lanes.Stations("cpu", memory, most=8, slice_bytes=4 << 20)
        assert stations.count * lanes.LANES * LANE_FACTOR * stations.slice_bytes <= memory
    with pytest.raises(RuntimeError, match="not enough"):
        lanes.Stations("cpu", 1 << 20, most=8, slice_bytes=4 << 20)


def test_no_station_free_means_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = on_device()
    held: list[Station | None] = []
    while (station := kernel.start().taken()) is not None:
        held.append(station)
    data = weights(10_000)
    assert kernel.cast(data, FP32, BF16).tobytes() == NumpyCast().cast(data, FP32, BF16).tobytes()
    assert kernel.report()["device_bytes"] == 0
    assert not kernel.take_warnings()


def model_with(cpu: Line, device: Line) -> CostModel:
    return CostModel(lambda _, size: cpu.seconds(size), lambda _, size: device.seconds(size))


FAST, SLOW = Line(0.0, 10e9), Line(100e-6, 1e9)


@pytest.mark.parametrize(("cpu", "device", "wanted"), [(FAST, SLOW, False), (SLOW, FAST, True)])
def test_the_sooner_one_casts(cpu: Line, device: Line, wanted: bool) -> None:
    kernel = on_device(always=False, model=model_with(cpu, device))
    kernel.cast(weights(1 << 20), FP32, BF16)
    report = kernel.report()
    assert (report["device_bytes"] > 0, report["cpu_bytes"] > 0) == (wanted, not wanted)


def test_a_fixed_cost_keeps_small_casts_here_and_sends_large_ones() -> None:
    model = model_with(Line(0.0, 4e9), Line(200e-6, 20e9))
    assert not model.prefers_device((FP32, BF16), 512 << 10)
    assert model.prefers_device((FP32, BF16), 4 << 20)


def test_what_waits_for_the_device_counts() -> None:
    model = model_with(Line(0.0, 4e9), Line(0.0, 10e9))
    assert model.prefers_device((FP32, BF16), 4 << 20)
    model.queued(16 << 20)
    assert not model.prefers_device((FP32, BF16), 4 << 20)
    model.queued(-(16 << 20))
    assert model.prefers_device((FP32, BF16), 4 << 20)


@given(st.floats(0, 1e-2), st.floats(1e6, 1e11))
def test_a_line_through_two_points(fixed_s: float, bytes_per_s: float) -> None:
    true = Line(fixed_s, bytes_per_s)
    found = Line.through((1 << 17, true.seconds(1 << 17)), (1 << 20, true.seconds(1 << 20)))
    assert found.seconds(3 << 19) == pytest.approx(true.seconds(3 << 19), rel=1e-3)


def test_what_is_measured_is_reported() -> None:
    kernel = on_device(always=False, memory_bytes=1 << 30)
    data = weights(1 << 18)
    kernel.cast(data, FP32, BF16)
    measured = kernel.report()["measured"]["float32 to bfloat16"]
    assert measured["cpu"]["gb_per_s"] > 0
    assert measured["device"]["gb_per_s"] > 0


def test_little_is_cast_without_looking_for_a_device() -> None:
    kernel = DeviceCast("cuda:99", always=False, warm_up_bytes=1 << 30)
    kernel.cast(weights(1 << 18), FP32, BF16)
    assert not kernel.take_warnings()


def test_auto_goes_on_without_a_device_that_is_not_there() -> None:
    kernel, data = DeviceCast("cuda:99", always=False), weights(1 << 18)
    assert kernel.cast(data, FP32, BF16).tobytes() == NumpyCast().cast(data, FP32, BF16).tobytes()
    assert kernel.report()["off"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_rule_itself_counts_what_is_special() -> None:
    values = np.array([1.0, 70000.0, -1e30, np.inf, np.nan, 0.0, -0.0, 1e-9], dtype=np.float32).view(np.uint8)
    assert special(by_the_rule(values, FP32, FP16), FP32, FP16) == 7
    assert special(by_the_rule(values, FP32, BF16), FP32, BF16) == 4


# A whole conversion whose casts go through the device's program: the same target, byte for byte.


Use = Callable[[CastKernel], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Makes a kernel that of every conversion from now on."""

    def choose(kernel: CastKernel) -> None:
        for module in (conversion, executor, full, agreements):
            monkeypatch.setattr(module, "default_kernel", lambda: kernel)

    return choose


def digests(target: Path) -> dict[str, str]:
    """Everything but the manifest, which says when it was made."""
    files = (p for p in target.rglob("*") if p.is_file() and p.name != MANIFEST_NAME)
    return {str(p.relative_to(target)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.mark.parametrize("dtype", [WeightDtype.BF16, WeightDtype.FP16])
@pytest.mark.parametrize("to", [TargetFormat.SAFETENSORS, TargetFormat.TORCH])
@pytest.mark.parametrize("source", ["zero2_tiny", "zero3_tiny"])
def test_the_target_is_the_same(source: str, to: TargetFormat, dtype: WeightDtype, tmp_path: Path, use: Use) -> None:
    use(NumpyCast())
    plain = convert(DATA / source, tmp_path / "cpu" / "out", to, dtype=dtype)
    kernel = DeviceCast("cpu", least_bytes=0, slice_bytes=64 << 10, memory_bytes=64 << 20)
    use(kernel)
    ours = convert(DATA / source, tmp_path / "device" / "out", to, dtype=dtype)
    assert kernel.report()["device_bytes"] > 0, "it was used"
    assert kernel.report()["cpu_bytes"] == 0
    assert ours.warnings == plain.warnings
    assert digests(tmp_path / "device" / "out") == digests(tmp_path / "cpu" / "out")


def test_a_device_without_room_is_said_and_changes_nothing(
    tmp_path: Path, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(NumpyCast())
    plain = convert(DATA / "zero3_tiny", tmp_path / "cpu" / "out", TargetFormat.SAFETENSORS, dtype=WeightDtype.BF16)

    def no_room(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device, "run", no_room)
    use(DeviceCast("cpu", least_bytes=0))
    ours = convert(DATA / "zero3_tiny", tmp_path / "device" / "out", TargetFormat.SAFETENSORS, dtype=WeightDtype.BF16)
    said = [w for w in ours.warnings if w not in plain.warnings]
    assert len(said) == 1
    assert "out of memory" in said[0]
    assert digests(tmp_path / "device" / "out") == digests(tmp_path / "cpu" / "out")


def test_batches_are_read_into_the_memory_that_is_sent(
    tmp_path: Path, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not copied once more to pinned memory."""
    sent: list[bool] = []
    submit = device._Lane.submit

    def seen(lane: device._Lane, source: device.Source, *rest: Any) -> None:
        sent.append(len(source.pinned) > 0)
        submit(lane, source, *rest)

    monkeypatch.setattr(device._Lane, "submit", seen)
    kernel = DeviceCast("cpu", least_bytes=0)
    kernel.start()
    use(kernel)
    convert(DATA / "zero3_tiny", tmp_path / "out", TargetFormat.SAFETENSORS, dtype=WeightDtype.BF16)
    assert sum(sent) > len(sent) // 2
