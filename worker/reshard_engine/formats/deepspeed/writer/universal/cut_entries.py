"""Entries of a universal atom that describe the cut of its parameter for tensor parallelism.

Source: deepspeed 0.19.8 `checkpoint/ds_to_universal.py` (`merge_tp_slices`: the keys of an atom),
`checkpoint/universal_checkpoint.py` (`load_hp_checkpoint_state`, `SubparamShape`).
"""

from __future__ import annotations

from reshard_engine.pickles.nodes import Global, Node, PList, PObject, PTuple, mapping_of
from reshard_engine.tensors.cuts import Cut


def cut_keys(cut: Cut | None, name: str) -> dict[str | int, Node]:
    """The entries beside `param`; empty for a parameter that is whole on every rank, or has no known cut."""
    if cut is None or cut.dim is None:
        return {}
    found: dict[str | int, Node] = {}
    if cut.grid is not None:
        found["sub_param_shape"] = _sub_param_shape(cut, name)
    else:
        found["cat_dim"] = cut.dim
        if len(cut.sections) == 2 and cut.dim == 0 and cut.sections[0] == cut.sections[1]:
            found["param_n_sub_params"] = 2
    if cut.vocabulary is not None:
        found["vocab_tensor"] = True
    return found


def _sub_param_shape(cut: Cut, name: str) -> Node:
    grid = cut.grid or ()
    sizes: list[Node] = [PTuple(cut.sections) if d == cut.dim else n for d, n in enumerate(grid)]
    state = {"patterns": PList([f"^{name}$"]), "shape": PTuple(tuple(sizes)), "partition_dim": cut.dim}
    cls = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
    return PObject("newobj", cls, PTuple(), state=mapping_of({**state}), has_state=True)
