"""The model card of exported weights and adapters: `README.md`, as huggingface_hub reads and the hub shows it.

A card says only what the source and the request say, so its bytes follow from them: it has no date, and no path of the
machine. Its front matter names a base model only if the user did (`--base-model`). `_name_or_path` of a configuration
may be a path that looks like a name of the hub, so the text repeats it and takes it for no name.

Source: huggingface_hub 2.4.0 `repocard.py` (`ModelCard`, the front matter between two lines `---`), `repocard_data.py`
(`ModelCardData`: `library_name`, `base_model`, `tags`).
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import yaml

from reshard.choices import TargetFormat
from reshard.declared import flags_of
from reshard.errors import RequestError, counted, format_size, printable
from reshard.models.jobs import ConvertRequest, NotCarried
from reshard.options import WeightsOptions
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.model_weights import Weight
from reshard_engine.plan.model import source_digest
from reshard_engine.plan.planner import source_facts
from reshard_engine.tensors.layout import TargetFile, TargetLayout, literal_template

CARD_NAME = "README.md"
_CONFIGS = {"config.json": ("_name_or_path",), "adapter_config.json": ("base_model_name_or_path",)}
"""Configurations beside weights, and their fields that say from where the model was loaded."""
_MOST_PATHS = 16
"""Most paths of one reason that a card lists; `reshard.json` has them all."""
_MARKUP = re.compile(r"[\\`*_\[\]<>|~&]")


def check_card(request: ConvertRequest) -> None:
    """Refuse a base model without a card.

    Raises:
        RequestError: `request.invalid`.
    """
    options = request.options.weights
    if options.base_model is not None and not options.card:
        raise RequestError(
            "request.invalid",
            "--base-model is for a model card",
            fix="add --card; the weights of a base model are named by --base DIR",
        )


def with_card(
    layout: TargetLayout, checkpoint: Checkpoint, request: ConvertRequest, *, weights: Sequence[Weight]
) -> TargetLayout:
    """The layout with a model card, if the request asks for one.

    Args:
        layout: All files of the target, and what it does not carry.
        checkpoint: The source.
        request: The request.
        weights: The tensors that the target holds.
    """
    options = request.options.of(WeightsOptions)
    if not options.card:
        return layout
    checkpoint = replace(checkpoint, shard_map=layout.map_over(checkpoint.shard_map))
    card = _Card(checkpoint, request, weights, (*checkpoint.not_carried, *layout.not_carried), _facts_beside(layout))
    file = TargetFile(CARD_NAME, literal_template(card.text().encode()), ())
    said = card.said_origin
    if options.base_model is not None or said is None:
        return replace(layout, files=(file, *layout.files))
    note = f"{CARD_NAME} names no base model: the configuration says {printable(said)}, which may be a path"
    note += "; --base-model ID names it"
    return replace(layout, files=(file, *layout.files), warnings=(*layout.warnings, note))


def _facts_beside(layout: TargetLayout) -> Mapping[str, Mapping[str, Any]]:
    """The configurations of a layout, by name. Those that are no JSON objects say nothing."""
    found: dict[str, Mapping[str, Any]] = {}
    for file in layout.files:
        if file.path not in _CONFIGS:
            continue
        try:
            facts: Any = json.loads(b"".join(data for _, data in file.template.literals))
        except (ValueError, RecursionError):
            continue
        if isinstance(facts, dict):
            found[file.path] = cast("Mapping[str, Any]", facts)
    return found


@dataclass(frozen=True)
class _Card:
    """The contents of one card."""

    checkpoint: Checkpoint
    request: ConvertRequest
    weights: Sequence[Weight]
    not_carried: Sequence[NotCarried]
    beside: Mapping[str, Mapping[str, Any]]
    """The configurations beside the weights, by file name."""

    @property
    def said_origin(self) -> str | None:
        """The place that a configuration names as the one from which the model was loaded; None if it names none."""
        said = (self.beside[file].get(key) for file, keys in _CONFIGS.items() if file in self.beside for key in keys)
        return next((value for value in said if isinstance(value, str) and value), None)

    @property
    def library(self) -> str | None:
        """The library that loads the target; None where no configuration says it."""
        if self.request.to == TargetFormat.PEFT:
            return "peft"
        is_model = isinstance(self.beside.get("config.json", {}).get("model_type"), str)
        return "transformers" if is_model else None

    def text(self) -> str:
        """The whole file."""
        data = {"library_name": self.library, "base_model": self.request.options.weights.base_model}
        front = {name: value for name, value in data.items() if value is not None} | {"tags": ["reshard"]}
        parts = [self._title(), self._source(), self._contents(), self._command(), self._left_out()]
        return f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n" + "\n\n".join(p for p in parts if p) + "\n"

    def _title(self) -> str:
        kind = self.beside.get("config.json", {}).get("model_type")
        what = "Adapter" if self.request.to == TargetFormat.PEFT else "Weights"
        of_kind = f" of a {_code(kind)} model" if isinstance(kind, str) else ""
        return f"# {what}{of_kind}\n\nReshard exported these files from a checkpoint."

    def _source(self) -> str:
        checkpoint = self.checkpoint
        name = checkpoint.tag or checkpoint.url.rstrip("/").rpartition("/")[2]
        version = f", saved by version {_code(checkpoint.framework_version)}" if checkpoint.framework_version else ""
        rows = [f"- Checkpoint: {_code(name)} ({_code(checkpoint.format)}{version})"]
        if checkpoint.counters.steps is not None:
            rows.append(f"- Steps of the optimizer: {checkpoint.counters.steps}")
        digest = source_digest(source_facts(checkpoint))
        rows.append(f"- Digest of its files (names, sizes, and modification times or ETags): `{digest}`")
        if (said := self.said_origin) is not None:
            rows.append(f"- The configuration says that the model was loaded from: {_code(said)}")
        return "## Source\n\n" + "\n".join(rows)

    def _contents(self) -> str:
        held = Counter(w.dtype.name for w in self.weights)
        size = sum(w.size_bytes for w in self.weights)
        types = ", ".join(f"{count:,} {name}" for name, count in sorted(held.items()))
        rows = [f"- {counted(len(self.weights), 'tensor')} in {format_size(size)}: {types}"]
        tensors = self.checkpoint.shard_map.tensors
        casts = Counter((tensors[w.tensor].dtype.name, w.dtype.name) for w in self.weights)
        rows += [
            f"- Cast from {source} to {target}: {counted(count, 'tensor')}"
            for (source, target), count in sorted(casts.items())
            if source != target
        ]
        return "## Contents\n\n" + "\n".join(rows)

    def _command(self) -> str:
        command = shlex.join(["reshard", "convert", "SRC", "DST", *flags_of(self.request)])
        return (
            "## Made by\n\n"
            f"```sh\n{command}\n```\n\n"
            "SRC is the checkpoint above. `reshard verify DST` compares the files with the digests in `reshard.json`."
        )

    def _left_out(self) -> str:
        by_reason: dict[str, list[str]] = {}
        for entry in self.not_carried:
            by_reason.setdefault(entry.reason, []).append(entry.path)
        if not by_reason:
            return ""
        rows: list[str] = []
        for reason, paths in sorted(by_reason.items()):
            more = len(paths) - _MOST_PATHS
            named = ", ".join(_code(path) for path in paths[:_MOST_PATHS])
            rows.append(f"- {_plain(reason)}: {named}{f', and {more:,} more' if more > 0 else ''}")
        return "## Not carried\n\n" + "\n".join(rows)


def _plain(text: str) -> str:
    """A text as one line that Markdown shows as it is."""
    return _MARKUP.sub(lambda found: f"\\{found[0]}", printable(text))


def _code(name: str) -> str:
    """A name of a checkpoint as one line of code. A backtick would end it, so names with one are escaped text."""
    return _plain(name) if "`" in name else f"`{printable(name)}`"
