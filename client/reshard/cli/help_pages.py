"""Help of commands: plain text in sections, one style at every level, with examples that a test parses.

typer's own help needs rich, whose import takes longer than the rest of `--help`, and cuts long options at 80 columns.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from inspect import cleandoc
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from reshard.option import Section
from reshard.targets import options_of_others

if TYPE_CHECKING:
    from pydantic import BaseModel

    from reshard.targets import Target

# Examples in the help of commands: a remark and a command line each. A test parses all and runs the local ones.

_JOB = "job_3kq7"

EXAMPLES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "": (
        ("What is it, and what can it become?", "reshard inspect run1"),
        ("Resume on 16 GPUs: prints the path to load", "reshard ensure run1 --dp 16"),
        ("Weights in one directory", "reshard convert run1 weights --to safetensors --dtype bf16"),
    ),
    "inspect": (
        ("The checkpoint that `latest` names, in a save directory", "reshard inspect run1"),
        (
            "The files that hold parts of one tensor",
            "reshard inspect s3://bucket/run1 --tensor lm_head.weight --svg head.svg",
        ),
    ),
    "plan": (
        ("Bytes, files and memory of a conversion", "reshard plan run1 weights --to safetensors"),
        ("For a script", "reshard plan run1 run2/global_step100 --to zero --dp 3 --json"),
        ("Plan now, and convert exactly that later", "reshard plan run1 weights --to safetensors --out plan.json"),
    ),
    "convert": (
        (
            "Resume on 3 GPUs; `reshard ensure run1 --dp 3` chooses DST itself",
            "reshard convert run1 run2/global_step100 --to zero --dp 3",
        ),
        (
            "One directory for any number of GPUs (DeepSpeed, load_universal)",
            "reshard convert run1 run2/global_step100_universal --to universal",
        ),
        ("Weights in bf16", "reshard convert run1 weights --to safetensors --dtype bf16"),
        ("What was planned, or nothing", "reshard convert --plan plan.json"),
    ),
    "verify": (
        ("Every byte of a target", "reshard verify weights"),
        ("A random fiftieth of a huge one", "reshard verify s3://bucket/run2 --sample 2%"),
    ),
    "diff": (
        ("Is anything different?", "reshard diff run1 run2/global_step100"),
        ("Only weights, without the biases", "reshard diff run1 weights --weights-only --common --ignore '*.bias'"),
    ),
    "fingerprint": (
        ("One digest of the state; equal states have equal ones", "reshard fingerprint run1"),
        ("Each tensor's digest, of the model alone", "reshard fingerprint weights --states weights --tensors"),
    ),
    "seal": (
        ("Before anything happens to it", "reshard seal run1 --key seal.key --out run1.sealed.json"),
        ("With a key that AWS keeps", "reshard seal run1 --key awskms:alias/seal --public-key seal.pub"),
        ("Elsewhere, later", "reshard verify run1 --cert run1.sealed.json --key seal.pub"),
    ),
    "ensure": (
        ("In a job script: a checkpoint for 16 ranks", "CKPT=$(reshard ensure run1 --dp 16)"),
        ("For the ranks of this launch, by a service", "reshard ensure run1 --url http://reshard:8000"),
    ),
    "mount": (
        (
            "Resume on 3 GPUs from files that are not written",
            "reshard mount run1 /mnt/run1-dp3 --to zero --dp 3",
        ),
        ("Weights, for a server that reads a directory", "reshard mount run1 weights --to safetensors --dtype bf16"),
    ),
    "zero-to-fp32": (
        ("As DeepSpeed's script", "reshard zero-to-fp32 run1 weights"),
        (
            "Safetensors of one step",
            "reshard zero-to-fp32 run1 weights --safe_serialization --tag global_step100",
        ),
    ),
    "zero-to-torch": (
        ("Weights in bf16", "reshard zero-to-torch run1 weights --dtype bf16"),
        ("Files of at most 2 GB", "reshard zero-to-torch run1 weights --dtype fp16 --max_shard_size 2GB"),
    ),
    "ds-to-universal": (
        (
            "As DeepSpeed's script",
            "reshard ds-to-universal --input_folder step5 --output_folder step5_universal",
        ),
        (
            "From a bucket",
            "reshard ds-to-universal --input_folder s3://bucket/step5 --output_folder step5",
        ),
    ),
    "merge-weights": (
        ("As Accelerate's command", "reshard merge-weights run1/pytorch_model_fsdp_0 weights"),
        ("A torch file of the whole directory", "reshard merge-weights run1 weights --unsafe_serialization"),
    ),
    "slim": (
        ("One file", "reshard slim pytorch_model.bin slim.bin"),
        ("A directory; files without torch data are copied", "reshard slim run1 run1-slim"),
    ),
    "clean": (
        ("List what unfinished conversions left", "reshard clean weights --dry-run"),
        ("Remove it", "reshard clean weights"),
    ),
    "ls": (
        ("What a run has kept, and what it resumes from", "reshard ls run1"),
        ("In an object store, for a script", "reshard ls s3://bucket/run1 --json"),
    ),
    "prune": (
        ("What would go?", "reshard prune run1 --keep-last 3 --keep-every 1000 --dry-run"),
        ("Without asking, in a script", "reshard prune run1 --keep-last 3 --yes"),
    ),
    "doctor": (
        ("Before the first conversion", "reshard doctor"),
        ("With the places that it will read and write", "reshard doctor s3://bucket/run1 weights"),
    ),
    "submit": (
        ("Print the id of the job", "reshard submit s3://bucket/run1 s3://bucket/weights --to safetensors"),
        (
            "Wait for the end; the exit code is the job's",
            "reshard submit s3://bucket/run1 s3://bucket/run2/step5 --to zero --dp 8 --wait",
        ),
    ),
    "serve": (
        ("API, dashboard and workers in one process", "reshard serve"),
        ("Another port and directory", "reshard serve --port 9000 --data-dir reshard-jobs"),
    ),
    "worker": (
        ("One worker for each GPU", "reshard worker --gpu 0"),
        ("A second one on this host", "reshard worker --gpu 1 --name second"),
    ),
    "gc": (
        ("List the jobs whose files would be removed", "reshard gc --dry-run"),
        ("Also of failed jobs that could be retried", "reshard gc --now"),
    ),
    "audit": (
        ("The last 100 entries", "reshard audit"),
        ("The last 1,000 of one tenant, for a script", "reshard audit --tenant vision --limit 1000 --json"),
    ),
    "jobs": (
        ("The newest jobs", "reshard jobs list"),
        ("Follow one to its end", f"reshard jobs watch {_JOB}"),
    ),
    "jobs list": (
        ("Those that failed", "reshard jobs list --state FAILED"),
        ("Ids of a team's jobs, for a script", "reshard jobs list --label team=vision --quiet"),
    ),
    "jobs show": (
        ("One job, by the beginning of its id", f"reshard jobs show {_JOB}"),
        ("For a script", f"reshard jobs show {_JOB} --json"),
    ),
    "jobs watch": (
        ("To its end; Ctrl-C leaves it running", f"reshard jobs watch {_JOB}"),
        ("For ten minutes at most; then exit code 124", f"reshard jobs watch {_JOB} --wait-timeout 600"),
    ),
    "jobs wait": (
        ("In a script; the exit code is the job's", f"reshard jobs wait {_JOB} --quiet"),
        ("For an hour at most; then exit code 124", f"reshard jobs wait {_JOB} --wait-timeout 3600"),
    ),
    "jobs logs": (
        ("What happened until now", f"reshard jobs logs {_JOB}"),
        ("Until the job ends", f"reshard jobs logs -f {_JOB}"),
    ),
    "jobs cancel": (
        ("Stop a job and remove its unfinished output", f"reshard jobs cancel {_JOB}"),
        ("For a script", f"reshard jobs cancel {_JOB} --json"),
    ),
    "jobs retry": (
        ("Go on where a failed job stopped", f"reshard jobs retry {_JOB}"),
        ("Wait for its end", f"reshard jobs retry {_JOB} --wait"),
    ),
    "jobs workers": (
        ("What each worker does", "reshard jobs workers"),
        ("For a script", "reshard jobs workers --json"),
    ),
    "webhooks": (
        ("The endpoints", "reshard webhooks list"),
        ("What was sent to one, and what was not", "reshard webhooks deliveries ID"),
    ),
    "webhooks create": (
        ("Call a URL when a job ends", "reshard webhooks create https://example.org/hook"),
        ("Only when one fails", "reshard webhooks create https://example.org/hook --event job.failed"),
    ),
    "webhooks list": (
        ("The endpoints", "reshard webhooks list"),
        ("For a script", "reshard webhooks list --json"),
    ),
    "webhooks remove": (
        ("The id is in `reshard webhooks list`", "reshard webhooks remove ID"),
        ("By its URL", "reshard webhooks list | grep old.example.org; reshard webhooks remove ID"),
    ),
    "webhooks rotate": (
        ("A new secret; the old one signs for a day, too", "reshard webhooks rotate ID"),
        ("The old one is known to others: end it at once", "reshard webhooks rotate ID --keep-hours 0"),
    ),
    "webhooks enable": (
        ("The receiver answers again", "reshard webhooks enable ID"),
        ("For a script", "reshard webhooks enable ID --json"),
    ),
    "webhooks deliveries": (
        ("The newest deliveries", "reshard webhooks deliveries ID"),
        ("Those that were given up", "reshard webhooks deliveries ID --state dead"),
    ),
    "webhooks redeliver": (
        ("All that were given up", "reshard webhooks redeliver ID"),
        ("One", "reshard webhooks redeliver ID --delivery DELIVERY"),
    ),
    "tokens": (
        ("A token for a training script", "reshard tokens create trainer --scope submit --scope read"),
        ("Who has one", "reshard tokens list"),
    ),
    "tokens create": (
        (
            "For a training script, for 30 days",
            "reshard tokens create trainer --scope submit --scope read --expires 30d",
        ),
        ("For a dashboard that only shows", "reshard tokens create wall --scope read --expires never"),
    ),
    "tokens list": (
        ("Of your tenant", "reshard tokens list"),
        ("Of another one, for the operator", "reshard tokens list --tenant vision"),
    ),
    "tokens revoke": (
        ("The id is in `reshard tokens list`", "reshard tokens revoke ID"),
        ("For a script", "reshard tokens revoke ID --json"),
    ),
    "tenants": (
        ("All tenants with their limits", "reshard tenants list"),
        (
            "A tenant that may write below one place",
            "reshard tenants create vision --write-root s3://bucket/vision",
        ),
    ),
    "tenants create": (
        (
            "A tenant that may write below one place",
            "reshard tenants create vision --write-root s3://bucket/vision",
        ),
        (
            "With limits",
            "reshard tenants create vision --max-running 4 --bytes-per-day 10TiB",
        ),
    ),
    "tenants set": (
        ("Twice the share of the workers", "reshard tenants set vision --weight 2"),
        ("No limit of its own", "reshard tenants set vision --max-running none"),
    ),
    "tenants list": (
        ("All tenants with their limits", "reshard tenants list"),
        ("For a script", "reshard tenants list --json"),
    ),
    "tenants remove": (
        ("When all of its jobs have ended", "reshard tenants remove vision"),
        ("For a script", "reshard tenants remove vision --json"),
    ),
    "db": (
        ("Does the database fit this release?", "reshard db current"),
        ("Upgrade it", "reshard db upgrade"),
    ),
    "db upgrade": (
        ("Upgrade the database", "reshard db upgrade"),
        ("Read the statements first", "reshard db upgrade --sql"),
    ),
    "db current": (
        ("Its revision, and the one that is needed", "reshard db current"),
        ("For a script", "reshard db current --json"),
    ),
    "db history": (
        ("The revisions", "reshard db history"),
        ("For a script", "reshard db history --json"),
    ),
}


def examples_of(words: str) -> tuple[tuple[str, str], ...]:
    """The examples of the command that these words name, without `reshard`."""
    return EXAMPLES.get(words, ())


# Colours of the terminal: only where there is one that has them, and never under `NO_COLOR` or `TERM=dumb`.
#
# Source: no-color.org, and ECMA-48 (SGR) for the codes.

_RESET = "\x1b[0m"


class Style(StrEnum):
    """Styles by their meaning. Each is readable on a dark and on a light background, and none stands for a word."""

    HEADING = "\x1b[1m"
    FAINT = "\x1b[2m"
    ERROR = "\x1b[1;31m"
    WARNING = "\x1b[33m"
    GOOD = "\x1b[32m"
    BUSY = "\x1b[36m"


def has_colours(stream: TextIO) -> bool:
    """True if a stream is a terminal that shows colours and the user has not switched them off."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def painted(text: str, style: Style | None, stream: TextIO) -> str:
    """The text in a style, or the text alone where the stream has no colours."""
    return f"{style.value}{text}{_RESET}" if style is not None and text and has_colours(stream) else text


