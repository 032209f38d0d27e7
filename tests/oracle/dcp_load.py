"""Functions that run inside the ranks: resume checkpoints as the programs that write them do, and say what came in.

Each leaves ``resumed.safetensors`` and ``resumed.json`` right after loading, and then trains three steps.
"""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

import reshard
from oracle.dcp_accelerate import join_as_accelerate, start as start_accelerate
from oracle.dcp_cases import FsdpRun
from oracle.dcp_grammars import load
from oracle.dcp_models import RESUME_SEED, STEPS, Running, start, start_world, train_steps
from oracle.dcp_truth import dump


def _go_on(running: Running, out: str) -> list[float]:
    dump(running.model, running.optimizer, running.scheduler, Path(out), "resumed")
    running.steps = STEPS
    return train_steps(running)


def torch_only(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Resumes several checkpoints one after the other, by ``dcp.load`` and torch's state-dict functions.

    Args:
        jobs: of each the ``run``, the ``kind`` of its grammar, its ``path``, where to dump (``out``), ``partial`` if
            states may be missing, the options of `reshard.dcp.Reader` if that reads it (``direct``), the
            ``scheduler``'s state if the checkpoint holds none, and the ``line`` of a script that loads it, if any.

    Returns:
        For each the ``losses`` of its three steps, or the ``error`` that loading ended with.
    """
    start_world()
    results: list[dict[str, Any]] = []
    for job in jobs:
        running = start(FsdpRun.of(job["run"]), seed=RESUME_SEED)
        scheduler = running.scheduler
        if job["scheduler"] is not None:
            running.scheduler = None  # the checkpoint holds none
        try:
            load(
                running, job["kind"], Path(job["path"]), partial=job["partial"], direct=job["direct"], line=job["line"]
            )
        except (Exception, CheckpointException):  # noqa: BLE001 - the test judges it; torch's is none of Exception's
            results.append({"error": traceback.format_exc()})
            continue
        assert job["kind"] not in ("flat", "titan") or running.steps == STEPS, "torchtitan's counter is lost"
        if job["scheduler"] is not None:
            scheduler.load_state_dict(job["scheduler"])
        running.scheduler = scheduler
        results.append({"losses": _go_on(running, job["out"])})
    return results


def accelerate(
    run: dict[str, Any],
    out: str,
    path: str | None = None,
    direct: dict[str, Any] | None = None,
    line: str | None = None,
) -> dict[str, Any]:
    """Resumes by ``Accelerator.load_state(path)``.

    With ``direct``, by ``reshard.direct`` with these options; with ``line``, by this call of a script.
    """
    join_as_accelerate()
    accelerator, running = start_accelerate(FsdpRun.of(run), seed=RESUME_SEED)
    if line is not None:
        eval(line, {"accelerator": accelerator})
    else:
        assert path is not None
        with nullcontext(path) if direct is None else reshard.direct(path, **direct) as place:
            accelerator.load_state(place)
    return {"losses": _go_on(running, out)}
