"""What the images and the compose file say, read as the tools that build and start them read it."""

from __future__ import annotations

import json
import re
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from house.repository import ROOT

DOCKERFILE = ROOT / "deploy" / "images" / "Dockerfile"
KNOWN = {"FROM", "RUN", "COPY", "USER", "ENTRYPOINT", "CMD", "ENV", "WORKDIR", "EXPOSE", "VOLUME"}


@dataclass
class Stage:
    """One stage of a Dockerfile: where it begins, and its instructions in order."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def last(self, instruction: str) -> str:
        """The arguments of the last such instruction; empty if there is none."""
        return next((value for word, value in reversed(self.steps) if word == instruction), "")


def stages_of(path: Path) -> dict[str, Stage]:
    """The stages of a Dockerfile by name, the only or last one also as the empty name."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    found: dict[str, Stage] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        word, _, value = line.strip().partition(" ")
        assert word in KNOWN, f"{path.name}: a test that runs these steps knows no {word}"
        if word == "FROM":
            base, _, name = value.partition(" AS ")
            found[name] = found[""] = Stage(name, base)
        else:
            found[""].steps.append((word, value.strip()))
    return found


def lineage(path: Path, target: str) -> list[Stage]:
    """A stage and those that it begins with, the first one first."""
    stages = stages_of(path)
    chain = [stages[target]]
    while chain[0].base in stages:
        chain.insert(0, stages[chain[0].base])
    return chain


def command_of(path: Path, target: str = "", command: list[str] | None = None) -> list[str]:
    """What a container of this image runs: its entry point with its own command, or with this one."""
    chain = lineage(path, target)
    entry = [stage.last("ENTRYPOINT") for stage in chain if stage.last("ENTRYPOINT")]
    own = [stage.last("CMD") for stage in chain if stage.last("CMD")]
    return [*json.loads(entry[-1]), *(json.loads(own[-1]) if command is None else command)]


def environment_of(path: Path, target: str) -> dict[str, str]:
    """The variables that an image and those that it begins with set; `$PATH` is the image's own."""
    found = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"}
    for stage in lineage(path, target):
        for word, value in stage.steps:
            if word == "ENV":
                for pair in shlex.split(value):
                    name, _, text = pair.partition("=")
                    found[name] = text.replace("$PATH", found["PATH"])
    return found


def compose(settings: Mapping[str, str]) -> dict[str, Any]:
    """docker-compose.yml with these settings in the places of its variables."""
    return _filled(yaml.safe_load((ROOT / "docker-compose.yml").read_text()), settings)


def example_settings() -> dict[str, str]:
    """`.env.example` as compose reads it, with a secret in each place that it leaves empty."""
    text = (ROOT / ".env.example").read_text()
    found = re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)
    return {name: value or secrets.token_hex(16) for name, value in found}


_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?::([-?])((?:[^${}]|\$\{[^{}]*\})*))?\})")


def _filled(value: Any, settings: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _filled(part, settings) for name, part in value.items()}
    if isinstance(value, list):
        return [_filled(part, settings) for part in value]
    return _text(value, settings) if isinstance(value, str) else value


def _text(text: str, settings: Mapping[str, str]) -> str:
    def fill(match: re.Match[str]) -> str:
        dollar, name, mark, rest = match.groups()
        if dollar:
            return "$"
        if found := settings.get(name, ""):
            return found
        assert mark != "?", f"{name}: {rest}"
        return _text(rest or "", settings)

    return _VARIABLE.sub(fill, text)
