"""Target formats as readers that share nothing with the engine: torch's safe loader and the safetensors library."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from safetensors.torch import load

from laws.torch_values import bits_of, cast, load as torch_load, tensor_of, tree_of
from reshard.choices import TargetFormat
from reshard.models.jobs import ConvertRequest
from reshard_engine.tensors.dtypes import SHORT_NAMES
from reshard_engine.testing.logical import MASTER, Bits, Content, LogicalState, Saved, Tree

MANIFEST = "reshard.json"
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_OPTIMIZER_FILE = "zero/optimizer_state.pt"
OPENED: Counter[str] = Counter()
"""Consolidated files that were opened so far, by the library that did."""
_SHARDS = st.sampled_from([None, None, 1, 300, 20_000])


def rounded(bits: Bits, dtype: str) -> Bits:
    """What torch makes of a tensor; NaNs keep their sign, which torch's kernels do only now and then."""
    after = cast(bits, dtype)
    if after is bits or not bits.numel:
        return after
    signs = np.frombuffer(bits.data, dtype=np.uint8).reshape(bits.numel, -1)[:, -1] & 0x80
    found = np.frombuffer(after.data, dtype=np.uint8).reshape(bits.numel, -1).copy()
    nan = tensor_of(bits).isnan().flatten().numpy()
    found[nan, -1] = found[nan, -1] & 0x7F | signs[nan]
    return Bits(dtype, bits.shape, found.tobytes())


def overflowed(before: Bits, after: Bits) -> int:
    """Elements that were finite and became infinite."""
    finite = tensor_of(before).isfinite()
    return int((finite & tensor_of(after).isinf()).sum())


def _cast_down(name: str, bits: Bits, dtype: str | None) -> Content:
    """One tensor as consolidated weights hold it: floating ones with dimensions are cast, all others kept."""
    if not bits.floating or bits.shape == () or bits.dtype.startswith("float8") or dtype in (None, bits.dtype):
        return Content({name: bits})
    after = rounded(bits, dtype)
    lost = overflowed(bits, after)
    return Content({name: after}, frozenset({name}), overflows={name: lost} if lost else {})


def together(parts: Iterator[Content]) -> Content:
    """All parts as one content."""
    tensors: dict[str, Bits] = {}
    values: dict[str, Tree] = {}
    overflows: dict[str, int] = {}
    names: set[str] = set()
    for part in parts:
        tensors |= part.tensors
        values |= part.values
        overflows |= part.overflows
        names |= part.cast
    return Content(tensors, frozenset(names), values, overflows)


@dataclass(frozen=True)
class WeightsTarget:
    """Consolidated weights, one of the two containers."""

    to: TargetFormat
    wants_full_state: bool = False

    @property
    def name(self) -> str:
        """For reports."""
        return self.to.value

    def options(self) -> st.SearchStrategy[Mapping[str, Any]]:
        """Element type, file size, frozen or not."""
        return st.fixed_dictionaries(
            {
                "to": st.just(self.to),
                "dtype": st.sampled_from([None, "fp32", "bf16", "fp16"]),
                "max_shard_bytes": _SHARDS,
                "exclude_frozen": st.booleans(),
            }
        )

    def expected(self, saved: Saved, request: ConvertRequest) -> Content:
        """The best value of each parameter and every buffer, cast if a type is wanted."""
        state = saved.state
        dtype = SHORT_NAMES[request.dtype] if request.dtype else None
        kept = [p for p in state.parameters if not request.exclude_frozen or p.group is not None]
        named = [(p.fqn, p.value) for p in kept] + list(state.buffers.items())
        named += [(a, state.parameter(state.aliases[a]).value) for a in saved.copies]
        content = together(_cast_down(name, bits, dtype) for name, bits in named if bits is not None)
        aliases = {a: o for a, o in state.aliases.items() if o in content.tensors and a not in saved.copies}
        return Content(content.tensors, content.cast, {"aliases": dict(sorted(aliases.items()))}, content.overflows)

    def read(self, files: Mapping[str, bytes]) -> Content:
        """Tensors by name; aliases as the container says them."""
        stem = "model.safetensors" if self.to is TargetFormat.SAFETENSORS else "pytorch_model.bin"
        rest = {name: data for name, data in files.items() if name != MANIFEST}
        index = rest.pop(f"{stem}.index.json", None)
        read = _read_safetensors if self.to is TargetFormat.SAFETENSORS else _read_torch
        tensors: dict[str, Bits] = {}
        aliases: dict[str, str] = {}
        where: dict[str, str] = {}
        for name, data in rest.items():
            found, known = read(data)
            assert not tensors.keys() & found.keys(), "a tensor is in two files"
            tensors |= found
            aliases |= known
            where |= dict.fromkeys(found, name)
        if index is None:
            assert set(rest) == {stem}, f"files {sorted(rest)}"
        else:
            said = json.loads(index)
            assert said["weight_map"] == where
            assert said["metadata"]["total_size"] == sum(len(t.data) for t in tensors.values())
        return Content(tensors, values={"aliases": dict(sorted(aliases.items()))})


