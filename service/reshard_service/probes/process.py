"""The processes with limits in which the API lets the engine read: probes, and the engines of virtual layouts.

The API process itself never parses untrusted files.

`python -m reshard_service.probes.process` is a probe: it reads metadata. It takes JSON requests from stdin, one in a
line, and writes for each one JSON object to stdout, `{"result": ...}` or `{"problem": ...}`, and then an empty line.
Each request has a process of its own, with the limits of its own (`warm_process`).

`python -m reshard_service.probes.process layout` makes the bytes of one virtual layout as long as the API wants. It
imports the engine, and then waits for its layout. Its stdin is a socket, over which the API sends the end of a new
connection for each call. A call is a JSON object in a line. The first one opens the layout, and its answer is like a
probe's. Each other one asks for a range of a file; its answer is such a line, and after `{"result": null}` the bytes. A
connection that ends early has met an error, which is in the log: nobody can be told of it in the middle of a file.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO

from reshard.engine import VirtualCheckpoint, load_engine
from reshard.errors import JobError, ReshardError, SourceError, as_text, exhaustion_of, printable
from reshard.models.jobs import ConvertRequest, InspectRequest
from reshard_engine.storage.urls import confine
from reshard_engine.warm_process import die_with_parent, import_engine, limit_memory, next_command, open_reserve
from reshard_jobs.logs import configure_logs

logger = logging.getLogger(__name__)

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
    asked = InspectRequest.model_validate(body)
    return engine.inspect(asked, launch=asked.launch).model_dump(mode="json")


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
    except (RuntimeError, OSError) as error:
        if (exhausted := exhaustion_of(error)) is None:
            raise
        answer = {"problem": exhausted.to_problem()}
    except MemoryError:
        resource.setrlimit(resource.RLIMIT_AS, (whole_bytes, whole_bytes))
        answer = {
            "problem": SourceError(
                "checkpoint.too_large",
                f"reading the checkpoint's metadata needs more than {memory_bytes} bytes of memory",
                fix="run `reshard inspect` on a machine that allows more memory",
            ).to_problem()
        }
    _write(answers, _line(answer))
    return 0


def _line(answer: dict[str, Any]) -> bytes:
    return json.dumps(as_text(answer)).encode() + b"\n"


def _write(answers: BinaryIO, line: bytes) -> None:
    # An unbuffered file may take a part of a long line.
    rest = memoryview(line)
    while rest:
        rest = rest[answers.write(rest) :]


# The engine of one virtual layout.

PIECE_BYTES = 1 << 20
"""Bytes that a call makes at once. They come from the layout's blocks, of which the next ones are made meanwhile."""


def serve_layout() -> int:
    """Open a layout and answer for its bytes until the API closes the socket, or ends."""
    configure_logs()
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=os.dup(0))
    # Output that a library prints goes to the log.
    os.dup2(2, 1)
    import_engine()
    opened: list[VirtualCheckpoint] = []
    if (first := _next_connection(control)) is None or not _answer(first, lambda asked: _open(asked, opened)):
        return 1
    while (connection := _next_connection(control)) is not None:
        try:
            threading.Thread(target=_serve, args=(opened[0], connection), daemon=True).start()
        except RuntimeError as error:
            problem = exhaustion_of(error)
            if problem is None:
                raise
            refused = {"problem": problem.to_problem()}
            with connection, suppress(OSError):
                connection.sendall(_line(refused))
    return 0


def _next_connection(control: socket.socket) -> socket.socket | None:
    """The end of the next call's connection; None when the API has closed its end."""
    # Each byte has one descriptor. Two bytes that were read together would lose one.
    data, descriptors, _flags, _address = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=descriptors[0]) if data else None


def _answer(connection: socket.socket, call: Callable[[dict[str, Any]], object]) -> bool:
    """Answer a call with what a function returns, or with its error; false after an error."""
    with connection, connection.makefile("rb") as lines, suppress(BrokenPipeError, ConnectionResetError):
        answer, done = _outcome(lambda: call(json.loads(lines.readline())))
        connection.sendall(_line(answer))
        return done
    return False


def _outcome(call: Callable[[], object]) -> tuple[dict[str, Any], bool]:
    try:
        return {"result": call()}, True
    except ReshardError as error:
        problem = error
    except MemoryError:
        open_reserve()
        logger.warning("the engine of a layout ran into its memory limit", exc_info=True)
        problem = SourceError(
            "checkpoint.too_large",
            "serving the layout needs more memory than its engine process may take",
            fix="ask the operator for more of RESHARD_ENGINE_MEMORY, or convert the checkpoint",
        )
    except Exception as error:
        # The log gets the traceback; the answer does not.
        logger.exception("unexpected error in the engine of a layout")
        bug = JobError("internal.error", "the engine met an unexpected error; the service's log has the details")
        problem = exhaustion_of(error) or bug
    return {"problem": problem.to_problem()}, False


def _open(asked: dict[str, Any], opened: list[VirtualCheckpoint]) -> dict[str, Any]:
    limit_memory(asked["memory_bytes"])
    confine(asked["roots"], asked["write_roots"])
    request = ConvertRequest.model_validate(asked["request"])
    # With exact sums, the bytes are those that a conversion writes.
    layout = load_engine().open_layout(request, exact_crcs=True, compare=asked["compare"])
    opened.append(layout)
    return {
        "content_digest": layout.content_digest,
        "source_digest": layout.source_digest,
        "source_format": layout.source_format,
        "tag": layout.tag,
        "compared": layout.compared,
        "files": [f.model_dump(mode="json") for f in layout.files],
        "warnings": list(layout.warnings),
        "not_carried": [n.model_dump(mode="json") for n in layout.not_carried],
    }


def _has_gone(connection: socket.socket) -> bool:
    """True if the API has closed a connection: the client of its request has gone, or waits no longer."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _serve(layout: VirtualCheckpoint, connection: socket.socket) -> None:
    """Send a range of a file, or the reason why not."""
    with connection, connection.makefile("rb") as lines, suppress(BrokenPipeError, ConnectionResetError):
        line = lines.readline()
        if not line:
            return
        asked = json.loads(line)
        path, at, end = asked["path"], asked["offset"], asked["offset"] + asked["length"]
        memory = memoryview(bytearray(min(PIECE_BYTES, asked["length"])))
        begun, gone = False, partial(_has_gone, connection)
        while not begun or at < end:
            piece = memory[: end - at]
            answer, done = _outcome(lambda: layout.read_into(path, at, piece, should_stop=gone))  # noqa: B023
            if not begun:
                connection.sendall(_line(answer))
            elif not done and not gone():
                problem = answer["problem"]
                text = f"{problem['code']}: {problem['detail']}"
                logger.warning("%s ended in the middle of a response: %s", printable(path), printable(text))
            if not done:
                return
            connection.sendall(piece)
            begun, at = True, at + len(piece)


if __name__ == "__main__":
    # An orderly end would touch, and so copy, most pages that this process shares with its parent: a third of its time.
    os._exit(serve_layout() if sys.argv[1:] == ["layout"] else main())
