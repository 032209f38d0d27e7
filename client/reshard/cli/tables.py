"""Inspections and plans as lines of text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from reshard.errors import printable
from reshard.sizes import counted, format_size

if TYPE_CHECKING:
    from reshard.models import CastLoss, Inspection, NotCarried, PlanSummary, PossibleTarget, TensorInfo

_SHOWN_ENTRIES = 6
_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])")


def inspection_lines(
    found: Inspection, commands: Sequence[tuple[str, str]], *, every_tensor: bool, every_target: bool
) -> Iterator[str]:
    """A checkpoint in a few lines; tensors that differ only in layer numbers share one line.

    Args:
        found: The checkpoint.
        commands: What can be done with it: labels and commands.
        every_tensor: True to list each tensor.
        every_target: True to list each target with a note, or with the reason why it is not possible.
    """
    world = " ".join(f"{axis}={size}" for axis, size in found.world.items())
    step = f"step {found.step}" if found.step is not None else ""
    version = f"deepspeed {found.framework_version}" if found.framework_version else ""
    yield ", ".join(filter(None, (found.format, step, world, version)))
    width = max((len(label) for label, _ in commands), default=0) + 1
    yield from (f"  {label + ':':<{width}} {command}" for label, command in commands)
    yield f"  {printable(found.url)}"
    groups = counted(found.param_groups, "param group")
    yield f"  {counted(found.parameters, 'parameter')}, {counted(found.parameter_elems, 'element')}, {groups}"
    states = ", ".join(map(printable, found.optimizer_states)) or "none"
    yield f"  optimizer states: {states}; types: {', '.join(found.dtypes)}"
    yield f"  {counted(found.files, 'file')}, {format_size(found.total_bytes)}"
    yield from _target_lines(found.targets, every=every_target or not commands)
    if found.foreign_globals:
        yield f"  foreign names, never executed: {', '.join(found.foreign_globals)}"
    yield from (_tensor_line(t, 1) for t in found.tensors) if every_tensor else _digest_lines(found.tensors)


def _target_lines(targets: Sequence[PossibleTarget], *, every: bool) -> Iterator[str]:
    """Each target with its note; those that are not possible for one reason share a line. Or only their number."""
    by_reason: dict[tuple[bool, str], list[str]] = {}
    for target in targets:
        # `zero --tp` is the name of a target, and a reason may begin with the same words.
        name = target.name.partition(" ")[0] if target.detail.startswith("--") else target.name
        by_reason.setdefault((target.possible, target.detail), []).append(name)
    if every:
        for (possible, detail), names in by_reason.items():
            yield f"  {'can' if possible else 'cannot'} become {', '.join(names)}: {printable(detail)}"
    elif count := sum(not target.possible for target in targets):
        yield f"  {counted(count, 'target')} not possible: --all says why"


def cast_line(casts: Sequence[CastLoss]) -> str:
    """The losses of casts in one line; `--json` lists them by parameter."""
    facts = (
        (sum(c.overflowed for c in casts), "too large"),
        (sum(c.underflowed for c in casts), "now zero"),
        (sum(c.nan for c in casts), "NaN"),
        (sum(c.infinite for c in casts), "infinite before"),
    )
    listed = ", ".join(f"{counted(count, 'element')} {what}" for count, what in facts if count)
    names = ", ".join(c.fqn for c in casts[:3]) + (", ..." if len(casts) > 3 else "")
    return f"casts: {listed}, in {counted(len(casts), 'parameter')}: {names}"


def not_carried_lines(found: Sequence[NotCarried]) -> Iterator[str]:
    """One line for each reason why the target does not hold a value of its source; `--json` lists every value."""
    by_reason: dict[str, list[NotCarried]] = {}
    for entry in found:
        by_reason.setdefault(entry.reason, []).append(entry)
    for reason, entries in by_reason.items():
        names = ", ".join(e.path for e in entries[:_SHOWN_ENTRIES]) + (", ..." if len(entries) > _SHOWN_ENTRIES else "")
        yield f"not carried ({reason}): {counted(len(entries), 'entry', 'entries')}: {names}"


def _tensor_line(tensor: TensorInfo, count: int, name: str | None = None) -> str:
    kind = (
        "tied to " + printable(tensor.shared_with) if tensor.shared_with else ", ".join(map(printable, tensor.states))
    )
    times = f" x{count}" if count > 1 else ""
    frozen = "frozen" if tensor.frozen else kind
    return f"    {printable(name or tensor.fqn)}{times}  {list(tensor.shape)}  {tensor.dtype}  {frozen}"


def _digest_lines(tensors: tuple[TensorInfo, ...]) -> Iterator[str]:
    groups: dict[tuple[object, ...], list[TensorInfo]] = {}
    for tensor in tensors:
        key = (
            _NUMBER.sub("#", tensor.fqn),
            tensor.shape,
            tensor.dtype,
            tensor.states,
            tensor.frozen,
            tensor.shared_with,
        )
        groups.setdefault(key, []).append(tensor)
    for key, members in groups.items():
        yield _tensor_line(members[0], len(members), str(key[0]) if len(members) > 1 else None)


def plan_lines(summary: PlanSummary) -> Iterator[str]:
    """A plan in a few lines."""
    yield f"{summary.source_format} -> {summary.to}"
    yield f"  from  {printable(summary.source_url)}"
    yield f"  to    {printable(summary.target)}"
    reads, writes = format_size(summary.read_bytes), format_size(summary.write_bytes)
    yield f"  reads {reads} of tensors, writes {writes} in {counted(len(summary.files), 'file')}"
    yield f"  {counted(summary.units, 'unit')}, peak buffers {format_size(summary.peak_memory_bytes)}"
    yield f"  digest {summary.digest}"
    for file in summary.files[:12]:
        yield f"    {printable(file.path)}  {format_size(file.size_bytes)}"
    if len(summary.files) > 12:
        yield f"    ... and {len(summary.files) - 12} more"
