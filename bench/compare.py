"""Whether our output holds the peer's tensors, bit for bit. Reads with torch and safetensors, not with our code."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

import torch

_STATES = ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt")


def _tensor(path: Path) -> torch.Tensor:
    value: Any = torch.load(path, weights_only=True)
    return value["param"] if isinstance(value, dict) else value


def same_universal(ours: Path, theirs: Path) -> list[str]:
    """Differences between two universal checkpoints; stage-3 atoms of the peer are flat."""
    problems: list[str] = []
    names = sorted(str(p.parent.relative_to(theirs / "zero")) for p in (theirs / "zero").rglob("fp32.pt"))
    for name in names:
        for state in _STATES:
            expected, found = theirs / "zero" / name / state, ours / "zero" / name / state
            if not expected.exists():
                continue
            if not found.exists() or not torch.equal(_tensor(expected).flatten(), _tensor(found).flatten()):
                problems.append(f"{name}/{state}")
    return problems if names else ["the peer wrote no atoms"]


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors import safe_open  # the proof on a GPU machine imports this module without it

    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def same_weights(ours: Path, theirs: Path) -> list[str]:
    """Differences between two directories of safetensors weights."""
    expected, found = _weights(theirs), _weights(ours)
    problems = sorted(set(expected) ^ set(found))
    problems += [n for n in expected if n in found and not torch.equal(expected[n], found[n])]
    return problems if expected else ["the peer wrote no weights"]


def same_files(ours: Path, theirs: Path) -> list[str]:
    """Files of two trees that are not the same, byte for byte."""
    names = {str(p.relative_to(t)) for t in (ours, theirs) for p in t.rglob("*") if p.is_file()}
    found = [n for n in sorted(names) if not (ours / n).exists() or not (theirs / n).exists()]
    found += [n for n in sorted(names - set(found)) if not filecmp.cmp(ours / n, theirs / n, shallow=False)]
    return found if names else ["there are no files"]


def same_state_dicts(ours: Path, theirs: Path) -> list[str]:
    """Differences between two distributed checkpoints, as torch loads them."""
    expected, found = _state_dict(theirs), _state_dict(ours)
    problems = sorted(set(expected) ^ set(found))
    for name in set(expected) & set(found):
        one, other = expected[name], found[name]
        same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        problems += [] if same else [name]
    return problems if expected else ["the peer holds nothing"]


def same_tensors(ours: Path, theirs: Path) -> list[str]:
    """Differences between the tensors of two distributed checkpoints, whose other values may differ."""
    expected, found = (
        {name: value for name, value in _state_dict(tree).items() if isinstance(value, torch.Tensor)}
        for tree in (theirs, ours)
    )
    problems = sorted(set(expected) ^ set(found))
    problems += [n for n in expected if n in found and not torch.equal(expected[n], found[n])]
    return problems if expected else ["the peer holds nothing"]


def _state_dict(directory: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict[str, Any] = {}
    reader, planner = FileSystemReader(directory), _EmptyStateDictLoadPlanner()
    _load_state_dict(found, storage_reader=reader, planner=planner, no_dist=True)
    return dict(_leaves(found, ""))


def _leaves(value: Any, path: str) -> Any:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}")
    elif isinstance(value, list) and any(isinstance(i, dict | torch.Tensor) for i in value):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{path}.{number}")
    else:
        yield path, value
