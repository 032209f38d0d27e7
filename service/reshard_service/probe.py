"""A look at a checkpoint in a limited process: `python -m reshard_service.probe OP MEMORY_BYTES CPU_S`.

The API never parses what strangers wrote. It reads a JSON request from stdin and writes one JSON
object to stdout, `{"result": ...}` or `{"problem": ...}`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

from reshard.errors import ReshardError, SourceError, as_text
from reshard.local import load_engine
from reshard.models import ConvertRequest, SourceSpec

_RESERVE_BYTES = 64 << 20
"""For the answer of a probe that ran into its limit: what filled the memory is still held by the error's frames."""


def look(op: str, body: bytes) -> dict[str, Any]:
    """The engine's answer as JSON values.

    Raises:
        ReshardError: What the engine found.
    """
    engine = load_engine()
    if op == "plan":
        return engine.plan(ConvertRequest.model_validate_json(body)).model_dump(mode="json")
    return engine.inspect(SourceSpec.model_validate_json(body)).model_dump(mode="json")


def main() -> int:
    """Answer one request; the exit status is 0 whenever an answer was written."""
    op, memory_bytes, cpu_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    whole_bytes = memory_bytes + _RESERVE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, whole_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    body = sys.stdin.buffer.read()
    try:
        answer: dict[str, Any] = {"result": look(op, body)}
    except ReshardError as error:
        answer = {"problem": error.to_problem()}
    except MemoryError:
        resource.setrlimit(resource.RLIMIT_AS, (whole_bytes, whole_bytes))
        answer = {
            "problem": SourceError(
                "checkpoint.too_large",
                f"looking at the checkpoint needs more than {memory_bytes} bytes of memory",
                fix="run `reshard inspect` where more memory is allowed",
            ).to_problem()
        }
    with answers:
        json.dump(as_text(answer), answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
