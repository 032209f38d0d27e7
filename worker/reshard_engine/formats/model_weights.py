"""The tensors of a checkpoint that are the weights of its model: their names, and their element types in a target."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from reshard.choices import NO_BUFFERS, EmptyWeights
from reshard.errors import JobError, RequestError, SourceError, counted, listed, printable
from reshard.models.jobs import ConvertRequest
from reshard_engine.checkpoint import Checkpoint, Question, Undecided
from reshard_engine.tensors.dtypes import BY_NAME, FLOAT32, SHORT_NAMES, Dtype
from reshard_engine.tensors.layout import require_distinct


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the output."""

    fqn: str
    tensor: int
    dtype: Dtype
    shape: tuple[int, ...]
    numel: int

    @property
    def size_bytes(self) -> int:
        """Bytes in the output."""
        return self.numel * self.dtype.itemsize_bytes


def weights_of(checkpoint: Checkpoint, request: ConvertRequest) -> list[Weight]:
    """Every tensor to write: trained parameters from their masters, frozen ones, buffers, and possible copies.

    Floating-point tensors are cast to the requested dtype; scalars, integers, booleans and 8-bit floats keep their
    types. Without a requested dtype every tensor keeps its type: masters theirs, all other tensors the stored one.

    Raises:
        RequestError: `request.unsatisfiable` if a parameter is stored nowhere, or if frozen parameters are to be left
            out and the source does not say which are frozen.
        SourceError: `checkpoint.ambiguous` if two tensors would have one name.
    """
    if request.exclude_frozen and not checkpoint.trained:
        raise RequestError(
            "request.unsatisfiable",
            "the source holds weights only: it does not say which of them were frozen",
            fix="leave out --exclude-frozen, or name the training checkpoint as the source",
        )
    wanted = BY_NAME[SHORT_NAMES[request.dtype.value]] if request.dtype else None
    found: list[Weight] = []
    for parameter in checkpoint.parameters:
        if request.exclude_frozen and not parameter.trained:
            continue
        found.append(_weight(checkpoint, parameter.fqn, parameter.value(), wanted))
    found += [_weight(checkpoint, b.fqn, b.tensor, wanted) for b in checkpoint.buffers]
    found += [_weight(checkpoint, name, number, wanted) for name, number in checkpoint.copies.items()]
    require_distinct(w.fqn for w in found)
    return found


def model_dtype(checkpoint: Checkpoint, request: ConvertRequest) -> str | None:
    """The name of the type that holds every written parameter exactly; None where no parameter is a float."""
    if request.dtype is not None:
        return SHORT_NAMES[request.dtype.value]
    written = (p for p in checkpoint.parameters if p.best is not None and (p.trained or not request.exclude_frozen))
    types = {checkpoint.shard_map.tensors[p.value()].dtype for p in written}
    floats = {dtype.name: dtype.itemsize_bytes for dtype in types if dtype.floating and dtype.itemsize_bytes > 1}
    # Neither of two 16-bit types holds the numbers of the other.
    both = len(floats) == 2 and set(floats.values()) == {2}
    return FLOAT32.name if both else max(floats, key=lambda name: floats[name], default=None)


def _weight(checkpoint: Checkpoint, fqn: str, index: int, wanted: Dtype | None) -> Weight:
    stored = checkpoint.shard_map.tensors[index]
    cast = stored.dtype.floating and stored.shape != () and stored.dtype.itemsize_bytes > 1
    return Weight(fqn, index, wanted if cast and wanted else stored.dtype, stored.shape, stored.numel)


# Names of parameters and optimizer states: checks before they become parts of paths, and PEFT's names for files.

MAX_NAME_CHARS = 512
_STATE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def checked_name(name: str) -> str:
    """Check a parameter name, which may become part of a path.

    Raises:
        SourceError: `name.invalid` otherwise.
    """
    parts = name.split("/")
    bad = not name or len(name) > MAX_NAME_CHARS or not name.isprintable() or "\\" in name
    if bad or any(p in ("", ".", "..") for p in parts):
        raise SourceError(
            "name.invalid", f"a parameter is called {printable(name)!r}", fix="rename it in the checkpoint"
        )
    return name


