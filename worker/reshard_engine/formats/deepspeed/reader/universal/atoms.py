"""The files below `zero/`, and the tensor or number in each file.

Source: deepspeed 0.19.8 `checkpoint/ds_to_universal.py` (`merge_tp_slices`: a mapping with `param` and how to
cut it for tensor parallelism; `merge_zero3_slices`: a bare flat tensor; `step.pt`: a bare number),
`checkpoint/universal_checkpoint.py` (`load_hp_checkpoint_state`: `cat_dim` is 0 where it is not written).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

from reshard.errors import SourceError, printable
from reshard_engine.checkpoint import Scalar
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import open_torch_file
from reshard_engine.formats.deepspeed.reader.native.optim_states import read_scalar
from reshard_engine.formats.names import checked_name, checked_state
from reshard_engine.pickles.nodes import Node, PObject, PTensor, is_mapping, kind_of, mapping_items
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import Location
from reshard_engine.tensors.dtypes import BY_NAME, Dtype

FOLDER = "zero"
OPTIMIZER_FILE = "optimizer_state.pt"
MASTER, STEP = "fp32", "step"
_SUFFIX = ".pt"
_CUT_KEYS: Mapping[str | int, Callable[[Node], bool]] = {
    "cat_dim": lambda v: type(v) is int and v in (0, 1),
    "param_n_sub_params": lambda v: type(v) is int and v == 2,
    "sub_param_shape": lambda v: isinstance(v, PObject),
    "vocab_tensor": lambda v: v is True,
    # Experts that AutoEP fused lie along the first dimension, all of them.
    "is_expert_param": lambda v: v is True,
    "ep_num_experts": lambda v: type(v) is int,
}


@dataclass(frozen=True, slots=True)
class Atom:
    """One tensor in one file."""

    file: SourceFile
    dtype: Dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """The place of its first element, in bytes of the file."""
    bare: bool
    """True if it is flat and without its shape, as `ds_to_universal` writes it at stage 3."""
    merged: bool
    """True if it has `cat_dim`, as `ds_to_universal` writes it at stages 1 and 2."""

    def split(self, shape: tuple[int, ...]) -> tuple[Atom, Atom | None]:
        """The rows of a vocabulary of this shape, and the rows of padding behind them; None if there are none.

        Source: deepspeed 0.19.8 `checkpoint/ds_to_universal.py` (`merge_tp_slices` strips padding, `merge_zero3_slices`
        does not); our own universal checkpoints hold padding on purpose.
        """
        flat, row = len(self.shape) == 1 < len(shape), prod(shape[1:])
        rows = self.shape[0] // max(row, 1) if flat else (self.shape or (0,))[0]
        if rows <= shape[0] or self.shape not in ((rows * row,), (rows, *shape[1:])):
            return self, None

        def part(first: int, last: int) -> Atom:
            begin = first * (row if flat else self.stride[0]) * self.dtype.itemsize_bytes
            lengths = ((last - first) * row,) if flat else (last - first, *shape[1:])
            return replace(self, shape=lengths, offset=self.offset + begin)

        return part(0, shape[0]), part(shape[0], rows)


@dataclass(frozen=True, slots=True)
class AtomFiles:
    """The files below `zero/`."""

    optimizer: SourceFile | None
    by_name: Mapping[str, Mapping[str, SourceFile]]
    """Per parameter its files by state."""


def list_atoms(location: Location) -> AtomFiles:
    """The files of a universal directory's `zero` folder.

    Raises:
        SourceError: `name.invalid` for a folder or file that is no name of a parameter or state.
    """
    optimizer: SourceFile | None = None
    by_name: dict[str, dict[str, SourceFile]] = {}
    for path, info in location.child(FOLDER).files().items():
        file = SourceFile(location.store, f"{FOLDER}/{path}", (info,))
        name, _, base = path.rpartition("/")
        if path == OPTIMIZER_FILE:
            optimizer = file
        elif base.endswith(_SUFFIX):  # the loader looks at no others
            state = base.removesuffix(_SUFFIX)
            by_name.setdefault(checked_name(name), {})[state if state == MASTER else checked_state(state)] = file
    return AtomFiles(optimizer, by_name)


def parse_atom(file: SourceFile, ledger: OpaqueLedger) -> Atom | Scalar:
    """The tensor of an atom, or the number of a `step.pt`.

    Raises:
        SourceError: `checkpoint.malformed`, `source.unsupported` for entries that describe another kind of cut, and as
            `open_torch_file`.
    """
    parsed = open_torch_file(file, ledger)
    what = printable(file.name)
    if file.name.endswith(f"/{STEP}{_SUFFIX}"):
        return read_scalar(parsed.root, parsed, what=what)
    bare = not is_mapping(parsed.root)
    entries: dict[str | int, Node] = {"param": parsed.root} if bare else mapping_items(parsed.root, what=what)
    tensor = _wrapped(entries, what)
    if not isinstance(tensor, PTensor):
        raise SourceError("checkpoint.malformed", f"{what} holds no tensor but {kind_of(tensor)}")
    offset = parsed.tensor_offset(tensor) if tensor.numel else 0
    dtype = BY_NAME[tensor.dtype]
    return Atom(parsed.file, dtype, tensor.shape, tensor.stride, offset, bare, "cat_dim" in entries)


def _wrapped(entries: Mapping[str | int, Node], what: str) -> Node:
    # The known entries are not needed: the rules in the model states say how every parameter is cut.
    others = [k for k, v in entries.items() if k != "param" and not (k in _CUT_KEYS and _CUT_KEYS[k](v))]
    if others:
        raise SourceError(
            "source.unsupported",
            f"{what} says how to cut it in a way that is not read ({printable(str(others[0]))})",
            fix="convert the original checkpoint",
        )
    return entries.get("param")
