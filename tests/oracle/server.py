"""Fork-server that has imported torch and DeepSpeed once and forks a world of ranks per request.

Run as ``python -m oracle.server``.  Requests and answers are JSON lines on the original stdin and stdout; a request is
``{"id", "world", "function", "kwargs", "timeout_s"}``, an answer ``{"id", "ok", "results", "errors", "seconds"}``.
Importing DeepSpeed takes several seconds and forking takes milliseconds: that is the reason for this process.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from servers.process import free_port

_SLOW_IMPORTS = (
    "deepspeed",
    "deepspeed.checkpoint.ds_to_universal",
    "deepspeed.module_inject.auto_ep_layer",  # every engine's configuration imports it
    "deepspeed.runtime.zero.muon.original_muon",  # pulls in torch._inductor; every ZeRO engine imports it
    "deepspeed.utils.zero_to_fp32",
    "safetensors.torch",
)
# Models of the ranks need these and their thousands of modules: 2.5 s that each rank of each world would pay again.
_SLOW_IMPORTS_IF_INSTALLED = (
    "transformers.optimization",
    "transformers.trainer",
    "accelerate",
    "peft",
    "pytorch_lightning",
)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 3.0  # for the peers of a rank that failed: time to notice it and leave a traceback of their own
_POLL_S = 0.005
_LOG_TAIL_CHARS = 3000


def _preload() -> None:
    """Imports everything slow, and switches off what DeepSpeed would compile or leak on a CPU."""
    for name in _SLOW_IMPORTS:
        importlib.import_module(name)
    for name in _SLOW_IMPORTS_IF_INSTALLED:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    import torch

    torch.optim.AdamW([torch.zeros(1)])  # pulls in torch._dynamo: 1.4 s that each rank would pay again

    # It would JIT-compile a C++ shared-memory all-reduce (45 s) and leak 64 MiB of /dev/shm per rank; gloo is enough.
    # `deepspeed.comm` binds the name `torch` to the package, hence the look-up of the submodule in sys.modules.
    comm: Any = sys.modules["deepspeed.comm.torch"]
    comm.build_shm_op = lambda: None
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # DeepSpeed collects garbage while it builds an engine: 0.25 s over what the imports left


def _rank_main(request: dict[str, Any], rank: int, port: int, scratch: Path) -> None:
    """Body of one forked rank: runs the function, leaves its result or traceback in a file, never returns."""
    os.setsid()  # its own process group, so that whatever it starts can be ended with it
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The server's own stdin and stdout are the request pipe: a rank must not be able to write into it.
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(scratch / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0, "r"), os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(request["world"]),
        LOCAL_SIZE=str(request["world"]),
        CROSS_RANK="0",  # this and the next: what DeepSpeed's checkpoint writers want to know about machines
        CROSS_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        ORACLE_STORE=f"file://{scratch / 'store'}",
    )
    try:
        module_name, _, function_name = request["function"].partition(":")
        function = getattr(importlib.import_module(module_name), function_name)
        outcome = {"result": function(**request["kwargs"])}
        text = json.dumps(outcome)
        _leave_together()
    except BaseException:  # noqa: BLE001 - reported to the parent, whatever it is
        text = json.dumps({"error": traceback.format_exc()})
    partial = scratch / f"rank{rank}.partial"
    partial.write_text(text)
    partial.rename(scratch / f"rank{rank}.json")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no interpreter teardown: it belongs to the server's copy of torch


def _leave_together() -> None:
    """Keeps a fast rank from closing its sockets under a collective that a slower one still runs."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _wait(pids: dict[int, int], scratch: Path, timeout_s: float) -> dict[int, str]:
    """Waits until no rank is left; returns why a rank was killed, by rank."""
    killed: dict[int, str] = {}
    living = dict(pids)
    deadline = time.monotonic() + timeout_s
    why = f"killed: the world ran longer than {timeout_s} s"
    failed = False
    while living:
        for rank, pid in list(living.items()):
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                del living[rank]
                report = scratch / f"rank{rank}.json"
                bad = not report.exists() or "error" in json.loads(report.read_text())
                if bad and not failed:
                    failed = True
                    why = f"killed: rank {rank} had failed"
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if living and time.monotonic() > deadline:
            for rank, pid in living.items():
                killed[rank] = why
                _kill_group(pid)
            deadline = float("inf")
        time.sleep(_POLL_S)
    for pid in pids.values():
        _end_group(pid)
    return killed


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the second for a rank that died before its setsid
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _end_group(pgid: int) -> None:
    """Returns when the process group is empty: what a rank started may outlive it, but not the launch."""
    until = time.monotonic() + 5.0
    while time.monotonic() < until:
        try:
            os.killpg(pgid, signal.SIGKILL)
            os.waitpid(-pgid, os.WNOHANG)  # orphans are ours to reap (subreaper); a zombie still counts as a member
        except ProcessLookupError:
            return
        except ChildProcessError:
            pass
        time.sleep(_POLL_S)
    raise RuntimeError(f"process group {pgid} does not end")


def _collect(pids: dict[int, int], scratch: Path, killed: dict[int, str]) -> tuple[list[Any], dict[str, str]]:
    results: list[Any] = []
    errors: dict[str, str] = {}
    for rank in sorted(pids):
        report = scratch / f"rank{rank}.json"
        outcome = json.loads(report.read_text()) if report.exists() else {"error": killed.get(rank, "died silently")}
        if "error" in outcome:
            log = (scratch / f"rank{rank}.log").read_text(errors="replace") if report.parent.exists() else ""
            errors[str(rank)] = f"{outcome['error']}\n--- log tail ---\n{log[-_LOG_TAIL_CHARS:]}"
        results.append(outcome.get("result"))
    return results, errors


def _launch(request: dict[str, Any]) -> dict[str, Any]:
    """Runs one world from fork to the end of its last process."""
    began = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="reshard-oracle-"))
    port = free_port()
    pids: dict[int, int] = {}
    try:
        for rank in range(request["world"]):
            pid = os.fork()
            if pid == 0:
                _rank_main(request, rank, port, scratch)
            pids[rank] = pid
        killed = _wait(pids, scratch, request["timeout_s"])
        results, errors = _collect(pids, scratch, killed)
    finally:
        for pid in pids.values():
            _kill_group(pid)
        shutil.rmtree(scratch, ignore_errors=True)
        for leftover in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}*"):
            leftover.unlink()
    return {"ok": not errors, "results": results, "errors": errors, "seconds": time.monotonic() - began}


def main() -> None:
    """Serves launches until stdin closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # chatter of the imports goes to stderr, never between the answers
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _preload()
    print(json.dumps({"id": 0}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = _launch(request)
        except Exception:  # noqa: BLE001 - reported to the parent, whatever it is
            answer = {"ok": False, "results": [], "errors": {"server": traceback.format_exc()}, "seconds": 0.0}
        print(json.dumps(answer | {"id": request["id"]}), file=answers, flush=True)


if __name__ == "__main__":
    main()