def checked_state(name: object) -> str:
    """Check the name of an optimizer state, which becomes a file name and must be a plain word.

    Raises:
        SourceError: `name.invalid` otherwise, and for `fp32`, which means the master.
    """
    if not isinstance(name, str) or _STATE.fullmatch(name) is None or name == "fp32" or ".." in name:
        raise SourceError("name.invalid", f"an optimizer state is called {printable(str(name))!r}")
    return name


def name_without_adapter(fqn: str, adapter: str) -> str:
    """The name under which PEFT saves a parameter of an adapter; other names stay as they are.

    Source: peft 0.21.2 `tuners/tuners_utils.py` (`_remove_adapter_name_from_state_dict_key`), `utils/other.py`
    (`ModulesToSaveWrapper.adapter_state_dict`), `tuners/lora/model.py` (`_get_adapter_state_dict`: magnitudes of DoRA
    without `.weight`); verified by running.
    """
    module, saved, tail = fqn.rpartition(f".modules_to_save.{adapter}.")
    name = f"{module}.{tail}" if saved else fqn
    if name.endswith(f".lora_magnitude_vector.{adapter}.weight"):
        name = name.removesuffix(".weight")
    if name.endswith(f".{adapter}"):
        return name.removesuffix(f".{adapter}")
    head, dot, last = name.rpartition(".")
    return f"{head.removesuffix(f'.{adapter}')}{dot}{last}"


# Names of a model's state dict without those of modules that only wrap others, as FSDP and torch.compile make them.

