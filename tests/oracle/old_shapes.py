"""Rewrites a checkpoint that DeepSpeed 0.19.8 really wrote into the shape that an older version wrote.

Each function is named after what it imitates and says where that is known from: a row of the version table in the
project's notes on DeepSpeed's formats ("formats"), or DeepSpeed's own source at that version.  They run inside a rank,
where DeepSpeed's classes can be loaded, on a tag folder that nothing else uses, and change nothing but the shape.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Contents = dict[str, Any]


def _edit(tag_dir: Path, pattern: str, change: Callable[[Contents], None]) -> None:
    paths = sorted(tag_dir.glob(pattern))
    assert paths, f"no {pattern} in {tag_dir}"
    for path in paths:
        contents = torch.load(path, weights_only=False)
        change(contents)
        torch.save(contents, path)


def _edit_model(tag_dir: Path, change: Callable[[Contents], None]) -> None:
    def tied(model: Contents) -> None:
        # In DeepSpeed's files an alias has its owner's storage; torch.load gives empty tensors one each.
        for alias, owner in (model.get("shared_params") or {}).items():
            model["module"][alias] = model["module"][owner]
        change(model)

    _edit(tag_dir, "*mp_rank_*_model_states.pt", tied)


def _edit_optim(tag_dir: Path, change: Callable[[Contents], None]) -> None:
    """Changes the inner ``optimizer_state_dict`` of every rank's file."""
    _edit(tag_dir, "*optim_states.pt", lambda contents: change(contents["optimizer_state_dict"]))


def _torch_state(inner: Contents) -> Contents:
    """The wrapped optimizer's ``state_dict``: stage 3 keeps it under another key than stages 1 and 2."""
    found: Contents = (
        inner["optimizer_state_dict"] if "optimizer_state_dict" in inner else inner["base_optimizer_state"]
    )
    return found


def _drop(*keys: str) -> Callable[[Contents], None]:
    def change(contents: Contents) -> None:
        for key in keys:
            contents.pop(key, None)

    return change


def _without(edit: Callable[[Path, Callable[[Contents], None]], None], *keys: str) -> Callable[[Path], None]:
    return lambda tag_dir: edit(tag_dir, _drop(*keys))


def before_0_5_4_one_mapping_of_shapes(tag_dir: Path) -> None:
    """``param_shapes`` is one mapping over all groups (formats, row 0.5.4; engine.py ``_get_zero_param_shapes``)."""

    def change(model: Contents) -> None:
        merged: OrderedDict[str, torch.Size] = OrderedDict()
        for group in model["param_shapes"]:
            merged.update(group)
        model["param_shapes"] = merged

    _edit_model(tag_dir, change)


def before_0_6_0_shapes_in_the_optimizer_file(tag_dir: Path) -> None:
    """``param_shapes`` is in every optimizer file (formats, row 0.6.0; engine.py ``_save_zero_checkpoint``)."""
    moved: list[Any] = []
    _edit_model(tag_dir, lambda model: moved.append(model.pop("param_shapes")))
    _edit(tag_dir, "*optim_states.pt", lambda optim: optim.update(param_shapes=moved[0]))


def before_0_6_0_step_in_param_groups(tag_dir: Path) -> None:
    """The step is an integer of each param group, not of each state (formats, row <0.6: FusedAdam's habit)."""

    def change(inner: Contents) -> None:
        state = _torch_state(inner)
        steps = {index: int(entry.pop("step")) for index, entry in state["state"].items()}
        for group in state["param_groups"]:
            group["step"] = steps[group["params"][0]]

    _edit_optim(tag_dir, change)


def before_0_6_0_plain_numbers(tag_dir: Path) -> None:
    """``zero_stage`` and ``partition_count`` are integers (zero_to_fp32.py of 0.5.x compares them as such)."""

    def change(inner: Contents) -> None:
        count = inner["partition_count"]
        inner["partition_count"] = count[0] if isinstance(count, list) else count
        inner["zero_stage"] = int(inner["zero_stage"])

    _edit_optim(tag_dir, change)


def before_0_6_0_placeholders_of_one_element(tag_dir: Path) -> None:
    """Stage 3 leaves ``torch.ones(1)`` for a parameter in ``module`` (partition_parameters.py of 0.4 and 0.5)."""

    def change(model: Contents) -> None:
        ones: dict[int, torch.Tensor] = {}
        for name, value in model["module"].items():
            if not value.numel():
                storage = value.untyped_storage()._cdata  # an alias has its owner's storage, and keeps it
                model["module"][name] = ones.setdefault(storage, torch.ones(1, dtype=value.dtype))

    _edit_model(tag_dir, change)