def painted_on_stdout(text: str, style: Style | None) -> str:
    """The text in a style if stdout has colours."""
    return painted(text, style, sys.stdout)


def painted_on_stderr(text: str, style: Style | None) -> str:
    """The text in a style if stderr has colours."""
    return painted(text, style, sys.stderr)


def complain(code: str, message: str, fix: str) -> None:
    """Write an error and what the user can do to stderr."""
    sys.stderr.write(f"{painted_on_stderr('error:', Style.ERROR)} {code}: {message}\n")
    if fix:
        sys.stderr.write(f"{painted_on_stderr('fix:', Style.HEADING)} {fix}\n")


def warn(text: str) -> None:
    """Write a warning to stderr."""
    sys.stderr.write(f"{painted_on_stderr('warning:', Style.WARNING)} {text}\n")


def say(*lines: str) -> None:
    """Write lines to stdout."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def say_all(name: str, found: Iterable[BaseModel]) -> None:
    """Write models to stdout as the list of this name in a JSON object."""
    say(json.dumps({"schema_version": 1, name: [one.model_dump(mode="json") for one in found]}))


def hint(line: str, *, quiet: bool = False) -> None:
    """Write a line to stderr, unless the user wants none."""
    if not quiet:
        sys.stderr.write(f"{line}\n")


def aligned(
    rows: Sequence[Sequence[str]], styled: Callable[[int, str], Style | None] = lambda _column, _cell: None
) -> Iterator[str]:
    """The rows of a table as lines, with columns of equal width; `styled` gives the style of a cell in a column."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [painted_on_stdout(c.ljust(w), styled(i, c)) for i, (c, w) in enumerate(zip(row, widths, strict=False))]
        yield "  ".join([*cells, row[-1]])