_COMPILED = "_orig_mod"
_AROUND = "module."
"""What DistributedDataParallel and DataParallel put in front of every name."""
_WRAPPERS = frozenset({_COMPILED, "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Modules that only wrap others: of torch.compile, FSDP and activation checkpointing."""


def plain_names(names: Sequence[str]) -> dict[str, str]:
    """The names without those of wrappers, and without `module.` if all of them begin with it.

    Raises:
        SourceError: `checkpoint.ambiguous` if two names become one.
    """
    found = shown_names(names)
    refuse_equal_names(found.values())
    return found


def shown_names(names: Iterable[str]) -> dict[str, str]:
    """The names without those of wrappers, as `plain_names`, of which two may be equal."""
    found = {name: plain_name(name) for name in names}
    if found and all(plain.startswith("module.") for plain in found.values()):
        return {name: plain.removeprefix("module.") for name, plain in found.items()}
    return found


def listed_parameters(order: Sequence[str], stored: StoredNames, count: int) -> list[str]:
    """The stored names of the parameters that a user lists with `--param-order`.

    Args:
        order: The names, in the order of the optimizer.
        stored: The names of the model.
        count: The number of the optimizer's parameters.

    Raises:
        RequestError: `request.invalid` for a name that no parameter has, and unless each parameter is listed once.
    """
    found = stored.of_list(order)
    if unknown := [name for name, own in zip(order, found, strict=True) if own is None]:
        text = f"--param-order names {printable(unknown[0])}, and the model has no such parameter"
        raise RequestError("request.invalid", text, fix="name parameters as `reshard inspect` lists them")
    names = [name for name in found if name is not None]
    if len(names) != count or len({*names}) != count:
        text = f"--param-order has {counted(len({*names}), 'name')}, and the optimizer numbers {count}"
        raise RequestError("request.invalid", text, fix="list each parameter of the optimizer once, in its order")
    return names


def refuse_equal_names(plain: Collection[str]) -> None:
    """Refuse names of a state dict that are equal without those of wrappers.

    Raises:
        SourceError: `checkpoint.ambiguous`.
    """
    if len({*plain}) != len(plain):
        twice = Counter(plain).most_common(1)[0][0]
        raise SourceError(
            "checkpoint.ambiguous",
            f"two entries are called {printable(twice)} without the names of wrapping modules",
            fix="load the model under one kind of wrapper, and save it again",
        )


def plain_name(name: str) -> str:
    """The name without those of wrapping modules."""
    return ".".join(p for p in name.split(".") if p not in _WRAPPERS)


class StoredNames:
    """The stored name of a tensor for each name that an optimizer, a script or `reshard inspect` gives the tensor.

    `reshard inspect` leaves wrappers' names out of `module.up.weight` and `_orig_mod.module.up.weight`, a script prints
    them, and an optimizer may keep either form. A form that two tensors share is the name of neither.
    """

    def __init__(self, shown: Mapping[str, str]) -> None:
        """Index the names by their forms.

        Args:
            shown: For each stored name the one that `reshard inspect` lists.
        """
        self._stored = {name: name for name in shown}
        self._shown = _unique(shown.items())
        self._unwrapped = _unique((name, plain_name(name)) for name in shown)

    def of(self, name: str) -> str | None:
        """The stored name of a tensor; None if no tensor, or more than one, has a name like this."""
        plain = plain_name(name)
        # A file of `model.module.state_dict()` has no `module.`, and the script's own names have.
        ways = ((self._stored, name), (self._shown, name), (self._shown, plain), (self._unwrapped, plain))
        inner = plain.removeprefix("module.")
        found = (names.get(form) for names, form in (*ways, (self._shown, inner), (self._unwrapped, inner)))
        return next((stored for stored in found if stored is not None), None)

    def of_list(self, names: Sequence[str]) -> list[str | None]:
        """The stored name of each entry of a user's list, whose names are those of `reshard inspect` if all can be.

        A model under DDP may have a submodule called `module`: `module.up.weight` is then one tensor for `inspect`, and
        another one in the file.
        """
        if all(name in self._shown for name in names):
            return [self._shown[name] for name in names]
        return [self.of(name) for name in names]


def _unique(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The stored name for each form that one tensor alone has."""
    found: dict[str, list[str]] = {}
    for stored, form in pairs:
        found.setdefault(form, []).append(stored)
    return {form: names[0] for form, names in found.items() if len(names) == 1}


def without_wrappers(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint under the model's own names; `run_names` has those that wrapping modules made longer.

    Names that would be equal stay as they are.
    """
    owned = [*(p.fqn for p in checkpoint.parameters), *(b.fqn for b in checkpoint.buffers)]
    every = dict.fromkeys([*owned, *checkpoint.shared, *checkpoint.extra_states, *checkpoint.module_names])
    plain = {name: plain_name(name) for name in every}
    longer = {short: name for name, short in plain.items() if short != name}
    if longer and len({*plain.values()}) == len(plain):
        checkpoint = replace(checkpoint.renamed(plain), run_names=longer)
    if not checkpoint.run_names:
        return checkpoint
    parts = {part for name in checkpoint.run_names.values() for part in name.split(".") if part in _WRAPPERS}
    text = (
        f"{counted(len(checkpoint.run_names), 'tensor name')} with {listed(sorted(parts))}, the name of a module that "
        "wraps others (torch.compile, FSDP): only a target that the same run loads keeps it"
    )
    return replace(checkpoint, warnings=(*checkpoint.warnings, text))


def compiled_names(wrapped: Mapping[str, str]) -> dict[str, str]:
    """The names with torch.compile's wrapper alone, by plain name, for those that have it.

    The state dict of a model that was compiled by `torch.compile(model)` has them under every framework.
    """
    found: dict[str, str] = {}
    for plain, name in wrapped.items():
        parts = [part for part in name.split(".") if part == _COMPILED or part not in _WRAPPERS]
        if _COMPILED in parts:
            # What is in front of the plain name is `module`, of DistributedDataParallel: inside or around the compiled.
            extra = len([part for part in parts if part != _COMPILED]) - len(plain.split("."))
            around = [place for place, part in enumerate(parts) if part != _COMPILED][:extra]
            found[plain] = ".".join(part for place, part in enumerate(parts) if place not in around)
    return found


# The classes of sharded tensors in pickles of torch.

_TENSOR = ("torch.distributed.tensor", "torch.distributed._tensor")
"""The package of DTensors, and its name up to torch 2.4."""
_SHARD = "torch.distributed._shard"
DTENSORS = frozenset({
    *(f"{p}.DTensor" for p in _TENSOR),
    "torch.distributed.tensor._api.DTensor", "torch.distributed._tensor.api.DTensor",
})  # fmt: skip
SHARDED_TENSOR = f"{_SHARD}.sharded_tensor.api.ShardedTensor"
SHARDED_NAMES = frozenset({
    *DTENSORS,
    *(f"{p}.placement_types.{n}" for p in _TENSOR for n in (
        "Shard", "_StridedShard", "Replicate", "Partial", "_Partial", "DTensorSpec", "TensorMeta",
    )),
    *(f"{p}._dtensor_spec.{n}" for p in _TENSOR for n in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")),
    "torch.distributed.device_mesh.DeviceMesh",
    # Up to torch 2.1.
    "torch.distributed._tensor.device_mesh.DeviceMesh", "torch.fx.passes.shape_prop.TensorMetadata",
    "torch.distributed._mesh_layout._MeshLayout", "torch.distributed._mesh_layout._FlatLayout",
    SHARDED_TENSOR, f"{SHARDED_TENSOR}.ProcessGroupState",
    f"{_SHARD}.sharded_tensor.shard.Shard", f"{_SHARD}.metadata.ShardMetadata",
    f"{_SHARD}.sharded_tensor.metadata.ShardedTensorMetadata",
    f"{_SHARD}.sharded_tensor.metadata.TensorProperties", f"{_SHARD}.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    f"{_SHARD}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
    "torch.distributed.remote_device._remote_device",
})  # fmt: skip
"""The names that sharded tensors in pickles consist of. They become numbers here, and no target ever names them."""


_BATCH_NORM = ("running_mean", "running_var", "num_batches_tracked")


def of_batch_norm(name: str, names: Collection[str]) -> bool:
    """True for a buffer of a batch norm, which has all three of them or none, among the names of a state dict.

    Source: torch 2.13.0 `nn/modules/batchnorm.py` (`_NormBase`: `track_running_stats` registers the three).
    """
    place, dot, last = name.rpartition(".")
    return last in _BATCH_NORM and all(f"{place}{dot}{other}" in names for other in _BATCH_NORM)


def said_buffers(text: str | None, plain: Mapping[str, str]) -> set[str] | None:
    """The names of tensors that `--buffers` calls buffers; None if the user says nothing.

    Args:
        text: The option: names and patterns, or `none`.
        plain: The model's names, as the files and as the user have them.

    Raises:
        RequestError: `request.invalid` for a name that the model does not have.
    """
    if text is None:
        return None
    patterns = [] if text == NO_BUFFERS else [p.strip() for p in text.split(",") if p.strip()]
    named = {pattern: tensors_named(pattern, plain) for pattern in patterns}
    if unused := [pattern for pattern, names in named.items() if not names]:
        raise RequestError(
            "request.invalid",
            f"--buffers names {listed(list(map(printable, unused)))}, and the model has no such tensor",
            fix="name tensors as `reshard inspect` lists them, or --buffers none",
        )
    return {name for names in named.values() for name in names}


def tensors_named(pattern: str, shown: Mapping[str, str]) -> set[str]:
    """The stored names of the tensors that a user's pattern names: as `reshard inspect` lists them, else as stored.

    Args:
        pattern: A name, in which `*` stands for any text.
        shown: For each stored name the one that `reshard inspect` lists.
    """
    found = {stored for stored, name in shown.items() if fnmatchcase(name, pattern)}
    return found or {stored for stored in shown if fnmatchcase(stored, pattern)}


def which_are_buffers(names: Sequence[str], likely: Sequence[str] = ()) -> Undecided:
    """The question which tensors are buffers, and which are parameters that nothing trains.

    Args:
        names: The tensors of which nothing tells it.
        likely: Those of them that are taken for buffers, which the answer names first.
    """
    answer = shlex.quote(",".join(likely)) if likely else "NAME,…"
    return Undecided(
        Question.BUFFERS,
        f"nothing tells which of {listed(list(map(printable, names)))} are buffers, and which are frozen parameters",
        f"--buffers none if all are parameters; else --buffers {answer} with the names of the buffers",
    )


# Weights of shape [0] in place of parameters, as a model under ZeRO-3 has them between its steps. Who saves such a
# model without gathering its parameters saves the placeholders, and no value of theirs.
#
# Source: DeepSpeed 0.19.8 `runtime/zero/partition_parameters.py` (`free_param`: `torch.empty(0)` takes the place of a
# parameter's data; parameters of at most `stage3_param_persistence_threshold` elements stay whole, such as biases).

_FEW = 10
"""Fewer than one of so many parameters are no placeholders: in a run's own model a few may be empty."""
_PLACEHOLDER = (0,)
"""The shape of what ZeRO-3 leaves in the place of a parameter."""


def with_placeholders_named(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with a warning that names its parameters of shape [0]."""
    names = _placeholders(checkpoint)
    if not names:
        return checkpoint
    return replace(checkpoint, warnings=(*checkpoint.warnings, _placeholder_text(checkpoint, names)))


def refuse_placeholders(checkpoint: Checkpoint, policy: EmptyWeights, training_state: Callable[[], str]) -> None:
    """Refuse weights of which several, and at least a tenth, are of shape [0].

    Args:
        checkpoint: The weights.
        policy: `keep` takes them as they are.
        training_state: Looks for a training state that has the values, and returns its place; empty if it sees none.

    Raises:
        SourceError: `checkpoint.incomplete`, with the names.
    """
    names = _placeholders(checkpoint)
    if policy is EmptyWeights.KEEP or not _are_placeholders(len(names), len(checkpoint.parameters)):
        return
    if place := training_state():
        values = f"convert the run's training state: reshard inspect {shlex.quote(printable(place, max_chars=1_024))}"
    else:
        values = "convert the global_step* directory that the run saved, which has the values"
    raise SourceError(
        "checkpoint.incomplete",
        _placeholder_text(checkpoint, names),
        fix=f"{values}; or, if the model has such parameters, --empty-weights keep",
        details={"parameters": [printable(n) for n in names[:256]]},
    )


def _placeholders(checkpoint: Checkpoint) -> list[str]:
    """The parameters of shape [0], if the shape is that of a tensor of weights alone."""
    if checkpoint.optimizer is not None or checkpoint.facts.lists_shapes:
        return []
    return [p.fqn for p in checkpoint.parameters if p.shape == _PLACEHOLDER]


def _are_placeholders(empty: int, count: int) -> bool:
    return empty >= 2 and empty * _FEW >= count


def _placeholder_text(checkpoint: Checkpoint, names: list[str]) -> str:
    return (
        f"{len(names)} of {len(checkpoint.parameters)} parameters have the shape [0] and no elements, as a model under "
        f"ZeRO-3 that was saved without gathering its parameters: {listed(names)}"
    )


# The names and shapes that a target's files have, read again from their planned bytes before a tensor is moved.


def check_written(shapes: Mapping[str, Sequence[int]], checkpoint: Checkpoint, request: ConvertRequest) -> None:
    """Compare the names and shapes in files of weights with the model that their loaders have.

    Args:
        shapes: The shapes of the tensors by the names in the files.
        checkpoint: The source, as the request wants it.
        request: The request.

    Raises:
        JobError: `internal.error` for names of wrapping modules, and for tensors without elements that the source has
            with elements or that ZeRO-3 left in the place of weights.
    """
    refuse_wrapped(shapes, checkpoint)
    own = checkpoint.shapes()
    empty = [name for name, shape in shapes.items() if 0 in shape]
    if lost := [name for name in empty if 0 not in own.get(name, (0,))]:
        raise unloadable(f"{listed(lost)} would have no elements, and the source has them with elements")
    if checkpoint.optimizer is not None or checkpoint.facts.lists_shapes or request.empty_weights is EmptyWeights.KEEP:
        return
    placeholders = [name for name in empty if tuple(shapes[name]) == _PLACEHOLDER]
    if _are_placeholders(len(placeholders), len(shapes)):
        raise unloadable(f"{len(placeholders)} of {len(shapes)} weights would have no elements: {listed(placeholders)}")


def refuse_wrapped(names: Collection[str], checkpoint: Checkpoint) -> None:
    """Refuse names of wrapping modules in files that a model without wrappers loads.

    Raises:
        JobError: `internal.error`.
    """
    plain = [plain_name(name) for name in names]
    # Where two names would be equal without wrappers, both stay as they are.
    unique = len({*plain}) == len(plain)
    wrapped = [name for name, short in zip(names, plain, strict=True) if unique and short != name]
    own = {*checkpoint.shapes(), *checkpoint.shared}
    wrapped += [n for n in names if n.startswith(_AROUND) and n not in own and n.removeprefix(_AROUND) in own]
    if wrapped:
        raise unloadable(f"names of wrapping modules would stay in the target: {listed(wrapped)}")


def unloadable(text: str) -> JobError:
    """The error for a planned target that no loader of its kind takes as it is: nothing was written."""
    return JobError("internal.error", f"{text}; nothing was written")
