"""States out of directories that Reshard wrote from distributed checkpoints, against the truth of the run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reshard
from oracle.outputs import Universal, Weights, plain, raw, read_universal
from oracle.truth import RawTensor, Truth
from reshard.models.jobs import ConvertResult

_MODEL_KINDS = ("fp32", "frozen", "buffer")


def universal_problems(folder: Path, truth: Truth, *, scheduler: bool = True) -> list[str]:
    """Everything in which a universal directory is not the state of the FSDP run that it came from.

    Args:
        folder: the universal directory.
        truth: the run's dump.
        scheduler: the checkpoint held the scheduler.
    """
    found = read_universal(folder)
    problems = [*_atoms(found, truth), *_groups(found, truth), *_module(found, truth)]
    held = plain(found.model["lr_scheduler"])
    counted = int(max(truth.step.values(), default=0))
    if held != truth.meta["lr_scheduler"] if scheduler else held["last_epoch"] != counted:
        problems.append(f"lr_scheduler: {found.model['lr_scheduler']}")
    return problems


def _atoms(found: Universal, truth: Truth) -> Iterator[str]:
    """Every trained parameter has masters and states; those that no gradient reached have zeros."""
    kinds = truth.kinds - {"frozen", "buffer", "fp32"}
    wanted = {key: value for key, value in truth.tensors.items() if key.partition("/")[0] != "buffer"}
    wanted = {key.replace("frozen/", "fp32/"): value for key, value in wanted.items()}
    for fqn, master in truth.kind("fp32").items():
        for kind in kinds:
            wanted.setdefault(f"{kind}/{fqn}", RawTensor("F32", master.shape, bytes(len(master.data))))
    yield from (f"{key}: missing" for key in wanted.keys() - found.atoms.keys())
    yield from (f"{key}: not in the source" for key in found.atoms.keys() - wanted.keys())
    yield from (f"{key}: differs" for key in wanted.keys() & found.atoms.keys() if wanted[key] != found.atoms[key])
    steps = {fqn: found.steps.get(fqn) for fqn in truth.step}
    if steps != truth.step:
        yield f"steps: {steps} != {truth.step}"


def _groups(found: Universal, truth: Truth) -> Iterator[str]:
    """Hyper-parameters by parameter; and the order of groups, where there is more than one that a list may follow."""
    # DeepSpeed's own Adam reads `bias_correction`, which torch's does not have.
    without = ("params", "bias_correction")
    groups = [{k: v for k, v in group.items() if k not in without} for group in plain(found.optimizer["param_groups"])]
    ours = {fqn: group for group, names in zip(groups, found.model["param_shapes"], strict=True) for fqn in names}
    theirs = truth.hyper_parameters
    for fqn in sorted(ours.keys() | theirs.keys()):
        if ours.get(fqn) != theirs.get(fqn):
            yield f"{fqn}: {ours.get(fqn)} != {theirs.get(fqn)}"
    rates = found.model["lr_scheduler"]
    if rates is not None and "_last_lr" in rates and [group["lr"] for group in groups] != rates["_last_lr"]:
        yield f"the scheduler's rates are {rates['_last_lr']}, those of the groups {[group['lr'] for group in groups]}"


def _module(found: Universal, truth: Truth) -> Iterator[str]:
    module = {fqn: raw(tensor) for fqn, tensor in found.model["module"].items()}
    yield from _model(module, truth)
    if set(found.model["buffer_names"]) != set(truth.kind("buffer")):
        yield f"buffer_names: {found.model['buffer_names']}"


def _model(module: dict[str, RawTensor], truth: Truth) -> Iterator[str]:
    wanted = {fqn: value for kind in _MODEL_KINDS for fqn, value in truth.kind(kind).items()}
    wanted |= {alias: wanted[owner] for alias, owner in truth.meta["aliases"].items()}
    yield from (f"model: {fqn} is missing" for fqn in wanted.keys() - module.keys())
    yield from (f"model: {fqn} is not in the source" for fqn in module.keys() - wanted.keys())
    yield from (f"model: {fqn} differs" for fqn in wanted.keys() & module.keys() if wanted[fqn] != module[fqn])


def weights_problems(found: Weights, truth: Truth) -> list[str]:
    """Everything in which consolidated weights are not those of the run."""
    return list(_model(found.tensors | {a: found.tensors[o] for a, o in found.aliases.items()}, truth))


def dcp_convert(source: Path, target: Path, to: str, **options: Any) -> ConvertResult:
    """Converts with our engine and verifies what it wrote; options of DCP stand beside those of all formats.

    Nothing may be left out but what `_MAY_BE_LEFT_OUT` lists.
    """
    dcp = {key: options.pop(key) for key in ("framework", "files", "target_model_key") if key in options}
    result = reshard.convert(source, target, to=to, options={"dcp": dcp}, **options)
    report = reshard.verify(target)
    assert report.ok, report.problems
    left = [f"{entry.path}: {entry.reason}" for entry in result.not_carried]
    unexpected = [text for text in left if not any(pattern.fullmatch(text) for pattern in _MAY_BE_LEFT_OUT)]
    assert unexpected == [], unexpected
    return result


_MAY_BE_LEFT_OUT = [
    re.compile(pattern)
    for pattern in (
        r".*: weights hold no training state",
        r".*: only the source's framework has it",
        r".*: the format holds tensors only, .*",
        r".*: (DeepSpeed's checkpoints|checkpoints of this kind) have no place for it",
        r"tokens: DeepSpeed counts no tokens",
        r"lr_scheduler: the learning-rate scheduler is none of torch's",
        r".*: trainers keep it in no file of a checkpoint",
        r".*: the target holds the states of \d+ ranks?, the source those of \d+",
    )
]
"""Reasons; of what is left out for them, ``test_dcp_across`` has lists."""