def before_0_5_6_elastic_lists(tag_dir: Path) -> None:
    """``base_optimizer_state`` is a list of states without padding (formats, §4.5 and row <0.6: then the default)."""

    def change(inner: Contents) -> None:
        lean = []
        for index, padding in enumerate(inner["group_paddings"]):
            entry = inner["base_optimizer_state"]["state"][index]
            numel = inner["single_partition_of_fp32_groups"][index].numel() + padding
            cut = {
                k: v[: numel - padding].clone() if torch.is_tensor(v) and v.numel() == numel else v
                for k, v in entry.items()
            }
            lean.append(cut)
        inner["base_optimizer_state"] = lean

    _edit_optim(tag_dir, change)


before_0_7_3_no_slice_mappings = _without(_edit_optim, "param_slice_mappings")
"""No ``param_slice_mappings`` (formats, row 0.7.3)."""
before_0_9_0_no_shared_params = _without(_edit_model, "shared_params")
"""Tied names are not listed (formats, row 0.9.0).  Comes last: what is tied shows in storages alone afterwards."""
before_0_9_1_no_frozen_entries = _without(_edit_model, "frozen_param_shapes", "frozen_param_fragments")
"""Frozen parameters are not described (formats, row 0.9.1)."""
before_0_19_5_no_parallel_dimensions = _without(_edit_model, "checkpoint_parallel_dimensions")
"""No ``checkpoint_parallel_dimensions`` (formats, row 0.19.5)."""
before_0_19_7_no_alignment_paddings = _without(_edit_optim, "param_alignment_paddings")
"""No ``param_alignment_paddings`` (formats, row 0.19.7)."""


def fragment_addresses_of_bf16_optimizer(tag_dir: Path) -> None:
    """``fragment_address`` pickled under its first home, ``deepspeed.runtime.bf16_optimizer`` (formats, §2)."""
    cls: Any = importlib.import_module("deepspeed.utils.tensor_fragment").fragment_address
    assert importlib.import_module("deepspeed.runtime.bf16_optimizer").fragment_address is cls
    home = cls.__module__
    cls.__module__ = "deepspeed.runtime.bf16_optimizer"
    try:
        _edit_optim(tag_dir, lambda inner: None)
    finally:
        cls.__module__ = home
    assert b"bf16_optimizer" in next(iter(tag_dir.glob("*optim_states.pt"))).read_bytes()


def no_ds_version(tag_dir: Path) -> None:
    """No file says which version wrote it (before 0.3.17)."""
    _edit_model(tag_dir, _drop("ds_version"))
    _edit(tag_dir, "*optim_states.pt", _drop("ds_version"))
    _edit_optim(tag_dir, _drop("ds_version"))


def optimizer_files_without_underscore(tag_dir: Path) -> None:
    """``..._mp_rank_00optim_states.pt``: a slip of old versions (formats, §1; engine.py ``_get_zero_ckpt_name``)."""
    for path in sorted(tag_dir.glob("*_optim_states.pt")):
        path.rename(path.with_name(path.name.replace("_optim_states", "optim_states")))


def optimizer_files_with_fp16_prefix(tag_dir: Path) -> None:
    """``fp16_zero_pp_rank_...``: the prefix that converters know (formats, §1)."""
    for path in sorted(tag_dir.glob("*optim_states.pt")):
        path.rename(path.with_name("fp16_" + path.name.removeprefix("bf16_")))


def optimizer_files_without_prefix(tag_dir: Path) -> None:
    """No ``bf16_`` prefix (formats, row 0.6.2)."""
    for path in sorted(tag_dir.glob("*optim_states.pt")):
        path.rename(path.with_name(path.name.removeprefix("bf16_")))


def before_0_3_17_sub_partitions(tag_dir: Path) -> None:
    """The first ZeRO-1: masters in sub-partitions by communication interval (stage1.py ``_rigid_state_dict``)."""

    def change(inner: Contents) -> None:
        flat = inner.pop("single_partition_of_fp32_groups")
        inner["local_sub_partitions_of_fp32_groups"] = [[group] for group in flat]

    _edit_optim(tag_dir, change)


before_param_shapes = _without(_edit_model, "param_shapes")
"""No ``param_shapes`` anywhere: only the model itself could name the parameters (before zero_to_fp32 existed)."""


def rewrite(tag_dir: str, names: list[str]) -> None:
    """Applies the named functions in order."""
    for name in names:
        globals()[name](Path(tag_dir))