SOURCE = Section.SOURCE
TARGET = Section.TARGET
LAYOUT = Section.LAYOUT
DEEPSPEED = Section.DEEPSPEED
FSDP_RANKS = Section.FSDP_RANKS
MEGATRON = Section.MEGATRON
ADAPTERS = Section.ADAPTERS
PICTURE = "Picture"
COMPARISON = "Comparison"
CHECKING = Section.CHECKING
RESOURCES = Section.RESOURCES
JOB = "Job"
TENANT = "Tenant"
SERVICE = "Service"
GENERAL = "General"
_ORDER = (
    *(
        "Options",
        SOURCE,
        TARGET,
        LAYOUT,
        DEEPSPEED,
        FSDP_RANKS,
        MEGATRON,
        ADAPTERS,
        PICTURE,
        COMPARISON,
        CHECKING,
        RESOURCES,
        JOB,
        TENANT,
        SERVICE,
    ),
)
HERE = "Checkpoints, on this machine"
SCRIPTS = "In place of DeepSpeed's scripts"
REMOTE = "With a service (RESHARD_URL, RESHARD_TOKEN)"
OPERATION = "To run a service"
_WIDEST = 28
"""Longest name of an option beside which its text begins; the text of a longer one begins below it."""
_LONGEST_LIST = 56
MOST_COLUMNS = 120


