"""The cases of Megatron-core: to files that every layout loads, beside real megatron-core that loads and saves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cases import OURS, PYTHON, Case, Contender, Limit, convert_command, copied, environment, written_alone
from compare import same_tensors

PEER, DCP = "megatron-core loads and saves", "reshard --to dcp"
_HERE = Path(__file__).parent
_STEP = "iter_0000001"
_RUN = {"dtype": "bf16", "tp": 2}


@dataclass(frozen=True)
class _Model:
    """A run of two tensor-parallel ranks, how it saves, and the ranks that megatron-core needs to save it again."""

    name: str
    run: dict[str, Any]
    form: str
    peer_tp: int
    at_least: float


def _experts(parameters: int) -> dict[str, Any]:
    """A mixture of experts of about so many parameters, each of 8,000 to 17,000 elements."""
    of_layer = 125
    sizes = {"hidden_size": 96, "moe_ffn_hidden_size": 88}
    return {**_RUN, "model": "moe", "layers": max(1, parameters // of_layer), "experts": 60, "more": sizes}


def _dense(megabytes: int) -> dict[str, Any]:
    """A Llama whose bf16 weights, masters and moments take about so many megabytes."""
    of_layer = 14 * (3 * 1024 * 1024 + 3 * 2816 * 1024) / 1e6
    sizes = {"hidden_size": 1024, "ffn_hidden_size": 2816}
    return {**_RUN, "model": "llama", "layers": max(1, round(megabytes / of_layer)), "more": sizes}


def _here() -> bool:
    """True if megatron-core can be imported; otherwise says what is missing."""
    script = "import sys; sys.path.insert(0, 'tests'); from oracle import megatron_cpu; megatron_cpu.prepare()"
    tried = subprocess.run(
        [PYTHON, "-c", script], cwd=_HERE.parent, check=False, env=environment(), capture_output=True, text=True
    )
    if tried.returncode:
        why = (tried.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        print(f"the cases of Megatron-core are left out, as it makes their sources: {why}", file=sys.stderr)
    return tried.returncode == 0


def _said(path: Path, run: dict[str, Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run))
    return str(path)


def _saved(source: Path, model: _Model) -> None:
    """Train one step and save it with megatron-core, unless it is there."""
    if source.exists():
        return
    run = _said(source.with_name(f"{source.name}.json"), model.run)
    command = [PYTHON, str(_HERE / "megatron_ranks.py"), "save", run, str(source), model.form]
    subprocess.run(command, check=True, env=environment(), capture_output=True)


def megatron_cases(root: Path, megabytes: int, *, parameters: int = 5_000) -> Iterator[Case]:
    """Distributed checkpoints and directories of ranks; the peer is a run of megatron-core that loads and saves."""
    if not _here():
        return
    size = f"{megabytes / 1000:g} GB"
    models = (
        _Model(f"Megatron-core, Llama, tensor-parallel 2, {size}", _dense(megabytes), "fully_reshardable", 1, 1),
        _Model(f"Megatron-core, directories of 2 ranks, {size}", _dense(megabytes), "torch", 2, 1),
        _Model(f"Megatron-core, experts, {4 * parameters} tensors", _experts(parameters), "fully_reshardable", 1, 2),
    )
    for model in models:
        source = root / "source" / model.name
        ours, dcp, peer = (root / who / "m" for who in ("ours", "dcp", "peer"))
        run = _said(root / "source" / f"{model.name} again.json", {**model.run, "tp": model.peer_tp})
        command = [PYTHON, str(_HERE / "megatron_ranks.py"), "convert", run, str(source), str(peer)]
        yield Case(
            f"{model.name} to torch_dist",
            partial(_saved, source, model),
            (
                Contender(OURS, convert_command(source, ours / _STEP, "--to", "megatron"), ours),
                copied(ours, root / "copy"),
                written_alone(ours, root / "written"),
                Contender(DCP, convert_command(source, dcp, "--to", "dcp"), dcp),
                Contender(PEER, command, peer),
            ),
            lambda ours=ours, peer=peer: same_tensors(ours / _STEP, peer / _STEP),
            (Limit(PEER, model.at_least),),
        )
