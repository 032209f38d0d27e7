"""Distributed checkpoints as a target, read by torch's own classes: `.metadata` by Python's pickle, records one by one.

Source: torch 2.13.0 `distributed/checkpoint/filesystem.py` (`FileSystemReader.read_data`: a record is the bytes of its
place), `distributed/checkpoint/_nested_dict.py` (paths of `planner_data`).
"""

from __future__ import annotations

import io
import json
import pickle
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from laws.dcp_files import flattened, nested
from laws.targets import MANIFEST
from laws.torch_values import bits_of, load, torch_value, tree_of
from reshard.choices import MissingMoments
from reshard.dcp_options import DcpOptions, Framework
from reshard.models.jobs import ConvertRequest
from reshard_engine.testing.logical import Bits, Case, Content, LogicalState, Saved, Tree

TARGET = "dcp"
_COUNTERS = {"skipped_steps", "global_steps", "global_samples", "global_tokens", "ds_config"}
_OPTIMIZERS = ("optimizer", "optim", "optimizer_0")
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_RANDOM = re.compile(r"random_states_\d\.pkl|rng_state(_\d)?\.pth")
"""Random states of one trainer are of no use to another framework: no other format carries them."""
_COMPANION = re.compile(rf"scheduler(_\d)?\.(bin|pt)|{_RANDOM.pattern}|custom_checkpoint_\d\.pkl|meta\.pt")
_MADE_SCHEDULER = {"last_batch_iteration", "last_epoch", "_step_count", "lr_lambdas", "_scale_fn_custom"}
"""The Trainer loads no optimizer without a scheduler: a target of a source without one gets a count of updates."""
Path = tuple[str | int, ...]


def with_neutral_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request from fields whose options of formats stand beside the policy for missing moments."""
    options = dict(fields["options"])
    return {**fields, "missing_moments": options.pop("missing_moments"), "options": options}


@dataclass(frozen=True)
class DcpTarget:
    """Directories that `torch.distributed.checkpoint` and the trainers on top of it load."""

    name: str = TARGET
    wants_full_state: bool = False

    def options(self) -> st.SearchStrategy[Mapping[str, Any]]:
        """Keys of each framework, number of files, states of idle parameters, frozen or not."""
        plain = st.fixed_dictionaries(
            {
                "framework": st.sampled_from([None, *(f for f in Framework if f is not Framework.TORCHTUNE)]),
                "files": st.sampled_from([None, 1, 2, 3]),
                "missing_moments": st.sampled_from([MissingMoments.ZERO, MissingMoments.OMIT]),
            }
        )
        placed = st.just(
            {"framework": Framework.STATE_DICT, "target_model_key": "app.model", "target_optimizer_key": "app.optim"}
        )
        chosen = (plain | placed).map(
            lambda o: {
                TARGET: {k: v for k, v in o.items() if v is not None and k != "missing_moments"},
                "missing_moments": o.get("missing_moments", MissingMoments.ZERO),
            }
        )
        fields = {"to": st.just(TARGET), "exclude_frozen": st.booleans(), "options": chosen}
        return st.fixed_dictionaries(fields).map(with_neutral_options)

    def takes(self, case: Case) -> bool:
        """True unless torch itself could not save such a state: without param groups, or with two entries of a key."""
        if getattr(case.layout, "elastic", False):
            return False
        try:
            flattened({k: torch_value(v) for k, v in case.state.values.items() if k not in _COUNTERS})
        except ValueError:
            return False
        return True

    def expected(self, saved: Saved, request: ConvertRequest) -> Content:
        """Masters and moments as they were, hyper-parameters by parameter, and what a script saved beside them."""
        state, options = saved.state, request.options.of(DcpOptions)
        model = {
            p.fqn: p.value
            for p in state.parameters
            if p.value is not None and not (request.exclude_frozen and p.group is None)
        }
        model |= state.buffers
        model |= {alias: model[owner] for alias, owner in state.aliases.items() if owner in model}
        short = _short_names(model)
        tensors = {f"model/{short[name]}": bits for name, bits in model.items()}
        values: dict[str, Tree] = dict(_beside(state, options.framework))
        omitted = saved.never_updated if request.missing_moments is MissingMoments.OMIT else frozenset[str]()
        for parameter in state.trained:
            fqn, group = short[parameter.fqn], parameter.group or 0
            values |= {f"hyper/{fqn}/{k}": v for k, v in ((state.groups or ())[group]).items()}
            if parameter.fqn in omitted:
                continue
            tensors |= {f"{name}/{fqn}": parameter.states[name] for name in state.state_names}
            step = state.steps[group]
            if step is not None and (state.state_names or not isinstance(step, int)):
                tensors[f"step/{fqn}"] = _as_tensor(0 if parameter.fqn in saved.never_updated else step)
        return Content(tensors, values=values)

    def read(self, files: Mapping[str, bytes]) -> Content:
        """Every record of every file once, put together by the metadata."""
        rest = {name: data for name, data in files.items() if name != MANIFEST}
        entries: dict[Path, Any] = {}
        for name in [n for n in rest if n.rpartition("/")[2] == ".metadata"]:
            folder = name.removesuffix(".metadata")
            own = {n: rest.pop(n) for n in list(rest) if n.startswith(folder) and "/" not in n[len(folder) :]}
            beside = {n: own.pop(n) for n in list(own) if _COMPANION.fullmatch(n)}
            rest |= beside
            entries |= _entries({n.removeprefix(folder): data for n, data in own.items()})
        values = dict(_companions(rest))
        tensors: dict[str, Bits] = {}
        for key, value in _Reading(entries).named():
            if isinstance(value, Bits) and not key.startswith(("beside/", "hyper/")):
                tensors[key] = value
            else:
                values[key] = value
        return Content(tensors, values=values)


def _as_tensor(step: int | float | Bits) -> Bits:
    """Steps as torch's optimizers keep them: one number of 32 bits."""
    return step if isinstance(step, Bits) else Bits("float32", (), struct.pack("<f", step))