_WORDS_GIVEN = "reshard.words"


@dataclass(frozen=True)
class _TargetsShown:
    """The part of the targets and of their options that a page of help shows."""

    heading: str
    targets: Sequence[Target]
    left_out: Collection[str]
    """Names of options that are not shown."""


def _targets_shown(parameters: Sequence[Any], words: Sequence[str]) -> _TargetsShown:
    """All targets, or the one that `--to` names among the words, with the options that it does not take."""
    having = (p for p in parameters if hasattr(p, "targets"))
    known: Mapping[str, Target] = getattr(next(having, None), "targets", {})
    said = dict(pairwise(words)).get("--to", "")
    said = next((word.removeprefix("--to=") for word in words if word.startswith("--to=")), said)
    chosen = next((t for t in known.values() if said in (t.name, *t.also)), None)
    if chosen is None:
        return _TargetsShown("Formats (--to)", [*known.values()], ())
    return _TargetsShown("Format", [chosen], options_of_others(chosen.name, known))


class HelpedCommand(TyperCommand):
    """A command with our help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words; the help, which is written before they are read, looks for `--to` among them."""
        ctx.meta[_WORDS_GIVEN] = tuple(args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, text, examples, arguments, and options by section.

        With `--to FORMAT` among the words, the options are those that this target takes.
        """
        parameters: list[Any] = [p for p in self.get_params(ctx) if not getattr(p, "hidden", False)]
        shown = _targets_shown(parameters, ctx.meta.get(_WORDS_GIVEN, ()))
        parameters = [p for p in parameters if p.name not in shown.left_out]
        arguments = [p for p in parameters if p.param_type_name == "argument"]
        words = [_named(p) if p.required else f"[{_named(p)}]" for p in arguments]
        _begin(self, ctx, formatter, " ".join(["[OPTIONS]", *words]))
        _section(formatter, "Arguments", [(_named(p), p.help or "") for p in arguments])
        for heading, found in _by_section(parameters):
            _section(formatter, heading, [_option_row(p) for p in found])
            if any(hasattr(p, "targets") for p in found):
                _section(formatter, shown.heading, [(t.name, f"{t.contains}.") for t in shown.targets])


_MEANT = {
    "ls": ("list",),
    "rm": ("remove", "revoke"),
    "delete": ("remove", "revoke"),
    "add": ("create",),
    "inspect": ("show",),
    "describe": ("show",),
    "get": ("show",),
    "status": ("show",),
    "stop": ("cancel",),
    "kill": ("cancel",),
}
"""Names that people type, and the commands that they mean in groups without a command of that name."""


class HelpedGroup(TyperGroup):
    """A group of commands with our help, which takes the names that other programs have for its commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of the first word."""
        if args and args[0] not in self.commands:
            args = [next((name for name in _MEANT.get(args[0], ()) if name in self.commands), args[0]), *args[1:]]
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, text, examples, commands by section, and options."""
        _begin(self, ctx, formatter, "[OPTIONS] COMMAND [ARGS]...")
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                heading = _panel(command) or "Commands"
                sections.setdefault(heading, []).append((name, first_paragraph(command.help)))
        for heading, rows in sections.items():
            _section(formatter, heading, rows)
        options = [p for p in self.get_params(ctx) if not getattr(p, "hidden", False)]
        _section(formatter, GENERAL, [_option_row(p) for p in options])


class Commands(typer.Typer):
    """A typer app whose commands have our help."""

    def __init__(self, **settings: Any) -> None:
        """Make the app as typer does."""
        names = {"help_option_names": ["-h", "--help"], "max_content_width": MOST_COLUMNS}
        own: dict[str, Any] = {"cls": HelpedGroup, "rich_markup_mode": None, "context_settings": names}
        super().__init__(**own | settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[..., Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Register a command with our help."""
        own: dict[str, Any] = {"cls": HelpedCommand}
        return super().command(name, **own | settings)


def first_paragraph(text: str | None) -> str:
    """The first paragraph of a docstring, as one line."""
    return " ".join((text or "").partition("\n\n")[0].split())


def _begin(command: Any, ctx: Any, formatter: Any, usage: str) -> None:
    formatter.write_usage(ctx.command_path, usage, prefix=painted_on_stdout("Usage:", Style.HEADING) + " ")
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(cleandoc(command.help or ""))
    words = ctx.command_path.partition(" ")[2]
    if found := examples_of(words):
        formatter.write_paragraph()
        formatter.write(painted_on_stdout("Examples:", Style.HEADING) + "\n")
        for remark, line in found:
            formatter.write(painted_on_stdout(f"  # {remark}", Style.FAINT) + f"\n  {line}\n")


def _section(formatter: Any, heading: str, rows: Sequence[tuple[str, str]]) -> None:
    if rows:
        formatter.write_paragraph()
        formatter.write(painted_on_stdout(f"{heading}:", Style.HEADING) + "\n")
        with formatter.indentation():
            formatter.write_dl(rows, col_max=_WIDEST)


def _by_section(parameters: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Options by section: in our order, then sections of formats of other packages, then the general ones."""
    sections: dict[str, list[Any]] = {}
    for parameter in parameters:
        if parameter.param_type_name == "option":
            heading = GENERAL if parameter.name == "help" else _panel(parameter) or "Options"
            sections.setdefault(heading, []).append(parameter)
    last = [heading for heading in sections if heading not in (*_ORDER, GENERAL)]
    for heading in (*_ORDER, *last, GENERAL):
        if heading in sections:
            yield heading, sections[heading]


def _panel(thing: Any) -> str | None:
    # typer marks "not given" by an object of its own.
    panel = getattr(thing, "rich_help_panel", None)
    return panel if isinstance(panel, str) else None


def _named(argument: Any) -> str:
    return argument.metavar or argument.name.upper()


def _option_row(option: Any) -> tuple[str, str]:
    """The name of an option with the word for its value, and its text with default and repetition."""
    names = ", ".join(sorted(option.opts, key=len))
    if option.secondary_opts:
        names = f"{names}, {', '.join(option.secondary_opts)}"
    text = option.help or ""
    if not option.is_flag:
        word = _value_word(option)
        if len(word) > _LONGEST_LIST and "|" in word:
            text = f"{text} One of {', '.join(word.split('|'))}."
            word = option.name.upper().replace("_", "-")
        names = f"{names} {word}"
    facts = ["required"] if option.required else []
    default = option.default
    if default not in (None, False, (), []) and default is not True:
        facts.append(f"default: {getattr(default, 'value', default)}")
    return names, f"{text} [{', '.join(facts)}]" if facts else text


_WORDS: tuple[tuple[type, str], ...] = ((int, "N"), (float, "X"), (Path, "PATH"))


def _value_word(option: Any) -> str:
    """The word in upper case for an option's value, or its choices."""
    if option.metavar:
        return option.metavar
    # Older versions of typer have click's type, newer ones the annotation.
    kind = getattr(getattr(option, "type_descriptor", None), "annotation", None)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(member.value) for member in kind)
    for wanted, word in _WORDS:
        if isinstance(kind, type) and issubclass(kind, wanted):
            return word
    return "TEXT"