def _read_safetensors(data: bytes) -> tuple[dict[str, Bits], dict[str, str]]:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header["__metadata__"]
    assert metadata.pop("format") == "pt"
    found = {name: bits_of(tensor) for name, tensor in load(data).items()}
    OPENED["safetensors"] += 1
    return found, metadata


def _read_torch(data: bytes) -> tuple[dict[str, Bits], dict[str, str]]:
    tensors: dict[str, Bits] = {}
    aliases: dict[str, str] = {}
    owners: dict[int, str] = {}
    for name, tensor in torch_load(data).items():
        storage = tensor.untyped_storage()
        assert storage.nbytes() == tensor.numel() * tensor.element_size(), f"{name}: foreign bytes"
        owner = owners.setdefault(storage.data_ptr(), name) if tensor.numel() else name
        if owner == name:
            tensors[name] = bits_of(tensor)
        else:
            aliases[name] = owner
    OPENED["torch"] += 1
    return tensors, aliases


@dataclass(frozen=True)
class UniversalTarget:
    """The DeepSpeed universal checkpoint."""

    name: str = "universal"
    wants_full_state: bool = True
    _own_keys: tuple[str, ...] = field(default=("mp_world_size",), repr=False)

    def options(self) -> st.SearchStrategy[Mapping[str, Any]]:
        """Frozen or not."""
        return st.fixed_dictionaries({"to": st.just(TargetFormat.UNIVERSAL), "exclude_frozen": st.booleans()})

    def expected(self, saved: Saved, request: ConvertRequest) -> Content:
        """Atoms, counters, the whole module, and all non-tensor state."""
        state = saved.in_the_run().state
        loose = () if request.exclude_frozen else state.of_group(None)
        tensors = dict(_atoms(state))
        overflows: dict[str, int] = {}
        for parameter in loose:
            if parameter.weight is not None and parameter.weight.floating:
                tensors[f"{MASTER}/{parameter.fqn}"] = after = rounded(parameter.weight, "float32")
                if lost := overflowed(parameter.weight, after):
                    overflows[parameter.fqn] = lost
        tensors |= {f"module/{n}": bits for n, bits in _module(state, without_frozen=request.exclude_frozen)}
        values: dict[str, Tree] = {f"state/{k}": v for k, v in state.values.items()}
        values |= {f"optimizer/{k}": v for k, v in state.optimizer_values.items()}
        values |= {f"step/{p.fqn}": step for p in state.trained if (step := _step(state, p.group or 0)) is not None}
        for index, group in enumerate(state.groups or ()):
            values |= {f"group/{index}/{k}": v for k, v in group.items()}
        values["buffers"] = set(state.buffers)
        cast_names = {f"{MASTER}/{p.fqn}" for p in loose if p.weight is not None and p.weight.dtype != "float32"}
        return Content(tensors, frozenset(cast_names), values, overflows)

    def read(self, files: Mapping[str, bytes]) -> Content:
        """Atoms by `<state>/<fqn>`, the module by `module/<fqn>`, everything else as values."""
        tensors: dict[str, Bits] = {}
        values: dict[str, Tree] = {}
        for path, data in files.items():
            if path in {MANIFEST, _OPTIMIZER_FILE, *_MODEL_FILES}:
                continue
            fqn, _, file = path.removeprefix("zero/").rpartition("/")
            state = file.removesuffix(".pt")
            assert path == f"zero/{fqn}/{state}.pt", f"{path} has no business here"
            found = torch_load(data)
            if state == "step":
                values[f"step/{fqn}"] = tree_of(found)
            else:
                assert list(found) == ["param"]
                tensors[f"{state}/{fqn}"] = bits_of(found["param"])
        first, second = (torch_load(files[name]) for name in _MODEL_FILES)
        assert repr(tree_of({**first, "module": None})) == repr(tree_of({**second, "module": None}))
        trained = {n for group in first["param_shapes"] for n in group}
        tied = {first["module"][n].data_ptr() for n in trained if n in first["module"]} - {0}
        rest = {n: v for n, v in first["module"].items() if n not in trained and v.data_ptr() not in tied}
        assert {n: bits_of(v) for n, v in rest.items()} == {n: bits_of(v) for n, v in second["module"].items()}
        assert first["mp_world_size"] == 1
        tensors |= {f"module/{name}": bits_of(tensor) for name, tensor in first["module"].items()}
        values["buffers"] = set(first["buffer_names"])
        values |= {f"state/{k}": tree_of(v) for k, v in first.items()}
        return Content(tensors, values=values | self._optimizer(torch_load(files[_OPTIMIZER_FILE])))

    def _optimizer(self, found: dict[str, Any]) -> dict[str, Tree]:
        groups = found["param_groups"]
        assert repr(tree_of(found["optimizer_state_dict"]["param_groups"])) == repr(tree_of(groups))
        values: dict[str, Tree] = {f"optimizer/{k}": tree_of(v) for k, v in found.items()}
        for index, group in enumerate(groups):
            values |= {f"group/{index}/{k}": tree_of(v) for k, v in group.items()}
        return values