def _short_names(names: Mapping[str, object]) -> dict[str, str]:
    """Names without wrapping modules, and without `module.` if it is before all of them."""
    found = {name: ".".join(p for p in name.split(".") if p not in _WRAPPERS) for name in names}
    if all(short.startswith("module.") for short in found.values()):
        return {name: short.removeprefix("module.") for name, short in found.items()}
    return found


def _beside(state: LogicalState, framework: Framework | None) -> Iterator[tuple[str, Tree]]:
    kept = {k: v for k, v in state.values.items() if k not in _COUNTERS}
    scheduler = kept.pop("lr_scheduler", None)
    found = {k: torch_value(v) for k, v in kept.items()}
    if isinstance(scheduler, dict) and "last_epoch" in scheduler:
        files = {Framework.ACCELERATE: "scheduler.bin", Framework.TRAINER: "scheduler.pt"}
        if framework is not None and framework in files:
            yield f"file/{files[framework]}", scheduler
        elif framework is Framework.LIGHTNING:
            yield "meta/lr_schedulers", [scheduler]
        else:
            found["lr_scheduler"] = scheduler
    if framework is Framework.LIGHTNING:
        yield from ((f"meta/{k}", tree_of(v)) for k, v in found.items())
    elif framework in (Framework.STATE_DICT, Framework.TORCHTITAN):
        if framework is Framework.TORCHTITAN:  # every tensor at the root is the model's
            found = {k: v for k, v in found.items() if not isinstance(v, torch.Tensor)}
        yield from ((f"beside/{k}", tree_of(v)) for k, v in nested(*flattened(found)).items())
    elif framework in (Framework.ACCELERATE, Framework.TRAINER):
        yield from ((f"file/{k}", tree_of(v)) for k, v in found.items() if _COMPANION.fullmatch(k))


def _companions(files: Mapping[str, bytes]) -> Iterator[tuple[str, Tree]]:
    for name, data in files.items():
        if name == "trainer_state.json":
            assert isinstance(json.loads(data)["global_step"], int)
            continue
        assert _COMPANION.fullmatch(name), f"{name} has no business here"
        found = tree_of(load(data))
        if name == "scheduler.pt" and found.keys() == _MADE_SCHEDULER:
            assert found["_step_count"] == found["last_epoch"] + 1 == found["last_batch_iteration"] + 2
            continue
        if name == "meta.pt":
            yield from ((f"meta/{k}", v) for k, v in found.items())
        elif not _RANDOM.fullmatch(name):
            yield f"file/{name}", found


def _entries(files: dict[str, bytes]) -> dict[Path, Any]:
    """The state dict of one directory, by paths; tensors as bits."""
    metadata: Metadata = pickle.loads(files.pop(".metadata"))
    assert metadata.version == "1.0.0"
    assert metadata.storage_meta is None, "it would say where the source was"
    described = metadata.state_dict_metadata
    assert list(metadata.planner_data) == list(described)
    assert all(".".join(map(str, path)) == key for key, path in metadata.planner_data.items())
    places = dict(metadata.storage_data)
    _check_files(places, files)
    found: dict[Path, Any] = {}
    for key, entry in described.items():
        path = metadata.planner_data[key]
        if isinstance(entry, BytesStorageMetadata):
            found[path] = tree_of(load(_record(places.pop(MetadataIndex(key)), files)))
        else:
            found[path] = _tensor(key, entry, places, files)
    assert not places, f"places of nothing: {list(places)[:3]}"
    return found


