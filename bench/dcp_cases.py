"""The cases of distributed checkpoints (PyTorch DCP): to weights, to another one, and from DeepSpeed's."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from cases import (
    COPY,
    OURS,
    PYTHON,
    Case,
    Contender,
    Limit,
    convert_command,
    copied,
    environment,
    sized,
    written,
    written_alone,
)
from compare import same_state_dicts, same_weights

PEER = "dcp_to_torch_save, then safetensors"
_HERE = Path(__file__).parent


def _saved(source: Path, parameters: list[tuple[str, tuple[int, ...]]]) -> None:
    """Save the checkpoint with torch, unless it is there."""
    if source.exists():
        return
    source.parent.mkdir(parents=True, exist_ok=True)
    listed = source.with_name(f"{source.name}.json")
    listed.write_text(json.dumps(parameters))
    subprocess.run([PYTHON, str(_HERE / "dcp_source.py"), str(source), str(listed)], check=True, env=environment())


def dcp_cases(root: Path, megabytes: int) -> Iterator[Case]:
    """Distributed checkpoints of four ranks; the peer is torch's own way to one file."""
    parameters = sized(megabytes)
    size = f"{megabytes / 1000:g} GB"
    make = partial(_saved, parameters=parameters)
    source, ours, peer = root / "source" / f"DCP, 4 ranks, {size}", root / "ours" / "d", root / "peer" / "d"
    yield Case(
        f"DCP, 4 ranks, {size} to safetensors",
        partial(make, source),
        (
            Contender(OURS, convert_command(source, ours, "--to", "safetensors"), ours),
            copied(ours, root / "copy"),
            written_alone(ours, root / "written"),
            Contender(PEER, [PYTHON, str(_HERE / "dcp_peer.py"), str(source), str(peer)], peer),
        ),
        lambda: same_weights(ours, peer),
        (Limit(PEER, 3),),
    )
    again = root / "ours" / "again"
    yield Case(
        f"DCP, 4 ranks, {size} to DCP",
        partial(make, source),
        (
            Contender(OURS, convert_command(source, again, "--to", "dcp"), again),
            copied(again, root / "copy"),
            written_alone(again, root / "written"),
        ),
        lambda: same_state_dicts(again, source),
        (Limit(COPY, 1 / 1.25),),
    )
    zero, across = root / "source" / f"ZeRO-2, 4 ranks, {size}", root / "ours" / "across"
    yield Case(
        f"ZeRO-2, 4 ranks, {size} to DCP",
        partial(written, zero, parameters, stage=2, ranks=4),
        (
            Contender(OURS, convert_command(zero, across, "--to", "dcp", "--framework", "state-dict"), across),
            copied(across, root / "copy"),
            written_alone(across, root / "written"),
        ),
        lambda: _same_after_a_round_trip(zero, across, root / "back"),
        (Limit(COPY, 1 / 1.25),),
    )


def _same_after_a_round_trip(zero: Path, across: Path, back: Path) -> list[str]:
    """Differences between a native checkpoint and one that came back from a distributed one, by `reshard diff`."""
    command = convert_command(across, back, "--to", "zero", "--dp", "4", "--zero-stage", "2", "--overwrite")
    subprocess.run(command, check=True, env=environment(), stderr=subprocess.DEVNULL)
    said = subprocess.run(
        [PYTHON, "-m", "reshard.cli.main", "diff", str(zero), str(back), "--common"],
        check=False, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    return [] if said.stdout.startswith("equal") else [said.stdout[:400]]