def _module(state: LogicalState, *, without_frozen: bool) -> Iterator[tuple[str, Bits]]:
    gone = {p.fqn for p in state.of_group(None)} if without_frozen else set()
    for name in state.order:
        owner = state.aliases.get(name, name)
        bits = state.buffers.get(owner) or (None if owner in state.buffers else state.parameter(owner).weight)
        if bits is not None and owner not in gone:
            yield name, bits


def _atoms(state: LogicalState) -> Iterator[tuple[str, Bits]]:
    fresh = (
        not state.state_names and state.groups is not None and all("betas" in g and "eps" in g for g in state.groups)
    )
    for parameter in state.trained:
        for name, bits in parameter.states.items():
            yield f"{name}/{parameter.fqn}", bits
        if fresh:  # Adam before its first step: what it would start from
            for name in ("exp_avg", "exp_avg_sq"):
                yield f"{name}/{parameter.fqn}", Bits("float32", parameter.shape, bytes(4 * _numel(parameter.shape)))


def _numel(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _step(state: LogicalState, group: int) -> Tree:
    step = state.steps[group]
    # Without groups (elastic) they are made from the drawn `ds_config`, which names AdamW.
    adam = state.groups is None or all("betas" in g and "eps" in g for g in state.groups)
    adam &= not state.state_names or {"exp_avg", "exp_avg_sq"} <= set(state.state_names)
    return Bits("float32", (), bytes(4)) if step is None and adam else step