def _check_files(places: Mapping[MetadataIndex, Any], files: Mapping[str, bytes]) -> None:
    """Records lie end to end, and nothing lies beside them."""
    ranges: dict[str, list[tuple[int, int]]] = {name: [] for name in files}
    for place in places.values():
        assert place.transform_descriptors is None
        ranges[place.relative_path].append((place.offset, place.length))
    for name, found in ranges.items():
        at = 0
        for offset, length in sorted(found):
            assert offset == at, f"{name}: a record at {offset}, the one before ends at {at}"
            at += length
        assert at == len(files[name]), f"{name}: {len(files[name]) - at} bytes of no record"


def _record(place: Any, files: Mapping[str, bytes]) -> bytes:
    return files[place.relative_path][place.offset : place.offset + place.length]


def _tensor(
    key: str, entry: TensorStorageMetadata, places: dict[MetadataIndex, Any], files: Mapping[str, bytes]
) -> Bits:
    """The whole of a tensor from its chunks, which cover it once."""
    whole = torch.empty(entry.size, dtype=entry.properties.dtype)
    painted = np.zeros(tuple(entry.size), dtype=np.int8)
    hints = {index.offset: index.index for index in places if index.fqn == key}
    for number, chunk in enumerate(entry.chunks):
        record = _record(places.pop(MetadataIndex(key, chunk.offsets)), files)
        tensor = torch.load(io.BytesIO(record), weights_only=True)
        assert (tensor.dtype, tensor.shape) == (whole.dtype, chunk.sizes)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, f"{key}: foreign bytes"
        assert hints[chunk.offsets] == number
        box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[box] = tensor
        painted[box] += 1
    assert (painted == 1).all(), f"{key} is not covered once"
    return bits_of(whole)


def _nested(entries: Mapping[Path, Any]) -> dict[str, Any]:
    """Entries as the dicts and lists that torch made them of."""
    keys = {".".join(map(str, path)): path for path in entries}
    return nested({key: entries[path] for key, path in keys.items()}, keys)


class _Reading:
    """A state dict under any framework's keys."""

    def __init__(self, entries: Mapping[Path, Any]) -> None:
        self._entries = {path[path[0] == "app" :]: value for path, value in entries.items()}
        self._is_at_root = not any(path[0] == "model" for path in self._entries)
        names = [n for n in map(self._weight, self._entries) if n is not None]
        short = _short_names(dict.fromkeys(names))
        # torch's optimizers have plain names beside a model with those of wrapping modules.
        self._short = {name: name for name in short.values()} | short

    def _weight(self, path: Path) -> str | None:
        if path[0] == "model":
            return str(path[1])
        tensor = len(path) == 1 and isinstance(self._entries[path], Bits)
        return str(path[0]) if tensor and self._is_at_root else None

    def named(self) -> Iterator[tuple[str, Any]]:
        """Every entry by its role."""
        groups: dict[Path, Any] = {}
        beside: dict[Path, Any] = {}
        for path, value in self._entries.items():
            if (name := self._weight(path)) is not None:
                yield f"model/{self._short[name]}", value
            elif path[0] not in _OPTIMIZERS:
                beside[path] = value
            elif (state := self._state(path[1:])) is not None:
                # Of optimizers that are not known to be torch's, a Python number stays one.
                yield state, _as_tensor(value) if type(value) in (int, float) else value
            else:
                groups[path[1:]] = value
        yield from ((f"beside/{key}", tree) for key, tree in _nested(beside).items())
        yield from self._hyper_parameters(_nested(groups))

    def _state(self, path: Path) -> str | None:
        head = str(path[0])
        if head.startswith("state."):
            name, _, state = head.removeprefix("state.").rpartition(".")
            return f"{state}/{self._short[name]}"
        return f"{path[2]}/{self._short[str(path[1])]}" if head == "state" else None

    def _hyper_parameters(self, groups: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for group in groups.pop("param_groups", ()):
            members = group.pop("params")
            yield from ((f"hyper/{self._short[n]}/{k}", v) for n in members for k, v in group.items())
        for head, value in groups.items():
            name, _, key = head.removeprefix("param_groups.").rpartition(".")
            yield f"hyper/{self._short[name]}/{key}", value
