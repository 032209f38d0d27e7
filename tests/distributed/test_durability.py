"""On a shared file system, a worker's data are on the disk before the record that names them, and before the commit.

The calls of the operating system are recorded in the order in which a real worker makes them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from checkpoints import write_zero_checkpoint

from faults.os_faults import disturbed_calls
from reshard.choices import TargetFormat
from reshard.engine import load_engine
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec
from reshard.shared_work import SharedWork
from reshard_engine.execute.journal import records_in
from reshard_engine.operations.conversion import Conversion
from reshard_engine.testing.stores import Steps

_T = TypeVar("_T")
PARAMETERS = [(f"layer.{n}.weight", (64, 65)) for n in range(12)]
WRITES = {"write", "pwrite"}


class Recorder(Steps):
    """The calls in order, and the segments at the moment when they get their names."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, str]] = []

    def step(self, name: str, path: str, effect: Callable[[], _T], short: Callable[[], _T] | None = None) -> _T:
        text = Path(path).read_text() if name == "replace" and "/segment-" in path else ""
        result = super().step(name, path, effect, short)
        self.calls.append((name, path, text))
        return result


def recorded(request: ConvertRequest, root: Path) -> list[tuple[str, str, str]]:
    """The calls of one worker, in a process of its own: an audit hook stays for ever."""
    answer = root.parent / "calls.json"
    pid = os.fork()
    if not pid:
        status = 1
        try:
            recorder = Recorder()
            with disturbed_calls(str(root), recorder):
                load_engine().convert(request, work=SharedWork(number=0, count=2, lease_s=0.5))
            answer.write_text(json.dumps(recorder.calls))
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    return [(name, path, text) for name, path, text in json.loads(answer.read_text())]


def test_a_worker_syncs_its_data_before_their_record_and_before_the_commit(tmp_path: Path) -> None:
    write_zero_checkpoint(tmp_path / "run", PARAMETERS, stage=2, ranks=2)
    root = tmp_path / "jobs"
    root.mkdir()
    # Almost no file is cut into chunks, so one unit writes it.
    request = ConvertRequest(
        source=SourceSpec(url=str(tmp_path / "run")),
        target=str(root / "out"),
        to=TargetFormat.UNIVERSAL,
        part_bytes=64 << 10,
        threads=2,
    )
    files = Conversion.prepare(request).plan.files
    calls = recorded(request, root)
    whole = 0
    for at, (_, _, text) in enumerate(calls):
        if not text:
            continue
        synced = max((n for n in range(at) if calls[n][0] == "syncfs"), default=-1)
        for record in records_in(text.encode()):
            for entry in record.chunks:
                path, size = files[entry.chunk.file].path, files[entry.chunk.file].size_bytes
                if entry.chunk.length_bytes < size:
                    continue  # other units write this file, too
                whole += 1
                written = [n for n, (name, p, _) in enumerate(calls) if name in WRITES and p.endswith(f"/{path}")]
                assert written, f"{path} was not written"
                assert max(written) < synced < at, f"the record of {path} was written before its data were synced"
    assert whole >= 30
    committed = next(n for n, (name, p, _) in enumerate(calls) if name == "renameat2" and "/.out.reshard-" in p)
    staged = [n for n, (name, p, _) in enumerate(calls) if name in WRITES and "/.out.reshard-" in p and n < committed]
    last = max(n for n in staged if ".workers/" not in calls[n][1] and ".journal" not in calls[n][1])
    assert any(calls[n][0] == "syncfs" for n in range(last, committed)), "the target was renamed before it was synced"
