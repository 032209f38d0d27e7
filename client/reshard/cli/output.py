"""Inspections, plans and comparisons as lines of text, and the next step after a conversion."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from html import escape
from typing import TYPE_CHECKING
from urllib.parse import unquote

from reshard.choices import POINTERS, TargetFormat
from reshard.draw.layout import render
from reshard.errors import counted, format_size, printable

if TYPE_CHECKING:
    from reshard.models.jobs import (
        CastLoss,
        ConvertRequest,
        ConvertResult,
        Inspection,
        NotCarried,
        PlanSummary,
        PossibleTarget,
        TensorInfo,
    )
    from reshard.models.reports import (
        Difference,
        DiffReport,
        DiffSide,
        FingerprintReport,
        LayoutPicture,
        SealCheck,
        TensorPicture,
    )
    from reshard.targets import Target


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
    if found.compared is not None:
        yield f"  {counted(found.compared, 'pair')} of tensors compared, all agree"
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


def quantized_line(casts: Sequence[CastLoss]) -> str:
    """The errors of quantized matrices in one line; `--json` lists them by parameter. Empty if none was quantized."""
    errors = {c.fqn: c.relative_rms_error for c in casts if c.relative_rms_error is not None}
    if not errors:
        return ""
    worst = max(errors, key=lambda fqn: errors[fqn])
    matrices = counted(len(errors), "matrix", "matrices")
    return f"quantized: {matrices}, relative error (RMS) up to {errors[worst]:.3g}, in {worst}"


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


# The layout of a checkpoint as lines of text, or as an HTML page with the picture and these lines.
#
# Names come from checkpoints, so all text is escaped, including characters that HTML or a line of text may not hold.

MAX_LINES = 64
MAX_NAME_CHARS = 1_024
_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem}"
    "h1{font-size:1.2rem;overflow-wrap:anywhere}pre{overflow-x:auto;font-size:.85rem}"
)


def _plain(text: str) -> str:
    return printable(text, max_chars=MAX_NAME_CHARS)


def _markup(text: str) -> str:
    return escape(_plain(text))


def picture_lines(picture: LayoutPicture, *, limit: int = MAX_LINES) -> Iterator[str]:
    """A compact table: the parts of each tensor, or the contents of each file."""
    for tensor in picture.tensors:
        yield _title(tensor)
        if tensor.cut:
            yield f"  {_plain(tensor.cut)}"
        for region in tensor.regions[:limit]:
            rows, columns = region.rows, region.columns
            where = f"rows {rows[0]}:{rows[1]}  columns {columns[0]}:{columns[1]}"
            yield f"  {where:<44} {_plain(region.rank):<22} {_plain(region.file)}"
        more = len(tensor.regions) - limit + tensor.left_out
        if more > 0:
            yield f"  ... and {more} more"
    if picture.tensors:
        return
    for share in picture.files[:limit]:
        held = ", ".join(f"{_plain(state)} {format_size(size)}" for state, size in share.bytes_by_state.items())
        size_text = format_size(share.size_bytes)
        yield f"{_plain(share.rank):<24} {size_text:>10}  {_plain(share.file)}  {held}".rstrip()
    if len(picture.files) > limit:
        yield f"... and {len(picture.files) - limit} more"


def _title(tensor: TensorPicture) -> str:
    return f"{_plain(tensor.fqn)}/{_plain(tensor.state)} {tensor.dtype} {list(tensor.shape)}"


def html_of(picture: LayoutPicture, beside: LayoutPicture | None = None) -> str:
    """A page with the picture, of one layout or of two side by side, and the table of each."""
    pictures = [picture] if beside is None else [picture, beside]
    title = _markup(" and ".join(f"{p.url} ({p.format})" for p in pictures))
    tables = "".join(f"<pre>{escape(_table(p))}</pre>" for p in pictures)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body><h1>{title}</h1>\n{render(picture, beside)}{tables}</body></html>\n"
    )


def _table(picture: LayoutPicture) -> str:
    return "\n".join(picture_lines(picture, limit=4_096))


# The next step after a conversion: the line of a configuration, or the call, that uses the target.

DISTRIBUTED = "dcp"
"""The target of distributed checkpoints (`reshard.dcp_options`)."""
_STAGES = re.compile(r"; stages ([\w, ]+)")
"""The stages that `inspect` lists for the target `zero --dp`."""
_RESUME = "Resume on N GPUs"
_NUMBER_OF_RANKS = re.compile(r"--dp \d+")


def remote(source: str) -> bool:
    """True for a URL."""
    return "://" in source


def ensurable(found: Inspection) -> bool:
    """True if `reshard ensure` can convert the checkpoint at its own stage, without options."""
    stage = found.stage
    zero = next((t for t in found.targets if t.name == "zero --dp" and t.possible), None)
    if zero is None or stage is None or "--opaque" in zero.example:
        return False
    stages = _STAGES.search(zero.detail)
    return stages is not None and stage.value in stages[1].strip().split(", ")


_MORE_RANKS = {
    "zero --tp": "Tensor parallelism",
    "zero --pp": "Pipeline parallelism",
    "zero --ep": "Expert parallelism",
}
_FIRST = ("universal", DISTRIBUTED, "megatron", "safetensors", "torch", "peft")
"""The targets in the order in which they are shown, before those of other packages."""
_OF_RANKS = tuple(f"{to} --dp" for to in (TargetFormat.FSDP_RANKS, TargetFormat.TORCH_CHECKPOINTING))


def possible_commands(source: str, found: Inspection, said: str) -> list[tuple[str, str]]:
    """Tells what can be done with a checkpoint: a label and the command of each, the most common first.

    Words in upper case (`N`, `DST`) are for the user to fill in.

    Args:
        source: The source as the user named it.
        found: What was found in it.
        said: The flags that say which checkpoint of the source it is.
    """
    from reshard.installed_formats import known_targets  # it loads pydantic, which `reshard --help` does not need

    place, here = shlex.quote(source), not remote(source)
    examples = {t.name: t.example for t in found.targets if t.possible and t.example}
    commands: list[tuple[str, str]] = []
    distributed = found.family == DISTRIBUTED
    if here and distributed and found.optimizer_states:
        commands.append(("Resume on N GPUs (FSDP)", f"ensure {place}"))
    if here and ensurable(found):
        commands.append((_RESUME, f"ensure {place} --dp N"))
    elif (ranks := examples.pop(_OF_RANKS[0], None) or examples.pop(_OF_RANKS[1], None)) is not None:
        # Its own framework goes on with it, and DeepSpeed could.
        commands.append(("Resume on N GPUs (FSDP)", f"convert {place} DST {_NUMBER_OF_RANKS.sub('--dp N', ranks)}"))
        if "zero --dp" in examples:
            zero = _NUMBER_OF_RANKS.sub("--dp N", examples["zero --dp"])
            commands.append(("Resume on N GPUs (DeepSpeed)", f"convert {place} DST {zero}"))
    elif here and distributed and "zero --dp" in examples:
        commands.append(("Resume on N GPUs (DeepSpeed)", f"ensure {place} --to zero --dp N --zero-stage 2"))
    elif "zero --dp" in examples:
        flags = "--to zero --dp N" if ensurable(found) else _NUMBER_OF_RANKS.sub("--dp N", examples["zero --dp"])
        commands.append((_RESUME, f"convert {place} DST {flags}"))
    if TargetFormat.SAFETENSORS in examples:
        examples.pop(TargetFormat.TORCH, None)
    known = known_targets()
    labels = _MORE_RANKS | {name: known[name].use for name in _FIRST if name in known}
    others = {name: name for name in examples if name not in labels and not name.startswith("zero")}
    for name, label in (labels | others).items():
        if name in examples:
            commands.append((label, f"convert {place} DST {examples[name]}"))
    return [(label, f"reshard {command}{said}") for label, command in commands]


def followed(source: str, tag: str | None) -> str | None:
    """A line that names the pointer that was followed, if it is not `latest`."""
    if tag is not None or remote(source):
        return None
    pointers = [name for name in POINTERS if os.path.isfile(os.path.join(source, name))]
    if not pointers or pointers[0] == POINTERS[0]:
        return None
    return f"followed `{pointers[0]}`: {printable(source)} has no `{POINTERS[0]}`"


def next_steps(to: str, target: str, files: Iterable[str]) -> list[str]:
    """The lines that say what a user does next with a target that has these files; none where nothing is known.

    The ways to load it are those of the target's record.
    """
    from reshard.installed_formats import known_targets  # it loads pydantic, which `reshard --help` does not need

    names, record = sorted(files), known_targets().get(to)
    if target.startswith("hf://"):
        return [_from_hub(record, target, names)]
    away = remote(target)
    way = None if record is None else record.load(names)
    if record is None or way is None:
        return []
    directory, tag = os.path.split(target.rstrip("/") if away else os.path.normpath(target))
    whole, save = ("DIR", "DIR") if away else (printable(target), printable(directory or "."))
    file = next((n for n in names if way.having and fnmatchcase(n, way.having)), "")
    line = way.line.format(
        dir=repr(whole), save=repr(save), tag=repr(printable(tag)), file=repr(f"{whole}/{printable(file)}")
    )
    # DeepSpeed looks for the directory of the tag in the directory that the script names.
    place = f"DIR/{printable(tag)}" if record.is_tag else "DIR"
    copied = [f"copy {printable(target)} to {place} of each node, for a directory DIR"] if away else []
    return [*copied, *([record.before_load] if record.before_load else []), f"in the script: {line}"]


def with_model_files(request: ConvertRequest, files: Collection[str]) -> list[str]:
    """The line with the command that writes a model's configuration and tokenizer beside its weights, if there are any.

    A trainer saves them beside the state of a training, and without them `from_pretrained` does not load the weights.
    """
    from reshard.declared import flags_of  # it loads pydantic, which `reshard --help` does not need

    taken = request.to in (TargetFormat.SAFETENSORS, TargetFormat.TORCH) and not remote(request.source.url)
    if not taken or request.model_files is not None or "config.json" in files:
        return []
    source = os.path.normpath(request.source.url)
    place = next((d for d in (source, os.path.dirname(source)) if os.path.isfile(os.path.join(d, "config.json"))), None)
    if place is None:
        return []
    said = ["reshard", "convert", request.source.url, request.target, *flags_of(request), "--model-files", place]
    return [f"for from_pretrained, with configuration and tokenizer: {shlex.join([*said, '--overwrite'])}"]


def _from_hub(record: Target | None, target: str, files: Collection[str]) -> str:
    """The call that loads a model, or an adapter, from a branch of the hub."""
    name, _, branch = target.removeprefix("hf://").partition("@")
    branch = printable(unquote(branch))
    if record is not None and (way := record.load(files, on_hub=True)) is not None:
        place = repr(printable(name)) + (f", revision={branch!r}" if branch else "")
        return f"in the script: {way.line.format(dir=place)}"
    revision = f" --revision {shlex.quote(branch)}" if branch else ""
    return f"hf download {shlex.quote(printable(name))}{revision} --local-dir DIR (it has no config.json)"


def done_lines(result: ConvertResult) -> Iterator[str]:
    """The bytes that a conversion read and wrote, and what it compared of the source."""
    kept = f", kept {format_size(result.resumed_bytes)} of an earlier run" if result.resumed_bytes else ""
    # A plan counts tensors only; neighbours are read in one call, with the bytes between them.
    yield (
        f"read {format_size(result.read_bytes)} with gaps, wrote {format_size(result.write_bytes)} "
        f"in {counted(len(result.files), 'file')}{kept}, {sum(result.seconds.values()):.1f} s, target verified"
    )
    if result.source_check is not None:
        yield str(result.source_check)


# Comparisons, fingerprints and checks against certificates as lines of text.

SHOWN_DIFFERENCES = 20
_NAME_CHARS = 64
_OF_TRAINING = frozenset({"optimizer states", "counters and client state"})
"""The names under which a comparison says that one side has no state of training at all."""


def report_lines(report: DiffReport, *, every: bool) -> Iterator[str]:
    """A comparison as lines of text: the verdict first, then the largest differences."""
    yield report.verdict()
    yield f"  A  {_side(report.a)}"
    yield f"  B  {_side(report.b)}"
    yield (
        f"  {report.identical:,} of {counted(report.tensors, 'tensor')} equal bit for bit, "
        f"{counted(report.elements, 'element')}, {counted(report.values, 'value')}; "
        f"read {format_size(report.read_bytes)} in {report.seconds:.1f} s"
    )
    for note in report.notes:
        yield f"  note: {printable(note)}"
    shown = report.differences if every else report.differences[:SHOWN_DIFFERENCES]
    for difference in shown:
        yield f"  {_difference(difference)}"
    if {d.name for d in report.differences if d.a is None or d.b is None} & _OF_TRAINING:
        yield "  only one side holds a training state: --weights-only compares the rest"
    if len(shown) < len(report.differences):
        yield f"  ... and {len(report.differences) - len(shown)} more: --all"


def _side(side: DiffSide) -> str:
    facts = [side.format, *(f"{axis}={size}" for axis, size in side.world.items())]
    facts += [] if side.step is None else [f"step {side.step}"]
    tag = "" if side.tag is None else f" ({printable(side.tag)})"
    return f"{printable(side.url)}{tag}  {' '.join(facts)}"


def _difference(found: Difference) -> str:
    name = printable(found.name, max_chars=_NAME_CHARS) + (f"/{printable(found.state)}" if found.state else "")
    if found.kind == "elements":
        return f"{name}: {_elements(found)}"
    if found.a is None or found.b is None:
        side, value = ("B", found.b) if found.a is None else ("A", found.a)
        if value == "present":
            return f"only in {side}: {name}"
        text = f"only in {side}: {printable(value)}"
    else:
        text = f"{printable(found.a)} | {printable(found.b)}"
    shared = f" (and {counted(found.parameters - 1, 'more parameter')})" if found.parameters > 1 else ""
    return f"{name}: {found.kind.value}: {text}{shared}"


def _elements(found: Difference) -> str:
    parts = [f"{found.differing or 0:,} of {counted(found.elements or 0, 'element')}"]
    if found.max_abs is not None and found.max_rel is not None:
        parts.append(f"max |a-b| {found.max_abs:.3g}, relative {found.max_rel:.3g}")
    if found.nonfinite:
        parts.append(f"{found.nonfinite:,} not finite")
    where = list(found.first_index or ())
    parts.append(f"first at {where}: {printable(found.a)} | {printable(found.b)}")
    if found.compared_as is not None:
        parts.append(f"as {found.compared_as}")
    return ", ".join(parts)


def fingerprint_lines(report: FingerprintReport) -> Iterator[str]:
    """A fingerprint as lines of text: the digest of the whole first, then that of each component with its lines."""
    yield report.digest
    for name, digest in report.components.items():
        yield f"  {name:10}{digest or 'absent'}"
        yield from (f"    {line}" for line in report.lines.get(name, ()))
    yield f"  {counted(report.tensors, 'tensor')}; read {format_size(report.read_bytes)} in {report.seconds:.1f} s"
    for note in report.notes:
        yield f"  note: {printable(note)}"


def not_covered(directory: str, names: Sequence[str], count: int) -> str:
    """A sentence on the files beside a sealed directory, which may be anything."""
    more = f" and {count - len(names):,} more" if count > len(names) else ""
    covers = f"the seal covers {printable(directory)}, and not the {counted(count, 'file')} beside it"
    return f"{covers}: {', '.join(names)}{more}"


def check_lines(check: SealCheck) -> Iterator[str]:
    """The outcome of a check against a certificate: what differs, and how each step was made from the next one."""
    for problem in check.problems:
        yield f"{' '.join(filter(None, (problem.path, problem.tensor)))}: {problem.problem}".removeprefix(": ")
    if check.ok:
        size = format_size(check.read_bytes)
        yield f"ok: {counted(check.files, 'file')} and the state are as sealed ({size}, {check.seconds:.1f} s)"
    if check.not_covered_count:
        yield f"  {not_covered(check.covered, check.not_covered, check.not_covered_count)}"
    for step in check.chain:
        yield f"  {printable(step.name)}  {step.format}  files {step.contents[:16]}  state {step.fingerprint[:16]}"
        yield f"    signed by {step.key[:16]}, {printable(step.tool)}"
        if step.plan_digest is not None:
            other = f"other {', '.join(step.changed)}" if step.changed else "the same state"
            cast = f", weights cast to {step.dtype}" if step.dtype else ""
            lost = f"{len(step.not_carried)} not carried, {len(step.casts)} lossy casts{cast}"
            yield f"    made by plan {step.plan_digest[:16]}: {other}, {lost}; from"
