"""DLRover's conversion on a change of membership, by `reshard`: docs/recipes/dlrover.md.

python dlrover_ucp.py --nnodes=1:4 --nproc_per_node=8 train.py  # in place of: dlrover-run --nnodes=1:4 ...
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

TIMEOUT_S = 3600.0
"""How long the agent waits: the rendezvous of all nodes is blocked meanwhile. What is done is kept."""

_SAVER = ("dlrover.python.elastic_agent.torch.ckpt_saver", "DeepSpeedCheckpointSaver")
_LAUNCHER = "dlrover.trainer.torch.main"
_PARAMETERS = ["self", "input_dir", "output_dir", "ucp_device_type"]

logger = logging.getLogger("reshard.dlrover")


class UnsupportedDlroverError(RuntimeError):
    """This DLRover has no `ucp` to replace, or one with other parameters."""


def ucp(self: object, input_dir: str, output_dir: str, ucp_device_type: str) -> bool:  # noqa: ARG001 - DLRover's
    """Make a universal checkpoint of a tag directory, in a process of its own.

    Args:
        self: The saver.
        input_dir: `.../checkpoint-N/global_stepN`.
        output_dir: `.../checkpoint-N/ucp`; `latest_universal` is written beside it, last.
        ucp_device_type: Not needed: nothing is computed.

    Returns:
        True if the checkpoint was verified and is in its place. Else nothing half is there, and the log says why.
    """
    # The agent outlives the conversion: neither its memory nor a crash may take it along.
    command = [
        sys.executable,
        "-m",
        "reshard.cli.main",
        "convert",
        input_dir,
        output_dir,
        "--to",
        "universal",
        "--json",
    ]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    except Exception as error:  # noqa: BLE001 - whatever it is: what is raised here leaves the rendezvous blocked
        logger.error("no universal checkpoint of %s: %s: %s", input_dir, type(error).__name__, error)
        return False
    if done.returncode == 0:
        logger.info("universal checkpoint, verified: %s", output_dir)
        return True
    problem = _problem(done.stdout)
    logger.error(
        "no universal checkpoint of %s: %s: %s; fix: %s",
        input_dir,
        problem.get("code", f"exit code {done.returncode}"),
        problem.get("detail", "reshard said no more"),
        problem.get("fix", "see the lines above"),
    )
    return False


def _problem(stdout: str) -> dict[str, Any]:
    """The error object on the last line; empty if the process was killed before it wrote one."""
    try:
        found: dict[str, Any] = json.loads(stdout.splitlines()[-1])["error"]
    except (IndexError, KeyError, TypeError, ValueError):
        return {}
    return found


def install(saver: type[Any] | None = None) -> None:
    """Have DLRover convert with `reshard`. To be called in the agent's process, before it launches.

    Args:
        saver: The class to change; DLRover's saver of DeepSpeed checkpoints by default.

    Raises:
        UnsupportedDlroverError: There is no such method here.
    """
    if saver is None:
        module, name = _SAVER
        try:
            saver = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise UnsupportedDlroverError(f"{_installed()} has no {module}.{name}: {error}") from error
    theirs = getattr(saver, "ucp", None)
    found = list(inspect.signature(theirs).parameters) if callable(theirs) else []
    if found != _PARAMETERS:
        said = f"`ucp({', '.join(found)})`" if found else "no `ucp`"
        raise UnsupportedDlroverError(
            f"{_installed()} has {said} in {getattr(saver, '__name__', saver)}, not `ucp({', '.join(_PARAMETERS)})`: "
            "it came after 0.6.1, with pull request 1672"
        )
    setattr(saver, "ucp", ucp)  # noqa: B010 - a type checker cannot know the attribute


def _installed() -> str:
    try:
        return f"dlrover {version('dlrover')}"
    except PackageNotFoundError:
        return "dlrover, which is not installed here,"


if __name__ == "__main__":
    install()
    sys.exit(importlib.import_module(_LAUNCHER).main())
