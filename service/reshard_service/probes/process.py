"""A process with limited memory and CPU time that reads a checkpoint's metadata for the API.

Its command line is `python -m reshard_service.probes.process`.

The API process itself never parses untrusted files. The probe reads JSON requests from stdin, one in a line, and writes
for each one JSON object to stdout, `{"result": ...}` or `{"problem": ...}`, and then an empty line. Each request has a
process of its own, with the limits of its own (`warm_process`).
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any, BinaryIO

from reshard.errors import ReshardError, SourceError, as_text
from reshard.local import load_engine
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec
from reshard_engine.storage.urls import confine
from reshard_engine.warm_process import next_command
from reshard_jobs.logs import configure_logs

_RESERVE_BYTES = 64 << 20
"""Bytes kept free for the answer of a probe that ran into its limit: the frames of the error still hold the memory."""


def look(op: str, body: dict[str, Any]) -> dict[str, Any]:
    """Call the engine and return its answer as JSON values.

    Raises:
        ReshardError: Any error of the engine.
    """
    engine = load_engine()
    if op == "pictures":
        return engine.planned_pictures(ConvertRequest.model_validate(body["request"]), body["tensor"]).model_dump(
            mode="json"
        )
    if op == "plan":
        return engine.plan(ConvertRequest.model_validate(body)).model_dump(mode="json")
    return engine.inspect(SourceSpec.model_validate(body)).model_dump(mode="json")


def main() -> int:
    """Answer requests; the exit status of a child is 0 whenever an answer was written."""
    configure_logs()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    asked = json.loads(next_command(sys.stdin.buffer, lambda: _write(answers, b"\n")))
    memory_bytes, cpu_s = asked["memory_bytes"], asked["cpu_s"]
    whole_bytes = memory_bytes + _RESERVE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, whole_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        confine(asked["roots"], asked["write_roots"])
        answer: dict[str, Any] = {"result": look(asked["op"], asked["body"])}
    except ReshardError as error:
        answer = {"problem": error.to_problem()}
    except MemoryError:
        resource.setrlimit(resource.RLIMIT_AS, (whole_bytes, whole_bytes))
        answer = {
            "problem": SourceError(
                "checkpoint.too_large",
                f"reading the checkpoint's metadata needs more than {memory_bytes} bytes of memory",
                fix="run `reshard inspect` on a machine that allows more memory",
            ).to_problem()
        }
    _write(answers, json.dumps(as_text(answer)).encode() + b"\n")
    return 0


def _write(answers: BinaryIO, line: bytes) -> None:
    # An unbuffered file may take a part of a long line.
    rest = memoryview(line)
    while rest:
        rest = rest[answers.write(rest) :]


if __name__ == "__main__":
    # An orderly end would touch, and so copy, most pages that this process shares with its parent: a third of its time.
    os._exit(main())
