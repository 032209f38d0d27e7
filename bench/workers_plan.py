"""What it costs a worker to join a job of a trillion parameters on 1,024 ranks: planning, runs, records, calls.

The source is a store in which every call takes `_DELAY_S`. Nothing is written; the records of one run are made up from
its chunks, to see how long its segments are.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cases import environment
from sparse import dense, write_sparse_checkpoint

if TYPE_CHECKING:
    from reshard_engine.storage.protocol import Store

_PARAMETERS, _TENSORS, _RANKS = 10**12, 1_500, 1_024
_DELAY_S = 0.03
_TAIL = 64 << 10


def plan_facts() -> list[dict[str, Any]]:
    """One row for each target, measured in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="reshard-bench-") as name:
        source = Path(name) / "run"
        write_sparse_checkpoint(source, dense(_PARAMETERS, _TENSORS), stage=3, ranks=_RANKS)
        _fill_holes(source)
        return [_measured(source, target) for target in ({"to": "universal"},)]


def _fill_holes(source: Path) -> None:
    """Give the last tensor of each file random bytes where they share a block with the directory: zeros would pack."""
    for path in source.rglob("*optim_states.pt"):
        size = path.stat().st_size
        with zipfile.ZipFile(path) as archive, path.open("r+b") as file:
            first = archive.start_dir
            last = max((i for i in archive.infolist() if i.file_size > _TAIL), key=lambda i: i.header_offset)
            end = min(last.header_offset + last.file_size, first)
            file.seek(max(end - _TAIL, size - 2 * _TAIL))
            file.write(random.randbytes(max(0, end - file.tell())))


def _measured(source: Path, target: dict[str, Any]) -> dict[str, Any]:
    request = {
        "source": {"url": f"mem://{str(source)[1:]}"},
        "target": str(source.parent / "out"),
        "memory_limit_bytes": 8 << 30,
        **target,
    }
    command = [sys.executable, __file__, json.dumps(request)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment())
    return json.loads(ran.stdout.splitlines()[-1])


class _SlowStore:
    """Local files as another store shows them. It counts its reads. Each call takes `_DELAY_S`."""

    scheme = "mem"

    def __init__(self) -> None:
        from reshard_engine.storage.local import LocalStore

        self._files = LocalStore()
        self.lengths: list[int] = []

    def list_directory(self, path: str, *, most: int | None = None) -> Any:
        time.sleep(_DELAY_S)
        found = self._files.list_directory("/" + path, most=most)
        return replace(found, files=tuple(replace(i, path=i.path[1:]) for i in found.files))

    def list_tree(self, path: str) -> Any:
        time.sleep(_DELAY_S)
        return [replace(i, path=i.path[1:]) for i in self._files.list_tree("/" + path)]

    def stat(self, path: str) -> Any:
        time.sleep(_DELAY_S)
        found = self._files.stat("/" + path)
        return None if found is None else replace(found, path=path)

    def read_into(self, info: Any, offset: int, buffer: memoryview) -> None:
        self.lengths.append(len(buffer))
        time.sleep(_DELAY_S)
        self._files.read_into(replace(info, path="/" + info.path), offset, buffer)


def _facts(request: dict[str, Any]) -> dict[str, Any]:
    from reshard.models.jobs import ConvertRequest
    from reshard_engine.distributed.runs import cut_into_runs
    from reshard_engine.distributed.segments import to_segment
    from reshard_engine.execute.journal import ChunkRecord, UnitRecord
    from reshard_engine.operations.conversion import Conversion
    from reshard_engine.storage.locations import serving

    store = _SlowStore()
    began, used = time.monotonic(), time.process_time()
    with serving(store.scheme, cast("Store", store)):
        conversion = Conversion.prepare(ConvertRequest.model_validate(request))
    planned, used = time.monotonic(), time.process_time() - used
    waves = cut_into_runs(conversion.plan, conversion.layout.files)
    cut = time.monotonic()
    runs = [run for wave in waves.runs for run in wave]
    largest = max(runs, key=lambda r: len(waves.units_of(r)))
    records = [
        UnitRecord(u.index, tuple(ChunkRecord(c, 2**32 - 1, "0" * 32) for c in u.chunks))
        for u in waves.units_of(largest)
    ]
    return {
        "to": request["to"],
        "plan_s": round(planned - began, 1),
        "plan_cpu_s": round(used, 1),
        "plan_digest": conversion.plan.digest,
        "source_reads": len(store.lengths),
        "source_read_mb": round(sum(store.lengths) / 1e6, 1),
        "cut_into_runs_s": round(cut - planned, 2),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "plan_json_mb": round(len(json.dumps(conversion.plan.to_json())) / 1e6, 1),
        "written_tb": round(conversion.plan.write_bytes / 1e12, 2),
        "files": len(conversion.plan.files),
        "units": len(conversion.plan.units),
        "runs": len(runs),
        "runs_of_the_last_wave": len(waves.runs[1]),
        "last_wave_share": round(waves.last_bytes / conversion.plan.write_bytes, 5),
        "largest_run_gb": round(max(sum(u.length_bytes for u in waves.units_of(r)) for r in runs) / 1e9, 1),
        "records_of_the_longest_run_kb": round(len(to_segment(records)) / 1e3, 1),
        "records_of_the_job_mb": round(sum(len(u.chunks) for w in waves.units for u in w) * _line_bytes(records) / 1e6),
        "claims_and_last_segments": 2 * len(runs),
        "records_without_segments": len(conversion.plan.units),
    }


def _line_bytes(records: list[Any]) -> float:
    return sum(len(r.to_line()) for r in records) / max(1, sum(len(r.chunks) for r in records))


if __name__ == "__main__":
    print(json.dumps(_facts(json.loads(sys.argv[1]))))
